"""The page of the server: what it reports of itself, judged by what worqr needs. It is read when the page is opened."""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio.to_thread
from starlette.responses import Response

from worqr.dashboard.reading import with_state
from worqr.dashboard.server_facts import ServerFacts, facts_of
from worqr.dashboard.visit import Visit
from worqr.inside import client_of

TIMEOUT: Final = 2.0
"""Seconds for each reply of a server."""


async def page(visit: Visit) -> Response:
    """The server, or each primary of a cluster."""
    servers, _ = await with_state(visit, partial(_servers, visit))
    return visit.page("server.html", live="", servers=servers)


async def _servers(visit: Visit) -> list[ServerFacts]:
    async def read(_before: object) -> list[ServerFacts]:
        link = client_of(visit.mesh).link
        reports = await anyio.to_thread.run_sync(link.server_reports, TIMEOUT, abandon_on_cancel=True)
        return [facts_of(report) for report in reports]

    return await visit.looks.get("server", read)
