"""`FailureDetector`: which workers are dead. `LeaseWatch`: whether a leader's lease no longer changes.

Pure: no I/O, and no clock except the times they are given, which are seconds of one monotonic clock. Not here: the requests to
the server, and what follows from the results (`leader`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worqr.ops import WorkerHeartbeats
from worqr.stored_values import as_bytes

CHECK_EVERY = 0.5
MISSING_FOR = 1.25
STALE_KEEPALIVES = 9
"""Keepalives for which a heartbeat must not have changed. The documentation promises ten; a heartbeat and a check take the
tenth.
"""
MAX_CHECK_GAP = 5.0
"""Seconds without a check, because another peer led, after which earlier checks prove nothing."""
STALE_AFTER = 5.0
"""Seconds for which a lease must not have changed before another peer takes it. It should have expired after 2 s."""
STALE_BEATS = 4
"""Heartbeats whose replies must have shown the same lease."""


@dataclass
class FailureDetector:
    """The results of earlier checks.

    Attributes:
        keepalive: seconds after which a worker without a heartbeat counts as dead.
        inconclusive: the last check came too soon after a reconnect, or after a change of the server, to declare a worker
            dead.
    """

    keepalive: float
    inconclusive: bool = False
    inconclusive_until: float = 0.0
    run_id: str | None = None
    checked_at: float = 0.0
    missing: dict[str, float] = field(default_factory=dict[str, float])
    beats: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])

    def find_dead(self, look: WorkerHeartbeats, now: float, connected_at: float) -> list[tuple[str, bytes | None]]:
        """Return the workers that this check proves dead, each with its last known heartbeat (None: missing)."""
        if now - self.checked_at > MAX_CHECK_GAP:
            self.missing.clear()  # workers that were missing may have sent heartbeats since then
        self.checked_at = now
        if self.run_id is not None and look.run_id != self.run_id:
            self.inconclusive_until = now + self.keepalive
        self.run_id = look.run_id
        self.inconclusive_until = max(self.inconclusive_until, connected_at + self.keepalive)
        self.inconclusive = now < self.inconclusive_until
        dead: list[tuple[str, bytes | None]] = []
        for worker, beat in look.beats.items():
            if beat is None:
                since = self.missing.setdefault(worker, now)
                if not self.inconclusive and now - since >= MISSING_FOR:
                    dead.append((worker, None))
                continue
            self.missing.pop(worker, None)
            last = self.beats.get(worker)
            if last is None or last[0] != beat:
                self.beats[worker] = (beat, now)
            elif (
                beat.startswith(b"RUN") and not self.inconclusive and now - last[1] >= STALE_KEEPALIVES * self.keepalive
            ):
                dead.append((worker, beat))
        for kept in (self.missing, self.beats):
            for worker in kept.keys() - look.beats.keys():
                del kept[worker]
        return dead

    def next_check_in(self, now: float) -> float:
        """Return the seconds until the next check: the usual interval, or less when a worker is about to be proven dead."""
        due = [since + MISSING_FOR - now for since in self.missing.values()]
        return max(0.0, min([CHECK_EVERY, *(d for d in due if d > 0)]))

    def remember_lease(self, lease: str, since: float) -> None:
        """Take `lease`, a worker id and the number of its heartbeat, as a heartbeat of that worker seen at `since`."""
        worker, _, beat = lease.rpartition(" ")
        if worker:
            self.beats.setdefault(worker, (b"RUN " + as_bytes(beat), since))


class LeaseWatch:
    """The leader's lease, as the heartbeats of a peer have shown it.

    A lease that is not renewed expires within 2 s by the server's clock. If that clock is set back, the lease of a leader that
    died stays, and no other peer can lead. A peer that has seen it unchanged for longer takes it.

    Attributes:
        seen: the lease, since when it is unchanged, and how many heartbeats have shown it. It is one value, because the
            heartbeat's thread reads it while the loop changes it.
    """

    def __init__(self) -> None:
        self.seen: tuple[str, float, int] = ("", 0.0, 0)

    def observe(self, lease: str, now: float) -> None:
        """Store the lease from a heartbeat's reply; '' for none."""
        before, since, beats = self.seen
        self.seen = (lease, since, beats + 1) if lease == before else (lease, now, 1)

    def stale(self, now: float) -> str:
        """Return the lease if it no longer changes, else ''."""
        lease, since, beats = self.seen
        return lease if beats >= STALE_BEATS and now - since >= STALE_AFTER else ""
