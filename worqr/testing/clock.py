"""The clock of a bench: the time of the server plus the time that the test has let pass. It stands still during a run.

The scripts of a bench are the usual ones, except that they call ``moved_time()`` of ``clock.lua`` instead of ``TIME``. A key of
the bench's prefix has the setting of the clock. Keys expire by the server's own clock, which does not move. So this module makes
keys expire earlier whose end a user can see: results, and ids reserved by ``unique_for``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from worqr.command import Argument, Command, expect_ok, text
from worqr.keys import RegistryKeys
from worqr.link import Heartbeat, Link, WorkerHandle
from worqr.lua import Script, all_scripts
from worqr.lua.assembler import SHORT_CALLS
from worqr.ops import list_schedules

R = TypeVar("R")
T = TypeVar("T")

_TIME: Final = f"{SHORT_CALLS['redis.call']}('TIME')"
SOON_MS: Final = 10
"""Tasks that are due within this time are due now, because a test may dispatch for the present time of its own clock."""
SET_WITHIN: Final = 5.0
_IN_ONE: Final = 1000
"""Keys per script."""


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text("utf-8")


@cache
def _own(name: str) -> Script:
    return Script(name, _read(name))


@cache
def bench_scripts() -> dict[str, Script]:
    """Return every script as a bench runs it, by its name."""
    clock = _read("clock")
    moved: dict[str, Script] = {}
    for script in all_scripts():
        shebang, _, body = script.source.partition("\n")
        if _TIME in body:
            text = "\n".join([shebang, clock, body.replace(_TIME, "moved_time()")])
            moved[script.name] = Script(script.name, text, tail=script.tail)
        else:
            moved[script.name] = script
    return moved


class BenchLink(Link):
    """A link that runs the scripts of a bench."""

    async def call(self, call: Command[T], *, patience: float | None = None) -> T:
        """As `Link.call`."""
        return await super().call(_with_bench_script(call), patience=patience)

    async def call_all(self, calls: Sequence[Command[T]]) -> list[T]:
        """As `Link.call_all`."""
        return await super().call_all([_with_bench_script(call) for call in calls])

    def post(
        self,
        call: Command[T],
        deliver: Callable[[T | None, Exception | None], None],
        *,
        owner: WorkerHandle | None = None,
        patience: float = float("inf"),
    ) -> None:
        """As `Link.post`."""
        super().post(_with_bench_script(call), deliver, owner=owner, patience=patience)

    def heartbeat(self, *, make: Callable[[int, bool], Command[R]], **options: Any) -> Heartbeat[R]:
        """As `Link.heartbeat`."""
        return super().heartbeat(make=lambda number, turning: _with_bench_script(make(number, turning)), **options)


def _with_bench_script(call: Command[T]) -> Command[T]:
    """Return `call` with the script of the bench; the call itself if it does not read the time."""
    script = bench_scripts().get(call.script.name)
    return call if script is None or script is call.script else call.with_script(script)


def set_clock(keys: RegistryKeys, ahead_ms: int, stopped_ms: int | None) -> Command[str]:
    """Set how far the clock is ahead; or stop it at a time, with `stopped_ms`."""
    setting = f"{ahead_ms}" if stopped_ms is None else f"{ahead_ms} {stopped_ms}"
    return Command(_own("set_clock"), keys.base, (setting,), expect_ok)


def find_keys(keys: RegistryKeys, pattern: str, cursor: str) -> Command[tuple[str, list[tuple[str, int]]]]:
    """Return the next cursor, and some keys with the times at which they expire, in ms; -1: never."""

    def read(reply: list[Any]) -> tuple[str, list[tuple[str, int]]]:
        found = reply[2:]
        return text(reply[1]), [(text(key), int(at)) for key, at in zip(found[::2], found[1::2], strict=True)]

    return Command(_own("find_keys"), keys.base, (cursor, pattern), read)


def expire_keys(keys: RegistryKeys, moments: Sequence[tuple[str, int]]) -> Command[str]:
    """Set when keys expire, in ms. A time in the past deletes the key."""
    args = tuple[Argument, ...](chain.from_iterable(moments))
    return Command(_own("expire_keys"), keys.base, args, expect_ok)


async def keys_like(link: Link, keys: RegistryKeys, pattern: str) -> list[tuple[str, int]]:
    """Return the keys of a bench that match, and when they expire."""
    cursor, found = "0", dict[str, int]()
    while True:
        cursor, page = await link.call(find_keys(keys, pattern, cursor))
        found |= dict(page)
        if cursor == "0":
            return list(found.items())


async def _expire(link: Link, keys: RegistryKeys, moments: Sequence[tuple[str, int]]) -> None:
    for start in range(0, len(moments), _IN_ONE):
        await link.call(expire_keys(keys, moments[start : start + _IN_ONE]))


class Clock:
    """The clock of one bench. Only the loop of the bench changes it."""

    def __init__(self, link: Link, keys: RegistryKeys) -> None:
        self._link = link
        self._keys = keys
        self._ahead_ms = 0
        self._stopped_ms: int | None = None

    async def now_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        return (await self._link.call(list_schedules(self._keys))).now  # whose reply includes the time

    async def begin_at(self, ms: int) -> None:
        """Set the time, before anything uses the clock."""
        self._ahead_ms = ms - await self.now_ms()
        await self._set()

    async def move(self, ms: int) -> None:
        """Let `ms` pass."""
        self._ahead_ms += ms
        if self._stopped_ms is not None:
            self._stopped_ms += ms
        await self._set()
        for rest in (":result:*", ":taken:*", ":sent:*", ":paused", ":part:*"):
            found = await keys_like(self._link, self._keys, f"{self._keys.prefix}:{{*{rest}")
            await _expire(self._link, self._keys, [(key, max(1, at - ms)) for key, at in found if at > 0])

    @asynccontextmanager
    async def stopped(self) -> AsyncGenerator[None]:
        """Stop the clock inside the block, except for moves."""
        self._stopped_ms = await self.now_ms() + SOON_MS
        await self._set()
        try:
            yield
        finally:
            self._stopped_ms = None
            with trio.CancelScope(shield=True):
                await self._set()

    async def _set(self) -> None:
        await self._link.call(set_clock(self._keys, self._ahead_ms, self._stopped_ms), patience=SET_WITHIN)


async def delete_keys(link: Link, keys: RegistryKeys) -> None:
    """Delete all keys of the prefix."""
    for pattern in (f"{keys.prefix}:{{*", f"{keys.base}:*"):
        await _expire(link, keys, [(key, 1) for key, _ in await keys_like(link, keys, pattern)])
