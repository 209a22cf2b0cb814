"""Another program writes something odd into a record: no number, a number beyond all bounds, bytes that are no text, a member
that can be none. No script ends with an error because of it, and no claim is left that no worker holds.

Each case is one script. For each key that it reads, one odd value after the other is written into one field of all records of
that kind, or added to all lists and sets of that kind. A key that a script does not read cannot change what it does. Keys of
a foreign type are in test_keys_of_one_job.py and test_every_script.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ops.driver import Desk, claim, reference
from tests.ops.scene import CALLS, Scene, prepared, reset_scene, set_scene
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER

ODD = (
    b"",
    b"abc",
    b"-1",
    b"1.5",
    b"1e308",
    b"nan",
    b"inf",
    b"9" * 15,
    b"1" + b"0" * 20,
    b"\xff\xfe",
    b"\xc1",
    b"x" * 10_000,
)
SCORES = ("inf", "-inf", "1.5", "1e308")
RECORD = (
    *("expires", "expires_at", "run_at", "latest", "scheduled_for", "retried_at", "queued", "first", "last"),
    *("failures", "stalls", "timeouts", "max_failures", "max_stalls", "max_timeouts", "timeout", "result_ttl"),
    *("saved", "saved_size", "saved_number", "step:1", "tries", "lane", "batch", "twin", "suspect", "started", "meta"),
    *("update_low", "update_high", "update_data", "update_counts", "update_policy", "progress", "cancel_reason"),
)
FIELDS = {
    ":job:": RECORD,
    ":active:": RECORD,
    ":aside:": (*RECORD, "at", "older", "newer", "id", "task"),
    ":counts": (
        *("fence", "cleared", "stale", "announced"),
        *("enqueued", "claimed", "finished", "failed", "cancelled"),
    ),
    ":part:": (
        "v",
        "closed",
        "sealed",
        "keep",
        "home",
        "id",
        "on_failed",
        "added",
        "finished",
        "failures",
        "cancel_reason",
    ),
    ":lanes": ("epoch", "clock", "weights", "main", "main_idle", "waiting", "refile"),
}
"""Fields that records of a kind may have, beside those that they have in the scene."""
Commands = list[tuple[object, ...]]


def kind_of(name: str) -> str:
    """The kind of a key, for which its id, its claim or its worker does not matter."""
    if found := re.match(r"(-fail)?:(batch|part):.*?(:parts|:members)?$", name):
        return f":{found[2]}:{found[3] or ''}"
    found = re.match(
        r":(?:job|active|aside|result|older_result|policy|info|starts|lane|claims|claim|twins|taken|worker):", name
    )
    return found[0] if found else name


def touched(desk: Desk, call: Command[Any], scene: Scene) -> dict[str, list[bytes]]:
    """The keys of the scene by their kind, of those kinds of which the script reads or writes a key, as the server sees it."""
    seen = [f"{command} " for command in desk.commands_of(call)]
    kinds: dict[str, list[bytes]] = {}
    read: set[str] = set()
    for key, _, _ in scene.keys:
        if b":producer:" not in key:
            kind = kind_of(desk.short(key.decode()))
            kinds.setdefault(kind, []).append(key)
            if any(f" {key.decode()} " in command for command in seen):
                read.add(kind)
    return {kind: kinds[kind] for kind in sorted(read)}


def mutations(desk: Desk, kinds: dict[str, list[bytes]]) -> Iterator[tuple[str, Commands]]:
    """What is odd, and the commands that write it."""
    for kind, keys in kinds.items():
        type_of = desk.client.type(keys[0])
        if type_of == b"hash":
            stored: set[bytes] = set().union(*(desk.client.hkeys(key) for key in keys))  # type: ignore[arg-type]
            fields = sorted({name.decode() for name in stored} | set(FIELDS.get(kind, ())))
            for value in ODD:
                for field in fields:
                    yield f"{kind} {field} {value[:30]!r}", [("HSET", key, field, value) for key in keys]
                yield f"{kind} has a field {value[:30]!r}", [("HSET", key, value, value) for key in keys]
        elif type_of == b"zset":
            for score in SCORES:
                members = [(key, member) for key in keys for member in desk.client.zrange(key, 0, -1)]
                yield f"{kind} score {score}", [("ZADD", key, score, member) for key, member in members]
            for value in ODD:
                yield f"{kind} has {value[:30]!r}", [("ZADD", key, 1, value) for key in keys]
        else:
            for value in ODD:
                yield f"{kind} has {value[:30]!r}", list(additions(type_of, keys, value))


def additions(type_of: bytes, keys: list[bytes], value: bytes) -> Iterator[tuple[object, ...]]:
    for key in keys:
        if type_of == b"set":
            yield "SADD", key, value
        elif type_of == b"string":
            yield "SET", key, value
        elif type_of == b"list":
            yield "LPUSH", key, value, MARKER + value
            yield "RPUSH", key, value, MARKER + value


ORPHANS = """
local held, claims = {}, {}
for _, key in ipairs(redis.call('SCAN', '0', 'MATCH', ARGV[1], 'COUNT', 1000000)[2]) do
  local claim = string.match(key, '}:claim:(.*)$')
  if claim then
    claims[#claims + 1] = claim
  elseif string.find(key, '}:claims:', 1, true) then
    for _, each in ipairs(redis.call('SMEMBERS', key)) do held[each] = true end
  end
end
local orphans = {}
for _, claim in ipairs(claims) do
  if not held[claim] then orphans[#orphans + 1] = claim end
end
return orphans
"""


def orphans(desk: Desk) -> list[bytes]:
    """The claims that no worker holds."""
    return desk.client.eval(ORPHANS, 0, desk.q.base + ":claim*")  # type: ignore[no-any-return]


@pytest.mark.sweep(keep=12)
@pytest.mark.parametrize("name", CALLS)
def test_an_odd_value_is_no_error_and_leaves_no_claim_behind(desk: Desk, name: str) -> None:
    scene = prepared(desk, set_scene(desk), name)
    call = CALLS[name](desk.q, desk.g, scene)
    kinds = touched(desk, call, scene)
    assert kinds
    reset_scene(desk, scene)
    for what, commands in list(mutations(desk, kinds)):
        reset_scene(desk, scene)
        with desk.client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            pipe.execute()
        try:
            desk.send(call)
        except Exception as error:
            raise AssertionError(f"{name}, {what}") from error
        if not what.startswith(":claim: "):  # a claim with more than one task is left with the others
            assert orphans(desk) == [], what


def test_a_counter_that_is_no_number_begins_anew(desk: Desk) -> None:
    desk.client.hset(desk.q.counts, mapping={"enqueued": "abc", "claimed": "1.5", "finished": 2**63 - 1})
    desk.enter("A")
    desk.put(b"a", b"b")
    held = desk.take("A", 2)
    assert desk.call(ops.finish_tasks(desk.q, "A", held)) == {}
    assert desk.counts() == {"enqueued": 2, "claimed": 2, "finished": 2}


def test_a_job_whose_deletion_cannot_be_read_was_not_deleted(desk: Desk) -> None:
    desk.dispatch("job")
    desk.client.hset(desk.q.job("job"), "queued", "abc")
    assert desk.dispatch("job", b"b").outcome == "updated"
    assert desk.call(ops.cancel_job(desk.q, "job", "why")).waiting == 1


def test_a_set_of_claims_with_a_member_that_is_none_is_given_back_as_any_other(desk: Desk) -> None:
    first, second = desk.hold("A", b"a", b"b")
    desk.client.sadd(desk.q.claims("A"), "abc", " 7", "\xff")
    assert desk.call(ops.list_own_claims(desk.q, "A")) == [first, second]
    assert not desk.call(ops.fail_worker(desk.q, "A", 1)).more or not desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.waiting() == [b"a", b"b"]
    assert {":claims:A", ":workers", ":leaving:A"}.isdisjoint(desk.state())


def test_a_record_with_more_fields_than_one_command_takes_is_retried(desk: Desk) -> None:
    held = desk.run("A", "large")
    steps = {f"step:{n}": "x" for n in range(9000)}
    desk.client.hset(desk.q.active("large"), mapping={**steps, "saved_size": 9000})
    desk.fail("A", held)
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert desk.state()["waiting"] == [reference("large")]
    assert desk.client.hlen(desk.q.job("large")) > 9000


def test_a_message_that_another_program_wrote_into_an_outbox_hides_no_other(desk: Desk) -> None:
    set_scene(desk)
    before = desk.call(ops.take_outbox(desk.q))
    odd = {
        "a": b"\xc1",
        "b": b"\x01",
        "c": b"\x80",
        "d": b"\x90",
        "e": b"\x91\x90",
        "f": b"",
    }
    desk.client.hset(desk.q.base + ":outbox", mapping=odd)
    found = desk.call(ops.take_outbox(desk.q))
    assert [message for message in found if message.kind] == before
    assert {message.topic.decode() for message in found if not message.kind} == odd.keys()


@pytest.mark.parametrize("admission", ["", "abc", "1", "9" * 30 + " 1 1 0", "1 1 " + "9" * 30 + " 0", "-1 0 0 0"])
def test_a_start_request_that_another_program_wrote_holds_up_no_worker(desk: Desk, admission: str) -> None:
    desk.enter("A")
    desk.put(b"a")
    desk.client.hset(desk.q.workers, "A", admission)
    [held] = desk.take("A", 1)
    assert held == claim(1)
