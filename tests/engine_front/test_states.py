"""The transition table."""

from __future__ import annotations

import pytest

from swarm_engine.server.states import TRANSITIONS, check_transition
from swarm_engine.types import EngineState


def test_every_state_has_its_row_and_every_state_but_offline_can_be_stopped() -> None:
    assert set(TRANSITIONS) == set(EngineState)
    for state, following in TRANSITIONS.items():
        assert (EngineState.OFFLINE in following) == (state is not EngineState.OFFLINE)


def test_every_state_with_a_worker_can_fail_and_a_failed_engine_can_be_started() -> None:
    without_worker = {EngineState.OFFLINE, EngineState.FAILED}
    assert {state for state, after in TRANSITIONS.items() if EngineState.FAILED not in after} == without_worker
    assert EngineState.BOOTING in TRANSITIONS[EngineState.FAILED]


def test_a_transition_the_table_lacks_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="OFFLINE to ROLLING"):
        check_transition(EngineState.OFFLINE, EngineState.ROLLING)
