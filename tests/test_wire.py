"""docs/reference/wire.md and docs/raw/other-languages.md are true of clients that know nothing of worqr.

Such clients are redis-cli, Node's and Python's; what they do wrong is contained.

``WORQR_TEST_NODE=1`` makes it a failure that Node is not there, or cannot get its packages.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from inspect import cleandoc, isfunction
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import redis
import trio

import worqr
from tests.docs.tables import rows, words
from tests.ops.driver import desk_on
from tests.ops.scene import set_scene
from tests.peer.conftest import without_scans
from tests.peer.tools import QUICK, Held, Runs, eventually, serving, until
from tests.support.children import ROOT
from tests.support.leaks import EXPIRING, delete_all, dump
from tests.support.npm import packages
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tools.pages import DOCS, blocks_of
from worqr import ops
from worqr.keys import MARKER, BatchKeys, LaneKeys, LimitKeys, QueueKeys, RegistryKeys, RoomKeys
from worqr.lua import script

pytestmark = [pytest.mark.one_server, pytest.mark.timeout(180)]

PAGE = "wire.md"
PROGRAMS = blocks_of(DOCS / "raw" / "other-languages.md")
MUST_HAVE_NODE = os.environ.get("WORQR_TEST_NODE") == "1"

__all__ = ["without_scans"]


def program(language: str, with_text: str) -> str:
    """The one program of the page about producers in this language that has this text in it."""
    (found,) = [block.code for block in PROGRAMS if block.language == language and with_text in block.code]
    return found


# The tables


def test_every_key_has_its_type_in_the_table() -> None:
    types = {"LIST": "list", "HASH": "hash", "SET": "set", "ZSET": "sorted set", "STRING": "string", "STREAM": "stream"}
    told = {key: row[1] for row in rows(PAGE, "Keys") for key in words(row[0])}
    heard = {channel for row in rows("wire-queues.md", "Channels") for channel in words(row[0])}
    arguments = {
        "worker": "W1",
        "claim": "P1",
        "id": "ID",
        "digest": "DIGEST",
        "row": "ROW",
        "period": "MS",
        "lane": "LANE",
        "epoch": "EPOCH",
        "token": "TOKEN",
        "name": "X",
        "number": "NUMBER",
    }
    spelled: dict[str, str] = {}
    queue = QueueKeys("worqr", "Q1")
    limit = LimitKeys("worqr", "Q1")
    for keys in (queue, LaneKeys(queue), RoomKeys(queue), BatchKeys(queue), limit, RegistryKeys("worqr")):
        for name, member in vars(type(keys)).items():
            if isinstance(member, property):
                key, said = getattr(keys, name), member.__doc__ or ""
            elif isfunction(member) and not name.startswith("_"):
                parameters = member.__code__.co_varnames[1 : member.__code__.co_argcount]
                key, said = getattr(keys, name)(*(arguments[each] for each in parameters)), member.__doc__ or ""
            else:
                continue
            if (kind := re.match(r"(\w+)", cleandoc(said))[1]) in types:
                spelled[key] = types[kind]
                if "channel" in said:
                    assert key in heard, key
            elif kind == "Channel":
                assert key in heard, key
    spelled[queue.base] = "list"
    producers = {"worqr:{Q1}:producer:X": "hash", "{worqr}:producer:X": "hash"}  # which the link spells
    assert told == {**spelled, **producers}


def test_the_keys_that_tests_may_leave_to_expire_are_those_of_the_table() -> None:
    told = {key for row in rows(PAGE, "Keys") for key in words(row[0]) if "expire" in row[2]}
    stems = {re.sub(r"(W1|ID|ROW|X|TOKEN|NUMBER|MS(:LANE)?|TOKEN:follow_ups)$", "*", key) for key in told}
    assert {key.replace("worqr:{Q1}", "{*}*").removeprefix("{worqr}:") for key in stems} - {
        "{*}*:part:*:follow_ups"
    } == {*EXPIRING}


def test_what_is_in_the_server_is_as_the_table_says(server: Server, prefix: str) -> None:
    """Each key of a mesh that has something of everything: its type, and whether it expires."""
    told = {key: row[1:3] for row in rows(PAGE, "Keys") for key in words(row[0])}
    seen: set[str] = set()
    for desk in desk_on(server, prefix):
        set_scene(desk)
        desk.call(ops.pause(desk.q, "why"))
        for key, entry in dump(desk.client, prefix).items():
            name = shape(key.decode(), prefix)
            kind, until = told[name]
            assert entry.type == {"sorted set": "zset"}.get(kind, kind), name
            is_open = name == "worqr:{Q1}:part:TOKEN" and b"v" in entry.value and b"closed" not in entry.value
            assert entry.expires == (until.startswith("expires") and not is_open), name
            seen.add(name)
        assert len(seen) > 30


def shape(key: str, prefix: str) -> str:
    """The key as the page writes it."""
    key = re.sub(rf"^{prefix}:{{Q[12]}}", "worqr:{Q1}", key).replace(f"{{{prefix}}}", "{worqr}")
    for kind, name in {
        **dict.fromkeys(("claims", "leaving", "policy", "worker", "WorkMap", "info"), "W1"),
        **dict.fromkeys(("job", "active", "result", "older_result", "taken", "done_id"), "ID"),
        "done": "NUMBER",
        "tag": "X",
        "sent": "ROW",
        "claim": "P1",
        "aside": "P1",
        "twins": "DIGEST",
        "producer": "X",
        "batch": "ID",
        "part": "TOKEN",
        "starts": "MS",
    }.items():
        key = re.sub(rf"(}}:{kind}:)[^:]*", rf"\g<1>{name}", key)
    key = re.sub(r"(}:starts:MS:).*", r"\g<1>LANE", key)
    return re.sub(r"(}:lane:).*", r"\g<1>EPOCH:LANE", key)


def test_every_option_of_a_dispatch_is_in_the_table() -> None:
    every: worqr.JobOptions = {
        "id": "x",
        "delay": 1,
        "result_ttl": 1,
        "timeout": 1,
        "retry": worqr.RetryPolicy(),
        "expires": 1,
        "update": worqr.Update(data=False, run_at=False, counts=True, policy=True),
        "if_exists": "skip",
        "unique_for": 1,
        "meta": {},
        "max_length": 1,
        "front": True,
        "lane": "x",
    }
    from worqr.job_options import encode_options

    table = rows("wire-scripts.md", "Options of dispatch_jobs")
    named = {word for row in table for word in words(row[0])}
    assert set(encode_options(every)) <= named
    read = {name for name in named if re.search(rf"\bo\.{name}\b", script("dispatch_jobs").text)}
    assert named == read
    used = set(re.findall(r"\bo\.(\w+)", script("dispatch_jobs").text)) - {"scheduled_for"}  # that is the leader's
    assert used == named


# Programs


@pytest.fixture
def clean(server: Server) -> Iterator[None]:
    """Programs of the documents use the default prefix."""
    with server.client() as client:
        delete_all(client, "worqr")
        yield
        delete_all(client, "worqr")


@pytest.fixture
def mesh(server: Server, clean: None) -> worqr.Mesh:
    """The mesh that the documents' producers produce for."""
    return worqr.Mesh(server.url, prefix="worqr", patience=20)


