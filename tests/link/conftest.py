"""Links that are closed with their test, and whose threads must be gone then."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.link.scripts import until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.link import Link, LinkSettings, TrioDriver

LinkTo = Callable[..., Awaitable[Link]]

NEVER_SILENT = dict.fromkeys(("connect_timeout", "socket_timeout", "pong_timeout"), 10 * PATIENCE)
"""Settings of a link that waits for a server, or a machine, that stands still: it makes no other connection."""


@pytest.fixture
async def link_to() -> AsyncIterator[LinkTo]:
    """`await link_to(url, ready=True, **settings)`: a started link."""
    links: list[Link] = []

    async def open_link(url: str, *, ready: bool = True, **settings: Any) -> Link:
        link = Link(LinkSettings(url, app="test", **settings), TrioDriver())
        links.append(link)
        link.start()
        if ready:
            await link.wait_ready()
        return link

    yield open_link
    for link in links:
        link.close()
    kinds = (
        "worqr-link",
        "worqr-subscriptions",
        "worqr-heartbeat",
        "worqr-log_thread",
        "worqr-sentinel",
        "worqr-topology",
    )
    await until(lambda: not [t.name for t in threading.enumerate() if t.name in kinds], what="threads that end")


@pytest.fixture
async def link(link_to: LinkTo, server: Server) -> Link:
    """A link to the server that many tests share."""
    return await link_to(server.url, **NEVER_SILENT)


@pytest.fixture
async def own_link(link_to: LinkTo, own_server: Server) -> Link:
    """A link to a server of the test's own."""
    return await link_to(own_server.url, **NEVER_SILENT)


@pytest.fixture
async def proxied(link_to: LinkTo, proxy: FaultProxy) -> Link:
    """A link to a server behind a proxy."""
    return await link_to(proxy.url, **NEVER_SILENT)
