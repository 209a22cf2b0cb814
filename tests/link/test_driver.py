"""The way back into the loop: nothing that runs there can end the run, nobody is woken twice."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import trio
import trio.testing

from tests.link.scripts import Outcomes, echo, lines, until
from tests.support.patience import PATIENCE
from worqr.link import Link, TrioDriver, Waiter
from worqr.link.driver import wake_all


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
async def test_what_a_delivery_raises_is_logged_and_the_run_goes_on(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    driver = TrioDriver()
    driver.post(fail)
    done = trio.Event()
    driver.post(done.set)
    with trio.fail_after(PATIENCE):
        await done.wait()
    assert len(lines(caplog, "link.deliver")) == 1


async def test_a_waiter_whose_wake_fails_keeps_nobody_asleep(caplog: pytest.LogCaptureFixture) -> None:
    driver, broken, sound = TrioDriver(), Waiter(), Waiter()
    broken.wake = lambda: 1 / 0
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.wait, sound)
            await trio.testing.wait_all_tasks_blocked()
            driver.post(partial(wake_all, [broken, sound]))
    assert len(lines(caplog, "link.deliver")) == 1


async def test_nobody_is_woken_twice() -> None:
    driver, waiter = TrioDriver(), Waiter()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.wait, waiter)
            await trio.testing.wait_all_tasks_blocked()
            driver.post(partial(wake_all, [waiter, waiter]))
            driver.post(partial(wake_all, [waiter]))
    await trio.testing.wait_all_tasks_blocked()


async def test_whoever_was_cancelled_is_not_woken() -> None:
    driver, waiter = TrioDriver(), Waiter()
    with trio.move_on_after(0.01):
        await driver.wait(waiter)
    assert waiter.abandoned
    driver.post(partial(wake_all, [waiter]))
    await trio.sleep(0.01)  # a second reschedule would end this run


def test_a_loop_that_has_ended_is_no_error() -> None:
    drivers: list[TrioDriver] = []

    async def make() -> None:
        drivers.append(TrioDriver())

    trio.run(make)
    thread = threading.Thread(target=drivers[0].post, args=(lambda: None,))
    thread.start()
    thread.join()
    drivers[0].post(lambda: None)


async def test_a_posted_callback_that_fails_harms_no_other(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = Outcomes()

    def fail(value: object, error: Exception | None) -> None:
        raise ZeroDivisionError

    link.post(echo("a"), fail)
    link.post(echo("b"), outcomes)
    await outcomes.wait(1)
    await until(lambda: lines(caplog, "link.deliver"))
    assert await link.call(echo("c")) == "c"


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
