"""Does it matter which framework an agent is written with? The same game, seeds and settings through four of them.

    make .venv-frameworks/installed
    .venv-frameworks/bin/python benchmarks/frameworks.py [--quick] [--seeds 5] [--jobs 2] [--json FILE]

Tic-tac-toe is trained by a project whose workflow.py is each of examples/workflows in turn, in lockstep, where a run
repeats itself to the last bit. Where a framework asks the same questions, token by token, everything must be identical:
prompts, sampled ids and their log-probabilities, rewards, final weights. Where one asks otherwise, what it adds is
shown, and the held-out reward after training is compared over the seeds, paired, with two one-sided tests against a
margin of 0.10. AgentScope's example keeps it from telling its agents the time: nano was cloned on the games' own words
and answers nothing right behind others.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from project_runs import Trained, TrainingError, train
from rows import Row, report
from tokenizers import Tokenizer

from a3r.stats.compare import Comparison, mean_of, paired_t
from swarm_engine.folders import find_checkpoints
from swarm_engine.models import NANO_DIR
from swarm_engine.server.journal import Journal
from swarm_engine.server.roster import episode_records
from swarm_engine.types import Episode
from vibe import render
from vibe.project import Training, game_of, project_for

GAME = "tictactoe"
WORKFLOWS = Path(__file__).parents[1] / "examples" / "workflows"
REFERENCE = "raw_http"
NUM_SEEDS = 5
MARGIN, LEVEL = 0.10, 0.05
"""Of reward, which spans 1.5; and of the equivalence test, whose interval is the 90% one."""
LEGEND = f"""\
workflow, what, value [interval over seeds] unit, n = seeds. before and after: held-out reward, 95% interval. The
difference from {REFERENCE} is paired and has the 90% interval of the test against a margin of {MARGIN}."""
TRAINING = Training(updates=24, eval_every=24, eval_games=100)
QUICK_TRAINING = Training(updates=1, eval_every=1, eval_games=2)
SETTINGS = ("--set", "lockstep=true", "--set", "trainer.tasks_per_update=4")
QUICK_SETTINGS = ("--set", "trainer.group_size=2")


@dataclass(frozen=True, slots=True)
class Case:
    """One way to ask."""

    name: str
    workflow: str
    """The text of workflow.py."""


def cases() -> Iterator[Case]:
    """Every example, the reference first."""
    for name in (REFERENCE, "openai_sdk", "with_langchain", "with_agentscope"):
        yield Case(name, (WORKFLOWS / f"{name}.py").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Traces:
    """SHA-256 of what a run was made of, over all its updates in order."""

    prompts: str
    sampled: str
    """Ids and log-probabilities."""
    rewards: str
    weights: str
    """Of the last checkpoint's file."""
    first_prompt: tuple[int, ...]


async def traces_of(run_dir: Path) -> Traces:
    """Read a finished run's journal and checkpoint."""
    prompts, sampled, rewards = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    first_prompt: tuple[int, ...] = ()
    for episode in await trained_episodes(run_dir):
        for call in episode.calls:
            first_prompt = first_prompt or call.prompt_ids
            prompts.update(json.dumps(call.prompt_ids).encode())
            sampled.update(json.dumps((call.completion_ids, call.logprobs)).encode())
        rewards.update(json.dumps(sorted(episode.rewards.items())).encode())
    checkpoint = find_checkpoints(run_dir / "checkpoints")[-1]
    return Traces(
        prompts=prompts.hexdigest(),
        sampled=sampled.hexdigest(),
        rewards=rewards.hexdigest(),
        weights=hashlib.sha256((checkpoint.folder("policy") / "model.safetensors").read_bytes()).hexdigest(),
        first_prompt=first_prompt,
    )


async def trained_episodes(run_dir: Path) -> list[Episode]:
    """The episodes of every batch, in order."""
    journal = Journal(run_dir / "journal.db")
    try:
        rows = [row for batch in journal.batches_after(0) for row in journal.episodes_of(batch)]
    finally:
        await journal.close()
    return [episode_records.validate_json(row.record).episode for row in rows]


@dataclass(frozen=True, slots=True)
class Ran:
    """One training through one framework."""

    trained: Trained
    traces: Traces


def run(case: Case, seed: int, folder: Path, *, is_quick: bool) -> Ran:
    """Train the game with this workflow."""
    project = folder / f"{case.name}-{seed}"
    training = QUICK_TRAINING if is_quick else TRAINING
    render.write(render.render(project_for(game_of(GAME), training=training)), project)
    (project / "workflow.py").write_text(case.workflow, encoding="utf-8")
    trained = train(project, folder / f"run-{case.name}-{seed}", seed, *SETTINGS, *(QUICK_SETTINGS if is_quick else ()))
    ran = Ran(trained, asyncio.run(traces_of(trained.run_dir)))
    before, after = (trained.level(label, 1).mean for label in ("before", "after"))
    print(f"{case.name}, seed {seed}: {before:.3f} to {after:.3f}, {trained.wall_s:.0f} s", file=sys.stderr, flush=True)
    return ran


