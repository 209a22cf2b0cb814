"""What a server can say instead of working, made on real servers: each trouble begins, and ends, when a test says so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from tests.support.patience import PATIENCE
from tests.support.sentinels import raw, wait
from tests.support.servers import SETTINGS, Server, started


@dataclass(frozen=True)
class Trouble:
    """A server's error word, and how to make the server reply with it.

    Attributes:
        begin, end: blocking.
        settings: what the server has to be started with.
    """

    word: str
    begin: Callable[[Server], None]
    end: Callable[[Server], None]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.word


def become_replica(server: Server) -> None:
    raw(server, "REPLICAOF", "127.0.0.1", 1)


def become_primary(server: Server) -> None:
    raw(server, "REPLICAOF", "NO", "ONE")


def fail_to_save(server: Server) -> None:
    """Its snapshot cannot be put where it belongs, because a folder is there."""
    (server.folder / "dump.rdb").unlink(missing_ok=True)  # of an earlier attempt
    (server.folder / "dump.rdb").mkdir()
    server.look.config_set("save", "3600 1")
    _save(server, "err")


def save(server: Server) -> None:
    (server.folder / "dump.rdb").rmdir()
    _save(server, "ok")
    server.look.config_set("save", "")


def _save(server: Server, outcome: str) -> None:
    def saved() -> bool:
        with suppress(redis.ResponseError):  # another save is under way
            server.look.bgsave()
        return bool(server.look.info("persistence")["rdb_last_bgsave_status"] == outcome)

    wait(saved, f"a save that ends with {outcome}")


def miss_replicas(server: Server) -> None:
    server.look.config_set("min-replicas-to-write", 2)


def miss_nobody(server: Server) -> None:
    server.look.config_set("min-replicas-to-write", 0)


def spin(server: Server) -> None:
    """Another application's script does not end."""
    server.look.config_set("busy-reply-threshold", 50)
    other = server.client(socket_timeout=10 * PATIENCE)

    def run() -> None:
        with suppress(redis.RedisError):
            other.eval("while true do end", 0)

    threading.Thread(target=run, daemon=True).start()
    wait(lambda: _is_busy(server), "a busy server")


def _is_busy(server: Server) -> bool:
    try:
        server.look.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def stop_spinning(server: Server) -> None:
    raw(server, "SCRIPT", "KILL")
    wait(lambda: not _is_busy(server), "a server that is not busy")


def change_password(server: Server) -> None:
    """Change the default user's password, which no client gets. Open connections would stay valid, so they are closed."""
    server.look.ping()
    raw(server, "ACL", "SETUSER", "default", "resetpass", ">new")
    for kind in ("normal", "pubsub"):
        raw(server, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


def drop_password(server: Server) -> None:
    raw(server, "ACL", "SETUSER", "default", "nopass")


def load_slowly(server: Server) -> None:
    """It is started anew, and would take 20 s to read its file."""
    server.look.eval("for i = 1, 50000 do redis.call('SET', 'ballast:' .. i, i) end", 0)
    server.close_clients()
    server.stop()
    # Between two looks at its connections it reads 1024 commands.
    server.settings = {**server.settings, "key-load-delay": "400"}
    threading.Thread(target=server.start, daemon=True).start()
    wait(lambda: _says(server, b"PING").startswith(b"-LOADING"), "a server that loads its file")


def _says(server: Server, command: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as probe:
            probe.sendall(command + b"\r\n")
            return probe.recv(100)
    except OSError:
        return b""


def have_loaded(server: Server) -> None:
    assert _says(server, b"CONFIG SET key-load-delay 0") == b"+OK\r\n"
    wait(lambda: server.running, "a server that has loaded its file")


def lose_slots(server: Server) -> None:
    raw(server, "CLUSTER", "DELSLOTSRANGE", 0, 16383)


def have_slots(server: Server) -> None:
    raw(server, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    wait(lambda: b"cluster_state:ok" in raw(server, "CLUSTER", "INFO"), "a cluster that works")


TROUBLES = (
    Trouble("READONLY", become_replica, become_primary),
    Trouble("MISCONF", fail_to_save, save),
    Trouble("NOREPLICAS", miss_replicas, miss_nobody),
    Trouble("BUSY", spin, stop_spinning),
    Trouble("WRONGPASS|NOAUTH", change_password, drop_password),
    Trouble("LOADING", load_slowly, have_loaded),
    Trouble("CLUSTERDOWN", lose_slots, have_slots, {"cluster-enabled": "yes"}),
)
"""All of them pass: waiting requests continue when they do."""


def troubled_server(kind: str, trouble: Trouble) -> Iterator[Server]:
    """For a fixture: a server that can have the trouble."""
    server = started(lambda: Server(kind, settings={**SETTINGS, **trouble.settings}))
    if "cluster-enabled" in trouble.settings:
        have_slots(server)
    yield server
    server.close()
