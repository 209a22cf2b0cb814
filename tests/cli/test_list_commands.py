"""``worqr queues`` and ``workers``: tables for people, JSON for programs, and what they say of nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Awaitable, Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command
from tests.ops.driver import Desk
from tests.peer.tools import eventually, until
from tests.support.servers import Server
from worqr import ops

Beside = Callable[..., Awaitable[Answer]]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("limits",), "no program has used a limit with a name: write worqr.Limit(20, name='openai')"),
        (("schedules",), "no worker has declared a schedule"),
        (("schedules", "list"), "no worker has declared a schedule"),
    ],
)
def test_nothing_is_a_note_beside_an_empty_list(cli: Command, words: tuple[str, ...], note: str) -> None:
    assert cli(*words) == Answer(0, "", f"worqr: {note}\n")
    assert cli(*words, "--json") == Answer(0, "", "")


@pytest.mark.parametrize(
    ("word", "note"),
    [
        ("queues", "no queue holds tasks or has workers"),
        ("workers", "no worker is registered; start one with `worqr run package.module:mesh`"),
    ],
)
def test_an_empty_mesh_may_be_another_one_than_that_of_the_program(
    cli: Command, prefix: str, word: str, note: str
) -> None:
    remedy = f"the prefix is {prefix!r}: for a Mesh(prefix='shop'), add --prefix shop"
    assert cli(word) == Answer(0, "", f"worqr: {note}; {remedy}\n")
    assert cli(word, "--json") == Answer(0, "", "")


async def test_limits_with_a_name_are_listed_with_what_is_in_use(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect(), mesh.limit(worqr.Limit(20, rate=500, per=60, unit="tokens", name="openai"), cost=90):
        header, row = (await beside("limits")).lines
        assert header.split() == ["limit", "allows", "in", "use", "in", "period", "waiting", "expired", "state"]
        assert row.split() == [
            *["openai", "20", "at", "once,", "500", "tokens", "per", "minute", "1", "90", "0", "0", "-"]
        ]
        [found] = (await beside("limits", "--json")).json
        assert found == {
            "name": "openai",
            "concurrency": 20,
            "held": 1,
            "rate": 500,
            "per": 60.0,
            "unit": "tokens",
            "used": 90,
            "waiting": 0,
            "expired": 0,
        }


async def test_queues_are_listed_with_all_there_is_to_know(beside: Beside, mesh: worqr.Mesh) -> None:
    long = "q" * 200
    async with mesh.connect():
        await mesh.queue(long).enqueue(b"a", b"b")
        await mesh.queue("paused").pause("\x1b[31mwhy [bold]")
        await mesh.queue("paused").dispatch(b"x", delay=3600)
        answer = await beside("queues")
        assert answer.err == ""
        header, first, second = answer.lines
        assert header.split()[:4] == ["queue", "waiting", "scheduled", "blocked"]
        assert first.split() == [
            "paused",
            "0",
            "1",
            "0",
            "0",
            "0",
            "0",
            "0",
            "0",
            "-",
            "paused:",
            "\\x1b[31mwhy",
            "[bold]",
        ]
        assert second.split()[:2] == [long, "2"]
        paused, other = (await beside("queues", "--json")).json
        del paused["counts"]
        numbers = dict.fromkeys(("waiting", "blocked", "running", "failed", "undecodable", "workers"), 0)
        assert paused == {
            **numbers,
            "name": "paused",
            "scheduled": 1,
            "paused": "\x1b[31mwhy [bold]",
            "oldest_job": None,
            "age": None,
            "age_estimated": False,
            "limits": [],
            "limits_overridden": False,
            "held_back": "paused",
            "held_for": None,
            "lanes": 0,
            "held_lanes": 0,
            "batches": 0,
            "relay_pending": False,
            "open_batches": 0,
            "due_soon": 0,
            "suspended": 0,
            "kept": 0,
            "kept_bytes": 0,
            "unserved": False,
        }
        assert (other["name"], other["unserved"]) == (long, True)
        for name in (long, "paused"):
            await mesh.queue(name).resume()
            await mesh.queue(name).cancel_all()


async def test_a_queue_that_no_worker_serves_is_marked(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "served", _nothing))
        await mesh.queue("served").pause()
        for name in ("served", "unserved"):
            await mesh.queue(name).enqueue(b"x")
        header, *rows = (await beside("queues")).lines
        assert header.endswith("state")
        assert [row.endswith("no worker") for row in rows] == [False, True]
        found = {info["name"]: info["unserved"] for info in (await beside("queues", "--json")).json}
        assert found == {"served": False, "unserved": True}
        await mesh.queue("served").resume()
        await mesh.queue("unserved").cancel_all()
        nursery.cancel_scope.cancel()


async def test_workers_are_listed_with_what_they_serve(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0, concurrency=7) as peer, trio.open_nursery() as nursery:
        for queue in ("mails", "reports"):
            await nursery.start(partial(peer.serve, queue, _nothing))
        _, row = (await beside("workers")).lines
        assert row.split()[0] == peer.id
        assert str(os.getpid()) in row.split()
        assert "mails, reports" in row
        (worker,) = (await beside("workers", "--json")).json
        assert worker["id"] == peer.id
        assert worker["queues"] == ["mails", "reports"]
        assert worker["beat_age"] >= 0
        assert worker["state"] == "ready"
        assert worker["python"] == platform.python_version()
        assert datetime.fromisoformat(worker["started"]) <= datetime.now(UTC) + timedelta(seconds=5)
        assert set(worker) == {
            *("id", "host", "pid", "app", "version", "queues", "running", "room", "beat_age"),
            *("state", "leads", "started", "lag", "python", "threads", "processes", "deploy"),
            *("request", "requested_at", "answer", "full_since"),
        }
        nursery.cancel_scope.cancel()


def test_the_mesh_as_a_whole(cli: Command, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    empty = cli("info")
    assert empty.code == 0
    assert "none: no worker leads the mesh" in empty.lines[0]
    desk.register("shop:1")
    desk.client.hset(desk.g.info("shop:1"), mapping={"app": "shop", "running": 2, "room": 3})
    desk.call(ops.keep_worker_alive(desk.g, "shop:1", 1, keepalive_ms=3000, lease_ms=60_000, running=2, room=3))
    desk.call(ops.note_queues(desk.g, ["Q1"]))
    desk.put(b"x", b"y")
    shown = {words[0]: words[1] for line in cli("info").lines if len(words := line.split(None, 1)) == 2}
    assert (shown["leader"], shown["queues"], shown["waiting"], shown["workers"]) == ("shop:1", "1", "2", "1")
    assert shown["read"].endswith("read directly")
    assert shown["shop"].split() == ["1", "2", "3"]
    found = cli("info", "--json").json[0]
    assert (found["source"], found["leader"], found["apps"]) == (
        *("direct", "shop:1"),
        {"shop": {"workers": 1, "running": 2, "room": 3, "full_since": None}},
    )
    assert [(queue["name"], queue["waiting"]) for queue in found["queues"]] == [("Q1", 2)]
    assert set(found) == {field.name for field in fields(worqr.MeshInfo)}
    assert (found["unreadable"], found["memory"]) == ({}, None)
    assert (shown["unhealthy"], found["unhealthy"]) == ("0", [])
    desk.client.delete(desk.g.worker("shop:1"))
    assert "1" in next(line for line in cli("info").lines if line.startswith("unhealthy"))
    [missing] = cli("info", "--json").json[0]["unhealthy"]
    assert (missing["id"], missing["state"], missing["beat_age"]) == ("shop:1", "missing", None)
    desk.wipe()


def test_the_log_of_the_mesh(cli: Command, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(server.client(), prefix)
    assert cli("log").err == "worqr: the log of the mesh has no such entry\n"
    assert cli("log", "--json").out == ""
    desk.register("shop:1")
    assert cli("pause", "Q1", "why", "--as", "Ada").code == 0
    monkeypatch.setenv("LOGNAME", "grace")
    assert cli("resume", "Q1").code == 0
    found = cli("log", "--json").json
    assert [(entry["kind"], entry["who"], entry["queue"]) for entry in found] == [
        *(("joined", "", ""), ("paused", "Ada", "Q1"), ("resumed", "grace", "Q1"))
    ]
    assert set(found[0]) == {"id", "at", "kind", "who", "queue", "worker", "job", "count", "text"}
    assert [entry["kind"] for entry in cli("log", "--limit", "1", "--json").json] == ["resumed"]
    assert [entry["kind"] for entry in cli("log", "--kind", "joined", "--kind", "paused", "--json").json] == [
        "joined",
        "paused",
    ]
    assert [entry["kind"] for entry in cli("log", "--queue", "Q1", "--limit", "1", "--json").json] == ["resumed"]
    head, *rows = cli("log").lines
    assert head.split() == ["time", "event", "by", "queue", "worker", "number", "details"]
    assert rows[1].split()[2:] == ["paused", "Ada", "Q1", "-", "why"] or rows[1].endswith("why")
    for wrong in ("0", "1001"):
        assert cli("log", "--limit", wrong).err == f"worqr: --limit must be 1 to 1,000, not {wrong}\n"
    desk.wipe()


async def test_workers_are_asked_to_be_quiet_and_answer(beside: Beside, mesh: worqr.Mesh) -> None:
    @mesh.task(name="tidy")
    async def tidy() -> None: ...

    async with mesh.join(concurrency=5) as peer:

        async def seen() -> tuple[str, str, int]:
            (info,) = (await beside("workers", "--json")).json
            return info["state"], info["request"], info["room"]

        asked = await beside("workers", "quiet", peer.id[:-8])
        said = f"Asked worker {peer.id}: quiet; `worqr workers` shows whether it has answered\n"
        assert asked == Answer(0, said, "")
        await eventually(seen, ("quiet", "", 0))
        assert (await beside("workers", "resume", peer.id)).code == 0
        await eventually(seen, ("ready", "", 5))
        (asked_for,) = (await beside("workers", "concurrency", peer.id, "7", "--json")).json
        assert asked_for == {"worker": peer.id, "what": None, "concurrency": 7}
        await eventually(seen, ("ready", "", 7))
        for wrong in ("0", "x", "-1"):
            assert (await beside("workers", "concurrency", peer.id, wrong)).code == 2
        gone = await beside("workers", "quiet", "nobody")
        assert gone.err.startswith("worqr: there is no worker 'nobody': it has left, or was evicted before; ")
        assert (await beside("workers", "drain", peer.id)).code == 0
        await peer.wait()


def test_a_worker_that_does_not_answer_is_shown(cli: Command, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1")
    assert cli("workers", "drain", "shop:1").code == 0
    assert "has not answered yet: drain" in cli("workers").out
    desk.client.hset(desk.g.info("shop:1"), "answer", "1 refused: why")
    desk.client.hdel(desk.g.info("shop:1"), "request")
    assert "has refused: why" in cli("workers").out
    desk.wipe()


async def test_workers_are_evicted_by_the_beginning_of_their_ids(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "mails", _nothing))
        first = peer.id
        answer = await beside("workers", "evict", first[:-8])
        assert answer == Answer(0, f"Evicted worker {first}; its tasks are back in their queues\n", "")
        await until(lambda: peer.id != first)  # it joins again
        assert (await beside("workers", "list", "--json")).json[0]["id"] == peer.id
        again = await beside("workers", "evict", first)
        assert (again.code, again.out) == (1, "")
        assert again.err.startswith(f"worqr: there is no worker {first!r}: it has left, or was evicted before; ")
        nursery.cancel_scope.cancel()


def test_of_several_ids_none_is_evicted_if_one_is_wrong(cli: Command, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:ab12", "shop:ab34", "shop:cd")
    with desk.nothing_changes():
        assert cli("workers", "evict", "shop:cd", "shop:ab") == Answer(
            1,
            "",
            "worqr: 'shop:ab' is ambiguous: 2 worker ids begin with it (shop:ab12, shop:ab34); "
            "type more characters. Nothing was done\n",
        )
        wrong = cli("workers", "evict", "shop:cd", "shop:ef")
        assert (wrong.code, wrong.out) == (1, "")
        assert "no worker 'shop:ef'" in wrong.err
        assert cli("workers", "evict").code == 2
    done = cli("workers", "evict", "shop:c", "shop:ab34", "shop:cd")
    assert [line.split()[2].rstrip(";") for line in done.lines] == ["shop:ab34", "shop:cd"]
    assert cli("workers", "--json").json[0]["id"] == "shop:ab12"
    desk.wipe()


async def _nothing(_task: bytes) -> None:
    pass
