"""Acts on all tasks that a filter shows; and the entry that each act leaves in the log of the mesh."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.scene import open_scene
from tests.dashboard.test_live import opened
from tests.support.children import ROOT
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.dashboard import Viewer, operator
from worqr.dashboard.app import ROUTES
from worqr.dashboard.bulk import Bulk
from worqr.dashboard.forms import mark_of

LEFT = pytest.mark.leaves("*")
OTHERS = {"joined", "leader", "left", "bulk_begun", "more"}
"""Kinds of entries that do not stand for an act of an operator."""


async def fill_failed(mesh: worqr.Mesh, name: str, count: int) -> None:
    """Let so many tasks fail, every third with a KeyError and the others with a ValueError."""
    queue = mesh.queue(name)

    async def fails(task: bytes) -> None:
        raise (ValueError if int(task) % 3 else KeyError)(int(task))

    once = worqr.RetryPolicy(max_failures=1)
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        before = (await queue.info()).failed
        await queue.enqueue(*[b"%d" % number for number in range(count)])
        await nursery.start(partial(peer.serve, name, fails, retry=once, keep_failed=100_000))
        with trio.fail_after(PATIENCE):
            while (await queue.info()).failed < before + count:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def act_of(site: Site, location: str) -> Bulk:
    found = site.app._bulk_acts.get(parse_qs(urlsplit(location).query)["id"][0])  # pyright: ignore[reportPrivateUsage]
    assert found is not None
    return found


async def ended(site: Site, answer: Any) -> str:
    """Wait for the end of the act that a form has begun, and return the text of its page."""
    assert answer.status_code == 303, answer.text
    assert await trio.to_thread.run_sync(act_of(site, answer.headers["location"]).ended.wait, PATIENCE)
    page = (await site.ask("GET", answer.headers["location"])).text
    assert "Stop</button>" not in page
    return page


async def confirmed(site: Site, act: str, **query: str) -> dict[str, str]:
    """The fields of the form on the page of the confirmation."""
    page = (await site.get("/confirm", act=act, **query)).text
    hidden = [part.split('name="')[1].split('"')[0::2] for part in page.split('<input type="hidden" ')[1:]]
    values = [part.split('value="')[1].split('"')[0] for part in page.split('<input type="hidden" ')[1:]]
    return {name[0]: value for name, value in zip(hidden, values, strict=True)}


async def acts_in_log(mesh: worqr.Mesh) -> list[worqr.LogEntry]:
    """The entries of acts, newest first."""
    return [entry for entry in await mesh.log(limit=1000) if entry.kind not in OTHERS][::-1]


@LEFT
async def test_a_filter_chooses_records(connected: worqr.Mesh, site: Site) -> None:
    await fill_failed(connected, "mails", 6)
    first, *_, last = sorted(await connected.queue("mails").failed.list(), key=lambda each: each.at)
    tab = {"name": "mails", "tab": "failed"}
    future = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for query, count in (
        ({}, 6),
        ({"error": "KeyError"}, 2),
        ({"error": "KeyError", "before": future}, 2),
        ({"since": future}, 0),
        ({"before": first.at.isoformat()}, 0),
        ({"job": last.id}, 1),
        ({"job": last.id, "error": last.error.type}, 1),
        ({"job": last.id, "since": future}, 0),
        ({"job": "unknown"}, 0),
    ):
        page = (await site.get("/queue", **tab, **query)).text
        assert page.count('aria-label="Choose ') - page.count('aria-label="Choose all"') == count, query
    for name in ("before", "since", "older"):
        assert (await site.get("/queue", **tab, **{name: "tomorrow"})).status_code == 400
        assert (await site.get("/queue", **tab, **{name: "0001-01-01T00:00:00+23:00"})).status_code == 400


@LEFT
async def test_a_list_reads_the_beginning_of_payloads_only(connected: worqr.Mesh, site: Site) -> None:
    large = b"7" * 50_000

    async def fails(task: bytes) -> None:
        raise worqr.Failure("no")

    queue = connected.queue("mails")
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await queue.dispatch(large, id="large")
        await nursery.start(peer.serve, "mails", fails)
        with trio.fail_after(PATIENCE):
            while (await queue.info()).failed < 1:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    (record,) = await queue.failed.list(payload=False)
    assert (len(record.task), record.size) == (4096, 50_000)
    (found,) = (await queue.read("large")).dead_letters
    assert (len(found.task), found.size) == (4096, 50_000)
    assert (await site.get("/queue", name="mails", tab="failed")).status_code == 200


@LEFT
async def test_all_that_a_filter_shows_is_retried_or_deleted(connected: worqr.Mesh, site: Site) -> None:
    await fill_failed(connected, "mails", 300)
    queue = connected.queue("mails")
    form = await confirmed(site, "retry", queue="mails", list="failed", error="KeyError")
    assert (form["count"], form["error"]) == ("100", "KeyError")
    await fill_failed(connected, "mails", 3)  # what fails later is not meant
    page = await ended(site, await site.post("/retry-all", **form))
    assert "100 tasks were put back into the queue." in page
    info = await queue.info()
    assert (info.waiting, info.failed) == (100, 203)
    form = await confirmed(site, "drop", queue="mails", list="failed", error="ValueError")
    assert "202 tasks were deleted from the list." in await ended(site, await site.post("/drop-all", **form))
    assert (await queue.info()).failed == 1
    page = await ended(site, await site.post("/drop-all", **form))
    assert "There was nothing to do" in page
    entries = [(each.kind, each.who, each.count) for each in await acts_in_log(connected)]
    assert entries == [("dropped", "ada", 0), ("dropped", "ada", 202), ("retried", "ada", 100)]


@LEFT
async def test_an_act_can_be_stopped_and_done_again(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_failed(connected, "mails", 1200)
    queue, told = connected.queue("mails"), Bulk._tried  # pyright: ignore[reportPrivateUsage]
    form = await confirmed(site, "retry", queue="mails")
    answer = await site.post("/retry-all", **form)
    assert (answer.status_code, "type the number 1,200" in answer.text) == (400, True)

    def stop_after_the_third(self: Bulk, tried: int, total: int) -> None:
        if tried == 300:
            self.stop()
        told(self, tried, total)

    with monkeypatch.context() as patch:
        patch.setattr(Bulk, "_tried", stop_after_the_third)
        page = await ended(site, await site.post("/retry-all", **form, typed="1,200"))
    assert "Stopped after 300 of 1,200 tasks." in page
    info = await queue.info()
    assert (info.waiting, info.failed) == (300, 900)
    oldest = {int(task) for task in await queue.tasks(1000)}
    assert len(oldest) == 300
    assert "900 tasks were put back" in await ended(
        site, await site.post("/retry-all", **{**form, "count": "900"}, typed="")
    )
    info = await queue.info()
    assert (info.waiting, info.failed) == (1200, 0)
    entries = [(each.kind, each.count, each.text) for each in await acts_in_log(connected)]
    assert entries == [("retried", 900, "failed"), ("bulk_stopped", 300, "retried, of 1200")]


@LEFT
async def test_a_queue_has_one_act_at_a_time_and_a_page_that_moves(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_failed(connected, "mails", 250)
    reached, go_on, told = trio.Event(), threading.Event(), Bulk._tried  # pyright: ignore[reportPrivateUsage]
    token = trio.lowlevel.current_trio_token()

    def wait_after_the_first(self: Bulk, tried: int, total: int) -> None:
        told(self, tried, total)
        if tried == 100:
            token.run_sync_soon(reached.set)
            go_on.wait(PATIENCE)

    form = await confirmed(site, "retry", queue="mails")
    monkeypatch.setattr(Bulk, "_tried", wait_after_the_first)
    answer = await site.post("/retry-all", **form)
    location = answer.headers["location"]
    with trio.fail_after(PATIENCE):
        await reached.wait()
    page = (await site.ask("GET", location)).text
    assert "100 of 250 tasks" in page
    assert 'action="/stop-retry"' in page
    site.viewer = operator("bob")
    assert "100 of 250 tasks" in (await site.get("/bulk")).text
    assert f'<a href="{location}">An act' in (await site.get("/queue", name="mails")).text
    second = await site.post("/retry-all", **form)
    assert (second.status_code, "Nothing was changed" in second.text) == (409, True)
    site.viewer = operator("eve", queues=("other",))
    assert (await site.ask("GET", location)).status_code == 404
    act = act_of(site, location)
    assert (await site.post("/stop-retry", id=act.id)).status_code == 400
    assert act.running
    site.viewer = operator("bob")
    assert (await site.post("/stop-drop", id=act.id)).status_code == 400
    async with opened(site, f"view=bulk&id={act.id}") as stream:
        assert "100 of 250 tasks" in str(await stream.wait_for("set"))
        go_on.set()
        await stream.wait_for("set", lambda texts: "250 tasks were put back" in str(texts))
    assert await trio.to_thread.run_sync(act.ended.wait, PATIENCE)
    assert "An act on many tasks" not in (await site.get("/queue", name="mails")).text


@LEFT
async def test_scheduled_jobs_run_now_and_a_queue_is_cancelled_or_deleted(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    for number in range(120):
        await queue.dispatch(b"1", id=f"j{number}", delay=3600 + number)
    form = await confirmed(site, "run", queue="mails")
    await queue.dispatch(b"1", id="later", delay=9999)
    assert "120 tasks were made due." in await ended(site, await site.post("/run-all", **form))
    info = await queue.info()
    assert (info.waiting, info.scheduled) == (120, 1)
    form = await confirmed(site, "cancel", queue="mails")
    assert form["count"] == "121"
    answer = await site.post("/cancel-all", **form, reason="moving")
    assert "121 tasks were cancelled." in await ended(site, answer)
    await queue.enqueue(b"1", b"2")
    form = await confirmed(site, "delete", queue="mails")
    assert (await site.post("/delete", **form, typed="mail")).status_code == 400
    assert (await queue.info()).waiting == 2
    assert "The queue was deleted, with the 2 tasks" in await ended(
        site, await site.post("/delete", **form, typed="mails")
    )
    assert (await queue.info()).waiting == 0
    entries = [(each.kind, each.who, each.count, each.text) for each in await acts_in_log(connected)]
    assert entries == [
        ("deleted", "ada", None, ""),
        ("cancelled_all", "ada", 121, "ada: moving"),
        ("run_now", "ada", 120, ""),
    ]
    site.viewer = Viewer("bob", ("look", "retry"))
    assert (await site.get("/confirm", act="delete", queue="mails")).status_code == 403
    assert (await site.get("/confirm", act="drop", queue="mails")).status_code == 403
    assert "Delete the queue" not in (await site.get("/queue", name="mails")).text


ACTS: dict[str, dict[str, str]] = {
    "/cancel": {"queue": "orders", "id": "later", "reason": "because"},
    "/enqueue": {"queue": "orders", "payload": "by hand"},
    "/retry": {"queue": "orders-failing", "id": "job-1"},
    "/send": {"queue": "orders-flow", "id": "job-1", "name": "approved", "value": '{"a": 1}'},
    "/end-wait": {"queue": "orders-flow", "id": "job-1", "entry": mark_of("wait for approved")},
    "/rewind": {"queue": "orders-flow", "id": "job-1", "entry": mark_of("wait for approved")},
    "/run-now": {"queue": "orders", "id": "later"},
    "/drop": {"queue": "orders-failing", "id": "job-1"},
    "/run-again": {"queue": "orders", "kept": ""},
    "/forget": {"queue": "orders", "kept": ""},
    "/cancel-tagged": {"queue": "orders", "tag": "red", "reason": "because"},
    "/retry-tagged": {"queue": "orders", "tag": "red"},
    "/forget-tagged": {"queue": "orders", "tag": "red", "typed": "red"},
    "/pause": {"queue": "orders", "reason": "because"},
    "/resume": {"queue": "orders"},
    "/limit": {"queue": "orders", "concurrency": "3"},
    "/lane-weight": {"queue": "orders", "lane": "acme", "weight": "3"},
    "/schedule": {"name": "nightly", "paused": "yes"},
    "/schedule-run": {"name": "nightly"},
    "/schedule-times": {"name": "nightly", "cron": "0 4 * * *"},
    "/schedule-store": {"name": "report/mine", "queue": "orders-typed", "every": "3600", "arg.number": "1"},
    "/schedule-delete": {"name": "report/acme"},
    "/retry-all": {"queue": "orders-failing", "count": "1"},
    "/drop-all": {"queue": "orders-failing", "count": "1"},
    "/run-all": {"queue": "orders", "count": "1"},
    "/cancel-all": {"queue": "orders", "count": "3", "reason": "because"},
    "/cancel-batch": {"queue": "orders-batched", "batch": "import-7", "count": "1", "reason": "because"},
    "/retry-batch": {"queue": "orders-batched", "batch": "import-7", "count": "1"},
    "/delete": {"queue": "orders", "count": "3", "typed": "orders"},
    "/worker-ask": {"worker": "", "what": "quiet"},
    "/worker-evict": {"worker": "", "typed": str(os.getpid())},
}
"""A form for each act that changes the mesh."""
STOPS = {"/stop-retry", "/stop-drop"}
"""They change nothing in the mesh; the entry is that of the act."""


@LEFT
async def test_each_act_leaves_one_entry_in_the_log(server: Server, prefix: str) -> None:
    posts = {path for path, route in ROUTES.items() if route.method == "POST"}
    assert posts == set(ACTS) | STOPS, "add a form for the new route"
    async with trio.open_nursery() as nursery:
        for path in ACTS:
            nursery.start_soon(leaves_one_entry, server, f"{prefix}-{path.strip('/')}", path)


async def leaves_one_entry(server: Server, name: str, path: str) -> None:
    """Post the form of `path` in a mesh of its own, and look for its entry."""
    form = ACTS[path]
    async with open_scene(server.url, name) as scene:
        site, before = Site(scene.mesh), await scene.mesh.log()
        fields = {"id": scene.worker, **form} if "worker" in form else form
        if "kept" in form:
            queue = scene.mesh.queue("orders")
            await (await queue.dispatch(b"x", delay=3600, keep=worqr.Keep())).cancel()
            [job] = await queue.jobs(state="cancelled")
            fields = {**form, "kept": job.kept or ""}
        answer = await site.post(path, **fields)
        if "/bulk" in answer.headers["location"]:
            await ended(site, answer)
        known = {entry.id for entry in before}
        found = [entry for entry in await acts_in_log(scene.mesh) if entry.id not in known and entry.who == "ada"]
        if path == "/retry-batch":  # each queue of the batch has an entry, too
            assert [entry.kind for entry in found] == ["batch_retried", "retried"]
            del found[1]
        assert len(found) == 1, (path, found)
        assert "worker" not in form or found[0].worker == scene.worker, path
        assert found[0].queue == form.get("queue", "") or path.startswith("/schedule"), path
        if "id" in form:
            assert (found[0].job, found[0].count) == (form["id"], 1), path
        assert form.get("reason", "") in found[0].text, path
    with server.client() as client:
        client.delete(*client.scan_iter(f"{name}:*"), *client.scan_iter(f"{{{name}}}:*"))


@LEFT
async def test_an_act_that_found_nothing_and_a_payload_that_was_seen_leave_an_entry(
    connected: worqr.Mesh, site: Site
) -> None:
    await connected.queue("mails").dispatch(b"secret", id="one", delay=3600)
    for path in ("/retry", "/drop"):
        await site.post(path, queue="mails", id="unknown")
    await site.post("/cancel", queue="mails", id="unknown")
    assert (await site.get("/payload", queue="mails", id="one")).content == b"secret"
    entries = [(each.kind, each.who, each.job, each.count) for each in await acts_in_log(connected)]
    assert entries[0] == ("payload_seen", "ada", "one", None)
    assert entries[1:] == [(kind, "ada", "unknown", 0) for kind in ("cancelled", "dropped", "retried")]


@LEFT
def test_it_runs_when_mounted_under_asyncio_without_a_lifespan(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, patience=10)

    async def fill() -> None:
        async with mesh.connect():
            await fill_failed(mesh, "mails", 30)

    trio.run(fill)
    site = Site(mesh)

    async def act() -> str:
        form = await confirmed(site, "retry", queue="mails")
        return str((await site.post("/retry-all", **form)).headers["location"])

    location = asyncio.run(act())  # the loop of the request is gone before the act needs to have ended
    found = act_of(site, location)
    assert found.ended.wait(PATIENCE)
    assert (found.progress.state, found.progress.changed) == ("finished", 30)
    assert worqr.sync(mesh.queue("mails").info).waiting == 30
    mesh.close()


CHILD = """
import sys
import worqr
from worqr.dashboard.bulk import Bulk, Order
url, prefix = sys.argv[1:]
bulk = Bulk(Order("retry", "mails", "ada", 1500), lambda: worqr.Mesh(url, prefix=prefix, patience=10))
told = bulk._tried
def tell(tried, total):
    print(tried, flush=True)
    told(tried, total)
