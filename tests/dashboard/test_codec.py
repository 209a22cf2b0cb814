"""The dashboard of a mesh with a codec: who may read payloads reads them, all others see what has encoded them."""

from __future__ import annotations

from typing import Any

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.peer.tools import serving
from tests.support.servers import Server
from worqr.codecs import Compress, Fernet, Stack
from worqr.dashboard import operator

KEY = "b1Yx5rkyEFXDoTxFxGN1sAFZoqRGoeYbNSDxhqRhD-k="
CODEC = Stack([Compress(), Fernet(KEY)])
pytestmark = pytest.mark.leaves("*")


async def handler(task: bytes) -> str:
    worqr.state("a state")
    if task == b"a payload that fails":
        raise worqr.Failure("no")
    return "a result"


async def test_payloads_and_results_are_decoded_for_viewers_who_may_read_them(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, codec=CODEC)
    tabs = [("/queue", {"name": "q", "tab": tab}) for tab in ("waiting", "failed", "kept")]
    pages = [("/job", {"queue": "q", "id": "good"}), *tabs]
    async with mesh.connect():
        queue = mesh.queue("q")
        async with serving(mesh, "q", handler):
            await (await queue.dispatch(b"a payload", id="good", keep=worqr.Keep())).result(timeout=30)
            with pytest.raises(worqr.JobFailed):
                await (await queue.dispatch(b"a payload that fails", id="bad", keep=worqr.Keep())).result(timeout=30)
        await queue.dispatch(b"a payload", id="later", delay=600)
        await queue.enqueue(b"a payload")
        site, stranger = Site(mesh), Site(worqr.Mesh(server.url, prefix=prefix))
        for path, query in pages:
            assert "a payload" in (page := (await site.get(path, **query)).text)
            assert "encoded (" not in page
        assert "a result" in (await site.get("/job", queue="q", id="good")).text
        assert "a state" in (await site.get("/job", queue="q", id="bad")).text
        assert (await site.get("/payload", queue="q", id="good")).content == b"a payload"
        site.viewer = operator("bob")
        for each in (site, stranger):
            for path, query in pages:
                page = (await each.get(path, **query)).text
                assert "a payload" not in page
                assert "encoded (Fernet, key " in page
        assert "State of the run" not in (await site.get("/job", queue="q", id="bad")).text
        assert "encoded (Fernet" in (await site.get("/api/v1/tasks", queue="q", state="scheduled")).text


async def test_a_task_that_is_typed_is_encoded(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, codec=CODEC, accept_plain=False)
    async with mesh.connect():
        site = Site(mesh)
        await site.post("/enqueue", queue="q", payload="typed")
        assert await mesh.queue("q").peek() == b"typed"
        stored: Any
        [stored] = server.client().lrange(f"{prefix}:{{q}}", 0, -1)
        assert CODEC.decode(stored) == b"typed"
