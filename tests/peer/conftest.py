"""Meshes on the tests' server: most tests have two peers in one process, each with a link of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

import worqr
from tests.support.servers import Server
from worqr.peer.leader.scanner import Scanner

NewMesh = Callable[..., worqr.Mesh]


@pytest.fixture
def new_mesh(server: Server, prefix: str) -> NewMesh:
    """`new_mesh(patience=1, ...)`: a mesh under the test's prefix; several of them share nothing but the server."""

    def make(**settings: Any) -> worqr.Mesh:
        return worqr.Mesh(**{"url": server.url, "prefix": prefix, "patience": 10, **settings})

    return make


@pytest.fixture
def without_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No leader scans the queues: everything that happens is the effect of a message.

    So a lost message shows in an event that never comes, and not in a longer time.
    """

    async def scan_once(_scanner: Scanner) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Scanner, "scan_once", scan_once)


@pytest.fixture
def without_periodic_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader scans only when it may have missed hints about moments, as at the start of its lease.

    For tests in which something happens at a moment: a hint that is sent before there is a leader is lost.
    """
    scan_once, rescan, requested = Scanner.scan_once, Scanner.rescan, set[Scanner]()

    def note(scanner: Scanner) -> None:
        requested.add(scanner)
        rescan(scanner)

    async def scan_on_request(scanner: Scanner) -> None:
        await trio.lowlevel.checkpoint()
        if scanner in requested:
            requested.discard(scanner)
            await scan_once(scanner)

    monkeypatch.setattr(Scanner, "rescan", note)
    monkeypatch.setattr(Scanner, "scan_once", scan_on_request)


@pytest.fixture
def mesh(new_mesh: NewMesh) -> worqr.Mesh:
    """A mesh under the test's prefix."""
    return new_mesh()


@pytest.fixture
def other(new_mesh: NewMesh) -> worqr.Mesh:
    """The same mesh as another process would see it."""
    return new_mesh()
