"""The shipped policies: small enough, complete, readable by others, and able to play their game."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from swarm_engine.models import NANO_DIR, resolve, shipped
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import load_policy, save_policy
from swarm_engine.tracker.codec import ChatCodec
from vibe import library, seeds, warmup
from vibe.envs import EnvHost
from vibe.judging import mean_reward
from vibe.warmup import Card

GAMES = library.names()


def card_of(game: str) -> Card:
    with safe_open(NANO_DIR / "weights" / f"{game}.safetensors", framework="pt") as file:
        return Card.from_json(file.metadata()["card"])


def test_every_built_in_game_has_start_weights() -> None:
    assert set(shipped()) >= {library.load(game).start_weights for game in GAMES}
    for game in GAMES:
        assert warmup.is_shipped(library.load(game), library.load(game).defaults)


def test_all_of_it_is_at_most_four_megabytes() -> None:
    assert sum(path.stat().st_size for path in NANO_DIR.rglob("*") if path.is_file()) <= 4_000_000


@pytest.mark.parametrize("game", GAMES)
def test_the_weights_are_those_the_card_describes(game: str) -> None:
    card, template = card_of(game), library.load(game)
    assert card.game == game
    assert card.rules == template.defaults
    assert card.template_version == template.version, "the game has changed: run scripts/build_nano.py"
    assert card.tokenizer == warmup.tokenizer_hash(NANO_DIR), "the tokenizer has changed: run scripts/build_nano.py"
    assert [card.plan] == warmup.plans(template)
    page = (NANO_DIR / "CARD.md").read_text(encoding="utf-8")
    assert f"| {game} | {card.plan.share:.0%} |" in page
    assert f"{card.sampled.mean:.3f} ± {card.sampled.se:.3f}" in page


@pytest.mark.parametrize("game", GAMES)
def test_the_weights_leave_room_and_give_reinforcement_something_to_compare(game: str) -> None:
    card = card_of(game)
    assert card.scripted.mean > card.random.mean + 0.2
    assert card.scripted.mean > card.sampled.mean + 0.2
    assert card.share_with_variance > 1 / 3


@pytest.mark.parametrize("game", GAMES)
def test_the_weights_earn_what_the_card_says(game: str, tmp_path: Path) -> None:
    template, card = library.load(game), card_of(game)
    policy = load_policy(resolve(template.start_weights, tmp_path))
    games = [seeds.build_seed("level", index) for index in range(40)]

    async def play() -> list[float]:
        async with EnvHost(template.path, template.defaults) as host:
            ends = await warmup.play(policy, host, games, temperature=1.0)
        return [mean_reward(end["rewards"]) for end in ends]

    level = warmup.Level.of(asyncio.run(play()))
    assert abs(level.mean - card.sampled.mean) < 4 * level.se + 1e-9


def test_transformers_reads_them_and_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = load_policy(resolve("nano-tictactoe", tmp_path))
    save_policy(policy, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "X|2|3\n4|O|6\n7|8|9"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    codec = ChatCodec.load(NANO_DIR, policy.end_ids, datetime(2026, 1, 1, tzinfo=UTC))
    assert tuple(ids) == codec.encode(codec.render(messages))
    tokens = torch.tensor([ids])
    with torch.no_grad():
        ours = policy.model.logits(policy.model.hidden(tokens, torch.arange(len(ids)), attend_causally))
        difference = (ours - theirs(tokens).logits).abs().max().item()
    assert difference < 1e-4


def test_cells_and_clues_are_the_same_tokens_in_a_prompt_as_in_a_reply() -> None:
    config = json.loads((NANO_DIR / "config.json").read_text())
    codec = ChatCodec.load(NANO_DIR, (config["eos_token_id"],), datetime(2026, 1, 1, tzinfo=UTC))
    for text, word in (("X|12|3", "12"), ("pie/red/core", "red"), ("4:core", "core")):
        (token,) = codec.encode(word)
        assert token in codec.encode(text)


def test_any_text_survives_the_tokenizer() -> None:
    config = json.loads((NANO_DIR / "config.json").read_text())
    codec = ChatCodec.load(NANO_DIR, (config["eos_token_id"],), datetime(2026, 1, 1, tzinfo=UTC))
    for text in ("", "Ω≈ç√ 日本語 🙂", "  two  spaces\n\n\ttab", "<|im_end|>", "\u0000"):
        assert codec.decode(codec.encode(codec.protect({"role": "user", "content": text})["content"])) == text
