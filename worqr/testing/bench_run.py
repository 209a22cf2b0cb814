"""Run the tasks of a bench until none waits or runs. A peer of the bench runs them while the clock is stopped.

The peer serves a function only when there are tasks for it: an application has hundreds of functions, and serving a queue, or
starting the processes that a function runs in, takes time.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import queue_names
from worqr.client.outbox_relay import relay_and_check
from worqr.client.permits import LEASE
from worqr.client.producer import random_part
from worqr.client.schedules import all_schedules, fire
from worqr.command import Argument, Command, expect_ok, in_chunks, text
from worqr.cron import Definition, Trigger, effective
from worqr.errors import UsageError, did_you_mean
from worqr.inside import client_of, declarations_of, definition_of, engine_of, peers_of
from worqr.keys import LimitKeys, QueueKeys, RegistryKeys
from worqr.limits import Limit, limits_text, parse_limits
from worqr.link import Heartbeat, Link, WorkerHandle
from worqr.log_events import emit
from worqr.lua import Script, all_scripts
from worqr.lua.assembler import SHORT_CALLS
from worqr.mesh import Mesh
from worqr.ops import MAX_PENDING, Inspected, list_schedules
from worqr.peer.options import JoinOptions, Only
from worqr.peer.peer import Peer

# The clock of a bench: the time of the server plus the time that the test has let pass. It stands still during a run.
#
# The scripts of a bench are the usual ones, except that they call ``moved_time()`` of ``clock.lua`` instead of ``TIME``. A
# key of the bench's prefix has the setting of the clock. Keys expire by the server's own clock, which does not move. So this
# module makes keys expire earlier whose end a user can see: results, kept jobs, the last runs, ids reserved by ``unique_for``.

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
    """Return `call` as a bench sends it: with the script of the bench, and without a wait for replicas."""
    script = bench_scripts().get(call.script.name)
    found = call if script is None or script is call.script else call.with_script(script)
    return found.without_replicas() if found.replicas else found


def set_clock(keys: RegistryKeys, ahead_ms: int, stopped_ms: int | None) -> Command[str]:
    """Set how far the clock is ahead; or stop it at a time, with `stopped_ms`."""
    setting = f"{ahead_ms}" if stopped_ms is None else f"{ahead_ms} {stopped_ms}"
    return Command(_own("set_clock"), keys.base, (setting,), expect_ok)


def skip_looks(keys: QueueKeys) -> Command[str]:
    """Let the suspended jobs of a queue wait for their own times alone."""
    return Command(_own("skip_looks"), keys.base, (), expect_ok)


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
        for rest in (":result:*", ":older_result:*", ":taken:*", ":sent:*", ":paused", ":part:*", ":done*", ":recent"):
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


# Run the tasks of a bench until none waits or runs.

# The schedules of a bench: they fire when the test moves the clock, and at no other time.
#
# So a test does not depend on when it runs: a full minute that passes in real time fires nothing. Firings have a clock of their
# own, which only `advance` moves; a day fires a daily schedule once. No task runs while the clock moves, so a schedule that
# skips overlapping firings enqueues one, however many pass.


class BenchSchedules:
    """Fires the schedules of one bench. Only the loop of the bench changes it."""

    def __init__(self, mesh: Mesh[Any]) -> None:
        self._client = client_of(mesh)
        self._declarations = declarations_of(mesh)
        self._keys = RegistryKeys(mesh.prefix)
        self._now = 0
        self._pending: dict[str, list[int]] = {}
        self._found: dict[str, _Found] = {}

    async def begin(self, now_ms: int) -> None:
        """Declare the schedules. Firings count from `now_ms` on."""
        self._now = now_ms
        await self._declare()

    async def advance(self, ms: int) -> None:
        """Let `ms` pass: enqueue the firings of that time in the order of their nominal times."""
        since, self._now = self._now, self._now + ms
        await self._declare()
        rows = {row.name: row for row in (await all_schedules(self._client.ask, self._keys))[0]}
        known = self._declarations.schedules
        self._found = {
            name: _Found(row, effective(name, known[name].encode() if name in known else row.definition, row.override))
            for name, row in rows.items()
            if (name in known or row.version) and not row.paused and row.ended is None
        }
        firings = [(at, name) for name, found in self._found.items() for at in found.between(since, self._now)]
        fired: dict[str, int] = {}
        for nominal, name in sorted(firings):
            self._pending.setdefault(name, []).append(nominal)
            if await self._fire(self._found[name]):
                fired[name] = nominal
        ticks = [found.tick(fired.get(name), self._now) for name, found in self._found.items()]
        for start in range(0, len(ticks), ops.SCHEDULES_AT_ONCE):
            page = [tick for tick in ticks[start : start + ops.SCHEDULES_AT_ONCE] if tick is not None]
            await self._client.ask(ops.tick_schedules(self._keys, page))

    async def _declare(self) -> None:
        pairs = [(each.name, each.encode()) for each in self._declarations.schedules.values()]
        for page in in_chunks(
            pairs, lambda pair: len(pair[1]), most=ops.SCHEDULES_AT_ONCE, most_bytes=ops.SCHEDULES_BYTES
        ):
            await self._client.ask(ops.declare_schedules(self._keys, page, replace=True))

    @property
    def has_pending(self) -> bool:
        """True if a firing waits for the run of an earlier one, which may have ended since."""
        return bool(self._pending)

    async def fire_pending(self) -> bool:
        """Enqueue firings whose previous run has ended. Return True if any was enqueued."""
        fired = [await self._fire(self._found[name]) for name in tuple(self._pending) if name in self._found]
        return any(fired)

    async def _fire(self, found: _Found) -> bool:
        """Enqueue the pending firings of one schedule until one has to wait. Return True if any was enqueued."""
        definition, row = found.definition, found.row
        keys = QueueKeys.of(self._client.settings.prefix, row.home or definition.queue)
        if not row.home:
            keys = await self._client.sharding.shard_of_id(keys, definition.job)
        pending, fired = self._pending.pop(definition.name), False
        for n, nominal in enumerate(pending):
            [outcome] = await fire(
                *(self._client.link_to(keys.name), keys, [(definition, nominal, row.version)]),
                judged_at=self._now,
                tracing=self._client.settings.tracing,
            )
            if outcome == "busy":
                self._pending[definition.name] = pending[n:][-MAX_PENDING:]
                break
            found.ran += outcome == "ok"
            fired = fired or outcome == "ok"
        return fired


class _Found:
    """One schedule while the clock moves. Changed only by `BenchSchedules`."""

    def __init__(self, row: ops.ScheduleRow, definition: Definition) -> None:
        self.row = row
        self.definition = definition
        self.trigger = Trigger(definition)
        self.ran = 0

    def between(self, since: int, until: int) -> list[int]:
        """Return the firings after `since` and up to `until`, without those that have no effect while no task runs."""
        until = min(until, self.definition.until_ms or until)
        left = self.definition.times - self.row.ran if self.definition.times else None
        match self.definition.overlap:
            case "skip":
                first = self.trigger.next_after(since)
                return [first] if first <= until else []
            case "cancel":
                return self.trigger.last_between(since, until, 1)
            case "queue":
                return self.trigger.last_between(since, until, MAX_PENDING)[:left]

    def tick(self, fired: int | None, now: int) -> ops.Tick | None:
        """Return what is stored of it; None: nothing has changed."""
        definition, following = self.definition, self.trigger.next_after(now)
        used_up = bool(definition.times) and self.row.ran + self.ran >= definition.times
        ended = used_up or (bool(definition.until_ms) and following > definition.until_ms)
        if fired is None and not ended:
            return None
        last, ran = self.row.last if fired is None else fired, self.ran if definition.times else None
        return ops.Tick(self.row, last, following, 0 if ended else following, fired=fired, ran=ran)


logger: logging.Logger = logging.getLogger("worqr.testing.running")  # a documented name

POLL_FIRST, POLL_LATER = 0.001, 0.02
"""Seconds between two checks of what still runs."""
LOG_AFTER: Final = 10.0
"""Seconds after which a warning names the queues that a run waits for."""
MOST_STEPS: Final = 1000
"""The most due times in one run. A handler that dispatches itself again and again exceeds it."""

QueueStates = dict[str, Inspected]
"""Every queue of a bench, by name."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The number of tasks by result, of one ``run_until_empty()``. Runs of failure handlers are not counted."""

    finished: int
    """Runs that returned."""
    failed: int
    """Tasks that moved to the dead-letter queue: they failed, could not be decoded, timed out or stalled too often, or expired.
    """
    retried: int
    """Runs after which the task is run again."""
    cancelled: int
    """Tasks that were cancelled."""


