"""Several samplers as one: embedded ones on the same weights, whose caches show where a prompt had been computed."""

from __future__ import annotations

import itertools

import pytest
import torch

from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.several import SeveralSamplers
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.types import FinishReason, SamplingParams

NO_END = (10_000,)
REPLY = 40


class Embedded(SlotSampler):
    """A member whose weights are handed out by saying their version."""

    def __init__(self, tiny: LoadedPolicy, log: list[str]) -> None:
        super().__init__(tiny.model, NO_END, max_running=8)
        self._log = log
        self.handed_out = 0
        self.loss = ""
        """Why it can't go on."""

    def weights_loaded(self) -> list[Reply]:
        self._log.append("waited for")
        if self.loss:
            raise WorkerError(self.loss, "start anew")
        return self.weights_changed(self.handed_out)

    def begin_sleep(self) -> None:
        self._log.append("told to sleep")

    def wait_asleep(self) -> list[Reply]:
        """Finishes what runs, so that there is something to report."""
        self._log.append("sleeps")
        if self.loss:
            raise WorkerError(self.loss, "start anew")
        replies: list[Reply] = []
        while not self.is_idle:
            replies += super().step()
        return replies

    def step(self) -> list[Reply]:
        if self.loss:
            raise WorkerError(self.loss, "start anew")
        return super().step()


class Several:
    """Two members and the pool of them."""

    def __init__(self, tiny: LoadedPolicy) -> None:
        self.log: list[str] = []
        self.members = [Embedded(tiny, self.log) for _ in range(2)]
        self.pool = SeveralSamplers(self.members, self.hand_out, max_running=8, cache_tokens=10_000)
        self._ids = itertools.count()

    def hand_out(self, version: int) -> None:
        self.log.append(f"handed out {version}")
        for member in self.members:
            member.handed_out = version

    def ask(self, prompt: tuple[int, ...], seed: int = 0) -> str:
        """Submit a request; its id."""
        name = f"{next(self._ids)}"
        assert self.pool.submit(Generate(name, "policy", prompt, SamplingParams(REPLY, seed=seed))) == []
        return name

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Step until nothing is left; what was sampled, by id."""
        replies: list[Reply] = []
        while not self.pool.is_idle:
            replies += self.pool.step()
        found: dict[str, tuple[int, ...]] = {}
        for reply in replies:
            if isinstance(reply, Sampled):
                found[reply.request_id] = found.get(reply.request_id, ()) + reply.token_ids
        return found

    @property
    def num_prefilled(self) -> list[int]:
        return [member.num_prefilled for member in self.members]


@pytest.fixture
def several(tiny: LoadedPolicy) -> Several:
    return Several(tiny)


def prompt_of(number: int, length: int = 64) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, 900, (length,), generator=draw).tolist())


def test_strangers_are_spread_and_a_next_turn_returns_to_its_cache(several: Several) -> None:
    first, second = several.ask(prompt_of(1)), several.ask(prompt_of(2))
    replies = several.finish()
    assert several.num_prefilled == [64, 64]
    # The other conversation's turn first, so that an order of places would not give the right ones.
    several.ask(prompt_of(2) + replies[second] + prompt_of(4, 8))
    several.ask(prompt_of(1) + replies[first] + prompt_of(3, 8))
    several.finish()
    # Each goes on from all but the last token sampled: that one and eight more are computed.
    assert several.num_prefilled == [64 + 9, 64 + 9]


def test_a_group_finds_its_prompt_and_is_spread_when_one_side_is_much_fuller(several: Several) -> None:
    for seed in range(5):
        several.ask(prompt_of(1), seed)
    assert several.members[1].is_idle
    several.ask(prompt_of(1), 5)
    assert not several.members[1].is_idle
    several.finish()
    # Once on each side, and its last token for each of the other four.
    assert several.num_prefilled == [64 + 4, 64]


def test_a_reply_says_where_the_next_turn_goes_when_several_have_the_prompt(several: Several) -> None:
    names = [several.ask(prompt_of(1), seed) for seed in range(6)]
    replies = several.finish()
    several.ask(prompt_of(1) + replies[names[5]] + prompt_of(2, 8))
    assert not several.members[1].is_idle
    several.finish()
    assert several.num_prefilled == [64 + 4, 64 + 9]


def test_all_are_handed_the_weights_before_one_is_waited_for(several: Several) -> None:
    several.ask(prompt_of(1))
    several.ask(prompt_of(2))
    several.pool.step()
    several.pool.weights_changed(3)
    assert several.log == ["handed out 3", "waited for", "waited for"]
    replies: list[Reply] = []
    while not several.pool.is_idle:
        replies += several.pool.step()
    assert {reply.policy_version for reply in replies if isinstance(reply, Sampled)} == {3}
    assert sum(isinstance(reply, Finished) for reply in replies) == 2


def test_all_are_told_to_sleep_before_one_is_waited_for_and_what_they_say_before_is_told(several: Several) -> None:
    names = {several.ask(prompt_of(1)), several.ask(prompt_of(2))}
    several.pool.begin_sleep()
    replies = several.pool.wait_asleep()
    assert several.log == ["told to sleep", "told to sleep", "sleeps", "sleeps"]
    assert {reply.request_id for reply in replies if isinstance(reply, Finished)} == names
    several.ask(prompt_of(1))
    assert several.finish().keys() - names, "what has ended is forgotten, and the next one runs"


def test_prefixes_of_the_old_weights_draw_nobody(several: Several) -> None:
    several.ask(prompt_of(1))
    several.ask(prompt_of(2))  # at the second
    several.finish()
    several.pool.weights_changed(1)
    several.ask(prompt_of(2))
    assert several.members[1].is_idle


def test_what_runs_is_computed_again_and_draws_its_like(several: Several) -> None:
    first = several.ask(prompt_of(1))
    several.ask(prompt_of(2))  # at the second
    several.pool.step()
    several.pool.cancel(first)
    several.pool.weights_changed(1)
    several.ask(prompt_of(2))
    assert several.members[0].is_idle


def test_a_request_is_stopped_where_it_runs_and_then_weighs_nothing(several: Several) -> None:
    names = [several.ask(prompt_of(1), seed) for seed in range(5)]
    several.pool.step()
    *_, last = several.pool.cancel(names[0])
    assert last == Finished(names[0], FinishReason.CANCELLED)
    assert several.pool.cancel(names[0]) == several.pool.cancel("nobody") == []
    several.ask(prompt_of(1), 5)
    assert several.members[1].is_idle


def test_a_request_that_is_refused_weighs_nothing(several: Several) -> None:
    for number in range(5):
        (reply,) = several.pool.submit(Generate(f"bad-{number}", "policy", (), SamplingParams(REPLY)))
        assert isinstance(reply, Rejected)
        assert "the prompt is empty" in reply.message
    several.ask(prompt_of(1))
    assert several.members[1].is_idle


def test_the_loss_of_one_is_told_with_its_place_and_reason(several: Several) -> None:
    several.ask(prompt_of(1))
    several.ask(prompt_of(2))
    several.members[1].loss = "it was killed"
    with pytest.raises(WorkerError, match=r"^sampler 2 of 2: it was killed; start anew$"):
        several.pool.step()
    with pytest.raises(WorkerError, match=r"^sampler 2 of 2: it was killed; start anew$"):
        several.pool.weights_changed(1)
    with pytest.raises(WorkerError, match=r"^sampler 2 of 2: it was killed; start anew$"):
        several.pool.wait_asleep()
