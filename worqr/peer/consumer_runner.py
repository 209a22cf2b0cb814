"""`ConsumerRunner`: makes the consumers of a queue, and runs them until the peer leaves the queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import trio

from worqr import ops
from worqr.errors import UsageError, WorqrBug, WorqrError
from worqr.handler_checks import is_async
from worqr.handler_options import PATIENT, Handling, RunsIn, policy_for
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.lanes import wire_rules
from worqr.limits import limits_text
from worqr.peer.consumer import ConsumerServices, HandlerConsumer, QueueOptions
from worqr.peer.consumer_startup import ConsumerStartup
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.executors.executors import Executors
from worqr.peer.handlers import Handler, named_after
from worqr.peer.lane_filing import lane_in_shard
from worqr.peer.list_consumer import ListConsumer, ListSettles, taking_calls
from worqr.peer.manual_consumer import ClaimBuffer, Claims, ManualConsumer
from worqr.peer.middleware import with_middleware
from worqr.peer.run import Run, current_run, failed_of
from worqr.peer.scheduler import Pool, Share
from worqr.peer.settings import PeerSettings
from worqr.policy import RetryPolicy
from worqr.tracebacks import is_a, leaves_of, one_line


@dataclass(frozen=True, slots=True)
class RunStarters:
    """How the runs of a peer begin and end.

    Attributes:
        run: gives a run to a slot.
        run_list: gives a list run to a slot.
        settler: settles the claims of list runs.
    """

    run: Callable[[Run[Any]], None]
    run_list: Callable[[Run[Any]], None]
    settler: ListSettles


class ConsumerRunner:
    """Runs the consumers of one peer, for handlers and for claims by hand."""

    def __init__(
        self,
        settings: PeerSettings,
        services: ConsumerServices,
        executors: Executors,
        starters: RunStarters,
        consumers: ActiveConsumers,
        startup: ConsumerStartup,
    ) -> None:
        self._settings = settings
        self._services = services
        self._executors = executors
        self._starters = starters
        self._consumers = consumers
        self._startup = startup

    async def _check_free(self, queue: str) -> tuple[QueueKeys, ...]:
        """Return the keys of all shards of `queue`. Raise UsageError if the peer cannot serve it, or serves it already."""
        keys, sharding = QueueKeys.of(self._settings.prefix, queue), self._settings.sharding
        shards = (keys,) if sharding is None else await sharding.shards(keys)
        if self._consumers.closed:
            raise UsageError(f"queue {queue!r}: this peer has left the mesh; join again for another one")
        if any(self._consumers.get(keys.name) is not None for keys in shards):
            raise UsageError(
                f"queue {queue!r} is served by this peer already; use one handler with a higher concurrency"
            )
        return shards

    async def serve(
        self, queue: str, handler: Callable[[bytes], object], how: Handling, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Serve a queue until cancelled, or until the peer has left; see ``Peer.serve``. Started means subscribed."""
        shards = await self._check_free(check_name(queue))
        async with AsyncExitStack() as stack:
            place = self._executors.resolve_runs_in(handler, how.runs_in)
            consumers = self._new_consumers(shards, *self._executors.prepare(handler, how.runs_in), how, place)
            if how.on_failure is not None:
                failing = await self._failure_consumers(shards[0], how)
                await stack.enter_async_context(self._startup.entered(failing))
            await stack.enter_async_context(self._startup.entered(consumers))
            task_status.started()
            await _wait_left(consumers)

    async def serve_all(
        self, nursery: trio.Nursery, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]
    ) -> None:
        """Serve these queues in a nursery; return when all are subscribed."""

        async def serve(
            queue: str, handler: Callable[[bytes], object], how: Handling, task_status: trio.TaskStatus[None]
        ) -> None:
            await self.serve(queue, handler, how, task_status=task_status)

        try:
            async with trio.open_nursery() as subscribing:
                for each in handlers:
                    subscribing.start_soon(nursery.start, partial(serve, *each))
        except BaseExceptionGroup as group:
            raise unwrap_error(group) from None

    def _new_consumers(
        self, shards: Sequence[QueueKeys], run: Handler, pool: Pool | None, how: Handling, place: RunsIn
    ) -> list[HandlerConsumer]:
        """Make one consumer for each shard. Together they have the concurrency and the priority of the queue."""
        limit = None if how.concurrency is None else Pool(how.concurrency)
        priority = how.priority if len(shards) == 1 else how.priority / len(shards)
        if how.batch_size is not None:
            run = taking_calls(run)
        run, state = with_middleware(run, self._settings.middleware, place), self._executors.state_in(place)
        consumers: list[HandlerConsumer] = []
        for n, keys in enumerate(shards):
            limits = limits_text(how.limits, keys.display_name, len(shards), n)
            lane_of = lane_in_shard(how.lane_of, shards, keys)
            options = QueueOptions(how.recent, limits, wire_rules(how.lanes, keys.display_name), lane_of)
            share = Share(how.size, priority, pool, limit)
            consumers.append(self._new_consumer(keys, how, share, run, state, options))
        return consumers

    def _new_consumer(
        self, keys: QueueKeys, how: Handling, share: Share, run: Handler, state: object, options: QueueOptions
    ) -> HandlerConsumer:
        """Make the consumer of one shard, for a handler that takes one task or a list."""
        starters = self._starters
        if how.batch_size is None:
            return HandlerConsumer(keys, self._services, how.policy, share, run, starters.run, state, options)
        return ListConsumer(
            *(keys, self._services, how.policy, share, run, starters.run_list, state, options),
            size=how.batch_size,
            wait=how.batch_wait,
            settler=starters.settler,
        )

    async def _failure_consumers(self, keys: QueueKeys, how: Handling) -> list[HandlerConsumer]:
        """Make the consumers of the failure jobs of a queue.

        An async function runs on the mesh's loop for async functions, unless the handler names a loop. A plain function runs in a
        thread.
        """
        queue = keys.queue
        shards = await self._check_free(QueueKeys(keys.prefix, queue, failures=True).name)
        on_failure: Any = how.on_failure
        if hasattr(on_failure, "__worqr_handler__"):  # a declared function takes the record, not an encoded payload
            on_failure = on_failure.__wrapped__
        loop = how.runs_in if how.runs_in in {"loop", "asyncio"} and is_async(on_failure) else None
        handle, pool = self._executors.prepare(on_failure, loop)

        async def run(_task: bytes) -> object:
            return await cast("Any", handle)(failed_of(current_run.get(), queue))

        note = ops.note_queues(RegistryKeys(keys.prefix), [failures.name for failures in shards])
        link = self._services.link
        link.post(note, lambda _word, _failure: None, patience=link.settings.patience)
        place = self._executors.resolve_runs_in(on_failure, loop)
        return self._new_consumers(shards, named_after(on_failure, run), pool, Handling(how.failing or PATIENT), place)

    @asynccontextmanager
    async def work(self, queue: str, retry: RetryPolicy | None, keep_failed: int) -> AsyncGenerator[Claims]:
        """Enter a block in which the application claims the tasks of a queue itself; see ``Peer.work``."""
        check_name(queue)
        policy, size = policy_for(retry, keep_failed=keep_failed), self._settings.max_payload
        shards = await self._check_free(queue)
        buffer = ClaimBuffer()
        priority = 100 if len(shards) == 1 else 100 / len(shards)
        for keys in shards:
            ManualConsumer(
                *(keys, self._services, policy, Share(priority=priority), buffer),
                max_result=size,
                state=self._settings.state,
            )
        tracing, server = self._settings.tracing, self._services.link.settings.address
        claims = Claims(buffer, None if tracing is None else partial(tracing.taken, queue, server))
        async with self._startup.entered(buffer.consumers):
            try:
                yield claims
            finally:
                claims._close()  # pyright: ignore[reportPrivateUsage]


async def _wait_left(consumers: Sequence[HandlerConsumer]) -> None:
    """Wait until the queue was left. Meanwhile, end the waits of its list runs."""
    async with trio.open_nursery() as nursery:
        for consumer in consumers:
            if isinstance(consumer, ListConsumer):
                nursery.start_soon(consumer.close_forever)
        for consumer in consumers:
            await consumer.lifecycle.left.wait()
        nursery.cancel_scope.cancel()


def unwrap_error(group: BaseException) -> BaseException:
    """Return the error that ended the engine, without the exception groups of internal nurseries."""
    group = next((leaf for leaf, _ in leaves_of(group)), group)
    if is_a(group, WorqrError) or not is_a(group, Exception):
        return group
    bug = WorqrBug(f"the peer ended, because one of its duties failed ({one_line(group)}); please report this")
    bug.__cause__ = group
    return bug
