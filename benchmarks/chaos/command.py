"""The command line: ``python -m benchmarks chaos --minutes 30 --seed 1 --server valkey``."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path

from benchmarks.chaos.case import Violation
from benchmarks.chaos.checker import Verdict, check
from benchmarks.chaos.history import History
from benchmarks.chaos.judge import Judge, lines_of
from benchmarks.chaos.ledger import read
from benchmarks.chaos.report import command, report
from benchmarks.chaos.world import Plan, run


def parse(arguments: list[str]) -> tuple[Plan, Path | None]:
    """The plan, and where to keep the ledger."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chaos",
        description="Inject random faults into real processes and servers, and check a ledger. Exit code 1: a violation.",
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults; start and end come on top (1)")
    parser.add_argument("--seed", type=int, help="decides faults and work, as far as timing lets it (random, printed)")
    parser.add_argument("--server", choices=("valkey", "redis", "cluster"), default="valkey")
    parser.add_argument("--program", type=Path, help="the server's program, in place of the one that is found")
    parser.add_argument("--peers", type=int, default=Plan.peers, help=f"at a time ({Plan.peers})")
    parser.add_argument("--producers", type=int, default=Plan.producers, help=f"at a time ({Plan.producers})")
    parser.add_argument("--spoilt", type=float, default=0.0, help="records a second that a foreign producer spoils (0)")
    parser.add_argument(
        "--ledger", type=Path, help="an empty folder for the ledger, which is kept (only after violations)"
    )
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10_000) if given.seed is None else given.seed
    plan = Plan(given.server, given.minutes, seed, given.peers, given.producers, given.spoilt, given.program)
    return plan, given.ledger


def both_verdicts(history: History, folder: Path) -> Verdict:
    """What the checker finds, and what the second judge finds in the same ledger."""
    verdict = check(history)
    second = [Violation("the second judge", text) for text in Judge(lines_of(folder)).judge()]
    return Verdict([*verdict.violations, *second], verdict.explained)


def main(arguments: list[str]) -> int:
    plan, kept = parse(arguments)
    print(command(plan), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="worqr-chaos-")) if kept is None else kept
    folder.mkdir(exist_ok=True)
    outcome = run(plan, folder)
    history = History.of(read(folder))
    verdict = both_verdicts(history, folder)
    print(report(plan, outcome, history, verdict, folder), flush=True)
    if kept is None and not verdict.violations:
        shutil.rmtree(folder)
    return 1 if verdict.violations else 0
