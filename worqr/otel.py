"""Traces and metrics with OpenTelemetry: ``Mesh(tracing=worqr.otel.Tracing())``, `measure_workers` and `measure_mesh`.

Each run has a span, which is linked to the span of the call that sent its job. Payloads are neither changed nor recorded. Needs
``pip install 'worqr[otel]'``, and an SDK in the application, which exports spans and metrics.

The metrics are those of `worqr.metrics.fleet`. Their instruments are observed in the exporter's thread. A worker's metrics
are numbers in memory. Those of a mesh are read from the server in that thread, over a connection of its own: no event loop of
the application waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Final, Literal, cast

import trio

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
except ImportError:
    raise ImportError("worqr.otel needs the OpenTelemetry API: pip install 'worqr[otel]'") from None

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from worqr.client.sync import sync
from worqr.errors import Unavailable, UsageError
from worqr.history_records import waited_ms
from worqr.inside import peers_of, run_of
from worqr.job_options import check_choice
from worqr.link import loop_name_here
from worqr.log_events import raise_ctrl_c, report_once
from worqr.mesh import Mesh, side_mesh
from worqr.metrics.fleet import (
    FLEET,
    GIVE_UP_AFTER,
    PEER,
    FleetMetrics,
    FleetReader,
    HasReadings,
    HistogramSample,
    Metric,
    Samples,
    peer_samples,
)
from worqr.peer.context import Context
from worqr.policy import Failure, Policy, Retry, Snooze, Undecodable, decide_retry
from worqr.remote_error import error_type as type_in_records
from worqr.tracebacks import is_a
from worqr.tracing import Carrier, FiringSpan, Operation, SendSpan, Server, Taken
from worqr.validation import check_count

__all__ = ["Tracing", "measure_mesh", "measure_workers"]

# The attributes of spans and metrics, after the semantic conventions of OpenTelemetry for messaging.


SYSTEM: Final = {"messaging.system": "worqr"}
ERRORS: Final = frozenset({"raised", "failure", "undecodable", "timeout"})
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
    for kind, outcome in ((Retry, "retry"), (Snooze, "retry"), (Undecodable, "undecodable"), (Failure, "failure")):
        if is_a(decided, kind):
            return outcome
    return context.cancel_reason or "raised"


def error_type(error: BaseException | None) -> str:
    """Return the type of an error, as in the records; None: a timeout."""
    return "timeout" if error is None else type_in_records(decide_retry(error, Policy(), 0).error)


_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NO_CONTEXT: Final = otel_context.Context()
"""The parent of root spans. Without it, a span that was current when the worker joined would be the parent of every run."""


class Tracing:
    """The spans of a mesh. They follow the semantic conventions of OpenTelemetry for messaging.

    Each call that sends tasks has a span: ``dispatch QUEUE`` of kind PRODUCER, or ``enqueue QUEUE`` of kind CLIENT. With
    ``dispatch_many``, each job has a span ``create QUEUE`` as well. Each run has a span ``process QUEUE`` of kind CONSUMER. The
    context travels in the `meta` of jobs. Plain tasks have no place for it, so their runs are linked to nothing without `raw`.

    Args:
        parent: ``"link"``: each run begins a trace of its own, with a link to the span that sent its job. ``"child"``: the first
            attempt continues the trace of the caller; later attempts are linked to it.
        creates: True: with ``dispatch_many``, each job has a span of its own. False: all are linked to the span of the call.
        raw: True: plain tasks of sampled traces are stored as jobs, with the context in their `meta`. They take more memory
            and time on the server. Order, retries, and cancelling by payload stay what they are for plain tasks.
        body_size: True: note the bytes of the payload of each run.
        record_errors: True: add the text and the traceback of an error to its span. They may contain parts of the payload. False:
            record only its type.
        tracer_provider: The provider of the SDK. None: the global one.

    Raises:
        UsageError: An argument is not valid.
    """

    def __init__(
        self,
        *,
        parent: Literal["link", "child"] = "link",
        creates: bool = True,
        raw: bool = False,
        body_size: bool = False,
        record_errors: bool = False,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        self._child: bool = check_choice(parent, "parent", ("link", "child")) == "child"
        options = {"creates": creates, "raw": raw, "body_size": body_size, "record_errors": record_errors}
        for name, value in options.items():
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"{name} must be True or False, not {value!r}")
        self._creates: bool = creates
        self._raw: bool = raw
        self._body_size: bool = body_size
        self._record_errors: bool = record_errors
        self._tracer: trace.Tracer = trace.get_tracer("worqr", tracer_provider=tracer_provider)

    @contextmanager
    def sending(self, operation: Operation, queue: str | None, server: Server) -> Generator[SendSpan]:
        """Run the block, which sends tasks, inside a span."""
        kind = SpanKind.PRODUCER if operation == "dispatch" or self._raw else SpanKind.CLIENT
        with self._tracer.start_as_current_span(
            operation if queue is None else f"{operation} {queue}",
            kind=kind,
            attributes=of_queue(operation, "send", queue) | of_server(server),
            record_exception=self._record_errors,
            set_status_on_exception=False,
        ) as span:
            try:
                yield _Sent(span)
            except Exception as error:
                _set_error(span, error)
                raise

    def carrier(self) -> Carrier:
        """Return the context of the current span."""
        return _carrier_of(None)

    def plain_carrier(self) -> Carrier | None:
        """Return the context for plain tasks if the trace is sampled; None: they stay plain tasks."""
        if not self._raw or not trace.get_current_span().get_span_context().trace_flags.sampled:
            return None
        return self.carrier()

    def creating(self, queue: str, server: Server) -> Carrier:
        """Return the context for one of many jobs: that of a span of its own, unless ``creates=False``."""
        if not self._creates:
            return self.carrier()
        attributes = of_queue("create", "create", queue) | of_server(server)
        with self._tracer.start_as_current_span(f"create {queue}", kind=SpanKind.PRODUCER, attributes=attributes):
            return self.carrier()

    def firing(self, schedule: str, queue: str, server: Server) -> FiringSpan:
        """Return the span of a firing. It is exported only if the firing is enqueued."""
        attributes = of_queue("dispatch", "send", queue) | of_server(server) | {"worqr.schedule": schedule}
        span = self._tracer.start_span(
            f"dispatch {queue}", context=_NO_CONTEXT, kind=SpanKind.PRODUCER, attributes=attributes
        )
        return _Firing(span)

    def taken(self, queue: str, server: Server, began_ns: int, tasks: Sequence[Taken]) -> None:
        """Record a span of tasks that were taken by hand, with links to the spans that sent them."""
        links = [link for task in tasks for link in _links_to(_PROPAGATOR.extract(task.meta, _NO_CONTEXT))]
        attributes = of_queue("take", "receive", queue) | of_server(server)
        attributes["messaging.batch.message_count"] = len(tasks)
        self._tracer.start_span(
            f"take {queue}", kind=SpanKind.CLIENT, attributes=attributes, links=links, start_time=began_ns
        ).end()

    async def run(self, context: Context, call_next: Callable[[], Awaitable[object]]) -> object:
        """Run a handler inside a span. `Mesh` puts this around all middleware."""
        calls = context.items
        senders = [_PROPAGATOR.extract(call.meta, _NO_CONTEXT) for call in calls]
        is_child = self._child and not run_of(context).is_list and context.attempt == 1
        links = [] if is_child else [link for sender in senders for link in _links_to(sender)]
        attributes = of_queue("process", "process", context.queue) | of_run(context, body_size=self._body_size)
        with self._tracer.start_as_current_span(
            f"process {context.queue}",
            context=senders[0] if is_child else _NO_CONTEXT,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links + _links_to(otel_context.get_current()),
            record_exception=self._record_errors,
            set_status_on_exception=False,
        ) as span:
            try:
                result = await call_next()
            except trio.Cancelled:
                _end_with(span, context.cancel_reason or "cancel", None)
                raise
            except BaseException as error:
                _end_with(span, outcome_of(error, context), error)
                raise
            span.set_attribute("worqr.outcome", "ok")
            if failed := _failed_calls(result):
                span.set_attribute("worqr.failed_calls", failed)
            return result

    @property
    def continuing(self) -> Callable[[Carrier], Any]:
        """The function that continues a trace in a worker process."""
        return continue_trace


class _Sent:
    """The span of a call that sends tasks."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def sent(self, count: int, id: str | None) -> None:
        """Note how many tasks were sent, and the id of the job if it was one job."""
        if id is not None:
            self._span.set_attribute("messaging.message.id", id)
        elif count != 1:
            self._span.set_attribute("messaging.batch.message_count", count)


