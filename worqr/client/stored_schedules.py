"""`StoredSchedules`: schedules that programs store at run time, as users ask for them. `Mesh` inherits it.

The call of a stored schedule is in the slot of its queue: a leader fires only what is there. Its times are in the registry. A
schedule is stored in two steps, first the call, then its times. A program that dies in between has stored the call alone, which
does not fire; a leader that finds the times of an older call stores the newer ones (`finish_storing`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, Literal, TypedDict, Unpack, cast
from uuid import uuid4

import msgspec

from worqr import ops
from worqr.client.client import Client
from worqr.client.job import Job
from worqr.client.notifications import sleep
from worqr.client.producer import Call
from worqr.client.schedules import CHECKED_AT_ONCE, ScheduleControls, StoredCall, find_schedule, schedules_of
from worqr.codecs import StoredValues, encoded_by
from worqr.command import in_chunks
from worqr.cron import (
    MAX_TIMES,
    Definition,
    Overlap,
    Schedule,
    Trigger,
    at,
    check_overlap,
    misfire_count,
    ms_of,
    period_ms,
    zone_name,
)
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.inside import options_of
from worqr.job_options import JobOptions, encode_options, schedule_options
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.ops import ScheduleRow
from worqr.validation import Seconds, check_between, check_text, seconds, to_ms

MAX_STORED_NAME: Final = 150
"""Bytes of the name of a stored schedule."""
MAX_STORED_TASK: Final = 4096
"""Bytes of the payload of a stored schedule."""
SPREAD_MS: Final = 60_000
"""Jitter of a stored schedule by default, in ms, if it has at least an hour between two firings."""
_LONG_MS: Final = 3_600_000
LEASE_MS: Final = 20_000
"""How long a program that applies a prefix may hold it without a sign of life."""
APPLY_WAIT: Final = 30.0
"""Seconds for which another one waits: longer than a lease, so it follows one that has died."""
APPLY_AGAIN: Final = 0.5
MOST_DELETED: Final = 100
"""Schedules that `schedules_apply` deletes without `delete_at_most`; or a tenth of those with the prefix, if that is more."""

Stored = Literal["created", "updated", "unchanged"]


class StoredScheduleOptions(TypedDict, total=False):
    """The options of ``mesh.schedule()``."""

    cron: str
    """A cron expression, as in ``mesh.cron``; or `every`. Default: `every`."""
    every: Seconds
    """The period: seconds, or a timedelta, at least 0.1 s. It fires at multiples of the period, moved by a time that follows from
    the name, so that not all schedules fire at once. Default: `cron`.
    """
    timezone: str | Any
    """Only with `cron`: an IANA name, or a ``zoneinfo.ZoneInfo``. Default: "UTC"."""
    misfire: Literal["skip", "once"] | int
    """What to do about missed firings, as in ``mesh.cron``. Default: "once"."""
    overlap: Overlap
    """What to do if the job of the last firing still waits or runs, as in ``mesh.cron``. Default: "skip"."""
    until: datetime | None
    """A timezone-aware datetime: the last time at which it may fire. Default: never."""
    times: int | None
    """How many firings are enqueued in all, without those that are skipped or run by hand. Default: any number."""
    jitter: Seconds
    """Seconds, or a timedelta: delay each job by a random time up to this long. Default: 60 s if at least an hour lies between
    two firings, else 0.
    """
    replace: bool
    """True: replace a schedule of this name that calls another function. Default: False."""
    adopt: bool
    """True: take over a declared schedule of this name that no worker has declared for 20 minutes. Default: False."""


Wanted = tuple[str, Call[Any], StoredScheduleOptions]
"""A schedule for ``mesh.schedules_apply``: name, call and options."""


@dataclass(frozen=True, slots=True)
class AppliedSchedules:
    """What ``mesh.schedules_apply()`` has changed."""

    created: int = 0
    """Schedules that are new."""
    updated: int = 0
    """Schedules that were different."""
    unchanged: int = 0
    """Schedules that were there already."""
    deleted: int = 0
    """Schedules with the prefix that were not wanted."""


class ScheduleHandle:
    """A schedule that may be stored in the mesh, by its name. Make one with ``mesh.schedule_handle()``."""

    def __init__(self, controls: StoredSchedules, client: Client, name: str) -> None:
        self._controls = controls
        self._client = client
        self.name: str = name

    def __repr__(self) -> str:
        return f"ScheduleHandle({self.name!r})"

    async def info(self) -> Schedule | None:
        """Return the schedule; None if there is none of this name.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        found = await find_schedule(self._client, self.name)
        return None if found is None else (await schedules_of(self._client, [found[0]], found[1]))[0]

    async def next_runs(self, count: int = 5) -> list[datetime]:
        """Return its next times, or none if there is no schedule of this name.

        Args:
            count: How many times, 1 to 100.

        Raises:
            UsageError: `count` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        found = await self.info()
        return [] if found is None else found.next_runs(count)

    async def pause(self) -> None:
        """Pause it. Firings that pass while it is paused are not made up for.

        Raises:
            UsageError: There is no schedule of this name; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        await self._controls.pause_schedule(self.name)

    async def resume(self) -> None:
        """Resume it from now on.

        Raises:
            UsageError: There is no schedule of this name; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        await self._controls.pause_schedule(self.name, paused=False)

    async def run_now(self) -> Job[bytes]:
        """Enqueue its call now, as ``mesh.run_schedule()`` does. This counts for no `times`.

        Raises:
            UsageError: There is no schedule of this name; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        return await self._controls.run_schedule(self.name)

    async def change(self, call: Call[Any] | None = None, **options: Unpack[StoredScheduleOptions]) -> Stored:
        """Change some of its options, and keep the others. `until` or `times` of None removes the bound.

        A jitter that is the default for its times follows them.

        Args:
            call: Another call to enqueue. Default: the stored one.
            **options: See `StoredScheduleOptions`; without `adopt`.

        Returns:
            "updated", or "unchanged" if it is stored like this already.

        Raises:
            UsageError: There is no stored schedule of this name, or an option is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`. Call it again: that changes nothing twice.
        """
        return await self._controls._change(self.name, call, dict(options))  # pyright: ignore[reportPrivateUsage]

    async def delete(self, *, job: Literal["keep", "cancel"] = "keep") -> bool:
        """Delete it: after this call it does not fire.

        Args:
            job: What to do with a job that it has enqueued already: "keep" it, or "cancel" it.

        Returns:
            True if it was stored.

        Raises:
            UsageError: Workers declare it, so you delete it from their code; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, it may have been deleted.
        """
        if job not in {"keep", "cancel"}:
            raise UsageError(f"job must be 'keep' or 'cancel', not {job!r}")
        found = await find_schedule(self._client, self.name)
        if found is None:
            return False
        row = found[0]
        if not row.version:
            raise UsageError(f"workers declare the schedule {self.name!r}: delete it from their code, or pause it")
        await _delete(self._client, row)
        if job == "cancel":
            await Job(self._client, _home(self._client, row), f"cron:{self.name}").cancel()
        return True


