"""Functions that are declared after the mesh has joined."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Runs, impatient, serving, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from worqr.hosting import peer_factory

LATE = """
import worqr

registry = worqr.Registry()


@registry.task(runs_in="process", result_ttl=60)
def double(n: int) -> int:
    return 2 * n
"""


async def once(mesh: worqr.Mesh, name: str, *, runs: Runs) -> None:
    """Until a call of the function `name` has run."""
    n = len(runs.tasks)
    await mesh.queue(name).enqueue(b"{}")
    await runs.wait(n + 1)


def declared(mesh: worqr.Registry, name: str = "late") -> Runs:
    """A function of this name; what it was called with."""
    runs = Runs()

    async def function() -> None:
        runs.begin(worqr.current().task)

    mesh.task(name=name)(function)
    return runs


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == peer_factory.__name__]


@pytest.mark.parametrize("first", ["declare", "join"])
async def test_a_function_is_served_whether_it_was_declared_before_or_after_the_join(
    mesh: worqr.Mesh, first: str
) -> None:
    runs = declared(mesh) if first == "declare" else None
    async with mesh.join():
        await once(mesh, "late", runs=runs or declared(mesh))
        await once(mesh, "later", runs=declared(mesh, "later"))


async def test_it_is_served_if_it_was_declared_while_the_mesh_joined(new_mesh: NewMesh) -> None:
    runs: list[Runs] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        runs.append(declared(mesh))
        yield

    mesh = new_mesh(lifespan=lifespan)
    async with mesh.join():
        await once(mesh, "late", runs=runs[0])


async def test_it_is_served_with_its_aliases_its_options_and_its_failure_handler(mesh: worqr.Mesh) -> None:
    failed = Runs()
    async with mesh.join():

        @mesh.task(name="late", aliases=["older"], retry=worqr.RetryPolicy(max_failures=1), keep_failed=0)
        async def function() -> None:
            raise ValueError(worqr.current().queue)

        @function.on_failure
        async def on_failure(record: worqr.Failed) -> None:
            failed.begin(record.error.message.encode())

        for name in ("late", "older"):
            await mesh.queue(name).enqueue(b"{}")
        assert sorted(await failed.wait(2)) == [b"late", b"older"]


@pytest.mark.parametrize("under", ["", "shop."])
async def test_a_registry_that_is_included_after_the_join_is_served_and_what_it_declares_later(
    mesh: worqr.Mesh, under: str
) -> None:
    inner, outer = worqr.Registry(), worqr.Registry()
    outer.include(inner, prefix="inner.")
    first = declared(inner, "first")
    async with mesh.join():
        mesh.include(outer, prefix=under)
        await once(mesh, f"{under}inner.first", runs=first)
        await once(mesh, f"{under}inner.second", runs=declared(inner, "second"))
        await once(mesh, f"{under}third", runs=declared(outer, "third"))


async def test_every_peer_of_the_process_serves_it_but_for_those_that_serve_only_others(
    mesh: worqr.Mesh, new_mesh: NewMesh
) -> None:
    declared(mesh, "other-1")
    async with mesh.join() as one, mesh.join() as two, mesh.join(only=["other*"]) as three, new_mesh().join() as four:
        await once(mesh, "late", runs=declared(mesh))
        declared(mesh, "other-2")
        peers = (one, two, three, four)

        def served() -> list[list[str]]:
            return [sorted(consumer.queue for consumer in peer._engine.consumers.entered()) for peer in peers]

        others = ["other-1", "other-2"]
        await until(lambda: served() == [["late", *others], ["late", *others], others, []])


async def test_it_may_be_declared_in_any_thread(mesh: worqr.Mesh) -> None:
    async with mesh.join():
        await once(mesh, "first", runs=declared(mesh, "first"))
        await once(mesh, "late", runs=await trio.to_thread.run_sync(declared, mesh))


def test_a_peer_in_a_thread_serves_it(new_mesh: NewMesh) -> None:
    mesh, ran = new_mesh(), threading.Event()
    declared(mesh, "first")
    with mesh.join_in_thread():

        @mesh.task(name="late")
        def function() -> None:
            ran.set()

        worqr.sync(function.enqueue)
        assert ran.wait(PATIENCE)
    mesh.close()


async def test_a_peer_that_leaves_or_has_left_serves_nothing_more(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    async with mesh.join() as peer:
        declared(mesh, "first")
        await peer.drain()
        declared(mesh, "second")
    declared(mesh, "third")
    assert not [line for line in lines(caplog) if "function.unserved" in line]


@pytest.mark.parametrize("run", [trio.run, lambda produce: asyncio.run(produce())], ids=["trio", "asyncio"])
def test_where_a_mesh_is_only_connected_a_declaration_needs_no_peer(new_mesh: NewMesh, run: Callable[..., int]) -> None:
    mesh = new_mesh()

    async def produce() -> int:
        async with mesh.connect():

            @mesh.task(name="late")
            async def function() -> None: ...

            await function.enqueue()
            waiting = await function.queue.count()
            await function.queue.cancel_all()
            return waiting

    assert run(produce) == 1


async def test_a_process_serves_a_function_of_a_module_that_is_imported_late(
    mesh: worqr.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    try:
        async with mesh.join(processes=1):
            module: Any = importlib.import_module("imported_late")
            mesh.include(module.registry)
            job = await module.double.dispatch(21)
            assert await job.result(PATIENCE) == 42
    finally:
        sys.modules.pop("imported_late", None)


# What goes wrong


async def test_a_function_that_is_declared_again_is_not_exchanged_and_that_is_logged(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    source = "def function():\n    ran.append({})\n"
    names: dict[str, object] = {"__name__": "reloaded", "ran": ran}

    def declare(n: int) -> None:
        exec(compile(source.format(n), "reloaded.py", "exec"), names)
        mesh.task(name="late")(names["function"])  # type: ignore[call-overload]

    declare(1)
    async with mesh.join():
        declare(2)
        await until(lambda: lines(caplog))
        assert lines(caplog) == [
            "function.replaced: 'late' was declared again; this worker runs the older one until it joins again"
        ]
        await mesh.queue("late").enqueue(b"{}")
        await until(lambda: ran)
    async with mesh.join():
        await mesh.queue("late").enqueue(b"{}")
        await until(lambda: len(ran) == 2)
    assert ran == [1, 2]


async def test_what_cannot_be_served_is_logged_and_tried_again(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_factory, "RETRY_AFTER", 0.05)
    runs = Runs()
    async with mesh.join():

        @mesh.task(name="late")
        async def function(of: "Unknown") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
            runs.begin(b"")

        await until(lambda: lines(caplog))
        (line,) = lines(caplog)
        assert line.startswith("function.unserved: 'late', declared after the join, is not served: ")
        assert "Unknown" in line
        other = declared(mesh, "other")
        await once(mesh, "other", runs=other)
        monkeypatch.setitem(globals(), "Unknown", int)
        await mesh.queue("late").enqueue(b'{"of": 1}')
        await runs.wait(1)
    assert [record.levelno for record in caplog.records if "is not served" in record.message] == [logging.ERROR]


async def test_a_queue_that_is_served_by_hand_is_left_as_it_is(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    by_hand = Runs()
    async with serving(mesh, "late", by_hand):
        declared(mesh)
        await until(lambda: lines(caplog))
        await once(mesh, "late", runs=by_hand)
    assert len(lines(caplog)) == 1


async def test_a_server_that_is_away_is_asked_again(
    proxy: FaultProxy, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_factory, "RETRY_AFTER", 0.05)
    mesh = worqr.Mesh(proxy.url, prefix=prefix)
    async with mesh.join():
        held = proxy.hold(sent_as("start_work"))
        with impatient(mesh):
            runs = declared(mesh)
            await until(lambda: lines(caplog))
        assert "is not served" in lines(caplog)[0]
        held.release()
        await once(mesh, "late", runs=runs)
