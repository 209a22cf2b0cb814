"""Keys and names: Python and Lua spell them alike, a queue is one slot, and what may not stand in a key is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from redis.crc import key_slot

import worqr.lua
from tests.ops.driver import Desk, desk_on
from tests.ops.scene import CALLS, next_call, reset_scene, set_scene
from tests.support.servers import Server
from worqr import ops
from worqr.errors import UsageError
from worqr.keys import MARKER, MAX_NAME, BatchKeys, LaneKeys, QueueKeys, RegistryKeys, RoomKeys, check_name

QUEUE = QueueKeys("worqr", "Q1")
REGISTRY = RegistryKeys("worqr")
FAILURES = QueueKeys("worqr", "Q1", failures=True)
NAMES = {"name", "display_name", "id_suffix"}
CHANNELS = {
    "cancel_channel",
    "cancelled_channel",
    "events_channel",
    "event_ids_channel",
    "event_ends_channel",
    "wake_channel",
    "due_channel",
    "snapshots_channel",
    "room.channel",
}


def plain(keys: QueueKeys | RegistryKeys | LaneKeys | RoomKeys) -> dict[str, str]:
    """The keys and channels whose name depends on nothing more, by their names in Python."""
    made = vars(type(keys)).items()
    names = [name for name, what in made if (isinstance(what, property) or name == "base") and name not in NAMES]
    return {name: getattr(keys, name) for name in names}


def makers(keys: QueueKeys | RegistryKeys) -> dict[str, Callable[[str], str]]:
    """Those that need a worker, a claim, a job or a digest."""
    names = [name for name, what in vars(type(keys)).items() if inspect.isfunction(what) and not name.startswith("_")]
    return {name: getattr(keys, name) for name in names}


def in_batches(queue: QueueKeys) -> dict[str, Callable[[str], str]]:
    """The keys of batches, and the channel for their changes; those that need one batch are made of its id or its token."""
    keys = BatchKeys(queue)
    made = {name: partial(_plainly, getattr(keys, name)) for name in ("batches", "outbox")}
    return {
        **made,
        "batch": keys.batch,
        "parts": keys.parts,
        "part": keys.part,
        "members": keys.members,
        "follow_ups": keys.follow_ups,
    }


APPENDED = {":suspects", ":lanes", ":parts", ":members"}
"""What is appended to the key of the trash, of a batch, and of a part."""


def in_lanes(queue: QueueKeys, *, period: str = "60000") -> dict[str, Callable[[str], str]]:
    """The keys of lanes and of waiting producers; those that need one lane, or one producer, are made of its name."""
    keys = LaneKeys(queue)
    made = {f"lanes.{name}": partial(_plainly, key) for name, key in plain(keys).items()}
    room = RoomKeys(queue)
    made |= {"room.waiters": partial(_plainly, room.waiters), "room.channel": room.channel}
    return {**made, "lanes.tasks": keys.tasks, "lanes.starts": partial(keys.starts, period)}


def _plainly(key: str, _name: str) -> str:
    return key


# Spelling


def test_the_layout_is_the_one_of_the_design() -> None:
    assert plain(QUEUE) == {
        "base": "worqr:{Q1}",
        "workers": "worqr:{Q1}:workers",
        "hungry": "worqr:{Q1}:hungry",
        "suspects": "worqr:{Q1}:suspects",
        "cancelling": "worqr:{Q1}:cancelling",
        "counts": "worqr:{Q1}:counts",
        "runs": "worqr:{Q1}:runs",
        "history": "worqr:{Q1}:history",
        "history10": "worqr:{Q1}:history10",
        "recent": "worqr:{Q1}:recent",
        "kept": "worqr:{Q1}:done",
        "kept_total": "worqr:{Q1}:done_total",
        "tag_marks": "worqr:{Q1}:tag_marks",
        "paused": "worqr:{Q1}:paused",
        "limits": "worqr:{Q1}:limits",
        "limited": "worqr:{Q1}:limited",
        "failed": "worqr:{Q1}:failed",
        "undecodable": "worqr:{Q1}:broken",
        "trash": "worqr:{Q1}:trash",
        "result_ttls": "worqr:{Q1}:result_ttls",
        "trash_suspects": "worqr:{Q1}:trash:suspects",
        "trash_due": "worqr:{Q1}:trash:due",
        "trash_suspended": "worqr:{Q1}:trash:suspended",
        "suspended": "worqr:{Q1}:suspended",
        "trash_blocked": "worqr:{Q1}:trash:blocked",
        "blocked": "worqr:{Q1}:blocked",
        "dead_letter_index": "worqr:{Q1}:aside",
        "due": "worqr:{Q1}:due",
        "fired": "worqr:{Q1}:fired",
        "outcomes": "worqr:{Q1}:outcomes",
        "schedules": "worqr:{Q1}:schedules",
        "cancel_channel": "worqr:{Q1}_cancel",
        "cancelled_channel": "worqr:{Q1}_cancelled",
        "events_channel": "worqr:{Q1}:events",
        "event_ids_channel": "worqr:{Q1}:event_ids",
        "event_ends_channel": "worqr:{Q1}:event_ends",
    }
    assert {name: make("X") for name, make in makers(QUEUE).items()} == {
        "claims": "worqr:{Q1}:claims:X",
        "leaving": "worqr:{Q1}:leaving:X",
        "policy": "worqr:{Q1}:policy:X",
        "claim": "worqr:{Q1}:claim:X",
        "job": "worqr:{Q1}:job:X",
        "active": "worqr:{Q1}:active:X",
        "twins": "worqr:{Q1}:twins:X",
        "dead_letter": "worqr:{Q1}:aside:X",
        "ended": "worqr:{Q1}:ended:X",
        "result": "worqr:{Q1}:result:X",
        "older_result": "worqr:{Q1}:older_result:X",
        "taken": "worqr:{Q1}:taken:X",
        "sent": "worqr:{Q1}:sent:X",
        "starts": "worqr:{Q1}:starts:X",
        "kept_job": "worqr:{Q1}:done:X",
        "kept_id": "worqr:{Q1}:done_id:X",
        "tagged": "worqr:{Q1}:tag:X",
        "wake_channel": "worqr:{Q1}:wake:X",
    }
    assert {name: make("X") for name, make in in_lanes(QUEUE).items()} == {
        "lanes.base": "worqr:{Q1}:lanes",
        "lanes.ring": "worqr:{Q1}:lanes:ring",
        "lanes.held": "worqr:{Q1}:lanes:held",
        "lanes.idle": "worqr:{Q1}:lanes:idle",
        "lanes.names": "worqr:{Q1}:lanes:names",
        "lanes.opens": "worqr:{Q1}:lanes:opens",
        "lanes.claims": "worqr:{Q1}:lanes:claims",
        "lanes.running": "worqr:{Q1}:lanes:running",
        "lanes.rules": "worqr:{Q1}:lanes:rules",
        "lanes.trash": "worqr:{Q1}:trash:lanes",
        "lanes.tasks": "worqr:{Q1}:lane:0:X",
        "lanes.starts": "worqr:{Q1}:starts:60000:X",
        "room.waiters": "worqr:{Q1}:waiters",
        "room.channel": "worqr:{Q1}:room:X",
    }
    assert {name: make("X") for name, make in in_batches(QUEUE).items()} == {
        "batches": "worqr:{Q1}:batches",
        "outbox": "worqr:{Q1}:outbox",
        "batch": "worqr:{Q1}:batch:X",
        "parts": "worqr:{Q1}:batch:X:parts",
        "part": "worqr:{Q1}:part:X",
        "members": "worqr:{Q1}:part:X:members",
        "follow_ups": "worqr:{Q1}:part:X:follow_ups",
    }
    assert plain(REGISTRY) == {
        "base": "{worqr}",
        "registered": "{worqr}:Workers",
        "dying": "{worqr}:Dying",
        "queues": "{worqr}:queues",
        "waiting": "{worqr}:waiting",
        "schedules": "{worqr}:schedules",
        "schedules_due": "{worqr}:schedules_due",
        "schedules_seen": "{worqr}:schedules_seen",
        "outboxes": "{worqr}:outboxes",
        "limits": "{worqr}:limits",
        "topics": "{worqr}:topics",
        "schedules_stored": "{worqr}:schedules_stored",
        "shards": "{worqr}:shards",
        "due_channel": "{worqr}:due",
        "snapshot": "{worqr}:snapshot",
        "watched": "{worqr}:watched",
        "histories": "{worqr}:histories",
        "log": "{worqr}:log",
        "moved": "{worqr}:moved",
        "snapshots_channel": "{worqr}:snapshots",
        "leader": "{worqr}:leader",
        "version": "{worqr}:version",
    }
    assert {name: make("X") for name, make in makers(REGISTRY).items()} == {
        "worker": "{worqr}:worker:X",
        "work_map": "{worqr}:WorkMap:X",
        "info": "{worqr}:info:X",
    }


def test_the_failure_queue_of_a_queue_has_the_same_keys_with_a_word_more() -> None:
    spelled = {name: key.replace("{Q1}-fail", "{Q1}") for name, key in plain(FAILURES).items()}
    assert spelled == plain(QUEUE)
    assert {key for key in plain(FAILURES).values() if "{Q1}-fail" not in key} == set()
    assert FAILURES.job("X") == "worqr:{Q1}-fail:job:X"
    assert f"{QUEUE.base}-fail" == FAILURES.base  # as Lua spells it


def test_the_failure_queue_is_known_by_a_name_that_no_queue_can_have() -> None:
    assert FAILURES.name == "{Q1}-fail"
    assert QueueKeys.of("worqr", FAILURES.name) == FAILURES
    for name in ("Q1", "Q1-fail", "Q1}-fail", "{Q1", "-fail"):
        assert QueueKeys.of("worqr", name) == QueueKeys("worqr", name)
    with pytest.raises(UsageError, match="braces"):
        check_name(FAILURES.name)


def test_a_claim_is_spelled_in_full_whatever_its_size() -> None:
    assert QUEUE.claim(8_000_000_000_000_001) == "worqr:{Q1}:claim:8000000000000001"


def test_no_two_are_spelled_alike() -> None:
    spelled = [*plain(QUEUE).values(), *(make("X") for make in makers(QUEUE).values())]
    spelled += [make("X") for made in (in_lanes(QUEUE), in_batches(QUEUE)) for make in made.values()]
    spelled += [*plain(FAILURES).values(), *(make("X") for make in makers(FAILURES).values())]
    spelled += [*plain(REGISTRY).values(), *(make("X") for make in makers(REGISTRY).values())]
    assert len(spelled) == len(set(spelled))


@pytest.fixture
def desk(server: Server, prefix: str) -> Iterator[Desk]:
    yield from desk_on(server, prefix)


WIRE = (Path(__file__).parent.parent / "docs/reference/wire.md").read_text("utf-8")
PLACES = re.compile(r"(P1|W1|ID|DIGEST|ROW|MS|LANE|EPOCH|TOKEN|NUMBER|X)$")


def listed() -> dict[str, re.Pattern[str]]:
    """The keys that the wire reference lists, each with the pattern of what it stands for, without the prefix."""
    rows = [
        row.split(" | ")[0]
        for row in WIRE.partition("## Keys\n")[2].partition("\n## ")[0].splitlines()
        if row.startswith("| `")
    ]
    names = [name.replace("worqr", "", 1) for row in rows for name in re.findall("`([^`]+)`", row)]
    return {
        name: re.compile(":".join(".+?" if PLACES.match(part) else re.escape(part) for part in name.split(":")))
        for name in names
    }


def detail_of(name: str) -> tuple[int, int]:
    """How many parts of a name are words, not places for something; and how many parts it has."""
    parts = name.split(":")
    return sum(not PLACES.match(part) for part in parts), len(parts)


def touched_by_all(desk: Desk) -> Iterator[tuple[str, set[str]]]:
    """The keys that each script touches, and what takes several steps."""
    scene = set_scene(desk)
    for name in CALLS:
        reset_scene(desk, scene)
        yield name, desk.touched_by(next_call(desk, scene, name))
    reset_scene(desk, scene)
    desk.call(ops.stop_tasks(desk.q, "A", [scene.raw]))
    desk.stall(b"one more suspect", times=2)
    desk.call(ops.delete_queue(desk.q))
    desk.call(ops.set_limits(desk.q, "100 100/60000"))
    desk.put(b"limited")
    rules = msgspec.msgpack.encode({"limit": "1 5/60000"})
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, limits="", lanes=rules))
    for lane in "abbb":
        desk.dispatch(None, lane=lane)
    desk.starts["A"] += 1
    yield "start_tasks", desk.touched_by(ops.start_tasks(desk.q, "A", desk.starts["A"], 9))


def test_every_key_that_a_script_touches_is_in_the_wire_reference(desk: Desk) -> None:
    """And each that is listed there is touched: so the permissions that the reference gives are neither too few nor too many."""
    seen: set[str] = set()
    for name, keys in touched_by_all(desk):
        assert keys, name
        for key in keys:
            spelled = re.sub(r"^:\{Q2\}|^:\{Q1\}-fail", ":{Q1}", key.replace(desk.prefix, "", 1))
            found = sorted(
                (each for each, pattern in listed().items() if pattern.fullmatch(spelled)), key=detail_of, reverse=True
            )
            assert found, (name, key)
            seen.add(found[0])
    assert set(listed()) - seen == {"{}:moved"}  # which the command writes, and links read without a script


# Slots


@pytest.mark.parametrize("queue", ["Q1", "a:b", "ä", "x y", "Q1-fail", ":"])
def test_a_queue_is_one_slot_and_so_is_the_registry(queue: str) -> None:
    def slots(keys: QueueKeys | RegistryKeys) -> set[int]:
        spelled = [*plain(keys).values(), *(make("W:1") for make in makers(keys).values())]
        if isinstance(keys, QueueKeys):
            spelled += [make("{x}") for made in (in_lanes(keys), in_batches(keys)) for make in made.values()]
        return {key_slot(key.encode()) for key in spelled}

    assert len(slots(RegistryKeys("mesh"))) == 1
    assert len(slots(QueueKeys("mesh", queue))) == 1
    assert slots(QueueKeys("mesh", queue, failures=True)) == slots(QueueKeys("mesh", queue))


# Names


@pytest.mark.parametrize(
    "name", ["Q1", "q", "a:b", "x y", "ä", "日本", "-", "😀", "a" * MAX_NAME, "ä" * (MAX_NAME // 2), "_"]
)
def test_a_name_that_may_stand_in_a_key_is_answered_as_it_is(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "1 to 200 bytes of UTF-8, this one has 0"),
        ("a" * 201, "this one has 201"),
        ("ä" * 101, "this one has 202"),
        ("a{b", r"'\{'"),
        ("a}b", r"'\}'"),
        ("a\nb", "control characters"),
        ("\x00", "control characters"),
        ("\x1f", "control characters"),
        ("\x7f", "control characters"),
        ("\x80", "control characters"),
        ("\x9f", "control characters"),
        ("\ud800", "not valid Unicode"),
        (b"Q1", "must be a str, not bytes"),
        (None, "must be a str, not NoneType"),
        (7, "must be a str, not int"),
    ],
)
def test_any_other_is_an_error_that_says_why(name: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_name(name)


def test_the_error_says_what_it_is_that_has_the_name() -> None:
    with pytest.raises(UsageError, match=r"the prefix 'a\{' contains '\{'"):
        check_name("a{", "the prefix")


def test_the_first_character_above_the_control_characters_is_allowed() -> None:
    assert check_name("\xa0 ~") == "\xa0 ~"


def test_the_marker_is_what_lua_compares_with() -> None:
    lua = (Path(worqr.lua.__file__).parent / "jobs.lua").read_text("utf-8")
    assert MARKER == b"\x00worqr\x00"
    assert r"local MARKER = '\0worqr\0'" in lua
    assert f"string.sub(item, 1, {len(MARKER)}) == MARKER" in lua
    assert f"string.sub(item, {len(MARKER) + 1})" in lua
