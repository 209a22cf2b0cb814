"""A peer in a thread: its start and its end, under asyncio and Trio and without a loop, at exits and after forks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

import worqr
from tests.peer import jobs_in_processes
from tests.support.children import Child
from tests.support.patience import PATIENCE, wait_until
from tests.support.servers import Server
from worqr.hosting.peer_thread import Phase
from worqr.peer.leader.leader import Leader

T = TypeVar("T")
NewMesh = Callable[..., worqr.Mesh[Any]]
Spawn = Callable[..., Child]

pytestmark = pytest.mark.one_server

LONG = 600
"""Seconds of a grace or a patience that nobody waits for: a test that did would fail by its timeout."""


@pytest.fixture
def new_mesh(request: pytest.FixtureRequest, prefix: str) -> Iterator[NewMesh]:
    """`new_mesh(patience=1, ...)`: a mesh on the test's server, under its prefix. No thread of ours may be left by the test.

    Its peers outlive a machine that stands still.
    """
    kind = "own_server" if "own_server" in request.fixturenames else "server"
    url = request.getfixturevalue(kind).url
    meshes: list[worqr.Mesh[Any]] = []

    def make(**settings: Any) -> worqr.Mesh[Any]:
        meshes.append(worqr.Mesh(**{"url": url, "prefix": prefix, "patience": PATIENCE, "keepalive": 60, **settings}))
        return meshes[-1]

    yield make
    for mesh in meshes:
        mesh.close()
    wait_until(lambda: not our_threads())


@pytest.fixture
def mesh(new_mesh: NewMesh) -> worqr.Mesh[Any]:
    return new_mesh()


@pytest.fixture
def held(mesh: worqr.Mesh[Any]) -> Iterator[Held]:
    held = Held(mesh)
    yield held
    for job in held.jobs:
        worqr.sync(job.cancel)


class Held:
    """A function of a mesh whose runs last until they are let go or cancelled."""

    def __init__(self, mesh: worqr.Mesh[Any]) -> None:
        self.began = threading.Event()
        self.ended: list[str] = []
        self.jobs: list[worqr.Job[int]] = []
        self._gate = threading.Event()

        @mesh.task(name="held", result_ttl=60)
        async def held(n: int) -> int:
            self.began.set()
            try:
                while not self._gate.is_set():
                    await trio.sleep(0.01)
            except trio.Cancelled:
                self.ended.append(f"cancelled: {worqr.current().cancel_reason}")
                raise
            self.ended.append("returned")
            return n

        self._function = held

    def begin(self, n: int = 1) -> worqr.Job[int]:
        """A run that has begun."""
        job = worqr.sync(self._function.dispatch, n)
        self.jobs.append(job)
        assert self.began.wait(PATIENCE)
        return job

    def let_go(self) -> None:
        self._gate.set()


def nothing() -> None: ...


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("worqr")]


def peers() -> list[str]:
    return [name for name in our_threads() if name == "worqr-peer"]


def workers(server: Server, prefix: str) -> int:
    return int(server.look.scard(f"{{{prefix}}}:Workers"))


def waiting(server: Server, prefix: str, queue: str = "held") -> int:
    return int(server.look.llen(f"{prefix}:{{{queue}}}"))


@pytest.fixture
def beside() -> Callable[..., Future[Any]]:
    """`beside(call, *args)`: in a thread of its own, which the end of a test that fails does not wait for."""

    def begin(call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    return begin


def no_lead(monkeypatch: pytest.MonkeyPatch, when: threading.Event) -> None:
    """A duty of the peer fails, which a bug would do."""

    async def lead_forever(_leader: Leader) -> None:
        while not when.is_set():
            await trio.sleep(0.01)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Leader, "lead_forever", lead_forever)


# Its life


def test_it_serves_from_start_to_stop_and_again(mesh: worqr.Mesh[Any], server: Server, prefix: str) -> None:
    names: list[str] = []

    @mesh.task(name="add", result_ttl=60)
    async def add(a: int, b: int) -> int:
        names.append(threading.current_thread().name)
        return a + b

    peer = mesh.join_in_thread()
    assert (peer.health().alive, peer.health().why, repr(peer)) == (
        False,
        "not started",
        f"<ThreadPeer of <Mesh {prefix!r}>: not started>",
    )
    peer.stop()
    ids: set[bytes] = set()
    for _ in range(2):
        assert peer.start() is peer
        assert peer.health().ready
        assert workers(server, prefix) == 1
        ids |= server.look.smembers(f"{{{prefix}}}:Workers")
        assert worqr.sync(worqr.sync(add.dispatch, 3, 4).result, PATIENCE) == 7
        peer.stop()
        assert workers(server, prefix) == 0
        assert peers() == []
        assert (peer.health().alive, peer.health().why) == (False, "stopped")
        peer.stop()
    assert set(names) == {"worqr-peer"}
    assert len(ids) == 2


def test_a_block_starts_and_stops_it(mesh: worqr.Mesh[Any], held: Held, beside: Callable[..., Future[Any]]) -> None:
    with mesh.join_in_thread(grace=LONG) as peer:
        assert peer.health().ready
        job = held.begin(5)
        beside(lambda: (wait_until(lambda: peer.health().why == "the peer is leaving"), held.let_go()))
    assert held.ended == ["returned"]
    assert worqr.sync(job.result, PATIENCE) == 5
    assert not peer.health().alive


def test_a_block_that_raises_cancels_what_runs_at_once(mesh: worqr.Mesh[Any], held: Held) -> None:
    with pytest.raises(ZeroDivisionError, match="the block's own"):
        with mesh.join_in_thread(grace=LONG):
            job = held.begin()
            raise ZeroDivisionError("the block's own")
    assert held.ended == ["cancelled: leaving"]
    assert worqr.sync(job.status).state == "waiting"


def test_to_start_it_twice_is_to_start_it_once(mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str) -> None:
    peer = mesh.join_in_thread()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: peer.start(), range(8))) == {peer}
    with peer:
        assert workers(server, prefix) == 1
        assert peers() == ["worqr-peer"]


def test_to_start_it_while_it_leaves_starts_it_again(
    mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str, beside: Callable[..., Future[Any]]
) -> None:
    peer = mesh.join_in_thread(grace=LONG).start()
    held.begin()
    stopping = beside(peer.stop)
    wait_until(lambda: peer.health().why == "the peer is leaving")
    starting = beside(peer.start)
    wait_until(lambda: starting.done() or calls_that_wait("wait_ended") == 2)
    assert not starting.done()
    held.let_go()
    stopping.result(PATIENCE)
    with starting.result(PATIENCE):
        assert peer.health().ready
        assert workers(server, prefix) == 1


def test_two_peers_of_one_mesh_are_two(mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str) -> None:
    with mesh.join_in_thread(), mesh.join_in_thread() as other:
        assert workers(server, prefix) == 2
        other.stop()
        assert workers(server, prefix) == 1


def test_stopping_drains_for_as_long_as_it_may(mesh: worqr.Mesh[Any], held: Held) -> None:
    peer = mesh.join_in_thread(grace=LONG).start()
    job = held.begin()
    peer.stop(0.2)
    assert held.ended == ["cancelled: leaving"]
    assert worqr.sync(job.status).state == "waiting"


def test_the_least_patient_of_those_who_stop_it_wins(
    mesh: worqr.Mesh[Any], held: Held, beside: Callable[..., Future[Any]]
) -> None:
    peer = mesh.join_in_thread().start()
    held.begin()
    patient = [beside(peer.stop, LONG) for _ in range(3)]
    wait_until(lambda: peer.health().why == "the peer is leaving")
    assert held.ended == []
    peer.stop(0)
    for each in patient:
        each.result(PATIENCE)
    assert held.ended == ["cancelled: leaving"]


def test_word_that_it_has_heeded_already_changes_nothing(
    mesh: worqr.Mesh[Any], held: Held, beside: Callable[..., Future[Any]]
) -> None:
    peer = mesh.join_in_thread(grace=LONG).start()
    held.begin()
    patient = beside(peer.stop)
    wait_until(lambda: peer.health().why == "the peer is leaving")
    thread: Any = peer._thread
    for _ in range(3):  # several that stop it may be heard of before the first of their words arrives
        trio.from_thread.run_sync(thread._apply_stop, trio_token=thread._token)
    peer.stop(0)
    patient.result(PATIENCE)
    assert held.ended == ["cancelled: leaving"]


def test_its_thread_goes_through_its_phases(
    mesh: worqr.Mesh[Any], held: Held, beside: Callable[..., Future[Any]]
) -> None:
    peer = mesh.join_in_thread(grace=LONG).start()
    held.begin()
    thread: Any = peer._thread
    assert thread.phase is Phase.JOINED
    patient = beside(peer.stop)
    wait_until(lambda: thread.phase is Phase.DRAINING)
    peer.stop(0)
    patient.result(PATIENCE)
    assert thread.phase is Phase.ENDED


def test_a_handler_on_its_loop_cannot_stop_it(mesh: worqr.Mesh[Any]) -> None:
    peer = mesh.join_in_thread()

    @mesh.task(name="stopper", result_ttl=60)
    async def stopper() -> str:
        try:
            peer.stop()
        except worqr.UsageError as error:
            return str(error)
        return "stopped"

    with peer:
        assert "wait for its own end" in worqr.sync(worqr.sync(stopper.dispatch).result, PATIENCE)


def test_it_tells_how_it_stands_whenever_it_is_asked(mesh: worqr.Mesh[Any], held: Held) -> None:
    peer = mesh.join_in_thread()
    over = threading.Event()
    seen = ["not asked yet"]

    def look() -> None:
        while not over.is_set():
            health = peer.health()
            seen.append(health.why)
            assert health.alive or health.why in {"not started", "stopped"}

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(3):
            with peer:
                wait_until(lambda: seen[-1] == "")
            wait_until(lambda: seen[-1] == "stopped")
        over.set()
        looking.result(PATIENCE)


# What can go wrong


class RaisesAlways(logging.Handler):
    """A handler of an application whose service is down."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the service is down")


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All lines of worqr, from DEBUG on, go to a handler that raises."""
    handler, log = RaisesAlways(), logging.getLogger("worqr")
    monkeypatch.setattr(log, "level", logging.DEBUG)
    log.addHandler(handler)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    yield
    log.removeHandler(handler)
    log.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.leaves("{fails}:*", "{late}:*")
def test_a_log_handler_that_raises_takes_no_slot_and_ends_no_duty(mesh: worqr.Mesh[Any], down: None) -> None:
    once = {"retry": worqr.RetryPolicy(max_failures=1, max_timeouts=1), "result_ttl": 60}

    @mesh.task(name="fails", **once)
    def fails() -> None:
        raise ValueError("x")

    @mesh.task(name="late", timeout=0.1, **once)
    async def late() -> None:
        await trio.sleep(LONG)

    @mesh.task(name="retried", result_ttl=60)
    async def retried() -> int:
        if worqr.current().attempt == 1:
            raise worqr.Retry(delay=0)
        return 7

    with mesh.join_in_thread(concurrency=2) as peer:
        for _ in range(3):
            for function in (fails, late):
                with pytest.raises(worqr.JobFailed):
                    worqr.sync(worqr.sync(function.dispatch).result, PATIENCE)
            assert worqr.sync(worqr.sync(retried.dispatch).result, PATIENCE) == 7
        wait_until(lambda: peer.health().running == 0)
        assert peer.health().ready


def always(error: BaseException) -> Callable[..., Any]:
    def raises(*_args: object, **_options: object) -> Any:
        raise error

    return raises


async def calls_none(_context: worqr.Context, _call_next: Any) -> object:
    return None


async def raises_before(_context: worqr.Context, _call_next: Any) -> object:
    raise SystemExit("before")


async def raises_after(_context: worqr.Context, call_next: Any) -> object:
    await call_next()
    raise SystemExit("after")


async def calls_twice(_context: worqr.Context, call_next: Any) -> object:
    await call_next()
    return await call_next()


@contextmanager
def raises_at_its_end() -> Iterator[None]:
    yield
    raise SystemExit("at its end")


@pytest.mark.leaves("{fine}:*")
@pytest.mark.parametrize(
    "options",
    [
        *({"middleware": [each]} for each in (calls_none, raises_before, raises_after, calls_twice)),
        {"around_thread": always(SystemExit("made"))},
        {"around_thread": raises_at_its_end},
    ],
    ids=["calls none", "raises before", "raises after", "calls twice", "raises at once", "raises at its end"],
)
def test_whatever_is_around_a_handler_its_claim_is_settled(new_mesh: NewMesh, options: dict[str, Any]) -> None:
    mesh = new_mesh(**options)

    @mesh.task(name="fine", result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    def fine() -> int | None:
        return 1

    with mesh.join_in_thread(concurrency=1) as peer:
        for _ in range(3):
            job = worqr.sync(fine.dispatch)
            try:
                assert worqr.sync(job.result, PATIENCE) in {1, None}
            except worqr.JobFailed as error:
                assert "SystemExit" in str(error)
        wait_until(lambda: peer.health().running == 0)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit("x")])
def test_a_lane_function_that_raises_in_a_worker_takes_nothing(
    mesh: worqr.Mesh[Any], new_mesh: NewMesh, error: BaseException
) -> None:
    runs: list[str] = []

    @mesh.task(name="laned", lanes=worqr.Lanes(by=always(error)))
    def laned(tenant: str) -> None:
        runs.append(tenant)

    with mesh.join_in_thread(concurrency=1) as peer:
        worqr.sync(new_mesh().queue("laned").enqueue, *[b'{"tenant": "acme"}'] * 3)
        wait_until(lambda: len(runs) == 3)
        wait_until(lambda: peer.health().running == 0)


def test_wrong_options_are_refused_before_anything_starts(mesh: worqr.Mesh[Any]) -> None:
    for options in ({"graec": 1}, {"concurrency": 0}, {"grace": -1}, {"only": "held"}):
        with pytest.raises(worqr.UsageError):
            mesh.join_in_thread(**options)
    assert our_threads() == []


def test_with_nothing_to_serve_it_does_not_start(mesh: worqr.Mesh[Any]) -> None:
    peer = mesh.join_in_thread()
    with pytest.raises(worqr.UsageError, match="nothing to serve"):
        peer.start()
    with pytest.raises(worqr.UsageError, match="nothing to serve"), peer:
        pass
    assert our_threads() == []
    assert not peer.health().alive


def test_what_join_refuses_start_raises(mesh: worqr.Mesh[Any], held: Held) -> None:
    with pytest.raises(worqr.UsageError, match="other"):
        mesh.join_in_thread(only=["other"]).start()
    assert peers() == []


def test_a_server_that_is_away_is_told_after_patience(held: Held, own_server: Server, new_mesh: NewMesh) -> None:
    mesh = new_mesh(patience=0.3)
    mesh.task(name="f")(nothing)
    own_server.stop()
    peer = mesh.join_in_thread()
    for _ in range(2):
        with pytest.raises(worqr.Unavailable):
            peer.start()
        assert (peers(), peer.health().alive) == ([], False)
        assert peer.health().why.startswith("it has ended: Unavailable: ")
        peer.stop()
    own_server.start()
    mesh.patience = PATIENCE
    with peer:
        assert peer.health().ready


def test_a_server_that_refuses_us_is_told_at_once(mesh: worqr.Mesh[Any], server: Server, prefix: str) -> None:
    wrong = worqr.Mesh(server.tcp_url.replace("redis://", "redis://nobody:wrong@"), prefix=prefix, patience=LONG)
    wrong.task(name="f")(nothing)
    with pytest.raises(worqr.RefusedByServer):
        wrong.join_in_thread().start()


def calls_that_wait(name: str) -> int:
    """How many threads wait for a future in a function of this name."""
    waiting = 0
    for frame in sys._current_frames().values():
        names = [each.name for each in traceback.extract_stack(frame)]
        waiting += any(pair == (name, "result") for pair in pairwise(names))
    return waiting


def test_stopping_it_while_it_starts_ends_the_start(own_server: Server, new_mesh: NewMesh) -> None:
    mesh = new_mesh(patience=LONG)
    mesh.task(name="f")(nothing)
    own_server.stop()
    peer = mesh.join_in_thread()
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(peer.start) for _ in range(2)]
        wait_until(lambda: peer.health().why == "joining the mesh" and calls_that_wait("start") == 2)
        assert peer.health().alive
        peer.stop()  # a start that has not begun by now would start the peer anew
        for each in starting:
            with pytest.raises(worqr.UsageError, match="stopped before it had joined"):
                each.result(PATIENCE)
    assert peers() == []


def test_its_death_is_told_once(
    mesh: worqr.Mesh[Any], held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = threading.Event()
    no_lead(monkeypatch, bug)
    peer = mesh.join_in_thread().start()
    assert peer.health().ready
    bug.set()
    wait_until(lambda: not peer.health().alive)
    assert peer.health().why.startswith("it has ended: WorqrBug: ")
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [
        "peer.ended: the worker in a thread has ended by an error"
    ]
    with pytest.raises(worqr.WorqrBug):
        peer.stop()
    peer.stop()
    monkeypatch.undo()
    with peer:
        assert peer.health().ready


def test_its_death_ends_its_block_but_does_not_hide_what_the_block_raised(
    mesh: worqr.Mesh[Any], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = threading.Event()
    no_lead(monkeypatch, bug)
    with pytest.raises(worqr.WorqrBug), mesh.join_in_thread() as peer:
        bug.set()
        wait_until(lambda: not peer.health().alive)
    bug.clear()
    with pytest.raises(KeyError, match="the block's own"), mesh.join_in_thread() as peer:
        bug.set()
        wait_until(lambda: not peer.health().alive)
        raise KeyError("the block's own")


async def test_its_death_ends_an_async_block_too(
    mesh: worqr.Mesh[Any], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = threading.Event()
    no_lead(monkeypatch, bug)
    with pytest.raises(worqr.WorqrBug):
        async with mesh.join_in_thread() as peer:
            bug.set()
            while peer.health().alive:
                await trio.sleep(0.01)


# In a loop


class Gated:
    """A lifespan that lets its peer neither in nor out before it is told to."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.enter = threading.Event()
        self.leave = threading.Event()
        self.loops: list[bool] = []

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[str]:
        self.reached.set()
        await self._wait(self.enter)
        yield "state"
        with trio.CancelScope(shield=True):
            await self._wait(self.leave)

    async def _wait(self, event: threading.Event) -> None:
        while not event.is_set():
            await trio.sleep(0.01)


