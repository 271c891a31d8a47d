"""One rank of a trainer as a process: `python rank_process.py INDEX SIZE FOLDER` plays the cases of FOLDER/cases.json.

A case is {"name", "model", "dtype", "trainer", "steps", "num_groups", "resume"?}: the batches of `steps`, trained from
the model or from the state that an earlier case left. The first rank writes FOLDER/NAME.safetensors, which holds the
whole weights and the optimizer's state, and FOLDER/NAME.json with the metrics of every step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from episodes import conversations
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm_engine.config import Device, TrainerConfig
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.ranks import Ranks
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord


def play(folder: Path, case: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Play one case, as one rank among several or alone."""
    whole = load_policy(case["model"], getattr(torch, case["dtype"])).model
    is_first = ranks is None or ranks.index == 0
    config = TrainerConfig.model_validate(case["trainer"])
    sharded = None
    if ranks is not None:
        from swarm_engine.trainer.sharding import ShardedRanks

        assert isinstance(ranks, ShardedRanks)
        sharded = ranks.sharded(whole.config, whole.norm.dtype, whole if is_first else None)
    trainer = Trainer(sharded or whole, config, ranks)
    if "resume" in case:
        state = load_file(folder / f"{case['resume']}.safetensors")
        weights, moments = parted(state)
        with torch.no_grad():
            for parameter, value in zip(whole.parameters(), weights, strict=True):
                parameter.copy_(value)
        if ranks is not None and sharded is not None:
            ranks.hand_out(whole if is_first else None, sharded)
        trainer.optimizer.load_state(moments if is_first else {})
    updates = []
    for step in case["steps"]:
        batch = conversations(step, num_groups=case["num_groups"])
        updates.append(trainer.update(BatchRecord(step, (), step), batch).metrics)
    if ranks is not None and sharded is not None:
        ranks.put_together(sharded, whole if is_first else None)
    moments = trainer.optimizer.state()
    if is_first:
        save_file(joined(whole, moments), folder / f"{case['name']}.safetensors")
        (folder / f"{case['name']}.json").write_text(json.dumps(updates))


def joined(model: Decoder, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and moments as one mapping."""
    return {f"weight.{place:04d}": one.detach() for place, one in enumerate(model.parameters())} | moments


def parted(state: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same apart again."""
    names = sorted(name for name in state if name.startswith("weight."))
    return [state[name] for name in names], {name: one for name, one in state.items() if name not in names}


def main(index: int, size: int, folder: Path) -> None:
    """Meet the other ranks and play all cases."""
    from swarm_engine.trainer.sharding import ShardedRanks, join

    torch.set_num_threads(1)
    ranks = ShardedRanks(join(dist.FileStore(str(folder / "store"), size), index, size, Device.CPU))
    for case in json.loads((folder / "cases.json").read_text()):
        play(folder, case, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
