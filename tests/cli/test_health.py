"""``worqr health``: the exit code and the text for what a probe replies, and for what does not reply."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.support.children import ROOT
from tests.test_probes import WELL, Patient
from worqr import probes


@pytest.fixture
def peer() -> Patient:
    return Patient(WELL)


@pytest.fixture(params=["TCP", "unix"])
def address(request: pytest.FixtureRequest, peer: Patient, tmp_path: Path) -> Iterator[str]:
    bind = "127.0.0.1:0" if request.param == "TCP" else f"unix:{tmp_path / 'probe'}"
    with probes.serve(peer, bind) as found:
        yield found


@pytest.mark.parametrize("check", ["live", "ready", "startup"])
def test_a_worker_that_is_well(command: Command, address: str, check: str) -> None:
    found = command("health", address, "--check", check)
    assert (found.code, found.out, found.err) == (0, f"{check}: ok\n", "")


def test_a_worker_that_is_not(command: Command, address: str, peer: Patient) -> None:
    peer.now = replace(WELL, ready=False, why="the peer\x1b is leaving")
    found = command("health", address)
    assert (found.code, found.out, found.err) == (1, "", "worqr: ready: the peer\\x1b is leaving\n")
    assert command("health", address, "--check", "live").code == 0


def test_the_address_of_the_environment_and_of_a_url(
    command: Command, peer: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with probes.serve(peer, 0) as address:  # of all addresses of the machine
        monkeypatch.setenv("WORQR_PROBE", address)
        assert command("health").code == 0
        assert command("health", f"http://localhost{address}/").code == 0
    monkeypatch.delenv("WORQR_PROBE")
    found = command("health")
    assert (found.code, found.err) == (
        2,
        "worqr: missing ADDRESS: type that of `worqr run --probe`, or set WORQR_PROBE\n",
    )


def test_what_does_not_reply(command: Command, tmp_path: Path) -> None:
    found = command("health", f"unix:{tmp_path / 'none'}")
    assert (found.code, found.err) == (
        1,
        f"worqr: no reply from unix:{tmp_path / 'none'}: No such file or directory; start the worker with "
        "`worqr run --probe`\n",
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = command("health", f"127.0.0.1:{port}", "--timeout", "50ms")
    assert (found.code, found.err) == (1, f"worqr: no reply from 127.0.0.1:{port} within 0.05 s\n")
    assert command("health", "nonsense").code == 2
    assert command("health", "1", "--check", "well").code == 2


def test_what_replies_nonsense(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"from worqr.cli import main; import sys; sys.exit(main(['health', '{port}']))"
        child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        client, _ = server.accept()
        with client:
            client.recv(1000)
            client.sendall(b"nonsense\r\n\r\n")
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors.startswith(f"worqr: no reply from :{port}: ")


def test_the_application_is_not_imported() -> None:
    code = "import sys; from worqr.cli import main; main(['health', '1', '--timeout', '1ms']); print('trio' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
