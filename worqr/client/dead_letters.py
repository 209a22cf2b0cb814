"""The dead-letter queue: the failed tasks of a queue (the last `keep_failed`) and the undecodable ones (all)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr import ops
from worqr.client.inspection import ask_each
from worqr.client.job import opened_failed
from worqr.client.notifications import sleep
from worqr.command import Command
from worqr.job_options import check_id
from worqr.keys import QueueKeys
from worqr.ops import HEAD_BYTES, MAX_ITEMS, DeadLetterClaim, DeadLetterList, DeadLetterPage
from worqr.records import Failed
from worqr.remote_error import failed_record
from worqr.stored_values import whole
from worqr.validation import check_count, check_text, to_ms

if TYPE_CHECKING:
    from worqr.client.client import Client

ClaimsByShard = list[tuple[QueueKeys, list[DeadLetterClaim]]]
"""The claims under which tasks failed, by shard."""
Entries = list[Failed]
Change = Callable[[QueueKeys, DeadLetterList, Sequence[DeadLetterClaim]], Command[int]]
"""Makes the request that changes some entries."""
Progress = Callable[[int, int], object]
PIECE: Final = 10
"""Entries that one request changes. A request of 25 occupies the server for 2 ms, and other queues notice that."""
PAGE: Final = 100
"""Entries that one request reads. A request of 200 would occupy the server for 11 ms."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries are meant: the type of their error, times in ms, and the token of their batch. None, or empty: any."""

    error: str
    before_ms: int | None
    since_ms: int | None
    batch: str = ""

    @classmethod
    def checked(cls, error: str | None, before: datetime | None, since: datetime | None) -> Filter:
        """Return the filter of a call. Raise UsageError if an argument is not valid."""
        return cls(
            "" if error is None else check_text(error, "error"),
            None if before is None else to_ms(before, "before"),
            None if since is None else to_ms(since, "since"),
        )


def _only(ids: Sequence[str]) -> str:
    """Return the id if there is only one; else an empty text."""
    return ids[0] if len(ids) == 1 else ""


