from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from experiments_db.browse import as_json, comparison_view, interval, number, run_view, runs_table, sparkline
from experiments_db.intervals import Interval
from experiments_db.models import ExperimentStatus, JobState, RunRole, Severity, StageKind, StudyKind, ValueMark
from experiments_db.queries import (
    ArmSummary,
    Comparison,
    Evaluation,
    Finding,
    JobSummary,
    Point,
    RunDetail,
    RunSummary,
    Warned,
)
from experiments_db.text import plain

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def evaluation(step: int, mean: float, half: float | None) -> Evaluation:
    reward = Interval(mean, None, None, 1) if half is None else Interval(mean, mean - half, mean + half, 64)
    return Evaluation(
        step=step, x=float(step), split="heldout", temperature=1.0, label="before" if step == 0 else "after",
        reward=reward, num_attempted=64, num_valid=64, num_policy_faults=0, num_env_faults=0,
    )  # fmt: skip


RUN = RunSummary(
    id="01ARYZ6S41TSV4RRFFQ69G5FAV", study_id="01ARYZ6S41TSV4RRFFQ6STUDY1", study_kind=StudyKind.RESEARCH,
    question="Does a group size of 8 learn faster than 4?", stage_kind=StageKind.COMPARE, template="tictactoe",
    arm="group_size=8", seed=0, role=RunRole.SELECT, status=ExperimentStatus.DONE, status_reason=None, steps=4,
    rewards=(0.0, 0.25, 0.75, 1.0), before=evaluation(0, 0.25, 0.125), after=evaluation(4, 0.9, 0.0625),
    warned_of=(), run_dir="runs/0", created_at=WHEN, finished_at=None,
)  # fmt: skip
SINGLE = replace(
    RUN, id="01ARYZ6S41TSV4RRFFQ6SINGLE", study_id="01ARYZ6S41TSV4RRFFQ6STUDY2", study_kind=StudyKind.VIBE,
    stage_kind=StageKind.SINGLE, question="Play nim with twelve stones", template="nim", arm="single",
    status=ExperimentStatus.FAILED, status_reason="FAILED_NAN: loss is NaN", rewards=(0.5, None), steps=2, after=None,
)  # fmt: skip
DETAIL = RunDetail(
    summary=SINGLE, objective="win", settings={"rules.stones": 12, "trainer.lockstep": True}, plan_sha256="0" * 64,
    jobs=(JobSummary("k.1", 1, "local", JobState.FAILED_NAN, "loss is NaN", 1, WHEN, WHEN, None),),
    evaluations=(evaluation(0, 0.25, 0.125),), metrics={"loss": math.nan, "reward_mean": 0.5},
    num_episodes={"eval": 64, "train": 128}, drops={"timeout": 2}, left_out={}, warnings=(),
    checkpoints=("checkpoints/step-000002",),
    files=(("curve", "curve.png"),), findings=(Finding("idle", Severity.HIGH, "pays idlers", is_open=True),),
)  # fmt: skip


