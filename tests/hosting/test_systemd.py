"""Messages to systemd: a service of ``Type=notify``, with a socket in systemd's place."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import worqr
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.test_probes import WELL, Patient
from worqr.hosting.systemd import READY, SystemdNotifier

RUN = "import sys; from worqr.cli import main; sys.exit(main(['run', *sys.argv[1:]]))"


class Systemd:
    """The other end of ``$NOTIFY_SOCKET``."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(PATIENCE)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def next(self) -> list[str]:
        """The lines of the next message."""
        return self.socket.recv(4096).decode().split("\n")

    def until(self, line: str) -> list[list[str]]:
        """The messages up to the one with this line."""
        found = [self.next()]
        while line not in found[-1]:
            found.append(self.next())
        return found


@pytest.fixture(params=["a path", "an abstract name"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    abstract = request.param == "an abstract name"
    found = Systemd(f"@worqr-test-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify"))
    yield found
    found.socket.close()


@pytest.fixture
def notifier(systemd: Systemd) -> Iterator[Callable[..., SystemdNotifier]]:
    started: list[SystemdNotifier] = []

    def start(peer: Patient, **environment: str) -> SystemdNotifier:
        started.append(SystemdNotifier(peer.health, {"NOTIFY_SOCKET": systemd.address, **environment}))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.end()


Start = Callable[..., SystemdNotifier]


def test_the_status_is_sent_when_it_changes(systemd: Systemd, notifier: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.hosting.systemd.STATUS_EVERY", 3600.0)  # it looks when it is told something
    peer = Patient(replace(WELL, ready=False, why="joining the mesh", running=0))
    each = notifier(peer)
    assert systemd.next() == ["STATUS=joining the mesh, 0 running"]
    peer.now = WELL
    each.tell(READY)
    assert [systemd.next(), systemd.next()] == [["READY=1"], ["STATUS=2 running, 98 free"]]
    each.tell("A")
    each.tell("B")
    assert [systemd.next(), systemd.next()] == [["A"], ["B"]]  # nothing has changed


def test_the_watchdog_hears_of_a_service_that_is_alive(systemd: Systemd, notifier: Start) -> None:
    peer = Patient(WELL)
    notifier(peer, WATCHDOG_USEC="40000")
    assert systemd.next() == ["STATUS=2 running, 98 free", "WATCHDOG=1"]
    assert [systemd.next(), systemd.next()] == [["WATCHDOG=1"], ["WATCHDOG=1"]]  # again and again
    peer.now = replace(WELL, alive=False, running=3)
    assert systemd.until("STATUS=3 running, 98 free")[-1] == ["STATUS=3 running, 98 free"]
    peer.now = replace(WELL, alive=False, running=4)
    assert systemd.next() == ["STATUS=4 running, 98 free"]  # and no more of it
    peer.now = WELL
    assert systemd.next() == ["STATUS=2 running, 98 free", "WATCHDOG=1"]


@pytest.mark.parametrize("usec", ["", "0", "x"])
def test_without_a_watchdog_there_is_no_message(systemd: Systemd, notifier: Start, usec: str) -> None:
    notifier(Patient(WELL), WATCHDOG_USEC=usec)
    assert systemd.next() == ["STATUS=2 running, 98 free"]


def test_the_watchdog_of_another_process_is_not_ours(systemd: Systemd, notifier: Start) -> None:
    notifier(Patient(WELL), WATCHDOG_USEC="40000", WATCHDOG_PID=str(os.getppid()))
    assert systemd.next() == ["STATUS=2 running, 98 free"]


def test_without_systemd_nothing_is_started() -> None:
    each = SystemdNotifier(Patient(WELL).health, {})
    each.start()
    each.tell(READY)
    each.end()
    assert each._thread is None


def test_a_socket_that_is_gone_is_no_error(systemd: Systemd, notifier: Start) -> None:
    each = notifier(Patient(WELL))
    systemd.next()
    systemd.socket.close()
    each.tell("A")
    each.end()
    assert each._thread is not None
    assert not each._thread.is_alive()


@pytest.mark.one_server
async def test_a_service_tells_how_it_goes(
    systemd: Systemd, spawn: Callable[..., Child], server: Server, prefix: str
) -> None:
    env = {"WORQR_URL": server.url, "NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "200000"}
    child = spawn(RUN, "tests.cli.app:mesh", "--prefix", prefix, env=env)
    before = systemd.until("READY=1")
    assert before[0] == ["STATUS=joining the mesh, 0 running", "WATCHDOG=1"]
    assert "start: worqr" in child.errors, "it is ready when it serves"
    assert systemd.until("STATUS=0 running, 100 free")[-1] == ["STATUS=0 running, 100 free", "WATCHDOG=1"]
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.enqueue_many([mesh.call("tests.cli.app.nap", seconds=1)])
        assert await child.line() == "napping"
    child.signal(signal.SIGTERM)
    systemd.until("STOPPING=1")
    assert systemd.next()[0].startswith("STATUS=the peer is leaving, ")
    assert await child.line() == "awake"
    assert await child.ended() == 0
