"""Places in a home: what rows name them by, and where they are once the home was moved or copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments_db.home import place, stored

names = st.sampled_from(["runs", "01M8QB", "group_size=4-s1", "a b", "hömë", "jobs", "x"])
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: Path(*parts))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a run and a study in it."""
    made = tmp_path / "a hömë"
    for folder in ("runs/01RUN", "studies/01STUDY/runs/group_size=4-s1", "jobs/01STUDY-s1.1"):
        (made / folder).mkdir(parents=True)
    (made / "experiments.db").touch()
    return made


@given(inside=paths)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_names_a_place_in_the_home_relative_to_it_and_finds_it_in_any_other(tmp_path: Path, inside: Path) -> None:
    assert stored(tmp_path / inside, tmp_path) == inside.as_posix()
    assert place(stored(tmp_path / inside, tmp_path), Path("/another")) == Path("/another") / inside


@given(outside=paths)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_folder_outside_of_any_home_stays_what_it_is(home: Path, outside: Path) -> None:
    elsewhere = home.parent / "elsewhere" / outside
    assert stored(elsewhere, home) == str(elsewhere)
    assert place(str(elsewhere), home) == elsewhere


INSIDE = (
    "runs/01RUN", "runs/01RUN/train.log", "studies/01STUDY/runs/group_size=4-s1",
    "studies/01STUDY/runs/not-there-yet", "jobs/01STUDY-s1.1/stdout.log",
)  # fmt: skip


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("old", ["/old/home", "/runs/x/home", "/old/studies/01STUDIES", "/jobs"])
def test_a_whole_path_of_a_home_that_was_moved_is_found_in_the_one_that_is_open(
    home: Path, old: str, inside: str
) -> None:
    assert place(f"{old}/{inside}", home) == home / inside
    assert place(str(place(f"{old}/{inside}", home)), home) == home / inside


def test_a_copied_home_has_its_own_places_while_the_original_is_still_there(home: Path) -> None:
    copy = home.parent / "copy"
    shutil.copytree(home, copy)
    for inside in INSIDE:
        assert place(str(home / inside), copy) == copy / inside
        assert place(str(home / inside), home) == home / inside


def test_a_run_folder_that_was_copied_out_of_the_home_is_another_one(home: Path, tmp_path: Path) -> None:
    fast = tmp_path / "fast" / "runs" / "01RUN"
    fast.mkdir(parents=True)
    assert place(str(fast), home) == fast


def test_a_home_that_is_reached_by_a_link_is_the_same_home(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    assert stored(link / "runs/01RUN", home) == stored(home / "runs/01RUN", link) == "runs/01RUN"
    assert place(str(home / "runs/01RUN"), link) == link / "runs/01RUN"
    (home / "runs").rename(tmp_path / "big disk")
    (home / "runs").symlink_to(tmp_path / "big disk")
    assert stored(home / "runs/01RUN", home) == "runs/01RUN"
