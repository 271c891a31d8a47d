"""How an update speaks of several policies: `POLICY/METRIC` beside what is said of the update itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def by_policy(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Metrics or drops apart by policy, what is said of the update left out; all under "" where no policy is named."""
    apart: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        policy, slash, rest = name.partition("/")
        if slash:
            apart.setdefault(policy, {})[rest] = value
    return apart or {"": dict(values)}
