"""What a run does with games that were lost, with a project that was edited, and with a policy that collapsed."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_engine.client import EpisodeResult
from swarm_engine.types import Outcome
from vibe import render
from vibe.dry_play import DryPlay
from vibe.errors import EditedError, GameError, StuckError, UsageError
from vibe.project import ProjectSpec, code_of, game_of, project_for
from vibe.record import Record
from vibe.runtime import Run, Settings, begin
from vibe.turns import About


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of tic-tac-toe."""
    folder = tmp_path / "project"
    render.write(render.render(project_for(game_of("tictactoe"))), folder)
    return folder


def start(project: Path, run_dir: Path) -> Record:
    """The record of a run after one more start in its folder."""
    record = Record(run_dir, as_json=True, out=io.StringIO())
    begin(Settings(project, ProjectSpec.load(project), run_dir), record)
    return record


@pytest.mark.parametrize("name", ["rewards.py", "env.py", "players.py", "workflow.py", "scoring.py", "rules/core.py"])
def test_a_run_does_not_go_on_with_code_that_was_edited(name: str, project: Path, tmp_path: Path) -> None:
    (project / "rules").mkdir()
    (project / "rules" / "__init__.py").touch()
    start(project, tmp_path)
    assert start(project, tmp_path).last("text") == f"going on in {tmp_path}"
    with (project / name).open("a", encoding="utf-8") as code:
        code.write("# edited\n")
    with pytest.raises(EditedError, match=rf"^{re.escape(name)} changed since the run in .* was begun: .*--run-dir"):
        start(project, tmp_path)


def test_code_in_a_folder_without_init_is_looked_at_too(project: Path, tmp_path: Path) -> None:
    (project / "scoring").mkdir()
    (project / "scoring" / "back").symlink_to(project)
    (project / "scoring" / "scale.py").write_text("WON = 1.0\n", encoding="utf-8")
    start(project, tmp_path)
    start(project, tmp_path)
    (project / "scoring" / "scale.py").write_text("WON = 77.0\n", encoding="utf-8")
    with pytest.raises(EditedError, match=r"^scoring/scale\.py changed since"):
        start(project, tmp_path)


def test_a_new_folder_is_an_edit_only_where_it_may_stand_in_for_a_file(project: Path, tmp_path: Path) -> None:
    start(project, tmp_path)
    for folder in ("players", "scripts"):
        (project / folder).mkdir()
        (project / folder / "plot.py").touch()
    start(project, tmp_path)
    (project / "players" / "__init__.py").touch()
    with pytest.raises(EditedError, match=r"^players/__init__\.py changed since"):
        start(project, tmp_path)


def test_what_makes_no_reward_may_be_edited(project: Path, tmp_path: Path) -> None:
    start(project, tmp_path)
    for name in ("README.md", "train.py", "tests/test_game.py", "notes.txt"):
        (project / name).write_text("# edited", encoding="utf-8")
    start(project, tmp_path)


def test_a_run_of_an_older_version_goes_on_and_remembers_the_code_from_then_on(project: Path, tmp_path: Path) -> None:
    spec = ProjectSpec.load(project)
    record = Record(tmp_path, as_json=True, out=io.StringIO())
    record.emit("begin", spec=spec.model_dump(mode="json"), shuffle_rewards=False)
    assert start(project, tmp_path).last("code") == code_of(project)
    (project / "rewards.py").unlink()
    with pytest.raises(EditedError, match=r"rewards\.py"):
        start(project, tmp_path)


def test_a_run_whose_teacher_had_a_password_in_its_url_goes_on_without_it(project: Path, tmp_path: Path) -> None:
    file = project / "spec.json"
    spec = json.loads(file.read_text())
    spec["config"]["trainer"]["teacher_weight"] = 1.0
    spec["config"]["teacher"] = {"base_url": "http://localhost:8000/v1", "model": "large"}
    file.write_text(json.dumps(spec))
    began = ProjectSpec.load(project).model_dump(mode="json")
    began["config"]["teacher"]["base_url"] = "http://me:secret@localhost:8000/v1"
    Record(tmp_path, as_json=True, out=io.StringIO()).emit("begin", spec=began, shuffle_rewards=False)
    assert start(project, tmp_path).last("text") == f"going on in {tmp_path}"
    began["config"]["teacher"]["base_url"] = "http://me:secret@other:8000/v1"
    (tmp_path / "other").mkdir()
    Record(tmp_path / "other", as_json=True, out=io.StringIO()).emit("begin", spec=began, shuffle_rewards=False)
    with pytest.raises(UsageError, match=r"another spec\.config\.teacher\.base_url"):
        start(project, tmp_path / "other")


