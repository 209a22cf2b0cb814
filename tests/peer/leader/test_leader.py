"""The leader where something is away: a node of a cluster, or its own connection."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from tests.peer.tools import at_most, until
from worqr import ops
from worqr.errors import RefusedByServer, Unavailable
from worqr.keys import RegistryKeys
from worqr.ops import WorkerHeartbeats
from worqr.peer.leader import leader
from worqr.peer.leader import leader as leader_module
from worqr.peer.leader.chore import NODE_PATIENCE
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.sweeper import SWEEP_AT_ONCE
from worqr.peer.session import LEASE

WORKERS = [f"W{n}" for n in range(100)]


class HalfACluster:
    """A link that reaches the registry and Q1, and waits in vain for Q0. Every worker is dying, and mapped to both."""

    def __init__(self, error: Exception) -> None:
        self.settings = SimpleNamespace(clustered=True)
        self.connected_at = 0.0
        self.asked: Counter[tuple[str, str]] = Counter()
        self.left = {worker: ["Q0", "Q1"] for worker in WORKERS}
        self.error = error

    def post(self, *_args: object, **_more: object) -> None:
        """An entry in the log of the mesh goes nowhere."""

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        name = call.script.name
        self.asked[name, call.base] += 1
        if call.base == "p:{Q0}":
            assert patience == NODE_PATIENCE < LEASE
            raise self.error
        if name == "look_at_workers":
            return WorkerHeartbeats("run", {}, list(WORKERS))
        if name == "forget_worker":
            return list(self.left[str(call.args[0])])
        if name == "fail_worker":
            return SimpleNamespace(requeued=1, dead_lettered=0, more=False)
        if name == "unmap_work":
            self.left[call.keys[0].rpartition(":")[2]].remove("Q1")
            return None
        raise AssertionError(name)


def leader_on(link: Any, keepalive: float = 3.0) -> Leader:
    leader = Leader(link, RegistryKeys("p"), keepalive=keepalive)
    leader._lease._until = float("inf")
    return leader


async def test_a_node_that_is_away_is_waited_for_once_whoever_died() -> None:
    link = HalfACluster(Unavailable("the node is away"))
    leader = leader_on(link)
    for rounds in (1, 2):
        await leader.check_once()
        await leader.sweeper.sweep_once()
        assert 1 <= link.asked["fail_worker", "p:{Q0}"] <= rounds * SWEEP_AT_ONCE < len(WORKERS)
        leader.sweeper._unreachable_until.clear()  # as time does
    assert link.asked["fail_worker", "p:{Q1}"] == len(WORKERS)
    assert link.left == {worker: ["Q0"] for worker in WORKERS}


async def test_what_the_server_refuses_is_tried_again_with_growing_pauses_and_logged_once(caplog: Any) -> None:
    link = HalfACluster(RefusedByServer("WRONGTYPE"))
    leader = leader_on(link)
    for _ in range(10):
        await leader.check_once()
        await leader.sweeper.sweep_once()
    assert link.asked["fail_worker", "p:{Q0}"] == len(WORKERS), "not once for each look"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [
        "fail_worker: the tasks of dead workers on queue 'Q0' cannot be given back, trying again: WRONGTYPE"
    ]


class Broken:
    """A link whose connection was just made anew, whenever one looks."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(clustered=False)
        self.subscriptions = SimpleNamespace(open=lambda *_: SimpleNamespace(close=lambda: None))
        self.breaks = True
        self.looks = 0

    @property
    def connected_at(self) -> float:
        return time.monotonic() if self.breaks else 0.0

    def post(self, *_args: object, **_more: object) -> None:
        """An entry in the log of the mesh goes nowhere."""

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        return WorkerHeartbeats("run", {}, [])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (leader, "CHECK_EVERY", 0.02),
        (leader_module, "UNABLE_FOR", 0.1),
        (leader_module, "DECLINE_LEASE_FOR", 1.0),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.usefixtures("hasty")
async def test_a_leader_whose_connection_keeps_breaking_lets_another_peer_lead() -> None:
    link: Any = Broken()
    leader = leader_on(link, keepalive=0.2)
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.lead_forever)
        await until(lambda: not leader.leads)
        assert not leader.may_request_lease(), "it does not ask for the lease"
        leader.on_lease_granted(until=float("inf"))  # the answer to a beat that was sent before
        assert not leader.leads
        await until(leader.may_request_lease, what="it asks again: perhaps nobody else can judge either")
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("hasty")
async def test_one_reconnect_costs_a_leader_no_lease() -> None:
    link: Any = Broken()
    leader = leader_on(link, keepalive=0.2)
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.lead_forever)
        await until(lambda: leader._unable_since is not None)
        link.breaks = False
        await until(lambda: leader._unable_since is None)
        nursery.cancel_scope.cancel()
    assert leader.leads
    assert leader.may_request_lease()


async def test_a_new_leader_begins_its_rounds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "FOLLOW_EVERY", 3600.0)
    link: Any = Broken()
    link.breaks = False
    leader = leader_on(link, keepalive=3)
    leader._lease._until = 0.0
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.lead_forever)
        await trio.testing.wait_all_tasks_blocked()
        assert link.looks == 0, "another peer leads"
        leader.on_lease_granted(until=float("inf"))
        await leader.wait_leading()
        await until(lambda: link.looks)
        nursery.cancel_scope.cancel()


class Missing:
    """A link on which W1 is registered and has no beat."""

    connected_at = 0.0
    settings = SimpleNamespace(clustered=False)
    subscriptions = SimpleNamespace(open=lambda *_: SimpleNamespace(close=lambda: None))

    def post(self, *_args: object, **_more: object) -> None:
        """An entry in the log of the mesh goes nowhere."""

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        return WorkerHeartbeats("run", {"W1": None}, [])


async def test_what_was_seen_before_the_lease_lapsed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.peer.leader.leader.MISSING_FOR", 0.05)
    link: Any = Missing()
    leader = leader_on(link)
    await leader.check_once()
    leader._lease._until = 0.0
    await trio.sleep(0.1)
    assert not leader.leads
    leader.on_lease_granted(until=float("inf"))
    await leader.check_once()
    assert list(leader.sweeper._todo) == ["W1"]
