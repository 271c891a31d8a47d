"""What does the endpoint cost? Latency and throughput of the front, beside LiteLLM's proxy before the same backend.

    python benchmarks/endpoint.py [--quick] [--rounds 5] [--json FILE]

The backend (endpoint_backend.py) answers every request at once with the same sixteen tokens, so what is measured is
what stands before it. Four targets play the same episodes, eight turns of a growing conversation each, at 1, 32 and 256
episodes at a time, every episode asking its next question as soon as it has an answer:

- `bare sampler`: the backend asked over the engine's worker protocol, on a socket, with token ids;
- `endpoint`: `swarm serve` with that worker. Each episode is claimed and ended; template, tokenizer, tracker, keys and
  journal are on, and what was sampled is on disk when `end` answers. Requests per second count the time of claims and
  ends too;
- `bare HTTP`: the same backend behind a minimal OpenAI-compatible HTTP server;
- `litellm`: LiteLLM's proxy, one process like the front, before that server, with its master key: no database, no
  logging, no callbacks, no retries.

Added latency is a quantile of a server less the same quantile of what it stands before. That favours LiteLLM: the cost
of HTTP towards the client is taken off for it, and counts in full for the endpoint; and it keeps no record.

The targets take turns, in an order that changes every round; intervals are over rounds, each round one value. The
client is one process with kept-alive connections, the same for all. LiteLLM gets an environment of its own, made on the
first full run, which takes minutes, and kept in A3R_HOME; where it is not there, --quick leaves LiteLLM out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import uvloop
from endpoint_backend import REPLY_TEXT
from rows import Row, report

from experiments_db.intervals import t_interval
from swarm_engine.client import SwarmClient
from swarm_engine.protocol import Boot, Finished, Generate, frame, from_front, from_worker, unframe
from swarm_engine.types import SamplingParams

LITELLM_VERSION = "1.106.12"
"""Pinned; 1.82.7, 1.82.8 and 1.107.0 are known to have been compromised."""
SIZES = (1, 32, 256)
TARGETS = ("bare sampler", "endpoint", "bare HTTP", "litellm")
QUANTILES = (("p50", 0.5), ("p95", 0.95))
NUM_TURNS = 8
MIN_EPISODES = 32
"""Episodes of a burst where fewer run at a time."""
NUM_ROUNDS = 5
MAX_SHARE = 1 / 3
"""What is promised: the endpoint adds less than this share of what LiteLLM adds."""
LEGEND = """\
SIZE at a time, what, value [95% t-interval over rounds] unit, n = rounds. p50 and p95 are quantiles of the time to an
answer; "added" is a server's less that of what it stands before; a share below 1 means less than LiteLLM adds."""
CHARS_PER_TOKEN = 3
"""Of the shipped tokenizer on these messages, about."""
BACKEND = Path(__file__).with_name("endpoint_backend.py")
START_TIMEOUT_S = 120.0
SYSTEM = {"role": "system", "content": "You play a game on a board of three by three cells. " * 4}
MOVES = "The board is X O . . X . . . O and it is your turn, number {}. Answer with the number of a free cell."


