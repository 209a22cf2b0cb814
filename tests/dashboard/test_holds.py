"""The sentences about tasks that do not start, the load for programs that scale workers, and both on pages."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_pages import info, state, text_of
from tests.ops.driver import Desk
from tests.support.servers import Server
from worqr import Limit
from worqr.dashboard import Viewer
from worqr.dashboard.state import lanes_text, limits_text, may_run, needs_of, pause_text
from worqr.mesh_records import AppInfo, QueueInfo

LEFT = pytest.mark.leaves("*")


def held(held_back: str, held_for: float | None = None, **more: Any) -> QueueInfo:
    fields = {"waiting": 10, "running": 2, "workers": 1, "held_back": held_back, "held_for": held_for, **more}
    return replace(info("q"), **fields)


def test_the_sentences_of_a_queue() -> None:
    assert pause_text(info("q")) == limits_text(info("q")) == lanes_text(info("q")) == ""
    assert pause_text(held("paused", paused="")) == "No worker takes tasks of this queue."
    assert pause_text(held("paused", 90, paused="x")).endswith("The pause ends in 1 min 30 s.")
    limits = (Limit(5), Limit(rate=100, per=60))
    assert limits_text(held("", limits=limits)) == "In the whole mesh: 5 at once, 100 per minute."
    assert limits_text(held("rate", 2, limits=limits, limits_overridden=True)) == (
        "In the whole mesh: 5 at once, 100 per minute, set by an operator. The rate is reached: more tasks start in 2 s."
    )
    assert limits_text(held("concurrency", limits=limits)).endswith("a task starts when another one ends.")
    assert lanes_text(held("lanes", 3, lanes=2, held_lanes=2)) == (
        "2 lanes have tasks. 2 of them may not start any now; the first may in 3 s."
    )
    assert lanes_text(held("", lanes=1)) == "1 lane has tasks."


def test_only_what_may_run_is_load() -> None:
    assert may_run(held("", due_soon=3)) == 15
    assert may_run(held("concurrency", limits=(Limit(4),), due_soon=3)) == 4
    assert may_run(held("", limits=(Limit(4),), running=6)) == 6  # the limit was lowered while they ran
    assert may_run(held("rate", 5, limits=(Limit(rate=1),))) == 12
    assert may_run(held("paused", paused="", due_soon=3)) == 2
    assert may_run(held("paused", 3600, paused="", due_soon=3)) == 2
    assert may_run(held("paused", 5, paused="429")) == 12  # it is over before a worker would have stopped
    assert may_run(held("lanes", lanes=1, held_lanes=1)) == 2


def test_the_overview_names_the_reason() -> None:
    now = datetime.now(UTC)
    old, paused = held("rate", 5, age=90.0), held("paused", 60, paused="x", name="p")
    texts = [need.text for need in needs_of(state(now, old, paused), [])]
    assert texts == ["the oldest task has waited for 1 min 30 s (rate reached, for 5 s)", "is paused for 1 min more"]
    full = state(now, held("", age=90.0))
    full = replace(full, info=replace(full.info, apps={"shop": AppInfo(workers=1, running=1, room=0)}))
    assert needs_of(full, [])[0].text == "the oldest task has waited for 1 min 30 s, and all workers are full"


@LEFT
async def test_a_lane_that_is_paused_is_named_on_every_page(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None: ...

    queue = connected.queue("mails")
    await queue.pause("their server is down", duration=600, lane="acme")
    await queue.dispatch(b"1", id="one", lane="acme")
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", handler)
        for path in ("/queues", "/"):
            assert "all lanes held" in (await site.get(path)).text, path
        page = text_of((await site.get("/job", queue="mails", id="one")).text)
        assert "1 lane has tasks. 1 of them may not start any now; the first may in " in page
        assert "acme" in page
        assert (await site.get("/api/v1/job", queue="mails", id="one")).json()["lane"] == "acme"
        [row] = (await site.get("/api/v1/queues")).json()["rows"]
        assert (row["held_back"], row["lanes"], row["held_lanes"]) == ("lanes", 1, 1)
        assert 0 < row["held_for"] <= 600
        nursery.cancel_scope.cancel()
    assert "No worker serves this queue." in (await site.get("/job", queue="mails", id="one")).text
    await queue.cancel_all()


@LEFT
async def test_a_pause_for_some_time(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.dispatch(b"1", id="one", lane="acme")
    assert (await site.post("/pause", queue="mails", duration="600")).status_code == 303
    assert 0 < ((await queue.info()).held_for or 0) <= 600
    assert "The pause ends in " in (await site.get("/job", queue="mails", id="one")).text
    assert (await site.get("/api/v1/scale", queue="mails")).json()["load"] == 0
    await site.post("/pause", queue="mails", lane="acme", duration="60")
    assert 0 < ((await queue.lanes())[0].held_for or 0) <= 60
    for wrong in ("0", "-1", "soon", "1.5"):
        assert (await site.post("/pause", queue="mails", duration=wrong)).status_code == 400, wrong
    await queue.resume()
    await queue.cancel_all()


@LEFT
async def test_limits_fit_into_a_cell(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.set_limit(Limit(5), Limit(rate=100, per=60))
    table = (await site.get("/api/v1/queues", format="csv")).text
    assert ",concurrency=5; rate=100 per=60," in table
    await queue.clear_limit()


@LEFT
async def test_the_newest_events_are_on_the_overview(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").pause("<b>why</b>")
    await connected.queue("letters").pause()
    page = text_of((await site.get("/")).text)
    assert "Newest events" in page
    site.viewer = Viewer("bob", ("look",), queues=("letters",))
    page = text_of((await site.get("/")).text)
    assert "letters" in page
    assert "mails" not in page
    for name in ("mails", "letters"):
        await connected.queue(name).resume()


@LEFT
async def test_the_workers_of_a_queue(connected: worqr.Mesh, server: Server, prefix: str, site: Site) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1", queues=["mails"])
    desk.register("shop:2", queues=["letters"])
    page = (await site.get("/workers", queue="mails")).text
    assert ("shop%3A1" in page, "shop%3A2" in page) == (True, False)
    assert "No worker serves this queue." in (await site.get("/workers", queue="parcels")).text
    rows = (await site.get("/api/v1/workers", queue="letters")).json()["rows"]
    assert [row["id"] for row in rows] == ["shop:2"]
    site.viewer = Viewer("bob", ("look",), queues=("letters",))
    assert (await site.get("/workers", queue="mails")).status_code == 404
    desk.wipe()


@LEFT
async def test_a_worker_is_evicted(connected: worqr.Mesh, server: Server, prefix: str, site: Site) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1", "shop:2")
    desk.client.hset(desk.g.info("shop:1"), "pid", 77)
    assert "Evict the worker" in (await site.get("/worker", id="shop:1")).text
    answer = await site.post("/worker-evict", id="shop:1", typed="76")
    assert (answer.status_code, "the number of the process: 77." in answer.text) == (400, True)
    assert (await site.post("/worker-evict", id="shop:9", typed="77")).status_code == 400
    site.viewer = Viewer("bob", ("look", "workers"), queues=("mails",))
    assert (await site.post("/worker-evict", id="shop:1", typed="77")).status_code == 403
    site.viewer = Viewer("bob", ("look", "workers"))
    answer = await site.post("/worker-evict", id="shop:1", typed="77", back="/workers")
    assert "The worker was declared dead" in (await site.ask("GET", answer.headers["location"])).text
    assert [each.id for each in await connected.workers()] == ["shop:2"]
    assert [(each.kind, each.who) for each in await connected.log() if each.worker == "shop:1"][-1] == ("dead", "bob")
    desk.wipe()
