"""One typed function per transaction: builds the call and says how its reply is read. No I/O, no loops around calls.

Each function mirrors the file of its name in ``lua/``, whose header has the guarantees; here stand only the Python
side's words. A reply is a list whose first item is a word; a refusal becomes an error, all others a value.

Modules: `tasks` (a task's way through a queue), `serving` (a worker and a queue), `registry` (the mesh as a whole),
`operators` (cancel, delete, pause), `reading` (looking at a queue), `replies` (what they share). ``tests/test_lua.py``
sees to it that `__all__` has no hole.
"""

from __future__ import annotations

from worqr.call import Call
from worqr.ops.operators import (
    CANCEL_BUDGET,
    Cancelled,
    cancel_all,
    cancel_task,
    delete_queue,
    pause,
    purge_queue,
    resume,
)
from worqr.ops.reading import (
    Inspected,
    inspect,
    list_claims,
    list_marks,
    list_tasks,
)
from worqr.ops.registry import (
    INFO_EXPIRE_S,
    QUEUES_EXPIRE_S,
    WAITING_EXPIRE_S,
    WIRE_VERSION,
    Beat,
    Look,
    adopt_worker,
    condemn_worker,
    forget_worker,
    keep_worker_alive,
    list_queues,
    list_workers,
    look_at_workers,
    map_work,
    note_queues,
    post_waiting,
    start_worker,
    stop_worker,
    unmap_work,
)
from worqr.ops.replies import (
    MAX_BYTES,
    MAX_ITEMS,
    MAX_SKIPPED,
    Reply,
)
from worqr.ops.serving import (
    Returned,
    fail_worker,
    start_work,
    stop_work,
)
from worqr.ops.tasks import (
    Started,
    enqueue,
    fail_task,
    finish_tasks,
    reconcile,
    retry_task,
    start_tasks,
    stop_tasks,
)

__all__ = [
    "CANCEL_BUDGET",
    "INFO_EXPIRE_S",
    "MAX_BYTES",
    "MAX_ITEMS",
    "MAX_SKIPPED",
    "QUEUES_EXPIRE_S",
    "WAITING_EXPIRE_S",
    "WIRE_VERSION",
    "Beat",
    "Call",
    "Cancelled",
    "Inspected",
    "Look",
    "Reply",
    "Returned",
    "Started",
    "adopt_worker",
    "cancel_all",
    "cancel_task",
    "condemn_worker",
    "delete_queue",
    "enqueue",
    "fail_task",
    "fail_worker",
    "finish_tasks",
    "forget_worker",
    "inspect",
    "keep_worker_alive",
    "list_claims",
    "list_marks",
    "list_queues",
    "list_tasks",
    "list_workers",
    "look_at_workers",
    "map_work",
    "note_queues",
    "pause",
    "post_waiting",
    "purge_queue",
    "reconcile",
    "resume",
    "retry_task",
    "start_tasks",
    "start_work",
    "start_worker",
    "stop_tasks",
    "stop_work",
    "stop_worker",
    "unmap_work",
]
