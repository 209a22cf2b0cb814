"""Kept jobs and tags. What holds after each script: every kept record is listed once, the bytes add up, no bound is exceeded, and
each job that is stored anywhere is found by its tags, and by no other."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.ops.driver import FUTURE, Desk, Expires, job
from tests.ops.lanes import rows_of
from worqr import ops
from worqr.ops import CancelReply, FoundJob, FoundPage

MS = 60_000_000


def keep(jobs: int = 100, size: int = 1_000_000, tags: str = "") -> dict[str, Any]:
    return {"done": f"{jobs} {MS} {size}", **({"tags": tags} if tags else {})}


def kept(desk: Desk, state: Any = "ended", **options: Any) -> list[FoundJob]:
    return desk.call(ops.list_kept(desk.q, state, **options)).jobs


def tagged(desk: Desk, tag: str, state: Any = "") -> list[FoundJob]:
    return desk.call(ops.list_tagged(desk.q, tag, state)).jobs


def ids(found: list[FoundJob]) -> list[str]:
    return [each.id for each in found]


def finish(desk: Desk, *claims: int, value: bytes = b"1") -> None:
    assert desk.call(ops.finish_tasks(desk.q, "A", claims, dict.fromkeys(claims, ("json", value)))) == {}


def check(desk: Desk) -> None:
    """The invariant of kept jobs: entries, records and bytes agree."""
    listed: Any = desk.client.zrange(desk.q.kept, 0, -1)
    entries = dict(entry.split(b" ")[:2] for entry in listed)
    stem = desk.q.kept_job(0)[:-1].encode()
    assert set(entries) == {key.removeprefix(stem) for key in desk.all_keys() if key.startswith(stem)}
    assert int(desk.client.hget(desk.q.kept_total, "bytes") or 0) == sum(map(int, entries.values()))


def end(desk: Desk, how: str, **options: Any) -> None:
    """Let the job "x" end in this way."""
    if how == "cancelled while it waits":
        desk.dispatch("x", **options)
        desk.call(ops.cancel_job(desk.q, "x", "why"))
        return
    if how == "expired":
        desk.enter("A")
        desk.dispatch("x", expires="0", **options)
        desk.start("A", 1)
        return
    held = desk.run("A", "x", **options)
    match how:
        case "finished":
            finish(desk, held)
        case "failed":
            desk.fail("A", held)
        case "undecodable":
            desk.fail("A", held, undecodable=True)
        case "failed for the last time":
            desk.retry("A", held, limit=1)
        case "stalled":
            desk.enter("A", max_stalls=1)
            desk.call(ops.fail_worker(desk.q, "A"))
        case _:
            desk.call(ops.cancel_job(desk.q, "x", "why"))
            desk.call(ops.finish_tasks(desk.q, "A", [held]))


ENDS = {
    "finished": "finished",
    "failed": "failed",
    "undecodable": "failed",
    "failed for the last time": "failed",
    "stalled": "failed",
    "expired": "failed",
    "cancelled while it waits": "cancelled",
    "cancelled while it runs": "cancelled",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("result_ttl", ["0", "60000"])
def test_whatever_ends_a_job_keeps_it(desk: Desk, how: str, result_ttl: str) -> None:
    end(desk, how, task=b"payload", **keep(tags="red"), fields={"result_ttl": result_ttl})
    [found] = kept(desk)
    assert (found.id, found.task, found.state.state, found.tags) == ("x", b"payload", ENDS[how], ("red",))
    assert ids(tagged(desk, "red")) == ["x"]
    assert desk.call(ops.job_status(desk.q, "x", 0)).state == ENDS[how]
    check(desk)


@pytest.mark.parametrize("how", ENDS)
def test_a_job_that_is_not_kept_leaves_nothing(desk: Desk, how: str) -> None:
    desk.client.hset(desk.q.policy("A"), "keep_failed", 0)
    end(desk, how, tags="red")
    found = ids(tagged(desk, "red"))
    assert found == (["x"] if ENDS[how] == "failed" else [])  # as long as there is a dead letter
    assert not [name for name in desk.state() if name.startswith(":done")]


def test_an_id_that_is_used_again_overwrites_no_history(desk: Desk) -> None:
    for n in range(3):
        finish(desk, desk.run("A", "x", b"%d" % n, **keep()))
    assert [found.task for found in kept(desk)] == [b"2", b"1", b"0"]
    newest = kept(desk)[0].number
    assert desk.client.get(desk.q.kept_id("x")) == b"%d" % newest
    first = kept(desk)[2].number
    assert desk.call(ops.job_status(desk.q, "x", first)).state == "finished"
    finish(desk, desk.run("A", "x"))  # this one is not kept: the id must not be told of an older one
    assert desk.call(ops.job_status(desk.q, "x", 0)).state == "gone"
    assert desk.call(ops.read_result(desk.q, "x", first)).status == "finished"
    check(desk)


def test_the_oldest_go_when_there_are_too_many(desk: Desk) -> None:
    for n in range(5):
        finish(desk, desk.run("A", f"x{n}", **keep(3, tags="red")))
        check(desk)
    assert ids(kept(desk)) == ids(tagged(desk, "red")) == ["x4", "x3", "x2"]
    assert desk.client.zcard(desk.q.tagged("red")) == 3
    assert desk.client.get(desk.q.kept_id("x0")) is None


def test_the_oldest_go_when_they_take_too_much_and_a_large_one_keeps_its_head(desk: Desk) -> None:
    for n in range(12):
        finish(desk, desk.run("A", f"x{n}", b"p" * 300, **keep(size=10_000)))
    total = int(desk.client.hget(desk.q.kept_total, "bytes") or 0)
    assert 8000 < total <= 10_000
    finish(desk, desk.run("A", "large", b"p" * 2000, **keep(size=10_000, tags="red")))
    [found] = kept(desk, limit=1)
    assert (found.id, found.task, found.size, found.tags) == ("large", b"", 0, ("red",))
    assert desk.call(ops.run_again(desk.q, found.number, "r" * 22)).word == "cut"
    assert int(desk.client.hget(desk.q.kept_total, "bytes") or 0) <= 10_000
    check(desk)


@pytest.mark.parametrize("size", [10, 100, 5000])
@pytest.mark.parametrize(
    "options", [{}, {"id": ""}, {"tags": "red"}, {"id": "", "tags": "a\nb\nc\nd\ne\nf\ng\nh"}], ids=str
)
def test_kept_jobs_count_at_least_the_memory_that_they_take(desk: Desk, size: int, options: dict[str, Any]) -> None:
    desk.enter("A")
    own_ids = [
        {**options, "id": f"order-{n}"} if "id" in options else {**options, "random": f"{n:022}"} for n in range(200)
    ]
    jobs = [({**keep(1000, 1 << 30), **own}, b"p" * size) for own in own_ids]
    desk.call(ops.dispatch_jobs(desk.q, jobs))
    finish(desk, *desk.take("A", 200))
    taken = sum(
        desk.client.memory_usage(key) for key in desk.all_keys() if b":done" in key or b":tag:" in key
    )  # without what the table of all expiries takes
    counted = int(desk.client.hget(desk.q.kept_total, "bytes") or 0)
    assert taken + 200 * 60 <= counted <= 3 * taken


def test_no_end_trims_more_than_a_hundred(desk: Desk) -> None:
    claims = []
    desk.enter("A")
    desk.call(ops.dispatch_jobs(desk.q, [job(f"x{n}", **keep(1000)) for n in range(150)]))
    claims = desk.take("A", 150)
    finish(desk, *claims)
    finish(desk, desk.run("A", "last", **keep(1)))
    assert len(kept(desk)) == 51
    finish(desk, desk.run("A", "more", **keep(1)))
    assert ids(kept(desk)) == ["more"]
    check(desk)


def test_every_key_expires_and_the_leader_trims_what_has(desk: Desk) -> None:
    finish(desk, desk.run("A", "x", **keep(tags="red")), desk.run("A", "y", **keep(tags="red")))
    state = desk.state(":workers", ":policy", ":counts")
    assert state and all(isinstance(value, Expires) for value in state.values())
    assert MS - 60_000 < desk.client.pttl(desk.q.kept_job(kept(desk)[0].number)) <= MS
    with desk.nothing_happens():
        assert desk.call(ops.trim_kept(desk.q)) is False
    desk.client.delete(desk.q.kept_job(kept(desk)[1].number))  # as when it expires
    assert ids(kept(desk)) == ids(tagged(desk, "red")) == ["y"]
    assert desk.call(ops.trim_kept(desk.q)) is False
    check(desk)
    desk.client.delete(desk.q.kept_job(kept(desk)[0].number))
    assert desk.call(ops.trim_kept(desk.q)) is True
    assert desk.client.exists(desk.q.kept, desk.q.kept_total) == 0


def test_a_failed_job_that_is_put_back_has_not_ended(desk: Desk) -> None:
    held = desk.run("A", "x", **keep(tags="red"))
    desk.fail("A", held)
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert kept(desk) == [] and [found.state.state for found in tagged(desk, "red")] == ["waiting"]
    finish(desk, *desk.take("A", 1))
    assert [found.state.state for found in kept(desk)] == ["finished"]
    check(desk)


def test_pages_of_kept_jobs(desk: Desk) -> None:
    for n in range(5):
        finish(desk, desk.run("A", f"x{n}", **keep(tags="red" if n % 2 else "blue")))
    page = desk.call(ops.list_kept(desk.q, limit=2))
    assert (ids(page.jobs), page.more) == (["x4", "x3"], True)
    finish(desk, desk.run("A", "new", **keep()))
    page = desk.call(ops.list_kept(desk.q, limit=9, after=page.after))
    assert (ids(page.jobs), page.more) == (["x2", "x1", "x0"], False)
    assert ids(kept(desk, tag="red")) == ["x3", "x1"]
    assert kept(desk, "failed") == kept(desk, since_ms=FUTURE) == []


# Tags


def test_tags_follow_the_job_through_its_states(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE, tags="red\nblue")
    assert [found.state.state for found in tagged(desk, "red")] == ["due"]
    desk.dispatch("x", tags="blue\ngreen")
    assert tagged(desk, "red") == [] and ids(tagged(desk, "green")) == ids(tagged(desk, "blue")) == ["x"]
    desk.enter("A")
    [held] = desk.take("A", 1)
    desk.dispatch("x", b"twin", tags="red")
    assert [found.state.state for found in tagged(desk, "red")] == ["blocked"]
    desk.retry("A", held)
    assert [found.state.state for found in tagged(desk, "red")] == ["waiting"]
    assert tagged(desk, "green") == []
    assert not desk.client.exists(desk.q.tagged("green"), desk.q.tagged("blue"))


def test_a_tag_that_no_script_has_removed_is_no_wrong_reply(desk: Desk) -> None:
    number = desk.dispatch("x", tags="red").number
    desk.client.hset(desk.q.job("x"), "tags", "blue")
    assert tagged(desk, "red") == []
    desk.client.zadd(desk.q.tagged("red"), {f"{number} nobody": number, "nonsense": number})
    assert tagged(desk, "red") == []
    assert desk.call(ops.cancel_tagged(desk.q, "red")) == CancelReply(
        False, 0, [], "-", "8000000000000002 8000000000000001"
    )
    assert desk.client.zcard(desk.q.tagged("red")) == 0
    assert desk.waiting() == [b"a"]


def test_all_jobs_of_a_tag_are_cancelled_in_steps(desk: Desk) -> None:
    running = desk.run("A", "runs", tags="red")
    blocked = desk.dispatch("runs", tags="red")
    assert blocked.outcome == "blocked"
    for n in range(3):
        desk.dispatch(f"x{n}", tags="red", run_at=FUTURE if n else 1)
    desk.dispatch("other", tags="blue")
    after, waiting, claims = "-", 0, []
    while True:
        reply = desk.call(ops.cancel_tagged(desk.q, "red", after, reason="why", budget=2))
        assert reply is not None
        after, waiting, claims = reply.after, waiting + reply.waiting, claims + reply.claims
        if not reply.more:
            break
    assert (waiting, claims) == (4, [running])
    assert desk.call(ops.finish_tasks(desk.q, "A", [running])) == {running: "cancelled"}
    assert desk.waiting() == [b"a"] and tagged(desk, "red") == []
    assert not desk.client.exists(desk.q.tag_marks)


def test_after_the_first_step_no_job_of_the_tag_starts_and_later_ones_do(desk: Desk) -> None:
    for n in range(4):
        desk.dispatch(f"x{n}", b"x%d" % n, tags="red", fields={"result_ttl": "60000"})
    desk.dispatch("laned", tags="red", lane="gold")
    desk.dispatch("again", tags="red")
    assert desk.call(ops.cancel_tagged(desk.q, "red", budget=1, reason="why")) is not None
    desk.dispatch("new", b"new", tags="red")
    desk.dispatch("again", b"again", tags="red")  # a later dispatch: it is not cancelled
    desk.enter("A")
    started = desk.start("A", 9)
    assert sorted(entry[entry.index(b"task") + 1] for entry in started.entries if entry) == [b"again", b"new"]
    assert desk.call(ops.job_status(desk.q, "x3", 0)).state == "cancelled"
    assert desk.counts()["cancelled"] == 5
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_a_job_that_a_start_cancels_in_a_lane_is_counted_as_others_that_were_cancelled_there(desk: Desk) -> None:
    for name, tag in (("x0", "red"), ("x1", "red"), ("starts", "blue"), ("waits", "blue"), ("gone", "blue")):
        desk.dispatch(name, tags=tag, lane="gold")
    desk.call(ops.cancel_job(desk.q, "gone", "why"))
    assert desk.call(ops.cancel_tagged(desk.q, "red", budget=1)) is not None
    desk.enter("A")
    assert len(desk.start("A", 1).entries) == 1
    assert rows_of(desk)["gold"].waiting == 1


def test_a_run_that_comes_back_after_the_mark_does_not_start_again(desk: Desk) -> None:
    held = desk.run("A", "a", tags="red")
    other = desk.run("A", "b", tags="red")
    desk.call(ops.cancel_tagged(desk.q, "red", budget=1))
    desk.retry("A", other, delay_ms=0)
    assert desk.start("A", 1).entries == []
    assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}


def test_a_tag_with_too_many_jobs_is_not_acted_on(desk: Desk) -> None:
    number = desk.dispatch("x", tags="red").number
    many = {f"{n} none{n}": n for n in range(number - 100_000, number - 1)}
    desk.client.zadd(
        desk.q.tagged("red"), {f"{number} x": number - 200_000}
    )  # in front of them: the oldest is not stale
    desk.client.zadd(desk.q.tagged("red"), many)
    desk.dispatch("y", tags="red")
    with desk.nothing_happens():
        assert desk.call(ops.cancel_tagged(desk.q, "red")) is None
        assert desk.call(ops.forget_tagged(desk.q, "red")) is None
        assert desk.call(ops.list_tagged(desk.q, "red")).too_large


def test_a_full_tag_makes_room_by_what_is_stale(desk: Desk) -> None:
    desk.client.zadd(desk.q.tagged("red"), {f"{n} none{n}": n for n in range(1, 100_001)})
    desk.dispatch("x", tags="red")
    assert ids(tagged(desk, "red")) == ["x"]
    assert desk.client.zcard(desk.q.tagged("red")) == 100_000 - 100 + 1


def test_a_tag_that_was_full_over_30_days_ago_is_listed_again(desk: Desk) -> None:
    number = desk.dispatch("x", tags="red").number
    desk.client.zadd(desk.q.tagged("red"), {"-": (round(time.time()) - 31 * 86_400) * 1_000_000})
    page = desk.call(ops.list_tagged(desk.q, "red"))
    assert (page.too_large, ids(page.jobs)) == (False, ["x"])
    assert page.after == str(number) and not desk.call(ops.list_tagged(desk.q, "red", after=page.after)).jobs


def test_all_that_is_stored_of_a_tag_is_forgotten(desk: Desk) -> None:
    options = {"tags": "red\nblue", "fields": {"result_ttl": "60000"}, **keep()}
    finish(desk, desk.run("A", "done", **options))
    desk.fail("A", desk.run("A", "failed", **options))
    finish(desk, desk.run("A", "result only", tags="red", fields={"result_ttl": "60000"}))
    running = desk.run("A", "runs", **options)
    desk.dispatch("waits", **options)
    reply = desk.call(ops.forget_tagged(desk.q, "red", budget=2))
    counts = [0] * 5
    while reply is not None:
        found = (reply.waiting, reply.running, reply.kept, reply.results, reply.dead_letters)
        counts = [one + more for one, more in zip(counts, found, strict=True)]
        if not reply.more:
            break
        reply = desk.call(ops.forget_tagged(desk.q, "red", reply.last, budget=2))
    assert counts == [1, 1, 2, 3, 1]
    assert desk.call(ops.finish_tasks(desk.q, "A", [running])) == {running: "cancelled"}
    left = set(desk.state())
    assert {name for name in left if re_personal(name)} == set()


def test_one_call_that_forgets_reads_few_large_records(desk: Desk) -> None:
    """Each is read as a whole."""
    for name in ("a", "b", "c"):
        finish(desk, desk.run("A", name, task=b"x" * 3_000_000, **keep(size=100_000_000, tags="red")))
    first = desk.call(ops.forget_tagged(desk.q, "red"))
    assert first is not None
    assert (first.more, first.kept) == (True, 2)
    last = desk.call(ops.forget_tagged(desk.q, "red", first.last))
    assert last is not None
    assert (last.more, last.kept) == (False, 1)
    check(desk)


def re_personal(name: str) -> bool:
    return name.startswith((":done", ":tag", ":result", ":older", ":aside", ":job", ":active", ":failed"))


def test_one_kept_job_is_dropped_by_its_number(desk: Desk) -> None:
    finish(desk, desk.run("A", "x", **keep(tags="red")), desk.run("A", "y", **keep(tags="red")))
    assert desk.call(ops.drop_kept_jobs(desk.q, [1, kept(desk)[0].number])) == 1
    assert ids(kept(desk)) == ids(tagged(desk, "red")) == ["x"]
    check(desk)


def test_a_kept_job_runs_again_as_a_new_one(desk: Desk) -> None:
    finish(desk, desk.run("A", "x", b"payload", meta='{"a":"b"}', lane="gold", **keep(tags="red")))
    number = kept(desk)[0].number
    again = desk.call(ops.run_again(desk.q, number, "r" * 22))
    assert again.id == f"@{again.number}-{'r' * 22}"
    record = desk.state()[f":job:{again.id}"]
    assert {"task": "payload", "meta": '{"a":"b"}', "lane": "gold", "tags": "red"}.items() <= record.items()
    assert desk.call(ops.run_again(desk.q, 7, "r" * 22)).word == "gone"
    desk.client.set(desk.q.kept_job(number), "spoilt by another program")
    assert desk.call(ops.run_again(desk.q, number, "r" * 22)).word == "gone"
    assert kept(desk) == []


@pytest.mark.parametrize("how", ["finished", "failed", "cancelled while it waits", "cancelled while it runs"])
def test_a_kept_workflow_runs_again_as_a_workflow_with_its_lifetime(desk: Desk, how: str) -> None:
    end(desk, how, workflow=True, lifetime="1000", **keep())
    again = desk.call(ops.run_again(desk.q, kept(desk)[0].number, "r" * 22))
    record = desk.state()[f":job:{again.id}"]
    assert (record["life"], record["lifetime"]) == (str(again.number), "1000")
    assert int(record["lives_until"]) == int(record["run_at"]) + 1000
    assert desk.call(ops.send_event(desk.q, again.id, "approved", b"none ")).status == "stored"


def test_the_job_of_a_failure_handler_has_the_tags_of_the_task(desk: Desk) -> None:
    desk.enter("A", on_failure=True)
    desk.dispatch("x", tags="red")
    desk.fail("A", *desk.take("A", 1))
    failures = type(desk.q)(desk.prefix, "Q1", failures=True)
    assert [found.tags for found in desk.call(ops.list_tagged(failures, "red")).jobs] == [("red",)]


BAD_TAGS = ("", "a\n", "x" * 101, "\n".join("abcdefghi"), "a\tb", 7)
BAD_BOUNDS = ("1 2", "1 0 1", "x")


@pytest.mark.parametrize("options", [*({"tags": each} for each in BAD_TAGS), *({"done": each} for each in BAD_BOUNDS)])
def test_an_option_that_cannot_be_is_refused_before_anything_is_written(desk: Desk, options: dict[str, Any]) -> None:
    with desk.nothing_changes(), pytest.raises(Exception, match="cannot be that"):
        desk.dispatch("x", **options)


@pytest.mark.parametrize("seed", range(20))
def test_at_random_the_bounds_hold_and_what_is_kept_is_what_is_listed(desk: Desk, seed: int) -> None:
    chance = random.Random(seed)
    desk.enter("A", "B")
    for _ in range(60):
        name, bounds = f"x{chance.randrange(6)}", keep(chance.choice((3, 5)), chance.choice((4000, 9000)))
        options = {**(bounds if chance.random() < 0.8 else {}), "tags": "\n".join(chance.sample("abcd", 2))}
        match chance.randrange(8):
            case 0 | 1 | 2:
                desk.dispatch(name, b"p" * chance.randrange(900), **options)
            case 3:
                desk.call(ops.cancel_job(desk.q, name, "why"))
            case 4:
                desk.call(ops.cancel_tagged(desk.q, chance.choice("abcd"), budget=2))
            case 5:
                failed = desk.call(ops.find_aside(desk.q, "failed", [name]))
                desk.call(ops.retry_aside(desk.q, "failed", failed)) if failed else None
            case _:
                started = desk.start("A", 2)
                claims = [started.first + n for n, entry in enumerate(started.entries) if entry]
                for claim in claims:
                    match chance.randrange(3):
                        case 0:
                            desk.fail("A", claim)
                        case 1:
                            desk.retry("A", claim, delay_ms=0)
                        case _:
                            desk.call(ops.finish_tasks(desk.q, "A", [claim]))
        check(desk)
        assert len(kept(desk)) <= 5
        assert int(desk.client.hget(desk.q.kept_total, "bytes") or 0) <= 9000
        for tag in "abcd":
            by_tag = {found.number for found in tagged(desk, tag)}
            assert {found.number for found in kept(desk) if tag in found.tags} <= by_tag
            assert all(tag in found.tags for found in tagged(desk, tag))


def test_what_is_not_kept_and_has_no_tags_costs_no_command_more(desk: Desk) -> None:
    """Commands of the server for a job: dispatched, started, finished, as before there were kept jobs."""
    desk.enter("A")
    desk.call(ops.start_tasks(desk.q, "A", 1, 1))
    desk.starts["A"] = 1
    dispatched = desk.commands_of(ops.dispatch_jobs(desk.q, [job("x")]))
    started = desk.commands_of(ops.start_tasks(desk.q, "A", 2, 1))
    [held] = [int(each) for each in desk.client.smembers(desk.q.claims("A"))]
    finished = desk.commands_of(ops.finish_tasks(desk.q, "A", [held], {}))
    assert (len(dispatched), len(started), len(finished)) == COSTS
    assert not [
        each
        for each in (*dispatched, *started, *finished)
        if ":tag" in each or (":done" in each and "done_id" not in each)
    ]


COSTS = (30, 21, 12)


@pytest.mark.parametrize("tag", ["", "red"])
def test_a_page_reads_no_more_of_jobs_that_it_does_not_show_than_of_those_that_it_shows(desk: Desk, tag: str) -> None:
    """A record is read as a whole. Without a bound, a page of small answers would keep the server busy for seconds."""
    for n in range(6):
        held = desk.run("A", f"x{n}", b"x" * 3_000_000, **keep(size=100_000_000, tags="red"))
        finish(desk, held)

    def page(after: str) -> FoundPage:
        if tag:
            return desk.call(ops.list_tagged(desk.q, tag, "failed", after=after))
        return desk.call(ops.list_kept(desk.q, "failed", after=after))

    after, pages, more = "", 0, True
    while more:
        found = page(after)
        assert found.jobs == []
        assert found.more or pages
        after, more, pages = found.after, found.more, pages + 1
    assert pages == 2
