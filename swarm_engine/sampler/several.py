"""Several samplers of one policy as one: each request goes to one of them, and all get every update together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_engine.errors import WorkerError
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply, Sampler, Sleeper
from swarm_engine.sampler.routing import Prefixes, blocks_of, choose


class Member(Sampler, Sleeper, Protocol):
    """A sampler whose weights are handed out to it and others at once."""

    def weights_loaded(self) -> list[Reply]:
        """Wait until it samples from what was handed out. Returns the tokens of the old weights not reported yet."""
        ...


@dataclass(slots=True)
class Routed:
    """A request that a member has not finished."""

    member: int
    context: list[int]
    """Its prompt and what is known of its reply."""


class SeveralSamplers:
    """Members, two at least; see `swarm_engine.sampler.Sampler`. The loss of one is the loss of all."""

    def __init__(
        self, members: Sequence[Member], hand_out: Callable[[int], None], *, max_running: int, cache_tokens: int
    ) -> None:
        """Take over the members.

        Args:
            hand_out: begins to give all of them the weights of a version.
            max_running: requests that each decodes side by side.
            cache_tokens: tokens that each has room for keys and values of.
        """
        self._members = members
        self._hand_out = hand_out
        self._max_running = max_running
        self._prefixes = [Prefixes(cache_tokens) for _ in members]
        self._routed: dict[str, Routed] = {}
        """By request id."""

    @property
    def is_idle(self) -> bool:
        """No member has anything to do."""
        return all(member.is_idle for member in self._members)

    def submit(self, request: Generate) -> list[Reply]:
        """Give a request to the member that has most of its prompt and is not much fuller than another."""
        blocks = blocks_of(request.prompt_ids)
        shared = [prefixes.num_shared(blocks) for prefixes in self._prefixes]
        place = choose(shared, self._num_running(), self._max_running)
        self._routed[request.request_id] = Routed(place, list(request.prompt_ids))
        # Others with this prompt may come before it is computed, and had better wait for it than compute it elsewhere.
        self._prefixes[place].add(blocks)
        return self._noted(place, self._members[place].submit(request))

    def cancel(self, request_id: str) -> list[Reply]:
        """Stop a request where it runs."""
        routed = self._routed.get(request_id)
        if routed is None:
            return []
        return self._noted(routed.member, self._members[routed.member].cancel(request_id))

    def step(self) -> list[Reply]:
        """What every member that is not idle gives.

        Raises:
            WorkerError: one is lost; it says which.
        """
        replies: list[Reply] = []
        for place, member in enumerate(self._members):
            if not member.is_idle:
                with self._named(place):
                    replies += self._noted(place, member.step())
        return replies

    def weights_changed(self, version: int) -> list[Reply]:
        """Hand the weights out to all, then wait for each.

        Raises:
            WorkerError: one is lost, or samples from other weights; it says which.
        """
        self._hand_out(version)
        replies: list[Reply] = []
        for place, member in enumerate(self._members):
            with self._named(place):
                replies += self._noted(place, member.weights_loaded())
        for prefixes in self._prefixes:
            prefixes.clear()
        for routed in self._routed.values():  # computed again from their tokens
            self._prefixes[routed.member].add(blocks_of(routed.context))
        return replies

    def begin_sleep(self) -> None:
        """Have all of them free what they hold."""
        for member in self._members:
            member.begin_sleep()

    def wait_asleep(self) -> list[Reply]:
        """Wait for each.

        Raises:
            WorkerError: one is lost; it says which.
        """
        replies: list[Reply] = []
        for place, member in enumerate(self._members):
            with self._named(place):
                replies += self._noted(place, member.wait_asleep())
        return replies

    def close(self) -> None:
        """End all of them."""
        for member in self._members:
            member.close()

    def _num_running(self) -> list[int]:
        running = [0] * len(self._members)
        for routed in self._routed.values():
            running[routed.member] += 1
        return running

    def _noted(self, place: int, replies: list[Reply]) -> list[Reply]:
        """The replies of a member, after taking note of what it has computed and of what it has finished."""
        for reply in replies:
            match reply:
                case Sampled():
                    self._routed[reply.request_id].context += reply.token_ids
                case Finished():
                    ended = self._routed.pop(reply.request_id)
                    # The next turn of this conversation begins with it; of its last token nothing is computed.
                    self._prefixes[place].add(blocks_of(ended.context[:-1]))
                case Rejected():
                    del self._routed[reply.request_id]
        return replies

    @contextlib.contextmanager
    def _named(self, place: int) -> Iterator[None]:
        """Says of which member an error tells."""
        try:
            yield
        except WorkerError as error:
            raise WorkerError(f"sampler {place + 1} of {len(self._members)}: {error.message}", error.hint) from error
