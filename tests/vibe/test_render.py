"""A project: the same spec gives the same files, a stated number changes them, nothing of the user's is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vibe import library, render
from vibe.brain import OfflineBrain
from vibe.errors import ProjectError, UsageError
from vibe.project import ProjectSpec, Training, project_for

SENTENCE = "Who is the spy: four players get a word, one of them a similar one; everyone describes it, then all vote"


def spec_of(description: str) -> ProjectSpec:
    return project_for(OfflineBrain().read(description))


@pytest.mark.parametrize("template", library.names())
def test_every_template_becomes_a_project_whose_readme_says_how_to_check_and_play_it(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = render.render(spec_of(library.load(template).examples[0]))
    render.write(files, tmp_path / "game")
    monkeypatch.chdir(tmp_path / "game")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a user of the project needs none of ours
    _, _, section = files["README.md"].partition("## Check it, play it")
    command, game, *_ = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section.lstrip("\n"), re.MULTILINE)
    assert command.split() == ["python", "-m", "pytest", "tests"]
    checked = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout[-2000:]
    exec(textwrap.dedent(game), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("template", library.names())
def test_what_is_written_passes_the_linter_and_compiles(template: str, tmp_path: Path) -> None:
    files = render.render(spec_of(library.load(template).examples[0]))
    render.write(files, tmp_path / "game")
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    for command in (
        ["check", "--select", "E,F,W,I,B", "--line-length", "120"],
        ["format", "--check", "--line-length", "120"],
    ):
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", str(tmp_path / "game")],
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_same_spec_gives_the_same_bytes() -> None:
    assert render.content_hash(render.render(spec_of(SENTENCE))) == render.content_hash(
        render.render(spec_of(SENTENCE))
    )


def test_a_stated_number_changes_the_project() -> None:
    four, five = render.render(spec_of(SENTENCE)), render.render(spec_of(SENTENCE.replace("four", "five")))
    assert four["spec.json"] != five["spec.json"]
    assert "with 4 players" in four["train.py"]
    assert "with 5 players" in five["train.py"]
    assert "with 5 players" in five["README.md"]


def test_the_readme_says_which_words_became_which_rule_and_which_did_not() -> None:
    readme = render.render(spec_of(SENTENCE + ". Everybody has 30 seconds."))["README.md"]
    assert 'from "four players": players = 4' in readme
    assert 'not used, "30 seconds"' in readme
    assert f"> {SENTENCE}" in readme


def test_a_project_reads_back_as_the_spec_it_was_written_from(tmp_path: Path) -> None:
    spec = spec_of(SENTENCE)
    render.write(render.render(spec), tmp_path / "game")
    assert ProjectSpec.load(tmp_path / "game") == spec


def test_writing_the_same_project_again_changes_nothing(tmp_path: Path) -> None:
    files = render.render(spec_of(SENTENCE))
    assert render.write(files, tmp_path / "game") is True
    before = {path: os.stat(tmp_path / "game" / path).st_mtime_ns for path in files}
    (tmp_path / "game" / "runs").mkdir()
    assert render.write(files, tmp_path / "game") is False
    assert before == {path: os.stat(tmp_path / "game" / path).st_mtime_ns for path in files}


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("months of work", encoding="utf-8")
    with pytest.raises(ProjectError, match=r"not empty and holds no project.*--out"):
        render.write(render.render(spec_of(SENTENCE)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_edited_project_is_overwritten_only_by_force(tmp_path: Path) -> None:
    files = render.render(spec_of(SENTENCE))
    render.write(files, tmp_path / "game")
    mine = tmp_path / "game" / "rewards.py"
    mine.write_text("REWARD = 1\n", encoding="utf-8")
    with pytest.raises(ProjectError, match=r"rewards\.py.*as it is with `vibe train .*`.*--force"):
        render.write(files, tmp_path / "game")
    assert mine.read_text(encoding="utf-8") == "REWARD = 1\n"
    assert render.write(files, tmp_path / "game", force=True) is True
    assert mine.read_text(encoding="utf-8") == files["rewards.py"]
    (tmp_path / "game" / "train.py").unlink()
    with pytest.raises(ProjectError, match=r"\(files are missing\); name a new folder"):
        render.write(files, tmp_path / "game")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "game").write_text("a file", encoding="utf-8")
    with pytest.raises(ProjectError, match="is a file"):
        render.write(render.render(spec_of(SENTENCE)), tmp_path / "game")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ProjectError, match=r"No space left on device.*make room"):
        render.write(render.render(spec_of(SENTENCE)), tmp_path / "game")
    assert not [path for path in (tmp_path / "game").rglob("*") if path.is_file()]


def test_a_setting_is_changed_by_its_path() -> None:
    spec = spec_of(SENTENCE).with_settings(
        {"trainer.group_size": "4", "training.updates": "3", "config.lockstep": "true"}
    )
    assert spec.config.trainer.group_size == 4
    assert spec.training == Training(updates=3)
    assert spec.config.lockstep is True


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.group_sise", "4", "group_size"),
        ("trainer.group_size", "1", "greater than or equal to 2"),
        ("trainer.group_size", "many", "many"),
        ("training.updates", "-1", "greater than or equal to 0"),
        ("nothing.at.all", "1", "there is no setting"),
    ],
)
def test_a_setting_that_is_none_or_does_not_fit_is_refused(path: str, value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec_of(SENTENCE).with_settings({path: value})
