"""TLS: certificates made for the test, a real server that speaks nothing else, and each way in which it does not work."""

from __future__ import annotations

import datetime as dt
import logging
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import trio
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import worqr
from tests.peer.tools import Held, Runs, serving, until
from tests.support.patience import PATIENCE
from tests.support.servers import SETTINGS, Server, free_port
from worqr.link.failures import as_connection_lost

SECRET = "k3y/pass word"
YEAR = dt.timedelta(days=365)


class Certificates:
    """Files of authorities, servers and clients in one folder; each certificate with its key in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authorities = {name: trustme.CA(organization_name=name) for name in ("ca", "stranger")}
        for name, authority in self.authorities.items():
            authority.cert_pem.write_to_path(self.path(f"{name}.pem"))
        over = {"not_before": dt.datetime.now() - 2 * YEAR, "not_after": dt.datetime.now() - YEAR}
        self.issue("server", "127.0.0.1")
        self.issue("renewed", "127.0.0.1")
        self.issue("moved", "127.0.0.7")
        self.issue("old", "127.0.0.1", **over)
        self.issue("impostor", "127.0.0.1", by="stranger")
        self.issue("client", "client@example.org")
        self.issue("late-client", "client@example.org", **over)
        self.issue("strange-client", "client@example.org", by="stranger")
        key = load_pem_private_key(Path(self.path("client.key")).read_bytes(), None)
        locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(SECRET.encode()))
        Path(self.path("locked.key")).write_bytes(locked)
        Path(self.path("garbage.pem")).write_text("this is no certificate\n")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def issue(self, name: str, identity: str, *, by: str = "ca", **dates: Any) -> None:
        made = self.authorities[by].issue_cert(identity, **dates)
        made.private_key_pem.write_to_path(self.path(f"{name}.key"))
        made.cert_chain_pems[0].write_to_path(self.path(f"{name}.pem"))
        made.private_key_and_cert_chain_pem.write_to_path(self.path(f"{name}.both"))

    def options(self, **changes: str | None) -> str:
        """The end of a URL: the right authority and a good client, but for `changes`; names of files are ours."""
        wanted = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key", **changes}
        ours = {
            name: self.path(value) if name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile") else value
            for name, value in wanted.items()
            if value is not None
        }
        return "?" + urlencode(ours, quote_via=quote)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def certificates(made_once: Certificates, tmp_path: Path) -> Certificates:
    """In a folder of the test's own, so that it may replace them."""
    own = Certificates.__new__(Certificates)
    own.authorities = made_once.authorities
    own.folder = tmp_path / "certificates"
    shutil.copytree(made_once.folder, own.folder)
    return own


class TlsServer(Server):
    """A server that speaks TLS with those who have a certificate of our authority. (And plainly on a unix socket, to us.)"""

    def __init__(self, kind: str, certificates: Certificates) -> None:
        self.tls_port = free_port()
        self.certificates = certificates
        settings = {
            "tls-port": str(self.tls_port),
            "tls-ca-cert-file": certificates.path("ca.pem"),
            "tls-auth-clients": "yes",
            **self._certificate("server"),
        }
        super().__init__(kind, port=0, settings={**SETTINGS, **settings})

    def _certificate(self, name: str) -> dict[str, str]:
        files = {"tls-cert-file": f"{name}.pem", "tls-key-file": f"{name}.key"}
        return {setting: self.certificates.path(file) for setting, file in files.items()}

    def show(self, name: str) -> None:
        """Have another certificate, for those who come from now on."""
        self.settings |= self._certificate(name)
        if self.running:
            words = [word for pair in self._certificate(name).items() for word in pair]
            self.look.execute_command("CONFIG", "SET", *words)

    def address(self, host: str = "127.0.0.1", user: str = "", **changes: str | None) -> str:
        return f"rediss://{user}{host}:{self.tls_port}/0{self.certificates.options(**changes)}"


@pytest.fixture
def tls(server_kind: str, certificates: Certificates) -> Iterator[TlsServer]:
    server = TlsServer(server_kind, certificates)
    try:
        server.start()
    except worqr.Unavailable as error:
        if "TLS" not in str(error):
            raise
        pytest.skip(f"this {server_kind} was built without TLS")
    yield server
    server.close()


