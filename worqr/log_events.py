"""Every event that worqr logs: its name, its levels, its meaning, and the fields that its records carry.

`EVENTS` is the registry, `FIELDS` says what each field holds. The tables of docs/reference/log-events.md are made from them.
`emit` logs one event: the line begins with the event's name, and the facts that it states are fields of the record as well.
Modules call `emit` where an event happens, or `LogThread.emit` and `ErrorThrottle.error`, which call it.

Handlers, filters, record factories and logger classes are code of the application. `emit` raises nothing that they raise, except
Ctrl-C in the main thread. So a log decides nothing about a task or a duty.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from logging import DEBUG, ERROR, INFO, WARNING
from types import CodeType, TracebackType
from typing import Any, Final

import msgspec

from worqr.stored_values import readable
from worqr.tracebacks import shortened, text_of


class LogEvent(msgspec.Struct, frozen=True):
    """One kind of log line. The first of `levels` is the usual one; `fields` are those that its records may carry."""

    levels: tuple[int, ...]
    meaning: str
    fields: tuple[str, ...]


def _event(levels: int | tuple[int, ...], meaning: str, fields: str = "") -> LogEvent:
    return LogEvent(levels if isinstance(levels, tuple) else (levels,), meaning, tuple(fields.split()))


_RUN: Final = "queue job attempt attempts worker"
"""The fields of every line about one run of one task."""

EVENTS: Final[dict[str, LogEvent]] = {
    # One run of one task
    "task.started": _event(DEBUG, "a handler begins to run a task", _RUN),
    "task.finished": _event(
        (DEBUG, WARNING), "a handler returned; WARNING: after its timeout", f"{_RUN} duration timeout late"
    ),
    "task.failed": _event(
        (WARNING, ERROR),
        "a handler raised, and the task is retried; ERROR: it moved to the dead-letter queue",
        f"{_RUN} error retry_in run_at timeout late traceback",
    ),
    "task.retry": _event(INFO, "a handler raised `Retry`", f"{_RUN} error retry_in run_at lane traceback"),
    "retry.backoff": _event(
        WARNING,
        "the `backoff` of a retry policy raised, or returned no time: the other fields decide",
        "queue job step error",
    ),
    "task.timeout": _event(
        WARNING, "a run exceeded its timeout, and the task is retried", f"{_RUN} timeout late retry_in"
    ),
    "task.crashed": _event(
        WARNING, "the process that ran a task ended, and the task is retried", f"{_RUN} error retry_in traceback"
    ),
    "task.undecodable": _event(
        ERROR,
        "a payload or record cannot be read, or a handler raised `Undecodable`: the task is in `queue.undecodable`",
        f"{_RUN} claim error traceback",
    ),
    "codec.wrong_key": _event(
        ERROR,
        "a payload has a key or codec that this mesh lacks; its tasks wait for a worker that has it",
        "queue retry_in error",
    ),
    "task.suspended": _event(DEBUG, "a workflow only waits, and holds no slot", "queue job waits"),
    "task.snoozed": _event(DEBUG, "a handler raised `Snooze`", f"{_RUN} waits retry_in run_at"),
    "workflow.busy": _event(
        WARNING, "a wait cannot suspend its workflow, because another task of the run goes on", "queue job wait"
    ),
    "workflow.refused": _event(
        WARNING,
        "a value sent to a workflow is not of the awaited type; the wait goes on",
        "queue job wait",
    ),
    "workflow.drift": _event(
        WARNING,
        (
            "a workflow returned without asking for steps or waits that earlier runs have stored: its code "
            "changed, or differs from run to run"
        ),
        "queue job keys",
    ),
    "task.overdue": _event(
        WARNING,
        "a handler still runs after its timeout; the line says where, and what you can do",
        f"{_RUN} timeout handler where",
    ),
    "task.stuck": _event(
        ERROR,
        "a handler was cancelled and does not end; another task gets its slot",
        f"{_RUN} handler duration reason where",
    ),
    "task.unstuck": _event(INFO, "a handler that was stuck has ended", f"{_RUN} handler duration"),
    "task.unending": _event(ERROR, "a queue is being left, and a handler does not end", f"{_RUN} handler reason where"),
    "task.orphaned": _event(
        ERROR,
        (
            "no handler runs a task that this worker holds: a bug. The worker is not ready, and gives the task "
            "back when it leaves: restart it"
        ),
        _RUN,
    ),
    "task.cancelling": _event(INFO, "a running task is being cancelled", _RUN),
    "task.cancelled": _event(INFO, "a running task was cancelled", "queue claim job"),
    "task.dropped": _event(INFO, "a task of a deleted queue was not given back", "queue claim"),
    "task.unsettled": _event(ERROR, "settling a run raised, and the run counts as failed: a bug", "queue job error"),
    "slot.corrupted": _event(
        WARNING,
        "a handler left a nursery or a cancel scope open, or the task of the handlers failed; it is replaced",
        "queue job error",
    ),
    # Outboxes in databases
    "outbox.waits": _event(
        (WARNING, INFO),
        "rows of an outbox wait for the database or the server; INFO: that is over",
        "table error duration",
    ),
    "outbox.refused": _event(WARNING, "the server takes no rows of an outbox for a queue", "queue error"),
    "outbox.failed": _event(
        ERROR,
        "the server refused a row of an outbox ten times: retry or delete it with `worqr outbox`",
        "row queue attempts error",
    ),
    "outbox.held": _event(
        WARNING,
        "rows of an outbox are old, as after a restore: `worqr outbox MODULE:OUTBOX --release`",
        "table count",
    ),
    # Claims, and the requests that end them
    "claim.lost": _event(
        WARNING,
        "a task was reassigned while it ran; its outcome here is discarded",
        "queue claim job",
    ),
    "claim.stray": _event(
        WARNING, "the server lost its last writes or a message, so some tasks are given back", "queue count"
    ),
    "start_tasks": _event(ERROR, "the server refuses to hand out tasks of a queue", "queue error"),
    "settle.refused": _event(
        ERROR,
        ("the server refuses to record how tasks ended; tried again after 1 s to 30 s"),
        "queue error repeated",
    ),
    "settle.accepted": _event(INFO, "the server has recorded how all these tasks ended", "queue"),
    "reconcile": _event(ERROR, "the server does not say which tasks are cancelled", "queue error"),
    "list_own_claims": _event(DEBUG, "the server does not say which tasks this worker holds", "queue error"),
    "note_runs": _event(DEBUG, "the counts of runs were not stored", "queue error"),
    "note_progress": _event(INFO, "progress that a handler reported was not stored", "error"),
    # This worker
    "start_worker": _event(
        (INFO, WARNING),
        "this worker has joined the mesh; WARNING: it could not join again",
        "worker error retry_in",
    ),
    "stop_worker": _event(
        (INFO, WARNING), "this worker has left the mesh; WARNING: it could not deregister", "worker error"
    ),
    "drain": _event(INFO, "this worker begins to leave", "worker grace"),
    "worker.asked": _event(INFO, "an operator has asked something of this worker", "reason outcome"),
    "worker.lost": _event(WARNING, "this worker was declared dead; it joins again or leaves", "worker reason"),
    "worker.vanished": _event(
        WARNING, "this worker leaves without deregistering, because handlers do not end", "worker retry_in"
    ),
    "keep_worker_alive": _event(
        WARNING, "this worker missed its heartbeat deadline, but keeps its tasks", "worker error"
    ),
    "start_work": _event(WARNING, "this worker could not enter a queue again", "queue error retry_in"),
    "map_work": _event(
        ERROR,
        "the server does not record that this worker serves a queue",
        "queue error repeated",
    ),
    "leave.unanswered": _event(
        WARNING,
        "the server does not reply while a queue is being left; its tasks are given back afterwards",
        "queue duration",
    ),
    "leave.refused": _event(
        ERROR,
        "the server does not let this worker leave a queue; tried again after 1 s to 30 s",
        "queue error repeated",
    ),
    "leave.accepted": _event(INFO, "the server lets this worker leave the queue again", "queue"),
    "limit.replaced": _event(
        WARNING, "programs give different numbers for one named limit; once for each", "limit before limits"
    ),
    "limit.unlisted": _event(
        WARNING,
        "a named limit that is in use could not be noted for `worqr limits`",
        "limit error",
    ),
    "permits.refused": _event(
        ERROR,
        "the server refuses permits of a named limit to a function, so none of its tasks starts",
        "queue limit error",
    ),
    "permit.unrenewed": _event(
        WARNING,
        "permits of a named limit could not be renewed, and may be granted to others",
        "limit count error",
    ),
    "limits.changed": _event(INFO, "a worker has declared other limits or lanes of a queue", "queue limits"),
    "shards.unserved": _event(
        WARNING,
        "this worker does not serve shards that were declared after it joined",
        "queue",
    ),
    "function.served": _event(INFO, "a function that was declared after the join is served", "function"),
    "function.unserved": _event(
        ERROR,
        "a function that was declared after the join cannot be served; tried again every 3 s",
        "function error repeated",
    ),
    "payload.large": _event(WARNING, "the arguments of a call exceed 1 MiB; once per function", "function size"),
    "commit.unsent": _event(
        ERROR,
        "a transaction of Django was committed, but a call after it was not sent",
        "function error",
    ),
    "result.changed": _event(
        WARNING,
        (
            "because of the return annotation, a caller gets another type or value than the handler returned; "
            "once per function"
        ),
        "function change",
    ),
    "function.replaced": _event(
        WARNING, "a function was declared again; the worker runs the older one until it joins again", "function"
    ),
    "result.no_slot": _event(
        WARNING,
        (
            "a handler has waited 10 s for the result of a job for which its worker has no free slot: raise the "
            "concurrency, or let another worker serve that queue. Once per worker and queue"
        ),
        "queue awaited_queue awaited_job duration",
    ),
    "heartbeat.late": _event(
        WARNING,
        "the heartbeat thread could not run: the process was frozen, or code holds the interpreter",
        "duration where",
    ),
    "loop.blocked": _event(
        (WARNING, ERROR),
        (
            "the event loop has not turned for over a second; `where` names the code. ERROR: for `block_limit`, "
            "and heartbeats stop"
        ),
        "duration where",
    ),
    "loop.turns": _event(WARNING, "the event loop turns again", "duration"),
    # Where handlers run
    "asyncio.blocked": _event(
        (WARNING, ERROR),
        (
            "the asyncio loop of the handlers has not turned for over a second, so the worker takes no tasks for "
            "it. ERROR: for `block_limit`"
        ),
        "duration where",
    ),
    "asyncio.turns": _event(WARNING, "the asyncio loop turns again", "duration"),
    "asyncio.stuck": _event(
        ERROR,
        "an asyncio loop, or `asyncio_lifespan`, did not end in time; the worker ended without it",
        "duration where",
    ),
    "asyncio.ended": _event(
        ERROR, "`asyncio_lifespan` ended while its worker ran; the worker leaves, and `join` raises the error"
    ),
    "asyncio.raised": _event(ERROR, "an error on the asyncio loop that no handler raised"),
    "asyncio_lifespan.unused": _event(WARNING, "the mesh has an `asyncio_lifespan`, and no function on asyncio"),
    "process.started": _event(DEBUG, "a process that runs handlers was started", "pid"),
    "process.ended": _event(DEBUG, "a process that runs handlers has ended", "pid reason"),
    "process.renewed": _event(
        INFO, "a process is replaced, because of `runs_per_process` or `memory_per_process`", "pid reason"
    ),
    "process.stuck": _event(ERROR, "a process was killed and does not end", "pid"),
    "process.garbled": _event(ERROR, "a process wrote no reply to its pipe; it is killed", "pid error"),
    # The leader's duties
    "leader": _event(
        (INFO, DEBUG, ERROR),
        "this worker is the leader now, or no longer; DEBUG, ERROR: it could not look at workers or queues",
        "queue error repeated",
    ),
    "condemn_worker": _event(
        WARNING,
        "a worker was declared dead, by the leader or by `evict`. After 100 lines in a minute, one counts the others",
        "worker reason count",
    ),
    "fail_worker": _event(
        (INFO, ERROR),
        ("a dead worker's tasks were given back; ERROR: some moved to the dead-letter queue, or the server refuses"),
        "worker queue returned failed error repeated count",
    ),
    "forget_worker": _event(
        (INFO, DEBUG, ERROR),
        "a dead worker was removed; DEBUG, ERROR: that failed",
        "worker error repeated count",
    ),
    "adopt_worker": _event(
        WARNING, "a queue names a worker that is not registered; its tasks are given back", "worker queue"
    ),
    "queue.unserved": _event(
        WARNING,
        (
            "tasks wait in a queue that no worker has served for 10 s: start a worker that declares it, or delete "
            "it. The line has the nearest name that is served. Once per queue, until a worker serves it or the "
            "leader changes; at most 20 queues a minute"
        ),
        "queue waiting count",
    ),
    "purge_queue": _event((INFO, ERROR), "a deleted queue was not removed", "queue error repeated"),
    "promote_due": _event(
        (INFO, ERROR),
        "scheduled jobs could not be put in line",
        "queue error repeated",
    ),
    "adopt_claims": _event(
        (WARNING, INFO, DEBUG),
        "no worker holds tasks that were taken: they are given back; INFO: the leader may not look for such tasks",
        "queue count error",
    ),
    "relay": _event(
        (INFO, ERROR),
        (
            "messages about batches are late; one that cannot be read was dropped; or a queue does not hold the "
            "follow-up of a batch"
        ),
        "queue count error repeated",
    ),
    "tick_schedules": _event(
        (INFO, WARNING, ERROR),
        "schedules are read late; WARNING: a schedule is fired by another leader only, or has missed firings",
        "schedule since count error repeated",
    ),
    "fire_schedule": _event(
        (WARNING, DEBUG, INFO, ERROR),
        (
            "firings wait for the one before, or have no trace; DEBUG: one was enqueued; INFO, ERROR: a "
            "schedule cannot be fired now"
        ),
        "schedule count nominal outcome error repeated",
    ),
    "rewind_schedules": _event(WARNING, "the clock of the server was set back by more than a minute", "count"),
    "declare_schedules": _event(
        (INFO, ERROR),
        "schedules of this worker could not be declared",
        "schedule error repeated",
    ),
    "declare_topics": _event(
        (INFO, ERROR),
        "subscriptions to topics could not be declared",
        "error repeated",
    ),
    "schedules_undeclared": _event(
        (WARNING, INFO),
        "a program that only connects declares schedules, and no worker does; INFO: it has no right to look",
        "schedule count",
    ),
    "drop_schedules": _event(
        INFO, "a schedule is removed: no worker has declared it for a day, or only older deploys have", "schedule"
    ),
    "drop_topics": _event(
        INFO, "the subscription of a queue to topics is removed: only older deploys have it", "queue pattern"
    ),
    "shards": _event(
        WARNING,
        "the stored number of shards of a queue cannot be used; it counts as 1",
        "key queue count",
    ),
    # The link to the server
    "link.lost": _event(
        WARNING,
        "the server cannot be reached, or cannot work: the cause, and what to do; once per outage",
        "server error pending",
    ),
    "link.credentials": _event(
        WARNING,
        "the function of `Mesh(credentials=...)` raised, or returned something else; once until it works",
        "server error",
    ),
    "link.back": _event(INFO, "the server can be reached again", "server duration"),
    "link.moved": _event(
        INFO,
        "the Sentinels name another primary; a mesh was moved; or a cluster node has no slots any more",
        "server before service",
    ),
    "link.blind": _event(WARNING, "no Sentinel replies; worqr keeps the primary that it knows", "service server error"),
    "link.sighted": _event(INFO, "the Sentinels reply again", "service duration"),
    "link.insecure": _event(WARNING, "TLS certificates are not verified", "server"),
    "link.eviction": _event(WARNING, "the server may evict tasks when its memory is full", "server policy"),
    "link.refused": _event(WARNING, "the server refuses a subscription", "error"),
    "link.deliver": _event(ERROR, "a callback failed: a bug"),
    "link.died": _event(ERROR, "the thread of a connection died, and its calls get an error: a bug"),
    "link.sentinel": _event(ERROR, "asking the Sentinels failed: a bug"),
    "link.subscriptions": _event(ERROR, "the subscriptions failed, and worqr connects again: a bug"),
    "link.topology": _event(ERROR, "asking the cluster failed: a bug"),
    "events": _event(WARNING, "another program published a message on the channel of `queue.events()`", "queue"),
    # Programs
    "embedded.private": _event(
        WARNING, "`worqr run` serves a mesh of `embedded:`, so only this process can enqueue tasks"
    ),
    "embedded.lost": _event(
        WARNING,
        "a private server of `embedded:` ends, and tasks that wait there are lost",
        "count",
    ),
    "start": _event(
        (INFO, WARNING),
        "`worqr run` or `mesh.run()` has joined the mesh; WARNING: it cannot reach the server",
        "server prefix app worker concurrency functions error",
    ),
    "probe": _event(INFO, "the program serves probes over HTTP", "address"),
    "stop": _event(INFO, "the program received a signal, and shuts down", "grace"),
    "stuck": _event(
        (WARNING, ERROR), "a handler or a thread does not end, and the process ends without it", "reason duration"
    ),
    "run": _event(ERROR, "`worqr run --log-json` failed", "error"),
    "workers.start": _event(INFO, "all workers of `worqr run --workers` serve", "running"),
    "workers.stop": _event(INFO, "`worqr run --workers` received a signal, and stops its workers", "running urgency"),
    "worker.restarted": _event(
        (WARNING, ERROR),
        "a worker of `worqr run --workers` ended, and is replaced; ERROR: it is killed, because it does not end or respond",
        "pid reason retry_in",
    ),
    "worker.renewed": _event(
        INFO,
        "a worker reached a limit of `worqr run`: its successor is started; later, that it has ended",
        "pid reason",
    ),
    "peer.ended": _event(ERROR, "a worker in a thread has ended by an error; its `stop` or its block raises it"),
    "bench": _event(WARNING, "a test bench of `worqr.testing` waits for tasks that do not end", "reason"),
    # The dashboard
    "dashboard.away": _event(
        WARNING, "the server does not reply to the dashboard; pages show earlier figures", "error"
    ),
    "dashboard.back": _event(INFO, "the server replies to the dashboard again"),
    "dashboard.failed": _event(ERROR, "a request to the dashboard failed, or `access` raised", "path error"),
}

FIELDS: Final[dict[str, str]] = {
    "event": "the name of the event, in every line",
    "queue": "the name",
    "job": "the id of the job; of a plain task, the id that it has in `queue.failed`",
    "running": "how many workers run",
    "urgency": "1: running tasks may end; 2: they are cancelled; 3: the processes end",
    "lane": "the lane of the task, if only that lane is paused",
    "claim": "the number of one run of one task: `Context.fence`",
    "attempt": "the number of this run: 1 is the first",
    "attempts": "how many runs the task gets if all end alike, or `unlimited`",
    "error": "type and text of an error, in one line of at most 500 characters",
    "traceback": "of an error in a process: its traceback there",
    "retry_in": "seconds until the next attempt",
    "run_at": "its time in ISO 8601, if `Retry(run_at=...)` or `Snooze` gave one",
    "step": "the name",
    "timeout": "seconds that the task may take",
    "late": "seconds after its timeout at which a run ended",
    "duration": "seconds that it took",
    "worker": "the id",
    "handler": "the handler, as `module.function`",
    "where": "the frames at which some code is",
    "reason": "what the line says, as a text",
    "repeated": "how often it happened since it was last logged",
    "grace": "seconds that running tasks may go on",
    "count": "how many",
    "waiting": "how many tasks wait, were given back, or moved to the dead-letter queue",
    "function": "the name",
    "awaited_queue": "queue and id of the awaited job",
    "awaited_job": "queue and id of the awaited job",
    "change": "where a result differs, and how",
    "size": "bytes of a payload",
    "returned": "how many tasks wait, were given back, or moved to the dead-letter queue",
    "failed": "how many tasks wait, were given back, or moved to the dead-letter queue",
    "schedule": "the name",
    "table": "the name",
    "row": "the id",
    "key": "what the line says, as a text",
    "limit": "the name",
    "limits": "what may start in the whole mesh",
    "wait": "the name",
    "waits": "at most ten names of what a workflow waits for, or of steps and waits",
    "keys": "at most ten names of what a workflow waits for, or of steps and waits",
    "since": "the last firing before firings were missed, in ISO 8601",
    "nominal": "the nominal time of a firing, in milliseconds since 1970",
    "outcome": "what the line says, as a text",
    "server": "the server, without its password",
    "address": "what the line says, as a text",
    "before": "the primary, or the limits, before",
    "service": "the name that the Sentinels know the primary by",
    "pending": "how many requests wait for the server",
    "policy": "what the line says, as a text",
    "path": "what the line says, as a text",
    "pattern": "what the line says, as a text",
    "pid": "the id",
    "prefix": "the name",
    "app": "the name",
    "concurrency": "units of work that the worker holds at once",
    "functions": "the functions that the worker serves",
}

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def emit(
    logger: logging.Logger,
    event: str,
    text: str,
    /,
    *,
    level: int | None = None,
    exc_info: BaseException | ExcInfo | None = None,
    **fields: object,
) -> None:
    """Log one event; its record gets `fields` as attributes, and `event`.

    Args:
        logger: that of the module.
        event: a name in `EVENTS`.
        text: what happened, with the fields in it as ``%(queue)r``. Without fields it is taken as it is.
        level: one of the levels of the event; None: the first of them.
        exc_info: an error whose traceback is logged.
        fields: the facts, by the names in `FIELDS`.
    """
    emit_fields(logger, event, text, fields, level=level, exc_info=exc_info, stacklevel=2)


def emit_fields(
    logger: logging.Logger,
    event: str,
    text: str,
    fields: Mapping[str, object],
    *,
    level: int | None = None,
    exc_info: BaseException | ExcInfo | None = None,
    exc_text: str | None = None,
    stacklevel: int = 1,
) -> None:
    """Log one event like `emit`, with the fields in a mapping. `exc_text`: the error of `exc_info`, formatted already.

    The record factory of an application may set an attribute of the same name. It keeps its value, where ``extra`` would raise.
    A disabled logger is enabled again: ``dictConfig`` disables all that exist, unless ``disable_existing_loggers`` is False.
    """
    try:
        number = EVENTS[event].levels[0] if level is None else level
        if logger.disabled:
            logger.disabled = False
        if not logger.isEnabledFor(number):
            return
        fields = {name: readable(value) if isinstance(value, str) else value for name, value in fields.items()}
        path, line, function, _ = logger.findCaller(stacklevel=stacklevel + 1)
        error = (type(exc_info), exc_info, exc_info.__traceback__) if isinstance(exc_info, BaseException) else exc_info
        made = (logger.name, number, path, line, f"{event}: {text}", (fields,) if fields else (), error, function)
        record = _make_record(logger, made, exc_text)
        for name, value in (("event", event), *fields.items()):
            record.__dict__.setdefault(name, value)
        _handle(logger, record)
    except BaseException as raised:
        raise_ctrl_c(raised)
        report_once("the logging of this program", raised)


# What the application's part of the logging raises

MANY_REPORTS: Final = 100
"""Limit of reports on the standard error, so that a program that makes new functions all the time does not fill it."""

_reported: set[tuple[str, CodeType | None, type[BaseException]]] = set()
_LOGGING: Final = logging.Logger.handle.__code__.co_filename


def raise_ctrl_c(error: BaseException) -> None:
    """Raise `error` again if it is Ctrl-C, which Python raises in any code of the main thread."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def report_once(what: str, error: BaseException, line: str = "") -> None:
    """Say on the standard error that code of the application raised: once for each place and type of error.

    Args:
        what: whose code it was.
        error: what it raised.
        line: the log line that got lost.
    """
    with suppress(BaseException):  # the standard error is closed, or is an object of the application
        at = _place_of(error.__traceback__)
        key = what, None if at is None else at.tb_frame.f_code, type(error)
        if key in _reported or len(_reported) >= MANY_REPORTS:
            return
        _reported.add(key)
        where = "" if at is None else f", at {at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        said = f"{type(error).__name__}: {' '.join(text_of(error).split())}".removesuffix(": ")
        text = f"worqr: {what} raised {shortened(said)}{where}. Catch it there: worqr goes on, and reports this once."
        if line:
            text += f" The line was: {shortened(line)}"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _place_of(at: TracebackType | None) -> TracebackType | None:
    """Return the first frame that belongs neither to this module nor to `logging`."""
    while at is not None and at.tb_frame.f_code.co_filename in {_LOGGING, __file__}:
        at = at.tb_next
    return at


def _make_record(logger: logging.Logger, made: tuple[Any, ...], exc_text: str | None) -> logging.LogRecord:
    try:
        record = logger.makeRecord(*made)
    except BaseException as raised:
        raise_ctrl_c(raised)
        report_once("the log record factory", raised)
        record = logging.LogRecord(*made)
    if exc_text is not None:
        record.__dict__["exc_text"] = exc_text  # the handlers print it, and leave exc_info alone
    elif record.exc_info and (why := _why_unprintable(record.exc_info[1])):
        record.__dict__.update(exc_info=None, exc_text=f"(its traceback cannot be shown: {why})")
    return record


def _why_unprintable(error: BaseException | None) -> str:
    """Return the type of what Python raises when it prints this error; empty if it can. An error is code of the application."""
    try:
        if error is not None:
            for _ in traceback.TracebackException(type(error), error, None, compact=True).format():
                pass
    except BaseException as raised:
        raise_ctrl_c(raised)
        return type(raised).__name__
    return ""


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    """Pass a record to all handlers, as ``logger.handle`` does. One that raises does not keep it from the others."""
    behind: list[logging.Handler] = []
    try:
        logger.handle(record)
    except BaseException as raised:
        _report_lost(raised, record)
        behind = _handlers_behind(logger, raised.__traceback__)
    for handler in behind:
        try:
            if record.levelno >= handler.level:
                handler.handle(record)
        except BaseException as raised:
            _report_lost(raised, record)


def _report_lost(raised: BaseException, record: logging.LogRecord) -> None:
    raise_ctrl_c(raised)
    try:
        line = record.getMessage()
    except BaseException as unprintable:
        raise_ctrl_c(unprintable)
        line = str(record.msg)
    report_once("a log handler or filter", raised, line)


def _handlers_behind(logger: logging.Logger, at: TracebackType | None) -> list[logging.Handler]:
    """Return the handlers that come after the one that raised; all of them if it was a filter of the logger."""
    failed: logging.Handler | None = None
    while at is not None:
        code = at.tb_frame.f_code
        if code.co_name == "callHandlers" and code.co_filename == _LOGGING:
            logger, failed = at.tb_frame.f_locals["c"], at.tb_frame.f_locals["hdlr"]
        at = at.tb_next
    found: list[logging.Handler] = []
    owner: logging.Logger | None = logger
    while owner is not None:
        found += owner.handlers
        owner = owner.parent if owner.propagate else None
    return found[found.index(failed) + 1 :] if failed in found else found
