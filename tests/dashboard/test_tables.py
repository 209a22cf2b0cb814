"""The tables of the pages as JSON and CSV: the rows of the page, its filters, its redaction, and page by page."""

from __future__ import annotations

import csv
import html
import io
import re
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.scene import open_scene
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.dashboard import reader
from worqr.dashboard.api import READERS, csv_of, json_of

LEFT = pytest.mark.leaves("*")


async def rows(site: Site, table: str, **query: str) -> list[dict[str, Any]]:
    answer = await site.get(f"/api/v1/{table}", **query)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    return list(answer.json()["rows"])


@LEFT
async def test_each_table_has_what_its_page_shows(server: Server, prefix: str) -> None:
    async with open_scene(server.url, prefix) as scene:
        site, names, texts = Site(scene.mesh), scene.names, scene.texts
        queues = {row["name"]: row for row in await rows(site, "queues")}
        assert set(queues) >= {names["queue"], names["slow"], names["failing"]}
        assert (queues[names["queue"]]["waiting"], queues[names["queue"]]["paused"]) == (3, texts.reason)
        assert queues[names["failing"]]["counts"]["failed"] == 1
        waiting = await rows(site, "tasks", queue=names["queue"])
        assert [task["id"] for task in waiting] == [None, None, texts.job]
        [later] = await rows(site, "tasks", queue=names["queue"], state="scheduled")
        assert datetime.fromisoformat(later["run_at"]) > datetime.now(UTC)
        running = await rows(site, "running")
        assert {task["queue"] for task in running} == {names["slow"]}
        assert {task["message"] for task in running} == {texts.progress}
        assert await rows(site, "running", worker="nobody") == []
        [dead] = await rows(site, "dead-letters", queue=names["failing"])
        assert (dead["reason"], dead["error"]["message"]) == ("failed", texts.error)
        [ended] = await rows(site, "ended", queue=names["failing"])
        assert (ended["id"], ended["outcome"], ended["error"]) == (texts.job, "raised", "worqr.Failure")
        page = (await site.get("/queue", name=names["failing"], tab="ended")).text
        assert re.search(rf"{texts.job}.*raised.*worqr.Failure", page)
        assert "No ended run is kept." in (await site.get("/queue", name=names["slow"], tab="ended")).text
        [broken] = await rows(site, "dead-letters", queue=names["typed"], list="undecodable")
        assert broken["reason"] == "undecodable"
        [worker] = await rows(site, "workers")
        assert (worker["id"], worker["app"], names["slow"] in worker["queues"]) == (scene.worker, texts.app, True)
        schedule, _stored = await rows(site, "schedules")
        assert (schedule["name"], schedule["queue"]) == (texts.schedule, names["typed"])
        assert "paused" in {entry["kind"] for entry in await rows(site, "log")}
        job = (await site.get("/api/v1/job", queue=names["failing"], id=texts.job)).json()
        assert (job["state"], job["dead_letters"][0]["error"]["message"]) == ("failed", texts.error)
        for address in scene.addresses():
            if address.startswith("/api"):
                text = (await site.ask("GET", address)).text
                assert "s3cr3t" not in text, address
        site.viewer = reader("bob", (names["slow"],))
        assert {row["name"] for row in await rows(site, "queues")} == {names["slow"]}
        assert [worker["queues"] for worker in await rows(site, "workers")] == [[names["slow"]]]
        assert (await site.get("/api/v1/tasks", queue=names["queue"])).status_code == 404
        for path in ("/api/v1/schedules", "/metrics"):
            assert (await site.get(path)).status_code == 403


@LEFT
async def test_every_page_with_a_table_links_to_its_csv_and_json(server: Server, prefix: str) -> None:
    async with open_scene(server.url, prefix) as scene:
        site, linked = Site(scene.mesh), set[str]()
        for address in scene.addresses():
            page = await site.ask("GET", address)
            for link in re.findall(r'href="(/api/v1/[^"]+)"', page.text):
                answer = await site.ask("GET", html.unescape(link))
                assert answer.status_code == 200, (address, link)
                linked.add(link.partition("?")[0])
        assert linked == READERS.keys()


