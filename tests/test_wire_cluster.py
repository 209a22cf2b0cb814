"""docs/reference/wire.md on a real Redis Cluster: the two commands, and what ``worqr script NAME --cluster`` prints."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

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
        keys = (2, f"{base}:producer:me", base)
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
