"""The coder's bench: an arm of a plan becomes a training project, through vibe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from a3r.errors import A3RError, QuestionError
from a3r.prereg.plan import Arm, Level, Plan
from swarm_engine.config import EngineConfig
from vibe import library, render
from vibe.errors import VibeError
from vibe.project import ProjectSpec, Training, first_problem


class Workshop(Protocol):
    """Makes training projects."""

    def template_sha(self, plan: Plan) -> str:
        """Hash of the template's files."""
        ...

    def build(self, plan: Plan, arm: Arm, folder: Path) -> str:
        """Write the project of an arm into a folder; returns the hash of its files. Twice is once."""
        ...


class VibeWorkshop:
    """Renders the built-in templates."""

    def template_sha(self, plan: Plan) -> str:
        """See `Workshop.template_sha`."""
        folder = library.load(plan.template.name).path
        files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
        return render.content_hash(files)

    def build(self, plan: Plan, arm: Arm, folder: Path) -> str:
        """See `Workshop.build`.

        Raises:
            A3RError: the project can't be written.
        """
        try:
            files = render.render(project_spec(plan, arm))
            # A crash may have left half a project here; the same spec gives the same files, so writing over it is safe.
            render.write(files, folder, force=True)
        except VibeError as error:
            raise A3RError(str(error)) from error
        return render.content_hash(files)


def refuse_impossible(plan: Plan) -> None:
    """See that every arm is a game that can be played, before anything is written.

    Raises:
        QuestionError: the rules of an arm do not go together.
    """
    for arm in plan.arms:
        try:
            project_spec(plan, arm)
        except ValidationError as error:
            raise QuestionError(f"{arm.key} can't be trained: {first_problem(error)}") from error
        except VibeError as error:
            raise QuestionError(
                f"{arm.key} can't be played with the other rules as they are: {error}. State the other rule too, as in "
                "`with a size of 4`"
            ) from error


def project_spec(plan: Plan, arm: Arm) -> ProjectSpec:
    """The training project of an arm. The run's seed is given at launch."""
    template = library.load(plan.template.name)
    sections = nested(plan.settings_of(arm))
    return ProjectSpec(
        title=f"{template.title}, {plan.factor.label} {arm.level}",
        template=template.name,
        template_version=template.version,
        rules=template.rules(**{**plan.controls.rules, **arm.rules}),
        assumptions=tuple(assumption.text for assumption in plan.assumptions),
        # One thread a worker: runs share the cores between them, not within them.
        config=EngineConfig.model_validate({"trainer": sections["trainer"], "num_threads": 1}),
        training=Training.model_validate(sections["training"]),
        start_weights=plan.template.start_weights,
    )


def nested(settings: Mapping[str, Level | None]) -> dict[str, dict[str, Any]]:
    """Dotted paths as sections."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections
