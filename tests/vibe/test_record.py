"""What a run says is kept, and a run that was cut off goes on from it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from vibe.errors import UsageError
from vibe.record import RECORD_FILE, Record, read


def test_an_event_is_on_disk_and_on_screen(tmp_path: Path) -> None:
    out = io.StringIO()
    Record(tmp_path, as_json=True, out=out).emit("level", player="random", mean=0.5, ci=[0.4, 0.6], n_groups=20)
    assert json.loads(out.getvalue()) == {
        "event": "level", "player": "random", "mean": 0.5, "ci": [0.4, 0.6], "n_groups": 20,
    }  # fmt: skip
    assert list(read(tmp_path / RECORD_FILE)) == [json.loads(out.getvalue())]


def test_a_number_that_json_has_no_word_for_becomes_null(tmp_path: Path) -> None:
    out = io.StringIO()
    Record(tmp_path, as_json=True, out=out).emit("step", metrics={"loss": float("nan")}, ci=(float("-inf"), 1.0))
    assert json.loads(out.getvalue()) == {"event": "step", "metrics": {"loss": None}, "ci": [None, 1.0]}


def test_people_read_a_sentence(tmp_path: Path) -> None:
    out = io.StringIO()
    record = Record(tmp_path, as_json=False, out=out)
    record.emit("evaluation", label="before", step=0, temperature=0, mean=0.25, ci=[0.2, 0.3], n_groups=150)
    metrics = {"reward_mean": None, "entropy": 0.5}
    record.emit("step", step=3, updates=40, metrics=metrics, drops={}, seconds=1.25)
    record.emit("step", step=4, updates=40, metrics={"skipped": 1.0}, drops={"zero_variance": 32}, seconds=1.25)
    assert out.getvalue().splitlines() == [
        "before (step 0), greedy: 0.250 [0.200, 0.300] over 150 held-out games",
        "step    3/40  reward     –  entropy 0.500  1.2 s",
        "step    4/40  reward     –  entropy     –  1.2 s  nothing trained: 32 episodes in groups of equal reward",
    ]


def test_a_new_record_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    Record(tmp_path, as_json=True, out=io.StringIO()).emit("evaluation", label="before", temperature=1, mean=0.5)
    again = Record(tmp_path, as_json=True, out=io.StringIO())
    assert again.find("evaluation", label="before", temperature=1) == {
        "event": "evaluation", "label": "before", "temperature": 1, "mean": 0.5,
    }  # fmt: skip
    assert again.find("evaluation", label="after") is None


def test_a_line_that_a_power_cut_tore_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    Record(tmp_path, as_json=True, out=io.StringIO()).emit("step", step=1)
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write('{"event": "st')
    Record(tmp_path, as_json=True, out=io.StringIO()).emit("step", step=2)
    assert [event["step"] for event in read(tmp_path / RECORD_FILE)] == [1, 2]


def test_a_record_that_is_none_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text("{}\nshopping list\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 2 is no event.*--run-dir"):
        Record(tmp_path, as_json=True, out=io.StringIO())


def test_a_line_separator_in_what_a_model_wrote_ends_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    Record(tmp_path, as_json=True, out=io.StringIO()).emit("phase", text=text)
    assert [event["text"] for event in read(tmp_path / RECORD_FILE)] == [text]
