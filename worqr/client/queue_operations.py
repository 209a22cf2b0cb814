"""What operators do with single tasks of a queue: read one, cancel runs by their claims, run scheduled jobs now. `Queue` inherits
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from worqr import ops
from worqr.batches import BatchInfo
from worqr.client.batch import Batch
from worqr.client.batch_handles import batch_of_id, list_batches
from worqr.client.cancellation import cancel_and_wait
from worqr.client.history import read_history
from worqr.client.inspection import ask_each
from worqr.client.job_reader import job_record
from worqr.client.running import claim_name, claim_of
from worqr.client.start_controls import StartControls
from worqr.ended_runs import MOST_RECENT, EndedRun, decode_run
from worqr.errors import UsageError
from worqr.history import History
from worqr.job_options import check_id
from worqr.keys import QueueKeys
from worqr.matches import Matches
from worqr.ops import MAX_ITEMS, CancelReply
from worqr.records import CancelCount, JobRecord
from worqr.validation import Seconds, check_count, check_task, check_text, from_ms, seconds


class QueueOperations(StartControls):
    """The part of `Queue` that operators use for single tasks. Its calls need ``mesh.connect()`` or ``join()``."""

    __slots__ = ()

    async def history(self, minutes: int = 60) -> History:
        """Return what has happened in the queue lately: a point for each minute, with counters, run times and waiting times.

        The leader of the mesh stores a record of each queue in use once a minute. ``Mesh(history_queues=...)`` says for how many
        queues. The last point ends now. Of several shards, the points are summed.

        Args:
            minutes: How many minutes, 1 to 4,320 (3 days). Above 480 (8 hours), there is one point for ten minutes.

        Returns:
            The history. Points of a time without a record are gaps: their numbers are None.

        Raises:
            UsageError: `minutes` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await read_history(self._client, self._keys, minutes)

    def batch(self, id: str) -> Batch:
        """Return a handle of the batch with this id whose home queue is this one. This does no I/O.

        Args:
            id: The id of the batch.

        Raises:
            UsageError: The id is not valid.
        """
        return batch_of_id(self._client, self._keys, check_id(id, generated=True))

    async def batches(self, limit: int = 100) -> list[BatchInfo]:
        """Return batches whose home queue is this one: those that have not ended first, then the newest.

        Args:
            limit: At most this many, up to 1,000. With more batches than that, it returns those that end or expire next.

        Raises:
            UsageError: `limit` is less than 1; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await list_batches(self._client, self._keys, min(check_count(limit, "limit"), MAX_ITEMS))

    async def recent(self, limit: int = 100) -> list[EndedRun]:
        """Return the runs that ended last, the last one first: how each ended, how long it took, and where it ran.

        Workers that serve the queue with ``recent=N`` store the last N runs for a day, once a second. A worker that dies loses
        those of its last second. Other queues have none.

        Args:
            limit: At most this many, up to 1,000.

        Raises:
            UsageError: `limit` is less than 1; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        most = min(check_count(limit, "limit"), MOST_RECENT)
        shards = await self._client.sharding.shards(self._keys)
        replies = await ask_each(self._client, shards, lambda keys: ops.list_ended(keys, most))
        found = [ended_run(keys, raw) for keys, runs in zip(shards, replies, strict=True) for raw in runs]
        return sorted(filter(None, found), key=lambda run: run.started.timestamp() + run.seconds, reverse=True)[:most]

    async def find(self, task: bytes | bytearray | memoryview, limit: int = 100) -> Matches:
        """Return where the plain tasks with this payload are, and the jobs that were such tasks. One request to each shard.

        It compares the 100,000 tasks at each end of the queue, and 1,000 running tasks; see ``Matches.complete``. A job that was
        dispatched is found by its id: ``mesh.find(id)``.

        Args:
            task: The payload.
            limit: At most this many tasks of each kind, up to 1,000.

        Raises:
            UsageError: The task is not bytes-like, or `limit` is less than 1; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        checked = check_task(task, self._client.settings.max_payload)
        most = min(check_count(limit, "limit"), MAX_ITEMS)
        shards = await self._client.sharding.shards(self._keys)
        found = await ask_each(self._client, shards, lambda keys: ops.find_task(keys, checked, most))
        named = [claim_name(keys, claim) for keys, each in zip(shards, found, strict=True) for claim in each.claims]
        places = sorted(place for each in found for place in each.places)
        ids = [name for each in found for name in each.ids]
        whole = all(each.complete for each in found) and max(len(places), len(ids), len(named)) <= most
        return Matches(tuple(places[:most]), tuple(ids[:most]), tuple(named[:most]), whole)

    async def read(self, id: str, *, payload: bool = False) -> JobRecord:
        """Return everything that is stored about one job: its state, options and tries with their errors, the payload, its last
        results, and its dead-letter records.

        Args:
            id: The job's id.
            payload: Read the whole payload, not only its first 4,096 bytes.

        Returns:
            The record. If the id is unknown, its ``status.state`` is ``gone``.

        Raises:
            UsageError: The id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        keys = await self._client.sharding.shard_of_id(self._keys, check_id(id, generated=True))
        whole = await self._client.ask(ops.read_payload(keys, id)) if payload else None
        return job_record(keys, id, await self._client.ask(ops.read_job(keys, id)), whole)

    async def payload(self, id: str | None = None, *, claim: str | None = None) -> bytes | None:
        """Return the whole payload of a job, of a running task, or of a dead-letter record.

        Args:
            id: The job's id. A running job comes first, then one that waits, then the newest dead-letter record.
            claim: The `claim` of a task in ``queue.running()``, which a plain task has, too.

        Returns:
            The payload, or None if there is no such task.

        Raises:
            UsageError: Neither or both are given, or one is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        if (id is None) == (claim is None):
            raise UsageError("name the task by its id or by its claim: payload('mail-7') or payload(claim=task.claim)")
        if claim is not None:
            keys, number = claim_of(self._keys, claim)
            return await self._client.ask(ops.read_payload(keys, claim=number))
        checked = check_id(id, generated=True)
        keys = await self._client.sharding.shard_of_id(self._keys, checked)
        return await self._client.ask(ops.read_payload(keys, checked))

    async def cancel_claims(self, *claims: str, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel running tasks by their claims. A plain task has a claim, too, while it has no id.

        Each run is cancelled as by ``job.cancel()``: the task never runs again, even if its worker dies. A claim that has ended
        is left out, so that you never cancel a later run of the same task.

        Args:
            *claims: The `claim` of tasks in ``queue.running()``.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the runs have ended. A slow handler raises nothing.

        Returns:
            The number of tasks that ran, and that ended within `wait`.

        Raises:
            UsageError: A claim or `wait` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        check_text(reason, "reason")
        named: dict[QueueKeys, list[int]] = {}
        for keys, claim in dict.fromkeys(claim_of(self._keys, each) for each in claims):
            named.setdefault(keys, []).append(claim)

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            start = int(last.cursor) if last else 0
            some, end = named[keys][start : start + MAX_ITEMS], start + MAX_ITEMS
            found = await self._client.ask(ops.cancel_claims(keys, some, reason=reason))
            return CancelReply(end < len(named[keys]), 0, found, str(end), "-")

        return await cancel_and_wait(self._client.link, named, step, seconds(wait, "wait"))

    async def run_now(self, *ids: str) -> int:
        """Make scheduled jobs due now. They go to the back of the queue, also jobs that wait for their next try.

        A job that is not scheduled stays as it is.

        Args:
            *ids: The ids of the jobs.

        Returns:
            The number of jobs that were scheduled and now wait.

        Raises:
            UsageError: An id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        named: dict[QueueKeys, list[str]] = {}
        for each in [check_id(each, generated=True) for each in ids]:
            named.setdefault(await self._client.sharding.shard_of_id(self._keys, each), []).append(each)
        return sum([await self._promote(keys, each) for keys, each in named.items()])

    async def _promote(self, keys: QueueKeys, ids: Sequence[str]) -> int:
        promoted = 0
        for start in range(0, len(ids), MAX_ITEMS):
            promoted += await self._client.ask(ops.promote_jobs(keys, ids[start : start + MAX_ITEMS]))
        return promoted


def ended_run(keys: QueueKeys, raw: bytes) -> EndedRun | None:
    """Return a stored run; None if another application has written something else."""
    run = decode_run(raw)
    if run is None:
        return None
    started, name = from_ms(run.claim / 1000), claim_name(keys, run.claim)
    return EndedRun(run.id, name, run.outcome, started, run.ms / 1000, run.worker, run.error or None)
