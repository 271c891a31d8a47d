"""What `vibe new` and `vibe templates` do: read a description, write the project, list what can be described.

Apart from `training`, for whoever trains nothing does not wait for the database.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments_db.home import home_folder
from vibe import library, render, screen
from vibe.brain import BRAINS
from vibe.errors import ProjectError, UsageError
from vibe.project import ENV_FILE, SPEC_FILE, TRAIN_FILE, ProjectSpec, code_of, project_for

PROJECTS = "projects"
"""Folder of A3R_HOME."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user typed."""

    description: str
    project: Path | None = None
    """Folder of the project to take as it is; None writes one for the description."""
    brain: str = "offline"
    out: Path | None = None
    """Folder of the project; None takes one in A3R_HOME, named by the game and the content."""
    run_dir: Path | None = None
    swarm_url: str | None = None
    token_file: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Dotted path of a setting to its value as JSON."""
    force: bool = False
    goes_on: bool = False
    """Train on where nothing can be learned any more."""
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A project on disk."""

    spec: ProjectSpec
    folder: Path
    sha256: str
    edited: Mapping[str, str] = field(default_factory=dict)
    """The code that is not the template's: file to the beginning of its SHA-256, or to "gone"."""


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


def project_named(text: str) -> Path | None:
    """The project's folder that a text names, or None where it is a description.

    It names a folder where there is a project of that name, and where it is written as a path: with a slash and
    without a blank, or from `./`, `../`, `~/` or `/` on.

    Raises:
        ProjectError: it is a path, and no project is there.
    """
    is_path = text in (".", "..", "~") or text.startswith(("./", "../", "~/", "/", f".{os.sep}", f"..{os.sep}"))
    is_path = is_path or (any(sep in text for sep in ("/", os.sep)) and not any(map(str.isspace, text)))
    folder = Path(text).expanduser() if is_path else Path(text)
    try:
        lacking = [name for name in (SPEC_FILE, TRAIN_FILE, ENV_FILE) if not (folder / name).is_file()]
        if not lacking:
            return folder
        if not is_path and (SPEC_FILE in lacking or not folder.is_dir()):
            return None
        if not folder.exists():
            problem = "is not there"
        elif not folder.is_dir():
            problem = "is a file"
        else:
            problem = f"holds no project, {lacking[0]} is missing"
    except (OSError, ValueError):  # longer than any name of a file, or with a zero byte in it
        return None
    raise ProjectError(
        f"{text} {problem}; name the folder of a project, or describe the game in words: vibe train "
        '"tic-tac-toe against a random opponent"'
    )


def take(request: Request, folder: Path) -> Written:
    """Take the project in a folder as it is; prints which, and what in it was edited.

    Raises:
        UsageError: the request holds what belongs to a description; or a setting does not fit.
        ProjectError: its spec.json can't be read.
    """
    if request.out is not None or request.force:
        flag = "--out" if request.out is not None else "--force"
        raise UsageError(
            f"{flag} goes with a description; the project in {folder} is trained where it is, leave it out"
        )
    own = ProjectSpec.load(folder)
    spec = own.with_settings(request.settings)
    template = render.render(own)
    files = {path: file.read_bytes().decode(errors="replace") for path in template if (file := folder / path).is_file()}
    now, then = code_of(folder), {path: hashlib.sha256(text.encode()).hexdigest() for path, text in template.items()}
    edited = {
        path: now[path][:12] if path in now else "gone"
        for path in sorted(now.keys() | set(render.COPIED))
        if now.get(path) != then.get(path)
    }
    sha = render.content_hash(files | edited)
    if request.as_json:
        event = {"event": "project", "path": str(folder), "sha256": sha, "is_new": False, "edited": sorted(edited)}
        screen.emit(event)
    else:
        not_its_own = f"; not as its template has it: {', '.join(edited)}" if edited else ""
        Console().print(Text(f"Training the project in {folder} ({spec.title}){not_its_own}"), soft_wrap=True)
    return Written(spec, folder, sha, edited)


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
