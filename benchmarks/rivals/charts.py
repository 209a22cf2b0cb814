"""Draws the charts of README and documentation from a run, in light and in dark, as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import shown
from benchmarks.rivals.contender import OURS
from benchmarks.rivals.results import FAILED, FIGURES, LOST, NOT_OFFERED, Entry, Figure, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARTS: Mapping[str, Sequence[str]] = {
    "rivals": ("drain", "callers", "pickup50", "recovery"),
    "rivals-more": ("one", "bulk", "pickup99", "cancel", "idle", "memory"),
}
"""Pictures by name, with the keys of their figures."""
TITLES = {
    "drain": "Run no-op tasks",
    "one": "Enqueue, one call at a time",
    "callers": "Enqueue, 100 callers at once",
    "bulk": "Enqueue, bulk call",
    "pickup50": "Pick-up by an idle worker, p50",
    "pickup99": "Pick-up by an idle worker, p99",
    "cancel": "Cancel a running task, p50",
    "recovery": "Recovery after SIGKILL",
    "idle": "One idle worker",
    "memory": "Memory of a waiting task",
}
COLOURS = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "faint": "#57606a",
        "ours": "#4051b5",
        "other": "#aeb6c2",
        "line": "#d0d7de",
    },
    "dark": {
        "page": "#161b22",
        "text": "#e6edf3",
        "faint": "#9da7b3",
        "ours": "#7c8cff",
        "other": "#58616d",
        "line": "#30363d",
    },
}
WIDE = 40.0
"""The largest value by the smallest one; where lower is better and values differ more, the axis is logarithmic."""
LAST = {FAILED: 1, LOST: 2, NOT_OFFERED: 3}
"""The order of the texts below the values; ``> 120 s`` comes before them."""
LINE = 0.2
"""Inches per contender."""


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the charts into the folder, in both sets of colours; return the files."""
    figures = {figure.key: figure for figure in FIGURES}
    written: list[Path] = []
    for name, keys in CHARTS.items():
        panels = [figures[key] for key in keys if results.best(figures[key])]
        for mode, colours in COLOURS.items():
            path = folder / f"{name}-{mode}.svg"
            picture(results, panels, colours, path)
            written.append(path)
    return written


def picture(results: Results, panels: Sequence[Figure], colours: Mapping[str, str], path: Path) -> None:
    """Write one picture: two panels in each row."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = (len(panels) + 1) // 2
    style: Any = {
        "svg.fonttype": "none",  # text stays text: for search, and for screen readers
        "svg.hashsalt": path.stem,  # so that the same run makes the same file
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 8.5,
        "text.color": colours["text"],
    }
    with mpl.rc_context(style):
        height = rows * (LINE * len(results.entries) + 0.75)
        sheet = Sheet(
            figsize=(9.2, height), facecolor=colours["page"], layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        )
        axes = sheet.subplots(rows, 2, squeeze=False).flat
        for panel, figure in zip(axes, panels, strict=False):
            draw_panel(panel, results, figure, colours)
        for panel in list(axes)[len(panels) :]:
            panel.set_visible(False)
        sheet.savefig(path, metadata={"Date": None, "Title": ", ".join(TITLES[each.key] for each in panels)})
    text = "\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines())
    path.write_text(text + "\n", "utf-8")


def ordered(results: Results, figure: Figure) -> list[Entry]:
    """The best first, then those without a value; without those that were not measured."""
    ranked = [entry for _, entry in results.best(figure)]
    names = {entry.name for entry in ranked}
    others = [entry for entry in results.entries if entry.name not in names and entry.cell(figure.key)]
    return ranked + sorted(others, key=lambda entry: LAST.get(entry.cell(figure.key), 0))


def said(cell: str) -> str:
    """The text in place of a bar."""
    return "not offered" if cell == NOT_OFFERED else cell


def draw_panel(axes: Axes, results: Results, figure: Figure, colours: Mapping[str, str]) -> None:
    """One figure: a bar, or on a logarithmic axis a dot, for each contender."""
    entries = ordered(results, figure)
    values = [value for value, _ in results.best(figure)]
    logarithmic = not figure.most and min(values) > 0 and max(values) / min(values) > WIDE
    axes.set_facecolor(colours["page"])
    axes.set_title(f"{TITLES[figure.key]} ({figure.unit})", loc="left", fontsize=9.5, fontweight="bold", pad=14)
    how = "more is better" if figure.most else "less is better"
    note = f"{how}, logarithmic" if logarithmic else how
    axes.text(0, 1.012, note, transform=axes.transAxes, color=colours["faint"], fontsize=7.5, va="bottom")
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: shown(value))
        axes.xaxis.minorticks_off()
    for place, entry in enumerate(entries):
        value = entry.median(figure.key)
        colour = colours["ours" if entry.name.partition("-")[0] == OURS else "other"]
        if value is None:
            axes.annotate(said(entry.cell(figure.key)), (0, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
                          textcoords="offset points", va="center", color=colours["faint"])  # fmt: skip
            continue
        if logarithmic:
            axes.plot([value], [place], "o", color=colour, markersize=7)
        else:
            axes.barh([place], [value], color=colour, height=0.72)
        axes.annotate(
            shown(value), (value, place), xytext=(7 if logarithmic else 4, 0), textcoords="offset points", va="center"
        )
    dress(axes, entries, max(values), logarithmic=logarithmic, colours=colours)


def dress(
    axes: Axes, entries: Sequence[Entry], longest: float, *, logarithmic: bool, colours: Mapping[str, str]
) -> None:
    """Names to the left, ours in bold; no frame; room for the number behind the longest bar."""
    axes.tick_params(axis="both", length=0, colors=colours["faint"])
    axes.set_yticks(range(len(entries)), [entry.title for entry in entries])
    for label, entry in zip(axes.get_yticklabels(), entries, strict=True):
        label.set_color(colours["text"])
        label.set_fontweight("bold" if entry.name.partition("-")[0] == OURS else "normal")
    axes.set_ylim(len(entries) - 0.4, -0.6)
    left, right = axes.get_xlim()
    axes.set_xlim((left / 1.6, right * 3) if logarithmic else (0, (longest or 1) * 1.22))
    axes.xaxis.set_visible(logarithmic)
    for name, side in axes.spines.items():
        side.set_visible(name == "left")
        side.set_color(colours["line"])
    if logarithmic:
        axes.grid(axis="x", color=colours["line"], linewidth=0.6)
        axes.set_axisbelow(True)
