"""What a run saves, and the steps that it takes: later runs of its job find them, wherever they run."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

import worqr
import worqr.testing
from tests.peer import process_jobs
from tests.peer.process_jobs import Point, resume
from tests.peer.tools import QUICK, serving, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys

if TYPE_CHECKING:
    from fractions import Fraction

    from tests.peer.conftest import NewMesh

pytestmark = pytest.mark.one_server

ASIDE = ("{Q1}:failed", "{Q1}:aside*")


async def result_of(mesh: worqr.Mesh, handler: Callable[[bytes], Any], task: bytes = b"t", **options: Any) -> Any:
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK, **options):
        job = await mesh.queue("Q1").dispatch(task, id="x", result_ttl=60)
        return await job.result(PATIENCE)


async def failure_of(mesh: worqr.Mesh, handler: Callable[[bytes], Any]) -> str:
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK):
        job = await mesh.queue("Q1").dispatch(b"t", id="x", result_ttl=60)
        with pytest.raises(worqr.JobFailed) as caught:
            await job.result(PATIENCE)
        return str(caught.value)


# Where it runs


class Resuming:
    """A handler that fails once: the second run has to find what the first one saved."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def add_one(self, n: int) -> Point:
        self.calls.append(n)
        return Point(n + 1)

    async def add_one_later(self, n: int) -> Point:
        await trio.lowlevel.checkpoint() if trio.lowlevel.in_trio_task() else await asyncio.sleep(0)
        return self.add_one(n)

    async def on_a_loop(self, task: bytes) -> dict[str, Any]:
        now = worqr.current()
        before = now.saved
        await now.save(b"page %d" % now.attempt)
        point = await worqr.step("add", self.add_one_later, now.attempt)
        if now.attempt == 1:
            raise ValueError("once")
        return self.told(before, point, now)

    def in_a_thread(self, task: bytes) -> dict[str, Any]:
        now = worqr.current()
        before = now.saved
        now.save_now(b"page %d" % now.attempt)
        point = worqr.step_now("add", self.add_one, now.attempt)
        if now.attempt == 1:
            raise ValueError("once")
        return self.told(before, point, now)

    def told(self, before: bytes | None, point: Point, now: worqr.Context) -> dict[str, Any]:
        saved = None if before is None else before.decode()
        return {"before": saved, "x": point.x, "saved": str(now.saved), "calls": self.calls}


@pytest.mark.parametrize("place", ["loop", "thread", "asyncio", "process"])
async def test_the_next_run_finds_what_was_saved_and_takes_no_step_again(mesh: worqr.Mesh, place: str) -> None:
    handler: Any = Resuming()
    handler = {"thread": handler.in_a_thread, "process": resume}.get(place, handler.on_a_loop)
    found = await result_of(mesh, handler, runs_in=place)
    assert found == {"before": "page 1", "x": 2, "saved": "b'page 2'", "calls": [1]}


async def test_a_save_that_a_plain_function_cannot_await_is_refused(mesh: worqr.Mesh) -> None:
    @mesh.task(name="forgets", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    def forgets() -> None:
        saving = worqr.current().save(b"1")
        saving.close()

    async with mesh.join():
        job = await forgets.dispatch()
        with pytest.raises(worqr.JobFailed, match=r"write worqr\.current\(\)\.save_now\(\.\.\.\)"):
            await job.result(30)


async def test_a_raw_task_keeps_what_it_saved(mesh: worqr.Mesh) -> None:
    seen = list[tuple[str, bytes | None]]()
    done = trio.Event()

    async def handler(task: bytes) -> None:
        now = worqr.current()
        seen.append((now.id, now.saved))
        if now.attempt == 1:
            await now.save(b"half")
            raise ValueError("once")
        done.set()

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK):
        await mesh.queue("Q1").enqueue(b"raw")
        with trio.fail_after(PATIENCE):
            await done.wait()
    (first, nothing), (second, half) = seen
    assert (first, nothing, half) == (second, None, b"half")


