"""The first connection: what cannot heal is told at once and with the server's own words; everything else is waited for."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.link.conftest import LinkTo
from tests.link.scripts import echo, knows_why, lines, notice, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.errors import RefusedByServer, Unavailable
from worqr.link import connector
from worqr.link.connector import Outage, Wire
from worqr.link.failures import ConnectionLost, cause_of, is_unknown_host
from worqr.link.log_thread import LogThread
from worqr.link.settings import Endpoint, LinkSettings
from worqr.mesh import Mesh

pytestmark = pytest.mark.one_server

DENIED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the default "
    b"user. In this mode connections are only accepted from the loopback interface. If you want to connect from external "
    b"computers to Redis you may adopt one of the following solutions: 1) Just disable protected mode sending the command "
    b"'CONFIG SET protected-mode no' from the loopback interface by connecting to Redis from the same host the server is "
    b"running, however MAKE SURE Redis is not publicly accessible from internet if you do so.\r\n"
)
"""What redis-server writes to a stranger before it hangs up; from 127.0.0.1 nobody is one."""


@contextmanager
def port_with(serve: Callable[[socket.socket], object]) -> Generator[int]:
    """A port of 127.0.0.1; `serve` is called with each connection, which is closed then."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


async def refused(link_to: LinkTo, url: str, kind: type[Exception] = RefusedByServer) -> str:
    """What is said at once: there is patience for much longer."""
    with trio.fail_after(PATIENCE), pytest.raises(kind) as caught:
        await link_to(url, patience=100 * PATIENCE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What waiting mends: cause and remedy


async def test_a_dead_server_is_named_with_its_cause_and_the_remedy(
    link_to: LinkTo, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    link = await link_to(f"redis://localhost:{port}/0", ready=False, patience=0.5)
    await knows_why(link, "refused")
    with pytest.raises(Unavailable) as caught:
        await link.wait_ready()
    told = str(caught.value)
    assert re.match(rf"Could not connect to redis://localhost:{port}/0 for \d+\.\d s: ", told)
    assert told.endswith(
        f": connection refused. Is the server running? Start one with 'worqr server --port {port}', or correct "
        "the URL of the mesh."
    )
    await until(lambda: lines(caplog, "link.lost"))
    [line] = lines(caplog, "link.lost")
    assert line == (
        f"link.lost: could not connect to redis://localhost:{port}/0: connection refused; retrying. Is the server running? "
        f"Start one with 'worqr server --port {port}', or correct the URL of the mesh."
    )


@pytest.mark.parametrize("variable", [None, "WORQR_URL", "REDIS_URL"])
def test_the_remedy_names_where_the_url_comes_from(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    monkeypatch.delenv("WORQR_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(socket.socket, "connect", _refuse)  # whatever is at the default port of this machine
    if variable:
        monkeypatch.setenv(variable, "redis://localhost")
    mesh, told = Mesh(patience=0.2), "no connection"
    while "refused" not in told:  # on a machine that stands still, patience may end before the first attempt
        with pytest.raises(Unavailable) as caught:
            worqr.sync(mesh.queue("Q1").enqueue, b"a")
        told = str(caught.value)
    mesh.close()
    remedy = f"correct {variable}" if variable else "set WORQR_URL"
    assert told.endswith(f"Is the server running? Start one with 'worqr server', or {remedy}.")


def _refuse(*_: object) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis://ada:pw@localhost:{port}", "Is the server running? Check host and port in the URL of the mesh."),
        ("redis://127.0.0.9:{port}", "Is the server running? Check host and port in the URL of the mesh."),
        ("unix:///nowhere/s{port}", "Is the server running? Check the path in the URL of the mesh."),
        ("redis+cluster://127.0.0.1:{port}", "Are the servers running? Check host and port in the URL of the mesh."),
        (
            "redis+sentinel://127.0.0.1:{port}/main",
            "Are the servers running? Check host and port in the URL of the mesh.",
        ),
    ],
)
async def test_a_server_that_worqr_server_cannot_be_gets_another_remedy(
    link_to: LinkTo, url: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    link = await link_to(url.format(port=port), ready=False, patience=0.5)
    await knows_why(link, ".")
    with pytest.raises(Unavailable) as caught:
        await link.wait_ready()
    assert str(caught.value).endswith(remedy)
    assert str(port) in str(caught.value)
    await until(lambda: lines(caplog, "link.lost"))
    [line] = lines(caplog, "link.lost")
    assert line.endswith(remedy)


async def test_a_server_that_went_away_is_no_wrong_address(link_to: LinkTo, own_server: Server) -> None:
    link = await link_to(own_server.tcp_url)
    own_server.stop()
    await notice(link)
    await knows_why(link, "refused")
    with pytest.raises(Unavailable) as caught:
        await link.call(echo("a"), patience=1)
    assert f"No connection to {own_server.tcp_url} for " in str(caught.value)
    assert ": connection refused. Is the server running? The request echo waited 1.0 s and was " in str(caught.value)
    own_server.start()
    assert await link.call(echo("b")) == "b"


# A host name


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Host names with the error that the name service has for them, as the test changes them; all others as always."""
    known: dict[str, int] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        if host in known:
            raise socket.gaierror(known[host], "says the name service")
        return real("127.0.0.1" if str(host).endswith(".invalid") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize("scheme", ["redis://{}:1", "redis+cluster://{}:1", "redis+sentinel://{}:1/main"])
async def test_a_host_name_that_does_not_resolve_fails_at_once(
    link_to: LinkTo, names: dict[str, int], scheme: str
) -> None:
    names["db.invalid"] = socket.EAI_NONAME
    told = await refused(link_to, scheme.format("db.invalid"), Unavailable)
    assert told.startswith(f"Could not connect to {scheme.format('db.invalid')}")
    assert "the host name 'db.invalid' does not resolve (says the name service)" in told
    assert told.endswith(". Check the host name in the URL of the mesh.")


async def test_a_host_name_that_cannot_be_one_fails_at_once(link_to: LinkTo) -> None:
    assert "does not resolve" in await refused(link_to, f"redis://{'a' * 70}:1", Unavailable)


@pytest.mark.parametrize("scheme", ["redis://{}:{}/0", "redis+cluster://{}:{}"])
async def test_a_name_service_that_is_not_there_yet_is_waited_for(
    link_to: LinkTo, names: dict[str, int], scheme: str, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    names["db.invalid"] = socket.EAI_AGAIN
    link = await link_to(scheme.format("db.invalid", own_server.port), ready=False, patience=PATIENCE)
    await until(lambda: lines(caplog, "link.lost"))
    assert "the host name 'db.invalid' cannot be resolved at the moment" in lines(caplog, "link.lost")[0]
    del names["db.invalid"]
    if "cluster" in scheme:
        with pytest.raises(RefusedByServer, match="no node of a cluster"):
            await link.wait_ready()
    else:
        await link.wait_ready()


async def test_a_name_that_was_known_is_waited_for(
    link_to: LinkTo, names: dict[str, int], own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container network, the name of a service is gone while the service is."""
    link = await link_to(f"redis://db.invalid:{own_server.port}")
    names["db.invalid"] = socket.EAI_NONAME
    own_server.stop()
    await notice(link)
    await until(lambda: lines(caplog, "link.lost"))
    await knows_why(link, "does not resolve")
    with pytest.raises(Unavailable, match="does not resolve"):
        await link.call(echo("a"), patience=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wait_ready)  # whoever connects meanwhile waits, too
        attempts = link._client.connector.attempts  # type: ignore[union-attr]
        await until(lambda: link._client.connector.attempts > attempts + 1)  # type: ignore[union-attr]
        own_server.start()
        del names["db.invalid"]
    assert await link.call(echo("b")) == "b"


def test_one_host_that_is_known_is_a_reason_to_wait() -> None:
    unknown, known = Unavailable("x"), Unavailable("y")
    unknown.__cause__ = socket.gaierror(socket.EAI_NONAME, "no such host")
    known.__cause__ = ConnectionRefusedError()
    assert sorted([unknown, known], key=is_unknown_host)[0] is known
    assert not is_unknown_host(socket.gaierror(socket.EAI_AGAIN, "later"))
    assert cause_of(ValueError("x"), Endpoint("h", 1)) == ""


def test_a_node_of_a_cluster_may_have_a_name_that_is_not_known_yet() -> None:
    """Another node has just told of it: a container that is starting."""
    unknown = Unavailable("x")
    unknown.__cause__ = socket.gaierror(socket.EAI_NONAME, "no such host")
    for url, told in (("redis://h", True), ("redis+cluster://h", False)):
        outage = Outage(LogThread(), logging.getLogger("test"), "h:1")
        assert bool(outage.failed_to_connect(unknown, LinkSettings(url), waiting=0)) is told


# Something else at the port


class Hello(BaseHTTPRequestHandler):
    """Any web server."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def test_a_port_that_speaks_http_is_refused_with_its_own_words(link_to: LinkTo) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hello)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        for secret in ("", "ada:hunter2@"):
            told = await refused(link_to, f"redis://{secret}127.0.0.1:{server.server_port}/0")
            assert told.startswith("no Redis or Valkey server at redis://")
            assert "the program there replied '<!DOCTYPE HTML" in told
            assert told.endswith(", which is HTTP; check host and port in its URL")
            assert "hunter2" not in told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", "replied 'HTTP/1.1 400 Bad Request', which is HTTP; check"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "replied 'SSH-2.0-OpenSSH_9.2p1'; check host and port in its URL"),
        (b"\xff\x00\x01", "no Redis or Valkey server at"),
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_program_that_is_no_server_is_refused_with_its_own_words(
    link_to: LinkTo, reply: bytes, words: str, scheme: str
) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(10_000)
        connection.sendall(reply)

    end = "/main" if "sentinel" in scheme else ""
    with port_with(serve) as port:
        assert words in await refused(link_to, f"{scheme}://127.0.0.1:{port}{end}")


@pytest.mark.parametrize("user", ["", ":hunter2@", "ada:hunter2@"])
async def test_protected_mode_is_refused_with_its_own_words(link_to: LinkTo, user: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(DENIED)  # and it hangs up, with what we have sent unread: a reset

    with port_with(serve) as port:
        told = await refused(link_to, f"redis://{user}127.0.0.1:{port}")
    assert "refused the connection: DENIED Redis is running in protected mode" in told
    assert "give the server a password (requirepass)" in told
    assert "hunter2" not in told


async def test_a_server_that_has_too_many_clients_is_waited_for(link_to: LinkTo, own_server: Server) -> None:
    clients = own_server.look
    clients.config_set("maxclients", 1)
    try:
        link = await link_to(own_server.tcp_url, ready=False, patience=0.5)
        await knows_why(link, "max number of clients")
        with pytest.raises(Unavailable, match="max number of clients"):
            await link.wait_ready()
    finally:
        clients.config_set("maxclients", 1000)


def test_what_a_server_has_said_before_it_hung_up_is_heard_although_nothing_can_be_sent(tmp_path: Path) -> None:
    settings = LinkSettings(f"unix://{tmp_path / 'socket'}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings.address.path)
        listener.listen()
        raw = connector._raw(settings, settings.address, settings.address.seeds[0], None)
        raw.connect()
        connection, _ = listener.accept()
        connection.sendall(b"-ERR max number of clients reached\r\n")
        connection.close()
        wire = Wire(raw, 1.0, settings.address.seeds[0])
        with pytest.raises(ConnectionLost, match="max number of clients"):
            wire.exchange([("PING",)])
        wire.close()


async def test_a_port_that_only_hangs_up_is_waited_for(link_to: LinkTo) -> None:
    """As a proxy does, the server behind which is not there yet; it is asked for TLS, too, and hangs up again."""
    heard: list[bytes] = []
    with port_with(lambda connection: heard.append(connection.recv(10_000))) as port:
        link = await link_to(f"redis://127.0.0.1:{port}", ready=False, patience=0.5)
        begins_tls = b"\x16\x03"
        await until(lambda: any(each.startswith(begins_tls) for each in heard), what="the beginning of a TLS handshake")
        await knows_why(link, "(?i)closed|reset")
        with pytest.raises(Unavailable, match="(?i)could not connect .*(closed|reset)"):
            await link.wait_ready()


async def test_tls_at_a_port_without_is_refused_with_what_the_server_says(link_to: LinkTo, own_server: Server) -> None:
    url = own_server.tcp_url.replace("redis://", "rediss://")
    told = await refused(link_to, f"{url}?ssl_cert_reqs=none")
    assert "no TLS" in told
    assert "redis://" in told
    assert own_server.look.ping()


async def test_a_program_that_takes_a_handshake_and_is_silent_is_waited_for(link_to: LinkTo) -> None:
    held: list[socket.socket] = []
    with port_with(lambda connection: held.append(connection.dup())) as port:
        with pytest.raises(Unavailable):
            await link_to(f"rediss://127.0.0.1:{port}", patience=0.5, connect_timeout=0.2)
    for connection in held:
        connection.close()


async def test_a_port_that_worked_before_is_waited_for_whatever_answers(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is not told: the server may come back where a balancer's error page is now."""
    link = await link_to(own_server.tcp_url)
    own_server.stop()
    page = HTTPServer(("127.0.0.1", own_server.port), Hello)
    thread = threading.Thread(target=page.serve_forever, args=(0.05,))
    thread.start()
    try:
        await notice(link)
        await knows_why(link, "which is HTTP")
        with pytest.raises(Unavailable, match="which is HTTP"):
            await link.call(echo("a"), patience=0.5)
    finally:
        page.shutdown()
        thread.join()
        page.server_close()
    own_server.start()
    assert await link.call(echo("b")) == "b"
