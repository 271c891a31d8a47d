"""The calls of one episode, and which earlier call a request goes on from.

Prompt ids are what the sampler is given and completion ids what it returned; a reply's text is never encoded again.
A request that begins with an earlier call's messages and its answer goes on from that call's recorded ids; what the
template writes after the answer (the newline behind the end token, the next message) is encoded apart and carries no
loss. Where the template itself rewrites that history (drops earlier reasoning, say), the template is followed, and the
request starts a timeline of its own. So does a request whose history was trimmed or edited.

The same messages asked again are a retry: the caller threw the first reply away. Of such calls the ones that later
calls build on are trained, or the last one where none is; the others stay as a record with the reason `unused_retry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import SENTINEL, Message, extend_digest, prefix_digests
from swarm_engine.types import Call, Episode, FinishReason


@dataclass(frozen=True, slots=True)
class CallNote:
    """What a call's ids alone don't tell: the messages behind them."""

    call_id: str
    extends: str | None
    """The call whose recorded ids its prompt begins with; None where the prompt was rendered whole."""
    messages: tuple[Message, ...]
    """Those after the extended call's answer, or all of them."""
    answer: str
    """The reply's content as it was returned."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A completed episode as the journal keeps it."""

    episode: Episode
    notes: tuple[CallNote, ...]
    """One for each call, in the same order."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request on its way to the sampler."""

    call_id: str
    index: int
    """Among the calls of its agent, in order of arrival."""
    agent: str
    prompt_ids: tuple[int, ...]
    rendered: str
    """The whole prompt as the template writes it, breaks included."""
    protected: tuple[Message, ...]
    num_known: int
    """Messages that the extended call and its answer cover."""
    messages: tuple[Message, ...]
    digest: bytes
    """Of its messages; equal for a retry."""
    builds_on: str | None
    """The call whose answer is in its history, whether or not the ids could be reused."""
    extends: str | None


@dataclass(frozen=True, slots=True)
class _Answered:
    draft: Draft
    call: Call
    answer: str


