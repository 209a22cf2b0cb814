"""A function for a worker process, and its mesh with tracing."""

from __future__ import annotations

from opentelemetry import trace

import worqr
from worqr.otel import Tracing

mesh = worqr.Mesh(tracing=Tracing())


@mesh.task(name="traced.process", runs_in="process", result_ttl=60)
def current_trace() -> str:
    """Return the trace and the span in which the process runs it."""
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x} {span.span_id:016x}"
