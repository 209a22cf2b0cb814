"""The cost of running a peer in a thread beside another loop: its drains and pick-ups, beside those of a native one.

Both are processes of their own. In one a peer has the process's only loop; in the other it has joined in a thread, while the main
thread runs asyncio, which either waits, or is busy for a millisecond and waits for one, by turns: as a web server that has
enough to do.
"""

from __future__ import annotations

from functools import partial

import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.pickup import Sample, enqueue, rows
from benchmarks.server import bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

CONCURRENCY = 100


class Beside:
    """One of the processes, with a queue to drain and one whose handler tells how long its task has waited."""

    def __init__(self, server: EmbeddedServer, mesh: worqr.Mesh, name: str, child: Child, count: int) -> None:
        self._client = bare(server)
        self._drain = mesh.queue(f"{name}-drain")
        self._pickup = mesh.queue(f"{name}-pickup")
        self._child = child
        self._count = count

    async def drain(self, busy: bool) -> float:
        """Tasks per second, from the first handler to the last."""
        await self._turn(busy)
        fill(self._client, QueueKeys("worqr", self._drain.name).base, self._count - 1)
        await self._drain.enqueue(b"go")
        return float(await self._child.line())

    async def pick_up(self, busy: bool) -> float:
        """Seconds from the call of enqueue to the start of the handler."""
        await self._turn(busy)
        await trio.sleep(0.01)
        return await enqueue(self._pickup, self._child)

    async def rest(self) -> None:
        """Pause, to leave the machine to other processes."""
        await self._turn(False)

    async def _turn(self, busy: bool) -> None:
        answer = await self._child.ask("busy" if busy else "idle")
        assert answer == "ok", answer


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains and pick-ups in a thread, in turn with the native ones."""
    mesh = worqr.Mesh(server.url)
    count = plan.size(20_000, 500)
    options = {"count": count, "concurrency": CONCURRENCY}
    async with (
        mesh.connect(),
        open_child("joined", server, name="native", **options) as native_child,
        open_child("joined_in_thread", server, name="thread", **options) as thread_child,
    ):
        native = Beside(server, mesh, "native", native_child, count)
        thread = Beside(server, mesh, "thread", thread_child, count)

        async def rested(sample: Sample) -> float:
            value = await sample()
            await thread.rest()
            return value

        idle, busy, limit = await in_turn(
            plan.runs,
            partial(thread.drain, False),
            partial(rested, partial(thread.drain, True)),
            partial(native.drain, False),
        )
        alone = partial(native.pick_up, False)
        pairs: list[tuple[str, Sample, Sample]] = [
            ("main thread waits", partial(thread.pick_up, False), alone),
            ("main thread busy half of the time", partial(rested, partial(thread.pick_up, True)), alone),
        ]
        found = await rows(plan, pairs, (None, None), plan.size(200, 10))
    beside = "a peer that has the only loop of its process, in turn"
    return [
        Table(
            f"threads: no-op tasks drained by a peer in a thread, concurrency {CONCURRENCY}",
            beside,
            [
                Row("main thread waits", "tasks/s", idle, limit),
                Row("main thread busy half of the time", "tasks/s", busy, limit),
            ],
        ),
        Table("threads: pick-up by a peer in a thread, from process to process", beside, found),
    ]
