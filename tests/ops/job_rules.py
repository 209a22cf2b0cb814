"""The rules of `job_model` for single records: what a dispatch changes, what is merged, what has expired. And status words.

Records are dicts with the fields that the server keeps. Times are milliseconds; two of them stand for what only the
server's clock knows: `NOW`, and `LATER`, which is `DELAY` from now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worqr.keys import MARKER
from worqr.policy import POLICY_FIELDS

NOW = 1_700_000_000_000
DELAY = 10_000_000_000_000
LATER = NOW + DELAY
NEVER = 2**53 - 1
TTL = 90_000_000
LEAVING = "leaving"

Record = dict[str, Any]
Reply = list[Any]

RUN_ONLY = ("claim", "worker", "progress", "message", "cancel_reason", "suspect", "retried_at")
UPDATE = ("update_data", "update_counts", "update_policy", "update_low", "update_high")
COUNTERS = ("failures", "stalls", "timeouts")


def reference(job_id: str) -> bytes:
    return MARKER + job_id.encode()


def id_of(item: bytes) -> str | None:
    return item[len(MARKER) :].decode() if item.startswith(MARKER) else None


def sha1(task: bytes) -> str:
    return hashlib.sha1(task).hexdigest()


@dataclass
class Place:
    """A worker in the fence: its last start request."""

    number: int
    first: int = 0
    count: int = 0
    suspect: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.first} {self.count} {self.suspect}"


@dataclass
class Policy:
    """The options of a worker's handler in the queue."""

    max_stalls: int = 3
    keep_failed: int = 2
    on_failure: bool = False
    keeps_results: bool = False

    @property
    def ttl(self) -> int:
        return TTL if self.keeps_results else 0

    def fields(self) -> Record:
        kept = {"max_stalls": self.max_stalls, "keep_failed": self.keep_failed, "on_failure": int(self.on_failure)}
        return kept | ({"result_ttl": TTL} if self.keeps_results else {})


@dataclass
class Failure:
    """Why a run did not end well, as its dead-letter record has it."""

    kind: str
    reason: str
    error: tuple[str, str, str]


STALLED = ("Stalled", "its workers died while it ran, as often as max_stalls allows", "")
DIED = ("Stalled", "its worker died while it ran", "")
EXPIRED = ("Expired", "it was not started before it expired", "")


def covers(record: Record, number: int) -> bool:
    return number == 0 or record["first"] <= number <= record["last"]


def bounds(when: str | None, asked: int) -> tuple[int, int]:
    """The rule by which a dispatch moves a due time: it is to lie between these."""
    return {"keep": (0, NEVER), "later": (asked, NEVER), "earlier": (0, asked)}.get(when or "set", (asked, asked))


def replaces_data(o: Mapping[str, Any]) -> bool:
    return o.get("data", True)


def resets_counts(o: Mapping[str, Any]) -> bool:
    return o.get("counts", replaces_data(o))


def flags(o: Mapping[str, Any]) -> Record:
    """The changes of a blocked job's dispatch, in case the run returns."""
    flags: Record = {"update_data": 1} if replaces_data(o) else {}
    flags |= {"update_counts": 1} if resets_counts(o) else {}
    return flags | named(forced(o))


def forced(o: Mapping[str, Any]) -> set[str]:
    """The fields that a dispatch gives and that replace what is there."""
    return set(o.get("policy", "").split()) & set(o.get("fields", {}))


def named(forced: set[str]) -> Record:
    return {"update_policy": " ".join(sorted(forced))} if forced else {}


def replace(job: Record, o: Mapping[str, Any], *names: str) -> None:
    for name in names:
        job.pop(name, None)
        if name in o:
            job[name] = o[name]


def reset_counts(job: Record) -> None:
    for name in (*COUNTERS, "suspect", "error_type", "error_message"):
        job.pop(name, None)


def saved_of(job: Record) -> Record:
    """What its runs have saved."""
    return {name: value for name, value in job.items() if name.startswith(("saved", "step:"))}


def size_of_saved(job: Record) -> int:
    """The bytes that its runs have saved; a step counts as 1 KiB at least."""
    steps = [len(name) - 5 + len(value) for name, value in job.items() if name.startswith("step:")]
    return len(job.get("saved", b"")) + sum(max(1024, size) for size in steps)


def replace_task(job: Record, task: bytes) -> None:
    """What was saved belongs to the payload, and with it the number of the runs that saved it."""
    if job["task"] != task and (saved := saved_of(job)):
        for name in saved:
            del job[name]
        job.pop("earlier", None)
    job["task"] = task


def merge(job: Record, twin: Record, when: int) -> int:
    """Change the job that returned as the dispatches of its blocked twin said; return when it is due then."""
    if "update_data" in twin:
        replace_task(job, twin["task"])
        job |= {} if "saved_size" in job else saved_of(twin)
        replace(job, twin, "meta", "scheduled_for")
    if "update_counts" in twin:
        reset_counts(job)
    forced = twin.get("update_policy", "").split()
    for name in POLICY_FIELDS & twin.keys():
        if name in forced or name not in job:
            job[name] = twin[name]
    job["last"] = twin["last"]
    return max(twin["update_low"], min(when, twin["update_high"]))


def tries(job: Record, uncounted: int) -> Record:
    """The attempt counters in a result: a missing one is 0, or one attempt."""
    attempts = uncounted + sum(int(job.get(name, 0)) for name in COUNTERS)
    kept = {name: job[name] for name in ("progress", "message") if job.get(name)}
    kept |= {"failures": job["failures"]} if int(job.get("failures", 0)) else {}
    return kept | ({"attempts": attempts} if attempts != 1 else {})


def is_expired(job: Record) -> bool:
    if "started" in job:
        return False
    if "expires" in job:
        return job["run_at"] + int(job["expires"]) < NOW
    return "expires_at" in job and int(job["expires_at"]) < NOW
