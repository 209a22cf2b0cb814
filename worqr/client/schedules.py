"""`ScheduleControls`: list the schedules of a mesh, pause one, run one now, or give it other times. `Mesh` inherits it.

`worqr.peer.leader.schedule_ticker` fires them, and `worqr.functions.registry` declares them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import tzinfo
from itertools import chain
from typing import Any, Final

import msgspec

from worqr import ops
from worqr.client.client import NOTE_PATIENCE, Client
from worqr.client.job import Job
from worqr.client.notifications import sleep
from worqr.codecs import Sealed
from worqr.cron import (
    Definition,
    Override,
    Schedule,
    ScheduleOverride,
    Trigger,
    at,
    check_times,
    effective,
    jitter_ms,
    outcome_of,
    zone_name,
)
from worqr.errors import RefusedByServer, UsageError, WorqrError, did_you_mean
from worqr.keys import QueueKeys, RegistryKeys, check_name, shard_of
from worqr.link import Link
from worqr.log_events import emit, emit_fields, raise_ctrl_c
from worqr.ops import ScheduleRow
from worqr.stored_values import readable
from worqr.tracebacks import one_line
from worqr.tracing import FiringSpan, Tracing, encoded_meta
from worqr.validation import check_text

# `fire`: enqueue firings of schedules, each with a span around it if the mesh is traced. For leaders and test benches.


logger: logging.Logger = logging.getLogger(__name__)


async def fire(
    link: Link,
    keys: QueueKeys,
    firings: Sequence[tuple[Definition, int, str]],
    *,
    judged_at: int,
    tracing: Tracing | None,
    patience: float | None = None,
) -> list[str]:
    """Enqueue firings; return the words of `ops.fire_schedules`. Only a firing that this call has enqueued gets a span.

    Args:
        link: of the queue.
        keys: of the queue.
        firings: up to `ops.FIRINGS_AT_ONCE` schedules of the queue, each with the time of the firing, in ms, and the number of
            a stored one's call.
        judged_at: when they were found due, in ms.
        tracing: that of the mesh; None: they are not traced.
        patience: seconds; by default the link's.

    Raises:
        Unavailable: the server did not reply within `patience`.
        WorqrError: the server's error. Some of them may have been enqueued.
    """
    spans = [None if tracing is None else _span_of(tracing, link, definition) for definition, _, _ in firings]
    calls = [
        ops.Firing(
            *(definition.name, nominal, nominal + jitter_ms(definition, nominal), definition.overlap, definition.task),
            meta="" if span is None else encoded_meta(span.carrier),
            version=version,
            workflow=definition.workflow,
            lifetime_ms=definition.lifetime_ms,
            options=definition.options,
        )
        for (definition, nominal, version), span in zip(firings, spans, strict=True)
    ]
    words = await link.call(ops.fire_schedules(keys, calls, judged_at=judged_at), patience=patience)
    for (definition, _, _), span, word in zip(firings, spans, words, strict=True):
        if span is not None and word == "ok":
            try:
                span.end(definition.job)
            except BaseException as error:
                _note_untraced(definition, error)
    return words


def _span_of(tracing: Tracing, link: Link, definition: Definition) -> FiringSpan | None:
    """Return the span of a firing; None if the application's SDK fails, because the leader must not end."""
    try:
        return tracing.firing(definition.name, definition.queue, link.settings.address)
    except BaseException as error:
        _note_untraced(definition, error)
        return None


def _note_untraced(definition: Definition, error: BaseException) -> None:
    raise_ctrl_c(error)
    text = "schedule %(schedule)r is fired without a trace: %(error)s"
    emit(logger, "fire_schedule", text, schedule=definition.name, error=one_line(error))


class StoredCall(msgspec.Struct, frozen=True):
    """The call of a stored schedule, as it is in its queue."""

    options: dict[str, Any]
    task: bytes
    times: Definition

    def encode(self) -> bytes:
        """Encode it for its queue: equal calls are equal bytes."""
        options = msgspec.msgpack.encode(self.options)
        return b"%d %d %b%b%b" % (len(options), len(self.task), options, self.task, self.times.encode())

    @staticmethod
    def decode(blob: bytes) -> StoredCall:
        """Decode the call. Raises UsageError if it cannot be read, because any program may have written it."""
        try:
            length, size, rest = blob.split(b" ", 2)
            end, until = int(length), int(length) + int(size)
            options = msgspec.msgpack.decode(rest[:end], type=dict[str, Any])
            return StoredCall(options, rest[end:until], Definition.decode(rest[until:]))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UsageError(f"this version of worqr cannot read the call of a stored schedule: {error}") from None


