"""The state of the demo as plain data: set by the story, shown by the views, checked at the end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from worqr.cli.demo.report import Report

RATE_WINDOW = 2.0


@dataclass(slots=True)
class PeerLine:
    """One peer as the table shows it."""

    name: str
    pid: int
    state: str = "starting"
    running: int = 0
    files: int = 0


@dataclass(slots=True)
class Killed:
    """The peer that was killed: when, and how many files it held, of the frozen process's own claims."""

    name: str
    pid: int
    at: float
    held: int


@dataclass(slots=True)
class LongTask:
    """The times of the long task, by one clock; None: not yet."""

    peer: str = ""
    began_at: float | None = None
    cancel_called_at: float | None = None
    cancelled_at: float | None = None
    acknowledged_at: float | None = None
    reason: str | None = None
    acknowledged: int = 0
    runs: int = 0


@dataclass(slots=True)
class Board:
    """The whole state.

    `first` has the first report of each file, `again` every further one of the same file, `second_runs` one of each
    file whose worker had died before; `left`, what is still in the queues at the end.
    """

    files: frozenset[str]
    peers: list[PeerLine]
    at_once: int
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    first: dict[str, Report] = field(default_factory=dict[str, Report])
    again: list[Report] = field(default_factory=list[Report])
    unknown: list[str] = field(default_factory=list[str])
    second_runs: dict[str, Report] = field(default_factory=dict[str, Report])
    waiting: int = 0
    running: int = 0
    killed: Killed | None = None
    left: dict[str, int] = field(default_factory=dict[str, int])
    long: LongTask = field(default_factory=LongTask)
    news: list[str] = field(default_factory=list[str])
    _reported: trio.Event = field(default_factory=trio.Event)
    _recent: deque[float] = field(default_factory=deque[float])

    @property
    def seconds(self) -> float:
        """How long the demo has been running, or ran."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def rate(self) -> float:
        """Files per second recently."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > RATE_WINDOW:
            self._recent.popleft()
        return len(self._recent) / min(RATE_WINDOW, max(now - self.began, 0.1))

    @property
    def missing(self) -> list[str]:
        """Files without a result."""
        return sorted(self.files - self.first.keys())

    def tell(self, news: str) -> None:
        """Add a line of news for the user."""
        self.news.append(news)

    def take_in(self, report: Report) -> None:
        """Add a report; the same one may arrive twice."""
        if report.kind == "began":
            self.long.peer, self.long.began_at = report.peer, report.at
            self.long.runs += 1
        elif report.kind == "cancelled":
            self.long.cancelled_at, self.long.reason = report.at, report.reason
        else:
            self._take_in_file(report)
        self._reported.set()
        self._reported = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for reports until `holds()`."""
        while not holds():
            await self._reported.wait()

    def _take_in_file(self, report: Report) -> None:
        if report.path not in self.files:
            self.unknown.append(report.path)
            return
        if report.stalls:
            self.second_runs.setdefault(report.path, report)
        if report.path in self.first:
            self.again.append(report)
            return
        self.first[report.path] = report
        self._recent.append(time.monotonic())
        for line in self.peers:
            line.files += line.name == report.peer

    def keywords(self, n: int) -> list[tuple[str, int]]:
        """The most frequent keywords in all files."""
        total: Counter[str] = Counter()
        for report in self.first.values():
            if report.counted is not None:
                total.update(report.counted.keywords)
        return total.most_common(n)
