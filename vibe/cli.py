"""The command `vibe`: from a game in plain words to a trained policy.

vibe train "Who is the spy: four players get a word, one of them a similar one; everyone describes it, then all vote"
vibe new "Nim with 15 stones" --out nim       writes the project and trains nothing
vibe train ./nim                              trains a project as it is, edited or not
vibe templates                                what can be described
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarm_engine.version import VersionOption

app = typer.Typer(
    name="vibe",
    help="From a game in plain words to a training project and a trained policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class BrainName(StrEnum):
    """Who reads the description."""

    OFFLINE = "offline"


Game = Annotated[str, typer.Argument(help="The game, in plain words; or the folder of a project.", show_default=False)]
Description = Annotated[str, typer.Argument(help="The game, in plain words.", show_default=False)]
Brain = Annotated[BrainName, typer.Option(help="Who reads the description.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the project; by default one in A3R_HOME/projects.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run: its games and every sampled token.")]
TrainSeed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of the run: its games and every sampled token. By default the project's, or 0."),
]
Updates = Annotated[int | None, typer.Option(min=0, help="Optimizer updates.")]
EvalEvery = Annotated[int | None, typer.Option(min=1, help="Updates between evaluations on the held-out games.")]
EvalGames = Annotated[int | None, typer.Option(min=2, help="Held-out games of an evaluation.")]
Change = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="e.g. trainer.group_size=4")]
GoOn = Annotated[bool, typer.Option("--go-on", help="Train on where nothing can be learned any more.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the project's files in a folder that holds others.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON line an event, and the result last.")]
Swarm = Annotated[str | None, typer.Option(metavar="URL", help="Train on this swarm instead of one of its own.")]
TokenFile = Annotated[Path | None, typer.Option(help="The token.json of --swarm.")]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the run; an interrupted one goes on. By default a new one in A3R_HOME/runs."),
]


@app.callback()
def command(_version: VersionOption = False) -> None:
    """Options before the name of a command."""


@app.command()
def train(
    game: Game,
    brain: Brain = BrainName.OFFLINE,
    out: Out = None,
    run_dir: RunDir = None,
    swarm: Swarm = None,
    token_file: TokenFile = None,
    seed: TrainSeed = None,
    updates: Updates = None,
    eval_every: EvalEvery = None,
    eval_games: EvalGames = None,
    changes: Change = None,
    force: Force = False,
    go_on: GoOn = False,
    as_json: Json = False,
) -> None:
    """Write a project for a game, or take one that is there; train on it and show what was learned."""
    from vibe.project import parse_changes
    from vibe.training import train_project
    from vibe.writing import Request, project_named

    named = {
        "config.seed": seed,
        "training.updates": updates,
        "training.eval_every": eval_every,
        "training.eval_games": eval_games,
    }
    settings = {path: str(value) for path, value in named.items() if value is not None}
    train_project(
        Request(
            description=game,
            project=project_named(game),
            brain=brain.value,
            out=out,
            run_dir=run_dir,
            swarm_url=swarm,
            token_file=token_file,
            settings=settings | parse_changes(changes or ()),
            force=force,
            goes_on=go_on,
            as_json=as_json,
        )
    )


@app.command()
def new(
    description: Description,
    brain: Brain = BrainName.OFFLINE,
    out: Out = None,
    seed: Seed = 0,
    changes: Change = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a project for a game and train nothing."""
    from vibe.project import parse_changes
    from vibe.writing import Request, write_from_words

    write_from_words(
        Request(
            description=description,
            brain=brain.value,
            out=out,
            settings={"config.seed": str(seed)} | parse_changes(changes or ()),
            force=force,
            as_json=as_json,
        )
    )


@app.command()
def templates(as_json: Json = False) -> None:
    """List the games that can be described, with their rules."""
    from vibe.writing import show_templates

    show_templates(as_json=as_json)


def main() -> int:
    """Run the command; returns its exit code. An error of ours is a message, never a traceback."""
    from experiments_db.errors import ExperimentsDbError
    from vibe.errors import INTERRUPTED, UsageError, VibeError

    try:
        app(prog_name="vibe")
    except (VibeError, ExperimentsDbError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except UnicodeEncodeError as error:
        print(f"error: {error.object!r:.80} is not valid UTF-8; write it in UTF-8", file=sys.stderr)
        return UsageError.exit_code
    except OSError as error:
        print(f"error: {error}; make room or choose another place, then run the same command again", file=sys.stderr)
        return 1
    except SystemExit as done:
        if done.code == INTERRUPTED:  # Ctrl-C before or after the training; during it there is a StoppedError
            print("stopped; nothing was running", file=sys.stderr)
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0
