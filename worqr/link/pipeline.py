"""`Pipeline`: the requests of one server, sent in batches and in order, over one connection after another.

Here: the time of each batch, reading, and the recovery of requests that have no outcome yet. Not here: the order of requests
(`request_queue`), the meaning of a reply (`session`), and the attempts to connect (`node_client`). The pipeline reports lost
connections and answered batches to `node_client`.

A request is sent at once if no batch is in flight. Requests that are submitted while a batch is in flight form the next one.
After a batch of several requests, the next one is sent when all tasks have had their turn, so that their requests join it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol, TypeVar

from worqr.link.driver import Driver, wake_all
from worqr.link.live_connection import LiveConnection
from worqr.link.request import Posted, Request, give_up, guilty, too_old
from worqr.link.request_queue import RequestQueue
from worqr.link.server_errors import ConnectionLost
from worqr.link.session import BatchResult, Session
from worqr.link.transport import Transport
from worqr.link.wire_form import as_sent

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
