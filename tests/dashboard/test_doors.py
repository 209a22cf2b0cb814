"""The standalone dashboard: who gets in at which address."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_network
from typing import Any

import h2.connection
import h2.events
import httpx
import pytest
import trio
import trio.testing
from hypercorn.protocol.h11 import H11Protocol

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import free_port
from worqr.dashboard import standalone
from worqr.dashboard.standalone import (
    Settings,
    build,
    check_password,
    check_settings,
    hash_password,
    read_passwords,
    token_line,
)
from worqr.errors import UsageError

PASSWORD = "correct horse"
MESH = worqr.Mesh("redis://127.0.0.1:1/0", patience=0.1)
HERE = "http://127.0.0.1:9090"


@pytest.fixture(scope="module")
def line() -> str:
    return f"ada:{hash_password(PASSWORD)}"


async def ask(
    app: Any, path: str, *, method: str = "GET", client: tuple[str, int] = ("127.0.0.1", 5), **options: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=client)
    async with httpx.AsyncClient(transport=transport, base_url=HERE, timeout=PATIENCE) as browser:
        return await browser.request(method, path, **options)


def basic(name: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "ops.example", "192.168.0.1", ""])
def test_an_address_that_others_reach_needs_a_login(host: str, line: str) -> None:
    with pytest.raises(UsageError, match="--password-file"):
        check_settings(Settings(host=host))
    check_settings(Settings(host=host, passwords=line))
    check_settings(Settings(host=host, open_to_all=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_none(host: str) -> None:
    check_settings(Settings(host=host))


def test_contradictions() -> None:
    with pytest.raises(UsageError, match="choose one"):
        check_settings(Settings(passwords="", open_to_all=True))
    with pytest.raises(UsageError, match="belong together"):
        check_settings(Settings(trust_header="X-User"))
    with pytest.raises(UsageError, match="belongs together"):
        check_settings(Settings(proxies=(ip_network("10.0.0.1"),)))


async def test_the_token_works_once() -> None:
    app, address = build(MESH, Settings())
    assert address.startswith(f"{HERE}/login?token=")
    assert len(address.partition("token=")[2]) >= 22  # 128 bits
    assert (await ask(app, "/nothing")).status_code == 401
    assert (await ask(app, "/login?token=wrong")).status_code == 401
    assert (await ask(app, address, headers={"host": "evil.example"})).status_code == 421
    answer = await ask(app, address)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "content-security-policy" in answer.headers
    value = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert (await ask(app, "/nothing", headers=value)).status_code == 404
    assert (await ask(app, address)).status_code == 401
    forged = {"cookie": value["cookie"][:-1] + ("0" if value["cookie"][-1] != "0" else "1")}
    assert (await ask(app, "/nothing", headers=forged)).status_code == 401
    later = {"cookie": value["cookie"].replace("=1", "=9", 1)}
    assert (await ask(app, "/nothing", headers=later)).status_code == 401
    other, _ = build(MESH, Settings())
    assert (await ask(other, "/nothing", headers=value)).status_code == 401
    assert (await ask(app, "/nothing", headers={**value, "host": "evil.example:9090"})).status_code == 421


async def test_the_token_works_below_a_path() -> None:
    app, address = build(MESH, Settings(root_path="/ops/worqr"))
    assert address.startswith(f"{HERE}/ops/worqr/login?token=")
    transport = httpx.ASGITransport(app, root_path="/ops/worqr")
    async with httpx.AsyncClient(transport=transport, base_url=HERE, timeout=PATIENCE) as browser:
        answer = await browser.get(address)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ops/worqr/")
        assert (await browser.get("/ops/worqr/nothing")).status_code == 404
    for wrong in ("worqr", "/", "/worqr/", "//evil.example", "/a b", "/a?b", "/<b>"):
        with pytest.raises(UsageError, match="--root-path"):
            check_settings(Settings(root_path=wrong))


async def test_an_old_cookie_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    app, address = build(MESH, Settings())
    monkeypatch.setattr(standalone, "COOKIE_LASTS", -10)
    value = {"cookie": (await ask(app, address)).headers["set-cookie"].partition(";")[0]}
    assert (await ask(app, "/nothing", headers=value)).status_code == 401


@pytest.mark.parametrize("until", ["9" * 5000, "9" * 30, "", "-1", "٣", "1e9", "a" * 60_000], ids=len)
async def test_a_cookie_that_was_not_signed_here_is_refused(until: str) -> None:
    app, address = build(MESH, Settings())
    name = (await ask(app, address)).headers["set-cookie"].partition("=")[0]
    for value in (f"{until}.x", until, f"{until}.{'0' * 64}", f"{until}.\u00ff"):
        answer = await ask(app, "/nothing", headers={"cookie": f"{name}={value}".encode()})
        assert answer.status_code == 401
        assert "logs you in" in answer.text


async def test_two_dashboards_on_one_host_have_cookies_of_two_names() -> None:
    names: list[str] = []
    for settings in (Settings(), Settings(port=9091), Settings(root_path="/worqr"), Settings()):
        app, address = build(MESH, settings)
        transport = httpx.ASGITransport(app, root_path=settings.root_path)
        async with httpx.AsyncClient(transport=transport, base_url=HERE, timeout=PATIENCE) as browser:
            cookie = (await browser.get(address)).headers["set-cookie"]
        assert f"Max-Age={standalone.COOKIE_LASTS}" in cookie
        names.append(cookie.partition("=")[0])
    assert len(set(names)) == 3
    assert names[0] == names[3], "a dashboard that starts again replaces its cookie"
    assert standalone.COOKIE_LASTS <= 86400


# Host names

NETWORKS = (ip_network("127.0.0.1"),)
USER = {"x-forwarded-user": "eve"}


def at_each_door(host: str, **more: Any) -> list[tuple[Settings, dict[str, str]]]:
    """All kinds of logins at an address, each with the headers of a visitor who gets in."""
    given = {"host": host, **more}
    return [
        (Settings(passwords=f"ada:{hash_password(PASSWORD)}", **given), basic("ada", PASSWORD)),
        (Settings(trust_header="X-Forwarded-User", proxies=NETWORKS, **given), USER),
        (Settings(open_to_all=True, **given), {}),
    ]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "::1", "[::1]", "0.0.0.0", "::", "10.1.2.3", "ops.internal"]
)
async def test_foreign_host_names_are_refused_at_each_door(host: str) -> None:
    for settings, headers in at_each_door(host, hosts=("Dash.example",), origins=("https://ops.example.org:8443",)):
        app, _ = build(MESH, settings)
        for foreign in ("evil.example", "evil.example:9090", "dash.example.evil.example", "127.0.0.1.evil.example", ""):
            for method, path in (("GET", "/nothing"), ("GET", "/api/v1/queues"), ("POST", "/pause")):
                answer = await ask(app, path, method=method, headers={**headers, "host": foreign, "origin": HERE})
                assert answer.status_code == 421, (settings, foreign)
                assert "--host NAME" in answer.text
        own = "[::1]" if ":" in host else host
        for right in ("127.0.0.1:9090", "localhost", "[::1]:9090", "dash.example:80", "ops.example.org", own):
            answer = await ask(app, "/nothing", headers={**headers, "host": right})
            assert answer.status_code == 404, (settings, right)


async def test_the_address_of_the_connection_is_a_known_name() -> None:
    """Only names can be pointed elsewhere, so a dashboard at all addresses needs no --host for them."""
    for server, host, status in (
        ("10.1.2.3", "10.1.2.3:9090", 404),
        ("::ffff:10.1.2.3", "10.1.2.3", 404),
        ("fd00::1", "[fd00:0::1]:9090", 404),
        ("10.1.2.3", "10.1.2.4", 421),
        ("evil.example", "evil.example", 421),
        ("", "", 421),
        (None, "10.1.2.3", 421),
    ):
        app, _ = build(MESH, Settings(host="0.0.0.0", open_to_all=True))

        async def at(scope: Any, receive: Any, send: Any, app: Any = app, server: Any = server) -> None:
            await app({**scope, "server": server if server is None else (server, 9090)}, receive, send)

        assert (await ask(at, "/nothing", headers={"host": host})).status_code == status, (server, host)


async def test_a_program_with_a_token_may_use_any_name() -> None:
    token = "x" * 43
    app, _ = build(MESH, Settings(tokens=token_line("keda", "reader", token)))
    named = {"host": "dashboard.default.svc"}
    assert (await ask(app, "/nothing", headers={**named, "authorization": f"Bearer {token}"})).status_code == 404
    assert (await ask(app, "/nothing", headers={**named, "authorization": "Bearer wrong"})).status_code == 401
    assert (await ask(app, "/nothing", headers=named)).status_code == 421


# HTTP/2

UPGRADE = {
    "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA",
    "upgrade": "h2c",
    "connection": "Upgrade, HTTP2-Settings",
    "host": "127.0.0.1",
}


async def test_every_door_refuses_http2() -> None:
    for settings, headers in [*at_each_door("127.0.0.1"), (Settings(), {})]:
        app, _ = build(MESH, settings)

        async def as_http2(scope: Any, receive: Any, send: Any, app: Any = app) -> None:
            await app({**scope, "http_version": "2"}, receive, send)

        assert (await ask(as_http2, "/nothing", headers=headers)).status_code == 505
        for value in ("h2c", "H2C", "websocket, h2c", " h2c ", "h2"):
            answer = await ask(app, "/nothing", headers={**headers, "upgrade": value})
            assert (answer.status_code, "content-security-policy" in answer.headers) == (505, True)


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes, and return all bytes until the server closes."""
    found = b""
    with trio.fail_after(PATIENCE):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(data)
            while not found.endswith(b"log.\n") and (part := await stream.receive_some()):
                found += part
                if b"HTTP/1.1 101" in found:
                    break
    return found


