"""The list of jobs that have ended, by outcome and by tag, and what is done to them from there."""

from __future__ import annotations

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.peer.tools import eventually, serving
from worqr.dashboard import Viewer, operator

pytestmark = pytest.mark.leaves("*")


async def handler(task: bytes) -> str:
    if task == b"fail":
        raise worqr.Failure("no <b>luck</b>")
    return "mail sent"


async def ended(mesh: worqr.Mesh) -> worqr.Queue:
    """Two jobs of a customer have ended, and one waits."""
    queue = mesh.queue("orders")
    async with serving(mesh, "orders", handler):
        for name in ("4711", "fail"):
            await queue.dispatch(name.encode(), id=name, keep=worqr.Keep(), tags={"customer:acme", f"order:{name}"})
        await eventually(lambda: queue.count_tagged("customer:acme"), {"finished": 1, "failed": 1})
    await queue.dispatch(b"later", id="later", delay=3600, tags={"customer:acme"})
    return queue


async def test_they_are_listed_searched_and_exported(connected: worqr.Mesh, site: Site) -> None:
    await ended(connected)
    page = (await site.get("/queue", name="orders", tab="kept")).text
    assert "Finished" in page and "4711" in page and "no &lt;b&gt;luck" in page and ">later<" not in page
    assert ">fail<" not in (await site.get("/queue", name="orders", tab="kept", outcome="finished")).text
    page = (await site.get("/queue", name="orders", tab="kept", outcome="any", tag="customer:acme")).text
    assert ">later<" in page and "Cancel all jobs with this tag" in page
    page = (await site.get("/search", q="customer:acme")).text
    assert "Jobs with this tag" in page and "4711" in page
    answer = await site.get("/api/v1/tasks", queue="orders", state="kept", outcome="finished", format="csv")
    assert "4711" in answer.text and "customer:acme order:4711" in answer.text
    assert (await site.get("/queue", name="orders", tab="kept", tag="x" * 101)).status_code == 400


async def test_the_page_of_a_job_that_is_kept_says_how_it_ended(connected: worqr.Mesh, site: Site) -> None:
    await ended(connected)
    page = (await site.get("/job", queue="orders", id="4711")).text
    assert "The job has finished." in page and "Run again" in page and "order:4711" in page and "mail sent" in page
    site.viewer = operator("bob")  # who may not read payloads
    assert "mail sent" not in (await site.get("/job", queue="orders", id="4711")).text


async def test_a_job_is_run_again_and_forgotten(connected: worqr.Mesh, site: Site) -> None:
    queue = await ended(connected)
    [job] = await queue.jobs(state="finished")
    answer = await site.post("/run-again", queue="orders", kept=job.kept or "", back="/queue?name=orders")
    assert "in the queue again" in (await site.ask("GET", answer.headers["location"])).text
    assert [each.task for each in await queue.jobs()] == [b"4711"]
    await site.post("/forget", queue="orders", kept=job.kept or "")
    assert await queue.jobs(state="finished") == []
    assert (await site.post("/run-again", queue="orders", kept=job.kept or "")).status_code == 400


async def test_a_tag_is_cancelled_retried_and_forgotten(connected: worqr.Mesh, site: Site) -> None:
    queue = await ended(connected)
    await site.post("/retry-tagged", queue="orders", tag="customer:acme")
    await site.post("/cancel-tagged", queue="orders", tag="customer:acme", reason="closed")
    assert await queue.count_tagged("customer:acme") == {"finished": 1, "cancelled": 1}
    assert (await site.post("/forget-tagged", queue="orders", tag="customer:acme", typed="acme")).status_code == 400
    await site.post("/forget-tagged", queue="orders", tag="customer:acme", typed="customer:acme")
    assert await queue.count_tagged("customer:acme") == {}


async def test_who_may_only_look_changes_nothing(connected: worqr.Mesh, site: Site) -> None:
    queue = await ended(connected)
    [job] = await queue.jobs(state="finished")
    site.viewer = Viewer("eve", ("look",))
    page = (await site.get("/queue", name="orders", tab="kept", tag="customer:acme")).text
    assert "Run again" not in page and "Forget" not in page
    for path in ("/run-again", "/forget", "/cancel-tagged", "/retry-tagged", "/forget-tagged"):
        fields = {"queue": "orders", "kept": job.kept or "", "tag": "customer:acme", "typed": "customer:acme"}
        assert (await site.post(path, **fields)).status_code == 403
    assert await queue.count_tagged("customer:acme") == {"finished": 1, "failed": 1, "scheduled": 1}
