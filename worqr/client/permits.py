"""Permits of named limits: a block of code takes one before it calls a service, and gives it back after the call.

The server grants permits (`worqr/lua/limits.lua`). Of the calls of one connection that wait for the same limit, the first asks
the server, so they are granted in order. It asks again when a permit is given back, when a rate allows more, and once a second,
because messages may get lost. A thread renews the leases of all permits that the program holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast
from weakref import WeakValueDictionary

from worqr import child_processes, ops
from worqr.client.notifications import Notification
from worqr.client.producer import random_part
from worqr.command import Command
from worqr.errors import UsageError, WorqrError
from worqr.keys import LimitKeys, RegistryKeys, check_name
from worqr.limits import Limit, LimitInfo, describe_limits, limits_text, parse_limits
from worqr.link import Link, run_blocking
from worqr.log_events import emit
from worqr.validation import check_between

if TYPE_CHECKING:
    from worqr.client.client import Client
    from worqr.link.messages import Subscription

logger: logging.Logger = logging.getLogger(__name__)

LEASE: Final = 10.0
"""Seconds after which the permits of a program that died are free."""
RENEW_EVERY: Final = 2.5
AT_ONCE: Final = 1000
"""Permits in one request that renews them."""
RETURN_WITHIN: Final = 2.0
"""Seconds that the end of a block waits for the server."""
MOST_COST: Final = 1_000_000
MANY_LIMITS: Final = 10_000
"""Limits that a program remembers to have noted. One that uses more of them notes them more often."""
NOTE_EVERY: Final = 3600.0
"""Seconds between two notes that this program uses a limit."""


class Permit:
    """A permit of a named limit, which a block of ``mesh.limit`` holds."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used: int | None = None

    def cost(self, used: int) -> None:
        """Set what was used in place of the estimate, from the start of the block on. It is counted when the block ends.

        Raises:
            UsageError: `used` is not a whole number from 0 to 1,000,000.
        """
        self._used = check_between(used, "cost of a permit", 0, MOST_COST)

    @property
    def used(self) -> int | None:
        """What was set last; None: the estimate holds."""
        return self._used


class PermitLine:
    """The calls of one connection that wait for a permit of one limit, in order."""

    def __init__(self, link: Link, keys: LimitKeys) -> None:
        self._link = link
        self._keys = keys
        self._waiting: deque[Notification] = deque()
        self._channel: Subscription | None = None

    async def wait_turn(self, ask: Callable[[int], Awaitable[float]]) -> None:
        """Wait until it is the turn of this call, and until `ask` returns 0. Else it returns in how many seconds to repeat it.

        `ask` gets how many calls wait.

        Raises: what `ask` raises.
        """
        mine = Notification(self._link)
        with self._link.driver.entered:
            self._waiting.append(mine)
        try:
            while self._waiting[0] is not mine:
                await mine.wait()
            while (wait := await ask(len(self._waiting))) > 0:
                self._listen()
                await mine.wait(wait)
        finally:
            with self._link.driver.entered:
                self._waiting.remove(mine)
                self._wake()

    def _listen(self) -> None:
        with self._link.driver.entered:
            if self._channel is None:
                self._channel = self._link.subscriptions.open(
                    [self._keys.free], lambda _channel, _message: self._wake(), self._wake
                )

    def _wake(self) -> None:
        """Let the first call ask. Without one, receive no more messages."""
        if self._waiting:
            self._waiting[0].set()
        elif self._channel is not None:
            self._channel.close()
            self._channel = None