class BenchRun:
    """One call of `Bench.run_until_empty`. `options` are those of its peer.

    Raises:
        UsageError: an option does not exist or is not valid, or `only` matches no function.
    """

    def __init__(self, mesh: Mesh[Any], clock: Clock, schedules: BenchSchedules, options: JoinOptions) -> None:
        _refuse_unknown(options)
        peers_of(mesh).check_options(options)
        only = Only(options.get("only"))
        only.check(mesh.functions)
        self._mesh = mesh
        self._client = client_of(mesh)
        self._clock = clock
        self._schedules = schedules
        self._options = options
        self._served_here = {
            queue: function
            for name, function in mesh.functions.items()
            if name in only
            for queue in (name, *definition_of(function).aliases)
        }
        self._serving: set[str] = set()
        self._peer: Peer | None = None
        self._stack = AsyncExitStack()

    async def until_empty(self, *, scheduled: bool, enough: Callable[[], bool]) -> Summary:
        """Run until no task waits or runs. With `scheduled`, move the clock until nothing is scheduled, or `enough()`."""
        await self._register_foreign()
        before = after = await inspect_queues(self._client)
        if self._schedules.has_pending or any(_has_work(each, scheduled=scheduled) for each in before.values()):
            async with self._clock.stopped(), self._stack:
                after = await self._steps(scheduled=scheduled, enough=enough)
        return _summary(before, after)

    async def _register_foreign(self) -> None:
        """Register the queues of functions whose tasks another client has enqueued without registering the queue."""
        stem = f"{self._mesh.prefix}:{{"
        found = await keys_like(self._client.link, RegistryKeys(self._mesh.prefix), f"{stem}*}}")
        names = {key[len(stem) : -1] for key, _ in found} & self._served_here.keys()
        for name in names:
            self._client.link_to(name)

    async def _steps(self, *, scheduled: bool, enough: Callable[[], bool]) -> QueueStates:
        for _ in range(MOST_STEPS):
            states = await self._until_quiet()
            if enough():
                return states
            if await self._schedules.fire_pending():
                continue
            if scheduled:
                await _without_looks(self._client, states)
                states = await self._inspect()
            times = [each.next_in_ms for name, each in states.items() if self._is_served(name, each)]
            later = [ms for ms in times if ms is not None]
            if not scheduled or not later:
                return states
            await self._clock.move(min(later))
        raise UsageError(
            f"after {MOST_STEPS:,} due times something is still due: does a handler dispatch itself again? Use advance()"
        )

    async def _until_quiet(self) -> QueueStates:
        """Wait until no task waits or runs in a queue that is served. Jobs that become due are enqueued."""
        pause, log_at = POLL_FIRST, trio.current_time() + LOG_AFTER
        while True:
            states = await self._inspect()
            promoted = await promote_due_jobs(self._client, states)
            promoted = await relay_messages(self._client, states) or promoted
            busy = {name: each for name, each in states.items() if self._is_busy(name, each)}
            if not busy and not promoted:
                return states
            await self._serve(busy)
            await wake_workers(self._client, busy)
            if trio.current_time() >= log_at:
                log_at += LOG_AFTER
                busy_texts = [
                    f"{name!r}: {each.waiting} waiting, {each.running} running" for name, each in busy.items()
                ]
                emit(logger, "bench", "still waiting for %(reason)s", reason=", ".join(busy_texts))
            await trio.sleep(pause)
            pause = min(2 * pause, POLL_LATER)

    async def _inspect(self) -> QueueStates:
        """Return the states of the queues. The rates of limits with a name, which are elsewhere, hold tasks back as others do.

        They are read before: no task starts meanwhile, because no permit is held and the clock stands still.
        """
        options = {name: definition_of(self._mesh.functions[name]).options for name in sorted(self._serving)}
        waits = {
            name: max([await self._wait_of(each, each_of.cost_of(each)) for each in each_of.shared], default=0)
            for name, each_of in options.items()
        }
        states = await inspect_queues(self._client)
        for name, each in states.items():
            function = None if QueueKeys.of("", name).failures else self._served_here.get(_function_queue(name))
            wait = 0 if function is None else waits.get(function.name, 0)
            if wait and each.waiting:
                later = wait if each.next_in_ms is None else min(wait, each.next_in_ms)
                states[name] = replace(each, room=0, opens_in_ms=wait, next_in_ms=later)
        return states

    async def _wait_of(self, limit: Limit, cost: int) -> int:
        """Return in how many ms the rate of a limit with a name lets a task start; 0: at once, or when a permit goes back."""
        name = str(limit.name)
        keys, permit = LimitKeys(self._client.settings.prefix, name), random_part()
        use = None if limit.rate is None else await self._client.ask(ops.look_at_limit(keys))
        if use is None or use.held > use.expired:
            return 0
        rates = [each.rate for each in parse_limits(use.limits) if each.rate is not None]
        if all(used + cost <= rate for used, rate in zip(use.used, rates, strict=True)):
            return 0
        lease = round(LEASE * 1000)
        reply = await self._client.ask(ops.take_permits(keys, limits_text([limit], name), [permit], cost, lease))
        await self._client.ask(ops.return_permit(keys, permit, 0))
        return reply.number if reply.word == "wait" else 0

    def _is_served(self, name: str, queue: Inspected) -> bool:
        """Return True if its tasks run, now or when time makes room for them."""
        runs = queue.paused is None or queue.opens_in_ms is not None
        return runs and (bool(queue.workers) or _function_queue(name) in self._served_here)

    def _is_busy(self, name: str, queue: Inspected) -> bool:
        return queue.running > 0 or (queue.waiting > 0 and queue.room != 0 and self._is_served(name, queue))

    async def _serve(self, busy: QueueStates) -> None:
        """Serve the functions that have tasks. The first call joins the mesh."""
        names = {self._served_here[queue].name for queue in map(_function_queue, busy) if queue in self._served_here}
        new = sorted(names - self._serving)
        self._serving |= names
        if new and self._peer is None:
            options: JoinOptions = {"grace": 0, **self._options, "only": [glob.escape(name) for name in new]}
            self._peer = await self._stack.enter_async_context(self._mesh.join(**options))
        elif new and self._peer is not None:
            new_handlers = [each for name in new for each in definition_of(self._mesh.functions[name]).handlers()]
            await engine_of(self._peer).serve_all(new_handlers)


