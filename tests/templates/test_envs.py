"""The games' own process: what it answers, what it survives, and what it never leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from vibe import library
from vibe.envs import HOST, Env, EnvCrashedError, EnvHost, EnvTimeoutError, Limits, RulesError
from vibe.errors import EditedError, EnvError
from vibe.project import code_of

QUICK = Limits(wall_s=0.5, cpu_s=30)

GAME = """
import json, os, subprocess, sys, time

MAX_TURNS = 3

def say(what, seat="a"):
    text = what if isinstance(what, str) else json.dumps(what)
    return {"seat": seat, "agent": seat, "system": "s", "observation": text}

class Game:
    def __init__(self, n: int = 1):
        if n < 0:
            raise ValueError(f"n is {n}, it is at least 0; raise it")
        self.n = n
    def reset(self, seed):
        self.seed = seed
        return say(str(seed))
    def legal(self):
        return ["yes"]
    def suggest(self, player):
        return player
    def snapshot(self):
        return {"n": self.n, "seed": self.seed}
    def step(self, text):
        return getattr(self, text)()
    def end(self):
        return {"rewards": {"a": 1.0}, "outcome": "success", "metrics": {}, "record": []}
    def environ(self):
        return say({"environ": dict(os.environ), "cwd": os.getcwd(), "path": sys.path, "modules": sorted(sys.modules)})
    def hang(self):
        while True:
            pass
    def orphan(self):
        try:
            subprocess.Popen(["/bin/sleep", "300"])
        except PermissionError as error:
            print(error, flush=True)
        while True:
            pass
    def reach(self):
        import socket
        socket.create_connection(("127.0.0.1", 9))
    def sleep(self):
        open("asleep", "w").close()
        time.sleep(600)
    def foreign(self):
        import ctypes
    def read(self):
        open("/etc/passwd").read()
    def spy(self):
        os.listdir("/")
    def spoil(self):
        open(__file__, "w")
    def smuggle(self):
        with open("notes", "w") as file:
            file.write("42")
        os.rename("notes", os.path.join(os.path.dirname(__file__), "env.py"))
    def remember(self):
        with open("notes", "w") as file:
            file.write("42")
        return say(open("notes").read())
    def die(self):
        print("goodbye")
        sys.stdout.flush()
        os._exit(3)
    def eat(self):
        return len(bytearray(1 << 40))
    def flood(self):
        return "x" * 3_000_000
    def chatter(self):
        while True:
            os.write(2, b"x" * 65536)
    def write(self):
        with open("big", "wb") as file:
            file.write(b"x" * (2 << 20))
    def fail(self):
        return {}["nothing"]
    def paint(self):
        raise ValueError("\\x1b[2J")
    def quit(self):
        raise GeneratorExit("now")
    def half(self):
        raise ValueError("so: " + chr(0xD83D))
    def talk(self):
        print('{"id": 1, "ok": "forged"}')
        return say("talked")
    def forge(self):
        for fd in range(3, 10):
            try:
                os.write(fd, b'{"id": 99, "ok": 1}\\n')
            except OSError:
                pass
        return "forged"
    def leave(self):
        sys.exit(4)
    def opaque(self):
        return {1, 2}
    def on(self):
        return say("again")
    def other(self):
        return say("again", "b")
