"""Benches for tests on asyncio, and for tests without an event loop: the same bench, in a thread of its own."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import anyio
import pytest
import trio

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.testing.conftest import NOWHERE
from worqr import testing
from worqr.testing.benches import Bench, BenchThread

T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

pytestmark = pytest.mark.one_server


@pytest.fixture(autouse=True)
def clean(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benches are on the server of the tests. No key and no thread is left behind."""
    monkeypatch.setenv("WORQR_TEST_URL", server.url)
    yield
    with server.client() as client:
        assert [key for key in client.scan_iter(count=1000) if b"bench" in key] == []
    deadline = time.monotonic() + PATIENCE
    while left := [each.name for each in threading.enumerate() if each.name.startswith("worqr")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.005)


class Shop:
    """An application on asyncio, with one function on Trio, one in threads."""

    def __init__(self) -> None:
        self.mesh = mesh = worqr.Mesh(NOWHERE, runs_in="asyncio")
        self.tidied = 0

        @mesh.task(name="report", result_ttl=3600)
        async def report(customer: int) -> str:
            await asyncio.sleep(0)
            await note.enqueue(customer)
            return f"/reports/{customer}.pdf"

        @mesh.task(name="note")
        def note(customer: int) -> None: ...

        @mesh.task(name="nap", runs_in="loop")
        async def nap() -> None:
            await trio.sleep(0.001)

        @mesh.task(name="fail", retry=worqr.RetryPolicy(min_backoff=3600, max_backoff=3600))
        async def fail(text: str) -> None:
            raise ValueError(text)

        @mesh.cron("0 3 * * *")
        @mesh.task(name="tidy")
        async def tidy() -> None:
            self.tidied += 1

        self.report, self.note, self.nap, self.fail = report, note, nap, fail


@pytest.fixture
def shop() -> Shop:
    return Shop()


RUNS: dict[str, Run] = {
    "asyncio": lambda main: asyncio.run(main()),
    "asyncio, debug": lambda main: asyncio.run(main(), debug=True),
    "anyio": lambda main: anyio.run(main, backend="asyncio"),
    "Trio": lambda main: trio.run(main),
    "sync": worqr.sync,
}


@pytest.fixture(params=RUNS.values(), ids=list(RUNS))
def run(request: pytest.FixtureRequest) -> Run:
    """The same test on each loop, and without one."""
    found: Run = request.param
    return found


# On asyncio, on Trio, and without a loop


def test_what_was_sent_runs(run: Run, shop: Shop) -> None:
    async def main() -> None:
        async with testing.bench(shop.mesh) as bench:
            assert isinstance(bench, Bench)
            job = await shop.report.dispatch(7)
            await shop.nap.enqueue()
            assert await bench.run_until_empty() == testing.Summary(finished=3, failed=0, retried=0, cancelled=0)
            assert await job.result() == "/reports/7.pdf"
            assert bench.sent(shop.report) == [shop.report.call(7)]
            assert bench.sent("note") == [shop.note.call(7)]

    run(main)
    assert (shop.mesh.url, shop.mesh.prefix) == (NOWHERE, "worqr")


def test_the_clock_is_moved(run: Run, shop: Shop) -> None:
    async def main() -> None:
        async with testing.bench(shop.mesh, now=datetime(2026, 3, 28, 12, tzinfo=UTC)) as bench:
            await shop.note.options(delay=timedelta(hours=2)).dispatch(1)
            assert (await bench.run_until_empty()).finished == 0
            await bench.advance(timedelta(hours=14))
            assert (await bench.run_until_empty()).finished == 1
            await bench.advance(3600)
            assert (await bench.run_until_empty()).finished == 1
            assert shop.tidied == 1
            await shop.note.options(delay=60).dispatch(2)
            assert (await bench.run_until_empty(scheduled=True)).finished == 1

    run(main)


def test_errors_of_handlers_are_raised_in_the_test(run: Run, shop: Shop) -> None:
    async def main() -> None:
        async with testing.bench(shop.mesh) as bench:
            await shop.fail.enqueue("the first")
            with pytest.raises(ValueError, match="the first") as caught:
                await bench.run_until_empty()
            assert "raised by the handler of 'fail', in attempt 1" in caught.value.__notes__[0]
            await shop.fail.enqueue("the second")
            summary = await bench.run_until_empty(raise_errors=False, only=["fail"])
            assert (summary.finished, summary.retried) == (0, 1)

    run(main)


