"""Who may do what, and that nothing leaks: every route, right and method; forged requests; secrets; a user who only reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import trio
from starlette.responses import PlainTextResponse, Response

import worqr
from tests.dashboard.conftest import HOST, Site
from tests.dashboard.scene import Scene, Texts, open_scene, why_not
from tests.dashboard.test_live import opened
from tests.support.children import Child
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.test_acl import lines
from worqr.client.queue import Queue
from worqr.dashboard import Viewer, admin
from worqr.dashboard import app as app_module
from worqr.dashboard.access import RIGHTS
from worqr.dashboard.app import ROUTES
from worqr.dashboard.request import Visit

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
OWN = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
POSTS = [path for path, route in ROUTES.items() if route.method == "POST"]
SECRET = "s3cr3t"
LEFT = pytest.mark.leaves("*")
Make = Callable[..., Site]


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths whose handlers were called. None does anything, and none connects."""
    found: list[str] = []

    async def handler(visit: Visit) -> Response:
        found.append(visit.path)
        return PlainTextResponse("handled")

    routes = {path: replace(route, handler=handler, connects=True) for path, route in ROUTES.items()}
    monkeypatch.setattr(app_module, "ROUTES", routes)
    return found


# Who may do what


MAYS = [may for right in RIGHTS for may in ((right,), ("look", right))]


@pytest.mark.parametrize("number", range(len(ROUTES)), ids=ROUTES)
async def test_the_table_of_rights_and_methods(number: int, unconnected: Make, handled: list[str]) -> None:
    """A route has one method and one right, and every other combination ends before its handler.

    A wrong method is refused whatever the viewer may do: each is tried with one viewer, another one at each route.
    """
    path, route = [*ROUTES.items()][number]
    accepted = {"GET": ("GET", "HEAD")}.get(route.method, (route.method,))
    for n, method in enumerate(METHODS):
        for may in MAYS if method in accepted else [MAYS[(number + n) % len(MAYS)]]:
            answer = await unconnected(viewer=Viewer("ada", may)).ask(method, path, headers=OWN)
            expected = 405 if method not in accepted else 200 if {"look", route.right} <= set(may) else 403
            assert answer.status_code == expected, (method, path, may)
            assert handled == ([path] if expected == 200 else []), (method, path, may)
            handled.clear()


@pytest.mark.parametrize("path", ROUTES)
async def test_who_may_only_look_acts_nowhere(path: str, unconnected: Make, handled: list[str]) -> None:
    for site in (unconnected(viewer=Viewer("ada", ("look",))), unconnected(options={"read_only": True})):
        answer = await site.ask(ROUTES[path].method, path, headers=OWN)
        assert answer.status_code == (200 if ROUTES[path].right == "look" else 403)
        assert ROUTES[path].method == "GET" or not handled


def test_no_page_that_shows_changes_anything() -> None:
    """A right other than these two belongs to a POST, because only POST is protected from other sites."""
    assert {
        path for path, route in ROUTES.items() if route.method == "GET" and route.right not in ("look", "payloads")
    } == set()
    assert {path for path, route in ROUTES.items() if route.method == "POST" and route.right == "look"} == set()


# Requests that other sites send

