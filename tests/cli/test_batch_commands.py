"""``worqr batches`` and ``worqr batch``; and the batch of a job in ``worqr status``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import worqr
from tests.cli.conftest import Answer, Command
from tests.peer.tools import Held, eventually, serving

Beside = Callable[..., Awaitable[Answer]]
LEFT = pytest.mark.leaves("*")


@pytest.fixture
async def connected(mesh: worqr.Mesh) -> AsyncIterator[worqr.Mesh]:
    async with mesh.connect():
        yield mesh


def call(mesh: worqr.Mesh, queue: str = "mails", **options: str) -> worqr.Call[object]:
    return mesh.call(queue, **options)


async def fails(task: bytes) -> None:
    raise worqr.Failure("no such address")


async def succeeds(task: bytes) -> None: ...


def facts(answer: Answer) -> dict[str, str]:
    """What the command has printed below each other, by its names."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in answer.lines}


@LEFT
async def test_batches_are_listed(beside: Beside, connected: worqr.Mesh) -> None:
    async with connected.batch(queue="mails", id="letters") as batch:
        await batch.dispatch_many([call(connected, number=str(n)) for n in range(3)])
        jobs = await batch.dispatch_many([call(connected, "letters")])
    async with connected.batch(queue="other", id="empty", meta={"who": "Ada"}):
        pass
    answer = await beside("batches")
    assert (answer.code, answer.err) == (0, "")
    assert [line.split()[:7] for line in answer.lines] == [
        ["queue", "batch", "state", "jobs", "finished", "failed", "cancelled"],
        ["mails", "letters", "sealed", "4", "0", "0", "0"],
        ["other", "empty", "finished", "0", "0", "0", "0"],
    ]
    (found,) = (await beside("batches", "mails", "--json")).json
    assert (found["id"], found["queues"], found["pending"], found["succeeded"]) == (
        "letters",
        ["letters", "mails"],
        4,
        False,
    )
    status = await beside("status", jobs[0].id)
    assert "batch       letters of queue mails\n" in status.out
    assert (await beside("status", jobs[0].id, "--json")).json[0]["batch"] == {"queue": "mails", "id": "letters"}
    await batch.cancel()


@LEFT
async def test_one_batch_is_shown(beside: Beside, connected: worqr.Mesh) -> None:
    async with connected.batch(queue="mails", id="letters", meta={"who": "Ada"}) as batch:
        await batch.dispatch(call(connected))
    found = facts(await beside("batch", "mails", "letters"))
    assert (found["state"], found["jobs"], found["finished"], found["pending"]) == ("sealed", "1", "0 (0%)", "1")
    assert (found["queues"], found["meta"]) == ("mails", "who=Ada")
    (json,) = (await beside("batch", "mails", "letters", "--json")).json
    assert (json["jobs"], json["follow_up"], json["meta"]) == (1, None, {"who": "Ada"})
    wrong = await beside("batch", "mails", "leters")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err.startswith(
        "worqr: no batch 'leters' in queue 'mails': it never existed, another queue is its home, or"
    )
    assert "did you mean 'letters'?" in wrong.err
    wrong = await beside("batch", "mial", "letters")
    assert (wrong.code, "no queue 'mial' is in use; did you mean 'mails'?" in wrong.err) == (1, True)
    wrong = await beside("batches", "mial")
    assert (wrong.code, "no queue 'mial' is in use; did you mean 'mails'?" in wrong.err) == (0, True)
    await batch.cancel()


@LEFT
async def test_a_batch_is_cancelled(beside: Beside, connected: worqr.Mesh) -> None:
    held = Held()
    async with serving(connected, "mails", held):
        async with connected.batch(queue="mails", id="letters") as batch:
            await batch.dispatch_many([call(connected), call(connected, "later")])
        await held.wait(1)
        answer = await beside(
            "batch", "mails", "letters", "--cancel", "--reason", "wrong file", "--wait", "--as", "ada"
        )
        assert (answer.code, answer.err) == (0, "")
        assert answer.lines[0] == "Cancelled batch letters, of which 2 jobs had not ended"
        found = facts(answer)
        assert (found["state"], found["why"], found["cancelled"]) == ("cancelled", "wrong file", "2")
        entry = (await connected.log(10))[-1]
        assert (entry.kind, entry.queue, entry.who, entry.count, entry.text) == (
            "batch_cancelled",
            "mails",
            "ada",
            2,
            "letters: wrong file",
        )
        again = await beside("batch", "mails", "letters", "--cancel")
        assert again == Answer(0, "Batch letters had ended: nothing was cancelled\n", "")


@LEFT
async def test_failed_jobs_are_put_back_and_waited_for(beside: Beside, connected: worqr.Mesh) -> None:
    async with serving(connected, "mails", fails):
        async with connected.batch(queue="mails", id="letters") as batch:
            await batch.dispatch_many([call(connected) for _ in range(2)])
        answer = await beside("batch", "mails", "letters", "--wait")
        assert (answer.code, facts(answer)["failed"]) == (1, "2")
        assert answer.err == (
            "worqr: batch 'letters' ended with 0 of 2 jobs finished; `worqr failed list 'mails'` show failed jobs\n"
        )
    answer = await beside("batch", "mails", "letters", "--retry-failed")
    assert answer == Answer(0, "2 failed jobs put back\n", "")
    assert {"retried", "batch_retried"} <= {each.kind for each in await connected.log(10)}
    late = await beside("batch", "mails", "letters", "--within", "10ms")
    assert (late.code, "has not ended within 0.01 s: 2 of 2 jobs wait or run" in late.err) == (1, True)
    async with serving(connected, "mails", succeeds):
        answer = await beside("batch", "mails", "letters", "--wait")
        assert (answer.code, facts(answer)["state"], facts(answer)["endings"]) == (0, "finished", "2")
    await eventually(connected.queue("mails").running, [])


def test_acts_that_exclude_each_other(command: Command) -> None:
    for wrong in (("--cancel", "--retry-failed"), ("--reason", "why")):
        assert command("batch", "mails", "x", *wrong).code == 2
    assert "`worqr batches`" in command("chords").err
