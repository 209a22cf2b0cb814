"""Who serves a queue and with which options, and the shards of a queue, on its page."""

from __future__ import annotations

import html
import re
from functools import partial

import pytest
import trio

import worqr
from tests.dashboard.conftest import Batches, Site
from tests.dashboard.scene import open_scene
from tests.dashboard.test_live import opened
from tests.dashboard.test_pages import text_of
from tests.dashboard.test_requests import MOST
from tests.dashboard.test_waiting import led, rows_of
from tests.support.servers import Server
from worqr.dashboard.pages import options_of, serving_of
from worqr.keys import QueueKeys
from worqr.ops import ServedPolicy
from worqr.policy import Policy, shown_fields

LEFT = pytest.mark.leaves("*")


def table_of(page: str, label: str) -> list[list[str]]:
    """The rows of a table, as text."""
    found = page.partition(f'aria-label="{label}"')[2].partition("</table>")[0].partition("<tbody>")[2]
    rows = re.findall(r"<tr>(.*?)</tr>", found, re.DOTALL)
    return [[" ".join(text_of(cell).split()) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_options_as_texts() -> None:
    usual = {"max_stalls": "3", "keep_failed": "1000", "on_failure": "0"}
    known = options_of(usual | shown_fields(Policy()))
    assert (known.failures, known.timeouts, known.stalls, known.backoff) == ("10", "3", "3", "2 s to 5 min")
    assert (known.timeout, known.errors, known.kept, known.results, known.handler) == (
        "none",
        "all",
        "1,000",
        "not kept",
        "none",
    )
    policy = Policy(timeout=1.5, retry_on=frozenset({"b.B", "a.A"}), fail_on=frozenset({"c.C"}))
    known = options_of(shown_fields(policy) | {"result_ttl": "60000", "on_failure": "1"})
    assert (known.timeout, known.errors) == ("1.5 s", "only a.A b.B; never c.C")
    assert (known.results, known.handler) == ("1 min", "handler")
    for foreign in ({}, {"max_failures": "-1", "min_backoff": "x", "on_failure": "9", "keep_failed": "²"}):
        unknown = options_of(foreign)
        assert {unknown.failures, unknown.backoff, unknown.kept, unknown.handler} == {"–"}


def test_what_differs() -> None:
    one, other = ServedPolicy(2, ["A", "B"], {"max_stalls": "3"}), ServedPolicy(1, ["C"], {"max_stalls": "4"})
    assert serving_of([one]).differing == set()
    assert serving_of([one, other]).differing == {"stalls"}


@LEFT
async def test_the_page_of_a_queue_names_its_workers_and_their_options(
    server: Server, prefix: str, connected: worqr.Mesh, site: Site
) -> None:
    async def handler(task: bytes) -> None: ...

    async def page() -> str:
        return (await site.get("/queue", name="mails")).text

    assert "Retries and other options" not in await page()
    retry = worqr.RetryPolicy(max_failures=7, min_backoff=1, max_backoff=60, fail_on=(ValueError,))
    other = worqr.Mesh(server.url, prefix=prefix, app="<b>older")
    async with connected.join(grace=0) as peer, other.join(grace=0) as second, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, retry=retry, timeout=30, result_ttl=60), "mails", handler)
        found = await page()
        [row] = table_of(found, "Options of the workers")
        assert row[1:] == ["7", "3", "3", "1 s to 1 min", "30 s", "never ValueError", "1,000", "1 min", "none"]
        assert "mixed" not in found
        await nursery.start(partial(second.serve, retry=retry, timeout=30), "mails", handler)
        found = await page()
        assert "The workers of this queue have different options." in found
        assert sorted(row[-2] for row in table_of(found, "Options of the workers")) == ["1 min", "not kept"]
        assert re.findall(r"<strong>([^<]*)</strong>", found) in (["1 min", "not kept"], ["not kept", "1 min"])
        assert "<b>older" not in found
        nursery.cancel_scope.cancel()
    assert "Retries and other options" not in await page()


@LEFT
async def test_options_that_may_not_be_read_do_not_hide_the_queue(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worqr.dashboard import pages

    async def refused(visit: object, name: str) -> None:
        raise worqr.RefusedByServer("NOPERM <b>no")

    monkeypatch.setattr(pages, "read_serving", refused)
    await connected.queue("mails").enqueue(b"1")
    page = (await site.get("/queue", name="mails")).text
    assert "The server refuses to show the options of the workers: NOPERM &lt;b&gt;no" in page
    assert len(rows_of(page)) == 1


@LEFT
async def test_each_shard_has_its_counts_and_its_own_list(server: Server, prefix: str, batches: Batches) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    queue = mesh.queue("wide", shards=3)
    async with led(mesh):
        for n in range(7):
            await queue.enqueue(b"task %d" % n)  # to each shard in turn
        await queue.dispatch(b"1", id="later", delay=3600)
        site, known = Site(mesh), set(batches.sent)
        page = (await site.get("/queue", name="wide")).text
        assert len(batches.of_new_links(known)) <= MOST
        shards = table_of(page, "Shards")
        assert [row[0] for row in shards] == ["Shard 1", "Shard 2", "Shard 3"]
        assert sorted(row[1] for row in shards) == ["2", "2", "3"]
        assert sorted(row[2] for row in shards) == ["0", "0", "1"]
        assert "Each shard has places of its own." in page
        named = [row[1].rpartition(" in ")[2] for row in rows_of(page)]
        assert named == [row[0].lower() for row in shards for _ in range(int(row[1]))]
        seen: list[str] = []
        for row, link in zip(shards, re.findall(r'<a href="([^"]*shard=\d#tasks)"', page), strict=True):
            listed = rows_of((await site.ask("GET", html.unescape(link))).text)
            assert [each[0] for each in listed] == [f"{n + 1}" for n in range(int(row[1]))]
            seen += [each[2] for each in listed]
        assert sorted(seen) == [f"task {n}" for n in range(7)]
        assert (await site.get("/queue", name="wide", shard="4")).status_code == 404
        assert (await site.get("/queue", name="wide", shard="x")).status_code == 400
        rows = (await site.get("/api/v1/tasks", queue="wide", shard="2", order="end")).json()["rows"]
        assert [row["place"] for row in rows] == list(range(len(rows), 0, -1))
        async with opened(site, "view=queue&name=wide") as stream:
            before = await stream.wait_for("set")
            await queue.enqueue(b"more")
            new = await stream.wait_for("set", lambda new: "queue.wide.waiting" in new)
            [key] = [key for key in new if key.startswith("shard.wide.")]
            assert int(new[key]) == int(before[key]) + 1
        await queue.delete()


@LEFT
async def test_a_queue_of_one_shard_has_no_list_of_shards(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    page = (await site.get("/queue", name="mails")).text
    assert 'aria-label="Shards"' not in page
    assert "Each shard" not in page


@LEFT
async def test_options_of_a_foreign_program_are_no_markup(server: Server, prefix: str) -> None:
    async with open_scene(server.url, prefix) as scene:
        name = scene.names["slow"]
        key = QueueKeys(prefix, name).policy(scene.worker)
        with server.client() as client:
            client.hset(key, "options", '{"max_failures":"1","retry_on":"<img src=x>"}')
        page = (await Site(scene.mesh).get("/queue", name=name)).text
        assert "only &lt;img src=x&gt;" in page
        assert "<img" not in page
