"""The half of `job_model` that needs no worker: what a queue holds, what is put in, and what is seen of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.ops.driver import FENCE
from tests.ops.job_lanes import Lanes
from tests.ops.job_rules import (
    COUNTERS,
    NOW,
    UPDATE,
    Place,
    Policy,
    Record,
    Reply,
    bounds,
    covers,
    flags,
    forced,
    id_of,
    named,
    reference,
    replace,
    replace_task,
    replaces_data,
    reset_counts,
    resets_counts,
    sha1,
    tries,
)
from worqr.job_states import State


@dataclass
class Lines(Lanes):
    """The contents of a queue, and how a task gets into it. Lists have their front first. A method that is named like a script is
    that transaction; its return value is the reply.
    """

    fence_number: int = FENCE
    cleared: int = 0
    cleared_why: str | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    due: dict[str, int] = field(default_factory=dict[str, int])
    blocked: set[str] = field(default_factory=set[str])
    trash: dict[str, Any] = field(default_factory=dict[str, Any])
    active: dict[str, Record] = field(default_factory=dict[str, Record])
    items: dict[int, bytes] = field(default_factory=dict[int, bytes])
    held: dict[str, set[int]] = field(default_factory=dict[str, "set[int]"])
    leaving: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    fence: dict[str, Place | str] = field(default_factory=dict[str, "Place | str"])
    policies: dict[str, Policy] = field(default_factory=dict[str, Policy])
    marks: set[int] = field(default_factory=set[int])
    hungry: set[str] = field(default_factory=set[str])
    paused: str | None = None
    taken: dict[str, int] = field(default_factory=dict[str, int])
    twins: dict[str, set[str]] = field(default_factory=dict[str, "set[str]"])
    results: dict[str, Record] = field(default_factory=dict[str, Record])
    older_results: dict[str, Record] = field(default_factory=dict[str, Record])
    aside: dict[int, Record] = field(default_factory=dict[int, Record])
    listed: dict[str, list[int]] = field(default_factory=lambda: {"failed": [], "broken": []})
    fired: dict[str, str] = field(default_factory=dict[str, str])
    outcomes: dict[str, str] = field(default_factory=dict[str, str])
    failure_fence: int = FENCE
    failure_jobs: dict[str, Record] = field(default_factory=dict[str, Record])
    # What happened in the last transaction, for observers.
    script: str = ""
    moved: list[tuple[str, State, State]] = field(default_factory=list[tuple[str, State, State]])
    freed: list[str] = field(default_factory=list[str])
    unclaimed: int = 0
    """Of those that were cancelled: how many did not run."""
    pushed: int = 0
    released: int = 0
    """Claims that ended."""
    hints: list[int] = field(default_factory=list[int])
    acknowledged: list[int] = field(default_factory=list[int])
    # Tasks that ever came, and that ended, went or became one with another.
    born: int = 0
    ended: int = 0

    def begin(self, script: str) -> None:
        """A transaction begins."""
        self.script, self.pushed, self.released = script, 0, 0
        self.moved, self.hints, self.acknowledged = [], [], []

    # Small things

    def _next(self) -> int:
        self.fence_number += 1
        return self.fence_number

    def _count(self, name: str, n: int = 1) -> None:
        if n:
            self.counts[name] = self.counts.get(name, 0) + n

    def _move(self, before: State, after: State) -> None:
        self.moved.append((self.script, before, after))

    def is_trashed(self, record: Record) -> bool:
        return record["queued"] <= self.cleared

    def live_job(self, job_id: str) -> Record | None:
        """The record of that id, if it does not run."""
        found = self.jobs.get(job_id)
        return None if found is None or self.is_trashed(found) else found

    def _waiting_items(self) -> Iterable[bytes]:
        yield from self.queue
        yield from self.suspects
        for line in self.lanes.values():
            yield from line

    def count_waiting(self) -> int:
        """Tasks in line: raw ones, and jobs that are waiting (each once, however many references to it lie there)."""
        raw = sum(id_of(item) is None for item in (*self.queue, *self.suspects))
        return raw + sum(job["state"] == "waiting" for job in self.jobs.values() if not self.is_trashed(job))

    def count_queued(self) -> int:
        return self.count_waiting() + len(self.due) + len(self.blocked)

    @property
    def stale(self) -> int:
        return len(list(self._waiting_items())) - self.count_waiting()

    def room(self) -> float:
        """How many tasks the queue may start."""
        if self.paused is not None:
            return 0
        return math.inf if self.limit is None else max(0, self.limit - sum(map(len, self.held.values())))

    def startable(self) -> set[str]:
        """The lists of which a worker could start a task now."""
        return self.startable_lines() if self.room() > 0 else set()

    def suspect_waits(self) -> bool:
        return any(not self.is_stale_suspect(item) for item in self.suspects)

    def in_fence(self, worker: str) -> Place | None:
        place = self.fence.get(worker)
        return place if isinstance(place, Place) else None

    def _why_not(self, worker: str) -> str:
        return "mine" if self.in_fence(worker) else "lost"

    def any_ttl(self) -> int:
        return max((policy.ttl for worker, policy in self.policies.items() if worker in self.fence), default=0)

    # In line, or not yet

    def _put(self, job_id: str, run_at: int, *, front: bool = False, suspect: bool = False) -> State:
        job = self.jobs[job_id]
        if run_at > NOW:
            job["state"] = "due"
            self.due[job_id] = run_at
            if min((score, name) for name, score in self.due.items())[1] == job_id:
                self.hints.append(run_at)
        else:
            job["state"] = "waiting"
            self._push(reference(job_id), front=front, suspect=suspect, lane=job.get("lane"))
        return job["state"]

    def _push(self, item: bytes, *, front: bool, suspect: bool = False, lane: str | None = None) -> None:
        if lane is not None:
            self.pushed += self.push_to_lane(lane, item, front=front or suspect)
            return
        line = self.suspects if suspect else self.queue
        line.insert(0 if front else len(line), item)
        self.pushed += 1

    def _unblock(self, job_id: str) -> None:
        """The run of that id ended: its twin goes on by itself."""
        if job_id in self.blocked:
            self.blocked.discard(job_id)
            job = self.jobs[job_id]
            for name in UPDATE:
                job.pop(name, None)
            self._move("blocked", self._put(job_id, job["run_at"]))

    def _keep_result(
        self, job_id: str, record: Record, ttl: int, outcome: str, uncounted: int = 1, **facts: Any
    ) -> None:
        name = job_id.removeprefix("cron:")
        if name != job_id and name in self.fired:
            ran, texts = 0 if "claim" in record else -1, (facts.get("error_type", ""), facts.get("error_message", ""))
            end = f"{outcome} {NOW} {ran} {record.get('scheduled_for', 0)}"
            self.outcomes[name] = "\n".join((end, texts[0], facts.get("reason", texts[1])))
        if int(record.get("result_ttl", ttl)) > 0:
            self._retire(job_id)
            own = {"outcome": outcome, "first": record["first"], "last": record["last"], **tries(record, uncounted)}
            self.results[job_id] = own | facts

    def _retire(self, job_id: str) -> None:
        if job_id in self.results:
            self.older_results[job_id] = self.results.pop(job_id)

    def _drop_twin(self, job_id: str, record: Record) -> None:
        digest = record.get("twin")
        if digest is not None:
            self.twins.get(digest, set()).discard(job_id)

    def _forget(self, job_id: str, reason: str) -> None:
        """Delete the record of a job that does not run."""
        job = self.jobs.pop(job_id)
        self.places.pop(f":{job_id}", None)
        self.due.pop(job_id, None)
        self.blocked.discard(job_id)
        self.taken.pop(job_id, None)
        self._drop_twin(job_id, job)
        self._keep_result(job_id, job, self.any_ttl(), "cancelled", 0, reason=reason)

    def _mark_job(self, job_id: str, reason: str) -> int:
        job = self.active[job_id]
        job["cancel_reason"] = reason
        self.taken.pop(job_id, None)
        self.marks.add(job["claim"])
        return job["claim"]

    # Put in

    def enqueue(self, tasks: list[bytes], *, front: bool, max_length: int | None) -> Reply:
        self.begin("enqueue")
        waiting = self.count_queued()
        if max_length is not None and waiting + len(tasks) > max_length:
            return ["full", waiting]
        # Numbers are given as the items are pushed; in front the last of them is pushed first.
        items: dict[int, bytes] = {}
        for place in reversed(range(len(tasks))) if front else range(len(tasks)):
            items[place] = self._stored(tasks[place])
        for place in sorted(items, reverse=front):
            self._push(items[place], front=front)
            self._move("new", "waiting")
        self.born += len(tasks)
        self._count("enqueued", len(tasks))
        return ["ok", len(tasks)]

    def _stored(self, task: bytes) -> bytes:
        if id_of(task) is None:
            return task
        number, digest = self._next(), sha1(task)
        job_id = f"@{number}"
        own = {"task": task, "twin": digest, "queued": number, "state": "waiting", "first": number, "last": number}
        self.jobs[job_id] = own
        self.twins.setdefault(digest, set()).add(job_id)
        return reference(job_id)

    def _refusal(self, o: Mapping[str, Any], more: int = 0, more_in_lane: int = 0) -> str | None:
        job_id = o.get("id")
        there = job_id is not None and (self.live_job(job_id) is not None or job_id in self.active)
        if there or (job_id is not None and self._is_taken(job_id)):
            if o.get("exists") == "raise":
                return "duplicate"
            if o.get("exists") == "skip" or not there:
                return "unchanged"
        bound = o.get("max_length")
        if job_id is not None and self.live_job(job_id) is not None:
            return None
        in_lane = len(self.lanes.get(o.get("lane", ""), [])) + more_in_lane
        is_full = bound is not None and self.count_queued() + more >= bound
        return "full" if is_full or in_lane >= o.get("max_lane_length", math.inf) else None

    def _is_taken(self, job_id: str) -> bool:
        """`unique_for`; a deleted job holds its id no more."""
        return job_id in self.taken and not (job_id in self.jobs and self.is_trashed(self.jobs[job_id]))

    def dispatch_jobs(self, jobs: list[tuple[dict[str, Any], bytes]], *, whole: bool) -> Reply:
        self.begin("dispatch_jobs")
        if whole and (refused := self._refused(jobs)):
            return refused
        first, born, reply = self.fence_number + 1, self.born, list[Any]()
        self.fence_number += len(jobs)
        for i, (o, task) in enumerate(jobs):
            reply.append(self._dispatch(o, task, first + i))
        self._count("enqueued", self.born - born)
        return ["ok", *reply]

    def _refused(self, jobs: list[tuple[dict[str, Any], bytes]]) -> Reply | None:
        """The reply to an all-or-nothing dispatch that stored nothing: up to the first refused job."""
        seen, more, in_lanes, reply = set[str](), 0, Counter[str](), list[Any]()
        for o, _task in jobs:
            job_id, lane = o.get("id"), o.get("lane", "")
            if job_id in seen:
                word = "duplicate" if o.get("exists") == "raise" else None
            else:
                word = self._refusal(o, more, in_lanes[lane])
                is_new = word is None and (job_id is None or self.live_job(job_id) is None)
                is_due = o.get("run_at", NOW + o.get("delay", 0)) <= NOW and job_id not in self.active
                more, in_lanes[lane] = more + is_new, in_lanes[lane] + (is_new and is_due)
            reply.append([word or "created", job_id or "", self._last(job_id) if job_id else 0])
            if word in {"duplicate", "full"}:
                return ["refused", *reply]
            if job_id is not None:
                seen.add(job_id)
        return None

    def _last(self, job_id: str) -> int:
        """The newest dispatch of that id."""
        job = self.live_job(job_id) or self.active.get(job_id)
        if job is not None:
            return job["last"]
        return self.taken[job_id] if self._is_taken(job_id) else 0

    def _dispatch(self, o: Mapping[str, Any], task: bytes, number: int) -> Reply:
        job_id = o.get("id") or f"@{number}"
        if refused := self._refusal(o):
            return [refused, job_id, self._last(job_id) if "id" in o else number]
        if o.get("exists") == "cancel" and job_id in self.active:
            self._mark_job(job_id, "a later job with its id was dispatched")
        asked = o.get("run_at", NOW + o.get("delay", 0))
        job = self.live_job(job_id)
        if job is not None:
            outcome = self._update(job_id, job, o, task, number, asked)
        else:
            outcome = self._create(job_id, o, task, number, asked)
        if "unique_for" in o:
            self.taken[job_id] = number
        return [outcome, job_id, number]

    def _create(
        self, job_id: str, o: Mapping[str, Any], task: bytes, number: int, asked: int, was: State = "new"
    ) -> str:
        if job_id in self.jobs:  # it was deleted with the queue
            self._forget(job_id, self.cleared_why or "")
        self._retire(job_id)
        job: Record = {"task": task, "run_at": asked, "queued": number, "first": number, "last": number}
        job |= {name: o[name] for name in ("meta", "scheduled_for", "expires", "expires_at", "lane") if name in o}
        job |= o.get("fields", {})
        if "at_most" in o:
            job["latest"] = NOW + o["at_most"]
        self.jobs[job_id] = job
        self.born += 1
        if job_id in self.active:
            low, high = bounds(o.get("when"), asked)
            job |= {"state": "blocked", "update_low": low, "update_high": high}
            job |= flags(o)
            self.blocked.add(job_id)
            self._move(was, "blocked")
            return "blocked"
        self._move(was, self._put(job_id, asked, front=o.get("front", False)))
        return "created"

    def _update(self, job_id: str, job: Record, o: Mapping[str, Any], task: bytes, number: int, asked: int) -> str:
        was, old = job["state"], job["run_at"]
        if "at_most" in o:
            asked = min(asked, max(old, job.setdefault("latest", NOW + o["at_most"])))
        low, high = bounds(o.get("when"), asked)
        job["last"] = number
        changed = replaces_data(o) or resets_counts(o)
        expiry = job.get("expires"), job.get("expires_at")
        if replaces_data(o):
            replace_task(job, task)
            replace(job, o, "meta", "scheduled_for")
        job["run_at"] = max(low, min(old, high))
        if job["run_at"] != old or o.get("when", "set") == "set":
            replace(job, o, "expires", "expires_at")
            changed |= expiry != (o.get("expires"), o.get("expires_at")) or ("expires" in o and "run_at" not in o)
        if resets_counts(o):
            reset_counts(job)
        named_ones = forced(o)
        for name, value in o.get("fields", {}).items():
            if name in named_ones or name not in job:
                changed |= job.get(name) != value
                job[name] = value
        if was == "blocked":
            job["update_low"] = max(low, min(job["update_low"], high))
            job["update_high"] = max(low, min(job["update_high"], high))
            before = set(job.get("update_policy", "").split())
            job |= flags(o) | named(named_ones | before)
            return "blocked"
        if "run_at" in o or o.get("when") in {"earlier", "keep"}:
            changed |= job["run_at"] != old
        elif was == "waiting":
            changed |= job["run_at"] > NOW
        else:
            changed |= job["run_at"] == asked and not ("at_most" in o and asked == old)
        if job["run_at"] != old and (was == "due" or job["run_at"] > NOW):
            self.due.pop(job_id, None)
            self.places.pop(f":{job_id}", None)
            now = self._put(job_id, job["run_at"], front=o.get("front", False), suspect="suspect" in job)
            if now != was:
                self._move(was, now)
        return "updated" if changed else "unchanged"

    def fire_schedule(self, name: str, nominal: int, run_at: int, overlap: str, task: bytes) -> Reply:
        self.begin("fire_schedules")
        job_id = f"cron:{name}"
        if name in self.fired and nominal <= int(self.fired[name].split()[0]):
            last, word = self.fired[name].split()
            return [word if int(last) == nominal else "fired"]
        there = self.live_job(job_id) is not None or job_id in self.active
        if there and overlap == "queue":
            return ["busy"]
        word = "skipped" if there and overlap == "skip" else "ok"
        if word == "ok":
            if job_id in self.active:
                self._mark_job(job_id, "the next firing of its schedule came")
            o = {"id": job_id, "run_at": run_at, "scheduled_for": nominal}
            born = self.born
            self._dispatch(o, task, self._next())
            self._count("enqueued", self.born - born)
        self.fired[name] = f"{nominal} {word}"
        return [word]

    def promote_due(self, limit: int) -> Reply:
        self.begin("promote_due")
        self._promote(limit)
        self.overdue.clear()
        left = min(self.due.values(), default=None)
        return ["ok", self.pushed, -1 if left is None else max(0, left - NOW)]

    def promote_jobs(self, job_ids: list[str]) -> Reply:
        self.begin("promote_jobs")
        promoted = 0
        for job_id in job_ids:
            if self.due.pop(job_id, None) is not None:
                job = self.jobs[job_id]
                job["run_at"] = NOW
                self._move("due", self._put(job_id, 0, suspect="suspect" in job))
                promoted += 1
        return ["ok", promoted]

    def _promote(self, limit: int) -> None:
        ready = sorted((score, job_id) for job_id, score in self.due.items() if score <= NOW)
        for _, job_id in ready[:limit]:
            del self.due[job_id]
            self._move("due", self._put(job_id, 0, suspect="suspect" in self.jobs[job_id]))

    # Views of it

    def _ended_as(self, job_id: str, number: int) -> Record | None:
        for result in (self.results.get(job_id), self.older_results.get(job_id) if number else None):
            if result is not None and covers(result, number):
                return result
        return None

    def _live(self, job_id: str, number: int) -> Record | None:
        for job in (self.active.get(job_id), self.live_job(job_id)):
            if job is not None and covers(job, number):
                return job
        return None

    def status(self, job_id: str, number: int) -> tuple[str, int, int, str | None]:
        """The word, failures, attempts, and the type of the last error."""
        if job := self._live(job_id, number):
            return job["state"], *self._tries(job, int(job["state"] == "active"))
        if result := self._ended_as(job_id, number):
            failures, attempts = int(result.get("failures", 0)), int(result.get("attempts", 1))
            return result["outcome"], failures, attempts, result.get("error_type")
        if kept := self._aside_of(job_id, number):
            return "failed", *self._tries(kept, int(kept["reason"] == "broken"))
        return "gone", 0, 0, None

    def _tries(self, job: Record, uncounted: int) -> tuple[int, int, str | None]:
        attempts = sum(int(job.get(name, 0)) for name in COUNTERS) + uncounted
        return int(job.get("failures", 0)), attempts, job.get("error_type")

    def _aside_of(self, job_id: str, number: int) -> Record | None:
        of_id = (job for job in reversed(self.aside.values()) if job["id"] == job_id)
        return next((job for job in of_id if "first" not in job or covers(job, number)), None)

    def result(self, job_id: str, number: int) -> tuple[str, Record]:
        ended = self._ended_as(job_id, number)
        live = self._live(job_id, number)
        if live is not None and (number == 0 or ended is None or ended["outcome"] == "failed"):
            return "wait" if int(live.get("result_ttl", self.any_ttl())) else "never", {}
        if ended is not None:
            return ended["outcome"], ended
        if kept := self._aside_of(job_id, number):
            return "failed", kept
        newer = [where.get(job_id, {}).get("first", 0) for where in (self.active, self.jobs, self.results)]
        return "replaced" if number and max(newer) > number else "gone", {}

    def payloads(self) -> list[bytes]:
        """The waiting tasks, in the order in which they will be taken."""
        found, seen = list[bytes](), set[str]()
        for item in (*self.suspects, *self.queue, *(item for line in self.lanes.values() for item in line)):
            job_id = id_of(item)
            if job_id is None:
                found.append(item)
            elif job_id not in seen and (job := self.live_job(job_id)) is not None and job["state"] == "waiting":
                seen.add(job_id)
                found.append(job["task"])
        return found

    def present(self) -> int:
        """Tasks that are there: in line, due, blocked, or under a claim."""
        return self.count_queued() + len(self.items)

    def keys(self) -> dict[str, Any]:
        """Every key that the server should have, except stored replies and keys of notifications."""
        found: dict[str, Any] = {
            "": self.queue[::-1],
            ":suspects": self.suspects[::-1],
            ":due": self.due,
            ":blocked": self.blocked,
            ":cancelling": {str(claim) for claim in self.marks},
            ":hungry": self.hungry,
            ":workers": {worker: str(place) for worker, place in self.fence.items()},
            ":counts": self._counts(),
            ":fired": self.fired,
            ":outcomes": self.outcomes,
            ":aside": {job["id"]: claim for claim, job in self.aside.items()},
        }
        for part, value in self.trash.items():
            found[f":trash{part}"] = value[::-1] if isinstance(value, list) else value
        for kind, claims in self.listed.items():
            found[f":{kind}"] = {str(claim): self.aside[claim]["at"] for claim in claims}
        if self.paused is not None:
            found[":paused"] = self.paused
        for name, records in (("job", self.jobs), ("active", self.active), ("result", self.results)):
            found |= {f":{name}:{job_id}": record for job_id, record in records.items()}
        found |= {f":older_result:{job_id}": record for job_id, record in self.older_results.items()}
        found |= {f":taken:{job_id}": str(number) for job_id, number in self.taken.items()}
        found |= {f":twins:{digest}": ids for digest, ids in self.twins.items()}
        found |= {f":claim:{claim}": [item] for claim, item in self.items.items()}
        found |= {f":claims:{worker}": {str(claim) for claim in held} for worker, held in self.held.items()}
        found |= {
            f":leaving:{worker}": [str(claim).encode() for claim in order] for worker, order in self.leaving.items()
        }
        found |= {f":policy:{worker}": policy.fields() for worker, policy in self.policies.items()}
        found[":result_ttls"] = {worker: policy.ttl for worker, policy in self.policies.items() if policy.ttl}
        found |= {f":aside:{claim}": record for claim, record in self._linked().items()}
        found |= self._failure_keys()
        return {name: value for name, value in found.items() if value}

    def _counts(self) -> Record:
        counts: Record = {"fence": self.fence_number, **self.counts}
        counts |= {"cleared": self.cleared, "cleared_why": self.cleared_why} if self.cleared_why is not None else {}
        return counts | ({"stale": self.stale} if self.stale else {})

    def _linked(self) -> dict[int, Record]:
        """Those of one id know the one before and the one after."""
        found = {claim: dict(record) for claim, record in self.aside.items()}
        newest: dict[str, int] = {}
        for claim, record in found.items():
            if (older := newest.get(record["id"])) is not None:
                record["older"], found[older]["newer"] = older, claim
            newest[record["id"]] = claim
        return found

    def _failure_keys(self) -> dict[str, Any]:
        if not self.failure_jobs:
            return {}
        counts = {"fence": self.failure_fence, "enqueued": len(self.failure_jobs)}
        found: dict[str, Any] = {
            "-fail": [reference(job_id) for job_id in reversed(self.failure_jobs)],
            "-fail:counts": counts,
        }
        return found | {f"-fail:job:{job_id}": record for job_id, record in self.failure_jobs.items()}
