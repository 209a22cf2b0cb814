"""`ProcessPool`: a peer's worker processes. Each run has a process for itself.

A process is started when a run needs one and none is idle, and kept for the next run. The most recently used idle process is used
first. The others stay unused, and after `KEEP_IDLE` all but one of them are ended. Runs that wait for a process wait in order.

A cancelled run is killed. The handler that `prepare` made returns when the process has ended, so that the task can be given to
another worker. A process that ends by itself during a run counts as a stall of that run. It is replaced.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import msgspec
import trio
from trio_util import periodic

from worqr.child_processes import refuse_while_importing, resident_memory
from worqr.embedded import Relocation, embedded_url
from worqr.errors import UsageError, WorqrBug
from worqr.handler_options import check_runs_in_process
from worqr.log_events import emit
from worqr.peer.error_throttle import wait_done
from worqr.peer.executors.offloaded import Handler, OffloadedRun, named_after, not_started
from worqr.peer.executors.processes.protocol import (
    LENGTH,
    Answer,
    CallEnded,
    Extended,
    Name,
    Raised,
    Reply,
    Report,
    Returned,
    RunRequest,
    SaveReply,
    Saving,
    Setup,
    Starting,
    Suspending,
    Used,
    name_for_process,
    packed,
    replies,
)
from worqr.peer.list_run import ListRun
from worqr.peer.run import FromProcess, Run, RunHost, Save, check_thread, current_run
from worqr.policy import ChildError, Failure, RateLimited, Retry, Snooze, Stalled, Suspended, Undecodable
from worqr.records import RemoteError
from worqr.remote_error import error_from_text, with_stderr
from worqr.tracing import Tracing
from worqr.validation import check_count, from_ms

# `WorkerProcess`: one worker process of a peer. It is started, given runs, killed with all its child processes, and reaped.
#
# The thread of the loop starts it. The death signal is tied to the thread that started the process, and Trio's threads end. No
# signal is sent after it was reaped. Before that, no other process can get its id or that of its group.


# `StderrPump`: forwards the standard error of a worker process to the peer's, and keeps its end for the record of a failed
# run.


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


logger: logging.Logger = logging.getLogger(__name__)

PROGRAM: Final = (
    "import sys; end = 5 + int(sys.argv[4]); "
    "sys.path[:], argv, sys.argv[4:] = sys.argv[5:end], sys.argv[end:], []; "
    "from worqr.peer.executors.processes.worker_main import main; main(argv)"
)
NO_ROOM: Final = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors of a system that has no room for another process, or its pipes."""
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


@dataclass(frozen=True, slots=True)
class Renewal:
    """When a process is replaced between two runs, because libraries in it leak. None: not for that reason.

    Attributes:
        runs: after so many runs.
        memory: when it has more resident memory than this, in bytes; not that of the programs that it starts.
    """

    runs: int | None = None
    memory: int | None = None

    def why_due(self, pid: int, runs: int) -> str:
        """Return why a process should be replaced; empty if it should not."""
        if self.runs is not None and runs >= self.runs:
            return f"it has run {runs} tasks"
        if self.memory is not None and (memory := resident_memory(pid)) > self.memory:
            return f"it has {memory / (1 << 20):.0f} MiB of memory after {runs} runs"
        return ""


