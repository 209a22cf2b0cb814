"""The pictures of the documentation show the figures of the run that is kept as data, and so does their page."""

from __future__ import annotations

import re

import pytest

from benchmarks.measuring import shown
from benchmarks.rivals.charts import CHARTS, COLOURS, TITLES
from benchmarks.rivals.page import ASSETS, DATA, PAGE, replaced, section
from benchmarks.rivals.results import FIGURES, load

REMEDY = "run `python3 run.py rivals --page benchmarks/rivals/figures.json`"


def test_the_page_shows_the_run_that_is_kept() -> None:
    text = PAGE.read_text("utf-8")
    assert replaced(text, section(load(DATA))) == text, REMEDY


@pytest.mark.parametrize("mode", COLOURS)
@pytest.mark.parametrize("name", CHARTS)
def test_the_charts_show_the_run_that_is_kept(name: str, mode: str) -> None:
    results = load(DATA)
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", (ASSETS / f"{name}-{mode}.svg").read_text("utf-8"))
    for figure in FIGURES:
        if figure.key in CHARTS[name]:
            assert f"{TITLES[figure.key]} ({figure.unit})" in texts
            missing = {shown(value) for value, _ in results.best(figure)} - set(texts)
            assert missing == set(), f"{figure.title}: {REMEDY}"


def test_every_figure_has_a_chart() -> None:
    assert {key for keys in CHARTS.values() for key in keys} == {figure.key for figure in FIGURES}
