"""SequenceNumbers: given in order, the lowest open one is always known, however the answers come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.link.scripts import ECHO
from worqr import lua
from worqr.command import Command
from worqr.link import session
from worqr.link.session import FORGET_AFTER, Request, SequenceNumbers


def give(numbers: SequenceNumbers, base: str) -> int:
    """The number of a new request of this base."""
    return numbers.give(Request(Command(ECHO, base, (), str, numbered=True), 1.0, 0.0), session.time.monotonic())


def test_numbers_are_per_base_and_start_at_one() -> None:
    numbers = SequenceNumbers()
    assert [give(numbers, "a"), give(numbers, "a"), give(numbers, "b")] == [1, 2, 1]
    assert (numbers.open["a"][0], numbers.open["b"][0]) == (1, 1)


def test_numbers_go_on_after_everything_was_answered() -> None:
    numbers = SequenceNumbers()
    numbers.done("a", give(numbers, "a"))
    assert give(numbers, "a") == 2
    assert numbers.open["a"][0] == 2


@given(st.lists(st.integers(0, 9)))
def test_the_lowest_is_the_lowest_of_those_that_are_open(picks: list[int]) -> None:
    numbers = SequenceNumbers()
    still_open: list[int] = []
    for pick in picks:
        if pick >= 5 and still_open:
            numbers.done("a", still_open.pop(pick % len(still_open)))
        else:
            still_open.append(give(numbers, "a"))
        if still_open:
            assert numbers.open["a"][0] == min(still_open)
    for number in sorted(still_open, reverse=True):
        numbers.done("a", number)
    assert (numbers.open, numbers._early) == ({}, set())  # nothing is remembered but the last number


class Clock:
    """Instead of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(session, "time", clock)
    return clock


def test_a_base_that_was_quiet_for_long_is_forgotten(clock: Clock) -> None:
    """A queue per customer, or per run: each is used once, and costs a producer nothing a few hours later."""
    numbers = SequenceNumbers()
    for n in range(1000):
        base = f"reply-{n}"
        numbers.done(base, give(numbers, base))
    for _ in range(2):
        clock.now += FORGET_AFTER
        numbers.done("a", give(numbers, "a"))
    assert len(numbers._last) + len(numbers._older) == 1


def test_a_base_that_is_used_now_and_then_is_not_forgotten(clock: Clock) -> None:
    numbers = SequenceNumbers()
    for expected in range(1, 10):
        assert give(numbers, "a") == expected
        numbers.done("a", expected)
        clock.now += FORGET_AFTER
        numbers.done("b", give(numbers, "b"))


def test_a_forgotten_base_goes_on_above_all_its_numbers(clock: Clock) -> None:
    """Should the server remember them after all, it would take a lower one for a request that was answered long ago."""
    numbers = SequenceNumbers()
    for _ in range(7):
        numbers.done("a", give(numbers, "a"))
    for _ in range(3):
        numbers.done("b", give(numbers, "b"))
    for _ in range(3):
        clock.now += FORGET_AFTER
        numbers.done("c", give(numbers, "c"))
    assert (give(numbers, "a"), numbers.open["a"][0]) == (8, 8)
    assert give(numbers, "b") == 8


def test_a_base_with_an_open_request_is_not_forgotten(clock: Clock) -> None:
    numbers = SequenceNumbers()
    assert [give(numbers, "a") for _ in range(3)] == [1, 2, 3]
    numbers.done("a", 2)
    for _ in range(3):
        clock.now += FORGET_AFTER
        numbers.done("c", give(numbers, "c"))
    assert (give(numbers, "a"), numbers.open["a"][0]) == (4, 1)
    for number in (1, 3, 4):
        numbers.done("a", number)
    assert (numbers.open, numbers._early) == ({}, set())


def test_a_number_is_forgotten_after_the_server_has_forgotten_its_reply() -> None:
    assert (
        int(re.findall(r"REPLIES_EXPIRE = (\d+)", (Path(lua.__file__).parent / "values.lua").read_text("utf-8"))[0])
        < FORGET_AFTER
    )
