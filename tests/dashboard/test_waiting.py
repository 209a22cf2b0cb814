"""The list of waiting tasks of a queue, from its front and from its end."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import unquote

import pytest
import trio

import worqr
from tests.dashboard.conftest import Batches, Site
from tests.dashboard.test_pages import text_of
from tests.dashboard.test_requests import MOST
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.dashboard import Viewer
from worqr.dashboard.forms import mark_of
from worqr.keys import QueueKeys

LEFT = pytest.mark.leaves("*")


def rows_of(page: str) -> list[list[str]]:
    """The cells of the list of tasks, as text."""
    found = page.partition('aria-label="Tasks"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", found.partition("<tbody>")[2], re.DOTALL)
    return [[" ".join(text_of(cell).split()) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


async def whole_list(site: Site, **query: str) -> list[list[str]]:
    """The rows of all pages of a list."""
    page = (await site.get("/queue", **query)).text
    found = rows_of(page)
    while following := re.search(r'href="([^"]*)" rel="next"', page):
        page = (await site.ask("GET", html.unescape(following[1]))).text
        found += rows_of(page)
    return found


@LEFT
async def test_each_task_has_its_place_from_either_end(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("many").enqueue(*[b"task %d" % n for n in range(120)])
    expected = [[f"{n + 1}", "plain task", f"task {n}"] for n in range(120)]
    assert [row[:3] for row in await whole_list(site, name="many")] == expected
    assert [row[:3] for row in await whole_list(site, name="many", order="end")] == expected[::-1]
    assert (await site.get("/queue", name="many", order="middle")).status_code == 400


@LEFT
async def test_a_row_has_the_size_and_the_failures(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    queue = connected.queue("mails")
    await queue.dispatch(b"x" * 2048, id="tried")
    with server.client() as client:
        client.hset(QueueKeys(prefix, "mails").job("tried"), mapping={"failures": 2, "stalls": 1})
    [row] = rows_of((await site.get("/queue", name="mails")).text)
    assert row[1:3] == ["1", "tried"]
    assert row[4:6] == ["2.0 KiB", "2 of 3 attempts"]
    [row] = (await site.get("/api/v1/tasks", queue="mails")).json()["rows"]
    assert (row["place"], row["lane"], row["size"], row["failures"], row["attempts"]) == (1, None, 2048, 2, 3)


@LEFT
async def test_places_of_lanes_are_within_the_lane(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    note = "Places of lanes are within a lane"
    await queue.enqueue(b"plain")
    assert note not in (await site.get("/queue", name="mails")).text
    for lane in ("<b>acme", "zebra"):
        for n in range(2):
            await queue.dispatch(b"%d" % n, lane=lane, id=f"{lane[-4:]}-{n}")
    page = (await site.get("/queue", name="mails")).text
    assert note in page
    assert "<b>acme" not in page
    named = [row[1:3] for row in rows_of(page)]
    acme, zebra = (
        [["1", "acme-0 in lane <b>acme"], ["2", "acme-1 in lane <b>acme"]],
        [
            ["1", "ebra-0 in lane zebra"],
            ["2", "ebra-1 in lane zebra"],
        ],
    )
    assert named == [["1", "plain task"], *acme, *zebra]
    end = [row[1:3] for row in rows_of((await site.get("/queue", name="mails", order="end")).text)]
    assert end == [["1", "plain task"], *acme[::-1], *zebra[::-1]]
    rows = (await site.get("/api/v1/tasks", queue="mails", order="end", limit="2")).json()
    assert [(row["lane"], row["place"]) for row in rows["rows"]] == [(None, 1), ("<b>acme", 2)]
    assert "order=end" in rows["next"]


@LEFT
async def test_the_switch_keeps_the_rest_of_the_address(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    page = (await site.get("/queue", name="mails", range="8h")).text
    last_first = html.unescape(re.findall(r'href="([^"]*)">Last first', page)[0])
    assert last_first == "/queue?name=mails&tab=waiting&order=end&range=8h#tasks"
    page = (await site.ask("GET", last_first)).text
    assert 'aria-current="true">Last first' in page
    assert (
        html.unescape(re.findall(r'href="([^"]*)">Next first', page)[0])
        == "/queue?name=mails&tab=waiting&range=8h#tasks"
    )


@asynccontextmanager
async def led(mesh: worqr.Mesh) -> AsyncGenerator[None]:
    """A mesh with a leader that writes snapshots. Without one, a page has to read all queues by itself."""
    async with mesh.join(grace=0):
        with trio.fail_after(PATIENCE):
            while (await mesh.info()).source != "leader":
                await trio.sleep(0.05)
        yield


@LEFT
async def test_either_end_of_a_million_tasks_is_one_small_look(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site, batches: Batches
) -> None:
    total = 1_000_000
    with server.client() as client:
        for start in range(0, total, 10_000):
            client.lpush(QueueKeys(prefix, "many").base, *[b"%d" % n for n in range(start, start + 10_000)])
    async with led(connected):
        for order, first in (("front", "1"), ("end", "1,000,000")):
            known = set(batches.sent)
            page = await Site(connected).get("/queue", name="many", order=order)
            rows = rows_of(page.text)
            assert (len(rows), rows[0][0]) == (50, first)
            assert len(page.content) < 100_000
            sent = batches.of_new_links(known)
            assert len(sent) <= MOST
            assert sum(batch.count("list_jobs") for batch in sent) == 1
    await connected.queue("many").delete()


@LEFT
async def test_a_queue_of_many_shards_is_listed_in_few_requests(server: Server, prefix: str, batches: Batches) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    queue = mesh.queue("wide", shards=64)
    async with led(mesh):
        for n in range(5):
            await queue.dispatch(b"1", id=f"job-{n}")
        for order in ("front", "end"):
            known = set(batches.sent)
            page = (await Site(mesh).get("/queue", name="wide", order=order)).text
            assert sorted(row[2].partition(" ")[0] for row in rows_of(page)) == [f"job-{n}" for n in range(5)]
            assert len(batches.of_new_links(known)) <= MOST
        await queue.delete()


@LEFT
async def test_the_button_of_a_wait_ends_it_once(connected: worqr.Mesh, site: Site) -> None:
    @connected.workflow(name="fulfil")
    async def fulfil() -> None:
        await worqr.sleep(3600)

    job = await fulfil.options(id="order-7").dispatch()
    async with connected.join(grace=0):
        async with job.watch(PATIENCE) as states:
            async for status in states:
                if status.state == "suspended":
                    break
        page = await site.get("/job", queue="fulfil", id="order-7")
        assert "End the wait" in page.text
        life = (await fulfil.queue.read("order-7")).life
        form = {
            "queue": "fulfil",
            "id": "order-7",
            "life": str(life),
            "entry": mark_of("sleep"),
            "back": "/job?queue=fulfil&id=order-7",
        }
        assert "Run again from here" in page.text
        rewound = await site.post("/rewind", **form)
        assert "rewind:1" in unquote(rewound.headers["location"])
        assert "1 entry was dropped" in (await site.ask("GET", rewound.headers["location"])).text
        async with job.watch(PATIENCE) as states:
            async for status in states:
                if status.state == "suspended":
                    break
        other = {**form, "entry": mark_of("sleep #2")}
        assert "rewind-none" in (await site.post("/rewind", **other)).headers["location"]
        assert "rewind-none" in (await site.post("/rewind", **{**form, "life": str(life + 1)})).headers["location"]
        before, site.viewer = site.viewer, Viewer("bob", ("look", "send"))
        assert (await site.post("/rewind", **form)).status_code == 403
        assert "Run again from here" not in (await site.get("/job", queue="fulfil", id="order-7")).text
        site.viewer = before
        form["entry"] = "sleep"  # as a program has it from the time line
        assert "wait-ended" in (await site.post("/end-wait", **form)).headers["location"]
        assert "wait-none" in (await site.post("/end-wait", **{**form, "life": str(life + 1)})).headers["location"]
        await job.cancel(wait=5)
    assert [entry.text for entry in await connected.log() if entry.kind == "sent"] == ["the end of: sleep"]
    assert [(entry.text, entry.count) for entry in await connected.log() if entry.kind == "rewound"] == [
        ("from: sleep", 1)
    ]


@LEFT
async def test_no_form_of_a_wait_shows_an_argument_that_the_page_hides(connected: worqr.Mesh, site: Site) -> None:
    @connected.step(name="login", retry=worqr.RetryPolicy(max_failures=2, min_backoff=3600, max_backoff=3600))
    async def login(password: str) -> None:
        raise ValueError("declined")

    @connected.workflow(name="report")
    async def report() -> None:
        await login(password="hunter2")

    job = await report.options(id="r").dispatch()
    async with connected.join(grace=0):
        async with job.watch(PATIENCE) as states:
            async for status in states:
                if status.state == "suspended":
                    break
        page = (await site.get("/job", queue="report", id="r")).text
        assert "retry of login" in page
        assert "hunter2" not in page
        life, key = (await report.queue.read("r")).life, 'retry of login {"password":"hunter2"} #1'
        form = {"queue": "report", "id": "r", "life": str(life), "entry": mark_of(key), "back": "/"}
        assert form["entry"] in page
        assert "wait-ended" in (await site.post("/end-wait", **form)).headers["location"]
        await job.cancel(wait=5)