Run = Callable[..., str]


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> dict[str, str]:
    """Where `worqr` is this one, and `redis-cli` asks the tests' server, an error reply being an error."""
    commands = {
        "worqr": f"cd {ROOT} && exec {sys.executable} -m worqr",
        "redis-cli": f"exec {shutil.which('redis-cli')} -e -u {server.tcp_url}",
    }
    for name, command in commands.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_URL": server.tcp_url}


@pytest.fixture
def shell(environment: dict[str, str], tmp_path: Path) -> Callable[[str], Any]:
    """`await shell(code)`: what a program of the shell prints."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed: apt-get install redis-tools")

    async def run(code: str) -> str:
        return await output(["/bin/sh", "-c", f"set -e\n{code}"], environment, tmp_path)

    return run


async def output(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """What a program prints that must succeed; the test's own loop goes on."""
    run = partial(
        subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    answer = await trio.to_thread.run_sync(run)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="session")
def node_packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `node_modules` with what tests/node/package-lock.json names, got once."""
    if shutil.which("node") is None:
        no_node("node is not installed")
    found = packages(ROOT / "tests" / "node", request.config, tmp_path_factory)
    return no_node(found) if isinstance(found, str) else found


def no_node(reason: str) -> NoReturn:
    if MUST_HAVE_NODE:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def node(node_packages: Path, environment: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """`await node("name.mjs", *args, url=...)`: what a program of Node prints; the programs lie in the test's folder."""
    (tmp_path / "node_modules").symlink_to(node_packages)
    (tmp_path / "send.mjs").write_text(program("js", "export async function send"))
    (tmp_path / "jobs.mjs").write_text(program("js", "// created welcome-ada"))
    (tmp_path / "room.mjs").write_text(program("js", "async function enqueueWithin"))
    (tmp_path / "two.mjs").write_text(program("js", "redis.lPush("))
    for name in ("flood.mjs", "batch.mjs"):
        shutil.copy(ROOT / "tests" / "node" / name, tmp_path)
    for name in ("enqueue", "dispatch_jobs", "open_batch", "open_part", "seal_batch", "close_part"):
        (tmp_path / f"{name}.lua").write_text(script(name).source)

    async def run(name: str, *args: str, url: str | None = None) -> str:
        known = environment if url is None else {**environment, "REDIS_URL": url}
        return await output(["node", name, *args], known, tmp_path)

    return run


