"""Start weights for a game the embedded model does not know, cloned from play that nobody wrote by hand.

The games are played by their own engine: every reply of a trained seat is a random legal one or, at a stated share,
what the template's honest, weak script would say. Cloned from that, a tiny policy knows the rules and little more;
what it learns beyond them, it learns from rewards. "Before" is always measured after this.

What was done is kept beside the weights as `warmup.json`. The folder's name is made of everything that decides them,
so a game is warmed up once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_engine.models import NANO_DIR
from swarm_engine.seeding import derive_seed
from vibe import seeds
from vibe.envs import Env, EnvHost
from vibe.errors import VibeError
from vibe.judging import (
    MIN_SHARE_WITH_VARIANCE,
    NUM_PROBE_GROUPS,
    mean_reward,
    scripted_rewards,
    share_with_variance,
)
from vibe.library import Template
from vibe.run_folder import make_folder
from vibe.spec import RuleValue

if TYPE_CHECKING:
    from swarm_engine.models.loading import LoadedPolicy

CARD_FILE = "warmup.json"
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What the embedded model is, beside weights."""
SIDE_BY_SIDE = 64
"""Games played at once."""
NUM_LEVEL_GAMES = 200
PROBE_GROUP_SIZE = 8
MAX_REPLY_TOKENS = 8
FALLBACK_SHARE = 0.3
"""Share of scripted play where random play alone leaves learning flat and the template states none."""

Conversation = list[dict[str, str]]
T = TypeVar("T")


def _say_nothing(_line: str) -> None:
    """Where progress goes that nobody asked for."""


class WarmUpError(VibeError):
    """A game that gives nothing to clone."""


class _CalledOffError(Exception):
    """Ends work in a thread that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides warmed-up weights, beside the game and the tokenizer."""

    share: float
    """Of the replies, how many are the script's; the rest are random legal ones."""
    num_updates: int
    num_episodes: int = 9_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """What some play earns: the mean over games of the mean reward of the trained agents."""

    mean: float
    se: float
    """Standard error over games."""
    num_games: int

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Level:
        """The level of one reward a game."""
        spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        return cls(round(statistics.fmean(rewards), 4), round(spread / len(rewards) ** 0.5, 4), len(rewards))


@dataclass(frozen=True, slots=True)
class Card:
    """What was done to get some weights, and what came of it. All games are of the build deck."""

    game: str
    template_version: str
    rules: dict[str, RuleValue]
    tokenizer: str
    """SHA-256 of tokenizer.json."""
    plan: Plan
    num_conversations: int
    loss: float
    """Of the last updates, in nats."""
    minutes: float
    """Wall time of playing and cloning."""
    random: Level
    """Random legal play."""
    scripted: Level
    sampled: Level
    """The weights at temperature 1."""
    greedy: Level
    share_with_variance: float
    """Of the groups, how many hold different rewards."""

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Read one back."""
        data = json.loads(text)
        levels = {name: Level(**data[name]) for name in ("random", "scripted", "sampled", "greedy")}
        return cls(**{**data, **levels, "plan": Plan(**data["plan"])})

    def in_words(self) -> str:
        """For the terminal, in a line."""
        return (
            f"warmed up on {self.game} in {self.minutes:.1f} min, {self.plan.share:.0%} of the moves from the script: "
            f"earns {self.sampled.mean:.3f} (random legal play {self.random.mean:.3f}, "
            f"script {self.scripted.mean:.3f}), different rewards in {self.share_with_variance:.0%} of the groups"
        )


def plans(template: Template) -> list[Plan]:
    """How a template's start weights are made: at the share it states, or first at none and then at the fallback."""
    stated = template.warm_up_share
    shares = (0.0, FALLBACK_SHARE) if stated is None else (stated,)
    return [Plan(share=share, num_updates=template.warm_up_updates) for share in shares]


