"""`batch_block`: makes a batch for the length of a block. Its end seals the batch; an error cancels it.

The home queue of a batch is that of its follow-up, so that the last of its jobs ends and the follow-up is enqueued in one step of
the server. Not here: the handle (`batch`).
"""

# Call hides its private fields from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from worqr import ops
from worqr.batches import KEEP, OPEN_FOR, BatchInfo, follow_up_options, milliseconds
from worqr.client.batch import Batch
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.job import Job
from worqr.client.outbox_relay import close_parts, relay_messages
from worqr.client.producer import Producer
from worqr.errors import Duplicate, UsageError, WorqrError
from worqr.ids import random_part
from worqr.job_options import check_choice, check_id, encode_options
from worqr.keys import QueueKeys, check_name
from worqr.validation import Seconds

R = TypeVar("R")


class BatchOptions(TypedDict, total=False):
    """The options of a batch."""

    then: Call[Any]
    """A call that is enqueued when all jobs have finished."""
    otherwise: Call[Any]
    """A call that is enqueued instead when a job failed for good or was cancelled, or when the batch was cancelled."""
    on_failed: Literal["continue", "cancel"]
    """"cancel": the first job that fails for good cancels the others. Default: "continue"."""
    queue: str
    """The home queue, which keeps the record of the batch. Default: that of `then`, else that of `otherwise`, else that of the
    first job.
    """
    id: str
    """1 to 200 bytes of UTF-8 without control characters, not beginning with ``@``. Default: a new one."""
    keep: Seconds
    """Seconds for which its record is kept after its end. Default: a day."""
    open_for: Seconds
    """Seconds without an addition after which a batch that its producer has left open is cancelled. Default: an hour."""
    meta: Mapping[str, str]
    """Names and texts that the follow-up can read, at most 4 KiB as JSON. Default: none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked options of a batch. `facts`: fields of its record."""

    then: Call[Any] | None
    otherwise: Call[Any] | None
    queue: str | None
    id: str | None
    keep_ms: int
    open_for_ms: int
    facts: Mapping[str, str]


