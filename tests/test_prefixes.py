"""Two meshes with different prefixes on one server never see each other, however alike the prefixes are.

No key and no channel of one can be spelled by the other: shown of the names themselves, by search and by reading a key's
prefix back; and of two meshes at work with the same queues, ids, functions and schedules, by everything that is in the
server and everything that is published while one of them is operated on, killed and deleted.
"""

from __future__ import annotations

import inspect
import unicodedata
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import redis
import trio
from hypothesis import example, given
from hypothesis import strategies as st

import worqr
from tests.cli.conftest import cli, command, logging_as_before
from tests.peer.tools import Held, Runs, eventually, until
from tests.support.children import Child
from tests.support.leaks import delete_all, dump, short
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.keys import QueueKeys, RegistryKeys, check_name

pytestmark = pytest.mark.one_server

__all__ = ["cli", "command", "logging_as_before"]

ALIKE = {
    "two letters": ("a", "b"),
    "one begins like the other": ("{}", "{}2"),
    "a part more": ("{}", "{}:x"),
    "the separator": ("{}", "{}:"),
    "a word of ours more": ("{}", "{}-fail"),
    "a star": ("{}*", "{}x"),
    "a question mark": ("{}?", "{}x"),
    "a class": ("{}[ab]", "{}a"),
    "a backslash": ("{}\\", "{}\\\\"),
    "a magic character of Lua": ("{}.", "{}%"),
    "composed and not": ("{}é", unicodedata.normalize("NFD", "{}é")),
    "large and small": ("{}İ", "{}i̇"),
    "a space": ("{} ", "{}"),
}


# Names


def spelled(prefix: str, queue: str, word: str) -> set[str]:
    """Every key and channel that a mesh can spell of a queue, a worker, an id and the like of these names; the link's as well."""
    found: set[str] = set()
    tags = ("", "7", "aZ")
    queues = [QueueKeys(prefix, queue, failures, tag) for failures in (False, True) for tag in tags]
    for keys in (*queues, RegistryKeys(prefix)):
        for name, member in inspect.getmembers(type(keys)):
            if isinstance(member, property) and name not in {"name", "display_name", "id_suffix"}:
                found.add(getattr(keys, name))
            elif inspect.isfunction(member) and not name.startswith("_"):
                parameters = list(inspect.signature(member).parameters)[1:]
                found.add(member(keys, *(7 if each == "claim" else word for each in parameters)))
        found |= {keys.base, f"{keys.base}:producer:{word}"}
    return found


def owner(name: str) -> str:
    """The prefix of the mesh to which a key or a channel belongs."""
    before, _, behind = name.partition("{")
    if before:
        assert before.endswith(":")
        return before[:-1]
    return behind.partition("}")[0]


def is_name(text: str) -> bool:
    try:
        check_name(text)
    except worqr.UsageError:
        return False
    return True


PARTS = (
    "a",
    "b",
    ":",
    "~",
    "-",
    "-fail",
    "-shard",
    "_cancel",
    "claim:7",
    "job",
    "{",
    "}",
    "*",
    "\\",
    "[",
    " ",
    "é",
    "%",
    "",
)
names = st.one_of(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.text(max_size=6)).filter(is_name)
ids = st.one_of(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.text(max_size=6))


@given(one=names, other=names, queue=names, another=names, word=ids, different=ids)
@example("worqr", "worqr:", "x", ":{x", "", "")
@example("a", "b", "b", "a", "a}:Workers", "b:{a}")
def test_no_name_of_one_can_be_spelled_by_the_other(
    one: str, other: str, queue: str, another: str, word: str, different: str
) -> None:
    mine, theirs = spelled(one, queue, word), spelled(other, another, different)
    assert {owner(name) for name in mine} == {one}
    assert {owner(name) for name in theirs} == {other}
    assert one == other or not mine & theirs


def test_what_would_make_them_alike_is_refused() -> None:
    for prefix in ("", "a:{b", "{a}", "a}", "a\n", "a" * 201, "\ud800"):
        with pytest.raises(worqr.UsageError, match="prefix"):
            worqr.Mesh(prefix=prefix)
    for queue in ("", "b}:{c", "{b}-fail"):
        with pytest.raises(worqr.UsageError, match="queue name"):
            worqr.Mesh().queue(queue)


# Two meshes at work


