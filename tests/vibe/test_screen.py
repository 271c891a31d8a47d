"""What a person sees while a training runs and when it is over."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from vibe import screen
from vibe.training import event_of

SPEC = {
    "config": {"seed": 0, "trainer": {"tasks_per_update": 8, "group_size": 8}},
    "training": {"updates": 2, "eval_games": 9},
}
BEFORE, AFTER = (
    {"event": "evaluation", "label": label, "step": step, "temperature": 1, "mean": mean, "ci": ci, "n_groups": 9}
    for label, step, mean, ci in (("before", 0, 0.2, [0.1, 0.3]), ("after", 2, 0.8, [0.7, 0.9]))
)
STEP: dict[str, Any] = {"updates": 2, "drops": {}, "seconds": 1.5}
EVENTS: list[dict[str, Any]] = [
    {"event": "begin", "spec": SPEC},
    {"event": "level", "player": "random", "mean": 0.5, "ci": [0.4, 0.6], "n_groups": 9},
    {"event": "variance", "share": 0.75, "n_groups": 12, "limit": 1 / 3},
    BEFORE,
    {"event": "step", "step": 1, "metrics": {"reward_mean": 0.25, "entropy": 0.9}, **STEP},
    {"event": "step", "step": 2, "metrics": {"reward_mean": None, "entropy": None}, **STEP},
    AFTER,
    {"event": "result", "path": "results.json", "seconds": 12.0},
    {"event": "something a later version says"},
]  # fmt: skip


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=is_terminal, color_system=None)


def shown(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def test_a_terminal_sees_the_curve_grow_and_the_levels_stay() -> None:
    on = console(is_terminal=True)
    with screen.screen(on, "Nim", 2, as_json=False) as view:
        for event in EVENTS:
            view.show(event)
    assert "●" in shown(on)
    assert "before (step 0), temperature 1: 0.200 [0.100, 0.300] over 9 held-out games" in shown(on)
    assert "step    2/2" in shown(on)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_an_update_warns_of_is_said_once_and_its_kind_stays_as_long_as_it_lasts(is_terminal: bool) -> None:
    ill = {"event": "step", "step": 1, "metrics": {}, **STEP, "health": [{"kind": "zero_variance", "message": "…"}]}
    on = console(is_terminal=is_terminal)
    with screen.screen(on, "Nim", 2, as_json=False) as view:
        view.show(ill)
        view.show({"event": "warning", "step": 1, "name": "zero_variance", "text": "90% of the groups"})
        assert isinstance(view, screen.LiveScreen) == is_terminal
        if isinstance(view, screen.LiveScreen):
            assert "warning: zero variance" in rendered(view)
            view.show({**ill, "step": 2, "health": []})
            assert "warning: zero variance" not in rendered(view)
    assert shown(on).count("warning after step 1: 90% of the groups") == 1


def rendered(view: screen.LiveScreen) -> str:
    on = console(is_terminal=True)
    on.print(view._drawn())
    return shown(on)


def test_a_pipe_gets_a_line_an_event() -> None:
    on = console(is_terminal=False)
    with screen.screen(on, "Nim", 2, as_json=False) as view:
        for event in EVENTS:
            view.show(event)
    lines = shown(on).splitlines()
    assert len(lines) == 7
    assert lines[1] == "random play: 0.500 [0.400, 0.600] over 9 games"


def test_json_passes_every_event_on_but_the_inner_result(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.screen(console(is_terminal=False), "Nim", 2, as_json=True) as view:
        for event in EVENTS:
            view.show(event)
    assert len(capsys.readouterr().out.splitlines()) == len(EVENTS) - 1


def test_what_a_model_wrote_is_text_and_steers_no_terminal() -> None:
    on = console(is_terminal=True)
    moves = [{"seat": "player", "text": "[bold]5[/bold]\x1b[2J", "note": "a\nb"}]
    for panel in screen.games([moves]):
        on.print(panel)
    assert "[bold]5[/bold]�[2J" in shown(on)
    assert "\x1b[2J" not in shown(on)


def test_the_table_has_before_and_after_beside_the_scripted_levels() -> None:
    on = console(is_terminal=False)
    evaluations = [event for event in EVENTS if event["event"] == "evaluation"]
    on.print(screen.results(evaluations, [event for event in EVENTS if event["event"] == "level"]))
    row = next(line for line in shown(on).splitlines() if "temperature 1" in line)
    assert "0.200 [0.100, 0.300]" in row
    assert "0.800 [0.700, 0.900]" in row
    assert "random legal play" in shown(on)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("hi \x1b[2J", id="text"),
        pytest.param('{"event": "phase"}', id="no text"),
        pytest.param('{"event": [1]}', id="no name"),
        pytest.param('{"event": "step", "step": 1}', id="no metrics"),
        pytest.param('{"event": "evaluation", "temperature": "warm", "label": 1}', id="other types"),
        pytest.param('{"event": "a", "b": "\\ud83c"}', id="half a pair"),
        pytest.param("[]", id="list"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("1" * 5000, id="long"),
    ],
)
@pytest.mark.parametrize("kind", ["terminal", "file", "json"])
def test_what_the_code_of_a_project_prints_is_shown_as_text_and_ends_nothing(
    line: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = console(is_terminal=kind == "terminal")
    event = event_of(line + "\n")
    with screen.screen(on, "Nim", 2, as_json=kind == "json") as view:
        view.show(event)
    assert event == {"event": "phase", "text": line.replace("\x1b", "\N{REPLACEMENT CHARACTER}")}
    assert line[:3] in (capsys.readouterr().out if kind == "json" else shown(on))
