"""The command `swarm`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from conftest import SMALL, Served, serve_thread, spoken
from rich.console import Console
from typer.testing import CliRunner

from swarm_engine.cli import app
from swarm_engine.client import Event, SwarmClient
from swarm_engine.errors import RunDirError
from swarm_engine.health import HealthWarning, WarningKind
from swarm_engine.server.serve import RunDirLock
from swarm_engine.types import Mode
from swarm_engine.watch import METRICS, print_lines, step_table, why_nothing_trained

RUN = CliRunner()


def swarm(*words: str, ok: bool = True) -> str:
    found = RUN.invoke(app, list(words))
    assert (found.exit_code == 0) == ok, found.output
    return found.stdout if ok else found.stderr


def test_status_start_stop_export_and_timelines_of_a_server_in_its_run_folder(engine: Served) -> None:
    where = ("--run-dir", str(engine.run_dir))
    assert "state     ROLLING" in swarm("status", *where)
    assert json.loads(swarm("status", *where, "--json"))["state"] == "ROLLING"
    with engine.client() as client, client.episode("t", mode=Mode.EVAL) as episode:
        episode.chat([{"role": "user", "content": "hi"}], max_tokens=2)
        episode.end(reward=1.0)
    shown = swarm("timelines", episode.episode_id, *where)
    assert "[user user, 10 tokens] '<|im_start|>user\\nhi<|im_end|>\\n'" in shown
    assert "2 trained" in shown or "1 trained" in shown
    assert json.loads(swarm("timelines", episode.episode_id, *where, "--json"))["timelines"][0]["agent"] == "main"
    assert swarm("export", "mine", *where).strip().endswith("exports/mine")
    assert json.loads(swarm("stop", *where, "--json"))["state"] == "OFFLINE"
    assert "ROLLING at step 0" in swarm("start", *where)


def test_timelines_say_why_a_reply_is_not_trained(engine: Served) -> None:
    hi = [{"role": "user", "content": "hi"}]
    with engine.client() as client, client.episode("t", mode=Mode.EVAL) as episode:
        first = episode.chat(hi, max_tokens=2, temperature=0)
        episode.chat([*hi, first.message, *hi], max_tokens=2)
        episode.end(reward=1.0)
        recorded = client.timelines(episode.episode_id)
        (merged,) = client.timelines(episode.episode_id, merge="token")
    reasons = [
        [block["untrained_because"] for block in timeline["blocks"] if block["author"] == "llm"]
        for timeline in (*recorded, merged)
    ]
    assert reasons == [["greedy"], [None, None], ["greedy", None]]
    shown = swarm("timelines", episode.episode_id, "--run-dir", str(engine.run_dir)).splitlines()
    assert sum("tokens, not trained: greedy]" in line for line in shown) == 1


def test_a_server_is_found_by_url_and_token_file_too(engine: Served, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(engine.tokens["observer"])
    assert "ROLLING" in swarm("status", "--url", engine.url, "--token-file", str(token))
    assert "may not do this; it takes the role operator" in swarm(
        "stop", "--url", engine.url, "--token-file", str(token), ok=False
    )


def test_no_server_and_no_token_say_what_to_do(tmp_path: Path) -> None:
    assert f"no server runs in {tmp_path}; start one with `swarm serve" in swarm(
        "status", "--run-dir", str(tmp_path), ok=False
    )
    said = swarm("status", "--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "none"), ok=False)
    assert "can't be read (No such file or directory); a server writes it" in said
    (tmp_path / "token").write_text("x")
    said = swarm("status", "--url", "http://me:pw@host", "--token-file", str(tmp_path / "token"), ok=False)
    assert "holds a user name, a password or a query" in said


@pytest.mark.parametrize("text", ["{", '{"observer": "x"}', '{"operator": 7}', "two\nlines", "# A3R", ""])
def test_a_file_that_is_no_token_file_is_a_message_and_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    said = swarm("status", "--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token"), ok=False)
    assert "holds no operator's token; name the token.json of the server's run folder" in said


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
def test_a_config_or_token_file_that_can_not_be_one_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "given"
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "device":
            file = Path("/dev/zero")
        case "folder":
            file.mkdir()
        case _:
            file.write_text(" " * (1024 * 1024 + 1))
    said = "it has 1048577 bytes, the limit is 1048576" if kind == "large" else "it is no regular file"
    for words, code in (
        (["serve", "--start", "--config"], 2),
        (["start", "--url", "http://127.0.0.1:9", "--config"], 2),
        (["status", "--url", "http://127.0.0.1:9", "--token-file"], 1),
    ):
        found = RUN.invoke(app, [*words, str(file), "--run-dir", str(tmp_path / "run")])
        assert (found.exit_code, said in found.stderr) == (code, True), found.stderr


def test_a_config_that_is_nested_too_deeply_is_a_message_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    found = RUN.invoke(app, ["serve", "--start", "--config", str(file), "--run-dir", str(tmp_path / "run")])
    assert found.exit_code == 2
    assert "is no JSON" in found.stderr


def test_words_that_are_no_text_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A file's name may be of any bytes; in an answer or an event it could not stand."""
    folder = os.fsencode(tmp_path) + b"/\xff"
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", folder]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, "is not valid UTF-8" in found.stderr) == (2, True)
    assert not os.path.exists(folder)


