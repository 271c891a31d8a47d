"""Writes the report of a study: always the same sections, every number a slot. Pure.

No language model is asked. Sentences about results are claims, which were verified against their rows before; all
else says what was done.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import assert_never

from a3r.planner.design import flags
from a3r.planner.offline import shown
from a3r.prereg.check import Checked
from a3r.prereg.plan import MetricKind, Plan, Source
from a3r.prereg.tree import Always, CanAddSeeds, Equivalent, FailedRateAbove, Inferior, Leaf, Node, Superior
from a3r.report.bundle import Bundle, by_arm
from a3r.report.document import Block, Bullets, Document, Paragraph, Section, Table, Tone, Verbatim
from a3r.report.facts import facts_of, value
from a3r.report.figures import METRIC_TITLES, curve_figure, dot_figure, gap_figure
from a3r.report.slots import Source as Slots
from experiments_db.browse import updates_of
from experiments_db.intervals import LEVEL
from experiments_db.models import ClaimForm, ClaimStrength, ExperimentStatus

STRENGTHS: Mapping[ClaimStrength, str] = {
    ClaimStrength.CONFIRMED: "Confirmed: on fresh seeds and the sealed split.",
    ClaimStrength.SUPPORTED: "Supported: planned before the runs, judged by the locked tree, over several seeds.",
    ClaimStrength.EXPLORATORY: "Exploratory: worth a study of its own.",
    ClaimStrength.DESCRIPTIVE: "Descriptive: what was seen in these runs, and no more.",
}
"""What each strength means, strongest first."""
ORIGINS: Mapping[Source, str] = {Source.USER: "question", Source.FLAG: "command line", Source.DEFAULT: "default"}


def slots_of(bundle: Bundle, title: str, checked: Checked) -> Slots:
    """What the report's slots are resolved against."""
    return Slots(bundle.numbers, facts_of(bundle, title) | extra_facts(bundle, checked))


def compose(bundle: Bundle, checked: Checked) -> Document:
    """The report.

    Args:
        checked: the plan's checks, computed again: they follow from the plan alone.
    """
    document = Document(
        title=bundle.study.question,
        subtitle="Study {{f:study}}, plan {{f:sha_short}} locked {{f:locked_at}}",
        sections=(
            _answer(bundle),
            _question(bundle),
            _plan(bundle, checked),
            _design(bundle),
            _noise(bundle),
            _results(bundle),
            _decisions(bundle),
            _claims(bundle),
            _not_tested(bundle),
            _failures(bundle),
            _health(bundle),
            _cost(),
            _reproduce(bundle),
            _numbers(bundle),
        ),
    )
    document.lint()
    return document


def _answer(bundle: Bundle) -> Section:
    blocks: list[Block] = []
    answers = [claim for claim in bundle.claims if claim.form is not ClaimForm.DESCRIPTIVE]
    for claim in answers:
        blocks.append(Paragraph(claim.text_template, Tone.ANSWER))
        blocks += [Paragraph(caveat, Tone.NOTE) for caveat in claim.caveats]
    if figure := gap_figure(bundle):
        blocks.append(figure)
    if figure := curve_figure(bundle):
        blocks.append(figure)
    return Section("answer", "Answer", tuple(blocks))


def _question(bundle: Bundle) -> Section:
    plan = bundle.plan
    rows = [
        ("factor", "{{f:factor}} ({{f:factor_path}}) at {{f:levels}}; the reference is {{f:reference}}"),
        ("metric", f"{METRIC_TITLES[plan.metric.kind]}, {{{{f:metric_long}}}}"),
        ("game", "{{f:title}}, template version {{f:template_version}}, start weights {{f:start_weights}}"),
    ]
    assumed = tuple(
        (f"{{{{f:assumption/{index}}}}}", ORIGINS[each.source]) for index, each in enumerate(plan.assumptions)
    )
    return Section(
        "question",
        "What was asked, and what was assumed",
        (
            Table(("part", "read as"), tuple(rows)),
            Table(("assumed", "from"), assumed),
        ),
    )


