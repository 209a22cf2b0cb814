"""A mesh with something of everything in it, and for every script one call that has much to do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import msgspec

from tests.ops.batches import OTHER, REASON, TOKEN, Opened, follow_up, opened
from tests.ops.driver import BOOM, FUTURE, KEEPALIVE, LEASE, PAST, Desk, job
from tests.ops.schedules import DEF, TASK, T, declare, declared, fire_schedule
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER, BatchKeys, LaneKeys, LimitKeys, QueueKeys, RegistryKeys, RoomKeys
from worqr.ops import Child, OutboxMessage, ScheduleRow, Tick, Wait

KEPT = {"result_ttl": "60000"}
"""Of a job whose result is kept for a minute."""
KEEP = {"done": "3 60000000 1000000", "tags": "red\nblue"}
"""Of a job that is kept when it has ended, as one of the last three, and has two tags."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Claims of A: on a raw task, on a job that failed once, on one with a blocked twin, a marked one, and on the last member of
    a batch; the claims under which tasks failed and were undecodable, and a member of a batch failed; and that on a workflow. And
    the state of the scene when
    it was set."""

    raw: int
    job: int
    twin: int
    marked: int
    member: int
    failed: int
    undecodable: int
    failed_member: int
    workflow: int
    keys: list[tuple[bytes, int, bytes]]
    numbers: dict[str, int]
    starts: dict[str, int]


NO_SCENE = Scene(1, 2, 3, 4, 5, 6, 7, 8, 9, [], {}, {})
"""For calls that are only looked at."""


def set_scene(desk: Desk) -> Scene:
    """A holds claims, B waits for tasks, C is being recovered. A suspect, raw tasks, jobs and a reference without a record wait;
    two jobs are due, two blocked, one has expired. Results are kept, an id is reserved, and A has a failure handler. There are
    batches, see `_set_batches`."""
    desk.register("A", "B", "C", queues=["Q1"])
    desk.beat("A", lease_ms=LEASE)
    desk.client.delete(desk.g.worker("C"))
    desk.call(ops.condemn_worker(desk.g, "C", None))
    desk.call(ops.post_scan(desk.g, ["Q1"], b"\x81\xa2at\x01"))
    desk.call(ops.read_snapshot(desk.g))
    desk.call(ops.note_queues(desk.g, ["Q1", "Q2"]))
    desk.call(ops.note_histories(desk.g, ["Q1", "Q2"]))
    desk.call(ops.sample_queue(desk.q, create=True, since=7))
    desk.call(ops.declare_shards(desk.g, {"hot": 8}))
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1000, last=0, limits="1000 100000/60000"))
    rules = {"limit": "1 5/60000", "weights": {"gold": 5}}
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1000, last=0, lanes=msgspec.msgpack.encode(rules)))
    desk.run("A", "laned", lane="gold")
    desk.call(ops.set_lane(desk.q, "bronze", "pause", "why", 10**10))
    for _ in range(2):
        ended = desk.run("A", "done", fields=KEPT, **KEEP)
        desk.call(ops.finish_tasks(desk.q, "A", [ended], {ended: ("json", b"1")}))
    failed = desk.run("A", "lost", fields=KEPT, **KEEP)
    desk.fail("A", failed)
    undecodable, raw, job, marked = desk.hold("A", b"broken", b"x", b"x", b"marked")
    desk.fail("A", undecodable, undecodable=True)
    desk.retry("A", job)
    [job] = desk.take("A", 1)
    desk.call(ops.cancel_task(desk.q, b"marked"))
    failed_member, member = _set_batches(desk)
    workflow = _set_workflows(desk)
    twin = desk.run("A", "runs", fields=KEPT, **KEEP)
    desk.hold("C", b"x", b"y")
    desk.run("C", "dies")
    for twin_of in ("runs", "dies"):
        assert desk.dispatch(twin_of, b"twin", **KEEP).outcome == "blocked"
    later = desk.hold("B", b"x", b"stale")
    desk.stall(b"suspect")
    for one in later:
        desk.retry("B", one)
    desk.call(ops.cancel_task(desk.q, b"stale"))
    desk.put(b"x", b"y", MARKER)
    desk.dispatch("waits", unique_for=60_000, **KEEP)
    desk.dispatch("sent", row=SENT_ROW)
    desk.call(ops.lease_outbox(desk.g, OUTBOX, "A", 1000, '{"rows":1}'))
    desk.dispatch("too late", expires="0")
    desk.dispatch("due", run_at=FUTURE, **KEEP)
    desk.dispatch("soon", run_at=FUTURE)
    desk.client.zadd(desk.q.due, {"soon": PAST})
    desk.enter("A", on_failure=True, result_ttl_ms=60_000)
    for n, lane in enumerate(("gold", "gold", "silver", "silver")):
        desk.dispatch(f"laned {n}", lane=lane)
    desk.client.hset(LaneKeys(desk.q).base, "refile", "-")  # as after a change of rules
    assert Opened(desk, desk.q, "open", SCATTERED).add("member waits").outcome == "created"
    desk.client.sadd(desk.q.hungry, "B")
    _, waiting = desk.send(ops.enqueue(desk.q, [b"more"], max_length=0))
    for n in range(2):  # for which there is room as soon as one task leaves the queue
        desk.send(ops.enqueue(desk.q, [b"more"], max_length=waiting, waiter=f"scene-{n}"))
    desk.client.expire(RoomKeys(desk.q).waiters, 1000)
    for n in range(22):  # in a second that is still to come, so that other workers that join are added up
        desk.client.xadd(desk.g.log, {"kind": "joined" if n else "more", "n": 1}, id=f"{FUTURE}-{n}")
    claims = raw, job, twin, marked, member, failed, undecodable, failed_member, workflow
    return Scene(*claims, _everything(desk), dict(desk.numbers), dict(desk.starts))


LIFE = "77"
"""Of the workflows that have children."""
SCATTERED = "5ca77e12ed" * 3
ROW, SENT_ROW, OUTBOX = "0a" * 16, "0b" * 16, "0c" * 16
"""Of a database: a row that was not sent, one that was, and the id of the outbox."""
AFAR = "afa12" * 6
HELD = {"then_options": msgspec.msgpack.encode({"lane": "gold"}), "then_task": b"next"}
"""A follow-up of a batch of another home."""


def _set_batches(desk: Desk) -> tuple[int, int]:
    """Set batches: one that is open, with members that are due, wait in another queue and, later, in this one; one that has
    ended, with a failed member; one whose last member A runs; one that is to be forgotten, with a follow-up elsewhere; the closed
    part of a batch whose home is another queue, with the report to it; and a follow-up that waits for the end of such a batch.
    Return the claim under which the member failed, and that of A."""
    far = QueueKeys(desk.prefix, "Q2")
    ended = opened(desk, "ended", token=OTHER, meta='{"a":"b"}', **follow_up("otherwise", far))
    failed = ended.run("A", "member failed")
    ended.seal()
    desk.fail("A", failed)
    last = opened(desk, "last", on_failed="cancel", **follow_up("then", desk.q), **follow_up("otherwise", desk.q))
    member = last.run("A", "last member", fields=KEPT)
    last.seal()
    scattered = opened(desk, "open", token=SCATTERED)
    scattered.add("member elsewhere", queue=far)
    scattered.add("member due", run_at=FUTURE)
    afar = opened(desk, "afar", home=far, token=AFAR)
    ran = afar.run("A", "member afar")
    sealed = desk.call(ops.seal_batch(far, "afar", AFAR))
    assert sealed is not None
    [(base, version)] = sealed.parts
    desk.call(afar.close_part(base, version))
    desk.call(ops.finish_tasks(desk.q, "A", [ran]))
    desk.call(ops.hold_follow_ups(desk.q, "ff" * 16, far.base, "far away", HELD))
    desk.call(ops.keep_follow_ups(desk.q, "ff" * 16, 0))
    opened(desk, "old", token="01d" * 8, keep_ms=0, **follow_up("otherwise", far)).seal()
    return failed, member


def _set_workflows(desk: Desk) -> int:
    """Set workflows: one that is suspended without a time, one until a time that has passed, and one that A runs, which has taken
    an event, and whose child waits; and one that is suspended until its children have ended. Return the claim on the third."""
    held = [desk.run("A", name, workflow=True, fields=KEPT) for name in ("suspended", "overdue", "flows", "parent")]
    wait = Wait("a", "event", "approved", "{}")
    desk.call(ops.suspend_task(desk.q, "A", held[0], [wait]))
    desk.call(ops.suspend_task(desk.q, "A", held[1], [wait._replace(at_ms=FUTURE)]))
    desk.client.zadd(desk.q.suspended, {"overdue": PAST})
    for name in ("flows", "parent"):
        desk.client.hset(desk.q.active(name), "life", LIFE)
    desk.call(ops.note_children(desk.q, "A", held[2], [Child("c", desk.q.base, "child"), Child("d", "else:{Q}", "d")]))
    children = [Child("far", "elsewhere:{Q}", "far child"), Child("lost", desk.q.base, "lost child")]
    desk.call(ops.note_children(desk.q, "A", held[3], children))
    wait_for_them = Wait("all", "children", about="far\nlost")
    desk.call(ops.suspend_task(desk.q, "A", held[3], [wait_for_them]))
    desk.client.zadd(desk.q.suspended, {"parent": PAST})
    parent = {"base": desk.q.base, "id": "flows", "life": LIFE, "key": "c", "after": "0"}
    desk.dispatch("child", workflow=True, parent=parent, run_at=FUTURE)
    desk.call(ops.send_event(desk.q, "flows", "approved", b"json 2"))
    assert desk.call(ops.suspend_task(desk.q, "A", held[2], [wait])).status == "ready"
    return held[2]


RESET = """
for i = 1, 2 do
  local cursor = '0'
  repeat
    local found = redis.call('SCAN', cursor, 'MATCH', ARGV[i], 'COUNT', 10000)
    for _, key in ipairs(found[2]) do redis.call('UNLINK', key) end
    cursor = found[1]
  until cursor == '0'