CHECKED_AT_ONCE: Final = 50
"""Schedules that are read or checked before the event loop goes on: ten thousand take seconds."""
PLANNED_WITHIN_MS: Final = 15_000
"""Milliseconds after which a leader should have planned the next run of a schedule that was overridden."""


_REMEDY: Final = "start a worker with `worqr run module:mesh`, or use mesh.join() in place of mesh.connect()"


class ScheduleControls:
    """The part of `Mesh` that shows and controls schedules. Its calls need ``mesh.connect()`` or ``join()``."""

    _client: Client

    def _declared_schedules(self) -> Mapping[str, Definition]:
        """Return the schedules that the code of this program declares."""
        raise NotImplementedError

    async def schedules(self, prefix: str = "") -> list[Schedule]:
        """Return all schedules of the mesh, those of other programs too, by name; or the stored ones with a prefix.

        Args:
            prefix: Return the schedules that were stored by ``mesh.schedule()`` and whose names begin with this text. They are
                read in pages of 1,000. Default: all schedules, declared ones too.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        if check_text(prefix, "prefix"):
            rows, now = await self._stored_rows(prefix)
        else:
            rows, now = await self._rows()
        return await schedules_of(self._client, rows, now)

    async def pause_schedule(self, name: str, *, paused: bool = True) -> None:
        """Pause a schedule, or resume it with ``paused=False``. Firings that pass while it is paused are not made up for.

        Jobs that it has enqueued already still run. The pause survives restarts and changes of the schedule.

        Args:
            name: The name of the schedule.
            paused: False: resume it.

        Raises:
            UsageError: There is no schedule of this name; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        keys = RegistryKeys(self._client.settings.prefix)
        if not await self._client.ask(ops.pause_schedule(keys, check_text(name, "schedule name"), paused=bool(paused))):
            raise await self._unknown(name)
        await self._client.note("schedule_paused" if paused else "schedule_resumed", text=name)

    async def run_schedule(self, name: str) -> Job[bytes]:
        """Enqueue the task of a schedule now, as the job ``cron:NAME``, also while the schedule is paused.

        The schedule does not change: it fires at its next time as planned. If the job of an earlier firing still waits or runs,
        nothing is enqueued, with any `overlap`, and the `outcome` is ``unchanged``. In the run, `scheduled_for` is None.

        Args:
            name: The name of the schedule.

        Returns:
            A handle of the job. Its `outcome` tells whether it was enqueued.

        Raises:
            UsageError: There is no schedule of this name, or a newer version of worqr declared it; or outside `connect` and
                `join`.
            QueueFull: The server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it in time.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        found = await find_schedule(self._client, check_text(name, "schedule name"))
        if found is None:
            raise await self._unknown(name)
        definition = Definition.decode(found[0].definition)
        job = await self._run_by_hand(found[0], definition)
        if job.outcome != "unchanged":
            await self._client.note("schedule_run", queue=definition.queue, text=name)
        return job

    async def override_schedule(self, name: str, cron: str | None, *, timezone: str | tzinfo | None = None) -> None:
        """Give a schedule other times than its code, or with ``cron=None`` return to those of the code.

        The override holds until you remove it: it survives restarts, changes of the code and a change of the leader. It replaces
        the expression or period, and the time zone; `misfire`, `overlap` and `jitter` stay. Firings count from now on, so none
        was missed. A pause stays. The override is removed together with a schedule that no worker has declared for a day.

        Args:
            name: The name of the schedule.
            cron: A cron expression, as in ``mesh.cron``. None: the times of the code.
            timezone: An IANA name, or a ``zoneinfo.ZoneInfo``. None: that of the code.

        Raises:
            UsageError: The expression or the zone is not valid, there is no schedule of this name, or an extra is missing (``pip
                install 'worqr[cron]'``); or outside `connect` and `join`. Nothing was changed.
            Unavailable: The server did not reply within `patience`.
        """
        keys = RegistryKeys(self._client.settings.prefix)
        override = self._override(cron, timezone)
        blob = b"" if override is None else override.encode()
        word = await self._client.ask(ops.override_schedule(keys, check_text(name, "schedule name"), blob))
        if word == "unknown":
            raise await self._unknown(name)
        if override is None:
            await self._client.note("schedule_reset", text=name)
        else:
            zone = f" {override.timezone}" if override.timezone else ""
            await self._client.note("schedule_overridden", text=f"{name}: {override.cron}{zone}")

    def _override(self, cron: object, timezone: str | tzinfo | None) -> Override | None:
        if cron is None:
            if timezone is not None:
                raise UsageError("timezone= needs cron=; without an expression, the times are those of the code")
            return None
        if not isinstance(cron, str):
            raise UsageError(f"cron must be an expression such as '30 3 * * *', or None, not {cron!r}")
        expression, zone = " ".join(cron.split()), "" if timezone is None else zone_name(timezone)
        check_times(expression, zone or "UTC")
        return Override(cron=expression, timezone=zone, by=self._client.who)

    async def _run_by_hand(self, row: ScheduleRow, definition: Definition) -> Job[bytes]:
        """Enqueue the call of a schedule; of a stored one with its options."""
        keys, task = await _home_of(self._client, row, definition.queue), definition.task
        options: dict[str, Any] = {}
        if row.version:
            [found] = await self._client.link_to(keys.name).call(ops.read_schedules(keys, [row.name]))
            if found is None:
                raise await self._unknown(row.name)
            stored = StoredCall.decode(found[1])
            options, task = stored.options, stored.task
        else:
            options = dict(definition.options)
            if keys.tag:  # as the leader fires it: the lane may lie in another shard
                options.pop("lane", None)
            if definition.workflow:
                options["workflow"] = True
            if definition.lifetime_ms:
                options["lifetime"] = str(definition.lifetime_ms)
        options = {**options, "id": definition.job, "exists": "skip", "by_hand": True}
        if self._client.values is not None:
            task = Sealed(task)
        return await self._client.producer.dispatch_task(keys, task, options)

    async def _rows(self) -> tuple[list[ScheduleRow], int]:
        return await all_schedules(self._client.ask, RegistryKeys(self._client.settings.prefix))

    async def _stored_rows(self, prefix: str) -> tuple[list[ScheduleRow], int]:
        """Return the stored schedules whose names begin with `prefix`, read in pages, and the server's time."""
        keys, found = RegistryKeys(self._client.settings.prefix), list[ScheduleRow]()
        while True:
            after = found[-1].name if found else ""
            page, now = await self._client.ask(ops.page_schedules(keys, prefix, after))
            found += page
            if len(page) < ops.SCHEDULES_PER_PAGE:
                return found, now

    async def _unknown(self, name: str) -> UsageError:
        keys = RegistryKeys(self._client.settings.prefix)
        if name in self._declared_schedules():
            return UsageError(
                f"no worker has declared schedule {name!r}, which is in the code of this program: {_REMEDY}"
            )
        rows = (await self._client.ask(ops.survey_schedules(keys))).rows
        return _unknown_error(name, rows + (await self._client.ask(ops.page_schedules(keys, "")))[0])

    async def _warn_undeclared(self) -> None:
        """Log which schedules of this program no worker has declared: a program that only connects does not fire them."""
        names, keys = list(self._declared_schedules()), RegistryKeys(self._client.settings.prefix)
        known, level = set[str](), logging.WARNING
        try:
            for start in range(0, len(names), ops.SCHEDULES_PER_PAGE):
                survey = ops.survey_schedules(keys, names[start : start + ops.SCHEDULES_PER_PAGE])
                known.update(row.name for row in (await self._client.link.call(survey, patience=NOTE_PATIENCE)).rows)
        except RefusedByServer:
            level = logging.INFO
        except WorqrError:  # the server has gone away again: other calls say so
            return
        if missing := [name for name in names if name not in known]:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            why = "this user may not look whether a worker has" if level == logging.INFO else "no worker has"
            text = f"{why} declared schedule %(schedule)r{others}, which fires only then: {_REMEDY}"
            fields = {"schedule": missing[0], "count": len(missing)}
            emit_fields(logger, "schedules_undeclared", text, fields, level=level)


