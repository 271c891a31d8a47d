"""What is shared context worth? Forward and backward over the same calls, merged in every way there is.

    python benchmarks/merging.py [--quick] [--sets NAME …] [--model small|nano] [--scale 0.25] [--repetitions 7]
                                 [--max-tokens 16384] [--json FILE]

For each set of trajectories.py and each mode: tokens computed, CPU time of one thread, peak memory above start (in a
process of its own). Ratios are of medians over interleaved repetitions, with a bootstrap interval over these; beside
them stands the limit that the floating-point operations alone would allow. Modes:

- `padded`: calls of alike length side by side, with padding;
- `packed`: calls one after the other in rows without padding, nothing shared;
- `token`: the same, after a call whose context continues another has taken that one in;
- `text`: the same where the messages continue each other and the tokens may differ, so its gradients are others;
- `tree`: every distinct prefix once;
- `chunks`: the same in four passes, each token forward twice, as a tree too large for memory goes.

The model is a Qwen3 of hidden size 256 with 6 layers and random weights, or nano, into whose vocabulary the token ids
are folded. Every mode has the same kernels, the same output head on the tokens with a loss alone, and the same bound on
tokens at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from ratios import ratio_of_medians
from rows import Row, show, show_promises, write_rows
from trajectories import NAMES, SETS, VOCAB_SIZE, Batch, batch_of

from experiments_db.intervals import Interval
from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.merger.trie import Ints, Node, Trie, build_trie
from swarm_engine.models import resolve
from swarm_engine.models.decoder import Decoder, DecoderConfig
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.rows import row_of
from swarm_engine.trainer.tree import Tree
from swarm_engine.trainer.units import PaddedUnit, TreeUnit, Unit, plan_units
from swarm_engine.types import Continuation, Span, Timeline

SMALL = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
LEGEND = """\
model and scale of all lengths, set, what, value [95% bootstrap interval] unit, n = repetitions. "MODE / tree" is how
many times as long MODE takes; its limit is that of the floating-point operations alone. CPU times are medians."""
MIN_SHARE_OF_LIMIT, MIN_UNIQUE = 0.9, 5000
"""What is promised of the tree against the limit, and from how many distinct tokens on."""
MIN_AGAINST_PACKED = {"react x8": 10.0, "compaction x8": 7.0, "thinking x8": 5.0}
MIN_AGAINST_TOKEN = {"thinking x8": 5.0, "thinking agents x8": 2.8}
MIN_AGAINST_BEST = 0.97
"""Which the interval of the ratio to the best other mode with the same gradients includes or exceeds, on every set."""
MAX_MEMORY_SHARE = 1 / 3
MAX_TRIE_S = 1.0
QUICK_SETS = ("react x1", "thinking x1", "compaction x1", "wide group x16")
DEFAULT_SETS = (*SETS, "recorded")
MEMORY_SETS = ("react x1", "thinking x1", "compaction x1")


class Mode(StrEnum):
    """How calls are computed."""

    PADDED = "padded"
    PACKED = "packed"
    TOKEN = "token"
    TEXT = "text"
    TREE = "tree"
    CHUNKS = "chunks"


OTHERS = (Mode.PADDED, Mode.PACKED, Mode.TOKEN)
"""Those that compute the tree's loss without a tree."""
NUM_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all sets."""

    model: str
    """`small` or `nano`."""
    scale: float
    """Of all lengths."""
    max_tokens: int
    """At once, in every mode."""
    is_quick: bool

    def load(self) -> Decoder:
        """The model."""
        return small_model() if self.model == "small" else nano_model()

    def batch(self, name: str) -> Batch:
        """A set. The bad case is one by its proportions, so its lengths stay."""
        return batch_of(name, 1.0 if name.startswith("wide") and not self.is_quick else self.scale)

    def case(self, name: str) -> str:
        """What a row of a set is called."""
        return f"{self.model} {self.scale:g}, {name}"


def timelines_of(batch: Batch, vocab_size: int) -> list[list[Timeline]]:
    """Every call as a timeline of its own, by episode."""
    return [
        [
            Timeline(
                policy="policy",
                agent="main",
                tokens=tuple(token % vocab_size for token in turn.context + turn.reply),
                spans=(
                    Span(
                        start=len(turn.context),
                        call_id=f"{number}-{index}",
                        logprobs=(-1.0,) * len(turn.reply),
                        policy_versions=(0,) * len(turn.reply),
                        temperature=1.0,
                    ),
                ),
                continues=turn.continues and Continuation(f"{number}-{turn.continues[0]}", turn.continues[1]),
            )
            for index, turn in enumerate(turns)
        ]
        for number, turns in enumerate(batch.episodes)
    ]


def plan(batch: Batch, mode: Mode, vocab_size: int, max_tokens: int) -> list[Unit]:
    """What a mode computes, unit by unit."""
    how = {Mode.TOKEN: Merge.TOKEN, Mode.TEXT: Merge.TEXT}.get(mode, Merge.NONE)
    merged = [line for lines in timelines_of(batch, vocab_size) for line in merge(lines, how)]
    rows = [row_of(line) for line in merged]
    match mode:
        case Mode.PADDED:
            return plan_units(rows, Merge.NONE, max_tokens)
        case Mode.TREE:
            return plan_units(rows, Merge.TREE, max_tokens)
        case Mode.CHUNKS:
            return [in_chunks(unit) for unit in plan_units(rows, Merge.TREE, max_tokens)]
        case Mode.PACKED | Mode.TOKEN | Mode.TEXT:
            return [
                TreeUnit(tuple(places), Tree.of([rows[place] for place in places], lay_apart), max_tokens)
                for places in bins([row.num_computed for row in rows], max_tokens)
            ]


def in_chunks(unit: Unit) -> TreeUnit:
    """The same tree, a part of it at once."""
    assert isinstance(unit, TreeUnit)
    return replace(unit, max_tokens=-(-unit.num_computed // NUM_CHUNKS))


def lay_apart(sequences: Sequence[Ints]) -> Trie:
    """The same sequences with nothing shared: what packing without padding is. None may be empty."""
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths]).tolist()
    runs = [np.arange(start, stop, dtype=np.int32) for start, stop in pairwise(starts)]
    return Trie(
        tokens_U=np.concatenate(sequences).astype(np.int32),
        depths_U=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        ends_U=np.repeat(np.array(starts[1:], np.int32), lengths),
        places=tuple(runs),
        nodes=tuple(Node(start, stop, stop) for start, stop in pairwise(starts)),
    )


def bins(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places of lengths in rows of at most `size`, each into the first that has room, longest first."""
    found: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fits = next((number for number, left in enumerate(room) if lengths[place] <= left), None)
        if fits is None:
            found.append([])
            room.append(max(size, lengths[place]))
            fits = len(found) - 1
        found[fits].append(place)
        room[fits] -= lengths[place]
    return found