def test_a_config_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = ["serve", "--run-dir", str(tmp_path / "run"), "--config", str(tmp_path / "config.json"), "--json"]
    found = RUN.invoke(app, command)
    assert found.exit_code == 2
    assert "add --start" in json.loads(found.stdout)["message"]


def test_the_server_of_a_run_folder_is_not_that_of_its_copy(engine: Served, tmp_path: Path) -> None:
    for name in ("server.json", "token.json"):
        shutil.copy(engine.run_dir / name, tmp_path)
    assert f"no server runs in {tmp_path}" in swarm("stop", "--run-dir", str(tmp_path), ok=False)
    (tmp_path / "link").symlink_to(engine.run_dir)
    assert "ROLLING" in swarm("status", "--run-dir", str(tmp_path / "link"))


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, " " * (1 << 20) + "{}", "[]", '{"url": "http://h"}', None],
    ids=["nested", "long", "list", "half", "pipe"],
)
def test_a_servers_file_that_nobody_wrote_is_no_server_and_waited_for_by_nobody(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "server.json"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    assert f"no server runs in {tmp_path}" in swarm("status", "--run-dir", str(tmp_path), ok=False)
    held = RunDirLock(tmp_path)
    with pytest.raises(RunDirError, match=rf"another server runs in {tmp_path};"):
        RunDirLock(tmp_path)
    held.release()


def test_an_unknown_episode_is_a_message_and_no_traceback(engine: Served) -> None:
    said = swarm("timelines", "e1", "--run-dir", str(engine.run_dir), ok=False)
    assert said.strip() == "swarm: there is no episode 'e1'; claim one with POST /swarm/v1/episodes"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON (Expecting property name"), ('{"seeds": 1}', "seeds: Extra inputs are not permitted")],
)
def test_a_config_with_a_mistake_ends_serve_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    found = RUN.invoke(app, ["serve", "--run-dir", str(tmp_path / "run"), "--config", str(file), "--start"])
    assert found.exit_code == 2
    assert message in found.stderr
    assert not (tmp_path / "run").exists()


def test_watch_with_json_prints_one_event_a_line(engine: Served) -> None:
    command = [sys.executable, "-m", "swarm_engine.cli", "watch", "--json", "--run-dir", str(engine.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "server"
        assert json.loads(process.stdout.readline())["kind"] == "config"
        process.terminate()


def watch(served: Served, stdout: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm_engine.cli", "watch", "--run-dir", str(served.run_dir)]
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


def train_once(served: Served) -> None:
    with served.client() as client:
        client.start(SMALL, wait=True)
        for _ in range(4):
            spoken(client.episode("t")).end(reward=1.0)


def test_watch_shows_a_table_in_a_terminal_until_the_server_goes_away(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal, on Linux
            while more := os.read(ours, 4096):
                shown.extend(more)

    reader = threading.Thread(target=read)
    reader.start()
    with serve_thread(tmp_path / "run") as served:
        process = watch(served, terminal)
        os.close(terminal)
        train_once(served)
        time.sleep(3.0)
    _, err = process.communicate(timeout=30)
    reader.join(30)
    os.close(ours)
    assert process.returncode in (0, 1)
    assert "state     ROLLING" in shown.decode()
    assert "Traceback" not in err


def test_watch_into_a_file_prints_a_line_a_state_and_an_update_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with serve_thread(tmp_path / "run") as served, (tmp_path / "out").open("w") as file:
        process = watch(served, file.fileno())
        train_once(served)
        deadline = time.monotonic() + 20
        while len(lines) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
            lines = (tmp_path / "out").read_text().splitlines()
    _, err = process.communicate(timeout=30)
    assert lines[:2] == ["BOOTING: start", "ROLLING: booted at step 0"]
    assert {line.partition(":")[0] for line in lines[2:]} >= {"ROLLING_POST", "WEIGHT_SYNCING", "step 1"}
    assert "Traceback" not in err


def test_the_default_folder_is_in_the_home_of_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm_engine.cli import default_run_dir

    monkeypatch.delenv("A3R_HOME", raising=False)
    assert default_run_dir() == Path(".a3r/swarm")
    monkeypatch.setenv("A3R_HOME", "/data/lab")
    assert default_run_dir() == Path("/data/lab/swarm")


def test_a_folder_that_can_not_be_used_is_a_message_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = RUN.invoke(app, ["serve", "--run-dir", str(tmp_path / "file" / "run")])
    assert found.exit_code == 2
    assert "can't be used" in found.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_threads": 100_000}, "num_threads: Input should be less than or equal to 1024"),
        ({"sampler": {"max_running": 10**9}}, "sampler.max_running: Input should be less than or equal to 4096"),
        ([], "is not valid: the whole: Input should be"),
    ],
)
def test_a_config_that_no_machine_bears_is_refused_in_words(tmp_path: Path, config: object, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = RUN.invoke(app, ["serve", "--start", "--config", str(file), "--run-dir", str(tmp_path / "run")])
    assert found.exit_code == 2
    assert said in found.stderr
    assert not (tmp_path / "run").exists()


def test_serve_with_another_config_in_a_used_folder_is_a_message_and_no_traceback(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "run") as served, served.client() as client:
        client.start(SMALL, wait=True)
        spoken(client.episode("t")).end(reward=1.0)
    file = tmp_path / "other.json"
    file.write_text(json.dumps({**SMALL, "seed": 8}))
    words = ["serve", "--start", "--config", str(file), "--run-dir", str(tmp_path / "run")]
    found = RUN.invoke(app, words)
    assert found.exit_code == 2
    assert "seed can't change in it; start with the same values, or use a new run folder" in found.stderr
    database = sqlite3.connect(tmp_path / "run" / "journal.db")
    database.execute("UPDATE meta SET value = '{\"seeds\": 1}' WHERE key = 'config'")
    database.commit()
    database.close()
    for more in ([], ["--config", str(file)]):
        found = RUN.invoke(app, ["serve", "--start", "--run-dir", str(tmp_path / "run"), *more])
        assert found.exit_code == 2
        assert "is not valid any more: seeds: Extra inputs are not permitted; use the version" in found.stderr


def test_every_folder_that_serve_makes_is_its_owners_alone(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "home" / "swarm", worker=("never started",)):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "home", tmp_path / "home" / "swarm")]
    assert modes == [0o700, 0o700]


def step_event(step: int, metrics: dict[str, float | None], drops: dict[str, int] | None = None) -> Event:
    return Event(step, 0.0, "step", {"step": step, "seconds": 1.25, "metrics": metrics, "drops": drops or {}})


def shown(width: int, *steps: Event) -> str:
    with (console := Console(width=width, color_system=None)).capture() as capture:
        console.print(step_table(steps))
    return capture.get()


def test_a_narrow_terminal_shows_every_number_with_its_exponent() -> None:
    text = shown(60, step_event(1, dict.fromkeys(METRICS, -6.147e-09)))
    assert "…" not in text
    assert sorted(set(text) & set("-.0123456789")) == sorted("-.012569")
    assert text.count("-") == 2 * len(METRICS)
    assert text.count("9") == len(METRICS)


def test_a_row_of_the_longest_numbers_takes_80_columns_and_one_line() -> None:
    longest = step_event(100_000, dict.fromkeys(METRICS, -6.147e-09))
    lines = [line.rstrip() for line in shown(80, longest).splitlines() if line.strip()]
    assert lines[-1].split() == ["100000", "1.25", *["-6.15e-09"] * len(METRICS)]
    assert len(lines[-1]) <= 80


FLAT = step_event(
    2, {"skipped": 1.0, "nonfinite_gradient": 0.0, "greedy_calls": 3.0, "cancelled_calls": 0.0}, {"zero_variance": 32}
)
WHY_FLAT = "nothing trained: 32 episodes in groups of equal reward, 3 calls greedy"


@pytest.mark.parametrize(
    ("metrics", "drops", "said"),
    [
        ({"skipped": 0.0, "greedy_calls": 3.0}, {"zero_variance": 8}, None),
        (FLAT.payload["metrics"], FLAT.payload["drops"], WHY_FLAT),
        ({"skipped": 1.0, "unused_retry_calls": 1.0}, {"untrained": 1}, "1 episode without a reply to train, 1 call"),
        ({"skipped": 1.0, "nonfinite_gradient": 1.0}, {}, "nothing trained: loss or gradient was not finite"),
        ({"skipped": 1.0, "nonfinite_loss": 1.0}, {}, "nothing trained: loss or gradient was not finite"),
        ({"skipped": 1.0}, {"lease_expired": 4}, "nothing trained"),
        ({"skipped": 1.0, "grad_norm": 0.0}, {"zero_variance": 4}, "nothing trained: the gradient was zero"),
        (
            {"skipped": 1.0, "grad_norm": 0.0, "off_policy_fraction": 1.0},
            {},
            "nothing trained: the gradient was zero, trainer.off_policy bounds every token",
        ),
        ({"skipped": 0.0, "learning_rate": 1e-12}, {}, None),
        ({"skipped": 0.0, "learning_rate": 0.0}, {}, "the learning rate is 0, this is past trainer.total_updates"),
    ],
)
def test_an_update_that_trained_nothing_says_why(
    metrics: dict[str, float | None], drops: dict[str, int], said: str | None
) -> None:
    found = why_nothing_trained(metrics, drops)
    assert (found is None) if said is None else found is not None and said in found


def test_the_table_and_the_lines_of_watch_say_that_nothing_was_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"step 2: {WHY_FLAT}" in shown(80, step_event(1, {"skipped": 0.0}), FLAT)
    client = SimpleNamespace(events=lambda _: [FLAT])
    print_lines(cast(SwarmClient, client), 0)
    assert capsys.readouterr().out == f"step 2: 1.25 s, {WHY_FLAT}\n"


def test_the_table_and_the_lines_of_watch_say_what_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    healthy, ill = step_event(1, {}), step_event(2, {})
    ill.payload["health"] = [HealthWarning(WarningKind.ENTROPY_COLLAPSE, 0.05, 0.1, "entropy fell").as_event()]
    assert "warning: entropy fell" in shown(80, healthy, ill)
    assert "warning" not in shown(80, ill, healthy), "what was wrong once may be over"
    client = SimpleNamespace(events=lambda _: [ill])
    print_lines(cast(SwarmClient, client), 0)
    assert "\n  warning: entropy fell\n" in capsys.readouterr().out


def test_the_status_of_an_engine_that_is_off_says_how_to_start_it(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "run", worker=("never started",)) as served:
        assert "state     OFFLINE\n          start it with `swarm start`\n" in swarm(
            "status", "--run-dir", str(served.run_dir)
        )