def request(path: str, headers: dict[str, str]) -> bytes:
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


async def test_the_server_does_not_change_to_http2() -> None:
    settings = Settings(port=free_port(), trust_header="X-Forwarded-User", proxies=NETWORKS)
    app, _ = build(MESH, settings)
    connection = h2.connection.H2Connection()
    connection.initiate_connection()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(standalone.serve, app, settings))
        for headers in (UPGRADE, {**UPGRADE, "upgrade": "H2C"}, {**UPGRADE, **USER}):
            answer = await exchange(settings.port, request("/nothing", {**headers, "connection": "upgrade, close"}))
            assert answer.startswith(b"HTTP/1.1 505"), answer
            assert b"101 " not in answer
        answer = await exchange(settings.port, connection.data_to_send())
        assert answer.startswith((b"HTTP/1.1 505", b"HTTP/1.1 4")), answer
        nursery.cancel_scope.cancel()


async def test_the_door_refuses_what_a_server_with_http2_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should another Hypercorn change to HTTP/2, nobody acts in such a connection."""
    monkeypatch.setattr(standalone, "_keep_to_http1", lambda: None)
    monkeypatch.setattr(H11Protocol, "_check_protocol", CHECK_PROTOCOL)
    settings = Settings(port=free_port(), trust_header="X-Forwarded-User", proxies=NETWORKS)
    app, _ = build(MESH, settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(standalone.serve, app, settings))
        with trio.fail_after(PATIENCE):
            assert await in_a_tunnel(settings.port) == ["505", "505"]
        nursery.cancel_scope.cancel()


CHECK_PROTOCOL = H11Protocol._check_protocol  # pyright: ignore[reportPrivateUsage]
"""Before any test has served a dashboard."""


async def in_a_tunnel(port: int) -> Sequence[str]:
    """The statuses of the request that changes to HTTP/2, and of a form that is sent then."""
    client, found = h2.connection.H2Connection(), list[str]()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request("/nothing", {**UPGRADE, **USER}))
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive_some()
        assert b"101 " in head
        client.initiate_upgrade_connection()
        form = [
            (":method", "POST"),
            (":path", "/pause"),
            (":scheme", "http"),
            (":authority", "127.0.0.1"),
            *USER.items(),
        ]
        number = client.get_next_available_stream_id()
        client.send_headers(number, [*form, ("sec-fetch-site", "same-origin")], end_stream=True)
        await stream.send_all(client.data_to_send())
        data = head.partition(b"\r\n\r\n")[2]
        while len(found) < 2:
            for event in client.receive_data(data or await stream.receive_some()):
                if isinstance(event, h2.events.ResponseReceived):
                    found.append(dict(event.headers)[b":status"].decode())
            data = b""
            await stream.send_all(client.data_to_send())
    return found


async def test_passwords(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "WRONG_PASSWORD_TAKES", 0)
    app, _ = build(MESH, Settings(host="0.0.0.0", passwords=f"# operators\n\n{line}\n"))
    answer = await ask(app, "/nothing")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="worqr", charset="UTF-8"')
    for name, password in (("ada", "wrong"), ("bob", PASSWORD), ("ada", ""), ("", "")):
        assert (await ask(app, "/nothing", headers=basic(name, password))).status_code == 401
    for wrong in ("Basic !!!", "Basic", "Bearer x", "Basic " + base64.b64encode(b"\xff:x").decode()):
        assert (await ask(app, "/nothing", headers={"authorization": wrong})).status_code == 401
    beyond_ascii = {b"authorization": "Basic é".encode()}
    assert (await ask(app, "/nothing", headers=beyond_ascii)).status_code == 401
    for _ in range(2):
        assert (await ask(app, "/nothing", headers=basic("ada", PASSWORD))).status_code == 404
    form = {"method": "POST", "data": {"queue": "q"}, "headers": {**basic("ada", PASSWORD), "origin": HERE}}
    assert (await ask(app, "/retry", **form)).status_code == 503  # an operator may, and the server is away
    reading, _ = build(MESH, Settings(host="0.0.0.0", passwords=line, read_only=True))
    assert (await ask(reading, "/retry", **form)).status_code == 403


async def test_a_right_password_is_checked_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(password: str, stored: str) -> bool:
        checked.append(password)
        return check_password(password, stored)

    monkeypatch.setattr(standalone, "check_password", check)
    app, _ = build(MESH, Settings(passwords=line))
    for _ in range(3):
        assert (await ask(app, "/nothing", headers=basic("ada", PASSWORD))).status_code == 404
    assert checked == [PASSWORD]


class Guessers:
    """Visitors who send wrong passwords at the same time, and the statuses of their answers."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.found: list[int] = []

    async def send(self, number: int, *clients: str, **headers: str) -> None:
        async with trio.open_nursery() as nursery:
            for n in range(number):
                nursery.start_soon(self._one, n, clients[n % len(clients)], headers)

    async def _one(self, n: int, client: str, headers: dict[str, str]) -> None:
        found = await ask(self.app, "/nothing", client=(client, 5), headers={**basic("ada", f"wrong {n}"), **headers})
        self.found.append(found.status_code)


