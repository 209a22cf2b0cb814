"""The list of jobs that have ended, or that have a tag. What is done to them is in `worqr.dashboard.forms`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

from worqr import ops
from worqr.dashboard.guard import Refused
from worqr.dashboard.reads import gathered, unless_refused
from worqr.dashboard.request import Visit
from worqr.errors import UsageError
from worqr.inside import client_of
from worqr.records import TaskInfo

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.dashboard.state import MeshState

OUTCOMES: Final = ("ended", "finished", "failed", "cancelled", "any")
"""What the list shows; ``any``: jobs with a tag in any state."""
MOST_QUEUES: Final = 50
"""Queues that are searched for a tag, the most active first."""
OF_ONE_QUEUE: Final = 10
"""Jobs of one queue that the search shows."""

Outcome = Literal["ended", "finished", "failed", "cancelled"]


async def jobs_of(visit: Visit, queue: Queue, limit: int) -> list[TaskInfo]:
    """Return up to `limit` jobs that the address asks for: an outcome, a tag, and the cursor of the page before."""
    outcome, tag = visit.choice("outcome", OUTCOMES), visit.text("tag").strip()
    if outcome == "any" and not tag:
        outcome = "ended"
    state = None if outcome == "any" else cast("Outcome", outcome)
    try:
        return await queue.jobs(state=state, tag=tag, limit=limit, after=visit.text("after"))
    except UsageError as error:
        raise Refused(400, str(error)) from None


async def tagged(visit: Visit, state: MeshState, tag: str) -> list[tuple[str, TaskInfo]]:
    """Return some jobs with a tag of each of the queues, in any state."""
    names = [info.name for info in state.queues][:MOST_QUEUES]

    async def read(name: str) -> list[TaskInfo]:
        try:
            found, _ = await unless_refused(
                partial(visit.queue(name).jobs, tag=tag, limit=OF_ONE_QUEUE), list[TaskInfo]()
            )
        except UsageError:  # no tag, or too many jobs have it
            return []
        return found

    if not names or len(tag.encode()) > 100:
        return []
    lists = await gathered([partial(read, name) for name in names])
    return [(name, task) for name, found in zip(names, lists, strict=False) for task in found]


async def result_of(visit: Visit, queue: Queue, id: str) -> bytes | None:
    """Return the stored result of a job that has finished, for viewers who may read payloads; None if there is none."""
    if "payloads" not in visit.viewer.may:
        return None
    client = client_of(visit.mesh)
    keys = await client.sharding.shard_of_id(queue._keys, id)  # pyright: ignore[reportPrivateUsage]
    reply = await client.ask(ops.read_result(keys, id, 0))
    kind, value = reply.values[:2] if reply.status == "finished" else (b"none", b"")
    if kind == b"none" or value is None:
        return None
    values = client.values
    return value if values is None else values.readable(value)
