"""Texts that slots may quote beside estimates: values of the locked plan, and counts of rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from a3r.planner.offline import shown
from a3r.prereg.plan import Level, Plan
from a3r.report.bundle import Bundle
from a3r.report.slots import amount
from experiments_db.models import ExperimentStatus


def facts_of(bundle: Bundle, title: str) -> dict[str, str]:
    """Every fact of a study.

    Args:
        title: the game's, for people.
    """
    plan = bundle.plan
    return {
        **_of_plan(plan),
        **_of_rows(bundle),
        "title": title,
        "study": bundle.study.id,
        "question": bundle.study.question,
        "sha": bundle.prereg.sha256,
        "sha_short": bundle.prereg.sha256[:12],
        "locked_at": f"{bundle.prereg.locked_at:%Y-%m-%d %H:%M:%S} UTC",
    }


def value(level: Level | None) -> str:
    """A setting as people write it."""
    return "–" if level is None else shown(level)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _of_plan(plan: Plan) -> dict[str, str]:
    unit = plan.metric.unit
    found = {
        "reference": value(plan.reference.level),
        "factor": plan.factor.label,
        "episodes": str(plan.controls.episodes),
        "episodes_per_update": value(plan.controls.episodes_per_update),
        "between": str(plan.controls.episodes_between_evaluations),
        "eval_games": str(plan.controls.evaluation_games),
        "evaluations": str(1 + plan.controls.episodes // plan.controls.episodes_between_evaluations),
        "threshold": value(plan.metric.threshold),
        "margin": amount(plan.metric.margin, unit),
        "worst": amount(plan.metric.worst, unit),
        "assumed_sd": amount(plan.metric.assumed_sd, unit),
        "seeds": str(len(plan.seeds)),
        "extra_seeds": str(len(plan.extra_seeds)),
        "seed_list": ", ".join(map(str, plan.seeds)),
        "extra_seed_list": ", ".join(map(str, plan.extra_seeds)) or "–",
        "alpha": f"{plan.alpha:g}",
        "alpha_look": f"{1 - plan.level:g}",
        "level_look": f"{plan.level * 100:g}%",
        "looks": str(plan.num_looks),
        "power": f"{plan.power:.0%}",
        "arms": str(len(plan.arms)),
        "parallel": str(plan.budget.parallel),
        "budget_jobs": str(plan.budget.jobs),
        "budget_time": duration(plan.budget.job_seconds),
        "job_limit": duration(plan.budget.job_limit_s),
        "start_weights": plan.template.start_weights,
        "template_version": plan.template.version,
    }
    for arm in plan.arms:
        settings = plan.settings_of(arm)
        found[f"level/{arm.key}"] = value(arm.level)
        for name, path in _ARM_FACTS.items():
            found[f"{name}/{arm.key}"] = value(settings.get(path))
    found |= {f"control/{path}": value(level) for path, level in plan.controls.settings.items()}
    found |= {f"rule/{name}": value(level) for name, level in plan.controls.rules.items()}
    return found


_ARM_FACTS: Mapping[str, str] = {
    "group": "trainer.group_size",
    "tasks": "trainer.tasks_per_update",
    "updates": "training.updates",
    "rate": "trainer.learning_rate",
}


def _of_rows(bundle: Bundle) -> dict[str, str]:
    found: dict[str, str] = {}
    failed: dict[str, int] = {}
    total: dict[str, int] = {}
    for run, record in zip(bundle.runs, bundle.records, strict=True):
        total[run.arm] = total.get(run.arm, 0) + 1
        failed[run.arm] = failed.get(run.arm, 0) + (record.failure is not None)
    reference = bundle.plan.reference.key
    for arm in total:
        found[f"failed/{arm}"], found[f"runs/{arm}"] = str(failed[arm]), str(total[arm])
        found[f"failed_pair/{arm}"] = str(failed[arm] + failed.get(reference, 0))
        found[f"runs_pair/{arm}"] = str(total[arm] + total.get(reference, 0))
    for run, record in zip(bundle.runs, bundle.records, strict=True):
        name = f"{run.arm}/s{run.seed}"
        found[f"seed/{name}"] = str(run.seed)
        found[f"seconds/{name}"] = duration(run.seconds)
        found[f"attempts/{name}"] = str(run.attempt)
        found[f"run_id/{name}"] = run.experiment_id
        if record.measurements:
            found[f"before/{name}"] = amount(record.measurements[0].mean, "reward")
            found[f"after/{name}"] = amount(record.measurements[-1].mean, "reward")
    quarantined = sum(run.status is ExperimentStatus.QUARANTINED for run in bundle.runs)
    seconds = sum(run.seconds for run in bundle.runs)
    retries = sum(max(0, run.attempt - 1) for run in bundle.runs)
    return found | {
        "num_runs": str(len(bundle.runs)),
        "num_failed": str(sum(failed.values())),
        "num_quarantined": str(quarantined),
        "num_warned": str(sum(bool(own) for own in bundle.warnings)),
        "num_retries": str(retries),
        "job_time": duration(seconds),
        "mean_job_time": duration(seconds / len(bundle.runs)) if bundle.runs else "–",
    }