def _plan(bundle: Bundle, checked: Checked) -> Section:
    plan = bundle.plan
    hypotheses = tuple(
        (f"{{{{f:hypothesis/{index}}}}}", f"{{{{f:statement/{index}}}}}", f"{{{{f:expected/{index}}}}}")
        for index in range(len(plan.hypotheses))
    )
    worlds = tuple(
        (
            f"{{{{f:world/{index}}}}}",
            *(f"{{{{f:world/{index}/{leaf.value}}}}}" for leaf in Leaf if leaf.is_final),
            f"{{{{f:world/{index}/extended}}}}",
        )
        for index in range(len(checked.simulated))
    )
    nodes = tuple(
        (f"{{{{f:node/{node.id}}}}}", _test(node), f"{{{{f:node/{node.id}/then}}}}") for node in plan.tree.nodes
    )
    heads = tuple(f"{{{{f:leaf/{leaf.value}}}}}" for leaf in Leaf if leaf.is_final)
    return Section(
        "plan",
        "Pre-registration",
        (
            Paragraph(
                "The plan below was locked before any run, by the hash of its canonical JSON: {{f:sha}}. "
                "The tree is read by code; its first true node decides."
            ),
            Table(("hypothesis", "statement", "expected"), hypotheses),
            Table(("node", "test", "leads to"), nodes),
            Paragraph(
                "Over all contrasts and looks the chance of a false claim is at most {{f:alpha}}: each of "
                "{{f:looks}} looks gets {{f:alpha_look}}, contrasts are adjusted by Holm's method, and intervals of a "
                "look cover with {{f:level_look}}."
            ),
            Table(
                ("invented studies with", *heads, "more seeds"),
                worlds,
                numeric=tuple(range(1, len(heads) + 2)),
                caption="Where the tree ended in {{f:num_worlds}} invented studies of each kind, before anything ran, "
                "with runs that deviate by {{f:assumed_sd}} between seeds.",
            ),
            Verbatim(json.dumps(plan.model_dump(mode="json"), indent=1, ensure_ascii=False), summary="The whole plan"),
        ),
    )


def _test(node: Node) -> str:
    match node.when:
        case FailedRateAbove():
            return f"more than {{{{f:node/{node.id}/limit}}}} of the runs failed"
        case Superior():
            return f"gain above zero with adjusted p at most {{{{f:node/{node.id}/alpha}}}}"
        case Inferior():
            return f"gain below zero with adjusted p at most {{{{f:node/{node.id}/alpha}}}}"
        case Equivalent():
            return f"gain within ±{{{{f:margin}}}} by one-sided tests at {{{{f:node/{node.id}/alpha}}}} each"
        case CanAddSeeds():
            return "extra seeds are left and fit the budget"
        case Always():
            return "always"
        case never:
            assert_never(never)


def _design(bundle: Bundle) -> Section:
    plan = bundle.plan
    columns = [
        ("group size", "group", "trainer.group_size"),
        ("tasks per update", "tasks", "trainer.tasks_per_update"),
        ("updates", "updates", "training.updates"),
        ("tasks seen", "tasks_seen", None),
    ]
    shown_columns = [(head, name) for head, name, path in columns if path != plan.factor.path]
    rows = tuple(
        (
            f"{{{{f:level/{arm.key}}}}}" + (" (reference)" if arm.is_reference else ""),
            *(f"{{{{f:{name}/{arm.key}}}}}" for _, name in shown_columns),
            "{{f:episodes}}",
        )
        for arm in plan.arms
    )
    fixed = [
        ("episodes per update", "{{f:episodes_per_update}}"),
        ("training episodes of a run", "{{f:episodes}}"),
        *(
            (name, f"{{{{f:control/{path}}}}}")
            for name, path in (
                ("updates", "training.updates"),
                ("learning rate", "trainer.learning_rate"),
            )
            if path in plan.controls.settings
        ),
        ("evaluation games, the same every time", "{{f:eval_games}}"),
        ("evaluations, the first before training", "{{f:evaluations}}"),
        ("episodes between evaluations", "{{f:between}}"),
        ("temperature of play", "{{f:temperature}}"),
        ("seeds, the same in every arm", "{{f:seed_list}}"),
        ("extra seeds, if the tree asks for them", "{{f:extra_seed_list}}"),
    ]
    blocks: list[Block] = [
        Table(
            (plan.factor.label, *(head for head, _ in shown_columns), "episodes"),
            rows,
            numeric=tuple(range(1, len(shown_columns) + 2)),
        ),
        Table(("the same in every arm", ""), tuple(fixed), numeric=(1,)),
    ]
    if plan.factor.path == "trainer.group_size":
        text = (
            "With equal episodes, group size and number of tasks trade off: {{f:tasks_note}} The comparison is of both "
            "together, at one price in episodes."
        )
        blocks.insert(1, Paragraph(text))
    others = tuple(
        (f"{{{{f:path/{path}}}}}", f"{{{{f:control/{path}}}}}")
        for path in sorted(plan.controls.settings)
        if path not in {"training.updates", "trainer.learning_rate"}
    )
    rules = tuple((f"rules.{name}", f"{{{{f:rule/{name}}}}}") for name in sorted(plan.controls.rules))
    head = ("setting", "in every arm")
    blocks.append(Table(head, (*others, *rules), numeric=(1,), summary="Every other setting"))
    return Section("design", "Design", tuple(blocks))


