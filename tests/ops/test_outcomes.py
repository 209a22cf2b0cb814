"""How the last run of each schedule ended: the end of a job `cron:NAME` writes it, as long as the queue knows the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ops.driver import BOOM, Desk
from tests.ops.schedules import DEF, HOUR, TASK, T, declared, fire_schedule, now
from worqr import ops
from worqr.cron import outcome_of
from worqr.records import RemoteError

ID = "cron:s"


def fired(desk: Desk, worker: str = "A") -> int:
    """A claim on the first firing of the schedule."""
    assert desk.call(fire_schedule(desk.q, "s", T, judged_at=T, run_at=T, overlap="skip", task=TASK)) == "ok"
    desk.enter(worker)
    return desk.start(worker, 1).first


def noted(desk: Desk) -> str | None:
    """What the server has, with 0 for times that are about now."""
    [(stored, _)] = desk.call(ops.read_outcomes(desk.q, ["s"]))
    if not stored:
        return None
    assert 0 < desk.client.ttl(desk.q.outcomes) - 400 * 24 * 3600 + 60 <= 60
    first, rest = stored.decode().split("\n", 1)
    outcome, ended, ran, nominal = first.split()
    assert abs(now(desk) - int(ended)) < 60_000
    return f"{outcome} {ran if int(ran) < 0 else 0} {nominal}\n{rest}"


def finish(desk: Desk, claim: int) -> None:
    desk.call(ops.finish_tasks(desk.q, "A", [claim]))


def fail(desk: Desk, claim: int) -> None:
    desk.fail("A", claim)


def cancel_run(desk: Desk, claim: int) -> None:
    desk.call(ops.cancel_job(desk.q, ID, "no reason"))
    finish(desk, claim)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (finish, f"finished 0 {T}\n\n"),
        (fail, f"failed 0 {T}\n{BOOM.type}\n{BOOM.message}"),
        (cancel_run, f"cancelled 0 {T}\n\nno reason"),
    ],
)
def test_an_end_is_noted_once_and_only_by_the_owner(
    desk: Desk, end: Callable[[Desk, int], None], expected: str
) -> None:
    claim = fired(desk)
    assert noted(desk) is None
    end(desk, claim)
    assert noted(desk) == expected
    with desk.nothing_changes():
        finish(desk, claim)


def test_one_that_never_ran_has_no_duration(desk: Desk) -> None:
    desk.call(fire_schedule(desk.q, "s", T, judged_at=T, run_at=T, overlap="skip", task=TASK))
    desk.call(ops.cancel_job(desk.q, ID, "why"))
    assert noted(desk) == f"cancelled -1 {T}\n\nwhy"


def test_a_retry_and_a_return_are_no_ends(desk: Desk) -> None:
    desk.retry("A", fired(desk))
    desk.call(ops.stop_tasks(desk.q, "A", desk.take("A", 1)))
    assert noted(desk) is None


def test_a_job_of_no_schedule_leaves_nothing(desk: Desk) -> None:
    before = desk.state()
    claim = desk.run("A", ID)
    finish(desk, claim)
    assert ":outcomes" not in desk.state()
    assert ":outcomes" not in before


def test_one_that_is_run_by_hand_is_noted_without_a_nominal_time(desk: Desk) -> None:
    finish(desk, desk.run("A", ID, by_hand=True))
    assert noted(desk) == "finished 0 0\n\n"
    assert desk.client.hgetall(desk.q.fired) == {b"s": b"0 hand"}
    assert 0 < desk.client.ttl(desk.q.fired) - 7 * 24 * 3600 + 60 <= 60
    assert desk.call(fire_schedule(desk.q, "s", 1, judged_at=T, run_at=1, overlap="skip", task=TASK)) == "ok"


def test_a_stored_one_is_noted_until_it_is_deleted(desk: Desk) -> None:
    desk.call(ops.store_schedule(desk.q, "s", b"1 4 \x80task"))
    finish(desk, desk.run("A", ID))
    assert noted(desk) == "finished 0 0\n\n"
    late = desk.run("A", ID)
    assert desk.call(ops.unstore_schedule(desk.q, "s")) == "ok"
    finish(desk, late)
    assert ":outcomes" not in desk.state()


def test_the_leader_forgets_that_of_a_dropped_one_and_no_stored_one(desk: Desk) -> None:
    finish(desk, fired(desk))
    assert desk.call(ops.unstore_schedule(desk.q, "s", "0")) == "gone"
    assert {":fired", ":outcomes"}.isdisjoint(desk.state())
    desk.call(ops.store_schedule(desk.q, "s", b"1 4 \x80task"))
    finish(desk, desk.run("A", ID))
    before = desk.state()
    assert desk.call(ops.unstore_schedule(desk.q, "s", "0")) == "stale"
    assert desk.state() == before


@pytest.mark.parametrize("key", ["fired", "outcomes"])
def test_a_key_of_another_type_costs_the_note_alone(desk: Desk, key: str) -> None:
    claim = fired(desk)
    desk.client.delete(getattr(desk.q, key))
    desk.client.set(getattr(desk.q, key), "mine")
    finish(desk, claim)
    assert desk.client.get(getattr(desk.q, key)) == b"mine"
    assert not desk.client.exists(desk.q.claims("A"))
    assert desk.call(ops.read_outcomes(desk.q, ["s"])) == [(b"", None)]


def test_odd_values_of_a_record_do_not_matter(desk: Desk) -> None:
    claim = fired(desk)
    desk.client.hset(desk.q.active(ID), mapping={"scheduled_for": "soon", "claim": "\xff"})
    finish(desk, claim)
    assert noted(desk) == "finished -1 0\n\n"


def test_a_type_has_no_line_break_and_a_text_has_500_bytes(desk: Desk) -> None:
    desk.call(ops.fail_task(desk.q, "A", fired(desk), RemoteError("Odd\nName", "\u20ac" * 400, ""), undecodable=False))
    [(stored, _)] = desk.call(ops.read_outcomes(desk.q, ["s"]))
    found = outcome_of(stored)
    assert found is not None
    assert (found.error_type, found.error) == ("Odd Name", "\u20ac" * 166)


def test_reads_those_that_are_there(desk: Desk) -> None:
    assert desk.call(ops.read_outcomes(desk.q, ["s", "t"])) == [(b"", None), (b"", None)]
    desk.client.hset(desk.q.outcomes, mapping={"s": b"\xff", "u": b"x"})
    with desk.nothing_changes():
        assert desk.call(ops.read_outcomes(desk.q, ["t", "s"])) == [(b"", None), (b"\xff", None)]


def test_a_job_that_no_worker_takes_for_a_day_is_told(desk: Desk) -> None:
    def unserved() -> int | None:
        return desk.call(ops.read_outcomes(desk.q, ["s"]))[0][1]

    desk.dispatch(ID, run_at=now(desk))
    assert unserved() is None
    long_ago = now(desk) - 24 * HOUR
    desk.client.hset(desk.q.job(ID), "run_at", long_ago)
    assert unserved() is None  # it was made up for now, and a worker may come
    desk.client.hset(desk.q.job(ID), "first", 1000 * long_ago)
    assert unserved() == long_ago
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    assert unserved() is None
    desk.client.delete(desk.q.workers)
    for field, value in {"state": "due", "run_at": "soon", "started": "1", "first": 1000 * now(desk)}.items():
        before = desk.client.hget(desk.q.job(ID), field)
        desk.client.hset(desk.q.job(ID), field, value)
        assert unserved() is None
        desk.client.hset(desk.q.job(ID), field, before or "")


# survey_schedules


def survey(desk: Desk, *names: str, **more: Any) -> tuple[list[int], list[str]]:
    found = desk.call(ops.survey_schedules(desk.g, names, **more))
    assert abs(found.now - now(desk)) < 60_000
    return [found.declared, found.stored, found.overdue], [row.name for row in found.rows]


def store(desk: Desk, name: str) -> None:
    assert desk.call(ops.index_schedule(desk.g, name, desk.q, "7", DEF, times="daily"))[0] == "ok"


def test_without_names_it_counts_all_and_returns_some_declared_ones(desk: Desk) -> None:
    assert survey(desk) == ([0, 0, 0], [])
    declared(desk, "a", check_at=T)
    declared(desk, "b")
    store(desk, "report/x")
    with desk.nothing_changes():
        assert survey(desk) == ([2, 1, 3], ["a", "b"])
        assert survey(desk, limit=1, late_ms=60_000) == ([2, 1, 1], ["a"])


def test_with_names_it_returns_those_that_are_known(desk: Desk) -> None:
    row = declared(desk, "a", paused="1")
    store(desk, "report/x")
    assert survey(desk, "report/x", "nobody", "a")[1] == ["report/x", "a"]
    assert desk.call(ops.survey_schedules(desk.g, ["a"])).rows == [row]


# lease_prefix


def lease(desk: Desk, holder: str, ms: int = 20_000, prefix: str = "report/") -> bool:
    return desk.call(ops.lease_prefix(desk.g, prefix, holder, ms))


def test_one_holds_a_prefix_until_it_gives_it_back_or_its_lease_ends(desk: Desk) -> None:
    before = desk.state()
    assert lease(desk, "a")
    assert desk.client.ttl(desk.g.schedules) > 0
    with desk.nothing_changes():
        assert not lease(desk, "b")
        assert not lease(desk, "b", 0)
    assert lease(desk, "b", prefix="mail/")
    assert lease(desk, "a")
    assert lease(desk, "a", 0)
    assert lease(desk, "b", 0, prefix="mail/")
    assert desk.state() == before
    assert lease(desk, "b", 0), "given back twice"
    assert desk.state() == before


@pytest.mark.parametrize("stored", [b"a 1", b"a 99999999999999", b"\xff", b"a", b"a x"])
def test_a_lease_that_has_ended_or_that_another_program_wrote_holds_nothing(desk: Desk, stored: bytes) -> None:
    desk.client.hset(desk.g.schedules, "apply report/", stored)
    assert lease(desk, "b")
    assert lease(desk, "b", 0)


def test_a_lease_is_no_schedule(desk: Desk) -> None:
    declared(desk)
    lease(desk, "a")
    assert [row.name for row in desk.call(ops.list_schedules(desk.g)).rows] == ["s"]
    assert lease(desk, "a", 0)


# The last runs


KEEP = {"done": "3 60000000 1000000"}


def fire_and_finish(desk: Desk, n: int, **options: Any) -> None:
    call = fire_schedule(
        *(desk.q, "s", T + n), judged_at=T + n, run_at=T + n, overlap="skip", task=b"%d" % n, options=options
    )
    assert desk.call(call) == "ok"
    finish(desk, *desk.take("A", 1))


def kept(desk: Desk) -> list[str]:
    return [each.task.decode() for each in desk.call(ops.list_kept(desk.q)).jobs]


def in_pages(desk: Desk, limit: int) -> list[str]:
    found: list[str] = []
    after, more = "", True
    while more:
        page = desk.call(ops.list_kept(desk.q, limit=limit, after=after))
        found += [each.task.decode() for each in page.jobs]
        after, more = page.after, page.more
        assert len(found) < 100, "a page begins before the end of the one before"
    return found


def test_the_last_20_runs_are_kept_beside_the_jobs_that_asked_for_it(desk: Desk) -> None:
    desk.enter("A")
    finish(desk, desk.run("A", "x0", b"x0", **KEEP))
    for n in range(25):
        fire_and_finish(desk, n)
    for n in range(1, 5):
        finish(desk, desk.run("A", f"x{n}", b"x%d" % n, **KEEP))
    fire_and_finish(desk, 25)
    assert sorted(kept(desk)) == sorted([*map(str, range(6, 26)), "x2", "x3", "x4"])
    assert in_pages(desk, 1) == in_pages(desk, 4) == in_pages(desk, 100) == kept(desk)
    assert desk.call(ops.inspect(desk.q)).kept == 23
    numbers = [each.number for each in desk.call(ops.list_kept(desk.q)).jobs]
    assert len([key for key in desk.all_keys() if b":done:" in key]) == 23
    assert desk.call(ops.drop_kept_jobs(desk.q, numbers)) == 23
    assert kept(desk) == []
    assert not desk.client.exists(desk.q.kept, desk.q.kept_firings, desk.q.kept_total)


@pytest.mark.parametrize(("options", "count"), [({"done": "0 60000000 10000"}, 0), (KEEP, 3), ({}, 5)], ids=str)
def test_a_call_chooses_what_is_kept_of_the_runs_of_its_schedule(
    desk: Desk, options: dict[str, Any], count: int
) -> None:
    desk.enter("A")
    for n in range(5):
        fire_and_finish(desk, n, **options)
    assert len(kept(desk)) == count


def test_a_failed_run_is_kept_until_it_is_put_back(desk: Desk) -> None:
    held = fired(desk)
    fail(desk, held)
    assert [each.task for each in desk.call(ops.list_kept(desk.q, "failed")).jobs] == [TASK]
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert not desk.client.exists(desk.q.kept_firings)


def test_a_kept_run_that_has_expired_is_trimmed(desk: Desk) -> None:
    desk.enter("A")
    fire_and_finish(desk, 1)
    fire_and_finish(desk, 2)
    assert 0 < desk.client.pttl(desk.q.kept_firings) - 400 * 24 * HOUR <= HOUR
    found = desk.call(ops.list_kept(desk.q)).jobs
    desk.client.delete(desk.q.kept_job(found[1].number))
    desk.call(ops.trim_kept(desk.q))
    assert kept(desk) == ["2"]
    assert desk.client.zcard(desk.q.kept_firings) == 1


def test_a_job_that_is_no_run_of_a_schedule_is_not_kept(desk: Desk) -> None:
    finish(desk, desk.run("A", ID))  # nothing has fired
    finish(desk, desk.run("A", "other"))
    assert kept(desk) == []


def test_a_list_since_a_time_ends_at_older_runs(desk: Desk) -> None:
    desk.enter("A")
    for n in range(3):
        fire_and_finish(desk, n)
    page = desk.call(ops.list_kept(desk.q, since_ms=4 * 10**12))
    assert (page.jobs, page.more) == ([], False)
