"""Measure, and print tables.

``python -m benchmarks [name ...] [--quick] [--many] [--json FILE] [--markdown FILE] [--figures DIR]``

``python -m benchmarks chaos`` measures nothing: it injects faults and checks what comes of it (`benchmarks.chaos`).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from pathlib import Path

import trio

from benchmarks.measuring import Plan, Table
from benchmarks.report import machine, print_table, write_json, write_markdown
from benchmarks.server import bare, server_line
from worqr.embedded import EmbeddedServer

SUBJECTS = (
    *(
        "drain",
        "jobs",
        "saving",
        "workflows",
        "lanes",
        "batches",
        "limits",
        "lists",
        "enqueue",
        "dispatch",
        "producers",
        "room",
        "pickup",
    ),
    *("cancel", "recovery", "idle", "fleet", "crowd", "cluster", "memory", "names", "operator", "bulk", "due", "storm"),
    *("calls", "schedules", "functions", "auto", "startup", "workers", "processes", "places", "threads", "tracing"),
    *("history", "scripts", "permits"),
)
"""The modules of this folder that measure something."""
LONGEST = 1200.0
"""Seconds that one subject may take at most. Most take one to three minutes, `permits` ten."""


def heading() -> list[str]:
    """The machine and the server, in a line each."""
    with EmbeddedServer() as server:
        return [machine(), server_line(bare(server))]


def measured(name: str, plan: Plan) -> list[Table]:
    """The tables of one subject, on a server of its own."""

    async def run(server: EmbeddedServer) -> list[Table]:
        with trio.fail_after(LONGEST):
            tables: list[Table] = await importlib.import_module(f"benchmarks.{name}").measure(plan, server)
            return tables

    with EmbeddedServer() as server:
        return trio.run(run, server)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["chaos"]:
        from benchmarks.chaos.command import main as chaos

        return chaos(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure worqr on a private server.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a smoke run, whose figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run of every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, as the docs have them")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw what a table cannot show there, as PNG")
    parser.add_argument("--many", action="store_true", help="measure 100,000 schedules, too")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in SUBJECTS:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(SUBJECTS)}")
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    lines = heading()
    print("\n".join(lines), end="\n\n", flush=True)
    tables: list[Table] = []
    began = time.monotonic()
    for name in options.names or SUBJECTS:
        for table in measured(name, Plan(options.quick, options.figures, options.many)):
            print_table(table)
            tables.append(table)
    missed = [f"{table.title}: {row.what}" for table in tables for row in table.rows if row.met is False]
    lines += [f"{time.monotonic() - began:.0f} s; at the end: {machine()}"]
    print(lines[-1])
    print("\n".join(("bars not met:", *missed)) if missed else "all bars are met")
    if options.json:
        write_json(options.json, lines, tables)
    if options.markdown:
        write_markdown(options.markdown, lines, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
