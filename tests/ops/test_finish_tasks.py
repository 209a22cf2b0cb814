from __future__ import annotations

from tests.ops.driver import FENCE, Desk, Expires, claim
from worqr import ops


def test_ends_claims_and_leaves_nothing_of_them(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"a")
    before = desk.state()
    assert desk.send(ops.finish_tasks(desk.q, "A", [three, one])) == [b"ok"]
    for gone in (f":claim:{one}", f":claim:{three}"):
        del before[gone]
    before[":claims:A"] = {str(two)}
    before[":counts"] = Expires({**before[":counts"].value, "finished": "2"})
    assert desk.state() == before


def test_the_last_one_leaves_the_queue_as_if_new(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.call(ops.finish_tasks(desk.q, "A", held))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    call = ops.finish_tasks(desk.q, "A", [held])
    desk.send(call)
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok", str(held).encode(), b"mine"]


def test_each_claim_gets_its_own_answer(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.cancel_task(desk.q, b"b"))
    desk.call(ops.finish_tasks(desk.q, "A", [three]))
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two, three])) == {two: "cancelled", three: "mine"}
    assert desk.counts()["finished"] == 2
    assert desk.counts()["cancelled"] == 1


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "B", [held])) == {held: "mine"}
        assert desk.call(ops.finish_tasks(desk.q, "stranger", [held])) == {held: "lost"}


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.hold("B")
    desk.start("B", 1)
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "lost"}


def test_in_the_middle_of_its_sweep_what_is_given_back_is_lost_and_the_rest_counts(desk: Desk) -> None:
    older, newer = desk.hold("A", b"a", b"b")
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.call(ops.finish_tasks(desk.q, "A", [older, newer])) == {newer: "lost"}
    assert not desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.waiting() == [b"b"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.finish_tasks(desk.q, "A", [claim(1)])) == {claim(1): "lost"}
    assert desk.state() == {}


def test_a_finished_job_leaves_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    again = desk.take("A", 1)
    assert any(name.startswith(":twins:") for name in desk.state())
    desk.call(ops.finish_tasks(desk.q, "A", again))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_mark_that_stands_ends_it_as_cancelled_and_is_acknowledged(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    with desk.listening(desk.q.cancelled_channel) as heard:
        assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    assert heard == [("_cancelled", str(held).encode())]
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}
    assert desk.counts() == {"enqueued": 1, "claimed": 1, "cancelled": 1}


def test_tells_a_hungry_worker_of_a_suspect(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.stall(b"suspect")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", held))
    assert heard == [(":wake:B", b"1")]


def test_wakes_nobody_where_no_suspect_waits(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.put(b"b")
    desk.client.sadd(desk.q.hungry, "B")
    desk.call(ops.finish_tasks(desk.q, "A", held))
    assert desk.state()[":hungry"] == {"B"}


def test_a_claim_with_nothing_under_it_leaves_no_mark(desk: Desk) -> None:
    one, two = desk.hold("A", b"x", b"y")
    desk.call(ops.cancel_task(desk.q, b"x"))
    desk.client.delete(desk.q.claim(one), desk.q.claim(two))  # data that somebody deleted
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two])) == {one: "cancelled", two: "mine"}
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_named_twice_is_ended_once(desk: Desk) -> None:
    one, two = desk.hold("A", b"x", b"y")
    desk.call(ops.cancel_task(desk.q, b"y"))
    call = ops.finish_tasks(desk.q, "A", [one, one, two, two])
    assert [text.decode() for text in desk.send(call)[1:]] == [
        *(str(one), "mine"),
        *(str(two), "cancelled"),
        *(str(two), "mine"),
    ]
    assert desk.counts()["finished"] == 1
    assert desk.counts()["cancelled"] == 1


def test_more_than_a_thousand_at_once(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 1500)
    assert desk.call(ops.finish_tasks(desk.q, "A", held)) == {}
    assert desk.state()[":counts"].value["finished"] == "1500"
    assert desk.state()[":counts"].value["fence"] == str(FENCE + 1500)
