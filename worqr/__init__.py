"""worqr: a peer-to-peer job mesh on Trio and Redis.

Imports run one way: errors, call, lua, task, keys, policy, options (pure) <- ops <- link <- peer, job, queue <- mesh <- cli.
Only `worqr.link` imports redis.

A public name is imported when it is first used. So a worker process, a command or a test of errors imports only its part of
worqr.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from worqr.version import __version__

if TYPE_CHECKING:
    from worqr.client.blocking import BlockingFunction, BlockingMesh, BlockingQueue
    from worqr.client.blocking_jobs import BlockingJob
    from worqr.client.dead_letters import Aside
    from worqr.client.events import ConnectionEvent, Event
    from worqr.client.job import Job
    from worqr.client.queue import Queue
    from worqr.cron import Schedule
    from worqr.errors import (
        ClaimLost,
        ClaimSettled,
        Duplicate,
        JobCancelled,
        JobFailed,
        NoResult,
        NotReplicated,
        PayloadTooLarge,
        QueueFull,
        RefusedByServer,
        ResultTimeout,
        Unavailable,
        UsageError,
        WorqrBug,
        WorqrError,
        WrongVersion,
    )
    from worqr.functions.function import AsyncFunction, Bound, Call, Function, SyncFunction
    from worqr.functions.registry import Registry, TaskDecorator
    from worqr.functions.schedule_registry import ScheduleOptions
    from worqr.hosting.thread_peer import ThreadPeer
    from worqr.job_options import JobOptions, Update
    from worqr.mesh import Mesh
    from worqr.peer.claims import Claim
    from worqr.peer.context import Context, current
    from worqr.peer.options import HandlerOptions, JoinOptions
    from worqr.peer.peer import Peer
    from worqr.peer.runners import Middleware
    from worqr.peer.taking import Claims
    from worqr.policy import Broken, ChildError, Failure, Retry, RetryPolicy
    from worqr.records import CancelCount, Failed, Health, QueueInfo, RemoteError, Status, TaskInfo, WorkerInfo
    from worqr.validation import Seconds

_HOMES = {
    "worqr.client.dead_letters": "Aside",
    "worqr.client.blocking": "BlockingFunction BlockingMesh BlockingQueue",
    "worqr.client.blocking_jobs": "BlockingJob",
    "worqr.cron": "Schedule",
    "worqr.errors": (
        "ClaimLost ClaimSettled Duplicate JobCancelled JobFailed NoResult NotReplicated PayloadTooLarge QueueFull "
        "RefusedByServer ResultTimeout Unavailable UsageError WorqrBug WorqrError WrongVersion"
    ),
    "worqr.client.events": "ConnectionEvent Event",
    "worqr.functions.function": "AsyncFunction Bound Call Function SyncFunction",
    "worqr.client.job": "Job",
    "worqr.mesh": "Mesh",
    "worqr.job_options": "JobOptions Update",
    "worqr.peer.claims": "Claim",
    "worqr.peer.taking": "Claims",
    "worqr.peer.context": "Context current",
    "worqr.peer.options": "HandlerOptions JoinOptions",
    "worqr.peer.peer": "Peer",
    "worqr.peer.runners": "Middleware",
    "worqr.policy": "Broken ChildError Failure Retry RetryPolicy",
    "worqr.client.queue": "Queue",
    "worqr.functions.registry": "Registry TaskDecorator",
    "worqr.records": "CancelCount Failed Health QueueInfo RemoteError Status TaskInfo WorkerInfo",
    "worqr.validation": "Seconds",
    "worqr.hosting.thread_peer": "ThreadPeer",
    "worqr.functions.schedule_registry": "ScheduleOptions",
}
"""The module of each public name."""

__all__ = [
    "Aside",
    "AsyncFunction",
    "BlockingFunction",
    "BlockingJob",
    "BlockingMesh",
    "BlockingQueue",
    "Bound",
    "Broken",
    "Call",
    "CancelCount",
    "ChildError",
    "Claim",
    "ClaimLost",
    "ClaimSettled",
    "Claims",
    "ConnectionEvent",
    "Context",
    "Duplicate",
    "Event",
    "Failed",
    "Failure",
    "Function",
    "HandlerOptions",
    "Health",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobOptions",
    "JoinOptions",
    "Mesh",
    "Middleware",
    "NoResult",
    "NotReplicated",
    "PayloadTooLarge",
    "Peer",
    "Queue",
    "QueueFull",
    "QueueInfo",
    "RefusedByServer",
    "Registry",
    "RemoteError",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "ScheduleOptions",
    "Seconds",
    "Status",
    "SyncFunction",
    "TaskDecorator",
    "TaskInfo",
    "ThreadPeer",
    "Unavailable",
    "Update",
    "UsageError",
    "WorkerInfo",
    "WorqrBug",
    "WorqrError",
    "WrongVersion",
    "__version__",
    "current",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import the public name `name`; called once for each."""
        for home, names in _HOMES.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(home), name)
                return value
        raise AttributeError(f"module 'worqr' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
