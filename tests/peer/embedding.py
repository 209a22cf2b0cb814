"""An application on an embedded server, one of whose functions runs in a process and enqueues the other."""

from __future__ import annotations

import trio

import worqr
from tests.support.patience import PATIENCE

mesh = worqr.Mesh("embedded:")
ran = trio.Event()


@mesh.task(runs_in="process", result_ttl=60)
def branch() -> None:
    worqr.sync(leaf.enqueue)


@mesh.task
async def leaf() -> None:
    ran.set()


async def main() -> None:
    async with mesh.join(grace=0):
        await (await branch.dispatch()).result(timeout=PATIENCE)
        with trio.move_on_after(PATIENCE):
            await ran.wait()
            print("the leaf ran")
