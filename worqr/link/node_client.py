"""`NodeClient`: the requests of one server, over all of its connections. It runs in the caller's loop, and has no thread.

Here: when a batch is sent, when the server is dialled, and what is done about each way in which a connection fails. Not here:
the order of requests (`backlog`), what a reply means (`session`), bytes (`transport`), waiting (the drivers).

States, and what leads on:

==========  ================================================  =====================================================
state       meaning                                           leads to
==========  ================================================  =====================================================
NEW         not started                                       DIALLING by `start`
DIALLING    no connection; an attempt is being made           READY, or WAITING when it fails
WAITING     no connection; the next attempt has a time        DIALLING when the time has come
READY       connected: requests are sent                      HELD, DIALLING or WAITING when the connection is lost
HELD        connected; the server cannot work at the moment   READY after a pause
ENDED       nothing is sent any more                          -
==========  ================================================  =====================================================

A request is sent at once when nothing is under way. What comes while a batch is under way goes out together when it has ended.
After a batch of several requests the next one is sent when all tasks have had their turn, so that their requests join it.
An outage counts as over when a batch has been answered, or a connection stands and nothing waits: a server that lets us in and
refuses to work makes no further log lines.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial, wraps
from typing import Any, Final, Protocol, TypeVar

from worqr.errors import Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.backlog import Backlog
from worqr.link.connection import MOVED, Wire
from worqr.link.dialect import as_sent
from worqr.link.dialer import Dialer
from worqr.link.driver import Driver, Timer, Waiter, wake_all
from worqr.link.faults import Lost
from worqr.link.giving_up import give_up, guilty, too_old
from worqr.link.outage import Outage, pause_after
from worqr.link.request import Merged, Numbers, Request, fail_all
from worqr.link.routes import Route, route_to
from worqr.link.scribe import Scribe
from worqr.link.session import BatchResult, Phase, Session
from worqr.link.settings import LinkSettings
from worqr.link.transport import Transport
from worqr.lua import Script, all_scripts

logger: logging.Logger = logging.getLogger(__name__)

DIED = "the requests of a connection failed, and waiting calls get an error; this is a bug of worqr, please report it"
EVICTS = (
    "%(server)s has the maxmemory-policy %(policy)s, and may evict tasks when its memory is full: run CONFIG SET "
    "maxmemory-policy noeviction"
)
WHILE_MOVING: Final = 0.05
"""Seconds until a request is sent again whose keys are being moved to another node."""

_IDLE_CHECK = 0.05  # seconds without a request, after which a connection is read before it is used
_TICK = 0.1  # seconds between looks at a server that is silent, or away
_LATE = 0.05  # seconds: a look that is later was held up by a loop that was blocked
_NOSCRIPT_ROUNDS = 3  # a program flushes scripts faster than we load them: from here on wait between the tries

M = TypeVar("M", bound=Callable[..., None])


class State(enum.Enum):
    """The state of a `NodeClient`; see the module."""

    NEW = "not started"
    DIALLING = "an attempt to connect is being made"
    WAITING = "until the next attempt to connect"
    READY = "requests are sent"
    HELD = "the server cannot work at the moment"
    ENDED = "nothing is sent any more"


class Posted(list[Request]):
    """Requests that are submitted together."""


class Cluster(Protocol):
    """What the client of one node asks of those who know all nodes. Called in the loop."""

    numbers: Numbers

    def belongs(self, client: NodeClient, request: Request) -> bool:
        """Return True if the node of `client` has the keys of `request`."""
        ...

    def hand_over(self, requests: list[Request]) -> None:
        """Send them to the nodes that have their keys."""
        ...

    def moved(self, client: NodeClient, requests: list[tuple[Request, str]]) -> list[Request]:
        """The node has redirected these: ``SLOT HOST:PORT``. Return those that have to wait at `client` a little."""
        ...

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection stands."""
        ...

    def passed(self, client: NodeClient, waiting: Collection[str]) -> bool:
        """Return True if `client` has handed over all requests of other nodes. `waiting`: the bases of what it has left.

        Until then it also gets the new requests of these slots, so that they stay behind the older ones.
        """
        ...

    def is_needed(self, client: NodeClient) -> bool:
        """Return True if the node of `client` has a slot."""
        ...

    def retire(self, client: NodeClient) -> bool:
        """Forget `client`, unless requests wait there. True: it gets no more."""
        ...

    def died(self, bug: WorqrError) -> None:
        """A client has ended by a bug."""
        ...


