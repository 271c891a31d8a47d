"""Attention and scores on a trie against the definition: every row by itself, in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import adapted
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig

from swarm_engine.errors import ModelError
from swarm_engine.merger.trie import Trie, build_trie
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.hf_attention import TREE, attention_for, check_config, mask_mod_of, register
from swarm_engine.trainer.scoring import Row, Scores, score
from swarm_engine.trainer.tree import ChunkedTree, Tree, score_tree
from swarm_engine.trainer.tree_attention import Memory, TreeAttention

NUM_TRIES = 300
LIMIT = 1e-9
"""Largest relative difference of gradients in float64."""


def random_trie(draw: random.Random) -> Trie:
    """Branches everywhere, duplicates, prefixes of each other, single tokens, empty rows."""
    likely = draw.choice((0.1, 0.4, 1.0))
    rows = [
        [draw.randrange(3) if draw.random() < likely else 0 for _ in range(draw.randrange(14))]
        for _ in range(draw.randint(1, 8))
    ]
    return build_trie([np.array(row, np.int32) for row in [*rows, [0]]])


def visible(trie: Trie, window: int | None) -> Tensor:
    """Which places see which, along the places of each row."""
    sees = torch.zeros(len(trie), len(trie), dtype=torch.bool)
    for places in trie.places:
        for depth, place in enumerate(places.tolist()):
            first = 0 if window is None else max(0, depth - window + 1)
            sees[place, places[first : depth + 1].tolist()] = True
    return sees


def layer_inputs(trie: Trie, seed: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values with grouped heads, and a gradient of what comes out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, len(trie), 8) for heads in (4, 2, 2, 4)]
    *inputs, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [one.requires_grad_() for one in inputs], gradient


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_windowed", [False, True])
def test_attention_and_its_gradients_are_those_of_the_dense_mask_whole_and_in_chunks(is_windowed: bool) -> None:
    for seed in range(NUM_TRIES):
        draw = random.Random(seed)
        trie = random_trie(draw)
        window = draw.randint(1, 7) if is_windowed else None
        inputs, gradient = layer_inputs(trie, seed)
        expected = functional.scaled_dot_product_attention(
            *inputs, attn_mask=visible(trie, window), enable_gqa=True, scale=0.3
        )
        expected_grads = torch.autograd.grad(expected, inputs, gradient)

        out = TreeAttention(trie)(0, *inputs, 0.3, window)
        assert_same([out, *torch.autograd.grad(out, inputs, gradient)], [expected, *expected_grads])

        cuts = sorted({0, len(trie), *(draw.randint(0, len(trie)) for _ in range(3))})
        chunks = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
        memory = Memory(len(trie))

        def attend(chunk: slice, some: list[Tensor]) -> Tensor:
            return TreeAttention(trie, chunk.start, chunk.stop, memory)(0, *some, 0.3, window)  # noqa: B023

        with torch.no_grad():
            parts = [attend(chunk, [one[:, :, chunk] for one in inputs]) for chunk in chunks]
        grads = []
        for chunk in reversed(chunks):
            own = [one[:, :, chunk].detach().requires_grad_() for one in inputs]
            grads.append(torch.autograd.grad(attend(chunk, own), own, gradient[:, :, chunk]))
        whole = [torch.cat(some, dim=2) for some in zip(*reversed(grads), strict=True)]
        assert_same([torch.cat(parts, dim=2), *whole], [expected, *expected_grads])


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_for_gpus_is_the_same(window: int | None) -> None:
    for seed in range(30):
        trie = random_trie(random.Random(seed))
        mask = create_mask(mask_mod_of(trie, window), None, None, len(trie), len(trie), device="cpu")
        assert torch.equal(mask[0, 0], visible(trie, window))


# Scores of rows.


def random_rows(seed: int, num_rows: int = 12) -> list[Row]:
    """Rows that share prefixes, some equal, with several scored stretches and two temperatures."""
    draw = random.Random(seed)
    rows: list[Row] = []
    contexts: list[tuple[int, ...]] = [tuple(draw.randrange(900) for _ in range(9))]
    for _ in range(num_rows):
        context = draw.choice(contexts)[: draw.randint(1, 30)]
        reply = tuple(draw.randrange(900) for _ in range(draw.randint(1, 6)))
        contexts.append(context + reply)
        targets = sorted({*range(len(context), len(context + reply)), draw.randint(1, len(context + reply) - 1)})
        rows.append(Row(context + reply, tuple(targets), tuple(draw.choice((0.7, 1.0)) for _ in targets)))
    return [*rows, rows[0]]


def some_loss(scores: Scores) -> Tensor:
    """Uneven in every score, so that no two copies of a token are treated alike."""
    weights = torch.linspace(-1, 2, len(scores.logprobs_N), dtype=scores.logprobs_N.dtype)
    return (weights * scores.logprobs_N.exp()).sum() + (weights.flip(0) * scores.entropies_N).sum()


def gradient_of(model: nn.Module, backward: Callable[[], None]) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("max_places", [None, 3, 40])
@pytest.mark.parametrize("max_logits", [1 << 24, 900 * 3])
@pytest.mark.parametrize("targets", [None, (), ("down_proj",)], ids=["no adapter", "adapter", "adapter of one matrix"])
def test_scores_and_gradients_of_a_tree_are_those_of_each_row_alone(
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_places: int | None,
    max_logits: int,
    targets: tuple[str, ...] | None,
) -> None:
    model = load_policy(tiny_dir, torch.float64).model
    if targets is not None:
        model = adapted(model, *targets)
    for seed in range(2):
        rows = random_rows(seed)
        alone = [score(model, [row], entropy_has_gradient=True) for row in rows]
        expected = Scores(torch.cat([one.logprobs_N for one in alone]), torch.cat([one.entropies_N for one in alone]))
        expected_gradient = gradient_of(model, lambda: torch.autograd.backward(some_loss(expected)))  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setattr("swarm_engine.trainer.scoring.MAX_LOGITS", max_logits)
            if max_places is None:
                scores = score_tree(model, Tree.of(rows), entropy_has_gradient=True)
                found = gradient_of(model, lambda: torch.autograd.backward(some_loss(scores)))  # noqa: B023
            else:
                chunks = ChunkedTree(model, Tree.of(rows), max_places, entropy_has_gradient=True)
                scores = chunks.score()
                torch.autograd.backward(some_loss(scores))
                found = gradient_of(model, lambda: chunks.backward(scores))  # noqa: B023
        assert_same([scores.logprobs_N, scores.entropies_N], [expected.logprobs_N, expected.entropies_N])
        assert distance(found, expected_gradient) < LIMIT


def test_a_chunk_without_a_loss_hands_on_what_reaches_its_keys_and_values(tiny_dir: Path) -> None:
    model = load_policy(tiny_dir, torch.float64).model
    row = Row(tuple(range(5, 45)), (39,), (1.0,))
    expected = gradient_of(model, lambda: torch.autograd.backward(score(model, [row]).logprobs_N.sum()))
    chunks = ChunkedTree(model, Tree.of([row]), 10)
    scores = chunks.score()
    torch.autograd.backward(scores.logprobs_N.sum())
    assert distance(gradient_of(model, lambda: chunks.backward(scores)), expected) < LIMIT


# Models of transformers.

SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "gemma3, windows in some layers": ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
}


def transformers_model(family: str, implementation: str, **changes: Any) -> Any:
    """A small random model, float64 through its norms too: transformers computes those in float32 otherwise."""
    config = AutoConfig.for_model(family, **SMALL, **changes)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the grouped kernel takes no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().train()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            is_shifted = "Gemma" in type(module).__name__
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            module.forward = exact_norm(module.weight, eps, is_shifted=is_shifted)
    return model


def exact_norm(weight: Tensor, eps: float, *, is_shifted: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return scaled * (1 + weight) if is_shifted else scaled * weight

    return forward


def rows_of_ids(seed: int) -> list[list[int]]:
    return [[token % 90 for token in row.tokens] for row in random_rows(seed)]


def loss_of(logits_T_V: Tensor, tokens: Tensor, weight: float) -> Tensor:
    """A row's weighted log-probability."""
    return weight * logits_T_V[:-1].log_softmax(-1).gather(1, tokens[1:, None]).sum()