class Connection:
    """A kept-alive HTTP/1.1 connection: a client library's own cost would drown what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader, self._writer = reader, writer
        self._head = (
            f" HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        )

    @staticmethod
    async def open(port: int, key: str) -> Connection:
        """Connect; `key` goes with every request."""
        return Connection(*await asyncio.open_connection("127.0.0.1", port), key)

    async def post(self, path: str, body: bytes) -> bytes:
        """The body of the answer, which must be a success."""
        self._writer.write(f"POST {path}{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        answer = await self._reader.readexactly(length)
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"{path} answered {head.decode()} {answer.decode()}")
        return answer

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


class Session(Protocol):
    """One episode of a target."""

    async def ask(self, messages: bytes) -> bytes:
        """The answer to a conversation, given as JSON."""
        ...

    async def end(self) -> None:
        """The episode is over."""
        ...


class Target(Protocol):
    """What is measured."""

    async def begin(self) -> Session:
        """Begin an episode."""
        ...


# The four targets


@dataclass(slots=True)
class BareSampler:
    """The backend over the worker protocol, with the benchmark as its front."""

    line: asyncio.StreamWriter
    waiting: dict[str, asyncio.Future[bytes]] = field(default_factory=dict)
    num_asked: int = 0

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the line ends."""
        buffer = bytearray()
        while data := await reader.read(1 << 20):
            buffer += data
            for payload in unframe(buffer):
                answer = from_worker.validate_json(payload)
                if isinstance(answer, Finished):
                    self.waiting.pop(answer.request_id).set_result(b"")

    async def begin(self) -> Session:
        return self

    async def ask(self, messages: bytes) -> bytes:
        self.num_asked += 1
        name = f"call-{self.num_asked}"
        answer = self.waiting[name] = asyncio.get_running_loop().create_future()
        prompt = tuple(range(3, 3 + len(messages) // CHARS_PER_TOKEN))
        question = Generate(name, "policy", prompt, SamplingParams(512), is_streamed=False)
        self.line.write(frame(from_front.dump_json(question)))
        return await answer

    async def end(self) -> None:
        return


@dataclass(slots=True)
class Chat:
    """An episode over HTTP."""

    line: Connection
    path: str

    async def ask(self, messages: bytes) -> bytes:
        return await self.line.post(self.path, messages)

    async def end(self) -> None:
        self.line.close()


@dataclass(slots=True)
class OpenAiServer:
    """A server that any number of conversations may ask: the bare HTTP backend, or LiteLLM before it."""

    port: int
    path: str
    key: str = "none"

    async def begin(self) -> Session:
        return Chat(await Connection.open(self.port, self.key), self.path)


@dataclass(slots=True)
class EngineEpisode:
    """An episode of the engine, with a line for its calls and one for its end."""

    calls: Connection
    control: Connection
    episode_id: str

    async def ask(self, messages: bytes) -> bytes:
        return await self.calls.post(f"/e/{self.episode_id}/chat/completions", messages)

    async def end(self) -> None:
        await self.control.post(f"/swarm/v1/episodes/{self.episode_id}/end", b'{"reward": 1.0, "outcome": "success"}')
        self.calls.close()
        self.control.close()


@dataclass(slots=True)
class Endpoint:
    """The engine's front."""

    port: int
    token: str
    num_begun: int = 0

    async def begin(self) -> Session:
        self.num_begun += 1
        control = await Connection.open(self.port, self.token)
        claim = {"client_id": "benchmark", "task_id": f"task-{self.num_begun}", "mode": "eval"}
        claimed = json.loads(await control.post("/swarm/v1/episodes", json.dumps(claim).encode()))
        return EngineEpisode(await Connection.open(self.port, claimed["api_key"]), control, claimed["episode_id"])


# One burst of episodes


@dataclass(frozen=True, slots=True)
class Burst:
    """What one target did in one round at one size."""

    latencies_s: tuple[float, ...]
    """Of every request for a reply, ascending."""
    wall_s: float

    def quantile(self, share: float) -> float:
        """In ms, nearest rank."""
        return 1e3 * self.latencies_s[math.ceil(share * len(self.latencies_s)) - 1]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies_s) / self.wall_s


async def burst(target: Target, size: int, num_turns: int) -> Burst:
    """Play episodes, `size` at a time."""
    episodes = iter(range(max(size, MIN_EPISODES)))
    latencies: list[float] = []
    start = time.perf_counter()
    await asyncio.gather(*(play(target, episodes, num_turns, latencies) for _ in range(size)))
    return Burst(tuple(sorted(latencies)), time.perf_counter() - start)


async def play(target: Target, episodes: Iterator[int], num_turns: int, latencies: list[float]) -> None:
    """Play one episode after the other while there are some."""
    for _ in episodes:
        session = await target.begin()
        messages: list[dict[str, str]] = [SYSTEM]
        for turn in range(num_turns):
            messages.append({"role": "user", "content": MOVES.format(turn)})
            question = json.dumps({"model": "policy", "messages": messages}).encode()
            start = time.perf_counter()
            answer = await session.ask(question)
            latencies.append(time.perf_counter() - start)
            text = json.loads(answer)["choices"][0]["message"]["content"] if answer else REPLY_TEXT
            assert text == REPLY_TEXT, text
            messages.append({"role": "assistant", "content": text})
        await session.end()


# Starting and ending them


@contextlib.contextmanager
def process(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    started = subprocess.Popen(command, text=True, **options)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        for pipe in (started.stdin, started.stdout):
            if pipe:
                pipe.close()


@contextlib.asynccontextmanager
async def bare_sampler(folder: Path) -> AsyncIterator[BareSampler]:
    """The backend as a worker of ours."""
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    address = str(folder / "bare.sock")
    server = await asyncio.start_unix_server(lambda *line: connected.set_result(line), address)
    with process([sys.executable, BACKEND, "--socket", address]):
        reader, writer = await asyncio.wait_for(connected, START_TIMEOUT_S)
        writer.write(frame(from_front.dump_json(Boot({"policies": {"policy": {"trainable": True}}}, "", ""))))
        target = BareSampler(writer)
        listening = asyncio.create_task(target.listen(reader))
        yield target
        writer.close()
        listening.cancel()
    server.close()


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[Endpoint]:
    """`swarm serve` with the backend as its worker."""
    worker = shlex.join([sys.executable, str(BACKEND)])
    command = [sys.executable, "-P", "-m", "swarm_engine.cli", "serve", "--run-dir", folder / "run", "--worker", worker]
    with process([*command, "--json"], stdout=subprocess.PIPE) as server:
        assert server.stdout
        about = json.loads(server.stdout.readline())
        tokens = json.loads(Path(about["token_file"]).read_text(encoding="utf-8"))
        with SwarmClient(about["url"], tokens["operator"]) as client:
            client.start({}, wait=True)
        yield Endpoint(int(about["url"].rpartition(":")[2]), tokens["sampler"])


@contextlib.contextmanager
def bare_http() -> Iterator[OpenAiServer]:
    """The backend as an OpenAI-compatible server."""
    with process([sys.executable, BACKEND, "--http"], stdout=subprocess.PIPE) as server:
        assert server.stdout
        yield OpenAiServer(int(server.stdout.readline()), "/chat/completions")


def litellm_home() -> Path:
    """Where LiteLLM's environment is, or would be."""
    return Path(os.environ.get("A3R_HOME", ".a3r")).resolve() / "benchmarks" / f"litellm-{LITELLM_VERSION}"


def has_litellm() -> bool:
    """Whether LiteLLM is installed."""
    return (litellm_home() / "is-whole").exists()


def litellm_environment() -> Path:
    """The programs of a virtual environment with LiteLLM's proxy, made where it is not there yet."""
    folder = litellm_home()
    if not has_litellm():
        print(f"making an environment for LiteLLM {LITELLM_VERSION} in {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-P", "-m", "venv", "--clear", folder], check=True)
        # Wheels alone: no package's own code runs before the proxy does.
        pip = [folder / "bin" / "python", "-P", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*pip, f"litellm[proxy]=={LITELLM_VERSION}"], check=True)
        (folder / "is-whole").touch()
    return folder / "bin"


