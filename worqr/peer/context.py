"""`Context`: the view that a handler has of its run; `current()` returns it.

A context is made when a handler asks for it. Its calls never wait, but for those that save, so a coroutine, a thread and an
asyncio task can use it alike. Not here: `Claim`, the class for tasks that an application claims itself (`manual_consumer`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, overload

from worqr.batches import BatchInfo, BatchRef, EndedJob, ended_job_of, ended_of, ref_of
from worqr.client.job import address_of, own_options, tagged
from worqr.errors import UsageError
from worqr.foreign import CONTEXT, no_such_attribute
from worqr.limits import MOST
from worqr.peer.error_throttle import wait_done
from worqr.peer.run import Run, RunHost, Save, check_saved, current_run, failed_of
from worqr.records import CancelReason
from worqr.remote_error import meta_of
from worqr.stored_values import whole
from worqr.validation import Seconds, check_between, clean_text, from_ms, returns_coroutine
from worqr.validation import seconds as seconds_of


class Context:
    """One run of one task. In a handler, ``worqr.current()`` returns it."""

    __slots__ = ("_run",)

    def __init__(self, run: Run[RunHost]) -> None:
        self._run = run

    @property
    def task(self) -> bytes:
        """The payload."""
        return self._run.task

    @property
    def fence(self) -> int:
        """The fencing token: a number that grows with every claim of the queue.

        A resource that stores the highest number it saw can reject a worker that was frozen and whose task was reassigned.
        """
        return self._run.fence

    @property
    def failures(self) -> int:
        """The number of earlier runs that failed."""
        return self._run.failures

    @property
    def stalls(self) -> int:
        """The number of workers that died while running this task."""
        return self._run.stalls

    @property
    def timeouts(self) -> int:
        """The number of earlier runs that took too long."""
        return self._run.timeouts

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why this run is being cancelled; None if it is not. A thread can read it at any time.

        ``cancel``: a caller requested it. ``lost``: the task was reassigned to another worker. ``leaving``: the peer leaves, and
        the task returns to its queue. ``timeout``: the run took too long.
        """
        return self._run.cancel_reason

    @property
    def deadline(self) -> float | None:
        """The time at which the run will be cancelled; None: the run has no timeout.

        On the clock of ``time.monotonic()``, which is also the clock of an asyncio loop.
        """
        return self._run.deadline

    @property
    def id(self) -> str:
        """The job's id. A plain task has none; this is the id that it would get."""
        return self._run.id

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._run.queue

    @property
    def lane(self) -> str:
        """The lane of its queue that it came from; empty if it has none."""
        record = self._run.record
        return "" if record is None else record.get(b"lane", b"").decode("utf-8", "replace")

    @property
    def batch(self) -> BatchRef | None:
        """The batch that its job belongs to, or None. ``mesh.current_batch()`` returns a handle, to add jobs to it."""
        return ref_of(self._run.record)

    @property
    def ended_batch(self) -> BatchInfo | None:
        """In a follow-up: the batch that has ended. In any other run: None. A function that is always a follow-up calls
        `batch_end()`.
        """
        return ended_of(self._run.record)

    @property
    def ended_job(self) -> EndedJob | None:
        """In a follow-up of one job (``then=`` or ``otherwise=`` of its dispatch): the job that has ended. In any other run:
        None.
        """
        return ended_job_of(self._run.record)

    def batch_end(self) -> BatchInfo:
        """Return the batch that has ended, in a follow-up.

        Returns:
            Its counts, its id, and the `meta` that was passed to ``mesh.batch``.

        Raises:
            UsageError: This run is not the follow-up of a batch. It was enqueued in another way.
        """
        ended = self.ended_batch
        if ended is None:
            raise UsageError(
                f"batch_end() is for the follow-up of a batch, and this task of {self.queue!r} was enqueued in another way: pass "
                "the call to mesh.batch(then=...) or otherwise=..., or read ended_batch, which is None then"
            )
        return ended

    @property
    def items(self) -> Sequence[Context]:
        """The calls of this run. A list handler has one for each value of its list, in the same order, with its own `id`,
        `attempt`, `meta` and `cancel_reason`. For other handlers, this run is the only one.
        """
        return _Items(self._run.items)

    @property
    def run_at(self) -> datetime:
        """The time before which it was not to run, by the server's clock. For a task that was never scheduled: the time of the
        claim.
        """
        record = self._run.record
        due = 0 if record is None else whole(record.get(b"run_at"), 0)
        return from_ms(due or self.fence / 1000)

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time of the firing, for a job of a schedule; else None."""
        record = self._run.record
        nominal = 0 if record is None else whole(record.get(b"scheduled_for"), 0)
        return from_ms(nominal) if nominal else None

    @property
    def meta(self) -> Mapping[str, str]:
        """The `meta` of its dispatch; empty if there is none. In a failure handler: the `meta` of the job that failed."""
        record = self._run.record
        if record is None:
            return {}
        if b"failed" in record:
            return failed_of(self._run, self.queue).meta
        return meta_of(record.get(b"meta", b"").decode())

    @property
    def options(self) -> Mapping[str, int | float | bool | str]:
        """The options of its own that the dispatch set, such as ``timeout`` and ``max_failures``; times in seconds. Others are
        those of the handler. As in `JobRecord.options`.
        """
        record = self._run.record
        return {} if record is None else own_options({name.decode("utf-8", "replace"): record[name] for name in record})

    @property
    def attempt(self) -> int:
        """The number of this run: 1 at the first. Runs that were not counted are left out."""
        return self._run.attempt

    @property
    def run(self) -> int:
        """The number of this run of the job: 1 at the first. It counts all runs but those that were given back to the front,
        after `RateLimited` or by a worker that left. Unlike `attempt`, it does not fall when a run gets further. What sets
        the counters of the job to zero, such as a put-back, takes failed runs off.
        """
        record = self._run.record
        return self.attempt + (0 if record is None else whole(record.get(b"earlier"), 0))

    @property
    def began_with(self) -> int | None:
        """The ``Mesh(deploy=...)`` of the run that stored the first step or wait of this job; None if that mesh has none. Before
        anything is stored, that of this mesh. A put-back keeps it, and another payload begins anew.
        """
        record: Mapping[bytes, bytes] = self._run.record or {}
        if b"began_with" in record or b"entries" in record:
            return whole(record.get(b"began_with"), 0) or None
        return self._run.host.deploy or None

    @property
    def suspending(self) -> bool:
        """True in a workflow that is being suspended: in ``finally`` blocks, which run at each suspension."""
        return self._run.suspension is not None

    @property
    def address(self) -> str:
        """The address of this workflow, for links and forms that send values to it: ``await mesh.send(address, name, value)``. It
        means this dispatch of the id, and no later one. Empty for a job that is no workflow.
        """
        flow = self._run.flow
        return "" if flow is None else address_of(self.queue, int(flow.life), self.id)

    @property
    def last_attempt(self) -> bool:
        """True if the task moves to the dead-letter queue when this run fails. With ``RetryPolicy(retry_for=...)``, it may do so
        earlier: if the next run would begin too late.
        """
        failures = 0 if self._run.progressed else self.failures
        return failures + 1 >= self._run.policy.max_failures or not self._run.has_time_for(0.0)

    def progress(self, done: float | None = None, message: str = "") -> None:
        """Report the progress of this run, from any thread. This never waits.

        ``job.status()``, ``job.watch()`` and ``queue.running()`` show it. Updates are limited to 10 per second; only the latest
        is kept. The last one is sent before the end of the run, and stays in the status as long as the result is kept.

        Args:
            done: A number from 0 to 1. A larger one is kept, with a Python warning at its line.
            message: A text for people. Only the first 1,000 characters are kept.

        Raises:
            UsageError: `done` is not a finite number, or `message` is not a str.
        """
        number = _finite(done)
        if number is not None and number > 1:
            warnings.warn(
                f"progress({done!r}): worqr shows a fraction from 0 to 1; for 50 %, write progress(0.5), or progress(50 / 100)",
                stacklevel=2,
            )
        self._run.report_progress(number, _message(message))

    @property
    def saved(self) -> bytes | None:
        """The bytes that this job saved last, in an earlier run or in this one; None if it saved none."""
        record = self._run.record
        return None if record is None else record.saved_state().saved

    @returns_coroutine
    def save(self, state: bytes) -> Coroutine[Any, Any, None]:
        """Save bytes for later runs of this job, and return when the server has them. Later runs find them in `saved`.

        They replace the bytes that were saved before. They are deleted when the job ends, or when a dispatch of its id brings
        another payload. During an outage this waits until the server is back, or until the claim is lost.

        Args:
            state: At most 256 KiB.

        Raises:
            UsageError: `state` is not bytes, or too large; all that the job keeps, with the results of its steps, would be over
                1 MiB; or called in a thread or process where no event loop runs.
            ClaimLost: The task was reassigned to another worker, or has ended. Nothing was saved.
            RefusedByServer: The server does not permit it. Nothing was saved.
            Unavailable: The peer has left.
        """
        self._run.check_awaitable("worqr.current().save()", "worqr.current().save_now(...)")
        return self._save(state)

    async def _save(self, state: bytes) -> None:
        save, done = self._begin_save(state)
        await wait_done(done)
        done.result()
        self._run.saved_state().note_saved(save)

    def save_now(self, state: bytes) -> None:
        """Save bytes as `save` does, in a thread or a process: wait here until the server has them.

        Args:
            state: At most 256 KiB.

        Raises:
            UsageError: An event loop runs in this thread; or as `save`.
            ClaimLost: The task was reassigned to another worker, or has ended. Nothing was saved.
            RefusedByServer: The server does not permit it. Nothing was saved.
            Unavailable: The peer has left.
        """
        self._run.check_may_wait("await worqr.current().save(...)")
        save, done = self._begin_save(state)
        done.result()
        self._run.saved_state().note_saved(save)

    def _begin_save(self, state: bytes) -> tuple[Save, Future[None]]:
        saved, known = check_saved(state), self._run.saved_state()
        progress = self._run.policy.counts_anew() and known.gets_further(saved)
        save = Save(known.next_number(), "", saved, progress)
        return save, self._run.save(save)

    def extend(self, seconds: Seconds) -> None:
        """Move the deadline of this run, from any thread. This never waits.

        A run without a timeout stays without one. A run that is being cancelled already stays cancelled.

        Args:
            seconds: The deadline in seconds from now, or a timedelta; more than 0. It may be earlier than before.

        Raises:
            UsageError: `seconds` is not valid.
        """
        self._run.host.extend(self._run, seconds_of(seconds, "seconds of extend", positive=True))

    def cost(self, used: int) -> None:
        """Set how much this run uses of the limits with a name and a unit that its function has, in place of the estimate
        ``cost=``. From any thread; this never waits. The last number counts, from the start of the run on, when the run ends.

        It changes nothing if the function has no such limit.

        Args:
            used: 0 to 1,000,000.

        Raises:
            UsageError: `used` is not valid.
        """
        self._run.host.note_cost(self._run, check_between(used, "cost", 0, MOST))

    def check_cancelled(self) -> None:
        """Raise an exception if this run is being cancelled. A plain function in a thread has to call it to be cancelled.

        In a thread it raises ``trio.Cancelled``; in an asyncio handler and its threads, ``asyncio.CancelledError``. Do not
        catch it. In an async handler on the Trio loop it does nothing, because the next ``await`` is cancelled.

        Raises:
            UsageError: Called in a thread that the handler started by itself. Read `cancel_reason` there.
        """
        self._run.check_cancelled()

    @property
    def state(self) -> Any:
        """The value that the mesh's lifespan yielded, as in ``mesh.state``; None without a lifespan."""
        return self._run.host.state

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("Context", name, CONTEXT))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fence} of {self.queue!r}, attempt {self.attempt}>"


