"""Calling a handler directly: what it may ask of its run is answered, and nothing else is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

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
