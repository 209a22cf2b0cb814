"""Who gets in, from where, and with what: before any handler runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import worqr
from tests.dashboard.conftest import HOST, Site
from worqr.dashboard import Dashboard, Viewer, admin, operator, reader
from worqr.dashboard.access import MAX_BODY, RIGHTS
from worqr.dashboard.app import ROUTES
from worqr.errors import UsageError

FOLDER = Path(worqr.__file__).parent / "dashboard"
POSTS = [path for path, route in ROUTES.items() if route.method == "POST"]
GETS = [path for path, route in ROUTES.items() if route.method == "GET"]
OWN = {"sec-fetch-site": "same-origin"}
Make = Callable[..., Site]


def test_access_is_required() -> None:
    mesh = worqr.Mesh()
    with pytest.raises(UsageError, match="Three ways"):
        Dashboard(mesh)
    with pytest.raises(UsageError, match="access"):
        Dashboard(mesh, access=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="payloads must be"):
        Dashboard(mesh, access=lambda scope: None, payloads="all")  # type: ignore[arg-type]


def test_viewers_are_checked() -> None:
    with pytest.raises(UsageError, match="did you mean 'cancel'"):
        Viewer("ada", ("look", "cancle"))
    with pytest.raises(UsageError, match="collection"):
        Viewer("ada", "look")
    with pytest.raises(UsageError, match="collection"):
        Viewer("ada", queues="mail.*")
    with pytest.raises(UsageError, match="name"):
        Viewer(None)  # type: ignore[arg-type]
    assert set(admin("ada").may) == set(RIGHTS)
    assert set(reader("ada").may) == {"look"} < set(operator("ada").may) < set(RIGHTS)
    viewer = reader("ada", ("mail.*", "web"))
    assert [viewer.sees(name) for name in ("mail.send", "web", "webs", "Mail.send", "xmail.send")] == [
        True,
        True,
        False,
        False,
        False,
    ]


async def test_without_a_viewer_there_is_nothing_but_the_style(unconnected: Make) -> None:
    site = unconnected(viewer=None)
    for path in (*ROUTES, "/nothing"):
        for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE"):
            answer = await site.ask(method, path)
            assert answer.status_code == 401, (method, path)
            assert 'href="/queues"' not in answer.text
    for path in ("/static/worqr.css", "/static/live.js", "/static/icon.svg"):
        assert (await site.get(path)).status_code == 200
    assert (await site.ask("POST", "/static/worqr.css")).status_code == 401
    assert (await site.get("/static/../app.py")).status_code == 401


async def test_a_login_page_is_used_if_there_is_one(unconnected: Make) -> None:
    answer = await unconnected(viewer=None, options={"login_url": "/login?next=/worqr/"}).get("/queues")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/worqr/")


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_needs_its_right(path: str, unconnected: Make) -> None:
    route = ROUTES[path]
    others = tuple(right for right in RIGHTS if right != route.right)
    for may in ((), others):
        answer = await unconnected(viewer=Viewer("ada", may)).ask(route.method, path, headers=OWN)
        assert answer.status_code == 403
        assert f"{'look' if not may else route.right!r}".strip("'") in answer.text


@pytest.mark.parametrize("path", POSTS)
async def test_readers_change_nothing(path: str, unconnected: Make) -> None:
    form = {"queue": "q", "id": "1", "name": "s"}
    for site in (unconnected(viewer=reader("ada")), unconnected(options={"read_only": True})):
        assert (await site.post(path, **form)).status_code == 403


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_has_one_method(path: str, unconnected: Make) -> None:
    right = ROUTES[path].method
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {right}:
        answer = await unconnected().ask(method, path, headers=OWN)
        assert answer.status_code == 405
        assert right in answer.headers["allow"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": HOST},
        {"sec-fetch-site": "none"},
        {"origin": "null"},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://127.0.0.1:81"},
    ],
    ids=str,
)
async def test_foreign_pages_change_nothing(path: str, headers: dict[str, str], unconnected: Make) -> None:
    answer = await unconnected().ask("POST", path, data={"queue": "q", "id": "1"}, headers=headers)
    assert answer.status_code == 403
    assert "does not come from a page of this dashboard" in answer.text


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({}, {"sec-fetch-site": "same-origin"}),
        ({}, {"sec-fetch-site": "same-origin", "origin": "https://public.example"}),
        ({}, {"origin": HOST}),
        ({"origins": ["https://Ops.example.org/"]}, {"origin": "https://ops.example.org"}),
    ],
)
async def test_pages_of_the_dashboard_may_ask(
    options: dict[str, Any], headers: dict[str, str], unconnected: Make
) -> None:
    answer = await unconnected(options=options).ask("POST", "/pause", content=b"x", headers=headers)
    assert answer.status_code == 400  # the form is wrong, so the origin was right


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "evil.example:9090"]
)
async def test_foreign_host_names_are_refused(host: str, unconnected: Make) -> None:
    site = unconnected(options={"hosts": ("127.0.0.1", "localhost", "ops.example")})
    assert (await site.ask("GET", "/nothing", headers={"host": host})).status_code == 421
    for right in ("localhost:9090", "OPS.example", "127.0.0.1"):
        assert (await site.ask("GET", "/nothing", headers={"host": right})).status_code == 404


async def test_the_headers_are_on_every_answer(unconnected: Make) -> None:
    site = unconnected()
    asked = [
        ("GET", "/nothing"),
        ("GET", "/static/live.js"),
        ("POST", "/queues"),
        ("POST", "/pause"),
        ("HEAD", "/nothing"),
    ]
    for method, path in asked:
        answer = await site.ask(method, path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    assert (await site.ask("HEAD", "/nothing")).content == b""


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # httpx leaves a body open that is not read
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"queue=q&id=" + b"x" * MAX_BODY, 413),
        (b"queue=q&" + b"&".join(b"id=%d" % n for n in range(2000)), 400),
        (b"queue=%ff&id=1", 400),
        ("queue=ø".encode(), 400),
        (b"queue=q&id=" + b"x" * 3000, 400),
        (b"id=1", 400),
        (b"queue=q", 400),
        (b"queue=q&" + b"&".join(b"id=%d" % n for n in range(101)), 400),
        (b"queue=a{b}&id=1", 400),
    ],
)
async def test_forms_have_limits(body: bytes, status: int, site: Site) -> None:
    headers = {**OWN, "content-type": "application/x-www-form-urlencoded"}
    assert (await site.ask("POST", "/cancel", content=body, headers=headers)).status_code == status


async def test_a_form_of_another_kind_is_refused(unconnected: Make) -> None:
    for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x", ""):
        answer = await unconnected().ask("POST", "/pause", content=b"queue=q", headers={**OWN, "content-type": kind})
        assert answer.status_code == 400


async def test_queries_have_limits(unconnected: Make) -> None:
    for query in ("x=" + "y" * 9000, "x=%ff", "&".join("a=1" for _ in range(2000))):
        assert (await unconnected().ask("GET", f"/queues?{query}")).status_code == 400


async def test_an_access_that_raises_lets_nobody_in(unconnected: Make, caplog: pytest.LogCaptureFixture) -> None:
    def broken(scope: object) -> Viewer:
        raise RuntimeError("the user database is away: password s3cr3t")

    app = Dashboard(worqr.Mesh(), access=broken)
    site = unconnected(_app=app)
    answer = await site.get("/")
    assert answer.status_code == 500
    assert "s3cr3t" not in answer.text
    assert [record.__dict__["event"] for record in caplog.records] == ["dashboard.failed"]
    wrong = unconnected(_app=Dashboard(worqr.Mesh(), access=lambda scope: "ada"))  # type: ignore[arg-type, return-value]
    assert (await wrong.get("/")).status_code == 500


async def test_an_async_access(unconnected: Make) -> None:
    async def nobody(scope: object) -> None:
        return None

    assert (await unconnected(_app=Dashboard(worqr.Mesh(), access=nobody)).get("/")).status_code == 401


async def test_a_server_that_is_away_is_a_page(unconnected: Make) -> None:
    site = Site(worqr.Mesh("redis://me:s3cr3t@127.0.0.1:1/0", patience=0.2))
    answer = await site.get("/")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "s3cr3t" not in answer.text
    assert "Traceback" not in answer.text
    assert "Service Unavailable" in answer.text


def test_templates_and_script_have_no_way_around_the_escaping() -> None:
    files = [*FOLDER.rglob("*.html"), *FOLDER.rglob("*.js"), *FOLDER.rglob("*.py")]
    wrong = re.compile(
        r"\|\s*safe\b|Markup\((?!\"<wbr>\"\))"
        r"|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\bon\w+=|\bstyle=|autoescape false"
    )
    found = {(path.name, match[0]) for path in files for match in wrong.finditer(path.read_text("utf-8"))}
    assert found == set()
    for path in FOLDER.rglob("*.html"):
        assert not re.search(r"<script(?![^>]*src=)", path.read_text("utf-8")), path
    assert len((FOLDER / "static" / "live.js").read_text("utf-8").splitlines()) <= 200
