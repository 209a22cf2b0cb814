"""worqr: a peer-to-peer job mesh on Trio and Redis.

Imports run one way: errors, call, lua, task, keys (pure) <- ops <- link <- peer, queue <- mesh <- cli. Only `worqr.link`
imports redis.
"""

from worqr.errors import (
    ClaimLost,
    ClaimSettled,
    PayloadTooLarge,
    QueueFull,
    RefusedByServer,
    Unavailable,
    UsageError,
    WorqrBug,
    WorqrError,
    WrongVersion,
)
from worqr.mesh import Mesh
from worqr.peer.claims import Claim, Claims
from worqr.peer.context import Context, current
from worqr.peer.peer import Peer
from worqr.queue import Queue
from worqr.task import CancelCount, Event, Health, QueueInfo, RemoteError, Seconds, Status, WorkerInfo
from worqr.version import __version__

__all__ = [
    "CancelCount",
    "Claim",
    "ClaimLost",
    "ClaimSettled",
    "Claims",
    "Context",
    "Event",
    "Health",
    "Mesh",
    "PayloadTooLarge",
    "Peer",
    "Queue",
    "QueueFull",
    "QueueInfo",
    "RefusedByServer",
    "RemoteError",
    "Seconds",
    "Status",
    "Unavailable",
    "UsageError",
    "WorkerInfo",
    "WorqrBug",
    "WorqrError",
    "WrongVersion",
    "__version__",
    "current",
]
