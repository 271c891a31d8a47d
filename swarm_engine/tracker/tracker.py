"""The calls of one episode through one policy, and which earlier call a request goes on from.

Prompt ids are what the sampler is given and completion ids what it returned; a reply's text is never encoded again.
A request extends an earlier call when its messages begin with that call's messages and its answer, compared by role,
name, content and tool calls. It then goes on from that call's recorded ids, and what the template writes behind the
answer (the newline after the end token, the next message) is encoded apart and carries no loss. Where the template
takes something out of that history by a rule of its own (earlier reasoning, old tool results), `History.RECORDED`
follows the template: the request starts a timeline of its own. `History.APPEND` goes on all the same. A request whose
history was trimmed or edited starts a timeline too.

An ask is one request; its choices are calls of their own. The same messages asked again are a retry: the caller threw
the first replies away. Of equal asks those calls are trained that later calls build on; where none is built on, every
choice of the last ask that can be trained is. The others stay as a record with the reason `unused_retry`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm_engine.config import History
from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.codec import ChatCodec, mark_of
from swarm_engine.tracker.messages import Message, Tool, extend_digest, prefix_digests
from swarm_engine.types import Call, Episode, FinishReason, Refusals, SamplingOverride, Untrained


@dataclass(frozen=True, slots=True)
class CallNote:
    """What a call's ids alone don't tell: the messages behind them."""

    call_id: str
    extends: str | None
    """The call whose recorded ids its prompt begins with; None where the prompt was rendered whole."""
    messages: tuple[Message, ...]
    """Those after the extended call's answer, or all of them; none where the prompt came as token ids."""
    answer: Answer
    """The reply as it was read, whole; a caller that wants a single tool call gets the first of them."""
    tools: tuple[Tool, ...] = ()
    """Of its ask; a call that extends another has the same, and names none itself."""
    builds_on: str | None = None
    """The call whose answer its messages go on from, whether or not it extends that call's ids."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A completed episode as the journal keeps it."""

    episode: Episode
    notes: tuple[CallNote, ...]
    """One for each call, in the same order."""
    refusals: Refusals = field(default_factory=Refusals)
    sampling: SamplingOverride | None = None
    """Of its claim."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Of its claim: the policy by each name that it routes."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that answered, in order of their first call."""
        return tuple(dict.fromkeys(call.policy for call in self.episode.calls))

    def part(self, policy: str) -> EpisodeRecord:
        """The calls of one policy; none of them goes on from a call of another."""
        both = [one for one in zip(self.episode.calls, self.notes, strict=True) if one[0].policy == policy]
        episode = replace(self.episode, calls=tuple(call for call, _ in both))
        return EpisodeRecord(episode, tuple(note for _, note in both))


