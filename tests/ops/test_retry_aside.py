from __future__ import annotations

import pytest

from tests.ops.driver import FENCE, FUTURE, Desk, Expires, claim, digest, fields_of, payloads, policy, record, reference
from worqr import ops
from worqr.keys import MARKER, QueueKeys


def again(desk: Desk, *claims: int, undecodable: bool = False) -> int:
    return desk.call(ops.retry_aside(desk.q, "undecodable" if undecodable else "failed", claims))


def without_time(record: dict[str, str], since: int, until: int) -> dict[str, str]:
    """The record, which is due now."""
    assert since <= int(record["run_at"]) <= until
    return {name: value for name, value in record.items() if name != "run_at"}


def test_a_job_goes_to_the_back_of_the_queue_all_counters_at_zero(desk: Desk) -> None:
    given = {"fields": {"timeout": "5", "max_failures": "3"}, "meta": "{}", "expires_at": "1", "scheduled_for": "7"}
    held = desk.run("A", "x", b"task", **{**given, "expires_at": str(FUTURE)})
    first = held - 1
    for _ in range(2):
        assert desk.retry("A", held) == "given"
        [held] = desk.take("A", 1)
    assert desk.retry("A", held) == "aside"
    desk.put(b"raw")
    before = desk.now()
    assert desk.send(ops.retry_aside(desk.q, "failed", [held])) == [b"ok", 1]
    state = desk.state()
    known = {"last": held + 1, "queued": held + 1, "timeout": 5, "max_failures": 3, "meta": "{}", "scheduled_for": 7}
    state[":job:x"] = without_time(state[":job:x"], before, desk.now())
    assert state == {
        "waiting": [reference("x"), b"raw"],
        ":job:x": record("task", first, **known),
        ":workers": {"A": f"3 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held + 1), "enqueued": "3", "claimed": "3", "retried": "2", "failed": "1"}),
    }


@pytest.mark.parametrize("undecodable", [False, True])
def test_a_raw_task_is_a_job_from_then_on(desk: Desk, undecodable: bool) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held, undecodable=undecodable)
    before = desk.now()
    assert again(desk, held, undecodable=undecodable) == 1
    state = desk.state()
    state[f":job:@{held}"] = without_time(state[f":job:@{held}"], before, desk.now())
    kind = "broken" if undecodable else "failed"
    assert state == {
        "waiting": [reference(f"@{held}")],
        f":job:@{held}": record("a", held + 1, twin=digest("a")),
        f":twins:{digest('a')}": {f"@{held}"},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held + 1), "enqueued": "2", "claimed": "1", kind: "1"}),
    }
    assert desk.call(ops.cancel_task(desk.q, b"a")).waiting == 1


@pytest.mark.parametrize("task", [b"", bytes(range(256)), MARKER + b"\xff"])
def test_the_payload_is_given_byte_for_byte(desk: Desk, task: bytes) -> None:
    [held] = desk.hold("A", task)
    desk.fail("A", held, undecodable=True)
    again(desk, held, undecodable=True)
    assert payloads(desk.start("A", 1).entries) == [task]


def test_a_retried_raw_task_keeps_its_id(desk: Desk) -> None:
    [first] = desk.hold("A", b"a")
    desk.retry("A", first)
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    again(desk, held)
    [entry] = desk.start("A", 1).entries
    facts = fields_of(entry)
    assert (facts["id"], facts["twin"], facts["first"]) == (f"@{first}", digest("a"), str(first))
    assert facts.keys().isdisjoint({"failures", "started", "error_type", "reason", "older", "at"})


def test_many_in_the_order_in_which_they_are_named_and_wakes_for_each(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    for one in held:
        desk.fail("A", one)
    workers = ["W", "X", "Y", "Z"]
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        assert again(desk, held[2], held[0], 1, held[0]) == 2
    assert len(heard) == 2
    assert desk.waiting() == [b"c", b"a"]
    assert desk.state()[":counts"].value["fence"] == str(claim(5))  # so that no claim gets one of their numbers
    assert desk.state()[":aside"] == {f"@{held[1]}": str(held[1])}
    assert desk.state()[":failed"] == [str(held[1])]


def test_one_whose_id_waits_stays_where_it_is(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    desk.fail("A", held)
    desk.dispatch("x", b"new", run_at=FUTURE)
    with desk.nothing_happens():
        assert again(desk, held) == 0


def test_of_two_under_one_id_the_first_that_is_named_goes(desk: Desk) -> None:
    held = []
    for task in (b"1", b"2"):
        held.append(desk.run("A", "x", task))
        desk.fail("A", held[-1])
    assert again(desk, *held) == 1
    assert desk.waiting() == [b"1"]
    assert desk.state()[":failed"] == [str(held[1])]
    assert desk.state()[":aside"] == {"x": str(held[1])}


def test_one_whose_id_runs_stays_until_that_ends(desk: Desk) -> None:
    old = desk.run("A", "x", b"old")
    desk.fail("A", old)
    held = desk.run("A", "x", b"new")
    desk.client.sadd(desk.q.hungry, "B")
    before = desk.state()
    assert again(desk, old) == 0
    assert {key: value for key, value in desk.state().items() if before.get(key) != value} == {}
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert again(desk, old) == 1
    assert desk.waiting() == [b"old"]


def test_the_one_in_the_trash_makes_room(desk: Desk) -> None:
    held = desk.run("A", "x", b"failed")
    desk.fail("A", held)
    desk.dispatch("x", b"deleted")
    desk.call(ops.delete_queue(desk.q))
    assert again(desk, held) == 1
    assert not desk.call(ops.purge_queue(desk.q))
    assert desk.waiting() == [b"failed"]


def test_whoever_waited_for_it_waits_for_the_new_run(desk: Desk) -> None:
    number = desk.dispatch("x", fields={"result_ttl": "60000"}).number
    desk.enter("A")
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    again(desk, held)
    [held] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
    assert desk.call(ops.read_result(desk.q, "x", number)).status == "finished"


def test_a_failure_handlers_job_keeps_what_failed(desk: Desk) -> None:
    desk.enter("A", on_failure=True)
    desk.put(b"a")
    desk.fail("A", desk.take("A", 1)[0])
    handlers = Desk(desk.client, desk.prefix)
    handlers.q = QueueKeys(desk.prefix, "Q1", failures=True)
    handlers.enter("A")
    [entry] = handlers.start("A", 1).entries
    failed = entry[entry.index(b"failed") + 1]
    [held] = [int(each) for each in desk.client.smembers(handlers.q.claims("A"))]
    handlers.fail("A", held)
    assert again(handlers, held) == 1
    [entry] = handlers.start("A", 1).entries
    assert entry[entry.index(b"failed") + 1] == failed


def test_only_from_the_list_that_is_meant(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    with desk.nothing_happens():
        assert again(desk, held, undecodable=True) == 0


def test_a_resend_puts_nothing_back_twice(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    call = ops.retry_aside(desk.q, "failed", [held])
    desk.send(call)
    desk.take("A", 1)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 1]


def test_a_late_copy_puts_nothing_back(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    with desk.nothing_happens():
        assert desk.late(ops.retry_aside(desk.q, "failed", [held])) == [b"late"]


def test_a_claim_whose_record_is_gone_is_left_out(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    desk.client.delete(desk.q.dead_letter(held))  # data that somebody deleted
    with desk.nothing_happens():
        assert again(desk, held) == 0


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert again(desk, FENCE) == 0
    assert desk.state() == {}
