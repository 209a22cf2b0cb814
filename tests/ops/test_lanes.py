"""Lanes: the scripts that put jobs into lanes, claim them by turns and end them.

`tests/model/lanes.py` searches the wake-ups; here is what is stored and replied. After each step of the random stories, all keys
of the lanes agree with each other (`tests.ops.lanes.wrong`).
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
import redis

from tests.ops.driver import BOOM, Desk, claim, fields_of, job
from tests.ops.lanes import rows_of, wrong
from worqr import ops
from worqr.keys import LaneKeys

MINUTE = 60_000


def declare(desk: Desk, worker: str = "A", **rules: Any) -> bool:
    packed = msgspec.msgpack.encode(rules) if rules else b""
    changed = desk.call(ops.start_work(desk.q, worker, max_stalls=3, keep_failed=10, last=0, lanes=packed))
    assert changed in {"", "lanes"}
    return changed == "lanes"


def fill(desk: Desk, lane: str, *names: str, **options: Any) -> None:
    for name in names:
        assert desk.dispatch(name, lane=lane, **options).outcome == "created"


def ids(started: ops.StartReply) -> list[str]:
    """The ids of started jobs; raw tasks by their payload."""
    return [
        str(fields_of(entry)["id"]) if isinstance(entry, list) else bytes(entry).decode() for entry in started.entries
    ]


def finish(desk: Desk, worker: str, *claims: int) -> None:
    assert desk.call(ops.finish_tasks(desk.q, worker, claims)) == {}


def keys_of(desk: Desk) -> set[str]:
    return {name for name in desk.state() if name.startswith((":lane", ":starts"))}


# Turns


def test_lanes_take_turns(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1", "a2", "a3")
    fill(desk, "b", "b1", "b2")
    desk.put(b"raw1", b"raw2")
    order = [ids(desk.start("A", 1))[0] for _ in range(7)]
    assert [each[0] for each in order[:3]] != ["a", "a", "a"]
    assert sorted(order[:3]) == ["a1", "b1", "raw1"]
    assert sorted(order[3:6]) == ["a2", "b2", "raw2"]
    assert (order[6], wrong(desk)) == ("a3", [])
    finish(desk, "A", *range(claim(1), claim(1) + 0))
    started = desk.start("A", 1)
    assert (started.status, started.entries) == ("short", [])


def test_a_request_for_many_takes_a_part_of_each(desk: Desk) -> None:
    declare(desk)
    for lane in "abcd":
        fill(desk, lane, *(f"{lane}{n}" for n in range(9)))
    got = Counter(each[0] for each in ids(desk.start("A", 8)))
    assert got == dict.fromkeys("abcd", 2)
    assert wrong(desk) == []


def test_a_request_for_fewer_tasks_than_there_are_lanes_goes_on_where_the_last_one_ended(desk: Desk) -> None:
    declare(desk)
    for n in range(20):
        fill(desk, f"{n}", *(f"{n}-{m}" for m in range(4)))
    starts = Counter[str]()
    for _ in range(8):
        starts.update(each.split("-")[0] for each in ids(desk.start("A", 7)))
        assert max(starts.values()) - min(starts[f"{n}"] for n in range(20)) <= 1
        assert wrong(desk) == []
    assert starts.total() == 56


def test_a_heavy_lane_has_several_turns_in_one_request(desk: Desk) -> None:
    declare(desk, weights={"gold": 5})
    for lane in ("gold", *(f"{n}" for n in range(20))):
        fill(desk, lane, *(f"{lane}-{m}" for m in range(20)))
    starts = [Counter(each.split("-")[0] for each in ids(desk.start("A", 10))) for _ in range(10)]
    assert sum(each["gold"] for each in starts) in range(18, 24)  # 5 of 25 shares of 100
    assert wrong(desk) == []


def test_each_of_very_many_rules_holds(desk: Desk) -> None:
    """They are too many to be read at once."""
    declare(desk, weights={f"{n}": 2 for n in range(150)}, limits={"7": "1", "gold": "2"}, limit="3")
    for lane in ("7", "8", "gold", "other"):
        fill(desk, lane, *(f"{lane}-{m}" for m in range(9)))
    reply = desk.start("A", 30)
    started = ids(reply)
    assert Counter(each.split("-")[0] for each in started) == {"7": 1, "8": 3, "gold": 2, "other": 3}
    assert {lane: (row.weight, row.running) for lane, row in rows_of(desk).items()} == {
        "7": (2, 1),
        "8": (2, 3),
        "gold": (1, 2),
        "other": (1, 3),
    }
    finish(desk, "A", reply.first + started.index("7-0"))
    assert ids(desk.start("A", 30)) == ["7-1"]
    assert wrong(desk) == []


@pytest.mark.parametrize("wanted", [1, 10])
def test_weights_are_shares(desk: Desk, wanted: int) -> None:
    declare(desk, weights={"gold": 5})
    for lane in ("gold", "a", "b"):
        fill(desk, lane, *(f"{lane}{n}" for n in range(150)))
    got: Counter[str] = Counter()
    for _ in range(140 // wanted):
        got.update(each.rstrip("0123456789") for each in ids(desk.start("A", wanted)))
    assert abs(got["gold"] - 100) <= 5
    assert abs(got["a"] - got["b"]) <= wanted
    assert wrong(desk) == []


def test_a_lane_whose_tasks_come_one_by_one_gets_its_share_and_not_more(desk: Desk) -> None:
    declare(desk)
    for lane in range(10):
        fill(desk, f"busy{lane}", *(f"{lane}-{n}" for n in range(30)))
    got: Counter[str] = Counter()
    for n in range(110):
        fill(desk, "trickle", f"t{n}")
        [started] = ids(desk.start("A", 1))
        got[started[0]] += 1
    assert 8 <= got["t"] <= 12


def test_a_stream_of_new_lanes_does_not_keep_a_backlog_from_its_share(desk: Desk) -> None:
    declare(desk)
    fill(desk, "big", *(f"big{n}" for n in range(100)))
    got = 0
    for n in range(100):
        fill(desk, f"new{n}", f"n{n}")
        got += ids(desk.start("A", 1))[0].startswith("big")
    assert got >= 10
    assert desk.client.zcard(LaneKeys(desk.q).idle) <= 110


@pytest.mark.parametrize("seed", range(5))
def test_each_lane_is_near_its_fair_share_at_any_moment(desk: Desk, seed: int) -> None:
    """Random weights, and in the middle a lane that comes late: none is 2 starts away from what it should have had."""
    random = Random(seed)
    weights = {lane: random.randint(1, 9) for lane in "abcdef"}
    declare(desk, weights=weights)
    for lane in "abcde":
        fill(desk, lane, *(f"{lane}{n}" for n in range(60)))
    present, got, fair = set("abcde"), Counter[str](), Counter[str]()
    for n in range(80):
        if n == 30:
            fill(desk, "f", *(f"f{n}" for n in range(60)))
            present.add("f")
        [started] = ids(desk.start("A", 1))
        got[started[0]] += 1
        for lane in present:
            fair[lane] += weights[lane] / sum(weights[each] for each in present)  # type: ignore[assignment]
        assert {lane: got[lane] - fair[lane] for lane in present if abs(got[lane] - fair[lane]) >= 2} == {}
    assert wrong(desk) == []


@pytest.mark.parametrize(("wanted", "concurrency"), [(1, None), (1, 2), (7, None)])
def test_over_a_long_run_each_lane_gets_its_share_and_none_starves(
    desk: Desk, wanted: int, concurrency: int | None
) -> None:
    """Lanes that never run dry, and raw tasks beside them: after 1,500 starts, each is within 5 % of its share or one visit."""
    weights = {"a": 1, "b": 2, "c": 4, "d": 9, "e": 20, "raw": 1}
    total = sum(weights.values())
    declare(desk, weights={lane: weights[lane] for lane in "abcde"}, limit=str(concurrency or ""))
    got, last, longest, number = Counter[str](), Counter[str](), Counter[str](), 0
    waiting: Counter[str] = Counter()
    held: list[int] = []
    while number < 1_500:
        if min(waiting[lane] for lane in weights) <= wanted:
            for lane in (lane for lane in "abcde" if waiting[lane] <= 100):
                desk.call(ops.dispatch_jobs(desk.q, [job(None, lane.encode(), lane=lane)] * 200))
                waiting[lane] += 200
            desk.put(*[b"raw"] * 50)
            waiting["raw"] += 50
        started = desk.start("A", wanted)
        for n, entry in enumerate(started.entries):
            lane = (fields_of(entry)["task"] if isinstance(entry, list) else bytes(entry)).decode()
            number += 1
            longest[lane], last[lane] = max(longest[lane], number - last[lane]), number
            got[lane], waiting[lane] = got[lane] + 1, waiting[lane] - 1
            held.append(started.first + n)
        while len(held) > (0 if concurrency is None else 1):  # with a limit, one claim outlives the next start
            finish(desk, "A", held.pop(0))
    visit = -(-wanted // len(weights)) + 1
    for lane, weight in weights.items():
        share = number * weight / total
        assert abs(got[lane] - share) <= max(0.05 * share, visit), (lane, got, share)
        assert longest[lane] <= 2 * visit * total / weight, (lane, longest)
    assert wrong(desk) == []


def test_raw_tasks_have_the_share_of_one_lane(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", *(f"a{n}" for n in range(12)))
    fill(desk, "b", *(f"b{n}" for n in range(12)))
    desk.put(*(b"raw%d" % n for n in range(12)))
    got = Counter(each[0] for _ in range(9) for each in ids(desk.start("A", 10)))
    assert max(got.values()) - min(got.values()) <= 10


# Limits of lanes


def test_a_full_lane_is_held_and_what_is_behind_it_starts(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1", "a2", "a3")
    fill(desk, "b", "b1")
    started = desk.start("A", 9)
    assert (started.status, sorted(ids(started))) == ("short", ["a1", "b1"])
    row = rows_of(desk)["a"]
    assert (row.waiting, row.running, row.limits, row.held) == (2, 1, "1", True)
    found = desk.call(ops.inspect(desk.q))
    assert (found.waiting, found.room, found.lanes, found.held_lanes) == (2, 0, 1, 1)
    held = next(n for n in range(2) if ids(started)[n] == "a1") + started.first
    finish(desk, "A", held)
    assert wrong(desk) == []
    assert ids(desk.start("A", 9)) == ["a2"]


def test_an_end_wakes_a_worker_for_its_lane_and_a_push_into_a_full_lane_does_not(desk: Desk) -> None:
    declare(desk, limit="1")
    desk.enter("B")
    fill(desk, "a", "a1")
    held = desk.take("A", 1)
    desk.start("B", 1)
    with desk.listening(desk.q.wake_channel("B")) as heard:
        fill(desk, "a", "a2")
    assert heard == []
    with desk.listening(desk.q.wake_channel("B")) as heard:
        finish(desk, "A", *held)
    assert heard == [(":wake:B", b"1")]


@pytest.mark.parametrize("how", ["finish", "retry", "fail", "stop", "leave", "die", "cancel"])
def test_every_end_of_a_claim_frees_its_place(desk: Desk, how: str) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1", "a2")
    [held] = desk.take("A", 1)
    if how == "finish":
        finish(desk, "A", held)
    elif how == "retry":
        desk.retry("A", held)
    elif how == "fail":
        desk.fail("A", held)
    elif how == "stop":
        desk.call(ops.stop_tasks(desk.q, "A", [held]))
    elif how == "leave":
        desk.call(ops.stop_work(desk.q, "A"))
    elif how == "die":
        desk.call(ops.fail_worker(desk.q, "A"))
    else:
        desk.call(ops.cancel_job(desk.q, "a1", "why"))
        desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert wrong(desk) == []
    declare(desk, "B", limit="1")
    assert len(desk.start("B", 5).entries) == 1
    assert wrong(desk) == []


def test_a_late_copy_of_an_end_frees_nothing(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1", "a2", "a3")
    [held] = desk.take("A", 1)
    finish(desk, "A", held)
    desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.start("A", 1).entries == []
    assert wrong(desk) == []


def test_a_rate_of_a_lane_opens_it_again(desk: Desk) -> None:
    declare(desk, limit="- 2/300")
    fill(desk, "a", "a1", "a2", "a3")
    fill(desk, "b", "b1")
    with desk.listening(desk.g.due_channel) as heard:
        assert sorted(ids(desk.start("A", 9))) == ["a1", "a2", "b1"]
    [(_, told)] = heard
    assert 0 < int(told.split()[0]) <= 301
    found = desk.call(ops.inspect(desk.q))
    assert found.room == 0
    assert found.next_in_ms == found.opens_in_ms
    while not (started := desk.start("A", 9)).entries:
        assert started.status == "short"
    assert ids(started) == ["a3"]
    assert wrong(desk) == []


def test_the_limit_of_the_queue_holds_for_its_lanes_together(desk: Desk) -> None:
    declare(desk)
    desk.call(ops.set_limits(desk.q, "2"))
    for lane in "abc":
        fill(desk, lane, f"{lane}1")
    started = desk.start("A", 9)
    assert (started.status, len(started.entries)) == ("limited", 2)
    finish(desk, "A", started.first)
    assert len(desk.start("A", 9).entries) == 1
    assert wrong(desk) == []


# Suspects, strict lanes, updates


def test_a_suspect_waits_with_its_place(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1", "a2")
    for n in range(2):
        declare(desk, f"dies{n}", limit="1")
        desk.take(f"dies{n}", 1)
        desk.call(ops.fail_worker(desk.q, f"dies{n}"))
    assert desk.client.hget(desk.q.job("a1"), "suspect") == b"1"
    assert ids(desk.start("A", 9)) == ["a1"]
    assert (wrong(desk), rows_of(desk)["a"].running) == ([], 1)


def test_a_suspect_of_a_lane_waits_for_a_worker_that_runs_none(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1", "a2")
    for n in range(2):
        declare(desk, f"dies{n}")
        desk.take(f"dies{n}", 2)
        desk.call(ops.fail_worker(desk.q, f"dies{n}"))
    assert ids(desk.start("A", 9)) == ["a1"]
    assert wrong(desk) == []
    assert (desk.client.llen(desk.q.suspects), rows_of(desk)["a"].running) == (1, 2)
    desk.call(ops.cancel_job(desk.q, "a2", "why"))
    assert (wrong(desk), rows_of(desk)["a"].running) == ([], 1)


def test_in_a_strict_lane_nothing_overtakes_a_task_that_is_retried(desk: Desk) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1", "a2")
    fill(desk, "b", "b1")
    started = desk.start("A", 9)
    assert sorted(ids(started)) == ["a1", "b1"]
    held = started.first + ids(started).index("a1")
    assert desk.retry("A", held, delay_ms=300) == "given"
    assert (wrong(desk), desk.start("A", 9).entries, desk.call(ops.inspect(desk.q)).due) == ([], [], 0)
    while not (again := desk.start("A", 9)).entries:
        pass
    assert ids(again) == ["a1"]
    finish(desk, "A", again.first)
    assert ids(desk.start("A", 9)) == ["a2"]


@pytest.mark.parametrize(("limits", "hold"), [("", "1"), ("5", "1"), ("- 9/1000", "1 9/1000"), ("9/1000", "1 9/1000")])
def test_a_strict_lane_is_listed_with_the_limits_that_hold(desk: Desk, limits: str, hold: str) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1")
    desk.call(ops.set_lane(desk.q, "a", "limit", limits))
    assert rows_of(desk)["a"].limits == hold


def test_a_strict_lane_goes_on_when_the_task_in_front_is_cancelled(desk: Desk) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1", "a2")
    [held] = desk.take("A", 1)
    desk.retry("A", held, delay_ms=MINUTE)
    assert desk.start("A", 1).entries == []
    desk.call(ops.cancel_job(desk.q, "a1", "why"))
    assert (wrong(desk), ids(desk.start("A", 1))) == ([], ["a2"])


def waits_for_its_retry(desk: Desk, *others: str) -> None:
    """Job a1 waits in front of the strict lane a for a retry in a minute, before the others. Worker A waits for tasks."""
    declare(desk, strict=True)
    fill(desk, "a", "a1", *others)
    [held] = desk.take("A", 1)
    assert desk.retry("A", held, delay_ms=MINUTE) == "given"
    assert (desk.start("A", 1).status, wrong(desk)) == ("short", [])


def test_the_end_of_a_wait_in_front_of_a_strict_lane_wakes_a_worker(desk: Desk) -> None:
    waits_for_its_retry(desk, "a2")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.call(ops.cancel_job(desk.q, "a1", "why"))
    assert (heard, ids(desk.start("A", 1))) == ([(":wake:A", b"1")], ["a2"])


def test_a_retry_behind_a_cancelled_job_is_not_due_before_its_time(desk: Desk) -> None:
    waits_for_its_retry(desk)
    fill(desk, "a", "urgent", front=True)
    desk.call(ops.cancel_job(desk.q, "urgent", "why"))
    assert (desk.start("A", 1).entries, wrong(desk)) == ([], [])


def test_a_retry_behind_an_expired_job_is_not_due_before_its_time(desk: Desk) -> None:
    waits_for_its_retry(desk)
    fill(desk, "a", "urgent", front=True, expires="1")
    assert (desk.start("A", 2).entries, wrong(desk)) == ([None], [])


def test_a_retry_behind_a_job_whose_tag_was_cancelled_is_not_due_before_its_time(desk: Desk) -> None:
    waits_for_its_retry(desk)
    fill(desk, "b", "b1", tags="red")
    fill(desk, "a", "urgent", front=True, tags="red")
    reply = desk.call(ops.cancel_tagged(desk.q, "red", budget=1))
    assert reply is not None and reply.more
    assert (desk.start("A", 2).entries, wrong(desk)) == ([], [])


def test_a_suspended_job_behind_an_expired_one_keeps_its_place_in_a_strict_lane(desk: Desk) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1", "a2")
    [held] = desk.take("A", 1)
    wait = ops.Wait("paid #1", "event", "paid")
    assert desk.call(ops.suspend_task(desk.q, "A", held, [wait])).status == "suspended"
    fill(desk, "a", "urgent", front=True, expires="1")
    assert (desk.start("A", 3).entries, wrong(desk)) == ([None], [])


def test_a_job_that_was_put_off_holds_its_strict_lane_no_more(desk: Desk) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1", "a2")
    assert desk.dispatch("a1", lane="a", run_at=desk.now() + MINUTE).outcome == "updated"
    assert (wrong(desk), ids(desk.start("A", 1))) == ([], ["a2"])


def test_a_job_that_was_put_off_may_start_again_at_once(desk: Desk) -> None:
    declare(desk, strict=True)
    fill(desk, "a", "a1")
    desk.dispatch("a1", lane="a", run_at=desk.now() + MINUTE)
    assert desk.start("A", 1).entries == []
    with desk.listening(desk.q.wake_channel("A")) as heard:
        assert desk.call(ops.promote_jobs(desk.q, ["a1"])) == 1
    assert (heard, wrong(desk), ids(desk.start("A", 1))) == ([(":wake:A", b"1")], [], ["a1"])


def test_a_retry_in_front_of_a_strict_lane_may_be_brought_forward(desk: Desk) -> None:
    waits_for_its_retry(desk, "a2")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        assert desk.dispatch("a1", lane="a", when="earlier").outcome == "updated"
    assert (heard, wrong(desk), ids(desk.start("A", 1))) == ([(":wake:A", b"1")], [], ["a1"])


def test_a_retry_in_front_of_a_strict_lane_may_be_run_now(desk: Desk) -> None:
    waits_for_its_retry(desk, "a2")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        assert desk.call(ops.promote_jobs(desk.q, ["a1", "a2"])) == 1
    assert (heard, wrong(desk), ids(desk.start("A", 1))) == ([(":wake:A", b"1")], [], ["a1"])


def test_a_due_job_goes_into_its_lane(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1")
    desk.dispatch("a2", lane="a", run_at=desk.now() + 50)
    desk.take("A", 1)
    while desk.call(ops.inspect(desk.q)).due:
        desk.call(ops.promote_due(desk.q, 10))
    assert (wrong(desk), rows_of(desk)["a"].waiting) == ([], 1)


def test_an_update_keeps_the_lane(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1")
    assert desk.dispatch("a1", b"new", lane="b").outcome == "updated"
    assert ids(desk.start("A", 1)) == ["a1"]
    assert (wrong(desk), desk.client.hget(desk.q.active("a1"), "lane")) == ([], b"a")


def test_a_job_that_failed_goes_back_into_its_lane(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1")
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    assert keys_of(desk) <= {":lanes:rules"}
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert (wrong(desk), rows_of(desk)["a"].waiting) == ([], 1)


# Operators


def test_a_weight_and_a_limit_of_an_operator_come_first(desk: Desk) -> None:
    declare(desk, limit="1", weights={"a": 2}, limits={"a": "3"})
    fill(desk, "a", *(f"a{n}" for n in range(9)))
    assert (rows_of(desk)["a"].weight, rows_of(desk)["a"].limits) == (2, "3")
    assert len(desk.start("A", 9).entries) == 3
    desk.call(ops.set_lane(desk.q, "a", "limit", "5"))
    desk.call(ops.set_lane(desk.q, "a", "weight", "7"))
    assert (wrong(desk), rows_of(desk)["a"].weight, len(desk.start("A", 9).entries)) == ([], 7, 2)
    desk.call(ops.set_lane(desk.q, "a", "limit", ""))
    assert len(desk.start("A", 2).entries) == 2
    desk.call(ops.set_lane(desk.q, "a", "limit", "*"))
    desk.call(ops.set_lane(desk.q, "a", "weight", "*"))
    assert (wrong(desk), rows_of(desk)["a"].weight, desk.start("A", 9).entries) == ([], 2, [])


def test_other_declared_limits_hold_at_once(desk: Desk) -> None:
    declare(desk, limit="1")
    for n in range(150):
        fill(desk, f"lane{n}", f"{n}-1", f"{n}-2")
    assert len(desk.start("A", 200).entries) == 150
    assert declare(desk, limit="2", weights={"lane7": 3}) is True
    assert declare(desk, limit="2", weights={"lane7": 3}) is False
    while desk.call(ops.inspect(desk.q)).held_lanes:
        desk.call(ops.promote_due(desk.q))
    assert (wrong(desk), len(desk.start("A", 200).entries)) == ([], 150)


def test_a_paused_lane_starts_nothing_until_it_is_resumed(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1")
    fill(desk, "b", "b1")
    desk.call(ops.set_lane(desk.q, "a", "pause", "their server is down"))
    assert ids(desk.start("A", 9)) == ["b1"]
    assert (wrong(desk), rows_of(desk)["a"].paused) == ([], "their server is down")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.call(ops.set_lane(desk.q, "a", "resume"))
    assert heard == [(":wake:A", b"1")]
    assert (wrong(desk), ids(desk.start("A", 9))) == ([], ["a1"])


def test_a_pause_of_a_lane_may_end_by_itself(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1")
    desk.call(ops.set_lane(desk.q, "a", "pause", "for a moment", 100))
    assert desk.start("A", 9).status == "short"
    while not (started := desk.start("A", 9)).entries:
        pass
    assert (ids(started), wrong(desk), rows_of(desk)["a"].paused) == (["a1"], [], None)
    assert not desk.client.exists(LaneKeys(desk.q).opens)


def test_a_rate_limited_run_pauses_its_lane_only(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1", "a2")
    fill(desk, "b", "b1", "b2")
    started = desk.start("A", 2)
    held = started.first + ids(started).index("a1")
    assert desk.call(ops.retry_task(desk.q, "A", held, BOOM, counter="", limit=9, pause_ms=MINUTE)) == "given"
    assert (desk.call(ops.inspect(desk.q)).paused, rows_of(desk)["a"].paused) == (None, BOOM.message)
    assert (wrong(desk), ids(desk.start("A", 9))) == ([], ["b2"])


def test_a_lane_is_cancelled_as_a_whole(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", *(f"a{n}" for n in range(7)))
    fill(desk, "b", "b1")
    desk.dispatch("later", lane="a", run_at=desk.now() + MINUTE)
    desk.dispatch("other", lane="b", run_at=desk.now() + MINUTE)
    started = desk.start("A", 3)
    waiting, claims, step = 0, list[int](), None
    while step is None or step.more:
        step = desk.call(
            ops.cancel_lane(desk.q, "a", step.after if step else ops.FIRST_CANCEL_STEP, reason="left us", budget=2)
        )
        waiting, claims = waiting + step.waiting, claims + step.claims
    of_a = [started.first + n for n, name in enumerate(ids(started)) if name.startswith("a")]
    assert (sorted(claims), waiting) == (of_a, 8 - len(of_a))
    assert wrong(desk) == []
    found = desk.call(ops.inspect(desk.q))
    assert (found.waiting, found.due, found.running) == (1 if len(of_a) == 3 else 0, 1, 3)


def test_a_job_that_was_dispatched_again_in_another_lane_is_not_cancelled_with_the_first(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "moved", "a1")
    desk.call(ops.cancel_job(desk.q, "moved", "why"))
    fill(desk, "b", "moved")
    step = desk.call(ops.cancel_lane(desk.q, "a"))
    assert (step.waiting, wrong(desk), ids(desk.start("A", 9))) == (1, [], ["moved"])


def test_a_blocked_job_is_cancelled_with_its_lane(desk: Desk) -> None:
    declare(desk)
    fill(desk, "a", "a1")
    [held] = desk.take("A", 1)
    assert desk.dispatch("a1", b"next", lane="a").outcome == "blocked"
    step = desk.call(ops.cancel_lane(desk.q, "a", reason="why"))
    assert (step.waiting, step.claims, wrong(desk)) == (1, [held], [])
    assert desk.call(ops.inspect(desk.q)).blocked == 0


def test_a_job_that_a_run_in_another_lane_blocks_is_cancelled_with_its_lane(desk: Desk) -> None:
    declare(desk)
    fill(desk, "b", "x")
    [held] = desk.take("A", 1)
    assert desk.dispatch("x", b"next", lane="a").outcome == "blocked"
    step = desk.call(ops.cancel_lane(desk.q, "a", reason="why"))
    assert (step.waiting, step.claims, wrong(desk)) == (1, [], [])
    finish(desk, "A", held)
    assert (desk.start("A", 9).entries, desk.call(ops.inspect(desk.q)).blocked) == ([], 0)


# Listing


def test_what_waits_in_lanes_is_listed(desk: Desk) -> None:
    declare(desk, limits={"held": "1"})
    fill(desk, "held", "h1")
    desk.take("A", 1)
    for lane in ("b", "held", "a"):
        for n in range(3):
            assert desk.dispatch(f"{lane}{n}", b"%s%d" % (lane.encode(), n), lane=lane).outcome == "created"
    desk.put(b"raw")
    waiting = desk.waiting()
    assert waiting == [
        b"raw",
        *(b"a%d" % n for n in range(3)),
        *(b"b%d" % n for n in range(3)),
        *(b"held%d" % n for n in range(3)),
    ]
    found, after, more = list[str](), "", True
    while more:
        page = desk.call(ops.list_jobs(desk.q, "waiting", 2, after=after))
        found += [summary.task.decode() for _, summary in page.positions if summary is not None]
        after, more = page.positions[-1][0], page.more
    assert found == [task.decode() for task in waiting]
    assert wrong(desk) == []


# Clearing and purging


def test_a_deleted_queue_loses_its_lanes_and_new_ones_begin_again(desk: Desk) -> None:
    declare(desk, limit="1")
    fill(desk, "a", "a1", "a2", "a3")
    fill(desk, "b", "b1")
    held = desk.take("A", 2)
    assert desk.call(ops.delete_queue(desk.q))
    fill(desk, "a", "new")
    assert (wrong(desk), desk.call(ops.inspect(desk.q)).waiting) == ([], 1)
    while desk.call(ops.purge_queue(desk.q, 10)):
        assert wrong(desk) == []
    assert not desk.client.exists(desk.q.job("a2"), desk.q.job("a3"))
    finish(desk, "A", *held)
    assert ids(desk.start("A", 9)) == ["new"]
    assert wrong(desk) == []


def with_a_suspect(desk: Desk, *names: str) -> None:
    """Two workers have died with these jobs of lane a. The first one runs again, and the second one waits with its place."""
    declare(desk, limit="2")
    fill(desk, "a", *names)
    for n in range(2):
        declare(desk, f"dies{n}", limit="2")
        desk.take(f"dies{n}", 2)
        desk.call(ops.fail_worker(desk.q, f"dies{n}"))
    assert ids(desk.start("A", 9)) == [names[0]]
    assert (desk.client.llen(desk.q.suspects), rows_of(desk)["a"].running) == (1, 2)


@pytest.mark.parametrize("again", [True, False], ids=["dispatched again", "purged"])
def test_a_suspect_of_a_deleted_queue_leaves_its_place(desk: Desk, again: bool) -> None:
    """A job of its id may be dispatched again before the purge has come to it."""
    with_a_suspect(desk, "a1", "a2")
    assert desk.call(ops.delete_queue(desk.q))
    if again:
        fill(desk, "a", "a2")
        assert rows_of(desk)["a"].running == 1
    while desk.call(ops.purge_queue(desk.q, 10)):
        pass
    assert desk.client.hgetall(LaneKeys(desk.q).running) == {b"a": b"1"}
    assert wrong(desk) == []
    assert ids(desk.start("A", 9)) == ["a2"] * again


def test_the_place_of_a_purged_suspect_goes_to_a_job_that_waits_for_it(desk: Desk) -> None:
    with_a_suspect(desk, "a1", "a2")
    assert desk.call(ops.delete_queue(desk.q))
    fill(desk, "a", "new1", "new2")
    declare(desk, "B", limit="2")
    assert (desk.start("B", 9).entries, wrong(desk)) == ([], [])
    with desk.listening(desk.q.wake_channel("B")) as heard:
        while desk.call(ops.purge_queue(desk.q, 10)):
            pass
    assert heard == [(":wake:B", b"1")]
    assert (ids(desk.start("B", 9)), wrong(desk)) == (["new1"], [])


def test_nothing_of_lanes_is_left_when_all_have_ended(desk: Desk) -> None:
    declare(desk)
    for n in range(20):
        fill(desk, f"lane{n}", f"{n}")
    desk.call(ops.cancel_job(desk.q, "7", "why"))
    finish(desk, "A", *desk.take("A", 19))
    desk.start("A", 1)
    assert keys_of(desk) <= {":lanes:rules"}
    desk.call(ops.stop_work(desk.q, "A"))
    assert keys_of(desk) == set()


# Bad input


@pytest.mark.parametrize("lane", ["", "x" * 201, "a\0b", 7, True])
def test_a_lane_has_a_valid_name(desk: Desk, lane: Any) -> None:
    with pytest.raises(redis.ResponseError, match="the option lane of a dispatch cannot be that"):
        desk.call(ops.dispatch_jobs(desk.q, [job("a", lane=lane)]))
    assert set(desk.state()) == {":counts"}


@pytest.mark.parametrize(
    "rules",
    [
        {"limit": "0"},
        {"limit": 3},
        {"strict": 1},
        {"weights": {"a": 0}},
        {"weights": {"a": 1001}},
        {"weights": {"a": 1.5}},
        {"weights": {"": 1}},
        {"limits": {"a": "x"}},
        {"weights": {str(n): 1 for n in range(1001)}},
    ],
)
def test_declared_rules_are_checked_before_anything_is_written(desk: Desk, rules: Any) -> None:
    with pytest.raises(redis.ResponseError):
        declare(desk, **rules)
    assert set(desk.state()) == {":counts"}


def test_a_lane_may_be_full(desk: Desk) -> None:
    fill(desk, "a", "a1", "a2", max_lane_length=2)
    assert desk.dispatch("a3", lane="a", max_lane_length=2).outcome == "full"
    fill(desk, "b", "b1", max_lane_length=2)
    assert wrong(desk) == []


def test_of_a_whole_that_is_longer_than_the_room_in_its_lane_none_is_stored(desk: Desk) -> None:
    jobs = [
        job(name, lane=lane, max_lane_length=2) for name, lane in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a"))
    ]
    call = ops.dispatch_jobs(desk.q, jobs, all_or_none=True)
    with desk.nothing_happens():
        assert [each.outcome for each in desk.call(call)][-1] == "full"
    later = job("a3", lane="a", max_lane_length=2, run_at=desk.now() + MINUTE)
    call = ops.dispatch_jobs(desk.q, [later, *jobs[:3]], all_or_none=True)
    assert {each.outcome for each in desk.call(call)} == {"created"}
    assert wrong(desk) == []


@pytest.mark.parametrize("leave", ["cancelled", "put off"])
def test_a_job_that_waits_in_a_lane_no_more_takes_no_room_there(desk: Desk, leave: str) -> None:
    declare(desk)
    desk.call(ops.set_lane(desk.q, "a", "pause", "why"))
    fill(desk, "a", "a1", "a2", max_lane_length=2)
    if leave == "cancelled":
        desk.call(ops.cancel_job(desk.q, "a1", "why"))
    else:
        desk.dispatch("a1", lane="a", run_at=desk.now() + MINUTE)
    assert rows_of(desk)["a"].waiting == 1
    fill(desk, "a", "a3", max_lane_length=2)
    assert desk.dispatch("a4", lane="a", max_lane_length=2).outcome == "full"
    desk.call(ops.set_lane(desk.q, "a", "resume"))
    assert (ids(desk.start("A", 9)), wrong(desk)) == (["a2", "a3"], [])


# Random stories


class Story:
    """Random steps of workers, producers and operators on one queue."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk, self.random, self.n = desk, Random(seed), 0
        self.rules: dict[str, Any] = {}
        self.held: dict[str, set[int]] = {"A": set(), "B": set()}

    def step(self) -> str:
        names = sorted(name for name in dir(self) if name.startswith("do_"))
        name = self.random.choice([*names, *["do_dispatch"] * 5, *["do_start"] * 5, *["do_finish"] * 3])
        getattr(self, name)()
        return name

    def lane(self) -> str:
        return self.random.choice("abcd")

    def worker(self) -> str:
        return self.random.choice("AB")

    def pick(self) -> tuple[str, int] | None:
        held = [(worker, each) for worker, claims in self.held.items() for each in sorted(claims)]
        return self.random.choice(held) if held else None

    def do_dispatch(self) -> None:
        self.n += 1
        options: dict[str, Any] = {"lane": self.lane()} if self.random.random() < 0.8 else {}
        if self.random.random() < 0.2:
            options["run_at"] = self.desk.now() + self.random.choice((0, 5, 50))
        if self.random.random() < 0.2:
            options["front"] = True
        number = self.n if self.random.random() < 0.8 else self.random.randint(1, self.n)
        self.desk.dispatch(f"j{number}", **options)

    def do_wait_for_room(self) -> None:
        bounds = {"max_length": self.random.choice((1, 9, 99)), "max_lane_length": self.random.choice((1, 5))}
        waiter = f"X-{self.random.randint(0, 5)} {self.random.choice((1, 2))}"
        self.desk.dispatch(None, lane=self.lane(), waiter=waiter, **bounds)

    def do_put(self) -> None:
        self.desk.put(b"raw")

    def do_enter(self) -> None:
        if self.random.random() < 0.5:
            self.rules = self.random.choice(
                [
                    {},
                    {"limit": "1"},
                    {"limit": "2"},
                    {"strict": True},
                    {"weights": {"a": 3, "b": 2}, "limits": {"c": "1"}},
                    {"limit": "- 3/40"},
                ]
            )
        declare(self.desk, self.worker(), **self.rules)

    def do_start(self) -> None:
        worker = self.worker()
        declare(self.desk, worker, **self.rules)
        before = rows_of(self.desk)
        started = self.desk.start(worker, self.random.choice((1, 2, 5)))
        for lane, row in rows_of(self.desk).items():
            most, was = row.limits.split(" ")[0], before.get(lane)
            if most.isdigit():
                assert row.running <= max(int(most), was.running if was else 0)
        self.held[worker] |= {started.first + n for n, entry in enumerate(started.entries) if entry}

    def do_finish(self) -> None:
        if one := self.pick():
            self.held[one[0]].discard(one[1])
            self.desk.call(ops.finish_tasks(self.desk.q, one[0], [one[1]]))

    def do_retry(self) -> None:
        if one := self.pick():
            self.held[one[0]].discard(one[1])
            delay = self.random.choice((0, 10))
            self.desk.retry(*one, delay_ms=delay)

    def do_file(self) -> None:
        if one := self.pick():
            filed = [each for each in sorted(self.held[one[0]]) if each >= one[1]]
            self.held[one[0]] -= set(filed)
            self.desk.call(ops.file_tasks(self.desk.q, one[0], {each: self.lane() for each in filed}))

    def do_rate_limited(self) -> None:
        if one := self.pick():
            self.held[one[0]].discard(one[1])
            self.desk.call(ops.retry_task(self.desk.q, *one, BOOM, counter="", limit=9, pause_ms=10))

    def do_fail(self) -> None:
        if one := self.pick():
            self.held[one[0]].discard(one[1])
            self.desk.fail(*one)

    def do_leave(self) -> None:
        worker = self.worker()
        self.held[worker].clear()
        leave = ops.stop_work if self.random.random() < 0.5 else ops.fail_worker
        self.desk.call(leave(self.desk.q, worker))

    def do_cancel(self) -> None:
        self.desk.call(ops.cancel_job(self.desk.q, f"j{self.random.randint(0, self.n)}", "why"))

    def do_promote(self) -> None:
        self.desk.call(ops.promote_due(self.desk.q, 2))

    def do_set(self) -> None:
        setting, value = self.random.choice([("weight", "3"), ("weight", "*"), ("limit", "1"), ("limit", "*")])
        self.desk.call(ops.set_lane(self.desk.q, self.lane(), setting, value))  # type: ignore[arg-type]

    def do_pause(self) -> None:
        ms = self.random.choice((None, 5))
        self.desk.call(ops.set_lane(self.desk.q, self.lane(), "pause", "why", ms))

    def do_resume(self) -> None:
        for lane in "abcd":
            self.desk.call(ops.set_lane(self.desk.q, lane, "resume"))

    def do_cancel_lane(self) -> None:
        if self.random.random() < 0.3:
            lane, step = self.lane(), None
            while step is None or step.more:
                after = step.after if step else ops.FIRST_CANCEL_STEP
                step = self.desk.call(ops.cancel_lane(self.desk.q, lane, after, budget=2))

    def do_clear(self) -> None:
        if self.random.random() < 0.3:
            self.desk.call(ops.delete_queue(self.desk.q))

    def do_purge(self) -> None:
        self.desk.call(ops.purge_queue(self.desk.q, 3))


