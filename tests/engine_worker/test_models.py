"""Our decoder computes what transformers computes, and only opens what it may."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import build_tiny_model, tiny_config

from swarm_engine import models
from swarm_engine.errors import ModelError
from swarm_engine.models import resolve
from swarm_engine.models.decoder import ABSENT, FAMILIES, Decoder, DecoderConfig, attend_causally
from swarm_engine.models.loading import LoadedPolicy, load_policy, save_policy, weights_sha256

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
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
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
    assert ours.apply_chat_template(messages, tools=[{"name": "look"}], tokenize=False) == "look"


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
        ({"tie_word_embeddings": False}, "has no tensor 'lm_head.weight'"),
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


def changed(tiny_dir: Path, folder: Path, **changes: object) -> Path:
    """A copy of a policy's folder with another `config.json`."""
    shutil.copytree(tiny_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("found", [-1, True, 2.7, "x", {}, [], ["a"], [2, None], [2, -1], [False]], ids=repr)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_no_token_is_refused(file: str, found: object, tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(content | {"eos_token_id": found}))
    said = f"{folder / file} has eos_token_id {found!r}, the vocabulary has the ids 0 to 899; name one of them"
    with pytest.raises(ModelError, match=re.escape(said)):
        load_policy(folder)


def test_an_end_token_beyond_the_vocabulary_is_told_of(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_policy(changed(tiny_dir, tmp_path / "model", eos_token_id=[900, 99999]))
    assert "beyond the vocabulary of 900: no reply ends by itself" in caplog.text


def test_the_first_and_the_last_token_may_end_a_reply(tiny_dir: Path, tmp_path: Path) -> None:
    assert load_policy(changed(tiny_dir, tmp_path / "model", eos_token_id=[0, 899])).end_ids == (0, 899)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_weights_that_are_not_the_numbers_themselves_are_refused(
    dtype: torch.dtype, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    said = (
        f"{folder}/model.safetensors holds tensor 'model.norm.weight' as {name}; weights must be float32, bfloat16, "
        "float16, float64; dequantize them"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(said)}"):
        load_policy(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_another_precision_are_read(dtype: torch.dtype, tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    embedding = load_policy(folder).model.embedding
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tied_matrix_may_be_stored_twice_but_not_be_two(dtype: torch.dtype, tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].to(dtype, copy=True)
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    assert load_policy(folder).model.head is None
    head[899, 95] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'lm_head.weight' is another one than .*; set tie_word_embeddings to false"):
        load_policy(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    kept = load_policy(folder).model.head
    assert kept is not None
    assert torch.equal(kept, head.float())


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({}, "has weight_map None, which must give the file of every tensor"),
        ({"weight_map": []}, r"has weight_map \[\], which"),
        ({"weight_map": {}}, r"has weight_map \{\}, which"),
        ({"weight_map": {"a": None}}, "has a tensor in None; name a .safetensors file beside"),
        ({"weight_map": {"a": ["b"]}}, r"has a tensor in \['b'\]; name"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "has a tensor in 'pytorch_model.bin'; name"),
        ({"weight_map": {"a": "../b.safetensors"}}, "has a tensor in '../b.safetensors'; name"),
        ({"weight_map": {"a": "b\0.safetensors"}}, r"has a tensor in 'b\\x00.safetensors'; name"),
    ],
)
def test_a_broken_index_of_shards_is_refused(
    index: dict[str, object], said: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load_policy, weights_sha256):
        with pytest.raises(ModelError, match=f"^{folder}/model.safetensors.index.json {said}"):
            read(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "is not JSON: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "is not JSON: maximum recursion depth"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b"[900]", r"holds \[900\], no JSON object; copy it"),
        (None, "can't be read: Is a directory; put the file there"),
    ],
    ids=["binary", "nested", "digits", "list", "folder"],
)
def test_a_file_that_holds_no_json_object_is_refused(
    file: str, content: bytes | None, said: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=f"^{folder / file} {said}"):
        load_policy(folder)


def test_a_folder_in_place_of_the_weights_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    for read in (load_policy, weights_sha256):
        with pytest.raises(ModelError, match=f"^{folder}/model.safetensors can't be read .*; weights must be readable"):
            read(folder)


COUNT = "it must be a whole number from 1 to"


@pytest.mark.parametrize("value", [-3, 0, 3.0, "3", True, [3], 10_000_001], ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_a_size_that_is_no_count_is_refused(key: str, value: object, tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model", **{key: value})
    said = f"{folder}/config.json: {key} is {value!r}; {COUNT} {1000 if key == 'num_hidden_layers' else 10_000_000}; "
    with pytest.raises(ModelError, match=f"^{re.escape(said)}correct it"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": None}, f"vocab_size is missing; {COUNT} 10000000"),
        ({"max_position_embeddings": 10**9}, f"max_position_embeddings is 1000000000; {COUNT} 10000000"),
        ({"model_type": "mistral", "sliding_window": "4"}, f"sliding_window is '4'; {COUNT} 10000000"),
        ({"num_key_value_heads": 2}, "num_attention_heads is 3, no multiple of num_key_value_heads, 2"),
        ({"head_dim": 31}, "head_dim is 31, the rotary embedding turns pairs"),
        ({"head_dim": None, "hidden_size": 2}, "head_dim is 0, the rotary"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 10+\.\.\.0+; it must be"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0; it must be a number above 0"),
        ({"rope_parameters": None, "rope_theta": True}, "rope_theta is True; it must be"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', no JSON object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing; it must be"),
        ({"rope_parameters": YARN | {"factor": "x"}}, "factor is 'x'; it must be"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; ",
        ),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1}},
            "high_freq_factor is 1, not above low_freq_factor, 1.0",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"vocab_size": 10**7, "hidden_size": 10**7}, "the model that it describes can't be allocated"),
    ],
    ids=range(21),
)
def test_a_config_with_a_value_of_another_kind_is_refused(
    changes: dict[str, object], said: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_dir, tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=f"^{folder}/config.json: {said}"):
        load_policy(folder)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_act",
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "use_sliding_window",
        "attention_bias",
        "mlp_bias",
        "rms_norm_eps",
        "tie_word_embeddings",
        "torch_dtype",
        "layer_types",
    ],
)
def test_a_null_is_as_if_its_key_were_absent(key: str) -> None:
    for family in FAMILIES:
        config = tiny_config(model_type=family)
        config.pop(key, None)
        assert DecoderConfig.from_json(config | {key: None}) == DecoderConfig.from_json(config)