def _noise(bundle: Bundle) -> Section:
    if "noise/sd" not in bundle.numbers:
        return Section(
            "noise",
            "Noise floor",
            (Paragraph("Too few runs of the reference finished to tell how far equal runs differ."),),
        )
    if "noise/smallest_difference/seeds" not in bundle.numbers:
        return Section(
            "noise",
            "Noise floor",
            (
                Paragraph(
                    "The {{e:noise/sd.n_seeds}} runs at {{f:factor}} {{f:reference}} agree exactly, so how far equal "
                    "runs differ, and what difference can be told, is not known."
                ),
            ),
        )
    text = (
        "Runs at {{f:factor}} {{f:reference}} that differ by their seed alone deviate by {{e:noise/sd.value}} in "
        + METRIC_TITLES[bundle.plan.metric.kind]
        + " ({{e:noise/sd.level}} interval {{e:noise/sd.ci}}, {{e:noise/sd.n_seeds}} seeds). By that, a difference "
        "of {{e:noise/smallest_difference/seeds.value}} is told with probability {{f:power}} over "
        "{{e:noise/smallest_difference/seeds.n_seeds}} seeds per arm"
    )
    if "noise/smallest_difference/all_seeds" in bundle.numbers:
        text += (
            ", and one of {{e:noise/smallest_difference/all_seeds.value}} over "
            "{{e:noise/smallest_difference/all_seeds.n_seeds}}"
        )
    return Section(
        "noise",
        "Noise floor, and the smallest difference that can be told",
        (
            Paragraph(text + "."),
            Paragraph("The deviation itself is known from few runs, so its interval is wide.", Tone.NOTE),
        ),
    )


def _results(bundle: Bundle) -> Section:
    plan, look = bundle.plan, bundle.look
    blocks: list[Block] = []
    if figure := dot_figure(bundle):
        blocks.append(figure)
    runs = tuple(
        (
            f"{{{{f:level/{run.arm}}}}}",
            f"{{{{f:seed/{run.arm}/s{run.seed}}}}}",
            _if(f"f:before/{run.arm}/s{run.seed}", bool(record.measurements)),
            _if(f"f:after/{run.arm}/s{run.seed}", bool(record.measurements)),
            f"{{{{e:run/{run.arm}/s{run.seed}.value}}}}",
            f"{{{{e:run/{run.arm}/s{run.seed}.se_eval}}}}",
            "failed" if record.failure else _censored(bundle, run.arm, run.seed),
        )
        for arm in plan.arms
        for run, record in by_arm(bundle, arm.key)
        if f"run/{run.arm}/s{run.seed}" in bundle.numbers
    )
    blocks.append(
        Table(
            (plan.factor.label, "seed", "before", "after", METRIC_TITLES[plan.metric.kind], "± games", ""),
            runs,
            numeric=(0, 1, 2, 3, 4, 5),
            caption="Every run. Before and after are held-out rewards; ± games is the standard error over held-out "
            "games, which says how much other games would have changed the number.",
        )
    )
    if look > 0:
        blocks.append(_arm_table(bundle))
        blocks.append(_contrast_table(bundle))
    return Section("results", "Results", tuple(blocks))