bulk._tried = tell
bulk.start()
bulk.ended.wait()
"""


def started(url: str, prefix: str) -> subprocess.Popen[str]:
    """A process that retries all failed tasks, and prints how far it is."""
    return subprocess.Popen([sys.executable, "-c", CHILD, url, prefix], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@LEFT
async def test_after_kill_9_the_same_act_goes_on(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    await fill_failed(connected, "mails", 1500)
    queue = connected.queue("mails")
    with started(server.url, prefix) as child:
        assert child.stdout is not None
        while True:
            line = await trio.to_thread.run_sync(child.stdout.readline)
            if not line or int(line) >= 500:
                break
        child.kill()
    info = await queue.info()
    assert info.waiting + info.failed == 1500
    assert 0 < info.failed < 1500
    left = [record.task for record in await queue.failed.list(5000)]
    waiting = await queue.tasks(5000)
    assert Counter(left + waiting) == Counter(b"%d" % number for number in range(1500))
    form = await confirmed(site, "retry", queue="mails")
    assert form["count"] == str(info.failed)
    page = await ended(site, await site.post("/retry-all", **form, typed=form["count"]))
    assert f"{info.failed:,} tasks were put back" in page
    assert Counter(await queue.tasks(5000)) == Counter(b"%d" % number for number in range(1500))
    assert (await queue.info()).failed == 0


async def test_bad_forms_begin_nothing(unconnected: Any) -> None:
    """Each is refused, or finds no server; none begins an act."""
    site = unconnected()
    for path in ("/retry-all", "/delete", "/stop-retry"):
        assert (await site.post(path, queue="mails", id="x")).status_code in (400, 503)
    assert site.app._bulk_acts.newest_first() == []


@LEFT
async def test_an_act_while_the_server_is_away_says_so(connected: worqr.Mesh, site: Site) -> None:
    await fill_failed(connected, "mails", 3)
    form = await confirmed(site, "retry", queue="mails")
    acts = site.app._bulk_acts  # pyright: ignore[reportPrivateUsage]
    acts._make_mesh = lambda: worqr.Mesh("redis://127.0.0.1:1/0", patience=0.2)  # pyright: ignore[reportPrivateUsage]
    page = await ended(site, await site.post("/retry-all", **form))
    assert "To go on, do it again." in page
    assert (await connected.queue("mails").info()).failed == 3
    for bad in ("", "-1", "x", "9" * 13):
        assert (await site.post("/retry-all", **{**form, "count": bad})).status_code == 400
