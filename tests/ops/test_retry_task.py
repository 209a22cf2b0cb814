from __future__ import annotations

import pytest

from tests.ops.driver import Desk, Expires, aside, claim, digest, fields_of, payloads, policy, reference, remembered
from worqr import ops
from worqr.keys import MARKER


def test_sends_a_raw_task_to_the_back_as_a_job_that_counts_its_failure(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a", b"b", b"c")
    [held] = desk.take("A", 1)
    assert desk.retry("A", held) == "given"
    job = f"@{held}"
    assert desk.state() == {
        "waiting": [reference(job), b"c", b"b"],
        f":job:{job}": remembered("a", held, failures=1),
        f":twins:{digest('a')}": {job},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(1)), "enqueued": "3", "claimed": "1", "retried": "1"}),
    }
    assert desk.waiting() == [b"b", b"c", b"a"]


def test_the_job_keeps_its_id_and_counts_on(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    for failures in range(1, 4):
        assert desk.retry("A", held[0]) == "given"
        started = desk.start("A", 1)
        facts = fields_of(started.entries[0])
        assert (facts["id"], facts["failures"]) == (f"@{claim(1)}", str(failures))
        assert facts.keys().isdisjoint({"stalls", "timeouts"})
        held = [started.first]


@pytest.mark.parametrize("task", [b"", b"\xff\x00\r\n", MARKER, MARKER + b"@1", bytes(range(256)) * 65536])
def test_any_payload_survives_it(desk: Desk, task: bytes) -> None:
    [held] = desk.hold("A", task)
    desk.retry("A", held)
    assert payloads(desk.start("A", 1).entries) == [task]


def test_uncounted_it_stays_raw_and_costs_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.put(b"b")
    assert desk.retry("A", held, counter="", limit=1) == "given"
    assert desk.state()["waiting"] == [b"a", b"b"]


def test_uncounted_a_job_keeps_its_count(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    desk.retry("A", desk.take("A", 1)[0], counter="")
    assert fields_of(desk.start("A", 1).entries[0])["failures"] == "1"


def test_the_last_failure_is_final(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    for _ in range(9):
        assert desk.retry("A", held) == "given"
        [held] = desk.take("A", 1)
    assert desk.retry("A", held) == "aside"
    kept = {"twin": digest("a"), "first": claim(1), "last": claim(1), "started": 1}
    assert desk.state() == {
        ":failed": [str(held)],
        f":aside:{held}": aside("a", f"@{claim(1)}", reason="failed", failures=10, **kept),
        ":aside": {f"@{claim(1)}": str(held)},
        ":workers": {"A": f"10 {claim(10)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(10)), "enqueued": "1", "claimed": "10", "retried": "9", "failed": "1"}),
    }


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    with desk.nothing_changes():
        assert desk.retry("A", held) == "mine"


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.retry("B", held) == "mine"
        assert desk.retry("stranger", held) == "lost"


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("B")
    desk.take("B", 1)
    with desk.nothing_changes():
        assert desk.retry("A", held) == "lost"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.retry("A", claim(1)) == "lost"
    assert desk.state() == {}


@pytest.mark.parametrize("limit", [10, 1])
def test_a_mark_that_stands_ends_it_as_cancelled(desk: Desk, limit: int) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.retry("A", held, limit=limit) == "cancelled"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}
    assert desk.counts() == {"enqueued": 1, "claimed": 1, "cancelled": 1}


def test_what_was_claimed_before_the_queue_was_deleted_is_dropped(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.delete_queue(desk.q))
    assert desk.retry("A", held) == "dropped"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_with_nothing_under_it_is_gone(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.client.delete(desk.q.claim(held))
    assert desk.retry("A", held) == "gone"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_wakes_one_for_the_task_and_one_for_a_suspect(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    workers = ["X", "Y", "Z"]
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.retry("A", held)
    assert len(heard) == 1
    desk.client.delete(desk.q.hungry)
    [held] = desk.take("A", 1)
    desk.stall(b"suspect")
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.retry("A", held)
    assert len(heard) == 2
