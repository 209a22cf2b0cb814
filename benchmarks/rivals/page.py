"""Writes what the documentation shows of a run: tables in ``docs/explain/compared.md``, charts, and the run as data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.rivals.charts import CHARTS, draw
from benchmarks.rivals.contender import OURS
from benchmarks.rivals.results import Entry, Figure, Results

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explain" / "compared.md"
ASSETS = ROOT / "docs" / "assets"
DATA = Path(__file__).parent / "figures.json"
"""The run that page and charts show."""
BEGIN = "<!-- Written by `python -m benchmarks.rivals --page FILE`: do not edit from here -->"
END = "<!-- to here -->"
TABLES = (("drain", "one", "callers", "bulk", "memory"), ("pickup50", "pickup99", "cancel", "recovery", "idle"))


def write_docs(results: Results) -> None:
    """Write the page's tables, the charts and the data."""
    text = PAGE.read_text("utf-8")
    PAGE.write_text(replaced(text, section(results)), "utf-8")
    draw(results, ASSETS)
    results.write(DATA)


def replaced(text: str, written: str) -> str:
    """The page with another section between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{written}\n\n{END}{after}"


def section(results: Results) -> str:
    """All that comes from the run."""
    by_key = {figure.key: figure for figure in results.figures}
    blocks = ["## Figures", "\n".join(f"- {line}" for line in results.heading)]
    for name, keys in CHARTS.items():
        said = f"Charts of the tables below: {'; '.join(by_key[key].title for key in keys if key in by_key)}."
        blocks.append("\n".join(f"![{said}](../assets/{name}-{mode}.svg#only-{mode})" for mode in ("light", "dark")))
    blocks += [table(results, [by_key[key] for key in keys if key in by_key]) for keys in TABLES]
    blocks += ["## Versions and settings", settings(results.entries)]
    return "\n\n".join(blocks)


def table(results: Results, figures: Sequence[Figure]) -> str:
    """One contender per line."""
    heads = ["", *(f"{figure.title}, {figure.unit}" for figure in figures)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * len(figures)]
    for entry in results.entries:
        cells = [entry.cell(figure.key) or "not measured" for figure in figures]
        title = f"**{entry.title}**" if is_ours(entry) else entry.title
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def settings(entries: Sequence[Entry]) -> str:
    """Versions and settings, as nested lists. Variants of one library share an item, and name what only one of them has."""
    lines: list[str] = []
    for _, group in groupby(entries, key=lambda entry: (entry.name.partition("-")[0], tuple(entry.versions.items()))):
        variants = list(group)
        versions = ", ".join(f"{name} {version}" for name, version in variants[0].versions.items())
        titles = [variants[0].title, *(entry.title.rpartition(", ")[2] for entry in variants[1:])]
        lines.append(f"- **{'; '.join(titles)}**: {versions or 'not installed'}.")
        said = {entry.title.rpartition(", ")[2]: remarks_of(entry) for entry in variants}
        of = {line: [name for name, each in said.items() if line in each] for each in said.values() for line in each}
        for line, names in sorted(of.items(), key=lambda pair: len(pair[1]) < len(said)):
            shared = len(names) == len(said)
            lines.append(f"    - {line[:1].upper()}{line[1:]}." if shared else f"    - {' and '.join(names)}: {line}.")
    return "\n".join(lines)


def remarks_of(entry: Entry) -> list[str]:
    """What a reader must know of the settings of a contender."""
    return [*entry.settings, *entry.notes, *([f"Not measured: {entry.failed}"] if entry.failed else [])]


def is_ours(entry: Entry) -> bool:
    """Whether this is worqr, in any variant."""
    return entry.name.partition("-")[0] == OURS
