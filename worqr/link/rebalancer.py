"""The requests of slots that have moved to another node of a cluster. Used in the driver's loop.

`Rebalancer` hands over the requests in one node's client that belong to other nodes. `SlotOrder` chooses the client for the new
requests of such a slot. Not here: the clients of all nodes (`cluster_router`; the protocol `Cluster` is a part of it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, Generic, Protocol, TypeVar

from worqr.errors import Unavailable, WorqrError
from worqr.link.connector import ReadyWaiters
from worqr.link.driver import Waiter
from worqr.link.pipeline import Pipeline
from worqr.link.request import Request
from worqr.link.settings import Endpoint
from worqr.link.topology import Topology
from worqr.link.wire_form import slot_of

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
