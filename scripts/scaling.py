"""Works out what training and serving a large model takes, and prints the tables of docs/scaling.md.

    python scripts/scaling.py            every table
    python scripts/scaling.py --write    puts them into docs/scaling.md

Every number follows from `MODELS`, `H100` and the constants below by the formulas of the functions, which the page
explains. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GB = 1e9


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder without biases, whose output head is a matrix of its own."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    has_qk_norm: bool

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention, gated network, norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        return attention + 3 * self.hidden * self.inner + norms

    @property
    def root_parameters(self) -> int:
        """What belongs to no layer: embedding, output head, last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def saved_numbers(self) -> int:
        """What one layer keeps of one token for the way back: the input of each of its two norms, the same normed, and
        that times the gain (6 C); queries, keys and values as projected, queries and keys rotated, what attention gives
        (3 (H + K) D), and where they are normed queries and keys once more; gate, up and their products (4 I)."""
        attention = (4 if self.has_qk_norm else 3) * (self.heads + self.kv_heads) * self.head_dim
        return 6 * self.hidden + attention + 4 * self.inner


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its links, in bytes, floating point operations, and those per second."""

    memory: float
    flops: float
    """Dense bfloat16, at peak."""
    memory_rate: float
    node_rate: float
    """To the GPUs of its node, one way."""
    network_rate: float
    """To other nodes, one way."""


H100 = Device(memory=80 * GB, flops=989e12, memory_rate=3.35e12, node_rate=450 * GB, network_rate=50 * GB)
"""SXM: NVLink's 900 GB/s count both ways; 400 Gb/s of network a GPU."""

MODELS = (
    Model("8B", 4096, 12288, 36, 32, 8, 128, 151_936, has_qk_norm=True),
    Model("70B", 8192, 28672, 80, 64, 8, 128, 128_256, has_qk_norm=False),
)
"""The shapes of Qwen3-8B and Llama-3.1-70B."""

UTILIZATION = 0.4
"""Share of the peak that training reaches."""
MEMORY_SHARE = 0.6
"""Share of the memory's rate that decoding reaches."""
CONTEXT = 8192
"""Tokens of a context, prompt and replies."""
PASS_TOKENS = 8192
"""Tokens that a rank computes in one pass."""
RESERVE = 0.9
"""Share of a GPU's memory that can be used."""


def state_bytes(model: Model, ranks: int) -> float:
    """Weights, gradients and both moments in float32, in shards."""
    return 16 * model.parameters / ranks


def gathered_bytes(model: Model, width: int) -> float:
    """What a pass holds whole: two layers, one of them on its way in, with one gradient; embedding and head with
    theirs."""
    return width * (3 * model.layer_parameters + 2 * model.root_parameters)


def activation_bytes(model: Model, width: int, tokens: int = PASS_TOKENS, *, is_recomputed: bool = False) -> float:
    """What a pass keeps for the way back; recomputed, each layer's input and one layer whole."""
    if is_recomputed:
        return width * tokens * (model.layers * model.hidden + model.saved_numbers)
    return width * tokens * model.layers * model.saved_numbers


def training_flops(model: Model, context: int = CONTEXT) -> float:
    """Of one token, forward and back: 6 a parameter that multiplies, and causal attention over half the context."""
    attention = 6 * model.layers * model.heads * model.head_dim * context
    return 6 * (model.parameters - model.vocabulary * model.hidden) + attention


def gather_traffic(model: Model, ranks: int, weight_width: int, gradient_width: int) -> float:
    """Bytes that a rank takes in a pass: all weights forward, all again back, and gradients summed."""
    return (2 * weight_width + gradient_width) * model.parameters * (ranks - 1) / ranks


def decode_rate(model: Model, gpus: int, running: int, context: int = CONTEXT) -> float:
    """Tokens a second of one engine: each step reads all weights and all running contexts, half full, in bfloat16."""
    read = 2 * model.parameters + running * context / 2 * 2 * model.kv_numbers
    return running / (read / (gpus * H100.memory_rate * MEMORY_SHARE))