FORGED: list[dict[str, str]] = [
    {},
    {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
    {"sec-fetch-site": "cross-site", "origin": "null"},
    {"sec-fetch-site": "same-site", "origin": "http://sister.ops.internal"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": ""},
    {"sec-fetch-site": "same-origin, cross-site"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://evil.example"},
    {"origin": "http://ops.internal:8080.evil.example"},
    {"origin": "http://ops.internal"},
    {"origin": "https://ops.internal:8080"},
    {"origin": "http://user@ops.internal:8080"},
    {"referer": "http://ops.internal:8080/queues"},
    {"x-requested-with": "XMLHttpRequest"},
]
"""Headers of requests to ``http://ops.internal:8080`` that no page of the dashboard sends."""


@pytest.mark.parametrize("path", POSTS)
async def test_forged_requests_reach_no_handler(path: str, unconnected: Make, handled: list[str]) -> None:
    base = {"host": "ops.internal:8080", "content-type": OWN["content-type"]}
    for headers in FORGED:
        answer = await unconnected().ask("POST", path, headers={**base, **headers}, content=b"queue=q&id=1")
        assert (answer.status_code, handled) == (403, []), headers
    twice = [*base.items(), ("origin", "http://evil.example"), ("origin", "http://ops.internal:8080")]
    assert (await unconnected().ask("POST", path, headers=twice)).status_code == 400
    assert handled == []


@pytest.mark.parametrize("path", POSTS)
async def test_a_form_of_our_own_page_is_accepted_at_any_host(path: str, unconnected: Make, handled: list[str]) -> None:
    """Browsers send `Sec-Fetch-Site` to https and to loopback, and `Origin` only to a host on plain http."""
    for host, headers in (
        ("ops.internal:8080", {"origin": "http://ops.internal:8080"}),
        ("OPS.internal:8080", {"origin": "http://ops.internal:8080"}),
        ("127.0.0.1", {"origin": HOST, "sec-fetch-site": "same-origin"}),
        ("ops.example.org", {"sec-fetch-site": "same-origin", "origin": "https://ops.example.org"}),
    ):
        headers |= {"host": host, "content-type": OWN["content-type"]}
        assert (await unconnected().ask("POST", path, headers=headers)).status_code == 200, headers
    assert len(handled) == 4


@pytest.mark.parametrize("path", ROUTES)
async def test_a_foreign_host_name_reaches_no_handler(path: str, unconnected: Make, handled: list[str]) -> None:
    site = unconnected(options={"hosts": ("127.0.0.1", "[::1]", "ops.example")})
    for host in (
        "evil.example",
        "ops.example.evil.example",
        "evil.example:80",
        "0.0.0.0",
        "[::2]",
        "127.0.0.1@evil.example",
        "",
    ):
        answer = await site.ask(ROUTES[path].method, path, headers={**OWN, "host": host})
        assert (answer.status_code, handled) == (421, []), host
    for host in ("127.0.0.1:9090", "[::1]:9090", "Ops.Example.", "ops.example:443"):
        assert (await site.ask(ROUTES[path].method, path, headers={**OWN, "host": host})).status_code == 200, host


# A user of the server who only reads


PEER = """
    import sys

    import trio

    from tests.dashboard.scene import open_scene

    async def main():
        async with open_scene(*sys.argv[1:], keepalive=None) as scene:
            print(scene.worker, flush=True)
            await trio.sleep_forever()

    trio.run(main)
"""


@LEFT
async def test_the_user_viewer_opens_every_page_and_changes_nothing(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    peer = spawn(PEER, server.tcp_url, prefix)
    scene = Scene(worqr.Mesh("redis://127.0.0.1:1/0", prefix=prefix), Texts(), await peer.line())
    peer.pause()  # so that nobody else changes anything
    rules = [rule.replace("worqr:", f"{prefix}:").replace("{worqr}", f"{{{prefix}}}") for rule in lines()["viewer"]]
    with server.client() as client:
        rules = [rule.replace(">secret", f">{SECRET}") for rule in rules]
        client.execute_command("ACL", "SETUSER", f"{prefix}-viewer", *rules)
        url = server.tcp_url.replace("redis://", f"redis://{prefix}-viewer:{SECRET}@")
        try:
            before = dump(client, prefix)
            await open_everything_as_viewer(Site(scene.mesh, options={"url": url}), scene)
            after = dump(client, prefix)
        finally:
            client.acl_deluser(f"{prefix}-viewer")
    after.pop(f"{{{prefix}}}:watched".encode(), None)  # which asks the leader for snapshots
    assert {key: entry for key, entry in before.items() if not entry.expires}.items() <= after.items()
    assert after.items() <= before.items()  # some have expired
    assert len(after) > 30


async def open_everything_as_viewer(site: Site, scene: Scene) -> None:
    for address in scene.addresses():
        answer = await site.ask("GET", address)
        assert answer.status_code == 200, why_not(address, answer.status_code)
    for view in scene.views():
        async with opened(site, urlsplit(view).query) as stream:
            await stream.wait_for("set")
    for path in POSTS:
        answer = await site.post(path, **every_field(scene))
        assert answer.status_code in (400, 502), (path, answer.status_code, answer.headers)
        assert SECRET not in answer.text


def every_field(scene: Scene) -> dict[str, Any]:
    """A form that has what any act asks for."""
    names = scene.names
    fields = {"queue": names["failing"], "id": names["job"], "name": names["schedule"], "paused": "yes"}
    return {**fields, "list": "failed", "reason": "because"}


# Secrets

SECRETS = Texts(
    payload=b'{"order": 7, "password": "s3cr3t-payload", "card": {"number": "s3cr3t-card"}}',
    error="login failed: redis://me:s3cr3t-url@host/0 password=s3cr3t-error, Authorization: Bearer s3cr3t-bearer",
    progress="calling with api_key=s3cr3t-progress",
    reason="rotating {'password': ['old', 's3cr3t-reason']}",
    meta="Authorization: Token s3cr3t-tenant",
)


@LEFT
async def test_no_secret_in_any_answer_or_log(server: Server, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_scene(server.url, prefix, SECRETS) as scene:
        caplog.clear()  # what the handlers of the scene raise is the application's
        seen: list[str] = []
        for viewer in (admin("ada"), Viewer("bob", ("look",))):
            site = Site(scene.mesh, viewer=viewer)
            for address in scene.addresses():
                if not address.startswith("/payload?"):  # which shows a payload as it is, with a right of its own
                    answer = await site.ask("GET", address)
                    seen += [f"{address}: {answer.headers} {answer.text}"]
        for view in scene.views():
            async with opened(site, urlsplit(view).query) as stream:
                seen.append(f"{view}: {await stream.wait_for('set')}")
        for path in POSTS:
            answer = await Site(scene.mesh).post(path, **every_field(scene))
            seen.append(f"{path}: {answer.headers} {answer.text}")
        assert [text[max(0, text.find(SECRET) - 300) :][:400] for text in seen if SECRET in text] == []
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("worqr.dashboard")]
    assert [line for line in logged if SECRET in line] == []


@LEFT
async def test_no_secret_of_a_reason_on_a_page_or_in_a_table(connected: worqr.Mesh) -> None:
    """Reasons of pauses, of cancels that are under way, and of jobs and batches that were cancelled."""
    reason, mails = "rotating password=s3cr3t, once more", connected.queue("mails")

    async def stays(task: bytes) -> None:
        with trio.CancelScope(shield=True):
            await let_go.wait()

    let_go, seen = trio.Event(), list[str]()
    addresses = [
        "/",
        "/queues",
        "/log",
        "/api/v1/queues",
        "/api/v1/log",
        "/api/v1/lanes?queue=mails",
        "/lanes?queue=mails",
    ]
    addresses += [f"/{table}?queue=mails&id=ended" for table in ("job", "api/v1/job")]
    addresses += [f"/{table}?queue=mails&id=running" for table in ("job", "api/v1/job")]
    addresses += [f"/{table}?queue=mails&id=batch" for table in ("batch", "api/v1/batch")]
    addresses += ["/api/v1/batches?queue=mails", "/queue?name=mails", "/queue?name=mails&tab=running"]
    site = Site(connected)
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", stays)
        try:
            with trio.fail_after(PATIENCE):
                await fill_with_reasons(mails, connected, reason)
                for address in addresses:
                    for suffix in ("", f"{'&' if '?' in address else '?'}format=csv") if "/api/" in address else ("",):
                        answer = await site.ask("GET", address + suffix)
                        assert answer.status_code == 200, (address, answer.text)
                        seen.append(f"{address}: {answer.text}")
        finally:
            let_go.set()
            nursery.cancel_scope.cancel()
    found = "\n".join(seen)
    assert found.count("password=•••") + found.count("password=\\u2022") > 8
    assert [text[max(0, text.find(SECRET) - 200) :][:300] for text in seen if SECRET in text] == []


async def fill_with_reasons(queue: Queue, mesh: worqr.Mesh, reason: str) -> None:
    await queue.dispatch(b"1", id="running", result_ttl=60)
    while not await queue.running():
        await trio.sleep(0.01)
    await queue.pause(reason)
    await queue.dispatch(b"1", id="ended", result_ttl=60, lane="acme")
    await queue.dispatch(b"1", id="laned", lane="acme")
    await queue.pause(reason, lane="acme")
    async with mesh.batch(queue=queue.name, id="batch") as batch:
        await batch.dispatch_many([mesh.call(queue.name, n=1)])
    await batch.cancel(reason=reason)
    for job in ("ended", "running"):
        await queue.job(job).cancel(reason=reason)


@pytest.mark.parametrize("path", ROUTES)
async def test_the_password_of_the_server_is_nowhere(
    path: str, unconnected: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://me:{quote(SECRET)}@127.0.0.1:1/0"
    site = Site(worqr.Mesh(url, patience=0.1))
    form = {"data": {"queue": "q", "id": "1", "name": "s"}, "headers": {"sec-fetch-site": "same-origin"}}
    answer = await site.ask(
        ROUTES[path].method, f"{path}?name=q&queue=q&id=1&q=1&view=x", **(form if path in POSTS else {})
    )
    assert answer.status_code in ((200,) if path == "/metrics" else (400, 503))
    assert SECRET not in answer.text + str(answer.headers) + caplog.text + repr(site.app)