async def test_a_sleep_that_is_not_counted_keeps_it_until_an_event_wakes_the_job(mesh: worqr.Mesh) -> None:
    asked = trio.Event()

    async def handler(task: bytes) -> str:
        now = worqr.current()
        if now.saved is None:
            await now.save(b"asked")
            asked.set()
            raise worqr.Retry(delay=86_400, counted=False)
        return f"{task.decode()} {now.saved.decode()} {now.attempt}"

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"order", id="x", result_ttl=60)
        with trio.fail_after(PATIENCE):
            await asked.wait()
            while (await job.status()).state != "scheduled":
                await trio.sleep(0.01)
        await q.dispatch(b"the event", id="x", update=worqr.Update(data=False))
        assert await job.result(PATIENCE) == b"order asked 1".decode()


async def test_a_failure_handler_keeps_its_own(mesh: worqr.Mesh) -> None:
    seen, done = list[bytes | None](), trio.Event()

    async def handler(task: bytes) -> None:
        await worqr.current().save(b"of the job")
        raise worqr.Failure("now")

    async def on_failure(failed: worqr.Failed) -> None:
        now = worqr.current()
        seen.append(now.saved)
        assert await worqr.step("mail", trivial, 1) == 1
        await now.save(b"of the handler")
        if len(seen) == 1:
            raise worqr.Retry(delay=0)
        done.set()

    async with mesh.connect(), serving(mesh, "Q1", handler, on_failure=on_failure, keep_failed=0):
        await mesh.queue("Q1").dispatch(b"t", id="x")
        with trio.fail_after(PATIENCE):
            await done.wait()
    assert seen == [None, b"of the handler"]


async def test_a_claim_by_hand_saves_until_it_is_settled(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"t")
        [claim] = await claims.take(1)
        await claim.save(b"by hand")
        await claim.stop()
        with pytest.raises(worqr.ClaimLost):
            await claim.save(b"too late")
        with pytest.raises(worqr.ClaimSettled):
            await claim.finish()
        [claim] = await claims.take(1)
        assert claim.saved == b"by hand"
        await claim.finish()


# Steps


def trivial(n: int) -> int:
    return n


async def test_steps_at_the_same_time_lose_nothing(mesh: worqr.Mesh) -> None:
    calls = list[int]()

    async def one(n: int) -> int:
        calls.append(n)
        return n * n

    async def handler(task: bytes) -> list[int]:
        found = dict[int, int]()

        async def take(n: int) -> None:
            found[n] = await worqr.step(f"square {n}", one, n)
            await worqr.current().save(b"%d" % n)

        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(take, n)
        if worqr.current().attempt == 1:
            raise ValueError("once")
        return [found[n] for n in range(20)]

    assert await result_of(mesh, handler) == [n * n for n in range(20)]
    assert sorted(calls) == list(range(20))


async def test_steps_of_several_threads_of_a_run_lose_nothing(mesh: worqr.Mesh) -> None:
    calls = list[int]()

    def one(n: int) -> int:
        calls.append(n)
        return n * n

    async def handler(task: bytes) -> int:
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(trio.to_thread.run_sync, partial(worqr.step_now, f"square {n}", one, n))
        if worqr.current().attempt == 1:
            raise ValueError("once")
        return len(calls)

    assert await result_of(mesh, handler) == 8


async def test_a_step_that_raises_stores_nothing_and_can_be_taken_again(mesh: worqr.Mesh) -> None:
    calls = list[int]()

    async def flaky() -> str:
        calls.append(worqr.current().attempt)
        if len(calls) < 3:
            raise OSError("no connection")
        return "done"

    async def handler(task: bytes) -> str:
        try:
            return await worqr.step("flaky", flaky)
        except OSError:
            return await worqr.step("flaky", flaky)  # in the same run; the second failure ends the run

    assert await result_of(mesh, handler) == "done"
    assert calls == [1, 1, 2]


