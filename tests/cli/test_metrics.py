"""``worqr metrics`` as a process: what a scrape says of a real mesh, and of a server that is away."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Awaitable, Callable

import pytest

import worqr
from tests.cli.conftest import Command
from tests.peer.tools import Runs, serving, until
from tests.support.children import Child
from tests.support.http import Reply, get
from tests.support.servers import Server
from tests.test_metrics import values

EXPORT = "import sys; from worqr.cli import main; sys.exit(main(['metrics', '--bind', '127.0.0.1:0', *sys.argv[1:]]))"
LONG = 60.0

Export = Callable[[Server], Awaitable[str]]


@pytest.fixture
def exporters() -> list[Child]:
    return []


@pytest.fixture
def export(spawn: Callable[..., Child], prefix: str, exporters: list[Child]) -> Export:
    """`await export(server)`: the address at which its metrics are served."""

    async def start(server: Server) -> str:
        child = spawn(EXPORT, "--prefix", prefix, env={"WORQR_URL": server.url})
        exporters.append(child)
        await until(lambda: "serving metrics" in child.errors or child.process.poll() is not None, LONG)
        (address,) = re.findall(r"serving metrics at (\S+)", child.errors)
        return str(address)

    return start


def scrape(address: str) -> dict[str, float]:
    reply = get(address, "/metrics")
    assert reply.status == 200, reply.text
    return values(reply.text)


async def scrape_with(address: str, wanted: dict[str, float]) -> dict[str, float]:
    """A scrape that has all of these values. One says only that the server is away, if it has not replied for two seconds."""
    found = dict[str, float]()

    def is_there() -> bool:
        nonlocal found
        found = scrape(address)
        return found.items() >= wanted.items()

    await until(is_there, LONG)
    return found


@pytest.mark.leaves("{Q1}:*")
async def test_a_scrape_tells_of_the_mesh(
    export: Export, exporters: list[Child], server: Server, mesh: worqr.Mesh
) -> None:
    address = await export(server)
    assert not [name for name in await scrape_with(address, {"worqr_up": 1}) if "queue=" in name]
    async with mesh.join():
        runs = Runs()
        async with serving(mesh, "Q1", runs):
            await mesh.queue("Q1").enqueue(b"1", b"2")
            await runs.wait(2)
            found = await scrape_with(
                address,
                {
                    'worqr_tasks_total{event="finished",queue="Q1"}': 2,
                    'worqr_runs_total{outcome="ok",queue="Q1"}': 2,
                    "worqr_has_leader": 1,
                },
            )
            assert found['worqr_queue_workers{queue="Q1"}'] >= 1
            assert found['worqr_run_seconds_bucket{le="+Inf",queue="Q1"}'] == 2
            assert found['worqr_wait_seconds_count{queue="Q1"}'] == 0, "plain tasks"
            assert found["worqr_server_memory_bytes"] > 0
            assert found["worqr_server_clients"] > 0
            assert found["worqr_server_keeps_everything"] == 1
    assert get(address, "/live") == Reply(200, "ok\n", "text/plain; charset=utf-8")
    assert get(address, "/")[:2] == (404, "there are /metrics, /live\n")
    exporters[0].signal(signal.SIGTERM)
    assert await exporters[0].ended(LONG) == 0


@pytest.mark.one_server
async def test_a_server_that_is_away_is_told_of_within_two_seconds(export: Export, own_server: Server) -> None:
    own_server.kill()
    address = await export(own_server)
    assert scrape(address) == {"worqr_up": 0}
    own_server.start()
    await until(lambda: scrape(address)["worqr_up"] == 1, LONG)
    own_server.pause()  # it hangs: a request gets no reply
    assert scrape(address) == {"worqr_up": 0}
    own_server.resume()
    await until(lambda: scrape(address)["worqr_up"] == 1, LONG)
    own_server.kill()
    await until(lambda: scrape(address) == {"worqr_up": 0}, LONG)
    own_server.start()


def test_bad_arguments(command: Command) -> None:
    for arguments, message in {
        ("--bind", "x"): "--bind must be [HOST:]PORT or unix:PATH, for example 9465, not 'x'",
        ("--max-queues", "-1"): "--max-queues must be at least 0, got -1",
    }.items():
        found = command("metrics", *arguments)
        assert (found.code, found.err) == (2, f"worqr: {message}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = command("metrics", "--bind", address, "--url", "redis://127.0.0.1:1")
    assert (found.code, found.err) == (
        1,
        f"worqr: cannot listen at {address}: address already in use; choose another address\n",
    )


def test_a_server_that_refuses_ends_it(command: Command, server: Server) -> None:
    url = server.tcp_url.replace("redis://", "redis://nobody:wrong@", 1)
    found = command("metrics", "--bind", "127.0.0.1:0", "--url", url)
    assert found.code == 1
    assert "WRONGPASS" in found.err or "refused" in found.err
