"""Numbers: given in order, the lowest open one is always known, however the answers come."""

from __future__ import annotations

import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from worqr.link.request import Numbers


def test_numbers_are_per_base_and_start_at_one() -> None:
    numbers = Numbers()
    assert [numbers.give("a"), numbers.give("a"), numbers.give("b")] == [1, 2, 1]
    assert (numbers.lowest("a"), numbers.lowest("b")) == (1, 1)


def test_numbers_go_on_after_everything_was_answered() -> None:
    numbers = Numbers()
    numbers.done("a", numbers.give("a"))
    assert numbers.give("a") == 2
    assert numbers.lowest("a") == 2


@given(st.lists(st.integers(0, 9)))
def test_the_lowest_is_the_lowest_of_those_that_are_open(picks: list[int]) -> None:
    numbers = Numbers()
    still_open: list[int] = []
    for pick in picks:
        if pick >= 5 and still_open:
            numbers.done("a", still_open.pop(pick % len(still_open)))
        else:
            still_open.append(numbers.give("a"))
        if still_open:
            assert numbers.lowest("a") == min(still_open)
    for number in sorted(still_open, reverse=True):
        numbers.done("a", number)
    assert (numbers._open, numbers._early) == ({}, set())  # nothing is remembered but the last number


def test_threads_count_together() -> None:
    """As the pipes of a cluster do, while a base moves from one to another."""
    numbers, interval = Numbers(), sys.getswitchinterval()
    used: list[int] = []
    wrong: list[int] = []

    def use() -> None:
        for _ in range(2000):
            number = numbers.give("a")
            used.append(number)
            if numbers.lowest("a") > number:
                wrong.append(number)
            numbers.done("a", number)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(used) == list(range(1, 8001))
    assert wrong == []
    assert (numbers._open, numbers._early) == ({}, set())
