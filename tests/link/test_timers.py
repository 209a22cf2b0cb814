"""`Timers`, which the drivers for Trio and for plain threads share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from worqr.link.driver import Timers


def test_callbacks_run_in_the_order_of_their_times_and_once() -> None:
    ran: list[str] = []
    timers = Timers(lambda callback: callback())
    timers.add(2.0, lambda: ran.append("b"))
    timers.add(1.0, lambda: ran.append("a"))
    later = time.monotonic() + 60
    timers.add(later, lambda: ran.append("later"))
    timers.run()
    timers.run()
    assert ran == ["a", "b"]
    assert timers.next() == later


def test_a_cancelled_callback_has_no_time() -> None:
    timers = Timers(lambda callback: callback())
    assert timers.next() == math.inf
    first, second = timers.add(1.0, list), timers.add(2.0, list)
    assert timers.next() == 1.0
    first.cancel()
    assert timers.next() == 2.0
    second.cancel()
    assert timers.next() == math.inf


def test_a_callback_that_plans_itself_again_lets_the_loop_go_on() -> None:
    ran: list[int] = []
    timers = Timers(lambda callback: callback())

    def again() -> None:
        ran.append(1)
        timers.add(time.monotonic() + 0.001, again)

    timers.add(0.0, again)
    timers.run()
    assert ran == [1]


def test_a_callback_that_is_interrupted_before_it_begins_stays_due() -> None:
    ran: list[str] = []
    interrupts = [KeyboardInterrupt]

    def call(callback: Callable[[], object]) -> object:
        if interrupts:
            raise interrupts.pop()
        return callback()

    timers = Timers(call)
    timers.add(1.0, lambda: ran.append("a"))
    with pytest.raises(KeyboardInterrupt):
        timers.run()
    timers.run()
    assert ran == ["a"]
