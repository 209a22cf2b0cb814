"""Write the log lines of the link in a thread, which exists only while there are lines.

A log handler may block for long: a paused terminal, a full pipe, a slow disk. The event loop and the keepalive thread must
not wait for it, so they only put a line on a queue. Lines keep their order.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from worqr.link.watchers import Watchers
from worqr.log_events import emit_fields

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
