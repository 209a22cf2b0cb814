"""`ConsumerRunner`: makes the consumers of a queue, and runs them until the peer leaves the queue."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import trio

from worqr import ops
from worqr.errors import ClaimLost, UsageError, WorqrBug, WorqrError
from worqr.handler_options import PATIENT, Handling, RunsIn, is_async, policy_for
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.limits import NO_RULES, describe_limits, limits_text, parse_limits, wire_rules
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.peer.consumer import ConsumerServices, HandlerConsumer, QueueConsumer, QueueOptions, lane_in_shard
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.departures import Departure, Departures
from worqr.peer.executors.executors import Executors
from worqr.peer.executors.offloaded import Handler, named_after
from worqr.peer.lifespans import with_middleware
from worqr.peer.list_consumer import ListConsumer, ListSettles, taking_calls
from worqr.peer.list_run import ListRun
from worqr.peer.manual_consumer import ClaimBuffer, Claims, ManualConsumer
from worqr.peer.reconciler import ControlChannel
from worqr.peer.run import SETTLED, Run, current_run, failed_of
from worqr.peer.run_counter import RunCounter
from worqr.peer.scheduler import Pool, Scheduler, Share
from worqr.peer.session import Registration, Session
from worqr.peer.settings import PeerSettings
from worqr.peer.settler import Settler
from worqr.peer.settles import Settles
from worqr.peer.stuck_handlers import StuckHandlerMonitor
from worqr.peer.task_log import RUN
from worqr.policy import RetryPolicy, shown_fields
from worqr.tracebacks import is_a, leaves_of, one_line

# `ConsumerStartup`: lets a consumer enter its queue: registry, admission, channels, and the first start request.
#
# A queue is entered in the registry first, and then in its own set of admitted workers. It is left in the opposite order. So
# the leader finds the claims of a worker that dies in between.


logger: logging.Logger = logging.getLogger(__name__)


class ConsumerStartup:
    """Enters the queues of one peer, whose worker id may change in the meantime. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        session: Session,
        scheduler: Scheduler,
        consumers: ActiveConsumers,
        channel: ControlChannel,
        departures: Departures,
        shutdown: ConsumerShutdown,
    ) -> None:
        self._link = link
        self._keys = keys
        self._session = session
        self._scheduler = scheduler
        self._consumers = consumers
        self._channel = channel
        self._departures = departures
        self._shutdown = shutdown

    @asynccontextmanager
    async def entered(self, consumers: Sequence[QueueConsumer]) -> AsyncGenerator[None]:
        """Serve a queue, with all its shards, for the length of a block."""
        here: list[QueueConsumer] = []
        try:
            for consumer in consumers:
                self._scheduler.add(consumer)
                self._consumers.add(consumer)
                here.append(consumer)
            self._consumers.used.set()
            if self._consumers.closed:  # drained after `_check_free`, while the peer entered another queue
                for consumer in here:
                    self._shutdown.begin(consumer, 0)
            await self._enter_all(consumers)
            yield
        finally:
            with trio.CancelScope(shield=True):
                for consumer in here:
                    self._shutdown.begin(consumer, 0)
                    consumer.lifecycle.skip_grace()
                for consumer in here:
                    await consumer.lifecycle.left.wait()
                    self._scheduler.remove(consumer)
                    self._consumers.remove(consumer)

    async def _enter_all(self, consumers: Sequence[QueueConsumer]) -> None:
        """Enter all of them at the same time; raise the first error."""
        errors: list[Exception] = []

        async def enter(consumer: QueueConsumer) -> None:
            try:
                with consumer.lifecycle.entering:  # cancelled if the peer leaves
                    await self._enter_now(consumer)
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        if len(consumers) == 1:
            with consumers[0].lifecycle.entering:
                await self._enter_now(consumers[0])
            return
        async with trio.open_nursery() as nursery:
            for consumer in consumers:
                nursery.start_soon(enter, consumer)
        if errors:
            raise errors[0]

    async def _enter_now(self, consumer: QueueConsumer) -> None:
        while True:
            registration = await self._session.wait_registered()
            try:
                await self.enter(consumer, registration)
            except ClaimLost:
                continue
            return

    async def enter_again(self, registration: Registration) -> None:
        """Enter all queues that the peer serves under a new registration."""
        async with trio.open_nursery() as nursery:
            for consumer in self._consumers.entered():
                nursery.start_soon(self._enter_again, consumer, registration)

    async def _enter_again(self, consumer: QueueConsumer, registration: Registration) -> None:
        """Enter a queue; retry without limit. On a cluster, the node of one queue may be unavailable while other nodes work."""
        while not (registration.dead or consumer.lifecycle.is_leaving):
            try:
                await self.enter(consumer, registration)
            except ClaimLost:
                return  # the peer has begun to register once more
            except WorqrError as error:
                text = "queue %(queue)r could not be entered again, next try in %(retry_in)s s: %(error)s"
                emit(logger, "start_work", text, queue=consumer.name, retry_in=1, error=str(error))
                await trio.sleep(1)
            else:
                return

    async def enter(self, consumer: QueueConsumer, registration: Registration) -> None:
        """Serve a queue under `registration`.

        Returns early if the queue is being left. If an earlier departure of this worker from the queue is under way, waits for
        its end first.

        Raises:
            ClaimLost: the registration died.
        """
        consumer.admission.enter(registration, self._link.connections)
        await self._departures.wait_left(consumer.keys, registration)
        if await self._link.call(ops.map_work(self._keys, registration.worker, consumer.name)) == "dead":
            self._session.lost(registration, "the registry does not know it")
        if not _should_continue(consumer, registration):
            return
        policy = consumer.policy
        changed = await self._link.call(
            ops.start_work(
                *(consumer.keys, registration.worker),
                max_stalls=policy.max_stalls,
                keep_failed=policy.keep_failed,
                last=registration.number,
                on_failure=policy.on_failure,
                result_ttl_ms=round(policy.result_ttl * 1000) if policy.result_ttl > 0 else None,
                limits=consumer.options.limits,
                lanes=consumer.options.lanes,
                options=json.dumps(shown_fields(policy), separators=(",", ":")),
            )
        )
        if changed:
            _log_changed(consumer, limits_changed=changed == "limits")
        if not _should_continue(consumer, registration):
            return
        consumer.admission.admit()
        consumer.lifecycle.admitted()
        await self._channel.subscribe(consumer)


