"""`Relay`: delivers what queues have to tell each other about batches, about follow-ups and about the children of workflows.

A script that ends the last member of a batch in one queue cannot write to another queue, which may be on another node. It puts a
message into the outbox of its queue, and tells the leader. The leader delivers the messages, and so do clients that seal, cancel
or wait for a batch. Every message may be delivered several times, in any order and by several programs at once: scripts ignore
what is not newer than what they know. A message is deleted after its delivery, unless its topic has a newer one.

Every program that may write to a queue may write to its outbox, and a leader may write to all queues. So no message carries a
task: the one that enqueues a follow-up names what the producer of the batch has stored in that queue itself. Messages about a
child are delivered with the base of the queue whose outbox they were in: its parent has noted where the child is.

Also here: the checks of batches, by which the leader makes up for lost messages and for producers that died.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from worqr import ops
from worqr.command import Command
from worqr.errors import WorqrError
from worqr.keys import QueueKeys, keys_at
from worqr.log_events import emit
from worqr.ops import MESSAGES_AT_ONCE, BatchCheck, OutboxMessage
from worqr.stored_values import exact, whole

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

MANY_ROUNDS: Final = 1000
"""Reads of one outbox in one call, so that a queue whose outbox is never empty delays no other queue for ever."""
MOST_AT_ONCE: Final = 10_000
"""Messages that one read returns, if none of the first ones can be delivered."""
MOST_DIGITS: Final = 15
DIGITS_OF_TOKENS: Final = 16


class Ask(Protocol):
    """Sends one request, and waits for its reply."""

    async def __call__(self, call: Command[T]) -> T:
        """Return the reply to the call."""
        ...


class Relay:
    """Delivers messages, and does the checks, in one pass.

    A queue that cannot be reached delays no other queue: what it would get is left for the next pass.
    """

    def __init__(self, ask: Ask, prefix: str) -> None:
        self._ask = ask
        self._prefix = prefix
        self._failed: dict[str, WorqrError] = {}
        self._unknown: list[str] = []
        self.old: set[str] = set()
        """Topics of messages of an earlier form, which carry a task of another queue. They are not delivered, and stay."""

    def end(self) -> None:
        """End the pass. Raises the first error, if a queue could not be reached."""
        for error in self._failed.values():
            raise error

    async def messages(self, keys: QueueKeys) -> None:
        """Deliver the messages of one queue, until there are none that can be delivered."""
        limit = MESSAGES_AT_ONCE
        for _ in range(MANY_ROUNDS):
            found = await self._ask(ops.take_outbox(keys, limit))
            delivered = [message for message in found if await self._deliver(keys, message)]
            if delivered:
                await self._ask(ops.drop_outbox(keys, delivered))
            elif len(found) < limit or limit == MOST_AT_ONCE:
                break
            else:
                limit = MOST_AT_ONCE  # look behind those that cannot be delivered now
        self._tell_unknown(keys)

    def _tell_unknown(self, keys: QueueKeys) -> None:
        """Log the follow-ups that their queues do not hold, in one line."""
        if self._unknown:
            text = (
                "%(count)d follow-ups of queue %(queue)r were not enqueued, because their queues do not hold them: "
                "dispatch the calls again (%(error)s)"
            )
            some = ", ".join(self._unknown[:3]) + (", ..." if len(self._unknown) > 3 else "")
            emit(
                logger,
                "relay",
                text,
                level=logging.ERROR,
                count=len(self._unknown),
                queue=keys.display_name,
                error=some,
            )
            self._unknown.clear()

    async def close_parts(self, token: str, batch: tuple[str, str, str], parts: Sequence[tuple[str, int]]) -> None:
        """Tell these parts, with their versions, that their batch is sealed, and deliver what they report."""
        for base, version in parts:
            part = keys_at(self._prefix, base)
            if await self._reach(base, self._ask(ops.close_part(part, token, version, *batch))) and base != batch[0]:
                await self._reach(base, self.messages(part))

    async def checks(self, keys: QueueKeys) -> None:
        """Look at the batches of one queue whose check is due, as the leader does."""
        more = True
        while more:
            more, checks = await self._ask(ops.check_batches(keys))
            for check in checks:
                await self._tell_parts(keys, check)

    async def _tell_parts(self, home: QueueKeys, check: BatchCheck) -> None:
        batch = (home.base, check.id, check.keep)
        if check.reason is None:
            await self.close_parts(check.token, batch, check.parts)
            return
        for base, version in check.parts:
            part = keys_at(self._prefix, base)
            members = self._cancel_members(part, check.token, version, batch, check.reason)
            if await self._reach(base, members):
                await self._reach(base, self.messages(part))

    async def _reach(self, base: str, work: Coroutine[Any, Any, object]) -> bool:
        """Run `work`, which needs the queue with this base. Returns False if that failed, now or earlier in this pass."""
        if base in self._failed:
            work.close()
            return False
        try:
            await work
        except WorqrError as error:
            self._failed[base] = error
            return False
        return True

    async def _deliver(self, source: QueueKeys, message: OutboxMessage) -> bool:
        """Deliver one message from the outbox of the queue `source`.

        Returns False if the queue that it is for could not be reached, or if it is of an earlier form.
        """
        if message.kind == "follow_up":
            self.old.add(exact(message.topic))
            return False
        try:
            base, work = self._delivery(source, message)
        except (ValueError, TypeError, IndexError) as error:  # another program has written it
            line = "queue %(queue)r: a message for another queue cannot be read, and is dropped: %(error)s"
            emit(logger, "relay", line, level=logging.ERROR, queue=source.display_name, error=str(error))
            return True
        return await self._reach(base, work)

    def _delivery(self, source: QueueKeys, message: OutboxMessage) -> tuple[str, Coroutine[Any, Any, object]]:
        """Return the base of the queue that a message is for, and the coroutine that delivers it."""
        if message.kind in {"ended", "cancel_child", "look"}:
            return self._to_relative(source.base, message)
        if message.kind == "release":
            *names, facts = message.parts
            base, token, kind, ending = (exact(each) for each in names)
            number = _number(ending, DIGITS_OF_TOKENS)
            return base, self._release(keys_at(self._prefix, base), _token(token), kind, number, facts)
        base, *parts = (exact(each) for each in message.parts)
        target = keys_at(self._prefix, base)
        if message.kind == "keep":
            token, kept_for = parts
            return base, self._ask(ops.keep_follow_ups(target, _token(token), _number(kept_for)))
        if message.kind == "report":
            batch, token, part, version, closed, counts = parts
            six = " ".join(str(_number(each)) for each in counts.split(" "))
            call = ops.report_part(target, batch, token, part, _number(version), closed=closed == "1", counts=six)
            return base, self._ask(call)
        if message.kind == "cancel":
            token, version, home, batch, keep, reason = parts
            told = (home, batch, str(_number(keep)))
            return base, self._cancel_members(target, _token(token), _number(version), told, reason)
        raise ValueError(message.kind)

    def _to_relative(self, source: str, message: OutboxMessage) -> tuple[str, Coroutine[Any, Any, object]]:
        """Return the base of the parent of a child, or of the child of a parent, and the coroutine that tells it."""
        *names, value = message.parts
        base, other, life, *rest = (exact(each) for each in names)
        target = keys_at(self._prefix, base)
        if message.kind == "ended":
            key, number, outcome = rest
            return base, self._ask(
                ops.store_end(target, source, other, life, key, _number(number, DIGITS_OF_TOKENS), outcome, value)
            )
        if message.kind == "cancel_child":
            [child] = rest
            return base, self._ask(ops.cancel_child(target, source, other, life, child, exact(value)))
        key, after = rest
        return base, self._ask(
            ops.look_for_child(target, source, other, life, key, _number(after, DIGITS_OF_TOKENS), exact(value))
        )

    async def _release(self, target: QueueKeys, token: str, kind: str, ending: int, facts: bytes) -> None:
        """Enqueue a follow-up that another queue holds."""
        if await self._ask(ops.put_follow_up(target, token, kind, ending, facts)) == "unknown":
            self._unknown.append(f"@{token}.{kind} of {target.display_name!r}")

    async def _cancel_members(
        self, part: QueueKeys, token: str, version: int, batch: tuple[str, str, str], reason: str
    ) -> None:
        """Cancel all members of a part. `batch`: the base of its home, its id, and its `keep`."""
        cursor: str | None = "0"
        while cursor is not None:
            cursor = await self._ask(ops.cancel_part(part, token, version, *batch, reason, cursor))


def _number(stored: str, digits: int = MOST_DIGITS) -> int:
    """Return a number of a message. Raises ValueError if another program has written something else."""
    found = whole(stored, digits=digits)
    if found is None:
        raise ValueError(f"{stored[:40]!r} is no number")
    return found


def _token(value: str) -> str:
    """Return the token of a batch, which is part of a key. Raises ValueError for anything else."""
    if not (value.isascii() and value.isalnum()):
        raise ValueError(f"{value[:40]!r} is no token")
    return value


async def relay_messages(ask: Ask, prefix: str, keys: QueueKeys) -> None:
    """Deliver the messages of one queue, until there are none.

    Raises:
        WorqrError: a request failed. The message that it was for stays in the outbox, and all others are delivered.
    """
    relay = Relay(ask, prefix)
    await relay.messages(keys)
    relay.end()


async def relay_and_check(ask: Ask, prefix: str, keys: QueueKeys) -> set[str]:
    """Check the batches of a queue that are due, and deliver its messages.

    Returns:
        Topics of messages of an earlier form, which stay.

    Raises:
        WorqrError: a request failed.
    """
    relay = Relay(ask, prefix)
    await relay.messages(keys)
    await relay.checks(keys)
    await relay.messages(keys)
    relay.end()
    return relay.old