def _survives(method: M) -> M:
    """Let a bug in a callback end the client, so that no call waits for it in vain."""

    @wraps(method)
    def run(self: NodeClient, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as exc:
            self._died(exc)  # pyright: ignore[reportPrivateUsage]
        except BaseException as exc:  # out of a signal handler, in a plain thread
            self._died(exc)  # pyright: ignore[reportPrivateUsage]
            raise

    return run  # type: ignore[return-value]


class _Connection:
    """One connection, and what is known of it alone.

    Attributes:
        used_at: when a batch was last sent.
        heard_at: when bytes last came or went, while something is under way. Moved on by the time in which the loop was blocked.
        held_until: do not send before; -inf: send.
        holds: replies in a row that the server cannot work.
        noscript_rounds: batches in a row of which nothing was executed, because scripts were missing.
        load_first: scripts to be loaded in front of the next batch.
        gathers: the last batch had several requests: let the next ones join before it is sent.
    """

    __slots__ = (
        "gathers",
        "heard_at",
        "held_until",
        "holds",
        "load_first",
        "noscript_rounds",
        "session",
        "transport",
        "used_at",
    )

    def __init__(self, transport: Transport, session: Session, now: float) -> None:
        self.transport = transport
        self.session = session
        self.used_at = self.heard_at = now
        self.held_until: float = -math.inf
        self.holds: int = 0
        self.noscript_rounds: int = 0
        self.load_first: dict[str, Script] = {}
        self.gathers: bool = False


class NodeClient:
    """The requests of one server. All methods belong to the driver's loop.

    Attributes:
        ended: why nothing can be sent; None while it works.
        state: see the module.
        connected_at, connections, run_id: of the present or last connection.
        outage: the time in which the server cannot be used.

    Args:
        route: where the server is; by default where the settings say.
        cluster: of which this serves one node.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        scribe: Scribe,
        producer: str,
        *,
        route: Route | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.state: State = State.NEW
        self.connected_at: float = 0.0
        self.connections: int = 0
        self.run_id: str = ""
        self._settings = settings
        self._driver = driver
        self._scribe = scribe
        self._producer = producer
        self._cluster = cluster
        self._route: Route = route or route_to(settings)
        self.outage: Outage = Outage(scribe, logger, self._route.name)
        self._dialer = Dialer(settings, driver, self._route, self._dialled)
        self._backlog = Backlog(None if cluster is None else cluster.numbers)
        self._ready_waiters: list[tuple[Waiter, float]] = []
        self._connection: _Connection | None = None
        self._scripts: dict[str, Script] = {}
        self._timer: Timer | None = None
        self._looks_at = math.inf
        self._receiving = self._gathering = self._leaving = self._passing = False
        self._warned_of_eviction = False

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        clustered = self._settings.clustered
        scripts = [script.sharded if clustered else script for script in all_scripts()]
        self._scripts = {script.sha: script for script in scripts}
        self.ended = None
        self._dial()

    def submit(self, request: Request | Posted) -> None:
        """Send it, or all of them together. The outcome is set on the request, also that of the end."""
        if self.ended is not None:
            self._fail(request if isinstance(request, Posted) else (request,), self.ended)
            return
        if isinstance(request, Posted):
            for each in request:
                self._backlog.add(each)
        else:
            self._backlog.add(request)
        connection = self._connection
        if connection is None:
            self._plan()
        elif not self._receiving and connection.session.phase is Phase.IDLE:
            if not connection.gathers:
                self._work()
            elif not self._gathering:
                self._gathering = True
                self._driver.soon(self._gathered)

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection stands, was refused, or the deadline has passed."""
        self._ready_waiters.append((waiter, deadline))
        if self._connection is not None or self.ended is not None:
            self._tell_ready(self.ended)
        else:
            self._plan()

    @_survives
    def reconsider(self) -> None:
        """The server may be elsewhere by now: go there at once, if so."""
        connection = self._connection
        if self.ended is not None or (connection and self._route.leads_to(connection.transport.wire.endpoint)):
            return
        self._dialer.forget()  # an attempt that leads to the old place may hang there for seconds
        if connection is not None and connection.session.phase is not Phase.IDLE:
            self._lost(Lost(MOVED, innocent=True))
        elif connection is not None:
            self._disconnect(MOVED, quiet=True)
        if not self._dialer.dialling:
            self.outage.next_try = time.monotonic()
            self._dial()

    def close(self) -> None:
        """End it; what is unanswered gets Unavailable. Idempotent."""
        if self.state is not State.ENDED:
            self._end(Unavailable(f"the link to {self._settings.address.redacted} was closed"))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the connection is the parent's."""
        self.ended, self.state = error, State.ENDED
        self._dialer.close()
        if self._connection is not None:
            self._connection.transport.abandon()

    # Sending

    @_survives
    def _gathered(self) -> None:
        self._gathering = False
        self._work()

    @_survives
    def _work(self) -> None:
        """Send what waits, if nothing is under way."""
        connection, backlog = self._connection, self._backlog
        if connection is None or self._receiving or connection.session.phase is not Phase.IDLE:
            self._plan()
            return
        now = time.monotonic()
        if not backlog.is_usual():
            backlog.readmit(now)
        if connection.held_until <= now:
            if backlog.pending:
                if now - connection.used_at <= _IDLE_CHECK or self._is_still_there(connection, now):
                    self._send(connection, now)
            elif backlog.replication.waiting:
                self._count(connection, now)
        self._plan(now)

    def _send(self, connection: _Connection, now: float) -> None:
        backlog, session = self._backlog, connection.session
        batch = backlog.take()
        if backlog.too_old:
            self._settle(too_old(backlog))
        if not batch:
            return
        connection.used_at = connection.heard_at = now
        connection.gathers = self._driver.takes_turns and (len(batch) > 1 or isinstance(batch[0], Merged))
        scripts, connection.load_first = connection.load_first, {}
        lost: Lost | None = None
        for pieces in session.begin(batch, now, scripts.values()):
            if lost is None and pieces:
                try:
                    connection.transport.send(pieces)
                except Lost as error:
                    lost = error
        if lost is not None:
            self._lost(lost)
        elif session.phase is Phase.IDLE:  # none of it could be packed
            self._settle_all(session)
            self._batch_ended(connection)

    def _count(self, connection: _Connection, now: float) -> None:
        """Ask how many replicas have what requests wait for, when there is nothing else to send."""
        pieces = connection.session.begin_count(now)
        if pieces:
            connection.used_at = connection.heard_at = now
            try:
                connection.transport.send(pieces)
            except Lost as lost:
                self._lost(lost)

    def _is_still_there(self, connection: _Connection, now: float) -> bool:
        """See whether the server has closed an idle connection, or sent something unasked."""
        try:
            for data in connection.transport.read():
                connection.session.receive(data, now)
        except Lost:
            self._disconnect("it closed the connection while it was idle", quiet=True)
            return False
        return True

    # Receiving

    @_survives
    def _readable(self) -> None:
        self._receive()
        self._work()

    @_survives
    def _progress(self, lost: Lost | None) -> None:
        """More was sent, or could not be."""
        connection = self._connection
        if connection is None:
            return
        if lost is not None:
            self._lost(lost)
        else:
            connection.heard_at = time.monotonic()
            self._receive()
        self._work()

    def _receive(self) -> None:
        """Read what has arrived, and settle those that it answers."""
        connection = self._connection
        if connection is None or self._receiving:
            return
        session = connection.session
        was_idle, lost = session.phase is Phase.IDLE, None
        self._receiving = True
        try:
            pieces = connection.transport.read()
            now = time.monotonic()
            for data in pieces:
                session.receive(data, now)
            if pieces:
                connection.heard_at = now
        except Lost as error:
            lost = error
        finally:
            self._receiving = False
        if session.settled:
            self._settle_all(session)
        if lost is not None:
            if was_idle:
                self._disconnect("it closed the connection while it was idle", quiet=True)
            else:
                self._lost(lost)
        elif not was_idle and session.phase is Phase.IDLE:
            self._batch_ended(connection)

    def _settle_all(self, session: Session) -> None:
        settled, session.settled = session.settled, []
        session.result.settled = session.result.settled or bool(settled)
        self._settle(settled)

    def _batch_ended(self, connection: _Connection) -> None:
        result = connection.session.result
        if result.is_complete:
            ended, self._backlog.in_flight = self._backlog.in_flight, []
            if ended:
                self._works(connection)
        else:
            self._recover(connection, result)
        if self._leaving or self._passing:
            self.sort_out()

    # What is done about failures

    def _works(self, connection: _Connection | None) -> None:
        """A whole batch was answered, or nothing waits to be."""
        if connection is not None:
            connection.held_until, connection.holds, connection.noscript_rounds = -math.inf, 0, 0
            self.state = State.READY
        if self.outage.since is not None:
            self.outage.end()

    def _lost(self, lost: Lost) -> None:
        """The connection broke while something was under way."""
        connection = self._connection
        if connection is None:
            return
        session = connection.session
        session.lose(lost, time.monotonic())
        self._settle_all(session)
        self._recover(connection, session.result)

    def _recover(self, connection: _Connection, result: BatchResult) -> None:
        """Put back what was not answered, in its old order, and see to it that a new try can succeed."""
        backlog = self._backlog
        # first: all of the batch still counts as being on its way
        moving = [*result.moving, *self._redirected(result.moved)]
        again = set(map(id, (*result.noscript, *result.held, *result.dropped, *moving)))
        in_order = [request for request in backlog.in_flight if id(request) in again]
        lost = result.lost
        if lost is not None and not lost.innocent:
            failed = backlog.blame(result.unanswered, time.monotonic())
            guilty(failed, self.outage.address, lost)
            self._settle(failed)
        else:
            for request in result.unanswered:
                request.losses = request.losses or 1  # it may have been executed all the same
            backlog.put_back(result.unanswered)
        backlog.put_back(in_order)
        if result.moving or result.moved:
            backlog.set_aside({request.call.base for request in moving}, time.monotonic() + WHILE_MOVING)
            self._route.doubt()
        if lost is not None:
            self._disconnect(lost.cause)
        elif result.dropped:
            self._disconnect(result.cause)
        elif result.held:
            self._hold(connection, result.cause)
        elif result.noscript:
            self._reload(connection, result)
        else:
            self._works(connection)

    def _redirected(self, requests: list[tuple[Request, str]]) -> list[Request]:
        return [] if self._cluster is None or not requests else self._cluster.moved(self, requests)

    def _reload(self, connection: _Connection, result: BatchResult) -> None:
        """The server has forgotten scripts: they travel ahead of their requests, in one pipeline.

        If a program flushes scripts so fast that nothing gets through all the same, wait between the tries.
        """
        clustered = self._settings.clustered
        missing = {as_sent(request.call, clustered=clustered)[0] for request in result.noscript}
        connection.load_first = {script.sha: script for script in missing}
        self._scripts |= connection.load_first
        connection.noscript_rounds = 0 if result.settled else connection.noscript_rounds + 1
        if connection.noscript_rounds > _NOSCRIPT_ROUNDS:
            self._hold(connection, "NOSCRIPT scripts vanish as soon as they are loaded")

    def _hold(self, connection: _Connection, cause: str) -> None:
        """The server answers, but cannot work for the moment."""
        self.state = State.HELD
        connection.holds += 1
        self.outage.begin(cause, waiting=len(self._backlog.pending), answers=True)
        connection.held_until = time.monotonic() + pause_after(connection.holds + 1)

    def _disconnect(self, cause: str, *, quiet: bool = False) -> None:
        """The connection is of no use any more. The next attempt is made at once, unless one has failed before."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()
        if self._backlog.replication.waiting:
            self._backlog.put_back(self._backlog.replication.withdraw())
        if self.state is State.ENDED:
            return
        self.state = State.WAITING
        self.outage.begin(cause, waiting=len(self._backlog.pending), quiet=quiet)
        self.outage.failed()
        self._route.doubt()
        self.sort_out()
        if self.state is State.WAITING and self.outage.next_try <= time.monotonic():
            self._dial()
        self._plan()

    # Connecting

    def _dial(self) -> None:
        self.state = State.DIALLING
        self._dialer.scripts = list(self._scripts.values())
        self._dialer.dial(first=not self.outage.stood)

    @_survives
    def _dialled(self, wire: Wire | None, error: WorqrError | None) -> None:
        """An attempt has ended."""
        if wire is not None:
            try:
                transport = Transport(wire, self._driver, self._readable, self._progress)
            except (Lost, Unavailable) as exc:
                wire.close()
                error = Unavailable(str(exc))
            else:
                self._connected(transport)
                return
        assert error is not None, "an attempt ends with a connection or an error"
        self.state = State.WAITING
        hopeless = self.outage.failed_to_connect(error, self._settings, waiting=len(self._backlog.pending))
        if hopeless is not None:
            self._tell_ready(hopeless)
        self._plan()

    def _connected(self, transport: Transport) -> None:
        facts = transport.wire.facts
        self.outage.stood = True
        self.run_id = facts.run_id
        self.connected_at = time.monotonic()
        self.connections += 1
        self.state = State.READY
        session = Session(self._backlog, self._producer, clustered=self._settings.clustered)
        self._connection = _Connection(transport, session, self.connected_at)
        if not self._backlog.pending:
            self._works(None)
        if facts.evicts and not self._warned_of_eviction:
            self._warned_of_eviction = True
            self._scribe.emit(logger, "link.eviction", EVICTS, server=self.outage.address, policy=facts.eviction)
        self._tell_ready(None)
        self._work()

    # Time

    def _plan(self, now: float | None = None) -> None:
        """Look again when there may be something to do that no socket tells of; every tick while requests wait."""
        if self.state is State.ENDED:
            return
        backlog, connection = self._backlog, self._connection
        if now is None:
            now = time.monotonic()
        usual = backlog.is_usual()
        waits = bool(backlog.pending or backlog.in_flight or self._ready_waiters) or not usual
        when = now + _TICK if waits else math.inf
        if connection is None:
            if not self._dialer.dialling:
                when = min(when, self.outage.next_try)
        elif backlog.pending and connection.held_until > now:
            when = min(when, connection.held_until)
        if not usual:
            when = min(when, backlog.next_pause())
        if when < self._looks_at:
            self._looks_at = when
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._driver.call_at(max(when, now), self._look)

    @_survives
    def _look(self) -> None:
        """Give up what has waited too long, notice a server that is silent, and try again what is to be tried again."""
        planned, self._looks_at, self._timer = self._looks_at, math.inf, None
        now = time.monotonic()
        connection = self._connection
        if connection is not None and connection.session.phase is not Phase.IDLE:
            self._receive()  # what the socket has is read before anything is judged
        if now - planned > _LATE:  # the loop was blocked, and the server is not to blame
            if connection is not None:
                connection.heard_at += now - planned
        else:
            self._expire(now)
            self._judge(now)
        if self._connection is None:
            if self.state is State.WAITING and now >= self.outage.next_try:
                self._dial()
            self._plan()
        else:
            self._work()
        if self._leaving or self._passing:  # until nothing is left to be done here
            self.sort_out()

    def _judge(self, now: float) -> None:
        """Give up a connection on which something is under way, and nothing has come for too long."""
        connection = self._connection
        if connection is None or connection.session.phase is Phase.IDLE:
            return
        silent = now - connection.heard_at
        if self._cluster is not None and silent >= _TICK:
            self._route.doubt()  # another node may have its slots by now
        if silent > self._settings.socket_timeout:
            self._lost(Lost(f"no answer for {self._settings.socket_timeout:g} s"))

    def _expire(self, now: float) -> None:
        """Give up those who have waited too long, and those whose owner is dead."""
        if self._ready_waiters:
            self._expire_ready(now)
        if self._backlog.replication.waiting:
            self._settle(self._backlog.replication.overdue(now))
        late, orphans = self._backlog.overdue(now, owners=True)
        if late or orphans:
            give_up(late, orphans, self.outage.text(now))
            wake_all([*late, *orphans])

    # Outcomes

    def _settle(self, requests: list[Request]) -> None:
        """They have their outcome: wake those who wait."""
        close = self._backlog.close
        for request in requests:
            request.settled = True
            if request.number:
                close(request)
        wake_all(requests)

    def _tell_ready(self, error: WorqrError | None) -> None:
        waiters, self._ready_waiters = [waiter for waiter, _ in self._ready_waiters], []
        self._fail(waiters, error)

    def _expire_ready(self, now: float) -> None:
        late = [waiter for waiter, deadline in self._ready_waiters if deadline <= now]
        if late:
            self._ready_waiters = [(waiter, deadline) for waiter, deadline in self._ready_waiters if deadline > now]
            self._fail(late, Unavailable(self.outage.text(now)))

    def _fail(self, waiters: Iterable[Waiter], error: WorqrError | None) -> None:
        """Settle them, soon; without an error it is good news."""
        settled = list(waiters)
        if error is not None:
            fail_all(settled, error)
        for waiter in settled:
            waiter.settled = True
        if settled:
            self._driver.post(partial(wake_all, settled))

    # One node of a cluster

    @_survives
    def sort_out(self) -> None:
        """Hand over what belongs to another node by now; end, if this one is no primary any more."""
        cluster = self._cluster
        if cluster is None or self.state is State.ENDED:
            return
        cluster.hand_over(self._backlog.take_out(partial(cluster.belongs, self)))
        self._passing = not cluster.passed(self, self._backlog.bases())
        self._leaving = not cluster.is_needed(self)
        if not self._leaving:
            self._plan()
            return
        while self._ready_waiters:
            cluster.wait_ready(*self._ready_waiters.pop())
        connection = self._connection
        if self._backlog.is_busy() and connection is not None:
            if time.monotonic() - connection.heard_at >= _TICK:
                self._lost(Lost("it is no primary any more", innocent=True))
            else:
                self._plan()
        elif cluster.retire(self):
            self._end(Unavailable("the node is no primary any more"))

    def is_idle(self) -> bool:
        """Nothing waits here."""
        return self._backlog.is_empty() and not self._ready_waiters

    # The end

    def _died(self, exc: BaseException) -> None:
        """A bug; or a signal handler raised while the state was being changed: no call may wait in vain."""
        if not isinstance(exc, KeyboardInterrupt | SystemExit):
            error: WorqrError = WorqrBug(f"the link died ({type(exc).__name__}: {exc}); please report this")
            self._scribe.emit(logger, "link.died", DIED, exc_info=exc)
        else:
            error = Unavailable(f"the link was interrupted by {type(exc).__name__} while it was in use")
        error.__cause__ = exc
        self._end(error)
        self._driver.interrupted(error)
        if self._cluster is not None:
            self._cluster.died(error)

    def _end(self, error: WorqrError) -> None:
        """No call may be left waiting: neither one that is known, nor one that comes later."""
        self.ended, self.state = error, State.ENDED
        self._dialer.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._scribe.watchers.back(id(self.outage))  # a node that left the cluster is not missed any more
        self._fail(self._backlog.clear(), error)
        self._tell_ready(error)