"""

FAULTY = {
    "None": "step() gave None; it gives a dict",
    "say(3)['seat']": "step() gave 'a'; it gives a dict",
    "{'seat': 'a', 'agent': 'a', 'system': 's'}": "the turn that step() gave has no observation",
    "say('x') | {'observation': 3}": "observation of the turn that step() gave is 3; it is a text",
    "say('\\ud83c')": "half of a surrogate pair",
    "say('x', '')": "seat of the turn that step() gave is ''; it has 1 to 500 characters",
    "over({'a': '1'})": "reward '1' for 'a'; it is a number from -1 to 1 (LOWEST and HIGHEST in rewards.py)",
    "over({'a': None})": "reward None for 'a'",
    "over({'a': True})": "reward True for 'a'",
    "over({'a': [1.0]})": "reward [1.0] for 'a'",
    "over({'a': float('nan')})": "reward nan for 'a'",
    "over({'a': float('inf')})": "reward inf for 'a'",
    "over({'a': 1e9})": "reward 1000000000.0 for 'a'; it is a number from -1 to 1",
    "over({'a': -1e9})": "reward -1000000000.0 for 'a'",
    "over({'a': 10**400})": "for 'a'; it is a number from -1 to 1",
    "over({})": "rewards {}",
    "over(None)": "rewards None",
    "over(1.0)": "rewards 1.0; they are a dict with a number for each agent",
    "over({'b': 1.0})": "rewards for 'b' and none for 'a', who was asked to move",
    "over({'a': 1.0}, outcome='victory')": "outcome 'victory'; it is one of success, failure",
    "over({'a': 1.0}, outcome=None)": "outcome None",
    "over({'a': 1.0}, metrics={'won': True})": "metric 'won' True; it is a finite number",
    "over({'a': 1.0}, metrics={'n' * 501: 1})": "nnn'; it has 1 to 500 characters",
    "over({'a': 1.0}, metrics={str(n): 1 for n in range(1001)})": "with metrics for 1001 names; the limit is 1000",
    "over({'a': 1.0, '': 1.0})": "an agent in the rewards that step() gave is ''",
    "over({'a': 1.0}, metrics=None)": "metrics None",
    "over({'a': 1.0}, record=None)": "record None",
    "over({'a': 1.0}, record=['x'])": "record has 'x' at 0",
    "over({'a': 1.0}, record=[{'seat': 'a', 'text': 'x'}])": "move 0 in the record that step() gave has no note",
}
"""What `step` gives, and what is said of it."""

OVER = """
def over(rewards, **changes):
    return {"rewards": rewards, "outcome": "success", "metrics": {}, "record": []} | changes
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(GAME)
    return tmp_path


