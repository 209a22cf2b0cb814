"""Measure worqr beside other task queues: ``python -m benchmarks.rivals [--only NAME] [--figures NAMES] [--quick]``.

With ``--page`` it writes the page and the charts of the documentation, too. ``--page FILE`` measures nothing, and writes
them from a run that ``--json`` kept.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import machine
from benchmarks.rivals.contender import Contender, Unusable, find, select
from benchmarks.rivals.environments import Prepared, prepare
from benchmarks.rivals.figures import QUICK, Plan
from benchmarks.rivals.page import write_docs
from benchmarks.rivals.results import SUBJECTS, Entry, Results, load, plain, remarks
from benchmarks.rivals.running import run
from benchmarks.server import bare, server_line
from worqr.embedded import EmbeddedServer

HOME = Path(__file__).parent.parent.parent / ".nox" / "rivals-environments"

MEASURED = Path()
"""What ``--page`` means without a file: the run itself."""


def words(text: str) -> list[str]:
    """Split a list with commas."""
    return [word for word in text.split(",") if word]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", type=words, action="extend", default=[], metavar="NAME", help="a library or a variant of it"
    )
    parser.add_argument(
        "--figures", type=words, action="extend", default=[], metavar="NAMES", help=f"of {','.join(SUBJECTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run, whose figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values there")
    parser.add_argument("--environments", type=Path, default=HOME, metavar="DIR", help="where libraries are installed")
    parser.add_argument("--list", action="store_true", help="print the contenders and end")
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=MEASURED,
        metavar="FILE",
        help="write page and charts of the docs; with FILE: from it",
    )
    options = parser.parse_args(arguments)
    try:
        options.contenders = select(find(), options.only)
    except ValueError as error:
        parser.error(str(error))
    if unknown := [name for name in options.figures if name not in SUBJECTS]:
        parser.error(f"no figure {unknown[0]!r}; known: {', '.join(SUBJECTS)}")
    if options.page == MEASURED and (options.only or options.figures or options.quick):
        parser.error("--page without a file needs a whole run: leave out --only, --figures and --quick")
    return options


def say(line: str) -> None:
    """Show progress, beside what is printed at the end."""
    print(line, file=sys.stderr, flush=True)


def prepared_all(contenders: Sequence[Contender], folder: Path, results: Results) -> list[tuple[Prepared, Entry]]:
    """Install each, make its entry, and return those that can be measured."""
    usable: list[tuple[Prepared, Entry]] = []
    for contender in contenders:
        entry = Entry(contender.name, contender.title)
        results.entries.append(entry)
        try:
            ready = prepare(contender, folder)
        except Unusable as reason:
            entry.failed = str(reason)
            say(f"{contender.title}: not measured, {reason}")
        else:
            entry.versions, entry.settings = dict(ready.about["versions"]), list(ready.about["settings"])
            usable.append((ready, entry))
    return usable


def heading() -> list[str]:
    """The machine and the server, in a line each."""
    with EmbeddedServer() as server:
        return [machine(), server_line(bare(server)).replace("a unix socket", "TCP, 127.0.0.1")]


def interrupt(number: int, frame: object) -> None:
    """End at Ctrl-C and at SIGTERM with no process left, also where a script started this in the background."""
    raise KeyboardInterrupt


def measured(options: argparse.Namespace) -> Results:
    """Install what is missing, and measure."""
    results = Results(heading())
    pairs = prepared_all(options.contenders, options.environments, results)
    began = time.monotonic()
    run(pairs, QUICK if options.quick else Plan(), frozenset(options.figures or SUBJECTS), say)
    results.heading.append(f"the run took {time.monotonic() - began:.0f} s; at the end: {machine()}")
    return results


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    if options.list:
        print("\n".join(f"{each.name:20} {' '.join(each.dependencies)}".rstrip() for each in options.contenders))
        return 0
    if options.page not in {None, MEASURED}:
        write_docs(load(options.page))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        results = measured(options)
    except KeyboardInterrupt:
        say("interrupted; all processes were ended")
        return 130
    if disturbed := results.disturbed():
        results.heading.append(disturbed)
    print("\n".join([*results.heading, "", plain(results.rows()), "", *remarks(results.entries)]))
    if options.json:
        results.write(options.json)
    if options.page:
        write_docs(results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
