"""The tables of docs/scaling.md are what scripts/scaling.py works out, and that counts as the engine does."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_engine.models.decoder import Decoder, DecoderConfig, attend_causally

SCALING = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "scaling.py"))


def config_of(model: Any) -> DecoderConfig:
    return DecoderConfig.from_json(
        {
            "model_type": "qwen3" if model.has_qk_norm else "llama",
            "hidden_size": model.hidden,
            "intermediate_size": model.inner,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocabulary,
            "max_position_embeddings": 256,
        }
    )


def test_the_page_has_the_tables() -> None:
    page = SCALING["PAGE"].read_text(encoding="utf-8")
    assert SCALING["filled"](page) == page, "run python scripts/scaling.py --write"


def test_a_page_without_its_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="has the table 'models' 0 times"):
        SCALING["filled"]("")


def test_parameters_are_those_of_the_published_models() -> None:
    """As the hub counts the tensors of Qwen/Qwen3-8B and meta-llama/Llama-3.1-70B."""
    assert [model.parameters for model in SCALING["MODELS"]] == [8_190_735_360, 70_553_706_496]


@pytest.mark.parametrize("model", SCALING["MODELS"], ids=lambda model: model.name)
def test_the_decoder_has_as_many(model: Any) -> None:
    with torch.device("meta"):
        decoder = Decoder(config_of(model))
    assert sum(one.numel() for one in decoder.parameters()) == model.parameters
    assert sum(one.numel() for one in decoder.blocks[0].parameters()) == model.layer_parameters


@pytest.mark.parametrize("has_qk_norm", [True, False])
def test_a_layer_keeps_as_much_as_is_counted(has_qk_norm: bool) -> None:
    tokens = 256
    model = SCALING["Model"]("small", 256, 768, 1, 8, 2, 32, 64, has_qk_norm)
    decoder = Decoder(config_of(model))
    with torch.no_grad():
        for one in decoder.parameters():
            one.fill_(0.01)
    own = {one.untyped_storage().data_ptr() for one in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    cos, sin = (table[:tokens].unsqueeze(-2) for table in (decoder.cos, decoder.sin))
    own |= {table.untyped_storage().data_ptr() for table in (cos, sin)}
    x = torch.randn(1, tokens, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder.blocks[0](x, cos, sin, attend_causally)
    numbers = sum(one.untyped_storage().nbytes() // 4 for pointer, one in kept.items() if pointer not in own)
    assert numbers / tokens == pytest.approx(model.saved_numbers, rel=0.01)


def test_by_hand() -> None:
    """8B on eight ranks: an eighth of 16 bytes a parameter; 2 * 36 * 8 * 128 numbers of keys and values; a pass in
    float32 takes in 12 bytes a parameter but for the eighth that is here."""
    small = SCALING["MODELS"][0]
    assert SCALING["state_bytes"](small, 8) == pytest.approx(16.38e9, rel=1e-3)
    assert small.kv_numbers == 73_728
    assert SCALING["gather_traffic"](small, 8, 4, 4) == pytest.approx(12 * 8.1907e9 * 7 / 8, rel=1e-4)
    assert SCALING["most_running"](small, 1) == int((72e9 - 16.38e9) / (147_456 * 8192))
