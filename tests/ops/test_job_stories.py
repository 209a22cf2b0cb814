"""Whole lives of jobs, which must leave nothing behind; and at random, that no id runs twice at once, that nothing that waits
is out of reach, and that nobody is blocked by nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from tests.ops.driver import FUTURE, PAST, Desk, job, payloads
from tests.support.leaks import assert_no_leaks
from tests.support.servers import Server
from worqr import ops
from worqr.keys import MARKER, QueueKeys

KEPT: dict[str, Any] = {"fields": {"result_ttl": "60000"}}


@pytest.fixture
def clean_desk(server: Server, prefix: str) -> Iterator[Desk]:
    """A `Desk` under which no key may be left but those that expire."""
    with server.client() as client:
        yield Desk(client, prefix)


def leave(desk: Desk, *workers: str) -> None:
    for worker in workers:
        desk.call(ops.stop_work(desk.q, worker))


def test_a_job_is_dispatched_changed_postponed_run_retried_and_done(clean_desk: Desk) -> None:
    desk = clean_desk
    desk.dispatch("x", b"1", unique_for=60_000, **KEPT)
    desk.dispatch("x", b"2", run_at=FUTURE)
    desk.client.zadd(desk.q.due, {"x": PAST})
    assert desk.call(ops.promote_due(desk.q)).number == 1
    desk.enter("A")
    [held] = desk.take("A", 1)
    assert desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")])) == 1
    desk.dispatch("x", b"3")
    assert desk.retry("A", held) == "given"
    started = desk.start("A", 9)
    assert payloads(started.entries) == [b"3"]
    desk.call(ops.finish_tasks(desk.q, "A", [started.first], {started.first: ("json", b"1")}))
    leave(desk, "A")
    assert_no_leaks(desk.client, desk.prefix)
    assert desk.call(ops.read_result(desk.q, "x", 0)).status == "finished"


def test_a_job_that_fails_is_handled_looked_at_put_back_and_dropped(clean_desk: Desk) -> None:
    desk = clean_desk
    desk.enter("A", on_failure=True)
    desk.dispatch("x", **KEPT)
    desk.fail("A", *desk.take("A", 1))
    [(claim, _)] = desk.call(ops.list_aside(desk.q, "failed", 9)).records
    assert desk.call(ops.retry_aside(desk.q, "failed", [claim])) == 1
    desk.fail("A", *desk.take("A", 1))
    found = desk.call(ops.find_aside(desk.q, "failed", ["x"]))
    assert desk.call(ops.drop_aside(desk.q, "failed", found)) == 1
    leave(desk, "A")
    handlers = Desk(desk.client, desk.prefix)
    handlers.q = QueueKeys(desk.prefix, "Q1", failures=True)
    handlers.enter("A")
    assert handlers.call(ops.finish_tasks(handlers.q, "A", handlers.take("A", 2))) == {}
    handlers.start("A", 1)
    leave(handlers, "A")
    assert_no_leaks(desk.client, desk.prefix)


def test_a_queue_is_deleted_with_jobs_wherever_they_may_be(clean_desk: Desk) -> None:
    desk = clean_desk
    held = desk.run("A", "runs", **KEPT)
    desk.call(ops.dispatch_jobs(desk.q, [job("runs"), job("waits"), job("due", run_at=FUTURE)]))
    desk.call(ops.delete_queue(desk.q))
    desk.call(ops.fail_worker(desk.q, "A"))
    while desk.call(ops.purge_queue(desk.q, 1)):
        pass
    assert desk.client.exists(desk.q.claim(held), desk.q.base) == 0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_job_is_where_it_says_and_runs_once_at_a_time(clean_desk: Desk, seed: int) -> None:
    Chaos(clean_desk, Random(seed)).run(150)


class Chaos:
    """Few ids and few workers, everything that can happen to jobs, at random."""

    def __init__(self, desk: Desk, random: Random) -> None:
        self.desk = desk
        self.random = random
        self.enter("A", "B", "C")

    def enter(self, *workers: str) -> None:
        for worker in workers:
            self.desk.enter(worker, max_stalls=2, keep_failed=4, on_failure=False, result_ttl_ms=60_000)

    def run(self, steps: int) -> None:
        moves: list[Callable[[], object]] = [
            *([self.dispatch] * 6 + [self.start] * 6 + [self.finish] * 2 + [self.retry] * 3 + [self.later] * 2),
            *(
                self.stop,
                self.fail,
                self.die,
                self.leave,
                self.cancel,
                self.delete,
                self.again,
                self.say,
                self.cancel_all,
            ),
        ]
        for _ in range(steps):
            self.random.choice(moves)()
            self.check()
        self.end()

    # Moves

    def id(self) -> str:
        return self.random.choice("uvwxyz")

    def claims_of(self, worker: str) -> list[int]:
        return sorted(int(claim) for claim in self.desk.client.smembers(self.desk.q.claims(worker)))

    def some_claim(self) -> tuple[str, int] | None:
        held = [(worker, claim) for worker in "ABC" for claim in self.claims_of(worker)]
        return self.random.choice(held) if held else None

    def when(self) -> int:
        return self.random.choice((PAST, PAST + 1, FUTURE, FUTURE + 1))

    def dispatch(self) -> None:
        jobs: list[Any] = []
        for _ in range(self.random.randint(1, 3)):
            said: dict[str, Any] = {"run_at": self.when()}
            said |= self.random.choice(({}, {"when": "keep"}, {"when": "later"}, {"when": "earlier"}, {"data": False}))
            said |= self.random.choice(({}, {}, {"exists": "skip"}, {"exists": "raise"}, {"front": True}))
            said |= self.random.choice(({}, {}, {"expires": "0"}, KEPT, {"fields": {"max_failures": "1"}}))
            jobs.append(job(self.id(), b"task", **said))
        self.desk.call(ops.dispatch_jobs(self.desk.q, jobs, all_or_none=self.random.random() < 0.3))

    def start(self) -> None:
        self.desk.start(self.random.choice("ABC"), self.random.randint(0, 3))

    def finish(self) -> None:
        if held := self.some_claim():
            self.desk.call(ops.finish_tasks(self.desk.q, held[0], [held[1]], {held[1]: ("json", b"1")}))

    def stop(self) -> None:
        worker = self.random.choice("ABC")
        self.desk.call(ops.stop_tasks(self.desk.q, worker, self.claims_of(worker)))

    def retry(self) -> None:
        if held := self.some_claim():
            counter = self.random.choice(("failures", "timeouts", "stalls", ""))
            self.desk.retry(*held, counter=counter, limit=3, run_at_ms=self.when())

    def fail(self) -> None:
        if held := self.some_claim():
            self.desk.fail(*held, undecodable=self.random.random() < 0.3)

    def die(self) -> None:
        worker = self.random.choice("ABC")
        while self.desk.call(ops.fail_worker(self.desk.q, worker, 1)).more:
            self.check()
        self.enter(worker)

    def leave(self) -> None:
        worker = self.random.choice("ABC")
        self.desk.call(ops.stop_work(self.desk.q, worker))
        self.enter(worker)

    def cancel(self) -> None:
        self.desk.call(ops.cancel_job(self.desk.q, self.id(), "why"))

    def cancel_all(self) -> None:
        if self.random.random() < 0.3:
            self.desk.call(ops.cancel_all(self.desk.q))
            self.purge()

    def delete(self) -> None:
        if self.random.random() < 0.5:
            self.desk.call(ops.delete_queue(self.desk.q))
        self.purge()

    def purge(self) -> None:
        self.desk.call(ops.purge_queue(self.desk.q, self.random.choice((1, 1, 1000))))

    def later(self) -> None:
        """Time passes for all that is due."""
        for name in self.desk.client.zrange(self.desk.q.due, 0, -1):
            self.desk.client.zadd(self.desk.q.due, {name: PAST})
        if self.random.random() < 0.5:
            self.desk.call(ops.promote_due(self.desk.q, self.random.choice((1, 1000))))

    def again(self) -> None:
        which = self.random.choice(("failed", "undecodable"))
        page = self.desk.call(ops.list_aside(self.desk.q, which, 9))
        claims = [claim for claim, _ in page.records]
        step = self.random.choice((ops.retry_aside, ops.drop_aside))
        self.desk.call(step(self.desk.q, which, self.random.sample(claims, self.random.randint(0, len(claims)))))

    def say(self) -> None:
        if held := self.some_claim():
            self.desk.call(ops.note_progress(self.desk.q, held[0], [(held[1], 0.5, "half")]))

    # What must hold

    def state(self) -> dict[str, Any]:
        """Records, claims and where jobs stand: much quicker than the state of the desk, in two requests."""
        names = [self.desk.short(key.decode()) for key in self.desk.all_keys()]
        reads = {"job": "HGETALL", "active": "HGETALL", "aside": "HGETALL", "claim": "LRANGE", "claims": "SMEMBERS"}
        plain = {"waiting": "LRANGE", ":suspects": "LRANGE", ":due": "ZRANGE", ":blocked": "SMEMBERS"}
        how = {
            name: plain.get(name) or reads.get(name.split(":")[1])
            for name in names
            if name in plain or name.count(":") > 1
        }
        wanted = {name: command for name, command in how.items() if command}
        with self.desk.client.pipeline(transaction=False) as pipe:
            for name, command in wanted.items():
                more = (0, -1) if command.endswith("RANGE") else ()
                pipe.execute_command(command, self.desk.q.base + name.removeprefix("waiting"), *more)
            return dict(zip(wanted, map(_text, pipe.execute()), strict=True))

    def check(self) -> None:
        q, client, state = self.desk.q, self.desk.client, self.state()
        cleared = int(client.hget(q.counts, "cleared") or 0)
        held = [claim for name, claims in state.items() if name.startswith(":claims:") for claim in claims]
        assert {f":claim:{claim}" for claim in held} == {name for name in state if name.startswith(":claim:")}
        running = Counter(state[f":claim:{claim}"][0].removeprefix(MARKER.decode()) for claim in held)
        assert all(count == 1 for count in running.values()), "one id runs twice"
        assert {f":active:{name}" for name in running} == {name for name in state if name.startswith(":active:")}
        assert all(state[f":active:{name}"]["claim"] in held for name in running)
        places = Counter(state.get("waiting", []) + state.get(":suspects", []))
        waits = 0
        for name, record in state.items():
            if not name.startswith(":job:") or int(record["queued"]) <= cleared:
                continue
            of = name.removeprefix(":job:")
            waits += record["state"] == "waiting"
            assert (record["state"] == "waiting") <= (places[MARKER.decode() + of] > 0), "out of reach"
            assert (record["state"] == "due") == (of in state.get(":due", [])), "never promoted"
            assert (record["state"] == "blocked") == (of in state.get(":blocked", ())), "never unblocked"
            assert (record["state"] == "blocked") == (of in running), "blocked by nothing, or not by what runs"
        assert len(state.get(":due", ())) + len(state.get(":blocked", ())) + waits == sum(
            int(record["queued"]) > cleared for name, record in state.items() if name.startswith(":job:")
        )
        seen = self.desk.call(ops.inspect(q))
        assert seen.waiting == waits == len(self.desk.waiting())
        assert client.hlen(q.dead_letter_index) == len(
            {record["id"] for name, record in state.items() if name.startswith(":aside:")}
        )

    def end(self) -> None:
        desk = self.desk
        while desk.call(ops.purge_queue(desk.q)):
            pass
        leave(desk, "A", "B", "C")
        desk.enter("Z", keep_failed=0)
        for _ in range(99):
            for name in desk.client.zrange(desk.q.due, 0, -1):
                desk.client.zadd(desk.q.due, {name: PAST})
            started = desk.start("Z", 1)
            desk.call(ops.finish_tasks(desk.q, "Z", self.claims_of("Z")))
            if started.status == "short" and not started.entries:
                break
        leave(desk, "Z")
        for which in ("failed", "undecodable"):
            page = desk.call(ops.list_aside(desk.q, which, 99))
            desk.call(ops.drop_aside(desk.q, which, [claim for claim, _ in page.records]))
        assert desk.client.exists(desk.q.base) == 0
        assert_no_leaks(desk.client, desk.prefix)


def _text(found: Any) -> Any:
    if isinstance(found, dict):
        return {name.decode(): value.decode("latin-1") for name, value in found.items()}
    return type(found)(each.decode() for each in found)
