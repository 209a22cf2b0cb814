"""The processes of the workers: the demo starts, freezes and kills them, and stops them at its end.

The standard input of each worker is the reading end of a pipe. When the demo closes the pipe, or ends for any reason, the worker
stops. Each worker has a session of its own, so that Ctrl-C reaches only the demo, which then stops the workers.
"""

from __future__ import annotations

import keyword
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tokenize
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Literal

import msgspec
import trio

import worqr
from worqr.errors import UsageError, WorqrError

# The state of the demo as plain data: the scenario changes it, the displays show it, `summarise` checks it.
#
# `DemoState` has the whole state. It consists of the results of the files, the long task, the clock and one row for each
# worker. Nothing here does I/O.

# The work of the demo: tokenise source files, and count the tokens. Queues are not known here.
#
# It is real work that exists on any machine: every source file of the Python that runs this, including its own test suite
# (where the system has one). Some of those are broken on purpose; that they cannot be read is a result like any other.


NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one file. `broken`: the file is not valid Python, and only the part before the error was counted."""

    lines: int
    tokens: int
    keywords: dict[str, int]
    broken: bool = False


def find_files(limit: int | None = None) -> list[str]:
    """Return the paths of the library's source files; with `limit`, only the largest ones.

    Raises:
        UsageError: there are none.
    """
    root = sysconfig.get_path("stdlib")
    found: list[tuple[int, str]] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in NOT_THE_LIBRARY]
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        found += [(os.path.getsize(path), path) for path in paths if os.path.isfile(path)]
    if not found:
        raise UsageError(
            f"no source files of Python's standard library under {root}: this Python has it in another form"
        )
    largest = sorted(found, reverse=True)[:limit]
    return sorted(path for _, path in largest)


def count_file(path: str) -> Counted:
    """Tokenise one file, and return the counts."""
    lines = tokens = 0
    words: Counter[str] = Counter()
    broken = False
    try:
        with open(path, "rb") as source:
            for token in tokenize.tokenize(source.readline):
                tokens += 1
                lines = token.end[0]
                if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                    words[token.string] += 1
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        broken = True
    return Counted(lines, tokens, dict(sorted(words.items())), broken)


# The reports of the demo's handlers: JSON objects in the queue ``results``. They are written and read here.
#
# Times are of the system's monotonic clock, which all processes of one machine share. So the demo can show how long after the
# kill a second run began.


FILES = "files"

"""The queue of the paths to count."""

LONG = "long"

"""The queue of the one task that takes too long."""

RESULTS = "results"

"""The queue of the reports."""

ORDERS = "orders"
"""The queue of the workflow."""

LONG_TASK = b"a task that would run for ever"
ORDER = "order-7"


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One report.

    Attributes:
        kind: ``counted``, a file's result; ``began`` and ``cancelled``, of the long task; ``charged``, ``shipping`` and
            ``shipped``, of the workflow.
        worker: the name of the worker that ran it.
        at: when that run began, or was cancelled.
        path: the file.
        counted: the counts of the file.
        stalls: how many workers died while they ran it before.
        reason: why it was cancelled.
    """

    kind: Literal["counted", "began", "cancelled", "charged", "shipping", "shipped"]
    worker: str
    at: float
    path: str = ""
    counted: Counted | None = None
    stalls: int = 0
    reason: str | None = None


def encode(report: Report) -> bytes:
    """Return the report as a task."""
    return msgspec.json.encode(report)


def decode(task: bytes) -> Report:
    """Return the report in a task."""
    return msgspec.json.decode(task, type=Report)


RATE_WINDOW = 2.0


@dataclass(slots=True)
class WorkerRow:
    """One worker as the table shows it."""

    name: str
    pid: int = 0
    state: str = "starting"
    running: int = 0
    files: int = 0

    def update(self, pid: int, state: str, running: int) -> None:
        """Set the values that the demo has just read."""
        self.pid, self.state, self.running = pid, state, running


@dataclass(frozen=True, slots=True)
class Killed:
    """The worker that was killed: when, and how many files it held while it was frozen."""

    name: str
    pid: int
    at: float
    held: int


