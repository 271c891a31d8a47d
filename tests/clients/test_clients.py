"""Clients that nobody here wrote, unmodified, in versions that are pinned: with base URL and key alone, or with the
one setting that docs/frameworks.md names, what the sampler saw and returned is what is trained.

`make test-heavy` runs it in the core environment. A3R_CLIENTS names the one of `make clients`, for Python and Node;
A3R_OPENHANDS_PYTHON is an interpreter with OpenHands' SDK, where the machine has a Python for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "frameworks")]

from exchanges import Exchange, recording  # noqa: E402
from lab import CALL, Lab, open_lab  # noqa: E402

from swarm_engine.types import Mode  # noqa: E402

pytestmark = pytest.mark.heavy

DOCS = sorted((HERE.parents[1] / "docs").glob("*.md"))
OPENHANDS = os.environ.get("A3R_OPENHANDS_PYTHON", "")
ANSWER = "It is 5."
ADDS = "Let me add.\n" + CALL % ("add", '{"a": 2, "b": 3}')
HOWS = ("whole", "streamed")


def shell_script(tool: str, argument: str, **others: str) -> tuple[str, ...]:
    """A sum by the shell tool of a coding agent, then the answer."""
    return ("Let me add.\n" + CALL % (tool, json.dumps({argument: "echo $((2 + 3))", **others})), ANSWER)


@dataclass(frozen=True)
class Client:
    """How a client is started, what it needs, and what it is told by the policy."""

    words: tuple[str, ...]
    """Its command; {url}, {key}, {home} and {openhands} are filled in, here and in `settings` and `files`."""
    script: tuple[str, ...] = (ADDS, ANSWER, ADDS, ANSWER)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its environment beside BASE_URL, API_KEY and HOME."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What lies in its home, by path."""
    has_answer: bool = True
    """It prints the policy's last words."""
    num_refused: int = 0
    """Requests that are refused, and that it sends again by itself without what was refused."""