def small_model() -> Decoder:
    """The model of the promises."""
    model = Decoder(DecoderConfig.from_json(SMALL))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def nano_model() -> Decoder:
    """The embedded one."""
    return load_policy(resolve("nano-tictactoe", Path("no-model-root"))).model


def compute(model: Decoder, units: Sequence[Unit]) -> float:
    """Forward and backward over all units; returns CPU seconds."""
    for parameter in model.parameters():
        parameter.grad = None
    start = time.process_time()
    for unit in units:
        scored = unit.score(model)
        scored.backward(scored.scores.logprobs_N.mean())
    return time.process_time() - start


def flops(model: Decoder, units: Sequence[Unit]) -> float:
    """Floating-point operations of forward and backward: matrices, attention of what is seen, head where it is read."""
    config = model.config
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name not in ("embedding", "head")
    )
    total = 0.0
    for unit in units:
        nodes, num_read = shape_of(unit)
        pairs = sum(
            (node.stop - node.start) * ((node.stop - node.start + 1) / 2 + node.end - node.stop) for node in nodes
        )
        num_tokens = sum(node.stop - node.start for node in nodes)
        total += 6 * matrices * num_tokens
        total += 14 * config.num_layers * config.num_heads * config.head_dim * pairs
        total += 6 * config.hidden_size * config.vocab_size * num_read
    return total


