"""Who has which slot: what nodes say of it, what their redirects add, and what is kept of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worqr.errors import Unavailable, WorqrError
from worqr.link import LinkSettings
from worqr.link.cluster import ClusterSubscriptions, NodeEndpoint, ShardEndpoint, Topology, TopologyView, owners_of
from worqr.link.connector import EndpointWatcher
from worqr.link.failures import as_error_reply
from worqr.link.log_thread import LogThread
from worqr.link.settings import Endpoint

A, B, C = Endpoint("a", 1), Endpoint("b", 2), Endpoint("c", 3)
LAST = 16383


def view(*shares: tuple[int, int, Endpoint | None]) -> TopologyView:
    owners: list[Endpoint | None] = [None] * (LAST + 1)
    for first, last, owner in shares:
        owners[first : last + 1] = [owner] * (last - first + 1)
    return TopologyView(owners)


class Told:
    """Counts what a topology tells."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    def meanwhile(self) -> None: ...

    def looked(self, error: WorqrError | None) -> None: ...


def topology(*shares: tuple[int, int, Endpoint | None]) -> tuple[Topology, Told]:
    """One that knows this."""
    told = Told()
    made = Topology(LinkSettings("redis+cluster://a:1"), LogThread(), cast("Any", told), lambda run: run())
    if shares:
        made._take(view(*shares))
    told.changes = 0
    return made, told


def test_what_nodes_say_is_read_slot_by_slot() -> None:
    owners = owners_of([[0, 1, [b"a", 1, b"id", []], [b"replica", 9, b"id"]], [3, 3, [b"::1", 2]]], "asked")
    assert owners[:5] == [A, A, None, Endpoint("::1", 2), None]
    assert len(owners) == LAST + 1


@pytest.mark.parametrize("host", [b"", b"?", None])
def test_a_node_that_does_not_know_its_host_is_where_it_was_asked(host: Any) -> None:
    assert owners_of([[0, 0, [host, 7]]], "asked")[0] == Endpoint("asked", 7)


def test_known_nodes_are_the_same_objects_again() -> None:
    [owner, *_] = owners_of([[0, LAST, [b"a", 1]]], "asked", before=[A])
    assert owner is A


def test_a_view_knows_who_has_anything() -> None:
    assert view((0, 0, A), (5, 9, B)).primaries == {A, B}
    assert TopologyView([None, Endpoint("a", 1), Endpoint("a", 1)]).primaries == {A}


def test_a_slot_that_nobody_has_keeps_the_owner_it_had() -> None:
    known, told = topology((0, 9, A), (10, LAST, B))
    known._take(view((10, LAST, B)))
    assert known.owner(0) == A
    assert told.changes == 0


def test_a_cluster_without_any_slots_is_not_there() -> None:
    known, told = topology()
    with pytest.raises(Unavailable, match="no node of the cluster has any slot"):
        known._take(view())
    assert told.changes == 0


def test_a_view_says_nothing_new_twice() -> None:
    known, told = topology((0, 9, A), (10, LAST, B))
    known._take(view((0, 9, A), (10, LAST, B)))
    assert told.changes == 0
    known._take(view((0, 9, A), (10, LAST, C)))
    assert told.changes == 1
    assert known.view.primaries == {A, C}


def test_redirects_are_learnt_together() -> None:
    known, told = topology((0, LAST, A))
    known.learn(["1 b:2", "2 b:2", "3 c:3"], A)
    assert [known.owner(slot) for slot in range(5)] == [A, B, B, C, A]
    assert known.view.primaries == {A, B, C}
    assert told.changes == 1
    known.learn(["1 b:2"], A)
    assert told.changes == 1


def test_a_node_whose_last_slot_is_redirected_is_no_primary_any_more() -> None:
    known, told = topology((0, 0, A), (1, LAST, B))
    known.learn(["0 b:2"], A)
    assert known.view.primaries == {B}
    assert told.changes == 1


