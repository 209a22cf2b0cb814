"""`UnservedQueueReporter`: logs which queues have waiting tasks and no worker.

It uses the results of the leader's scan, so it sends no request. It logs a queue once, when all scans of at least `GRACE` seconds
have found tasks and no worker there. It logs the queue again only after a worker has served it.

The module has no I/O except the log, and no clock except the times it is given. Not here: the scan (`scanner`), and shards that
no worker of their queue serves (`waiting_queues`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from worqr.errors import did_you_mean
from worqr.keys import QueueKeys
from worqr.log_events import emit
from worqr.ops import Inspected

logger: logging.Logger = logging.getLogger(__name__)

GRACE: Final = 10.0
"""Seconds for which a queue must have had no worker. A worker that restarts is back by then."""
NOTHING_MISSED: Final = 60.0
"""Seconds without a scan, because another peer led, after which logged queues are logged again."""
LINES: Final = 20
"""Queues that are named in the log in one `PERIOD`. One more line counts the others."""
PERIOD: Final = 60.0
REMEMBERED: Final = 10_000
"""Limit of queues that are kept."""
COMPARED: Final = 2000
"""Limit of pairs of names that are compared in one `PERIOD` to find a suggestion. Each takes about 20 us on the event loop."""


class UnservedQueueReporter:
    """The queues without a worker that the leader has found. Changed only in the loop."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Shards that have tasks and no worker, by name, and when that was seen first."""
        self._logged: dict[str, None] = {}
        self._last_scan = float("-inf")
        self._period_ends = float("-inf")
        self._lines = 0
        self._compared = 0
        self._left_out = 0
        self._sum_up_at = float("-inf")

    def begin(self, now: float) -> None:
        """Forget earlier findings, because this peer leads from now on. Forget logged queues if the last scan was long ago."""
        self._since.clear()
        if now - self._last_scan > NOTHING_MISSED:
            self._logged.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget these queues, which do not exist any more."""
        for name in names:
            self._since.pop(name, None)
            self._logged.pop(_shown(name), None)

    def report(self, found: Mapping[str, Inspected], now: float) -> None:
        """Process the findings of a scan, and log new ones.

        `found` holds every queue that is served, and some of the others.
        """
        self._last_scan = now
        served = dict.fromkeys(_shown(name) for name, queue in found.items() if queue.workers)
        for name in served:
            self._logged.pop(name, None)
        waiting: dict[str, int] = {}
        for name, queue in found.items():
            if queue.workers or queue.paused is not None or not queue.waiting:
                self._since.pop(name, None)
            elif self._waits_for_long(name, now) and (shown := _shown(name)) not in served:
                waiting[shown] = waiting.get(shown, 0) + queue.waiting
        self._log({name: n for name, n in waiting.items() if name not in self._logged}, served, now)

    def _waits_for_long(self, name: str, now: float) -> bool:
        since = self._since.get(name)
        if since is None:
            if len(self._since) < REMEMBERED:
                self._since[name] = now
            return False
        return now - since >= GRACE

    def _log(self, new: Mapping[str, int], served: Iterable[str], now: float) -> None:
        if now >= self._period_ends:
            self._period_ends, self._lines, self._compared = now + PERIOD, 0, 0
        for name, waiting in new.items():
            if len(self._logged) >= REMEMBERED:
                break
            self._logged[name] = None
            if self._lines < LINES:
                self._lines += 1
                known = list(islice(served, COMPARED - self._compared))
                self._compared += len(known)
                _log_one(name, waiting, known)
            else:
                self._left_out += 1
        if self._left_out and now >= self._sum_up_at:
            text = "tasks wait in %(count)d more queues and no worker serves them; `worqr queues` lists them"
            emit(logger, "queue.unserved", text, count=self._left_out)
            self._left_out, self._sum_up_at = 0, now + PERIOD


def _shown(name: str) -> str:
    """Return the queue's name without the shard."""
    return QueueKeys.of("", name).display_name if name.startswith("{") else name


def _log_one(name: str, waiting: int, known: list[str]) -> None:
    keys = QueueKeys.of("", name)
    if keys.failures:
        hint, remedy = "", f"a worker that serves {keys.queue!r} and has a failure handler for it"
    else:
        hint, remedy = did_you_mean(name, known), "a worker that declares it"
    what = "1 task waits" if waiting == 1 else f"{waiting:,} tasks wait"
    why = f"no worker serves it; {hint}" if hint else "no worker serves it."
    text = f"{what} in queue %(queue)r and {why.replace('%', '%%')} Start {remedy.replace('%', '%%')}, or delete the queue."
    emit(logger, "queue.unserved", text, queue=name, waiting=waiting)
