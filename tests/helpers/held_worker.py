"""The real worker, whose updates wait at a gate: a named pipe that the test opens.

python held_worker.py --gate PIPE --socket ADDRESS
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from swarm_engine import worker
from swarm_engine.protocol import Updated
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, Episode


class Gate:
    """What the updates of a held worker wait at; one opening lets one pass."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.command = (sys.executable, __file__, "--gate", str(path))

    def open(self, fault: str = "") -> None:
        """Wait until an update is there and let it pass, or fail of a fault."""
        passed = passed_at(self.path)
        # Held until it was read: on a busy machine, openings that were closed at once got lost now and then.
        with self.path.open("w") as gate:
            print(fault, file=gate, flush=True)
            while not passed.exists():
                time.sleep(0.005)
        passed.unlink()


def passed_at(gate: Path) -> Path:
    """The file by which an update says that it has passed."""
    return gate.with_name(f"{gate.name}-passed")


class HeldTrainer(Trainer):
    """Waits at the gate before it trains; of several policies, the first one of an update does."""

    gate: Path
    passed = 0
    """Step of the last update that did not wait any more."""

    def update(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Wait, then train."""
        if record.step > HeldTrainer.passed:
            with self.gate.open() as gate:
                fault = gate.readline().strip()
            passed_at(self.gate).touch()
            if fault:
                raise RuntimeError(fault)
            HeldTrainer.passed = record.step
        return super().update(record, episodes)


if __name__ == "__main__":
    HeldTrainer.gate = Path(sys.argv[sys.argv.index("--gate") + 1])
    worker.Trainer = HeldTrainer  # type: ignore[misc, attr-defined]
    del sys.argv[1:3]
    worker.leave(worker.main())
