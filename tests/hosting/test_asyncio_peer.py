"""A peer in an asyncio program: `async with mesh.join():`, with handlers on the loop of the program."""

# The private fields of Mesh are hidden from users, not from its tests.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import trio

import worqr
from tests.client.test_asyncio import RUNS, Run, bounded, come, ends_by_cancelling
from tests.hosting.test_thread_peer import NewMesh, mesh, new_mesh, our_threads, waiting, workers  # noqa: F401 - fixtures
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.peer.executors import asyncio_loop
from worqr.peer.run import current_run

LONG = 600
"""Seconds of a grace that nobody waits for: a test that did would fail by its timeout."""

pytestmark = pytest.mark.one_server


@pytest.fixture(
    params=[run for name, run in RUNS.items() if name != "trio"], ids=[name for name in RUNS if name != "trio"]
)
def run(request: pytest.FixtureRequest) -> Run:
    """`run(main)`: run an async function by one of the loops of asyncio."""
    found: Run = request.param
    return found


class Held:
    """A function whose runs last until `go` is called, or until they are cancelled."""

    def __init__(self, mesh: worqr.Mesh[Any]) -> None:
        self.began: list[int] = []
        self.cancelled: list[str | None] = []
        self.ended: list[int] = []
        self._gates: list[asyncio.Event] = []

        @mesh.task(name="held", result_ttl=60)
        async def held(n: int) -> int:
            gate = asyncio.Event()
            self._gates.append(gate)
            self.began.append(n)
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(worqr.current().cancel_reason)
                raise
            self.ended.append(n)
            return n

        self.function = held

    async def begin(self, n: int = 1) -> worqr.Job[int]:
        """A run that has begun."""
        job = await self.function.options(id=f"held-{n}").dispatch(n)
        await come(lambda: n in self.began)
        return job

    def go(self) -> None:
        """Let those end that run on this loop."""
        while self._gates:
            self._gates.pop().set()

    def forget(self) -> None:
        """Those that have begun never go on."""
        self._gates.clear()


@pytest.fixture
def held(mesh: worqr.Mesh[Any]) -> Iterator[Held]:
    held = Held(mesh)
    yield held
    for n in set(held.began):
        worqr.sync(held.function.job(f"held-{n}").cancel)


# Where handlers run


def test_handlers_run_on_the_loop_of_the_program(run: Run, mesh: worqr.Mesh[Any]) -> None:
    seen: dict[str, object] = {}

    def note(name: str) -> None:
        with suppress(RuntimeError):
            seen[f"{name} loop"] = asyncio.get_running_loop()
        seen[name] = threading.current_thread()

    @mesh.task(name="default", result_ttl=60)
    async def default(n: int) -> int:
        await asyncio.sleep(0)
        note("default")
        job = await plain.dispatch(n + 1)
        return await job.result(PATIENCE)

    @mesh.task(name="asyncio", runs_in="asyncio", result_ttl=60)
    async def on_asyncio() -> None:
        note("asyncio")

    @mesh.task(name="plain", result_ttl=60)
    def plain(n: int) -> int:
        note("plain")
        return n + 1

    @mesh.task(name="trio", runs_in="loop", result_ttl=60)
    async def on_trio() -> None:
        await trio.lowlevel.checkpoint()
        note("trio")

    async def main() -> None:
        async with mesh.join(grace=LONG) as peer:
            assert peer.health().ready
            assert peer.id in repr(peer)
            assert await (await default.dispatch(1)).result(PATIENCE) == 3
            for function in (on_asyncio, on_trio):
                await (await function.dispatch()).result(PATIENCE)
            here = asyncio.get_running_loop()
            assert (seen["default loop"], seen["asyncio loop"]) == (here, here)
            assert (seen["default"], seen["asyncio"]) == (threading.main_thread(), threading.main_thread())
            assert "worqr asyncio" not in our_threads()
            assert peer.health().running == 0
        assert peer.health().why == "stopped"

    run(main)
    assert getattr(seen["trio"], "name", "") == "worqr-peer"
    assert seen["plain"] not in {seen["trio"], seen["default"]}


