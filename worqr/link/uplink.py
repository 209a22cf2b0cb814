"""The data connection: making it, using it, and what is done about each way in which it fails.

Here: the decisions. Not here: the thread and its inbox (`pipe`), the order of requests (`backlog`), what one reply
means (`exchange`), how to connect (`connection`). Everything but the dialling runs in the I/O thread.

States: no wire (an outage: dial, wait) <-> wire (send, read) <-> held (the server answers but cannot work: wait,
resend). Dialling has a thread of its own, one per attempt, because resolving a name or connecting can block for
longer than a caller's patience. An outage counts as over when a batch has been answered, or a connection stands and
nothing waits: a server that lets us in and refuses to work makes no further log lines.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from worqr.errors import Unavailable, WorqrBug, WorqrError
from worqr.link.backlog import SEND_AGAIN_WITHIN, Backlog
from worqr.link.connection import MOVED, Wire, open_connection, pack
from worqr.link.dialect import as_sent
from worqr.link.exchange import Exchange, exchange
from worqr.link.faults import Kind, Lost, Refused, demoted
from worqr.link.outage import Outage, pause_after
from worqr.link.request import Request
from worqr.link.routes import Route, route_to
from worqr.link.scribe import Scribe
from worqr.link.settings import LinkSettings
from worqr.lua import Script

logger: logging.Logger = logging.getLogger(__name__)

EVICTS = (
    "%(server)s has the maxmemory-policy %(policy)s, and may evict tasks when its memory is full: run CONFIG SET "
    "maxmemory-policy noeviction"
)
_IDLE_CHECK = 0.05  # seconds without a request, after which a connection is looked at before it is used (5 us)
WHILE_MOVING = 0.05  # seconds until a request is sent again whose keys are being moved
_NOSCRIPT_ROUNDS = 3  # somebody flushes scripts faster than we load them: from here on wait between the tries


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the uplink asks of the pipe. All but `tell` are called in the I/O thread."""

    settle: Callable[[list[Request]], None]
    """These have their outcome."""
    while_silent: Callable[[], None]
    """The server lets us wait: look at the inbox and at who has waited too long. May raise `Lost`."""
    connected: Callable[[WorqrError | None], None]
    """A connection stands, or was refused for good."""
    tell: Callable[[Callable[[], None]], None]
    """Run this in the I/O thread."""
    moved: Callable[[list[tuple[Request, str]]], list[Request]]
    """These belong to other nodes of the cluster, to which the server has pointed: ``SLOT HOST:PORT``. Returns those that have to
    wait here a little.
    """
    lost: Callable[[], None]
    """The connection was lost, and what was on its way is put back."""


