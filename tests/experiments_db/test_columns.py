from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import postgresql, sqlite

from experiments_db.columns import CanonicalJson, UtcDateTime, canonical_json, sha256_of, snake_case

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_canonical_json_sorts_and_keeps_letters() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'


def test_the_hash_is_that_of_the_utf8_text() -> None:
    # printf '%s' '{"a":1}' | sha256sum
    assert sha256_of(canonical_json({"a": 1})) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_canonical_json_has_no_word_for_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"loss": math.nan})


@given(json_values)
def test_json_comes_back_as_it_went_in(value: object) -> None:
    column = CanonicalJson()
    stored = column.process_bind_param(value, sqlite.dialect())
    assert column.process_result_value(stored, sqlite.dialect()) == value


def test_a_moment_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        UtcDateTime().process_bind_param(datetime(2026, 1, 2), sqlite.dialect())


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()])
def test_moments_come_back_in_utc(dialect: sqlite.base.SQLiteDialect) -> None:
    there = datetime(2026, 1, 2, 3, 4, 5, 678901, timezone(timedelta(hours=5)))
    column = UtcDateTime()
    back = column.process_result_value(column.process_bind_param(there, dialect), dialect)
    assert back == datetime(2026, 1, 1, 22, 4, 5, 678901, UTC)
    assert back.tzinfo is UTC


def test_class_names_become_table_names() -> None:
    assert snake_case("EvalRun") == "eval_run"
    assert snake_case("Job") == "job"
