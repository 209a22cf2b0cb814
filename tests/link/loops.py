"""Trio and asyncio with the same words, for promises that the link makes under both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import pytest
import trio
import trio.testing

from tests.support.patience import PATIENCE
from worqr.link import Link, LinkSettings, driver_here

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, T]]
Program = Callable[[Link], Awaitable[None]]
THREADS = ("worqr-link", "worqr-subscriptions", "worqr-heartbeat", "worqr-log_thread")


class Limit:
    """A block with a time limit.

    Attributes:
        passed: the limit has ended it.
    """

    passed = False


class Loop(Protocol):
    """What the tests need of a loop."""

    def run(self, main: Main[T]) -> T:
        """Run it; what takes longer than anybody would wait is an error."""
        ...

    def limit(self, seconds: float) -> AbstractAsyncContextManager[Limit]:
        """A block that the caller cancels after this time."""
        ...

    def running(self, function: Callable[[], Awaitable[object]]) -> AbstractAsyncContextManager[Callable[[], object]]:
        """Run it beside the block, which gets a function that cancels it, and wait for its end."""
        ...

    async def together(self, functions: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run all of them at once."""
        ...

    async def turn(self, seconds: float = 0) -> None:
        """Let everybody have their turn."""
        ...


class TrioLoop:
    def run(self, main: Main[T]) -> T:
        async def bounded() -> T:
            with trio.fail_after(2 * PATIENCE):
                return await main()

        return trio.run(bounded)

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[Limit]:
        limit = Limit()
        with trio.move_on_after(seconds) as scope:
            yield limit
        limit.passed = scope.cancelled_caught

    @asynccontextmanager
    async def running(self, function: Callable[[], Awaitable[object]]) -> AsyncIterator[Callable[[], object]]:
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await function()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            yield scope.cancel

    async def together(self, functions: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)

    async def turn(self, seconds: float = 0) -> None:
        await trio.sleep(seconds)


class AsyncioLoop:
    def run(self, main: Main[T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(2 * PATIENCE):
                return await main()

        return asyncio.run(bounded())

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[Limit]:
        limit = Limit()
        try:
            async with asyncio.timeout(seconds):
                yield limit
        except TimeoutError:
            limit.passed = True

    @asynccontextmanager
    async def running(self, function: Callable[[], Awaitable[object]]) -> AsyncIterator[Callable[[], object]]:
        async with asyncio.TaskGroup() as group:

            async def run() -> None:
                await function()

            task = group.create_task(run())
            await self.turn(0.005)
            yield task.cancel

    async def together(self, functions: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(function())

    async def turn(self, seconds: float = 0) -> None:
        for _ in range(3):
            await asyncio.sleep(seconds)


LOOPS: tuple[Loop, ...] = (TrioLoop(), AsyncioLoop())
of_each_loop = pytest.mark.parametrize("loop", LOOPS, ids=["trio", "asyncio"])


async def until(loop: Loop, condition: Callable[[], object]) -> None:
    while not condition():  # `Loop.run` has a limit
        await loop.turn(0.005)


def with_link(loop: Loop, url: str, program: Program, *, ready: bool = True) -> None:
    """Run a program with a link of its loop, and see that its threads end."""

    async def main() -> None:
        link = Link(LinkSettings(url, app="test"), driver_here())
        link.start()
        try:
            if ready:
                await link.wait_ready()
            await program(link)
        finally:
            link.close()
        await until(loop, lambda: not [t.name for t in threading.enumerate() if t.name in THREADS])

    loop.run(main)
