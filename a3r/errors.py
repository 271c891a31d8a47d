"""Everything that can go wrong between a question and a report, as one tree.

    A3RError
    ├── UsageError           the user asked for what can't be          exit 2
    │   ├── QuestionError    a question the planner can't read
    │   └── PlanError        a plan that fails its checks
    ├── StudyBusyError       another process works on the study        exit 3
    ├── StudyVersionError    another version of the graph began it     exit 4
    ├── JobError             a job that can't be started or read
    ├── ReportError          a report that would say what no row says
    └── StoppedError         stopped by the user; resume goes on       exit 130

The message is for the person who typed the command: the value, the limit, the way out.
"""

from __future__ import annotations


class A3RError(Exception):
    """Base of what a3r raises on purpose; the command prints it and ends with `exit_code`."""

    exit_code = 1


class UsageError(A3RError, ValueError):
    """The user asked for something that can't be: a wrong flag, value, name or folder."""

    exit_code = 2


class QuestionError(UsageError):
    """A question the offline planner can't read. The message says what it can."""


class PlanError(UsageError):
    """A plan that fails one of its checks, so nothing is started."""


class StudyBusyError(A3RError):
    """Another living process holds the study's lease."""

    exit_code = 3


class StudyVersionError(A3RError):
    """The study was begun by a graph that this version can't continue."""

    exit_code = 4


class JobError(A3RError):
    """A job that can't be started, or whose folder does not hold what was submitted."""


class ReportError(A3RError):
    """A report that would state what no row of the database says."""


class StoppedError(A3RError):
    """The user stopped the command. Finished runs are kept and `a3r resume` goes on."""

    exit_code = 130
