"""What a game of tic-tac-toe pays, in [-0.5, 1]."""

from __future__ import annotations

REWARDS = {"won": 1.0, "drawn": 0.5, "lost": 0.0, "illegal": -0.5}
"""A reply that is no free cell costs more than losing, so that breaking off a lost game never pays."""

LOWEST, HIGHEST = min(REWARDS.values()), max(REWARDS.values())
