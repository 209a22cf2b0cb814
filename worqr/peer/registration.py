"""`Registration`: one worker id, from start_worker until it is unregistered or declared dead."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any, Final

from worqr import ops
from worqr.link import Heartbeat, WorkerHandle, boottime
from worqr.ops import Beat

BEAT_EVERY: Final = 1.0
"""Seconds between two heartbeats, at most."""
LEASE: Final = 2.0
"""Seconds for which a heartbeat extends the lease of the leader."""


class Registration(WorkerHandle):
    """One worker id. `dead` is set when the registration is over; from then on its requests are not sent.

    Attributes:
        alive_at: when the newest heartbeat was sent that the server acknowledged with "alive"; minus infinity after a reply
            of "dead". The heartbeat thread sets it when it has read the reply, before the loop handles the reply.
    """

    def __init__(self, label: str) -> None:
        worker = f"{label}:{secrets.token_hex(16)}"
        super().__init__(worker)
        self.worker: str = worker
        self.alive_at: float = boottime()
        self.heartbeat: Heartbeat[Beat] | None = None
        self.number: int = 0

    @property
    def lag(self) -> float:
        """Seconds for which the Trio loop has had no turn; from any thread."""
        return 0.0 if self.heartbeat is None else self.heartbeat.lag

    def record_replies(self, call: ops.Call[Beat]) -> ops.Call[Beat]:
        """Return a heartbeat whose reply sets `alive_at`.

        Called in the heartbeat thread, before it sends the heartbeat.
        """
        sent, read = boottime(), call.read

        def note(reply: list[Any]) -> Beat:
            beat = read(reply)
            self.alive_at = sent if beat.alive else -math.inf
            return beat

        return replace(call, read=note)

    def open(self, heartbeat: Heartbeat[Beat]) -> None:
        """Connect for its heartbeats before the server registers the worker.

        On a slow network, the worker's key would expire before a later connection is open.
        """
        self.heartbeat = heartbeat
        heartbeat.open()

    def begin(self, sent: float) -> None:
        """Start its heartbeats, because the server has registered the worker id. `sent`: when that request was sent."""
        self.alive_at = sent
        if self.heartbeat is not None:
            self.heartbeat.start()

    def abandon(self) -> None:
        """Send no heartbeats, because the server did not register the worker id."""
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def end(self) -> None:
        """End the registration: none of its requests is sent any more."""
        self.dead = True
        self.abandon()

    def next_number(self) -> int:
        """Return the number of its next start request. All queues share the counter, because the numbers only have to grow."""
        self.number += 1
        return self.number


def ignore_outcome(_value: object, _error: Exception | None) -> None:
    """Take the outcome of a request that may fail: an entry in the log of the mesh."""
