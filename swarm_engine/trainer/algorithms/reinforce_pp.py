"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): PPO's clipped surrogate with no critic and no group baseline.

Advantages are rewards less the mean of the whole batch, over its deviation, so that a task which is always solved is
still told apart from one that never is. Departures: a sample counts once in these statistics however many tokens it
has, they are of one agent each, and the pull to the reference policy is in the loss (`kl_weight`), not in the reward.
The paper's variant with a group baseline is not offered here.
"""

from __future__ import annotations

from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method, Scope

REINFORCE_PP = Method(grpo.advantages, grpo.objective, scope=Scope.BATCH)
