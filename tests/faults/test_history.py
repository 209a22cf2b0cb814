"""The history tells the truth, whatever becomes of leaders and workers; and it takes the memory that the documents name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import worqr
from tests.ops.driver import Desk
from tests.peer.tools import eventually, spying, until
from tests.support.children import Child
from tests.support.leaks import assert_no_leaks, dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.test_metrics import values
from worqr import ops
from worqr.history_records import COUNTERS, MINUTE_RECORDS, OUTCOMES, TEN_MINUTE_RECORDS, decode_records, run_bucket
from worqr.keys import QueueKeys, RegistryKeys
from worqr.metrics.fleet import FleetMetrics, FleetReader, FleetSnapshot
from worqr.metrics.prometheus import exposition, fleet_collector
from worqr.testing.bench_run import bench_scripts

CHILD = Path(__file__).parent / "child_counted.py"
SLEEPS = (5, 5, 10, 20, 40, 80)
"""Milliseconds of the runs that return, in turn."""


class Account:
    """What the test itself knows of the tasks that it has enqueued."""

    def __init__(self) -> None:
        self.enqueued = self.failing = self.retrying = 0

    async def enqueue(self, queue: worqr.Queue, number: int) -> None:
        """Of twenty tasks, one fails for good and two fail once."""
        tasks: list[bytes] = []
        for n in range(self.enqueued, self.enqueued + number):
            match n % 20:
                case 7:
                    tasks.append(b"fail %d" % n)
                    self.failing += 1
                case 3 | 13:
                    tasks.append(b"retry %d" % n)
                    self.retrying += 1
                case _:
                    tasks.append(b"ok %d %d" % (SLEEPS[n % len(SLEEPS)], n))
        self.enqueued += number
        await queue.enqueue(*tasks)


async def settled(queue: worqr.Queue) -> int:
    info = await queue.info()
    return info.waiting + info.running + info.scheduled


async def begun(queue: worqr.Queue) -> None:
    """The leader has stored the first record of the queue. What happens in the 3 s before it is lost with that leader."""
    with trio.fail_after(PATIENCE):
        while not (await queue.history(3)).total("enqueued"):
            await trio.sleep(0.05)


async def workers(mesh: worqr.Mesh) -> int:
    return len(await mesh.workers())


async def killed(child: Child, took: list[float]) -> None:
    """Kill it in the middle of its work, and keep what it has printed until then."""
    child.kill()
    await printed(child, took)


async def printed(child: Child, took: list[float]) -> None:
    while True:
        try:
            line = await child.line()
        except AssertionError:  # it has ended, and everything is read
            return
        if line.startswith("took "):
            took.append(float(line.split()[1]))


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_sums_and_run_times_are_true_while_leaders_and_workers_die(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    mesh, account, took = worqr.Mesh(server.url, prefix=prefix, patience=20), Account(), list[float]()
    arguments = (CHILD, server.url, prefix, "Q1")
    async with mesh.connect():
        q = mesh.queue("Q1")
        scans: Counter[str] = Counter()
        with spying(
            server, prefix
        ) as spy:  # the history counts from zero if the leader has read the queue before its first task
            first = spawn(*arguments)
            await first.line_with("leads")
            await until(lambda: scans.update(spy.calls()) or scans["inspect"])
        await account.enqueue(q, 3000)
        await begun(q)
        second = spawn(*arguments)
        await second.line_with("joined")
        await account.enqueue(q, 3000)
        await killed(first, took)  # the leader
        await second.line_with("leads")
        await account.enqueue(q, 2000)
        third = spawn(*arguments)
        await third.line_with("joined")
        await killed(second, took)  # the next leader
        await third.line_with("leads")
        await account.enqueue(q, 2000)
        await eventually(lambda: settled(q), 0, PATIENCE * 3)
        await eventually(lambda: workers(mesh), 1)
        third.send("leave")
        await printed(third, took)

        history, counts = await q.history(60), (await q.info()).counts
        snapshot = await FleetReader(mesh).read()
    sums = {name: history.total(name) for name in COUNTERS}
    assert sums == {name: counts.get(name, 0) for name in COUNTERS}
    assert (sums["enqueued"], sums["failed"]) == (account.enqueued, account.failing)
    assert sums["finished"] == account.enqueued - account.failing
    assert account.retrying <= sums["retried"] + sums["stalled"]
    assert sums["retried"] <= account.retrying
    assert sums["claimed"] == sums["finished"] + sums["failed"] + sums["retried"] + sums["stalled"] + sums["stopped"]
    # a worker that is killed loses the run times of its last second
    assert 0 < history.runs.count <= sums["finished"]
    measured = sorted(took)[int(0.95 * len(took))]
    estimate = history.runs.quantile(0.95)
    assert estimate is not None
    assert abs(run_bucket(estimate) - run_bucket(measured)) <= 1, (estimate, measured)
    assert account.enqueued == 10_000
    scraped = scrape(snapshot)
    assert {name: scraped.get(f'worqr_tasks_total{{event="{name}",queue="Q1"}}', 0) for name in COUNTERS} == sums
    runs = {outcome: scraped.get(f'worqr_runs_total{{outcome="{outcome}",queue="Q1"}}', 0) for outcome in OUTCOMES}
    assert runs["ok"] == history.runs.count == scraped['worqr_run_seconds_count{queue="Q1"}']
    assert runs["raised"] <= sums["failed"] + sums["retried"]


def scrape(snapshot: FleetSnapshot) -> dict[str, float]:
    """What Prometheus gets."""
    text, _ = exposition(fleet_collector(FleetMetrics(300).samples(snapshot)), "")
    return values(text.decode())


# Memory


def test_a_hundred_histories_of_three_days_take_24_mb_and_expire(own_server: Server, prefix: str) -> None:
    """All rings are as long as they get: the script has written every place of them, with the clock moved on."""
    with own_server.client() as client:
        desk = Desk(client, prefix)
        moved = bench_scripts()["sample_queue"]
        client.script_load(moved.source)
        keys = RegistryKeys(prefix)

        def sample(queue: QueueKeys, minutes: int) -> None:
            # in the middle of a minute: the clock is that of the server and what is set, and a real minute may end meanwhile
            seconds, micros = client.time()
            client.set(f"{keys.base}:clock", f"{began + minutes * 60_000 - seconds * 1000 - micros // 1000}")
            call = ops.sample_queue(queue, create=True)
            client.evalsha(moved.sha, 1, call.base, *call.args)

        began = client.time()[0] // 60 * 60_000 + 30_000
        queues = [QueueKeys(prefix, f"Q{n}") for n in range(100)]
        before = int(client.info("memory")["used_memory"])
        for minutes in range(10 * TEN_MINUTE_RECORDS):
            if minutes % 10 == 0 or minutes >= 10 * TEN_MINUTE_RECORDS - MINUTE_RECORDS:
                sample(queues[0], minutes)
        whole = [client.get(queues[0].history), client.get(queues[0].history10)]
        assert [len(list(decode_records(ring or b""))) for ring in whole] == [MINUTE_RECORDS, TEN_MINUTE_RECORDS]
        for queue in queues[1:]:
            for minutes in range(0, 30, 10):
                sample(queue, minutes)
        desk.call(ops.note_histories(keys, [queue.name for queue in queues]))
        used = int(client.info("memory")["used_memory"]) - before
        assert used <= 24_000_000
        client.delete(f"{keys.base}:clock")
        assert_no_leaks(client, prefix)
        assert len(dump(client, prefix)) == 201
        desk.wipe()
