"""The real worker, whose updates wait at a gate: a named pipe that the test opens.

python held_worker.py --gate PIPE --socket ADDRESS
"""

from __future__ import annotations

import os
import sys
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
        self.path.write_text(fault)


class HeldTrainer(Trainer):
    """Waits at the gate before it trains; of several policies, the first one of an update does."""

    gate: Path
    passed = 0
    """Step of the last update that did not wait any more."""

    def update(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Wait, then train."""
        if record.step > HeldTrainer.passed:
            if fault := self.gate.read_text():
                raise RuntimeError(fault)
            HeldTrainer.passed = record.step
        return super().update(record, episodes)


if __name__ == "__main__":
    HeldTrainer.gate = Path(sys.argv[sys.argv.index("--gate") + 1])
    worker.Trainer = HeldTrainer  # type: ignore[misc, attr-defined]
    del sys.argv[1:3]
    worker.leave(worker.main())
