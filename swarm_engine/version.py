"""The version that is installed: what `--version` of every command prints and every server says of itself."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

DISTRIBUTION = "a3r"


@cache
def installed_version() -> str:
    """The distribution's version; `unknown` where it runs from a folder that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def _show(is_asked: bool) -> None:
    if is_asked:
        print(f"{DISTRIBUTION} {installed_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show, is_eager=True, help="Print the version and exit.")
]
