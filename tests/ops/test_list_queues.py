from __future__ import annotations

import pytest

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import registry


def note(desk: Desk, names: dict[str, int]) -> None:
    desk.client.zadd(desk.g.queues, dict(names))
    desk.client.expire(desk.g.queues, 1000)


def test_the_names_noted_last_come_first_with_the_servers_time(desk: Desk) -> None:
    note(desk, {"old": 1000, "newer": 2000, "seen ä": 3000})
    before = desk.now()
    with desk.nothing_changes():
        page = desk.call(ops.list_queues(desk.g))
    assert list(page.names.items()) == [("seen ä", 3000), ("newer", 2000), ("old", 1000)]
    assert page.next is None
    assert before <= page.now_ms <= desk.now()


def all_pages(desk: Desk) -> list[list[str]]:
    pages: list[list[str]] = []
    page = desk.call(ops.list_queues(desk.g))
    while True:
        pages.append(list(page.names))
        if page.next is None:
            return pages
        page = desk.call(ops.list_queues(desk.g, page.next))


def test_page_by_page_each_name_comes_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "QUEUES_AT_ONCE", 3)
    note(desk, {f"Q{n}": 1000 + n // 4 for n in range(10)})  # four of one millisecond, which no page holds
    assert all_pages(desk) == [["Q9", "Q8", "Q7"], ["Q6", "Q5", "Q4"], ["Q3", "Q2", "Q1"], ["Q0"]]


def test_a_page_that_holds_all_names_is_the_last(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "QUEUES_AT_ONCE", 3)
    note(desk, {"a": 1000, "b": 2000, "c": 3000})
    assert all_pages(desk) == [["c", "b", "a"]]


def test_a_page_after_a_name_that_was_noted_again_or_forgotten_leaves_nothing_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "QUEUES_AT_ONCE", 2)
    note(desk, {"a": 1000, "b": 2000, "c": 2000, "d": 3000, "e": 4000})
    page = desk.call(ops.list_queues(desk.g))
    assert list(page.names) == ["e", "d"]
    second = desk.call(ops.list_queues(desk.g, page.next))
    assert list(second.names) == ["c", "b"]
    desk.client.zadd(desk.g.queues, {"d": 5000})
    assert list(desk.call(ops.list_queues(desk.g, page.next)).names) == ["c", "b"]
    desk.client.zrem(desk.g.queues, "b")
    assert list(desk.call(ops.list_queues(desk.g, second.next)).names) == ["c", "a"], "those of its time once more"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    word, _, names, _watched = desk.send(ops.list_queues(desk.g))
    assert (word, names) == (b"ok", [])
    assert desk.state() == {}
