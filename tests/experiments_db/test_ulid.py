from __future__ import annotations

import multiprocessing
import os
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments_db import ulid
from experiments_db.ulid import LENGTH, UlidGenerator, decode, encode, made_at_s, new_ulid

numbers = st.integers(min_value=0, max_value=2**128 - 1)


def test_the_example_of_the_specification_has_its_time() -> None:
    # 01ARYZ6S41TSV4RRFFQ69G5FAV is the specification's example; its first ten letters are 1469918176385 ms.
    assert made_at_s("01ARYZ6S41TSV4RRFFQ69G5FAV") == 1469918176.385


def test_the_smallest_and_the_largest_id() -> None:
    assert encode(0) == "0" * 26
    assert encode(2**128 - 1) == "7" + "Z" * 25


@given(numbers)
def test_decoding_undoes_encoding(number: int) -> None:
    assert decode(encode(number)) == number
    assert decode(encode(number).lower()) == number


@given(numbers, numbers)
def test_letters_sort_as_numbers_do(one: int, other: int) -> None:
    assert (encode(one) < encode(other)) == (one < other)


@pytest.mark.parametrize(
    "text", ["", "01ARYZ6S41TSV4RRFFQ69G5FA", "81ARYZ6S41TSV4RRFFQ69G5FAV", "01ARYZ6S41TSV4RRFFQ69G5FAI"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no id"):
        decode(text)


@given(st.lists(st.integers(min_value=0, max_value=2**48 - 1), min_size=2, max_size=30))
def test_ids_rise_strictly_whatever_the_clock_does(clock: list[int]) -> None:
    ticks = iter(clock)
    generator = UlidGenerator(now_ms=lambda: next(ticks), random_bits=lambda bits: (1 << bits) - 2)
    made = []
    for _ in clock:
        try:
            made.append(generator.new())
        except OverflowError:
            break
    assert all(one < other for one, other in pairwise(made))


def test_a_clock_set_back_does_not_take_the_ids_back() -> None:
    ticks = iter([1000, 999, 1001])
    generator = UlidGenerator(now_ms=lambda: next(ticks), random_bits=lambda _: 7)
    first, second, third = generator.new(), generator.new(), generator.new()
    assert decode(first) == 1000 << 80 | 7
    assert decode(second) == 1000 << 80 | 8
    assert decode(third) == 1001 << 80 | 7


def test_the_clock_may_not_run_out() -> None:
    generator = UlidGenerator(now_ms=lambda: 2**48, random_bits=lambda _: 0)
    with pytest.raises(OverflowError, match="past the last moment"):
        generator.new()


def test_threads_never_share_an_id() -> None:
    made: list[list[str]] = [[] for _ in range(4)]

    def make(own: list[str]) -> None:
        own.extend(new_ulid() for _ in range(500))

    threads = [threading.Thread(target=make, args=(own,)) for own in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [one for own in made for one in own]
    assert len(set(everything)) == 2000
    assert all(len(one) == LENGTH for one in everything)
    assert all(own == sorted(own) for own in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_ids_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that stands still: both would count on from the same id.
    monkeypatch.setattr(ulid, "_generator", UlidGenerator(now_ms=lambda: 1000))
    new_ulid()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send([new_ulid() for _ in range(50)]))
    child.start()
    mine = {new_ulid() for _ in range(50)}
    assert mine.isdisjoint(ours.recv())
    child.join()
