"""Metrics of a peer that your program embeds, and of the whole mesh; for Prometheus with ``pip install 'worqr[metrics]'``.

``worqr run --probe`` serves those of a worker at ``/metrics``, and ``worqr metrics`` those of the mesh. `peer_collector` is for
programs that embed a peer and serve metrics themselves. `fleet` has all metrics, and `prometheus` alone needs the client
library, whose global registry is never used. `worqr.otel` exports the same metrics by OpenTelemetry.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worqr.metrics.prometheus import peer_collector

__all__ = ["peer_collector"]


def __getattr__(name: str) -> Any:
    """Import the Prometheus client when it is used."""
    if name == "peer_collector":
        from worqr.metrics.prometheus import peer_collector

        return peer_collector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
