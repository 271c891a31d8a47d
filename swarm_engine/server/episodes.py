"""Episodes that run and their open calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import BadRequestError, ContextLengthError, EpisodeLostError, NotFoundError, UnsupportedError
from swarm_engine.protocol import Generate
from swarm_engine.seeding import derive_seed
from swarm_engine.server.journal import dumps
from swarm_engine.server.loaded import Loaded, ServedPolicy
from swarm_engine.server.pool import Seat
from swarm_engine.server.worker_link import Generation, WorkerLink
from swarm_engine.tracker.answers import Answer, Delta, ToolCallDelta
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message
from swarm_engine.tracker.replies import ReplyReader
from swarm_engine.tracker.tracker import CallNote, CallNumbers, Draft, EpisodeRecord, EpisodeTracker, ordinal
from swarm_engine.types import (
    Call,
    DropReason,
    Episode,
    FinishReason,
    LogitsProcessors,
    Mode,
    Outcome,
    Refusals,
    SamplingOverride,
    SamplingParams,
    Untrained,
)

Script = str | tuple[int, ...]
"""A reply to play instead of sampling one, as text or token ids; for the scripted backend only."""


UNNAMED = "unnamed_agents"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended, as its client said it."""

    rewards: Mapping[str, float | None]
    """By agent."""
    outcome: Outcome
    metrics: Mapping[str, float]
    step_rewards: Mapping[str, float]
    """By call."""
    unnamed: tuple[str, ...] = ()
    """Agents of the claim that it gives no reward; a bare number would be for them too."""

    def as_text(self) -> str:
        """Equal for equal ends."""
        parts = {
            "rewards": dict(sorted(self.rewards.items())),
            "outcome": self.outcome,
            "metrics": dict(sorted(self.metrics.items())),
        }
        if self.step_rewards:
            parts["step_rewards"] = dict(sorted(self.step_rewards.items()))
        if self.unnamed:
            parts[UNNAMED] = sorted(self.unnamed)
        return dumps(parts)

    @staticmethod
    def unnamed_in(text: str) -> tuple[str, ...]:
        """The agents without a reward in what `as_text` returned."""
        return tuple(json.loads(text).get(UNNAMED, ()))


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
    script: tuple[Script, ...] | None = None
    """Replies to play call by call, in order of arrival; None where the sampler samples or each call brings its own."""
    sampling: SamplingOverride | None = None
    """None samples each call as it asks."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Policy by name, for calls whose `model` is that name."""
    claim_key: str | None = None
    """The same key of the same client is the same episode; None where the claim is not sent again."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The model calls tools or not, as it likes."""


@dataclass(frozen=True, slots=True)
class NoTools:
    """The model sees the tools, and what it writes is text."""


@dataclass(frozen=True, slots=True)
class Required:
    """The model must call a tool."""


@dataclass(frozen=True, slots=True)
class Named:
    """The model must call one of these tools."""

    names: tuple[str, ...]


