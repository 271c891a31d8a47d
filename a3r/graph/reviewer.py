"""Reviewer: turns decisions into claims, sees that each says what its rows say, and publishes the report."""

from __future__ import annotations

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from sqlmodel import select

from a3r import claims
from a3r.claims import ClaimDraft
from a3r.graph.state import Deps, StudyState
from a3r.prereg.check import check
from a3r.report import bundle as bundles
from a3r.report import publish, slots, write
from a3r.report.bundle import Bundle
from experiments_db import models, writes
from experiments_db.models import ClaimStatus, OwnerType, StudyStatus


def reviewer(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The reviewer's graph."""

    def title(bundle: Bundle) -> str:
        return next(game.title for game in deps.catalogue.games if game.name == bundle.plan.template.name)

    def draft_claims(state: StudyState) -> StudyState:
        """What each contrast came to, as a sentence with slots."""
        bundle = bundles.load(deps.database, state["study_id"])
        for draft, _ in claims.drafts(bundle):
            _store(deps, bundle, draft, ClaimStatus.DRAFT)
        return {}

    def verify_claims(state: StudyState) -> StudyState:
        """No typed number, no slot without a row, no sign or form but the decision's, no verb above the strength."""
        bundle = bundles.load(deps.database, state["study_id"])
        source = write.slots_of(bundle, title(bundle), check(bundle.plan))
        for draft, leaf in claims.drafts(bundle):
            claims.verify(draft, source, leaf, bundle.plan)
            _store(deps, bundle, draft, ClaimStatus.VERIFIED)
            deps.tell("claim", text=slots.filled(draft.text, source), strength=draft.strength.value)
        return {}

    def publish_report(state: StudyState) -> StudyState:
        """Write the report, then say that the study is done: whoever sees `done` finds the report."""
        bundle = bundles.load(deps.database, state["study_id"])
        hashes = publish.save(publish.files_of(bundle, title(bundle)), deps.paths(state).report)
        with deps.database.write() as session:
            for path, sha in hashes.items():
                writes.add_artifact(
                    session, OwnerType.STUDY, state["study_id"], "report", deps.home.stored(path), sha256=sha
                )
            writes.set_study_status(session, state["study_id"], StudyStatus.DONE)
        return {}

    graph = StateGraph(StudyState)
    graph.add_node("draft_claims", draft_claims)
    graph.add_node("verify_claims", verify_claims)
    graph.add_node("publish_report", publish_report)
    graph.add_edge(START, "draft_claims")
    graph.add_edge("draft_claims", "verify_claims")
    graph.add_edge("verify_claims", "publish_report")
    graph.add_edge("publish_report", END)
    return graph.compile()


def _store(deps: Deps, bundle: Bundle, draft: ClaimDraft, status: ClaimStatus) -> None:
    """Keep a claim with the estimates it quotes."""
    with deps.database.write() as session:
        estimates = session.exec(select(models.Estimate).where(models.Estimate.study_id == bundle.study.id))
        ids = {row.key: row.id for row in estimates}
        hypotheses = session.exec(select(models.Hypothesis).where(models.Hypothesis.prereg_id == bundle.prereg.id))
        codes = {row.code: row.id for row in hypotheses}
        quoted = slots.names(draft.text)
        writes.add_claim(
            session,
            bundle.study.id,
            draft.key,
            form=draft.form,
            text_template=draft.text,
            strength=draft.strength,
            slots={key: ids[key] for key in quoted},
            hypothesis_id=codes[draft.hypothesis] if draft.hypothesis else None,
            caveats=list(draft.caveats),
            evidence=[writes.Evidence(ids[key]) for key in quoted],
            status=status,
        )
