"""The page of the log of the mesh: what has happened, and what operators did."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from starlette.responses import Response

from worqr.dashboard.looks import FRESH
from worqr.dashboard.reading import start_of_page, with_state
from worqr.dashboard.visit import Visit
from worqr.mesh_records import LogEntry

PAGE: Final = 100
"""Entries of one page."""
MOST: Final = 1000
"""Entries that are read, the newest: as many as one request returns."""


async def page(visit: Visit) -> Response:
    """One page of the log, newest first, filtered by kind, queue and person."""
    entries, _ = await with_state(visit, partial(entries_of, visit))
    chosen, found = _chosen(visit), _matching(visit, entries)
    start = start_of_page(visit, PAGE)
    return visit.page(
        "log.html",
        live=visit.link("/live", view="log"),
        found=found[start : start + PAGE],
        total=len(found),
        start=start,
        size=PAGE,
        chosen=chosen,
        kinds=sorted(({entry.kind for entry in entries} | {chosen["kind"]}) - {""}),
        people=sorted(({entry.who for entry in entries} | {chosen["who"]}) - {""}),
        cut=len(entries) == MOST,
    )


async def chosen_entries(visit: Visit) -> list[LogEntry]:
    """Return the entries that match the filter of the address."""
    return _matching(visit, await entries_of(visit))


def _chosen(visit: Visit) -> dict[str, str]:
    return {name: visit.text(name).strip() for name in ("kind", "queue", "who")}


def _matching(visit: Visit, entries: Iterable[LogEntry]) -> list[LogEntry]:
    chosen = _chosen(visit)
    return [entry for entry in entries if all(getattr(entry, name) == value for name, value in chosen.items() if value)]


async def entries_of(visit: Visit, within: float = FRESH, *, spare: bool = False) -> list[LogEntry]:
    """Return the newest entries that this viewer may see, the newest first.

    A viewer who does not see all queues sees only what is about those that they see.
    """

    async def read(_before: list[LogEntry] | None) -> list[LogEntry]:
        return (await visit.mesh.log(MOST))[::-1]

    entries = await visit.looks.get("log", read, within=within, spare=spare)
    if visit.viewer.sees_all:
        return entries
    return [entry for entry in entries if entry.queue and visit.viewer.sees(entry.queue)]
