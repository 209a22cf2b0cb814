"""The sum of the metrics of several workers, in the text format of Prometheus. Pure.

Counters of workers that have ended stay in the sum, so the sum never falls when a worker is renewed. Of gauges in seconds, the
largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

REGISTRATIONS: Final = "worqr_peer_registrations_total"
"""A successor's first registration does not count, because it is not a worker that was declared dead and joined again."""


class MetricsTotal:
    """Adds up the metrics of workers.

    Args:
        workers: how many workers are not another's successor: those with the lowest numbers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._ended: dict[str, float] = {}
        self._heads: dict[str, list[str]] = {}

    def ended(self, number: int, text: str) -> None:
        """Keep the last counters of the worker with this number."""
        sums = dict(self._ended)
        for kind, name, value in self._samples(number, text):
            if kind != "gauge":
                sums[name] = sums.get(name, 0.0) + value
        self._ended = sums  # another thread may be reading the old one

    def text(self, texts: Mapping[int, str]) -> str:
        """Return the sum of the metrics of these workers, by their numbers, and of those that have ended."""
        sums = dict(self._ended)
        for number, text in texts.items():
            for kind, name, value in self._samples(number, text):
                largest = kind == "gauge" and _metric(name).endswith("_seconds")
                sums[name] = max(sums.get(name, value), value) if largest else sums.get(name, 0.0) + value
        lines: list[str] = []
        for metric, head in self._heads.items():
            lines += [*head, *(f"{name} {value!r}" for name, value in sums.items() if _metric(name) == metric)]
        return "\n".join([*lines, ""])

    def _samples(self, number: int, text: str) -> Iterator[tuple[str, str, float]]:
        """Yield (kind, name with labels, value) of each sample of a worker, and note the heads of the metrics."""
        kinds: dict[str, str] = {}
        heads: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                metric = line.split(" ", 3)[2]
                heads.setdefault(metric, []).append(line)
                if line.startswith("# TYPE"):
                    kinds[metric] = line.rpartition(" ")[2]
                continue
            name, _, value = line.rpartition(" ")
            is_later = name == REGISTRATIONS and number >= self._workers
            yield kinds.get(_metric(name), "untyped"), name, max(0.0, float(value) - is_later)
        self._heads = {**self._heads, **heads}


def _metric(name: str) -> str:
    return name.partition("{")[0]
