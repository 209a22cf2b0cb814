"""Handlers that take a list: what a run takes, what becomes of each call, and what happens to claims that wait for more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.peer.tools import QUICK, SCRIPTS, at_most, eventually, serving, spying, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.peer.list_run import ListGatherer, ListItem, ListRun
from worqr.peer.run import RunHost
from worqr.policy import Policy, Undecodable

ASIDE = ("{Q1}:failed", "{Q1}:broken", "{Q1}:aside*")
FOREVER = 10 * PATIENCE
"""Seconds of a wait that must not end by itself."""


class Lists:
    """A handler that notes its lists, and returns what `outcome` makes of each task. If it is held, it first waits for `gate`."""

    def __init__(self, outcome: Callable[[bytes], object] = lambda _: None, *, held: bool = False) -> None:
        self.lists: list[list[bytes]] = []
        self.attempts: list[list[int]] = []
        self.runs: list[worqr.Context] = []
        self.cancelled: list[str | None] = []
        self.gate = trio.Event()
        self._outcome = outcome
        if not held:
            self.gate.set()

    async def __call__(self, tasks: list[bytes]) -> list[object]:
        run = worqr.current()
        self.lists.append(list(tasks))
        self.runs.append(run)
        self.attempts.append([call.attempt for call in run.items])
        assert [call.task for call in run.items] == tasks
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.cancelled.append(run.cancel_reason)
            raise
        return [self._outcome(task) for task in tasks]

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.lists]


def numbers(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix)


@asynccontextmanager
async def taking(
    mesh: worqr.Mesh, handler: Callable[[list[bytes]], object], *, room: int = 100, grace: float = 5, **options: Any
) -> AsyncGenerator[worqr.Peer]:
    """A peer that serves Q1 with a list handler."""
    options = {"batch_size": 10, "retry": QUICK, **options}
    async with mesh.join(concurrency=room, grace=grace) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve_list, "Q1", handler, **options))
        yield peer
        nursery.cancel_scope.cancel()


def count_of(mesh: worqr.Mesh, *words: str) -> Callable[[], Awaitable[tuple[int, ...]]]:
    async def look() -> tuple[int, ...]:
        counts = (await mesh.queue("Q1").info()).counts
        return tuple(counts.get(word, 0) for word in words)

    return look


async def running(mesh: worqr.Mesh) -> int:
    return (await mesh.queue("Q1").info()).running


async def waiting(mesh: worqr.Mesh) -> int:
    return (await mesh.queue("Q1").info()).waiting


# What a run takes


async def test_a_run_takes_up_to_batch_size_of_what_is_there(mesh: worqr.Mesh) -> None:
    handler = Lists()
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(25))
    async with taking(mesh, handler):
        await eventually(count_of(mesh, "finished"), (25,))
    assert sorted(handler.sizes) == [5, 10, 10]
    assert sorted(task for each in handler.lists for task in each) == sorted(numbers(25))
    assert all(each == sorted(each, key=int) for each in handler.lists)


async def test_a_run_waits_for_more_and_begins_when_it_is_full(mesh: worqr.Mesh) -> None:
    handler = Lists()
    async with taking(mesh, handler, batch_size=3, batch_wait=FOREVER):
        for n, task in enumerate(numbers(3)):
            assert handler.lists == []
            await mesh.queue("Q1").enqueue(task)
            if n < 2:
                await eventually(partial(running, mesh), n + 1)
        await eventually(count_of(mesh, "finished"), (3,))
    assert handler.lists == [numbers(3)]


async def test_a_run_begins_when_it_has_waited_long_enough(mesh: worqr.Mesh) -> None:
    handler = Lists()
    async with taking(mesh, handler, batch_wait=0.2):
        began = trio.current_time()
        await mesh.queue("Q1").enqueue(*numbers(4))
        await until(lambda: handler.lists)
        assert trio.current_time() - began >= 0.2
        await mesh.queue("Q1").enqueue(b"later")
        await eventually(count_of(mesh, "finished"), (5,))
    assert handler.lists == [numbers(4), [b"later"]]


async def test_a_run_takes_the_units_of_one_task_however_many_it_has(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(50))
    async with taking(mesh, handler, room=4, size=2) as peer:
        await until(lambda: len(handler.lists) == 2)
        assert (peer.health().room, peer.health().running) == (0, 20)
        assert await waiting(mesh) == 30
        handler.gate.set()
        await eventually(count_of(mesh, "finished"), (50,))
        await until(lambda: peer.health().room == 4)
    assert handler.sizes == [10] * 5


async def test_the_concurrency_of_a_handler_counts_its_runs(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(30))
    async with taking(mesh, handler, concurrency=2):
        await until(lambda: len(handler.lists) == 2)
        await eventually(partial(waiting, mesh), 10)
        handler.gate.set()
        await eventually(count_of(mesh, "finished"), (30,))


async def test_a_full_run_that_waits_is_filled_without_free_units(mesh: worqr.Mesh) -> None:
    """Another queue has the last unit: what comes to the run that waits needs none."""
    handler, other = Lists(), Lists(held=True)
    async with mesh.join(concurrency=2) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve_list, "Q1", handler, batch_size=2, batch_wait=FOREVER))
        await nursery.start(partial(peer.serve_list, "Q2", other, batch_size=1))
        await mesh.queue("Q1").enqueue(b"a")
        await eventually(partial(running, mesh), 1)
        await mesh.queue("Q2").enqueue(b"x")
        await until(lambda: other.lists)
        assert peer.health().room == 0
        await mesh.queue("Q1").enqueue(b"b")
        await until(lambda: handler.lists == [[b"a", b"b"]])
        other.gate.set()
        nursery.cancel_scope.cancel()


async def test_lists_cost_less_requests_than_tasks_one_by_one(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(300))
    handler = Lists()
    with spying(server, prefix) as spy:
        async with taking(mesh, handler, batch_size=100):
            await eventually(count_of(mesh, "finished"), (300,))
            calls = spy.calls()
    assert set(calls) & {"start_tasks", "finish_tasks"} <= set(SCRIPTS.values())
    assert calls["start_tasks"] <= 4
    assert calls["finish_tasks"] <= 3
    assert handler.sizes == [100] * 3


# What becomes of each call


async def test_each_call_is_settled_by_its_own_outcome(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    expects_left(*ASIDE)
    outcomes: dict[bytes, object] = {
        b"none": None,
        b"value": {"a": 1},
        b"failure": worqr.Failure("no"),
        b"undecodable": Undecodable("what is this?"),
        b"retry": worqr.Retry("later", delay=600),
    }
    handler = Lists(outcomes.get)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*outcomes)
    async with taking(mesh, handler):
        await eventually(count_of(mesh, "finished", "failed", "undecodable", "retried"), (2, 1, 1, 1))
        [failed] = await mesh.queue("Q1").failed.list()
        [broken] = await mesh.queue("Q1").undecodable.list()
        assert (failed.task, failed.error and failed.error.message) == (b"failure", "no")
        assert broken.task == b"undecodable"
        await mesh.queue("Q1").cancel(b"retry")
    assert handler.lists == [list(outcomes)]


async def test_each_job_has_its_own_result_and_error(mesh: worqr.Mesh) -> None:
    handler = Lists(lambda task: task + b"!" if task != b"bad" else ValueError("bad"))
    retry = worqr.RetryPolicy(max_failures=1)
    async with mesh.connect():
        queue = mesh.queue("Q1")
        jobs = [await queue.dispatch(task, result_ttl=60, retry=retry) for task in (b"a", b"bad", b"c")]
    async with taking(mesh, handler, keep_failed=0):
        assert await jobs[0].result(PATIENCE) == b"a!"
        with pytest.raises(worqr.JobFailed, match="ValueError: bad"):
            await jobs[1].result(PATIENCE)
        assert await jobs[2].result(PATIENCE) == b"c!"
        assert [call.id for call in handler.runs[0].items] == [job.id for job in jobs]


async def test_a_rate_limit_of_one_call_pauses_the_queue(mesh: worqr.Mesh) -> None:
    handler = Lists(lambda task: worqr.RateLimited(600, "429") if task == b"b" else None)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
    async with taking(mesh, handler):
        await eventually(count_of(mesh, "finished"), (2,))
        info = await mesh.queue("Q1").info()
        assert (info.waiting, info.paused) == (1, "429")
        await mesh.queue("Q1").cancel(b"b")
        await mesh.queue("Q1").resume()


@pytest.mark.parametrize("returned", [[None], [None] * 4, 7])
async def test_a_list_of_another_length_is_a_failure_of_all(
    mesh: worqr.Mesh, returned: object, expects_left: Callable[..., None]
) -> None:
    expects_left(*ASIDE)

    async def handler(tasks: list[bytes]) -> object:
        return returned if len(tasks) == 3 else None

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(3))
    async with taking(mesh, handler, retry=worqr.RetryPolicy(max_failures=1)):
        await eventually(count_of(mesh, "failed"), (3,))
        words = (
            "one outcome for each call" if returned == 7 else f"got a list of 3 and returned a list of {len(returned)}"
        )  # type: ignore[arg-type]
        for failed in await mesh.queue("Q1").failed.list():
            assert failed.error is not None
            assert words in failed.error.message


async def test_whatever_has_failed_is_alone_in_its_next_run(mesh: worqr.Mesh) -> None:
    handler = Lists()

    async def fail_with_bad(tasks: list[bytes]) -> object:
        await handler(tasks)
        if b"bad" in tasks and worqr.current().items[0].attempt == 1:
            raise ValueError("bad")
        return None

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(5), b"bad")
    async with taking(mesh, fail_with_bad):
        await eventually(count_of(mesh, "finished", "retried"), (6, 6))
    assert handler.sizes == [6, 1, 1, 1, 1, 1, 1]
    assert handler.attempts[1:] == [[2]] * 6


async def test_calls_that_are_alone_wait_for_units_and_take_no_more_than_there_are(mesh: worqr.Mesh) -> None:
    now, most, three = 0, 0, trio.Event()

    async def handler(tasks: list[bytes]) -> None:
        nonlocal now, most
        if worqr.current().items[0].attempt == 1:
            raise ValueError
        assert len(tasks) == 1
        now += 1
        most = max(most, now)
        if now == 3:
            three.set()
        await three.wait()
        await trio.sleep(0.001)
        now -= 1

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(40))
    async with taking(mesh, handler, room=3, batch_size=20) as peer:
        await eventually(count_of(mesh, "finished"), (40,))
        await until(lambda: peer.health().room == 3)
    assert most == 3


async def test_calls_that_were_not_counted_run_together_again(mesh: worqr.Mesh) -> None:
    handler = Lists(lambda _: worqr.Retry(delay=0, counted=False) if len(handler.lists) == 1 else None)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(4))
    async with taking(mesh, handler, batch_size=4, batch_wait=FOREVER):
        await eventually(count_of(mesh, "finished"), (4,))
    assert handler.sizes == [4, 4]


async def test_a_timeout_is_of_the_run_and_the_shortest_of_its_calls(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        await mesh.queue("Q1").dispatch(b"a")
        await mesh.queue("Q1").dispatch(b"b", timeout=1)
    async with taking(mesh, handler, timeout=FOREVER):
        await until(lambda: handler.cancelled == ["timeout"])
        handler.gate.set()
        await eventually(count_of(mesh, "retried", "finished"), (2, 2), within=2 * PATIENCE)
    assert handler.sizes == [2, 1, 1]


async def test_a_call_that_is_cancelled_is_marked_and_the_run_goes_on(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        jobs = [await mesh.queue("Q1").dispatch(task, id=task.decode()) for task in (b"a", b"b", b"c")]
    async with taking(mesh, handler):
        await until(lambda: handler.lists)
        items = handler.runs[0].items
        assert (await jobs[1].cancel(wait=0)).running == 1
        await until(lambda: items[1].cancel_reason == "cancel")
        assert [item.cancel_reason for item in items] == [None, "cancel", None]
        assert (handler.runs[0].cancel_reason, handler.cancelled) == (None, [])
        handler.gate.set()
        await eventually(count_of(mesh, "finished", "cancelled"), (2, 1))
    assert handler.cancelled == []


async def test_a_run_is_cancelled_when_all_its_calls_are(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a", b"b")
    async with taking(mesh, handler):
        await until(lambda: handler.lists)
        for task in (b"a", b"b"):
            assert (await mesh.queue("Q1").cancel(task, wait=PATIENCE if task == b"b" else 0)).running == 1
        await eventually(count_of(mesh, "cancelled"), (2,))
    assert handler.cancelled == ["cancel"]


async def test_the_whole_run_has_no_id_and_says_what_to_ask(mesh: worqr.Mesh) -> None:
    async def handler(tasks: list[bytes]) -> list[object]:
        run = worqr.current()
        assert (run.queue, run.cancel_reason, run.deadline, len(run.items)) == ("Q1", None, None, 2)
        assert [run.items[-1].task, *(item.task for item in run.items[:1])] == [b"b", b"a"]
        words = []
        for name in ("id", "task", "attempt", "meta", "fence", "last_attempt", "run_at"):
            with pytest.raises(worqr.UsageError) as refused:
                getattr(run, name)
            words.append(f"worqr.current().items[0].{name}" in str(refused.value))
        assert all(words)
        run.progress(0.5, "half")
        run.items[0].progress(0.7)
        return [item.meta["n"].encode() for item in run.items]

    async with mesh.connect():
        jobs = [
            await mesh.queue("Q1").dispatch(task, meta={"n": task.decode()}, result_ttl=60) for task in (b"a", b"b")
        ]
    async with taking(mesh, handler):
        assert [await job.result(PATIENCE) for job in jobs] == [b"a", b"b"]


async def test_each_call_has_its_progress(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        jobs = [await mesh.queue("Q1").dispatch(task) for task in (b"a", b"b")]
    async with taking(mesh, handler):
        await until(lambda: handler.lists)
        handler.runs[0].progress(0.25)
        handler.runs[0].items[1].progress(0.75, "more")

        async def look() -> list[tuple[float | None, str]]:
            return [(status.progress, status.message) for status in [await job.status() for job in jobs]]

        await eventually(look, [(0.25, ""), (0.75, "more")])
        handler.gate.set()
        await eventually(count_of(mesh, "finished"), (2,))


async def test_a_run_can_be_extended_by_any_of_its_calls(mesh: worqr.Mesh) -> None:
    deadlines: list[float | None] = []

    async def handler(tasks: list[bytes]) -> None:
        run = worqr.current()
        deadlines.append(run.deadline)
        run.items[1].extend(FOREVER)
        deadlines.extend([run.deadline, run.items[0].deadline])

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a", b"b")
    async with taking(mesh, handler, timeout=PATIENCE):
        await eventually(count_of(mesh, "finished"), (2,))
    before, after, of_call = deadlines
    assert before is not None
    assert after is not None
    assert after > before
    assert of_call == after


async def test_ended_runs_are_counted_one_by_one(mesh: worqr.Mesh) -> None:
    handler = Lists(lambda task: worqr.Retry(delay=600) if task == b"2" else None)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(3))
    async with taking(mesh, handler, recent=10):
        await eventually(count_of(mesh, "finished", "retried"), (2, 1))

        async def look() -> Counter[str]:
            return Counter(run.outcome for run in await mesh.queue("Q1").recent())

        await eventually(look, Counter({"ok": 2, "raised": 1}))
        await mesh.queue("Q1").cancel(b"2")


async def test_limits_count_calls_one_by_one(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(10))
    async with taking(mesh, handler, limit=worqr.Limit(3)):
        await until(lambda: handler.sizes == [3])
        assert (await mesh.queue("Q1").info()).waiting == 7
        handler.gate.set()
        await eventually(count_of(mesh, "finished"), (10,))
    assert max(handler.sizes) == 3


async def test_failure_handlers_get_each_call(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    expects_left(*ASIDE)
    told: list[bytes] = []

    async def on_failure(failed: worqr.Failed) -> None:
        told.append(failed.task)

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(3))
    async with taking(mesh, Lists(lambda _: worqr.Failure()), on_failure=on_failure):
        await until(lambda: sorted(told) == numbers(3))
        await eventually(count_of(mesh, "failed"), (3,))


async def test_middleware_wraps_the_run_once(server: Server, prefix: str) -> None:
    seen: list[tuple[int, object]] = []

    async def middleware(context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
        result = await call_next()
        seen.append((len(context.items), result))
        return result

    mesh = worqr.Mesh(server.url, prefix=prefix, middleware=[middleware])
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(3))
    async with taking(mesh, Lists(lambda task: task)):
        await eventually(count_of(mesh, "finished"), (3,))
    assert seen == [(3, numbers(3))]


# Claims that wait for more


async def test_a_drain_gives_back_what_waits_and_lets_what_runs_end(mesh: worqr.Mesh) -> None:
    handler = Lists(held=True)
    async with taking(mesh, handler, batch_size=2, batch_wait=FOREVER) as peer:
        await mesh.queue("Q1").enqueue(*numbers(2))
        await until(lambda: handler.lists)
        await mesh.queue("Q1").enqueue(b"waits")
        await eventually(partial(running, mesh), 3)
        async with at_most(), trio.open_nursery() as nursery:
            nursery.start_soon(peer.drain, FOREVER)
            await eventually(partial(waiting, mesh), 1)
            assert await running(mesh) == 2
            handler.gate.set()
        assert await count_of(mesh, "finished", "stopped")() == (2, 1)
    assert handler.lists == [numbers(2)]
    async with mesh.connect():
        assert await mesh.queue("Q1").tasks() == [b"waits"]


async def test_a_peer_that_leaves_at_once_gives_back_what_waits_in_order(mesh: worqr.Mesh) -> None:
    async with taking(mesh, Lists(), batch_wait=FOREVER):
        await mesh.queue("Q1").enqueue(*numbers(4))
        await eventually(partial(running, mesh), 4)
    async with mesh.connect():
        assert await mesh.queue("Q1").tasks() == numbers(4)[::-1]  # the newest first
        assert (await mesh.queue("Q1").info()).running == 0


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(mesh: worqr.Mesh) -> None:
    handler = Lists()
    async with taking(mesh, handler, batch_size=3, batch_wait=FOREVER) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b")
        await eventually(partial(running, mesh), 2)
        async with at_most():
            found = await mesh.queue("Q1").cancel(b"a", wait=PATIENCE)
        assert (found.running, found.acknowledged) == (1, 1)
        await mesh.queue("Q1").enqueue(b"c", b"d")
        await until(lambda: handler.lists == [[b"b", b"c", b"d"]])
        async with at_most():
            await mesh.queue("Q1").enqueue(b"x")
            await eventually(partial(running, mesh), 1)
            await mesh.queue("Q1").cancel(b"x", wait=PATIENCE)
        await until(lambda: peer.health().room == 100)


@pytest.mark.parametrize("duration", [None, PATIENCE])
async def test_what_waits_goes_back_when_the_queue_is_paused(mesh: worqr.Mesh, duration: float | None) -> None:
    handler = Lists()
    async with taking(mesh, handler, batch_wait=0.3) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b")
        await eventually(partial(running, mesh), 2)
        await mesh.queue("Q1").pause(duration=duration)
        await eventually(partial(waiting, mesh), 2)
        await until(lambda: peer.health().room == 100)
        assert handler.lists == []
        await mesh.queue("Q1").resume()
        await eventually(count_of(mesh, "finished"), (2,))
    assert handler.lists == [[b"a", b"b"]]


async def test_what_waits_is_visible_as_running(mesh: worqr.Mesh) -> None:
    async with taking(mesh, Lists(), batch_wait=FOREVER) as peer:
        job = await mesh.queue("Q1").dispatch(b"a")
        await eventually(partial(running, mesh), 1)
        status = await job.status()
        assert (status.state, status.worker) == ("active", peer.id)
        assert peer.health().room == 99
        await job.cancel(wait=PATIENCE)


# Any mixture


@pytest.mark.parametrize("seed", range(5))
async def test_each_call_ends_once_and_as_it_should(
    mesh: worqr.Mesh, seed: int, expects_left: Callable[..., None]
) -> None:
    """Tasks say how their runs end, one after the other; lists raise, too, and calls are cancelled."""
    expects_left(*ASIDE)
    dice = random.Random(seed)
    plans = {
        b"%d" % n: dice.choices(["ok", "fail", "retry", "uncounted", "error"], [5, 1, 1, 1, 2], k=3) for n in range(80)
    }
    steps: Counter[bytes] = Counter()
    final: dict[bytes, str] = {}

    async def handler(tasks: list[bytes]) -> list[object] | None:
        await trio.sleep(dice.random() / 200)
        assert len(tasks) == 1 or all(item.attempt == 1 for item in worqr.current().items)
        assert not final.keys() & set(tasks)
        if len(tasks) > 1 and dice.random() < 0.2:
            raise ValueError("all of them")
        return [outcome(task) for task in tasks]

    def outcome(task: bytes) -> object:
        plan = plans[task][min(steps[task], 2)] if steps[task] < 3 else "ok"
        steps[task] += 1
        if plan == "ok":
            final[task] = "finished"
        elif plan == "fail":
            final[task] = "failed"
        kinds: dict[str, object] = {
            "ok": task,
            "fail": worqr.Failure("no"),
            "retry": worqr.Retry(delay=0),
            "uncounted": worqr.Retry(delay=0, counted=False),
            "error": ValueError("this one"),
        }
        return kinds[plan]

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*plans)
    wait = dice.choice([0, 0.02])
    async with taking(mesh, handler, room=dice.randint(1, 9), batch_size=dice.randint(1, 30), batch_wait=wait) as peer:

        async def ended() -> int:
            finished, failed = await count_of(mesh, "finished", "failed")()
            return finished + failed

        await eventually(ended, 80)
        expected = Counter(final.values())
        assert await count_of(mesh, "finished", "failed")() == (expected["finished"], expected["failed"])
        info = await mesh.queue("Q1").info()
        assert (info.waiting, info.running, info.scheduled) == (0, 0, 0)
        assert {each.task for each in await mesh.queue("Q1").failed.list()} == {
            task for task, word in final.items() if word == "failed"
        }
        assert peer.health().running == 0
    assert len(final) == 80


# Not without a list


async def test_a_peer_without_list_handlers_makes_none(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        [only] = worqr.current().items
        assert (only.id, only.task) == (worqr.current().id, task)

    async with serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"x")
        await eventually(count_of(mesh, "finished"), (1,))


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("serve", {"batch_size": 5}, r"use peer\.serve_list\(\)"),
        ("serve", {"batch_wait": 5}, r"use peer\.serve_list\(\)"),
        ("serve_list", {}, r"serve_list\(\) needs batch_size="),
        ("serve_list", {"batch_size": 5, "batch_wiat": 1}, "has no option 'batch_wiat'; did you mean 'batch_wait'"),
        ("serve_list", {"batch_size": 5, "max_length": 1}, r"serve_list\(\) takes no max_length"),
        ("serve_list", {"batch_size": 5, "shards": 2}, r"serve_list\(\) takes no shards"),
    ],
)
async def test_options_that_do_not_fit_are_refused(
    mesh: worqr.Mesh, method: str, options: dict[str, Any], words: str
) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await getattr(peer, method)("Q1", Lists(), **options)


# Which claims run together, without a server: any order of arrivals, cancellations and ends.


class Host:
    queue, id_suffix, policy, state = "Q1", "", Policy(), None

    def policy_with(self, own: Any) -> Policy:
        return self.policy


def item(fence: int, *, failed: bool = False) -> ListItem:
    entry: Any = [b"id", b"%d" % fence, b"task", b"", b"failures", b"1"] if failed else b""
    return ListItem(cast("RunHost", Host()), None, fence, entry)


Steps = st.lists(st.one_of(st.lists(st.booleans(), max_size=8), st.sampled_from(["close", "units", "begin", "cancel"])))


@given(st.integers(1, 5), Steps, st.randoms(use_true_random=False))
def test_each_claim_is_in_one_run_of_the_right_size(size: int, steps: list[list[bool] | str], dice: Any) -> None:
    gatherer, fence = ListGatherer(size), 0
    held: set[int] = set()
    begun: list[ListRun] = []
    for step in steps:
        if isinstance(step, list):
            new = [item(fence + n, failed=failed) for n, failed in enumerate(step)]
            fence += len(new)
            held |= {each.fence for each in new}
            gatherer.add(new)
        elif step == "close":
            gatherer.close()
        elif step == "units":
            for run in gatherer.without_units()[:1]:
                run.reserve_units()
        elif step == "begin":
            begun += gatherer.take_ready()
        elif found := gatherer.items():
            gone = dice.choice(found)
            gatherer.remove(gone)
            held.remove(gone.fence)
        waiting = [each.fence for each in gatherer.items()]
        running = [each.fence for run in begun for each in run.claimed]
        assert sorted(waiting + running) == sorted(held)
        assert 0 <= gatherer.room < size
        assert gatherer.open is None or gatherer.open.claimed
    for run in begun:
        assert run.has_units
        assert 1 <= len(run.claimed) <= size
        assert len(run.claimed) == 1 or not any(each.is_alone for each in run.claimed)
        fences = [each.fence for each in run.claimed]
        assert fences == sorted(fences)
