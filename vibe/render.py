"""From a spec to the files of a project: the template's own code, and what is written around it.

Pure until `write`: the same spec and the same template give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from vibe import library
from vibe.errors import ProjectError
from vibe.project import SPEC_FILE, ProjectSpec
from vibe.run_folder import make_folder

COPIED = ("env.py", "rewards.py", "players.py", "workflow.py")
"""Files that a project takes as they are: its template's own, or else the one that all templates share."""


def render(spec: ProjectSpec) -> dict[str, str]:
    """The files of a project: path relative to its folder to text."""
    template = library.load(spec.template)
    scaffold = resources.files("vibe") / "scaffold"
    values = {"spec": spec, "template": template, "config": spec.config, "training": spec.training}
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)

    def fill(source: Traversable) -> str:
        return page.from_string(source.read_text(encoding="utf-8")).render(values)

    def copied(name: str) -> str:
        own = template.path / name
        return (own if own.exists() else library.root() / name).read_text(encoding="utf-8")

    files = {name: copied(name) for name in COPIED}
    files["train.py"] = fill(scaffold / "train.py.j2")
    pages = (template.path / "README.md.j2", scaffold / "use.md.j2", scaffold / "rules.md.j2")
    files["README.md"] = "".join(map(fill, pages))
    files["tests/test_game.py"] = fill(template.path / "test_game.py.j2")
    files[SPEC_FILE] = spec.to_json()
    return dict(sorted(files.items()))


def content_hash(files: Mapping[str, str]) -> str:
    """SHA-256 over paths and texts, in hexadecimal: equal exactly when the projects are."""
    digest = hashlib.sha256()
    for path, text in sorted(files.items()):
        for part in (path.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def write(files: Mapping[str, str], folder: Path, *, force: bool = False) -> bool:
    """Write a project; returns False where the folder holds it already, unchanged.

    Args:
        force: overwrite the project's files in a folder that holds something else; other files stay.
    Raises:
        ProjectError: the folder holds something else, or can't be written.
    """
    try:
        there = {path: (folder / path).read_bytes() for path in files if (folder / path).is_file()}
        if len(there) == len(files) and all(there[path] == text.encode() for path, text in files.items()):
            return False
        if folder.exists() and not force:
            if not folder.is_dir():
                raise ProjectError(f"{folder} is a file; name a folder with --out")
            if any(folder.iterdir()):
                raise ProjectError(_refusal(folder, files, there))
        for path, text in files.items():
            _write_whole(folder / path, text)
    except OSError as error:
        raise ProjectError(
            f"the project can't be written to {folder}: {error.strerror or error}; "
            "make room there or name another folder with --out"
        ) from error
    return True


def _refusal(folder: Path, files: Mapping[str, str], there: Mapping[str, bytes]) -> str:
    changed = sorted(path for path, old in there.items() if old != files[path].encode())
    if not there:
        return (
            f"{folder} is not empty and holds no project; name a new folder with --out, or add --force to write into it"
        )
    as_it_is = "" if len(there) < len(files) else f"train it as it is with `vibe train {folder}`, "
    return (
        f"{folder} holds another version of this project ({', '.join(changed) or 'files are missing'}); "
        f"{as_it_is}name a new folder with --out, or add --force to overwrite these files"
    )


def _write_whole(path: Path, text: str) -> None:
    """All of a file or nothing of it, also when the disk fills up."""
    make_folder(path.parent)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
