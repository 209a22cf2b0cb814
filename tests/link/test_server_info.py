"""Which servers are good enough, by what they say of themselves."""

from __future__ import annotations

import pytest

from worqr.errors import RefusedByServer, WrongVersion
from worqr.link.connector import read_server_info


def info(**fields: str) -> list[bytes]:
    return [b"# Server\r\n" + b"\r\n".join(f"{name}:{value}".encode() for name, value in fields.items())]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"redis_version": "7.0.15"}, ("Redis", "7.0.15")),
        ({"redis_version": "8.2.1"}, ("Redis", "8.2.1")),
        ({"redis_version": "255.255.255"}, ("Redis", "255.255.255")),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2", "server_name": "valkey"}, ("Valkey", "9.1.2")),
        ({"redis_version": "7.2.4", "server_name": "valkey"}, ("Valkey", "7.2.4")),
    ],
)
def test_a_server_that_is_new_enough(fields: dict[str, str], found: tuple[str, str]) -> None:
    facts = read_server_info(info(**fields), "redis://h")
    assert (facts.server, facts.version) == found


@pytest.mark.parametrize("version", ["6.2.14", "5.0", "6.9.9"])
def test_a_server_that_is_too_old_is_named_with_its_version(version: str) -> None:
    with pytest.raises(WrongVersion, match=rf"Redis {version}; worqr needs Redis 7.0 or Valkey 7.2"):
        read_server_info(info(redis_version=version), "redis://h")


@pytest.mark.parametrize(
    "fields",
    [
        {"redis_version": "7.0.15", "redis_mode": "sentinel"},
        {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2", "server_mode": "sentinel"},
    ],
)
def test_a_sentinel_is_told_apart(fields: dict[str, str]) -> None:
    with pytest.raises(RefusedByServer, match=r"is a Sentinel.*write redis\+sentinel://"):
        read_server_info(info(**fields), "redis://h")


def test_a_replica_names_its_primary() -> None:
    fields = {"redis_version": "7.0.15", "role": "slave", "master_host": "::1", "master_port": "7000"}
    facts = read_server_info(info(**fields), "redis://h")
    assert (facts.role, facts.primary) == ("slave", "::1:7000")
    for state in ("waiting-for-sync", "failover-in-progress"):  # which may be aborted: then it is the primary again
        assert read_server_info(info(**fields, master_failover_state=state), "redis://h").primary == ""


def test_a_user_who_may_not_ask_is_let_through() -> None:
    facts = read_server_info([Exception("NOPERM")], "redis://h")
    assert (facts.version, facts.run_id, facts.evicts) == ("", "", False)


@pytest.mark.parametrize(("policy", "evicts"), [("noeviction", False), ("allkeys-lru", True), ("volatile-ttl", True)])
def test_a_policy_that_throws_tasks_away_is_seen(policy: str, evicts: bool) -> None:
    assert read_server_info(info(redis_version="7.4.0", maxmemory_policy=policy), "h").evicts == evicts
