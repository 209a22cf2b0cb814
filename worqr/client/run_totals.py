"""`RunTotalsReader`: reads the totals of the runs of many queues, again and again. Queues that rest are not read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import all_shards
from worqr.keys import QueueKeys
from worqr.mesh_records import QueueInfo

SETTLED_AFTER: Final = 15.0
"""Seconds after which all runs of a queue that rests have been counted. A worker sends the counts of 100 queues each second."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The totals of one queue. `changed_at`: when its counters were first seen to be `counts`, by this process's clock."""

    counts: Mapping[str, int]
    changed_at: float
    read_at: float
    totals: Mapping[str, int]


class RunTotalsReader:
    """Reads the totals of runs for one caller, who calls it again and again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, _Known] = {}

    async def read(self, queues: Iterable[QueueInfo]) -> dict[str, Mapping[str, int]]:
        """Return the totals of these queues by field, without the queues that have none. All shards of a queue are one."""
        now = monotonic()
        wanted = {info.name: self._as_of(info, now) for info in queues if info.counts}
        moved = [name for name, known in wanted.items() if known.read_at < known.changed_at + SETTLED_AFTER]
        prefix = self._client.settings.prefix
        shards = await all_shards(self._client, [QueueKeys.of(prefix, name) for name in moved])
        replies = iter(await self._client.link.call_all([ops.read_runs(keys) for _, each in shards for keys in each]))
        for name, each in shards:
            totals: Counter[str] = Counter()
            for reply in islice(replies, len(each)):
                totals.update(reply)
            wanted[name] = _Known(wanted[name].counts, wanted[name].changed_at, now, totals)
        self._known = wanted
        return {name: known.totals for name, known in wanted.items() if known.totals}

    def _as_of(self, info: QueueInfo, now: float) -> _Known:
        known = self._known.get(info.name)
        if known is not None and known.counts == info.counts:
            return known
        return _Known(info.counts, now, float("-inf"), {})
