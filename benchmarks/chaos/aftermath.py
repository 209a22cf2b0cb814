"""The end of a run: wait until all queues are empty, then write what is left in the servers to the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis
import trio

import worqr
from benchmarks.chaos.ledger import now
from benchmarks.chaos.rows import Database
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.servers import Node
from benchmarks.chaos.workload import HAND, HOMES, PREFIX, QUEUES, SCHEDULES, SPOILT, TICKS
from worqr.client.topics import MOST_PAUSE
from worqr.keys import PUBLISH
from worqr.stored_values import public_name

DRAINS_WITHIN: Final = MOST_PAUSE + 60
"""Seconds of patience with a slow machine; an idle one needs some ten. On a slow one, events wait for a subscriber whose
queue is full, up to the longest pause between two tries."""
LEAVES_WITHIN: Final = 120.0
WAITING: Final = (
    ("LLEN", ""),
    ("LLEN", ":suspects"),
    ("ZCARD", ":due"),
    ("SCARD", ":blocked"),
    ("HLEN", ":outbox"),
    ("ZCARD", ":suspended"),
)
BASES: Final = {
    **{queue: f"{PREFIX}:{{{queue}}}" for queue in QUEUES},
    PUBLISH: f"{PREFIX}:{{{PUBLISH}}}",
    **{f"{queue}-fail": f"{PREFIX}:{{{queue}}}-fail" for queue in QUEUES if queue != HAND},
}


def wait_drained(scene: Scene, rows: Database) -> float:
    """Wait until nothing waits, is due, is blocked or runs; what does not end is written. Returns the seconds it took."""
    began = time.monotonic()
    left = _wait(scene, lambda: {"the outbox": f"{count} rows"} if (count := rows.left()) else held(scene))
    for queue, counts in left.items():
        scene.ledger.write("undrained", queue=queue, left=counts)
    return time.monotonic() - began


def _wait(scene: Scene, look: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Look until there is nothing to see, twice in a row. Once that was in vain, later waits are short."""
    end, empty = time.monotonic() + (10 if scene.stuck else DRAINS_WITHIN), 0
    while True:
        seen = look()
        empty = 0 if seen else empty + 1
        if empty == 2:
            return seen
        if time.monotonic() > end:
            scene.stuck = True
            return seen
        time.sleep(0.3)


def held(scene: Scene) -> dict[str, str]:
    """The remaining contents of each queue, as text."""
    found: dict[str, str] = {}
    for queue, base in BASES.items():
        node = scene.servers.owner(base)
        counts = {f"{command} {end}".strip(): node.ask(command, base + end) for command, end in WAITING}
        if counts["ZCARD :suspended"] and scene.servers.clustered:
            _look_for_jobs(node, base)
        counts["in lanes"] = int(node.ask("HGET", f"{base}:lanes", "waiting") or 0)
        if any(counts.values()):
            found[queue] = str({name: count for name, count in counts.items() if count})
    for facts in batches(scene):
        if facts["state"] != "ended":
            found[f"batch {facts['name']}"] = facts["state"]
    for node, key in scene.servers.keys(f"{PREFIX}:{{*}}*:claims:*"):
        if count := node.ask("SCARD", key):
            found[key.decode()] = f"{count} claims"
    return found


def _look_for_jobs(node: Node, base: str) -> None:
    """Let the leader look at once for the jobs of suspended workflows, which a failover may have lost, and not in ten minutes."""
    for name in node.ask("ZRANGE", f"{base}:suspended", 0, -1):
        node.ask("ZADD", f"{base}:suspended", "XX", 0, name)