def test_a_test_that_fails_leaves_the_mesh_as_it_was(run: Run, shop: Shop) -> None:
    before = vars(shop.mesh).copy()

    async def main() -> None:
        async with testing.bench(shop.mesh):
            await shop.note.enqueue(1)
            raise AssertionError("the test's own")

    with pytest.raises(AssertionError, match="the test's own"):
        run(main)
    assert vars(shop.mesh) == before


def test_the_application_may_connect_and_join_as_it_does(shop: Shop) -> None:
    async def main() -> None:
        async with testing.bench(shop.mesh), shop.mesh.connect(), shop.mesh.join_in_thread(only=["report"]):
            job = await shop.report.dispatch(7)
            assert await job.result(PATIENCE) == "/reports/7.pdf"

    asyncio.run(main())


def test_handlers_see_the_context_variables_of_the_test(run: Run, shop: Shop) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")
    seen: list[str] = []

    @shop.mesh.task(name="look")
    async def look() -> None:
        seen.append(variable.get())

    async def main() -> None:
        async with testing.bench(shop.mesh) as bench:
            await look.enqueue()
            variable.set("of the test")
            await bench.run_until_empty()

    run(main)
    assert seen == ["of the test"]


def test_a_cancelled_run_gives_its_tasks_back(shop: Shop) -> None:
    begun = threading.Event()

    @shop.mesh.task(name="hold")
    async def hold() -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def main() -> None:
        async with testing.bench(shop.mesh) as bench:
            await hold.enqueue()
            running = asyncio.ensure_future(bench.run_until_empty())
            while not begun.is_set():
                await asyncio.sleep(0.005)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await hold.queue.count() == 1

    asyncio.run(main())


def test_a_bench_that_cannot_begin_says_why(shop: Shop) -> None:
    async def main() -> None:
        async with shop.mesh.connect():
            with pytest.raises(worqr.UsageError, match="before anything connects it"):
                async with testing.bench(shop.mesh):
                    raise AssertionError("not reached")
        with pytest.raises(worqr.UsageError, match="now of bench"):
            async with testing.bench(shop.mesh, now=datetime(2026, 1, 1)):
                raise AssertionError("not reached")

    shop.mesh.url = "embedded:"
    asyncio.run(main())


def test_a_test_that_is_cancelled_while_the_bench_begins_leaves_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = BenchThread.start, threading.Event()

    def slow(thread: BenchThread) -> None:
        begun.set()
        time.sleep(0.05)
        start(thread)

    monkeypatch.setattr(BenchThread, "start", slow)

    async def enter() -> None:
        async with testing.bench(shop.mesh):
            raise AssertionError("not reached")

    async def main() -> None:
        entering = asyncio.ensure_future(enter())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert shop.mesh.prefix == "worqr"

    asyncio.run(main())


# Without a loop


def test_ctrl_c_cancels_what_runs(shop: Shop) -> None:
    begun = threading.Event()

    @shop.mesh.task(name="hold")
    async def hold() -> None:
        begun.set()
        await asyncio.sleep(3600)

    def interrupt() -> None:
        begun.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with worqr.sync_block(testing.bench, shop.mesh) as bench:
        worqr.sync(hold.enqueue)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            worqr.sync(bench.run_until_empty)
        thread.join()
        assert worqr.sync(shop.mesh.queue("hold").info).waiting == 1


def test_a_bench_that_has_ended_says_so(shop: Shop) -> None:
    with worqr.sync_block(testing.bench, shop.mesh) as bench:
        pass
    with pytest.raises(worqr.UsageError, match="this bench has ended"):
        worqr.sync(bench.advance, 1)


# Where each belongs


def test_bench_needs_a_loop(shop: Shop) -> None:
    with pytest.raises(
        worqr.UsageError, match=r"in a plain test write `with worqr\.sync_block\(testing\.bench, mesh\)"
    ):
        testing.bench(shop.mesh)


@pytest.mark.parametrize("loop", ["asyncio", "Trio"])
def test_a_bench_without_a_loop_refuses_to_block_one(shop: Shop, loop: str) -> None:
    async def main() -> None:
        with pytest.raises(worqr.UsageError, match=rf"would stop the {loop} loop .*`async with bench\(\.\.\.\)`"):
            with worqr.sync_block(testing.bench, shop.mesh):
                raise AssertionError("not reached")

    RUNS[loop](main)
    assert shop.mesh.prefix == "worqr"