def test_the_mesh_says_where_they_run_by_default(new_mesh: NewMesh) -> None:
    mesh = new_mesh(runs_in="loop")

    @mesh.task(name="f", result_ttl=60)
    async def f() -> str:
        await trio.lowlevel.checkpoint()
        return threading.current_thread().name

    async def main() -> str:
        async with mesh.join():
            return await (await f.dispatch()).result(PATIENCE)

    assert bounded(main) == "worqr-peer"


def test_handlers_share_what_the_program_has_opened(mesh: worqr.Mesh[Any]) -> None:
    """A future of the loop stands for a connection pool."""
    pool: list[asyncio.Future[str]] = []
    variable: ContextVar[str] = ContextVar("variable", default="of nobody")

    @mesh.task(name="use", result_ttl=60)
    async def use() -> str:
        return f"{await pool[0]}, {variable.get()}"

    async def main() -> str:
        pool.append(asyncio.get_running_loop().create_future())
        variable.set("of the program")
        async with mesh.join():
            job = await use.dispatch()
            pool[0].set_result("shared")
            return await job.result(PATIENCE)

    assert bounded(main) == "shared, of the program"


def test_lifespans(new_mesh: NewMesh) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def on_trio() -> AsyncGenerator[str]:
        await trio.lowlevel.checkpoint()
        steps.append("trio")
        yield "of Trio"
        steps.append("trio left")

    @asynccontextmanager
    async def on_asyncio() -> AsyncGenerator[tuple[str, object]]:
        await asyncio.sleep(0)
        steps.append("asyncio")
        yield "of asyncio", asyncio.get_running_loop()
        steps.append("asyncio left")

    async def state_of(mesh: worqr.Mesh[Any]) -> Any:
        seen: list[object] = []

        @mesh.task(name="f", result_ttl=60)
        async def f() -> None:
            seen.append(worqr.current().state)

        async with mesh.join():
            await (await f.dispatch()).result(PATIENCE)
            assert mesh.state == "of Trio"
        return seen[0]

    async def main() -> None:
        assert await state_of(new_mesh(lifespan=on_trio)) == "of Trio"
        both = new_mesh(lifespan=on_trio, asyncio_lifespan=on_asyncio)
        assert await state_of(both) == ("of asyncio", asyncio.get_running_loop())

    bounded(main)
    assert steps == ["trio", "trio left", "trio", "asyncio", "asyncio left", "trio left"]


# How the block ends


