"""The leader where something is away: a node of a cluster, or its own connection."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from tests.peer.tools import at_most, until
from tests.support.patience import PATIENCE
from worqr import ops
from worqr.errors import RefusedByServer, Unavailable
from worqr.keys import RegistryKeys
from worqr.link import boottime
from worqr.ops import WorkerHeartbeats
from worqr.peer.leader import leader
from worqr.peer.leader import leader as leader_module
from worqr.peer.leader.chore import NODE_PATIENCE, STALE_AFTER, STALE_BEATS, Lease, LeaseWatch
from worqr.peer.leader.leader import (
    ALONE_EVERY,
    CHECK_EVERY,
    MAX_CHECK_GAP,
    MISSING_FOR,
    STALE_KEEPALIVES,
    FailureDetector,
    Leader,
)
from worqr.peer.leader.scanner import SWEEP_AT_ONCE
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

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
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
            self.left[str(call.args[0])].remove("Q1")
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


async def test_what_the_server_refuses_is_tried_again_with_growing_pauses_and_logged_once(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, now = HalfACluster(RefusedByServer("WRONGTYPE")), 1000.0
    monkeypatch.setattr("worqr.peer.leader.scanner.time", SimpleNamespace(monotonic=lambda: now))
    leader = leader_on(link)
    for later, tries in ((0.0, 1), (0.6, 2), (0.6, 2), (0.6, 3)):
        now += later
        for _ in range(10):
            await leader.check_once()
            await leader.sweeper.sweep_once()
        assert link.asked["fail_worker", "p:{Q0}"] == tries * len(WORKERS), "not once for each look"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [
        "fail_worker: the tasks of dead workers on queue 'Q0' cannot be given back, trying again: WRONGTYPE"
    ]


class Undecodable:
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

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        return WorkerHeartbeats("run", {}, [])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (leader, "CHECK_EVERY", 0.02),
        (leader_module, "UNABLE_FOR", 0.1),
        (leader_module, "DECLINE_LEASE_FOR", 3600.0),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.usefixtures("hasty")
async def test_a_leader_whose_connection_keeps_breaking_lets_another_peer_lead() -> None:
    link: Any = Undecodable()
    leader = leader_on(link, keepalive=0.2)
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.lead_forever)
        await until(lambda: not leader.leads)
        assert not leader.may_request_lease(), "it does not ask for the lease"
        leader.on_lease_granted(until=float("inf"))  # the answer to a beat that was sent before
        assert not leader.leads
        leader._lease._declined_until = 0.0  # as time does
        await until(leader.may_request_lease, what="it asks again: perhaps nobody else can judge either")
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("hasty")
async def test_one_reconnect_costs_a_leader_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "UNABLE_FOR", PATIENCE)  # it takes no longer, whatever the machine does
    link: Any = Undecodable()
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
    link: Any = Undecodable()
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

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        return WorkerHeartbeats("run", {"W1": None}, [])


async def test_what_was_seen_before_the_lease_lapsed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "MISSING_FOR", 0.05)
    monkeypatch.setattr(leader_module, "MAX_CHECK_GAP", PATIENCE)  # the machine may stand still
    link: Any = Missing()
    leader = leader_on(link)
    await leader.check_once()
    leader._lease._until = 0.0
    await trio.sleep(0.1)
    assert not leader.leads
    leader.on_lease_granted(until=float("inf"))
    await leader.check_once()
    assert list(leader.sweeper._todo) == ["W1"]


# The leader's lease, as one peer holds it.


def test_it_is_held_until_it_expires() -> None:
    lease = Lease()
    assert not lease.held
    assert lease.take(boottime() + 100)
    assert lease.held
    assert not lease.take(boottime() + 200), "it was held before"
    assert lease.take(boottime() - 1) is False
    assert not lease.held
    assert lease.take(boottime() + 100), "it is taken anew"


def test_a_peer_that_gave_it_up_does_not_ask_for_it_for_a_while() -> None:
    lease = Lease()
    lease.take(boottime() + 100)
    lease.give_up(100)
    assert (lease.held, lease.may_request) == (False, False)
    lease.give_up(0)
    assert lease.may_request


# What the leader concludes from its looks, and a peer from the leases that it sees. No server is needed for it.


KEEPALIVE = 3.0
T = 1000.0
"""When all has been quiet for long."""


@pytest.fixture
def looks() -> FailureDetector:
    """A leader that has looked before."""
    looks = FailureDetector(KEEPALIVE)
    looks.find_dead(seen(), T - 0.5, 0.0)
    return looks


def seen(run_id: str = "run", **beats: bytes | None) -> WorkerHeartbeats:
    return WorkerHeartbeats(run_id, dict(beats), [])


# Missing


def test_one_look_proves_nothing_and_two_that_are_too_close_neither(looks: FailureDetector) -> None:
    assert looks.find_dead(seen(A=None), T, 0.0) == []
    assert looks.find_dead(seen(A=None), T + MISSING_FOR - 0.01, 0.0) == []


def test_a_worker_that_is_missing_at_two_looks_so_far_apart_is_dead(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None, B=b"RUN 1"), T, 0.0)
    looks.find_dead(seen(A=None, B=b"RUN 2"), T + 0.5, 0.0)
    assert looks.find_dead(seen(A=None, B=b"RUN 3"), T + MISSING_FOR, 0.0) == [("A", None)]


def test_a_worker_that_was_there_in_between_must_be_missing_twice_anew(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None), T, 0.0)
    looks.find_dead(seen(A=b"RUN 7"), T + 0.5, 0.0)
    assert looks.find_dead(seen(A=None), T + MISSING_FOR, 0.0) == []
    assert looks.find_dead(seen(A=None), T + 2 * MISSING_FOR, 0.0) == [("A", None)]


def test_a_look_that_lies_back_further_than_a_lapse_of_the_lease_does_not_count(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None), T, 0.0)
    assert looks.find_dead(seen(A=None), T + MAX_CHECK_GAP + 0.1, 0.0) == []


def test_a_look_before_a_short_lapse_of_the_lease_counts(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None), T, 0.0)
    assert looks.find_dead(seen(A=None), T + MAX_CHECK_GAP - 0.1, 0.0) == [("A", None)]


def test_the_next_look_comes_when_somebody_can_be_proven_dead(looks: FailureDetector) -> None:
    assert looks.next_check_in(T) == CHECK_EVERY
    looks.find_dead(seen(A=None), T, 0.0)
    assert looks.next_check_in(T + 0.1) == CHECK_EVERY
    assert looks.next_check_in(T + 1.0) == pytest.approx(MISSING_FOR - 1.0)


def test_a_leader_that_is_the_only_worker_looks_less_often(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=b"RUN 1"), T, 0.0)
    assert looks.next_check_in(T) == min(ALONE_EVERY, looks.keepalive * 5 / 6)
    looks.find_dead(seen(A=b"RUN 2", B=b"RUN 1"), T + 2, 0.0)
    assert looks.next_check_in(T + 2) == CHECK_EVERY, "there is one that may die"
    looks.find_dead(seen(A=None), T + 4, 0.0)
    assert looks.next_check_in(T + 4) == CHECK_EVERY, "it is missing"
    looks.find_dead(replace(seen(A=b"RUN 4"), dying=["B"]), T + 5, 0.0)
    assert looks.next_check_in(T + 5) == CHECK_EVERY, "another leader did not finish a recovery"


def test_a_lonely_leader_looks_again_before_the_first_heartbeat_of_a_new_worker_can_expire() -> None:
    for keepalive in (1.5, 3.0, 60.0):
        looks = FailureDetector(keepalive)
        looks.find_dead(seen(A=b"RUN 1"), T, 0.0)
        assert CHECK_EVERY <= looks.next_check_in(T) < keepalive


# Calm


def test_nobody_is_declared_dead_within_a_keepalive_of_our_own_reconnect(looks: FailureDetector) -> None:
    for tenths in range(0, 30, 5):
        assert looks.find_dead(seen(A=None), T + tenths / 10, T) == []
        assert looks.inconclusive
    assert looks.find_dead(seen(A=None), T + KEEPALIVE, T) == [("A", None)]
    assert not looks.inconclusive


def test_nobody_is_declared_dead_within_a_keepalive_of_a_change_of_the_server(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None), T, 0.0)
    for tenths in range(5, 35, 5):
        assert looks.find_dead(seen("another", A=None), T + tenths / 10, 0.0) == []
        assert looks.inconclusive
    assert looks.find_dead(seen("another", A=None), T + 0.5 + KEEPALIVE, 0.0) == [("A", None)]


def test_the_first_server_that_is_seen_is_no_change() -> None:
    looks = FailureDetector(KEEPALIVE)
    looks.find_dead(seen(A=None), T, 0.0)
    assert looks.find_dead(seen(A=None), T + MISSING_FOR, 0.0) == [("A", None)]


# Standing still


def test_a_beat_that_stands_still_for_nine_keepalives_is_that_of_a_dead_worker(looks: FailureDetector) -> None:
    long = STALE_KEEPALIVES * KEEPALIVE
    looks.find_dead(seen(A=b"RUN 5", B=b"RUN 5"), T, 0.0)
    assert looks.find_dead(seen(A=b"RUN 5", B=b"RUN 6"), T + long - 0.1, 0.0) == []
    assert looks.find_dead(seen(A=b"RUN 5", B=b"RUN 7"), T + long, 0.0) == [("A", b"RUN 5")]


def test_a_worker_that_asked_never_to_count_as_dead_may_stand_still(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=b"STAY"), T, 0.0)
    assert looks.find_dead(seen(A=b"STAY"), T + 1000 * KEEPALIVE, 0.0) == []


def test_nobody_is_dead_for_standing_still_right_after_a_reconnect(looks: FailureDetector) -> None:
    late = T + STALE_KEEPALIVES * KEEPALIVE
    looks.find_dead(seen(A=b"RUN 5"), T, 0.0)
    assert looks.find_dead(seen(A=b"RUN 5"), late, late - 1) == []
    assert looks.find_dead(seen(A=b"RUN 5"), late + KEEPALIVE, late - 1) == [("A", b"RUN 5")]


def test_what_a_lease_told_of_its_holders_beat_counts(looks: FailureDetector) -> None:
    looks.remember_lease("my app:1 5", T - 20)
    looks.remember_lease("", T - 20)
    look = WorkerHeartbeats("run", {"my app:1": b"RUN 5", "other": b"RUN 5"}, [])
    assert looks.find_dead(look, T, 0.0) == []
    assert looks.find_dead(look, T + 10, 0.0) == [("my app:1", b"RUN 5")]


def test_what_a_lease_told_is_no_more_than_what_was_seen(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=b"RUN 6"), T, 0.0)
    looks.remember_lease("A 5", T - 100)
    assert looks.find_dead(seen(A=b"RUN 6"), T + 10, 0.0) == []


# Forgetting


def test_who_is_not_registered_any_more_is_forgotten(looks: FailureDetector) -> None:
    looks.find_dead(seen(A=None, B=b"RUN 1"), T, 0.0)
    looks.find_dead(seen(), T + 0.5, 0.0)
    assert (looks.missing, looks.beats) == ({}, {})


# The lease


def test_a_lease_that_several_beats_saw_unchanged_for_seconds_stands_still() -> None:
    watch = LeaseWatch()
    for second in range(6):
        watch.observe("A 7", T + second)
    assert watch.stale(T + STALE_AFTER - 0.1) == ""
    assert watch.stale(T + STALE_AFTER) == "A 7"


def test_a_lease_that_is_renewed_or_gone_does_not() -> None:
    watch = LeaseWatch()
    for second in range(20):
        watch.observe(f"A {second}", T + second)
        assert watch.stale(T + second) == ""
    for second in range(20, 40):
        watch.observe("", T + second)
        assert watch.stale(T + second) == ""


def test_a_peer_that_slept_has_not_seen_a_lease_stand_still() -> None:
    watch = LeaseWatch()
    watch.observe("A 7", T)
    for beats in range(1, STALE_BEATS):
        assert watch.stale(T + 100) == "", beats
        watch.observe("A 7", T + 100)
    assert watch.stale(T + 100) == "A 7"
