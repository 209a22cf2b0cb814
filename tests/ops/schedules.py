"""What the tests of schedules share: definitions that mean nothing to Lua, and the registry's hash told without its times."""

from __future__ import annotations

from typing import Any

from tests.ops.driver import Desk, Expires
from worqr import ops
from worqr.ops import ScheduleRow

DEF = b'{"every_ms": 1000} \xff\x00'
OTHER = b"another definition"
TASK = b"task \x00\xff"
T = 1_700_000_000_000
"""A nominal time, long ago."""


def now(desk: Desk) -> int:
    """The server's time, in ms."""
    return desk.call(ops.list_schedules(desk.g)).now


def declare(desk: Desk, *names: str, definition: bytes = DEF, replace: bool = True) -> None:
    pairs = [(name, definition) for name in names]
    assert desk.call(ops.declare_schedules(desk.g, pairs, replace=replace)) == "ok"


def declared(desk: Desk, name: str = "s", *, last: int = T, **fields: Any) -> ScheduleRow:
    """A schedule that was judged up to `last`, with these fields."""
    declare(desk, name)
    facts = {f"{field} {name}": value for field, value in {"last": last, "seen": T, **fields}.items()}
    desk.client.hset(desk.g.schedules, mapping=facts)
    return row(desk, name)


def row(desk: Desk, name: str = "s") -> ScheduleRow:
    [found] = [each for each in desk.call(ops.list_schedules(desk.g)).rows if each.name == name]
    return found


def told(desk: Desk, since: int) -> dict[str, Any]:
    """The whole state; times of the hash of schedules that are not before `since` are called now."""
    state = desk.state()
    if (found := state.get(":schedules")) is not None:
        assert isinstance(found, Expires)
        fields = {
            name: "now" if value.isdigit() and since <= int(value) <= now(desk) else value
            for name, value in found.value.items()
        }
        state[":schedules"] = Expires(fields)
    return state
