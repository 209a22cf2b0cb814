"""The standalone dashboard: who gets in at which address."""

from __future__ import annotations

import base64
from ipaddress import ip_network
from typing import Any

import httpx
import pytest
import trio

import worqr
from tests.support.patience import PATIENCE
from worqr.dashboard import doors
from worqr.dashboard.doors import check_password, hash_password, read_passwords
from worqr.dashboard.standalone import Settings, build, check_settings
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
    monkeypatch.setattr(doors, "COOKIE_LASTS", -10)
    value = {"cookie": (await ask(app, address)).headers["set-cookie"].partition(";")[0]}
    assert (await ask(app, "/nothing", headers=value)).status_code == 401


async def test_passwords(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "WRONG_PASSWORD_TAKES", 0)
    app, _ = build(MESH, Settings(host="0.0.0.0", passwords=f"# operators\n\n{line}\n"))
    answer = await ask(app, "/nothing")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="worqr", charset="UTF-8"')
    for name, password in (("ada", "wrong"), ("bob", PASSWORD), ("ada", ""), ("", "")):
        assert (await ask(app, "/nothing", headers=basic(name, password))).status_code == 401
    for wrong in ("Basic !!!", "Basic", "Bearer x", "Basic " + base64.b64encode(b"\xff:x").decode()):
        assert (await ask(app, "/nothing", headers={"authorization": wrong})).status_code == 401
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

    monkeypatch.setattr(doors, "check_password", check)
    app, _ = build(MESH, Settings(passwords=line))
    for _ in range(3):
        assert (await ask(app, "/nothing", headers=basic("ada", PASSWORD))).status_code == 404
    assert checked == [PASSWORD]


async def test_many_wrong_passwords_at_once_are_refused(
    line: str, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "check_password", lambda password, stored: False)
    app, _ = build(MESH, Settings(passwords=line))
    found: list[int] = []

    async def one(n: int) -> None:
        found.append((await ask(app, "/nothing", headers=basic("ada", f"wrong {n}"))).status_code)

    async with trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(one, n)
    assert sorted(found) == [401] * 5 + [429] * 15


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
        ":" + line.partition(":")[2],
    ):
        with pytest.raises(UsageError, match="password file"):
            read_passwords(wrong)


def test_hashes() -> None:
    first, second = hash_password(PASSWORD), hash_password(PASSWORD)
    assert first != second
    assert check_password(PASSWORD, first)
    assert not check_password(PASSWORD + "x", first)
