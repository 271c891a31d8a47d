"""From a reading to a plan: what is fixed in every arm, what a level drags along, what it may cost. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from a3r.errors import QuestionError
from a3r.planner.offline import Reading, shown
from a3r.prereg.plan import (
    Arm,
    Assumption,
    Budget,
    Controls,
    Direction,
    Factor,
    Hypothesis,
    Level,
    Metric,
    MetricKind,
    Plan,
    Source,
    Stage,
    StageKind,
    TemplateRef,
)
from a3r.prereg.tree import standard_tree

UPDATES = 25
"""Updates of a run where nobody says: with 64 episodes each the built-in games are past the steep part of the curve."""
EVALUATIONS = 5
"""Evaluations after the one before training."""
SEEDS, EXTRA_SEEDS = 3, 2
MAX_SEEDS = 100
USUAL_WALL_S = 12 * 60.0
"""What a study may take on the clock where nobody says; more where its first look already costs more."""
MAX_EPISODES_PER_UPDATE = 4096
GROUP, TASKS = "trainer.group_size", "trainer.tasks_per_update"
UPDATES_PATH, EVERY_PATH, GAMES_PATH = "training.updates", "training.eval_every", "training.eval_games"

START_S, TRAIN_EPISODE_S, EVAL_GAME_S = 25.0, 0.05, 0.03
"""What a run is taken to cost until one was measured: the start, then wall seconds an episode, on a core, with nano."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says about the size of the study; None leaves it to the question, then to the defaults."""

    seeds: int | None = None
    extra_seeds: int | None = None
    updates: int | None = None
    eval_games: int | None = None
    minutes: float | None = None
    """Wall minutes that the study may take."""
    parallel: int = 1
    """Runs side by side."""


def flags(wishes: Mapping[str, float | None]) -> list[str]:
    """The words of a command line that wishes the same, by the fields of `Wishes`."""
    words: list[str] = []
    for field in fields(Wishes):
        wish = wishes.get(field.name)
        name = "jobs" if field.name == "parallel" else field.name.replace("_", "-")
        words += [] if wish is None else [f"--{name}", f"{wish:g}"]
    return words