def test_nulls_inside_a_rotary_embedding_are_as_if_absent(tiny_dir: Path, tmp_path: Path) -> None:
    nulls = dict.fromkeys(("original_max_position_embeddings", "attention_factor", "beta_fast", "mscale", "rope_theta"))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    folder = changed(tiny_dir, tmp_path / "model", rope_parameters=yarn | nulls)
    plain = changed(tiny_dir, tmp_path / "plain", rope_parameters=yarn)
    assert torch.equal(load_policy(folder).model.cos, load_policy(plain).model.cos)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_absent_and_null_mean_is_what_transformers_takes(family: str) -> None:
    """Two things for heads and windows: the usual number, and as many as queries have or none."""
    from transformers import CONFIG_MAPPING

    for key in ABSENT[family]:
        config = tiny_config(model_type=family, num_attention_heads=32, hidden_size=64, max_position_embeddings=8192)
        config |= {"use_sliding_window": True, "sliding_window": 8192, "num_key_value_heads": 4, "head_dim": 2}
        del config[key]
        refuses_null = (family, key) in {("qwen3", "head_dim"), ("mistral", "num_key_value_heads")}
        for changes in ({},) if refuses_null else ({}, {key: None}):
            ours = DecoderConfig.from_json(config | changes)
            theirs = CONFIG_MAPPING[family](**config | changes)
            assert ours.num_kv_heads == theirs.num_key_value_heads
            assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
            assert ours.max_context == (theirs.sliding_window or 8192)


def test_of_two_descriptions_of_a_rotary_embedding_transformers_one_counts() -> None:
    from transformers import CONFIG_MAPPING

    config = tiny_config(model_type="llama", rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=5e4)
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    theirs = CONFIG_MAPPING["llama"](**config).rope_parameters
    assert DecoderConfig.from_json(config).rope == {
        name: theirs[name] for name in ("factor", "rope_type", "rope_theta")
    }


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached"])
def test_stored_tables_of_the_rotary_embedding_are_passed_over(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.self_attn.rotary_emb.{name}"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_policy(folder).model.cos, load_policy(tiny_dir).model.cos)
    save_file(tensors | {"model.layers.0.self_attn.bias": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"holds 1 tensors with no place here, such as 'model.layers.0.self_attn.bias'"
    ):
        load_policy(folder)


@pytest.mark.parametrize("name", ["a" * 300, "nano-" + "a" * 246, "a\0b", "\ud800"], ids=len)
def test_a_name_that_no_folder_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't be a folder of the model root: .*; name a folder inside it"):
        resolve(name, tmp_path)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ModelError, match="model 'a' can't be a folder of the model root: Symlink loop"):
        resolve("a", tmp_path)


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
