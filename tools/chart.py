"""Draws the bar chart of the README: ``python -m tools.chart`` writes docs/assets/chart.svg from tools/chart.toml.

Each row has two bars: what worqr does, and the limit, which is the same work done with as little as possible. The picture
has colours for light and dark, and its own background, so that it can be read on any page.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "tools" / "chart.toml"
PICTURE = ROOT / "docs" / "assets" / "chart.svg"
WIDTH = 760
LEFT = 260
"""Where bars begin: labels are left of it."""
RIGHT = 120
"""Room for the number behind the longest bar."""
BAR = 16
ROW = 56
TOP = 58
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  .text { fill: #1f2328 } .faint { fill: #57606a }
  .worqr { fill: #4051b5 } .limit { fill: #aeb6c2 }
  text { font: 14px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif }
  .title { font-size: 16px; font-weight: 600 } .small { font-size: 12px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d }
    .text { fill: #e6edf3 } .faint { fill: #9da7b3 }
    .worqr { fill: #7c8cff } .limit { fill: #58616d }
  }
"""


@dataclass(frozen=True)
class Row:
    """Two bars."""

    label: str
    worqr: float
    limit: float


def chart(title: str, note: str, unit: str, rows: list[Row]) -> str:
    """Return the chart as SVG."""
    longest = max(max(row.worqr, row.limit) for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + ROW * len(rows) + 40
    said = "; ".join(f"{row.label}: worqr {row.worqr:,.0f}, limit {row.limit:,.0f}" for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(said)}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text title" x="20" y="32">{escape(title)}</text>',
        *_key(WIDTH - 170, 22),
    ]
    for number, row in enumerate(rows):
        top = TOP + ROW * number
        parts.append(
            f'<text class="text" x="{LEFT - 12}" y="{top + BAR + 6}" text-anchor="end">{escape(row.label)}</text>'
        )
        for kind, value, y in (("worqr", row.worqr, top), ("limit", row.limit, top + BAR + 3)):
            length = max(value * scale, 2)
            parts += [
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>',
                f'<text class="{"text" if kind == "worqr" else "faint"} small" x="{LEFT + length + 6:.1f}" y="{y + 12}">'
                f"{value:,.0f} {escape(unit)}</text>",
            ]
    parts += [f'<text class="faint small" x="20" y="{height - 16}">{escape(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _key(x: int, y: int) -> list[str]:
    """The legend."""
    return [
        part
        for at, kind in ((x, "worqr"), (x + 80, "limit"))
        for part in (
            f'<rect class="{kind}" x="{at}" y="{y}" width="12" height="12" rx="2"/>',
            f'<text class="text small" x="{at + 18}" y="{y + 11}">{kind}</text>',
        )
    ]


def draw() -> str:
    """Return the chart of `FIGURES`."""
    figures = tomllib.loads(FIGURES.read_text("utf-8"))
    return chart(figures["title"], figures["note"], figures["unit"], [Row(**row) for row in figures["rows"]])


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
