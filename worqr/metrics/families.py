"""`Families`: the values of the metrics of a catalogue, as the Prometheus client takes them; and the text of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worqr.metrics import catalogue


class Families:
    """The values of one scrape. A metric without a value is left out."""

    def __init__(self, metrics: Mapping[str, catalogue.Metric]) -> None:
        self._metrics = metrics
        self._found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Note a value; None: there is none."""
        if value is None:
            return
        family = self._found.get(name)
        if family is None:
            known = self._metrics[name]
            make = GaugeMetricFamily if known.kind == "gauge" else CounterMetricFamily
            text = known.meaning.replace("`", "")
            family = self._found[name] = make(name, f"{text[0].upper()}{text[1:]}.", labels=known.labels)
        family.add_metric(labels, float(value))

    def all(self) -> Iterable[Metric]:
        """Return them in the order of the catalogue."""
        return [self._found[name] for name in self._metrics if name in self._found]


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text of a scrape, and its content type, in the format that the header Accept asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
