"""Calling a handler directly: what it may ask of its run is answered, and nothing else is needed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import trio

import worqr
from worqr import testing


async def test_a_handler_sees_what_it_is_given(mesh: worqr.Mesh) -> None:
    @mesh.task(name="look")
    async def look() -> tuple[Any, ...]:
        context = worqr.current()
        context.progress(0.5, "half")
        context.progress(message="more")
        context.extend(30)
        context.extend(timedelta(minutes=1))
        context.check_cancelled()
        return context.id, context.failures, context.attempt, context.meta, context.state, context.task

    with testing.context(id="x", failures=2, meta={"tenant": "a"}, state="pool", task=b"T1") as context:
        assert await look() == ("x", 2, 3, {"tenant": "a"}, "pool", b"T1")
    assert context.reported == [(0.5, "half"), (None, "more")]
    assert context.extended == [30, 60]
    assert context.cancel_reason is None


def test_there_is_a_context_inside_the_block_only() -> None:
    with testing.context() as context:
        assert worqr.current() is context
        with testing.context(id="y"):
            assert worqr.current().id == "y"
        assert worqr.current() is context
    with pytest.raises(LookupError):
        worqr.current()


def test_everything_has_a_value() -> None:
    with testing.context() as context:
        assert (context.id, context.queue, context.task) == ("test", "test", b"")
        assert (context.failures, context.stalls, context.timeouts, context.attempt) == (0, 0, 0, 1)
        assert (context.meta, context.state, context.deadline, context.scheduled_for) == ({}, None, None, None)
        assert not context.last_attempt
        assert abs(context.run_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert repr(context).endswith("of 'test', attempt 1>")
    with testing.context(failures=9) as context:
        assert context.last_attempt


def test_a_plain_function_may_look_whether_it_is_cancelled(mesh: worqr.Mesh) -> None:
    @mesh.task(name="look")
    def look() -> int:
        worqr.current().check_cancelled()
        return worqr.current().fence

    with testing.context() as context:
        assert look() == context.fence


async def test_in_a_thread_the_test_can_cancel_it() -> None:
    def look() -> str:
        worqr.current().check_cancelled()
        return worqr.current().id

    with testing.context(id="x"):
        assert await trio.to_thread.run_sync(look) == "x"
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.to_thread.run_sync(look, abandon_on_cancel=False)
        assert scope.cancelled_caught


async def test_child_tasks_see_it(nursery: trio.Nursery) -> None:
    seen: list[str] = []

    async def child() -> None:
        seen.append(worqr.current().id)

    with testing.context(id="x"):
        async with trio.open_nursery() as children:
            children.start_soon(child)
    assert seen == ["x"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"id": ""}, "a job's id"),
        ({"id": 7}, "a job's id"),
        ({"failures": -1}, "failures"),
        ({"failures": True}, "failures"),
        ({"meta": {"a": 1}}, "meta"),
        ({"task": "text"}, "bytes"),
    ],
)
def test_what_no_dispatch_could_have_sent_is_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words), testing.context(**bad):
        pytest.fail("it must not begin")


async def test_a_handler_of_a_list_has_its_calls(mesh: worqr.Mesh) -> None:
    @mesh.task(name="index", batch_size=10)
    async def index(pages: list[str]) -> list[str | Exception]:
        run = worqr.current()
        run.check_cancelled()
        run.progress(0.5)
        run.items[1].progress(1.0, "done")
        run.extend(30)
        with pytest.raises(worqr.UsageError, match=r"use worqr\.current\(\)\.items\[0\]\.id"):
            _ = run.id
        return [
            f"{page} as {call.id}, {call.attempt}, {call.meta['n']}"
            for page, call in zip(pages, run.items, strict=True)
        ]

    with testing.context(id="x", calls=2, failures=1, meta={"n": "7"}) as context:
        assert await index(["a", "b"]) == ["a as x-0, 2, 7", "b as x-1, 2, 7"]
    assert context.reported == [(0.5, ""), (0.5, ""), (1.0, "done")]
    assert context.extended == [30]
    with pytest.raises(worqr.UsageError, match="calls of context"), testing.context(calls=0):
        pass


class Approval(msgspec.Struct):
    by: str


@pytest.fixture
def fulfil(mesh: worqr.Mesh) -> Callable[..., Any]:
    @mesh.step
    async def charge(order: int) -> str:
        return f"payment {order}"

    @mesh.task(name="pack")
    async def pack(order: int, line: int) -> str: ...

    @mesh.workflow(name="fulfil")
    async def fulfil(order: int, lines: list[int]) -> str:
        payment = await charge(order)
        try:
            labels = await worqr.gather(*(pack.run(order, n) for n in lines))
        except worqr.JobFailed as error:
            return f"not packed: {error.error.type}"
        except worqr.JobCancelled as error:
            return f"cancelled: {error.reason}"
        answer = await worqr.wait_for("approved", Approval, timeout=timedelta(days=3))
        await worqr.sleep(timedelta(days=14))
        return f"{payment}, {labels}, {answer.by if answer else 'no answer'}"

    return fulfil


async def test_a_workflow_is_called_with_the_ends_of_its_waits(fulfil: Callable[..., Any]) -> None:
    with testing.context(events={"approved": [Approval("ada")]}, ends={"pack": ["label 1", "label 2"]}) as context:
        assert await fulfil(7, [1, 2]) == "payment 7, ['label 1', 'label 2'], ada"
    assert [call.args for call in context.started] == [(7, 1), (7, 2)]
    assert list(context.steps.values()) == ["payment 7"]
    with testing.context(ends={"pack": ["label 1"]}):
        assert await fulfil(7, [1]) == "payment 7, ['label 1'], no answer"  # the time limit of the wait is over


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ValueError("too heavy"), "not packed: ValueError"),
        (worqr.JobFailed("", worqr.RemoteError("Boom", "x", "")), "not packed: Boom"),
        (worqr.JobCancelled("", "by ada"), "cancelled: by ada"),
    ],
)
async def test_a_job_of_a_workflow_ends_as_the_test_says(
    fulfil: Callable[..., Any], error: Exception, answer: str
) -> None:
    with testing.context(ends={"pack": [error]}):
        assert await fulfil(7, [1]) == answer


def test_a_workflow_in_a_thread_is_called_alike(mesh: worqr.Mesh) -> None:
    @mesh.task(name="pack")
    async def pack(line: int) -> str: ...

    @mesh.workflow(name="both", runs_in="thread")
    def both() -> tuple[object, ...]:
        worqr.sleep_now(60)
        jobs = pack.run(1), pack.named("second").run(2)
        return (
            worqr.first_now(*jobs),
            worqr.first_now(pack.run(3), timeout=60),
            list(worqr.wait_for_now("n", int, timeout=1, many=True)),
        )

    with testing.context(ends={"second": ["b"]}, events={"n": [1, 2]}):
        assert both() == ((1, "b"), None, [1, 2])


async def test_what_a_workflow_waits_for_without_limit_must_be_given(
    mesh: worqr.Mesh, fulfil: Callable[..., Any]
) -> None:
    @mesh.workflow(name="patient")
    async def patient() -> None:
        await worqr.wait_for("approved", Approval)

    with testing.context(events={}), pytest.raises(worqr.UsageError, match=r"'wait for approved': .* context\(events="):
        await patient()
    with (
        testing.context(events={}),
        pytest.raises(worqr.UsageError, match=r"waits for ever.* context\(ends={function.name:"),
    ):
        await fulfil(7, [1])
    with pytest.raises(worqr.UsageError, match="list for each name"), testing.context(events={"approved": "ada"}):
        pass
    with testing.context(), pytest.raises(worqr.UsageError, match="no workflow"):
        await patient()
