"""Jobs as producers see them: dispatched, updated, looked at, followed, cancelled by their id."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.test_claims import lose
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.leaks import dump
from tests.support.servers import Server
from worqr import Duplicate, QueueFull, Update
from worqr.client.notifications import cancel_and_wait
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.ops import CancelReply

JOBS = ("{Q1}:job:*", "{Q1}:due", "{Q1}:twins:*")
GENERATED = re.compile(r"@\d{16}-(\w{22})")
FAILED = ("{Q1}:failed", "{Q1}:aside", "{Q1}:aside:*")


def now() -> datetime:
    return datetime.now(UTC)


async def state(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


# Dispatching


async def test_a_dispatch_answers_a_handle_with_the_id(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="report-7")
        assert (job.id, job.queue, job.outcome) == ("report-7", "Q1", "created")
        assert (await q.tasks(), await state(job)) == ([b"a"], "waiting")
        one, two = await q.dispatch(b"a"), await q.dispatch(b"a")
        assert one.id != two.id
        assert all(GENERATED.fullmatch(each.id) for each in (one, two))
        assert (await q.info()).waiting == 3
        await q.delete()


async def test_a_generated_id_cannot_be_guessed_and_sorts_by_time(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    """The number of the dispatch, which is nearly the time, and 128 random bits; whichever way it was dispatched."""
    f = mesh.task(name="Q1")(lambda: None)
    async with mesh.connect(), other.connect():
        found = [await q.dispatch(b"a") for _ in range(3) for q in (mesh.queue("Q1"), other.queue("Q1"))]
        found += [await f.dispatch(), await f.options(delay=60).dispatch()]
        found += await mesh.dispatch_many([f.call() for _ in range(20)])
        found.append(await trio.to_thread.run_sync(worqr.sync, f.dispatch))
        parsed = [GENERATED.fullmatch(job.id) for job in found]
        assert all(parsed)
        assert len({match[1] for match in parsed if match}) == len(found)
        assert sorted(job.id for job in found) == [job.id for job in found]
        for job in found:
            assert await state(other.queue("Q1").job(job.id)) in {"waiting", "scheduled"}
        await mesh.queue("Q1").delete()
    await trio.to_thread.run_sync(mesh.close)


async def test_a_handle_can_be_made_from_any_id_without_asking(mesh: worqr.Mesh) -> None:
    job = mesh.queue("Q1").job("nobody")
    assert (job.id, job.outcome, repr(job)) == ("nobody", None, "<Job 'nobody' of 'Q1'>")
    assert job == mesh.queue("Q1").job("nobody") != mesh.queue("Q2").job("nobody")
    assert len({job, mesh.queue("Q1").job("nobody"), mesh.queue("Q1").job("@17")}) == 2
    assert job != "nobody"
    with pytest.raises(worqr.UsageError, match="1 to 200 bytes"):
        mesh.queue("Q1").job("")
    async with mesh.connect():
        assert await state(job) == "gone"
        assert await job.cancel() == worqr.CancelCount(0, 0, 0)
        with pytest.raises(
            worqr.NoResult, match="no result of job 'nobody' of queue 'Q1' is stored: the id is unknown, or"
        ):
            await job.result()


@pytest.mark.parametrize("task", [b"", b"\x00worqr\x00x", bytes(range(256)), bytearray(b"a"), memoryview(b"m")])
async def test_a_jobs_payload_is_delivered_byte_for_byte(mesh: worqr.Mesh, task: bytes) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.dispatch(task, id="\x20ä{x}")
        assert await runs.wait(1) == [bytes(task)]
        assert (runs.contexts[0].id, runs.contexts[0].attempt) == (" ä{x}", 1)
        await eventually(q.running, [])


async def test_a_run_knows_what_its_dispatch_said(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.enqueue(b"raw")
        await runs.wait(1)
        run_at = now() + timedelta(milliseconds=60)
        retry = worqr.RetryPolicy(max_failures=7, min_backoff=0.5, max_backoff=9, jitter=False, retry_on=(OSError,))
        await q.dispatch(b"job", id="x", meta={"trace": "7\u20ac", "": ""}, run_at=run_at, retry=retry, timeout=1.5)
        options = (await q.read("x")).options
        await runs.wait(2)
        await eventually(q.running, [])
    raw, job = runs.contexts
    assert raw.options == {}
    known = {"max_failures": 7, "min_backoff": 0.5, "max_backoff": 9.0, "jitter": False, "timeout": 1.5}
    assert job.options == options == {**known, "retry_on": "OSError"}
    assert (raw.id, raw.meta, raw.scheduled_for) == (f"@{raw.fence}", {}, None)
    assert abs((raw.run_at - now()).total_seconds()) < 20
    assert (job.id, job.meta, job.scheduled_for) == ("x", {"trace": "7\u20ac", "": ""}, None)
    assert timedelta(0) <= job.run_at - run_at < timedelta(milliseconds=1)


async def test_jobs_and_tasks_share_the_order_of_the_queue_and_front_jumps_it(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"1")
        await q.dispatch(b"2")
        await q.enqueue(b"3")
        await q.dispatch(b"4", id="z")
        await q.dispatch(b"5", id="a")
        await q.dispatch(b"0", front=True)
        async with serving(mesh, "Q1", runs, room=1):
            assert await runs.wait(6) == [b"%d" % n for n in range(6)]
            await eventually(q.running, [])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": "@7"}, "begin with '@'"),
    ({"id": "x" * 201}, "1 to 200 bytes"),
    ({"id": "a\x00"}, "no control characters"),
    ({"id": 7}, "must be a str"),
    ({"delay": -1}, "delay"),
    ({"delay": "1"}, "delay"),
    ({"run_at": datetime(2030, 1, 1)}, "timezone"),
    ({"run_at": 0}, "run_at"),
    ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "not both"),
    ({"timeout": 0}, "timeout"),
    ({"retry": 3}, "RetryPolicy"),
    ({"update": "data"}, "Update"),
    ({"if_exists": "replace"}, "if_exists"),
    ({"meta": {"k": "x" * 4096}}, "4,096 bytes"),
    ({"meta": {"k": 1}}, "meta"),
    ({"max_length": 0}, "max_length"),
    ({"front": 1}, "front"),
    ({"unique_for": 5}, "unique_for"),
    ({"expires": -1}, "expires"),
    ({"result_ttl": float("nan")}, "result_ttl"),
    ({"replicas": "1"}, "replicas must be a whole number"),
    ({"runAt": 5}, "no option 'runAt'; did you mean 'run_at'"),
]


async def test_what_cannot_be_dispatched_is_refused_before_anything_is_sent(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        with spying(server, prefix) as spy:
            for options, words in REFUSED:
                with pytest.raises(worqr.UsageError, match=words):
                    await q.dispatch(b"a", **options)
            for task in ("text", None, 7, [b"a"]):
                with pytest.raises(worqr.UsageError, match="a task must be bytes"):
                    await q.dispatch(task)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            with pytest.raises(worqr.PayloadTooLarge):
                await q.dispatch(b"x" * (mesh.max_payload + 1))
            calls = spy.calls()
            assert calls["dispatch_jobs"] == calls["note_queues"] == 0, calls
    assert not [key for key in dump(server.client(), prefix) if b"{Q1}" in key]


async def test_a_bounded_dispatch_counts_all_that_is_queued(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await q.dispatch(b"b", delay=60)
        with pytest.raises(QueueFull, match="'Q1' is at its max_length"):
            await q.dispatch(b"c", id="c", max_length=2)
        assert await state(q.job("c")) == "gone"
        assert (await q.dispatch(b"c", id="c", max_length=3)).outcome == "created"
        assert (await q.dispatch(b"d", id="c", max_length=1)).outcome == "updated"  # one that is there takes no room
        with pytest.raises(QueueFull):
            await q.enqueue(b"e", max_length=3)
        assert (await q.info()).counts["enqueued"] == 3
        await q.delete()


async def test_a_hundred_dispatches_at_once_are_few_requests_and_each_gets_its_own_answer(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    outcomes: dict[int, Any] = {}

    async def dispatch(n: int) -> None:
        try:
            if n == 50:
                job = await q.dispatch(b"taken", id="taken", if_exists="raise")
            elif n == 51:
                job = await q.dispatch(b"skip", id="taken", if_exists="skip")
            elif n == 52:
                job = await q.dispatch(b"full", max_length=1)
            elif n % 2:
                job = await q.dispatch(b"%d" % n, id=f"job-{n}")
            else:
                job = await q.dispatch(b"%d" % n)
        except worqr.WorqrError as error:
            outcomes[n] = error
        else:
            outcomes[n] = job

    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"first", id="taken")
        with spying(server, prefix) as spy:
            async with trio.open_nursery() as nursery:
                for n in range(100):
                    nursery.start_soon(dispatch, n)
            assert spy.calls()["dispatch_jobs"] <= 5
        special = {n: outcomes.pop(n) for n in (50, 51, 52)}
        assert isinstance(special[50], Duplicate) and special[50].job == q.job("taken")
        assert special[51].outcome == "unchanged"
        assert isinstance(special[52], QueueFull)
        assert {job.outcome for job in outcomes.values()} == {"created"}
        assert len({job.id for job in outcomes.values()}) == 97
        stored = dump(server.client(), prefix)
        for n, job in outcomes.items():
            assert job.id == f"job-{n}" if n % 2 else job.id.startswith("@")
            assert stored[f"{prefix}:{{Q1}}:job:{job.id}".encode()].value[b"task"] == b"%d" % n
        assert await q.count() == 98
        await q.delete()


async def test_enqueues_and_dispatches_at_once_are_all_stored_in_their_order(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")

        async def put(n: int) -> None:
            await (q.dispatch(b"%d" % n) if n % 3 else q.enqueue(b"%d" % n))

        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(put, n)
        async with serving(mesh, "Q1", runs, room=10):
            assert sorted(await runs.wait(100)) == sorted(b"%d" % n for n in range(100))
            await eventually(q.running, [])
            assert (await q.info()).counts == {"enqueued": 100, "claimed": 100, "finished": 100}


# The id that is there already


async def record(server: Server, prefix: str, id: str) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = server.client().hgetall(f"{prefix}:{{Q1}}:job:{id}")
    return fields


async def test_a_second_dispatch_updates_the_one_job(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        first = await q.dispatch(b"v1", id="x", meta={"v": "1"})
        second = await q.dispatch(b"v2", id="x")
        assert (first.outcome, second.outcome, await q.count()) == ("created", "updated", 1)
        earlier = datetime(2020, 1, 1, tzinfo=UTC)
        assert (await q.dispatch(b"v3", id="x", run_at=earlier, update=Update(data=False))).outcome == "updated"
        assert (await q.dispatch(b"v4", id="x", update=Update(data=False, run_at=False))).outcome == "unchanged"
        assert (await q.info()).waiting == 1
        async with serving(mesh, "Q1", runs):
            assert await runs.wait(1) == [b"v2"]
            await eventually(q.running, [])
            assert runs.contexts[0].meta == {}
            assert (await q.info()).counts["finished"] == 1


@pytest.mark.parametrize(
    ("flag", "earlier", "later"),
    [(True, 10, 90), (False, 50, 50), ("if_later", 50, 90), ("if_earlier", 10, 50)],
)
async def test_an_update_moves_the_due_time_as_its_flag_says(
    mesh: worqr.Mesh, flag: Any, earlier: int, later: int
) -> None:
    start = now()
    async with mesh.connect():
        q = mesh.queue("Q1")
        for name, asked, wanted in (("x", 10, earlier), ("y", 90, later)):
            job = await q.dispatch(b"a", id=name, run_at=start + timedelta(seconds=50))
            await q.dispatch(b"a", id=name, run_at=start + timedelta(seconds=asked), update=Update(run_at=flag))
            status = await job.status()
            assert status.state == "scheduled" and status.run_at is not None
            assert abs((status.run_at - start).total_seconds() - wanted) < 0.01
        assert (await q.info()).scheduled == 2
        await q.delete()


async def test_an_update_brings_a_due_job_into_line_and_one_in_line_among_the_due(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", delay=60)
        await q.dispatch(b"b", id="x")
        assert await runs.wait(1) == [b"b"]
        await eventually(q.running, [])
    async with mesh.connect():
        job = await q.dispatch(b"a", id="x")
        await q.dispatch(b"b", id="x", delay=60)
        assert await state(job) == "scheduled"  # each handle of the one job means it
        info = await q.info()
        assert (info.waiting, info.scheduled) == (0, 1)
        await q.delete()


async def test_an_update_keeps_or_replaces_the_policy(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    policy = partial(worqr.RetryPolicy, max_stalls=9)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", retry=policy(max_failures=3), timeout=1)
        await q.dispatch(b"a", id="x", retry=policy(max_failures=4, jitter=False), timeout=2, result_ttl=5)
        kept = await record(server, prefix, "x")
        assert [kept[name] for name in (b"max_failures", b"jitter", b"timeout", b"result_ttl")] == [
            *(b"3", b"0"),  # what was not there is filled in
            *(b"1000", b"5000"),
        ]
        await q.dispatch(b"a", id="x", retry=policy(max_failures=5), timeout=3, update=Update(policy={"timeout"}))
        kept = await record(server, prefix, "x")
        assert [kept[name] for name in (b"max_failures", b"timeout")] == [b"3", b"3000"]
        await q.dispatch(b"a", id="x", retry=policy(max_failures=6), timeout=4, update=Update(policy=True))
        kept = await record(server, prefix, "x")
        assert [kept[name] for name in (b"max_failures", b"timeout")] == [b"6", b"4000"]
        await q.delete()


async def test_if_exists_cancel_replaces_a_run(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        first = await q.dispatch(b"1", id="x", result_ttl=60)
        await held.wait(1)
        second = await q.dispatch(b"2", id="x", if_exists="cancel", result_ttl=60)
        assert second.outcome == "blocked"
        with pytest.raises(worqr.JobCancelled, match="a later job with its id was dispatched"):
            await first.result(30)
        await held.wait(2)
        assert held.cancelled == [(b"1", "cancel")]
        held.gate.set()
        await second.result(30)
        assert (held.tasks, held.done) == ([b"1", b"2"], [b"2"])


async def test_if_exists_raise_refuses_and_names_the_job(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        due = await q.dispatch(b"due", id="due", delay=60)
        active = await q.dispatch(b"active", id="active")
        await held.wait(1)
        for job in (due, active):
            with pytest.raises(
                Duplicate, match=f"the id '{job.id}' is taken on queue 'Q1': nothing was stored"
            ) as caught:
                await q.dispatch(b"b", id=job.id, if_exists="raise")
            assert caught.value.job == job
            assert await state(caught.value.job) in {"scheduled", "active"}
            assert (await q.dispatch(b"b", id=job.id, if_exists="skip")).outcome == "unchanged"
        assert (await q.info()).blocked == 0
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"active"])
        await eventually(q.running, [])
        assert (await q.dispatch(b"again", id="active", if_exists="raise")).outcome == "created"
        await held.wait_for(lambda: held.done == [b"active", b"again"])
        await eventually(q.running, [])
        await q.delete()


async def test_unique_for_keeps_the_id_taken_past_the_end(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", unique_for=60)
        await runs.wait(1)
        await eventually(q.running, [])
        with pytest.raises(Duplicate):
            await q.dispatch(b"b", id="x", if_exists="raise")
        assert (await q.dispatch(b"b", id="x")).outcome == "unchanged"  # a throttle: nothing to update, nothing new
        assert (await q.dispatch(b"b", id="y", unique_for=0.05)).outcome == "created"
        await runs.wait(2)
        await eventually(lambda: outcome_of(q, "y"), "created")
        await runs.wait(3)
        await eventually(lambda: left(q), (0, 0, 0))


async def left(q: worqr.Queue) -> tuple[int, int, int]:
    info = await q.info()
    return info.waiting, info.blocked, info.running


async def outcome_of(q: worqr.Queue, id: str) -> str | None:
    return (await q.dispatch(b"c", id=id)).outcome


async def test_a_cancel_frees_an_id_that_is_taken(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", unique_for=60, delay=60)
        assert await job.cancel() == worqr.CancelCount(1, 0, 0)
        assert (await q.dispatch(b"b", id="x", if_exists="raise", delay=60)).outcome == "created"
        await q.delete()


# Unique enqueues


async def test_a_unique_enqueue_refuses_a_twin_while_it_waits_or_runs(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), other.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(b"a", unique=True) == 1
        for same in (q, other.queue("Q1")):
            with pytest.raises(Duplicate, match="taken on queue 'Q1'") as caught:
                await same.enqueue(b"a", unique=True)
            assert await state(caught.value.job) == "waiting"
        assert await q.enqueue(b"a") == 1  # one that does not ask to be unique is another task
        assert await other.queue("Q2").enqueue(b"a", unique=True) == 1  # and so is one in another queue
        await other.queue("Q2").delete()
        async with serving(mesh, "Q1", held):
            await held.wait(2)
            with pytest.raises(Duplicate) as caught:
                await q.enqueue(b"a", unique=True)
            assert await state(caught.value.job) == "active"
            held.gate.set()
            await held.wait_for(lambda: len(held.done) == 2)
            await eventually(q.running, [])
            assert await q.enqueue(b"a", unique=True) == 1
            await held.wait_for(lambda: len(held.done) == 3)
            await eventually(q.running, [])


async def test_a_unique_enqueue_of_several_is_all_or_none(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(b"a", b"b", b"c", unique=True) == 3
        with pytest.raises(Duplicate) as caught:
            await q.enqueue(b"d", b"b", b"e", unique=True)
        assert caught.value.job is not None
        with pytest.raises(Duplicate):
            await q.enqueue(b"d", b"e", b"d", unique=True)
        with pytest.raises(QueueFull):
            await q.enqueue(b"d", b"e", unique=True, max_length=4)
        assert (await q.tasks())[::-1] == [b"a", b"b", b"c"]
        assert await q.enqueue(b"0", b"1", unique=True, front=True, max_length=5) == 2
        assert sorted((await q.tasks())[-2:]) == [b"0", b"1"]
        with pytest.raises(worqr.UsageError, match="unique enqueue must fit one request"):
            await q.enqueue(*[b"%d" % n for n in range(1001)], unique=True)
        assert await q.count() == 5
        await q.delete()


async def test_of_unique_enqueues_side_by_side_one_is_stored(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    outcomes: list[object] = []

    async def put(q: worqr.Queue) -> None:
        try:
            outcomes.append(await q.enqueue(b"a", unique=True))
        except Duplicate:
            outcomes.append("duplicate")

    async with mesh.connect(), other.connect():
        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(put, (mesh, other)[n % 2].queue("Q1"))
        assert sorted(map(str, outcomes)) == ["1", *["duplicate"] * 39]
        assert await mesh.queue("Q1").count() == 1
        await mesh.queue("Q1").delete()


async def test_a_unique_task_that_is_cancelled_or_deleted_can_be_put_again(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"a", unique=True)
        assert await q.cancel_all() == worqr.CancelCount(1, 0, 0)
        assert await q.enqueue(b"a", unique=True) == 1
        await q.delete()
        assert await q.enqueue(b"a", unique=True) == 1
        await q.delete()


# Status, and following


async def test_the_states_of_a_job(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), mesh.join() as peer, trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        soon = now() + timedelta(seconds=60)
        job = await q.dispatch(b"a", id="x", run_at=soon, result_ttl=60)
        status = await job.status()
        assert (status.state, status.worker, status.since, status.failures) == ("scheduled", None, None, 0)
        assert status.run_at is not None and abs((status.run_at - soon).total_seconds()) < 0.01
        await q.dispatch(b"a", id="x")
        job = q.job("x")
        assert await state(job) == "waiting"
        await nursery.start(partial(peer.serve, "Q1", held))
        await held.wait(1)
        status = await job.status()
        assert (status.state, status.worker) == ("active", peer.id)
        assert status.since is not None and abs((now() - status.since).total_seconds()) < 20
        twin = await q.dispatch(b"b", id="x", result_ttl=60)
        assert (twin.outcome, await state(twin), await state(job)) == ("blocked", "blocked", "active")
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"a", b"b"])
        await eventually(partial(state, twin), "finished")
        assert await state(job) == "finished"
        assert await state(q.job("never")) == "gone"
        nursery.cancel_scope.cancel()


async def test_a_job_without_a_kept_result_is_gone_when_it_has_ended(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await runs.wait(1)
        await eventually(partial(state, job), "gone")
        job = await q.dispatch(b"a", id="x", delay=60)
        await job.cancel()
        assert await state(job) == "gone"


@pytest.mark.leaves(*FAILED)
async def test_a_failed_job_is_failed_as_long_as_its_record_is_kept(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Failure("no")

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await eventually(partial(state, job), "failed")
        await q.failed.drop("x")
        assert await state(job) == "gone"


async def test_a_job_is_followed_from_its_present_state_to_its_end(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held, seen = Held(), list[str]()
    async with mesh.connect(), serving(other, "Q1", held):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", delay=60, result_ttl=60)
        async with at_most(60), job.watch() as states:
            async for status in states:
                seen.append(status.state)
                if seen == ["scheduled"]:
                    await q.dispatch(b"a", id="x")  # and its time has come
                if status.state == "active":
                    held.gate.set()
        assert seen[0] == "scheduled" and seen[-2:] == ["active", "finished"]
        assert seen in (["scheduled", "active", "finished"], ["scheduled", "waiting", "active", "finished"])
        async with at_most(60), job.watch() as states:
            assert [status.state async for status in states] == ["finished"]
        async with at_most(60), q.job("nobody").watch() as states:
            assert [status.state async for status in states] == ["gone"]


async def test_each_follower_of_a_job_sees_its_end(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held, ends = Held(), list[str]()

    async def follow(job: worqr.Job[bytes], *, task_status: trio.TaskStatus[None]) -> None:
        async with job.watch() as states:
            task_status.started()
            async for status in states:
                last = status
        ends.append(last.state)

    async with mesh.connect(), serving(other, "Q1", held):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        async with at_most(60), trio.open_nursery() as nursery:
            for _ in range(20):
                await nursery.start(follow, job)
            await held.wait(1)
            await job.cancel(reason="enough")
        assert ends == ["cancelled"] * 20


async def test_a_follower_whose_messages_are_lost_looks_by_itself(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", delay=60)
        async with at_most(60), job.watch() as states:
            assert (await anext(states)).state == "scheduled"
            server.client().delete(f"{prefix}:{{Q1}}:job:x", f"{prefix}:{{Q1}}:due")  # nobody is told
            assert (await anext(states)).state == "gone"
            with pytest.raises(StopAsyncIteration):
                await anext(states)


# Cancelling by id


@pytest.mark.parametrize("options", [{}, {"delay": 60}], ids=["waiting", "scheduled"])
async def test_a_job_that_does_not_run_is_cancelled_at_once(mesh: worqr.Mesh, options: Any) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60, **options)
        assert await job.cancel(reason="no longer wanted", wait=30) == worqr.CancelCount(1, 0, 0)
        assert await job.cancel() == worqr.CancelCount(0, 0, 0)
        assert await state(job) == "cancelled"
        with pytest.raises(worqr.JobCancelled, match="no longer wanted") as caught:
            await job.result()
        assert caught.value.reason == "no longer wanted"
        await q.enqueue(b"b")
        async with serving(mesh, "Q1", runs):
            assert await runs.wait(1) == [b"b"]
            await eventually(q.running, [])
            assert (await q.info()).counts["cancelled"] == 1


async def test_a_running_job_is_cancelled_and_acknowledged(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held, unwound = Held(), trio.Event()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            unwound.set()
            raise ValueError("whatever it raises")

    async with mesh.connect(), serving(other, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        assert await job.cancel(reason="stop", wait=30) == worqr.CancelCount(0, 1, 1)
        assert unwound.is_set()
        assert held.cancelled == [(b"a", "cancel")]
        with pytest.raises(worqr.JobCancelled, match="stop"):
            await job.result(0)
        info = await q.info()
        assert (info.waiting, info.scheduled, info.running, info.counts["cancelled"]) == (0, 0, 0, 1)


async def test_a_server_that_goes_away_while_a_cancel_waits_does_not_undo_it(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_args: Any) -> None:
        raise worqr.Unavailable("away", sent=False)

    monkeypatch.setattr("worqr.client.notifications._ShardCancellation.refresh", away)
    ending, held = trio.Event(), Held()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await ending.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        with pytest.raises(worqr.Unavailable, match="away") as caught:
            await job.cancel(wait=30)
        ending.set()
        assert caught.value.sent is True
        with pytest.raises(worqr.JobCancelled):
            await job.result(30)


@pytest.mark.parametrize(("replies", "sent"), [(0, False), (1, None), (2, None)])
async def test_a_cancel_in_several_requests_that_breaks_off_says_that_some_may_have_effect(
    mesh: worqr.Mesh, replies: int, sent: bool | None
) -> None:
    """Each of two shards needs two requests."""
    left = replies

    async def step(_keys: QueueKeys, last: CancelReply | None) -> CancelReply:
        nonlocal left
        if not left:
            raise worqr.Unavailable("away", sent=False)
        left -= 1
        return CancelReply(last is None, 1, [], "1", "-")

    async with mesh.connect():
        shards = [QueueKeys(mesh.prefix, name) for name in ("one", "two")]
        with pytest.raises(worqr.Unavailable, match="away") as caught:
            await cancel_and_wait(client_of(mesh).link, shards, step, 0)
    assert caught.value.sent is sent


async def test_a_cancel_takes_the_run_and_its_blocked_twin(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        twin = await q.dispatch(b"b", id="x", result_ttl=60)
        assert await twin.cancel(wait=30, reason="both") == worqr.CancelCount(1, 1, 1)
        for each in (job, twin):
            with pytest.raises(worqr.JobCancelled, match="both"):
                await each.result(30)
        assert held.tasks == [b"a"]
        assert (await q.info()).counts["cancelled"] == 2


async def test_a_cancel_without_patience_tells_what_it_met(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        job = await mesh.queue("Q1").dispatch(b"a")
        await held.wait(1)
        assert await job.cancel() == worqr.CancelCount(0, 1, 0)
        await held.wait_for(lambda: bool(held.cancelled))
        await eventually(mesh.queue("Q1").running, [])


async def test_a_cancelled_id_can_be_dispatched_anew_while_its_run_unwinds(mesh: worqr.Mesh) -> None:
    held, runs, slow = Held(), Runs(), trio.Event()

    async def handler(task: bytes) -> None:
        if task == b"b":
            runs.begin(task)
            return
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        old = await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        await old.cancel()
        await held.wait_for(lambda: bool(held.cancelled))
        new = await q.dispatch(b"b", id="x", result_ttl=60)
        assert new.outcome == "blocked"
        assert runs.tasks == []
        slow.set()
        assert await new.result(30) is None
        with pytest.raises(worqr.JobCancelled):
            await old.result(0)
        assert runs.tasks == [b"b"]


SETTLES: dict[str, Callable[[worqr.Claim], Any]] = {
    "finish": lambda claim: claim.finish(b"r"),
    "stop": lambda claim: claim.stop(),
    "retry": lambda claim: claim.retry(delay=0),
    "retry later": lambda claim: claim.retry(delay=60),
    "fail": lambda claim: claim.fail("no"),
}


@pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)
async def test_a_cancel_by_id_that_was_asked_for_holds_however_the_run_ends(
    mesh: worqr.Mesh, settle: Callable[[worqr.Claim], Any]
) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        (claim,) = await claims.take(1)
        assert await job.cancel(reason="r") == worqr.CancelCount(0, 1, 0)
        await settle(claim)
        with pytest.raises(worqr.JobCancelled, match="r"):
            await job.result(0)
        info = await q.info()
        assert (info.waiting, info.scheduled, info.running, info.failed) == (0, 0, 0, 0)
        assert info.counts["cancelled"] == 1


async def test_a_cancel_by_id_of_what_was_retried_just_now_takes_it_out_of_the_due(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        (claim,) = await claims.take(1)
        await claim.retry(delay=60)
        assert await state(q.job(claim.id)) == "scheduled"
        assert (await q.job(claim.id).status()).failures == 1
        assert await q.job(claim.id).cancel() == worqr.CancelCount(1, 0, 0)
        info = await q.info()
        assert (info.waiting, info.scheduled) == (0, 0)


async def test_a_cancel_meets_jobs_that_come_back_at_any_moment(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    ran: Counter[str] = Counter()
    stopped: dict[str, int] = {}

    async def handler(task: bytes) -> None:
        ran[worqr.current().id] += 1
        await trio.sleep(random.random() / 100)
        raise worqr.Retry(delay=random.choice([0, 0, 0.005, 0.02]), counted=False)

    async def cancel(job: worqr.Job[bytes]) -> None:
        await trio.sleep(random.random())
        count = await job.cancel(wait=30)
        stopped[job.id] = ran[job.id]
        assert count in (worqr.CancelCount(1, 0, 0), worqr.CancelCount(0, 1, 1)), (job, count)

    async with mesh.connect(), serving(mesh, "Q1", handler, room=20), serving(other, "Q1", handler, room=20):
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(b"a", id=f"{n}", result_ttl=60) for n in range(100)]
        await until(lambda: len(ran) == 100)
        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(cancel, job)
        info = await q.info()
        assert (info.waiting, info.scheduled, info.blocked, info.running) == (0, 0, 0, 0)
        assert ran == stopped and min(ran.values()) >= 1
        assert {await state(job) for job in jobs} == {"cancelled"}


async def test_a_cancel_meets_the_sweep_of_the_worker(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    held, slow = Held(), Held()

    async def cancel(job: worqr.Job[bytes]) -> None:
        await trio.sleep(random.random() * 2)  # before, while, and after it is swept
        count = await job.cancel(wait=30)
        assert count.waiting + count.running == 1 and count.acknowledged == count.running

    async with mesh.connect(), serving(mesh, "Q1", held) as peer:
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(b"a", id=f"{n}", result_ttl=60) for n in range(60)]
        await held.wait(60)
        async with serving(other, "Q1", slow), trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(cancel, job)
            lose(server, prefix, peer.id)
        info = await q.info()
        assert (info.waiting, info.scheduled, info.blocked, info.running, info.failed) == (0, 0, 0, 0, 0)
        assert {await state(job) for job in jobs} == {"cancelled"}
        assert info.counts["cancelled"] == 60


async def test_a_deleted_queue_cancels_its_jobs(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(b"a", result_ttl=60, delay=delay) for delay in (0, 60)]
        await q.delete()
        for job in jobs:
            with pytest.raises(worqr.JobCancelled):
                await job.result(30)
        assert (await q.info()).scheduled == 0
