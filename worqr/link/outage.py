"""The time in which the server is not there: since when, why, when to try again, and the two lines it is worth.

One WARNING when it begins and one INFO when it is over, however many attempts lie between them. Not here: threads and
sockets.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field

from worqr.link.scribe import Scribe

_FIRST_PAUSE = 0.05  # seconds before the third attempt in a row; the second is made at once
_LONGEST_PAUSE = 1.0
_REFUSED_PAUSE = 2.0  # a wrong password: trying often fills the server's log and mends nothing


def pause_after(attempts: int, *, refused: bool = False) -> float:
    """Seconds to wait after so many failures in a row: none, then doubling, with jitter against herds."""
    if attempts <= 1 and not refused:
        return 0.0
    longest = _REFUSED_PAUSE if refused else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempts - 2, 10))
    return longest * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class Outage:
    """At most one is open at a time. `attempts` in a row that failed; `cause`, the last one."""

    scribe: Scribe
    logger: logging.Logger
    address: str
    since: float | None = None
    cause: str = ""
    attempts: int = 0
    next_try: float = 0.0
    _told: bool = field(default=False)

    def begin(self, cause: str, *, waiting: int = 0, quiet: bool = False) -> None:
        """The server is not there, or still not. `quiet`: perhaps it only closed an idle connection; see first."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        self.cause = cause
        if not self._told and not quiet:
            self._told = True
            text = "lost connection to %(server)s (%(error)s); retrying, %(pending)d requests pending"
            self.scribe.emit(self.logger, "link.lost", text, server=self.address, error=cause, pending=waiting)

    def failed(self, *, refused: bool = False) -> None:
        """An attempt failed: wait before the next one."""
        self.attempts += 1
        self.next_try = time.monotonic() + pause_after(self.attempts, refused=refused)

    def end(self) -> None:
        """The server works again."""
        if self.since is not None and self._told:
            gone = time.monotonic() - self.since
            text = "connected to %(server)s again after %(duration).1f s"
            self.scribe.emit(self.logger, "link.back", text, server=self.address, duration=gone)
        self.since, self.cause, self.attempts, self.next_try, self._told = None, "", 0, 0.0, False

    def text(self, now: float) -> str:
        """For the message of an Unavailable: which server, since when, why."""
        if self.since is None:
            return f"the server at {self.address} has not answered"
        return f"the server at {self.address} has not been there for {now - self.since:.1f} s ({self.cause})"
