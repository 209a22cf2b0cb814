"""`NodeClient`: the requests of one server, over all of its connections. It runs in the caller's loop, and has no thread.

Here: the states of the connection, the time limits, and the end. Not here: batches and their failures (`pipeline`), the attempts
to connect (`dialer`), waiting (the drivers).

States and their transitions:

==========  ================================================  =====================================================
state       meaning                                           leads to
==========  ================================================  =====================================================
NEW         not started                                       DIALLING by `start`
DIALLING    no connection; an attempt is being made           READY, or WAITING when it fails
WAITING     no connection; the next attempt has a time        DIALLING when the time has come
READY       connected: requests are sent                      HELD, DIALLING or WAITING when the connection is lost
HELD        connected; the server cannot work at the moment   READY when a batch was answered, DIALLING or WAITING
ENDED       nothing is sent any more                          -
==========  ================================================  =====================================================

An outage ends when a batch has been answered, or when a connection is open and no request waits. So a
server that accepts connections but refuses requests causes no further log lines.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from functools import partial

from worqr.errors import Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.connection import MOVED, Wire
from worqr.link.dialer import Dialer
from worqr.link.driver import Driver, Timer, Waiter
from worqr.link.endpoints import EndpointResolver, resolver_for
from worqr.link.live_connection import LiveConnection
from worqr.link.log_thread import LogThread
from worqr.link.node_of_cluster import Cluster
from worqr.link.outage import Outage
from worqr.link.pipeline import Pipeline, survives
from worqr.link.ready_waiters import ReadyWaiters, settle_soon
from worqr.link.request import Posted, Request
from worqr.link.request_queue import RequestQueue
from worqr.link.server_errors import ConnectionLost
from worqr.link.session import Session
from worqr.link.settings import LinkSettings
from worqr.link.transport import Transport
from worqr.lua import all_scripts

logger: logging.Logger = logging.getLogger(__name__)

DIED = "the requests of a connection failed, and waiting calls get an error; this is a bug of worqr, please report it"
EVICTS = (
    "%(server)s has the maxmemory-policy %(policy)s, and may evict tasks when its memory is full: run CONFIG SET "
    "maxmemory-policy noeviction"
)

_TICK = 0.25  # seconds between looks at a server that is silent, or away
_LATE = 0.05  # seconds: a look that is later was held up by a loop that was blocked


class State(enum.Enum):
    """The state of a `NodeClient`; see the module."""

    NEW = "not started"
    DIALLING = "an attempt to connect is being made"
    WAITING = "until the next attempt to connect"
    READY = "requests are sent"
    HELD = "the server cannot work at the moment"
    ENDED = "nothing is sent any more"


class NodeClient:
    """The requests of one server. All methods belong to the driver's loop.

    Attributes:
        ended: why nothing can be sent; None while it works.
        state: see the module.
        connected_at, connections, run_id: of the present or last connection.
        outage: the time in which the server cannot be used.
        pipeline: its requests.

    Args:
        resolver: finds the server's address; by default the address in the settings.
        cluster: the cluster, if the server is one of its nodes.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        log_thread: LogThread,
        producer: str,
        *,
        resolver: EndpointResolver | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.state: State = State.NEW
        self.connected_at: float = 0.0
        self.connections: int = 0
        self.run_id: str = ""
        self._settings = settings
        self._driver = driver
        self._log_thread = log_thread
        self._producer = producer
        self._cluster = cluster
        self._resolver: EndpointResolver = resolver or resolver_for(settings)
        self.outage: Outage = Outage(log_thread, logger, self._resolver.name)
        self._dialer = Dialer(settings, driver, self._resolver, self._dialled)
        requests = RequestQueue(None if cluster is None else cluster.numbers)
        self.pipeline: Pipeline = Pipeline(self, driver, requests, self._resolver.name, clustered=settings.clustered)
        self._ready = ReadyWaiters(driver)
        self._timer: Timer | None = None
        self._looks_at = math.inf
        self._leaving = self._passing = False
        self._judged_not = False  # the last look came late, and judged nothing
        self._warned_of_eviction = False

    def start(self) -> None:
        clustered = self._settings.clustered
        self._dialer.scripts = [script.sharded if clustered else script for script in all_scripts()]
        self.ended = None
        self._dial()

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
        """The server may be elsewhere by now: go there at once, if so."""
        connection = self.pipeline.connection
        if self.ended is not None or (connection and self._resolver.is_current(connection.transport.wire.endpoint)):
            return
        self._dialer.forget()  # an attempt that leads to the old place may hang there for seconds
        if self.pipeline.is_busy:
            self.pipeline.give_up(MOVED, innocent=True)
        elif connection is not None:
            self.pipeline.drop(MOVED, quiet=True)
        if not self._dialer.dialling:
            self.outage.next_try = time.monotonic()
            self._dial()

    def close(self) -> None:
        """End the client; unanswered requests get Unavailable. Idempotent."""
        if self.state is not State.ENDED:
            self._end(Unavailable(f"the link to {self._settings.address.redacted} was closed"))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the connection is the parent's."""
        self.ended, self.state = error, State.ENDED
        self._dialer.close()
        if self.pipeline.connection is not None:
            self.pipeline.connection.transport.abandon()

    # Called by the pipeline

    def works(self) -> None:
        self.state = State.READY
        if self.outage.since is not None:
            self.outage.end()

    def holds(self, cause: str) -> None:
        self.state = State.HELD
        self.outage.begin(cause, waiting=len(self.pipeline.requests.pending), answers=True)

    def lost(self, cause: str, *, quiet: bool = False) -> None:
        """Dial at once, unless an attempt has failed before."""
        if self.state is State.ENDED:
            return
        self.state = State.WAITING
        self.outage.begin(cause, waiting=len(self.pipeline.requests.pending), quiet=quiet)
        self.outage.failed()
        self._resolver.invalidate()
        self.sort_out()
        if self.state is State.WAITING and self.outage.next_try <= time.monotonic():
            self._dial()
        self.plan()

    def redirected(self, requests: list[tuple[Request, str]]) -> list[Request]:
        self._resolver.invalidate()
        return [] if self._cluster is None or not requests else self._cluster.moved(self, requests)

    def batch_ended(self) -> None:
        if self._leaving or self._passing:
            self.sort_out()

    def died(self, exc: BaseException) -> None:
        """A bug; or a signal handler raised while the state was being changed: no call may wait in vain."""
        if not isinstance(exc, KeyboardInterrupt | SystemExit):
            error: WorqrError = WorqrBug(f"the link died ({type(exc).__name__}: {exc}); please report this")
            self._log_thread.emit(logger, "link.died", DIED, exc_info=exc)
        else:
            error = Unavailable(f"the link was interrupted by {type(exc).__name__} while it was in use")
        error.__cause__ = exc
        self._end(error)
        self._driver.interrupted(error)
        if self._cluster is not None:
            self._cluster.died(error)

    def _dial(self) -> None:
        self.pipeline.expire(time.monotonic(), self.outage.text(time.monotonic()))
        self.state = State.DIALLING
        self._dialer.dial(first=not self.outage.stood)

    @survives
    def _dialled(self, wire: Wire | None, error: WorqrError | None) -> None:
        """An attempt has ended."""
        if wire is not None:
            try:
                transport = Transport(wire, self._driver, self.pipeline.readable, self.pipeline.progress)
            except (ConnectionLost, Unavailable) as exc:
                wire.close()
                error = Unavailable(str(exc))
            else:
                self._connected(transport)
                return
        assert error is not None, "an attempt ends with a connection or an error"
        self.state = State.WAITING
        hopeless = self.outage.failed_to_connect(error, self._settings, waiting=len(self.pipeline.requests.pending))
        if hopeless is not None:
            self._ready.tell(hopeless)
        self.plan()

    def _connected(self, transport: Transport) -> None:
        facts, requests = transport.wire.facts, self.pipeline.requests
        self.outage.stood = True
        self.run_id = facts.run_id
        self.connected_at = time.monotonic()
        self.connections += 1
        self.state = State.READY
        session = Session(requests, self._producer, clustered=self._settings.clustered)
        self.pipeline.attach(LiveConnection(transport, session, self.connected_at))
        if not requests.pending:
            self.works()
        if facts.evicts and not self._warned_of_eviction:
            self._warned_of_eviction = True
            self._log_thread.emit(logger, "link.eviction", EVICTS, server=self.outage.address, policy=facts.eviction)
        self._ready.tell(None)
        self.pipeline.work()

    def plan(self) -> None:
        """Plan the next check for work that no socket event announces; every tick while requests wait."""
        if self.state is State.ENDED:
            return
        requests, connection = self.pipeline.requests, self.pipeline.connection
        usual = requests.has_nothing_held()
        waits = bool(requests.pending or requests.in_flight or self._ready) or not usual
        if not waits and (connection is not None or self._dialer.dialling):
            return
        now = time.monotonic()
        when = min(now + _TICK, requests.next_deadline) if waits else math.inf
        if connection is None:
            if not self._dialer.dialling:
                when = min(when, self.outage.next_try)
        elif connection.held_until > now:
            when = min(when, connection.held_until)
        elif connection.is_idle and not usual:  # else the end of the batch leads on
            when = min(when, requests.next_pause())
        when = max(when, now)
        if when < self._looks_at:
            self._looks_at = when
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._driver.call_at(when, self._look)

    @survives
    def _look(self) -> None:
        """Expire late requests, detect a silent server, and retry requests and connections that are due."""
        planned, self._looks_at, self._timer = self._looks_at, math.inf, None
        now = time.monotonic()
        if self.pipeline.is_busy:
            self.pipeline.receive()  # read the socket's input before checking the time
        late = now - planned > _LATE  # the loop was blocked, and the server is not to blame
        if late and self.pipeline.connection is not None:
            self.pipeline.connection.heard_at += now - planned
        self._judged_not = late and not self._judged_not  # a loop that is always late must not keep requests for ever
        if not self._judged_not:
            self._judge(now)
        if self.state is State.WAITING and now >= self.outage.next_try:
            self._dial()
        self.pipeline.work()
        if self._leaving or self._passing:  # until no request is left here
            self.sort_out()

    def _judge(self, now: float) -> None:
        """Expire late requests, and close a connection on which nothing has arrived for too long."""
        settle_soon(self._driver, self._ready.take_late(now), Unavailable(self.outage.text(now)))
        self.pipeline.expire(now, self.outage.text(now))
        connection = self.pipeline.connection
        if connection is None or not self.pipeline.is_busy:
            return
        silent = now - connection.heard_at
        if self._cluster is not None and silent >= _TICK:
            self._resolver.invalidate()  # another node may have its slots now
        if silent > self._settings.socket_timeout:
            self.pipeline.give_up(f"no answer for {self._settings.socket_timeout:g} s")

    # One node of a cluster

    @survives
    def sort_out(self) -> None:
        """Hand over the requests that now belong to another node; end, if this node is no primary any more."""
        cluster, requests = self._cluster, self.pipeline.requests
        if cluster is None or self.state is State.ENDED:
            return
        cluster.hand_over(requests.remove(partial(cluster.belongs, self)))
        self._passing = not cluster.passed(self, requests.bases())
        self._leaving = not cluster.is_needed(self)
        if self._leaving:
            for waiter, deadline in self._ready.take():
                cluster.wait_ready(waiter, deadline)
            connection = self.pipeline.connection
            if not self.pipeline.is_busy:
                if cluster.retire(self):
                    self._end(Unavailable("the node is no primary any more"))
            elif connection is not None and time.monotonic() - connection.heard_at >= _TICK:
                self.pipeline.give_up("it is no primary any more", innocent=True)
        self.plan()

    def is_idle(self) -> bool:
        """Nothing waits here."""
        return self.pipeline.requests.is_empty() and not self._ready

    # The end

    def _end(self, error: WorqrError) -> None:
        """End: fail the pending requests, and all later ones, so that no caller waits."""
        self.ended, self.state = error, State.ENDED
        self._dialer.close()
        self.pipeline.close()
        if self._timer is not None:
            self._timer.cancel()
        self._log_thread.watchers.back(id(self.outage))  # a node that left the cluster is no longer missing
        settle_soon(self._driver, self.pipeline.requests.clear(), error)
        self._ready.tell(error)
