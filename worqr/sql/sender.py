"""`Sender`: a thread that sends the rows of an outbox: those that its process has just committed, and in a worker those left
by others.

Both ways are the same three steps, each a short transaction or request of its own: read rows without locks, send them, delete
them. Nothing is ever open in the database while a request to the server is. A row may be sent twice, and becomes one job: the
server knows it by its id (`dispatch_jobs`, option `row`) for a week, and for ten minutes after it was deleted. So no
sender sends a row more than a minute after reading it, by a clock that goes on while the machine sleeps.

A sweep holds the lease of its table and its `queues`, so that one worker does it at a time. The lease is no fence: two sweeps
would only do the same work.

The databases in memory of Django's tests are different: their connections share locks that nothing waits for. A sender that used
one beside the program would make statements of the program fail. So it sends while the thread that has committed waits for it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from worqr import ops
from worqr.client.inspection import OutboxFacts, read_outbox_facts
from worqr.client.sync import sync
from worqr.command import in_chunks
from worqr.errors import NotReplicated, QueueFull, RefusedByServer, Unavailable, UsageError, WrongVersion
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import boottime
from worqr.log_events import emit
from worqr.sql.connections import Database, Rows
from worqr.sql.statements import (
    FAILED,
    HELD,
    MAX_TRIES,
    MOST_SWEPT,
    SWEEP_ROWS,
    WAITING,
    Row,
    Statement,
    Statements,
    backoff_ms,
    options_to_send,
    queues_of,
    replicas_of,
)
from worqr.tracebacks import one_line

if TYPE_CHECKING:
    from worqr.client.client import Client
    from worqr.ops import Dispatched, NewJob

logger: logging.Logger = logging.getLogger("worqr.outbox")  # a documented name

MOST_HANDED_OVER: Final = 10_000
"""Rows that wait in the memory of a process to be sent. Further ones are left to the workers."""
SEND_WITHIN: Final = 60.0
"""Seconds after it was read within which a row may be sent. The server knows a row for ten times as long after it was deleted."""
IDLE: Final = 60.0
"""Seconds without work after which the thread and its connection end."""
SOONEST, LATEST = 2.0, 10.0
"""Seconds between two sweeps: while there is work, and at most without."""
SHARE: Final = 20
"""A sweep that finds nothing is followed by a pause of so many times its duration: reading may be slow while the database
keeps dead rows.
"""
HERE_WITHIN = 5.0
"""Seconds for which a thread that has committed to a database in memory waits for the server."""
HERE_GRACE: Final = 1.0
"""Seconds for the statement after a reply that came at the last moment."""
HERE_AGAIN: Final = 60.0
"""Seconds until the next attempt: tests without a server should not wait for it at each commit."""
LEASE_MS: Final = 15_000
COUNT_EVERY: Final = 10.0
"""Seconds between two counts of the table."""
UNSEEN_MS: Final = 60_000
"""Milliseconds without a sweep after which rows may have waited for it."""
TOO_OLD_MS: Final = 3_600_000
"""Age of a row that no sweep has seen, although there was one all the time: then the database has been restored."""
STEPS_KEPT_MS: Final = 30 * 24 * 3_600_000
STEPS_EVERY: Final = 3600.0
STEPS_WITHIN: Final = 0.5
"""Seconds of a sweep in which steps are deleted. The next sweep goes on."""
LONGEST_BLOCK: Final = 60.0
LANE_WAITS: Final = 10.0
"""Seconds until a sweep sends a row again whose lane was full."""
REPLICAS_MS: Final = 30_000
"""Milliseconds until a row is sent again that asks for more replicas than there are."""
MOST_ERROR: Final = 300
OLDEST_SQLITE: Final = (3, 35)
"""The first version that knows RETURNING."""
SHORTEN_AT: Final = 100


class Sender:
    """Sends the rows of one outbox in this process. Any thread may call it; it never waits, and raises nothing.

    Args:
        client: the client of the mesh.
        connect: returns connections to the database, for the calling thread.
        in_memory: returns True if the database is one in memory.
        table: the name of the table.
        queues: the queues that may be sent to; None: all.
        replicas: as for `Outbox`.
    """

    def __init__(
        self,
        client: Client,
        connect: Callable[[], Database],
        in_memory: Callable[[], bool],
        table: str,
        queues: tuple[str, ...] | None,
        replicas: int,
    ) -> None:
        self._connect: Callable[[], Database] = lambda: _opened(connect)
        self._make: Callable[[], Passes] = lambda: Passes(client, self._connect(), table, queues, replicas)
        self._in_memory = in_memory
        self._table = table
        self._renew()

    def _renew(self) -> None:
        """Begin without a thread: at first, and in a forked process."""
        self._pid = os.getpid()
        self._handed: deque[str] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._sweepers = 0
        self._ending = self._sending = False
        self._outage_here, self._again_at = Outage(self._table), 0.0

    def hand_over(self, rows: Sequence[str]) -> None:
        """Send these rows soon, if they have been committed. If too many wait, the others are left to the workers."""
        with suppress(Exception):  # a caller that has committed must not fail
            if self._pid != os.getpid():
                self._renew()
            self._handed.extend(rows[: max(0, MOST_HANDED_OVER - len(self._handed))])
            if self._handed:
                (self._send_here if self._in_memory() else self._begin)()

    def _send_here(self) -> None:
        """Send to a server that is there while the caller waits. Rows that are not sent are tried again with later ones."""
        with self._lock:
            if time.monotonic() < self._again_at:
                return
            rows, deadline = list(self._handed), time.monotonic() + HERE_WITHIN
            try:
                left = self.once(lambda passes: passes.send_until(deadline, rows), HERE_WITHIN + HERE_GRACE)
                for _ in rows:  # others may have added some behind them
                    self._handed.popleft()
                self._handed.extend(left)
                self._outage_here.over()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as in the thread
                self._outage_here.began(error)
                self._again_at = time.monotonic() + HERE_AGAIN

    @contextmanager
    def sweeping(self) -> Generator[None]:
        """Sweep the table inside the block, unless it is in memory."""
        if self._in_memory():
            yield
            return
        if self._pid != os.getpid():
            self._renew()
        self._sweepers += 1
        self._begin()
        try:
            yield
        finally:
            self._sweepers -= 1
            self._wake.set()

    def close(self, timeout: float) -> None:
        """Send what was handed over, for at most so many seconds, and end the thread and its connection. It blocks.

        While a worker of this process sweeps, the thread goes on.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        until = time.monotonic() + timeout
        while self._sweepers and (self._handed or self._sending) and time.monotonic() < until:
            time.sleep(0.01)
        if self._sweepers:
            return
        self._ending = True
        self._wake.set()
        thread.join(timeout)
        self._ending = False

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="worqr-outbox", daemon=True)
                thread.start()  # it raises if there may be no more threads
                self._thread = thread
        self._wake.set()

    # In the thread

    def _run(self) -> None:
        passes: Passes | None = None
        outage, idle_since = Outage(self._table), time.monotonic()
        while True:
            sweeps = self._sweepers > 0
            if not self._handed:
                pause = passes.pause() if passes is not None and sweeps else (outage.pause if sweeps else IDLE)
                self._wake.wait(0 if sweeps and passes is None and not outage.since else pause)
            self._wake.clear()
            self._sending = True
            rows = [self._handed.popleft() for _ in range(min(len(self._handed), SWEEP_ROWS))]
            is_new = passes is None
            try:
                passes = passes or self._make()
                if rows:
                    passes.send(rows)
                self._sending = False
                if self._sweepers and passes.pause() <= 0:
                    passes.sweep()
                elif not self._sweepers:
                    passes.give_back()
                outage.over()
            except BaseException as error:  # of the database, the server, or the drivers, whose panics are no Exception
                if self._sending and not is_new and not isinstance(error, Unavailable):
                    self._handed.extendleft(reversed(rows))  # the connection may have been cut: a new one decides
                else:
                    outage.began(error)
                self._sending = False
                if not isinstance(error, Unavailable) and passes is not None:
                    passes.close()
                    passes = None
            idle_since = time.monotonic() if rows or self._sweepers else idle_since
            if (self._ending or time.monotonic() - idle_since >= IDLE) and self._ended():
                break
        if passes is not None:
            passes.close()

    def _ended(self) -> bool:
        """Forget the thread if there is nothing to do."""
        with self._lock:
            if self._handed or self._sweepers:
                return False
            self._thread = None
            return True

    # For commands and tests: in a thread of their own, because an event loop may run in the caller's

    def ask(self, make: Callable[[Statements], Statement]) -> Rows:
        """Run one statement, and return its rows. It blocks.

        Raises:
            Exception: whatever the driver raises.
        """
        return cast(
            "Rows", self._aside(lambda database: database.query(make(Statements(database.dialect, self._table))))
        )

    def create_tables(self) -> None:
        """Create the tables unless they exist. It blocks."""

        def create(database: Database) -> None:
            for sql in Statements(database.dialect, self._table).create():
                try:
                    database.query((sql, ()))
                except Exception:  # PostgreSQL refuses one of two that create a table at the same time
                    database.query((sql, ()))

        self._aside(create)

    def once(self, act: Callable[[Passes], object], timeout: float | None = None) -> Any:
        """Do one step of the thread, and return what it returns: also for tests, which wait for no clock. It blocks.

        Raises:
            Unavailable: it takes longer than `timeout` seconds.
        """

        def run() -> object:
            passes = self._make()
            try:
                return act(passes)
            finally:
                passes.close()

        return _in_thread(run, timeout)

    def _aside(self, act: Callable[[Database], object]) -> object:
        def run() -> object:
            database = self._connect()
            try:
                return act(database)
            finally:
                database.close()

        return _in_thread(run)


