"""The part of a cluster that the client of one node uses. Implemented in `cluster_router`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from worqr.errors import WorqrError
from worqr.link.driver import Waiter
from worqr.link.request import Request, SequenceNumbers

if TYPE_CHECKING:
    from worqr.link.node_client import NodeClient


class Cluster(Protocol):
    """The questions of one node's client to the cluster. Called in the loop."""

    numbers: SequenceNumbers

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
        """Settle `waiter` when a connection is open."""
        ...

    def passed(self, client: NodeClient, waiting: Collection[str]) -> bool:
        """Return True if `client` has handed over all requests of other nodes.

        Until then the client also gets the new requests of these slots, so that they stay behind the older ones.

        Args:
            client: the client of one node.
            waiting: the bases of its remaining requests.
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
