"""`SystemdNotifier`: tells systemd that a service is ready, is stopping, and is alive, for units of ``Type=notify``.

systemd names a datagram socket in ``$NOTIFY_SOCKET``. A thread sends the messages, because the event loop may be blocked: a
service that is not alive sends no ``WATCHDOG=1``, and systemd starts it again. Without the variable there is no thread.

See: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from worqr.mesh_records import Health

STATUS_EVERY: Final = 5.0
"""Seconds between two checks of the line that ``systemctl status`` shows."""
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_WATCHDOG: Final = "WATCHDOG=1"


class SystemdNotifier:
    """Sends messages from `start` to `end`, if systemd has asked for them.

    Args:
        health: returns the health of the service, in any thread.
        environment: the environment of the process.
    """

    def __init__(self, health: Callable[[], Health], environment: Mapping[str, str]) -> None:
        self._health = health
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_every = watchdog_every(environment)
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # its put() is allowed in a signal handler
        self._thread: threading.Thread | None = None
        self._shown = ""

    def start(self) -> None:
        """Begin to send. Does nothing if systemd has not asked."""
        if self._address:
            self._thread = threading.Thread(target=self._run, name="worqr-systemd", daemon=True)
            self._thread.start()

    def tell(self, message: str) -> None:
        """Send a message; from any thread, and from a signal handler."""
        if self._thread is not None:
            self._messages.put(message)

    def end(self) -> None:
        """Send what is left, and stop."""
        if self._thread is not None:
            self._messages.put(None)
            self._thread.join(1.0)

    # In the thread

    def _run(self) -> None:
        every = min(STATUS_EVERY, self._watchdog_every or STATUS_EVERY)
        next_check = time.monotonic()
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, next_check - time.monotonic()))
            except queue.Empty:
                next_check = time.monotonic() + every
                self._check()
                continue
            if message is None:
                return
            self._send(message)
            next_check = time.monotonic()  # the status has changed

    def _check(self) -> None:
        """Send the status if it has changed; and the watchdog's message, if the service is alive."""
        health = self._health()
        status = (
            f"{health.why}, {health.running} running" if health.why else f"{health.running} running, {health.room} free"
        )
        lines: list[str] = []
        if status != self._shown:
            self._shown = status
            lines.append(f"STATUS={status}")
        if self._watchdog_every is not None and health.alive:
            lines.append(_WATCHDOG)
        if lines:
            self._send("\n".join(lines))

    def _send(self, message: str) -> None:
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(message.encode("utf-8", "replace"), name)
        except OSError:
            pass  # systemd does not listen; the service goes on without it


def watchdog_every(environment: Mapping[str, str]) -> float | None:
    """Return the seconds between two messages of the watchdog: half of its time. None: systemd does not watch this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2e6 if microseconds.isdecimal() and int(microseconds) else None
