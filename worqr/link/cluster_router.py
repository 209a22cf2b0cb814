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
from worqr.link.driver import Driver, Waiter
from worqr.link.log_thread import LogThread
from worqr.link.node_client import NodeClient
from worqr.link.ready_waiters import ReadyWaiters, settle_soon
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

NewClient = Callable[..., NodeClient]
"""Makes the client of one node."""


@lru_cache(maxsize=10_000)
def cached_slot(name: str) -> int:
    """The hash slot of a base, or of a channel."""
    return slot_of(name)


class _Node:
    """One node, and its client. What the client asks the cluster: see `ClusterNode`.

    Attributes:
        endpoint: its address.
        client: its client.
    """

    def __init__(self, router: ClusterRouter, endpoint: Endpoint, new_client: NewClient) -> None:
        self.endpoint: Endpoint = endpoint
        self._router = router
        self.client: NodeClient = new_client(
            resolver=NodeEndpoint(router.topology, endpoint), node=self, numbers=router.numbers
        )

    def belongs(self, request: Request) -> bool:
        owner = self._router.topology.owner(cached_slot(request.call.base))
        return owner is None or owner == self.endpoint

    def hand_over(self, requests: list[Request]) -> None:
        self._router.hand_over(requests)

    def moved(self, requests: list[tuple[Request, str]]) -> list[Request]:
        self._router.topology.learn((redirect for _, redirect in requests), self.endpoint)
        tired: set[str] = set()  # bases: later requests of these bases wait as well
        for request, _ in requests:
            if request.count_redirect() % _HOPS == 0 or self.belongs(request):  # the nodes disagree
                tired.add(request.call.base)
        self._router.hand_over([request for request, _ in requests if request.call.base not in tired])
        return [request for request, _ in requests if request.call.base in tired]

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        self._router.wait_ready(waiter, deadline)

    def passed(self, waiting: Collection[str]) -> bool:
        return self._router.passed(self, waiting)

    def is_needed(self) -> bool:
        return self.endpoint in self._router.topology.view.primaries

    def retire(self) -> bool:
        return self.client.is_idle() and self._router.retire(self)

    def died(self, bug: WorqrError) -> None:
        self._router.died(bug)


class _Lobby:
    """The requests and callers that wait until the owners of the slots are known.

    Attributes:
        requests: in their order.
        ready: callers of ``wait_ready``.
    """

    def __init__(self, driver: Driver) -> None:
        self.requests: RequestQueue = RequestQueue()
        self.ready: ReadyWaiters = ReadyWaiters(driver)
        self._driver = driver
        self._view: TopologyView | None = None  # the view with which the requests were last routed

    def __bool__(self) -> bool:
        return bool(self.requests.pending or self.ready)

    def reopen(self) -> None:
        """Let the requests be routed again, also with the same view."""
        self._view = None

    def ahead_of(self, requests: Iterable[Request], view: TopologyView) -> Iterable[Request]:
        """Put the requests of the lobby ahead of these, once for each new view of the cluster."""
        if not self.requests.pending or self._view is view:
            return requests
        self._view = view
        return [*self.requests.remove(lambda _: False), *requests]

    def expire(self, outage: str) -> None:
        """Give up the requests and callers that have waited too long."""
        now = time.monotonic()
        late, orphans = self.requests.overdue(now, owners=True)
        if late or orphans:
            give_up(late, orphans, outage)
            settle_soon(self._driver, [*late, *orphans])
        settle_soon(self._driver, self.ready.take_late(now), Unavailable(outage))

    def clear(self) -> list[Waiter]:
        """Return all that wait here."""
        return [*self.requests.clear(), *(waiter for waiter, _ in self.ready.take())]


