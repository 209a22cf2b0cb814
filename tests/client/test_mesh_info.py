"""The mesh as a whole: how many requests its lists take. What they list is in test_mesh and in tests/client/test_fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from worqr.link.live_connection import LiveConnection


@contextmanager
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The names of the scripts of each batch that this process sends in the block: a batch is one round trip."""
    sent: list[list[str]] = []
    send = LiveConnection.send

    def noting(self: LiveConnection, batch: Any, now: float) -> Any:
        sent.append([request.call.script.name for request in batch])
        return send(self, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(LiveConnection, "send", noting)
        yield sent


@pytest.mark.leaves("{hot*")
async def test_all_queues_are_read_in_few_round_trips(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh.connect():
        for n in range(300):
            await mesh.queue(f"q{n:03}").enqueue(b"x")
        hot = mesh.queue("hot", shards=4)
        await hot.enqueue(*(b"%d" % n for n in range(8)))
        with batches(monkeypatch) as sent:
            found = await mesh.queues()
        assert [(info.name, info.waiting) for info in found] == [("hot", 8), *((f"q{n:03}", 1) for n in range(300))]
        assert len([names for names in sent if "inspect" in names]) == 1
        assert sum(names.count("inspect") for names in sent) == 304
        for info in found:
            await mesh.queue(info.name).delete()