def test_the_block_lets_what_runs_end(run: Run, mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        async with mesh.join(grace=LONG):
            await held.begin()
            asyncio.get_running_loop().call_later(0.05, held.go)
        assert (held.ended, held.cancelled) == ([1], [])

    run(main)


def test_what_runs_after_the_grace_goes_back(mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str) -> None:
    async def main() -> None:
        async with mesh.join(grace=0):
            await held.begin()
        assert held.cancelled == ["leaving"]
        assert (waiting(server, prefix), workers(server, prefix)) == (1, 0)

    bounded(main)


def test_an_error_of_the_block_comes_out_as_it_is(
    run: Run, mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str
) -> None:
    error = KeyError("of the application")

    async def main() -> None:
        with pytest.raises(KeyError) as caught:
            async with mesh.join(grace=LONG):
                await held.begin()
                raise error
        assert caught.value is error
        assert held.cancelled == ["leaving"]
        assert (waiting(server, prefix), workers(server, prefix)) == (1, 0)

    run(main)


def test_a_task_that_is_cancelled_in_the_block_leaves(
    run: Run, mesh: worqr.Mesh[Any], held: Held, server: Server, prefix: str
) -> None:
    async def main() -> None:
        async def body() -> None:
            async with mesh.join(grace=LONG):
                await held.begin()
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(body())
        await come(lambda: held.began)
        await ends_by_cancelling(task)
        assert held.cancelled == ["leaving"]
        assert (waiting(server, prefix), workers(server, prefix)) == (1, 0)

    run(main)


def test_a_task_that_is_cancelled_while_it_leaves_hurries(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        peers: list[worqr.Peer] = []

        async def body() -> None:
            async with mesh.join(grace=LONG) as peer:
                peers.append(peer)
                await held.begin()

        task = asyncio.create_task(body())
        await come(lambda: peers and peers[0].health().why == "the peer is leaving")
        assert held.cancelled == []
        for _ in range(3):  # whoever cancels it again does not break it off
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.cancelled == ["leaving"]
        await come(lambda: not our_threads())  # one that connects ends a moment later

    bounded(main)


def test_a_task_that_is_cancelled_while_it_joins_leaves_nothing_behind(
    new_mesh: NewMesh, server: Server, prefix: str
) -> None:
    reached = threading.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        reached.set()
        await trio.sleep_forever()
        yield

    mesh = new_mesh(lifespan=lifespan)

    async def main() -> None:
        async def enter() -> None:
            async with mesh.join():
                raise AssertionError("it never enters")

        task = asyncio.create_task(enter())
        await come(reached.is_set)
        await ends_by_cancelling(task)
        await come(lambda: not our_threads())  # one that connects ends a moment later
        for turns in range(4):  # and before it has come far
            task = asyncio.create_task(enter())
            for _ in range(turns):
                await asyncio.sleep(0)
            await ends_by_cancelling(task)

    bounded(main)
    assert workers(server, prefix) == 0


def test_a_block_may_end_in_another_task_than_it_began_in(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        joined = mesh.join(grace=LONG)
        await asyncio.create_task(joined.__aenter__())
        job = await held.begin()
        held.go()
        assert await job.result(PATIENCE) == 1
        await asyncio.create_task(joined.__aexit__(None, None, None))
        assert not mesh._client.connections.any

    bounded(main)


def test_what_ends_the_peer_comes_out_of_the_block(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks())
            yield

    async def breaks() -> None:
        await come(ended.is_set)
        raise ZeroDivisionError

    mesh = new_mesh(asyncio_lifespan=lifespan, runs_in="asyncio")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with mesh.join() as peer:
                ended.set()
                await come(lambda: not peer.health().alive)
                assert "it has ended: ExceptionGroup" in peer.health().why
                with pytest.raises(worqr.UsageError, match="this peer has left"):
                    await peer.drain()
        assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
        assert "peer.ended" in caplog.text

    bounded(main)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"concurency": 3}, "concurency.*concurrency"),
        ({"concurrency": 0}, "concurrency"),
        ({"only": ["nobody"]}, "nobody"),
    ],
)
def test_wrong_options(mesh: worqr.Mesh[Any], held: Held, options: dict[str, Any], error: str) -> None:
    async def main() -> None:
        with pytest.raises(worqr.UsageError, match=error):
            async with mesh.join(**options):
                raise AssertionError("it never enters")
        await come(lambda: not our_threads())  # one that connects ends a moment later

    bounded(main)


def test_a_server_that_is_not_there(new_mesh: NewMesh) -> None:
    mesh = new_mesh(url="unix:///nowhere", patience=0.2)

    async def main() -> None:
        with pytest.raises(worqr.Unavailable):
            async with mesh.join():
                raise AssertionError("it never enters")

    bounded(main)


# The methods of the peer


