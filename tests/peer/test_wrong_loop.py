"""A handler on the wrong event loop fails for good, and its error says where to run it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sniffio
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.support.patience import PATIENCE
from worqr.peer.executors.offloaded import wrong_loop_failure


async def sleep() -> None:
    await asyncio.sleep(0.01)


async def yield_once() -> None:
    await asyncio.sleep(0)


async def time_out() -> None:
    async with asyncio.timeout(1):
        await asyncio.sleep(0.01)


async def await_a_future(loop: asyncio.AbstractEventLoop | None = None) -> None:
    future = asyncio.Future[None](loop=asyncio.new_event_loop() if loop is None else loop)
    try:
        await future
    finally:
        future.get_loop().close()


async def wait_for_an_event() -> None:
    await asyncio.Event().wait()


async def in_a_nursery() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)


async def wrapped() -> None:
    try:
        await sleep()
    except RuntimeError as error:
        raise ConnectionError("the driver could not connect") from error


async def unknown_library() -> None:
    raise sniffio.AsyncLibraryNotFoundError("unknown async library, or not in async context")


NEED_ASYNCIO = [
    *(sleep, yield_once, time_out, await_a_future, wait_for_an_event, in_a_nursery, wrapped, unknown_library),
]


@pytest.mark.parametrize("need", NEED_ASYNCIO, ids=lambda need: need.__name__)
async def test_what_needs_asyncio_is_recognised_on_trio(need: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one differs
        await need()
    failure = wrong_loop_failure(caught.value, "asyncio", "the remedy")
    assert isinstance(failure, worqr.Failure)
    assert str(failure).endswith("(the remedy)")
    assert caught.value.__notes__ == ["the remedy"]
    assert wrong_loop_failure(caught.value, "Trio", "another") is None or need is unknown_library


async def nap_in_trio() -> None:
    await trio.sleep(0.01)


async def move_on() -> None:
    with trio.move_on_after(1):  # noqa: ASYNC100
        pass


async def nursery() -> None:
    async with trio.open_nursery():
        pass


async def checkpoint() -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("need", [nap_in_trio, move_on, nursery, checkpoint], ids=lambda need: need.__name__)
def test_what_needs_trio_is_recognised_on_asyncio(need: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await need()
        assert isinstance(wrong_loop_failure(caught.value, "Trio", "the remedy"), worqr.Failure)
        assert wrong_loop_failure(caught.value, "asyncio", "the remedy") is None

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the disk is full"),
        ConnectionError("no running event loop"),  # of a kind that no library raises for this
        worqr.Retry("no running event loop"),
        ExceptionGroup("several", [ValueError("1"), RuntimeError("2")]),
    ],
    ids=str,
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert wrong_loop_failure(error, "asyncio", "the remedy") is None
    assert not hasattr(error, "__notes__")


def test_an_error_that_was_handled_meanwhile_is_no_cause() -> None:
    try:
        try:
            raise RuntimeError("no running event loop")
        except RuntimeError:
            raise ConnectionError("connection refused")  # noqa: B904 - the point of the test
    except ConnectionError as error:
        assert wrong_loop_failure(error, "asyncio", "the remedy") is None


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert wrong_loop_failure(one, "asyncio", "the remedy") is None


# In a peer


async def failed_once(mesh: worqr.Mesh, fn: worqr.Function[[], Any], expects_left: Callable[..., None]) -> str:
    """The text of the error of the only run of a function."""
    expects_left("{Q1}:failed", "{Q1}:aside*", "{Q1}:result:*")
    async with mesh.join():
        job = await fn.options(result_ttl=60).dispatch()
        with pytest.raises(worqr.JobFailed) as caught:
            await job.result(PATIENCE)
        (failed,) = await mesh.queue("Q1").failed.list()
        assert failed.failures == 1
        return f"{caught.value.error.message}\n{failed.error.traceback if failed.error else ''}"


async def test_a_handler_that_needs_asyncio_fails_at_the_first_try(
    new_mesh: NewMesh, expects_left: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    mesh = new_mesh()

    @mesh.task(name="Q1")
    async def fetch() -> None:
        await asyncio.sleep(0.01)  # the line to be seen

    text = await failed_once(mesh, fetch, expects_left)
    message, _, traceback = text.partition("\n")
    assert message.startswith("RuntimeError: no running event loop (this handler runs on a Trio event loop")
    assert 'runs_in="asyncio"' in message
    assert 'Mesh(runs_in="asyncio")' in message
    assert "# the line to be seen" in traceback
    assert 'Mesh(runs_in="asyncio")' in caplog.text


async def test_a_handler_that_needs_trio_fails_at_the_first_try(
    new_mesh: NewMesh, expects_left: Callable[..., None]
) -> None:
    mesh = new_mesh()

    @mesh.task(name="Q1", runs_in="asyncio")
    async def nap() -> None:
        await trio.sleep(0.01)

    text = await failed_once(mesh, nap, expects_left)
    assert text.startswith(
        "RuntimeError: must be called from async context (this handler runs on an asyncio event loop"
    )
    assert 'declare it with runs_in="loop"' in text


async def test_middleware_that_needs_asyncio_says_that_it_runs_on_trio(
    new_mesh: NewMesh, expects_left: Callable[..., None]
) -> None:
    async def middleware(context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
        await asyncio.sleep(0.01)
        return await call_next()

    mesh = new_mesh(middleware=[middleware])

    @mesh.task(name="Q1", runs_in="asyncio")
    async def fetch() -> None: ...

    text = await failed_once(mesh, fetch, expects_left)
    assert text.startswith("RuntimeError: no running event loop (middleware runs on a Trio event loop")


async def test_middleware_sees_the_failure_of_a_handler(new_mesh: NewMesh, expects_left: Callable[..., None]) -> None:
    seen: list[BaseException] = []

    async def middleware(context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
        try:
            return await call_next()
        except Exception as error:
            seen.append(error)
            raise

    mesh = new_mesh(middleware=[middleware])

    @mesh.task(name="Q1")
    async def fetch() -> None:
        await asyncio.sleep(0.01)

    text = await failed_once(mesh, fetch, expects_left)
    assert "(this handler runs on a Trio event loop" in text
    assert [type(each) for each in seen] == [worqr.Failure]
