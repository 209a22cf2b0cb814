"""A cluster of servers as one: a pipe for each node that has a slot, and who gets what.

Here: `ClusterPipes`, which a link uses as it would use the pipe of one server. Not here: which node has which slot
(`topology`), and the sending (`pipe`), which is the same for a node as for a server that stands alone.

All keys of a call share the slot of its base, so a call goes to one node. The requests of one base are sent in their order,
by one node's pipe; while a base moves from one to another, those that are on their way and those that come may overtake each
other, and none of them is answered yet. All pipes count their requests together, under one producer: the server's memory of
replies moves with the keys, and must find a request that is sent again at the new place under its old number.

Until some node has told who has what, requests wait in the lobby.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.link.dialect import slot_of
from worqr.link.mailbox import Mailbox, Waiter, wake_all
from worqr.link.pipe import Pipe, Posted
from worqr.link.request import Numbers, Request, fail_all
from worqr.link.scribe import Scribe
from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.topology import NodeRoute, Topology

logger: logging.Logger = logging.getLogger(__name__)

_HOPS = 3  # times that nodes may point to each other for one request before it has to wait a little

_NOWHERE = Endpoint()

cached_slot = lru_cache(maxsize=10_000)(slot_of)


class ClusterPipes:
    """The pipes of one cluster. What `Pipe` offers to the link; all of it may be called from any thread.

    Attributes:
        ended: why nothing can be sent; None while it works.
        topology: who has what.
        numbers: counts the requests of all pipes.
        home: the slot of the registry, whose node stands for the cluster where one server has to.
    """

    def __init__(self, settings: LinkSettings, mailbox: Mailbox, scribe: Scribe, producer: str, registry: str) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.numbers: Numbers = Numbers()
        self.home: int = slot_of(registry)
        self.topology: Topology = Topology(settings, self._changed, self._looked)
        self._settings = settings
        self._mailbox = mailbox
        self._scribe = scribe
        self._producer = producer
        self._lock = threading.RLock()
        self._pipes: dict[Endpoint, Pipe] = {}
        self._endpoints: dict[Pipe, Endpoint] = {}
        self._lobby: list[Request] = []
        self._ready_waiters: list[tuple[Waiter, float]] = []
        self._listeners: list[Callable[[], None]] = []
        self._past_connections = 0

    # What the link asks

    @property
    def connected_at(self) -> float:
        """Of the registry's node."""
        pipe = self._pipes.get(self.topology.owner(self.home) or _NOWHERE)
        return 0.0 if pipe is None else pipe.connected_at

    @property
    def connections(self) -> int:
        """How many there have been, to all nodes."""
        with self._lock:
            return self._past_connections + sum(pipe.connections for pipe in self._pipes.values())

    @property
    def run_id(self) -> str:
        """Of the registry's node."""
        pipe = self._pipes.get(self.topology.owner(self.home) or _NOWHERE)
        return "" if pipe is None else pipe.run_id

    def start(self) -> None:
        self.ended = None
        self.topology.start()

    def submit(self, request: Request | Posted) -> None:
        """Have it sent, or all of them, to where they belong. The outcome comes through the mailbox."""
        self.hand_over(request if isinstance(request, Posted) else (request,))

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when the connection to the registry's node stands, was refused, or the deadline has passed."""
        error = self.ended
        with self._lock:
            if error is None:
                try:
                    pipe = self._pipe_of(self.home)
                    if pipe is None:
                        self._ready_waiters.append((waiter, deadline))
                    else:
                        pipe.wait_ready(waiter, deadline)
                except RuntimeError as exc:
                    error = _no_thread(exc)
        if error is not None:
            self._fail((waiter,), error)

    def close(self) -> None:
        """End all threads; what is unanswered gets Unavailable. Idempotent."""
        error = Unavailable(f"the link to {self._settings.address.redacted} was closed")
        with self._lock:
            self.ended = self.ended or error
            pipes = list(self._pipes.values())
            left: list[Waiter] = [*self._lobby, *(waiter for waiter, _ in self._ready_waiters)]
            self._lobby, self._ready_waiters = [], []
        self.topology.close()
        for pipe in pipes:
            pipe.close()
        self._fail(left, error)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the threads do not exist here, and the sockets are the parent's."""
        self.ended = error
        self._lock = threading.RLock()  # somebody may have held the old one, who is not here
        self.topology.poison()
        for pipe in self._pipes.values():
            pipe.poison(error)

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever slots have another owner; in whatever thread finds it out."""
        self._listeners.append(listener)

    # Who gets what

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Have them sent to where they belong."""
        by_pipe: dict[Pipe, Posted] = {}
        unsent: list[Request] = []
        error = self.ended
        with self._lock:
            for request in requests:
                try:
                    pipe = self._pipe_of(cached_slot(request.call.base)) if error is None else None
                except RuntimeError as exc:
                    error, pipe = _no_thread(exc), None
                if pipe is not None:
                    by_pipe.setdefault(pipe, Posted()).append(request)
                elif error is None:
                    self._lobby.append(request)
                    self.topology.doubt()
                else:
                    unsent.append(request)
            for pipe, some in by_pipe.items():  # under the lock: a pipe that retires looks whether something came
                pipe.submit(some[0] if len(some) == 1 else some)
        if error is not None:
            self._fail(unsent, error)

    def belongs(self, pipe: Pipe, request: Request) -> bool:
        owner = self.topology.owner(cached_slot(request.call.base))
        return owner is None or self._endpoints.get(pipe) == owner

    def moved(self, pipe: Pipe, requests: list[tuple[Request, str]]) -> None:
        tired: list[Request] = []
        strangers: list[Request] = []
        for request, redirect in requests:
            self.topology.learn(redirect)
            request.hops += 1
            disagreed = request.hops % _HOPS == 0 or self.belongs(pipe, request)
            (tired if disagreed else strangers).append(request)
        pipe.set_aside(tired)
        self.hand_over(strangers)

    def is_needed(self, pipe: Pipe) -> bool:
        return self._endpoints.get(pipe) in self.topology.primaries

    def retire(self, pipe: Pipe) -> bool:
        with self._lock:
            endpoint = self._endpoints.get(pipe)
            if endpoint is None or not pipe.is_idle():
                return False
            del self._endpoints[pipe], self._pipes[endpoint]
            self._past_connections += pipe.connections
        self._scribe.log(logger, logging.INFO, "link.moved: the server at %s has no slots any more", str(endpoint))
        return True

    def _pipe_of(self, slot: int) -> Pipe | None:
        """The pipe of the node that has `slot`, made now if need be; None: nobody knows which. Under the lock.

        Raises:
            RuntimeError: the system gives us no thread.
        """
        endpoint = self.topology.owner(slot)
        if endpoint is None:
            return None
        pipe = self._pipes.get(endpoint)
        if pipe is None:
            route = NodeRoute(self.topology, endpoint)
            pipe = Pipe(self._settings, self._mailbox, self._scribe, self._producer, route=route, cluster=self)
            pipe.start()
            self._pipes[endpoint], self._endpoints[pipe] = pipe, endpoint
        return pipe

    # What the topology tells, in its thread or in that of a pipe

    def _changed(self) -> None:
        """Somebody has other slots than before, or we know for the first time."""
        with self._lock:
            lobby, self._lobby = self._lobby, []
            waiters, self._ready_waiters = self._ready_waiters, []
            pipes = list(self._pipes.values())
        self.hand_over(lobby)
        for waiter, deadline in waiters:
            self.wait_ready(waiter, deadline)
        for pipe in pipes:
            pipe.tell(pipe.sort_out)
        for listener in self._listeners:
            listener()

    def _looked(self, error: WorqrError | None) -> None:
        """Tell those in the lobby whose patience is over; and, if every node refuses us, those who wait for a connection."""
        now = time.monotonic()
        refused = error is not None and not isinstance(error, Unavailable)
        with self._lock:
            late: list[Waiter] = [waiter for waiter, deadline in self._ready_waiters if refused or deadline <= now]
            self._ready_waiters = [each for each in self._ready_waiters if not (refused or each[1] <= now)]
            late += [request for request in self._lobby if request.deadline <= now]
            self._lobby = [request for request in self._lobby if request.deadline > now and not request.abandoned]
            if self._lobby or self._ready_waiters:
                self.topology.doubt()
        if error is None or not refused:
            error = Unavailable(f"no node of {self._settings.address.redacted} answers ({self.topology.why})")
        self._fail(late, error)

    def _fail(self, waiters: Sequence[Waiter], error: WorqrError) -> None:
        if waiters:
            fail_all(waiters, error)
            self._mailbox.post(partial(wake_all, waiters))


def _no_thread(exc: RuntimeError) -> Unavailable:
    return Unavailable(f"cannot start a thread ({exc}): this process is at its limit (ulimit -u)")
