"""A worker of one workflow, in a process of its own, for tests that kill it: ``child_workflow.py URL PREFIX EFFECTS``.

Prints ``joined`` when it serves. `declare` has the workflow, also for the worker that takes over. Each effect is a line of the
file EFFECTS, which outlives the process.
"""

from __future__ import annotations

import os
import sys

import trio

import worqr

RESULT = "charged 7, packed 7, 3 mailed"


def declare(mesh: worqr.Mesh, effects: str) -> worqr.Function[[int], str]:
    """Declare a workflow that takes a step, awaits a job, waits for a number, and takes another step."""

    def do(what: str) -> str:
        with open(effects, "ab", buffering=0) as file:
            file.write(f"{what}\n".encode())
        return what

    @mesh.step
    async def charge(order: int) -> str:
        return do(f"charged {order}")

    @mesh.task(name="pack")
    async def pack(order: int) -> str:
        return do(f"packed {order}")

    @mesh.step
    async def mail(number: int) -> str:
        return do(f"{number} mailed")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil(order: int) -> str:
        charged, packed = await charge(order), await pack.run(order)
        return ", ".join([charged, packed, await mail(await worqr.wait_for("number", int) or 0)])

    return fulfil


async def main(url: str, prefix: str, effects: str) -> None:
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1, patience=20)
    declare(mesh, effects)
    async with mesh.join(grace=0) as peer:
        print("joined", peer.id)
        await trio.to_thread.run_sync(sys.stdin.readline)
    os._exit(0)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:4])