def _arm_table(bundle: Bundle) -> Table:
    plan, look = bundle.plan, bundle.look
    rows = tuple(
        (
            f"{{{{f:level/{arm.key}}}}}",
            f"{{{{e:arm/{arm.key}/look{look}.n_seeds}}}}",
            f"{{{{f:failed/{arm.key}}}}}",
            f"{{{{e:arm/{arm.key}/look{look}.value}}}}",
            f"{{{{e:arm/{arm.key}/look{look}.ci}}}}",
            *(
                f"{{{{e:{name}/{arm.key}/look{look}.value}}}}"
                if f"{name}/{arm.key}/look{look}" in bundle.numbers
                else "–"
                for name in ("before", "after")
            ),
        )
        for arm in plan.arms
    )
    return Table(
        (plan.factor.label, "runs", "failed", METRIC_TITLES[plan.metric.kind], "interval", "before", "after"),
        rows,
        numeric=(0, 1, 2, 3, 4, 5, 6),
        caption="Means over seeds with {{f:level_arm}} t-intervals; failed runs count as {{f:worst}}.",
    )


def _contrast_table(bundle: Bundle) -> Table:
    look = bundle.look
    rows: list[tuple[str, ...]] = []
    for arm in bundle.plan.treated:
        key = f"{arm.key}/look{look}"
        for method, name in (
            ("paired by seed (decides)", "contrast"),
            ("equivalence, one-sided tests (decides)", "equivalence"),
            ("unpaired, Welch (cross-check)", "unpaired"),
            ("finished pairs only (cross-check)", "survivors"),
        ):
            if f"{name}/{key}" not in bundle.numbers:
                continue
            adjusted = f"{{{{e:{name}/{key}.p_adj}}}}"
            rows.append(
                (
                    f"{{{{f:level/{arm.key}}}}} – {{{{f:reference}}}}",
                    method,
                    f"{{{{e:{name}/{key}.value|signed}}}}",
                    f"{{{{e:{name}/{key}.ci|signed}}}}",
                    f"{{{{e:{name}/{key}.level}}}}",
                    f"{{{{e:{name}/{key}.p}}}}",
                    adjusted,
                )
            )
    return Table(
        ("levels", "method", "difference", "interval", "coverage", "p", "adjusted p"),
        tuple(rows),
        numeric=(2, 3, 4, 5, 6),
        caption="Differences from the reference. For equivalence, p is of the hypothesis that the true difference lies "
        "outside ±{{f:margin}}.",
    )


def _decisions(bundle: Bundle) -> Section:
    rows = tuple(
        (
            f"{{{{f:trace/{index}/stage}}}}",
            f"{{{{f:trace/{index}/arm}}}}",
            f"{{{{f:trace/{index}/node}}}}",
            f"{{{{f:trace/{index}/test}}}}",
            f"{{{{f:trace/{index}/truth}}}}",
            f"{{{{f:trace/{index}/because}}}}",
            f"{{{{f:trace/{index}/branch}}}}",
        )
        for index in range(len(trace_rows(bundle)))
    )
    return Section(
        "decisions",
        "Decisions",
        (
            Paragraph("The locked tree, node by node as it was read. Nobody chose a branch by hand."),
            Table(("stage", "arm", "node", "test", "truth", "because", "leads to"), rows),
        ),
    )


def trace_rows(bundle: Bundle) -> list[dict[str, str]]:
    """Every node of every decision, as texts."""
    found: list[dict[str, str]] = []
    for stage, decision in bundle.decisions:
        arm = decision.arm_key or bundle.plan.reference.key
        for place, visited in enumerate(decision.predicate_trace):
            is_last = place == len(decision.predicate_trace) - 1
            branch = decision.branch.replace("_", " ") if is_last else ""
            found.append(
                {
                    "stage": str(stage),
                    "arm": arm,
                    "node": str(visited["node"]),
                    "test": str(visited["test"]).replace("_", " "),
                    "truth": str(visited["truth"]),
                    "because": str(visited["because"]),
                    "branch": branch,
                }
            )
    return found


