"""The keys of a prefix: a dump to compare, and the checker that names the keys that a test has leaked."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import redis

ALWAYS_LEFT = ("version",)
EXPIRING = (
    *(
        "{*}*:result:*",
        "{*}*:older_result:*",
        "{*}*:ended:*",
        "{*}*:taken:*",
        "{*}*:sent:*",
        "{*}*:paused",
        "{*}*:starts:*",
        "{*}*:waiters",
    ),
    *(
        "{*}*:done",
        "{*}*:done_fired",
        "{*}*:done_total",
        "{*}*:done:*",
        "{*}*:done_id:*",
        "{*}*:tag:*",
        "{*}*:tag_marks",
    ),
    *(
        "{*}*:part:*",
        "{*}*:counts",
        "{*}*:runs",
        "{*}*:recent",
        "{*}*:history",
        "{*}*:history10",
        "{*}*:fired",
        "{*}*:outcomes",
    ),
    *("{*}*:producer:*", "producer:*", "worker:*", "info:*", "queues", "waiting", "watched", "snapshot", "histories"),
    *(
        "{*}*-limit",
        "{*}*-limit:held",
        "{*}*-limit:permits",
        "{*}*-limit:moments:*",
        "{*}*-limit:costs:*",
        "{*}*-limit:turn",
    ),
    *("log", "schedules", "schedules_due", "schedules_seen", "leader", "outboxes"),
)
"""The keys that may expire, by their `short` names, as the page about the wire says. Any other key that does is a leak."""


class Entry(NamedTuple):
    """One key: ``type``, the whole ``value`` (bytes, list, set, dict), and whether it expires by itself."""

    type: str
    value: Any
    expires: bool


def dump(client: redis.Redis, prefix: str) -> dict[bytes, Entry]:
    """Every key under `prefix`, by name: ``PREFIX:{Q}...`` and ``{PREFIX}:...``."""
    starts = (f"{prefix}:{{".encode(), f"{{{prefix}}}:".encode())
    keys = sorted({key for key in client.scan_iter(count=1000) if key.startswith(starts)})
    found: dict[bytes, Entry] = {}
    for key in keys:
        kind = client.type(key).decode()
        if kind != "none":  # it may have expired meanwhile
            found[key] = Entry(kind, _value(client, key, kind), client.pttl(key) >= 0)
    return found


def _value(client: redis.Redis, key: bytes, kind: str) -> Any:
    match kind:
        case "string":
            return client.get(key)
        case "list":
            return client.lrange(key, 0, -1)
        case "set":
            return client.smembers(key)
        case "zset":
            return dict(client.zrange(key, 0, -1, withscores=True))
        case "stream":
            return client.xrange(key)
        case "hash":
            return client.hgetall(key)
        case _:
            return kind


def short(key: bytes, prefix: str) -> str:
    """The key without its prefix: ``P:{Q1}:due`` is ``{Q1}:due``, ``{P}:Workers`` is ``Workers``."""
    name = key.decode("utf-8", "backslashreplace")
    return name.removeprefix(f"{prefix}:").removeprefix(f"{{{prefix}}}:")


def leaks(client: redis.Redis, prefix: str, allow: Iterable[str] = ()) -> dict[str, Entry]:
    """Keys that hold no waiting tasks, match none of the patterns `allow` (on the `short` name), and expire not as documented."""
    patterns = (*ALWAYS_LEFT, *allow)
    return {
        name: entry
        for key, entry in dump(client, prefix).items()
        if not _holds_waiting_tasks(name := short(key, prefix))
        and not _matches(name, patterns)
        and not (entry.expires and _matches(name, EXPIRING))
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _holds_waiting_tasks(name: str) -> bool:
    return name.startswith("{") and name.endswith("}")


def assert_no_leaks(client: redis.Redis, prefix: str, allow: Iterable[str] = ()) -> None:
    """Fail, naming every key that was left behind and its value."""
    left = leaks(client, prefix, allow)
    assert not left, "keys left behind:\n" + "\n".join(f"  {name}  {entry}" for name, entry in left.items())


def delete_all(client: redis.Redis, prefix: str) -> None:
    """Remove every key under `prefix`."""
    if keys := list(dump(client, prefix)):
        client.delete(*keys)
