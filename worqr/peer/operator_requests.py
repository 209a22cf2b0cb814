"""`OperatorRequests`: what operators ask of this peer, as its heartbeats read it, and what it answers.

A request is ``ID MODE CONCURRENCY``; ``-`` stands for a part that was not asked for. Each heartbeat brings it again until the
server has the answer, which the following heartbeats carry. So a lost reply loses no request, and a repeated one does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.options import check_concurrency

logger: logging.Logger = logging.getLogger(__name__)

LONGEST_ANSWER: Final = 200
"""Characters."""


class Units(Protocol):
    """The part of the scheduler that requests change."""

    def set_concurrency(self, n: int | Literal["auto"]) -> None: ...
    def be_quiet(self) -> None: ...
    def resume(self) -> None: ...


class OperatorRequests:
    """Carries out requests. Changed only in the loop; `answer` is read in the heartbeat thread.

    Args:
        units: changed by requests.
        drain: lets the peer leave, as at the end of `join`.
        report: called with what was asked and the outcome, for the log of the mesh.

    Attributes:
        answer: the id of the last request and its outcome, for the next heartbeat; empty when the server has it.
    """

    def __init__(self, units: Units, drain: Callable[[], object], report: Callable[[str], None]) -> None:
        self.answer: str = ""
        self._units = units
        self._drain = drain
        self._report = report
        self._last = ""

    def on_request(self, request: str) -> None:
        """Carry out the request that the reply to a heartbeat has; empty: there is none that was not answered."""
        if not request:
            self.answer = ""
            return
        number, _, wanted = request.partition(" ")
        if number == self._last:
            return
        self._last = number
        outcome = "done"
        try:
            self._carry_out(*wanted.split(" "))
        except (UsageError, TypeError, ValueError) as error:  # TypeError and ValueError: from a newer version
            outcome = f"refused: {error}"
        self.answer = f"{number} {outcome[:LONGEST_ANSWER]}"
        text = "an operator asked this worker for %(reason)s: %(outcome)s"
        emit(logger, "worker.asked", text, reason=wanted, outcome=outcome)
        self._report(f"{wanted}: {outcome}")

    def _carry_out(self, mode: str, concurrency: str) -> None:
        if mode not in ("-", "quiet", "resume", "drain"):
            raise UsageError(f"this version of worqr does not know {mode[:40]!r}")
        if concurrency != "-":
            self._units.set_concurrency(check_concurrency("auto" if concurrency == "auto" else int(concurrency)))
        if mode == "quiet":
            self._units.be_quiet()
        elif mode == "resume":
            self._units.resume()
        elif mode == "drain":
            self._drain()
