"""Send a dispatch, and make the handles of the jobs that it stored. For `worqr.queue` and `worqr.sending`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from worqr.call import Call
from worqr.errors import Duplicate, NotReplicated, QueueFull, reply_in
from worqr.job import Job, Outcome, Results
from worqr.keys import QueueKeys
from worqr.ops import Dispatched

if TYPE_CHECKING:
    from worqr.client import Client


async def dispatched(
    client: Client, queue: QueueKeys, call: Call[list[Dispatched]], at: QueueKeys, results: Results | None = None
) -> Job[Any]:
    """Send a dispatch into the shard `at` of a queue, and return the handle of its last job. A refused job is the last one.

    Raises:
        QueueFull: The queue is at its `max_length`.
        Duplicate: The id is taken.
        NotReplicated: The job was stored; the error has its handle.
    """
    link = client.link_to(at.name)
    try:
        done = await link.call(call)
    except NotReplicated as late:
        late.job = handle_of(client, queue, reply_in(late)[-1], results, at=at)
        raise
    return handle_of(client, queue, done[-1], results, at=at)


def handle_of(
    client: Client, queue: QueueKeys, done: Dispatched, results: Results | None = None, *, at: QueueKeys | None = None
) -> Job[Any]:
    """Return the handle of one dispatched job, which lies in the shard `at`.

    Raises:
        QueueFull: The queue is at its `max_length`.
        Duplicate: The id is taken.
    """
    if done.outcome == "full":
        raise QueueFull(f"queue {queue.shown!r} is at its max_length: nothing was stored")
    if done.outcome == "duplicate":
        job = Job[Any](client, queue, done.id, done.number, None, results, at=at)
        raise Duplicate(f"the id {done.id!r} is taken on queue {queue.shown!r}: nothing was stored", job)
    return Job(client, queue, done.id, done.number, cast("Outcome", done.outcome), results, at=at)
