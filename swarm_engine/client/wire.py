"""What goes over the wire and what comes back, without a socket: the sync and the async client share every line."""

from __future__ import annotations

import errno
import json
import math
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarm_engine.client.errors import (
    AddressError,
    ContextLengthError,
    EpisodeLostError,
    EpisodeNotEndedError,
    GroupSizeError,
    NoAnswerError,
    NotFiniteError,
    ReplayLimitError,
    SwarmProtocolError,
    SwarmRequestError,
    SwarmUnavailableError,
    TokenFileError,
)
from swarm_engine.types import ClaimReason, DropReason, EngineState, Mode, Outcome

CONTROL = "/swarm/v1"
SERVER_FILE = "server.json"
"""In a run folder while a server runs there."""
MAX_REPLAYS = 5
"""How often a run plays an episode again that is lost or dropped; more would hide that something is wrong."""
MAX_POLL_S = 60.0
"""The server's limit for one wait; longer ones are asked in turns."""
MAX_FILE_BYTES = 1024 * 1024
"""Of a config, a token file or a server's file."""
CONTEXT_CODE = "context_length_exceeded"
LOST_STATUS = 410
UNAVAILABLE_STATUS = (502, 503, 504)

Reward = float | Mapping[str, float | None] | None
"""One number for every agent, a number for each, or None where it can't be judged."""
Messages = Sequence[Mapping[str, Any]]
Script = Sequence[str | Sequence[int]]
"""Replies for the scripted backend to play call by call, as text or token ids."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of a data set."""

    task_id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the rollout needs to know about it; never sent to the server."""


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A policy that is served."""

    version: int
    trainable: bool
    learning_rate: float | None = None
    """That it is trained with after its warmup; None where it is frozen."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What the open batch holds."""

    rule: str
    """When it is full: `tasks`, where every group is complete."""
    episodes: int
    tasks: int
    informative_tasks: int
    targets: Mapping[str, int]
    """Of a batch: `episodes`, `tasks` and `group_size`, the episodes of each task; 0 before the first start."""


