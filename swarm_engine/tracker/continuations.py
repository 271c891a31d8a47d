"""Where in its prompt what each call added begins, behind the reply that its messages go on from.

A call that extends another has that call's ids before its own. Merging by text needs the same of calls whose history a
template or a framework wrote anew; that is read from the record when a batch needs it, not while the model waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, Tool, extend_digest, prefix_digests
from swarm_engine.tracker.tracker import CallNote, EpisodeRecord
from swarm_engine.types import Call, Continuation, Episode, FinishReason


@dataclass(frozen=True, slots=True)
class Asked:
    """A call with all that it was asked with."""

    call: Call
    note: CallNote
    messages: tuple[Message, ...]
    """None of them where the prompt came as token ids."""
    tools: tuple[Tool, ...]


def with_continuations(record: EpisodeRecord, codec: ChatCodec, *, ignore_tools: bool = False) -> Episode:
    """The episode of a record, each call with the one it continues.

    Args:
        ignore_tools: whether a call continues another that was offered other tools.
    """
    asked = _read(record)
    without_tools: dict[bytes, str] = {}
    calls = []
    for one in asked.values():
        base = one.note.builds_on
        if ignore_tools and one.messages:
            digests = prefix_digests(one.call.agent, one.messages)
            # The tracker knows which of equal replies was gone on from; only a longer history is found without it.
            num_known = 0 if base is None else len(asked[base].messages) + 1
            longer = (without_tools.get(digest) for digest in reversed(digests[num_known + 1 :]))
            base = next(filter(None, longer), base)
            if one.call.finish_reason is not FinishReason.CANCELLED:
                without_tools[extend_digest(digests[-1], one.note.answer.message())] = one.call.call_id
        calls.append(replace(one.call, continues=None if base is None else _continuation(one, asked[base], codec)))
    return replace(record.episode, calls=tuple(calls))


def _read(record: EpisodeRecord) -> Mapping[str, Asked]:
    """Every call with its whole conversation, in order; a note has only what its call added."""
    asked: dict[str, Asked] = {}
    for note, call in zip(record.notes, record.episode.calls, strict=True):
        if note.extends is None:
            messages, tools = note.messages, note.tools
        else:
            base = asked[note.extends]
            messages, tools = (
                (*base.messages, base.note.answer.message(has_written_ids=True), *note.messages),
                base.tools,
            )
        asked[call.call_id] = Asked(call, note, messages, tools)
    return asked


def _continuation(one: Asked, base: Asked, codec: ChatCodec) -> Continuation | None:
    is_extended = one.note.extends == base.call.call_id or not one.messages
    start = len(base.call.prompt_ids) + len(base.call.completion_ids) if is_extended else _own_start(one, base, codec)
    return None if start is None else Continuation(base.call.call_id, start)


def _own_start(one: Asked, base: Asked, codec: ChatCodec) -> int | None:
    """Where in its prompt what a call added begins; None where the template leaves nobody able to tell."""
    codec = codec.suited(one.tools)
    messages, tools = tuple(map(codec.protect, one.messages)), codec.protect_tools(one.tools)
    num_known, answer = len(base.messages), base.note.answer
    try:
        rendered = codec.render(messages, tools)
        marked = codec.render((*messages[:num_known], codec.stand_in(answer), *messages[num_known + 1 :]), tools)
    except BadRequestError:
        return None
    tail = codec.after(marked, answer)
    if tail is None or not rendered.endswith(tail):
        return None
    own = codec.encode(codec.join(tail, answer, base.call.completion_ids))
    start = len(one.call.prompt_ids) - len(own)
    return start if start > 0 and one.call.prompt_ids[start:] == own else None
