"""What a project's train.py stands on: its settings, its swarm, and a `Run` that plays, measures and remembers.

A run can be interrupted at any moment and started again in the same folder: the swarm's journal holds every completed
episode and every update, `record.jsonl` holds what was measured, and the run goes on after both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments_db.errors import ExperimentsDbError
from experiments_db.home import home_folder
from experiments_db.intervals import likelihood_interval
from swarm_engine.client import AsyncSwarmClient, Episode, EpisodeResult, SwarmError, Task, read_token
from swarm_engine.client.http import RECONNECT_S
from swarm_engine.config import EngineConfig, PolicyConfig
from swarm_engine.health import WarningKind
from swarm_engine.signals import ending_signals, leave_dead_terminal
from swarm_engine.types import Mode, Outcome
from vibe import library, seeds, warmup
from vibe.control import Shuffled
from vibe.dry_play import DryPlay, dry_play
from vibe.embedded import Swarm, check_named, embedded_swarm
from vibe.envs import Env, EnvHost, RulesError
from vibe.errors import (
    INTERRUPTED,
    EnvError,
    GameError,
    StoppedError,
    StuckError,
    TooSmallError,
    UsageError,
    VibeError,
)
from vibe.judging import (
    MIN_SHARE_WITH_VARIANCE,
    NUM_PROBE_GROUPS,
    Play,
    is_judged,
    mean_reward,
    scripted_rewards,
    share_with_variance,
)
from vibe.live import LiveSwarm
from vibe.project import POLICY, RESULTS_FILE, ProjectSpec, code_of, parse_changes, refuse_if_edited
from vibe.record import Event, Record
from vibe.run_folder import how_to_go_on, locked

MODELS = "models"
"""Folder of warmed-up weights: in A3R_HOME those ever made, in a run's folder those its server may load."""
SERVER_FILE = "server.json"
"""Where a swarm's run folder is, this file is."""
HELD_OUT = "heldout"
NUM_SAMPLES = 3
"""Games shown at the end, move by move."""

Rollout = Callable[..., Awaitable[None]]
"""`rollout(episode, env, seed, *, temperature)` of a project's workflow.py."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one start of train.py was asked for."""

    project: Path
    spec: ProjectSpec
    """As in the project, with `--set` and its kin applied."""
    run_dir: Path
    swarm_url: str | None = None
    """None starts a swarm of its own in the run's folder."""
    token_file: Path | None = None
    experiment: str | None = None
    """Id of the row that the events belong to; None writes no rows."""
    db_url: str | None = None
    as_json: bool = False
    shuffle_rewards: bool = False
    """A control: rewards change hands among the episodes of an update, so there is nothing to learn."""
    goes_on: bool = False
    """Whether training goes on where nothing can be learned any more."""
    exits_with_stdin: bool = False
    """Stop in order when the standard input closes, so that a training ends with the program that started it."""


