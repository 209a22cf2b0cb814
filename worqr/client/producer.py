"""`Producer`: sends calls of functions, one at a time or many in few round trips."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, cast

from worqr import ops
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.dispatcher import handle_of, send_dispatch, waiting_as
from worqr.client.job import Job
from worqr.client.room import PART, RoomChannels, check_fits
from worqr.errors import NotReplicated, UsageError, at_max_length, reply_in
from worqr.ids import with_random_ids
from worqr.job_options import LANE_OPTIONS, RAW_OPTIONS, wait_in, without_replicas
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, Dispatched, NewJob
from worqr.ops.replies import in_chunks
from worqr.script_call import Call as Request
from worqr.validation import check_task

# Send many calls of functions to queues that may be full, in parts that wait for room. For `worqr.client.producer`.


# Call hides its private fields from users; the producer reads them.
# pyright: reportPrivateUsage=false


Positioned = tuple[int, Call[Any]]
"""A call, with its position among those of its caller."""


def part_of(options: Mapping[str, object], shards: int) -> int:
    """Return how many calls with these options wait for room together in one of so many shards."""
    bounds = (options.get("max_length"), options.get("max_lane_length"))
    bound = min(cast("int", each) for each in bounds if each is not None)
    return max(1, min(MAX_ITEMS, bound // PART // shards))


def by_wait(calls: Sequence[Positioned]) -> dict[float, list[Positioned]]:
    """Return the calls by the seconds for which they wait for room."""
    found: dict[float, list[Positioned]] = {}
    for position, call in calls:
        found.setdefault(wait_in(call._options), []).append((position, call))
    return found


class WaitingDispatch:
    """Jobs for one shard that wait for room. Those that were refused are sent again.

    Attributes:
        done: the outcomes, by position.
        late: the error of a request that too few replicas had in time; its jobs are stored.
    """

    def __init__(
        self,
        keys: QueueKeys,
        calls: Sequence[Positioned],
        send: Callable[[Sequence[Call[Any]], str, bool], Awaitable[list[Dispatched]]],
    ) -> None:
        """Prepare it. `send` sends calls under the name of a waiting call, and waits for replicas or not."""
        self.done: dict[int, Dispatched] = {}
        self.late: NotReplicated | None = None
        self._keys = keys
        self._calls = calls
        self._send = send

    async def run(self, rooms: RoomChannels, wait: float, shards: int) -> None:
        """Send the jobs, part by part.

        Raises:
            QueueFull: the queue had no room for a part within `wait` seconds. Earlier jobs are stored.
        """
        part = part_of(self._calls[0][1]._options, shards)
        for chunk in in_chunks(self._calls, lambda each: len(each[1].task), most=part):
            left = list(chunk)

            async def attempt(waiter: str, left: list[Positioned] = left) -> None:
                await self._attempt(left, waiter)

            await rooms.when_room(self._keys, wait, attempt)

    async def _attempt(self, left: list[Positioned], waiter: str) -> None:
        """Send the remaining jobs of a part, and keep the refused ones in `left`."""
        try:
            answers = await self._send([call for _, call in left], waiter, self.late is None)
        except NotReplicated as late:
            answers, self.late = cast("list[Dispatched]", reply_in(late)), late
        refused: list[Positioned] = []
        for (position, call), answer in zip(left, answers, strict=True):
            if answer.outcome == "full":
                refused.append((position, call))
            else:
                self.done[position] = answer
        left[:] = refused
        if left:
            raise at_max_length(
                f"queue {self._keys.display_name!r} is at its max_length: {len(left):,} jobs were not stored"
            )


R = TypeVar("R")
T = TypeVar("T")
K = TypeVar("K")

OptionsAt = Callable[[QueueKeys], Awaitable[Mapping[str, object]]]
"""Returns the encoded options that a job in this shard gets in addition."""


class Producer:
    """Sends the calls of one mesh's functions. The test bench replaces it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def enqueue(self, call: Call[Any]) -> None:
        """Send one call as a raw task; as a job, if it has a lane."""
        if "lane" in call._options:
            await self.dispatch(call)
            return
        keys = await self._client.sharding.next_shard(QueueKeys(self._client.settings.prefix, call.queue))
        await self._enqueue_when_room(keys, [call])

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Send one call as a job."""
        queue = QueueKeys(self._client.settings.prefix, call.queue)
        keys = await self._client.sharding.shard_for_job(queue, call._options)
        jobs, replicas = await self._jobs_of(keys, [call])

        def make(waiter: str) -> Request[list[Dispatched]]:
            return ops.dispatch_jobs(keys, waiting_as(jobs, waiter), replicas=replicas)

        return await send_dispatch(self._client, queue, make, keys, call._results, wait=wait_in(call._options))

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Send calls as raw tasks, in one round trip per thousand."""
        stored = sending = 0
        late: NotReplicated | None = None
        try:
            for batch in self._batches(calls):
                for call in batch:
                    if call._options.keys() - RAW_OPTIONS - LANE_OPTIONS:
                        raise UsageError(f"a call of {call.name!r} has options, which make it a job: use dispatch_many")
                if laned := [call for call in batch if "lane" in call._options]:
                    stored += len(await self.dispatch_many(laned))
                plain = [call for call in batch if "lane" not in call._options]
                sending = len(plain)
                answers, late = await self._enqueue_batch(plain, late)
                stored += sum(answers)
                sending = 0
        except Exception as error:
            _note_progress(error, "stored", stored, sending)
            raise
        if late is not None:
            raise late
        if not stored:
            await self._send([])  # an empty call is a checkpoint, too
        return stored

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Send calls as jobs, in one round trip per thousand; return their handles, in the order of the calls."""
        jobs: list[Job[R]] = []
        sending = 0
        late: NotReplicated | None = None
        try:
            for batch in self._batches(calls):
                sending = len(batch)
                found, late = await self._dispatch_batch(batch, late)
                prefix = self._client.settings.prefix
                jobs += [
                    handle_of(
                        self._client,
                        QueueKeys(prefix, call.queue),
                        found[position][0],
                        call._results,
                        at=found[position][1],
                    )
                    for position, call in enumerate(batch)
                ]
                sending = 0
        except Exception as error:
            _note_progress(error, "dispatched", len(jobs), sending)
            raise
        if late is not None:
            raise late
        if not jobs:
            await self._send([])
        return jobs

    async def dispatch_members(
        self, calls: Sequence[Call[R]], options_at: OptionsAt, late: NotReplicated | None = None
    ) -> tuple[list[tuple[Dispatched, QueueKeys]], NotReplicated | None]:
        """Send up to a thousand calls as jobs of a batch. Return their outcomes, with the shards that they were sent to.

        Args:
            calls: the calls.
            options_at: returns the options that a job in a shard gets in addition.
            late: the error of earlier jobs of which too few replicas had the write in time. It is returned if it is given, or
                if that happens to these jobs: all were stored.
        """
        found: dict[int, tuple[Dispatched, QueueKeys]] = {}
        for batch in self._batches(calls):
            found, late = await self._dispatch_batch(batch, late, options_at)
        return [found[position] for position in range(len(found))], late

    def follow_up(self, call: Call[Any]) -> Call[Any]:
        """Return the call that the server will enqueue when a batch has ended."""
        self._check(call)
        return call

    async def _enqueue_batch(
        self, calls: Sequence[Call[Any]], late: NotReplicated | None
    ) -> tuple[list[int], NotReplicated | None]:
        """Send calls as raw tasks, those that wait for room one part after the other; return how many were stored."""
        requests: list[tuple[str, Request[int]]] = []
        parts: list[tuple[QueueKeys, list[Call[Any]]]] = []
        sharding = self._client.sharding
        for (name, _, wait), of_queue in _grouped(calls, lambda call: (call.queue, *_bound_of(call))):
            queue = QueueKeys(self._client.settings.prefix, name)
            most = part_of(of_queue[0]._options, len(await sharding.shards(queue))) if wait else MAX_ITEMS
            for chunk in in_chunks(of_queue, _size, most=most):
                keys = await sharding.next_shard(queue)
                if wait:
                    parts.append((keys, chunk))
                else:
                    requests.append((keys.name, await self._enqueue_of(keys, chunk)))
        answers, late = await self._send(requests, late)
        for keys, chunk in parts:
            try:
                answers.append(await self._enqueue_when_room(keys, chunk, late))
            except NotReplicated as error:
                late = error
                answers.append(reply_in(error))
        return answers, late

    async def _enqueue_when_room(
        self, keys: QueueKeys, calls: Sequence[Call[Any]], late: NotReplicated | None = None
    ) -> int:
        """Send calls as raw tasks in one request, when the queue has room for them."""

        async def attempt(waiter: str) -> int:
            request = await self._enqueue_of(keys, calls, waiter)
            return await self._client.link_to(keys.name).call(request.without_replicas() if late else request)

        wait = wait_in(calls[0]._options)
        return await self._client.rooms.when_room(keys, wait, attempt) if wait else await attempt("")

    async def _dispatch_batch(
        self, calls: Sequence[Call[Any]], late: NotReplicated | None, options_at: OptionsAt | None = None
    ) -> tuple[dict[int, tuple[Dispatched, QueueKeys]], NotReplicated | None]:
        """Send calls as jobs; return the outcome of each, by its position, with its shard."""
        requests: list[tuple[str, Request[list[Dispatched]]]] = []
        positions: list[tuple[int, QueueKeys]] = []
        waiting: list[tuple[QueueKeys, float, list[tuple[int, Call[Any]]]]] = []
        for keys, of_shard in await self._by_shard(calls):
            more: Mapping[str, object] = {} if options_at is None else await options_at(keys)
            positioned = [
                (n, replace(call, _options={**call._options, **more}) if more else call) for n, call in of_shard
            ]
            for wait, each in by_wait(positioned).items():
                if wait:
                    waiting.append((keys, wait, each))
                    continue
                for chunk in in_chunks(each, lambda each: len(each[1].task)):
                    requests.append((keys.name, await self._dispatch_of(keys, [call for _, call in chunk])))
                    positions += [(position, keys) for position, _ in chunk]
        answered, late = await self._send(requests, late)
        done = [each for answers in answered for each in answers]
        found = {position: (each, keys) for (position, keys), each in zip(positions, done, strict=True)}
        for keys, wait, each in waiting:
            late = await self._dispatch_when_room(keys, each, wait, found, late)
        return found, late

    async def _dispatch_when_room(
        self,
        keys: QueueKeys,
        calls: Sequence[tuple[int, Call[Any]]],
        wait: float,
        found: dict[int, tuple[Dispatched, QueueKeys]],
        late: NotReplicated | None,
    ) -> NotReplicated | None:
        """Send calls as jobs that wait for room in this shard, and add their outcomes to `found`."""

        async def send(part: Sequence[Call[Any]], waiter: str, replicated: bool) -> list[Dispatched]:
            request = await self._dispatch_of(keys, part, waiter)
            return await self._client.link_to(keys.name).call(
                request if replicated and late is None else request.without_replicas()
            )

        sending = WaitingDispatch(keys, calls, send)
        shards = await self._client.sharding.shards(replace(keys, tag=""))
        await sending.run(self._client.rooms, wait, len(shards))
        found |= {position: (each, keys) for position, each in sending.done.items()}
        return late or sending.late

    async def _by_shard(self, calls: Sequence[Call[R]]) -> list[tuple[QueueKeys, list[tuple[int, Call[R]]]]]:
        """Return the calls with their positions, by shard. All calls of one queue that have no id go to one shard."""
        found: list[tuple[QueueKeys, list[tuple[int, Call[R]]]]] = []
        sharding = self._client.sharding
        for name, of_queue in _grouped(enumerate(calls), lambda each: each[1].queue):
            queue = QueueKeys(self._client.settings.prefix, name)
            next_shard = await sharding.next_shard(queue)
            if len(await sharding.shards(queue)) == 1:
                found.append((next_shard, of_queue))
            else:
                by_shard: dict[QueueKeys, list[tuple[int, Call[R]]]] = {}
                for position, call in of_queue:
                    is_placed = "id" in call._options or "lane" in call._options
                    keys = await sharding.shard_for_job(queue, call._options) if is_placed else next_shard
                    by_shard.setdefault(keys, []).append((position, call))
                found += by_shard.items()
        return found

    async def _enqueue_of(self, keys: QueueKeys, calls: Sequence[Call[Any]], waiter: str = "") -> Request[int]:
        bound, wait = _bound_of(calls[0])
        if bound is not None:
            bound = await self._client.sharding.max_length_per_shard(keys, bound)
        check_fits(keys, len(calls), bound, wait)
        replicas = max(without_replicas(call._options, self._client.settings.replicas)[1] for call in calls)
        tasks = [call.task for call in calls]
        return ops.enqueue(keys, tasks, max_length=bound, waiter=waiter, replicas=replicas)

    async def _dispatch_of(
        self, keys: QueueKeys, calls: Sequence[Call[Any]], waiter: str = ""
    ) -> Request[list[Dispatched]]:
        jobs, replicas = await self._jobs_of(keys, calls)
        return ops.dispatch_jobs(keys, waiting_as(jobs, waiter), replicas=replicas)

    async def _jobs_of(self, keys: QueueKeys, calls: Sequence[Call[Any]]) -> tuple[list[NewJob], int]:
        """Return the jobs of calls, and how many replicas must have them."""
        sharding, replicas = self._client.sharding, 0
        jobs: list[NewJob] = []
        for call in calls:
            options, wanted = without_replicas(call._options, self._client.settings.replicas)
            jobs.append((await sharding.options_for(keys, options), call.task))
            replicas = max(replicas, wanted)
        return with_random_ids(jobs), replicas

    def _batches(self, calls: Iterable[Call[R]]) -> Iterator[list[Call[R]]]:
        self._client.check_connected()
        waiting = iter(calls)
        while batch := list(islice(waiting, MAX_ITEMS)):
            for call in batch:
                self._check(call)
            yield batch

    def _check(self, call: Call[Any]) -> None:
        """Raise UsageError or PayloadTooLarge if a call cannot be sent."""
        if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _no_call(call)
        if call._target is not None:
            call._target.require_client()
        check_task(call.task, self._client.settings.max_payload)

    async def _send(
        self, requests: Sequence[tuple[str, Request[T]]], late: NotReplicated | None = None
    ) -> tuple[list[T], NotReplicated | None]:
        """Send requests together and wait for all replies, in order; raise the first error after all have replied.

        If too few replicas had the writes of a request in time, that error is returned, because further requests must be stored,
        too. After the first such error, passed as `late`, requests do not wait for replicas.
        """
        for name in {name for name, _ in requests}:
            self._client.link_to(name)
        calls = [request.without_replicas() if late else request for _, request in requests]
        try:
            return await self._client.link.call_all(calls), late
        except NotReplicated as error:
            return reply_in(error), error


def _no_call(given: object) -> UsageError:
    """Return the error for a value that is not a call. Often it is the coroutine of a function that was called instead."""
    if inspect.iscoroutine(given):
        called: Any = given.cr_frame.f_locals.get("self") if given.cr_frame is not None else None
        given.close()  # else Python warns that it was never awaited
        name = called.name.rpartition(".")[2] if hasattr(called, "__worqr_handler__") else "function"
        return UsageError(f"give calls: write {name}.call(...), not {name}(...), which runs the function here and now")
    return UsageError(
        f"give calls, as in function.call(...), not {given!r}: function(...) runs the function here and now"
    )


def _note_progress(error: Exception, verb: str, done: int, sending: int) -> None:
    """Add a note to `error` that says how many calls were sent before."""
    if done or sending > 1:
        also = f"; of the {sending:,} after them, some may be" if sending else ""
        error.add_note(f"the first {done:,} calls were {verb}{also}")


def _bound_of(call: Call[Any]) -> tuple[int | None, float]:
    """Return the `max_length` of a call, and for how many seconds it waits for room."""
    return cast("int | None", call._options.get("max_length")), wait_in(call._options)


def _size(call: Call[Any]) -> int:
    return len(call.task)


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """Group the items by a key; within a group, they keep their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())
