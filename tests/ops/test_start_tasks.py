from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import (
    FENCE,
    FUTURE,
    PAST,
    Desk,
    Expires,
    aside,
    claim,
    fields_of,
    job,
    payloads,
    policy,
    record,
    reference,
    remembered,
)
from worqr import ops
from worqr.ops import MAX_BYTES
from worqr.records import RemoteError


def place(number: int, first: int, count: int, suspect: int = 0) -> str:
    """What the fence holds of a worker."""
    return f"{number} {first} {count} {suspect}"


def told(reply: list[Any]) -> list[Any]:
    """A reply to compare: the fields of a hash come in no order."""
    return [fields_of(part) if isinstance(part, list) else part for part in reply]


def test_moves_the_front_under_claims_in_order(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a", b"b", b"c")
    assert desk.send(ops.start_tasks(desk.q, "A", 1, 2)) == [b"ok", str(claim(1)).encode(), b"a", b"b"]
    assert desk.state() == {
        "waiting": [b"c"],
        f":claim:{claim(1)}": [b"a"],
        f":claim:{claim(2)}": [b"b"],
        ":claims:A": {str(claim(1)), str(claim(2))},
        ":workers": {"A": place(1, claim(1), 2)},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(2)), "enqueued": "3", "claimed": "2"}),
    }


def test_short_of_tasks_joins_the_hungry_in_the_same_script(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    assert desk.send(ops.start_tasks(desk.q, "A", 1, 2)) == [b"short", str(claim(1)).encode(), 1, b"a"]
    assert desk.state()[":hungry"] == {"A"}


def test_short_of_tasks_says_how_many_workers_wait_now(desk: Desk) -> None:
    for worker in "ABC":
        desk.enter(worker)
    desk.put(b"a")
    said = [
        (started.status, started.waiting_workers, len(started.entries))
        for started in map(desk.start, "ABCC", [2, 1, 1, 1])
    ]
    assert said == [("short", 1, 1), ("short", 2, 0), ("short", 3, 0), ("short", 3, 0)]
    desk.put(b"b")
    assert desk.start("A", 1).waiting_workers == 0, "it has what it asked for, and does not wait"


def test_exactly_enough_is_not_short(desk: Desk) -> None:
    desk.enter("A")
    desk.start("A", 1)
    desk.client.lpush(desk.q.base, b"a")  # a foreign producer, who wakes nobody
    assert desk.state()[":hungry"] == {"A"}
    assert desk.start("A", 1).status == "ok"
    assert ":hungry" not in desk.state()


def test_an_equal_number_gets_the_same_again(desk: Desk) -> None:
    desk.stall(b"poison", times=1)
    desk.put(b"a", b"b")
    desk.enter("A")
    call = ops.start_tasks(desk.q, "A", 1, 2)
    reply = desk.send(call)
    assert len(reply) == 4
    with desk.nothing_changes():
        for again in (call, ops.start_tasks(desk.q, "A", 1, 900)):
            assert told(desk.send(again)) == told(reply)


def test_an_equal_number_tells_which_claims_are_gone(desk: Desk) -> None:
    first, _ = desk.hold("A", b"a", b"b")
    desk.call(ops.finish_tasks(desk.q, "A", [first]))
    with desk.nothing_changes():
        assert desk.call(ops.start_tasks(desk.q, "A", 1, 2)).entries == [None, b"b"]


def test_a_lower_number_gets_nothing(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    desk.call(ops.start_tasks(desk.q, "A", 7, 0))
    with desk.nothing_changes():
        assert desk.send(ops.start_tasks(desk.q, "A", 6, 1)) == [b"late"]


def test_a_start_from_before_it_came_back_gets_nothing(desk: Desk) -> None:
    desk.enter("A")
    desk.call(ops.stop_work(desk.q, "A"))
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1, last=7))
    desk.put(b"a")
    with desk.nothing_changes():
        assert desk.send(ops.start_tasks(desk.q, "A", 7, 1)) == [b"ok", b"0"]
        assert desk.send(ops.start_tasks(desk.q, "A", 3, 1)) == [b"late"]
    assert desk.call(ops.start_tasks(desk.q, "A", 8, 1)).entries == [b"a"]


