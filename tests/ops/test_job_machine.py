"""All transactions of a queue in random sequences by several workers, against `job_model.Model`: after each step every key
under the prefix is what the model says, and every move of a job is one that `worqr.job_states` allows.

What is checked besides: nothing that was acknowledged is lost or there twice, an job_id runs once at a time, no worker sleeps
while there is a task that it could take, no limit is exceeded, and once all is drained nothing is left behind.

An example puts its jobs into no lanes, into some, or into few with low limits, so that lanes are full while workers wait. Whose
turn it is among lanes is learned from the server: `job_lanes` checks where a start may take a task, and test_lanes.py the shares.

A run is the same each time; `tests.support.machines` says what makes it another one, or a long one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)
from msgspec.structs import replace

from tests.ops.job_lanes import LANES, RATE_MS, Seen, take_lane_keys, wrong
from tests.ops.job_model import Model
from tests.ops.job_rules import DELAY, LEAVING, NOW, Place, Policy, id_of, reference, saved_of, size_of_saved
from tests.ops.job_world import EXPIRING, World, differences, wire
from tests.ops.schedules import fire_schedule
from tests.support.machines import run_machine
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.job_states import LIVE, State, moves
from worqr.keys import MARKER
from worqr.limits import DECLARES_NOTHING
from worqr.ops import MAX_ITEMS
from worqr.records import RemoteError
from worqr.stored_values import public_name, stored_word

FAR, FARTHER, PAST = 10**14, 2 * 10**14, 5_000
BOOM = RemoteError("Boom", "it broke", "line 1\nline 2")
ERROR = (BOOM.type, BOOM.message, BOOM.traceback)
WORKERS = ("A", "B", "C")
IDS = ("a", "b", "c")
PAYLOADS = (b"x", b"y", b"", MARKER + b"z")
ALL_POLICY = "max_failures max_stalls result_ttl timeout"

Action = Callable[["JobMachine", st.DataObject], None]

budgets = st.sampled_from([1, 10_000])
limits = st.sampled_from([1, 2, MAX_ITEMS])
payloads = st.sampled_from(PAYLOADS)
now_or_later = st.sampled_from([{}, {}, {"run_at": PAST}, {"delay": DELAY}, {"run_at": FAR}, {"run_at": FARTHER}])
mostly_now = st.sampled_from([{}, {}, {}, {"run_at": PAST}, {"delay": DELAY}])
fields = st.sampled_from(
    [
        {},
        {"max_failures": "2"},
        {"max_stalls": "2", "result_ttl": "90000000"},
        {"result_ttl": "0", "timeout": "1000"},
        {"result_ttl": "90000000", "max_failures": "1"},
    ]
)
updates = st.sampled_from(
    [
        *({}, {}, {"data": False}, {"when": "keep"}, {"when": "later"}, {"when": "earlier"}),
        *({"data": False, "when": "later"}, {"data": False, "when": "keep", "policy": ALL_POLICY}),
        *({"counts": False, "policy": "max_failures"}, {"data": False, "counts": True, "when": "earlier"}),
    ]
)
extras = st.sampled_from(
    [
        *({}, {}, {}, {"exists": "skip"}, {"exists": "raise"}, {"expires": "1"}, {"expires": "1"}),
        *({"exists": "cancel"}, {"exists": "cancel", "front": True}, {"at_most": DELAY}, {"at_most": 0}),
        *({"expires_at": str(PAST)}, {"expires_at": str(FAR)}, {"max_length": 3}, {"front": True}),
        *({"unique_for": 100_000_000}, {"unique_for": 100_000_000, "exists": "skip"}),
        *({"meta": '{"m":"1"}'}, {"meta": '{"m":"2"}', "unique_for": 100_000_000}),
    ]
)
lanes = st.sampled_from(
    [*({}, {}, {"lane": "g"}, {"lane": "g"}, {"lane": "h"}, {"lane": "i"}), {"lane": "h", "max_lane_length": 2}]
)
few_lanes = st.sampled_from([*[{"lane": "g"}] * 3, {"lane": "h"}])
lane_names = st.sampled_from(["g", *LANES])
NO_RULES: tuple[dict[str, Any] | None, ...] = (None, None, {})
SOME_RULES: tuple[dict[str, Any], ...] = (
    *({"limit": "1"}, {"limit": "2", "weights": {"g": 3}}, {"limits": {"h": "1", "i": "1"}}),
    *({"limit": f"- 2/{RATE_MS}"}, {"strict": True}),
)
lane_settings = st.sampled_from(
    [
        *(("limit", "1"), ("limit", "2"), ("limit", f"- 2/{RATE_MS}"), ("limit", f"2 3/{RATE_MS}"), ("limit", "*")),
        *(("weight", "3"), ("weight", "*"), ("pause", "why"), ("pause for a time", "why"), ("resume", "")),
    ]
)
MODES: dict[str, tuple[st.SearchStrategy[dict[str, Any]], st.SearchStrategy[dict[str, Any] | None]]] = {
    "no lanes": (st.just({}), st.none()),
    "lanes": (lanes, st.sampled_from([*NO_RULES, *SOME_RULES])),
    "few lanes": (few_lanes, st.sampled_from([{"limit": "3"}, {"limit": "3"}, *SOME_RULES])),
}
"""In which lanes an example puts its jobs, and what workers declare. With few, it is more often a lane that keeps tasks from
starting, while workers wait."""
ids = st.sampled_from([{}, *({"id": job_id} for job_id in IDS)])


def _option(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    if "id" not in found:
        found.pop("unique_for", None)  # which needs one
    return found


def jobs_of(job_id: str | None, when: st.SearchStrategy[dict[str, Any]], mode: str) -> st.SearchStrategy[Any]:
    """A dispatch: its options, as they travel, and its payload."""
    named = ids if job_id is None else st.just({"id": job_id})
    given = fields.map(lambda kept: {"fields": kept} if kept else {})
    return st.tuples(st.builds(_option, named, when, updates, extras, given, MODES[mode][0]), payloads)


policies = st.builds(
    Policy,
    max_stalls=st.sampled_from([2, 2, 2, 3, 1]),
    keep_failed=st.sampled_from([3, 1, 0]),
    on_failure=st.booleans(),
    keeps_results=st.booleans(),
)


OPENING = {
    "promote_due",
    "set_limits",
    "start_work",
    "set_lane",
    "cancel_lane",
    "cancel_job",
    "dispatch_jobs",
    "purge_queue",
}
"""Scripts that may let lanes or a queue start, and wake a worker for each lane and for each task."""
DEAD_LETTERS: tuple[ops.DeadLetterList, ...] = ("failed", "undecodable")
ENDS = ("finished", "stopped", "retried", "stalled", "failed", "broken", "cancelled", "dropped")


def claims_ended(counts: dict[str, bytes]) -> int:
    """By how much the ends exceed the claims: by those that were cancelled without one, less those that still run."""
    return sum(int(counts.get(name, 0)) for name in ENDS) - int(counts.get("claimed", 0))


def _runs_a_suspect(model: Model, worker: str) -> bool:
    """True if the worker may take no suspect now."""
    place = model.fence.get(worker)
    return isinstance(place, Place) and place.suspect in model.held.get(worker, set())


ACTIONS: dict[str, tuple[int, Callable[[JobMachine], bool]]] = {}
"""What may be done: how often, and when."""


def action(weight: int, when: Callable[[JobMachine], bool] = lambda _: True) -> Callable[[Action], Action]:
    def add(method: Action) -> Action:
        ACTIONS[method.__name__] = weight, when
        return method

    return add


def is_short(machine: JobMachine) -> bool:
    return machine.model.count_queued() < 8


def is_wide(machine: JobMachine) -> bool:
    return is_short(machine) and machine.mode != "few lanes"


def holds(machine: JobMachine) -> bool:
    return bool(machine.holding())


class JobMachine(RuleBasedStateMachine):
    """`world` is the server, `model` what should be there."""

    server: ClassVar[Server]
    world_type: ClassVar[type[World]] = World
    allowed: ClassVar[frozenset[tuple[str, State, State]]] = frozenset(moves())

    def __init__(self) -> None:
        super().__init__()
        self.world = self.world_type(self.server.client(), f"m{secrets.token_hex(4)}")
        self.q = self.world.q
        self.model = Model()
        self.clock = 10_000
        self.sent: dict[str, int] = dict.fromkeys(WORKERS, 0)
        self.handles: list[tuple[str, int]] = []
        self.seen: set[tuple[str, State, State]] = set()
        self.sound = False
        self.limited = False
        self.mode = "no lanes"
        self.looked: dict[str, Any] = {}
        """All keys, if they were read since the last transaction."""
        self.opens: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.startable: set[str] = set()
        self.told: set[str] = set()
        """Workers that have heard that the queue was resumed, and have not asked since."""

    def teardown(self) -> None:
        try:
            if self.sound:
                self._drain()
        finally:
            self.world.close()
            self.world.client.close()

    # Comparing

    def check(self) -> None:
        """Everything, after each step."""
        found, self.looked = self.looked or self.world.everything(), {}
        self._check_lanes(found)
        self._check_wakeups({each.decode() for each in found.get(":hungry", set())})
        limited = {claim.decode() for claim in found.pop(":limited", set())}
        running = {claim for name, held in found.items() if name.startswith(":claims:") for claim in held}
        assert {int(claim) for claim in limited} == ({int(claim) for claim in running} if self.limited else set())
        found = {name: value for name, value in found.items() if name != ":limits" and not name.startswith(":starts:")}
        expected = {name: wire(value) for name, value in self.model.keys().items()}
        assert found == expected, differences(found, expected)
        self._check_told()
        for move in self.model.moved:
            assert move in self.allowed, f"job_states.py does not allow {move}"
        self.seen |= set(self.model.moved)
        self._check_places(found)
        self.clock += 1
        self.model.settle_times(self.clock, 5 * DELAY + self.clock)
        self.world.settle_times(self.clock, 5 * DELAY + self.clock)
        self.model.begin("")

    def _check_wakeups(self, hungry: set[str]) -> None:
        """As many are woken as there is new work for, by chance; nobody is left asleep beside a task that he could take. Where a
        limit, a pause or a lane has kept all tasks from starting, and does not any more, one is woken, who wakes others.
        """
        model, room = self.model, self.model.room()
        assert hungry <= model.hungry, "a worker is hungry that did not say so"
        woken = len(model.hungry - hungry)
        opened = len(model.open_lines()) + len(model.queue) if model.script in OPENING else 0
        most = max(1, model.pushed + opened, model.released) + bool(model.suspects)  # whose worker may be free now
        assert woken <= most, "more are woken than there is work for"
        before, self.startable = self.startable, model.startable()
        able = [w for w in model.hungry if model.queue or self.startable or not _runs_a_suspect(model, w)]
        if model.script == "resume":
            self.told = set(model.hungry)
        elif self.startable - before:
            assert woken or not able, f"nobody is woken, and tasks of {self.startable - before} may start"
        if model.script not in {"start_tasks", "promote_due"} or model.pushed == 0:
            assert woken >= min(model.pushed, len(able), room), "fewer are woken than there is work for"
        model.hungry = hungry
        serving = set(self.serving())
        if serving and serving <= hungry - self.told and room > 0:
            assert not self.startable, "all sleep while a task waits"
            free = [worker for worker in serving if not _runs_a_suspect(model, worker)]
            assert not free or not model.suspect_waits(), "all sleep beside a suspect"

    def _check_lanes(self, found: dict[str, Any]) -> None:
        filed = take_lane_keys(found)
        assert not (differing := list(wrong(filed, self.model, self.world.now))), "\n".join(differing)
        running: dict[str, int] = filed.told["running"]
        for lane, n in running.items() if self.model.script == "start_tasks" else ():
            most, _ = self.model.limits_of(lane)
            assert most is None or n <= max(most, self.running.get(lane, 0)), f"{n} of {lane!r} run, {most} may"
        self.running, self.opens = running, filed.opens
        self.model.overdue &= filed.held

    def _check_told(self) -> None:
        heard = self.world.heard()
        assert [int(claim) for claim in heard["cancelled"]] == self.model.acknowledged
        expected = [when - NOW if when == NOW + DELAY else when - self.world.now for when in self.model.hints]
        told = [message.split() for message in heard["due"]]
        assert all(base == self.q.base.encode() for _, base in told)
        moments = [int(ms) for ms, _ in told if not 0 <= int(ms) <= 2 * RATE_MS]  # those of lanes are near
        if self.model.is_strict:  # and its lanes open when retries are due
            assert all(any(abs(ms - other) <= 60_000 for other in moments) for ms in expected)
        else:
            assert moments == pytest.approx(expected, abs=60_000, rel=0)

    def _check_places(self, found: dict[str, Any]) -> None:
        """Of the server alone: each task is in exactly one place, and an job_id runs at most once."""
        held = [claim for name, claims in found.items() if name.startswith(":claims:") for claim in claims]
        items = {name.removeprefix(":claim:").encode(): item for name, item in found.items() if ":claim:" in name}
        assert len(held) == len(set(held))
        assert set(held) == items.keys()
        running = [job_id for [item] in items.values() if (job_id := id_of(item)) is not None]
        assert len(running) == len(set(running))
        assert {f":active:{job_id}" for job_id in running} == {name for name in found if name.startswith(":active:")}
        assert {job_id.decode() for job_id in found.get(":blocked", set())} <= set(running)
        assert claims_ended(found[":counts"]) == self.model.unclaimed - len(held), "each claim ends in one counter"
        cleared = int(found[":counts"].get("cleared", 0))
        live = {
            n.removeprefix(":job:"): j for n, j in found.items() if n.startswith(":job:") and int(j["queued"]) > cleared
        }
        places: dict[str | None, list[bytes]] = {None: found.get("", []), **self.model.lanes}  # which are compared
        suspects: list[bytes] = found.get(":suspects", [])
        line = [item for each in (*places.values(), suspects) for item in each]
        for job_id, job in live.items():
            state = job["state"].decode()
            assert (job_id in found.get(":due", {})) == (state == "due"), f"{job_id} is {state}"
            assert (job_id.encode() in found.get(":blocked", set())) == (state == "blocked"), f"{job_id} is {state}"
            assert state in LIVE
            mine = (*places.get(job["lane"].decode() if "lane" in job else None, []), *suspects)
            assert state != "waiting" or reference(job_id) in mine, f"{job_id} waits nowhere"
        for name, job in found.items():
            if name.startswith((":job:", ":active:", ":aside:")):
                assert int(job.get("saved_size", 0)) == size_of_saved(job), f"{name} counts other bytes than it keeps"
                assert ("saved_size" in job) == bool(saved_of(job)), f"{name} keeps what it does not count"
        raw = sum(id_of(item) is None for item in line)
        assert raw + len(live) + len(held) == self.model.born - self.model.ended, "a task is lost, or there twice"

    def do(self, call: Command[Any], data: st.DataObject | None = None) -> Any:
        """What `call` answers; with `data` perhaps twice, to a copy of the same request."""
        return call.read(self._send(call, data))

    def raw(self, call: Command[Any], expected: list[Any], data: st.DataObject | None = None) -> None:
        assert wire(self._send(call, data)) == wire(expected)
        self.check()

    def _send(self, call: Command[Any], data: st.DataObject | None) -> list[Any]:
        reply = self.world.send(call)
        if data is not None and data.draw(st.booleans()):
            assert self.world.send(call, again=True) == reply
        return reply

    # What there is

    @property
    def laned(self) -> bool:
        return self.mode != "no lanes"

    def serving(self) -> list[str]:
        return [worker for worker, place in self.model.fence.items() if isinstance(place, Place)]

    def holding(self) -> list[str]:
        return [worker for worker, held in self.model.held.items() if held]

    def running_ids(self) -> list[str]:
        return sorted(set(IDS) & self.model.active.keys())

    def placed(self) -> list[str]:
        """Suspects of lanes that wait with their place."""
        return [entry[1:] for entry in sorted(self.model.places) if entry.startswith(":")]

    def known(self) -> list[str]:
        """Ids that were dispatched before."""
        return sorted({job_id for job_id, _ in self.handles if job_id in IDS})

    def has_work(self) -> bool:
        return bool(self.model.queue or self.model.suspects or self.model.due or self.model.lanes)

    def opening(self) -> list[str]:
        """Lanes that time alone lets start."""
        return [lane for lane in sorted(self.opens) if self.model.opens_by_time(lane)]

    def expiring(self) -> list[tuple[str, str]]:
        model = self.model
        there = {"result": model.results, "older_result": model.older_results, "taken": model.taken}
        return [(kind, job_id) for kind, kept in there.items() for job_id in sorted(kept)]

    # Put in

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.mode = data.draw(st.sampled_from(["no lanes", "lanes", "few lanes", "few lanes"]))
        for worker in WORKERS[:2]:
            self.join(worker, data.draw(policies), data.draw(MODES[self.mode][1]))
        self.sound = True

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One action, those that make for a history more often than those that end it."""
        able = [name for name, (weight, when) in ACTIONS.items() for _ in range(weight) if when(self)]
        self.sound = False
        getattr(self, data.draw(st.sampled_from(able), "action"))(data)
        self.sound = True

    @action(3, is_wide)
    def enqueue(self, data: st.DataObject) -> None:
        tasks = data.draw(st.lists(payloads, min_size=1, max_size=3))
        front, bound = data.draw(st.booleans()), data.draw(st.sampled_from([None, None, 4]))
        expected = self.model.enqueue(tasks, front=front, max_length=bound)
        self.raw(ops.enqueue(self.q, tasks, front=front, max_length=bound), expected, data)

    @action(4, is_short)
    def dispatch(self, data: st.DataObject) -> None:
        jobs = jobs_of(None, mostly_now, self.mode)
        self.put(data.draw(st.lists(jobs, min_size=1, max_size=3)), data, whole=data.draw(st.booleans()))

    @action(4, lambda machine: bool(machine.known()))
    def dispatch_known(self, data: st.DataObject) -> None:
        """A dispatch of an id that is there, runs or has ended."""
        job_id = data.draw(st.sampled_from(self.known()))
        self.put([data.draw(jobs_of(job_id, now_or_later, self.mode))], data)

    @action(6, lambda machine: bool(machine.running_ids()))
    def dispatch_twin(self, data: st.DataObject) -> None:
        """A dispatch of an id that runs."""
        job_id = data.draw(st.sampled_from(self.running_ids()))
        self.put([data.draw(jobs_of(job_id, now_or_later, self.mode))], data)

    def put(
        self, some: list[tuple[dict[str, Any], bytes]], data: st.DataObject | None = None, *, whole: bool = False
    ) -> None:
        word, *expected = self.model.dispatch_jobs(some, whole=whole)
        answers = self.do(ops.dispatch_jobs(self.q, some, all_or_none=whole), data)
        assert [[each.outcome, each.id, each.number] for each in answers] == expected
        if word == "ok":
            self.handles += [(each.id, each.number) for each in answers if each.number]
        self.check()

    @action(2, is_wide)
    def fire(self, data: st.DataObject) -> None:
        fired = max((int(fired.split()[0]) for fired in self.model.fired.values()), default=1)
        nominal, run_at = fired + data.draw(st.integers(-1, 2)), data.draw(st.sampled_from([PAST, PAST, FAR]))
        overlap = data.draw(st.sampled_from(["skip", "queue", "cancel"]))
        [word] = self.model.fire_schedule("s", nominal, run_at, overlap, b"fired")
        call = fire_schedule(self.q, "s", nominal, judged_at=nominal, run_at=run_at, overlap=overlap, task=b"fired")
        assert self.do(call) == word
        self.check()

    # Time

    @action(4, lambda machine: bool(machine.model.due))
    def promote(self, data: st.DataObject) -> None:
        """The time of a due job comes, and perhaps the leader sees to it."""
        self.let_come(data.draw(st.sampled_from(sorted(self.model.due))))
        if data.draw(st.booleans()):
            self.see_to(data.draw(limits))

    def see_to(self, limit: int) -> None:
        """The leader does what is due."""
        _, pushed, next_in = self.model.promote_due(limit)
        found, following, _ = self.do(ops.promote_due(self.q, limit))
        if self.opens:
            following = following if next_in == 0 else None if next_in < 0 else 1
        assert (found, following is None, following == 0) == (pushed, next_in == -1, next_in == 0)
        self.check()

    @action(2, lambda machine: bool(machine.opening()))
    def open_lane(self, data: st.DataObject) -> None:
        """The time of a lane comes, and perhaps the leader sees to it."""
        self.let_open(data.draw(st.sampled_from(self.opening())))
        if data.draw(st.booleans()):
            self.see_to(MAX_ITEMS)

    def let_open(self, lane: str) -> None:
        self.model.begin("")
        due = self.model.time_opens(lane, self.clock)
        self.world.time_opens(lane, RATE_MS)
        if due is not None:
            self.world.client.hset(self.q.job(due), "run_at", self.clock)
        self.check()

    @action(2, lambda machine: bool(machine.model.due))
    def run_now(self, data: st.DataObject) -> None:
        """An operator does not wait for the time of some jobs."""
        some = data.draw(st.lists(st.sampled_from([*sorted(self.model.due), *IDS]), min_size=1, max_size=3))
        self.raw(ops.promote_jobs(self.q, some), self.model.promote_jobs(some), data)

    def let_come(self, job_id: str) -> None:
        self.model.time_passes(job_id, self.clock)
        self.world.time_passes(job_id, self.clock)
        self.check()

    @action(1, lambda machine: bool(machine.expiring()))
    def expire(self, data: st.DataObject) -> None:
        """A key whose time has come is gone."""
        kind, job_id = data.draw(st.sampled_from(self.expiring()))
        self.model.expire(kind, job_id)
        self.world.expire(kind, job_id)
        self.check()

    # Workers

    @action(3, lambda machine: len(machine.model.fence) < len(WORKERS))
    def enter(self, data: st.DataObject) -> None:
        """A worker comes, or one that is there changes its handler. One that leaves comes back when it has left."""
        able = [worker for worker in WORKERS if self.model.fence.get(worker) != LEAVING]
        declared = data.draw(MODES[self.mode][1])
        self.join(data.draw(st.sampled_from(able)), data.draw(policies), declared)

    def join(self, worker: str, policy: Policy, declared: dict[str, Any] | None = None) -> None:
        changes = declared is not None and declared != self.model.declared
        self.model.start_work(worker, policy, self.sent[worker], declared)
        packed = msgspec.msgpack.encode(declared) if declared else b""
        call = ops.start_work(
            *(self.q, worker),
            max_stalls=policy.max_stalls,
            keep_failed=policy.keep_failed,
            on_failure=policy.on_failure,
            result_ttl_ms=policy.ttl or None,
            last=self.sent[worker],
            lanes=DECLARES_NOTHING if declared is None else packed,
        )
        assert self.do(call) == ("lanes" if changes else "")
        self.check()

    @action(1)
    def limit(self, data: st.DataObject) -> None:
        """What counts against a limit must be what runs."""
        self.set_limits(data.draw(st.sampled_from(["1000000 1000000/60000", "", "*", "1", "2 1000000/60000"])))

    def set_limits(self, text: str) -> None:
        self.model.begin("set_limits")
        self.do(ops.set_limits(self.q, text))
        self.limited = text[:1].isdigit()
        self.model.limit = int(text.split(" ")[0]) if self.limited else None
        self.check()

    @action(3, lambda machine: machine.laned)
    def set_lane(self, data: st.DataObject) -> None:
        """An operator sets how a lane starts its tasks."""
        lane, (setting, value) = data.draw(lane_names), data.draw(lane_settings)
        self.set_rule(lane, setting, value, data)

    def set_rule(self, lane: str, setting: str, value: str, data: st.DataObject | None = None) -> None:
        name, ends = setting.split(" ")[0], " " in setting
        call = ops.set_lane(self.q, lane, cast("Any", name), value, RATE_MS if ends else None)
        self.raw(call, self.model.set_lane(lane, name, value, ends=ends), data)

    @action(2, lambda machine: bool(machine.model.lanes or machine.model.places))
    def cancel_lane(self, data: st.DataObject) -> None:
        """A lane is cancelled as a whole, in steps."""
        self.cancel_all_of(data.draw(lane_names), data.draw(budgets))

    def cancel_all_of(self, lane: str, budget: int) -> None:
        expected = self.model.cancel_lane(lane, "lane")
        waiting, claims, after, more = 0, list[int](), ops.FIRST_CANCEL_STEP, True
        while more:
            found = self.do(ops.cancel_lane(self.q, lane, after, reason="lane", budget=budget))
            waiting, claims = waiting + found.waiting, claims + found.claims
            after, more = found.after, found.more
        assert (waiting, set(claims)) == expected
        self.check()

    @action(2, lambda machine: bool(machine.claims_of_lanes()))
    def rate_limit(self, data: st.DataObject) -> None:
        """A run says that its lane has to wait."""
        worker, claim = data.draw(st.sampled_from(self.claims_of_lanes()))
        call = ops.retry_task(self.q, worker, claim, BOOM, counter="", limit=9, pause_ms=RATE_MS)
        assert self.do(call) == self.model.rate_limited(worker, claim, ERROR)
        self.check()

    def claims_of_lanes(self) -> list[tuple[str, int]]:
        held = self.model.held.items()
        return [
            (worker, claim) for worker, claims in held for claim in sorted(claims) if str(claim) in self.model.places
        ]

    @action(12, lambda machine: bool(machine.serving()) and machine.has_work())
    def start(self, data: st.DataObject) -> None:
        worker, wanted = (
            data.draw(st.sampled_from(self.serving())),
            data.draw(st.sampled_from([4, 4, 1, 2, 0] if self.mode == "few lanes" else [4, 1, 2, 0])),
        )
        self.claim(worker, wanted)
        if data.draw(st.booleans()):
            self.claim(worker, wanted, again=True)

    def claim(self, worker: str, wanted: int, *, again: bool = False) -> None:
        self.sent[worker] += not again
        self.told.discard(worker)
        found = self.do(ops.start_tasks(self.q, worker, self.sent[worker], wanted))
        seen = self.look_at_start(found.entries) if self.laned and not again else None
        word, *expected = self.model.start_tasks(worker, self.sent[worker], wanted, seen)
        assert (found.status, [found.first] if expected else []) == (word, expected[:1])
        assert [self.world.entry(each) for each in found.entries] == [wire(each) for each in expected[1:]]
        self.check()

    def look_at_start(self, entries: Sequence[Any]) -> Seen:
        """What the server did, from which the model learns whose turn it was."""
        self.looked = self.world.everything()
        found = dict(self.looked)
        lists, suspects = take_lane_keys(found).told["lists"], found.get(":suspects", [])
        expired = {
            int(name.removeprefix(":aside:")): job["id"].decode() for name, job in found.items() if ":aside:" in name
        }
        for name, job in found.items():
            if name.startswith("-fail:job:@f"):
                expired[int(name.removeprefix("-fail:job:@f"))] = job["failed"]["id"].decode()
        kept = [self.world.entry(entry) for entry in entries]
        names = [entry["id"].decode() if isinstance(entry, dict) else entry for entry in kept]
        everywhere = {"": found.get("", []), **lists}
        return Seen(names, {source: line[::-1] for source, line in everywhere.items()}, suspects[::-1], expired)

    @action(1)
    def start_late(self, data: st.DataObject) -> None:
        """A copy of an old start request, or one of a worker that is not there, or one on an empty queue."""
        worker = data.draw(st.sampled_from(WORKERS))
        number = max(0, self.sent[worker] + 1 - data.draw(st.integers(0, 3)))
        self.sent[worker] = max(self.sent[worker], number)
        self.told.discard(worker)
        found = self.do(ops.start_tasks(self.q, worker, number, 4))
        seen = self.look_at_start(found.entries) if self.laned else None
        word, *expected = self.model.start_tasks(worker, number, 4, seen)
        assert (found.status, len(found.entries)) == (word, len(expected[1:]))
        self.check()

    def _pick(self, data: st.DataObject) -> tuple[str, list[int]]:
        """A worker that holds claims, and some of them."""
        worker = data.draw(st.sampled_from(self.holding()))
        held = sorted(self.model.held[worker])
        return worker, data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=4, unique=True))

    @action(2, holds)
    def finish(self, data: st.DataObject) -> None:
        worker, claims = self._pick(data)
        results = {claim: ("bytes", b"%d" % claim) for claim in claims[: data.draw(st.sampled_from([4, 1, 0]))]}
        for each in (worker, *data.draw(st.sampled_from([(), (worker, WORKERS[0])]))):
            expected = self.model.finish_tasks(each, claims, results)
            assert self.do(ops.finish_tasks(self.q, each, claims, results)) == expected
            self.check()

    @action(2, holds)
    def stop(self, data: st.DataObject) -> None:
        worker, claims = self._pick(data)
        for _ in range(1 + data.draw(st.booleans())):
            expected = self.model.stop_tasks(worker, claims)
            assert self.do(ops.stop_tasks(self.q, worker, claims)) == expected
            self.check()

    @action(2, lambda machine: machine.laned and holds(machine))
    def file(self, data: st.DataObject) -> None:
        """What a worker does that claims tasks of a program without worqr, and claims that it should not file."""
        worker, claims = self._pick(data)
        filed = {claim: data.draw(lane_names) for claim in claims}
        for _ in range(1 + data.draw(st.booleans())):
            expected = self.model.file_tasks(worker, filed)
            assert self.do(ops.file_tasks(self.q, worker, filed)) == expected
            self.check()

    @action(3, holds)
    def retry(self, data: st.DataObject) -> None:
        worker, [claim, *_] = self._pick(data)
        counter: Any = data.draw(st.sampled_from(["failures", "timeouts", "stalls", ""]))
        limit = data.draw(st.sampled_from([9, 9, 1, 2]))
        delay, run_at = data.draw(st.sampled_from([(DELAY, None), (0, None), (0, FAR), (0, PAST)]))
        call = ops.retry_task(
            *(self.q, worker, claim, BOOM), counter=counter, limit=limit, delay_ms=delay, run_at_ms=run_at
        )
        for _ in range(1 + data.draw(st.booleans())):
            assert self.model.retry_task(worker, claim, ERROR, counter, limit, delay, run_at) == self.do(call)
            self.check()

    @action(3, holds)
    def fail(self, data: st.DataObject) -> None:
        worker, [claim, *_] = self._pick(data)
        undecodable = data.draw(st.booleans())
        for _ in range(1 + data.draw(st.booleans())):
            expected = self.model.fail_task(worker, claim, ERROR, "broken" if undecodable else "failed")
            assert self.do(ops.fail_task(self.q, worker, claim, BOOM, undecodable=undecodable)) == expected
            self.check()

    @action(1, holds)
    def say(self, data: st.DataObject) -> None:
        worker, claims = self._pick(data)
        done, message = data.draw(st.sampled_from([(None, "half"), (0.5, "")]))
        said = [(claim, done, message) for claim in (*claims, 7)]
        self.raw(ops.note_progress(self.q, worker, said), self.model.note_progress(worker, said))

    @action(2, holds)
    def save(self, data: st.DataObject) -> None:
        """A run saves bytes or takes a step; it may come twice, late, or from a worker that has lost the claim."""
        worker, [claim, *_] = self._pick(data)
        step = data.draw(st.sampled_from(["", "", "charge"]))
        number = 0 if step else data.draw(st.integers(1, 3))
        value = data.draw(st.sampled_from([b"", b"page 7"] if not step else [b"none ", b"json " + b"1" * 2000]))
        for each in (worker, *data.draw(st.sampled_from([(), (worker, WORKERS[0])]))):
            expected = self.model.save_state(each, claim, number, step, value)
            assert self.do(ops.save_state(self.q, each, claim, number, step, value)) == expected
            self.check()

    @action(3, lambda machine: holds(machine) or (machine.has_work() and len(machine.model.fence) > 1))
    def leave(self, data: st.DataObject) -> None:
        worker, limit = data.draw(st.sampled_from(sorted(self.model.fence))), data.draw(limits)
        self.raw(ops.stop_work(self.q, worker, limit), self.model.stop_work(worker, limit), data)

    @action(4, holds)
    def sweep(self, data: st.DataObject) -> None:
        worker, limit = data.draw(st.sampled_from(self.holding())), data.draw(limits)
        self.sweep_worker(worker, limit)
        if self.mode == "few lanes" and data.draw(st.booleans()) and self.model.fence.get(worker) is None:
            self.join(worker, data.draw(policies))  # and takes the suspects that it has made, soon
            self.claim(worker, 4)

    def sweep_worker(self, worker: str, limit: int) -> None:
        self.raw(ops.fail_worker(self.q, worker, limit), self.model.fail_worker(worker, limit))

    # Operators

    @action(3, lambda machine: bool(machine.model.present()))
    def cancel(self, data: st.DataObject) -> None:
        if data.draw(st.sampled_from([True, True, False])):
            there = sorted({*self.model.jobs, *self.model.active})
            job_id = data.draw(st.sampled_from([*IDS, *there, *self.running_ids() * 3, *self.placed() * 6]))
            self.raw(ops.cancel_job(self.q, job_id, "id"), self.model.cancel_job(job_id, "id"), data)
        else:
            self.cancel_payload(data.draw(payloads), data.draw(budgets))

    @action(2, holds)
    def cancel_runs(self, data: st.DataObject) -> None:
        """Runs are cancelled by their claims, of which one has ended."""
        _, claims = self._pick(data)
        some = [*claims, 7]
        self.raw(ops.cancel_claims(self.q, some, reason="claim"), self.model.cancel_claims(some, "claim"), data)

    def cancel_payload(self, task: bytes, budget: int) -> None:
        expected = self.model.cancel_task(task, "payload")
        waiting, claims, cursor, after, more = 0, list[int](), "0", "-", True
        while more:
            call = ops.cancel_task(self.q, task, cursor, after, reason="payload")
            found = self.do(replace(call, args=(*call.args[:3], budget, *call.args[4:])))
            waiting, claims = waiting + found.waiting, claims + found.claims
            cursor, after, more = found.cursor, found.after, found.more
        assert (waiting, set(claims)) == expected
        self.check()

    @action(2, lambda machine: machine.model.count_queued() > 1 or machine.model.paused is not None)
    def operate(self, data: st.DataObject) -> None:
        """Resume a queue that is paused; else pause it, delete it or cancel all of it."""
        what = data.draw(st.sampled_from(["pause", "delete", "cancel_all"]))
        if self.model.paused is not None:
            self.raw(ops.resume(self.q), self.model.resume(), data)
        elif what == "pause":
            self.raw(ops.pause(self.q, "why"), self.model.pause("why"), data)
        elif what == "delete":
            self.raw(ops.delete_queue(self.q), self.model.delete_queue(), data)
        else:
            self.cancel_everything(data.draw(budgets))

    def cancel_everything(self, budget: int) -> None:
        expected = self.model.cancel_all("all")
        waiting, claims, after, more = 0, list[int](), "-", True
        while more:
            call = ops.cancel_all(self.q, after, reason="all")
            found = self.do(replace(call, args=(call.args[0], budget, *call.args[2:])))
            assert (found is None) == (expected is None)
            if found is None:
                return
            waiting, claims = waiting + found.waiting, claims + found.claims
            after, more = found.after, found.more
        assert (waiting, set(claims)) == expected
        self.check()

    @action(4, lambda machine: machine.model.has_trash())
    def purge(self, data: st.DataObject) -> None:
        self._purge(data.draw(st.sampled_from([1, 2, 15, MAX_ITEMS])))

    def _purge(self, limit: int) -> None:
        reply = self.world.send(ops.purge_queue(self.q, limit))
        left = {job_id.decode() for job_id in self.world.client.smembers(self.q.trash_blocked)}
        assert reply == wire(self.model.purge_queue(limit, left))
        self.check()

    @action(4, lambda machine: bool(machine.model.aside))
    def take_up(self, data: st.DataObject) -> None:
        """What was set aside is retried, or dropped."""
        kind = data.draw(st.sampled_from([kind for kind, listed in self.model.listed.items() if listed]))
        some = st.sampled_from([*self.model.listed[kind], *self.model.aside])
        claims = data.draw(st.lists(some, min_size=1, max_size=3))
        which: Any = public_name(kind)
        if data.draw(st.sampled_from([False, False, True])):
            self.raw(ops.drop_aside(self.q, which, claims), self.model.drop_aside(kind, claims), data)
        else:
            self.raw(ops.retry_aside(self.q, which, claims), self.model.retry_aside(kind, claims), data)

    # Looking

    @action(2)
    def look(self, _data: st.DataObject) -> None:
        """What the scripts that read say of it."""
        model = self.model
        count, tasks = self.do(ops.list_tasks(self.q, 1000, from_front=True))
        assert (count, sorted(tasks)) == (model.count_waiting(), sorted(model.payloads()))
        assert model.lanes or tasks == model.payloads()
        found = self.do(ops.inspect(self.q))
        assert (found.waiting, found.due, found.blocked) == (count, len(model.due), len(model.blocked))
        assert found.running == len(model.items)
        for job_id, number in [*self.handles[-8:], *((job_id, 0) for job_id in IDS)]:
            seen = self.do(ops.job_status(self.q, job_id, number))
            kind = seen.error.type if seen.error else None
            *told, of_type = model.status(job_id, number)
            assert (seen.state, seen.failures, seen.attempts, kind) == (*told, of_type or None)
            result = self.do(ops.read_result(self.q, job_id, number))
            word, facts = model.result(job_id, number)
            assert result.status == word, (job_id, number)
            assert result.status != "finished" or result.values[1] == wire(facts["value"])
            assert result.status != "failed" or result.values[0] == wire(facts["error_type"])
        for kind in DEAD_LETTERS:
            named = [job["id"] for job in model.aside.values()]
            assert self.do(ops.find_aside(self.q, kind, named)) == model.find_aside(stored_word(kind), named)

    # The end

    def _drain(self) -> None:
        """All goes on until it has ended; then nothing is left behind."""
        if self.model.paused is not None:
            self.raw(ops.resume(self.q), self.model.resume())
        self.set_limits("*")
        for lane in LANES if self.laned else ():
            for setting, value in (("limit", "*"), ("weight", "*"), ("resume", "")):
                self.set_rule(lane, setting, value)
        while self.model.has_trash():
            self._purge(2)
        while left := [worker for worker, place in self.model.fence.items() if place == LEAVING]:
            self.raw(ops.stop_work(self.q, left[0], 2), self.model.stop_work(left[0], 2))
        self.join("A", Policy(), {})
        while self.model.present() or self.has_work():  # references to nothing go, too
            for job_id in sorted(self.model.due):
                self.let_come(job_id)
            self.open_all()
            self.claim("A", 100)
            for worker in self.holding():
                claims = sorted(self.model.held[worker])
                expected = self.model.finish_tasks(worker, claims, {})
                assert self.do(ops.finish_tasks(self.q, worker, claims, {})) == expected
                self.check()
        self.open_all()
        for worker in sorted(self.model.fence):
            self.raw(ops.stop_work(self.q, worker, 2), self.model.stop_work(worker, 2))
        for kind in DEAD_LETTERS:
            word = stored_word(kind)
            claims = list(self.model.listed[word])
            self.raw(ops.drop_aside(self.q, kind, claims), self.model.drop_aside(word, claims))
        left = {name for name in self.world.everything() if not name.startswith(("-fail", *EXPIRING))}
        assert not left, f"left behind: {left}"

    def open_all(self) -> None:
        """The time of all lanes comes, and the leader sees to it."""
        for lane in sorted(self.opens):
            self.let_open(lane)
        if self.opens:
            self.see_to(MAX_ITEMS)


@pytest.mark.timeout(1800)  # making a failure small takes its time, and so does a long run
def test_every_transaction_does_what_the_model_says(server: Server) -> None:
    JobMachine.server = server
    run_machine(JobMachine, examples=40)