class _Firing:
    """The span of a firing."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.carrier: Carrier = _carrier_of(trace.set_span_in_context(span, _NO_CONTEXT))

    def end(self, id: str) -> None:
        """Note that the firing was enqueued as the job `id`."""
        self._span.set_attribute("messaging.message.id", id)
        self._span.end()


@contextmanager
def continue_trace(carrier: Carrier) -> Generator[None]:
    """Make the span of this carrier the current one in the block. A worker process enters it around each run."""
    token = otel_context.attach(_PROPAGATOR.extract(carrier, _NO_CONTEXT))
    try:
        yield
    finally:
        otel_context.detach(token)


def _carrier_of(context: otel_context.Context | None) -> Carrier:
    """Return the context as names and texts; None: the current one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier


def _links_to(context: otel_context.Context) -> list[Link]:
    sender = trace.get_current_span(context).get_span_context()
    return [Link(sender)] if sender.is_valid else []


def _failed_calls(result: object) -> int:
    """Return how many calls of a list have failed, by what their handler has returned."""
    outcomes = cast("list[object]", result) if isinstance(result, list) else []
    return sum(isinstance(outcome, BaseException) for outcome in outcomes)


def _end_with(span: Span, outcome: str, error: BaseException | None) -> None:
    """Note how the run ended. A retry, a cancellation and a task that is given back are no errors."""
    span.set_attribute("worqr.outcome", outcome)
    if outcome in ERRORS:
        _set_error(span, error)