@contextlib.contextmanager
def litellm(folder: Path, backend: OpenAiServer) -> Iterator[OpenAiServer]:
    """LiteLLM's proxy before the bare HTTP backend."""
    programs = litellm_environment()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "model_list": [
            {
                "model_name": "policy",
                "litellm_params": {
                    "model": "openai/policy",
                    "api_base": f"http://127.0.0.1:{backend.port}",
                    "api_key": "none",
                },
            }
        ],
        "litellm_settings": {"num_retries": 0, "set_verbose": False},
    }
    (folder / "litellm.yaml").write_text(json.dumps(config), encoding="utf-8")
    # Nothing of this process's environment, which may hold keys; and the list of prices that ships with it, or it would
    # ask the network for a newer one.
    key = f"sk-{secrets.token_hex(32)}"
    environment = {
        "LITELLM_MASTER_KEY": key,
        "PATH": f"{programs}:{os.defpath}",
        "HOME": str(folder),
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [programs / "litellm", "--config", folder / "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "litellm.log").open("w") as log,
        process([*command, "--num_workers", "1"], env=environment, stdout=log, stderr=log, cwd=folder) as server,
    ):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_listening(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"LiteLLM does not listen: {(folder / 'litellm.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield OpenAiServer(port, "/v1/chat/completions", key)


def is_listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# The record


@dataclass(slots=True)
class Record:
    """Bursts by size and target, one a round."""

    is_quick: bool
    bursts: dict[tuple[int, str], list[Burst]] = field(default_factory=dict)

    def rows(self, size: int) -> Iterator[Row]:
        """What one size came to."""
        for name in TARGETS:
            own = self.bursts.get((size, name), [])
            if own:
                yield self.row(size, f"{name}, throughput", [one.rate for one in own], "requests/s")
                for label, share in QUANTILES:
                    yield self.row(size, f"{name}, {label}", [one.quantile(share) for one in own], "ms")
        for label, share in QUANTILES:
            our_cost = self.added(size, "endpoint", "bare sampler", share)
            yield self.row(size, f"endpoint, added {label}", our_cost, "ms")
            if (size, "litellm") in self.bursts:
                their_cost = self.added(size, "litellm", "bare HTTP", share)
                yield self.row(size, f"litellm, added {label}", their_cost, "ms")
                shares = [one / other for one, other in zip(our_cost, their_cost, strict=True)]
                yield self.row(size, f"share of litellm's added {label}", shares, "")

    def added(self, size: int, server: str, behind: str, share: float) -> list[float]:
        """A quantile of a server less that of what it stands before, in ms, for each round."""
        pairs = zip(self.bursts[size, server], self.bursts[size, behind], strict=True)
        return [one.quantile(share) - other.quantile(share) for one, other in pairs]

    def row(self, size: int, metric: str, values: Sequence[float], unit: str) -> Row:
        """A mean over rounds."""
        mean = t_interval(values)
        assert mean, "there is at least one round"
        return Row(f"{size} at a time", metric, mean.mean, unit, mean.low, mean.high, mean.n, self.is_quick)


async def measure(folder: Path, num_rounds: int, num_turns: int, *, is_quick: bool, with_litellm: bool) -> Record:
    """Play all rounds."""
    record = Record(is_quick)
    order = random.Random(0)
    with contextlib.ExitStack() as servers:
        http = servers.enter_context(bare_http())
        front = servers.enter_context(endpoint(folder))
        proxy = {"litellm": servers.enter_context(litellm(folder, http))} if with_litellm else {}
        async with bare_sampler(folder) as sampler:
            targets: dict[str, Target] = {
                "bare sampler": sampler,
                "endpoint": front,
                "bare HTTP": http,
                **proxy,
            }
            for target in targets.values():
                await burst(target, min(SIZES[1], MIN_EPISODES), num_turns)
            for number in range(num_rounds):
                for size in SIZES:
                    names = order.sample(sorted(targets), len(targets))
                    for name in names:
                        record.bursts.setdefault((size, name), []).append(await burst(targets[name], size, num_turns))
                print(f"round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return record


def promises(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """What is promised, each with whether these rows keep it."""
    for row in rows:
        if row.metric.startswith("share"):
            yield row.value < MAX_SHARE, f"{row.case}: {row.metric} is {row.value:.3f}, below {MAX_SHARE:.3f}"


def main() -> int:
    """Run it; the exit code says nothing about the promises, the last lines do."""
    parser = argparse.ArgumentParser(description="What does the endpoint cost?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="bursts of each target at each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    num_rounds, num_turns = (2, 2) if args.quick else (args.rounds, NUM_TURNS)
    with_litellm = not args.quick or has_litellm()
    if not with_litellm:
        print("LiteLLM is left out: it is not installed, a run without --quick does so", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="endpoint-") as folder:
        record = uvloop.run(
            measure(Path(folder), num_rounds, num_turns, is_quick=args.quick, with_litellm=with_litellm)
        )
    rows = [row for size in SIZES for row in record.rows(size)]
    report(rows, args.json, promises(rows), LEGEND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
