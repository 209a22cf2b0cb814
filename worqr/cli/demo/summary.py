"""The end of the demo: every line of the summary is checked against the observed facts, and shows the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worqr.cli.demo.board import Board
from worqr.cli.demo.report import Report
from worqr.cli.demo.work import count_file


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the summary; `ok` None: nothing to check, for information."""

    what: str
    value: str
    note: str = ""
    ok: bool | None = None


def summarise(board: Board) -> list[Line]:
    """All lines, each with its verdict."""
    return [*_results(board), *_kill(board), *_long_task(board), *_found(board)]


def is_good(lines: list[Line]) -> bool:
    """True if nothing is missing and no check failed."""
    return all(line.ok is not False for line in lines)


def plural(n: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def shown(seconds: float) -> str:
    """A duration as people read it."""
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _results(board: Board) -> Iterator[Line]:
    missing, left = board.missing, {name: n for name, n in board.left.items() if n}
    agree = all(_same(report, board.first[report.path]) for report in board.again)
    twice = f"{plural(len(board.again), 'file')} reported twice{', equal' if agree else ', AND NOT EQUAL'}"
    yield Line("files in", str(len(board.files)))
    yield Line("results out", str(len(board.first)), twice if board.again else "one for each file", ok=agree)
    lost = f"missing: {', '.join(missing[:3])}{' ...' if missing[3:] else ''}" if missing else "every file has a result"
    yield Line("lost", str(len(missing)), lost, ok=not missing)
    if board.unknown:
        yield Line("unknown results", str(len(board.unknown)), board.unknown[0], ok=False)
    still = ", ".join(f"{name}: {n}" for name, n in left.items())
    yield Line("left in the queues", str(sum(left.values())), still, ok=bool(board.left) and not left)


def _same(report: Report, other: Report) -> bool:
    return report.counted == other.counted


def _kill(board: Board) -> Iterator[Line]:
    killed = board.killed
    if killed is None:
        yield Line("killed", "none", "no worker was running a file", ok=False)
        return
    yield Line("killed", killed.name, f"SIGKILL, while it ran {plural(killed.held, 'file')}", ok=killed.held > 0)
    again = sorted(board.second_runs.values(), key=lambda report: report.at)
    complete = len(again) >= killed.held
    yield Line(
        "retried",
        plural(len(again), "file"),
        f"all {killed.held} that it was running" if complete else f"it was running {killed.held}",
        ok=complete,
    )
    if again:
        first, last = (report.at - killed.at for report in (again[0], again[-1]))
        yield Line(
            "recovered",
            f"after {last:.2f} s",
            f"from the kill to the last retry; to the first: {first:.2f} s",
            ok=first > 0,
        )
        right = all(count_file(report.path) == report.counted for report in again)
        yield Line("retried results", "correct" if right else "WRONG", "counted again here and compared", ok=right)


def _long_task(board: Board) -> Iterator[Line]:
    long = board.long
    if long.cancel_called_at is None or long.cancelled_at is None or long.acknowledged_at is None:
        yield Line("long task", "not cancelled", "its handler reported no cancellation", ok=False)
        return
    ok = long.acknowledged == 1 and long.reason == "cancel" and long.runs == 1
    called = long.cancel_called_at
    note = f"on {long.peer}; confirmed after {shown(long.acknowledged_at - called)}"
    if not ok:
        note = f"reason {long.reason}, {plural(long.acknowledged, 'acknowledgement')}, {plural(long.runs, 'run')}"
    yield Line("long task cancelled", f"in {shown(long.cancelled_at - called)}", note, ok=ok)


def _found(board: Board) -> Iterator[Line]:
    counted = [report.counted for report in board.first.values() if report.counted is not None]
    lines, tokens = sum(c.lines for c in counted), sum(c.tokens for c in counted)
    broken = sum(c.broken for c in counted)
    odd = f"; {plural(broken, 'file')} of test data are not valid Python" if broken else ""
    yield Line("counted", f"{tokens:,} tokens", f"{lines:,} lines{odd}")
    first, *others = [f"{word} {n:,}" for word, n in board.keywords(4)] or ["none"]
    yield Line("keywords", first, ", ".join(others))
    yield Line(
        "time",
        f"{board.seconds:.1f} s",
        f"{len(board.first) / max(board.seconds, 0.1):.0f} files/s, including the recovery",
    )
