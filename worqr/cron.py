"""Schedules: when a firing is due, and what happens to firings that were missed or overlap.

No I/O and no clock. A `Definition` is a schedule as stored in the registry; a `Trigger` computes its firings. A
firing is its nominal time: whole milliseconds since the epoch, the same for every peer. `worqr.functions.registry`
declares the schedules of an application, `worqr.peer.leader.schedule_ticker` fires them.

A cron expression means local time of its zone. If a local time does not exist (clocks go forward), the next existing time fires
instead, once for all of the skipped times. A local time that exists twice fires the first time. Only an expression for every
hour of the day follows real time, as in Debian's cron: it fires in both of the hours that the clock shows twice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, lru_cache
from typing import Annotated, Any, Final, Literal, Protocol, cast

import msgspec
from msgspec.structs import replace

from worqr.errors import UsageError, did_you_mean
from worqr.keys import check_name
from worqr.stored_values import TIME_DIGITS, whole
from worqr.validation import EPOCH, LATEST_MS, LONGEST, check_count, seconds

ON_TIME_MS: Final = 10_000
"""A firing this late is still on time: a change of the leader takes less. Older ones were missed."""
AHEAD_MS: Final = 60_000
"""A cursor this far ahead of the server's clock waits for it. A cursor further ahead is from a wrong clock, and counts as now."""

MAX_NEXT_RUNS: Final = 100
"""Times that `Schedule.next_runs` returns at most."""

MIN_PERIOD: Final = 0.1
"""Seconds. For shorter periods, use a loop in a handler."""
MAX_CATCH_UP: Final = 100
"""Missed firings that are caught up at most."""
MAX_TASK: Final = 64 * 1024
"""Bytes of a schedule's payload: the leader reads all schedules every few seconds."""
LONGEST_EXPRESSION: Final = 500
"""Characters of a cron expression."""
LONGEST_ZONE: Final = 100
"""Characters of the name of a time zone. The longest in the IANA database has 38."""
MAX_TIMES: Final = 10**9
"""Firings that a schedule counts at most."""
_ZONE_NAME: Final = re.compile(r"\w[\w+-]*(?:/\w[\w+-]*){0,4}", re.ASCII)
_LONGEST_MS: Final = round(LONGEST * 1000)

_MINUTE: Final = timedelta(minutes=1)
_EVERY_HOUR: Final = set(range(24))
_FIRST_WINDOW_MS: Final = 3_600_000

Overlap = Literal["skip", "queue", "cancel"]


class Definition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One schedule as stored in the registry.

    Unknown fields are refused rather than ignored: an older leader must not tick a schedule that it knows only in part.
    Defaults are left out, so that a version that adds a field does not change the definitions of the one before.

    Attributes:
        cron: the expression, or empty; then `every_ms` is the period.
        misfire: how many missed firings are caught up.
        phase_ms: of a period: it fires at its multiples and this later.
        until_ms: the last nominal time; 0: there is none.
        times: how many firings are enqueued; 0: any number.
        by: the program or person that stored it at run time.
        workflow: its jobs are those of a workflow.
        lifetime_ms: of a workflow; 0: there is none.
        options: other options of its jobs, as `worqr.job_options` encodes them. Those of a stored schedule are with its call.
    """

    name: str
    queue: str
    task: bytes
    cron: Annotated[str, msgspec.Meta(max_length=LONGEST_EXPRESSION)] = ""
    every_ms: Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_MS)] = 0
    timezone: Annotated[str, msgspec.Meta(max_length=LONGEST_ZONE)] = "UTC"
    misfire: Annotated[int, msgspec.Meta(ge=0, le=MAX_CATCH_UP)] = 1
    overlap: Overlap = "skip"
    jitter_ms: Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_MS)] = 0
    phase_ms: Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_MS)] = 0
    until_ms: Annotated[int, msgspec.Meta(ge=0, le=LATEST_MS)] = 0
    times: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMES)] = 0
    by: str = ""
    workflow: bool = False
    lifetime_ms: Annotated[int, msgspec.Meta(ge=0, le=LATEST_MS)] = 0
    options: dict[str, Any] = {}

    @property
    def job(self) -> str:
        """The id of the job that each of its firings is; `fire_schedules` builds the same id."""
        return f"cron:{self.name}"

    def encode(self) -> bytes:
        """Encode it for the registry: equal definitions are equal bytes."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(blob: bytes) -> Definition:
        """Decode the output of `encode`.

        Raises:
            UsageError: it has fields of another version, or values that the API refuses: any program may have written it.
        """
        try:
            found = msgspec.json.decode(blob, type=Definition)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"this version of worqr cannot read the definition: {error}") from None
        check_name(found.name, "schedule name")
        check_name(found.queue)
        if 0 < found.every_ms < MIN_PERIOD * 1000:
            raise UsageError(
                f"the period of schedule {found.name!r} is {found.every_ms} ms, less than {MIN_PERIOD:g} s"
            )
        if len(found.task) > MAX_TASK:
            raise UsageError(
                f"the payload of schedule {found.name!r} has {len(found.task):,} bytes, more than {MAX_TASK:,}"
            )
        return found


