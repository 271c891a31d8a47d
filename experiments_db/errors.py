"""Everything that can go wrong with the experiment log, as one tree.

    ExperimentsDbError
    ├── UnavailableError        the database can't be opened, reached, or is locked too long
    │   ├── FullError           no room left on the disk
    │   ├── ReadOnlyError       the file or its folder can't be written
    │   ├── DamagedError        something in it is not as it was written
    │   └── NetworkDiskError    SQLite can't keep its promises on this file system
    ├── NewerDatabaseError      a later version of A3R has migrated it
    ├── NotFoundError           no row with this id
    ├── ConflictError           the key is taken by a row with other content
    ├── TransitionError         a job can't go from its state to this one
    ├── StaleWriterError        another process has taken the job over
    └── CollectorError          a server's events can't be followed, or are not all here yet

The message is for the person who typed the command: the value, the limit, the way out.
"""

from __future__ import annotations


class ExperimentsDbError(Exception):
    """Base of what this package raises on purpose."""


class UnavailableError(ExperimentsDbError):
    """The database can't be opened or reached, or others held it locked for too long."""


class FullError(UnavailableError):
    """No room left where the database lies. What was committed before is kept."""


class ReadOnlyError(UnavailableError):
    """The database or its folder can't be written."""


class DamagedError(UnavailableError):
    """Something in the database is not as it was written, or the file is none of SQLite's."""


class NetworkDiskError(UnavailableError):
    """The file system is shared over a network, where SQLite's write-ahead log does not work."""


class NewerDatabaseError(ExperimentsDbError):
    """A later version of A3R has migrated the database; this one can't read it safely."""


class NotFoundError(ExperimentsDbError):
    """No row has this id."""


class ConflictError(ExperimentsDbError, ValueError):
    """A row with the same key and other content is there already, or a rule of the schema refuses the row."""


class TransitionError(ExperimentsDbError, ValueError):
    """A job can't go from the state it is in to the one asked for."""


class StaleWriterError(ExperimentsDbError):
    """Another process has taken the job over since this one did."""


class CollectorError(ExperimentsDbError):
    """A server's events can't be followed, or are not all in the database yet."""


def first_line(error: BaseException | None) -> str:
    """What an error of the driver says, without the statement and hints that follow."""
    lines = str(error).splitlines()
    return lines[0] if lines else "no reason given"
