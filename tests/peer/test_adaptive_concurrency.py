"""``concurrency="auto"``: the rule with made-up loads, what it is fed with, and that a peer does what it says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio

import worqr
from tests.peer.tools import Held, until
from worqr.hosting import peer_factory
from worqr.peer import scheduler as scheduling
from worqr.peer.scheduler import (
    AUTO_MAX,
    AUTO_START,
    LAG_HIGH,
    ConcurrencyController,
    CpuMeter,
    Sample,
    Scheduler,
    Share,
    default_processes,
    usable_cores,
)

pytestmark = pytest.mark.one_server

IDLE = Sample(cpu=0, lag=0, peak=0, short=False)


@dataclass
class Load:
    """Made-up work: what the process looks like while `n` runs are held.

    Attributes:
        cores: what the machine has.
        cpu: cores that a run uses while it has the machine for itself.
        one_core: only one thread at a time computes (Python code).
        blocks: seconds of each run during which the loop stands.
        queues: seconds that a run computes on the loop now and then: the fuller the loop, the later it gets to it.
        lasts: seconds of a run: when there are fewer places, runs go on over their number for so long.
        waiting: how many tasks there are at most.
    """

    cores: float = 2
    cpu: float = 0
    one_core: bool = False
    blocks: float = 0
    queues: float = 0
    lasts: float = 0.1
    waiting: int = 1_000_000
    noise: float = 0
    held: float = 0
    seen: list[int] = field(default_factory=list)

    def second(self, concurrency: int) -> Sample:
        """The next second."""
        before = self.held
        wanted = min(concurrency, self.waiting)
        self.held = wanted
        if self.lasts > 1 and wanted < before:  # some of them still go on
            self.held = max(wanted, before * (1 - 1 / self.lasts))
        n = (before + self.held) / 2 if self.lasts > 1 else self.held
        most = 1.0 if self.one_core else self.cores
        cpu = min(n * self.cpu, most)
        lag = 0.0005 + n * self.blocks / 2
        if self.queues:
            lag += min(self.queues * cpu / max(1 - cpu, 0.001), n * self.queues)
        elif self.one_core and cpu >= 0.99:
            lag += n * 0.005
        jitter = 1 + random.uniform(-self.noise, self.noise)
        peak = round(max(before, self.held) if self.lasts > 1 else self.held)
        return Sample(min(cpu * jitter, most), lag * jitter, peak, short=self.waiting > concurrency)

    def run(self, pace: ConcurrencyController, seconds: int) -> list[int]:
        """What the rule makes of it, second by second."""
        found = [pace.next_concurrency(self.second(pace.concurrency)) for _ in range(seconds)]
        self.seen += found
        return found


def settled(load: Load, *, start: int = AUTO_START, seconds: int = 120) -> list[int]:
    """The last minute."""
    return load.run(ConcurrencyController(load.cores, start), seconds)[-60:]


# Where it settles


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("start", [1, AUTO_START, AUTO_MAX])
@pytest.mark.parametrize("noise", [0, 0.05])
def test_runs_that_use_a_core_each_come_to_the_number_of_cores(cores: int, start: int, noise: float) -> None:
    found = settled(Load(cores, cpu=1, noise=noise), start=start)
    assert set(found) <= {cores, cores + 1}, found


@pytest.mark.parametrize("cores", [2, 4, 8])
@pytest.mark.parametrize("noise", [0, 0.05])
def test_python_code_in_threads_comes_near_to_the_number_of_cores(cores: int, noise: float) -> None:
    found = settled(Load(cores, cpu=1, one_core=True, noise=noise))
    assert max(found) <= cores + 2, found


@pytest.mark.parametrize("run", [0.01, 0.05, 0.5])
def test_coroutines_that_compute_come_near_to_the_number_of_cores(run: float) -> None:
    found = settled(Load(2, cpu=1, one_core=True, blocks=run, lasts=run))
    assert max(found) <= 4, found


def test_coroutines_that_block_the_loop_without_computing_are_few_too() -> None:
    found = settled(Load(8, cpu=0, blocks=0.05))
    assert max(found) <= 4, found


@pytest.mark.parametrize("lasts", [0.01, 1, 30])
def test_runs_that_wait_climb_to_the_most(lasts: float) -> None:
    load = Load(2, cpu=0.0005, lasts=lasts)
    found = load.run(ConcurrencyController(2), 120)
    assert found[5] >= 300
    assert found[10:] == [AUTO_MAX] * 110


@pytest.mark.parametrize("best", [20, 150, 600])
@pytest.mark.parametrize("start", [1, AUTO_START, AUTO_MAX])
@pytest.mark.parametrize("noise", [0, 0.05])
def test_what_does_both_settles_where_the_cores_are_well_used(best: int, start: int, noise: float) -> None:
    load = Load(4, cpu=4 / best, noise=noise)
    found = settled(load, start=start)
    assert 0.6 * best <= min(found)
    assert max(found) <= 1.1 * best
    assert 0.72 * best <= sum(found) / len(found) <= 0.95 * best


@pytest.mark.parametrize("noise", [0, 0.05])
def test_coroutines_that_compute_now_and_then_keep_the_loop_well_used(noise: float) -> None:
    found = settled(Load(2, cpu=0.01, one_core=True, queues=0.002, noise=noise))
    assert min(found) >= 60, found
    assert max(found) <= 120, found
    assert sum(found) / len(found) >= 75


def test_long_runs_are_not_taken_for_an_overload_that_goes_on() -> None:
    load = Load(4, cpu=0.1, lasts=60)  # 36 of them use nine tenths
    found = load.run(ConcurrencyController(4, 80), 600)
    assert min(found) >= 20, found
    assert set(found[-100:]) <= set(range(24, 40)), found[-100:]


def test_it_finds_its_way_when_the_work_changes() -> None:
    pace = ConcurrencyController(2)
    assert Load(2, cpu=0.001).run(pace, 30)[-1] == AUTO_MAX
    assert max(Load(2, cpu=1).run(pace, 60)[-30:]) <= 3
    assert max(Load(2, cpu=0.001).run(pace, 15)) >= 500


# When it stays


def test_it_does_not_grow_while_nothing_waits() -> None:
    pace = ConcurrencyController(2)
    for _ in range(100):
        assert pace.next_concurrency(IDLE) == AUTO_START
    assert set(Load(2, waiting=AUTO_START).run(pace, 50)) == {AUTO_START}
    assert set(Load(2, waiting=3).run(pace, 50)) == {AUTO_START}


def test_it_does_not_grow_while_what_there_is_is_not_used() -> None:
    pace = ConcurrencyController(2)
    for _ in range(50):
        assert pace.next_concurrency(Sample(cpu=0, lag=0, peak=6, short=True)) == AUTO_START


def test_what_is_long_unused_fades_to_where_it_began() -> None:
    pace = ConcurrencyController(2, AUTO_MAX)
    found = [pace.next_concurrency(IDLE) for _ in range(200)]
    assert found[0] > 0.9 * AUTO_MAX
    assert sorted(found, reverse=True) == found
    assert found[-1] == AUTO_START


def test_it_does_not_shrink_for_an_overload_that_is_not_its_own() -> None:
    pace = ConcurrencyController(2, 100)
    assert pace.next_concurrency(Sample(cpu=2, lag=1, peak=0, short=False)) == 100


def test_it_does_not_shrink_again_before_the_first_time_has_taken_effect() -> None:
    pace = ConcurrencyController(2, 100)
    assert pace.next_concurrency(Sample(cpu=2, lag=0, peak=100, short=True)) == 75
    assert pace.next_concurrency(Sample(cpu=2, lag=0, peak=100, short=True)) == 75
    assert pace.next_concurrency(Sample(cpu=2, lag=0, peak=75, short=True)) == 56


def test_it_shrinks_from_what_was_used() -> None:
    pace = ConcurrencyController(2, AUTO_MAX)
    assert pace.next_concurrency(Sample(cpu=2, lag=0, peak=40, short=False)) == 30


def test_between_full_and_roomy_nothing_changes() -> None:
    pace = ConcurrencyController(4, 100)
    for sample in (Sample(3.3, 0, 100, True), Sample(0.1, 0.04, 100, True), Sample(0.8, 0.01, 100, True)):
        assert [pace.next_concurrency(sample) for _ in range(10)] == [100] * 10


def test_a_core_in_use_is_all_that_python_has_only_if_the_loop_waits_for_it() -> None:
    assert ConcurrencyController(8, 20).next_concurrency(Sample(cpu=1, lag=0.02, peak=20, short=True)) == 15
    assert ConcurrencyController(8, 20).next_concurrency(Sample(cpu=1, lag=0.001, peak=20, short=True)) == 40


def test_a_late_loop_leaves_one_and_a_full_cpu_as_many_as_there_are_cores() -> None:
    late, full = ConcurrencyController(8), ConcurrencyController(8)
    assert [late.next_concurrency(Sample(8, LAG_HIGH, late.concurrency, True)) for _ in range(10)][-1] == 1
    assert [full.next_concurrency(Sample(8, 0, full.concurrency, True)) for _ in range(10)][-1] == 8


def test_it_grows_by_doubling_until_it_was_too_much_and_then_with_care() -> None:
    pace = ConcurrencyController(4)

    def room() -> int:
        return pace.next_concurrency(Sample(0, 0, pace.concurrency, True))

    assert [room() for _ in range(4)] == [20, 40, 80, 160]
    assert pace.next_concurrency(Sample(4, 0, 160, True)) == 120
    assert [room() for _ in range(4)] == [121, 123, 127, 135]


def test_after_a_quiet_time_it_climbs_from_where_it_is() -> None:
    pace = ConcurrencyController(2)
    Load(2, cpu=0.0001).run(pace, 20)
    for _ in range(200):
        pace.next_concurrency(IDLE)
    assert Load(2, cpu=0.0001).run(pace, 3) == [2 * AUTO_START, 4 * AUTO_START, 8 * AUTO_START]


def test_the_largest_run_always_finds_room() -> None:
    pace = ConcurrencyController(2, 50)
    assert [pace.next_concurrency(Sample(2, 1, 50, True), least=50) for _ in range(5)] == [50] * 5


# What it is fed with


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "30000 100000\n"}, 0.3),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "70000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "60000 100000\n",
            },
            0.6,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/1\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "nonsense\n0::/\n", "sys/fs/cgroup/cpu.max": "1 0\n"}, None),
    ],
    ids=[
        "no files",
        "no quota",
        "version 2",
        "a parent",
        "the least counts",
        "version 1",
        "none in version 1",
        "nonsense",
    ],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (usable_cores(tmp_path / "none") if cores is None else cores)


@pytest.mark.parametrize(("quota", "processes"), [(10_000, 1), (100_000, 1), (110_000, 2)])
def test_a_quota_bounds_the_default_number_of_processes(
    tmp_path: Path, quota: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in (("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", f"{quota} 100000\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert default_processes(tmp_path) == processes
    assert default_processes(tmp_path / "none") == 64


def test_what_threads_could_not_run_for_want_of_a_core_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([{"1": 0, "2": 5 * 10**9}, {"1": 3 * 10**9, "3": 10**9}])  # thread 2 has ended, 3 is new
    monkeypatch.setattr(scheduling, "_wait_times", lambda: next(waits))
    monkeypatch.setattr(scheduling.time, "process_time", iter([1.0, 1.5]).__next__)
    monkeypatch.setattr(scheduling.time, "monotonic", iter([10.0, 12.0]).__next__)
    assert CpuMeter().wanted() == (0.5 + 3 + 1) / 2


def test_a_thread_that_computes_wants_a_core() -> None:
    meter = CpuMeter()
    busy(0.2)
    assert meter.wanted() > 0.1


async def test_a_sample_says_how_much_cpu_was_used_and_how_late_the_loop_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 0.3)
    scheduler = Scheduler(10)
    scheduler.take(Share(), 1, first=True)
    seen = await watched(scheduler, lambda: busy(0.4))
    assert seen.cpu > 0.1
    assert seen.lag > 0.1
    assert (seen.peak, seen.short) == (1, False)


async def test_it_looks_seldom_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    scheduler = Scheduler(10)
    monkeypatch.setattr(Scheduler, "is_limiting", property(lambda _self: bool(looks.append(1))))
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 0.4)
    monkeypatch.setattr(scheduling, "IDLE_EVERY", 0.2)
    monkeypatch.setattr(scheduling, "PROBE_EVERY", 0.001)
    await watched(scheduler, lambda: None)
    assert len(looks) <= 3
    scheduler.take(Share(), 1, first=True)
    for _ in range(3):  # the machine may stand still, but hardly each time
        looks.clear()
        await watched(scheduler, lambda: None)
        if len(looks) > 6:
            break
    assert len(looks) > 6


def busy(seconds: float) -> None:
    """Compute in the loop's own thread for so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def watched(scheduler: Scheduler, meanwhile: Callable[[], object]) -> Sample:
    """What a pacer sees while something is done."""
    seen: list[Sample] = []
    pace = ConcurrencyController(2)
    pace.next_concurrency = lambda sample, least=1: seen.append(sample) or 10  # type: ignore[method-assign,func-returns-value,assignment]
    scheduler.auto = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduling.adjust_once, scheduler, pace)
        await trio.testing.wait_all_tasks_blocked()
        meanwhile()
    return seen[0]


