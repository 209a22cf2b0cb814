"""What was measured: figures, medians, the table, and the file that keeps them."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.measuring import shown


@dataclass(frozen=True, slots=True)
class Figure:
    """One column of the table. `subject` is what ``--figures`` takes; `most`: a higher value is better."""

    key: str
    subject: str
    title: str
    unit: str
    most: bool = False


FIGURES = (
    Figure("drain", "drain", "drain", "tasks/s", most=True),
    Figure("one", "enqueue", "enqueue, one call at a time", "tasks/s", most=True),
    Figure("callers", "enqueue", "enqueue, 100 callers", "tasks/s", most=True),
    Figure("bulk", "enqueue", "enqueue, bulk call", "tasks/s", most=True),
    Figure("pickup50", "pickup", "pick-up, p50", "ms"),
    Figure("pickup99", "pickup", "pick-up, p99", "ms"),
    Figure("cancel", "cancel", "cancel, p50", "ms"),
    Figure("recovery", "recovery", "recovery after SIGKILL", "s"),
    Figure("idle", "idle", "idle worker", "commands/s"),
    Figure("memory", "memory", "waiting task", "bytes"),
)
SUBJECTS = tuple(dict.fromkeys(figure.subject for figure in FIGURES))
NOT_OFFERED = "-"
LOST = "lost"
FAILED = "failed"
DISTURBED = 2.0
"""If the best of all turns is so many times the worst one, something else used the machine."""
HEAD = 12
"""Characters in a line of a title in the terminal."""


@dataclass(slots=True)
class Entry:
    """One contender's figures.

    Attributes:
        name, title: Of the contender.
        versions: Of the libraries that take part, by their names.
        settings: How it was set up, a sentence each.
        failed: Why it could not be measured at all; empty: it could.
        values: Of each figure, one value per turn.
        texts: What stands in a cell without a value: ``-``, ``lost``, ``> 120 s``, ``failed``.
        notes: What a reader must know, such as why a figure failed.
    """

    name: str
    title: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    settings: list[str] = field(default_factory=list[str])
    failed: str = ""
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    def add(self, key: str, value: float) -> None:
        """Keep the value of one turn."""
        self.values.setdefault(key, []).append(value)

    def fail(self, subjects: Set[str], reason: str) -> None:
        """Keep why subjects failed; the values of other turns stay."""
        for figure in FIGURES:
            if figure.subject in subjects:
                self.texts.setdefault(figure.key, FAILED)
        note = f"{', '.join(sorted(subjects))} failed: {reason}"
        if note not in self.notes:
            self.notes.append(note)

    def median(self, key: str) -> float | None:
        """The median of all turns; None: there is no value."""
        return statistics.median(self.values[key]) if self.values.get(key) else None

    def cell(self, key: str) -> str:
        """The text for the table."""
        value = self.median(key)
        if value is not None:
            return shown(value)
        return "" if self.failed else self.texts.get(key, "")


@dataclass(slots=True)
class Results:
    """A whole run. `heading` says on what machine and server it took place."""

    heading: list[str]
    entries: list[Entry] = field(default_factory=list[Entry])

    @property
    def figures(self) -> list[Figure]:
        """The figures that were measured for at least one contender."""
        return [
            each
            for each in FIGURES
            if any(each.key in entry.values or each.key in entry.texts for entry in self.entries)
        ]

    def best(self, figure: Figure) -> list[tuple[float, Entry]]:
        """All who have a value, the best first."""
        found = [(value, entry) for entry in self.entries if (value := entry.median(figure.key)) is not None]
        return sorted(found, key=lambda pair: pair[0], reverse=figure.most)

    def disturbed(self) -> str:
        """Say how many rates differ widely between turns; empty: all agree well enough."""
        rates = [
            entry.values[each.key] for each in FIGURES if each.most for entry in self.entries if entry.median(each.key)
        ]
        wide = sum(max(values) > DISTURBED * min(values) for values in rates)
        if not wide:
            return ""
        return (
            f"{wide} of {len(rates)} rates differ by more than {DISTURBED:g} times between turns: use a quieter machine"
        )

    def rows(self) -> list[list[str]]:
        """The table: a line with the titles, one with the units, one per contender."""
        figures = self.figures
        heads = [["", *(each.title for each in figures)], ["", *(each.unit for each in figures)]]
        return heads + [[entry.title, *(entry.cell(each.key) for each in figures)] for entry in self.entries]

    def write(self, path: Path) -> None:
        """Write all values as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")


def load(path: Path) -> Results:
    """Read what `Results.write` wrote."""
    told = json.loads(path.read_text("utf-8"))
    return Results(told["heading"], [Entry(**entry) for entry in told["entries"]])


def remarks(entries: Iterable[Entry]) -> list[str]:
    """Versions, settings and notes of each contender, a paragraph each."""
    lines: list[str] = []
    for entry in entries:
        versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
        said = [*entry.settings, *entry.notes, *([f"not measured: {entry.failed}"] if entry.failed else [])]
        lines.append(f"{entry.title} ({versions or 'not installed'}): " + "; ".join(said))
    return lines


def plain(rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal: long titles take several lines, the first column is to the left."""
    heads = [textwrap.wrap(title, HEAD) for title in rows[0]]
    height = max(map(len, heads))
    lines = [[(head[line] if line < len(head) else "") for head in heads] for line in range(height)]
    lines += [list(row) for row in rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
