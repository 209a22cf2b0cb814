"""An outage of the server: its begin, its cause, and its two log lines.

One WARNING when it begins and one INFO when it ends, regardless of the number of attempts. Not here: the attempts
(`connector`), threads and sockets.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from worqr.errors import Unavailable, WorqrError
from worqr.link.log_thread import LogThread
from worqr.link.reasons import is_unknown_host, remedy_for
from worqr.link.settings import LinkSettings

_WORTH_TELLING = 0.1  # seconds


@dataclass(slots=True)
class Outage:
    """The outage of one server, if there is one now.

    Attributes:
        address: the server's, for messages.
        since: when it began (monotonic); None: the server works.
        cause, remedy: of the last attempt.
        stood: there has been a connection.
        answers: the server is connected, but replies that it cannot work.
    """

    log_thread: LogThread
    logger: logging.Logger
    address: str
    since: float | None = None
    cause: str = ""
    remedy: str = ""
    stood: bool = False
    answers: bool = False
    _told: bool = field(default=False)

    def begin(
        self, cause: str, *, waiting: int = 0, quiet: bool = False, remedy: str = "", answers: bool = False
    ) -> None:
        """The server cannot be used, or still cannot.

        Args:
            cause: why.
            waiting: the number of pending requests.
            quiet: the server may only have closed an idle connection; do not log before the next attempt.
            remedy: sentences about what to do.
            answers: the server is connected, and replies that it cannot work.
        """
        now = time.monotonic()
        if self.since is None:
            self.since = now
        self.cause, self.remedy, self.answers = cause.removesuffix("."), remedy, answers
        if not self._told and not quiet:
            self._told = True
            self.log_thread.watchers.lost(id(self), self.address, cause)
            pending = f", {waiting} requests pending" if waiting or self.stood else ""
            text = f"{self._what()}; retrying{pending}.{self._hint()}".replace("%", "%%")
            self.log_thread.emit(self.logger, "link.lost", text, server=self.address, error=self.cause, pending=waiting)

    def failed_to_connect(self, error: WorqrError, settings: LinkSettings, *, waiting: int) -> WorqrError | None:
        """An attempt failed. Requests wait as long as their patience allows.

        Returns:
            The error for callers that are connecting, if waiting does not help; None: they wait as well.
        """
        cause = str(error).removeprefix(f"the server at {self.address} refused the connection: ")
        self.begin(cause, waiting=waiting, remedy=remedy_for(error, settings, stood=self.stood))
        if not isinstance(error, Unavailable):
            return error
        if self.stood or settings.clustered or not is_unknown_host(error):
            return None  # a host name that resolved before comes back; the nodes of a cluster name each other
        unknown = Unavailable(self.text(time.monotonic()))
        unknown.__cause__ = error.__cause__
        return unknown

    def connected(self) -> None:
        """There is a connection. The outage ends when the server works."""
        self.stood = True

    def forget(self) -> None:
        """The server is not needed any more."""
        self.log_thread.watchers.back(id(self))

    def end(self) -> None:
        """The server works again."""
        self.forget()
        if self.since is not None and self._told:
            gone = time.monotonic() - self.since
            text = "connected to %(server)s after %(duration).1f s"
            self.log_thread.emit(self.logger, "link.back", text, server=self.address, duration=gone)
        self.since, self.cause, self.remedy = None, "", ""
        self.answers = self._told = False

    def text(self, now: float) -> str:
        """Return the text of an Unavailable: server, duration, cause and remedy. Ends with a full stop."""
        if self.since is None:
            return f"The server at {self.address} has not replied."
        gone = now - self.since
        what = self._what(f" for {gone:.1f} s" if gone >= _WORTH_TELLING else "", lost="no connection")
        return f"{what[0].upper()}{what[1:]}.{self._hint()}"

    def _what(self, how_long: str = "", *, lost: str = "lost connection") -> str:
        if self.answers:
            return f"the server at {self.address} has not been able to work{how_long}: {self.cause}"
        return f"{lost if self.stood else 'could not connect'} to {self.address}{how_long}: {self.cause}"

    def _hint(self) -> str:
        return f" {self.remedy}" if self.remedy else ""