class FakeSwarm:
    """A swarm that gives back these rewards for the games it is asked to play."""

    step = 0

    def __init__(self, rewards: list[float | None]) -> None:
        self._rewards = rewards

    async def play(self, *_: Any, **__: Any) -> list[EpisodeResult]:
        return [
            EpisodeResult(
                task_id=f"heldout-{i}",
                group_id=f"heldout-{i}#1",
                index=0,
                episode_id=f"e{i}",
                rewards={"player": reward},
                outcome=Outcome.SUCCESS if reward is not None else Outcome.ENV_ERROR,
                metrics={},
                policy_version=0,
            )
            for i, reward in enumerate(self._rewards)
        ]


class StuckSwarm:
    """One whose updates say that nothing can be learned."""

    def __init__(self, first: int) -> None:
        self.progress = SimpleNamespace(steps={})
        self._first = first
        """The update that says so first."""

    async def update(self, step: int, *_: Any) -> dict[str, Any]:
        kinds = ["collapse", "stuck"] if step >= self._first else ["collapse"] if step > 1 else []
        health = [{"policy": "", "kind": kind, "message": f"{kind}, said the engine"} for kind in kinds]
        payload = {"step": step, "metrics": {}, "drops": {}, "seconds": 0.1, "health": health}
        self.progress.steps[step] = payload
        return payload


def updates(folder: Path, *, num: int, goes_on: bool) -> list[dict[str, Any]]:
    """What is on record after some updates on a swarm whose third is stuck."""

    async def rollout(*_: Any, **__: Any) -> None:
        raise AssertionError("the fake swarm plays nothing")

    settings = Settings(folder, project_for(game_of("tictactoe")), folder, goes_on=goes_on)
    run = Run(settings, Record(folder, as_json=False, out=io.StringIO()))
    run._live, run._rollout = StuckSwarm(first=3), rollout  # type: ignore[assignment]

    async def train() -> None:
        for step in range(1, num + 1):
            await run.update(step)

    try:
        asyncio.run(train())
    finally:
        record = run.record.all("warning")
    return record


def test_training_stops_where_nothing_can_be_learned_unless_it_is_told_to_go_on(tmp_path: Path) -> None:
    for folder in (stops := tmp_path / "stops", goes := tmp_path / "goes"):
        folder.mkdir()
    with pytest.raises(
        StuckError, match=r"update 3: stuck, said the engine\. .* with --go-on in this folder"
    ) as caught:
        updates(stops, num=9, goes_on=False)
    assert caught.value.exit_code == 4
    warnings = updates(goes, num=4, goes_on=True)
    assert [(one["step"], one["name"]) for one in warnings] == [(2, "collapse"), (3, "stuck")], "each where it begins"


def evaluate(rewards: list[float | None], folder: Path, *, label: str = "before", dry: DryPlay | None = None) -> str:
    """What is said of an evaluation with these rewards."""

    async def rollout(*_: Any, **__: Any) -> None:
        raise AssertionError("the fake swarm plays nothing")

    spec = project_for(game_of("tictactoe")).with_settings({"training.eval_games": str(len(rewards))})
    out = io.StringIO()
    run = Run(Settings(folder, spec, folder), Record(folder, as_json=False, out=out))
    run._live, run._rollout, run._dry = FakeSwarm(rewards), rollout, dry  # type: ignore[assignment]
    asyncio.run(run.evaluate(label, temperature=1))
    return out.getvalue()


def test_an_evaluation_that_lost_every_game_says_how_many_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(GameError, match=r"all 3 held-out games .*env_error.*same command"):
        evaluate([None, None, None], tmp_path)


def test_an_evaluation_with_one_game_left_has_no_interval(tmp_path: Path) -> None:
    said = evaluate([None, 0.5, None], tmp_path)
    assert said == (
        "before (step 0), temperature 1: 0.500 (no interval: one game) over 1 held-out games, 2 more were lost\n"
    )


def test_games_that_all_pay_alike_have_an_interval_where_the_range_of_rewards_is_known(tmp_path: Path) -> None:
    assert "1.000 (no interval: 2 games, all alike) over 2" in evaluate([1.0, 1.0], tmp_path)
    dry = DryPlay(About(-0.5, 1.0), 24, 5, -0.5, 1.0, tells_replies_apart=True)
    assert "1.000 [-0.263, 1.000] over 2" in evaluate([1.0, 1.0], tmp_path, label="after", dry=dry)


def test_an_interval_does_not_reach_above_the_best_reward(tmp_path: Path) -> None:
    said = evaluate([1.0] * 29 + [-0.5], tmp_path)  # Student's interval would end at 1.052
    assert "0.950 [0.782, 0.998] over 30 held-out games" in said
