"""The other ranks as actors of a Ray cluster, in the room that it holds for the engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from swarm_engine.ray_cluster import WAITING, Place, first_line
from swarm_engine.trainer.other_rank import Join, Order, obey_all, orders, why


class RankActor:
    """One rank. It works on a thread of its own, so that orders are taken and its end is told meanwhile."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._end: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def tell(self, order: bytes) -> None:
        """Take an order; does not wait until it is done."""
        self._inbox.put(orders.validate_json(order))

    def end(self) -> str:
        """Why it can't go on; does not return before that."""
        return self._end.get()

    def _work(self) -> None:
        try:
            obey_all(self._inbox)
        except Exception as error:
            logging.getLogger(__name__).exception("the rank ends")
            self._end.put(why(error))


class RayRanks:
    """Actors of a cluster; see `swarm_engine.trainer.first_rank.Others`."""

    def __init__(self, joins: Sequence[Join], places: Sequence[Place], on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        self._is_closing = False
        self._actors: list[Any] = [place.actor(RankActor) for place in places]
        for order, actor in zip(joins, self._actors, strict=True):
            actor.tell.remote(orders.dump_json(order))
            threading.Thread(target=self._watch, args=(order, actor), daemon=True).start()

    def tell(self, order: Order) -> None:
        payload = ray.put(orders.dump_json(order))
        for actor in self._actors:
            actor.tell.remote(payload)

    def close(self) -> None:
        self._is_closing = True
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, order: Join, actor: Any) -> None:
        try:
            how = "ended: " + ray.get(actor.end.options(concurrency_group=WAITING).remote())
        except RayError as error:
            how = "was lost: " + first_line(error)
        if not self._is_closing:
            self._on_loss(f"trainer rank {order.index} of {order.size} {how}")
