"""The schedules of the mesh: declare, list, tick, pause, override and drop them (registry), and fire them (a queue)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from worqr.command import Argument, Command
from worqr.errors import WorqrBug
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops.replies import Reply, expect, expect_ok, new_call, pairs, status_word, text, texts
from worqr.stored_values import TIME_DIGITS, exact, whole

SCHEDULES_EXPIRE_S: Final = 30 * 24 * 3600
MAX_PENDING: Final = 100
"""Firings of one schedule that wait for the end of the one before, at most. The oldest are dropped."""
FIRED_EXPIRE_S: Final = 7 * 24 * 3600
"""How long a queue stores the last firings. A leader that repeats firings does so after seconds, not days."""
SCHEDULES_AT_ONCE: Final = 250
"""Schedules that one script declares, renews, ticks or drops at most, so that it takes a few milliseconds."""
FIRINGS_AT_ONCE: Final = 500
"""Firings that one script enqueues at most."""
_FIRED: Final = frozenset({"ok", "skipped", "busy", "fired", "again"})
SCHEDULES_BYTES: Final = 1024 * 1024
"""Bytes of definitions that one script declares at most."""
DUE_AT_ONCE: Final = 10_000
"""Names of due schedules that one script lists at most."""
_FACTS: Final = 2000
"""Facts about schedules that one script lists, approximately. A schedule has four or five."""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule as it is stored in the registry; times are nominal ones, in ms by the server's clock.

    Attributes:
        definition: as its declaring worker encoded it.
        last: the time up to which the leader has decided about all firings.
        next, fired: the next firing, and the last that was enqueued; None if not noted yet.
        pending: firings that are still to be enqueued, oldest first.
        as_stored: `last` and `pending` as stored. A tick compares them to detect a change by another process.
        override: other times, as an operator's process encoded them; None if there are none.
        overridden_at: when the override was stored; 0 without one.
    """

    name: str
    definition: bytes
    last: int
    next: int | None
    fired: int | None
    pending: tuple[int, ...]
    paused: bool
    as_stored: bytes
    override: bytes | None = None
    overridden_at: int = 0


@dataclass(frozen=True, slots=True)
class Schedules:
    """Reply of list_schedules: the server's time, a page of facts by schedule, and the cursor of the next page ("0": none)."""

    now: int
    facts: dict[str, dict[str, bytes]]
    cursor: str

    @property
    def rows(self) -> list[ScheduleRow]:
        """The schedules, by name. Only correct if this is the only page."""
        return self.join([self])

    @staticmethod
    def join(pages: Iterable[Schedules]) -> list[ScheduleRow]:
        """Return the schedules of all pages, by name."""
        found: dict[str, dict[str, bytes]] = {}
        for page in pages:
            for name, facts in page.facts.items():
                found.setdefault(name, {}).update(facts)
        return [_row(name, found[name]) for name in sorted(found) if "def" in found[name]]


@dataclass(frozen=True, slots=True)
class Tick:
    """The progress of a schedule: the stored values that the leader read, and the new ones.

    Attributes:
        check_at: when a leader checks it next, in ms by the server's clock.
        next, fired: None: unchanged.
    """

    stored: ScheduleRow
    last: int
    next: int | None
    check_at: int
    pending: Sequence[int] = ()
    fired: int | None = None


@dataclass(frozen=True, slots=True)
class DueSchedules:
    """Reply of tick_schedules.

    Attributes:
        now: the server's time.
        led: for how many ms the mesh had a leader.
        next: when the next schedule is due; None: there is none that is not due already.
        due: how many schedules are due now.
        rows: the schedules that a leader checks now.
        clock_set_back: the server's clock was set back, and nothing was stored.
    """

    now: int
    led: int
    next: int | None
    due: int
    rows: list[ScheduleRow]
    clock_set_back: bool = False


def declare_schedules(keys: RegistryKeys, definitions: Sequence[tuple[str, bytes]], *, replace: bool) -> Command[str]:
    """Store (name, definition) of up to a page of schedules, or with replace=False only those that are not stored."""
    args: list[Argument] = [int(replace), SCHEDULES_EXPIRE_S]
    for name, definition in definitions:
        args += (name, definition)
    size = sum(len(definition) for _, definition in definitions)
    return new_call("declare_schedules", keys.base, tuple(args), expect_ok, numbered=True, size=size)


def renew_schedules(keys: RegistryKeys, names: Sequence[str]) -> Command[list[str]]:
    """Note that up to a page of schedules are still declared; return the names of those that are not stored."""

    def read(reply: Reply) -> list[str]:
        status_word(reply)
        return texts(reply[1:])

    return new_call("renew_schedules", keys.base, (SCHEDULES_EXPIRE_S, *names), read)


def list_schedules(keys: RegistryKeys, cursor: str = "0") -> Command[Schedules]:
    """Return one page of all schedules, and the server's time."""

    def read(reply: Reply) -> Schedules:
        status_word(reply)
        found: dict[str, dict[str, bytes]] = {}
        for field, value in pairs(reply[3]):
            what, _, name = exact(field).partition(" ")
            found.setdefault(name, {})[what] = value
        return Schedules(int(reply[1]), found, text(reply[2]))

    return new_call("list_schedules", keys.base, (cursor, _FACTS), read)


def _row(name: str, facts: dict[str, bytes]) -> ScheduleRow:
    overridden_at, has_override, override = facts.get("over", b"").partition(b" ")
    return ScheduleRow(
        name=name,
        definition=facts["def"],
        last=_time(facts.get("last")) or 0,
        next=_time(facts.get("next")),
        fired=_time(facts.get("fired")),
        pending=_pending(facts.get("owed", b"")),
        paused="paused" in facts,
        as_stored=facts.get("last", b"") + b"\n" + facts.get("owed", b""),
        override=override if has_override else None,
        overridden_at=_time(overridden_at) or 0,
    )


