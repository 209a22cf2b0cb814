"""``python -m benchmarks.compare REVISION [name ...] [--rounds N]``: measure this tree beside another revision, in turns.

Each round runs the named benchmarks once in a checkout of REVISION and once in this tree, in changing order. So a
busy minute of the machine affects both. The table shows the ratio of each figure, this tree by the other revision, in such a
way that more than 1 is better. A figure that only one of them has is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import RATES, shown
from benchmarks.report import machine

ROOT = Path(__file__).parent.parent
NAMES = ("drain", "enqueue", "pickup", "cancel", "idle")
LONGEST = 1800.0
"""Seconds that one run of all benchmarks may take in one tree."""


@dataclass
class Figure:
    """One row of a table, as both trees measured it: a median per round."""

    title: str
    what: str
    unit: str
    before: list[float] = field(default_factory=list[float])
    now: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios; more than 1 is better."""
        pairs = zip(self.before, self.now, strict=True)
        more_is_better = self.unit in RATES
        return statistics.median(now / before if more_is_better else before / now for before, now in pairs)


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A working tree of `revision` beside this one, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="worqr-compare-") as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def run(tree: Path, names: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """The medians of one run of the benchmarks in `tree`, by title, row and unit."""
    with tempfile.TemporaryDirectory(prefix="worqr-compare-") as folder:
        found = Path(folder, "found.json")
        subprocess.run(
            [sys.executable, "-m", "benchmarks", *names, "--json", found],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            timeout=LONGEST,
            check=True,
        )
        return medians(json.loads(found.read_text("utf-8")))


def medians(found: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """The output of ``--json``, as one figure per row."""
    return {
        (table["title"].partition(":")[0], row["what"], row["unit"]): row["median"]
        for table in found["tables"]
        for row in table["rows"]
    }


def measured(tree: Path, names: Sequence[str], rounds: int) -> list[Figure]:
    """The figures that both trees have, after `rounds` rounds."""
    figures: dict[tuple[str, str, str], Figure] = {}
    for n in range(rounds):
        results = {each: run(each, names) for each in ((tree, ROOT) if n % 2 == 0 else (ROOT, tree))}
        for key in results[tree].keys() & results[ROOT].keys():
            figure = figures.setdefault(key, Figure(*key))
            figure.before.append(results[tree][key])
            figure.now.append(results[ROOT][key])
        print(f"round {n + 1} of {rounds}: {machine()}", file=sys.stderr, flush=True)
    return sorted(figures.values(), key=lambda figure: (figure.title, figure.what))


def table(figures: Sequence[Figure], revision: str) -> str:
    """The figures as text, aligned in columns."""
    lines = [("benchmark", "figure", "unit", revision, "this tree", "ratio")]
    lines += [
        (f.title, f.what, f.unit, shown(statistics.median(f.before)), shown(statistics.median(f.now)), f"{f.ratio:.2f}")
        for f in figures
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="Measure this tree beside another revision, in turns."
    )
    parser.add_argument("revision", help="what to compare with: a commit, branch or tag")
    parser.add_argument("names", nargs="*", metavar="name", default=NAMES, help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tree is measured; default: 3")
    options = parser.parse_args(arguments)
    with checkout(options.revision) as tree:
        figures = measured(tree, options.names or NAMES, options.rounds)
    print(table(figures, options.revision))
    print("ratio: this tree by the other revision, the median of all rounds; more than 1 is better")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
