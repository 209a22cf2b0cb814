"""Whole lives, which must leave nothing behind, and numbers that must add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from tests.ops.driver import LEASE, Desk, payloads
from tests.support.leaks import assert_no_leaks
from tests.support.servers import Server
from worqr import ops
from worqr.keys import MARKER


@pytest.fixture
def clean_desk(server: Server, prefix: str) -> Iterator[Desk]:
    """A `Desk` under which no key may be left."""
    with server.client() as client:
        yield Desk(client, prefix)


def test_a_worker_comes_works_and_goes(clean_desk: Desk) -> None:
    desk = clean_desk
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    assert desk.start("A", 5).status == "short"
    desk.put(b"a", b"b", MARKER)
    one, two, three = desk.take("A", 3)
    assert desk.beat("A", lease_ms=LEASE).leads
    desk.retry("A", one)
    desk.call(ops.finish_tasks(desk.q, "A", [two]))
    desk.call(ops.stop_tasks(desk.q, "A", [three]))
    desk.call(ops.finish_tasks(desk.q, "A", desk.take("A", 2)))
    desk.call(ops.stop_work(desk.q, "A"))
    desk.call(ops.unmap_work(desk.g, "A", "Q1"))
    assert desk.call(ops.stop_worker(desk.g, "A")) == []


def test_a_dead_worker_is_swept_and_another_does_its_work(clean_desk: Desk) -> None:
    desk = clean_desk
    desk.register("A", "B", queues=["Q1"])
    desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.cancel_task(desk.q, b"b"))
    desk.client.delete(desk.g.worker("A"))
    assert desk.call(ops.look_at_workers(desk.g)).beats["A"] is None
    assert desk.call(ops.condemn_worker(desk.g, "A", None)) == "ok"
    assert not desk.beat("A").alive
    for queue in desk.call(ops.forget_worker(desk.g, "A")):
        while desk.call(ops.fail_worker(desk.q, "A", 2)).more:
            pass
        desk.call(ops.unmap_work(desk.g, "A", queue))
    assert desk.call(ops.forget_worker(desk.g, "A")) == []
    desk.enter("B")
    started = desk.start("B", 5)
    assert payloads(started.entries) == [b"a", b"c"]
    desk.call(ops.finish_tasks(desk.q, "B", [started.first, started.first + 1]))
    desk.call(ops.stop_work(desk.q, "B"))
    desk.call(ops.unmap_work(desk.g, "B", "Q1"))
    assert desk.call(ops.stop_worker(desk.g, "B")) == []


def test_a_queue_is_deleted_under_its_workers(clean_desk: Desk) -> None:
    desk = clean_desk
    desk.stall(b"suspect")
    one, two = desk.hold("A", b"a")[0], desk.take("A", 1)[0]
    desk.put(b"b", MARKER)
    desk.call(ops.cancel_task(desk.q, b"b"))
    assert desk.call(ops.delete_queue(desk.q))
    desk.retry("A", one)
    desk.call(ops.fail_worker(desk.q, "A"))
    while desk.call(ops.purge_queue(desk.q, 1)):
        pass
    assert desk.client.exists(desk.q.base) == 0
    del two


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_task_is_in_one_place_and_the_counters_add_up(clean_desk: Desk, seed: int) -> None:
    """Three workers, tasks of ten payloads, everything that can happen to them, at random."""
    Chaos(clean_desk, Random(seed)).run(300)


class Chaos:
    """Steps at random, and after each what must hold. `held` is what each worker believes to hold."""

    def __init__(self, desk: Desk, random: Random) -> None:
        self.desk = desk
        self.random = random
        self.held: dict[str, list[int]] = {"A": [], "B": [], "C": []}
        desk.enter(*self.held, keep_failed=2)

    def run(self, steps: int) -> None:
        moves: list[Callable[[], object]] = [
            *([self.put] * 3 + [self.start] * 4 + [self.finish] * 2),
            *(
                self.retry,
                self.retry,
                self.fail,
                self.stop,
                self.die,
                self.leave,
                self.cancel,
                self.delete,
                self.cancel_all,
            ),
        ]
        for _ in range(steps):
            self.random.choice(moves)()
            self.check()
        self.end()

    def worker(self) -> str:
        return self.random.choice("ABC")

    def some(self, worker: str) -> list[int]:
        held = self.held[worker]
        return [held.pop(self.random.randrange(len(held))) for _ in range(self.random.randint(0, len(held)))]

    def put(self) -> None:
        task = b"%d" % self.random.randrange(5)
        self.desk.put(
            *[self.random.choice((task, MARKER + task))] * self.random.randint(1, 3), front=self.random.random() < 0.2
        )

    def start(self) -> None:
        worker = self.worker()
        started = self.desk.start(worker, self.random.randint(0, 3))
        self.held[worker] += range(started.first, started.first + len(started.entries))

    def finish(self) -> None:
        worker = self.worker()
        self.desk.call(ops.finish_tasks(self.desk.q, worker, self.some(worker)))

    def stop(self) -> None:
        worker = self.worker()
        self.desk.call(ops.stop_tasks(self.desk.q, worker, self.some(worker)))

    def retry(self) -> None:
        worker = self.worker()
        for one in self.some(worker):
            self.desk.retry(worker, one, limit=3, counter="failures" if self.random.random() < 0.8 else "")

    def fail(self) -> None:
        worker = self.worker()
        for one in self.some(worker)[:1]:
            self.desk.fail(worker, one)

    def die(self) -> None:
        self.gone(lambda worker: ops.fail_worker(self.desk.q, worker, 2))

    def leave(self) -> None:
        self.gone(lambda worker: ops.stop_work(self.desk.q, worker, 2))

    def gone(self, step: Callable[[str], ops.Command[ops.ReleasedClaims]]) -> None:
        """In steps, with a cancel in between; afterwards it comes back."""
        worker = self.worker()
        while self.desk.call(step(worker)).more:
            self.check()
            if self.random.random() < 0.3:
                self.cancel()
        self.held[worker] = []
        self.desk.enter(worker, keep_failed=2)

    def cancel(self) -> None:
        task = b"%d" % self.random.randrange(5)
        self.desk.call(ops.cancel_task(self.desk.q, self.random.choice((task, MARKER + task))))

    def cancel_all(self) -> None:
        self.desk.call(ops.cancel_all(self.desk.q))
        self.purge()

    def delete(self) -> None:
        self.desk.call(ops.delete_queue(self.desk.q))
        self.purge()

    def purge(self) -> None:
        if self.random.random() < 0.8:
            self.desk.call(ops.purge_queue(self.desk.q, self.random.choice((1, 1000))))

    def check(self) -> None:
        seen = self.desk.call(ops.inspect(self.desk.q))
        assert seen.waiting == len(self.desk.waiting())
        came = seen.counts.get("enqueued", 0)
        went = sum(seen.counts.get(name, 0) for name in ("finished", "failed", "cancelled", "deleted", "dropped"))
        assert came == went + seen.waiting + seen.running

    def end(self) -> None:
        desk = self.desk
        while desk.call(ops.purge_queue(desk.q)):
            pass
        for worker in self.held:
            desk.call(ops.stop_work(desk.q, worker))
        desk.enter("Z")
        while desk.call(ops.inspect(desk.q)).waiting:
            started = desk.start("Z", 1)
            desk.call(ops.finish_tasks(desk.q, "Z", [started.first]))
        desk.start("Z", 1)
        desk.call(ops.stop_work(desk.q, "Z"))
        assert desk.client.exists(desk.q.base) == 0
        assert_no_leaks(desk.client, desk.prefix, ["{Q1}:failed", "{Q1}:aside", "{Q1}:aside:*"])
        assert desk.client.zcard(desk.q.failed) == len(
            list(desk.client.scan_iter(f"{desk.q.base}:aside:*", count=1000))
        )
        desk.wipe()