def is_shipped(template: Template, rules: Mapping[str, RuleValue]) -> bool:
    """Whether the package ships start weights for exactly these rules."""
    from swarm_engine.models import shipped

    return dict(rules) == template.defaults and template.start_weights in shipped()


def shipped_card(template: Template) -> Card:
    """How the weights that ship for a template's default rules were made."""
    from safetensors import safe_open

    from swarm_engine.models import resolve

    with safe_open(resolve(template.start_weights, NANO_DIR), framework="numpy") as file:
        return Card.from_json(file.metadata()["card"])


def folder_name(template: Template, rules: Mapping[str, RuleValue], plan: Plan, *, nano: Path = NANO_DIR) -> str:
    """Name of the model folder that holds these weights, made of all that decides them but the engine's own code."""
    from swarm_engine.trainer.cloning import Recipe

    files = [*sorted(template.path.glob("*.py")), *(nano / name for name in MODEL_FILES)]
    parts = [
        template.name,
        template.version,
        sorted(rules.items()),
        asdict(plan),
        asdict(Recipe(plan.num_updates)),
        [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files],
    ]
    return f"warm-{template.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of a folder's tokenizer, in hexadecimal."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


async def warm_up(
    template: Template,
    rules: Mapping[str, RuleValue],
    model_root: Path,
    *,
    plan: Plan | None = None,
    tell: Callable[[str], None] = _say_nothing,
) -> tuple[str, Card]:
    """The name of start weights under `model_root` for these rules, cloned now or found there, and their card.

    Without a plan the share is the template's. Where it states none, random play alone is tried first and the fallback
    share where that leaves too few groups with different rewards.

    Args:
        tell: called with a line of progress now and then.
    Raises:
        WarmUpError: the game's own play gives no conversation to clone.
        EnvError: the game fails.
    """
    for attempt in [plan] if plan else plans(template):
        name, card = await _warm_up_once(template, rules, model_root, attempt, tell)
        if card.share_with_variance >= MIN_SHARE_WITH_VARIANCE:
            break
    return name, card


async def _warm_up_once(
    template: Template, rules: Mapping[str, RuleValue], model_root: Path, plan: Plan, tell: Callable[[str], None]
) -> tuple[str, Card]:
    name = folder_name(template, rules, plan)
    folder = model_root / name
    if (folder / CARD_FILE).is_file():
        return name, Card.from_json((folder / CARD_FILE).read_text(encoding="utf-8"))
    from swarm_engine.models.loading import save_policy

    policy, card = await build(template, rules, plan, tell=tell)
    make_folder(model_root)
    draft = Path(tempfile.mkdtemp(dir=model_root, prefix=".draft-"))
    try:
        save_policy(policy, draft)
        (draft / CARD_FILE).write_text(card.to_json() + "\n", encoding="utf-8")
        try:
            os.rename(draft, folder)
        except OSError:  # another run was faster; its weights are the same
            if not (folder / CARD_FILE).is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return name, card


