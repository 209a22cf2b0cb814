"""The mesh of each task backend, with its outbox: one for each alias and process, however many backend objects Django makes.

A mesh is made at its first use, from the `OPTIONS` of the backend, and connects at its first request. It declares a function for
each queue that this process knows: those of `QUEUES`, and those of the tasks that were imported. `worqr.django.meshes` has
the one handler of them all.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.utils.module_loading import import_string

from worqr.django.task_options import NO_OPTIONS, options_of
from worqr.errors import UsageError, WorqrError, did_you_mean
from worqr.functions.function import Function
from worqr.functions.registry import Registry
from worqr.handler_options import HandlerOptions, handling
from worqr.inside import run_of
from worqr.limits import Lanes
from worqr.mesh import Mesh
from worqr.peer.context import Context, current
from worqr.peer.run import Save
from worqr.policy import Policy, RetryPolicy, Snooze, Undecodable, decide_retry
from worqr.remote_error import TRACEBACKS_STEP, add_traceback, remote_error, tracebacks_of
from worqr.sql import Outbox
from worqr.tracebacks import is_a
from worqr.validation import from_ms

PREFIX: Final = "django:"
"""The queue of Django's queue NAME is ``django:NAME``."""
RESULT_TTL: Final = 86_400
"""Seconds for which the result of a task is kept, unless the settings say otherwise."""
WEIGHTS: Final = {"1-highest": 256, "2-high": 64, "3-normal": 16, "4-low": 4, "5-lowest": 1}
"""The lanes of the five bands of priorities: how many tasks start for each task of the lowest one. Of lanes that have something
to do at the same moment, the first by name is the first.
"""
BANDS: Final = (50, 0, -1, -51)
"""The priorities above which a task is in the first lanes."""
_HANDLER: Final = frozenset(HandlerOptions.__annotations__) - {"lanes", "shards"}
_MESH: Final = frozenset(inspect.signature(Mesh).parameters)

_lock = threading.RLock()
_meshes: dict[str, Mesh[Any]] = {}
_outboxes: dict[str, Outbox | None] = {}
_declared: dict[str, dict[str, Any]] = {}
"""The queues of each alias, by their names; each with the task that it belongs to, or None."""


def lane_of(priority: int) -> str:
    """Return the lane of a priority from -100 to 100."""
    return tuple(WEIGHTS)[sum(priority <= each for each in BANDS)]


# Settings


def check_options(alias: str, given: Mapping[str, Any]) -> None:
    """Raise ImproperlyConfigured if the `OPTIONS` of a backend have an unknown or invalid name or value."""
    known = _MESH | _HANDLER | {"mesh", "outbox"}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, f"it takes the arguments of worqr.Mesh, and {', '.join(sorted(_HANDLER))}")
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS'] has no {name!r}; {hint}")
    own = sorted(_MESH & given.keys())
    if "mesh" in given and own:
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}]['OPTIONS'] has 'mesh' and {own[0]!r}: give {own[0]!r} to that mesh, worqr.Mesh({own[0]}=...)"
        )
    try:
        handling("task", _handler_options(given))
    except UsageError as error:
        raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {error}") from None


def _handler_options(given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"result_ttl": RESULT_TTL, "retry": RetryPolicy(max_failures=1)}
    return {**defaults, **{name: given[name] for name in given if name in _HANDLER and name not in _MESH}}


def _make(alias: str, given: Mapping[str, Any]) -> Mesh[Any]:
    check_options(alias, given)
    if "mesh" in given:
        return _imported(alias, given, "mesh", Mesh, "worqr")
    try:
        return Mesh(
            **{"app": "django", "around_thread": fresh_connections, **{n: given[n] for n in given if n in _MESH}}
        )
    except UsageError as error:
        raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {error}") from None


def _imported(alias: str, given: Mapping[str, Any], option: str, kind: type[Any], home: str) -> Any:
    """Return what an option names as ``package.module:name``."""
    what, name = f"TASKS[{alias!r}]['OPTIONS'][{option!r}]", str(given[option])
    try:
        found = import_string(name.replace(":", "."))
    except ImportError as error:
        raise ImproperlyConfigured(f"{what} cannot be imported ({error}); write 'package.module:{option}'") from error
    if not isinstance(found, kind):
        raise ImproperlyConfigured(f"{what} is {name!r}, which is {type(found).__name__}, not a {home}.{kind.__name__}")
    return found


def _make_outbox(alias: str, given: Mapping[str, Any], mesh: Mesh[Any]) -> Outbox | None:
    name = given.get("outbox")
    if name is None:
        return None
    what = f"TASKS[{alias!r}]['OPTIONS']['outbox']"
    if ":" not in str(name):
        if name not in connections:
            raise ImproperlyConfigured(
                f"{what} is {name!r}: give the alias of a database ({', '.join(map(repr, connections))}), or "
                "'package.module:outbox'"
            )
        _check_table_is_of_one_server(alias, given)
        try:
            return Outbox(mesh, connections[name])
        except UsageError as error:
            raise ImproperlyConfigured(f"{what} is {name!r}: {error}") from None
    found: Outbox = _imported(alias, given, "outbox", Outbox, "worqr.sql")
    if found.alias is None:
        raise ImproperlyConfigured(f"{what}: {found!r} must be in a database of Django: Outbox(mesh, connection)")
    if not found.is_of(mesh):
        raise ImproperlyConfigured(f"{what}: {found!r} is of another mesh than 'mesh': set both, of one mesh")
    return found


