"""A worker without a model: real protocol, real processes, replies drawn uniformly from the letters.

Its weights are a number that depends on every batch it was given, in order, so "the journal gives the weights" and "no
episode is trained twice" can be checked. How it behaves is read from `fake.json` in its home, see `Knobs`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from tiny_tokenizer import END_ID, NUM_IDS, write_tokenizer

from swarm_engine.folders import write_manifest
from swarm_engine.protocol import (
    Boot,
    Booted,
    Cancel,
    Export,
    Failed,
    Finished,
    Generate,
    PolicyReady,
    Rejected,
    Sampled,
    Save,
    Saved,
    Stop,
    Update,
    Updated,
    frame,
    from_front,
    from_worker,
    unframe,
)
from swarm_engine.types import Episode, FinishReason

LETTERS = [*range(97, 123), 32]
EPISODE = TypeAdapter(Episode)


@dataclass(frozen=True)
class Knobs:
    """How this fake behaves; read at its start from the JSON file `fake.json` in its home, if there is one."""

    token_s: float = 0.0
    """Seconds a token takes."""
    update_s: float = 0.0
    save_s: float = 0.0
    """Seconds a checkpoint takes; like the real worker, it listens to nothing meanwhile."""
    end_chance: float = 0.125
    """Chance of the end token at each position."""
    max_context: int = 4096
    boot_error: str = ""
    template: str | None = None
    """The policy's chat template; None takes the plainest."""
    fails_after: int | None = None
    """Tokens after which every reply is given up; None never."""
    zero_variance_fraction: float | None = None
    """What every update says of its groups."""
    replies: tuple[tuple[int, ...], ...] = ()
    """Token ids to play in order of requests instead of drawing; the end token is part of them."""


def likeliest(token: int, count: int) -> tuple[tuple[int, float], ...]:
    """The sampled token, which is as likely as any, and letters after it."""
    others = [letter for letter in LETTERS if letter != token]
    return tuple((one, -math.log(len(LETTERS))) for one in [token, *others][:count])


def digest(weights: str, update: Update) -> str:
    """The weights after an update."""
    told = b"".join(EPISODE.dump_json(episode) for episode in update.episodes)
    seen = f"{weights}|{update.record.step}|{update.record.episode_ids}|{update.record.seed}|".encode() + told
    return hashlib.sha256(seen).hexdigest()


def as_metric(weights: str) -> float:
    """The weights as a number that JSON keeps exactly."""
    return float(int(weights[:12], 16))