async def build(
    template: Template,
    rules: Mapping[str, RuleValue],
    plan: Plan,
    *,
    nano: Path = NANO_DIR,
    tell: Callable[[str], None] = _say_nothing,
) -> tuple[LoadedPolicy, Card]:
    """Clone weights from nothing and measure them. Cancelled, it stops at the next update.

    Args:
        nano: folder with the tokenizer and the config of the model.
    """
    import torch

    torch.set_num_threads(1)  # small matrices: a second thread costs more than it gives
    started = time.monotonic()
    tell(f"playing {plan.num_episodes} games of {template.title}, {plan.share:.0%} of the moves from the script")
    conversations = await demonstrations(
        template, rules, share=plan.share, num_episodes=plan.num_episodes, seed=plan.seed
    )
    policy = blank_policy(nano, plan.seed)
    codec = codec_of(policy)
    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(tell, line)

    losses = await _in_thread(lambda check: _clone(template, policy, codec, conversations, plan, say, check))
    minutes = (time.monotonic() - started) / 60
    tell("measuring what the weights can do")
    async with EnvHost(template.path, rules) as host:
        games = [seeds.build_seed("level", index) for index in range(NUM_LEVEL_GAMES)]
        levels = {player: Level.of(await scripted_rewards(host.env(), player, games)) for player in template.levels}
        sampled = [mean_reward(end["rewards"]) for end in await play(policy, host, games, temperature=1.0)]
        greedy = [mean_reward(end["rewards"]) for end in await play(policy, host, games, temperature=0.0)]
        groups = [seeds.build_seed("probe", index) for index in range(NUM_PROBE_GROUPS)]
        ends = await play(policy, host, [game for game in groups for _ in range(PROBE_GROUP_SIZE)], temperature=1.0)
    card = Card(
        game=template.name,
        template_version=template.version,
        rules=dict(rules),
        tokenizer=tokenizer_hash(nano),
        plan=plan,
        num_conversations=len(conversations),
        loss=round(statistics.fmean(losses[-50:]), 4),
        minutes=round(minutes, 2),
        random=levels["random"],
        scripted=levels["scripted"],
        sampled=Level.of(sampled),
        greedy=Level.of(greedy),
        share_with_variance=round(share_with_variance(by_agent(ends, PROBE_GROUP_SIZE)), 4),
    )
    tell(card.in_words())
    return policy, card


async def _in_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """Do work that blocks beside the event loop, so that a Ctrl-C is heard meanwhile.

    Args:
        work: gets a function to call often; it raises once the work is called off.
    """
    called_off = threading.Event()

    def check() -> None:
        if called_off.is_set():
            raise _CalledOffError

    working = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        called_off.set()
        await asyncio.gather(working, return_exceptions=True)
        raise


