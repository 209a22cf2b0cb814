"""`execute`: the one handler of all queues of Django tasks. It imports the task, calls it, and sends Django's signals."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from worqr.errors import WorqrError
from worqr.functions.function import Function
from worqr.functions.registry import Registry
from worqr.inside import run_of
from worqr.peer.context import Context, current
from worqr.peer.run import Save
from worqr.policy import Policy, Snooze, Undecodable, decide_retry
from worqr.remote_error import TRACEBACKS_STEP, add_traceback, remote_error, tracebacks_of
from worqr.tracebacks import is_a
from worqr.validation import from_ms

_LONGEST_SAVE: Final = 30.0
"""Seconds that a failed run waits until its traceback is saved, before it is retried without it."""


def execute(
    path: str,
    args: list[Any],
    kwargs: dict[str, Any],
    priority: int = 0,
    backend: str = "default",
    queue: str = "default",
    run_after: str | None = None,
) -> Any:
    """Run a task, in a thread or a process of a worker.

    Args:
        path: The task's module and name.
        args: Its arguments.
        kwargs: Its arguments.
        priority: As it was enqueued.
        backend: The alias of the backend that enqueued it.
        queue: Django's queue.
        run_after: In ISO 8601; None if there is none.

    Raises:
        Undecodable: The path names no task, or the settings have no such backend.
    """
    _set_up()
    from worqr.django.results import Enqueued, task_of

    with fresh_connections():
        try:
            task = task_of(Enqueued(path, args, kwargs, priority, backend, queue, run_after))
        except Exception as error:
            raise Undecodable(f"the task {path!r} cannot be run: {error}") from error
        return _Run(task, args, kwargs, current()).call()


@contextmanager
def fresh_connections() -> Iterator[None]:
    """Close database connections that are broken or too old, before and after a block, as Django does around a request."""
    _close_old()
    try:
        yield
    finally:
        _close_old()


def _close_old() -> None:
    """Do as Django's `close_old_connections`, but leave the connections of a ``TestCase``, which is in a transaction."""
    from django.db import connections

    for each in connections.all(initialized_only=True):
        if not each.in_atomic_block:
            each.close_if_unusable_or_obsolete()


# Processes of ``runs_in="process"`` import a handler by its name in its module. All queues have the handler of `execute`.

_QUEUE: Final = "queue_"


def name_for_processes(queue: str, function: Function[..., Any]) -> None:
    """Give the function of a queue a name in this module."""
    globals()[f"{_QUEUE}{zlib.crc32(queue.encode()):08x}"] = function


def __getattr__(name: str) -> Function[..., Any]:
    """Return a function that handles what the queue of this name does, in a process."""
    if not name.startswith(_QUEUE):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Registry().task(name="django")(execute)


def _set_up() -> None:
    """Set up Django in a process of ``runs_in="process"``."""
    import django
    from django.apps import apps

    if not apps.ready:
        django.setup()


class _Run:
    """One run of a task: its `TaskResult` for the task's context and for the signals."""

    def __init__(self, task: Any, args: list[Any], kwargs: dict[str, Any], context: Context) -> None:
        from worqr.django.results import result_id
        from worqr.django.task_api import TaskResult, TaskResultStatus

        self._context = context
        self._run = run_of(context)
        record = self._run.record or {}
        saved = None if self._run.record is None else self._run.record.get(b"step:" + TRACEBACKS_STEP.encode())
        self._saved: bytes | None = saved
        began = from_ms(context.fence / 1000)
        worker = record.get(b"worker", b"").decode("utf-8", "replace")
        self._result = TaskResult(
            task=task,
            id=result_id(context.queue, context.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=_time(record.get(b"first")),
            started_at=min([began, *map(from_ms, tracebacks_of(saved or b""))]),
            last_attempted_at=began,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=task.backend,
            errors=[],
            worker_ids=[""] * (context.attempt - 1) + [worker],
        )

    def call(self) -> Any:
        """Call the task, and return what it returns as JSON has it."""
        from worqr.django.results import as_json
        from worqr.django.task_api import TaskContext, TaskResultStatus, signals

        result, task = self._result, self._result.task
        self._send(signals.task_started)
        arguments = (TaskContext(task_result=result), *result.args) if task.takes_context else result.args
        try:
            value = as_json(task.call(*arguments, **result.kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._context.cancel_reason is None and not is_a(error, Snooze):
                self._failed(error)
            raise
        self._end(TaskResultStatus.SUCCESSFUL, value)
        return value

    def _failed(self, error: BaseException) -> None:
        """Send the signal if this was the last run, else save the traceback for the result."""
        from worqr.django.results import task_error
        from worqr.django.task_api import TaskResultStatus

        described = remote_error(error)
        if _is_last(error, self._context, self._run.policy):
            self._result.errors.append(task_error(described))
            self._end(TaskResultStatus.FAILED, None)
            return
        texts = add_traceback(self._saved, self._context.fence, described.traceback)
        with suppress(WorqrError, TimeoutError, CancelledError):  # the run has failed all the same
            self._run.save(Save(1, TRACEBACKS_STEP, texts)).result(_LONGEST_SAVE)

    def _end(self, status: Any, value: Any) -> None:
        from worqr.django.task_api import signals

        for name, each in (("status", status), ("finished_at", _now()), ("_return_value", value)):
            object.__setattr__(self._result, name, each)
        self._send(signals.task_finished)

    def _send(self, signal: Any) -> None:
        """Send a signal. What its receivers raise is logged by Django, and does not fail the task."""
        signal.send_robust(sender=type(self._result.task.get_backend()), task_result=self._result)


def _is_last(error: BaseException, context: Context, policy: Policy) -> bool:
    """Return True if a run that raised this is not followed by another one."""
    decision = decide_retry(error, policy, context.failures, context.stalls)
    if decision.kind != "retry":
        return True
    counted, most = (context.stalls, policy.max_stalls) if decision.stalled else (context.failures, policy.max_failures)
    return (decision.counted or decision.stalled) and counted + 1 >= most


def _time(number: bytes | None) -> datetime | None:
    return from_ms(int(number) / 1000) if number and number.isdigit() else None


def _now() -> datetime:
    from django.utils import timezone

    return timezone.now()
