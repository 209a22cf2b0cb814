"""Topics: an application publishes events, and each queue that is subscribed to the topic gets one job of each event.

The registry of the mesh has the subscriptions, as workers declare them (`worqr.peer.engine`). `publish` first stores a
job of ``worqr.publish`` with the event and the names of its queues, which is due in some seconds. Then it dispatches to each
queue, and cancels that job when every queue has taken the event. So a program that dies in between, or a queue that is full,
loses nothing: a worker sends what is left. Each dispatch names the event as its `row`, by which the server knows what it has.
"""

# Call hides its private fields from users.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from worqr import ops
from worqr.client.producer import SENT_OPTIONS, Call, random_part
from worqr.client.sync import sent_by
from worqr.errors import NotReplicated, Unavailable, UsageError, WorqrError
from worqr.inside import current_run
from worqr.job_options import check_id, encode_options
from worqr.keys import PUBLISH, QueueKeys, RegistryKeys, check_name
from worqr.policy import Failure, Retry, Undecodable
from worqr.remote_error import meta_of
from worqr.stored_values import MOST_DIGITS, readable, whole
from worqr.validation import check_task, encode_json, returns_coroutine

if TYPE_CHECKING:
    from worqr.client.client import Client

MAX_SEGMENTS: Final = 8
MAX_PATTERNS: Final = 100
"""Patterns of one handler."""
MAX_HOPS: Final = 16
"""Events, each of them published by a handler of the one before. More are a circle."""
HOPS: Final = "worqr.hops"
TOPIC: Final = "worqr.topic"
"""The names in `meta` of the job of an event."""
FRESH: Final = 3.0
"""Seconds for which a program uses the subscriptions that it has read."""
REDELIVER_AFTER: Final = 5.0
"""Seconds until a worker sends what the publisher has not sent."""
AT_ONCE: Final = 100
"""Jobs that one round trip stores: each has the whole value."""
LEAST_PAUSE, MOST_PAUSE = 5.0, 300.0
"""Seconds between two tries of a queue that is full: a quarter of the age of the event, within these."""
GIVE_UP_AFTER = 3 * 86_400.0
"""Seconds after which an event that a queue has not taken is a dead letter."""
SEND_WITHIN = 6 * 86_400.0
"""Seconds after which nothing is sent: the server knows what it has taken for a week."""


# Names of topics, and patterns.


def check_topic(topic: object) -> str:
    """Return `topic` if it is a valid name of a topic. Raises UsageError."""
    name = _checked(topic, "a topic")
    if "*" in name or "#" in name:
        raise UsageError(f"a topic has no '*' or '#', which are for the patterns of @mesh.on: {name!r}")
    return name


def check_patterns(patterns: Collection[object]) -> tuple[str, ...]:
    """Return the patterns, each once. Raises UsageError."""
    found = tuple(dict.fromkeys(_checked(each, "a pattern of @mesh.on") for each in patterns))
    if len(found) > MAX_PATTERNS:
        raise UsageError(f"@mesh.on takes at most {MAX_PATTERNS} patterns, not {len(found)}: use '*' or '#'")
    for pattern in found:
        *others, last = pattern.split(".")
        if any("#" in each or ("*" in each and each != "*") for each in others) or (
            last not in {"*", "#"} and ("*" in last or "#" in last)
        ):
            raise UsageError(
                f"pattern {pattern!r}: '*' stands for one whole segment, and '#' for all that follow, so it must be the last"
            )
    return found


def _checked(name: object, what: str) -> str:
    text = check_name(name, what)
    segments = text.split(".")
    if len(segments) > MAX_SEGMENTS or not all(segments) or any(character.isspace() for character in text):
        raise UsageError(
            f"{what} must be 1 to {MAX_SEGMENTS} segments with dots between them, without spaces, as in 'order.paid': {text!r}"
        )
    return text


class _Patterns:
    """Names by pattern. `match` returns the names whose patterns fit a topic."""

    def __init__(self, entries: Iterable[tuple[str, str]]) -> None:
        self._root = _Node()
        for pattern, name in entries:
            node = self._root
            for segment in pattern.split("."):
                node = node.below.setdefault(segment, _Node())
            node.names.add(name)

    def match(self, topic: str) -> set[str]:
        found: set[str] = set()
        nodes = [self._root]
        for segment in topic.split("."):
            found.update(*(node.rest for node in nodes))
            nodes = [node.below[key] for node in nodes for key in (segment, "*") if key in node.below]
        return found.union(*(node.names | node.rest for node in nodes))


