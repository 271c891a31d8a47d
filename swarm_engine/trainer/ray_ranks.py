"""The other ranks as actors of a Ray cluster, placed by one placement group: all of them, or none.

The cluster is the one that RAY_ADDRESS names, else one that runs on this machine, else one that Ray starts here for the
engine's life. The actors are this process's own, so Ray ends them when it is gone. Whatever else a cluster is to hold
for an engine, such as sampler processes, belongs into the same group: an engine gets all that it needs, or waits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swarm_engine.errors import WorkerError
from swarm_engine.trainer.other_rank import Join, Order, obey_all, orders, why

PLACE_TIMEOUT_S = 60.0
"""How long Ray may look for a place for the ranks."""


def join_cluster() -> str:
    """Become a driver of the cluster; returns this machine's address in it."""
    ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    address: str = ray.util.get_node_ip_address()
    return address


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

    def __init__(self, joins: Sequence[Join], bundle: Mapping[str, float], on_loss: Callable[[str], None]) -> None:
        """Place and start them.

        Raises:
            WorkerError: the cluster has no room for all of them.
        """
        self._on_loss = on_loss
        self._is_closing = False
        self._group = placement_group([dict(bundle) for _ in joins])
        if not self._group.wait(PLACE_TIMEOUT_S):
            remove_placement_group(self._group)
            raise WorkerError(
                f"Ray found no room for {len(joins)} ranks of {dict(bundle)} within {PLACE_TIMEOUT_S:.0f} s; "
                f"the cluster has {ray.cluster_resources()}",
                "lower placement.num_workers or placement.resources, or add nodes",
            )
        own = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        # `end` blocks for the actor's life, so it may not stand before the orders.
        remote = ray.remote(concurrency_groups={"life": 1})(RankActor)
        self._actors: list[Any] = [
            remote.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=own,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
            ).remote()
            for place in range(len(joins))
        ]
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
        remove_placement_group(self._group)
        ray.shutdown()

    def _watch(self, order: Join, actor: Any) -> None:
        try:
            how = "ended: " + ray.get(actor.end.options(concurrency_group="life").remote())
        except RayError as error:
            how = "was lost: " + str(error).partition("\n")[0]
        if not self._is_closing:
            self._on_loss(f"trainer rank {order.index} of {order.size} {how}")