Shell = Callable[[str], Any]
Node = Callable[..., Any]


class Mails:
    """A function ``shop.send_mail`` of a mesh that is not joined yet, and its calls."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.runs = Runs()
        self.calls: list[tuple[str, str]] = []

        @mesh.task(name="shop.send_mail")
        async def send_mail(to: str, subject: str = "hello") -> None:
            self.calls.append((to, subject))
            self.runs.begin(b"")


@asynccontextmanager
async def joined(mesh: worqr.Mesh) -> AsyncGenerator[None]:
    async with mesh.join(grace=5):
        yield


# redis-cli


async def test_two_commands_enqueue(shell: Shell, mesh: worqr.Mesh, without_scans: None) -> None:
    runs = Runs()
    async with serving(mesh, "mails", runs):
        await shell(program("sh", "LPUSH 'worqr:{mails}'"))
        assert await runs.wait(1) == [b"ada@example.org"]


async def test_bytes_from_a_file_arrive_as_they_are(
    shell: Shell, mesh: worqr.Mesh, tmp_path: Path, without_scans: None
) -> None:
    picture = bytes(range(256)) * 1000
    (tmp_path / "picture.png").write_bytes(picture)
    runs = Runs()
    async with serving(mesh, "thumbnails", runs):
        await shell(program("bash", "-x LPUSH"))
        assert await runs.wait(1) == [picture]


async def test_a_function_is_called_from_the_shell(shell: Shell, mesh: worqr.Mesh, without_scans: None) -> None:
    mails = Mails(mesh)
    async with joined(mesh):
        await shell(program("sh", "LPUSH 'worqr:{shop.send_mail}'"))
        await mails.runs.wait(1)
    assert mails.calls == [("ada@example.org", "hi")]


async def test_scripts_are_called_from_the_shell(shell: Shell, mesh: worqr.Mesh, server: Server) -> None:
    runs = Runs()
    printed, calls = program("sh", "worqr script enqueue >"), program("sh", "EVALSHA")
    async with mesh.connect():
        q = mesh.queue("mails")
        said = (await shell(printed + calls)).split()
        assert said[:3] == ["ok", "2", "ok"]
        assert said[3:5] == ["created", "welcome-ada"]
        assert (await q.tasks(), (await q.info()).scheduled) == ([b"grace@example.org", b"ada@example.org"], 1)
        (run_at,) = dict(server.client().zrange("worqr:{mails}:due", 0, -1, withscores=True)).values()
        seconds, _ = server.client().time()
        assert 0 < run_at / 1000 - seconds < 61
        now = calls.replace(
            r"printf '\202\242id\253welcome-ada\245delay\315\352\140'", r"printf '\201\242id\253welcome-ada'"
        )
        assert now != calls
        assert (await shell(now)).split()[2:5] == ["ok", "updated", "welcome-ada"]
        async with serving(mesh, "mails", runs):
            assert Counter(await runs.wait(5)) == {b"ada@example.org": 3, b"grace@example.org": 2}
            assert [context.id for context in runs.contexts if not context.id.startswith("@")] == ["welcome-ada"]


async def test_the_same_request_of_the_shell_is_done_once(shell: Shell, mesh: worqr.Mesh) -> None:
    printed, calls = program("sh", "worqr script enqueue >"), program("sh", "EVALSHA")
    again = calls.partition("\n\n")[2]  # by the same producer
    said = (await shell(printed + calls + again)).splitlines()
    assert said[6] == "late", "the first request was answered: the second one said so"
    assert said[7:] == said[2:6], "the second one was answered the same"
    async with mesh.connect():
        info = await mesh.queue("mails").info()
        assert (info.waiting, info.scheduled) == (2, 1)


# Node


async def test_a_function_is_called_from_node(node: Node, mesh: worqr.Mesh, without_scans: None) -> None:
    mails = Mails(mesh)
    async with joined(mesh):
        await node("two.mjs")
        await mails.runs.wait(1)
    assert mails.calls == [("ada@example.org", "hello")]


async def test_scripts_are_called_from_node(node: Node, mesh: worqr.Mesh) -> None:
    mails, runs = Mails(mesh), Runs()
    async with serving(mesh, "mails", runs):
        assert (await node("jobs.mjs")).splitlines() == ["ok 2", "created welcome-ada"]
        assert sorted(await runs.wait(2)) == [b"ada@example.org", b"grace@example.org"]
        await mails.runs.wait(1)
        (context,) = mails.runs.contexts
        assert (context.id, context.run_at is not None) == ("welcome-ada", True)
    assert mails.calls == [("ada@example.org", "hello")]


async def test_node_sends_again_what_was_not_answered_and_nothing_is_there_twice(
    node: Node, own_server: Server, proxy_to: Callable[[Server], FaultProxy]
) -> None:
    """To a server that knows no script; and then by three connections, one after the other, that are cut when it has done what
    was asked. Node reads a file for each request, so requests are sent in any order.
    """
    mesh, runs = worqr.Mesh(own_server.url, prefix="worqr"), Runs()
    proxy = proxy_to(own_server)
    said = await node("flood.mjs", "worqr:{Q0}", "300", "100", url=proxy.url)
    assert [json.loads(line)[0] for line in said.splitlines()] == ["ok"] * 400
    assert len(proxy.seen("LOAD")) >= 2
    enqueue, dispatch = script("enqueue").sha, script("dispatch_jobs").sha
    faults = [
        proxy.drop_reply(enqueue, nth=100),
        proxy.drop_reply(enqueue, nth=200),
        proxy.drop_reply(dispatch, nth=50),
    ]
    said = await node("flood.mjs", "worqr:{Q1}", "600", "200", url=proxy.url)
    replies = [json.loads(line) for line in said.splitlines()]
    assert [fault.fired for fault in faults] == [True, True, True]
    assert replies[:600] == [["ok", 1]] * 600
    assert [(reply[0], reply[1][:2]) for reply in replies[600:]] == [
        ("ok", ["created", f"job {n}"]) for n in range(200)
    ]
    async with mesh.connect():
        lanes = await mesh.queue("Q1").lanes()
        assert {lane.name: lane.waiting for lane in lanes} == {f"lane {n}": 50 for n in range(4)}
    async with serving(mesh, "Q1", runs):
        expected = [f"task {n}".encode() for n in range(600)] + [f"job {n}".encode() for n in range(200)]
        assert sorted(await runs.wait(800)) == sorted(expected)
        await eventually(mesh.queue("Q1").running, [])
        assert len(runs.tasks) == 800
        assert (await mesh.queue("Q1").info()).counts["enqueued"] == 800


@pytest.mark.parametrize("hint", ["arrives", "is lost"])
async def test_node_waits_for_room_and_gets_it(
    hint: str, node: Node, mesh: worqr.Mesh, server: Server, tmp_path: Path
) -> None:
    """With the message, which is then all that can wake it, and without, when it looks again by itself."""
    waiters, path = RoomKeys(QueueKeys("worqr", "mails")).waiters, tmp_path / "room.mjs"
    text = path.read_text().replace(", 1000, ", ", 2, ")
    if hint == "arrives":
        text = text.replace("sleep(1000,", f"sleep({1000 * 4 * PATIENCE:.0f},")
    path.write_text(text)
    runs, said = Runs(), list[str]()

    async def waits() -> None:
        said.append(await node("room.mjs"))

    async def noted() -> int:
        return await trio.to_thread.run_sync(server.client().hlen, waiters)

    async with mesh.connect(), trio.open_nursery() as nursery:
        q = mesh.queue("mails")
        await q.enqueue(b"a", b"b")
        nursery.start_soon(waits)
        await eventually(noted, 1)
        assert await q.tasks() == [b"b", b"a"]
        if hint == "arrives":
            server.client().persist(waiters)
        else:
            server.client().set(waiters, "of another application")
        with trio.fail_after(2 * PATIENCE):
            async with serving(mesh, "mails", runs, room=1):
                assert await runs.wait(3, 2 * PATIENCE) == [b"a", b"b", b"alan@example.org"]
    assert said == ["1\n"]
    server.client().delete(waiters)


async def test_node_makes_a_batch_over_two_queues(node: Node, mesh: worqr.Mesh) -> None:
    runs, ended = Runs(), list[worqr.BatchInfo | None]()

    async def handler(task: bytes) -> None:
        if task == b"all done":
            ended.append(worqr.current().ended_batch)
        runs.begin(task)

    said = (await node("batch.mjs", "worqr:{Q1}", "worqr:{Q2}", "2")).splitlines()
    part = ["ok 1 0", "created job 0", "created job 1"]
    assert said == ["ok", *part, *part, "ok sealed 4", "ok", "ok"]
    async with mesh.connect():
        batch = mesh.queue("Q1").batch("report")
        assert (await batch.info()).jobs == 4
        with pytest.raises(worqr.BatchEnded):
            await mesh.queue("Q1").batch("unknown").dispatch(mesh.call("Q1", b"x"))
    async with serving(mesh, "Q1", handler), serving(mesh, "Q2", handler):
        info = await batch.wait(PATIENCE)
        assert (info.finished, info.meta, info.succeeded) == (4, {"by": "node"}, True)
        assert sorted(await runs.wait(5)) == [b"all done", b"job 0", b"job 0", b"job 1", b"job 1"]
        assert [each and each.id for each in ended] == ["report"]


# redis-py


async def test_plain_redis_py_puts_many_in_at_once(server: Server, mesh: worqr.Mesh, without_scans: None) -> None:
    runs, tasks = Runs(), [b"%d" % n for n in range(500)]
    async with serving(mesh, "Q1", runs, room=1):
        with server.client().pipeline(transaction=False) as pipe:
            pipe.lpush("worqr:{Q1}", *tasks)
            pipe.publish("worqr:{Q1}", "1")
            pipe.execute()
        assert await runs.wait(500) == tasks, "taken from the first to the last"


def test_a_producer_goes_by_what_the_page_says(server: Server, clean: None) -> None:
    client = server.client()
    enqueue = client.register_script(script("enqueue").source)
    keys = ["worqr:{Q1}"]
    assert enqueue(keys, ["me", 1, 1, -1, 0, b"a", b"b"]) == [b"ok", 2]
    assert enqueue(keys, ["me", 1, 1, -1, 0, b"a", b"b"]) == [b"ok", 2], "answered the same"
    assert client.lrange("worqr:{Q1}", 0, -1) == [b"b", b"a"], "and not done again"
    assert enqueue(keys, ["me", 2, 2, 2, 0, b"c"]) == [b"full", 2]
    client.rpop("worqr:{Q1}")
    assert enqueue(keys, ["me", 2, 2, 2, 0, b"c"]) == [b"full", 2], "a refusal is kept, too"
    assert enqueue(keys, ["me", 3, 3, 2, 0, b"c"]) == [b"ok", 1]
    assert enqueue(keys, ["me", 2, 2, -1, 0, b"late"]) == [b"late"]
    assert 3500 < client.ttl("worqr:{Q1}:producer:me") <= 3600
    assert enqueue(keys, ["other", 1, 1, -1, 0, b"d"]) == [b"ok", 1]
    client.script_flush()
    with pytest.raises(redis.exceptions.NoScriptError):
        client.evalsha(script("enqueue").sha, 1, *keys, "me", 4, 4, -1, 0, b"e")
    assert client.lrange("worqr:{Q1}", 0, -1) == [b"d", b"c", b"b"]


@pytest.mark.parametrize("numbers", [("", 1), (1, ""), ("x", 1), (1, "x")])
def test_a_request_without_numbers_is_an_error_before_anything_is_written(
    server: Server, clean: None, numbers: tuple[Any, Any]
) -> None:
    client = server.client()
    for name, rest in (("enqueue", [-1, 0, b"a"]), ("dispatch_jobs", [0, b"\x80", b"a"])):
        with pytest.raises(redis.ResponseError, match="must be whole numbers"):
            client.register_script(script(name).source)(["worqr:{Q1}"], ["me", *numbers, *rest])
    assert not list(client.scan_iter("worqr:{Q1}*"))


async def test_a_job_of_plain_redis_py_has_what_its_options_say(server: Server, mesh: worqr.Mesh) -> None:
    dispatch = server.client().register_script(script("dispatch_jobs").source)
    keys = ["worqr:{Q1}"]
    options = {
        "id": "x",
        "delay": 0,
        "exists": "raise",
        "unique_for": 60_000,
        "expires": "60000",
        "meta": '{"a":"b"}',
        "fields": {"result_ttl": "60000", "timeout": "5000", "max_failures": "2"},
    }
    job = [msgspec.msgpack.encode(options), b"task"]
    word, (outcome, name, _) = dispatch(keys, ["me", 1, 1, 0, *job])
    assert (word, outcome, name) == (b"ok", b"created", b"x")
    word, (outcome, name, _) = dispatch(keys, ["me", 2, 2, 1, *job])
    assert (word, outcome, name) == (b"refused", b"duplicate", b"x")
    runs = Runs()
    async with serving(mesh, "Q1", runs):
        await runs.wait(1)
        (context,) = runs.contexts
        assert (context.id, context.meta, context.task) == ("x", {"a": "b"}, b"task")
        assert await mesh.queue("Q1").job("x").result(PATIENCE) is None
    with pytest.raises(redis.ResponseError):
        dispatch(keys, ["me", 3, 3, 0, b"\xc1 is no MessagePack", b"task"])
    assert server.client().exists("worqr:{Q1}", "worqr:{Q1}:job:x") == 0


# What they do wrong


def push(server: Server, queue: str, *tasks: bytes) -> None:
    client = server.client()
    client.lpush(f"worqr:{{{queue}}}", *tasks)
    client.publish(f"worqr:{{{queue}}}", "1")


WRONG = [
    *({name: "soon"} for name in ("delay", "run_at", "unique_for", "max_length", "data", "front", "expires", "fields")),
    *({name: 7} for name in ("id", "when", "exists", "policy", "expires", "counts", "meta", "fields")),
    *({name: ["x"]} for name in ("id", "delay", "expires", "policy", "meta", "fields")),
    *(
        {"id": wrong}
        for wrong in ("", "@7", "a\n", "x" * 201, b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf0\x9f\xe2\x82\xac\x98\x80")
    ),
    *({"delay": wrong} for wrong in (-1, 0.5, float("nan"), float("inf"), 2**63, 10**15, 2 * 10**14 + 1)),
    *({"run_at": wrong} for wrong in (-1, 0.5, 253402300800000, 999_999_999_999_999)),  # the last year of dates is 9999
    *({name: "253402300800000"} for name in ("expires_at", "scheduled_for")),
    *({"expires": wrong} for wrong in ("", "-1", "1e3", "1.5", "9" * 16)),
    *(
        {"unique_for": 0, "id": "x"},
        {"when": "never"},
        {"when": "set keep"},
        {"exists": ""},
        {"dealy": 5},
        {"task": "x"},
        {7: 7},
    ),
    *({"batch": wrong} for wrong in ({}, "x", 7, {"token": "x" * 16, "home": "q", "id": "b", "number": 1})),
    *({"meta": wrong} for wrong in ({}, "x" * 4097, b'{"\xff": "a"}')),
    *(
        {"fields": wrong}
        for wrong in ({"timeout": "soon"}, {"timeout": 5}, {"task": "x"}, {"state": "active"}, {"max_failures": ""})
    ),
    *(
        {"fields": wrong}
        for wrong in ({"retry_on": 7}, {"retry_on": b"\xff"}, {"timeout": {}}, {7: "7"}, {"timeout jitter": "1"})
    ),
]


def packed(options: Any) -> bytes:
    """As MessagePack; bytes as a text that is none."""
    found: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            found.append(value)
            return "\x01" * len(value)
        return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value

    encoded = msgspec.msgpack.encode(plain(options))
    for each in found:
        encoded = encoded.replace(b"\x01" * len(each), each)
    return encoded


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_options_that_cannot_be_are_an_error_before_anything_is_written(
    server: Server, prefix: str, wrong: Any
) -> None:
    for desk in desk_on(server, prefix):
        good = msgspec.msgpack.encode({"id": "good"})
        call = ops.dispatch_jobs(desk.q, [({"id": "good"}, b"a")])
        bad = packed(wrong)
        for jobs in ([good, b"a", bad, b"b"], [bad, b"b"]):
            with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="has no such option|cannot be that"):
                desk.client.evalsha(call.script.sha, 1, desk.q.base, "me", 1, 1, 0, *jobs)
        with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="a job is its options"):
            desk.client.evalsha(call.script.sha, 1, desk.q.base, "me", 1, 1, 0, good, b"a", good)


async def test_meta_that_is_none_harms_nobody(server: Server, mesh: worqr.Mesh) -> None:
    dispatch = server.client().register_script(script("dispatch_jobs").source)
    seen: list[object] = []

    async def handler(_task: bytes) -> None:
        seen.append(worqr.current().meta)
        raise worqr.Failure("on purpose")

    async with serving(mesh, "Q1", handler):
        for n, meta in enumerate(("", "no JSON", "[]", '{"a": 7}', '{"a": "b"}'), 1):
            options = msgspec.msgpack.encode({"id": f"x{n}", "meta": meta})
            assert dispatch(["worqr:{Q1}"], ["me", n, n, 0, options, b"a"])[0] == b"ok"
        q = mesh.queue("Q1")
        await eventually(lambda: failed(q), 5)
        assert sorted(map(str, seen)) == ["{'a': 'b'}", *["{}"] * 4]
        assert {record.id: record.meta for record in await q.failed.list()}["x5"] == {"a": "b"}
        assert await q.failed.drop_all() == 5


async def failed(q: worqr.Queue) -> int:
    return len(await q.failed.list())


async def test_a_record_that_nobody_wrote_whole_costs_no_other_task(server: Server, mesh: worqr.Mesh) -> None:
    runs, client = Runs(), server.client()
    client.hset("worqr:{Q1}:job:half", "state", "waiting")
    client.lpush("worqr:{Q1}", b"a", b"b", MARKER + b"half", b"c")
    async with serving(mesh, "Q1", runs):
        assert sorted(await runs.wait(3)) == [b"a", b"b", b"c"]
        await eventually(mesh.queue("Q1").running, [])
    assert not list(client.scan_iter("worqr:{Q1}:claim*"))


async def test_references_to_nothing_are_skipped(server: Server, mesh: worqr.Mesh) -> None:
    runs, client = Runs(), server.client()
    forged = [MARKER, MARKER + b"nobody", MARKER + b"\xff{}\r\n*1\r\n", MARKER * 2, MARKER + b"x" * 100_000]
    async with serving(mesh, "Q1", runs):
        job = await mesh.queue("Q1").dispatch(b"later", id="later", delay=3600)
        push(server, "Q1", *forged, MARKER + b"later", b"a")
        assert await runs.wait(1) == [b"a"]
        await eventually(mesh.queue("Q1").running, [])
        push(server, "Q1", *forged, b"b")
        assert await runs.wait(2) == [b"a", b"b"]
        assert (await job.status()).state == "scheduled"
        await job.cancel()
    assert len(runs.tasks) == 2
    left = {key for key in dump(client, "worqr") if b":{Q1}" in key}
    assert {key for key in left if not client.ttl(key) > 0} == set()


async def test_what_a_function_cannot_read_is_set_aside(server: Server, mesh: worqr.Mesh) -> None:
    mails = Mails(mesh)
    wrong = [
        b"",
        b"ada@example.org",
        b"[]",
        b'{"to": 7}',
        b'{"subject": "hi"}',
        b"\x00\xff",
        b'{"to": "a"',
        b"[" * 100_000,
    ]
    async with joined(mesh):
        push(server, "shop.send_mail", *wrong, b'{"to": "ada", "cc": "of a newer producer"}')
        await mails.runs.wait(1)
        q = mesh.queue("shop.send_mail")
        await eventually(lambda: broken(q), sorted(wrong))
        assert {record.reason for record in await q.undecodable.list()} == {"undecodable"}
        assert await q.undecodable.drop_all() == len(wrong)
    assert mails.calls == [("ada", "hello")]


async def broken(q: worqr.Queue) -> list[bytes]:
    return sorted(record.task for record in await q.undecodable.list())


async def test_what_is_larger_than_worqr_would_send_is_run_and_set_aside_all_the_same(
    server: Server, mesh: worqr.Mesh
) -> None:
    huge, runs = os.urandom(1 << 20) * 20, Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(task) > 1 and worqr.current().attempt == 2:
            raise worqr.Failure("too much")
        if len(task) > 1:
            raise worqr.Retry(delay=0)

    async with serving(mesh, "Q1", handler, retry=QUICK) as peer:
        with pytest.raises(worqr.PayloadTooLarge):
            await mesh.queue("Q1").enqueue(huge)
        push(server, "Q1", b"a", huge, b"b")
        tasks = await runs.wait(4)
        assert Counter(map(len, tasks)) == {1: 2, len(huge): 2}
        assert all(task == huge for task in tasks if len(task) > 1)
        await eventually(mesh.queue("Q1").running, [])
        (record,) = await mesh.queue("Q1").failed.list()
        assert record.task == huge
        assert peer.health().ready
        assert await mesh.queue("Q1").failed.drop_all() == 1


async def test_a_queue_whose_key_somebody_sets_is_told_of_and_others_run(
    server: Server, mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    client, held, runs = server.client(), Held(), Runs()
    caplog.set_level(logging.ERROR)
    async with mesh.join(grace=5) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", held))
        await nursery.start(partial(peer.serve, "Q2", runs))
        push(server, "Q1", b"a")
        await held.wait(1)
        client.set("worqr:{Q1}", "not a list")
        client.publish("worqr:{Q1}", "1")
        await until(lambda: "start_tasks: queue 'Q1'" in caplog.text and "WRONGTYPE" in caplog.text)
        push(server, "Q2", b"b")
        assert await runs.wait(1) == [b"b"]
        held.gate.set()  # what ran there ends
        await until(lambda: held.done == [b"a"])
        client.delete("worqr:{Q1}")
        push(server, "Q1", b"c")
        await held.wait(2)
        assert held.tasks == [b"a", b"c"]
        await eventually(mesh.queue("Q1").running, [])
        nursery.cancel_scope.cancel()
    assert "Q2" not in caplog.text
