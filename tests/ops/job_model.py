"""A queue with its jobs as plain Python, written from what is promised and not from the Lua: what `test_job_machine.py`
compares the server with. Here: workers and operators; the rest in `job_lines` and `job_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.ops.job_lanes import MAIN, Seen
from tests.ops.job_lines import Lines
from tests.ops.job_rules import (
    COUNTERS,
    DIED,
    EXPIRED,
    LATER,
    LEAVING,
    NOW,
    RUN_ONLY,
    STALLED,
    Failure,
    Place,
    Policy,
    Record,
    Reply,
    id_of,
    is_expired,
    merge,
    reference,
    saved_of,
    sha1,
    size_of_saved,
)
from worqr.job_states import State
from worqr.policy import POLICY_FIELDS


@dataclass
class Model(Lines):
    """The whole queue: what workers and operators do to it."""

    # Workers

    def start_work(self, worker: str, policy: Policy, last: int, declared: Mapping[str, Any] | None = None) -> Reply:
        self.begin("start_work")
        if declared is not None:
            self.declared = dict(declared)
        self.policies[worker] = policy
        if self.in_fence(worker) is None:
            self.fence[worker] = Place(last)
        return ["ok"]

    def start_tasks(self, worker: str, number: int, wanted: int, seen: Seen | None = None) -> Reply:
        """`seen`: the server's reply, from which the turns of lanes are learned."""
        self.begin("start_tasks")
        place = self.in_fence(worker)
        if place is None:
            return ["not_serving"]
        if number < place.number:
            return ["late"]
        if number == place.number:
            again = range(place.first, place.first + place.count)
            return ["ok", place.first, *(self._entry(claim) for claim in again)]
        place.number, place.first, place.count = number, 0, 0
        if self.paused is not None:
            return ["paused"]
        place.first = self.fence_number + 1
        self.overdue.clear()
        room = self.room()
        entries, dry = self._claim_up_to(wanted, worker, place, seen)
        if seen is not None:
            self.order_suspects(seen)
        is_limited = not dry and len(entries) < wanted and sum(entry is not None for entry in entries) >= room
        place.count = len(entries)
        self._count("claimed", len(entries))
        self.hungry.discard(worker)
        if dry or is_limited:
            self.hungry.add(worker)
        return ["short" if dry else "limited" if is_limited else "ok", place.first, *entries]

    def _claim_up_to(self, wanted: int, worker: str, place: Place, seen: Seen | None) -> tuple[Reply, bool]:
        entries, promoted, room = list[Any](), False, self.room()
        while len(entries) < wanted and sum(entry is not None for entry in entries) < room:
            if self._may_run_suspect(worker, place) and self.suspects:
                if self.is_stale_suspect(self.suspects[0]):
                    self.suspects.pop(0)
                else:
                    entries.append(self._claim(self.suspects.pop(0), self._next(), worker))
                    place.suspect = self.fence_number
                continue
            is_free = self._may_run_suspect(worker, place)
            found = self.pick(seen, len(entries), self.fence_number + 1, is_free=is_free)
            if found is None and self.due and not promoted:
                self._promote(1000)
                promoted = True
            elif found is None:
                return entries, True
            elif found[1] is not None:
                entries.append(self._claim(found[1], self._next(), worker, found[0]))
        if seen is not None:
            self.end_start(seen, is_free=self._may_run_suspect(worker, place))
        return entries, False

    def _may_run_suspect(self, worker: str, place: Place) -> bool:
        return place.suspect not in self.held.get(worker, set())

    def _claim(self, item: bytes, claim: int, worker: str, lane: str = MAIN) -> Any:
        self.items[claim], job_id = item, id_of(item)
        if job_id is None:
            self._move("waiting", "active")
        else:
            job = self.jobs.pop(job_id)
            self.active[job_id] = job
            job |= {"claim": claim, "worker": worker, "state": "active"}
            if is_expired(job):
                failure = Failure("failed", "expired", EXPIRED)
                self._set_aside(claim, worker, failure, was="waiting")
                return None
            self._move("waiting", "active")
            if f":{job_id}" in self.places:
                self.places[str(claim)] = self.places.pop(f":{job_id}")
            elif lane != MAIN:
                self.places[str(claim)] = lane
                self.note_lane_start(lane)
        self.held.setdefault(worker, set()).add(claim)
        return self._entry(claim)

    def _entry(self, claim: int) -> Any:
        item = self.items.get(claim)
        job_id = None if item is None else id_of(item)
        return item if job_id is None else {**self.active[job_id], "id": job_id}

    def note_progress(self, worker: str, said: list[tuple[int, float | None, str]]) -> Reply:
        self.begin("note_progress")
        noted = 0
        for claim, progress, message in said:
            if claim in self.held.get(worker, set()):
                job_id = self._as_job(claim, worker)
                self.active[job_id] |= {"progress": "" if progress is None else repr(progress), "message": message}
                noted += 1
        return ["ok", noted]

    def save_state(self, worker: str, claim: int, number: int, step: str, value: bytes) -> str:
        self.begin("save_state")
        if claim not in self.held.get(worker, set()):
            return "lost"
        job = self.active[self._as_job(claim, worker)]
        if step:
            job.setdefault(f"step:{step}", value)
        elif number > job.get("saved_number", 0):
            job |= {"saved": value, "saved_number": number}
        job["saved_size"] = size_of_saved(job)
        return "ok"

    def _as_job(self, claim: int, worker: str) -> str:
        item = self.items[claim]
        job_id = id_of(item)
        if job_id is None:
            job_id = f"@{claim}"
            own = {"task": item, "twin": sha1(item), "first": claim, "last": claim, "queued": claim}
            self.active[job_id] = {**own, "claim": claim, "worker": worker, "state": "active"}
            self.twins.setdefault(sha1(item), set()).add(job_id)
            self.items[claim] = reference(job_id)
        return job_id

    # Ends

    def _end(self, claim: int, outcome: str, ttl: int, **facts: Any) -> None:
        item = self.items.pop(claim)
        job_id = id_of(item)
        self.ended += 1
        self._move("active", "cancelled" if outcome == "cancelled" else "finished")
        if job_id is not None:
            job = self.active.pop(job_id)
            self._drop_twin(job_id, job)
            if outcome == "cancelled":
                facts = {"reason": job.get("cancel_reason", "")}
            self._keep_result(job_id, job, ttl, outcome, **facts)
            self._unblock(job_id)

    def _take_mark(self, claim: int) -> bool:
        if claim not in self.marks:
            return False
        self.marks.discard(claim)
        self.acknowledged.append(claim)
        self._count("cancelled")
        return True

    def finish_tasks(self, worker: str, claims: list[int], results: Mapping[int, tuple[str, bytes]]) -> dict[int, str]:
        self.begin("finish_tasks")
        told: dict[int, str] = {}
        self._free_later(worker, claims)
        ttl = self.policies[worker].ttl if worker in self.policies else 0
        for claim in claims:
            if claim not in self.held.get(worker, set()):
                told[claim] = self._why_not(worker)
                continue
            self.held[worker].discard(claim)
            kind, value = results.get(claim, ("none", b""))
            if self._take_mark(claim):
                told[claim] = "cancelled"
                self._end(claim, "cancelled", ttl)
            else:
                self._count("finished")
                self._end(claim, "finished", ttl, kind=kind, value=value)
        self._free_places()
        return told

    def stop_tasks(self, worker: str, claims: list[int]) -> dict[int, str]:
        self.begin("stop_tasks")
        return self._release(worker, dict.fromkeys(sorted(claims, reverse=True)))

    def file_tasks(self, worker: str, lanes: Mapping[int, str]) -> dict[int, str]:
        self.begin("file_tasks")
        return self._release(worker, lanes)

    def _release(self, worker: str, lanes: Mapping[int, str | None]) -> dict[int, str]:
        """Gives claims back in this order, without counting the attempt; `lanes`: the lane in which each is filed."""
        self._free_later(worker, list(lanes))
        told: dict[int, str] = {}
        for claim, lane in lanes.items():
            if claim not in self.held.get(worker, set()):
                told[claim] = self._why_not(worker)
                continue
            self.held[worker].discard(claim)
            word = self._give_back(claim, worker, "", lane=lane)
            if word == "given":
                self._count("stopped")
            else:
                told[claim] = word
        self._free_places()
        return told

    def _may_be_filed(self, claim: int) -> bool:
        job_id = id_of(self.items[claim])
        job = None if job_id is None else self.active[job_id]
        return job is None or ("twin" in job and "lane" not in job and job_id not in self.jobs)

    def _file(self, claim: int, worker: str, lane: str) -> None:
        """Puts a raw task, or a job that was one, at the back of a lane; a suspect at the front."""
        job_id = self._as_job(claim, worker)
        job = self.active.pop(job_id)
        del self.items[claim]
        for name in RUN_ONLY:
            if name != "suspect":
                job.pop(name, None)
        self.jobs[job_id] = {"run_at": NOW, **job, "lane": lane, "state": "waiting", "queued": claim}
        self._push(reference(job_id), front=False, suspect="suspect" in job, lane=lane)
        self._move("active", "waiting")

    def retry_task(
        self, worker: str, claim: int, error: tuple[str, str, str], counter: str, limit: int, delay: int, run_at: Any
    ) -> str:
        self.begin("retry_task")
        if claim not in self.held.get(worker, set()):
            return self._why_not(worker)
        self._free_later(worker, [claim])
        self.held[worker].discard(claim)
        failure = Failure("failed", {"stalls": "stalled", "timeouts": "timeout"}.get(counter, "failed"), error)
        when = run_at if run_at is not None else NOW + delay if delay else None
        delayed = run_at is None and delay > 0
        word = self._give_back(
            claim, worker, counter, limit=limit, failure=failure, back=True, run_at=when, delayed=delayed
        )
        if word == "given":
            self._count("stalled" if counter == "stalls" else "retried")
        if word in ("given", "aside") and counter == "timeouts":
            self._count("timed_out")
        self._free_places()
        return word

    def rate_limited(self, worker: str, claim: int, error: tuple[str, str, str]) -> str:
        """`retry_task` with a pause, of a task in a lane."""
        self.begin("retry_task")
        self._free_later(worker, [claim])
        self.held[worker].discard(claim)
        lane = self.places[str(claim)]
        self.lane_pauses.setdefault(lane, True)
        word = self._give_back(claim, worker, "")
        if word == "given":
            self._count("retried")
        self._free_places()
        return word

    def fail_task(self, worker: str, claim: int, error: tuple[str, str, str], kind: str) -> str:
        self.begin("fail_task")
        if claim not in self.held.get(worker, set()):
            return self._why_not(worker)
        self._free_later(worker, [claim])
        self.held[worker].discard(claim)
        if self._take_mark(claim):
            self._end(claim, "cancelled", self.policies[worker].ttl)
            self._free_places()
            return "cancelled"
        failures = self._counters(claim)["failures"] + (kind == "failed")
        self._set_aside(claim, worker, Failure(kind, kind, error), failures=failures)
        self._free_places()
        return "aside"

    def _free_later(self, worker: str, claims: list[int]) -> None:
        """Notes the claims that end in this script: their places are free at its end."""
        self.freed += [str(claim) for claim in claims if claim in self.held.get(worker, set())]

    def _free_places(self) -> None:
        self.released = len(self.freed)
        for claim in self.freed:
            self.places.pop(claim, None)
        self.freed.clear()

    def _counters(self, claim: int) -> dict[str, int]:
        job_id = id_of(self.items[claim])
        job = {} if job_id is None else self.active[job_id]
        return {name: int(job.get(name, 0)) for name in COUNTERS}

    def _give_back(
        self,
        claim: int,
        worker: str,
        counter: str,
        *,
        limit: int = 0,
        failure: Failure | None = None,
        back: bool = False,
        run_at: int | None = None,
        delayed: bool = False,
        lane: str | None = None,
    ) -> str:
        """`lane`: that in which a task that is in none is filed."""
        policy = self.policies[worker]
        if self._take_mark(claim):
            self._end(claim, "cancelled", policy.ttl)
            return "cancelled"
        if claim <= self.cleared:
            self._count("dropped")
            self._end(claim, "cancelled", policy.ttl)
            return "dropped"
        counters = self._counters(claim)
        if counter:
            counters[counter] += 1
            job_id = id_of(self.items[claim])
            own = None if job_id is None else self.active[job_id].get(f"max_{counter}")
            if counters[counter] >= int(own or limit):
                assert failure is not None
                self._set_aside(claim, worker, failure, **counters)
                return "aside"
        if lane is not None and self._may_be_filed(claim):
            self._file(claim, worker, lane)
            return "given"
        changes: Record = {counter: counters[counter]} if counter else {}
        if failure is not None:
            kind, message, _ = DIED if failure.error == STALLED else failure.error
            changes |= {"error_type": kind if counter else "", "error_message": message}
        if delayed:
            changes["retried_at"] = NOW
        self._wait_again(claim, worker, changes, back=back, run_at=run_at, counted=bool(counter))
        return "given"

    def _wait_again(
        self, claim: int, worker: str, changes: Record, *, counted: bool, back: bool, run_at: int | None
    ) -> None:
        item = self.items[claim]
        job_id = id_of(item)
        when = NOW if run_at is None else run_at
        if job_id is None and not counted and when <= NOW:
            del self.items[claim]
            self._push(item, front=not back)
            self._move("active", "waiting")
            return
        if job_id is None:  # something must be remembered, so it becomes a job
            job_id = f"@{claim}"
            self.active[job_id] = {"task": item, "twin": sha1(item), "first": claim, "last": claim}
            self.twins.setdefault(sha1(item), set()).add(job_id)
        del self.items[claim]
        job = self.active.pop(job_id)
        for name in RUN_ONLY:
            job.pop(name, None)
        job |= {"queued": claim, "started": 1, **changes}
        if not counted and "error_message" in changes:
            job["earlier"] = int(job.get("earlier", 0)) + 1
        if run_at is not None:
            job["run_at"] = run_at
        stalls = int(job.get("stalls", 0))
        if stalls and stalls >= int(job.get("max_stalls", self.policies[worker].max_stalls)) - 1:
            job["suspect"] = 1
        twin = self.jobs.pop(job_id) if job_id in self.blocked else None
        if twin is not None:
            self.blocked.discard(job_id)
            when = job["run_at"] = merge(job, twin, when)
            self.ended += 1
        self.jobs[job_id] = job
        after = self._put_back(job_id, when, front=not back)
        self._move("active", after)
        if twin is not None:
            self._move("blocked", after)

    def _put_back(self, job_id: str, when: int, *, front: bool) -> State:
        """In a strict lane it waits in front, whenever it is due."""
        job = self.jobs[job_id]
        if "lane" not in job or not self.is_strict:
            return self._put(job_id, when, front=front, suspect="suspect" in job)
        job |= {"state": "waiting", "run_at": when}
        self._push(reference(job_id), front=True, lane=job["lane"])
        return "waiting"

    def _set_aside(self, claim: int, worker: str, failure: Failure, was: State = "active", **counters: int) -> None:
        policy, item = self.policies[worker], self.items[claim]
        job_id = id_of(item)
        job = {"task": item} if job_id is None else self.active.pop(job_id)
        del self.items[claim]
        names = ("error_type", "error_message", "error_traceback")
        error = dict(zip(names, failure.error, strict=True))
        facts: Record = {"id": job_id or f"@{claim}", "reason": failure.reason, **error, "worker": worker, "at": NOW}
        facts |= {name: counters.get(name, int(job.get(name, 0))) for name in COUNTERS}
        facts |= {"meta": job["meta"]} if "meta" in job else {}
        if policy.on_failure:
            self._post_failure(claim, job["task"], dict(facts))
        self._move(was, "failed" if failure.kind == "failed" else "undecodable")
        self._count(failure.kind)
        if failure.reason == "expired":
            self._count("expired")
        self.ended += 1
        if failure.kind == "broken" or policy.keep_failed:
            not_kept = ("claim", "state", "queued", "suspect", "cancel_reason")
            kept = {name: value for name, value in job.items() if name not in not_kept}
            self.aside[claim] = kept | facts
            self.listed[failure.kind].append(claim)
        if failure.kind == "failed":
            by_time = sorted(self.listed["failed"], key=lambda each: (self.aside[each]["at"], each))
            for oldest in by_time[: max(0, len(by_time) - policy.keep_failed)]:
                self._drop(oldest, "failed")
        if job_id is not None:
            self._drop_twin(job_id, job)
            counted = job | {name: facts[name] for name in COUNTERS}
            self._keep_result(job_id, counted, policy.ttl, "failed", int(failure.kind == "broken"), **error)
            self._unblock(job_id)

    def _drop(self, claim: int, kind: str) -> None:
        self.listed[kind].remove(claim)
        del self.aside[claim]
        self._move("failed" if kind == "failed" else "undecodable", "gone")

    def _post_failure(self, claim: int, task: bytes, facts: Record) -> None:
        self.failure_fence += 1
        number = self.failure_fence
        own = {"task": task, "failed": facts, "run_at": NOW, "state": "waiting"}
        self.failure_jobs[f"@f{claim}"] = {**own, "queued": number, "first": number, "last": number}

    # Leaving and being recovered

    def stop_work(self, worker: str, limit: int) -> Reply:
        self.begin("stop_work")
        return self._take_back(worker, limit, "")

    def fail_worker(self, worker: str, limit: int) -> Reply:
        self.begin("fail_worker")
        return self._take_back(worker, limit, "stalls")

    def _take_back(self, worker: str, limit: int, counter: str) -> Reply:
        ended = {"given": 0, "cancelled": 0, "dropped": 0, "aside": 0}
        most = self.policies.setdefault(worker, Policy()).max_stalls
        failure = Failure("failed", "stalled", STALLED) if counter else None
        for claim in self._newest(worker, limit):
            self._free_later(worker, [claim])
            if claim in self.held.get(worker, set()):
                self.held[worker].discard(claim)
                ended[self._give_back(claim, worker, counter, limit=most, failure=failure)] += 1
        self._free_places()
        self._count("stalled" if counter else "stopped", ended["given"])
        self.hungry.discard(worker)
        told = [ended["given"], ended["cancelled"], ended["aside"]]
        if self.held.get(worker):
            self.fence[worker] = LEAVING
            return ["more", *told]
        self.fence.pop(worker, None)
        self.policies.pop(worker, None)
        self.leaving.pop(worker, None)
        if not self.fence:
            self.declared = {}
        return ["ok", *told]

    def _newest(self, worker: str, limit: int) -> list[int]:
        """Of many claims the order is found once, and kept until all are given back."""
        if not self.leaving.get(worker):
            claims = sorted(self.held.get(worker, set()))
            if len(claims) <= limit:
                return claims[::-1]
            self.leaving[worker] = claims
        order = self.leaving[worker]
        some = order[: -limit - 1 : -1]
        del order[-limit:]
        return some

    # Cancelling and deleting

    def _cancel_waiting(self, job_id: str, reason: str) -> int:
        job = self.live_job(job_id)
        if job is None:
            return 0
        self._move(job["state"], "cancelled")
        self._forget(job_id, reason)
        self.ended += 1
        return 1

    def cancel_job(self, job_id: str, reason: str) -> Reply:
        self.begin("cancel_job")
        twin = self.live_job(job_id)
        last = twin["last"] if twin is not None else None
        waiting = self._cancel_waiting(job_id, reason)
        self.taken.pop(job_id, None)
        self._count("cancelled", waiting)
        self.unclaimed += waiting
        if job_id not in self.active:
            return ["ok", waiting]
        if last is not None:
            self.active[job_id]["last"] = last
        return ["ok", waiting, self._mark_job(job_id, reason)]

    def cancel_claims(self, claims: list[int], reason: str) -> Reply:
        self.begin("cancel_claims")
        found = [claim for claim in claims if claim in self.items]
        for claim in found:
            job_id = id_of(self.items[claim])
            if job_id is None:
                self.marks.add(claim)
            else:
                self._mark_job(job_id, reason)
        return ["ok", *found]

    def cancel_task(self, task: bytes, reason: str) -> tuple[int, set[int]]:
        """How many waited, and the claims of those that run."""
        self.begin("cancel_task")
        waiting, claims = 0, set[int]()
        for job_id in sorted(self.twins.get(sha1(task), set())):
            if job_id in self.active:
                claims.add(self._mark_job(job_id, reason))
            else:
                waiting += self._cancel_waiting(job_id, reason)
        if id_of(task) is None:
            raw = self.queue.count(task)
            self.queue = [item for item in self.queue if item != task]
            waiting, self.ended = waiting + raw, self.ended + raw
            same = {claim for claim, item in self.items.items() if item == task}
            self.marks |= same
            claims |= same
        self._count("cancelled", waiting)
        self.unclaimed += waiting
        return waiting, claims

    def cancel_all(self, reason: str) -> tuple[int, set[int]] | None:
        self.begin("cancel_all")
        waiting = self._clear(reason)
        if waiting is None:
            return None
        for claim, item in self.items.items():
            job_id = id_of(item)
            if job_id is None:
                self.marks.add(claim)
            else:
                self._mark_job(job_id, reason)
        self._count("cancelled", waiting)
        self.unclaimed += waiting
        return waiting, set(self.items)

    def delete_queue(self) -> Reply:
        self.begin("delete_queue")
        waiting = self._clear("the queue was deleted")
        if waiting is None:
            return ["busy"]
        self._count("deleted", waiting)
        return ["ok", waiting]

    def has_trash(self) -> bool:
        return bool(self.lane_trash) or any(self.trash.values())

    def _clear(self, why: str) -> int | None:
        if self.has_trash():
            return None
        waiting = self.count_queued()
        for job in self.jobs.values():
            self._move(job["state"], "cancelled")
        self.trash = {"": self.queue, ":suspects": self.suspects, ":due": self.due, ":blocked": self.blocked}
        self.queue, self.suspects, self.due, self.blocked = [], [], {}, set()
        self.lane_trash, self.lanes = self.lanes, {}
        self.cleared, self.cleared_why = self._next(), why
        self.ended += waiting
        return waiting

    def purge_queue(self, limit: int, blocked_left: set[str]) -> Reply:
        """A job counts as ten plain tasks. `blocked_left`: the deleted blocked ones that are there still; a set has no order."""
        self.begin("purge_queue")
        for part in ("", ":suspects"):
            line: list[bytes] = self.trash.get(part, [])
            while limit > 0 and line:
                job = id_of(line.pop(0))
                limit -= 1 if job is None else 10
                self._purge(job)
        while limit > 0 and self.lane_trash:
            lane = min(self.lane_trash)
            line, limit = self.lane_trash[lane], limit - 1
            if not line:
                del self.lane_trash[lane]
            while limit > 0 and line:
                self._purge(id_of(line.pop(0)))
                limit -= 10
        due: dict[str, int] = self.trash.get(":due", {})
        for _, job_id in sorted((score, job_id) for job_id, score in due.items())[: max(0, -(-limit // 10))]:
            limit -= 10
            del due[job_id]
            self._purge(job_id)
        blocked: set[str] = self.trash.get(":blocked", set())
        gone = blocked - blocked_left
        assert len(gone) == min(max(0, -(-limit // 10)), len(blocked))
        for job_id in sorted(gone):
            blocked.discard(job_id)
            self._purge(job_id)
        return ["more" if self.has_trash() else "ok"]

    def _purge(self, job_id: str | None) -> None:
        if job_id is not None and job_id in self.jobs and self.is_trashed(self.jobs[job_id]):
            self._forget(job_id, self.cleared_why or "")

    # The dead-letter queue

    def retry_aside(self, kind: str, claims: list[int]) -> Reply:
        self.begin("retry_aside")
        count, number = 0, self.fence_number
        for claim in claims:
            old = self.aside.get(claim) if claim in self.listed[kind] else None
            if old is None or self.live_job(old["id"]) is not None or old["id"] in self.active:
                continue
            self.listed[kind].remove(claim)
            del self.aside[claim]
            count += 1
            kept = {
                name: old[name] for name in ("first", "meta", "failed", "scheduled_for", "twin", "lane") if name in old
            }
            kept |= {name: old[name] for name in POLICY_FIELDS & old.keys()} | saved_of(old)
            if "first" not in old:  # it was a raw task
                kept["twin"] = sha1(old["task"])
            if "twin" in kept:
                self.twins.setdefault(kept["twin"], set()).add(old["id"])
            was: State = "failed" if kind == "failed" else "undecodable"
            self._create(old["id"], {"fields": kept}, old["task"], number + count, NOW, was)
        self.fence_number += count
        self._count("enqueued", count)
        return ["ok", count]

    def drop_aside(self, kind: str, claims: list[int]) -> Reply:
        self.begin("drop_aside")
        there = [claim for claim in dict.fromkeys(claims) if claim in self.listed[kind]]
        for claim in there:
            self._drop(claim, kind)
        return ["ok", len(there)]

    def find_aside(self, kind: str, ids: list[str]) -> list[int]:
        """The newest of each id first; one that is named twice gets two."""
        left = {
            job_id: [claim for claim in reversed(self.aside) if self.aside[claim]["id"] == job_id] for job_id in ids
        }
        found = list[int]()
        for job_id in ids:
            mine = [claim for claim in left[job_id] if claim in self.listed[kind]]
            if mine:
                found.append(mine[0])
                left[job_id] = left[job_id][left[job_id].index(mine[0]) + 1 :]
            else:
                left[job_id] = []
        return found

    # Lanes

    def set_lane(self, lane: str, setting: str, value: str, *, ends: bool = False) -> Reply:
        self.begin("set_lane")
        if setting == "pause":
            self.lane_pauses[lane] = ends
        elif setting == "resume":
            self.lane_pauses.pop(lane, None)
        elif value == "*":
            self.settings.pop(f"{setting}:{lane}", None)
        else:
            self.settings[f"{setting}:{lane}"] = value
        return ["ok"]

    def cancel_lane(self, lane: str, reason: str) -> tuple[int, set[int]]:
        """What waits, is due or is blocked in the lane, and what runs in it."""
        self.begin("cancel_lane")
        of_lane = {claim for claim in self.items if self.places.get(str(claim)) == lane}
        running = {id_of(self.items[claim]) for claim in of_lane}
        there = [name for name, job in self.jobs.items() if job.get("lane") == lane and self.live_job(name) is not None]
        waiting = sum(self._cancel_waiting(name, reason) for name in there)
        self.lanes.pop(lane, None)
        for name in running:
            self._mark_job(name or "", reason)
        self._count("cancelled", waiting)
        self.unclaimed += waiting
        return waiting, of_lane

    # Pausing

    def pause(self, reason: str) -> Reply:
        self.begin("pause")
        self.paused = reason
        self._count("paused")
        return ["ok"]

    def resume(self) -> Reply:
        self.begin("resume")
        self.paused = None
        self._count("resumed")
        return ["ok"]

    # Time, without any transaction

    def time_passes(self, job_id: str, score: int) -> None:
        """The time of a due job comes."""
        self.begin("")
        self.due[job_id] = self.jobs[job_id]["run_at"] = score

    def expire(self, kind: str, job_id: str) -> None:
        self.begin("")
        {"result": self.results, "older_result": self.older_results, "taken": self.taken}[kind].pop(job_id, None)

    def settle_times(self, past: int, future: int) -> None:
        """What was now or later by the server's clock becomes a time that is known."""
        times = {NOW: past, LATER: future}
        for records in (self.jobs, self.active, self.aside):
            for job in records.values():
                for name in ("run_at", "retried_at", "latest", "update_low", "update_high", "at"):
                    if name in job:
                        job[name] = times.get(job[name], job[name])
        for due in (self.due, self.trash.get(":due", {})):
            for job_id, score in due.items():
                due[job_id] = times.get(score, score)
