"""From decisions to sentences: what the study claims, how strongly, with slots for every number. Pure.

The verb is bound to the strength. Runs with planned seeds, judged by a locked tree, support a claim; confirming it
takes fresh seeds on a sealed split, which is another study's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from a3r.errors import ReportError
from a3r.prereg.check import MIN_SEEDS
from a3r.prereg.plan import Arm, MetricKind, Plan
from a3r.prereg.tree import Leaf
from a3r.report import figures, lint, slots
from experiments_db.models import ClaimForm, ClaimStrength, OwnerType, Severity

if TYPE_CHECKING:
    from a3r.report.bundle import Bundle

OPENINGS: Mapping[ClaimStrength, str] = {
    ClaimStrength.DESCRIPTIVE: "In these runs ",
    ClaimStrength.EXPLORATORY: "The runs suggest that ",
    ClaimStrength.SUPPORTED: "",
    ClaimStrength.CONFIRMED: "We confirm that ",
}
"""How a claim of each strength begins; what is only suggested is never stated."""

FORMS: Mapping[Leaf, ClaimForm] = {
    Leaf.SUPERIOR: ClaimForm.SUPERIOR,
    Leaf.INFERIOR: ClaimForm.INFERIOR,
    Leaf.EQUIVALENT: ClaimForm.EQUIVALENT,
    Leaf.INCONCLUSIVE: ClaimForm.INCONCLUSIVE,
    Leaf.TOO_MANY_FAILURES: ClaimForm.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class ClaimDraft:
    """A claim before it is a row."""

    key: str
    form: ClaimForm
    strength: ClaimStrength
    text: str
    """With slots."""
    hypothesis: str | None
    """Code of the hypothesis it answers."""
    caveats: tuple[str, ...] = ()
    """With slots."""


def drafts(bundle: Bundle) -> list[tuple[ClaimDraft, Leaf | None]]:
    """The study's claims with the leaf that each has to agree with."""
    plan, look = bundle.plan, bundle.look
    if look == 0:
        return [(failed_early(plan), None)]
    told = figures.told_key(look, bundle.numbers)
    found: list[tuple[ClaimDraft, Leaf | None]] = []
    for arm in plan.treated:
        leaf = bundle.leaf_of(arm.key)
        assert leaf is not None, f"the tree was read for {arm.key}"
        strength = strength_of(bundle, arm.key, leaf)
        caveats = caveats_of(bundle, arm.key, leaf)
        draft = compared(plan, arm, leaf, look, strength=strength, told=told, caveats=caveats)
        found.append((draft, leaf))
    found += [(learned(arm, plan, look), None) for arm in plan.arms if f"rise/{arm.key}/look{look}" in bundle.numbers]
    return found


def strength_of(bundle: Bundle, arm: str, leaf: Leaf) -> ClaimStrength:
    """How well a contrast's claim stands; nothing in a study without fresh seeds is confirmed."""
    if leaf is Leaf.TOO_MANY_FAILURES:
        return ClaimStrength.DESCRIPTIVE
    number = bundle.numbers[f"contrast/{arm}/look{bundle.look}"]
    overridden = any(decision.overridden_by for _, decision in bundle.decisions)
    suspect = any(
        finding.target_type is OwnerType.STAGE and finding.severity is Severity.HIGH and finding.resolved_by is None
        for finding in bundle.findings
    )
    is_result = leaf in {Leaf.SUPERIOR, Leaf.INFERIOR, Leaf.EQUIVALENT}
    if is_result and number.n_seeds >= MIN_SEEDS and not overridden and not suspect:
        return ClaimStrength.SUPPORTED
    return ClaimStrength.EXPLORATORY


