"""A program with batches, in a process of its own, for tests that kill or freeze it. Its only input is lines, its output too.

    child_batches.py URL PREFIX MODE

MODE ``work``: serve the functions ``M0`` to ``M2``, whose jobs are members of batches, and ``done``, the follow-up. It prints
``joined``, and ``leads`` when it is the leader. ``hold`` waits for a line ``go``, also when it is cancelled; then it adds a
job to its batch, and prints ``added`` or ``refused ERROR``. MODE ``lead``: the same without ``done`` and ``hold``. MODE
``open``: begin a batch, print ``opened ID`` when its part is open, and add nothing. MODE ``add``: begin a batch, add three
jobs, print ``added ID``, and do not end the block. Each run of ``done`` is a line in the file $DONE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import trio

import worqr
from worqr.client.batch import OpenBatch
from worqr.inside import engine_of
from worqr.keys import QueueKeys

MEMBERS = 3
OPEN_FOR = 1.0
go = trio.Event()


def declare(mesh: worqr.Mesh) -> list[worqr.Function[..., None]]:
    """Declare the functions, and return those whose jobs are members."""
    retry = worqr.RetryPolicy(max_stalls=1000)

    def member(number: int) -> worqr.Function[..., None]:
        @mesh.task(name=f"M{number}", retry=retry)
        async def member(ms: int = 0) -> None:
            await trio.sleep(ms / 1000)

        return member

    @mesh.task(name="done", retry=retry)
    async def done(word: str) -> None:
        ended, job = worqr.current().ended_batch, worqr.current().ended_job
        if job is not None:
            note(f"{word} {job.id} {job.outcome}\n")
            return
        assert ended is not None
        counts = f"{ended.jobs} {ended.finished} {ended.failed} {ended.cancelled} {ended.endings}"
        note(f"{word} {ended.id} {counts}\n")

    members = [member(number) for number in range(MEMBERS)]

    @mesh.task(name="hold", retry=retry)
    async def hold() -> None:
        print("run")
        if worqr.current().attempt > 1:
            return
        batch = mesh.current_batch()
        assert batch is not None
        with trio.CancelScope(shield=True):
            await go.wait()
            try:
                await batch.dispatch(members[0].call())
            except worqr.WorqrError as error:
                print("refused", type(error).__name__)
            else:
                print("added")

    return members


def note(line: str) -> None:
    with open(os.environ["DONE"], "a") as file:
        file.write(line)


class NeverAdding(OpenBatch):
    """A batch whose producer stands still when its first part is open."""

    async def _entry(self, part: QueueKeys) -> Mapping[str, object]:
        await super()._entry(part)
        print("opened", self.id)
        await trio.sleep_forever()
        raise AssertionError


async def read() -> None:
    """Take the lines of the standard input."""
    async for _line in trio.lowlevel.FdStream(os.dup(0)):
        go.set()


async def work(mesh: worqr.Mesh, only: str) -> None:
    async with mesh.join(concurrency=20, only=[only]) as peer, trio.open_nursery() as nursery:
        print("joined")
        nursery.start_soon(read)
        while not engine_of(peer).leader.leads:
            await trio.sleep(0.01)
        print("leads")


async def produce(mesh: worqr.Mesh, members: list[worqr.Function[..., None]], *, adds: bool) -> None:
    options = {"open_for": OPEN_FOR, "queue": "home"}
    done = {name: mesh.call("done", word=name) for name in ("then", "otherwise")}
    async with mesh.connect(), mesh.batch(**options, **done) as batch:  # type: ignore[arg-type]
        if adds:
            await batch.dispatch_many([member.options(delay=600).call() for member in members])
            print("added", batch.id)
            await trio.sleep_forever()
        batch.__class__ = NeverAdding
        await batch.dispatch(members[0].call())


async def main(url: str, prefix: str, mode: str) -> None:
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1)
    members = declare(mesh)
    if mode in {"work", "lead"}:
        await work(mesh, "*" if mode == "work" else "M*")
    else:
        await produce(mesh, members, adds=mode == "add")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
