"""A Redis Cluster behind the interface of one server: the owners of its slots, and one client per node that has a slot.

`ClusterRouter` chooses the client for each request, `ClusterSubscriptions` the connection for each channel. `Topology` knows the
owners. Not here: sending (`node`), which works for a node as for a standalone server.

All keys of a call share the slot of its base, so a call goes to one node. One client sends the requests of a base in their
order, also while a slot moves to another node (`SlotOrder`). Two requests can change places only if a slot moves twice
within the few milliseconds of such a hand-over.

All clients number their requests together, under one producer. The server's stored replies move with the keys. So the new
node must recognise a resent request by its old number.

Until a node has reported the owners of the slots, requests wait in the lobby.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import trio

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrBug, WorqrError
from worqr.link.connector import (
    EndpointWatcher,
    OnSilence,
    Outage,
    ReadyWaiters,
    StaticEndpoint,
    Wire,
    WireHolder,
    error_of,
    open_connection,
    pause_after,
)
from worqr.link.driver import Driver, Waiter, Watch, copy_of, settle_soon
from worqr.link.failures import ConnectionLost, ErrorAction, ErrorReply, is_unknown_host, remedy_for
from worqr.link.log_thread import LogThread
from worqr.link.messages import SHARDED, Channels, Subscription, Subscriptions
from worqr.link.node import ConnectionHistory, LinkCondition, NodeClient, why_died
from worqr.link.session import SLOTS, Posted, Request, RequestQueue, give_up, slot_of
from worqr.link.settings import Endpoint, LinkSettings

logger: logging.Logger = logging.getLogger(__name__)

# `Topology`: which node has which slot. A thread with its own connection asks every few seconds, and soon after `invalidate()`.
#
# Any node can be asked, and each has its own view. A node that was cut off, or has just been replaced, may be wrong for a while.
# So the view of a node that reports a working cluster is preferred. A redirect (``MOVED``) is believed at once: if it is wrong,
# it costs one more request.


_TIMEOUT: Final = 1.0  # seconds for connecting to a node, and for its reply
_LOOK_EVERY: Final = 5.0  # seconds between regular looks
_LOOK_AGAIN: Final = 0.25  # seconds between looks after `invalidate()`, at least


class TopologyView:
    """The owners of all slots, as one node reported them. Immutable.

    Attributes:
        owners: by slot; None: no known owner.
        primaries: the nodes that have a slot.
        works: the node reports that the cluster works.
    """

    __slots__ = ("owners", "primaries", "works")

    def __init__(self, owners: Sequence[Endpoint | None], *, works: bool = True) -> None:
        self.owners: tuple[Endpoint | None, ...] = tuple(owners)
        once = {id(owner): owner for owner in self.owners}  # a hash for each object, not for each of 16384 slots
        self.primaries: frozenset[Endpoint] = frozenset(owner for owner in once.values() if owner is not None)
        self.works: bool = works


class Topology:
    """The nodes of one cluster, by the latest reports. Readable from any thread.

    Attributes:
        view: the owners of the slots. Replaced, never changed, so that a reader gets consistent answers.
        why: the error of the last look; empty if it succeeded.
        watcher: the thread.
        outage: the time until the owners are known for the first time.
    """

    def __init__(
        self,
        settings: LinkSettings,
        log_thread: LogThread,
        router: ClusterRouter,
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self.view: TopologyView = TopologyView([None] * SLOTS)
        self.why: str = ""
        self.outage: Outage = Outage(log_thread, logger, settings.address.redacted)
        self._settings = settings
        self._log_thread = log_thread
        self._router = router
        self._post = post
        self._learning = threading.Lock()
        self._asking = WireHolder()
        self._asked = settings.address.seeds[0]
        self._failures = 0  # looks in a row
        self.watcher: EndpointWatcher = EndpointWatcher("worqr-topology", self._look, lambda: (self._asking,))

    def owner(self, slot: int) -> Endpoint | None:
        """Return the node that has `slot`; None if it is unknown."""
        return self.view.owners[slot]

    def invalidate(self) -> None:
        """Something was not where it should be: look again, soon."""
        self.watcher.invalidate()

    def learn(self, redirects: Iterable[str], asked: Endpoint) -> None:
        """Apply redirects, each ``SLOT HOST:PORT``. Without a host (or with ``?``), the host is that of `asked`."""
        self.invalidate()
        told = [each for each in (_redirect(text, asked) for text in redirects) if each is not None]
        with self._learning:
            news = {slot: owner for slot, owner in told if self.owner(slot) != owner}
            if news:
                owners = list(self.view.owners)
                for slot, owner in news.items():
                    owners[slot] = owner
                self.view = TopologyView(owners)
        if news:
            self._post(self._router.changed)

    # The topology thread

    def _look(self) -> tuple[float, float]:
        """Ask the nodes, and store the result; return the pauses for `EndpointWatcher`."""
        try:
            error = self.look_once()
        except Exception as exc:  # a bug must cost one look, not all later ones
            error = WorqrBug(f"the nodes cannot be asked ({type(exc).__name__}: {exc}); please report this")
            text = "asking the cluster failed, trying again; this is a bug of worqr, please report it"
            self._log_thread.emit(logger, "link.topology", text, exc_info=exc)
            self._asking.close()
        self._failures = 0 if error is None else self._failures + 1
        self._tell(error)
        self._post(partial(self._router.looked, error))
        refused = error is not None and not isinstance(error, Unavailable)
        pause = max(_LOOK_AGAIN, pause_after(self._failures, refused=refused))
        return pause, _LOOK_EVERY if error is None else 0.0

    def _tell(self, error: WorqrError | None) -> None:
        """Store why no node could report the owners. Log it until they are known for the first time; later each node's client
        does.
        """
        self.why = "" if error is None else str(error)
        if error is None:
            self.outage.end()
        elif not (self.view.primaries or self.watcher.ended.is_set()):
            self.outage.begin(self.why, remedy=remedy_for(error, self._settings))

    def look_once(self) -> WorqrError | None:
        """Ask a node, and apply its view. Return the error if no node could report the owners."""
        try:
            self._take(self._ask())
        except WorqrError as error:
            return error
        return None

    def _ask(self) -> TopologyView:
        """Return the view of a node that reports a working cluster; else that of any node that replies.

        Raises:
            Unavailable: no node replies.
            RefusedByServer, WrongVersion: waiting does not help.
        """
        second_best: TopologyView | None = None
        errors: list[WorqrError] = []
        for endpoint in self._whom_to_ask():
            if self.watcher.ended.is_set():
                break
            self._post(self._router.meanwhile)
            try:
                view = self._view_of(endpoint)
            except WorqrError as error:
                errors.append(error)
                continue
            if view.works:
                return view
            second_best = second_best or view
            self._asking.close()
        if second_best is not None:
            return second_best
        raise error_of(errors)

    def _whom_to_ask(self) -> Sequence[Endpoint | None]:
        """Return None for the open connection; then the known nodes in any order, then the seeds of the URL."""
        nodes = list(self.view.primaries)
        random.shuffle(nodes)
        first: list[Endpoint | None] = [] if self._asking.wire is None else [None]
        return [*first, *dict.fromkeys((*nodes, *self._settings.address.seeds))]

    def _view_of(self, endpoint: Endpoint | None) -> TopologyView:
        try:
            wire = self._asking.wire if endpoint is None else self._open(endpoint)
            assert wire is not None, "None stands for the open connection"
            slots, info = wire.exchange([("CLUSTER", "SLOTS"), ("CLUSTER", "INFO")])
        except (ConnectionLost, Unavailable) as error:
            self._asking.close()
            raise Unavailable(f"{self._asked}: {error}") from error
        if isinstance(slots, ErrorReply):
            self._asking.close()
            if slots.action is not ErrorAction.REFUSED:
                raise Unavailable(str(slots))
            raise RefusedByServer(
                f"the server at {self._asked} is no node of a cluster, or does not let us ask ({slots}); for a single server "
                "write redis://, and give the user the right to CLUSTER SLOTS"
            )
        works = bool(slots) and (not isinstance(info, bytes) or b"cluster_state:ok" in info)
        return TopologyView(owners_of(cast("list[Any]", slots), self._asked.host, self.view.primaries), works=works)

    def _open(self, endpoint: Endpoint) -> Wire:
        self._asking.close()
        self._asked = endpoint
        wire = open_connection(
            *(self._settings, StaticEndpoint(str(endpoint), endpoint), "topology"),
            timeout=_TIMEOUT,
            on_silence=self.watcher.check,
            replica=True,
            first=not self.view.primaries,
        )
        return self._asking.hold(wire)

    def _take(self, view: TopologyView) -> None:
        """Apply a view. A slot without an owner keeps its previous one, because no node reports a newer one.

        Raises:
            Unavailable: no node has any slot.
        """
        with self._learning:
            old = self.view
            new = TopologyView([now or was for now, was in zip(view.owners, old.owners, strict=True)])
            changed = new.owners != old.owners
            if changed:
                self.view = new
        if not self.view.primaries:
            raise Unavailable("no node of the cluster has any slot")
        if changed:
            self._post(self._router.changed)


class NodeEndpoint(StaticEndpoint):
    """One node, which may have lost its slots to another one."""

    __slots__ = ("_topology",)

    def __init__(self, topology: Topology, endpoint: Endpoint) -> None:
        super().__init__(str(endpoint), endpoint)
        self._topology = topology

    def invalidate(self) -> None:
        self._topology.invalidate()


class ShardEndpoint:
    """The node that has a slot, whichever it is."""

    __slots__ = ("_slot", "_topology", "name")

    def __init__(self, topology: Topology, slot: int, name: str) -> None:
        self.name: str = name
        self._topology = topology
        self._slot = slot

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        owner = self._topology.owner(self._slot)
        if owner is None:
            self._topology.invalidate()
            raise Unavailable(self._topology.why or f"no node of the cluster is known to have slot {self._slot}")
        return owner

    def is_current(self, endpoint: Endpoint) -> bool:
        return self._topology.owner(self._slot) in (endpoint, None)

    def invalidate(self) -> None:
        self._topology.invalidate()


def owners_of(slots: list[Any], asked: str, before: Iterable[Endpoint] = ()) -> list[Endpoint | None]:
    """Return the owners by slot from a reply to CLUSTER SLOTS. A node without a host is at the asked node's host.

    Nodes that were known `before` keep their objects, so that two views are compared quickly.
    """
    owners: list[Endpoint | None] = [None] * SLOTS
    known = {endpoint: endpoint for endpoint in before}
    for first, last, primary, *_ in slots:
        endpoint = Endpoint(_host((primary[0] or b"").decode("utf-8", "replace"), asked), int(primary[1]))
        owners[first : last + 1] = [known.setdefault(endpoint, endpoint)] * (last - first + 1)
    return owners


def _redirect(text: str, asked: Endpoint) -> tuple[int, Endpoint] | None:
    """The slot and its owner in ``SLOT HOST:PORT``; None: it cannot be read."""
    slot, _, place = text.partition(" ")
    host, colon, port = place.rpartition(":")
    if not (slot.isdigit() and port.isdigit() and colon) or int(slot) >= SLOTS:
        return None
    return int(slot), Endpoint(_host(host.strip("[]"), asked.host), int(port))


def _host(told: str, asked: str) -> str:
    """Replace an unknown host (empty, ``?``) by that of the asked node."""
    return asked if told in ("", "?") else told


class SlotOrder:
    """Chooses the client for the new requests of a slot that has moved to another node. `ClusterRouter` uses it in the loop.

    It remembers the client that got the newest request of each slot: at most 16384 entries.

    The old node's client may still have requests of the slot: waiting, held back, or in flight. If the new node's client got
    a new request at once, it would overtake them. So the old client gets it, too, and hands over all requests in order. When
    the old client reports that it has none of the slot's requests left, the new client gets the new ones.
    """

    def __init__(self) -> None:
        self._last: dict[int, Endpoint] = {}
        self._passing: dict[
            Endpoint, set[int]
        ] = {}  # by clients: slots of other nodes, whose requests it may have left

    def choose(self, slot: int, owner: Endpoint) -> tuple[Endpoint, bool]:
        """Return the client for a new request of `slot`, whose node is `owner`. True: ask this client to hand over its
        requests.
        """
        last = self._last.setdefault(slot, owner)
        if last == owner:
            return owner, False
        is_new = last not in self._passing
        self._passing.setdefault(last, set()).add(slot)
        return last, is_new

    def is_passing(self, client: Endpoint) -> bool:
        """Return True if `client` must report the slots of its remaining requests."""
        return client in self._passing

    def passed(self, client: Endpoint, left: Collection[int]) -> None:
        """`client` has requests of no other slots than `left`, neither waiting nor on their way."""
        slots = self._passing.pop(client, set[int]())
        for slot in slots.difference(left):
            del self._last[slot]
        if remaining := slots.intersection(left):
            self._passing[client] = remaining

    def forget(self, client: Endpoint) -> None:
        """`client` has ended, and has nothing left."""
        self._passing.pop(client, None)
        self._last = {slot: last for slot, last in self._last.items() if last != client}


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
        self._lobby = RequestQueue()  # the requests that wait until the owners of their slots are known
        self._ready = ReadyWaiters(driver)  # and the callers of `wait_ready`
        self._routed_by: TopologyView | None = None  # the view with which the requests of the lobby were last routed
        self._new_client: Callable[..., NodeClient] = partial(
            NodeClient, settings, driver, log_thread, producer, cluster=self, numbers=self._lobby.numbers
        )
        self._clients: dict[Endpoint, NodeClient] = {}
        self._order = SlotOrder()
        self._looked: Callable[[], None] = lambda: None
        self._past_connections = 0

    # The interface for the link

    def _home(self) -> NodeClient | None:
        """Return the client of the registry's node."""
        owner = self.topology.owner(self.home)
        return None if owner is None else self._clients.get(owner)

    @property
    def history(self) -> ConnectionHistory:
        """The connections to the registry's node, and the number of those to all nodes."""
        home = self._home()
        count = self._past_connections + sum(client.history.count for client in list(self._clients.values()))
        return ConnectionHistory(count=count) if home is None else replace(home.history, count=count)

    @property
    def condition(self) -> LinkCondition:
        """The state of the connections to all nodes; up: the registry's node is. From any thread."""
        home = self._home()
        each = [client.condition for client in self._clients.copy().values()]
        up = home is not None and home.condition.up
        return LinkCondition(up, sum(one.reconnects for one in each), sum(one.unanswered for one in each))

    def start(self) -> None:
        self.ended = None
        self.topology.watcher.start()

    @trio.lowlevel.enable_ki_protection
    def submit(self, request: Request | Posted) -> Watch | None:
        """Send a request, or several, to the nodes that have their keys. The driver delivers the outcomes.

        Ctrl-C in a plain thread ends the link, as in `NodeClient`: requests of other threads may just leave the lobby.
        """
        try:
            self._send(request if isinstance(request, Posted) else (request,), self._client_of_new)
        except BaseException as exc:
            error = why_died(exc)
            self.died(error)
            self._driver.interrupted(error)
            raise
        return None

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when the connection to the registry's node is open, was refused, or the deadline has passed."""
        if self.ended is not None:
            settle_soon(self._driver, (waiter,), self.ended)
            return
        client = self._client_of(self.home)
        if client is not None:
            client.wait_ready(waiter, deadline)
        else:
            self._ready.add(waiter, deadline)
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
        self.topology.watcher.poison(error)
        for client in self._clients.values():
            client.poison(error)

    def when_looked(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop when slots may have other owners. It must not raise."""
        self._looked = listener

    def _end(self, error: WorqrError) -> None:
        self.ended = error = self.ended or error
        left = [*self._lobby.clear(), *(waiter for waiter, _ in self._ready.take())]
        for client in list(self._clients.values()):
            client.close()
        settle_soon(self._driver, left, error)
        self.topology.watcher.end()  # last: it waits for the thread, and Ctrl-C may end that wait

    # Routing

    def hand_over(self, requests: Iterable[Request]) -> None:
        """Send requests of one node's client to the nodes that have their keys."""
        self._send(requests, self._client_of)

    def _send(self, requests: Iterable[Request], client_of: Callable[[int], NodeClient | None]) -> None:
        if self.ended is not None:
            settle_soon(self._driver, requests, self.ended)
            return
        if self._lobby.pending and self._routed_by is not self.topology.view:  # once for each view of the cluster
            self._routed_by = self.topology.view
            requests = [*self._lobby.remove(lambda _: False), *requests]
        by_client: dict[NodeClient, Posted] = {}
        for request in requests:
            client = client_of(slot_of(request.call.base))
            if client is None:
                self._lobby.add(request)
            else:
                by_client.setdefault(client, Posted()).append(request)
        for client, some in by_client.items():
            client.submit(some[0] if len(some) == 1 else some)
        if self._lobby.pending:
            self.topology.invalidate()

    def retire(self, node: Endpoint) -> bool:
        """Forget the node's client, unless requests wait there. True: it gets no more."""
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
        """The node's client has requests of these bases left. Return True if all of them belong to the node.

        Until then the client also gets the new requests of the other slots, so that they stay behind the older ones.
        """
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
            client = self._new_client(resolver=NodeEndpoint(self.topology, endpoint), node=endpoint)
            self._clients[endpoint] = client
            client.start()
        return client

    # Called by the topology

    def changed(self) -> None:
        """Slots have other owners than before, or the owners are known for the first time."""
        waiters = self._ready.take()
        self._leave_lobby()
        for waiter, deadline in waiters:
            self.wait_ready(waiter, deadline)
        for client in list(self._clients.values()):
            client.sort_out()
        self._looked()

    def meanwhile(self) -> None:
        """A look takes long, or has ended: give up the requests and callers that have waited too long."""
        now, outage = time.monotonic(), self._outage()
        late, orphans = self._lobby.overdue(now, owners=True)
        give_up(late, orphans, outage)
        settle_soon(self._driver, [*late, *orphans])
        settle_soon(self._driver, self._ready.take_late(now), Unavailable(outage))

    def looked(self, error: WorqrError | None) -> None:
        """A look has ended; `error`: no node could report the owners."""
        unknown = error is not None and is_unknown_host(error) and not self.topology.view.primaries
        if error is not None and (unknown or not isinstance(error, Unavailable)):  # no node will ever accept worqr
            self._ready.tell(Unavailable(self._outage()) if unknown else error)
        self.meanwhile()
        if error is None:
            self._leave_lobby()
            self._looked()
        if self._lobby.pending or self._ready.waiting:
            self.topology.invalidate()

    def _leave_lobby(self) -> None:
        """Route the requests of the lobby again, also with the same view."""
        self._routed_by = None
        self.hand_over(())

    def _outage(self) -> str:
        """Return the reason for the message of an Unavailable."""
        if self.topology.view.primaries:
            return f"No node of {self._address} is known to have the slot."
        if self.topology.outage.since is None:
            return f"No node of {self._address} has replied yet."
        return self.topology.outage.text(time.monotonic())


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
            resolver, channels = NodeEndpoint(self._topology, owner), Channels(SHARDED, _group_of)
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
        for subscription in list(self._open):
            if subscription in self._open:  # what was delivered meanwhile may have closed it
                self._place(subscription, view)
        gone = [hub for endpoint, hub in self._hubs.items() if endpoint not in view.primaries]
        self._hubs = {endpoint: hub for endpoint, hub in self._hubs.items() if hub not in gone}
        self._plain.reconsider()
        for hub in gone:
            hub.close()


def _group_of(channel: bytes) -> int:
    return slot_of(channel.decode())
