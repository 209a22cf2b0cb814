"""Follow-ups of one job: what is held, and what each end of the job does with it, here and in another queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.ops.batches import TOKEN, delivery, messages, relay
from tests.ops.driver import FUTURE, Desk, fields_of
from tests.ops.test_batches import far
from worqr import ops
from worqr.batches import EndedJob, ended_job_of
from worqr.keys import BatchKeys, QueueKeys

DAY = 86_400_000
HOUR = 3_600_000


def hold(desk: Desk, there: QueueKeys, *kinds: str, token: str = TOKEN) -> dict[str, str]:
    """Hold follow-ups in a queue; return the option of the dispatch."""
    facts: dict[str, bytes | str] = {"meta": '{"a":"b"}'}
    for kind in kinds:
        facts |= {f"{kind}_options": msgspec.msgpack.encode({}), f"{kind}_task": kind.encode()}
    desk.call(ops.hold_follow_ups(there, token, desk.q.base, token, facts))
    return {"token": token, **dict.fromkeys(kinds, there.base)}


def ttl(desk: Desk, there: QueueKeys) -> int:
    return int(desk.client.pttl(BatchKeys(there).follow_ups(TOKEN)))


def ended_in(desk: Desk, there: QueueKeys, id: str) -> EndedJob | None:
    return ended_job_of(desk.client.hgetall(there.job(id)))


def test_here_the_same_script_enqueues_it_and_forgets_it_after_an_hour(desk: Desk) -> None:
    held = desk.run("A", "x", follow=hold(desk, desk.q, "then", "otherwise"))
    assert ttl(desk, desk.q) == -1
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"[1]")}))
    follow = f"@{TOKEN}.then.{held}"
    found = ended_in(desk, desk.q, follow)
    assert found is not None
    assert (found.id, found.queue, found.outcome, found.result(), found.meta) == (
        "x",
        "Q1",
        "finished",
        [1],
        {"a": "b"},
    )
    assert desk.client.hgetall(BatchKeys(desk.q).follow_ups(TOKEN)) == {b"ending %d" % held: b"1", b"forgotten": b"1"}
    assert 0 < ttl(desk, desk.q) <= HOUR
    assert fields_of(desk.start("A", 1).entries[0])["task"] == b"then"
    assert not messages(desk)


def test_elsewhere_a_message_names_it_and_each_copy_changes_nothing(desk: Desk) -> None:
    there = far(desk)
    held = desk.run("A", "x", follow=hold(desk, there, "then", "otherwise"))
    [keep] = messages(desk)
    assert keep.kind == "keep"
    relay(desk)
    assert ttl(desk, there) == -1
    desk.fail("A", held)
    [release] = messages(desk)
    assert b"otherwise_task" not in release.message
    call = delivery(desk, release)
    assert [desk.send(call), desk.send(call)] == [[b"ok"], [b"stored"]]
    assert desk.call(ops.list_tasks(there, 9)) == (1, [b"otherwise"])
    found = ended_in(desk, there, f"@{TOKEN}.otherwise.{held}")
    assert found is not None
    assert (found.outcome, found.reason, found.error and found.error.message) == ("failed", "failed", "it broke")
    assert ttl(desk, there) == -1  # it may be put back


def test_a_message_of_the_dispatch_that_comes_after_the_end_holds_nothing_for_ever(desk: Desk) -> None:
    there = far(desk)
    held = desk.run("A", "x", follow=hold(desk, there, "then"))
    [keep] = messages(desk)
    desk.call(ops.finish_tasks(desk.q, "A", [held], {}))
    [release] = [each for each in messages(desk) if each.kind == "release"]
    desk.call(delivery(desk, release))
    desk.call(delivery(desk, keep))
    assert 0 < ttl(desk, there) <= HOUR


def test_what_was_put_back_has_another_one_and_what_was_dropped_has_none(desk: Desk) -> None:
    there = far(desk)
    held = desk.run("A", "x", follow=hold(desk, there, "then", "otherwise"))
    desk.fail("A", held)
    relay(desk)
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert not messages(desk)
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    relay(desk)
    assert desk.call(ops.list_tasks(there, 9)) == (2, [b"otherwise"] * 2)
    assert desk.call(ops.drop_aside(desk.q, "failed", [held])) == 1
    relay(desk)
    assert 0 < ttl(desk, there) <= DAY


@pytest.mark.parametrize("state", ["waiting", "due", "active", "trashed"])
def test_a_cancelled_job_is_followed_by_otherwise(desk: Desk, state: str) -> None:
    follow = hold(desk, desk.q, "otherwise")
    if state == "active":
        held = desk.run("A", "x", follow=follow)
        desk.call(ops.cancel_job(desk.q, "x", "no"))
        desk.call(ops.stop_tasks(desk.q, "A", [held]))
    else:
        desk.dispatch("x", follow=follow, **({"run_at": FUTURE} if state == "due" else {}))
        if state == "trashed":
            desk.call(ops.delete_queue(desk.q))
            desk.dispatch("x")  # the id is free again
        else:
            desk.call(ops.cancel_job(desk.q, "x", "no"))
    follows = [key.decode() for key in desk.client.scan_iter(match=f"{desk.q.base}:job:@*")]
    [found] = [ended_job_of(desk.client.hgetall(key)) for key in follows]
    assert found is not None
    assert (found.id, found.outcome) == ("x", "cancelled")
    assert found.reason == ("no" if state != "trashed" else "the queue was deleted")


@pytest.mark.parametrize("blocked", [False, True])
def test_a_dispatch_that_replaces_the_payload_replaces_them(desk: Desk, blocked: bool) -> None:
    """Those that were replaced are forgotten a day later."""
    other = "x" * 16
    if blocked:
        held = desk.run("A", "x", follow=hold(desk, desk.q, "then"))
    else:
        desk.dispatch("x", follow=hold(desk, desk.q, "then"))
    desk.dispatch("x", b"b", follow=hold(desk, desk.q, "then", token=other))
    if blocked:
        desk.retry("A", held)
    assert desk.state()[":job:x"]["follow"] == f"{other}\n{desk.q.base}\n"
    assert 0 < ttl(desk, desk.q) <= DAY
    assert desk.client.pttl(BatchKeys(desk.q).follow_ups(other)) == -1
    desk.dispatch("x", b"c")
    assert "follow" not in desk.state()[":job:x"]


def test_what_this_queue_does_not_hold_is_left_to_the_relay_which_logs_it(desk: Desk) -> None:
    held = desk.run("A", "x", follow={"token": TOKEN, "then": desk.q.base})
    desk.call(ops.finish_tasks(desk.q, "A", [held], {}))
    [release] = messages(desk)
    with desk.nothing_changes():
        assert desk.send(delivery(desk, release)) == [b"unknown"]


@pytest.mark.parametrize(
    "follow",
    [
        1,
        {},
        {"token": TOKEN},
        {"token": "short", "then": "t:{Q1}"},
        {"token": TOKEN, "then": "Q1"},
        {"token": TOKEN, "then": "t:{Q1}\nx"},
        {"token": TOKEN, "otherwise": 7},
    ],
)
def test_an_option_that_cannot_be_is_refused(desk: Desk, follow: Any) -> None:
    with desk.nothing_changes(), pytest.raises(Exception, match="the option follow of a dispatch cannot be that"):
        desk.dispatch("x", follow=follow)


@pytest.mark.parametrize("follow", [b"", b"\xff", b"a\nb", b"\n\n", b"x" * 16 + b"\nno base\n"])
def test_a_record_that_names_none_ends_as_any_other(desk: Desk, follow: bytes) -> None:
    held = desk.run("A", "x")
    desk.client.hset(f"{desk.q.base}:active:x", "follow", follow)
    desk.call(ops.finish_tasks(desk.q, "A", [held], {}))
    assert ":active:x" not in desk.state()