async def find_schedule(client: Client, name: str) -> tuple[ScheduleRow, int] | None:
    """Return what is stored of one schedule, and the server's time."""
    found = await client.ask(ops.survey_schedules(RegistryKeys(client.settings.prefix), [name]))
    return (found.rows[0], found.now) if found.rows else None


async def schedules_of(client: Client, rows: Sequence[ScheduleRow], now: int) -> list[Schedule]:
    """Return schedules as users see them, each with how its last run ended, as the queues of their jobs know it."""
    found, homes = list[Schedule](), dict[QueueKeys, list[int]]()
    for place, row in enumerate(rows):
        if place and place % CHECKED_AT_ONCE == 0:
            await sleep(client.link, 0)
        found.append(schedule_of(row, now))
        with suppress(UsageError):  # of a name or a queue that any program has stored
            homes.setdefault(await _home_of(client, row, found[place].queue), []).append(place)
    calls, places = list[ops.Command[list[tuple[bytes, int | None]]]](), list[int]()
    for keys, those in homes.items():
        for start in range(0, len(those), ops.SCHEDULES_PER_PAGE):
            page = those[start : start + ops.SCHEDULES_PER_PAGE]
            calls.append(ops.read_outcomes(keys, [rows[place].name for place in page]))
            places += page
    with suppress(RefusedByServer):  # by a user who may not look at the queues
        known = chain.from_iterable(await client.link.call_all(calls))
        for count, (place, (stored, since)) in enumerate(zip(places, known, strict=True), 1):
            if count % CHECKED_AT_ONCE == 0:
                await sleep(client.link, 0)
            one = replace(found[place], last_outcome=outcome_of(stored))
            found[place] = one if since is None or one.problem else replace(one, problem=_unserved(one.queue, since))
    return found


