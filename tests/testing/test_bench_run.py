"""Running until nothing waits: what runs, what is left, what is counted, and which errors are raised in the test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.support.servers import Server
from tests.testing import elsewhere
from tests.testing.conftest import NOWHERE
from worqr import testing
from worqr.ops import QueuesPage
from worqr.testing import Summary, bench_run

pytestmark = pytest.mark.one_server

ONCE = worqr.RetryPolicy(max_failures=1)
AT_ONCE = worqr.RetryPolicy(max_failures=2, min_backoff=0)
LATER = worqr.RetryPolicy(min_backoff=3600, max_backoff=3600)
"""Later than any machine takes from one run of the bench to the next."""


def failing(mesh: worqr.Mesh, **options: Any) -> worqr.Function[[str], None]:
    """A function that raises what it is told to."""
    errors: dict[str, Callable[[], Exception]] = {
        "value": lambda: ValueError("on purpose"),
        "key": lambda: KeyError("on purpose"),
        "failure": lambda: worqr.Failure("never"),
        "undecodable": lambda: worqr.Undecodable("no sense in it"),
        "later": lambda: worqr.Retry("not yet", delay=60),
        "uncounted": lambda: worqr.Retry("not yet", delay=60, counted=False),
        "both": lambda: ExceptionGroup("", [worqr.Retry(delay=60), worqr.Retry(delay=90)]),
        "group": lambda: ExceptionGroup("two", [ValueError(), worqr.Retry()]),
    }

    @mesh.task(name="fail", **options)
    async def fail(what: str) -> None:
        raise errors[what]()

    return fail


async def test_an_empty_mesh_is_empty(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    assert await bench.run_until_empty() == Summary(0, 0, 0, 0)
    failing(mesh)
    assert await bench.run_until_empty(scheduled=True) == Summary(0, 0, 0, 0)


async def test_everything_runs_also_what_handlers_enqueue(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="down")
    async def down(n: int) -> None:
        seen.append(n)
        await trio.lowlevel.checkpoint()
        if n:
            await other.enqueue(n - 1)

    @mesh.task(name="other")
    def other(n: int) -> None:  # in a thread
        seen.append(n)
        if n:
            trio.from_thread.run(down.enqueue, n - 1)

    await down.enqueue(20)
    assert await bench.run_until_empty() == Summary(21, 0, 0, 0)
    assert seen == list(range(20, -1, -1))
    assert await bench.run_until_empty() == Summary(0, 0, 0, 0)


async def test_many_functions_call_each_other_in_one_life_of_the_peer(server: Server) -> None:
    """A peer that enters queues as work comes up is still one peer: its lifespan is entered once."""
    lived: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        lived.append("begin")
        yield
        lived.append("end")

    mesh = worqr.Mesh(NOWHERE, lifespan=lifespan)

    def declare(n: int) -> None:
        @mesh.task(name=f"step-{n}", aliases=[f"old-{n}"], result_ttl=60)
        async def step(left: int) -> None:
            lived.append(f"{n}")
            if left:
                await mesh.enqueue_many([mesh.call(f"step-{n + 1}" if left % 2 else f"old-{n + 1}", left=left - 1)])

    for n in range(50):
        declare(n)
    async with testing.bench(mesh, url=server.url) as bench:
        await mesh.enqueue_many([mesh.call("step-0", left=9)])
        assert (await bench.run_until_empty()).finished == 10
    assert lived == ["begin", *map(str, range(10)), "end"]


async def test_a_queue_that_is_used_while_one_looks_is_seen(
    bench: testing.Bench, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.queue("early").enqueue(b"T1")
    ask = mesh._client.ask

    async def ask_slowly(call: Any) -> Any:
        answer = await ask(call)
        if isinstance(answer, QueuesPage) and list(answer.names) == ["early"]:
            await mesh.queue("late").enqueue(b"T2")
        return answer

    monkeypatch.setattr(mesh._client, "ask", ask_slowly)
    seen = await bench_run.inspect_queues(mesh._client)
    assert {name: each.waiting for name, each in seen.items()} == {"early": 1, "late": 1}


async def test_a_failure_handler_is_tried_again_in_a_later_run(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail, told = failing(mesh), list[int]()

    @fail.on_failure
    async def tell(failed: worqr.Failed) -> None:
        told.append(worqr.current().attempt)
        if len(told) == 1:
            raise RuntimeError("the mail server is down")

    await fail.enqueue("failure")
    await bench.run_until_empty(raise_errors=False)
    await bench.advance(60)
    assert await bench.run_until_empty() == Summary(0, 0, 0, 0)
    assert told == [1, 2]


async def test_one_at_a_time_runs_in_order(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="note")
    async def note(n: int) -> None:
        await trio.sleep(0.01 if n == 0 else 0)
        seen.append(n)

    await mesh.enqueue_many(note.call(n) for n in range(20))
    await bench.run_until_empty(concurrency=1)
    assert seen == list(range(20))


async def test_some_functions_alone_can_run(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh)

    @mesh.task(name="shop.fine")
    async def fine() -> None: ...

    await mesh.enqueue_many([fail.call("value"), fine.call()])
    assert await bench.run_until_empty(only=["shop.*"]) == Summary(1, 0, 0, 0)
    assert await fail.queue.count() == 1
    with pytest.raises(worqr.UsageError, match="only"):
        await bench.run_until_empty(only=["nothing.*"])


async def test_options_are_checked_also_if_there_is_nothing_to_run(bench: testing.Bench) -> None:
    wrong: dict[str, Any] = {"schedule": True}
    with pytest.raises(worqr.UsageError, match="did you mean 'scheduled'"):
        await bench.run_until_empty(**wrong)
    with pytest.raises(worqr.UsageError, match="concurrency"):
        await bench.run_until_empty(concurrency=0)


async def test_nothing_runs_by_itself(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh)
    await fail.enqueue("value")
    await bench.advance(0)
    assert (await fail.queue.info()).waiting == 1
    assert (await fail.queue.info()).workers == 0
    with pytest.raises(ValueError, match="on purpose"):
        await bench.run_until_empty()
    assert (await fail.queue.info()).workers == 0


async def test_the_lifespan_is_around_each_run(server: Server) -> None:
    lived: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[str]:
        lived.append("begin")
        yield "pool"
        lived.append("end")

    mesh = worqr.Mesh(NOWHERE, lifespan=lifespan)

    @mesh.task(name="look")
    async def look() -> None:
        lived.append(worqr.current().state)

    async with testing.bench(mesh, url=server.url) as bench:
        await look.enqueue()
        await bench.run_until_empty()
    assert lived == ["begin", "pool", "end"]


# Errors


async def test_the_error_itself_is_raised_with_its_traceback(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    error = ValueError("on purpose")

    @mesh.task(name="raising", retry=LATER)
    async def raising() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    await raising.enqueue()
    with pytest.raises(ValueError, match="on purpose") as caught:
        await bench.run_until_empty()
    assert caught.value is error
    assert caught.traceback[-1].frame.code.name == "raising"
    assert any(note.startswith("raised by the handler of 'raising', in attempt 1") for note in error.__notes__)
    assert await bench.run_until_empty() == Summary(0, 0, 0, 0)  # it was told once; its retry is due later


async def test_the_error_of_a_peer_of_the_test_is_raised_by_the_next_run(
    bench: testing.Bench, mesh: worqr.Mesh
) -> None:
    fail = failing(mesh, result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    async with mesh.join():
        job = await fail.dispatch("value")
        with pytest.raises(worqr.JobFailed):
            await job.result()
        with pytest.raises(ValueError, match="on purpose"):
            await bench.run_until_empty()
        assert await bench.run_until_empty() == Summary(0, 0, 0, 0)


async def test_the_error_of_a_thread_is_raised_as_it_is(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    error = ValueError("on purpose")

    @mesh.task(name="raising")
    def raising() -> None:
        raise error

    await raising.enqueue()
    with pytest.raises(ValueError, match="on purpose") as caught:
        await bench.run_until_empty()
    assert caught.value is error
    assert caught.traceback[-1].frame.code.name == "raising"


async def test_the_error_of_an_asyncio_handler_is_raised_as_it_is(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    error = ValueError("on purpose")

    @mesh.task(name="raising", runs_in="asyncio")
    async def raising() -> None:
        await asyncio.sleep(0)
        raise error

    await raising.enqueue()
    with pytest.raises(ValueError, match="on purpose") as caught:
        await bench.run_until_empty()
    assert caught.value is error


async def test_the_error_of_a_process_is_raised_by_its_name_and_text(server: Server) -> None:
    async with testing.bench(elsewhere.mesh, url=server.url) as bench:
        job = await elsewhere.divide.dispatch(6, 3)
        assert (await bench.run_until_empty()).finished == 1
        assert await job.result() == 2
        await elsewhere.divide.enqueue(1, 0)
        with pytest.raises(Exception, match="ZeroDivisionError: division by zero") as caught:
            await bench.run_until_empty()
    (note,) = caught.value.__notes__
    assert "return a / b" in note
    assert "attempt 1" in note


async def test_what_a_process_enqueues_reaches_the_server_of_the_test_and_no_other(server: Server) -> None:
    async with testing.bench(elsewhere.mesh, url=server.url) as bench:
        await elsewhere.divide_later.enqueue(6, 3)
        assert (await bench.run_until_empty()).finished == 2


async def test_an_assertion_in_a_handler_fails_the_test(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="wrong")
    async def wrong(n: int) -> None:
        assert n == 4

    await wrong.enqueue(5)
    with pytest.raises(AssertionError, match="5 == 4"):
        await bench.run_until_empty()


async def test_several_errors_are_a_group_and_the_others_have_run(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail, seen = failing(mesh), list[int]()

    @mesh.task(name="fine")
    async def fine(n: int) -> None:
        seen.append(n)

    await mesh.enqueue_many([fail.call("value"), fine.call(1), fail.call("key"), fail.call("group"), fine.call(2)])
    with pytest.raises(ExceptionGroup, match="3 runs raised") as caught:
        await bench.run_until_empty()
    assert sorted(type(error).__name__ for error in caught.value.exceptions) == [
        "ExceptionGroup",
        "KeyError",
        "ValueError",
    ]
    assert sorted(seen) == [1, 2]


@pytest.mark.parametrize("what", ["failure", "undecodable"])
async def test_giving_up_on_purpose_is_an_error_too(bench: testing.Bench, mesh: worqr.Mesh, what: str) -> None:
    fail = failing(mesh)
    await fail.enqueue(what)
    with pytest.raises((worqr.Failure, worqr.Undecodable)):
        await bench.run_until_empty()
    await fail.enqueue(what)
    assert await bench.run_until_empty(raise_errors=False) == Summary(0, 1, 0, 0)


async def test_what_cannot_be_decoded_is_an_error(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh)
    await fail.queue.enqueue(b"{]")
    with pytest.raises(worqr.Undecodable, match="fail"):
        await bench.run_until_empty()
    assert len(await fail.queue.undecodable.list()) == 1


async def test_a_result_that_cannot_be_kept_is_an_error(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="odd", result_ttl=60)
    async def odd() -> Any:
        return object()

    await odd.dispatch()
    with pytest.raises(worqr.Failure, match="cannot be kept"):
        await bench.run_until_empty()


@pytest.mark.parametrize("what", ["later", "uncounted", "both"])
async def test_retry_is_no_error(bench: testing.Bench, mesh: worqr.Mesh, what: str) -> None:
    fail = failing(mesh)
    await fail.enqueue(what)
    assert await bench.run_until_empty() == Summary(0, 0, 1, 0)
    assert (await fail.queue.info()).scheduled == 1


async def test_the_last_retry_is_an_error(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh, retry=worqr.RetryPolicy(max_failures=2))
    await fail.enqueue("later")
    assert await bench.run_until_empty() == Summary(0, 0, 1, 0)
    with pytest.raises(worqr.Retry, match="not yet"):
        await bench.run_until_empty(scheduled=True)
    assert len(await fail.queue.failed.list()) == 1


async def test_an_uncounted_retry_is_never_the_last(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh, retry=ONCE)
    await fail.enqueue("uncounted")
    assert await bench.run_until_empty() == Summary(0, 0, 1, 0)


async def test_a_run_that_takes_too_long_is_an_error(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="slow", timeout=0.05, retry=LATER)
    async def slow() -> None:
        await trio.sleep_forever()

    await slow.enqueue()
    with pytest.raises(TimeoutError, match=r"longer than 0.05 s"):
        await bench.run_until_empty()


async def test_errors_are_counted_if_they_are_not_to_be_raised(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh, retry=AT_ONCE)
    await fail.enqueue("value")
    await fail.enqueue("failure")
    assert await bench.run_until_empty(raise_errors=False) == Summary(finished=0, failed=2, retried=1, cancelled=0)
    assert await bench.run_until_empty() == Summary(0, 0, 0, 0)


async def test_an_error_that_is_retried_at_once_is_told_each_time(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh, retry=AT_ONCE)
    await fail.enqueue("value")
    with pytest.raises(ExceptionGroup) as caught:
        await bench.run_until_empty()
    assert [type(error) for error in caught.value.exceptions] == [ValueError, ValueError]


async def test_failure_handlers_run_and_their_errors_are_raised(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail, told = failing(mesh), list[worqr.Failed]()

    @fail.on_failure
    async def tell(failed: worqr.Failed) -> None:
        told.append(failed)
        if fail.decode(failed.task).args == ("undecodable",):
            raise RuntimeError("of the failure handler")

    await fail.enqueue("failure")
    assert await bench.run_until_empty(raise_errors=False) == Summary(0, 1, 0, 0)
    assert [each.error.message for each in told] == ["never"]
    await fail.enqueue("undecodable")
    with pytest.raises(ExceptionGroup) as caught:
        await bench.run_until_empty()
    assert [type(error) for error in caught.value.exceptions] == [worqr.Undecodable, RuntimeError]


async def test_cancelling_it_gives_everything_back(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    begun = trio.Event()

    @mesh.task(name="hang")
    async def hang() -> None:
        begun.set()
        await trio.sleep_forever()

    await hang.enqueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.run_until_empty)
        await begun.wait()
        nursery.cancel_scope.cancel()
    info = await hang.queue.info()
    assert (info.waiting, info.running, info.workers) == (1, 0, 0)


# What is due


async def test_what_is_due_later_stays(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh, retry=LATER)
    await fail.enqueue("value")
    assert await bench.run_until_empty(raise_errors=False) == Summary(0, 0, 1, 0)
    assert await bench.run_until_empty(raise_errors=False) == Summary(0, 0, 0, 0)
    assert (await fail.queue.info()).scheduled == 1


async def test_the_clock_stands_still_while_it_runs(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    soon = failing(mesh, retry=worqr.RetryPolicy(min_backoff=0.01, max_backoff=0.01))

    @mesh.task(name="slow")
    async def slow() -> None:
        await slow.options(delay=0.01).dispatch()
        await trio.sleep(0.3)

    await mesh.enqueue_many([soon.call("value"), slow.call()])
    assert await bench.run_until_empty(raise_errors=False) == Summary(finished=1, failed=0, retried=1, cancelled=0)
    assert await bench.run_until_empty(raise_errors=False) == Summary(finished=1, failed=0, retried=1, cancelled=0)


async def test_what_is_due_now_by_the_clock_on_the_wall_runs(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="fine")
    async def fine() -> None: ...

    moment = datetime.now(UTC) + timedelta(milliseconds=5)  # another clock may be ahead by as much
    await fine.options(run_at=moment).dispatch()
    assert (await bench.run_until_empty()).finished == 1


async def test_with_due_everything_ends(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    attempts: list[int] = []

    @mesh.task(name="third", result_ttl=60)
    async def third() -> str:
        attempts.append(worqr.current().attempt)
        if len(attempts) < 3:
            raise ValueError
        return "done"

    job = await third.options(delay=3600).dispatch()
    assert await bench.run_until_empty(scheduled=True, raise_errors=False) == Summary(1, 0, 2, 0)
    assert attempts == [1, 2, 3]
    assert await job.result() == "done"


async def test_with_due_an_error_ends_the_run_at_its_first_try(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh)
    await fail.options(delay=60).dispatch("value")
    with pytest.raises(ValueError, match="on purpose"):
        await bench.run_until_empty(scheduled=True)
    assert (await fail.queue.info()).scheduled == 1
    summary = await bench.run_until_empty(scheduled=True, raise_errors=False)
    assert summary == Summary(finished=0, failed=1, retried=8, cancelled=0)


async def test_with_due_jobs_run_in_the_order_of_their_times(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="note")
    async def note(n: int) -> None:
        seen.append(n)

    for n in (3, 1, 2):
        await note.options(delay=n * 3600).dispatch(n)
    assert (await bench.run_until_empty(scheduled=True)).finished == 3
    assert seen == [1, 2, 3]


async def test_what_is_due_again_and_again_ends_with_an_error(
    bench: testing.Bench, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "MOST_STEPS", 5)

    @mesh.task(name="again")
    async def again() -> None:
        await again.options(delay=60).dispatch()

    await again.enqueue()
    with pytest.raises(worqr.UsageError, match="after 5 due times"):
        await bench.run_until_empty(scheduled=True)


# What does not count


async def test_what_nobody_serves_does_not_count(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    failing(mesh)
    await mesh.enqueue_many([mesh.call("elsewhere", n=1)])
    await mesh.queue("elsewhere").dispatch(b"T1", delay=60)
    with trio.fail_after(30):
        assert await bench.run_until_empty(scheduled=True) == Summary(0, 0, 0, 0)
    assert await mesh.queue("elsewhere").count() == 1


async def test_a_paused_queue_does_not_count(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    fail = failing(mesh)
    await fail.enqueue("value")
    await fail.options(delay=60).dispatch("value")
    await fail.queue.pause("for the test")
    with trio.fail_after(30):
        assert await bench.run_until_empty(scheduled=True) == Summary(0, 0, 0, 0)
    await fail.queue.resume()
    with pytest.raises(ValueError, match="on purpose"):
        await bench.run_until_empty()


async def test_cancelled_tasks_are_counted(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="hang")
    async def hang() -> None:
        await stop.enqueue(worqr.current().id)
        await trio.sleep_forever()

    @mesh.task(name="stop")
    async def stop(job: str) -> None:
        await hang.job(job).cancel()

    await hang.options(id="x").dispatch()
    assert await bench.run_until_empty() == Summary(finished=1, failed=0, retried=0, cancelled=1)


async def test_what_is_blocked_runs_too(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="note")
    async def note(n: int) -> None:
        seen.append(n)
        if n:
            await note.options(id="x").dispatch(n - 1)

    await note.options(id="x").dispatch(3)
    assert (await bench.run_until_empty()).finished == 4
    assert seen == [3, 2, 1, 0]


# Queues that the test serves by itself


async def test_what_other_programs_enqueue_runs_too(bench: testing.Bench, mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(name="double")
    async def double(n: int) -> None: ...

    with server.client() as client:
        client.lpush(f"{mesh.prefix}:{{double}}", b'{"n": 7}')
        client.lpush(f"{mesh.prefix}:{{elsewhere}}", b'{"n": 7}')
    assert await bench.run_until_empty() == Summary(1, 0, 0, 0)


async def test_peers_of_the_test_are_waited_for(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[bytes] = []

    async def handler(task: bytes) -> None:
        await trio.sleep(0.01)
        seen.append(task)

    queue = mesh.queue("Q1")
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler, concurrency=2))
        await queue.pause()
        await queue.enqueue(*[b"%d" % n for n in range(10)])
        await queue.dispatch(b"later", delay=60)
        await queue.resume()
        await bench.run_until_empty(scheduled=True)
        nursery.cancel_scope.cancel()
    assert sorted(seen) == sorted([*[b"%d" % n for n in range(10)], b"later"])


async def test_errors_of_peers_of_the_test_are_raised_too(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    running = trio.Event()

    async def handler(task: bytes) -> None:
        await running.wait()
        raise ValueError(task)

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler))
        await mesh.queue("Q1").enqueue(b"T1")

        @mesh.task(name="begin")
        async def begin() -> None:  # which that peer knows nothing of
            running.set()

        await begin.enqueue()
        with pytest.raises(ValueError, match="T1"):
            await bench.run_until_empty()
        nursery.cancel_scope.cancel()


async def test_the_log_says_what_it_waits_for(
    bench: testing.Bench,
    mesh: worqr.Mesh,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(bench_run, "LOG_AFTER", 0.05)
    said = trio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "1 running" in record.__dict__["reason"]:
                said.set()

    listener = Listener()
    bench_run.logger.addHandler(listener)
    request.addfinalizer(lambda: bench_run.logger.removeHandler(listener))

    @mesh.task(name="hang")
    async def hang() -> None:
        await said.wait()

    await hang.enqueue()
    with trio.fail_after(30):
        assert (await bench.run_until_empty()).finished == 1
    assert "still waiting for 'hang': 0 waiting, 1 running" in caplog.text


async def test_a_run_costs_milliseconds(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    """Far more than it takes, and far less than any wait that somebody could have put in."""

    @mesh.task(name="fine")
    async def fine() -> None: ...

    best = 60.0
    for _ in range(5):
        begun = time.perf_counter()
        await fine.enqueue()
        await bench.run_until_empty()
        best = min(best, time.perf_counter() - begun)
    assert best < 1


# Limits


@pytest.mark.parametrize("name", [None, "openai"])
async def test_the_clock_moves_until_a_rate_allows_a_start(
    bench: testing.Bench, mesh: worqr.Mesh, name: str | None
) -> None:
    seen: list[int] = []

    @mesh.task(name="rated", limit=worqr.Limit(rate=2, per=3600, name=name))
    async def rated(n: int) -> None:
        seen.append(n)

    await mesh.enqueue_many(rated.call(n) for n in range(5))
    assert (await bench.run_until_empty()).finished == 2  # the others may not start for an hour
    assert sorted(seen) == [0, 1]
    assert (await bench.run_until_empty(scheduled=True)).finished == 3
    assert sorted(seen) == [0, 1, 2, 3, 4]


async def test_a_rate_limited_task_runs_again_when_the_clock_has_moved(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="refused")
    async def refused(n: int) -> None:
        seen.append(n)
        if len(seen) == 1:
            raise worqr.RateLimited(600)

    await refused.enqueue(7)
    await bench.run_until_empty()
    assert (seen, await refused.queue.count()) == ([7], 1)
    await bench.run_until_empty(scheduled=True)
    assert seen == [7, 7]


async def test_a_concurrency_limit_keeps_nothing_from_ending(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    running: list[int] = []

    @mesh.task(name="one", limit=worqr.Limit(1))
    async def one(n: int) -> None:
        running.append(n)
        await trio.sleep(0.001)
        assert running == [n]
        running.clear()

    await mesh.enqueue_many(one.call(n) for n in range(20))
    assert (await bench.run_until_empty()).finished == 20


async def test_the_clock_moves_until_a_lane_may_start_a_job(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[tuple[str, int]] = []

    @mesh.task(name="laned", lanes=worqr.Lanes("customer", limit=worqr.Limit(rate=2, per=3600)))
    async def laned(customer: str, n: int) -> None:
        seen.append((customer, n))

    calls = [laned.call(customer, n) for n in range(3) for customer in ("a", "b")]
    await mesh.enqueue_many(calls)
    assert bench.sent(laned) == calls  # a job of a lane is one call, too
    assert (await bench.run_until_empty()).finished == 4  # one of each may not start for an hour
    assert (await bench.run_until_empty(scheduled=True)).finished == 2
    assert sorted(seen) == [(customer, n) for customer in ("a", "b") for n in range(3)]
