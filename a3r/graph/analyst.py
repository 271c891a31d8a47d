"""Analyst: checks that runs did what their blueprints say, computes the numbers, reads the locked tree.

No model and no person chooses here: the branch follows from the rows, and its trace is kept.
"""

from __future__ import annotations

from dataclasses import asdict

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from a3r import estimates, integrity, store
from a3r.analysis import contrasts, evidence
from a3r.decisions import GO_ON, affordable, after_noise_floor
from a3r.estimates import RunRecord
from a3r.graph.state import Deps, StudyState
from a3r.prereg.plan import Plan
from a3r.prereg.tree import Leaf, decide
from a3r.store import RunView
from experiments_db import writes
from experiments_db.models import ExperimentStatus, OwnerType, Severity


def analyst(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The analyst's graph."""

    def check_runs(state: StudyState) -> StudyState:
        """Findings as rows; a run that is not what its blueprint says is quarantined, counted, and in no estimate."""
        plan = store.plan_of(deps.database, state["study_id"])
        views = store.runs(deps.database, state["study_id"], state["stage"])
        whole = [view for view in views if view.status is ExperimentStatus.DONE]
        records = store.records(deps.database, plan, whole)
        for view, record in zip(whole, records, strict=True):
            facts = store.facts(deps.database, view.experiment_id)
            for problem in integrity.check_run(plan, plan.arm(view.arm), record, facts):
                with deps.database.write() as session:
                    writes.add_finding(
                        session,
                        OwnerType.EXPERIMENT,
                        view.experiment_id,
                        detector=problem.detector,
                        severity=problem.severity,
                        message=problem.message,
                    )
                    if problem.severity is Severity.HIGH:
                        writes.quarantine(session, view.experiment_id, problem.message)
                deps.tell(
                    "finding", arm=view.arm, seed=view.seed, severity=problem.severity.value, text=problem.message
                )
        stage = store.stage_id(deps.database, state["study_id"], state["stage"])
        before = [view for view in look_at(deps, state) if view.stage < state["stage"]]
        earlier = [view for view in before if view.status is ExperimentStatus.DONE]
        for problem in integrity.check_seeds(records, store.records(deps.database, plan, earlier)):
            with deps.database.write() as session:
                writes.add_finding(
                    session,
                    OwnerType.STAGE,
                    stage,
                    detector=problem.detector,
                    severity=problem.severity,
                    message=problem.message,
                )
            deps.tell("finding", severity=problem.severity.value, text=problem.message)
        return {}

    def estimate(state: StudyState) -> StudyState:
        """Every number that this look at the data gives, as rows."""
        plan = store.plan_of(deps.database, state["study_id"])
        records = store.records(deps.database, plan, look_at(deps, state))
        stage = state["stage"]
        drafts = estimates.noise_floor(plan, records) if stage == 0 else estimates.comparison(plan, records, stage)
        store.store_estimates(deps.database, state["study_id"], stage, drafts)
        numbers = {draft.key: draft for draft in drafts}
        if sd := numbers.get("noise/sd"):
            told = numbers.get("noise/smallest_difference/seeds")
            deps.tell(
                "noise_floor",
                sd=sd.value,
                ci=sd.ci,
                smallest_difference=told.value if told else None,
                seeds=len(plan.seeds),
                power=plan.power,
                unit=plan.metric.unit,
            )
        return {}

    def decide_stage(state: StudyState) -> StudyState:
        """Read the locked tree for every contrast, and keep the way it took."""
        plan = store.plan_of(deps.database, state["study_id"])
        records = store.records(deps.database, plan, look_at(deps, state))
        if state["stage"] == 0:
            return {"goes_on": _after_noise_floor(deps, state, plan, records)}
        runs = [estimates.run_of(plan, record) for record in records]
        can_extend, why = affordable(plan, look_at(deps, state), state["stage"])
        leaves: list[Leaf] = []
        ids = {key: row.id for key, row in store.estimates(deps.database, state["study_id"]).items()}
        stage = store.stage_id(deps.database, state["study_id"], state["stage"])
        for n, contrast in enumerate(contrasts(plan, runs)):
            seen = evidence(plan, contrast, times_extended=state["stage"] - 1, can_extend=can_extend)
            verdict = decide(plan.tree, seen)
            leaves.append(verdict.leaf)
            read_from = [f"{kind}/{contrast.arm}/look{state['stage']}" for kind in ("contrast", "equivalence")]
            with deps.database.write() as session:
                writes.add_decision(
                    session,
                    stage,
                    n=n,
                    node_id=verdict.trace[-1].node,
                    branch=verdict.leaf.value,
                    predicate_trace=[asdict(visited) for visited in verdict.trace],
                    estimates=[ids[key] for key in read_from],
                    arm_key=contrast.arm,
                    comment=f"{contrast.arm} against {plan.reference.key}; {why}",
                )
            trace = [asdict(visited) for visited in verdict.trace]
            deps.tell("decision", arm=contrast.arm, branch=verdict.leaf.value, trace=trace)
        # Seeds are added to every arm, so that all stay comparable; the tree is then read anew for each.
        return {"goes_on": Leaf.ADD_SEEDS in leaves}

    graph = StateGraph(StudyState)
    graph.add_node("check_runs", check_runs)
    graph.add_node("estimate", estimate)
    graph.add_node("decide_stage", decide_stage)
    graph.add_edge(START, "check_runs")
    graph.add_edge("check_runs", "estimate")
    graph.add_edge("estimate", "decide_stage")
    graph.add_edge("decide_stage", END)
    return graph.compile()


def look_at(deps: Deps, state: StudyState) -> list[RunView]:
    """The runs that the numbers of this stage come from: of the reference alone, or of all stages so far."""
    return [run for run in store.runs(deps.database, state["study_id"]) if run.stage <= state["stage"]]


def _after_noise_floor(deps: Deps, state: StudyState, plan: Plan, records: list[RunRecord]) -> bool:
    """Keep what the tree says after the first stage; returns whether the study goes on."""
    leaf, trace = after_noise_floor(plan, records)
    branch = GO_ON if leaf is None else leaf.value
    visited = [asdict(each) for each in trace]
    stage = store.stage_id(deps.database, state["study_id"], 0)
    with deps.database.write() as session:
        writes.add_decision(
            session,
            stage,
            node_id=trace[-1].node if trace else "none",
            branch=branch,
            predicate_trace=visited,
            arm_key=plan.reference.key,
        )
    deps.tell("decision", arm=plan.reference.key, branch=branch, trace=visited)
    return leaf is None
