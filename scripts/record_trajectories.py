"""Record benchmarks/recorded.json.gz: a research task played through agent frameworks against a real server.

    make frameworks
    .venv-frameworks/bin/python scripts/record_trajectories.py [--frameworks NAME …] [--episodes 4] [--out FILE]

The policy is tiny and plays replies drawn from a seed, so frameworks, chat template and server alone decide what its
contexts are. The template drops reasoning once the user asks again. A framework's episodes share their questions and
differ in their replies. With the same versions the same tokens come out again, but for the random ids of tool calls,
which smolagents writes into its texts.

The file is JSON: `header` says what recorded it; `groups` has for each framework its episodes, each a list of calls. A
call's context begins as an earlier call of its group: `shares` is [that call's number in the group, how many of its
tokens, reply included], or null. `context` holds the rest, `reply` what was sampled, and `continues` is [number of an
earlier call of the episode, where the own part of the context begins], or null.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from research_agents import FRAMEWORKS
from research_task import corpus, replies
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from swarm_engine import child
from swarm_engine.client import SwarmClient
from swarm_engine.server.journal import Journal
from swarm_engine.server.roster import episode_records
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.continuations import with_continuations
from swarm_engine.types import Call, Mode

OUT = Path(__file__).parents[1] / "benchmarks" / "recorded.json.gz"
TEMPLATE = Path(__file__).with_name("research_template.jinja")
NUM_EPISODES = 4
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each and not flagged special, as in Qwen3."""
VOCAB_SIZE = 1024
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
    "eos_token_id": SPECIALS.index("<|im_end|>"),
    "dtype": "float32",
}
CONFIG = {
    "num_threads": 1,
    "policies": {"policy": {"model": "scripted"}},
    "sampler": {"backend": "scripted", "max_tokens": 1024},
}

Recorded = dict[str, list[tuple[Call, ...]]]
"""The calls of every episode, by framework."""


def write_model(folder: Path) -> None:
    """A policy with random weights, and a tokenizer of the words of other episodes."""
    import torch
    from safetensors.torch import save_file

    from swarm_engine.models.decoder import Decoder, DecoderConfig

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights = Decoder(DecoderConfig.from_json(MODEL)).named_weights()
    tensors = {name: torch.randn(view.shape, generator=generator) * 0.1 for name, view in weights}
    save_file(tensors, folder / "model.safetensors")


@contextmanager
def serving(run_dir: Path) -> Iterator[SwarmClient]:
    """A server on a run folder, with its engine started."""
    command = child.command("swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--exit-with-stdin")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    try:
        listening = json.loads(process.stdout.readline())
        token = json.loads(Path(listening["token_file"]).read_text(encoding="utf-8"))["operator"]
        with SwarmClient(listening["url"], token) as client:
            client.start(CONFIG, wait=True)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def play(client: SwarmClient, name: str, num_episodes: int) -> list[str]:
    """Play a framework's group; returns the ids of its episodes."""
    framework = FRAMEWORKS[name]
    ids = []
    for number in range(num_episodes):
        script = replies(framework.habits, f"{name}/{number}")
        with client.episode(name, mode=Mode.DEBUG, script=script) as episode:
            framework.play(episode.base_url, episode.api_key)
            num_calls = len(client.timelines(episode.episode_id))
            assert num_calls == len(script), f"{name} made {num_calls} calls where the script has {len(script)}"
            episode.end(reward=0.0)
        ids.append(episode.episode_id)
        print(f"{name}, episode {number}: {num_calls} calls", file=sys.stderr, flush=True)
    return ids


async def read(run_dir: Path, codec: ChatCodec, ids: dict[str, list[str]]) -> Recorded:
    """The calls of ended episodes as the journal has them, each with the one it continues."""
    journal = Journal(run_dir / "journal.db")
    try:
        found: Recorded = {}
        for name, episode_ids in ids.items():
            rows = [await journal.episode(episode_id) for episode_id in episode_ids]
            records = [episode_records.validate_json(row.record) for row in rows if row]
            found[name] = [with_continuations(record, codec).calls for record in records]
        return found
    finally:
        await journal.close()


def record(names: Sequence[str], num_episodes: int) -> Recorded:
    """Play the frameworks against a server in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        model = run_dir / "models" / "scripted"
        write_model(model)
        with serving(run_dir) as client:
            ids = {name: play(client, name, num_episodes) for name in names}
        # The template asks for no date.
        codec = ChatCodec.load(model, [SPECIALS.index("<|im_end|>")], datetime.min)
        return asyncio.run(read(run_dir, codec, ids))


def as_json(recorded: Recorded) -> dict[str, Any]:
    """The file's content."""
    header = {
        "recorded_by": "scripts/record_trajectories.py",
        "frameworks": {name: {one: version(one) for one in FRAMEWORKS[name].packages} for name in recorded},
        "vocab_size": VOCAB_SIZE,
        "template": TEMPLATE.read_text(encoding="utf-8"),
    }
    groups = [{"framework": name, "episodes": packed(episodes)} for name, episodes in recorded.items()]
    return {"header": header, "groups": groups}


def packed(episodes: Sequence[Sequence[Call]]) -> list[list[dict[str, Any]]]:
    """A group's episodes, each call without what an earlier one has."""
    earlier: list[tuple[int, ...]] = []
    written = []
    for calls in episodes:
        numbers = {call.call_id: number for number, call in enumerate(calls)}
        lines = []
        for call in calls:
            lengths = [num_shared(call.prompt_ids, tokens) for tokens in earlier]
            most = max(lengths, default=0)
            known = call.continues
            lines.append(
                {
                    "shares": [lengths.index(most), most] if most else None,
                    "context": call.prompt_ids[most:],
                    "reply": call.completion_ids,
                    "continues": known and [numbers[known.call_id], known.start],
                }
            )
            earlier.append(call.prompt_ids + call.completion_ids)
        written.append(lines)
    return written


def num_shared(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def main() -> int:
    """Parse, record, write."""
    parser = argparse.ArgumentParser(description="Record trajectories of agent frameworks.")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, metavar="NAME", help="default: all")
    parser.add_argument("--episodes", type=int, default=NUM_EPISODES, help="of each framework")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    content = json.dumps(as_json(record(args.frameworks or list(FRAMEWORKS), args.episodes)), separators=(",", ":"))
    args.out.write_bytes(gzip.compress(content.encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