def _claims(bundle: Bundle) -> Section:
    blocks: list[Block] = []
    for strength, meaning in STRENGTHS.items():
        texts = [claim.text_template for claim in bundle.claims if claim.strength is strength]
        if texts:
            blocks.append(Paragraph(meaning, Tone.NOTE))
            blocks.append(Bullets(tuple(texts), Tone.CLAIM))
    return Section("claims", "Claims by strength", tuple(blocks))


def _not_tested(bundle: Bundle) -> Section:
    plan = bundle.plan
    items = [
        "Other games, other policies and larger models: every run is {{f:title}} with {{f:start_weights}}.",
        "Levels of {{f:factor}} other than {{f:levels}}, and the same levels at other settings: one factor was varied.",
        "Longer training: a run sees {{f:episodes}} episodes, and curves may cross later.",
        "Fresh seeds on the sealed split: without that nothing here is confirmed.",
        "Start weights: all runs begin from the same ones, so their luck is shared by every arm.",
        "Repetition bit for bit: runs were not in lockstep, so the same commands give new samples of the same design.",
    ]
    if plan.factor.path == "trainer.group_size":
        items.insert(
            1, "Group size apart from the number of tasks: with equal episodes the one can't change without the other."
        )
    if plan.metric.kind is not MetricKind.FINAL_REWARD:
        items.append("Greedy play: the curve is at temperature {{f:temperature}}.")
    return Section("not-tested", "What was not tested", (Bullets(tuple(items)),))


def _failures(bundle: Bundle) -> Section:
    blocks: list[Block] = [
        Paragraph(
            "{{f:num_failed}} of {{f:num_runs}} runs count as failed, {{f:num_quarantined}} of them because an "
            "integrity check took them out; {{f:num_retries}} starts were repeated after a run was lost or stopped. "
            "A failed run counts as {{f:worst}}."
        )
    ]
    failed = [
        (run, record) for run, record in zip(bundle.runs, bundle.records, strict=True) if record.failure is not None
    ]
    for run, record in failed:
        assert record.failure is not None
        what = "quarantined" if run.status is ExperimentStatus.QUARANTINED else run.status.value
        blocks.append(Verbatim(f"{run.arm}, seed {run.seed} ({what}, run {run.experiment_id}):\n{record.failure}"))
    if bundle.findings:
        blocks.append(
            Table(
                ("check", "severity", "finding"),
                tuple(
                    (
                        f"{{{{f:finding/{i}/detector}}}}",
                        f"{{{{f:finding/{i}/severity}}}}",
                        f"{{{{f:finding/{i}/message}}}}",
                    )
                    for i in range(len(bundle.findings))
                ),
            )
        )
    return Section("failures", "Failures and quarantines", tuple(blocks))


def _health(bundle: Bundle) -> Section:
    warned = tuple(
        tuple(f"{{{{f:warning/{index}/{name}}}}}" for name in WARNING_COLUMNS)
        for index in range(len(warning_rows(bundle)))
    )
    left_out = tuple(
        tuple(f"{{{{f:left_out/{index}/{name}}}}}" for name in LEFT_OUT_COLUMNS)
        for index in range(len(left_out_rows(bundle)))
    )
    blocks: list[Block] = [
        Paragraph(
            "The engine warned in {{f:num_warned}} of {{f:num_runs}} runs. Its limits are rules of thumb, and a "
            "warning takes no run out of the estimates."
        )
    ]
    if warned:
        blocks.append(
            Table(
                (bundle.plan.factor.label, *WARNING_COLUMNS[1:]),
                warned,
                numeric=(0, 1),
                caption="What was said after the last of these updates.",
            )
        )
    if left_out:
        blocks.append(
            Table(
                (bundle.plan.factor.label, *LEFT_OUT_COLUMNS[1:]),
                left_out,
                numeric=(0, 1, 3),
                caption="What updates did without: episodes that came into no batch, and those in one that taught "
                "nothing.",
                summary="What was left out",
            )
        )
    return Section("health", "Warnings", tuple(blocks))


WARNING_COLUMNS = ("level", "seed", "warning", "updates", "what")
LEFT_OUT_COLUMNS = ("level", "seed", "reason", "count")