@dataclass(frozen=True, slots=True)
class Draft:
    """A call on its way to the sampler."""

    call_id: str
    """Empty until it is numbered, as `ask_id` is; its `index` is 0 until then."""
    ask_id: str
    """Shared by the choices of one request."""
    index: int
    """Among the calls of its agent, in order of arrival."""
    agent: str
    policy: str
    """Which is to answer."""
    prompt_ids: tuple[int, ...]
    rendered: str
    """The whole prompt as the template writes it, breaks included; empty where the prompt came as token ids."""
    protected: tuple[Message, ...]
    protected_tools: tuple[Tool, ...]
    num_known: int
    """Messages that the extended call and its answer cover."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    digest: bytes
    """Of its messages and tools; equal for a retry."""
    builds_on: str | None
    """The call whose answer is in its history, whether or not the ids could be reused."""
    extends: str | None
    is_raw: bool = False
    """Whether the prompt came as token ids."""


@dataclass(frozen=True, slots=True)
class _Answered:
    draft: Draft
    call: Call
    answer: Answer


@dataclass(slots=True)
class CallNumbers:
    """Numbers the calls of one episode, whichever policies answer them."""

    num_calls: int = 0
    num_by_agent: dict[str, int] = field(default_factory=dict)
    """Agents in order of their first call."""

    def take(self, agent: str, count: int) -> tuple[int, int]:
        """Numbers for some calls that an agent makes now: the first one's in the episode and among its agent's."""
        first, index = self.num_calls, self.num_by_agent.get(agent, 0)
        self.num_calls = first + count
        self.num_by_agent[agent] = index + count
        return first, index


class EpisodeTracker:
    """What one episode asked a policy and got. Calls may overlap. No method waits; drafting renders and encodes."""

    def __init__(
        self,
        episode_id: str,
        policy: str,
        codec: ChatCodec,
        history: History = History.RECORDED,
        max_context: int | None = None,
        numbers: CallNumbers | None = None,
    ) -> None:
        """Begin empty.

        Args:
            max_context: tokens that a prompt and its reply may have; None where any number is taken.
            numbers: shared with the trackers of the episode's other policies; None where there are none.
        """
        self._episode_id = episode_id
        self.policy = policy
        """Name of the policy it speaks through."""
        self._codec = codec
        self._history = history
        self._max_context = max_context
        self._numbers = numbers or CallNumbers()
        self._answered: dict[str, _Answered] = {}
        self._by_digest: dict[bytes, list[str]] = {}
        """Calls whose answer completes a conversation, by its digest, the newest last."""
        self._raw: dict[str, list[tuple[bytes, str]]] = {}
        """By agent, prompt and reply of every call whose prompt came as token ids."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents of the episode whose requests went to a sampler, in order of the first one."""
        return tuple(self._numbers.num_by_agent)

    def begin(self, agent: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[Draft, ...]:
        """Draft a request of one choice and number it at once.

        Raises:
            BadRequestError: see `draft`.
        """
        return self.number(self.draft(agent, messages, tools))

    def draft(self, agent: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Draft:
        """Turn a request into prompt ids. It has no number yet, so it may still be refused and leave no trace.

        It changes nothing here, so it may run on another thread while calls are numbered and finished.

        Raises:
            BadRequestError: the chat template refuses the messages, or has no place for a part of them.
            ContextLengthError: the prompt is so long that it need not be encoded to know that it doesn't fit.
        """
        codec, tools = self._codec.suited(tools), tuple(tools)
        messages = codec.without_labels(messages)
        codec.check(messages, tools)
        digests = prefix_digests(agent, messages, tools)
        base = self._longest_base(messages, digests)
        draft = self._render(agent, messages, tools, digests[-1]) if base is None else self._go_on(base, messages)
        return replace(draft, digest=digests[-1])

    def draft_ids(self, agent: str, prompt_ids: Sequence[int]) -> Draft:
        """A request whose prompt came as token ids; the sampler gets these very ids.

        Raises:
            BadRequestError: it is empty.
        """
        if not prompt_ids:
            raise BadRequestError("the prompt holds no token", "send at least one", param="prompt")
        written = _packed(prompt_ids)
        earlier = [(len(ids), call_id) for ids, call_id in self._raw.get(agent, ()) if written.startswith(ids)]
        return Draft(
            call_id="",
            ask_id="",
            index=0,
            agent=agent,
            policy=self.policy,
            prompt_ids=tuple(prompt_ids),
            rendered="",
            protected=(),
            protected_tools=(),
            num_known=0,
            messages=(),
            tools=(),
            digest=hashlib.blake2b(agent.encode() + b"\0" + written, digest_size=16, person=b"raw").digest(),
            builds_on=max(earlier, key=lambda one: one[0])[1] if earlier else None,
            extends=None,
            is_raw=True,
        )

    def number(self, draft: Draft, num_choices: int = 1) -> tuple[Draft, ...]:
        """Count an ask that goes to the sampler now: its draft once for each choice, each with an id and an index."""
        first, index = self._numbers.take(draft.agent, num_choices)
        names = [f"{self._episode_id}-{first + choice}" for choice in range(num_choices)]
        return tuple(
            replace(draft, call_id=name, ask_id=names[0], index=index + choice) for choice, name in enumerate(names)
        )

    def _longest_base(self, messages: Sequence[Message], digests: Sequence[bytes]) -> _Answered | None:
        """The call with the longest history that these messages begin with, its answer included."""
        for count in range(len(messages), 1, -1):
            if messages[count - 1]["role"] == "assistant" and (found := self._by_digest.get(digests[count])):
                return self._answered[found[-1]]
        return None

    def _render(self, agent: str, messages: tuple[Message, ...], tools: tuple[Tool, ...], digest: bytes) -> Draft:
        """A request whose prompt is rendered whole."""
        codec = self._codec.suited(tools)
        protected = tuple(map(codec.protect, messages))
        protected_tools = codec.protect_tools(tools)
        rendered = codec.render(protected, protected_tools)
        return Draft(
            call_id="",
            ask_id="",
            index=0,
            agent=agent,
            policy=self.policy,
            prompt_ids=self._encode(rendered),
            rendered=rendered,
            protected=protected,
            protected_tools=protected_tools,
            num_known=0,
            messages=messages,
            tools=tools,
            digest=digest,
            builds_on=None,
            extends=None,
        )

    def _go_on(self, base: _Answered, messages: tuple[Message, ...]) -> Draft:
        """A request whose history holds an answer.

        What is known of the history comes from the record and not from the request: reasoning that the caller left out
        is the template's to drop.
        """
        before = base.draft
        codec = self._codec.suited(before.tools)
        num_known = len(before.messages) + 1
        later = _rename_calls(messages[num_known - 1], base.answer, messages[num_known:])
        answer = base.answer.message(has_written_ids=True)
        protected_later = tuple(map(codec.protect, later))
        protected = (*before.protected, codec.protect(answer), *protected_later)
        rendered = codec.render(protected, before.protected_tools)
        suffix = self._suffix(base, rendered, protected_later)
        if suffix is None:
            prompt_ids = self._encode(rendered)
        else:
            prompt_ids = base.call.prompt_ids + base.call.completion_ids + suffix
        return replace(
            before,
            prompt_ids=prompt_ids,
            rendered=rendered,
            protected=protected,
            num_known=0 if suffix is None else num_known,
            messages=(*before.messages, answer, *later),
            builds_on=base.call.call_id,
            extends=None if suffix is None else base.call.call_id,
        )

    def _suffix(self, base: _Answered, rendered: str, later: Sequence[Message]) -> tuple[int, ...] | None:
        """Ids to append to what `base` recorded, or None where the template takes something out of it."""
        codec, answer, start = self._codec.suited(base.draft.tools), base.answer, base.draft.rendered
        try:
            marked = codec.render((*base.draft.protected, codec.stand_in(answer), *later), base.draft.protected_tools)
        except BadRequestError:
            return None
        tail = codec.after(marked, answer)
        if tail is None:
            return None
        if self._history is History.RECORDED:
            # Every part of the answer must be there, behind all that was there before it.
            parts: list[str | int] = list(range(len(answer.tool_calls)))
            parts += ["content"] if answer.content.strip() or not parts else []
            parts += ["reasoning"] if answer.reasoning is not None else []
            written = marked[len(start) :]
            if not marked.startswith(start) or any(mark_of(part) not in written for part in parts):
                return None
            # A template may treat this very answer in another way than its stand-in.
            if not rendered.startswith(start) or not rendered.endswith(tail):
                return None
            content = codec.protect({"role": "assistant", "content": answer.content})["content"].strip()
            shown = rendered[len(start) : len(rendered) - len(tail)]
            if content not in shown and json.dumps(content, ensure_ascii=False)[1:-1] not in shown:
                return None
        return self._encode(codec.join(tail, answer, base.call.completion_ids))

    def _encode(self, rendered: str) -> tuple[int, ...]:
        if self._max_context is not None:
            self._codec.check_length(rendered, self._max_context)
        return self._codec.encode(rendered)

    def finish(
        self,
        draft: Draft,
        *,
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
        temperature: float,
        finish_reason: FinishReason,
        answer: Answer,
        untrained: Untrained | None = None,
    ) -> Call:
        """Keep what the sampler returned; `untrained` says why it may not be trained, where it may not."""
        assert len(completion_ids) == len(logprobs) == len(policy_versions), "every sampled token has its numbers"
        if finish_reason is FinishReason.CANCELLED:
            untrained = Untrained.CANCELLED
        elif untrained is None and temperature == 0:
            untrained = Untrained.GREEDY
        call = Call(
            call_id=draft.call_id,
            index=draft.index,
            policy=draft.policy,
            agent=draft.agent,
            prompt_ids=draft.prompt_ids,
            completion_ids=tuple(completion_ids),
            logprobs=tuple(logprobs),
            policy_versions=tuple(policy_versions),
            temperature=temperature,
            finish_reason=finish_reason,
            untrained_because=untrained,
        )
        self._answered[draft.call_id] = _Answered(draft, call, answer)
        # The caller of a cancelled call never saw its answer, so nothing can build on it.
        if finish_reason is not FinishReason.CANCELLED:
            if draft.is_raw:
                written = _packed(call.prompt_ids + call.completion_ids)
                self._raw.setdefault(draft.agent, []).append((written, draft.call_id))
            else:
                self._by_digest.setdefault(extend_digest(draft.digest, answer.message()), []).append(draft.call_id)
        return call

    def cancel(self, draft: Draft) -> None:
        """Take a finished call's answer back: it never reached its caller whole, so nobody acted on it."""
        known = self._answered[draft.call_id]
        call = replace(known.call, finish_reason=FinishReason.CANCELLED, untrained_because=Untrained.CANCELLED)
        self._answered[draft.call_id] = replace(known, call=call)
        if draft.is_raw:
            self._raw[draft.agent] = [one for one in self._raw[draft.agent] if one[1] != draft.call_id]
        else:
            self._by_digest[extend_digest(draft.digest, known.answer.message())].remove(draft.call_id)

    def calls(self) -> tuple[Call, ...]:
        """Every answered call in order of arrival, unused retries marked."""
        answered = self._in_order()
        used = {one.draft.builds_on for one in answered}
        last: dict[bytes, str] = {}
        """The newest of equal asks that can be trained."""
        has_used: set[bytes] = set()
        for one in answered:
            if one.call.untrained_because is None:
                last[one.draft.digest] = one.draft.ask_id
            if one.call.call_id in used:
                has_used.add(one.draft.digest)
        calls = []
        for one in answered:
            digest, call = one.draft.digest, one.call
            keeps = call.call_id in used if digest in has_used else last.get(digest) == one.draft.ask_id
            if not keeps and call.untrained_because is None:
                call = replace(call, untrained_because=Untrained.UNUSED_RETRY)
            calls.append(call)
        return tuple(calls)

    def notes(self) -> tuple[CallNote, ...]:
        """What the journal keeps beside the calls, in the same order."""
        return tuple(
            CallNote(
                call_id=one.call.call_id,
                extends=one.draft.extends,
                messages=one.draft.messages[one.draft.num_known :],
                answer=one.answer,
                tools=one.draft.tools if one.draft.extends is None else (),
                builds_on=one.draft.builds_on,
            )
            for one in self._in_order()
        )

    def _in_order(self) -> list[_Answered]:
        return sorted(self._answered.values(), key=lambda one: ordinal(one.call.call_id))


def ordinal(call_id: str) -> int:
    """A call's number in its episode."""
    return int(call_id.rpartition("-")[2])


def _packed(ids: Sequence[int]) -> bytes:
    return array("Q", ids).tobytes()


def _rename_calls(sent: Message, answer: Answer, later: Sequence[Message]) -> tuple[Message, ...]:
    """Later messages with the ids of the answer's calls as the model sees them; some frameworks make their own.

    An id means the newest call that has it: frameworks that count anew in each reply use one again.
    """
    seen = [call.written_id or call.call_id for call in answer.tool_calls]
    renamed = {call["id"]: own for call, own in zip(sent.get("tool_calls", ()), seen, strict=True)}
    found = []
    for message in later:
        for call in message.get("tool_calls", ()):
            renamed.pop(call["id"], None)
        if (given := message.get("tool_call_id")) in renamed:
            found.append({**message, "tool_call_id": renamed[given]})
        else:
            found.append(message)
    return tuple(found)