def caveats_of(bundle: Bundle, arm: str, leaf: Leaf) -> list[str]:
    """What a reader of the claim has to know with it."""
    plan = bundle.plan
    number = bundle.numbers[f"contrast/{arm}/look{bundle.look}"]
    found: list[str] = []
    is_small = number.value is not None and abs(number.value) <= plan.metric.margin
    if leaf in {Leaf.SUPERIOR, Leaf.INFERIOR} and is_small:
        found.append("The difference is within ±{{f:margin}}, which the plan declared not to matter.")
    pair = {arm, plan.reference.key}
    records = [record for record in bundle.records if record.arm in pair]
    if any(record.failure for record in records) and leaf is not Leaf.TOO_MANY_FAILURES:
        found.append(
            f"{{{{f:failed_pair/{arm}}}}} of {{{{f:runs_pair/{arm}}}}} runs failed and count as {{{{f:worst}}}}, "
            "the worst value there is."
        )
    if plan.factor.path == "trainer.group_size":
        found.append("At equal episodes the levels differ in tasks seen as well: {{f:tasks_note}}")
    return found


def compared(
    plan: Plan,
    arm: Arm,
    leaf: Leaf,
    look: int,
    *,
    strength: ClaimStrength,
    told: str | None,
    caveats: Sequence[str] = (),
) -> ClaimDraft:
    """What a contrast came to, as a sentence and the numbers behind it.

    Args:
        told: key of the estimate that says which difference the seeds can tell; None where there is none.
    """
    who = f"{plan.factor.label} {{{{f:level/{arm.key}}}}}"
    other = f"{plan.factor.label} {{{{f:reference}}}}"
    game = "{{f:title}}"
    # Equivalence is judged by an interval of its own, the one that has to lie within the margin.
    shown = f"{'equivalence' if leaf is Leaf.EQUIVALENT else 'contrast'}/{arm.key}/look{look}"
    numbers = (
        f"{_quantity(plan)}: {{{{e:{shown}.value|signed}}}} against {other}, "
        f"{{{{e:{shown}.level}}}} interval {{{{e:{shown}.ci|signed}}}}, "
        f"adjusted p {{{{e:{shown}.p_adj}}}}, {{{{e:{shown}.n_seeds}}}} seeds, paired"
    )
    opening = OPENINGS[strength]
    match leaf:
        case Leaf.SUPERIOR | Leaf.INFERIOR | Leaf.EQUIVALENT:
            sentence = f"{opening}{who} {_verb(plan, leaf)} {other} on {game}"
        case Leaf.INCONCLUSIVE:
            sentence = f"Inconclusive: whether {who} {_question(plan)} {other} on {game} can't be told from these runs"
            if told:
                sentence += (
                    f"; a difference under {{{{e:{told}.value}}}} can't be told with {{{{e:{told}.n_seeds}}}} seeds"
                )
        case Leaf.TOO_MANY_FAILURES:
            sentence = (
                f"{who} and {other} can't be compared on {game}: {{{{f:failed_pair/{arm.key}}}}} of "
                f"{{{{f:runs_pair/{arm.key}}}}} runs failed"
            )
        case Leaf.ADD_SEEDS:
            raise AssertionError("a study does not end with seeds to add")
        case never:
            assert_never(never)
    hypothesis = next((each.code for each in plan.hypotheses if each.arm == arm.key), None)
    return ClaimDraft(
        key=arm.key,
        form=FORMS[leaf],
        strength=strength,
        text=f"{_capital(sentence)}. {_capital(numbers)}.",
        hypothesis=hypothesis,
        caveats=tuple(caveats),
    )


def learned(arm: Arm, plan: Plan, look: int) -> ClaimDraft:
    """Where an arm's curve began and ended: a description, for nothing was planned to be compared there."""
    key = f"{arm.key}/look{look}"
    return ClaimDraft(
        key=f"curve/{arm.key}",
        form=ClaimForm.DESCRIPTIVE,
        strength=ClaimStrength.DESCRIPTIVE,
        text=(
            f"In these runs held-out reward at {plan.factor.label} {{{{f:level/{arm.key}}}}} went from "
            f"{{{{e:before/{key}.value}}}} to {{{{e:after/{key}.value}}}}, a rise of {{{{e:rise/{key}.value|signed}}}} "
            f"({{{{e:rise/{key}.level}}}} interval {{{{e:rise/{key}.ci|signed}}}}, {{{{e:rise/{key}.n_seeds}}}} seeds)."
        ),
        hypothesis=None,
    )


