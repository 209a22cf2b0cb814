"""`WorkerProcess`: one worker process of a peer. It is started, given runs, killed with all its child processes, and reaped.

The thread of the loop starts it. The death signal is tied to the thread that started the process, and Trio's threads end. No
signal is sent after it was reaped. Before that, no other process can get its id or that of its group.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any, Final

import msgspec
import trio

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.executors.processes.protocol import (
    LENGTH,
    Raised,
    Reply,
    Report,
    Returned,
    RunRequest,
    SaveReply,
    Setup,
    packed,
    replies,
)
from worqr.peer.executors.processes.stderr_pump import StderrPump

logger: logging.Logger = logging.getLogger(__name__)

PROGRAM: Final = (
    "import json, sys; sys.path[:], argv = json.loads(sys.argv.pop()); "
    "from worqr.peer.executors.processes.worker_main import main; main(argv)"
)
RECEIVED: Final = 256 * 1024
"""Bytes per read: about the size of the system's socket buffer."""
LOG_TIMEOUT: Final = 1.0
"""Seconds within which the last output of a process must be forwarded."""
REAP_EVERY: Final = 0.005
"""Seconds between two checks of a process that is about to end, on systems that do not notify."""


class Channel:
    """The peer's end of the pipe to one worker process. Changed only in the loop.

    `most` is the limit of a reply's size in bytes.
    """

    def __init__(self, connection: socket.socket, setup: Setup, most: int) -> None:
        self._connection = connection
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._most = most
        self._received = bytearray()
        self._greeting = packed(setup)

    async def send(self, frame: RunRequest | SaveReply) -> None:
        """Send a run, or the reply to a save. The first run follows the setup."""
        request, self._greeting = self._greeting + packed(frame), bytearray()
        await self._stream.send_all(request)

    async def receive(self) -> Reply | None:
        """Return the next reply; None if the process has closed its end.

        Raises:
            msgspec.MsgspecError: the process sent other data than a reply.
        """
        buffer, wanted = self._received, LENGTH.size
        while True:
            if len(buffer) >= LENGTH.size:
                wanted = LENGTH.size + LENGTH.unpack_from(buffer)[0]
                if wanted > self._most:
                    raise msgspec.DecodeError(f"{wanted:,} bytes are more than there can be")
                if len(buffer) >= wanted:
                    break
            data = await self._stream.receive_some(RECEIVED)
            if not data:
                return None
            buffer += data
        with memoryview(buffer) as view:
            reply = replies.decode(view[LENGTH.size : wanted])
        del buffer[:wanted]
        return reply

    def close(self) -> None:
        """Close this end, so that the process takes no more runs."""
        self._stream.socket.close()

    def shut_down(self) -> None:
        """Shut the connection down, so that `receive` returns the remaining data and then None.

        A fork of the process may hold the other end open.
        """
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already


class WorkerState(Enum):
    """The phases of a worker process.

    | state    | meaning                                                      | leaves it by                 |
    |----------|--------------------------------------------------------------|------------------------------|
    | STARTING | it was started, and got no run yet                           | `execute`                    |
    | BUSY     | it has a run                                                 | `become_idle`, or its end    |
    | IDLE     | its run has ended, and it waits for the next one             | `execute`, or its end        |
    | GARBLED  | it wrote something else than a reply, and is killed for that | never                        |
    | GONE     | it has ended, and was reaped                                 | never                        |
    """

    STARTING = auto()
    BUSY = auto()
    IDLE = auto()
    GARBLED = auto()
    GONE = auto()


