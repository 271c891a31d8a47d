"""What the graph remembers between two nodes: ids and small scalars. Facts are in the database, and win."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from a3r.executor import Executor
from a3r.paths import Home, StudyPaths
from a3r.planner.catalogue import Catalogue
from a3r.workshop import Workshop
from experiments_db.engine import Database

GRAPH_VERSION = "2"
"""Of the nodes and their order. A study of another version is refused: a renamed node would be skipped silently."""


class StudyState(TypedDict, total=False):
    """The checkpoint."""

    study_id: str
    graph_version: str
    plan_sha: str
    """Hash of the plan: drawn up first, locked once it is approved."""
    is_approved: bool
    stage: int
    """The stage at work; see `a3r.store.batch_of`."""
    goes_on: bool
    """Whether another stage follows, by where the tree led."""


class Tell(Protocol):
    """Says what happens, to whoever watches."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Approval:
    """What was said about a plan."""

    is_approved: bool
    by: str


@dataclass(slots=True)
class Deps:
    """What nodes act with. Never in the checkpoint."""

    database: Database
    home: Home
    executor: Executor
    catalogue: Catalogue
    workshop: Workshop
    tell: Tell
    fences: dict[str, int] = field(default_factory=dict)
    """By job id: the number that this process writes with."""

    def paths(self, state: StudyState) -> StudyPaths:
        """The study's files."""
        return self.home.study(state["study_id"])
