"""The summary of the demo: its lines, each with a check of the state and its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worqr.cli.demo.state import DemoState, Report, count_file


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the summary. `ok`: the result of its check; None: the line has no check."""

    what: str
    value: str
    note: str = ""
    ok: bool | None = None


def summarise(state: DemoState) -> list[Line]:
    """Return all lines, each with its verdict."""
    return [*_results(state), *_kill(state), *_order(state), *_long_task(state), *_found(state)]


def is_good(lines: list[Line]) -> bool:
    """Return True if nothing is missing and no check failed."""
    return all(line.ok is not False for line in lines)


def plural(n: int, what: str) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def readable_seconds(seconds: float) -> str:
    """Return a duration as people read it."""
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _results(state: DemoState) -> Iterator[Line]:
    missing, left = state.results.missing, {name: n for name, n in state.left.items() if n}
    agree = all(_same(report, state.results.first[report.path]) for report in state.results.repeated)
    twice = f"{plural(len(state.results.repeated), 'file')} reported twice{', equal' if agree else ', AND NOT EQUAL'}"
    yield Line("files in", str(len(state.results.files)))
    yield Line(
        "results out", str(len(state.results.first)), twice if state.results.repeated else "one for each file", ok=agree
    )
    lost = f"missing: {', '.join(missing[:3])}{' ...' if missing[3:] else ''}" if missing else "every file has a result"
    yield Line("lost", str(len(missing)), lost, ok=not missing)
    if state.results.unknown:
        yield Line("unknown results", str(len(state.results.unknown)), state.results.unknown[0], ok=False)
    still = ", ".join(f"{name}: {n}" for name, n in left.items())
    yield Line("left in the queues", str(sum(left.values())), still, ok=bool(state.left) and not left)


def _same(report: Report, other: Report) -> bool:
    return report.counted == other.counted


def _kill(state: DemoState) -> Iterator[Line]:
    killed = state.killed
    if killed is None:
        yield Line("killed", "none", "no worker was running a file", ok=False)
        return
    yield Line("killed", killed.name, f"SIGKILL, while it ran {plural(killed.held, 'file')}", ok=killed.held > 0)
    again = sorted(state.results.second_runs.values(), key=lambda report: report.at)
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


def _order(state: DemoState) -> Iterator[Line]:
    order = state.order
    if order.waits_since is None or order.approved_at is None or order.state != "suspended":
        yield Line("workflow", "did not wait", f"its job was {order.state or 'not there'}", ok=False)
        return
    waited = readable_seconds(order.approved_at - order.waits_since)
    yield Line("workflow waited", waited, "for an approval, in no worker", ok=True)
    counts = [len(order.of(kind)) for kind in ("charged", "shipping", "shipped")]
    if counts != [1, 2, 1] or state.killed is None:
        note = "its steps began {} and {} times, and {} of them ended".format(*counts)
        yield Line("workflow resumed", "WRONG", note, ok=False)
        return
    again = order.of("shipping")[1]
    note = f"on {again.worker}; card charged once"
    yield Line("workflow resumed", f"after {again.at - state.killed.at:.2f} s", note, ok=True)


def _long_task(state: DemoState) -> Iterator[Line]:
    task = state.long_task
    if task.cancel_called_at is None or task.cancelled_at is None or task.acknowledged_at is None:
        yield Line("long task", "not cancelled", "its handler reported no cancellation", ok=False)
        return
    ok = task.acknowledged == 1 and task.reason == "cancel" and task.runs == 1
    called = task.cancel_called_at
    note = f"on {task.worker}; confirmed after {readable_seconds(task.acknowledged_at - called)}"
    if not ok:
        note = f"reason {task.reason}, {plural(task.acknowledged, 'acknowledgement')}, {plural(task.runs, 'run')}"
    yield Line("long task cancelled", f"in {readable_seconds(task.cancelled_at - called)}", note, ok=ok)


def _found(state: DemoState) -> Iterator[Line]:
    counted = [report.counted for report in state.results.first.values() if report.counted is not None]
    lines, tokens = sum(c.lines for c in counted), sum(c.tokens for c in counted)
    broken = sum(c.broken for c in counted)
    odd = f"; {plural(broken, 'file')} of test data are not valid Python" if broken else ""
    yield Line("counted", f"{tokens:,} tokens", f"{lines:,} lines{odd}")
    first, *others = [f"{word} {n:,}" for word, n in state.results.keywords(4)] or ["none"]
    yield Line("keywords", first, ", ".join(others))
    yield Line(
        "time",
        f"{state.clock.seconds:.1f} s",
        f"{len(state.results.first) / max(state.clock.seconds, 0.1):.0f} files/s, including the recovery",
    )
