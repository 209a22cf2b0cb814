"""Reads the histories of queues for the pages that draw them. Pages that are opened within a moment share what was read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from worqr.client.history import read_histories
from worqr.client.queue import queue_named
from worqr.dashboard.graphs import RANGES, Graphs, Sparkline, graphs_of, sparkline_of
from worqr.dashboard.visit import Visit
from worqr.errors import RefusedByServer
from worqr.inside import client_of
from worqr.keys import QueueKeys

FRESH: Final = 30.0
"""Seconds for which pages use the same history: it gets a new record once a minute."""


async def read_graphs(visit: Visit, queue: str, span: str) -> Graphs | None:
    """Return the graphs of a queue for one of `RANGES`; None if nothing is known of that time."""
    minutes, size = RANGES[span]

    async def read(_before: object) -> Graphs | None:
        try:
            return graphs_of(await queue_named(visit.mesh.queue, queue).history(minutes), size)
        except RefusedByServer:  # the dashboard's user may read the queue, but not its history
            return None

    return await visit.looks.get(("graphs", queue, span), read, within=FRESH)


async def read_sparklines(
    visit: Visit, queues: Iterable[str], minutes: int, counter: str, what: str
) -> dict[str, Sparkline]:
    """Return the sparklines of those queues of which something is known. They are read in one batch.

    Args:
        visit: the request.
        queues: the names of the queues, as many as a page has rows.
        minutes: how long a time the sparklines show.
        counter: the total whose rate they show.
        what: the same in words.
    """
    names = sorted(queues)

    async def read(_before: object) -> dict[str, Sparkline]:
        keys = [QueueKeys.of(visit.mesh.prefix, name) for name in names]
        histories = await read_histories(client_of(visit.mesh), keys, minutes)
        drawn = {name: sparkline_of(each, counter, what) for name, each in zip(names, histories, strict=True) if each}
        return {name: spark for name, spark in drawn.items() if spark is not None}

    return await visit.looks.get(("sparks", tuple(names), counter, minutes), read, within=FRESH)
