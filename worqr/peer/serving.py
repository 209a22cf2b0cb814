"""What a peer consumes: queues whose tasks go to a handler, and queues whose tasks are taken by hand."""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

import trio

from worqr import ops
from worqr.errors import UsageError, WorqrBug, WorqrError
from worqr.keys import QueueKeys, check_name
from worqr.peer.capacity import Capacity, Pool
from worqr.peer.claiming import HandlerStation
from worqr.peer.claims import Claims, HandStation
from worqr.peer.context import current, failed_of
from worqr.peer.desk import Desk
from worqr.peer.options import PATIENT, HandlerOptions, Handling, RunsIn, handling, policy_for
from worqr.peer.runners import Runners, is_async, with_middleware
from worqr.peer.running import Handler, Slots, named_after
from worqr.peer.settings import PeerSettings
from worqr.peer.stations import Stations
from worqr.policy import RetryPolicy

if TYPE_CHECKING:
    from worqr.link import Link
    from worqr.peer.membership import Membership


class Serving:
    """The part of `Peer` that serves queues. Its attributes are set once, by `Peer`; but for the nursery of the engine."""

    settings: PeerSettings
    capacity: Capacity
    membership: Membership
    _link: Link
    _runners: Runners
    _slots: Slots
    _stations: Stations
    _spawned: trio.Nursery | None

    async def serve(
        self,
        queue: str,
        handler: Callable[[bytes], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Run `handler(task)` for every task of `queue`, until cancelled or until the peer has left.

        Started (``await nursery.start(partial(peer.serve, "q", handler))``) means subscribed. A handler that returns has
        finished its task; one that raises has failed: the task is tried again after a backoff, and set aside at its 10th
        failure. Raise `Retry` to say when, `Failure` for never again, `Broken` for a payload that makes no sense. Tasks of a
        worker that died come back to the front at once, and are set aside at the 3rd death.

        Args:
            queue: its name; a peer serves a queue once. Of several shards it serves all, with one `concurrency`.
            handler: an async function, or a plain function, which runs in a thread (then cancelling it only reaches it
                through ``worqr.current().check_cancelled()``).
            options: see `HandlerOptions`.

        Raises:
            UsageError: a bad name, a handler that is not callable, an option that does not exist, a queue that is served
                already, a peer that has left.
            RefusedByServer, Unavailable: the queue could not be entered.

        Cancelling it is leaving the queue: its handlers are cancelled and their tasks go back to the front, uncounted. One in a
        thread or on the asyncio loop that does not end within 5 s is not waited for: it keeps its claim until it ends, or until
        this peer does.
        """
        if options.get("max_length") is not None:
            raise UsageError("serve() takes no max_length: it bounds enqueues, so give it to @mesh.task or to enqueue")
        if "shards" in options:
            raise UsageError(
                f"serve() takes no shards: say mesh.queue({queue!r}, shards=...), where it is enqueued too"
            )
        how = handling("serve", options)
        how.check_failing(queue)
        await self.serve_as(queue, handler, how, task_status=task_status)

    async def serve_as(
        self,
        queue: str,
        handler: Callable[[bytes], object],
        how: Handling,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """`serve`, with options that are checked."""
        shards = await self._stations.check_free(check_name(queue))
        async with AsyncExitStack() as stack:
            place = self._runners.place_of(handler, how.runs_in)
            stations = self._new_stations(shards, *self._runners.prepare(handler, how.runs_in), how, place)
            if how.on_failure is not None:
                failing = await self._failure_stations(shards[0], how)
                await stack.enter_async_context(self._stations.stationed(failing))
            await stack.enter_async_context(self._stations.stationed(stations))
            task_status.started()
            for station in stations:
                await station.left.wait()

    async def serve_all(self, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]) -> None:
        """Serve these queues until the peer leaves; back when all are subscribed."""
        engine = self._spawned
        assert engine is not None
        try:
            async with trio.open_nursery() as nursery:
                for queue, handler, how in handlers:
                    nursery.start_soon(engine.start, partial(self.serve_as, queue, handler, how))
        except BaseExceptionGroup as group:
            raise our_own(group) from None

    def _new_stations(
        self, shards: Sequence[QueueKeys], run: Handler, pool: Pool | None, how: Handling, place: RunsIn
    ) -> list[HandlerStation]:
        """One for each shard; together they have the concurrency and the priority of the queue."""
        limit = None if how.concurrency is None else Pool(how.concurrency)
        priority = how.priority if len(shards) == 1 else how.priority / len(shards)
        run = with_middleware(run, self.settings.middleware, place)
        stations = [
            HandlerStation(
                *(keys, self.membership, self.capacity, how.policy, run, limit, self._slots.run),
                size=how.size,
                priority=priority,
                pool=pool,
            )
            for keys in shards
        ]
        for station in stations:
            station.state = self._runners.state_in(place)
        return stations

    async def _failure_stations(self, keys: QueueKeys, how: Handling) -> list[HandlerStation]:
        """Where the failure jobs of a queue are handled: by an async function where the mesh runs those, unless the handler says
        which loop; else in a thread.
        """
        queue = keys.queue
        shards = await self._stations.check_free(QueueKeys(keys.prefix, queue, failures=True).name)
        on_failure: Any = how.on_failure
        if hasattr(
            on_failure, "__worqr_handler__"
        ):  # a declared function: it takes the record, not a payload that says it
            on_failure = on_failure.__wrapped__
        loop = how.runs_in if how.runs_in in {"loop", "asyncio"} and is_async(on_failure) else None
        handle, pool = self._runners.prepare(on_failure, loop)

        async def run(_task: bytes) -> object:
            return await cast("Any", handle)(failed_of(current(), queue))

        note = ops.note_queues(self.membership.keys, [failures.name for failures in shards])
        self._link.post(note, lambda _word, _failure: None, patience=self._link.settings.patience)
        place = self._runners.place_of(on_failure, loop)
        return self._new_stations(shards, named_after(on_failure, run), pool, Handling(how.failing or PATIENT), place)

    @asynccontextmanager
    async def work(self, queue: str, *, retry: RetryPolicy | None = None) -> AsyncGenerator[Claims]:
        """Take the tasks of `queue` by hand, inside this block. What is unsettled at its end goes back to the front. Of several
        shards it takes from all, in turns.

        Args:
            queue: its name.
            retry: as in `serve`, for claims that are retried and for blocks that raise.

        Raises: as `serve`.
        """
        check_name(queue)
        policy, size = policy_for(retry), self.settings.max_payload
        shards = await self._stations.check_free(queue)
        desk = Desk()
        priority = 100 if len(shards) == 1 else 100 / len(shards)
        for keys in shards:
            station = HandStation(
                *(keys, self.membership, self.capacity, policy, desk), max_result=size, priority=priority
            )
            station.state = self.settings.state
        claims = Claims(desk)
        async with self._stations.stationed(desk.stations):
            try:
                yield claims
            finally:
                claims.close()


def our_own(group: BaseException) -> BaseException:
    """What ended the engine, as one error: nobody outside needs to know of our nurseries."""
    while isinstance(group, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", group).exceptions[0]
    if isinstance(group, WorqrError) or not isinstance(group, Exception):
        return group
    bug = WorqrBug(
        f"the peer ended, because one of its duties failed ({type(group).__name__}: {group}); please report this"
    )
    bug.__cause__ = group
    return bug
