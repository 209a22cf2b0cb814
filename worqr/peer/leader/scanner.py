"""`Scanner`: the leader reads the queues every 3 s, in a task of its own.

It announces queues with tasks to the heartbeats, because a wake-up may have been lost. It reports due times to the promoter, and
purges deleted tasks. It starts the recovery of workers that serve a queue but are not registered, and removes unused names.
`KnownQueues` decides which queues it reads. `ScanPoster` and `HistorySampler` store what it has found. `UnservedQueueReporter`
logs queues that have tasks and no worker. A long scan delays neither checks nor recoveries.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from binascii import crc32
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio

from worqr import ops
from worqr.client.inspection import merge_queue_info, worker_info
from worqr.errors import QueueFull, Unavailable, WorqrError, did_you_mean
from worqr.history_records import FROM_ZERO, Record, state_of
from worqr.keys import QueueKeys, RegistryKeys, keys_at
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.mesh_records import (
    MeshInfo,
    QueueInfo,
    QueuePlaces,
    WorkerInfo,
    apps_of,
    encode_snapshot,
    is_in_use,
    most_active,
    unhealthy_of,
    unreadable_of,
)
from worqr.ops import FORGET_AT_ONCE, MAX_ITEMS, NOTE_EVERY, UNUSED_MS, Inspected
from worqr.peer.error_throttle import LineLimit
from worqr.peer.leader.chore import Chore, Lease
from worqr.peer.session import LEASE, ignore_outcome
from worqr.stored_values import as_bytes
from worqr.validation import from_ms

if TYPE_CHECKING:
    from worqr.peer.leader.leader import DueJobPromoter

# `Sweeper`: gives back the claims of dead workers, queue by queue, then removes the worker. `ClaimFinder`: finds claims that
# no worker holds.
#
# The leader's checks determine which workers are dead, and whose recovery another leader left unfinished. Up to
# `SWEEP_AT_ONCE` workers are recovered at the same time, in parallel with the checks. Every step may be repeated, by this
# leader or by another.

logger: logging.Logger = logging.getLogger(__name__)

SWEEP_AT_ONCE = 20
QUEUES_AT_ONCE = 100
"""Queues of one worker whose tasks are given back at the same time."""
UNREACHABLE_FOR = 1.0
"""Seconds for which a queue that did not reply is not tried again, for any worker."""
KEYS_AT_ONCE = 10_000
"""Keys that one request for claims looks at, which takes the server about three milliseconds."""
PAGE_EVERY = 10.0
"""Seconds between two such requests to a server. One with a million keys is looked through in 20 minutes."""
CLAIM_AGE = 60.0
"""Seconds. A younger claim that no worker holds is not looked for: most runs have ended by then."""
PASS_EVERY = 20.0
"""Seconds between two passes over all keys of a server. So a leader with little to do sends hardly any requests for it."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries of a recovery that the server refuses, at most."""


