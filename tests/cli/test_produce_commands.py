"""``worqr enqueue``, ``dispatch`` and ``call``: what gets into the queue, byte for byte, and what comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command, piped, tasks, waiting
from tests.peer.tools import eventually
from tests.support.children import ROOT
from tests.support.servers import Server

Beside = Callable[..., Awaitable[Answer]]


def test_payloads_are_tasks_as_they_are(cli: Command, mesh: worqr.Mesh) -> None:
    answer = cli("enqueue", "mails", "ada", "é [red]", "", "--", "--lines", "-x")
    assert (answer.code, answer.out) == (0, "5 enqueued\n")
    assert waiting(mesh, "mails") == [b"ada", "é [red]".encode(), b"", b"--lines", b"-x"]


def test_what_was_enqueued_can_be_had_as_json(cli: Command, mesh: worqr.Mesh) -> None:
    assert cli("enqueue", "mails", "a", "b", "--json").json == [{"queue": "mails", "enqueued": 2, "refused": 0}]
    assert len(waiting(mesh, "mails")) == 2


def test_a_payload_need_not_be_text(cli: Command, mesh: worqr.Mesh) -> None:
    assert piped(b"", "enqueue", "mails", b"\xff\xfe").returncode == 0
    assert waiting(mesh, "mails") == [b"\xff\xfe"]


def test_the_standard_input_is_one_payload(cli: Command, mesh: worqr.Mesh) -> None:
    payload = bytes(range(256)) * 1000
    assert piped(payload, "enqueue", "mails", "-").returncode == 0
    assert piped(payload, "dispatch", "mails", "-", "--id", "x").stdout == b"created x\n"
    assert waiting(mesh, "mails") == [payload, payload]


def test_each_line_is_a_task(cli: Command, mesh: worqr.Mesh) -> None:
    lines = [str(i).encode() for i in range(2500)]
    answer = piped(b"\n".join(lines), "enqueue", "mails", "--lines")
    assert answer.stdout == b"2,500 enqueued\n"
    assert waiting(mesh, "mails") == lines


def test_an_empty_line_is_an_empty_task(cli: Command, mesh: worqr.Mesh) -> None:
    assert piped(b"a\n\nb\r\n", "enqueue", "mails", "--lines").returncode == 0
    assert waiting(mesh, "mails") == [b"a", b"", b"b\r"]


def test_lines_before_all_that_waits_keep_their_order(cli: Command, mesh: worqr.Mesh) -> None:
    cli("enqueue", "mails", "old")
    lines = [b"%d" % n * 1000 for n in range(300)]  # more than a pipe holds at once
    assert piped(b"\n".join(lines), "enqueue", "mails", "--lines", "--front").returncode == 0
    assert waiting(mesh, "mails") == [*lines, b"old"]


async def test_lines_are_sent_as_they_come(cli: Command, mesh: worqr.Mesh) -> None:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "worqr", "enqueue", "mails", "--lines"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    async with mesh.join() as peer, peer.work("mails") as claims:
        for task in (b"first", b"second"):
            await process.stdin.send_all(task + b"\n")
            with trio.fail_after(20):
                (claim,) = await claims.take(1)
            assert claim.task == task
            await claim.finish()
        await process.stdin.aclose()
        with trio.fail_after(20):
            assert await process.wait() == 0


async def test_ctrl_c_is_one_line(cli: Command, mesh: worqr.Mesh) -> None:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "worqr", "enqueue", "mails", "--lines"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    await process.stdin.send_all(b"a\n")
    async with mesh.connect():
        await eventually(mesh.queue("mails").count, 1, within=20)
    process.send_signal(signal.SIGINT)
    with trio.fail_after(20):
        assert await process.wait() == 130
        assert (await process.stderr.receive_some()).endswith(b"worqr: interrupted\n")
    assert await tasks(mesh, "mails") == [b"a"]


def test_what_waits_already_is_refused_with_unique(cli: Command, mesh: worqr.Mesh) -> None:
    assert cli("enqueue", "mails", "ada", "--unique").code == 0
    answer = cli("enqueue", "mails", "ada", "--unique")
    assert answer.code == 1
    assert answer.err.startswith("worqr: the id 'sha256:")
    piped_answer = piped(b"ada\ngrace\n", "enqueue", "mails", "--lines", "--unique")
    assert piped_answer.stdout == b"1 enqueued, 1 refused as duplicates\n"
    assert waiting(mesh, "mails") == [b"ada", b"grace"]


def test_a_full_queue_is_one_line(cli: Command, mesh: worqr.Mesh) -> None:
    assert cli("enqueue", "mails", "a", "--max-length", "1").code == 0
    answer = cli("enqueue", "mails", "b", "--max-length", "1")
    assert answer.code == 1
    assert "max_length" in answer.err
    assert answer.err.count("\n") == 1
    assert waiting(mesh, "mails") == [b"a"]


@pytest.mark.leaves("{mails}:waiters")
def test_a_full_queue_can_be_waited_for(cli: Command, mesh: worqr.Mesh) -> None:
    wait = ("--max-length", "2", "--wait-for-room")
    assert piped(b"a\nb\n", "enqueue", "mails", "--lines", *wait, "1m").stdout == b"2 enqueued\n"
    for answer in (cli("enqueue", "mails", "c", *wait, "0.05"), cli("dispatch", "mails", "c", *wait, "0.05")):
        assert answer.code == 1
        assert "max_length" in answer.err
    assert waiting(mesh, "mails") == [b"a", b"b"]
    for command in ("enqueue", "dispatch"):
        answer = cli(command, "mails", "c", "--wait-for-room", "5")
        assert answer.code == 2
        assert "add --max-length 1000" in answer.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("enqueue", "mails"), "no payload: add payloads, or -"),
        (("enqueue", "mails", "a", "--lines"), "--lines reads tasks from the standard input"),
        (("enqueue", "mails", "a", "-"), "- reads one payload from the standard input"),
        (("enqueue", "mails", "a", "--front=maybe"), "--front"),
        (("enqueue",), "QUEUE"),
        (("enqueue", "mails", "--uniqe", "a"), "--unique"),
        (("dispatch", "mails", "a", "--delay", "soon"), "--delay must be a duration"),
        (("dispatch", "mails", "a", "--run-at", "soon"), "--run-at must be a time"),
        (("dispatch", "mails", "a", "--meta", "x"), "--meta must be name=text"),
        (("dispatch", "mails", "a", "--if-exists", "explode"), "--if-exists"),
        (("dispatch", "mails", "a", "--within", "x"), "--within must be a duration"),
        (("call", "f", "x"), "an argument must be name=text"),
        (("call", "f", "x=1", "--args", "{}"), "arguments or --args, not both"),
        (("call", "f", "--args", "{"), "--args must be JSON"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(command: Command, words: tuple[str, ...], why: str) -> None:
    answer = command(*words, "--url", "redis://nowhere.invalid")
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("enqueue", "{mails}", "a"), "braces"),
        (("enqueue", "ma\x1b[31mils", "a"), "control characters"),
        (("dispatch", "mails", "a", "--id", "@x"), "must not begin with '@'"),
        (("dispatch", "mails", "a", "--delay", "5", "--run-at", "2031-01-01"), "not both"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_1(cli: Command, words: tuple[str, ...], why: str) -> None:
    answer = cli(*words)
    assert answer.code == 1
    assert why in answer.err
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err


# Jobs


def test_a_job_takes_all_options(cli: Command, mesh: worqr.Mesh) -> None:
    words = (
        "dispatch",
        "mails",
        "ada",
        "--id",
        "x",
        "--delay",
        "1h",
        "--timeout",
        "30s",
        "--result-ttl",
        "5m",
        "--front",
    )
    more = ("--meta", "tenant=a", "--meta", "trace=b=c", "--expires", "1d", "--unique-for", "1h", "--max-length", "5")
    assert cli(*words, *more).out == "created x\n"
    assert cli(*words, "--json").json == [{"queue": "mails", "id": "x", "outcome": "updated"}]
    assert cli(*words, "--if-exists", "skip").out == "unchanged x\n"
    refused = cli(*words, "--if-exists", "raise")
    assert (refused.code, refused.out) == (1, "")
    assert "'x' is taken" in refused.err

    async def look() -> tuple[worqr.Status, worqr.CancelCount]:
        async with mesh.connect():
            job = mesh.queue("mails").job("x")
            return await job.status(), await job.cancel()

    status, count = trio.run(look)
    assert status.state == "scheduled"
    assert count.waiting == 1


def test_a_job_without_an_id_gets_one(cli: Command, mesh: worqr.Mesh) -> None:
    assert cli("dispatch", "mails", "ada").out.startswith("created @")
    assert waiting(mesh, "mails") == [b"ada"]


async def handle(task: bytes) -> object:
    match task:
        case b"fail":
            raise worqr.Failure("no such \x1b[31maddress")
        case b"bytes":
            return b"\xffr\x1b"
        case b"none":
            return None
        case b"slow":
            await trio.sleep_forever()
    return {"to": task.decode(), "n": [1, 2]}


@pytest.mark.leaves("{mails}:failed", "{mails}:aside:*", "{mails}:aside")
async def test_with_wait_the_result_is_printed(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "mails", handle))
        done = await beside("dispatch", "mails", "ada", "--id", "x", "--wait")
        assert (done.code, done.out, done.err) == (0, '{"to":"ada","n":[1,2]}\n', "worqr: created x\n")
        done = await beside("dispatch", "mails", "ada", "--id", "y", "--wait", "--json")
        (told,) = done.json
        assert told == {"queue": "mails", "id": "y", "outcome": "created", "result": {"to": "ada", "n": [1, 2]}}
        assert (await beside("dispatch", "mails", "bytes", "--wait")).out == "\\xffr\\x1b\n"
        (told,) = (await beside("dispatch", "mails", "bytes", "--wait", "--json")).json
        assert told["result"] == {"task": "/3Ib", "encoding": "base64"}
        assert (await beside("dispatch", "mails", "none", "--wait")).out == ""
        failed = await beside("dispatch", "mails", "fail", "--within", "30s")
        assert (failed.code, failed.out) == (1, "")
        assert "no such \\x1b[31maddress" in failed.err
        late = await beside("dispatch", "mails", "slow", "--within", "10ms")
        assert (late.code, late.out) == (1, "")
        assert "had not ended after 0.01 s" in late.err
        await mesh.queue("mails").cancel_all(wait=20)
        nursery.cancel_scope.cancel()


# Calls


async def test_a_function_is_called_by_its_name(beside: Beside, mesh: worqr.Mesh) -> None:
    assert (await beside("call", "shop.greet", "to=ada", "times:=3", "when=2031")).out == "1 enqueued\n"
    assert (await beside("call", "shop.greet", "--args", "[1, 2]")).out == "1 enqueued\n"
    (told,) = (await beside("call", "shop.greet", "--json")).json
    assert told == {"queue": "shop.greet", "enqueued": 1, "refused": 0}
    found = await tasks(mesh, "shop.greet")
    assert [json.loads(task) for task in found] == [{"to": "ada", "times": 3, "when": "2031"}, [1, 2], {}]


async def test_a_call_can_be_waited_for(beside: Beside, mesh: worqr.Mesh) -> None:
    async def greet(task: bytes) -> str:
        return "hello " + json.loads(task)["to"]

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "shop.greet", greet))
        done = await beside("call", "shop.greet", "to=ada", "--wait")
        assert (done.code, done.out) == (0, '"hello ada"\n')
        nursery.cancel_scope.cancel()


@pytest.mark.leaves("{shop.add}:*")
async def test_a_payload_that_cannot_be_decoded_has_no_traceback_of_worqr(beside: Beside, mesh: worqr.Mesh) -> None:
    @mesh.task(name="shop.add")
    async def add(a: int) -> None: ...

    async with mesh.join(grace=0):
        done = await beside("dispatch", "shop.add", "{}", "--wait")
        assert (done.code, done.out) == (1, "")
        assert "missing required field `a`" in done.err
        assert "Traceback" not in done.err


def test_nothing_is_put_into_a_mesh_of_another_wire_version(cli: Command, server: Server, prefix: str) -> None:
    client = server.client()
    client.set(f"{{{prefix}}}:version", "2")
    for arguments in (("enqueue", "mails", "a"), ("dispatch", "mails", "a"), ("call", "send", "n=1"), ("queues",)):
        answer = cli(*arguments)
        assert answer.code == 1
        assert "speaks wire version 2, this worqr speaks 1" in answer.err
    assert client.keys(f"*{prefix}*") == [f"{{{prefix}}}:version".encode()]
    client.delete(f"{{{prefix}}}:version")
