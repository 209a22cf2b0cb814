"""The lanes of `job_model`: which references wait in which lane, how many tasks each may start, and what a start took of them.

Whose turn it was is not computed. `Lanes` learns it from the reply of the server, and checks that each task was the first of a
lane that had room. `wrong` compares the keys of the lanes with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.ops.job_rules import NOW, Record, id_of, is_expired

LANES = ("g", "h", "i")
RATE_MS = 100_000_000
"""The period of a rate of a lane, and how long a pause lasts: longer than a test, and shorter than any other time in it."""
MAIN = ""
"""The queue's own list, among the lanes."""


@dataclass
class Seen:
    """What the server did in a start: the entries of its reply (payload, id, or None), and the lists after it, front first."""

    entries: list[bytes | str | None]
    lists: dict[str, list[bytes]]
    suspects: list[bytes]
    expired: dict[int, str]
    """Claims of tasks that have expired, with their ids, as far as something was stored of them."""


@dataclass
class Lanes:
    """The lanes of a queue. Lists have their front first."""

    queue: list[bytes] = field(default_factory=list[bytes])
    suspects: list[bytes] = field(default_factory=list[bytes])
    jobs: dict[str, Record] = field(default_factory=dict[str, Record])
    lanes: dict[str, list[bytes]] = field(default_factory=dict[str, "list[bytes]"])
    """No list is empty."""
    lane_trash: dict[str, list[bytes]] = field(default_factory=dict[str, "list[bytes]"])
    places: dict[str, str] = field(default_factory=dict[str, str])
    """The lanes of claims, and of suspects that wait with a place (a colon and the id)."""
    declared: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """What an operator has set: `limit:LANE` and `weight:LANE`."""
    lane_pauses: dict[str, bool] = field(default_factory=dict[str, bool])
    """Lanes that are paused, and whether the pause ends by itself."""
    lane_starts: Counter[str] = field(default_factory=Counter[str])
    """Starts that count against a rate."""
    overdue: set[str] = field(default_factory=set[str])
    """Lanes of which time alone has made room: the next start, or the leader, files them."""
    limit: int | None = None
    """How many claims the queue may have at once."""

    # Rules

    def weight_of(self, lane: str) -> int:
        return int(self.settings.get(f"weight:{lane}") or self.declared.get("weights", {}).get(lane, 1))

    @property
    def is_strict(self) -> bool:
        return bool(self.declared.get("strict"))

    def limits_of(self, lane: str) -> tuple[int | None, int | None]:
        """The concurrency, and the starts per RATE_MS."""
        declared = self.declared.get("limits", {}).get(lane, self.declared.get("limit", ""))
        concurrency, _, rate = self.settings.get(f"limit:{lane}", declared).partition(" ")
        most = int(concurrency) if concurrency.isdigit() else None
        return 1 if self.is_strict else most, int(rate.partition("/")[0]) if rate else None

    def running_in(self, lane: str) -> int:
        return sum(other == lane for other in self.places.values())

    def lane_room(self, lane: str) -> float:
        """How many tasks of the lane may start."""
        concurrency, rate = self.limits_of(lane)
        room = math.inf if concurrency is None else max(0, concurrency - self.running_in(lane))
        if rate is not None:
            room = min(room, max(0, rate - self.lane_starts[lane]))
        is_held = lane in self.lane_pauses or (self.is_strict and self._waits_for_retry(lane))
        return 0 if is_held else room

    def _waits_for_retry(self, lane: str) -> bool:
        """A strict lane waits for its first task."""
        return bool(self.jobs.get(self.first_job(lane) or "", {}).get("run_at", 0) > NOW)

    def first_job(self, lane: str) -> str | None:
        return next((id_of(item) for item in self.lanes.get(lane, []) if not self.is_stale(item, lane)), None)

    def opens_by_time(self, lane: str) -> bool:
        """The lane has tasks, and time alone lets it start one."""
        concurrency, _ = self.limits_of(lane)
        is_full = concurrency is not None and concurrency <= self.running_in(lane)
        if lane not in self.lanes or self.lane_room(lane):
            return False
        return self.lane_pauses.get(lane, not is_full)

    def time_opens(self, lane: str, clock: int) -> str | None:
        """A pause ends, starts leave their period, the time of a retry comes: returns the id of the job that is due then."""
        if self.lane_pauses.get(lane):
            del self.lane_pauses[lane]
        del self.lane_starts[lane]
        front = self.first_job(lane) if self.is_strict and self._waits_for_retry(lane) else None
        if front is not None:
            self.jobs[front]["run_at"] = clock
        if lane in self.lanes:
            self.overdue.add(lane)
        return front

    # Lists

    def line(self, source: str) -> list[bytes]:
        return self.queue if source == MAIN else self.lanes[source]

    def is_stale(self, item: bytes, source: str) -> bool:
        """True if the item only marks a position. `source`: None for the suspects."""
        job_id = id_of(item)
        if job_id is None:
            return False
        job = self.jobs.get(job_id, {})
        return job.get("state") != "waiting" or (job.get("lane") or MAIN) != source

    def is_stale_suspect(self, item: bytes) -> bool:
        job_id = id_of(item)
        lane = self.jobs.get(job_id or "", {}).get("lane")
        return self.is_stale(item, lane or MAIN) or (lane is not None and f":{job_id}" not in self.places)

    def push_to_lane(self, lane: str, item: bytes, *, front: bool) -> bool:
        """Returns whether a task of the lane may start."""
        line = self.lanes.setdefault(lane, [])
        if front or not line:
            self.overdue.discard(lane)  # it is filed
        line.insert(0 if front else len(line), item)
        return lane not in self.overdue and self.lane_room(lane) > 0

    def pop_from(self, source: str) -> bytes:
        item = self.line(source).pop(0)
        if source in self.lanes and not self.lanes[source]:
            del self.lanes[source]
        return item

    def open_lines(self) -> list[str]:
        """Where a start takes tasks: the queue's own list, and the lanes that have room."""
        return [*([MAIN] if self.queue else []), *(lane for lane in sorted(self.lanes) if self.lane_room(lane) > 0)]

    def startable_lines(self) -> set[str]:
        """The lists of which a task may start, whatever holds for the queue."""
        lines = [source for source in self.open_lines() if source not in self.overdue]
        return {source for source in lines if any(not self.is_stale(item, source) for item in self.line(source))}

    # A start

    def pick(self, seen: Seen | None, nth: int, claim: int, *, is_free: bool) -> tuple[str, bytes | None] | None:
        """Takes the task of the `nth` entry from its list; None if no more was taken from the lists that are open now.

        A suspect of a lane moves to the suspects, and is not an entry yet: then the item is None.
        """
        if seen is None or not self.lanes:
            while self.queue:
                if not self.is_stale(item := self.pop_from(MAIN), MAIN):
                    return MAIN, item
            return None
        while lines := self.open_lines():
            if nth < len(seen.entries):
                for source in lines:
                    if found := self._reach(source, seen, nth, claim, is_free=is_free):
                        return found
            for source in lines:
                self._skip(source, len(self.line(source)), is_free=is_free)
        return None

    def _reach(
        self, source: str, seen: Seen, nth: int, claim: int, *, is_free: bool
    ) -> tuple[str, bytes | None] | None:
        """The entry, if it is the first task of the list behind positions without a task and suspects that have to wait."""
        passed, room = 0, self.lane_room(source) if source != MAIN else math.inf
        for place, item in enumerate(self.line(source)):
            if self.is_stale(item, source):
                continue
            if self._is_suspect(item, source) and not is_free:
                passed += 1
                if passed >= room:
                    return None
                continue
            if not self._is_entry(item, seen, nth, claim):
                return None
            self._skip(source, place, is_free=is_free)
            if self._is_suspect(item, source):
                self._move_suspect(source)
                return source, None
            return source, self.pop_from(source)
        return None

    def _is_suspect(self, item: bytes, source: str) -> bool:
        return source != MAIN and "suspect" in self.jobs.get(id_of(item) or "", {})

    def _is_entry(self, item: bytes, seen: Seen, nth: int, claim: int) -> bool:
        entry, job_id = seen.entries[nth], id_of(item)
        if entry is not None or job_id is None:
            return entry == (item if job_id is None else job_id)
        if not is_expired(self.jobs[job_id]):
            return False
        return seen.expired.get(claim, job_id) == job_id

    def _skip(self, source: str, n: int, *, is_free: bool) -> None:
        """Takes `n` items away that a start does not return."""
        for _ in range(n):
            if source != MAIN and (source not in self.lanes or self.lane_room(source) <= 0):
                return
            item = self.line(source)[0]
            if self.is_stale(item, source):
                self.pop_from(source)
            else:
                assert self._is_suspect(item, source) and not is_free, f"{item!r} may start in {source!r}, and did not"
                self._move_suspect(source)

    def _move_suspect(self, lane: str) -> None:
        """A suspect waits among the suspects with its place."""
        item = self.pop_from(lane)
        self.suspects.append(item)
        self.places[f":{id_of(item)}"] = lane
        self.note_lane_start(lane)

    def note_lane_start(self, lane: str) -> None:
        self.lane_starts[lane] += self.limits_of(lane)[1] is not None

    def end_start(self, seen: Seen, *, is_free: bool) -> None:
        """A start that has enough leaves the rest; some positions without a task are gone."""
        before = len(self.suspects)
        for source in (MAIN, *sorted(self.lanes)):
            gone = len(self.line(source)) - len(seen.lists.get(source, []))
            assert gone >= 0, f"{source!r} has more than it had"
            self._skip(source, gone, is_free=is_free)
        assert len(self.suspects) == before or not is_free

    def order_suspects(self, seen: Seen) -> None:
        """Suspects of several lanes have moved by turns."""
        if Counter(self.suspects) == Counter(seen.suspects):
            self.suspects[:] = seen.suspects

    # Views

    def lane_keys(self) -> dict[str, Any]:
        """The keys of the lanes that are told exactly, as `told_of` returns those of the server."""
        return {
            "lists": {lane: line[::-1] for lane, line in self.lanes.items()},
            "trash": {lane: line[::-1] for lane, line in self.lane_trash.items()},
            "places": self.places,
            "running": dict(Counter(self.places.values())),
            "waiting": sum(len(line) for line in self.lanes.values()),
            "weights": sum(self.weight_of(lane) for lane in self.lanes if self.lane_room(lane) > 0),
        }