def test_a_raw_queue(mesh: worqr.Mesh[Any]) -> None:
    seen: list[bytes] = []

    async def handler(task: bytes) -> None:
        await asyncio.sleep(0)
        seen.append(task)

    async def main() -> None:
        async with mesh.join() as peer:
            serving = asyncio.create_task(peer.serve("Q1", handler))
            await mesh.queue("Q1").enqueue(b"a")
            await come(lambda: seen == [b"a"])
            await ends_by_cancelling(serving)
            with pytest.raises(worqr.UsageError, match="max_length"):
                await peer.serve("Q1", handler, max_length=3)
            async with anyio.create_task_group() as group:
                await group.start(peer.serve, "Q1", handler)
                infos = {info.name: info for info in await mesh.queues()}
                assert infos["Q1"].workers == 1  # `start` returns when it is subscribed
                with pytest.raises(worqr.UsageError, match="is served"):
                    await peer.serve("Q1", handler)
                group.cancel_scope.cancel()
            serving = asyncio.create_task(peer.serve("Q1", handler))
            await mesh.queue("Q1").enqueue(b"b")
            await come(lambda: seen == [b"a", b"b"])
        await serving  # it ends with the peer

    bounded(main)


def test_drain_and_wait(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        async with mesh.join(grace=LONG) as peer:
            await held.begin()
            waiting = asyncio.create_task(peer.wait())
            hasty = asyncio.create_task(peer.drain(LONG))
            await come(lambda: peer.health().why == "the peer is leaving")
            hasty.cancel()  # which does not stop the leaving
            await asyncio.wait((hasty,))
            assert not waiting.done()
            with pytest.raises(worqr.UsageError, match="grace"):
                await peer.drain(-1)
            await peer.drain(0)
            await waiting
            assert held.cancelled == ["leaving"]

    bounded(main)


def test_concurrency(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        async with mesh.join(grace=LONG, concurrency=1) as peer:
            await held.begin(1)
            await held.function.enqueue(2)
            assert peer.health().room == 0
            with pytest.raises(worqr.UsageError, match="concurrency"):
                peer.set_concurrency(0)
            peer.set_concurrency(2)
            await come(lambda: held.began == [1, 2])
            held.go()

    bounded(main)


def test_claims_by_hand_need_trio(mesh: worqr.Mesh[Any]) -> None:
    async def main() -> None:
        async with mesh.join() as peer:
            with pytest.raises(worqr.UsageError, match=r"peer\.work\(\) needs Trio.*peer\.serve\(\)"):
                peer.work("Q1")

    bounded(main)


# Several at once


def test_two_meshes_and_two_peers_of_one(run: Run, new_mesh: NewMesh, prefix: str) -> None:
    meshes = [new_mesh(), new_mesh(prefix=f"{prefix}-other")]
    functions: list[worqr.Function[[int], int]] = []
    for each in meshes:

        @each.task(name="double", result_ttl=60)
        async def double(n: int) -> int:
            await asyncio.sleep(0)
            return 2 * n

        functions.append(double)

    async def use(n: int) -> int:
        async with meshes[n % 2].join():
            return await (await functions[n % 2].dispatch(n)).result(PATIENCE)

    async def main() -> None:
        async with meshes[0].join(), meshes[1].join() as outer, meshes[1].join() as inner:
            assert outer.id != inner.id
            assert [await use(n) for n in range(2)] == [0, 2]
            assert await asyncio.gather(*map(use, range(4))) == [0, 2, 4, 6]
        assert not any(each._client.connections.any for each in meshes)

    run(main)


def test_trio_runs_elsewhere_in_the_program(mesh: worqr.Mesh[Any], held: Held) -> None:
    """A Trio run that is a guest of the loop would refuse this: a thread has one run."""

    async def main() -> None:
        async with mesh.join():
            trio.run(trio.sleep, 0)

    bounded(main)


# What may go wrong on the loop


def test_a_loop_that_is_blocked(
    new_mesh: NewMesh,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    server: Server,
    prefix: str,
) -> None:
    """Its peer beats on, and claims nothing for it, and the log names the code."""
    monkeypatch.setattr(asyncio_loop, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(asyncio_loop, "BLOCKED_AFTER", 0.1)
    mesh = new_mesh(block_limit=0.3)
    held = Held(mesh)

    def is_named() -> bool:  # if the machine has stood still before, the log names other code
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        return any("asyncio.blocked" in text and "in block" in text for text in errors)

    def block() -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_named() and time.monotonic() < deadline:
            time.sleep(0.01)

    async def main() -> None:
        async with mesh.join(grace=LONG) as peer:
            job, worker = await held.begin(1), peer.id
            beats = peer._engine.session.registration
            assert beats is not None
            assert beats.heartbeat is not None
            asked: list[worqr.Health] = []
            left: list[int] = []

            def meanwhile() -> None:
                while not is_named():
                    time.sleep(0.01)
                worqr.sync(held.function.enqueue, 2)
                time.sleep(0.3)  # a peer that claims it has done so by then
                left.append(waiting(server, prefix))
                asked.append(peer.health())

            async with asyncio.timeout(PATIENCE):
                look = asyncio.get_running_loop().run_in_executor(None, meanwhile)
                block()
                while not asked:
                    time.sleep(0.01)
                assert left == [1]
                await look
                await come(lambda: "asyncio.turns" in caplog.text)
                await come(lambda: held.began == [1, 2])
            held.go()
            assert await job.result(PATIENCE) == 1
            assert peer.id == worker
            assert (asked[0].alive, asked[0].running) == (False, 1)
            assert asked[0].why == "the application's asyncio loop is blocked"

    bounded(main)
    assert held.began == [1, 2]


def test_a_loop_that_is_closed_inside_the_block(
    mesh: worqr.Mesh[Any],
    held: Held,
    attempts: list[int],
    server: Server,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The peer leaves, and its task is back without a failure; the next loop joins as if nothing had been."""
    kept: list[Any] = []

    async def enter() -> None:
        kept.append(mesh.join(grace=LONG))
        await kept[0].__aenter__()
        await held.begin()
        for task in asyncio.all_tasks():
            kept.append(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
        held.forget()

    async def again() -> int:
        async with mesh.join(grace=LONG):
            await come(lambda: held.began == [1, 1])
            held.go()
            return await held.function.job("held-1").result(PATIENCE)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter())
    loop.close()
    deadline = time.monotonic() + PATIENCE
    while "the asyncio loop ended inside" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (waiting(server, prefix), workers(server, prefix)) == (1, 0)
    assert bounded(again) == 1
    assert attempts == [1, 1]


def test_a_program_that_cancels_all_of_its_tasks(
    mesh: worqr.Mesh[Any],
    held: Held,
    attempts: list[int],
    server: Server,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `asyncio.run` does with what is left when it ends: no handler has failed by that."""
    monkeypatch.setattr(asyncio_loop, "LEAVE_SOON", PATIENCE)

    async def leave_behind() -> None:
        async def body() -> None:
            async with mesh.join(grace=LONG):
                await held.begin()
                await asyncio.get_running_loop().create_future()

        kept.append(asyncio.create_task(body()))
        await come(lambda: held.began)

    async def again() -> int:
        async with mesh.join(grace=LONG):
            await come(lambda: len(held.began) == 2)
            held.go()
            return await held.function.job("held-1").result(PATIENCE)

    kept: list[asyncio.Task[None]] = []
    bounded(leave_behind)
    assert kept[0].cancelled()
    assert (waiting(server, prefix), workers(server, prefix)) == (1, 0)
    assert bounded(again) == 1
    assert attempts == [1, 1]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the attempt of each run that began."""
    found: list[int] = []
    begin = asyncio_loop.AsyncioRun.begin

    def noting(run: asyncio_loop.AsyncioRun) -> None:
        found.append(run._variables[current_run].attempt)
        begin(run)

    monkeypatch.setattr(asyncio_loop.AsyncioRun, "begin", noting)
    return found


def test_a_handler_whose_task_other_code_cancels_has_failed(
    mesh: worqr.Mesh[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio_loop, "LEAVE_SOON", 0.01)

    @mesh.task(name="cancels", result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def main() -> None:
        async with mesh.join():
            job = await cancels.dispatch()
            with pytest.raises(worqr.JobFailed, match="CancelledError"):
                await job.result(PATIENCE)
            await cancels.queue.failed.drop_all()

    bounded(main)


def test_a_run_that_is_cancelled(mesh: worqr.Mesh[Any], held: Held) -> None:
    async def main() -> None:
        async with mesh.join(grace=LONG):
            job = await held.begin()
            count = await job.cancel(reason="enough", wait=PATIENCE)
            assert count.acknowledged == 1
            assert held.cancelled == ["cancel"]

    bounded(main)


# Processes and signals


CHILD = """
    import asyncio, multiprocessing, os, signal, sys, threading, time
    import trio
    import worqr

    mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2], patience=60, keepalive=60)

    @mesh.task(name="f", result_ttl=60)
    async def f(n: int) -> int:
        return n

    @mesh.task(name="held")
    async def held() -> None:
        print("begun", flush=True)
        try:
            await asyncio.sleep(3600)
        finally:
            print("cancelled", worqr.current().cancel_reason, flush=True)
"""


def child(spawn: Callable[..., Child], code: str, server: Server, prefix: str) -> Child:
    return spawn(CHILD + code, server.url, prefix)


async def test_a_forked_child_runs_what_it_likes(spawn: Callable[..., Child], server: Server, prefix: str) -> None:
    code = """
    async def join() -> None:
        async with mesh.join(only=["f"]):
            print("joined", await (await f.dispatch(2)).result(60), flush=True)

    def child(peer) -> None:
        print("peer", peer.health().alive, peer.health().why, flush=True)
        print("trio", trio.run(trio.sleep, 0), flush=True)
        worqr.sync(f.enqueue, 1)
        print("enqueued", flush=True)
        asyncio.run(join())

    async def main() -> None:
        async with mesh.join(only=["held"]) as peer:
            process = multiprocessing.get_context("fork").Process(target=child, args=(peer,))
            process.start()
            await asyncio.to_thread(process.join)
            print("code", process.exitcode, peer.health().ready, flush=True)

    asyncio.run(main())
    """
    program = child(spawn, code, server, prefix)
    assert "False it was started before a fork" in await program.line()
    assert await program.line() == "trio None"
    assert await program.line() == "enqueued"
    assert await program.line() == "joined 2"
    assert await program.line() == "code 0 True"
    assert await program.ended() == 0, program.errors


MAIN = """
    async def main() -> None:
        async with mesh.join(grace=3600):
            await held.enqueue()
            await asyncio.sleep(3600)
"""
INTERRUPTS = {
    "asyncio.run": f"{MAIN}\n    asyncio.run(main())\n",
    "a loop that knows no signals": f"{MAIN}\n    asyncio.new_event_loop().run_until_complete(main())\n",
    "a loop that is stopped outside the handler": f"""{MAIN}
    def interrupt() -> None:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    threading.Thread(target=lambda: (sys.stdin.readline(), loop.call_soon_threadsafe(interrupt)), daemon=True).start()
    loop.run_until_complete(main())
    """,
}


@pytest.mark.parametrize("code", INTERRUPTS.values(), ids=list(INTERRUPTS))
async def test_ctrl_c_ends_the_program(spawn: Callable[..., Child], server: Server, prefix: str, code: str) -> None:
    program = child(spawn, code, server, prefix)
    assert await program.line() == "begun"
    if "stdin" in code:
        program.send("")
    else:
        program.signal(signal.SIGINT)
    await program.ended()
    assert "KeyboardInterrupt" in program.errors
    assert "does not end" not in program.errors
    assert workers(server, prefix) == 0
    assert waiting(server, prefix) == 1


async def test_ctrl_c_in_a_handler_ends_the_program(spawn: Callable[..., Child], server: Server, prefix: str) -> None:
    code = """
    @mesh.task(name="interrupt")
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with mesh.join(grace=3600):
            await interrupt.enqueue()
            await asyncio.sleep(3600)

    asyncio.run(main())
    """
    program = child(spawn, code, server, prefix)
    await program.ended()
    assert "KeyboardInterrupt" in program.errors
    assert "never retrieved" not in program.errors
    assert workers(server, prefix) == 0
