"""The way back into the loop: nothing that runs there can end the loop, nobody is woken twice."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import trio
import trio.testing

from tests.link.loops import Loop, of_each_loop, until
from tests.link.scripts import Outcomes, echo, lines
from tests.link.scripts import until as until_in_trio
from worqr.link import Link, Signal, TrioDriver, Waiter, driver_here
from worqr.link.driver import Driver, wake_all


@of_each_loop
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_what_a_delivery_raises_is_logged_and_the_loop_goes_on(
    loop: Loop, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    async def main() -> None:
        driver, done = driver_here(), list[int]()
        driver.post(fail)
        driver.post(partial(done.append, 1))
        await until(loop, lambda: done)

    loop.run(main)
    assert len(lines(caplog, "link.deliver")) == 1


@of_each_loop
def test_a_waiter_whose_wake_fails_keeps_nobody_asleep(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        driver, broken, sound = driver_here(), Waiter(), Waiter()
        broken.wake = lambda: 1 / 0
        async with loop.running(partial(driver.wait, sound)):
            thread = threading.Thread(target=driver.post, args=(partial(wake_all, [broken, sound]),))
            thread.start()
            thread.join()

    loop.run(main)
    assert len(lines(caplog, "link.deliver")) == 1


@of_each_loop
def test_nobody_is_woken_twice(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        driver, waiter = driver_here(), Waiter()
        async with loop.running(partial(driver.wait, waiter)):
            driver.post(partial(wake_all, [waiter, waiter]))
            driver.post(partial(wake_all, [waiter]))
        await loop.turn(0.01)  # a second reschedule would end a run of Trio

    loop.run(main)
    assert not lines(caplog, "link.deliver")


@of_each_loop
def test_whoever_was_cancelled_is_not_woken(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        driver, waiter = driver_here(), Waiter()
        async with loop.running(partial(driver.wait, waiter)) as cancel:
            assert waiter.wake is not None
            cancel()
        assert (waiter.abandoned, waiter.wake) == (True, None)
        driver.post(partial(wake_all, [waiter]))
        await loop.turn(0.01)  # a second reschedule would end a run of Trio

    loop.run(main)
    assert not lines(caplog, "link.deliver")


@of_each_loop
def test_a_signal_is_heard_before_and_after_the_wait_began(loop: Loop) -> None:
    async def main() -> None:
        driver = driver_here()
        early, late = Signal(driver), Signal(driver)
        early.set()
        await early.wait()
        async with loop.running(late.wait):
            driver.post(late.set)

    loop.run(main)


@of_each_loop
def test_a_loop_that_has_ended_is_no_error(loop: Loop) -> None:
    async def make() -> Driver:
        return driver_here()

    driver = loop.run(make)
    thread = threading.Thread(target=driver.post, args=(lambda: None,))
    thread.start()
    thread.join()
    driver.post(lambda: None)


async def test_a_posted_callback_that_fails_harms_no_other(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = Outcomes()

    def fail(value: object, error: Exception | None) -> None:
        raise ZeroDivisionError

    link.post(echo("a"), fail)
    link.post(echo("b"), outcomes)
    await outcomes.wait(1)
    await until_in_trio(lambda: lines(caplog, "link.deliver"))
    assert await link.call(echo("c")) == "c"


async def test_a_caller_who_is_cancelled_already_sends_nothing(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[object] = []
    monkeypatch.setattr(link._client, "submit", submitted.append)
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.call(echo("never"))
    assert scope.cancelled_caught
    assert not submitted


class _Steps(trio.abc.Instrument):
    """Counts the steps of the task that waits for timers."""

    def __init__(self) -> None:
        self.timers = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.timers += task.name == "worqr.link.driver"


async def test_timers_that_are_set_and_cancelled_wake_no_task() -> None:
    driver, steps = TrioDriver(), _Steps()
    try:
        driver.call_at(time.monotonic() + 60, list)
        await trio.testing.wait_all_tasks_blocked()  # the task waits
        trio.lowlevel.add_instrument(steps)
        for seconds in (50, 40, 45, 30):
            driver.call_at(time.monotonic() + seconds, list).cancel()
            await trio.testing.wait_all_tasks_blocked()
        assert steps.timers == 0
    finally:
        trio.lowlevel.remove_instrument(steps)
        driver.close()
