from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import redis

from tests.ops.driver import BOOM, PAST, Desk, fields_of
from tests.ops.test_suspend_task import KIB, active, job_of, suspend, workflow
from worqr import ops
from worqr.keys import BatchKeys, QueueKeys
from worqr.ops import Child, NotedChild, Wait
from worqr.records import RemoteError

PACK = "pack [7]"
BOTH = Wait("gather #1", "children", about=f"{PACK}\nother")
ONE = Wait("gather #1", "children", about=PACK)


@pytest.fixture
def far(desk: Desk) -> Desk:
    """The queue of the children, on the same server."""
    other = Desk(desk.client, desk.prefix)
    other.q = QueueKeys(desk.prefix, "Q2")
    other.numbers, other.producer = desk.numbers, desk.producer
    other.set_fence()
    return other


def note(desk: Desk, held: int, *keys: str, base: str = "", worker: str = "A") -> ops.NotedChildren:
    children = [Child(key, base or QueueKeys(desk.prefix, "Q2").base, f"x/{key}") for key in keys]
    return desk.call(ops.note_children(desk.q, worker, held, children))


def start(
    far: Desk, parent: Desk, key: str = PACK, *, after: int = 0, life: str = "", above: str = "[[]]", **options: Any
) -> str:
    """Dispatch a child of the job x; return the outcome."""
    life = life or parent_record(parent)["life"]
    option = {"base": parent.q.base, "id": "x", "life": life, "key": key, "after": str(after), "above": above}
    return far.dispatch(f"x/{key}", parent=option, **options).outcome


def parent_record(desk: Desk) -> dict[str, str]:
    state = desk.state()
    return next(value for key in (":active:x", ":job:x") if (value := state.get(key)))


async def relay(desk: Desk, *others: Desk) -> None:
    """Deliver all messages, as the leader does."""
    for each in (desk, *others, desk, *others):
        await desk.deliver(each.q)


def ran(far: Desk, key: str = PACK, **options: Any) -> int:
    """The claim of B on a child."""
    far.enter("B")
    [held] = far.take("B", 1)
    assert options == {}
    return held


async def with_a_failed_child(desk: Desk, far: Desk) -> int:
    """The claim of a workflow that knows that its job has failed."""
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    far.call(ops.fail_task(far.q, "B", ran(far), BOOM))
    await relay(desk, far)
    return held


def test_children_are_noted_before_they_are_dispatched(desk: Desk) -> None:
    held = workflow(desk)
    before = desk.state()
    children = [Child("a", "p:{Q2}", "x/a"), Child("b", "p:{Q2}", "x/b")]
    call = ops.note_children(desk.q, "A", held, children)
    assert desk.send(call) == [b"ok", [b"0", b"p:{Q2}", None], [b"0", b"p:{Q2}", None]]
    times = {name: value for name, value in desk.state()[":active:x"].items() if name.startswith("at:")}
    assert sorted(times) == ["at:child:a", "at:child:b"]
    assert all(re.fullmatch(r"1 \d{13} ", value) for value in times.values())
    before[":active:x"] |= {
        **times,
        "child:a": "0 0 p:{Q2}\nx/a",
        "child:b": "0 0 p:{Q2}\nx/b",
        "saved_size": str(2 * KIB),
        "entries": "1",
    }
    assert desk.state() == before
    with desk.nothing_changes():
        assert desk.call(call).children == [NotedChild(0, "p:{Q2}", None)] * 2


def test_a_raw_task_that_starts_a_child_becomes_a_workflow(desk: Desk) -> None:
    [raw] = desk.hold("A", b"a")
    assert note(desk, raw, PACK).status == "ok"
    assert desk.state()[f":active:@{raw}"]["life"] == str(raw)


@pytest.mark.parametrize("how", ["other", "swept", "finished", "foreign", "empty"])
def test_only_the_run_that_holds_the_claim_notes(desk: Desk, how: str) -> None:
    held = workflow(desk)
    match how:
        case "swept":
            desk.call(ops.fail_worker(desk.q, "A"))
        case "finished":
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case "foreign":
            desk.client.delete(desk.q.active("x"))
            desk.client.set(desk.q.active("x"), "foreign")
        case "empty":
            desk.wipe()
        case _:
            pass
    with desk.nothing_changes():
        assert note(desk, held, PACK, worker="B" if how == "other" else "A").status == "lost"


