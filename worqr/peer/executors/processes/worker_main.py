"""The program of a worker process: it takes one run after the other from its parent, and runs it in its main thread.

`worker` starts it. It has a session and process group of its own, so it does not receive Ctrl-C at the terminal. It ignores
SIGTERM, which service managers send to every process of a service, because its parent decides when it ends. The pipe to the
parent is none of the standard streams, so a function's output cannot corrupt it.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import Any, Final, cast

from worqr.embedded import use_embedded
from worqr.errors import UsageError
from worqr.peer.forks import EndForks
from worqr.peer.executors.processes.child_reports import ChildProgress, ChildSaves, Pipe
from worqr.peer.executors.processes.child_runs import ProcessHost, run_of
from worqr.peer.executors.processes.importable import Name, resolve
from worqr.peer.executors.processes.lifeline import die_with_parent
from worqr.peer.executors.processes.protocol import (
    CallEnded,
    Raised,
    Returned,
    RunRequest,
    Setup,
)
from worqr.peer.handlers import is_unrun
from worqr.peer.list_run import ListRun
from worqr.peer.results import encode_result
from worqr.peer.run import Run, Timer, current_run
from worqr.policy import Broken, Failure, RateLimited, Retry, class_names, decide_retry, retry_after_of, times_of
from worqr.relocation import relocate
from worqr.remote_error import error_from_text, remote_error
from worqr.tracebacks import MANY_ERRORS, is_a, leaves_of, one_line, text_of
from worqr.tracing import Carrier, FencedBlock
from worqr.validation import name_of

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

    def _answer(self, answer: Returned | Raised) -> None:
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

    def _run(self, request: RunRequest) -> Returned | Raised:
        host = ProcessHost(
            *(request.queue, request.id_suffix, request.policy, self._state, self._pipe, self._progress, self._saves)
        )
        run = run_of(host, request)
        if request.left is not None:
            Timer(run, time.monotonic() + request.left)
        current_run.set(run)
        try:
            handler = self._handler(request.function)
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
                for item, broken in calls.broken_items():
                    self._pipe.send(CallEnded(item.fence, raised(broken)))
            return raised(decide_retry(error, run.policy, run.failures).error, last=is_a(error, MemoryError))
        finally:
            if os.getpid() == self._pid:
                self._progress.end()
                self._saves.end()
        if calls is None:
            return self._returned(run, value)
        outcomes = zip(calls.claimed, calls.outcomes(True, value, None), strict=True)
        for item, outcome in outcomes:
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

    def _handler(self, name: Name) -> Callable[[bytes], object]:
        handler = self._handlers.get(name)
        if handler is None:
            found = _import(name, "the function")
            handler = self._handlers[name] = getattr(found, "__worqr_handler__", found)
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
    if is_a(error, Failure):
        return Raised("failure", told, leaves, last=last)
    return Raised("broken" if is_a(error, Broken) else "error", told, leaves, last=last)


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
