"""`Supervision`: what a service tells those who supervise it, an orchestrator by probes over HTTP and systemd by messages.

Both reply or send in threads of their own, from before the service joins until it has left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from worqr.hosting.systemd import READY, STOPPING, SystemdNotifier
from worqr.http_server import BindAddress, HttpServer
from worqr.inside import readings_of
from worqr.log_events import emit
from worqr.mesh_records import Health
from worqr.peer.peer import Peer, PeerReadings
from worqr.probes import Probes

logger: logging.Logger = logging.getLogger(__name__)

LEAVING: Final = "the peer is leaving"


class Supervision:
    """The probes and the messages of one service.

    Args:
        probe: where the probes listen; None: as ``$WORQR_PROBE`` says, else nowhere.

    Raises:
        UsageError: that is not an address.
    """

    def __init__(self, probe: str | int | None) -> None:
        self._bind: BindAddress | None = None
        if probe is not None:
            self._bind = BindAddress.parse(probe, "probe")
        elif given := os.environ.get("WORQR_PROBE"):
            self._bind = BindAddress.parse(given, "WORQR_PROBE")
        self._peer: Peer | None = None
        self._stopping = False
        self._probes = Probes(self)
        self._systemd = SystemdNotifier(self.health, os.environ)

    @contextmanager
    def running(self) -> Generator[None]:
        """Serve the probes, and send messages, in a block.

        Raises:
            UsageError: the address of the probes is in use.
        """
        server = None if self._bind is None else HttpServer(self._bind, self._probes.respond)
        try:
            self._systemd.start()
            if server is not None:
                emit(logger, "probe", "serving probes at %(address)s", address=str(server.address))
            yield
        finally:
            self._systemd.end()
            if server is not None:
                server.close()

    def serves(self, peer: Peer) -> None:
        """The peer has joined, and serves its queues."""
        self._peer = peer
        self._probes.observe()
        self._systemd.tell(READY)

    def stopping(self) -> None:
        """The service begins to leave; from any thread, and from a signal handler."""
        if not self._stopping:
            self._stopping = True
            self._systemd.tell(STOPPING)

    def _readings(self) -> PeerReadings | None:
        return None if self._peer is None else readings_of(self._peer)

    def health(self) -> Health:
        """Return the health of the service, from any thread."""
        if self._peer is None:
            return Health(alive=True, ready=False, why="joining the mesh", running=0, room=0, loop_lag=0.0)
        health = self._peer.health()
        if self._stopping and health.ready:  # a loop that is blocked does not know it yet
            return replace(health, ready=False, why=LEAVING)
        return health