class PermitLines:
    """The lines of one connection, by limit."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lines = WeakValueDictionary[str, PermitLine]()

    def line(self, keys: LimitKeys) -> PermitLine:
        """Return the line of a limit. It is kept while a call uses it: a program may have a limit for each of its customers."""
        with self._link.driver.entered:
            return self._lines.setdefault(keys.base, PermitLine(self._link, keys))


class HeldPermits:
    """The permits that this program holds, and the thread that renews them while there are any."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._held: dict[LimitKeys, set[str]] = {}
        self._thread: threading.Thread | None = None
        self._told: set[tuple[str, str]] = set()
        self._noted: dict[str, float] = {}
        self._forks = child_processes.forks

    def _own(self) -> threading.Lock:
        """Return the lock. A process that was forked has a new one, and holds nothing: its parent renews what that holds."""
        if self._forks != child_processes.forks:
            self._forks, self._lock, self._held, self._thread = child_processes.forks, threading.Lock(), {}, None
        return self._lock

    def add(self, keys: LimitKeys, permit: str) -> None:
        """Renew a permit from now on."""
        with self._own():
            self._held.setdefault(keys, set()).add(permit)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._renew_all, name="worqr-permits", daemon=True)
                self._thread.start()

    def remove(self, keys: LimitKeys, permit: str) -> None:
        """Renew a permit no more."""
        with self._own():
            held = self._held.get(keys, set())
            held.discard(permit)
            if not held:
                self._held.pop(keys, None)

    def held_of(self, keys: LimitKeys) -> list[str]:
        """Return the permits of one limit that are held."""
        with self._own():
            return sorted(self._held.get(keys, ()))

    def tell_other(self, name: str, mine: str, other: str) -> None:
        """Warn once that another program has given other limits under this name."""
        if other and (name, other) not in self._told:
            self._told.add((name, other))
            emit(
                logger,
                "limit.replaced",
                "another program gave limit %(limit)r as %(before)s; %(limits)s holds from now on. Give it the same numbers in "
                "all programs",
                limit=name,
                before=describe_limits(parse_limits(other)),
                limits=describe_limits(parse_limits(mine)),
            )

    def note(self, name: str, unit: str) -> Command[str] | None:
        """Return the call that notes in the mesh that this program uses a limit, so that people see it; None if it has, in this
        hour.
        """
        if time.monotonic() < self._noted.get(name, 0.0):
            return None
        self._noted.pop(name, None)
        self._noted[name] = time.monotonic() + NOTE_EVERY
        if len(self._noted) > MANY_LIMITS:
            self._noted.pop(next(iter(self._noted)), None)
        return ops.note_limit(RegistryKeys(self._client.settings.prefix), name, unit)

    def noted(self, name: str, error: Exception | None) -> None:
        """Log that a limit is not listed, because of an error of that call. The limit holds all the same."""
        if error is not None:
            text = "limit %(limit)r holds, but `worqr limits` does not list it (%(error)s); the next try is in an hour"
            emit(logger, "limit.unlisted", text, limit=name, error=str(error))

    def _renew_all(self) -> None:
        asked: dict[LimitKeys, float] = {}
        connection = self._client.connections.for_renewals
        time.sleep(RENEW_EVERY)
        while held := self._all_held():
            began = time.monotonic()
            try:
                run_blocking(self._renew_once(connection.get().link, held, asked))
            except WorqrError as error:
                for keys, permits in held.items():
                    self._tell_unrenewed(keys, permits, error)
            time.sleep(max(0.0, began + RENEW_EVERY - time.monotonic()))
        connection.close()

    def _all_held(self) -> dict[LimitKeys, list[str]]:
        """Return all permits that are held, by limit. If there are none, the thread is to end."""
        with self._lock:
            held = {keys: list(permits) for keys, permits in self._held.items()}
            if not held:
                self._thread = None
            return held

    async def _renew_once(
        self, link: Link, held: Mapping[LimitKeys, Sequence[str]], asked: dict[LimitKeys, float]
    ) -> None:
        """Renew permits. A limit whose node does not answer delays no other one.

        Args:
            link: the connection.
            held: the permits by limit.
            asked: when the requests end that have no reply yet, by limit. It is changed.
        """
        now, left, answered = time.monotonic(), 0, Notification(link)

        def deliver(keys: LimitKeys, some: Sequence[str], _: object, error: Exception | None) -> None:
            nonlocal left
            left -= 1
            asked.pop(keys, None)
            self._renewed(link, keys, some, error)
            answered.set()

        for keys, permits in held.items():
            if asked.get(keys, now) > now:
                continue
            asked[keys] = now + LEASE
            for start in range(0, len(permits), AT_ONCE):
                some, left = permits[start : start + AT_ONCE], left + 1
                call = ops.renew_permits(keys, some, round(LEASE * 1000))
                link.post(call, partial(deliver, keys, some), patience=LEASE)
        while left and (wait := now + RENEW_EVERY - time.monotonic()) > 0:
            await answered.wait(wait)

    def _renewed(self, link: Link, keys: LimitKeys, permits: Sequence[str], error: Exception | None) -> None:
        returned = set(permits).difference(self.held_of(keys))  # meanwhile, and they may be held again by this
        if error is not None:
            if len(returned) < len(permits):
                self._tell_unrenewed(keys, permits, error)
            return
        for permit in returned:
            link.post(ops.return_permit(keys, permit), lambda _, _error: None, patience=LEASE)

    def _tell_unrenewed(self, keys: LimitKeys, permits: Sequence[str], error: Exception) -> None:
        emit(
            logger,
            "permit.unrenewed",
            "could not renew %(count)d permits of limit %(limit)r (%(error)s): other programs may exceed the limit",
            limit=keys.name,
            count=len(permits),
            error=f"{type(error).__name__}: {error}",
        )


