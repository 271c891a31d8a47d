"""vLLM processes on the nodes of a Ray cluster, each started and spoken to by an actor.

The actor lives in the engine's environment; the process is the node's own, by its A3R_VLLM_PYTHON. Messages are calls
of the actor, answers the value of a call that waits for them. Weights are put into Ray's object store once an update,
for all; each node fetches them once, and each actor copies them into the memory that it shares with its process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from pydantic import ValidationError
from ray.exceptions import RayError

from swarm_engine.errors import WorkerError
from swarm_engine.protocol import Cancel, Finished, Generate, Rejected, Sampled
from swarm_engine.ray_cluster import WAITING, Place, first_line
from swarm_engine.sampler.shared_weights import mapped, new_memory
from swarm_engine.sampler.vllm_link import STOP_TIMEOUT_S, Received, VllmProcess, Wake
from swarm_engine.sampler.vllm_messages import Asleep, LoadModel, LoadWeights, Sleep, WeightsLoaded, to_vllm

CLOSE_TIMEOUT_S = 2 * STOP_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Answers:
    """What a process has said since the last look."""

    messages: tuple[bytes, ...]
    why_gone: str | None
    """None where more may come."""


class VllmActor:
    """Has a vLLM process on its node and passes messages on."""

    def __init__(self, size: int, num_threads: int) -> None:
        self._said: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        """Messages, and at the end why there is no other."""
        self._process: VllmProcess | None = None
        descriptor = new_memory(size)
        self._weights = flat(mapped(descriptor))
        try:
            self._process = VllmProcess(descriptor, num_threads, self._said.put, self._said.put)
        except WorkerError as error:
            self._said.put(str(error))
        finally:
            os.close(descriptor)

    def node(self) -> str:
        """The address of the machine."""
        address: str = ray.util.get_node_ip_address()
        return address

    def send(self, message: bytes) -> None:
        """Say something to the process."""
        if self._process is not None:
            self._process.send(message)

    def load_weights(self, weights: NDArray[np.uint8], message: bytes) -> None:
        """Copy the weights into the memory, and say so."""
        self._weights[:] = weights
        self.send(message)

    def answers(self) -> Answers:
        """Wait for something to be said."""
        messages: list[bytes] = []
        while not messages or not self._said.empty():
            said = self._said.get()
            if isinstance(said, str):
                return Answers(tuple(messages), said)
            messages.append(said)
        return Answers(tuple(messages), None)

    def close(self) -> None:
        """End the process and wait until it is gone."""
        if self._process is not None:
            self._process.close()


class RayLink:
    """A process of a node; see `swarm_engine.sampler.vllm_link.Link`."""

    def __init__(self, size: int, place: Place, wake: Wake) -> None:
        self.actor: Any = place.actor(VllmActor, size, place.num_threads)
        self._received = Received(wake)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def has_message(self) -> bool:
        return not self._received.is_empty

    def send(self, question: LoadModel | Sleep | Generate | Cancel) -> None:
        self.actor.send.remote(to_vllm.dump_json(question))

    def receive(self) -> WeightsLoaded | Asleep | Sampled | Finished | Rejected:
        return self._received.next()

    def close(self) -> None:
        with contextlib.suppress(RayError):
            ray.get(self.actor.close.remote(), timeout=CLOSE_TIMEOUT_S)
        ray.kill(self.actor)
        self._reader.join(CLOSE_TIMEOUT_S)

    def _read(self) -> None:
        node = "an unknown node"
        try:
            node = ray.get(self.actor.node.remote())
            while (answers := self._take()).why_gone is None:
                pass
            self._received.end(f"on {node} {answers.why_gone}")
        except RayError as error:
            self._received.end(f"the vLLM engine on {node} was lost: {first_line(error)}")
        except ValidationError as error:
            self._received.end(f"the line to the vLLM engine on {node} broke: {error}")

    def _take(self) -> Answers:
        answers: Answers = ray.get(self.actor.answers.options(concurrency_group=WAITING).remote())
        for message in answers.messages:
            self._received.put(message)
        return answers


class RayLinks:
    """Processes on the nodes of a cluster; see `swarm_engine.sampler.vllm_link.Links`."""

    def __init__(self, size: int, places: Sequence[Place], wake: Wake) -> None:
        """Start them.

        Args:
            size: bytes of the weights.
            places: of each process.
        """
        self.memory = mmap.mmap(-1, size)
        self.members = tuple(RayLink(size, place, wake) for place in places)

    def load_weights(self, load: LoadWeights) -> None:
        """Return when every node has them, so that the object store need not keep them.

        Raises:
            WorkerError: an engine is lost, or the object store has lost the weights.
        """
        weights = ray.put(flat(self.memory))
        message = to_vllm.dump_json(load)
        try:
            ray.get([member.actor.load_weights.remote(weights, message) for member in self.members])
        except RayError as error:
            raise WorkerError(f"the weights did not reach every vLLM engine: {first_line(error)}") from error


def flat(memory: mmap.mmap) -> NDArray[np.uint8]:
    """The memory as bytes, to be read and written."""
    return np.frombuffer(memory, np.uint8)
