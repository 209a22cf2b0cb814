"""A task is bytes: whatever they are, they arrive as they were enqueued."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, Runs, eventually, serving, spying
from tests.support.servers import Server
from worqr.keys import MARKER

MIB = 1 << 20
PAYLOADS = {
    "empty": b"",
    "nul": b"\x00",
    "nul first": b"\x00\x01binary protocol",
    "all bytes": bytes(range(256)),
    "invalid utf-8": b"\xff\xfe\xc3(",
    "line ends": b"\r\n$3\r\n*1\r\n",
    "looks like an int": b"007",
    "one MiB": bytes(range(256)) * (MIB // 256),
    "nearly the marker": MARKER[:-1],
}
MARKED = {"the marker": MARKER, "the marker first": MARKER + b"@17", "twice the marker": MARKER + MARKER}


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_arrives_byte_for_byte(mesh: worqr.Mesh, task: bytes) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(task)
        assert await q.count() == 1
        assert await q.peek() == task
        assert await q.tasks() == [task]
        async with serving(mesh, "Q1", runs):
            assert await runs.wait(1) == [task]
            assert runs.contexts[0].task == task
        assert await q.count() == 0


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in PAYLOADS.items()])
async def test_a_task_lies_in_the_list_as_it_is(mesh: worqr.Mesh, server: Server, prefix: str, task: bytes) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(task)
        assert server.client().lrange(f"{prefix}:{{Q1}}", 0, -1) == [task]


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in PAYLOADS.items()])
async def test_a_task_of_a_foreign_producer_arrives_byte_for_byte(
    mesh: worqr.Mesh, server: Server, prefix: str, task: bytes
) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        server.client().lpush(f"{prefix}:{{Q1}}", task)
        server.client().publish(f"{prefix}:{{Q1}}", "1")
        assert await runs.wait(1) == [task]
        await eventually(mesh.queue("Q1").running, [])


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_survives_failing_byte_for_byte(mesh: worqr.Mesh, task: bytes) -> None:
    runs = Runs()

    async def fail_first(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().attempt == 1:
            raise ValueError("the first time")

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(task)
        async with serving(mesh, "Q1", fail_first, retry=QUICK):
            assert await runs.wait(2) == [task, task]
            await eventually(mesh.queue("Q1").running, [])


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_is_found_by_its_payload(mesh: worqr.Mesh, task: bytes) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"another", task, task, task + b"x")
        assert (await q.cancel(task)).waiting == 2
        assert await q.tasks() == [task + b"x", b"another"]
        assert (await q.cancel_all()).waiting == 2


async def test_a_task_of_16_mib_is_run_and_one_byte_more_is_refused(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()
    biggest = b"\x00\xff" * (8 * MIB)
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.enqueue(b"a", biggest, b"b")
        assert sorted(await runs.wait(3)) == [biggest, b"a", b"b"]
        await eventually(q.running, [])
        with spying(server, prefix) as spy:
            with pytest.raises(worqr.PayloadTooLarge, match=r"16,777,217 bytes.*16,777,216.*max_payload"):
                await q.enqueue(b"small", biggest + b"!")
            with pytest.raises(worqr.PayloadTooLarge):
                await q.cancel(biggest + b"!")
            assert spy.calls()["enqueue"] == spy.calls()["cancel_task"] == 0
        assert await q.count() == 0


async def test_the_payload_limit_can_be_set(new_mesh: NewMesh) -> None:
    mesh = new_mesh(max_payload=4)
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(b"1234") == 1
        with pytest.raises(worqr.PayloadTooLarge, match=r"5 bytes.*limit of 4"):
            await q.enqueue(b"12345")
        assert await q.tasks() == [b"1234"]


@pytest.mark.parametrize("task", ["text", 7, None, ["b"], object])
async def test_what_is_not_bytes_is_refused(mesh: worqr.Mesh, task: object) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        with pytest.raises(worqr.UsageError, match=type(task).__name__):
            await q.enqueue(b"good", task)  # type: ignore[arg-type]
        assert await q.count() == 0


async def test_bytes_like_tasks_are_copied(mesh: worqr.Mesh) -> None:
    buffer = bytearray(b"abcdef")
    async with mesh.connect(), trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        nursery.start_soon(partial(q.enqueue, buffer, memoryview(buffer)[::2], memoryview(b"view")))
        await trio.testing.wait_all_tasks_blocked()
        buffer[:] = b"XXXXXX"
        await eventually(q.tasks, [b"view", b"ace", b"abcdef"])
