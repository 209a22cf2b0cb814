"""A mesh with something of everything in it, and for every script one call that has much to do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.ops.driver import BOOM, Desk
from worqr import ops
from worqr.call import Call
from worqr.keys import MARKER


@dataclass(frozen=True, slots=True)
class Scene:
    """Claims of A: on a raw task, on a job, and one that is marked. And all that the scene was when it was set."""

    raw: int
    job: int
    marked: int
    keys: list[tuple[bytes, int, bytes]]
    numbers: dict[str, int]
    starts: dict[str, int]


def set_scene(desk: Desk) -> Scene:
    """A holds claims, B is hungry, C is being swept; a suspect, a raw task, a job and a reference to nothing wait."""
    desk.register("A", "B", "C", queues=["Q1"])
    desk.beat("A", lease_ms=60_000, keepalive_ms=60_000)
    desk.client.delete(desk.g.worker("C"))
    desk.call(ops.condemn_worker(desk.g, "C", None))
    desk.call(ops.post_waiting(desk.g, ["Q1"]))
    desk.call(ops.note_queues(desk.g, ["Q1", "Q2"]))
    failed, broken, raw, job, marked = desk.hold("A", b"failed", b"broken", b"x", b"x", b"marked")
    desk.fail("A", failed)
    desk.fail("A", broken, broken=True)
    desk.retry("A", job)
    [job] = desk.take("A", 1)
    desk.call(ops.cancel_task(desk.q, b"marked"))
    desk.hold("C", b"x", b"y")
    later = desk.hold("B", b"x", b"stale")
    desk.stall(b"suspect")
    for one in later:
        desk.retry("B", one)
    desk.call(ops.cancel_task(desk.q, b"stale"))
    desk.put(b"x", b"y", MARKER)
    desk.client.sadd(desk.q.hungry, "B")
    return Scene(raw, job, marked, _everything(desk), dict(desk.numbers), dict(desk.starts))


def reset_scene(desk: Desk, scene: Scene) -> None:
    """As it was, whatever has happened since."""
    desk.wipe()
    desk.numbers, desk.starts = dict(scene.numbers), dict(scene.starts)
    with desk.client.pipeline(transaction=False) as pipe:
        for key, ttl, value in scene.keys:
            pipe.restore(key, ttl, value)
        pipe.execute()


def fingerprint(desk: Desk) -> dict[bytes, tuple[bool, bytes]]:
    """All keys but the producers', as they lie in the server: quicker than a dump, and harder to read."""
    return {key: (ttl > 0, value) for key, ttl, value in _everything(desk) if b":producer:" not in key}


def _everything(desk: Desk) -> list[tuple[bytes, int, bytes]]:
    keys = desk.all_keys()
    with desk.client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
            pipe.dump(key)
        found = pipe.execute()
    return [(key, max(ttl, 0), value) for key, ttl, value in zip(keys, found[::2], found[1::2], strict=True) if value]


def _purge(desk: Desk, scene: Scene) -> Call[Any]:
    desk.call(ops.delete_queue(desk.q))
    return ops.purge_queue(desk.q)


def _forget(desk: Desk, scene: Scene) -> Call[Any]:
    desk.call(ops.unmap_work(desk.g, "C", "Q1"))
    return ops.forget_worker(desk.g, "C")


def _stop_worker(desk: Desk, scene: Scene) -> Call[Any]:
    desk.call(ops.unmap_work(desk.g, "A", "Q1"))
    return ops.stop_worker(desk.g, "A")


CALLS: dict[str, Callable[[Desk, Scene], Call[Any]]] = {
    "adopt_worker": lambda desk, scene: ops.adopt_worker(desk.g, "nobody", "Q1"),
    "cancel_all": lambda desk, scene: ops.cancel_all(desk.q),
    "cancel_task": lambda desk, scene: ops.cancel_task(desk.q, b"x"),
    "condemn_worker": lambda desk, scene: ops.condemn_worker(desk.g, "B", b"RUN 0"),
    "delete_queue": lambda desk, scene: ops.delete_queue(desk.q),
    "enqueue": lambda desk, scene: ops.enqueue(desk.q, [b"new", MARKER], max_length=99),
    "fail_task": lambda desk, scene: ops.fail_task(desk.q, "A", scene.job, BOOM, keep_failed=1),
    "fail_worker": lambda desk, scene: ops.fail_worker(desk.q, "C", 1),
    "finish_tasks": lambda desk, scene: ops.finish_tasks(desk.q, "A", [scene.raw, scene.job, scene.marked, 1]),
    "forget_worker": _forget,
    "inspect": lambda desk, scene: ops.inspect(desk.q),
    "keep_worker_alive": lambda desk, scene: ops.keep_worker_alive(
        desk.g, "A", 2, keepalive_ms=3000, lease_ms=2000, running=1, room=2
    ),
    "list_claims": lambda desk, scene: ops.list_claims(desk.q),
    "list_marks": lambda desk, scene: ops.list_marks(desk.q, [scene.raw, scene.marked]),
    "list_queues": lambda desk, scene: ops.list_queues(desk.g),
    "list_tasks": lambda desk, scene: ops.list_tasks(desk.q, 9),
    "list_workers": lambda desk, scene: ops.list_workers(desk.g),
    "look_at_workers": lambda desk, scene: ops.look_at_workers(desk.g),
    "map_work": lambda desk, scene: ops.map_work(desk.g, "A", "Q2"),
    "note_queues": lambda desk, scene: ops.note_queues(desk.g, ["Q3"]),
    "pause": lambda desk, scene: ops.pause(desk.q, "why"),
    "post_waiting": lambda desk, scene: ops.post_waiting(desk.g, ["Q3"]),
    "purge_queue": _purge,
    "reconcile": lambda desk, scene: ops.reconcile(desk.q, "A", [scene.raw, 1]),
    "resume": lambda desk, scene: ops.resume(desk.q),
    "retry_task": lambda desk, scene: ops.retry_task(desk.q, "A", scene.raw, BOOM, max_failures=10, keep_failed=9),
    "start_tasks": lambda desk, scene: ops.start_tasks(desk.q, "A", 99, 9),
    "start_work": lambda desk, scene: ops.start_work(desk.q, "new", max_stalls=3, keep_failed=9, last=0),
    "start_worker": lambda desk, scene: ops.start_worker(desk.g, "new", keepalive_ms=3000, facts=[("host", "h")]),
    "stop_tasks": lambda desk, scene: ops.stop_tasks(desk.q, "A", [scene.raw, scene.job, scene.marked, 1]),
    "stop_work": lambda desk, scene: ops.stop_work(desk.q, "A", 2),
    "stop_worker": _stop_worker,
    "unmap_work": lambda desk, scene: ops.unmap_work(desk.g, "A", "Q1"),
}
