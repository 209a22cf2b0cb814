"""Mistakes that show when somebody waits for a result: not kept, not JSON, not the same function on both sides."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import worqr
from tests.mistakes.conftest import Ended, NewMesh

pytestmark = pytest.mark.leaves("{mails.send}:failed", "{mails.send}:broken", "{mails.send}:aside*")


@pytest.fixture
def app(new_mesh: NewMesh) -> worqr.Mesh:
    """The application of the worker."""
    return new_mesh()


@pytest.fixture
def producer(new_mesh: NewMesh) -> worqr.Mesh:
    """Another application with the same prefix."""
    return new_mesh()


async def until_ended(job: worqr.Job[Any]) -> None:
    async with job.watch() as states:
        async for _ in states:
            pass


async def failure_of(app: worqr.Mesh, producer: worqr.Mesh, function: Any, *args: Any) -> str:
    """What the producer's `result()` raises for a call that the app has run."""
    async with producer.connect():
        job = await function.dispatch(*args)
        async with app.join():
            await until_ended(job)
            with pytest.raises(worqr.JobFailed) as error:
                await job.result()
    return str(error.value)


async def test_a_result_that_nobody_keeps(mesh: worqr.Mesh) -> None:
    send = mesh.task(name="mails.send")(lambda: 7)
    async with mesh.connect():
        job = await send.dispatch()
        with pytest.raises(
            worqr.NoResult, match=r"Set result_ttl= on the function, on the handler, or at the dispatch"
        ):
            await job.result()
        await job.cancel()


async def test_a_failed_job_whose_result_nobody_keeps(app: worqr.Mesh, producer: worqr.Mesh) -> None:
    def fails() -> None:
        raise worqr.Failure("no such address")

    app.task(name="mails.send")(fails)
    said = await failure_of(app, producer, producer.task(name="mails.send")(fails))
    assert "failed: worqr.Failure: no such address" in said


async def test_a_result_that_is_not_json(app: worqr.Mesh, producer: worqr.Mesh) -> None:
    app.task(name="mails.send", result_ttl=60)(lambda: object())
    said = await failure_of(app, producer, producer.task(name="mails.send")(lambda: object()))
    assert "its result cannot be kept: object is neither bytes nor JSON" in said


async def test_two_applications_with_one_prefix_and_another_signature(app: worqr.Mesh, producer: worqr.Mesh) -> None:
    def theirs(to: str) -> None: ...

    def ours(to: int) -> None: ...

    app.task(name="mails.send")(theirs)
    said = await failure_of(app, producer, producer.task(name="mails.send")(ours), 7)
    assert "mails.send: ValidationError: Expected `str`, got `int` - at `$.to`" in said
    assert "Compare the signature of the function in the program that enqueued it" in said


async def test_a_new_required_parameter_while_old_calls_wait(app: worqr.Mesh, producer: worqr.Mesh) -> None:
    def old(to: str) -> None: ...

    def new(to: str, subject: str) -> None: ...

    app.task(name="mails.send")(new)
    said = await failure_of(app, producer, producer.task(name="mails.send")(old), "ada")
    assert "Object missing required field `subject`" in said
    assert "Give a new parameter a default, so that calls from older programs still run" in said


async def test_a_new_default_and_a_parameter_that_is_gone(app: worqr.Mesh, producer: worqr.Mesh) -> None:
    def old(to: str, gone: int) -> str: ...  # type: ignore[empty-body]

    def new(to: str, subject: str = "hi") -> str:
        return f"{subject}, {to}"

    app.task(name="mails.send", result_ttl=60)(new)
    function = producer.task(name="mails.send", result_ttl=60)(old)
    async with producer.connect():
        job = await function.dispatch("ada", 7)
        async with app.join():
            assert await job.result() == "hi, ada"


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (
            pickle.dumps({"to": "ada"}),
            "DecodeError: JSON is malformed: invalid character (byte 0). A function takes JSON: enqueue",
        ),
        (b"", "A function takes JSON: enqueue calls of it, or an object with its arguments by name"),
        (b'["ada"]', "ValidationError: Expected `object`, got `array`. Compare the signature of the function"),
    ],
    ids=["pickled", "empty", "a list"],
)
async def test_a_payload_that_no_call_has_made(app: worqr.Mesh, producer: worqr.Mesh, payload: bytes, why: str) -> None:
    app.task(name="mails.send")(lambda to: None)
    async with producer.connect():
        job = await producer.queue("mails.send").dispatch(payload)
        async with app.join():
            await until_ended(job)
            with pytest.raises(worqr.JobFailed, match=re.escape(why)):
                await job.result()


def test_a_process_that_dies(program: Callable[..., Ended]) -> None:
    ended = program(
        "import os, sys, worqr\n"
        "mesh = worqr.Mesh()\n"
        "once = worqr.RetryPolicy(max_stalls=1)\n"
        "@mesh.task(name='mails.send', runs_in='process', retry=once, result_ttl=60)\n"
        "def send() -> None:\n"
        "    print('cannot open the mailbox', file=sys.stderr)\n"
        "    os._exit(3)\n"
        "if __name__ == '__main__':\n"
        "    with mesh.join_in_thread():\n"
        "        worqr.sync(worqr.sync(send.dispatch).result)\n"
    )
    assert "JobFailed: <Job" in ended.err
    assert "ended with exit code 3" in ended.err
    assert "stderr:\ncannot open the mailbox\n" in ended.err
