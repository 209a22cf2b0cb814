"""``Mesh(credentials=...)``: asked for user and password at each new connection, so that passwords may change while it runs."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
import threading
from typing import Any

import pytest
import trio
import trio.lowlevel
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider

import worqr
from tests.peer.tools import Runs, serving, until
from tests.support.clusters import Cluster, cluster, cluster_of_module
from tests.support.patience import PATIENCE
from tests.support.sentinels import FakeSentinel
from tests.support.servers import Server
from worqr.link import Credentials

assert cluster, cluster_of_module  # fixtures


class Rotating:
    """A user of a server whose password changes, and the token service that knows it.

    Attributes:
        given: passwords, in the order in which they were given out.
        threads: in which it was asked.
    """

    def __init__(self, *servers: Server, user: str = "ada") -> None:
        self.servers = servers
        self.user = user
        self.given: list[str] = []
        self.threads: set[str] = set()
        self.rotate()

    def rotate(self) -> None:
        """From now on only another password is right."""
        self.password = secrets.token_urlsafe(12)
        rules = ("on", "resetpass", f">{self.password}", "~*", "&*", "+@all")
        for server in self.servers:
            server.look.execute_command("ACL", "SETUSER", self.user, *rules)

    def cut(self) -> None:
        """End all connections of the user."""
        for server in self.servers:
            server.look.execute_command("CLIENT", "KILL", "USER", self.user)

    def ours(self) -> set[str]:
        """The names of the user's connections."""
        clients = [client for server in self.servers for client in server.look.client_list()]
        return {client["name"] for client in clients if client["user"] == self.user}

    def __call__(self) -> tuple[str, str]:
        self.threads.add(threading.current_thread().name)
        self.given.append(self.password)
        return self.user, self.password


def mesh_of(server: Server, credentials: Any, **settings: Any) -> worqr.Mesh:
    return worqr.Mesh(server.tcp_url, credentials=credentials, **{"patience": PATIENCE, "app": "c", **settings})


