"""Metrics by OpenTelemetry: of the workers of a process, and of a whole mesh. They are those of `worqr.metrics.catalogue`.

The instruments are observed in the exporter's thread. A worker's metrics are numbers in memory. Those of a mesh are read from the
server in that thread, over a connection of its own: no event loop of the application waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Final

import trio
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from worqr.client.sync import sync
from worqr.errors import Unavailable
from worqr.inside import peers_of
from worqr.link import loop_name_here
from worqr.log_events import raise_ctrl_c, report_once
from worqr.mesh import Mesh
from worqr.metrics.catalogue import FLEET, PEER, HistogramSample, Metric, Samples
from worqr.metrics.fleet import GIVE_UP_AFTER, FleetMetrics, FleetReader, HasReadings, peer_samples
from worqr.otel.tracing import ERRORS, error_type, of_queue, outcome_of
from worqr.peer.context import Context
from worqr.side_mesh import side_mesh
from worqr.validation import check_count

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