def _set_error(span: Span, error: BaseException | None) -> None:
    span.set_attribute("error.type", error_type(error))
    span.set_status(Status(StatusCode.ERROR))


# Observable instruments for the metrics of a catalogue. One look at the values serves all instruments of a collection.


FRESH_FOR: Final = 1.0
"""Seconds for which one look serves the instruments that have not had it."""

_Read = Callable[[Samples], Iterable[Observation]]


def observe(meter: Meter, metrics: Mapping[str, Metric], look: Callable[[], Samples | None]) -> None:
    """Make the instruments of these metrics. A histogram has three: its buckets, its sum, and its count.

    These three are up-down counters, because exporters would append ``_total`` to the names of other counters.

    Args:
        meter: makes them.
        metrics: the catalogue.
        look: returns the values, in the thread of an exporter; None: there are none now.
    """
    shared = _SharedLook(look)
    for name, metric in metrics.items():
        text = metric.meaning.replace("`", "")
        if metric.kind == "histogram":
            for part, read in _parts_of(name, metric).items():
                callback = _callback(shared, f"{name}_{part}", read)
                meter.create_observable_up_down_counter(f"{name}_{part}", [callback], description=f"{text} ({part})")
            continue
        make = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
        make(name, [_callback(shared, name, partial(_values, name, metric))], description=text)


class _SharedLook:
    """The values of the last look. Several exporters may collect at once."""

    def __init__(self, look: Callable[[], Samples | None]) -> None:
        self._look = look
        self._lock = Lock()
        self._samples: Samples = Samples()
        self._looked_at = float("-inf")
        self._given: set[str] = set()

    def samples_for(self, instrument: str) -> Samples:
        """Return the values for an instrument. One that has had the last look begins another collection, and a new look."""
        with self._lock:
            if instrument in self._given or time.monotonic() - self._looked_at > FRESH_FOR:
                self._given, self._samples = set(), Samples()
                try:
                    self._samples = self._look() or Samples()
                finally:  # the SDK logs an error, for this instrument only: the others look no more
                    self._looked_at = time.monotonic()
                    self._given.add(instrument)
            self._given.add(instrument)
            return self._samples


