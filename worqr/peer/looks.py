"""What the leader concludes from what it sees: which workers are dead.

Pure: no I/O, and no clock but the times it is given, which are seconds of one monotonic clock. `leading` asks the server and
acts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worqr.ops import Look

LOOK_EVERY = 0.5
TWO_LOOKS = 1.25
STANDING_KEEPALIVES = 10
LAPSE = 5.0
"""Seconds without a look, while another peer led, after which an earlier look proves nothing any more."""


@dataclass
class Looks:
    """What the leader remembers from look to look.

    Attributes:
        keepalive: seconds after which a worker without a beat counts as dead.
        calm: True if the last look was too soon after a reconnect, or after a change of the server, to declare anybody dead.
    """

    keepalive: float
    calm: bool = False
    calm_until: float = 0.0
    run_id: str | None = None
    looked_at: float = 0.0
    missing: dict[str, float] = field(default_factory=dict[str, float])
    beats: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])

    def judge(self, look: Look, now: float, connected_at: float) -> list[tuple[str, bytes | None]]:
        """Return the workers that this look proves dead, each with the beat it was seen with (None: missing)."""
        if now - self.looked_at > LAPSE:
            self.missing.clear()  # a worker that was missing then may have beaten meanwhile
        self.looked_at = now
        if self.run_id is not None and look.run_id != self.run_id:
            self.calm_until = now + self.keepalive
        self.run_id = look.run_id
        self.calm_until = max(self.calm_until, connected_at + self.keepalive)
        self.calm = now < self.calm_until
        dead: list[tuple[str, bytes | None]] = []
        for worker, beat in look.beats.items():
            if beat is None:
                since = self.missing.setdefault(worker, now)
                if not self.calm and now - since >= TWO_LOOKS:
                    dead.append((worker, None))
                continue
            self.missing.pop(worker, None)
            last = self.beats.get(worker)
            if last is None or last[0] != beat:
                self.beats[worker] = (beat, now)
            elif beat.startswith(b"RUN") and not self.calm and now - last[1] >= STANDING_KEEPALIVES * self.keepalive:
                dead.append((worker, beat))
        for kept in (self.missing, self.beats):
            for worker in kept.keys() - look.beats.keys():
                del kept[worker]
        return dead

    def next_look(self, now: float) -> float:
        """Return the seconds until the next look: the usual rhythm, or less when a worker is about to be proven dead."""
        due = [since + TWO_LOOKS - now for since in self.missing.values()]
        return max(0.0, min([LOOK_EVERY, *(d for d in due if d > 0)]))
