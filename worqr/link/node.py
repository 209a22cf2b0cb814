"""`NodeClient`: the requests of one server, sent in batches over one connection after another. It runs in the caller's loop.

Here: the time of each batch, lost connections, time limits, outages, the end, and requests that now belong to another node of
a cluster. Not here: the order of requests (`requests`), the meaning of a reply (`session`), the attempts to connect
(`connector`), waiting (the drivers).

A request is sent at once if no batch is in flight. Requests that are submitted while a batch is in flight form the next one.
After a batch of several requests, the next one is sent when all tasks have had their turn, so that their requests join it.

An outage ends when a batch has been answered, or when a connection is open and no request waits. So a
server that accepts connections but refuses requests causes no further log lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import trio

from worqr.errors import Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.connector import (
    MOVED,
    Connector,
    EndpointResolver,
    OnSilence,
    Outage,
    ReadyWaiters,
    ServerInfo,
    State,
    Wire,
    open_connection,
)
from worqr.link.driver import LATE, Alarm, Driver, Waiter, Watch, settle_soon, wake_all
from worqr.link.failures import ConnectionLost, ErrorAction
from worqr.link.log_thread import LogThread
from worqr.link.session import (
    IDLE_CHECK,
    BatchResult,
    Phase,
    Posted,
    Request,
    RequestQueue,
    SequenceNumbers,
    Session,
    give_up,
    guilty,
    slot_of,
    too_old,
)
from worqr.link.settings import Endpoint, LinkSettings
from worqr.lua import all_scripts

if TYPE_CHECKING:
    from worqr.link.cluster import ClusterRouter

logger: logging.Logger = logging.getLogger(__name__)

WHILE_MOVING: Final = 0.05
"""Seconds until a request is sent again whose keys are being moved to another node."""

SILENT: Final = 0.25
"""Seconds without input, after which a node may have lost its slots."""

ENOUGH: Final = 64
"""So many waiting calls are sent before the other tasks had their turn, so that the server works on them meanwhile."""

IDLE_LOSS: Final = "it closed the connection while it was idle"
DIED = "the requests of a connection failed, and waiting calls get an error; this is a bug of worqr, please report it"
EVICTS = (
    "%(server)s has the maxmemory-policy %(policy)s, and may evict tasks when its memory is full: run CONFIG SET "
    "maxmemory-policy noeviction"
)

_TICK: Final = 0.25  # seconds between looks at a server that is silent, or away
_REDIRECTS = 3  # times that nodes may point to each other for one request before it has to wait a little

M = TypeVar("M", bound=Callable[..., None])


def survives(method: M) -> M:
    """Decorate a method that the driver calls: a bug in it ends the client, so that no call waits in vain. A BaseException, for
    example from a signal handler, also propagates.
    """

    @wraps(method)
    def run(self: NodeClient, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as exc:
            self.died(exc)
        except BaseException as exc:
            self.died(exc)
            raise

    return run  # type: ignore[return-value]


def why_died(exc: BaseException) -> WorqrError:
    """Return the error of all calls of a link that ends because of `exc`."""
    if isinstance(exc, KeyboardInterrupt | SystemExit):
        error: WorqrError = Unavailable(f"the link was interrupted by {type(exc).__name__} while it was in use")
    else:
        error = WorqrBug(f"the link died ({type(exc).__name__}: {exc}); please report this")
    error.__cause__ = exc
    return error


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


class LinkCondition(msgspec.Struct, frozen=True):
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
        requests: the requests that have no outcome yet.
        session: the open connection, or None.

    Args:
        resolver: finds the server's address.
        cluster: has the clients of all nodes, if the server is a node of a cluster; `node` is its address there.
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
        cluster: ClusterRouter | None = None,
        node: Endpoint | None = None,
        numbers: SequenceNumbers | None = None,
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.history: ConnectionHistory = ConnectionHistory()
        self.outage: Outage = Outage(log_thread, logger, resolver.name)
        self.requests: RequestQueue = RequestQueue(numbers)
        self.session: Session | None = None
        self._settings = settings
        self._driver = driver
        self._log_thread = log_thread
        self._producer = producer
        self._cluster = cluster
        self._node = node
        scripts = [script.sharded if settings.clustered else script for script in all_scripts()]

        def connect(on_silence: OnSilence) -> Wire:
            first = not self.outage.stood
            return open_connection(settings, resolver, "data", scripts=scripts, on_silence=on_silence, first=first)

        self.connector: Connector = Connector(
            *(driver, resolver, connect, self._connected), failed=self._failed, dialling=self._dialling
        )
        self._ready = ReadyWaiters(driver)
        self._alarm = Alarm(driver, self._look)
        self._receiving = False
        self._gathering = False  # the next batch is sent when the other tasks have had their turn
        self._judged_not = False  # the last look came late, and judged nothing
        self._hands_over = False  # requests of other nodes are left, or the node has no slot any more

    @property
    def condition(self) -> LinkCondition:
        """Its state; from any thread."""
        up = self.session is not None and self.outage.since is None
        unanswered = len(self.requests.pending) + len(self.requests.in_flight)
        return LinkCondition(up, max(0, self.history.count - 1), unanswered)

    def start(self) -> None:
        """Begin to connect."""
        self.ended = None
        self.connector.dial()

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection is open, was refused, or the deadline has passed."""
        self._ready.add(waiter, deadline)
        if self.session is not None or self.ended is not None:
            self._ready.tell(self.ended)
        else:
            self._plan(time.monotonic())

    @survives
    def reconsider(self) -> None:
        """Connect to the server's new address at once, if it has changed."""
        session = self.session
        if self.ended is not None or (session and self.connector.resolver.is_current(session.transport.wire.endpoint)):
            return
        if session is None:
            self.connector.dial()  # a present attempt leads to the old address, and may hang there for seconds
            return
        if session.phase is Phase.IDLE:
            self._drop(MOVED, quiet=True)
        else:
            self._lose(ConnectionLost(MOVED, innocent=True))
        self.connector.redial()

    def is_idle(self) -> bool:
        """Return True if no request and no caller waits."""
        return self.requests.is_empty() and not self._ready.waiting

    def close(self) -> None:
        """End the client; unanswered requests get Unavailable. Idempotent."""
        if self.connector.state is not State.ENDED:
            self._end(Unavailable(f"the link to {self._settings.address.redacted} was closed"))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the connection is the parent's."""
        self.ended = error
        self.connector.poison()
        if self.session is not None:
            self.session.transport.abandon()

    def died(self, exc: BaseException) -> None:
        """End because of a bug, or of a signal handler that raised in the middle of a change: no call may wait in vain."""
        error = why_died(exc)
        if isinstance(error, WorqrBug):
            self._log_thread.emit(logger, "link.died", DIED, exc_info=exc)
        self._end(error)
        self._driver.interrupted(error)
        if self._cluster is not None:
            self._cluster.died(error)

    def _survive(self, error: BaseException) -> None:
        """End because of a bug in a method that is called per request; see `survives`."""
        self.died(error)
        if not isinstance(error, Exception):
            raise error

    def _end(self, error: WorqrError) -> None:
        """End: fail the pending requests, and all later ones, so that no caller waits."""
        self.ended = error
        self.connector.close()
        self._close_session()
        self._alarm.cancel()
        self.outage.forget()  # a node that left the cluster is no longer missing
        settle_soon(self._driver, self.requests.clear(), error)
        self._ready.tell(error)

    # Sending

    @trio.lowlevel.enable_ki_protection
    def submit(self, request: Request | Posted) -> Watch | None:
        """Send a request, or several together, as soon as the connection is free. The outcome is set on the request, also that
        of the end. Return how the driver waits for the replies, if they come next; None: something else comes before.

        Ctrl-C does not interrupt it in the task of a caller.
        """
        session, requests = self.session, self.requests
        try:
            if self.ended is not None:
                settle_soon(self._driver, request if isinstance(request, Posted) else (request,), self.ended)
            elif session is None or session.phase is not Phase.IDLE or self._receiving:
                requests.add(request)
                if session is None:
                    self._plan(time.monotonic())
            elif session.gathers and not (type(request) is Posted and request.is_block):
                requests.add(request)
                if len(requests.pending) >= ENOUGH:
                    self._work()
                elif not self._gathering:
                    self._gathering = True
                    self._driver.soon(self._gathered)
            elif type(request) is not Request or requests.pending or requests.held or requests.replication.waiting:
                requests.add(request)
                self._work()
                return session.transport.watch
            elif session.held_until <= (now := time.monotonic()):
                self._send(session, now, request)
                self._plan(now)
                return session.transport.watch
            else:
                requests.add(request)
                self._plan(now)
        except BaseException as error:
            self._survive(error)
        return None

    @survives
    def _gathered(self) -> None:
        self._gathering = False
        self._work()

    def _work(self) -> None:
        """Send the waiting requests, if no batch is in flight."""
        session, requests = self.session, self.requests
        now = time.monotonic()
        if session is not None and session.phase is Phase.IDLE and not self._receiving:
            if requests.held:
                requests.release_due(now)
            if session.held_until <= now:
                if requests.pending:
                    self._send(session, now)
                elif requests.replication.waiting:
                    self._lose(session.count_replicas(now))
            if session.phase is not Phase.IDLE:
                session.transport.watch.expect()
        self._plan(now)

    def _send(self, session: Session, now: float, alone: Request | None = None) -> None:
        """Send the next batch, or a request that found nothing else waiting."""
        if now - session.used_at > IDLE_CHECK and not session.is_still_there():
            if alone is not None:
                self.requests.add(alone)
            self._drop(IDLE_LOSS, quiet=True)
            return
        batch = self.requests.take() if alone is None else self.requests.take_alone(alone)
        refused = self.requests.take_too_old() if self.requests.too_old else []
        try:
            if batch:
                if (lost := session.send(batch, now)) is not None:
                    self._lose(lost)
                if self.session is session and session.phase is Phase.IDLE:  # none of it could be packed
                    settled = session.take_settled()
                    self._batch_ended(session)  # first: a caller that is woken may send at once
                    self._settle(settled)
        finally:
            if refused:  # last, for the same reason
                too_old(refused)
                self._settle(refused)

    # Receiving

    def _readable(self) -> bool:
        """The socket has something to read. Return True if more is to come soon."""
        requests = self.requests
        try:
            self._receive()
            if requests.pending or requests.held or requests.replication.waiting:
                self._work()
        except BaseException as error:
            self._survive(error)
        return bool(requests.pending or requests.in_flight or requests.held or requests.replication.waiting)

    @survives
    def _progress(self, lost: ConnectionLost | None) -> None:
        """The socket accepted more bytes, or the connection was lost."""
        if lost is None and self.session is not None:
            self.session.progress()
            self._receive()
        self._lose(lost)
        self._work()

    def _receive(self) -> None:
        """Read the input, and settle the requests whose replies have arrived."""
        session = self.session
        if session is None or self._receiving:
            return
        was_idle = session.phase is Phase.IDLE
        self._receiving = True
        try:
            lost = session.receive()
        finally:
            self._receiving = False
        settled = session.take_settled()
        self.requests.numbers.settle(settled)
        try:
            if lost is not None and was_idle:
                self._drop(IDLE_LOSS, quiet=True)
            elif lost is not None:
                self._lose(lost)
            elif not was_idle and session.phase is Phase.IDLE:
                self._batch_ended(session)
        finally:  # last: a caller that is woken may send at once
            wake_all(settled)

    def _settle(self, requests: list[Request]) -> None:
        """Settle requests that have their outcome, and wake their callers."""
        self.requests.numbers.settle(requests)
        wake_all(requests)

    def _batch_ended(self, session: Session) -> None:
        result = session.result
        if result.again or result.moved:
            self._recover(session, session.take_result())
        elif self.requests.end_batch() and (session.troubled or self.outage.since is not None):
            self._works(session)
        if self._hands_over:
            self._sort_out()

    # Failures

    def _works(self, session: Session | None = None) -> None:
        """A whole batch was answered by this connection; None: a connection is open, and nothing waits."""
        if session is not None:
            session.works()
        if self.outage.since is not None:
            self.connector.works()
            self.outage.end()

    def _lose(self, lost: ConnectionLost | None) -> None:
        """Recover from a connection that broke while a batch was in flight; do nothing if `lost` is None."""
        session = self.session
        if lost is not None and session is not None:
            session.lose(lost, time.monotonic())
            self._settle(session.take_settled())
            self._recover(session, session.result)

    def _drop(self, cause: str, *, quiet: bool = False) -> None:
        """Close the connection, on which nothing is under way. Dial at once, unless an attempt has failed before.

        `quiet`: it was idle.
        """
        self._close_session()
        if self.requests.replication.waiting:
            self.requests.put_back(self.requests.replication.withdraw())
        if self.ended is None:
            self.outage.begin(cause, waiting=len(self.requests.pending), quiet=quiet)
            self.connector.lost()
            self._sort_out()
            self.connector.retry()
            self._plan(time.monotonic())

    def _close_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.transport.close()

    def _recover(self, session: Session, result: BatchResult) -> None:
        """Put back the unanswered requests in their old order, and remove the reason why they failed."""
        requests, again, lost = self.requests, result.again, result.lost
        # first, while the whole batch still counts as in flight
        moving = [*again.get(ErrorAction.MOVING, ()), *self._redirected(result)]
        ids = {id(request) for refused in again.values() for request in refused} | set(map(id, moving))
        in_order = [request for request in requests.in_flight if id(request) in ids]
        if lost is not None and not lost.innocent:
            failed = requests.blame(result.unanswered, time.monotonic())
            guilty(failed, self.outage.address, lost.cause)
            self._settle(failed)
        else:
            for request in result.unanswered:
                request.may_have_run()
            requests.put_back(result.unanswered)
        requests.put_back(in_order)
        requests.set_aside({request.call.base for request in moving}, time.monotonic() + WHILE_MOVING)
        noscript = again.get(ErrorAction.NOSCRIPT)
        if lost is not None:
            self._drop(lost.cause)
        elif ErrorAction.DROP in again:
            self._drop(result.cause)
        elif ErrorAction.HOLD in again or (noscript and not session.load(noscript, executed=result.settled)):
            session.hold()
            self.connector.hold()
            cause = result.cause or "NOSCRIPT scripts vanish as soon as they are loaded"
            self.outage.begin(cause, waiting=len(requests.pending), answers=True)
        elif not noscript:
            self._works(session)

    # The connection

    @survives
    def _dialling(self) -> None:
        self._expire(time.monotonic())

    @survives
    def _failed(self, error: WorqrError) -> None:
        """An attempt has failed."""
        hopeless = self.outage.failed_to_connect(error, self._settings, waiting=len(self.requests.pending))
        if hopeless is not None:
            self._ready.tell(hopeless)
        self._plan(time.monotonic())
        if self._hands_over:
            self._sort_out()

    @survives
    def _connected(self, wire: Wire) -> None:
        transport = self.connector.transport(wire, self._readable, self._progress)
        if transport is None:
            return
        self.session = Session(transport, self.requests, self._producer, clustered=self._settings.clustered)
        self.outage.connected(self.connector.resolver.name)
        self._note(wire.facts)
        if not self.requests.pending:
            self._works()
        self._ready.tell(None)
        self._work()
        if self._hands_over:
            self._sort_out()

    def _note(self, facts: ServerInfo) -> None:
        """Note the connection. Warn once if the server may evict tasks."""
        before = self.history
        if facts.evicts and not before.evicts:
            self._log_thread.emit(logger, "link.eviction", EVICTS, server=self.outage.address, policy=facts.eviction)
        evicts = before.evicts or facts.evicts
        self.history = ConnectionHistory(time.monotonic(), before.count + 1, facts.run_id, evicts)

    # Time

    def _plan(self, now: float) -> None:
        """Plan the next check for work that no socket event announces; every tick while requests wait."""
        requests, session = self.requests, self.session
        pauses = requests.held or requests.replication.waiting
        flies = session is not None and session.phase is not Phase.IDLE  # also if no request waits for it any more
        waits = flies or requests.pending or requests.in_flight or self._ready.waiting or pauses
        if self.ended is not None or not waits:
            return
        when = now + _TICK
        if requests.next_deadline < when:
            when = requests.next_deadline
        if session is not None:
            if session.held_until > now:
                when = min(when, session.held_until)
            elif pauses and session.phase is Phase.IDLE:  # else the end of the batch leads on
                when = min(when, requests.next_pause())
        if when < self._alarm.at:
            self._alarm.set(max(when, now))

    @survives
    def _look(self, late: float) -> None:
        """Expire late requests, detect a silent server, and retry requests that are due."""
        session, now = self.session, time.monotonic()
        if session is not None and session.phase is not Phase.IDLE:
            self._receive()  # read the socket's input before checking the time
        blocked = late > LATE  # the server is not to blame
        if blocked and self.session is not None:
            self.session.forgive(late)
        self._judged_not = (
            blocked and not self._judged_not
        )  # a loop that is always late must not keep requests for ever
        if not self._judged_not:
            self._judge(now)
        self._work()
        if self._hands_over:
            self._sort_out()

    def _judge(self, now: float) -> None:
        """Expire late requests, and close a connection on which nothing has arrived for too long."""
        if unready := self._ready.take_late(now):
            settle_soon(self._driver, unready, Unavailable(self.outage.text(now)))
        self._expire(now)
        session = self.session
        if session is None or session.phase is Phase.IDLE:
            return
        silent = now - session.heard_at
        if self._cluster is not None and silent >= SILENT:
            self.connector.resolver.invalidate()  # another node may have its slots now
        if silent > self._settings.socket_timeout:
            self._lose(ConnectionLost(f"no answer for {self._settings.socket_timeout:g} s"))

    def _expire(self, now: float) -> None:
        """Give up requests that have waited too long, and those whose owner is dead."""
        if self.requests.replication.waiting:
            self._settle(self.requests.replication.overdue(now))
        late, orphans = self.requests.overdue(now, owners=True)
        if late or orphans:
            give_up(late, orphans, self.outage.text(now))
            wake_all([*late, *orphans])

    # Requests that now belong to another node of the cluster

    def _belongs(self, request: Request) -> bool:
        """Return True if the node has the keys of `request`, as far as is known."""
        return self._cluster is None or self._cluster.topology.owner(slot_of(request.call.base)) in (self._node, None)

    def _redirected(self, result: BatchResult) -> list[Request]:
        """Hand over the requests that the node has redirected. Return those that have to wait here a little."""
        if result.moved or ErrorAction.MOVING in result.again:
            self.connector.resolver.invalidate()
        if not result.moved or self._cluster is None or self._node is None:
            return []
        self._cluster.topology.learn((redirect for _, redirect in result.moved), self._node)
        tired: set[str] = set()  # bases: later requests of these bases wait as well
        for request, _ in result.moved:
            if request.count_redirect() % _REDIRECTS == 0 or self._belongs(request):  # the nodes disagree
                tired.add(request.call.base)
        self._cluster.hand_over([request for request, _ in result.moved if request.call.base not in tired])
        return [request for request, _ in result.moved if request.call.base in tired]

    @survives
    def sort_out(self) -> None:
        """Hand over the requests that now belong to another node; end the client, if its node is no primary any more."""
        self._sort_out()

    def _sort_out(self) -> None:
        cluster, node = self._cluster, self._node
        if cluster is None or node is None or self.ended is not None:
            return
        cluster.hand_over(self.requests.remove(self._belongs))
        passing = not cluster.passed(node, self.requests.bases())
        leaving = node not in cluster.topology.view.primaries
        self._hands_over = passing or leaving
        if leaving:
            self._leave(cluster, node)
        self._plan(time.monotonic())

    def _leave(self, cluster: ClusterRouter, node: Endpoint) -> None:
        for waiter, deadline in self._ready.take():
            cluster.wait_ready(waiter, deadline)
        session = self.session
        if session is None or session.phase is Phase.IDLE:
            if cluster.retire(node):
                self._end(Unavailable("the node is no primary any more"))
        elif time.monotonic() - session.heard_at >= SILENT:
            self._lose(ConnectionLost("it is no primary any more", innocent=True))