def row_by_row(model: Any, rows: list[list[int]]) -> Tensor:
    """The gradient of all rows' losses, one row at a time."""

    def backward() -> None:
        for index, row in enumerate(rows):
            loss = loss_of(model(input_ids=torch.tensor([row])).logits[0], torch.tensor(row), 0.3 * index - 1)
            torch.autograd.backward(loss)

    return gradient_of(model, backward)


def laid_over_each_other(model: Any, rows: list[list[int]]) -> Tensor:
    """The same on their trie."""
    trie = build_trie([np.array(row, np.int32) for row in rows])

    def backward() -> None:
        logits = model(
            input_ids=torch.from_numpy(trie.tokens_U.astype(np.int64))[None],
            position_ids=torch.from_numpy(trie.depths_U.astype(np.int64))[None],
            tree=attention_for(trie, torch.device("cpu")),
            use_cache=False,
        ).logits[0]
        losses = [
            loss_of(logits[torch.from_numpy(places.astype(np.int64))], torch.tensor(row), 0.3 * index - 1)
            for index, (row, places) in enumerate(zip(rows, trie.places, strict=True))
        ]
        torch.autograd.backward(sum(losses[1:], losses[0]))

    return gradient_of(model, backward)


def both_ways(family: str, **changes: Any) -> tuple[Any, Any]:
    """One model twice, for rows and for a trie."""
    register()
    model = transformers_model(family, "sdpa", **changes)  # "eager" takes its softmax in float32
    on_tree = transformers_model(family, TREE, **changes)
    on_tree.load_state_dict(model.state_dict())
    return model, on_tree


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_models_of_transformers_compute_the_same_on_a_tree(name: str, is_checkpointed: bool) -> None:
    family, changes = FAMILIES[name]
    model, on_tree = both_ways(family, **changes)
    if is_checkpointed:
        on_tree.gradient_checkpointing_enable({"use_reentrant": False})
    rows = rows_of_ids(1)
    assert distance(laid_over_each_other(on_tree, rows), row_by_row(model, rows)) < LIMIT


