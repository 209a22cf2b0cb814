"""Calls side by side, so that their requests go to the server in one batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast

import anyio

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


async def pair(first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[U]]) -> tuple[T, U]:
    """Make two calls of different types side by side."""
    calls: list[Callable[[], Awaitable[object]]] = [first, second]
    one, other = await gathered(calls)
    return cast("T", one), cast("U", other)
