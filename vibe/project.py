"""What a training project holds: the game, the engine's settings and how long to train. Kept in its spec.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_serializer, field_validator

from swarm_engine.config import EngineConfig
from vibe import library
from vibe.errors import EditedError, ProjectError, UsageError
from vibe.spec import Frozen, GameSpec, RuleValue

SPEC_FILE = "spec.json"
RESULTS_FILE = "results.json"
"""In a run's folder, once the run is over."""
TRAIN_FILE = "train.py"
ENV_FILE = "env.py"
TESTS_FOLDER = "tests"
POLICY = "policy"
"""Name of the one policy that a project trains."""


class Training(Frozen):
    """How long to train and how often to measure."""

    updates: int = Field(80, ge=0, le=100_000)
    eval_every: int = Field(20, ge=1)
    """Updates between evaluations on the held-out games."""
    eval_games: int = Field(150, ge=2, le=100_000)
    """Held-out games an evaluation plays, each once."""


class ProjectSpec(GameSpec):
    """A game and everything needed to train on it."""

    config: EngineConfig = EngineConfig()
    """What the engine is started with, but for its policy, which comes from `start_weights`."""
    training: Training = Training()
    start_weights: str
    """A name from `swarm_engine.models`, or a folder under the server's model root."""

    @field_validator("config")
    @classmethod
    def _without_policies(cls, config: EngineConfig) -> EngineConfig:
        if config.policies != EngineConfig().policies:
            raise ValueError("config.policies is made from start_weights; set that")
        return config

    @field_serializer("config")
    def _dump_config(self, config: EngineConfig) -> dict[str, Any]:
        """Without the policy, which is not this config's to say."""
        return config.model_dump(mode="json", exclude={"policies"})

    def to_json(self) -> str:
        """What spec.json holds."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def load(cls, project: Path) -> Self:
        """Read a project's spec.json.

        Raises:
            ProjectError: the file is missing or does not fit.
        """
        path = project / SPEC_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ProjectError(
                f"{path} can't be read ({error.strerror}); is {project} a project that vibe wrote?"
            ) from error
        except ValidationError as error:
            raise ProjectError(f"{path} does not fit: {first_problem(error)}") from error

    def with_settings(self, changes: Mapping[str, str]) -> Self:
        """This project with some of its settings changed.

        Args:
            changes: dotted path of a field of `config` or `training` to its new value as JSON; a bare word is text.
                `trainer.group_size` is short for `config.trainer.group_size`.
        Raises:
            UsageError: a path names no setting, or its value does not fit.
        """
        data = self.model_dump(mode="json")
        for path, text in changes.items():
            keys = path.split(".")
            if keys[0] not in {"config", "training"}:
                keys = ["config", *keys]
            where: Any = data
            for key in keys[:-1]:
                where = where.get(key) if isinstance(where, dict) else None
            if not isinstance(where, dict) or keys[-1] not in where:
                known = ", ".join(sorted(where)) if isinstance(where, dict) else "config.…, training.…"
                raise UsageError(f"there is no setting {path!r}; at that place there are: {known}")
            where[keys[-1]] = _value(text)
        try:
            return type(self).model_validate(data)
        except ValidationError as error:
            raise UsageError(f"--set: {first_problem(error)}") from error


def code_of(project: Path) -> dict[str, str]:
    """SHA-256 of every file that a project's games, rewards and calls are made of, by its path there.

    Its Python files, those of folders in it too: Python imports from a folder without `__init__.py` as well. Not
    train.py, which says when to measure, nor tests, nor what env.py may read as data.
    """
    found: dict[str, str] = {}
    folders, seen = [project], {project.resolve()}
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                is_package = (path / "__init__.py").is_file()
                may_be_imported = is_package or (path.name.isidentifier() and path != project / TESTS_FOLDER)
                if may_be_imported and path.resolve() not in seen:  # a link may lead back
                    seen.add(path.resolve())
                    folders.append(path)
            elif path.suffix == ".py" and path != project / TRAIN_FILE and path.is_file():
                found[path.relative_to(project).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def refuse_if_edited(then: Mapping[str, str], now: Mapping[str, str], what: str) -> None:
    """See that a project's code is what it was.

    A folder without `__init__.py` of which nothing was known then is no edit: it comes last where Python looks, so only
    a file that was edited imports it. Earlier versions knew of no such folder.

    Args:
        then, now: what `code_of` said of it.
        what: the run that began with the code of then, for the message.
    Raises:
        EditedError: a file differs, is new or is gone.
    """
    known = {name.rpartition("/")[0] for name in then} | {""}

    def is_unused(name: str) -> bool:
        folder = name.rpartition("/")[0]
        return folder not in known and f"{folder}/__init__.py" not in now

    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if changed := [name for name in changed if not is_unused(name)]:
        raise EditedError(
            f"{', '.join(changed)} changed since {what} was begun: rewards of two games would mix in one record; put "
            "it back as it was to go on, or start the edited project in a folder of its own: --run-dir"
        )


def project_for(game: GameSpec, *, config: EngineConfig | None = None, training: Training | None = None) -> ProjectSpec:
    """The project that trains on a game, with the settings it is known to learn with."""
    template = library.load(game.template)
    return ProjectSpec(
        **game.model_dump(),
        config=config or EngineConfig(),
        training=training or Training(),
        start_weights=template.start_weights,
    )


def game_of(template: str, **rules: RuleValue) -> GameSpec:
    """A game that a program names, without a description.

    Raises:
        UsageError: no such template or rule, or a value that does not fit.
    """
    about = library.load(template)
    return GameSpec(title=about.title, template=about.name, template_version=about.version, rules=about.rules(**rules))


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """`PATH=VALUE` texts of a command line as what `ProjectSpec.with_settings` takes.

    Raises:
        UsageError: one holds no `=`.
    """
    changes: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set takes PATH=VALUE, it got {text!r}; for example --set trainer.group_size=4")
        changes[path.strip()] = value.strip()
    return changes


def first_problem(error: ValidationError) -> str:
    """The first of a model's complaints in one line: where, what, and the value."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the whole"
    return f"{where}: {problem['msg']} (it is {problem['input']!r})"


def _value(text: str) -> Any:
    """A setting as typed on a command line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of 5,000 digits is no JSONDecodeError
        return text
