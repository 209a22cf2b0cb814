"""worqr: a peer-to-peer job mesh on Trio and Redis.

Imports run one way: errors, call, lua, task, keys, policy, options (pure) <- ops <- link <- peer, job, queue <- mesh <- cli.
Only `worqr.link` imports redis.
"""

from worqr.aside import Aside
from worqr.blocking import BlockingFunction, BlockingJob, BlockingMesh, BlockingQueue
from worqr.cron import Schedule
from worqr.errors import (
    ClaimLost,
    ClaimSettled,
    Duplicate,
    JobCancelled,
    JobFailed,
    NoResult,
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
from worqr.function import AsyncFunction, Bound, Call, Function, SyncFunction
from worqr.job import Job
from worqr.mesh import Mesh
from worqr.options import JobOptions, Update
from worqr.peer.claims import Claim, Claims
from worqr.peer.context import Context, current
from worqr.peer.options import HandlerOptions, JoinOptions
from worqr.peer.peer import Peer
from worqr.peer.runners import Middleware
from worqr.policy import Broken, ChildError, Failure, Retry, RetryPolicy
from worqr.queue import Queue
from worqr.registry import Registry, TaskDecorator
from worqr.task import CancelCount, Event, Failed, Health, QueueInfo, RemoteError, Seconds, Status, WorkerInfo
from worqr.timetable import ScheduleOptions
from worqr.version import __version__

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