class EpisodeTracker:
    """What one episode asked and got. Calls may overlap; every method is synchronous and cheap."""

    def __init__(self, episode_id: str, policy: str, codec: ChatCodec) -> None:
        self._episode_id = episode_id
        self.policy = policy
        """Name of the policy it speaks through."""
        self._codec = codec
        self._num_drafts = 0
        self._num_by_agent: dict[str, int] = {}
        self._answered: dict[str, _Answered] = {}
        self._by_digest: dict[bytes, str] = {}

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents that asked for something, in order of their first request."""
        return tuple(self._num_by_agent)

    def begin(self, agent: str, messages: Sequence[Message]) -> Draft:
        """Turn a request into prompt ids and give it its number.

        Raises:
            BadRequestError: the chat template refuses the messages, or has no place for a part of them.
        """
        messages = tuple(messages)
        self._codec.check(messages)
        digests = prefix_digests(agent, messages)
        base = self._longest_base(messages, digests)
        draft = self._extend(agent, base, messages, digests) if base is not None else None
        if draft is None:
            protected = tuple(map(self._codec.protect, messages))
            rendered = self._codec.render(protected)
            draft = Draft(
                call_id="",
                index=0,
                agent=agent,
                prompt_ids=self._codec.encode(rendered),
                rendered=rendered,
                protected=protected,
                num_known=0,
                messages=messages,
                digest=digests[-1],
                builds_on=base.call.call_id if base is not None else None,
                extends=None,
            )
        index = self._num_by_agent.get(agent, 0)
        self._num_by_agent[agent] = index + 1
        call_id = f"{self._episode_id}-{self._num_drafts}"
        self._num_drafts += 1
        return replace(draft, call_id=call_id, index=index)

    def _longest_base(self, messages: Sequence[Message], digests: Sequence[bytes]) -> _Answered | None:
        """The call with the longest history that these messages begin with, its answer included."""
        for count in range(len(messages), 1, -1):
            if messages[count - 1]["role"] == "assistant" and (found := self._by_digest.get(digests[count])):
                return self._answered[found]
        return None

    def _extend(
        self, agent: str, base: _Answered, messages: tuple[Message, ...], digests: Sequence[bytes]
    ) -> Draft | None:
        """The request as a continuation of `base`, or None where the template rewrites what `base` recorded."""
        codec = self._codec
        num_known = len(base.draft.messages) + 1
        answer = codec.protect(answer_message(base.answer))
        later = tuple(map(codec.protect, messages[num_known:]))
        marked = codec.render([*base.draft.protected, answer_message(SENTINEL), *later])
        head, _, tail = marked.partition(SENTINEL)
        # Some templates put a blank between their generation prompt and an answer; the model wrote its own, or none.
        gap = head[len(base.draft.rendered) :]
        if not head.startswith(base.draft.rendered) or gap.strip() or SENTINEL in tail:
            return None
        protected = (*base.draft.protected, answer, *later)
        rendered = codec.render(protected)
        shown = rendered[len(head) : len(rendered) - len(tail)]
        if rendered != head + shown + tail or shown.strip() != answer["content"].strip():
            return None
        suffix = codec.encode(after_answer(codec, tail, base.call.completion_ids))
        return Draft(
            call_id="",
            index=0,
            agent=agent,
            prompt_ids=base.call.prompt_ids + base.call.completion_ids + suffix,
            rendered=rendered,
            protected=protected,
            num_known=num_known,
            messages=(*base.draft.messages, answer_message(base.answer), *messages[num_known:]),
            digest=digests[-1],
            builds_on=base.call.call_id,
            extends=base.call.call_id,
        )

    def finish(
        self,
        draft: Draft,
        *,
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
        temperature: float,
        finish_reason: FinishReason,
        answer: str,
    ) -> Call:
        """Keep what the sampler returned."""
        assert len(completion_ids) == len(logprobs) == len(policy_versions), "every sampled token has its numbers"
        untrained_because = None
        if finish_reason is FinishReason.CANCELLED:
            untrained_because = "cancelled"
        elif temperature == 0:
            untrained_because = "greedy"
        call = Call(
            call_id=draft.call_id,
            index=draft.index,
            policy=self.policy,
            agent=draft.agent,
            prompt_ids=draft.prompt_ids,
            completion_ids=tuple(completion_ids),
            logprobs=tuple(logprobs),
            policy_versions=tuple(policy_versions),
            temperature=temperature,
            finish_reason=finish_reason,
            untrained_because=untrained_because,
        )
        self._answered[draft.call_id] = _Answered(draft, call, answer)
        if finish_reason is not FinishReason.CANCELLED:
            # The caller of a cancelled call never saw its answer, so nothing can build on it.
            self._by_digest[extend_digest(draft.digest, answer_message(answer))] = draft.call_id
        return call

    def calls(self) -> tuple[Call, ...]:
        """Every answered call in order of arrival, unused retries marked."""
        answered = self._in_order()
        used = {one.draft.builds_on for one in answered}
        last: dict[bytes, str] = {}
        has_used: set[bytes] = set()
        for one in answered:
            if one.call.finish_reason is FinishReason.CANCELLED:
                continue
            last[one.draft.digest] = one.call.call_id
            if one.call.call_id in used:
                has_used.add(one.draft.digest)
        calls = []
        for one in answered:
            digest, call = one.draft.digest, one.call
            keeps = call.call_id in used if digest in has_used else last.get(digest) == call.call_id
            if not keeps and call.untrained_because is None:
                call = replace(call, untrained_because="unused_retry")
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
            )
            for one in self._in_order()
        )

    def _in_order(self) -> list[_Answered]:
        return sorted(self._answered.values(), key=lambda one: _ordinal(one.call.call_id))


def _ordinal(call_id: str) -> int:
    return int(call_id.rpartition("-")[2])


def answer_message(text: str) -> Message:
    """A reply as the message that comes back in a history."""
    return {"role": "assistant", "content": text}


def after_answer(codec: ChatCodec, tail: str, completion_ids: Sequence[int]) -> str:
    """What the template writes after an answer, without the end token that the sampler already returned."""
    if completion_ids and completion_ids[-1] in codec.end_ids:
        end = codec.show(completion_ids[-1:])
        following = tail.lstrip()
        if following.startswith(end):
            return following[len(end) :]
    return tail