def gated(new_mesh: NewMesh) -> tuple[worqr.Mesh[Any], Gated]:
    lifespan = Gated()
    mesh = new_mesh(lifespan=lifespan)
    mesh.task(name="f")(nothing)
    return mesh, lifespan


def test_asyncio_goes_on_while_it_starts_and_stops(new_mesh: NewMesh) -> None:
    mesh, lifespan = gated(new_mesh)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, lifespan.enter.set)
        async with mesh.join_in_thread() as peer:
            assert peer.health().ready
            assert mesh.state == "state"
            asyncio.get_running_loop().call_later(0.05, lifespan.leave.set)
        assert peers() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def test_trio_goes_on_while_it_starts_and_stops(new_mesh: NewMesh) -> None:
    mesh, lifespan = gated(new_mesh)

    async def soon(event: threading.Event) -> None:
        await trio.sleep(0.05)
        event.set()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(soon, lifespan.enter)
            async with mesh.join_in_thread() as peer:
                assert peer.health().ready
                nursery.start_soon(soon, lifespan.leave)
            assert peers() == []


def test_a_cancelled_entry_under_asyncio_leaves_nothing_behind(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh, lifespan = gated(new_mesh)
    peer = mesh.join_in_thread()

    async def enter() -> None:
        async with peer:
            raise AssertionError("it never enters")

    async def main() -> None:
        task = asyncio.create_task(enter())
        while not lifespan.reached.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peers() == []
        assert peer.health().why == "stopped"
        task = asyncio.create_task(enter())  # cancelled before it began to wait, too
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peers() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert workers(server, prefix) == 0


async def test_a_cancelled_entry_under_trio_leaves_nothing_behind(
    new_mesh: NewMesh, server: Server, prefix: str
) -> None:
    mesh, lifespan = gated(new_mesh)
    peer = mesh.join_in_thread()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            async def enter() -> None:
                async with peer:
                    raise AssertionError("it never enters")

            nursery.start_soon(enter)
            while not lifespan.reached.is_set():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert peers() == []
        with trio.CancelScope() as scope:
            scope.cancel()
            async with peer:
                raise AssertionError("it never enters")
        assert peers() == []
    assert workers(server, prefix) == 0


def test_a_cancelled_block_under_asyncio_gives_back_at_once(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def body() -> None:
            async with mesh.join_in_thread(grace=LONG):
                entered.set()
                await asyncio.sleep(LONG)

        task = asyncio.create_task(body())
        await entered.wait()
        await asyncio.to_thread(held.begin)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.ended == ["cancelled: leaving"]
        assert peers() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_cancelled_drain_under_asyncio_hurries(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        peer = mesh.join_in_thread(grace=LONG)

        async def body() -> None:
            async with peer:
                await asyncio.to_thread(held.begin)

        task = asyncio.create_task(body())
        while peer.health().why != "the peer is leaving":
            await asyncio.sleep(0.01)
        assert held.ended == []
        for _ in range(3):  # whoever cancels it again does not break it off
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.ended == ["cancelled: leaving"]
        assert peers() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def test_a_cancelled_drain_under_trio_hurries(mesh: worqr.Mesh[Any], held: Held) -> None:
    peer = mesh.join_in_thread(grace=LONG)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            async def body() -> None:
                async with peer:
                    await trio.to_thread.run_sync(held.begin)

            nursery.start_soon(body)
            while peer.health().why != "the peer is leaving":
                await trio.sleep(0.01)
            assert held.ended == []
            nursery.cancel_scope.cancel()
        assert held.ended == ["cancelled: leaving"]
        assert peers() == []


def test_a_cancellation_while_a_block_ends_by_an_error_is_not_lost(new_mesh: NewMesh) -> None:
    mesh, lifespan = gated(new_mesh)
    lifespan.enter.set()

    async def main() -> None:
        left = asyncio.Event()

        async def body() -> None:
            async with mesh.join_in_thread():
                left.set()
                raise KeyError("the block's own")

        task = asyncio.create_task(body())
        await left.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        lifespan.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peers() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# One mesh, several threads


async def test_one_mesh_serves_trio_and_threads_at_once(mesh: worqr.Mesh[Any]) -> None:
    @mesh.task(name="inner", result_ttl=60)
    async def inner(n: int) -> int:
        return n

    @mesh.task(name="awaiting", result_ttl=60)
    async def awaiting(n: int) -> int:
        return await (await inner.dispatch(n)).result(PATIENCE)

    @mesh.task(name="blocking", result_ttl=60)
    def blocking(n: int) -> int:
        return worqr.sync(worqr.sync(inner.dispatch, n).result, PATIENCE)

    def produce(n: int) -> int:
        return worqr.sync(worqr.sync((awaiting if n % 2 else blocking).dispatch, n).result, PATIENCE)

    async def work(n: int) -> int:
        job = await (awaiting if n % 2 else blocking).dispatch(n)
        return await job.result(PATIENCE)

    with trio.fail_after(PATIENCE):
        async with mesh.join_in_thread(), mesh.connect():
            answers: list[int] = []

            async def one(n: int) -> None:
                answers.append(await work(n))
                answers.append(await trio.to_thread.run_sync(produce, n))

            async with trio.open_nursery() as nursery:
                for n in range(16):
                    nursery.start_soon(one, n)
            assert sorted(answers) == sorted([*range(16), *range(16)])


def test_handlers_run_where_they_say(new_mesh: NewMesh, held: Held) -> None:
    where: dict[str, str] = {}
    mesh = new_mesh()

    def note(name: str) -> int:
        where[name] = threading.current_thread().name
        return 1

    @mesh.task(name="loop", result_ttl=60)
    async def loop() -> int:
        await trio.lowlevel.checkpoint()
        return note("loop")

    @mesh.task(name="aio", result_ttl=60, runs_in="asyncio")
    async def aio() -> int:
        await asyncio.sleep(0)
        return note("asyncio")

    @mesh.task(name="thread", result_ttl=60)
    def thread() -> int:
        return note("thread")

    with mesh.join_in_thread():
        assert [worqr.sync(worqr.sync(each.dispatch).result, PATIENCE) for each in (loop, aio, thread)] == [1, 1, 1]
    assert (where["loop"], where["asyncio"]) == ("worqr-peer", "worqr asyncio")
    assert where["thread"] not in {"worqr-peer", "worqr asyncio", threading.main_thread().name}


def test_processes_are_started_from_it_too(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jobs_in_processes.mesh
    for name, value in (("url", server.url), ("prefix", prefix)):
        monkeypatch.setattr(mesh, name, value)
    with mesh.join_in_thread(processes=1):
        bill = jobs_in_processes.Bill([Decimal(100)])
        job = worqr.sync(jobs_in_processes.tax.dispatch, bill, owner=os.getpid())
        assert worqr.sync(job.result, PATIENCE) == 19
    mesh.close()


def test_lifespan_and_state_are_those_of_its_loop(new_mesh: NewMesh) -> None:
    threads: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[str]:
        threads.append(threading.current_thread().name)
        yield "a pool"
        threads.append(threading.current_thread().name)

    mesh = new_mesh(lifespan=lifespan)

    @mesh.task(name="f", result_ttl=60)
    async def f() -> list[str]:
        return [mesh.state, worqr.current().state]

    with mesh.join_in_thread():
        assert worqr.sync(worqr.sync(f.dispatch).result, PATIENCE) == ["a pool", "a pool"]
        assert mesh.state == "a pool"
    assert threads == ["worqr-peer", "worqr-peer"]
    with pytest.raises(worqr.UsageError):
        _ = mesh.state


def test_the_signals_stay_the_applications(mesh: worqr.Mesh[Any], held: Held) -> None:
    numbers = sorted(signal.valid_signals())
    before = [signal.getsignal(number) for number in numbers]
    with mesh.join_in_thread():
        assert [signal.getsignal(number) for number in numbers] == before


# The end of a program

PROGRAM = """
    import atexit, os, signal, sys, threading, time
    import trio
    import worqr
    from worqr.hosting import peer_thread

    short, peer_thread.EXIT_PATIENCE = peer_thread.EXIT_PATIENCE, 40.0  # the machine may stand still
    mesh = worqr.Mesh(os.environ["URL"], prefix=os.environ["PREFIX"], patience=30, keepalive=60)
    began = threading.Event()


    @mesh.task(name="held")
    async def held(n: int) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            print("cleaned up", flush=True)


    def begin(peer=None):
        peer = (peer or mesh.join_in_thread(grace=600)).start()
        worqr.sync(held.enqueue, 1)
        began.wait()
        print("runs", flush=True)
        return peer

"""


@pytest.fixture
def program(spawn: Spawn, server: Server, prefix: str) -> Callable[[str], Child]:
    """`program(code)`: as a process, after PROGRAM."""
    return lambda code: spawn(PROGRAM + code, env={"URL": server.url, "PREFIX": prefix})


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('the end')", 1),
        ("print('waits', flush=True); time.sleep(600)", -signal.SIGINT),
        ("threading.Thread(target=lambda: time.sleep(1)).start()", 0),
        ("atexit.register(peer.stop)", 0),
    ],
    ids=["returns", "exits", "raises", "ctrl-c", "other-threads", "atexit"],
)
async def test_it_leaves_when_the_program_ends(
    program: Callable[[str], Child], server: Server, prefix: str, end: str, code: int
) -> None:
    child = program(f"    peer = begin()\n    {end}\n")
    await child.line_with("runs")
    if "waits" in end:
        await child.line_with("waits")
        child.signal(signal.SIGINT)
    assert await child.line_with("cleaned up")
    assert await child.ended() == code
    assert "stuck" not in child.errors
    assert workers(server, prefix) == 0
    assert waiting(server, prefix) == 1


async def test_it_leaves_when_a_forked_process_of_multiprocessing_ends(
    program: Callable[[str], Child], server: Server, prefix: str
) -> None:
    child = program("""
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    process.join()
    print("joined", process.exitcode, flush=True)
    """)
    await child.line_with("cleaned up")
    assert await child.line_with("joined") == "joined 0"
    assert workers(server, prefix) == 0
    assert waiting(server, prefix) == 1


STUBBORN = {
    "on_the_loop": "with trio.CancelScope(shield=True): await trio.sleep_forever()",
    "on_asyncio": "await anyhow()",
    "blocking": "time.sleep(600)",
    "in_a_thread": "time.sleep(600)",
}


@pytest.mark.leaves("{*}:job:*", "{*}:twins:*")  # the stalls are counted
async def test_what_does_not_end_does_not_hold_up_the_exit(
    program: Callable[[str], Child], server: Server, prefix: str
) -> None:
    children = [
        program(f"""
    import asyncio
    peer_thread.EXIT_PATIENCE, mesh.keepalive = short, 3
    stubbornly = threading.Event()

    async def anyhow():
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

    @mesh.task(name="{name}", **{{"runs_in": "asyncio"}} if "{name}" == "on_asyncio" else {{}})
    {"" if name == "in_a_thread" else "async "}def stubborn() -> None:
        stubbornly.set()
        {code}

    peer = mesh.join_in_thread(grace=600, only=["{name}"]).start()
    worqr.sync(stubborn.enqueue)
    stubbornly.wait()
    """)
        for name, code in STUBBORN.items()
    ]
    for child in children:
        assert await child.ended() == 0, child.errors
    await trio.to_thread.run_sync(sweep, server, prefix)


def sweep(server: Server, prefix: str) -> None:
    """Until the others have given back what a dead worker held."""
    mesh = worqr.Mesh(server.url, prefix=prefix)
    mesh.task(name="sweeper")(nothing)
    with mesh.join_in_thread():
        wait_until(lambda: [waiting(server, prefix, name) for name in STUBBORN] == [1] * len(STUBBORN))
        wait_until(lambda: workers(server, prefix) == 1)
    mesh.close()


@pytest.mark.parametrize("before", ["pass", "mesh.join_in_thread().start()"], ids=["first", "again"])
async def test_it_does_not_start_when_all_is_over(program: Callable[[str], Child], before: str) -> None:
    child = program(f"""
    def late():
        peer = mesh.join_in_thread()
        try:
            peer.start()
        except worqr.UsageError as error:
            print(error, peer.health().alive, flush=True)

    atexit.register(late)
    {before}
    """)
    assert await child.line_with("exiting") == "the interpreter is exiting: no peer can start False"
    assert await child.ended() == 0


async def test_it_leaves_before_the_exit_waits_for_work_that_it_has_given_to_a_pool(
    program: Callable[[str], Child],
) -> None:
    child = program("""
    import asyncio

    @mesh.task(name="waits", runs_in="asyncio")
    async def waits() -> None:
        gate = threading.Event()
        try:
            began.set()
            await asyncio.to_thread(gate.wait)
        finally:
            gate.set()

    mesh.join_in_thread(grace=600).start()
    worqr.sync(waits.enqueue)
    began.wait()
    """)
    assert await child.ended() == 0, child.errors
    assert "stuck" not in child.errors


INTERRUPTED = """
    def tell():
        while peer.health().why not in ("the peer is leaving", "joining the mesh"):
            time.sleep(0.01)
        time.sleep(0.2)
        print("waits", flush=True)

    threading.Thread(target=tell).start()
    try:
        {waits}
    except KeyboardInterrupt:
        while peer.health().alive:
            time.sleep(0.01)
        print("left", flush=True)
"""


@pytest.mark.parametrize("while_it", ["drains", "starts"])
async def test_ctrl_c_while_it_waits(
    program: Callable[[str], Child], server: Server, prefix: str, while_it: str
) -> None:
    if while_it == "drains":
        child = program("    peer = begin()" + INTERRUPTED.format(waits="peer.stop()"))
    else:
        child = program(
            """
    mesh = worqr.Mesh("redis://127.0.0.1:1", patience=600)
    mesh.task(name="f")(lambda: None)
    peer = mesh.join_in_thread()"""
            + INTERRUPTED.format(waits="peer.start()")
        )
    await child.line_with("waits")
    child.signal(signal.SIGINT)
    assert await child.line_with("left")
    assert await child.ended() == 0
    if while_it == "drains":
        assert workers(server, prefix) == 0
        assert waiting(server, prefix) == 1


# Forks


async def test_a_forked_child_begins_without_it_and_starts_its_own(
    program: Callable[[str], Child], server: Server, prefix: str
) -> None:
    child = program("""
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork beside threads
    @mesh.task(name="pid", result_ttl=60)
    async def pid() -> int:
        return os.getpid()

    peer = mesh.join_in_thread().start()
    assert worqr.sync(worqr.sync(pid.dispatch).result, 30) == os.getpid()
    parent = os.getpid()
    forked = os.fork()
    if not forked:
        health = peer.health()
        print(health.alive, health.why, flush=True)
        peer.stop()
        with peer:
            assert peer.health().ready
            print("two", len(worqr.sync(mesh.queue("pid").info).counts) > 0, flush=True)
            pids = set()
            while pids != {os.getpid(), parent}:
                pids.add(worqr.sync(worqr.sync(pid.dispatch).result, 30))
            print("both", flush=True)
        peer.start()  # and leaves it to the exit
    else:
        assert os.waitpid(forked, 0)[1] == 0
        assert peer.health().ready
        assert worqr.sync(worqr.sync(pid.dispatch).result, 30) == os.getpid()
        print("parent", flush=True)
        peer.stop()
    """)
    assert "before a fork" in await child.line_with("False")
    assert await child.line_with("both")
    assert await child.line_with("parent")
    assert await child.ended() == 0, child.errors
    assert "stuck" not in child.errors  # nobody has waited for the peer of another process
    assert workers(server, prefix) == 0


# Never started


def test_one_that_is_dropped_without_a_start_is_warned_of_where_it_was_made(mesh: worqr.Mesh[Any]) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"its peer was never started, .*`with mesh\.join_in_thread\(\):`"
    ) as caught:
        mesh.join_in_thread()
    assert [warning.filename for warning in caught] == [__file__]


def test_one_that_was_started_or_could_not_be_is_not_warned_of(mesh: worqr.Mesh[Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(worqr.UsageError, match="nothing to serve"):
            mesh.join_in_thread().start()
        with pytest.raises(worqr.UsageError):
            mesh.join_in_thread(grace=-1)
        mesh.task(name="f")(nothing)
        with mesh.join_in_thread():
            pass
        gc.collect()
    assert caught == []


MAKES = """
import os
import worqr

mesh = worqr.Mesh("redis://127.0.0.1:1")
peer = mesh.join_in_thread()
"""


@pytest.mark.parametrize(
    ("code", "warned"),
    [
        (MAKES, True),
        (MAKES + "peer.stop()\n", True),
        ("def make():\n    import worqr\n    return worqr.Mesh().join_in_thread()\nkept = make()\n", True),
        ("import makes\n", False),  # perhaps others that import it start it
        (MAKES + "if os.fork():\n    os.wait()\n", False),  # as is the child, perhaps
        (MAKES + "try:\n    peer.start()\nexcept worqr.UsageError:\n    pass\n", False),
    ],
    ids=["main", "stopped", "function", "imported", "forked", "started"],
)
async def test_one_that_is_left_at_the_exit(spawn: Spawn, tmp_path: Path, code: str, warned: bool) -> None:
    (tmp_path / "makes.py").write_text(MAKES)
    child = spawn(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{code}")
    assert await child.ended() == 0
    assert child.errors.count("was never started") == warned, child.errors
    assert child.errors.count("RuntimeWarning") == warned, child.errors


FORKING = """
import os, sys, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2], keepalive=60)

def away(how):
    pid = os.fork()
    if pid == 0:
        if how == "raises":
            raise ValueError("in the child")
        if how == "exits":
            sys.exit(3)
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

@mesh.task(name="thread", result_ttl=60)
def thread(how: str) -> int:
    return away(how)

@mesh.task(name="loop", result_ttl=60)
async def loop(how: str) -> int:
    return away(how)

@mesh.task(name="asyncio", result_ttl=60, runs_in="asyncio")
async def on_asyncio(how: str) -> int:
    return away(how)

if __name__ == "__main__":
    with mesh.join_in_thread(concurrency=1):
        for function in (thread, loop, on_asyncio):
            jobs = [worqr.sync(function.dispatch, how) for how in ("returns", "raises", "exits")]
            print([worqr.sync(job.result, 60) for job in jobs], flush=True)
    print("left", flush=True)
"""


async def test_a_fork_that_comes_out_of_its_handler_ends(server: Server, prefix: str, spawn: Spawn) -> None:
    child = spawn(FORKING, server.url, prefix, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    for _ in range(3):
        assert await child.line(PATIENCE) == "[0, 1, 3]", child.errors
    assert await child.line(PATIENCE) == "left"
    assert await child.ended(PATIENCE) == 0
    said = "worqr: a fork of a handler ended by an error: ValueError: in the child"
    lines = [line for line in child.errors.splitlines() if "heartbeat.late" not in line]  # if the machine stands still
    assert lines == [said] * 3