def design(reading: Reading, wishes: Wishes) -> Plan:
    """The plan of a question.

    Raises:
        QuestionError: the numbers don't fit together; the message says which and what would.
    """
    if all(isinstance(level, int | float) for level in reading.levels):
        reading = replace(reading, levels=tuple(sorted(reading.levels, key=float)))
    game, knob = reading.game, reading.knob
    seeds = wishes.seeds or reading.counts.get("seeds") or SEEDS
    if seeds > MAX_SEEDS:
        raise QuestionError(f"{seeds} seeds are too many, the limit is {MAX_SEEDS}")
    extra = EXTRA_SEEDS if wishes.extra_seeds is None else wishes.extra_seeds
    settings, rules = _controls(reading)
    sizes = _sizes(reading, wishes, settings)
    games = wishes.eval_games or reading.counts.get("eval_games") or _int(settings, GAMES_PATH)
    settings |= {GAMES_PATH: games, UPDATES_PATH: sizes.episodes // sizes.per_update[0], EVERY_PATH: 0}
    arms, adjusted = _arms(reading, sizes, settings)
    metric = _metric(reading, sizes.episodes)
    factor = Factor(
        path=knob.path, label=knob.label, levels=reading.levels, reference=reading.reference, adjusted=adjusted
    )
    evaluations = 1 + sizes.episodes // sizes.between
    cost = START_S + TRAIN_EPISODE_S * sizes.episodes + EVAL_GAME_S * games * (evaluations + 1)
    base = len(arms) * seeds * cost
    wall = wishes.minutes * 60 if wishes.minutes else max(USUAL_WALL_S, 1.5 * base / wishes.parallel)
    reference = next(arm for arm in arms if arm.is_reference)
    others = tuple(arm.key for arm in arms if not arm.is_reference)
    return Plan(
        question=reading.question,
        template=TemplateRef(name=game.name, version=game.version, start_weights=game.start_weights),
        factor=factor,
        metric=metric,
        arms=arms,
        controls=Controls(
            settings=settings,
            rules=rules,
            episodes_per_update=sizes.per_update[0] if len(set(sizes.per_update)) == 1 else None,
            episodes=sizes.episodes,
            episodes_between_evaluations=sizes.between,
            evaluation_games=games,
        ),
        hypotheses=_hypotheses(reading, arms),
        stages=(
            Stage(kind=StageKind.NOISE_FLOOR, arms=(reference.key,)),
            Stage(kind=StageKind.COMPARE, arms=others),
        ),
        seeds=tuple(range(1, seeds + 1)),
        extra_seeds=tuple(range(seeds + 1, seeds + extra + 1)),
        tree=standard_tree(alpha=0.05, margin=metric.margin, can_extend=extra > 0),
        budget=Budget(
            jobs=len(arms) * (seeds + extra),
            job_seconds=wall * wishes.parallel,
            job_limit_s=max(600.0, 6 * cost),
            assumed_job_s=cost,
            parallel=wishes.parallel,
        ),
        assumptions=_assumptions(reading, wishes, sizes, seeds, metric),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many episodes, where."""

    per_update: tuple[int, ...]
    """Episodes per update of each level, in the order of the levels."""
    episodes: int
    """Training episodes of a run, the same for every level."""
    between: int
    """Episodes from one evaluation to the next."""


def _controls(reading: Reading) -> tuple[dict[str, Level | None], dict[str, Level]]:
    """Every setting and rule that the arms share, what the question fixes included, without the factor's own."""
    settings, rules = dict(reading.game.settings), dict(reading.game.rules)
    for path, level in reading.controls.items():
        if {path, reading.knob.path} == {GROUP, TASKS}:
            raise QuestionError(
                "group size and tasks per update can't both be set while one of them is the factor: with equal "
                "episodes one follows from the other; leave one out"
            )
        if path.startswith("rules."):
            rules[path.removeprefix("rules.")] = level
        else:
            settings[path] = level
    settings.pop(reading.knob.path, None)
    if reading.knob.path.startswith("rules."):
        rules.pop(reading.knob.path.removeprefix("rules."))
    return settings, rules


def _sizes(reading: Reading, wishes: Wishes, settings: Mapping[str, Level | None]) -> _Sizes:
    """Episodes per update and in all, such that every level divides them.

    Raises:
        QuestionError: stated numbers that don't go together, or with the levels; the message says what would do.
    """
    defaults = reading.game.settings
    usual = _int(defaults, GROUP) * _int(defaults, TASKS)
    stated = reading.counts.get("episodes_per_update")
    levels = [int(level) for level in reading.levels] if reading.knob.path in {GROUP, TASKS} else []
    if reading.knob.path == TASKS:
        per_update = [level * _int(settings, GROUP) for level in levels]
        if stated:
            raise QuestionError("tasks per update sets the episodes per update; leave the stated number out")
        unit = math.lcm(*per_update)
        of_reference = per_update[reading.levels.index(reading.reference)]
        total = _stated_total(reading, wishes, of_reference, f" at {reading.knob.label} {shown(reading.reference)}")
        if total is None:
            between = unit * max(1, round(UPDATES * usual / EVALUATIONS / unit))
            return _Sizes(tuple(per_update), between * EVALUATIONS, between)
        _check_whole(total, unit, f"of {', '.join(map(str, per_update))} episodes at the levels")
        return _Sizes(tuple(per_update), total, _every(total // unit) * unit)
    if reading.knob.path == GROUP:
        unit = math.lcm(*levels)
        each = stated or unit * max(1, round(usual / unit))
        _check_divides(each, levels, "group size")
    else:
        group, tasks = _int(settings, GROUP), _int(settings, TASKS)
        each = stated or group * tasks
        _check_divides(each, [group], "group size")
        if TASKS in reading.controls and group * tasks != each:
            raise QuestionError(
                f"{tasks} tasks per update in groups of {group} are {group * tasks} episodes per update, not {each}; "
                "leave one out"
            )
    if each > MAX_EPISODES_PER_UPDATE:
        raise QuestionError(
            f"levels {', '.join(map(str, levels))} divide {each} episodes per update at the least, the limit is "
            f"{MAX_EPISODES_PER_UPDATE}; choose levels with a smaller common multiple"
        )
    total = _stated_total(reading, wishes, each) or UPDATES * each
    _check_whole(total, each, f"of {each} episodes")
    return _Sizes((each,) * len(reading.levels), total, _every(total // each) * each)


def _stated_total(reading: Reading, wishes: Wishes, each: int, where: str = "") -> int | None:
    """Training episodes of a run, as stated; None where neither they nor the updates are.

    Args:
        each: episodes of an update.
        where: of which arm's updates, where arms differ in it.
    """
    episodes = reading.counts.get("episodes")
    updates = wishes.updates or reading.counts.get("updates")
    if updates is None:
        return episodes
    if episodes not in {None, updates * each}:
        raise QuestionError(
            f"{updates} updates of {each} episodes{where} are {updates * each} episodes, not {episodes}; leave one out"
        )
    return updates * each


def _check_whole(total: int, unit: int, of_what: str) -> None:
    if total % unit:
        near = max(unit, unit * round(total / unit))
        raise QuestionError(f"{total} episodes are no whole number of updates {of_what}; {near} would do")


def _every(updates: int) -> int:
    """Updates between two evaluations, so that all of them together have about `EVALUATIONS` and end with one."""
    every = max(1, round(updates / EVALUATIONS))
    while updates % every:
        every -= 1
    return every


def _check_divides(each: int, sizes: list[int], label: str) -> None:
    for size in sizes:
        if each % size:
            near = max(size, size * round(each / size))
            raise QuestionError(f"{label} {size} does not divide {each} episodes per update; {near} would do")


def _arms(
    reading: Reading, sizes: _Sizes, settings: dict[str, Level | None]
) -> tuple[tuple[Arm, ...], tuple[str, ...]]:
    """One arm a level, with what the level drags along. Values that every arm shares move into `settings`."""
    path = reading.knob.path
    arms: list[Arm] = []
    for level, each in zip(reading.levels, sizes.per_update, strict=True):
        group = int(level) if path == GROUP else _int(settings, GROUP)
        follows: dict[str, Level] = {
            TASKS: each // group,
            UPDATES_PATH: sizes.episodes // each,
            EVERY_PATH: sizes.between // each,
        }
        own: dict[str, Level] = {} if path.startswith("rules.") else {path: level}
        arms.append(
            Arm(
                key=re.sub(r"[^A-Za-z0-9_.=+-]", "-", f"{path.partition('.')[2]}={shown(level)}"),
                level=level,
                settings={**follows, **own},
                rules={path.removeprefix("rules."): level} if path.startswith("rules.") else {},
                is_reference=level == reading.reference,
            )
        )
    adjusted: list[str] = []
    for name in (TASKS, UPDATES_PATH, EVERY_PATH):
        values = {arm.settings[name] for arm in arms}
        if name == path:
            continue
        if len(values) == 1:
            settings[name] = values.pop()
        else:
            settings.pop(name, None)
            adjusted.append(name)
    kept = {path, *adjusted}
    return (
        tuple(
            arm.model_copy(update={"settings": {name: value for name, value in arm.settings.items() if name in kept}})
            for arm in arms
        ),
        tuple(adjusted),
    )


def _metric(reading: Reading, episodes: int) -> Metric:
    span = reading.game.reward_high - reading.game.reward_low
    if reading.metric is MetricKind.EPISODES_TO:
        return Metric(
            kind=reading.metric,
            threshold=reading.threshold,
            higher_is_better=False,
            unit="episodes",
            worst=float(episodes),
            margin=0.1 * episodes,
            assumed_sd=0.1 * episodes,
        )
    return Metric(
        kind=reading.metric,
        higher_is_better=True,
        unit="reward",
        worst=reading.game.reward_low,
        margin=0.025 * span,
        assumed_sd=0.015 * span,
    )


def _hypotheses(reading: Reading, arms: tuple[Arm, ...]) -> tuple[Hypothesis, ...]:
    label, reference = reading.knob.label, shown(reading.reference)
    does = {
        MetricKind.AREA: "learns",
        MetricKind.FINAL_REWARD: "ends",
        MetricKind.EPISODES_TO: "gets to the threshold",
    }[reading.metric]
    how = {
        (MetricKind.AREA, Direction.BETTER): "faster than",
        (MetricKind.AREA, Direction.WORSE): "slower than",
        (MetricKind.AREA, Direction.DIFFERENT): "at another speed than",
        (MetricKind.FINAL_REWARD, Direction.BETTER): "with a higher held-out reward than",
        (MetricKind.FINAL_REWARD, Direction.WORSE): "with a lower held-out reward than",
        (MetricKind.FINAL_REWARD, Direction.DIFFERENT): "with another held-out reward than",
        (MetricKind.EPISODES_TO, Direction.BETTER): "in fewer episodes than",
        (MetricKind.EPISODES_TO, Direction.WORSE): "in more episodes than",
        (MetricKind.EPISODES_TO, Direction.DIFFERENT): "in another number of episodes than",
    }[reading.metric, reading.expected]
    treated = [arm for arm in arms if not arm.is_reference]
    return tuple(
        Hypothesis(
            code=f"H{number}",
            arm=arm.key,
            expected=reading.expected,
            statement=f"{label} {shown(arm.level)} {does} {how} {label} {reference}",
        )
        for number, arm in enumerate(treated, 1)
    )


def _assumptions(reading: Reading, wishes: Wishes, sizes: _Sizes, seeds: int, metric: Metric) -> tuple[Assumption, ...]:
    found = [
        Assumption(
            text="Every run trains on the same number of episodes, whatever its level.",
            source=Source.USER if reading.names_same_episodes else Source.DEFAULT,
        ),
        Assumption(text=f"A run trains on {sizes.episodes} episodes.", source=_source_of_size(reading, wishes)),
        Assumption(
            text=f"A difference of at most {metric.margin:g} ({metric.unit}) is taken not to matter.",
            source=Source.DEFAULT,
        ),
        Assumption(
            text=f"A run that fails counts as {metric.worst:g} ({metric.unit}), the worst there is.",
            source=Source.DEFAULT,
        ),
        *(Assumption(text=text, source=Source.DEFAULT) for text in reading.assumed),
    ]
    if reading.knob.path == TASKS and (updates := wishes.updates or reading.counts.get("updates")):
        text = f"The number of updates is {updates} at the reference; at equal episodes the other levels differ in it."
        found.insert(2, Assumption(text=text, source=Source.DEFAULT))
    if reading.knob.path == GROUP:
        groups = ", ".join(
            f"{each // int(level)} tasks at {shown(level)}"
            for level, each in zip(reading.levels, sizes.per_update, strict=True)
        )
        found.insert(
            2,
            Assumption(
                text=f"With equal episodes per update a smaller group sees more tasks: {groups} in each update.",
                source=Source.DEFAULT,
            ),
        )
    if wishes.seeds or "seeds" in reading.counts:
        source = Source.USER if reading.counts.get("seeds") == seeds else Source.FLAG
        found.append(Assumption(text=f"{seeds} seeds per arm.", source=source))
    return tuple(found)


def _source_of_size(reading: Reading, wishes: Wishes) -> Source:
    """Who says how many episodes a run trains on; where question and flag agree, the question does."""
    if "episodes" in reading.counts or (
        "updates" in reading.counts and wishes.updates in {None, reading.counts["updates"]}
    ):
        return Source.USER
    return Source.FLAG if wishes.updates else Source.DEFAULT


def _int(settings: Mapping[str, Level | None], path: str) -> int:
    value = settings[path]
    assert isinstance(value, int), (path, value)
    return value