@dataclass(slots=True)
class LongTask:
    """The times of the long task, by the clock that all processes share. None: not yet."""

    worker: str = ""
    began_at: float | None = None
    cancel_called_at: float | None = None
    cancelled_at: float | None = None
    acknowledged_at: float | None = None
    reason: str | None = None
    acknowledged: int = 0
    runs: int = 0

    def add(self, report: Report) -> None:
        """Add a report of its handler: it began, or it was cancelled."""
        if report.kind == "began":
            self.worker, self.began_at = report.worker, report.at
            self.runs += 1
        else:
            self.cancelled_at, self.reason = report.at, report.reason

    def call_cancel(self) -> None:
        """Note that the demo cancels the task now."""
        self.cancel_called_at = time.monotonic()

    def acknowledge_cancel(self, runs: int) -> None:
        """Note that the call of `cancel` has returned, and how many runs it has ended."""
        self.acknowledged_at, self.acknowledged = time.monotonic(), runs


@dataclass(slots=True)
class OrderRun:
    """The workflow: it charges a card, waits for an approval, and ships. Its worker is killed while it ships.

    `reports` has what its steps have reported. `state` was the last state of its job before the approval.
    """

    reports: list[Report] = field(default_factory=list[Report])
    state: str = ""
    waits_since: float | None = None
    approved_at: float | None = None

    def of(self, kind: str) -> list[Report]:
        """Return the reports of this kind, the first one first."""
        return [report for report in self.reports if report.kind == kind]

    def wait(self, state: str) -> None:
        """Note that it waits, and the state of its job."""
        self.state, self.waits_since = state, time.monotonic()

    def approve(self) -> None:
        """Note that the approval is sent now."""
        self.approved_at = time.monotonic()


@dataclass(slots=True)
class FileResults:
    """The results of the files.

    `first` has the first report of each file, and `repeated` every further report of the same file. `second_runs` has one
    report of each file whose worker had died before. `unknown` has the paths that the demo did not enqueue.
    """

    files: frozenset[str]
    first: dict[str, Report] = field(default_factory=dict[str, Report])
    repeated: list[Report] = field(default_factory=list[Report])
    unknown: list[str] = field(default_factory=list[str])
    second_runs: dict[str, Report] = field(default_factory=dict[str, Report])
    _recent: deque[float] = field(default_factory=deque[float])

    @property
    def missing(self) -> list[str]:
        """The files without a result."""
        return sorted(self.files - self.first.keys())

    def add(self, report: Report) -> bool:
        """Add a report; return True if it is the first of its file. The same report may arrive twice."""
        if report.path not in self.files:
            self.unknown.append(report.path)
            return False
        if report.stalls:
            self.second_runs.setdefault(report.path, report)
        if report.path in self.first:
            self.repeated.append(report)
            return False
        self.first[report.path] = report
        self._recent.append(time.monotonic())
        return True

    def rate(self, seconds: float) -> float:
        """Return the files per second of the last `RATE_WINDOW`, in a demo that has run for `seconds`."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > RATE_WINDOW:
            self._recent.popleft()
        return len(self._recent) / min(RATE_WINDOW, max(seconds, 0.1))

    def keywords(self, n: int) -> list[tuple[str, int]]:
        """Return the `n` most frequent keywords in all files, with their counts."""
        total: Counter[str] = Counter()
        for report in self.first.values():
            if report.counted is not None:
                total.update(report.counted.keywords)
        return total.most_common(n)


@dataclass(slots=True)
class DemoClock:
    """When the demo began and ended."""

    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds since the demo began, until its end."""
        return (self.ended or time.monotonic()) - self.began

    def restart(self) -> None:
        """Set the beginning to now."""
        self.began = time.monotonic()

    def stop(self) -> None:
        """Set the end to now."""
        self.ended = time.monotonic()