def test_a_child_for_which_the_record_has_no_room_is_refused(desk: Desk) -> None:
    held = workflow(desk)
    assert note(desk, held, *map(str, range(1000))).status == "ok"
    with desk.nothing_changes():
        assert note(desk, held, *map(str, range(1000, 1025))).status == "full"
    assert note(desk, held, *map(str, range(1000, 1024))).status == "ok"
    desk.client.hincrby(desk.q.active("x"), "saved_size", KIB)  # as waits do that have ended
    assert note(desk, held, "7").status == "ok"  # a later run that starts its jobs again
    with desk.nothing_changes():
        assert note(desk, held, "7", "1024").status == "full"


@pytest.mark.parametrize("child", [Child("", "p:{Q}", "a"), Child("a", "b", "a"), Child("a", "p:{Q}", "a\n")])
def test_what_is_no_child_is_an_error(desk: Desk, child: Child) -> None:
    held = workflow(desk)
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="1 to 1000 children"):
        desk.call(ops.note_children(desk.q, "A", held, [child]))


# A child and its end


async def test_the_end_of_a_child_wakes_its_parent_with_the_result(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    assert start(far, desk) == "created"
    assert suspend(desk, held, ONE).status == "suspended"
    child = ran(far)
    far.call(ops.finish_tasks(far.q, "B", [child], {child: ("json", b'"label"')}))
    await relay(desk, far)
    assert BatchKeys(far.q).outbox not in [key.decode() for key in desk.all_keys()]
    [entry] = desk.start("A", 1).entries
    found = fields_of(entry)
    assert found[f"end:{PACK}"] == f'finished {child} 2 json "label"'
    assert found["end:gather #1"].startswith("ended ")
    assert note(desk, int(found["claim"]), PACK).children == [NotedChild(0, far.q.base, found[f"end:{PACK}"].encode())]


@pytest.mark.parametrize("how", ["fail", "cancel", "cancel waiting", "lost", "expired"])
async def test_every_end_is_told(desk: Desk, far: Desk, how: str) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    options: dict[str, Any] = {"expires": "0"} if how == "expired" else {}
    start(far, desk, **options)
    far.enter("B")
    if how in ("fail", "cancel", "lost"):
        child = ran(far)
    match how:
        case "fail":
            far.call(ops.fail_task(far.q, "B", child, BOOM))
        case "cancel":
            far.call(ops.cancel_job(far.q, f"x/{PACK}", "why"))
            far.call(ops.stop_tasks(far.q, "B", [child]))
        case "cancel waiting":
            far.call(ops.cancel_job(far.q, f"x/{PACK}", "why"))
        case "lost":
            far.client.hdel(far.q.active(f"x/{PACK}"), "task")
            far.call(ops.stop_tasks(far.q, "B", [child]))
        case _:
            far.start("B", 1)
    await relay(desk, far)
    ready = suspend(desk, held, ONE)
    assert ready.status == "ready"
    found: Any = desk.client.hget(desk.q.active("x"), f"end:{PACK}")
    outcome, _, _, value = found.split(b" ", 3)
    if how in ("fail", "expired"):
        assert outcome == b"failed"
        assert msgspec.msgpack.decode(value)[0] == (BOOM.type if how == "fail" else "Expired")
    else:
        words = (b"gone", b"") if how == "lost" else (b"cancelled", b"why")
        assert (outcome, value) == words


async def test_a_child_may_be_in_the_queue_of_its_parent(desk: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, base=desk.q.base)
    assert start(desk, desk) == "created"
    suspend(desk, held, ONE)
    [child] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [child], {child: ("none", b"")}))
    await relay(desk)
    assert job_of(desk)["state"] == "waiting"


