"""Proves at boot that the loaded tokenizer and chat template go together with the tracker, on whole conversations.

Every case is driven as an agent would drive it: the template's own way of writing an answer is taken for what the model
sampled, read back, recorded, and sent again as history. The answer must come back, and the next prompt must begin with
the recorded ids or be what the template writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_engine.errors import BadRequestError, TokenizerError
from swarm_engine.tracker.answers import Answer, ToolCall
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.formats import NAME, TOOLS
from swarm_engine.tracker.marks import BREAKER
from swarm_engine.tracker.markup import CHANNEL, END, MESSAGE, START
from swarm_engine.tracker.messages import Message, Tool, canonical
from swarm_engine.tracker.tracker import Draft, EpisodeTracker
from swarm_engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation: what is asked, and each answer with what is said next."""

    name: str
    tools: tuple[Tool, ...]
    opening: Message
    turns: tuple[tuple[Answer, tuple[Message, ...]], ...]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(call_id: str, arguments: str) -> ToolCall:
    return ToolCall(call_id, NAME, arguments)


def _result(call_id: str, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": NAME}


PLAIN = Case(
    "a plain conversation",
    (),
    _user("First question, 1 + 1?"),
    (
        (Answer("Two, I think."), (_user("  And  2 + 2?\n\nSay it. <b>é 😊</b>\n"),)),
        (Answer("Four:\n\n- 4 ✓"), (_user("Thanks."),)),
        (Answer("You're welcome."), ()),
    ),
)
REASONED = Case(
    "answers with reasoning",
    (),
    _user("What is 3 * 3?"),
    (
        (Answer("Nine.", "Three threes\nare nine."), (_user("And 4 * 4?"),)),
        (Answer("Sixteen.", "As before."), ()),
    ),
)
ONE_CALL = Case(
    "a tool call",
    TOOLS,
    _user("Look up x."),
    (
        (
            Answer("", None, (_call("call_a", '{"q": "x \\"y\\" é", "n": [1, 2.5, null]}'),)),
            (_result("call_a", "17"),),
        ),
        (Answer("It is 17."), (_user("And z?"),)),
        (Answer("", None, (_call("call_b", '{"q": "z"}'),)), (_result("call_b", "No such thing."),)),
        (Answer("There is no z."), ()),
    ),
)
TWO_CALLS = Case(
    "two tool calls side by side",
    TOOLS,
    _user("Look up x and y."),
    (
        (
            Answer("", None, (_call("call_a", '{"q": "x"}'), _call("call_b", '{"q": {"deep": ["y"]}}'))),
            (_result("call_a", "17"), _result("call_b", "18")),
        ),
        (Answer("17 and 18."), ()),
    ),
)
REASONED_CALL = Case(
    "a tool call after reasoning",
    TOOLS,
    _user("Look up x."),
    (
        (Answer("", "I must look.", (_call("call_a", '{"q": "x"}'),)), (_result("call_a", "17"),)),
        (Answer("It is 17.", "Found."), ()),
    ),
)


def check_conformance(codec: ChatCodec) -> None:
    """Drive every case that the model's templates have a place for.

    Raises:
        TokenizerError: a case fails; it is named and shown.
    """
    _check_answers(codec, ())
    suited = codec.suited(TOOLS)
    if suited.takes_tools:
        if suited is not codec:
            _check_answers(suited, TOOLS)
        _drive(suited, ONE_CALL)
        # Some templates take one call a message, or no reasoning beside it; requests get the same refusal.
        _drive(suited, TWO_CALLS, may_refuse=True)
        if suited.has_reasoning:
            _drive(suited, REASONED_CALL, may_refuse=True)


def _check_answers(codec: ChatCodec, tools: tuple[Tool, ...]) -> None:
    """Drive the cases without a call."""
    for case in (PLAIN, REASONED) if codec.has_reasoning else (PLAIN,):
        _drive(codec, replace(case, tools=tools))


def _drive(codec: ChatCodec, case: Case, *, may_refuse: bool = False) -> None:
    tracker = EpisodeTracker("probe", "policy", codec)
    messages: list[Message] = [case.opening]
    before: Draft | None = None
    recorded: tuple[int, ...] = ()
    for turn, (answer, later) in enumerate(case.turns):
        try:
            (draft,) = tracker.begin("main", messages, case.tools)
            sampled = _written(codec, draft, answer)
        except BadRequestError as error:
            if may_refuse:
                return
            raise _failure(codec, case, turn, before, f"the template refuses it ({error})") from error
        codec.compare(draft.rendered.replace(BREAKER, ""))
        whole = codec.encode(draft.rendered)
        if draft.extends is None and draft.prompt_ids != whole:
            raise _failure(codec, case, turn, draft, "its prompt is not what the template writes")
        if draft.extends is not None and draft.prompt_ids[: len(recorded)] != recorded:
            raise _failure(codec, case, turn, draft, "its prompt does not begin with the recorded ids")
        reader = codec.reader(draft)
        reader.push(sampled)
        reader.finish()
        got = reader.answer
        if canonical(got.message()) != canonical(answer.message()) or (got.reasoning or "") != (answer.reasoning or ""):
            what = f"{answer} was written as {codec.show(sampled)!r} and read as {got}"
            raise _failure(codec, case, turn, draft, what)
        tracker.finish(
            draft,
            completion_ids=sampled,
            logprobs=[0.0] * len(sampled),
            policy_versions=[0] * len(sampled),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            answer=got,
        )
        renamed = {old.call_id: new.call_id for old, new in zip(answer.tool_calls, got.tool_calls, strict=True)}
        messages.append(got.message())
        messages += [
            {**one, "tool_call_id": renamed[one["tool_call_id"]]} if "tool_call_id" in one else one for one in later
        ]
        before, recorded = draft, draft.prompt_ids + tuple(sampled)


def _written(codec: ChatCodec, draft: Draft, answer: Answer) -> Sequence[int]:
    """An answer as a model that learned from this template writes it, up to the token that ends it."""
    message = codec.protect(answer.message())
    closed = codec.render((*draft.protected, message), draft.protected_tools, add_generation_prompt=False)
    if closed.startswith(draft.rendered) or answer.tool_calls:
        text = codec.beyond(draft.rendered, closed)
    else:
        # The template writes history in another way than it asks for a reply.
        text = answer.content
    tags = codec.reasoning_tags
    is_open = tags is not None and draft.rendered.rstrip().endswith(tags.opens)
    if tags is not None and tags.closes not in text and (is_open or answer.reasoning is not None):
        opens = "" if is_open else tags.opens + "\n"
        text = f"{opens}{answer.reasoning or ''}\n{tags.closes}\n\n{text}"
    if tags is None and answer.reasoning is not None and answer.reasoning not in text:
        # A template of channels that leaves the reasoning out of this message.
        shown = text if text.startswith(CHANNEL) else f"{CHANNEL}final{MESSAGE}{text}"
        text = f"{CHANNEL}analysis{MESSAGE}{answer.reasoning}{END}{START}assistant{shown}"
    ids = codec.encode(text)
    ends = [index for index, one in enumerate(ids) if one in codec.end_ids]
    if len(ends) > 1 and len(answer.tool_calls) > 1:
        raise BadRequestError("the template ends a reply behind every call")
    return ids[: ends[0] + 1] if ends else (*ids, min(codec.end_ids))


def _failure(codec: ChatCodec, case: Case, turn: int, draft: Draft | None, what: str) -> TokenizerError:
    prompt = f"; the prompt: {codec.show(draft.prompt_ids)!r}" if draft is not None else ""
    return TokenizerError(
        f"this tokenizer and chat template can't be followed: {case.name}, turn {turn + 1}: {what}{prompt}",
        "check the model's chat_template.jinja and the tokens that end a reply",
    )