def most_running(model: Model, gpus: int, context: int = CONTEXT) -> int:
    """Contexts whose keys and values fit beside the weights."""
    room = RESERVE * gpus * H100.memory - 2 * model.parameters
    return max(0, int(room // (2 * model.kv_numbers * context)))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def gigabytes(count: float) -> str:
    return f"{count / GB:,.0f} GB" if count >= 10 * GB else f"{count / GB:.1f} GB"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def models_table() -> str:
    rows = [
        [
            one.name,
            f"{one.parameters / 1e9:.2f} billion",
            f"{one.layer_parameters / 1e6:,.0f} million",
            f"{one.root_parameters / 1e9:.2f} billion",
            f"{one.saved_numbers:,}",
            f"{2 * one.kv_numbers / 1024:.0f} KiB",
            f"{training_flops(one) / 1e9:.0f} GFLOP",
        ]
        for one in MODELS
    ]
    header = ["model", "P", "a layer", "root", "saved numbers", "KV of a token", "training a token"]
    return table(header, rows)


def memory_table() -> str:
    rows = []
    for model in MODELS:
        for ranks in (1, 8, 16, 32, 64):
            state = state_bytes(model, ranks)
            first = state + gathered_bytes(model, 4) + activation_bytes(model, 4)
            better = state + gathered_bytes(model, 2) + activation_bytes(model, 2, is_recomputed=True)
            rows.append(
                [
                    model.name,
                    ranks,
                    gigabytes(state),
                    gigabytes(gathered_bytes(model, 4)),
                    gigabytes(activation_bytes(model, 4)),
                    fits(first),
                    fits(better),
                ]
            )
    header = ["model", "ranks", "state", "gathered", "activations", "float32, a rank", "bfloat16, recomputed"]
    return table(header, rows)


def fits(count: float) -> str:
    return f"{gigabytes(count)}{'' if count <= RESERVE * H100.memory else ', too much'}"


def traffic_table() -> str:
    rows = []
    for model in MODELS:
        for ranks, where, rate in ((8, "one node", H100.node_rate), (64, "eight nodes", H100.network_rate)):
            for name, weight, gradient in (("float32", 4, 4), ("bfloat16", 2, 4)):
                traffic = gather_traffic(model, ranks, weight, gradient)
                compute = training_flops(model) * PASS_TOKENS / (UTILIZATION * H100.flops)
                needed = traffic / rate * UTILIZATION * H100.flops / training_flops(model)
                rows.append(
                    [
                        model.name,
                        f"{ranks}, {where}",
                        name,
                        gigabytes(traffic),
                        seconds(traffic / rate),
                        seconds(compute),
                        f"{needed:,.0f}",
                    ]
                )
    header = ["model", "ranks", "gathered in", "traffic of a pass", "takes", "computing takes", "tokens that hide it"]
    return table(header, rows)


def update_table() -> str:
    rows = []
    for model in MODELS:
        for ranks in (8, 64):
            tokens = 512 * CONTEXT
            total = training_flops(model) * tokens
            whole = 4 * model.parameters * (ranks - 1) / ranks
            rate = H100.node_rate if ranks == 8 else H100.network_rate
            rows.append(
                [
                    model.name,
                    ranks,
                    f"{ranks * UTILIZATION * H100.flops / training_flops(model):,.0f}",
                    seconds(total / (ranks * UTILIZATION * H100.flops)),
                    gigabytes(whole),
                    seconds(whole / rate),
                    seconds(2 * model.parameters / H100.network_rate),
                ]
            )
    header = [
        *("model", "ranks", "trained tokens/s", "512 contexts", "whole weights, first rank"),
        *("takes", "bfloat16 to one engine"),
    ]
    return table(header, rows)


def sampling_table() -> str:
    rows = []
    for model in MODELS:
        for gpus in (1, 2, 4, 8):
            running = most_running(model, gpus)
            if not running:
                rows.append([model.name, gpus, "weights don't fit", "", "", ""])
                continue
            rate = decode_rate(model, gpus, running)
            rows.append(
                [
                    model.name,
                    gpus,
                    running,
                    f"{rate:,.0f}",
                    f"{rate / gpus:,.0f}",
                    f"{512 * CONTEXT / 2 / rate / 60:,.0f} min",
                ]
            )
    header = ["model", "GPUs of an engine", "running", "tokens/s", "a GPU", "half of 512 contexts"]
    return table(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "models": models_table,
    "memory": memory_table,
    "traffic": traffic_table,
    "update": update_table,
    "sampling": sampling_table,
}


def filled(page: str) -> str:
    """A page with each of its tables, which stand between two comments, worked out again."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end {name} -->"
        page, count = re.subn(re.escape(begin) + ".*?" + re.escape(end), begin + make() + end, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has the table {name!r} {count} times; it needs {begin!r} and {end!r} once")
    return page


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description="What training and serving a large model takes.")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main()
