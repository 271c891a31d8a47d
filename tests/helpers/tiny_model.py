"""A policy small enough to make in a test: random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SENTENCES = (
    "system user assistant You play tic-tac-toe on a board of three by three cells against another player.",
    "Answer with the number of a free cell: 1 2 3 4 5 6 7 8 9. The board is . X O . X O .",
    "You are at row 2, column 3. Go north, south, east or west. There is a hole.",
    "Four players got a word. Describe yours in a word or two; then vote for the spy.",
)


def build_tokenizer(folder: Path, vocab_size: int = 900, sentences: Sequence[str] = SENTENCES) -> None:
    """Write a byte-level BPE tokenizer of at most `vocab_size` ids, its config and chat template into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """`config.json` of a Qwen3 with 0.44M parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 900,
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "float32",
    } | changes


def build_tiny_model(
    folder: Path, seed: int = 0, spread: float = 0.1, sentences: Sequence[str] = SENTENCES, **changes: Any
) -> Path:
    """Write a whole policy into `folder` and return it. `spread` is the deviation of the weights."""
    import torch
    from safetensors.torch import save_file

    from swarm_engine.models.decoder import Decoder, DecoderConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer(folder, config["vocab_size"], sentences)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(view.shape, generator=generator) * spread + ("norm" in name)
        for name, view in Decoder(DecoderConfig.from_json(config)).named_weights()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
