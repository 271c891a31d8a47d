"""Everything a report is made from, read once from the experiment log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from a3r import store
from a3r.estimates import RunRecord
from a3r.prereg.plan import Plan
from a3r.prereg.tree import Leaf
from a3r.report.slots import Number
from a3r.store import RunView
from experiments_db import models, queries
from experiments_db.engine import Database


def number_of_row(row: models.Estimate) -> Number:
    """An estimate from the log."""
    return Number(
        key=row.key,
        estimand=row.estimand,
        method=row.method,
        value=row.value,
        unit=row.unit,
        bounds=(row.ci_lo, row.ci_hi),
        level=row.level,
        n_seeds=row.n_seeds,
        n_items=row.n_items,
        p=row.p,
        p_adj=row.p_adj,
        se_seed=row.se_seed,
        se_eval=row.se_eval,
        inputs_sha=row.inputs_sha,
        params=row.params,
    )


@dataclass(frozen=True, slots=True)
class Bundle:
    """A study as it stands."""

    study: models.Study
    prereg: models.Prereg
    plan: Plan
    runs: tuple[RunView, ...]
    records: tuple[RunRecord, ...]
    """In the order of `runs`."""
    numbers: Mapping[str, Number]
    decisions: tuple[tuple[int, models.Decision], ...]
    claims: tuple[models.Claim, ...]
    findings: tuple[models.AuditFinding, ...]
    warnings: tuple[tuple[queries.Warned, ...], ...]
    """What the engine warned of in each run, in the order of `runs`."""
    left_out: tuple[Mapping[str, int], ...]
    """What the updates of each run did without, by reason, in the order of `runs`."""

    @property
    def look(self) -> int:
        """The last look at the data: 0 where only the reference ran."""
        return max((n for n, _ in self.decisions), default=0)

    def leaf_of(self, arm: str) -> Leaf | None:
        """Where the last look's tree led for an arm; None where it was never compared."""
        for n, decision in self.decisions:
            if n == self.look and n > 0 and decision.arm_key == arm:
                return Leaf(decision.branch)
        return None


def load(database: Database, study_id: str) -> Bundle:
    """Read a study.

    Raises:
        A3RError: nothing of it is locked yet.
    """
    plan = store.plan_of(database, study_id)
    runs = store.runs(database, study_id)
    records = store.records(database, plan, runs)
    numbers = {key: number_of_row(row) for key, row in store.estimates(database, study_id).items()}
    stages = [store.stage_id(database, study_id, n) for n in sorted({run.stage for run in runs})]
    findings = store.findings(database, [*(run.experiment_id for run in runs), *stages])
    ids = [run.experiment_id for run in runs]
    with database.read() as session:
        warnings, left_out = queries.warnings(session, ids), queries.left_out(session, ids)
    return Bundle(
        study=store.study(database, study_id),
        prereg=store.prereg(database, study_id),
        plan=plan,
        runs=tuple(runs),
        records=tuple(records),
        numbers=numbers,
        decisions=tuple(store.decisions(database, study_id)),
        claims=tuple(store.claims(database, study_id)),
        findings=tuple(findings),
        warnings=tuple(warnings[one] for one in ids),
        left_out=tuple(left_out[one] for one in ids),
    )


def by_arm(bundle: Bundle, arm: str) -> Sequence[tuple[RunView, RunRecord]]:
    """An arm's runs, in order of seed."""
    pairs = [(run, record) for run, record in zip(bundle.runs, bundle.records, strict=True) if run.arm == arm]
    return sorted(pairs, key=lambda pair: pair[0].seed)
