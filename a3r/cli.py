"""The command `a3r`: ask a question about training, get a study and a report.

a3r research "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"
a3r resume STUDY           go on after a stop or a crash
a3r runs | show | compare  what was run, and what came out
a3r verify STUDY           every number again, from its rows
a3r vibe …                 from a game in words to a trained policy
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from swarm_engine.version import VersionOption

app = typer.Typer(
    name="a3r",
    help="Research agents: from a question to a study whose every number can be traced.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Home = Annotated[Path | None, typer.Option(help="Folder of all state; by default A3R_HOME, else .a3r here.")]
Db = Annotated[
    str | None, typer.Option(metavar="URL", help="Database of all runs; by default experiments.db in the home folder.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Approve the plan without being asked.")]
Jobs = Annotated[int, typer.Option(min=0, help="Runs side by side; 0 is as many as cores and memory bear.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON line an event, and the result last.")]
Study = Annotated[str, typer.Argument(help="Id of the study, or the beginning or end of it.", show_default=False)]


@app.callback()
def command(_version: VersionOption = False) -> None:
    """Options before the name of a command."""


@app.command()
def research(
    question: Annotated[
        str, typer.Argument(help="Does FACTOR at LEVELS change METRIC on TEMPLATE?", show_default=False)
    ],
    home: Home = None,
    db: Db = None,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and what it would cost; run nothing.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=3, max=100, help="Seeds per arm; by default 3.")] = None,
    extra_seeds: Annotated[
        int | None, typer.Option(min=0, max=100, help="Seeds that the decision tree may add once; by default 2.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=2, max=100_000, help="Optimizer updates of a run.")] = None,
    eval_games: Annotated[int | None, typer.Option(min=2, help="Held-out games of an evaluation.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, max=1_000_000, help="What the study may take on the clock.")
    ] = None,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """Answer a question by a study: plan, lock, train, decide, report."""
    from a3r.asking import understand

    reading = understand(question, yes=yes, dry_run=dry_run, as_json=as_json)
    from a3r.planner.design import Wishes
    from a3r.research import research as run

    wishes = Wishes(seeds, extra_seeds, updates, eval_games, minutes, jobs)
    raise typer.Exit(run(reading, home=home, db=db, wishes=wishes, yes=yes, dry_run=dry_run, as_json=as_json))


@app.command()
def resume(
    study: Study, home: Home = None, db: Db = None, yes: Yes = False, jobs: Jobs = 0, as_json: Json = False
) -> None:
    """Go on with a study that was stopped, or whose process was killed."""
    from a3r.research import resume as run

    raise typer.Exit(run(study, home=home, db=db, jobs=jobs, yes=yes, as_json=as_json))


@app.command()
def verify(study: Study, home: Home = None, db: Db = None, as_json: Json = False) -> None:
    """Compute every number of a study again from its rows; exit code 1 where one is not as on record."""
    from a3r.research import verify_study

    raise typer.Exit(verify_study(study, home=home, db=db, as_json=as_json))


@app.command()
def runs(
    home: Home = None,
    db: Db = None,
    template: Annotated[str | None, typer.Option(help="Only runs of this game.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of the newest.")] = 100,
    as_json: Json = False,
) -> None:
    """List runs, study by study."""
    from a3r.browsing import show_runs

    show_runs(home, db, template=template, limit=limit, as_json=as_json)


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="A run or a study: its id, or the beginning or end.", show_default=False)],
    home: Home = None,
    db: Db = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the held-out curve into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Show everything about a run, or the runs and the answer of a study."""
    from a3r.browsing import show_one

    show_one(what, home, db, plot=plot, as_json=as_json)


@app.command()
def compare(
    ids: Annotated[list[str], typer.Argument(help="Runs or studies.", show_default=False)],
    home: Home = None,
    db: Db = None,
    metric: Annotated[str, typer.Option(help="What --plot draws: heldout, or an engine's metric.")] = "heldout",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Put runs side by side: what differs, and each arm's results."""
    from a3r.browsing import compare_them

    compare_them(ids, home, db, metric=metric, plot=plot, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def vibe(context: typer.Context) -> None:
    """The command `vibe`, where another tool owns that name."""
    from vibe.cli import main as run_vibe

    sys.argv = ["vibe", *context.args]
    raise typer.Exit(run_vibe())


def main() -> int:
    """Run the command; returns its exit code. An error of ours is a message, never a traceback.

    With --json it is a line on standard output as well, the last one.
    """
    from a3r.errors import A3RError
    from experiments_db.errors import ExperimentsDbError

    words = sys.argv[1:]
    as_json = "--json" in words and words[:1] != ["vibe"]
    try:
        app(prog_name="a3r")
    except (A3RError, ExperimentsDbError) as error:
        return _give_up(str(error), getattr(error, "exit_code", 1), as_json=as_json)
    except UnicodeEncodeError as error:
        return _give_up(f"{error.object!r:.80} is not valid UTF-8; write it in UTF-8", 2, as_json=as_json)
    except OSError as error:
        problem = f"{error.filename or 'a file'}: {error.strerror}; make room or name another --home"
        return _give_up(problem, 1, as_json=as_json)
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        for cause in _causes(done):
            if isinstance(cause, KeyboardInterrupt):  # while jobs ran there is a StoppedError
                stopped = (
                    "stopped before this command watched a job. A study that was begun goes on with `a3r resume "
                    "STUDY`, with the jobs that a killed command left running too"
                )
                return _give_up(stopped, code, as_json=as_json)
            if as_json and hasattr(cause, "format_message"):  # a wrong flag, which typer has said on standard error
                _print_error(cause.format_message())
        return code
    return 0


def _give_up(problem: str, code: int, *, as_json: bool) -> int:
    if as_json:
        _print_error(problem)
    print(f"error: {problem}", file=sys.stderr)
    return code


def _print_error(problem: str) -> None:
    print(json.dumps({"event": "error", "message": problem}, ensure_ascii=False), flush=True)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What an exception was raised because of, and what that was, and so on."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


if __name__ == "__main__":
    sys.exit(main())
