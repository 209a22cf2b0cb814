"""One id never runs twice at once: a dispatch meanwhile is blocked, and merged with a run that comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import trio

import worqr
from tests.peer.test_claims import lose
from tests.peer.tools import Held, Runs, at_most, eventually, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import Failure, Retry, RetryPolicy, Update

FAILED = ("{Q1}:failed", "{Q1}:aside*")


async def state(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


async def blocked(q: worqr.Queue) -> int:
    return (await q.info()).blocked


class Twins(Runs):
    """A handler whose first run is held, and then ends as `first` says; all others return at once."""

    def __init__(self, first: BaseException | None = None) -> None:
        super().__init__()
        self.gate = trio.Event()
        self.first = first

    async def __call__(self, task: bytes) -> bytes:
        self.begin(task)
        if len(self.tasks) == 1:
            await self.gate.wait()
            if self.first is not None:
                raise self.first
        return task


async def test_whatever_is_dispatched_an_id_runs_once_at_a_time(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    now: dict[str, int] = {}
    runs, most = Runs(), 0

    async def handler(task: bytes) -> None:
        nonlocal most
        name = worqr.current().id
        now[name] = now.get(name, 0) + 1
        most = max(most, now[name])
        try:
            await trio.sleep(random.random() / 50)
            if (chance := random.random()) < 0.2:
                raise Retry(delay=chance / 10, counted=False)
            if chance < 0.3:
                raise Failure
            if chance < 0.4:
                raise ValueError
        finally:
            now[name] -= 1
            runs.begin(task)

    async def produce(q: worqr.Queue) -> None:
        while len(runs.tasks) <= 40:
            flags = Update(
                data=random.random() < 0.5,
                run_at=random.choice([True, False, "if_later", "if_earlier"]),
                counts=random.choice([True, False, None]),
            )
            delay = random.choice([0, 0, random.random() / 20])
            job = await q.dispatch(b"x", id=random.choice("abc"), delay=delay, update=flags)
            if random.random() < 0.1:
                await job.cancel()

    quick = RetryPolicy(min_backoff=0, max_failures=3)
    async with mesh.connect(), other.connect():
        q = mesh.queue("Q1")
        async with (
            serving(mesh, "Q1", handler, retry=quick, keep_failed=0, room=5),
            serving(other, "Q1", handler, retry=quick, keep_failed=0, room=5),
            trio.open_nursery() as nursery,
        ):
            for n in range(6):
                nursery.start_soon(produce, (mesh, other)[n % 2].queue("Q1"))

        async def idle() -> tuple[int, ...]:
            info = await q.info()
            return info.waiting, info.scheduled, info.blocked, info.running

        async with serving(mesh, "Q1", handler, retry=quick, keep_failed=0):
            await eventually(idle, (0, 0, 0, 0))
    assert most == 1


@pytest.mark.parametrize(
    "flags",
    [Update(run_at=True), Update(run_at=False), Update(run_at="if_later"), Update(run_at="if_earlier")],
    ids=["set", "keep", "if later", "if earlier"],
)
async def test_a_twin_runs_as_soon_as_the_run_has_finished(mesh: worqr.Mesh, flags: Update) -> None:
    """By default, without a delay, and whatever its flags say: there is nothing left to be merged with."""
    twins = Twins()
    async with mesh.connect(), serving(mesh, "Q1", twins):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x:y")
        await twins.wait(1)
        twin = await q.dispatch(b"b", id="x:y", update=flags)
        assert (twin.outcome, await state(twin), await blocked(q)) == ("blocked", "blocked", 1)
        await trio.sleep(0.1)
        assert twins.tasks == [b"a"]
        twins.gate.set()
        assert await twins.wait(2) == [b"a", b"b"]
        await eventually(q.running, [])
        assert twins.contexts[1].attempt == 1
        assert await blocked(q) == 0


async def test_a_twin_with_a_delay_waits_for_both(mesh: worqr.Mesh) -> None:
    twins = Twins()
    async with mesh.connect(), serving(mesh, "Q1", twins):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await twins.wait(1)
        start = trio.current_time()
        assert (await q.dispatch(b"b", id="x", delay=2)).outcome == "blocked"
        twins.gate.set()
        await twins.wait(2)
        assert 2 <= trio.current_time() - start < 20
        await eventually(q.running, [])


async def test_the_same_id_in_two_queues_is_two_jobs(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held), serving(mesh, "Q2", held):
        for name in ("Q1", "Q2"):
            assert (await mesh.queue(name).dispatch(name.encode(), id="x", result_ttl=60)).outcome == "created"
        await held.wait(2)
        held.gate.set()
        for name in ("Q1", "Q2"):
            assert await mesh.queue(name).job("x").result(30) is None


# Each way in which a run ends


@pytest.mark.parametrize(
    ("ends", "runs_next"),
    [
        (None, b"b"),
        (Failure("no"), b"b"),
        (ValueError("final"), b"b"),
        (Retry(delay=0), b"b"),
        (Retry(delay=3600), b"b"),
    ],
    ids=["finish", "failure", "last failure", "retry", "retry later"],
)
async def test_a_twin_runs_as_soon_as_the_run_ends_by_itself(
    mesh: worqr.Mesh, ends: BaseException | None, runs_next: bytes
) -> None:
    twins = Twins(ends)
    policy = RetryPolicy(fail_on=(ValueError,), min_backoff=3600, max_backoff=3600)
    async with mesh.connect(), serving(mesh, "Q1", twins, retry=policy, keep_failed=0, result_ttl=60):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", meta={"n": "1"})
        await twins.wait(1)
        twin = await q.dispatch(b"b", id="x", meta={"n": "2"})
        twins.gate.set()
        assert await twin.result(30) == runs_next
        assert (twins.tasks, twins.contexts[1].attempt) == ([b"a", runs_next], 1)
        assert twins.contexts[1].meta == {"n": "2"}
        info = await q.info()
        assert (info.waiting, info.scheduled, info.blocked) == (0, 0, 0)
        if isinstance(ends, Retry):
            assert await job.result(0) == runs_next  # it never ended: it was merged with its twin
        elif ends is None:
            assert await job.result(0) == b"a"
        else:
            with pytest.raises(worqr.JobFailed):
                await job.result(0)


async def test_a_twin_runs_as_soon_as_the_run_is_cancelled_by_its_peer_leaving(
    mesh: worqr.Mesh, other: worqr.Mesh
) -> None:
    held, runs = Held(), Runs()
    async with other.connect():
        q = other.queue("Q1")
        await q.dispatch(b"a", id="x")
        async with serving(mesh, "Q1", held, grace=0):
            await held.wait(1)
            await q.dispatch(b"b", id="x")
            assert await blocked(q) == 1
        assert held.cancelled == [(b"a", "leaving")]
        async with serving(other, "Q1", runs):
            assert await runs.wait(1) == [b"b"]
            await eventually(q.running, [])
        info = await q.info()
        assert (info.waiting, info.scheduled, info.blocked) == (0, 0, 0)


async def test_a_twin_runs_as_soon_as_the_run_has_timed_out(mesh: worqr.Mesh) -> None:
    twins = Twins()
    policy = RetryPolicy(min_backoff=3600, max_backoff=3600)
    async with mesh.connect(), serving(mesh, "Q1", twins, retry=policy, timeout=2 * PATIENCE):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await twins.wait(1)
        await q.dispatch(b"b", id="x")
        twins.contexts[0].extend(0.1)
        assert await twins.wait(2) == [b"a", b"b"]
        await eventually(q.running, [])
        assert twins.contexts[1].attempt == 1


@pytest.mark.parametrize("last", [False, True], ids=["given back", "set aside"])
async def test_a_twin_runs_as_soon_as_the_worker_of_the_run_is_swept(
    mesh: worqr.Mesh, server: Server, prefix: str, last: bool
) -> None:
    twins = Twins()
    policy = RetryPolicy(max_stalls=1 if last else 3)
    async with mesh.connect(), serving(mesh, "Q1", twins, retry=policy, keep_failed=0) as peer:
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await twins.wait(1)
        await q.dispatch(b"b", id="x", update=Update(counts=False))
        lose(server, prefix, peer.id)
        assert await twins.wait(2) == [b"a", b"b"]
        await eventually(q.running, [])
        assert twins.contexts[1].stalls == (0 if last else 1)
        info = await q.info()
        assert (info.waiting, info.scheduled, info.blocked, info.counts.get("failed", 0)) == (0, 0, 0, int(last))


async def test_a_twin_of_a_run_that_is_cancelled_is_cancelled_with_it_but_a_later_one_is_not(
    mesh: worqr.Mesh,
) -> None:
    held, slow, runs = Held(), trio.Event(), Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if task == b"a":
            try:
                await held(task)
            finally:
                with trio.CancelScope(shield=True):
                    await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        twin = await q.dispatch(b"b", id="x", result_ttl=60)
        assert await job.cancel() == worqr.CancelCount(1, 1, 0)
        third = await q.dispatch(b"c", id="x", result_ttl=60)
        assert third.outcome == "blocked"
        slow.set()
        assert await third.result(30) is None
        for each in (job, twin):
            with pytest.raises(worqr.JobCancelled):
                await each.result(0)
        assert runs.tasks == [b"a", b"c"]


# Merging, field by field


async def merged(
    mesh: worqr.Mesh, *twins: dict[str, Any], retry: Callable[[worqr.Claim], Any] | None = None
) -> tuple[worqr.Claim, worqr.Status]:
    """A job (a, due now, 1 failure) that runs, its twins' dispatches, a retry in an hour; and what is claimed next."""
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", meta={"n": "a"}, retry=RetryPolicy(max_failures=7))
        (claim,) = await claims.take(1)
        await claim.retry(delay=0)
        (claim,) = await claims.take(1)
        for twin in twins:
            assert (await q.dispatch(id="x", **twin)).outcome == "blocked"
        await (retry(claim) if retry else claim.retry(delay=3600))
        status = await job.status()
        assert status.state in {"scheduled", "waiting"}
        await q.dispatch(b"", id="x", update=Update(data=False))  # now
        async with at_most():
            (claim,) = await claims.take(1)
        await claim.finish()
        assert (await q.info()).counts["finished"] == 1
        return claim, status


