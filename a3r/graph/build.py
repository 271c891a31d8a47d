"""The whole graph.

    leader ─▶ designer ─▶ coder ─▶ runner ─▶ analyst ─▶ reviewer ─▶ END
      │          ▲                             │
      ▼          └──────── next stage ─────────┘
     END (the plan was turned down)

Stages: the noise floor, the other arms, and once more seeds for all arms where the locked tree asks for them.
"""

from __future__ import annotations

from typing import Literal

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from a3r.graph.analyst import analyst
from a3r.graph.coder import coder
from a3r.graph.designer import designer
from a3r.graph.leader import leader
from a3r.graph.reviewer import reviewer
from a3r.graph.runner import runner
from a3r.graph.state import Deps, StudyState


def build_graph(
    deps: Deps, checkpointer: BaseCheckpointSaver[str] | None = None
) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The study's graph, ready to run."""

    def next_stage(state: StudyState) -> StudyState:
        """On to the next stage."""
        return {"stage": state["stage"] + 1}

    graph = StateGraph(StudyState)
    graph.add_node("leader", leader(deps))
    graph.add_node("designer", designer(deps))
    graph.add_node("coder", coder(deps))
    graph.add_node("runner", runner(deps))
    graph.add_node("analyst", analyst(deps))
    graph.add_node("next_stage", next_stage)
    graph.add_node("reviewer", reviewer(deps))
    graph.add_edge(START, "leader")
    graph.add_conditional_edges("leader", after_leader)
    graph.add_edge("designer", "coder")
    graph.add_edge("coder", "runner")
    graph.add_edge("runner", "analyst")
    graph.add_conditional_edges("analyst", after_analyst)
    graph.add_edge("next_stage", "designer")
    graph.add_edge("reviewer", END)
    return graph.compile(checkpointer=checkpointer)


def after_leader(state: StudyState) -> Literal["designer", "__end__"]:
    """Only an approved plan is run."""
    return "designer" if state.get("is_approved") else "__end__"


def after_analyst(state: StudyState) -> Literal["next_stage", "reviewer"]:
    """Where the tree leads."""
    return "next_stage" if state["goes_on"] else "reviewer"
