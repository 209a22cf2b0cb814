"""Batches as a producer makes them, script by script; and what must be true of them at any time, whatever scripts have run:
`wrong` compares the keys with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.ops.driver import Desk, job
from worqr import ops
from worqr.command import Command
from worqr.keys import BatchKeys, QueueKeys, keys_at
from worqr.ops import BatchRow, Dispatched, OutboxMessage

KEEP = 60_000
"""ms, longer than a test can take."""
OPEN_FOR = 3_600_000
TOKEN = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
REASON = "no longer wanted"
COUNTS = ("added", "finished", "failed", "cancelled", "lost")


def follow_up(kind: str, queue: QueueKeys, task: bytes = b"next", **options: Any) -> dict[str, bytes | str]:
    """A follow-up (`kind`: then or otherwise) as open_batch takes it."""
    return {kind: queue.base, f"{kind}_options": msgspec.msgpack.encode(options), f"{kind}_task": task}


@dataclass(frozen=True, slots=True)
class Opened:
    """A batch whose record is at `home`, and what its producer and the relay do."""

    desk: Desk
    home: QueueKeys
    id: str = "b"
    token: str = TOKEN

    @property
    def told(self) -> tuple[str, str, str]:
        """What parts are told of it: the base of its home, its id, its keep."""
        return self.home.base, self.id, str(KEEP)

    def options(self, queue: QueueKeys | None = None) -> dict[str, Any]:
        """The option `batch` of dispatches to `queue` (None: that of the desk), whose part is opened by a running job of it."""
        part = self.desk.q if queue is None else queue
        opened = self.desk.call(ops.open_part(self.home, self.id, self.token, part.base, inside=True))
        assert opened.options is not None, opened
        return dict(opened.options)

    def add(self, id: str | None, task: bytes = b"a", *, queue: QueueKeys | None = None, **options: Any) -> Dispatched:
        """Dispatch a member."""
        part = self.desk.q if queue is None else queue
        new = job(id, task, batch=self.options(part), **options)
        [done] = self.desk.call(ops.dispatch_jobs(part, [new]))
        return done

    def run(self, worker: str, id: str, task: bytes = b"a", **options: Any) -> int:
        """The claim of `worker`, which then serves the queue, on a new member (nothing else may wait)."""
        self.desk.enter(worker)
        assert self.add(id, task, **options).outcome == "created"
        [held] = self.desk.take(worker, 1)
        return held

    def seal(self) -> None:
        """Seal it, tell its open parts, and deliver what they report."""
        sealed = self.desk.call(ops.seal_batch(self.home, self.id, self.token))
        assert sealed is not None
        for base, version in sealed.parts:
            self.desk.call(self.close_part(base, version))
            relay(self.desk, keys_at(self.desk.prefix, base))

    def close_part(self, base: str, version: int = 1) -> Command[str]:
        """The call that tells a part that the batch is sealed."""
        return ops.close_part(keys_at(self.desk.prefix, base), self.token, version, *self.told)

    def cancel(self, reason: str = REASON) -> str:
        """Cancel it at home."""
        return self.desk.call(ops.cancel_batch(self.home, self.id, self.token, reason))

    def cancel_part(
        self, queue: QueueKeys | None = None, version: int = 1, cursor: str = "0", reason: str = REASON
    ) -> Command[str | None]:
        """The call that cancels members of a part."""
        part = self.desk.q if queue is None else queue
        return ops.cancel_part(part, self.token, version, *self.told, reason, cursor)

    def row(self) -> BatchRow:
        """What its home knows of it."""
        row = self.desk.call(ops.read_batch(self.home, self.id))
        assert row is not None
        return row

    def state(self) -> str:
        return self.row().facts["state"]

    def part(self, queue: QueueKeys | None = None) -> tuple[int, dict[str, str]]:
        """What a queue knows of it: how many members have not ended, and the record."""
        members, fields = self.desk.call(ops.read_part(self.desk.q if queue is None else queue, self.token))
        return members, dict(fields)

    def counts(self, queue: QueueKeys | None = None) -> dict[str, int]:
        """How many members a queue has counted, and `left`: how many have not ended."""
        members, fields = self.part(queue)
        found = {name: int(fields[name]) for name in (*COUNTS, "failures") if int(fields.get(name, "0"))}
        return {**found, **({"left": members} if members else {})}

    def follow_up_id(self, kind: str = "then", ending: int = 1) -> str:
        """The id of its follow-up."""
        return f"@{self.token}.{kind}" + (f".{ending}" if ending > 1 else "")


def opened(
    desk: Desk,
    id: str = "b",
    *,
    home: QueueKeys | None = None,
    token: str = TOKEN,
    open_for_ms: int = OPEN_FOR,
    keep_ms: int = KEEP,
    parent: dict[str, Any] | None = None,
    **facts: Any,
) -> Opened:
    """A new batch; `facts` as open_batch has them."""
    queue = desk.q if home is None else home
    facts = held(desk, queue, id, token, facts)
    call = ops.open_batch(queue, id, token, open_for_ms=open_for_ms, keep_ms=keep_ms, parent=parent, facts=facts)
    assert desk.call(call) == "ok"
    for message in messages(desk, queue):
        if message.kind == "keep":
            desk.call(delivery(desk, message))
            desk.call(ops.drop_outbox(queue, [message]))
    return Opened(desk, queue, id, token)


def held(desk: Desk, home: QueueKeys, id: str, token: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Store follow-ups of other queues there, as a producer does; return the facts that the home gets."""
    here, there = dict(facts), dict[str, dict[str, Any]]()
    for kind in ("then", "otherwise"):
        if facts.get(kind, home.base) != home.base:
            own = there.setdefault(facts[kind], {"meta": facts["meta"]} if "meta" in facts else {})
            own |= {name: here.pop(name) for name in (f"{kind}_options", f"{kind}_task")}
    for base, own in there.items():
        desk.call(ops.hold_follow_ups(keys_at(desk.prefix, base), token, home.base, id, own))
    return here