class Sweeper(Chore):
    """Recovers dead workers while this peer leads. Changed only in the loop."""

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease) -> None:
        super().__init__(link, keys, lease, logger)
        self._todo: dict[str, tuple[bytes | None] | None] = {}
        self._under_way: set[str] = set()
        self._later: dict[str, tuple[float, float]] = {}
        self._unreachable_until: dict[str, float] = {}
        self._dead = LineLimit(logger, "condemn_worker", "%(count)d more workers are dead; `worqr log` lists them")
        self._removed = LineLimit(logger, "forget_worker", "%(count)d more dead workers were removed")
        self._given_back = LineLimit(logger, "fail_worker", "%(count)d more lines about dead workers were left out")
        self._more = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def recover(self, dead: Iterable[tuple[str, bytes | None]], dying: Iterable[str]) -> None:
        """Recover these workers. First condemn the `dead`, each with its last known heartbeat."""
        for each in (self._dead, self._removed, self._given_back):
            each.sum_up()
        for worker, seen in dead:
            if worker not in self._under_way:
                self._todo[worker] = (seen,)
        now, dying = time.monotonic(), set(dying)
        for worker in self._later.keys() - dying:
            del self._later[worker]
        for worker in dying:
            if worker not in self._under_way and self._later.get(worker, (0.0, 0.0))[0] <= now:
                self._todo.setdefault(worker, None)
        if self._todo:
            self._more.set()

    async def sweep_forever(self) -> None:
        """Recover workers in the order in which they are taken."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._more.wait()
                self._more = trio.Event()
                self._start_next(nursery)

    async def sweep_once(self) -> None:
        """Recover the workers that were taken."""
        async with trio.open_nursery() as nursery:
            self._start_next(nursery)

    def _start_next(self, nursery: trio.Nursery) -> None:
        for worker, seen in list(islice(self._todo.items(), SWEEP_AT_ONCE - len(self._under_way))):
            del self._todo[worker]
            self._under_way.add(worker)
            if self._idle.is_set():
                self._idle = trio.Event()
            nursery.start_soon(self._sweep_then_next, nursery, worker, seen)

    async def _sweep_then_next(self, nursery: trio.Nursery, worker: str, seen: tuple[bytes | None] | None) -> None:
        """Recover one worker, then start with the next."""
        try:
            await self._try_sweep(worker, seen)
        finally:
            self._under_way.discard(worker)
            if not self._lease.held:
                self._todo.clear()
            if not self._under_way and not self._todo:
                self._idle.set()
        self._start_next(nursery)

    async def stop(self) -> None:
        """Start no further recovery, and return when those under way have ended."""
        self._todo.clear()
        if self._under_way:
            await self._idle.wait()

    async def _try_sweep(self, worker: str, seen: tuple[bytes | None] | None) -> None:
        try:
            if seen is None or await self._condemn(worker, seen[0]):
                await self._sweep(worker)
        except Unavailable as error:  # the link has logged it; the next check finds the worker again
            text = "worker %(worker)s is dead and was not removed, trying again: %(error)s"
            emit(logger, "forget_worker", text, level=logging.DEBUG, worker=worker, error=str(error))
        except WorqrError as error:
            self._postpone(worker)
            text = "a dead worker cannot be removed, trying again: %(error)s"
            self._throttle.error("registry", "forget_worker", text, error=str(error))

    async def _condemn(self, worker: str, seen: bytes | None) -> bool:
        reason = "its heartbeat key has expired" if seen is None else "its heartbeat does not change any more"
        if await self._ask(ops.condemn_worker(self._keys, worker, seen, text=reason)) != "ok":
            return False
        text = "worker %(worker)s is dead, because %(reason)s; its tasks are given back"
        self._dead.emit(text, worker=worker, reason=reason)
        return True

    async def _sweep(self, worker: str) -> None:
        """Give back all claims of a dead worker, then remove it. Steps that fail are tried again later."""
        seen: set[str] = set()
        refused: list[str] = []
        returned = Counter[str]()
        while mapped := await self._ask(ops.forget_worker(self._keys, worker)):
            todo = [queue for queue in mapped if queue not in seen]
            if not todo:
                if refused:
                    self._postpone(worker)
                return
            seen.update(todo)
            for start in range(0, len(todo), QUEUES_AT_ONCE):
                async with trio.open_nursery() as nursery:
                    for queue in todo[start : start + QUEUES_AT_ONCE]:
                        nursery.start_soon(self._sweep_queue, worker, queue, refused, returned)
        self._later.pop(worker, None)
        self._removed.emit("worker %(worker)s was removed; all that it held was given back", worker=worker)
        text = f"{returned['given']} tasks given back, {returned['aside']} moved to a dead-letter queue"
        note = ops.note_event(self._keys, "recovered", worker=worker, count=returned.total(), text=text)
        self._link.post(note, ignore_outcome, patience=LEASE)

    def _postpone(self, worker: str) -> None:
        _, pause = self._later.get(worker, (0.0, 0.5))
        self._later[worker] = (time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE))

    async def _sweep_queue(self, worker: str, queue: str, refused: list[str], returned: Counter[str]) -> None:
        """Recover one queue of a dead worker. A queue whose node is unavailable delays no other queue."""
        if self._unreachable_until.get(queue, 0.0) > time.monotonic():
            return
        keys, given, aside = self._queue(queue), 0, 0
        try:
            while True:
                step = await self._ask_queue(ops.fail_worker(keys, worker))
                given, aside = given + step.requeued, aside + step.dead_lettered
                if not step.more:
                    break
            self._log_given_back(worker, queue, given, aside)
            returned.update(given=given, aside=aside)
            await self._ask(ops.unmap_work(self._keys, worker, queue))
        except Unavailable as error:
            self._unreachable_until[queue] = time.monotonic() + UNREACHABLE_FOR
            text = "worker %(worker)s is dead, queue %(queue)r cannot be reached, trying again: %(error)s"
            self._given_back.emit(text, worker=worker, queue=queue, error=str(error))
        except WorqrError as error:
            refused.append(queue)
            text = "the tasks of dead workers on queue %(queue)r cannot be given back, trying again: %(error)s"
            self._throttle.error(queue, "fail_worker", text, queue=queue, error=str(error))
        else:
            self._unreachable_until.pop(queue, None)
            self._throttle.resolve(queue)

    def _log_given_back(self, worker: str, queue: str, returned: int, failed: int) -> None:
        """Log the outcome for a dead worker's tasks, as an error if some of them are not tried again."""
        text = "worker %(worker)s is dead: %(returned)d tasks were given back to queue %(queue)r"
        if not failed:
            self._given_back.emit(text, worker=worker, queue=queue, returned=returned, failed=failed)
            return
        text += ", %(failed)d moved to its dead-letter queue, because too many workers died with them: worqr failed %(queue)r"
        fields = {"worker": worker, "queue": queue, "returned": returned, "failed": failed}
        emit_fields(logger, "fail_worker", text, fields, level=logging.ERROR)


