"""Mistakes with event loops: no connection, the wrong block, the wrong loop, none, one that is blocked."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.mistakes.conftest import Ended
from tests.peer.tools import until
from tests.support.servers import Server


async def asyncio_sleep() -> None:
    await asyncio.sleep(0)


async def trio_sleep() -> None:
    await trio.sleep(0.001)


# Blocks


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (
            "connect",
            "write `async with mesh.connect():` inside trio.run(...) or asyncio.run(...). Where no event loop runs, "
            "worqr.sync(fn.enqueue, ...) connects by itself",
        ),
        (
            "join",
            "write `async with mesh.join():` inside trio.run(...) or asyncio.run(...). Where no event loop runs, use mesh.run()",
        ),
    ],
)
async def test_a_block_without_async(mesh: Any, method: str, why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)), getattr(mesh, method)():
        pass
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        await getattr(mesh, method)()


def test_a_call_without_a_connection(mesh: worqr.Mesh) -> None:
    add = mesh.task(name="add")(asyncio_sleep)

    async def main() -> None:
        await add.enqueue()

    for run in (lambda: asyncio.run(main()), partial(trio.run, main), partial(trio.run, add.enqueue)):
        with pytest.raises(worqr.UsageError, match="not connected here: use it inside `async with mesh.connect"):
            run()
    with pytest.raises(
        worqr.UsageError, match=r"add\.enqueue\(\) has sent nothing: no event loop runs .* an `async def`"
    ):
        asyncio.run(add.enqueue())


def test_a_connection_without_a_loop(mesh: worqr.Mesh) -> None:
    with pytest.raises(
        worqr.UsageError, match=r"where none runs, worqr\.sync\(fn\.enqueue, \.\.\.\) connects by itself"
    ):
        mesh.connect().__aenter__().send(None)


def test_joining_without_a_loop(mesh: worqr.Mesh) -> None:
    with pytest.raises(worqr.UsageError, match=r"use mesh\.join_in_thread\(\), a peer in a thread of its own"):
        mesh.join().__aenter__().send(None)


def test_run_in_a_loop(mesh: worqr.Mesh) -> None:
    mesh.task(name="add")(asyncio_sleep)

    async def main() -> None:
        mesh.run()

    for run in (trio.run, lambda main: asyncio.run(main())):
        with pytest.raises(worqr.UsageError, match=r"inside a running one use `async with mesh\.join\(\):`"):
            run(main)


async def test_sync_in_a_loop(mesh: worqr.Mesh) -> None:
    add = mesh.task(name="add")(asyncio_sleep)
    with pytest.raises(
        worqr.UsageError, match=re.escape("write `await add.enqueue(...)` inside `async with mesh.connect()")
    ):
        worqr.sync(add.enqueue)


@pytest.mark.parametrize("options", [{"concurency": 3}, {"only": ["reprots"]}, {"grace": "long"}], ids=str)
def test_run_with_a_wrong_option_has_changed_nothing(program: Callable[..., Ended], options: dict[str, Any]) -> None:
    ended = program(
        "import logging, worqr\n"
        "mesh = worqr.Mesh()\n"
        "@mesh.task(name='reports')\n"
        "async def reports() -> None: ...\n"
        "try:\n"
        f"    mesh.run(**{options!r})\n"
        "except worqr.UsageError as error:\n"
        "    print(error, logging.getLogger().handlers)\n"
    )
    assert ended.out.rstrip().endswith("[]"), ended
    assert next(iter(options)) in ended.out


# The wrong loop in a handler


@pytest.mark.parametrize(
    ("handler", "runs_in", "why"),
    [
        (
            asyncio_sleep,
            "loop",
            'declare it with runs_in="asyncio", or make that the default of all async handlers with Mesh(',
        ),
        (
            trio_sleep,
            "asyncio",
            'this handler runs on an asyncio event loop, and needs Trio: declare it with runs_in="loop"',
        ),
    ],
    ids=["asyncio on Trio", "Trio on asyncio"],
)
@pytest.mark.leaves("{f}:failed", "{f}:aside*")
async def test_a_handler_that_calls_libraries_of_the_other_loop(
    mesh: worqr.Mesh, handler: Any, runs_in: Any, why: str
) -> None:
    function = mesh.task(name="f", runs_in=runs_in)(handler)
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match=re.escape(why)):
            await (await function.options(result_ttl=60).dispatch()).result()
        assert (await function.queue.info()).counts["failed"] == 1, "it was tried again"


async def test_a_handler_on_asyncio_enqueues_without_a_connection_of_its_own(mesh: worqr.Mesh) -> None:
    other = mesh.task(name="other", result_ttl=60)(lambda: 7)

    @mesh.task(name="f", runs_in="asyncio", result_ttl=60)
    async def f() -> int:
        return await (await other.dispatch()).result()

    async with mesh.join():
        assert await (await f.dispatch()).result() == 7


async def test_a_handler_that_blocks_the_loop(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    def blocked() -> list[str]:
        return [record.getMessage() for record in caplog.records if "loop.blocked" in record.getMessage()]

    @mesh.task(name="shop.pack")
    async def pack() -> None:
        while not blocked():
            time.sleep(0.1)

    async with mesh.join():
        await pack.enqueue()
        await until(blocked)
        assert "handler of queue 'shop.pack'" in blocked()[0]
        assert "test_loops.py:" in blocked()[0]
        assert 'declare what blocks as a plain def, which runs in a thread, or with runs_in="process"' in blocked()[0]


# Others


def test_a_missing_await(program: Callable[..., Ended]) -> None:
    ended = program(
        "import trio, worqr\n"
        "mesh = worqr.Mesh()\n"
        "@mesh.task\n"
        "async def send() -> None: ...\n"
        "async def main() -> None:\n"
        "    async with mesh.connect():\n"
        "        send.enqueue()\n"
        "trio.run(main)\n"
    )
    assert "app.py:7: RuntimeWarning: coroutine 'send.enqueue' was never awaited" in ended.err


def test_a_fork_after_connecting(program: Callable[..., Ended]) -> None:
    ended = program(
        "import faulthandler, os, threading, trio, worqr\n"
        "mesh = worqr.Mesh()\n"
        "@mesh.task\n"
        "async def send() -> None: ...\n"
        "async def child() -> None:\n"
        "    async with mesh.connect():\n"
        "        await send.enqueue()\n"
        "async def main() -> None:\n"
        "    async with mesh.connect():\n"
        "        if os.fork() == 0:\n"
        "            faulthandler.dump_traceback_later(60, exit=True)  # should it hang, say where\n"
        "            try:\n"
        "                await send.enqueue()\n"
        "            except worqr.WorqrError as error:\n"
        "                print(error, flush=True)\n"
        "            thread = threading.Thread(target=trio.run, args=(child,))\n"
        "            thread.start()\n"
        "            thread.join()\n"
        "            os._exit(0)\n"
        "        print(os.wait()[1], (await send.queue.info()).waiting)\n"
        "trio.run(main)\n"
    )
    assert ended.out.endswith("\n0 1\n"), ended
    assert "in the child, run a new event loop" in ended.out, ended


async def test_mistakes_leave_nothing(server: Server, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        assert await mesh.queues() == []
