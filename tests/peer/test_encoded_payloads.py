"""Tasks whose program encodes their payloads: the server has no plain text of them, and a task of another key waits."""

from __future__ import annotations

import base64

import pytest

import worqr
from tests.peer.tools import eventually, serving
from tests.support.leaks import dump
from tests.support.servers import Server
from worqr import codecs
from worqr.codecs import Compress, Fernet, Signed, Stack

OLD, NEW = (base64.urlsafe_b64encode(bytes([n]) * 32) for n in (1, 2))
MARKER = b"marker-of-the-payload"


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_the_server_never_has_the_plain_text(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    codec = Stack([Compress(above=10), Fernet(NEW)])
    stored: list[str] = []

    def look() -> None:
        stored.append(repr(dump(server.client(), prefix)))

    async def handler(task: bytes) -> bytes:
        assert codec.decode(task) == MARKER * 9
        await worqr.current().save(task)
        look()
        if worqr.current().id == "bad":
            raise worqr.Failure("no")
        return codec.encode(MARKER)

    async with mesh.connect():
        queue = mesh.queue("Q1")
        good, bad = [await queue.dispatch(codec.encode(MARKER * 9), id=each, result_ttl=60) for each in ("good", "bad")]
        look()
        async with serving(mesh, "Q1", handler):
            assert codec.decode(await good.result(timeout=30)) == MARKER
            with pytest.raises(worqr.JobFailed):
                await bad.result(timeout=30)
            look()
    assert len(stored) == 4
    assert not any(MARKER.decode() in each for each in stored)


@pytest.mark.parametrize(("before", "after"), [(Fernet(OLD), Fernet(NEW)), (Signed(OLD), Signed(NEW))])
async def test_a_task_of_an_unknown_key_waits_until_a_worker_has_it(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch, before: codecs.Codec, after: codecs.Codec
) -> None:
    monkeypatch.setattr(codecs, "TRY_AGAIN", 0.05)
    known, seen = [after], list[bytes]()

    async def handler(task: bytes) -> bytes:
        seen.append(task)
        if len(seen) == 5:  # more often than a task may fail or be found undecodable
            known[0] = type(after)([NEW, OLD])  # type: ignore[call-arg]
        return known[0].decode(task)

    retry = worqr.RetryPolicy(max_failures=1)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry):
        job = await mesh.queue("Q1").dispatch(before.encode(MARKER), id="j", result_ttl=60)
        assert await job.result(timeout=30) == MARKER
        assert (await job.status()).failures == 0
    assert len(seen) == 5


@pytest.mark.leaves("{Q1}:broken", "{Q1}:aside*")
async def test_a_changed_payload_is_undecodable(mesh: worqr.Mesh) -> None:
    codec = Signed(NEW)

    async def handler(task: bytes) -> None:
        codec.decode(task)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        queue = mesh.queue("Q1")
        await queue.enqueue(codec.encode(MARKER)[:-1] + b"x")

        async def undecodable() -> int:
            return (await queue.info()).undecodable

        await eventually(undecodable, 1)