class _Items(Sequence[Context]):
    """The calls of a run. The context of each is made when it is asked for."""

    def __init__(self, runs: Sequence[Run[Any]]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Context]: ...
    def __getitem__(self, index: int | slice) -> Context | Sequence[Context]:
        found = self._runs[index]
        return Context(found) if isinstance(found, Run) else _Items(found)


class ListContext(Context):
    """One run of a list handler. What belongs to one call is in `items`."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ONE_CALL:
            raise UsageError(
                f"this run takes a list of calls, and {name!r} belongs to one of them: use worqr.current().items[0].{name}, or "
                f"{name!r} of each of the items"
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.queue!r}, {len(self.items)} calls>"


_OF_ONE_CALL: Final = frozenset(
    (
        "task",
        "fence",
        "failures",
        "stalls",
        "timeouts",
        "id",
        "lane",
        "run_at",
        "scheduled_for",
        "meta",
        "options",
        "attempt",
    )
) | {"last_attempt", "saved", "save", "save_now"}
"""The properties of a `Context` that a run of several calls does not have."""


def _message(message: object) -> str:
    """Return at most 1,000 characters that UTF-8 can encode, because a progress message must not fail the run."""
    if not isinstance(message, str):
        raise UsageError(f"the message of progress must be a str, not {type(message).__name__}")
    return clean_text(message[:1000])


def _finite(done: object) -> float | None:
    if done is None:
        return None
    if isinstance(done, bool) or not isinstance(done, int | float) or not math.isfinite(done):
        raise UsageError(f"progress must be a finite number or None, not {done!r}")
    return float(done)


current_context: ContextVar[Context] = ContextVar("worqr.current")
"""The context that this code last asked for; it may belong to another run."""


MAX_VALUE: Final = 64 * 1024
"""The most bytes of a value that a run shows."""


def state(value: object, /) -> None:
    """Set what other programs may read of this job now: ``(await job.status()).value``. From any thread; this never waits.

    It replaces the value that was set before. It stays while the job waits for its next run, also while a workflow is suspended,
    and is deleted when the job ends, or when a dispatch of its id brings another payload. Updates are limited to 10 per second;
    only the latest is sent, at the end of the run at the latest. A worker that dies may not have sent it.

    Args:
        value: What JSON can encode, bytes, or None; at most 64 KiB. The run of a list handler sets it for each of its calls.

    Raises:
        UsageError: The value is not valid; or outside a handler.
    """
    run = current_run.get(None)
    if run is None:
        raise UsageError("worqr.state() is only known inside a handler; in a test, inside worqr.testing.context()")
    stored = tagged(value, "the state of the run")
    if len(stored) > MAX_VALUE:
        raise UsageError(
            f"the state of the run has {len(stored):,} bytes, and at most {MAX_VALUE:,} are stored: store what is large "
            "elsewhere, and pass its name"
        )
    run.report_value(stored)


def current() -> Context:
    """Return the run that this code belongs to, in a handler or in a thread of it.

    Raises:
        LookupError: Called outside a handler.
    """
    try:
        run = current_run.get()
    except LookupError:
        raise LookupError("worqr.current() is only known inside a handler") from None
    known = current_context.get(None)
    if known is None or known._run is not run:  # pyright: ignore[reportPrivateUsage]
        known = ListContext(run) if run.is_list else Context(run)
        current_context.set(known)
    return known
