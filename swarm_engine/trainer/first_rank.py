"""The first rank of a trainer that has several: the engine worker itself.

It alone has the policy as a whole, for its sampler, checkpoints and exports, beside its shards. It tells the other
ranks what comes next, and then all do it together. A lost rank can't be replaced within an update, so the engine ends
with the reason, and its next start goes on from the journal.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swarm_engine import child
from swarm_engine.config import Device, EngineConfig
from swarm_engine.errors import WorkerError
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Update, Updated, frame
from swarm_engine.trainer.adamw import AdamWConfig
from swarm_engine.trainer.other_rank import GRACE_S, GatherMoments, Join, Order, Resume, TakeMoments, orders
from swarm_engine.trainer.sharding import ShardedAdamW, ShardedRanks, join
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, Episode

if TYPE_CHECKING:
    from swarm_engine.ray_cluster import Room

COMMAND = child.command("swarm_engine.trainer.other_rank")
LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)

OnLoss = Callable[[str], None]
"""Called with the reason when a rank is lost, on a thread of its own; it must end the process, which may be waiting for
that rank and could wait for long."""


class Others(Protocol):
    """The other ranks, as the first one reaches them."""

    def tell(self, order: Order) -> None:
        """Give all of them an order; returns at once."""
        ...

    def close(self) -> None:
        """End them; no loss is reported from here on."""
        ...


class LocalRanks:
    """Processes on this machine. Each ends when its standard input closes, so none outlives this one."""

    def __init__(self, joins: Sequence[Join], on_loss: OnLoss) -> None:
        self._on_loss = on_loss
        self._is_closing = False
        self._processes = [
            subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) for _ in joins
        ]
        for order, process in zip(joins, self._processes, strict=True):
            self._send(process, order)
            threading.Thread(target=self._watch, args=(order, process), daemon=True).start()

    def tell(self, order: Order) -> None:
        for process in self._processes:
            self._send(process, order)

    def close(self) -> None:
        self._is_closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, process: subprocess.Popen[bytes], order: Order) -> None:
        assert process.stdin is not None
        rest = memoryview(frame(orders.dump_json(order)))
        # A rank that is gone is told of by its watcher.
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[process.stdin.write(rest) :]

    def _watch(self, order: Join, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        said = process.stdout.read().decode(errors="replace").strip()
        code = process.wait()
        if not self._is_closing:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._on_loss(f"trainer rank {order.index} of {order.size} {how}" + (f": {said}" if said else ""))


@dataclass(frozen=True, slots=True)
class FirstRank(ShardedRanks):
    """A `ShardedRanks` whose optimizer tells the others before it needs them."""

    others: Others

    def optimizer(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> ShardedAdamW:
        return _TellingAdamW(parameters, config, self)


class _TellingAdamW(ShardedAdamW):
    """Its state is asked for by whoever writes a checkpoint, and only the first rank does."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig, ranks: FirstRank) -> None:
        super().__init__(parameters, config, ranks)
        self._others = ranks.others

    def state(self) -> dict[str, Tensor]:
        with together(self._others, GatherMoments()):
            return super().state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with together(self._others, TakeMoments()):
            super().load_state(state)


class SharedTrainer(Trainer):
    """A `Trainer` that several ranks make together, as its first rank."""

    def __init__(self, model: Decoder, whole: Decoder, config: EngineConfig, ranks: FirstRank) -> None:
        super().__init__(model, config.trainer, ranks)
        self._whole = whole
        self._first = ranks

    @staticmethod
    def start(
        policy: LoadedPolicy, config: EngineConfig, num_threads: int, room: Room | None, on_loss: OnLoss
    ) -> SharedTrainer:
        """Start the other ranks and give them their shards of the policy.

        Args:
            num_threads: of each rank on this machine.
            room: what a Ray cluster holds for them; None starts them here.

        Raises:
            WorkerError: the policy is an adapter, or there are fewer GPUs than ranks.
        """
        if policy.adapter is not None:
            raise WorkerError(
                f"placement.num_workers is {config.placement.num_workers}, but the model is an adapter, whose branches "
                "are not sharded",
                "leave num_workers out",
            )
        size = config.placement.num_workers
        if config.device is Device.CUDA and room is None and torch.cuda.device_count() < size:
            raise WorkerError(
                f"placement.num_workers is {size}, each rank takes a GPU, and PyTorch sees {torch.cuda.device_count()}",
                "lower num_workers, or place the ranks with Ray on machines that have them",
            )
        host = room.host if room else LOOPBACK
        with contextlib.closing(socket.create_server((host, 0))) as listener:
            port = listener.getsockname()[1]
            # The store listens at this address alone; left to itself it would on every one of the machine.
            store = TCPStore(
                host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        first = Join(
            index=0,
            size=size,
            host=host,
            port=port,
            model=policy.config_json,
            dtype=str(policy.model.norm.dtype).removeprefix("torch."),
            trainer=config.trainer.model_dump(mode="json"),
            num_threads=room.ranks[0].num_threads if room else num_threads,
            device=config.device,
        )
        others = _start([replace(first, index=index) for index in range(1, size)], room, on_loss)
        with losing():
            ranks = FirstRank(join(store, 0, size, config.device), others)
            model = ranks.sharded(policy.model.config, policy.model.norm.dtype, policy.model)
            return SharedTrainer(model, policy.model, config, ranks)

    def resume(self, step: int) -> None:
        with together(self._first.others, Resume(step)):
            self._first.hand_out(self._whole, self.model)
        super().resume(step)

    def update(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Train on one batch; the whole weights are then the new ones too."""
        with together(self._first.others, Update(record, tuple(episodes))):
            updated = super().update(record, episodes)
            self._first.put_together(self.model, self._whole)
        return updated

    def close(self) -> None:
        self._first.others.close()
        dist.destroy_process_group()


def _start(joins: Sequence[Join], room: Room | None, on_loss: OnLoss) -> Others:
    if room is None:
        return LocalRanks(joins, on_loss)
    from swarm_engine.trainer.ray_ranks import RayRanks

    return RayRanks(joins, room.ranks, on_loss)


@contextlib.contextmanager
def together(others: Others, order: Order) -> Iterator[None]:
    """What this rank does while the others obey an order."""
    others.tell(order)
    with losing():
        yield


@contextlib.contextmanager
def losing() -> Iterator[None]:
    """Lets whoever saw a rank go end this process with the reason, before a collective that fails for it does."""
    try:
        yield
    except RuntimeError:
        time.sleep(GRACE_S)
        raise
