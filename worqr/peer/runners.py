"""Where handlers run: on the loop, in threads, on an asyncio loop, in processes. Here the choice, and what limits each."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from worqr.errors import UsageError
from worqr.peer.context import Context, current
from worqr.peer.options import RunsIn
from worqr.peer.running import Handler, check_handler, named_after
from worqr.peer.threads import AroundThread, Threads

if TYPE_CHECKING:
    from worqr.peer.aio import AsyncioLoop

Middleware = Callable[[Context, Callable[[], Awaitable[object]]], Awaitable[object]]
"""``async def middleware(context, call_next)``: around every run of a peer, on its loop; what it returns is the result."""


class Runners:
    """The places in which one peer runs handlers."""

    def __init__(self, *, threads: int, around_thread: AroundThread | None = None) -> None:
        self.threads: Threads = Threads(threads, around_thread)
        self._asyncio: AsyncioLoop | None = None

    async def run_forever(self) -> None:
        """Hold what runs beside the loop until cancelled, and end it then, in bounded time."""
        try:
            await trio.sleep_forever()
        finally:
            if self._asyncio is not None:
                with trio.CancelScope(shield=True):
                    await self._asyncio.end()

    def _asyncio_loop(self) -> AsyncioLoop:
        """The peer's asyncio loop; asyncio is imported by those who need it."""
        if self._asyncio is None:
            from worqr.peer.aio import AsyncioLoop

            self._asyncio = AsyncioLoop()
        return self._asyncio

    def prepare(self, handler: Callable[[Any], object], runs_in: RunsIn | None) -> Handler:
        """`handler` as something to await in a slot.

        Raises:
            UsageError: it cannot be called with a task, or does not run in such a place.
        """
        handler = getattr(handler, "__worqr_handler__", handler)
        if runs_in == "process":
            raise UsageError(f"runs_in={runs_in!r} is not there yet")
        check_place(handler, runs_in)
        asynchronous = check_handler(handler)
        if runs_in == "asyncio":
            return self._asyncio_loop().prepare(cast("Handler", handler))
        return cast("Handler", handler) if asynchronous else self.threads.prepare(handler)


def check_place(handler: Callable[..., object], runs_in: RunsIn | None) -> None:
    """Whether `handler` can run in such a place.

    Raises:
        UsageError: it is a generator, which nobody runs; async, or not, when it should not be; not to be found by a process.
    """
    inner: Any = handler
    while isinstance(inner, partial):
        inner = cast("Any", inner.func)  # pyright: ignore[reportUnknownMemberType]
    for kind in (inner, getattr(inner, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind):
            raise UsageError(f"{handler!r} is a generator: calling it runs nothing; take the `yield` out of it")
    if runs_in in {"loop", "asyncio"} and not is_async(handler):
        raise UsageError(f"{handler!r} is a plain function and would block the loop: its place is runs_in='thread'")
    if runs_in in {"thread", "process"} and is_async(handler):
        raise UsageError(f"{handler!r} is an async function, whose places are runs_in='loop' and 'asyncio'")


def is_async(handler: object) -> bool:
    """True for what is to be awaited: an async function, or an object with an async ``__call__``."""
    while isinstance(handler, partial):
        handler = handler.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def with_middleware(run: Handler, middleware: Iterable[Middleware]) -> Handler:
    """`run` inside all of `middleware`, the first one outermost."""
    for each in reversed(tuple(middleware)):
        run = _inside(each, run)
    return run


def _inside(middleware: Middleware, run: Handler) -> Handler:
    async def handler(task: bytes) -> object:
        return await middleware(current(), partial(run, task))

    return named_after(run, handler)
