"""``worqr failed`` and ``worqr undecodable``: listed, put back, dropped; by id, error, time and number."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command
from tests.peer.tools import eventually, serving

Beside = Callable[..., Awaitable[Answer]]

EVIL = b"\xff\x1b]0;title\x07 [red]"

pytestmark = pytest.mark.leaves("{mails}:failed", "{mails}:broken", "{mails}:aside*")


async def give_up(task: bytes) -> None:
    if task == EVIL:
        raise worqr.Undecodable("what is \x1b[31mthis")
    if task.startswith(b"value"):
        raise ValueError("bad [bold]value\nin \x1b[2Jtwo lines")
    raise worqr.Failure("no such address")


async def set_aside(mesh: worqr.Mesh, *tasks: bytes) -> None:
    """Have these fail, one after the other."""
    queue = mesh.queue("mails")
    async with mesh.join(grace=0, concurrency=1) as peer, trio.open_nursery() as nursery:
        once = worqr.RetryPolicy(max_failures=1)
        await nursery.start(partial(peer.serve, "mails", give_up, retry=once))
        for task in tasks:
            before = len(await queue.failed.list()) + len(await queue.undecodable.list())
            await queue.dispatch(task, id="evil" if task == EVIL else task.decode(), meta={"tenant": "a"})

            async def count() -> int:
                return len(await queue.failed.list()) + len(await queue.undecodable.list())

            await eventually(count, before + 1, within=20)
        nursery.cancel_scope.cancel()


async def test_what_failed_is_listed_newest_first(beside: Beside, mesh: worqr.Mesh) -> None:
    await set_aside(mesh, b"ada", b"value")
    answer = await beside("failed", "mails")
    header, newest, oldest = answer.lines
    assert header.split()[:4] == ["id", "failed", "at", "reason"]
    assert newest.startswith("value ")
    assert newest.split("  ")[-2:] == ["ValueError: bad [bold]value\\nin \\x1b[2Jtwo lines", "value"]
    assert oldest.startswith("ada ")
    assert "  worqr.Failure: no such address  " in oldest
    assert oldest.endswith("  ada")
    assert (await beside("failed", "list", "mails")).out == answer.out
    newest_json, oldest_json = (await beside("failed", "mails", "--json")).json
    assert newest_json["error"]["message"] == "bad [bold]value\nin \x1b[2Jtwo lines"
    assert "give_up" in newest_json["error"]["traceback"]
    assert (oldest_json["task"], oldest_json["encoding"], oldest_json["meta"]) == ("ada", "utf-8", {"tenant": "a"})
    assert set(oldest_json) == {
        *(
            "id",
            "queue",
            "task",
            "encoding",
            "reason",
            "error",
            "failures",
            "stalls",
            "timeouts",
            "worker",
            "at",
            "meta",
            "size",
        )
    }
    assert datetime.fromisoformat(oldest_json["at"]) <= datetime.fromisoformat(newest_json["at"])
    whole = await beside("failed", "mails", "--traceback")
    assert "    Traceback (most recent call last):" in whole.lines
    assert "\x1b" not in whole.out
    assert (await beside("failed", "mails", "--limit", "1")).lines[1:] == [newest]
    assert [row["id"] for row in (await beside("failed", "mails", "--error", "Failure", "--json")).json] == ["ada"]
    assert (await beside("failed", "mails", "--before", "1h")).err == "worqr: no failed tasks in queue 'mails'\n"
    assert len((await beside("failed", "mails", "--since", "1h", "--json")).json) == len(
        (await beside("failed", "mails", "--json")).json
    )
    far = ("--since", "2999-01-01T00:00Z")
    assert (await beside("failed", "mails", *far)).err == "worqr: no failed tasks in queue 'mails'\n"
    assert (await beside("failed", "drop", "mails", "--all", *far)).out == "0 deleted\n"


async def test_what_is_undecodable_is_listed_apart_with_its_bytes(beside: Beside, mesh: worqr.Mesh) -> None:
    await set_aside(mesh, EVIL)
    answer = await beside("undecodable", "mails")
    assert answer.lines[1].endswith("worqr.Undecodable: what is \\x1b[31mthis  \\xff\\x1b]0;title\\x07 [red]")
    (row,) = (await beside("undecodable", "mails", "--json")).json
    assert row["encoding"] == "base64"
    assert (await beside("failed", "mails")).out == ""
    assert (await beside("undecodable", "drop", "mails", "evil")).out == "1 deleted\n"
    assert (await beside("undecodable", "mails", "--json")).out == ""


async def test_some_are_put_back_or_dropped_by_their_ids(beside: Beside, mesh: worqr.Mesh) -> None:
    await set_aside(mesh, b"ada", b"grace", b"value")
    assert (await beside("failed", "retry", "mails", "ada", "grace")) == Answer(0, "2 requeued\n", "")
    async with mesh.connect():
        assert await mesh.queue("mails").tasks() == [b"grace", b"ada"]
        await mesh.queue("mails").cancel_all()
    partly = await beside("failed", "drop", "mails", "value", "nobody")
    again = "(it may have been retried or deleted already); list them with `worqr failed 'mails'`\n"
    why = "worqr: 1 of 2 ids match no failed task in queue 'mails' "
    assert partly == Answer(1, "1 deleted\n", why + again)
    one = await beside("failed", "retry", "mails", "nobody")
    assert one == Answer(1, "0 requeued\n", "worqr: no failed task with id 'nobody' in queue 'mails' " + again)


async def test_all_of_them_or_what_the_options_leave(beside: Beside, mesh: worqr.Mesh) -> None:
    await set_aside(mesh, b"ada", b"value 1", b"value 2", b"value 3")
    times = [row["at"] for row in (await beside("failed", "mails", "--json")).json]
    before = ("--before", times[1])
    assert (
        await beside("failed", "retry", "mails", "--all", "--error", "ValueError", *before, "--limit", "1")
    ).code == 0
    assert [row["id"] for row in (await beside("failed", "mails", "--json")).json] == ["value 3", "value 2", "ada"]
    assert (await beside("failed", "drop", "mails", "--all", "--limit", "1")).out == "1 deleted\n"
    assert [row["id"] for row in (await beside("failed", "mails", "--json")).json] == ["value 2", "ada"]
    assert (await beside("failed", "drop", "mails", "--all", *before)).out == "1 deleted\n"
    assert (await beside("failed", "retry", "mails", "--all")).out == "1 requeued\n"
    async with mesh.connect():
        assert await mesh.queue("mails").cancel_all() == worqr.CancelCount(2, 0, 0)


async def test_a_failure_queue_is_named_as_it_is_listed(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").failures.enqueue(b"x")
        assert (await beside("cancel", "{mails}-fail", "--all")).out == "1 removed, 0 running cancelled\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("failed", "retry", "mails"), "name the tasks to retry: either ids, or --all"),
        (("failed", "drop", "mails", "x", "--all"), "name the tasks to drop"),
        (("undecodable", "drop", "mails", "x", "--error", "E"), "--error, --before, --since and --limit need --all"),
        (("undecodable", "mails", "--before", "soon"), "--before must be a time"),
        (("failed", "retry"), "missing QUEUE; `worqr failed retry --help`"),
    ],
)
def test_wrong_use_is_one_line(command: Command, words: tuple[str, ...], why: str) -> None:
    answer = command(*words)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
    assert answer.err.count("\n") == 1


async def test_without_a_queue_those_of_all_are_listed(beside: Beside, mesh: worqr.Mesh) -> None:
    assert await beside("failed") == Answer(0, "", "worqr: no failed tasks\n")
    assert await beside("undecodable") == Answer(0, "", "worqr: no undecodable tasks\n")
    await set_aside(mesh, b"ada", b"value")
    header, newest, oldest = (await beside("failed")).lines
    assert header.split()[:2] == ["queue", "id"]
    assert [newest.split()[:2], oldest.split()[:2]] == [["mails", "value"], ["mails", "ada"]]
    assert [row["queue"] for row in (await beside("failed", "--json")).json] == ["mails", "mails"]
    assert (await beside("failed", "--limit", "1")).lines[1:] == [newest]
    assert (await beside("failed", "--traceback")).lines[0].startswith("mails  value  ")
    assert (await beside("failed", "drop", "mails", "--all")).code == 0


@pytest.mark.leaves("{films}:failed", "{films}:aside*")
async def test_errors_are_counted(beside: Beside, mesh: worqr.Mesh) -> None:
    once = worqr.RetryPolicy(max_failures=1)

    async def raising(task: bytes) -> None:
        raise {b"v": ValueError, b"t": TimeoutError}[task]

    async with mesh.connect(), serving(mesh, "mails", raising, retry=once), serving(mesh, "films", raising, retry=once):
        await mesh.queue("mails").enqueue(b"v", b"v", b"t")
        await mesh.queue("films").enqueue(b"t")
        for name, count in (("mails", 3), ("films", 1)):
            await eventually(lambda name=name: failures(mesh, name), count)  # type: ignore[misc]
        header, *rows = (await beside("failed", "errors")).lines
        assert header.split() == ["count", "queue", "error"]
        assert rows[0].split() == ["2", "mails", "ValueError"]
        assert sorted(row.split() for row in rows[1:]) == [
            ["1", "films", "TimeoutError"],
            ["1", "mails", "TimeoutError"],
        ]
        assert (await beside("failed", "errors", "mails", "--json")).json == [
            {"queue": "mails", "error": "ValueError", "count": 2},
            {"queue": "mails", "error": "TimeoutError", "count": 1},
        ]
        assert await beside("undecodable", "errors") == Answer(0, "", "worqr: no undecodable tasks\n")
        assert (await beside("failed", "errors", "mial")).err.startswith("worqr: no queue 'mial' is in use")


async def failures(mesh: worqr.Mesh, name: str) -> int:
    return (await mesh.queue(name).info()).failed
