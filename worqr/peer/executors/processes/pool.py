"""`ProcessPool`: a peer's worker processes. Each run has a process for itself.

A process is started when a run needs one and none is idle, and kept for the next run. The most recently used idle process is used
first. The others stay unused, and after `KEEP_IDLE` all but one of them are ended. Runs that wait for a process wait in order.

A cancelled run is killed. The handler that `prepare` made returns when the process has ended, so that the task can be given to
another worker. A process that ends by itself during a run counts as a stall of that run. It is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import Any, Final

import trio
from trio_util import periodic

from worqr.embedded import embedded_url
from worqr.errors import WorqrBug
from worqr.handler_checks import check_runs_in_process
from worqr.import_guard import refuse_while_importing
from worqr.log_events import emit
from worqr.peer.executors.offloaded import OffloadedRun
from worqr.peer.executors.processes.importable import Name, name_for_process
from worqr.peer.executors.processes.protocol import (
    CallEnded,
    Extended,
    Raised,
    Report,
    Returned,
    RunRequest,
    SaveReply,
    Saving,
    Setup,
)
from worqr.peer.executors.processes.worker import WorkerProcess, start_worker_process
from worqr.peer.futures import wait_done
from worqr.peer.handlers import Handler, named_after
from worqr.peer.list_run import ListRun
from worqr.peer.results import Encoded
from worqr.peer.run import Run, RunHost, Save, check_thread, current_run
from worqr.policy import Broken, ChildError, Failure, RateLimited, Retry, Stalled
from worqr.records import RemoteError
from worqr.relocation import Relocation
from worqr.remote_error import error_from_text, with_stderr
from worqr.tracing import Tracing
from worqr.validation import check_count, from_ms

logger: logging.Logger = logging.getLogger(__name__)

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
        max_result: int,
        relocation: Relocation | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        refuse_while_importing("join()")
        self._process_lifespan = process_lifespan
        self._around_thread = around_thread
        self._memory_limit = None if memory_limit is None else check_count(memory_limit, "memory_limit")
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
        `Retry`, `Failure` and `Broken` unchanged, every other one as `ChildError`. If the process died, it raises `Stalled`.
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
                child = self._idle.pop() if reused else self._start()
                ended: list[CallEnded] = []
                answer = await self._execute(child, function, run, ended)
                if answer is not None:
                    return _list_outcome(answer, ended, run, child) if run.is_list else _outcome(answer, child)
                if not (reused and child.unread):
                    raise _stalled(child)
                # it had ended before the run began, which does not count as a stall

    async def _execute(
        self, child: WorkerProcess, function: Name, run: Run[RunHost], ended: list[CallEnded]
    ) -> Returned | Raised | None:
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
    left = None if run.deadline is None else run.deadline - monotonic()
    calls = [(item.fence, _entry_of(item)) for item in run.items] if run.is_list else None
    return RunRequest(
        *(function, run.queue, run.host.id_suffix, run.fence, _entry_of(run), run.host.policy, left, carrier), calls
    )


def _entry_of(run: Run[Any]) -> bytes | list[bytes]:
    """Return the entry that a run was made of."""
    return run.task if run.record is None else [part for pair in run.record.items() for part in pair]


async def _on_report(run: Run[RunHost], ended: list[CallEnded], what: Report) -> SaveReply | None:
    if isinstance(what, CallEnded):
        ended.append(what)
    elif isinstance(what, Extended):
        run.host.extend(run, what.seconds)
    else:
        for item in run.items:
            if item.fence != what.fence:
                continue
            if isinstance(what, Saving):
                return await _save(item, what)
            item.report_progress(what.done, what.message)
    return None


async def _save(run: Run[Any], what: Saving) -> SaveReply:
    done = run.save(Save(what.number, what.step, what.value))
    await wait_done(done)
    error = done.exception()
    return SaveReply("", "") if error is None else SaveReply(type(error).__name__, str(error))


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
        if isinstance(error, Broken) and isinstance(run, ListRun):
            run.note_broken(each.fence, error)
        else:
            outcomes.append(_outcome(found, child) if error is None else error)
    _outcome(answer, child)  # raises what the handler raised
    return outcomes


def _outcome(answer: Returned | Raised, child: WorkerProcess) -> object:
    """Return what the function returned, or raise what it raised."""
    if isinstance(answer, Returned):
        return None if answer.kind is None else Encoded(answer.kind, answer.value)
    raise _error_of(answer, with_stderr(answer.error, child.output.tail()))


def _error_of(answer: Raised, remote: RemoteError) -> Exception:
    error: Exception
    if answer.retry_after:
        error = RateLimited(answer.retry_after, remote.message)
    elif answer.kind == "retry":
        run_at = None if answer.run_at_ms is None else from_ms(answer.run_at_ms)
        error = Retry(
            remote.message, delay=answer.delay if run_at is None else None, run_at=run_at, counted=answer.counted
        )
    elif answer.kind == "failure":
        error = Failure(remote.message)
    elif answer.kind == "broken":
        error = Broken(remote.message)
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
