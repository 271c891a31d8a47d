"""The sampler's numbers are the model's, whoever else is being served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarm_engine.config import SamplerBackend
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply, cache
from swarm_engine.sampler.sampling import BLOCK, choose, draw, process, uniforms
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.types import FinishReason, LogitsProcessors, SamplingParams

NO_END = (10_000,)
"""An end id that is never sampled."""


def generate(name: str, prompt: Sequence[int], max_tokens: int = 8, **changes: object) -> Generate:
    params = {key: changes.pop(key) for key in ("temperature", "seed") if key in changes}
    return Generate(name, "policy", tuple(prompt), SamplingParams(max_tokens, **params), **changes)  # type: ignore[arg-type]


def words(seed: int, count: int) -> list[int]:
    return torch.randint(3, 900, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


Got = tuple[tuple[int, ...], tuple[float, ...], str]
"""Token ids, log-probabilities, and how the request ended."""


def run(sampler: SlotSampler, requests: Sequence[Generate]) -> dict[str, Got]:
    """Serve requests to their end."""
    replies: list[Reply] = [reply for request in requests for reply in sampler.submit(request)]
    while not sampler.is_idle:
        replies += sampler.step()
    return collect(replies)


def collect(replies: Sequence[Reply]) -> dict[str, Got]:
    found: dict[str, Got] = {}
    for reply in replies:
        ids, logprobs, ended = found.get(reply.request_id, ((), (), "open"))
        assert ended == "open", f"{reply} after the end"
        match reply:
            case Sampled():
                found[reply.request_id] = (ids + reply.token_ids, logprobs + reply.logprobs, ended)
            case Finished():
                found[reply.request_id] = (ids, logprobs, reply.finish_reason)
            case Rejected():
                found[reply.request_id] = (ids, logprobs, reply.message)
    return found


def true_logprobs(
    policy: LoadedPolicy, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0
) -> list[float]:
    tokens = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        hidden = policy.model.hidden(tokens, torch.arange(tokens.shape[1]), attend_causally)
        logprobs = (policy.model.logits(hidden[0]) / temperature).log_softmax(-1)
    start = len(prompt)
    return [float(logprobs[start + index - 1, token]) for index, token in enumerate(reply)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(tiny: LoadedPolicy, temperature: float) -> None:
    prompts = {f"r{length}": words(length, length) for length in (1, 2, 17, 40, 41)}
    requests = [generate(name, prompt, 12, temperature=temperature, seed=5) for name, prompt in prompts.items()]
    for name, (ids, logprobs, ended) in run(SlotSampler(tiny.model, NO_END), requests).items():
        assert (len(ids), ended) == (12, FinishReason.LENGTH)
        assert logprobs == pytest.approx(true_logprobs(tiny, prompts[name], ids, temperature), abs=1e-4)


def test_greedy_takes_the_likeliest_and_reports_its_logprob_at_temperature_one(tiny: LoadedPolicy) -> None:
    prompt = words(1, 20)
    ids, logprobs, _ = run(SlotSampler(tiny.model, NO_END), [generate("a", prompt, 10, temperature=0.0)])["a"]
    for index, token in enumerate(ids):
        so_far = torch.tensor([[*prompt, *ids[:index]]])
        hidden = tiny.model.hidden(so_far, torch.arange(so_far.shape[1]), attend_causally)
        assert token == tiny.model.logits(hidden[0, -1]).argmax()
    assert logprobs == pytest.approx(true_logprobs(tiny, prompt, ids), abs=1e-4)


def test_a_request_samples_the_same_in_company_as_alone(tiny: LoadedPolicy) -> None:
    requests = [generate(f"r{index}", words(index, 5 + 3 * index), 10, seed=index) for index in range(9)]
    together = run(SlotSampler(tiny.model, NO_END), requests)
    for request in requests:
        alone = run(SlotSampler(tiny.model, NO_END), [request])[request.request_id]
        assert together[request.request_id][0] == alone[0]
        assert together[request.request_id][1] == pytest.approx(alone[1], abs=1e-4)


def test_requests_beyond_the_slots_wait_and_are_all_served(tiny: LoadedPolicy) -> None:
    requests = [generate(f"r{index}", words(index, 30), 1 + index % 7, seed=index) for index in range(20)]
    found = run(SlotSampler(tiny.model, NO_END, max_running=3), requests)
    assert [len(found[f"r{index}"][0]) for index in range(20)] == [1 + index % 7 for index in range(20)]


def test_a_next_turn_takes_over_the_whole_of_the_turn_before(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    prompt = words(1, 50)
    ids, _, _ = run(sampler, [generate("one", prompt, 6, seed=1)])["one"]
    assert sampler.num_prefilled == 50
    follow_up = [*prompt, *ids, *words(2, 10)]
    again, logprobs, _ = run(sampler, [generate("two", follow_up, 6, seed=2)])["two"]
    assert sampler.num_prefilled == 50 + 11  # the last token sampled was never fed
    assert logprobs == pytest.approx(true_logprobs(tiny, follow_up, again), abs=1e-4)


def test_equal_prompts_that_arrive_together_are_computed_once(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    found = run(sampler, [generate(f"r{index}", words(1, 40), 4, seed=index) for index in range(8)])
    assert sampler.num_prefilled == 40 + 7
    assert len({ids for ids, _, _ in found.values()}) == 8
    for ids, logprobs, _ in found.values():
        assert logprobs == pytest.approx(true_logprobs(tiny, words(1, 40), ids), abs=1e-4)


def test_agents_that_take_turns_on_one_slot_keep_their_contexts(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END, max_running=1)
    contexts = {agent: [*words(9, 20), *words(agent, 30)] for agent in range(3)}
    for turn in range(4):
        for agent, context in contexts.items():
            ids, logprobs, _ = run(sampler, [generate(f"{agent}-{turn}", context, 4, seed=turn)])[f"{agent}-{turn}"]
            assert logprobs == pytest.approx(true_logprobs(tiny, context, ids), abs=1e-4)
            contexts[agent] = [*context, *ids, *words(turn, 5)]
    # The opening once, three private starts, then a turn's 5 new tokens and the one never fed: 3 agents, 3 more turns.
    assert sampler.num_prefilled == 20 + 3 * 30 + 3 * 3 * 6


@pytest.mark.parametrize("parked_bytes", [0, 80_000, 1 << 28], ids=["none", "one row", "plenty"])
@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_whatever_shares_slots_and_prefixes_the_logprobs_stay_true(
    tiny: LoadedPolicy, monkeypatch: pytest.MonkeyPatch, max_running: int, parked_bytes: int
) -> None:
    monkeypatch.setattr(cache, "PARKED_BYTES", parked_bytes)
    monkeypatch.setattr(cache, "INITIAL_TOKENS", 32)
    random = np.random.default_rng(max_running)
    stems = [words(stem, 60) for stem in range(4)]
    sampler = SlotSampler(tiny.model, NO_END, max_running=max_running)
    prompts: dict[str, list[int]] = {}
    replies: list[Reply] = []
    for index in range(40):
        stem = stems[int(random.integers(4))]
        prompt = [*stem[: int(random.integers(1, 60))], *words(int(random.integers(3)), int(random.integers(0, 9)))]
        prompts[f"r{index}"] = prompt
        replies += sampler.submit(generate(f"r{index}", prompt, int(random.integers(1, 9)), seed=index))
        for _ in range(int(random.integers(4))):
            replies += sampler.step()
        if random.random() < 0.1:
            replies += sampler.cancel(f"r{int(random.integers(index + 1))}")
    while not sampler.is_idle:
        replies += sampler.step()
    for name, (ids, logprobs, ended) in collect(replies).items():
        assert ended in (FinishReason.LENGTH, FinishReason.CANCELLED)
        assert logprobs == pytest.approx(true_logprobs(tiny, prompts[name], ids), abs=1e-4)


def test_a_prefix_taken_from_a_running_request_survives_the_growth_it_causes(
    tiny: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "INITIAL_TOKENS", 64)
    sampler = SlotSampler(tiny.model, NO_END, max_running=4)
    short = words(1, 50)
    long = [*short, *words(2, 80)]
    replies = sampler.submit(generate("short", short, 8, seed=1))
    replies += sampler.step()
    replies += sampler.submit(generate("long", long, 8, seed=2))
    while not sampler.is_idle:
        replies += sampler.step()
    ids, logprobs, _ = collect(replies)["long"]
    assert sampler.num_prefilled == 130
    assert logprobs == pytest.approx(true_logprobs(tiny, long, ids), abs=1e-4)


def test_new_weights_serve_no_old_prefix_and_go_on_with_what_runs(tiny: LoadedPolicy) -> None:
    """B115."""
    sampler = SlotSampler(tiny.model, NO_END)
    prompt = words(1, 40)
    run(sampler, [generate("old", prompt, 4)])
    assert sampler.submit(generate("across", prompt, 8, seed=3, is_streamed=False)) == []
    replies = sampler.step() + sampler.step()
    assert replies == []
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(1.1)
    replies = sampler.weights_changed(7)
    assert [(type(reply), reply.policy_version) for reply in replies if isinstance(reply, Sampled)] == [(Sampled, 0)]
    ids_before = replies[0].token_ids if isinstance(replies[0], Sampled) else ()
    while not sampler.is_idle:
        replies += sampler.step()
    assert [reply.policy_version for reply in replies if isinstance(reply, Sampled)] == [0, 7]
    ids, logprobs, _ = collect(replies)["across"]
    new = true_logprobs(tiny, prompt, ids)
    assert len(ids_before) == 3
    assert logprobs[3:] == pytest.approx(new[3:], abs=1e-4)
    assert logprobs[:3] != pytest.approx(new[:3], abs=1e-2)
    ids, logprobs, _ = run(sampler, [generate("new", prompt, 4)])["new"]
    assert logprobs == pytest.approx(true_logprobs(tiny, prompt, ids), abs=1e-4)


def test_lockstep_numbers_depend_on_nothing_else_bit_for_bit(tiny: LoadedPolicy, tiny_dir: object) -> None:
    requests = [generate(f"r{index}", words(index % 3, 20 + index), 6, seed=index) for index in range(6)]
    first = run(SlotSampler(tiny.model, NO_END, is_lockstep=True), requests)
    other = SlotSampler(load_policy(str(tiny_dir)).model, NO_END, is_lockstep=True)
    run(other, [generate("warm", words(0, 300), 5)])
    assert run(other, requests[::-1]) == first


def test_an_end_id_ends_the_reply_and_belongs_to_it(tiny: LoadedPolicy) -> None:
    prompt = words(1, 10)
    ids, _, _ = run(SlotSampler(tiny.model, NO_END), [generate("a", prompt, 9, seed=4)])["a"]
    third = ids[2]
    assert third not in ids[:2]
    assert run(SlotSampler(tiny.model, (third,)), [generate("a", prompt, 9, seed=4)])["a"][::2] == (ids[:3], "stop")


def test_a_reply_fills_the_rest_of_the_context_and_no_more(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    assert len(run(sampler, [generate("a", words(1, 500), 100)])["a"][0]) == 12
    assert len(run(sampler, [generate("b", words(1, 511), 100)])["b"][0]) == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (generate("a", ()), "the prompt is empty"),
        (generate("a", [5] * 512), "the prompt has 512 tokens, the context of policy 'policy' holds 512"),
        (generate("a", [900]), "token id 900 is outside the vocabulary of 900"),
        (generate("a", [-1]), "token id -1"),
        (generate("a", [5], 0), "max_tokens is 0"),
        (generate("a", [5], temperature=-0.5), "temperature is -0.5"),
        (generate("a", [5], temperature=float("nan")), "temperature is nan"),
        (generate("a", [5], script=(7,)), "sampler.backend to 'scripted'"),
    ],
)
def test_a_request_that_cannot_be_served_is_rejected_with_the_way_out(
    tiny: LoadedPolicy, request_: Generate, message: str
) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    (rejected,) = sampler.submit(request_)
    assert isinstance(rejected, Rejected)
    assert message in rejected.message
    assert sampler.is_idle


def test_a_token_outside_the_vocabulary_is_refused_with_its_field(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    (prompt,) = sampler.submit(generate("a", [900]))
    (script,) = sampler.submit(generate("a", [5], script=(900,)))
    assert isinstance(prompt, Rejected)
    assert isinstance(script, Rejected)
    assert (prompt.param, script.param) == ("prompt", "script")


def test_broken_weights_reject_the_request_and_not_the_sampler(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END)
    with torch.no_grad():
        kept = tiny.model.norm.clone()
        tiny.model.norm.fill_(float("nan"))
    assert "weights are broken" in run(sampler, [generate("a", words(1, 9))])["a"][2]
    with torch.no_grad():
        tiny.model.norm.copy_(kept)
    sampler.weights_changed(1)
    assert run(sampler, [generate("b", words(1, 9))])["b"][2] == FinishReason.LENGTH


def test_a_cancelled_request_reports_what_it_sampled_and_leaves(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END, max_running=1)
    sampler.submit(generate("a", words(1, 9), 50, is_streamed=False))
    sampler.submit(generate("b", words(2, 9), 50))
    sampler.step()
    assert sampler.cancel("b") == [Finished("b", FinishReason.CANCELLED)]
    sampled, finished = sampler.cancel("a")
    assert isinstance(sampled, Sampled)
    assert len(sampled.token_ids) == 2
    assert finished == Finished("a", FinishReason.CANCELLED)
    assert sampler.cancel("a") == []
    assert sampler.is_idle


def test_a_script_is_played_with_the_models_own_logprobs(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, (2,), backend=SamplerBackend.SCRIPTED)
    prompt = words(1, 12)
    ids, logprobs, ended = run(sampler, [generate("a", prompt, 9, script=(7, 8, 2), temperature=0.7)])["a"]
    assert (ids, ended) == ((7, 8, 2), "stop")
    assert logprobs == pytest.approx(true_logprobs(tiny, prompt, ids, 0.7), abs=1e-4)
    assert run(sampler, [generate("b", prompt, 2, script=(7, 8, 2))])["b"][::2] == ((7, 8), "length")
    assert "got no script" in run(sampler, [generate("c", prompt)])["c"][2]


def test_uniforms_are_of_the_request_alone_and_uniform() -> None:
    seeds, indices = np.arange(200, dtype=np.uint64).repeat(500), np.tile(np.arange(500), 200)
    drawn = uniforms(seeds, indices)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.array_equal(uniforms(seeds[777:778], indices[777:778]), drawn[777:778])
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert (((counts - 5000) ** 2 / 5000).sum()) < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    golden = np.uint64(0x9E3779B97F4A7C15)
    assert not np.isin(uniforms(seeds[:500] + golden, indices[:500]), drawn[:500]).any(), "streams overlap"
    by_seed = drawn.reshape(200, 500)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.01


def test_drawing_follows_the_weights_and_skips_zeros() -> None:
    weights = torch.zeros(4, 3 * BLOCK + 7)
    weights[:, [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    drawn = [
        draw(weights, torch.full((4,), u, dtype=torch.float64))[0].item()
        for u in (0.0, 0.05, 0.1, 0.29, 0.3, 0.59, 0.6)
    ]
    assert drawn == [1, 1, BLOCK - 1, BLOCK - 1, BLOCK, BLOCK, 3 * BLOCK + 5]
    almost_one = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    assert draw(weights, almost_one).tolist() == [3 * BLOCK + 5] * 4
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(2000, BLOCK, generator=generator) ** 30
    rough[:, 400:] = 0
    drawn_at_the_end = draw(rough, torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64))
    assert (rough.gather(1, drawn_at_the_end[:, None]) > 0).all()


def test_frequencies_match_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]]).expand(20_000, -1)
    numbers = torch.from_numpy(uniforms(np.full(20_000, 3, np.uint64), np.arange(20_000)))
    tokens, logprobs, _ = choose(logits, torch.full((20_000,), 2.0), numbers)
    expected = torch.tensor([0.0, 0.5, 1.0]).softmax(-1)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert shares[:3].tolist() == pytest.approx(expected.tolist(), abs=0.012)
    assert shares[3] == 0
    assert logprobs[tokens == 2][0].item() == pytest.approx(expected[2].log().item(), abs=1e-6)


PLAIN = LogitsProcessors()


def processed(
    logits: Sequence[float], processors: LogitsProcessors, temperature: float = 1.0, **ids: Any
) -> list[float]:
    found = process(torch.tensor(logits), processors, temperature, ids.get("prompt_ids", ()), ids.get("reply_ids", ()))
    return [pytest.approx(one) for one in found.tolist()]


OUT = -math.inf
ODDS = [math.log(share) for share in (0.1, 0.4, 0.3, 0.2)]


@pytest.mark.parametrize(
    ("changes", "temperature", "left"),
    [
        ({"top_k": 2}, 1.0, {1, 2}),
        ({"top_k": 9}, 1.0, {0, 1, 2, 3}),
        ({"top_k": -1}, 1.0, {0, 1, 2, 3}),
        ({"top_p": 0.39}, 1.0, {1}),
        ({"top_p": 0.41}, 1.0, {1, 2}),
        ({"top_p": 0.75}, 1.0, {1, 2, 3}),
        ({"top_p": 0.0}, 1.0, {1}),
        ({"min_p": 0.45}, 1.0, {1, 2, 3}),
        ({"min_p": 0.55}, 1.0, {1, 2}),
        ({"min_p": 1.0}, 1.0, {1}),
        # At half the temperature the shares are squared: 0.01, 0.16, 0.09 and 0.04 of 0.3, so .53 comes first.
        ({"top_p": 0.5}, 0.5, {1}),
        ({"min_p": 0.55}, 0.5, {1, 2}),
        ({"min_p": 0.6}, 0.5, {1}),
        # Of the three that top-k leaves the first has 4/9.
        ({"top_k": 3, "top_p": 0.43}, 1.0, {1}),
        ({"top_k": 3, "top_p": 0.45}, 1.0, {1, 2}),
        # Greedy takes the likeliest whatever else is left.
        ({"top_k": 1}, 0.0, {0, 1, 2, 3}),
    ],
)
def test_truncation_leaves_the_likeliest(changes: dict[str, Any], temperature: float, left: set[int]) -> None:
    expected = [one if token in left else OUT for token, one in enumerate(ODDS)]
    assert processed(ODDS, replace(PLAIN, **changes), temperature) == expected


def test_bias_and_penalties_move_the_logits_they_are_for() -> None:
    logits = [2.0, -2.0, 1.0, 0.5]
    ids = {"prompt_ids": (1, 2), "reply_ids": (0, 0, 3)}
    assert processed(logits, replace(PLAIN, logit_bias=((0, 3.0), (3, -1.5)))) == [5.0, -2.0, 1.0, -1.0]
    assert processed(logits, replace(PLAIN, presence_penalty=0.5), **ids) == [1.5, -2.0, 1.0, 0.0]
    assert processed(logits, replace(PLAIN, frequency_penalty=0.5), **ids) == [1.0, -2.0, 1.0, 0.0]
    assert processed(logits, replace(PLAIN, repetition_penalty=2.0), **ids) == [1.0, -4.0, 0.5, 0.25]
    assert processed(logits, replace(PLAIN, repetition_penalty=2.0, presence_penalty=1.0), **ids) == [
        0.0,
        -4.0,
        0.5,
        -0.75,
    ]


def test_processors_change_their_own_request_and_no_other(tiny: LoadedPolicy) -> None:
    prompt = words(1, 20)
    plain, greedy = generate("plain", prompt, seed=3), generate("greedy", prompt, temperature=0.0)
    alone = run(SlotSampler(tiny.model, NO_END), [plain, greedy])

    def shaped(name: str, **changes: Any) -> Generate:
        params = SamplingParams(8, seed=3, processors=LogitsProcessors(**changes))
        return Generate(name, "policy", tuple(prompt), params)

    requests = [
        plain,
        greedy,
        shaped("first", top_k=1),
        shaped("none"),
        shaped("biased", logit_bias=((5, 100.0),)),
        shaped("varied", logit_bias=((5, 40.0), (6, 30.0), (7, 20.0)), frequency_penalty=2.0, presence_penalty=2.0),
    ]
    found = run(SlotSampler(tiny.model, NO_END), requests)
    assert found["plain"][0] == found["none"][0] == alone["plain"][0]
    assert found["greedy"][0] == found["first"][0] == alone["greedy"][0]
    assert found["first"][1] == (0.0,) * 8
    assert found["biased"][0] == (5,) * 8
    # Each loses 2 and 2 a time, so the second is drawn when the first stands four times.
    assert found["varied"][0][:4] == (5,) * 4
    assert 6 in found["varied"][0]


def test_what_processors_rule_out_is_named_to_who_scripts_it(tiny: LoadedPolicy) -> None:
    sampler = SlotSampler(tiny.model, NO_END, backend=SamplerBackend.SCRIPTED)
    params = SamplingParams(8, processors=LogitsProcessors(top_k=1, logit_bias=((5, 100.0),)))
    found = run(sampler, [Generate("a", "policy", (1, 2), params, script=(5, 6))])["a"]
    assert found[0] == (5,)
    assert "token 6, number 1 of the script, is not allowed there by min_p, top_k or top_p" in found[2]


def test_a_bias_outside_the_vocabulary_is_refused_with_its_field(tiny: LoadedPolicy) -> None:
    params = SamplingParams(8, processors=LogitsProcessors(logit_bias=((100_000, 1.0),)))
    (refused,) = SlotSampler(tiny.model, NO_END).submit(Generate("a", "policy", (1, 2), params))
    assert isinstance(refused, Rejected)
    assert (refused.param, "100000" in refused.message) == ("logit_bias", True)
