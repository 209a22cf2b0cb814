"""What the tests of schedules share: definitions that mean nothing to Lua, and the registry's keys of schedules told apart."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.ops.driver import Desk
from worqr import ops
from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops import ScheduleRow
from worqr.ops.registry import NO_DEPLOY

DEF = b'{"every_ms": 1000} \xff\x00'
OTHER = b"another definition"
TASK = b"task \x00\xff"
T = 1_700_000_000_000
"""A nominal time, long ago."""
MINUTE = 60_000
HOUR = 60 * MINUTE


def now(desk: Desk) -> int:
    """The server's time, in ms."""
    return desk.call(ops.list_schedules(desk.g)).now


def fire_schedule(keys: QueueKeys, name: str, nominal: int, *, judged_at: int, **options: Any) -> Command[str]:
    """A batch of one firing; the reply is its word."""
    call = ops.fire_schedules(keys, [ops.Firing(name, nominal, **options)], judged_at=judged_at)
    return replace(call, read=lambda reply: call.read(reply)[0])


def declare(desk: Desk, *names: str, definition: bytes = DEF, replace: bool = True, owner: str = NO_DEPLOY) -> None:
    pairs = [(name, definition) for name in names]
    assert desk.call(ops.declare_schedules(desk.g, pairs, replace=replace, owner=owner)) == []
    set_clock_ahead(desk, MINUTE // 2)  # so that no script notes the time meanwhile


def declared(desk: Desk, name: str = "s", *, last: int = T, check_at: int | None = None, **fields: Any) -> ScheduleRow:
    """A schedule that was judged up to `last`, with these fields; a leader is to look at it at `check_at`, by default at once."""
    declare(desk, name)
    facts = {f"{field} {name}": value for field, value in {"last": last, **fields}.items()}
    desk.client.hset(desk.g.schedules, mapping=facts)
    if "paused" in fields:
        desk.client.zrem(desk.g.schedules_due, name)
    elif check_at is not None:
        desk.client.zadd(desk.g.schedules_due, {name: check_at})
    return row(desk, name)


def row(desk: Desk, name: str = "s") -> ScheduleRow:
    [found] = [each for each in desk.call(ops.list_schedules(desk.g)).rows if each.name == name]
    return found


def facts(desk: Desk, since: int | None = None) -> dict[str, str]:
    """The hash of schedules without its clock; times that are not before `since` are called now."""
    until = now(desk)
    return {
        field.decode(): "now" if since and value.isdigit() and since <= int(value) <= until else value.decode("latin-1")
        for field, value in desk.client.hgetall(desk.g.schedules).items()
        if field != b"clock"
    }


def looks(desk: Desk) -> dict[str, int]:
    """When a leader is to look at which schedule."""
    return {name.decode(): int(at) for name, at in desk.client.zrange(desk.g.schedules_due, 0, -1, withscores=True)}


def seen(desk: Desk) -> dict[str, int]:
    """When each schedule was declared last, in ms for which the mesh was led."""
    return {name.decode(): int(at) for name, at in desk.client.zrange(desk.g.schedules_seen, 0, -1, withscores=True)}


def lead(desk: Desk, ms: int) -> None:
    """The mesh was led for that long."""
    desk.client.hset(desk.g.schedules, "led", ms)


def set_clock_ahead(desk: Desk, ms: int) -> None:
    """As if schedules had been judged by a clock that was so far ahead."""
    desk.client.hset(desk.g.schedules, "clock", now(desk) + ms)
