"""`NodeClient`: the requests of one server, over all of its connections. It runs in the caller's loop, and has no thread.

Here: the time limits, outages, and the end. Not here: batches and their failures (`pipeline`), the states of the connection
(`connector`), requests of other nodes of a cluster (`rebalancer`), waiting (the drivers).

An outage ends when a batch has been answered, or when a connection is open and no request waits. So a
server that accepts connections but refuses requests causes no further log lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worqr.errors import Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.connection import MOVED, Wire, open_connection
from worqr.link.connector import Connector, ReadyWaiters, State
from worqr.link.driver import Driver, Waiter, settle_soon
from worqr.link.endpoints import EndpointResolver, OnSilence
from worqr.link.log_thread import LogThread
from worqr.link.outage import Outage
from worqr.link.pipeline import Pipeline, survives
from worqr.link.rebalancer import SILENT, Rebalancer
from worqr.link.request import Posted, Request, SequenceNumbers
from worqr.link.request_queue import RequestQueue
from worqr.link.server_info import ServerInfo
from worqr.link.settings import LinkSettings
from worqr.link.timers import LATE, Alarm
from worqr.lua import all_scripts

logger: logging.Logger = logging.getLogger(__name__)

DIED = "the requests of a connection failed, and waiting calls get an error; this is a bug of worqr, please report it"
EVICTS = (
    "%(server)s has the maxmemory-policy %(policy)s, and may evict tasks when its memory is full: run CONFIG SET "
    "maxmemory-policy noeviction"
)

_TICK: Final = 0.25  # seconds between looks at a server that is silent, or away


@dataclass(frozen=True, slots=True)
class ConnectionHistory:
    """The connections of one client so far.

    Attributes:
        connected_at: the monotonic time of the last one; 0: there was none.
        count: how many there have been.
        run_id: the server's at the last one.
        evicts: the server's settings may evict tasks, which is logged once.
    """

    connected_at: float = 0.0
    count: int = 0
    run_id: str = ""
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class LinkCondition:
    """The state of the connections of a link, for metrics.

    Attributes:
        up: it is connected, and the server works.
        reconnects: how often a connection that was lost was made anew.
        unanswered: requests without a reply.
    """

    up: bool
    reconnects: int
    unanswered: int


class NodeClient:
    """The requests of one server. All methods belong to the driver's loop.

    Attributes:
        ended: why nothing can be sent; None while it works.
        history: the connections so far.
        outage: the time in which the server cannot be used.
        connector: keeps the connection open.
        pipeline: its requests.

    Args:
        resolver: finds the server's address.
        rebalancer: makes the rebalancer, if the server is a node of a cluster.
        numbers: counts the requests of all clients of a cluster.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        log_thread: LogThread,
        producer: str,
        *,
        resolver: EndpointResolver,
        rebalancer: Callable[..., Rebalancer] | None = None,
        numbers: SequenceNumbers | None = None,
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.history: ConnectionHistory = ConnectionHistory()
        self.outage: Outage = Outage(log_thread, logger, resolver.name)
        self._settings = settings
        self._driver = driver
        self._log_thread = log_thread
        scripts = [script.sharded if settings.clustered else script for script in all_scripts()]

        def connect(on_silence: OnSilence) -> Wire:
            first = not self.outage.stood
            return open_connection(settings, resolver, "data", scripts=scripts, on_silence=on_silence, first=first)

        self.connector: Connector = Connector(
            *(driver, resolver, connect, self._connected), failed=self._failed, dialling=self._dialling
        )
        self.pipeline: Pipeline = Pipeline(
            *(self, driver, RequestQueue(numbers), resolver.name), producer=producer, clustered=settings.clustered
        )
        self._ready = ReadyWaiters(driver)
        self._alarm = Alarm(driver, self._look)
        self._rebalancer = None if rebalancer is None else rebalancer(self.pipeline, self._ready, self._end)
        self._judged_not = False  # the last look came late, and judged nothing

    @property
    def condition(self) -> LinkCondition:
        """Its state; from any thread."""
        requests = self.pipeline.requests
        up = self.pipeline.connection is not None and self.outage.since is None
        return LinkCondition(up, max(0, self.history.count - 1), len(requests.pending) + len(requests.in_flight))

    def start(self) -> None:
        """Begin to connect."""
        self.ended = None
        self.connector.dial()

    def submit(self, request: Request | Posted) -> None:
        """Send it, or all of them together. The outcome is set on the request, also that of the end."""
        if self.ended is None:
            self.pipeline.submit(request)
        else:
            settle_soon(self._driver, request if isinstance(request, Posted) else (request,), self.ended)

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection is open, was refused, or the deadline has passed."""
        self._ready.add(waiter, deadline)
        if self.pipeline.connection is not None or self.ended is not None:
            self._ready.tell(self.ended)
        else:
            self.plan()

    @survives
    def reconsider(self) -> None:
        """Connect to the server's new address at once, if it has changed."""
        connection = self.pipeline.connection
        if self.ended is not None or (connection and self.connector.resolver.is_current(connection.endpoint)):
            return
        if connection is None:
            self.connector.dial()  # a present attempt leads to the old address, and may hang there for seconds
            return
        if self.pipeline.is_busy:
            self.pipeline.give_up(MOVED, innocent=True)
        else:
            self.pipeline.drop(MOVED, quiet=True)
        self.connector.redial()

    def is_idle(self) -> bool:
        """Return True if no request and no caller waits."""
        return self.pipeline.requests.is_empty() and not self._ready

    def close(self) -> None:
        """End the client; unanswered requests get Unavailable. Idempotent."""
        if self.connector.state is not State.ENDED:
            self._end(Unavailable(f"the link to {self._settings.address.redacted} was closed"))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the connection is the parent's."""
        self.ended = error
        self.connector.poison()
        if self.pipeline.connection is not None:
            self.pipeline.connection.transport.abandon()

    # Called by the pipeline

    def works(self) -> None:
        if self.outage.since is not None:
            self.connector.works()
            self.outage.end()

    def holds(self, cause: str) -> None:
        self.connector.hold()
        self.outage.begin(cause, waiting=len(self.pipeline.requests.pending), answers=True)

    def lost(self, cause: str, *, quiet: bool = False) -> None:
        """Dial at once, unless an attempt has failed before."""
        if self.ended is not None:
            return
        self.outage.begin(cause, waiting=len(self.pipeline.requests.pending), quiet=quiet)
        self.connector.lost()
        self.sort_out()
        self.connector.retry()
        self.plan()

    def redirected(self, requests: list[tuple[Request, str]]) -> list[Request]:
        self.connector.resolver.invalidate()
        return [] if self._rebalancer is None or not requests else self._rebalancer.moved(requests)

    def batch_ended(self) -> None:
        """Continue to hand over requests, if some of other nodes are left."""
        if self._rebalancer is not None and self._rebalancer.is_active:
            self.sort_out()

    @survives
    def sort_out(self) -> None:
        """Hand over the requests that now belong to another node, if the server is a node of a cluster."""
        if self._rebalancer is not None and self.ended is None:
            self._rebalancer.sort_out()
            self.plan()

    def died(self, exc: BaseException) -> None:
        """End because of a bug, or of a signal handler that raised in the middle of a change: no call may wait in vain."""
        if not isinstance(exc, KeyboardInterrupt | SystemExit):
            error: WorqrError = WorqrBug(f"the link died ({type(exc).__name__}: {exc}); please report this")
            self._log_thread.emit(logger, "link.died", DIED, exc_info=exc)
        else:
            error = Unavailable(f"the link was interrupted by {type(exc).__name__} while it was in use")
        error.__cause__ = exc
        self._end(error)
        self._driver.interrupted(error)
        if self._rebalancer is not None:
            self._rebalancer.cluster.died(error)

    # Called by the connector

    @survives
    def _dialling(self) -> None:
        now = time.monotonic()
        self.pipeline.expire(now, self.outage.text(now))

    @survives
    def _failed(self, error: WorqrError) -> None:
        """An attempt has failed."""
        hopeless = self.outage.failed_to_connect(error, self._settings, waiting=len(self.pipeline.requests.pending))
        if hopeless is not None:
            self._ready.tell(hopeless)
        self.plan()
        self.batch_ended()

    @survives
    def _connected(self, wire: Wire) -> None:
        transport = self.connector.transport(wire, self.pipeline.readable, self.pipeline.progress)
        if transport is None:
            return
        self.pipeline.attach(transport)
        self.outage.connected()
        self._note(wire.facts)
        if not self.pipeline.requests.pending:
            self.works()
        self._ready.tell(None)
        self.pipeline.work()
        self.batch_ended()

    def _note(self, facts: ServerInfo) -> None:
        """Note the connection. Warn once if the server may evict tasks."""
        before = self.history
        if facts.evicts and not before.evicts:
            self._log_thread.emit(logger, "link.eviction", EVICTS, server=self.outage.address, policy=facts.eviction)
        evicts = before.evicts or facts.evicts
        self.history = ConnectionHistory(time.monotonic(), before.count + 1, facts.run_id, evicts)

    # Time

    def plan(self) -> None:
        """Plan the next check for work that no socket event announces; every tick while requests wait."""
        requests, connection = self.pipeline.requests, self.pipeline.connection
        usual = requests.has_nothing_held()
        waits = requests.pending or requests.in_flight or self._ready or not usual
        if not waits or self.ended is not None:
            return
        now = time.monotonic()
        when = min(now + _TICK, requests.next_deadline)
        if connection is not None:
            if connection.held_until > now:
                when = min(when, connection.held_until)
            elif connection.is_idle and not usual:  # else the end of the batch leads on
                when = min(when, requests.next_pause())
        if when < self._alarm.at:
            self._alarm.set(max(when, now))

    @survives
    def _look(self, late: float) -> None:
        """Expire late requests, detect a silent server, and retry requests that are due."""
        now = time.monotonic()
        if self.pipeline.is_busy:
            self.pipeline.receive()  # read the socket's input before checking the time
        blocked = late > LATE  # the server is not to blame
        if blocked and self.pipeline.connection is not None:
            self.pipeline.connection.forgive(late)
        self._judged_not = (
            blocked and not self._judged_not
        )  # a loop that is always late must not keep requests for ever
        if not self._judged_not:
            self._judge(now)
        self.pipeline.work()
        self.batch_ended()

    def _judge(self, now: float) -> None:
        """Expire late requests, and close a connection on which nothing has arrived for too long."""
        settle_soon(self._driver, self._ready.take_late(now), Unavailable(self.outage.text(now)))
        self.pipeline.expire(now, self.outage.text(now))
        connection = self.pipeline.connection
        if connection is None or not self.pipeline.is_busy:
            return
        silent = now - connection.heard_at
        if self._rebalancer is not None and silent >= SILENT:
            self.connector.resolver.invalidate()  # another node may have its slots now
        if silent > self._settings.socket_timeout:
            self.pipeline.give_up(f"no answer for {self._settings.socket_timeout:g} s")

    # The end

    def _end(self, error: WorqrError) -> None:
        """End: fail the pending requests, and all later ones, so that no caller waits."""
        self.ended = error
        self.connector.close()
        self.pipeline.close()
        self._alarm.cancel()
        self.outage.forget()  # a node that left the cluster is no longer missing
        settle_soon(self._driver, self.pipeline.requests.clear(), error)
        self._ready.tell(error)
