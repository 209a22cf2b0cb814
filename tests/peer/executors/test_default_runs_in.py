"""`Mesh(runs_in=...)`: where async handlers run that have no place of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import until
from tests.support.patience import PATIENCE
from worqr.link import loop_name_here


def place() -> str:
    """What runs in this thread, or that it is not the main one."""
    return loop_name_here() or ("main" if threading.current_thread() is threading.main_thread() else "thread")


def declare(registry: worqr.Registry) -> list[worqr.Function[[], str]]:
    @registry.task(name="default", result_ttl=60)
    async def default() -> str:
        return place()

    @registry.task(name="plain", result_ttl=60)
    def plain() -> str:
        return place()

    @registry.task(name="trio", runs_in="loop", result_ttl=60)
    async def on_trio() -> str:
        return place()

    @registry.task(name="asyncio", runs_in="asyncio", result_ttl=60)
    async def on_asyncio() -> str:
        return place()

    return [default, plain, on_trio, on_asyncio]


async def places(mesh: worqr.Mesh, functions: list[worqr.Function[[], str]]) -> list[str]:
    async with mesh.join():
        return [await (await function.dispatch()).result(PATIENCE) for function in functions]


@pytest.mark.parametrize(("default", "found"), [("loop", "Trio"), ("asyncio", "asyncio")])
async def test_async_functions_run_where_the_mesh_says(new_mesh: NewMesh, default: Any, found: str) -> None:
    mesh = new_mesh(runs_in=default)
    assert mesh.runs_in == default
    assert await places(mesh, declare(mesh)) == [found, "thread", "Trio", "asyncio"]


async def test_the_default_is_trio(mesh: worqr.Mesh) -> None:
    assert mesh.runs_in is None
    assert await places(mesh, declare(mesh)) == ["Trio", "thread", "Trio", "asyncio"]


async def test_functions_of_a_registry_run_where_the_mesh_says_that_serves_them(new_mesh: NewMesh) -> None:
    registry = worqr.Registry()
    functions = declare(registry)
    mesh = new_mesh(runs_in="asyncio")
    mesh.include(registry, prefix="shop.")
    assert functions[0].name == "shop.default"
    assert await places(mesh, functions) == ["asyncio", "thread", "Trio", "asyncio"]


async def test_handlers_of_raw_queues_run_there_too(new_mesh: NewMesh) -> None:
    mesh, seen = new_mesh(runs_in="asyncio"), list[str]()

    async def handler(task: bytes) -> None:
        seen.append(place())

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "Q1", handler)
        await nursery.start(partial(peer.serve, "Q2", handler, runs_in="loop"))
        await mesh.queue("Q1").enqueue(b"x")
        await until(lambda: len(seen) == 1)
        await mesh.queue("Q2").enqueue(b"x")
        await until(lambda: len(seen) == 2)
        nursery.cancel_scope.cancel()
    assert seen == ["asyncio", "Trio"]


@pytest.mark.parametrize(
    ("default", "runs_in", "expected"),
    [
        ("asyncio", None, "asyncio"),
        ("asyncio", "loop", "Trio"),
        ("asyncio", "thread", "asyncio"),
        ("loop", None, "Trio"),
        ("loop", "asyncio", "asyncio"),
        ("loop", "thread", "Trio"),
    ],
)
async def test_a_failure_handler_runs_on_the_loop_of_its_handler(
    new_mesh: NewMesh, expects_left: Callable[..., None], default: Any, runs_in: Any, expected: str
) -> None:
    expects_left("{Q1}:failed", "{Q1}:aside*")
    mesh, seen = new_mesh(runs_in=default), list[str]()

    async def fail(task: bytes) -> None:
        raise worqr.Failure("on purpose")

    def fail_in_thread(task: bytes) -> None:
        raise worqr.Failure("on purpose")

    async def on_failure(failed: worqr.Failed) -> None:
        seen.append(place())

    handler: Any = fail_in_thread if runs_in == "thread" else fail
    options = {} if runs_in is None else {"runs_in": runs_in}
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler, on_failure=on_failure, **options))
        await mesh.queue("Q1").enqueue(b"x")
        await until(lambda: seen)
        nursery.cancel_scope.cancel()
    assert seen == [expected]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "thread",
            "must be 'loop' or 'asyncio', not 'thread'; it is the place of async handlers: for a plain function",
        ),
        ("process", "say runs_in='process' in @mesh.task"),
        ("trio", "must be 'loop' or 'asyncio', not 'trio'$"),
    ],
)
def test_other_places_are_refused(value: Any, message: str) -> None:
    with pytest.raises(worqr.UsageError, match=message):
        worqr.Mesh(runs_in=value)
