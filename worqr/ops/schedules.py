"""The schedules of the mesh: declared, listed, ticked, paused, dropped (registry), and fired (a queue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from worqr.call import Argument, Call
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops.replies import Reply, done, expect, new_call, pairs, text, word_of

SCHEDULES_EXPIRE_S: Final = 30 * 24 * 3600
FIRED_EXPIRE_S: Final = 7 * 24 * 3600
"""A leader that fires again what it does not know to be fired is late by seconds, not by days."""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule as it lies in the registry; times are nominal ones, in ms by the server's clock.

    Attributes:
        definition: as its declarer encoded it.
        last: up to which all firings were judged.
        next, fired: the next firing, and the last that was enqueued, if somebody has noted them.
        owed: firings that wait for their turn, oldest first.
        seen: when a peer last declared it.
    """

    name: str
    definition: bytes
    last: int
    next: int | None
    fired: int | None
    owed: tuple[int, ...]
    seen: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Schedules:
    """Reply of list_schedules: the server's time, and all schedules by name."""

    now: int
    rows: list[ScheduleRow]


def declare_schedules(keys: RegistryKeys, definitions: Sequence[tuple[str, bytes]], *, replace: bool) -> Call[str]:
    """Note (name, definition) of each schedule, or with replace=False only that they are still meant."""
    args: list[Argument] = [int(replace), SCHEDULES_EXPIRE_S]
    for name, definition in definitions:
        args += (name, definition)
    size = sum(len(definition) for _, definition in definitions)
    return new_call("declare_schedules", keys.base, (keys.schedules,), tuple(args), done, numbered=True, size=size)


def list_schedules(keys: RegistryKeys) -> Call[Schedules]:
    """All schedules, and the server's time."""

    def read(reply: Reply) -> Schedules:
        word_of(reply)
        found: dict[str, dict[str, bytes]] = {}
        for field, value in pairs(reply[2]):
            what, _, name = text(field).partition(" ")
            found.setdefault(name, {})[what] = value
        return Schedules(int(reply[1]), [_row(name, found[name]) for name in sorted(found) if "def" in found[name]])

    return new_call("list_schedules", keys.base, (keys.schedules,), (), read)


def _row(name: str, facts: dict[str, bytes]) -> ScheduleRow:
    return ScheduleRow(
        name=name,
        definition=facts["def"],
        last=_number(facts, "last") or 0,
        next=_number(facts, "next"),
        fired=_number(facts, "fired"),
        owed=tuple(int(nominal) for nominal in facts.get("owed", b"").split() if nominal.isdigit()),
        seen=_number(facts, "seen") or 0,
        paused="paused" in facts,
    )


def _number(facts: dict[str, bytes], what: str) -> int | None:
    """What somebody spoilt by hand counts as missing: one schedule must not keep the others from being read."""
    value = facts.get(what, b"")
    return int(value) if value.isdigit() and len(value) < 15 else None  # to the year 5138; calendars end at 9999


def tick_schedule(
    keys: RegistryKeys, was: ScheduleRow, *, last: int, next: int, owed: Sequence[int], fired: int | None
) -> Call[str]:
    """Note how far the schedule got, if it is still as it `was`: ok, or changed. fired None: as it was."""
    args: tuple[Any, ...] = (
        was.name,
        was.last,
        _numbers(was.owed),
        last,
        next,
        _numbers(owed),
        "" if fired is None else fired,
    )
    return new_call("tick_schedule", keys.base, (keys.schedules,), args, expect("ok", "changed"))


def _numbers(owed: Sequence[int]) -> str:
    return " ".join(map(str, owed))


def pause_schedule(keys: RegistryKeys, name: str, *, paused: bool) -> Call[bool]:
    """Stop a schedule or let it go on; False: there is none of this name."""

    def read(reply: Reply) -> bool:
        return word_of(reply) != "unknown"

    return new_call("pause_schedule", keys.base, (keys.schedules,), (name, int(paused)), read, numbered=True)


def drop_schedule(keys: RegistryKeys, name: str, unseen_ms: int) -> Call[str]:
    """Forget a schedule that nobody declared for so long: ok, or seen."""
    return new_call("drop_schedule", keys.base, (keys.schedules,), (name, unseen_ms), expect("ok", "seen"))


def fire_schedule(keys: QueueKeys, name: str, nominal: int, *, run_at: int, overlap: str, task: bytes) -> Call[str]:
    """Enqueue one firing: ok, skipped, busy (try again) or fired (a later one was judged before)."""
    args = (name, nominal, run_at, overlap, FIRED_EXPIRE_S, task)
    read = expect("ok", "skipped", "busy", "fired")
    return new_call("fire_schedule", keys.base, (keys.base, keys.fired), args, read, size=len(task))