def _refuse_unknown(options: JoinOptions) -> None:
    known = ("scheduled", "raise_errors", *JoinOptions.__annotations__)
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, f"it takes {', '.join(known)}")
            raise UsageError(f"run_until_empty() has no option {name!r}; {hint}")


def _function_queue(name: str) -> str:
    """Return the queue of a function, also for the name of its failure queue."""
    return QueueKeys.of("", name).queue


async def inspect_queues(client: Client) -> QueueStates:
    """Return the state of every queue of the bench, all at one moment, so that no task is overlooked.

    A handler may use a queue for the first time, and end, after the names were read. So the queues are read again if there are
    new names.
    """
    names = await queue_names(client.ask, RegistryKeys(client.settings.prefix))
    while True:
        inspected = names
        replies = await client.link.call_all(
            [ops.inspect(QueueKeys.of(client.settings.prefix, name)) for name in inspected]
        )
        names = await queue_names(client.ask, RegistryKeys(client.settings.prefix))
        if set(names) <= set(inspected):
            return dict(zip(inspected, replies, strict=True))


async def _without_looks(client: Client, states: QueueStates) -> None:
    """Drop the times at which a leader looks for the jobs of workflows: in a bench, no end is lost."""
    for name in [name for name, each in states.items() if each.suspended]:
        await client.link.call(skip_looks(QueueKeys.of(client.settings.prefix, name)))