def _pending(owed: bytes) -> tuple[int, ...]:
    """Decode the times of firings that are owed: the last `MAX_PENDING` of them, because no leader stores more."""
    times = owed[-MAX_PENDING * (TIME_DIGITS + 1) :].split()[-MAX_PENDING:]
    return tuple(found for nominal in times if (found := _time(nominal)) is not None)


def _time(value: bytes | None) -> int | None:
    """Decode a time. An invalid value counts as missing, so that it does not keep the other schedules from being read."""
    return whole(value, digits=TIME_DIGITS)


def list_due_schedules(keys: RegistryKeys, skip: int) -> Command[list[str]]:
    """Return the names of up to `DUE_AT_ONCE` schedules that are due, after the first `skip` of them."""

    def read(reply: Reply) -> list[str]:
        status_word(reply)
        return texts(reply[1:])

    return new_call("list_due_schedules", keys.base, (skip, DUE_AT_ONCE), read)


def tick_schedules(
    keys: RegistryKeys, ticks: Sequence[Tick] = (), names: Sequence[str] = (), *, was_led: int = 0, led: int = 0
) -> Command[DueSchedules]:
    """Store the progress of schedules, unless another process changed them; return the page that is due.

    Of `names`, up to a page, those that are due are returned; without names, those that are due first.
    """
    args: list[Argument] = [SCHEDULES_AT_ONCE, was_led, led, msgspec.msgpack.encode(names) if names else b""]
    for tick in ticks:
        following, fired = ("" if ms is None else ms for ms in (tick.next, tick.fired))
        progress = f"{tick.last} {following} {tick.check_at} {fired} {' '.join(map(str, tick.pending))}"
        args += (tick.stored.name, tick.stored.as_stored, progress)
    return new_call("tick_schedules", keys.base, tuple(args), _read_due)


def _read_due(reply: Reply) -> DueSchedules:
    if expect("ok", "back")(reply) == "back":
        return DueSchedules(0, 0, None, 0, [], clock_set_back=True)
    rows = [_due_row(*facts) for facts in reply[5:]]
    return DueSchedules(int(reply[1]), whole(reply[2], 0), _time(reply[3]), int(reply[4]), rows)


def _due_row(
    definition: bytes,
    last: bytes | None,
    following: bytes | None,
    fired: bytes | None,
    owed: bytes | None,
    override: bytes | None,
    name: bytes,
) -> ScheduleRow:
    facts = {"def": definition, "last": last, "next": following, "fired": fired, "owed": owed, "over": override}
    return _row(exact(name), {what: value for what, value in facts.items() if value is not None})


def rewind_schedules(keys: RegistryKeys, cursor: str = "0") -> Command[tuple[str, int]]:
    """Move schedules back after the clock was set back; return the next cursor ("0": done), and how many were in the future."""

    def read(reply: Reply) -> tuple[str, int]:
        status_word(reply)
        return text(reply[1]), int(reply[2])

    return new_call("rewind_schedules", keys.base, (cursor, SCHEDULES_AT_ONCE), read)


def pause_schedule(keys: RegistryKeys, name: str, *, paused: bool) -> Command[bool]:
    """Pause or resume a schedule; return False if no schedule has this name."""

    def read(reply: Reply) -> bool:
        return status_word(reply) != "unknown"

    args = (name, int(paused))
    return new_call("pause_schedule", keys.base, args, read, numbered=True)


def override_schedule(keys: RegistryKeys, name: str, override: bytes) -> Command[str]:
    """Store other times of a schedule, or none if `override` is empty: ok, same (nothing was changed) or unknown."""

    def read(reply: Reply) -> str:
        return status_word(reply)

    return new_call("override_schedule", keys.base, (name, override), read, numbered=True)


def drop_schedules(keys: RegistryKeys, unseen_ms: int, limit: int = 100) -> Command[list[str]]:
    """Drop schedules that no worker declared while the mesh had a leader for `unseen_ms`; return up to `limit` names."""

    def read(reply: Reply) -> list[str]:
        status_word(reply)
        return texts(reply[1:])

    return new_call("drop_schedules", keys.base, (unseen_ms, limit), read)


@dataclass(frozen=True, slots=True)
class Firing:
    """One firing of a schedule; times in ms.

    Attributes:
        meta: of the job, as JSON; empty: none.
    """

    name: str
    nominal: int
    run_at: int
    overlap: str
    task: bytes
    meta: str = ""


def fire_schedules(keys: QueueKeys, firings: Sequence[Firing], *, judged_at: int) -> Command[list[str]]:
    """Enqueue up to `FIRINGS_AT_ONCE` firings of schedules of one queue. Those of one schedule come oldest first.

    The reply has a word for each: ok, skipped, busy (try again), fired (a later firing was decided before) or again (this firing
    was enqueued before, with another meta).
    """
    args: list[Argument] = [judged_at, FIRED_EXPIRE_S]
    for each in firings:
        options = {"name": each.name, "nominal": each.nominal, "run_at": each.run_at, "overlap": each.overlap}
        args += (msgspec.msgpack.encode(options | ({"meta": each.meta} if each.meta else {})), each.task)

    def read(reply: Reply) -> list[str]:
        words = texts(reply)
        if len(words) != len(firings) or not _FIRED.issuperset(words):
            raise WorqrBug(f"the server answered {words!r} to {len(firings)} firings")
        return words

    return new_call("fire_schedules", keys.base, tuple(args), read, size=sum(len(each.task) for each in firings))
