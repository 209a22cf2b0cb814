"""The program of a worker process: it takes one run after the other from its parent, and runs it in its main thread.

`pool` starts it. It has a session and process group of its own, so it does not receive Ctrl-C at the terminal. It ignores
SIGTERM, which service managers send to every process of a service, because its parent decides when it ends. The pipe to the
parent is none of the standard streams, so a function's output cannot corrupt it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import Any, Final, cast

from worqr import errors
from worqr.child_processes import EndForks
from worqr.codecs import StoredValues
from worqr.embedded import relocate, use_embedded
from worqr.errors import ClaimLost, UsageError, WorqrError
from worqr.ops import Child, NotedChildren
from worqr.peer.durable import as_workflow
from worqr.peer.executors.offloaded import is_unrun
from worqr.peer.executors.processes.protocol import (
    LENGTH,
    Answer,
    CallEnded,
    Extended,
    Name,
    Progressed,
    Raised,
    Reply,
    Request,
    Returned,
    RunRequest,
    SaveReply,
    Saving,
    Setup,
    Starting,
    Suspending,
    Used,
    packed,
    requests,
    resolve,
)
from worqr.peer.list_run import ListItem, ListRun
from worqr.peer.run import Run, Save, Timer, current_run, encode_result
from worqr.policy import (
    Failure,
    Policy,
    RateLimited,
    Retry,
    Snooze,
    Suspended,
    Undecodable,
    class_names,
    decide_retry,
    retry_after_of,
    times_of,
)
from worqr.remote_error import error_from_text, remote_error
from worqr.tracebacks import MANY_ERRORS, is_a, leaves_of, one_line, text_of
from worqr.tracing import Carrier, FencedBlock
from worqr.validation import name_of

# What a worker process sends to its parent during a run: progress, and what the run saves. The program is in `worker_main`.


REPORT_EVERY: Final = 0.1
"""Seconds between two reports of progress to the parent, which forwards them at the same rate."""


class Pipe:
    """This process's end of the pipe. Frames may be sent from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()
        self._pid = os.getpid()

    def check_no_fork(self, what: str) -> None:
        """Check that this is no fork, which has no pipe. `what`: what it cannot do.

        Raises:
            UsageError: it is one.
        """
        if os.getpid() != self._pid:
            raise UsageError(f"a fork of the process that runs the task cannot {what}: {what} in the process itself")

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

    def report(self, run: Run[Any], done: float | None, message: str, value: bytes = b"") -> None:
        """Send the progress of a run, now or later. From any thread. A value that was not sent yet stays."""
        self._pipe.check_no_fork("report progress")
        with self._changed:
            if not any(run is each for each in self._running):
                return
            before = self._unsent.get(run.fence)
            value = value or (before.value if before else b"")
            self._unsent[run.fence] = Progressed(run.fence, done, message, value)
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
        reply = self._ask(run, Saving(run.fence, *save))
        if isinstance(reply, SaveReply):
            if save.progress:
                run.note_progress()
            done.set_result(None)
        else:
            done.set_exception(reply)
        return done

    def note_children(self, run: Run[Any], children: Sequence[Child]) -> Future[NotedChildren]:
        """Note that the run of a workflow starts jobs, and wait until the parent has replied. From any thread."""
        done: Future[NotedChildren] = Future()
        reply = self._ask(run, Starting(run.fence, tuple(children)))
        if isinstance(reply, SaveReply):
            done.set_result(reply.noted or NotedChildren("lost"))
        else:
            done.set_exception(reply)
        return done

    def _ask(self, run: Run[Any], frame: Saving | Starting) -> SaveReply | Exception:
        """Return the reply of the parent, or the error that it has told."""
        try:
            self._pipe.check_no_fork("save" if isinstance(frame, Saving) else "start jobs")
        except UsageError as error:
            return error
        with self._lock:
            if not any(run is each for each in self._running):
                return ClaimLost("the run has ended, so nothing more is saved for it: save before the function returns")
            self._pipe.send(frame)
            reply = self._pipe.receive()
        if not isinstance(reply, SaveReply):
            return ClaimLost("the worker has ended, so nothing was saved")
        if not reply.error:
            return reply
        if reply.error == "Failure":
            return Failure(reply.message)
        kind = getattr(errors, reply.error, None)
        if isinstance(kind, type) and issubclass(kind, WorqrError):
            return kind(reply.message)
        return WorqrError(f"{reply.error}: {reply.message}")


