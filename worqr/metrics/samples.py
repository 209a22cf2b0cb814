"""`Samples`: the values of metrics at one moment. `prometheus` and `worqr.otel` export them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a gauge or a counter, and the values of its labels in the order of the catalogue."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """The value of a histogram.

    Attributes:
        labels: the values of its labels.
        buckets: the number of values up to each bound, in order; the last bound is ``+Inf``.
        total: the sum of all values.
    """

    labels: tuple[str, ...]
    buckets: Mapping[str, int]
    total: float


class Samples:
    """The values of a catalogue's metrics. A metric without a value is left out.

    Attributes:
        values: those of gauges and counters, by metric.
        histograms: those of histograms, by metric.
    """

    def __init__(self) -> None:
        self.values: defaultdict[str, list[Sample]] = defaultdict(list)
        self.histograms: defaultdict[str, list[HistogramSample]] = defaultdict(list)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Note a value; None: there is none."""
        if value is not None:
            self.values[name].append(Sample(labels, float(value)))

    def add_histogram(self, name: str, buckets: Mapping[str, int], total: float, *labels: str) -> None:
        """Note the value of a histogram; see `HistogramSample`."""
        self.histograms[name].append(HistogramSample(labels, buckets, total))