end
for i = 3, #ARGV, 3 do redis.call('RESTORE', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
"""


def reset_scene(desk: Desk, scene: Scene) -> None:
    """Restore its first state, in one request: tests do so ten thousand times."""
    desk.numbers, desk.starts = dict(scene.numbers), dict(scene.starts)
    desk.client.eval(RESET, 0, *desk.patterns, *chain.from_iterable(scene.keys))


def fingerprint(desk: Desk) -> dict[bytes, tuple[bool, bytes]]:
    """All keys but the producers', as they lie in the server: quicker than a dump, and harder to read."""
    return {key: (ttl > 0, _in_order(value)) for key, ttl, value in _everything(desk) if b":producer:" not in key}


def _in_order(value: bytes) -> bytes:
    """The dump of a hash table or of a set without its order and its checksum: the server may rehash it at any moment."""
    return bytes(sorted(value[:-10])) if value[:1] in {b"\x02", b"\x04"} else value


def _everything(desk: Desk) -> list[tuple[bytes, int, bytes]]:
    keys = desk.all_keys()
    with desk.client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
            pipe.dump(key)
        found = pipe.execute()
    return [(key, max(ttl, 0), value) for key, ttl, value in zip(keys, found[::2], found[1::2], strict=True) if value]


def member_of(q: QueueKeys) -> dict[str, Any]:
    """The option `batch` of a dispatch to the open batch."""
    return {"token": SCATTERED, "home": q.base, "id": "open", "number": 1, "keep": "60000"}


