"""The offline planner: questions as people ask them, and questions it must refuse."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3r.errors import QuestionError
from a3r.planner.offline import read
from a3r.prereg.check import check
from a3r.prereg.plan import Direction, MetricKind, Source

EXAMPLE = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"
AREA, FINAL, EPISODES = MetricKind.AREA, MetricKind.FINAL_REWARD, MetricKind.EPISODES_TO

READ = [
    (EXAMPLE, "tictactoe", "trainer.group_size", (8, 4), 4, AREA, Direction.BETTER),
    (
        "does trainer.group_size at 4, 8, 16 change the final held-out reward on tictactoe?",
        "tictactoe",
        "trainer.group_size",
        (4, 8, 16),
        8,
        FINAL,
        Direction.DIFFERENT,
    ),
    (
        "Does a learning rate of 3e-3 reach a higher final reward on the grid walk than 1e-3?",
        "gridwalk",
        "trainer.learning_rate",
        (0.003, 0.001),
        0.001,
        FINAL,
        Direction.BETTER,
    ),
    ("lr 0.003 vs 0.001 on tic tac toe, which learns faster?", "tictactoe", "trainer.learning_rate",
     (0.003, 0.001), 0.001, AREA, Direction.BETTER),
    ("Is a clip of 0.1 better than 0.28 for tictactoe?", "tictactoe", "trainer.clip_high", (0.1, 0.28), 0.28, FINAL,
     Direction.BETTER),
    ("Do groups of four learn noughts and crosses slower than groups of eight?", "tictactoe", "trainer.group_size",
     (4, 8), 8, AREA, Direction.WORSE),
    ("How does the entropy bonus affect tic-tac-toe: 0, 0.01 or 0.05?", "tictactoe", "trainer.entropy_weight",
     (0.0, 0.01, 0.05), 0.0, FINAL, Direction.DIFFERENT),
    ("Does sequence_mean learn tictactoe faster than token_mean?", "tictactoe", "trainer.aggregation",
     ("sequence_mean", "token_mean"), "token_mean", AREA, Direction.BETTER),
    ("Does tic-tac-toe learn faster with loss aggregation sequence mean than with token mean?", "tictactoe",
     "trainer.aggregation", ("sequence_mean", "token_mean"), "token_mean", AREA, Direction.BETTER),
    ("Does turning off advantage normalization hurt the final reward on tictactoe?", "tictactoe",
     "trainer.normalize_by_std", (False, True), True, FINAL, Direction.DIFFERENT),
    ("Do 2 holes or 4 holes change the final reward on gridwalk?", "gridwalk", "rules.holes", (2, 4), 2, FINAL,
     Direction.DIFFERENT),
    ("Does an expert opponent give a higher final reward on tictactoe than a random opponent?", "tictactoe",
     "rules.opponent", ("expert", "random"), "random", FINAL, Direction.BETTER),
    ("With 5 seeds and 30 updates, does a weight decay of 0.1 learn gridwalk faster than 0?", "gridwalk",
     "trainer.weight_decay", (0.1, 0.0), 0.0, AREA, Direction.BETTER),
    ("At a learning rate of 3e-3, does a group size of 8 learn tic-tac-toe faster than 4?", "tictactoe",
     "trainer.group_size", (8, 4), 4, AREA, Direction.BETTER),
    ("Does a KL penalty of 10% learn tictactoe faster than 0 at the same learning rate?", "tictactoe",
     "trainer.kl_weight", (0.1, 0.0), 0.0, AREA, Direction.BETTER),
    ("Does a group size of ٤ learn tictactoe faster than thirty-two?", "tictactoe",
     "trainer.group_size", (4, 32), 32, AREA, Direction.BETTER),
]  # fmt: skip


@pytest.mark.parametrize(("question", "game", "path", "levels", "reference", "metric", "expected"), READ)
def test_a_question_is_read(catalogue, question, game, path, levels, reference, metric, expected):
    reading = read(question, catalogue)
    assert (reading.game.name, reading.knob.path) == (game, path)
    assert reading.levels == levels
    assert [type(level) for level in reading.levels] == [type(level) for level in levels]
    assert (reading.reference, reading.metric, reading.expected) == (reference, metric, expected)


@pytest.mark.parametrize(("question", "threshold"), [
    ("Does a group size of 8 need fewer episodes to reach 0.6 on tic-tac-toe than 4?", 0.6),
    ("How many episodes to a held-out reward of 50% on tictactoe: learning rate 1e-3 or 3e-3?", 0.5),
    ("Does a group size of 4 reach a reward of .7 sooner than 8 on tictactoe?", 0.7),
])  # fmt: skip
def test_a_level_to_reach_is_the_threshold_and_no_level_of_the_factor(catalogue, question, threshold):
    reading = read(question, catalogue)
    assert (reading.metric, reading.threshold) == (EPISODES, threshold)
    assert len(reading.levels) == 2
    assert threshold not in reading.levels


REFUSED = [
    ("", "empty"),
    ("   ?!", "empty"),
    ("42", "empty"),
    ("Is tic-tac-toe fun?", "nothing to measure"),
    ("What is the best colour for tic-tac-toe?", "no factor"),
    ("Does a bigger model learn tic-tac-toe faster?", "no factor"),
    ("Does a group size of 8 learn chess faster than 4?", "no template"),
    ("Does a group size of 8 learn faster than 4?", "no template"),
    ("Does a group size of 8 learn tictactoe and gridwalk faster than 4?", "one template"),
    ("Does a group size of 8 learn tic-tac-toe faster?", "one level"),
    ("Does a group size of 8 learn tic-tac-toe faster than 8?", "one level"),
    ("Does the group size change the final reward on tictactoe?", "without levels"),
    ("Does a group size of 1 learn tic-tac-toe faster than 8?", "out of range: it goes from 2 to 1024"),
    ("Does a group size of 4000 learn tic-tac-toe faster than 8?", "out of range"),
    ("Does a group size of -4 learn tic-tac-toe faster than 8?", "size -4 is out of range"),
    ("Does a group size of minus four learn tic-tac-toe faster than 8?", "size -4 is out of range"),
    ("Does a learning rate of −0.001 learn tic-tac-toe faster than 0.002?", "rate -0.001 is out of range"),
    ("Do microbatch tokens of 1e400 or 2048 change the final reward on tictactoe?", "inf is out of range"),
    ("Does a group size of 8 learn tic-tac-toe faster than 4 with 1e400 seeds?", "inf seeds can't be run"),
    ("Does a group size of 2.5 learn tic-tac-toe faster than 8?", "not a whole number"),
    ("Does a learning rate of 0 learn tic-tac-toe faster than 1e-3?", "above 0, up to 1"),
    ("Does a group size of 4 or 8 with learning rate 1e-3 or 3e-3 learn tictactoe faster?", "varies"),
    ("Does a group size of 8 reach 3 on tictactoe in fewer episodes than 4?", "from -1 to 1"),
    ("Does a group size of 8 need fewer episodes to the threshold on tictactoe than 4?", "needs the threshold"),
    ("Does a temperature of 0.7 learn tic-tac-toe faster than 1?", "belongs to no factor"),
    ("Do 9 holes or 30 holes change the final reward on gridwalk?", "from 0 to 21"),
    ("Does grpo learn tictactoe faster than ppo?", "no factor"),
    ("Does group size or learning rate change the final reward on tictactoe?",
     "names group size without a level and learning rate without a level; a question compares one factor"),
    ("Does a group size of 8 or a learning rate of 0.002 learn tictactoe faster?",
     "names group size at 8 and learning rate at 0.002; a question compares one factor"),
    ("Does group size change the final reward on tictactoe with a learning rate of 0.002?",
     "names group size without a level and learning rate at 0.002"),
    ("Does a group size of 8/2 learn tic-tac-toe faster than 4?", "8/2 is no plain number"),
    ("Does a group size of 8 / 2 learn tic-tac-toe faster than 4?", "8 / 2 is no plain number"),
    ("Does a group size of 4 or ²0 or 8 learn tic-tac-toe faster?", "²0 is no plain number"),
    ("Does a group size of 4, 8 or 16½ learn tic-tac-toe faster?", "16½ is no plain number"),
    ("Does a group size of 4, 8 or 1k learn tic-tac-toe faster?", "1k is no plain number"),
    ("Does a group size of 8 learn tic-tac-toe faster than 4 with 3½ seeds?", "3½ is no plain number"),
    ("Does a learning rate of 10⁻³ learn tic-tac-toe faster than 0.002 or 0.004?", "10⁻³ is no plain number"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "why"), REFUSED)
def test_what_it_cannot_read_it_refuses_and_says_why(catalogue, question, why):
    with pytest.raises(QuestionError, match=why) as refused:
        read(question, catalogue)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("question", ["", "Does a bigger model learn tic-tac-toe faster?", "Does 8 beat 4 at chess?"])
def test_a_refusal_says_what_it_can_read(catalogue, question):
    with pytest.raises(QuestionError) as refused:
        read(question, catalogue)
    for word in ("group size", "learning rate", "held-out reward", "tictactoe", "gridwalk", "holes", EXAMPLE):
        assert word in str(refused.value)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_and_never_crashes(catalogue, text):
    try:
        reading = read(text, catalogue)
    except QuestionError:
        pass
    else:
        assert len(reading.levels) > 1


@given(st.sampled_from([question for question, *_ in READ]))
def test_capitals_do_not_matter(catalogue, question):
    quiet, loud = read(question, catalogue), read(question.upper(), catalogue)
    assert (quiet.levels, quiet.reference, quiet.metric) == (loud.levels, loud.reference, loud.metric)


def test_the_example_fixes_what_it_says_in_every_arm(plan_of):
    plan = plan_of()
    four, eight = plan.arm("group_size=4"), plan.arm("group_size=8")
    assert four.is_reference
    assert four.settings == {"trainer.group_size": 4, "trainer.tasks_per_update": 16}
    assert eight.settings == {"trainer.group_size": 8, "trainer.tasks_per_update": 8}
    assert plan.controls.episodes_per_update == 64
    assert plan.controls.episodes == 25 * 64
    assert plan.controls.settings["trainer.learning_rate"] == 0.001
    assert plan.controls.settings["training.updates"] == 25
    assert plan.controls.settings["training.eval_every"] == 5
    assert plan.controls.evaluation_games == 150
    assert plan.seeds == (1, 2, 3)
    assert plan.metric.kind is AREA
    assert any("16 tasks at 4" in each.text for each in plan.assumptions)
    sources = {each.text: each.source for each in plan.assumptions}
    assert sources["Every run trains on the same number of episodes, whatever its level."] is Source.USER
    assert sources["A run trains on 1600 episodes."] is Source.DEFAULT, "the question names no number"
    assert check(plan).failures == ()


@pytest.mark.parametrize("question", [question for question, *_ in READ])
def test_every_question_that_is_read_gives_a_plan_that_passes_its_checks(plan_of, question):
    checked = check(plan_of(question), num_studies=40)
    assert checked.failures == ()


def test_levels_that_do_not_divide_64_get_episodes_that_they_do_divide(plan_of):
    plan = plan_of("Does a group size of 6 learn tic-tac-toe faster than 4?")
    assert plan.controls.episodes_per_update == 60
    assert {arm.settings["trainer.tasks_per_update"] for arm in plan.arms} == {10, 15}


def test_tasks_per_update_as_factor_keeps_the_total_and_the_evaluations(plan_of):
    plan = plan_of("Does tic-tac-toe learn faster with 4 tasks per update than with 8?")
    four, eight = plan.arm("tasks_per_update=4"), plan.arm("tasks_per_update=8")
    assert four.settings == {"trainer.tasks_per_update": 4, "training.updates": 50, "training.eval_every": 10}
    assert eight.settings == {"trainer.tasks_per_update": 8, "training.updates": 25, "training.eval_every": 5}
    assert plan.controls.episodes_per_update is None
    assert plan.controls.episodes == 1600
    assert check(plan).failures == ()


def test_stated_counts_and_controls_find_their_place(plan_of):
    plan = plan_of(
        "With 4 seeds, 10 updates and a learning rate of 3e-3, does a group size of 8 learn tictactoe faster than 4?"
    )
    assert plan.seeds == (1, 2, 3, 4)
    assert plan.controls.settings["training.updates"] == 10
    assert plan.controls.settings["trainer.learning_rate"] == 0.003


def test_the_command_line_has_the_last_word(plan_of):
    plan = plan_of(
        "With 4 seeds, does a group size of 8 learn tictactoe faster than 4?", seeds=6, extra_seeds=0, updates=8
    )
    assert len(plan.seeds) == 6
    assert plan.extra_seeds == ()
    assert plan.controls.episodes == 8 * 64
    assert plan.num_looks == 1
    assert plan.level == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("asked", "wishes", "seeds", "source"),
    [
        (" with 4 seeds", {}, 4, Source.USER),
        (" with 4 seeds", {"seeds": 5}, 5, Source.FLAG),
        ("", {"seeds": 5}, 5, Source.FLAG),
    ],
)
def test_a_number_of_seeds_is_said_by_the_question_or_the_command_line(plan_of, asked, wishes, seeds, source):
    plan = plan_of(f"Does a group size of 8 learn tictactoe faster than 4{asked}?", **wishes)
    assert {each.text: each.source for each in plan.assumptions}[f"{seeds} seeds per arm."] is source


def test_more_seeds_than_the_command_line_takes_are_refused(plan_of):
    with pytest.raises(QuestionError, match="100"):
        plan_of("Does a group size of 8 learn tic-tac-toe faster than 4 with 1000000 seeds?")


def test_a_level_to_reach_may_be_negative(catalogue):
    assert read("Does a group size of 8 reach -0.2 on tictactoe in fewer episodes than 4?", catalogue).threshold == -0.2


def test_a_level_that_fights_with_a_stated_number_of_episodes_is_refused(plan_of):
    with pytest.raises(
        QuestionError, match=re.escape("group size 6 does not divide 64 episodes per update; 66 would do")
    ):
        plan_of("Does a group size of 6 learn tictactoe faster than 4 with 64 episodes per update?")


TASKS = "Does tic-tac-toe learn faster with 4 tasks per update than with 8"


@pytest.mark.parametrize(
    ("question", "wishes", "source", "episodes", "between"),
    [
        ("With 1280 episodes, does a group size of 8 learn tictactoe faster than 4?", {}, Source.USER, 1280, 256),
        (
            "With 1280 episodes and 20 updates, does a group size of 8 learn tictactoe faster than 4?",
            {},
            Source.USER,
            1280,
            256,
        ),
        (
            "With 1280 episodes, does a group size of 8 learn tictactoe faster than 4?",
            {"updates": 20},
            Source.USER,
            1280,
            256,
        ),
        # Updates of 32 and 64 episodes: 960 are 30 and 15; 15 units of 64 are evaluated every 3.
        (f"{TASKS} on 960 training episodes?", {}, Source.USER, 960, 192),
        (f"{TASKS} in 15 updates?", {}, Source.USER, 960, 192),
        (f"{TASKS} in 15 updates?", {"updates": 15}, Source.USER, 960, 192),
        (f"{TASKS} in 20 updates?", {"updates": 15}, Source.FLAG, 960, 192),
        (f"{TASKS}?", {"updates": 15}, Source.FLAG, 960, 192),
    ],
)
def test_stated_episodes_and_updates_are_what_is_run(plan_of, question, wishes, source, episodes, between):
    plan = plan_of(question, **wishes)
    assert (plan.controls.episodes, plan.controls.episodes_between_evaluations) == (episodes, between)
    sources = {each.text: each.source for each in plan.assumptions}
    assert sources[f"A run trains on {episodes} episodes."] is source
    assert check(plan, num_studies=20).failures == ()


@pytest.mark.parametrize(
    ("question", "wishes", "why"),
    [
        ("With 1000 episodes, does a group size of 8 learn tictactoe faster than 4?", {}, "1024 would do"),
        ("With 10 episodes, does a group size of 8 learn tictactoe faster than 4?", {}, "64 would do"),
        (f"{TASKS} on 1000 training episodes?", {}, "of 32, 64 episodes at the levels; 1024 would do"),
        (
            "With 1280 episodes, does a group size of 8 learn tictactoe faster than 4?",
            {"updates": 8},
            "8 updates of 64 episodes are 512 episodes, not 1280; leave one out",
        ),
        (
            f"{TASKS} on 960 training episodes in 30 updates?",
            {},
            "30 updates of 64 episodes at tasks per update 8 are 1920 episodes, not 960",
        ),
        (
            "With 5 tasks per update and 64 episodes per update, does a learning rate of 3e-3 learn tictactoe faster "
            "than 1e-3?",
            {},
            "are 40 episodes per update, not 64",
        ),
        ("With 3 seeds, does a group size of 8 learn tictactoe faster than 4 with 5 seeds?", {}, "3 seeds and 5"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_with_what_would(plan_of, question, wishes, why):
    with pytest.raises(QuestionError, match=re.escape(why)):
        plan_of(question, **wishes)


def test_group_size_and_tasks_together_are_refused(plan_of):
    with pytest.raises(QuestionError, match="leave one out"):
        plan_of("Does a group size of 8 learn tictactoe faster than 4 with tasks per update 8?")
