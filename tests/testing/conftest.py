"""A mesh that would connect to nothing, and a bench for it on the tests' server."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

import worqr
from tests.support.servers import Server
from worqr import testing

NOWHERE = "redis://nowhere.invalid"


@pytest.fixture
def mesh() -> worqr.Mesh:
    """The application's own, with the address it has in production."""
    return worqr.Mesh(NOWHERE)


@pytest.fixture
async def bench(mesh: worqr.Mesh, server: Server) -> AsyncGenerator[testing.Bench]:
    """`mesh` on a bench; functions may be declared afterwards. No key is left behind."""
    async with testing.bench(mesh, url=server.url) as bench:
        yield bench
    with server.client() as client:
        assert [key for key in client.scan_iter(count=1000) if b"bench" in key] == []