def batches(scene: Scene) -> Iterator[dict[str, Any]]:
    """The stored batches, as lines of the ledger have them."""
    for home in HOMES:
        node = scene.servers.owner(BASES[home])
        for name in node.ask("ZRANGE", f"{BASES[home]}:batches", 0, -1):
            key = f"{BASES[home]}:batch:{name.decode()}"
            kept = node.ask("HMGET", key, "state", "cancel_reason", "parent", "endings", "ended_at")
            state, reason, parent, endings, ended_at = kept
            sums = [0] * 5
            for part in node.ask("HVALS", f"{key}:parts"):
                for i, number in enumerate(part.split()[2:7]):
                    sums[i] += int(number)
            added, finished, failed, cancelled, lost = sums
            yield {
                "name": name.decode(),
                "state": (state or b"gone").decode(),
                "jobs": added,
                "finished": finished,
                "failed": failed + lost,
                "cancelled": cancelled,
                "reason": None if reason is None else reason.decode(),
                "home": home,
                "parent": "" if parent is None else parent.decode().split("\n")[2],
                "endings": int(endings or 0),
                "ended_ms": int(ended_at or 0),
            }


def note_batches(scene: Scene) -> None:
    """Write all batches."""
    for facts in batches(scene):
        scene.ledger.write("batch", **facts)


def wait_for_schedules(scene: Scene) -> None:
    """Wait until every schedule has fired a moment of the calm phase; write those that have not, and when it began."""
    node = scene.servers.owner(BASES[TICKS])
    seconds, microseconds = map(int, node.ask("TIME"))
    server_ms = seconds * 1000 + microseconds // 1000
    scene.ledger.write("calm", server_ms=server_ms, epoch=server_ms / 1000 - now())

    def silent() -> dict[str, str]:
        fired = scene.servers.owner(BASES[TICKS]).ask("HGETALL", f"{BASES[TICKS]}:fired")
        last = {name.decode(): int(value.split()[0]) for name, value in zip(fired[::2], fired[1::2], strict=True)}
        return {name: "" for name in SCHEDULES if last.get(name, 0) <= server_ms}

    for name in _wait(scene, silent):
        scene.ledger.write("silent", schedule=name)


def pause_schedules(scene: Scene) -> None:
    """Nothing is enqueued any more."""

    async def pause() -> None:
        mesh = worqr.Mesh(scene.servers.url, prefix=PREFIX, app="world")
        async with mesh.connect():
            for name in SCHEDULES:
                await mesh.pause_schedule(name)

    trio.run(pause)


def note_dead_letters(scene: Scene) -> None:
    """Write all dead-letter entries, then drop them as an operator would."""
    for queue, base in BASES.items():
        for which in ("failed", "broken"):
            node = scene.servers.owner(base)
            for claim in node.ask("ZRANGE", f"{base}:{which}", 0, -1):
                facts = node.ask("HGETALL", f"{base}:aside:{claim.decode()}")
                told = {name.decode(): value for name, value in zip(facts[::2], facts[1::2], strict=True)}
                words = {name: told.get(name, b"").decode("utf-8", "replace") for name in ("task", "id", "reason")}
                words["reason"] = public_name(words["reason"])
                if words["id"].startswith(SPOILT):
                    continue
                scene.ledger.write("dead", queue=queue, **words)

    async def drop() -> None:
        mesh = worqr.Mesh(scene.servers.url, prefix=PREFIX, app="world")
        async with mesh.connect():
            for name in QUEUES:
                queue = mesh.queue(name)
                for each in (queue, queue.failures):
                    await each.failed.drop_all()
                    await each.undecodable.drop_all()

    trio.run(drop)


def note_keys(scene: Scene) -> None:
    """Write every key that is left."""
    for pattern in (f"{PREFIX}:*", f"{{{PREFIX}}}:*"):
        for node, key in scene.servers.keys(pattern):
            try:
                kind, ttl = node.ask("TYPE", key).decode(), node.ask("PTTL", key)
            except redis.RedisError:
                continue
            if ttl != -2 and SPOILT.encode() not in key:  # it may have expired meanwhile
                expires = None if ttl < 0 else ttl / 1000
                scene.ledger.write("key", name=key.decode("utf-8", "replace"), type=kind, expires=expires)
