"""`LiveConnection`: an open connection to a server: its session, its transport and its own counters."""

from __future__ import annotations

import math
import time
from typing import Final

from worqr.link.connector import pause_after
from worqr.link.request import MergedRequest, Request
from worqr.link.server_errors import ConnectionLost
from worqr.link.session import Phase, Session
from worqr.link.settings import Endpoint
from worqr.link.transport import Transport
from worqr.lua import Script

IDLE_CHECK: Final = 0.05
"""Seconds without a request, after which a connection is read before it is used."""

_NOSCRIPT_ROUNDS = 3  # another program keeps flushing scripts: from here on, pause between the tries


class LiveConnection:
    """One connection, from the handshake to its loss.

    Attributes:
        used_at: when a batch was last sent.
        heard_at: when bytes last came or went, while something is under way. Moved on by the time in which the loop was blocked.
        held_until: do not send before; -inf: send.
        load_first: scripts to be loaded in front of the next batch.
        gathers: the last batch had several requests: let the next ones join before it is sent.
    """

    __slots__ = (
        "_holds",
        "_noscript_rounds",
        "gathers",
        "heard_at",
        "held_until",
        "load_first",
        "session",
        "transport",
        "used_at",
    )

    def __init__(self, transport: Transport, session: Session, now: float) -> None:
        self.transport: Transport = transport
        self.session: Session = session
        self.used_at: float = now
        self.heard_at: float = now
        self.held_until: float = -math.inf
        self.load_first: dict[str, Script] = {}
        self.gathers: bool = False
        self._holds = 0  # replies in a row that the server cannot work
        self._noscript_rounds = 0  # batches in a row of which nothing was executed, because scripts were missing

    @property
    def is_idle(self) -> bool:
        """True if no batch is in flight."""
        return self.session.phase is Phase.IDLE

    @property
    def endpoint(self) -> Endpoint:
        """The server's address."""
        return self.transport.wire.endpoint

    def send(self, batch: list[Request], now: float) -> ConnectionLost | None:
        """Send a batch; return why the connection was lost meanwhile, if it was."""
        self.used_at = self.heard_at = now
        self.gathers = len(batch) > 1 or isinstance(batch[0], MergedRequest)
        scripts, self.load_first = self.load_first, {}
        lost: ConnectionLost | None = None
        for pieces in self.session.begin(batch, now, scripts.values()):
            if lost is None and pieces:
                lost = self._send(pieces)
        return lost

    def _send(self, pieces: list[bytes]) -> ConnectionLost | None:
        try:
            self.transport.send(pieces)
        except ConnectionLost as lost:
            return lost
        return None

    def progress(self) -> None:
        """The system accepted more bytes, or the server sent some."""
        self.heard_at = time.monotonic()

    def count_replicas(self, now: float) -> ConnectionLost | None:
        """Ask how many replicas have the writes that requests wait for. Return the reason if the connection was lost
        meanwhile.
        """
        pieces = self.session.begin_count(now)
        if not pieces:
            return None
        self.used_at = self.heard_at = now
        return self._send(pieces)

    def is_still_there(self, now: float) -> bool:
        """Return False if the server has closed this idle connection, or sent something unasked."""
        if now - self.used_at <= IDLE_CHECK:
            return True
        try:
            for data in self.transport.read():
                self.session.receive(data, now)
        except ConnectionLost:
            return False
        return True

    def receive(self) -> ConnectionLost | None:
        """Read the input; return the reason if the connection was lost."""
        try:
            pieces = self.transport.read()
            now = time.monotonic()
            for data in pieces:
                self.session.receive(data, now)
            if pieces:
                self.heard_at = now
        except ConnectionLost as lost:
            return lost
        return None

    def forgive(self, seconds: float) -> None:
        """The loop was blocked for this time, so the server is not to blame for its silence."""
        self.heard_at += seconds

    def works(self) -> None:
        """A whole batch was answered."""
        self.held_until, self._holds, self._noscript_rounds = -math.inf, 0, 0

    def hold(self) -> None:
        """The server replied that it cannot work at the moment: pause, longer each time."""
        self._holds += 1
        self.held_until = time.monotonic() + pause_after(self._holds + 1)

    def load(self, scripts: dict[str, Script], *, executed: bool) -> bool:
        """Load these in front of the next batch; return False if they vanish as soon as they are loaded.

        Args:
            scripts: by their SHA.
            executed: some requests of the batch had other scripts, and were executed.
        """
        self.load_first = scripts
        self._noscript_rounds = 0 if executed else self._noscript_rounds + 1
        return self._noscript_rounds <= _NOSCRIPT_ROUNDS
