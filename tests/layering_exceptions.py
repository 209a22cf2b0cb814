"""What the tests of the layout still allow. These lists may only shrink; an entry that is no longer needed is an error too."""

from __future__ import annotations

IN_CIRCLES: tuple[str, ...] = ()
WIDE_CLASSES: dict[str, int] = {
    "peer.consumer.QueueConsumer": 14,
}
FOREIGN_WRITES: tuple[str, ...] = ()
