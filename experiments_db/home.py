"""Where the state is that outlives a command: the folder A3R_HOME and the experiment log in it.

Apart from `engine`, for whoever only asks where to write does not wait a second for SQLAlchemy and the tables.
"""

from __future__ import annotations

import os
from pathlib import Path

from experiments_db.errors import UnavailableError

HOME_VARIABLE = "A3R_HOME"
DEFAULT_HOME = ".a3r"
FILE_NAME = "experiments.db"


def home_folder(home: Path | str | None = None) -> Path:
    """The folder that holds all state: as given, else A3R_HOME, else `.a3r` in the current folder. Not created here.

    Raises:
        UnavailableError: it begins with `~` and a name that no user has, or holds a question mark, which begins the
            settings of a database's URL.
    """
    folder = Path(home or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
    try:
        found = folder.expanduser().absolute()
    except RuntimeError as error:
        raise UnavailableError(f"{folder} begins with an unknown user; set {HOME_VARIABLE} to a whole path") from error
    if "?" in str(found):
        raise UnavailableError(f"{found} holds a question mark; set {HOME_VARIABLE} to a folder without one")
    return found


def default_url(home: Path | str | None = None) -> str:
    """URL of the database in the home folder."""
    return f"sqlite:///{home_folder(home) / FILE_NAME}"