def shape_of(unit: Unit) -> tuple[Sequence[Node], int]:
    """The runs of a unit, and at how many tokens it reads logits."""
    if isinstance(unit, TreeUnit):
        return unit.tree.trie.nodes, len(torch.unique(unit.tree.targets.predictors_N))
    assert isinstance(unit, PaddedUnit)
    width = max(row.num_computed for row in unit.rows)
    return [Node(0, width, width)] * len(unit.rows), sum(len(row.targets) for row in unit.rows)


def memory_of(setting: Setting, name: str, mode: Mode) -> float | None:
    """Highest memory of a set in one mode above start, in MiB, in a process of its own; --quick leaves it out."""
    if setting.is_quick:
        return None
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_memory, (setting, name, mode))


def _measure_memory(setting: Setting, name: str, mode: Mode) -> float | None:
    torch.set_num_threads(1)
    model = setting.load()
    vocab_size = model.config.vocab_size
    for warm_up in (Mode.PADDED, Mode.TREE):  # what libraries set up at their first use is not the batch's
        compute(model, plan(batch_of("react x1", 0.02), warm_up, vocab_size, setting.max_tokens))
    return peak_memory(model, plan(setting.batch(name), mode, vocab_size, setting.max_tokens))


def peak_memory(model: Decoder, units: Sequence[Unit]) -> float | None:
    """Highest memory of this process above start, in MiB; None where the system does not tell."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        reset.write_text("5")
        before = field_of(status, "VmRSS")
        for unit in units:
            scored = unit.score(model)
            scored.backward(scored.scores.logprobs_N.mean())
        return (field_of(status, "VmHWM") - before) / 1024
    except OSError:
        return None


def field_of(status: Path, name: str) -> int:
    """A field of /proc/self/status, in KiB."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


@dataclass(frozen=True, slots=True)
class Measured:
    """One set in every mode."""

    name: str
    case: str
    units: dict[Mode, list[Unit]]
    times_s: dict[Mode, list[float]]
    memory: dict[Mode, float | None]
    flops: dict[Mode, float]

    def num_tokens(self, mode: Mode) -> int:
        """Tokens that the model reads, padding left out."""
        return sum(unit.num_computed for unit in self.units[mode])

    def ratio(self, mode: Mode) -> Interval:
        """How many times as long as the tree a mode takes, of medians; the interval is drawn from the repetitions."""
        return ratio_of_medians(self.times_s[mode], self.times_s[Mode.TREE])

    def limit(self, mode: Mode) -> float:
        """The ratio that the operations alone would allow."""
        return self.flops[mode] / self.flops[Mode.TREE]


def measure(setting: Setting, model: Decoder, name: str, num_repetitions: int) -> Measured:
    """Compute a set in every mode, turn by turn."""
    batch = setting.batch(name)
    units = {mode: plan(batch, mode, model.config.vocab_size, setting.max_tokens) for mode in Mode}
    times: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    for number in range(num_repetitions):
        for mode in Mode if number % 2 == 0 else reversed(Mode):
            times[mode].append(compute(model, units[mode]))
    memory = {mode: memory_of(setting, name, mode) for mode in Mode}
    operations = {mode: flops(model, units[mode]) for mode in Mode}
    return Measured(name, setting.case(name), units, times, memory, operations)


def trie_rows(*, is_quick: bool) -> Iterator[Row]:
    """How long laying a large batch over itself takes."""
    num_sequences, length = (50, 1000) if is_quick else (2000, 8000)
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 150_000, length // 5, np.int32)
    sequences = [
        np.concatenate((prompt, draw.integers(0, 150_000, length - len(prompt), np.int32)))
        for _ in range(num_sequences)
    ]
    times = []
    for _ in range(5):
        start = time.process_time()
        build_trie(sequences)
        times.append(time.process_time() - start)
    case = f"trie of {num_sequences} x {length}"
    yield Row(case, "CPU time", statistics.median(times), "s", None, None, len(times), is_quick)


