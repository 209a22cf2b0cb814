"""One run: start everything, inject faults, repair everything, wait, end everything."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.chaos.aftermath import (
    BASES,
    LEAVES_WITHIN,
    note_batches,
    note_dead_letters,
    note_keys,
    pause_schedules,
    wait_drained,
    wait_for_schedules,
)
from benchmarks.chaos.children import Children, Role
from benchmarks.chaos.clock import ServerClock, build_clock
from benchmarks.chaos.cluster_faults import CLUSTER_FAULTS, finish_moves
from benchmarks.chaos.faults import FAULTS, inject
from benchmarks.chaos.foreign import ForeignProducer
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.probe import probing
from benchmarks.chaos.rows import Database
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.servers import Cluster, Servers, until
from benchmarks.chaos.workload import ROOM
from tests.support.proxy import FaultProxy
from worqr.embedded import find_server
from worqr.errors import UsageError

ServerKind = Literal["valkey", "redis", "cluster"]
PAUSES = (0.2, 2.0)
"""Seconds between two faults."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    server: ServerKind
    minutes: float
    seed: int
    peers: int = 4
    producers: int = 2
    spoilt: float = 0.0
    """Records a second that a foreign producer writes wrongly."""
    program: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The output of a run besides its ledger."""

    faults: Counter[str]
    started: Counter[str]
    left_out: list[str]
    """Faults that could not be injected on this machine, and why."""
    drained: float
    seconds: float


def program_of(plan: Plan) -> Path:
    """The server's program.

    Raises:
        UsageError: it is not installed.
    """
    if plan.program is not None:
        return plan.program
    if plan.server == "redis":
        found = shutil.which("redis-server")
        if found is None:
            raise UsageError("redis-server is not on the PATH: install it, or name one with --program")
        return Path(found)
    return find_server()


@contextmanager
def open_scene(plan: Plan, folder: Path) -> Generator[tuple[Scene, list[str]]]:
    """Servers, proxy and processes, and which faults cannot be injected; all of it is gone after the block."""
    program, left_out = program_of(plan), list[str]()
    clock: ServerClock | str = "clock jumps are injected on a single server only"
    if plan.server != "cluster":
        clock = build_clock(folder)
    if isinstance(clock, str):
        left_out.append(f"clock jumps: {clock}")
    servers = Cluster(program, folder) if plan.server == "cluster" else Servers(program, folder, _or_none(clock))
    ledger = Ledger(folder, "world")
    children = Children(folder, ledger, plan.seed, replicas=1 if servers.clustered else 0)
    proxy: FaultProxy | None = None
    try:
        servers.start()
        if servers.clustered:
            left_out.append("latency: clients of a cluster find its nodes by themselves, past the proxy")
        else:
            proxy = FaultProxy("127.0.0.1", servers.nodes[0].port)
        with probing(servers, ledger, BASES[ROOM]):
            yield Scene(servers, children, ledger, random.Random(f"{plan.seed} faults"), proxy), left_out
    finally:
        children.close()
        if proxy is not None:
            proxy.close()
        servers.close()
        ledger.close()


def _or_none(clock: ServerClock | str) -> ServerClock | None:
    return None if isinstance(clock, str) else clock


def run(plan: Plan, folder: Path) -> Outcome:
    """Run it; the ledger is in `folder` afterwards."""
    began = time.monotonic()
    rows = Database(folder)
    rows.create()
    with open_scene(plan, folder) as (scene, left_out):
        for role, count in (("peer", plan.peers), ("producer", plan.producers)):
            for _ in range(count):
                scene.start(_role(role))
        _trouble(scene, plan)
        _repair(scene)
        _end(scene, "producer")
        drained = wait_drained(scene, rows)
        wait_for_schedules(scene)
        pause_schedules(scene)
        drained += wait_drained(scene, rows)
        rows.note_committed(scene.ledger)
        note_batches(scene)
        note_dead_letters(scene)
        drained += wait_drained(scene, rows)  # dropped dead letters release the follow-ups that were held for them
        _end(scene, "peer")
        note_keys(scene)
        started = Counter(f"{process.role}s" for process in scene.children.processes.values())
        return Outcome(scene.faults, started, left_out, drained, time.monotonic() - began)


def _role(name: str) -> Role:
    return "peer" if name == "peer" else "producer"


def _trouble(scene: Scene, plan: Plan) -> None:
    """Inject faults for the time of the plan."""
    faults = CLUSTER_FAULTS if scene.servers.clustered else FAULTS
    until(lambda: all(map(scene.children.works, scene.children.processes.values())), "peers and producers at work")
    end = time.monotonic() + plan.minutes * 60
    following = time.monotonic()
    foreign = ForeignProducer(scene, plan.spoilt)
    while time.monotonic() < end:
        scene.agenda.run_due()
        foreign.write_due()
        if time.monotonic() >= following:
            inject(scene, faults)
            following = time.monotonic() + scene.rng.uniform(*PAUSES)
        for process in scene.children.bury():
            if process.role == "peer" or not scene.calm:
                scene.start(process.role)
        time.sleep(0.02)


def _repair(scene: Scene) -> None:
    """Undo all faults; the server's clock ends where it was furthest, so that nothing is due far in the future."""
    scene.calm = True
    scene.agenda.run_all()
    for process in scene.children.processes.values():
        scene.children.thaw(process)
    for node in scene.servers.nodes:
        node.ask("CONFIG", "SET", "maxmemory", 0)
    if isinstance(scene.servers, Cluster):
        finish_moves(scene.servers)
    clock = scene.servers.clock
    if clock is not None and clock.offset != clock.furthest:
        clock.move_to(clock.furthest)
        scene.ledger.write("clock", offset=clock.offset)
    while len(scene.children.of("peer")) < 2:
        scene.start("peer")


def _end(scene: Scene, role: Role) -> None:
    """Tell all processes of a role to leave, and wait until they have."""
    for process in scene.children.of(role):
        scene.children.terminate(process)
    everybody = ("up", "frozen", "leaving", "killed")
    end = time.monotonic() + LEAVES_WITHIN
    while (there := scene.children.of(role, *everybody)) and time.monotonic() < end:
        time.sleep(0.05)
        scene.children.bury()
    scene.children.end_hung(there)
    for process in there:
        process.popen.wait()
    scene.children.bury()
