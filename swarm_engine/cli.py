"""`swarm`: serve an engine, look at it, start and stop it.

Every command takes `--json`. Commands that talk to a server find it by `--url` and `--token-file`, or in a run folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from swarm_engine.version import VersionOption

if TYPE_CHECKING:
    from swarm_engine.client import SwarmClient

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Serve a swarm engine and look at it.")

USAGE = 2
FAILED = 1

RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder of the server's state; $A3R_HOME/swarm where it is not given."),
]
Url = Annotated[str | None, typer.Option("--url", help="Address of a server; the run folder's where it is not given.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="The server's token.json, or a file with a token.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def default_run_dir() -> Path:
    """$A3R_HOME/swarm; A3R_HOME is .a3r in the current folder unless it is set."""
    return Path(os.environ.get("A3R_HOME") or ".a3r").expanduser() / "swarm"


def give_up(message: str, code: int, as_json: bool = False) -> NoReturn:
    """Say what is wrong and what to do, and end."""
    if as_json:
        print(json.dumps({"event": "error", "message": message}), flush=True)
    print(f"swarm: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


def as_plain(value: Any) -> Any:
    """A client's value as JSON takes it."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def url_of(run_dir: Path) -> str | None:
    """Where the server of a run folder listens; None where none runs in it.

    A copy of the folder of a running server holds its file, which tells of the server in the original.
    """
    from swarm_engine.client.wire import read_server

    try:
        server = read_server(run_dir)
        is_copy = server.run_dir.exists() and not server.run_dir.samefile(run_dir)
    except (OSError, ValueError):
        return None
    return None if is_copy else server.url


def connect(run_dir: Path | None, url: str | None, token_file: Path | None, as_json: bool) -> SwarmClient:
    """A client of the server that the options name."""
    from swarm_engine.client import AddressError, SwarmClient, TokenFileError, read_token

    folder = run_dir or default_run_dir()
    if url is None:
        url = url_of(folder)
    if url is None:
        give_up(f"no server runs in {folder}; start one with `swarm serve --run-dir {folder}`", FAILED, as_json)
    try:
        # Who sits in front of it starts a server that is gone, and asks again.
        return SwarmClient(url, read_token(token_file or folder / "token.json"), reconnect_s=0)
    except (AddressError, TokenFileError) as error:
        give_up(str(error), FAILED, as_json)


def ask(
    question: Callable[[SwarmClient], Any],
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    as_json: bool,
) -> Any:
    """Ask a server something; its errors become messages."""
    from swarm_engine.client import SwarmError

    with connect(run_dir, url, token_file, as_json) as client:
        try:
            return question(client)
        except SwarmError as error:
            give_up(str(error), FAILED, as_json)


def read_config(file: Path | None, as_json: bool) -> Any:
    """An engine config from a JSON file."""
    if file is None:
        return None
    from swarm_engine.client.wire import read_small_file

    try:
        return json.loads(read_small_file(file))
    except OSError as error:
        give_up(f"the config {file} can't be read: {error.strerror}; name a JSON file", USAGE, as_json)
    except (ValueError, RecursionError) as error:
        give_up(f"the config {file} is no JSON ({error}); see docs/engine.md for what it holds", USAGE, as_json)


@app.callback()
def command(_version: VersionOption = False) -> None:
    """Options before the name of a command."""


@app.command()
def serve(
    run_dir: RunDir = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    config: Annotated[Path | None, typer.Option(help="Engine config as a JSON file, for --start.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the engine at once.")] = False,
    exit_with_stdin: Annotated[
        bool, typer.Option("--exit-with-stdin", help="End when the standard input closes.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Another name this server answers to.")
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option("--public-url", help="Where agents reach it; by default the address that a claim came by."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Serve TLS with this certificate, a PEM file.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="Its key, where it is not in the same file.")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="Another worker program; --socket ADDRESS is appended.")] = None,
    as_json: Json = False,
) -> None:
    """Serve an engine until Ctrl-C.

    The first line on the standard output says where: {"event": "listening", "url": …, "token_file": …}.
    """
    import logging
    import shlex

    from pydantic import ValidationError

    from swarm_engine.config import EngineConfig
    from swarm_engine.errors import SwarmEngineError
    from swarm_engine.server.serve import ServeOptions, run
    from swarm_engine.server.worker_link import WORKER_COMMAND

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if config is not None and not start:
        give_up("--config is for the start of the engine; add --start, or give it to `swarm start`", USAGE, as_json)
    if tls_key is not None and tls_cert is None:
        give_up("--tls-key is the key of a certificate; add --tls-cert", USAGE, as_json)
    raw = read_config(config, as_json)
    try:
        parsed = None if raw is None else EngineConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        give_up(f"the config {config} is not valid: {where}: {first['msg']}", USAGE, as_json)
    options = ServeOptions(
        run_dir=run_dir or default_run_dir(),
        host=host,
        port=port,
        config=parsed,
        is_started=start,
        exits_with_stdin=exit_with_stdin,
        allowed_hosts=tuple(allow_host or ()),
        public_url=public_url,
        tls_cert=tls_cert,
        tls_key=tls_key,
        worker_command=tuple(shlex.split(worker or "")) or WORKER_COMMAND,
    )

    def on_listening(about: dict[str, Any]) -> None:
        print(json.dumps({"event": "listening", **about}), flush=True)

    try:
        run(options, on_listening)
    except SwarmEngineError as error:
        give_up(str(error), USAGE, as_json)
    except OSError as error:
        give_up(f"{error.strerror} ({error.filename}); check the disk and the run folder", USAGE, as_json)