@pytest.mark.parametrize(
    ("redirect", "owner"),
    [
        ("0 b:2", B),
        ("0 ::1:2", Endpoint("::1", 2)),
        ("0 [::1]:2", Endpoint("::1", 2)),
        ("0 :2", Endpoint("a", 2)),
        ("0 ?:2", Endpoint("a", 2)),
        ("0", A),
        ("0 b", A),
        ("0 b:", A),
        ("x b:2", A),
        ("16384 b:2", A),
        ("", A),
    ],
)
def test_a_redirect_is_read_or_left(redirect: str, owner: Endpoint) -> None:
    known, _ = topology((0, LAST, A))
    known.learn([redirect], A)
    assert known.owner(0) == owner


def test_the_way_to_a_slot_is_the_way_to_its_owner() -> None:
    known, _ = topology()
    resolver = ShardEndpoint(known, 5, "redis+cluster://a:1")
    with pytest.raises(Unavailable, match="no node of the cluster is known to have slot 5"):
        resolver.resolve()
    known.why = "nobody answers"
    with pytest.raises(Unavailable, match="nobody answers"):
        resolver.resolve()
    assert resolver.is_current(A)  # nobody knows better
    known._take(view((0, LAST, A)))
    assert resolver.resolve() == A
    assert (resolver.is_current(A), resolver.is_current(B)) == (True, False)


def test_whoever_doubts_has_the_nodes_asked() -> None:
    known, _ = topology((0, LAST, A))
    doubters = (
        NodeEndpoint(known, A).invalidate,
        ShardEndpoint(known, 5, "").invalidate,
        lambda: known.learn(["0 b:2"], A),
        lambda: known.learn(["what?"], A),
    )
    for invalidate in doubters:
        known.watcher.woken.clear()
        invalidate()
        assert known.watcher.woken.is_set()


def test_a_view_never_changes_under_the_hands_of_whoever_reads_it() -> None:
    """Nobody ever sees an owner that is no primary, nor a primary that owns nothing."""
    known, _ = topology((0, LAST, A))
    ended, wrong = threading.Event(), list[TopologyView]()

    def look() -> None:
        while not ended.is_set():
            seen = known.view
            if seen.primaries != {seen.owners[0], seen.owners[1]}:
                wrong.append(seen)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(200):
        known.learn(["0 b:2"], A)
        known.learn(["0 c:3"], A)
        known._take(view((0, LAST, A)))
    ended.set()
    thread.join()
    assert wrong == []


def test_a_node_that_has_no_slots_does_not_work_whatever_it_tells() -> None:
    """It was reset: if the user may not ask for its state, the others are to be asked."""
    known, _ = topology((0, LAST, A))
    replies = [[], as_error_reply(Exception("NOPERM this user has no permissions to run 'cluster|info'"))]
    known._asking.wire = cast("Any", SimpleNamespace(exchange=lambda _: replies))
    assert not known._view_of(None).works
    replies[0] = [[0, LAST, [b"a", 1]]]
    assert known._view_of(None).works


def test_the_thread_ends_at_once_if_it_is_ended_while_it_looks() -> None:
    def look() -> tuple[float, float]:
        watcher.ended.set()
        return 0.0, 600.0

    watcher = EndpointWatcher("test-watcher", look, lambda: ())
    watcher.start()
    watcher._thread.join(60)
    assert not watcher._thread.is_alive()


def test_a_subscription_that_is_closed_while_others_follow_their_slots_is_left_out() -> None:
    known, _ = topology((0, LAST, A))
    router: Any = SimpleNamespace(topology=known, home=0, when_looked=lambda _: None)
    driver: Any = SimpleNamespace(submits=lambda submit: submit)
    subscriptions = ClusterSubscriptions(LinkSettings("redis+cluster://a:1"), driver, LogThread(), router, "r")
    first, second = object(), object()
    subscriptions._open = cast("Any", {first: 1, second: 2})
    placed: list[object] = []

    def place(subscription: object, _: TopologyView) -> None:
        placed.append(subscription)
        subscriptions._open.pop(cast("Any", second), None)

    cast("Any", subscriptions)._place = place
    subscriptions._follow()
    assert placed == [first]