class Fake:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, home: Path) -> None:
        self.reader, self.writer, self.home = reader, writer, home
        knobs = home / "fake.json"
        self.knobs = Knobs(**json.loads(knobs.read_text())) if knobs.exists() else Knobs()
        self.weights, self.step = "start", 0
        self.running: dict[str, asyncio.Task[None]] = {}
        self.num_requests = 0
        self.log = home / "fake_requests.jsonl"

    def send(self, message: object) -> None:
        self.writer.write(frame(from_worker.dump_json(message)))  # type: ignore[arg-type]

    async def run(self) -> None:
        buffer = bytearray()
        while data := await self.reader.read(1 << 20):
            buffer += data
            for payload in unframe(buffer):
                message = from_front.validate_json(payload)
                if isinstance(message, Stop):
                    return
                await self.take(message)

    async def take(self, message: object) -> None:
        match message:
            case Boot():
                self.boot(message)
            case Generate():
                with self.log.open("a") as log:
                    seen = {
                        "is_streamed": message.is_streamed,
                        "prompt_ids": message.prompt_ids,
                        "grammar": message.grammar,
                        "processors": message.params.processors and asdict(message.params.processors),
                    }
                    log.write(json.dumps(seen) + "\n")
                task = asyncio.create_task(self.generate(message, self.num_requests))
                self.num_requests += 1
                self.running[message.request_id] = task
            case Cancel(request_id):
                if task := self.running.pop(request_id, None):
                    task.cancel()
                    self.send(Finished(request_id, FinishReason.CANCELLED))
            case Update():
                await self.update(message)
            case Save():
                await asyncio.sleep(self.knobs.save_s)
                self.save()
            case Export():
                Path(message.path).mkdir(parents=True)
                self.send(Saved(self.step, message.path))

    def boot(self, message: Boot) -> None:
        if self.knobs.boot_error:
            self.send(Failed(self.knobs.boot_error))
            return
        self.checkpoints, self.run_id = Path(message.checkpoint_dir), message.run_id
        whole = sorted(self.checkpoints.glob("step-*/weights.json"))
        if whole:
            kept = json.loads(whole[-1].read_text())
            self.weights, self.step = kept["weights"], kept["step"]
        folder = self.home / "fake_tokenizer"
        write_tokenizer(folder, *([self.knobs.template] if self.knobs.template else []))
        policies = [
            PolicyReady(
                name,
                self.step if one["trainable"] else 0,
                one["trainable"],
                str(folder),
                (END_ID,),
                self.knobs.max_context,
                learning_rate=message.config["trainer"]["learning_rate"] or 1e-6,
                warmup_updates=message.config["trainer"]["warmup_updates"] or 0,
            )
            for name, one in message.config["policies"].items()
        ]
        self.send(Booted(tuple(policies), self.step))

    async def generate(self, message: Generate, number: int) -> None:
        if not message.prompt_ids or max(message.prompt_ids) >= NUM_IDS:
            self.send(Rejected(message.request_id, "a prompt id is outside the vocabulary", "prompt"))
            return
        draw = random.Random(message.params.seed)
        reason = FinishReason.LENGTH
        pending: list[int] = []

        def flush() -> None:
            if pending:
                logprobs = tuple([-math.log(len(LETTERS))] * len(pending))
                top = tuple(likeliest(token, message.params.top_logprobs) for token in pending)
                top = top if message.params.top_logprobs else None
                self.send(Sampled(message.request_id, tuple(pending), logprobs, self.step, top))
                pending.clear()

        script = message.script or (
            self.knobs.replies[number % len(self.knobs.replies)] if self.knobs.replies else None
        )
        for position in range(message.params.max_tokens):
            if self.knobs.token_s:
                await asyncio.sleep(self.knobs.token_s)
            if script is not None:
                token = script[position] if position < len(script) else END_ID
            else:
                token = END_ID if position and draw.random() < self.knobs.end_chance else draw.choice(LETTERS)
            pending.append(token)
            if self.knobs.token_s and message.is_streamed:
                flush()
            if position + 1 == self.knobs.fails_after:
                flush()
                self.running.pop(message.request_id, None)
                self.send(Rejected(message.request_id, "the weights are broken"))
                return
            if token == END_ID:
                reason = FinishReason.STOP
                break
        flush()
        self.running.pop(message.request_id, None)
        self.send(Finished(message.request_id, reason))

    async def update(self, message: Update) -> None:
        assert message.record.step == self.step + 1, (message.record.step, self.step)
        assert tuple(one.episode_id for one in message.episodes) == message.record.episode_ids
        if self.knobs.update_s:
            await asyncio.sleep(self.knobs.update_s)
        self.weights, self.step = digest(self.weights, message), message.record.step
        rewards = [r for one in message.episodes for r in one.rewards.values() if r is not None]
        metrics = {"weights": as_metric(self.weights), "reward_mean": sum(rewards) / len(rewards), "loss": None}
        if self.knobs.zero_variance_fraction is not None:
            metrics["zero_variance_fraction"] = self.knobs.zero_variance_fraction
        self.send(Updated(self.step, metrics, {}))

    def save(self) -> None:
        folder = self.checkpoints / f"step-{self.step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "weights.new"
        fresh.write_text(json.dumps({"weights": self.weights, "step": self.step}))
        fresh.replace(folder / "weights.json")
        (folder / "manifest.json").unlink(missing_ok=True)
        write_manifest(folder, self.step, self.run_id)
        self.send(Saved(self.step, str(folder)))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--home", required=True)
    arguments = parser.parse_args()
    reader, writer = await asyncio.open_unix_connection(arguments.socket)
    await Fake(reader, writer, Path(arguments.home)).run()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)