async def test_a_sample_says_the_most_that_was_held_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 0.01)
    scheduler = Scheduler(100)

    def work() -> None:
        scheduler.take(Share(), 30, first=True)
        scheduler.used -= 25

    assert (await watched(scheduler, work)).peak == 30
    assert (await watched(scheduler, lambda: None)).peak == 5


async def test_what_was_decided_last_gets_its_time_before_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(10)
    scheduler.auto = True
    scheduler.take(Share(), 12, first=True)
    found: list[int] = []

    async def watch(scheduler: Scheduler) -> Sample:
        await trio.lowlevel.checkpoint()
        found.append(scheduler.used)
        return IDLE

    monkeypatch.setattr(scheduling, "_measure", watch)
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 60)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduling.adjust_once, scheduler, ConcurrencyController(2))
        await trio.testing.wait_all_tasks_blocked()
        assert found == []
        scheduler.used -= 2
    assert found == [10]
    scheduler.take(Share(), 12, first=True)
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 0.01)
    await scheduling.adjust_once(scheduler, ConcurrencyController(2))  # but not for ever
    assert found == [10, 22]


async def test_it_goes_on_from_a_number_that_was_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [IDLE])
    scheduler, pace = Scheduler("auto"), ConcurrencyController(2)
    scheduler.set_concurrency(40)
    scheduler.set_concurrency("auto")
    await scheduling.adjust_once(scheduler, pace)
    assert scheduler.concurrency == pace.concurrency == 38
    scheduler.set_concurrency(7)
    await scheduling.adjust_once(scheduler, pace)
    assert scheduler.concurrency == 7


