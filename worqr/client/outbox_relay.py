"""`relay_messages`: delivers what queues have to tell each other about batches.

A script that ends the last member of a batch in one queue cannot write to another queue, which may be on another node. It puts a
message into the outbox of its queue, and tells the leader. The leader delivers the messages, and so do clients that seal, cancel
or wait for a batch. Every message may be delivered several times, in any order and by several programs at once: scripts ignore
what is not newer than what they know. A message is deleted after its delivery, unless its topic has a newer one.

Also here: the checks of batches, by which the leader makes up for lost messages and for producers that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from worqr import ops
from worqr.batch_keys import keys_at
from worqr.keys import QueueKeys
from worqr.ops import BatchCheck, OutboxMessage
from worqr.ops.replies import text
from worqr.script_call import Call

T = TypeVar("T")

MANY_ROUNDS = 1000
"""Reads of one outbox in one call, so that a queue whose outbox is never empty delays no other queue for ever."""


class Ask(Protocol):
    """Sends one request, and waits for its reply."""

    async def __call__(self, call: Call[T]) -> T:
        """Return the reply to the call."""
        ...


async def relay_messages(ask: Ask, prefix: str, keys: QueueKeys) -> None:
    """Deliver the messages of one queue, until there are none.

    Raises:
        WorqrError: a request failed. The message that it was for stays in the outbox.
    """
    for _ in range(MANY_ROUNDS):
        messages = await ask(ops.take_outbox(keys))
        if not messages:
            return
        for message in messages:
            await _deliver(ask, prefix, message)
            await ask(ops.drop_outbox(keys, [message]))


async def _deliver(ask: Ask, prefix: str, message: OutboxMessage) -> None:
    to, *parts = message.parts
    target = keys_at(prefix, text(to))
    if message.kind == "report":
        batch, token, part, version, closed, counts = (text(each) for each in parts)
        await ask(ops.report_part(target, batch, token, part, int(version), closed=closed == "1", counts=counts))
    elif message.kind == "cancel":
        token, version, home, batch, keep, reason = parts
        await cancel_members(
            ask, target, text(token), int(version), (text(home), text(batch), text(keep)), text(reason)
        )
    elif message.kind == "follow_up":
        token, ending, options, task = parts
        await ask(ops.put_follow_up(target, text(token), int(ending), options, task))


async def cancel_members(
    ask: Ask, part: QueueKeys, token: str, version: int, batch: tuple[str, str, str], reason: str
) -> None:
    """Cancel all members of a part. `batch`: the base of its home, its id, and its `keep`."""
    cursor: str | None = "0"
    while cursor is not None:
        cursor = await ask(ops.cancel_part(part, token, version, *batch, reason, cursor))


async def close_parts(
    ask: Ask, prefix: str, token: str, batch: tuple[str, str, str], parts: Sequence[tuple[str, int]]
) -> None:
    """Tell these parts, with their versions, that their batch is sealed, and deliver what they report."""
    for base, version in parts:
        part = keys_at(prefix, base)
        await ask(ops.close_part(part, token, version, *batch))
        if base != batch[0]:
            await relay_messages(ask, prefix, part)


async def check_batches(ask: Ask, prefix: str, keys: QueueKeys) -> None:
    """Look at the batches of one queue whose check is due, as the leader does.

    Raises:
        WorqrError: a request failed. The batch is checked again later.
    """
    more = True
    while more:
        more, checks = await ask(ops.check_batches(keys))
        for check in checks:
            await _tell_parts(ask, prefix, keys, check)


async def _tell_parts(ask: Ask, prefix: str, home: QueueKeys, check: BatchCheck) -> None:
    batch = (home.base, check.id, check.keep)
    if check.reason is None:
        await close_parts(ask, prefix, check.token, batch, check.parts)
        return
    for base, version in check.parts:
        part = keys_at(prefix, base)
        await cancel_members(ask, part, check.token, version, batch, check.reason)
        await relay_messages(ask, prefix, part)


async def relay(ask: Ask, prefix: str, keys: QueueKeys) -> None:
    """Check the batches of a queue that are due, and deliver its messages. Raises WorqrError if a request failed."""
    await relay_messages(ask, prefix, keys)
    await check_batches(ask, prefix, keys)
    await relay_messages(ask, prefix, keys)
