"""What a worker process sends to its parent during a run: progress, and what the run saves. The program is in `worker_main`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from worqr import errors
from worqr.errors import ClaimLost, UsageError, WorqrError
from worqr.peer.executors.processes.protocol import (
    LENGTH,
    Progressed,
    Reply,
    Request,
    SaveReply,
    Saving,
    packed,
    requests,
)
from worqr.peer.run import Run, Save
from worqr.policy import Failure

REPORT_EVERY: Final = 0.1
"""Seconds between two reports of progress to the parent, which forwards them at the same rate."""


class Pipe:
    """This process's end of the pipe. Frames may be sent from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> Request | None:
        """Return the next request; None if there are no more."""
        header = self._reader.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        return requests.decode(self._reader.read(LENGTH.unpack(header)[0]))

    def send(self, frame: Reply) -> None:
        """Send a frame; wait while the parent is busy."""
        buffer = packed(frame)
        with self._sending:
            self._connection.sendall(buffer)

    def close(self) -> None:
        """Close the pipe. A fork of this process must not use it."""
        self._connection.close()
        self._reader.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChildProgress:
    """Sends progress to the parent: the first report at once, then only the latest one in each `REPORT_EVERY`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._changed = threading.Condition()
        self._running: Sequence[Run[Any]] = ()
        self._unsent: dict[int, Progressed] = {}
        self._sent = 0.0
        self._thread: threading.Thread | None = None

    def begin(self, claimed: Sequence[Run[Any]]) -> None:
        """Send the reports of these claims from now on. Reports of other runs, whose threads may still exist, are dropped."""
        with self._changed:
            self._running = claimed

    def report(self, run: Run[Any], done: float | None, message: str) -> None:
        """Send the progress of a run, now or later. From any thread."""
        with self._changed:
            if not any(run is each for each in self._running):
                return
            self._unsent[run.fence] = Progressed(run.fence, done, message)
            if time.monotonic() - self._sent >= REPORT_EVERY:
                self._send()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_forever, name="worqr progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Send the remaining reports of the run, which has ended."""
        with self._changed:
            self._send()
            self._running = ()

    def _send(self) -> None:
        if self._unsent:
            unsent, self._unsent, self._sent = self._unsent, {}, time.monotonic()
            for report in unsent.values():
                self._pipe.send(report)

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                while not self._unsent:
                    self._changed.wait()
                wait = self._sent + REPORT_EVERY - time.monotonic()
                if wait <= 0:
                    self._send()
            if wait > 0:
                time.sleep(wait)


class ChildSaves:
    """Sends what the run saves, and waits for each reply. One save at a time: the next frame that arrives is its reply."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._running: Sequence[Run[Any]] = ()
        self._pid = os.getpid()

    def begin(self, claimed: Sequence[Run[Any]]) -> None:
        """Permit the saves of these claims from now on. Threads of earlier runs may still exist."""
        with self._lock:
            self._running = claimed

    def end(self) -> None:
        """Wait for the save that another thread of the run is making. Later ones are refused."""
        with self._lock:
            self._running = ()

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send `save`, and wait until the parent has replied. From any thread."""
        done: Future[None] = Future()
        error = self._error_of(run, save)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        return done

    def _error_of(self, run: Run[Any], save: Save) -> Exception | None:
        if os.getpid() != self._pid:
            return UsageError("a fork of the process that runs the task cannot save: save in the process itself")
        with self._lock:
            if not any(run is each for each in self._running):
                return ClaimLost("the run has ended, so nothing more is saved for it: save before the function returns")
            self._pipe.send(Saving(run.fence, save.number, save.step, save.value))
            reply = self._pipe.receive()
        if not isinstance(reply, SaveReply):
            return ClaimLost("the worker has ended, so nothing was saved")
        if not reply.error:
            return None
        if reply.error == "Failure":
            return Failure(reply.message)
        kind = getattr(errors, reply.error, None)
        if isinstance(kind, type) and issubclass(kind, WorqrError):
            return kind(reply.message)
        return WorqrError(f"{reply.error}: {reply.message}")
