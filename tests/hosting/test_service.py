"""A mesh that runs as a program: what it does before it has joined. `tests/cli/test_run.py` has the processes."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

import worqr
from worqr.errors import Unavailable
from worqr.hosting import service
from worqr.inside import peers_of


async def test_a_join_that_fails_at_once_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, joins = worqr.Mesh(), list[float]()

    def join(options: object) -> object:
        joins.append(trio.current_time())
        raise Unavailable("the host name nohost.invalid could not be resolved", sent=False)

    monkeypatch.setattr(peers_of(mesh), "joined", join)
    caplog.set_level(logging.WARNING, "worqr.service")
    with trio.move_on_after(3.5 * service.RETRY_AFTER):
        await service.Service(peers_of(mesh), {})._run()
    assert len(joins) == 4
    assert len(caplog.records) == 4
