"""The control channel between a parent and the worker that it has started: requests to stop, and replies of the probes.

A file descriptor, whose number is in the environment, connects the two. The parent sends lines: a `StopLevel` as a digit,
``retire``, or a GET request for a path of the probes. The worker's reader thread handles them, so it replies while the event loop
is blocked. The end of the file means that the parent has ended, for any reason. The worker then cancels its handlers and leaves.
(Linux's PR_SET_PDEATHSIG would be wrong here: it leaves no time to give tasks back, and macOS does not have it.)

The parent imports this module, so it must stay small: no event loop, no Redis client.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from worqr.http_server import HttpReply, HttpRequest

CHANNEL: Final = "WORQR_CONTROL"
"""The environment variable with the file descriptor of the worker's end."""
SUPERVISED: Final = "WORQR_SUPERVISED"
"""The environment variable of a worker whose parent serves the probes: empty, or why its predecessor ended."""
OF_THE_PARENT: Final = ("WORQR_PROBE", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Environment variables that a supervised worker does not get: its parent serves the probes, and talks to systemd."""
RETIRE: Final = "retire"
REPLY_WITHIN: Final = 1.0
"""Seconds within which a worker must reply. Its reader thread needs only the interpreter lock."""
_GET: Final = "get"
_PARENT_ENDED: Final = "2"
"""The level with which a worker stops if its parent has ended: `StopLevel.CANCEL`."""


class ControlledChild:
    """The parent's side of one worker. Constructing it starts the process.

    Args:
        command: the program and its arguments.
        restarted: why its predecessor ended; empty: it has none.

    Raises:
        OSError: the system cannot start another process.

    Attributes:
        pid: its process id, until it was reaped.
    """

    def __init__(self, command: list[str], restarted: str = "") -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OF_THE_PARENT}
        self._socket, theirs = socket.socketpair()
        try:
            os.set_inheritable(theirs.fileno(), True)
            environment |= {CHANNEL: str(theirs.fileno()), SUPERVISED: restarted}
            self.pid: int = os.posix_spawn(command[0], command, environment, setsigmask=())
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._asking = threading.Lock()
        self._number = 0
        self._received = b""

    def request_stop(self, level: int) -> None:
        """Ask the worker to stop with this `StopLevel`. May be called again, from any thread and from a signal handler."""
        self._send(str(level))

    def retire(self) -> None:
        """Ask the worker to take no more tasks, and to end when the running ones have ended."""
        self._send(RETIRE)

    def ask(self, path: str, accept: str) -> HttpReply | None:
        """Return the reply of its probes, or None if it does not reply within `REPLY_WITHIN`. From any thread."""
        with self._asking:
            self._number += 1
            self._send(f"{_GET} {self._number} {path} {accept}")
            try:
                return self._reply(time.monotonic() + REPLY_WITHIN)
            except (
                OSError,
                ValueError,
            ):  # the worker has ended, does not reply, or something else writes to its descriptor
                return None

    def kill(self) -> None:
        """End the worker at once. Its tasks return to their queues some seconds later, and each counts a crash."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the channel, because the worker has ended."""
        with self._asking:
            self._socket.close()

    def _send(self, line: str) -> None:
        with suppress(OSError):  # the worker has ended, or has not read for a long time
            self._socket.send(f"{line}\n".encode(), socket.MSG_DONTWAIT)

    def _reply(self, deadline: float) -> HttpReply | None:
        """Return the reply with the current number. Earlier replies were too late, and are dropped."""
        while True:
            line, end, rest = self._received.partition(b"\n")
            if end:
                self._received = rest
                found: dict[str, Any] = json.loads(line)
                if found["number"] == self._number:
                    return HttpReply(HTTPStatus(found["status"]), found["body"].encode(), found["type"])
                continue
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._received += data


# In the worker


@dataclass(frozen=True, slots=True)
class Parent:
    """What a worker knows of the parent that controls it.

    Attributes:
        channel: the descriptor of the worker's end.
        supervises: the parent serves the probes and talks to systemd, and may run several workers.
        restarted: why the worker's predecessor ended; empty: it has none.
    """

    channel: int
    supervises: bool
    restarted: str


def parent_of_this_process() -> Parent | None:
    """Return the parent that controls this process, and forget it, for the processes that it starts; None: there is none."""
    number, restarted = os.environ.pop(CHANNEL, ""), os.environ.pop(SUPERVISED, None)
    if not number.isdecimal():
        return None
    os.set_inheritable(int(number), False)
    return Parent(int(number), restarted is not None, restarted or "")


def follow_parent(
    channel: int,
    request_stop: Callable[[int], None],
    retire: Callable[[], None],
    respond: Callable[[HttpRequest], HttpReply],
) -> None:
    """Call these functions in a thread with what the parent sends, and `request_stop` when the parent has ended."""
    reader = _Reader(channel, request_stop, retire, respond)
    threading.Thread(target=reader.run, name="worqr-control", daemon=True).start()


class _Reader:
    """The thread of the worker that reads its parent's requests."""

    def __init__(
        self,
        channel: int,
        request_stop: Callable[[int], None],
        retire: Callable[[], None],
        respond: Callable[[HttpRequest], HttpReply],
    ) -> None:
        self._channel = channel
        self._request_stop = request_stop
        self._retire = retire
        self._respond = respond

    def run(self) -> None:
        """Handle lines until the parent has ended."""
        received = b""
        with suppress(OSError):
            while data := os.read(self._channel, 4096):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._handle(line.decode())
        self._handle(_PARENT_ENDED)

    def _handle(self, line: str) -> None:
        if line.isdecimal():
            self._request_stop(int(line))
        elif line == RETIRE:
            self._retire()
        elif line.startswith(_GET):
            _, number, path, accept = line.split(" ", 3)
            try:
                reply = self._respond(HttpRequest(path, accept))
            except Exception as error:  # as the HTTP server does: the next request may find it well
                reply = HttpReply.of(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
            self._reply(int(number), reply)

    def _reply(self, number: int, reply: HttpReply) -> None:
        found = {"number": number, "status": reply.status, "body": reply.body.decode(), "type": reply.content_type}
        data = memoryview(json.dumps(found).encode() + b"\n")
        while data:
            data = data[os.write(self._channel, data) :]
