"""Workflows at random: runs, crashes, recoveries, late requests, copies of messages, events, cancels and put-backs, on a server.

The function notes and dispatches two children, waits for both and for an event at the same time, sleeps, waits for a second
event, and returns. What it is told is compared: each run of a life is told the same, each event is taken once and in order, a
child is started once per try. At the end nothing goes wrong any more, and each workflow must end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from tests.ops.driver import BOOM, FUTURE, PAST, Desk
from tests.support.servers import Server
from worqr import ops
from worqr.client.outbox_relay import Relay
from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops import Child, Wait

CHILDREN = ("c1", "c2")
ALL = Wait("all", "children", about="\n".join(CHILDREN))
FIRST = Wait("e #1", "event", "e", in_ms=10**9)
NAP = Wait("nap", "sleep", at_ms=FUTURE)
SECOND = Wait("e #2", "event", "e")


@dataclass
class Run:
    """A run of the function under `claim` of `worker`, with its copy of the record. Its worker may have been declared dead."""

    worker: str
    claim: int
    fields: dict[str, bytes]
    noted: dict[str, int] = field(default_factory=dict[str, int])
    started: set[str] = field(default_factory=set[str])

    def ended(self, key: str) -> bytes:
        return self.fields.get(f"end:{key}", b"")


class Machine:
    """One parent queue, one queue of children, and all that is known of what runs were told."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk, self.random = desk, Random(seed)
        self.far = Desk(desk.client, desk.prefix)
        self.far.q = QueueKeys(desk.prefix, "Q2")
        self.far.numbers = desk.numbers
        self.runs: list[Run] = []
        self.told: dict[tuple[bytes, str, bytes], bytes] = {}
        self.begun: set[tuple[bytes, str, int]] = set()
        self.sent: dict[str, str] = {}
        self.faults = True
        self.ended = 0
        for worker in ("A", "B"):
            desk.enter(worker)
        self.far.enter("C")

    # The function

    def take(self) -> None:
        worker = self.random.choice("AB")
        self.desk.enter(worker)
        started = self.desk.start(worker, 1)
        for entry in started.entries:
            if entry is not None:
                fields = {name.decode(): value for name, value in zip(entry[::2], entry[1::2], strict=True)}
                self.runs.append(Run(worker, started.first, fields))

    def note(self, run: Run) -> None:
        """What the function is told now, which must be what every run of this life was told."""
        life = run.fields["life"]
        for name, value in run.fields.items():
            if name.startswith("end:"):
                round_ = run.fields.get(name.replace("end:", "child:"), b"0 0").split()[1]
                known = self.told.setdefault((life, name, round_), value)
                assert known == value, f"two outcomes of {name}: {known!r}, {value!r}"
                if value.startswith(b"value "):
                    event = value.split(b" ", 3)[3].decode()
                    taken = self.sent.setdefault(event, f"{life.decode()} {name}")
                    assert taken in ("", f"{life.decode()} {name}"), f"{event} was taken by {taken} and {name}"
                    self.sent[event] = f"{life.decode()} {name}"

    def go_on(self, run: Run) -> None:
        """The next request of a run."""
        self.note(run)
        if any(run.ended(child).startswith((b"failed", b"cancelled", b"gone")) for child in CHILDREN):
            self.settle(run, ops.fail_task(self.desk.q, run.worker, run.claim, BOOM))
        elif not run.noted:
            self.note_children(run)
        elif left := [child for child in CHILDREN if child not in run.started and not run.ended(child)]:
            self.start_child(run, left[0])
        elif waits := [wait for wait in (ALL, FIRST) if not run.ended(wait.key)]:
            self.suspend(run, waits)
        elif not run.ended(NAP.key):
            self.suspend(run, [NAP])
        elif not run.ended(SECOND.key):
            self.suspend(run, [SECOND])
        else:
            self.settle(run, ops.finish_tasks(self.desk.q, run.worker, [run.claim]))

    def call(self, call: Command[Any]) -> Any:
        """The reply; sometimes to a second copy of the request."""
        if self.faults and not call.numbered and self.random.random() < 0.1:
            self.desk.call(call)
        return self.desk.call(call)

    def settle(self, run: Run, call: Command[Any]) -> None:
        self.call(call)
        self.runs.remove(run)

    def note_children(self, run: Run) -> None:
        children = [Child(key, self.far.q.base, f"{key}.{run.fields['life'].decode()}") for key in CHILDREN]
        noted = self.call(ops.note_children(self.desk.q, run.worker, run.claim, children))
        if noted.status == "lost":
            self.runs.remove(run)
            return
        for key, (after, _, end) in zip(CHILDREN, noted.children, strict=True):
            run.noted[key] = after
            if end is not None:
                run.fields[f"end:{key}"] = end
            run.fields.setdefault(f"child:{key}", b"%d 0" % after)

    def start_child(self, run: Run, key: str) -> None:
        life = run.fields["life"].decode()
        parent = {"base": self.desk.q.base, "id": "x", "life": life, "key": key, "after": str(run.noted[key])}
        outcome = self.far.dispatch(f"{key}.{life}", parent=parent).outcome
        assert outcome in ("created", "unchanged")
        if outcome == "created":
            try_ = (life.encode(), key, run.noted[key])
            assert try_ not in self.begun, f"child {try_} was started twice"
            self.begun.add(try_)
        run.started.add(key)

    def suspend(self, run: Run, waits: list[Wait]) -> None:
        replied = self.call(ops.suspend_task(self.desk.q, run.worker, run.claim, waits))
        if replied.status == "ready":
            run.fields |= replied.ends
            record: Any = self.desk.client.hgetall(self.desk.q.active("x"))
            run.fields |= {name.decode(): value for name, value in record.items() if name.startswith(b"end:c")}
        else:
            self.runs.remove(run)

    # What happens around it

    def dispatch(self) -> None:
        exists = self.random.choice(["update", "update", "cancel"]) if self.faults else "update"
        self.desk.dispatch("x", b"%d" % self.random.randrange(2), workflow=True, exists=exists)

    def send(self) -> None:
        event = f"json {len(self.sent)}"
        call = ops.send_event(self.desk.q, "x", "e", event.encode(), again=self.random.random() < 0.3)
        if self.desk.call(call).status in ("stored", "woke"):
            self.sent[event] = ""

    def crash(self) -> None:
        """A worker is declared dead: it has crashed, or goes on."""
        worker = self.random.choice("AB")
        self.desk.call(ops.fail_worker(self.desk.q, worker))
        if self.random.random() < 0.5:
            self.runs = [run for run in self.runs if run.worker != worker]

    def run_child(self) -> None:
        self.far.enter("C")
        started = self.far.start("C", 1)
        for entry in started.entries:
            if entry is None:
                continue
            if self.faults and self.random.random() < 0.3:
                self.far.call(ops.fail_worker(self.far.q, "C"))
            elif self.faults and self.random.random() < 0.3:
                self.far.fail("C", started.first)
            else:
                result = {started.first: ("json", b"%d" % started.first)}
                self.far.call(ops.finish_tasks(self.far.q, "C", [started.first], result))

    def relay(self) -> None:
        """Deliver messages; sometimes they stay in the outbox, and are delivered again later."""

        async def ask(call: Command[Any]) -> Any:
            if call.script.name == "drop_outbox" and self.faults and self.random.random() < 0.3:
                raise KeepsIt
            return self.desk.call(call)

        for keys in (self.desk.q, self.far.q):
            with suppress(KeepsIt):
                asyncio.run(Relay(ask, self.desk.prefix).messages(keys))

    def time_passes(self) -> None:
        """Deadlines have passed, or a look at children is due."""
        key, client = self.desk.q.job("x"), cast("Any", self.desk.client)
        if client.zscore(self.desk.q.suspended, "x") is None:
            return
        passes = not self.faults or self.random.random() < 0.5
        for name, value in client.hgetall(key).items() if passes else ():
            if name.startswith(b"wait:") and name[5:] in (FIRST.key.encode(), NAP.key.encode()):
                head, rest = value.split(b"\n", 1)
                client.hset(key, name, b" ".join([*head.split(b" ")[:2], b"%d" % PAST]) + b"\n" + rest)
        client.zadd(self.desk.q.suspended, {"x": PAST})
        self.desk.call(ops.promote_due(self.desk.q))

    def cancel(self) -> None:
        self.desk.call(ops.cancel_job(self.desk.q, "x", "why"))

    def put_back(self) -> None:
        claims: Any = self.desk.client.zrange(self.desk.q.failed, 0, 0)
        for claim in claims:
            self.desk.call(ops.retry_aside(self.desk.q, "failed", [int(claim)]))

    def retry(self) -> None:
        if self.runs:
            run = self.random.choice(self.runs)
            self.settle(run, ops.retry_task(self.desk.q, run.worker, run.claim, BOOM, counter="failures", limit=99))

    def check(self) -> None:
        """Suspended jobs, and no others, are among the suspended ones."""
        client, q = self.desk.client, self.desk.q
        is_listed = client.zscore(q.suspended, "x") is not None
        assert is_listed == (client.hget(q.job("x"), "state") == b"suspended")

    def live(self, steps: int) -> None:
        rare = (self.crash, self.cancel, self.put_back, self.retry, self.dispatch)
        often = (self.take, self.run_child, self.relay, self.time_passes, self.send)
        for _ in range(steps):
            if self.runs and self.random.random() < 0.5:
                self.go_on(self.random.choice(self.runs))
            else:
                self.random.choice((*often, *often, *rare))()
            self.check()

    def come_to_rest(self) -> None:
        """Nothing goes wrong any more: every workflow ends, and its children too."""
        self.faults = False
        for worker in ("A", "B"):
            self.desk.call(ops.fail_worker(self.desk.q, worker))
        self.runs.clear()
        for _ in range(40):
            if not any(self.desk.client.exists(key("x")) for key in (self.desk.q.job, self.desk.q.active)):
                break
            self.take()
            while self.runs:
                self.go_on(self.runs[0])
            for _ in range(4):
                self.run_child()
            self.relay()
            self.send()
            self.time_passes()
        for _ in range(4):
            self.run_child()
            self.relay()
        left = [key for key in self.desk.all_keys() if b":job:" in key or b":active:" in key or b"outbox" in key]
        assert left == []


class KeepsIt(Exception):
    """The relay dies before it deletes what it has delivered."""


@pytest.mark.sweep(keep=12)
@pytest.mark.parametrize("seed", range(300))
def test_at_random_nothing_is_lost_and_nothing_happens_twice(server: Server, prefix: str, seed: int) -> None:
    with server.client() as client:
        desk = Desk(client, prefix)
        try:
            desk.set_fence()
            machine = Machine(desk, seed)
            machine.dispatch()
            machine.live(150)
            machine.come_to_rest()
        finally:
            desk.wipe()
