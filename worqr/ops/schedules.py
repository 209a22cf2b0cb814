"""The schedules of the mesh: declare, list, tick, pause, override and drop them (registry), and fire them (a queue)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from worqr.command import Argument, Command, Reply, expect, new_call, pairs, status_word, text, texts
from worqr.errors import WorqrBug
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops.registry import NO_DEPLOY
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
_FIRED: Final = frozenset({"ok", "skipped", "busy", "fired", "again", "gone", "stale", "broken"})
SCHEDULES_BYTES: Final = 1024 * 1024
"""Bytes of definitions that one script declares at most."""
SCHEDULES_PER_PAGE: Final = 1000
"""Stored schedules that one script lists at most."""
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
        as_stored: `last`, `pending` and `version` as stored. A tick compares them to detect a change by another process.
        override: other times, as an operator's process encoded them; None if there are none.
        overridden_at: when the override was stored; 0 without one.
        version, home: of a stored schedule: the number of its call, and the name of the queue or shard that has the call; empty
            for a declared one.
        ran: how many of its firings were enqueued, if it counts them.
        ended: when it was found that it fires no more; None: it goes on.
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
    version: str = ""
    home: str = ""
    ran: int = 0
    ended: int | None = None


class Schedules(msgspec.Struct, frozen=True):
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


class Tick(msgspec.Struct, frozen=True):
    """The progress of a schedule: the stored values that the leader read, and the new ones.

    Attributes:
        check_at: when a leader checks it next, in ms by the server's clock; 0: it has ended.
        next, fired: None: unchanged.
        ran: how many more of its firings were enqueued; None: they are not counted.
    """

    stored: ScheduleRow
    last: int
    next: int | None
    check_at: int
    pending: Sequence[int] = ()
    fired: int | None = None
    ran: int | None = None


class DueSchedules(msgspec.Struct, frozen=True):
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


def declare_schedules(
    keys: RegistryKeys, definitions: Sequence[tuple[str, bytes]], *, replace: bool, owner: str = NO_DEPLOY
) -> Command[list[str]]:
    """Store (name, definition) of up to a page of schedules, or with replace=False only those that are not there.

    `owner` is the deploy of the worker, and its application. The reply has the names of those that a program has stored at run
    time, which stay as they are.
    """
    args: list[Argument] = [int(replace), SCHEDULES_EXPIRE_S, owner]
    for name, definition in definitions:
        args += (name, definition)
    size = sum(len(definition) for _, definition in definitions)
    return new_call("declare_schedules", keys.base, tuple(args), _read_names, numbered=True, size=size)


def _read_names(reply: Reply) -> list[str]:
    status_word(reply)
    return texts(reply[1:])


def renew_schedules(keys: RegistryKeys, names: Sequence[str], owner: str = NO_DEPLOY) -> Command[list[str]]:
    """Note that up to a page of schedules are still declared; return the names of those that are not stored."""

    def read(reply: Reply) -> list[str]:
        status_word(reply)
        return texts(reply[1:])

    return new_call("renew_schedules", keys.base, (SCHEDULES_EXPIRE_S, owner, *names), read)


def list_schedules(keys: RegistryKeys, cursor: str = "0") -> Command[Schedules]:
    """Return one page of all schedules, and the server's time."""

    def read(reply: Reply) -> Schedules:
        status_word(reply)
        found: dict[str, dict[str, bytes]] = {}
        for key, value in pairs(reply[3]):
            what, _, name = exact(key).partition(" ")
            found.setdefault(name, {})[what] = value
        return Schedules(int(reply[1]), found, text(reply[2]))

    return new_call("list_schedules", keys.base, (cursor, _FACTS), read)


