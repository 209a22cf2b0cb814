"""`Producer`: sends what the queues and the functions of one mesh enqueue and dispatch, in as few requests as it takes.

A mesh with ``tracing=`` has a span around each send. The context of the trace goes into the `meta` of jobs, and on request of
plain tasks.
"""

# Call hides its private fields from users; the producer reads them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import inspect
import os
import string
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from worqr import ops
from worqr.batches import follow_up_options
from worqr.client.job import Job, Outcome, Results
from worqr.client.room import PART, check_fits
from worqr.codecs import Sealed
from worqr.command import Command, in_chunks
from worqr.errors import Duplicate, NotReplicated, UsageError, WorqrError, at_max_length, reply_in, set_job
from worqr.job_options import (
    DECLARED_OPTIONS,
    FOLLOW_UPS,
    LANE_OPTIONS,
    PLAIN,
    RAW_OPTIONS,
    RawOptions,
    encode_options,
    wait_in,
    without_replicas,
)
from worqr.keys import QueueKeys, check_name
from worqr.ops import MAX_BYTES, MAX_ITEMS, Dispatched, NewJob
from worqr.policy import RetryPolicy
from worqr.remote_error import meta_of
from worqr.tracing import Carrier, Operation, Tracing, meta_of_plain_tasks, meta_with
from worqr.validation import Seconds, check_task, encode_json

if TYPE_CHECKING:
    from worqr.client.client import Client

# The random part of the ids that worqr makes for jobs.
#
# A job that is dispatched without an id gets one from the script: ``@``, the number of the dispatch, ``-``, and this random part.
# The number makes ids unique and sortable by time; the random part makes them impossible to guess. The random part is an argument
# of the request, so a request that is sent again makes the same id.

RANDOM_CHARACTERS: Final = 22
"""In each id: letters and digits, one for each random byte. They are hard to guess like 124 random bits, and shorter than these
in hexadecimal digits: each byte of an id is stored several times with the job."""
BATCH_TOKEN_CHARACTERS: Final = 16

_ALPHABET: Final = string.ascii_letters.encode() + string.digits.encode()

_CHARACTER_OF_BYTE: Final = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))

_AHEAD: Final = 64
"""Random parts drawn in one system call, which costs as much as all other work on the id of a dispatch."""
_Job = tuple[Mapping[str, object], bytes]
"""The options of a dispatch, encoded, and its payload."""
_drawn: list[str] = []

os.register_at_fork(after_in_child=_drawn.clear)  # else parent and child would use the same ones


def with_random_ids(jobs: Sequence[_Job]) -> list[_Job]:
    """Return the jobs of a dispatch. Each job without an id gets the random part of a new one."""
    if len(jobs) > 1:
        parts = _draw(len(jobs))
        return [(o if "id" in o else {**o, "random": part}, task) for part, (o, task) in zip(parts, jobs, strict=True)]
    return [(o if "id" in o else {**o, "random": random_part()}, task) for o, task in jobs]


def random_part() -> str:
    """Return 22 new random letters and digits. Safe from any thread."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(_draw(_AHEAD))


def batch_token() -> str:
    """Return the token of a new batch, 16 random letters and digits: each of its jobs stores it, so it is as short as may be."""
    return random_part()[:BATCH_TOKEN_CHARACTERS]


def _draw(n: int) -> list[str]:
    text, width = os.urandom(RANDOM_CHARACTERS * n).translate(_CHARACTER_OF_BYTE).decode(), RANDOM_CHARACTERS
    return [text[i : i + width] for i in range(0, len(text), width)]


# `Call`: one call of a function as a value, with its arguments encoded. Functions (`worqr.functions.function`) make calls.
#
# Not to be confused with `worqr.command.Command`, which is a request to the server.


R_co = TypeVar("R_co", covariant=True)

_UNENCODABLE: Final = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, msgspec.MsgspecError)


class CallTarget(Protocol):
    """The function that a call is for. `worqr.functions.definition` has it."""

    @property
    def name(self) -> str:
        """The function's name, with the prefix of `include`."""
        ...

    @property
    def results(self) -> Results:
        """The codec of its results."""
        ...

    @property
    def lane_bound(self) -> Mapping[str, object]:
        """The encoded bound of the length of its lanes; empty if they have none."""
        ...

    def require_client(self) -> object:
        """Raise UsageError if the function belongs to no mesh."""
        ...


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """A call of a function, with its arguments checked and encoded. Nothing was sent. Calls of one function and payload are
    equal.

    Make it with ``function.call(...)`` or ``mesh.call(name, ...)``; send it with ``mesh.enqueue_many`` or
    ``mesh.dispatch_many``.
    """

    name: str
    """The function's name."""
    args: tuple[Any, ...] = field(compare=False)
    """The positional arguments, defaults included."""
    kwargs: dict[str, Any] = field(compare=False)
    """The keyword-only arguments."""
    task: bytes
    """The payload."""
    _options: Mapping[str, object] = field(default_factory=dict[str, object], compare=False, repr=False)
    _target: CallTarget | None = field(default=None, compare=False, repr=False)
    _is_prepared: bool = field(default=False, compare=False, repr=False)

    @property
    def queue(self) -> str:
        """The name of the queue that the call goes to. It is the function's name, with the prefix of `include`."""
        return self.name if self._target is None else self._target.name

    @property
    def _results(self) -> Results | None:
        """The codec of its result; None for a function that is declared in another program."""
        return None if self._target is None else self._target.results


class StoredCall(Call[Any]):
    """A call that was checked and encoded before, as a row of an outbox has it."""


