"""docs/reference/wire.md on a real Redis Cluster: the two commands, and what ``worqr script NAME --cluster`` prints."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import redis
import trio

import worqr
from tests.cli.conftest import Command, command
from tests.peer.conftest import without_scans
from tests.peer.tools import Runs, eventually, serving
from tests.support.clusters import Cluster, cluster_of
from tests.support.patience import PATIENCE
from worqr.lua import script

pytestmark = pytest.mark.one_server

__all__ = ["command", "without_scans"]

QUEUES = ("Q0", "Q2", "Q1")
"""On three nodes."""


@pytest.fixture(scope="module")
def cluster(server_kind: str) -> Iterator[Cluster]:
    with cluster_of(server_kind, replicas=0) as cluster:
        yield cluster


@pytest.fixture
def mesh(cluster: Cluster) -> Iterator[worqr.Mesh]:
    yield worqr.Mesh(cluster.url, patience=20)
    cluster.clear()


def test_queues_of_the_test_lie_on_all_nodes(cluster: Cluster) -> None:
    assert len({cluster.owner(f"worqr:{{{queue}}}").port for queue in QUEUES}) == 3


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed: apt-get install redis-tools")
async def test_two_commands_of_redis_cli_wake_who_sleeps(
    cluster: Cluster, mesh: worqr.Mesh, without_scans: None
) -> None:
    """Sent to any node: redis-cli -c goes where it is told."""
    for queue in QUEUES:
        runs = Runs()
        async with serving(mesh, queue, runs):
            for words in (["LPUSH", f"worqr:{{{queue}}}", "task"], ["SPUBLISH", f"worqr:{{{queue}}}", "1"]):
                asked = ["redis-cli", "-e", "-c", "-p", str(cluster.nodes[0].port), *words]
                run = partial(subprocess.run, asked, capture_output=True, check=True, timeout=3 * PATIENCE)
                await trio.to_thread.run_sync(run)
            assert await runs.wait(1) == [b"task"]
            await eventually(mesh.queue(queue).running, [])


async def test_two_commands_of_redis_py_wake_who_sleeps(
    cluster: Cluster, mesh: worqr.Mesh, without_scans: None
) -> None:
    with redis.RedisCluster("127.0.0.1", cluster.nodes[1].port) as client:
        for queue in QUEUES:
            runs = Runs()
            async with serving(mesh, queue, runs):
                client.lpush(f"worqr:{{{queue}}}", b"a", b"b")
                client.spublish(f"worqr:{{{queue}}}", "1")
                assert sorted(await runs.wait(2)) == [b"a", b"b"]
                await eventually(mesh.queue(queue).running, [])


async def test_the_scripts_that_are_printed_wake_who_sleeps(
    cluster: Cluster, mesh: worqr.Mesh, command: Command, without_scans: None
) -> None:
    """At the node that has the slot; any other one says which."""
    sources = {name: command("script", name, "--cluster").out for name in ("enqueue", "dispatch_jobs")}
    for queue in QUEUES:
        base, runs = f"worqr:{{{queue}}}", Runs()
        node = cluster.owner(base)
        sha = {name: node.look.script_load(source) for name, source in sources.items()}
        keys = (2, base, f"{base}:never", "me")
        async with serving(mesh, queue, runs):
            for _ in range(2):  # the second is a copy
                assert node.ask("EVALSHA", sha["enqueue"], *keys, 1, 1, -1, 0, "a") == [b"ok", 1]
            assert await runs.wait(1) == [b"a"]
            await eventually(mesh.queue(queue).running, [])
            options = msgspec.msgpack.encode({"id": "x"})
            word, (outcome, name, _) = node.look.evalsha(sha["dispatch_jobs"], *keys, 2, 2, 0, options, b"b")
            assert (word, outcome, name) == (b"ok", b"created", b"x")
            assert await runs.wait(2) == [b"a", b"b"]
            await eventually(mesh.queue(queue).running, [])
        elsewhere = next(other for other in cluster.nodes if other is not node)
        with pytest.raises(redis.exceptions.MovedError):
            elsewhere.ask("EVALSHA", sha["enqueue"], *keys, 3, 3, -1, 0, "c")


async def test_a_batch_of_printed_scripts_has_members_on_all_nodes(
    cluster: Cluster, mesh: worqr.Mesh, command: Command
) -> None:
    def ask(base: str, name: str, *args: object) -> Any:
        node = cluster.owner(base)
        sha = node.look.script_load(command("script", name, "--cluster").out)
        return node.look.evalsha(sha, 2, base, f"{base}:never", *args, *script(name).tail)

    bases, token = [f"worqr:{{{queue}}}" for queue in QUEUES], "0123456789abcdef"
    home = bases[0]
    follow_up = ("then_options", b"\x80", "then_task", b"next")
    assert ask(bases[1], "hold_follow_ups", token, home, "b", 604_800_000, *follow_up) == [b"ok"]
    assert ask(home, "open_batch", "me", 1, 1, "b", token, 60_000, 60_000, "", "then", bases[1]) == [b"ok"]
    for base in bases:
        opened = ask(home, "open_part", "b", token, base, 1000)
        assert opened == [b"ok", b"1", 0, token.encode(), b"60000", b""]
        member = {"token": token, "home": home, "id": "b", "number": 1, "keep": "60000"}
        options = msgspec.msgpack.encode({"id": "x", "batch": member})
        _, (outcome, *_) = ask(base, "dispatch_jobs", "you", 1, 1, 0, options, b"job")
        assert outcome == b"created"
    _, state, keep, *parts = ask(home, "seal_batch", "b", token)
    assert (state, len(parts)) == (b"sealed", 6)
    for base, version in zip(parts[::2], parts[1::2], strict=True):
        assert ask(base.decode(), "close_part", token, version, home, "b", keep) == [b"ok"]
    runs = [Runs() for _ in QUEUES]
    async with serving(mesh, QUEUES[0], runs[0]), serving(mesh, QUEUES[1], runs[1]), serving(mesh, QUEUES[2], runs[2]):
        info = await mesh.queue(QUEUES[0]).batch("b").wait(PATIENCE)
        assert (info.finished, info.succeeded, info.follow_up) == (3, True, (QUEUES[1], f"@{token}.then"))
        assert sorted(await runs[1].wait(2)) == [b"job", b"next"]
        for queue in QUEUES:
            await eventually(mesh.queue(queue).running, [])
