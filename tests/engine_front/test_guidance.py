"""What native code makes of a schema costs one request: not the front, not the worker, and nobody's time for long."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_template import TOOLS_AND_THINKING
from conftest import SMALL, Served, started

from swarm_engine import guidance, guidance_process
from swarm_engine.client import SyncEpisode
from swarm_engine.errors import BadRequestError
from swarm_engine.guidance import Guidance, GuidanceProcess, LostError, Question, RefusedError
from swarm_engine.server import grammars
from swarm_engine.server.grammars import BLANKS, check_parameters, json_schema_grammar
from swarm_engine.server.inference import MAX_INLINE_BYTES, MAX_READERS
from swarm_engine.types import EngineState, Mode
from swarm_engine.version import installed_version
from swarm_engine.waiting import TakesLongError, is_event_loop

FUZZ = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fuzz_front.py"))
LEAST = -(2**63)
CRASHING = {"enum": [LEAST]}
"""Ends the process that compiles it."""
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}
"""Takes minutes to follow, though it compiles at once."""


def doubling(how: str, times: int = 40) -> dict[str, Any]:
    """A schema of `times` definitions that means 2 ** times of them."""
    defs: dict[str, Any] = {"d0": {"type": "string", "pattern": "a+"}}
    for place in range(times):
        defs[f"d{place + 1}"] = {how: [{"$ref": f"#/$defs/d{place}"}] * 2}
    return {"$ref": f"#/$defs/d{times}", "$defs": defs}


FATAL: dict[str, tuple[Any, str]] = {
    "the least integer, enumerated": (CRASHING, "crashed over it"),
    "the least integer": ({"const": LEAST}, "crashed over it"),
    "the least integer inside": ({"properties": {"a": {"items": {"const": LEAST}}}}, "crashed over it"),
    "a long text where a list should be": ({"type": "object", "required": "é" * 300}, "broke over it"),
    "definitions that double": (doubling("allOf"), "takes more than"),
    "a multiple that takes minutes": (ENDLESS, "takes more than 2 s"),
}


@pytest.mark.parametrize(("schema", "reason"), FATAL.values(), ids=FATAL)
def test_a_schema_that_ends_its_process_is_refused_like_any_other(schema: dict[str, Any], reason: str) -> None:
    for read in (json_schema_grammar, check_parameters):
        with pytest.raises(BadRequestError, match=reason):
            read(schema)
    assert json_schema_grammar({"type": "integer"})


@pytest.mark.parametrize("number", [-9.223372036854775808e18, LEAST - 1, 2**63, 2**64, 10**400, 1.7e308, -0.0, 5e-324])
def test_numbers_at_the_edges_are_taken_or_refused(number: float) -> None:
    for keyword in ("const", "minimum", "exclusiveMaximum", "multipleOf"):
        for kind in ("integer", "number"):
            with contextlib.suppress(BadRequestError):
                json_schema_grammar({"type": kind, keyword: number})
    assert json_schema_grammar({"type": "integer"})


def test_every_schema_is_tried_once() -> None:
    with pytest.raises(BadRequestError):
        json_schema_grammar(ENDLESS)
    begun = time.process_time()
    for _ in range(20):
        with pytest.raises(BadRequestError, match="takes more than 2 s"):
            json_schema_grammar(ENDLESS)
    assert time.process_time() - begun < 1


def test_the_grammar_of_a_schema_is_llguidances_own() -> None:
    from llguidance import LLMatcher

    schema = {"type": "object", "properties": {"é": {"enum": ["ü", 1.5, None]}}, "additionalProperties": False}
    theirs = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": BLANKS})
    assert json.loads(json_schema_grammar(schema)) == json.loads(theirs)


def test_generated_schemas_are_taken_or_refused() -> None:
    """A seeded part of `scripts/fuzz_front.py`."""
    chance = random.Random(5)
    taken = 0
    for _ in range(300):
        schema = FUZZ["a_schema"](chance)
        with contextlib.suppress(BadRequestError):
            json_schema_grammar(schema)
            taken += 1
    assert 30 < taken < 270


# The process


def test_what_was_asked_behind_a_fatal_question_is_lost_and_not_to_blame() -> None:
    process = GuidanceProcess()
    fatal = json.loads(json_schema_grammar({"type": "null"}))
    fatal["grammars"][0]["json_schema"] = CRASHING
    before, blamed, behind = (process.ask("check", one) for one in (lark("a"), json.dumps(fatal), lark("b")))
    assert process.answer(before) == b"[false, []]"
    with pytest.raises(RefusedError, match="SIGSEGV"):
        process.answer(blamed)
    with pytest.raises(LostError):
        process.answer(behind)
    assert process.has_ended
    with pytest.raises(LostError):
        process.answer(process.ask("check", lark("c")))


def test_a_process_that_somebody_else_kills_is_started_again_and_nobody_is_to_blame() -> None:
    asker = Guidance()
    assert asker.ask("check", lark("a")) == b"[false, []]"
    first = set(FUZZ["children_of"](os.getpid()))
    for child, command in FUZZ["children_of"](os.getpid()).items():
        if "guidance_process" in command:
            os.kill(child, signal.SIGKILL)
    assert asker.ask("check", lark("b")) == b"[false, []]"
    assert set(FUZZ["children_of"](os.getpid())) - first


def test_what_ended_over_its_computing_is_told_the_limit_that_it_had() -> None:
    assert (guidance.MAX_CPU_S, guidance.MAX_LOADING_CPU_S) == (
        guidance_process.MAX_CPU_S,
        guidance_process.MAX_LOADING_CPU_S,
    )
    questions: tuple[Question, ...] = (("tokenizer", "{}", 1, [0]), ("check", lark("a")))
    for question, limit_s in zip(questions, (60, 2), strict=True):
        process = GuidanceProcess()
        process._process.send_signal(signal.SIGSTOP)
        asked = process.ask(*question)
        for number in (signal.SIGPROF, signal.SIGCONT):
            process._process.send_signal(number)
        with pytest.raises(RefusedError, match=rf"more than {limit_s} s of computing"):
            process.answer(asked)


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f'start: "{text}"'}]})


def test_more_questions_than_the_line_holds_are_all_answered() -> None:
    process = GuidanceProcess()
    asked = [process.ask("check", "no grammar " * 100) for _ in range(2000)]
    assert len({process.answer(one) for one in asked}) == 1
    process.close()


def test_the_process_ends_with_its_parent_and_takes_no_module_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("random", "json", "llguidance"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the current folder')")
    code = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from swarm_engine.guidance import Guidance
guidance = Guidance()
print(guidance.ask("check", {lark("a")!r}).decode(), flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "[false, []]\n"
        (child,) = FUZZ["children_of"](parent.pid)
        assert "torch" not in Path(f"/proc/{child}/maps").read_text()
        assert FUZZ["memory_mb"](child) < 60
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()


# Through a server


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine whose template knows tools."""
    with started(tmp_path_factory.mktemp("tools") / "run", SMALL, template=TOOLS_AND_THINKING) as served:
        yield served


