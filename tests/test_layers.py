"""Imports point down only. The table is the architecture; this test reads it off the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("a3r", "vibe", "templates", "vibe_templates", "swarm_engine", "experiments_db")

MAY_IMPORT = {
    "a3r": ("a3r", "vibe", "swarm_engine", "experiments_db"),
    "vibe": ("vibe", "swarm_engine", "experiments_db"),
    "templates": ("swarm_engine.types", "swarm_engine.client"),
    "swarm_engine": ("swarm_engine",),
    "experiments_db": ("experiments_db",),
}

EXCEPTIONS = {("swarm_engine/cli.py", "experiments_db.collect")}
"""`swarm serve` may start the collector inside the command."""

TORCH_HOMES = (
    "swarm_engine/trainer/", "swarm_engine/sampler/", "swarm_engine/models/", "swarm_engine/hosted.py",
    "swarm_engine/worker.py",
)  # fmt: skip
"""Only these import torch; the front and the client never do."""

MAY_NEED = {
    "a3r": (),
    "vibe": ("engine",),
    "templates": (),
    "swarm_engine": ("engine", "ray", "vllm"),
    "experiments_db": (),
    "examples": ("engine", "frameworks"),
    "scripts": ("engine", "frameworks"),
    "benchmarks": ("engine", "frameworks", "trl", "vllm"),
    "tests": ("engine", "postgres", "dev"),
    "tests/clients": ("engine", "dev"),
    "tests/frameworks": ("engine", "frameworks", "dev"),
    "tests/ray": ("engine", "ray", "dev"),
    "tests/trl": ("engine", "trl", "dev"),
    "tests/vllm": ("engine", "vllm", "dev"),
}
"""Extras whose packages a folder imports, beside those of every installation; a folder inside of it has its own."""
LISTS = {"tests/clients": ("constraints-clients.txt", "constraints-openhands.txt")}
"""Lists of the environments in which a folder's programs run."""
DISTRIBUTIONS = {"agents": "openai-agents", "openhands": "openhands-sdk", "pydantic_ai": "pydantic-ai-slim"}
"""Of modules with another name."""
NOT_IMPORTED = {"anthropic", "openai"}
"""Installed for the agents that people train."""

SLOW_TO_IMPORT = ("torch", "transformers", "langgraph", "fastapi", "openai", "anthropic", "matplotlib")
HEAVY = ("torch", "transformers", "langgraph", "fastapi", "pydantic", "openai", "anthropic")


@cache
def imports_of(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, `from a import b` as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def is_under(module: str, allowed: str) -> bool:
    """Whether `module` is `allowed` or lies in it."""
    return module == allowed or module.startswith(allowed + ".")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down_only(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports_of(path)
        if any(is_under(module, ours) for ours in OURS)
        and not any(is_under(module, allowed) for allowed in MAY_IMPORT[package])
        and not any(str(path.relative_to(ROOT)) == where and is_under(module, allowed) for where, allowed in EXCEPTIONS)
    ]
    assert wrong == []


@cache
def helpers() -> set[str]:
    """Modules that are imported from the folder of a test, a benchmark, a script or an example."""
    folders = ("tests", "benchmarks", "scripts", "examples")
    paths = [path for folder in folders for path in sources(folder)]
    return {path.stem for path in paths} | {path.parent.name for path in paths}


def needs_of(folder: str) -> dict[str, str]:
    """Distributions of other people that a folder's files import, each with one of the files."""
    ours = {*sys.stdlib_module_names, *OURS, *helpers()}
    others = [ROOT / other for other in MAY_NEED if other.startswith(f"{folder}/")]
    found = {}
    for path in sources(folder):
        for module in () if any(map(path.is_relative_to, others)) else imports_of(path):
            name = module.partition(".")[0]
            if name not in ours:
                named = "langgraph-checkpoint-sqlite" if is_under(module, "langgraph.checkpoint.sqlite") else name
                found[DISTRIBUTIONS.get(named, named.replace("_", "-"))] = str(path.relative_to(ROOT))
    return found


def declared(*extras: str) -> set[str]:
    """Names of the distributions that an installation with these extras asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return {re.match(r"[\w.-]+", one)[0].lower() for one in asked}  # type: ignore[index]


@pytest.mark.parametrize("folder", MAY_NEED)
def test_whatever_is_imported_is_declared(folder: str) -> None:
    """What another package happens to bring may be gone with its next version."""
    there = declared(*MAY_NEED[folder])
    for name in LISTS.get(folder, ()):
        there |= set(re.findall(r"^([\w.-]+)==", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: where for name, where in needs_of(folder).items() if name not in there} == {}


def test_whatever_is_declared_is_imported() -> None:
    used = {name for folder in MAY_IMPORT for name in needs_of(folder)}
    assert declared("engine") - used == NOT_IMPORTED


def test_no_process_of_ours_imports_from_the_current_folder() -> None:
    """Who starts an interpreter with `-m` says `-P` before it."""
    wrong = []
    for package in (*MAY_IMPORT, "scripts", "benchmarks", "examples"):
        for path in sources(package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
                for before, word in pairwise([None, *words]):
                    is_module = isinstance(word, ast.Constant) and word.value == "-m"
                    is_safe = isinstance(before, ast.Constant) and before.value == "-P"
                    if is_module and not is_safe and path != ROOT / "swarm_engine" / "child.py":
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_what_starts_a_child_imports_only_what_every_interpreter_has_loaded() -> None:
    tree = ast.parse((ROOT / "swarm_engine" / "child.py").read_text(encoding="utf-8"))
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"os", "sys"}
    assert {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} == {"__future__"}


def test_only_trainer_and_sampler_import_torch() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("swarm_engine")
        if any(is_under(module, "torch") or is_under(module, "transformers") for module in imports_of(path))
        and not str(path.relative_to(ROOT)).startswith(TORCH_HOMES)
    ]
    assert wrong == []


def test_the_client_imports_types_only_and_nothing_heavy() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("swarm_engine/client")
        for module in imports_of(path)
        if is_under(module, "swarm_engine")
        and not any(is_under(module, ok) for ok in ("swarm_engine.client", "swarm_engine.types"))
    ]
    assert wrong == []
    code = f"import sys, swarm_engine.client; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_importing_the_client_takes_little_longer_than_importing_httpx() -> None:
    # In the child, so that the interpreter's start does not count; CPU time, the best of 5, for machines are shared.
    best_s = dict.fromkeys(("httpx", "swarm_engine.client"), float("inf"))
    for _ in range(5):
        for module in best_s:
            code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            best_s[module] = min(best_s[module], float(run.stdout))
    assert best_s["swarm_engine.client"] < 2 * best_s["httpx"]


@pytest.mark.parametrize("flag", ["--help", "--version"])
@pytest.mark.parametrize("command", ["a3r", "vibe", "swarm_engine.cli"])
def test_help_and_version_load_nothing_heavy(command: str, flag: str) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = [{command!r}, {flag!r}]\n"
        "try:\n"
        f"    runpy.run_module({command!r}, run_name='__main__')\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        f"print('HEAVY', [name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])\n"
    )
    started = time.monotonic()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "HEAVY []", f"after {time.monotonic() - started:.1f} s"
    if flag == "--version":
        assert shown.stdout.splitlines()[0] == f"a3r {version('a3r')}"