class _Node:
    """The patterns with one beginning: the names of the one that ends here, and the longer ones by their next segment."""

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.names: set[str] = set()

    @property
    def rest(self) -> set[str]:
        """The names of the pattern that goes on with ``#``."""
        return self.below["#"].names if "#" in self.below else set()


# Subscriptions, as they are declared, stored and read.


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an event becomes a job of a subscribed queue.

    Attributes:
        app: the application whose workers have declared it.
        parameter: the parameter that gets the value; empty: the value is the whole payload.
        max_length, done, tags: encoded options of each job.
    """

    app: str = ""
    parameter: str = ""
    max_length: Annotated[int, msgspec.Meta(ge=1, le=10**MOST_DIGITS)] | None = None
    done: str = ""
    tags: str = ""
    aliases: tuple[str, ...] = ()

    def options(self) -> dict[str, object]:
        """Return the encoded options of each job."""
        found = {"max_length": self.max_length, "done": self.done, "tags": self.tags}
        return {name: value for name, value in found.items() if value}


class Subscribed(msgspec.Struct, frozen=True):
    """What a handler is subscribed to. The queues of its aliases, which it serves too, are not: it would get events twice."""

    patterns: tuple[str, ...]
    facts: Facts


@dataclass(frozen=True, slots=True)
class Subscription:
    """A pattern of topics to which a queue is subscribed, as ``mesh.topics()`` returns it."""

    pattern: str
    """The pattern."""
    queue: str
    """The queue that gets a job of each event."""
    app: str
    """The application that has the handler, ``Mesh(app=...)``."""
    seen: float
    """Seconds since a worker has declared it, which each does every ten minutes."""


@dataclass(frozen=True, slots=True)
class Published:
    """An event, as ``mesh.publish()`` returns it."""

    id: str
    """The id of the event. Its jobs have the id ``e:`` and this."""
    to: tuple[str, ...]
    """The queues that get it. Empty: no queue is subscribed to the topic, and nothing was stored."""


_facts_of = msgspec.json.Decoder(Facts).decode


def _read_facts(stored: bytes) -> Facts:
    """Return the facts of a subscription. Those that another program wrote are the default, so that the event is not lost."""
    try:
        return _facts_of(stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Facts()


def _is_name(queue: str) -> bool:
    """Return False for a queue that no worker can have subscribed."""
    try:
        check_name(queue)
    except UsageError:
        return False
    return True


class TopicDirectory:
    """The subscriptions of one mesh.

    Attributes:
        declared: the subscriptions that this program declares, by queue.
    """

    def __init__(self, client: Client) -> None:
        self.declared: dict[str, Subscribed] = {}
        self._client = client
        self._known: tuple[float, dict[str, Facts], _Patterns] | None = None

    def reset(self) -> None:
        """Forget what was read, because the mesh is about to use another server."""
        self._known = None

    async def queues_for(self, topic: str) -> dict[str, Facts]:
        """Return the queues that are subscribed to a topic. That there are none is asked of the server."""
        known = self._known
        if known is None or time.monotonic() - known[0] >= FRESH or not known[2].match(topic):
            known = await self._read()
        _, facts, patterns = known
        return {queue: facts[queue] for queue in sorted(patterns.match(topic))}

    async def all_queues(self) -> dict[str, Facts]:
        """Return all queues that are subscribed to anything, as the server has them now, and those of their older names, which
        events of before the new name may still have to reach.
        """
        _, facts, _ = await self._read()
        return {alias: each for each in facts.values() for alias in each.aliases} | facts

    async def _read(self) -> tuple[float, dict[str, Facts], _Patterns]:
        started = time.monotonic()
        if self._client.producer.records or self._client.observer is not None:  # a test has the subscribers of its mesh
            patterns = _Patterns((each, name) for name, one in self.declared.items() for each in one.patterns)
            return started, {name: each.facts for name, each in self.declared.items()}, patterns
        read = await self._client.ask(ops.read_topics(RegistryKeys(self._client.settings.prefix)))
        stored = [each for each in read if _is_name(each.queue)]
        facts = {each.queue: _read_facts(each.facts) for each in stored}
        patterns = _Patterns((pattern, each.queue) for each in stored for pattern in each.patterns)
        self._known = started, facts, patterns
        return self._known


# Publishing.


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event, as the job of ``worqr.publish`` has it.

    Attributes:
        id: its id.
        topic: its topic.
        value: the value as JSON.
        to: the queues that get it.
        hops: how many events led to it, with itself.
        given: by queue: the encoded options that the send middleware of the publisher has given the job.
    """

    id: str
    topic: str
    value: msgspec.Raw
    to: tuple[str, ...]
    hops: int
    given: dict[str, dict[str, Any]] = {}

    def call(self, queue: str, facts: Facts, args: tuple[Any, ...] = ()) -> Call[Any]:
        """Return the call that is the event's job in a queue."""
        value = bytes(self.value)
        task = b"{%b:%b}" % (msgspec.json.encode(facts.parameter), value) if facts.parameter else value
        options = encode_options({"id": f"e:{self.id}", "meta": {TOPIC: self.topic, HOPS: str(self.hops)}})
        row = hashlib.sha256(f"{self.id}\n{queue}".encode()).hexdigest()[:32]
        return Call(queue, args, {}, task, {**options, **facts.options(), "row": row})

    def as_published(self, queue: str, facts: Facts) -> Call[Any]:
        """Return the same as the publisher has sent it: the middleware of the worker that sends it now means other calls.

        Of what a stored event gives, only options of middleware count: an id, for instance, is that of another job.
        """
        call, given = self.call(queue, facts), self.given.get(queue, {})
        more = {name: given[name] for name in SENT_OPTIONS & given.keys()}
        return replace(call, _options={**call._options, **more}, _is_prepared=True)