# The runs of a worker process, as the functions in it see them.


class ProcessHost:
    """The `RunHost` of this process."""

    def __init__(
        self, request: RunRequest, state: object, pipe: Pipe, progress: ChildProgress, saves: ChildSaves
    ) -> None:
        self.queue: str = request.queue
        self.base: str = request.base
        self.id_suffix: str = request.id_suffix
        self.policy: Policy = request.policy
        self.hides_arguments: bool = request.hides_arguments
        self.deploy: int = request.deploy
        self.values: StoredValues | None = None
        self.state = state
        self._pipe = pipe
        self.report_progress: Callable[[Run[Any], float | None, str, bytes], None] = progress.report
        self.save: Callable[[Run[Any], Save], Future[None]] = saves.save
        self.note_children: Callable[[Run[Any], Sequence[Child]], Future[NotedChildren]] = saves.note_children

    def policy_with(self, own: tuple[tuple[bytes, bytes], ...]) -> Policy:
        """Return the policy of a job with policy fields of its own."""
        return self.policy.with_overrides({name.decode(): value.decode() for name, value in own})

    def extend(self, run: Run[Any], seconds: float) -> None:
        """Request more time from the parent. From any thread. A run without a timeout stays without one."""
        if run.timer is not None:
            self._pipe.check_no_fork("extend its deadline")
            run.timer.move_to(time.monotonic() + seconds)
            self._pipe.send(Extended(run.fence, seconds))

    def note_cost(self, run: Run[Any], used: int) -> None:
        """Tell the parent what a run has used of limits. From any thread."""
        self._pipe.check_no_fork("set its cost")
        self._pipe.send(Used(run.fence, used))


class _InProcess:
    """A run in this process. It observes no cancellation, because a cancelled run is killed."""

    __slots__ = ()

    def check_cancelled(self) -> None:
        """Do nothing, because a run that is cancelled is killed."""

    def check_may_wait(self, instead: str) -> None:
        """Do nothing, because this process waits for nothing else."""


class ProcessRun(_InProcess, Run[ProcessHost]):
    """A run of one task."""

    __slots__ = ()


class ProcessListRun(_InProcess, ListRun):
    """A list run."""

    __slots__ = ()


class ProcessListItem(_InProcess, ListItem):
    """A call of a list run."""

    __slots__ = ()


def run_of(host: ProcessHost, request: RunRequest) -> Run[Any]:
    """Return the run that the peer requests."""
    if request.calls is None:
        return ProcessRun(host, None, request.fence, request.entry)
    first, *others = [ProcessListItem(host, None, fence, entry) for fence, entry in request.calls]
    run = ProcessListRun(first)
    for item in others:
        run.add(item)
    run.begin_calls(time.monotonic())
    return run


# End a worker process together with its parent, for whatever reason the parent ends, and end its own child processes.
#
# The lifeline is a socket whose other end the parent holds. The parent never writes to it. It closes when the parent has ended.
# On Linux the kernel then sends SIGKILL to the whole process group (`F_SETSIG`). This needs no Python code to run, so it works
# while a C extension holds the interpreter's lock, and for a stopped process. On other systems a thread waits for the close. If
# a parent forks without exec, the fork keeps the parent's end open. Then Linux's death signal still ends the process, but not
# its child processes. Processes that have left the process group (setsid) are not ended.


PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int, lifeline: socket.socket) -> None:
    """End this process and its group when the process `parent` ends. `lifeline` must stay open."""
    if sys.platform == "linux":
        _ask_for_death_signal()
        by_kernel = _kill_group_at_hangup(lifeline)
    else:
        by_kernel = False
    if os.getppid() != parent or _has_hung_up(lifeline):  # the parent had ended before this call
        _kill_group()
    if not by_kernel:
        threading.Thread(target=_wait_for_hangup, args=(lifeline,), name="worqr lifeline", daemon=True).start()


