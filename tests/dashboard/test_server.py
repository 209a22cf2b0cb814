"""The page of the server: what INFO means for worqr, and what a user may see who may not ask."""

from __future__ import annotations

import re

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.support.servers import Server
from worqr import ops
from worqr.dashboard import reader
from worqr.dashboard.server_page import Fact, facts_of
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.link import ServerReport
from worqr.link.link import MOST_CLIENTS

NOW = 1_700_000_000
WELL = {
    "redis_version": "8.2.2",
    "uptime_in_seconds": "90000",
    "used_memory": str(50 * 2**20),
    "maxmemory": str(2**30),
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "rdb_last_save_time": str(NOW - 60),
    "server_time_usec": str(NOW * 10**6),
    "role": "master",
    "connected_slaves": "1",
    "slave0": "ip=10.0.0.2,port=6379,state=online,offset=7,lag=1",
    "connected_clients": "12",
    "maxclients": "10000",
}


def facts(**changed: str) -> dict[str, Fact]:
    return {fact.name: fact for fact in facts_of(ServerReport("redis://a", {**WELL, **changed})).facts}


def test_a_server_as_it_should_be() -> None:
    found = facts_of(ServerReport("redis://a", WELL))
    assert found.level == "good"
    assert {fact.name: fact.value for fact in found.facts if fact.level == "good"} == {
        "Version": "Redis 8.2.2",
        "Memory": "50 MiB of 1.0 GiB (5%)",
        "Eviction": "noeviction",
        "Persistence": "append-only file",
        "Replica": "10.0.0.2:6379, in step",
        "Connections": "12 of 10,000",
    }
    assert facts()["Last snapshot"].value == "1 min ago"
    assert not [fact.advice for fact in found.facts if fact.advice]


@pytest.mark.parametrize(
    ("changed", "name", "level", "words"),
    [
        ({"redis_version": "7.0.15"}, "Version", "warn", "CVE-2025-49844"),
        ({"redis_version": "7.4.5"}, "Version", "warn", "7.4.6"),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, "Version", "warn", "8.1.4"),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.0"}, "Version", "good", ""),
        ({"redis_version": "managed"}, "Version", "", ""),
        ({"uptime_in_seconds": "30"}, "Running for", "warn", "started"),
        ({"used_memory": str(2**30)}, "Memory", "bad", "refused"),
        ({"used_memory": str(int(0.9 * 2**30))}, "Memory", "warn", "soon"),
        ({"maxmemory": "0"}, "Memory", "", "maxmemory"),
        ({"used_memory": ""}, "Memory", "", ""),
        ({"used_memory": str(2**28), "mem_fragmentation_ratio": "2.51"}, "Fragmentation", "warn", "activedefrag"),
        ({"maxmemory_policy": "allkeys-lru"}, "Eviction", "bad", "deletes tasks"),
        ({"maxmemory_policy": ""}, "Eviction", "", ""),
        ({"evicted_keys": "3"}, "Evicted keys", "bad", "deleted"),
        ({"loading": "1"}, "Loading", "warn", "disk"),
        ({"aof_enabled": "0"}, "Persistence", "warn", "appendonly"),
        ({"aof_last_write_status": "err"}, "Persistence", "bad", "disk"),
        ({"rdb_last_bgsave_status": "err"}, "Last snapshot", "bad", "MISCONF"),
        ({"connected_slaves": "0"}, "Replicas", "", "lost"),
        ({"slave0": "ip=a,port=1,state=wait_bgsave,lag=0"}, "Replica", "warn", "complete"),
        ({"slave0": "ip=a,port=1,state=online,lag=75"}, "Replica", "warn", "failover"),
        ({"slave0": "?"}, "Replica", "warn", "complete"),
        ({"role": "slave"}, "Role", "bad", "primary"),
        ({"connected_clients": "9000"}, "Connections", "warn", "maxclients"),
        ({"rejected_connections": "2"}, "Refused connections", "warn", "maxclients"),
    ],
)
def test_what_is_not_as_it_should_be_says_what_to_do(
    changed: dict[str, str], name: str, level: str, words: str
) -> None:
    fact = facts(**changed)[name]
    assert fact.level == level
    assert words in f"{fact.value} {fact.advice}"
    assert bool(words) == bool(fact.advice)


def test_hidden_values_are_no_problem() -> None:
    found = facts_of(ServerReport("redis://a", {"redis_version": "8.2.2"}))
    assert found.level == "good"
    assert [fact.value for fact in found.facts][1:] == ["hidden"] * 5


def test_the_names_of_connections_are_added_up() -> None:
    names = {f"app-{n:02}": n + 1 for n in range(20)}
    found = facts_of(ServerReport("redis://a", WELL, {**names, "": 30})).clients
    assert found[:2] == [("without a name", 30), ("app-19", 20)]
    assert found[-1] == ("9 other names", sum(range(1, 10)))


async def test_the_page_of_a_real_server(connected: worqr.Mesh, site: Site, server: Server) -> None:
    page = (await site.get("/server")).text
    with server.client() as client:
        info = client.info()
    assert (info.get("valkey_version") or info["redis_version"]) in page
    for text in ("Memory", "noeviction", "Connections by name", "worqr:dashboard:data", 'aria-current="page">Server'):
        assert text in page, text
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert "The server deletes tasks when its memory is full" in (await Site(connected).get("/server")).text
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    site.viewer = reader("eve", ("mail",))
    assert "worqr:dashboard:data" not in (await site.get("/server")).text  # names tell of other applications


@pytest.mark.parametrize(
    ("without", "shown"), [("info", "This server reports nothing"), ("client|list", "are missing")]
)
async def test_a_refused_command_is_named(
    mesh: worqr.Mesh, server: Server, prefix: str, without: str, shown: str
) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", prefix, "on", ">pw", "~*", "&*", "+@all", f"-{without}")
        try:
            url = re.sub(r"://([^@/]*@)?", f"://{prefix}:pw@", server.url, count=1)
            answer = await Site(mesh, options={"url": url}).get("/server")
            assert answer.status_code == 200
            assert shown in answer.text
            assert re.search(f"NOPERM.*{without}", answer.text)
        finally:
            client.execute_command("ACL", "DELUSER", prefix)


async def test_many_connections_are_not_listed(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_CLIENTS == 2000
    monkeypatch.setattr("worqr.link.link.MOST_CLIENTS", 0)
    page = (await site.get("/server")).text
    assert "Memory" in page
    assert "Connections by name" not in page


async def test_a_server_without_a_reply_is_a_part_of_the_page(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(30):
        monkeypatch.setattr(
            "worqr.link.link.read_server_report", lambda *given: ServerReport("redis://a", problem="no answer")
        )
        page = (await site.get("/server")).text
    assert "This server reports nothing: no answer" in page


async def test_outboxes_are_listed_with_what_needs_attention(connected: worqr.Mesh, site: Site) -> None:
    assert "Outboxes" not in (await site.get("/server")).text
    client, facts = client_of(connected), '{"table":"orders_outbox","rows":12,"oldest":90000,"held":2}'
    await client.ask(ops.lease_outbox(RegistryKeys(connected.prefix), "0c" * 16, "A", 60_000, facts))
    text = (await site.get("/server")).text
    assert re.search(r"orders_outbox.*>12<.*>0<.*>2<.*note", text, re.DOTALL)
