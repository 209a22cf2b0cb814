"""A server that cannot work says so with a word: whoever calls waits, or gets one clear error, and the log has two lines."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import trio

from tests.link.conftest import LinkTo
from tests.link.scripts import Outcomes, append, echo, knows_why, lines, script, until
from tests.support.sentinels import raw
from tests.support.servers import Server
from tests.support.troubles import TROUBLES, Trouble, troubled_server
from worqr.command import Command
from worqr.errors import RefusedByServer, Unavailable

pytestmark = pytest.mark.one_server

PEEK = Command(script("peek", "return ARGV[1]", " flags=no-writes"), "t:{Q}", ("x",), lambda reply: reply)
"""To one that writes, a replica says READONLY first."""


@pytest.fixture
def troubled(server_kind: str, trouble: Trouble) -> Iterator[Server]:
    yield from troubled_server(server_kind, trouble)


@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
async def test_what_passes_is_waited_for(
    link_to: LinkTo, troubled: Server, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    link = await link_to(troubled.tcp_url)
    assert await link.call(append("t", "before")) == ["ok", 1, 1, 1]
    await trio.to_thread.run_sync(trouble.begin, troubled)
    waiting = Outcomes()
    link.post(append("t", "meanwhile"), waiting)
    await until(lambda: lines(caplog, "link.lost"))
    await knows_why(link, str(trouble))
    with pytest.raises(Unavailable) as caught:
        await link.call(append("t", "impatient"), patience=0.5)
    assert re.search(str(trouble), str(caught.value)), caught.value
    assert caught.value.sent is not True
    assert not waiting.all
    await trio.to_thread.run_sync(trouble.end, troubled)
    await waiting.wait(1)
    [(reply, error)] = waiting.all
    assert (error, reply[:2]) == (None, ["ok", 2])
    assert troubled.look.lrange("t:{Q}", 0, 1) == [b"before", b"meanwhile"]
    await until(lambda: lines(caplog, "link.back"))
    [lost], [_back] = lines(caplog, "link.lost"), lines(caplog, "link.back")
    assert re.search(f"{trouble}|closed|reset|pipe|refused", lost, re.IGNORECASE), lost


async def test_a_replica_that_has_lost_its_primary_is_waited_for(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    link = await link_to(own_server.url)
    own_server.look.config_set("replica-serve-stale-data", "no")
    raw(own_server, "REPLICAOF", "127.0.0.1", 1)
    outcomes = Outcomes()
    link.post(PEEK, outcomes)
    await until(lambda: lines(caplog, "link.lost"))
    assert "MASTERDOWN" in lines(caplog, "link.lost")[0]
    raw(own_server, "REPLICAOF", "NO", "ONE")
    await outcomes.wait(1)
    assert outcomes.all == [(b"x", None)]
    await until(lambda: lines(caplog, "link.back"))
    assert len(lines(caplog, "link.")) == 2


async def test_a_server_that_executes_no_writes_is_waited_for(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is sent in the pause must not be blamed for the silence."""
    if "paused_actions" not in own_server.look.info("clients"):
        pytest.skip("this server does not say that it is paused")
    link = await link_to(own_server.url, socket_timeout=0.2)
    await link.call(append("t", "before"))
    own_server.look.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    outcomes = Outcomes()
    link.post(append("t", "meanwhile"), outcomes)
    await until(lambda: "executes no writes at the moment (client_pause)" in link._client.outage.cause)
    await trio.sleep(2)
    assert not outcomes.all
    own_server.look.execute_command("CLIENT", "UNPAUSE")
    await outcomes.wait(1)
    [(reply, error)] = outcomes.all
    assert (error, reply[:2]) == (None, ["ok", 2])


async def test_rights_that_were_taken_away_are_named_and_come_back(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    admin = own_server.client()
    admin.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"))
    await link.call(echo("a"))
    admin.execute_command("ACL", "SETUSER", "bob", "-evalsha")
    with pytest.raises(RefusedByServer, match="echo: NOPERM"):
        await link.call(echo("b"))
    admin.execute_command("ACL", "SETUSER", "bob", "+evalsha", "resetkeys", "~others:*")
    with pytest.raises(RefusedByServer, match="echo: NOPERM"):
        await link.call(echo("c"))
    admin.execute_command("ACL", "SETUSER", "bob", "~*", "-rpush")
    with pytest.raises(RefusedByServer, match="append: "):
        await link.call(append("t", "d"))
    admin.execute_command("ACL", "SETUSER", "bob", "+rpush")
    assert (await link.call(append("t", "e")))[:2] == ["ok", 1]
    assert link.connections == 1
    assert not lines(caplog, "link."), "the server is there"


async def test_a_user_who_was_switched_off_is_waited_for(link_to: LinkTo, own_server: Server) -> None:
    admin = own_server.client()
    admin.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"))
    admin.execute_command("ACL", "DELUSER", "bob")  # which ends his connections
    await knows_why(link, "WRONGPASS")
    with pytest.raises(Unavailable, match="WRONGPASS"):
        await link.call(echo("a"), patience=0.5)
    admin.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all")
    assert await link.call(echo("b")) == "b"
