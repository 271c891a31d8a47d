"""Coder: turns each blueprint of a stage into a training project that vibe writes."""

from __future__ import annotations

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from a3r import store
from a3r.graph.state import Deps, StudyState
from experiments_db import writes
from experiments_db.models import OwnerType


def coder(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The coder's graph."""

    def render(state: StudyState) -> StudyState:
        """One project an arm; its runs share it and differ by their seed alone."""
        plan = store.plan_of(deps.database, state["study_id"])
        blueprints = {run.arm: run.blueprint_id for run in store.runs(deps.database, state["study_id"], state["stage"])}
        for arm, blueprint_id in blueprints.items():
            folder = deps.paths(state).project(arm)
            sha = deps.workshop.build(plan, plan.arm(arm), folder)
            with deps.database.write() as session:
                writes.add_artifact(
                    session, OwnerType.BLUEPRINT, blueprint_id, "project", deps.home.stored(folder), sha256=sha
                )
            deps.tell("rendered", arm=arm, folder=str(folder), sha256=sha)
        return {}

    graph = StateGraph(StudyState)
    graph.add_node("render", render)
    graph.add_edge(START, "render")
    graph.add_edge("render", END)
    return graph.compile()