class Override(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Other times of a schedule, as an operator stored them in the registry. Unknown fields are refused, as in `Definition`.

    Attributes:
        timezone: empty: that of the definition.
        by: the program or person that stored it.
    """

    cron: Annotated[str, msgspec.Meta(max_length=LONGEST_EXPRESSION)]
    timezone: Annotated[str, msgspec.Meta(max_length=LONGEST_ZONE)] = ""
    by: str = ""

    def encode(self) -> bytes:
        """Encode it for the registry: equal overrides are equal bytes."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(blob: bytes) -> Override:
        """Decode the output of `encode`. Raises UsageError for fields of another version."""
        try:
            return msgspec.json.decode(blob, type=Override)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"this version of worqr cannot read the override: {error}") from None


def effective(name: str, definition: bytes, override: bytes | None) -> Definition:
    """Decode the definition of a schedule, with the times of its override.

    Raises:
        UsageError: one of both cannot be read, or it is the definition of another schedule.
    """
    declared = Definition.decode(definition)
    if declared.name != name:
        raise UsageError(f"its definition is that of the schedule {declared.name!r}")
    if override is None:
        return declared
    other = Override.decode(override)
    return replace(declared, cron=other.cron, every_ms=0, timezone=other.timezone or declared.timezone)


@dataclass(frozen=True, slots=True)
class ScheduleOverride:
    """Other times of a schedule than those of its code. See ``Schedule.override``."""

    cron: str
    """The cron expression."""
    timezone: str
    """The time zone; empty: that of the code."""
    by: str
    """The program or person that overrode the schedule: the `app` of a mesh, or a user."""
    at: datetime
    """The time at which it was overridden, by the server's clock."""


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """How the last run of a schedule ended for good. See ``Schedule.last_outcome``."""

    outcome: Literal["finished", "failed", "cancelled"]
    """``finished``: its handler returned. ``failed``: it moved to the dead-letter queue. ``cancelled``: it was cancelled."""
    ended: datetime
    """The time of the end, by the server's clock."""
    seconds: float | None
    """How long its last run took; None if it was cancelled before it ran."""
    scheduled_for: datetime | None
    """The time for which it was scheduled; None if it was run by hand."""
    error_type: str
    """The type of the exception, or ``Timeout``, ``Stalled`` or ``Expired``; empty if it did not fail."""
    error: str
    """The message of the exception, or the reason of the cancellation: at most 500 bytes."""


_OUTCOMES: Final = ("finished", "failed", "cancelled")