# In a peer


def scripted(monkeypatch: pytest.MonkeyPatch, samples: Sequence[Sample]) -> None:
    """Let pacers see these, the last one for ever, without any clock."""
    left = list(samples)

    async def watch(scheduler: Scheduler) -> Sample:
        await trio.sleep(0.01)
        seen = left.pop(0) if len(left) > 1 else left[0]
        return Sample(seen.cpu, seen.lag, scheduler.used, scheduler.is_limiting)

    monkeypatch.setattr(scheduling, "_measure", watch)


async def test_auto_climbs_to_hundreds_while_runs_wait(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [Sample(0.1, 0.001, 0, False)])
    held = Held()
    async with mesh.join(concurrency="auto") as peer, trio.open_nursery() as nursery:
        await mesh.queue("Q1").enqueue(*(b"%d" % n for n in range(700)))
        await nursery.start(partial(peer.serve, "Q1", held))
        await held.wait(640, within=30)
        held.gate.set()
        await held.wait(700, within=30)
        nursery.cancel_scope.cancel()


async def test_auto_shrinks_while_the_cpu_is_full(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "usable_cores", lambda *_: 3.0)
    scripted(monkeypatch, [Sample(3, 0.001, 0, False)])
    left = 2000

    async def handler(_task: bytes) -> None:
        nonlocal left
        left -= 1
        await trio.sleep(0.01)

    async with mesh.join(concurrency=40) as peer, trio.open_nursery() as nursery:
        await mesh.queue("Q1").enqueue(*(b"%d" % n for n in range(left)))
        await nursery.start(partial(peer.serve, "Q1", handler))
        peer.set_concurrency("auto")
        await until(lambda: peer._engine.scheduler.concurrency == 3 and peer._engine.scheduler.running <= 3, within=30)
        assert left > 0
        peer.set_concurrency(500)  # a number ends it
        await until(lambda: left == 0 and peer._engine.scheduler.running == 0, within=30)
        assert peer._engine.scheduler.concurrency == 500
        nursery.cancel_scope.cancel()


