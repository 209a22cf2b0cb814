"""What the tests of the layout still allow. These lists may only shrink; an entry that is no longer needed is an error too."""

from __future__ import annotations

IN_CIRCLES: tuple[str, ...] = (
    "peer.aio",
    "peer.asyncio_lifespan",
    "peer.children.pool",
    "peer.consumer",
    "peer.context",
    "peer.deadlines",
    "peer.declaring",
    "peer.elsewhere",
    "peer.engine",
    "peer.leading",
    "peer.lifespans",
    "peer.promoting",
    "peer.runners",
    "peer.running",
    "peer.scanning",
    "peer.settings",
    "peer.settling",
    "peer.sweeping",
    "peer.task_log",
    "peer.ticking",
)
WIDE_CLASSES: dict[str, int] = {
    "peer.aio.Run": 14,
    "peer.children.process.Child": 14,
    "peer.consumer.QueueConsumer": 14,
    "peer.context.Context": 17,
    "peer.leading.Leader": 15,
    "peer.scanning.Scanner": 14,
    "peer.ticking.Ticker": 14,
}
FOREIGN_WRITES: tuple[str, ...] = (
    "peer.aio: thread_local.name",
    "peer.children.child: context._value",
    "peer.children.child: context.deadline",
    "peer.children.pool: child.idle_since",
    "peer.children.pool: context._value",
    "peer.children.pool: error.run_at_ms",
    "peer.consumer_shutdown: context._settled",
    "peer.deadlines: context._timer",
    "peer.deadlines: context.deadline",
    "peer.elsewhere: context._elsewhere",
    "peer.host_loop: self._places.limit",
    "peer.running: context._scope",
    "peer.running: context._value",
    "peer.settling: context._settled",
)