def _unserved(queue: str, since: int) -> str:
    """Return what is wrong with a schedule whose job no worker takes. It goes on by itself when one does."""
    day = at(since).isoformat(sep=" ", timespec="minutes")[:16]
    return (
        f"no worker serves its queue {readable(queue)!r}: its run of {day} UTC still waits. Start a worker of the queue"
    )


async def _home_of(client: Client, row: ScheduleRow, queue: str) -> QueueKeys:
    """Return the queue or shard of the jobs of a schedule."""
    if row.home:
        return QueueKeys.of(client.settings.prefix, row.home)
    keys = QueueKeys(client.settings.prefix, check_name(queue))
    return shard_of(await client.sharding.shards(keys, declare=False), f"cron:{row.name}")


def _unknown_error(name: str, rows: list[ScheduleRow]) -> UsageError:
    known = [row.name for row in rows]
    hint = did_you_mean(name, known, f"there are {', '.join(map(repr, known[:20])) or 'none'}")
    return UsageError(f"there is no schedule {name!r} in this mesh; {hint}")


async def all_schedules(
    ask: Callable[[ops.Command[ops.Schedules]], Awaitable[ops.Schedules]], keys: RegistryKeys
) -> tuple[list[ScheduleRow], int]:
    """Return all schedules of the mesh by name, and the server's time. They are read page by page."""
    pages = [await ask(ops.list_schedules(keys))]
    while pages[-1].cursor != "0":
        pages.append(await ask(ops.list_schedules(keys, pages[-1].cursor)))
    return ops.Schedules.join(pages), pages[-1].now


def schedule_of(row: ScheduleRow, now: int) -> Schedule:
    """Return a schedule as users see it. A schedule that cannot be read is not fired, so its next time is in the past."""
    following, definition, problem = row.next, None, ""
    try:
        definition = effective(row.name, row.definition, row.override)
        if row.override is not None or following is None or row.paused:
            trigger = Trigger(definition)
            problem = _problem(row, trigger, now)
            if following is None or row.paused:
                following = trigger.next_after(now if row.paused else row.last)
    except Exception as error:  # a schedule that any program has stored hides no other one
        following = row.last if following is None else following
        problem = str(error) if isinstance(error, UsageError | ArithmeticError) else repr(error)
    return Schedule(
        *(readable(row.name), at(following), None if row.fired is None else at(row.fired), row.paused),
        queue="" if definition is None else definition.queue,
        cron="" if definition is None or definition.every_ms else definition.cron,
        every=None if definition is None or not definition.every_ms else definition.every_ms / 1000,
        timezone="" if definition is None else definition.timezone,
        pending=len(row.pending),
        override=_override_of(row),
        problem=problem,
        stored=bool(row.version),
        by="" if definition is None else definition.by,
        until=None if definition is None or not definition.until_ms else at(definition.until_ms),
        times=None if definition is None or not definition.times else definition.times,
        runs=row.ran,
        ended=row.ended is not None,
        phase=0.0 if definition is None else definition.phase_ms / 1000,
    )


def _override_of(row: ScheduleRow) -> ScheduleOverride | None:
    if row.override is None:
        return None
    try:
        override = Override.decode(row.override)
    except UsageError:
        override = Override(cron="")
    return ScheduleOverride(override.cron, override.timezone, override.by, at(row.overridden_at))


def _problem(row: ScheduleRow, trigger: Trigger, now: int) -> str:
    """Return why an override may not be followed. A leader of an older version ignores it, and plans the times of the code."""
    if row.override is None or row.paused:
        return ""
    if row.next is None:
        if now - max(row.overridden_at, row.last) < PLANNED_WITHIN_MS:
            return ""
        return "no leader has planned a run since it was overridden: no worker runs, or the leader cannot read the override"
    if trigger.next_after(row.next - 1) != row.next:
        return "the leader plans other times: it runs an older version of worqr, which ignores the override"
    return ""
