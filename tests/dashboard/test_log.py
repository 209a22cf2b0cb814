"""The page of the log: everything newest first, filtered, and nothing of queues that the viewer may not see."""

from __future__ import annotations

import re

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.ops.driver import Desk
from tests.support.servers import Server
from worqr.dashboard import pages, reader


def events(text: str) -> list[str]:
    """The words for the events in the rows of the page, in their order."""
    return re.findall(r"</th><td>([a-z ]+)</td>", text)


async def test_acts_are_listed_newest_first(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mail").pause("the provider is down")
    await site.post("/resume", queue="mail", back="/queues")
    text = (await site.get("/log")).text
    assert events(text) == ["resumed", "paused"]
    assert "the provider is down" in text
    assert 'href="/queue?name=mail"' in text


@pytest.mark.leaves("{*}:paused")
async def test_the_log_is_filtered(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mail").pause()
    await connected.queue("web").pause()
    await site.post("/resume", queue="web", back="/queues")
    assert events((await site.get("/log", kind="paused")).text) == ["paused", "paused"]
    assert events((await site.get("/log", queue="web")).text) == ["resumed", "paused"]
    assert events((await site.get("/log", who="ada", queue="web")).text) == ["resumed"]
    nothing = (await site.get("/log", kind="paused", who="ada")).text
    assert "No entry matches." in nothing
    assert '<option value="paused" selected>' in nothing


@pytest.mark.leaves("*")
async def test_who_did_it_is_chosen_among_people(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1")  # nobody did it
    text = (await site.get("/log")).text
    assert events(text) == ["joined"]
    assert re.findall(r'<option value=""[^>]*>(\w*)', text) == ["all", "anybody"]
    desk.wipe()


async def test_an_empty_log_says_what_would_be_there(connected: worqr.Mesh, site: Site) -> None:
    assert "Nothing has happened yet." in (await site.get("/log")).text


@pytest.mark.leaves("{*}:paused")
async def test_entries_of_hidden_queues_do_not_exist(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mail").pause()
    await connected.queue("web").pause("s3cr3t plan")
    await connected._client.note("joined", text="a worker")
    site.viewer = reader("eve", ("mail",))
    text = (await site.get("/log")).text
    assert events(text) == ["paused"]
    assert "web" not in text.partition("<main")[2]
    assert "s3cr3t" not in text


async def test_pages_of_the_log(connected: worqr.Mesh, site: Site) -> None:
    for n in range(pages.LOG_PAGE + 1):
        await connected._client.note("paused", queue="mail", text=f"number {n}")
    first, second = (await site.get("/log")).text, (await site.get("/log", page="2")).text
    assert (len(events(first)), len(events(second))) == (pages.LOG_PAGE, 1)
    assert f"number {pages.LOG_PAGE}<" in first
    assert "number 0<" in second
    assert "1–100 of 101" in first
