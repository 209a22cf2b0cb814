"""Observable instruments for the metrics of a catalogue. One look at the values serves all instruments of a collection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from worqr.metrics.catalogue import Metric
from worqr.metrics.samples import HistogramSample, Samples

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
