"""The server's URL: every part is read, every mistake is named, no password is ever shown."""

from __future__ import annotations

import math

import pytest

from worqr.errors import UsageError
from worqr.link import Address, LinkSettings
from worqr.link.settings import Endpoint


def test_every_part_of_a_url_is_read() -> None:
    address = Address.parse("redis://ada:s%40cret@db.example.org:6380/3")
    assert (address.kind, address.host, address.port, address.db) == ("tcp", "db.example.org", 6380, 3)
    assert (address.username, address.password) == ("ada", "s@cret")


def test_a_bare_url_means_the_default_port_and_database() -> None:
    address = Address.parse("redis://")
    assert (address.host, address.port, address.db, address.password) == ("localhost", 6379, 0, "")


def test_a_socket_with_a_database() -> None:
    address = Address.parse("unix:///run/redis.sock?db=2")
    assert (address.kind, address.path, address.db) == ("unix", "/run/redis.sock", 2)


def test_tls_takes_its_options() -> None:
    address = Address.parse("rediss://h?ssl_ca_certs=/etc/ca.pem&db=1")
    assert (address.kind, address.tls, address.db) == ("tls", (("ssl_ca_certs", "/etc/ca.pem"),), 1)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://localhost", "redis://, rediss://, unix://"),
        ("localhost:6379", "redis://, rediss://, unix://"),
        ("redis://localhost/abc", "'abc'"),
        ("redis://localhost?db=x", "'x'"),
        ("redis://localhost:70000", "port"),
        ("redis://localhost?timout=5", "'timout'"),
        ("redis://localhost?ssl_ca_certs=/x", "'ssl_ca_certs'"),
        ("unix://", "socket"),
        ("redis://a,b", "redis+cluster://"),
        ("redis+cluster://a,,b", "empty"),
        ("redis+cluster://a:x,b", "port"),
        ("redis+cluster://a/3", "database 0 only"),
        ("redis+cluster://a?sentinel_password=x", "'sentinel_password'"),
        ("redis+sentinel://a", "names no service"),
        ("redis+sentinel://a/main/x", "'x'"),
    ],
)
def test_a_bad_url_names_what_is_wrong(url: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        Address.parse(url)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@h/1",
        "redis://u:hunter2@h:99999",
        "redis://u:hun/hunter2@h",
        "redis://u:hun?hunter2@h",
        "redis://u:hun#hunter2@h",
        "redis://u:hun@hunter2@h",
        "redis://u:hunter2",
        "http://u:hunter2@h",
        "u:hunter2@h",
        "redis://h?password=hunter2",
        "unix://u:hunter2@/s?db=1",
        "redis://[::1]:hunter2",
        "redis+cluster://u:hunter2@a,b",
        "redis+cluster://a:1,u:hunter2",
        "redis+sentinel://u:hunter2@a,b/main?sentinel_password=hunter2",
        "redis://hunter2@h",
        "redis://hunter2@h/abc",
        "redis://hunter2@h:x",
        "redis://hunter2@h?timout=5",
        "redis://hunter2:@h/0",
        "redis://hunter2:x@h/abc",
        "redis://hunter2/x@h",
        "redis://x@hunter2@h",
        "redis://u:a@b:hunter2",
        "http://hunter2@h",
        "hunter2@h",
        "unix://hunter2@/s?db=x",
        "redis+cluster://hunter2@a,,b",
        "redis+cluster://hunter2@a/3",
        "redis+sentinel://hunter2@a",
        "redis://u:987654321",
    ],
)
def test_no_password_is_shown_whatever_the_url(url: str) -> None:
    shown = ""
    try:
        shown = f"{LinkSettings(url)!r} {Address.parse(url).redacted}"
    except UsageError as error:
        shown = f"{error} {error.__cause__} {error.__suppress_context__ or error.__context__}"
    assert "hunter2" not in shown
    assert "987654321" not in shown


def test_a_user_is_shown_who_has_a_password() -> None:
    assert Address.parse("redis://ada:secret@h/1").redacted == "redis://ada:***@h/1"
    assert Address.parse("redis://:secret@h/1").redacted == "redis://:***@h/1"
    assert Address.parse("redis://ada@h/1").redacted == "redis://***@h/1"


def test_a_cluster_has_several_hosts() -> None:
    address = Address.parse("rediss+cluster://ada:s%40cret@a:7000,[::1]:7001,c?ssl_ca_certs=/etc/ca.pem")
    assert (address.kind, address.topology) == ("tls", "cluster")
    assert address.seeds == (Endpoint("a", 7000), Endpoint("::1", 7001), Endpoint("c", 6379))
    assert (address.username, address.password, address.db) == ("ada", "s@cret", 0)
    assert [str(seed) for seed in address.seeds] == ["a:7000", "[::1]:7001", "c:6379"]
    assert address.redacted == "rediss+cluster://ada:***@a:7000,[::1]:7001,c"


def test_sentinels_know_a_service() -> None:
    address = Address.parse("redis+sentinel://a,b:26380/main/2?sentinel_username=s&sentinel_password=p%26q")
    assert (address.kind, address.topology, address.service, address.db) == ("tcp", "sentinel", "main", 2)
    assert address.seeds == (Endpoint("a", 26379), Endpoint("b", 26380))
    assert (address.sentinel_username, address.sentinel_password) == ("s", "p&q")
    assert Address.parse("redis+sentinel://a/main").db == 0
    assert address.redacted == "redis+sentinel://a,b:26380/main/2"


def test_an_address_of_version_6_keeps_its_port() -> None:
    address = Address.parse("redis://[::1]:6380/1")
    assert (address.host, address.port, address.redacted) == ("::1", 6380, "redis://[::1]:6380/1")


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_times_are_positive(bad: float) -> None:
    with pytest.raises(UsageError, match="patience"):
        LinkSettings("redis://", patience=bad)
    with pytest.raises(UsageError, match="ping_every"):
        LinkSettings("redis://", ping_every=math.inf)


def test_a_client_name_has_no_blanks() -> None:
    assert LinkSettings("redis://", app="my app\n").client_name("data") == "worqr:my-app-:data"
    assert LinkSettings("redis://", prefix="mesh").client_name("beat") == "worqr:mesh:beat"
