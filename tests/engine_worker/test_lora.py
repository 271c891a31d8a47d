"""Low-rank branches: what they compute, whose they are, and what peft makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted, fill
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_model import build_tiny_model

from swarm_engine.config import LoraConfig, PolicyConfig, Target
from swarm_engine.errors import ModelError
from swarm_engine.hosted import Start
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import LoadedPolicy, adapt, load_policy, save_policy
from swarm_engine.models.lora import LowRank, Projection, read_peft_config

TOKENS = torch.randint(0, 900, (3, 40), generator=torch.Generator().manual_seed(1))
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3, grouped and untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "llama, biased": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model.hidden(tokens, torch.arange(tokens.shape[1]), attend_causally))


def policy_on(base: LoadedPolicy, *targets: str, rank: int = 4) -> LoadedPolicy:
    lora = LoraConfig(rank=rank, alpha=8.0, targets=tuple(map(Target, targets)) or tuple(Target))
    policy = adapt(base, "base", "0" * 64, lora, seed=3)
    fill(policy.model)
    return policy


def test_a_branch_by_hand() -> None:
    """Scale 6/2 = 3; A sums both inputs and takes their difference, B has rows for the second projection alone."""
    first, second = Projection("k_proj", "k", 0, 1), Projection("v_proj", "v", 1, 3)
    config = LoraConfig(rank=2, alpha=6.0, targets=(Target.V,))
    branch = LowRank(2, (first, second), config, torch.zeros(1))
    x = torch.tensor([5.0, 2.0])
    branch.a_R_I.data.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    assert branch(x).tolist() == [0.0, 0.0, 0.0], "B begins as zero"
    branch.b_O_R.data.copy_(torch.tensor([[1.0, 0.0], [10.0, 1.0]]))
    assert branch(x).tolist() == [0.0, 21.0, 219.0]
    assert branch.product().tolist() == [[0.0, 0.0], [3.0, 3.0], [33.0, 27.0]]
    assert [(one.target, b.tolist()) for one, _, b in branch.halves()] == [("v_proj", [[1.0, 0.0], [10.0, 1.0]])]


def test_a_new_adapter_changes_no_bit_and_shares_every_weight(tiny: LoadedPolicy) -> None:
    one, other = (tiny.model.adapted(LoraConfig(rank=4), seed) for seed in (1, 2))
    with torch.no_grad():
        assert torch.equal(logits(one, TOKENS), logits(tiny.model, TOKENS))
        fill(one)
        assert not torch.equal(logits(one, TOKENS), logits(tiny.model, TOKENS))
        assert torch.equal(logits(other, TOKENS), logits(tiny.model, TOKENS)), "adapters are apart"
    shared = dict(tiny.model.named_parameters())
    for name, parameter in one.named_parameters():
        assert parameter.requires_grad == (name not in shared)
        assert name not in shared or parameter is shared[name]
    assert one.cos is tiny.model.cos
    # Three layers; (inputs + outputs) * rank for each of the four matrices.
    assert sum(one.numel() for one in one.parameters() if one.requires_grad) == 3 * 4 * (
        (96 + 288) + (96 + 96) + (96 + 576) + (288 + 96)
    )


def test_a_is_drawn_from_the_seed_alone_and_as_peft_draws_it(tiny: LoadedPolicy) -> None:
    def a(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        (_, branch), *_ = tiny.model.adapted(LoraConfig(rank=64), seed).named_branches()
        return branch.a_R_I.detach()

    assert torch.equal(a(1), a(1))
    assert not torch.equal(a(1), a(2))
    bound = 96**-0.5
    assert 0.99 * bound < float(a(1).abs().max()) <= bound
    assert abs(float(a(1).mean())) < 0.05 * bound


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("up_proj", "down_proj")], ids=["all", "qv", "mlp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_adapter_is_the_policy_in_peft(variant: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base_dir = build_tiny_model(tmp_path / "base", **VARIANTS[variant])
    policy = policy_on(load_policy(base_dir), *targets)
    with torch.no_grad():
        ours, plain = logits(policy.model, TOKENS), logits(load_policy(base_dir).model, TOKENS)
    for name in ("adapter", "merged"):
        (tmp_path / name).mkdir()
        save_policy(policy, tmp_path / name, is_merged=name == "merged")

    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    merged, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        scale = float(ours.abs().max())
        assert (with_adapter(TOKENS).logits - ours).abs().max() < 1e-5 * scale
        assert (merged(TOKENS).logits - ours).abs().max() < 1e-5 * scale
        assert (plain - ours).abs().max() > 1e-2 * scale, "the adapter does something"
    with_adapter.peft_config["default"].save_pretrained(tmp_path / "again")
    found = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert policy.adapter is not None
    assert read_peft_config(found, "what peft wrote")[0] == policy.adapter.lora
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        named = {key.split(".")[-3] for key in file.keys()}  # noqa: SIM118
    assert named == set(targets or map(str, Target))
    assert (tmp_path / "adapter" / "chat_template.jinja").is_file()


def test_an_adapter_comes_back_from_its_folder_to_the_last_bit(tiny: LoadedPolicy, tmp_path: Path) -> None:
    policy = policy_on(tiny, "q_proj", "k_proj", "down_proj")
    save_policy(policy, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    again = policy_on(tiny, "q_proj", "k_proj", "down_proj")
    fill(again.model, seed=9)
    again.model.load_adapter(tensors)
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    lora = LoraConfig(rank=4, alpha=8.0, targets=(Target.Q, Target.K, Target.DOWN))
    assert read_peft_config(found, "here") == (lora, "base")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lose", r"has no tensor 'base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight'"),
        ("widen", r"is \(5, 96\), this model asks for \(4, 96\)"),
        ("part", r"q_proj.lora_A.weight' and .*k_proj.lora_A.weight' differ; here the projections of one matrix"),
        ("add", "holds 1 tensors with no place here, such as 'x'"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tiny: LoadedPolicy, change: str, message: str) -> None:
    model = adapted(tiny.model)
    tensors = {name: tensor.clone() for name, tensor in model.named_adapter()}
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    match change:
        case "lose":
            del tensors[q]
        case "widen":
            tensors[q] = torch.zeros(5, 96)
        case "part":
            tensors[q.replace("q_proj", "k_proj")] += 1
        case "add":
            tensors["x"] = torch.zeros(1)
    with pytest.raises(ModelError, match=message):
        model.load_adapter(tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora True; this engine takes plain LoRA"),
        ({"use_rslora": True}, "use_rslora True"),
        ({"lora_dropout": 0.1}, "lora_dropout 0.1"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"some_later_kind": 1}, "some_later_kind 1"),
        ({"target_modules": ["q_proj", "lm_head"]}, "known are q_proj, k_proj"),
        ({"r": "many"}, "can't be read"),
    ],
)
def test_another_kind_of_adapter_is_refused(changes: dict[str, Any], message: str) -> None:
    found = {"peft_type": "LORA", "base_model_name_or_path": "b", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    plain = {"init_lora_weights": True, "rank_pattern": {}, "use_dora": False, "lora_dropout": 0.0, "bias": "none"}
    assert read_peft_config(found | plain, "here") == (LoraConfig(rank=2, alpha=4, targets=(Target.Q,)), "b")
    with pytest.raises(ModelError, match=message):
        read_peft_config(found | changes, "here")


def test_the_order_in_which_targets_are_named_makes_no_other_adapter(tiny: LoadedPolicy, tmp_path: Path) -> None:
    lora = LoraConfig.model_validate({"rank": 4, "alpha": 8.0, "targets": ["v_proj", "q_proj"]})
    assert lora.targets == (Target.Q, Target.V)
    assert lora == LoraConfig(rank=4, alpha=8.0, targets=(Target.Q, Target.V))
    for name in ("base", "mine"):
        (tmp_path / name).mkdir()
    save_policy(adapt(tiny, "base", "0" * 64, lora, seed=3), tmp_path / "mine")
    for named in (["v_proj", "q_proj"], ["q_proj", "v_proj"]):
        again = {"model": "mine", "lora": {"rank": 4, "alpha": 8.0, "targets": named}}
        assert Start.of(PolicyConfig.model_validate(again), str(tmp_path)).adapter == tmp_path / "mine"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"lora": {"dropout": 0.1}}, "lora.dropout is 0.1, but sampler and trainer would compute different functions"),
        ({"lora": {"use_rslora": True}}, "alpha scales by alpha / rank"),
        ({"lora": {"use_dora": True}}, "only plain LoRA"),
        ({"lora": {"targets": []}}, r"lora.targets is \[\]; name each once"),
        ({"lora": {"targets": ["q_proj", "q_proj"]}}, "name each once"),
        ({"lora": {"targets": ["lm_head"]}}, "q_proj"),
        ({"lora": {}, "trainable": False}, "so it would never have one; leave lora out"),
    ],
)
def test_a_lora_config_that_cannot_be_says_why(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicyConfig.model_validate(policy)
