"""Typed functions that take a list, wherever they run: on both loops, in threads, in processes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import worqr
from tests.peer import list_jobs
from tests.peer.list_jobs import Page, outcomes
from tests.peer.tools import eventually
from tests.support.patience import PATIENCE
from tests.support.servers import Server

pytestmark = pytest.mark.one_server

ASIDE = tuple(
    f"{{{queue}}}:{what}" for queue in ("Q1", "index", "sizes", "fail_lists") for what in ("failed", "broken", "aside*")
)


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix)


@pytest.fixture
def children(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> worqr.Mesh:
    """The mesh whose functions run in processes."""
    monkeypatch.setattr(list_jobs.mesh, "url", server.url)
    monkeypatch.setattr(list_jobs.mesh, "prefix", prefix)
    monkeypatch.setenv(list_jobs.PARENT, str(os.getpid()))
    return list_jobs.mesh


def count_of(queue: worqr.Queue, *words: str) -> Callable[[], Awaitable[tuple[int, ...]]]:
    async def look() -> tuple[int, ...]:
        counts = (await queue.info()).counts
        return tuple(counts.get(word, 0) for word in words)

    return look


async def on_trio(pages: list[Page]) -> list[str | Exception]:
    await trio.lowlevel.checkpoint()
    return outcomes(pages)


async def on_asyncio(pages: list[Page]) -> list[str | Exception]:
    await asyncio.sleep(0)
    return outcomes(pages)


def in_thread(pages: list[Page]) -> list[str | Exception]:
    assert threading.current_thread() is not threading.main_thread()
    return outcomes(pages)


async def fail_lists(numbers: list[int]) -> None:
    if len(numbers) > 1:
        raise ValueError("too many")


def fail_lists_in_thread(numbers: list[int]) -> None:
    if len(numbers) > 1:
        raise ValueError("too many")


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread", "process"])
async def test_a_list_runs_in_each_place_and_its_neighbours_are_not_taken_along(
    mesh: worqr.Mesh, children: worqr.Mesh, place: Any, expects_left: Callable[..., None]
) -> None:
    """One call fails, one cannot be decoded, the others have their results."""
    expects_left(*ASIDE)
    index: Any = list_jobs.index
    if place == "process":
        mesh = children
    else:
        function: Any = {"loop": on_trio, "asyncio": on_asyncio, "thread": in_thread}[place]
        index = mesh.task(name="index", batch_size=10, runs_in=place, result_ttl=60, retry=list_jobs.ONCE)(function)
    async with mesh.connect():
        jobs = [await index.options(id=url[1:]).dispatch(Page(url)) for url in ("/a", "/bad")]
        await index.queue.enqueue(b'{"no": "page"}')
        jobs.append(await index.options(id="c").dispatch(Page("/c")))
    async with mesh.join(only=["index"], processes=1):
        assert await jobs[0].result(PATIENCE) == "/a of 3 as a"
        with pytest.raises(worqr.JobFailed, match="Failure: bad"):
            await jobs[1].result(PATIENCE)
        assert await jobs[2].result(PATIENCE) == "/c of 3 as c"
        await eventually(count_of(index.queue, "finished", "failed", "undecodable"), (2, 1, 1))


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread", "process"])
async def test_a_payload_that_cannot_be_decoded_is_undecodable_also_if_the_handler_raises(
    mesh: worqr.Mesh, children: worqr.Mesh, place: Any, expects_left: Callable[..., None]
) -> None:
    expects_left(*ASIDE)
    if place == "process":
        mesh = children
    else:
        function: Any = fail_lists_in_thread if place == "thread" else fail_lists
        mesh.task(name="fail_lists", batch_size=10, runs_in=place, retry=list_jobs.QUICK)(function)
    queue = mesh.queue("fail_lists")
    async with mesh.connect():
        await queue.enqueue(b"1", b"nonsense", b"3")
    async with mesh.join(only=["fail_lists"], processes=1):
        await eventually(count_of(queue, "undecodable", "retried", "finished"), (1, 2, 2))
        assert [each.failures for each in await queue.undecodable.list()] == [0]


async def test_a_list_without_one_payload_that_can_be_decoded_calls_nothing(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*ASIDE)
    called = False

    @mesh.task(name="Q1", batch_size=10)
    async def index(pages: list[Page]) -> None:
        nonlocal called
        called = True

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"{", b"}")
    async with mesh.join():
        await eventually(count_of(mesh.queue("Q1"), "undecodable"), (2,))
    assert not called


async def test_in_a_process_each_call_has_its_progress_result_and_attempt(
    children: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*ASIDE)
    async with children.connect():
        jobs = [await list_jobs.sizes.dispatch(n) for n in range(4)]
    async with children.join(processes=1, only=["sizes"]):
        found = [(await job.result(PATIENCE)).split() for job in (jobs[0], jobs[2])]
        assert [each[:2] for each in found] == [["4", "1"]] * 2
        for job in (jobs[1], jobs[3]):
            with pytest.raises(worqr.JobFailed, match="Failure: odd"):
                await job.result(PATIENCE)


@pytest.mark.parametrize("function", [list_jobs.die_once, list_jobs.hold_once])
async def test_a_process_that_dies_or_is_killed_by_the_timeout_retries_each_call_which_is_alone_next(
    children: worqr.Mesh, function: Any
) -> None:
    async with children.connect():
        await function.queue.enqueue(b"1", b"2", b"3")
    async with children.join(processes=1, only=[function.name]):
        await eventually(count_of(function.queue, "finished"), (3,), within=2 * PATIENCE)


@pytest.mark.parametrize("place", ["loop", "thread", "process"])
async def test_each_call_saves_for_itself(mesh: worqr.Mesh, children: worqr.Mesh, place: Any) -> None:
    async def keep(numbers: list[int]) -> list[str | Exception]:
        found: list[str | Exception] = []
        for item, number in zip(worqr.current().items, numbers, strict=True):
            if item.saved is None:
                await item.save(b"%d" % number)
                found.append(worqr.Retry(delay=0, counted=False))
            else:
                found.append(item.saved.decode())
        return found

    function: Any = {"loop": keep, "thread": list_jobs.keep_saved}.get(place)
    if place == "process":
        mesh, keeper = children, list_jobs.keep
    else:
        keeper = mesh.task(name="keep", batch_size=10, result_ttl=60, runs_in=place)(function)
    async with mesh.connect():
        jobs = [await keeper.dispatch(n) for n in (7, 8)]
    async with mesh.join(only=["keep"], processes=1):
        assert [await job.result(PATIENCE) for job in jobs] == ["7", "8"]


async def test_a_run_of_a_list_takes_no_steps(mesh: worqr.Mesh) -> None:
    refused: list[str] = []

    @mesh.task(name="Q1", batch_size=10)
    async def index(numbers: list[int]) -> None:
        with pytest.raises(worqr.UsageError) as error:
            await worqr.step("one", dict)
        refused.append(str(error.value))

    async with mesh.connect():
        await index.enqueue(1)
    async with mesh.join():
        await eventually(count_of(mesh.queue("Q1"), "finished"), (1,))
    assert "worqr.current().items[0].save(...)" in refused[0]


async def test_lanes_are_chosen_by_the_call(mesh: worqr.Mesh) -> None:
    seen: Counter[str] = Counter()

    @mesh.task(name="Q1", batch_size=10, lanes=worqr.Lanes(lambda page: page.url[:2]))
    async def index(pages: list[Page]) -> None:
        seen.update(item.lane for item in worqr.current().items)

    async with mesh.connect():
        for url in ("/a/1", "/a/2", "/b/1"):
            await index.dispatch(Page(url))
    async with mesh.join():
        await eventually(count_of(mesh.queue("Q1"), "finished"), (3,))
    assert seen == {"/a": 2, "/b": 1}


async def test_a_function_that_takes_a_list_is_called_with_one_here_and_now(mesh: worqr.Mesh) -> None:
    @mesh.task(batch_size=10)
    async def index(pages: list[Page]) -> list[int | Exception]:
        return [len(pages)] * len(pages)

    @mesh.task(batch_size=10)
    def count(pages: list[Page]) -> None:
        assert len(pages) == 2

    assert isinstance(index, worqr.AsyncListFunction)
    assert isinstance(count, worqr.SyncListFunction)
    assert await index([Page("/a"), Page("/b")]) == [2, 2]
    assert count([Page("/a"), Page("/b")]) is None  # type: ignore[func-returns-value]
    assert index.call(Page("/a")).args == (Page("/a"),)
    assert index.decode(b'{"url":"/a"}') == index.call(Page("/a"))


@pytest.mark.parametrize("batch_wait", [0, 0.05])
async def test_a_program_on_asyncio_serves_lists_of_raw_tasks(server: Server, prefix: str, batch_wait: float) -> None:
    seen: list[int] = []

    async def handler(tasks: list[bytes]) -> None:
        await asyncio.sleep(0)
        seen.append(len(tasks))

    async def main() -> None:
        mesh = worqr.Mesh(server.url, prefix=prefix)
        async with mesh.join() as peer:
            await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
            serving = asyncio.create_task(peer.serve_list("Q1", handler, batch_size=10, batch_wait=batch_wait))
            while (await mesh.queue("Q1").info()).counts.get("finished") != 3:
                await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.wait([serving])

    await trio.to_thread.run_sync(asyncio.run, main())
    assert seen == [3]
