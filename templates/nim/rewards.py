"""What a game of Nim pays, in [-0.5, 1]."""

from __future__ import annotations

REWARDS = {"won": 1.0, "lost": 0.0, "illegal": -0.5}
"""A reply that is no allowed number costs more than losing, so that breaking off a lost game never pays."""

LOWEST, HIGHEST = min(REWARDS.values()), max(REWARDS.values())
