"""The sync client: the same words as `aio`, on threads."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import count
from types import TracebackType
from typing import Any, Self

import httpx

from swarm_engine.client import wire
from swarm_engine.client.aio import QUIET_SHARE, STATUS_POLL_S, OnEpisode
from swarm_engine.client.errors import (
    ClaimTimeoutError,
    EpisodeLostError,
    EpisodeNotEndedError,
    SwarmError,
    SwarmRequestError,
    SwarmUnavailableError,
)
from swarm_engine.client.http import RECONNECT_S, TIMEOUT, Reconnection, TransportPool, no_answer, request_of
from swarm_engine.types import EngineState, Mode, Outcome, well_formed

SyncRollout = Callable[["SyncEpisode", wire.Task], None]


class SyncEpisode:
    """A claimed episode. Leaving its context without an end, or with an exception, aborts it."""

    def __init__(self, client: SwarmClient, lease: wire.Lease) -> None:
        self._client = client
        self._lease = lease
        self._auth = wire.bearer(lease.api_key)
        self._last_sign = time.monotonic()
        self.episode_id = lease.episode_id
        self.task_id = lease.task_id
        self.group_id = lease.group_id
        self.index = lease.index
        self.base_url = lease.base_url
        """For any OpenAI client; `/v1` may follow it."""
        self.api_key = lease.api_key
        self.policy_version = lease.policy_version
        self.result: wire.EpisodeResult | None = None
        """How it ended; None before."""
        self.is_given_up = False
        """Whether it was aborted, or found to be lost."""

    def chat(
        self,
        messages: wire.Messages,
        *,
        agent: str | None = None,
        policy: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        script: str | Sequence[int] | None = None,
    ) -> wire.ChatReply:
        """Ask a policy; errors as in the async client."""
        url = wire.chat_url(self.base_url, agent)
        body = wire.chat_body(messages, policy, temperature, max_tokens, seed, stop, script)
        answer = wire.read_chat(self._client._request("POST", url, body, self._auth, is_repeatable=True))
        self._last_sign = time.monotonic()
        return answer

    def end(
        self,
        *,
        reward: wire.Reward,
        outcome: Outcome = Outcome.SUCCESS,
        metrics: Mapping[str, float] | None = None,
        step_rewards: Mapping[str, float] | None = None,
    ) -> wire.EpisodeResult:
        """Give the episode its reward; returns once the server has it on disk. See `Episode.end`."""
        body = wire.end_body(reward, outcome, metrics, step_rewards)
        answer = self._client._control("POST", f"/episodes/{self.episode_id}/end", body, is_repeatable=True)
        self.result = wire.read_end(self._lease, metrics, answer)
        self._client._live.pop(self.episode_id, None)
        return self.result

    def abort(self, reason: str = "") -> None:
        """Give the episode up; its place goes to another claim. An episode that is gone already is fine."""
        self.is_given_up = True
        self._client._live.pop(self.episode_id, None)
        with contextlib.suppress(EpisodeLostError):
            path, body = f"/episodes/{self.episode_id}/abort", {"reason": well_formed(reason)[:500]}
            self._client._control("POST", path, body, is_repeatable=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.result is not None or self.is_given_up:
            return
        reason = "left without an end" if kind is None else f"{kind.__name__}: {error}"
        # What went wrong in the block matters more than an abort that can't be delivered; the lease runs out anyway.
        with contextlib.suppress(SwarmError):
            self.abort(reason)
        if kind is None:
            raise wire.not_ended(self.episode_id, self.task_id)


class SwarmClient:
    """A client of one server. Use it as a context manager, or call `close`."""

    def __init__(self, url: str, token: str, *, client_id: str | None = None, reconnect_s: float = RECONNECT_S) -> None:
        """Name the server; nothing is sent yet. See the async client."""
        self.url = wire.read_address(url)
        self.client_id = client_id or f"client-{uuid.uuid4().hex[:8]}"
        self._auth = wire.bearer(token)
        self._transports = TransportPool(httpx.HTTPTransport)
        self._reconnection = Reconnection(reconnect_s)
        self._finished: Counter[str] = Counter()
        """Train episodes by task of the runs that have ended well."""
        self._live: dict[str, SyncEpisode] = {}
        self._claiming = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._beating: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        self._wake.set()
        if self._beating is not None:
            self._beating.join()
        for transport in self._transports.made:
            transport.close()

    def _request(self, method: str, url: str, body: Any, headers: Mapping[str, str], *, is_repeatable: bool) -> Any:
        """The answer to a request, which is sent again where the server is gone and comes back in time."""
        num_tries = 0
        while True:
            try:
                return self._send(method, url, body, headers)
            except SwarmUnavailableError as error:
                now = time.monotonic()
                pause_s = self._reconnection.pause_s(error, is_repeatable=is_repeatable, num_tries=num_tries, now=now)
            time.sleep(pause_s)
            num_tries += 1

    def _send(self, method: str, url: str, body: Any, headers: Mapping[str, str]) -> Any:
        request = request_of(method, url, body, headers)
        try:
            with self._transports.borrow() as transport:
                answer = transport.handle_request(request)
                content = answer.read()
        except httpx.TransportError as error:
            raise no_answer(self.url, error) from error
        if answer.status_code not in wire.UNAVAILABLE_STATUS:
            self._reconnection.heard()
        return wire.read_answer(answer.status_code, content)

    def _control(self, method: str, path: str, body: Any = None, *, is_repeatable: bool = False) -> Any:
        is_repeatable = is_repeatable or method == "GET"
        return self._request(method, f"{self.url}{wire.CONTROL}{path}", body, self._auth, is_repeatable=is_repeatable)

    def status(self) -> wire.Status:
        """What the engine does now."""
        return wire.read_status(self._control("GET", "/status"))

    def start(self, config: Mapping[str, Any] | None = None, *, wait: bool = False) -> wire.Status:
        """Start the engine; with `wait` returns when it takes episodes. See the async client."""
        status = wire.read_status(self._control("POST", "/engine/start", config))
        while wait and status.state is EngineState.BOOTING:
            time.sleep(STATUS_POLL_S)
            status = self.status()
        if wait and status.state is EngineState.FAILED:
            raise SwarmUnavailableError(f"the engine failed while it started: {status.reason}")
        return status

    def stop(self) -> wire.Status:
        """Save and stop the engine; returns when it is off."""
        return wire.read_status(self._control("POST", "/engine/stop"))

    def checkpoint(self) -> str:
        """Write a checkpoint now; returns its folder on the server."""
        return str(self._control("POST", "/checkpoints")["path"])

    def completed(self) -> dict[str, int]:
        """Completed train episodes by task, of every client and every start of the server's run folder."""
        found: dict[str, int] = self._control("GET", "/tasks")["completed"]
        return found

    def checkpoints(self) -> list[wire.Checkpoint]:
        """The checkpoints on the server's disk, oldest first."""
        return wire.read_checkpoints(self._control("GET", "/checkpoints"))

    def export(
        self, policy: str, name: str, *, step: int | None = None, best: bool = False, merged: bool = False
    ) -> str:
        """Write a policy in the Hugging Face layout, or its adapter in peft's; returns its folder on the server.

        Args:
            step: of the checkpoint to write; None writes the weights as they are.
            best: write the best checkpoint.
            merged: write an adapter's model with what the adapter adds.
        """
        body = wire.export_body(policy, name, step, best, merged)
        return str(self._control("POST", "/export", body)["path"])

    def describe(self, episode_id: str) -> dict[str, Any]:
        """An episode as the server knows it, running or ended, without its tokens; see `GET /episodes/ID`."""
        answer: dict[str, Any] = self._control("GET", wire.episode_path(episode_id))
        return answer

    def timelines(self, episode_id: str, *, merge: str = "none") -> list[dict[str, Any]]:
        """An episode's contexts, token by token."""
        answer = self._control("GET", wire.timelines_path(episode_id, merge))
        found: list[dict[str, Any]] = answer["timelines"]
        return found

    def events(self, after: int = 0, *, follow: bool = True) -> Iterator[wire.Event]:
        """The server's numbered events later than `after`, for ever, or with `follow=False` up to the newest one.

        Raises:
            SwarmUnavailableError: the server went away; go on later from the last event's number.
        """
        url = f"{self.url}{wire.CONTROL}/events?after={after}&follow={str(follow).lower()}"
        reader = wire.EventReader()
        try:
            with (
                httpx.Client(transport=self._transports.make(), timeout=TIMEOUT) as http,
                http.stream("GET", url, headers=self._auth) as answer,
            ):
                if answer.status_code >= 400:
                    wire.read_answer(answer.status_code, answer.read())
                for chunk in answer.iter_bytes():
                    yield from reader.feed(chunk)
        except httpx.TransportError as error:
            raise SwarmUnavailableError(f"the event stream of {self.url} broke off ({error})") from error

    def episode(
        self,
        task_id: str,
        *,
        mode: Mode = Mode.TRAIN,
        group_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        script: wire.Script | None = None,
        policies: Sequence[str] = (),
        sampling: Mapping[str, float] | None = None,
        models: Mapping[str, str] | None = None,
        wait_s: float | None = 20.0,
    ) -> SyncEpisode:
        """Claim an episode, to be used in a `with` block that ends it.

        Args:
            script: for the scripted backend, the replies to play in order of the episode's calls.
            policies: that may answer; empty takes all that are served.
            sampling: how every call is sampled whatever it asks for, as `{"temperature": 1}`, which an agent needs for
                its training that sends temperature 0, `top_p` or penalties; with `max_tokens` its longest reply.
            models: policy by the name that a call's `model` has, as `{"titles": "old"}`; other names mean the policy
                that is not routed to, where it is one.
            wait_s: seconds to wait for one; None waits for ever.

        Raises:
            ClaimTimeoutError: none was free in time.
            SwarmUnavailableError: the engine is off or failed.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        key = uuid.uuid4().hex
        while True:
            left = wire.MAX_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            poll_s = min(left, wire.MAX_POLL_S)
            body = wire.claim_body(
                self.client_id, key, task_id, mode, group_id, tags, script, policies, sampling, models, poll_s
            )
            try:
                lease = wire.read_claim(task_id, self._control("POST", "/episodes", body, is_repeatable=True))
            except EpisodeLostError:
                # The answer that named its episode was lost, and since then the episode.
                key = uuid.uuid4().hex
                continue
            if isinstance(lease, wire.Lease):
                episode = SyncEpisode(self, lease)
                self._keep_alive(episode)
                return episode
            if deadline is not None and time.monotonic() >= deadline:
                raise ClaimTimeoutError(task_id, lease, wait_s or 0.0)

    def _keep_alive(self, episode: SyncEpisode) -> None:
        with self._claiming:
            self._live[episode.episode_id] = episode
            self._wake.set()
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, name="swarm heartbeat", daemon=True)
                self._beating.start()

    def _beat(self) -> None:
        """Renew the leases of quiet episodes until the client is closed."""
        last = time.monotonic()
        while not self._is_closed:
            live = list(self._live.values())
            pause = min((episode._lease.lease_s * QUIET_SHARE / 2 for episode in live), default=None)
            # Counted from the last beat: claims wake this thread to look at the new lease, not to wait anew.
            if self._wake.wait(None if pause is None else max(0.0, last + pause - time.monotonic())):
                self._wake.clear()
                continue
            last = time.monotonic()
            for episode in live:
                if time.monotonic() - episode._last_sign < episode._lease.lease_s * QUIET_SHARE:
                    continue
                try:
                    # Not sent again: the next beat comes, and nobody who closes the client waits for it.
                    path = f"{self.url}{wire.CONTROL}/episodes/{episode.episode_id}/heartbeat"
                    self._send("POST", path, None, self._auth)
                    episode._last_sign = time.monotonic()
                except EpisodeLostError:
                    # Whoever works on it learns so from its next call.
                    self._live.pop(episode.episode_id, None)
                except SwarmError:
                    # The next beat tries again; the lease decides.
                    continue

    def run(
        self,
        tasks: Sequence[wire.Task],
        rollout: SyncRollout,
        *,
        group_size: int,
        concurrency: int,
        mode: Mode = Mode.TRAIN,
        tags: Mapping[str, str] | None = None,
        sampling: Mapping[str, float] | None = None,
        models: Mapping[str, str] | None = None,
        on_episode: OnEpisode | None = None,
        is_partial: bool = False,
        resume: bool = False,
        epoch: int | None = None,
    ) -> list[wire.EpisodeResult]:
        """Play every task `group_size` times, up to `concurrency` episodes side by side, each in a thread.

        As the async client's, except that an exception ends the run once the episodes that run have ended.
        """
        wire.check_resume(resume, epoch, mode)
        fills_groups = mode is Mode.TRAIN and not is_partial
        if fills_groups:
            wire.check_group_size(self.status(), group_size)
        before = self._finished if epoch is None else wire.episodes_of(tasks, group_size * epoch)
        completed = Counter(self.completed()) - before if resume else {}
        results: dict[int, wire.EpisodeResult] = {}
        free, has_failed = threading.Semaphore(concurrency), threading.Event()

        def claim(task: wire.Task) -> SyncEpisode:
            return self.episode(task.task_id, mode=mode, tags=tags, sampling=sampling, models=models, wait_s=None)

        def play(number: int, task: wire.Task, episode: SyncEpisode) -> None:
            try:
                for num_replays in count():
                    lost = self._attempt(rollout, episode, task)
                    if not wire.is_played_again(
                        task.task_id, lost, episode.result, num_replays, fills_groups=fills_groups
                    ):
                        break
                    episode = claim(task)
                assert episode.result is not None
                results[number] = episode.result
                if on_episode is not None:
                    on_episode(episode.result)
            except BaseException:
                has_failed.set()
                raise
            finally:
                free.release()

        playing: list[Future[None]] = []
        with ThreadPoolExecutor(concurrency, thread_name_prefix="rollout") as pool:
            for number, task in wire.places(tasks, group_size, completed):
                free.acquire()
                if has_failed.is_set():
                    break
                episode = claim(task)
                playing.append(pool.submit(play, number, task, episode))
            wait(playing, return_when=FIRST_EXCEPTION)
        for one in playing:
            one.result()
        if mode is Mode.TRAIN:
            self._finished |= before + wire.episodes_of(tasks, group_size)
        return [results[number] for number in sorted(results)]

    def _attempt(self, rollout: SyncRollout, episode: SyncEpisode, task: wire.Task) -> Exception | None:
        """Play an episode; see the async client."""
        with episode:
            try:
                rollout(episode, task)
                if episode.result is None:
                    raise wire.not_ended(episode.episode_id, task.task_id)
            except Exception as error:
                if not self._is_lost(episode, error):
                    raise
                self._live.pop(episode.episode_id, None)
                episode.is_given_up = True
                return error
        return None

    def _is_lost(self, episode: SyncEpisode, error: Exception) -> bool:
        """Whether an episode has to be played again, after its rollout raised something."""
        if episode.is_given_up:
            return isinstance(error, EpisodeNotEndedError)
        if episode.result is not None:
            return False
        try:
            self._control("GET", f"/episodes/{episode.episode_id}")
        except EpisodeLostError:
            return True
        except SwarmRequestError:
            return False
        return False