def shown(view: RenderableType, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(view)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_runs_are_shown_study_by_study_then_alone() -> None:
    assert shown(runs_table([RUN, SINGLE])) == (
        "Does a group size of 8 learn faster than 4?\n"
        "study Q6STUDY1, tictactoe, 1 run\n"
        "\n"
        " run       arm           seed  state  steps  training reward  before        after\n"
        " ───────────────────────────────────────────────────────────────────────────────────────\n"
        " Q69G5FAV  group_size=8     0  done       4  ▁▃▆█ 1.000       0.250 ±0.125  0.900 ±0.062\n"
        "\n"
        "Single runs  1 run\n"
        "\n"
        " run       game  asked for                    state   steps  training reward  before        after\n"
        " ────────────────────────────────────────────────────────────────────────────────────────────────\n"
        " Q6SINGLE  nim   Play nim with twelve stones  failed      2  ▅× –             0.250 ±0.125  –\n"
        "\n"
        "before, after: held-out reward ± half its 95 % interval over tasks"
    )


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_table_of_runs_fits_the_terminal_and_cuts_no_number(width: int) -> None:
    text = shown(runs_table([RUN, replace(SINGLE, question="long " * 40)]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "0.250 ±0.125  0.900 ±0.062" in text
    assert "Q69G5FAV" in text


def test_a_long_name_of_an_arm_cuts_neither_ids_nor_numbers() -> None:
    text = shown(runs_table([replace(RUN, arm="learning_rate=0.001_and_more")]), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "0.250 ±0.125  0.900 ±0.062" in text
    assert "Q69G5FAV" in text
    assert "…" not in text


def test_a_run_that_was_warned_about_is_marked_and_the_mark_explained() -> None:
    warned = replace(RUN, warned_of=("kl_spike",), status=ExperimentStatus.QUARANTINED, id="01ARYZ6S41TSV4RRFFQWARNED1")
    narrow = shown(runs_table([RUN, warned]), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "quarantined !" in narrow
    text = shown(runs_table([RUN, warned]))
    rows = [line.split() for line in text.splitlines() if "group_size=8 " in line]
    assert [row[3:5] for row in rows] == [["done", "4"], ["quarantined", "!"]]
    assert "! the engine warned while it trained; `a3r show RUN` says of what" in text
    assert "!" not in shown(runs_table([RUN]))


def test_a_run_is_shown_with_what_it_was_warned_of() -> None:
    every = (
        Warned("kl_spike", "a", 3, 9, 7, 0.5, "they differ by 0.5 [bold]nats[/bold]"),
        Warned("reward_flat", "b", 20, 20, 1, 0.0, "it does not move"),
        Warned("truncation", "b", 5, 9, 2, None, "many are cut"),
    )
    detail = replace(DETAIL, warnings=every, left_out={"alone": 3})
    lines = shown(run_view(detail)).splitlines()
    assert " kl_spike     a       3 to 9      they differ by 0.5 [bold]nats[/bold]" in lines
    assert " reward_flat  b       20          it does not move" in lines
    assert " truncation   b       5 to 9 (2)  many are cut" in lines
    assert any(line.split() == ["left", "out", "of", "updates", "3", "alone"] for line in lines)
    alone = shown(run_view(replace(DETAIL, warnings=(Warned("kl_spike", "", 3, 9, 7, 0.5, "they differ"),))))
    assert " kl_spike  3 to 9   they differ" in alone
    assert "Warnings" not in shown(run_view(DETAIL))
    assert as_json(detail)["warnings"][0]["kind"] == "kl_spike"


def test_without_runs_it_says_how_to_make_one() -> None:
    assert shown(runs_table([])).startswith("No runs yet. `vibe train")


def test_a_run_is_shown_with_what_went_wrong() -> None:
    text = shown(run_view(DETAIL))
    for part in (
        "01ARYZ6S41TSV4RRFFQ6SINGLE",
        "FAILED_NAN: loss is NaN",
        "64 eval, 128 train",
        "2 timeout",
        "heldout  1            0     before  0.250 [0.125, 0.375]  64",
        "pays idlers",
        "loss         nan",
        "rules.stones      12",
        "trainer.lockstep  yes",
        "checkpoints/step-000002",
        "curve.png",
    ):
        assert part in text, part


def test_a_comparison_shows_arms_differences_and_runs() -> None:
    arm = ArmSummary(
        "group_size=8", "tictactoe", 5, 1, 2, Interval(0.25, 0.2, 0.3, 2), None, Interval(0.5, None, None, 1)
    )
    text = shown(comparison_view(Comparison((RUN, SINGLE), {"seed": (0, 1), "trainer.kl": (None, 0.1)}, (arm,))))
    assert "group_size=8  tictactoe  5     1       2           0.250 [0.200, 0.300]  –      0.500 [n=1]" in text
    assert "seed        0         1" in text
    assert "trainer.kl  –         0.1" in text
    same = shown(comparison_view(Comparison((RUN,), {}, (arm,))))
    assert "All settings are the same." in same


def test_what_others_wrote_is_shown_and_does_nothing() -> None:
    nasty = "[bold red]hi[/] \x1b[2J\x07 \u202eevil\nsecond line"
    text = shown(runs_table([replace(SINGLE, question=nasty), replace(RUN, question=nasty, arm="[/]")]), 160)
    assert "[bold red]hi[/] [2J evil second line" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[/]" in shown(run_view(replace(DETAIL, objective="[/]", drops={"[/b]": 1})))


@given(st.text())
def test_plain_text_is_one_line_of_visible_letters(text: str) -> None:
    once = plain(text)
    assert once.splitlines() in ([], [once])
    assert plain(once) == once


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0.000"), (-0.5, "-0.500"), (1234.5, "1234.500"), (12345.0, "1.2e+04"), (0.0005, "5.0e-04"),
        (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "-∞"), (1e308, "1.0e+308"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_intervals_say_when_there_is_none() -> None:
    assert interval(Interval(0.5, 0.25, 0.75, 9)) == "0.500 [0.250, 0.750]"
    assert interval(Interval(0.5, None, None, 1)) == "0.500 [n=1]"
    assert interval(Interval(0.5, None, None, 3)) == "0.500 [n=3, alike]"
    assert interval(None) == "–"


def test_a_sparkline_has_the_shape_and_shows_what_is_not_finite() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0) == "▁▅█"
    assert sparkline([0.0, math.nan, None, 1.0], 0.0, 1.0) == "▁××█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 0.0, 1.0, width=2) == "▁█"
    assert sparkline([3.0, 3.0], 3.0, 3.0) == "▅▅"
    assert sparkline([], 0.0, 1.0) == ""


@given(st.lists(st.none() | st.floats(), max_size=60), st.integers(min_value=0, max_value=20))
def test_a_sparkline_is_never_wider_than_it_may_be(values: list[float | None], width: int) -> None:
    line = sparkline(values, -1.0, 1.0, width)
    assert len(line) == min(width, len(values))
    # A stretch with a value that is not finite is marked, so a line without a mark has none.
    if line and "×" not in line:
        assert all(value is not None and math.isfinite(value) for value in values)


def test_results_are_strict_json() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = json.dumps(as_json([DETAIL, Point(1.0, 1, -math.inf, ValueMark.NEGATIVE_INFINITY)]), allow_nan=False)
    detail, point = json.loads(text, parse_constant=refuse)
    assert detail["summary"]["status"] == "failed"
    assert detail["summary"]["created_at"] == "2026-01-02T03:04:05+00:00"
    assert detail["summary"]["before"]["reward"] == {"mean": 0.25, "low": 0.125, "high": 0.375, "n": 64}
    assert detail["metrics"]["loss"] == "NaN"
    assert point["value"] == "-Infinity"
