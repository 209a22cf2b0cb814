"""`BeatConnection`: the connection of a keepalive, with the beats that wait for their replies.

Not here: when a beat is sent, and what follows from a failure (`heartbeat`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from worqr.link.clocks import boottime
from worqr.link.connection import MOVED, Wire, loading, open_connection, pack
from worqr.link.connection_thread import WireHolder
from worqr.link.endpoints import EndpointResolver
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.settings import LinkSettings
from worqr.link.wire_form import as_sent
from worqr.script_call import Call

R = TypeVar("R")


@dataclass(slots=True)
class Sent(Generic[R]):
    """A command that waits for its reply: a beat, or a SCRIPT LOAD (`call` is None)."""

    call: Call[R] | None
    at: float  # on the clock of `boottime`
    deadline: float  # on the monotonic clock
    again: bool = False  # it was sent before, and the server did not have the script


class BeatConnection(WireHolder, Generic[R]):
    """The connection of one keepalive; only its thread uses it. After a loss the next beat opens another one.

    Attributes:
        sent: the commands that wait for their replies; they are forgotten with the connection.
        has_worked: the present connection has delivered a reply.

    Args:
        timeout: seconds for connecting, and for each reply.
        on_silence: called every 0.1 s while the server is silent.
    """

    def __init__(
        self, settings: LinkSettings, resolver: EndpointResolver, timeout: float, on_silence: Callable[[], None]
    ) -> None:
        super().__init__()
        self.sent: deque[Sent[R]] = deque()
        self.has_worked: bool = False
        self._settings = settings
        self._resolver = resolver
        self._timeout = timeout
        self._on_silence = on_silence

    def open(self) -> Wire:
        """Return the connection to the present address of the server, opened if necessary."""
        if self.wire is not None and not self._resolver.is_current(self.wire.endpoint):
            if self.sent:
                raise ConnectionLost(MOVED, innocent=True)
            self.drop()
        if self.wire is None:
            wire = open_connection(
                self._settings, self._resolver, "beat", timeout=self._timeout, on_silence=self._on_silence
            )
            return self.hold(wire)
        return self.wire

    def send(self, call: Call[R], *, again: bool = False) -> None:
        """Send a beat; `again`: load its script in front of it."""
        wire = self.open()
        script, keys = as_sent(call, clustered=self._settings.clustered)
        deadline = time.monotonic() + self._timeout
        pieces = [pack((b"EVALSHA", script.sha, len(keys), *keys, *call.args))]
        if again:
            pieces = loading([script]) + pieces
            self.sent.append(Sent(None, 0, deadline))
        self.sent.append(Sent(call, boottime(), deadline, again))
        wire.send(pieces)

    def read(self) -> tuple[R, float] | None:
        """Read the oldest pending reply. Return the value of a beat, and the `boottime()` at which it was sent."""
        assert self.wire is not None, "what is sent is forgotten with its connection"
        try:
            reply = self.wire.read()
        except ErrorReply as exc:
            sent = self.sent.popleft()
            if exc.action is not ErrorAction.NOSCRIPT or sent.call is None or sent.again:
                raise
            self.send(sent.call, again=True)
            return None
        sent = self.sent.popleft()
        if sent.call is None:
            return None
        value = sent.call.read(reply)
        self.has_worked = True
        return value, sent.at

    def check(self, now: float) -> None:
        """Raise ConnectionLost if the oldest reply is overdue."""
        if now > self.sent[0].deadline:
            raise ConnectionLost(f"no answer for {self._timeout:g} s")

    def drop(self) -> None:
        """Close the connection, and look for the server's address anew."""
        self.sent.clear()
        self.has_worked = False
        if self.wire is not None:
            self.close()
            self._resolver.invalidate()