ToolChoice = Auto | NoTools | Required | Named


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a request asks the model to reason: a hint, but where that is for its chat template to say."""

    place: str
    """Of the field that asks."""
    is_none: bool
    """Whether it is not to reason at all."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that later requests of its episode can name."""

    messages: tuple[Message, ...]
    """The conversation up to its end, instructions not."""
    body: Mapping[str, Any]
    """As it was returned."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An inference request, parsed and checked."""

    messages: tuple[Message, ...]
    """For the chat template; empty where there is a raw prompt."""
    max_tokens: int | None
    """None takes the server's limit."""
    temperature: float
    seed: int | None
    stop: tuple[str, ...] = ()
    raw_prompt: str | tuple[int, ...] | None = None
    """A prompt past the template: text in which nothing is a control token, or token ids."""
    tools: tuple[Message, ...] = ()
    tool_choice: ToolChoice = Auto()
    is_single_call: bool = False
    """Tool calls after the first are left out of the reply that is returned; the record has what was sampled."""
    grammar: str | None = None
    """What the reply must follow."""
    num_choices: int = 1
    top_logprobs: int = 0
    effort: Effort | None = None
    processors: LogitsProcessors | None = None
    script: Script | None = None


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
    policies: Mapping[str, ServedPolicy]
    """That may answer, by name."""
    trackers: Mapping[str, EpisodeTracker]
    """Of each of them, with numbers in common."""
    sampling: SamplingOverride | None = None
    """See the claim; so are `models`."""
    models: Mapping[str, str] = field(default_factory=dict)
    script: deque[Script] | None = None
    """Replies that its claim gave to play and that no call has taken yet."""
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    """Those that may be named again, by id."""
    asks: list[RunningAsk] = field(default_factory=list)
    """Requests whose callers wait for some of their reply."""
    refusals: Refusals = field(default_factory=Refusals)
    num_claims: int = 1
    """Claims that were given it, more than one where a claim was sent again; without those whose callers went away."""
    lease_until: float = 0.0
    timer: asyncio.TimerHandle | None = None
    ending: str | None = None
    """The normalised `end` request that is being committed; None before."""
    ended: asyncio.Future[DropReason | None] | None = None

    def touch(self) -> None:
        """Its client is alive."""
        self.lease_until = time.monotonic() + self.lease_s

    @property
    def num_running(self) -> int:
        """Calls that are being answered."""
        return sum(not call.is_over for ask in self.asks for call in ask.calls)

    @property
    def is_sampling(self) -> bool:
        """Whether replies are being sampled; one that is only waiting to be read does not count."""
        return any(not ask.is_done for ask in self.asks)

    @staticmethod
    def track(episode_id: str, policies: Mapping[str, ServedPolicy]) -> dict[str, EpisodeTracker]:
        """Empty trackers for these policies."""
        numbers = CallNumbers()
        return {
            name: EpisodeTracker(episode_id, name, policy.codec, policy.history, policy.max_context, numbers)
            for name, policy in policies.items()
        }

    @property
    def speakers(self) -> tuple[str, ...]:
        """Agents whose requests went to a sampler, in order of the first one."""
        return next(iter(self.trackers.values())).agents

    def calls(self) -> tuple[Call, ...]:
        """Every answered call in order of arrival, unused retries marked."""
        calls = [call for tracker in self.trackers.values() for call in tracker.calls()]
        return tuple(sorted(calls, key=lambda call: ordinal(call.call_id)))

    def notes(self) -> tuple[CallNote, ...]:
        """What the journal keeps beside the calls, in the same order."""
        notes = [note for tracker in self.trackers.values() for note in tracker.notes()]
        return tuple(sorted(notes, key=lambda note: ordinal(note.call_id)))

    def close_calls(self) -> None:
        """Cancel every request that is still being answered; it is recorded and never trained."""
        for ask in self.asks.copy():
            ask.cancel()

    def record(self, ending: Ending) -> EpisodeRecord:
        """The episode so far, as the journal keeps it."""
        episode = Episode(
            episode_id=self.episode_id,
            task_id=self.seat.task_id,
            group_id=self.seat.group_id,
            index=self.seat.index,
            mode=self.mode,
            policy_version=self.policy_version,
            calls=self.calls(),
            rewards=ending.rewards,
            outcome=ending.outcome,
            metrics=ending.metrics,
            tags=self.tags,
            step_rewards=ending.step_rewards,
        )
        return EpisodeRecord(episode, self.notes(), self.refusals, self.sampling, self.models)

    def draft(self, policy: str, agent: str, request: CallRequest) -> Draft:
        """Turn a request into a prompt that leaves room for a reply; like the tracker's, on any thread.

        Raises:
            BadRequestError: the prompt can't be served.
            NotFoundError: the claim named its agents, and this is none of them.
        """
        self.check_agent(agent)
        served, tracker = self.policies[policy], self.trackers[policy]
        if request.effort is not None:
            _check_effort(request.effort, served.codec.suited(request.tools))
        prompt, limit = request.raw_prompt, served.max_context
        if prompt is None:
            draft = tracker.draft(agent, request.messages, request.tools)
        elif isinstance(prompt, str):
            served.codec.check_length(prompt, limit, "prompt")
            draft = tracker.draft_ids(agent, served.codec.encode_text(prompt))
        else:
            draft = tracker.draft_ids(agent, prompt)
        if len(draft.prompt_ids) >= limit:
            param = "messages" if prompt is None else "prompt"
            raise ContextLengthError(str(len(draft.prompt_ids)), limit, param)
        return draft

    def begin(self, loaded: Loaded, asked: Draft, request: CallRequest, *, follow: bool) -> RunningAsk:
        """Send a drafted request to the sampler; `follow` keeps the replies' text up to date while they come in.

        Raises:
            BadRequestError: what it asks of the reply can't be served.
            EpisodeLostError: the episode is ending.
        """
        if self.ending is not None:
            raise EpisodeLostError(f"episode {self.episode_id!r} has ended", code="episode_ended")
        served = self.policies[asked.policy]
        grammar = _grammar(served.codec, request, asked)
        room = served.max_context - len(asked.prompt_ids)
        scripts = self._scripts(loaded, served, request)
        # Nothing refuses it from here on. A refused request is no call of its agent.
        drafts = self.trackers[asked.policy].number(asked, request.num_choices)
        has_news = asyncio.Event()
        is_followed = follow or bool(request.stop)
        max_tokens = (self.sampling and self.sampling.max_tokens) or request.max_tokens
        calls = []
        for choice, (draft, script) in enumerate(zip(drafts, scripts, strict=True)):
            params = SamplingParams(
                max_tokens=min(max_tokens or loaded.config.sampler.max_tokens, room),
                temperature=request.temperature,
                seed=self._seed(loaded.config.seed, draft, request.seed, choice),
                top_logprobs=request.top_logprobs,
                processors=request.processors,
            )
            question = Generate(draft.call_id, draft.policy, draft.prompt_ids, params, script, is_followed, grammar)
            calls.append(RunningCall.begin(self, loaded.link, request, choice, draft, question, has_news))
        self.touch()
        ask = RunningAsk(self, request, tuple(calls), has_news)
        self.asks.append(ask)
        return ask

    def check_agent(self, agent: str) -> None:
        """See that an agent may speak here.

        Raises:
            NotFoundError: the claim named its agents, and this is none of them.
        """
        if self.agents and agent not in self.agents:
            raise NotFoundError(
                f"agent {agent!r} is not in this episode", f"its claim named {', '.join(self.agents)}", code="agent"
            )

    def _scripts(self, loaded: Loaded, served: ServedPolicy, request: CallRequest) -> Sequence[tuple[int, ...] | None]:
        """What each choice plays; None where the sampler samples.

        Raises:
            UnsupportedError: the request brings a script, and this backend plays none.
            BadRequestError: the claim's script has too few replies left.
        """
        if request.script is not None:
            check_scripts(loaded)
            return [_script_ids(served, request.script)] * request.num_choices
        if self.script is None:
            return [None] * request.num_choices
        if len(self.script) < request.num_choices:
            raise BadRequestError(
                f"the script of episode {self.episode_id!r} has {len(self.script)} replies left, "
                f"this request asks for {request.num_choices}",
                "give the claim a reply for every call",
                code="script_ended",
            )
        return [_script_ids(served, self.script.popleft()) for _ in range(request.num_choices)]

    def _seed(self, run_seed: int, draft: Draft, given: int | None, choice: int) -> int:
        """The seed of a call's own random stream.

        A caller's seed repeats within its episode, yet the members of a group still differ: with one stream for all of
        them every reply would be the same and nothing could be learned. So do the choices of one request.
        """
        which: tuple[str | int, ...] = (draft.index,)
        if given is not None:
            which = ("seed", given, choice) if choice else ("seed", given)
        seat = self.seat
        return derive_seed(run_seed, self.mode, seat.group_id, seat.index, seat.attempt, draft.agent, *which)