@dataclass
class Filed:
    """The keys of the lanes on the server."""

    told: dict[str, Any]
    ring: set[str]
    held: set[str]
    idle: set[str]
    opens: dict[str, int]
    names: set[str]
    state: dict[str, bytes]


def take_lane_keys(found: dict[str, Any]) -> Filed:
    """Takes the keys of the lanes out of all keys."""
    state, found[":lanes"] = found.get(":lanes", {}), {}
    epoch = int(state.get("epoch", 0))
    lists: dict[bool, dict[str, list[bytes]]] = {True: {}, False: {}}
    for name in [name for name in found if name.startswith(":lane:")]:
        number, lane = name.removeprefix(":lane:").split(":", 1)
        assert int(number) in {epoch, epoch - 1}, f"{name} is of no epoch near {epoch}"
        lists[int(number) == epoch][lane] = found.pop(name)
    ring, held, idle, opens, names, running, places, trash, _rules = (
        found.pop(name, {})
        for name in (
            *(":lanes:ring", ":lanes:held", ":lanes:idle", ":lanes:opens", ":lanes:names"),
            *(":lanes:running", ":lanes:claims", ":trash:lanes", ":lanes:rules"),
        )
    )
    del found[":lanes"]
    assert lists[False].keys() <= trash.keys(), "a list of a lane that was cleared is not named"
    told = {
        "lists": lists[True],
        "trash": {lane: lists[False].get(lane, []) for lane in trash},
        "places": {entry: lane.decode() for entry, lane in places.items()},
        "running": {lane: int(n) for lane, n in running.items()},
        "waiting": int(state.get("waiting", 0)),
        "weights": int(state.get("weights", 0)),
    }
    moments = {lane: int(ms) for lane, ms in opens.items()}
    return Filed(told, set(ring), set(held), set(idle), moments, set(names), state)


def wrong(filed: Filed, model: Lanes, now: int) -> Iterator[str]:
    """Every difference from the model, and every lane that is filed where it does not belong."""
    overdue = {lane for lane, ms in filed.opens.items() if ms <= now}
    expected = model.lane_keys()
    for name, value in filed.told.items():
        if value != expected[name] and not (name == "weights" and overdue):
            yield f"{name} of the lanes: {value}\n   expected {expected[name]}"
    if filed.ring & filed.held or (filed.ring | filed.held) & filed.idle or filed.ring | filed.held != filed.names:
        yield f"a lane is filed twice or nowhere: {filed}"
    if filed.names != model.lanes.keys():
        yield f"{filed.names} are named, {model.lanes.keys()} have tasks"
    for lane in model.lanes.keys() - overdue:
        if (lane in filed.ring) != (model.lane_room(lane) > 0):
            yield f"{model.lane_room(lane)} tasks of {lane!r} may start, {filed.ring} are in the ring"
        if model.opens_by_time(lane) and lane not in filed.opens:
            yield f"nobody looks when time opens {lane!r}"
    if not (filed.names or model.places or model.lane_trash) and (filed.state or filed.idle):
        yield f"nothing is left in lanes but {filed.state} and {filed.idle}"