async def works(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        assert await mesh.queue("Q1").enqueue(b"a")


# Passwords that change


async def test_a_mesh_goes_on_when_the_password_changes(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of connection logs in anew: requests, subscriptions, keepalive."""
    caplog.set_level(logging.DEBUG)
    rotating, runs = Rotating(own_server), Runs()
    peers, producer = mesh_of(own_server, rotating), mesh_of(own_server, rotating, app="p")
    everything = {"worqr:c:data", "worqr:c:subscribe", "worqr:c:beat", "worqr:p:data"}
    async with serving(peers, "Q1", runs), producer.connect():
        for task in (b"0", b"1", b"2"):
            job = await producer.queue("Q1").dispatch(task, id=task.decode(), result_ttl=60)
            await job.result(timeout=PATIENCE)
            await until(lambda: everything <= rotating.ours())
            rotating.rotate()
            rotating.cut()
            await until(lambda: everything - {"worqr:p:data"} <= rotating.ours())
        assert await producer.queue("Q1").enqueue(b"3")
        await runs.wait(4)
    assert runs.tasks == [b"0", b"1", b"2", b"3"]
    assert threading.current_thread().name not in rotating.threads, "it may block: never in the loop"
    assert rotating.threads >= {"worqr-dial", "worqr-heartbeat"}
    assert "WRONGPASS" not in caplog.text
    assert not [password for password in rotating.given if password in caplog.text]


async def test_all_nodes_of_a_cluster_are_entered_with_them(cluster: Cluster) -> None:
    rotating = Rotating(*cluster.nodes)
    mesh = worqr.Mesh(cluster.url, credentials=rotating, patience=PATIENCE, app="c")
    runs, queues = Runs(), ["Q0", "Q1", "Q2"]  # on three nodes
    async with serving(mesh, "Q0", runs):
        for _ in range(2):
            for queue in queues:
                await mesh.queue(queue).enqueue(b"a")
            await until(lambda: {"worqr:c:data", "worqr:c:topology", "worqr:c:beat"} <= rotating.ours())
            rotating.rotate()
            rotating.cut()
        await runs.wait(2)
        await until(lambda: "worqr:c:topology" in rotating.ours())
    assert "worqr-topology" in rotating.threads
    for node in cluster.nodes:
        node.look.execute_command("ACL", "DELUSER", rotating.user)


async def test_sentinels_have_users_of_their_own(own_server: Server) -> None:
    """Whoever asks them with the server's user is refused."""
    sentinel = FakeSentinel(own_server.port, looker="secret")
    rotating = Rotating(own_server)
    try:
        url = f"{sentinel.url}?sentinel_username=looker&sentinel_password=secret"
        await works(worqr.Mesh(url, credentials=rotating, patience=PATIENCE))
    finally:
        sentinel.close()
    assert set(rotating.given) == {rotating.password}


def test_a_plain_thread_produces_with_them(own_server: Server) -> None:
    mesh = mesh_of(own_server, Rotating(own_server))
    assert worqr.sync(mesh.queue("Q1").enqueue, b"a")
    mesh.close()


async def test_a_provider_of_redis_py_will_do(own_server: Server) -> None:
    own_server.look.execute_command("ACL", "SETUSER", "default", "on", ">pw")

    class Both(CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            return "default", "pw"

    for given in (Both(), UsernamePasswordCredentialProvider(password="pw"), lambda: ("", "pw"), lambda: ["", "pw"]):
        await works(mesh_of(own_server, given))


async def test_a_slow_token_service_does_not_block_the_loop(own_server: Server) -> None:
    rotating, asked, goes_on = Rotating(own_server), threading.Event(), threading.Event()

    def slow() -> tuple[str, str]:
        asked.set()
        assert goes_on.wait(PATIENCE)
        return rotating()

    mesh = mesh_of(own_server, slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(works, mesh)
        await until(asked.is_set)
        await trio.lowlevel.checkpoint()  # the loop turns
        goes_on.set()


def test_the_command_line_serves_a_mesh_with_them(own_server: Server, tmp_path: Any) -> None:
    own_server.look.execute_command("ACL", "SETUSER", "ada", "on", ">pw", "~*", "&*", "+@all")
    own_server.look.execute_command("ACL", "SETUSER", "default", "off")
    (tmp_path / "shop.py").write_text(
        "import os, worqr\n"
        f"mesh = worqr.Mesh({own_server.tcp_url!r}, credentials=lambda: ('ada', 'pw'))\n"
        "@mesh.task\n"
        "def end() -> None:\n"
        "    os._exit(7)\n"
        "worqr.sync(end.enqueue)\n"
        "mesh.close()\n"
    )
    command = [sys.executable, "-m", "worqr", "run", "shop:mesh"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 7, ended.stderr


# What goes wrong


async def test_an_error_is_logged_and_the_connection_is_tried_again(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rotating = Rotating(own_server)
    failures: list[BaseException] = [SystemExit(3), OSError("token service: 503\nlater")]

    def fetch_token() -> tuple[str, str]:
        if failures:
            raise failures.pop()
        return rotating()

    await works(mesh_of(own_server, fetch_token))
    assert not failures
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("link.credentials")]
    assert f"could not connect to {own_server.tcp_url}: credentials=" in line
    assert "fetch_token raised OSError: token service: 503 later" in line


async def test_an_error_ends_with_patience_and_is_named(own_server: Server) -> None:
    def fetch_token() -> tuple[str, str]:
        raise __import__("socket").gaierror(-2, "no such token service")  # which is no reason to give the server up

    for patience in (0.5, 5, 15):  # if the machine stands still, patience may end before the first attempt
        with pytest.raises(worqr.Unavailable) as caught:
            await works(mesh_of(own_server, fetch_token, patience=patience))
        told = str(caught.value)
        if "fetch_token" in told:
            break
    assert re.search(r"fetch_token raised gaierror: .*no such token service", told)
    assert "Check the host name" not in told


async def test_a_wrong_password_is_not_blamed_on_the_url(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(worqr.RefusedByServer, match=r"WRONGPASS.*; check what credentials= returns$"):
        await works(mesh_of(own_server, lambda: ("ada", "hunter2")))
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType; it must return (username, password), two strings"),
        ("hunter2", "returned str; it must return"),
        (("ada", b"hunter2"), "returned tuple(str, bytes); it must return"),
        (("ada", "hunter2", "x"), "returned tuple(str, str, str); it must"),
        ((), "returned tuple(); it must"),
        ({"ada": "hunter2"}, "returned dict; it must"),
        (("ada", ""), "returned an empty password"),
        (("ada", "hunter2\ud800"), "returned text that is not valid Unicode"),
    ],
)
async def test_something_else_is_an_error_at_once_that_does_not_show_it(
    own_server: Server, returned: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fetch() -> Any:
        return returned

    with pytest.raises(worqr.UsageError) as caught:
        await works(mesh_of(own_server, fetch))
    assert words in str(caught.value)
    assert "fetch" in str(caught.value)
    assert "hunter2" not in str(caught.value) + caplog.text


async def test_a_coroutine_is_no_answer(own_server: Server) -> None:
    async def token() -> tuple[str, str]:
        return "ada", "pw"

    with pytest.raises(worqr.UsageError, match=r"token is async: give a plain function, which may block"):
        mesh_of(own_server, token)
    with pytest.raises(worqr.UsageError, match=r"returned coroutine; it must return"):
        await works(mesh_of(own_server, lambda: token()))


@pytest.mark.parametrize("wrong", [("ada", "pw"), "pw", 7, CredentialProvider])
def test_what_cannot_be_asked_is_refused_where_it_is_given(wrong: Any) -> None:
    with pytest.raises(worqr.UsageError, match="credentials= must be a function that returns .username, password."):
        worqr.Mesh(credentials=wrong)


@pytest.mark.parametrize("user", ["ada:hunter2@", ":hunter2@", "ada@"])
def test_there_is_one_place_for_them(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch() -> tuple[str, str]:
        raise AssertionError

    url, words = f"redis://{user}localhost", "has a user or a password, and the mesh has credentials=: remove one"
    with pytest.raises(worqr.UsageError, match=words) as caught:
        worqr.Mesh(url, credentials=fetch)
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("WORQR_URL", url)
    with pytest.raises(worqr.UsageError, match=words):
        worqr.sync(worqr.Mesh(credentials=fetch).queues)
    with pytest.raises(worqr.UsageError, match="the embedded server has no users"):
        worqr.sync(worqr.Mesh("embedded:", credentials=fetch).queues)


def test_nothing_shows_them() -> None:
    credentials = Credentials(lambda: ("ada", "hunter2"))
    assert "hunter2" not in repr(credentials)
    assert credentials.get("redis://h") == ("ada", "hunter2")
    assert not [value for value in vars(credentials).values() if "hunter2" in str(value)]