def parse(argv: Sequence[str], project: Path) -> Settings:
    """Settings from the command line of a project's train.py.

    Raises:
        UsageError: a value does not fit.
        SystemExit: argparse has answered, to --help or to a flag it does not know.
    """
    parser = argparse.ArgumentParser(prog="train.py", description="Train the policy of this project.")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder of this run; an interrupted run goes on in it"
    )
    parser.add_argument("--swarm", metavar="URL", help="train on this swarm instead of one of its own")
    parser.add_argument("--token-file", type=Path, help="the swarm's token.json")
    parser.add_argument("--seed", type=int, help="seed of the run")
    parser.add_argument("--updates", type=int, help="optimizer updates")
    parser.add_argument("--eval-every", type=int, help="updates between evaluations")
    parser.add_argument("--eval-games", type=int, help="held-out games of an evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="e.g. trainer.group_size=4")
    parser.add_argument("--experiment", metavar="ID", help="write rows for this experiment")
    parser.add_argument("--db", metavar="URL", help="database of the experiment")
    parser.add_argument("--json", action="store_true", help="one JSON line an event")
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: give each reward to a random episode")
    parser.add_argument("--go-on", action="store_true", help="train on where nothing can be learned any more")
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when the standard input closes")
    args = parser.parse_args(argv)
    changes = parse_changes(args.set)
    named = {"config.seed": args.seed} | {
        f"training.{name}": getattr(args, name) for name in ("updates", "eval_every", "eval_games")
    }
    changes |= {path: str(value) for path, value in named.items() if value is not None}
    check_named(args.swarm, args.token_file)
    if (args.experiment is None) != (args.db is None):
        raise UsageError("--experiment and --db go together: the rows of the experiment are in that database")
    return Settings(
        project=project,
        spec=ProjectSpec.load(project).with_settings(changes),
        run_dir=args.run_dir.resolve(),
        swarm_url=args.swarm,
        token_file=args.token_file,
        experiment=args.experiment,
        db_url=args.db,
        as_json=args.json,
        shuffle_rewards=args.shuffle_rewards,
        goes_on=args.go_on,
        exits_with_stdin=args.exit_with_stdin,
    )


class Run:
    """One training: plays, measures, remembers."""

    def __init__(self, settings: Settings, record: Record) -> None:
        self.settings = settings
        self.spec = settings.spec
        self.record = record
        self._live: LiveSwarm | None = None
        self._host: EnvHost | None = None
        self._rollout: Rollout | None = None
        self._dry: DryPlay | None = None
        self._last_fault = ""
        """What the environment did wrong last, for the message where it goes on doing so."""
        self._started = time.monotonic()

    @property
    def live(self) -> LiveSwarm:
        """The swarm while it runs."""
        assert self._live, "this belongs inside `async with run.swarm()`"
        return self._live

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.spec.config.seed

    @contextlib.asynccontextmanager
    async def swarm(self) -> AsyncIterator[LiveSwarm]:
        """A swarm with its engine started: one of its own, or the one that --swarm names.

        Raises:
            UsageError: the folder is taken, or the named swarm trains something else.
            SwarmFailedError: the engine does not come up.
        """
        async with contextlib.AsyncExitStack() as stack:
            swarm = await stack.enter_async_context(self._connect())
            # One of its own is a child of this process: gone, nobody brings it back.
            reconnect_s = RECONNECT_S if swarm.pid is None else 0
            client = await stack.enter_async_context(AsyncSwarmClient(swarm.url, swarm.token, reconnect_s=reconnect_s))
            live = LiveSwarm(swarm, client, await self._config_with_weights(swarm))
            await stack.enter_async_context(background(live.follow()))
            await stack.enter_async_context(collected(swarm, client, self.settings))
            self.record.emit("phase", text=f"starting the engine at {swarm.url}", url=swarm.url)
            await live.open(goes_on=self.record.find("evaluation") is not None)
            self._live = live
            self._note_steps()
            yield live

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Swarm]:
        if self.settings.swarm_url and self.settings.token_file:
            folder = self.settings.token_file.resolve().parent
            is_here = (folder / SERVER_FILE).is_file()
            token = read_token(self.settings.token_file)
            yield Swarm(self.settings.swarm_url, token, run_dir=folder if is_here else None)
        else:
            async with embedded_swarm(self.settings.run_dir) as swarm:
                yield swarm

    async def _config_with_weights(self, swarm: Swarm) -> EngineConfig:
        """The engine's config with the start weights in it, warmed up first where none ship for these rules."""
        name = self.spec.start_weights
        template = library.load(self.spec.template)
        if name == template.start_weights:
            if warmup.is_shipped(template, self.spec.rules):
                self._note_warm_up(name, warmup.shipped_card(template))
            else:
                name = await self._warm_up(template, swarm)
        return self.spec.config.model_copy(update={"policies": {POLICY: PolicyConfig(model=name)}})

    async def _warm_up(self, template: library.Template, swarm: Swarm) -> str:
        """Clone start weights for these rules, once for all runs, and put them where the swarm loads from."""

        def tell(text: str) -> None:
            self.record.emit("phase", text=text)

        made = home_folder() / MODELS
        name, card = await warmup.warm_up(template, self.spec.rules, made, tell=tell)
        self._note_warm_up(name, card)
        if swarm.run_dir is None:
            raise UsageError(
                f"the rules need start weights that the swarm at {swarm.url} does not have; copy {made / name} into "
                "the folder `models` of its run folder, and name the token.json that lies in that run folder"
            )
        copy_model(made / name, swarm.run_dir / MODELS / name)
        return name

    def _note_warm_up(self, name: str, card: warmup.Card) -> None:
        if not self.record.find("warmup", name=name):
            text = f"start weights {name}: {card.in_words()}"
            self.record.emit("warmup", name=name, text=text, card=json.loads(card.to_json()))

    @contextlib.asynccontextmanager
    async def games(self, rollout: Rollout) -> AsyncIterator[EnvHost]:
        """The process that plays the games, and the function that takes the policy through one.

        Raises:
            EnvError: the environment is at fault; some dry games show it before anything is trained.
            EditedError: the code was edited since the run began.
        """
        code = self.record.last("code")
        async with EnvHost(self.settings.project, self.spec.rules, code=code) as host:
            self._host, self._rollout = host, rollout
            self._dry = dry = await dry_play(host)
            self.record.emit(
                "environment",
                num_games=dry.num_games,
                most_turns=dry.most_turns,
                lowest=dry.lowest,
                highest=dry.highest,
                bounds=dry.about.bounds,
            )
            yield host

    async def measure_scripted_levels(self) -> None:
        """What scripted players earn on the held-out games: the floor of legal random play, and an honest player."""
        for player in library.load(self.spec.template).levels:
            if self.record.find("level", player=player):
                continue
            env = self._env()
            games = map(seeds.held_out_seed, range(self.spec.training.eval_games))
            rewards = await scripted_rewards(env, player, games)
            await env.close()
            interval = likelihood_interval(rewards, bounds=self._bounds)
            assert interval, "an evaluation has at least two games"
            ends = [interval.low, interval.high]
            self.record.emit("level", player=player, mean=interval.mean, ci=ends, n_groups=interval.n)

    async def check_that_it_can_learn(self) -> None:
        """Play some groups that are never trained: only different rewards within a group can teach anything.

        Raises:
            TooSmallError: too few groups have any.
            GameError: none has any, and other play is paid alike too; or all these games were lost.
        """
        group_size = self.spec.config.trainer.group_size
        event = self.record.find("variance")
        if event is None:
            games = [
                Task(f"probe-{i}", {"seed": seeds.train_seed(self.seed, "probe", i)}) for i in range(NUM_PROBE_GROUPS)
            ]
            results = await self.live.play(games, self._play(temperature=1), mode=Mode.DEBUG, group_size=group_size)
            groups = by_agent(results)
            if not groups:
                raise GameError(
                    f"all {len(results)} games of a trial were lost, each ended without a reward{self._because()}; "
                    "look for env_error among the run's episodes, then start the same command again"
                )
            share = share_with_variance(groups)
            event = self.record.emit("variance", share=share, n_groups=len(games), limit=MIN_SHARE_WITH_VARIANCE)
        if event["share"] == 0 and (alike := self._alike_whatever_is_played()):
            raise GameError(
                f"the environment is at fault: it pays {alike} whatever is played: by the policy, by random players "
                "and by one who answers nonsense, so there is nothing to learn; see env.py and rewards.py"
            )
        if event["share"] < MIN_SHARE_WITH_VARIANCE:
            raise TooSmallError(
                f"{self.spec.start_weights} is too small for this: in {event['share']:.0%} of {event['n_groups']} "
                f"games its {group_size} attempts were paid differently, and learning by comparison needs "
                f"{MIN_SHARE_WITH_VARIANCE:.0%}; "
                "make the game easier (fewer cells, players or stones), or train a larger policy"
            )

    def _alike_whatever_is_played(self) -> str | None:
        """What all play without the policy was paid in a game, if no other play made a difference; else None."""
        dry, levels = self._dry, {event["mean"] for event in self.record.all("level")}
        if dry is None or dry.tells_replies_apart or len(levels) > 1:
            return None
        is_one = dry.lowest == dry.highest
        return f"{dry.lowest:g}" if is_one else f"each game (from {dry.lowest:g} to {dry.highest:g}) the same"

    @property
    def _bounds(self) -> tuple[float, float] | None:
        """Range of the rewards, where the game declares one."""
        return self._dry.about.bounds if self._dry else None

    def _because(self) -> str:
        return f" ({self._last_fault})" if self._last_fault else ""

    def steps_left(self) -> Iterable[int]:
        """The updates to do, after those that the swarm has done already."""
        return range(self.live.step + 1, self.spec.training.updates + 1)

    async def update(self, step: int) -> None:
        """Play one batch of train games and wait for the update that it makes.

        Raises:
            StuckError: nothing can be learned any more, and nobody asked to go on.
        """
        num_games = self.spec.config.trainer.tasks_per_update
        first = (step - 1) * num_games
        games = [Task(f"train-{i}", {"seed": seeds.train_seed(self.seed, i)}) for i in range(first, first + num_games)]
        play = self._play(temperature=1)

        def played(num_episodes: int) -> Play:
            if not self.settings.shuffle_rewards:
                return play
            return Shuffled(play, num_episodes, seeds.shuffle_seed(self.seed, step))

        try:
            payload = await self.live.update(step, games, played)
        except GameError as error:
            raise GameError(f"{error}{self._because()}") from error
        self._note_steps()
        stuck = [one for one in payload.get("health", ()) if one["kind"] == WarningKind.STUCK]
        if stuck and not self.settings.goes_on:
            raise StuckError(
                f"update {step}: {stuck[0]['message']}. The same command with --go-on in this folder trains on all the "
                "same"
            )

    def _note_steps(self) -> None:
        """Write down the updates that are not written down yet, with what they warn of and the one before did not; an
        interrupted run may have missed its last ones."""
        last = self.record.find("step")
        first = last["step"] + 1 if last else 1
        known = warned_of(last) if last else set()
        for step, payload in sorted(self.live.progress.steps.items()):
            if step >= first:
                event = self.record.emit("step", updates=self.spec.training.updates, **payload)
                for one in event.get("health", ()):
                    if (one["policy"], one["kind"]) not in known:
                        self.record.emit("warning", step=step, name=one["kind"], text=one["message"])
                known = warned_of(event)

    def is_time_to_evaluate(self) -> bool:
        """Whether an evaluation belongs between the last update and the next."""
        return self.live.step > 0 and self.live.step % self.spec.training.eval_every == 0

    async def evaluate(self, label: str, *, temperature: float) -> None:
        """Play every held-out game once; the interval is over games.

        Args:
            label: `before`, `during` or `after`.
            temperature: of the policy's replies; 0 is greedy.
        """
        step = self.live.step
        asked = {"label": label, "temperature": temperature}
        if self.record.find("evaluation", **asked, **({} if label == "before" else {"step": step})):
            return
        started = time.monotonic()
        games = [Task(f"heldout-{i}", {"seed": seeds.held_out_seed(i)}) for i in range(self.spec.training.eval_games)]
        samples: dict[str, list[Any]] = {}
        results = await self.live.play(
            games,
            self._play(temperature=temperature, samples=samples),
            mode=Mode.EVAL,
            tags={"split": HELD_OUT, "temperature": f"{temperature:g}", "label": label},
        )
        rewards = [mean_reward(result.rewards) for result in results if is_judged(result.rewards, result.outcome)]
        interval = likelihood_interval(rewards, bounds=self._bounds)
        if interval is None:
            raise GameError(
                f"all {len(games)} held-out games of this evaluation were lost, each ended without a reward"
                f"{self._because()}; look for env_error among the run's episodes, then start the same command again: "
                "it goes on from here"
            )
        self.record.emit(
            "evaluation",
            **asked,
            step=step,
            mean=interval.mean,
            ci=[interval.low, interval.high],
            n_groups=interval.n,
            n_lost=len(games) - interval.n,
            seconds=round(time.monotonic() - started, 3),
            rewards=rewards,
            samples=[samples[task.task_id] for task in games if task.task_id in samples][:NUM_SAMPLES],
        )

    def finish(self) -> None:
        """Write results.json and say that the run is over."""
        path = self.settings.run_dir / RESULTS_FILE
        results = {
            "template": self.spec.template,
            "template_version": self.spec.template_version,
            "rules": self.spec.rules,
            "seed": self.seed,
            "updates": self.live.step,
            "lockstep": self.spec.config.lockstep,
            "shuffled_rewards": self.settings.shuffle_rewards,
            "experiment": self.settings.experiment,
            "model": self.live.config.policies[POLICY].model,
            "warmup": self.record.find("warmup"),
            "variance": self.record.find("variance"),
            "levels": self.record.all("level"),
            "evaluations": self.record.all("evaluation"),
            "steps": self.record.all("step"),
        }
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
        self.record.emit("result", path=str(path), seconds=round(time.monotonic() - self._started, 1))

    def _env(self) -> Env:
        assert self._host, "this belongs inside `async with run.games(rollout)`"
        return self._host.env()

    def _play(self, *, temperature: float, samples: dict[str, list[Any]] | None = None) -> Play:
        """How one episode of a task is played; what happened in it goes into `samples` by task."""
        assert self._rollout, "this belongs inside `async with run.games(rollout)`"
        rollout = self._rollout

        async def play(episode: Episode, task: Task) -> None:
            env = Watched(self._env())
            try:
                await rollout(episode, env, task.data["seed"], temperature=temperature)
            except RulesError:
                raise
            except EnvError as error:
                # Nobody's reply is to blame, so nobody is paid for it; the swarm counts it and asks for another.
                self._last_fault = str(error)
                self.record.emit("phase", text=f"a game was lost: {error}")
                await episode.end(reward=None, outcome=Outcome.ENV_ERROR)
            else:
                if samples is not None and env.record is not None:
                    samples[task.task_id] = env.record
            with contextlib.suppress(EnvError):  # its process died, and the game with it
                await env.close()

        return play


