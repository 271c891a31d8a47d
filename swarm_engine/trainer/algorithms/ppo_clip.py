"""PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), its advantages measured in groups: no critic.

What sets it apart from GRPO are its own values: a symmetric clip of 0.2, and several epochs of several minibatches over
one batch, where the clip has work to do. Minibatches hold whole samples, so that an agent of more turns does not take
more steps.
"""

from __future__ import annotations

from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method

PPO_CLIP = Method(grpo.advantages, grpo.objective)