async def test_it_wakes_when_all_have_ended(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    for key in (PACK, "other"):
        start(far, desk, key)
    suspend(desk, held, BOTH)
    states = []
    for _ in range(2):
        child = ran(far)
        far.call(ops.finish_tasks(far.q, "B", [child]))
        await relay(desk, far)
        states.append(job_of(desk)["state"])
    assert states == ["suspended", "waiting"]


async def test_the_first_of_several_wakes_it_and_stays_the_first(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    for key in (PACK, "other"):
        start(far, desk, key)
    race = Wait("race", "first", about=f"{PACK}\nother")
    assert suspend(desk, held, race).status == "suspended"
    children = ran(far), ran(far, "other")
    far.call(ops.finish_tasks(far.q, "B", [children[1]]))
    await relay(desk, far)
    assert job_of(desk)["state"] == "waiting"
    [held] = desk.take("A", 1)
    won = active(desk)["end:race"]
    assert won.split(" ", 3)[::3] == ["value", "other"]
    far.call(ops.finish_tasks(far.q, "B", [children[0]]))
    await relay(desk, far)
    assert suspend(desk, held, race).status == "ready"
    assert active(desk)["end:race"] == won


async def test_a_winner_that_is_tried_again_has_won_nothing(desk: Desk, far: Desk) -> None:
    held = await with_a_failed_child(desk, far)
    race = Wait("race", "first", about=PACK, in_ms=1000)
    assert suspend(desk, held, race).status == "ready"
    kept = int(active(desk)["saved_size"])
    desk.client.hset(desk.q.active("x"), "wait:race", f"first {PAST} {PAST}\n\n")  # its time is over since
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert not {f"end:{PACK}", "end:race"} & job_of(desk).keys()
    assert int(job_of(desk)["saved_size"]) < kept
    [held] = desk.take("A", 1)
    assert suspend(desk, held, race).status == "suspended"  # it begins anew


def end(
    desk: Desk, number: int, *, life: str = "", key: str = PACK, source: str = "", outcome: str = "finished"
) -> None:
    life = life or parent_record(desk)["life"]
    source = source or QueueKeys(desk.prefix, "Q2").base
    desk.call(ops.store_end(desk.q, source, "x", life, key, number, outcome, b"none "))


def test_ready_brings_the_ends_of_the_children_too(desk: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    end(desk, held + 1)
    assert suspend(desk, held, ONE, BOTH._replace(key="both")).ends.keys() == {f"end:{ONE.key}", f"end:{PACK}"}
    assert suspend(desk, held, BOTH._replace(key="both")).status == "suspended"


def test_the_first_end_counts_and_no_other(desk: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    with desk.nothing_changes():
        end(desk, 7, life="8")  # another life
        end(desk, 7, key="unknown")
        end(desk, 7, source="p:{Q3}")  # another queue has forged it
        end(desk, 0)
    end(desk, 7)
    with desk.nothing_changes():
        end(desk, 8, outcome="failed")
    assert active(desk)[f"end:{PACK}"].split()[0] == "finished"
    desk.wipe()
    with desk.nothing_changes():
        end(desk, 7, life="8")


async def test_a_large_result_is_told_by_its_size(desk: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, base=desk.q.base)
    start(desk, desk)
    [child] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [child], {child: ("bytes", b"x" * 64 * KIB)}))
    await relay(desk)
    assert active(desk)[f"end:{PACK}"].split()[::3] == ["large", str(64 * KIB + 6)]


@pytest.mark.parametrize("outcome", ["finished", "failed", "cancelled", "gone"])
def test_a_record_that_is_full_takes_an_end_that_needs_no_room(desk: Desk, outcome: str) -> None:
    """Waits that have ended may count more than a job may keep."""
    held = workflow(desk)
    note(desk, held, PACK)
    desk.client.hset(desk.q.active("x"), "saved_size", 1030 * KIB)
    end(desk, held + 1, outcome=outcome)
    assert active(desk)[f"end:{PACK}"] == f"{outcome} T 1 none "
    assert active(desk)["saved_size"] == str(1030 * KIB)


def test_a_failure_or_a_reason_is_cut_for_which_the_record_has_no_room(desk: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other", "third")
    desk.client.hset(desk.q.active("x"), "saved_size", 1023 * KIB)
    ends = {
        PACK: ("failed", msgspec.msgpack.encode(("m.Boom", "no" * 4 * KIB, "File" * KIB, ""))),
        "other": ("cancelled", b"why" * KIB),
        "third": ("failed", b"\xc1" * 4 * KIB),
    }
    for key, (outcome, value) in ends.items():
        call = ops.store_end(
            desk.q, QueueKeys(desk.prefix, "Q2").base, "x", active(desk)["life"], key, held + 1, outcome, value
        )
        desk.call(call)
    found = {key: active(desk)[f"end:{key}"].split(" ", 3)[::3] for key in ends}
    assert found["other"] == ["cancelled", ("why" * KIB)[:500]]
    told = [msgspec.msgpack.decode(found[key][1].encode("latin-1")) for key in (PACK, "third")]
    assert (found[PACK][0], told) == ("failed", [["m.Boom", "no" * 250, "", ""], ["", "", "", ""]])
    assert active(desk)["saved_size"] == str(1023 * KIB)


async def test_a_late_dispatch_of_a_child_that_has_ended_tells_the_end_again(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    assert start(far, desk) == "unchanged"
    child = ran(far)
    assert start(far, desk) == "unchanged"
    far.call(ops.finish_tasks(far.q, "B", [child]))
    await relay(desk, far)
    desk.client.hdel(desk.q.active("x"), f"end:{PACK}")
    assert start(far, desk) == "unchanged"
    await relay(desk, far)
    assert f"end:{PACK}" in active(desk)
    assert start(far, desk, after=child) == "created"  # another try


async def test_a_failed_child_is_remembered_as_long_as_its_record(desk: Desk, far: Desk) -> None:
    await with_a_failed_child(desk, far)
    desk.client.hdel(desk.q.active("x"), f"end:{PACK}")
    far.client.delete(far.q.ended(f"x/{PACK}"))
    assert start(far, desk) == "unchanged"
    await relay(desk, far)
    assert active(desk)[f"end:{PACK}"].startswith("failed ")


def test_an_id_that_is_not_of_this_parent_is_a_duplicate(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    far.dispatch(f"x/{PACK}")
    assert start(far, desk) == "duplicate"


@pytest.mark.parametrize("name", ["base", "id", "life", "key", "after"])
@pytest.mark.parametrize("value", [7, "", "a\nb", None])
def test_what_is_no_parent_is_an_error(far: Desk, name: str, value: object) -> None:
    option: dict[str, object] = {"base": "p:{Q}", "id": "x", "life": "1", "key": "k", "after": "0", name: value}
    with far.nothing_changes(), pytest.raises(redis.ResponseError, match="the option parent"):
        far.dispatch("c", parent=option)


# Cancels


@pytest.mark.parametrize("place", ["active", "suspended"])
async def test_a_cancelled_parent_cancels_its_children(desk: Desk, far: Desk, place: str) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other", "ended")
    start(far, desk)
    start(far, desk, "other")
    child = ran(far)
    end(desk, 7, key="ended")
    if place == "suspended":
        suspend(desk, held, BOTH)
    desk.call(ops.cancel_job(desk.q, "x", "enough"))
    if place == "active":
        desk.call(ops.stop_tasks(desk.q, "A", [held]))
    await relay(desk, far)
    assert far.call(ops.reconcile(far.q, "B")) == ([child], [])
    assert far.call(ops.inspect(far.q)).waiting == 0
    far.call(ops.stop_tasks(far.q, "B", [child]))
    await relay(desk, far)
    assert not [key for key in desk.all_keys() if b"outbox" in key]


async def test_a_child_whose_parent_was_cancelled_before_does_not_start(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    life = parent_record(desk)["life"]
    note(desk, held, PACK)
    desk.call(ops.cancel_job(desk.q, "x", "enough"))
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    await relay(desk, far)
    assert start(far, desk, life=life) == "unchanged"
    assert far.start("B", 1).entries == []
    assert start(far, desk, life="9") == "created"  # that of a later job of the id


def test_a_cancel_of_another_life_or_queue_changes_nothing(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    life = parent_record(desk)["life"]
    for source, of_life in ((desk.q.base, "9"), ("p:{Q3}", life)):
        far.call(ops.cancel_child(far.q, source, "x", of_life, f"x/{PACK}", "why"))
        assert far.state(":counts")[f":job:x/{PACK}"]["state"] == "waiting"


# Looks


def looked_at(desk: Desk) -> int:
    """The time in ms at which the leader looks at the job x."""
    found: Any = desk.client.zscore(desk.q.suspended, "x")
    return int(found)


async def test_a_suspended_parent_looks_for_its_children(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    start(far, desk)
    suspend(desk, held, BOTH)
    assert 590_000 < looked_at(desk) - desk.now() <= 600_000
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    desk.call(ops.promote_due(desk.q))
    assert 2_690_000 < looked_at(desk) - desk.now() <= 2_700_000
    await relay(desk, far)
    found = job_of(desk)
    assert found["state"] == "suspended"  # it does not wake for a child that still runs
    assert found["end:other"].startswith("gone ")
    assert f"end:{PACK}" not in found
    far.call(ops.finish_tasks(far.q, "B", [ran(far)]))
    far.client.delete(BatchKeys(far.q).outbox)  # the message is lost
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    desk.call(ops.promote_due(desk.q))
    await relay(desk, far)
    assert job_of(desk)["state"] == "waiting"
    assert start(far, desk, "other") == "unchanged"  # a lost child fails: it is not started again


# Put back


async def test_an_end_reaches_a_parent_in_the_dead_letter_queue(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    desk.fail("A", held)
    child = ran(far)
    life = desk.state()[f":aside:{held}"]["life"]
    assert life
    far.call(ops.finish_tasks(far.q, "B", [child]))
    await relay(desk, far)
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert job_of(desk)[f"end:{PACK}"].startswith("finished ")


async def failed_by_its_child(desk: Desk, far: Desk, error: RemoteError, *, compensated: bool) -> tuple[int, int]:
    """A workflow that failed after its job. Return both claims. `compensated`: it has stored a step in between."""
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    child = ran(far)
    far.call(ops.fail_task(far.q, "B", child, error))
    await relay(desk, far)
    if compensated:
        desk.call(ops.save_state(desk.q, "A", held, 0, "refund", b"none "))
    desk.fail("A", held)
    return held, child


@pytest.mark.parametrize("compensated", [False, True])
async def test_a_failed_child_that_was_put_back_before_its_parent_ends_once_more(
    desk: Desk, far: Desk, compensated: bool
) -> None:
    held, child = await failed_by_its_child(desk, far, RemoteError("Boom", "x" * 4 * KIB, ""), compensated=compensated)
    assert far.call(ops.retry_aside(far.q, "failed", [child])) == 1
    [later] = far.take("B", 1)
    far.call(ops.finish_tasks(far.q, "B", [later]))
    await relay(desk, far)
    with desk.nothing_changes():
        end(
            desk, later + 1, life=desk.state()[f":aside:{held}"]["life"], outcome="failed"
        )  # the first end that is no failure stays
    far.client.delete(f"{far.q.base}:ended:x/{PACK}")  # an hour later
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    found = job_of(desk)
    assert found[f"end:{PACK}"].startswith("failed " if compensated else "finished ")
    assert compensated or found["saved_size"] == str(KIB)


async def test_a_failed_child_that_was_put_back_while_its_parent_waited_for_others_ends_once(
    desk: Desk, far: Desk
) -> None:
    held = workflow(desk)
    note(desk, held, PACK, "other")
    start(far, desk)
    suspend(desk, held, BOTH)
    child = ran(far)
    far.call(ops.fail_task(far.q, "B", child, BOOM))
    await relay(desk, far)
    assert far.call(ops.retry_aside(far.q, "failed", [child])) == 1
    far.call(ops.finish_tasks(far.q, "B", far.take("B", 1)))
    await relay(desk, far)
    assert job_of(desk)[f"end:{PACK}"].startswith("failed ")  # the first end counts
    end(desk, child, key="other")
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    left: Any = far.client.pttl(f"{far.q.base}:ended:x/{PACK}")
    assert left > 29 * 86_400_000
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    [held] = desk.take("A", 1)
    [noted] = note(desk, held, PACK).children
    assert start(far, desk, after=noted.after) == "unchanged"
    assert far.client.pttl(f"{far.q.base}:ended:x/{PACK}") > 29 * 86_400_000
    await relay(desk, far)
    assert active(desk)[f"end:{PACK}"].startswith("finished ")


@pytest.mark.parametrize("compensated", [False, True])
async def test_a_failed_child_is_tried_again_unless_something_was_stored_after_it(
    desk: Desk, far: Desk, compensated: bool
) -> None:
    held, child = await failed_by_its_child(desk, far, BOOM, compensated=compensated)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    found = job_of(desk)
    assert (f"end:{PACK}" in found) == compensated
    [held] = desk.take("A", 1)
    [noted] = note(desk, held, PACK).children
    if compensated:
        assert noted.end is not None
        return
    assert (noted, found[f"child:{PACK}"].split()[:2]) == (NotedChild(child, far.q.base, None), [str(child), "1"])
    end(desk, child, outcome="failed")  # a late copy of the end that was dropped
    assert f"end:{PACK}" not in active(desk)
    assert start(far, desk, after=child) == "created"


async def test_a_failed_child_is_put_back_with_its_parent_and_keeps_what_it_has_saved(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk, workflow=True, lifetime="60000")
    child = ran(far)
    far.call(ops.save_state(far.q, "B", child, 0, "print", b"json 7"))
    far.call(ops.save_state(far.q, "B", child, 0, "weigh", b'failed ["Broken","no","",""]'))
    far.fail("B", child)
    await relay(desk, far)
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    [held] = desk.take("A", 1)
    assert note(desk, held, PACK).children == [NotedChild(child, far.q.base, None)]
    before = far.state()[f":aside:{child}"]
    assert start(far, desk, after=child) == "created"
    assert start(far, desk, after=child) == "unchanged"
    back = far.state()[f":job:x/{PACK}"]
    for name in ("step:print", "life", "lives_until", "first", "parent", "above"):
        assert back[name] == before[name]
    assert "step:weigh" not in back
    assert back["state"] == "waiting"
    assert "failures" not in back
    assert not far.client.exists(f"{far.q.base}:aside:{child}", far.q.failed, f"{far.q.base}:aside")
    [again] = far.take("B", 1)
    far.call(ops.finish_tasks(far.q, "B", [again]))
    await relay(desk, far)
    assert active(desk)[f"end:{PACK}"].startswith("finished ")


@pytest.mark.parametrize(
    "what", ["dropped", "over", "another life", "another number", "another id", "no task", "no record"]
)
async def test_a_failed_child_that_cannot_be_put_back_starts_anew(desk: Desk, far: Desk, what: str) -> None:
    held, child = await failed_by_its_child(desk, far, BOOM, compensated=False)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    [held] = desk.take("A", 1)
    note(desk, held, PACK)
    aside, life = f"{far.q.base}:aside:{child}", parent_record(desk)["life"]
    match what:
        case "dropped":
            assert far.call(ops.drop_aside(far.q, "failed", [child])) == 1
        case "over":
            far.client.hset(aside, "lives_until", str(PAST))
        case "another life":
            life = str(int(life) + 1)
        case "another number":
            far.client.rename(aside, f"{far.q.base}:aside:{child + 1}")
        case "no task":
            far.client.hdel(aside, "task")
        case "no record":
            far.client.delete(aside)
            far.client.set(aside, "of others")
        case _:
            far.client.hset(aside, "id", "another")
    assert start(far, desk, after=child, life=life) == "created"
    assert far.state()[f":job:x/{PACK}"]["first"] > str(child)


async def test_a_child_that_failed_before_its_parent_was_suspended_is_tried_again(desk: Desk, far: Desk) -> None:
    held = await with_a_failed_child(desk, far)
    assert suspend(desk, held, ONE).status == "ready"
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert f"end:{PACK}" not in job_of(desk)


@pytest.mark.parametrize("more", range(9, 17))
async def test_a_failed_child_of_which_an_older_version_has_stored_no_time_is_tried_again(
    desk: Desk, far: Desk, more: int
) -> None:
    """With some numbers of fields, there is no room in the table for another one."""
    held, _ = await failed_by_its_child(desk, far, BOOM, compensated=False)
    record = desk.q.dead_letter(held)
    desk.client.hdel(record, f"at:child:{PACK}")
    desk.client.hset(record, mapping={f"event:{n}:approved": "none " for n in range(more)})
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert f"end:{PACK}" not in job_of(desk)


async def test_a_wait_for_jobs_of_which_one_is_tried_again_is_open_again(desk: Desk, far: Desk) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    suspend(desk, held, ONE)
    child = ran(far)
    far.call(ops.fail_task(far.q, "B", child, BOOM))
    await relay(desk, far)
    [held] = desk.take("A", 1)
    kept = int(active(desk)["saved_size"])
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    [held] = desk.take("A", 1)
    note(desk, held, PACK)
    assert suspend(desk, held, ONE).status == "suspended"
    assert int(job_of(desk)["saved_size"]) == kept - KIB
    end(desk, child + 1)
    [held] = desk.take("A", 1)
    assert active(desk)[f"end:{ONE.key}"].startswith("ended ")


def test_a_failed_step_is_tried_again_unless_something_was_stored_after_it(desk: Desk) -> None:
    for later in (False, True):
        held = workflow(desk)
        desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b'failed ["Declined"]'))
        if later:
            desk.call(ops.save_state(desk.q, "A", held, 0, "refund", b"none "))
        desk.fail("A", held)
        desk.call(ops.retry_aside(desk.q, "failed", [held]))
        assert ("step:charge" in job_of(desk)) == later
        desk.call(ops.cancel_job(desk.q, "x", "why"))


def test_a_step_that_is_tried_again_waits_anew_between_its_tries(desk: Desk) -> None:
    held = workflow(desk)
    desk.call(ops.save_state(desk.q, "A", held, 1, "charge", b'["Late","no"]'))
    for step in ("charge", "charge #2"):
        assert suspend(desk, held, Wait(f"retry of {step} #1", "sleep", at_ms=1)).status == "ready"
    desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b'failed ["Late","no","",""]'))
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    found = job_of(desk)
    assert {name for name in found if name.startswith(("wait:", "end:"))} == {
        "wait:retry of charge #2 #1",
        "end:retry of charge #2 #1",
    }
    assert found["saved_size"] == str(KIB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (f"child:{PACK}", "nonsense"),
        (f"child:{PACK}", "-1 0 p:{Q2}\nx"),
        ("entries", "x"),
        ("saved_size", "-1"),
        ("open", "\xc1"),
    ],
)
async def test_odd_values_of_others_cost_only_themselves(desk: Desk, far: Desk, field: str, value: str) -> None:
    held = workflow(desk)
    note(desk, held, PACK)
    start(far, desk)
    suspend(desk, held, ONE)
    desk.client.hset(desk.q.job("x"), field, value)
    far.call(ops.finish_tasks(far.q, "B", [ran(far)]))
    await relay(desk, far)
    desk.call(ops.cancel_job(desk.q, "x", "why"))
    far.client.hset(far.q.job("odd"), mapping={"state": "waiting", "queued": 9 * 10**15, "parent": value, "task": "x"})
    far.call(ops.cancel_job(far.q, "odd", "why"))
    await relay(desk, far)


@pytest.mark.parametrize(
    "message",
    [
        [b"ended", b"p:{Q1}"],
        [b"ended", b"p:{Q1}", b"x", b"1", b"k", b"no number", b"finished", b"none "],
        [b"cancel_child", b"p:{Q1}", b"x", b"1", b"why"],
        [b"look", b"p:{Q1}", b"x", b"1", b"k", b"-1", b"c"],
    ],
)
async def test_a_message_that_cannot_be_read_is_dropped(
    desk: Desk, message: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    packed = msgspec.msgpack.encode([part.decode() for part in message])
    desk.client.hset(BatchKeys(desk.q).outbox, "topic", packed)
    await relay(desk)
    assert "cannot be read, and is dropped" in caplog.text
    assert BatchKeys(desk.q).outbox not in [key.decode() for key in desk.all_keys()]


def test_of_a_step_of_a_workflow_it_is_stored_when_and_for_how_long_once(desk: Desk) -> None:
    held = workflow(desk)
    desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"json 1", took=1500))
    desk.call(ops.save_state(desk.q, "A", held, 0, "ship", b"none "))
    kept = desk.state()[":active:x"]
    assert re.fullmatch(r"1 \d{13} 1500", kept["at:step:charge"])
    assert re.fullmatch(r"2 \d{13} ", kept["at:step:ship"])
    with desk.nothing_changes():  # a replay, or a resend
        desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"json 1", took=9))


def test_a_child_knows_what_is_above_it_also_after_a_put_back(desk: Desk, far: Desk) -> None:
    note(desk, workflow(desk), PACK)
    with pytest.raises(Exception, match="parent"):
        start(far, desk, above="x" * 16_385)
    start(far, desk, above='[["q","lane"]]')
    far.enter("B")
    child = ran(far)
    far.fail("B", child)
    far.call(ops.retry_aside(far.q, "failed", [child]))
    assert far.state()[f":job:x/{PACK}"]["above"] == '[["q","lane"]]'
