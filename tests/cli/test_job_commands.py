"""``worqr status`` without a queue, ``run-now``, and ``cancel --claim``: what an operator does who has an id or a claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command
from tests.peer.tools import Held, eventually, serving
from tests.support.patience import PATIENCE

Beside = Callable[..., Awaitable[Answer]]
LATER = 3600


async def test_an_id_is_looked_up_in_all_queues(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        for name in ("letters", "mails"):
            await mesh.queue(name).dispatch(name.encode(), id="x", delay=LATER)
        await mesh.queue("other").enqueue(b"a")
        answer = await beside("status", "x")
        assert (answer.code, answer.err) == (0, "")
        assert [line.split() for line in answer.lines if line.startswith(("queue", "state", "task"))] == [
            ["queue", "letters"],
            ["state", "scheduled"],
            ["task", "letters"],
            ["queue", "mails"],
            ["state", "scheduled"],
            ["task", "mails"],
        ]
        found = (await beside("status", "x", "--json")).json
        assert [(each["queue"], each["id"], each["state"], each["task"]) for each in found] == [
            ("letters", "x", "scheduled", "letters"),
            ("mails", "x", "scheduled", "mails"),
        ]
        await mesh.queue("other").dispatch(b"b", id="z", lane="acme")
        assert "lane        acme\n" in (await beside("status", "z")).out
        assert (await beside("status", "z", "--json")).json[0]["lane"] == "acme"
        unknown = await beside("status", "y", "--json")
        assert (unknown.code, unknown.out) == (1, "")
        assert unknown.err.startswith("worqr: no job 'y' in any queue: the id is unknown, or")
        for name in ("letters", "mails", "other"):
            await mesh.queue(name).delete()


@pytest.mark.leaves("{mails}:failed", "{mails}:aside*")
async def test_a_job_that_failed_is_shown_with_all_that_is_stored(beside: Beside, mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Failure("no such address")

    async with mesh.connect(), serving(mesh, "mails", handler) as peer:
        queue = mesh.queue("mails")
        await queue.dispatch(b"\xff", id="x", result_ttl=60, meta={"trace": "7"}, timeout=5)
        await eventually(lambda: failed(queue), 1)
        text = (await beside("status", "x")).out
        assert "options     result_ttl=60.0 timeout=5.0\n" in text
        assert "meta        trace=7\n" in text
        assert "task        \\xff\n" in text
        (found,) = (await beside("status", "x", "--json")).json
        assert (found["state"], found["task"], found["encoding"]) == ("failed", "/w==", "base64")
        (ended,), (letter,), (tried,) = found["ended"], found["dead_letters"], found["tries"]
        assert (ended["state"], ended["error"]["message"]) == ("failed", "no such address")
        assert (letter["reason"], letter["worker"], letter["encoding"]) == ("failed", peer.id, "base64")
        assert tried["error"]["message"] == "no such address"


async def test_of_a_long_payload_the_beginning_is_shown_without_half_a_letter(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        await queue.dispatch(b"a" + "é".encode() * 3000, id="x")
        (found,) = (await beside("status", "x", "--json")).json
        assert (found["task"], found["encoding"], found["size"]) == ("a" + "é" * 2047, "utf-8", 6001)
        await queue.delete()


async def failed(queue: worqr.Queue) -> int:
    return (await queue.info()).failed


async def test_a_run_and_the_dispatch_behind_it_are_shown(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "mails", held):
        queue = mesh.queue("mails")
        await queue.dispatch(b"a", id="x", timeout=LATER)
        await held.wait(1)
        await queue.dispatch(b"b", id="x", delay=LATER)
        text = (await beside("status", "x")).out
        assert "deadline" in text
        assert "blocked run" in text
        (found,) = (await beside("status", "x", "--json")).json
        assert (found["blocked"]["task"], found["blocked"]["size"]) == ("b", 1)
        await queue.cancel_all()
        await eventually(queue.running, [])


async def test_what_a_run_shows_of_itself_is_shown(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        worqr.state({"page": 7} if task == b"a" else b"7")
        await held(task)

    async with mesh.connect(), serving(mesh, "mails", handler):
        queue = mesh.queue("mails")
        for name, task, text, value in ("x", b"a", '{"page":7}', {"page": 7}), ("y", b"b", "7", "7"):
            job = await queue.dispatch(task, id=name)
            await eventually(lambda job=job: shown(job), True)  # type: ignore[misc]
            assert text in (await beside("status", name)).out
            (found,) = (await beside("status", name, "--json")).json
            assert found["value"] == value
        await queue.cancel_all()
        await eventually(queue.running, [])


async def shown(job: worqr.Job[Any]) -> bool:
    return (await job.status()).value is not None


async def test_a_job_that_waits_says_for_what_and_has_no_error(beside: Beside, mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        if task == b"fail":
            raise ValueError("no address")
        raise worqr.Retry("approval", delay=3600, counted=False)

    async def scheduled(job: worqr.Job[Any]) -> bool:
        return (await job.status()).state == "scheduled"

    async with mesh.connect(), serving(mesh, "mails", handler, retry=worqr.RetryPolicy(min_backoff=3600)):
        queue = mesh.queue("mails")
        waiting, failing = await queue.dispatch(b"wait", id="x"), await queue.dispatch(b"fail", id="y")
        for job in waiting, failing:
            await eventually(lambda job=job: scheduled(job), True)  # type: ignore[misc]
        for status in await waiting.status(), (await queue.read("x")).status, *await queue.jobs(state="scheduled"):
            if not isinstance(status, worqr.TaskInfo) or status.id == "x":
                assert (status.waits_for, status.error, status.attempts, status.failures) == ("approval", None, 0, 0)
            else:
                assert (status.waits_for, status.error is None, status.attempts) == ("", False, 1)
        text = (await beside("status", "x")).out
        assert "waits       approval\n" in text
        assert "Retry" not in text
        (found,) = (await beside("status", "x", "--json")).json
        assert (found["waits_for"], found["error"], found["attempts"]) == ("approval", None, 0)
        assert "waits " not in (await beside("status", "y")).out
        await queue.cancel_all()


async def test_of_what_a_job_has_saved_the_size_is_shown(beside: Beside, mesh: worqr.Mesh) -> None:
    saved = trio.Event()

    async def handler(task: bytes) -> None:
        await worqr.current().save(b"a secret" * 200)
        saved.set()
        await trio.sleep_forever()

    async with mesh.connect(), serving(mesh, "mails", handler, grace=0):
        queue = mesh.queue("mails")
        await queue.dispatch(b"a", id="x")
        with trio.fail_after(PATIENCE):
            await saved.wait()
        text = (await beside("status", "x")).out
        assert "1,600 bytes" in text
        assert "secret" not in text
        (found,) = (await beside("status", "x", "--json")).json
        assert found["saved_size"] == 1600
        assert "secret" not in str(found)
        await queue.cancel_all()
        await eventually(queue.running, [])


async def test_scheduled_jobs_are_due_now(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        for name in "xyz":
            await queue.dispatch(b"a", id=name, delay=LATER)
        assert await beside("run-now", "mails", "x") == Answer(0, "1 due now\n", "")
        assert (await beside("run-now", "mails", "y", "--json")).json == [{"queue": "mails", "due": 1}]
        hint = "list scheduled jobs with `worqr jobs 'mails' --state scheduled`"
        assert await beside("run-now", "mails", "z", "x") == Answer(
            1, "1 due now\n", f"worqr: 1 of 2 jobs of queue 'mails' not scheduled; {hint}\n"
        )
        assert await beside("run-now", "mails", "x") == Answer(
            1, "0 due now\n", f"worqr: job 'x' of queue 'mails' not scheduled; {hint}\n"
        )
        wrong = await beside("run-now", "mial", "x")
        assert "no queue 'mial' is in use; did you mean 'mails'?" in wrong.err
        await queue.delete()


def test_a_job_must_be_named(command: Command) -> None:
    assert command("run-now", "mails").code == 2


async def test_a_run_is_cancelled_by_its_claim(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "films", held):
        queue = mesh.queue("films")
        await queue.enqueue(b"film", b"film")
        await held.wait(2)
        first, second = [each["claim"] for each in (await beside("running", "--json")).json]
        answer = await beside("cancel", "films", "--claim", second, "--wait")
        assert answer == Answer(0, "0 removed, 1 running cancelled (1 ended)\n", "")
        assert [each["claim"] for each in (await beside("running", "films", "--json")).json] == [first]
        wrong = await beside("cancel", "films", "--claim", "film")
        assert (wrong.code, wrong.out) == (1, "")
        assert "a claim is the `claim` of a task in queue.running()" in wrong.err
        held.gate.set()
        await eventually(queue.running, [])


async def test_the_longest_running_task_of_all_queues_comes_first(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "b", held), serving(mesh, "a", held):
        for n, name in enumerate("bab"):
            await mesh.queue(name).enqueue(b"%d" % n)
            await held.wait(n + 1)
        assert [(each["queue"], each["task"]) for each in (await beside("running", "--json")).json] == [
            ("b", "0"),
            ("a", "1"),
            ("b", "2"),
        ]
        held.gate.set()
        for name in "ab":
            await eventually(mesh.queue(name).running, [])


async def test_jobs_that_have_ended_are_listed_by_their_tags(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        for name in ("a", "b"):
            job = await queue.dispatch(b"x", id=name, keep=worqr.Keep(), tags={"customer:acme", f"order:{name}"})
            await job.cancel()
        answer = await beside("jobs", "mails", "--state", "cancelled", "--tag", "order:a", "--json")
        [found] = answer.json
        assert (found["id"], found["state"], found["tags"]) == ("a", "cancelled", ["customer:acme", "order:a"])
        assert found["ended"]
        answer = await beside("jobs", "mails", "--tag", "customer:acme")
        assert [line.split()[0] for line in answer.lines if line.split()[0] in {"a", "b"}] == ["b", "a"]
        answer = await beside("jobs", "mails", "--state", "finished")
        assert "keep=worqr.Keep(...)" in answer.err
        answer = await beside("status", "a")
        assert "customer:acme order:a" in answer.out and "cancelled" in answer.out
