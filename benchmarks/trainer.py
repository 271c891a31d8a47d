"""Trainer and sampler beside TRL's GRPOTrainer, transformers' `generate` and vLLM, on one CPU thread, in one run.

    make .venv-trl/installed
    .venv-trl/bin/python benchmarks/trainer.py [--quick] [--parts steps samplers] [--groups 2] [--steps 7]
                                               [--repetitions 7] [--model FOLDER] [--vllm-python PYTHON]
                                               [--json FILE]

The model is a Qwen3 of hidden size 256 with 4 layers, warmed up on two games first (trainer_tasks.py). In `guess` every
episode has six turns, each a tool call, which TRL plays by its `environment_factory`; in `count` it has one reply. Both
trainers have the same start weights, prompts, tools, limits, group size, batch, temperature 1, one optimizer step a
batch, the clipped loss over the mean of all tokens, float32, no reference policy; rewards are random, so neither leaves
an episode out. They take turns, step by step, and a step is all from one update to the next (trainer_steps.py). Over
HTTP the same steps are taken by a server with 8 x GROUPS agents before it: printed, nothing is promised.

The samplers' part (trainer_samplers.py) draws random tokens: replies of one length, of uneven lengths, and groups of
eight over six turns in the shape of trajectories.py's `react`. vLLM is asked where an interpreter that has it is named;
nothing is promised against it.

CPU time is that of all processes of a step, in user and system mode. Ratios are of medians over interleaved
repetitions, with a bootstrap interval over these.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import trl
from ratios import ratio_of_medians
from rows import Row, show, show_promises, write_rows
from trainer_samplers import (
    SIZES,
    GenerateSampler,
    OwnSampler,
    VllmTimes,
    Workload,
    measure_vllm,
    play,
    workloads,
)
from trainer_steps import GROUP_SIZE, OwnRun, Setting, Step, TrlRun, have_same_prompts, http_run, take_turns
from trainer_tasks import COUNT, GUESS, VOCAB_SIZE, WARM_UP, Game, build_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from experiments_db.intervals import Interval
from swarm_engine.models.loading import load_policy

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
"""Qwen3's own, without thoughts; one that TRL knows how to read tool calls from."""
MIN_SPEEDUP = {GUESS.name: 1.5, COUNT.name: 1.0}
"""Promised of a step, in CPU time."""
MIN_CALLS = 0.9
"""Promised of both trainers, or they would not have played the same game."""
MIN_SAMPLER, MIN_SAMPLER_TURNS = 1.0, 2.0
"""Promised of the sampler against `generate`, in tokens per CPU second; the second where prompts go on."""
PARTS = ("steps", "samplers")
QUICK_UPDATES, QUICK_SIZES = 3, (8,)
LEGEND = f"""\
what is sampled or trained, what of whom, value [95% bootstrap interval] unit, n = repetitions. GAME, GROUPS x
{GROUP_SIZE}: medians over steps; "rollout" is prompts, replies, tools and rewards, "update" the rest of the step;
"read" are the tokens of prompts and histories that a rollout computed, "trained" those of an update, padding included
for TRL. A ratio above 1 means that ours takes less CPU time."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A game's steps."""

    game: Game
    case: str
    num_episodes: int
    """Of a step."""
    steps: dict[str, list[Step]]
    has_same_prompts: bool

    def ratio(self, name: str) -> Interval:
        """CPU time of a step of somebody over ours."""
        those, ours = ([step.cpu_s for step in self.steps[one]] for one in (name, "ours"))
        return ratio_of_medians(those, ours)

    def ratio_per_token(self, name: str) -> Interval:
        """The same of CPU time by token sampled: replies are drawn, so one trainer may have had the longer ones."""
        those, ours = ([step.cpu_s / step.num_sampled for step in self.steps[one]] for one in (name, "ours"))
        return ratio_of_medians(those, ours)