class Sending:
    """One call that this program is about to send, for the functions of ``Mesh(send_middleware=...)``.

    Attributes:
        name: the name of the function, or of the queue of a raw task.
        args: the positional arguments, defaults included; of a raw task none.
        kwargs: the keyword-only arguments.
    """

    __slots__ = ("_call", "_given", "args", "kwargs", "name")

    def __init__(self, call: Call[Any]) -> None:
        self.name: str = call.queue
        self.args: tuple[Any, ...] = call.args
        self.kwargs: Mapping[str, Any] = call.kwargs
        self._call = call
        self._given: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Sending {self.name!r}>"

    @property
    def meta(self) -> Mapping[str, str]:
        """The `meta` that the call has so far."""
        stored = self._call._options.get("meta")
        return {**meta_of(stored if isinstance(stored, str) else ""), **self._given.get("meta", {})}

    @property
    def lane(self) -> str | None:
        """The lane that the call has so far."""
        return cast("str | None", self._given.get("lane", self._call._options.get("lane")))

    def set(self, **options: Unpack[SendingOptions]) -> None:
        """Give the call options. They make a job of a call that is enqueued as a plain task.

        Args:
            **options: See `SendingOptions`. Names of `meta`, and tags, are added to those that the call has; all else takes the
                place of what the call has.

        Raises:
            UsageError: An option does not exist, or is not for middleware, or is not valid.
        """
        for option in options:
            if option not in SendingOptions.__annotations__:
                raise UsageError(
                    f"sending.set() has no option {option!r}; it takes {', '.join(SendingOptions.__annotations__)}"
                )
        encoded = encode_options(options)  # checks them, here where the mistake is
        if "meta" in options:
            options["meta"] = {**self._given.get("meta", {}), **options["meta"]}
        if "tags" in options:
            own = str(encoded.get("tags", "")).split("\n")  # a generator has no tags any more
            options["tags"] = {*self._given.get("tags", ()), *filter(None, own)}
        if options.keys() & _TIMES:
            self._given = {name: value for name, value in self._given.items() if name not in _TIMES}
        self._given |= options

    def _changed(self) -> Call[Any]:
        """Return the call with what middleware has set."""
        call, given = self._call, self._given
        if not given:
            return replace(call, _is_prepared=True)
        if "meta" in given:
            given = {**given, "meta": self.meta}
        encoded = encode_options(given)
        if "lane" in encoded and call._target is not None:
            encoded |= call._target.lane_bound
        replaced = {name for pair in (_TIMES, _ENDS) if pair & encoded.keys() for name in pair}
        old = {name: value for name, value in call._options.items() if name not in replaced}
        if "fields" in encoded:
            encoded["fields"] = {**cast("dict[str, str]", old.get("fields", {})), **cast("Any", encoded["fields"])}
        if "tags" in encoded and "tags" in old:
            encoded |= encode_options({"tags": f"{old['tags']}\n{encoded['tags']}".split("\n")})
        return replace(call, _options={**old, **encoded}, _is_prepared=True)


class SendingOptions(TypedDict, total=False):
    """What send middleware may set, as in `JobOptions`; not what says which job it is."""

    meta: Mapping[str, str]
    """Texts that travel beside the payload. Default: those of the call."""
    lane: str
    """The lane of the job. Default: that of the call."""
    delay: Seconds
    """Seconds from now before which the job does not run. Default: that of the call."""
    run_at: datetime
    """The time before which the job does not run. Default: that of the call."""
    expires: Seconds | datetime
    """Seconds from now, or a time, at which the job is dropped if it has not started. Default: that of the call."""
    timeout: Seconds
    """Seconds that a run may take. Default: that of the call."""
    retry: RetryPolicy
    """How often and when to retry. Default: that of the call."""
    result_ttl: Seconds
    """Seconds to keep the result. Default: that of the call."""
    tags: Collection[str]
    """Names by which the job is found, in addition to those that it has. Default: none."""


SendMiddleware = Callable[[Sending], object]
"""``def middleware(sending: worqr.Sending) -> None``: sees each call before it is sent."""
_TIMES: Final = frozenset({"delay", "run_at"})
_ENDS: Final = frozenset({"expires", "expires_at"})
SENT_OPTIONS: Final = frozenset({"meta", "lane", "fields", "tags", *_TIMES, *_ENDS})
"""The encoded options that a job may have of `SendingOptions`."""


def named_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], max_payload: int) -> Call[Any]:
    """Return a call of a function that is declared in another program, so that only its name is known.

    Raises:
        UsageError: the name is not valid, JSON cannot represent the arguments, or there are positional arguments, whose names
            only the function has.
        PayloadTooLarge: the payload is larger than `max_payload` bytes.
    """
    check_name(name, "function name")
    if args and (kwargs or len(args) > 1):
        raise UsageError(
            f"call({name!r}, ...): positional arguments need the function itself, which knows their names; "
            "by name alone give keyword arguments, or the whole payload as the only one"
        )
    if args and isinstance(args[0], bytes | bytearray | memoryview):
        task = bytes(cast("bytes", args[0]))
    else:
        try:
            task = encode_json(args[0] if args else kwargs)
        except _UNENCODABLE as error:
            raise UsageError(f"call({name!r}, ...): JSON cannot carry these arguments: {error}") from error
    return Call(name, args, kwargs, check_task(task, max_payload))


R = TypeVar("R")

T = TypeVar("T")

K = TypeVar("K")

_keys_of: Final = lru_cache(maxsize=1000)(QueueKeys)

"""Return the keys of a queue, by its prefix and its name."""

Positioned = tuple[int, Call[Any]]

"""A call, with its position among those of its caller."""

Found = dict[int, tuple[Dispatched, QueueKeys]]

"""The outcomes of calls, by their positions, with the shards that they were sent to."""

OptionsAt = Callable[[QueueKeys], Awaitable[Mapping[str, object]]]

"""Returns the encoded options that a job in this shard gets in addition."""