def failed_early(plan: Plan) -> ClaimDraft:
    """The reference failed too often for anything to be compared with it."""
    return ClaimDraft(
        key="reference",
        form=ClaimForm.INCONCLUSIVE,
        strength=ClaimStrength.DESCRIPTIVE,
        text=(
            f"Inconclusive: {{{{f:failed/{plan.reference.key}}}}} of {{{{f:runs/{plan.reference.key}}}}} runs of "
            f"the reference, {plan.factor.label} {{{{f:reference}}}}, failed, so no other level was tried."
        ),
        hypothesis=None,
    )


def verify(draft: ClaimDraft, source: slots.Source, leaf: Leaf | None, plan: Plan) -> None:
    """See that a claim says what its rows say.

    Raises:
        ReportError: a number is typed, a slot names no row, the sign or the form is not the decision's, or the verb is
            stronger than the strength.
    """
    for text in (draft.text, *draft.caveats):
        lint.check_prose(text, is_claim=True)
        slots.resolve(text, source)
    opening = OPENINGS[draft.strength]
    is_result = draft.form in {ClaimForm.SUPERIOR, ClaimForm.INFERIOR, ClaimForm.EQUIVALENT}
    if is_result and not draft.text.startswith(_capital(opening) if opening else ""):
        raise ReportError(f"claim {draft.key} is {draft.strength}, so it has to begin with {opening!r}")
    if leaf is not None and draft.form is not FORMS[leaf]:
        raise ReportError(f"claim {draft.key} says {draft.form}, the tree said {leaf}")
    if draft.form is ClaimForm.EQUIVALENT:
        (key,) = [name for name in slots.names(draft.text) if name.startswith("equivalence/")]
        low, high = source.estimates[key].bounds
        if low is None or high is None or max(-low, high) > plan.metric.margin:
            raise ReportError(f"claim {draft.key} says equivalent, its interval is [{low}, {high}]")
    if draft.form in {ClaimForm.SUPERIOR, ClaimForm.INFERIOR}:
        (key,) = [name for name in slots.names(draft.text) if name.startswith("contrast/")]
        value = source.estimates[key].value
        sign = (1 if draft.form is ClaimForm.SUPERIOR else -1) * (1 if plan.metric.higher_is_better else -1)
        if value is None or value * sign <= 0:
            raise ReportError(f"claim {draft.key} says {draft.form}, its estimate {key} is {value}")


def _quantity(plan: Plan) -> str:
    match plan.metric.kind:
        case MetricKind.AREA:
            return "area under the held-out curve, in reward"
        case MetricKind.FINAL_REWARD:
            return "final held-out reward"
        case MetricKind.EPISODES_TO:
            return "episodes to a held-out reward of {{f:threshold}}, at most {{f:episodes}}"
        case never:
            assert_never(never)


def _verb(plan: Plan, leaf: Leaf) -> str:
    verbs = {
        (MetricKind.AREA, Leaf.SUPERIOR): "learns faster than",
        (MetricKind.AREA, Leaf.INFERIOR): "learns more slowly than",
        (MetricKind.AREA, Leaf.EQUIVALENT): "learns as fast, within {{f:margin}}, as",
        (MetricKind.FINAL_REWARD, Leaf.SUPERIOR): "ends with a higher held-out reward than",
        (MetricKind.FINAL_REWARD, Leaf.INFERIOR): "ends with a lower held-out reward than",
        (MetricKind.FINAL_REWARD, Leaf.EQUIVALENT): "ends with the same held-out reward, within {{f:margin}}, as",
        (MetricKind.EPISODES_TO, Leaf.SUPERIOR): "reaches {{f:threshold}} in fewer episodes than",
        (MetricKind.EPISODES_TO, Leaf.INFERIOR): "reaches {{f:threshold}} in more episodes than",
        (
            MetricKind.EPISODES_TO,
            Leaf.EQUIVALENT,
        ): "reaches {{f:threshold}} in as many episodes, within {{f:margin}}, as",
    }
    return verbs[plan.metric.kind, leaf]


def _question(plan: Plan) -> str:
    match plan.metric.kind:
        case MetricKind.AREA:
            return "learns faster or more slowly than"
        case MetricKind.FINAL_REWARD:
            return "ends with another held-out reward than"
        case MetricKind.EPISODES_TO:
            return "reaches {{f:threshold}} in another number of episodes than"
        case never:
            assert_never(never)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
