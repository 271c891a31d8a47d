"""`a3r verify`: every number of a study again, from the scores of single held-out games.

The lock, the numbers, the decisions, the claims and the report's bytes must all come out as they are on record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from a3r import claims, estimates, store
from a3r.analysis import contrasts, evidence
from a3r.decisions import GO_ON, affordable, after_noise_floor
from a3r.errors import A3RError, ReportError
from a3r.estimates import Draft
from a3r.paths import StudyPaths
from a3r.prereg.check import check
from a3r.prereg.tree import decide
from a3r.report import bundle as bundles
from a3r.report import publish, slots, write
from a3r.report.bundle import Bundle
from experiments_db import models
from experiments_db.engine import Database
from experiments_db.models import StudyStatus

TOLERANCE = 1e-9
"""Relative. The same code on the same numbers gives the same bits; another machine's mathematics library may not."""


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that was looked at."""

    name: str
    is_ok: bool
    detail: str


def verify(database: Database, study_id: str, paths: StudyPaths, title: str) -> list[Result]:
    """Look at everything that is on record about a study.

    Args:
        title: the game's, for people.
    Raises:
        A3RError: nothing of it is locked yet.
    """
    bundle = bundles.load(database, study_id)
    rows = store.estimates(database, study_id)
    decisions = _decisions(bundle)
    return [
        Result("plan", True, f"the locked plan hashes to {bundle.prereg.sha256[:12]}"),
        _numbers(bundle, rows),
        decisions,
        _claims(bundle, title, rows, store.hypotheses(database, study_id))
        if decisions.is_ok
        else Result("claims", False, "they rest on decisions that do not follow from the tree"),
        *_files(bundle, paths, title),
    ]


def again(bundle: Bundle) -> Iterator[Draft]:
    """Every number, computed anew from the scores."""
    pairs = list(zip(bundle.runs, bundle.records, strict=True))
    for look in sorted({stage for stage, _ in bundle.decisions}):
        records = [record for run, record in pairs if run.stage <= look]
        if look == 0:
            yield from estimates.noise_floor(bundle.plan, records)
        else:
            yield from estimates.comparison(bundle.plan, records, look)


def _numbers(bundle: Bundle, rows: dict[str, models.Estimate]) -> Result:
    computed = {draft.key: draft for draft in again(bundle)}
    wrong = [
        f"{key} is on record and can't be computed"
        for key, row in rows.items()
        if key not in computed and not _is_of_runs_that_agree(row)
    ]
    for key, draft in computed.items():
        if key not in rows:
            wrong.append(f"{key} is not on record")
        else:
            wrong += [f"{key}: {problem}" for problem in _differences(draft, rows[key])]
    if wrong:
        return Result(
            "numbers", False, "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        )
    games = sum(len(each.scores) for record in bundle.records for each in record.measurements)
    return Result("numbers", True, f"{len(computed)} numbers computed again from {games} scores")


def _is_of_runs_that_agree(row: models.Estimate) -> bool:
    """Whether an earlier version put it on record: that any difference can be told by runs that deviate by nothing."""
    return row.method == "power_paired_t" and row.value == row.params["sd"] == 0


def _differences(draft: Draft, row: models.Estimate) -> list[str]:
    low, high = draft.ci or (None, None)
    if draft.ci and draft.n_seeds > 1 and math.inf in draft.ci and row.ci_lo == row.ci_hi == row.value:
        # Runs that all agree: an earlier version put an interval of no width on record, this one puts none.
        low, high = row.ci_lo, row.ci_hi
    pairs: dict[str, tuple[object, object]] = {
        "estimand": (draft.estimand, row.estimand),
        "method": (draft.method, row.method),
        "unit": (draft.unit, row.unit),
        "value": (draft.value, row.value),
        "lower bound": (low, row.ci_lo),
        "upper bound": (high, row.ci_hi),
        "coverage": (draft.level, row.level),
        "standard error over seeds": (draft.se_seed, row.se_seed),
        "standard error over games": (draft.se_eval, row.se_eval),
        "number of seeds": (draft.n_seeds, row.n_seeds),
        "number of games": (draft.n_items, row.n_items),
        "p": (draft.p, row.p),
        "adjusted p": (draft.p_adj, row.p_adj),
        "family": (draft.family, row.family),
        "parameters": (dict(draft.params), row.params),
    }
    found = [f"{name} is {there}, computed {here}" for name, (here, there) in pairs.items() if not _same(here, there)]
    if draft.inputs_sha != row.inputs_sha:
        found.append("the scores it was computed from have changed")
    return found


def _same(here: object, there: object) -> bool:
    """Equal, floats up to the tolerance; what is no finite number has no column of its own and is None there."""
    if isinstance(here, dict) and isinstance(there, dict):
        return here.keys() == there.keys() and all(_same(here[name], there[name]) for name in here)
    if isinstance(here, float) and there is None:
        return not math.isfinite(here)
    if isinstance(here, float) and isinstance(there, float | int):
        return math.isclose(here, there, rel_tol=TOLERANCE, abs_tol=1e-12)
    return here == there


def _decisions(bundle: Bundle) -> Result:
    """Every decision is read from the tree again, with the way it took."""
    plan = bundle.plan
    pairs = list(zip(bundle.runs, bundle.records, strict=True))
    for look in sorted({stage for stage, _ in bundle.decisions}):
        runs = [run for run, _ in pairs if run.stage <= look]
        records = [record for run, record in pairs if run.stage <= look]
        if look == 0:
            leaf, trace = after_noise_floor(plan, records)
            read = [(plan.reference.key, GO_ON if leaf is None else leaf.value, trace)]
        else:
            can_extend, _ = affordable(plan, runs, look)
            values = [estimates.run_of(plan, record) for record in records]
            read = []
            for contrast in contrasts(plan, values):
                seen = evidence(plan, contrast, times_extended=look - 1, can_extend=can_extend)
                verdict = decide(plan.tree, seen)
                read.append((contrast.arm, verdict.leaf.value, verdict.trace))
        recorded = [decision for stage, decision in bundle.decisions if stage == look]
        branches = [(decision.arm_key or plan.reference.key, decision.branch) for decision in recorded]
        if [(arm, branch) for arm, branch, _ in read] != branches:
            found = ", ".join(f"{branch} for {arm}" for arm, branch, _ in read)
            there = ", ".join(f"{branch} for {arm}" for arm, branch in branches)
            return Result("decisions", False, f"look {look}: the tree leads to {found}; on record is {there}")
        for (arm, _, trace), decision in zip(read, recorded, strict=True):
            ways = [asdict(visited) for visited in trace]
            if ways != decision.predicate_trace or (trace and trace[-1].node != decision.node_id):
                return Result("decisions", False, f"look {look}: for {arm} the tree is read another way than on record")
    return Result("decisions", True, f"{len(bundle.decisions)} decisions follow from the locked tree")


def _claims(
    bundle: Bundle, title: str, rows: Mapping[str, models.Estimate], hypotheses: Mapping[str, models.Hypothesis]
) -> Result:
    source = write.slots_of(bundle, title, check(bundle.plan))
    has_ended = bundle.claims or bundle.study.status is StudyStatus.DONE
    expected = claims.drafts(bundle) if has_ended else []
    recorded = {claim.key: claim for claim in bundle.claims}
    if extra := recorded.keys() - {draft.key for draft, _ in expected}:
        return Result("claims", False, f"claim {min(extra)} follows from no decision")
    for draft, leaf in expected:
        row = recorded.get(draft.key)
        if row is None:
            return Result("claims", False, f"claim {draft.key} is not on record")
        hypothesis = hypotheses[draft.hypothesis].id if draft.hypothesis else None
        pairs: dict[str, tuple[object, object]] = {
            "text": (draft.text, row.text_template),
            "form": (draft.form, row.form),
            "strength": (draft.strength, row.strength),
            "caveats": (list(draft.caveats), row.caveats),
            "slots": ({key: rows[key].id for key in slots.names(draft.text) if key in rows}, row.slots),
            "hypothesis": (hypothesis, row.hypothesis_id),
        }
        if wrong := [name for name, (here, there) in pairs.items() if here != there]:
            problem = f"{', '.join(wrong)} of claim {draft.key} is not what follows from the decisions"
            return Result("claims", False, problem)
        try:
            claims.verify(draft, source, leaf, bundle.plan)
        except A3RError as error:
            return Result("claims", False, str(error))
    return Result("claims", True, f"{len(expected)} claims say what their rows say")


def _files(bundle: Bundle, paths: StudyPaths, title: str) -> Iterator[Result]:
    if not bundle.claims:
        yield Result("report", False, "there is none yet; the study has not ended")
        return
    try:
        files = publish.files_of(bundle, title)
    except (ReportError, ValueError) as error:  # a branch that is no leaf is a ValueError
        yield Result("report", False, f"no report can be made of these rows: {error}")
        return
    for name, content in files.items():
        path = paths.report / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            yield Result(name, False, f"{path} can't be read ({error.strerror})")
            continue
        is_ok = found == hashlib.sha256(content.encode()).hexdigest()
        yield Result(name, is_ok, "as its rows say" if is_ok else f"{path} was changed, or made by another version")
