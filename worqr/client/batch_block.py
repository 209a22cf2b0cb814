"""`batch_block`: makes a batch for the length of a block. Its end seals the batch; an error cancels it.

The home queue of a batch is that of its follow-up, so that the last of its jobs ends and the follow-up is enqueued in one step of
the server. Not here: the handle (`batch`).
"""

# Call hides its private fields from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar, cast

import msgspec

from worqr import ops
from worqr.batches import KEEP, OPEN_FOR, BatchInfo, follow_up_options, milliseconds
from worqr.client.batch import ASK_AGAIN, Batch
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.job import Job
from worqr.client.notifications import sleep
from worqr.client.outbox_relay import Relay
from worqr.client.producer import Producer
from worqr.errors import BatchEnded, Duplicate, NotReplicated, UsageError, WorqrError
from worqr.ids import batch_token
from worqr.job_options import check_choice, check_id, encode_options
from worqr.keys import QueueKeys, check_name
from worqr.validation import Seconds

R = TypeVar("R")

RENEWALS: Final = 4
"""How often an addition tells the server within `open_for` that the producer is alive. The server waits that much longer."""
CANCEL_WITHIN: Final = 1.0
"""Seconds that a block which was itself cancelled waits until the server has cancelled the batch."""


class BatchOptions(TypedDict, total=False):
    """The options of a batch."""

    then: Call[Any]
    """A call that is enqueued when all jobs have finished. Default: none."""
    otherwise: Call[Any]
    """A call that is enqueued instead when a job failed for good or was cancelled, or when the batch was cancelled.
    Default: none.
    """
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
    then: Call[Any] | None = options.get("then")
    otherwise: Call[Any] | None = options.get("otherwise")
    queues = [call.queue for call in (then, otherwise) if call is not None]
    given = check_name(options["queue"]) if "queue" in options else None
    return Plan(
        then=then,
        otherwise=otherwise,
        queue=given or next(iter(queues), None),
        id=check_id(options["id"]) if "id" in options else None,
        keep_ms=milliseconds(options.get("keep", KEEP), "keep"),
        open_for_ms=milliseconds(options.get("open_for", OPEN_FOR), "open_for"),
        facts=facts,
    )


