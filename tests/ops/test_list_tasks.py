from __future__ import annotations

from tests.ops.driver import FUTURE, Desk, reference
from worqr import ops
from worqr.ops import MAX_BYTES


def test_newest_first_or_as_they_will_be_taken(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.put(b"a", b"b", b"c")
    with desk.nothing_changes():
        assert desk.call(ops.list_tasks(desk.q, 9)) == (4, [b"c", b"b", b"a", b"suspect"])
        assert desk.call(ops.list_tasks(desk.q, 9, from_front=True)) == (4, [b"suspect", b"a", b"b", b"c"])
        assert desk.call(ops.list_tasks(desk.q, 2)) == (4, [b"c", b"b"])
        assert desk.call(ops.list_tasks(desk.q, 2, from_front=True)) == (4, [b"suspect", b"a"])
        assert desk.call(ops.list_tasks(desk.q, 0)) == (4, [])


def test_jobs_are_shown_by_their_payload_and_references_to_nothing_not_at_all(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    for one in held:
        desk.retry("A", one)
    desk.call(ops.cancel_task(desk.q, b"b"))
    assert desk.call(ops.list_tasks(desk.q, 9)) == (2, [b"c", b"a"])


def test_stops_at_8_mib_but_shows_at_least_one(desk: Desk) -> None:
    desk.put(b"x" * 2 * MAX_BYTES)
    desk.put(b"y", b"z")
    assert desk.call(ops.list_tasks(desk.q, 9, from_front=True)) == (3, [b"x" * 2 * MAX_BYTES])
    assert len(desk.call(ops.list_tasks(desk.q, 9))[1]) == 3


def test_looks_at_no_more_than_a_thousand_references_to_nothing(desk: Desk) -> None:
    desk.put(b"a")
    desk.client.rpush(desk.q.base, *[reference("forged")] * 1000)
    assert desk.call(ops.list_tasks(desk.q, 9, from_front=True))[1] == []
    desk.client.rpop(desk.q.base)
    assert desk.call(ops.list_tasks(desk.q, 9, from_front=True))[1] == [b"a"]


def test_a_count_of_more_stale_ones_than_there_are_hides_no_task(desk: Desk) -> None:
    desk.client.hset(desk.q.counts, "stale", 5)
    desk.put(b"a")
    assert desk.call(ops.list_tasks(desk.q, 9)) == (1, [b"a"])


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_tasks(desk.q, 9)) == [b"ok", 0]
    assert desk.state() == {}


def test_a_job_that_is_due_or_blocked_is_not_shown_and_one_with_two_places_once(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("runs")
    for run_at in (1, FUTURE, 1):
        desk.dispatch("x", b"x", run_at=run_at)
    desk.dispatch("y", b"y", run_at=FUTURE)
    for from_front in (False, True):
        assert desk.call(ops.list_tasks(desk.q, 9, from_front=from_front)) == (1, [b"x"])


def test_long_lists_are_read_whole_from_both_ends(desk: Desk) -> None:
    tasks = [b"%d" % n for n in range(333)]
    desk.put(*tasks)
    assert desk.call(ops.list_tasks(desk.q, 1000)) == (333, tasks[::-1])
    assert desk.call(ops.list_tasks(desk.q, 1000, from_front=True)) == (333, tasks)
    for limit in (1, 2, 3, 63, 64, 113, 332):
        assert desk.call(ops.list_tasks(desk.q, limit)) == (333, tasks[::-1][:limit])
        assert desk.call(ops.list_tasks(desk.q, limit, from_front=True)) == (333, tasks[:limit])


def test_positions_are_read_together_and_few_of_them_if_they_are_large(desk: Desk) -> None:
    desk.put(*[b"x"] * 1000)
    assert [stop - start + 1 for start, stop in reads(desk)] == [1, 2, 4, 8, 16, 32, *[50] * 18, 37]
    desk.wipe()
    desk.set_fence()
    desk.put(*[b"x" * 3_000_000] * 8)
    assert reads(desk) == [(0, 0), (1, 2), (3, 4)]


def reads(desk: Desk) -> list[tuple[int, int]]:
    """The parts of the list that the server is asked for."""
    found: list[tuple[int, int]] = []
    with desk.client.monitor() as monitor:
        desk.call(ops.list_tasks(desk.q, 1000))
        desk.client.echo(desk.prefix)
        for line in monitor.listen():
            words = line["command"].split(" ")
            if words == ["ECHO", desk.prefix]:
                break
            if words[:2] == ["LRANGE", desk.q.base]:
                found.append((int(words[2]), int(words[3])))
    return found
