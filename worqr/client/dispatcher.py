"""Send enqueues and dispatches, and make the handles of the stored jobs.

For `worqr.client.queue` and `worqr.client.producer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from worqr import ops
from worqr.client.client import Client
from worqr.client.job import Job, Outcome, Results
from worqr.client.raw_options import RawOptions
from worqr.client.room import check_fits
from worqr.errors import Duplicate, NotReplicated, UsageError, WorqrError, at_max_length, reply_in, set_job
from worqr.keys import QueueKeys
from worqr.ops import MAX_BYTES, MAX_ITEMS, Dispatched, NewJob
from worqr.ops.replies import in_chunks
from worqr.script_call import Call
from worqr.tracing import meta_of_plain_tasks


async def send_tasks(client: Client, queue: QueueKeys, tasks: list[bytes], given: RawOptions) -> int:
    """Enqueue raw tasks as these options say, in as many requests as they need, and return their number.

    Raises:
        UsageError: they do not fit one request and must; or several unique tasks go to a queue with several shards.
        Duplicate, QueueFull, NotReplicated: as `Queue.enqueue`.
    """
    chunks = [tasks] if len(tasks) == 1 else list(in_chunks(tasks, len))
    if len(chunks) > 1 and (given.unique or given.max_length is not None):
        raise UsageError(
            f"a {'unique' if given.unique else 'bounded'} enqueue must fit one request: at most {MAX_ITEMS} tasks and "
            f"{MAX_BYTES:,} bytes, not {len(tasks):,} tasks and {sum(map(len, tasks)):,} bytes"
        )
    if not chunks:
        await client.link.driver.checkpoint()
        return 0
    replicas = client.settings.replicas if given.replicas is None else given.replicas
    if given.unique:
        return await send_unique(
            client, queue, tasks, replicas, given.wait, front=given.front, max_length=given.max_length
        )
    if len(chunks) == 1:
        return await send_enqueue(client, queue, tasks, given.front, given.max_length, replicas, given.wait)
    return await send_chunks(client, queue, chunks, given.front, replicas)


async def send_enqueue(
    client: Client,
    queue: QueueKeys,
    tasks: list[bytes],
    front: bool,
    max_length: int | None,
    replicas: int,
    wait: float = 0.0,
) -> int:
    """Enqueue raw tasks in one request, into the next shard of a queue, and return their number.

    If the queue is at its `max_length`, wait for room for up to `wait` seconds.
    """
    sharding = client.sharding
    keys = await sharding.next_shard(queue)
    bound = None if max_length is None else await sharding.max_length_per_shard(keys, max_length)
    if not wait:
        return await client.link_to(keys.name).call(enqueue_at(client, keys, tasks, front, bound, replicas=replicas))
    check_fits(queue, len(tasks), bound, wait)

    async def attempt(waiter: str) -> int:
        call = enqueue_at(client, keys, tasks, front, bound, replicas=replicas, waiter=waiter)
        return await client.link_to(keys.name).call(call)

    return await client.rooms.when_room(keys, wait, attempt)


def enqueue_at(
    client: Client,
    keys: QueueKeys,
    tasks: list[bytes],
    front: bool = False,
    bound: int | None = None,
    *,
    replicas: int,
    waiter: str = "",
) -> Call[int]:
    """Return the request that enqueues raw tasks in the shard `keys`, with the context of the trace if the mesh sends it."""
    call = ops.enqueue(keys, tasks, front=front, max_length=bound, waiter=waiter, replicas=replicas)
    return call if client.settings.tracing is None else traced(client, call)


def traced(client: Client, call: Call[int]) -> Call[int]:
    """Return an enqueue of plain tasks with the context of the current trace, if the mesh sends it with plain tasks."""
    meta = meta_of_plain_tasks(client.settings.tracing)
    return call if meta is None else ops.enqueue_traced(call, meta)


async def send_chunks(client: Client, queue: QueueKeys, chunks: list[list[bytes]], front: bool, replicas: int) -> int:
    """Enqueue raw tasks in several requests, one after the other, and return their number.

    With `front`, the last chunk is sent first, so that the tasks keep their order.

    Raises:
        NotReplicated: a request had too few replicas. It is raised after the last request, so that all tasks are stored.
        WorqrError: a request failed. A note says how many tasks were stored before.
    """
    stored, late = 0, None
    for chunk in reversed(chunks) if front else chunks:
        try:
            stored += await send_enqueue(client, queue, chunk, front, None, 0 if late else replicas)
        except NotReplicated as error:
            stored, late = stored + len(chunk), error
        except WorqrError as error:
            parts = f"the {'last' if front else 'first'} {stored:,} were stored before"
            error.add_note(f"of {sum(map(len, chunks)):,} tasks in several requests {parts}")
            raise
    if late is not None:
        raise late
    return stored


async def send_unique(
    client: Client, queue: QueueKeys, tasks: list[bytes], replicas: int, wait: float = 0.0, **options: Any
) -> int:
    """Dispatch raw tasks as jobs whose ids are hashes of their payloads, all or none, and return their number.

    If the queue is at its `max_length`, wait for room for up to `wait` seconds.

    Raises:
        UsageError: There are several tasks, and the queue has several shards.
        Duplicate: One of them waits or runs already.
    """
    sharding = client.sharding
    if len(tasks) > 1 and len(await sharding.shards(queue)) > 1:
        raise UsageError(
            f"queue {queue.display_name!r} has several shards, and nothing can be all or none in several of them: enqueue "
            "unique tasks one by one"
        )
    given = {name: value for name, value in options.items() if value is not None}
    jobs = [({**given, "id": f"sha256:{hashlib.sha256(task).hexdigest()}", "exists": "raise"}, task) for task in tasks]
    keys = await sharding.shard_of_id(queue, cast("str", jobs[0][0]["id"]))
    with_limits = [(await sharding.options_for(keys, options), task) for options, task in jobs]
    check_fits(queue, len(jobs), with_limits[0][0].get("max_length"), wait)

    def make(waiter: str) -> Call[list[Dispatched]]:
        return ops.dispatch_jobs(keys, waiting_as(with_limits, waiter), all_or_none=True, replicas=replicas)

    await send_dispatch(client, queue, make, keys, wait=wait)
    return len(jobs)


def waiting_as(jobs: Sequence[NewJob], waiter: str) -> Sequence[NewJob]:
    """Return the jobs of one request, which wait for room together under the name `waiter` (empty: they do not wait)."""
    return [({**options, "waiter": f"{waiter} {len(jobs)}"}, task) for options, task in jobs] if waiter else jobs


async def send_dispatch(
    client: Client,
    queue: QueueKeys,
    make: Callable[[str], Call[list[Dispatched]]],
    at: QueueKeys,
    results: Results | None = None,
    *,
    wait: float = 0.0,
) -> Job[Any]:
    """Send a dispatch into the shard `at` of a queue, and return the handle of its last job. If a job was refused, it is the last
    one.

    Args:
        make: returns the request, with the name under which it waits for room (empty: it does not).
        wait: seconds to wait for room if the queue is at its `max_length`.

    Raises:
        QueueFull: The queue is at its `max_length`.
        Duplicate: The id is taken.
        NotReplicated: The job was stored; the error has its handle.
    """

    async def attempt(waiter: str) -> Job[Any]:
        try:
            done = await client.link_to(at.name).call(make(waiter))
        except NotReplicated as late:
            set_job(late, handle_of(client, queue, reply_in(late)[-1], results, at=at))
            raise
        return handle_of(client, queue, done[-1], results, at=at)

    return await client.rooms.when_room(at, wait, attempt) if wait else await attempt("")


def handle_of(
    client: Client, queue: QueueKeys, done: Dispatched, results: Results | None = None, *, at: QueueKeys | None = None
) -> Job[Any]:
    """Return the handle of one dispatched job, which is stored in the shard `at`.

    Raises:
        QueueFull: The queue is at its `max_length`.
        Duplicate: The id is taken.
    """
    if done.outcome == "full":
        raise at_max_length(f"queue {queue.display_name!r} is at its max_length: nothing was stored")
    if done.outcome == "duplicate":
        job = Job[Any](client, queue, done.id, done.number, None, results, at=at)
        raise Duplicate(f"the id {done.id!r} is taken on queue {queue.display_name!r}: nothing was stored", job)
    return Job(client, queue, done.id, done.number, cast("Outcome", done.outcome), results, at=at)