@LEFT
async def test_a_table_is_read_page_by_page(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    jobs = [f"job-{n}" for n in range(7)]
    for job in jobs:
        await queue.dispatch(b"1", id=job)
    found, link = list[str](), "/api/v1/tasks?queue=mails&limit=3"
    while link:
        answer = await site.ask("GET", link)
        found += [row["id"] for row in answer.json()["rows"]]
        link = answer.json()["next"]
        assert (f'<{link}>; rel="next"' == answer.headers["link"]) if link else "link" not in answer.headers
    assert found == jobs
    for n in range(5):
        await connected.queue(f"q{n}").enqueue(b"1")
    first = (await site.get("/api/v1/queues", limit="4", sort="name", q="q")).json()
    assert [row["name"] for row in first["rows"]] == ["q0", "q1", "q2", "q3"]
    assert [row["name"] for row in (await site.ask("GET", first["next"])).json()["rows"]] == ["q4"]
    assert len((await site.get("/api/v1/queues", limit="100000")).json()["rows"]) == 6


@LEFT
async def test_csv_is_a_download_that_spreadsheets_do_not_run(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("=HYPERLINK(1)").enqueue(b"1")
    await connected.queue("mails").pause("@SUM(1)")
    answer = await site.get("/api/v1/queues", format="csv", sort="name")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == "attachment; filename=worqr-queues.csv"
    found = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["name"] for row in found] == ["'=HYPERLINK(1)", "mails"]
    assert (found[0]["waiting"], found[0]["counts.enqueued"], found[1]["paused"]) == ("1", "1", "'@SUM(1)")


@pytest.mark.parametrize(
    ("path", "query", "status", "why"),
    [
        ("queues", {"format": "xml"}, 400, "'format' must be one of: json, csv"),
        ("queues", {"limit": "-1"}, 400, "'limit' must be a whole number"),
        ("queues", {"page": "x"}, 400, "'page' must be a whole number"),
        ("tasks", {}, 400, "does not name a queue"),
        ("tasks", {"queue": "q", "state": "gone"}, 400, "'state' must be one of"),
        ("tasks", {"queue": "q", "after": "x"}, 400, "after"),
        ("dead-letters", {"queue": "q", "before": "x"}, 400, "ISO 8601"),
        ("job", {"queue": "q", "id": "x"}, 404, "Nothing is stored about this job"),
        ("nothing", {}, 404, "There is no page at this address"),
    ],
)
async def test_a_refusal_is_json_too(
    connected: worqr.Mesh, site: Site, path: str, query: dict[str, str], status: int, why: str
) -> None:
    answer = await site.get(f"/api/v1/{path}", **query)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert why in answer.json()["error"]


async def test_a_visitor_who_is_unknown_gets_json(connected: worqr.Mesh, site: Site) -> None:
    site.viewer = None
    answer = await site.get("/api/v1/queues")
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/json")


def test_cells() -> None:
    row = {"a": None, "b": True, "n": -1, "t": datetime(2026, 1, 2, tzinfo=UTC), "l": ["x", "y"], "d": {"e": "-1"}}
    assert csv_of([row, {"z": "\x1b[31m,"}]).splitlines() == [
        "a,b,n,t,l,d.e,z",
        ",true,-1,2026-01-02T00:00:00+00:00,x y,'-1,",
        ',,,,,,"\\x1b[31m,"',
    ]
    assert csv_of([{"meta": {"\x1b[31m": 1, "=1": 2, "＝1": 3}}]).splitlines()[0] == "meta.\\x1b[31m,meta.=1,meta.＝1"
    assert csv_of([{"=a": 1, "\x1b;-b": 2}]).splitlines()[0] == "'=a,\\x1b;'-b"
    assert csv_of([]) == "\r\n"
    assert json_of({"a": "\x1b\u202e"}) == '{"a":"\\u001b\\u202e"}'


@pytest.mark.parametrize("sign", "=+-@＝＋－＠")
def test_no_cell_is_a_formula_also_where_a_semicolon_ends_it(sign: str) -> None:
    for text in (
        f"{sign}1",
        f" {sign}1",
        f"\u00a0{sign}1",
        f"a;{sign}1",
        f"a; {sign}1",
        f"a;;{sign}1;{sign}2",
        f"\t{sign}1",
    ):
        for value in (text, [text, "b"], ["b", text]):
            [_, line] = csv_of([{"a": "x", "b": value}]).splitlines()
            cells = [cell.strip() for separator in ",;\t" for cell in next(csv.reader([line], delimiter=separator))]
            assert [cell for cell in cells if cell[:1] == sign] == [], (text, line)
    assert csv_of([{"a": "x=1; y -2 a@b"}]).splitlines()[1] == "x=1; y -2 a@b"


@LEFT
async def test_the_metrics_say_that_the_server_is_away(own_server: Server, prefix: str) -> None:
    site = Site(worqr.Mesh(own_server.url, prefix=prefix))
    own_server.stop()
    answer = await site.get("/metrics")
    assert answer.status_code == 200
    assert [line for line in answer.text.splitlines() if line[:1] != "#"] == ["worqr_up 0.0"]
    own_server.start()
    while "worqr_up 1.0" not in (answer := await site.get("/metrics")).text:
        assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


@LEFT
async def test_pages_of_records_have_all_that_failed_in_one_millisecond(connected: worqr.Mesh, site: Site) -> None:
    queue, ids = connected.queue("mails"), {f"job{n:02}" for n in range(70)}
    for job in ids:
        await queue.dispatch(b"", id=job, expires=0.01)
    await trio.sleep(0.05)
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, concurrency=70), "mails", _never)
        with trio.fail_after(PATIENCE):
            while (await queue.info()).failed < len(ids):
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    for path, name in (("/api/v1/dead-letters?queue=mails&limit=20", "next"), ("/queue?name=mails&tab=failed", "")):
        found, following = list[str](), path
        while following:
            answer = await site.ask("GET", following)
            found += re.findall(r'"id":"(job..)"' if name else r'aria-label="Choose (job..)', answer.text)
            older = re.search(r'href="([^"]*)" rel="next"', answer.text)
            following = (answer.json()["next"] or "") if name else html.unescape(older[1]) if older else ""
        assert sorted(found) == sorted(ids), path


async def _never(task: bytes) -> None:
    raise AssertionError