def _log_changed(consumer: QueueConsumer, *, limits_changed: bool) -> None:
    """Log the limits that this worker declares, if they hold now, and that it declares other rules of lanes."""
    has_rules = consumer.options.lanes not in {b"", NO_RULES}
    limits = describe_limits(parse_limits(consumer.options.limits))
    text = "queue %(queue)r: its workers declare other rules of its lanes"
    if limits_changed:
        text = "queue %(queue)r: what may start in the mesh is now %(limits)s"
        limits += "; its lanes have rules of their own" if has_rules else ""
    emit(logger, "limits.changed", text, queue=consumer.name, limits=limits)


def _should_continue(consumer: QueueConsumer, registration: Registration) -> bool:
    """Return False if the queue is being left. Raise ClaimLost if the registration has died."""
    if registration.dead:
        raise ClaimLost(f"worker {registration.worker} was swept while it entered queue {consumer.queue!r}")
    return not consumer.lifecycle.is_leaving


# `ConsumerShutdown`: lets a consumer leave its queue. It stops claiming, drains, cancels, and gives the claims back.
#
# Several callers may request it. It runs in the engine, so a caller that is cancelled does not leave the queue half-way.
# `Lifecycle` has the phases of a consumer that leaves. If the server does not reply, a caller waits for `LEAVE_PATIENCE` only.
# The queue is left on the server when the server replies again (`departures`).
#
# A handler may ignore its cancellation. On the Trio loop the peer waits for it, and logs it every `REMIND` seconds. In a thread
# or on the asyncio loop, the run is left behind after `DETACH_AFTER`, and callers that wait for the queue continue. The
# consumer is then *detached*, and the run keeps its claim. If the run ends before the peer does, the claim is settled, and the
# queue is left completely. Otherwise the peer ends without deregistering, like a worker that dies. The leader then recovers the
# claim when the keepalive has expired. Until then the handler may still run in a process that is about to end.