def test_who_stands_outside_the_fence_gets_nothing(desk: Desk) -> None:
    desk.put(b"a")
    with desk.nothing_changes():
        assert desk.send(ops.start_tasks(desk.q, "A", 1, 1)) == [b"not_serving"]


def test_who_is_being_swept_gets_nothing(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    with desk.nothing_changes():
        assert desk.send(ops.start_tasks(desk.q, "A", 1, 1)) == [b"not_serving"]
        assert desk.send(ops.start_tasks(desk.q, "A", 2, 1)) == [b"not_serving"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.start("A", 5).status == "not_serving"
    assert desk.state() == {}


def test_an_idle_start_makes_nothing_that_stays(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.enter("A")
    desk.start("A", 5)
    assert set(desk.state()) == {":workers", ":policy:A", ":hungry"}


def test_a_paused_queue_gives_nothing_and_makes_nobody_hungry(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    desk.call(ops.pause(desk.q, "why"))
    before = desk.state()
    call = ops.start_tasks(desk.q, "A", 1, 1)
    assert desk.send(call) == [b"paused"]
    assert desk.state() == {**before, ":workers": {"A": place(1, 0, 0)}}
    desk.call(ops.resume(desk.q))
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok", b"0"]
    assert desk.call(ops.start_tasks(desk.q, "A", 2, 1)).entries == [b"a"]


# Waking


def test_what_is_left_behind_wakes_one_more(desk: Desk) -> None:
    workers = ["A", "B", "C"]
    desk.enter(*workers)
    desk.client.sadd(desk.q.hungry, *workers)
    desk.client.lpush(desk.q.base, b"a", b"b", b"c")  # a foreign producer
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.start("A", 1)
    assert len(heard) == 1
    assert heard[0][0] in (":wake:B", ":wake:C")


def test_where_nothing_is_left_nobody_is_woken(desk: Desk) -> None:
    desk.enter("A", "B")
    desk.client.sadd(desk.q.hungry, "B")
    desk.client.lpush(desk.q.base, b"a", b"b")
    desk.client.rpush(desk.q.base, reference("forged"))
    assert desk.start("A", 2).status == "ok"
    assert desk.state()[":hungry"] == {"B"}


def test_who_has_room_for_nothing_is_hungry_no_more(desk: Desk) -> None:
    desk.enter("A")
    desk.client.sadd(desk.q.hungry, "A", "B")
    desk.start("A", 0)
    assert desk.state()[":hungry"] == {"B"}


def test_zero_passes_a_wake_up_on_and_takes_nothing(desk: Desk) -> None:
    desk.enter("A", "B")
    desk.client.sadd(desk.q.hungry, "B")
    desk.client.lpush(desk.q.base, b"a")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        assert desk.start("A", 0).status == "ok"
    assert heard == [(":wake:B", b"1")]
    assert desk.state()["waiting"] == [b"a"]
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.client.delete(desk.q.base)
        desk.start("A", 0)
    assert heard == []


# References


def test_a_job_comes_with_its_record(desk: Desk) -> None:
    desk.stall(b"poison", times=1)
    desk.enter("A")
    [again] = desk.take("A", 1)
    desk.retry("A", again)
    started = desk.start("A", 1)
    job = f"@{claim(1)}"
    [entry] = started.entries
    held = {"claim": str(started.first), "worker": "A", "state": "active"}
    known = {**remembered("poison", claim(1), failures=1, stalls=1, queued=again), **held}
    assert fields_of(entry) == {**known, "id": job, "task": b"poison"}
    state = desk.state()
    assert state[f":claim:{started.first}"] == [reference(job)]
    assert state[f":active:{job}"] == known
    assert f":job:{job}" not in state


def test_references_to_nothing_are_skipped_and_counted_down(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"a")
    for one in held:
        desk.retry("A", one)
    assert desk.call(ops.cancel_task(desk.q, b"a")).waiting == 2
    assert desk.waiting() == [b"b"]
    assert len(desk.state()["waiting"]) == 3
    assert payloads(desk.start("A", 5).entries) == [b"b"]
    desk.put(b"c")
    assert desk.waiting() == [b"c"]


def test_the_last_one_skipped_leaves_no_count_of_them(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.retry("A", one)
    desk.retry("A", two)
    desk.put(b"c")
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert payloads(desk.start("A", 1).entries) == [b"b"]
    assert desk.state()["waiting"] == [b"c"]
    assert "stale" not in desk.state()[":counts"].value


def test_a_foreign_reference_does_not_spoil_the_count(desk: Desk) -> None:
    """The last item of the list is all that is left of it, so no reference to nothing can be left."""
    desk.enter("A")
    desk.put(b"a")
    desk.client.rpush(desk.q.base, reference("forged"))
    assert desk.start("A", 1).entries == [b"a"]
    assert "stale" not in desk.state()[":counts"].value
    desk.put(b"b")
    assert desk.waiting() == [b"b"]


def test_a_foreign_reference_makes_no_counts_that_never_expire(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.enter("A")
    desk.client.rpush(desk.q.base, reference("forged"))
    desk.start("A", 1)
    assert ":counts" not in desk.state()


def test_an_empty_queue_puts_the_count_right(desk: Desk) -> None:
    desk.client.hset(desk.q.counts, "stale", 5)
    desk.enter("A")
    desk.start("A", 1)
    desk.put(b"a")
    assert desk.waiting() == [b"a"]


def test_skips_no_more_references_than_asked(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    desk.client.rpush(desk.q.base, *[reference("forged")] * 2500)
    assert [desk.start("A", 1).entries for _ in range(3)] == [[], [], [b"a"]]


def test_a_reference_to_an_active_job_is_skipped(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.retry("A", held[0])
    [running] = desk.take("A", 1)
    job = f"@{claim(1)}"
    desk.client.rpush(desk.q.base, reference(job))
    desk.client.hset(desk.q.job(job), mapping=record("its blocked twin", FENCE, "blocked"))
    assert desk.start("A", 1).entries == []
    assert desk.state()[f":active:{job}"]["claim"] == str(running)


# Sizes


def test_stops_at_8_mib_but_takes_at_least_one(desk: Desk) -> None:
    big = bytes(range(256)) * 4 * 1024 * 16  # 16 MiB
    desk.enter("A")
    desk.put(big)
    desk.put(b"x" * (MAX_BYTES - 1), b"y", b"z")
    first = desk.start("A", 9)
    assert first.entries == [big]
    assert first.status == "ok"
    assert [len(entry) for entry in desk.start("A", 9).entries] == [MAX_BYTES - 1, 1]
    assert desk.start("A", 9).entries == [b"z"]


def test_takes_a_thousand_at_once(desk: Desk) -> None:
    tasks = [b"%d" % n for n in range(1500)]
    desk.enter("A")
    desk.put(*tasks)
    assert desk.start("A", 1000).entries == tasks[:1000]
    assert desk.start("A", 1000).entries == tasks[1000:]


# Suspects


def test_suspects_are_served_first_one_at_a_time_for_each_worker(desk: Desk) -> None:
    desk.stall(b"s1", b"s2", b"s3")
    desk.put(b"a", b"b", b"c")
    desk.enter("A", "B")
    assert payloads(desk.start("A", 2).entries) == [b"s1", b"a"]
    assert desk.start("A", 1).entries == [b"b"]
    assert payloads(desk.start("B", 1).entries) == [b"s2"]
    assert desk.state()[":suspects"] == [reference(f"@{claim(3)}")]


@pytest.mark.parametrize("end", ["finish", "stop", "retry", "fail"])
def test_who_has_ended_its_suspect_gets_the_next(desk: Desk, end: str) -> None:
    desk.stall(b"s1", b"s2")
    desk.enter("A")
    [held] = desk.take("A", 1)
    assert desk.start("A", 1).entries == []
    match end:
        case "finish":
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case "stop":
            desk.call(ops.stop_tasks(desk.q, "A", [held]))
        case "retry":
            desk.retry("A", held)
        case _:
            desk.fail("A", held)
    expected = b"s1" if end == "stop" else b"s2"
    assert payloads(desk.start("A", 1).entries) == [expected]


def test_a_suspect_that_is_left_behind_makes_its_holder_hungry(desk: Desk) -> None:
    desk.stall(b"s1", b"s2")
    desk.enter("A")
    desk.take("A", 1)
    assert desk.start("A", 1).status == "short"
    assert desk.state()[":hungry"] == {"A"}
    assert len(desk.state()[":suspects"]) == 1


def hungry_beside_suspects(desk: Desk) -> None:
    """A to H each run a suspect, I runs none, all of them are hungry; nothing waits."""
    desk.stall(*(b"s%d" % n for n in range(8)))
    for worker in "ABCDEFGHI":
        desk.enter(worker)
        desk.start(worker, 2)
    assert desk.state()[":hungry"] == set("ABCDEFGHI")


def test_a_wake_up_for_a_suspect_passes_over_those_that_run_one(desk: Desk) -> None:
    hungry_beside_suspects(desk)
    desk.dispatch("x", run_at=FUTURE)
    desk.client.hset(desk.q.job("x"), "suspect", "1")
    desk.client.zadd(desk.q.due, {"x": PAST})
    with desk.listening(*map(desk.q.wake_channel, "ABCDEFGHI")) as heard:
        assert desk.call(ops.promote_due(desk.q)) == (1, None, False)
    assert heard == [(":wake:I", b"1")]
    assert desk.state()[":hungry"] == set("ABCDEFGH")
    assert payloads(desk.start("I", 1).entries) == [b"a"]


def test_one_for_any_other_task_may_go_to_any_of_them(desk: Desk) -> None:
    hungry_beside_suspects(desk)
    with desk.listening(*map(desk.q.wake_channel, "ABCDEFGHI")) as heard:
        desk.put(*[b"a"] * 9)
    assert sorted(channel for channel, _ in heard) == [f":wake:{worker}" for worker in "ABCDEFGHI"]


@pytest.mark.parametrize("wanted", [1, 2])
def test_who_leaves_a_suspect_behind_wakes_one_that_may_take_it(desk: Desk, wanted: int) -> None:
    """Its wake-up may have been for the suspect: it was told before it took its own."""
    hungry_beside_suspects(desk)
    desk.client.rpush(desk.q.suspects, b"another")
    desk.client.lpush(desk.q.base, b"a")
    with desk.listening(*map(desk.q.wake_channel, "ABCDEFGHI")) as heard:
        assert desk.start("A", wanted).entries == [b"a"]
    assert heard == [(":wake:I", b"1")]
    assert desk.state()[":hungry"] == set("ABCDEFGH") - ({"A"} if wanted == 1 else set())


def test_if_all_run_a_suspect_none_is_woken_for_another(desk: Desk) -> None:
    hungry_beside_suspects(desk)
    desk.call(ops.stop_work(desk.q, "I"))
    desk.client.rpush(desk.q.suspects, b"another")
    with desk.listening(*map(desk.q.wake_channel, "ABCDEFGH")) as heard:
        assert desk.start("A", 1).entries == []
    assert heard == []
    assert desk.state()[":hungry"] == set("ABCDEFGH")


def test_a_fence_from_the_clock_when_the_counts_have_expired(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.enter("A")
    desk.put(b"a", b"b")
    first, second = desk.take("A", 2)
    seconds, micros = desk.client.time()
    assert 0 <= seconds * 1_000_000 + micros - first < 60_000_000
    assert second == first + 1
    assert isinstance(desk.state()[":counts"], Expires)
    assert first < FENCE


# Jobs that are due


def become_due(desk: Desk, *ids: str) -> None:
    """Jobs whose time has come, one after the other, and that nobody has promoted yet."""
    desk.call(ops.dispatch_jobs(desk.q, [job(each, each.encode(), run_at=FUTURE) for each in ids]))
    for n, each in enumerate(ids):
        desk.client.zadd(desk.q.due, {each: PAST + n})


def test_runs_short_and_takes_what_is_due(desk: Desk) -> None:
    become_due(desk, "b", "a")
    desk.dispatch("later", run_at=FUTURE)
    desk.put(b"raw")
    desk.enter("A")
    started = desk.start("A", 3)
    assert started.status == "ok"
    assert payloads(started.entries) == [b"raw", b"b", b"a"]
    state = desk.state()
    assert state[":due"] == ["later"]
    assert set(state[":claims:A"]) == {str(started.first + n) for n in range(3)}
    assert desk.start("A", 1).status == "short"


def test_leaves_what_is_due_alone_while_enough_waits(desk: Desk) -> None:
    become_due(desk, "x")
    desk.put(b"a", b"b")
    desk.enter("A")
    desk.take("A", 2)
    assert desk.state()[":due"] == ["x"]


def test_of_what_it_put_in_line_and_left_there_it_tells_another(desk: Desk) -> None:
    become_due(desk, "x", "y", "z")
    desk.enter("A")
    desk.client.sadd(desk.q.hungry, "B", "C")
    with desk.listening(desk.q.wake_channel("B"), desk.q.wake_channel("C")) as heard:
        assert payloads(desk.start("A", 1).entries) == [b"x"]
    assert len(heard) == 1
    assert desk.waiting() == [b"y", b"z"]


def test_what_is_due_later_leaves_it_hungry(desk: Desk) -> None:
    desk.dispatch("later", run_at=FUTURE)
    desk.enter("A")
    assert desk.start("A", 1).status == "short"
    assert desk.state()[":hungry"] == {"A"}
    assert desk.state()[":due"] == ["later"]


def test_a_suspect_that_came_due_is_taken_too(desk: Desk) -> None:
    become_due(desk, "x")
    desk.client.hset(desk.q.job("x"), "suspect", "1")
    desk.enter("A")
    started = desk.start("A", 2)
    assert payloads(started.entries) == [b"x"]
    assert desk.state()[":workers"]["A"] == place(1, started.first, 1, started.first)


def test_suspects_that_came_due_are_for_others_once_it_has_one(desk: Desk) -> None:
    become_due(desk, "x", "y", "z")
    for each in "xyz":
        desk.client.hset(desk.q.job(each), "suspect", "1")
    desk.enter("A")
    desk.client.sadd(desk.q.hungry, "A", "B", "C")
    with desk.listening(*map(desk.q.wake_channel, "ABC")) as heard:
        started = desk.start("A", 9)
    assert (started.status, payloads(started.entries)) == ("short", [b"x"])
    assert sorted(channel for channel, _ in heard) == [":wake:B", ":wake:C"]
    assert desk.state()[":hungry"] == {"A"}


def test_one_that_took_a_suspect_from_the_line_takes_none_that_came_due(desk: Desk) -> None:
    desk.stall(b"first")
    become_due(desk, "x")
    desk.client.hset(desk.q.job("x"), "suspect", "1")
    desk.enter("A")
    assert payloads(desk.start("A", 9).entries) == [b"first"]
    assert desk.state()[":suspects"] == [reference("x")]


# Jobs that have expired


def test_one_that_was_not_started_in_time_is_set_aside_instead(desk: Desk) -> None:
    number = desk.dispatch("x", b"old", expires="5", fields={"result_ttl": "60000"}).number
    desk.put(b"raw")
    desk.enter("A")
    with desk.listening(desk.q.job("x")) as heard:
        reply = desk.send(ops.start_tasks(desk.q, "A", 1, 2))
    assert heard == [(":job:x", b"failed")]
    late, taken = claim(2), claim(3)
    assert reply == [b"ok", str(late).encode(), None, b"raw"]
    error = RemoteError("Expired", "it was not started before it expired", "")
    kept = {"first": number, "last": number, "run_at": PAST, "expires": 5, "result_ttl": 60000}
    told = {"error_type": error.type, "error_message": error.message, "error_traceback": ""}
    assert desk.state() == {
        ":failed": [str(late)],
        ":aside": {"x": str(late)},
        f":aside:{late}": aside("old", "x", reason="expired", error=error, **kept),
        ":result:x": Expires({"outcome": "failed", "first": str(number), "last": str(number), "attempts": "0", **told}),
        f":claim:{taken}": [b"raw"],
        ":claims:A": {str(taken)},
        ":workers": {"A": place(1, late, 2)},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(taken), "enqueued": "2", "claimed": "2", "failed": "1", "expired": "1"}),
    }
    with desk.nothing_changes():
        assert desk.send(ops.start_tasks(desk.q, "A", 1, 2)) == reply


@pytest.mark.parametrize(
    ("said", "expired"),
    [
        ({"expires": "0"}, True),
        ({"expires_at": str(PAST)}, True),
        ({"expires": str(FUTURE)}, False),
        ({"expires_at": str(FUTURE)}, False),
        ({"expires": str(FUTURE), "expires_at": str(PAST)}, False),
        ({}, False),
    ],
)
def test_from_its_due_time_or_at_a_moment(desk: Desk, said: dict[str, str], expired: bool) -> None:
    desk.dispatch("x", **said)
    desk.enter("A")
    assert [entry is None for entry in desk.start("A", 1).entries] == [expired]
    assert (":failed" in desk.state()) == expired


@pytest.mark.parametrize("back", ["stop", "retry", "sweep"])
def test_what_once_started_does_not_expire(desk: Desk, back: str) -> None:
    held = desk.run("A", "x", expires_at=str(FUTURE))
    desk.client.hset(desk.q.active("x"), "expires_at", PAST)
    match back:
        case "stop":
            desk.call(ops.stop_tasks(desk.q, "A", [held]))
        case "retry":
            desk.retry("A", held)
        case _:
            desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("A")
    assert payloads(desk.start("A", 1).entries) == [b"a"]


def test_its_failure_handler_gets_what_expired(desk: Desk) -> None:
    desk.dispatch("x", expires="0")
    desk.enter("A", on_failure=True, keep_failed=0)
    assert desk.start("A", 1).entries == [None]
    state = desk.state()
    assert state["-fail"] == [reference(f"@f{claim(2)}")]
    assert not any(name.startswith((":aside", ":failed", ":active", ":job", ":claim")) for name in state)


def test_a_thousand_that_expired_are_set_aside_in_one_go(desk: Desk) -> None:
    desk.call(ops.dispatch_jobs(desk.q, [job(None, expires="0")] * 1000))
    desk.put(b"raw")
    desk.enter("A")
    started = desk.start("A", 1000)
    assert started.entries == [None] * 1000
    assert desk.start("A", 5).entries == [b"raw"]
    assert desk.counts() == {"enqueued": 1001, "claimed": 1001, "failed": 1000, "expired": 1000}


# Places in line


def test_one_with_two_places_in_line_runs_once(desk: Desk) -> None:
    desk.dispatch("x", b"old")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    desk.dispatch("x", b"new")
    assert desk.state()["waiting"] == [reference("x")] * 2
    desk.enter("A", "B")
    assert payloads(desk.start("A", 1).entries) == [b"new"]
    assert desk.start("B", 1).entries == []
    assert desk.call(ops.inspect(desk.q)).waiting == 0


@pytest.mark.parametrize("state", ["due", "blocked", "active"])
def test_a_place_of_one_that_does_not_wait_is_skipped(desk: Desk, state: str) -> None:
    desk.dispatch("x")
    desk.client.hset(desk.q.job("x"), "state", state)
    desk.enter("A")
    assert desk.start("A", 1).entries == []
    assert f":claim:{claim(2)}" not in desk.state()


def test_a_record_of_a_foreign_type_is_skipped(desk: Desk) -> None:
    desk.dispatch("x")
    desk.client.set(desk.q.job("x"), "foreign")
    desk.put(b"raw")
    desk.enter("A")
    assert desk.start("A", 1).entries == [b"raw"]


def test_whoever_watches_is_told_that_it_runs(desk: Desk) -> None:
    desk.dispatch("x")
    desk.enter("A")
    with desk.listening(desk.q.job("x")) as heard:
        desk.start("A", 1)
    assert heard == [(":job:x", b"active")]
