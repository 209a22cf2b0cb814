"""The page of all failed tasks: the newest error of each queue, and on demand the types of errors in all queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.responses import Response

from worqr.dashboard.batches import gathered, pair, unless_refused
from worqr.dashboard.graphs import DAY
from worqr.dashboard.histories import read_sparklines
from worqr.dashboard.reading import QUEUES_OF_RUNNING, look
from worqr.dashboard.state import MeshState
from worqr.dashboard.visit import Visit
from worqr.records import Failed, QueueInfo

MOST_QUEUES: Final = QUEUES_OF_RUNNING
"""Queues whose records are read for the page."""
MOST_COUNTED: Final = 20_000
"""Records that one page counts by the type of their error: 1,000 of them are a request."""
MOST_TYPES: Final = 50


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """How many records have which type of error, by queue. Rows and columns are sorted, those with the most records first."""

    queues: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[int]]]
    """The type of the error, its sum, and its number in each queue."""
    types_left_out: int
    not_counted: Sequence[str]
    """Queues with too many records to count on this page."""


async def failed(visit: Visit) -> Response:
    """The queues with dead-letter records, the newest record of each, and their error types if the viewer asks for them."""
    state = await look(visit)
    found = failing_queues(state)
    shown = found[:MOST_QUEUES]

    async def newest(name: str) -> tuple[list[Failed], str]:
        return await unless_refused(partial(visit.mesh.queue(name).failed.list, 1), list[Failed]())

    newests, sparks = await pair(
        partial(gathered, [partial(newest, info.name) for info in shown]),
        partial(read_sparklines, visit, [info.name for info in shown], DAY, "failed", "Failed"),
    )
    counting = visit.text("count") == "errors"
    return visit.page(
        "failed.html",
        live=visit.link("/live", view="failed"),
        found=list(zip(shown, newests, strict=True)),
        sparks=sparks,
        left_out=len(found) - len(shown),
        errors=await count_errors(visit, shown) if counting else None,
    )


def failing_queues(state: MeshState) -> list[QueueInfo]:
    """Return the queues with dead-letter records, those with the most first."""
    found = [info for info in state.queues if info.failed or info.broken]
    return sorted(found, key=lambda info: (-(info.failed + info.broken), info.name))


async def count_errors(visit: Visit, queues: Sequence[QueueInfo]) -> ErrorTable:
    """Count the records of these queues by the type of their error, until the page has counted enough."""
    left, names, not_counted = MOST_COUNTED, list[str](), list[str]()
    for info in sorted(queues, key=lambda info: info.failed):
        if info.failed and info.failed <= left:
            left -= info.failed
            names.append(info.name)
        elif info.failed:
            not_counted.append(info.name)
    counts = await gathered([visit.mesh.queue(name).failed.errors for name in names])
    return error_table(dict(zip(names, counts, strict=True)), not_counted)


def error_table(counts: Mapping[str, Mapping[str, int]], not_counted: Sequence[str] = ()) -> ErrorTable:
    """Return the table of the counts of each queue."""
    by_queue = {name: found for name, found in counts.items() if found}
    queues = sorted(by_queue, key=lambda name: (-sum(by_queue[name].values()), name))
    sums: dict[str, int] = {}
    for found in by_queue.values():
        for error, number in found.items():
            sums[error] = sums.get(error, 0) + number
    errors = sorted(sums, key=lambda error: (-sums[error], error))
    rows = [(error, sums[error], [by_queue[name].get(error, 0) for name in queues]) for error in errors[:MOST_TYPES]]
    return ErrorTable(queues, rows, len(errors) - len(rows), not_counted)