def _row(name: str, facts: dict[str, bytes]) -> ScheduleRow:
    overridden_at, has_override, override = facts.get("over", b"").partition(b" ")
    version, _, home = exact(facts.get("ver", b"")).partition(" ")
    stands = [facts.get("last", b""), facts.get("owed", b""), *([facts["ver"]] if "ver" in facts else [])]
    return ScheduleRow(
        name=name,
        definition=facts["def"],
        last=_time(facts.get("last")) or 0,
        next=_time(facts.get("next")),
        fired=_time(facts.get("fired")),
        pending=_pending(facts.get("owed", b"")),
        paused="paused" in facts,
        as_stored=b"\n".join(stands),
        override=override if has_override else None,
        overridden_at=_time(overridden_at) or 0,
        version=version,
        home=home,
        ran=whole(facts.get("ran"), 0),
        ended=_time(facts.get("ended")),
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
        following, fired, ran = ("" if each is None else each for each in (tick.next, tick.fired, tick.ran))
        progress = f"{tick.last} {following} {tick.check_at} {fired} {ran} {' '.join(map(str, tick.pending))}"
        args += (tick.stored.name, tick.stored.as_stored, progress)
    return new_call("tick_schedules", keys.base, tuple(args), _read_due)


def _read_due(reply: Reply) -> DueSchedules:
    if expect("ok", "back")(reply) == "back":
        return DueSchedules(0, 0, None, 0, [], clock_set_back=True)
    rows = [_due_row(*facts) for facts in reply[5:]]
    return DueSchedules(int(reply[1]), whole(reply[2], 0), _time(reply[3]), int(reply[4]), rows)


_ROW: Final = ("def", "last", "next", "fired", "owed", "over", "ver", "ran", "ended", "paused")


def _due_row(*values: bytes | None) -> ScheduleRow:
    """Decode a row of facts that ends with the schedule's name. Rows of due schedules leave out the pause, which none has."""
    *facts, name = values
    if name is None:
        raise WorqrBug("the server returned a schedule without a name")
    return _row(exact(name), {what: value for what, value in zip(_ROW, facts, strict=False) if value is not None})


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


def drop_schedules(keys: RegistryKeys, unseen_ms: int, limit: int = 100) -> Command[list[tuple[str, bytes]]]:
    """Drop schedules that no worker declared while the mesh had a leader for `unseen_ms`.

    The reply has the names and definitions of up to `limit`.
    """

    def read(reply: Reply) -> list[tuple[str, bytes]]:
        status_word(reply)
        return [(exact(name), definition) for name, definition in pairs(reply[1:])]

    return new_call("drop_schedules", keys.base, (unseen_ms, limit), read)


def drop_outdated_schedules(
    keys: RegistryKeys, start: int = 0, limit: int = SCHEDULES_AT_ONCE
) -> Command[tuple[int, list[tuple[str, bytes]]]]:
    """Drop declared schedules of deploys that are older than all that run, of one page.

    The reply is where the next page begins (-1: there is none), and the names and definitions.
    """

    def read(reply: Reply) -> tuple[int, list[tuple[str, bytes]]]:
        status_word(reply)
        return int(reply[1]), [(exact(name), definition) for name, definition in pairs(reply[2:])]

    return new_call("drop_outdated_schedules", keys.base, (start, limit), read)


class Firing(msgspec.Struct, frozen=True):
    """One firing of a schedule; times in ms.

    Attributes:
        meta: of the job, as JSON; empty: none.
        version: of a stored schedule, whose call is in the queue; empty: `task` is the call.
        workflow: the job is one of a workflow.
        lifetime_ms: of a workflow; 0: there is none.
        options: other options of the job, as ``dispatch_jobs`` takes them.
    """

    name: str
    nominal: int
    run_at: int
    overlap: str
    task: bytes
    meta: str = ""
    version: str = ""
    workflow: bool = False
    lifetime_ms: int = 0
    options: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


def fire_schedules(keys: QueueKeys, firings: Sequence[Firing], *, judged_at: int) -> Command[list[str]]:
    """Enqueue up to `FIRINGS_AT_ONCE` firings of schedules of one queue. Those of one schedule come oldest first.

    The reply has a word for each: ok, skipped, busy (try again), fired (a later firing was decided before) or again (this firing
    was enqueued before, with another meta). Of a stored schedule also gone, stale (it was stored again) or broken.
    """
    args: list[Argument] = [judged_at, FIRED_EXPIRE_S]
    for each in firings:
        options = {"name": each.name, "nominal": each.nominal, "run_at": each.run_at, "overlap": each.overlap}
        lifetime = str(each.lifetime_ms or "")
        more = {"meta": each.meta, "version": each.version, "workflow": each.workflow, "lifetime": lifetime}
        more = {name: value for name, value in (more | {"options": each.options}).items() if value}
        args += (msgspec.msgpack.encode(options | more), each.task)

    def read(reply: Reply) -> list[str]:
        words = texts(reply)
        if len(words) != len(firings) or not _FIRED.issuperset(words):
            raise WorqrBug(f"the server answered {words!r} to {len(firings)} firings")
        return words

    return new_call("fire_schedules", keys.base, tuple(args), read, size=sum(len(each.task) for each in firings))


# Stored schedules


def store_schedule(keys: QueueKeys, name: str, definition: bytes) -> Command[tuple[str, str]]:
    """Store the call of a schedule in its queue; return created, updated or unchanged, and its number."""

    def read(reply: Reply) -> tuple[str, str]:
        return status_word(reply), text(reply[1])

    return new_call("store_schedule", keys.base, (name, definition), read, numbered=True, size=len(definition))


def unstore_schedule(keys: QueueKeys, name: str, version: str = "", *, undo: bool = False) -> Command[str]:
    """Delete the call of a schedule from its queue, or only that with this number: ok, gone or stale (it has another number).

    Its firings and its last outcome go too; not with `undo`: the name is that of another schedule.
    """
    args = (name, version, int(undo))
    return new_call("unstore_schedule", keys.base, args, expect("ok", "gone", "stale"), numbered=True)


def read_schedules(keys: QueueKeys, names: Sequence[str]) -> Command[list[tuple[str, bytes] | None]]:
    """Return the calls of schedules of a queue, each with its number; None: it is not stored."""

    def read(reply: Reply) -> list[tuple[str, bytes] | None]:
        status_word(reply)
        found = [bytes(each).partition(b" ") for each in reply[1:]]
        return [(exact(number), definition) if number else None for number, _, definition in found]

    return new_call("read_schedules", keys.base, tuple(names), read)


def read_outcomes(keys: QueueKeys, names: Sequence[str]) -> Command[list[tuple[bytes, int | None]]]:
    """Return how the last runs of schedules of a queue ended, as `worqr.cron.outcome_of` reads it; empty: it is not known.

    Each comes with the time in ms since which its job has waited for over a day, if no worker serves the queue; else None.
    """

    def read(reply: Reply) -> list[tuple[bytes, int | None]]:
        status_word(reply)
        return [(bytes(stored), _time(since)) for stored, since in pairs(reply[1:])]

    return new_call("read_outcomes", keys.base, tuple(names), read)


def index_schedule(
    keys: RegistryKeys, name: str, home: QueueKeys, version: str, definition: bytes, *, times: str, force: str = ""
) -> Command[tuple[str, str, str]]:
    """Store the times of a schedule whose call is stored at `home`.

    Args:
        keys: of the registry.
        name: of the schedule.
        home: of its call.
        version: of its call.
        definition: encoded, without the payload.
        times: a change of this text makes firings count from now on.
        force: replace, adopt, or empty.

    The reply is ok, conflict or declared, the home of the schedule that it replaced or conflicts with, and the number of the call
    that it replaced.
    """

    def read(reply: Reply) -> tuple[str, str, str]:
        word, home, replaced = status_word(reply), *map(exact, [*reply[1:], "", ""][:2])
        return word, home, replaced

    args = (name, home.name, version, definition, times, force)
    return new_call("index_schedule", keys.base, args, read, numbered=True, size=len(definition))


def unindex_schedule(keys: RegistryKeys, row: ScheduleRow) -> Command[str]:
    """Delete the times of a stored schedule, unless it was stored again: ok, stale or gone."""
    args = (row.name, row.version, row.home, SCHEDULES_EXPIRE_S)
    return new_call("unindex_schedule", keys.base, args, expect("ok", "stale", "gone"))


def page_schedules(
    keys: RegistryKeys, prefix: str, after: str = "", limit: int = SCHEDULES_PER_PAGE
) -> Command[tuple[list[ScheduleRow], int]]:
    """Return up to `limit` stored schedules whose names begin with `prefix`, and the server's time."""

    def read(reply: Reply) -> tuple[list[ScheduleRow], int]:
        status_word(reply)
        return [_due_row(*facts) for facts in reply[2:] if facts[0] is not None], int(reply[1])

    return new_call("page_schedules", keys.base, (prefix, after, limit), read)


def lease_prefix(keys: RegistryKeys, prefix: str, holder: str, lease_ms: int) -> Command[bool]:
    """Take or renew the lease of a prefix, or give it back for 0 ms; return False if another program holds it."""

    def read(reply: Reply) -> bool:
        return expect("ok", "held")(reply) == "ok"

    return new_call("lease_prefix", keys.base, (prefix, holder, lease_ms, SCHEDULES_EXPIRE_S), read)


class Survey(msgspec.Struct, frozen=True):
    """Reply of survey_schedules: the server's time, how many schedules are declared, stored and overdue, and rows."""

    now: int
    declared: int
    stored: int
    overdue: int
    rows: list[ScheduleRow]


def survey_schedules(
    keys: RegistryKeys, names: Sequence[str] = (), *, limit: int = SCHEDULES_PER_PAGE, late_ms: int = 0
) -> Command[Survey]:
    """Return those of up to a page of names that are schedules; without names, up to `limit` declared ones."""

    def read(reply: Reply) -> Survey:
        status_word(reply)
        now, declared, stored, overdue = (int(each) for each in reply[1:5])
        return Survey(now, declared, stored, overdue, [_due_row(*facts) for facts in reply[5:]])

    return new_call("survey_schedules", keys.base, (limit, late_ms, *names), read)