def leftovers(marker: str) -> list[str]:
    """Processes of this machine, zombies included, whose session or parent shows they came from the child."""
    listed = subprocess.run(["ps", "-eo", "pid,sid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[1] == marker]


async def turns(env: Any, seed: int) -> list[Any]:
    trace = [await env.reset(seed)]
    while "rewards" not in trace[-1]:
        trace.append(await env.step(await env.suggest("scripted")))
    return trace


@pytest.mark.parametrize("name", library.names())
def test_a_game_in_the_child_is_the_game_here(name: str) -> None:
    template = library.load(name)

    def here(seed: int) -> list[Any]:
        game = template.module("env").Game(**template.defaults)
        trace = [game.reset(seed)]
        while "rewards" not in trace[-1]:
            trace.append(game.step(game.suggest("scripted")))
        return trace

    async def there() -> list[list[Any]]:
        async with EnvHost(template.path, template.defaults) as host:
            return list(await asyncio.gather(*(turns(host.env(), seed) for seed in range(20))))

    assert asyncio.run(there()) == [here(seed) for seed in range(20)]


def test_every_operation_has_its_answer(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {"n": 2}) as host:
            env = host.env()
            with pytest.raises(EnvError, match="reset"):
                await env.step("end")
            assert (await env.reset(7))["observation"] == "7"
            assert await env.legal() == ["yes"]
            assert await env.suggest("weak") == "weak"
            assert await env.snapshot() == {"n": 2, "seed": 7}
            assert (await env.step("end"))["rewards"] == {"a": 1.0}
            await env.close()
            with pytest.raises(EnvError):
                await env.legal()

    asyncio.run(main())


def test_rules_that_the_game_refuses_come_back_in_its_words(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {"n": -1}) as host:
            with pytest.raises(RulesError, match="n is -1, it is at least 0; raise it"):
                await host.env().reset(0)
        async with EnvHost(project, {"m": 1}) as host:
            with pytest.raises(RulesError, match="m"):
                await host.env().reset(0)

    asyncio.run(main())


def test_a_fault_of_the_game_names_its_place_and_the_process_lives_on(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            pid = host.pid
            for broken, said in {
                "half": "step() raised ValueError: so: ? (env.py, line ",
                "fail": "step() raised KeyError: 'nothing' (env.py, line ",
                "flood": "what step() gave has 30000",
                "opaque": "what step() gave can't be written as JSON: Object of type set",
                "paint": "step() raised ValueError: \N{REPLACEMENT CHARACTER}[2J (env.py, line ",
                "quit": "step() raised GeneratorExit: now (env.py, line ",
                "leave": "step() raised SystemExit: 4 (env.py, line ",
                "eat": "step() raised MemoryError",
                "write": "step() raised OSError",
                "no_such": "step() raised AttributeError",
            }.items():
                with pytest.raises(EnvError, match=f"^the environment is at fault: {re.escape(said)}") as failed:
                    await env.step(broken)
                assert not isinstance(failed.value, EnvCrashedError)
                assert "Traceback" not in str(failed.value)
            assert await env.legal() == ["yes"]
            assert host.pid == pid

    asyncio.run(main())


def test_an_answer_that_is_no_turn_and_no_end_is_named_with_its_field_and_value(project: Path) -> None:
    (project / "env.py").write_text(GAME + OVER + "\nGame.step = lambda self, text: eval(text)\n")
    (project / "rewards.py").write_text("LOWEST, HIGHEST = -1.0, 1.0\n")

    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            for answer, said in FAULTY.items():
                await env.reset(1)
                with pytest.raises(EnvError, match=r"^the environment is at fault: ") as faulty:
                    await env.step(answer)
                assert said in str(faulty.value)
            await env.reset(1)
            assert (await env.step("over({'a': 1.0000000001, 'c': -1})"))["rewards"] == {"a": 1.0000000001, "c": -1}

    asyncio.run(main())


def fault_in(project: Path, ask: Callable[[Env], Awaitable[object]]) -> str:
    """What a game is accused of that is asked so."""

    async def main() -> str:
        async with EnvHost(project, {}) as host:
            with pytest.raises(EnvError, match=r"^the environment is at fault: ") as faulty:
                await ask(host.env())
            return str(faulty.value)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "gives", "said"),
    [
        ("legal", "[]", "legal() gave [] while a seat is to move"),
        ("legal", "None", "legal() gave None"),
        ("legal", "['x', 3]", "a reply that legal() gave is 3; it is a text"),
        ("legal", "['x', 'y', 'x']", "legal() gave 'x' twice"),
        ("suggest", "7", "what suggest('scripted') gave is 7; it is a text"),
        ("snapshot", "'state'", "snapshot() gave 'state'; it gives a dict"),
    ],
)
def test_what_else_a_game_answers_is_checked_too(project: Path, method: str, gives: str, said: str) -> None:
    (project / "env.py").write_text(GAME + f"\nGame.{method} = lambda *_: {gives}\n")

    async def ask(env: Env) -> None:
        await env.reset(1)
        asked = {"legal": env.legal, "suggest": lambda: env.suggest("scripted"), "snapshot": env.snapshot}
        await asked[method]()

    assert said in fault_in(project, ask)


def test_a_game_without_end_is_ended_by_the_number_of_its_turns(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            for _ in range(2):
                await env.reset(1)
                await env.step("on")
                await env.step("on")
                with pytest.raises(EnvError, match="asked for 3 replies and has not ended"):
                    await env.step("on")
            await env.reset(1)
            await env.step("on")
            await env.step("other")
            with pytest.raises(EnvError, match="none for 'b', who was asked to move"):
                await env.step("end")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("rewards.py", "LOWEST = 0.0", "rewards.py has one of LOWEST and HIGHEST"),
        ("rewards.py", "LOWEST, HIGHEST = 1, 1", "from LOWEST 1 to HIGHEST 1"),
        ("rewards.py", "LOWEST, HIGHEST = 0, '1'", "from LOWEST 0 to HIGHEST '1'"),
        ("rewards.py", "1 / 0", "about() raised ZeroDivisionError: division by zero (rewards.py, line 1"),
        ("env.py", "MAX_TURNS = 0", "env.py sets MAX_TURNS to 0"),
        ("env.py", "def (", "SyntaxError"),
        ("env.py", "del Game", "has no attribute 'Game'"),
    ],
)
def test_what_a_game_says_of_itself_is_checked(project: Path, file: str, line: str, said: str) -> None:
    with (project / file).open("a") as code:
        code.write(f"{line}\n")

    assert said in fault_in(project, lambda env: env.reset(1))


