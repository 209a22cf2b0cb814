"""`Backend`: the backend for ``django.tasks``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import datetime
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.db import connections
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from worqr.client.producer import Call
from worqr.client.sync import sync
from worqr.django.meshes import (
    check_options,
    function_of,
    has_own_lanes,
    lane_of,
    mesh_of,
    note_task,
    outbox_of,
    queue_of,
    result_ttl_of,
)
from worqr.django.results import Enqueued, as_json, job_of, result_id, result_of, result_of_row
from worqr.django.task_api import (
    DEFAULT_ALIAS,
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
    task_backends,
)
from worqr.django.task_options import options, options_of
from worqr.errors import NoResult, UsageError
from worqr.inside import client_of
from worqr.link import loop_name_here
from worqr.log_events import emit
from worqr.sql.connections import place_of
from worqr.sql.statements import new_row_id
from worqr.tracebacks import one_line

if TYPE_CHECKING:
    from worqr.sql import Outbox

# When a call is sent: now, or after the commit of the transaction.

logger: logging.Logger = logging.getLogger(__name__)


def after_commit(send: Callable[[], object], name: str, using: bool | str = True) -> None:
    """Call `send` after the commit, or now if no ``atomic`` block is open. After a rollback it is never called.

    An error of `send` after a commit is logged, and stops no later hook: the transaction cannot be undone any more.

    Args:
        send: Sends a call. Its arguments were checked and encoded before.
        name: The name of what is sent, for the log.
        using: The alias of a database. True: all databases with an open block; the last commit calls `send`. False: now.
    """
    blocks = _open_blocks(using)
    left = len(blocks)
    if not blocks:
        send()
        return

    def committed() -> None:
        nonlocal left
        left -= 1
        if not left:
            _send(send, name)

    for each in blocks:
        each.on_commit(committed, robust=True)


def _open_blocks(using: bool | str) -> list[Any]:
    """Return the connections whose commits are waited for."""
    if using is False:
        return []
    if isinstance(using, str):
        return [connections[using]] if connections[using].in_atomic_block else []
    found = [each for each in connections.all(initialized_only=True) if each.in_atomic_block]
    own = [each for each in found if not all(getattr(block, "_from_testcase", False) for block in each.atomic_blocks)]
    return own or found[:1]  # a `TestCase` opens a block on each of its databases


def _send(send: Callable[[], object], name: str) -> None:
    try:
        send()
    except Exception as error:
        text = "%(function)s was not enqueued, although the transaction was committed: %(error)s"
        emit(logger, "commit.unsent", text, exc_info=error, function=name, error=one_line(error))


# `Backend`: the backend for ``django.tasks``.

ID_LENGTH: Final = 22
"""Letters and digits of a job's id: 131 random bits."""
ROW_ID_LENGTH: Final = 32
_TASK_FIELDS: Final = frozenset(each.name for each in fields(Task))


