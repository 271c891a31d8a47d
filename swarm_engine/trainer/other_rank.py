"""The ranks of a trainer but the first: they hold shards, do as the first one tells them, and end when it does.

    python -P -m swarm_engine.trainer.other_rank

The process reads orders from its standard input, framed as `swarm_engine.protocol` has it, and ends when that closes.
Where it can't go on it writes the reason to its standard output. Under Ray an actor gets the same orders.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_never

import torch
from pydantic import Field, TypeAdapter
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swarm_engine.config import Device, TrainerConfig
from swarm_engine.models.decoder import Decoder, DecoderConfig
from swarm_engine.protocol import Update, unframe
from swarm_engine.trainer.sharding import ShardedRanks, join
from swarm_engine.trainer.trainer import Trainer

READ_BYTES = 1 << 16
GRACE_S = 10.0
"""A collective fails at once on every rank when one is lost. What this one says of it is worth less than what is said
by whoever saw the loss, so that one gets this long to end everybody."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other ranks and take the shards of the first one's weights."""

    index: int
    size: int
    host: str
    port: int
    """Where the first rank's store listens."""
    model: dict[str, Any]
    """The policy's `config.json`."""
    dtype: str
    trainer: dict[str, Any]
    """A `TrainerConfig` as JSON."""
    num_threads: int
    device: str
    """A `Device`."""
    type: Literal["join"] = "join"


@dataclass(frozen=True, slots=True)
class Resume:
    """Take the shards of the first rank's weights again: they are those of this step."""

    step: int
    type: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True)
class GatherMoments:
    """Help the first rank to the optimizer's whole state."""

    type: Literal["gather_moments"] = "gather_moments"


@dataclass(frozen=True, slots=True)
class TakeMoments:
    """Take the shards of the optimizer's state that the first rank has."""

    type: Literal["take_moments"] = "take_moments"


Order = Join | Update | Resume | GatherMoments | TakeMoments

orders: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="type")])


class OtherRank:
    """What one rank holds."""

    def __init__(self, join: Join) -> None:
        torch.set_num_threads(join.num_threads)
        self._ranks = _met(join)
        self._model: Decoder = self._ranks.sharded(
            DecoderConfig.from_json(join.model), getattr(torch, join.dtype), whole=None
        )
        self._trainer = Trainer(self._model, TrainerConfig.model_validate(join.trainer), self._ranks)

    def obey(self, order: Update | Resume | GatherMoments | TakeMoments) -> None:
        """Do this rank's part of what all do together."""
        match order:
            case Update():
                self._trainer.update(order.record, order.episodes)
                self._ranks.put_together(self._model, whole=None)
            case Resume():
                self._ranks.hand_out(None, self._model)
                self._trainer.resume(order.step)
            case GatherMoments():
                self._trainer.optimizer.state()
            case TakeMoments():
                self._trainer.optimizer.load_state({})
            case _:
                assert_never(order)


def _met(order: Join) -> ShardedRanks:
    store = TCPStore(order.host, order.port, order.size, is_master=False)
    return ShardedRanks(join(store, order.index, order.size, Device(order.device)))


def obey_all(inbox: queue.SimpleQueue[Order]) -> None:
    """Do as told, for as long as the process lives."""
    rank: OtherRank | None = None
    while True:
        order = inbox.get()
        if isinstance(order, Join):
            rank = OtherRank(order)
        else:
            assert rank is not None, f"{order.type} came before join"
            rank.obey(order)


def why(error: BaseException) -> str:
    """What a rank says of an error that ends it."""
    return f"{type(error).__name__}: {error}"


def _read(inbox: queue.SimpleQueue[Order]) -> None:
    """Read orders until the first rank is gone, which ends the process at once: nothing here is worth keeping."""
    buffer = bytearray()
    while chunk := os.read(0, READ_BYTES):
        buffer += chunk
        for message in unframe(buffer):
            inbox.put(orders.validate_json(message))
    logging.shutdown()
    os._exit(0)


def main() -> int:
    """Obey; 1 where that fails."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print there, and the first rank would take it for the reason of an end
    inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(inbox,), daemon=True)
    reader.start()
    try:
        obey_all(inbox)
    except Exception as error:
        log.exception("the rank ends")
        reader.join(GRACE_S)
        os.write(answers, why(error).encode())
    return 1


if __name__ == "__main__":
    sys.exit(main())
