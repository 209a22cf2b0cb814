"""Batches over two queues in random sequences of scripts: after each step their keys agree with the records of jobs and with each
other, and what members became is counted as it was replied. In the end each batch has ended, each ending had one follow-up, and
nothing is left.

Messages are delivered late, several times and in any order; producers use versions that are out of date; records vanish. A run is
the same each time; `tests.support.machines` says what makes it another one, or a long one.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.ops.batches import COUNTS, Opened, delivery, follow_up, held, messages, relay, wrong
from tests.ops.driver import BOOM, FUTURE, PAST, Desk, fields_of, job
from tests.support.machines import run_machine
from tests.support.servers import Server
from worqr import ops
from worqr.keys import BatchKeys, QueueKeys, keys_at
from worqr.ops import OutboxMessage
from worqr.stored_values import public_name

WORKERS = ("A", "B")
IDS = ("a", "b", "c", None, None)
KEEP = 1_000_000_000

queues = st.sampled_from([0, 0, 1])
workers = st.sampled_from(WORKERS)
ids = st.sampled_from(IDS)
options = st.sampled_from(
    [*({}, {}, {}, {"run_at": FUTURE}, {"expires": "0"}, {"lane": "gold"}), {"fields": {"max_stalls": "1"}}]
)


class BatchMachine(RuleBasedStateMachine):
    """Two queues with two workers, and the batches in them."""

    server: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        self.client: redis.Redis = self.server.client()
        self.desk = Desk(self.client, f"b{secrets.token_hex(4)}")
        self.queues = (self.desk.q, QueueKeys(self.desk.prefix, "Q2"))
        self.batches: list[Opened] = []
        self.outer: set[str] = set()
        """The tokens of batches that others are members of."""
        self.follow_ups: dict[str, set[str]] = {}
        """Which follow-ups a batch has: then, otherwise."""
        self.given: list[tuple[Opened, QueueKeys, dict[str, Any]]] = []
        """Options of dispatches, which may be out of date."""
        self.said: list[OutboxMessage] = []
        """Messages that were delivered once."""
        self.held: dict[tuple[int, str], dict[int, str | None]] = {}
        """Claims of workers, with the ids of jobs."""
        self.ended_follow_ups: list[str] = []
        self.starts: Counter[tuple[int, str]] = Counter()
        self.lost: set[tuple[str, str]] = set()
        self.counted: Counter[str] = Counter()

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.desk.wipe()
            self.client.close()

    # What holds after each step

    def counters(self) -> Counter[str]:
        """The sums of all parts but those of outer batches, which count batches, too."""
        found: Counter[str] = Counter()
        for queue in self.queues:
            for batch in self.batches:
                if batch.token not in self.outer:
                    values = self.client.hmget(BatchKeys(queue).part(batch.token), COUNTS)
                    found.update({name: int(value or 0) for name, value in zip(COUNTS, values, strict=True)})
        return found

    def check(self, *, finished: int = 0, failed: int | None = 0, lost: bool = False) -> None:
        """The keys agree, and the last step has counted so many members as finished and failed (None: any number)."""
        assert wrong(self.desk, *self.queues, lost=self.lost) == []
        counted = self.counters()
        change = {name: counted[name] - self.counted[name] for name in COUNTS}
        assert change["finished"] == finished, change
        assert failed is None or change["failed"] == failed, change
        assert change["cancelled"] >= 0 and (change["lost"] >= 0 if lost else change["lost"] == 0), change
        self.counted = counted

    def is_counted(self, queue: QueueKeys, id: str | None) -> bool:
        """True if the job that runs under this id is a member of a batch that is not an outer one."""
        value = id and self.client.hget(queue.active(id), "batch")
        return bool(value) and value.decode().partition("\n")[0] not in self.outer

    # Producers

    @initialize()
    def begin(self) -> None:
        self.desk.set_fence()
        for n in range(2):
            for worker in WORKERS:
                self.enter(n, worker)
        self.open(st_home=0, strict=False, kinds=("then", "otherwise"), there=1, nested=None)

    def enter(self, n: int, worker: str) -> None:
        self.desk.call(ops.start_work(self.queues[n], worker, max_stalls=3, keep_failed=20, last=0))
        self.held.setdefault((n, worker), {})
        self.starts[n, worker] = 0

    @rule(
        st_home=queues,
        strict=st.booleans(),
        kinds=st.sampled_from([("then",), ("otherwise",), ("then", "otherwise"), ()]),
        there=queues,
        nested=st.one_of(st.none(), st.integers(0, 9)),
    )
    def open(self, st_home: int, strict: bool, kinds: tuple[str, ...], there: int, nested: int | None) -> None:
        if len(self.batches) >= 6:
            return
        home, parent = self.queues[st_home], None
        outer = [batch for batch in self.batches if batch.home == home]
        if nested is not None and outer:
            chosen = outer[nested % len(outer)]
            opened = self.desk.call(ops.open_part(home, chosen.id, chosen.token, home.base, inside=True))
            if opened.options is None:
                return
            parent = dict(opened.options)
            self.outer.add(chosen.token)
            self.counted = self.counters()
        number = len(self.batches)
        batch = Opened(self.desk, home, f"b{number}", f"{number:016}")
        facts: dict[str, bytes | str] = {"on_failed": "cancel"} if strict else {}
        for kind in kinds:
            facts |= follow_up(kind, self.queues[there], kind.encode())
        facts = held(self.desk, home, batch.id, batch.token, facts)
        call = ops.open_batch(
            *(home, batch.id, batch.token), open_for_ms=10**9, keep_ms=KEEP, parent=parent, facts=facts
        )
        reply = self.desk.call(call)
        if reply == "ok":
            self.batches.append(batch)
            self.follow_ups[batch.token] = set(kinds)
        else:
            assert parent is not None and reply == "closed"
        self.check()

    def batch(self, pick: int) -> Opened:
        return self.batches[pick % len(self.batches)]

    @rule(pick=st.integers(0, 9), n=queues, id=ids, more=options, whole=st.booleans(), stale=st.booleans())
    def add(self, pick: int, n: int, id: str | None, more: dict[str, Any], whole: bool, stale: bool) -> None:
        if stale and self.given:
            batch, queue, entry = self.given[pick % len(self.given)]
        else:
            batch, queue = self.batch(pick), self.queues[n]
            opened = self.desk.call(ops.open_part(batch.home, batch.id, batch.token, queue.base, inside=True))
            if opened.options is None:
                self.check()
                return
            entry = dict(opened.options)
            self.given.append((batch, queue, entry))
        before = self.counters()["added"]
        reply = self.desk.send(ops.dispatch_jobs(queue, [job(id, batch=entry, **more)], all_or_none=whole))
        outcome = reply[1][0].decode()
        assert outcome in {"created", "duplicate", "closed"}
        if outcome == "created" and id is not None and (queue.base, id) not in self.lost:
            assert self.counters()["added"] == before + (batch.token not in self.outer)
        self.check()

    @rule(n=queues, id=ids, more=options, exists=st.sampled_from(["update", "cancel"]))
    def dispatch(self, n: int, id: str | None, more: dict[str, Any], exists: str) -> None:
        self.desk.call(ops.dispatch_jobs(self.queues[n], [job(id, exists=exists, **more)]))
        self.check()

    @rule(pick=st.integers(0, 9), tells=st.booleans())
    def seal(self, pick: int, tells: bool) -> None:
        batch = self.batch(pick)
        sealed = self.desk.call(ops.seal_batch(batch.home, batch.id, batch.token))
        assert sealed is not None
        self.check()
        for base, version in sealed.parts if tells else ():
            self.desk.call(batch.close_part(base, version))
            self.check(lost=True)

    @rule(pick=st.integers(0, 9))
    def cancel_batch(self, pick: int) -> None:
        batch = self.batch(pick)
        assert batch.cancel() in {"ok", "ended"}
        self.check()

    # Workers

    @rule(n=queues, worker=workers, wanted=st.integers(1, 4))
    def claim(self, n: int, worker: str, wanted: int) -> None:
        self.starts[n, worker] += 1
        reply = self.desk.call(ops.start_tasks(self.queues[n], worker, self.starts[n, worker], wanted))
        for i, entry in enumerate(reply.entries):
            if entry is not None:
                name = str(fields_of(entry)["id"]) if isinstance(entry, list) else None
                self.held[n, worker][reply.first + i] = name
        self.check(failed=None)

    def picked(self, n: int, worker: str, pick: int) -> tuple[int, str | None] | None:
        claims = self.held[n, worker]
        if not claims:
            return None
        claim = sorted(claims)[pick % len(claims)]
        return claim, claims[claim]

    def ended(self, n: int, worker: str, claim: int) -> None:
        del self.held[n, worker][claim]

    @rule(n=queues, worker=workers, pick=st.integers(0, 9), twice=st.booleans())
    def finish(self, n: int, worker: str, pick: int, twice: bool) -> None:
        found = self.picked(n, worker, pick)
        if found is None:
            return
        self.end(n, worker, found[0], twice=twice)

    def end(self, n: int, worker: str, claim: int, *, twice: bool) -> None:
        name = self.held[n, worker][claim]
        counts = self.is_counted(self.queues[n], name)
        call = ops.finish_tasks(self.queues[n], worker, [claim])
        reply = self.desk.send(call)
        is_finished = reply == [b"ok"]
        if is_finished and name and name.startswith("@0000"):
            self.ended_follow_ups.append(name)
        self.ended(n, worker, claim)
        self.check(finished=int(is_finished and counts))
        if twice:
            self.desk.send(call)
            self.check()

    @rule(n=queues, worker=workers, pick=st.integers(0, 9), how=st.sampled_from(["fail", "broken", "retry", "stop"]))
    def give_back(self, n: int, worker: str, pick: int, how: str) -> None:
        found, queue = self.picked(n, worker, pick), self.queues[n]
        if found is None:
            return
        claim, name = found
        counts = self.is_counted(queue, name)
        if how == "retry":
            status = self.desk.call(ops.retry_task(queue, worker, claim, BOOM, counter="failures", limit=2))
        elif how == "stop":
            self.desk.call(ops.stop_tasks(queue, worker, [claim]))
            status = ""
        else:
            status = self.desk.call(ops.fail_task(queue, worker, claim, BOOM, undecodable=how == "broken"))
        self.ended(n, worker, claim)
        self.check(failed=int(status == "aside" and counts))

    @rule(n=queues, worker=workers, dies=st.booleans())
    def leave(self, n: int, worker: str, dies: bool) -> None:
        queue, old = self.queues[n], dict(self.held[n, worker])
        more = True
        while more:
            call = ops.fail_worker(queue, worker, 2) if dies else ops.stop_work(queue, worker, 2)
            more = self.desk.send(call)[0] == b"more"
            self.check(failed=None)
        self.held[n, worker] = {}
        for claim in old:  # it comes back, and does not know yet
            self.desk.send(ops.finish_tasks(queue, worker, [claim]))
            self.desk.send(ops.fail_task(queue, worker, claim, BOOM))
            self.check()
        self.enter(n, worker)

    # Operators

    @rule(n=queues, id=st.sampled_from(IDS[:3]))
    def cancel_job(self, n: int, id: str) -> None:
        self.desk.call(ops.cancel_job(self.queues[n], id, ""))
        self.check()

    @rule(n=queues)
    def cancel_lane(self, n: int) -> None:
        self.desk.call(ops.cancel_lane(self.queues[n], "gold"))
        self.check()

    @rule(n=queues, how=st.sampled_from([ops.delete_queue, ops.cancel_all]), purges=st.booleans())
    def clear(self, n: int, how: Callable[[QueueKeys], Any], purges: bool) -> None:
        self.desk.call(how(self.queues[n]))
        self.check()
        if purges:
            self.purge(n, limit=1000)

    @rule(n=queues, limit=st.sampled_from([10, 1000]))
    def purge(self, n: int, limit: int) -> None:
        self.desk.send(ops.purge_queue(self.queues[n], limit))
        self.check()

    @rule(n=queues, pick=st.integers(0, 9), kind=st.sampled_from(["failed", "failed", "broken"]))
    def put_back(self, n: int, pick: int, kind: str) -> None:
        queue = self.queues[n]
        claims = [int(claim) for claim in self.client.zrange(f"{queue.base}:{kind}", 0, -1)]
        if not claims:
            return
        claim = claims[pick % len(claims)]
        value = self.client.hget(queue.dead_letter(str(claim)), "batch")
        counts = value is not None and value.decode().partition("\n")[0] not in self.outer
        which: Any = public_name(kind)
        stored = self.desk.call(ops.retry_aside(queue, which, [claim]))
        self.check(failed=-int(stored == 1 and counts))

    @rule(n=queues, pick=st.integers(0, 9))
    def lose(self, n: int, pick: int) -> None:
        """A failover loses the record of a member that waits."""
        queue = self.queues[n]
        stem = queue.job("")
        known = [key.decode() for key in sorted(self.client.keys(f"{stem}*")) if self.client.hexists(key, "batch")]
        if not known or pick > 2:
            return
        key = known[pick % len(known)]
        self.client.delete(key)
        self.lost.add((queue.base, key.removeprefix(stem)))
        self.check()

    # Messages

    @rule(n=queues, pick=st.integers(0, 9), drops=st.booleans())
    def deliver(self, n: int, pick: int, drops: bool) -> None:
        found = messages(self.desk, self.queues[n])
        if not found:
            return
        message = found[pick % len(found)]
        self.desk.call(delivery(self.desk, message))
        self.said.append(message)
        self.check(lost=True)
        if drops:
            self.desk.call(ops.drop_outbox(self.queues[n], [message]))
            self.check()

    @precondition(lambda self: self.said)
    @rule(pick=st.integers(0, 99))
    def deliver_late(self, pick: int) -> None:
        message = self.said[pick % len(self.said)]
        self.desk.call(delivery(self.desk, message))
        self.check(lost=True)

    @rule(pick=st.integers(0, 9), n=queues, version=st.integers(0, 3))
    def close_late(self, pick: int, n: int, version: int) -> None:
        """A request of a producer, or of a leader, that was on its way for long; it is of a version that there was."""
        batch, queue = self.batch(pick), self.queues[n]
        row = batch.row()
        known = {part.base: part.version for part in row.parts}
        if row.facts["state"] != "open" and 0 < version <= known.get(queue.base, 0):
            self.desk.call(batch.close_part(queue.base, version))
            self.check(lost=True)

    @rule(n=queues)
    def look(self, n: int) -> None:
        """The leader looks at the batches of a queue."""
        self.check_home(self.queues[n])
        self.check(lost=True)

    def check_home(self, home: QueueKeys) -> None:
        for batch in self.batches:
            self.client.zadd(BatchKeys(home).batches, {batch.id: PAST}, xx=True)
        _, checks = self.desk.call(ops.check_batches(home))
        for found in checks:
            for base, version in found.parts:
                told = (home.base, found.id, found.keep)
                part = keys_at(self.desk.prefix, base)
                if found.reason is None:
                    self.desk.call(ops.close_part(part, found.token, version, *told))
                else:
                    self.cancel_part(part, found.token, version, told, found.reason)

    def cancel_part(self, part: QueueKeys, token: str, version: int, told: tuple[str, str, str], why: str) -> None:
        cursor: str | None = "0"
        while cursor is not None:
            cursor = self.desk.call(ops.cancel_part(part, token, version, *told, why, cursor))

    # The end

    def drain(self) -> None:
        """All goes on until it has ended; then each batch has ended, and is forgotten."""
        for batch in self.batches:
            self.desk.call(ops.seal_batch(batch.home, batch.id, batch.token))
        for _ in range(40):
            if not self.step_of_drain():
                break
        else:
            raise AssertionError(f"it does not come to an end: {self.left()}")
        endings = {batch.token: batch.row().facts for batch in self.batches}
        assert {facts["state"] for facts in endings.values()} <= {"ended"}, endings
        for queue in self.queues:
            for batch in self.batches:
                assert self.client.scard(BatchKeys(queue).members(batch.token)) == 0
        self.check_follow_ups({token: int(facts["endings"]) for token, facts in endings.items()})
        self.forget()

    def left(self) -> list[Any]:
        """What keeps it from its end."""
        found: list[Any] = [batch.row() for batch in self.batches if batch.state() != "ended"]
        for queue in self.queues:
            found += [(queue.base, messages(self.desk, queue))]
            found += [(batch.id, batch.part(queue)) for batch in self.batches if batch.part(queue)[0]]
        return found

    def step_of_drain(self) -> bool:
        """True if there was anything to do."""
        busy = False
        for n, queue in enumerate(self.queues):
            while self.desk.call(ops.purge_queue(queue)):
                pass
            for message in messages(self.desk, queue):
                busy = True
                self.desk.call(delivery(self.desk, message))
                self.desk.call(ops.drop_outbox(queue, [message]))
            self.check(lost=True)
            for due in self.client.zrange(queue.due, 0, -1):
                self.client.zadd(queue.due, {due: PAST})
            self.claim(n, "A", 100)
            for worker in WORKERS:
                for claim in sorted(self.held[n, worker]):
                    busy = True
                    self.end(n, worker, claim, twice=False)
            self.check_home(queue)
            busy |= any(batch.home == queue and batch.state() != "ended" for batch in self.batches)
        self.counted = self.counters()
        self.check()
        return busy or bool([each for queue in self.queues for each in messages(self.desk, queue)])

    def check_follow_ups(self, endings: dict[str, int]) -> None:
        """No follow-up ran twice, and there was none without an ending. One may have been cancelled or have failed."""
        assert len(self.ended_follow_ups) == len(set(self.ended_follow_ups))
        for name in self.ended_follow_ups:
            token, kind, *ending = name[1:].split(".")
            assert kind in self.follow_ups[token]
            assert int(ending[0] if ending else 1) <= endings[token]

    def forget(self) -> None:
        for batch in self.batches:
            self.client.hset(BatchKeys(batch.home).batch(batch.id), "ended_at", PAST)
        for queue in self.queues:
            self.check_home(queue)
            relay(self.desk, queue)
            for worker in WORKERS:
                self.desk.send(ops.stop_work(queue, worker, 100))
            lists: tuple[tuple[ops.DeadLetterList, str], ...] = (
                ("failed", queue.failed),
                ("undecodable", queue.undecodable),
            )
            for which, key in lists:
                claims = [int(claim) for claim in self.client.zrange(key, 0, -1)]
                if claims:
                    self.desk.call(ops.drop_aside(queue, which, claims))
        left = {key for key in self.desk.all_keys() if self.client.ttl(key) == -1}
        assert not left, left


@pytest.mark.timeout(1800)
def test_batches_hold_whatever_happens(server: Server) -> None:
    BatchMachine.server = server
    run_machine(BatchMachine, examples=25)
