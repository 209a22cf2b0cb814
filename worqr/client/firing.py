"""`fire`: enqueue one firing of a schedule, with a span around it if the mesh is traced. For leaders and test benches."""

from __future__ import annotations

import logging

from worqr import ops
from worqr.cron import Definition, jitter_ms
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit, raise_ctrl_c
from worqr.tracebacks import one_line
from worqr.tracing import FiringSpan, Tracing, encoded_meta

logger: logging.Logger = logging.getLogger(__name__)


async def fire(
    link: Link,
    keys: QueueKeys,
    definition: Definition,
    nominal: int,
    *,
    judged_at: int,
    tracing: Tracing | None,
    patience: float | None = None,
) -> str:
    """Enqueue one firing; return the reply of `ops.fire_schedule`. Only a firing that this call has enqueued gets a span.

    Args:
        link: of the queue.
        keys: of the queue.
        definition: the schedule.
        nominal: the time of the firing, in ms.
        judged_at: when it was found due, in ms.
        tracing: that of the mesh; None: it is not traced.
        patience: seconds; by default the link's.

    Raises:
        Unavailable: the server did not reply within `patience`.
        WorqrError: the server's error.
    """
    span = None if tracing is None else _span_of(tracing, link, definition)
    call = ops.fire_schedule(
        *(keys, definition.name, nominal),
        judged_at=judged_at,
        run_at=nominal + jitter_ms(definition, nominal),
        overlap=definition.overlap,
        task=definition.task,
        meta="" if span is None else encoded_meta(span.carrier),
    )
    outcome = await link.call(call, patience=patience)
    if span is not None and outcome == "ok":
        try:
            span.end(definition.job)
        except BaseException as error:
            _note_untraced(definition, error)
    return outcome


def _span_of(tracing: Tracing, link: Link, definition: Definition) -> FiringSpan | None:
    """Return the span of a firing; None if the application's SDK fails, because the leader must not end."""
    try:
        return tracing.firing(definition.name, definition.queue, link.settings.address)
    except BaseException as error:
        _note_untraced(definition, error)
        return None


def _note_untraced(definition: Definition, error: BaseException) -> None:
    raise_ctrl_c(error)
    text = "schedule %(schedule)r is fired without a trace: %(error)s"
    emit(logger, "fire_schedule", text, schedule=definition.name, error=one_line(error))
