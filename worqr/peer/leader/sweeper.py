"""`Sweeper`: gives back the claims of dead workers, queue by queue, then removes the worker. `ClaimFinder`: finds claims that no
worker holds.

The leader's checks determine which workers are dead, and whose recovery another leader left unfinished. Up to `SWEEP_AT_ONCE`
workers are recovered at the same time, in parallel with the checks. Every step may be repeated, by this leader or by another.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import QueueKeys, RegistryKeys, keys_at
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS
from worqr.peer.error_throttle import LineLimit
from worqr.peer.leader.chore import Chore, Lease
from worqr.peer.session import LEASE, ignore_outcome

logger: logging.Logger = logging.getLogger(__name__)

SWEEP_AT_ONCE = 20
QUEUES_AT_ONCE = 100
"""Queues of one worker whose tasks are given back at the same time."""
UNREACHABLE_FOR = 1.0
"""Seconds for which a queue that did not reply is not tried again, for any worker."""
KEYS_AT_ONCE = 1000
"""Keys that one request for claims looks at, which takes the server less than a millisecond."""
REQUESTS_AT_ONCE = 3
"""Such requests in one scan. A server with a million keys is looked through in 17 minutes."""
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
        """Look at some more keys of the server; on a cluster, of the nodes of these queues in turn."""
        self._queues = queues or self._queues
        if self._denied or not self._queues or time.monotonic() < self._rests_until:
            return
        try:
            for _ in range(REQUESTS_AT_ONCE):
                if not await self._look_once():
                    self._rests_until = time.monotonic() + PASS_EVERY / max(1, len(self._cursors))
                    return
        except Unavailable as error:
            text = "claims that no worker holds were not looked for: %(error)s"
            emit(logger, "adopt_claims", text, level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            text = "claims that no worker holds cannot be looked for: %(error)s"
            emit(logger, "adopt_claims", text, level=logging.DEBUG, error=str(error))

    async def _look_once(self) -> bool:
        """Send one request. Return False if it was the last one of a pass over a server."""
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
            return False
        self._servers[queue] = found.run_id
        if found.run_id == server or cursor == "0":
            self._cursors[found.run_id] = found.cursor
        await self._adopt(found.keys)
        return found.cursor != "0"

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
