"""The algorithms by name, one a file. docs/trainer.md has them side by side; their own settings are in
`swarm_engine.config.OWN_VALUES`."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_engine.config import Algorithm
from swarm_engine.trainer.algorithms.cispo import CISPO
from swarm_engine.trainer.algorithms.dapo import DAPO
from swarm_engine.trainer.algorithms.dr_grpo import DR_GRPO
from swarm_engine.trainer.algorithms.grpo import GRPO
from swarm_engine.trainer.algorithms.gspo import GSPO
from swarm_engine.trainer.algorithms.method import Method, Scope
from swarm_engine.trainer.algorithms.ppo_clip import PPO_CLIP
from swarm_engine.trainer.algorithms.reinforce_pp import REINFORCE_PP
from swarm_engine.trainer.algorithms.rloo import RLOO
from swarm_engine.trainer.algorithms.sft import SFT

__all__ = ["METHODS", "Method", "Scope"]

METHODS: Mapping[Algorithm, Method] = {
    Algorithm.GRPO: GRPO,
    Algorithm.DR_GRPO: DR_GRPO,
    Algorithm.RLOO: RLOO,
    Algorithm.REINFORCE_PP: REINFORCE_PP,
    Algorithm.DAPO: DAPO,
    Algorithm.GSPO: GSPO,
    Algorithm.CISPO: CISPO,
    Algorithm.PPO_CLIP: PPO_CLIP,
    Algorithm.SFT: SFT,
}
