"""The options of a peer and their checks, and the filter of the functions that a peer serves (`Only`). Nothing is sent.

Not here: the options of a handler (`worqr.handler_options`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal, TypedDict, cast

from worqr.client.client import ShardDirectory
from worqr.client.topics import Subscribed
from worqr.codecs import StoredValues
from worqr.cron import Definition
from worqr.embedded import Relocation
from worqr.errors import UsageError, did_you_mean
from worqr.handler_options import AsyncRunsIn
from worqr.keys import PUBLISH
from worqr.peer.context import Context
from worqr.peer.lifespans import Middleware
from worqr.tracing import Tracing
from worqr.validation import Seconds, check_count

if TYPE_CHECKING:
    from worqr.client.permits import HeldPermits
    from worqr.peer.executors.asyncio_loop import AsyncioLoop, Hosting

CONCURRENCY: Final = 100
GRACE: Final = 25.0
THREADS: Final = 40
MAX_PATIENCE: Final = 1800.0
"""Seconds. The server stores replies for an hour, and a request that is sent again must find its reply."""


class JoinOptions(TypedDict, total=False):
    """The options of a peer, for ``mesh.join``, ``join_in_thread`` and ``run``."""

    concurrency: int | Literal["auto"]
    """The number of units of work that the peer runs at once, at least 1. "auto": between 1 and 1000, adapted every second to
    the load of the CPU and of the event loop. Default: 100.
    """
    grace: Seconds
    """Seconds, at least 0, that running handlers have to end when the block has ended. Default: 25. Give the
    process 15 s more before you kill it.
    """
    threads: int
    """The number of plain functions that run at once in threads, at least 1. Default: 40."""
    processes: int
    """The number of functions with ``runs_in="process"`` that run at once, at least 1. Default: the number of usable CPUs, within
    the CPU limit of the container."""
    process_memory: int | None
    """Bytes of address space that such a process may use; a run that needs more gets a MemoryError. Default: None, no limit."""
    runs_per_process: int | None
    """After how many runs such a process is replaced, at least 1. Default: None, never."""
    memory_per_process: int | None
    """Bytes of resident memory; a process that has more after a run is replaced. Default: None, never."""
    only: Collection[str]
    """Names or globs (``"mail.*"``) of the functions to run. Default: all."""


def check_concurrency(value: object) -> int | Literal["auto"]:
    """Return `value` if it is a valid concurrency of a peer, else raise UsageError."""
    if isinstance(value, str):
        if value != "auto":
            raise UsageError(f"concurrency must be a whole number, at least 1, or 'auto', not {value!r}")
        return "auto"
    return check_count(value, "concurrency")


class Only:
    """The filter of the functions that a peer serves, by names and globs; None: all. ``worqr.publish`` is always among them.

    Raises:
        UsageError: not a collection of names, or an empty one.
    """

    def __init__(self, only: Collection[str] | None) -> None:
        if isinstance(only, str):
            raise UsageError(f"only must be a collection of names, as in only=[{only!r}], not a str")
        self._patterns = None if only is None else tuple(only)
        if self._patterns is not None:
            if not self._patterns:
                raise UsageError("only=[] serves nothing; leave it out to serve all functions")
            for pattern in cast("tuple[object, ...]", self._patterns):
                if not isinstance(pattern, str) or not pattern:
                    raise UsageError(f"only must be a collection of names or globs, not of {pattern!r}")

    def __contains__(self, name: str) -> bool:
        return self._patterns is None or name == PUBLISH or any(fnmatchcase(name, each) for each in self._patterns)

    def check(self, names: Collection[str]) -> None:
        """Raise UsageError for the first pattern that matches none of `names`."""
        for pattern in self._patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"only: no function is named {pattern!r}; {suggest(pattern, names)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return a suggestion for a misspelt `name`."""
    return did_you_mean(name, known, f"there are {', '.join(map(repr, sorted(known)[:20])) or 'none'}")


# `PeerSettings`: the settings with which a peer is made.


HISTORY_QUEUES: Final = 100
"""How many queues have a history, unless the mesh sets it. The history of a queue takes 230 KB of the server's memory."""

RunObserver = Callable[[Context, BaseException], None]
"""A test's callback: called for each run that did not return, with the handler's error or with the timeout."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The arguments with which `Mesh.join` makes a peer. Times are in seconds. If `keepalive` is None, the peer never counts as
    dead.
    """

    prefix: str
    app: str
    concurrency: int | Literal["auto"]
    grace: float
    keepalive: float | None
    block_limit: float
    max_payload: int
    schedules: Mapping[str, Definition]
    subscriptions: Mapping[str, Subscribed]
    deploy: int = 0
    """The number of this version of the application; 0: it has none."""
    stuck_after: float = 30.0
    history_queues: int = HISTORY_QUEUES
    """How many queues have a history; 0: none."""
    threads: int = 40
    processes: int = 1
    process_memory: int | None = None
    runs_per_process: int | None = None
    memory_per_process: int | None = None
    state: object = None
    why_idle: str = ""
    """Why this peer serves nothing unless the program calls `serve` or `work`; empty if it serves something."""
    middleware: tuple[Middleware, ...] = ()
    tracing: Tracing | None = None
    """Continues traces in worker processes. Its spans of runs are made by the first middleware."""
    around_thread: Callable[[], AbstractContextManager[object]] | None = None
    process_lifespan: Callable[[], AbstractContextManager[object]] | None = None
    sharding: ShardDirectory | None = None
    """The number of shards of each queue that has several; None: no queue has several."""
    permits: HeldPermits | None = None
    """The permits of named limits that this program holds; None: handlers have no such limits."""
    observer: RunObserver | None = None
    """Set if a test drives this peer. Then schedules fire only when the test moves the clock."""
    relocation: Relocation | None = None
    """Where a test has moved the mesh to, for the worker processes."""
    values: StoredValues | None = None
    """Encodes and decodes what is stored; None: the mesh has no codec."""
    redact_errors: bool = False
    """Errors are stored without their texts."""
    runs_in: AsyncRunsIn = "loop"
    """Where async handlers run that do not declare it."""
    hosting: Hosting | None = None
    """Connects the asyncio loop of the peer to the mesh. None: that loop has no connection of its own."""
    asyncio_loop: AsyncioLoop | None = None
    """The loop of the application, or the loop in which the asyncio lifespan was entered. None: it is made when it is needed."""
    asyncio_state: object = None
    """The value that the asyncio lifespan yielded; without one, the same as `state`."""

    @property
    def owner(self) -> str:
        """The deploy and the application, as the registry compares them with those of other workers."""
        return f"{self.deploy} {self.app}"