def due_in(status: worqr.Status) -> float:
    """Seconds until it is due, roughly."""
    assert status.run_at is not None
    return (status.run_at - datetime.now(UTC)).total_seconds()


async def test_by_default_a_twin_replaces_all_but_the_policy(mesh: worqr.Mesh) -> None:
    claim, status = await merged(mesh, {"task": b"b", "retry": RetryPolicy(max_failures=9, max_stalls=9)})
    assert (claim.task, claim.meta, claim.failures) == (b"b", {}, 0)
    assert (claim._run.policy.max_failures, claim._run.policy.max_stalls) == (7, 9)
    assert status.state == "waiting"


async def test_a_twin_that_keeps_everything_changes_nothing(mesh: worqr.Mesh) -> None:
    claim, status = await merged(mesh, {"task": b"b", "meta": {"n": "b"}, "update": Update(data=False, run_at=False)})
    assert (claim.task, claim.meta, claim.failures) == (b"a", {"n": "a"}, 2)
    assert status.state == "scheduled" and abs(due_in(status) - 3600) < 10


@pytest.mark.parametrize(
    ("flag", "asked", "wanted"),
    [
        (True, 60, 60),
        (True, 7200, 7200),
        (False, 60, 3600),
        (False, 7200, 3600),
        ("if_later", 60, 3600),
        ("if_later", 7200, 7200),
        ("if_earlier", 60, 60),
        ("if_earlier", 7200, 3600),
    ],
)
async def test_a_twin_moves_the_due_time_as_its_flag_says(
    mesh: worqr.Mesh, flag: Any, asked: float, wanted: float
) -> None:
    _, status = await merged(mesh, {"task": b"b", "delay": asked, "update": Update(run_at=flag)})
    assert status.state == "scheduled" and abs(due_in(status) - wanted) < 10


