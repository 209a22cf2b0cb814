"""Which fault explains that a worker lost a claim: the guarantees allow a second run then, and only then."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from math import inf
from typing import Final

from benchmarks.chaos.history import History, Run, Span
from benchmarks.chaos.workload import ASYNCIO, FLOW_ASYNCIO, FLOW_NESTED, FLOWS, HAND, NOT_KILLED, script_of
from worqr.peer.children import ROOM_WITHIN

FROZEN: Final = 1.5
"""Seconds without the CPU after which a worker may have missed its keepalive: 3 s less the beat's period and some latency."""
SETTLES_WITHIN: Final = 2.0
"""Seconds in which the end of a run reaches the server, when nothing is in its way."""
CONNECTS_WITHIN: Final = 2.0
"""Seconds of trouble that follow each trouble: connections are made again, and the backlog is sent."""
NOTICED_WITHIN: Final = 20.0
"""Seconds between a worker's recovery and its new worker id, which it gets when the server replies to it again."""
SLACK: Final = 0.1
"""Seconds between a line of the ledger and what it tells."""
DEAD_AFTER: Final = 1.0
"""Seconds without the CPU or the server that may make a worker miss its keepalive, with what the machine adds."""

REWINDS_AFTER: Final = 60.0
"""Seconds by which the server's clock must be set back for schedules to fire the same moments again."""

AWAY: Final = (
    "server frozen",
    "server down",
    "slow server",
    "clients paused",
    "failover",
    "latency",
    "half-open connections",
)
"""Troubles in which the server does not reply, or too late. A slot that moves and a lost connection are not among them."""
AGAIN_WITHIN: Final = 1.0
"""Seconds until a peer has noticed that the server replies again."""
TURN: Final = 0.1
"""Seconds of a turn of a busy loop."""
SAID_WITHIN: Final = 0.3
"""Seconds in which the end of a run may not have reached an absent server, before or after the trouble."""
FIRES_WITHIN: Final = 10.0
"""Seconds between the firing of a moment and its run."""


