"""The numbers for programs that scale workers."""

from __future__ import annotations

from functools import partial

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.support.patience import PATIENCE
from worqr.dashboard import reader


@pytest.mark.leaves("{mail}:due", "{mail}:job:*")
async def test_the_load_of_a_queue_is_known_while_no_worker_runs(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mail")
    await queue.enqueue(*[b"%d" % n for n in range(21)])
    await queue.dispatch(b"soon", delay=5)
    await queue.dispatch(b"later", delay=3600)
    answer = await site.get("/api/v1/scale", queue="mail", places="10")
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert found.pop("age") >= 0
    free = {"held_back": "", "held_for": None}
    assert found == {"queue": "mail", "load": 22, "workers": 0, "wanted": 3, **free}
    assert "wanted" not in (await site.get("/api/v1/scale", queue="mail")).json()


async def test_running_tasks_are_load(connected: worqr.Mesh, site: Site) -> None:
    began = trio.Event()

    async def handler(task: bytes) -> None:
        began.set()
        await trio.sleep_forever()

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mail", handler)
        job = await connected.queue("mail").dispatch(b"x")
        await began.wait()
        found = (await site.get("/api/v1/scale", queue="mail", places="100")).json()
        assert (found["load"], found["workers"], found["wanted"]) == (1, 1, 1)
        await job.cancel(wait=60)
        assert (await site.get("/api/v1/scale", queue="mail", places="100")).json()["wanted"] == 0
        nursery.cancel_scope.cancel()


async def test_as_many_running_tasks_are_listed_as_are_asked_for(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None:
        await trio.sleep_forever()

    queue = connected.queue("mail")
    await queue.enqueue(*[b"%d" % n for n in range(60)])
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "mail", handler, concurrency=60))
        with trio.fail_after(PATIENCE):
            while (await queue.info()).running < 60:
                await trio.sleep(0.01)
        assert len((await site.get("/api/v1/running", limit="60")).json()["rows"]) == 60
        assert "10 more are left out" in (await site.get("/running")).text
        nursery.cancel_scope.cancel()
    await queue.delete()


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ({}, 400, "does not name a queue"),
        ({"queue": "mail", "places": "many"}, 400, "'places' must be a whole number"),
        ({"queue": "web"}, 404, "no queue of this name"),
    ],
)
async def test_a_refusal_is_json(
    connected: worqr.Mesh, site: Site, query: dict[str, str], status: int, why: str
) -> None:
    site.viewer = reader("keda", ("mail",))
    answer = await site.get("/api/v1/scale", **query)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert why in answer.json()["error"]


async def test_a_queue_that_nobody_has_used_has_no_load(connected: worqr.Mesh, site: Site) -> None:
    found = (await site.get("/api/v1/scale", queue="mail", places="1")).json()
    free = {"held_back": "", "held_for": None}
    assert found == {"queue": "mail", "load": 0, "age": 0.0, "workers": 0, "wanted": 0, **free}


async def test_the_schema_has_the_functions_that_the_viewer_sees(connected: worqr.Mesh, site: Site) -> None:
    alone = (await site.get("/api/v1/schema")).json()
    assert (alone["channels"], alone["info"]["description"][:13]) == ({}, "No functions:")

    @connected.task(name="mail")
    def mail(to: str) -> None: ...

    @connected.task(name="secret")
    def secret(key: str) -> None: ...

    site.viewer = reader("gateway", ("mail",))
    found = (await site.get("/api/v1/schema")).json()
    assert (list(found["channels"]), "description" in found["info"]) == (["mail"], False)
    assert found["channels"]["mail"]["messages"]["call"]["payload"]["properties"] == {"to": {"type": "string"}}
