"""Files tasks in their lanes: those that a program without worqr has pushed to the queue of a function with lanes.

Such a task waits in the list of the queue. A worker that has claimed it finds out its lane, and puts it at the back of that lane
instead of running it. So the limits and the order of a lane hold for all producers. A task whose worker has died before is in no
lane either, although it is a job then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from worqr import ops
from worqr.keys import QueueKeys
from worqr.peer.run import Run
from worqr.peer.settles import Settles
from worqr.script_call import Call
from worqr.shard_layout import shard_of

if TYPE_CHECKING:
    from worqr.peer.registration import Registration

LaneOf = Callable[[bytes], str | None]
"""Returns the lane that a payload belongs into; None if it belongs into none."""


def lane_in_shard(lane_of: LaneOf | None, shards: Sequence[QueueKeys], keys: QueueKeys) -> LaneOf | None:
    """Return what finds the lanes of a shard. A lane is in one shard, and no script can move a task to another one."""
    if lane_of is None or len(shards) == 1:
        return lane_of

    def find(task: bytes) -> str | None:
        lane = lane_of(task)
        return lane if lane is not None and shard_of(tuple(shards), lane) == keys else None

    return find


def filed_in_lanes(
    keys: QueueKeys, registration: Registration, runs: Sequence[Run[Any]], lane_of: LaneOf, settles: Settles
) -> Sequence[Run[Any]]:
    """Send claims that belong into a lane there, in their order. Return the others, which run."""
    lanes: dict[int, str] = {}
    for run in runs:
        lane = lane_of(run.task) if _is_in_no_lane(run) else None
        if lane is not None:
            run.settle()
            lanes[run.fence] = lane
    if not lanes:
        return runs

    def make(claims: Sequence[int]) -> Call[dict[int, str]]:
        return ops.file_tasks(keys, registration.worker, {claim: lanes[claim] for claim in claims})

    settles.send(keys, registration, list(lanes), make, lambda _ended, _failure: None)
    return [run for run in runs if run.fence not in lanes]


def _is_in_no_lane(run: Run[Any]) -> bool:
    """Return True for a raw task, and for a job that was one and has no lane. A job that was dispatched without one has none."""
    record = run.record
    return record is None or (b"twin" in record and b"lane" not in record)