def _ask_for_death_signal() -> None:
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # a C library without prctl; the lifeline still works


def _kill_group_at_hangup(lifeline: socket.socket) -> bool:
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    return True


def _has_hung_up(lifeline: socket.socket) -> bool:
    return bool(select.select([lifeline], [], [], 0)[0])


def _wait_for_hangup(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


OOM_SCORE: Final = 500
"""The oom_score_adj of the process, out of 1,000: the kernel treats it as if it used half of all memory more than it does."""
IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RunLoop:
    """Runs the tasks of this process, one after the other."""

    def __init__(self, pipe: Pipe, setup: Setup) -> None:
        self._pipe = pipe
        self._setup = setup
        self._progress = ChildProgress(pipe)
        self._saves = ChildSaves(pipe)
        self._pid = os.getpid()
        self._handlers: dict[Name, Callable[[bytes], object]] = {}
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._continuing: Callable[[Carrier], AbstractContextManager[object]] | None = None
        self._state: object = None

    def run_forever(self) -> None:
        """Take runs until the parent has no more for this process, or until the process cannot take any."""
        with ExitStack() as stack:
            problem = self._enter(stack)
            while isinstance(request := self._pipe.receive(), RunRequest):
                try:
                    answer = problem or copy_context().run(self._run, request)
                except Exception as error:  # a bug, or an error that cannot even be described: it is the run's failure
                    answer = Raised("error", error_from_text(name_of(type(error)), text_of(error)), [])
                self._answer(answer)
                if isinstance(answer, Raised) and answer.last:
                    return

    def _answer(self, answer: Answer) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: S110 - the function closed or replaced it, or it has no reader
                pass
        self._pipe.send(answer)

    def _enter(self, stack: ExitStack) -> Raised | None:
        """Limit the memory, and enter the lifespan. If that raises, every run fails with the error."""
        setup = self._setup
        use_embedded(setup.embedded)
        relocate(setup.relocation)
        try:
            if setup.memory_limit is not None:
                _limit_memory(setup.memory_limit)
            if setup.around is not None:
                self._around = _import(setup.around, "around_thread")
            if setup.continuing is not None:
                self._continuing = _import(setup.continuing, "the tracing")
            if setup.lifespan is not None:
                self._state = stack.enter_context(_import(setup.lifespan, "process_lifespan")())
        except BaseException as error:
            return raised(error, last=True)
        return None

    def _run(self, request: RunRequest) -> Answer:
        host = ProcessHost(request, self._state, self._pipe, self._progress, self._saves)
        run = run_of(host, request)
        if request.deadline is not None:
            Timer(run, request.deadline)
        if request.progressed:
            run.note_progress()
        current_run.set(run)
        try:
            handler = self._handler(request.function, workflow=request.policy.workflow)
        except BaseException as error:
            return raised(error, last=True)
        calls = run if isinstance(run, ListRun) else None
        claimed = [run] if calls is None else calls.claimed
        self._progress.begin(claimed)
        self._saves.begin(claimed)
        value: object = None
        try:
            with self._traced(request.carrier), self._around():
                value = _call(handler, run.task if calls is None else calls.calls)
        except BaseException as error:
            if calls is not None:
                for item, undecodable in calls.undecodable_items():
                    self._pipe.send(CallEnded(item.fence, raised(undecodable)))
            if is_a(error, Suspended) and run.suspension is not None:
                return Suspending(*run.suspension)
            return raised(decide_retry(error, run.policy, run.failures).error, last=is_a(error, MemoryError))
        finally:
            if os.getpid() == self._pid:
                self._progress.end()
                self._saves.end()
        if calls is None:
            return self._returned(run, value)
        return self._list_returned(calls, value)

    def _list_returned(self, calls: ListRun, value: object) -> Returned:
        for item, outcome in zip(calls.claimed, calls.outcomes(True, value, None), strict=True):
            self._pipe.send(CallEnded(item.fence, self._ended(item, outcome)))
        return Returned(None, b"")

    def _ended(self, item: Run[Any], outcome: object) -> Returned | Raised:
        """Return what became of one call of a list."""
        if is_a(outcome, BaseException):
            return raised(decide_retry(outcome, item.policy, item.failures).error)
        return self._returned(item, outcome)

    def _traced(self, carrier: Carrier) -> AbstractContextManager[object]:
        if self._continuing is None:
            return nullcontext()
        return FencedBlock(partial(self._continuing, carrier))

    def _returned(self, run: Run[Any], value: object) -> Returned | Raised:
        if not run.keeps_result():
            return Returned(None, b"")
        try:
            return Returned(*encode_result(value, self._setup.max_result))
        except UsageError as error:
            return raised(Failure(str(error)))

    def _handler(self, name: Name, *, workflow: bool) -> Callable[[bytes], object]:
        handler = self._handlers.get(name)
        if handler is None:
            found = _import(name, "the function")
            handler = getattr(found, "__worqr_handler__", found)
            handler = self._handlers[name] = as_workflow(handler) if workflow else handler
        return handler


def _import(name: Name, what: str) -> Any:
    try:
        return resolve(name)
    except BaseException as error:
        told = "; ".join(
            one_line(leaf) for leaf, _ in islice(leaves_of(error), MANY_ERRORS)
        )  # Trio wraps it into groups
        raise ImportError(f"a worker process cannot import {what} {name}: {told}") from error


def _call(handler: Callable[[Any], object], task: object) -> object:
    with EndForks():
        result = handler(task)
    if is_unrun(result):
        raise TypeError(f"{handler!r} returned {type(result).__name__}, not run yet: a process calls plain functions")
    return result


def raised(error: BaseException, *, last: bool = False) -> Raised:
    """Return `error` as it is transferred: names and text."""
    told, leaves = remote_error(error), [list(names) for names in class_names(error)]
    if is_a(error, RateLimited):
        return Raised("retry", told, leaves, last=last, retry_after=retry_after_of(error) or 0.0)
    if is_a(error, Retry):
        return Raised("retry", told, leaves, *times_of(error), last)
    if is_a(error, Snooze):
        return Raised("snooze", told, leaves, *times_of(error), last)
    if is_a(error, Failure):
        return Raised("failure", told, leaves, last=last)
    return Raised("undecodable" if is_a(error, Undecodable) else "error", told, leaves, last=last)


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _prefer_oom_kill() -> None:
    """Make Linux end this process instead of its peer when memory runs out. The peer has the runs of all other handlers."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) < OOM_SCORE:
                file.seek(0)
                file.write(str(OOM_SCORE))
    except (OSError, ValueError):
        pass  # another system, or no permission


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal. Unlike SIG_IGN, a handler in Python is not inherited by programs that this process starts."""


class ForkGuard:
    """Restores signals and closes the pipe in a fork of this process: it must not use the pipe, and must not ignore signals.

    Signals that arrive before it has restored their handlers wait until then.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._mask: set[int] = set()
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._after_in_child)

    def _block(self) -> None:
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED))

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _after_in_child(self) -> None:
        self._pipe.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is _ignore:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self._unblock()


def main(argv: list[str]) -> None:
    """Run the process until it ends.

    Args:
        argv: the parent's ``sys.argv``, for code that reads it.
    """
    parent, channel, line = (int(argument) for argument in sys.argv[1:])
    sys.argv[:] = argv
    connection, lifeline = socket.socket(fileno=channel), socket.socket(fileno=line)
    for each in (connection, lifeline):
        each.set_inheritable(False)
    die_with_parent(parent, lifeline)
    _prefer_oom_kill()
    for number in IGNORED:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored: nohup
            signal.signal(number, _ignore)
    faulthandler.enable()
    if hasattr(sys.stdout, "reconfigure"):
        cast("Any", sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")  # as in `worqr run`
    pipe = Pipe(connection)
    ForkGuard(pipe)
    with pipe, lifeline:
        setup = pipe.receive()
        if isinstance(setup, Setup):
            RunLoop(pipe, setup).run_forever()
