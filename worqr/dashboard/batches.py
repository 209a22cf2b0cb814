"""Calls side by side, so that their requests go to the server in one batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast

import anyio

from worqr.errors import RefusedByServer
from worqr.escaping import escape

T = TypeVar("T")
U = TypeVar("U")


async def gathered(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make calls side by side, so that they go to the server in one batch. Raise the error of the first that fails."""
    if len(calls) == 1:
        return [await calls[0]()]
    found: dict[int, T] = {}
    errors: list[Exception] = []

    async def one(place: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            found[place] = await call()
        except Exception as error:  # a group of errors would be reported as something unexpected
            errors.append(error)

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(one, place, call)
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(calls))]


async def unless_refused(call: Callable[[], Awaitable[T]], otherwise: U) -> tuple[T | U, str]:
    """Make a call for one part of a page. If the server refuses it, return `otherwise` and the server's words, so that the other
    parts are shown.
    """
    try:
        return await call(), ""
    except RefusedByServer as error:
        return otherwise, escape(str(error))


async def pair(first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[U]]) -> tuple[T, U]:
    """Make two calls of different types side by side."""
    calls: list[Callable[[], Awaitable[object]]] = [first, second]
    one, other = await gathered(calls)
    return cast("T", one), cast("U", other)