def test_experts_are_chosen_token_by_token_so_a_mixture_computes_the_same_on_a_tree() -> None:
    """transformers takes the router's softmax in float32, so only its digits agree."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    model, on_tree = both_ways("qwen3_moe", **experts)
    rows = rows_of_ids(1)
    expected = row_by_row(model, rows)
    assert any("experts" in name for name, _ in model.named_parameters())
    assert distance(laid_over_each_other(on_tree, rows), expected) < 1e-6


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_learn_the_same_on_a_tree() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        return get_peft_model(model, settings)

    model, on_tree = map(adapted, both_ways("qwen3"))
    rows = rows_of_ids(2)
    expected = row_by_row(model, rows)
    assert len(expected) == sum(one.numel() for name, one in model.named_parameters() if "lora" in name)
    assert distance(laid_over_each_other(on_tree, rows), expected) < LIMIT


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_fewer_digits_cost_a_tree_no_more_than_they_cost_rows(dtype: torch.dtype, limit: float) -> None:
    exact, _ = both_ways("llama")
    rows = rows_of_ids(3)
    expected = row_by_row(exact, rows)
    model, on_tree = both_ways("llama")
    apart = distance(row_by_row(model.to(dtype), rows).double(), expected)
    together = distance(laid_over_each_other(on_tree.to(dtype), rows).double(), expected)
    assert together < limit
    assert together < 3 * apart


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "longest row"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "longest row"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "carry a state"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "dropout"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "caps"),
        ({"model_type": "gemma3", "text_config": {"model_type": "x", "attention_dropout": 0.1}}, "dropout"),
    ],
)
def test_what_a_tree_cannot_express_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_config(config)


def test_supported_models_pass_the_check() -> None:
    for family, changes in FAMILIES.values():
        check_config(AutoConfig.for_model(family, **SMALL, **changes).to_dict())
