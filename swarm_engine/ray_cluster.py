"""What a Ray cluster holds for one engine: one placement group, so an engine gets all that it needs, or waits.

The cluster is the one that RAY_ADDRESS names, else one that runs on this machine, else one that Ray starts here for the
engine's life. Actors are this process's own, so Ray ends them when it is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swarm_engine.config import PlacementConfig
from swarm_engine.errors import WorkerError

TIMEOUT_S = 60.0
"""Own value of `placement.timeout_s`."""

WAITING = "waiting"
"""The concurrency group of the methods that return when something has happened: on the actor's other thread they would
stand before every call."""


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one actor."""

    group: PlacementGroup
    index: int
    bundle: Mapping[str, float]
    """What is reserved, by Ray's names."""

    @property
    def num_threads(self) -> int:
        """As many as CPUs."""
        return max(1, int(self.bundle.get("CPU", 1)))

    def actor(self, kind: type, *args: object) -> Any:
        """Start an actor here. Calls are obeyed in order, but for those in the group `WAITING`."""
        return (
            ray.remote(concurrency_groups={WAITING: 1})(kind)
            .options(
                num_cpus=self.bundle.get("CPU", 0),
                num_gpus=self.bundle.get("GPU", 0),
                resources={name: amount for name, amount in self.bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=self.index
                ),
            )
            .remote(*args)
        )


@dataclass(frozen=True, slots=True)
class Room:
    """All places of an engine."""

    group: PlacementGroup
    host: str
    """This machine's address in the cluster."""
    ranks: tuple[Place, ...]
    """Of the trainer's ranks but the first."""
    samplers: Mapping[str, tuple[Place, ...]]
    """Of the vLLM processes, by policy."""

    @staticmethod
    def reserve(placement: PlacementConfig, sampled: Sequence[str]) -> Room:
        """Become a driver of the cluster and wait until it holds everything.

        Args:
            sampled: the policies that vLLM samples from.

        Raises:
            WorkerError: it has no room for all of it.
        """
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
        ranks = [placement.rank_bundle] * (placement.num_workers - 1)
        samplers = [placement.sampler_bundle] * (placement.num_samplers * len(sampled))
        group = placement_group(ranks + samplers)
        timeout_s = placement.timeout_s or TIMEOUT_S
        if not group.wait(timeout_s):
            remove_placement_group(group)
            wanted = [
                f"{len(bundles)} {what} of {bundles[0]}"
                for what, bundles in (("ranks", ranks), ("vLLM engines", samplers))
                if bundles
            ]
            raise WorkerError(
                f"Ray found no room for {' and '.join(wanted)} within {timeout_s:g} s; the cluster has "
                f"{ray.cluster_resources()}",
                "lower in placement how many there are (num_workers, num_samplers) or what is reserved for each "
                "(resources, sampler_resources), add nodes, or raise placement.timeout_s where they come by themselves",
            )
        places = iter([Place(group, index, bundle) for index, bundle in enumerate(ranks + samplers)])
        return Room(
            group,
            ray.util.get_node_ip_address(),
            ranks=tuple(islice(places, len(ranks))),
            samplers={name: tuple(islice(places, placement.num_samplers)) for name in sampled},
        )

    def close(self) -> None:
        """Give everything back and leave the cluster."""
        remove_placement_group(self.group)
        ray.shutdown()


def first_line(error: RayError) -> str:
    """What an error of Ray's says, without the advice and the traces that follow."""
    return str(error).partition("\n")[0]