class ClaimFinder(Chore):
    """Finds claims that no worker holds, while this peer leads. Changed only in the loop.

    Every script that makes a claim puts it into the set of its worker. So such a claim is left over when another program, or the
    eviction of keys, has removed a set. Claims are looked for among the names of all keys, because nothing else names them.

    In one step, the server checks that no worker holds a claim, and gives it to a worker id that is never registered. That id is
    declared dead, and its claims are recovered like those of any dead worker. If the leader dies first, the next scan finds it.
    """

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease) -> None:
        super().__init__(link, keys, lease, logger)
        self._claim_key = re.compile(rf"({re.escape(keys.prefix)}:{{[^{{}}]*}}(?:-shard)?(?:-fail)?):claim:(\d+)")
        self._queues: Sequence[str] = ()
        self._turn = 0
        self._cursors: dict[str, str] = {}
        self._servers: dict[str, str] = {}
        self._rests_until = 0.0
        self._denied = False

    def begin(self) -> None:
        """This peer leads now: look at once, and ask again what the server refused when it led before."""
        self._denied, self._rests_until = False, 0.0

    async def look(self, queues: Sequence[str]) -> None:
        """Look at some more keys of the server; on a cluster, of the nodes of these queues."""
        self._queues = queues or self._queues
        if self._denied or not self._queues or time.monotonic() < self._rests_until:
            return
        if not self._link.settings.clustered:
            self._queues = self._queues[:1]  # any queue names the server
        try:
            for _ in range(max(1, len(self._cursors))):
                if not self._denied:
                    await self._look_once()
        except Unavailable as error:
            text = "claims that no worker holds were not looked for: %(error)s"
            emit(logger, "adopt_claims", text, level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            text = "claims that no worker holds cannot be looked for: %(error)s"
            emit(logger, "adopt_claims", text, level=logging.DEBUG, error=str(error))
        else:
            self._rest()

    def _rest(self) -> None:
        """Forget servers that are no longer asked, and wait: longer after a whole pass."""
        self._servers = {queue: self._servers[queue] for queue in self._queues if queue in self._servers}
        asked = set(self._servers.values())
        self._cursors = {server: cursor for server, cursor in self._cursors.items() if server in asked}
        passed = all(cursor == "0" for cursor in self._cursors.values())
        self._rests_until = time.monotonic() + (PASS_EVERY if passed else PAGE_EVERY)

    async def _look_once(self) -> None:
        self._turn += 1
        queue = self._queues[self._turn % len(self._queues)]
        server = self._servers.get(queue, "")
        keys, cursor = self._queue(queue), self._cursors.get(server, "0")
        call = ops.find_claims(keys, cursor, KEYS_AT_ONCE, round(CLAIM_AGE * 1000))
        found = await self._ask_queue(call)
        if found is None:
            self._denied = True
            text = "claims that no worker holds are not looked for, because the user may not: add +scan to its rights"
            emit(logger, "adopt_claims", text, level=logging.INFO)
            return
        self._servers[queue] = found.run_id
        if found.run_id == server:
            self._cursors[server] = found.cursor
        else:
            self._cursors.setdefault(found.run_id, found.cursor if cursor == "0" else "0")
        await self._adopt(found.keys)

    async def _adopt(self, names: Iterable[str]) -> None:
        """Give those of these claims that no worker holds to an id of their own."""
        claims: defaultdict[str, set[int]] = defaultdict(set)
        for name in names:
            if parts := self._claim_key.fullmatch(name):
                claims[parts[1]].add(int(parts[2]))
        if not claims:
            return
        look = await self._ask(ops.look_at_workers(self._keys))
        for base, some in claims.items():
            keys, unchecked = keys_at(self._keys.prefix, base), sorted(some)
            for start in range(0, len(unchecked), MAX_ITEMS):
                await self._adopt_some(keys, [*look.beats, *look.dying], unchecked[start : start + MAX_ITEMS])

    async def _adopt_some(self, keys: QueueKeys, known: Sequence[str], claims: Sequence[int]) -> None:
        worker = f"lost-claims:{secrets.token_hex(8)}"
        adopted = await self._ask_queue(ops.adopt_claims(keys, worker, known, claims))
        if adopted:
            text = "queue %(queue)r: no worker holds %(count)d tasks that were taken; they are given back"
            emit(logger, "adopt_claims", text, queue=keys.display_name, count=adopted)
            ready = ops.adopt_worker(self._keys, worker, keys.name)
            await self._ask(ready)


# `Scanner`: the leader reads the queues every 3 s, in a task of its own.

# `HistorySampler`: lets the server store the history of the busiest queues, while this peer leads.
#
# It has a task of its own, so that no other chore of the leader waits for it. While no queue changes, it sends nothing.
# `ChangedQueues` decides which queues get a record, and `worqr.history_records` documents what a record is. Here: which queues
# have a history. Two leaders at once do no harm: what a record holds is read in the server.


# `ChangedQueues`: decides which queues get a new record in their history. No input or output.
#
# A queue gets a record at most once a minute, and only if its totals or the numbers of its tasks have changed. Each queue has a
# second of its own in every minute, so that the records of all queues are spread over it. A queue that changes after a rest
# gets its record at once. After the last change, one more record follows, because workers report run times a second late.


SPREAD: Final = 48
"""Seconds of each minute in which records are due. A late scan in the rest of the minute is not too late."""
HALF_LIFE: Final = 5
"""Minutes after which the activity of a queue counts half."""


class _Seen:
    """What the scans saw of one queue.

    Attributes:
        since: for its next record: the minute in or after which its totals changed.
        written: the minute of its last record; 0: this leader has stored none.
    """

    __slots__ = ("_active", "_activity", "_known", "_looked", "_state", "_total", "_trailing", "since", "written")

    def __init__(self, total: int) -> None:
        self.since: int = 0
        self.written: int = 0
        self._looked: bool = False
        self._known: int | None = None
        self._state: int = 0
        self._trailing: bool = False
        self._total: int = total
        self._activity: float = 0.0
        self._active: int = 0

    def look(self, state: int, total: int, minute: int, *, at_rest: bool) -> None:
        """Store what a scan has seen. `at_rest`: the queue is not in use, so the first scan need not lead to a record."""
        if not self.written and not total:
            self._known, self.since = state, minute | FROM_ZERO
        elif not self._looked and at_rest:
            self._known = state
        elif state == self._known and self.written:
            self.since = minute
        if total != self._total:
            self._activity = self.activity(minute) + max(0, total - self._total)
            self._total, self._active = total, minute
        self._state, self._looked = state, True

    def is_due(self, minute: int, second: int, own_second: int) -> bool:
        """Return True if the queue should get a record now."""
        if minute == self.written or not (self._trailing or self._state != self._known):
            return False
        return second >= own_second or self.written < minute - 1

    def store(self, state: int, minute: int) -> None:
        """A record with this state was stored."""
        self._trailing = state != self._known
        self._known = state
        self.written = self.since = minute

    def begin(self) -> None:
        """The queue needs a first record of this leader."""
        self._known = None

    def activity(self, minute: int) -> float:
        """Return how much has happened in the queue; what happened earlier counts less."""
        return self._activity * math.pow(0.5, max(0, minute - self._active) / HALF_LIFE)


class ChangedQueues:
    """The queues that scans have seen. Changed only in the loop.

    Attributes:
        minute: the server's time at the last scan, in minutes since 1970.
    """

    def __init__(self) -> None:
        self.minute: int = 0
        self._seen: dict[str, _Seen] = {}
        self._due: dict[str, float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def clear(self) -> None:
        """Forget everything: another leader may have stored records since."""
        self._seen.clear()
        self._due.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        for name in names:
            self._seen.pop(name, None)
            self._due.pop(name, None)

    def record(
        self, found: Mapping[str, Inspected], server_ms: int, age: Callable[[str, Inspected], float | None]
    ) -> None:
        """Store what a scan has found.

        Args:
            found: the queues that the scan has read.
            server_ms: the server's time.
            age: estimates for how many seconds the oldest task has waited.
        """
        self.minute, ms = divmod(server_ms, 60_000)
        for name, queue in found.items():
            numbers = state_of(
                queue.counts, *(queue.waiting, queue.due, queue.running, queue.failed, len(queue.workers))
            )
            total = sum(queue.counts.values())
            if (seen := self._seen.get(name)) is None:
                seen = self._seen[name] = _Seen(total)
            seen.look(hash(numbers), total, self.minute, at_rest=not (queue.waiting or queue.workers))
            if seen.is_due(self.minute, ms // 1000, crc32(as_bytes(name)) % SPREAD):
                self._due[name] = age(name, queue)

    def take_due(self) -> dict[str, float | None]:
        """Return the queues that should get a record now, the most active first, with the ages of their oldest tasks."""
        due, self._due = self._due, {}
        return dict(sorted(due.items(), key=lambda item: -self.activity(item[0])))

    def since(self, name: str) -> int:
        """Return the minute in or after which the totals of the queue have changed, as a record has it."""
        seen = self._seen.get(name)
        return 0 if seen is None else seen.since

    def written(self, name: str) -> int:
        """Return the minute of the last record that this leader has stored of the queue; 0 if there is none."""
        seen = self._seen.get(name)
        return 0 if seen is None else seen.written

    def store(self, name: str, record: Record) -> None:
        """A record of the queue was stored."""
        if (seen := self._seen.get(name)) is not None:
            seen.store(hash(record.state), record.minute)

    def begin(self, names: Iterable[str]) -> None:
        """These queues have a history, which an earlier leader has written: store a record of each, for the differences."""
        for name in names:
            if (seen := self._seen.get(name)) is not None and not seen.written:
                seen.begin()

    def activity(self, name: str) -> float:
        """Return how much has happened in the queue lately."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else seen.activity(self.minute)


NOTE_HISTORY_EVERY: Final = 5
"""Minutes between two notes that a queue has a history."""
AT_REST: Final = 2 * NOTE_HISTORY_EVERY
"""Minutes without a note after which a busier queue may take the place of a queue."""
BUSIER: Final = 2.0
"""How much busier a queue must be to take the place of one that is not at rest."""


class HistorySampler(Chore):
    """Stores records of queues that have changed. Changed only in the loop.

    `limit`: how many queues have a history; 0: none.
    """

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, limit: int) -> None:
        super().__init__(link, keys, lease, logger)
        self._limit = limit
        self._changed = ChangedQueues()
        self._noted: dict[str, int] | None = None
        self._soon = trio.Event()

    def begin(self) -> None:
        """This peer leads now: forget what it knew when it led before."""
        self._changed.clear()
        self._noted = None

    def forget(self, names: Sequence[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        self._changed.forget(names)

    def record(
        self, found: Mapping[str, Inspected], server_ms: int, age: Callable[[str, Inspected], float | None]
    ) -> None:
        """Take over what a scan has found; see `ChangedQueues.record`."""
        if self._limit:
            self._changed.record(found, server_ms, age)
            if self._changed or (self._noted is None and any(queue.counts for queue in found.values())):
                self._soon.set()

    async def sample_forever(self) -> None:
        """Store records whenever some are due."""
        while True:
            await self._soon.wait()
            self._soon = trio.Event()
            await self._try_sample()

    async def _try_sample(self) -> None:
        try:
            await self.sample_once()
        except (Unavailable, QueueFull) as error:  # the link has logged it, or the server is out of memory
            self._log(error)
        except WorqrError as error:
            self._throttle.error("note", "leader", "the history cannot be stored: %(error)s", error=str(error))

    def _log(self, error: WorqrError) -> None:
        text = "the history was not stored: %(error)s"
        emit(logger, "leader", text, level=logging.DEBUG, error=str(error))

    async def sample_once(self) -> None:
        """Store the records that are due."""
        due = self._changed.take_due()
        if self._noted is None:
            self._noted = await self._note()
            self._changed.begin(self._noted)
        created = await self._admit([name for name in due if name not in self._noted])
        for name, age in due.items():
            if name in (self._noted or {}) and self._lease.held:  # `begin` may run between two requests
                await self._sample(name, age, create=name in created)

    async def _sample(self, name: str, age: float | None, *, create: bool) -> None:
        keys, since = self._queue(name), self._changed.since(name)
        age_ms = None if age is None else round(age * 1000)
        try:
            record = await self._ask(ops.sample_queue(keys, create=create, since=since, age_ms=age_ms))
        except Unavailable as error:
            self._log(error)
        except QueueFull:
            raise
        except WorqrError as error:
            text = "the history of queue %(queue)r cannot be stored: %(error)s"
            self._throttle.error(name, "leader", text, queue=name, error=str(error))
        else:
            if record is None:  # it was deleted, or a leader before did not come to begin it
                self._noted = await self._note(dropped=name)
            else:
                self._changed.store(name, record)

    # Which queues have a history

    async def _note(self, *names: str, dropped: str = "") -> dict[str, int]:
        return await self._ask(ops.note_histories(self._keys, names, dropped=dropped))

    async def _admit(self, new: list[str]) -> set[str]:
        """Give queues a history, the most active first. Return their names."""
        noted = self._noted or {}
        if len(noted) > self._limit or (len(noted) == self._limit and new and self._may_replace(new[0], noted)):
            noted = await self._drop(self._least_needed(noted))
        admitted = new[: max(0, self._limit - len(noted))]
        again = [name for name, minute in noted.items() if minute <= self._changed.minute - NOTE_HISTORY_EVERY]
        again = [name for name in again if self._changed.written(name) > noted[name]]
        if admitted or again:
            noted = await self._note(*admitted, *again)
        self._noted = noted
        return set(admitted)

    def _least_needed(self, noted: Mapping[str, int]) -> str:
        """Return the queue that was noted longest ago if it is at rest, else the least active one."""
        oldest = min(noted, key=lambda name: noted[name])
        return oldest if self._at_rest(noted[oldest]) else min(noted, key=self._changed.activity)

    def _at_rest(self, minute: int) -> bool:
        return minute < self._changed.minute - AT_REST

    def _may_replace(self, name: str, noted: Mapping[str, int]) -> bool:
        """Return True if the queue may take the place of another one."""
        other = self._least_needed(noted)
        return self._at_rest(noted[other]) or self._changed.activity(name) > BUSIER * self._changed.activity(other)

    async def _drop(self, name: str) -> dict[str, int]:
        """Delete the history of a queue before it is noted, so that none is left over."""
        await self._ask(ops.drop_history(self._queue(name)))
        return await self._note(dropped=name)


# `ScanPoster`: tells the mesh what the leader's scan has found.
#
# Queues with waiting tasks are announced to every heartbeat. While a program reads snapshots of the mesh, the leader also
# stores them. Then it keeps what the last scans have found, because a scan reads only a part of the queues at rest. `scanner`
# decides which queues a scan reads, and `worqr.mesh_records` how a snapshot is stored.


WORKERS_EVERY: Final = 15.0
"""Seconds between two reads of all workers, if they take several requests."""
AT_ONCE: Final = 200
"""Queues that are added up before other tasks of the loop have their turn."""


class ScanPoster(Chore):
    """Posts scans while this peer leads. Changed only in the loop.

    Attributes:
        watched: a program read a snapshot less than 30 s before the last scan.
        history: stores the history of queues.
    """

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, history: HistorySampler) -> None:
        super().__init__(link, keys, lease, logger)
        self.watched: bool = False
        self.history: HistorySampler = history
        self._posted = False
        self._queues: dict[str, Inspected] = {}
        self._places: dict[str, QueuePlaces] = {}
        self._workers: list[WorkerInfo] = []
        self._leader = ""
        self._read_workers_at = 0.0

    def begin(self) -> None:
        """This peer leads now: forget what it found when it led before."""
        self.watch(False)
        self._places.clear()
        self.history.begin()

    def watch(self, watched: bool) -> bool:
        """Store whether a program reads snapshots. Return True if that is new: then all queues have to be read."""
        begins = watched and not self.watched
        if not watched:
            self._queues.clear()
            self._workers.clear()
        self.watched = watched
        return begins

    def record(self, found: Mapping[str, Inspected], server_ms: int) -> None:
        """Keep what a scan has found, for snapshots and for the history. The samples for ages are kept always."""
        now = time.monotonic()
        for name, queue in found.items():
            if queue.waiting or queue.workers:
                if (places := self._places.get(name)) is None:
                    places = self._places[name] = QueuePlaces()
                places.record(now, queue.waiting, queue.running, queue.counts)
            else:
                self._places.pop(name, None)
        self.history.record(found, server_ms, lambda name, queue: self._estimate(name, queue, now))
        if self.watched:
            self._queues.update(found)
            for name in [name for name, queue in found.items() if is_empty(queue)]:
                del self._queues[name]

    def forget(self, names: Sequence[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        self.history.forget(names)
        for name in names:
            self._queues.pop(name, None)
            self._places.pop(name, None)

    async def post(self, waiting: Sequence[str], *, complete: bool, server_ms: int, refused: Mapping[str, str]) -> None:
        """Announce the queues that wait, and store a snapshot if programs read them and all queues were read.

        `refused`: the queues that the server refuses to read, and its words.
        """
        snapshot = await self._snapshot(server_ms, refused) if self.watched and complete else b""
        if waiting or self._posted or snapshot:
            await self._ask(ops.post_scan(self._keys, waiting, snapshot))
            self._posted = bool(waiting)

    async def _snapshot(self, server_ms: int, refused: Mapping[str, str]) -> bytes:
        await self._read_workers()
        named, left_out, others = most_active(await self._infos())
        info = MeshInfo(
            at=from_ms(server_ms),
            source="leader",
            age=0.0,
            leader=self._leader,
            queues=named,
            queues_left_out=left_out,
            others=others,
            apps=apps_of(self._workers),
            unhealthy=unhealthy_of(self._workers),
            unreadable=unreadable_of(refused),
        )
        return encode_snapshot(info)

    async def _infos(self) -> list[QueueInfo]:
        """The queues, all shards of each as one."""
        shards: dict[str, list[tuple[Inspected, float | None]]] = {}
        now = time.monotonic()
        for name, queue in self._queues.items():
            estimate = self._estimate(name, queue, now)
            shards.setdefault(QueueKeys.of("", name).display_name, []).append((queue, estimate))
        found: list[QueueInfo] = []
        for n, (name, parts) in enumerate(shards.items(), 1):
            info = merge_queue_info(name, [queue for queue, _ in parts], [estimate for _, estimate in parts])
            if is_in_use(info):  # a queue may hold deleted tasks only
                found.append(info)
            if n % AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return found

    def _estimate(self, name: str, queue: Inspected, now: float) -> float | None:
        """Estimate the age of the oldest task, unless the server knows it."""
        places = self._places.get(name)
        return None if places is None or queue.oldest_ms is not None else places.age(now)

    async def _read_workers(self) -> None:
        """Read the workers: all that one request returns each time, and larger numbers at intervals."""
        if len(self._workers) >= ops.WORKERS_AT_ONCE and time.monotonic() - self._read_workers_at < WORKERS_EVERY:
            return
        found: dict[str, WorkerInfo] = {}
        cursors = [""]
        while cursors:  # one page after the other: no caller waits
            page = await self._ask(ops.list_workers(self._keys, cursors[0]))
            found.update((row.worker, worker_info(row, page.leader)) for row in page.rows)
            self._leader, cursors = page.leader, page.cursors
        self._workers, self._read_workers_at = list(found.values()), time.monotonic()


# `QueueInspector`: reads the queues of the mesh for a scan, many at a time, and removes their deleted tasks.
#
# On a cluster, the node of some queues may be unavailable. Their names are kept, so that they do not delay the other queues
# again.


INSPECT_AT_ONCE = 100
"""Queues per round trip."""
PURGES = 10
"""Batches of the deleted tasks of a queue that one scan removes, if the program that deleted them does not: it may have ended."""


TRIM_EVERY = 3600.0
"""Seconds between two looks at the kept jobs of a queue: their records expire by themselves."""


class QueueInspector(Chore):
    """Reads queues. Changed only in the loop.

    Attributes:
        unreachable: names of queues whose node did not reply.
        refused: names of queues that the server refuses to read, and its words.
    """

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, known: KnownQueues) -> None:
        super().__init__(link, keys, lease, logger)
        self.unreachable: set[str] = set()
        self.refused: dict[str, str] = {}
        self._known = known
        self._trimmed: dict[str, float] = {}

    def begin(self) -> None:
        """This peer leads now: forget what the server refused when it led before."""
        self.refused.clear()

    async def inspect_all(self, names: Sequence[str]) -> dict[str, Inspected]:
        """Inspect these queues. The result lacks queues that cannot be read."""
        away = frozenset(self.unreachable)
        found = await self._inspect_some([name for name in names if name not in away])
        if away:  # try some unreachable queues; if one replies, try all of them in the next scan
            again = await self._inspect_some([name for name in names if name in away][:INSPECT_AT_ONCE])
            found |= again
            if again:
                self.unreachable -= away
        return found

    async def _inspect_some(self, names: Sequence[str]) -> dict[str, Inspected]:
        found: dict[str, Inspected] = {}
        for start in range(0, len(names), INSPECT_AT_ONCE):
            some = names[start : start + INSPECT_AT_ONCE]
            async with trio.open_nursery() as nursery:
                for name in some:
                    nursery.start_soon(self._inspect, name, found)
            if self.unreachable.issuperset(some):
                break  # the server does not reply, or a node of many queues
        return found

    async def _inspect(self, name: str, found: dict[str, Inspected]) -> None:
        try:
            found[name] = await self.inspect(name)
        except Unavailable as error:
            self.unreachable.add(name)
            emit(logger, "leader", "queue %(queue)r was not scanned: %(error)s", queue=name, error=str(error))
        except WorqrError as error:
            self._known.mark_read(name)
            self.refused[name] = str(error)
            text = "queue %(queue)r cannot be scanned: %(error)s"
            self._throttle.error(name, "leader", text, queue=name, error=str(error))
        else:
            self._known.mark_read(name)
            self._throttle.resolve(name)
            self.refused.pop(name, None)

    async def inspect(self, name: str) -> Inspected:
        """Inspect one queue."""
        return await self._ask_queue(ops.inspect(self._queue(name)))

    async def purge(self, name: str) -> None:
        """Remove some of the deleted tasks of a queue, or log why that failed."""
        try:
            for _ in range(PURGES):
                if not await self._ask_queue(ops.purge_queue(self._queue(name))):
                    return
        except Unavailable as error:
            emit(logger, "purge_queue", "queue %(queue)r: trying again: %(error)s", queue=name, error=str(error))
        except WorqrError as error:
            text = "queue %(queue)r: the server refuses to remove it, trying again: %(error)s"
            self._throttle.error(("purge", name), "purge_queue", text, queue=name, error=str(error))

    async def trim(self, name: str, now: float) -> None:
        """Once an hour, remove entries of kept jobs that have expired, or log why that failed."""
        if now - self._trimmed.get(name, -TRIM_EVERY) < TRIM_EVERY:
            return
        self._trimmed[name] = now
        try:
            for _ in range(PURGES):
                if not await self._ask_queue(ops.trim_kept(self._queue(name))):
                    return
        except WorqrError as error:
            text = "queue %(queue)r: kept jobs that have expired stay listed for another hour: %(error)s"
            self._throttle.error(("trim", name), "purge_queue", text, queue=name, error=str(error))


# `KnownQueues`: which queues the leader's next scan reads. Pure: no I/O, and no clock except the times it is given.
#
# Each scan reads the queues that may need the leader soon: served queues, queues with scheduled or deleted tasks, and recently
# noted queues. The other names take turns, a few per scan, so that the cost does not grow with the number of names. A name may
# be forgotten when it was noted an hour ago and its queue is empty.


FRESH = 30.0
"""Seconds for which each scan reads a name after it was noted, because a worker notes a queue before it serves it."""
FRESH_AT_ONCE = 2000
"""Limit of such names per scan, so that a scan ends soon. If more names were noted, they take turns."""
UNSEEN_AT_ONCE = 2000
QUIET_AT_ONCE = 200
MAX_WAITING = 100
"""Limit of queues that are announced to heartbeats."""


class KnownQueues:
    """The names of queues that the leader has read.

    Attributes:
        noted: for each name, the server's time in ms at which it was noted last.
    """

    def __init__(self) -> None:
        self.noted: dict[str, float] = {}
        self._urgent: dict[str, None] = {}
        self._fresh: dict[str, float] = {}
        self._unseen: dict[str, None] = {}
        self._rotation: Iterator[str] = iter(())
        self._announced = 0

    @property
    def unseen(self) -> int:
        """How many names have not been read yet."""
        return len(self._unseen)

    def note(self, name: str, noted_ms: float, server_ms: float, now: float) -> None:
        """Store that `name` was noted at `noted_ms`."""
        if self.noted.get(name) == noted_ms:
            return
        self.noted[name] = noted_ms
        self._unseen[name] = None
        if noted_ms > server_ms - FRESH * 1000:
            self._fresh[name] = now + FRESH

    def rescan(self, server_ms: float) -> None:
        """Read all queues in use once more, because hints about due jobs may have been missed."""
        since = server_ms - (NOTE_EVERY + 60) * 1000
        self._unseen.update((name, None) for name, noted_ms in self.noted.items() if noted_ms >= since)

    def reread(self) -> None:
        """Read all queues once more, soon."""
        self._unseen.update(dict.fromkeys(self.noted))

    def next_scan(self, now: float) -> list[str]:
        """Return the names that the next scan reads."""
        for name in [name for name, until in self._fresh.items() if until < now]:
            del self._fresh[name]
        fresh = list(islice(self._fresh, FRESH_AT_ONCE))
        if len(fresh) == FRESH_AT_ONCE:
            for name in fresh:
                self._fresh[name] = self._fresh.pop(name)
        names = {**self._urgent, **dict.fromkeys(fresh), **dict.fromkeys(islice(self._unseen, UNSEEN_AT_ONCE))}
        left = QUIET_AT_ONCE
        for again in (False, True):  # the end of this rotation, then the beginning of the next
            if again:
                self._rotation = iter(list(self.noted))
            for name in self._rotation:
                if name in self.noted and name not in names:
                    names[name] = None
                    left -= 1
                    if not left:
                        return list(names)
        return list(names)

    def mark_read(self, name: str) -> None:
        """Store that `name` was read, with or without success."""
        self._unseen.pop(name, None)

    def record(self, name: str, queue: Inspected) -> None:
        """Store what the scan found in a queue."""
        if queue.workers or queue.running or queue.due or queue.trash or queue.batches or queue.needs_relay:
            self._urgent[name] = None
        else:
            self._urgent.pop(name, None)

    def unused(self, found: Mapping[str, Inspected], server_ms: float) -> list[str]:
        """Return the names of those `found` that may be forgotten."""
        latest = server_ms - UNUSED_MS
        return [name for name, queue in found.items() if self.noted.get(name, 0) <= latest and is_empty(queue)]

    def forget(self, names: Iterable[str]) -> None:
        """Forget these names."""
        for name in names:
            for kept in (self.noted, self._urgent, self._fresh, self._unseen):
                kept.pop(name, None)

    def waiting(self, found: Mapping[str, Inspected]) -> list[str]:
        """Return the queues that have workers and tasks that may start, because a wake-up may have been lost. If there are many,
        they take turns.

        If the limit permits, include shards that have tasks and no workers. A peer that serves other shards of the queue logs a
        warning.
        """
        names = sorted(name for name, q in found.items() if q.waiting and q.paused is None and q.room != 0)
        served = [name for name in names if found[name].workers]
        if len(served) <= MAX_WAITING:
            return (served + [name for name in names if name.startswith("{") and not found[name].workers])[:MAX_WAITING]
        start = self._announced % len(served)
        self._announced = start + MAX_WAITING
        return (served + served)[start : start + MAX_WAITING]


def is_empty(queue: Inspected) -> bool:
    """Return True if the queue is empty, no worker serves it, and no operator has paused or limited it."""
    holds = (
        queue.waiting or queue.due or queue.running or queue.failed or queue.undecodable or queue.blocked or queue.trash
    )
    holds = holds or queue.suspended or queue.kept or queue.batches or queue.needs_relay
    return not (holds or queue.workers or queue.paused is not None or queue.overridden or queue.lane_rules)


# `UnservedQueueReporter`: logs which queues have waiting tasks and no worker.
#
# It uses the results of the leader's scan, so it sends no request. It logs a queue once, when all scans of at least `GRACE`
# seconds have found tasks and no worker there. It logs the queue again only after a worker has served it.
#
# The module has no I/O except the log, and no clock except the times it is given. Not here: shards that no
# worker of their queue serves (`consumers`).


GRACE: Final = 10.0
"""Seconds for which a queue must have had no worker. A worker that restarts is back by then."""
NOTHING_MISSED: Final = 60.0
"""Seconds without a scan, because another peer led, after which logged queues are logged again."""
LINES: Final = 20
"""Queues that are named in the log in one `PERIOD`. One more line counts the others."""
PERIOD: Final = 60.0
REMEMBERED: Final = 10_000
"""Limit of queues that are kept."""
COMPARED: Final = 2000
"""Limit of pairs of names that are compared in one `PERIOD` to find a suggestion. Each takes about 20 us on the event loop."""


class UnservedQueueReporter:
    """The queues without a worker that the leader has found. Changed only in the loop."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Shards that have tasks and no worker, by name, and when that was seen first."""
        self._logged: dict[str, None] = {}
        self._last_scan = float("-inf")
        self._period_ends = float("-inf")
        self._lines = 0
        self._compared = 0
        self._left_out = 0
        self._sum_up_at = float("-inf")

    def begin(self, now: float) -> None:
        """Forget earlier findings, because this peer leads from now on. Forget logged queues if the last scan was long ago."""
        self._since.clear()
        if now - self._last_scan > NOTHING_MISSED:
            self._logged.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget these queues, which do not exist any more."""
        for name in names:
            self._since.pop(name, None)
            self._logged.pop(_shown(name), None)

    def report(self, found: Mapping[str, Inspected], now: float) -> None:
        """Process the findings of a scan, and log new ones.

        `found` holds every queue that is served, and some of the others.
        """
        self._last_scan = now
        served = dict.fromkeys(_shown(name) for name, queue in found.items() if queue.workers)
        for name in served:
            self._logged.pop(name, None)
        waiting: dict[str, int] = {}
        for name, queue in found.items():
            if queue.workers or queue.paused is not None or not queue.waiting:
                self._since.pop(name, None)
            elif self._waits_for_long(name, now) and (shown := _shown(name)) not in served:
                waiting[shown] = waiting.get(shown, 0) + queue.waiting
        self._log({name: n for name, n in waiting.items() if name not in self._logged}, served, now)

    def _waits_for_long(self, name: str, now: float) -> bool:
        since = self._since.get(name)
        if since is None:
            if len(self._since) < REMEMBERED:
                self._since[name] = now
            return False
        return now - since >= GRACE

    def _log(self, new: Mapping[str, int], served: Iterable[str], now: float) -> None:
        if now >= self._period_ends:
            self._period_ends, self._lines, self._compared = now + PERIOD, 0, 0
        for name, waiting in new.items():
            if len(self._logged) >= REMEMBERED:
                break
            self._logged[name] = None
            if self._lines < LINES:
                self._lines += 1
                known = list(islice(served, COMPARED - self._compared))
                self._compared += len(known)
                _log_one(name, waiting, known)
            else:
                self._left_out += 1
        if self._left_out and now >= self._sum_up_at:
            text = "tasks wait in %(count)d more queues and no worker serves them; `worqr queues` lists them"
            emit(logger, "queue.unserved", text, count=self._left_out)
            self._left_out, self._sum_up_at = 0, now + PERIOD


def _shown(name: str) -> str:
    """Return the queue's name without the shard."""
    return QueueKeys.of("", name).display_name if name.startswith("{") else name


def _log_one(name: str, waiting: int, known: list[str]) -> None:
    keys = QueueKeys.of("", name)
    if keys.failures:
        hint, remedy = "", f"a worker that serves {keys.queue!r} and has a failure handler for it"
    else:
        hint, remedy = did_you_mean(name, known), "a worker that declares it"
    what = "1 task waits" if waiting == 1 else f"{waiting:,} tasks wait"
    why = f"no worker serves it; {hint}" if hint else "no worker serves it."
    text = f"{what} in queue %(queue)r and {why.replace('%', '%%')} Start {remedy.replace('%', '%%')}, or delete the queue."
    emit(logger, "queue.unserved", text, queue=name, waiting=waiting)


SCAN_EVERY = 3.0
FORGET_AFTER = 60.0
"""Seconds of leading before names are forgotten: by then, workers that died long ago have been recovered."""
PAGES_AT_ONCE = 10
"""Pages of names that one scan reads."""


class Scanner(Chore):
    """Scans while this peer leads. Its data about queues is kept when the lease expires. Changed only in the loop.

    Args:
        registered: the workers that the leader's last check found.
    """

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        lease: Lease,
        due_jobs: DueJobPromoter,
        history_queues: int,
        registered: Collection[str] = (),
    ) -> None:
        super().__init__(link, keys, lease, logger)
        self._registered = registered
        self._due_jobs = due_jobs
        self._known = KnownQueues()
        self._inspector = QueueInspector(link, keys, lease, self._known)
        self._names = _QueueNameReader(link, keys, lease, self._known)
        self._unserved = UnservedQueueReporter()
        self._poster = ScanPoster(link, keys, lease, HistorySampler(link, keys, lease, history_queues))
        self._claims = ClaimFinder(link, keys, lease)
        self._began = time.monotonic()
        self._soon = trio.Event()

    @property
    def history(self) -> HistorySampler:
        """What stores the history of queues. It has a task of its own."""
        return self._poster.history

    def begin(self) -> None:
        """Scan at once, because this peer leads now."""
        self._began = time.monotonic()
        self._unserved.begin(self._began)
        self._inspector.begin()
        self._poster.begin()
        self._claims.begin()
        self._soon.set()

    def rescan(self) -> None:
        """Scan at once, because hints about due jobs may have been missed."""
        self._known.rescan(self._names.server_ms)
        self._soon.set()

    async def scan_forever(self) -> None:
        """Scan periodically while this peer leads. Many new names are read in several scans in quick succession."""
        while True:
            self._soon = trio.Event()
            began = time.monotonic()
            if self._lease.held:
                await self._try_scan()
            took = time.monotonic() - began
            with trio.move_on_after(max(took, 0.05) if self._unfinished else max(SCAN_EVERY - took, 0.5)):
                await self._soon.wait()

    @property
    def _unfinished(self) -> bool:
        return self._lease.held and (self._names.reading or self._known.unseen > len(self._inspector.unreachable))

    async def _try_scan(self) -> None:
        try:
            await self.scan_once()
        except Unavailable as error:  # the link has logged it
            emit(logger, "leader", "the queues were not scanned: %(error)s", level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            self._throttle.error("scan", "leader", "the queues cannot be scanned: %(error)s", error=str(error))
        else:
            if self._throttle.resolve("scan"):
                emit(logger, "leader", "the queues are scanned again")

    async def scan_once(self) -> None:
        """Read new names, read the queues whose turn it is, and act on them."""
        await self._names.read(PAGES_AT_ONCE)
        if self._poster.watch(self._names.watched):
            self._known.reread()
        found = await self._inspector.inspect_all(self._known.next_scan(time.monotonic()))
        for name, queue in found.items():
            self._known.record(name, queue)
            if queue.needs_relay or queue.next_in_ms is not None:
                self._due_jobs.expect(name, 0 if queue.needs_relay else (queue.next_in_ms or 0) / 1000)
        self._unserved.report(found, time.monotonic())
        self._poster.record(found, self._names.server_ms)
        waiting = self._known.waiting(found)
        server_ms, refused = self._names.server_ms, self._inspector.refused
        await self._poster.post(waiting, complete=not self._unfinished, server_ms=server_ms, refused=refused)
        for name in [name for name, queue in found.items() if queue.trash]:
            await self._inspector.purge(name)
        for name in [name for name, queue in found.items() if queue.kept]:
            await self._inspector.trim(name, time.monotonic())
        await self._claims.look(list(found))
        await self._audit({(name, worker) for name, queue in found.items() for worker in queue.workers})
        if time.monotonic() - self._began >= FORGET_AFTER:
            await self._forget(self._known.unused(found, self._names.server_ms))

    async def _audit(self, admitted: set[tuple[str, str]]) -> None:
        """Find workers that a queue has admitted and that are not registered. An id is registered once, before a queue admits it.

        So the queue is read twice: before the registry, for a worker that was just entering, and after it, for one that was just
        leaving. The leader's next check finds the adopted worker among the dead ones, and recovers it.
        """
        if all(
            worker in self._registered for _, worker in admitted
        ):  # else one of them has entered, or is not registered
            return
        look = await self._ask(ops.look_at_workers(self._keys))
        for queue, worker in admitted:
            if worker in look.beats or worker in look.dying:
                continue
            again = await self._inspector.inspect(queue)
            if worker in again.workers:
                text = "worker %(worker)s serves queue %(queue)r but is not registered; its tasks are given back"
                emit(logger, "adopt_worker", text, worker=worker, queue=queue)
                await self._ask(ops.adopt_worker(self._keys, worker, queue))

    async def _forget(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), FORGET_AT_ONCE):
            some = names[start : start + FORGET_AT_ONCE]
            gone = await self._ask(ops.forget_queues(self._keys, some))
            self._known.forget(gone)
            self._unserved.forget(gone)
            self._poster.forget(gone)


class _QueueNameReader(Chore):
    """Reads the names of queues: first all of them, then those that were noted since.

    Attributes:
        server_ms: the server's time when names were last read.
        watched: a program read snapshots of the mesh at that time.
    """

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, known: KnownQueues) -> None:
        super().__init__(link, keys, lease, logger)
        self.server_ms: int = 0
        self.watched: bool = False
        self._known = known
        self._since = 0
        self._began = 0
        self._next: tuple[bytes, bytes] | None = None

    @property
    def reading(self) -> bool:
        """The last read ended before the end of the list."""
        return self._next is not None

    async def read(self, pages: int) -> None:
        """Read the next pages, at most `pages` of them.

        The most recently noted names come first. So a read is complete when it reaches names from before the previous read began.
        """
        for _ in range(pages):
            page = await self._ask(ops.list_queues(self._keys, self._next))
            if (
                page.now_ms < self.server_ms
            ):  # the server's clock was set back, so names noted now are further down the list
                self._since = 0
            if self._next is None:
                self._began = page.now_ms
            self.server_ms, self.watched, now = page.now_ms, page.watched, time.monotonic()
            for name, noted_ms in page.names.items():
                self._known.note(name, min(noted_ms, page.now_ms), page.now_ms, now)
            ahead = [name for name, noted_ms in page.names.items() if noted_ms > page.now_ms]
            if ahead:
                await self._ask(ops.note_queues(self._keys, ahead))
            self._next = page.next
            if self._next is None or min(page.names.values()) < self._since:
                self._next, self._since = None, self._began
                return