def test_code_that_was_edited_meanwhile_is_not_loaded_in_the_place_of_a_process_that_died(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}, code=code_of(project)) as host:
            env = host.env()
            await env.reset(1)
            (project / "env.py").write_text(GAME + "# edited\n")
            await env.step("end")
            with pytest.raises(EnvCrashedError):
                await env.step("die")
            with pytest.raises(EditedError, match=r"env\.py changed since"):
                await env.reset(2)

    asyncio.run(main())


def test_the_child_sees_no_environment_no_packages_and_another_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")

    async def main() -> dict[str, Any]:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            return json.loads((await env.step("environ"))["observation"])

    seen = asyncio.run(main())
    assert "hunter2" not in json.dumps(seen)
    assert set(seen["environ"]) <= {"HOME", "TMPDIR", "PATH", "PYTHONHASHSEED", "LC_CTYPE"}
    assert Path(seen["cwd"]) != project
    assert seen["environ"]["HOME"] == seen["cwd"]
    assert not any("site-packages" in path for path in seen["path"])
    assert not {"swarm_engine", "vibe", "httpx"} & set(seen["modules"])
    assert not Path(seen["cwd"]).exists(), "the scratch folder goes with the host"


PLAYER = """
import asyncio, sys
from pathlib import Path
from vibe.envs import EnvHost, Limits

async def main():
    async with EnvHost(Path(sys.argv[1]), {}, Limits(wall_s=600)) as host:
        env = host.env()
        await env.reset(1)
        asleep = asyncio.ensure_future(env.step("sleep"))
        while not (Path(host._scratch.name) / "asleep").exists():
            await asyncio.sleep(0.01)
        print(host.pid, flush=True)
        await asleep

asyncio.run(main())
"""


def test_a_game_that_sleeps_ends_with_whoever_plays_it(project: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PLAYER, str(project)], stdout=subprocess.PIPE, text=True) as player:
        assert player.stdout
        game = int(player.stdout.readline())
        player.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(game) and psutil.Process(game).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it outlives the player"
        time.sleep(0.01)


@pytest.mark.parametrize("deed", ["reach", "foreign", "read", "spy", "spoil", "smuggle"])
def test_sockets_foreign_code_and_other_files_are_refused(project: Path, deed: str) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            with pytest.raises(EnvError, match="PermissionError: a game may not"):
                await env.step(deed)
            assert (await env.step("remember"))["observation"] == "42"

    asyncio.run(main())
    assert (project / "env.py").read_text() == GAME


def test_what_the_game_prints_never_reaches_the_protocol(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            assert (await env.step("talk"))["observation"] == "talked"

    asyncio.run(main())


def test_a_forged_reply_ends_the_process_and_nobody_believes_it(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            with pytest.raises(EnvCrashedError, match="broke the protocol"):
                await env.step("forge")

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["hang", "orphan"])
def test_a_game_that_never_returns_is_ended_with_all_it_started(project: Path, broken: str) -> None:
    async def main() -> None:
        async with EnvHost(project, {}, QUICK) as host:
            for _ in range(2):
                env, other = host.env(), host.env()
                await env.reset(1)
                await other.reset(2)
                session = str(host.pid)
                started = time.monotonic()
                stuck = asyncio.create_task(env.step(broken))
                await asyncio.sleep(0)
                behind = asyncio.create_task(other.legal())
                with pytest.raises(EnvTimeoutError, match=r"0\.5 s") as slow:
                    await stuck
                with pytest.raises(EnvCrashedError):
                    await behind
                assert time.monotonic() - started < 3
                if broken == "orphan":
                    assert "may not do this (subprocess.Popen)" in str(slow.value), "what it printed is kept"
                with pytest.raises(EnvCrashedError):
                    await other.step("end")  # its state is gone
                assert (await other.reset(3))["observation"] == "3", "a new process took over"
                assert leftovers(session) == []

    asyncio.run(main())


def test_processor_time_is_limited_by_the_kernel_where_it_can(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}, Limits(wall_s=20.0, cpu_s=1)) as host:
            env = host.env()
            await env.reset(1)
            with pytest.raises(EnvCrashedError, match="processor time"):
                await env.step("hang")

    pytest.importorskip("resource")
    asyncio.run(main())