class ClusterRouter:
    """The clients of one cluster, with the interface of `NodeClient`. All methods belong to the driver's loop.

    Attributes:
        ended: why nothing can be sent; None while it works.
        topology: the owners of the slots.
        home: the slot of the registry. Its node represents the cluster where one server is needed.
    """

    def __init__(
        self, settings: LinkSettings, driver: Driver, log_thread: LogThread, producer: str, registry: str
    ) -> None:
        self.ended: WorqrError | None = UsageError("this link was not started")
        self.home: int = slot_of(registry)
        self.topology: Topology = Topology(settings, log_thread, self, driver.post)
        self._address = settings.address.redacted
        self._driver = driver
        self._log_thread = log_thread
        self._new_client: NewClient = partial(NodeClient, settings, driver, log_thread, producer)
        self._nodes: dict[Endpoint, _Node] = {}
        self._order: SlotOrder[_Node] = SlotOrder()
        self._lobby = _Lobby(driver)
        self._listeners: list[Callable[[], None]] = []
        self._past_connections = 0

    # The interface for the link

    @property
    def connected_at(self) -> float:
        """Of the registry's node."""
        home = self._home()
        return 0.0 if home is None else home.client.connected_at

    @property
    def connections(self) -> int:
        """How many there have been, to all nodes."""
        return self._past_connections + sum(node.client.connections for node in list(self._nodes.values()))

    @property
    def run_id(self) -> str:
        """Of the registry's node."""
        home = self._home()
        return "" if home is None else home.client.run_id

    @property
    def numbers(self) -> SequenceNumbers:
        """Counts the requests of all clients."""
        return self._lobby.requests.numbers

    def start(self) -> None:
        self.ended = None
        self.topology.watcher.start()

    def submit(self, request: Request | Posted) -> None:
        """Have it sent, or all of them, to where they belong. The outcome comes through the driver."""
        self._send(request if isinstance(request, Posted) else (request,), self._node_of_new)

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when the connection to the registry's node is open, was refused, or the deadline has passed."""
        if self.ended is not None:
            settle_soon(self._driver, (waiter,), self.ended)
            return
        node = self._node_of(self.home)
        if node is not None:
            node.client.wait_ready(waiter, deadline)
        else:
            self._lobby.ready.add(waiter, deadline)
            self.topology.invalidate()

    def close(self) -> None:
        """End all clients and the topology thread; unanswered requests get Unavailable. Idempotent."""
        self._end(Unavailable(f"the link to {self._address} was closed"))

    def died(self, bug: WorqrError) -> None:
        """A bug has ended a client, as it would end the link to a single server: fail its requests, so that no caller waits."""
        self._end(bug)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the topology thread does not exist here, and the sockets belong to the parent."""
        self.ended = error
        self.topology.watcher.poison()
        for node in self._nodes.values():
            node.client.poison(error)

    def when_looked(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop when slots may have other owners. It must not raise."""
        self._listeners.append(listener)

    def _end(self, error: WorqrError) -> None:
        self.ended = error = self.ended or error
        left = self._lobby.clear()
        self.topology.watcher.close()
        for node in list(self._nodes.values()):
            node.client.close()
        settle_soon(self._driver, left, error)

    # Routing

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Have requests that a client cannot send be sent to where they belong."""
        self._send(requests, self._node_of)

    def _send(self, requests: Iterable[Request], node_of: Callable[[int], _Node | None]) -> None:
        if self.ended is not None:
            settle_soon(self._driver, requests, self.ended)
            return
        by_node: dict[_Node, Posted] = {}
        for request in self._lobby.ahead_of(requests, self.topology.view):
            node = node_of(cached_slot(request.call.base))
            if node is None:
                self._lobby.requests.add(request)
            else:
                by_node.setdefault(node, Posted()).append(request)
        for node, some in by_node.items():
            node.client.submit(some[0] if len(some) == 1 else some)
        if self._lobby.requests.pending:
            self.topology.invalidate()

    def retire(self, node: _Node) -> bool:
        """Forget an idle node without slots; return False if that was done before."""
        if self._nodes.get(node.endpoint) is not node:
            return False
        del self._nodes[node.endpoint]
        self._order.forget(node)
        self._past_connections += node.client.connections
        text = "%(server)s has no slots of the cluster any more"
        self._log_thread.emit(logger, "link.moved", text, server=str(node.endpoint))
        return True

    def passed(self, node: _Node, waiting: Collection[str]) -> bool:
        """Note the bases of a client's remaining requests; return True if all of them belong to its node."""
        if self._order.is_passing(node):
            self._order.passed(node, set(map(cached_slot, waiting)))
        return not self._order.is_passing(node)

    def _node_of_new(self, slot: int) -> _Node | None:
        """As `_node_of`; but the node that had the slot before, while its client may have older requests of the slot."""
        owner = self._node_of(slot)
        if owner is None:
            return None
        node, is_new = self._order.choose(slot, owner)
        if is_new:
            self._driver.post(node.client.sort_out)
        return node

    def _node_of(self, slot: int) -> _Node | None:
        """Return the node that has `slot`, with a client that is created on demand; None if the node is unknown."""
        endpoint = self.topology.owner(slot)
        if endpoint is None:
            return None
        node = self._nodes.get(endpoint)
        if node is None:
            node = _Node(self, endpoint, self._new_client)
            node.client.start()
            self._nodes[endpoint] = node
        return node

    def _home(self) -> _Node | None:
        """The registry's node, if there is a client for it."""
        owner = self.topology.owner(self.home)
        return None if owner is None else self._nodes.get(owner)

    # Called by the topology

    def changed(self) -> None:
        waiters = self._lobby.ready.take()
        self._leave_lobby()
        for waiter, deadline in waiters:
            self.wait_ready(waiter, deadline)
        for node in list(self._nodes.values()):
            node.client.sort_out()
        self._tell_listeners()

    def meanwhile(self) -> None:
        self._lobby.expire(self._outage())

    def looked(self, error: WorqrError | None) -> None:
        unknown = error is not None and is_unknown_host(error) and not self.topology.view.primaries
        if error is not None and (unknown or not isinstance(error, Unavailable)):  # no node will ever accept worqr
            self._lobby.ready.tell(Unavailable(self._outage()) if unknown else error)
        self.meanwhile()
        if error is None:
            self._leave_lobby()
            self._tell_listeners()
        if self._lobby:
            self.topology.invalidate()

    def _leave_lobby(self) -> None:
        """Route the requests of the lobby again."""
        self._lobby.reopen()
        self.hand_over(())

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _outage(self) -> str:
        """For the message of an Unavailable."""
        if self.topology.view.primaries:
            return f"No node of {self._address} is known to have the slot."
        if self.topology.outage.since is None:
            return f"No node of {self._address} has replied yet."
        return self.topology.outage.text(time.monotonic())
