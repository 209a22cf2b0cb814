"""Links that are closed with their test, and whose threads must be gone then."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.link.scripts import until
from worqr.link import Link, LinkSettings, TrioDriver

LinkTo = Callable[..., Awaitable[Link]]


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
