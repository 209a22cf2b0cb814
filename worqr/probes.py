"""Probes of a worker over HTTP: ``/live``, ``/ready`` and ``/startup`` for an orchestrator, ``/metrics`` for Prometheus.

``worqr run --probe 9465`` and ``mesh.run(probe=9465)`` serve them. `serve` is for programs that embed a peer. A thread of its own
replies, so ``/live`` can report that the event loop is blocked. Not here: what health is (``Peer.health``), the HTTP server
(`worqr.http_server`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Final, Protocol

from worqr.http_server import BindAddress, HttpReply, HttpRequest, HttpServer
from worqr.inside import readings_of
from worqr.mesh_records import Health
from worqr.peer.peer import PeerReadings

__all__ = ["HasHealth", "serve"]

PATHS: Final = ("/live", "/ready", "/startup")
METRICS: Final = "/metrics"


class HasHealth(Protocol):
    """A `Peer` or a `ThreadPeer`."""

    def health(self) -> Health:
        """Return its health, from any thread."""
        ...

    def _readings(self) -> PeerReadings | None: ...


@contextmanager
def serve(peer: HasHealth, address: str | int) -> Generator[str]:
    """Serve the probes of a peer that your program embeds, for the length of a block.

    ``/live`` returns 200 unless ``peer.health().alive`` is false, ``/ready`` returns 200 if it is ready, and ``/startup`` returns
    200 once it has been ready. Otherwise they return 503 with the reason. Clients that accept JSON get all of `Health`,
    and ``runs``, the number of runs that have ended.
    ``/metrics`` returns the metrics of the peer, with ``pip install 'worqr[metrics]'``.

    Args:
        peer: The peer, or the object that ``mesh.join_in_thread()`` returns.
        address: ``[HOST:]PORT`` or ``unix:PATH``. Without a host: all addresses of the machine. Port 0: a free one.

    Yields:
        str: The address with the port, for ``worqr health``.

    Raises:
        UsageError: The address is not valid, or is in use.
    """
    probes = Probes(peer)
    probes.observe()
    server = HttpServer(BindAddress.parse(address, "address"), probes.respond)
    try:
        yield str(server.address)
    finally:
        server.close()


class Probes:
    """The replies to probes of one peer. `respond` is called in the thread of the server."""

    def __init__(self, source: HasHealth) -> None:
        self._source = source
        self._started = False

    def observe(self) -> Health:
        """Return the health, and note whether the peer has been ready."""
        health = self._source.health()
        if health.ready:
            self._started = True
        return health

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply to a request."""
        if request.path == METRICS:
            return self._metrics(request)
        checks: dict[str, Callable[[Health], str]] = {"/live": why_not_alive, "/ready": _why_not_ready}
        checks["/startup"] = self._why_not_started
        check = checks.get(request.path)
        if check is None:
            return HttpReply.of(HTTPStatus.NOT_FOUND, f"there are {', '.join((*PATHS, METRICS))}")
        health = self.observe()
        why = check(health)
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        if "application/json" in request.accept:
            body = json.dumps({"ok": not why, "reason": why, **asdict(health), "runs": self._runs()}) + "\n"
            return HttpReply(status, body.encode(), "application/json")
        return HttpReply.of(status, why or "ok")

    def _runs(self) -> int:
        readings = readings_of(self._source)
        return 0 if readings is None else sum(readings.runs.values())

    def _metrics(self, request: HttpRequest) -> HttpReply:
        try:
            from worqr.metrics.prometheus import exposition, peer_collector
        except ImportError as error:
            return HttpReply.of(HTTPStatus.NOT_IMPLEMENTED, str(error))
        body, content_type = exposition(peer_collector(self._source), request.accept)
        return HttpReply(HTTPStatus.OK, body, content_type)

    def _why_not_started(self, health: Health) -> str:
        return "" if self._started else health.why or "starting"


def why_not_alive(health: Health) -> str:
    """Return why a process with this health should be restarted; empty if it should not."""
    if health.alive:
        return ""
    return f"the event loop has been blocked for {health.loop_lag:.1f} s" if health.loop_lag else health.why


def _why_not_ready(health: Health) -> str:
    return "" if health.ready else health.why or "not ready"
