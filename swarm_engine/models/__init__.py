"""Names of policies, and where their weights are.

A policy is named by what ships with the package (`nano-tictactoe`, `nano-spy` …) or by a folder under the server's
model root; nothing else is ever opened. Loading is in `swarm_engine.models.loading`, it needs torch; this module does
not.
"""

from __future__ import annotations

from pathlib import Path

from swarm_engine.errors import ModelError, shown

NANO_DIR = Path(__file__).parent / "nano"
"""Tokenizer, config and start weights of the shipped policies."""

PREFIX = "nano-"
"""Of a shipped policy's name; what follows is the game it starts on."""


def shipped() -> tuple[str, ...]:
    """The names that ship with the package."""
    return tuple(sorted(PREFIX + path.stem for path in (NANO_DIR / "weights").glob("*.safetensors")))


def resolve(name: str, model_root: Path | str) -> Path:
    """Where the weights of policy `name` are: a folder in Hugging Face layout, or one file of shipped weights.

    A folder under the model root wins over a shipped name, so that a warmed-up copy can stand in for it.

    Raises:
        ModelError: no such policy, or a name that leads out of the model root or can't be a folder's.
    """
    try:
        return _find(name, Path(model_root).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"model {shown(name)} can't be a folder of the model root: {reason}", "name a folder inside it"
        ) from None


def _find(name: str, root: Path) -> Path:
    folder = (root / name).resolve()
    if not name or folder == root or not folder.is_relative_to(root):
        raise ModelError(f"model {shown(name)} leads out of the model root {root}; name a folder inside it")
    if folder.is_dir():
        return folder
    if name.startswith(PREFIX):
        weights = NANO_DIR / "weights" / f"{name.removeprefix(PREFIX)}.safetensors"
        if weights.parent == NANO_DIR / "weights" and weights.is_file():
            return weights
    folders = {path.name for path in root.iterdir() if path.is_dir()} if root.is_dir() else set()
    known = sorted({*shipped(), *folders})
    raise ModelError(f"there is no model {shown(name)}; known are {', '.join(known) or 'none'} (model root {root})")
