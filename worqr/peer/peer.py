"""`Peer`: the object that an application holds while it has joined.

Not here: running the peer (`engine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Unpack

import msgspec
import trio

from worqr.errors import UsageError
from worqr.functions.depends import refuse_dependencies
from worqr.handler_options import HandlerOptions, ListHandlerOptions, handling
from worqr.link import LinkCondition, boottime
from worqr.mesh_records import Health
from worqr.policy import RetryPolicy
from worqr.validation import KEEP_FAILED, Seconds

if TYPE_CHECKING:
    from worqr.peer.engine import Engine
    from worqr.peer.manual_consumer import Claims


# `PeerReadings`: the state of one peer as numbers, for metrics. Reading them does no I/O, and works from any thread.


class PeerReadings(msgspec.Struct, frozen=True):
    """The state of a peer that has joined.

    Attributes:
        health: its health.
        leads: it is the leader of the mesh.
        concurrency: units of work that it may run at once.
        stuck: cancelled runs that do not end.
        beat_age: seconds since it sent the newest heartbeat that the server acknowledged; None: it is not registered.
        link: its connections.
        children: its worker processes.
        registrations: how often it has joined, under one worker id after the other.
        beats_failed: heartbeats that failed.
        loop_blocks: how often its loop was blocked for over a second.
        runs: how many runs ended, by queue and outcome.
        counts_lost: counted runs that never reached the totals of their queue.
    """

    health: Health
    leads: bool
    concurrency: int
    stuck: int
    beat_age: float | None
    link: LinkCondition
    children: int
    registrations: int
    beats_failed: int
    loop_blocks: int
    runs: Mapping[tuple[str, str], int]
    counts_lost: int


def readings_of(engine: Engine, health: Health) -> PeerReadings:
    """Return the state of the peer of this engine."""
    session = engine.session
    registration, counts = session.registration, session.heartbeat_counts
    age = math.inf if registration is None else boottime() - registration.alive_at
    return PeerReadings(
        health=health,
        leads=engine.leader.leads,
        concurrency=engine.scheduler.concurrency,
        stuck=engine.stuck.stuck,
        beat_age=None if math.isinf(age) else max(0.0, age),
        link=engine.link.condition,
        children=engine.executors.children,
        registrations=session.registrations,
        beats_failed=counts.failed,
        loop_blocks=counts.blocks,
        runs=dict(engine.settler.counter.totals),  # one step of the interpreter: the loop changes it meanwhile
        counts_lost=engine.settler.counter.lost,
    )


class Peer:
    """A member of the mesh: it takes tasks and runs them in this process, as one worker. ``mesh.join()`` makes it.

    Use it in the Trio loop in which it joined.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<Peer {self.id!r}>"

    @property
    def id(self) -> str:
        """The worker id, as in ``mesh.workers()``. A peer that was declared dead joins again under a new id."""
        return self._engine.id

    async def serve(
        self,
        queue: str,
        handler: Callable[[bytes], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Run ``handler(task)`` for every task of a raw queue, until cancelled or until the peer has left.

        ``await nursery.start(partial(peer.serve, "q", handler))`` returns when the queue is subscribed. A handler that returns
        has finished its task. If it raises, the task runs again after a backoff; at the 10th failure it moves to the dead-letter
        queue (``queue.failed``). Raise `Retry` to choose the time, `Failure` to give up at once, and `Undecodable` for a payload
        that cannot be decoded. If a worker dies, its tasks return to the front of the queue at once. A task moves to the
        dead-letter queue when the third worker dies while running it.

        If you cancel the call, the peer leaves the queue: its handlers are cancelled, and their tasks return to the front without
        counting a failure. A handler in a thread or on an asyncio loop that does not end within 5 s is left behind. It keeps its
        task until it ends, or until the peer does.

        Args:
            queue: The name of the queue. A peer serves a queue once; of a queue with several shards it serves all.
            handler: An async function, or a plain function, which runs in a thread. Cancelling a plain function has an effect
                only when it calls ``worqr.current().check_cancelled()``.
            task_status: Set by ``nursery.start``.
            **options: See `HandlerOptions`.

        Raises:
            UsageError: The name is invalid, the handler is not callable, an option does not exist or is not valid, the peer
                serves this queue already, or it has left.
            RefusedByServer: The server rejected the request, for example for missing permissions.
            Unavailable: The server did not reply within the mesh's `patience`.
        """
        if "batch_size" in options or "batch_wait" in options:
            raise UsageError(
                "serve() runs a handler of one task: for a handler that takes a list, use peer.serve_list()"
            )
        await self._serve("serve", queue, handler, options, task_status)

    async def serve_list(
        self,
        queue: str,
        handler: Callable[[list[bytes]], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[ListHandlerOptions],
    ) -> None:
        """Run ``handler(tasks)`` for lists of tasks of a raw queue, until cancelled or until the peer has left.

        A run takes 1 to `batch_size` tasks, which came within `batch_wait` seconds of the first. If the handler returns None, it
        has finished all of them. It may also return a list with one outcome for each task. An exception in the list fails its
        task as if it had been raised, and any other value finishes it. If the handler raises, each task has failed. Tasks that
        failed, took too long or lost their worker are each alone in their next run. `serve` explains the rest.

        Args:
            queue: The name of the queue.
            handler: An async function, or a plain function, which runs in a thread.
            task_status: Set by ``nursery.start``.
            **options: See `ListHandlerOptions` and `HandlerOptions`.

        Raises:
            UsageError: As `serve`; or `batch_size` is missing.
            RefusedByServer: As `serve`.
            Unavailable: As `serve`.
        """
        if options.get("batch_size") is None:  # pyright: ignore[reportUnnecessaryComparison] - not in untyped code
            raise UsageError("serve_list() needs batch_size=, the most tasks of one run, as in batch_size=100")
        await self._serve("serve_list", queue, handler, options, task_status)

    async def _serve(
        self,
        where: str,
        queue: str,
        handler: Callable[..., object],
        options: Mapping[str, Any],
        task_status: trio.TaskStatus[None],
    ) -> None:
        if options.get("max_length") is not None:
            raise UsageError(
                f"{where}() takes no max_length: it bounds enqueues, so give it to @mesh.task or to enqueue"
            )
        if "shards" in options:
            raise UsageError(
                f"{where}() takes no shards: say mesh.queue({queue!r}, shards=...), where it is enqueued too"
            )
        how = handling(where, options)
        how.check_failing(queue)
        instead = "declare it with @mesh.task, or make the value inside it"
        for each in filter(None, (handler, how.on_failure)):
            if callable(each):
                refuse_dependencies(each, f"a handler of the raw queue {queue!r}", instead)
        await self._engine.queues.serve(queue, handler, how, task_status=task_status)

    def work(
        self, queue: str, *, retry: RetryPolicy | None = None, keep_failed: int = KEEP_FAILED
    ) -> AbstractAsyncContextManager[Claims]:
        """Return a block in which you take the tasks of a raw queue by hand, as `Claims`.

        Tasks that are not settled when the block ends return to the front of the queue. worqr enforces no timeout here; use
        ``trio.fail_after()``.

        Args:
            queue: The name of the queue. Of a queue with several shards, claims come from each shard in turn.
            retry: The retry policy for claims that are retried, and for claims used as a block that raises.
            keep_failed: How many failed tasks of the queue the dead-letter queue keeps, at least 0. The oldest go first.

        Returns:
            An async context manager that yields the claims.

        Raises:
            UsageError: On entry: an argument is invalid, the peer serves this queue already, or it has left.
            RefusedByServer: On entry: the server rejected the request.
            Unavailable: On entry: the server did not reply within the mesh's `patience`.
        """
        return self._engine.queues.work(queue, retry, keep_failed)

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Change how many units of work the peer runs at once. Tasks that run already are not affected.

        Args:
            n: At least 1; or ``"auto"``, which adapts to the load of the CPU and of the event loop.

        Raises:
            UsageError: `n` is neither.
        """
        self._engine.set_concurrency(n)

    def health(self) -> Health:
        """Return the peer's health, without any I/O, from any thread. `ready` depends on the server; `alive` does not."""
        engine = self._engine
        registration = engine.session.registration
        lag = max(engine.executors.asyncio_lag, 0.0 if registration is None else registration.lag)
        why = _why_not_ready(engine)
        return Health(
            alive=lag < engine.settings.block_limit,
            ready=not why,
            why=why,
            running=engine.scheduler.running,
            room=max(0, engine.scheduler.room),
            loop_lag=lag,
        )

    def _readings(self) -> PeerReadings:
        return readings_of(self._engine, self.health())

    async def drain(self, grace: Seconds | None = None) -> None:
        """Take no more tasks, wait for those that run, and leave all queues.

        Tasks that still run after `grace` are cancelled and return to their queues. If you call it more than once, the shortest
        grace applies. Cancelling the call does not stop the leaving.

        Args:
            grace: Seconds to wait, or a timedelta. Default: the `grace` of the join, 25 s.

        Raises:
            UsageError: `grace` is negative, or not a number or timedelta.
        """
        await self._engine.drain(grace)

    async def wait(self) -> None:
        """Wait until the peer has drained.

        Raises:
            UsageError: The peer has nothing to do: the mesh declares no function and no schedule, and no queue is served.
        """
        await self._engine.wait()


def _why_not_ready(engine: Engine) -> str:
    """Return why the peer is not ready to take tasks; empty if it is."""
    registration = engine.session.registration
    if engine.leaving:
        return "the peer is leaving"
    if registration is None or registration.dead:
        return "not registered: joining again"
    if not engine.session.beat_is_fresh():
        return "the server has not acknowledged a beat lately"
    if orphaned := engine.stuck.orphaned:
        return f"slots lost by a bug of worqr: {orphaned}; restart this worker"
    unsubscribed = [consumer.queue for consumer in engine.consumers.entered() if not consumer.admission.listening]
    return f"not subscribed to queue {unsubscribed[0]!r}" if unsubscribed else engine.executors.why_not_ready
