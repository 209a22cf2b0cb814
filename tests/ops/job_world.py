"""The server's side of `test_job_machine.py`: sends calls, and reads everything under a prefix in one request, so that the
whole state can be compared after each of some ten thousand steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import redis

from tests.ops.driver import FENCE
from tests.ops.job_rules import DELAY, LATER, NOW
from tests.support.patience import PATIENCE
from worqr.command import Command
from worqr.keys import LaneKeys, QueueKeys, RegistryKeys
from worqr.lua import all_scripts

_SNAPSHOT = """
local reads = {list = 'LRANGE', set = 'SMEMBERS', hash = 'HGETALL', zset = 'ZRANGE', string = 'GET'}
local found = {redis.call('TIME')}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ':{*')) do
  local kind = redis.call('TYPE', key).ok
  local args = kind == 'list' and {0, -1} or kind == 'zset' and {0, -1, 'WITHSCORES'} or {}
  found[#found + 1] = {key, kind, redis.call('PTTL', key), redis.call(reads[kind], key, unpack(args))}
end
return found
"""
_FORGET = "for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do redis.call('DEL', key) end"
EXPIRING = (
    ":starts:",
    ":result:",
    ":older_result:",
    ":taken:",
    ":sent:",
    ":counts",
    ":fired",
    ":outcomes",
    "-fail:counts",
)
_TIMES = ("run_at", "retried_at", "latest", "update_low", "update_high", "at")
_SOON = 600_000  # ms: what a clock says within the life of a test


def wire(value: Any) -> Any:
    """A value of the model as the server keeps it."""
    match value:
        case bytes() | None:
            return value
        case dict() as hash:
            return {str(name): wire(each) for name, each in hash.items()}
        case set() | frozenset() as members:
            return {wire(each) for each in members}
        case list() as items:
            return [wire(each) for each in items]
        case _:
            return str(value).encode()


class World:
    """One queue on one server, whose numbers begin at FENCE."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.prefix = prefix
        self.q = QueueKeys(prefix, "Q1")
        self.number = 0
        scripts = all_scripts()
        there = client.script_exists(*(script.sha for script in scripts))
        for script in (script for script, is_there in zip(scripts, there, strict=True) if not is_there):
            client.script_load(script.source)
        self._snapshot = client.script_load(_SNAPSHOT)
        self._pubsub = client.pubsub()
        base = self.q.base
        self._pubsub.psubscribe(f"{base}:wake:*", f"{base}_cancelled", RegistryKeys(prefix).due_channel, f"{prefix}!")
        for _ in range(4):
            self._pubsub.get_message(timeout=PATIENCE)
        for counts in (self.q.counts, f"{base}-fail:counts"):
            client.hset(counts, "fence", FENCE)
            client.expire(counts, 100_000)
        self.now = 0
        self.unsettled: list[tuple[str, str, str]] = []

    def close(self) -> None:
        self._pubsub.close()
        self.client.eval(_FORGET, 0, self.prefix)

    # Sending

    def send(self, call: Command[Any], *, again: bool = False) -> list[Any]:
        """The raw reply; `again`: to a copy of the last numbered request."""
        args = call.args
        if call.numbered:
            self.number += not again
            args = ("X", self.number, max(1, self.number - 3), *args)
        reply: list[Any] = self.client.execute_command(
            "EVALSHA", call.script.sha, 1, call.base, *args, *call.script.tail
        )
        return reply

    def heard(self) -> dict[str, list[bytes]]:
        """The messages published since the last time: cancellations acknowledged, and hints about due times."""
        self.client.publish(f"{self.prefix}!", b"")
        found: dict[str, list[bytes]] = {"cancelled": [], "due": []}
        while True:
            message = self._pubsub.get_message(timeout=PATIENCE)
            assert message is not None
            channel = message["channel"].decode()
            if channel.endswith("!"):
                return found
            for name, messages in found.items():
                if channel.endswith((f"_{name}", f":{name}")):
                    messages.append(message["data"])

    # Looking

    def everything(self) -> dict[str, Any]:
        """Every key but the stored replies, by its name without the base. Times that are now, or DELAY from now, are NOW and
        LATER; they are noted, for `settle_times`."""
        [seconds, micros], *entries = self.client.evalsha(self._snapshot, 0, self.prefix)
        self.now, self.unsettled = int(seconds) * 1000 + int(micros) // 1000, []
        found: dict[str, Any] = {}
        for key, kind, ttl, value in entries:
            name = key.decode().removeprefix(self.q.base)
            if ":producer:" in name or name.startswith(":done") or (name == "-fail:counts" and len(value) == 2):
                continue
            expires = name.startswith(EXPIRING)
            assert (ttl > 0) == expires, f"{name} expires in {ttl}"
            found[name] = self._read(name, kind.decode(), value)
        return found

    def _read(self, name: str, kind: str, value: Any) -> Any:
        match kind:
            case "set":
                return set(value)
            case "hash":
                fields = {field.decode(): each for field, each in zip(value[::2], value[1::2], strict=True)}
                fields.pop("tries", None)  # test_tries.py is about it
                told = {field: self._told(name, field, each) for field, each in fields.items()}
                return {field: each for field, each in told.items() if each or field != "update_policy"}
            case "zset":
                pairs = zip(value[::2], value[1::2], strict=True)
                return {member.decode(): self._told(name, member.decode(), score) for member, score in pairs}
            case _:
                return value

    def _told(self, name: str, field: str, value: bytes) -> bytes:
        if field == "failed" and name.startswith("-fail:job:"):
            facts: dict[str, Any] = msgspec.msgpack.decode(value)
            return wire(facts | {"at": self._masked(int(facts["at"]))})
        if name == ":outcomes":
            return re.sub(rb"(?<= )\d+", lambda ended: b"%d" % self._masked(int(ended[0])), value, count=1)
        if field == "update_policy":
            return b" ".join(sorted(set(value.split())))
        if field in _TIMES or name.endswith((":due", ":failed", ":broken")):
            ms = int(value)
            masked = self._masked(ms)
            if masked != ms and not name.startswith("-fail"):
                self.unsettled.append((name, field, "past" if masked == NOW else "future"))
            return b"%d" % masked
        return value

    def _masked(self, ms: int) -> int:
        if abs(ms - self.now) < _SOON:
            return NOW
        return LATER if abs(ms - self.now - DELAY) < _SOON else ms

    def entry(self, entry: Any) -> Any:
        """A start's reply for one claim: the payload, a job's fields, or None."""
        if not isinstance(entry, list):
            return entry
        names = [name.decode() for name in entry[::2]]
        return {name: self._told("", name, value) for name, value in zip(names, entry[1::2], strict=True)}

    # Changes without any transaction

    def settle_times(self, past: int, future: int) -> None:
        """As the model's: what was now or later becomes a time that is known."""
        with self.client.pipeline(transaction=False) as pipe:
            for name, field, when in self.unsettled:
                key, value = self.q.base + name, past if when == "past" else future
                if name.endswith((":due", ":failed", ":broken")):
                    pipe.zadd(key, {field: value})
                else:
                    pipe.hset(key, field, value)
            pipe.execute()

    def time_passes(self, id: str, score: int) -> None:
        self.client.zadd(self.q.due, {id: score})
        self.client.hset(self.q.job(id), "run_at", score)

    def time_opens(self, lane: str, rate_ms: int) -> None:
        """A pause of the lane ends, and its starts leave their period."""
        lanes = LaneKeys(self.q)
        pause = self.client.hget(lanes.rules, f"pause:{lane}")
        if pause is not None and not pause.startswith(b"0 "):
            self.client.hset(lanes.rules, f"pause:{lane}", "1 why")
        self.client.delete(lanes.starts(str(rate_ms), lane))
        if self.client.zscore(lanes.opens, lane) is not None:
            self.client.zadd(lanes.opens, {lane: 1})

    def expire(self, kind: str, id: str) -> None:
        self.client.delete(f"{self.q.base}:{kind}:{id}")


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The differences from the model, key by key."""
    lines = [
        f"{name}: {found.get(name)!r}\n   expected {expected.get(name)!r}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    return "\n".join(lines)