@pytest.mark.parametrize(
    ("clients", "checked"),
    [
        (["10.0.0.1"], 5),
        (["10.0.0.1", "::ffff:10.0.0.1"], 5),
        (["2001:db8::1", "2001:db8::2", "2001:db8::ffff:1"], 5),
        (["2001:db8:0:1::1", "2001:db8:0:2::1"], 10),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], 15),
        (["", "testclient"], 10),
    ],
)
async def test_many_wrong_passwords_of_one_visitor_at_once_are_refused(
    clients: list[str], checked: int, line: str, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "check_password", lambda password, stored: False)
    app, _ = build(MESH, Settings(passwords=line))
    guessers = Guessers(app)
    await guessers.send(30, *clients)
    assert sorted(guessers.found) == [401] * checked + [429] * (30 - checked)
    await guessers.send(1, clients[0])
    assert guessers.found[-1] == 401, "the count ends with the attempts"


@pytest.mark.parametrize("first", [False, True], ids=["was right before", "first visit"])
async def test_wrong_passwords_of_others_keep_out_no_right_one(
    first: bool, line: str, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "check_password", lambda password, stored: password == PASSWORD)
    app, _ = build(MESH, Settings(passwords=line))
    right = basic("ada", PASSWORD)
    if not first:
        assert (await ask(app, "/nothing", headers=right)).status_code == 404
    guessers = Guessers(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guessers.send, 40, "10.9.9.9")
        await trio.testing.wait_all_tasks_blocked()
        for client in ("10.0.0.1", "127.0.0.1", *(() if first else ("10.9.9.9",))):
            assert (await ask(app, "/nothing", client=(client, 5), headers=right)).status_code == 404, client


