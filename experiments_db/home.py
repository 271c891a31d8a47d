"""Where the state is that outlives a command: the folder A3R_HOME and the experiment log in it.

Rows name places in it relative to it (`stored`), and `place` finds them again, so a home that was moved or copied goes
on.

Apart from `engine`, for whoever only asks where to write does not wait a second for SQLAlchemy and the tables.
"""

from __future__ import annotations

import os
from pathlib import Path

from experiments_db.errors import UnavailableError

HOME_VARIABLE = "A3R_HOME"
DEFAULT_HOME = ".a3r"
FILE_NAME = "experiments.db"
FOLDERS = frozenset({"jobs", "projects", "runs", "studies"})
"""Folders of a home that rows name places in."""


def home_folder(home: Path | str | None = None) -> Path:
    """The folder that holds all state: as given, else A3R_HOME, else `.a3r` in the current folder. Not created here.

    Raises:
        UnavailableError: it begins with `~` and a name that no user has, holds a question mark, which begins the
            settings of a database's URL, or is named from a current folder that was removed.
    """
    folder = Path(home or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
    try:
        found = folder.expanduser().absolute()
    except RuntimeError as error:
        raise UnavailableError(f"{folder} begins with an unknown user; set {HOME_VARIABLE} to a whole path") from error
    except FileNotFoundError as error:
        raise UnavailableError(
            f"the current folder was removed, so {folder} is nowhere; go to a folder that is there, or set "
            f"{HOME_VARIABLE} to a whole path"
        ) from error
    if "?" in str(found):
        raise UnavailableError(f"{found} holds a question mark; set {HOME_VARIABLE} to a folder without one")
    return found


def stored(path: Path, home: Path) -> str:
    """A place as a row names it: relative to the home where it lies inside, else whole."""
    for whole, root in ((path.absolute(), home.absolute()), (path.resolve(), home.resolve())):
        if whole.is_relative_to(root):
            return whole.relative_to(root).as_posix()
    return str(path.absolute())


def place(stored: str, home: Path) -> Path:
    """Where a place that a row names lies now.

    Rows of earlier versions hold whole paths, of a home that may since have been moved, or copied and still be there.
    Such a path is known by the folder of a home in it; a run folder outside of any home stays what it is.

    Args:
        home: the home that is open.
    """
    path = Path(stored)
    if not path.is_absolute():
        return home / path
    if path.is_relative_to(home):
        return path
    for index, name in enumerate(path.parts[:-1]):
        if name in FOLDERS and (home / name / path.parts[index + 1]).exists():
            was_home = (Path(*path.parts[:index]) / FILE_NAME).exists()
            return home.joinpath(*path.parts[index:]) if was_home or not path.exists() else path
    return path
