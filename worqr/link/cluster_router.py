"""`ClusterRouter`: a Redis Cluster behind the interface of one server, with one client per node that has a slot.

Here: the choice of the client for each request. Not here: the owners of slots (`topology`), and sending (`node_client`),
which works for a node as for a standalone server.

All keys of a call share the slot of its base, so a call goes to one node. One client sends the requests of a base in their
order, also while a slot moves to another node (`rebalancer.SlotOrder`). Two requests can change places only if a slot moves twice
within the few milliseconds of such a hand-over.

All clients number their requests together, under one producer. The server's stored replies move with the keys. So the new
node must recognise a resent request by its old number.

Until a node has reported the owners of the slots, requests wait in the lobby.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.link.connection import is_unknown_host
from worqr.link.connector import ReadyWaiters
from worqr.link.driver import Driver, Waiter, copy_of, settle_soon
from worqr.link.log_thread import LogThread
from worqr.link.node_client import ConnectionHistory, LinkCondition, NodeClient, Rebalancer, SlotOrder
from worqr.link.request_queue import Posted, Request, RequestQueue, give_up
from worqr.link.session import slot_of
from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.subscriptions import SHARDED, Channels, Subscription, SubscriptionListener, Subscriptions
from worqr.link.topology import NodeEndpoint, ShardEndpoint, Topology, TopologyView

# The channels of a cluster. A queue's channels are sharded, on the node that has its slot; the registry's are plain.
#
# Here: `ClusterSubscriptions`, with the interface of the `Subscriptions` of one server. A subscription follows its slot to
# another node. Messages that were published meanwhile are lost, as with any connection, and the subscriber is woken to look.


class ClusterSubscriptions:
    """All subscriptions of a link to a cluster, with one connection per node."""

    def __init__(
        self, settings: LinkSettings, driver: Driver, log_thread: LogThread, router: ClusterRouter, registry: str
    ) -> None:
        self.driver: Driver = driver
        self.ended: WorqrError | None = None
        self._settings = settings
        self._log_thread = log_thread
        self._topology = router.topology
        self._registry = registry
        self._open: dict[Subscription, int] = {}
        self._hubs: dict[Endpoint, Subscriptions] = {}
        resolver = ShardEndpoint(self._topology, router.home, settings.address.redacted)
        self._plain = Subscriptions(settings, driver, log_thread, resolver=resolver)
        self._followed: TopologyView | None = None
        router.when_looked(self._follow)

    @property
    def connections(self) -> int:
        """The number of connections so far, to the nodes in use and to the registry's."""
        return self._plain.connections + sum(hub.connections for hub in list(self._hubs.values()))

    def open(
        self, channels: Iterable[str], deliver: Callable[[str, bytes], object], confirmed: Callable[[], object]
    ) -> Subscription:
        """Listen to `channels`, all of one queue or of the registry. See ``Subscriptions.open``."""
        names = tuple(channels)
        if any(name.startswith(f"{self._registry}:") for name in names):
            return self._plain.open(names, deliver, confirmed)
        subscription = Subscription(self, names, deliver, confirmed)
        slots = {slot_of(name) for name in names}
        if len(slots) > 1:
            raise UsageError(f"on a cluster the channels of a subscription must share a slot: {', '.join(names)}")
        if self.ended is not None:
            raise copy_of(self.ended)
        with self.driver.entered:
            self._open[subscription] = slots.pop()
            self._place(subscription, self._topology.view)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove the listener."""
        with self.driver.entered:
            self._open.pop(subscription, None)
            listener = subscription.listener
            if listener is not None:
                listener.hub.let_go(listener)

    def close(self) -> None:
        """End all connections; callers that wait for a confirmation get Unavailable. Idempotent."""
        error = self.ended = self.ended or Unavailable(f"the link to {self._settings.address.redacted} was closed")
        homeless = [each for each in self._open if each.listener is None]
        for hub in (self._plain, *self._hubs.values()):
            hub.close()
        for subscription in homeless:
            self.driver.post(lambda subscription=subscription: subscription.fail(error))  # type: ignore[misc]

    def poison(self, error: WorqrError) -> None:
        """In a forked child: subscriptions work in the parent only."""
        self.ended = error
        for hub in (self._plain, *self._hubs.values()):
            hub.poison(error)

    def _place(self, subscription: Subscription, view: TopologyView) -> None:
        """Listen on the node that now has the slot, if it is known."""
        owner = view.owners[self._open[subscription]]
        if owner is None:
            self._topology.invalidate()
            return
        hub = self._hubs.get(owner)
        if hub is None:
            resolver, channels = NodeEndpoint(self._topology, owner), Channels[SubscriptionListener](SHARDED, _group_of)
            hub = Subscriptions(self._settings, self.driver, self._log_thread, resolver=resolver, channels=channels)
            self._hubs[owner] = hub
        if subscription.listener is None or subscription.listener.hub is not hub:
            hub.listen(subscription)

    def _follow(self) -> None:
        """Slots may have other owners than before."""
        view = self._topology.view
        if self.ended is not None or view is self._followed:
            return
        self._followed = view
        for subscription in self._open:
            self._place(subscription, view)
        gone = [hub for endpoint, hub in self._hubs.items() if endpoint not in view.primaries]
        self._hubs = {endpoint: hub for endpoint, hub in self._hubs.items() if hub not in gone}
        self._plain.reconsider()
        for hub in gone:
            hub.close()


def _group_of(channel: bytes) -> int:
    return slot_of(channel.decode())


logger: logging.Logger = logging.getLogger(__name__)


NewClient = Callable[..., NodeClient]
"""Makes the client of one node."""


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
        self._lobby = _Lobby(driver)
        numbers = self._lobby.requests.numbers
        self._new_client: NewClient = partial(NodeClient, settings, driver, log_thread, producer, numbers=numbers)
        self._clients: dict[Endpoint, NodeClient] = {}
        self._order: SlotOrder[Endpoint] = SlotOrder()
        self._listeners: list[Callable[[], None]] = []
        self._past_connections = 0

    # The interface for the link

    @property
    def history(self) -> ConnectionHistory:
        """The connections to the registry's node, and the number of those to all nodes."""
        owner = self.topology.owner(self.home)
        home = None if owner is None else self._clients.get(owner)
        count = self._past_connections + sum(client.history.count for client in list(self._clients.values()))
        return ConnectionHistory(count=count) if home is None else replace(home.history, count=count)

    @property
    def condition(self) -> LinkCondition:
        """The state of the connections to all nodes; up: the registry's node is. From any thread."""
        owner = self.topology.owner(self.home)
        home = None if owner is None else self._clients.get(owner)
        each = [client.condition for client in self._clients.copy().values()]
        up = home is not None and home.condition.up
        return LinkCondition(up, sum(one.reconnects for one in each), sum(one.unanswered for one in each))

    def start(self) -> None:
        self.ended = None
        self.topology.watcher.start()

    def submit(self, request: Request | Posted) -> None:
        """Send a request, or several, to the nodes that have their keys. The driver delivers the outcomes."""
        self._send(request if isinstance(request, Posted) else (request,), self._client_of_new)

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when the connection to the registry's node is open, was refused, or the deadline has passed."""
        if self.ended is not None:
            settle_soon(self._driver, (waiter,), self.ended)
            return
        client = self._client_of(self.home)
        if client is not None:
            client.wait_ready(waiter, deadline)
        else:
            self._lobby.ready.add(waiter, deadline)
            self.topology.invalidate()

    def close(self) -> None:
        """End all clients and the topology thread; unanswered requests get Unavailable. Idempotent."""
        self._end(Unavailable(f"the link to {self._address} was closed"))

    def died(self, bug: WorqrError) -> None:
        """A bug has ended a client: end the router, as a bug ends the client of a single server. No caller may wait in vain."""
        self._end(bug)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the topology thread does not exist here, and the sockets belong to the parent."""
        self.ended = error
        self.topology.watcher.poison()
        for client in self._clients.values():
            client.poison(error)

    def when_looked(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop when slots may have other owners. It must not raise."""
        self._listeners.append(listener)

    def _end(self, error: WorqrError) -> None:
        self.ended = error = self.ended or error
        left = self._lobby.clear()
        self.topology.watcher.close()
        for client in list(self._clients.values()):
            client.close()
        settle_soon(self._driver, left, error)

    # Routing

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Send requests of one node's client to the nodes that have their keys."""
        self._send(requests, self._client_of)

    def _send(self, requests: Iterable[Request], client_of: Callable[[int], NodeClient | None]) -> None:
        if self.ended is not None:
            settle_soon(self._driver, requests, self.ended)
            return
        by_client: dict[NodeClient, Posted] = {}
        for request in self._lobby.ahead_of(requests, self.topology.view):
            client = client_of(slot_of(request.call.base))
            if client is None:
                self._lobby.requests.add(request)
            else:
                by_client.setdefault(client, Posted()).append(request)
        for client, some in by_client.items():
            client.submit(some[0] if len(some) == 1 else some)
        if self._lobby.requests.pending:
            self.topology.invalidate()

    def retire(self, node: Endpoint) -> bool:
        client = self._clients.get(node)
        if client is None or not client.is_idle():
            return False
        del self._clients[node]
        self._order.forget(node)
        self._past_connections += client.history.count
        text = "%(server)s has no slots of the cluster any more"
        self._log_thread.emit(logger, "link.moved", text, server=str(node))
        return True

    def passed(self, node: Endpoint, waiting: Collection[str]) -> bool:
        if self._order.is_passing(node):
            self._order.passed(node, set(map(slot_of, waiting)))
        return not self._order.is_passing(node)

    def nodes(self) -> list[NodeEndpoint]:
        """Return the primaries that are known, in the order of their addresses."""
        return [NodeEndpoint(self.topology, endpoint) for endpoint in sorted(self.topology.view.primaries, key=str)]

    def _client_of_new(self, slot: int) -> NodeClient | None:
        """As `_client_of`; but the client of the node that had the slot before, while it may have older requests of it."""
        client, owner = self._client_of(slot), self.topology.owner(slot)
        if client is None or owner is None:
            return None
        node, is_new = self._order.choose(slot, owner)
        if node != owner:
            client = self._clients[node]
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
            client = self._new_client(
                resolver=NodeEndpoint(self.topology, endpoint), rebalancer=partial(Rebalancer, self, endpoint)
            )
            client.start()
            self._clients[endpoint] = client
        return client

    # Called by the topology

    def changed(self) -> None:
        waiters = self._lobby.ready.take()
        self._leave_lobby()
        for waiter, deadline in waiters:
            self.wait_ready(waiter, deadline)
        for client in list(self._clients.values()):
            client.sort_out()
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
        """Return the reason for the message of an Unavailable."""
        if self.topology.view.primaries:
            return f"No node of {self._address} is known to have the slot."
        if self.topology.outage.since is None:
            return f"No node of {self._address} has replied yet."
        return self.topology.outage.text(time.monotonic())