class Uplink:
    """The one data connection of a link.

    Attributes:
        wire: the connection, while there is one.
        dialling: an attempt is being made.
        connected_at, connections, run_id: of the present or last connection.
        held_until: do not send before; -inf: send.
    """

    def __init__(
        self,
        settings: LinkSettings,
        scribe: Scribe,
        producer: str,
        backlog: Backlog,
        hooks: Hooks,
        route: Route | None = None,
    ) -> None:
        self.wire: Wire | None = None
        self.dialling: bool = False
        self.connected_at: float = 0.0
        self.connections: int = 0
        self.run_id: str = ""
        self.held_until: float = -math.inf
        self.route: Route = route or route_to(settings)
        self.outage: Outage = Outage(scribe, logger, self.route.name)
        self.scripts: dict[str, Script] = {}
        self._settings = settings
        self._scribe = scribe
        self._producer = producer
        self._backlog = backlog
        self._hooks = hooks
        self._closed = False
        self._attempt = 0
        self._holds = 0
        self._noscript_rounds = 0
        self._load_first: dict[str, Script] = {}
        self._last_used = 0.0
        self._warned_of_eviction = False

    def interrupt(self) -> None:
        """From another thread, at the end: end whatever the I/O thread waits for on the connection, which is no outage."""
        self._closed = True
        wire = self.wire
        if wire is not None:
            wire.interrupt()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._closed = True
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.abandon()

    def close(self) -> None:
        self._closed = True
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()

    # Using it

    def work(self, wire: Wire) -> None:
        """Send one batch and deal with what came back."""
        backlog = self._backlog
        now = time.monotonic()
        if now - self._last_used > _IDLE_CHECK and wire.is_stale():
            self._lose("it closed the connection while it was idle", quiet=True)
            return
        self._last_used = now
        batch = backlog.take()
        if backlog.too_old:
            self._hooks.settle(too_old(backlog))
        if batch:
            scripts, self._load_first = self._load_first, {}
            clustered = self._settings.clustered
            result = exchange(wire, backlog, self._producer, batch, scripts.values(), clustered=clustered)
            self._hooks.settle(result.done)
            if result.answered:
                backlog.replication.add(result.answered, time.monotonic())
            if result.asked and result.lost is None:
                self._hear(wire, result)
            if len(result.done) + len(result.answered) == len(batch) and result.lost is None:
                self._works()
            else:
                self._mend(result)
            backlog.in_flight = []

    def ask(self, wire: Wire) -> None:
        """For those who wait for replicas, when there is nothing else to send: how many have it by now?"""
        result = Exchange()
        question = self._backlog.replication.question(0, time.monotonic())
        if question is None:
            return
        self._backlog.replication.asking = True
        try:
            wire.send([pack(question)])
        except Lost as lost:
            result.lost = lost
        else:
            self._hear(wire, result)
        self._backlog.replication.asking = False
        if result.lost is not None:
            self._mend(result)

    def _hear(self, wire: Wire, result: Exchange) -> None:
        """Read how many replicas have what was written, and settle those for whom that is enough."""
        replication = self._backlog.replication
        began = time.monotonic()
        try:
            reached = wire.read()
        except Lost as lost:
            result.lost = lost
            return
        except Refused as refused:
            if refused.kind is Kind.REFUSED and not demoted(refused):
                self._hooks.settle(replication.refused(refused))
                return
            if refused.kind is not Kind.HOLD:
                result.lost = Lost(str(refused), innocent=True)
                return
            reached = 0
        now = time.monotonic()
        self._hooks.settle(replication.answered(reached, now - began, now))

    def _works(self) -> None:
        """A whole batch was answered, or nothing waits to be."""
        self.held_until, self._holds, self._noscript_rounds = -math.inf, 0, 0
        if self.outage.since is not None:
            self.outage.end()

    def _mend(self, result: Exchange) -> None:
        """Put back what was not answered, in its old order, and see to it that a new try can succeed."""
        # first: all of the batch still counts as being on its way
        moving = [*result.moving, *self._hooks.moved(result.moved)]
        again = set(map(id, (*result.noscript, *result.held, *result.dropped, *moving)))
        in_order = [request for request in self._backlog.in_flight if id(request) in again]
        lost = result.lost
        if lost is not None and not lost.innocent:
            self._fail_guilty(self._backlog.blame(result.unanswered, time.monotonic()), lost)
        else:
            for request in result.unanswered:
                request.losses = request.losses or 1  # it may have been executed all the same
            self._backlog.put_back(result.unanswered)
        self._backlog.put_back(in_order)
        if result.moving or result.moved:
            self._backlog.set_aside({request.call.base for request in moving}, time.monotonic() + WHILE_MOVING)
            self.route.doubt()
        if lost is not None:
            self._lose(lost.cause)
        elif result.dropped:
            self._lose(result.cause)
        elif result.held:
            self._hold(result.cause)
        elif result.noscript:
            self._reload(result)
        else:
            self._works()

    def _fail_guilty(self, requests: list[Request], lost: Lost) -> None:
        for request in requests:
            request.error = Unavailable(
                f"{request.call.script.name} alone lost {request.lost_alone} connections to the server at "
                f"{self.outage.address} ({lost.cause}); whether it took effect is unknown",
                sent=None,
            )
        self._hooks.settle(requests)

    def _reload(self, result: Exchange) -> None:
        """The server has forgotten scripts: those that were asked for travel ahead of their requests, in one pipeline.

        If somebody flushes scripts so fast that nothing gets through all the same, wait between the tries.
        """
        clustered = self._settings.clustered
        missing = {as_sent(request.call, clustered=clustered)[0] for request in result.noscript}
        self._load_first = {script.sha: script for script in missing}
        self.scripts |= self._load_first
        self._noscript_rounds = 0 if result.done else self._noscript_rounds + 1
        if self._noscript_rounds > _NOSCRIPT_ROUNDS:
            self._hold("NOSCRIPT scripts vanish as soon as they are loaded")

    def _hold(self, cause: str) -> None:
        """The server answers, but cannot work for the moment."""
        self._holds += 1
        self.outage.begin(cause, waiting=len(self._backlog.pending), answers=True)
        self.held_until = time.monotonic() + pause_after(self._holds + 1)

    def _lose(self, cause: str, *, quiet: bool = False) -> None:
        """The connection is of no use any more. The next attempt is made at once, unless one has failed before."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()
        if self._backlog.replication.waiting:
            self._backlog.put_back(self._backlog.replication.withdraw())
        self.held_until = -math.inf
        if not self._closed:
            self.outage.begin(cause, waiting=len(self._backlog.pending), quiet=quiet)
            self.outage.failed()
            self.route.doubt()
            self._hooks.lost()

    def reconsider(self) -> None:
        """The server may be elsewhere by now: go there at once, if so."""
        wire = self.wire
        if wire is not None and self.route.leads_to(wire.endpoint):
            return
        if self._backlog.is_busy():  # somebody reads at this moment
            raise Lost(MOVED, innocent=True)
        if wire is not None:
            self._lose(MOVED, quiet=True)
        self._attempt += 1  # one that leads to the old place may hang there for seconds: nobody waits for it any more
        self.dialling = False
        self.outage.next_try = time.monotonic()

    # Making it

    def dial(self) -> None:
        """Begin an attempt to connect."""
        self.dialling = True
        self._attempt += 1
        try:
            threading.Thread(target=self._dial_once, args=(self._attempt,), name="worqr-dial", daemon=True).start()
        except RuntimeError:  # no more threads to be had: do it here, and expire late
            self._dial_once(self._attempt)

    def _dial_once(self, attempt: int) -> None:
        """In the dialling thread."""
        wire: Wire | None = None
        error: WorqrError | None = None
        try:
            scripts = list(self.scripts.values())
            look, first = self._give_up, not self.outage.stood
            wire = open_connection(*(self._settings, self.route, "data"), scripts=scripts, on_silence=look, first=first)
        except WorqrError as exc:
            error = exc
        except BaseException as exc:
            error = WorqrBug(f"connecting failed ({type(exc).__name__}: {exc}); please report this")
            error.__cause__ = exc
        self._hooks.tell(partial(self._dialled, attempt, wire, error))

    def _give_up(self) -> None:
        """While a server that was dialled is silent."""
        if self._closed:
            raise Lost("the link was closed", innocent=True)

    def _dialled(self, attempt: int, wire: Wire | None, error: WorqrError | None) -> None:
        if attempt != self._attempt:
            if wire is not None:
                wire.close()
            return
        self.dialling = False
        if wire is not None:
            if self._closed:
                wire.close()
            else:
                self._connected(wire)
        elif error is not None and not self._closed:
            hopeless = self.outage.failed_to_connect(error, self._settings, waiting=len(self._backlog.pending))
            if hopeless is not None:
                self._hooks.connected(hopeless)

    def _connected(self, wire: Wire) -> None:
        self.outage.stood = True
        wire.on_silence = self._hooks.while_silent
        self.run_id = wire.facts.run_id
        self.connected_at = self._last_used = time.monotonic()
        self.connections += 1
        self.wire = wire
        if not self._backlog.pending:
            self._works()
        if wire.facts.evicts and not self._warned_of_eviction:
            self._warned_of_eviction = True
            self._scribe.emit(logger, "link.eviction", EVICTS, server=self.outage.address, policy=wire.facts.eviction)
        self._hooks.connected(None)


def too_old(backlog: Backlog) -> list[Request]:
    """Those that must not be sent again, with their error."""
    requests, backlog.too_old = backlog.too_old, []
    for request in requests:
        request.error = Unavailable(
            f"{request.call.script.name} was first sent over {SEND_AGAIN_WITHIN / 60:.0f} minutes ago, and the server may have "
            "forgotten it; it is not sent again; whether it took effect is unknown",
            sent=None,
        )
    return requests