@pytest.fixture(
    params=[*ALIKE.values(), *(pair[::-1] for pair in ALIKE.values())],
    ids=[*ALIKE, *(f"{kind}, turned" for kind in ALIKE)],
)
def prefixes(request: pytest.FixtureRequest, server: Server, prefix: str) -> Iterator[tuple[str, str]]:
    """Two prefixes that nobody else uses. What was left under them is taken away."""
    one, other = (f"{prefix}{each.format('')}" for each in request.param)
    assert one != other
    yield one, other
    with server.client() as client:
        for each in (one, other):
            delete_all(client, each)


CHANGING = ("}:waiting", ":runs", ":history", ":history10", ":histories")
"""The ends of keys that a mesh at rest writes by itself, within seconds of its last run."""


class World:
    """One mesh with something of everything in it, served by a peer: all that it holds is the same in every such mesh."""

    def __init__(self, url: str, prefix: str, queues: tuple[str, ...]) -> None:
        self.mesh = worqr.Mesh(url, prefix=prefix, patience=20)
        self.prefix = prefix
        self.queues = queues
        self.held = {queue: Held() for queue in queues}
        self.calls: list[int] = []
        self.peer: worqr.Peer

        @self.mesh.task(name="count", result_ttl=3600)
        async def count(n: int) -> int:
            self.calls.append(n)
            return n

        self.count = count
        self.mesh.every(24 * 3600, count.call(-1), name="daily")

    async def fill(self) -> None:
        """In each queue: a task and a job that run, a blocked twin, tasks that wait, a due job, a failed one, a result."""
        for queue in self.queues:
            q, held = self.mesh.queue(queue), self.held[queue]
            await q.enqueue(b"run")
            await held.wait(1)
            await q.dispatch(b"job", id="x")
            await held.wait(2)
            await q.dispatch(b"twin", id="x")
            await q.dispatch(b"later", id="later", delay=3600)
            await q.enqueue(b"a", b"b")
            await q.dispatch(b"waits", id="waits", unique_for=3600)
        assert await (await self.count.dispatch(7)).result(PATIENCE) == 7

    def seen(self, client: redis.Redis) -> dict[str, Any]:
        """All that is there but what changes by itself: beats, the lease, what a scan says, what people are told of a worker,
        where a schedule stands, and what is counted of runs."""
        found: dict[str, Any] = {}
        for key, entry in dump(client, self.prefix).items():
            name = short(key, self.prefix)
            if name == "schedules":
                found[key.decode()] = {
                    field: value for field, value in entry.value.items() if field[:4] in {b"def ", b"paus"}
                }
            elif name == "schedules_due":
                found[key.decode()] = set(entry.value)
            elif name.startswith("{") or not name.startswith(("worker:", "leader", "info:", "producer:")):
                found[key.decode()] = entry
            else:
                found[key.decode()] = entry.type
            if ":policy:" in name:
                entry.value.pop(b"noted", None)
        return {key: each for key, each in found.items() if not key.endswith(CHANGING)}


@asynccontextmanager
async def at_work(url: str, prefix: str, queues: tuple[str, ...]) -> AsyncGenerator[World]:
    """Such a mesh; it has room for two runs on each queue."""
    world = World(url, prefix, queues)
    async with world.mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        world.peer = peer
        for queue in queues:
            await nursery.start(partial(peer.serve, queue, world.held[queue], concurrency=2))
        await world.fill()
        yield world
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def heard(server: Server) -> AsyncGenerator[Callable[[], list[str]]]:
    """The channels of all that is published."""
    with server.client().pubsub() as pubsub:
        pubsub.psubscribe("*")
        assert pubsub.get_message(timeout=PATIENCE)

        def tell() -> list[str]:
            found: list[str] = []
            server.client().publish("the:{end}", b"")
            while True:
                message = pubsub.get_message(timeout=PATIENCE)
                assert message is not None
                channel = message["channel"].decode()
                if channel == "the:{end}":
                    return found
                found.append(channel)
                if channel.endswith("}:due"):
                    assert owner(message["data"].decode().partition(" ")[2]) == owner(channel)

        yield tell


