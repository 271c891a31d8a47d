"""Which earlier call each call goes on from by what was said, and where its own part of the prompt begins.

While an episode runs, a call extends another where it can have the recorded ids. Merging by text needs more: also those
whose history a template or a framework wrote anew. That is read from the record when a batch needs it, not while
the model waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, Tool, extend_digest, prefix_digests
from swarm_engine.tracker.tracker import CallNote, EpisodeRecord
from swarm_engine.types import Call, Continuation, Episode, FinishReason


@dataclass(frozen=True, slots=True)
class Asked:
    """A call with all that it was asked with."""

    call: Call
    messages: tuple[Message, ...]
    """None of them where the prompt came as token ids."""
    tools: tuple[Tool, ...]
    answer: Answer


def with_continuations(record: EpisodeRecord, codec: ChatCodec, *, ignore_tools: bool = False) -> Episode:
    """The episode of a record, each call with the one it continues: the longest history that ends in a reply.

    Messages are compared by role, name, content and tool calls; white space around them and reasoning don't count.

    Args:
        ignore_tools: whether a call continues another that was offered other tools.
    """
    asked = _read(record)
    by_digest: dict[tuple[str, bytes], Asked] = {}
    calls = []
    for note, call in zip(record.notes, record.episode.calls, strict=True):
        one = asked[call.call_id]
        tools = () if ignore_tools else one.tools
        digests = prefix_digests(call.agent, one.messages, tools)
        calls.append(replace(call, continues=_continuation(note, one, asked, by_digest, digests, codec)))
        if one.messages and call.finish_reason is not FinishReason.CANCELLED:
            # Of equal replies the newest, as for the tracker: it is the one that a later call marks as used.
            by_digest[call.policy, extend_digest(digests[-1], one.answer.message())] = one
    return replace(record.episode, calls=tuple(calls))


def _read(record: EpisodeRecord) -> dict[str, Asked]:
    """Every call with its whole conversation; a note has only what its call added."""
    asked: dict[str, Asked] = {}
    for note, call in zip(record.notes, record.episode.calls, strict=True):
        if note.extends is None:
            messages, tools = note.messages, note.tools
        else:
            base = asked[note.extends]
            messages, tools = (*base.messages, base.answer.message(), *note.messages), base.tools
        asked[call.call_id] = Asked(call, messages, tools, note.answer)
    return asked


def _continuation(
    note: CallNote,
    one: Asked,
    asked: dict[str, Asked],
    by_digest: dict[tuple[str, bytes], Asked],
    digests: Sequence[bytes],
    codec: ChatCodec,
) -> Continuation | None:
    if note.extends is not None:
        base = asked[note.extends].call
        return Continuation(base.call_id, len(base.prompt_ids) + len(base.completion_ids))
    if not one.messages:
        return _going_on_from_ids(one.call, asked)
    for count in range(len(one.messages), 1, -1):
        if one.messages[count - 1]["role"] == "assistant" and (
            found := by_digest.get((one.call.policy, digests[count]))
        ):
            start = _own_start(one, count, found, codec)
            return None if start is None else Continuation(found.call.call_id, start)
    return None


def _going_on_from_ids(call: Call, asked: dict[str, Asked]) -> Continuation | None:
    """Of prompts that came as token ids, the longest that this one goes on from."""
    found: Continuation | None = None
    for other in asked.values():
        if other.call.call_id == call.call_id:
            break
        tokens = other.call.timeline().tokens
        if (
            not other.messages
            and (other.call.agent, other.call.policy) == (call.agent, call.policy)
            and other.call.finish_reason is not FinishReason.CANCELLED
            and call.prompt_ids[: len(tokens)] == tokens
            and (found is None or len(tokens) >= found.start)
        ):
            found = Continuation(other.call.call_id, len(tokens))
    return found


def _own_start(one: Asked, num_known: int, base: Asked, codec: ChatCodec) -> int | None:
    """Where in its prompt what a call added begins; None where the template leaves nobody able to tell.

    Args:
        num_known: messages up to the base's answer, which is the last of them.
    """
    messages, tools = tuple(map(codec.protect, one.messages)), codec.protect_tools(one.tools)
    known = messages[: num_known - 1]
    try:
        rendered = codec.render(messages, tools)
        marked = codec.render((*known, codec.stand_in(base.answer), *messages[num_known:]), tools)
    except BadRequestError:
        return None
    tail = codec.after(marked, base.answer)
    if tail is None or not rendered.endswith(tail):
        return None
    own = codec.encode(codec.join(tail, base.answer, base.call.completion_ids))
    start = len(one.call.prompt_ids) - len(own)
    return start if start > 0 and one.call.prompt_ids[start:] == own else None
