"""Another application writes a key of another type in the place of one that belongs to a single job or claim. Every script that
touches such a key does all of its work for the other jobs of the call, or is refused before its first write.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis

from tests.ops.batches import TOKEN
from tests.ops.driver import Desk, alone, claim, digest, reference
from tests.ops.scene import CALLS, Scene, fingerprint, next_call, reset_scene, set_scene
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER, QueueKeys

STEMS = (":job:", ":active:", ":claim:", ":aside:", ":twins:", ":taken:", ":result:", ":older_result:")
LISTS = ("waiting", ":suspects", ":due", ":blocked", ":failed", ":broken", ":cancelling", ":claims:A", ":claims:C")
REFUSED = {
    "cancel_job": (":job:", ":active:"),
    "cancel_task": (":twins:",),
    "dispatch_jobs": (":job:", ":active:", ":taken:"),
    "fire_schedules": (":job:", ":active:", ":taken:"),
    "job_status": (":job:", ":active:"),
    "read_job": (":job:", ":active:", ":result:", ":older_result:"),
    "read_payload": (":job:", ":active:"),
    "read_result": (":job:", ":active:", ":result:"),
    "retry_aside": (":job:", ":active:", ":taken:"),
}
"""What names the one job that is meant. All other scripts go on."""


def touched(desk: Desk, call: Command[Any], scene: Scene) -> list[str]:
    """The keys of single jobs that the script reads or writes, as the server sees it."""
    known = [key.decode() for key, _, _ in scene.keys]
    commands = [command for command in desk.commands_of(call) if not command.startswith("PUB")]
    words = {word for command in commands for word in command.split(" ")}
    words |= {key for key in known if " " in key and any(key in command for command in commands)}
    words -= {key.split(" ")[0] for key in known if " " in key}
    return sorted(word for word in words if word.startswith(f"{desk.prefix}:") and any(stem in word for stem in STEMS))


def spoil(desk: Desk, key: str) -> None:
    desk.client.delete(key)
    if ":taken:" in key:
        desk.client.rpush(key, "foreign")
    else:
        desk.client.set(key, "foreign")


def split(key: str) -> tuple[str, str]:
    """Which kind of key it is, and whose: an id, a claim or a digest."""
    for stem in STEMS:
        if stem in key:
            return stem, key.partition(stem)[2]
    return "", key


def names_of(state: dict[str, Any], key: str) -> set[str]:
    """Whatever the job is known by whose key it is: its id, its claim, its payload and the digest of that."""
    name = split(key)[1].removeprefix("@f")
    names = {name, f"@{name}"}
    for each, value in state.items():
        stem, tail = split(each)
        if stem == ":claim:":
            item = value[0].removeprefix(MARKER).decode()
            together = {tail, item, digest(item)}
        elif stem in (":active:", ":aside:", ":job:"):
            together = {tail, *(value[field] for field in ("claim", "id", "twin") if field in value)}
        else:
            continue
        if name in together:
            names |= together
    if "last member" in names:  # a batch whose member cannot be counted ends later
        names.add(f"@{TOKEN}.then")
    return names


def others(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """What there is of the jobs that have none of these names."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name in LISTS:
            members = (each.removeprefix(MARKER).decode() if isinstance(each, bytes) else each for each in value)
            found[name] = Counter(each for each in members if each not in names)
        elif split(name)[0] and not name.startswith("-fail") and split(name)[1] not in names:
            found[name] = value
            if isinstance(value, dict):  # its times and numbers may be those of the call
                found[name] = {field: each for field, each in value.items() if field not in OF_THE_CALL} or value
    return {name: value for name, value in found.items() if value}


OF_THE_CALL = {"run_at", "queued", "last", "batch_ended"}
ONLY_WAKE = {
    *("set_limits", "start_work", "list_lanes", "set_lane"),
    *("open_batch", "seal_batch", "cancel_batch", "check_batches"),
    "put_follow_up",  # its job is new: what stood at its result becomes its older result
    "read_outcomes",  # it reads jobs of queues without workers alone
}
"""Scripts that ask whether a worker runs a suspect, or a strict lane waits for a retry, or that may end a batch, and touch no job
here."""
TOUCH = [name for name in CALLS if any(f"'{stem}'" in alone(name) for stem in STEMS) and name not in ONLY_WAKE]


@pytest.mark.sweep(keep=10)
@pytest.mark.parametrize("name", [*TOUCH, "job_status", "read_result"])
def test_one_spoilt_job_does_not_stop_the_others(desk: Desk, name: str) -> None:
    scene = set_scene(desk)
    before = desk.state()
    keys = touched(desk, next_call(desk, scene, name), scene)
    usual = desk.state()
    assert keys
    for key in keys:
        reset_scene(desk, scene)
        call = next_call(desk, scene, name)
        spoil(desk, key)
        spoilt = fingerprint(desk)
        try:
            desk.send(call)
        except redis.ResponseError as error:
            assert "WRONGTYPE" in str(error)
            assert fingerprint(desk) == spoilt, key
            assert any(stem in key for stem in REFUSED.get(name, ())), key
        else:
            if name == "start_tasks" and ":job:" in key:
                continue  # its reference is skipped, and the claims behind it are others'
            names = names_of(before, key)
            assert others(desk.state(), names) == others(usual, names), key