_event_of = msgspec.json.Decoder(Event).decode


class Topics:
    """The part of `Mesh` that publishes events, and shows who gets them. Its calls need ``mesh.connect()`` or ``join()``."""

    _client: Client

    @returns_coroutine
    def publish(self, topic: str, value: object, *, id: str | None = None) -> Coroutine[Any, Any, Published]:
        """Publish an event: each queue that is subscribed to the topic gets one job of it, and its handler the value.

        A queue that is full, or that the server refuses, stops no other: a worker with an ``@mesh.on`` handler sends the event to
        it later, for up to three days.

        Args:
            topic: 1 to 8 segments with dots between them: ``order.paid``.
            value: What JSON can encode. It is the argument of each handler.
            id: The id of the event. Published again within a week, it does not become another job. Default: a new one.

        Returns:
            Its id, and the queues that get it; none if no queue is subscribed.

        Raises:
            UsageError: The topic, the value or the id is not valid; 16 events led to this one; or outside `connect` and `join`.
            PayloadTooLarge: The payload of a job would be larger than the mesh's `max_payload`.
            QueueFull: The server is out of memory. Nothing was stored.
            NotReplicated: The event was stored, but fewer `replicas` than requested had it within 2 s.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the event may have been stored.
        """
        event_id = check_id(f"e:{random_part() if id is None else check_id(id)}")[2:]
        event = Event(event_id, check_topic(topic), msgspec.Raw(_encoded(value)), (), _hops())
        return sent_by("mesh.publish", _publish(self._client, event, value))

    async def topics(self) -> list[Subscription]:
        """Return what the queues of the mesh are subscribed to, by pattern and queue.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        stored = await self._client.ask(ops.read_topics(RegistryKeys(self._client.settings.prefix)))
        found = [
            Subscription(pattern, readable(each.queue), _read_facts(each.facts).app, seen / 1000)
            for each in stored
            for pattern, seen in each.patterns.items()
        ]
        return sorted(found, key=lambda each: (each.pattern, each.queue))

    async def unsubscribe(self, queue: str) -> bool:
        """End the subscription of a queue, after its handler has left the code. Jobs that it has stay.

        A worker that still has the handler declares it again within ten minutes. Other programs publish to the queue for up to
        3 s more.

        Args:
            queue: The queue: the name of the handler.

        Returns:
            False if it was not subscribed to anything.

        Raises:
            UsageError: The name is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        name = check_name(queue)
        found = await self._client.ask(ops.drop_topics(RegistryKeys(self._client.settings.prefix), name))
        self._client.topics.reset()
        if found:
            await self._client.note("unsubscribed", queue=name)
        return found


def _encoded(value: object) -> bytes:
    try:
        return encode_json(value)
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise UsageError(f"publish(): JSON cannot carry this value: {error}") from error


def _hops() -> int:
    """Return how many events led to the one that this code is about to publish, with itself."""
    record: Mapping[bytes, bytes] = getattr(current_run.get(None), "record", None) or {}
    hops = (whole(meta_of(record.get(b"meta", b"").decode("utf-8", "replace")).get(HOPS, "0")) or 0) + 1
    if hops > MAX_HOPS:
        raise UsageError(
            f"{MAX_HOPS} events led to this one, each published by a handler of the one before: is it a circle?"
        )
    return hops