def _clone(
    template: Template,
    policy: LoadedPolicy,
    codec: Any,
    conversations: Sequence[Conversation],
    plan: Plan,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> list[float]:
    """Clone the conversations in this thread; returns the loss of each update, in nats."""
    import torch

    from swarm_engine.trainer.cloning import ClonedText, Recipe, clone, encode

    torch.set_num_threads(1)  # OpenMP counts by thread
    samples: list[ClonedText] = []
    for conversation in conversations:
        check()
        samples += encode(codec, conversation)
    if not samples:
        raise WarmUpError(f"{template.name} gives nothing to clone: no seat of the policy was ever asked to move")

    def report(update: int, loss: float) -> None:
        check()
        if update % 100 == 0:
            say(f"cloned {update} of {plan.num_updates} updates, loss {loss:.3f}")

    return clone(policy.model, samples, Recipe(plan.num_updates), plan.seed, report)


async def demonstrations(
    template: Template, rules: Mapping[str, RuleValue], *, share: float, num_episodes: int, seed: int
) -> list[Conversation]:
    """Conversations of games of the build deck, played at random among the legal replies but for `share` of the
    script's.

    One conversation for each seat of each game, games in order, seats by name. The same arguments give the same list.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, it is a part of all replies; choose a number from 0 to 1")
    places = iter(range(num_episodes))
    played: dict[int, list[Conversation]] = {}

    async def work(host: EnvHost) -> None:
        env = host.env()
        for place in places:
            played[place] = await _demonstrate(env, seeds.build_seed("demo", seed, place), share)
        await env.close()

    async with EnvHost(template.path, rules) as host, asyncio.TaskGroup() as group:
        for _ in range(min(SIDE_BY_SIDE, num_episodes)):
            group.create_task(work(host))
    return [conversation for place in range(num_episodes) for conversation in played[place]]


async def _demonstrate(env: Env, seed: int, share: float) -> list[Conversation]:
    chance = random.Random(derive_seed("demonstration", seed))
    talks: dict[str, Conversation] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        talk = talks.setdefault(turn["seat"], [{"role": "system", "content": turn["system"]}])
        reply = await env.suggest("scripted") if chance.random() < share else chance.choice(await env.legal())
        talk += [{"role": "user", "content": turn["observation"]}, {"role": "assistant", "content": reply}]
        turn = await env.step(reply)
    return [talks[seat] for seat in sorted(talks)]


async def play(
    policy: LoadedPolicy, host: EnvHost, games: Sequence[int], *, temperature: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Play one game for each seed with a policy in this process; returns how they ended, in order.

    The i-th game's replies are drawn from a stream of its own, so the same seed twice is two attempts.
    """
    codec = codec_of(policy)
    ends: list[dict[str, Any]] = []
    for start in range(0, len(games), SIDE_BY_SIDE):
        some = games[start : start + SIDE_BY_SIDE]
        ends += await _play_side_by_side(policy, codec, host, some, temperature, seed, start)
    return ends


async def _play_side_by_side(
    policy: LoadedPolicy, codec: Any, host: EnvHost, games: Sequence[int], temperature: float, seed: int, first: int
) -> list[dict[str, Any]]:
    from swarm_engine.protocol import Generate, Sampled
    from swarm_engine.sampler.slots import SlotSampler
    from swarm_engine.types import SamplingParams

    sampler = SlotSampler(policy.model, policy.end_ids, max_running=len(games))
    envs = [host.env() for _ in games]
    turns = list(await asyncio.gather(*(env.reset(game) for env, game in zip(envs, games, strict=True))))
    talks: list[dict[str, Conversation]] = [{} for _ in games]
    num_turns = 0
    while open_games := [index for index, turn in enumerate(turns) if "rewards" not in turn]:
        num_turns += 1
        sampled: dict[str, list[int]] = {}
        for index in open_games:
            turn = turns[index]
            talk = talks[index].setdefault(turn["seat"], [{"role": "system", "content": turn["system"]}])
            talk.append({"role": "user", "content": turn["observation"]})
            prompt = codec.encode(codec.render([codec.protect(message) for message in talk]))
            stream = derive_seed("warm-up", seed, first + index, num_turns)
            params = SamplingParams(max_tokens=MAX_REPLY_TOKENS, temperature=temperature, seed=stream)
            sampled[str(index)] = []
            sampler.submit(Generate(str(index), "policy", prompt, params))
        while not sampler.is_idle:
            for reply in sampler.step():
                if isinstance(reply, Sampled):
                    sampled[reply.request_id] += reply.token_ids
        texts = [codec.decode(sampled[str(index)]) for index in open_games]
        for index, text in zip(open_games, texts, strict=True):
            talks[index][turns[index]["seat"]].append({"role": "assistant", "content": text})
        moved = await asyncio.gather(*(envs[index].step(text) for index, text in zip(open_games, texts, strict=True)))
        for index, turn in zip(open_games, moved, strict=True):
            turns[index] = turn
    await asyncio.gather(*(env.close() for env in envs))
    return turns


def by_agent(ends: Sequence[Mapping[str, Any]], group_size: int) -> list[list[float]]:
    """Rewards of each agent over the attempts at one game, which lie side by side in `ends`."""
    groups = [ends[start : start + group_size] for start in range(0, len(ends), group_size)]
    return [[end["rewards"][agent] for end in group] for group in groups for agent in group[0]["rewards"]]


def blank_policy(nano: Path, seed: int) -> LoadedPolicy:
    """The embedded architecture with random weights."""
    from swarm_engine.models.decoder import Decoder, DecoderConfig
    from swarm_engine.models.loading import LoadedPolicy
    from swarm_engine.trainer.cloning import randomize

    config = json.loads((nano / "config.json").read_text(encoding="utf-8"))
    model = Decoder(DecoderConfig.from_json(config))
    randomize(model, seed)
    return LoadedPolicy(model, config, nano, (int(config["eos_token_id"]),))


def codec_of(policy: LoadedPolicy) -> Any:
    """How this policy reads and writes conversations."""
    from swarm_engine.tracker.codec import ChatCodec

    return ChatCodec.load(policy.tokenizer_dir, policy.end_ids, datetime(2026, 1, 1, tzinfo=UTC))
