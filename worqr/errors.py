"""Every error that worqr raises, split by whose fault it is.

One root, few leaves. A message carries the value that was wrong and the next step. Nothing here knows
Trio or Redis: the link translates what redis-py raises into these, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worqr.records import RemoteError


class WorqrError(Exception):
    """Root of all errors of worqr.

    ``Retry`` and ``Failure``, which a handler raises on purpose, are not below it, so that
    ``except WorqrError`` in a handler never swallows them.
    """


class UsageError(WorqrError, ValueError):
    """A call that can never work: a bad queue name, an unknown option, a peer used after it left.

    Nothing was sent. Mend the call; the message names the value and what would be right.
    """


class PayloadTooLarge(UsageError):
    """A task over ``Mesh(max_payload=...)`` bytes. Nothing was sent; store the data elsewhere and enqueue its name."""


class Unavailable(WorqrError):
    """The server could not be reached, or did not answer, within ``patience``. The message has the cause and the remedy.

    Raised at once if the host name of the first connection does not resolve.

    Attributes:
        sent: False if the request was never written (it was withdrawn and has no effect), None if it was on its way
            when patience ended and nobody knows whether it took effect, True if it took effect.

    Try again later; an enqueue with ``sent=None`` may be in the queue.
    """

    def __init__(self, message: str, *, sent: bool | None = False) -> None:
        super().__init__(message)
        self.sent = sent


class RefusedByServer(WorqrError):
    """The server rejected the connection or the request: authentication failed, a permission is missing, protected mode is on, a
    key has another type. Also: something else answers at its port.

    Waiting does not help. The message has the server's own words (never a payload or a password) and the remedy.
    """


class WrongVersion(RefusedByServer):
    """The server is older than Redis 7.0 / Valkey 7.2, or the mesh on it speaks another wire version."""


class QueueFull(WorqrError):
    """The queue is at its ``max_length``, or the server is out of memory. Nothing was stored; slow down and try again."""


class NotReplicated(WorqrError):
    """Fewer replicas than ``replicas=`` said they had the task in time. It IS enqueued, and is worked on as any other.

    Only a failover to a replica without it can lose it. Enqueueing it again makes it run twice, unless it has an id.

    Attributes:
        wanted: how many replicas were asked for.
        reached: how many had it when they were last asked.
        job: of a dispatch, its handle; else None.
    """

    def __init__(self, message: str, *, wanted: int = 0, reached: int = 0) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.reached = reached
        self.job: Any = None
        self._reply: Any = None


class Duplicate(WorqrError):
    """The id is taken (``if_exists="raise"``, ``unique=True``): its job waits, runs, or is within ``unique_for``.

    Nothing was stored.

    Attributes:
        job: a handle of the job that is there.
    """

    def __init__(self, message: str, job: Any = None) -> None:
        super().__init__(message)
        self.job: Any = job


class NoResult(WorqrError):
    """There is no result and none will come: the id is unknown, the result expired, or none is kept (no ``result_ttl``).

    Raised at once; waiting would not help.
    """


class ResultTimeout(WorqrError, TimeoutError):
    """The job had not ended within ``timeout`` seconds. A `TimeoutError` too.

    Attributes:
        state: where the job was when the time was over, as in `Status`.
        waiting: how many tasks waited in its queue.
        workers: how many workers served its queue; with 0 the job waits until a worker serves it.

    The attributes are None if the server did not say, and with ``timeout=0``, which only looks. Ask again later.
    """

    def __init__(
        self, message: str, *, state: str | None = None, waiting: int | None = None, workers: int | None = None
    ) -> None:
        super().__init__(message)
        self.state = state
        self.waiting = waiting
        self.workers = workers


class JobFailed(WorqrError):
    """The job failed for good. It is in ``queue.failed`` (or ``.broken``) unless those records are not kept.

    Attributes:
        error: what the last run raised, as a `RemoteError`.
    """

    def __init__(self, message: str, error: RemoteError) -> None:
        super().__init__(message)
        self.error: RemoteError = error


class JobCancelled(WorqrError):
    """The job was cancelled, or its queue deleted.

    Attributes:
        reason: as whoever cancelled it said; may be empty.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason: str = reason


class ClaimLost(WorqrError):
    """The claim is no longer ours: the worker was declared dead, and the task runs or ran elsewhere.

    Stop working on it. What was done already may be done a second time.
    """


class ClaimSettled(UsageError):
    """The claim was finished, stopped, retried or failed before: a claim is settled exactly once."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about a `name` that is none of `known`: the one that was meant, or `otherwise`."""
    import difflib  # for errors only

    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else otherwise


class WorqrBug(WorqrError):
    """Something that cannot happen did: an error in worqr itself. Please report it with its traceback."""


def note_reply(error: NotReplicated, reply: object) -> None:
    """Keep the reply that the request had, in its error: what was stored is stored."""
    error._reply = reply  # pyright: ignore[reportPrivateUsage]


def reply_in(error: NotReplicated) -> Any:
    """Return the reply that the request had."""
    return error._reply  # pyright: ignore[reportPrivateUsage]