def _check_effort(effort: Effort, codec: ChatCodec) -> None:
    """See that the model can be asked to reason so much.

    Raises:
        UnsupportedError: its chat template decides.
    """
    if effort.is_none and codec.has_reasoning:
        what = "forbids the model to reason, and its chat template has it do so"
    elif codec.template.reads_effort:
        what = "says how much the model reasons, and its chat template is rendered with the effort of its own"
    else:
        return
    raise UnsupportedError(f"{effort.place} {what}", "leave it out", param=effort.place)


def check_scripts(loaded: Loaded) -> None:
    """See that the backend plays scripts.

    Raises:
        UnsupportedError: it samples.
    """
    if loaded.config.sampler.backend is not SamplerBackend.SCRIPTED:
        raise UnsupportedError(
            "script is taken by the scripted backend only", 'start with sampler.backend "scripted"', param="script"
        )


def _script_ids(served: ServedPolicy, script: Script) -> tuple[int, ...]:
    """A script as the sampler would have returned it: markers in its text are control tokens, and it ends."""
    if not isinstance(script, str):
        return script
    ids, ends = served.codec.encode(script), served.ready.end_ids
    return ids if ids and ids[-1] in ends else (*ids, ends[0])


def _grammar(codec: ChatCodec, request: CallRequest, draft: Draft) -> str | None:
    """What the reply must follow; None where it is free."""
    tools = request.tools
    codec = codec.suited(tools)
    match request.tool_choice:
        case Named(names):
            return codec.forced_call_grammar(tools, names, draft)
        case Required():
            return codec.forced_call_grammar(tools, [tool["function"]["name"] for tool in tools], draft)
        case Auto() | NoTools():
            if request.grammar is None:
                return None
            callable_tools = tools if isinstance(request.tool_choice, Auto) else ()
            return codec.formed_answer_grammar(request.grammar, callable_tools, draft)


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call whose reply is being sampled."""

    episode: LiveEpisode
    link: WorkerLink
    request: CallRequest
    choice: int
    """Its place among the choices of the request."""
    draft: Draft
    question: Generate
    reply: ReplyReader
    generation: Generation
    num_told: int = 0
    """Tokens that `news` has told of."""
    finish_reason: FinishReason | None = None
    """None until it is recorded."""
    is_closed: bool = False
    """Whether its caller, its episode or the sampler ended it before it was complete."""

    @staticmethod
    def begin(
        episode: LiveEpisode,
        link: WorkerLink,
        request: CallRequest,
        choice: int,
        draft: Draft,
        question: Generate,
        has_news: asyncio.Event,
    ) -> RunningCall:
        """Ask the sampler."""
        reads_tools = bool(request.tools) and not isinstance(request.tool_choice, NoTools)
        reply = episode.policies[draft.policy].codec.reader(draft, stop=request.stop, reads_tools=reads_tools)

        def on_tokens(generation: Generation, token_ids: Sequence[int]) -> None:
            reply.push(token_ids)
            if reply.stopped_by is not None:
                link.cancel(generation.request_id)
            has_news.set()

        def on_end(_: object) -> None:
            # From here on it is the caller's turn.
            episode.touch()
            has_news.set()

        generation = link.generate(question, on_tokens)
        generation.done.add_done_callback(on_end)
        return RunningCall(episode, link, request, choice, draft, question, reply, generation)

    @property
    def is_over(self) -> bool:
        """Whether it is recorded or was given up."""
        return self.finish_reason is not None or self.is_closed

    @property
    def tracker(self) -> EpisodeTracker:
        """That records it."""
        return self.episode.trackers[self.draft.policy]

    @property
    def answer(self) -> Answer:
        """The reply as it is returned."""
        answer = self.reply.answer
        return replace(answer, tool_calls=answer.tool_calls[:1]) if self.request.is_single_call else answer

    def news(self) -> News:
        """What came since the last look. Joined, the pieces are the answer."""
        placed = self.reply.take_placed()
        if self.request.is_single_call:
            placed = [(one, end) for one, end in placed if not (isinstance(one, ToolCallDelta) and one.index > 0)]
        start, self.num_told = self.num_told, self.reply.num_tokens
        return News([delta for delta, _ in placed], [end for _, end in placed], range(start, self.num_told))

    def finish(self, reason: FinishReason) -> None:
        """Record the complete reply, once."""
        # Where a stop string came, the sampler was told to cancel the rest.
        self._record(reason if self.reply.stopped_by is None else FinishReason.STOP)

    def _record(self, reason: FinishReason) -> None:
        if self.is_over:
            return
        generation, reply = self.generation, self.reply
        if reply.stopped_by is not None:
            generation.cut(reply.num_tokens)
        reply.finish()
        self.finish_reason = reason
        self.tracker.finish(
            self.draft,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
            temperature=self.question.params.temperature,
            finish_reason=reason,
            answer=reply.answer,
            untrained=self._untrained(),
        )
        self.episode.touch()

    def _untrained(self) -> Untrained | None:
        """Why its reply may not be trained, whatever comes of it."""
        if not self.episode.policies[self.draft.policy].ready.trainable:
            return Untrained.FROZEN
        is_constrained = self.question.grammar is not None or self.question.params.processors is not None
        return Untrained.CONSTRAINED if is_constrained else None

    def cancel(self) -> None:
        """Its caller went away or got an error, or its episode ended: it is kept and not trained.

        Of a reply that is still being sampled there is only what the sampler has sent, and one that nobody follows it
        sends at the end.
        """
        if self.is_closed:
            return
        if self.finish_reason is None:
            self.link.cancel(self.generation.request_id)
            self.generation.finish(FinishReason.CANCELLED)
            self._record(FinishReason.CANCELLED)
        else:
            self.finish_reason = FinishReason.CANCELLED
            self.tracker.cancel(self.draft)
        self.is_closed = True

    def fail(self) -> None:
        """The sampler gave it up: what has come in is kept and not trained."""
        if self.generation.token_ids:
            self._record(FinishReason.CANCELLED)
        self.is_closed = True


@dataclass(frozen=True, slots=True)
class News:
    """What came of a reply since somebody looked last."""

    deltas: list[Delta]
    ends: list[int]
    """For each delta how many tokens of the reply begin before its end."""
    tokens: range
    """Places of its new tokens among those of the reply."""


@dataclass(slots=True, eq=False)
class RunningAsk:
    """One request for replies: as many calls as it has choices."""

    episode: LiveEpisode
    request: CallRequest
    calls: tuple[RunningCall, ...]
    has_news: asyncio.Event
    """Set when tokens come in or a call ends; the one who waits clears it."""
    on_cancel: Callable[[], None] = lambda: None
    """Called when it is cancelled."""

    @property
    def call_id(self) -> str:
        """Of its first choice."""
        return self.calls[0].draft.call_id

    @property
    def policy(self) -> str:
        """Name of the policy that answers."""
        return self.calls[0].draft.policy

    @property
    def policy_version(self) -> int:
        """That its policy had when the episode was claimed."""
        ready = self.episode.policies[self.policy].ready
        return self.episode.policy_version if ready.trainable else ready.version

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt, which all choices share."""
        return len(self.calls[0].draft.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(call.generation.token_ids) for call in self.calls)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all choices, those that were spent on reasoning."""
        return sum(call.reply.num_reasoning_tokens for call in self.calls)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is sampled."""
        return all(call.generation.done.done() for call in self.calls)

    def settle(self) -> None:
        """Its caller is being told the last of the reply: from here on the calls stand as they are recorded."""
        self.episode.asks.remove(self)

    def cancel(self) -> None:
        """Train nothing of it, complete choices included, for its caller does not get the whole reply."""
        if self not in self.episode.asks:
            return
        self.episode.asks.remove(self)
        for call in self.calls:
            call.cancel()
        self.on_cancel()
