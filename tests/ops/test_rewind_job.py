from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.ops.driver import BOOM, FUTURE, Desk, Expires, claim, fields_of, policy, reference
from tests.ops.test_children import PACK, far, note, ran, relay, start
from tests.ops.test_suspend_task import APPROVED, KIB, NAP, active, job_of, send, suspend, workflow, workflow_record
from worqr import ops
from worqr.keys import BatchKeys
from worqr.ops import Child, Rewound, Wait

ONE = Wait(f"job {PACK}", "children", about=PACK)
TOKEN = "t" * 22
__all__ = ["far"]


def step(desk: Desk, held: int, name: str, value: bytes = b"json 1", *, number: int = 0) -> None:
    assert desk.call(ops.save_state(desk.q, "A", held, number, name, value)) == "ok"


def rewind(desk: Desk, key: str, **options: Any) -> Rewound:
    return desk.call(ops.rewind_job(desk.q, "x", key, **options))


def again(desk: Desk, place: str, held: int) -> None:
    """End the claim of x, so that it is in this place."""
    match place:
        case "suspended":
            assert suspend(desk, held, APPROVED).status == "suspended"
        case "waiting":
            desk.retry("A", held)
        case "due":
            desk.retry("A", held, delay_ms=10**9)
        case _:
            desk.fail("A", held)


def entries(desk: Desk, place: str = "job") -> set[str]:
    """The fields of the life of x, without those that count or tell when."""
    found = job_of(desk) if place == "job" else active(desk)
    return {name for name in found if re.match("(step|wait|end|child|try|refused|event):", name)}


def test_an_entry_and_all_later_ones_are_dropped_and_the_job_stands_in_line(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    step(desk, held, "print")
    assert suspend(desk, held, APPROVED, NAP).status == "suspended"
    desk.client.sadd(desk.q.hungry, "B")
    call = ops.rewind_job(desk.q, "x", "print")
    with desk.listening(desk.q.wake_channel("B"), desk.q.job("x")) as heard:
        assert desk.send(call) == [b"ok", 3, 0]
    assert heard == [(":job:x", b"waiting"), (":wake:B", b"1")]
    state = desk.state()
    record = state.pop(":job:x")
    assert re.fullmatch(r"1 \d{13} ", record.pop("at:step:charge"))
    assert record == workflow_record(
        *("waiting", claim(1)),
        queued=held,
        started=1,
        run_at=record["run_at"],
        earlier=1,
        entries=3,
        error_type="",
        error_message="approved, sleep #1",
        rewinds=1,
        saved_size=KIB,
        **{"step:charge": "json 1"},
    )
    assert state == {
        "waiting": [reference("x")],
        ":workers": {"A": f"1 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1", "suspended": "1"}),
    }
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 3, 0]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
        assert rewind(desk, "print") == Rewound("unknown", keys=("charge",))


@pytest.mark.parametrize("place", ["suspended", "waiting", "due", "dead"])
def test_it_runs_again_from_there_wherever_it_is(desk: Desk, place: str) -> None:
    held = workflow(desk)
    for name in ("charge", "print", "ship"):
        step(desk, held, name)
    again(desk, place, held)
    found = rewind(desk, "print")
    assert (found.status, found.dropped, found.cancelled) == ("ok", 3 if place == "suspended" else 2, 0)
    assert entries(desk) == {"step:charge"}
    [held] = desk.take("A", 1)
    assert entries(desk, "active") == {"step:charge"}
    step(desk, held, "print")
    assert active(desk)["at:step:print"].split()[0] == ("5" if place == "suspended" else "4")  # numbers never fall
    assert active(desk)["saved_size"] == str(2 * KIB)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.call(ops.inspect(desk.q)).waiting == 0
    assert not [name for name in desk.state() if name.startswith((":aside", ":failed", ":job"))]


def test_one_that_was_put_back_has_its_counters_at_zero_and_is_told_like_any(desk: Desk) -> None:
    held = workflow(desk, lane=None, tags="a")
    step(desk, held, "charge", b'failed ["Declined"]')
    step(desk, held, "refund")
    desk.fail("A", held)
    call = ops.rewind_job(desk.q, "x", "charge", number=claim(1))
    assert desk.send(call) == [b"ok", 2, 0]
    found = job_of(desk)
    assert not {"failures", "last_failed", "error_type", "reason"} & set(found)
    assert (found["state"], found["started"], found["first"]) == ("waiting", "1", str(claim(1)))
    assert desk.counts()["enqueued"] == 2
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 2, 0]


