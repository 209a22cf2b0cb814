"""``mesh.connection_events()``: told when a real server is stopped, and when it is there again."""

from __future__ import annotations

import asyncio

import pytest
import trio

import worqr
from tests.peer.tools import Runs, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.link.log_thread import Change, Watchers


async def test_a_lost_server_and_its_return_are_told(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.tcp_url, prefix=prefix, patience=PATIENCE)
    async with mesh.connect(), mesh.connection_events() as events:
        with trio.fail_after(PATIENCE):
            for _ in range(2):
                own_server.stop()
                lost = await anext(events)
                own_server.start()
                back = await anext(events)
                assert (lost.type, back.type) == ("lost", "back")
                assert lost.server == back.server and own_server.tcp_url.startswith(lost.server.rpartition("/")[0])
                assert lost.cause == back.cause != ""
                assert lost.seconds == 0 < back.seconds
        assert await mesh.queue("Q1").count() == 0


async def test_a_peer_hears_of_its_own_connection(own_server: Server, prefix: str) -> None:
    mesh, runs = worqr.Mesh(own_server.tcp_url, prefix=prefix, patience=PATIENCE), Runs()
    async with serving(mesh, "Q1", runs), mesh.connection_events() as events:
        with trio.fail_after(PATIENCE):
            own_server.stop()
            assert (await anext(events)).type == "lost"
            own_server.start()
            assert (await anext(events)).type == "back"


async def test_who_begins_to_listen_during_an_outage_is_told_of_it(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.tcp_url, prefix=prefix, patience=PATIENCE)
    async with mesh.connect():
        async with mesh.connection_events() as events:
            own_server.stop()
            with trio.fail_after(PATIENCE):
                first = await anext(events)
        assert [event async for event in events] == []  # it has ended with its block
        async with mesh.connection_events() as events:
            with trio.fail_after(PATIENCE):
                again = await anext(events)
                assert (again.type, again.server, again.cause) == ("lost", first.server, first.cause)
                assert again.seconds > 0
                own_server.start()
                assert (await anext(events)).type == "back"


def test_under_asyncio_too(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.tcp_url, prefix=prefix, patience=PATIENCE)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), mesh.connect(), mesh.connection_events() as events:
            own_server.stop()
            assert (await anext(events)).type == "lost"
            own_server.start()
            assert (await anext(events)).type == "back"

    asyncio.run(main())


async def test_outside_of_a_connection_it_is_a_usage_error() -> None:
    with pytest.raises(worqr.UsageError, match="not connected here"):
        async with worqr.Mesh().connection_events():
            pytest.fail("nothing is connected")


def test_each_loss_is_told_once_and_followed_by_one_return() -> None:
    watchers, heard = Watchers(), list[Change]()
    watchers.back(1)  # it was not lost
    watchers.lost(1, "node-1", "closed")
    watchers.add(heard.append)
    watchers.lost(2, "node-2", "refused")
    for _ in range(2):
        watchers.back(1)
    watchers.back(2)
    watchers.remove(heard.append)
    watchers.lost(1, "node-1", "closed")
    told = [("lost", "node-1"), ("lost", "node-2"), ("back", "node-1"), ("back", "node-2")]
    assert [change[:2] for change in heard] == told
    assert [change[2] for change in heard] == ["closed", "refused", "closed", "refused"]