async def promote_due_jobs(client: Client, states: QueueStates) -> bool:
    """Enqueue the jobs that `states` shows as due. Return True if there were any."""
    ready = [name for name, each in states.items() if each.next_in_ms == 0]
    for name in ready:
        while (await client.ask(ops.promote_due(QueueKeys.of(client.settings.prefix, name))))[1] == 0:
            pass
    return bool(ready)


async def relay_messages(client: Client, states: QueueStates) -> bool:
    """Deliver the messages that `states` shows, and check the batches that are due. Return True if there were any."""
    ready = [name for name, each in states.items() if each.needs_relay]
    for name in ready:
        await relay_and_check(client.ask, client.settings.prefix, QueueKeys.of(client.settings.prefix, name))
    return bool(ready)


async def wake_workers(client: Client, states: QueueStates) -> None:
    """Wake workers of the queues that were held back by a limit or a pause, also of a lane, because the clock has moved."""
    for name, each in states.items():
        if each.waiting and (each.limits or each.lanes or each.counts.get("paused")):
            await client.ask(ops.promote_due(QueueKeys.of(client.settings.prefix, name)))


def _has_work(queue: Inspected, *, scheduled: bool) -> bool:
    later = queue.next_in_ms
    return (
        queue.needs_relay
        or queue.waiting > 0
        or queue.running > 0
        or (later is not None and (scheduled or later <= SOON_MS))
    )


def _summary(before: QueueStates, after: QueueStates) -> Summary:
    def more(*words: str) -> int:
        found = 0
        for name, now in after.items():
            was = before[name].counts if name in before else {}
            if not QueueKeys.of("", name).failures:
                found += sum(max(0, now.counts.get(word, 0) - was.get(word, 0)) for word in words)
        return found

    return Summary(more("finished"), more("failed", "undecodable"), more("retried"), more("cancelled"))