def _callback(shared: _SharedLook, instrument: str, read: _Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        return read(shared.samples_for(instrument))

    return callback


def _values(name: str, metric: Metric, samples: Samples) -> Iterable[Observation]:
    for sample in samples.values.get(name, ()):
        yield Observation(sample.value, dict(zip(metric.labels, sample.labels, strict=True)))


def _parts_of(name: str, metric: Metric) -> Mapping[str, _Read]:
    """Return how the parts of a histogram are read, by their names."""

    def found(samples: Samples) -> Iterable[tuple[HistogramSample, dict[str, str]]]:
        for sample in samples.histograms.get(name, ()):
            yield sample, dict(zip(metric.labels, sample.labels, strict=True))

    return {
        "bucket": lambda samples: [
            Observation(count, {**labels, "le": bound})
            for sample, labels in found(samples)
            for bound, count in sample.buckets.items()
        ],
        "sum": lambda samples: [Observation(sample.total, labels) for sample, labels in found(samples)],
        "count": lambda samples: [Observation(sample.buckets["+Inf"], labels) for sample, labels in found(samples)],
    }


DURATION: Final = "messaging.process.duration"
BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Of its buckets, in seconds, as the semantic conventions have them."""


def measure_workers(mesh: Mesh[Any], *, meter_provider: MeterProvider | None = None) -> None:
    """Export the metrics of each worker of this process that joins the mesh from now on, and the durations of its runs.

    They are those of ``/metrics`` of the probes, and ``messaging.process.duration``. If several workers of the mesh run in this
    process, the gauges and counters are those of the one that joined last.

    Args:
        mesh: The mesh, before it is joined.
        meter_provider: The provider of the SDK. None: the global one.

    Raises:
        UsageError: The workers of this mesh are measured already.
    """
    peers_of(mesh).measure_with(_Workers(_meter(meter_provider)))


def measure_mesh(mesh: Mesh[Any], *, max_queues: int = 300, meter_provider: MeterProvider | None = None) -> None:
    """Export the metrics of the whole mesh, those of ``worqr metrics``. Call it in one process of the mesh.

    Each collection reads the server in the thread of the exporter, over a connection of its own, for about 1.5 s at most.
    Without a reply, ``worqr_up`` is 0 and no other metric is there.

    Args:
        mesh: The mesh. It need not be connected.
        max_queues: Queues that are shown by name, at least 1. The others are summed up as ``(other)``.
        meter_provider: The provider of the SDK. None: the global one.

    Raises:
        UsageError: `max_queues` is not valid.
    """
    observe(_meter(meter_provider), FLEET, _MeshLook(mesh, check_count(max_queues, "max_queues")))


class _Workers:
    """Measures the workers of a mesh that run in this process."""

    def __init__(self, meter: Meter) -> None:
        self._peers: list[HasReadings] = []
        self._durations = meter.create_histogram(
            DURATION,
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=BOUNDS,
        )
        observe(meter, PEER, self._look)

    @contextmanager
    def joined(self, peer: HasReadings) -> Generator[None]:
        """Measure this peer in the block."""
        self._peers.append(peer)
        try:
            yield
        finally:
            self._peers.remove(peer)

    def _look(self) -> Samples:
        peers = tuple(self._peers)
        return peer_samples(peers[-1]) if peers else Samples()

    async def run(self, context: Context, call_next: Callable[[], Awaitable[object]]) -> object:
        """Run a handler, and record its duration."""
        began = time.perf_counter()
        outcome, error = "ok", None
        try:
            return await call_next()
        except trio.Cancelled:
            outcome = context.cancel_reason or "cancel"
            raise
        except BaseException as raised:
            outcome, error = outcome_of(raised, context), raised
            raise
        finally:
            self._record(time.perf_counter() - began, context.queue, outcome, error)

    def _record(self, duration: float, queue: str, outcome: str, error: BaseException | None) -> None:
        """Record the duration of a run. Its outcome stays what it is, whatever the SDK raises."""
        try:
            attributes = of_queue("process", "process", queue) | {"worqr.outcome": outcome}
            if outcome in ERRORS:
                attributes["error.type"] = error_type(error)
            self._durations.record(duration, attributes)
        except BaseException as raised:
            raise_ctrl_c(raised)
            report_once("the metrics of OpenTelemetry", raised)


class _MeshLook:
    """Reads the metrics of a mesh, in the thread of an exporter."""

    def __init__(self, mesh: Mesh[Any], max_queues: int) -> None:
        self._metrics = FleetMetrics(max_queues)
        self._mesh = side_mesh(mesh, "metrics", GIVE_UP_AFTER)
        self._reader = FleetReader(self._mesh)

    def __call__(self) -> Samples | None:
        if loop_name_here():  # an application collects in its loop, which must not wait
            return None
        try:
            snapshot = sync(self._reader.read)
        except Unavailable:
            snapshot = None
        return self._metrics.samples(snapshot)


def _meter(provider: MeterProvider | None) -> Meter:
    return metrics.get_meter("worqr", meter_provider=provider)
