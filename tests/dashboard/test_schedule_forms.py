"""Schedules that people store on the dashboard: what is refused, what is stored, and what the check lists."""

from __future__ import annotations

import html
import re

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_pages import text_of
from tests.peer.tools import spying
from tests.support.servers import Server
from worqr.dashboard import Viewer, operator, reader

LEFT = pytest.mark.leaves("*")
MONDAYS = {"cron": "0 7 * * MON", "timezone": "Europe/Berlin"}


def declare(mesh: worqr.Mesh) -> None:
    @mesh.task(name="report", schedulable=True, lanes=worqr.Lanes())
    async def report(tenant: str, pages: int = 1) -> None: ...

    @mesh.task(name="wipe")
    async def wipe() -> None: ...


@pytest.fixture
def form() -> dict[str, str]:
    return {"name": "report/acme", "queue": "report", "arg.tenant": "acme", "lane": "acme", **MONDAYS}


@LEFT
async def test_a_schedule_is_checked_stored_changed_and_deleted(
    mesh: worqr.Mesh, site: Site, form: dict[str, str]
) -> None:
    declare(mesh)
    async with mesh.connect():
        page = (await site.get("/schedule-form", queue="report")).text
        assert 'name="arg.tenant"' in page
        assert '<option value="report">' in page
        assert '<option value="wipe">' not in page
        checked = await site.post("/schedule-store", **form, check="yes")
        assert len(re.findall(r"07:00:00 CES?T", checked.text)) == 5
        assert 'value="acme"' in checked.text, "what was typed is still there"
        assert await mesh.schedules() == []
        answer = await site.post("/schedule-store", **form, until="2099-01-01T00:00", times="9")
        assert answer.headers["location"] == "/schedules?name=report%2Facme&done=schedule-stored"
        page = (await site.ask("GET", answer.headers["location"])).text
        assert "The schedule is stored." in page
        assert "by ada, until 2099-01-01 00:00:00 CET, 0 of 9 runs" in text_of(page)
        [line] = await mesh.export_schedules()
        assert '"payload":{"tenant":"acme"}' in line
        assert '"lane":"acme"' in line
        page = (await site.get("/schedule-form", edit="yes", name="report/acme")).text
        assert 'value="0 7 * * MON"' in page
        assert 'value="2099-01-01T00:00"' in page
        assert 'name="arg.tenant"' not in page
        await site.post("/schedule-store", edit="yes", name="report/acme", every="3600", times="3")
        [found] = await mesh.schedules()
        assert (found.every, found.times, found.until, found.queue) == (3600, 3, None, "report")
        gone = await site.post("/schedule-delete", name="report/acme", back="/schedules")
        assert gone.headers["location"] == "/schedules?done=schedule-deleted"
        again = await site.post("/schedule-delete", name="report/acme", back="/schedules")
        assert again.headers["location"] == "/schedules?done=schedule-none"
        kinds = [(entry.kind, entry.who, entry.text) for entry in await mesh.log()]
        assert sorted(kinds) == [
            ("schedule_deleted", "ada", "report/acme"),
            *[("schedule_stored", "ada", "report/acme")] * 2,
        ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"queue": "wipe"}, "needs schedulable=True"),
        ({"queue": "unknown", "payload": "{}"}, "needs schedulable=True"),
        ({"name": "report//acme"}, "has an empty segment"),
        ({"cron": ""}, "a cron expression or a period, and not both"),
        ({"every": "60"}, "a cron expression or a period, and not both"),
        ({"cron": "61 7 * * *"}, "minutes are 0 to 59"),
        ({"timezone": "Berlin"}, "did you mean 'Europe/Berlin'"),
        ({"cron": "", "every": "often"}, "The period must be a number"),
        ({"until": "soon"}, "The last time must be as in 2031-05-01T12:00"),
        ({"until": "2031-05-01T12:00", "timezone": "nowhere"}, "The last time must be"),
        ({"times": "0"}, "times must be"),
        ({"times": "inf"}, "The number of runs must be whole"),
        ({"times": "2.5"}, "The number of runs must be whole"),
        ({"misfire": "x"}, "misfire must be"),
        ({"arg.tenant": "acme", "arg.pages": "many"}, "must be JSON"),
    ],
)
@LEFT
async def test_what_is_not_valid_is_said_and_nothing_is_stored(
    mesh: worqr.Mesh, site: Site, form: dict[str, str], changed: dict[str, str], why: str
) -> None:
    declare(mesh)
    async with mesh.connect():
        answer = await site.post("/schedule-store", **{**form, **changed})
        assert (answer.status_code, why in text_of(answer.text)) == (400, True), answer.text
        assert await mesh.schedules() == []


@LEFT
async def test_a_dashboard_without_the_functions_asks_the_workers(mesh: worqr.Mesh, site: Site) -> None:
    app = worqr.Mesh(mesh.url, prefix=mesh.prefix)
    declare(app)
    async with app.join(), mesh.connect():
        given = {"name": "report/acme", "payload": '{"tenant": "acme"}', "every": "3600"}
        assert "needs schedulable=True" in text_of((await site.post("/schedule-store", queue="wipe", **given)).text)
        assert (await site.post("/schedule-store", queue="report", **given)).status_code == 303
        assert (await site.post("/schedule-store", queue="report", **given)).status_code == 400
        with trio.fail_after(20):
            while not (await mesh.schedules()):
                await trio.sleep(0.01)


@pytest.mark.parametrize("viewer", [reader("bob"), operator("bob", ("report*",))])
@LEFT
async def test_it_needs_the_right_and_all_queues(
    mesh: worqr.Mesh, site: Site, form: dict[str, str], viewer: Viewer
) -> None:
    declare(mesh)
    site.viewer = viewer
    async with mesh.connect():
        for answer in (
            await site.get("/schedule-form"),
            await site.post("/schedule-store", **form),
            await site.post("/schedule-delete", name="report/acme"),
        ):
            assert answer.status_code == 403
        assert await mesh.schedules() == []


@LEFT
async def test_a_search_reads_the_page_of_its_prefix_only(
    mesh: worqr.Mesh, site: Site, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.dashboard.pages.PAGE", 3)
    declare(mesh)
    mesh.every(3600, mesh.call("wipe"), name="r/declared")
    async with mesh.join(grace=0):
        for name in ("a", "r/1", "r/2", "r/3", "r/4", "z"):
            await mesh.schedule(name, mesh.call("report", name), every=3600)
        listed = [(await site.get("/schedules", q="r/")).text]
        [link] = re.findall(r'href="(/schedules[^"]*after[^"]*)" rel="next"', listed[0])
        with spying(server, prefix) as spy:
            listed.append((await site.ask("GET", html.unescape(link))).text)
            assert not [line for line in spy.seen() if line["command"].startswith("HSCAN")]
        seen = [re.findall(r'class="name" href="/schedules\?name=r%2F(\w+)"', each) for each in listed]
        assert seen == [["1", "2", "3"], ["4", "declared"]]
        rows = [(await site.ask("GET", "/api/v1/schedules?limit=4")).json()]
        rows.append((await site.ask("GET", rows[0]["next"])).json())
        names = [row["name"] for page in rows for row in page["rows"]]
        assert names == ["a", "r/1", "r/2", "r/3", "r/4", "r/declared", "z"]
        assert rows[1]["next"] is None
        assert "begins with “x”" in (await site.get("/schedules", q="x")).text