def measure_steps(model: Path, game: Game, num_groups: int, num_steps: int) -> Beside:
    """Let the three take turns."""
    setting = Setting(model, game, num_groups)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder, http_run(setting, Path(folder) / "run") as http:
        theirs = TrlRun(setting, Path(folder) / "trl", num_steps + 1)
        ours = OwnRun(setting)
        has_same = have_same_prompts(theirs, ours, setting)
        steps = take_turns({"TRL": theirs, "ours": ours, "ours over HTTP": http}, num_steps)
        theirs.close()
    return Beside(game, f"{game.name}, {num_groups} x {GROUP_SIZE}", setting.num_episodes, steps, has_same)


def step_rows(found: Beside, *, is_quick: bool) -> Iterator[Row]:
    """Everything of a game."""
    for name, steps in found.steps.items():
        n = len(steps)

        def row(what: str, values: Sequence[float], unit: str, name: str = name, n: int = n) -> Row:
            return Row(found.case, f"{name}, {what}", statistics.median(values), unit, None, None, n, is_quick)

        yield row("CPU time of a step", [step.cpu_s for step in steps], "s")
        yield row("wall time of a step", [step.wall_s for step in steps], "s")
        if all(step.rollout_s is not None for step in steps):
            yield row("rollout", [step.rollout_s or 0 for step in steps], "s")
            yield row("update", [step.cpu_s - (step.rollout_s or 0) for step in steps], "s")
            if found.game.tools:
                yield row("calls of the tool", [step.num_calls or 0 for step in steps], "calls")
            yield row("tokens read", [step.num_read or 0 for step in steps], "tokens")
        yield row("tokens sampled", [step.num_sampled for step in steps], "tokens")
        yield row("tokens trained", [step.num_trained for step in steps], "tokens")
        if name != "ours":
            for what, ratio in (("", found.ratio(name)), (" by token sampled", found.ratio_per_token(name))):
                yield Row(found.case, f"{name} / ours{what}", ratio.mean, "", ratio.low, ratio.high, n, is_quick)


def step_promises(found: Beside) -> Iterator[tuple[bool, str]]:
    """What is promised of a game."""
    bar = MIN_SPEEDUP[found.game.name]
    for what, ratio in (("a step", found.ratio("TRL")), ("a token sampled", found.ratio_per_token("TRL"))):
        yield ratio.mean >= bar, f"{found.case}: {what} of TRL takes {ratio.mean:.2f} times ours, at least {bar}"
    yield found.has_same_prompts, f"{found.case}: TRL and ours give the model the same prompts"
    if found.game.tools:
        most = (found.game.num_turns - 1) * found.num_episodes
        for name in ("TRL", "ours"):
            share = statistics.fmean(step.num_calls or 0 for step in found.steps[name]) / most
            yield share >= MIN_CALLS, f"{found.case}: {name} carried out {share:.0%} of the calls there could be"
    num_flat = sum(step.num_flat for steps in found.steps.values() for step in steps)
    yield num_flat == 0, f"{found.case}: {num_flat} episodes of groups without variance, so both trained all"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A workload's CPU seconds, by who sampled it."""

    workload: Workload
    times_s: dict[str, list[float]]

    @property
    def ratio(self) -> Interval:
        """Tokens per CPU second, ours over `generate`."""
        return ratio_of_medians(self.times_s["generate"], self.times_s["ours"])


