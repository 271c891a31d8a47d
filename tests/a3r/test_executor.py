"""Jobs on this machine: real processes, real signals, real kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from a3r.errors import JobError
from a3r.executor import JobSpec, JobState, JobStatus, LocalExecutor, supervise


def spec(tmp_path: Path, code: str, *, limit: float = 60.0) -> JobSpec:
    return JobSpec((sys.executable, "-c", code), str(tmp_path), limit, {"GREETING": "hello"})


def wait(executor: LocalExecutor, key: str, until: Callable[[JobStatus], bool], patience: float = 20.0) -> JobStatus:
    deadline = time.monotonic() + patience
    while not until(status := executor.poll([key])[key]):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def ended(status: JobStatus) -> bool:
    return status.state.is_final


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_file(path: Path, patience: float = 20.0) -> str:
    deadline = time.monotonic() + patience
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path.read_text().strip()


def test_a_job_runs_in_its_folder_with_its_environment_and_leaves_its_exit_code(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    code = "import os; print(os.environ['GREETING'], os.getcwd()); raise SystemExit(7)"
    executor.submit("j1", spec(tmp_path, code))
    status = wait(executor, "j1", ended)
    assert (status.state, status.exit_code, status.cause) == (JobState.FAILED, 7, "exit code 7")
    assert status.log.read_text() == f"hello {tmp_path}\n"
    assert 0 < status.seconds < 20


def test_the_same_key_is_the_same_job_and_runs_once(tmp_path):
    executor, other = (LocalExecutor(tmp_path / "jobs", slots=2) for _ in range(2))
    job = spec(tmp_path, "open('ran', 'a').write('x')")
    for each in (executor, other, executor):
        each.submit("j1", job)
        each.poll(["j1"])
    assert wait(other, "j1", ended).state is JobState.SUCCEEDED
    executor.poll(["j1"])
    time.sleep(0.3)
    assert (tmp_path / "ran").read_text() == "x"


def test_many_guards_for_one_job_run_it_once(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("j1", spec(tmp_path, "open('ran', 'a').write('x')"))
    folder = str(tmp_path / "jobs" / "j1")
    guards = [subprocess.Popen([sys.executable, "-I", supervise.__file__, folder]) for _ in range(6)]
    assert [guard.wait(20) for guard in guards] == [0] * 6
    wait(executor, "j1", ended)
    assert (tmp_path / "ran").read_text() == "x"


def test_a_changed_job_under_an_old_key_is_refused(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("j1", spec(tmp_path, "pass"))
    with pytest.raises(JobError, match="needs a new key"):
        executor.submit("j1", spec(tmp_path, "print()"))


@pytest.mark.parametrize("key", ["../j", "a/b", "", ".hidden"])
def test_a_key_that_is_no_name_is_refused(tmp_path, key):
    with pytest.raises(JobError, match="names a folder"):
        LocalExecutor(tmp_path / "jobs", slots=1).submit(key, spec(tmp_path, "pass"))


def test_no_more_jobs_run_at_once_than_there_are_places_and_they_run_in_order(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=2)
    keys = ["c", "a", "b"]
    for key in keys:
        executor.submit(key, spec(tmp_path, "import time; time.sleep(0.5)"))
    first = {key: status.state for key, status in executor.poll(keys).items()}
    assert first == {"c": JobState.RUNNING, "a": JobState.RUNNING, "b": JobState.QUEUED}
    deadline = time.monotonic() + 20
    while not all(status.state is JobState.SUCCEEDED for status in executor.poll(keys).values()):
        assert sum(status.state is JobState.RUNNING for status in executor.poll(keys).values()) <= 2
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_jobs_that_ended_long_ago_are_not_looked_at_again(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("old", spec(tmp_path, "pass"))
    wait(executor, "old", ended)
    for name in ("spec.json", "pid.json"):
        (tmp_path / "jobs" / "old" / name).write_text("{")
    executor.submit("new", spec(tmp_path, "pass"))
    assert wait(executor, "new", ended).state is JobState.SUCCEEDED
    assert wait(LocalExecutor(tmp_path / "jobs", slots=1), "new", ended).state is JobState.SUCCEEDED


def test_a_running_job_that_nobody_asks_about_takes_its_place(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    for key in ("one", "two"):
        executor.submit(key, spec(tmp_path, "import time; time.sleep(300)"))
    wait(executor, "one", lambda status: status.state is JobState.RUNNING)
    assert executor.poll(["two"])["two"].state is JobState.QUEUED
    executor.cancel(["one", "two"])


def test_a_job_over_its_time_limit_is_ended_with_everything_it_started(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    # The grandchild hides in a session of its own and ignores the polite signal.
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); "
        "time.sleep(300)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    executor.submit("j1", spec(tmp_path, code, limit=0.7))
    status = wait(executor, "j1", ended)
    assert status.state is JobState.TIMEOUT
    grandchild = int(status.log.read_text())
    assert not is_running(grandchild)


def test_cancelling_ends_the_running_and_the_waiting(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    for key in ("a", "b"):
        executor.submit(key, spec(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(300)"))
    wait(executor, "a", lambda status: status.pid is not None)
    pid = int(wait_for_file(executor.log("a")))
    executor.cancel(["a", "b"])
    states = executor.poll(["a", "b"])
    assert [states[key].state for key in "ab"] == [JobState.CANCELLED, JobState.CANCELLED]
    assert not is_running(pid)
    assert not executor.log("b").exists()


def test_a_job_outlives_the_process_that_submitted_it_and_is_picked_up(tmp_path):
    code = "import time; time.sleep(1.0); print('done', flush=True)"
    submitter = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from a3r.executor import LocalExecutor, JobSpec\n"
        f"executor = LocalExecutor(Path({str(tmp_path / 'jobs')!r}), slots=1)\n"
        f"executor.submit('j1', JobSpec((sys.executable, '-c', {code!r}), {str(tmp_path)!r}, 60.0, {{}}))\n"
        "executor.poll(['j1'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", submitter], check=False)
    assert killed.returncode == -signal.SIGKILL
    status = wait(LocalExecutor(tmp_path / "jobs", slots=1), "j1", ended)
    assert (status.state, status.log.read_text()) == (JobState.SUCCEEDED, "done\n")


def test_a_job_whose_guard_was_killed_is_lost_and_its_process_ends(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("j1", spec(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(300)"))
    guard = wait(executor, "j1", lambda status: status.pid is not None).pid
    pid = int(wait_for_file(executor.log("j1")))
    assert guard
    os.kill(guard, signal.SIGKILL)
    assert wait(executor, "j1", ended).state is JobState.LOST
    assert not is_running(pid)


def test_a_pid_that_now_belongs_to_another_process_is_left_alone(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("j1", spec(tmp_path, "pass"))
    folder = tmp_path / "jobs" / "j1"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as innocent:
        # As after a restart of the machine: the number is taken again, the time of start is not.
        stale = {"pid": innocent.pid, "tick": "another boot:1", "started_at": 1.0}
        (folder / "pid.json").write_text(json.dumps(stale))
        (folder / "child.json").write_text(json.dumps(stale))
        assert executor.poll(["j1"])["j1"].state is JobState.LOST
        executor._signal("j1", signal.SIGKILL)
        time.sleep(0.1)
        assert innocent.poll() is None
        innocent.kill()


def test_a_secret_is_in_the_environment_of_a_job_and_in_no_file(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1, secrets={"PGPASSWORD": "hunter2"})
    executor.submit("j1", spec(tmp_path, "import os; print(len(os.environ['PGPASSWORD']))"))
    status = wait(executor, "j1", ended)
    assert status.log.read_text() == "7\n"
    assert not [path for path in status.log.parent.iterdir() if "hunter2" in path.read_text()]


def test_the_errors_of_a_job_are_its_tail(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    executor.submit("j1", spec(tmp_path, "print('out'); raise ValueError('what went wrong')"))
    wait(executor, "j1", ended)
    assert executor.tail("j1", lines=1) == "ValueError: what went wrong"


def home_spec(home: Path, code: str) -> JobSpec:
    (home / "projects").mkdir(parents=True, exist_ok=True)
    words = ("python", "-c", code, f"{home}/out", f"sqlite:///{home}/experiments.db", f"{home.parent}/a homely", "NEW")
    return JobSpec(words, str(home / "projects"), 60.0, {"A3R_HOME": str(home)})


SHOW = "import json, os, sys; json.dump([sys.argv[1:], os.getcwd(), os.environ['A3R_HOME']], open('said', 'w'))"


def test_a_job_that_waited_while_its_home_was_moved_runs_in_the_home_as_it_is_now(tmp_path):
    old, new = tmp_path / "a home", tmp_path / "another"
    LocalExecutor(old / "jobs", slots=1).submit("j1", home_spec(old, SHOW))
    old.rename(new)
    executor = LocalExecutor(new / "jobs", slots=1)
    executor.submit("j1", home_spec(new, SHOW))  # is the same job
    assert wait(executor, "j1", ended).state is JobState.SUCCEEDED
    words, folder, home = json.loads((new / "projects" / "said").read_text())
    assert words == [f"{new}/out", f"sqlite:///{new}/experiments.db", f"{old}ly", "NEW"]
    assert (folder, home) == (f"{new}/projects", str(new))
    assert not old.exists()


def test_a_copied_job_does_not_run_because_the_original_does_and_ending_it_ends_nothing(tmp_path):
    home, copy = tmp_path / "home", tmp_path / "copy"
    executor, other = LocalExecutor(home / "jobs", slots=1), LocalExecutor(copy / "jobs", slots=1)
    executor.submit("j1", home_spec(home, "import time; time.sleep(60)"))
    wait(executor, "j1", lambda status: status.pid is not None)
    wait_for_json(home / "jobs" / "j1" / "child.json")
    shutil.copytree(home, copy)
    assert other.poll(["j1"])["j1"].state is JobState.LOST
    other.cancel(["j1"])
    assert executor.poll(["j1"])["j1"].state is JobState.RUNNING
    executor.cancel(["j1"])


def test_a_job_that_runs_while_its_home_is_moved_is_refused_and_can_be_ended_there(tmp_path):
    old, new = tmp_path / "home", tmp_path / "moved"
    executor = LocalExecutor(old / "jobs", slots=1)
    executor.submit("j1", home_spec(old, "import time; time.sleep(60)"))
    running = wait(executor, "j1", lambda status: status.pid is not None)
    wait_for_json(old / "jobs" / "j1" / "child.json")
    old.rename(new)
    moved = LocalExecutor(new / "jobs", slots=1)
    with pytest.raises(JobError, match=rf"j1 \(process {running.pid}\) still works in {old}.*a3r resume"):
        moved.poll(["j1"])
    moved.cancel(["j1"])
    assert moved.poll(["j1"])["j1"].state is JobState.CANCELLED
    assert not is_running(running.pid)
    assert not old.exists()


def wait_for_json(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.parametrize("command", [("/no/such/program",), ("python", "-c", "pass")])
def test_a_job_without_its_program_or_its_folder_was_not_started(tmp_path, command):
    executor = LocalExecutor(tmp_path / "jobs", slots=1)
    folder = tmp_path if command[0] != "python" else tmp_path / "gone"
    executor.submit("j1", JobSpec(command, str(folder), 60.0))
    status = wait(executor, "j1", ended)
    assert status.state is JobState.NOT_STARTED
    assert status.cause.startswith("could not be started: ")
    assert "No such file or directory" in status.cause
