"""Workers that die or freeze after they saved: the next run finds it, and a worker that has lost its task saves nothing more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

import worqr
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server

CHILD = Path(__file__).parent / "child_jobs.py"
Spawn = Callable[..., Child]


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, keepalive=1, patience=20)


def charge_again(what: str) -> str:
    raise AssertionError(f"{what} was charged before")


class Successor:
    """A handler that takes the same step, and saves. It holds the task until `go`."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes | None, str]] = []
        self.running = trio.Event()
        self.go = trio.Event()

    async def __call__(self, task: bytes) -> str:
        now = worqr.current()
        charged = await worqr.step("charge", charge_again, task.decode())
        self.found.append((now.saved, charged))
        await now.save(b"by its successor")
        self.running.set()
        await self.go.wait()
        return charged

    @asynccontextmanager
    async def serving(self, mesh: worqr.Mesh) -> AsyncGenerator[None]:
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", self, result_ttl=60))
            yield
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("raw", [False, True], ids=["job", "raw"])
async def test_after_a_kill_the_next_run_does_not_take_the_step_again(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn, raw: bool
) -> None:
    successor = Successor()
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        if raw:
            await q.enqueue(b"step-1")
        else:
            await q.dispatch(b"step-1", id="x")
        await child.line_with("charged step-1")
        await child.line_with("saved step-1")
        child.kill()
        async with successor.serving(mesh):
            with trio.fail_after(PATIENCE):
                await successor.running.wait()
                successor.go.set()
                while (await q.info()).counts.get("finished", 0) < 1:
                    await trio.sleep(0.02)
    assert successor.found == [(b"by the child", "step-1 by the child")]


async def test_a_frozen_worker_does_not_overwrite_what_its_successor_saved(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    successor = Successor()
    async with mesh.connect():
        q = mesh.queue("Q1")
        zombie = spawn(CHILD, server.url, prefix, "Q1")
        job = await q.dispatch(b"step-1", id="x", result_ttl=60)
        await zombie.line_with("saved step-1")
        zombie.pause()
        zombie.send("go")  # which it reads when it thaws
        async with successor.serving(mesh):
            with trio.fail_after(PATIENCE):
                await successor.running.wait()
            kept = (await q.read("x")).saved_size
            zombie.resume()
            lines = [await zombie.line()]
            while not lines[-1].startswith("ended step-1"):
                lines.append(await zombie.line())
            assert "charged step-1" not in lines, "it took another step"
            assert (await q.read("x")).saved_size == kept
            with server.client() as client:
                record = client.hgetall(f"{prefix}:{{Q1}}:active:x")
            assert record[b"saved"] == b"by its successor"
            assert b"step:mail" not in record
            successor.go.set()
            assert await job.result(PATIENCE) == "step-1 by the child"  # type: ignore[comparison-overlap]
        zombie.send("leave")
        await zombie.ended()
