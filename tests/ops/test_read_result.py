from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import BOOM, FUTURE, Desk
from worqr import ops

KEPT: dict[str, Any] = {"fields": {"result_ttl": "60000"}}
ERROR = [*(text.encode() for text in (BOOM.type, BOOM.message, BOOM.traceback)), None]


def read(desk: Desk, number: int = 0, id: str = "x") -> tuple[str, list[Any]]:
    with desk.nothing_changes():
        found = desk.call(ops.read_result(desk.q, id, number))
    return found.status, found.values


def finish(desk: Desk, held: int, value: bytes = b"1") -> None:
    assert desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", value)})) == {}


@pytest.mark.parametrize(("kind", "value"), [("json", b"[1]"), ("bytes", b"\x00\xff"), ("none", b""), ("json", b"")])
def test_a_result_is_told_as_it_was_kept(desk: Desk, kind: str, value: bytes) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: (kind, value)}))
    assert read(desk) == read(desk, held - 1) == ("finished", [kind.encode(), value])


def test_a_run_without_a_value_has_finished_all_the_same(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert read(desk) == ("finished", [b"none", b""])


@pytest.mark.parametrize("undecodable", [False, True])
def test_a_failure_is_told_with_its_error(desk: Desk, undecodable: bool) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.fail("A", held, undecodable=undecodable)
    assert read(desk, held - 1) == ("failed", ERROR)


@pytest.mark.parametrize("undecodable", [False, True])
def test_a_failure_is_told_while_its_record_is_there_also_if_no_result_is_kept(desk: Desk, undecodable: bool) -> None:
    held = desk.run("A", "x")
    desk.fail("A", held, undecodable=undecodable)
    assert read(desk) == read(desk, held - 1) == ("failed", ERROR)
    assert read(desk, held + 5) == ("gone", [])
    desk.call(ops.drop_aside(desk.q, "undecodable" if undecodable else "failed", [held]))
    assert read(desk) == read(desk, held - 1) == ("gone", [])


def test_each_failed_dispatch_of_an_id_has_its_own_record(desk: Desk) -> None:
    first = desk.run("A", "x")
    desk.fail("A", first)
    second = desk.run("A", "x")
    assert read(desk, first - 1) == ("failed", ERROR)
    assert read(desk) == read(desk, second - 1) == ("never", [])
    desk.retry("A", second, limit=1)
    assert read(desk, first - 1) == read(desk, second - 1) == read(desk) == ("failed", ERROR)
    desk.call(ops.drop_aside(desk.q, "failed", [second]))
    assert read(desk, second - 1) == ("gone", [])
    assert read(desk, first - 1) == ("failed", ERROR)


def test_a_failed_one_that_was_put_back_is_waited_for_again(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert read(desk) == ("never", [])


@pytest.mark.parametrize("where", ["waits", "due", "runs", "ended"])
def test_a_dispatch_that_left_nothing_is_replaced_while_a_newer_one_is_known(desk: Desk, where: str) -> None:
    first = desk.run("A", "x")
    finish(desk, first)
    assert read(desk, first - 1) == ("gone", [])
    number = desk.dispatch("x", run_at=FUTURE if where == "due" else 1, **KEPT).number
    if where in ("runs", "ended"):
        [held] = desk.take("A", 1)
        if where == "ended":
            finish(desk, held)
    assert read(desk, first - 1) == ("replaced", [])
    assert read(desk, number)[0] == ("finished" if where == "ended" else "wait")


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("end", ["fail", "retry"])
def test_the_fields_of_an_error_are_told_too(desk: Desk, end: str, kept: bool) -> None:
    held = desk.run("A", "x", **(KEPT if kept else {}))
    error = replace(BOOM, fields={"code": 42})
    if end == "fail":
        desk.call(ops.fail_task(desk.q, "A", held, error))
    else:
        desk.call(ops.retry_task(desk.q, "A", held, error, counter="failures", limit=1))
    assert read(desk) == ("failed", [*ERROR[:3], b'{"code":42}'])


def test_a_cancellation_is_told_with_its_reason(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.call(ops.cancel_job(desk.q, "x", "no paper"))
    assert read(desk) == ("wait", [])
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
    assert read(desk) == ("cancelled", [b"no paper"])


@pytest.mark.parametrize("where", ["waits", "due", "runs", "blocked"])
@pytest.mark.parametrize(
    ("fields", "word"), [(KEPT, "wait"), ({}, "never"), ({"fields": {"result_ttl": "0"}}, "never")]
)
def test_what_has_not_ended_says_whether_waiting_helps(desk: Desk, where: str, fields: Any, word: str) -> None:
    number = desk.run("A", "x", **fields) - 1 if where in ("runs", "blocked") else 0
    if where != "runs":
        number = desk.dispatch("x", run_at=FUTURE if where == "due" else 1, **fields).number
    assert read(desk) == read(desk, number) == (word, [])


def test_where_the_job_does_not_say_its_workers_do(desk: Desk) -> None:
    desk.dispatch("x")
    assert read(desk) == ("never", [])
    desk.enter("A")
    assert read(desk) == ("never", [])
    desk.enter("B", result_ttl_ms=1000)
    assert read(desk) == ("wait", [])
    desk.dispatch("x", fields={"result_ttl": "0"})
    assert read(desk) == ("never", [])


@pytest.mark.parametrize("id", ["x", "@1", ""])
def test_of_what_is_not_there_nothing_is_known(desk: Desk, id: str) -> None:
    desk.run("A", "other", **KEPT)
    assert read(desk, 0, id) == read(desk, 5, id) == ("gone", [])


def test_a_run_of_which_nothing_is_kept_is_gone(desk: Desk) -> None:
    held = desk.run("A", "x")
    finish(desk, held)
    assert read(desk) == ("gone", [])


def test_what_has_expired_is_gone(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    finish(desk, held)
    assert 1000 < desk.client.pttl(desk.q.result("x")) <= 60_000
    desk.client.delete(desk.q.result("x"))
    assert read(desk) == ("gone", [])


def test_each_dispatch_has_its_own(desk: Desk) -> None:
    first = desk.run("A", "x", **KEPT)
    finish(desk, first, b"1")
    second = desk.run("A", "x", **KEPT)
    assert read(desk, first - 1) == ("finished", [b"json", b"1"])
    assert read(desk) == read(desk, second - 1) == ("wait", [])
    finish(desk, second, b"2")
    assert read(desk, first - 1) == ("finished", [b"json", b"1"])
    assert read(desk) == read(desk, second - 1) == ("finished", [b"json", b"2"])
    third = desk.run("A", "x", **KEPT)
    finish(desk, third, b"3")
    assert [read(desk, one - 1)[0] for one in (first, second, third)] == ["replaced", "finished", "finished"]


def test_the_newest_is_not_the_older_one_also_if_nothing_was_kept_of_it(desk: Desk) -> None:
    first = desk.run("A", "x", **KEPT)
    finish(desk, first)
    second = desk.run("A", "x")
    assert read(desk) == read(desk, second - 1) == ("never", [])
    finish(desk, second)
    assert read(desk) == read(desk, second - 1) == ("gone", [])
    assert read(desk, first - 1)[0] == "finished"


def test_all_dispatches_of_one_run_share_its_result(desk: Desk) -> None:
    numbers = [desk.dispatch("x", b"a", **KEPT).number for _ in range(3)]
    desk.enter("A")
    finish(desk, desk.take("A", 1)[0])
    assert [read(desk, number)[0] for number in numbers] == ["finished"] * 3
    assert (read(desk, numbers[0] - 1)[0], read(desk, numbers[-1] + 1)[0]) == ("replaced", "gone")


def test_a_run_and_its_blocked_twin_are_two(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    twin = desk.dispatch("x", b"b").number
    assert (read(desk, held - 1), read(desk, twin), read(desk)) == (("wait", []), ("never", []), ("wait", []))
    finish(desk, held)
    assert (read(desk, held - 1)[0], read(desk, twin), read(desk)) == ("finished", ("never", []), ("never", []))


def test_a_run_that_took_its_twin_in_answers_both(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    twin = desk.dispatch("x", b"b").number
    desk.retry("A", held)
    finish(desk, desk.take("A", 1)[0])
    assert read(desk, held - 1) == read(desk, twin) == ("finished", [b"json", b"1"])


def test_one_that_was_put_back_may_still_succeed(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.fail("A", held)
    assert read(desk, held - 1)[0] == "failed"
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert read(desk, held - 1) == ("wait", [])
    finish(desk, desk.take("A", 1)[0])
    assert read(desk, held - 1) == ("finished", [b"json", b"1"])


def test_what_lies_in_the_trash_is_gone_until_it_is_purged(desk: Desk) -> None:
    number = desk.dispatch("x", **KEPT).number
    desk.call(ops.delete_queue(desk.q))
    assert read(desk, number) == ("gone", [])
    desk.call(ops.purge_queue(desk.q))
    assert read(desk, number) == ("cancelled", [b"the queue was deleted"])


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert read(desk) == ("gone", [])
    assert desk.state() == {}
