"""A real primary with a replica, each a server process that can be frozen, killed, let go of, and promoted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.leaks import assert_no_leaks
from tests.support.patience import PATIENCE
from tests.support.servers import SETTINGS, Server
from worqr.link import session

REPLICATING = {**SETTINGS, "repl-diskless-sync-delay": "0", "repl-timeout": "600"}  # a frozen replica is not given up


@dataclass
class Pair:
    """A primary and its replica; `follow` makes any server a replica of any other, `promote` a primary."""

    kind: str
    primary: Server = field(init=False)
    replica: Server = field(init=False)

    def __post_init__(self) -> None:
        self.primary, self.replica = (Server(self.kind, settings=dict(REPLICATING)) for _ in range(2))

    def start(self) -> None:
        self.primary.start()
        self.replica.start()
        follow(self.replica, self.primary)

    def restore(self) -> None:
        """Restore the first state, whatever a test did to it, and empty it."""
        for server in (self.primary, self.replica):
            if server.running:
                server.resume()
            else:
                server.start()
            server.close_clients()
        promote(self.primary)
        self.primary.look.config_set("maxmemory", "0")
        self.primary.look.flushall()
        follow(self.replica, self.primary)

    def close(self) -> None:
        self.primary.close()
        self.replica.close()


def follow(replica: Server, primary: Server) -> None:
    """Make it a replica, and wait until it is in step."""
    replica.look.execute_command("REPLICAOF", "127.0.0.1", primary.port)
    wait(lambda: replica.look.info("replication").get("master_link_status") == "up", "a replica that is up")
    wait(lambda: "online" in str(primary.look.info("replication").get("slave0")), "a primary that knows its replica")


def promote(server: Server) -> None:
    server.look.execute_command("REPLICAOF", "NO", "ONE")


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:g} s"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def pair_of_module(server_kind: str) -> Iterator[Pair]:
    pair = Pair(server_kind)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest.fixture
def pair(pair_of_module: Pair) -> Iterator[Pair]:
    """A primary and a replica in step with it, without keys; everything that a test does to them is undone."""
    yield pair_of_module
    pair_of_module.restore()


@pytest.fixture
def own_pair(server_kind: str) -> Iterator[Pair]:
    """A primary and a replica of this test alone: they may be killed."""
    pair = Pair(server_kind)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest.fixture
def mine(pair: Pair) -> Iterator[str]:
    """A prefix of this test's own, under which it may leave waiting tasks and what expires."""
    name = f"t{secrets.token_hex(4)}"
    yield name
    for server in (pair.primary, pair.replica):
        if server.running:
            server.resume()
    if pair.primary.running:
        assert_no_leaks(pair.primary.client(), name)


@pytest.fixture
def wait_for_replicas(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`wait_for_replicas(seconds)`: how long a request waits for its replicas; by default without limit."""

    def say(seconds: float) -> None:
        monkeypatch.setattr(session, "REPLICAS_WAIT", seconds)

    say(PATIENCE)
    return say
