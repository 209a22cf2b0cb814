"""The metrics of one peer."""

from __future__ import annotations

from typing import Protocol

from worqr.inside import readings_of
from worqr.mesh_records import Health
from worqr.metrics.catalogue import Samples
from worqr.peer.peer import PeerReadings


class HasReadings(Protocol):
    """A `Peer` or a `ThreadPeer`."""

    def health(self) -> Health:
        """Return its health, from any thread."""
        ...

    def _readings(self) -> PeerReadings | None: ...


def peer_samples(peer: HasReadings) -> Samples:
    """Return the metrics of a peer, without I/O and without waiting for the event loop. From any thread."""
    readings = readings_of(peer)
    health = peer.health() if readings is None else readings.health
    found = Samples()
    for name, value in (("alive", health.alive), ("ready", health.ready), ("running", health.running)):
        found.add(f"worqr_peer_{name}", value)
    found.add("worqr_peer_room", health.room)
    found.add("worqr_peer_loop_lag_seconds", health.loop_lag)
    if readings is not None:
        _add(found, readings)
    return found


def _add(found: Samples, readings: PeerReadings) -> None:
    found.add("worqr_peer_leads", readings.leads)
    found.add("worqr_peer_concurrency", readings.concurrency)
    found.add("worqr_peer_stuck", readings.stuck)
    found.add("worqr_peer_beat_age_seconds", readings.beat_age)
    found.add("worqr_peer_link_up", readings.link.up)
    found.add("worqr_peer_requests_in_flight", readings.link.unanswered)
    found.add("worqr_peer_children", readings.children)
    found.add("worqr_peer_beats_failed_total", readings.beats_failed)
    found.add("worqr_peer_reconnects_total", readings.link.reconnects)
    found.add("worqr_peer_registrations_total", readings.registrations)
    found.add("worqr_peer_loop_blocked_total", readings.loop_blocks)
    found.add("worqr_peer_counts_lost_total", readings.counts_lost)
    for (queue, outcome), n in sorted(readings.runs.items()):
        found.add("worqr_peer_runs_total", n, queue, outcome)
