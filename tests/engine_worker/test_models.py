"""Our decoder computes what transformers computes, and only opens what it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import build_tiny_model

from swarm_engine import models
from swarm_engine.errors import ModelError
from swarm_engine.models import resolve
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import LoadedPolicy, load_policy, save_policy

TOKENS = torch.randint(0, 900, (3, 40), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3-grouped-untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
    "qwen3-yarn": {"rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "llama-biased": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
    },
    "mistral-grouped": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 1,
        "sliding_window": 300,
    },
}


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model.hidden(tokens, torch.arange(tokens.shape[1]), attend_causally))


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = build_tiny_model(tmp_path, **VARIANTS[variant])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        difference = (logits(load_policy(folder).model, TOKENS) - theirs(TOKENS).logits).abs().max().item()
    assert difference < 1e-5 * theirs(TOKENS).logits.abs().max().item()


def test_a_saved_policy_is_read_by_transformers_and_by_us_alike(tiny: LoadedPolicy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_policy(tiny, tmp_path)
    again = load_policy(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tiny.model.parameters(), again.model.parameters(), strict=True))
    assert again.end_ids == (2,)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.model.layers[1].self_attn.k_proj.weight, again.model.blocks[1].qkv[96:192])
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_is_the_model_in_transformers(variant: str, tmp_path: Path) -> None:
    """Weights that training moved, in every architecture, with the tokenizer and its chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = build_tiny_model(tmp_path / "start", **VARIANTS[variant])
    policy = load_policy(start)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
    (export := tmp_path / "export").mkdir()
    save_policy(policy, export)

    theirs, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
        difference = (logits(policy.model, TOKENS) - expected).abs().max().item()
    assert difference < 1e-5 * expected.abs().max().item()

    with safe_open(export / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = file.keys()
    assert ("lm_head.weight" in names) == (policy.model.head is not None)
    config = json.loads((export / "config.json").read_text())
    assert (config["torch_dtype"], config["architectures"]) == ("float32", policy.config_json["architectures"])
    assert theirs.generation_config.eos_token_id == [2]
    messages = [{"role": "user", "content": "Your move?"}]
    ours, before = (AutoTokenizer.from_pretrained(folder) for folder in (export, start))
    prompt = ours.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt == before.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.decode(prompt) == "<|im_start|>user\nYour move?<|im_end|>\n<|im_start|>assistant\n"


def test_every_end_id_of_the_generation_config_ends_a_reply(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_policy(folder).end_ids == (2, 0)


def test_shards_are_read_through_their_index(tiny_dir: Path, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "b.safetensors")
    index = {name: "ab"[place % 2] + ".safetensors" for place, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load_policy(folder).model.embedding, load_policy(tiny_dir).model.embedding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_hidden_layers": 4}, "has no tensor 'model.layers.3"),
        ({"num_hidden_layers": 2}, "tensors with no place here"),
        ({"intermediate_size": 200}, r"config.json asks for \(200, 96\)"),
        ({"eos_token_id": None}, "names no eos_token_id"),
    ],
)
def test_a_model_that_cannot_be_run_exactly_is_refused(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    config = json.loads((tiny_dir / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_dir / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path)


def test_cut_short_weights_are_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is broken"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/etc", "a/../../b"])
def test_a_name_that_leads_out_of_the_model_root_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leads out of the model root"):
        resolve(name, tmp_path)


def test_names_resolve_to_folders_first_and_to_shipped_weights_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nano = tmp_path / "nano"
    (nano / "weights").mkdir(parents=True)
    for stem in ("nim", "spy"):
        (nano / "weights" / f"{stem}.safetensors").touch()
    monkeypatch.setattr(models, "NANO_DIR", nano)
    root = tmp_path / "root"
    (root / "nano-spy").mkdir(parents=True)
    assert resolve("nano-nim", root) == nano / "weights" / "nim.safetensors"
    assert resolve("nano-spy", root) == root / "nano-spy"
    with pytest.raises(ModelError, match="no model 'nano-chess'; known are nano-nim, nano-spy"):
        resolve("nano-chess", root)
    with pytest.raises(ModelError, match="there is no model"):
        resolve("nano-../../x", root)
