"""What the engine may do after what: one table, read by everything that changes its state."""

from __future__ import annotations

from swarm_engine.types import EngineState

OFFLINE, BOOTING, ROLLING, ROLLING_POST, WEIGHT_SYNCING, FAILED = (
    EngineState.OFFLINE,
    EngineState.BOOTING,
    EngineState.ROLLING,
    EngineState.ROLLING_POST,
    EngineState.WEIGHT_SYNCING,
    EngineState.FAILED,
)

TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    OFFLINE: frozenset({BOOTING}),
    BOOTING: frozenset({ROLLING, FAILED, OFFLINE}),
    # Straight to WEIGHT_SYNCING where the journal already holds the whole batch when the engine comes up.
    ROLLING: frozenset({ROLLING_POST, WEIGHT_SYNCING, FAILED, OFFLINE}),
    # Back to ROLLING when a running episode is lost and its place must be given out again.
    ROLLING_POST: frozenset({ROLLING, WEIGHT_SYNCING, FAILED, OFFLINE}),
    WEIGHT_SYNCING: frozenset({ROLLING, FAILED, OFFLINE}),
    FAILED: frozenset({BOOTING, OFFLINE}),
}
"""Every transition there is."""


def check_transition(now: EngineState, then: EngineState) -> None:
    """Assert that the table allows a transition; one it lacks is a fault of this program."""
    assert then in TRANSITIONS[now], f"no transition from {now} to {then}"