@app.command()
def status(run_dir: RunDir = None, url: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Print what an engine does now."""
    found = ask(lambda client: client.status(), run_dir, url, token_file, as_json)
    if as_json:
        print(json.dumps(as_plain(found)))
        return
    from swarm_engine.watch import status_lines

    print("\n".join(status_lines(found)))


@app.command()
def start(
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    config: Annotated[Path | None, typer.Option(help="Engine config as a JSON file; the last one without.")] = None,
    as_json: Json = False,
) -> None:
    """Start the engine of a server and wait until it takes episodes."""
    raw = read_config(config, as_json)
    found = ask(lambda client: client.start(raw, wait=True), run_dir, url, token_file, as_json)
    print(json.dumps(as_plain(found)) if as_json else f"{found.state} at step {found.step}")


@app.command()
def stop(run_dir: RunDir = None, url: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Save a checkpoint and stop the engine; the server stays."""
    found = ask(lambda client: client.stop(), run_dir, url, token_file, as_json)
    print(json.dumps(as_plain(found)) if as_json else f"{found.state} at step {found.step}")


@app.command()
def checkpoints(run_dir: RunDir = None, url: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the checkpoints with what their weights earned; the best one is never removed."""
    found = ask(lambda client: client.checkpoints(), run_dir, url, token_file, as_json)
    if as_json:
        print(json.dumps({"event": "result", "checkpoints": [as_plain(one) for one in found]}))
        return
    from swarm_engine.watch import checkpoint_lines

    print("\n".join(checkpoint_lines(found)))


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="Folder to make under the run folder's exports/.")],
    policy: Annotated[str, typer.Option(help="Policy to write.")] = "policy",
    step: Annotated[int | None, typer.Option(min=0, help="Write the checkpoint of this step.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Write the best checkpoint.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Write a LoRA policy as one model, not as adapter.")] = False,
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Write a policy in the Hugging Face layout, or its adapter in peft's: as it is now, or one of its checkpoints."""
    path = ask(
        lambda client: client.export(policy, name, step=step, best=best, merged=merged),
        run_dir,
        url,
        token_file,
        as_json,
    )
    print(json.dumps({"event": "result", "path": path}) if as_json else path)


@app.command()
def timelines(
    episode: Annotated[str, typer.Argument(help="Episode id.")],
    merge: Annotated[str, typer.Option(help="none, token, tree or text.")] = "none",
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print an episode's contexts block by block."""
    found, about = ask(
        lambda client: (client.timelines(episode, merge=merge), client.describe(episode)),
        run_dir,
        url,
        token_file,
        as_json,
    )
    if as_json:
        print(json.dumps({"event": "result", "timelines": found, **refusals_in(about)}))
        return
    from swarm_engine.watch import refusal_line, timeline_lines

    print("\n".join([*timeline_lines(found), *filter(None, [refusal_line(about)])]))


@app.command()
def why_split(
    episode: Annotated[str, typer.Argument(help="Episode id.")],
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Say where the contexts of an episode part, and over what."""
    found, about = ask(
        lambda client: (client.timelines(episode), client.describe(episode)), run_dir, url, token_file, as_json
    )
    from swarm_engine.splits import find_splits, split_lines

    splits = find_splits(found)
    if as_json:
        result = {"event": "result", "splits": [asdict(split) for split in splits], **refusals_in(about)}
        print(json.dumps(result))
        return
    from swarm_engine.watch import refusal_line

    print("\n".join([*split_lines(splits, len(found)), *filter(None, [refusal_line(about)])]))


def refusals_in(about: Mapping[str, Any]) -> dict[str, Any]:
    """What an episode's description says of its refused calls."""
    return {name: about.get(name) for name in ("num_refused", "last_refusal")}


@app.command()
def watch(
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    after: Annotated[int, typer.Option(help="Print events later than this number; not for the table.")] = 0,
    as_json: Json = False,
) -> None:
    """Follow an engine: a live table; where the output is no terminal its states and updates, one a line.

    With --json all its events, one a line.
    """
    from swarm_engine.watch import print_events, print_lines, watch_table

    def show(client: SwarmClient) -> None:
        if as_json:
            print_events(client, after)
        elif sys.stdout.isatty():
            watch_table(client)
        else:
            print_lines(client, after)

    try:
        ask(show, run_dir, url, token_file, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    """The command `swarm`."""
    for word in (*sys.argv[1:], os.environ.get("A3R_HOME", "")):
        try:
            word.encode()
        except UnicodeEncodeError:
            print(f"swarm: {word!r:.80} is not valid UTF-8; write it in UTF-8", file=sys.stderr)
            sys.exit(USAGE)
    app()


if __name__ == "__main__":
    main()