@dataclass(frozen=True, slots=True)
class Summary:
    """One way to ask, beside the reference."""

    name: str
    identical: dict[str, int]
    """Seeds in which the prompts, the sampled tokens, the rewards and the weights are the reference's."""
    before: Comparison
    after: Comparison
    difference: Comparison
    """From the reference after training, seed by seed."""
    added: str
    """What the first prompt says beyond the reference's."""

    @property
    def is_identical(self) -> bool:
        """Whether every run is the reference's, to the last bit."""
        return all(count == self.after.n for count in self.identical.values())

    @property
    def is_equivalent(self) -> bool:
        """Whether the difference after training lies within the margin: none at all, or by test."""
        is_none = self.difference.se == 0 and self.difference.value == 0
        return is_none or self.difference.p_equivalent(MARGIN) < LEVEL


def summary(name: str, runs: Sequence[Ran], reference: Sequence[Ran], tokenizer: Tokenizer) -> Summary:
    """What the runs of one case came to; both in the order of the seeds."""
    pairs = [(one.traces, other.traces) for one, other in zip(runs, reference, strict=True)]
    first, first_reference = (
        tokenizer.decode(list(ran.traces.first_prompt), skip_special_tokens=False) for ran in (runs[0], reference[0])
    )
    levels = {label: [ran.trained.level(label, 1).mean for ran in runs] for label in ("before", "after")}
    after = [ran.trained.level("after", 1).mean for ran in reference]
    return Summary(
        name,
        {
            part: sum(getattr(one, part) == getattr(other, part) for one, other in pairs)
            for part in ("prompts", "sampled", "rewards", "weights")
        },
        mean_of(levels["before"]),
        mean_of(levels["after"]),
        paired_t(levels["after"], after),
        added_lines(first, first_reference),
    )


def added_lines(text: str, reference: str) -> str:
    """The lines of a text that its reference lacks."""
    left = Counter(text.splitlines()) - Counter(reference.splitlines())
    return "\n".join(line for line in text.splitlines() if left[line])


def rows_of(summaries: Iterable[Summary], *, is_quick: bool) -> Iterator[Row]:
    """Everything as rows."""
    for each in summaries:
        for part, count in each.identical.items():
            yield Row(each.name, f"runs with identical {part}", count, "runs", None, None, each.after.n, is_quick)
        for metric, value, level in (
            ("before", each.before, 0.95),
            ("after", each.after, 0.95),
            ("after, less the reference's", each.difference, 1 - 2 * LEVEL),
        ):
            low, high = value.interval(level) if value.se is not None else (None, None)
            yield Row(each.name, metric, value.value, "reward", low, high, value.n, is_quick)
        if each.difference.is_informative:
            p = each.difference.p_equivalent(MARGIN)
            yield Row(each.name, "p of a difference that matters", p, "", None, None, each.after.n, is_quick)


def promises(summaries: Iterable[Summary]) -> Iterator[tuple[bool, str]]:
    """What is promised, each with whether these runs keep it."""
    for each in summaries:
        if each.name == REFERENCE:
            continue
        if each.identical["prompts"]:
            yield each.is_identical, f"{each.name}: same prompts, and ids, rewards and weights identical"
        else:
            p = each.difference.p_equivalent(MARGIN)
            yield each.is_equivalent, f"{each.name}: other prompts, equivalent within {MARGIN} (p {p:.3g})"


def main() -> int:
    """Run it; the exit code says whether every training came to its end, the last lines whether the promises hold."""
    parser = argparse.ArgumentParser(description="Does it matter which framework an agent is written with?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="trainings of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    num_seeds = 1 if args.quick else args.seeds
    todo = list(cases())
    with tempfile.TemporaryDirectory(prefix="frameworks-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        running = {
            (case.name, seed): pool.submit(run, case, seed, Path(folder), is_quick=args.quick)
            for seed in range(num_seeds)
            for case in todo
        }
        try:
            runs = {case.name: [running[case.name, seed].result() for seed in range(num_seeds)] for case in todo}
        except TrainingError as error:
            pool.shutdown(cancel_futures=True)
            print(f"FAILED {error}", flush=True)
            return 1
    tokenizer = Tokenizer.from_file(str(NANO_DIR / "tokenizer.json"))
    summaries = [summary(case.name, runs[case.name], runs[REFERENCE], tokenizer) for case in todo]
    rows = list(rows_of(summaries, is_quick=args.quick))
    for each in summaries:
        if each.added:
            print(f"{each.name} adds to the prompt:\n{each.added}")
    report(rows, args.json, promises(summaries), LEGEND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
