"""The pages of batches, what viewers with few rights and few queues see and do there, and the acts."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_bulk import acts_in_log, confirmed, ended
from tests.dashboard.test_live import opened
from tests.dashboard.test_pages import text_of
from worqr.dashboard import Viewer, operator, reader

LEFT = pytest.mark.leaves("*")


async def batch_of(mesh: worqr.Mesh, *queues: str, id: str = "import-7") -> worqr.Batch:
    """A sealed batch with one job in each of these queues, the first of which is its home."""
    meta = {"file": "a.csv", "auth_token": "s3cr3t"}
    async with mesh.batch(queue=queues[0], id=id, meta=meta) as batch:
        await batch.dispatch_many([mesh.call(name, number=1) for name in queues])
    return batch


async def fail_one(mesh: worqr.Mesh, queue: str) -> None:
    """Let a worker fail the job that is in front."""

    async def handler(task: bytes) -> None:
        raise worqr.Failure("no such line")

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, queue, handler)
        while not (await mesh.queue(queue).info()).failed:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@LEFT
async def test_the_batches_of_a_queue(connected: worqr.Mesh, site: Site) -> None:
    assert "No batch has its home in this queue." in (await site.get("/batches", queue="mails")).text
    assert 'hidden><span class="tag idle">' in (await site.get("/queue", name="mails")).text
    await batch_of(connected, "mails", "letters")
    await batch_of(connected, "mails", id="<b>other")
    page = text_of((await site.get("/batches", queue="mails")).text)
    assert "import-7 sealed 0 of 2" in " ".join(page.split())
    assert "2 batches have their home in this queue" in text_of((await site.get("/queue", name="mails")).text)
    assert "<b>other" not in (await site.get("/batches", queue="mails")).text
    rows = (await site.get("/api/v1/batches", queue="mails")).json()["rows"]
    assert [(row["id"], row["jobs"], row["pending"]) for row in rows] == [("<b>other", 1, 1), ("import-7", 2, 2)]


@LEFT
async def test_one_batch(connected: worqr.Mesh, site: Site) -> None:
    batch = await batch_of(connected, "mails", "letters")
    page = (await site.get("/batch", queue="mails", id="import-7")).text
    assert "0 of 2 jobs have ended" in page
    assert ("a.csv" in page, "s3cr3t" in page) == (True, False)
    assert 'href="/queue?name=letters"' in page
    assert "Retry failed jobs" not in page
    found = (await site.get("/api/v1/batch", queue="mails", id="import-7")).json()
    assert (found["state"], found["queues"], found["follow_up"]) == (
        "sealed",
        ["letters", "mails"],
        {"queue": None, "id": None},
    )
    job = (await connected.queue("letters").jobs())[0].id or ""
    assert 'href="/batch?queue=mails&amp;id=import-7"' in (await site.get("/job", queue="letters", id=job)).text
    fields = (await site.get("/api/v1/job", queue="letters", id=job)).json()
    assert fields["batch"] == {"queue": "mails", "id": "import-7"}
    for path in ("/batch", "/api/v1/batch"):
        assert (await site.get(path, queue="mails", id="unknown")).status_code == 404
    assert (await site.get("/confirm", act="cancel-batch", queue="mails", batch="unknown")).status_code == 404
    async with opened(site, "view=batch&queue=mails&id=import-7") as stream:
        await stream.wait_for("set", lambda texts: texts.get("batch.pending") == "2")
        await batch.cancel()
        await stream.wait_for("set", lambda texts: texts.get("batch.cancelled") == "2")
        await stream.wait_for("moved")
    async with opened(site, "view=batch&queue=mails&id=unknown") as stream:
        assert not any(name.startswith("batch.") for name in await stream.wait_for("set"))


@LEFT
async def test_a_follow_up_is_linked(connected: worqr.Mesh, site: Site) -> None:
    async with connected.batch(then=connected.call("report", day=1), id="empty"):
        pass
    page = (await site.get("/batch", queue="report", id="empty")).text
    assert "All jobs of the batch have finished." in page
    assert 'href="/job?queue=report&amp;id=%40' in page
    follow_up = (await site.get("/api/v1/batch", queue="report", id="empty")).json()["follow_up"]
    assert follow_up["queue"] == "report"
    assert (await connected.queue("report").job(follow_up["id"]).status()).state == "waiting"


@LEFT
async def test_a_batch_is_cancelled(connected: worqr.Mesh, site: Site) -> None:
    await batch_of(connected, "mails", "letters")
    site.viewer = operator("ada")
    form = await confirmed(site, "cancel-batch", queue="mails", batch="import-7")
    assert form == {"queue": "mails", "batch": "import-7", "count": "2"}
    answer = await site.post("/cancel-batch", **form, reason="wrong file")
    page = await ended(site, answer)
    assert "2 tasks were cancelled." in page
    assert 'href="/batch?queue=mails&amp;id=import-7"' in page
    info = await connected.queue("mails").batch("import-7").info()
    assert (info.state, info.cancelled, info.cancel_reason) == ("ended", 2, "ada: wrong file")
    entries = [(each.kind, each.who, each.count, each.text) for each in await acts_in_log(connected)]
    assert entries == [("batch_cancelled", "ada", 2, "import-7: ada: wrong file")]
    assert "wrong file" in (await site.get("/batch", queue="mails", id="import-7")).text
    confirm = await site.get("/confirm", act="cancel-batch", queue="mails", batch="import-7")
    assert "the batch has ended." in confirm.text
    assert "There was nothing to do" in await ended(site, await site.post("/cancel-batch", **form))


@LEFT
async def test_failed_jobs_are_found_and_put_back(connected: worqr.Mesh, site: Site) -> None:
    await batch_of(connected, "mails")
    await fail_one(connected, "mails")
    await connected.queue("mails").dispatch(b"1", id="of no batch")
    page = (await site.get("/batch", queue="mails", id="import-7")).text
    assert "not all have finished" in page
    link = "/queue?name=mails&amp;tab=failed&amp;home=mails&amp;batch=import-7#tasks"
    assert link in page
    fields = {"home": "mails", "batch": "import-7"}
    listed = (await site.get("/queue", name="mails", tab="failed", **fields)).text
    assert ("Only jobs of the batch" in listed, "Retry all that match" in listed) == (True, False)
    [row] = (await site.get("/api/v1/dead-letters", queue="mails", **fields)).json()["rows"]
    assert row["error"]["message"] == "no such line"
    await batch_of(connected, "letters", id="another")
    other = {"home": "letters", "batch": "another"}
    assert (await site.get("/api/v1/dead-letters", queue="mails", **other)).json()["rows"] == []
    unknown = await site.get("/queue", name="mails", tab="failed", home="mails", batch="unknown")
    assert unknown.status_code == 404
    form = await confirmed(site, "retry-batch", queue="mails", batch="import-7")
    assert "1 task was put back." in await ended(site, await site.post("/retry-batch", **form))
    assert [each.kind for each in await acts_in_log(connected)] == ["batch_retried", "retried"]
    info = await connected.queue("mails").batch("import-7").info()
    assert (info.state, info.failed, info.pending) == ("sealed", 0, 1)


@LEFT
async def test_who_sees_not_all_queues_acts_on_no_batch(connected: worqr.Mesh, site: Site) -> None:
    await batch_of(connected, "mails", "secret")
    job = (await connected.queue("mails").jobs())[0].id or ""
    site.viewer = operator("bob", queues=("mails",))
    for path in ("/batch", "/api/v1/batch"):
        answer = await site.get(path, queue="mails", id="import-7")
        assert (answer.status_code, "secret" in answer.text) == (200, False)
    page = (await site.get("/batch", queue="mails", id="import-7")).text
    assert "/confirm" not in page
    form = {"queue": "mails", "batch": "import-7", "count": "2"}
    for path in ("/cancel-batch", "/retry-batch"):
        answer = await site.post(path, **form)
        assert (answer.status_code, "secret" in answer.text) == (403, False)
    assert (await site.get("/confirm", act="cancel-batch", **form)).status_code == 403
    site.viewer = operator("eve", queues=("secret",))
    assert (await site.get("/batch", queue="mails", id="import-7")).status_code == 404
    assert (await site.post("/cancel-batch", **form)).status_code == 404
    job = (await connected.queue("secret").jobs())[0].id or ""
    assert "import-7" not in (await site.get("/job", queue="secret", id=job)).text
    assert (await site.get("/api/v1/job", queue="secret", id=job)).json()["batch"] is None
    assert (await site.get("/queue", name="secret", tab="failed", home="mails", batch="import-7")).status_code == 404
    site.viewer = reader("tim")
    assert "/confirm" not in (await site.get("/batch", queue="mails", id="import-7")).text
    assert (await site.get("/confirm", act="cancel-batch", **form)).status_code == 403
    site.viewer = Viewer("tom", ("look", "retry"))
    assert (await site.post("/cancel-batch", **form)).status_code == 403
    assert (await connected.queue("mails").batch("import-7").info()).cancel_reason is None


@LEFT
async def test_an_act_needs_its_confirmation(connected: worqr.Mesh, site: Site) -> None:
    await batch_of(connected, "mails")
    form = {"queue": "mails", "batch": "import-7"}
    assert (await site.post("/cancel-batch", **form)).status_code == 400
    assert (await site.post("/cancel-batch", **form, count="2000")).status_code == 400
    answer = await site.post("/cancel-batch", **form, count="2000", typed="2,000")
    assert urlsplit(answer.headers["location"]).path == "/bulk"
    await ended(site, answer)
    assert (await connected.queue("mails").batch("import-7").info()).state == "ended"
