"""Writes what the documentation shows of a run: tables in ``docs/explain/compared.md``, charts, and the run as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import shown
from benchmarks.rivals.charts import CHARTS, TITLES, draw
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
        said = " ".join(sentence(results, by_key[key]) for key in keys if key in by_key)
        blocks.append("\n".join(f"![{said}](../assets/{name}-{mode}.svg#only-{mode})" for mode in ("light", "dark")))
    blocks += [table(results, [by_key[key] for key in keys if key in by_key]) for keys in TABLES]
    blocks += ["## Who is ahead", ahead(results), "## Versions and settings", settings(results.entries)]
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


def ahead(results: Results) -> str:
    """A line per figure: the three that are ahead, and worqr's place."""
    lines = ["| figure | first | second | third | worqr's best place |", "|---|---|---|---|---|"]
    for figure in results.figures:
        ranked = results.best(figure)
        names = [f"{entry.title}: {shown(value)}" for value, entry in ranked[:3]]
        names += [""] * (3 - len(names))
        places = [place for place, (_, entry) in enumerate(ranked, 1) if is_ours(entry)]
        place = f"{places[0]} of {len(ranked)}" if places else ""
        lines.append(f"| {figure.title}, {figure.unit} | " + " | ".join([*names, place]) + " |")
    return "\n".join(lines)


def sentence(results: Results, figure: Figure) -> str:
    """One figure for readers who cannot see the chart: worqr's best variant, and the best of the others."""
    ranked = results.best(figure)
    said = [next((pair for pair in ranked if is_ours(pair[1]) is ours), None) for ours in (True, False)]
    parts = [f"{entry.title} {shown(value)} {figure.unit}" for value, entry in filter(None, said)]
    return f"{TITLES[figure.key]}: {'; '.join(parts)}."


def settings(entries: Sequence[Entry]) -> str:
    """Versions and settings of each, as nested lists."""
    lines: list[str] = []
    for entry in entries:
        versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
        lines.append(f"- **{entry.title}**: {versions or 'not installed'}.")
        said = [*entry.settings, *entry.notes, *([f"Not measured: {entry.failed}"] if entry.failed else [])]
        lines += [f"    - {each[:1].upper()}{each[1:]}." for each in said]
    return "\n".join(lines)


def is_ours(entry: Entry) -> bool:
    """Whether this is worqr, in any variant."""
    return entry.name.partition("-")[0] == OURS