def messages(desk: Desk, queue: QueueKeys | None = None) -> list[OutboxMessage]:
    """What a queue has to tell others, in the order of the topics."""
    return sorted(
        desk.call(ops.take_outbox(desk.q if queue is None else queue)), key=lambda message: bytes(message.topic)
    )


def delivery(desk: Desk, message: OutboxMessage) -> Command[Any]:
    """The call that delivers a message; a cancel in one step."""
    base, *parts = message.parts
    target, told = keys_at(desk.prefix, base.decode()), [bytes(part).decode("latin-1") for part in parts]
    if message.kind == "report":
        name, token, part, version, closed, counts = told
        return ops.report_part(target, name, token, part, int(version), closed=closed == "1", counts=counts)
    if message.kind == "cancel":
        token, version, home, name, keep, reason = told
        return ops.cancel_part(target, token, int(version), home, name, keep, reason)
    if message.kind == "keep":
        return ops.keep_follow_ups(target, told[0], int(told[1]))
    token, kind, ending = told[:3]
    return ops.put_follow_up(target, token, kind, int(ending), parts[3])


def relay(desk: Desk, *queues: QueueKeys) -> int:
    """Deliver the messages of the queues until there are none; return how many there were."""
    delivered, more = 0, True
    while more:
        more = False
        for queue in queues or (desk.q,):
            for message in messages(desk, queue):
                desk.call(delivery(desk, message))
                desk.call(ops.drop_outbox(queue, [message]))
                delivered, more = delivered + 1, True
    return delivered


def wrong(desk: Desk, *queues: QueueKeys, lost: Collection[tuple[str, str]] = ()) -> list[str]:
    """Every way in which the keys of batches contradict each other, in words. `lost`: the base of a queue, and the id of a member
    there that may have no record.
    """
    return [each for queue in queues or (desk.q,) for each in _wrong(desk, queue, lost)]


def _wrong(desk: Desk, queue: QueueKeys, lost: Collection[tuple[str, str]]) -> Iterator[str]:
    client, stem = desk.client, f"{queue.base}:part:"
    members: dict[str, set[str]] = {}
    for kind in ("job", "active"):
        for key in client.scan_iter(match=_literally(f"{queue.base}:{kind}:") + "*", count=10_000):
            batch = client.hget(key, "batch")
            if batch is not None:
                token = batch.decode().partition("\n")[0]
                members.setdefault(token, set()).add(key.decode().removeprefix(f"{queue.base}:{kind}:"))
    for key in client.scan_iter(match=_literally(stem) + "*", count=10_000):
        token = key.decode().removeprefix(stem)
        if token.endswith(":follow_ups"):
            continue
        if token.endswith(":members"):
            if not client.exists(key.decode().removesuffix(":members")):
                yield f"the members of {token} have no part"
            continue
        fields = {name.decode(): value.decode() for name, value in client.hgetall(key).items()}
        if "v" not in fields:  # it knows only of follow-ups
            continue
        left = {each.decode() for each in client.smembers(BatchKeys(queue).members(token))}
        jobs, records = {each for each in left if not each.startswith("\n")}, members.pop(token, set())
        if records - jobs or any((queue.base, each) not in lost for each in jobs - records):
            yield f"part {token} has the members {jobs}, and these have records: {records}"
        added, *ended = (int(fields.get(name, "0")) for name in COUNTS)
        if added != sum(ended) + len(left):
            yield f"part {token}: {added} were added, {ended} have ended, {len(left)} are left"
        if "closed" in fields and left:
            yield f"part {token} is closed, and has the members {left}"
        if "sealed" in fields and not left and "closed" not in fields:
            yield f"part {token} is sealed and even, and not closed"
    if members:
        yield f"records name parts that do not exist: {members}"
    yield from _wrong_at_home(desk, queue)


def _wrong_at_home(desk: Desk, queue: QueueKeys) -> Iterator[str]:
    number, rows = desk.call(ops.list_batches(queue, 0, 1000))
    if number != len(rows):
        yield f"{number} batches are counted, {len(rows)} are listed"
    for row in rows:
        facts = row.facts
        if not facts:
            yield f"batch {row.id} is to be looked at, and has no record"
            continue
        are_open = sum(part.open for part in row.parts)
        counted = int(desk.client.hget(BatchKeys(queue).batch(row.id), "open") or b"0")
        if counted != are_open:
            yield f"batch {row.id} counts {counted} open parts of {are_open}"
        if (facts["state"] == "ended") != ("ended_at" in facts):
            yield f"batch {row.id}: {facts}"
        if facts["state"] == "sealed" and not are_open:
            yield f"batch {row.id} is sealed, no part is open, and it has not ended"
        if facts["state"] == "ended" and are_open:
            yield f"batch {row.id} has ended, and has open parts"


def _literally(text: str) -> str:
    """A pattern of the server that matches this text."""
    return "".join(f"[{each}]" if each in "[?*" else each for each in text)
