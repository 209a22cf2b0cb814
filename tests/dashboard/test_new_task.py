"""A task that is enqueued by hand: the form, what is refused, and what is stored."""

from __future__ import annotations

from typing import Any

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_pages import text_of
from tests.support.servers import Server
from worqr.dashboard import Viewer, admin, reader

LEFT = pytest.mark.leaves("*")


@LEFT
async def test_a_payload_becomes_a_plain_task(connected: worqr.Mesh, site: Site) -> None:
    assert 'href="/new?queue=mails"' in (await site.get("/queue", name="mails")).text
    page = (await site.get("/new", queue="mails")).text
    assert 'name="payload"' in page
    answer = await site.post("/enqueue", queue="mails", payload='{"to": "ada"}\r\nsecond line')
    assert (answer.status_code, answer.headers["location"]) == (303, "/queue?name=mails&done=new")
    assert await connected.queue("mails").tasks() == [b'{"to": "ada"}\nsecond line']
    assert "The task is in the queue." in (await site.ask("GET", answer.headers["location"])).text
    [entry] = [each for each in await connected.log() if each.kind == "enqueued"]
    assert (entry.who, entry.queue, entry.count) == ("ada", "mails", 1)


@LEFT
async def test_an_id_or_a_delay_makes_a_job(connected: worqr.Mesh, site: Site) -> None:
    answer = await site.post("/enqueue", queue="mails", payload="x", id="report-7", delay="90")
    assert answer.headers["location"] == "/job?queue=mails&id=report-7&done=new"
    record = await connected.queue("mails").read("report-7")
    assert (record.status.state, record.task) == ("scheduled", b"x")
    again = await site.post("/enqueue", queue="mails", payload="other", id="report-7")
    assert again.status_code == 400
    assert "report-7" in again.text
    assert ">other</textarea>" in again.text, "what was typed is still there"
    assert (await connected.queue("mails").read("report-7")).task == b"x"
    assert (await site.post("/enqueue", queue="mails", payload="x", delay="0.5")).status_code == 303


@LEFT
async def test_the_arguments_of_a_function_have_a_field_each(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)

    @mesh.task(name="report")
    async def report(customer: int, title: str, pages: list[int] | None = None) -> None: ...

    @mesh.task(name="one")
    async def one(what: dict[str, int], /) -> None: ...

    site = Site(mesh)
    async with mesh.connect():
        page = (await site.get("/new", queue="report")).text
        assert [name in page for name in ('name="arg.customer"', 'name="arg.title"', 'name="arg.pages"')] == [True] * 3
        assert 'name="payload"' not in page
        assert 'placeholder="None"' in page
        given = {"queue": "report", "arg.customer": "7", "arg.title": "42", "arg.pages": "[1, 2]"}
        assert (await site.post("/enqueue", **given)).status_code == 303
        assert await mesh.queue("report").tasks() == [b'{"customer":7,"title":"42","pages":[1,2]}']
        for changed, why in [
            ({"arg.customer": "seven"}, "must be JSON"),
            ({"arg.customer": "[" * 20_000}, "nested too deeply"),
            ({"arg.pages": r'["\ud800"]'}, "half of a surrogate pair"),
            ({"arg.customer": "1e999"}, "no number in JSON"),
            ({"arg.customer": ""}, "needs a value"),
            ({"arg.customer": "1.5"}, "A worker could not decode this"),
            ({"arg.pages": '["x"]'}, "A worker could not decode this"),
        ]:
            answer = await site.post("/enqueue", **{**given, **changed})
            assert (answer.status_code, why in text_of(answer.text)) == (400, True), (changed, answer.text)
            assert 'value="42"' in answer.text
        assert len(await mesh.queue("report").tasks()) == 1
        assert (await site.post("/enqueue", queue="one", **{"arg.what": '{"a": 1}'})).status_code == 303
        assert await mesh.queue("one").tasks() == [b'{"a":1}']


@pytest.mark.parametrize(
    ("form", "status", "why"),
    [
        ({"payload": "x"}, 400, "does not name a queue"),
        ({"queue": "a{b}", "payload": "x"}, 400, "braces"),
        ({"queue": "mails", "payload": "x", "delay": "-1"}, 400, "a number of seconds"),
        ({"queue": "mails", "payload": "x", "delay": "1e3"}, 400, "a number of seconds"),
        ({"queue": "mails", "payload": "x", "delay": "99999999"}, 400, "at most a year"),
        ({"queue": "mails", "payload": "x", "id": "@7"}, 400, "must not begin with"),
    ],
)
async def test_what_is_wrong_is_said_and_nothing_is_stored(
    connected: worqr.Mesh, site: Site, form: dict[str, Any], status: int, why: str
) -> None:
    answer = await site.post("/enqueue", **form)
    assert (answer.status_code, why in text_of(answer.text)) == (status, True), answer.text
    assert await connected.queue("mails").count() == 0


@LEFT
async def test_it_is_off_unless_the_dashboard_and_the_viewer_may(connected: worqr.Mesh) -> None:
    off, on = Site(connected, options={"allow_enqueue": False}), Site(connected)
    on.viewer = Viewer("bob", ("look", "cancel"))
    for site in (off, on):
        assert "New task" not in (await site.get("/queue", name="mails")).text
        for answer in (await site.get("/new"), await site.post("/enqueue", queue="mails", payload="x")):
            assert answer.status_code == 403
            assert "allow_enqueue" in answer.text
    on.viewer = admin("ada", ("mail.*",))
    assert (await on.get("/new", queue="payroll")).status_code == 404
    assert (await on.post("/enqueue", queue="payroll", payload="x")).status_code == 404
    assert "enqueue" not in reader("eve").may
    assert await connected.queue("payroll").count() == 0