@pytest.mark.parametrize("seed", range(12))
def test_in_a_random_story_all_keys_agree(desk: Desk, seed: int) -> None:
    story = Story(desk, seed)
    done: list[str] = []
    for _ in range(250):
        done.append(story.step())
        assert wrong(desk, ring_may_be_full=True) == [], done[-5:]
    drain(desk, story)
    assert wrong(desk) == []
    assert keys_of(desk) - {":lanes:opens"} <= {
        ":lanes:rules",
        ":starts:40:a",
        ":starts:40:b",
        ":starts:40:c",
        ":starts:40:d",
    }


def drain(desk: Desk, story: Story) -> None:
    """All that is left runs, and then nothing is left: no task sleeps in a lane."""
    for lane in "abcd":
        for setting in ("limit", "weight"):
            desk.call(ops.set_lane(desk.q, lane, setting, "*"))  # type: ignore[arg-type]
    story.do_resume()
    while desk.call(ops.purge_queue(desk.q)):
        pass
    for worker in "AB":
        declare(desk, worker)
        finish_all(desk, worker, sorted(story.held[worker]))
    while True:
        desk.call(ops.promote_due(desk.q))
        started = desk.start("A", 50)
        finish_all(desk, "A", [started.first + n for n, entry in enumerate(started.entries) if entry])
        found = desk.call(ops.inspect(desk.q))
        if not (found.due or found.running or found.waiting or found.blocked):
            break
    desk.start("A", 50)


def finish_all(desk: Desk, worker: str, claims: list[int]) -> None:
    if claims:
        desk.call(ops.finish_tasks(desk.q, worker, claims))
