"""Writes the link's log lines, in a thread of its own.

A log handler may block for long: a terminal that is held, a full pipe, a slow disk. The threads that keep the worker
alive and carry requests must not stand behind it, so they only put a line on a queue. Lines keep their order. Not for
the loop's thread, which logs as everybody does.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from worqr.link.watchers import Watchers
from worqr.log_events import emit_fields

_FLUSH = 0.2  # seconds that closing waits for the last lines; a blocked handler gets no more

Line = Callable[[], None]


class Scribe:
    """One daemon thread and its queue; and the watchers, to whom it is told what is logged of the connection."""

    def __init__(self) -> None:
        self.watchers: Watchers = Watchers()
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worqr-scribe", daemon=True)

    def start(self) -> None:
        self._thread.start()

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
        self._lines.put(lambda: emit_fields(logger, event, text, fields, level=level, exc_info=exc_info))

    def stop(self) -> None:
        """Write what is there and end; does not wait for a handler that blocks."""
        self._lines.put(None)
        if self._thread.is_alive():
            self._thread.join(_FLUSH)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                line()
            except Exception:  # noqa: S110
                pass  # a handler that raises is on its own: there is nobody else to tell
