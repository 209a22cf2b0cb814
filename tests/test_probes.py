"""Probes: what they reply, also while the event loop is blocked, the server is away, or the peer leaves."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import trio

import worqr
from tests.support.http import get
from tests.support.patience import PATIENCE, wait_until
from tests.support.servers import Server
from worqr import probes
from worqr.hosting.peer_thread import no_health

pytestmark = pytest.mark.one_server

WELL = worqr.Health(alive=True, ready=True, why="", running=2, room=98, loop_lag=0.0)


class Patient:
    """A peer whose health the test sets."""

    def __init__(self, health: worqr.Health) -> None:
        self.now = health

    def health(self) -> worqr.Health:
        return self.now

    def _readings(self) -> None:
        """It has not joined."""


def statuses(address: str) -> dict[str, int]:
    return {path: get(address, path).status for path in ("/live", "/ready", "/startup")}


# The replies


def test_a_peer_that_is_well() -> None:
    with probes.serve(Patient(WELL), "127.0.0.1:0") as address:
        assert statuses(address) == {"/live": 200, "/ready": 200, "/startup": 200}
        assert get(address, "/live") == (200, "ok\n", "text/plain; charset=utf-8")
        assert get(address, "/ready?verbose", method="HEAD").status == 200


def test_a_peer_that_is_not_ready_says_why() -> None:
    peer = Patient(replace(WELL, ready=False, why="joining the mesh"))
    with probes.serve(peer, "127.0.0.1:0") as address:
        assert statuses(address) == {"/live": 200, "/ready": 503, "/startup": 503}
        assert get(address, "/ready").text == get(address, "/startup").text == "joining the mesh\n"
        peer.now = WELL
        assert statuses(address) == {"/live": 200, "/ready": 200, "/startup": 200}
        peer.now = replace(WELL, ready=False, why="the peer is leaving")
        assert statuses(address) == {"/live": 200, "/ready": 503, "/startup": 200}


@pytest.mark.parametrize(
    ("health", "why"),
    [
        (replace(WELL, alive=False, loop_lag=16.24), "the event loop has been blocked for 16.2 s"),
        (no_health("it has ended: ValueError: x"), "it has ended: ValueError: x"),
    ],
)
def test_a_peer_that_is_not_alive_says_why(health: worqr.Health, why: str) -> None:
    with probes.serve(Patient(health), "127.0.0.1:0") as address:
        assert get(address, "/live")[:2] == (503, f"{why}\n")


def test_json_has_the_whole_health() -> None:
    peer = Patient(replace(WELL, ready=False, why="deaf \u202e"))
    with probes.serve(peer, "127.0.0.1:0") as address:
        reply = get(address, "/ready", accept="text/html, application/json;q=0.9")
        assert (reply.status, reply.type) == (503, "application/json")
        expected = {"ok": False, "reason": "deaf \u202e", "alive": True, "ready": False, "why": "deaf \u202e"}
        assert json.loads(reply.text) == {**expected, "running": 2, "room": 98, "loop_lag": 0.0, "runs": 0}


def test_other_paths_name_those_that_exist() -> None:
    with probes.serve(Patient(WELL), "127.0.0.1:0") as address:
        assert get(address, "/")[:2] == (404, "there are /live, /ready, /startup, /metrics\n")


def test_an_address_that_is_none() -> None:
    with pytest.raises(worqr.UsageError, match=r"address must be \[HOST:\]PORT"), probes.serve(Patient(WELL), "here"):
        pass


# Of a peer


def test_live_tells_that_the_loop_is_blocked_while_it_is(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, block_limit=0.3, keepalive=1800)
    began, gate = threading.Event(), threading.Event()

    @mesh.task(name="block")
    async def block() -> None:
        began.set()
        assert gate.wait(PATIENCE)  # it blocks the loop

    with mesh.join_in_thread() as peer, probes.serve(peer, "127.0.0.1:0") as address:
        assert get(address, "/live").status == 200
        worqr.sync(block.enqueue)
        assert began.wait(PATIENCE)
        wait_until(lambda: get(address, "/live").status == 503)
        assert get(address, "/live").text.startswith("the event loop has been blocked for ")
        assert not gate.is_set()
        gate.set()
        wait_until(lambda: statuses(address) == {"/live": 200, "/ready": 200, "/startup": 200})


async def test_a_server_that_is_away_is_no_reason_to_restart_the_worker(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, keepalive=1)

    async def becomes(address: str, expected: dict[str, int]) -> None:
        with trio.fail_after(PATIENCE):
            while await trio.to_thread.run_sync(statuses, address) != expected:
                await trio.sleep(0.02)

    async with mesh.join() as peer:
        with probes.serve(peer, "127.0.0.1:0") as address:
            await becomes(address, {"/live": 200, "/ready": 200, "/startup": 200})
            own_server.kill()
            await becomes(address, {"/live": 200, "/ready": 503, "/startup": 200})
            own_server.start()
            await becomes(address, {"/live": 200, "/ready": 200, "/startup": 200})


def test_the_probes_of_a_thread_follow_its_life(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    mesh.task(name="f")(lambda: None)
    peer = mesh.join_in_thread()
    with probes.serve(peer, "127.0.0.1:0") as address:
        assert statuses(address) == {"/live": 503, "/ready": 503, "/startup": 503}
        assert get(address, "/live").text == "not started\n"
        with peer:
            assert statuses(address) == {"/live": 200, "/ready": 200, "/startup": 200}
        assert statuses(address) == {"/live": 503, "/ready": 503, "/startup": 200}


async def test_health_may_be_read_from_any_thread(server: Server, prefix: str) -> None:
    """Queues come and go, and tasks run, while threads read it."""
    mesh = worqr.Mesh(server.url, prefix=prefix)
    over, errors, reads = threading.Event(), list[Exception](), [0]

    async def handler(_task: bytes) -> None: ...

    async with mesh.join() as peer, trio.open_nursery() as nursery:

        def read() -> None:
            while not over.is_set():
                try:
                    health = peer.health()
                    assert health.loop_lag < PATIENCE
                    reads[0] += 1
                except Exception as error:
                    errors.append(error)
                    return

        for _ in range(3):
            nursery.start_soon(trio.to_thread.run_sync, read)
        for _ in range(20):
            async with trio.open_nursery() as serving:
                for name in ("a", "b", "c"):
                    await serving.start(peer.serve, name, handler)
                    await mesh.queue(name).enqueue(b"1", b"2")
                serving.cancel_scope.cancel()
        over.set()
    assert (errors, reads[0] > 20) == ([], True)
    async with mesh.connect():
        for name in ("a", "b", "c"):
            await mesh.queue(name).cancel_all()
