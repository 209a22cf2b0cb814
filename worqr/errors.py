"""All errors that worqr raises.

A message has the wrong value and the next step. This module depends neither on Trio nor on Redis: the link converts the errors of
redis-py into these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worqr.records import RemoteError


class WorqrError(Exception):
    """The base class of all errors of worqr.

    `Retry` and `Failure`, which a handler raises on purpose, are not derived from it. So ``except WorqrError`` in a handler
    does not catch them.
    """


class UsageError(WorqrError, ValueError):
    """A call that can never work: an invalid queue name, an unknown option, a peer that has left.

    Nothing was sent. The message has the value and the remedy. It is also a `ValueError`.
    """


class PayloadTooLarge(UsageError):
    """A task is larger than ``Mesh(max_payload=...)`` bytes. Nothing was sent. Store the data elsewhere and enqueue its name."""


class Unavailable(WorqrError):
    """The server could not be reached, or did not reply within `patience`. The message has the cause and the remedy.

    It is raised at once if the host name of the first connection does not resolve. Try again later.

    Attributes:
        sent: False: the request was not sent and has no effect. None: it was sent, and it may have taken effect: an enqueue
            may be in the queue. True: it took effect.
    """

    def __init__(self, message: str, *, sent: bool | None = False) -> None:
        super().__init__(message)
        self.sent = sent


class RefusedByServer(WorqrError):
    """The server rejected the connection or the request. Waiting does not help.

    The authentication failed, a permission is missing, protected mode is on, a key has another type, or the port is not that
    of a Redis server. The message has the server's own words, but no payload and no password, and the remedy.
    """


def has_foreign_type(error: Exception) -> bool:
    """Return True if the server refused a request because another program has written a key of another type."""
    return "WRONGTYPE" in str(error)


class WrongVersion(RefusedByServer):
    """The server is older than Redis 7.0 or Valkey 7.2, or its mesh has another wire version."""


class QueueFull(WorqrError):
    """The queue is at its `max_length`, or the server is out of memory. Nothing was stored. Slow down and try again.

    To wait until a queue at its `max_length` has room, pass ``wait=`` with the `max_length`.
    """

    _at_max_length = False


class NotReplicated(WorqrError):
    """Fewer replicas than requested had the task in time. The task is enqueued, and workers run it as any other.

    It can be lost only by a failover to a replica that does not have it. If you enqueue it again, it runs twice, unless it
    has an id.

    Attributes:
        wanted: The number of replicas requested.
        reached: The number of replicas that had it.
        job: The handle of a dispatch; else None.
    """

    def __init__(self, message: str, *, wanted: int = 0, reached: int = 0) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.reached = reached
        self.job: Any = None
        self._reply: Any = None


class Duplicate(WorqrError):
    """The id is taken: its job waits or runs, or `unique_for` has not passed. Nothing was stored.

    It is raised for ``if_exists="raise"`` and ``unique=True``.

    Attributes:
        job: A handle of the job that has the id.
    """

    def __init__(self, message: str, job: Any = None) -> None:
        super().__init__(message)
        self.job: Any = job


class NoResult(WorqrError):
    """There is no result, and there will be none: the id is unknown, the result has expired, or no `result_ttl` is set.

    It is raised at once, because waiting would not help.
    """


class ResultTimeout(WorqrError, TimeoutError):
    """The job has not ended within `timeout` seconds. Ask again later. It is also a `TimeoutError`.

    The attributes are None if the server did not reply in time, and with ``timeout=0``.

    Attributes:
        state: The state of the job, as in `Status`.
        waiting: The number of tasks that wait in its queue.
        workers: The number of workers that serve its queue. If it is 0, the job waits until a worker serves it.
    """

    def __init__(
        self, message: str, *, state: str | None = None, waiting: int | None = None, workers: int | None = None
    ) -> None:
        super().__init__(message)
        self.state = state
        self.waiting = waiting
        self.workers = workers


class JobFailed(WorqrError):
    """The job failed and will not be run again. It is in ``queue.failed`` or ``queue.undecodable``, unless records are not kept.

    Attributes:
        error: The error of the last run.
    """

    def __init__(self, message: str, error: RemoteError) -> None:
        super().__init__(message)
        self.error: RemoteError = error


class JobCancelled(WorqrError):
    """The job was cancelled, or its queue was deleted.

    Attributes:
        reason: The reason that the cancel was given, perhaps empty.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason: str = reason


class BatchEnded(WorqrError):
    """The batch takes no more jobs: it has ended, or was cancelled. Nothing was stored."""


class BatchFailed(WorqrError):
    """The batch ended without all of its jobs finished: some failed or were cancelled, or the batch was cancelled.

    Attributes:
        info: The `BatchInfo`.
    """

    def __init__(self, message: str, info: Any = None) -> None:
        super().__init__(message)
        self.info: Any = info


class ClaimLost(WorqrError):
    """The task was reassigned, because this worker was declared dead or left the queue. It runs, or ran, elsewhere.

    Stop working on it. What you did already may be done a second time.
    """


class ClaimSettled(UsageError):
    """The claim was finished, stopped, retried or failed before. A claim is settled exactly once."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown `name`: the most similar of `known`, or `otherwise`."""
    import difflib  # imported here, because only errors need it

    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else otherwise


class WorqrBug(WorqrError):
    """An error in worqr itself. Please report it with its traceback."""


def at_max_length(message: str) -> QueueFull:
    """Return the error of a queue, or a lane, that is at its `max_length`: a producer may wait for room."""
    error = QueueFull(message)
    error._at_max_length = True  # pyright: ignore[reportPrivateUsage]
    return error


def is_at_max_length(error: QueueFull) -> bool:
    """Return True if the queue is at its `max_length`; False if the server is out of memory."""
    return error._at_max_length  # pyright: ignore[reportPrivateUsage]


def note_reply(error: NotReplicated, reply: object) -> None:
    """Store the reply of a request in its error: the data is on the server."""
    error._reply = reply  # pyright: ignore[reportPrivateUsage]


def reply_in(error: NotReplicated) -> Any:
    """Return the reply that the request had."""
    return error._reply  # pyright: ignore[reportPrivateUsage]


def set_job(error: NotReplicated | Duplicate, job: object) -> None:
    """Set the handle of an error's job, or replace it by another kind of handle."""
    error.job = job


for _public in [each for each in vars().values() if isinstance(each, type) and each.__module__ == __name__]:
    _public.__module__ = "worqr"  # the name that people import it by, for tracebacks and records