LEAVE_PATIENCE = 2.0
UNREACHABLE_PATIENCE = 0.1
"""Seconds to wait for a reply, and to deregister. The second value: to deregister if the server did not reply in that time."""
UNWIND_WITHIN = 1.0
"""Seconds that cancelled handlers have to end together, so that their tasks go back in one request and in order."""
DETACH_AFTER = 5.0
"""Seconds after their cancellation until handlers in threads and on asyncio loops are left behind. Together with the default
grace this fits into the 30 s of Kubernetes.
"""
REMIND = 30.0
"""Seconds between two reports of a handler on the loop that keeps the peer from leaving."""


class ConsumerShutdown:
    """Makes consumers leave their queues. Changed only in the loop.

    Args:
        consumers: all consumers of the peer.
        settler: ends claims.
        settles: the settles that the server has not accepted yet.
        counter: counts the runs.
        departures: leave the queues on the server.
        stuck: describes runs that do not end, and finds those that no slot has.
        spawn: runs a task behind the shield of the engine; returns False if the engine does not run.

    Attributes:
        server_answers: False after a request to which the server did not reply in time.
    """

    def __init__(
        self,
        consumers: ActiveConsumers,
        settler: Settler,
        settles: Settles,
        counter: RunCounter,
        departures: Departures,
        stuck: StuckHandlerMonitor,
        spawn: Callable[[Callable[[], Awaitable[Any]]], bool],
    ) -> None:
        self.server_answers: bool = True
        self._consumers = consumers
        self._settler = settler
        self._settles = settles
        self._counter = counter
        self._departures = departures
        self._stuck = stuck
        self._spawn = spawn

    def begin(self, consumer: QueueConsumer, grace: float) -> None:
        """Begin to leave a queue, in the engine. `lifecycle.left` is set when the queue was left. May be called twice."""
        if consumer.lifecycle.drain():
            consumer.give_back_unstarted()
            if not self._spawn(partial(self._leave, consumer, grace)):
                consumer.lifecycle.leave()

    async def _leave(self, consumer: QueueConsumer, grace: float) -> None:
        """Stop claiming, drain for `grace` or until it is skipped, cancel, give back."""
        lifecycle = consumer.lifecycle
        try:
            if grace > 0 and not lifecycle.grace_over.is_set():
                with trio.move_on_after(grace):
                    await _drain_or_skip(consumer)
            lifecycle.skip_grace()
            await self._unwind(consumer)
            if stay := self._consumers.is_shared(consumer):
                self._give_back(consumer, consumer.running)
            self._settler.flush()
            self._counter.leaves(consumer)
            if departure := self._depart(consumer, stay=stay):
                await self._wait_left(departure)
        finally:
            self._settler.left(consumer)
            for run in tuple(consumer.running.values()):
                run.cancel("lost")
                run.settle()
                consumer.ended(run)
            self._counter.left(consumer)
            lifecycle.leave()

    def _depart(self, consumer: QueueConsumer, *, stay: bool) -> Departure | None:
        """Begin to leave a queue on the server: all claims go back to the front, and the registry removes the worker from the
        queue.

        With `stay`, another consumer of this peer needs the worker's admission. Then only the channels are left.

        Returns:
            The departure, which continues without the caller; None if there is nothing to leave.
        """
        registration = consumer.registration
        if registration is None or registration.dead or stay:
            consumer.admission.unsubscribe()
            return None
        consumer.admission.leave()
        return self._departures.begin(consumer.keys, registration)

    async def _wait_left(self, departure: Departure) -> None:
        """Wait while the server replies.

        If the server stops replying, the queue counts as left here, and the departure continues without this call.
        """
        while not departure.done.is_set() and departure.refused is None:
            answers = departure.answers
            with trio.move_on_after(LEAVE_PATIENCE):
                await departure.done.wait()
            if departure.answers == answers and not departure.done.is_set():
                self.server_answers = False
                text = "queue %(queue)r: the server has not answered for %(duration)g s; its tasks are given back when it does"
                emit(logger, "leave.unanswered", text, queue=departure.keys.display_name, duration=LEAVE_PATIENCE)
                return

    async def _unwind(self, consumer: QueueConsumer) -> None:
        """Cancel running tasks, and wait for their end, because a task that went back may start on another worker immediately.

        Runs that end within `UNWIND_WITHIN` go back in one script with all other claims of the worker, in their old order. Slower
        handlers are not waited for. A claim that the application holds outside a block has no handler to wait for.
        """
        consumer.lifecycle.cancel()
        consumer.cancel_running("leaving")
        with trio.move_on_after(UNWIND_WITHIN):
            await (consumer.wait_blocks() if isinstance(consumer, ManualConsumer) else consumer.wait_idle())
        if not isinstance(consumer, ManualConsumer) and consumer.running:
            consumer.lifecycle.return_claims()
            self._settler.flush()
            await self._wait_unresponsive(consumer)

    async def _wait_unresponsive(self, consumer: QueueConsumer) -> None:
        """Wait for handlers that do not end; detach the consumer if that is possible."""
        report_at = 0.0
        while True:
            self._release_orphans(consumer)
            with trio.move_on_after(DETACH_AFTER - UNWIND_WITHIN):
                await consumer.wait_idle()
                return
            runs = [run.offloaded for run in consumer.executing.values()]
            free = all(run is not None and run.detachable for run in runs)
            if free or trio.current_time() >= report_at:
                report_at = trio.current_time() + REMIND
                self._report(
                    consumer, "the queue is left without it" if free else "the worker cannot leave before it does"
                )
            if free:
                await self._detach(consumer)
                return

    def _release_orphans(self, consumer: QueueConsumer) -> None:
        """Give back the claims of runs that no slot has: nothing else would end them."""
        for orphan in self._stuck.orphans_of(consumer):
            for run in orphan.claimed if isinstance(orphan, ListRun) else (orphan,):
                if consumer.running.get(run.fence) is run:
                    if run.state is not SETTLED:
                        run.settle()
                        self._give_back(consumer, [run.fence])
                    consumer.ended(run)

    def _report(self, consumer: QueueConsumer, what: str) -> None:
        """Log each handler that still runs."""
        for run in consumer.executing.values():
            fields = {**self._stuck.fields(run), "reason": what}
            text = f"{RUN}: %(handler)s was cancelled, but does not end; %(reason)s; it is at\n%(where)s"
            emit_fields(logger, "task.unending", text, fields)

    async def _detach(self, consumer: QueueConsumer) -> None:
        """Count the queue as left, except for the remaining runs. Return when these runs have ended."""
        self._consumers.detach(consumer)
        consumer.lifecycle.detach()
        while consumer.running:
            self._give_back(consumer)
            await consumer.lifecycle.wait_idle()
        self._consumers.forget_detached(consumer)

    def _give_back(self, consumer: QueueConsumer, held: Iterable[int] = ()) -> None:
        """Give claims back one by one, because the queue, with which they would go back together, is not left yet."""
        consumer.lifecycle.return_claims()
        claims = {*consumer.lifecycle.take_rejected(), *held}
        registration = consumer.registration
        if registration is not None and not registration.dead:
            self._settles.give_back(consumer.keys, registration, claims)

    def holds_claims(self, registration: Registration | None) -> bool:
        """Return True if runs that were left behind hold claims of this registration."""
        detached = self._consumers.detached
        return any(c.registration is registration for consumer in detached for c in consumer.running.values())

    def abandon_detached(self) -> None:
        """Stop waiting for runs that were left behind, because the peer ends. The leader recovers their claims."""
        for consumer in self._consumers.detached:
            for run in consumer.running.values():
                run.settle()
                if run.offloaded is not None:
                    run.offloaded.detach()


async def _drain_or_skip(consumer: QueueConsumer) -> None:
    """Wait until nothing runs there, or until the grace is skipped."""
    async with trio.open_nursery() as nursery:

        async def idle() -> None:
            await consumer.wait_idle()
            nursery.cancel_scope.cancel()

        nursery.start_soon(idle)
        await consumer.lifecycle.grace_over.wait()
        nursery.cancel_scope.cancel()


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
