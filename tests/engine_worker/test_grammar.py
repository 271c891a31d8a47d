"""A constrained reply fits its grammar, and nobody beside it notices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from swarm_engine.config import SamplerBackend
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Generate, Rejected, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.server.grammars import json_object_grammar, json_schema_grammar
from swarm_engine.types import FinishReason, SamplingParams

END = 2
MOVE = {
    "type": "object",
    "properties": {"cell": {"type": "integer", "minimum": 1, "maximum": 9}, "why": {"enum": ["fork", "block"]}},
    "required": ["cell", "why"],
    "additionalProperties": False,
}
VARIANTS: dict[str, dict[str, Any]] = {"torch": {}, "lockstep": {"is_lockstep": True}}


@pytest.fixture
def sampler_of(tiny: LoadedPolicy) -> Callable[..., SlotSampler]:
    def make(**options: Any) -> SlotSampler:
        grammars = Grammars(tiny.tokenizer_dir, tiny.model.config.vocab_size, (END,))
        return SlotSampler(tiny.model, (END,), grammars=grammars, **options)

    return make


@pytest.fixture
def tokenizer(tiny: LoadedPolicy) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.tokenizer_dir / "tokenizer.json"))


def generate(name: str, grammar: str | None = None, max_tokens: int = 200, **changes: Any) -> Generate:
    params = {key: changes.pop(key) for key in ("temperature", "seed", "top_logprobs") if key in changes}
    prompt = tuple(range(10, 10 + changes.pop("num_prompt", 8)))
    return Generate(name, "policy", prompt, SamplingParams(max_tokens, **params), grammar=grammar, **changes)


def finish(sampler: SlotSampler, replies: Sequence[Reply] = ()) -> list[Reply]:
    found = list(replies)
    while not sampler.is_idle:
        found += sampler.step()
    return found


def run(sampler: SlotSampler, *requests: Generate) -> list[Reply]:
    return finish(sampler, [reply for request in requests for reply in sampler.submit(request)])


def ids_of(replies: Sequence[Reply], name: str) -> list[int]:
    return [
        one for reply in replies if isinstance(reply, Sampled) and reply.request_id == name for one in reply.token_ids
    ]


def logprobs_of(replies: Sequence[Reply], name: str) -> list[float]:
    return [
        one for reply in replies if isinstance(reply, Sampled) and reply.request_id == name for one in reply.logprobs
    ]


def ending_of(replies: Sequence[Reply], name: str) -> str:
    """How the request ended: a finish reason, or why it was rejected."""
    (ending,) = [one for one in replies if not isinstance(one, Sampled) and one.request_id == name]
    return ending.message if isinstance(ending, Rejected) else ending.finish_reason


def true_logits(policy: LoadedPolicy, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after the last token, shape (V,)."""
    tokens_1_T = torch.tensor([tokens])
    with torch.no_grad():
        hidden = policy.model.hidden(tokens_1_T, torch.arange(tokens_1_T.shape[1]), attend_causally)
        return policy.model.logits(hidden[0, -1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_reply_fits_its_schema_and_then_ends(
    sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer, variant: str, temperature: float
) -> None:
    grammar = json_schema_grammar(MOVE)
    requests = [
        generate(f"r{seed}", grammar, 400, seed=seed, temperature=temperature, num_prompt=3 + seed) for seed in range(6)
    ]
    replies = run(sampler_of(**VARIANTS[variant]), *requests)
    for request in requests:
        ids = ids_of(replies, request.request_id)
        assert ending_of(replies, request.request_id) == FinishReason.STOP
        assert ids.count(END) == 1
        assert ids[-1] == END
        move = json.loads(tokenizer.decode(ids[:-1], skip_special_tokens=False))
        assert list(move) == ["cell", "why"]
        assert move["cell"] in range(1, 10)
        assert move["why"] in ("fork", "block")


def digits_only(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray[Any, Any]:
    """Which tokens are made of ASCII digits alone, read off the tokenizer."""
    names = [tokenizer.id_to_token(one) for one in range(vocab_size)]
    return np.array([bool(name) and all(char in "0123456789" for char in name) for name in names])


def test_a_script_may_spell_a_forced_text_with_other_tokens(
    sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer
) -> None:
    letters = tuple(tokenizer.token_to_id(letter) for letter in "board")
    assert tuple(tokenizer.encode("board").ids) != letters
    replies = run(sampler_of(backend=SamplerBackend.SCRIPTED), generate("a", 'start: "board"', script=(*letters, END)))
    assert (tuple(ids_of(replies, "a")), ending_of(replies, "a")) == ((*letters, END), FinishReason.STOP)


def test_the_end_token_is_allowed_where_the_grammar_is_complete_and_nowhere_else(
    tiny: LoadedPolicy, tokenizer: Tokenizer
) -> None:
    vocab_size = tiny.model.config.vocab_size
    is_digit = digits_only(tokenizer, vocab_size)
    one_digit = tokenizer.token_to_id("7")
    constraint = Grammars(tiny.tokenizer_dir, vocab_size, (END,)).start("start: /[0-9]{2,}/")
    assert np.array_equal(constraint.allowed(), is_digit)
    constraint.take(one_digit)
    assert np.array_equal(constraint.allowed(), is_digit)
    constraint.take(one_digit)
    is_digit[END] = True
    assert np.array_equal(constraint.allowed(), is_digit)
    exact = Grammars(tiny.tokenizer_dir, vocab_size, (END,)).start('start: "7"')
    exact.take(one_digit)
    assert np.flatnonzero(exact.allowed()).tolist() == [END]


@pytest.mark.parametrize("kind", ["torch", "lockstep", "scripted"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_what_the_grammar_left(
    tiny: LoadedPolicy,
    tokenizer: Tokenizer,
    sampler_of: Callable[..., SlotSampler],
    kind: str,
    temperature: float,
) -> None:
    is_digit = torch.from_numpy(digits_only(tokenizer, tiny.model.config.vocab_size))
    script = tuple(tokenizer.token_to_id(digit) for digit in "20613")
    options: dict[str, Any] = {"scripted": {"backend": SamplerBackend.SCRIPTED}, **VARIANTS}[kind]
    request = generate(
        "a",
        "start: /[0-9]{40}/",
        5,
        temperature=temperature,
        seed=3,
        top_logprobs=3,
        script=script if kind == "scripted" else None,
    )
    replies = run(sampler_of(**options), request)
    ids, top = ids_of(replies, "a"), [one for reply in replies if isinstance(reply, Sampled) for one in reply.top or ()]
    assert kind != "scripted" or tuple(ids) == script
    assert ending_of(replies, "a") == FinishReason.LENGTH
    for place, (token, logprob) in enumerate(zip(ids, logprobs_of(replies, "a"), strict=True)):
        logits = true_logits(tiny, [*request.prompt_ids, *ids[:place]]) / temperature
        expected = logits.masked_fill(~is_digit, float("-inf")).log_softmax(-1)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
        values, best = expected.topk(3)
        assert [one for one, _ in top[place]] == best.tolist()
        assert [value for _, value in top[place]] == pytest.approx(values.tolist(), abs=1e-4)


def test_requests_without_a_grammar_are_the_same_to_the_bit_beside_one_with_it(
    sampler_of: Callable[..., SlotSampler],
) -> None:
    plain = [generate(f"r{seed}", max_tokens=30, seed=seed, num_prompt=5 + 3 * seed) for seed in range(5)]
    free = run(sampler_of(), *plain, generate("x", max_tokens=30, seed=9))
    assert len(ids_of(free, "x")) == 30, "the batch must have the same shape in both runs"
    beside = run(sampler_of(), *plain, generate("x", "start: /[0-9]{90}/", 30, seed=9))
    assert len(ids_of(beside, "x")) == 30
    assert ids_of(beside, "x") != ids_of(free, "x")
    for request in plain:
        assert ids_of(beside, request.request_id) == ids_of(free, request.request_id)
        assert logprobs_of(beside, request.request_id) == logprobs_of(free, request.request_id)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", "the grammar can't be followed"),
        ("begin: /a/", "the grammar can't be followed"),
        ("start: <|no_such_token|>", "no_such_token"),
        ('{"grammars": []}', "the grammar can't be followed"),
        ('{"grammars": [{"json_schema": {"type": "strnig"}}]}', "strnig"),
        ("start: A\nA: /a/ & /b/", "has come to a dead end"),
    ],
)
def test_a_broken_grammar_is_rejected_with_the_reason(
    sampler_of: Callable[..., SlotSampler], grammar: str, reason: str
) -> None:
    sampler = sampler_of()
    replies = run(sampler, generate("a", grammar), generate("b", max_tokens=3))
    assert reason in ending_of(replies, "a")
    assert ids_of(replies, "a") == []
    assert len(ids_of(replies, "b")) == 3


def test_a_cut_constrained_reply_has_length_as_its_reason(
    sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer
) -> None:
    """B076."""
    replies = run(sampler_of(), generate("a", json_schema_grammar(MOVE), 4, seed=1))
    assert ending_of(replies, "a") == FinishReason.LENGTH
    text = tokenizer.decode(ids_of(replies, "a"), skip_special_tokens=False)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert text.startswith("{")


def test_a_script_must_fit_the_grammar(sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer) -> None:
    def played(text: str, end: tuple[int, ...] = (END,)) -> tuple[list[int], str]:
        script = (*tokenizer.encode(text).ids, *end)
        replies = run(
            sampler_of(backend=SamplerBackend.SCRIPTED), generate("a", json_schema_grammar(MOVE), script=script)
        )
        return ids_of(replies, "a"), ending_of(replies, "a")

    for text in ('{"cell":5,"why":"fork"}', '{"cell": 5, "why": "block"}', '{\n  "cell": 9,\n  "why": "fork"\n}'):
        ids, ending = played(text)
        assert (tokenizer.decode(ids[:-1], skip_special_tokens=False), ending) == (text, FinishReason.STOP)
    assert "is not allowed there by the grammar" in played('{"cell":0,"why":"fork"}')[1]
    assert "is not allowed there by the grammar" in played('{"cell":5')[1]
    assert "ends before the grammar is complete" in played('{"cell":5', end=())[1]
    assert played('{"cell":5,"why":"fork"}', end=())[1] == FinishReason.STOP


def test_cancelling_and_new_weights_leave_a_constrained_reply_whole(
    tiny: LoadedPolicy, sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer
) -> None:
    sampler = sampler_of()
    grammar = json_schema_grammar(MOVE)
    replies = sampler.submit(generate("kept", grammar, seed=1, is_streamed=False, top_logprobs=2))
    replies += sampler.submit(generate("dropped", grammar, seed=2))
    replies += sampler.step() + sampler.step()
    replies += sampler.cancel("dropped")
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(1.05)
    replies += sampler.weights_changed(4)
    replies = finish(sampler, replies)
    assert ending_of(replies, "dropped") == FinishReason.CANCELLED
    assert ending_of(replies, "kept") == FinishReason.STOP
    parts = [reply for reply in replies if isinstance(reply, Sampled) and reply.request_id == "kept"]
    assert [part.policy_version for part in parts] == [0, 4]
    assert all(part.top is not None and len(part.top) == len(part.token_ids) for part in parts)
    json.loads(tokenizer.decode(ids_of(replies, "kept")[:-1], skip_special_tokens=False))


def fatal(**schema: Any) -> str:
    """The grammar of a schema, not tried first as the front does."""
    grammar = json.loads(json_object_grammar())
    grammar["grammars"][0]["json_schema"] = schema
    return json.dumps(grammar)


def test_a_grammar_that_ends_its_process_costs_its_request_and_no_other(
    sampler_of: Callable[..., SlotSampler],
) -> None:
    kept = generate("kept", json_schema_grammar(MOVE), seed=1)
    alone = run(sampler_of(), kept)
    sampler = sampler_of()
    replies = sampler.submit(kept)
    for number in range(3):
        replies += sampler.step()
        replies += sampler.submit(generate(f"crashing {number}", fatal(const=-(2**63))))
    replies += sampler.submit(generate("endless", fatal(type="integer", multipleOf=99_999_989)))
    replies = finish(sampler, replies)
    assert "crashed over it" in ending_of(replies, "crashing 0")
    assert "takes more than 2 s" in ending_of(replies, "endless")
    assert ids_of(replies, "kept") == ids_of(alone, "kept")
    assert logprobs_of(replies, "kept") == logprobs_of(alone, "kept")
    assert ending_of(replies, "kept") == FinishReason.STOP


def test_control_tokens_are_no_text(tiny: LoadedPolicy, tmp_path: Path) -> None:
    """Not even those that the tokenizer does not flag as special."""
    parsed = json.loads((tiny.tokenizer_dir / "tokenizer.json").read_text())
    marker = len(parsed["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    parsed["added_tokens"].append({"id": marker, "content": "<tool_call>", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    grammars = Grammars(tmp_path, tiny.model.config.vocab_size, (END,))
    anything = grammars.start("start: /(.|\\n)+/").allowed()
    assert anything[3:marker].any()
    assert not anything[[0, 1, 2, marker]].any()
    assert np.flatnonzero(grammars.start('start: <tool_call> "a"').allowed()).tolist() == [marker]
    assert np.flatnonzero(grammars.start('start: <|im_start|> "a"').allowed()).tolist() == [1]


def test_any_json_object_is_an_object(sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer) -> None:
    for seed in range(4):
        replies = run(sampler_of(), generate("a", json_object_grammar(), 30, seed=seed))
        text = tokenizer.decode(ids_of(replies, "a"), skip_special_tokens=False)
        assert text.startswith("{")


# Likely tokens


@pytest.mark.parametrize("is_streamed", [True, False])
def test_likely_tokens_come_with_each_token_in_order(
    tiny: LoadedPolicy, sampler_of: Callable[..., SlotSampler], is_streamed: bool
) -> None:
    request = generate("a", max_tokens=6, seed=1, temperature=0.8, top_logprobs=5, is_streamed=is_streamed)
    replies = run(sampler_of(), request, generate("b", max_tokens=6, seed=2))
    assert all(reply.top is None for reply in replies if isinstance(reply, Sampled) and reply.request_id == "b")
    parts = [reply for reply in replies if isinstance(reply, Sampled) and reply.request_id == "a"]
    assert len(parts) == (6 if is_streamed else 1)
    top = [one for part in parts for one in part.top or ()]
    ids, logprobs = ids_of(replies, "a"), logprobs_of(replies, "a")
    assert len(top) == len(ids) == 6
    for place, likely in enumerate(top):
        expected = (true_logits(tiny, [*request.prompt_ids, *ids[:place]]) / 0.8).log_softmax(-1)
        values, best = expected.topk(5)
        assert [one for one, _ in likely] == best.tolist()
        assert [value for _, value in likely] == pytest.approx(values.tolist(), abs=1e-4)
        if ids[place] in dict(likely):
            assert dict(likely)[ids[place]] == logprobs[place]


def test_asking_for_likely_tokens_changes_no_token(sampler_of: Callable[..., SlotSampler]) -> None:
    with_them = run(sampler_of(), generate("a", max_tokens=20, seed=1, top_logprobs=3))
    without = run(sampler_of(), generate("a", max_tokens=20, seed=1))
    assert ids_of(with_them, "a") == ids_of(without, "a")
    assert logprobs_of(with_them, "a") == logprobs_of(without, "a")


@pytest.mark.parametrize("count", [-1, 901])
def test_an_impossible_number_of_likely_tokens_is_rejected(sampler_of: Callable[..., SlotSampler], count: int) -> None:
    replies = run(sampler_of(), generate("a", top_logprobs=count))
    assert f"top_logprobs is {count}" in ending_of(replies, "a")


def test_only_what_could_be_sampled_is_likely(sampler_of: Callable[..., SlotSampler], tokenizer: Tokenizer) -> None:
    """B075: what a grammar rules out has a logprob of minus infinity, which JSON can't hold."""
    replies = run(sampler_of(), generate("a", 'start: "7"', top_logprobs=4))
    (sampled,) = [reply.top for reply in replies if isinstance(reply, Sampled)][:1]
    assert sampled == (((tokenizer.token_to_id("7"), 0.0),),)


def test_the_library_is_loaded_in_another_process_only(tiny_dir: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from swarm_engine.models.loading import load_policy
from swarm_engine.protocol import Generate
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.types import SamplingParams
import swarm_engine.worker, swarm_engine.server.grammars
policy = load_policy({str(tiny_dir)!r})
sampler = SlotSampler(policy.model, (2,), grammars=Grammars(Path({str(tiny_dir)!r}), 900, (2,)))
for grammar in (None, 'start: "7"'):
    sampler.submit(Generate("a", "policy", (5, 6), SamplingParams(2), grammar=grammar))
    while not sampler.is_idle:
        sampler.step()
    print("llguidance" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_sampler_without_a_tokenizer_takes_no_grammar(tiny: LoadedPolicy) -> None:
    (rejected,) = SlotSampler(tiny.model, (END,)).submit(generate("a", 'start: "7"'))
    assert isinstance(rejected, Rejected)
    assert "takes no grammar" in rejected.message
    (rejected,) = SlotSampler(tiny.model, (), grammars=Grammars(tiny.tokenizer_dir, 900, ())).submit(
        generate("a", 'start: "7"')
    )
    assert isinstance(rejected, Rejected)
    assert "no end token" in rejected.message
