"""What holds for every script: it leaves everything unchanged when a key is not of its type, it goes on when memory is
full (or refuses, if it is there to fill it), it may come again, and it keeps to one slot of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.ops.batches import OTHER, TOKEN
from tests.ops.driver import KEEPALIVE, Desk, job, part_of
from tests.ops.scene import AFAR, CALLS, SCATTERED, Scene, fingerprint, next_call, reset_scene, set_scene
from tests.ops.schedules import declared
from tests.support.clusters import open_node
from worqr import ops
from worqr.command import Command
from worqr.keys import BatchKeys, QueueKeys
from worqr.lua import all_scripts, script

FILL_MEMORY = {
    *(
        "dispatch_jobs",
        "enqueue",
        "enqueue_traced",
        "run_again",
        "fire_schedules",
        "note_event",
        "note_histories",
        "note_progress",
        "note_queues",
    ),
    *("index_schedule", "store_schedule"),
    *("hold_follow_ups", "note_runs", "open_batch", "open_part", "sample_queue"),
}
READS = {each.name for each in all_scripts() if "no-writes" in each.source.split("\n", 1)[0]}
"""Scripts that only read: most take such a key for nothing."""
STRINGS = {
    *(":paused", ":leader", ":version", ":snapshot", ":watched", ":worker:A", ":worker:B", ":worker:C"),
    *(":history", ":history10"),
}


def test_there_is_a_call_for_every_script() -> None:
    assert set(CALLS) == {each.name for each in all_scripts()}


def keys_of(desk: Desk, call: Command[Any]) -> list[str]:
    """Keys that the script has touched in this call, and others that it may know the name of."""
    keys = desk.q if call.base == desk.q.base else desk.g
    names = [name for name, what in vars(type(keys)).items() if isinstance(what, property)]
    found = {
        getattr(keys, name)
        for name in names
        if name not in {"name", "display_name", "id_suffix"} and "channel" not in name
    }
    source = part_of(call.script.source, call.script.name)
    if isinstance(keys, QueueKeys):
        makers = [make for make in (keys.claims, keys.policy, keys.leaving) if desk.short(make("")) in source]
        found |= {make(worker) for make in makers for worker in "ABC"}
        if "'-fail'" in source:
            failures = QueueKeys(keys.prefix, keys.queue, failures=True)
            found |= {failures.base, failures.counts, failures.hungry}
        found |= {key for stem, key in batch_keys(keys) if f"'{stem}'" in source}
    return sorted(found | desk.touched_by(call))


def batch_keys(keys: QueueKeys) -> list[tuple[str, str]]:
    """Keys of the batches in the scene, each with the word of Lua that makes it."""
    batches, tokens = BatchKeys(keys), (TOKEN, OTHER, SCATTERED, AFAR)
    made = [
        (":batch:", make(each)) for make in (batches.batch, batches.parts) for each in ("ended", "last", "open", "old")
    ]
    made += [(":part:", make(token)) for make in (batches.part, batches.members) for token in tokens]
    return [*made, (":batches", batches.batches), (":outbox", batches.outbox)]


def accepted(desk: Desk, call: Command[Any]) -> bool:
    """False if the server refused it because of a key of a foreign type; no other refusal is expected."""
    try:
        desk.send(call)
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return False
    return True


@pytest.mark.sweep(keep=20)
@pytest.mark.parametrize("name", CALLS)
def test_a_key_of_a_foreign_type_is_an_error_before_anything_is_written(desk: Desk, name: str) -> None:
    scene = set_scene(desk)
    keys = keys_of(desk, next_call(desk, scene, name))
    refused = 0
    for key in keys:
        reset_scene(desk, scene)
        call = next_call(desk, scene, name)
        desk.client.delete(key)
        if desk.short(key) in STRINGS:
            desk.client.rpush(key, "foreign")
        else:
            desk.client.set(key, "foreign")
        before = fingerprint(desk)
        if not accepted(desk, call):
            assert fingerprint(desk) == before, key
            refused += 1
    assert (
        refused
        or name
        in {
            "post_scan",
            "note_event",
            "drop_history",
            "keep_follow_ups",
            "read_snapshot",
            "shorten_sent",
            *READS,
        }
    )  # which replaces whatever is there, writes only into a log, deletes whatever is there or lets it expire, and three times
    # takes it for nothing


def test_full_memory_stops_only_what_fills_it(own_desk: Desk) -> None:
    desk = own_desk
    scene = set_scene(desk)
    for name in CALLS:
        reset_scene(desk, scene)
        usual = desk.send(next_call(desk, scene, name))
        reset_scene(desk, scene)
        call = next_call(desk, scene, name)
        before = fingerprint(desk)
        desk.client.config_set("maxmemory", 1)
        try:
            if name in FILL_MEMORY:
                with pytest.raises(redis.OutOfMemoryError):
                    desk.send(call)
                assert fingerprint(desk) == before
            else:
                assert desk.send(call)[0] == usual[0], name
        finally:
            desk.client.config_set("maxmemory", 0)


def test_a_task_lives_on_when_memory_is_full(own_desk: Desk) -> None:
    desk = own_desk
    desk.put(b"a", b"b", b"c")
    desk.client.config_set("maxmemory", 1)
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    one, two, three = desk.take("A", 3)
    assert desk.retry("A", one) == "given"
    assert desk.fail("A", two) == "aside"
    assert desk.beat("A").alive
    with pytest.raises(redis.OutOfMemoryError):
        desk.put(b"d")
    desk.client.config_set("maxmemory", 0)
    assert desk.counts() == {"enqueued": 3, "claimed": 3, "retried": 1, "failed": 1}
    assert desk.state()[":claims:A"] == {str(three)}


@pytest.mark.parametrize("name", [name for name in CALLS if "\n-- NUMBERED\n" in script(name).header])
def test_a_numbered_request_that_comes_again_or_late_changes_nothing(desk: Desk, name: str) -> None:
    scene = set_scene(desk)
    call = next_call(desk, scene, name)
    assert call.numbered
    reply = desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == reply
    reset_scene(desk, scene)
    call = next_call(desk, scene, name)
    before = fingerprint(desk)
    assert desk.late(call) == [b"late"]
    assert fingerprint(desk) == before


def refuse_a_dispatch(desk: Desk) -> Command[Any]:
    desk.dispatch("there")
    return ops.dispatch_jobs(desk.q, [job("new"), job("there", exists="raise")], all_or_none=True)


def refuse_to_clear(desk: Desk, call: Command[Any]) -> Command[Any]:
    desk.put(b"a")
    desk.call(ops.delete_queue(desk.q))
    return call


def refuse_another_version(desk: Desk) -> Command[Any]:
    desk.client.set(desk.g.version, "2")
    return ops.start_worker(desk.g, "new", keepalive_ms=KEEPALIVE, facts=[])


def refuse_more_tasks(desk: Desk) -> Command[Any]:
    desk.put(b"a")
    return ops.enqueue(desk.q, [b"b"], max_length=1)


REFUSED: dict[str, tuple[Callable[[Desk], Command[Any]], Callable[[Desk], object]]] = {
    "cancel_all": (lambda desk: refuse_to_clear(desk, ops.cancel_all(desk.q)), lambda desk: purge(desk)),
    "delete_queue": (lambda desk: refuse_to_clear(desk, ops.delete_queue(desk.q)), lambda desk: purge(desk)),
    "dispatch_jobs": (refuse_a_dispatch, lambda desk: desk.call(ops.cancel_job(desk.q, "there", ""))),
    "drop_shards": (
        lambda desk: ops.drop_shards(desk.g, "hot", 8),
        lambda desk: desk.call(ops.declare_shards(desk.g, {"hot": 8})),
    ),
    "enqueue": (refuse_more_tasks, lambda desk: desk.client.delete(desk.q.base)),
    "enqueue_traced": (
        lambda desk: ops.enqueue_traced(refuse_more_tasks(desk), "{}"),
        lambda desk: desk.client.delete(desk.q.base),
    ),
    "map_work": (lambda desk: ops.map_work(desk.g, "A", "Q1"), lambda desk: desk.register("A")),
    "override_schedule": (lambda desk: ops.override_schedule(desk.g, "s", b"o"), declared),
    "pause_schedule": (lambda desk: ops.pause_schedule(desk.g, "s", paused=True), declared),
    "start_worker": (refuse_another_version, lambda desk: desk.client.delete(desk.g.version)),
}
"""Numbered scripts that may refuse: what makes them, and what frees their way afterwards."""


def purge(desk: Desk) -> None:
    while desk.call(ops.purge_queue(desk.q)):
        pass


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_a_numbered_request_is_stored_like_any_other_reply(desk: Desk, name: str) -> None:
    """Its copy may come when the way is free: it must not take effect, for its sender was told that it had none."""
    refused, free = REFUSED[name]
    call = refused(desk)
    reply = desk.send(call)
    assert reply[0] in {b"busy", b"changed", b"dead", b"full", b"refused", b"unknown", b"version"}
    other = Desk(desk.client, desk.prefix)
    other.producer = "Y"
    free(other)
    with desk.nothing_changes():
        assert desk.resend(call) == reply
    assert desk.send(call)[0] == b"ok"


def test_an_error_is_not_stored_so_the_same_number_may_have_an_effect_later(desk: Desk) -> None:
    desk.client.set(desk.q.suspects, "foreign")
    call = ops.dispatch_jobs(desk.q, [job("new")])
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.send(call)
    desk.client.delete(desk.q.suspects)
    assert desk.resend(call)[0] == b"ok"
    wrong = ops.dispatch_jobs(desk.q, [job("newer", delay=-1)])
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="the option delay"):
        desk.send(wrong)
    assert desk.resend(ops.dispatch_jobs(desk.q, [job("newer")]))[0] == b"ok"
    assert {":job:new", ":job:newer"} <= desk.state().keys()


@pytest.fixture
def cluster(server_kind: str) -> Iterator[redis.Redis]:
    """A cluster of one node, which has all slots."""
    with open_node(server_kind) as node:
        yield node.client()


def test_every_script_keeps_to_one_slot_of_a_cluster(cluster: redis.Redis) -> None:
    desk = Desk(cluster, "mesh")
    desk.set_fence()
    scene = set_scene(desk)
    for name in CALLS:
        reset_scene(desk, scene)
        desk.send(next_call(desk, scene, name))
    slots = {cluster.execute_command("CLUSTER", "KEYSLOT", key) for key in desk.all_keys()}
    assert slots == {cluster.execute_command("CLUSTER", "KEYSLOT", key) for key in ("Q1", "Q2", "mesh")}


def test_the_scene_has_something_of_everything(desk: Desk) -> None:
    scene = set_scene(desk)
    assert isinstance(scene, Scene)
    kinds = {name.rsplit(":", 1)[0] if name.count(":") > 1 else name for name in desk.state()}
    assert kinds >= {
        *("waiting", ":suspects", ":hungry", ":cancelling", ":workers", ":policy", ":claims", ":claim"),
        *(":job", ":active", ":twins", ":failed", ":broken", ":aside", ":counts"),
        *(":due", ":blocked", ":result", ":older_result", ":taken"),
        *(
            ":Workers",
            ":Dying",
            ":WorkMap",
            ":worker",
            ":info",
            ":leader",
            ":queues",
            ":version",
            ":snapshot",
            ":watched",
        ),
    }
    counts = desk.state()[":counts"].value
    assert counts["stale"] == "1"
    before = desk.state(), desk.replies()
    reset_scene(desk, scene)
    assert (desk.state(), desk.replies()) == before
