"""``worqr status``, ``running`` and ``jobs``: single tasks by their ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

import worqr
from tests.cli.conftest import Answer
from tests.peer.tools import Held, eventually, serving

Beside = Callable[..., Awaitable[Answer]]


async def test_one_job_is_shown_while_it_waits_runs_and_after_its_end(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if worqr.current().attempt == 1:
            raise ValueError("smtp: \x1b[31mconnection refused")
        worqr.current().progress(0.5, "half of it")
        await held(task)

    async with mesh.connect():
        q = mesh.queue("mails")
        job = await q.dispatch(b"a", id="mail-7", result_ttl=60)
        retry = worqr.RetryPolicy(min_backoff=3600, max_backoff=3600)
        async with serving(mesh, "mails", handler, retry=retry) as peer:
            await eventually(lambda: state(job), "scheduled")
            told = facts(await beside("status", "mail-7", "--queue", "mails"))
            assert told["error"] == "ValueError: smtp: \\x1b[31mconnection refused"
            assert (told["state"], told["attempts"], told["failures"]) == ("scheduled", "1", "1")
            assert {"next", "dispatched", "task"} <= told.keys()
            header, row = (await beside("status", "mail-7", "--queue", "mails")).lines[-2:]
            assert header.split() == ["ended", "took", "worker", "reason", "error"]
            assert row.split()[4:] == [peer.id, "failed", *told["error"].split()]
            (found,) = (await beside("status", "mail-7", "--queue", "mails", "--json")).json
            assert found["error"] == {"type": "ValueError", "message": "smtp: \x1b[31mconnection refused"}
            assert found["next_run"] == found["run_at"] is not None
            assert (found["task"], found["encoding"], found["size"], found["options"]) == (
                "a",
                "utf-8",
                1,
                {"result_ttl": 60.0},
            )
            (tried,) = found["tries"]
            assert (tried["worker"], tried["reason"], tried["error"]) == (peer.id, "failed", found["error"])
            await q.dispatch(b"a", id="mail-7", update=worqr.Update(data=False))
            await held.wait(1)
            await eventually(lambda: progress(job), 0.5)
            told = facts(await beside("status", "mail-7", "--queue", "mails"))
            assert (told["state"], told["attempts"], told["progress"]) == ("active", "2", "0.5")
            assert "worker" in told
            held.gate.set()
            await job.result(30)
            told = facts(await beside("status", "mail-7", "--queue", "mails"))
            assert told == {
                "state": "finished",
                "attempts": "2",
                "failures": "1",
                "progress": "0.5",
                "message": "half of it",
            }


def facts(answer: Answer) -> dict[str, str]:
    """The names and values in front of the table of tries."""
    lines = answer.lines
    return dict(line.split(maxsplit=1) for line in lines[: lines.index("") if "" in lines else None])


async def state(job: worqr.Job[bytes]) -> str:
    return (await job.status()).state


async def progress(job: worqr.Job[bytes]) -> float | None:
    return (await job.status()).progress


async def test_an_unknown_id_is_an_error_that_says_what_may_be_wrong(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").enqueue(b"a")
        answer = await beside("status", "mail-7", "--queue", "mails")
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith("worqr: no job 'mail-7' in queue 'mails': the id is unknown, or")
        wrong = await beside("status", "mail-7", "--queue", "mial", "--json")
        assert wrong.code == 1
        assert wrong.json[0]["state"] == "gone"
        assert wrong.err.endswith("no queue 'mial' is in use; did you mean 'mails'?\n")
        await mesh.queue("mails").cancel_all()


async def test_what_runs_is_listed_with_its_ids(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()
    assert (await beside("running")) == Answer(0, "", "worqr: no task is running\n")
    assert (await beside("running", "--json")) == Answer(0, "", "")
    async with mesh.connect(), serving(mesh, "films", held) as peer:
        q = mesh.queue("films")
        await q.dispatch(b"film", id="film-1")
        await q.enqueue("film \N{SNOWMAN}".encode() * 20)
        await held.wait(2)
        for words in (("running",), ("running", "films")):
            header, *rows = (await beside(*words)).lines
            assert header.split() == [
                *("queue", "id", "claim", "worker", "since", "attempts", "progress", "message", "task")
            ]
            named = [row.split()[:4] for row in rows]
            claims = [str(task.claim) for task in await q.running()]
            assert named == [["films", "film-1", claims[0], peer.id], ["films", "-", claims[1], peer.id]]
        by_id = {each["id"]: each for each in (await beside("running", "--json")).json}
        assert (by_id["film-1"]["task"], by_id["film-1"]["worker"]) == ("film", peer.id)
        assert by_id[None]["task"] == "film \N{SNOWMAN}" * 12 + "film"  # 100 bytes, without the half of a letter
        assert by_id[None]["encoding"] == "utf-8"
        assert (
            await beside("running", "other")
        ).err == "worqr: no queue 'other' is in use; `worqr queues` lists those in use\n"
        held.gate.set()
        await eventually(q.running, [])
        assert (await beside("running", "films")).err == "worqr: no task of queue 'films' is running\n"


async def test_jobs_are_listed_by_state_page_by_page(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("mails")
        for n in range(3):
            await q.dispatch(b"m%d" % n, id=f"mail {n}", delay=3600 + n)
        await q.enqueue(b"plain")
        header, row = (await beside("jobs", "mails")).lines
        assert header.split() == ["id", "run", "at", "attempts", "error", "task"]
        assert row.split() == ["-", "-", "0", "-", "plain"]
        answer = await beside("jobs", "mails", "--state", "scheduled", "--limit", "2")
        assert [row.split()[1] for row in answer.lines[1:]] == ["0", "1"]
        cursor = answer.err.partition("--after ")[2].strip().strip("'")
        (last,) = (await beside("jobs", "mails", "--state", "scheduled", "--after", cursor, "--json")).json
        assert (last["id"], last["task"], last["state"]) == ("mail 2", "m2", "scheduled")
        assert last["next_run"] is not None
        assert (
            await beside("jobs", "mails", "--state", "blocked")
        ).err == "worqr: no task of queue 'mails' is blocked\n"
        assert (await beside("jobs", "mial")).err == "worqr: no queue 'mial' is in use; did you mean 'mails'?\n"
        assert (await beside("jobs", "mails", "--state", "dead")).code == 2
        await q.cancel_all()


async def test_waiting_jobs_are_listed_from_the_end(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("mails")
        await q.enqueue(b"first", b"second", b"third")
        answer = await beside("jobs", "mails", "--newest", "--limit", "2")
        assert [row.split()[-1] for row in answer.lines[1:]] == ["third", "second"]
        cursor = answer.err.partition("--after ")[2].strip().strip("'")
        (last,) = (await beside("jobs", "mails", "--newest", "--after", cursor, "--json")).json
        assert (last["task"], last["place"]) == ("first", 1)
        wrong = await beside("jobs", "mails", "--newest", "--state", "scheduled")
        assert (wrong.code, wrong.err) == (2, "worqr: --newest lists waiting tasks only, not --state scheduled\n")
        await q.cancel_all()


@pytest.mark.parametrize("words", [("status",), ("jobs",)])
async def test_what_is_missing_is_wrong_use(beside: Beside, words: tuple[str, ...]) -> None:
    assert (await beside(*words)).code == 2


@pytest.mark.leaves("{mails}:recent", "{mails}:failed", "{mails}:aside*")
async def test_the_runs_that_ended_last_are_listed(beside: Beside, mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise worqr.Failure("as told")

    async with serving(mesh, "mails", handler, recent=10) as peer:
        assert "recent=100" in (await beside("recent", "mails")).err
        assert "no queue 'mail' is in use; did you mean 'mails'?" in (await beside("recent", "mail")).err
        q = mesh.queue("mails")
        await q.enqueue(b"plain")
        await eventually(lambda: ended(q), 1)
        await q.dispatch(b"bad", id="mail-7")
        await eventually(lambda: ended(q), 2)
        header, *listed = (await beside("recent", "mails")).lines
        assert header.split() == ["id", "claim", "outcome", "started", "took", "worker", "error"]
        assert [line.split()[0] for line in listed] == ["mail-7", "-"]
        assert listed[0].endswith("worqr.Failure")
        (found,) = (await beside("recent", "mails", "--limit", "1", "--json")).json
        assert (found["queue"], found["id"], found["outcome"], found["worker"]) == (
            "mails",
            "mail-7",
            "raised",
            peer.id,
        )
        assert found["error"] == "worqr.Failure"


async def ended(q: worqr.Queue) -> int:
    return len(await q.recent())
