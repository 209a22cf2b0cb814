"""The page of all failed tasks: the newest error of each queue, and on demand the types of errors in all queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.responses import Response

from worqr.client.queue import queue_named
from worqr.dashboard.batches import gathered, unless_refused
from worqr.dashboard.graphs import DAY, read_sparklines
from worqr.dashboard.reading import QUEUES_OF_RUNNING, look
from worqr.dashboard.records_page import read_counts
from worqr.dashboard.state import MeshState
from worqr.dashboard.visit import Visit
from worqr.mesh_records import QueueInfo
from worqr.records import Failed

MOST_QUEUES: Final = QUEUES_OF_RUNNING
"""Queues whose records are read for the page."""
MOST_TYPES: Final = 50


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """How many records have which type of error, by queue. Rows and columns are sorted, those with the most records first."""

    queues: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[int]]]
    """The type of the error, its sum, and its number in each queue."""
    types_left_out: int


async def failed(visit: Visit) -> Response:
    """The queues with dead-letter records, the newest record of each, and their error types if the viewer asks for them."""
    state = await look(visit)
    found = failing_queues(state)
    shown = found[:MOST_QUEUES]

    async def newest(name: str) -> tuple[list[Failed], str]:
        return await unless_refused(partial(queue_named(visit.mesh.queue, name).failed.list, 1), list[Failed]())

    names = [info.name for info in shown]
    calls: list[Callable[[], Awaitable[Any]]] = [partial(newest, name) for name in names]
    calls.append(partial(read_sparklines, visit, names, DAY, "failed", "Failed"))
    if visit.text("count") == "errors":
        calls.append(partial(read_counts, visit, names_to_count(state), "failed"))
    found_all = await gathered(calls)  # all of them at once, so that they are one batch
    newests, (sparks, *counted) = found_all[: len(names)], found_all[len(names) :]
    return visit.page(
        "failed.html",
        live=visit.link("/live", view="failed", count=visit.text("count")),
        found=list(zip(shown, newests, strict=True)),
        sparks=sparks,
        left_out=len(found) - len(shown),
        errors=error_table(counted[0].counts) if counted else None,
        counted=counted[0] if counted else None,
        total=sum(info.failed for info in shown),
    )


def names_to_count(state: MeshState) -> list[str]:
    """Return the queues whose records the page counts."""
    return [info.name for info in failing_queues(state)[:MOST_QUEUES] if info.failed]


def failing_queues(state: MeshState) -> list[QueueInfo]:
    """Return the queues with dead-letter records, those with the most first."""
    found = [info for info in state.queues if info.failed or info.broken]
    return sorted(found, key=lambda info: (-(info.failed + info.broken), info.name))


def error_table(counts: Mapping[str, Mapping[str, int]]) -> ErrorTable:
    """Return the table of the counts of each queue."""
    by_queue = {name: found for name, found in counts.items() if found}
    queues = sorted(by_queue, key=lambda name: (-sum(by_queue[name].values()), name))
    sums: dict[str, int] = {}
    for found in by_queue.values():
        for error, number in found.items():
            sums[error] = sums.get(error, 0) + number
    errors = sorted(sums, key=lambda error: (-sums[error], error))
    rows = [(error, sums[error], [by_queue[name].get(error, 0) for name in queues]) for error in errors[:MOST_TYPES]]
    return ErrorTable(queues, rows, len(errors) - len(rows))