class Watched:
    """An environment that remembers what happened in its game."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.record: list[Any] | None = None
        """Once the game is over."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""
        return self._seen(await self._env.reset(seed))

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""
        return self._seen(await self._env.step(text))

    async def close(self) -> None:
        """Forget the game."""
        await self._env.close()

    def _seen(self, turn: dict[str, Any]) -> dict[str, Any]:
        self.record = turn["record"] if "rewards" in turn else None
        return turn


def warned_of(step: Event) -> set[tuple[str, str]]:
    """Policy and kind of each warning of an update."""
    return {(one["policy"], one["kind"]) for one in step.get("health", ())}


def by_agent(results: Iterable[EpisodeResult]) -> list[list[float]]:
    """Rewards of each task's agents over its episodes: what each is measured against."""
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for result in results:
        for agent, reward in result.rewards.items():
            if reward is not None:
                groups[result.task_id, agent].append(reward)
    return list(groups.values())


def copy_model(source: Path, target: Path) -> None:
    """Put warmed-up weights where a server looks for them; whole or not at all."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        shutil.copytree(source, draft, dirs_exist_ok=True)
        draft.rename(target)


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run some work beside the block and end it with the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def collected(swarm: Swarm, client: AsyncSwarmClient, settings: Settings) -> AsyncIterator[None]:
    """Write the swarm's events as rows of the run's experiment beside the block, to the last one.

    Raises:
        CollectorError: not every row could be written; the swarm still has the events.
    """
    if settings.experiment is None:
        yield
        return
    # Imported here: a run without a database does not wait for its libraries.
    from experiments_db.collect import Collector

    with Collector(swarm.url, swarm.token, settings.db_url, settings.experiment).run_in_thread() as collector:
        try:
            yield
        finally:
            with contextlib.suppress(SwarmError):  # a swarm that is gone has no more events now
                last = (await client.status()).last_seq
                await asyncio.to_thread(collector.drain, last)


def begin(settings: Settings, record: Record) -> None:
    """Write down what the run is, or see that it goes on as what it was begun.

    Raises:
        UsageError: the folder holds a run with other settings, or of a project that was edited since.
    """
    code = code_of(settings.project)
    now = {"spec": settings.spec.model_dump(mode="json"), "shuffle_rewards": settings.shuffle_rewards}
    before = record.find("begin")
    if before is None:
        record.emit("begin", **now, code=code)
        return
    then = {"spec": without_credentials(before["spec"]), "shuffle_rewards": before["shuffle_rewards"]}
    changed = sorted(differences(then, now))
    if changed:
        raise UsageError(
            f"{settings.run_dir} holds a run that was begun with another {changed[0]}; start it as it was to go on, or "
            "name another folder: --run-dir"
        )
    if (known := record.last("code")) is not None:  # the record of an older version gets it from here on
        refuse_if_edited(known, code, f"the run in {settings.run_dir}")
    record.emit("phase", text=f"going on in {settings.run_dir}", code=code)


def without_credentials(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec on record, its teacher's URL without user name and password, which earlier versions took."""
    config = spec["config"]
    if not (teacher := config.get("teacher")):
        return spec
    parts = urlsplit(teacher["base_url"])
    base_url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return spec | {"config": config | {"teacher": teacher | {"base_url": base_url}}}


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Dotted paths at which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            yield from differences(one.get(name), other.get(name), f"{path}.{name}" if path else name)
    elif one != other:
        yield path


