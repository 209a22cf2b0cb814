"""What the tests of the layout still allow. These lists may only shrink; an entry that is no longer needed is an error too."""

from __future__ import annotations

IN_CIRCLES: tuple[str, ...] = (
    "client.blocking",
    "client.blocking_jobs",
    "client.client",
    "client.connections",
    "client.dead_letters",
    "client.dispatcher",
    "client.events",
    "client.fleet",
    "client.inspection",
    "client.job",
    "client.producer",
    "client.queue",
    "functions.declarations",
    "functions.function",
    "functions.registry",
    "functions.schedule_registry",
    "hosting.asyncio_peer",
    "hosting.joined_peer",
    "hosting.peer_thread",
    "hosting.service",
    "hosting.thread_peer",
    "hosting.thread_waiter",
    "hosting.trio_calls",
    "inside",
    "mesh",
    "peer.late_functions",
)
WIDE_CLASSES: dict[str, int] = {
    "hosting.peer_thread.Life": 13,
    "mesh.Mesh": 18,
    "peer.consumer.QueueConsumer": 14,
}
FOREIGN_WRITES: tuple[str, ...] = (
    "client.blocking_jobs: error.job",
    "client.dispatcher: late.job",
    "client.producer: request.replicas",
    "hosting.service: _importing.now",
)
