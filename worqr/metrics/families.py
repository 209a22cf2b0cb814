"""`Families`: the values of the metrics of a catalogue, as the Prometheus client takes them; and the text of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from worqr.metrics import catalogue

_MAKERS: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class Families:
    """The values of one scrape. A metric without a value is left out."""

    def __init__(self, metrics: Mapping[str, catalogue.Metric]) -> None:
        self._metrics = metrics
        self._found: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Note a value; None: there is none."""
        if value is None:
            return
        family = self._family(name)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, float(value))

    def add_histogram(self, name: str, buckets: Mapping[str, int], total: float, *labels: str) -> None:
        """Note a histogram.

        Args:
            name: the metric.
            buckets: the number of values up to each bound, in order; the last bound is ``+Inf``.
            total: the sum of all values.
            labels: the values of its labels.
        """
        family = self._family(name)
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, list(buckets.items()), total)

    def _family(self, name: str) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
        family = self._found.get(name)
        if family is None:
            known = self._metrics[name]
            text = known.meaning.replace("`", "")
            family = _MAKERS[known.kind](name, f"{text[0].upper()}{text[1:]}.", labels=known.labels)
            self._found[name] = family
        return family

    def all(self) -> Iterable[Metric]:
        """Return them in the order of the catalogue."""
        return [self._found[name] for name in self._metrics if name in self._found]


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text of a scrape, and its content type, in the format that the header Accept asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