@dataclass(frozen=True, slots=True)
class Status:
    """What an engine does now."""

    state: EngineState
    reason: str | None
    """Why it failed; None unless it did."""
    step: int
    """Updates in the weights."""
    update: Mapping[str, Any] | None
    """The update that runs: its step and its seconds so far."""
    saved_step: int | None
    """Of the newest checkpoint; None before the first."""
    save_error: str | None
    """Why the last checkpoint could not be written; None unless it failed."""
    policies: Mapping[str, PolicyStatus]
    pool: PoolStatus
    clients: Mapping[str, int]
    """Running episodes by active client."""
    running: int
    server_id: str
    last_seq: int
    """Number of the newest event."""
    connections: Mapping[str, int | None]
    """`open` ones, their `limit` (None where nothing bounds them), idle ones `closed` for others, and requests that
    were `refused` because all were busy."""
    num_refused: int = 0
    """Calls of train episodes that got an error since the last update."""
    last_refusal: str | None = None
    """What the last of them was told, after its HTTP status."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the server's disk, and the mean reward that its weights earned."""

    step: int
    path: str
    reward: float | None
    """In training; None until the update after it."""
    evaluation: float | None
    """In eval episodes; None where there are none."""
    is_best: bool
    """By what the engine's `trainer.best_by` names; the best is never removed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One numbered event of a server."""

    seq: int
    at: float
    """Unix time in seconds."""
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A model's reply."""

    text: str
    finish_reason: str
    """`stop`, or `length` where it was cut at its limit."""
    call_id: str
    completion_tokens: int
    message: Mapping[str, Any]
    """To append to the messages as it is."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A claimed episode."""

    episode_id: str
    task_id: str
    group_id: str
    index: int
    """Place in its group."""
    base_url: str
    """For any OpenAI client; `/v1` may follow it."""
    api_key: str
    policy_version: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How an episode ended."""

    task_id: str
    group_id: str
    index: int
    episode_id: str
    rewards: Mapping[str, float | None]
    """By agent."""
    outcome: Outcome
    metrics: Mapping[str, float]
    policy_version: int
    drop_reason: DropReason | None = None
    """Why it takes no place in a batch, so that its place is free again; None where it takes one."""
    num_refused: int = 0
    """Calls that got an error instead of a reply."""
    last_refusal: str | None = None
    """What the last of them was told, after its HTTP status."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server says of itself in its run folder."""

    url: str
    run_dir: Path
    """Its own folder, in a copy of the file too."""
    pid: int


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token.

    Raises:
        ValueError: the token is none.
    """
    if not is_token(token):
        raise ValueError("a token is one line of printable ASCII; take it from the server's token file")
    return {"authorization": f"Bearer {token}"}


def is_token(text: str) -> bool:
    """Whether a text can go into the header as a token."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def read_small_file(file: Path) -> str:
    """The text of a file that people write or name.

    Raises:
        OSError: it can't be read, is longer than anybody writes by hand, or is no regular file: a pipe would be waited
            for without end, and a device read without one.
        ValueError: it is no UTF-8.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    if found.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, the limit is {MAX_FILE_BYTES}", str(file))
    return file.read_text(encoding="utf-8")


def read_token(file: Path) -> str:
    """The operator's token of a server's token.json, or the token that is all a file holds.

    Raises:
        TokenFileError: the file can't be read, or holds none.
    """
    try:
        text = read_small_file(file).strip()
        token = json.loads(text)["operator"] if text.startswith("{") else text
    except OSError as error:
        raise TokenFileError(f"the token file {file} can't be read ({error.strerror}); a server writes it") from error
    except (ValueError, KeyError, RecursionError):
        token = None
    if not isinstance(token, str) or not is_token(token):
        raise TokenFileError(f"{file} holds no operator's token; name the token.json of the server's run folder")
    return token


def read_server(run_dir: Path) -> RunningServer:
    """The server that runs in a run folder, by the file that it has written there.

    Raises:
        OSError: the file can't be read; there is none where no server runs.
        ValueError: it holds something else.
    """
    try:
        known = json.loads(read_small_file(run_dir / SERVER_FILE))
        return RunningServer(str(known["url"]), Path(known["run_dir"]), int(known["pid"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{run_dir / SERVER_FILE} is no file of a server") from error


def claim_body(
    client_id: str,
    claim_key: str,
    task_id: str,
    mode: Mode,
    group_id: str | None,
    tags: Mapping[str, str] | None,
    script: Script | None,
    policies: Sequence[str],
    sampling: Mapping[str, float] | None,
    models: Mapping[str, str] | None,
    wait_s: float,
) -> dict[str, Any]:
    """Body of a claim."""
    body: dict[str, Any] = {"client_id": client_id, "claim_key": claim_key}
    body |= {"task_id": task_id, "mode": mode, "wait_s": wait_s}
    if group_id is not None:
        body["group_id"] = group_id
    if tags:
        body["tags"] = dict(tags)
    if script is not None:
        body["script"] = [reply if isinstance(reply, str) else list(reply) for reply in script]
    if policies:
        body["policies"] = list(policies)
    if sampling is not None:
        body["sampling"] = dict(sampling)
    if models:
        body["models"] = dict(models)
    return body


def read_claim(task_id: str, answer: Mapping[str, Any]) -> Lease | ClaimReason:
    """The episode of an answered claim, or why there is none."""
    if answer["episode_id"] is None:
        return ClaimReason(answer["reason"])
    return Lease(
        episode_id=answer["episode_id"],
        task_id=task_id,
        group_id=answer["group_id"],
        index=answer["index"],
        base_url=answer["base_url"],
        api_key=answer["api_key"],
        policy_version=answer["policy_version"],
        lease_s=answer["lease_s"],
    )


def episode_path(episode_id: str) -> str:
    """Where an episode is described."""
    return f"/episodes/{quote(episode_id, safe='')}"


def timelines_path(episode_id: str, merge: str) -> str:
    """Where an episode's contexts are."""
    return f"{episode_path(episode_id)}/timelines?merge={quote(merge, safe='')}"


def read_address(url: str) -> str:
    """A swarm's address as requests begin with it.

    Raises:
        AddressError: it holds what does not belong there; addresses are printed and logged.
    """
    if "@" in url.partition("//")[2].partition("/")[0] or "?" in url or "#" in url:
        raise AddressError(
            "the address of the swarm holds a user name, a password or a query, which it has no use for; it goes like "
            "http://HOST:8000, and a token opens it"
        )
    return url.rstrip("/")


def chat_url(base_url: str, agent: str | None) -> str:
    """Where an agent's calls go."""
    seat = "" if agent is None else f"/agents/{quote(agent, safe='')}"
    return f"{base_url}{seat}/chat/completions"


def chat_body(
    messages: Messages,
    policy: str | None,
    temperature: float,
    max_tokens: int | None,
    seed: int | None,
    stop: str | Sequence[str] | None,
    script: str | Sequence[int] | None,
) -> dict[str, Any]:
    """Body of a chat completion."""
    body: dict[str, Any] = {"messages": list(messages), "temperature": temperature}
    if policy is not None:
        body["model"] = policy
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    if seed is not None:
        body["seed"] = seed
    if stop is not None:
        body["stop"] = stop if isinstance(stop, str) else list(stop)
    if script is not None:
        body["script"] = script if isinstance(script, str) else list(script)
    return body


