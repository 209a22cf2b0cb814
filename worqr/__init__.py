"""worqr: a peer-to-peer job mesh on Trio and Redis.

Imports run one way: errors, keys, lua and other pure modules <- ops <- link <- client <- functions <- peer <- hosting
<- mesh <- cli, testing. `tests/test_layering.py` checks it.
Only `worqr.link` imports redis.

A public name is imported when it is first used. So a worker process, a command or a test of errors imports only its part of
worqr.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from worqr.version import __version__ as __version__

if TYPE_CHECKING:  # `as` says to type checkers that a name is public
    from worqr.batches import BatchInfo as BatchInfo
    from worqr.batches import BatchRef as BatchRef
    from worqr.batches import EndedJob as EndedJob
    from worqr.client.batch import Batch as Batch
    from worqr.client.batch import BatchOptions as BatchOptions
    from worqr.client.dead_letters import DeadLetters as DeadLetters
    from worqr.client.events import ConnectionEvent as ConnectionEvent
    from worqr.client.events import EndedTask as EndedTask
    from worqr.client.events import Event as Event
    from worqr.client.job import Job as Job
    from worqr.client.permits import Permit as Permit
    from worqr.client.producer import Call as Call
    from worqr.client.producer import Sending as Sending
    from worqr.client.producer import SendingOptions as SendingOptions
    from worqr.client.producer import SendMiddleware as SendMiddleware
    from worqr.client.queue import Queue as Queue
    from worqr.client.stored_schedules import AppliedSchedules as AppliedSchedules
    from worqr.client.stored_schedules import ScheduleHandle as ScheduleHandle
    from worqr.client.stored_schedules import StoredScheduleOptions as StoredScheduleOptions
    from worqr.client.sync import sync as sync
    from worqr.client.sync import sync_block as sync_block
    from worqr.client.topics import Published as Published
    from worqr.client.topics import Subscription as Subscription
    from worqr.cron import Schedule as Schedule
    from worqr.cron import ScheduleOutcome as ScheduleOutcome
    from worqr.cron import ScheduleOverride as ScheduleOverride
    from worqr.errors import BatchEnded as BatchEnded
    from worqr.errors import BatchFailed as BatchFailed
    from worqr.errors import ClaimLost as ClaimLost
    from worqr.errors import ClaimSettled as ClaimSettled
    from worqr.errors import Duplicate as Duplicate
    from worqr.errors import JobCancelled as JobCancelled
    from worqr.errors import JobFailed as JobFailed
    from worqr.errors import NoJob as NoJob
    from worqr.errors import NoResult as NoResult
    from worqr.errors import NotReplicated as NotReplicated
    from worqr.errors import PayloadTooLarge as PayloadTooLarge
    from worqr.errors import QueueFull as QueueFull
    from worqr.errors import RefusedByServer as RefusedByServer
    from worqr.errors import ResultTimeout as ResultTimeout
    from worqr.errors import Unavailable as Unavailable
    from worqr.errors import UsageError as UsageError
    from worqr.errors import WorqrBug as WorqrBug
    from worqr.errors import WorqrError as WorqrError
    from worqr.errors import WrongVersion as WrongVersion
    from worqr.functions.depends import Depends as Depends
    from worqr.functions.depends import State as State
    from worqr.functions.function import AsyncFunction as AsyncFunction
    from worqr.functions.function import AsyncListFunction as AsyncListFunction
    from worqr.functions.function import Bound as Bound
    from worqr.functions.function import ChildJob as ChildJob
    from worqr.functions.function import Function as Function
    from worqr.functions.function import PlainBound as PlainBound
    from worqr.functions.function import SyncFunction as SyncFunction
    from worqr.functions.function import SyncListFunction as SyncListFunction
    from worqr.functions.function import first as first
    from worqr.functions.function import first_now as first_now
    from worqr.functions.function import gather as gather
    from worqr.functions.function import gather_now as gather_now
    from worqr.functions.registry import Registry as Registry
    from worqr.functions.registry import ScheduleOptions as ScheduleOptions
    from worqr.functions.registry import Step as Step
    from worqr.functions.registry import TaskDecorator as TaskDecorator
    from worqr.handler_options import HandlerOptions as HandlerOptions
    from worqr.handler_options import ListHandlerOptions as ListHandlerOptions
    from worqr.handler_options import WorkflowOptions as WorkflowOptions
    from worqr.history_records import History as History
    from worqr.history_records import HistoryPoint as HistoryPoint
    from worqr.history_records import RunTimes as RunTimes
    from worqr.hosting.peer_thread import ThreadPeer as ThreadPeer
    from worqr.job_options import EnqueueOptions as EnqueueOptions
    from worqr.job_options import JobOptions as JobOptions
    from worqr.job_options import Keep as Keep
    from worqr.job_options import Update as Update
    from worqr.limits import Lanes as Lanes
    from worqr.limits import Limit as Limit
    from worqr.limits import LimitInfo as LimitInfo
    from worqr.mesh import Mesh as Mesh
    from worqr.mesh_records import AppInfo as AppInfo
    from worqr.mesh_records import Health as Health
    from worqr.mesh_records import LaneInfo as LaneInfo
    from worqr.mesh_records import LogEntry as LogEntry
    from worqr.mesh_records import MeshInfo as MeshInfo
    from worqr.mesh_records import QueueInfo as QueueInfo
    from worqr.mesh_records import WorkerInfo as WorkerInfo
    from worqr.peer.context import Context as Context
    from worqr.peer.context import current as current
    from worqr.peer.context import state as state
    from worqr.peer.durable import sleep as sleep
    from worqr.peer.durable import sleep_now as sleep_now
    from worqr.peer.durable import sleep_until as sleep_until
    from worqr.peer.durable import sleep_until_now as sleep_until_now
    from worqr.peer.durable import wait_for as wait_for
    from worqr.peer.durable import wait_for_now as wait_for_now
    from worqr.peer.lifespans import Middleware as Middleware
    from worqr.peer.manual_consumer import Claim as Claim
    from worqr.peer.manual_consumer import Claims as Claims
    from worqr.peer.options import JoinOptions as JoinOptions
    from worqr.peer.peer import Peer as Peer
    from worqr.peer.steps import step as step
    from worqr.peer.steps import step_now as step_now
    from worqr.policy import ChildError as ChildError
    from worqr.policy import Failure as Failure
    from worqr.policy import LifetimeOver as LifetimeOver
    from worqr.policy import RateLimited as RateLimited
    from worqr.policy import Retry as Retry
    from worqr.policy import RetryPolicy as RetryPolicy
    from worqr.policy import Snooze as Snooze
    from worqr.policy import StepFailed as StepFailed
    from worqr.policy import Suspended as Suspended
    from worqr.policy import Undecodable as Undecodable
    from worqr.records import CancelCount as CancelCount
    from worqr.records import Ended as Ended
    from worqr.records import EndedRun as EndedRun
    from worqr.records import Entry as Entry
    from worqr.records import Failed as Failed
    from worqr.records import Forgotten as Forgotten
    from worqr.records import JobRecord as JobRecord
    from worqr.records import Matches as Matches
    from worqr.records import RemoteError as RemoteError
    from worqr.records import Status as Status
    from worqr.records import TaskInfo as TaskInfo
    from worqr.records import Try as Try
    from worqr.validation import Seconds as Seconds

_HOMES = {
    "worqr.batches": "BatchInfo BatchRef EndedJob",
    "worqr.client.batch": "Batch BatchOptions",
    "worqr.client.producer": "Call SendMiddleware Sending SendingOptions",
    "worqr.client.dead_letters": "DeadLetters",
    "worqr.client.events": "ConnectionEvent EndedTask Event",
    "worqr.client.job": "Job",
    "worqr.client.permits": "Permit",
    "worqr.client.queue": "Queue",
    "worqr.client.sync": "sync sync_block",
    "worqr.client.stored_schedules": "AppliedSchedules ScheduleHandle StoredScheduleOptions",
    "worqr.client.topics": "Published Subscription",
    "worqr.cron": "Schedule ScheduleOutcome ScheduleOverride",
    "worqr.errors": (
        "BatchEnded BatchFailed ClaimLost ClaimSettled Duplicate JobCancelled JobFailed NoJob NoResult NotReplicated "
        "PayloadTooLarge QueueFull RefusedByServer ResultTimeout Unavailable UsageError WorqrBug WorqrError "
        "WrongVersion"
    ),
    "worqr.functions.depends": "Depends State",
    "worqr.functions.function": (
        "AsyncFunction AsyncListFunction Bound ChildJob Function PlainBound SyncFunction SyncListFunction first first_now "
        "gather gather_now"
    ),
    "worqr.functions.registry": "Registry ScheduleOptions Step TaskDecorator",
    "worqr.handler_options": "HandlerOptions ListHandlerOptions WorkflowOptions",
    "worqr.history_records": "History HistoryPoint RunTimes",
    "worqr.hosting.peer_thread": "ThreadPeer",
    "worqr.job_options": "EnqueueOptions JobOptions Keep Update",
    "worqr.limits": "Lanes Limit LimitInfo",
    "worqr.mesh": "Mesh",
    "worqr.mesh_records": "AppInfo Health LaneInfo LogEntry MeshInfo QueueInfo WorkerInfo",
    "worqr.peer.context": "Context current state",
    "worqr.peer.durable": ("sleep sleep_now sleep_until sleep_until_now wait_for wait_for_now"),
    "worqr.peer.lifespans": "Middleware",
    "worqr.peer.manual_consumer": "Claim Claims",
    "worqr.peer.options": "JoinOptions",
    "worqr.peer.peer": "Peer",
    "worqr.peer.steps": "step step_now",
    "worqr.policy": "ChildError Failure LifetimeOver RateLimited Retry RetryPolicy Snooze StepFailed Suspended Undecodable",
    "worqr.records": "CancelCount Ended EndedRun Entry Failed Forgotten JobRecord Matches RemoteError Status TaskInfo Try",
    "worqr.validation": "Seconds",
}
"""The module of each public name."""

if not TYPE_CHECKING:
    __all__ = sorted(["__version__", *" ".join(_HOMES.values()).split()])  # noqa: PLE0605 - type checkers see the `as` above

    def __getattr__(name):
        """Import the public name `name`; called once for each."""
        for home, names in _HOMES.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(home), name)
                return value
        methods = ("task", "workflow", "every", "on")
        hint = f": write mesh = worqr.Mesh(), and @mesh.{name} above the function" if name in methods else ""
        raise AttributeError(f"module 'worqr' has no attribute {name!r}{hint}")

    def __dir__():
        return sorted({*globals(), *__all__})
