"""Where a study's files lie under the home folder.

HOME/experiments.db              facts of every study
HOME/jobs/KEY/                   one folder a job: what was run, its output, how it ended
HOME/studies/ID/plan.json        the plan before it is locked
                graph.db         where the graph stands: ids only
                lock             held by the process that works on the study
                projects/ARM/    the rendered training project of each arm
                runs/ARM-sSEED/  a run's server, journal, checkpoints
                report/          report.md, report.html, report.json, curves
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments_db import home


@dataclass(frozen=True, slots=True)
class Home:
    """The home folder."""

    root: Path

    @property
    def jobs(self) -> Path:
        """The local executor's folder."""
        return self.root / "jobs"

    def stored(self, path: Path) -> str:
        """A place as rows name it."""
        return home.stored(path, self.root)

    def place(self, stored: str) -> Path:
        """Where a place that a row names lies now."""
        return home.place(stored, self.root)

    def study(self, study_id: str) -> StudyPaths:
        """The files of one study."""
        return StudyPaths(self.root / "studies" / study_id)


@dataclass(frozen=True, slots=True)
class StudyPaths:
    """The files of one study."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan before it is locked; afterwards the database has it."""
        return self.root / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Where the graph stands."""
        return self.root / "graph.db"

    @property
    def lock(self) -> Path:
        """Held by the process that works on the study."""
        return self.root / "lock"

    @property
    def report(self) -> Path:
        """The report's folder."""
        return self.root / "report"

    def project(self, arm: str) -> Path:
        """The rendered project of an arm."""
        return self.root / "projects" / arm

    def run(self, arm: str, seed: int) -> Path:
        """The folder of one run."""
        return self.root / "runs" / f"{arm}-s{seed}"
