"""Traces and metrics with OpenTelemetry: ``Mesh(tracing=worqr.otel.Tracing())``, `measure_workers` and `measure_mesh`.

Each run has a span, which is linked to the span of the call that sent its job. Payloads are neither changed nor recorded. Needs
``pip install 'worqr[otel]'``, and an SDK in the application, which exports spans and metrics.
"""

try:
    from opentelemetry import metrics as metrics
    from opentelemetry import trace as trace
except ImportError:
    raise ImportError("worqr.otel needs the OpenTelemetry API: pip install 'worqr[otel]'") from None

from worqr.otel.telemetry import Tracing, measure_mesh, measure_workers

__all__ = ["Tracing", "measure_mesh", "measure_workers"]
