"""What must be true of the lanes of a queue at any time, whatever scripts have run: `wrong` compares the keys with each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.ops.driver import Desk, reference
from worqr import ops
from worqr.keys import MARKER, LaneKeys
from worqr.ops import LaneRow


def wrong(desk: Desk, *, ring_may_be_full: bool = False) -> list[str]:
    """Every way in which the keys contradict each other, in words.

    With `ring_may_be_full`, lanes in the ring may be full: after their limits were lowered, until they have their turn.
    """
    return list(_wrong(desk, LaneKeys(desk.q), ring_may_be_full))


def _wrong(desk: Desk, keys: LaneKeys, ring_may_be_full: bool) -> Iterator[str]:
    client = desk.client
    state = _texts(client.hgetall(keys.base))
    ring, held, idle = (_members(client, key) for key in (keys.ring, keys.held, keys.idle))
    names, lists = set(_members(client, keys.names)), _lists(desk, keys, int(state.get("epoch", 0)))
    running, claims = _texts(client.hgetall(keys.running)), _texts(client.hgetall(keys.claims))
    if ring & held or (ring | held) & idle or ring | held != names:
        yield f"a lane is filed twice or nowhere: ring {ring}, held {held}, idle {idle}, names {names}"
    if set(lists) != names:
        yield f"{set(lists)} have tasks, {names} are named"
    if sum(lists.values()) != int(state.get("waiting", 0)):
        yield f"{sum(lists.values())} references are in lanes, {state.get('waiting', 0)} are counted"
    gone = {name.removeprefix("gone:"): int(n) for name, n in state.items() if name.startswith("gone:")}
    for lane, length in lists.items():
        if length - gone.get(lane, 0) != _waiting(desk, keys.tasks(lane, int(state.get("epoch", 0))), lane):
            yield f"of the {length} references of lane {lane!r}, {gone.get(lane, 0)} are noted as left over"
    if gone.keys() - lists.keys():
        yield f"{gone} are left over, the lists are {lists}"
    counted = Counter(claims.values())
    if dict(counted) != {lane: int(n) for lane, n in running.items()}:
        yield f"running counts {running}, the claims say {dict(counted)}"
    rows = rows_of(desk)
    weights = sum(rows[lane].weight for lane in ring)
    if weights != int(state.get("weights", 0)):
        yield f"the weights of the ring are {weights}, stored is {state.get('weights')}"
    for lane in ring | held:
        if (
            rows[lane].held != (lane in held)
            and not _opens_soon(desk, keys, lane)
            and not (ring_may_be_full and lane in ring)
        ):
            yield f"{lane!r} is {'held' if lane in held else 'in the ring'}: {rows[lane]}"
    yield from _claims(desk, claims)
    if not names and not running and not client.exists(keys.trash) and (state or idle):
        yield f"nothing is left in lanes but {state} and {idle}"


def _claims(desk: Desk, claims: dict[str, str]) -> Iterator[str]:
    """Each claim of a laned job has its entry, and each suspect of a lane that waits, or that is to be purged."""
    expected: dict[str, str] = {}
    for worker in desk.client.hkeys(desk.q.workers):
        for held in desk.client.smembers(desk.q.claims(worker.decode())):
            lane = _lane(desk, desk.client.lindex(desk.q.claim(int(held)), 0), desk.q.active)
            if lane is not None:
                expected[held.decode()] = lane
    for item in (each for key in (desk.q.suspects, desk.q.trash_suspects) for each in desk.client.lrange(key, 0, -1)):
        lane = _lane(desk, item, desk.q.job)
        if lane is not None:
            expected[":" + item.removeprefix(MARKER).decode()] = lane
    if expected != claims:
        yield f"the claims have the lanes {claims}, they should have {expected}"


def _lane(desk: Desk, item: bytes | None, key: Any) -> str | None:
    if item is None or not item.startswith(MARKER):
        return None
    lane = desk.client.hget(key(item.removeprefix(MARKER).decode()), "lane")
    return None if lane is None else lane.decode()


def _lists(desk: Desk, keys: LaneKeys, epoch: int) -> dict[str, int]:
    stem = keys.tasks("", epoch)
    pattern = re.sub(r"([\[\]*?\\])", r"\\\1", stem) + "*"
    found = desk.client.scan_iter(match=pattern, count=10_000)
    return {key.decode().removeprefix(stem): desk.client.llen(key) for key in found}


def _waiting(desk: Desk, key: str, lane: str) -> int:
    """How many jobs wait in the list of a lane, or are suspended there."""
    ids = {item.removeprefix(reference("")).decode() for item in desk.client.lrange(key, 0, -1)}
    found = [desk.client.hmget(desk.q.job(each), "state", "lane") for each in ids]
    return sum(state in {b"waiting", b"suspended"} and name == lane.encode() for state, name in found)


def _opens_soon(desk: Desk, keys: LaneKeys, lane: str) -> bool:
    """Time has made room, or will before anything else looks: the next start files the lane."""
    opens = desk.client.zscore(keys.opens, lane)
    return opens is not None and opens <= desk.now()


def _members(client: Any, key: str) -> set[str]:
    return {member.decode() for member in client.zrange(key, 0, -1)}


def _texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def rows_of(desk: Desk) -> dict[str, LaneRow]:
    """The lanes by name."""
    rows, more = desk.call(ops.list_lanes(desk.q, "", 10_000))
    assert not more
    return {row.name: row for row in rows}
