"""`PeerReadings`: the state of one peer as numbers, for metrics. Reading them does no I/O, and works from any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worqr.link import LinkCondition, boottime
from worqr.mesh_records import Health

if TYPE_CHECKING:
    from worqr.peer.engine import Engine


@dataclass(frozen=True, slots=True)
class PeerReadings:
    """The state of a peer that has joined.

    Attributes:
        health: its health.
        leads: it is the leader of the mesh.
        concurrency: units of work that it may run at once.
        stuck: cancelled runs that do not end.
        beat_age: seconds since it sent the newest heartbeat that the server acknowledged; None: it is not registered.
        link: its connections.
        children: its worker processes.
        registrations: how often it has joined, under one worker id after the other.
        beats_failed: heartbeats that failed.
        loop_blocks: how often its loop was blocked for over a second.
        runs: how many runs ended, by queue and outcome.
        counts_lost: counted runs that never reached the totals of their queue.
    """

    health: Health
    leads: bool
    concurrency: int
    stuck: int
    beat_age: float | None
    link: LinkCondition
    children: int
    registrations: int
    beats_failed: int
    loop_blocks: int
    runs: Mapping[tuple[str, str], int]
    counts_lost: int


def readings_of(engine: Engine, health: Health) -> PeerReadings:
    """Return the state of the peer of this engine."""
    session = engine.session
    registration, counts = session.registration, session.heartbeat_counts
    age = math.inf if registration is None else boottime() - registration.alive_at
    return PeerReadings(
        health=health,
        leads=engine.leader.leads,
        concurrency=engine.scheduler.concurrency,
        stuck=engine.queues.stuck.stuck,
        beat_age=None if math.isinf(age) else max(0.0, age),
        link=engine.queues.link.condition,
        children=engine.runs.executors.children,
        registrations=session.registrations,
        beats_failed=counts.failed,
        loop_blocks=counts.blocks,
        runs=dict(engine.runs.counter.totals),  # one step of the interpreter: the loop changes it meanwhile
        counts_lost=engine.runs.counter.lost,
    )