def test_one_that_runs_is_refused(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    with desk.nothing_happens():
        assert rewind(desk, "charge") == Rewound("active")
        assert rewind(desk, "other") == Rewound("active")
    desk.dispatch("x", b"b", workflow=True, exists="cancel")
    with desk.nothing_happens():
        assert rewind(desk, "charge") == Rewound("none", state="cancelled")
        assert rewind(desk, "charge", number=int(job_of(desk)["last"])) == Rewound("active")  # it is blocked


def test_an_unknown_key_is_refused_with_those_that_there_are(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    step(desk, held, "ask", b'["Late","no"]', number=1)
    step(desk, held, "@errors", b"json []")
    note(desk, held, PACK)
    suspend(desk, held, ONE, APPROVED)
    send(desk, "other")
    with desk.nothing_happens():
        found = rewind(desk, "charge #2")
        assert found == Rewound("unknown", keys=("charge", PACK, APPROVED.key, ONE.key, "ask"))
        assert rewind(desk, "@errors").status == rewind(desk, "other #1").status == "unknown"


def test_what_is_no_workflow_or_has_ended_is_refused(desk: Desk) -> None:
    with desk.nothing_happens():
        assert rewind(desk, "a") == Rewound("none", state="gone")
    desk.dispatch("x")
    with desk.nothing_happens():
        assert rewind(desk, "a") == Rewound("none", state="plain")
    [held] = desk.take(desk.enter("A") or "A", 1)
    step(desk, held, "a")
    desk.fail("A", held)
    with desk.nothing_happens():
        assert rewind(desk, "a") == Rewound("none", state="plain")
    other = desk.run("A", "x", workflow=True, fields={"result_ttl": "60000"})
    step(desk, other, "a")
    desk.call(ops.finish_tasks(desk.q, "A", [other]))
    with desk.nothing_happens():
        assert rewind(desk, "a", life=int(claim(4))).status == "none"


def test_one_whose_id_another_job_has_stays_in_the_dead_letter_queue(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    desk.fail("A", held)
    desk.dispatch("x", workflow=True)
    with desk.nothing_happens():
        assert rewind(desk, "charge", life=claim(1)) == Rewound("taken")
        assert rewind(desk, "charge") == Rewound("unknown")  # of the other job


def test_an_entry_of_which_no_number_is_known_is_refused(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    step(desk, held, "ship")
    again(desk, "suspended", held)
    desk.client.hdel(desk.q.job("x"), "at:step:ship")
    with desk.nothing_happens():
        assert rewind(desk, "charge") == Rewound("unordered", keys=("ship",))


def test_a_wait_that_an_older_version_stored_has_its_place_by_its_end(desk: Desk) -> None:
    held = workflow(desk)
    assert send(desk) == "stored"
    assert suspend(desk, held, APPROVED).status == "ready"
    step(desk, held, "ship")
    assert suspend(desk, held, NAP).status == "suspended"
    desk.client.hdel(desk.q.job("x"), f"at:wait:{APPROVED.key}", f"at:wait:{NAP.key}")
    assert rewind(desk, "ship").dropped == 2
    assert entries(desk) == {f"wait:{APPROVED.key}", f"end:{APPROVED.key}"}


# Waits and their events


def test_the_value_that_a_dropped_wait_has_taken_goes_with_it(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    send(desk, value=b"json " + b"1" * 9 * KIB)
    send(desk, value=b"json 2", again=True)
    send(desk, "other")
    assert suspend(desk, held, APPROVED).status == "ready"
    suspend(desk, held, NAP)
    assert rewind(desk, APPROVED.key).dropped == 2
    assert entries(desk) == {"step:charge", "event:2:approved", "event:1:other"}
    assert job_of(desk)["saved_size"] == str(3 * KIB)
    [held] = desk.take("A", 1)
    [value] = suspend(desk, held, APPROVED).ends.values()
    assert value.endswith(b"json 2")


def test_a_value_that_was_set_aside_goes_with_its_wait(desk: Desk) -> None:
    held = workflow(desk)
    send(desk)
    suspend(desk, held, APPROVED)
    assert desk.call(ops.refuse_event(desk.q, "A", held, APPROVED.key)) == "ok"
    suspend(desk, held, APPROVED)
    assert f"refused:{APPROVED.key}" in entries(desk)
    assert rewind(desk, APPROVED.key).dropped == 1
    assert entries(desk) == set()
    assert job_of(desk)["saved_size"] == "0"


def test_waits_of_one_suspension_have_one_place_and_an_earlier_one_stays_open(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED)
    send(desk, "wake it")
    desk.client.zadd(desk.q.suspended, {"x": 1})
    desk.call(ops.end_wait(desk.q, "x", "none"))
    other = Wait("wait for other", "event", "other", in_ms=10**9)
    send(desk, "approved")
    [held] = desk.take("A", 1)
    assert suspend(desk, held, other, NAP).status == "suspended"
    assert rewind(desk, other.key).dropped == 1
    found = job_of(desk)
    assert entries(desk) == {f"wait:{APPROVED.key}", f"end:{APPROVED.key}", f"wait:{NAP.key}", "event:1:wake it"}
    assert found[f"wait:{NAP.key}"] == f"sleep T {FUTURE}\n\n"
    [held] = desk.take("A", 1)
    assert active(desk)["open"] == "\x91\xa8sleep #1"


def test_a_wait_has_its_place_from_its_first_suspension_on(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED, NAP)
    assert re.fullmatch(r"1 \d{13} ", desk.state()[":job:x"][f"at:wait:{APPROVED.key}"])
    send(desk, "other")
    desk.call(ops.end_wait(desk.q, "x", NAP.key))
    [held] = desk.take("A", 1)
    step(desk, held, "charge")
    suspend(desk, held, APPROVED)
    assert rewind(desk, "charge").dropped == 1
    [held] = desk.take("A", 1)
    assert f"wait:{APPROVED.key}" in active(desk)
    suspend(desk, held, Wait("new", "event", "new"))
    assert [name for name in desk.state()[":job:x"] if name.startswith("at:wait:")] == [
        f"at:wait:{NAP.key}",
        "at:wait:new",
    ]


def test_one_whose_batch_is_being_cancelled_stays_in_the_dead_letter_queue(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    desk.fail("A", held)
    desk.client.hset(f"{desk.q.base}:aside:{held}", "batch", f"{TOKEN}\n{desk.q.base}\nb\n1\n")
    desk.client.hset(BatchKeys(desk.q).part(TOKEN), mapping={"v": 1, "cancel_reason": "enough"})
    with desk.nothing_happens():
        assert rewind(desk, "charge") == Rewound("closing")


def test_the_waits_between_the_tries_of_a_step_go_with_it(desk: Desk) -> None:
    for later in (False, True):
        held = workflow(desk)
        step(desk, held, "ask", b'["Late","no"]', number=1)
        pause = Wait("retry of ask #1", "sleep", at_ms=1)
        assert suspend(desk, held, pause).status == "ready"
        if later:
            step(desk, held, "ask", b'failed ["Late","no","",""]')
        suspend(desk, held, APPROVED)
        assert rewind(desk, "ask").dropped == (3 if later else 2)
        assert entries(desk) == (set() if later else {f"wait:{APPROVED.key}"})
        desk.call(ops.cancel_job(desk.q, "x", "why"))


def test_a_step_of_the_same_name_is_numbered(desk: Desk) -> None:
    held = workflow(desk)
    for name in ("charge", "charge #2", "charge #3"):
        step(desk, held, name)
    again(desk, "waiting", held)
    assert rewind(desk, "charge #2").dropped == 2
    assert entries(desk) == {"step:charge"}


def test_a_strict_lane_is_held_as_before(desk: Desk) -> None:
    rules = msgspec.msgpack.encode({"strict": True})
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, lanes=rules))
    desk.dispatch("x", workflow=True, lane="gold")
    desk.dispatch("y", lane="gold")
    [held] = desk.take("A", 1)
    step(desk, held, "charge")
    suspend(desk, held, APPROVED)
    assert desk.start("A", 2).entries == []
    assert rewind(desk, "charge").status == "ok"
    [entry] = desk.start("A", 2).entries
    assert fields_of(entry)["id"] == "x"
    suspend(desk, int(active(desk)["claim"]), NAP)
    assert desk.start("A", 2).entries == []


# Children


async def test_a_dropped_child_that_runs_is_cancelled_and_its_end_is_ignored(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    note(desk, held, PACK)
    start(far, desk)
    child = ran(far)
    suspend(desk, held, ONE)
    assert rewind(desk, PACK) == Rewound("ok", 2, 1)
    assert entries(desk) == {"step:charge"}
    await relay(desk, far)
    assert far.call(ops.reconcile(far.q, "B")) == ([child], [])
    far.call(ops.stop_tasks(far.q, "B", [child]))
    [held] = desk.take("A", 1)
    [noted] = note(desk, held, f"{PACK} ~1").children
    assert (noted.after, noted.end) == (0, None)
    assert start(far, desk, f"{PACK} ~1") == "created"
    with_old = desk.state()[":active:x"]
    await relay(desk, far)
    assert desk.state()[":active:x"] == with_old
    assert not [key for key in desk.all_keys() if b"outbox" in key]


async def test_a_dropped_child_that_was_never_dispatched_does_not_start(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    life = active(desk)["life"]
    again(desk, "waiting", held)
    assert rewind(desk, PACK) == Rewound("ok", 1, 1)
    await relay(desk, far)
    assert start(far, desk, life=life) == "unchanged"  # late, of a worker that was declared dead
    await relay(desk, far)
    assert not far.call(ops.inspect(far.q)).waiting
    assert entries(desk) == set()


@pytest.mark.parametrize("outcome", ["finished", "failed", "large"])
async def test_a_dropped_child_that_has_ended_is_not_cancelled(desk: Desk, far: Desk, outcome: str) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    size = active(desk)["saved_size"]
    start(far, desk)
    child = ran(far)
    suspend(desk, held, ONE)
    if outcome == "failed":
        far.call(ops.fail_task(far.q, "B", child, BOOM))
    else:
        value = b"x" * (10 if outcome == "finished" else 100) * KIB
        far.call(ops.finish_tasks(far.q, "B", [child], {child: ("bytes", value)}))
    await relay(desk, far)
    assert rewind(desk, PACK) == Rewound("ok", 2, 0)
    assert (entries(desk), size, job_of(desk)["saved_size"]) == (set(), str(KIB), "0")
    assert not [key for key in desk.all_keys() if b"outbox" in key]


async def test_children_that_were_started_together_have_one_place(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    start(far, desk)
    start(far, desk, "other")
    suspend(desk, held, Wait("2 jobs", "children", about=f"{PACK}\nother"))
    assert rewind(desk, PACK) == Rewound("ok", 2, 1)
    assert entries(desk) == {"child:other"}
    await relay(desk, far)
    assert far.call(ops.inspect(far.q)).waiting == 1


@pytest.mark.parametrize("value", ["nonsense", "0 0 {Q}\n", "\xff"])
def test_odd_values_of_others_cost_only_themselves(desk: Desk, value: str) -> None:
    held = workflow(desk)
    desk.call(ops.note_children(desk.q, "A", held, [Child("c", "p:{Q2}", "x/c")]))
    suspend(desk, held, APPROVED)
    for name in ("child:c", f"wait:{APPROVED.key}", "open", "saved_size", "rewinds", "last_failed"):
        desk.client.hset(desk.q.job("x"), name, value)
    assert rewind(desk, "c") == Rewound("ok", 2, 0)
    assert (entries(desk), job_of(desk)["rewinds"]) == (set(), "1")
    assert desk.take("A", 1)


def test_a_step_whose_name_begins_with_an_at_sign_is_dropped_too(desk: Desk) -> None:
    held = workflow(desk)
    step(desk, held, "charge")
    step(desk, held, "@ship")
    again(desk, "waiting", held)
    assert rewind(desk, "charge").status == "ok"
    assert not {"step:charge", "step:@ship"} & entries(desk)
