"""`file_tasks`: claims of tasks that are in no lane go to the back of their lanes."""

from __future__ import annotations

import pytest
import redis

from tests.ops.driver import (
    ALL_BYTES,
    PAST,
    Desk,
    Expires,
    claim,
    digest,
    fields_of,
    grown,
    payloads,
    policy,
    reference,
)
from tests.ops.lanes import rows_of, wrong
from tests.ops.test_lanes import declare, fill, finish, ids
from worqr import ops
from worqr.keys import MARKER, LaneKeys


def file(desk: Desk, worker: str, lanes: dict[int, str]) -> dict[int, str]:
    """The claims that were not filed, with the reason; what is stored about lanes is consistent afterwards."""
    refused = desk.call(ops.file_tasks(desk.q, worker, lanes))
    assert wrong(desk) == []
    return refused


def test_a_raw_task_becomes_a_job_at_the_back_of_its_lane(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    fill(desk, "gold", "first")
    before = desk.now()
    assert desk.send(ops.file_tasks(desk.q, "A", {held: "gold"})) == [b"ok"]
    state = desk.state(":job:first", ":lanes")
    assert before <= int(state[f":job:@{held}"].pop("run_at")) <= desk.now()
    number = str(held)
    assert state == {
        ":lane:0:gold": [reference(f"@{held}"), reference("first")],
        f":job:@{held}": {
            "task": "a",
            "twin": digest("a"),
            "state": "waiting",
            "lane": "gold",
            "first": number,
            "last": number,
            "queued": number,
        },
        f":twins:{digest('a')}": {f"@{held}"},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(2)), "enqueued": "2", "claimed": "1", "stopped": "1"}),
    }
    assert (wrong(desk), rows_of(desk)["gold"].waiting) == ([], 2)


