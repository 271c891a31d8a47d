"""Leader: takes the question in, scopes it, draws up a plan, has it approved, and locks it."""

from __future__ import annotations

from typing import Any, Literal

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

from a3r import store
from a3r.errors import PlanError
from a3r.executor import supervise
from a3r.graph.state import Deps, StudyState
from a3r.planner.design import Wishes, design
from a3r.planner.offline import read
from a3r.prereg.check import check
from a3r.prereg.plan import Plan
from experiments_db.models import StudyStatus


def leader(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The leader's graph."""

    def question(state: StudyState) -> str:
        return store.study(deps.database, state["study_id"]).question

    def intake(state: StudyState) -> StudyState:
        """Take in what was asked."""
        deps.tell("phase", phase="intake", text=question(state))
        return {"stage": 0}

    def scope(state: StudyState) -> StudyState:
        """Which words of the question became what."""
        reading = read(question(state), deps.catalogue)
        deps.tell("scope", read_as=[list(pair) for pair in reading.read_as], assumed=list(reading.assumed))
        return {}

    def draw_plan(state: StudyState) -> StudyState:
        """The plan as a file: it is not locked yet, so it is no fact yet."""
        wishes = Wishes(**store.study(deps.database, state["study_id"]).wishes)
        plan = design(read(question(state), deps.catalogue), wishes)
        supervise.write_whole(deps.paths(state).plan, plan.model_dump(mode="json"))
        return {"plan_sha": plan.sha256}

    def check_plan(state: StudyState) -> StudyState:
        """Totality, termination, one factor, budget, power, and two hundred invented studies in each world."""
        plan = load_draft(deps, state)
        checked = check(plan)
        deps.tell("checked", plan=plan, checked=checked)
        if checked.failures:
            raise PlanError("; ".join(f"{each.name}: {each.detail}" for each in checked.failures))
        return {}

    def approve(state: StudyState) -> Command[Literal["lock_plan", "turn_down"]]:
        """Wait for a person, or for --yes."""
        answer: dict[str, Any] = interrupt({"kind": "approve", "plan_sha": state["plan_sha"]})
        is_approved = bool(answer["is_approved"])
        return Command(update={"is_approved": is_approved}, goto="lock_plan" if is_approved else "turn_down")

    def lock_plan(state: StudyState) -> StudyState:
        """From here on the plan can't be changed."""
        plan = load_draft(deps, state)
        sha = store.lock(deps.database, state["study_id"], plan)
        store.set_status(deps.database, state["study_id"], StudyStatus.RUNNING)
        deps.tell("locked", sha256=sha, question=plan.question)
        return {"plan_sha": sha}

    def turn_down(state: StudyState) -> StudyState:
        """The plan was not wanted."""
        store.set_status(deps.database, state["study_id"], StudyStatus.ABANDONED, "the plan was turned down")
        return {}

    graph = StateGraph(StudyState)
    graph.add_node("intake", intake)
    graph.add_node("scope", scope)
    graph.add_node("draw_plan", draw_plan)
    graph.add_node("check_plan", check_plan)
    graph.add_node("approve", approve)
    graph.add_node("lock_plan", lock_plan)
    graph.add_node("turn_down", turn_down)
    graph.add_edge(START, "intake")
    graph.add_edge("intake", "scope")
    graph.add_edge("scope", "draw_plan")
    graph.add_edge("draw_plan", "check_plan")
    graph.add_edge("check_plan", "approve")
    graph.add_edge("lock_plan", END)
    graph.add_edge("turn_down", END)
    return graph.compile()


def load_draft(deps: Deps, state: StudyState) -> Plan:
    """The plan as it was drawn up, and not another one.

    Raises:
        PlanError: the file was changed since.
    """
    path = deps.paths(state).plan
    plan = Plan.model_validate_json(path.read_bytes())
    if plan.sha256 != state["plan_sha"]:
        raise PlanError(f"{path} is not the plan that was shown; ask again with `a3r research`")
    return plan