def warning_rows(bundle: Bundle) -> list[dict[str, str]]:
    """Everything that the engine warned of, as texts, by column."""
    return [
        {
            "level": value(bundle.plan.arm(run.arm).level),
            "seed": str(run.seed),
            "warning": warned.kind.replace("_", " "),
            "updates": updates_of(warned),
            "what": warned.message,
        }
        for run, own in zip(bundle.runs, bundle.warnings, strict=True)
        for warned in own
    ]


def left_out_rows(bundle: Bundle) -> list[dict[str, str]]:
    """What the updates did without, as texts, by column."""
    return [
        {"level": value(bundle.plan.arm(run.arm).level), "seed": str(run.seed), "reason": reason, "count": str(count)}
        for run, own in zip(bundle.runs, bundle.left_out, strict=True)
        for reason, count in own.items()
    ]


def _cost() -> Section:
    return Section(
        "cost",
        "Cost",
        (
            Paragraph(
                "{{f:num_runs}} runs took {{f:job_time}} of wall time together, {{f:mean_job_time}} each, up to "
                "{{f:parallel}} side by side. The budget was {{f:budget_jobs}} runs and {{f:budget_time}}. No language "
                "model was asked."
            ),
        ),
    )


def _reproduce(bundle: Bundle) -> Section:
    study = bundle.study.id
    first = bundle.runs[0] if bundle.runs else None
    again = shlex.join(["a3r", "research", "--yes", *flags(bundle.study.wishes), "--", bundle.study.question])
    lines = [
        f"a3r verify {study}        # every number again, from the scores of the held-out games",
        f"a3r show {study}",
        f"{again}        # the study again, with new samples",
    ]
    if first:
        project = PurePosixPath(first.run_dir).parent.parent / "projects" / first.arm
        # Rows of earlier versions hold whole paths, and so do the reports made of them.
        folder = shlex.quote(str(project)) if project.is_absolute() else f'"${{A3R_HOME:-.a3r}}/{project}"'
        lines.append(f"cd {folder} && python train.py --run-dir NEW_FOLDER --seed {first.seed}        # one run")
    environment = json.dumps(bundle.study.env_fingerprint, indent=1, sort_keys=True, ensure_ascii=False)
    return Section("reproduce", "Reproduce", (Verbatim("\n".join(lines)), Verbatim(environment, summary="Environment")))


def _numbers(bundle: Bundle) -> Section:
    rows = tuple(
        (
            f"{{{{f:number/{key}}}}}",
            f"{{{{f:number/{key}/estimand}}}}",
            f"{{{{f:number/{key}/method}}}}",
            f"{{{{e:{key}.value}}}}",
            f"{{{{e:{key}.ci}}}}" if number.bounds != (None, None) else "–",
            f"{{{{e:{key}.n_seeds}}}}",
            f"{{{{f:number/{key}/inputs}}}}",
        )
        for key, number in sorted(bundle.numbers.items())
    )
    return Section(
        "numbers",
        "Every number",
        (
            Paragraph(
                "Each is a row of the experiment log, computed from the scores of single held-out games; the last "
                "column is the hash of these scores."
            ),
            Table(("key", "what", "method", "value", "interval", "seeds", "inputs"), rows, numeric=(3, 4, 5)),
        ),
    )