def test_it_runs_later_as_a_job_of_that_lane_for_the_first_time(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    file(desk, "A", {held: "gold"})
    [entry] = desk.start("A", 1).entries
    facts = fields_of(entry)
    assert (facts["id"], facts["lane"], facts["task"]) == (f"@{held}", "gold", b"a")
    assert facts.keys().isdisjoint({"failures", "stalls", "timeouts", "suspect"})
    assert (wrong(desk), rows_of(desk)["gold"].running) == ([], 1)


@pytest.mark.parametrize("task", [b"", b"\xff\x00\r\n", MARKER + b"@1", ALL_BYTES])
def test_any_payload_survives_it(desk: Desk, task: bytes) -> None:
    task = grown(task)
    [held] = desk.hold("A", task)
    file(desk, "A", {held: "gold"})
    assert payloads(desk.start("A", 1).entries) == [task]


def test_several_keep_their_order_and_each_goes_to_its_own_lane(desk: Desk) -> None:
    one, two, three, four = desk.hold("A", b"1", b"2", b"3", b"4")
    assert file(desk, "A", {one: "gold", two: "silver", three: "gold", four: "gold"}) == {}
    client, keys = desk.client, LaneKeys(desk.q)
    assert client.lrange(keys.tasks("gold"), 0, -1) == [reference(f"@{each}") for each in (four, three, one)]
    assert client.lrange(keys.tasks("silver"), 0, -1) == [reference(f"@{two}")]
    assert desk.counts() == {"enqueued": 4, "claimed": 4, "stopped": 4}


@pytest.mark.parametrize("strict", [False, True])
def test_in_a_strict_lane_too_it_goes_to_the_back(desk: Desk, strict: bool) -> None:
    [held] = desk.hold("A", b"a")
    declare(desk, strict=strict)
    fill(desk, "gold", "g1", "g2")
    file(desk, "A", {held: "gold"})
    order: list[str] = []
    for _ in range(3):
        started = desk.start("A", 1)
        order += ids(started)
        finish(desk, "A", started.first)
    assert order == ["g1", "g2", f"@{held}"]


# Limits


def test_the_limit_of_the_lane_holds_for_it(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "gold", "g1")
    [runs] = desk.take("A", 1)
    desk.put(b"a", b"b")
    one, two = desk.take("A", 2)
    file(desk, "A", {one: "gold", two: "gold"})
    assert desk.start("A", 9).entries == []
    for held in (one, two):
        finish(desk, "A", runs)
        started = desk.start("A", 9)
        assert ids(started) == [f"@{held}"]
        runs = started.first
    finish(desk, "A", runs)
    assert wrong(desk) == []


def test_it_gives_its_place_under_the_limit_of_the_queue_back(desk: Desk) -> None:
    declare(desk)
    desk.call(ops.set_limits(desk.q, "1"))
    desk.put(b"a", b"b")
    [held] = desk.take("A", 1)
    assert desk.start("A", 1).status == "limited"
    with desk.listening(desk.q.wake_channel("A")) as heard:
        file(desk, "A", {held: "gold"})
    assert heard == [(":wake:A", b"1")]
    assert desk.client.smembers(desk.q.limited) == set()
    assert len(desk.start("A", 1).entries) == 1


@pytest.mark.parametrize("full", [False, True])
def test_wakes_a_worker_if_the_lane_may_start_it(desk: Desk, full: bool) -> None:
    declare(desk, limit="1")
    if full:
        fill(desk, "gold", "g1")
        desk.take("A", 1)
    [held] = desk.hold("A", b"a")
    declare(desk, limit="1")
    desk.client.delete(desk.q.hungry)
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        file(desk, "A", {held: "gold"})
    assert heard == ([] if full else [(":wake:B", b"1")])


# Which tasks


def test_a_job_that_was_a_raw_task_keeps_its_counters(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("B")
    [again] = desk.take("B", 1)
    assert file(desk, "B", {again: "gold"}) == {}
    facts = fields_of(desk.start("B", 1).entries[0])
    assert (facts["id"], facts["lane"], facts["stalls"]) == (f"@{held}", "gold", "1")
    assert desk.client.smembers(desk.q.twins(digest("a"))) == {f"@{held}".encode()}


def test_a_suspect_goes_to_the_front_and_stays_one(desk: Desk) -> None:
    declare(desk)
    desk.stall(b"deadly")
    declare(desk)
    [held] = desk.take("A", 1)
    fill(desk, "gold", "g1")
    file(desk, "A", {held: "gold"})
    facts = fields_of(desk.start("A", 1).entries[0])
    assert (facts["stalls"], facts["suspect"], facts["lane"]) == ("2", "1", "gold")
    assert wrong(desk) == []


def test_a_job_that_was_dispatched_goes_back_to_the_front_as_it_was(desk: Desk) -> None:
    for name, lane in (("plain", None), ("laned", "silver")):
        held = desk.run("A", name, **({} if lane is None else {"lane": lane}))
        assert file(desk, "A", {held: "gold"}) == {}
        assert desk.client.hget(desk.q.job(name), "lane") == (None if lane is None else lane.encode())
        finish(desk, "A", *desk.take("A", 1))


def test_a_blocked_job_of_its_id_is_not_overwritten(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    [again] = desk.take("A", 1)
    desk.client.hset(desk.q.job(f"@{held}"), mapping={"task": "new", "state": "blocked", "run_at": PAST})
    desk.client.hset(desk.q.job(f"@{held}"), mapping={"update_low": 0, "update_high": 0, "last": 1})
    desk.client.sadd(desk.q.blocked, f"@{held}")
    assert file(desk, "A", {again: "gold"}) == {}
    assert desk.waiting() == [b"a"]
    assert desk.client.hget(desk.q.job(f"@{held}"), "lane") is None


# Fences


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    call = ops.file_tasks(desk.q, "A", {held: "gold"})
    desk.send(call)
    with desk.nothing_changes():
        assert desk.call(call) == {held: "mine"}


def test_a_copy_that_comes_after_the_next_start_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    file(desk, "A", {held: "gold"})
    desk.take("A", 1)
    with desk.nothing_changes():
        assert desk.call(ops.file_tasks(desk.q, "A", {held: "silver"})) == {held: "mine"}


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.call(ops.file_tasks(desk.q, "B", {held: "gold"})) == {held: "mine"}
        assert desk.call(ops.file_tasks(desk.q, "stranger", {held: "gold"})) == {held: "lost"}


def test_a_former_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("B")
    desk.take("B", 1)
    with desk.nothing_changes():
        assert desk.call(ops.file_tasks(desk.q, "A", {held: "gold"})) == {held: "lost"}


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.file_tasks(desk.q, "A", {claim(1): "gold"})) == {claim(1): "lost"}
    assert desk.state() == {}


@pytest.mark.parametrize("lane", ["", "x" * 201, "a\nb"])
def test_what_is_no_lane_is_refused_before_anything_is_written(desk: Desk, lane: str) -> None:
    one, two = desk.hold("A", b"a", b"b")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="a lane has a name of 1 to 200 bytes"):
        desk.call(ops.file_tasks(desk.q, "A", {one: "gold", two: lane}))


# Instead


def test_a_mark_that_stands_ends_it_as_cancelled(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.call(ops.cancel_task(desk.q, b"a"))
    with desk.listening(desk.q.cancelled_channel) as heard:
        assert file(desk, "A", {one: "gold", two: "gold"}) == {one: "cancelled"}
    assert heard == [("_cancelled", str(one).encode())]
    assert rows_of(desk)["gold"].waiting == 1


def test_what_was_claimed_before_the_queue_was_deleted_is_dropped(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.delete_queue(desk.q))
    assert file(desk, "A", {held: "gold"}) == {held: "dropped"}
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_with_nothing_under_it_is_gone(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.client.delete(desk.q.claim(held))
    assert file(desk, "A", {held: "gold"}) == {held: "gone"}
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


# Afterwards


def test_it_is_cancelled_by_its_payload_as_any_raw_task(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    file(desk, "A", {held: "gold"})
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert (wrong(desk), desk.waiting(), desk.start("A", 1).entries) == ([], [], [])
    assert set(desk.state(":hungry")) == {":workers", ":policy:A", ":counts"}


def test_it_is_deleted_with_the_queue(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    file(desk, "A", {held: "gold"})
    desk.call(ops.delete_queue(desk.q))
    assert desk.start("A", 1).entries == []


def test_it_counts_and_tells_as_a_stop(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    with desk.listening(desk.q.events_channel) as heard:
        file(desk, "A", {held: "gold"})
    assert heard == [(":events", b"stopped 1")]
