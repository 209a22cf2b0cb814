"""`Rebalancer`: hands requests of one node's client over to the nodes that have their slots. Used in the driver's loop.

Here: `ClusterNode`, the part of a cluster that the client of one node uses. Implemented in `cluster_router`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final, Protocol

from worqr.errors import Unavailable, WorqrError
from worqr.link.driver import Waiter
from worqr.link.pipeline import Pipeline
from worqr.link.ready_waiters import ReadyWaiters
from worqr.link.request import Request

SILENT: Final = 0.25
"""Seconds without input, after which a node may have lost its slots."""


class ClusterNode(Protocol):
    """One node of a cluster. Its client calls it in the loop."""

    def belongs(self, request: Request) -> bool:
        """Return True if the node has the keys of `request`."""
        ...

    def hand_over(self, requests: list[Request]) -> None:
        """Send them to the nodes that have their keys."""
        ...

    def moved(self, requests: list[tuple[Request, str]]) -> list[Request]:
        """The node has redirected these: ``SLOT HOST:PORT``. Return those that have to wait at its client a little."""
        ...

    def wait_ready(self, waiter: Waiter, deadline: float) -> None:
        """Settle `waiter` when a connection is open."""
        ...

    def passed(self, waiting: Collection[str]) -> bool:
        """Return True if the client has handed over all requests of other nodes.

        Until then the client also gets the new requests of these slots, so that they stay behind the older ones.

        Args:
            waiting: the bases of its remaining requests.
        """
        ...

    def is_needed(self) -> bool:
        """Return True if the node has a slot."""
        ...

    def retire(self) -> bool:
        """Forget the client, unless requests wait there. True: it gets no more."""
        ...

    def died(self, bug: WorqrError) -> None:
        """The client has ended by a bug."""
        ...


class Rebalancer:
    """The hand-over of the requests of one node's client.

    Attributes:
        node: the client's node.
        is_active: requests of other nodes are left, or the node has no slot any more.

    Args:
        end: ends the client.
    """

    def __init__(
        self, node: ClusterNode, pipeline: Pipeline, ready: ReadyWaiters, end: Callable[[WorqrError], object]
    ) -> None:
        self.node: ClusterNode = node
        self.is_active: bool = False
        self._pipeline = pipeline
        self._ready = ready
        self._end = end

    def sort_out(self) -> None:
        """Hand over the requests that now belong to another node; end the client, if its node is no primary any more."""
        node, requests = self.node, self._pipeline.requests
        node.hand_over(requests.remove(node.belongs))
        passing = not node.passed(requests.bases())
        leaving = not node.is_needed()
        self.is_active = passing or leaving
        if leaving:
            self._leave()

    def _leave(self) -> None:
        for waiter, deadline in self._ready.take():
            self.node.wait_ready(waiter, deadline)
        connection = self._pipeline.connection
        if not self._pipeline.is_busy:
            if self.node.retire():
                self._end(Unavailable("the node is no primary any more"))
        elif connection is not None and time.monotonic() - connection.heard_at >= SILENT:
            self._pipeline.give_up("it is no primary any more", innocent=True)
