"""Metrics for Prometheus: of a peer that your program embeds, and of the whole mesh. Needs ``pip install 'worqr[metrics]'``.

``worqr run --probe`` serves those of a worker at ``/metrics``, and ``worqr metrics`` those of the mesh. `peer_collector` is for
programs that embed a peer and serve metrics themselves. `catalogue` has all metrics. The global registry of the client library
is never used.
"""

try:
    import prometheus_client as prometheus_client
except ImportError as _missing:
    raise ImportError("worqr.metrics needs the Prometheus client: pip install 'worqr[metrics]'") from _missing

from worqr.metrics.peer import peer_collector

__all__ = ["peer_collector"]