async def operate(world: World) -> None:
    """Everything that an operator can do to a mesh, to each of its queues."""
    mesh = world.mesh
    for queue in world.queues:
        q = mesh.queue(queue)
        await q.dispatch(b"sooner", id="soon", delay=1800)
        await q.cancel(b"a", reason="why")
        assert (await q.cancel(b"run", wait=PATIENCE)).acknowledged == 1
        await q.job("later").cancel()
        await q.dispatch(b"new", id="waits")
        await q.pause("for good")
        await q.cancel_all(wait=PATIENCE)
        await q.enqueue(b"c", b"d")
        await q.delete()
    await mesh.pause_schedule("daily")
    await world.count.dispatch(8)
    await until(lambda: 8 in world.calls)


async def test_what_is_done_to_one_is_nothing_to_the_other(server: Server, prefixes: tuple[str, str]) -> None:
    one, other = prefixes
    queues = ("Q1", one, other, f"{one}:Q1")
    client = server.client()
    async with at_work(server.url, one, queues) as mine, at_work(server.url, other, queues) as theirs:
        before = theirs.seen(client)
        assert len(before) > 40
        async with heard(server) as tell:
            await operate(mine)
            published = tell()
        by = Counter(map(owner, published))
        assert by[one] > 10
        assert by.keys() <= {one, other}
        assert [channel for channel in published if owner(channel) == other and ":wake:" not in channel] == []
        after = theirs.seen(client)
        assert after == before
        assert not set(after) & set(mine.seen(client))
        assert all(held.cancelled == [] and held.tasks == [b"run", b"job"] for held in theirs.held.values())
        assert {schedule.paused for schedule in await theirs.mesh.schedules()} == {False}
        assert {schedule.paused for schedule in await mine.mesh.schedules()} == {True}
        for world in (mine, theirs):
            assert [worker.id for worker in await world.mesh.workers()] == [world.peer.id]
        waiting = {info.name: info.waiting for info in await theirs.mesh.queues()}
        assert {queue: waiting[queue] for queue in queues} == dict.fromkeys(queues, 3)
        for held in theirs.held.values():  # and all of it goes on
            held.gate.set()
        for held in theirs.held.values():
            assert sorted(await held.wait(6)) == sorted([b"run", b"job", b"twin", b"a", b"b", b"waits"])
        assert (theirs.calls, mine.calls) == ([7], [7, 8])


DYING = """
import sys, trio, worqr
from functools import partial

async def hold(task):
    print("run", task.decode(), flush=True)
    await trio.sleep_forever()

async def main(url, prefix):
    async with worqr.Mesh(url, prefix=prefix).join() as peer:
        await peer.serve("Q1", hold)

trio.run(main, *sys.argv[1:])
"""


async def test_who_dies_in_one_is_swept_there_and_nowhere_else(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    one, other = (f"{prefix}{each.format('')}" for each in ALIKE["a star"])
    try:
        async with at_work(server.url, other, ("Q1",)) as theirs:
            mesh, runs = worqr.Mesh(server.url, prefix=one, patience=20), Runs()
            async with mesh.connect():
                await mesh.queue("Q1").enqueue(b"run")
                child = spawn(DYING, server.url, one)
                assert await child.line() == "run run"
                before = theirs.seen(server.client())
                child.kill()
                async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
                    await nursery.start(partial(peer.serve, "Q1", runs))
                    assert await runs.wait(1) == [b"run"]
                    await eventually(partial(finished, mesh), 1)
                    nursery.cancel_scope.cancel()
            assert theirs.seen(server.client()) == before
            assert theirs.held["Q1"].cancelled == []
            assert (await theirs.mesh.queue("Q1").info()).counts.get("stalled", 0) == 0
    finally:
        for each in (one, other):
            delete_all(server.client(), each)


async def finished(mesh: worqr.Mesh) -> int:
    return (await mesh.queue("Q1").info()).counts.get("finished", 0)


def test_commands_mean_the_mesh_of_their_prefix(cli: Callable[..., Any], server: Server, prefix: str) -> None:
    one, other = f"{prefix}*", f"{prefix}x"
    try:
        for each, task in ((one, "a"), (other, "b")):
            assert cli("enqueue", "Q1", task, "--prefix", each).code == 0
        assert cli("cancel", "Q1", "--all", "--prefix", one).code == 0
        assert cli("queues", "--json", "--prefix", one).json == []
        assert [info["waiting"] for info in cli("queues", "--json", "--prefix", other).json] == [1]
        assert server.client().lrange(f"{other}:{{Q1}}", 0, -1) == [b"b"]
    finally:
        for each in (one, other):
            delete_all(server.client(), each)