class Backend(BaseTaskBackend):
    """Runs Django's tasks on a mesh. ``TASKS = {"default": {"BACKEND": "worqr.django.Backend"}}``.

    ``QUEUES`` are the queues that tasks may name; an empty list allows all. ``ENQUEUE_ON_COMMIT`` is False (enqueue now), True
    (after the commit of all open transactions) or the alias of a database. ``OPTIONS`` has the arguments of `worqr.Mesh`, or
    ``"mesh": "package.module:mesh"``, and the options of `HandlerOptions` for all tasks. With ``"outbox": "default"``, a task
    that is enqueued in a transaction of that database is a row in the same transaction.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    @staticmethod
    def task_class(*, func: Callable[..., Any], **given: Any) -> Any:
        """Make a task for ``@task``, which passes on keywords that are not Django's: they are worqr's options of the function.

        Raises:
            UsageError: As `worqr.django.options`; or the function has options from that decorator, too.
        """
        own = {name: value for name, value in given.items() if name not in _TASK_FIELDS}
        if own and options_of(func):
            raise UsageError(
                f"{func.__qualname__}() has options in @task(...) and in @worqr.django.options(...): give all of them in one"
            )
        function = options(**own)(func) if own else func
        return Task(func=function, **{name: value for name, value in given.items() if name in _TASK_FIELDS})

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.on_commit = params.get("ENQUEUE_ON_COMMIT", False)

    # Tasks

    def validate_task(self, task: Any) -> None:
        """Check a task, and note its queue, which the workers of this process serve."""
        super().validate_task(task)
        if isinstance(task.priority, bool) or not isinstance(task.priority, int):
            raise InvalidTask(f"priority must be a whole number, not {task.priority!r}.")
        if task.priority and has_own_lanes(task):
            raise InvalidTask("A task with lanes=worqr.Lanes(...) takes no priority: its lanes take turns.")
        by = getattr(options_of(task.func).get("lanes"), "by", None)
        if isinstance(by, str) and by not in signature(task.func).parameters:
            raise InvalidTask(f"lanes=worqr.Lanes({by!r}) names no parameter of {task.func.__name__}().")
        note_task(self, task)

    def enqueue(self, task: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Enqueue a task, now or after the commit.

        Returns:
            The result, which is READY. Its `enqueued_at` is None until the task was sent.

        Raises:
            InvalidTask: The task, or its queue, is not valid; or workers could not import it.
            TypeError: JSON does not know the type of an argument.
            ValueError: JSON cannot represent an argument.
            UsageError: An event loop runs in this thread: ``await task.aenqueue(...)``.
            QueueFull: The queue is at its `max_length`.
            Unavailable: The server did not reply within the mesh's `patience`.
        """
        _check_no_loop(f"{task.name}.enqueue()", f"await {task.name}.aenqueue(...)")
        self.validate_task(task)
        _check_path(task)
        outbox, queue = self._open_outbox(), queue_of(task)
        job_id = get_random_string(ID_LENGTH) if outbox is None else new_row_id()
        enqueued = Enqueued.of(task, as_json(list(args)), as_json(kwargs))
        call = self._call(task, job_id, enqueued)
        result = TaskResult(
            task=task,
            id=result_id(queue, job_id),
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=enqueued.args,
            kwargs=enqueued.kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        self._deliver(call, task.module_path, outbox, lambda at: self._sent(result, at))
        return result

    def _open_outbox(self) -> Outbox | None:
        """Return the outbox if a transaction of its database is open here."""
        outbox = outbox_of(self)
        return outbox if outbox is not None and connections[str(outbox.alias)].in_atomic_block else None

    def _call(self, task: Any, job_id: str, enqueued: Enqueued) -> Call[Any]:
        function = function_of(self, task)
        options: dict[str, Any] = {"id": job_id, "keep_task": True, "result_ttl": result_ttl_of(self, task)}
        if task.run_after is not None:
            options["run_at"] = _aware(task.run_after)
        if not has_own_lanes(task):
            options["lane"] = lane_of(task.priority)
        return function.options(**options).call(**enqueued.arguments)

    def _deliver(
        self, call: Call[Any], name: str, outbox: Outbox | None, sent: Callable[[datetime | None], None]
    ) -> None:
        """Store a call in the outbox, or send it as `ENQUEUE_ON_COMMIT` says. The one place from which tasks are sent.

        Args:
            call: A job with an id: in an outbox, that of its row.
            name: The task's path, for the log.
            outbox: The outbox whose transaction is open.
            sent: Called after the commit of the row, or with the time at which the server has the job.
        """
        mesh = mesh_of(self)
        using = self.on_commit if outbox is None else str(outbox.alias)
        if outbox is None or client_of(mesh).producer.records:
            after_commit(lambda: sent(sync(mesh.dispatch_many, [call])[0].dispatched), name, using)
        else:
            outbox.store(connections[using], call, call._options["id"])
            after_commit(lambda: sent(None), name, using)

    def _sent(self, result: Any, at: datetime | None) -> None:
        object.__setattr__(result, "enqueued_at", at or timezone.now())
        signals.task_enqueued.send_robust(type(self), task_result=result)

    # Results

    def get_result(self, result_id: str) -> Any:
        """Return the result with this id, as long as the task waits or runs, and for `result_ttl` after its end.

        Raises:
            TaskResultDoesNotExist: There is none, or its task does not exist any more.
            UsageError: An event loop runs in this thread: ``await task.aget_result(...)``.
            Unavailable: The server did not reply within the mesh's `patience`.
        """
        named = job_of(result_id)
        if named is None:
            raise TaskResultDoesNotExist(result_id)
        _check_no_loop("get_result()", "await task.aget_result(...), or await result.arefresh()")
        try:
            of_queue = mesh_of(self).queue(named[0])
        except UsageError:  # no queue can have this name
            raise TaskResultDoesNotExist(result_id) from None
        record = sync(of_queue.read, named[1], payload=True)
        if record.status.state == "gone" or not record.task:
            if (waiting := self._result_of_row(result_id, *named)) is not None:
                return waiting
            record = sync(of_queue.read, named[1], payload=True)  # its row may have been sent in between
        if record.status.state == "gone" or not record.task:
            raise TaskResultDoesNotExist(result_id)
        try:
            value = sync(of_queue.job(named[1]).result, timeout=0) if record.status.state == "finished" else None
            return result_of(record, result_id, self.alias, value)
        except (NoResult, ImportError, ValueError, SuspiciousOperation, InvalidTask) as error:
            raise TaskResultDoesNotExist(f"{result_id}: {error}") from error

    def _result_of_row(self, result_id: str, queue: str, row: str) -> Any:
        """Return the result of a task that is still a row of the outbox; None if there is none."""
        outbox = outbox_of(self)
        if outbox is None or len(row) != ROW_ID_LENGTH:
            return None
        place = place_of(connections[str(outbox.alias)])
        found = place.run(outbox.statements(place.dialect).lookup(row))
        try:
            return result_of_row(found[0], result_id, self.alias) if found and found[0][0] == queue else None
        except (ImportError, ValueError, SuspiciousOperation, InvalidTask) as error:
            raise TaskResultDoesNotExist(f"{result_id}: {error}") from error

    # Checks

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Check the settings. This connects to nothing; ``manage.py check --deploy`` connects to the server."""
        yield from super().check(**kwargs)
        try:
            check_options(self.alias, self.options)
            if not {"mesh", "outbox"}.isdisjoint(self.options):
                mesh_of(self)
        except ImproperlyConfigured as error:
            yield checks.Error(str(error), id="worqr.E001")
        if self.on_commit not in (True, False) and self.on_commit not in settings.DATABASES:
            yield checks.Error(
                f"TASKS[{self.alias!r}]['ENQUEUE_ON_COMMIT'] must be True, False or the alias of a database, not "
                f"{self.on_commit!r}",
                hint=f"The aliases are {', '.join(map(repr, settings.DATABASES))}.",
                id="worqr.E002",
            )


def outbox(alias: str = DEFAULT_ALIAS) -> Outbox:
    """Return the outbox of a backend, for `Outbox.first` and `Outbox.step` in its tasks.

    Args:
        alias: The alias of the backend in `TASKS`.

    Returns:
        The `worqr.sql.Outbox` that ``OPTIONS["outbox"]`` describes.

    Raises:
        ImproperlyConfigured: The backend is not worqr's, or has no outbox.
    """
    backend = task_backends[alias]
    found = outbox_of(backend) if isinstance(backend, Backend) else None
    if found is None:
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}] has no outbox: set BACKEND to 'worqr.django.Backend', and OPTIONS={{'outbox': 'default'}}"
        )
    return found


def _check_path(task: Any) -> None:
    """Raise InvalidTask if workers, which import a task by its path, would find something else there."""
    try:
        found = import_string(task.module_path)
    except ImportError:
        found = None
    if getattr(found, "func", None) is not task.func:
        raise InvalidTask(
            f"Workers import a task by the path of its function, and {task.module_path} is not this task: put @task over a "
            "function of a module, which keeps its name."
        )


def _check_no_loop(call: str, instead: str) -> None:
    """Raise UsageError if an event loop runs in this thread, which the call would stop."""
    if loop := loop_name_here():
        raise UsageError(f"{call} would block the {loop} loop that runs in this thread: write `{instead}`")


def _aware(moment: Any) -> Any:
    """Return a time with its zone. A naive one is of `TIME_ZONE`; of a time that the clocks show twice, the first."""
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment
