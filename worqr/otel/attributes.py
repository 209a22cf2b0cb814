"""The attributes of spans and metrics, after the semantic conventions of OpenTelemetry for messaging."""

from __future__ import annotations

from typing import Any, Final

from worqr.inside import run_of
from worqr.peer.context import Context
from worqr.policy import Broken, Failure, Policy, Retry, decide_retry
from worqr.remote_error import error_type as type_in_records
from worqr.run_counts import waited_ms
from worqr.tracebacks import is_a
from worqr.tracing import Server

SYSTEM: Final = {"messaging.system": "worqr"}
ERRORS: Final = frozenset({"raised", "failure", "broken", "timeout"})
"""Outcomes of runs that are errors. A retry, a cancellation and a task that is given back are none."""


def of_queue(operation: str, kind: str, queue: str | None) -> dict[str, Any]:
    """Return the attributes of an operation on a queue; None: on several."""
    named = {} if queue is None else {"messaging.destination.name": queue}
    return {**SYSTEM, "messaging.operation.name": operation, "messaging.operation.type": kind, **named}


def of_server(server: Server) -> dict[str, Any]:
    """Return the attributes of the server of a request."""
    return (
        {"server.address": server.path} if server.path else {"server.address": server.host, "server.port": server.port}
    )


def of_run(context: Context, *, body_size: bool) -> dict[str, Any]:
    """Return the attributes of a run. `body_size`: with the bytes of its payload."""
    run = run_of(context)
    if run.is_list:
        return {"messaging.client.id": run.registration.worker, "messaging.batch.message_count": len(run.items)}
    found: dict[str, Any] = {
        "messaging.message.id": context.id,
        "messaging.client.id": run.registration.worker,
        "worqr.attempt": context.attempt,
        "worqr.last_attempt": context.last_attempt,
    }
    if shard := run.host.id_suffix.removeprefix("~"):
        found["messaging.destination.partition.id"] = shard
    if run.record is not None and (waited := waited_ms(run.record, run.fence)) is not None:
        found["worqr.wait_ms"] = waited
    if body_size:
        found["messaging.message.body.size"] = len(run.task)
    return found


def outcome_of(error: BaseException, context: Context) -> str:
    """Return how the run ended that raised this error. A group counts as in the retry policy."""
    decided = decide_retry(error, Policy(), 0).error
    for kind, outcome in ((Retry, "retry"), (Broken, "broken"), (Failure, "failure")):
        if is_a(decided, kind):
            return outcome
    return context.cancel_reason or "raised"


def error_type(error: BaseException | None) -> str:
    """Return the type of an error, as in the records; None: a timeout."""
    return "timeout" if error is None else type_in_records(decide_retry(error, Policy(), 0).error)