CALLS: dict[str, Callable[[QueueKeys, RegistryKeys, Scene], Command[Any]]] = {
    "cancel_batch": lambda q, g, scene: ops.cancel_batch(q, "open", SCATTERED, REASON),
    "cancel_part": lambda q, g, scene: ops.cancel_part(q, SCATTERED, 1, q.base, "open", "60000", REASON),
    "check_batches": lambda q, g, scene: ops.check_batches(q),
    "close_part": lambda q, g, scene: ops.close_part(q, TOKEN, 1, q.base, "last", "60000"),
    "drop_outbox": lambda q, g, scene: ops.drop_outbox(q, [OutboxMessage(b"report " + AFAR.encode(), b"?", "", ())]),
    "list_batches": lambda q, g, scene: ops.list_batches(q),
    "open_batch": lambda q, g, scene: ops.open_batch(
        *(q, "new", "ee" * 16), open_for_ms=60_000, keep_ms=60_000, parent=member_of(q), facts=follow_up("then", q)
    ),
    "open_part": lambda q, g, scene: ops.open_part(q, "open", SCATTERED, "elsewhere"),
    "hold_follow_ups": lambda q, g, scene: ops.hold_follow_ups(q, "dd" * 16, "elsewhere", "b", HELD),
    "keep_follow_ups": lambda q, g, scene: ops.keep_follow_ups(q, "ff" * 16, 0),
    "put_follow_up": lambda q, g, scene: ops.put_follow_up(
        q, "ff" * 16, "then", 1, msgspec.msgpack.encode({"added": 1, "finished": 1})
    ),
    "read_batch": lambda q, g, scene: ops.read_batch(q, "open"),
    "read_part": lambda q, g, scene: ops.read_part(q, SCATTERED),
    "report_part": lambda q, g, scene: ops.report_part(q, "last", TOKEN, q.base, 1, closed=True, counts="1 0 1 0 0 1"),
    "seal_batch": lambda q, g, scene: ops.seal_batch(q, "open", SCATTERED),
    "take_outbox": lambda q, g, scene: ops.take_outbox(q),
    "adopt_claims": lambda q, g, scene: ops.adopt_claims(q, "new", ["A"], [7, scene.raw, 8]),
    "find_claims": lambda q, g, scene: ops.find_claims(q, "0", 10_000, 0),
    "adopt_worker": lambda q, g, scene: ops.adopt_worker(g, "nobody", "Q1"),
    "cancel_all": lambda q, g, scene: ops.cancel_all(q),
    "cancel_claims": lambda q, g, scene: ops.cancel_claims(q, [scene.raw, scene.twin, 1], reason="why"),
    "cancel_job": lambda q, g, scene: ops.cancel_job(q, "runs", "why"),
    "cancel_lane": lambda q, g, scene: ops.cancel_lane(q, "gold", reason="why"),
    "cancel_tagged": lambda q, g, scene: ops.cancel_tagged(q, "red", reason="why"),
    "cancel_task": lambda q, g, scene: ops.cancel_task(q, b"x"),
    "drop_kept_jobs": lambda q, g, scene: ops.drop_kept_jobs(q, [1, scene.failed - 1]),
    "forget_tagged": lambda q, g, scene: ops.forget_tagged(q, "red", reason="why"),
    "list_kept": lambda q, g, scene: ops.list_kept(q),
    "list_tagged": lambda q, g, scene: ops.list_tagged(q, "red"),
    "run_again": lambda q, g, scene: ops.run_again(q, scene.failed - 1, "r" * 22),
    "trim_kept": lambda q, g, scene: ops.trim_kept(q),
    "condemn_worker": lambda q, g, scene: ops.condemn_worker(g, "B", b"RUN 0"),
    "count_errors": lambda q, g, scene: ops.count_errors(q, "failed", 0),
    "declare_schedules": lambda q, g, scene: ops.declare_schedules(g, [("s", DEF)], replace=True),
    "declare_shards": lambda q, g, scene: ops.declare_shards(g, {"hot": 9, "Q2": 4}),
    "delete_queue": lambda q, g, scene: ops.delete_queue(q),
    "dispatch_jobs": lambda q, g, scene: ops.dispatch_jobs(
        q,
        [
            job("new"),
            job("new 2", lane="gold", max_length=999, waiter="room-1 1"),
            job("waits", b"b"),
            job("runs", b"b"),
            job("due", b"b"),
            job(None),
            job("member", batch=member_of(q)),
            job("row", row=ROW),
            job("row again", row=SENT_ROW),
        ],
    ),
    "drop_aside": lambda q, g, scene: ops.drop_aside(q, "undecodable", [scene.undecodable]),
    "drop_history": lambda q, g, scene: ops.drop_history(q),
    "drop_outdated_schedules": lambda q, g, scene: ops.drop_outdated_schedules(g),
    "drop_outdated_topics": lambda q, g, scene: ops.drop_outdated_topics(g),
    "drop_schedules": lambda q, g, scene: ops.drop_schedules(g, 0),
    "drop_shards": lambda q, g, scene: ops.drop_shards(g, "hot", 8),
    "enqueue": lambda q, g, scene: ops.enqueue(q, [b"new", MARKER], max_length=1000, waiter="room-1"),
    "enqueue_traced": lambda q, g, scene: ops.enqueue_traced(ops.enqueue(q, [b"new", MARKER]), '{"traceparent":"x"}'),
    "fail_task": lambda q, g, scene: ops.fail_task(q, "A", scene.twin, BOOM),
    "fail_worker": lambda q, g, scene: ops.fail_worker(q, "C", 1),
    "find_aside": lambda q, g, scene: ops.find_aside(q, "failed", ["lost", "lost", "nobody"]),
    "finish_tasks": lambda q, g, scene: ops.finish_tasks(
        q, "A", [scene.raw, scene.job, scene.twin, scene.marked, scene.member, 1], {scene.twin: ("bytes", b"result")}
    ),
    "find_task": lambda q, g, scene: ops.find_task(q, b"raw", 9),
    "fire_schedules": lambda q, g, scene: fire_schedule(
        q, "s", T, judged_at=T, run_at=T, overlap="cancel", task=TASK, meta='{"traceparent":"00-1-2-01"}'
    ),
    "forget_queues": lambda q, g, scene: ops.forget_queues(g, ["old", "Q1", "Q2"]),
    "forget_worker": lambda q, g, scene: ops.forget_worker(g, "C"),
    "index_schedule": lambda q, g, scene: ops.index_schedule(g, "stored", q, "7", DEF, times="daily"),
    "page_schedules": lambda q, g, scene: ops.page_schedules(g, ""),
    "read_outcomes": lambda q, g, scene: ops.read_outcomes(q, ["stored", "nobody"]),
    "read_schedules": lambda q, g, scene: ops.read_schedules(q, ["stored", "nobody"]),
    "lease_prefix": lambda q, g, scene: ops.lease_prefix(g, "report/", "me", 1000),
    "survey_schedules": lambda q, g, scene: ops.survey_schedules(g, ["stored", "nobody"]),
    "store_schedule": lambda q, g, scene: ops.store_schedule(q, "stored", TASK),
    "unindex_schedule": lambda q, g, scene: ops.unindex_schedule(
        g, ops.ScheduleRow("stored", DEF, 0, None, None, (), False, b"", version="7", home=q.name)
    ),
    "unstore_schedule": lambda q, g, scene: ops.unstore_schedule(q, "stored"),
    "inspect": lambda q, g, scene: ops.inspect(q),
    "job_status": lambda q, g, scene: ops.job_status(q, "runs", 0),
    "keep_worker_alive": lambda q, g, scene: ops.keep_worker_alive(
        g, "A", 2, keepalive_ms=KEEPALIVE, lease_ms=LEASE, running=1, room=2
    ),
    "list_aside": lambda q, g, scene: ops.list_aside(q, "failed", 9),
    "list_due_schedules": lambda q, g, scene: ops.list_due_schedules(g, 0),
    "list_lanes": lambda q, g, scene: ops.list_lanes(q),
    "list_marks": lambda q, g, scene: ops.list_marks(q, [scene.raw, scene.marked]),
    "lease_outbox": lambda q, g, scene: ops.lease_outbox(g, OUTBOX, "A", 60_000, '{"rows":2}'),
    "list_outboxes": lambda q, g, scene: ops.list_outboxes(g),
    "take_permits": lambda q, g, scene: ops.take_permits(
        LimitKeys(g.prefix, "Q2"), "9 50/60000", ["next", "then"], 5, 10_000
    ),
    "look_at_limit": lambda q, g, scene: ops.look_at_limit(LimitKeys(g.prefix, "Q2")),
    "note_limit": lambda q, g, scene: ops.note_limit(g, "Q2", "tokens"),
    "list_limits": lambda q, g, scene: ops.list_limits(g),
    "return_permit": lambda q, g, scene: ops.return_permit(LimitKeys(g.prefix, "Q2"), "held", 3),
    "renew_permits": lambda q, g, scene: ops.renew_permits(LimitKeys(g.prefix, "Q2"), ["held"], 10_000),
    "declare_topics": lambda q, g, scene: ops.declare_topics(g, "Q1", b"{}", ["order.*"]),
    "read_topics": lambda q, g, scene: ops.read_topics(g),
    "drop_topics": lambda q, g, scene: ops.drop_topics(g, "Q1"),
    "list_own_claims": lambda q, g, scene: ops.list_own_claims(q, "A"),
    "list_policies": lambda q, g, scene: ops.list_policies(q),
    "list_queues": lambda q, g, scene: ops.list_queues(g),
    "list_running": lambda q, g, scene: ops.list_running(q),
    "list_schedules": lambda q, g, scene: ops.list_schedules(g),
    "list_shards": lambda q, g, scene: ops.list_shards(g),
    "list_ended": lambda q, g, scene: ops.list_ended(q, 9),
    "list_events": lambda q, g, scene: ops.list_events(g, 9),
    "list_jobs": lambda q, g, scene: ops.list_jobs(q, "waiting"),
    "list_tasks": lambda q, g, scene: ops.list_tasks(q, 9),
    "list_workers": lambda q, g, scene: ops.list_workers(g),
    "look_at_workers": lambda q, g, scene: ops.look_at_workers(g),
    "map_work": lambda q, g, scene: ops.map_work(g, "A", "Q2"),
    "note_event": lambda q, g, scene: ops.note_event(g, "paused", who="Ada", queue="Q1", text="why"),
    "note_histories": lambda q, g, scene: ops.note_histories(g, ["Q3"], dropped="Q1"),
    "note_progress": lambda q, g, scene: ops.note_progress(
        q, "A", [(scene.raw, 0.5, "half"), (scene.twin, None, "some"), (1, 1.0, "gone")]
    ),
    "note_queues": lambda q, g, scene: ops.note_queues(g, ["Q3"]),
    "note_runs": lambda q, g, scene: ops.note_runs(
        q, "A", 100, {"ok": 2, "r3": 2, "rs": 9}, [b'[1,null,"ok",2,"A",""]'], 9
    ),
    "ask_worker": lambda q, g, scene: ops.ask_worker(g, "A", "quiet", "5"),
    "override_schedule": lambda q, g, scene: ops.override_schedule(g, "s", b"other times"),
    "pause": lambda q, g, scene: ops.pause(q, "why"),
    "pause_schedule": lambda q, g, scene: ops.pause_schedule(g, "s", paused=True),
    "post_scan": lambda q, g, scene: ops.post_scan(g, ["Q3"], b"\x81\xa2at\x02"),
    "promote_due": lambda q, g, scene: ops.promote_due(q),
    "promote_jobs": lambda q, g, scene: ops.promote_jobs(q, ["due", "waits", "nobody"]),
    "purge_queue": lambda q, g, scene: ops.purge_queue(q),
    "read_history": lambda q, g, scene: ops.read_history(q, 1, 60),
    "read_job": lambda q, g, scene: ops.read_job(q, "runs"),
    "read_payload": lambda q, g, scene: ops.read_payload(q, "runs"),
    "read_runs": lambda q, g, scene: ops.read_runs(q),
    "read_snapshot": lambda q, g, scene: ops.read_snapshot(g),
    "read_result": lambda q, g, scene: ops.read_result(q, "done", 0),
    "reconcile": lambda q, g, scene: ops.reconcile(q, "A", [scene.raw, 1]),
    "renew_schedules": lambda q, g, scene: ops.renew_schedules(g, ["s", "t"]),
    "resume": lambda q, g, scene: ops.resume(q),
    "retry_aside": lambda q, g, scene: ops.retry_aside(q, "failed", [scene.failed, scene.failed_member]),
    "retry_task": lambda q, g, scene: ops.retry_task(q, "A", scene.twin, BOOM, counter="failures", limit=10),
    "rewind_schedules": lambda q, g, scene: ops.rewind_schedules(g),
    "shorten_sent": lambda q, g, scene: ops.shorten_sent(q, [SENT_ROW, ROW]),
    "sample_queue": lambda q, g, scene: ops.sample_queue(q, create=True, since=7, age_ms=1),
    "save_state": lambda q, g, scene: ops.save_state(q, "A", scene.twin, 1, "", b"page 7"),
    "suspend_task": lambda q, g, scene: ops.suspend_task(
        q, "A", scene.twin, [Wait("a", "event", "approved", "{}"), Wait("s", "sleep", in_ms=10**9)], progress=True
    ),
    "note_children": lambda q, g, scene: ops.note_children(
        q, "A", scene.workflow, [Child("c", q.base, "child"), Child("new", q.base, "new child")]
    ),
    "store_end": lambda q, g, scene: ops.store_end(q, "elsewhere:{Q}", "parent", LIFE, "far", 7, "finished", b"none "),
    "cancel_child": lambda q, g, scene: ops.cancel_child(q, q.base, "flows", LIFE, "child", "why"),
    "look_for_child": lambda q, g, scene: ops.look_for_child(q, q.base, "parent", LIFE, "lost", 0, "lost child"),
    "send_event": lambda q, g, scene: ops.send_event(q, "suspended", "approved", b"json 1"),
    "end_wait": lambda q, g, scene: ops.end_wait(q, "suspended", "approved"),
    "refuse_event": lambda q, g, scene: ops.refuse_event(q, "A", scene.workflow, "a"),
    "start_tasks": lambda q, g, scene: ops.start_tasks(q, "A", 99, 9),
    "set_lane": lambda q, g, scene: ops.set_lane(q, "gold", "limit", "5"),
    "set_limits": lambda q, g, scene: ops.set_limits(q, "5 100/60000"),
    "start_work": lambda q, g, scene: ops.start_work(
        q, "new", max_stalls=3, keep_failed=9, last=0, limits="500", lanes=b""
    ),
    "start_worker": lambda q, g, scene: ops.start_worker(g, "new", keepalive_ms=KEEPALIVE, facts=[("host", "h")]),
    "file_tasks": lambda q, g, scene: ops.file_tasks(
        q, "A", dict.fromkeys([scene.raw, scene.job, scene.twin, scene.marked, 1], "gold")
    ),
    "stop_tasks": lambda q, g, scene: ops.stop_tasks(q, "A", [scene.raw, scene.job, scene.twin, scene.marked, 1]),
    "stop_work": lambda q, g, scene: ops.stop_work(q, "A", 2),
    "stop_worker": lambda q, g, scene: ops.stop_worker(g, "A"),
    "tick_schedules": lambda q, g, scene: ops.tick_schedules(
        g, [Tick(ScheduleRow("s", DEF, T, None, None, (), False, b"%d\n" % T), T + 1, T + 2, T + 2, [T], T)], led=1
    ),
    "unmap_work": lambda q, g, scene: ops.unmap_work(g, "A", "Q1"),
}


