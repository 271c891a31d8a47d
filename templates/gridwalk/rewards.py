"""What a walk pays, in [-0.5, 1]."""

from __future__ import annotations

REWARDS = {"arrived": 1.0, "late": 0.0, "fell": 0.0, "illegal": -0.5}
"""A reply that is no direction costs more than a hole, so that breaking off a walk never pays."""

LOWEST, HIGHEST = min(REWARDS.values()), max(REWARDS.values())