def post(episode: SyncEpisode, route: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {episode.api_key}"}
    url = f"{episode.base_url}/{route}"
    return httpx.post(url, json={"model": "policy", **body}, headers=headers, timeout=120)


HI = [{"role": "user", "content": "hi"}]


def bodies(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request of every kind that brings a schema, by the field that has it."""
    function, inner = {"name": "f", "parameters": schema}, {"name": "a", "schema": schema}
    return {
        "response_format.json_schema.schema": (
            "chat/completions",
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": inner},
            },
        ),
        "text.format.schema": (
            "responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        ),
        "output_config.format.schema": (
            "messages",
            {"messages": HI, "max_tokens": 4, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "tools[0]": (
            "chat/completions",
            {"messages": HI, "tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        ),
        "tools[0] of responses": (
            "responses",
            {"input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required"},
        ),
        "tools[0] of messages": (
            "messages",
            {
                "messages": HI,
                "max_tokens": 4,
                "tools": [{"name": "f", "input_schema": schema}],
                "tool_choice": {"type": "any"},
            },
        ),
    }


@pytest.mark.parametrize("number", [LEAST, ENDLESS["multipleOf"]], ids=["crashing", "endless"])
def test_every_api_refuses_a_fatal_schema_by_its_field_and_the_server_lives(tools: Served, number: int) -> None:
    key = "const" if number == LEAST else "multipleOf"
    with tools.client() as client, client.episode("t", mode=Mode.DEBUG) as episode:
        for field, (route, body) in bodies(
            {"type": "object", "properties": {"a": {key: number, "type": "integer"}}}
        ).items():
            answer = post(episode, route, body)
            assert answer.status_code == 400, (field, answer.text)
            assert field.partition(" ")[0] in answer.text
            assert client.status().state is EngineState.ROLLING
        episode.end(reward=None)


def test_others_are_answered_while_a_schema_is_tried(tools: Served) -> None:
    schema = {"type": "integer", "multipleOf": 99_999_971}
    with tools.client() as client, client.episode("t", mode=Mode.DEBUG) as episode:
        route, body = bodies(schema)["response_format.json_schema.schema"]
        waits = []
        with ThreadPoolExecutor(1) as thread:
            trying = thread.submit(post, episode, route, body)
            while not trying.done():
                begun = time.monotonic()
                client.status()
                waits.append(time.monotonic() - begun)
            assert trying.result().status_code == 400
        assert len(waits) > 3
        assert max(waits) < 1.5
        episode.end(reward=None)


def test_a_long_body_does_not_wait_for_schemas_that_are_tried(tools: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    trying, may_go_on = threading.Semaphore(0), threading.Event()

    def verdict(_: str) -> tuple[bool, list[str]]:
        if is_event_loop():
            raise TakesLongError
        trying.release()
        may_go_on.wait()
        return False, []

    monkeypatch.setattr(grammars, "_verdict", verdict)
    route, body = bodies({"type": "object"})["response_format.json_schema.schema"]
    long_body = json.dumps({"messages": HI, "max_tokens": 1}) + " " * MAX_INLINE_BYTES
    with tools.client() as client, client.episode("t", mode=Mode.DEBUG) as episode:
        with ThreadPoolExecutor(MAX_READERS) as threads:
            posted = [threads.submit(post, episode, route, body) for _ in range(MAX_READERS)]
            for _ in posted:
                trying.acquire()
            headers = {"authorization": f"Bearer {episode.api_key}"}
            try:
                answer = httpx.post(f"{episode.base_url}/{route}", content=long_body, headers=headers, timeout=10)
            finally:
                may_go_on.set()
        assert answer.status_code == 200, answer.text
        assert {one.result().status_code for one in posted} == {200}
        episode.end(reward=None)


def test_no_call_and_no_status_reads_what_is_installed(tools: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_version()

    def look(*_: object, **__: object) -> None:
        raise AssertionError("package metadata was looked for")

    monkeypatch.setattr(importlib.metadata.MetadataPathFinder, "find_distributions", look)
    with tools.client() as client, client.episode("t", mode=Mode.DEBUG) as episode:
        assert client.status().state is EngineState.ROLLING
        for route, body in bodies({"type": "object"}).values():
            answer = post(episode, route, body)
            assert answer.status_code == 200, answer.text
        episode.end(reward=None)