class WorkerProcess:
    """A worker process. `start_worker_process` makes it. `supervise` must run as long as the process does.

    Set once: `pid`, `output`, `gone`, `supervision`. Changed only in the loop: the rest.

    Attributes:
        idle_since: when it became idle, by Trio's clock.
        unread: it died before it took the last run.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], channel: Channel, lifeline: socket.socket, output: StderrPump
    ) -> None:
        self.pid: int = process.pid
        self.output = output
        self.gone: trio.Event = trio.Event()
        self.supervision: trio.CancelScope = trio.CancelScope(shield=True)
        self.state: WorkerState = WorkerState.STARTING
        self.idle_since: float = math.inf
        self.unread: bool = False
        self._process = process
        self._channel = channel
        self._lifeline = lifeline
        self._killed: str | None = None

    @property
    def garbled(self) -> bool:
        """It wrote something else than a reply."""
        return self.state is WorkerState.GARBLED

    def become_idle(self, now: float) -> None:
        """Note that it waits for its next run from `now` on, by Trio's clock."""
        self.state = WorkerState.IDLE
        self.idle_since = now

    async def execute(
        self, run: RunRequest, on_report: Callable[[Report], Awaitable[SaveReply | None]]
    ) -> Returned | Raised | None:
        """Run a task, and call `on_report` for each report. Return None if the process died of it.

        After a cancellation, the caller must kill the process.
        """
        self.output.begin()
        self.state = WorkerState.BUSY
        self.unread = False
        reported = False
        try:
            await self._channel.send(run)
            while True:
                reply = await self._channel.receive()
                if reply is None or isinstance(reply, Returned | Raised):
                    return reply
                reported = True
                if (frame := await on_report(reply)) is not None:
                    await self._channel.send(frame)
        except trio.BrokenResourceError:  # the connection was reset, with data that was never read
            self.unread = not reported
            return None
        except msgspec.MsgspecError as error:
            text = "process %(pid)d wrote something else than a reply to its pipe, and is killed: %(error)s"
            emit(logger, "process.garbled", text, pid=self.pid, error=str(error))
            self.state = WorkerState.GARBLED
            return None

    def kill(self, why: str = "") -> None:
        """Send SIGKILL to the process and to its child processes, unless it has ended. `why`: for the log."""
        if self._process.returncode is None and self._killed is None:
            self._killed = why
        self._kill_group()

    def _kill_group(self) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended, and is not reaped yet

    def close_channel(self) -> None:
        """Close the pipe: there are no more runs, and the process ends when it has left its lifespan."""
        self._channel.close()

    async def supervise(self) -> None:
        """Forward its output until it has ended, then end its child processes, and reap it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.output.pass_on_forever)
                await self._wait_ended()
                self._kill_group()
                while self._process.poll() is None:  # noqa: ASYNC110 - only where the system does not tell us
                    await trio.sleep(REAP_EVERY)
                nursery.cancel_scope.cancel()
            self.output.drain()
            self._channel.shut_down()
            if self.state is not WorkerState.GARBLED:
                self.state = WorkerState.GONE
            self.gone.set()
            with trio.move_on_after(LOG_TIMEOUT):
                await self.output.pass_on()
        finally:
            self._lifeline.close()

    async def _wait_ended(self) -> None:
        """Wait until it has ended and can be reaped.

        On systems without process descriptors, wait until its end of the lifeline is closed, which is equivalent.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            await trio.lowlevel.wait_readable(self._lifeline)
            return
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)

    def exit_description(self) -> str:
        """Return a description of how it ended, for the log."""
        if self.state is WorkerState.GARBLED:
            return "was killed because it wrote into a descriptor that is not its own"
        code = self._process.returncode
        if code is None:
            return "does not die"
        if code >= 0:
            return f"ended with exit code {code}"
        if code == -signal.SIGKILL and self._killed is not None:
            return f"was killed by its worker{self._killed and f', {self._killed}'}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (
            " (if nobody did that, the system may have run out of memory)" if name == "SIGKILL" else ""
        )


def start_worker_process(setup: Setup, limiter: trio.CapacityLimiter, most: int) -> WorkerProcess:
    """Start a process. It is ready some hundred milliseconds later; a run that is sent earlier waits.

    Args:
        setup: the settings of all its runs.
        limiter: limits the threads that forward its output.
        most: limit of a reply's size in bytes.

    Raises:
        OSError: the system cannot start another process.
        UsageError: the path of the Python program is unknown.
    """
    with ExitStack() as stack:
        parent_end, child_end = socket.socketpair()
        parent_line, child_line = socket.socketpair()
        for each in (parent_end, child_end, parent_line, child_line):
            stack.callback(each.close)
        reading, writing = os.pipe()
        stack.callback(os.close, writing)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, reading)
            process = subprocess.Popen(
                _command(child_end.fileno(), child_line.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=None if _is_open(1) else subprocess.DEVNULL,
                stderr=writing,
                pass_fds=(child_end.fileno(), child_line.fileno()),
                start_new_session=True,
            )
            on_failure.pop_all()
        stack.pop_all()
        child_end.close()
        child_line.close()
        os.close(writing)
    return WorkerProcess(process, Channel(parent_end, setup, most), parent_line, StderrPump(reading, limiter))


def _command(channel: int, lifeline: int) -> list[str]:
    from multiprocessing import spawn  # not every process needs it, and the import is slow

    executable: Any = spawn.get_executable() or sys.executable
    if not executable:
        raise UsageError("this Python does not know its own program: tell it by multiprocessing.set_executable(...)")
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    inherited = json.dumps([sys.path, sys.argv])
    return [os.fsdecode(executable), *flags, "-c", PROGRAM, *map(str, (os.getpid(), channel, lifeline)), inherited]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