@dataclass(slots=True)
class DemoState:
    """The whole state.

    Attributes:
        slots: how many files a worker counts at a time.
        waiting: the number of files that wait in the queue; `running`: of those that run.
        killed: the worker that the demo has killed; None: none yet.
        left: how many tasks each queue has at the end; empty: not read yet.
        news: the lines for the user.
    """

    results: FileResults
    workers: list[WorkerRow]
    slots: int
    clock: DemoClock = field(default_factory=DemoClock)
    long_task: LongTask = field(default_factory=LongTask)
    order: OrderRun = field(default_factory=OrderRun)
    waiting: int = 0
    running: int = 0
    killed: Killed | None = None
    left: dict[str, int] = field(default_factory=dict[str, int])
    news: list[str] = field(default_factory=list[str])
    _reported: trio.Event = field(default_factory=trio.Event)

    @property
    def rate(self) -> float:
        """Files per second recently."""
        return self.results.rate(self.clock.seconds)

    def tell(self, news: str) -> None:
        """Add a line of news for the user."""
        self.news.append(news)

    def set_counts(self, waiting: int, running: int) -> None:
        """Set how many files wait and run."""
        self.waiting, self.running = waiting, running

    def set_killed(self, killed: Killed) -> None:
        """Note the worker that the demo has killed."""
        self.killed = killed

    def set_left(self, left: dict[str, int]) -> None:
        """Set how many tasks each queue has at the end."""
        self.left = left

    def add(self, report: Report) -> None:
        """Add a report of a worker; the same one may arrive twice."""
        if report.kind in ("began", "cancelled"):
            self.long_task.add(report)
        elif report.kind != "counted":
            self.order.reports.append(report)
        elif self.results.add(report):
            for row in self.workers:
                row.files += row.name == report.worker
        self._reported.set()
        self._reported = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for reports until `holds()` is true."""
        while not holds():
            await self._reported.wait()


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


# The processes of the workers: the demo starts, freezes and kills them, and stops them at its end.

# One worker of the demo, in a process of its own: ``python -m worqr.cli.demo.worker_processes URL NAME``.
#
# It serves two queues and a workflow until its standard input ends, because the demo has closed the pipe or has ended. It ends
# within some seconds after the demo.


SLOTS = 4
"""Files that a worker counts at a time."""
GRACE = 1.0
SHIPPING = 60.0
"""Seconds that the workflow ships in its first run, in which its worker is killed."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which the counting thread lets the event loop run; Python's own 5 ms would delay a cancellation."""
EXIT_AFTER = 3.0
"""Seconds after which a worker that was asked to stop and still runs ends its process."""


async def count_files(results: worqr.Queue, name: str, one_at_a_time: trio.CapacityLimiter, task: bytes) -> None:
    """Handle one file: count in a thread, and enqueue the counts as a result.

    Counting never waits for I/O, so a second thread of the same Python would only slow the first one down.
    """
    began = time.monotonic()
    path = os.fsdecode(task)
    counted = await trio.to_thread.run_sync(count_file, path, limiter=one_at_a_time)
    report = Report("counted", name, began, path, counted, worqr.current().stalls)
    await results.enqueue(encode(report))


async def run_for_ever(results: worqr.Queue, name: str, task: bytes) -> None:
    """Handle the long task: report when it began, and when and why it was cancelled."""
    await results.enqueue(encode(Report("began", name, time.monotonic())))
    try:
        await trio.sleep_forever()
    finally:
        at = time.monotonic()
        with trio.CancelScope(shield=True), trio.move_on_after(GRACE):
            await results.enqueue(encode(Report("cancelled", name, at, reason=worqr.current().cancel_reason)))


def declare_order(mesh: worqr.Mesh, name: str) -> None:
    """Declare the workflow: it charges a card, waits for an approval, and ships. The demo kills its worker while it ships."""

    async def tell(kind: Literal["charged", "shipping", "shipped"]) -> None:
        await mesh.queue(RESULTS).enqueue(encode(Report(kind, name, time.monotonic())))

    @mesh.step
    async def charge() -> None:
        await tell("charged")

    @mesh.step
    async def ship() -> None:
        await tell("shipping")
        if not worqr.current().stalls:
            await trio.sleep(SHIPPING)
        await tell("shipped")

    @mesh.workflow(name=ORDERS)
    async def order() -> None:
        await charge()
        if await worqr.wait_for("approved", bool):
            await ship()