def _opened(connect: Callable[[], Database]) -> Database:
    """Open the database of an outbox.

    Raises:
        UsageError: it is of a version of SQLite that cannot delete rows as a sender does: their jobs would come again.
    """
    database = connect()
    if database.dialect == "sqlite":
        [(version,)] = database.query(("SELECT sqlite_version()", ()))
        if tuple(map(int, version.split("."))) < OLDEST_SQLITE:
            database.close()
            oldest = ".".join(map(str, OLDEST_SQLITE))
            raise UsageError(
                f"an outbox needs SQLite {oldest} or newer, and the database has {version}: use a Python with a newer one"
            )
    return database


def _in_thread(act: Callable[[], object], timeout: float | None = None) -> Any:
    """Return what a function returns in a thread of its own, which is left to itself after so many seconds."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:  # the caller's thread raises it
            errors.append(error)

    thread = threading.Thread(target=run, name="worqr-outbox-once", daemon=timeout is not None)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not found:
        raise Unavailable(f"the server did not reply within {timeout:g} s")
    return found[0]


class Outage:
    """The time in which rows cannot be sent at all: it is logged once when it begins, and once when it is over."""

    def __init__(self, table: str) -> None:
        self._table = table
        self.since: float = 0.0
        self.pause: float = SOONEST

    def began(self, error: BaseException) -> None:
        """An attempt has failed."""
        self.pause = min(LATEST, self.pause * 2)
        if not self.since:
            self.since = time.monotonic()
            text = "the rows of the outbox %(table)r wait, because they cannot be sent: %(error)s"
            emit(logger, "outbox.waits", text, level=logging.WARNING, table=self._table, error=cause_of(error))

    def over(self) -> None:
        """An attempt has succeeded."""
        if self.since:
            duration, self.since, self.pause = time.monotonic() - self.since, 0.0, SOONEST
            text = "the rows of the outbox %(table)r are sent again, after %(duration).1f s"
            emit(logger, "outbox.waits", text, level=logging.INFO, table=self._table, duration=duration)


def cause_of(error: BaseException) -> str:
    """Return an error in one line, without the parameters of a statement, which may contain payloads."""
    cause = getattr(error, "orig", None) or error
    return one_line(cause)[:MOST_ERROR]


class Passes:
    """The steps of the thread, with its connection to the database: send rows, sweep.

    Raises: each of them, whatever the database raises, and Unavailable.
    """

    def __init__(
        self, client: Client, database: Database, table: str, queues: tuple[str, ...] | None, replicas: int
    ) -> None:
        self._client = client
        self._database = database
        self._sql = Statements(database.dialect, table)
        self._queues = queues
        self._replicas = replicas
        self._lease_of = "" if queues is None else f":{zlib.crc32(repr(sorted({*queues})).encode()):08x}"
        self._holder = os.urandom(16).hex()
        self._id = ""
        self._facts: OutboxFacts | None = None
        self._covered_before = (0, 0)  # between these times, sweeps saw all rows, before a while without sweeps
        self._blocked: dict[str, tuple[float, float]] = {}
        self._in_full_lanes: dict[str, float] = {}
        self._after = ""
        self._next_at = 0.0
        self._interval = SOONEST
        self._count_at = self._recount_at = self._steps_at = 0.0
        self._sent: dict[QueueKeys, list[str]] = {}
        self._deadline = math.inf

    def close(self) -> None:
        """Give the lease back, and close the connection. It raises nothing: the panics of a driver are no Exception."""
        with suppress(BaseException):
            self.give_back()
        with suppress(BaseException):
            self._database.close()

    def pause(self) -> float:
        """Return the seconds until the next sweep."""
        return max(0.0, self._next_at - time.monotonic())

    # Sending

    def send(self, ids: Sequence[str]) -> int:
        """Send rows that were just committed; return how many jobs there are of them. Rows that are not there are left out."""
        return sum(self._send_page(page) for page in self._pages(ids))

    def send_until(self, deadline: float, ids: Sequence[str]) -> list[str]:
        """Send rows, and return those that are still there. After a reply that comes later, the database is left alone."""
        self._deadline = deadline
        self.send(ids)
        return [row for row, _ in self._database.query(self._sql.sizes(ids))]

    def _pages(self, ids: Sequence[str]) -> Iterable[list[str]]:
        """Return the ids of rows in lists whose payloads are read together: a worker may have little memory."""
        sizes = dict(self._database.query(self._sql.sizes(ids))) if len(ids) > 1 else dict.fromkeys(ids, 0)
        return in_chunks(list(sizes), sizes.__getitem__)

    def _send_page(self, ids: Sequence[str]) -> int:
        read_at = boottime()
        return self._send(_rows(self._database.query(self._sql.by_id(ids))), read_at)

    def _send(self, rows: Sequence[Row], read_at: float) -> int:
        """Send rows, and delete those that are jobs now. Return how many."""
        by_queue: dict[str, list[Row]] = {}
        without = self._left_out()
        for row in rows:
            if row.queue not in without and (self._queues is None or row.queue in self._queues):
                by_queue.setdefault(row.queue, []).append(row)
        sent = 0
        for queue in sorted(by_queue, key=self._blocked.__contains__):  # those that may take long come last
            sent += self._send_to(queue, by_queue[queue], read_at + SEND_WITHIN)
        return sent

    def _left_out(self) -> list[str]:
        """Return the queues that are left out for a while."""
        now = time.monotonic()
        return [queue for queue, (until, _) in self._blocked.items() if until > now]

    def _send_to(self, queue: str, rows: Sequence[Row], until: float) -> int:
        """Send rows of one queue. If the server refuses them, send both halves, until it is known which one it refuses."""
        try:
            jobs = [self._job(row) for row in rows]
            live = [(row, job) for row, job in zip(rows, jobs, strict=True) if job is not None]
            replicas = max([self._replicas, *(replicas_of(options) for _, (options, _) in live)])
            found = sync(self._dispatch, queue, [job for _, job in live], replicas, until) if live else []
        except Unavailable as error:
            if not sync(self._is_cluster) or boottime() >= until:
                raise
            return self._block(queue, error)
        except QueueFull as error:
            return self._block(queue, error)
        except NotReplicated as error:
            return self._not_replicated(queue, rows, until, error)
        except Exception as error:
            if is_for_all(error):
                return self._block(queue, error)
            if len(rows) == 1:
                return self._refused(rows[0], error)
            half = len(rows) // 2
            return self._send_to(queue, rows[:half], until) + self._send_to(queue, rows[half:], until)
        done = [row.id for row, job in zip(rows, jobs, strict=True) if job is None]  # those that have expired
        in_lanes = list[str]()
        for (row, (options, _)), (outcome, keys) in zip(live, found, strict=True):
            if outcome.outcome != "full":
                done.append(row.id)
                self._sent.setdefault(keys, []).append(row.id)
            elif "max_lane_length" in options:  # other lanes may have room
                in_lanes.append(row.id)
        if done:
            self._database.query(self._sql.delete(done))
            self._blocked.pop(queue, None)
        if len(done) + len(in_lanes) < len(rows):
            self._block(queue, None)
        if self._facts is not None:  # only a sweep reads them again
            self._in_full_lanes |= dict.fromkeys(in_lanes, time.monotonic() + LANE_WAITS)
        self._shorten(SHORTEN_AT)
        return len(done)

    async def _dispatch(
        self, queue: str, jobs: Sequence[NewJob], replicas: int, until: float
    ) -> list[tuple[Dispatched, QueueKeys]]:
        found = await self._client.producer.dispatch_rows(queue, jobs, replicas, until)
        if time.monotonic() > self._deadline:
            raise Unavailable("the reply of the server came too late")
        return found

    async def _is_cluster(self) -> bool:
        """Whether one queue may be away, and others not."""
        return self._client.link.settings.clustered

    def _job(self, row: Row) -> tuple[dict[str, object], bytes] | None:
        options = options_to_send(row)
        if options is None:
            return None
        if self._queues is not None and not queues_of(row.queue, options) <= {*self._queues}:
            raise ValueError("a follow-up of the row is for another queue than Outbox(queues=...) allows")
        return options, bytes(row.payload)

    def _block(self, queue: str, error: Exception | None) -> int:
        """Leave a queue out for a while: it is full or away, or the server refuses all that is for it."""
        _, pause = self._blocked.get(queue, (0.0, 0.5))
        pause = min(LONGEST_BLOCK, pause * 2)
        self._blocked[queue] = (time.monotonic() + pause, pause)
        if error is not None and not isinstance(error, QueueFull):
            self._say_that_they_wait(queue, error)
        return 0

    def _say_that_they_wait(self, queue: str, error: Exception) -> None:
        text = "rows of the outbox for queue %(queue)r wait: %(error)s"
        emit(logger, "outbox.refused", text, level=logging.WARNING, queue=queue, error=cause_of(error))

    def _not_replicated(self, queue: str, rows: Sequence[Row], until: float, error: Exception) -> int:
        """Let rows wait that ask for more replicas than the outbox, and send the others without them."""
        asking = [row for row in rows if replicas_of(options_to_send(row) or {}) > self._replicas]
        if not asking:
            return self._block(queue, error)
        self._database.query(self._sql.defer([row.id for row in asking], REPLICAS_MS, cause_of(error)))
        self._say_that_they_wait(queue, error)
        others = [row for row in rows if row not in asking]
        return self._send_to(queue, others, until) if others else 0

    def _refused(self, row: Row, error: Exception) -> int:
        """Note that the server has refused a row."""
        last = row.tries + 1 >= MAX_TRIES
        statement = self._sql.refuse(row, backoff_ms(row.tries + 1), cause_of(error), last=last)
        self._database.query(statement)
        if last:
            text = (
                "row %(row)s of the outbox, for queue %(queue)r, was given up after %(attempts)d tries: %(error)s; "
                "`worqr outbox` lists it"
            )
            tries, cause = row.tries + 1, cause_of(error)
            emit(logger, "outbox.failed", text, row=row.id, queue=row.queue, attempts=tries, error=cause)
        return 0

    def _shorten(self, most: int) -> None:
        """Tell the server of rows that have been deleted, once there are so many. If that fails, it knows them for a week."""
        if sum(map(len, self._sent.values())) < most:
            return
        sent, self._sent = self._sent, {}
        with suppress(Exception):
            for keys, rows in sent.items():
                for first in range(0, len(rows), ops.MAX_ITEMS):
                    sync(self._client.ask, ops.shorten_sent(keys, rows[first : first + ops.MAX_ITEMS]))

    # Sweeping

    def sweep(self) -> int:
        """Send what is left in the table, if no other worker does; return how many rows were sent."""
        began, sent = time.monotonic(), 0
        try:
            if self._lease():
                sent = self._sweep()
                self._shorten(1)
                self._count(sent)
                self._drop_steps()
        finally:
            took = time.monotonic() - began
            self._interval = SOONEST if sent else min(LATEST, self._interval * 1.5)
            self._next_at = time.monotonic() + (self._interval if sent else max(self._interval, SHARE * took))
            if sent and self._blocked == {} and took > SOONEST:
                self._next_at = time.monotonic()
        return sent

    def _lease(self) -> bool:
        """Take or renew the lease. Return False if another worker has it."""
        while not (found := self._database.query(self._sql.identity())):  # the table is new, or was emptied
            self._database.query(self._sql.identify(os.urandom(16).hex()))
        [(own, now)] = found
        new = own + self._lease_of
        if self._id not in ("", new) and self._facts is not None:  # which stay: the rows may come back from a backup
            gone = msgspec.json.encode(replace(self._facts, gone=True)).decode()
            sync(self._client.ask, ops.lease_outbox(self._keys, self._id, self._holder, 0, gone))
        self._id = new
        facts = "" if self._facts is None else msgspec.json.encode(self._facts).decode()
        ms = min(60_000, LEASE_MS + int(2000 * self._interval))
        reply = sync(self._client.ask, ops.lease_outbox(self._keys, self._id, self._holder, ms, facts))
        if not reply.held:
            self._facts = None
            return False
        known = self._facts or read_outbox_facts(reply.facts)
        covered = known.covered
        if not 0 <= now - known.seen <= UNSEEN_MS:  # rows may have waited since
            self._covered_before = known.covered, min(known.seen, now) - TOO_OLD_MS
            covered = now
        self._facts = OutboxFacts(covered, now, known.rows, known.oldest, known.failed, known.held, self._sql.table)
        return True

    @property
    def _keys(self) -> RegistryKeys:
        return RegistryKeys(self._client.settings.prefix)

    def _sweep(self) -> int:
        """Send rows for some seconds, because those of this process come first; return how many were sent."""
        assert self._facts is not None
        sent, without, after = 0, self._left_out(), self._after
        found = self._database.query(self._sql.to_sweep(self._queues, without, after))
        for since, before in (self._covered_before, (self._facts.covered, self._facts.seen - TOO_OLD_MS)):
            if any(since < at < before and not tries for _, _, at, tries in found):
                self._hold(since, before)
        began = time.monotonic()
        self._in_full_lanes = {row: at for row, at in self._in_full_lanes.items() if at > began}
        left, until = deque(each for each in found if each[0] not in self._in_full_lanes), began + SOONEST
        while left and time.monotonic() < until:
            page = [left.popleft() for _ in range(min(len(left), SWEEP_ROWS))]
            waits = self._left_out()
            sent += self.send([row for row, queue, *_ in page if queue not in waits])
        lanes_only = len(found) == MOST_SWEPT and not left and any(each[0] in self._in_full_lanes for each in found)
        self._after = found[-1][0] if lanes_only else ""  # the next sweep reads what is behind them
        if left or len(found) == MOST_SWEPT or without or self._left_out() or self._in_full_lanes or after:
            self._facts = replace(self._facts, covered=self._facts.seen)  # rows wait for a reason
        return sent

    def _hold(self, since: int, before: int) -> None:
        count = len(self._database.query(self._sql.hold(self._queues, since, before)))
        text = (
            "%(count)d rows of the outbox %(table)r are over an hour old, and no sweep has seen them: was the database restored? "
            "They are held until `worqr outbox MODULE:OUTBOX --release`"
        )
        emit(logger, "outbox.held", text, level=logging.WARNING, count=count, table=self._sql.table)

    def _count(self, sent: int) -> None:
        """Count the table now and then, and after a sweep that has sent rows, but for little of the time."""
        assert self._facts is not None
        began = time.monotonic()
        if began < self._count_at and not (sent and began >= self._recount_at):
            return
        found = {state: (number, age) for state, number, age in self._database.query(self._sql.totals())}
        self._recount_at = began + SHARE * (time.monotonic() - began)
        self._count_at = max(self._recount_at, began + COUNT_EVERY)
        rows, oldest = found.get(WAITING, (0, 0))
        failed, held = found.get(FAILED, (0, 0))[0], found.get(HELD, (0, 0))[0]
        self._facts = replace(self._facts, rows=rows, oldest=oldest, failed=failed, held=held)

    def _drop_steps(self) -> None:
        """Delete steps that are too old, in short transactions: SQLite has one writer at a time."""
        began = time.monotonic()
        while self._steps_at <= time.monotonic() < began + STEPS_WITHIN:
            if len(self._database.query(self._sql.drop_steps(STEPS_KEPT_MS))) < SWEEP_ROWS:
                self._steps_at = time.monotonic() + STEPS_EVERY

    def give_back(self) -> None:
        """Let another worker sweep at once."""
        if self._facts is not None:
            facts, self._facts = msgspec.json.encode(self._facts).decode(), None
            sync(self._client.ask, ops.lease_outbox(self._keys, self._id, self._holder, 0, facts))


def is_for_all(error: Exception) -> bool:
    """Return True if the server refuses whatever this user sends to a queue, and False if it refuses one row."""
    words = ("refused the connection", "the user may not", "ACL LOG")
    return isinstance(error, WrongVersion) or (
        isinstance(error, RefusedByServer) and any(each in str(error) for each in words)
    )


def _rows(found: Rows) -> list[Row]:
    return [
        Row(row, queue, _bytes(payload), _bytes(options), age, tries)
        for row, queue, payload, options, age, tries in found
    ]


def _bytes(stored: object) -> bytes:
    """Return what a column of bytes has. In SQLite, another program may have stored a text or a number there."""
    if isinstance(stored, bytes | bytearray):
        return bytes(stored)
    return stored.tobytes() if isinstance(stored, memoryview) else str(stored).encode()
