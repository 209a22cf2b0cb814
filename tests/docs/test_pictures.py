"""The pictures of the documentation are those that their programs draw, and their figures are those of the pages."""

from __future__ import annotations

import tomllib

from tests.children import ROOT
from tools import chart

BENCHMARKS = ROOT / "docs" / "explain" / "benchmarks.md"


def test_the_chart_is_the_one_of_its_figures() -> None:
    assert chart.PICTURE.read_text("utf-8") == chart.draw(), "run `python -m tools.chart`"


def test_the_figures_of_the_chart_are_those_of_the_benchmarks() -> None:
    rows = tomllib.loads(chart.FIGURES.read_text("utf-8"))["rows"]
    lines = BENCHMARKS.read_text("utf-8").splitlines()
    for row in rows:
        figures = {f" {row['worqr']:,} ", f" {row['limit']:,} "}
        assert any(all(figure in line for figure in figures) for line in lines), row["label"]