class Excuses:
    """Looks for faults in a history."""

    def __init__(self, history: History) -> None:
        self._history = history
        epoch = history.calm.get("epoch", 0.0)
        self._epoch = epoch - (history.offsets[-1] if history.offsets else 0.0)  # of a clock that is right
        self._frozen = _by_name(history.frozen)
        self._away = _by_name([*history.trouble, *history.frozen])
        spans = [
            Span(span.begin - SLACK, span.end + CONNECTS_WITHIN, span.who, span.why)
            for span in (*history.trouble, *history.failovers)
        ]
        self._trouble = _by_name([*spans, *history.frozen])
        self._unreachable = _by_name(
            [
                Span(span.begin - SLACK, span.end + AGAIN_WITHIN, *span[2:])
                for span in history.trouble
                if span.why in AWAY
            ]
        )
        for spans_of in self._trouble.values():
            spans_of.sort()
        self._begins = {who: [span.begin for span in spans] for who, spans in self._trouble.items()}
        self._longest = max((span.end - span.begin for spans in self._trouble.values() for span in spans), default=0.0)

    def lost_claim(self, run: Run, until: float) -> str | None:
        """Why `run` may have lost its claim, or its end, before another run of the same task began at `until`."""
        if run.answer == "ok" and not self.failed_over(run, until):
            return None
        return (
            self._killed(run, until)
            or self._was_frozen(run, until)
            or self._registered_again(run, until)
            or self._left(run, until)
            or self._left_in_outage(run, until)
            or self._left_before_it_knew(run, until)
            or self._ended_after_grace(run, until)
            or self._failed_as_it_was_cancelled(run, until)
            or self._left_as_it_sent_jobs(run, until)
            or ("failover" if self.failed_over(run, until) else None)
        )

    def failed_over(self, run: Run, until: float) -> bool:
        """A failover may have lost that the claim was taken, or that it ended."""
        end = until if run.ended is None else max(run.ended, run.began)
        return self.in_failover(run.began - 1, end + 1)

    def in_failover(self, begin: float, end: float) -> bool:
        return any(span.begin <= end and span.end >= begin for span in self._history.failovers)

    def jumped(self, begin: float, end: float) -> bool:
        """The server's clock was moved in between."""
        return any(begin <= t <= end for t in self._history.clock_jumps)

    def is_behind(self, t: float) -> bool:
        """The server's clock was set back, and has not reached again what it had shown. Claims are numbered without gaps then."""
        latest, offset = -inf, 0.0
        for at, to in zip(self._history.clock_jumps, self._history.offsets, strict=True):
            if at <= t:
                latest, offset = max(latest, at + offset), to
        return latest > t + offset

    def rewound(self, nominal: int, begin: float, end: float) -> str | None:
        """Why a schedule may have fired the same moment again: the server's clock was set back by more than a minute, to before
        that moment. Schedules go on by the new time then, as documented.
        """
        latest, offset = 0.0, 0.0
        for t, to in zip(self._history.clock_jumps, self._history.offsets, strict=True):
            latest, offset = max(latest, t + offset), to
            if latest - (t + to) <= REWINDS_AFTER:
                continue
            latest = t + to
            if begin - FIRES_WITHIN <= t <= end and (
                not self._history.calm or nominal / 1000 >= self._epoch + latest - SLACK
            ):
                return "clock set back by more than a minute"
        return None

    def latest_clock(self, begin: float, end: float) -> float:
        """The latest time that the server's clock showed between two moments, in seconds."""
        offset, latest = 0.0, 0.0
        for t, to in zip(self._history.clock_jumps, self._history.offsets, strict=True):
            if begin < t <= end:
                latest = max(latest, t + offset)
            if t <= end:
                offset = to
        return self._epoch + max(latest, end + offset)

    def trouble(self, who: str, begin: float, end: float) -> float:
        """Seconds between the two moments in which the process or the server did not work."""
        total = 0.0
        for name in (who, None):
            begins, spans = self._begins.get(name, []), self._trouble.get(name, [])
            first, last = bisect_left(begins, begin - self._longest), bisect_left(begins, end)
            total += sum(span.overlap(begin, end) for span in spans[first:last])
        return total

    def lost_worker(self, peer: str, t: float) -> str | None:
        """Why `peer` may have been declared dead before it registered again at `t`."""
        if self.jumped(t - NOTICED_WITHIN, t):
            return "clock jump"
        if self.in_failover(t - NOTICED_WITHIN, t):
            return "failover"
        away = sum(span.overlap(t - NOTICED_WITHIN, t) for name in (peer, None) for span in self._away.get(name, ()))
        return "frozen, or the server away" if away >= DEAD_AFTER else None

    def _unsettled(self, run: Run, at: float) -> bool:
        """The run's end may not have reached the server by then."""
        if run.ended is None or run.ended >= at:
            return True
        return at - run.ended <= SETTLES_WITHIN + self.trouble(run.peer, run.ended, at)

    def _killed(self, run: Run, until: float) -> str | None:
        at = self._history.killed.get(run.peer)
        if at is None or not (run.began <= at + SLACK and at <= until):
            return None
        return "killed" if self._unsettled(run, at) else None

    def _was_frozen(self, run: Run, until: float) -> str | None:
        for span in self._frozen.get(run.peer, ()):
            is_long, is_before = span.end - span.begin >= FROZEN, span.begin <= until
            # A reply that is in the socket while the process is frozen lets a run begin just after.
            if is_long and is_before and span.end >= run.began - SETTLES_WITHIN and self._unsettled(run, span.begin):
                return "frozen"
        return None

    def _registered_again(self, run: Run, until: float) -> str | None:
        for t in self._history.registered.get(run.peer, ())[1:]:
            swept_before = t - NOTICED_WITHIN <= until
            if run.began <= t + SLACK and swept_before and (run.ended is None or t - run.ended <= NOTICED_WITHIN):
                return "declared dead"
        return None

    def _left(self, run: Run, until: float) -> str | None:
        """Claims by hand go back at once when the peer leaves, documented so; the application may just be finishing them."""
        at = self._history.leaving.get(run.peer)
        if run.queue != HAND or at is None or run.answer == "ok":
            return None
        is_near = run.ended is None or run.ended >= at - SETTLES_WITHIN
        return "claim by hand of a peer that left" if at <= until + SLACK and is_near else None

    def _left_in_outage(self, run: Run, until: float) -> str | None:
        """A peer that leaves waits only a few seconds for an absent server; its unsent requests are lost with it."""
        at = self._history.left.get(run.peer)
        if at is None or run.ended is None or not run.ended <= at <= until:
            return None
        away = sum(span.overlap(run.ended, at) for name in (run.peer, None) for span in self._unreachable.get(name, ()))
        return "left while the server was away" if at - run.ended - away <= SLACK + SAID_WITHIN else None

    def never_ended(self, run: Run) -> str | None:
        """A thread ends with its process. A peer that leaves waits a few seconds for one that waits for an absent server."""
        at = self._history.left.get(run.peer)
        if at is None or run.queue not in NOT_KILLED:
            return None
        begin = self._history.leaving.get(run.peer, at)
        is_away = any(
            span.overlap(begin, at) > 0 for name in (run.peer, None) for span in self._unreachable.get(name, ())
        )
        return "left while the server was away" if is_away else None

    def _left_before_it_knew(self, run: Run, until: float) -> str | None:
        """Its worker was declared dead while the server was away for it, and its peer left, or was killed, without a new
        registration.
        """
        ends = {"left": self._history.left.get(run.peer), "killed": self._history.killed.get(run.peer)}
        how = next((how for how, at in ends.items() if at and until <= at <= until + NOTICED_WITHIN), None)
        if how is None:
            return None
        begin = run.began if run.ended is None else run.ended
        away = max(
            (span.overlap(begin, until) for who in (run.peer, None) for span in self._away.get(who, ())), default=0
        )
        return f"declared dead, and {how}" if away >= FROZEN and self._unsettled(run, until) else None

    def _ended_after_grace(self, run: Run, until: float) -> str | None:
        """Threads and processes that have not ended when their leaving peer's grace is over: their tasks are given back. The peer
        notices their end later than the ledger.
        """
        at = self._history.leaving.get(run.peer)
        if at is None or run.queue not in NOT_KILLED or run.answer == "ok":
            return None
        at += self._history.grace[run.peer]
        return "ended after its peer's grace" if at <= until and self._unsettled(run, at) else None

    def _failed_as_it_was_cancelled(self, run: Run, until: float) -> str | None:
        """A run that fails while its queue is being left is given back, because the cancellation may be why. An asyncio handler
        may have failed just before it was cancelled. On Trio, one that was ready then fails in the same turn.
        """
        if run.ended is None or run.how == "returned":
            return None
        before, after = (SAID_WITHIN, SAID_WITHIN) if run.queue in {ASYNCIO, FLOW_ASYNCIO} else (0.0, TURN)
        ended = run.ended
        near = any(-before <= ended - at <= after and at <= until for at in self._times_cancelled(run))
        return "failed as it was cancelled" if near else None

    def _times_cancelled(self, run: Run) -> list[float]:
        """When the runs of its queue were cancelled, because its peer left. A peer that gets no CPU then does it afterwards."""
        times = list(self._history.queues_left.get((run.peer, run.queue), ()))
        if run.peer in self._history.leaving:
            times.append(self._history.leaving[run.peer] + self._history.grace[run.peer])
        gaps = self._frozen.get(run.peer, ())
        return times + [gap.end for gap in gaps if any(gap.begin <= at <= gap.end for at in times)]

    def _left_as_it_sent_jobs(self, run: Run, until: float) -> str | None:
        """The run of a workflow ends when its jobs are sent, which is later than its function ends. It waits for room for them,
        also if the server is out of memory.
        """
        if run.queue not in {*FLOWS, FLOW_NESTED} or run.ended is None or not script_of(run.task).jobs:
            return None
        times = self._times_cancelled(run)
        near = any(
            run.ended - SLACK <= at <= until and self._unsettled(run, at - ROOM_WITHIN) for at in times
        )  # a busy loop notices the end of the grace later
        return "left as a workflow sent its jobs" if near else None


def _by_name(spans: list[Span]) -> dict[str | None, list[Span]]:
    found: dict[str | None, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.who].append(span)
    return found