def mesh_at(url: str, **settings: Any) -> worqr.Mesh:
    return worqr.Mesh(url, **{"patience": PATIENCE, **settings})


async def works(url: str, **settings: Any) -> None:
    mesh = mesh_at(url, **settings)
    async with mesh.connect():
        assert await mesh.queue("Q1").enqueue(b"a") == 1


async def refused(url: str, kind: type[Exception] = worqr.RefusedByServer, **settings: Any) -> str:
    """What is said when it does not work: an error at once, in one line."""
    with pytest.raises(kind) as caught:
        await works(url, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ours(server: Server) -> list[dict[str, Any]]:
    """Our connections, as the server sees them."""
    return [client for client in server.look.client_list() if client["name"].startswith("worqr:")]


# It works


async def test_everything_of_a_peer_and_a_producer_goes_over_tls(tls: TlsServer) -> None:
    peers, producer, runs = mesh_at(tls.address(), app="peer"), mesh_at(tls.address(), app="producer"), Runs()
    async with serving(peers, "Q1", runs), producer.connect():
        job = await producer.queue("Q1").dispatch(b"a", result_ttl=60)
        assert (await job.status()).state in ("waiting", "active", "finished")
        await job.result(timeout=PATIENCE)
        assert runs.tasks == [b"a"]
        wanted = {"worqr:peer:data", "worqr:peer:subscribe", "worqr:peer:beat", "worqr:producer:data"}
        await until(lambda: wanted <= {client["name"] for client in ours(tls)})
        assert {client["laddr"] for client in ours(tls)} == {f"127.0.0.1:{tls.tls_port}"}
    assert tls.look.config_get("port") == {"port": "0"}


async def test_a_plain_thread_produces_over_tls(tls: TlsServer) -> None:
    mesh = mesh_at(tls.address())
    assert await trio.to_thread.run_sync(partial(worqr.sync, mesh.queue("Q1").enqueue, b"a", b"b")) == 2
    await trio.to_thread.run_sync(mesh.close)


async def test_a_large_task_goes_through(tls: TlsServer) -> None:
    task, mesh, runs = bytes(range(256)) * 32 * 1024, mesh_at(tls.address()), Runs()
    assert len(task) == 8 * 1024 * 1024
    async with serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(task, b"small")
        assert sorted(await runs.wait(2), key=len) == [b"small", task]


async def test_a_running_task_is_cancelled_over_tls(tls: TlsServer) -> None:
    mesh, held = mesh_at(tls.address()), Held()
    async with serving(mesh, "Q1", held):
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        assert (await mesh.queue("Q1").cancel(b"a", wait=PATIENCE)).acknowledged == 1
    assert held.cancelled == [(b"a", "cancel")]


async def test_user_and_password(tls: TlsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tls.look.execute_command("ACL", "SETUSER", "ada", "on", f">{SECRET}", "~*", "&*", "+@all")
    await works(tls.address(user=f"ada:{quote(SECRET, safe='')}@"))
    said = await refused(tls.address(user="ada:wrong@"))
    assert "WRONGPASS" in said
    assert "check user and password" in said
    assert SECRET not in caplog.text
    assert "wrong@" not in caplog.text + said


async def test_certificate_and_key_in_one_file(tls: TlsServer) -> None:
    await works(tls.address(ssl_certfile="client.both", ssl_keyfile=None))


async def test_an_encrypted_key(tls: TlsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await works(tls.address(ssl_keyfile="locked.key", ssl_password=SECRET))
    said = await refused(tls.address(ssl_keyfile="locked.key"), worqr.UsageError)
    assert "locked.key' is encrypted: give ssl_password" in said
    said = await refused(tls.address(ssl_keyfile="locked.key", ssl_password=SECRET + "!"), worqr.UsageError)
    assert "locked.key' holds no private key that can be read with ssl_password" in said
    mesh = mesh_at(tls.address(ssl_keyfile="locked.key", ssl_password=SECRET))
    async with mesh.connect():
        said += repr(mesh) + repr(mesh._client.link.settings) + caplog.text
    for shown in (SECRET, quote(SECRET), quote(SECRET, safe="")):
        assert shown not in said


# Who the server is


async def test_a_server_of_an_unknown_authority_is_refused(tls: TlsServer) -> None:
    for changes in ({"ssl_ca_certs": "stranger.pem"}, {"ssl_ca_certs": None}, {"ssl_cert_reqs": "optional"}):
        said = await refused(tls.address(**{"ssl_ca_certs": "stranger.pem", **changes}))
        assert said.startswith(f"the server at rediss://127.0.0.1:{tls.tls_port}/0 refused the connection: ")
        assert "CERTIFICATE_VERIFY_FAILED" in said
        assert said.endswith("; name the certificate authority: rediss://...?ssl_ca_certs=/path/to/ca.pem")


async def test_a_server_of_another_name_is_refused(tls: TlsServer) -> None:
    said = await refused(tls.address(host="localhost"))
    assert "certificate is not valid for 'localhost'" in said
    assert said.endswith("the server's certificate is for another name than the URL's")
    await works(tls.address(host="localhost", ssl_check_hostname="no"))
    tls.show("moved")
    assert (await refused(tls.address())).endswith("the server's certificate is for another address than the URL's")


async def test_a_server_with_an_expired_certificate_is_refused(tls: TlsServer) -> None:
    tls.show("old")
    assert (await refused(tls.address())).endswith("the server's certificate has expired")


async def test_to_check_nothing_is_worth_a_warning(tls: TlsServer, caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_at(tls.address(ssl_ca_certs="stranger.pem", ssl_cert_reqs="none"))
    async with mesh.connect(), mesh.join():
        await mesh.queue("Q1").enqueue(b"a")
    assert caplog.text.count("link.insecure") == 1
    assert "ssl_cert_reqs=none" in caplog.text
    caplog.clear()
    await works(tls.address())
    assert "link.insecure" not in caplog.text


# Who we are


@pytest.mark.parametrize("client", [None, "strange-client", "late-client"])
async def test_a_client_whose_certificate_the_server_does_not_trust_is_told(tls: TlsServer, client: str | None) -> None:
    files = {"ssl_certfile": client and f"{client}.pem", "ssl_keyfile": client and f"{client}.key"}
    said = await refused(tls.address(**files))
    assert "ALERT" in said
    assert "the server asks for a client certificate that it trusts: rediss://...?ssl_certfile=" in said


# Files that cannot be used


UNUSABLE = [
    ({"ssl_ca_certs": "nowhere.pem"}, "ssl_ca_certs='{}/nowhere.pem' cannot be read: No such file or directory"),
    ({"ssl_ca_certs": ""}, "ssl_ca_certs='{}' cannot be read: Is a directory"),
    ({"ssl_ca_certs": "garbage.pem"}, "ssl_ca_certs='{}/garbage.pem' holds no certificate"),
    ({"ssl_ca_path": "nowhere"}, "ssl_ca_path='{}/nowhere' is not a directory"),
    ({"ssl_certfile": "nowhere.pem"}, "ssl_certfile='{}/nowhere.pem' cannot be read"),
    ({"ssl_certfile": "garbage.pem"}, "ssl_certfile='{}/garbage.pem' holds no certificate"),
    ({"ssl_keyfile": "nowhere.pem"}, "ssl_keyfile='{}/nowhere.pem' cannot be read"),
    ({"ssl_keyfile": "garbage.pem"}, "ssl_keyfile='{}/garbage.pem' holds no private key that can be read"),
    ({"ssl_keyfile": "server.key"}, "ssl_keyfile='{0}/server.key' is not the key of ssl_certfile='{0}/client.pem'"),
    ({"ssl_keyfile": None}, "ssl_certfile='{}/client.pem' holds no private key that can be read"),
    ({"ssl_certfile": None}, "ssl_keyfile='{}/client.key' needs its certificate, ssl_certfile, too"),
]


@pytest.mark.parametrize(
    ("changes", "words"), UNUSABLE, ids=lambda given: given.partition(" ")[0] if isinstance(given, str) else ""
)
async def test_a_file_that_cannot_be_used_is_named_before_a_byte_is_sent(
    certificates: Certificates, changes: dict[str, str | None], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        said = await refused(
            f"rediss://ada:hunter2@127.0.0.1:{port}{certificates.options(**changes)}", worqr.UsageError
        )
        assert words.format(certificates.folder) in said
        assert said.startswith(f"the server's URL rediss://ada:***@127.0.0.1:{port}: ")
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_a_file_that_is_spoiled_while_we_are_connected(tls: TlsServer, caplog: pytest.LogCaptureFixture) -> None:
    """The next connection waits for it; calls meanwhile say why they wait in vain."""
    caplog.set_level(logging.INFO)
    key, mesh = trio.Path(tls.certificates.path("client.key")), mesh_at(tls.address())
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a")
        good = await key.read_bytes()
        await key.unlink()
        tls.restart()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mesh.queue("Q1").enqueue, b"b")
            await until(lambda: "link.lost" in caplog.text)
            await key.write_bytes(good)
        assert await mesh.queue("Q1").count() == 2
        await until(lambda: "link.back" in caplog.text)


# Changes


async def test_a_restart_with_a_new_certificate_of_the_same_authority(tls: TlsServer) -> None:
    mesh, runs = mesh_at(tls.address()), Runs()
    async with serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        tls.stop()
        tls.show("renewed")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mesh.queue("Q1").enqueue, b"b")
            tls.start()
        assert await runs.wait(2) == [b"a", b"b"]
        assert mesh._client.link.connections >= 2


async def test_a_server_that_comes_back_as_somebody_else_is_not_spoken_to(
    tls: TlsServer, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, runs = mesh_at(tls.address()), Runs()
    async with serving(mesh, "Q1", runs, grace=0):
        tls.stop()
        tls.show("impostor")
        tls.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mesh.queue("Q1").enqueue, b"a")
            with pytest.raises(worqr.RefusedByServer, match="name the certificate authority"):
                await works(tls.address())
            assert runs.tasks == []
            assert ours(tls) == []
            tls.show("server")
        assert await runs.wait(1) == [b"a"]


# Where no TLS is spoken, or nothing else


async def test_a_plain_url_at_a_tls_port_is_told_to_be_rediss(tls: TlsServer) -> None:
    for user in ("", "ada:hunter2@"):
        said = await refused(f"redis://{user}127.0.0.1:{tls.tls_port}/0")
        assert said.endswith(" speaks TLS at this port, and hung up without it; write rediss:// instead of redis://")


async def test_a_tls_url_at_a_plain_port_is_told_to_be_redis(own_server: Server) -> None:
    said = await refused(own_server.tcp_url.replace("redis://", "rediss://"))
    assert "speaks no TLS at this port (it replied '+PONG' in plain text); write redis:// instead of rediss://" in said


async def test_a_tls_server_that_restarts_is_not_asked_whether_it_speaks_tls(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a connection stood before, who hangs up is a server, or a proxy, that is just not there."""
    asked: list[object] = []
    monkeypatch.setattr("worqr.link.connector.speaks_tls", asked.append)
    mesh = mesh_at(own_server.tcp_url)
    async with mesh.connect():
        own_server.stop()
        hanging_up = socket.create_server(("127.0.0.1", own_server.port))
        thread = threading.Thread(target=lambda: hanging_up.accept()[0].close())
        thread.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mesh.queue("Q1").enqueue, b"a")
            await trio.to_thread.run_sync(thread.join)
            hanging_up.close()
            await trio.to_thread.run_sync(own_server.start)
    assert asked == []


async def test_a_port_that_answers_something_else_is_refused() -> None:
    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):  # it hangs up on us
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        said = await refused(f"rediss://127.0.0.1:{listening.getsockname()[1]}")
        await trio.to_thread.run_sync(thread.join)
    assert said.endswith("no TLS is spoken at this port; is it redis://?")


def test_a_port_that_says_nothing_is_guessed_at() -> None:
    """As a server without TLS does, which waits for the rest of a command."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        client.settimeout(0.05)
        with pytest.raises(TimeoutError) as caught, client:
            ssl.create_default_context().wrap_socket(client, server_hostname="localhost")
    wrapped = ConnectionError("Timeout connecting to server")
    wrapped.__cause__ = caught.value
    assert as_connection_lost(wrapped).cause == "Timeout connecting to server (is TLS spoken at this port?)"
    assert as_connection_lost(ConnectionError("Timeout connecting to server")).cause == "Timeout connecting to server"
