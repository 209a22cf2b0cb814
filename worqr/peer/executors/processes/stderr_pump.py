"""`StderrPump`: forwards the standard error of a worker process to the peer's, and keeps its end for the record of a failed
run.
"""

from __future__ import annotations

import os
from typing import Final

import trio

MAX_TAIL: Final = 16 * 1024
"""Bytes at the end of a run's output that are kept."""
MAX_WAITING: Final = 1024 * 1024
"""Limit of bytes that wait for a slow reader of the peer's standard error. Further output is dropped."""
CHUNK: Final = 64 * 1024
STDERR: Final = 2


class StderrPump:
    """The reading end of a pipe. It closes `fd`. Changed only in the loop."""

    def __init__(self, fd: int, limiter: trio.CapacityLimiter) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._limiter = limiter
        self._tail = bytearray()
        self._waiting = bytearray()

    def begin(self) -> None:
        """Forget earlier output, because a run begins."""
        self.drain()
        self._tail.clear()

    def tail(self) -> str:
        """Return the end of the run's output so far."""
        self.drain()
        return bytes(self._tail).decode("utf-8", "replace")

    def drain(self) -> None:
        """Read the available output without waiting. Stop after one pipe's worth, because the process may write continuously."""
        for _ in range(16):
            if not self._read():
                return

    def _read(self) -> bool:
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, CHUNK)
        except OSError:  # no output; or an error, which counts as none
            return False
        self._tail += data
        del self._tail[:-MAX_TAIL]
        if len(self._waiting) < MAX_WAITING:
            self._waiting += data
        return bool(data)

    async def pass_on_forever(self) -> None:
        """Read until the last writer has closed its end."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            if not self._read() and not self._waiting:
                return
            await self.pass_on()

    async def pass_on(self) -> None:
        """Write the waiting output, in a thread, because the reader of the peer's standard error may be slow."""
        while self._waiting:
            data = bytes(self._waiting)
            self._waiting.clear()
            await trio.to_thread.run_sync(_write, data, limiter=self._limiter, abandon_on_cancel=True)

    def close(self) -> None:
        """Close the pipe, because the process has ended. Its last output stays available."""
        fd, self._fd = self._fd, -1
        os.close(fd)


def _write(data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(STDERR, view) :]
    except OSError:
        pass  # no standard error, or it has no reader
