"""What the leader concludes from its looks, and a peer from the leases that it sees. No server is needed for it."""

from __future__ import annotations

import pytest

from worqr.ops import WorkerHeartbeats
from worqr.peer.leader.chore import STALE_AFTER, STALE_BEATS, LeaseWatch
from worqr.peer.leader.leader import CHECK_EVERY, MAX_CHECK_GAP, MISSING_FOR, STALE_KEEPALIVES, FailureDetector

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
