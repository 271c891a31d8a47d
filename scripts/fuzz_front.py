"""Hostile schemas, chat templates and bodies against one real server: nothing of what it is sent may end or hang it.

    python scripts/fuzz_front.py [--requests 10000] [--seed 0]

Serves a shipped policy whose chat template has a hostile part for each of some messages, and sends requests of every
API, four at a time, while `/status` is asked ten times a second, before the load and under it. Prints a table; exits 1
where the front or the worker is not the same process at the end, a request got no answer or one that blames the server,
`/status` took longer than LIMIT_STATUS_S at its 99th percentile, or the front has LIMIT_GROWTH_MB more than before.
The same seed sends the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from swarm_engine.client import SwarmClient
from swarm_engine.errors import TokenizerError
from swarm_engine.models import NANO_DIR
from swarm_engine.tracker.template import ChatTemplate
from swarm_engine.types import Mode

LIMIT_STATUS_S = 0.1
LIMIT_GROWTH_MB = 200
LIMIT_ANSWER_S = 120.0
AT_ONCE = 4
PER_EPISODE = 50
PAUSE_S = 0.1
BASELINE_S = 5.0
REPORTED = 10

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 255, 99_999_989, 10**6, 10**9, 10**18, 2**53, -(2**63), -(2**63) - 1, 2**63 - 1, 2**63, 2**64,
    10**30, 0.1, 1e-5, 1e-300, 1e300, 1.7e308, -9.223372036854775808e18, 1.5, -0.0,
)  # fmt: skip
TEXTS = (
    "", "a", "é" * 40, "x" * 1000, "\u0000", "\ufffd", "😊" * 30, "a b", " " * 500, "\\", '"', "<|im_end|>", "\u202e",
)  # fmt: skip
PATTERN_PARTS = (
    "a", ".", r"\w", r"\s", "[^a]", "[a-z0-9]", r"\d", "é", "(a|aa)", "(a|b|ab)", "(.*)", "(a*)*", "(x+x+)+", "(a?)",
    r"\b", "(?=a)", "(?i)", r"\p{L}", "[[:alpha:]]", r"\x00", "^", "$", "|",
)  # fmt: skip
REPEATS = ("", "*", "+", "?", "{3}", "{1000}", "{0,300}", "{50,}", "{1000000}", "{2,1}")
KEYWORDS = (
    "type", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "multipleOf", "minItems", "maxItems", "required", "properties", "additionalProperties", "items", "prefixItems",
    "anyOf", "allOf", "oneOf", "$ref", "$defs", "patternProperties", "minProperties", "description",
)  # fmt: skip
FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "regex", "no")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


# Schemas


def a_value(chance: random.Random, depth: int = 2) -> Any:
    """Any JSON value."""
    kind = chance.randrange(7 if depth else 5)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind in (1, 2):
        return chance.choice(NUMBERS)
    if kind in (3, 4):
        return chance.choice(TEXTS)
    if kind == 5:
        return [a_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(TEXTS): a_value(chance, depth - 1) for _ in range(chance.randrange(4))}


def a_pattern(chance: random.Random, depth: int = 2) -> str:
    """A regular expression, sometimes a broken one."""
    parts = []
    for _ in range(chance.randint(1, 6)):
        part = chance.choice(PATTERN_PARTS)
        if depth and chance.random() < 0.3:
            part = f"({a_pattern(chance, depth - 1)})"
        parts.append(part + chance.choice(REPEATS))
    return "".join(parts)


def a_schema(chance: random.Random, depth: int = 3) -> Any:
    """A JSON schema, often with values that its keywords do not take."""
    if chance.random() < 0.05:
        return chance.choice((True, False, {}, [], "string", None))
    schema: dict[str, Any] = {"type": chance.choice(TYPES)} if chance.random() < 0.7 else {}
    for _ in range(chance.randint(0, 3)):
        keyword = chance.choice(KEYWORDS)
        schema[keyword] = _keyword(chance, keyword, depth)
    return schema


def _keyword(chance: random.Random, keyword: str, depth: int) -> Any:
    def inner() -> Any:
        return a_schema(chance, depth - 1) if depth else {"type": chance.choice(TYPES)}

    if chance.random() < 0.1:
        return a_value(chance)
    match keyword:
        case "type":
            return chance.choice((*TYPES, [*TYPES[:2]], "numbr"))
        case "enum":
            return [a_value(chance) for _ in range(chance.choice((0, 1, 3, 2000)))]
        case "const":
            return a_value(chance, 3)
        case "pattern":
            return a_pattern(chance)
        case "format":
            return chance.choice(FORMATS)
        case "required":
            return [chance.choice(("a", "b", "é")) for _ in range(chance.randrange(3))]
        case "properties" | "patternProperties" | "$defs":
            name = a_pattern if keyword == "patternProperties" else lambda c: c.choice(("a", "b", "é", ""))
            return {name(chance): inner() for _ in range(chance.randint(0, 4))}
        case "items" | "additionalProperties":
            return inner()
        case "prefixItems" | "anyOf" | "allOf" | "oneOf":
            return [inner() for _ in range(chance.choice((0, 1, 2, 3)))]
        case "$ref":
            return chance.choice(("#", "#/$defs/a", "#/$defs/none", "http://localhost/x", "#/properties/a"))
        case "description":
            return chance.choice(TEXTS)
        case _:
            return chance.choice(NUMBERS)


def an_exploding_schema(chance: random.Random) -> Any:
    """A short schema that means something very long."""
    size = chance.choice((10, 30, 100, 300))
    match chance.randrange(7):
        case 0:  # doubles with every definition
            how = chance.choice(("allOf", "anyOf", "oneOf"))
            defs: dict[str, Any] = {"d0": {"type": "string", "pattern": a_pattern(chance, 0)}}
            for index in range(size):
                defs[f"d{index + 1}"] = {how: [{"$ref": f"#/$defs/d{index}"}] * 2}
            return {"$ref": f"#/$defs/d{size}", "$defs": defs}
        case 1:
            schema: dict[str, Any] = {"type": "string"}
            for _ in range(size * 3):
                schema = {"type": "array", "items": schema}
            return schema
        case 2:
            return {"anyOf": [{"type": "array", "items": {"$ref": "#"}} for _ in range(size)]}
        case 3:
            return {"type": "integer", "multipleOf": chance.choice((97, 99_989, 99_999_989, 2**61 - 1))}
        case 4:
            return {"type": "array", "minItems": chance.choice(NUMBERS), "items": {"type": "null"}}
        case 5:
            return {"allOf": [{"type": "string", "pattern": f".*{a_pattern(chance, 1)}.*"} for _ in range(size // 10)]}
        case _:
            text = chance.choice(("x", "é", "0"))
            return {"enum": [text * count for count in range(size)]}


# Templates

FORMS: dict[str, tuple[str, ...]] = {
    "TEXT": (
        "'x'", "'é' * 1000", "doubled", "messages[0].content", "'a\\nb'", "''", "('ab' * 100000)",
        "strftime_now('%c')", "TEXT ~ ANY", "TEXT + TEXT", "TEXT * NUMBER", "TEXT.center(NUMBER)",
        "TEXT|center(NUMBER)", "TEXT.zfill(NUMBER)", "TEXT.ljust(NUMBER, 'é')", "TEXT.replace(TEXT, TEXT)",
        "TEXT|replace(TEXT, TEXT)", "TEXT|indent(NUMBER, true)", "TEXT.join(LIST)", "LIST|join(TEXT)",
        "LIST|map('string')|join(TEXT)", "TEXT|trim", "TEXT.strip(TEXT)", "TEXT.expandtabs(NUMBER)",
        "TEXT|truncate(NUMBER, true, TEXT)", "TEXT.translate({97: TEXT, 120: TEXT})", "'%s|%s' % (ANY, TEXT)",
        "'%*d' % (NUMBER, NUMBER)", "'%1000000000d' % NUMBER", "'%.*f' % (NUMBER, 1.5)", "'{}{}'.format(ANY, TEXT)",
        "'{:>{w}}'.format(TEXT, w=NUMBER)", "'{:999999999}'.format(NUMBER)", "TEXT|upper", "TEXT|title",
        "TEXT|urlencode", "TEXT|escape", "ANY|string", "ANY|tojson", "ANY|tojson(indent=NUMBER)", "TEXT[NUMBER:]",
        "TEXT[::-1]", "TEXT|format(ANY)", "TEXT.encode('punycode')", "TEXT.encode('idna')", "LIST|first",
        "TEXT|default(TEXT)", "(TEXT if LIST else TEXT)", "TEXT|wordcount", "{'a': TEXT}|xmlattr", "TEXT|random",
    ),
    "LIST": (
        "messages", "[1]", "[[1]] * 1000", "nested", "range(100000)|list", "range(NUMBER)", "[ANY, ANY]",
        "[LIST, LIST]", "LIST + LIST", "LIST * NUMBER", "TEXT.split(TEXT)", "TEXT.rsplit(TEXT)", "TEXT.splitlines()",
        "TEXT|list", "LIST|sort", "LIST|unique|list", "LIST|reverse|list", "LIST|batch(NUMBER, ANY)|list",
        "LIST|slice(NUMBER)|list", "LIST|map('string')|list", "LIST|map('center', NUMBER)|list",
        "LIST|map(attribute='a', default=TEXT)|list", "LIST|select|list", "LIST|select('in', LIST)|list",
        "LIST|selectattr('role')|list", "LIST|sum(start=[])", "LIST[0:]", "LIST[::-1]", "LIST|groupby('role')",
        "{'a': ANY, 'b': LIST}|dictsort", "{'a': ANY}.items()", "LIST|map('length')",
        "{}.fromkeys(range(1000), ANY).values()|list", "LIST|map('replace', 'x', TEXT)|list", "(LIST, LIST)",
    ),
    "NUMBER": (
        "0", "3", "64", "1000", "10**6", "10**9", "10000000000", "-5", "10**30", "1.5", "LIST|length", "TEXT|length",
        "NUMBER + NUMBER", "NUMBER * NUMBER", "NUMBER ** NUMBER", "NUMBER // NUMBER", "NUMBER % NUMBER", "-NUMBER",
        "TEXT.count(TEXT)", "TEXT.rfind(TEXT)", "LIST.index(ANY)", "LIST|sum", "TEXT|int(base=16)",
        "NUMBER|round(NUMBER)", "NUMBER|abs", "(LIST == LIST)|int", "(ANY in LIST)|int", "(TEXT in TEXT)|int",
        "(LIST < LIST)|int",
    ),
    "ANY": ("TEXT", "LIST", "NUMBER", "{'a': ANY}", "messages[0]", "none", "namespace(a=ANY)", "cycler(ANY).next()"),
}  # fmt: skip
"""Expressions by what they give, of others."""
SIMPLEST = {"TEXT": 8, "LIST": 6, "NUMBER": 10, "ANY": 3}
"""So many of the first of each end a nesting."""


def an_expression(chance: random.Random, kind: str = "ANY", depth: int = 4) -> str:
    """A Jinja expression, mostly one that makes much."""
    form = chance.choice(FORMS[kind] if depth > 0 else FORMS[kind][: SIMPLEST[kind]])
    if kind == "ANY" and depth <= 0 and form in FORMS:
        return an_expression(chance, form, 0)
    return re.sub("|".join(FORMS), lambda match: f"({an_expression(chance, match.group(), max(depth - 1, 0))})", form)


def a_template(chance: random.Random) -> str:
    """A piece of a chat template."""
    made = an_expression(chance)
    listed = an_expression(chance, "LIST")
    match chance.randrange(7):
        case 0 | 1:
            return f"{{{{ {made} }}}}"
        case 2:
            loops = chance.randint(1, 6)
            opening = "".join(f"{{% for i{index} in ({listed}) %}}" for index in range(loops))
            return f"{opening}{{{{ i0 }}}}{'{% endfor %}' * loops}"
        case 3:
            sign = chance.choice(("~", "+", "+"))
            return (
                f"{{% set s = {an_expression(chance, chance.choice(('TEXT', 'LIST')))} %}}"
                + f"{{% set s = s {sign} s %}}" * 50
                + "{{ s }}"
            )
        case 4:
            calls = "{{ m(n - 1) }}" * chance.randint(1, 3)
            return (
                f"{{% macro m(n) %}}{{% if n > 0 %}}{calls}{{{{ {made} }}}}{{% endif %}}{{% endmacro %}}"
                f"{{{{ m({chance.choice((5, 50, 500))}) }}}}"
            )
        case 5:
            return f"{{% set s %}}{{{{ {made} }}}}{{% endset %}}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 30
        case _:
            return f"{{% for a in [{made}] recursive %}}{{{{ loop([a, a]) }}}}{{% endfor %}}"


PRELUDE = (
    "{% set own = namespace(n=[0], d='xx') %}{% for _ in range(60) %}{% set own.n = [own.n, own.n] %}{% endfor %}"
    "{% for _ in range(12) %}{% set own.d = own.d ~ own.d %}{% endfor %}{% set nested, doubled = own.n, own.d %}"
)


def valid_templates(chance: random.Random, count: int) -> list[str]:
    """Pieces that are Jinja, each as a template of its own."""
    found: list[str] = []
    while len(found) < count:
        piece = a_template(chance)
        try:
            ChatTemplate(PRELUDE + piece, {}, datetime(2026, 1, 1, tzinfo=UTC))
        except TokenizerError:
            continue
        found.append(piece)
    return found


def write_model(folder: Path, pieces: Sequence[str]) -> None:
    """A shipped policy with a template that has a piece for each message `case N`."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO_DIR / name, folder / name)
    shutil.copy(NANO_DIR / "weights" / "tictactoe.safetensors", folder / "model.safetensors")
    own = (NANO_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    # Each piece has names of its own, so that no value of one comes into another.
    branches = [
        f"{{% if case == 'case {index}' %}}{{% macro c{index}() %}}{PRELUDE}{piece}{{% endmacro %}}{{{{ c{index}() }}}}"
        "{% endif %}"
        for index, piece in enumerate(pieces)
    ]
    template = "{% set case = messages[-1]['content'] %}" + "".join(branches) + own
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


# Requests


@dataclass(frozen=True, slots=True)
class Sent:
    """A request to an episode."""

    what: str
    route: str
    body: bytes


def a_request(chance: random.Random, num_pieces: int) -> Sent:
    """One request of any kind."""
    kind = chance.choices(("schema", "exploding schema", "template", "body"), (50, 5, 20, 25))[0]
    if kind == "template":
        messages = [{"role": "user", "content": f"case {chance.randrange(num_pieces)}"}]
        return _sent(kind, "chat/completions", {"messages": messages})
    if kind == "body":
        return _body(chance)
    schema = an_exploding_schema(chance) if kind == "exploding schema" else a_schema(chance)
    hi = [{"role": "user", "content": "Your move?"}]
    match chance.randrange(5):
        case 0 | 1:
            shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            return _sent(kind, "chat/completions", {"messages": hi, "response_format": shape})
        case 2:
            shape = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
            return _sent(kind, "responses", {"input": "Your move?", "text": {"format": shape}})
        case 3:
            shape = {"type": "json_schema", "schema": schema}
            return _sent(kind, "messages", {"messages": hi, "max_tokens": 8, "output_config": {"format": shape}})
        case _:
            tool = {"name": "turn", "input_schema": schema}
            return _sent(kind, "messages", {"messages": hi, "tools": [tool], "tool_choice": {"type": "any"}})


def _sent(what: str, route: str, body: Mapping[str, Any]) -> Sent:
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    return Sent(what, route, json.dumps({"model": "policy", limit: 8, **body}).encode())


def _body(chance: random.Random) -> Sent:
    route = chance.choice(("chat/completions", "responses", "messages", "completions", "messages/count_tokens"))
    if chance.random() < 0.1:
        deep = chance.choice((b"[", b'{"a":')) * chance.choice((100, 5000, 100_000))
        return Sent("body", route, chance.choice((b"", b"{", b"\xff\xfe", b"9" * 6000, deep, b'{"messages":' + deep)))
    content = chance.choice((
        chance.choice(TEXTS), chance.choice(TEXTS) * 100, "".join(chr(chance.randrange(1, 0xD7FF)) for _ in range(300)),
        " \n\t" * 3000, "<|im_start|>" * 200, "a" * chance.choice((1000, 40_000, 400_000)), a_value(chance),
    ))  # fmt: skip
    roles = ("user", "assistant", "system", "tool", "developer", "nobody")
    is_long = isinstance(content, str) and len(content) > 1000
    count = chance.choice((1, 1, 2, 30) if is_long else (1, 2, 30, 300))
    messages = [{"role": chance.choice(roles), "content": content} for _ in range(count)]
    body: dict[str, Any] = {
        "model": "policy",
        "messages": messages,
        "input": content,
        "prompt": content,
        "max_tokens": 4,
    }
    if route != "completions":
        del body["prompt"]
    if route != "responses":
        del body["input"]
    else:
        del body["messages"], body["max_tokens"]
    for name in ("tools", "temperature", "stop", "seed", "response_format", "text", "tool_choice", "logprobs", "n"):
        if chance.random() < 0.08:
            body[name] = a_value(chance, 3)
    return Sent("body", route, json.dumps(body).encode())


# The server


def memory_mb(pid: int, what: str = "VmRSS") -> float:
    """Resident memory of a process, now or (`VmHWM`) at its most."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def children_of(pid: int) -> dict[int, str]:
    """Process ids of a process's children, with their commands."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return {int(one): Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode() for one in pids}


def worker_of(pid: int) -> int:
    """The worker of a front."""
    (worker,) = [child for child, command in children_of(pid).items() if "guidance_process" not in command]
    return worker


@contextmanager
def serving(run_dir: Path) -> Iterator[dict[str, Any]]:
    """A server in a folder; gives what it says of itself."""
    command = [sys.executable, "-P", "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--exit-with-stdin"]
    with (run_dir / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        about = run_dir / "server.json"
        while not about.exists():
            if process.poll() is not None:
                raise SystemExit(f"the server ended: {(run_dir / 'serve.log').read_text()}")
            time.sleep(0.05)
        yield json.loads(about.read_text())
    finally:
        process.terminate()
        process.wait(60)


@dataclass(slots=True)
class Watch:
    """Asks for `/status` again and again."""

    url: str
    token: str
    times_s: list[float] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(headers={"authorization": f"Bearer {self.token}"}, timeout=LIMIT_ANSWER_S) as http:
            while not self.is_over.wait(PAUSE_S):
                begun = time.perf_counter()
                http.get(f"{self.url}/swarm/v1/status").raise_for_status()
                self.times_s.append(time.perf_counter() - begun)

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self.is_over.set()
            thread.join()

    def row(self, name: str) -> str:
        """p50, p99 and the longest, in milliseconds."""
        ordered = sorted(self.times_s)
        marks = [ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99, 1.0)]
        return f"{name:34} p50 {marks[0]:8.1f}  p99 {marks[1]:8.1f}  max {marks[2]:8.1f} ms   n = {len(ordered)}"

    @property
    def p99_s(self) -> float:
        return sorted(self.times_s)[int(0.99 * (len(self.times_s) - 1))]


def fuzz(num_requests: int, seed: int, home: Path) -> int:
    """Send them; 1 where something that must not happen did."""
    chance = random.Random(seed)
    run_dir = home / "run"
    pieces = valid_templates(chance, max(1, min(num_requests // 5, 1000)))
    write_model(run_dir / "models" / "hostile", pieces)
    answers: Counter[tuple[str, str]] = Counter()
    slowest: list[tuple[float, str]] = []
    faults: list[str] = []
    lock = threading.Lock()

    with serving(run_dir) as about, SwarmClient(about["url"], token_of(run_dir)) as client:
        config = {"num_threads": 1, "policies": {"policy": {"model": "hostile"}}, "lease_s": 3600.0}
        client.start(config, wait=True)
        front, worker = about["pid"], worker_of(about["pid"])

        def send(http: httpx.Client, one: Sent) -> None:
            begun = time.perf_counter()
            try:
                said = str(http.post(one.route, content=one.body).status_code)
            except httpx.HTTPError as error:
                said = type(error).__name__
            took = time.perf_counter() - begun
            with lock:
                answers[one.what, said] += 1
                slowest.append((took, f"{one.what}: {one.body[:120]!r}"))
                slowest.sort(reverse=True)
                del slowest[3:]
                if not said.startswith(("2", "4")):
                    faults.append(f"{said} after {took:.1f} s: {one.route} {one.body[:300]!r}")

        def play(numbers: Iterable[int]) -> None:
            with SwarmClient(about["url"], token_of(run_dir)) as own, own.episode("t", mode=Mode.EVAL) as episode:
                headers = {"authorization": f"Bearer {episode.api_key}"}
                with httpx.Client(base_url=episode.base_url, headers=headers, timeout=LIMIT_ANSWER_S) as http:
                    for number in numbers:
                        send(http, a_request(random.Random(f"{seed}/{number}"), len(pieces)))
                episode.end(reward=0.0)

        play(range(-PER_EPISODE, 0))
        before_mb = {pid: memory_mb(pid) for pid in (front, worker)}
        idle, loaded = Watch(about["url"], token_of(run_dir)), Watch(about["url"], token_of(run_dir))
        with idle.watching():
            time.sleep(BASELINE_S)
        begun = time.perf_counter()
        with loaded.watching(), ThreadPoolExecutor(AT_ONCE) as threads:
            list(
                threads.map(
                    play, [range(num_requests)[at : at + PER_EPISODE] for at in range(0, num_requests, PER_EPISODE)]
                )
            )
        took_s = time.perf_counter() - begun
        is_same = Path(f"/proc/{front}").exists() and worker_of(front) == worker
        after_mb = {pid: memory_mb(pid) for pid in (front, worker)}
        peak_mb = {pid: memory_mb(pid, "VmHWM") for pid in (front, worker)}

    print(f"{num_requests} requests in {took_s:.0f} s, seed {seed}")
    for (what, said), count in sorted(answers.items()):
        print(f"{what:18} {said:16} {count:6}")
    print(idle.row("/status without load"))
    print(loaded.row(f"/status, {AT_ONCE} hostile requests at once"))
    for name, pid in (("front", front), ("worker", worker)):
        print(f"{name:8} {before_mb[pid]:7.0f} MB before, {after_mb[pid]:7.0f} after, {peak_mb[pid]:7.0f} at most")
    for took, what in slowest:
        print(f"slowest: {took:.1f} s, {what}")
    if not is_same:
        faults.append("the front or its worker is another process than before")
    if loaded.p99_s > LIMIT_STATUS_S:
        faults.append(f"/status took {loaded.p99_s * 1000:.0f} ms at its 99th percentile")
    if after_mb[front] - before_mb[front] > LIMIT_GROWTH_MB:
        faults.append(f"the front has {after_mb[front] - before_mb[front]:.0f} MB more than before")
    for fault in faults[:REPORTED]:
        print("FAULT", fault)
    return 1 if faults else 0


def token_of(run_dir: Path) -> str:
    """The token of the folder's operator."""
    token: str = json.loads((run_dir / "token.json").read_text())["operator"]
    return token


def main() -> int:
    """Parse and fuzz."""
    parser = argparse.ArgumentParser(description="Send a server hostile schemas, templates and bodies.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        return fuzz(arguments.requests, arguments.seed, Path(home))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
