"""A server that refuses to work for longer than a keepalive lasts: peers keep what they hold, nobody is swept, all goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
import trio

import worqr
from tests.peer.tools import until
from tests.support.patience import PATIENCE
from tests.support.sentinels import raw
from tests.support.servers import Server
from tests.support.troubles import TROUBLES, Trouble, troubled_server

pytestmark = pytest.mark.one_server

LONG = 2.5
"""Keepalives: longer than one, and than it takes a leader to see twice that somebody is missing."""
KEEPALIVES = (1, 3, 9)
"""Seconds. A machine that stands still for longer than a keepalive gets its peer swept, rightly; then the next one is tried."""


class Work:
    """A handler of which one task takes as long as a test says."""

    def __init__(self) -> None:
        self.runs: Counter[bytes] = Counter()
        self.begun = trio.Event()
        self.gate = trio.Event()
        self.cancelled: list[str | None] = []

    async def __call__(self, task: bytes) -> None:
        if task == b"long":
            self.begun.set()
            try:
                await self.gate.wait()
            except trio.Cancelled:
                self.cancelled.append(worqr.current().cancel_reason)
                raise
        self.runs[task] += 1


@pytest.fixture
def troubled(server_kind: str, trouble: Trouble) -> Iterator[Server]:
    yield from troubled_server(server_kind, trouble)


@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
async def test_peers_outlast_it(troubled: Server, trouble: Trouble, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worqr")

    async def refused(queue: worqr.Queue, work: Work, keepalive: float) -> None:
        await queue.enqueue(b"short")
        await until(lambda: work.runs[b"short"])
        await trio.to_thread.run_sync(trouble.begin, troubled)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.enqueue, b"meanwhile")
            await trio.sleep(LONG * keepalive)
            assert not work.runs[b"meanwhile"]
            await trio.to_thread.run_sync(trouble.end, troubled)
        await until(lambda: work.runs[b"meanwhile"])

    await outlast(troubled.tcp_url, refused, {b"long": 1, b"short": 1, b"meanwhile": 1}, caplog)
    said = Counter(record.getMessage().partition(":")[0] for record in caplog.records)
    assert (said["link.lost"], said["link.back"]) == (1, 1), said
    assert not said["condemn_worker"]


async def test_peers_outlast_rights_that_were_taken_away(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    raw(own_server, "ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all")

    async def refused(queue: worqr.Queue, work: Work, keepalive: float) -> None:
        raw(own_server, "ACL", "SETUSER", "bob", "-evalsha")
        with trio.fail_after(PATIENCE), pytest.raises(worqr.RefusedByServer, match="enqueue: NOPERM"):
            await queue.enqueue(b"never")
        await trio.sleep(LONG * keepalive)
        raw(own_server, "ACL", "SETUSER", "bob", "+evalsha")
        await queue.enqueue(b"later")
        await until(lambda: work.runs[b"later"])

    url = own_server.tcp_url.replace("redis://", "redis://bob:pw@")
    await outlast(url, refused, {b"long": 1, b"later": 1}, caplog)
    loud = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert len(loud) < 20, loud


Refused = Callable[[worqr.Queue, Work, float], Awaitable[None]]


async def outlast(url: str, refused: Refused, runs: dict[bytes, int], caplog: pytest.LogCaptureFixture) -> None:
    """A peer holds a task while the server refuses to work, for longer than a keepalive. Nobody is swept, and these run."""
    for keepalive in KEEPALIVES:
        caplog.clear()
        mesh, work = worqr.Mesh(url, keepalive=keepalive, patience=PATIENCE), Work()
        queue = mesh.queue("Q1")
        async with mesh.join(concurrency=5, grace=0) as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", work))
            await queue.enqueue(b"long")
            await work.begun.wait()
            worker = peer.id
            await refused(queue, work, keepalive)
            work.gate.set()
            await until(lambda: work.runs[b"long"])  # noqa: B023
            assert (peer.id == worker) is (not work.cancelled)
            nursery.cancel_scope.cancel()
        if not work.cancelled:
            assert work.runs == runs
            return
    pytest.fail("somebody was swept, with each keepalive")
