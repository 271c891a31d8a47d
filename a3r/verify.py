"""`a3r verify`: every number of a study again, from the scores of single held-out games.

The lock, the numbers, the decisions, the claims and the report's bytes must all come out as they are on record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from a3r import claims, estimates, store
from a3r.analysis import contrasts, evidence
from a3r.errors import A3RError
from a3r.estimates import Draft
from a3r.graph.analyst import affordable
from a3r.graph.reviewer import drafts
from a3r.paths import StudyPaths
from a3r.prereg.check import check
from a3r.prereg.tree import decide
from a3r.report import bundle as bundles
from a3r.report import publish, write
from a3r.report.bundle import Bundle
from experiments_db import models
from experiments_db.engine import Database

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
    return [
        Result("plan", True, f"the locked plan hashes to {bundle.prereg.sha256[:12]}"),
        _numbers(bundle, rows),
        _decisions(bundle),
        _claims(bundle, title),
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
    wrong = [f"{key} is on record and can't be computed" for key in rows if key not in computed]
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


def _differences(draft: Draft, row: models.Estimate) -> list[str]:
    low, high = draft.ci or (None, None)
    pairs = {
        "value": (draft.value, row.value),
        "lower bound": (low, row.ci_lo),
        "upper bound": (high, row.ci_hi),
        "standard error": (draft.se_seed, row.se_seed),
        "p": (draft.p, row.p),
        "adjusted p": (draft.p_adj, row.p_adj),
    }
    found = [f"{name} is {there}, computed {here}" for name, (here, there) in pairs.items() if not _same(here, there)]
    if draft.inputs_sha != row.inputs_sha:
        found.append("the scores it was computed from have changed")
    return found


def _same(here: float | None, there: float | None) -> bool:
    if here is not None and not math.isfinite(here):
        here = None
    if here is None or there is None:
        return here is there
    return math.isclose(here, there, rel_tol=TOLERANCE, abs_tol=1e-12)


def _decisions(bundle: Bundle) -> Result:
    pairs = list(zip(bundle.runs, bundle.records, strict=True))
    for look in sorted({stage for stage, _ in bundle.decisions if stage > 0}):
        runs = [run for run, _ in pairs if run.stage <= look]
        values = [estimates.run_of(bundle.plan, record) for run, record in pairs if run.stage <= look]
        can_extend, _ = affordable(bundle.plan, runs, look)
        recorded = [decision.branch for stage, decision in bundle.decisions if stage == look]
        read = [
            decide(
                bundle.plan.tree,
                evidence(bundle.plan, contrast, times_extended=look - 1, can_extend=can_extend),
            ).leaf.value
            for contrast in contrasts(bundle.plan, values)
        ]
        if read != recorded:
            return Result("decisions", False, f"look {look}: the tree leads to {read}, on record is {recorded}")
    return Result("decisions", True, f"{len(bundle.decisions)} decisions follow from the locked tree")


def _claims(bundle: Bundle, title: str) -> Result:
    source = write.slots_of(bundle, title, check(bundle.plan))
    expected = drafts(bundle) if bundle.claims else []
    recorded = {claim.key: claim for claim in bundle.claims}
    for draft, leaf in expected:
        row = recorded.get(draft.key)
        if row is None or (row.text_template, row.form, row.strength) != (draft.text, draft.form, draft.strength):
            return Result("claims", False, f"claim {draft.key} is not what follows from the decisions")
        try:
            claims.verify(draft, source, leaf, bundle.plan)
        except A3RError as error:
            return Result("claims", False, str(error))
    return Result("claims", True, f"{len(expected)} claims say what their rows say")


def _files(bundle: Bundle, paths: StudyPaths, title: str) -> Iterator[Result]:
    if not bundle.claims:
        yield Result("report", False, "there is none yet; the study has not ended")
        return
    for name, content in publish.files_of(bundle, title).items():
        path = paths.report / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            yield Result(name, False, f"{path} can't be read ({error.strerror})")
            continue
        is_ok = found == hashlib.sha256(content.encode()).hexdigest()
        yield Result(name, is_ok, "as its rows say" if is_ok else f"{path} was changed, or made by another version")