def rows_of(found: Measured, *, is_quick: bool) -> Iterator[Row]:
    """Everything of one set."""
    name = found.case
    for mode in Mode:
        times, memory = found.times_s[mode], found.memory[mode]
        n = len(times)
        yield Row(name, f"{mode}, tokens", found.num_tokens(mode), "tokens", None, None, 1, is_quick)
        yield Row(name, f"{mode}, CPU time", statistics.median(times), "s", None, None, n, is_quick)
        if memory is not None:
            yield Row(name, f"{mode}, peak memory", memory, "MiB", None, None, 1, is_quick)
        if mode is not Mode.TREE:
            ratio = found.ratio(mode)
            yield Row(name, f"{mode} / tree", ratio.mean, "", ratio.low, ratio.high, n, is_quick)
            yield Row(name, f"{mode} / tree, limit", found.limit(mode), "", None, None, 1, is_quick)


def promises(found: Measured) -> Iterator[tuple[bool, str]]:
    """What is promised of one set, each with whether it is kept."""
    name = found.name
    packed = found.ratio(Mode.PACKED).mean
    share = packed / found.limit(Mode.PACKED)
    if found.num_tokens(Mode.TREE) >= MIN_UNIQUE:
        yield share >= MIN_SHARE_OF_LIMIT, f"{name}: {share:.2f} of the limit, at least {MIN_SHARE_OF_LIMIT}"
    for mode, least in ((Mode.PACKED, MIN_AGAINST_PACKED), (Mode.TOKEN, MIN_AGAINST_TOKEN)):
        if name in least:
            ratio = found.ratio(mode).mean
            yield ratio >= least[name], f"{name}: {ratio:.2f} times as fast as {mode}, at least {least[name]}"
    best = min(OTHERS, key=lambda mode: found.ratio(mode).mean)
    high = found.ratio(best).high
    high = found.ratio(best).mean if high is None else high
    yield high >= MIN_AGAINST_BEST, f"{name}: up to {high:.2f} times as fast as {best}, at least {MIN_AGAINST_BEST}"
    packed_memory, tree_memory = found.memory[Mode.PACKED], found.memory[Mode.TREE]
    if name in MEMORY_SETS and packed_memory and tree_memory is not None:
        part = tree_memory / packed_memory
        yield part < MAX_MEMORY_SHARE, f"{name}: {part:.2f} of packed's peak memory, below {MAX_MEMORY_SHARE:.2f}"


def main() -> int:
    """Run it; the exit code says nothing about the promises, the last lines do."""
    parser = argparse.ArgumentParser(description="What is shared context worth?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument(
        "--sets", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}; default all but the last two"
    )
    parser.add_argument("--model", choices=("small", "nano"), default="small")
    parser.add_argument("--scale", type=float, default=0.25, help="of all lengths")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=16384, help="at once, in every mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(args.model, 0.05 if args.quick else args.scale, args.max_tokens, args.quick)
    model, num_repetitions = setting.load(), 1 if args.quick else args.repetitions
    rows = list(trie_rows(is_quick=args.quick))
    print(LEGEND, *map(show, rows), sep="\n", flush=True)
    if args.quick:
        print("one repetition of short calls: what follows shows that it runs, its ratios mean nothing", flush=True)
    kept = [(row.value < MAX_TRIE_S, f"{row.case}: {row.value:.2f} s, below {MAX_TRIE_S:.0f} s") for row in rows]
    for name in args.sets or (QUICK_SETS if args.quick else DEFAULT_SETS):
        longest = max(len(turn.context + turn.reply) for turns in setting.batch(name).episodes for turn in turns)
        if longest > model.config.max_context:
            print(f"{name}: left out, a call has {longest} tokens and the model takes {model.config.max_context}")
            continue
        found = measure(setting, model, name, num_repetitions)
        for row in rows_of(found, is_quick=args.quick):
            rows.append(row)
            print(show(row), flush=True)
        kept += promises(found)
        if args.json:
            write_rows(rows, args.json)
    if not args.quick and args.model == "small":
        show_promises(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
