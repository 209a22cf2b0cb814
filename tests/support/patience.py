"""How long tests wait for an event. It does not depend on the machine's speed: a test that waits in vain fails in any case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import trio

import worqr

PATIENCE = 60.0
"""Seconds. CI machines are slow, shared, and stand still for a second now and then."""


async def until(condition: Callable[[], object], within: float = PATIENCE, what: str = "") -> None:
    """Wait for something that makes no event: a line in a log, a counter of another process."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what or condition}"
        await trio.sleep(0.005)


def wait_until(condition: Callable[[], object], within: float = PATIENCE, what: str = "") -> None:
    """Wait like `until`, in a thread without a loop."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what or condition}"
        time.sleep(0.005)


def have_patience(mesh: worqr.Mesh, seconds: float) -> None:
    """Give the calls of a connected mesh this patience. If it is short, a machine that stands still may need more to connect."""
    link = mesh._client.link
    link.settings = replace(link.settings, patience=seconds)