@pytest.mark.parametrize(("counts", "failures"), [(True, 0), (False, 2), (None, 0)])
async def test_a_twin_resets_the_counts_as_its_flag_says(mesh: worqr.Mesh, counts: bool | None, failures: int) -> None:
    claim, _ = await merged(mesh, {"task": b"b", "update": Update(counts=counts)})
    assert (claim.task, claim.failures) == (b"b", failures)


async def test_two_dispatches_onto_a_blocked_job_merge_field_by_field(mesh: worqr.Mesh) -> None:
    keep = Update(data=False, run_at=False, counts=False)
    claim, status = await merged(
        mesh,
        {"task": b"b", "meta": {"n": "b"}, "update": Update(run_at=False, counts=False)},
        {"task": b"c", "delay": 60, "update": Update(data=False, counts=False)},
        {"task": b"d", "update": keep, "retry": RetryPolicy(max_failures=8, jitter=False)},
        {
            "task": b"e",
            "update": Update(data=False, run_at=False, policy={"max_failures"}),
            "retry": RetryPolicy(max_failures=9),
        },
        {"task": b"f", "update": keep},
    )
    assert (claim.task, claim.meta, claim.failures) == (b"b", {"n": "b"}, 2)
    assert (claim._run.policy.max_failures, claim._run.policy.jitter) == (9, False)
    assert abs(due_in(status) - 60) < 10


async def test_a_later_dispatch_onto_a_blocked_job_says_what_the_first_did_not(mesh: worqr.Mesh) -> None:
    keep = Update(data=False, run_at=False, counts=False)
    claim, status = await merged(mesh, {"task": b"b", "update": keep}, {"task": b"c", "delay": 60, "meta": {"n": "c"}})
    assert (claim.task, claim.meta, claim.failures) == (b"c", {"n": "c"}, 0)
    assert abs(due_in(status) - 60) < 10


async def test_a_twin_is_merged_with_a_run_that_is_stopped(mesh: worqr.Mesh) -> None:
    claim, status = await merged(mesh, {"task": b"b", "delay": 60}, retry=lambda claim: claim.stop())
    assert claim.task == b"b"
    assert status.state == "scheduled" and abs(due_in(status) - 60) < 10