NEVER: Final = Renewal()


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
        runs: how many runs it was given.
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
        self.runs: int = 0
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
    ) -> Answer | None:
        """Run a task, and call `on_report` for each report. Return None if the process died of it.

        After a cancellation, the caller must kill the process.
        """
        self.output.begin()
        self.runs += 1
        self.state = WorkerState.BUSY
        self.unread = False
        reported = False
        try:
            await self._channel.send(run)
            while True:
                reply = await self._channel.receive()
                if reply is None or isinstance(reply, Returned | Raised | Suspending):
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
    path = [entry for entry in sys.path if isinstance(entry, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    numbers = map(str, (os.getpid(), channel, lifeline, len(path)))
    # each word by itself: the system limits the length of one
    return [os.fsdecode(executable), *flags, "-c", PROGRAM, *numbers, *path, *map(str, sys.argv)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


KEEP_IDLE: Final = 60.0
"""Seconds for which an unused process is kept. One process is kept for ever."""
KILLED_WITHIN: Final = 2.0
"""Seconds within which a killed process should end. A process that hangs in the kernel is not waited for any longer."""
CRASHED_WITHIN: Final = 1.0
"""Seconds within which a process should end that has closed its connection."""
CLOSED: Final = "because it had closed its connection: did the function close descriptors that are not its own?"
"""Why a process is killed that does not end."""
EXIT_GRACE: Final = 1.0
"""Seconds that idle processes have to leave their lifespan."""

SLACK: Final = 1024 * 1024
"""Bytes that a reply may have beyond the largest result."""

SpanFactory = Callable[[], AbstractContextManager[object]]


class ProcessPool:
    """The worker processes of one peer. The constructor starts none. Set once: the settings. Changed only in the loop: everything
    else.

    Args:
        limit: processes at the same time.
        process_lifespan: entered once in each process, before its first run. The value that it yields is ``current().state``
            there.
        around_thread: entered around each call.
        memory_limit: bytes of address space of a process. Code that needs more gets a MemoryError. None: no limit.
        renewal: when a process is replaced between two runs.
        max_result: bytes of the largest result.
        relocation: where a test has moved the mesh to; None: nowhere.
        tracing: continues the trace of a run in its process; None: the mesh is not traced.

    Raises:
        UsageError: this is a worker process that imports a script without a guard; or the memory limit is invalid.
    """

    def __init__(
        self,
        limit: int,
        *,
        process_lifespan: SpanFactory | None = None,
        around_thread: SpanFactory | None = None,
        memory_limit: int | None = None,
        renewal: Renewal = NEVER,
        max_result: int,
        relocation: Relocation | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        refuse_while_importing("join()")
        self._process_lifespan = process_lifespan
        self._around_thread = around_thread
        self._memory_limit = None if memory_limit is None else check_count(memory_limit, "memory_limit")
        self._renewal = renewal
        self._max_result = max_result
        self._relocation = relocation
        self._tracing = tracing
        self._setup: Setup | None = None
        self._room = trio.Semaphore(limit)
        self._writers = trio.CapacityLimiter(limit)
        self._nursery: trio.Nursery | None = None
        self._idle: list[WorkerProcess] = []
        self._alive: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        """The ids of the existing processes, the oldest first."""
        return [child.pid for child in self._alive]

    @property
    def idle(self) -> int:
        """How many processes wait for a run."""
        return len(self._idle)

    def prepare(self, handler: Callable[[bytes], object]) -> Handler:
        """Return `handler` as an async function for a slot, which runs it in a process.

        The process imports `handler` by its name, or the typed function to which it belongs, and calls it.

        The async function returns the encoded result, or None if it is not to be stored. It raises the error of the function:
        `Retry`, `Failure` and `Undecodable` unchanged, every other one as `ChildError`. If the process died, it raises `Stalled`.
        Cancelling it kills the process.

        Raises:
            UsageError: another process cannot import `handler`, the lifespan or `around_thread`; or the handler is async or a
                generator.
        """
        check_runs_in_process(handler, "the handler")
        name = name_for_process(handler, "the handler")
        if self._setup is None:
            lifespan, around, tracing = self._process_lifespan, self._around_thread, self._tracing
            self._setup = Setup(
                None if lifespan is None else name_for_process(lifespan, "process_lifespan"),
                None if around is None else name_for_process(around, "around_thread"),
                self._memory_limit,
                self._max_result,
                embedded_url(),
                self._relocation,
                None if tracing is None else name_for_process(tracing.continuing, "the tracing"),
            )

        async def in_process(_task: bytes) -> object:
            return await self._run(name)

        return named_after(handler, in_process)

    # Its lifetime

    async def run_forever(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the processes until cancelled.

        Then running processes are killed, and idle ones may leave their lifespan. All have ended within 3 s, unless the system
        prevents it.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                async for _ in periodic(KEEP_IDLE / 4):
                    self.end_unused(KEEP_IDLE)
            finally:
                self._nursery = None
                with trio.CancelScope(shield=True):
                    await self._end()

    def end_unused(self, idle_for: float) -> None:
        """End processes that were not used for `idle_for` seconds, except one."""
        before = trio.current_time() - idle_for
        while len(self._idle) > 1 and self._idle[0].idle_since <= before:
            child = self._idle.pop(0)
            assert self._nursery is not None
            self._nursery.start_soon(self._end_process, child)

    async def _end_process(self, child: WorkerProcess) -> None:
        child.close_channel()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(EXIT_GRACE):
                await child.gone.wait()
            child.kill()

    async def _end(self) -> None:
        idle, self._idle = self._idle, []
        for child in self._alive:
            if child in idle:
                child.close_channel()
            else:
                child.kill()
        await _wait_gone(self._alive, EXIT_GRACE)
        for child in self._alive:
            child.kill()
        await _wait_gone(self._alive, KILLED_WITHIN)
        for child in self._alive:
            if not child.gone.is_set():
                emit(logger, "process.stuck", "process %(pid)d was killed and does not end", pid=child.pid)
                child.supervision.cancel()

    def _start(self) -> WorkerProcess:
        if self._nursery is None or self._setup is None:
            raise WorqrBug("a run in a process outside of its peer's life")
        child = start_worker_process(self._setup, self._writers, self._max_result + SLACK)
        self._alive.append(child)
        self._nursery.start_soon(self._supervise, child)
        emit(logger, "process.started", "process %(pid)d", pid=child.pid)
        return child

    def _start_if_possible(self) -> WorkerProcess:
        try:
            return self._start()
        except OSError as error:
            if error.errno in NO_ROOM:
                raise not_started("process", error, "processes") from error
            raise

    async def _supervise(self, child: WorkerProcess) -> None:
        try:
            with child.supervision:
                await child.supervise()
        finally:
            self._alive.remove(child)
            emit(logger, "process.ended", "process %(pid)d %(reason)s", pid=child.pid, reason=child.exit_description())
            child.output.close()
            if child in self._idle:
                self._idle.remove(child)
                child.close_channel()

    # Its runs

    async def _run(self, function: Name) -> object:
        run = current_run.get()
        async with self._room:
            while True:
                reused = bool(self._idle)
                child = self._idle.pop() if reused else self._start_if_possible()
                ended: list[CallEnded] = []
                answer = await self._execute(child, function, run, ended)
                if isinstance(answer, Suspending):
                    run.suspend(answer.waits, progress=answer.progress)
                    raise Suspended
                if answer is not None:
                    return _list_outcome(answer, ended, run, child) if run.is_list else _outcome(answer, child)
                if not (reused and child.unread):
                    raise _stalled(child)
                # it had ended before the run began, which does not count as a stall

    async def _execute(
        self, child: WorkerProcess, function: Name, run: Run[RunHost], ended: list[CallEnded]
    ) -> Answer | None:
        """Send `run` to `child`, which is idle afterwards, or has ended. `ended` receives the ends of the calls of a list."""
        answer = None
        try:
            carrier = {} if self._tracing is None else dict(self._tracing.carrier())
            answer = await child.execute(_request(function, run, carrier), partial(_on_report, run, ended))
            if answer is None and not child.garbled:  # it is about to end, and how it ends is of interest
                await _wait_gone([child], CRASHED_WITHIN)
                child.kill(CLOSED)
        finally:
            if answer is None or (isinstance(answer, Raised) and answer.last):
                child.kill()
                with trio.CancelScope(shield=True):
                    await _wait_gone([child], KILLED_WITHIN)
                child.close_channel()
                _KilledRun(child.output.tail())
            elif self._nursery is not None and (reason := self._renewal.why_due(child.pid, child.runs)):
                emit(logger, "process.renewed", "process %(pid)d is replaced: %(reason)s", pid=child.pid, reason=reason)
                self._nursery.start_soon(self._end_process, child)
            else:
                child.become_idle(trio.current_time())
                self._idle.append(child)
        return answer


class _KilledRun(OffloadedRun):
    """A run whose process was killed."""

    __slots__ = ("_output",)

    def __init__(self, output: str) -> None:
        super().__init__()
        self._output = output

    @property
    def killed_output(self) -> str:
        return self._output

    def current_stack(self) -> str:
        return ""

    def check_cancelled(self) -> None:
        check_thread()


def _request(function: Name, run: Run[RunHost], carrier: dict[str, str]) -> RunRequest:
    calls = [(item.fence, _entry_of(item)) for item in run.items] if run.is_list else None
    return RunRequest(
        *(
            function,
            run.queue,
            run.host.base,
            run.host.id_suffix,
            run.fence,
            _entry_of(run),
            replace(run.host.policy, own_backoff=None),  # the peer decides about the delay
            run.deadline,
            carrier,
        ),
        calls,
        hides_arguments=run.host.hides_arguments,
        deploy=run.host.deploy,
        progressed=run.progressed,
    )


def _entry_of(run: Run[Any]) -> bytes | list[bytes]:
    """Return the entry that a run was made of."""
    return run.task if run.record is None else [part for pair in run.record.items() for part in pair]


async def _on_report(run: Run[RunHost], ended: list[CallEnded], what: Report) -> SaveReply | None:
    if isinstance(what, CallEnded):
        ended.append(what)
    elif isinstance(what, Extended):
        if what.fence == run.fence:  # else a thread of an earlier run has sent it
            run.host.extend(run, what.seconds)
    elif isinstance(what, Used):
        if what.fence == run.fence:
            run.host.note_cost(run, what.cost)
    else:
        for item in run.items:
            if item.fence != what.fence:
                continue
            if isinstance(what, Saving):
                return await _save(item, what)
            if isinstance(what, Starting):
                return await _start(item, what)
            item.report_progress(what.done, what.message, what.value)
    return None


async def _save(run: Run[Any], what: Saving) -> SaveReply:
    save = Save(what.number, what.step, what.value, what.progress, what.refused, what.took)
    await wait_done(done := run.save(save))
    if (error := done.exception()) is None:
        run.saved_state().note_saved(save)  # for the next run, if this one is suspended and keeps its claim
    return SaveReply("", "") if error is None else SaveReply(type(error).__name__, str(error))


async def _start(run: Run[Any], what: Starting) -> SaveReply:
    done = run.host.note_children(run, what.children)
    await wait_done(done)
    error = done.exception()
    return SaveReply("", "", done.result()) if error is None else SaveReply(type(error).__name__, str(error))


def _list_outcome(
    answer: Returned | Raised, ended: list[CallEnded], run: Run[Any], child: WorkerProcess
) -> list[object]:
    """Return what became of each call of a list handler that has returned, or raise what it raised.

    Calls whose payload could not be decoded are noted in the run, and are not in the list.
    """
    outcomes: list[object] = []
    for each in ended:
        found = each.answer
        error = _error_of(found, found.error) if isinstance(found, Raised) else None
        if isinstance(error, Undecodable) and isinstance(run, ListRun):
            run.note_undecodable(each.fence, error)
        else:
            outcomes.append(_outcome(found, child) if error is None else error)
    _outcome(answer, child)  # raises what the handler raised
    return outcomes


def _outcome(answer: Returned | Raised, child: WorkerProcess) -> object:
    """Return what the function returned, or raise what it raised."""
    if isinstance(answer, Returned):
        return None if answer.kind is None else FromProcess(answer.kind, answer.value)
    raise _error_of(answer, with_stderr(answer.error, child.output.tail()))


def _error_of(answer: Raised, remote: RemoteError) -> BaseException:
    error: BaseException
    if answer.retry_after:
        error = RateLimited(answer.retry_after, remote.message)
    elif answer.kind == "retry":
        run_at = None if answer.run_at_ms is None else from_ms(answer.run_at_ms)
        error = Retry(
            remote.message, delay=answer.delay if run_at is None else None, run_at=run_at, counted=answer.counted
        )
    elif answer.kind == "snooze":
        error = Snooze((answer.delay or 0.0) if answer.run_at_ms is None else from_ms(answer.run_at_ms), remote.message)
    elif answer.kind == "failure":
        error = Failure(remote.message)
    elif answer.kind == "undecodable":
        error = Undecodable(remote.message)
    else:
        return ChildError(remote, leaves=answer.names)
    error.__worqr_remote__ = remote  # type: ignore[union-attr]
    return error


def _stalled(child: WorkerProcess) -> Stalled:
    message = f"the process that ran it {child.exit_description()}"
    return Stalled(with_stderr(error_from_text("Stalled", message), child.output.tail()))


async def _wait_gone(children: Iterable[WorkerProcess], within: float) -> None:
    with trio.move_on_after(within):
        for child in tuple(children):
            await child.gone.wait()
