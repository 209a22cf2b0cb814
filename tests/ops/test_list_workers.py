from __future__ import annotations

from tests.ops.driver import KEEPALIVE, LEASE, Desk
from worqr import ops
from worqr.ops import WORK_MAPS_AT_ONCE, WorkerRow


def test_every_registered_worker_with_what_people_want_to_know(desk: Desk) -> None:
    desk.register("A", queues=["Q1", "Q2"])
    desk.beat("A", lease_ms=LEASE)
    desk.register("P", keepalive_ms=0)
    desk.register("M")
    desk.client.delete(desk.g.worker("M"), desk.g.info("M"))
    with desk.nothing_changes():
        page = desk.call(ops.list_workers(desk.g))
    assert (page.cursors, page.leader) == ([], "A")
    a, m, p = page.rows
    assert (a.worker, a.dead, sorted(a.queues)) == ("A", False, ["Q1", "Q2"])
    assert KEEPALIVE / 2 < a.ttl_ms <= KEEPALIVE
    assert a.facts.pop("started").isdigit()
    assert a.facts == {"host": "h", "running": "2", "room": "3", "lag_ms": "0", "leaving": "0"}
    assert (p.worker, p.ttl_ms, p.facts["host"], p.queues) == ("P", -1, "h", [])
    assert m == WorkerRow("M", False, -2, {}, [])


def test_the_dead_are_listed_until_their_tasks_are_given_back(desk: Desk) -> None:
    desk.register("A", "B", queues=["Q1"])
    desk.client.delete(desk.g.worker("B"))
    desk.call(ops.condemn_worker(desk.g, "B", None))
    alive, dead = desk.call(ops.list_workers(desk.g)).rows
    assert (alive.worker, alive.dead) == ("A", False)
    assert (dead.worker, dead.dead, dead.ttl_ms, dead.facts["host"], dead.queues) == ("B", True, -2, "h", ["Q1"])
    desk.call(ops.unmap_work(desk.g, "B", "Q1"))
    desk.call(ops.forget_worker(desk.g, "B"))
    assert [row.worker for row in desk.call(ops.list_workers(desk.g)).rows] == ["A"]


def listed(desk: Desk) -> list[list[str]]:
    """The worker ids of each page."""
    pages: list[list[str]] = []
    cursors = [""]
    while cursors:
        page = desk.call(ops.list_workers(desk.g, cursors[0]))
        pages.append([row.worker for row in page.rows])
        cursors = page.cursors
    return pages


def test_the_pages_have_each_worker_once(desk: Desk) -> None:
    size = ops.WORKERS_AT_ONCE
    names = [f"w{n:04}" for n in range(5 * size // 2)]
    desk.register(*names)
    desk.call(ops.condemn_worker(desk.g, names[size + 50], ops.ANY_BEAT))
    assert listed(desk) == [names[:size], names[size : 2 * size], names[2 * size :]]
    last = names[size - 1]
    desk.call(ops.stop_worker(desk.g, last))  # the last of a page may be gone when the next one is read
    assert [row.worker for row in desk.call(ops.list_workers(desk.g, last)).rows] == names[size : 2 * size]


def test_the_cursors_are_where_all_further_pages_begin(desk: Desk) -> None:
    size = ops.WORKERS_AT_ONCE
    names = [f"w{n:04}" for n in range(5 * size // 2)]
    desk.register(*names)
    first = desk.call(ops.list_workers(desk.g))
    assert first.cursors == [names[size - 1], names[2 * size - 1]]
    second = desk.call(ops.list_workers(desk.g, *first.cursors))
    assert ([row.worker for row in second.rows], second.cursors) == (names[size : 2 * size], [])
    assert desk.call(ops.list_workers(desk.g, "", names[size - 1])).cursors == []


def test_a_page_ends_early_where_workers_serve_many_queues(desk: Desk) -> None:
    desk.register("A", "B", "C")
    for worker in "ABC":
        desk.client.sadd(desk.g.work_map(worker), *(f"q{n}" for n in range(WORK_MAPS_AT_ONCE * 3 // 5)))
    assert listed(desk) == [["A", "B"], ["C"]]
    assert desk.call(ops.list_workers(desk.g, "", "B")).cursors == []
    desk.client.sadd(desk.g.work_map("A"), *(f"q{n}" for n in range(WORK_MAPS_AT_ONCE)))
    assert desk.call(ops.list_workers(desk.g, "", "B")).cursors == ["A"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_workers(desk.g)) == [b"ok", b"", []]
    assert desk.state() == {}
