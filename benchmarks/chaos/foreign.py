"""A foreign producer that writes records wrongly: each has one odd field, or is a key of another type.

Its jobs have ids that begin with `SPOILT`. They may end in any way, and the checker looks at none of them: it looks at everything
beside them. The queues must become empty all the same.
"""

from __future__ import annotations

import time
from typing import Final

import redis

from benchmarks.chaos.aftermath import BASES
from benchmarks.chaos.faults import pick_node
from benchmarks.chaos.scene import NotNow, Scene
from benchmarks.chaos.servers import Node
from benchmarks.chaos.workload import PREFIX, QUEUES, SPOILT, TICKS

FIELDS: Final = (
    *("state", "run_at", "retried_at", "first", "last", "queued", "failures", "stalls", "timeouts", "started"),
    *("expires", "expires_at", "max_failures", "max_stalls", "max_timeouts", "min_backoff", "max_backoff", "jitter"),
    *(
        "retry_on",
        "fail_on",
        "timeout",
        "result_ttl",
        "meta",
        "latest",
        "lane",
        "batch",
        "batch_ended",
        "scheduled_for",
    ),
    *(
        "twin",
        "suspect",
        "error_type",
        "error_message",
        "tries",
        "saved",
        "saved_number",
        "saved_size",
        "claim",
        "worker",
    ),
    *("life", "lives_until", "lifetime", "open", "entries"),
    *("parent", "follow", "last_failed", "events:go", "event:1:go"),
    *("wait:sleep", "end:sleep", "child:a", "try:a", "step:a"),
    *("progress", "message", "cancel_reason", "update_data", "update_low", "update_high", "failed", "task"),
)
VALUES: Final[tuple[bytes, ...]] = (
    *(b"", b"abc", b"-1", b"1.5", b"1e308", b"nan", b"inf", b"100000000000000000000", b"9" * 5000, b"x" * 10_000),
    *(b"\xff\xfe", b"\xc1", b"0", b"999999999999999"),
)
MESSAGES: Final = (b"", b"abc", b"-1", b"\xff", b"9" * 5000)


class ForeignProducer:
    """Writes `rate` spoilt records a second while the server is up."""

    def __init__(self, scene: Scene, rate: float) -> None:
        self._scene = scene
        self._rate = rate
        self._began = time.monotonic()
        self._tried = 0

    def write_due(self) -> None:
        """Write as many records as the time since the last call wants, at most 10."""
        wanted = int((time.monotonic() - self._began) * self._rate)
        for _ in range(min(10, wanted - self._tried)):
            try:
                pick_node(self._scene)
                self._write_one(f"{SPOILT}-{self._tried}")
            except (NotNow, redis.RedisError, OSError):
                break
            finally:
                self._tried += 1
        self._tried = wanted

    def _write_one(self, name: str) -> None:
        rng = self._scene.rng
        base = BASES[rng.choice([queue for queue in QUEUES if queue != TICKS])]
        node = self._scene.servers.owner(base)
        if rng.random() < 0.1:
            node.ask("SET", f"{base}:job:{name}", rng.choice(VALUES))
        else:
            self._write_record(node, base, name)
        if rng.random() < 0.2:
            node.ask("ZADD", f"{base}:due", rng.choice([-1, 0, 1.5, int(time.time() * 1000)]), name)
        else:
            node.ask(rng.choice(["LPUSH", "RPUSH"]), base, f"\0worqr\0{name}")
        node.ask("PUBLISH", base, 1)
        if rng.random() < 0.1:
            node.ask("HSET", f"{base}:outbox", name, rng.choice(VALUES))
            node.ask("PUBLISH", f"{{{PREFIX}}}:due", b"0 " + base.encode())
        if rng.random() < 0.1:
            channel = rng.choice([base, f"{base}_cancel", f"{{{PREFIX}}}:due", f"{base}:cancelled"])
            node.ask("PUBLISH", channel, rng.choice(MESSAGES))
        self._scene.faults["records that a foreign producer spoilt"] += 1

    def _write_record(self, node: Node, base: str, name: str) -> None:
        rng = self._scene.rng
        record: dict[str, bytes | int] = {
            "task": name.encode(),
            "state": rng.choice([b"waiting", b"waiting", b"waiting", b"due"]),
            "run_at": int(time.time() * 1000),
            "queued": 9_999_999_999_999_999,
            "first": 1,
            "last": 1,
        }
        record[rng.choice(FIELDS)] = rng.choice(VALUES)
        node.ask("HSET", f"{base}:job:{name}", *(word for pair in record.items() for word in pair))