OUTCOME = b"failed 2000 70 1000\nValueError\nno such tenant"


def store_schedule(desk: Desk) -> None:
    """A stored schedule, whose call is in the queue."""
    desk.client.hset(f"{desk.q.base}:schedules", "stored", b"7 1 4 \x80task")
    desk.client.hset(desk.q.outcomes, "stored", OUTCOME)
    desk.client.zadd(desk.g.schedules_stored, {"stored": 0})
    desk.client.hset(desk.g.schedules, mapping={"def stored": DEF, "ver stored": "7", "home stored": desk.q.name})


def outdate(desk: Desk) -> None:
    """A schedule and a subscription of a deploy that runs no more."""
    declare(desk, "outdated", owner="1 shop")
    desk.call(ops.declare_topics(desk.g, "Q1", b"{}", ["order.paid"], "1 shop"))
    for worker in desk.client.smembers(desk.g.registered):
        desk.client.hset(desk.g.info(worker.decode()), mapping={"app": "shop", "deploy": 2})


def take_permit(desk: Desk, keys: LimitKeys) -> None:
    """A permit is held, a lease has ended, and a start has left the window."""
    desk.call(ops.take_permits(keys, "9 50/60000", ["held"], 5, 60_000))
    desk.client.zadd(keys.held, {"lapsed": PAST})
    desk.client.zadd(keys.waiting, {"waits": FUTURE, "gave up": PAST})
    desk.client.hset(keys.permits, mapping={"waits": "~3", "gave up": "~2"})
    desk.client.rpush(keys.moments("60000"), PAST)


