"""vLLM itself, on a tiny policy: it samples what was asked, from the weights that are trained, and says so exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from driven_sampler import Driven, ask, num_ended
from tiny_model import build_tiny_model
from torch import Tensor

from swarm_engine.config import SamplerBackend, SamplerConfig
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.server.grammars import json_schema_grammar
from swarm_engine.types import FinishReason, SamplingParams

pytestmark = pytest.mark.heavy

MAX_RUNNING = 8
END_IDS = (1, 2)
MOVE = {
    "type": "object",
    "properties": {"cell": {"type": "integer", "minimum": 1, "maximum": 9}, "why": {"enum": ["fork", "block"]}},
    "required": ["cell", "why"],
    "additionalProperties": False,
}

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """A tied Qwen3, whose vocabulary is no multiple of 64 and whose end tokens are likely ones."""
    policy = load_policy(build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", eos_token_id=list(END_IDS)))
    with torch.no_grad():
        policy.model.embedding[list(END_IDS)] *= 3
    return policy


@pytest.fixture(scope="module")
def vllm(policy: LoadedPolicy) -> Iterator[Driven]:
    config = SamplerConfig(backend=SamplerBackend.VLLM, max_running=MAX_RUNNING, vllm_sleep_mode=True)
    driven = Driven(policy, config)
    yield driven
    driven.sampler.close()


def prompt_of(number: int, length: int = 100) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(number)
    return tuple(torch.randint(60, 900, (length,), generator=draw).tolist())


def tokens_of(replies: list[Reply], name: str) -> tuple[int, ...]:
    return tuple(
        one for reply in replies if isinstance(reply, Sampled) and reply.request_id == name for one in reply.token_ids
    )


def logprobs_of(replies: list[Reply], name: str) -> list[float]:
    return [
        one for reply in replies if isinstance(reply, Sampled) and reply.request_id == name for one in reply.logprobs
    ]


def ending_of(replies: list[Reply], name: str) -> FinishReason:
    (end,) = [one.finish_reason for one in replies if isinstance(one, Finished) and one.request_id == name]
    return end


def distributions(policy: LoadedPolicy, tokens: tuple[int, ...], temperature: float) -> Tensor:
    """Log-probabilities of every token at every place after the first, by one plain forward; shape (T, V)."""
    with torch.no_grad():
        hidden = policy.model.hidden(torch.tensor([tokens]), torch.arange(len(tokens)), attend_causally)
        return (policy.model.logits(hidden)[0].double() / temperature).log_softmax(-1)


def own_logprobs(
    policy: LoadedPolicy, prompt: tuple[int, ...], reply: tuple[int, ...], temperature: float = 1.0
) -> list[float]:
    found_T_V = distributions(policy, prompt + reply, temperature)
    return [found_T_V[len(prompt) - 1 + place, token].item() for place, token in enumerate(reply)]


def embedded(policy: LoadedPolicy, *requests: Generate) -> list[Reply]:
    """What the embedded sampler replies."""
    grammars = Grammars(policy.tokenizer_dir, policy.model.config.vocab_size, policy.end_ids)
    sampler = SlotSampler(policy.model, policy.end_ids, grammars=grammars)
    replies: list[Reply] = [reply for request in requests for reply in sampler.submit(request)]
    while not sampler.is_idle:
        replies += sampler.step()
    return replies


def test_logprobs_are_of_the_distribution_that_was_sampled(vllm: Driven, policy: LoadedPolicy) -> None:
    temperatures = (0.3, 0.7, 1.0, 1.7)
    requests = [
        Generate(f"{number}", "policy", prompt_of(number), SamplingParams(24, temperature, seed=number))
        for number, temperature in enumerate(temperatures)
    ]
    replies = vllm.run(*requests)
    for number, temperature in enumerate(temperatures):
        reply = tokens_of(replies, str(number))
        expected = own_logprobs(policy, prompt_of(number), reply, temperature)
        assert logprobs_of(replies, str(number)) == pytest.approx(expected, abs=1e-4)


def test_greedy_is_the_likeliest_token_with_its_logprob_at_temperature_one(vllm: Driven, policy: LoadedPolicy) -> None:
    requests = [Generate(f"{n}", "policy", prompt_of(n), SamplingParams(24, 0.0)) for n in range(3)]
    # A request that is drawn beside them: vLLM has another path for batches that are greedy throughout.
    replies = vllm.run(*requests, Generate("drawn", "policy", prompt_of(9), SamplingParams(24, 0.5)))
    alone = vllm.run(*requests)
    expected = embedded(policy, *requests)
    for name in "012":
        assert tokens_of(replies, name) == tokens_of(alone, name) == tokens_of(expected, name)
        assert logprobs_of(replies, name) == pytest.approx(logprobs_of(expected, name), abs=1e-4)
        assert logprobs_of(alone, name) == pytest.approx(logprobs_of(expected, name), abs=1e-4)


def test_replies_end_with_an_end_token_or_at_a_limit(vllm: Driven, policy: LoadedPolicy) -> None:
    requests = [Generate(f"{n}", "policy", prompt_of(n), SamplingParams(12, seed=n)) for n in range(16)]
    replies = vllm.run(*requests)
    endings = set()
    for n in range(16):
        *body, last = tokens_of(replies, str(n))
        assert not set(body) & set(END_IDS)
        endings.add(ending_of(replies, str(n)))
        if last in END_IDS:
            assert ending_of(replies, str(n)) is FinishReason.STOP
        else:
            assert (len(body), ending_of(replies, str(n))) == (11, FinishReason.LENGTH)
    assert endings == {FinishReason.STOP, FinishReason.LENGTH}
    long = Generate("long", "policy", prompt_of(1, 509), SamplingParams(200, 0.0))
    replies = vllm.run(long)
    assert len(tokens_of(replies, "long")) == 3 or tokens_of(replies, "long")[-1] in END_IDS
    assert policy.max_context == 512


def test_a_seed_gives_its_reply_in_any_company(vllm: Driven) -> None:
    def request(name: str, seed: int) -> Generate:
        return Generate(name, "policy", prompt_of(1, 20), SamplingParams(12, seed=seed))

    alone = tokens_of(vllm.run(request("a", 5)), "a")
    replies = vllm.run(*(request(f"{seed}", seed) for seed in (4, 5, 6, 5 + (1 << 30))))
    assert tokens_of(replies, "5") == alone
    assert len({tokens_of(replies, name) for name in ("4", "5", "6", str(5 + (1 << 30)))}) == 4


def test_likely_tokens_are_those_of_the_model(vllm: Driven, policy: LoadedPolicy) -> None:
    prompt = prompt_of(3)
    request = Generate("a", "policy", prompt, SamplingParams(4, 0.7, seed=3, top_logprobs=30))
    replies = vllm.run(request)
    reply = tokens_of(replies, "a")
    tops = [top for one in replies if isinstance(one, Sampled) for top in one.top or ()]
    found_T_V = distributions(policy, prompt + reply, 0.7)
    assert len(tops) == len(reply)
    for place, top in enumerate(tops):
        values, ids = found_T_V[len(prompt) - 1 + place].topk(30)
        assert [token for token, _ in top] == ids.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_tokens_come_as_often_as_they_are_likely(vllm: Driven, policy: LoadedPolicy) -> None:
    prompt, count, num_bins = prompt_of(4, 40), 2000, 10
    requests = [Generate(f"{n}", "policy", prompt, SamplingParams(1, 0.8, seed=n * 7919)) for n in range(count)]
    replies = vllm.run(*requests)
    probabilities_V = distributions(policy, prompt, 0.8)[-1].exp()
    order_V = probabilities_V.argsort(descending=True)
    bins_V = torch.empty_like(order_V)
    bins_V[order_V] = (probabilities_V[order_V].cumsum(0) * num_bins).long().clamp(max=num_bins - 1)
    expected = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins_V, probabilities_V) * count
    drawn = torch.tensor([tokens_of([one], one.request_id)[0] for one in replies if isinstance(one, Sampled)])
    seen = torch.bincount(bins_V[drawn], minlength=num_bins)
    assert len(drawn) == count
    assert float(((seen - expected) ** 2 / expected)[expected > 0].sum()) < 27.9  # 9 degrees of freedom, p = 0.001


def test_a_grammar_leaves_the_same_tokens_as_in_the_embedded_sampler(vllm: Driven, policy: LoadedPolicy) -> None:
    grammar = json_schema_grammar(MOVE)
    requests = [
        Generate("greedy", "policy", prompt_of(5), SamplingParams(200, 0.0, top_logprobs=3), grammar=grammar),
        Generate("short", "policy", prompt_of(5), SamplingParams(200, 0.0), grammar='start: "ab" | "abc"'),
        Generate("free", "policy", prompt_of(5), SamplingParams(24, 0.0)),
        Generate("broken", "policy", prompt_of(5), SamplingParams(24), grammar="start: ("),
    ]
    drawn = Generate("drawn", "policy", prompt_of(6), SamplingParams(200, 1.0, seed=4), grammar=grammar)
    replies = vllm.run(*requests, drawn)
    expected = embedded(policy, *requests)
    for name in ("greedy", "short", "free"):
        assert tokens_of(replies, name) == tokens_of(expected, name)
        assert logprobs_of(replies, name) == pytest.approx(logprobs_of(expected, name), abs=1e-4)
        assert ending_of(replies, name) is ending_of(expected, name)
    assert [len(top) for one in replies if isinstance(one, Sampled) and one.top for top in one.top] == [
        len(top) for one in expected if isinstance(one, Sampled) and one.top for top in one.top
    ]
    (refused,) = [one for one in replies if isinstance(one, Rejected)]
    assert (refused.request_id, "grammar can't be followed" in refused.message) == ("broken", True)
    # The reply that was drawn is one that the embedded sampler's constraint takes, with the same logprobs.
    script = tokens_of(replies, "drawn")
    grammars = Grammars(policy.tokenizer_dir, policy.model.config.vocab_size, policy.end_ids)
    scripted = SlotSampler(policy.model, policy.end_ids, backend=SamplerBackend.SCRIPTED, grammars=grammars)
    played: list[Reply] = scripted.submit(
        Generate("drawn", "policy", prompt_of(6), SamplingParams(200, 1.0), grammar=grammar, script=script)
    )
    while not scripted.is_idle:
        played += scripted.step()
    assert tokens_of(played, "drawn") == script
    assert logprobs_of(replies, "drawn") == pytest.approx(logprobs_of(played, "drawn"), abs=1e-4)


def endless(name: str, number: int, max_tokens: int = 400, **fields: bool) -> Generate:
    """A request whose grammar never lets it end."""
    return Generate(
        name, "policy", prompt_of(number, 40), SamplingParams(max_tokens), grammar="start: /[a-z ]{500}/", **fields
    )


def test_a_cancelled_request_makes_room(vllm: Driven) -> None:
    for number in range(MAX_RUNNING):
        vllm.sampler.submit(endless(f"long-{number}", number))
    vllm.until(lambda some: len({one.request_id for one in some}) == MAX_RUNNING)
    vllm.sampler.submit(ask("short", 2))
    vllm.sampler.cancel("long-0")
    replies = vllm.until(lambda some: num_ended(some) == 2)
    assert ending_of(replies, "long-0") is FinishReason.CANCELLED
    assert tokens_of(replies, "short")
    for number in range(1, MAX_RUNNING):
        vllm.sampler.cancel(f"long-{number}")
    replies = vllm.until(lambda some: num_ended(some) == MAX_RUNNING - 1)
    assert {ending_of(replies, f"long-{number}") for number in range(1, MAX_RUNNING)} == {FinishReason.CANCELLED}


@pytest.mark.parametrize(("after", "sleeps"), [(3, False), (5, True)])
def test_an_update_reaches_replies_that_run_and_prompts_that_were_cached(
    vllm: Driven, policy: LoadedPolicy, after: int, sleeps: bool
) -> None:
    cached = Generate("cached", "policy", prompt_of(7, 200), SamplingParams(8, seed=7))
    vllm.run(cached)
    old = copy.deepcopy(policy.model)
    vllm.sampler.submit(endless("streamed", 1, 60))
    vllm.sampler.submit(endless("whole", 2, 60, is_streamed=False))
    replies = vllm.until(lambda some: len(some) >= 5)
    if sleeps:
        vllm.sampler.begin_sleep()
        replies += vllm.sampler.wait_asleep()
        vllm.sampler.submit(endless("queued", 3, 5))
        vllm.sampler.submit(endless("given up", 4, 5))
        vllm.sampler.cancel("given up")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=draw))
    replies += vllm.sampler.weights_changed(after)
    replies += vllm.until(lambda some: num_ended(replies + some) == (4 if sleeps else 2))
    grammars = Grammars(policy.tokenizer_dir, policy.model.config.vocab_size, policy.end_ids)
    for name, number in (("streamed", 1), ("whole", 2)):
        pieces = [one for one in replies if isinstance(one, Sampled) and one.request_id == name]
        versions = [one.policy_version for one in pieces for _ in one.token_ids]
        assert versions == sorted(versions)
        before = versions[0]
        assert set(versions) == {before, after}
        assert len(versions) == 60
        assert name == "streamed" or len(pieces) == 2
        script, found = tokens_of(replies, name), logprobs_of(replies, name)
        for version, model in ((before, old), (after, policy.model)):
            scripted = SlotSampler(model, policy.end_ids, backend=SamplerBackend.SCRIPTED, grammars=grammars)
            request = endless(name, number, 60)
            played: list[Reply] = scripted.submit(
                Generate(name, "policy", request.prompt_ids, request.params, script, grammar=request.grammar)
            )
            while not scripted.is_idle:
                played += scripted.step()
            own = logprobs_of(played, name)
            places = [place for place, one in enumerate(versions) if one == version]
            assert [found[place] for place in places] == pytest.approx([own[place] for place in places], abs=1e-4)
    if sleeps:
        assert {one.policy_version for one in replies if isinstance(one, Sampled) and one.request_id == "queued"} == {5}
        assert (len(tokens_of(replies, "queued")), tokens_of(replies, "given up")) == (5, ())
    again = vllm.run(cached)
    reply = tokens_of(again, "cached")
    assert logprobs_of(again, "cached") == pytest.approx(own_logprobs(policy, cached.prompt_ids, reply), abs=1e-4)