@asynccontextmanager
async def permit_block(client: Client, limit: Limit | str, cost: int) -> AsyncGenerator[Permit]:
    """Hold a permit for the length of a block."""
    name, limits = _checked(limit, cost)
    unit = limit.unit if isinstance(limit, Limit) else ""
    keys, token, permit = LimitKeys(client.settings.prefix, name), random_part(), Permit()
    if client.producer.records:  # a test without a server
        yield permit
        return
    try:
        await _take(client, keys, limits, token, cost, unit)
        client.permits.add(keys, token)
        yield permit
    except GeneratorExit:  # in a generator that is not finished, nothing can wait
        raise
    except BaseException:
        await _give_back(client, keys, token, permit.used)
        raise
    else:
        await _give_back(client, keys, token, permit.used)
    finally:
        client.permits.remove(keys, token)


def _checked(limit: object, cost: object) -> tuple[str, str]:
    """Return the name and the text of a limit."""
    check_between(cost, "cost of a permit", 0, MOST_COST)
    if isinstance(limit, str):
        return check_name(limit, "name of a Limit"), ""
    if not isinstance(limit, Limit) or limit.name is None:
        raise UsageError(
            f"mesh.limit() needs a limit with a name, or the name of one, not {limit!r}: write "
            f"mesh.limit(worqr.Limit(20, name='openai'))"
        )
    return limit.name, limits_text([limit], limit.name)


async def _take(client: Client, keys: LimitKeys, limits: str, permit: str, cost: int, unit: str) -> None:
    async def ask(waiting: int) -> float:
        if limits and (note := client.permits.note(keys.name, unit)) is not None:
            client.connections.for_current_loop().link.post(
                note, lambda _, error: client.permits.noted(keys.name, error)
            )
        reply = await client.ask(ops.take_permits(keys, limits, [permit], cost, round(LEASE * 1000), waiting))
        client.permits.tell_other(keys.name, limits, reply.other)
        if reply.word == "unknown":
            raise UsageError(
                f"no program has used limit {keys.name!r} with its numbers in the last 30 days: write "
                f"mesh.limit(worqr.Limit(20, name={keys.name!r}))"
            )
        if reply.word == "never":
            what = f"{reply.number:,} {unit}".rstrip()
            raise UsageError(
                f"cost {cost:,} is above limit {keys.name!r}, which allows {what} in its period: divide the work"
            )
        return reply.number / 1000 if reply.word == "wait" else 0.0

    await client.connections.for_current_loop().permits.line(keys).wait_turn(ask)


async def _give_back(client: Client, keys: LimitKeys, permit: str, used: int | None) -> None:
    """Give a permit back. If the server is away, the work of the block is done all the same, and the request waits alone: the
    server may still grant what it has received.
    """
    with suppress(WorqrError):
        client.permits.remove(keys, permit)  # first, so that no renewal follows
        call = ops.return_permit(keys, permit, used)
        with client.link.driver.move_on_after(RETURN_WITHIN, shield=True) as limit:
            await client.ask(call)
        if limit.cancelled_caught:
            client.link.post(call, lambda _, _error: None, patience=client.settings.patience)


async def named_limits(client: Client) -> list[LimitInfo]:
    """Return the limits with a name that programs of the mesh have used in the last 30 days, by name.

    Raises:
        RefusedByServer, Unavailable: as any request.
    """
    return await limits_of(client, await client.ask(ops.list_limits(RegistryKeys(client.settings.prefix))))


async def limits_of(client: Client, units: Mapping[str, str]) -> list[LimitInfo]:
    """Return the limits of these names, by name; `units` has what each of them counts.

    Raises:
        RefusedByServer, Unavailable: as any request.
    """
    prefix, names = client.settings.prefix, sorted(units)
    found: list[LimitInfo] = []
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        uses = await client.link.call_all([ops.look_at_limit(LimitKeys(prefix, name)) for name in some])
        found += [info_of(name, units[name], use) for name, use in zip(some, uses, strict=True) if use is not None]
    return found


def info_of(name: str, unit: str, use: ops.LimitUse) -> LimitInfo:
    """Return a limit with a name for people."""
    limits = parse_limits(use.limits)
    rates = [each for each in limits if each.rate is not None]
    rate = rates[0] if rates else None
    return LimitInfo(
        name=name,
        concurrency=next((each.concurrency for each in limits if each.concurrency is not None), None),
        held=use.held - use.expired,
        rate=None if rate is None else rate.rate,
        per=None if rate is None else cast("float", rate.per),
        unit=unit if rate is not None else "",
        used=use.used[0] if rates and use.used else None,
        waiting=use.waiting,
        expired=use.expired,
    )
