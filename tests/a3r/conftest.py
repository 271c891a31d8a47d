"""Plans made from a small catalogue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_catalogue import CATALOGUE

from a3r.planner.catalogue import Catalogue
from a3r.planner.design import Wishes, design
from a3r.planner.offline import read
from a3r.prereg.plan import Plan

EXAMPLE = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return CATALOGUE


@pytest.fixture(scope="session")
def plan_of(catalogue: Catalogue) -> Callable[..., Plan]:
    """Plans a question; keywords are the wishes of the command line."""

    def make(question: str = EXAMPLE, **wishes: object) -> Plan:
        return design(read(question, catalogue), Wishes(**({"parallel": 2} | wishes)))

    return make