async def _publish(client: Client, event: Event, value: object) -> Published:
    """Send an event to all queues that are subscribed."""
    producer, limit = client.producer, client.settings.max_payload
    queues = await client.topics.queues_for(event.topic)
    if not queues:
        return Published(event.id, ())
    event = msgspec.structs.replace(event, to=tuple(queues))
    plain = [event.call(queue, facts, (value,)) for queue, facts in queues.items()]
    calls = [producer.prepared(call) for call in plain]
    event = msgspec.structs.replace(event, given=_given(plain, calls))
    for call in calls:
        check_task(call.task, limit)
    if producer.records:
        await producer.dispatch_many(calls)
        return Published(event.id, event.to)
    options = {"id": f"e:{event.id}", "delay": REDELIVER_AFTER, "if_exists": "skip"}
    rest: Call[None] = Call(PUBLISH, (), {}, check_task(msgspec.json.encode(event), limit), encode_options(options))
    job = await producer.dispatch(replace(rest, _is_prepared=True))  # middleware has the jobs of the subscribers
    left, _, late = await _send(client, calls, AT_ONCE)
    if late is not None:
        raise late  # the job stays, and sends again what a failover loses
    if not left and job.outcome == "created":  # an earlier one may have other queues
        with suppress(WorqrError):  # it would find that there is nothing to do
            keys = QueueKeys(client.settings.prefix, PUBLISH)
            await client.ask(ops.cancel_job(await client.sharding.shard_of_id(keys, job.id), job.id, ""))
    return Published(event.id, event.to)


def _given(plain: Sequence[Call[Any]], prepared: Sequence[Call[Any]]) -> dict[str, dict[str, Any]]:
    """Return by queue the options that send middleware has given these calls."""
    new = dict[str, dict[str, Any]]()
    for before, call in zip(plain, prepared, strict=True):
        old = before._options
        if options := {name: value for name, value in call._options.items() if old.get(name) != value}:
            new[call.queue] = options
    return new


async def _send(
    client: Client, calls: Sequence[Call[Any]], at_once: int
) -> tuple[list[Call[Any]], str, NotReplicated | None]:
    """Dispatch the jobs of an event. Return those that may not be stored, why, and the error if too few replicas had one."""
    left, why, late = list[Call[Any]](), "", None
    for start in range(0, len(calls), at_once):
        some = calls[start : start + at_once]
        try:
            found, late = await client.producer.dispatch_members(some, _nothing_more, late)
        except Unavailable as error:
            return [*left, *calls[start:]], str(error), late
        except WorqrError as error:
            left, why = [*left, *some], str(error)
        else:
            full = [call for call, (done, _) in zip(some, found, strict=True) if done.outcome == "full"]
            left, why = left + full, "it is at its max_length" if full else why
    return left, why, late


async def _nothing_more(_keys: QueueKeys) -> Mapping[str, object]:
    return {}


def redelivery(client: Client) -> Callable[[bytes], Coroutine[Any, Any, None]]:
    """Return the function ``worqr.publish`` of a mesh: it sends an event to the queues that do not have it."""

    async def redeliver(payload: bytes, /) -> None:
        try:
            event = _event_of(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(f"no event: {error}") from None
        age = _age()
        subscribed = await client.topics.all_queues()  # a producer must not reach other queues by way of a worker
        calls = [event.as_published(queue, subscribed[queue]) for queue in event.to if queue in subscribed]
        left, why = calls, "it is older than six days, and what a queue has taken is known for seven"
        if age < SEND_WITHIN:
            left, why, _ = await _send(client, calls, 1)
        if not left:
            return
        names = ", ".join(repr(call.queue) for call in left)
        text = f"event {event.id!r} of {event.topic!r} is not in {names} yet: {why}"
        if age > GIVE_UP_AFTER:
            raise Failure(text)
        raise Retry(text, delay=min(max(age / 4, LEAST_PAUSE), MOST_PAUSE), counted=False)

    return redeliver


def _age() -> float:
    """Return the seconds between the dispatch of this job and its claim, by the numbers that the server has given them.

    The numbers are its clock. A job whose record has no such number, or a later one than its claim has, is older than any other:
    no server gives it, and a job that never becomes older would be tried for ever. A plain task is new.
    """
    run = current_run.get()
    if run.record is None:
        return 0.0
    stored = whole(run.record.get(b"first"), 0)
    return (run.fence - stored) / 1e6 if stored < run.fence else math.inf