def outcome_of(stored: bytes) -> ScheduleOutcome | None:
    """Return the outcome that a queue has stored; None if it cannot be read, because any program may have written it."""
    first, _, rest = stored.partition(b"\n")
    words = first.split(b" ")
    ended = whole(words[1], digits=TIME_DIGITS) if len(words) == 4 else None
    outcome = words[0].decode("latin-1")
    if ended is None or outcome not in _OUTCOMES:
        return None
    ran, nominal = whole(words[2]), whole(words[3], 0, digits=TIME_DIGITS)
    error_type, _, error = (part.decode("utf-8", "replace") for part in rest.partition(b"\n"))
    return ScheduleOutcome(
        cast("Any", outcome),
        at(ended),
        None if ran is None else ran / 1000,
        at(nominal) if nominal else None,
        error_type,
        error,
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of the mesh. See ``mesh.schedules()``."""

    name: str
    """The schedule's name."""
    next_run: datetime
    """The time of the next firing. It is in the past while no worker is there to fire it."""
    last_run: datetime | None
    """The time of the last firing that was enqueued; None if there was none."""
    paused: bool
    """True while the schedule is paused."""
    queue: str = ""
    """The queue of its job, which is the function's name."""
    cron: str = ""
    """The cron expression that applies; empty if the schedule has a period."""
    every: float | None = None
    """The period in seconds; None if the schedule has a cron expression."""
    timezone: str = "UTC"
    """The time zone of the expression."""
    pending: int = 0
    """Firings that wait for the end of the previous run, with ``overlap="queue"``."""
    override: ScheduleOverride | None = None
    """Set by ``mesh.override_schedule()``; None if the times are those of the code."""
    problem: str = ""
    """Why the schedule may not fire at these times; empty if nothing is known to be wrong."""
    stored: bool = False
    """True if a program stored it at run time with ``mesh.schedule()``; False if workers declare it."""
    by: str = ""
    """The program or person that stored it; empty for a declared schedule."""
    until: datetime | None = None
    """The last time at which it may fire; None if there is none."""
    times: int | None = None
    """How many firings are enqueued in all; None: any number."""
    runs: int = 0
    """How many firings of a schedule with `times` were enqueued."""
    ended: bool = False
    """True if it fires no more, because of `until` or `times`. It is deleted a week later."""
    phase: float = 0.0
    """Seconds after the multiples of `every` at which a stored schedule fires."""
    last_outcome: ScheduleOutcome | None = None
    """How its last run ended, also one by hand; None if none has ended yet, or it is not known."""

    def next_runs(self, count: int = 5) -> list[datetime]:
        """Return the next times, beginning with `next_run`, of an expression that your version of worqr can read.

        Args:
            count: How many times, 1 to 100. There are fewer if the schedule ends before.

        Raises:
            UsageError: `count` is not valid, or the extra ``cron`` is missing.
        """
        if not 1 <= check_count(count, "count") <= MAX_NEXT_RUNS:
            raise UsageError(f"count must be at most {MAX_NEXT_RUNS}, not {count}")
        found = [self.next_run]
        if self.cron or self.every:
            every_ms, left = round((self.every or 0) * 1000), count if self.times is None else self.times - self.runs
            trigger = Trigger(replace(_times(self.cron, every_ms, self.timezone), phase_ms=round(self.phase * 1000)))
            while len(found) < min(count, left):
                found.append(at(trigger.next_after(ms_of(found[-1]))))
        return [] if self.ended else [each for each in found if self.until is None or each <= self.until]


def _times(cron: str, every_ms: int = 0, timezone: str = "UTC") -> Definition:
    return Definition(name="", queue="", task=b"", cron=cron, every_ms=every_ms, timezone=timezone)


def check_times(cron: str, timezone: str) -> None:
    """Raise UsageError if the expression or the zone is not valid."""
    Trigger(_times(cron, timezone=timezone))


def next_times(cron: str, timezone: str, count: int, after: datetime | None = None) -> list[datetime]:
    """Return the next times of an expression in a zone, in UTC.

    Raises:
        UsageError: the expression, the zone or the number is not valid, or the extra ``cron`` is missing.
    """
    if not 1 <= check_count(count, "count") <= MAX_NEXT_RUNS:
        raise UsageError(f"count must be at most {MAX_NEXT_RUNS}, not {count}")
    trigger, found = Trigger(_times(" ".join(cron.split()), timezone=timezone)), [ms_of(after or datetime.now(UTC))]
    for _ in range(count):
        found.append(trigger.next_after(found[-1]))
    return [at(each) for each in found[1:]]


def at(ms: int) -> datetime:
    """Return milliseconds since the epoch as an aware datetime, exactly. It is bounded as `from_ms` is."""
    return EPOCH + timedelta(milliseconds=min(max(ms, 0), LATEST_MS))


def ms_of(when: datetime) -> int:
    """Return an aware datetime as whole milliseconds since the epoch."""
    return (when - EPOCH) // timedelta(milliseconds=1)


# Times


class Trigger:
    """The firing times of one definition. Set once.

    Raises:
        UsageError: the expression or the zone is wrong, or the extra ``cron`` is missing.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._period, self._phase = definition.every_ms, definition.phase_ms
        self._next = None if self._period else _cron_times(definition.cron, definition.timezone).next_after

    def next_after(self, ms: int) -> int:
        """Return the first firing after that time."""
        if self._next is None:
            return ((ms - self._phase) // self._period + 1) * self._period + self._phase
        return self._next(ms)

    def last_between(self, after: int, until: int, n: int) -> list[int]:
        """Return the last `n` firings later than `after` and not later than `until`, oldest first.

        It searches backwards in growing windows: a schedule of every minute may not have fired for a year.
        """
        if n <= 0 or until <= after:
            return []
        if self._period:
            last = (until - self._phase) // self._period
            first = max((after - self._phase) // self._period + 1, last - n + 1)
            return [number * self._period + self._phase for number in range(first, last + 1)]
        window = _FIRST_WINDOW_MS
        while True:
            start = max(after, until - window)
            found: list[int] = []
            while (start := self.next_after(start)) <= until:
                found.append(start)
            if len(found) >= n or until - window <= after:
                return found[-n:]
            window *= 8


REMEMBERED: Final = 100
"""Times of one expression that are remembered."""


class _CronTimes:
    """The times of a cron expression in a zone. Thousands of schedules may have the same: what was computed is remembered.

    Raises:
        UsageError: the expression or the zone is wrong, or the extra ``cron`` is missing.
    """

    def __init__(self, expression: str, zone: str) -> None:
        self._expression = expression
        self._new_cron = _cron(expression)
        self._zone = _zone(zone)
        self._known: dict[int, int] = {}
        hours = self._new_cron(expression, datetime(2000, 1, 1)).hours
        self._real_time = hours == _EVERY_HOUR and self._zone is not UTC

    def next_after(self, ms: int) -> int:
        """Return the first time after that one."""
        found = self._known.get(ms)
        if found is None:
            now = at(ms)
            first = self._first_local(now)
            if self._real_time:
                first = self._first_repeated(now, first)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[ms] = found = ms_of(first)
        return found

    def _first_local(self, now: datetime) -> datetime:
        """Return the first time after `now` that the expression names in local time."""
        for local in self._new_cron(self._expression, now.astimezone(self._zone).replace(tzinfo=None)):
            if (moment := _moment(local, self._zone)) > now:
                return moment
        raise UsageError(f"cron expression {self._expression!r} never fires")

    def _first_repeated(self, now: datetime, first: datetime) -> datetime:
        """Return the first time between these two at which the clock shows a time of the expression for the second time; else
        `first`.

        cronsim would find it too, but goes round for ever where a clock goes back past a midnight, at another time than that.
        """
        shown, offset = now.astimezone(self._zone), first.astimezone(self._zone).utcoffset() or timedelta()
        start = min(shown.replace(tzinfo=None), (now + offset).replace(tzinfo=None))
        for local in self._new_cron(self._expression, start):
            again = local.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
            if again >= first:
                break
            if again > now and again.astimezone(self._zone).replace(tzinfo=None) == local:
                return again
        return first


_cron_times: Final = lru_cache(maxsize=1000)(_CronTimes)


def _moment(local: datetime, zone: tzinfo) -> datetime:
    """Return the first time at which the clock shows `local`; if it never does, the next local time that exists."""
    while True:
        moment = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
        if moment.astimezone(zone).replace(tzinfo=None) == local:
            return moment
        local = local.replace(second=0) + _MINUTE


class DueFirings(msgspec.Struct, frozen=True):
    """The leader's decision about the time since it last looked.

    Attributes:
        fire: the firings to enqueue, oldest first.
        cursor: the last firing that this decision covers.
        missed: how many firings were not on time, at least; `caught_up` of them are in `fire`.
        next: the first future firing.
    """

    fire: list[int]
    cursor: int
    missed: int
    caught_up: int
    next: int


def due_firings(trigger: Trigger, cursor: int, now: int, waited_ms: int = 0) -> DueFirings:
    """Decide which of the firings later than `cursor` and not later than `now` are enqueued; by the server's clock, in ms.

    A firing was missed if it is older than `ON_TIME_MS` and than `waited_ms`: the time since the leader could have looked for
    it. A leader that is busy with other schedules for a minute has missed nothing.

    A cursor up to `AHEAD_MS` ahead of `now` stays: nothing fires until the clock has caught up, so nothing fires twice. A
    cursor further ahead is set to `now`. The clock was wrong before, or it is now: firings that the clock shows for the second
    time are enqueued for the second time.
    """
    if cursor > now + AHEAD_MS:
        cursor = now
    following = trigger.next_after(cursor)
    on_time = max(cursor, now - ON_TIME_MS - waited_ms)
    caught_up: list[int] = []
    missed: list[int] = []
    if following <= on_time:
        missed = trigger.last_between(cursor, on_time, max(trigger.definition.misfire, 1))
        caught_up = missed[-trigger.definition.misfire :] if trigger.definition.misfire else []
        following = trigger.next_after(on_time)
    due: list[int] = []
    while following <= now:
        due.append(following)
        following = trigger.next_after(following)
    judged = [cursor, *missed, *due][-1]
    return DueFirings([*caught_up, *due], judged, len(missed), len(caught_up), following)


# The options of schedules


OVERLAPS: Final = ("skip", "queue", "cancel")
MISFIRES: Final = {"skip": 0, "once": 1}


def check_overlap(overlap: Any) -> Overlap:
    """Return what is done about overlapping runs. Raises UsageError if there is no such rule."""
    if overlap not in OVERLAPS:
        raise UsageError(f"overlap must be one of {', '.join(map(repr, OVERLAPS))}, not {overlap!r}")
    return overlap  # type: ignore[no-any-return]


def misfire_count(misfire: object) -> int:
    """Return how many missed firings are made up for. Raises UsageError if it is not valid."""
    if isinstance(misfire, str) and misfire in MISFIRES:
        return MISFIRES[misfire]
    if isinstance(misfire, bool) or not isinstance(misfire, int) or not 1 <= misfire <= MAX_CATCH_UP:
        raise UsageError(f"misfire must be 'skip', 'once' or a number from 1 to {MAX_CATCH_UP}, not {misfire!r}")
    return misfire


def period_ms(period: object) -> int:
    """Return the period of ``every`` in ms. Raises UsageError if it is not valid."""
    found = round(seconds(period, "period", positive=True) * 1000)
    if found < MIN_PERIOD * 1000:
        raise UsageError(f"period must be at least {MIN_PERIOD:g} s, not {period!r}")
    return found


def jitter_ms(definition: Definition, nominal: int) -> int:
    """Return the delay of this firing: random, but the same in every process."""
    if not definition.jitter_ms:
        return 0
    digest = hashlib.sha256(f"{definition.name}\0{nominal}".encode()).digest()
    return int.from_bytes(digest[:8]) % (definition.jitter_ms + 1)


def zone_name(zone: object) -> str:
    """Return the name of a zone, by which each peer finds it. Raises UsageError if it has none."""
    if zone is UTC:
        return "UTC"
    name = zone if isinstance(zone, str) else getattr(zone, "key", None)
    if not isinstance(name, str):
        raise UsageError(
            f"timezone must be an IANA name as 'Europe/Berlin' or a zoneinfo.ZoneInfo of that name, not {zone!r}: "
            "other peers have to find it by its name"
        )
    return name


# cronsim, from the extra ``cron``


class _Cron(Protocol):
    """The part of cronsim that worqr uses."""

    hours: set[int]

    def __iter__(self) -> Iterator[datetime]: ...


def _cron(expression: str) -> Callable[[str, datetime], _Cron]:
    """Return cronsim's iterator over times, which accepts `expression`."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise UsageError("cron expressions need cronsim: run `pip install 'worqr[cron]'`") from None
    if len(expression) > LONGEST_EXPRESSION:
        raise UsageError(
            f"a cron expression has at most {LONGEST_EXPRESSION} characters, this one has {len(expression):,}"
        )
    words = expression.split()
    if len(words) != 5:
        raise UsageError(f"cron expression {expression!r} must have five fields ({_FIELDS}){_five_fields(words)}")
    try:
        if next(CronSim(expression, datetime(2000, 1, 1)), None) is None:
            raise UsageError(f"cron expression {expression!r} never fires: no date matches")
    except CronSimError as error:
        bounds = "".join(f", because {text}" for field, text in _BOUNDS.items() if str(error) == f"Bad {field}")
        raise UsageError(f"cron expression {expression!r} is wrong: {error}{bounds}") from None
    return cast("Callable[[str, datetime], _Cron]", CronSim)


_FIELDS: Final = "minute, hour, day of month, month, day of week"
_BOUNDS: Final = {
    "minute": "minutes are 0 to 59",
    "hour": "hours are 0 to 23",
    "day-of-month": "days are 1 to 31, and the month must have that day",
    "month": "months are 1 to 12, or JAN to DEC",
    "day-of-week": "days of the week are 0 to 7, or SUN to SAT",
}
_NAMED: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


def _five_fields(words: list[str]) -> str:
    """Return the remedy for an expression that does not have five fields."""
    if len(words) == 1 and (named := did_you_mean(words[0], _NAMED, "")):
        known = words[0] if words[0] in _NAMED else next(name for name in _NAMED if repr(name) in named)
        return f": {known} is written {_NAMED[known]!r}"
    if len(words) == 6:
        return (
            f": leave the seconds out, as in {' '.join(words[1:])!r}; what happens several times a minute is for every(), which "
            "takes seconds"
        )
    return ", as in '30 3 * * 1-5'; what happens several times a minute is for every()"


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # needs no time zone database
    if len(name) <= LONGEST_ZONE and _ZONE_NAME.fullmatch(name):  # zoneinfo makes the path of a file of it
        import zoneinfo  # imported here, because it searches for the system's zones, and few programs need them

        with suppress(Exception):  # what opening and reading a file of any content raises
            return zoneinfo.ZoneInfo(name)
    shown = name[:LONGEST_ZONE]
    hint = _zone_hint(shown, _known_zones())
    raise UsageError(f"timezone {shown!r} is not known here (it takes an IANA name); {hint}")


@cache
def _known_zones() -> frozenset[str]:
    """Return the names of all zones. Searching for them takes many milliseconds, in which the event loop stands still."""
    import zoneinfo

    return frozenset(zoneinfo.available_timezones())


def _zone_hint(name: str, known: Iterable[str]) -> str:
    """Return the remedy for the name of a zone that is none."""
    example = "take the zone of a city, for example 'Europe/Berlin'"
    place = name.replace(" ", "_").casefold()
    if city := min(
        (each for each in known if each.rpartition("/")[2].casefold() == place or each.casefold() == place), default=""
    ):
        return f"did you mean {city!r}?"
    if re.fullmatch(r"[A-Z]{1,5}", name):
        return f"an abbreviation is no time zone: {example}"
    if re.fullmatch(r"(UTC|GMT)?[+-]?[\d:]+", name):
        return f"an offset is no time zone: {example}"
    return did_you_mean(name, known, "if the system has none: run `pip install tzdata`")
