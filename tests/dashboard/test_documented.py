"""docs/howto/dashboard.md describes every page."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

from tools.dashboard_pictures import PASTS, SHOTS, records_of
from worqr.cli.demo.shop_dashboard import make_mesh
from worqr.dashboard.app import NAVIGATION, ROUTES
from worqr.inside import declarations_of

TEXT = (Path(__file__).parents[2] / "docs/howto/dashboard.md").read_text("utf-8")
SECTION = re.split(r"^## What the pages show$", TEXT, flags=re.MULTILINE)[1].split("\n## ")[0]
NAMES = {
    "/": "Overview",
    "/queue": "a queue",
    "/job": "a job",
    "/worker": "each runs",
    "/bulk": "Act on many tasks",
    "/schedule-form": "stores and changes",
}
"""What the document calls a page whose name is not the word of its address."""
NO_PAGES = {"/live", "/payload", "/metrics"}


def test_every_page_is_described() -> None:
    pages = [path for path, route in ROUTES.items() if route.method == "GET" and not path.startswith("/api")]
    missing = [
        path
        for path in pages
        if path not in NO_PAGES and not re.search(rf"\b{NAMES.get(path, path[1:])}\b", SECTION, re.IGNORECASE)
    ]
    assert missing == [], "add a row to the table of pages"


def test_every_page_of_the_navigation_has_a_row() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", SECTION, re.MULTILINE)
    assert [name for _, name in NAVIGATION if name not in rows] == []


def test_every_act_has_a_row_on_the_page_for_programs_with_its_right() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/dashboard-api.md").read_text("utf-8")
    told = dict[str, str]()
    for paths, rights in re.findall(r"^\| (`/(?!api/)[^|]+) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE):
        acts, words = re.findall(r"`(/[^`]+)`", paths), re.findall(r"`([^`]+)`", rights)
        told |= dict(zip(acts, words * len(acts) if len(words) == 1 else words, strict=True))
    assert told == {path: route.right for path, route in ROUTES.items() if route.method == "POST"}


def test_pictures_have_an_alternative_text_and_a_reasonable_size() -> None:
    pictures = re.findall(r"!\[([^\]]*)\]\(\.\./assets/(dashboard-[a-z]+\.png)\)", TEXT)
    assert len(pictures) >= 6
    for text, file in pictures:
        assert len(text) > 20, file
        assert (Path(__file__).parents[2] / "docs/assets" / file).stat().st_size < 250_000, file


def test_the_program_that_takes_the_pictures_takes_those_of_the_guide() -> None:
    """Take them with ``python -m tools.dashboard_pictures docs/assets`` when the pages look different."""
    assert {f"dashboard-{shot.name}.png" for shot in SHOTS} == set(re.findall(r"dashboard-[a-z]+\.png", TEXT))
    assert {shot.path.partition("?")[0] for shot in SHOTS} <= ROUTES.keys()
    assert PASTS.keys() <= declarations_of(make_mesh("redis://127.0.0.1:1/0", "shop")).functions.keys()


def test_the_history_on_the_pictures_only_grows() -> None:
    found = [record for record, _ in records_of(PASTS["payments.charge"], random.Random(1))]
    for before, after in pairwise(found):
        assert after.minute == before.minute + 1
        every = zip(
            (*before.totals, *before.runs, *before.waits), (*after.totals, *after.runs, *after.waits), strict=True
        )
        assert all(old <= new for old, new in every)