class StoredSchedules(ScheduleControls):
    """The part of `Mesh` that stores schedules. Its calls need ``mesh.connect()`` or ``join()``."""

    async def schedule(self, name: str, call: Call[Any], **options: Unpack[StoredScheduleOptions]) -> Stored:
        """Store a schedule, or change it. It never expires, and no worker has to declare it.

        It fires as declared schedules do, with the lane, `meta`, timeout, retries and `result_ttl` of the call. A change of its
        times makes firings count from now on, and so does any change of one that has ended. Other changes keep what it has missed
        and counted. A pause stays.

        Args:
            name: 1 to 150 bytes, unique in the mesh. Use slashes between segments, as in ``report/acme``.
            call: The call to enqueue, with at most 4 KiB of payload.
            **options: See `StoredScheduleOptions`; `cron` or `every` is needed.

        Returns:
            "created", "updated", or "unchanged" if it is stored like this already.

        Raises:
            UsageError: The name, the call or an option is not valid; the name is that of a declared schedule, or of one that
                calls another function; or outside `connect` and `join`. Nothing was changed.
            Unavailable: The server did not reply within `patience`. Call it again: that changes nothing twice.
        """
        given = dict(options)
        force = _force_of(given)
        return await self._store(_Plan.of(name, call, given, self._client), force)

    def schedule_handle(self, name: str) -> ScheduleHandle:
        """Return a handle of the schedule with this name. This does no I/O; the schedule does not have to exist.

        Raises:
            UsageError: The name is not valid.
        """
        return ScheduleHandle(self, self._client, check_name(name, "schedule name"))

    async def export_schedules(self, prefix: str = "") -> list[str]:
        """Return the stored schedules whose names begin with `prefix`, each as a line of JSON for ``import_schedules``.

        Raises:
            UsageError: A schedule cannot be read; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        rows, lines = (await self._stored_rows(check_text(prefix, "prefix")))[0], list[str]()
        for row, found in await self._calls_of(rows):
            if found is None:
                continue
            try:
                stored = StoredCall.decode(found[1])
            except UsageError as error:
                raise UsageError(f"schedule {row.name!r}: {error}; store it again, or delete it") from None
            lines.append(_Line.of(stored, self._client.values, paused=row.paused).text)
        return lines

    async def import_schedules(self, lines: Iterable[str]) -> AppliedSchedules:
        """Store the schedules of lines that ``export_schedules`` has returned. Nothing is deleted. Empty lines are skipped.

        A schedule that was paused is paused again. The firings that `times` has counted begin anew, if the schedule is new.

        Returns:
            How many were created, updated and unchanged.

        Raises:
            UsageError: A line is not valid: nothing was stored then. Or a name is that of a declared schedule, or of one that
                calls another function; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`. Call it again.
        """
        plans, paused = dict[str, _Plan](), set[str]()
        for number, text in enumerate(lines, 1):
            if text.strip():
                plan, is_paused = _Line.read(text, number, self._client.values)
                plans[plan.definition.name] = plan
                paused |= {plan.definition.name} if is_paused else set()
        keys, rows = self._registry, list[ScheduleRow]()
        for page in in_chunks(list(plans), len, most=ops.SCHEDULES_PER_PAGE):
            rows += (await self._client.ask(ops.survey_schedules(keys, page))).rows
        there = {row.name: row for row in rows if row.version}
        applied = [await self._apply({name: plan for name, plan in plans.items() if name not in paused}, there)]
        for name in sorted(paused):  # each is paused before the next one is stored: it is not to fire meanwhile
            applied.append(await self._apply({name: plans[name]}, there))
            if name not in there or not there[name].paused:
                await self.pause_schedule(name)
        return AppliedSchedules(*map(sum, zip(*map(astuple, applied), strict=True)))

    async def schedules_apply(
        self, prefix: str, wanted: Iterable[Wanted] | AsyncIterable[Wanted], *, delete_at_most: int | None = None
    ) -> AppliedSchedules:
        """Make the stored schedules with this prefix those that are wanted: add, change, and at last delete.

        Call it at the start of your program and once a day, with what is in your database. Schedules that are stored already are
        only read. Nothing is deleted if `wanted` raises, or before it was read to its end. What is stored meanwhile stays. One
        program applies a prefix at a time: another waits up to 30 s. If it has other schedules, it deletes those of the first.

        A schedule that has ended is deleted after a week. If it is still wanted then, it is new, and fires `times` times again.

        Args:
            prefix: The beginning of all names, with a slash at its end.
            wanted: Names, calls and options, as for ``mesh.schedule()``.
            delete_at_most: How many may be deleted. Default: 100, or a tenth of those with the prefix if that is more.

        Returns:
            How many were created, updated, unchanged and deleted.

        Raises:
            UsageError: A name does not begin with the prefix or appears twice, an option is not valid, another program still
                applies this prefix, or more would be deleted than allowed; or outside `connect` and `join`. Nothing was deleted.
            Unavailable: The server did not reply within `patience`. Call it again.
        """
        if not check_text(prefix, "prefix").endswith("/") or prefix.startswith("/"):
            raise UsageError(
                f"prefix must end with a slash, as in 'report/', not {prefix!r}: 'report/1' begins 'report/10'"
            )
        async with self._applying(prefix) as renew:
            # What is stored from now on stays: a program may store it after `wanted` was read.
            there = {row.name: row for row in (await self._stored_rows(prefix))[0]}
            plans = await _plans_of(wanted, prefix, self._client, renew)
            return await self._apply_prefix(prefix, plans, there, delete_at_most, renew)

    async def _apply_prefix(
        self,
        prefix: str,
        plans: Mapping[str, _Plan],
        there: Mapping[str, ScheduleRow],
        delete_at_most: int | None,
        renew: Callable[[], Awaitable[None]],
    ) -> AppliedSchedules:
        gone = [row for name, row in there.items() if name not in plans]
        most = max(MOST_DELETED, len(there) // 10) if delete_at_most is None else delete_at_most
        if len(gone) > most:
            raise UsageError(
                f"{len(gone):,} of {len(there):,} schedules that begin with {prefix!r} are not wanted, and at most {most:,} may "
                f"be deleted. Is `wanted` complete? If so, pass delete_at_most={len(gone)}"
            )
        applied, deleted = await self._apply(plans, there, renew), 0
        for row in gone:
            await renew()
            deleted += await _delete(self._client, row, row.version)
        return replace(applied, deleted=deleted)

    # Parts

    @asynccontextmanager
    async def _applying(self, prefix: str) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
        """Hold the lease of a prefix. Yields what renews it from time to time, and raises UsageError if it was lost."""
        holder, renew_at = uuid4().hex, 0.0

        async def renew() -> None:
            nonlocal renew_at
            if time.monotonic() < renew_at:
                return
            if not await self._client.ask(ops.lease_prefix(self._registry, prefix, holder, LEASE_MS)):
                raise UsageError(f"another program applies the schedules that begin with {prefix!r}; try again later")
            renew_at = time.monotonic() + LEASE_MS / 4000

        until = time.monotonic() + APPLY_WAIT
        while True:
            try:
                await renew()
                break
            except UsageError:
                if time.monotonic() >= until:
                    raise
            await sleep(self._client.link, APPLY_AGAIN)
        give_back = ops.lease_prefix(self._registry, prefix, holder, 0)
        try:
            yield renew
        except Exception as error:
            if not isinstance(error, Unavailable):
                with suppress(WorqrError):
                    await self._client.ask(give_back)
            raise
        await self._client.ask(give_back)  # else it ends by itself

    async def _apply(
        self,
        plans: Mapping[str, _Plan],
        there: Mapping[str, ScheduleRow],
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> AppliedSchedules:
        """Store the schedules that are not `there` like this."""
        counts = dict.fromkeys(("created", "updated", "unchanged"), 0)
        for plan in await self._changed(plans.values(), there):
            if renew is not None:
                await renew()
            counts[await self._store(plan, plan.force)] += 1
        counts["unchanged"] = len(plans) - counts["created"] - counts["updated"]
        return AppliedSchedules(**counts)

    async def _change(self, name: str, call: Call[Any] | None, changes: dict[str, Any]) -> Stored:
        """Store a schedule with other options, or another call."""
        force = "replace" if changes.pop("replace", False) else ""
        found = await find_schedule(self._client, name)
        if found is None or not found[0].version:
            raise await self._unknown(name) if found is None else _declared_error(name)
        [(_, blob)] = await self._calls_of([found[0]])
        if blob is None:
            raise await self._unknown(name)
        stored = StoredCall.decode(blob[1])
        given = _given_of(stored.times)
        if changes.get("cron") is not None:
            given.pop("every", None)
        elif changes.get("every") is not None:
            given = {option: value for option, value in given.items() if option not in {"cron", "timezone"}}
        given |= changes
        if call is not None:
            return await self._store(_Plan.of(name, call, given, self._client), force)
        parts = stored.times.queue, stored.options, stored.task
        return await self._store(_Plan.made(name, *parts, given, self._client.who), force)

    async def _calls_of(self, rows: Iterable[ScheduleRow]) -> list[tuple[ScheduleRow, tuple[str, bytes] | None]]:
        """Return what the queues of stored schedules have of them: the number and the call; None: nothing."""
        homes, found = dict[str, list[ScheduleRow]](), list[tuple[ScheduleRow, tuple[str, bytes] | None]]()
        for row in rows:
            homes.setdefault(row.home, []).append(row)
        for home, those in homes.items():
            keys = QueueKeys.of(self._client.settings.prefix, home)
            for page in in_chunks(those, lambda _: 0, most=ops.SCHEDULES_AT_ONCE):
                call = ops.read_schedules(keys, [row.name for row in page])
                found += zip(page, await self._client.link_to(home).call(call), strict=True)
        return sorted(found, key=lambda each: each[0].name)

    @property
    def _registry(self) -> RegistryKeys:
        return RegistryKeys(self._client.settings.prefix)

    async def _changed(self, plans: Iterable[_Plan], there: Mapping[str, ScheduleRow]) -> list[_Plan]:
        """Return those that are not stored like this."""
        wanted = {plan.definition.name: plan for plan in plans}
        calls = await self._calls_of(row for name, row in there.items() if name in wanted)
        alike = [row for row, found in calls if found and found[0] == row.version and wanted[row.name].is_in(found[1])]
        same = {row.name for row in alike if await self._is_served(row, wanted[row.name].definition.queue)}
        return [plan for name, plan in wanted.items() if name not in same]

    async def _is_served(self, row: ScheduleRow, queue: str) -> bool:
        """Return False for a schedule in a shard that its queue no longer has."""
        shards = await self._client.sharding.shards(QueueKeys(self._client.settings.prefix, queue))
        return any(row.home == keys.name for keys in shards)

    async def _store(self, plan: _Plan, force: str) -> Stored:
        name, definition = plan.definition.name, plan.definition
        sharding = self._client.sharding
        keys = QueueKeys(self._client.settings.prefix, definition.queue)
        home = await sharding.shard_for_job(keys, {**plan.options, "id": definition.job})
        link = self._client.link_to(home.name)
        word, version = await link.call(ops.store_schedule(home, name, plan.blob))
        answer, other, replaced = await self._index(definition, home, version, force)
        if answer != "ok":
            if word != "unchanged":
                await link.call(ops.unstore_schedule(home, name, version, undo=True))
            why = "workers declare it" if answer == "declared" else f"it calls {other!r}, which replace=True replaces"
            hint = "; adopt=True takes it over 20 minutes after the last of them" if answer == "declared" else ""
            raise UsageError(f"there is a schedule {name!r} already: {why}{hint}. Give this one another name")
        if other:
            old = QueueKeys.of(self._client.settings.prefix, other)
            await self._client.link_to(other).call(ops.unstore_schedule(old, name, replaced))
            word = "updated" if old.queue == home.queue else word
        return cast("Stored", word)

    async def _index(self, definition: Definition, home: QueueKeys, version: str, force: str) -> tuple[str, str, str]:
        """Store the times of a call. That of another shard of the same queue, whose number has changed, is replaced."""
        encoded, times = definition.encode(), times_of(definition)

        async def index(by: str) -> tuple[str, str, str]:
            return await self._client.ask(
                ops.index_schedule(self._registry, definition.name, home, version, encoded, times=times, force=by)
            )

        answer, other, replaced = await index(force)
        if answer == "conflict" and QueueKeys.of(home.prefix, other).queue == home.queue:
            return await index("replace")
        return answer, other, replaced


async def _delete(client: Client, row: ScheduleRow, version: str = "") -> bool:
    """Delete the call, after which it cannot fire, then its times. False: its call has no longer this number."""
    home = _home(client, row)
    if await client.link_to(home.name).call(ops.unstore_schedule(home, row.name, version)) == "stale":
        return False
    await client.ask(ops.unindex_schedule(RegistryKeys(client.settings.prefix), row))
    return True


def _home(client: Client, row: ScheduleRow) -> QueueKeys:
    return QueueKeys.of(client.settings.prefix, row.home)


def times_of(definition: Definition) -> str:
    """Return the times of a schedule as text: if it changes, firings count from now on."""
    return f"{definition.cron}|{definition.every_ms}|{definition.phase_ms}|{definition.timezone}"


async def _plans_of(
    wanted: Iterable[Wanted] | AsyncIterable[Wanted], prefix: str, client: Client, renew: Callable[[], Awaitable[None]]
) -> dict[str, _Plan]:
    """Read all wanted schedules, and check them."""
    items = list[Wanted]()
    if isinstance(wanted, AsyncIterable):
        async for each in wanted:
            items.append(each)
            await renew()
    else:
        items += wanted
    plans: dict[str, _Plan] = {}
    for n, item in enumerate(items, 1):
        if n % CHECKED_AT_ONCE == 0:
            await sleep(client.link, 0)
            await renew()
        if not isinstance(item, tuple) or len(item) != 3:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise UsageError(
                f"wanted takes a name, a call and options, as in ('report/a', fn.call(), {{...}}), not {item!r}"
            )
        name, call, options = item
        given = dict(options)
        force = _force_of(given)
        plan = replace(_Plan.of(name, call, given, client), force=force)
        if not name.startswith(prefix):
            raise UsageError(f"schedule {name!r} does not begin with {prefix!r}")
        if name in plans:
            raise UsageError(f"schedule {name!r} appears twice in wanted")
        plans[name] = plan
    return plans


@dataclass(frozen=True, slots=True)
class _Plan:
    """A schedule as it is to be stored.

    Attributes:
        definition: its times, without the payload.
        options: of its jobs, encoded.
        blob: what is stored in the queue.
        force: replace, adopt, or empty.
    """

    definition: Definition
    options: Mapping[str, object]
    blob: bytes
    force: str = ""

    def is_in(self, blob: bytes) -> bool:
        """Return True if this schedule is stored in `blob`, by this or another program."""
        if blob == self.blob:
            return True
        with suppress(UsageError):
            stored = StoredCall.decode(blob)
            times = msgspec.structs.replace(stored.times, by=self.definition.by)
            return msgspec.structs.replace(stored, times=times).encode() == self.blob
        return False

    @staticmethod
    def of(name: object, call: object, given: dict[str, Any], client: Client) -> _Plan:
        """Check a schedule. Raises UsageError if something is not valid."""
        if not isinstance(call, Call):
            raise UsageError(f"a schedule takes a call, as in mesh.call('name') or function.call(), not {call!r}")
        options = schedule_options(options_of(client.producer.prepared(cast("Any", call))))
        return _Plan.made(name, call.queue, options, sealed_task(client.values, call.task), given, client.who)

    @staticmethod
    def made(
        name: object, queue: str, options: Mapping[str, object], task: bytes, given: dict[str, Any], by: str
    ) -> _Plan:
        """Return a schedule of the encoded `options` and the payload of a call. Raises UsageError if something is not valid."""
        return _Plan.checked(StoredCall(dict(options), task, _definition(_checked_name(name), queue, given, by)))

    @staticmethod
    def checked(stored: StoredCall) -> _Plan:
        """Return a schedule of what is stored of it."""
        if len(stored.task) > MAX_STORED_TASK:
            size = f"{len(stored.task):,} bytes, at most {MAX_STORED_TASK:,} fit"
            name = stored.times.name
            raise UsageError(f"schedule {name!r}: its payload has {size}; pass an id, and load the data in the handler")
        return _Plan(stored.times, stored.options, stored.encode())


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A schedule in a line of JSON.

    Attributes:
        payload: of its call, as JSON; `payload_base64` in its place if another encoder has written it.
        options: the encoded options of its call.
        times: the fields of its `Definition`, but for its name, its queue and its task.
        paused: it is paused.
    """

    name: str
    queue: str
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    payload_base64: bytes = b""
    options: dict[str, Any] = {}
    times: dict[str, Any]
    paused: bool = False

    @staticmethod
    def of(stored: StoredCall, values: StoredValues | None = None, *, paused: bool) -> _Line:
        """Return the line of a schedule; with its payload as it is stored if the codec of the mesh cannot decode it."""
        task, as_json = stored.task if values is None else values.readable(stored.task), b""
        with suppress(ValueError, RecursionError):
            as_json = msgspec.json.encode(msgspec.json.decode(task))
        times: dict[str, Any] = msgspec.json.decode(stored.times.encode())
        times = {field: value for field, value in times.items() if field not in {"name", "queue", "task"}}
        is_json = bool(task) and as_json == task
        return _Line(
            name=stored.times.name,
            queue=stored.times.queue,
            payload=msgspec.Raw(task) if is_json else msgspec.UNSET,
            payload_base64=b"" if is_json else task,
            options=stored.options,
            times=times,
            paused=paused,
        )

    @property
    def text(self) -> str:
        """The line, without its end."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def read(text: str, number: int, values: StoredValues | None = None) -> tuple[_Plan, bool]:
        """Return the schedule of a line, and whether it is paused. Raises UsageError, with the number of the line."""
        try:
            line = msgspec.json.decode(text, type=_Line)
            times = Definition.decode(
                msgspec.json.encode(line.times | {"name": line.name, "queue": line.queue, "task": b""})
            )
            _checked_name(line.name)
            if unknown := line.options.keys() - schedule_options(line.options).keys():
                raise UsageError(f"a schedule has no option {min(unknown)!r}")
            if bool(times.cron) == bool(times.every_ms):
                raise UsageError("a schedule takes cron or every_ms, and not both")
            Trigger(times)
            task = line.payload_base64
            if line.payload:  # the text may have other escapes or spaces than that of the encoder
                task = msgspec.json.encode(msgspec.json.decode(line.payload))
            task = task if encoded_by(task) else sealed_task(values, task)
            return _Plan.checked(StoredCall(dict(sorted(line.options.items())), task, times)), line.paused
        except (msgspec.MsgspecError, UnicodeError, RecursionError, UsageError) as error:
            raise UsageError(f"line {number} is no exported schedule: {error}") from None


def sealed_task(values: StoredValues | None, task: bytes) -> bytes:
    """Return the payload of a schedule as it is stored. Equal payloads are equal bytes, so an unchanged schedule is known."""
    return task if values is None else values.encode_equal(task)


def call_with(call: Call[Any], **options: Unpack[JobOptions]) -> Call[Any]:
    """Return a call of a function by its name, with options of a dispatch. For the command line and the dashboard."""
    return replace(call, _options=encode_options(options))


def next_times_of(name: str, options: StoredScheduleOptions, count: int) -> list[datetime]:
    """Return the next times at which a schedule with these options would fire. Raises UsageError if something is not valid."""
    given = {option: value for option, value in options.items() if option not in {"replace", "adopt"}}
    definition = _definition(_checked_name(name), "-", given, "")
    trigger, found = Trigger(definition), [ms_of(datetime.now(UTC))]
    for _ in range(min(count, definition.times or count)):
        found.append(trigger.next_after(found[-1]))
    return [at(each) for each in found[1:] if not definition.until_ms or each <= definition.until_ms]


def _force_of(given: dict[str, Any]) -> str:
    """Take `replace` and `adopt` out of the options. Return the one that holds; empty: none."""
    replaces, adopts = given.pop("replace", False), given.pop("adopt", False)
    return "replace" if replaces else "adopt" if adopts else ""


def _declared_error(name: str) -> UsageError:
    return UsageError(f"workers declare the schedule {name!r}: change it in their code, or override its times")


def _given_of(definition: Definition) -> dict[str, Any]:
    """Return the options with which `_definition` makes these times."""
    found: dict[str, Any] = {"misfire": definition.misfire or "skip", "overlap": definition.overlap}
    found |= {"jitter": definition.jitter_ms / 1000, "times": definition.times or None}
    with suppress(UsageError):  # of times that cannot be read here, which may be about to change
        if definition.jitter_ms == _default_jitter_ms(definition):
            del found["jitter"]
    found["until"] = at(definition.until_ms) if definition.until_ms else None
    if definition.every_ms:
        return found | {"every": definition.every_ms / 1000}
    return found | {"cron": definition.cron, "timezone": definition.timezone}


def _checked_name(name: object) -> str:
    found = check_name(name, "schedule name")
    if len(found.encode()) > MAX_STORED_NAME:
        raise UsageError(f"a schedule name has at most {MAX_STORED_NAME} bytes: {found[:60]!r}")
    if not all(found.split("/")):
        raise UsageError(f"schedule name {found!r} has an empty segment: write it as in 'report/acme'")
    return found


def _definition(name: str, queue: str, given: dict[str, Any], by: str) -> Definition:
    """Return the times of a schedule."""
    for option in given:
        if option not in StoredScheduleOptions.__annotations__:
            known = ", ".join(StoredScheduleOptions.__annotations__)
            raise UsageError(f"a stored schedule has no option {option!r}; it takes {known}")
    cron, every = given.get("cron"), given.get("every")
    if (cron is None) == (every is None):
        raise UsageError("a schedule takes cron= or every=, and not both")
    found: dict[str, Any] = {"name": name, "queue": queue, "task": b"", "by": by}
    if cron is None:
        if "timezone" in given:
            raise UsageError("every= goes by real time and takes no timezone; for local times use cron=")
        found["every_ms"] = period_ms(every)
        found["phase_ms"] = _spread(name) % found["every_ms"]
    elif not isinstance(cron, str):
        raise UsageError(f"cron must be an expression such as '30 3 * * *', not {cron!r}")
    else:
        found["cron"] = " ".join(cron.split())
        found["timezone"] = zone_name(given.get("timezone", "UTC"))
    found["misfire"] = misfire_count(given.get("misfire", "once"))
    found["overlap"] = check_overlap(given.get("overlap", "skip"))
    if given.get("until") is not None:
        found["until_ms"] = to_ms(given["until"], "until")
    if given.get("times") is not None:
        found["times"] = check_between(given["times"], "times", 1, MAX_TIMES)
    definition = Definition(**found)
    jitter = round(seconds(given["jitter"], "jitter") * 1000) if "jitter" in given else _default_jitter_ms(definition)
    return msgspec.structs.replace(definition, jitter_ms=jitter)


def _default_jitter_ms(times: Definition) -> int:
    return SPREAD_MS if _shortest_gap(Trigger(times)) >= _LONG_MS else 0


def _spread(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _shortest_gap(trigger: Trigger) -> int:
    """Return the shortest time between the first firings of a year, in ms."""
    times = [ms_of(datetime(2001, 1, 1, tzinfo=UTC))]
    for _ in range(4):
        times.append(trigger.next_after(times[-1]))
    return min(later - earlier for earlier, later in pairwise(times[1:]))


async def finish_storing(
    ask: Callable[[ops.Command[Any]], Awaitable[Any]], keys: RegistryKeys, row: ScheduleRow, found: tuple[str, bytes]
) -> None:
    """Store the times of the call `found` of a schedule, whose program has not done so.

    Raises:
        UsageError: the call cannot be read.
    """
    version, blob = found
    definition = StoredCall.decode(blob).times
    if definition.name != row.name:
        raise UsageError(f"its call is that of the schedule {definition.name!r}")
    home = QueueKeys.of(keys.prefix, row.home)
    await ask(ops.index_schedule(keys, row.name, home, version, definition.encode(), times=times_of(definition)))
