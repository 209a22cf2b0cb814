"""`ClusterRouter`: a Redis Cluster behind the interface of one server, with one client per node that has a slot.

Here: the choice of the client for each request. Not here: the owners of slots (`topology`), and sending (`node_client`),
which works for a node as for a standalone server.

All keys of a call share the slot of its base, so a call goes to one node. One client sends the requests of a base in their
order, also while a slot moves to another node (`slot_order`). Two requests can change places only if a slot moves twice
within the few milliseconds of such a hand-over.

All clients number their requests together, under one producer. The server's stored replies move with the keys. So the new
node must recognise a resent request by its old number.

Until a node has reported the owners of the slots, requests wait in the lobby.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, partial

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.link.driver import Driver, Waiter, settle_all, wake_all
from worqr.link.log_thread import LogThread
from worqr.link.node_client import NodeClient
from worqr.link.reasons import is_unknown_host
from worqr.link.request import Posted, Request, SequenceNumbers
from worqr.link.request_errors import give_up
from worqr.link.request_queue import RequestQueue
from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.slot_order import SlotOrder
from worqr.link.topology import NodeEndpoint, Topology, TopologyView
from worqr.link.wire_form import slot_of

logger: logging.Logger = logging.getLogger(__name__)

_HOPS = 3  # times that nodes may point to each other for one request before it has to wait a little

_NOWHERE = Endpoint()


@lru_cache(maxsize=10_000)
def cached_slot(name: str) -> int:
    """The hash slot of a base, or of a channel."""
    return slot_of(name)


class ClusterRouter:
    """The clients of one cluster, with the interface of `NodeClient`. All methods belong to the driver's loop.

    Attributes:
        ended: why nothing can be sent; None while it works.
        topology: the owners of the slots.
        numbers: counts the requests of all clients.
        home: the slot of the registry. Its node represents the cluster where one server is needed.
    """

    def __init__(
        self, settings: LinkSettings, driver: Driver, log_thread: LogThread, producer: str, registry: str
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.numbers: SequenceNumbers = SequenceNumbers()
        self.home: int = slot_of(registry)
        self.topology: Topology = Topology(settings, log_thread, self, driver.post)
        self._settings = settings
        self._driver = driver
        self._log_thread = log_thread
        self._producer = producer
        self._clients: dict[Endpoint, NodeClient] = {}
        self._endpoints: dict[NodeClient, Endpoint] = {}
        self._order: SlotOrder[NodeClient] = SlotOrder()
        self._lobby = RequestQueue(self.numbers)
        self._lobby_view: TopologyView | None = None  # the view with which the lobby was last routed
        self._ready_waiters: list[tuple[Waiter, float]] = []
        self._listeners: list[Callable[[], None]] = []
        self._past_connections = 0

    # The interface for the link

    @property
    def connected_at(self) -> float:
        """Of the registry's node."""
        client = self._clients.get(self.topology.owner(self.home) or _NOWHERE)
        return 0.0 if client is None else client.connected_at

    @property
    def connections(self) -> int:
        """How many there have been, to all nodes."""
        return self._past_connections + sum(client.connections for client in list(self._clients.values()))

    @property
    def run_id(self) -> str:
        """Of the registry's node."""
        client = self._clients.get(self.topology.owner(self.home) or _NOWHERE)
        return "" if client is None else client.run_id

    def start(self) -> None:
        self.ended = None
        self.topology.start()

    def submit(self, request: Request | Posted) -> None:
        """Have it sent, or all of them, to where they belong. The outcome comes through the driver."""
        self._send(request if isinstance(request, Posted) else (request,), self._client_of_new)

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when the connection to the registry's node is open, was refused, or the deadline has passed."""
        if self.ended is not None:
            self._fail((waiter,), self.ended)
            return
        client = self._client_of(self.home)
        if client is not None:
            client.wait_ready(waiter, deadline)
        else:
            self._ready_waiters.append((waiter, deadline))
            self.topology.invalidate()

    def close(self) -> None:
        """End all clients and the topology thread; unanswered requests get Unavailable. Idempotent."""
        self._end(Unavailable(f"the link to {self._settings.address.redacted} was closed"))

    def died(self, bug: WorqrError) -> None:
        """A bug has ended a client, as it would end the link to a single server: fail its requests, so that no caller waits."""
        self._end(bug)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the topology thread does not exist here, and the sockets belong to the parent."""
        self.ended = error
        self.topology.poison()
        for client in self._clients.values():
            client.poison(error)

    def when_looked(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop when slots may have other owners. It must not raise."""
        self._listeners.append(listener)

    def _end(self, error: WorqrError) -> None:
        self.ended = error = self.ended or error
        left: list[Waiter] = [*self._lobby.clear(), *(waiter for waiter, _ in self._ready_waiters)]
        self._ready_waiters = []
        self.topology.close()
        for client in list(self._clients.values()):
            client.close()
        self._fail(left, error)

    # Routing

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Have requests that a client cannot send be sent to where they belong."""
        self._send(requests, self._client_of)

    def _send(self, requests: Iterable[Request], client_of: Callable[[int], NodeClient | None]) -> None:
        if self.ended is not None:
            self._fail(list(requests), self.ended)
            return
        by_client: dict[NodeClient, Posted] = {}
        for request in self._with_lobby(requests):
            client = client_of(cached_slot(request.call.base))
            if client is None:
                self._lobby.add(request)
            else:
                by_client.setdefault(client, Posted()).append(request)
        for client, some in by_client.items():
            client.submit(some[0] if len(some) == 1 else some)
        if self._lobby.pending:
            self.topology.invalidate()

    def belongs(self, client: NodeClient, request: Request) -> bool:
        owner = self.topology.owner(cached_slot(request.call.base))
        return owner is None or self._endpoints.get(client) == owner

    def moved(self, client: NodeClient, requests: list[tuple[Request, str]]) -> list[Request]:
        self.topology.learn((redirect for _, redirect in requests), self._endpoints.get(client, _NOWHERE))
        tired: set[str] = set()  # bases: later requests of these bases wait as well
        for request, _ in requests:
            if request.count_redirect() % _HOPS == 0 or self.belongs(client, request):  # the nodes disagree
                tired.add(request.call.base)
        self.hand_over(request for request, _ in requests if request.call.base not in tired)
        return [request for request, _ in requests if request.call.base in tired]

    def is_needed(self, client: NodeClient) -> bool:
        return self._endpoints.get(client) in self.topology.view.primaries

    def retire(self, client: NodeClient) -> bool:
        endpoint = self._endpoints.get(client)
        if endpoint is None or not client.is_idle():
            return False
        del self._endpoints[client], self._clients[endpoint]
        self._order.forget(client)
        self._past_connections += client.connections
        self._log_thread.emit(
            logger, "link.moved", "%(server)s has no slots of the cluster any more", server=str(endpoint)
        )
        return True

    def passed(self, client: NodeClient, waiting: Collection[str]) -> bool:
        if self._order.is_passing(client):
            self._order.passed(client, set(map(cached_slot, waiting)))
        return not self._order.is_passing(client)

    def _client_of_new(self, slot: int) -> NodeClient | None:
        """As `_client_of`; but the client of the node that had the slot before, while it may have older requests of the slot."""
        owner = self._client_of(slot)
        if owner is None:
            return None
        client, is_new = self._order.choose(slot, owner)
        if is_new:
            self._driver.post(client.sort_out)
        return client

    def _client_of(self, slot: int) -> NodeClient | None:
        """Return the client of the node that has `slot`, created on demand; None if the node is unknown."""
        endpoint = self.topology.owner(slot)
        if endpoint is None:
            return None
        client = self._clients.get(endpoint)
        if client is None:
            resolver = NodeEndpoint(self.topology, endpoint)
            client = NodeClient(
                self._settings, self._driver, self._log_thread, self._producer, resolver=resolver, cluster=self
            )
            client.start()
            self._clients[endpoint], self._endpoints[client] = client, endpoint
        return client

    # Called by the topology

    def changed(self) -> None:
        waiters, self._ready_waiters = self._ready_waiters, []
        self._leave_lobby()
        for waiter, deadline in waiters:
            self.wait_ready(waiter, deadline)
        for client in list(self._clients.values()):
            client.sort_out()
        self._tell_listeners()

    def meanwhile(self) -> None:
        now = time.monotonic()
        late, orphans = self._lobby.overdue(now, owners=True)
        tired = [waiter for waiter, deadline in self._ready_waiters if deadline <= now]
        self._ready_waiters = [each for each in self._ready_waiters if each[1] > now]
        if late or orphans:
            give_up(late, orphans, self._outage())
            self._driver.post(partial(wake_all, [*late, *orphans]))
        self._fail(tired, Unavailable(self._outage()))

    def looked(self, error: WorqrError | None) -> None:
        unknown = error is not None and is_unknown_host(error) and not self.topology.view.primaries
        if error is not None and (unknown or not isinstance(error, Unavailable)):  # no node will ever accept worqr
            waiters, self._ready_waiters = [waiter for waiter, _ in self._ready_waiters], []
            self._fail(waiters, Unavailable(self._outage()) if unknown else error)
        self.meanwhile()
        if error is None:
            self._leave_lobby()
            self._tell_listeners()
        if self._lobby.pending or self._ready_waiters:
            self.topology.invalidate()

    def _with_lobby(self, requests: Iterable[Request]) -> Iterable[Request]:
        """EndpointResolver the requests of the lobby first, once for each new view of the cluster."""
        if not self._lobby.pending or self._lobby_view is self.topology.view:
            return requests
        self._lobby_view = self.topology.view
        return [*self._lobby.remove(lambda _: False), *requests]

    def _leave_lobby(self) -> None:
        """EndpointResolver the requests of the lobby again."""
        self._lobby_view = None
        self.hand_over(())

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _outage(self) -> str:
        """For the message of an Unavailable."""
        cluster = self._settings.address.redacted
        if self.topology.view.primaries:
            return f"No node of {cluster} is known to have the slot."
        if self.topology.outage.since is None:
            return f"No node of {cluster} has replied yet."
        return self.topology.outage.text(time.monotonic())

    def _fail(self, waiters: Collection[Waiter], error: WorqrError) -> None:
        if waiters:
            settle_all(waiters, error)
            self._driver.post(partial(wake_all, waiters))