def _check_table_is_of_one_server(alias: str, given: Mapping[str, Any]) -> None:
    """Raise ImproperlyConfigured if workers of another backend would send the rows of this one to their own server."""
    for other, its in settings.TASKS.items():
        theirs: Mapping[str, Any] = its.get("OPTIONS", {})
        if other == alias or theirs.get("outbox") != given["outbox"] or "mesh" in theirs or "mesh" in given:
            continue
        if any(theirs.get(name) != given.get(name) for name in ("url", "prefix")):
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}] and TASKS[{other!r}] have the outbox {given['outbox']!r}, and so one table, but "
                "different servers: give one a table of its own in OPTIONS['mesh'] and OPTIONS['outbox'], "
                f"worqr.sql.Outbox(mesh, connection, table='worqr_outbox_{alias}'), and call its create_tables()"
            )


# Meshes and their functions


def mesh_of(backend: Any) -> Mesh[Any]:
    """Return the mesh of a backend. The first call makes it, and declares the queues that are known.

    Raises:
        ImproperlyConfigured: The backend's `OPTIONS` are not valid.
    """
    with _lock:
        mesh = _meshes.get(backend.alias)
        if mesh is None:
            mesh = _make(backend.alias, backend.options)
            _outboxes[backend.alias] = _make_outbox(backend.alias, backend.options, mesh)
            _meshes[backend.alias] = mesh
            for name in sorted(backend.queues):
                _note(backend.alias, PREFIX + name, None)
            for queue, task in list(_declared.get(backend.alias, {}).items()):
                _declare(backend, mesh, queue, task)
        return mesh


def outbox_of(backend: Any) -> Outbox | None:
    """Return the outbox of a backend; None if it has none. Raises as `mesh_of`."""
    with _lock:
        mesh_of(backend)
        return _outboxes[backend.alias]


def note_task(backend: Any, task: Any) -> None:
    """Note the queue of a task, which workers of this process serve from now on."""
    with _lock:
        queue, own = queue_of(task), task if options_of(task.func) else None
        if _note(backend.alias, queue, own) and (mesh := _meshes.get(backend.alias)) is not None:
            _declare(backend, mesh, queue, own)


def function_of(backend: Any, task: Any) -> Function[..., Any]:
    """Return the function that enqueues a task."""
    with _lock:
        note_task(backend, task)
        return mesh_of(backend).functions[queue_of(task)]


def queue_of(task: Any) -> str:
    """Return the name of a task's queue, which is its own if it has options."""
    return f"{PREFIX}{task.queue_name}/{task.module_path}" if options_of(task.func) else PREFIX + task.queue_name


def _note(alias: str, queue: str, task: Any) -> bool:
    known = _declared.setdefault(alias, {})
    is_new = queue not in known
    known[queue] = task
    return is_new


def _declare(backend: Any, mesh: Mesh[Any], queue: str, task: Any) -> None:
    if queue in mesh.functions:
        return  # of another alias with the same mesh
    given = {**_handler_options(backend.options), **(NO_OPTIONS if task is None else options_of(task.func))}
    given["lanes"] = _lanes(given.get("lanes"), task)
    name_for_processes(queue, mesh.task(name=queue, **given)(execute))


def _lanes(own: Lanes | None, task: Any) -> Lanes:
    """Return the lanes of a queue: those of the priorities, unless a task has its own."""
    if own is None:
        return Lanes(weights=WEIGHTS)
    if own.by is None:
        return own
    by = own.by

    def lane(_path: str, args: list[Any], kwargs: dict[str, Any], *_: Any) -> Any:
        if callable(by):
            return by(*args, **kwargs)
        context = [None] if task.takes_context else []
        bound = inspect.signature(task.func).bind(*context, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[by]

    return replace(own, by=lane)


def result_ttl_of(backend: Any, task: Any) -> Any:
    """Return for how many seconds the result of a task is kept, also if no worker serves its queue."""
    return {**_handler_options(backend.options), **options_of(task.func)}["result_ttl"] or 0


def has_own_lanes(task: Any) -> bool:
    """Return True if a task's options say which lanes it has, so that priorities have none."""
    return options_of(task.func).get("lanes") is not None


def close_all() -> None:
    """Disconnect and forget all meshes. The next use of a backend makes a new one, from the settings of that time."""
    with _lock:
        for outbox in _outboxes.values():
            if outbox is not None:
                outbox.close(0)
        for mesh in _meshes.values():
            mesh.close()
        _meshes.clear()
        _outboxes.clear()


def _follow_settings(*, setting: str, **_: Any) -> None:
    if setting == "TASKS":
        close_all()


setting_changed.connect(_follow_settings, dispatch_uid="worqr.django")


# `execute`: the one handler of all queues of Django tasks. It imports the task, calls it, and sends Django's signals.

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
        from worqr.django.results import in_order, result_id
        from worqr.django.task_api import TaskResult, TaskResultStatus

        self._context = context
        self._run = run_of(context)
        record = self._run.record or {}
        saved = None if self._run.record is None else self._run.record.get(b"step:" + TRACEBACKS_STEP.encode())
        self._saved: bytes | None = saved
        began = from_ms(context.fence / 1000)
        worker = record.get(b"worker", b"").decode("utf-8", "replace")
        first = min([began, *map(from_ms, tracebacks_of(saved or b""))])
        enqueued_at, started_at, last_attempted_at = in_order(_time(record.get(b"first")), first, began)
        self._result = TaskResult(
            task=task,
            id=result_id(context.queue, context.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=enqueued_at,
            started_at=started_at,
            last_attempted_at=last_attempted_at,
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