def measure_samplers(model: Path, todo: Sequence[Workload], num_repetitions: int) -> Iterator[Sampled]:
    """Let both sample every workload in turn, after a first time that warms them up."""
    policy = load_policy(model).model
    generate = GenerateSampler(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    for workload in todo:
        ours = OwnSampler(policy, workload.size)
        times: dict[str, list[float]] = {"ours": [], "generate": []}
        for number in range(num_repetitions + 1):
            ours.forget()
            samplers = {"ours": ours, "generate": generate}
            for name in sorted(samplers, reverse=number % 2 == 0):
                times[name].append(play(workload, samplers[name]))
        yield Sampled(workload, {name: some[1:] for name, some in times.items()})


def sampler_rows(found: Sampled, *, is_quick: bool) -> Iterator[Row]:
    """Everything of a workload."""
    case, num_tokens = found.workload.name, found.workload.num_tokens
    for name, times in found.times_s.items():
        rate = num_tokens / statistics.median(times)
        yield Row(case, f"{name}, tokens per CPU second", rate, "tokens/s", None, None, len(times), is_quick)
    ratio = found.ratio
    yield Row(case, "ours / generate", ratio.mean, "", ratio.low, ratio.high, ratio.n, is_quick)


def sampler_promise(found: Sampled) -> tuple[bool, str]:
    """What is promised of a workload."""
    bar = MIN_SAMPLER_TURNS if found.workload.has_history else MIN_SAMPLER
    ratio = found.ratio.mean
    return ratio >= bar, f"{found.workload.name}: {ratio:.2f} times the tokens of generate, at least {bar}"


@dataclass(slots=True)
class Record:
    """Rows, shown and written as they come, for the whole takes its time."""

    file: Path | None
    rows: list[Row] = field(default_factory=list)
    promises: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, rows: Iterable[Row], promises: Iterable[tuple[bool, str]] = ()) -> None:
        """Take some more."""
        for row in rows:
            self.rows.append(row)
            print(show(row), flush=True)
        self.promises += promises
        if self.file:
            write_rows(self.rows, self.file)


def vllm_row(found: VllmTimes, workload: Workload, *, is_quick: bool) -> Row:
    """What vLLM made of a workload."""
    times = found.cpu_s[workload.name]
    rate = workload.num_tokens / statistics.median(times)
    what = f"vLLM {found.version}, tokens per CPU second"
    return Row(workload.name, what, rate, "tokens/s", None, None, len(times), is_quick)


def main() -> int:
    """Run it; the last lines say whether the promises hold."""
    parser = argparse.ArgumentParser(description="Trainer and sampler beside TRL, generate and vLLM.")
    parser.add_argument("--quick", action="store_true", help="show within a minute or two that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" or ".join(PARTS))
    parser.add_argument("--groups", type=int, default=2, help=f"of {GROUP_SIZE} episodes in a step")
    parser.add_argument("--steps", type=int, default=7, help="measured of each trainer")
    parser.add_argument("--repetitions", type=int, default=7, help="of each sampler's workload")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="keep the warmed-up model here, or take it")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an interpreter that has vllm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    is_quick: bool = args.quick
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    num_groups, num_steps, num_repetitions, sizes = args.groups, args.steps, args.repetitions, SIZES
    if is_quick:
        num_groups, num_steps, num_repetitions, sizes = 1, 1, 1, QUICK_SIZES
    record = Record(args.json)
    print(LEGEND, flush=True)
    with tempfile.TemporaryDirectory(prefix="trainer-model-") as folder:
        model = args.model or Path(folder) / "model"
        if not model.exists():
            recipe = replace(WARM_UP, num_updates=QUICK_UPDATES) if is_quick else WARM_UP
            build_model(model, TEMPLATE.read_text(encoding="utf-8"), recipe)
        for game in (GUESS, COUNT) if "steps" in args.parts else ():
            beside = measure_steps(model, game, num_groups, num_steps)
            record.add(step_rows(beside, is_quick=is_quick), step_promises(beside))
        todo = workloads(VOCAB_SIZE, sizes) if "samplers" in args.parts else []
        for sampled in measure_samplers(model, todo, num_repetitions):
            record.add(sampler_rows(sampled, is_quick=is_quick), [sampler_promise(sampled)])
        if args.vllm_python and todo:
            vllm = measure_vllm(args.vllm_python, model, todo, num_repetitions)
            record.add(vllm_row(vllm, workload, is_quick=is_quick) for workload in todo)
    if not is_quick:
        show_promises(record.promises)
    return 0


if __name__ == "__main__":
    sys.exit(main())
