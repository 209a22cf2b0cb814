"""Choose the client for the new requests of a slot that has moved to another node. No I/O; `ClusterRouter` uses it in the loop.

The old node's client may still have requests of the slot: waiting, held back, or in flight. If the new node's client got a
new request at once, it would overtake them. So the old client gets it, too, and hands over all requests in order. When it
reports that it has none of the slot's requests left, the new client gets the new ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

P = TypeVar("P")


class SlotOrder(Generic[P]):
    """Remembers the client that got the newest request of each slot: at most 16384 entries."""

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
