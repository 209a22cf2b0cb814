"""Middleware: functions of the application that wrap every run, on the loop of the peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import cast

from worqr.errors import UsageError
from worqr.handler_checks import is_async
from worqr.handler_options import RunsIn
from worqr.peer.context import Context, current
from worqr.peer.handlers import Handler, named_after
from worqr.peer.wrong_loop import HANDLER_REMEDY, MIDDLEWARE_REMEDY, detecting_wrong_loop

Middleware = Callable[[Context, Callable[[], Awaitable[object]]], Awaitable[object]]
"""``async def middleware(context, call_next)``: wraps every run of a peer, on its loop. Its return value is the result."""


def checked_middleware(middleware: object) -> tuple[Middleware, ...]:
    """Raise UsageError unless it is a collection of async functions."""
    if not isinstance(middleware, Collection):
        raise UsageError(f"middleware must be a collection of async functions, not {middleware!r}")
    for each in cast("Collection[object]", middleware):
        if not is_async(each):
            raise UsageError(f"middleware must be async functions (context, call_next), not {each!r}")
    return tuple(cast("Collection[Middleware]", middleware))


def with_middleware(run: Handler, middleware: Sequence[Middleware], place: RunsIn) -> Handler:
    """Return `run` inside all of `middleware`, the first one outermost.

    Middleware receives the failure of a handler that ran on the wrong loop.
    """
    if not middleware:
        return run
    if place == "loop":
        run = detecting_wrong_loop(run, HANDLER_REMEDY["asyncio"])
    for each in reversed(middleware):
        run = _inside(each, run)
    return detecting_wrong_loop(run, MIDDLEWARE_REMEDY)


def _inside(middleware: Middleware, run: Handler) -> Handler:
    async def handler(task: bytes) -> object:
        return await middleware(current(), partial(run, task))

    return named_after(run, handler)