_KNOWN = frozenset(BatchOptions.__annotations__)


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Return the checked options of a batch.

    Raises:
        UsageError: one does not exist, or is not valid.
    """
    for name in options:
        if name not in _KNOWN:
            raise UsageError(f"mesh.batch() has no option {name!r}; it takes {', '.join(sorted(_KNOWN))}")
    for what in ("then", "otherwise"):
        call = options.get(what)
        if call is not None and not isinstance(call, Call):
            raise UsageError(f"{what} of a batch must be a call: write {what}=function.call(...), not {call!r}")
        if call is not None:
            follow_up_options(call._options, what)
    facts: dict[str, str] = {}
    if check_choice(options.get("on_failed", "continue"), "on_failed", ("continue", "cancel")) == "cancel":
        facts["on_failed"] = "cancel"
    if "meta" in options:
        facts["meta"] = str(encode_options({"meta": options["meta"]})["meta"])
    calls = [options.get("then"), options.get("otherwise")]
    queues = [call.queue for call in calls if call is not None]
    given = check_name(options["queue"]) if "queue" in options else None
    return Plan(
        *calls,
        given or next(iter(queues), None),
        check_id(options["id"]) if "id" in options else None,
        milliseconds(options.get("keep", KEEP), "keep"),
        milliseconds(options.get("open_for", OPEN_FOR), "open_for"),
        facts,
    )


class OpenBatch(Batch):
    """A batch in the block of its producer."""

    def __init__(self, client: Client, producer: Producer, plan: Plan, parent: Batch | None = None) -> None:
        super().__init__(client, producer, None, None, random_part())
        self._plan = plan
        self._parent = parent
        self._renew_at = 0.0

    async def begin(self) -> None:
        """Store the record, if the home queue is known."""
        self._client.check_connected()
        if self._plan.queue is not None:
            await self._store(self._plan.queue)

    async def _store(self, queue: str) -> None:
        keys, sharding, plan = QueueKeys(self._client.settings.prefix, queue), self._client.sharding, self._plan
        given = plan.id
        home = await (sharding.next_shard(keys) if given is None else sharding.shard_of_id(keys, given))
        name = f"@{self.token}{home.id_suffix}" if given is None else given
        facts: dict[str, bytes | str] = dict(plan.facts)
        for what, call in (("then", plan.then), ("otherwise", plan.otherwise)):
            if call is not None:
                facts |= await self._follow_up(home, what, call)
        while True:
            outer = None if self._parent is None else (await self._parent.entry(home))["batch"]
            reply = await self._client.link_to(home.name).call(
                ops.open_batch(
                    *(home, name, self.token),
                    open_for_ms=plan.open_for_ms,
                    keep_ms=plan.keep_ms,
                    parent=outer,
                    facts=facts,
                )
            )
            if reply != "closed" or self._parent is None:
                break
            await self._parent.reopen(home)
        if reply == "exists":
            raise Duplicate(f"queue {queue!r} has a batch with the id {name!r} already: nothing was stored")
        self.locate(home, name)
        self._renew_at = time.monotonic() + plan.open_for_ms / 4000

    async def _follow_up(self, home: QueueKeys, what: str, call: Call[Any]) -> dict[str, bytes | str]:
        """Return a follow-up as the home stores it: the base of its queue, its options and its task."""
        options, keys = follow_up_options(call._options, what), QueueKeys(self._client.settings.prefix, call.queue)
        if keys.queue == home.queue and "lane" not in options:
            target = home
        else:
            target = await self._client.sharding.shard_for_job(keys, options)
        encoded = msgspec.msgpack.encode(options)
        return {what: target.base, f"{what}_options": encoded, f"{what}_task": call.task}

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add jobs, a thousand in one round trip; see `Batch.dispatch_many`."""
        if self.is_located:
            if time.monotonic() >= self._renew_at:
                self.open_again()
                self._renew_at = time.monotonic() + self._plan.open_for_ms / 4000
            return await super().dispatch_many(calls)
        listed = list(calls)
        if not listed:
            return []
        if isinstance(listed[0], Call):  # pyright: ignore[reportUnnecessaryIsInstance] - else it is refused below
            await self._store(listed[0].queue)
        return await super().dispatch_many(listed)

    async def info(self) -> BatchInfo:
        """Return the state of the batch, and how many of its jobs have ended; see `Batch.info`."""
        if self.is_located:
            return await super().info()
        return BatchInfo("", "", "ended", 0, 0, 0, 0, 1)

    async def seal(self) -> None:
        """Add nothing more. The batch ends when its jobs have ended."""
        if not self.is_located:
            return
        sealed = await self._client.ask(ops.seal_batch(self._home, self.id, self.token))
        if sealed is not None:
            batch = (self._home.base, self.id, sealed.keep)
            await close_parts(self._client.ask, self._client.settings.prefix, self.token, batch, sealed.parts)
            await relay_messages(self._client.ask, self._client.settings.prefix, self._home)

    async def abandon(self, error: BaseException) -> None:
        """Cancel the batch, because its block ended with an error. A block that was itself cancelled does not wait for it."""
        if not self.is_located:
            return
        reason = f"its block ended with {type(error).__name__}"
        if isinstance(error, Exception):
            try:
                await self.cancel(reason=reason)
            except WorqrError as failed:
                error.add_note(
                    f"{self!r} could not be cancelled ({failed}): it is cancelled when `open_for` has passed"
                )
        else:
            call = ops.cancel_batch(self._home, self.id, self.token, reason)
            self._client.link.post(call, lambda _reply, _error: None, patience=self._client.settings.patience)


@asynccontextmanager
async def batch_block(
    client: Client, producer: Producer, plan: Plan, parent: Batch | None = None
) -> AsyncGenerator[Batch]:
    """Make a batch for the length of a block."""
    batch = OpenBatch(client, producer, plan, parent)
    await batch.begin()
    try:
        yield batch
    except BaseException as error:
        await batch.abandon(error)
        raise
    await batch.seal()
