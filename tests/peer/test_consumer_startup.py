"""A peer that is drained while it enters queues leaves those, too."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server


async def bury(_failed: worqr.Failed) -> None:
    """A failure handler: its queue is entered first."""


@pytest.mark.one_server
async def test_serve_with_a_failure_handler_ends_when_the_peer_is_drained_before_both_queues_are_entered(
    own_server: Server, prefix: str
) -> None:
    mesh, ran, ended = worqr.Mesh(own_server.url, prefix=prefix), list[bytes](), trio.Event()

    async def handler(task: bytes) -> None:
        ran.append(task)

    async def serve(peer: worqr.Peer) -> None:
        await peer.serve("Q1", handler, on_failure=bury)
        ended.set()

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        own_server.pause()
        nursery.start_soon(serve, peer)
        await trio.testing.wait_all_tasks_blocked(0.1)  # it enters the failure queue, in vain
        nursery.start_soon(peer.drain, 0)
        await trio.testing.wait_all_tasks_blocked(0.1)
        own_server.resume()
        with trio.fail_after(PATIENCE):
            await ended.wait()
        await mesh.queue("Q1").enqueue(b"after the drain")
        assert await mesh.queue("Q1").count() == 1
        await mesh.queue("Q1").cancel_all()
    assert ran == []
