"""Episodes that run and their open calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import ContextLengthError, EpisodeLostError, NotFoundError, UnsupportedError
from swarm_engine.protocol import Generate
from swarm_engine.seeding import derive_seed
from swarm_engine.server.loaded import Loaded
from swarm_engine.server.pool import Seat
from swarm_engine.server.worker_link import Generation, WorkerLink
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message
from swarm_engine.tracker.replies import ReplyReader
from swarm_engine.tracker.tracker import Draft, EpisodeRecord, EpisodeTracker
from swarm_engine.types import Episode, FinishReason, Mode, Outcome, SamplingParams


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A client's wish for an episode."""

    client_id: str
    task_id: str
    mode: Mode = Mode.TRAIN
    group_id: str | None = None
    policies: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    lease_s: float | None = None
    code_version: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An inference request, parsed and checked."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    """None takes the server's limit."""
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    script: str | tuple[int, ...] | None = None
    """A reply to play instead of sampling one, as text or token ids; for the scripted backend only."""


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An episode between its claim and its end."""

    episode_id: str
    api_key: str
    seat: Seat
    mode: Mode
    tags: dict[str, str]
    client_id: str
    agents: tuple[str, ...]
    """Agents the claim named; empty where any may speak."""
    policy_version: int
    lease_s: float
    started_at: float
    """Seconds, monotonic."""
    deadline: float
    """Seconds, monotonic; after it the episode ends as timeout."""
    tracker: EpisodeTracker
    running: dict[str, RunningCall] = field(default_factory=dict)
    lease_until: float = 0.0
    timer: asyncio.TimerHandle | None = None
    ending: str | None = None
    """The normalised `end` request that is being committed; None before."""
    ended: asyncio.Future[None] | None = None

    def touch(self) -> None:
        """Its client is alive."""
        self.lease_until = time.monotonic() + self.lease_s

    def close_calls(self) -> None:
        """Cancel what still runs; it is recorded and never trained."""
        for call in list(self.running.values()):
            call.cancel()

    def record(self, rewards: dict[str, float | None], outcome: Outcome, metrics: dict[str, float]) -> EpisodeRecord:
        """The episode so far, as the journal keeps it."""
        episode = Episode(
            episode_id=self.episode_id,
            task_id=self.seat.task_id,
            group_id=self.seat.group_id,
            index=self.seat.index,
            mode=self.mode,
            policy_version=self.policy_version,
            calls=self.tracker.calls(),
            rewards=rewards,
            outcome=outcome,
            metrics=metrics,
            tags=self.tags,
        )
        return EpisodeRecord(episode, self.tracker.notes())

    def begin_call(self, loaded: Loaded, agent: str, request: CallRequest, *, follow: bool) -> RunningCall:
        """Send a request to the sampler; `follow` keeps the reply's text up to date while it comes in.

        Raises:
            BadRequestError: the messages or limits can't be served.
            NotFoundError: the claim named its agents, and this is none of them.
            EpisodeLostError: the episode is ending.
        """
        if self.ending is not None:
            raise EpisodeLostError(f"episode {self.episode_id!r} has ended", code="episode_ended")
        if self.agents and agent not in self.agents:
            raise NotFoundError(
                f"agent {agent!r} is not in this episode", f"its claim named {', '.join(self.agents)}", code="agent"
            )
        script = _script_ids(loaded, request.script)
        (draft,) = self.tracker.begin(agent, request.messages)
        limit = loaded.policy.max_context
        room = limit - len(draft.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(draft.prompt_ids)} tokens, prompt and reply together may have {limit}",
                "shorten the messages, or end the episode as truncated",
                param="messages",
            )
        params = SamplingParams(
            max_tokens=min(request.max_tokens or loaded.config.sampler.max_tokens, room),
            temperature=request.temperature,
            seed=self._seed(loaded.config.seed, draft, request.seed),
        )
        return RunningCall.begin(self, loaded.link, loaded.codec, draft, params, request.stop, script, follow=follow)

    def _seed(self, run_seed: int, draft: Draft, given: int | None) -> int:
        """The seed of a call's own random stream.

        A caller's seed repeats within its episode, yet the members of a group still differ: with one stream for all of
        them every reply would be the same and nothing could be learned.
        """
        which: tuple[str | int, ...] = (draft.index,) if given is None else ("seed", given)
        seat = self.seat
        return derive_seed(run_seed, self.mode, seat.group_id, seat.index, seat.attempt, draft.agent, *which)


def _script_ids(loaded: Loaded, script: str | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if script is None:
        return None
    if loaded.config.sampler.backend is not SamplerBackend.SCRIPTED:
        raise UnsupportedError(
            "script is taken by the scripted backend only", 'start with sampler.backend "scripted"', param="script"
        )
    return (*loaded.codec.encode_text(script), loaded.policy.end_ids[0]) if isinstance(script, str) else script


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call whose reply is being sampled."""

    episode: LiveEpisode
    link: WorkerLink
    draft: Draft
    params: SamplingParams
    reply: ReplyReader
    generation: Generation
    has_news: asyncio.Event
    """Set when tokens come in or sampling ends; the one who streams clears it."""
    finish_reason: FinishReason | None = None
    """None until it is recorded."""
    is_closed: bool = False
    """Whether its caller, its episode or the sampler ended it before it was complete."""

    @staticmethod
    def begin(
        episode: LiveEpisode,
        link: WorkerLink,
        codec: ChatCodec,
        draft: Draft,
        params: SamplingParams,
        stop: tuple[str, ...],
        script: tuple[int, ...] | None,
        *,
        follow: bool,
    ) -> RunningCall:
        """Ask the sampler."""
        reply = codec.reader(draft, stop)
        has_news = asyncio.Event()

        def on_tokens(generation: Generation, token_ids: Sequence[int]) -> None:
            reply.push(token_ids)
            if reply.is_stopped:
                link.cancel(generation.request_id)
            has_news.set()

        is_followed = follow or bool(stop)
        question = Generate(draft.call_id, episode.tracker.policy, draft.prompt_ids, params, script, is_followed)
        generation = link.generate(question, on_tokens if is_followed else None)
        generation.done.add_done_callback(lambda _: has_news.set())
        call = RunningCall(episode, link, draft, params, reply, generation, has_news)
        episode.running[draft.call_id] = call
        episode.touch()
        return call

    def finish(self, reason: FinishReason) -> None:
        """Record the reply, once."""
        if self.finish_reason is not None or self.is_closed:
            return
        generation, reply = self.generation, self.reply
        if reply.num_tokens == 0:
            reply.push(generation.token_ids)
        if reply.is_stopped:
            generation.cut(reply.num_tokens)
            reason = FinishReason.STOP
        reply.finish()
        self.finish_reason = reason
        self.episode.running.pop(self.draft.call_id, None)
        self.episode.tracker.finish(
            self.draft,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
            temperature=self.params.temperature,
            finish_reason=reason,
            answer=reply.answer,
        )
        self.episode.touch()

    def cancel(self) -> None:
        """Its caller went away, or its episode did: what has come in is kept and not trained."""
        if self.finish_reason is not None or self.is_closed:
            return
        self.link.cancel(self.generation.request_id)
        self.generation.finish(FinishReason.CANCELLED)
        self.finish(FinishReason.CANCELLED)
        self.is_closed = True

    def fail(self) -> None:
        """The sampler refused it: there is nothing to record."""
        self.is_closed = True
        self.episode.running.pop(self.draft.call_id, None)