class OpenBatch(Batch):
    """A batch in the block of its producer."""

    def __init__(self, client: Client, producer: Producer, plan: Plan, parent: Batch | None = None) -> None:
        super().__init__(client, producer, None, None, batch_token())
        self._plan = plan
        self._parent = parent
        self._renew_at = 0.0
        self._sealed = False
        self._storing = threading.Lock()

    async def begin(self) -> None:
        """Store the record, if the home queue is known."""
        self._client.check_connected()
        if self._plan.queue is not None:
            await self._locate_at(self._plan.queue)

    async def _locate_at(self, queue: str) -> None:
        """Store the record in this queue, if it is stored nowhere yet. Of several tasks or threads, one does it."""
        while self._known is None:
            if self._storing.acquire(blocking=False):
                try:
                    self._known = self._known or await self._store(queue)
                finally:
                    self._storing.release()
            else:
                await sleep(self._client.link, ASK_AGAIN)

    async def _store(self, queue: str) -> tuple[QueueKeys, str]:
        keys, sharding, plan = QueueKeys(self._client.settings.prefix, queue), self._client.sharding, self._plan
        given = plan.id
        home = await (sharding.next_shard(keys) if given is None else sharding.shard_of_id(keys, given))
        name = f"@{self._token}{home.id_suffix}" if given is None else given
        facts: dict[str, bytes | str] = dict(plan.facts)
        held: dict[QueueKeys, dict[str, bytes | str]] = {}
        shown = {fact: value for fact, value in facts.items() if fact == "meta"}
        for what, call in (("then", plan.then), ("otherwise", plan.otherwise)):
            if call is not None:
                target, follow_up = await self._follow_up(home, what, call)
                facts[what] = target.base
                (facts if target == home else held.setdefault(target, dict(shown))).update(follow_up)
        await self._hold(home, name, held)
        while True:
            outer = None if self._parent is None else await self._entry_of_parent(self._parent, home)
            reply = await self._client.link_to(home.name).call(
                ops.open_batch(
                    *(home, name, self._token),
                    open_for_ms=plan.open_for_ms + plan.open_for_ms // RENEWALS,
                    keep_ms=plan.keep_ms,
                    parent=outer,
                    facts=facts,
                )
            )
            if reply != "closed" or self._parent is None:
                break
            await self._parent._reopen(home)
        if reply == "exists":
            for target in held:
                await self._client.ask(ops.keep_follow_ups(target, self._token, 1))
            raise Duplicate(f"queue {queue!r} has a batch with the id {name!r} already: nothing was stored")
        self._renew_at = self._next_renewal()
        return home, name

    async def _entry_of_parent(self, parent: Batch, home: QueueKeys) -> Mapping[str, object]:
        await parent._locate_at(home.display_name)
        return cast("Mapping[str, object]", (await parent._entry(home))["batch"])

    async def _hold(self, home: QueueKeys, name: str, held: Mapping[QueueKeys, Mapping[str, bytes | str]]) -> None:
        """Store the follow-ups of other queues there, with the rights of this program. Comes first: an open batch has them."""
        for target, facts in held.items():
            await self._client.ask(ops.hold_follow_ups(target, self._token, home.base, name, facts))

    async def _follow_up(
        self, home: QueueKeys, what: str, given: Call[Any]
    ) -> tuple[QueueKeys, dict[str, bytes | str]]:
        """Return the queue of a follow-up, and what is stored of it: its options and its task."""
        call = self._producer.follow_up(given)
        options, keys = follow_up_options(call._options, what), QueueKeys(self._client.settings.prefix, call.queue)
        if keys.queue == home.queue and "lane" not in options:
            target = home
        else:
            target = await self._client.sharding.shard_for_job(keys, options)
            self._client.link_to(target.name)
        return target, {f"{what}_options": msgspec.msgpack.encode(options), f"{what}_task": call.task}

    def _next_renewal(self) -> float:
        return time.monotonic() + self._plan.open_for_ms / 1000 / RENEWALS

    async def _entry(self, part: QueueKeys) -> Mapping[str, object]:
        """As `Batch._entry`. Now and then, open all parts again, which tells the server that the producer is alive."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = self._next_renewal()
            self._opened.clear()
        return await super()._entry(part)

    async def _add(self, calls: list[Call[R]], late: NotReplicated | None) -> tuple[list[Job[R]], NotReplicated | None]:
        """As `Batch._add`. The first job decides the home queue, if no option does."""
        if self._known is None and isinstance(calls[0], Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            await self._locate_at(calls[0].queue)
        return await super()._add(calls, late)

    async def info(self) -> BatchInfo:
        """Return the state of the batch, and how many of its jobs have ended; see `Batch.info`."""
        if self._known is not None:
            return await super().info()
        return BatchInfo("", "", "ended" if self._sealed else "open", 0, 0, 0, 0, int(self._sealed))

    async def seal(self) -> None:
        """Add nothing more. The batch ends when its jobs have ended.

        Raises:
            BatchEnded: its record is gone.
            WorqrError: the server did not note it. The batch is cancelled when `open_for` has passed.
        """
        self._sealed = True
        if self._known is None:
            return
        home, prefix = await self._home(), self._client.settings.prefix
        try:
            sealed = await self._client.ask(ops.seal_batch(home, self.id, self._token))
        except WorqrError as error:
            error.add_note(f"{self!r} may be open: if so, it is cancelled when `open_for` has passed")
            raise
        if sealed is None:
            raise BatchEnded(
                f"the record of {self!r} was deleted, so its follow-up will not run: dispatch the jobs again in a new batch"
            )
        relay = Relay(self._client.ask, prefix)
        await relay.close_parts(self._token, (home.base, self.id, sealed.keep), sealed.parts)
        await relay.messages(home)  # an error is no harm: the leader does the same, in 10 s at the latest

    async def abandon(self, error: BaseException) -> None:
        """Cancel the batch, because its block ended with an error. A block that was itself cancelled waits a second for it."""
        self._sealed = True
        if self._known is None:
            return
        reason = f"its block ended with {type(error).__name__}"
        try:
            if isinstance(error, Exception):
                await self.cancel(reason=reason)
            elif not isinstance(error, GeneratorExit):  # in a generator that is not finished, nothing can wait
                with self._client.link.driver.move_on_after(CANCEL_WITHIN, shield=True):
                    await self._client.ask(ops.cancel_batch(await self._home(), self.id, self._token, reason))
        except WorqrError as failed:
            error.add_note(f"{self!r} could not be cancelled ({failed}): it is cancelled when `open_for` has passed")


@asynccontextmanager
async def batch_block(batch: OpenBatch) -> AsyncGenerator[OpenBatch]:
    """Use a batch for the length of a block, as its producer."""
    await batch.begin()
    try:
        yield batch
    except BaseException as error:
        await batch.abandon(error)
        raise
    await batch.seal()