def test_a_process_that_dies_says_how_and_is_replaced(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            with pytest.raises(
                EnvCrashedError,
                match=r"^the environment is at fault: .* exit code 3; it said: goodbye",
            ):
                await env.step("die")
            assert host.pid is None
            assert (await env.reset(2))["observation"] == "2"

    asyncio.run(main())


def test_endless_printing_is_ended(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env = host.env()
            await env.reset(1)
            with pytest.raises(EnvCrashedError, match="printed more than"):
                await env.step("chatter")

    asyncio.run(main())


def test_a_project_without_a_game_is_an_error_and_no_hang(tmp_path: Path) -> None:
    async def main() -> None:
        async with EnvHost(tmp_path, {}) as host:
            with pytest.raises(EnvError, match="ModuleNotFoundError"):
                await host.env().reset(1)

    asyncio.run(main())


def test_a_caller_that_gave_up_does_not_disturb_the_others(project: Path) -> None:
    async def main() -> None:
        async with EnvHost(project, {}) as host:
            env, other = host.env(), host.env()
            await asyncio.gather(env.reset(1), other.reset(2))
            gone = asyncio.create_task(env.legal())
            await asyncio.sleep(0)
            gone.cancel()
            assert (await other.snapshot())["seed"] == 2
            assert (await env.snapshot())["seed"] == 1

    asyncio.run(main())


def test_the_child_ends_when_its_parent_is_killed(project: Path) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
from vibe.envs import EnvHost
async def main():
    async with EnvHost(Path({str(project)!r}), {{}}) as host:
        await host.env().reset(1)
        print(host.pid, flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    child = int(parent.stdout)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
            return  # ended; whoever adopted it has not looked yet
        time.sleep(0.02)
    raise AssertionError("the child outlived its parent")


def test_the_protocol_is_json_lines_as_designed(project: Path) -> None:
    limits = Limits().as_json()
    requests = [
        {"id": 1, "op": "reset", "env": "e1", "rules": {"n": 1}, "seed": 7},
        {"id": 2, "op": "legal", "env": "e2"},
        {"id": 3, "op": "dance", "env": "e1"},
        {"id": 4, "op": "step", "env": "e1", "text": "end"},
        {"id": 5, "op": "close", "env": "e1"},
    ]
    text = "".join(json.dumps(request) + "\n" for request in requests) + "not json\n"
    command = [sys.executable, "-I", "-S", "-B", str(HOST), str(project), limits]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    ready, *replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready == {}
    assert replies[0] == {"id": 1, "ok": {"seat": "a", "agent": "a", "system": "s", "observation": "7"}}
    assert replies[1] == {"id": 2, "error": {"code": "unknown_env", "message": "there is no env 'e2'; reset it first"}}
    assert replies[2]["error"]["code"] == "bad_request"
    assert replies[3]["ok"]["rewards"] == {"a": 1.0}
    assert replies[4] == {"id": 5, "ok": {}}
    assert replies[5]["id"] is None


def test_a_request_takes_milliseconds_at_most() -> None:
    template = library.load("tictactoe")

    async def main() -> float:
        async with EnvHost(template.path, template.defaults) as host:
            env = host.env()
            await env.reset(0)
            best = float("inf")
            for _ in range(5):
                started = time.perf_counter()
                for _ in range(100):
                    await env.legal()
                best = min(best, (time.perf_counter() - started) / 100)
            return best

    assert asyncio.run(main()) < 0.005  # 0.1 ms on an idle core