def extra_facts(bundle: Bundle, checked: Checked) -> dict[str, str]:
    """Facts that only the report's tables quote."""
    plan = bundle.plan
    found = {
        "factor_path": plan.factor.path,
        "levels": ", ".join(shown(level) for level in plan.factor.levels),
        "temperature": f"{plan.metric.temperature:g}",
        "metric_long": _metric_in_words(plan),
        "level_arm": f"{LEVEL * 100:g}%",
        "level_equivalence": f"{(1 - 2 * (1 - plan.level)) * 100:g}%",
        "num_worlds": str(next((each.num_studies for each in checked.simulated.values()), 0)),
        "tasks_note": _tasks_note(plan),
    }
    found |= {f"path/{path}": path for path in plan.controls.settings}
    found |= {f"path/rules.{name}": f"rules.{name}" for name in plan.controls.rules}
    found |= {f"leaf/{leaf.value}": leaf.value.replace("_", " ") for leaf in Leaf}
    for index, each in enumerate(plan.assumptions):
        found[f"assumption/{index}"] = each.text
    for index, hypothesis in enumerate(plan.hypotheses):
        found[f"hypothesis/{index}"], found[f"statement/{index}"] = hypothesis.code, hypothesis.statement
        found[f"expected/{index}"] = hypothesis.expected.value
    for index, (world, outcome) in enumerate(checked.simulated.items()):
        found[f"world/{index}"] = world.value
        found[f"world/{index}/extended"] = f"{outcome.extended:.0%}"
        for leaf in Leaf:
            found[f"world/{index}/{leaf.value}"] = f"{outcome.shares.get(leaf, 0):.0%}"
    for node in plan.tree.nodes:
        found[f"node/{node.id}"], found[f"node/{node.id}/then"] = node.id, node.then.value.replace("_", " ")
        if isinstance(node.when, FailedRateAbove):
            found[f"node/{node.id}/limit"] = f"{node.when.limit:.0%}"
        if isinstance(node.when, Superior | Inferior | Equivalent):
            found[f"node/{node.id}/alpha"] = f"{node.when.alpha:g}"
    for index, row in enumerate(trace_rows(bundle)):
        found |= {f"trace/{index}/{name}": text for name, text in row.items()}
    for index, row in enumerate(warning_rows(bundle)):
        found |= {f"warning/{index}/{name}": text for name, text in row.items()}
    for index, row in enumerate(left_out_rows(bundle)):
        found |= {f"left_out/{index}/{name}": text for name, text in row.items()}
    for index, finding in enumerate(bundle.findings):
        found[f"finding/{index}/detector"] = finding.detector
        found[f"finding/{index}/severity"] = finding.severity.value
        found[f"finding/{index}/message"] = finding.message
    for arm in plan.arms:
        settings = plan.settings_of(arm)
        tasks, updates = settings["trainer.tasks_per_update"], settings["training.updates"]
        assert isinstance(tasks, int)
        assert isinstance(updates, int)
        found[f"tasks_seen/{arm.key}"] = str(tasks * updates)
    for key, number in bundle.numbers.items():
        found[f"number/{key}"] = key
        found[f"number/{key}/estimand"] = number.estimand
        found[f"number/{key}/method"] = number.method.replace("_", " ")
        found[f"number/{key}/inputs"] = (number.inputs_sha or "")[:10]
    return found


def _tasks_note(plan: Plan) -> str:
    parts = []
    for arm in plan.arms:
        settings = plan.settings_of(arm)
        tasks, updates = settings["trainer.tasks_per_update"], settings["training.updates"]
        if isinstance(tasks, int) and isinstance(updates, int):
            parts.append((tasks * updates, arm.level))
    fewest = min(count for count, _ in parts)
    said = ", ".join(
        f"{plan.factor.label} {shown(level)} sees {count} tasks"
        + (f" ({_times(count, fewest)})" if count > fewest else "")
        for count, level in parts
    )
    return said + "."


def _times(count: int, fewest: int) -> str:
    ratio = count / fewest
    return "twice as many" if ratio == 2 else f"{ratio:.3g} times as many"


def _metric_in_words(plan: Plan) -> str:
    match plan.metric.kind:
        case MetricKind.AREA:
            return (
                f"the mean height of the curve of held-out reward over {plan.controls.episodes} training episodes; "
                "a run that learns earlier, or gets higher, has more of it"
            )
        case MetricKind.FINAL_REWARD:
            return f"the mean reward on {plan.controls.evaluation_games} held-out games after the last update"
        case MetricKind.EPISODES_TO:
            return (
                f"training episodes until the held-out curve first reaches {plan.metric.threshold:g}; a run that does "
                f"not counts as {plan.controls.episodes}, and is marked"
            )
        case never:
            assert_never(never)


def _if(slot: str, exists: bool) -> str:
    return f"{{{{{slot}}}}}" if exists else "–"


def _censored(bundle: Bundle, arm: str, seed: int) -> str:
    return "not reached" if bundle.numbers[f"run/{arm}/s{seed}"].params.get("censored") else ""


def verdicts(bundle: Bundle) -> Sequence[tuple[str, Leaf]]:
    """Where the tree led for each arm, in the plan's order."""
    leaves = [(arm.key, bundle.leaf_of(arm.key)) for arm in bundle.plan.treated]
    return [(arm, leaf) for arm, leaf in leaves if leaf is not None]
