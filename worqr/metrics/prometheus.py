"""Metrics for Prometheus: `Samples` as its client library takes them, and the text of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise ImportError("worqr.metrics needs the Prometheus client: pip install 'worqr[metrics]'") from _missing

from worqr.metrics import fleet
from worqr.metrics.fleet import FLEET, PEER, HasReadings, Samples, peer_samples

_MAKERS: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def peer_collector(peer: HasReadings) -> Collector:
    """Return a collector of the metrics of a peer, for a registry of the Prometheus client.

    Collecting does no I/O, and does not wait for the event loop.

    Args:
        peer: The peer, or the object that ``mesh.join_in_thread()`` returns.
    """
    return _PeerCollector(peer)


class _PeerCollector(Collector):
    def __init__(self, peer: HasReadings) -> None:
        self._peer = peer

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering it must not collect."""
        return []

    def collect(self) -> Iterable[Metric]:
        return _families(PEER, peer_samples(self._peer))


def fleet_collector(samples: Samples) -> Collector:
    """Return a collector of metrics of the whole mesh, which were read before."""
    return _FleetCollector(samples)


class _FleetCollector(Collector):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        return _families(FLEET, self._samples)


def _families(metrics: Mapping[str, fleet.Metric], samples: Samples) -> Iterable[Metric]:
    """Return the metrics that have values, in the order of the catalogue."""
    for name, known in metrics.items():
        text = known.meaning.replace("`", "")
        text = f"{text[0].upper()}{text[1:]}."
        if known.kind == "histogram":
            histogram = HistogramMetricFamily(name, text, labels=known.labels)
            for each in samples.histograms.get(name, ()):
                histogram.add_metric(each.labels, list(each.buckets.items()), each.total)
            found: Metric = histogram
        else:
            family = _MAKERS[known.kind](name, text, labels=known.labels)
            for sample in samples.values.get(name, ()):
                family.add_metric(sample.labels, sample.value)
            found = family
        if found.samples:
            yield found


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text of a scrape, and its content type, in the format that the header Accept asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
