"""The I/O thread: everything that waits goes out as one pipeline, its replies go back as one delivery.

Here: the thread, its inbox, and the outcomes it hands out. Not here: who waits (`link`, `mailbox`), the order of
requests (`backlog`), the connection and its failures (`uplink`).

The thread sleeps on one queue. Requests come in there, and so does everything else it must react to (a connection that
was made or refused, somebody who waits for the first one, the end), as a function that it runs. So it misses no request
while the server is away, and polls for nothing.

`ended` is set for good by `close`, by a bug in the thread, or in a forked child. Whoever submits after that gets that
error; a request that slipped into the inbox meanwhile is found by its own submitter.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from worqr.errors import ClaimLost, Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.backlog import Backlog
from worqr.link.faults import Lost
from worqr.link.mailbox import Mailbox, Waiter, wake_all
from worqr.link.request import Numbers, Request, fail_all
from worqr.link.routes import Route
from worqr.link.scribe import Scribe
from worqr.link.settings import LinkSettings
from worqr.link.uplink import Hooks, Uplink
from worqr.lua import all_scripts

logger: logging.Logger = logging.getLogger(__name__)

DIED = "the thread of a connection died, and waiting calls get an error; this is a bug of worqr, please report it"

_LONGEST_SLEEP = 3600.0  # seconds; the system's own limit would end the thread of somebody with endless patience
_END_WAIT = 1.0  # seconds that closing waits for the thread, which needs a few milliseconds

Event = Callable[[], None]


class Posted(list[Request]):
    """Requests that came together."""


class Cluster(Protocol):
    """What the pipe of one node asks of those who know all of them. Called in the pipe's thread."""

    numbers: Numbers

    def belongs(self, pipe: Pipe, request: Request) -> bool:
        """Is the node of `pipe` the one that has the keys of `request`?"""
        ...

    def hand_over(self, requests: list[Request]) -> None:
        """Have them sent to where they belong."""
        ...

    def moved(self, pipe: Pipe, requests: list[tuple[Request, str]]) -> list[Request]:
        """The node has pointed to others for these: ``SLOT HOST:PORT``. Returns those that have to wait at `pipe` a little."""
        ...

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection stands."""
        ...

    def passed(self, pipe: Pipe, waiting: Collection[str]) -> bool:
        """Has `pipe` handed over all requests of other nodes? `waiting`: the bases of what it has left, beside its inbox.

        Until then it is given also the new requests of these slots, so that they stay behind the older ones.
        """
        ...

    def is_needed(self, pipe: Pipe) -> bool:
        """Has the node of `pipe` a slot?"""
        ...

    def retire(self, pipe: Pipe) -> bool:
        """Forget `pipe`, unless something waits there. True: nothing more will come."""
        ...

    def died(self, bug: WorqrError) -> None:
        """The thread of a pipe has ended by a bug."""
        ...


class Pipe:
    """The thread. `submit`, `tell`, `wait_ready`, `close` and `poison` may be called from outside it.

    Attributes:
        ended: why nothing can be sent; None while it works.
        uplink: the connection.

    Args:
        route: where the server is; by default where the settings say.
        cluster: of which this serves one node.
    """

    def __init__(
        self,
        settings: LinkSettings,
        mailbox: Mailbox,
        scribe: Scribe,
        producer: str,
        *,
        route: Route | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self._settings = settings
        self._cluster = cluster
        self._mailbox = mailbox
        self._scribe = scribe
        self._inbox: queue.SimpleQueue[Request | Posted | Event] = queue.SimpleQueue()
        self._backlog = Backlog(None if cluster is None else cluster.numbers)
        self._ready_waiters: list[tuple[Waiter, float]] = []
        self._closing = self._leaving = self._passing = False
        hooks = Hooks(self._settle, self._while_silent, self._ready, self.tell, self._moved, self.sort_out)
        self.uplink: Uplink = Uplink(settings, scribe, producer, self._backlog, hooks, route)
        self._thread = threading.Thread(target=self._run, name="worqr-link", daemon=True)

    @property
    def connected_at(self) -> float:
        """The monotonic time of the present (or last) connection."""
        return self.uplink.connected_at

    @property
    def connections(self) -> int:
        """How many there have been."""
        return self.uplink.connections

    @property
    def run_id(self) -> str:
        """Which process of the server we last connected to; empty if our user may not ask."""
        return self.uplink.run_id

    # From any thread

    def start(self) -> None:
        scripts = [script.sharded if self._settings.clustered else script for script in all_scripts()]
        self.uplink.scripts = {script.sha: script for script in scripts}
        self.ended = None
        self._thread.start()

    def submit(self, request: Request | Posted) -> None:
        """Have it sent, or all of them with one wake-up. The outcome, also the end's error, comes through the mailbox."""
        self._inbox.put(request)
        if self.ended is not None:
            self._sweep_inbox()

    def tell(self, event: Event) -> None:
        """Have `event` run in the thread (after its end: in the caller's)."""
        self._inbox.put(event)
        if self.ended is not None:
            self._sweep_inbox()

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection stands, was refused, or the deadline has passed."""
        self.tell(partial(self._add_ready, waiter, deadline))

    def close(self) -> None:
        """End the thread; what is unanswered gets Unavailable. Returns when it has ended, within milliseconds."""
        if self._closing:
            return
        self._closing = True
        if not self._thread.is_alive():  # it never began, or died
            self._end(self._closed())
            return
        self._inbox.put(_nothing)
        self.uplink.interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)

    def reconsider(self) -> None:
        """The server may be elsewhere by now: go there at once, if so."""
        self.tell(self.uplink.reconsider)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the thread does not exist here, and the socket is the parent's."""
        self.ended = error
        self._closing = True
        self.uplink.abandon()

    # The thread

    def _run(self) -> None:
        uplink, backlog = self.uplink, self._backlog
        try:
            uplink.dial()
            while not self._closing:
                self._gather(self._sleep())
                self._expire(owners=bool(backlog.outcasts or backlog.held))
                wire = uplink.wire
                if wire is None:
                    if not uplink.dialling and time.monotonic() >= uplink.outage.next_try and not self._closing:
                        self._expire(owners=True)
                        uplink.dial()
                elif backlog.pending and uplink.held_until <= time.monotonic():
                    if uplink.held_until != -math.inf:
                        self._expire(owners=True)
                    uplink.work(wire)
                elif backlog.replication.waiting:
                    uplink.ask(wire)
                if self._leaving or self._passing:  # until nothing is left to be done here
                    self.sort_out()
            self._end(self._closed())
        except BaseException as exc:
            bug = WorqrBug(f"the link's thread died ({type(exc).__name__}: {exc}); please report this")
            bug.__cause__ = exc
            self._scribe.emit(logger, "link.died", DIED, exc_info=exc)
            self._end(bug)
            if self._cluster is not None:
                self._cluster.died(bug)

    def _gather(self, timeout: float | None) -> None:
        """Take in all that has come, after sleeping up to `timeout` for the first item (None: until it comes)."""
        inbox = self._inbox
        if timeout != 0:
            try:
                self._take_in(inbox.get(timeout=timeout))
            except queue.Empty:
                return
        for _ in range(inbox.qsize()):
            self._take_in(inbox.get_nowait())

    def _take_in(self, item: Request | Posted | Event) -> None:
        if isinstance(item, Request):
            self._backlog.add(item)
        elif isinstance(item, Posted):
            for request in item:
                self._backlog.add(request)
        else:
            item()

    def _sleep(self) -> float | None:
        """Seconds until there is something to do without anybody asking; None: never."""
        uplink, backlog = self.uplink, self._backlog
        if uplink.wire is not None and backlog.is_usual():  # so without a look at the clock
            if not backlog.pending:
                return None
            if uplink.held_until == -math.inf:
                return 0
        now = time.monotonic()
        until = min(backlog.readmit(now), backlog.next_scan())
        if uplink.wire is None:
            until = min(
                until, math.inf if uplink.dialling else uplink.outage.next_try, *(end for _, end in self._ready_waiters)
            )
        elif backlog.pending:
            until = min(until, uplink.held_until)
        return None if until == math.inf else min(max(until - now, 0), _LONGEST_SLEEP)

    def _while_silent(self) -> None:
        """Between two looks at a server that lets us wait for a reply."""
        if self._cluster is not None:
            self.uplink.route.doubt()  # another node may have its slots by now
        self._gather(0)
        self._expire(owners=True)
        if self._closing:
            raise Lost("the link was closed", innocent=True)

    # One node of a cluster

    def sort_out(self) -> None:
        """In the thread: hand over what belongs to another node by now; end, if this one is no primary any more."""
        cluster = self._cluster
        if cluster is None or self._closing:
            return
        cluster.hand_over(self._backlog.take_out(partial(cluster.belongs, self)))
        self._passing = not cluster.passed(self, self._backlog.bases())
        self._leaving = not cluster.is_needed(self)
        if self._leaving:
            while self._ready_waiters:
                cluster.wait_ready(*self._ready_waiters.pop())
            if self._backlog.is_busy():
                raise Lost("it is no primary any more", innocent=True)
            if cluster.retire(self):  # else it is left as it is: somebody may have closed us meanwhile
                self._closing = True

    def has_news(self) -> bool:
        """Something has come that the thread has not taken in."""
        return not self._inbox.empty()

    def is_idle(self) -> bool:
        """In the thread: nothing waits here."""
        return self._inbox.empty() and self._backlog.is_empty() and not self._ready_waiters

    def _moved(self, requests: list[tuple[Request, str]]) -> list[Request]:
        """The server has pointed to others."""
        return [] if self._cluster is None else self._cluster.moved(self, requests)

    # Outcomes

    def _settle(self, requests: list[Request]) -> None:
        """They have their outcome: wake those who wait, all at once."""
        close = self._backlog.close
        for request in requests:
            request.settled = True
            if request.number:
                close(request)
        if requests:
            self._mailbox.post(partial(wake_all, requests))

    def _expire(self, *, owners: bool = False) -> None:
        """Give up those who have waited too long, and those whose owner is dead."""
        now = time.monotonic()
        if self._ready_waiters:
            self._expire_ready(now)
        if self._backlog.replication.waiting:
            self._settle(self._backlog.replication.overdue(now))
        late, orphans = self._backlog.overdue(now, owners=owners)
        if not late and not orphans:
            return
        give_up(late, orphans, self.uplink.outage.text(now))
        self._mailbox.post(partial(wake_all, [*late, *orphans]))

    def _add_ready(self, waiter: Waiter, deadline: float) -> None:
        self._ready_waiters.append((waiter, deadline))
        if self.uplink.wire is not None or self.ended is not None:
            self._ready(self.ended)

    def _ready(self, error: WorqrError | None) -> None:
        waiters, self._ready_waiters = [waiter for waiter, _ in self._ready_waiters], []
        self._fail(waiters, error)

    def _expire_ready(self, now: float) -> None:
        late = [waiter for waiter, deadline in self._ready_waiters if deadline <= now]
        if late:
            self._ready_waiters = [(waiter, deadline) for waiter, deadline in self._ready_waiters if deadline > now]
            self._fail(late, Unavailable(self.uplink.outage.text(now)))

    def _fail(self, waiters: Iterable[Waiter], error: WorqrError | None) -> None:
        """Settle them; without an error it is good news."""
        settled = list(waiters)
        if error is not None:
            fail_all(settled, error)
        for waiter in settled:
            waiter.settled = True
        if settled:
            self._mailbox.post(partial(wake_all, settled))

    # The end

    def _closed(self) -> Unavailable:
        return Unavailable(f"the link to {self._settings.address.redacted} was closed")

    def _end(self, error: WorqrError) -> None:
        """Nobody may be left waiting: neither who is known, nor who comes later."""
        self.uplink.close()  # first: from then on a connection that has just been made is closed, not kept
        self._scribe.watchers.back(id(self.uplink.outage))  # a node that left the cluster is not missed any more
        self.ended = error
        self._fail(self._backlog.clear(), error)
        self._ready(error)
        self._sweep_inbox()

    def _sweep_inbox(self) -> None:
        """After the end, from any thread: settle what is in the inbox."""
        error = self.ended
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Request | Posted):
                self._fail(item if isinstance(item, Posted) else (item,), error)
            else:
                item()


def give_up(late: Iterable[Request], orphans: Iterable[Request], outage: str) -> None:
    """Say why to those whose patience has ended, and to those whose owner is dead."""
    for request in late:
        fate = "was sent and may have taken effect" if request.written else "was withdrawn"
        text = f"{outage} The request {request.call.script.name} waited {request.patience:.1f} s and {fate}."
        request.error = Unavailable(text, sent=None if request.written else False)
    for request in orphans:
        name = request.owner.name if request.owner else ""
        request.error = ClaimLost(f"worker {name} is dead; {request.call.script.name} was given up")


def _nothing() -> None:
    """Wakes the thread, so that it looks around."""
