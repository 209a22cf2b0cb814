"""Write the log lines of the link in a thread, which exists only while there are lines.

A log handler may block for long: a paused terminal, a full pipe, a slow disk. The event loop and the keepalive thread must
not wait for it, so they only put a line on a queue. Lines keep their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Literal

from worqr.log_events import emit_fields

# The listeners for lost and restored servers, which get as events what the log gets as lines.
#
# The link calls `lost` and `back` in its loop or in one of its threads. A listener must return at once, as `Driver.post` does.


Change = tuple[Literal["lost", "back"], str, str, float]
"""``lost`` or ``back``, the server's address without its password, why it was lost, and for how many seconds."""


class Watchers:
    """The listeners of one link, and its lost servers by outage. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: dict[int, tuple[str, str, float]] = {}
        self._listeners: list[Callable[[Change], None]] = []

    def add(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` at each change from now on, and first for the servers that are lost already."""
        with self._lock:
            for server, cause, since in self._lost.values():
                listener(("lost", server, cause, time.monotonic() - since))
            self._listeners.append(listener)

    def remove(self, listener: Callable[[Change], None]) -> None:
        """Remove `listener`."""
        with self._lock:
            self._listeners.remove(listener)

    def lost(self, outage: int, server: str, cause: str) -> None:
        """The server cannot be used. `connector` distinguishes it from the link's other servers."""
        with self._lock:
            self._lost[outage] = server, cause, time.monotonic()
            self._tell(("lost", server, cause, 0.0))

    def back(self, outage: int) -> None:
        """The server can be used again, or is no longer needed. Does nothing if the server was not lost."""
        with self._lock:
            known = self._lost.pop(outage, None)
            if known is not None:
                server, cause, since = known
                self._tell(("back", server, cause, time.monotonic() - since))

    def _tell(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)


# The clock for the age of keys and replies; it includes the time in which the machine sleeps.


# macOS has no CLOCK_BOOTTIME. Its CLOCK_MONOTONIC goes on while the machine sleeps; `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


boottime: Final[Callable[[], float]] = time.monotonic if _CLOCK is None else partial(time.clock_gettime, _CLOCK)
"""Return seconds of a clock that goes on while the machine sleeps; on Windows, of the monotonic clock."""


_FLUSH = 0.2  # seconds that closing waits for the last lines; a blocked handler gets no more

Line = Callable[[], None]


class LogThread:
    """A queue of log lines with a daemon thread that writes them. It also has the watchers of the connection's state."""

    def __init__(self) -> None:
        self.watchers: Watchers = Watchers()
        self._lines: deque[Line] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def emit(
        self,
        logger: logging.Logger,
        event: str,
        text: str,
        /,
        *,
        level: int | None = None,
        exc_info: BaseException | None = None,
        **fields: object,
    ) -> None:
        """Have an event logged soon, as `log_events.emit` does; never blocks. Give fields whose values stay as they are."""
        self._lines.append(lambda: emit_fields(logger, event, text, fields, level=level, exc_info=exc_info))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="worqr-log_thread", daemon=True)
                with suppress(RuntimeError):  # the system is out of threads: the next line tries again
                    self._thread.start()
                    return
                self._thread = None

    def stop(self) -> None:
        """Wait until the lines are written, but not for a handler that blocks."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FLUSH)

    def poison(self) -> None:
        """In a forked child: the thread exists in the parent only, which writes its lines."""
        self._lock, self._thread = threading.Lock(), None
        self._lines.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._thread = None
                    return
                line = self._lines.popleft()
            with suppress(Exception):  # there is no other log for the error of a handler
                line()
