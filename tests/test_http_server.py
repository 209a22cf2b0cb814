"""The HTTP server of probes and metrics: requests, clients that misbehave, addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.support.children import ROOT
from tests.support.http import get
from tests.support.patience import PATIENCE
from worqr import http_server
from worqr.errors import UsageError
from worqr.http_server import MOST_BYTES, MOST_CONNECTIONS, BindAddress, HttpReply, HttpRequest, HttpServer

Serve = Callable[..., HttpServer]
LONG = b"x" * 5_000_000
"""More than the buffers of a connection hold."""


def respond(request: HttpRequest) -> HttpReply:
    if request.path == "/long":
        return HttpReply(HTTPStatus.OK, LONG)
    if request.path == "/wrong":
        raise ValueError("secret")
    if request.path == "/slow":
        time.sleep(http_server.TIMEOUT * 1.5)
    return HttpReply.of(HTTPStatus.OK, f"{request.path} {request.accept}".strip())


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[HttpServer] = []

    def start(bind: BindAddress | None = None) -> HttpServer:
        servers.append(HttpServer(bind or BindAddress("127.0.0.1"), respond))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def dialled(server: HttpServer) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.address.port), PATIENCE)
    client.settimeout(PATIENCE)
    return client


def everything(client: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    found = b""
    try:
        while data := client.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


# Requests


def test_it_answers_get_and_head(serve: Serve) -> None:
    address = str(serve().address)
    assert get(address, "/a?b=c", accept="text/html") == (200, "/a text/html\n", "text/plain; charset=utf-8")
    head = get(address, "/a", method="HEAD")
    assert (head.status, head.text) == (200, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(serve: Serve, method: str) -> None:
    assert get(str(serve().address), "/a", method=method)[:2] == (405, "use GET or HEAD\n")


@pytest.mark.parametrize(
    "line", [b"", b"hello", b"GET /a", b"GET a HTTP/1.1", b"GET /a HTTP/2", b"\xff /a HTTP/1.1", b"get /a HTTP/1.1"]
)
def test_what_is_no_request_gets_a_reply(serve: Serve, line: bytes) -> None:
    with dialled(serve()) as client:
        client.sendall(line + b"\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_request_may_come_in_pieces(serve: Serve) -> None:
    with dialled(serve()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /a HTTP/1.1\r\nAccept: x\r\n\r\n":
            client.sendall(bytes([byte]))
        assert everything(client).endswith(b"\r\n\r\n/a x\n")


def test_a_request_that_is_too_long_is_refused(serve: Serve) -> None:
    with dialled(serve()) as client:
        client.sendall(b"GET /a HTTP/1.1\r\nX: " + b"x" * MOST_BYTES)
        assert everything(client).startswith(b"HTTP/1.1 431 ")


def test_an_error_of_the_program_is_no_end(serve: Serve) -> None:
    address = str(serve().address)
    assert get(address, "/wrong")[:2] == (500, "ValueError in the server\n")
    assert get(address, "/a").status == 200


# Clients


def test_a_client_that_is_silent_delays_nobody(serve: Serve) -> None:
    server = serve()
    with dialled(server), dialled(server) as half:
        half.sendall(b"GET /a HT")
        assert get(str(server.address), "/b").status == 200


def test_a_client_that_is_silent_is_dropped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT", 0.05)
    with dialled(serve()) as client:
        client.sendall(b"GET /a HT")
        assert everything(client) == b""


def test_a_client_that_has_sent_its_request_is_not_dropped_because_another_reply_was_slow(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT", 2.0)
    server = serve()
    with dialled(server) as scrape, dialled(server) as probe:
        scrape.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        probe.sendall(b"GET /a HT")
        time.sleep(0.2)  # both are served now
        probe.sendall(b"TP/1.1\r\n\r\n")
        assert [everything(each)[:13] for each in (scrape, probe)] == [b"HTTP/1.1 200 "] * 2


def test_a_connection_too_many_replaces_the_oldest(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT", PATIENCE)  # so that no other reason ends it
    server = serve()
    clients = [dialled(server) for _ in range(MOST_CONNECTIONS)]
    assert get(str(server.address), "/a").status == 200
    assert everything(clients[0]) == b""
    clients[-1].sendall(b"GET /a HTTP/1.1\r\n\r\n")
    assert everything(clients[-1]).startswith(b"HTTP/1.1 200 ")
    for client in clients:
        client.close()


def test_a_client_that_reads_late_gets_all_of_a_long_reply(serve: Serve) -> None:
    server = serve()
    with dialled(server) as slow:
        slow.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert get(str(server.address), "/a").status == 200  # meanwhile
        assert everything(slow).endswith(LONG)


def test_clients_that_leave_are_no_error(serve: Serve) -> None:
    server = serve()
    for request in (b"", b"GET /a HTTP/1.1\r\n\r\n", b"GET /long HTTP/1.1\r\n\r\n"):
        with dialled(server) as client:
            client.sendall(request)
    assert get(str(server.address), "/a").status == 200


def test_many_at_once_are_all_answered_in_turn(serve: Serve) -> None:
    address, found = str(serve().address), list[int]()

    def ask() -> None:
        found.extend(get(address, "/a").status for _ in range(25))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 100


# Addresses


@pytest.mark.parametrize(
    ("given", "expected", "shown"),
    [
        (9465, BindAddress("", 9465), ":9465"),
        ("9465", BindAddress("", 9465), ":9465"),
        (":9465", BindAddress("", 9465), ":9465"),
        ("127.0.0.1:0", BindAddress("127.0.0.1", 0), "127.0.0.1:0"),
        ("localhost:80", BindAddress("localhost", 80), "localhost:80"),
        ("[::1]:80", BindAddress("::1", 80), "[::1]:80"),
        ("unix:/run/a b.sock", BindAddress(path="/run/a b.sock"), "unix:/run/a b.sock"),
        ("unix:rel", BindAddress(path="rel"), "unix:rel"),
    ],
)
def test_addresses(given: object, expected: BindAddress, shown: str) -> None:
    assert BindAddress.parse(given, "x") == expected
    assert str(expected) == shown


@pytest.mark.parametrize(
    "given",
    ["", "localhost", "unix:", "a:b", "::1:80", "65536", "-1", -1, 70000, None, True, 1.5, "80 ", "a b:80", "٣"],
)
def test_what_is_no_address(given: object) -> None:
    with pytest.raises(UsageError, match=r"--probe must be \[HOST:\]PORT or unix:PATH, for example 9465, not "):
        BindAddress.parse(given, "--probe")


def test_without_a_host_it_listens_everywhere(serve: Serve) -> None:
    server = serve(BindAddress())
    assert get(f"127.0.0.1:{server.address.port}", "/a").status == 200
    if server._listener.family is socket.AF_INET6:
        assert get(f"[::1]:{server.address.port}", "/a").status == 200


def test_a_port_in_use_is_an_error_of_one_line(serve: Serve) -> None:
    port = serve().address.port
    with pytest.raises(UsageError) as caught:
        serve(BindAddress("127.0.0.1", port))
    assert str(caught.value) == (f"cannot listen at 127.0.0.1:{port}: address already in use; choose another address")


def test_a_host_that_is_not_this_machine_is_an_error(serve: Serve) -> None:
    with pytest.raises(UsageError, match=r"cannot listen at 192\.0\.2\.1:0: "):
        serve(BindAddress("192.0.2.1"))


def test_the_port_is_free_when_it_has_ended(serve: Serve) -> None:
    server = serve()
    server.close()
    server.close()
    assert serve(server.address).address == server.address


def test_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    server = serve(BindAddress(path=str(path)))
    assert get(f"unix:{path}", "/a").status == 200
    with pytest.raises(UsageError, match=r"address already in use"):
        serve(BindAddress(path=str(path)))
    assert get(f"unix:{path}", "/a").status == 200
    server.close()
    assert not path.exists()


def test_the_unix_socket_of_a_process_that_was_killed_is_replaced(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    serve(BindAddress(path=str(path)))
    assert get(f"unix:{path}", "/a").status == 200


def test_a_file_in_the_way_is_kept(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"address already in use"):
        serve(BindAddress(path=str(path)))
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match=r"no such file"):
        serve(BindAddress(path=str(tmp_path / "no" / "file")))


FORKS = """
import os
from tests.test_http_server import respond
from worqr.http_server import BindAddress, HttpServer

server = HttpServer(BindAddress("127.0.0.1"), respond)
stop, told = os.pipe()
begun, begins = os.pipe()
child = os.fork()
if child == 0:
    os.close(told)
    os.write(begins, b"x")
    os.read(stop, 1)  # lives until the parent has tried
    os._exit(0)
os.read(begun, 1)
server.close()
HttpServer(server.address, respond).close()
os.close(told)
os.waitpid(child, 0)
print("free")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_keep_the_port() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("free\n", "")
