"""`NodeClient`: the requests of one server, over all of its connections. It runs in the caller's loop, and has no thread.

Here: the time limits, outages, the end, batches and their failures, and requests of other nodes of a cluster. Not here: the
states of the connection (`connector`), waiting (the drivers).

An outage ends when a batch has been answered, or when a connection is open and no request waits. So a
server that accepts connections but refuses requests causes no further log lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Generic, Protocol, TypeVar

from worqr.errors import Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.connection import MOVED, ConnectionLost, EndpointResolver, OnSilence, ServerInfo, Wire, open_connection
from worqr.link.connector import Connector, Outage, ReadyWaiters, State, Transport
from worqr.link.driver import LATE, Alarm, Driver, Waiter, settle_soon, wake_all
from worqr.link.log_thread import LogThread
from worqr.link.request_queue import Posted, Request, RequestQueue, SequenceNumbers, give_up, guilty, too_old
from worqr.link.session import BatchResult, LiveConnection, Session, as_sent, slot_of
from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.topology import Topology
from worqr.lua import all_scripts

# `Pipeline`: the requests of one server, sent in batches and in order, over one connection after another.
#
# Here: the time of each batch, reading, and the recovery of requests that have no outcome yet. Not here: the order of requests
# (`request_queue`), the meaning of a reply (`session`), and the attempts to connect (`node_client`). The pipeline reports lost
# connections and answered batches to `node_client`.
#
# A request is sent at once if no batch is in flight. Requests that are submitted while a batch is in flight form the next one.
# After a batch of several requests, the next one is sent when all tasks have had their turn, so that their requests join it.


WHILE_MOVING: Final = 0.05
"""Seconds until a request is sent again whose keys are being moved to another node."""

IDLE_LOSS: Final = "it closed the connection while it was idle"

M = TypeVar("M", bound=Callable[..., None])


class Survivor(Protocol):
    """An object that ends when one of its callbacks fails."""

    def died(self, exc: BaseException) -> None:
        """A callback failed: end, so that no call waits in vain."""
        ...


def survives(method: M) -> M:
    """Decorate a callback: a bug in it ends its object. A BaseException, for example from a signal handler, also propagates."""

    @wraps(method)
    def run(self: Survivor, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as exc:
            self.died(exc)
        except BaseException as exc:
            self.died(exc)
            raise

    return run  # type: ignore[return-value]


class Server(Survivor, Protocol):
    """The client of a server, to which a pipeline reports."""

    def works(self) -> None:
        """A whole batch was answered."""
        ...

    def holds(self, cause: str) -> None:
        """The server replied that it cannot work at the moment."""
        ...

    def lost(self, cause: str, *, quiet: bool = False) -> None:
        """The connection is of no use any more, and is closed. `quiet`: it was idle."""
        ...

    def redirected(self, requests: list[tuple[Request, str]]) -> list[Request]:
        """Slots are moving; a node has redirected these: ``SLOT HOST:PORT``. Return those that have to wait here."""
        ...

    def plan(self) -> None:
        """The time of the next check may have changed."""
        ...

    def batch_ended(self) -> None:
        """No batch is in flight any more."""
        ...


class Pipeline:
    """The requests of one server. All methods belong to the driver's loop.

    Attributes:
        requests: the requests that have no outcome yet.
        connection: the open connection, or None.
    """

    def __init__(
        self, server: Server, driver: Driver, queue: RequestQueue, address: str, *, producer: str, clustered: bool
    ) -> None:
        self.requests: RequestQueue = queue
        self.connection: LiveConnection | None = None
        self._server = server
        self._driver = driver
        self._address = address
        self._producer = producer
        self._clustered = clustered
        self._receiving = self._gathering = False

    @property
    def is_busy(self) -> bool:
        """True if a batch is in flight."""
        return self.connection is not None and not self.connection.is_idle

    def attach(self, transport: Transport) -> None:
        """Use this connection from now on."""
        session = Session(self.requests, self._producer, clustered=self._clustered)
        self.connection = LiveConnection(transport, session, time.monotonic())

    def close(self) -> None:
        """Close the connection, if it is open. Waiting requests stay in the queue."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.transport.close()

    def died(self, exc: BaseException) -> None:
        self._server.died(exc)

    # Sending

    def submit(self, requests: Request | Posted) -> None:
        """Send a request, or several together, as soon as the connection is free."""
        if isinstance(requests, Posted):
            for each in requests:
                self.requests.add(each)
        else:
            self.requests.add(requests)
        connection = self.connection
        if connection is None:
            self._server.plan()
        elif not self._receiving and connection.is_idle:
            if not connection.gathers:
                self.work()
            elif not self._gathering:
                self._gathering = True
                self._driver.soon(self._gathered)

    @survives
    def _gathered(self) -> None:
        self._gathering = False
        self.work()

    @survives
    def work(self) -> None:
        """Send the waiting requests, if no batch is in flight."""
        connection, queue = self.connection, self.requests
        if connection is not None and connection.is_idle and not self._receiving:
            now = time.monotonic()
            if not queue.has_nothing_held():
                queue.release_due(now)
            if connection.held_until <= now:
                if queue.pending:
                    self._send(connection, now)
                elif queue.replication.waiting:
                    self._lose(connection.count_replicas(now))
        self._server.plan()

    def _send(self, connection: LiveConnection, now: float) -> None:
        queue = self.requests
        if not connection.is_still_there(now):
            self.drop(IDLE_LOSS, quiet=True)
            return
        batch = queue.take()
        if queue.too_old:
            refused = queue.take_too_old()
            too_old(refused)
            self.settle(refused)
        if batch:
            self._lose(connection.send(batch, now))
            if self.connection is connection and connection.is_idle:  # none of it could be packed
                self.settle(connection.session.take_settled())
                self._batch_ended(connection)

    # Receiving

    @survives
    def readable(self) -> None:
        """The socket has something to read."""
        self.receive()
        self.work()

    @survives
    def progress(self, lost: ConnectionLost | None) -> None:
        """The socket accepted more bytes, or the connection was lost."""
        if lost is None and self.connection is not None:
            self.connection.progress()
            self.receive()
        self._lose(lost)
        self.work()

    def receive(self) -> None:
        """Read the input, and settle the requests whose replies have arrived."""
        connection = self.connection
        if connection is None or self._receiving:
            return
        was_idle = connection.is_idle
        self._receiving = True
        try:
            lost = connection.receive()
        finally:
            self._receiving = False
        self.settle(connection.session.take_settled())
        if lost is not None and was_idle:
            self.drop(IDLE_LOSS, quiet=True)
        elif lost is not None:
            self._lose(lost)
        elif not was_idle and connection.is_idle:
            self._batch_ended(connection)

    def settle(self, requests: list[Request]) -> None:
        """Settle requests that have their outcome, and wake their callers."""
        self.requests.numbers.settle(requests)
        wake_all(requests)

    def _batch_ended(self, connection: LiveConnection) -> None:
        result = connection.session.take_result()
        if result.is_complete:
            if self.requests.end_batch():
                connection.works()
                self._server.works()
        else:
            self._recover(connection, result)
        self._server.batch_ended()

    # Failures

    def _lose(self, lost: ConnectionLost | None) -> None:
        """Recover from a connection that broke while a batch was in flight; do nothing if `lost` is None."""
        connection = self.connection
        if lost is None or connection is None:
            return
        connection.session.lose(lost, time.monotonic())
        self.settle(connection.session.take_settled())
        self._recover(connection, connection.session.result)

    def give_up(self, cause: str, *, innocent: bool = False) -> None:
        """Give up a connection on which something is under way. `innocent`: no request can have caused it."""
        self._lose(ConnectionLost(cause, innocent=innocent))

    def drop(self, cause: str, *, quiet: bool = False) -> None:
        """Close the connection, which is of no use any more. Nothing is under way on it."""
        self.close()
        if self.requests.replication.waiting:
            self.requests.put_back(self.requests.replication.withdraw())
        self._server.lost(cause, quiet=quiet)

    def _recover(self, connection: LiveConnection, result: BatchResult) -> None:
        """Put back the unanswered requests in their old order, and remove the reason why they failed."""
        queue = self.requests
        # first, while the whole batch still counts as in flight
        redirected = self._server.redirected(result.moved) if result.moving or result.moved else []
        moving = [*result.moving, *redirected]
        again = set(map(id, (*result.noscript, *result.held, *result.dropped, *moving)))
        in_order = [request for request in queue.in_flight if id(request) in again]
        lost = result.lost
        if lost is not None and not lost.innocent:
            failed = queue.blame(result.unanswered, time.monotonic())
            guilty(failed, self._address, lost.cause)
            self.settle(failed)
        else:
            for request in result.unanswered:
                request.may_have_run()
            queue.put_back(result.unanswered)
        queue.put_back(in_order)
        if moving:
            queue.set_aside({request.call.base for request in moving}, time.monotonic() + WHILE_MOVING)
        if lost is not None:
            self.drop(lost.cause)
        elif result.dropped:
            self.drop(result.cause)
        elif result.held or (result.noscript and not self._load(connection, result)):
            connection.hold()
            self._server.holds(result.cause or "NOSCRIPT scripts vanish as soon as they are loaded")
        elif not result.noscript:
            connection.works()
            self._server.works()

    def _load(self, connection: LiveConnection, result: BatchResult) -> bool:
        """Load the scripts that the server has forgotten in front of the next batch. Return False if the batch has to wait."""
        missing = {as_sent(request.call, clustered=self._clustered)[0] for request in result.noscript}
        return connection.load({script.sha: script for script in missing}, executed=result.settled)

    def expire(self, now: float, outage: str) -> None:
        """Give up requests that have waited too long, and those whose owner is dead."""
        if self.requests.replication.waiting:
            self.settle(self.requests.replication.overdue(now))
        late, orphans = self.requests.overdue(now, owners=True)
        if late or orphans:
            give_up(late, orphans, outage)
            wake_all([*late, *orphans])


