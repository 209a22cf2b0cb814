"""A new connection loads the scripts that the server does not have, and no others."""

from __future__ import annotations

from collections.abc import Callable

from tests.link.conftest import LinkTo
from tests.link.scripts import ECHO_CALL
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.lua import all_scripts

TEXTS = {each.sha: each for each in all_scripts()}


def loaded(proxy: FaultProxy) -> int:
    return len([each for each in proxy.requests if each.words[:2] == (b"SCRIPT", b"LOAD")])


async def test_a_second_connection_loads_nothing(
    own_server: Server, proxy_to: Callable[[Server], FaultProxy], link_to: LinkTo
) -> None:
    """Every peer of a fleet connects again after a failover, and a script is 8 KB."""
    proxy = proxy_to(own_server)
    first = await link_to(proxy.url)
    assert loaded(proxy) == len(TEXTS)
    await link_to(proxy.url)
    assert loaded(proxy) == len(TEXTS)
    proxy.cut("data")
    assert await first.call(ECHO_CALL) == "a"
    assert first.connections == 2
    assert loaded(proxy) == len(TEXTS) + 1, "the echo, which is none of worqr's"


async def test_only_what_is_missing_is_loaded(
    own_server: Server, proxy_to: Callable[[Server], FaultProxy], link_to: LinkTo
) -> None:
    proxy = proxy_to(own_server)
    there = list(TEXTS.values())[3:]
    with own_server.client() as client:
        for script in there:
            client.script_load(script.source)
        await link_to(proxy.url)
        assert loaded(proxy) == 3
        assert all(client.script_exists(*(script.sha for script in all_scripts())))


async def test_a_user_who_may_not_ask_loads_everything(
    own_server: Server, proxy_to: Callable[[Server], FaultProxy], link_to: LinkTo
) -> None:
    proxy = proxy_to(own_server)
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-script|exists")
        url = proxy.url.replace("redis://", "redis://bob:pw@")
        await link_to(url)
        link = await link_to(url)
        assert loaded(proxy) == 2 * len(TEXTS)
        assert await link.call(ECHO_CALL) == "a"