async def test_a_peer_that_computes_does_not_grow_and_one_that_waits_does(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, in tenths of seconds; where it settles is measured by the benchmark, not here."""
    monkeypatch.setattr(scheduling, "ADJUST_EVERY", 0.1)
    monkeypatch.setattr(scheduling, "PROBE_EVERY", 0.01)
    monkeypatch.setattr(scheduling, "usable_cores", lambda *_: 2.0)

    async def computes(_task: bytes) -> None:
        busy(0.03)
        await trio.lowlevel.checkpoint()

    queue = mesh.queue("Q1")
    async with mesh.join(concurrency="auto") as peer, trio.open_nursery() as nursery:
        await queue.enqueue(*(b"%d" % n for n in range(2000)))
        async with trio.open_nursery() as serving:
            await serving.start(partial(peer.serve, "Q1", computes))
            await until(lambda: peer._engine.scheduler.concurrency <= AUTO_START / 2, within=30)
            serving.cancel_scope.cancel()
        await until(lambda: peer._engine.scheduler.running == 0)
        for name in ("LAG_HIGH", "LAG_LOW", "CPU_HIGH", "CPU_LOW"):  # other programs may keep the machine busy
            monkeypatch.setattr(scheduling, name, getattr(scheduling, name) * 100)
        held = Held()
        await nursery.start(partial(peer.serve, "Q1", held))
        await held.wait(200, within=30)
        await queue.delete()
        held.gate.set()
        await until(lambda: peer._engine.scheduler.running == 0)
        nursery.cancel_scope.cancel()


def test_a_worker_takes_that_number_unless_it_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_factory, "default_processes", lambda: 7)
    peers = worqr.Mesh()._peers
    assert peers._peer_settings({}).processes == 7
    assert peers._peer_settings({"processes": 3}).processes == 3
