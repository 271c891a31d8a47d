"""Designer: draws up the blueprints of a stage, one for each arm, and the runs that follow from them."""

from __future__ import annotations

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from a3r import store
from a3r.graph.state import Deps, StudyState


def designer(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The designer's graph."""

    def blueprints(state: StudyState) -> StudyState:
        """The stage as rows, before anything of it is started."""
        plan = store.plan_of(deps.database, state["study_id"])
        batch = store.batch_of(plan, state["stage"])
        paths = deps.paths(state)
        folders = {
            (arm.key, seed): deps.home.stored(paths.run(arm.key, seed)) for arm in batch.arms for seed in batch.seeds
        }
        store.draw_up(
            deps.database, state["study_id"], plan, batch, folders, template_sha=deps.workshop.template_sha(plan)
        )
        deps.tell("stage", n=batch.n, kind=batch.kind, arms=[arm.key for arm in batch.arms], seeds=list(batch.seeds))
        return {}

    graph = StateGraph(StudyState)
    graph.add_node("blueprints", blueprints)
    graph.add_edge(START, "blueprints")
    graph.add_edge("blueprints", END)
    return graph.compile()