def test_a_failed_task_is_set_aside_though_the_place_of_its_failure_job_is_taken(desk: Desk) -> None:
    desk.enter("A", on_failure=True)
    desk.put(b"a")
    [held] = desk.take("A", 1)
    failures = QueueKeys(desk.prefix, "Q1", failures=True)
    desk.client.set(failures.job(f"@f{held}"), "foreign")
    assert desk.fail("A", held) == "aside"
    assert desk.state()[f"-fail:job:@f{held}"]["task"] == "a"


def test_a_task_that_is_retried_is_not_lost_where_its_twins_or_its_record_would_be(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.client.set(desk.q.twins(digest("a")), "foreign")
    desk.client.set(desk.q.job(f"@{two}"), "foreign")
    assert desk.retry("A", one) == desk.retry("A", two) == "given"
    assert sorted(desk.waiting()) == [b"a", b"b"]


def test_finished_tasks_stay_finished_beside_a_spoilt_one(desk: Desk) -> None:
    """Whose worker is told of it like of a claim that it settled before; nothing is left for a sweep to give back."""
    raw, spoilt, last = desk.hold("A", b"a", b"b", b"c")
    desk.client.delete(desk.q.claim(spoilt))
    desk.client.set(desk.q.claim(spoilt), "foreign")
    assert desk.call(ops.finish_tasks(desk.q, "A", [raw, spoilt, last])) == {spoilt: "mine"}
    assert desk.counts()["finished"] == 2
    assert ":claims:A" not in desk.state()


def test_the_claims_of_a_dead_worker_come_back_beside_a_spoilt_one(desk: Desk) -> None:
    desk.enter("A")
    desk.dispatch("lost")
    desk.put(b"a", b"b")
    first = desk.take("A", 3)[0]
    desk.client.delete(desk.q.active("lost"))
    desk.client.set(desk.q.active("lost"), "foreign")
    desk.call(ops.fail_worker(desk.q, "A"))
    assert desk.waiting() == [b"a", b"b"]
    assert {":claims:A", ":workers", ":active:lost", f":claim:{first}"}.isdisjoint(desk.state())
    assert desk.dispatch("lost").outcome == "created"


def test_a_start_that_comes_again_names_a_spoilt_claim_as_gone(desk: Desk) -> None:
    first, second = desk.hold("A", b"a", b"b")
    desk.client.delete(desk.q.claim(first))
    desk.client.set(desk.q.claim(first), "foreign")
    again = desk.call(ops.start_tasks(desk.q, "A", desk.starts["A"], 2))
    assert (again.first, again.entries) == (first, [None, b"b"])
    assert second == first + 1


def test_what_stands_in_the_place_of_a_new_claim_is_replaced(desk: Desk) -> None:
    desk.client.set(desk.q.claim(claim(2)), "foreign")
    assert desk.hold("A", b"a", b"b", b"c") == [claim(1), claim(2), claim(3)]
    assert desk.state()[f":claim:{claim(2)}"] == [b"b"]


def test_of_many_that_are_put_back_a_spoilt_one_stays_where_it_is(desk: Desk) -> None:
    failed = [desk.run("A", "spoilt"), desk.run("A", "good")]
    for each in failed:
        desk.fail("A", each)
    desk.client.set(desk.q.active("spoilt"), "foreign")
    assert desk.call(ops.retry_aside(desk.q, "failed", failed)) == 1
    assert desk.state()["waiting"] == [reference("good")]
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.call(ops.retry_aside(desk.q, "failed", failed))
    desk.client.delete(desk.q.active("spoilt"))
    assert desk.call(ops.retry_aside(desk.q, "failed", failed)) == 1


def test_an_error_of_another_kind_is_no_spoilt_job(own_desk: Desk, own_server: Server) -> None:
    """A right that is missing says nothing about the record: the task must not be taken for gone."""
    desk = own_desk
    held = desk.run("A", "x")
    desk.client.execute_command("ACL", "SETUSER", "less", "on", ">less", "~*", "&*", "+@all", "-hgetall")
    with own_server.client(username="less", password="less") as client:
        less = Desk(client, desk.prefix)
        with pytest.raises(redis.ResponseError, match="permission|can.t run"):
            less.retry("A", held)
    assert desk.state()[":active:x"]["task"] == "a"
    assert desk.state()[f":claim:{held}"] == [reference("x")]
