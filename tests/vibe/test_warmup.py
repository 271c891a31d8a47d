"""Warm-ups: what names their weights, and how one is called off."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_engine.models import NANO_DIR
from swarm_engine.trainer import cloning
from vibe import library, warmup
from vibe.warmup import Plan, folder_name

NIM = library.load("nim")
TINY = Plan(share=0.2, num_episodes=10, num_updates=2)


def name(template: library.Template = NIM, nano: Path = NANO_DIR) -> str:
    return folder_name(template, NIM.defaults, TINY, nano=nano)


@pytest.mark.parametrize("file", ["env.py", "players.py", "rewards.py"])
def test_weights_of_a_game_whose_code_has_changed_are_not_used_again(file: str, tmp_path: Path) -> None:
    copy = replace(NIM, path=tmp_path / "nim")
    shutil.copytree(NIM.path, copy.path)
    assert name(copy) == name(), "where the code lies does not decide the weights"
    with (copy.path / file).open("a", encoding="utf-8") as code:
        code.write("\n# changed\n")
    assert name(copy) != name()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_weights_of_another_model_are_not_used_again(file: str, tmp_path: Path) -> None:
    shutil.copytree(NANO_DIR, tmp_path / "nano")
    assert name(nano=tmp_path / "nano") == name()
    with (tmp_path / "nano" / file).open("a", encoding="utf-8") as model:
        model.write("\n")
    assert name(nano=tmp_path / "nano") != name()


def test_weights_of_another_recipe_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = name()
    monkeypatch.setattr(cloning, "Recipe", partial(cloning.Recipe, batch_size=17))
    assert name() != before


def test_a_warm_up_is_called_off_in_the_middle_of_cloning(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[int] = []
    clone = cloning.clone

    async def call_off() -> None:
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def watched(model: Any, samples: Any, recipe: Any, seed: int, on_update: Callable[[int, float], None]) -> Any:
            def count(update: int, loss: float) -> None:
                updates.append(update)
                loop.call_soon_threadsafe(has_begun.set)
                on_update(update, loss)

            return clone(model, samples, recipe, seed, count)

        monkeypatch.setattr(cloning, "clone", watched)
        building = asyncio.create_task(warmup.build(NIM, NIM.defaults, replace(TINY, num_updates=300)))
        await has_begun.wait()
        building.cancel()
        await building

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call_off())
    assert 0 < len(updates) < 100


def test_a_warm_up_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    counts: list[int] = []
    clone = cloning.clone

    def counted(*args: object) -> list[float]:
        counts.append(torch.get_num_threads())
        return clone(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cloning, "clone", counted)
    monkeypatch.setattr(warmup, "NUM_LEVEL_GAMES", 2)  # what the weights can do is not asked here
    monkeypatch.setattr(warmup, "NUM_PROBE_GROUPS", 1)
    torch.set_num_threads(2)
    try:
        asyncio.run(warmup.build(NIM, NIM.defaults, TINY))
        counts.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 1]
