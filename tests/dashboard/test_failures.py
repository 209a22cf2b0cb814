"""The page of all failed tasks."""

from __future__ import annotations

import re
from typing import Any

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_live import opened
from tests.dashboard.test_pages import LEFT, fail, text_of
from tests.peer.tools import eventually
from worqr import ops
from worqr.dashboard import ended, live
from worqr.dashboard.pages import ErrorTable, error_table


@LEFT
async def test_errors_are_counted_on_demand(connected: worqr.Mesh, site: Site) -> None:
    await fail(connected, "orders", one=b"1", two=b"2", three=b"3")
    await fail(connected, "mails", four=b"4")
    page = (await site.get("/failed")).text
    assert 'href="/failed?count=errors"' in page
    assert "By error type" not in page
    page = (await site.get("/failed", count="errors")).text
    assert re.search(r"Error\s+All\s+orders\s+mails\s+worqr.Failure\s+4\s+3\s+1\s", text_of(page)), text_of(page)
    assert "/queue?name=orders&amp;tab=failed&amp;error=worqr.Failure#tasks" in page


@LEFT
async def test_many_errors_are_counted_look_by_look_for_all_viewers(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fail(connected, "orders", **{f"o{n}": b"1" for n in range(7)})
    count_errors, calls = ops.count_errors, list[int]()

    def by_two(keys: Any, which: Any, rank: int) -> Any:
        calls.append(rank)
        return count_errors(keys, which, rank, 2)

    monkeypatch.setattr(ops, "count_errors", by_two)
    monkeypatch.setattr(ended, "MAX_ITEMS", 2)
    monkeypatch.setattr(ended, "AT_ONCE", 2)
    monkeypatch.setattr(live, "QUICK", 0.01)
    page = await words(site, "/queue", name="orders", tab="failed", count="errors")
    assert "4 of 7 records are counted so far" in page
    assert "worqr.Failure 4" in page
    assert calls == [0, 2], "one batch"
    async with opened(site, "view=queue&name=orders&tab=failed&count=errors") as one:
        async with opened(site, "view=queue&name=orders&tab=failed&count=errors") as other:
            for stream in (one, other):
                await stream.wait_for("set", lambda texts: texts.get("errors.read") == "7 of 7")
    assert calls == [0, 2, 4, 6], "the viewers share one count"
    page = await words(site, "/queue", name="orders", tab="failed", count="errors")
    assert "worqr.Failure 7" in page
    assert "so far" not in page
    assert len(calls) == 4, "it is kept for a while"
    monkeypatch.setattr(ended, "COUNT_LASTS", -1.0)

    async def counted_anew() -> bool:
        return "4 of 7 records" in await words(site, "/failed", count="errors")

    await eventually(counted_anew, True)


async def words(site: Site, path: str, **query: str) -> str:
    """The text of a page with single spaces."""
    return " ".join(text_of((await site.get(path, **query)).text).split())


def test_the_table_of_errors() -> None:
    counts = {"a": {"X": 2, "Y": 1}, "b": {"X": 5}, "c": {}, "d": {"Z": 3}}
    assert error_table(counts) == ErrorTable(
        ["b", "a", "d"], [("X", 7, [5, 2, 0]), ("Z", 3, [0, 0, 3]), ("Y", 1, [0, 1, 0])], 0
    )
    many = error_table({"a": {f"E{number}": 1 for number in range(80)}})
    assert (len(many.rows), many.types_left_out) == (50, 30)