FORWARDED = "x-forwarded-for"


@pytest.mark.parametrize(
    ("client", "forwarded", "visitor"),
    [
        ("10.0.0.5", "198.51.100.7", "198.51.100.7"),
        ("::ffff:10.0.0.5", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.5", "1.1.1.1, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.5", "1.1.1.1, 198.51.100.7, 10.0.0.6", "198.51.100.7"),
        ("10.0.0.5", "2001:db8::7", "2001:db8::/64"),
        ("10.0.0.5", "1.1.1.1, unknown", "10.0.0.5"),
        ("10.0.0.5", "", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.6", "10.0.0.6"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
    ],
)
def test_a_proxy_that_is_trusted_names_its_visitors(client: str, forwarded: str, visitor: str) -> None:
    scope = {"client": (client, 5), "headers": [(b"X-Forwarded-For", forwarded.encode())]}
    assert standalone._visitor(scope, (ip_network("10.0.0.0/8"),)) == visitor  # pyright: ignore[reportPrivateUsage]


async def test_a_visitor_behind_a_proxy_keeps_out_no_other(
    line: str, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "check_password", lambda password, stored: password == PASSWORD)
    app, _ = build(MESH, Settings(passwords=line, proxies=NETWORKS))
    guessers, right = Guessers(app), basic("ada", PASSWORD)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(guessers.send, 40, "127.0.0.1", **{FORWARDED: "198.51.100.7"}))
        await trio.testing.wait_all_tasks_blocked()
        assert (await ask(app, "/nothing", headers={**right, FORWARDED: "198.51.100.8"})).status_code == 404
    assert guessers.found.count(429) == 35


async def test_the_header_of_the_proxy_only() -> None:
    networks = (ip_network("10.0.0.0/8"),)
    app, _ = build(MESH, Settings(host="0.0.0.0", trust_header="X-Forwarded-User", proxies=networks))
    named = {"x-forwarded-user": "ada"}
    assert (await ask(app, "/nothing", client=("10.1.2.3", 5), headers=named)).status_code == 404
    for client in (("127.0.0.1", 5), ("11.0.0.1", 5), ("", 0), ("proxy", 1)):
        assert (await ask(app, "/nothing", client=client, headers=named)).status_code == 401
    assert (await ask(app, "/nothing", client=("10.1.2.3", 5))).status_code == 401
    twice = httpx.Headers([("x-forwarded-user", "ada"), ("x-forwarded-user", "root")])
    assert (await ask(app, "/nothing", client=("10.1.2.3", 5), headers=twice)).status_code == 401
    for given in ("10.0.0.0/8", "::ffff:10.0.0.0/104", "10.1.2.3"):
        app, _ = build(MESH, Settings(host="::", trust_header="X-Forwarded-User", proxies=(ip_network(given),)))
        for client, status in (
            ("::ffff:10.1.2.3", 404),
            ("10.1.2.3", 404),
            ("::ffff:11.0.0.1", 401),
            ("::10.1.2.3", 401),
        ):
            assert (await ask(app, "/nothing", client=(client, 5), headers=named)).status_code == status, (
                given,
                client,
            )


async def test_an_open_dashboard_is_read_only() -> None:
    app, _ = build(MESH, Settings(host="0.0.0.0", open_to_all=True, rights="admin"))
    assert (await ask(app, "/nothing")).status_code == 404
    answer = await ask(app, "/pause", method="POST", data={"queue": "q"}, headers={"origin": HERE})
    assert answer.status_code == 403


def test_password_files(line: str) -> None:
    assert read_passwords(f"{line}\n# x\n").keys() == {"ada"}
    for wrong in (
        "",
        "# only a comment",
        "ada",
        "ada:secret",
        f"{line}\n{line}",
        "ada:scrypt$x$y",
        "ada:scrypt$é$y",
        ":" + line.partition(":")[2],
    ):
        with pytest.raises(UsageError, match="password file"):
            read_passwords(wrong)


def test_hashes() -> None:
    first, second = hash_password(PASSWORD), hash_password(PASSWORD)
    assert first != second
    assert check_password(PASSWORD, first)
    assert not check_password(PASSWORD + "x", first)