@pytest.mark.leaves(*ASIDE)
async def test_a_name_that_is_used_twice_in_a_run_is_refused(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> str:
        await worqr.step("one", trivial, 1)
        with pytest.raises(worqr.UsageError, match="has taken the step 'one' before.*give each step its own name"):
            await worqr.step("one", trivial, 2)
        return await worqr.step("two", str, 2)

    assert await result_of(mesh, handler) == "2"


@dataclass
class Charge:
    id: int
    paid: frozenset[str]


def charged() -> Charge:
    return Charge(7, frozenset({"a"}))


def raw() -> bytes:
    return b"\x00\xff"


def nothing() -> None:
    pass


def untyped():  # type: ignore[no-untyped-def]
    return [1, 2]


async def test_all_runs_get_an_equal_value_of_the_annotated_type(mesh: worqr.Mesh) -> None:
    seen = list[Any]()

    async def handler(task: bytes) -> None:
        seen.append(
            (
                await worqr.step("charge", charged),
                await worqr.step("raw", raw),
                await worqr.step("nothing", nothing),
                await worqr.step("untyped", untyped),
                await worqr.step("lambda", lambda: {"a": 1}),
                await worqr.step("partial", partial(trivial, 4)),
            )
        )
        if len(seen) == 1:
            raise ValueError("once")

    await result_of(mesh, handler)
    assert seen[0] == seen[1] == (Charge(7, frozenset({"a"})), b"\x00\xff", None, [1, 2], {"a": 1}, 4)


class Plan:
    """A step that an application corrects between two runs of a job."""

    calls = 0

    def wrong(self) -> dict[str, Any]:
        self.calls += 1
        return {"due": date(2031, 1, 2)}

    def right(self) -> dict[str, date]:
        raise AssertionError("is not called")


async def test_a_result_that_would_arrive_as_something_else_is_an_error_in_every_run_and_not_another_call(
    mesh: worqr.Mesh,
) -> None:
    plan, errors = Plan(), list[str]()

    async def handler(task: bytes) -> Any:
        if len(errors) == 2:
            return str(await worqr.step("plan", plan.right))
        with pytest.raises(worqr.UsageError) as caught:
            await worqr.step("plan", plan.wrong)
        errors.append(str(caught.value))
        raise caught.value

    assert await result_of(mesh, handler) == str({"due": date(2031, 1, 2)})
    assert plan.calls == 1
    assert "$.due is a date and would arrive as str, because no annotation says its type: annotate it" in errors[0]
    assert "change the return annotation of the function. It is saved: the next run does not call" in errors[1]


def uncertain() -> Fraction:
    raise AssertionError("is not called")


class Socket:
    """What JSON does not know."""


def unknown() -> Socket:
    raise AssertionError("is not called")


@pytest.mark.parametrize(
    ("name", "fn", "why"),
    [
        ("", trivial, "the name of a step must have 1 to 200 bytes"),
        ("x" * 201, trivial, "the name of a step must have 1 to 200 bytes, not 201"),
        (7, trivial, "the name of a step must be a str"),
        ("a", 7, "step 'a' needs a function and its arguments"),
        ("a", uncertain, "step 'a': the annotations of its function cannot be read.*Fraction"),
        ("a", unknown, "step 'a'.*Socket, which JSON does not know"),
    ],
)
async def test_a_bad_step_is_refused_before_its_function_is_called(name: Any, fn: Any, why: str) -> None:
    with worqr.testing.context(), pytest.raises(worqr.UsageError, match=why):
        await worqr.step(name, fn)
    with worqr.testing.context(), pytest.raises(worqr.UsageError, match=why):
        worqr.step_now(name, fn)


async def test_outside_of_a_run_a_step_is_refused() -> None:
    with pytest.raises(worqr.UsageError, match="for code inside a handler"):
        await worqr.step("a", trivial, 1)
    with pytest.raises(worqr.UsageError, match="for code inside a handler"):
        worqr.step_now("a", trivial, 1)


def unsaveable() -> Any:
    return threading.Lock()


def large() -> str:
    return "x" * 1024 * 1024


@pytest.mark.leaves(*ASIDE)
@pytest.mark.parametrize(("fn", "why"), [(unsaveable, "neither bytes nor JSON"), (large, "at most 1,048,576 bytes")])
async def test_a_result_that_cannot_be_saved_fails_the_job_for_good(mesh: worqr.Mesh, fn: Any, why: str) -> None:
    runs = list[bytes]()

    async def handler(task: bytes) -> None:
        runs.append(task)
        await worqr.step("a", fn)

    found = await failure_of(mesh, handler)
    assert "step 'a' was done, but its result" in found
    assert why in found
    assert len(runs) == 1, "another run would do it again"


@pytest.mark.leaves(*ASIDE)
async def test_a_job_that_keeps_too_much_is_told_what_to_do(mesh: worqr.Mesh) -> None:
    def half() -> bytes:
        return b"x" * 600_000

    async def handler(task: bytes) -> None:
        with pytest.raises(
            worqr.UsageError, match=r"262,145 bytes are over the 262,144.*keep the data in your database"
        ):
            await worqr.current().save(b"x" * 262_145)
        with pytest.raises(worqr.UsageError, match=r"takes bytes, not str.*json.dumps"):
            await worqr.current().save("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await worqr.step("one", half)
        await worqr.step("two", half)

    expected = "step 'two' was done, but its result cannot be saved: a job can save at most 1,048,576 bytes in all"
    assert expected in await failure_of(mesh, handler)


async def test_another_type_than_the_saved_one_is_an_error_and_not_another_call() -> None:
    def number() -> int:
        raise AssertionError("is not called")

    with worqr.testing.context(steps={"a": "text"}):
        with pytest.raises(
            worqr.UsageError, match="the saved result of step 'a' does not have the type that its function declares"
        ):
            await worqr.step("a", number)


# Who may save


@pytest.mark.parametrize("place", ["loop", "thread", "asyncio", "process"])
async def test_a_run_that_has_lost_its_claim_saves_nothing(
    new_mesh: NewMesh, server: Server, prefix: str, place: str, tmp_path: Path
) -> None:
    mesh, gone, heard = new_mesh(keepalive=60), tmp_path / "gone", trio.Event()
    lost = tmp_path / "gone.lost"
    token = trio.lowlevel.current_trio_token()
    keys = QueueKeys(prefix, "Q1")

    def plain(task: bytes) -> None:
        worqr.current().progress(0.5)
        while not gone.exists():
            threading.Event().wait(0.01)
        with pytest.raises(worqr.ClaimLost):
            worqr.current().save_now(b"a zombie's")
        with pytest.raises(worqr.ClaimLost):
            worqr.step_now("a", trivial, 1)
        token.run_sync_soon(heard.set)
        raise RuntimeError("its end does not count")

    async def on_a_loop(task: bytes) -> None:
        worqr.current().progress(0.5)
        while not gone.exists():
            await trio.sleep(0.01) if place == "loop" else await asyncio.sleep(0.01)
        with pytest.raises(worqr.ClaimLost):
            await worqr.current().save(b"a zombie's")
        with pytest.raises(worqr.ClaimLost):
            await worqr.step("a", trivial, 1)
        token.run_sync_soon(heard.set)
        raise RuntimeError("its end does not count")

    handler = {"thread": plain, "process": process_jobs.lose}.get(place, on_a_loop)
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in=place):
        q = mesh.queue("Q1")
        job = await q.dispatch(str(gone).encode(), id="x")
        with trio.fail_after(PATIENCE):
            while not (running := await q.running()) or running[0].progress is None:
                await trio.sleep(0.01)
            await q.pause()
            with server.client() as client:  # as if the worker had been swept
                client.srem(keys.claims(str(running[0].worker)), str(running[0].claim))
            gone.touch()
            if place == "process":
                await until(lost.exists)
            else:
                await heard.wait()
        assert (await job.status()).failures == 0
    with server.client() as client:
        record = client.hgetall(keys.active("x"))
        assert not any(name.startswith((b"saved", b"step:")) for name in record)
        client.delete(*client.keys(f"{{{prefix}*"), *client.keys(f"{prefix}*"))


async def test_a_thread_that_a_process_left_behind_saves_nothing_for_the_next_run(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), mesh.join() as peer, trio.open_nursery() as nursery:
        for queue, handler in (("Q1", process_jobs.save_late), ("Q2", process_jobs.let_save)):
            await nursery.start(partial(peer.serve, queue, handler, runs_in="process", result_ttl=60))
        await (await mesh.queue("Q1").dispatch(b"t")).result(PATIENCE)
        text = await (await mesh.queue("Q2").dispatch(b"t")).result(PATIENCE)
        assert "the run has ended" in str(text)
        nursery.cancel_scope.cancel()


def save_in_fork() -> str:
    """What a fork is told that saves in place of its process."""
    try:
        worqr.current().save_now(b"x")
    except worqr.UsageError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_fork_of_a_worker_is_told_that_it_cannot_save(mesh: worqr.Mesh) -> None:
    def fork(_: bytes) -> str:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply_async(save_in_fork).get(PATIENCE)

    assert "a fork of the worker cannot save" in await result_of(mesh, fork)


async def test_a_process_is_told_that_it_saves_too_much(mesh: worqr.Mesh) -> None:
    assert "over the 262,144" in await result_of(mesh, process_jobs.save_too_much, runs_in="process")


async def test_waiting_in_an_event_loop_is_refused(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> str:
        with pytest.raises(worqr.UsageError, match=r"event loop: write `await worqr.current\(\).save\(...\)`"):
            worqr.current().save_now(b"s")
        with pytest.raises(worqr.UsageError, match=r"event loop: write `await worqr.step\('a', ...\)`"):
            worqr.step_now("a", trivial, 1)
        return await worqr.step("a", str, 1)

    assert await result_of(mesh, handler) == "1"


async def test_an_async_function_is_no_step_of_a_thread(mesh: worqr.Mesh) -> None:
    async def later() -> int:
        return 1

    def handler(task: bytes) -> str:
        with pytest.raises(
            worqr.UsageError, match=r"step 'a' is an async function: write `await worqr.step\('a', ...\)`"
        ):
            _ = worqr.step_now("a", later)
        return "refused"

    assert await result_of(mesh, handler, runs_in="thread") == "refused"


async def test_a_step_whose_save_was_refused_is_saved_again_without_a_call(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    calls, keys = list[int](), QueueKeys(prefix, "Q1")

    async def once() -> int:
        calls.append(1)
        return len(calls)

    async def handler(task: bytes) -> int:
        with server.client() as client:
            worker = client.hget(keys.active("x"), "worker").decode()
            key, aside = keys.claims(worker), f"{keys.claims(worker)}:for the test"
            client.rename(key, aside)
            client.set(key, "foreign")
            with pytest.raises(worqr.RefusedByServer):
                await worqr.step("once", once)
            client.rename(aside, key)
        return await worqr.step("once", once)

    assert await result_of(mesh, handler) == 1
    assert calls == [1]


async def test_the_size_of_what_was_saved_is_shown_and_nothing_else(mesh: worqr.Mesh) -> None:
    saved, go = trio.Event(), trio.Event()

    async def handler(task: bytes) -> None:
        await worqr.current().save(b"a secret")
        await worqr.step("key", str, "secret too")
        saved.set()
        await go.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"t", id="x", result_ttl=60)
        with trio.fail_after(PATIENCE):
            await saved.wait()
        found = await q.read("x")
        assert found.saved_size == 8 + 1024
        assert "secret" not in repr(found)
        go.set()
        await job.result(PATIENCE)
        assert (await q.read("x")).saved_size == 0


async def test_a_job_that_saves_nothing_sends_nothing_more(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> str:
        return f"{worqr.current().saved}"

    assert ops.save_state(QueueKeys("p", "q"), "w", 1, 1, "", b"x").script.name == "save_state"
    assert await result_of(mesh, handler) == "None"


# Progress


@pytest.mark.parametrize("kind", ["steps", "saves"])
@pytest.mark.parametrize("resets", [True, False])
async def test_the_counters_fall_when_a_run_gets_further_if_the_policy_says_so(
    mesh: worqr.Mesh, kind: str, resets: bool, expects_left: Callable[..., None]
) -> None:
    """Each run fails once more than the one before it has come."""
    expects_left(*(() if resets else ASIDE))
    seen: list[int] = []

    async def handler(task: bytes) -> int:
        now = worqr.current()
        seen.append(now.failures)
        if kind == "saves":
            place = int(now.saved or b"0")
            await now.save(b"%d" % (place + 1))
        else:
            place = sum([await worqr.step(f"step {n}", lambda: 1) for n in range(now.run)]) - 1
        if place < 5:
            raise ValueError(place)
        return place

    retry = worqr.RetryPolicy(max_failures=3, min_backoff=0, max_backoff=0, reset_on_progress=resets)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry):
        job = await mesh.queue("Q1").dispatch(b"t", id="x", result_ttl=60)
        if resets:
            assert await job.result(PATIENCE) == 5
            assert seen == [0, 1, 1, 1, 1, 1]
        else:
            with pytest.raises(worqr.JobFailed):
                await job.result(PATIENCE)
            assert seen == [0, 1, 2]


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_a_run_that_got_further_is_not_the_last_attempt(mesh: worqr.Mesh, place: str) -> None:
    retry = worqr.RetryPolicy(max_failures=2, min_backoff=0, max_backoff=0, reset_on_progress=True)
    async with mesh.connect(), serving(mesh, "Q1", process_jobs.get_further, runs_in=place, retry=retry):
        job = await mesh.queue("Q1").dispatch(b"t", id="x", result_ttl=60)
        assert await job.result(PATIENCE) == [True, False]


async def test_the_backoff_after_a_timeout_begins_anew_when_a_run_gets_further(mesh: worqr.Mesh) -> None:
    asked: list[int] = []

    def backoff(failures: int, error: str) -> float:
        asked.append(failures)
        return 0

    async def handler(task: bytes) -> None:
        now = worqr.current()
        for n in range(now.run):
            await worqr.step(f"step {n}", lambda: 1)
        if now.run < 4:
            now.extend(0.05)
            await trio.sleep_forever()

    retry = worqr.RetryPolicy(backoff=backoff, reset_on_progress=True)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry, timeout=60):
        job = await mesh.queue("Q1").dispatch(b"t", id="x", result_ttl=60)
        assert await job.result(PATIENCE) is None
    assert asked == [1, 1, 1]


async def test_a_run_that_saves_the_same_place_again_or_has_not_looked_makes_no_progress(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*ASIDE)
    seen: list[int] = []

    async def handler(task: bytes) -> None:
        now = worqr.current()
        seen.append(now.failures)
        if now.failures < 2:
            assert now.saved in {None, b"5"}
            await now.save(b"5")
        else:
            await now.save(b"%d" % len(seen))
        raise ValueError

    retry = worqr.RetryPolicy(max_failures=4, min_backoff=0, max_backoff=0, reset_on_progress=True)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry):
        job = await mesh.queue("Q1").dispatch(b"t", id="x", result_ttl=60)
        with pytest.raises(worqr.JobFailed):
            await job.result(PATIENCE)
    assert seen == [0, 1, 2, 3]
