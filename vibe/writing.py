"""What `vibe new` and `vibe templates` do: read a description, write the project, list what can be described.

Apart from `training`, for whoever trains nothing does not wait for the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments_db.home import home_folder
from vibe import library, render, screen
from vibe.brain import BRAINS
from vibe.project import ProjectSpec, project_for

PROJECTS = "projects"
"""Folder of A3R_HOME."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user typed."""

    description: str
    brain: str = "offline"
    out: Path | None = None
    """Folder of the project; None takes one in A3R_HOME, named by the game and the content."""
    run_dir: Path | None = None
    swarm_url: str | None = None
    token_file: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Dotted path of a setting to its value as JSON."""
    force: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A project on disk."""

    spec: ProjectSpec
    folder: Path
    sha256: str


def write_from_words(request: Request) -> Written:
    """Read a description and write its project; prints what became of every sentence."""
    console = Console()
    game = BRAINS[request.brain]().read(request.description)
    spec = project_for(game).with_settings(request.settings)
    files = render.render(spec)
    sha256 = render.content_hash(files)
    folder = request.out or home_folder() / PROJECTS / f"{spec.template}-{sha256[:8]}"
    is_new = render.write(files, folder, force=request.force)
    if request.as_json:
        screen.emit({"event": "spec", **game.model_dump(mode="json")})
        screen.emit({"event": "project", "path": str(folder), "sha256": sha256, "is_new": is_new})
    else:
        console.print(screen.reading(game))
        console.print(Text(f"The project is in {folder}" + ("" if is_new else " (it was there already)")))
    return Written(spec, folder, sha256)


def show_templates(*, as_json: bool) -> None:
    """Every game there is, with its rules and their ranges."""
    templates = [library.load(name) for name in library.names()]
    if as_json:
        for template in templates:
            knobs = {
                knob.name: {
                    "default": knob.default,
                    "meaning": knob.meaning,
                    **({"choices": list(knob.choices)} if knob.choices else {"low": knob.low, "high": knob.high}),
                }
                for knob in template.knobs
            }
            screen.emit({"event": "template", "name": template.name, "title": template.title, "rules": knobs})
        return
    table = Table("template", "describe it like this", "rules")
    for template in templates:
        rules = [
            f"{knob.name}: {', '.join(knob.choices) if knob.choices else f'{knob.low} to {knob.high} {knob.unit}'}"
            for knob in template.knobs
        ]
        table.add_row(template.name, Text(template.examples[0]), Text("\n".join(rules)))
    Console().print(table)