class DeadLetters:
    """A dead-letter queue: ``queue.failed`` or ``queue.undecodable``.

    Its entries are named by their job ids, as in `Failed`. If an id is in the list several times, it means the newest entry;
    name it twice for the two newest. For a queue of several shards, it lists the entries of all.
    """

    __slots__ = ("_client", "_keys", "_which")

    def __init__(self, client: Client, keys: QueueKeys, which: Literal["failed", "undecodable"]) -> None:
        self._client = client
        self._keys = keys
        self._which: Literal["failed", "undecodable"] = which

    def __repr__(self) -> str:
        return f"<DeadLetters {self._which} of {self._keys.display_name!r}>"

    async def list(
        self,
        limit: int = 100,
        *,
        error: str | None = None,
        before: datetime | None = None,
        since: datetime | None = None,
        payload: bool = True,
    ) -> list[Failed]:
        """Return entries, newest first.

        Args:
            limit: At most this many.
            error: Only entries whose error has this type: its qualified name, or the last part of it (``"Timeout"``).
            before: Only entries from before this time, a timezone-aware datetime.
            since: Only entries from this time on.
            payload: Return whole payloads. False: only the first 4,096 bytes of each; the beginning of a payload that is too
                large to be read for a list is empty.

        Raises:
            UsageError: An argument is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await self._list_chosen(limit, Filter.checked(error, before, since), payload=payload)

    async def _list_chosen(self, limit: int, chosen: Filter, *, payload: bool) -> Entries:
        check_count(limit, "limit")
        shards, head = await self._shards(), None if payload else HEAD_BYTES
        found = [
            failed_record(keys.display_name, record.get("task", b""), record)
            for keys in shards
            async for page in self._pages(keys, limit, chosen, head=head)
            for _, record in page.records
        ]
        if len(shards) > 1:
            found.sort(key=lambda failed: failed.at, reverse=True)
        values = self._client.values
        return found[:limit] if values is None else [opened_failed(each, values) for each in found[:limit]]

    async def retry(self, *ids: str) -> int:
        """Put tasks back to the end of their queue, with the same ids and with all counters at zero.

        They keep their `meta` and their own options, and do not expire any more. While a job with the same id waits or
        runs, the entry stays where it is.

        Args:
            *ids: The ids of the entries.

        Returns:
            The number of tasks put back.

        Raises:
            UsageError: An id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await self._each(await self._find(ids), ops.retry_aside, job=_only(ids))

    async def drop(self, *ids: str) -> int:
        """Delete entries.

        Args:
            *ids: The ids of the entries.

        Returns:
            The number of entries deleted.

        Raises:
            UsageError: An id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await self._each(await self._find(ids), ops.drop_aside, job=_only(ids))

    async def errors(self) -> dict[str, int]:
        """Return the number of entries for each type of error, the most frequent type first.

        The counts are exact only if no entry comes or goes meanwhile. 100,000 entries take 100 requests.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        found: Counter[str] = Counter()
        for keys in await self._shards():
            more, rank = True, 0
            while more:
                more, numbers = await self._client.ask(ops.count_errors(keys, self._which, rank))
                found.update(numbers)
                rank += MAX_ITEMS
        return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))

    async def count(
        self, *, error: str | None = None, before: datetime | None = None, since: datetime | None = None
    ) -> int:
        """Return the number of entries.

        With an error, it reads the error of each entry: a request for 1,000 of them.

        Args:
            error: Only entries whose error has this type, as in `list`.
            before: Only entries from before this time.
            since: Only entries from this time on.

        Raises:
            UsageError: An argument is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        chosen = Filter.checked(error, before, since)
        if chosen.error:
            return sum(len(claims) for _, claims in await self._claims(chosen, None))

        def number(keys: QueueKeys) -> Command[DeadLetterPage]:
            return ops.list_aside(keys, self._which, 0, before_ms=chosen.before_ms, since_ms=chosen.since_ms)

        return sum(page.number for page in await ask_each(self._client, await self._shards(), number))

    async def retry_all(
        self,
        *,
        error: str | None = None,
        before: datetime | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Put all tasks back to the end of their queue, the oldest first; see `retry`.

        Requests of 10 tasks are sent one after the other, and each is followed by a pause of the same length. So the server
        serves others at least half of the time. If you cancel the call, the other tasks stay where they are.

        Args:
            error: Only entries whose error has this type, as in `list`.
            before: Only entries from before this time.
            since: Only entries from this time on.
            limit: At most this many, the newest. None: all.
            progress: Called after each request, with the number of entries that were tried so far, and the number of all.

        Returns:
            The number of tasks put back.

        Raises:
            UsageError: An argument is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await self._retry_chosen(Filter.checked(error, before, since), limit, progress)

    async def drop_all(
        self,
        *,
        error: str | None = None,
        before: datetime | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Delete all entries, by requests of 10 with pauses between them, as `retry_all`.

        Args:
            error: Only entries whose error has this type, as in `list`.
            before: Only entries from before this time.
            since: Only entries from this time on.
            limit: At most this many, the newest. None: all.
            progress: Called after each request, with the number of entries that were tried so far, and the number of all.

        Returns:
            The number of entries deleted.

        Raises:
            UsageError: An argument is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        found = await self._claims(Filter.checked(error, before, since), limit)
        return await self._each([(keys, claims[::-1]) for keys, claims in found], ops.drop_aside, progress)

    async def _retry_chosen(self, chosen: Filter, limit: int | None = None, progress: Progress | None = None) -> int:
        found = await self._claims(chosen, limit)
        return await self._each([(keys, claims[::-1]) for keys, claims in found], ops.retry_aside, progress)

    async def _shards(self) -> tuple[QueueKeys, ...]:
        return await self._client.sharding.shards(self._keys)

    async def _find(self, ids: tuple[str, ...]) -> ClaimsByShard:
        """Return the entries of these ids, from all shards: the number of shards may have changed since a task failed.

        One request searches for all of them, so that an id that is given twice means two entries.
        """
        names = [check_id(name, generated=True) for name in ids]
        if not names:
            return []
        return [
            (keys, await self._client.ask(ops.find_aside(keys, self._which, names))) for keys in await self._shards()
        ]

    async def _each(self, found: ClaimsByShard, change: Change, progress: Progress | None = None, job: str = "") -> int:
        pieces = [(keys, claims[n : n + PIECE]) for keys, claims in found for n in range(0, len(claims), PIECE)]
        total = sum(len(some) for _, some in pieces)
        count, tried, pause, kind = 0, 0, 0.0, "retried" if change is ops.retry_aside else "dropped"
        if len(pieces) > 1:
            await self._note("bulk_begun", total, f"{self._which} tasks to be {kind}")
        for keys, some in pieces:
            if pause:
                await sleep(self._client.link, pause)
            began = time.monotonic()
            count += await self._client.ask(change(keys, self._which, some))
            pause, tried = time.monotonic() - began, tried + len(some)
            if progress is not None:
                progress(tried, total)
        if count:
            await self._note(kind, count, self._which, job)
        return count

    async def _note(self, kind: str, count: int, text: str, job: str = "") -> None:
        await self._client.note(kind, queue=self._keys.display_name, job=job, count=count, text=text)

    async def _claims(self, chosen: Filter, limit: int | None) -> ClaimsByShard:
        if limit is not None:
            check_count(limit, "limit")
        shards = await self._shards()
        bare = (
            limit is None or len(shards) == 1
        )  # with a limit and several shards, the times are needed to find the newest
        found = [
            (keys, claim, whole(record.get("at"), 0))
            for keys in shards
            async for page in self._pages(keys, limit, chosen, bare=bare)
            for claim, record in page.records
        ]
        if not bare:
            found = sorted(found, key=lambda entry: entry[2], reverse=True)[:limit]
        return [(keys, [claim for shard, claim, _ in found if shard is keys]) for keys in shards]

    async def _pages(
        self, keys: QueueKeys, limit: int | None, chosen: Filter, *, bare: bool = False, head: int | None = None
    ) -> AsyncIterator[DeadLetterPage]:
        after, after_ms, left, most = "-", "0", limit, MAX_ITEMS if bare else PAGE
        while left is None or left > 0:
            page = await self._client.ask(
                ops.list_aside(
                    *(keys, self._which, most if left is None else min(left, most)),
                    after=after,
                    after_ms=after_ms,
                    before_ms=chosen.before_ms,
                    error=chosen.error,
                    bare=bare,
                    since_ms=chosen.since_ms,
                    head=head,
                    batch=chosen.batch,
                )
            )
            yield page
            after, after_ms = page.after, page.after_ms
            left = None if left is None else left - len(page.records)
            if not page.more:
                return


async def list_members(aside: DeadLetters, token: str, limit: int, **options: Any) -> Sequence[Failed]:
    """Return entries that belong to a batch, newest first, each with the beginning of its payload.

    Args:
        aside: The dead-letter queue.
        token: The token of the batch.
        limit: At most this many.
        **options: The `error`, `before` and `since` of `DeadLetters.list`.
    """
    checked = {"error": None, "before": None, "since": None, **options}
    chosen = replace(Filter.checked(**checked), batch=token)
    return await aside._list_chosen(limit, chosen, payload=False)  # pyright: ignore[reportPrivateUsage]


async def retry_members(client: Client, keys: QueueKeys, token: str) -> int:
    """Put the failed jobs of a batch back that are in the dead-letter queues of one queue or shard; return their number."""
    chosen, put_back = Filter("", None, None, token), 0
    for which in ("failed", "undecodable"):
        put_back += await DeadLetters(client, keys, which)._retry_chosen(chosen)  # pyright: ignore[reportPrivateUsage]
    return put_back