async def until_stopped(work: Coroutine[Any, Any, None], *, with_stdin: bool = False) -> None:
    """Do some work; a signal that asks for the end calls it off in order, so that nothing it started stays behind.

    Args:
        with_stdin: the end of the standard input calls it off too.
    Raises:
        StoppedError: it was called off.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    causes: list[str] = []

    def stop(cause: str) -> None:
        leave_dead_terminal()
        causes.append(cause)
        task.cancel()

    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C arrives as a KeyboardInterrupt instead
        for number in ending_signals():
            loop.add_signal_handler(number, stop, number.name)
    if with_stdin:

        def wait_for_stdin() -> None:
            while os.read(0, 4096):
                pass
            with contextlib.suppress(RuntimeError):  # the work ended first, and the loop with it
                loop.call_soon_threadsafe(stop, "the end of its standard input")

        threading.Thread(target=wait_for_stdin, name="stdin", daemon=True).start()
    try:
        await task
    except asyncio.CancelledError:
        if not causes:
            raise
        raise StoppedError(f"stopped by {causes[0]}") from None


def main(train: Callable[[Run], Coroutine[Any, Any, None]], *, project_of: str) -> int:
    """What `python train.py` does; returns its exit code.

    Args:
        project_of: path of the project's train.py.
    """
    settings = None
    try:
        settings = parse(sys.argv[1:], Path(project_of).resolve().parent)
        with locked(settings.run_dir):
            record = Record(settings.run_dir, as_json=settings.as_json)
            begin(settings, record)
            if settings.experiment is None:
                how = f"`vibe train {settings.project} --run-dir {settings.run_dir}`"
                record.emit("phase", text=f"no rows of this run are kept; {how} keeps them and draws its curve")
            asyncio.run(until_stopped(train(Run(settings, record)), with_stdin=settings.exits_with_stdin))
    except (VibeError, SwarmError, ExperimentsDbError) as error:
        print(f"error: {error}", file=sys.stderr)
        # Not after what the same command would meet again.
        if settings and not isinstance(error, (UsageError, TooSmallError, GameError, StuckError)):
            print(how_to_go_on(settings.run_dir), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except BrokenPipeError:
        # Whoever read our lines is gone. The record holds them too, so nothing is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error}; make room or mend the disk", file=sys.stderr)
        if settings:
            print(how_to_go_on(settings.run_dir), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; {how_to_go_on(settings.run_dir)}" if settings else "stopped", file=sys.stderr)
        return INTERRUPTED
    return 0
