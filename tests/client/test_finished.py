"""Kept jobs and tags, as users see them: listed, found, run again, cancelled and forgotten, on one shard and several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import eventually, serving
from tests.support.servers import Server
from worqr.client.finished import UNREACHED
from worqr.client.stored_schedules import call_with
from worqr.keys import RegistryKeys

pytestmark = pytest.mark.leaves("*")
KEEP = worqr.Keep(jobs=100, days=1)


@pytest.fixture
async def linked(mesh: worqr.Mesh) -> AsyncIterator[worqr.Mesh]:
    async with mesh.connect():
        yield mesh


async def handler(task: bytes) -> str:
    if task == b"fail":
        raise worqr.Failure("no such address")
    return f"sent {task.decode()}"


async def ended(mesh: worqr.Mesh, *tasks: bytes, shards: int = 1, **options: Any) -> worqr.Queue:
    """The queue Q1, on which jobs with these payloads have ended; their tags are their payloads and "all"."""
    queue = mesh.queue("Q1", shards=shards)
    async with serving(mesh, "Q1", handler):
        for task in tasks:
            job = await queue.dispatch(task, keep=KEEP, tags={"all", task.decode()}, **options)
            await eventually(lambda job=job: is_over(job), True)
    return queue


async def is_over(job: worqr.Job[bytes]) -> bool:
    return (await job.status()).state in {"finished", "failed"}


def payloads(found: list[worqr.TaskInfo]) -> list[bytes]:
    return [each.task for each in found]


@pytest.mark.parametrize("shards", [1, 3])
async def test_what_has_ended_is_found(linked: worqr.Mesh, shards: int) -> None:
    before = datetime.now(UTC) - timedelta(minutes=5)
    queue = await ended(linked, b"a", b"b", b"fail", shards=shards)
    finished = await queue.jobs(state="finished")
    assert {*payloads(finished)} == {b"a", b"b"}
    [found] = await queue.jobs(tag="a")
    assert (found.state, found.tags, found.attempts) == ("finished", ("a", "all"), 1)
    assert found.ended is not None and found.ended > before and found.seconds is not None and found.seconds < 60
    [failed] = await queue.jobs(state="failed")
    assert failed.error is not None and failed.error.message == "no such address"
    assert len(await queue.jobs(state="ended", since=before)) == 3
    assert await queue.jobs(state="ended", since=datetime.now(UTC) + timedelta(minutes=5)) == []
    assert await queue.count_tagged("all") == {"finished": 2, "failed": 1}
    pages, after = [], ""
    while page := await queue.jobs(tag="all", limit=1, after=after):
        pages, after = [*pages, *page], page[-1].cursor
    assert {*payloads(pages)} == {b"a", b"b", b"fail"} and len(pages) == 3
    assert (await queue.info()).kept == 3 and (await queue.info()).kept_bytes > 1500


async def test_no_job_ends_before_it_began(linked: worqr.Mesh) -> None:
    """An end is stored in whole ms, and what came before it in the same ms in microseconds."""
    queue = linked.queue("Q1")
    async with serving(linked, "Q1", handler):
        for n in range(30):
            await queue.dispatch(b"a", id=f"job-{n}", keep=KEEP, result_ttl=60)
            await queue.job(f"job-{n}").result()
    for found in await queue.jobs(state="finished"):
        assert found.since and found.ended and found.since <= found.ended
        record = await queue.read(found.id or "")
        for end in record.ended:
            assert record.dispatched and end.started and end.at and record.dispatched <= end.started <= end.at


async def test_a_job_that_is_kept_is_known_by_its_id(linked: worqr.Mesh) -> None:
    queue = await ended(linked, b"a", id="order-4711", meta={"who": "Ada"})
    assert (await queue.job("order-4711").status()).state == "finished"
    assert {*await linked.find("order-4711")} == {"Q1"}
    record = await queue.read("order-4711")
    assert (record.status.state, record.task, record.tags, record.meta) == (
        "finished",
        b"a",
        ("a", "all"),
        {"who": "Ada"},
    )
    [end] = record.ended
    assert end.at is not None and end.started is not None and end.worker
    assert await queue.payload("order-4711") == b"a"
    assert record.kept is not None
    again = await queue.run_again(record.kept)
    assert again.id != "order-4711"
    assert payloads(await queue.jobs(tag="a", state="waiting")) == [b"a"]
    assert await queue.forget(record.kept) == 1
    assert (await queue.read("order-4711")).status.state == "gone"
    with pytest.raises(worqr.UsageError, match="keeps no such job"):
        await queue.run_again(record.kept)


async def test_what_has_ended_is_found_after_its_queue_was_deleted(
    linked: worqr.Mesh, other: worqr.Mesh, server: Server
) -> None:
    await (await ended(linked, *(b"%d" % n for n in range(9)), shards=3)).delete()
    async with other.connect():
        queue = other.queue("Q1")
        left = await queue.jobs(state="ended")
        assert len(left) == 9
        assert await queue.forget(*(job.kept for job in left)) == 9
        await queue.delete()
    assert server.client().hgetall(RegistryKeys(linked.prefix).shards) == {}


@pytest.mark.parametrize("shards", [1, 3])
async def test_all_jobs_of_a_tag_are_cancelled_counted_retried_and_forgotten(linked: worqr.Mesh, shards: int) -> None:
    queue = await ended(linked, b"a", b"fail", shards=shards)
    assert await queue.retry_tagged("all") == 1
    for n in range(5):
        await queue.dispatch(b"later", delay=100, tags={"all"} if n else {"other"})
    assert await queue.cancel_tagged("all", reason="enough") == worqr.CancelCount(5, 0, 0)
    assert await queue.count_tagged("all") == {"finished": 1, "cancelled": 1}
    forgotten = await linked.forget_tagged("all")
    assert (forgotten.kept, forgotten.waiting, forgotten.unreached) == (2, 0, UNREACHED)
    assert await queue.jobs(tag="all") == [] and await queue.jobs(state="ended") == []
    assert payloads(await queue.jobs(state="scheduled")) == [b"later"]
    assert {"tag_cancelled", "tag_retried", "tag_forgotten"} <= {entry.kind for entry in await linked.log()}


async def test_what_is_left_after_the_time_of_a_tag_is_named_as_unreached(linked: worqr.Mesh, server: Server) -> None:
    queue = await ended(linked, b"fail")
    assert server.client().delete(queue._keys.tagged("all")) == 1  # pyright: ignore[reportPrivateUsage]
    forgotten = await linked.forget_tagged("all")
    assert (forgotten.dead_letters, await queue.failed.count()) == (0, 1)
    assert any("dead letters of a tag" in place for place in forgotten.unreached)


async def test_to_forget_an_ended_job_leaves_a_later_one_of_its_id(linked: worqr.Mesh) -> None:
    queue = await ended(linked, b"a", b"fail", id="report")
    later = await queue.dispatch(b"of another customer", id="report", delay=100, tags={"other"})
    forgotten = await linked.forget_tagged("all")
    assert (forgotten.kept, forgotten.dead_letters, forgotten.waiting) == (2, 1, 0)
    assert (await later.status()).state == "scheduled"
    assert payloads(await queue.jobs(tag="other")) == [b"of another customer"]


async def test_nothing_is_kept_of_the_runs_of_a_schedule_that_were_forgotten(linked: worqr.Mesh) -> None:
    call = call_with(linked.call("Q1", b"of a customer"), tags={"a"})
    await linked.schedule("yearly", call, cron="0 0 1 1 *")
    handle, queue = linked.schedule_handle("yearly"), linked.queue("Q1")

    async def sleep(task: bytes) -> None:
        await trio.sleep(60)

    await handle.run_now()
    forgotten = await linked.forget_tagged("a")
    assert forgotten.waiting == 1
    assert any("schedules" in place for place in forgotten.unreached)
    assert await handle.info() is not None
    async with serving(linked, "Q1", sleep):
        job = await handle.run_now()
        await eventually(lambda: queue.count_tagged("a"), {"active": 1})
        assert (await linked.forget_tagged("a")).running == 1
        await eventually(lambda: is_gone(job), True)
    assert await queue.jobs(state="ended") == []


async def is_gone(job: worqr.Job[bytes]) -> bool:
    return (await job.status()).state not in {"waiting", "active"}


async def test_tags_of_a_function_come_from_its_arguments(linked: worqr.Mesh) -> None:
    @linked.task(keep=KEEP, tags=lambda order, customer: {f"customer:{customer}"})
    def confirm(order: int, customer: str) -> None: ...

    await confirm.options(tags={"order:4711"}).dispatch(4711, customer="acme")
    await confirm.enqueue(4712, "acme")  # also a job, because a plain task has no tags
    found = await confirm.queue.jobs(tag="customer:acme")
    assert [each.tags for each in found] == [("customer:acme",), ("customer:acme", "order:4711")]
    async with linked.join():
        await eventually(lambda: confirm.queue.count_tagged("customer:acme"), {"finished": 2})


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (lambda order: 1 / 0, "tags= of .* raised ZeroDivisionError"),
        (lambda order: "acme", "must be a collection"),
        (lambda order: None, "must be a collection"),
        (lambda order: (str(n) for n in iter(int, 1)), None),
        (lambda order: {str(n) for n in range(9)}, "more than 8 tags"),
        (lambda order: {"x" * 101}, "1 to 100 bytes"),
        (lambda order: {"a\nb"}, "control characters"),
        (lambda order: {7}, "a tag must be a str"),
    ],
)
async def test_a_wrong_answer_of_tags_is_an_error_at_the_dispatch(
    linked: worqr.Mesh, tags: Any, message: str | None
) -> None:
    @linked.task(tags=tags, name="confirm")
    def confirm(order: int) -> None: ...

    if message is None:  # an endless generator of one tag
        await confirm.dispatch(1)
        return
    with pytest.raises(worqr.UsageError, match=message):
        await confirm.dispatch(1)
    assert await confirm.queue.count() == 0


@pytest.mark.parametrize("options", [{"jobs": -1}, {"days": 0}, {"days": 4000}, {"bytes": 10}, {"jobs": "many"}])
def test_a_bound_that_cannot_be_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(worqr.UsageError, match="Keep"):
        worqr.Keep(**options)


async def test_wrong_arguments_are_named(linked: worqr.Mesh) -> None:
    queue = linked.queue("Q1")
    with pytest.raises(worqr.UsageError, match="since= is for jobs that have ended"):
        await queue.jobs(since=datetime.now(UTC))
    with pytest.raises(worqr.UsageError, match="keep must be a worqr.Keep"):
        await queue.dispatch(b"x", keep=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(worqr.UsageError, match="a claim is"):
        await queue.forget("nonsense")


async def test_a_result_in_a_queue_that_the_mesh_has_forgotten_is_reached_by_its_queue(
    linked: worqr.Mesh, server: Server
) -> None:
    queue = linked.queue("Q1")

    async def run(task: bytes) -> None: ...

    async with serving(linked, "Q1", run):
        job = await queue.dispatch(b"a", tags={"a"}, result_ttl=3600)
        await job.result(timeout=60)
    server.client().zrem(RegistryKeys(linked.prefix).queues, "Q1")  # as the leader does after an hour
    assert any("results" in place for place in (await linked.forget_tagged("a")).unreached)
    assert (await queue.forget_tagged("a")).results == 1