CODEX = """\
model = "policy"
model_provider = "swarm"
check_for_update_on_startup = false
web_search = "disabled"
[agents]
enabled = false
[analytics]
enabled = false
[model_providers.swarm]
name = "swarm"
base_url = "{url}/v1"
env_key = "API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
OPENCODE = {
    "model": "swarm/policy",
    "share": "disabled",
    "autoupdate": False,
    "provider": {
        "swarm": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:BASE_URL}/v1", "apiKey": "{env:API_KEY}"},
            "models": {"policy": {}},
        }
    },
}
INSPECT = {
    f"{vendor}_{name}": value
    for vendor in ("OPENAI", "ANTHROPIC", "SWARM")
    for name, value in (("BASE_URL", "{url}"), ("API_KEY", "{key}"))
}


def inspect(model: str) -> Client:
    words = ("inspect", "eval", "inspect_task.py", "--model", model, "--log-dir", "{home}/logs")
    # Or the first call asks for a greeting, to learn whether the account gets summaries.
    words += ("--reasoning-summary", "none", "--display", "plain")
    task = (HERE / "inspect_task.py").read_text(encoding="utf-8")
    return Client(words, (ADDS, ANSWER), INSPECT, {"work/inspect_task.py": task}, has_answer=False)


def node(program: str, *words: str, **about: int) -> Client:
    return Client(("node", str(HERE / program), *words), **about)


CLIENTS: dict[str, Client] = {
    **{
        f"ai-sdk-{provider}-{how}": node("ai_sdk.mjs", provider, how)
        for provider in ("openai", "openai-compatible", "anthropic")
        for how in HOWS
    },
    **{
        f"openai-agents-js-{api}-{how}": node("openai_agents.mjs", api, how)
        for api in ("responses", "chat_completions")
        for how in HOWS
    },
    **{f"anthropic-runner-js-{how}": node("anthropic_runner.mjs", how, num_refused=2) for how in HOWS},
    **{
        f"anthropic-runner-{how}": Client(("python", str(HERE / "anthropic_runner.py"), how), num_refused=2)
        for how in HOWS
    },
    **{
        f"langchain-js-{vendor}-{how}": node("langchain_agent.mjs", vendor, how)
        for vendor in ("openai", "anthropic")
        for how in HOWS
    },
    **{f"mastra-{how}": node("mastra_agent.mjs", how) for how in HOWS},
    "codex": Client(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "What is 2 + 3?"),
        shell_script("exec_command", "cmd"),
        files={".codex/config.toml": CODEX},
    ),
    "opencode": Client(
        # Without a title of ours its first call asks for one.
        ("opencode", "run", "--title", "sum", "What is 2 + 3?"),
        shell_script("bash", "command", description="Adds."),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "mini-swe-agent": Client(
        ("mini", "-t", "What is 2 + 3?", "-m", "openai/policy", "-y", "--exit-immediately", "-o", "{home}/played.json"),
        (
            shell_script("bash", "command")[0],
            CALL % ("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),
        ),
        {
            "OPENAI_API_BASE": "{url}",
            "OPENAI_API_KEY": "{key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        has_answer=False,
    ),
    "inspect-ai-openai": inspect("openai/policy"),
    "inspect-ai-openai-api": inspect("openai-api/swarm/policy"),
    "inspect-ai-anthropic": inspect("anthropic/policy"),
    "openhands": Client(
        ("{openhands}", str(HERE / "openhands_agent.py")),
        (shell_script("terminal", "command")[0], CALL % ("finish", json.dumps({"message": ANSWER}))),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    # A coding agent's instructions and tools are 8,000 tokens of this tokenizer and more.
    texts = [path.read_text(encoding="utf-8") for path in DOCS]
    with open_lab(
        tmp_path_factory.mktemp("clients") / "run",
        sentences=texts,
        vocab_size=4096,
        max_position_embeddings=65536,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ) as lab:
        yield lab


@pytest.fixture(scope="module")
def path() -> str:
    """PATH with the clients' programs before all others."""
    found = os.environ.get("A3R_CLIENTS")
    assert found, "A3R_CLIENTS names no environment of clients; `make clients` makes one"
    return os.pathsep.join((f"{found}/bin", str(HERE / "node_modules" / ".bin"), os.environ["PATH"]))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_trained_on_what_was_sampled_for_it(lab: Lab, path: str, tmp_path: Path, name: str) -> None:
    if name == "openhands" and not OPENHANDS:
        pytest.skip("A3R_OPENHANDS_PYTHON names no interpreter; OpenHands' SDK needs Python 3.12 or newer")
    client = CLIENTS[name]
    before = lab.client.status().step
    exchanges: list[Exchange] = []
    with lab.client.episode(name, mode=Mode.TRAIN, script=client.script) as episode:
        address = urlsplit(episode.base_url)
        with recording(episode.base_url, exchanges) as proxy:
            played = play(client, proxy + address.path, episode.api_key, tmp_path, path)
        asked = "\n\n".join([*map(str, exchanges), played.stdout, played.stderr[-3000:]])
        assert played.returncode == 0, asked
        refused = [exchange for exchange in exchanges if exchange.status >= 400]
        assert len(refused) == client.num_refused, asked
        assert len(exchanges) - len(refused) == len(client.script), asked
        if client.has_answer:
            assert ANSWER in played.stdout
        num_sampled = lab.check_record(episode, len(client.script), is_one_context=True)
        episode.end(reward=1.0)
    # A second episode with another reward, or nothing is learned from the first.
    with lab.client.episode(name, mode=Mode.TRAIN, script=["It is 6."]) as episode:
        episode.chat([{"role": "user", "content": "What is 2 + 3?"}])
        num_sampled += lab.check_record(episode, 1, is_one_context=True)
        episode.end(reward=0.0)
    step = lab.step_after(before)
    assert step["metrics"]["num_trained_tokens"] == num_sampled, "every sampled token is trained exactly once"


def play(client: Client, url: str, key: str, home: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the client's command in a home of its own until it ends."""

    def filled(text: str) -> str:
        known = {"{url}": url, "{key}": key, "{home}": str(home), "{openhands}": OPENHANDS}
        for mark, value in known.items():
            text = text.replace(mark, value)
        return text

    work = home / "work"
    work.mkdir()
    for name, text in client.files.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(filled(text), encoding="utf-8")
    settings = {name: filled(value) for name, value in client.settings.items()}
    return subprocess.run(
        [filled(word) for word in client.words],
        cwd=work,
        env={"PATH": path, "HOME": str(home), "BASE_URL": url, "API_KEY": key, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )
