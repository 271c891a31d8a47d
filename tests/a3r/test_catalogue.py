"""The built-in games as factors: every knob that a study may vary can be asked about, planned and rendered."""

from __future__ import annotations

import json

import pytest

from a3r.errors import QuestionError
from a3r.planner.builtin import builtin_catalogue
from a3r.planner.catalogue import Knob
from a3r.planner.design import Wishes, design
from a3r.planner.offline import read, shown
from a3r.prereg.check import check
from a3r.workshop import VibeWorkshop, project_spec, refuse_impossible
from swarm_engine.config import TrainerConfig
from vibe.project import ProjectSpec

CATALOGUE = builtin_catalogue()
CASES = [
    (game.name, knob)
    for game in CATALOGUE.games
    for knob in (CATALOGUE.knobs(game) if game.name == "tictactoe" else game.knobs)
]

APART = {("tictactoe", "rules.win_length")}
"""Rules whose other value needs a second rule changed too."""


def two_levels(knob: Knob) -> list[object]:
    """Two values that it can take, the default first."""
    if knob.kind is bool:
        return [True, False]
    if knob.choices:
        return [knob.default, next(choice for choice in knob.choices if choice != knob.default)]
    assert isinstance(knob.default, int | float)
    near = (knob.default + 1, knob.default - 1) if knob.kind is int else (knob.default / 2, knob.default + 0.01)
    return [knob.default, next(value for value in near if knob.low <= value <= knob.high and value != knob.default)]


@pytest.mark.parametrize(("template", "knob"), CASES, ids=[f"{template}-{knob.path}" for template, knob in CASES])
def test_every_knob_can_be_asked_about_planned_and_rendered(template, knob):
    one, other = two_levels(knob)
    levels = "on and off" if knob.kind is bool else f"{shown(one)} and {shown(other)}"
    reading = read(f"Does {knob.path} at {levels} change the final held-out reward on {template}?", CATALOGUE)
    assert reading.knob.path == knob.path
    assert set(reading.levels) == {one, other}
    plan = design(reading, Wishes(parallel=2))
    failures = check(plan, num_studies=20).failures
    assert failures == ()
    if (template, knob.path) in APART:
        with pytest.raises(QuestionError, match=knob.path.removeprefix("rules.")):
            refuse_impossible(plan)
        return
    refuse_impossible(plan)
    for arm in plan.arms:
        spec = project_spec(plan, arm)
        section, _, name = knob.path.partition(".")
        value = spec.rules[name] if section == "rules" else getattr(spec.config.trainer, name)
        assert str(getattr(value, "value", value)) == str(arm.level) or value == arm.level


def test_every_field_that_the_default_algorithm_reads_is_a_factor():
    paths = {knob.path.removeprefix("trainer.") for knob in CATALOGUE.trainer}
    without_value = {"max_staleness", "ignore_tools", "teacher_weight", "best_by"}
    unread = {"loss_length", "overlong_limit", "overlong_margin", "off_policy_low", "off_policy_high"}
    assert paths == set(TrainerConfig.model_fields) - unread - without_value


def test_the_example_of_every_refusal_can_be_read():
    text = CATALOGUE.in_words()
    (example,) = [line.split('"')[1] for line in text.splitlines() if "example:" in line]
    assert check(design(read(example, CATALOGUE), Wishes(parallel=2))).failures == ()


def test_a_rendered_project_holds_the_arm_and_rendering_twice_is_once(tmp_path):
    plan = design(read("Does a group size of 8 learn tic-tac-toe faster than 4?", CATALOGUE), Wishes(parallel=2))
    workshop, arm = VibeWorkshop(), plan.arm("group_size=4")
    sha = workshop.build(plan, arm, tmp_path / "project")
    assert workshop.build(plan, arm, tmp_path / "project") == sha
    spec = ProjectSpec.load(tmp_path / "project")
    assert (spec.config.trainer.group_size, spec.config.trainer.tasks_per_update) == (4, 16)
    assert (spec.config.num_threads, spec.training.updates, spec.training.eval_every) == (1, 25, 5)
    (tmp_path / "project" / "train.py").write_text("half a file")
    assert workshop.build(plan, arm, tmp_path / "project") == sha, "a crash in between is written over"
    assert "half a file" not in (tmp_path / "project" / "train.py").read_text()
    assert len(workshop.template_sha(plan)) == 64
    assert json.loads((tmp_path / "project" / "spec.json").read_text())["template"] == "tictactoe"
