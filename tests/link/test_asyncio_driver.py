"""The driver of asyncio: waits, limits that let every other cancellation through, and loops that have ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import pytest
import trio

from tests.link.scripts import lines
from tests.support.patience import PATIENCE
from worqr.link import (
    ThreadDriver,
    TrioDriver,
    Waiter,
    driver_here,
    loop_here,
    loop_name_here,
)
from worqr.link.asyncio_driver import AsyncioDriver
from worqr.link.driver import wake_all

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it on an asyncio loop; what takes longer than anybody would wait is an error."""

    async def bounded() -> T:
        async with asyncio.timeout(2 * PATIENCE):
            return await main()

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def turn(times: int = 3) -> None:
    """Let everybody have their turn."""
    for _ in range(times):
        await asyncio.sleep(0)


# Waiting


@pytest.mark.parametrize("wakes_first", [True, False])
def test_whoever_is_cancelled_is_not_woken(wakes_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        driver, waiter = AsyncioDriver(), Waiter()
        waiting = asyncio.create_task(driver.wait(waiter))
        await turn()
        both = [partial(wake_all, [waiter]), waiting.cancel]
        for each in both if wakes_first else both[::-1]:  # before the task comes to know of either
            each()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiter.abandoned
        assert waiter.wake is None
        driver.post(partial(wake_all, [waiter]))
        await turn()

    run(main)
    assert not lines(caplog, "link.deliver")


def test_a_cancellation_that_has_not_come_yet_comes_before_anything_is_sent() -> None:
    reached: list[str] = []

    async def main() -> None:
        driver = AsyncioDriver()

        async def ask() -> None:
            task = asyncio.current_task()
            assert task is not None
            await driver.prepare(Waiter())
            reached.append("first")
            task.cancel()
            try:
                await driver.prepare(Waiter())
                reached.append("never")
            finally:
                await driver.prepare(Waiter())  # it has come: who cleans up may send
                await driver.checkpoint()
                reached.append("cleaned up")

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(ask())

    run(main)
    assert reached == ["first", "cleaned up"]


class Line:
    """A connection and its only call. `on_read` runs when the reply is read, and settles the call or not."""

    def __init__(self) -> None:
        self.driver = AsyncioDriver()
        self.request = Waiter()
        self.on_read: Callable[[], object] = self.settle
        self.socket, self.server = socket.socketpair()
        self.socket.setblocking(False)
        self.watch = self.driver.watch(self.socket, self._readable, lambda: None)

    def _readable(self) -> None:
        self.socket.recv(1)
        self.on_read()

    def settle(self) -> None:
        self.request.settle()
        wake_all((self.request,))

    def reply(self) -> None:
        self.server.send(b"!")

    async def call(self, request: Waiter | None = None) -> None:
        await self.driver.exchange(request or self.request, lambda _: self.watch)

    def close(self) -> None:
        self.watch.close()
        self.socket.close()
        self.server.close()


@contextmanager
def line() -> Iterator[Line]:
    made = Line()
    try:
        yield made
    finally:
        made.close()


async def in_task(call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin it, until it waits."""
    task = asyncio.create_task(call)
    await turn()
    return task


def test_the_task_of_the_only_call_goes_on_as_soon_as_its_reply_was_read() -> None:
    order: list[str] = []

    async def call(one: Line) -> None:
        await one.call()
        order.append("the task")

    def on_read(one: Line) -> None:
        asyncio.get_running_loop().call_soon(order.append, "the loop")
        one.settle()
        order.append("the read")

    async def main() -> None:
        with line() as one:
            one.on_read = partial(on_read, one)
            task = await in_task(call(one))
            one.reply()
            await task
            await turn()

    run(main)
    assert order == ["the read", "the task", "the loop"]


@pytest.mark.parametrize("first", ["reply", "cancellation"])
@pytest.mark.parametrize("message", [(), ("the reason",)])
def test_a_cancellation_in_the_turn_of_the_reply_comes_once(
    first: str, message: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with line() as one:
            task = await in_task(one.call())
            both = [one.settle, partial(task.cancel, *message)]

            def on_read() -> None:
                for each in both if first == "reply" else both[::-1]:
                    each()

            one.on_read = on_read
            one.reply()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert task.cancelled()
            assert caught.value.args == message
            assert one.request.abandoned
            assert one.request.wake is None
            one.on_read = one.settle
            one.reply()  # as a reply that comes too late
            await turn()

    run(main)
    assert not caplog.records  # a task that is woken twice is an error that the loop logs


def test_a_call_whose_task_was_cancelled_before_is_not_submitted() -> None:
    submitted: list[Any] = []

    async def call() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await AsyncioDriver().exchange(Waiter(), submitted.append)

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(call())

    run(main)
    assert not submitted


def test_a_call_that_is_settled_otherwise_than_by_its_reply_ends_too() -> None:
    async def main() -> None:
        with line() as one:
            task = await in_task(one.call())
            asyncio.get_running_loop().call_soon(one.settle)
            await task
            await one.call()  # settled before it could wait

    run(main)


def test_of_two_calls_that_one_read_settles_both_go_on() -> None:
    async def main() -> None:
        with line() as one:
            others = [Waiter(), Waiter()]
            tasks = [await in_task(one.call(each)) for each in (one.request, *others)]

            def on_read() -> None:
                for each in others:
                    each.settle()
                wake_all(others)
                one.settle()

            one.on_read = on_read
            one.reply()
            await asyncio.gather(*tasks)

    run(main)


def test_a_time_limit_ends_the_only_call() -> None:
    async def main() -> None:
        with line() as one:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await one.call()
            assert one.request.abandoned
            one.reply()
            await turn()
        with line() as one:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.call(), 0.01)
            assert one.request.abandoned

    run(main)


def test_a_task_goes_on_in_its_own_context() -> None:
    variable = ContextVar[str]("variable", default="nothing")
    seen: list[str] = []

    async def call(one: Line) -> None:
        variable.set("of the task")
        await one.call()
        seen.append(variable.get())
        variable.set("changed")

    async def main() -> None:
        with line() as one:

            def on_read() -> None:
                seen.append(variable.get())
                one.settle()

            one.on_read = on_read
            task = await in_task(call(one))
            one.reply()
            await task
            one.reply()
            await turn()

    run(main)
    assert seen == ["nothing", "of the task", "nothing"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_gets_out_of_the_task_of_a_call(error: type[BaseException]) -> None:
    """And an error of the read itself does not, nor does it keep the task from going on."""
    ended: list[Line] = []

    async def call(one: Line) -> None:
        await one.call()
        ended.append(one)
        raise error

    def on_read(one: Line) -> None:
        one.settle()
        raise ValueError("of the read")

    async def main() -> None:
        with line() as one:
            one.on_read = partial(on_read, one)
            task = await in_task(call(one))
            one.reply()
            await task

    with pytest.raises(error):
        run(main)
    assert len(ended) == 1


@pytest.mark.parametrize("_again", range(20))
def test_a_loop_that_is_closed_meanwhile_is_no_error(_again: int) -> None:
    async def make() -> AsyncioDriver:
        return AsyncioDriver()

    loop = asyncio.new_event_loop()
    driver = loop.run_until_complete(make())
    posting, ended = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def post() -> None:
        try:
            while not ended.is_set():
                driver.post(lambda: None)
                posting.set()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    assert posting.wait(PATIENCE)
    loop.close()
    ended.set()
    thread.join()
    assert not failed


# Which loop


def test_each_place_has_its_mailbox() -> None:
    found: list[object] = []

    async def look() -> None:
        found.append((loop_name_here(), type(driver_here())))
        assert loop_here() == loop_here()
        assert loop_here() is not None

    async def look_from_a_thread() -> None:
        await asyncio.to_thread(lambda: found.append((loop_name_here(), type(driver_here()))))

    trio.run(look)
    asyncio.run(look())
    asyncio.run(look_from_a_thread())
    assert found == [("Trio", TrioDriver), ("asyncio", AsyncioDriver), ("", ThreadDriver)]
    assert loop_here() is None


def test_a_trio_run_that_is_a_guest_and_its_host_have_each_their_own() -> None:
    async def guest() -> tuple[str, type]:
        await trio.lowlevel.checkpoint()
        return loop_name_here(), type(driver_here())

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        seen = {(loop_name_here(), type(driver_here()))}
        while not ended.done():
            await asyncio.sleep(0)
            seen.add((loop_name_here(), type(driver_here())))
        assert seen == {("asyncio", AsyncioDriver)}
        assert ended.result().unwrap() == ("Trio", TrioDriver)

    run(main)


# Limits


async def park() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_limit_ends_its_block_and_says_so() -> None:
    async def main() -> None:
        driver, task = AsyncioDriver(), asyncio.current_task()
        assert task is not None
        for seconds in (0.01, 0, -1):
            with driver.move_on_after(seconds) as limit:
                await driver.wait(Waiter())
            assert limit.cancelled_caught
            assert task.cancelling() == 0
        for seconds in (PATIENCE, math.inf, 1e300):
            with driver.move_on_after(seconds) as limit:
                await driver.checkpoint()
            assert not limit.cancelled_caught
        with driver.move_on_after(0.01):
            await driver.checkpoint()
        await asyncio.sleep(0.05)  # nothing is left that would come now

    run(main)


def test_an_error_of_the_block_comes_out_of_a_limit() -> None:
    async def main() -> None:
        driver, error = AsyncioDriver(), KeyError("of the application")
        with pytest.raises(KeyError) as caught, driver.move_on_after(PATIENCE):
            raise error
        assert caught.value is error
        with pytest.raises(KeyError) as caught, driver.move_on_after(0) as limit:
            try:
                await park()
            finally:
                raise error
        assert not limit.cancelled_caught
        await turn()

    run(main)


WHO = ("inner limit", "outer limit", "timeout around", "cancellation")


@pytest.mark.parametrize(
    "at_once", [who for n in (1, 2, 3, 4) for who in itertools.permutations(WHO, n)], ids=", ".join
)
def test_of_all_that_ends_a_block_at_one_moment_the_outermost_counts(at_once: tuple[str, ...]) -> None:
    heard: list[str] = []

    async def wait(driver: AsyncioDriver) -> None:
        outer: Any = driver.move_on_after(math.inf)
        inner: Any = driver.move_on_after(math.inf)
        task = asyncio.current_task()
        assert task is not None
        try:
            try:
                async with asyncio.timeout(None) as around:
                    ends = {
                        "inner limit": inner._end,
                        "outer limit": outer._end,
                        "timeout around": around._on_timeout,  # type: ignore[attr-defined]
                        "cancellation": task.cancel,
                    }
                    with outer:
                        with inner:
                            asyncio.get_running_loop().call_soon(lambda: [ends[who]() for who in at_once])
                            await driver.wait(Waiter())
                        heard.append("after the inner")
                        await driver.checkpoint()
                    heard.append("after the outer")
                    await driver.checkpoint()
                    assert inner.cancelled_caught != outer.cancelled_caught
            except TimeoutError:
                heard.append("after the timeout")
            await turn()
            assert task.cancelling() == 0
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.create_task(wait(AsyncioDriver()))
        await asyncio.wait([task])
        assert task.cancelled() == ("cancellation" in at_once)
        if not task.cancelled():
            task.result()

    run(main)
    if "cancellation" in at_once:
        assert heard == ["cancelled"]
    elif "timeout around" in at_once:
        assert heard == ["after the timeout"]
    elif "outer limit" in at_once:
        assert heard == ["after the outer"]
    else:
        assert heard == ["after the inner", "after the outer"]


def test_a_limit_works_for_one_who_was_cancelled_and_cleans_up() -> None:
    cleaned: list[bool] = []

    async def clean_up(driver: AsyncioDriver) -> None:
        try:
            await park()
        finally:
            with driver.move_on_after(0) as limit:
                await driver.wait(Waiter())
            cleaned.append(limit.cancelled_caught)

    async def main() -> None:
        task = asyncio.create_task(clean_up(AsyncioDriver()))
        await turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)
    assert cleaned == [True]


def test_limits_and_cancellations_at_random_moments_lose_nothing() -> None:
    """Each task is under three limits and is cancelled at some moment, all in a few turns of the loop."""
    chance = random.Random(7)

    async def wait(driver: AsyncioDriver, limits: list[float]) -> None:
        """Until the first limit has passed; those within it pass before, or not."""
        with driver.move_on_after(limits[0]) as limit:
            if limits[1:]:
                await wait(driver, limits[1:])
            while True:
                await driver.checkpoint()
        assert limit.cancelled_caught

    async def endless(driver: AsyncioDriver) -> None:
        while True:
            await wait(driver, [chance.uniform(0, 0.002) for _ in range(3)])
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    async def main() -> None:
        driver = AsyncioDriver()
        for _ in range(20):
            tasks = [asyncio.create_task(endless(driver)) for _ in range(20)]
            for task in tasks:
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.005), task.cancel)
            done, waiting = await asyncio.wait(tasks, timeout=PATIENCE)
            assert not waiting
            assert all(task.cancelled() for task in done)

    run(main)


# Threads


def test_what_runs_in_a_thread_runs_to_its_end_whoever_is_cancelled() -> None:
    async def main() -> None:
        driver, gate, begun, done = AsyncioDriver(), threading.Event(), threading.Event(), list[int]()

        def work() -> int:
            begun.set()
            assert gate.wait(PATIENCE)
            done.append(1)
            return 7

        task = asyncio.create_task(driver.in_thread(work))
        await until(begun.is_set)
        for _ in range(3):
            task.cancel()
            await turn()
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [1]
        assert await driver.in_thread(work) == 7
        with pytest.raises(ZeroDivisionError):
            await driver.in_thread(lambda: 1 / 0)

    run(main)


async def test_under_trio_as_well() -> None:
    driver, done = TrioDriver(), list[int]()
    with trio.CancelScope() as scope:
        scope.cancel()
        await driver.in_thread(lambda: done.append(1))
        done.append(2)
        await driver.checkpoint()
        done.append(3)
    assert done == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await driver.in_thread(lambda: 1 / 0)
