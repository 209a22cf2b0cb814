"""`ErrorThrottle`: logs an error that occurs at every try once per minute. `LineLimit`: bounds the lines of an event.

The throttle keeps the last error of each subject (a queue, a schedule, a chore). An error with a new text is logged at once. The
same text is logged again a minute later, with the number of repetitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import trio

from worqr.log_events import emit_fields

# Sleep until times that all periodic checks of a peer share, so that an idle process wakes up rarely.


async def sleep_aligned(period: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of `period` seconds.

    Tasks with the same period, or with a multiple of it, wake up at the same moment. The clock of a Trio loop begins at a random
    time, so different processes wake up at different moments.
    """
    await trio.sleep_until(next_aligned_time(period))


def next_aligned_time(period: float) -> float:
    """Return the time by the loop's clock at which `sleep_aligned` returns."""
    return (trio.current_time() // period + 1) * period


# Wait on an event loop, asyncio's or Trio's, for what another thread does.


async def wait_done(future: Future[Any]) -> None:
    """Wait until the future is done. A cancelled wait does not cancel the future."""
    if trio.lowlevel.in_trio_task():
        event = trio.Event()
        _when_done(future, trio.lowlevel.current_trio_token().run_sync_soon, event.set)
        await event.wait()
    else:
        import asyncio  # imported here, because most programs on Trio do not need it

        loop = asyncio.get_running_loop()
        asyncio_event = asyncio.Event()
        _when_done(future, loop.call_soon_threadsafe, asyncio_event.set)
        await asyncio_event.wait()


async def sleep_here(duration: float) -> None:
    """Sleep on the loop that runs here."""
    if trio.lowlevel.in_trio_task():
        await trio.sleep(duration)
    else:
        import asyncio

        await asyncio.sleep(duration)


def _when_done(
    future: Future[Any], call_soon: Callable[[Callable[[], None]], object], callback: Callable[[], None]
) -> None:
    def done(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # trio.RunFinishedError, or asyncio's: the loop has ended, so no task waits
            call_soon(callback)

    future.add_done_callback(done)


REPEAT_AFTER = 60.0
"""Seconds between two log lines about the same subject with the same text."""
MANY_SUBJECTS = 1000
"""Limit of subjects that are kept. If more queues fail at the same time, their errors are logged more often than once a
minute.
"""


LINES = 100
"""Lines about one event in one `PERIOD`. The others are counted."""
PERIOD = 60.0


class _Logged(msgspec.Struct):
    text: str
    at: float
    repeated: int = 0


class ErrorThrottle:
    """Decides which errors of one duty are logged. Each duty has an object of its own, and uses it in one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: dict[object, _Logged] = {}

    def error(self, subject: object, event: str, text: str, /, **fields: object) -> bool:
        """Log an event as ERROR, unless the same text was logged for `subject` less than a minute ago. Return True if it was
        logged.
        """
        whole, now = f"{event}: {text}" % fields, time.monotonic()
        last = self._logged.get(subject)
        if last is not None and last.text == whole and now - last.at < REPEAT_AFTER:
            last.repeated += 1
            return False
        repeated = last.repeated if last is not None and last.text == whole else 0
        if last is None and len(self._logged) >= MANY_SUBJECTS:
            self._logged.pop(next(iter(self._logged)))
        self._logged[subject] = _Logged(whole, now)
        if repeated:
            text += " (and %(repeated)d times since the last such line)"
            fields["repeated"] = repeated
        emit_fields(self._logger, event, text, fields, level=logging.ERROR, stacklevel=2)
        return True

    def resolve(self, subject: object) -> bool:
        """Forget the error of `subject`, because it works again. Return True if an error had been logged for it."""
        return self._logged.pop(subject, None) is not None


class LineLimit:
    """Logs at most `LINES` lines of one event per minute, and how many others there were. `text`: the line with their `count`.

    Names that come from the server, for example worker ids, can be forged, any number of them.
    """

    def __init__(self, logger: logging.Logger, event: str, text: str) -> None:
        self._logger = logger
        self._event = event
        self._text = text
        self._period_ends = float("-inf")
        self._lines = 0
        self._left_out = 0

    def emit(self, text: str, /, *, level: int | None = None, **fields: object) -> None:
        """Log the event, or count it."""
        self.sum_up()
        if self._lines < LINES:
            self._lines += 1
            emit_fields(self._logger, self._event, text, fields, level=level, stacklevel=2)
        else:
            self._left_out += 1

    def sum_up(self) -> None:
        """Begin a new period if the last one is over, and log how many lines it left out. Call it from time to time."""
        now = time.monotonic()
        if now >= self._period_ends:
            left_out, self._left_out, self._lines, self._period_ends = self._left_out, 0, 0, now + PERIOD
            if left_out:
                emit_fields(self._logger, self._event, self._text, {"count": left_out})