BEFORE: dict[str, Callable[[Desk], object]] = {
    **dict.fromkeys(
        ("lease_prefix", "page_schedules", "read_outcomes", "read_schedules", "survey_schedules", "unstore_schedule"),
        lambda desk: store_schedule(desk),
    ),
    "adopt_claims": lambda desk: desk.client.rpush(desk.q.claim(7), "held by nobody"),
    "check_batches": lambda desk: desk.client.zadd(
        BatchKeys(desk.q).batches, dict.fromkeys(("old", "open", "last", "nobody"), PAST)
    ),
    "drop_schedules": declared,
    **dict.fromkeys(
        ("declare_topics", "drop_topics", "read_topics"),
        lambda desk: desk.call(ops.declare_topics(desk.g, "Q1", b"{}", ["order.paid"])),
    ),
    **dict.fromkeys(
        ("take_permits", "return_permit", "renew_permits", "look_at_limit"),
        lambda desk: take_permit(desk, LimitKeys(desk.prefix, "Q2")),
    ),
    **dict.fromkeys(
        ("note_limit", "list_limits"), lambda desk: desk.client.hset(desk.g.limits, mapping={"old": "1 ", "Q2": "9e9 "})
    ),
    **dict.fromkeys(("drop_outdated_schedules", "drop_outdated_topics"), outdate),
    "trim_kept": lambda desk: desk.client.delete(*[key for key in desk.all_keys() if b":done:" in key]),
    "forget_queues": lambda desk: desk.client.zadd(desk.g.queues, {"old": PAST, "Q1": PAST}),
    "forget_worker": lambda desk: desk.call(ops.unmap_work(desk.g, "C", "Q1")),
    "list_ended": lambda desk: desk.call(ops.note_runs(desk.q, "A", 100, {"ok": 2}, [b'[1,null,"ok",2,"A",""]'], 9)),
    "read_runs": lambda desk: desk.call(ops.note_runs(desk.q, "A", 100, {"ok": 2, "r3": 2}, [], 9)),
    "list_queues": lambda desk: desk.client.zadd(desk.g.queues, {"old": PAST}),
    "override_schedule": declared,
    "pause_schedule": declared,
    "resume": lambda desk: desk.call(ops.pause(desk.q, "why")),
    "purge_queue": lambda desk: desk.call(ops.delete_queue(desk.q)),
    "renew_schedules": declared,
    "rewind_schedules": lambda desk: declared(desk, last=FUTURE),
    "tick_schedules": declared,
    "stop_worker": lambda desk: desk.call(ops.unmap_work(desk.g, "A", "Q1")),
}
"""The preparation that a script needs before its call."""


def prepared(desk: Desk, scene: Scene, name: str) -> Scene:
    """The scene as it is before the call of the script `name`, with what only this call needs."""
    for prepare in (BEFORE.get(name), BEFORE["renew_schedules"] if "schedule" in name else None):
        if prepare:
            prepare(desk)
    return replace(scene, keys=_everything(desk), numbers=dict(desk.numbers), starts=dict(desk.starts))


def next_call(desk: Desk, scene: Scene, name: str) -> Command[Any]:
    """The call of the script `name`, which will have something to do."""
    if name in BEFORE:
        BEFORE[name](desk)
    return CALLS[name](desk.q, desk.g, scene)
