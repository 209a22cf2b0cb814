"""The faults that only a cluster has: slots that move while they are used, and failovers, planned and not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress

import redis

from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.ledger import now
from benchmarks.chaos.scene import NotNow, Scene
from benchmarks.chaos.servers import Cluster, Node, until
from benchmarks.chaos.workload import PREFIX, QUEUES

LOST_BEFORE = 1.0
"""Seconds before a primary dies in which what it acknowledged may not have reached its replica."""
LOST_AFTER = 3.0
"""Seconds after the failover in which a frozen primary may still have acknowledged something."""


def _well(scene: Scene) -> Cluster:
    servers = scene.servers
    if not isinstance(servers, Cluster) or not servers.is_well() or scene.moving:
        raise NotNow
    return servers


def move_slot(scene: Scene) -> None:
    """Move the slot of a queue, or of the registry, key by key. For a while each of two nodes has some keys of the slot."""
    cluster = _well(scene)
    name = scene.rng.choice([*(f"{PREFIX}:{{{queue}}}" for queue in QUEUES), f"{{{PREFIX}}}:Workers"])
    slot, pause, began = cluster.nodes[0].ask("CLUSTER", "KEYSLOT", name), scene.rng.choice([0, 0.02, 0.1]), now()
    source = cluster.owner_of_slot(slot)
    target = scene.rng.choice([node for node in cluster.primaries if node is not source])
    scene.note("slot moved", name)
    scene.moving = True
    with suppress(redis.RedisError):
        _move(cluster, slot, source, target, pause)
    _finish_move(scene, cluster, began)


def _finish_move(scene: Scene, cluster: Cluster, began: float) -> None:
    """End a move that was begun, also if the memory of a node is full for a while, or a replica has taken its place.

    Other things go on meanwhile: the end of the fault that is in the way is one of them.
    """
    try:
        if not cluster.is_well():
            raise TimeoutError
        finish_moves(cluster)
    except (redis.RedisError, TimeoutError):
        if scene.calm:
            time.sleep(0.1)
        scene.agenda.add(0.2, lambda: _finish_move(scene, cluster, began))
    else:
        scene.moving = False
        scene.troubled(began, "slot moved")


def _move(cluster: Cluster, slot: int, source: Node, target: Node, pause: float) -> None:
    source_id, target_id = source.id, target.id
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    until = time.monotonic() + 1.0  # then without pauses: producers may add keys as fast as they move
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 5 if time.monotonic() < until else 100):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        if time.monotonic() < until:
            time.sleep(pause)
    for node in (target, source, *cluster.primaries):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def finish_moves(cluster: Cluster) -> None:
    """End the moves of slots that a failover interrupted: no node may be left with a part of a slot.

    The node that has the slot lists the other one, or is listed by it, in its own line of CLUSTER NODES: ``[93->-ID]`` while it
    exports the slot, ``[93-<-ID]`` while it imports it.
    """
    until(cluster.is_well, "a cluster that is well")
    primaries = {node.id: node for node in cluster.primaries}
    targets: dict[int, Node | None] = {}
    for node in primaries.values():
        own = next(line for line in node.ask("CLUSTER", "NODES").decode().splitlines() if "myself" in line)
        for slot, arrow, other in re.findall(r"\[(\d+)-([<>])-(\w+)\]", own):
            target = node if arrow == "<" else primaries.get(other)
            targets[int(slot)] = target or targets.get(int(slot))
    for slot, target in targets.items():
        owner = cluster.owner_of_slot(slot)
        if target is None or target is owner:
            for node in primaries.values():
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", owner.id)
        else:
            _move(cluster, slot, owner, target, 0)


def fail_over(scene: Scene) -> None:
    """A planned failover, which loses nothing."""
    cluster, began = _well(scene), now()
    primary = scene.rng.choice(cluster.primaries)
    cluster.replica_of(primary).ask("CLUSTER", "FAILOVER")
    scene.note("CLUSTER FAILOVER")
    _once_well(scene, lambda: scene.troubled(began, "planned failover"))


def kill_primary(scene: Scene) -> None:
    """Kill a primary for longer than its replica waits, or for less."""
    cluster, began = _well(scene), now()
    node = scene.rng.choice(cluster.primaries)
    node.kill()
    scene.note("SIGKILL of a primary")
    scene.agenda.add(scene.rng.choice([0, 1, 5, 8]), lambda: _back(scene, node.start, began))


def freeze_primary(scene: Scene) -> None:
    """Freeze a primary; its replica takes over if that lasts."""
    cluster, began = _well(scene), now()
    node = scene.rng.choice(cluster.primaries)
    node.freeze()
    scene.note("SIGSTOP of a primary")
    scene.agenda.add(scene.rng.choice([0.5, 1, 6]), lambda: _back(scene, node.thaw, began))


def kill_replica(scene: Scene) -> None:
    cluster = _well(scene)
    node = scene.rng.choice([node for node in cluster.nodes if not node.is_primary])
    node.kill()
    scene.note("SIGKILL of a replica")
    scene.agenda.add(scene.rng.choice([0, 2]), node.start)


def _back(scene: Scene, revive: Callable[[], None], began: float) -> None:
    revive()

    def note() -> None:
        scene.troubled(began, "failover")
        scene.ledger.write("failover", begin=began - LOST_BEFORE, end=now() + LOST_AFTER)

    _once_well(scene, note)


def _once_well(scene: Scene, then: Callable[[], None]) -> None:
    """Look again and again, while other things go on."""
    give_up = time.monotonic() + 120

    def look() -> None:
        if scene.servers.is_well() or time.monotonic() > give_up:
            then()
        elif scene.calm:
            time.sleep(0.1)
            scene.agenda.add(0, look)
        else:
            scene.agenda.add(0.2, look)

    scene.agenda.add(0.3, look)


CLUSTER_FAULTS: list[tuple[float, Fault]] = [
    *FAULTS,
    (20, move_slot),
    (8, fail_over),
    (8, kill_primary),
    (6, freeze_primary),
    (3, kill_replica),
]
