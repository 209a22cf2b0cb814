"""The page of all failed tasks."""

from __future__ import annotations

import re

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_pages import LEFT, fail, text_of
from worqr.dashboard import failures
from worqr.dashboard.failures import ErrorTable, error_table


@LEFT
async def test_errors_are_counted_on_demand(connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await fail(connected, "orders", one=b"1", two=b"2", three=b"3")
    await fail(connected, "mails", four=b"4")
    page = (await site.get("/failed")).text
    assert 'href="/failed?count=errors"' in page
    assert "By error type" not in page
    page = (await site.get("/failed", count="errors")).text
    assert re.search(r"Error\s+All\s+orders\s+mails\s+worqr.policy.Failure\s+4\s+3\s+1\s", text_of(page)), text_of(page)
    assert "/queue?name=orders&amp;tab=failed&amp;error=worqr.policy.Failure#tasks" in page
    monkeypatch.setattr(failures, "MOST_COUNTED", 3)
    text = text_of((await site.get("/failed", count="errors")).text)
    assert re.search(r"worqr.policy.Failure\s+1\s+1\s", text)
    assert "Count the errors of orders" in text


def test_the_table_of_errors() -> None:
    counts = {"a": {"X": 2, "Y": 1}, "b": {"X": 5}, "c": {}, "d": {"Z": 3}}
    assert error_table(counts, ["e"]) == ErrorTable(
        ["b", "a", "d"], [("X", 7, [5, 2, 0]), ("Z", 3, [0, 0, 3]), ("Y", 1, [0, 1, 0])], 0, ["e"]
    )
    many = error_table({"a": {f"E{number}": 1 for number in range(80)}})
    assert (len(many.rows), many.types_left_out) == (50, 30)
