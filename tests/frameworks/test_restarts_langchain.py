"""`client.run` outlives its server with agents of LangChain, beside those of the SDKs below it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine_front"))

from conftest import SMALL, started
from test_restarts import by_anthropic, by_openai, lose_one, run_through_kills

from swarm_engine.client import SyncEpisode

pytestmark = pytest.mark.heavy


def by_langchain(episode: SyncEpisode) -> None:
    from langchain_openai import ChatOpenAI

    ChatOpenAI(model="policy", base_url=episode.base_url, api_key=episode.api_key).invoke("hi")  # type: ignore[arg-type]


def test_an_episode_that_is_lost_is_played_again_when_langchain_raises(tmp_path: Path) -> None:
    with started(tmp_path / "run", SMALL) as served:
        lose_one(served, by_langchain)


def test_a_run_through_three_sdks_ends_with_every_group_complete_however_often_the_server_is_killed(
    tmp_path: Path,
) -> None:
    met = run_through_kills(tmp_path, (by_openai, by_anthropic, by_langchain))
    assert sum(met.values()) > 0