def read_chat(answer: Mapping[str, Any]) -> ChatReply:
    """The reply of a chat completion."""
    choice = answer["choices"][0]
    text = choice["message"]["content"] or ""
    return ChatReply(
        text=text,
        finish_reason=choice["finish_reason"],
        call_id=answer["id"],
        completion_tokens=answer["usage"]["completion_tokens"],
        message={"role": "assistant", "content": text},
    )


def end_body(
    reward: Reward,
    outcome: Outcome,
    metrics: Mapping[str, float] | None,
    step_rewards: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Body of an episode's end.

    Raises:
        NotFiniteError: a reward or metric is no finite number.
    """
    unjudged = ", which can't be trained on; give None where it can't be judged"

    def judged(value: float | None, what: str) -> float | None:
        return None if value is None else _number(value, what, unjudged)

    if isinstance(reward, Mapping):
        given: Any = {agent: judged(value, f"reward of agent {agent!r}") for agent, value in reward.items()}
    else:
        given = judged(reward, "reward")
    body: dict[str, Any] = {"reward": given, "outcome": Outcome(outcome)}
    if metrics:
        body["metrics"] = {
            name: _number(value, f"metric {name!r}", "; leave it out") for name, value in metrics.items()
        }
    if step_rewards:
        body["step_rewards"] = [
            {"call_id": call_id, "reward": _number(value, f"step reward of call {call_id!r}", "; leave it out")}
            for call_id, value in step_rewards.items()
        ]
    return body


def read_end(lease: Lease, metrics: Mapping[str, float] | None, answer: Mapping[str, Any]) -> EpisodeResult:
    """How an episode ended that was ended with these metrics."""
    drop_reason = answer["drop_reason"]
    return EpisodeResult(
        task_id=lease.task_id,
        group_id=lease.group_id,
        index=lease.index,
        episode_id=lease.episode_id,
        rewards=answer["rewards"],
        outcome=Outcome(answer["outcome"]),
        metrics=dict(metrics or {}),
        policy_version=lease.policy_version,
        drop_reason=None if drop_reason is None else DropReason(drop_reason),
        num_refused=answer["num_refused"],
        last_refusal=answer["last_refusal"],
    )


def _number(value: Any, what: str, way_out: str) -> float:
    """A number of any library's kind as JSON knows it.

    Raises:
        NotFiniteError: it is none, or not finite.
    """
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise NotFiniteError(f"{what} is {value!r:.80}{way_out}")
    return number


def read_status(answer: Mapping[str, Any]) -> Status:
    """A server's status."""
    policies = {
        name: PolicyStatus(policy["version"], policy["trainable"], policy.get("learning_rate"))
        for name, policy in answer["policies"].items()
    }
    pool = answer["pool"]
    return Status(
        state=EngineState(answer["state"]),
        reason=answer["reason"],
        step=answer["step"],
        update=answer["update"],
        saved_step=answer["checkpoint"]["step"],
        save_error=answer["checkpoint"]["error"],
        policies=policies,
        pool=PoolStatus(
            rule=pool["rule"],
            episodes=pool["episodes"],
            tasks=pool["tasks"],
            informative_tasks=pool["informative_tasks"],
            targets=pool["targets"],
        ),
        clients=answer["clients"],
        running=answer["running"],
        server_id=answer["server_id"],
        last_seq=answer["last_seq"],
        connections=answer["connections"],
        num_refused=answer.get("num_refused", 0),
        last_refusal=answer.get("last_refusal"),
    )


def read_checkpoints(answer: Mapping[str, Any]) -> list[Checkpoint]:
    """A server's checkpoints."""
    return [
        Checkpoint(one["step"], one["path"], one["reward"], one["evaluation"], one["is_best"])
        for one in answer["checkpoints"]
    ]


def export_body(policy: str, name: str, step: int | None, best: bool, merged: bool) -> dict[str, Any]:
    """Body of an export."""
    return {"policy": policy, "name": name, "step": step, "best": best, "merged": merged}


def read_answer(status: int, content: bytes) -> Any:
    """The JSON of an answer.

    Raises:
        SwarmRequestError: the server refused.
        NoAnswerError: a proxy answers that the server does not.
        SwarmUnavailableError: the engine is off or failed.
        SwarmProtocolError: this is no swarm.
    """
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        if status in UNAVAILABLE_STATUS:
            raise NoAnswerError(f"a proxy answers HTTP {status} for the swarm; is the swarm running?") from error
        raise SwarmProtocolError(
            f"the answer (HTTP {status}) is not JSON: {content[:80]!r}; is this the address of a swarm?"
        ) from error
    if status < 400:
        return answer
    found = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(found, dict) or "message" not in found:
        raise SwarmProtocolError(f"HTTP {status} without a swarm's error; is this the address of a swarm?")
    raise refusal(status, found)


def refusal(status: int, found: Mapping[str, Any]) -> SwarmRequestError | SwarmUnavailableError:
    """The exception for a server's error."""
    code, message, hint = str(found.get("code")), str(found["message"]), str(found.get("hint") or "")
    if status in UNAVAILABLE_STATUS:
        return SwarmUnavailableError(f"{message}; {hint}" if hint else message, code)
    kind = SwarmRequestError
    if code == CONTEXT_CODE:
        kind = ContextLengthError
    elif status == LOST_STATUS:
        kind = EpisodeLostError
    return kind(status, code, message, hint)


class EventReader:
    """Turns a server-sent event stream into events.

    A line ends at a line feed, as the server writes it, and nowhere else: httpx's lines end at every character that
    Unicode calls a line's end, and a task may be named with one.
    """

    def __init__(self) -> None:
        self._rest = b""
        """Of a line that has not ended."""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Take the stream's next bytes; gives the events that they complete."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif line == b"" and self._data:
                found = json.loads(b"\n".join(self._data))
                self._data.clear()
                yield Event(seq=found["seq"], at=found["at"], kind=found["kind"], payload=found["payload"])


def check_group_size(status: Status, group_size: int) -> None:
    """Refuse a train run that would fill no group.

    Raises:
        GroupSizeError: the engine runs and its groups have another size.
    """
    wanted = status.pool.targets["group_size"]
    if status.state not in (EngineState.OFFLINE, EngineState.FAILED) and group_size != wanted:
        raise GroupSizeError(
            f"group_size is {group_size}, the server trains on groups of {wanted}, so no group would be filled; "
            f"pass group_size={wanted}, or start the engine with trainer.group_size {group_size}"
        )


def episodes_of(tasks: Sequence[Task], times: int) -> Counter[str]:
    """Episodes of a data set by task, each of its tasks played so often."""
    counted = Counter(task.task_id for task in tasks)
    return Counter({task_id: count * times for task_id, count in counted.items()})


def check_resume(resume: bool, epoch: int | None, mode: Mode) -> None:
    """See that a run can leave out what is completed.

    Raises:
        ValueError: it can't.
    """
    if resume and mode is not Mode.TRAIN:
        raise ValueError(f"resume goes with mode train, not {mode}: the server counts no other completed episodes")
    if epoch is not None and not resume:
        raise ValueError("epoch says which pass over the tasks is resumed; add resume=True")
    if epoch is not None and epoch < 0:
        raise ValueError(f"epoch is {epoch}; passes over the tasks are counted from 0")


def not_ended(episode_id: str, task_id: str) -> EpisodeNotEndedError:
    """The error for an episode that was left without an end."""
    return EpisodeNotEndedError(
        f"episode {episode_id!r} of task {task_id!r} was left without a reward; call end(reward=...), or "
        "end(reward=None) where it can't be judged"
    )


def is_played_again(
    task_id: str, lost: Exception | None, result: EpisodeResult | None, num_replays: int, *, fills_groups: bool
) -> bool:
    """Whether a run plays an episode's place again, after it was played and replayed so often.

    Args:
        lost: what its rollout met where it was lost; None where it has its result.
        fills_groups: whether nobody but the run fills places that are free again.

    Raises:
        ReplayLimitError: it was lost, and has been played as often as a run does.
    """
    if lost is not None:
        if num_replays == MAX_REPLAYS:
            raise ReplayLimitError(
                f"an episode of task {task_id!r} was lost, and a run plays it again {MAX_REPLAYS} times at most; see "
                "the drop events for the reasons: does the server stay up, are lease_s and episode_timeout_s long "
                f"enough? The last attempt ended with {type(lost).__name__}: {lost}"
            ) from lost
        return True
    assert result is not None, "an episode that was not lost has its result"
    return fills_groups and result.drop_reason is not None and num_replays < MAX_REPLAYS


def places(
    tasks: Sequence[Task], group_size: int, completed: Mapping[str, int] | None = None
) -> Iterator[tuple[int, Task]]:
    """Every episode of a data set in the order of its claims, numbered; without those that are completed already.

    A task that the data set names more than once takes what is completed of it first come, first served.
    """
    left = dict(completed or {})
    for number, task in enumerate(task for task in tasks for _ in range(group_size)):
        if left.get(task.task_id, 0) > 0:
            left[task.task_id] -= 1
        else:
            yield number, task