# The requests of slots that have moved to another node of a cluster. Used in the driver's loop.
#
# `Rebalancer` hands over the requests in one node's client that belong to other nodes. `SlotOrder` chooses the client for the
# new requests of such a slot. Not here: the clients of all nodes (`cluster_router`; the protocol `Cluster` is a part of it).


P = TypeVar("P")

SILENT: Final = 0.25
"""Seconds without input, after which a node may have lost its slots."""

_REDIRECTS = 3  # times that nodes may point to each other for one request before it has to wait a little


class Cluster(Protocol):
    """The router, as the client of one node sees it."""

    topology: Topology

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Send them to the nodes that have their keys."""
        ...

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection is open."""
        ...

    def passed(self, node: Endpoint, waiting: Collection[str]) -> bool:
        """The node's client has requests of these bases left. Return True if all of them belong to the node.

        Until then the client also gets the new requests of the other slots, so that they stay behind the older ones.
        """
        ...

    def retire(self, node: Endpoint) -> bool:
        """Forget the node's client, unless requests wait there. True: it gets no more."""
        ...

    def died(self, bug: WorqrError) -> None:
        """The client has ended by a bug."""
        ...


class Rebalancer:
    """The place of one client in its cluster.

    Attributes:
        cluster: the router.
        is_active: requests of other nodes are left, or the node has no slot any more.

    Args:
        node: the client's node.
        end: ends the client.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: Endpoint,
        pipeline: Pipeline,
        ready: ReadyWaiters,
        end: Callable[[WorqrError], object],
    ) -> None:
        self.cluster: Cluster = cluster
        self.is_active: bool = False
        self._node = node
        self._pipeline = pipeline
        self._ready = ready
        self._end = end

    def belongs(self, request: Request) -> bool:
        """Return True if the node has the keys of `request`, as far as is known."""
        return self.cluster.topology.owner(slot_of(request.call.base)) in (self._node, None)

    def moved(self, requests: list[tuple[Request, str]]) -> list[Request]:
        """The node has redirected these: ``SLOT HOST:PORT``. Return those that have to wait here a little."""
        self.cluster.topology.learn((redirect for _, redirect in requests), self._node)
        tired: set[str] = set()  # bases: later requests of these bases wait as well
        for request, _ in requests:
            if request.count_redirect() % _REDIRECTS == 0 or self.belongs(request):  # the nodes disagree
                tired.add(request.call.base)
        self.cluster.hand_over([request for request, _ in requests if request.call.base not in tired])
        return [request for request, _ in requests if request.call.base in tired]

    def sort_out(self) -> None:
        """Hand over the requests that now belong to another node; end the client, if its node is no primary any more."""
        requests = self._pipeline.requests
        self.cluster.hand_over(requests.remove(self.belongs))
        passing = not self.cluster.passed(self._node, requests.bases())
        leaving = self._node not in self.cluster.topology.view.primaries
        self.is_active = passing or leaving
        if leaving:
            self._leave()

    def _leave(self) -> None:
        for waiter, deadline in self._ready.take():
            self.cluster.wait_ready(waiter, deadline)
        connection = self._pipeline.connection
        if not self._pipeline.is_busy:
            if self.cluster.retire(self._node):
                self._end(Unavailable("the node is no primary any more"))
        elif connection is not None and time.monotonic() - connection.heard_at >= SILENT:
            self._pipeline.give_up("it is no primary any more", innocent=True)


class SlotOrder(Generic[P]):
    """Chooses the client for the new requests of a slot that has moved to another node. `ClusterRouter` uses it in the loop.

    It remembers the client that got the newest request of each slot: at most 16384 entries.

    The old node's client may still have requests of the slot: waiting, held back, or in flight. If the new node's client got
    a new request at once, it would overtake them. So the old client gets it, too, and hands over all requests in order. When
    the old client reports that it has none of the slot's requests left, the new client gets the new ones.
    """

    __slots__ = ("_last", "_passing")

    def __init__(self) -> None:
        self._last: dict[int, P] = {}
        self._passing: dict[P, set[int]] = {}  # slots of other nodes, of which this client may have requests left

    def choose(self, slot: int, owner: P) -> tuple[P, bool]:
        """Return the client for a new request of `slot`, whose node is `owner`. True: ask this client to hand over its
        requests.
        """
        last = self._last.setdefault(slot, owner)
        if last == owner:
            return owner, False
        is_new = last not in self._passing
        self._passing.setdefault(last, set()).add(slot)
        return last, is_new

    def is_passing(self, client: P) -> bool:
        """Return True if `client` must report the slots of its remaining requests."""
        return client in self._passing

    def passed(self, client: P, left: Collection[int]) -> None:
        """`client` has requests of no other slots than `left`, neither waiting nor on their way."""
        slots = self._passing.pop(client, set[int]())
        for slot in slots.difference(left):
            del self._last[slot]
        if remaining := slots.intersection(left):
            self._passing[client] = remaining

    def forget(self, client: P) -> None:
        """`client` has ended, and has nothing left."""
        self._passing.pop(client, None)
        self._last = {slot: last for slot, last in self._last.items() if last != client}


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