class Producer:
    """Sends the tasks and jobs of one mesh.

    Args:
        client: the client of the mesh.
        tracing: that of the mesh; None: it is not traced.
        sent: the calls that the server has accepted are added here; None: they are not noted. For test benches.

    Attributes:
        looks_at_calls: whether `enqueue` needs the calls, for `send_middleware` or to note them; else `enqueue_task` does.
    """

    def __init__(self, client: Client, tracing: Tracing | None = None, sent: list[Call[Any]] | None = None) -> None:
        self._client = client
        self._tracing = tracing
        self._sent = sent
        self.looks_at_calls: bool = sent is not None or bool(client.settings.send_middleware)
        if tracing is not None:
            for name, (operation, queue_of, sent_of) in _SENDS.items():
                setattr(self, name, self._in_span(tracing, operation, queue_of, sent_of, getattr(self, name)))

    def _in_span(
        self,
        tracing: Tracing,
        operation: Operation,
        queue_of: Callable[..., str | None],
        sent_of: Callable[[Any], tuple[int, str | None]],
        send: Callable[..., Awaitable[T]],
    ) -> Callable[..., Coroutine[Any, Any, T]]:
        """Return the method `send` with a span around it."""

        async def traced(*args: Any) -> T:
            with tracing.sending(operation, queue_of(*args), self._client.link.settings.address) as span:
                result = await send(*args)
                span.sent(*sent_of(result))
                return result

        return traced

    def _created(self, call: Call[R]) -> Call[R]:
        """Return one of many calls, with a context of its own in its encoded `meta` if the mesh is traced."""
        if self._tracing is None:
            return call
        carrier = self._tracing.creating(call.queue, self._client.link.settings.address)
        return replace(call, _options=_carried(call._options, carrier))

    def prepared(self, call: Call[R]) -> Call[R]:
        """Return a call as the send middleware of the mesh has changed it. What that raises, goes to the caller."""
        middleware = self._client.settings.send_middleware
        if not middleware or call._is_prepared:
            return call
        sending = Sending(call)
        for each in middleware:
            each(sending)
        return sending._changed()

    def sealed(self, task: bytes, options: Mapping[str, object] | None = None) -> bytes:
        """Return a payload as it is stored. Jobs that have an id get equal bytes for equal payloads, because the server compares
        those of one id.

        Raises:
            UsageError: The codec cannot encode it.
            PayloadTooLarge: It is larger than `max_payload` when it is encoded.
        """
        if (values := self._client.values) is None:
            return task
        found = values.encode_equal(task) if options and "id" in options else values.encode(task)
        return check_task(found, self._client.settings.max_payload)

    def _note(self, calls: Iterable[Call[Any]]) -> None:
        if self._sent is not None:
            self._sent.extend(calls)

    # Raw tasks

    async def enqueue_tasks(self, queue: QueueKeys, tasks: list[bytes], given: RawOptions) -> int:
        """Enqueue raw tasks, in as many requests as they need, and return their number. It raises as `Queue.enqueue`."""
        if given is PLAIN and len(tasks) == 1:
            await self._enqueue_one(queue, tasks[0])
            return 1
        client = self._client
        replicas = client.settings.replicas if given.replicas is None else given.replicas
        chunks = list(in_chunks(tasks, len))
        if len(chunks) > 1 and (given.unique or given.max_length is not None):
            raise UsageError(
                f"a {'unique' if given.unique else 'bounded'} enqueue must fit one request: at most {MAX_ITEMS} tasks and "
                f"{MAX_BYTES:,} bytes, not {len(tasks):,} tasks and {sum(map(len, tasks)):,} bytes"
            )
        if not chunks:
            await client.link.driver.checkpoint()
            return 0
        if given.unique:
            return await self._enqueue_unique(queue, tasks, given, replicas)
        if len(chunks) == 1:
            return await self._store(queue, tasks, given, replicas)
        return await self._enqueue_chunks(queue, chunks, given, replicas)

    async def _enqueue_one(self, queue: QueueKeys, task: bytes) -> None:
        """Enqueue one raw task without options: as most calls are, so it takes the shortest way."""
        client, settings = self._client, self._client.settings
        connection = client.connections.for_current_loop()
        keys = connection.sharding.only_shard(queue) or await connection.sharding.next_shard(queue)
        connection.note_queue(settings, keys.name)
        request = ops.enqueue_one(keys, self.sealed(task) if client.values else task, settings.replicas)
        await connection.link.call(request if self._tracing is None else self._traced(request))

    async def enqueue_raw(self, queue: QueueKeys, tasks: list[bytes], given: RawOptions) -> int:
        """Enqueue raw tasks of which middleware may make jobs, and return their number.

        Raises:
            UsageError: It makes jobs of tasks that are `unique`, or go to the front.
        """
        calls: list[Call[bytes]] = [self.prepared(Call(queue.queue, (), {}, task)) for task in tasks]
        if not any(call._options for call in calls):
            return await self.enqueue_tasks(queue, tasks, given)
        if given.unique or given.front:
            raise UsageError(
                f"send_middleware makes jobs of the tasks of queue {queue.queue!r}, and unique= and front= are for plain tasks: "
                "use queue.dispatch(task, id=..., if_exists='raise'), or set nothing for this queue"
            )
        bounds = {"max_length": given.max_length, "wait": given.wait, "replicas": given.replicas}
        more = {name: value for name, value in bounds.items() if value}
        return len(await self.dispatch_many([replace(call, _options={**more, **call._options}) for call in calls]))

    async def _store(
        self, queue: QueueKeys, tasks: list[bytes], given: RawOptions, replicas: int, keys: QueueKeys | None = None
    ) -> int:
        """Enqueue raw tasks in one request, into the next shard of a queue or the shard `keys`, and return their number.

        If the queue is at its `max_length`, wait for room for up to `given.wait` seconds.
        """
        connection = self._client.connections.for_current_loop()
        sharding, link = connection.sharding, connection.link
        keys = keys or sharding.only_shard(queue) or await sharding.next_shard(queue)
        connection.note_queue(self._client.settings, keys.name)
        request = await self._request(keys, tasks, given, replicas)
        wait = given.wait
        return await (
            connection.rooms.when_room(keys, wait, lambda waiter: link.call(request(waiter)))
            if wait
            else link.call(request(""))
        )

    async def _request(
        self, keys: QueueKeys, tasks: Sequence[bytes], given: RawOptions, replicas: int
    ) -> Callable[[str], Command[int]]:
        """Return what makes the request for an enqueue, with the name under which it waits for room (empty: it does not)."""
        bound = given.max_length
        if bound is not None:
            bound = await self._client.sharding.max_length_per_shard(keys, bound)
        check_fits(keys, len(tasks), bound, given.wait)
        stored = [*map(self.sealed, tasks)] if self._client.values else tasks

        def make(waiter: str) -> Command[int]:
            return self._traced(
                ops.enqueue(keys, stored, front=given.front, max_length=bound, waiter=waiter, replicas=replicas)
            )

        return make

    def _traced(self, request: Command[int]) -> Command[int]:
        """Return an enqueue of plain tasks, with the context of the current trace if the mesh sends it with plain tasks."""
        meta = None if self._tracing is None else meta_of_plain_tasks(self._tracing)
        return request if meta is None else ops.enqueue_traced(request, meta)

    async def _enqueue_chunks(
        self, queue: QueueKeys, chunks: list[list[bytes]], given: RawOptions, replicas: int
    ) -> int:
        """Enqueue raw tasks in several requests, one after the other. To the front, the last chunk is sent first.

        Raises:
            NotReplicated: a request had too few replicas. It is raised after the last request, so that all tasks are stored.
            WorqrError: a request failed. A note says how many tasks were stored before.
        """
        stored, late = 0, None
        for chunk in reversed(chunks) if given.front else chunks:
            try:
                stored += await self._store(queue, chunk, given, 0 if late else replicas)
            except NotReplicated as error:
                stored, late = stored + len(chunk), error
            except WorqrError as error:
                parts = f"the {'last' if given.front else 'first'} {stored:,} were stored before"
                error.add_note(f"of {sum(map(len, chunks)):,} tasks in several requests {parts}")
                raise
        if late is not None:
            raise late
        return stored

    async def _enqueue_unique(self, queue: QueueKeys, tasks: list[bytes], given: RawOptions, replicas: int) -> int:
        """Dispatch raw tasks as jobs whose ids are hashes of their payloads, all or none."""
        sharding = self._client.sharding
        if len(tasks) > 1 and len(await sharding.shards(queue)) > 1:
            raise UsageError(
                f"queue {queue.display_name!r} has several shards, and nothing can be all or none in several of them: enqueue "
                "unique tasks one by one"
            )
        options: dict[str, object] = {"front": given.front, "exists": "raise"}
        if given.max_length is not None:
            options["max_length"] = given.max_length
        if (values := self._client.values) is not None:
            tasks = [Sealed(values.encode_alike(task, "unique=True", equal=True)) for task in tasks]
        ids = [f"sha256:{hashlib.sha256(task).hexdigest()}" for task in tasks]
        keys = await sharding.shard_of_id(queue, ids[0])
        options = dict(await sharding.options_for(keys, options))
        jobs = [({**options, "id": name}, self.sealed(task)) for name, task in zip(ids, tasks, strict=True)]
        check_fits(queue, len(jobs), options.get("max_length"), given.wait)
        await self._send_jobs(queue, keys, jobs, replicas, given.wait, all_or_none=True)
        return len(jobs)

    # Jobs

    async def dispatch_task(
        self, queue: QueueKeys, task: bytes, options: Mapping[str, object], results: Results | None = None
    ) -> Job[Any]:
        """Put a job into a raw queue, with encoded options, and return its handle. It raises as `Queue.dispatch`."""
        wait, sharding = wait_in(options), self._client.sharding
        if self._tracing is not None:
            options = _carried(options, self._tracing.carrier())
        options, replicas = without_replicas(options, self._client.settings.replicas)
        keys = sharding.only_shard(queue) or await sharding.shard_for_job(queue, options)
        if FOLLOW_UPS in options:
            [options] = await self._hold_follow_ups(keys, [options])
        if "max_length" in options:
            options = await sharding.options_for(keys, options)
        jobs = with_random_ids([(options, self.sealed(task, options) if self._client.values else task)])
        return await self._send_jobs(queue, keys, jobs, replicas, wait, results)

    async def _send_jobs(
        self,
        queue: QueueKeys,
        keys: QueueKeys,
        jobs: Sequence[NewJob],
        replicas: int,
        wait: float,
        results: Results | None = None,
        *,
        all_or_none: bool = False,
    ) -> Job[Any]:
        """Send jobs in one request into the shard `keys` of a queue, and return the handle of the last one. If a job was
        refused, it is the last one.

        Raises:
            QueueFull: The queue is at its `max_length`, after `wait` seconds.
            Duplicate: The id is taken.
            NotReplicated: The job was stored; the error has its handle.
        """

        async def attempt(waiter: str) -> Job[Any]:
            request = ops.dispatch_jobs(
                keys, _waiting_as(jobs, waiter, count()), all_or_none=all_or_none, replicas=replicas
            )
            try:
                done = await self._client.link_to(keys.name).call(request)
            except NotReplicated as late:
                set_job(late, handle_of(self._client, queue, reply_in(late)[-1], results, at=keys))
                raise
            return handle_of(self._client, queue, done[-1], results, at=keys)

        return await self._client.rooms.when_room(keys, wait, attempt) if wait else await attempt("")

    # Calls of functions

    async def enqueue(self, call: Call[Any]) -> None:
        """Send one call as a raw task; as a job, if it has a lane or tags, is to be kept, or if middleware has made it one."""
        if self._client.settings.send_middleware:
            call = self.prepared(call)
        if call._options and call._options.keys() - RAW_OPTIONS:
            await self.dispatch(call)
            return
        given = _raw_options(call) if call._options else PLAIN
        await self.enqueue_tasks(_keys_of(self._client.settings.prefix, call.queue), [call.task], given)
        if self._sent is not None:
            self._sent.append(call)

    def enqueue_task(self, queue: str, task: bytes) -> Coroutine[Any, Any, None]:
        """Send the payload of one call without options as a raw task."""
        return self._enqueue_one(_keys_of(self._client.settings.prefix, queue), task)

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Send one call as a job."""
        call = self.prepared(call)
        job = await self.dispatch_task(self._keys(call), call.task, call._options, call._results)
        self._note((call,))
        return job

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Send calls as raw tasks, in one round trip per thousand."""
        stored = sending = 0
        late: NotReplicated | None = None
        try:
            for batch in self._batches(calls, plain=True):
                if jobs := [call for call in batch if call._options.keys() - RAW_OPTIONS]:
                    try:
                        stored += len(await self.dispatch_many(jobs))
                    except NotReplicated as error:
                        stored, late = stored + len(jobs), error
                plain = [call for call in batch if not call._options.keys() - RAW_OPTIONS]
                sending = len(plain)
                answers, late = await self._enqueue_batch(plain, late)
                self._note(plain)
                stored += sum(answers)
                sending = 0
        except Exception as error:
            _note_progress(error, "stored", stored, sending)
            raise
        if late is not None:
            raise late
        if not stored:
            await self._send_all([])  # an empty call is a checkpoint, too
        return stored

    async def dispatch_many(
        self, calls: Iterable[Call[R]], places: Mapping[str, QueueKeys] | None = None
    ) -> list[Job[R]]:
        """Send calls as jobs, in one round trip per thousand; return their handles, in the order of the calls.

        Args:
            calls: the calls.
            places: the queue or the shard of the jobs of which it was decided before, by their ids.
        """
        jobs: list[Job[R]] = []
        sending = 0
        late: NotReplicated | None = None
        try:
            for batch in self._batches(calls):
                sending = len(batch)
                found, late = await self._dispatch_batch(batch, late, places=places)
                jobs += [
                    handle_of(self._client, self._keys(call), found[position][0], call._results, at=found[position][1])
                    for position, call in enumerate(batch)
                ]
                self._note(batch)
                sending = 0
        except Exception as error:
            _note_progress(error, "dispatched", len(jobs), sending)
            raise
        if late is not None:
            raise late
        if not jobs:
            await self._send_all([])
        return jobs

    async def dispatch_members(
        self, calls: Sequence[Call[Any]], options_at: OptionsAt, late: NotReplicated | None
    ) -> tuple[list[tuple[Dispatched, QueueKeys]], NotReplicated | None]:
        """Send up to a thousand calls as jobs of a batch. Return their outcomes, with the shards that they were sent to.

        Args:
            calls: the calls.
            options_at: returns the options that a job in a shard gets in addition.
            late: the error of earlier jobs of which too few replicas had the write in time. It is returned if it is given, or
                if that happens to these jobs: all were stored.
        """
        found: Found = {}
        for batch in self._batches(calls):
            found, late = await self._dispatch_batch(batch, late, options_at)
        outcomes = [found[position] for position in range(len(found))]
        stored = zip(calls, outcomes, strict=True)
        self._note(call for call, (done, _) in stored if done.outcome in {"created", "blocked"})
        return outcomes, late

    def row_options(self, call: Call[Any]) -> dict[str, object]:
        """Return the encoded options of a call that goes into an outbox, with the context of the current trace.

        Raises:
            UsageError, PayloadTooLarge: the call cannot be sent.
        """
        call = self._checked(call)
        options = call._options if self._tracing is None else _carried(call._options, self._tracing.carrier())
        return self._with_stored_follow_ups({name: value for name, value in options.items() if name != "wait"})

    def _with_stored_follow_ups(self, options: dict[str, object]) -> dict[str, object]:
        """Return the options of a row, with the queue, the encoded options and the task of each follow-up for its call."""
        stored = dict[str, object]()
        for what, given in cast("Mapping[str, Call[Any]]", options.get(FOLLOW_UPS, {})).items():
            call = self.follow_up(given)
            stored[what] = [
                call.queue,
                self._with_stored_follow_ups(follow_up_options(call._options, what)),
                call.task,
            ]
        return {**options, FOLLOW_UPS: stored} if stored else options

    @property
    def records(self) -> bool:
        """Whether calls are only recorded, for a test."""
        return False

    def note_row(self, call: Call[Any]) -> bool:
        """A call goes into an outbox. Return True if it is only recorded, for a test."""
        return False

    async def dispatch_rows(
        self, queue: str, jobs: Sequence[NewJob], replicas: int, not_after: float
    ) -> list[tuple[Dispatched, QueueKeys]]:
        """Send jobs that name their rows of an outbox into a queue. Return their outcomes, with the shards they went to.

        Raises:
            QueueFull, NotReplicated, RefusedByServer, Unavailable: as a dispatch. Some of the jobs may be stored.
        """
        sharding, client = self._client.sharding, self._client
        found: dict[int, tuple[Dispatched, QueueKeys]] = {}
        by_shard: dict[QueueKeys, list[int]] = {}
        for position, (options, _) in enumerate(jobs):
            keys = await sharding.shard_for_job(QueueKeys(client.settings.prefix, queue), options)
            by_shard.setdefault(keys, []).append(position)
        for keys, positions in by_shard.items():
            for chunk in in_chunks(positions, lambda position: len(jobs[position][1])):
                split = [
                    without_replicas(options, max(replicas, client.settings.replicas))
                    for options in await self._with_held_rows(keys, [jobs[position][0] for position in chunk])
                ]
                sent = [
                    (await sharding.options_for(keys, each), self.sealed(jobs[at][1], each))
                    for (each, _), at in zip(split, chunk, strict=True)
                ]
                wanted = max(number for _, number in split)
                request = ops.dispatch_jobs(keys, sent, replicas=wanted, not_after=not_after)
                answers = await client.link_to(keys.name).call(request)
                found |= {at: (each, keys) for at, each in zip(chunk, answers, strict=True)}
        return [found[position] for position in range(len(jobs))]

    async def _with_held_rows(
        self, keys: QueueKeys, several: Sequence[Mapping[str, object]]
    ) -> list[Mapping[str, object]]:
        """Return the options of rows, after their follow-ups were stored. Those of a row that is no new job expire."""
        found = list(several)
        places = [place for place, options in enumerate(found) if FOLLOW_UPS in options]
        if places:
            held = await self._hold_follow_ups(keys, [_with_calls(found[place]) for place in places])
            for place, options in zip(places, held, strict=True):
                found[place] = options
        return found

    # Follow-ups: calls that the server enqueues when a batch or a job has ended. Their own queue holds them until then, put there
    # with the rights of this program

    async def _with_follow_ups(self, keys: QueueKeys, calls: list[Positioned]) -> list[Positioned]:
        """Return calls that are about to be sent to the shard `keys`, after their follow-ups were stored."""
        places = [place for place, (_, call) in enumerate(calls) if FOLLOW_UPS in call._options]
        if places:
            held = await self._hold_follow_ups(keys, [calls[place][1]._options for place in places])
            for place, options in zip(places, held, strict=True):
                calls[place] = (calls[place][0], replace(calls[place][1], _options=options))
        return calls

    async def _hold_follow_ups(
        self, keys: QueueKeys, several: Sequence[Mapping[str, object]]
    ) -> list[Mapping[str, object]]:
        """Store the follow-ups of jobs in their own queues, and return the encoded options of the jobs, which name them.

        Raises:
            UsageError: one of them has an option that a follow-up cannot have.
        """
        requests: list[tuple[str, Command[str]]] = []
        found = [await self._plan_follow_ups(keys, options, requests) for options in several]
        await self._send_all(requests)
        return found

    async def _plan_follow_ups(
        self, keys: QueueKeys, options: Mapping[str, object], requests: list[tuple[str, Command[str]]]
    ) -> Mapping[str, object]:
        """Return the options of a job that name its follow-ups, and add the requests that store them."""
        token, follow = batch_token(), dict[str, object]()
        calls = cast("Mapping[str, Call[Any]]", options[FOLLOW_UPS])
        held: dict[QueueKeys, dict[str, bytes | str]] = {}
        for what, call in calls.items():
            target, stored = await self.plan_follow_up(keys, what, call, requests)
            follow[what] = target.base
            held.setdefault(target, {}).update(stored)
        meta = options.get("meta")
        for target, facts in held.items():
            shown = {"meta": meta} if isinstance(meta, str) else {}
            requests.append((target.name, ops.hold_follow_ups(target, token, keys.base, token, {**facts, **shown})))
        rest = {name: value for name, value in options.items() if name != FOLLOW_UPS}
        return {**rest, "follow": {"token": token, **follow}}

    def follow_up(self, call: Call[Any]) -> Call[Any]:
        """Return the call that the server will enqueue when a batch or a job has ended."""
        return call if isinstance(call, StoredCall) else self._created(self._checked(call))

    async def plan_follow_up(
        self, home: QueueKeys, what: str, given: Call[Any], requests: list[tuple[str, Command[str]]]
    ) -> tuple[QueueKeys, dict[str, bytes | str]]:
        """Return the queue of a follow-up, and what is stored of it there: its options and its task.

        Args:
            home: the queue of its batch or its job, where it is stored if that is its own queue.
            what: ``then`` or ``otherwise``.
            given: the call.
            requests: gets the requests that store the follow-ups of the follow-up itself.
        """
        call = self.follow_up(given)
        options, keys = follow_up_options(call._options, what), QueueKeys(self._client.settings.prefix, call.queue)
        if keys.queue == home.queue and "lane" not in options:
            target = home
        else:
            target = await self._client.sharding.shard_for_job(keys, options)
            self._client.link_to(target.name)
        if FOLLOW_UPS in options:
            options = dict(await self._plan_follow_ups(target, options, requests))
        return target, {f"{what}_options": msgspec.msgpack.encode(options), f"{what}_task": self.sealed(call.task)}

    async def _enqueue_batch(
        self, calls: Sequence[Call[Any]], late: NotReplicated | None
    ) -> tuple[list[int], NotReplicated | None]:
        """Send calls as raw tasks, those that wait for room one part after the other; return how many were stored."""
        requests: list[tuple[str, Command[int]]] = []
        parts: list[tuple[QueueKeys, list[bytes], RawOptions, int]] = []
        sharding = self._client.sharding
        for (name, given), of_queue in _grouped(
            calls, lambda call: (call.queue, _raw_options(call)._replace(replicas=None))
        ):
            queue = QueueKeys(self._client.settings.prefix, name)
            most = _part_of(of_queue[0]._options, len(await sharding.shards(queue))) if given.wait else MAX_ITEMS
            for chunk in in_chunks(of_queue, _size, most=most):
                keys, tasks = await sharding.next_shard(queue), [call.task for call in chunk]
                replicas = max(without_replicas(call._options, self._client.settings.replicas)[1] for call in chunk)
                if given.wait:
                    parts.append((keys, tasks, given, replicas))
                else:
                    requests.append((keys.name, (await self._request(keys, tasks, given, replicas))("")))
        answers, late = await self._send_all(requests, late)
        for keys, tasks, given, replicas in parts:
            try:
                answers.append(await self._store(keys, tasks, given, 0 if late else replicas, keys))
            except NotReplicated as error:
                late = error
                answers.append(reply_in(error))
        return answers, late

    async def _dispatch_batch(
        self,
        calls: Sequence[Call[Any]],
        late: NotReplicated | None,
        options_at: OptionsAt | None = None,
        places: Mapping[str, QueueKeys] | None = None,
    ) -> tuple[Found, NotReplicated | None]:
        """Send calls as jobs; return the outcome of each, by its position, with its shard."""
        calls = [self._created(call) for call in calls]
        requests: list[tuple[str, Command[list[Dispatched]]]] = []
        positions: list[tuple[int, QueueKeys]] = []
        waiting: list[tuple[QueueKeys, float, list[Positioned]]] = []
        for keys, of_shard in await self._by_shard(calls, places):
            more: Mapping[str, object] = {} if options_at is None else await options_at(keys)
            positioned = [
                (n, replace(call, _options={**call._options, **more}) if more else call) for n, call in of_shard
            ]
            positioned = await self._with_follow_ups(keys, positioned)
            for wait, each in _grouped(positioned, lambda each: wait_in(each[1]._options)):
                if wait:
                    waiting.append((keys, wait, each))
                    continue
                for chunk in in_chunks(each, lambda each: len(each[1].task)):
                    requests.append((keys.name, await self._dispatch_of(keys, chunk)))
                    positions += [(position, keys) for position, _ in chunk]
        answered, late = await self._send_all(requests, late)
        done = [each for answers in answered for each in answers]
        found = {position: (each, keys) for (position, keys), each in zip(positions, done, strict=True)}
        for keys, wait, each in waiting:
            late = await self._dispatch_when_room(keys, each, wait, found, late, options_at)
        return found, late

    async def _dispatch_when_room(
        self,
        keys: QueueKeys,
        calls: Sequence[Positioned],
        wait: float,
        found: Found,
        late: NotReplicated | None,
        options_at: OptionsAt | None,
    ) -> NotReplicated | None:
        """Send calls as jobs that wait for room in this shard, part by part, and add their outcomes to `found`. Each attempt
        calls `options_at`, which tells the home of a batch that its producer is alive.

        Raises:
            QueueFull: the queue had no room for a part within `wait` seconds. Earlier jobs are stored.
        """
        shards = len(await self._client.sharding.shards(replace(keys, tag="")))
        part = min(_part_of(call._options, shards) for _, call in calls)
        for chunk in in_chunks(calls, lambda each: len(each[1].task), most=part):
            left = list(chunk)

            async def attempt(waiter: str, left: list[Positioned] = left) -> None:
                nonlocal late
                if options_at is not None:
                    await options_at(keys)
                late = await self._attempt(keys, left, waiter, found, late)

            await self._client.rooms.when_room(keys, wait, attempt)
        return late

    async def _attempt(
        self, keys: QueueKeys, left: list[Positioned], waiter: str, found: Found, late: NotReplicated | None
    ) -> NotReplicated | None:
        """Send the remaining jobs of a part, and keep the refused ones in `left`. Raises QueueFull if there are some."""
        request = await self._dispatch_of(keys, left, waiter)
        try:
            answers = await self._client.link_to(keys.name).call(request.without_replicas() if late else request)
        except NotReplicated as error:
            answers, late = cast("list[Dispatched]", reply_in(error)), error
        answered = list(zip(left, answers, strict=True))
        found |= {position: (each, keys) for (position, _), each in answered if each.outcome != "full"}
        left[:] = [call for call, each in answered if each.outcome == "full"]
        if left:
            raise at_max_length(f"queue {keys.display_name!r} is at its max_length: {len(left):,} jobs were not stored")
        return late

    async def _by_shard(
        self, calls: Sequence[Call[Any]], places: Mapping[str, QueueKeys] | None
    ) -> list[tuple[QueueKeys, list[Positioned]]]:
        """Return the calls with their positions, by shard. All calls of one queue that have no id go to one shard."""
        found: list[tuple[QueueKeys, list[Positioned]]] = []
        sharding = self._client.sharding
        for name, of_queue in _grouped(enumerate(calls), lambda each: each[1].queue):
            queue = QueueKeys(self._client.settings.prefix, name)
            next_shard = await sharding.next_shard(queue)
            if len(await sharding.shards(queue)) == 1 and not places:
                found.append((next_shard, of_queue))
            else:
                by_shard: dict[QueueKeys, list[Positioned]] = {}
                for position, call in of_queue:
                    is_placed = "id" in call._options or "lane" in call._options
                    keys = await sharding.shard_for_job(queue, call._options) if is_placed else next_shard
                    keys = places.get(str(call._options.get("id")), keys) if places else keys
                    by_shard.setdefault(keys, []).append((position, call))
                found += by_shard.items()
        return found

    async def _dispatch_of(
        self, keys: QueueKeys, calls: Sequence[Positioned], waiter: str = ""
    ) -> Command[list[Dispatched]]:
        """Return the request that dispatches calls in a shard."""
        sharding, replicas = self._client.sharding, 0
        jobs: list[NewJob] = []
        for _, call in calls:
            options, wanted = without_replicas(call._options, self._client.settings.replicas)
            task = self.sealed(call.task, options) if self._client.values else call.task
            jobs.append((await sharding.options_for(keys, options), task))
            replicas = max(replicas, wanted)
        waiting = _waiting_as(with_random_ids(jobs), waiter, (position for position, _ in calls))
        return ops.dispatch_jobs(keys, waiting, replicas=replicas)

    def _keys(self, call: Call[Any]) -> QueueKeys:
        return _keys_of(self._client.settings.prefix, call.queue)

    def _batches(self, calls: Iterable[Call[R]], *, plain: bool = False) -> Iterator[list[Call[R]]]:
        self._client.check_connected()
        waiting = iter(calls)
        while batch := list(islice(waiting, MAX_ITEMS)):
            yield [self._checked(call, plain=plain) for call in batch]

    def _checked(self, call: Call[R], *, plain: bool = False) -> Call[R]:
        """Return a call as middleware has changed it. Raises UsageError or PayloadTooLarge if it cannot be sent, or not as a
        `plain` task.
        """
        if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _no_call(call)
        if call._target is not None:
            call._target.require_client()
        if plain:
            _check_plain(call)
        check_task(call.task, self._client.settings.max_payload)
        return self.prepared(call)

    async def _send_all(
        self, requests: Sequence[tuple[str, Command[T]]], late: NotReplicated | None = None
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


def _queue_of(queue: QueueKeys, *_: object) -> str:
    return queue.display_name


def _name(queue: str, *_: object) -> str:
    return queue


def _several(*_: object) -> None:
    return None


_SENDS: Final[dict[str, tuple[Operation, Callable[..., str | None], Callable[[Any], tuple[int, str | None]]]]] = {
    "enqueue_task": ("enqueue", _name, lambda _: (1, None)),
    "enqueue_tasks": ("enqueue", _queue_of, lambda stored: (stored, None)),
    "dispatch_task": ("dispatch", _queue_of, lambda job: (1, job.id)),
    "enqueue_many": ("enqueue", _several, lambda stored: (stored, None)),
    "dispatch_many": ("dispatch", _several, lambda jobs: (len(jobs), None)),
    "dispatch_members": (
        "dispatch",
        _several,
        lambda found: (sum(done.outcome != "closed" for done, _ in found[0]), None),
    ),
}

"""The methods that have a span around them if the mesh is traced. Each with its operation, the queue, None if there may be
several, and what the span notes of its result: how many were sent, and the id of the job if it was one job.
"""


def _carried(options: Mapping[str, object], carrier: Carrier) -> Mapping[str, object]:
    """Return encoded options with this carrier in their `meta`."""
    given = options.get("meta")
    meta = meta_of(given if isinstance(given, str) else "")
    return {**options, "meta": msgspec.json.encode(meta_with(carrier, meta)).decode()}


def handle_of(
    client: Client, queue: QueueKeys, done: Dispatched, results: Results | None = None, *, at: QueueKeys | None = None
) -> Job[Any]:
    """Return the handle of one dispatched job, which is stored in the shard `at`.

    Raises:
        QueueFull: The queue is at its `max_length`.
        Duplicate: The id is taken.
    """
    if done.outcome == "full":
        raise at_max_length(f"queue {queue.display_name!r} is at its max_length: nothing was stored")
    if done.outcome == "duplicate":
        job = Job[Any](client, queue, done.id, done.number, None, results, at=at)
        raise Duplicate(f"the id {done.id!r} is taken on queue {queue.display_name!r}: nothing was stored", job)
    return Job(client, queue, done.id, done.number, cast("Outcome", done.outcome), results, at=at)


def _waiting_as(jobs: Sequence[NewJob], waiter: str, positions: Iterable[int]) -> Sequence[NewJob]:
    """Return the jobs of one request, which wait for room under the name `waiter` (empty: they do not wait). Each lane has a
    number of its own in it, because each gets room by itself: that of its first job, by the `positions` in the call.
    """
    if not waiter:
        return jobs
    name, _, start = waiter.rpartition("-")
    numbers: dict[object, int] = {}
    for (options, _), position in zip(jobs, positions, strict=False):
        numbers.setdefault(options.get("lane"), int(start) + position)
    return [
        ({**options, "waiter": f"{name}-{numbers[options.get('lane')]} {len(jobs)}"}, task) for options, task in jobs
    ]


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


def _check_plain(call: Call[Any]) -> None:
    """Raise UsageError for a call that was given options that make it a job."""
    given = call._options.keys() - RAW_OPTIONS - LANE_OPTIONS - DECLARED_OPTIONS
    if given:
        raise UsageError(f"a call of {call.name!r} has options, which make it a job: use dispatch_many")


def _raw_options(call: Call[Any]) -> RawOptions:
    """Return the options of a call that is sent as a raw task."""
    if not call._options:
        return PLAIN
    options = cast("dict[str, Any]", call._options)
    return RawOptions(max_length=options.get("max_length"), wait=wait_in(options), replicas=options.get("replicas"))


def _part_of(options: Mapping[str, object], shards: int) -> int:
    """Return how many calls with these options wait for room together in one of so many shards. A call without a lane may have no
    bound.
    """
    bounds = (options.get("max_length"), options.get("max_lane_length"))
    bound = min((cast("int", each) for each in bounds if each is not None), default=MAX_ITEMS * PART * shards)
    return max(1, min(MAX_ITEMS, bound // PART // shards))


def _size(call: Call[Any]) -> int:
    return len(call.task)


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """Group the items by a key; within a group, they keep their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())


def _with_calls(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a row with the calls that are its follow-ups.

    Raises:
        ValueError, TypeError: another program wrote them, and they cannot be read.
    """
    stored = cast("Mapping[str, tuple[str, Mapping[str, object], bytes]]", options.get(FOLLOW_UPS, {}))
    calls = {what: StoredCall(queue, (), {}, task, _with_calls(given)) for what, (queue, given, task) in stored.items()}
    return {**options, FOLLOW_UPS: calls} if calls else dict(options)