async def run_worker(url: str, name: str) -> None:
    """Join, serve, and stop when the standard input ends."""
    stop = trio.Event()
    threading.Thread(target=wait_for_end_of_stdin, args=(stop, trio.lowlevel.current_trio_token()), daemon=True).start()
    mesh = worqr.Mesh(url, app=name)
    declare_order(mesh, name)
    async with mesh.join(concurrency=SLOTS + 2, grace=GRACE) as peer, trio.open_nursery() as nursery:
        results = mesh.queue(RESULTS)
        count = partial(count_files, results, name, trio.CapacityLimiter(1))
        await nursery.start(partial(peer.serve, FILES, count, concurrency=SLOTS))
        await nursery.start(partial(peer.serve, LONG, partial(run_for_ever, results, name), concurrency=1))
        await stop.wait()
        await peer.drain()


def wait_for_end_of_stdin(stop: trio.Event, token: trio.lowlevel.TrioToken) -> None:
    """Wait for the end of the standard input, then stop; in a thread, so that it works while the event loop is busy."""
    while os.read(0, 64):
        pass
    try:
        token.run_sync_soon(stop.set)
    except trio.RunFinishedError:
        return
    time.sleep(EXIT_AFTER)
    os._exit(1)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL)
    trio.run(run_worker, sys.argv[1], sys.argv[2])


STOP_WITHIN = 12.0
LOG_LINES = 15
WORKER = "worqr.cli.demo.worker_processes"


class WorkerDied(WorqrError):
    """A worker ended by itself; the message has the end of its output."""


@dataclass(slots=True)
class WorkerProcess:
    """One worker. `killed`: the demo has killed it on purpose."""

    name: str
    process: trio.Process
    log: IO[bytes]
    killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def freeze(self) -> None:
        """Suspend it; it can do nothing until it is resumed."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL: it cannot react."""
        self.killed = True
        self.process.kill()

    async def request_stop(self) -> None:
        """Close its standard input: it shuts down normally."""
        if self.process.stdin is not None:
            await self.process.stdin.aclose()

    def end_of_log(self) -> str:
        """Return the end of its output."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]) or "(no output)"

    def check(self) -> None:
        """Raise WorkerDied if it ended by itself."""
        code = self.process.poll()
        if code and not self.killed:
            raise WorkerDied(
                f"{self.name} (pid {self.pid}) ended unexpectedly with exit code {code}:\n{self.end_of_log()}"
            )


@dataclass(frozen=True, slots=True)
class WorkerProcesses:
    """All workers."""

    all: list[WorkerProcess]

    def check(self) -> None:
        """Raise WorkerDied if one ended by itself."""
        for each in self.all:
            each.check()

    async def stop(self) -> None:
        """Stop all of them, and wait until they have ended; raise WorkerDied if one did not end normally."""
        for each in self.all:
            if not each.killed:
                await each.request_stop()
        with trio.move_on_after(STOP_WITHIN):
            for each in self.all:
                await each.process.wait()
        self.check()
        left = [each.name for each in self.all if each.process.poll() is None]
        if left:
            raise WorkerDied(f"{', '.join(left)} did not end within {STOP_WITHIN:g} s")


@asynccontextmanager
async def start_workers(url: str, number: int, module: str = WORKER) -> AsyncGenerator[WorkerProcesses]:
    """Start that many workers of the program `module`. At the end of the block, no process is left."""
    processes = WorkerProcesses([])
    try:
        for i in range(1, number + 1):
            processes.all.append(await _start(url, f"worker-{i}", module))
        yield processes
    finally:
        with trio.CancelScope(shield=True):
            for each in processes.all:
                each.process.kill()
                await each.process.wait()
                await each.request_stop()
                each.log.close()


async def _start(url: str, name: str, module: str) -> WorkerProcess:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `start_workers`
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", module, url, name],
        stdin=subprocess.PIPE,
        stdout=log.fileno(),
        stderr=log.fileno(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same worqr as ours
        start_new_session=True,
    )
    return WorkerProcess(name, process, log)
