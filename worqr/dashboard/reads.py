"""Reading the server once for all who look: pages and streams share what was read a moment ago.

Nothing is read in the background. The first request that needs newer figures reads them, and others wait for it meanwhile.
So without requests there is no timer, no connection and no request to the server. Calls side by side are one batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import anyio

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.escaping import escape
from worqr.log_events import emit

logger: logging.Logger = logging.getLogger("worqr.dashboard")  # a documented name

T = TypeVar("T")

SHARE: Final = 100
"""A look that took a second is followed by another after 100 s at the earliest: looking takes 1 % of the time, at most."""
FRESH: Final = 1.0
"""Seconds for which a page uses figures that were read for another one."""
KEPT: Final = 30.0
"""Seconds after which figures that are not used any more are dropped."""


@dataclass
class _Look:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    value: Any = None
    failure: Exception | None = None
    read_at: float = -1e9
    took: float = 0.0

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Hold the lock. If it is free, no other task runs meanwhile: looks that are made side by side send one batch."""
        try:
            self.lock.acquire_nowait()
        except anyio.WouldBlock:
            await self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def is_newer_than(self, seconds: float) -> bool:
        """True if the value was read within so many seconds."""
        return time.monotonic() - self.read_at < seconds

    async def renew(self, read: Callable[[Any], Awaitable[Any]]) -> None:
        """Read the value again. An error is kept as well: requests that have waited for it do not wait once more, each."""
        began = time.monotonic()
        try:
            self.value, self.failure = await read(self.value), None
        except WorqrError as error:
            self.failure = error
        self.read_at = time.monotonic()
        self.took = self.read_at - began


class Looks:
    """What was read from the server, by a key of the caller's choice.

    Attributes:
        closing: the program ends, and streams end with it.
    """

    def __init__(self) -> None:
        self._looks: dict[object, _Look] = {}
        self._kept: dict[str, Any] = {}
        self._streams = 0
        self._is_away = False
        self.closing: bool = False

    async def get(
        self, key: object, read: Callable[[T | None], Awaitable[T]], *, within: float = FRESH, spare: bool = False
    ) -> T:
        """Return a value that was read within the last `within` seconds; read it if there is none.

        Args:
            key: what is read.
            read: reads it; it gets the value before, or None.
            within: seconds.
            spare: for streams, which look again and again: look more rarely if a look takes long.
        """
        self._drop_old()
        look = self._looks.setdefault(key, _Look())
        async with look.held():
            # A look that failed took as long as the caller's patience, which says nothing of the server's load.
            limit = max(within, look.took * SHARE) if spare and look.failure is None else within
            if not look.is_newer_than(limit):
                await look.renew(read)
            if look.failure is not None:
                raise look.failure.with_traceback(None)
            return cast("T", look.value)

    def kept(self, key: str, make: Callable[[], T]) -> T:
        """Return an object that lives as long as the dashboard, such as a reader that remembers what it has read."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("T", self._kept[key])

    def last(self, key: object) -> Any:
        """Return what was read last, without reading; None if nothing was read lately, or if that failed."""
        look = self._looks.get(key)
        return look.value if look is not None and look.is_newer_than(KEPT) else None

    def failed(self, error: Unavailable) -> None:
        """Log that the server is away, at the first of several failures."""
        if not self._is_away:
            self._is_away = True
            text = "the server does not answer: %(error)s; open pages show the figures of before"
            emit(logger, "dashboard.away", text, error=str(error))

    def answered(self) -> None:
        """Log that the server is back, at the first reply after failures."""
        if self._is_away:
            self._is_away = False
            emit(logger, "dashboard.back", "the server answers again")

    def forget(self) -> None:
        """Drop all values: something was changed."""
        self._looks.clear()

    @contextmanager
    def stream_opened(self) -> Generator[None]:
        """Count one stream for the length of a block."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return self._streams

    def close(self) -> None:
        """Let all streams end."""
        self.closing = True

    def _drop_old(self) -> None:
        for key in [key for key, look in self._looks.items() if not look.is_newer_than(KEPT)]:
            if not self._looks[key].lock.locked():
                del self._looks[key]


# Calls side by side, so that their requests go to the server in one batch.

U = TypeVar("U")


async def gathered(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make calls side by side, so that they go to the server in one batch. Raise the error of the first that fails.

    `Unavailable.sent` is False only if none of the calls was sent.
    """
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
        first = errors[0]
        if isinstance(first, Unavailable) and (
            found or any(getattr(each, "sent", None) is not False for each in errors)
        ):
            raise Unavailable(str(first), sent=None) from first
        raise first
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
