"""The pages and the forms, on a real server with real peers."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site, write_quiet_hour
from tests.ops.driver import Desk
from tests.peer.tools import eventually, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.client.queue import Queue
from worqr.dashboard import Viewer, admin, operator, reader
from worqr.dashboard.app import ROUTES
from worqr.dashboard.graphs import PLANS
from worqr.dashboard.pages import advice, request_text
from worqr.dashboard.request import notice
from worqr.dashboard.state import MeshState, Rates, needs_of, rates_between, state_numbers
from worqr.keys import LimitKeys
from worqr.mesh_records import AppInfo, MeshInfo, QueueInfo
from worqr.views import values
from worqr.views.tables import age_text

LEFT = pytest.mark.leaves("*")  # the dashboard writes what the calls that it makes write, and nothing else
NASTY = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "javascript:alert(1)",
    "</title><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    '" autofocus onfocus="alert(1)',
    "<!--<script>alert(1)//-->",
    "%3Cscript%3Ealert(1)%3C/script%3E",
    "\u202e<b>gnp.exe</b>",
    "\x1b]0;title\x07<i>",
    "${alert(1)}#[[7*7]]<%= 7*7 %>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\u2028<script>alert(1)</script>\u2029",
    "<a href='https://evil.example'>x</a>",
)
"""Texts that would become markup, or hide other text, on a page that did not escape them."""


def text_of(page: str) -> str:
    """The page without markup, its entities decoded."""
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def assert_clean(page: str) -> None:
    """No markup and no control character came from a text of NASTY."""
    for match in re.finditer(r"<(\w+)([^>]*)>", page):
        assert match[1] not in {"img", "i", "b", "iframe", "textarea"}, match[0]
        assert not re.search(r"\son\w+\s*=", re.sub(r'"[^"]*"', '""', match[2])), match[0]
    assert len(re.findall("<script", page)) == 1
    assert page.count("</title>") == 1
    shown = re.sub(r'<input type="hidden"[^>]*>', "", page)  # what is sent back is the exact text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2028\u2029]", shown)
    assert "https://evil" not in "".join(re.findall(r'(?:href|src|action)="([^"]*)"', page))


async def fail(mesh: worqr.Mesh, queue: str, **payloads: bytes) -> None:
    """Jobs that fail, by id, the error's message being the payload."""

    async def handler(task: bytes) -> None:
        raise worqr.Failure(task.decode("utf-8", "replace"))

    for name, payload in payloads.items():
        await mesh.queue(queue).dispatch(payload, id=name)
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, queue, handler)
        while (await mesh.queue(queue).info()).failed < len(payloads):
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


ASK_FOR_ONE = {"/live", "/queue", "/lanes", "/job", "/payload", "/worker", "/confirm", "/batch", "/batches"} | {
    f"/api/v1/{name}" for name in ("scale", "job", "tasks", "lanes", "ended", "dead-letters", "batch", "batches")
}
"""Addresses that name one queue, job or worker."""


async def test_pages_of_an_empty_mesh(site: Site) -> None:
    for path, route in ROUTES.items():
        if route.method == "GET" and path not in ASK_FOR_ONE:
            answer = await site.get(path)
            assert answer.status_code == 200, (path, answer.text)
    assert (await site.get("/queue", name="nothing")).status_code == 404
    assert (await site.get("/job", queue="nothing", id="1")).status_code == 404
    assert (await site.get("/payload", queue="nothing", id="1")).status_code == 404
    assert (await site.get("/worker", id="nobody")).status_code == 404
    assert "worqr run package.module:mesh" in (await site.get("/")).text


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/queue", {}),
        ("/queue", {"name": "a{b}"}),
        ("/queue", {"name": "q", "tab": "all"}),
        ("/queue", {"name": "q", "after": "x"}),
        ("/queue", {"name": "q", "tab": "failed", "before": "yesterday"}),
        ("/queues", {"page": "-1"}),
        ("/queues", {"page": "x"}),
        ("/queues", {"sort": "size"}),
        ("/queues", {"q": "x" * 3000}),
        ("/job", {"queue": "q", "id": ""}),
        ("/job", {"queue": "", "id": "1"}),
        ("/live", {"view": "x"}),
        ("/live", {"view": "queue"}),
    ],
)
async def test_a_wrong_query_is_refused(path: str, query: dict[str, str], site: Site) -> None:
    answer = await site.get(path, **query)
    assert answer.status_code == 400
    assert "Bad Request" in answer.text


@LEFT
async def test_waiting_and_scheduled_tasks(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.enqueue(b'{"to": "ada", "password": "s3cr3t"}', b"\x00\x01binary")
    await queue.dispatch(b"x" * 200_000, id="big")
    await queue.dispatch(b"later", id="later", delay=3600)
    page = (await site.get("/queue", name="mails")).text
    assert "s3cr3t" not in page
    assert len(page) < 60_000
    assert {"plain task", "big", "Next"} - {"Next"} <= set(re.findall(r"plain task|big", page))
    page = (await site.get("/queue", name="mails", tab="scheduled")).text
    assert "59 min" in page
    overview = text_of((await site.get("/")).text)
    assert "3 tasks wait, and no worker serves the queue" in overview


@LEFT
async def test_pages_of_a_list(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("many").enqueue(*[b"task %d" % n for n in range(120)])
    seen: list[str] = []
    path = "/queue?name=many"
    while path:
        page = (await site.ask("GET", path)).text
        seen += re.findall(r">(task \d+)<", page)
        following = re.search(r'href="([^"]*)" rel="next"', page)
        path = html.unescape(following[1]) if following else ""
    assert seen == [f"task {n}" for n in range(120)]


@LEFT
async def test_a_failed_job_is_retried_and_dropped(connected: worqr.Mesh, site: Site) -> None:
    await fail(connected, "orders", one=b"1", two=b"2 token=s3cr3t", three=b"3")
    page = (await site.get("/queue", name="orders", tab="failed")).text
    assert page.count('name="id"') == 3
    assert "Failure" in page
    assert "s3cr3t" not in page
    assert (await site.get("/queue", name="orders", tab="failed", error="Other")).text.count('name="id"') == 0
    newest = (await site.get("/failed")).text
    assert "orders" in newest

    answer = await site.post("/retry", queue="orders", id=["one", "two"], back="/queue?name=orders&tab=failed")
    assert (answer.status_code, answer.headers["location"]) == (303, "/queue?name=orders&tab=failed&done=retry%3A2%3A2")
    page = (await site.ask("GET", answer.headers["location"])).text
    assert "2 tasks put back into the queue." in page
    assert await connected.queue("orders").count() == 2
    again = await site.post("/retry", queue="orders", id="one", back="/")
    assert again.headers["location"] == "/?done=retry%3A0%3A1"
    dropped = await site.post("/drop", queue="orders", id=["three", "one"])
    assert "done=drop%3A1%3A2" in dropped.headers["location"]
    assert (await connected.queue("orders").info()).failed == 0


@LEFT
async def test_pause_and_resume(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    answer = await site.post("/pause", queue="mails", reason="<b>why</b>", back="/queue?name=mails")
    assert "The queue is paused" in (await site.ask("GET", answer.headers["location"])).text
    assert (await connected.queue("mails").info()).paused == "ada: <b>why</b>"
    for path in ("/", "/queue?name=mails"):
        assert "“ada: &lt;b&gt;why&lt;/b&gt;”" in (await site.ask("GET", path)).text
    await site.post("/resume", queue="mails")
    assert (await connected.queue("mails").info()).paused is None


@LEFT
async def test_a_running_job_is_cancelled_and_acknowledged(connected: worqr.Mesh, site: Site) -> None:
    reasons: list[str | None] = []

    async def handler(task: bytes) -> None:
        worqr.current().progress(0.25, "a quarter <i>")
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(worqr.current().cancel_reason)

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "slow", handler)
        job = await connected.queue("slow").dispatch(b"1", id="job-1")
        while (await job.status()).progress is None:
            await trio.sleep(0.01)
        for path in ("/running", "/queue?name=slow&tab=running", "/job?queue=slow&id=job-1", f"/worker?id={peer.id}"):
            page = (await site.ask("GET", path)).text
            assert "25%" in page
            assert "a quarter &lt;i&gt;" in page
        assert peer.id in (await site.get("/workers")).text
        assert text_of((await site.get("/search", q="job-1")).text).count("running") >= 1
        named = text_of((await site.get("/search", q="slow:job-1")).text)
        assert "running" in named
        assert "No queue knows a job" in text_of((await site.get("/search", q="other:job-1")).text)
        answer = await site.post("/cancel", queue="slow", id="job-1", reason="enough", back="/job?queue=slow&id=job-1")
        assert re.search(r"done=cancel%3A0%3A1%3A1%3A\d+$", answer.headers["location"])
        page = (await site.ask("GET", answer.headers["location"])).text
        assert re.search(r"1 run cancelled and ended after [\d,]+ ms\.", page)
        nursery.cancel_scope.cancel()
    assert reasons == ["cancel"]


async def test_the_page_of_a_queue_has_its_limits(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.enqueue(b"a")
    assert "In the whole mesh" not in (await site.ask("GET", "/queue?name=mails")).text
    await queue.set_limit(worqr.Limit(20, rate=100, per=60))
    page = (await site.ask("GET", "/queue?name=mails")).text
    assert "In the whole mesh: 20 at once, 100 per minute, set by an operator." in page
    await queue.pause("429 for api_key=s3cr3t-value", duration=600)  # as RateLimited gives the text of an error
    page = (await site.ask("GET", "/queue?name=mails")).text
    assert "The pause ends in " in page
    assert "s3cr3t-value" not in page + (await site.ask("GET", "/")).text
    await queue.clear_limit()
    await queue.resume()
    for lane in ("acme", "initech"):
        await queue.dispatch(b"a", lane=lane)
    await queue.pause(lane="acme")
    page = (await site.ask("GET", "/queue?name=mails")).text
    assert "2 lanes have tasks. 1 of them may not start any now." in text_of(page)
    await queue.resume(lane="acme")
    await queue.cancel_all()


@LEFT
async def test_limits_are_set_and_cleared(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.enqueue(b"a")
    answer = await site.post("/limit", queue="mails", concurrency="3", rate="100", per="60", back="/queue?name=mails")
    page = (await site.ask("GET", answer.headers["location"])).text
    assert "The limit holds now." in page
    assert "In the whole mesh: 3 at once, 100 per minute, set by an operator." in page
    await site.post("/limit", queue="mails", clear="yes")
    assert (await queue.info()).limits == ()
    for form in (
        {},
        {"concurrency": "3", "clear": "yes"},
        {"rate": "5"},
        {"per": "5"},
        {"concurrency": "0"},
        {"concurrency": "many"},
        {"concurrency": "1.5"},
        {"rate": "5", "per": "9999999"},
        {"concurrency": "3", "lane": "a\x00"},
    ):
        assert (await site.post("/limit", queue="mails", **form)).status_code == 400, form
    assert (await queue.info()).limits == ()
    site.viewer = Viewer("bob", ("look",))
    assert (await site.post("/limit", queue="mails", concurrency="3")).status_code == 403
    assert "Set the limit" not in (await site.get("/queue", name="mails")).text


@LEFT
async def test_lanes_are_shown_and_changed(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    for lane in ("acme", "acme", "a <b>"):
        await queue.dispatch(b"1", lane=lane)
    back = "/lanes?queue=mails"
    assert f'href="{back}"' in (await site.get("/queue", name="mails")).text
    answer = await site.post("/pause", queue="mails", lane="acme", reason="<b>why</b>", back=back)
    page = (await site.ask("GET", answer.headers["location"])).text
    assert "The lane is paused." in page
    assert "“ada: &lt;b&gt;why&lt;/b&gt;”" in page
    assert page.index("acme") < page.index("a &lt;b&gt;")
    await site.post("/lane-weight", queue="mails", lane="acme", weight="5")
    await site.post("/limit", queue="mails", lane="acme", concurrency="2")
    [acme, other] = await queue.lanes()
    assert (acme.name, acme.weight, acme.limits, acme.paused) == ("acme", 5, (worqr.Limit(2),), "ada: <b>why</b>")
    assert (other.name, other.weight, other.limits, other.paused) == ("a <b>", 1, (), None)
    found = (await site.get("/api/v1/lanes", queue="mails")).json()
    assert [(row["name"], row["waiting"], row["weight"]) for row in found["rows"]] == [("acme", 2, 5), ("a <b>", 1, 1)]
    for path, form in (
        ("/lane-weight", {"lane": "acme", "weight": "0"}),
        ("/lane-weight", {"lane": "acme", "weight": "1001"}),
        ("/lane-weight", {"lane": "", "weight": "3"}),
        ("/pause", {"lane": "x" * 201}),
    ):
        assert (await site.post(path, queue="mails", **form)).status_code == 400, form
    await site.post("/resume", queue="mails", lane="acme")
    await site.post("/lane-weight", queue="mails", lane="acme")
    await site.post("/limit", queue="mails", lane="acme", clear="yes")
    [acme, other] = await queue.lanes()
    assert (acme.weight, acme.limits, acme.paused) == (1, (), None)
    assert "No lane of this queue has tasks." in (await site.get("/lanes", queue="other")).text
    site.viewer = Viewer("bob", ("look",), queues=("mails",))
    assert "Pause the lane" not in (await site.get("/lanes", queue="mails")).text
    assert (await site.get("/lanes", queue="other")).status_code == 404
    await queue.cancel_all()


@LEFT
async def test_schedules_are_paused(server: object, prefix: str, mesh: worqr.Mesh, site: Site) -> None:
    @mesh.every(3600, name="hourly <b>")
    @mesh.task(name="tidy")
    async def tidy() -> None: ...

    async with mesh.join():
        while not await mesh.schedules():
            await trio.sleep(0.01)
        assert "on time" in (await site.get("/schedules")).text
        await site.post("/schedule", name="hourly <b>", paused="yes", back="/schedules")
        assert (await mesh.schedules())[0].paused
        page = (await site.get("/schedules", done="schedule-pause")).text
        assert "The schedule is paused." in page
        assert "hourly &lt;b&gt;" in page
        await site.post("/schedule", name="hourly <b>", paused="no")
        assert not (await mesh.schedules())[0].paused
        assert (await site.post("/schedule", name="unknown", paused="yes")).status_code == 400


@LEFT
async def test_a_worker_is_asked_to_be_quiet_and_answers(mesh: worqr.Mesh, site: Site) -> None:
    @mesh.task(name="tidy")
    async def tidy() -> None: ...

    async with mesh.join(concurrency=5) as peer:

        async def seen() -> tuple[str, str, int]:
            [info] = await mesh.workers()
            return info.state, info.answer, info.room

        assert "If it hangs, end its process." in (await site.get("/worker", id=peer.id)).text
        answer = await site.post("/worker-ask", id=peer.id, what="quiet", back=f"/worker?id={peer.id}")
        assert answer.headers["location"].endswith("done=worker-asked")
        await eventually(seen, ("quiet", "done", 0))
        page = (await site.get("/worker", id=peer.id, done="worker-asked")).text
        assert "The worker was asked." in page
        assert ">Resume<" in page
        await site.post("/worker-ask", id=peer.id, what="resume")
        await eventually(seen, ("ready", "done", 5))
        await site.post("/worker-ask", id=peer.id, what="concurrency", n="7")
        await eventually(seen, ("ready", "done", 7))
        for wrong in ("", "0", "x", "1" * 12):
            assert (await site.post("/worker-ask", id=peer.id, what="concurrency", n=wrong)).status_code == 400
        assert (await site.post("/worker-ask", id="nobody", what="drain")).status_code == 400
        assert (await site.post("/worker-ask", id=peer.id, what="dance")).status_code == 400
        site.viewer = operator("bob")
        assert (await site.post("/worker-ask", id=peer.id, what="drain")).status_code == 403
        assert "/worker-ask" not in (await site.get("/worker", id=peer.id)).text
        site.viewer = admin("ada", ("mail.*",))
        assert (await site.post("/worker-ask", id=peer.id, what="drain")).status_code == 403
        site.viewer = admin("ada")
        await site.post("/worker-ask", id=peer.id, what="drain")
        await peer.wait()


def test_a_worker_in_trouble_comes_with_advice() -> None:
    def worker(**more: Any) -> worqr.WorkerInfo:
        return worqr.WorkerInfo("shop:1", "h", 1, "shop", "0.1", frozenset(), 0, 1, 0.0, **more)

    now = datetime.now(UTC)
    assert advice(worker(state="dead")).endswith("you have to do nothing.")
    assert "evict it" in advice(worker(state="missing"))
    assert "leaves when" in advice(worker(state="leaving"))
    assert request_text(worker(), now) == ""
    assert request_text(worker(answer="done"), now) == "done"
    assert "next heartbeat" in request_text(worker(request="quiet", requested_at=now), now)
    assert "not answered" in request_text(worker(request="quiet", requested_at=now - timedelta(seconds=6)), now)


@LEFT
async def test_a_schedule_is_run_and_gets_other_times(
    server: object, prefix: str, mesh: worqr.Mesh, site: Site
) -> None:
    mesh.every(86400, mesh.call("tidy", b"x"), name="daily <b>")
    async with mesh.join():
        while not await mesh.schedules():
            await trio.sleep(0.01)
        page = (await site.get("/schedules", name="daily <b>")).text
        assert "every 1 d" in page
        assert "the times are those of the code" in page
        assert len(re.findall(r"<li>\d{4}-\d\d-\d\d 00:00:00 UTC ", page)) == 5
        assert "How its last runs ended is not kept." in page
        here = "/schedules?name=daily+%3Cb%3E"
        for notice in ("schedule-run", "schedule-busy"):
            answer = await site.post("/schedule-run", name="daily <b>", back=here)
            assert answer.headers["location"].endswith(f"{here}&done={notice}")
        assert (await mesh.queue("tidy").info()).waiting == 1
        answer = await site.post("/schedule-times", name="daily <b>", cron="0 0 1 1 *", timezone="Europe/Berlin")
        assert answer.headers["location"].endswith("done=schedule-override")
        page = (await site.get("/schedules", name="daily <b>", done="schedule-override")).text
        assert "<code>0 0 1 1 *</code>" in page
        assert "Europe/Berlin" in page
        assert len(re.findall(r"<li>\d{4}-01-01 00:00:00 CET ", page)) == 5
        assert "by ada" in page
        assert "other times now" in page
        assert "overridden by ada" in (await site.get("/schedules")).text
        assert [entry.who for entry in await mesh.log() if entry.kind == "schedule_overridden"] == ["ada"]
        wrong = await site.post("/schedule-times", name="daily <b>", cron="61 * * * *")
        assert wrong.status_code == 400
        assert "is wrong" in wrong.text
        await mesh.pause_schedule("daily <b>")
        assert "The schedule is paused." in (await site.get("/schedules", name="daily <b>")).text
        await site.post("/schedule-times", name="daily <b>", reset="yes")
        assert (await mesh.schedules())[0].override is None
        assert (await site.get("/schedules", name="daily")).status_code == 404


@LEFT
async def test_the_page_of_a_schedule_has_the_outcomes_of_its_last_runs(mesh: worqr.Mesh, site: Site) -> None:
    @mesh.task(name="tidy", recent=20, retry=worqr.RetryPolicy(max_failures=1))
    async def tidy(which: int) -> None:
        raise KeyError(which)

    mesh.every(86400, mesh.call("tidy", which=1), name="daily")
    async with mesh.join(grace=0):
        while not await mesh.schedules():
            await trio.sleep(0.01)
        await mesh.run_schedule("daily")
        with trio.fail_after(PATIENCE):
            page = ""
            while not re.search(r"cron:daily.*raised.*KeyError", page):
                await trio.sleep(0.05)
                page = (await site.get("/schedules", name="daily")).text
        assert re.search(r"Last outcome</dt><dd>.*failed</span> at .* after .*, run by hand<span.*>KeyError: 1", page)
        assert re.search(r"failed</span><span.*>KeyError: 1", (await site.get("/schedules")).text)


def test_a_time_in_the_zone_of_a_schedule() -> None:
    when = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert values.in_zone(when, "Europe/Berlin") == "2026-03-29 03:30:00 CEST"
    for unknown in ("UTC", "nowhere", "", "../etc", "a/" * 400, "\0", "/"):
        assert values.in_zone(when, unknown) == "2026-03-29 01:30:00 UTC"
    assert values.in_zone(None, "UTC") == "–"


@LEFT
async def test_hidden_queues_do_not_exist(connected: worqr.Mesh, site: Site) -> None:
    for name in ("mail.send", "mail.read", "payroll"):
        await connected.queue(name).dispatch(b"hidden payload", id="job-1")
    site.viewer = operator("bob", ("mail.*",))
    for path in ("/", "/queues", "/running", "/failed", "/search?q=job-1", "/search?q=payroll"):
        page = (await site.ask("GET", path)).text
        assert not re.search(r"name=payroll|queue=payroll|>payroll<", page), path
    assert ">2<" in (await site.get("/")).text  # two tasks wait
    for path in ("/queue?name=payroll", "/job?queue=payroll&id=job-1", "/live?view=queue&name=payroll"):
        hidden, unknown = await site.ask("GET", path), await site.ask("GET", path.replace("payroll", "no-such"))
        assert hidden.status_code == unknown.status_code == 404
        pages = [re.sub(r"<time.*?</time>", "", each.text.replace("payroll", "no-such")) for each in (hidden, unknown)]
        assert pages[0] == pages[1]
    for path in ("/cancel", "/retry", "/drop", "/pause", "/resume"):
        assert (await site.post(path, queue="payroll", id="job-1")).status_code == 404
    assert (await site.post("/schedule", name="x", paused="yes")).status_code == 403
    assert (await connected.queue("payroll").info()).waiting == 1


@LEFT
async def test_buttons_without_their_right_are_not_shown(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").dispatch(b"1", id="one")
    paths = ("/queue?name=mails", "/job?queue=mails&id=one", "/queues", "/schedules")
    site.viewer = reader("bob")
    for path in paths:
        page = (await site.ask("GET", path)).text
        assert 'method="post"' not in page
    site.viewer = Viewer("bob", ("look", "cancel"))
    page = (await site.ask("GET", paths[0])).text
    assert 'action="/cancel"' in page
    assert 'action="/pause"' not in page


@LEFT
async def test_texts_of_others_are_no_markup(connected: worqr.Mesh, site: Site) -> None:
    names = [text for text in NASTY if text.isprintable()]
    for n, text in enumerate(NASTY):
        await connected.queue("plain").enqueue(text.encode())
        await connected.queue("plain").dispatch(
            b'{"a": "%s"}' % text.encode(), id=f"{n}{text}" if text in names else f"{n}"
        )
        if not re.search(r"[{}]", text) and text in names:
            await connected.queue(text).enqueue(b"1")
            await connected.queue(text).pause(text)
    await fail(connected, "failing", **{f"f{n}": text.encode() for n, text in enumerate(NASTY)})
    paths = ["/", "/queues", "/failed", "/queue?name=plain", "/queue?name=failing&tab=failed"]
    for path in paths:
        assert_clean((await site.ask("GET", path)).text)
    for text in NASTY:
        for path, name in (
            ("/search", "q"),
            ("/queues", "q"),
            ("/nothing", "q"),
            ("/", "done"),
            ("/queue", "tab"),
            ("/workers", "app"),
        ):
            assert_clean((await site.get(path, **{name: text})).text)
        assert_clean((await site.get("/job", queue="plain", id=text)).text)
        assert_clean((await site.get("/queue", name=text)).text)
        assert_clean((await site.get("/worker", id=text)).text)
    site.viewer = Viewer(NASTY[0])
    assert_clean((await site.get("/")).text)


@LEFT
async def test_a_large_payload_is_cut(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("large").enqueue(b"x" * 16_000_000)
    await fail(connected, "failing", one=b"y" * 8_000_000)
    for path in ("/queue?name=large", "/queue?name=failing&tab=failed"):
        assert len((await site.ask("GET", path)).content) < 40_000


@LEFT
async def test_a_thousand_queues(connected: worqr.Mesh, site: Site) -> None:
    long = "very-" * 30 + "long"
    async with trio.open_nursery() as nursery:
        for n in range(1000):
            nursery.start_soon(connected.queue(f"q{n:04}-{long}").enqueue, b"1")
    first = (await site.get("/queues", sort="name")).text
    assert first.count('<th scope="row"') == 50
    assert "1–50 of 1,000" in first
    assert len(first) < 200_000
    last = (await site.get("/queues", sort="name", page="20")).text
    assert "q0999-" in last
    assert 'rel="next"' not in last
    found = (await site.get("/queues", q="Q0500")).text
    assert found.count('<th scope="row"') == 1
    assert len((await site.get("/")).content) < 60_000


@pytest.mark.parametrize(
    "back", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "javascript:alert(1)"]
)
@LEFT
async def test_a_form_returns_to_this_site_only(back: str, site: Site) -> None:
    assert (await site.post("/resume", queue="q", back=back)).status_code == 400


async def test_a_mounted_dashboard_stays_below_its_path(mesh: worqr.Mesh, site: Site) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    outer = Starlette(routes=[Mount("/ops/worqr", app=site.app)])
    site._app = outer  # type: ignore[assignment]
    page = (await site.get("/ops/worqr/queues")).text
    addresses = re.findall(r'(?:href|src|action)="([^"]+)"', page)
    assert addresses
    assert all(address.startswith(("/ops/worqr/", "#")) for address in addresses)
    assert (await site.get("/ops/worqr/static/worqr.css")).status_code == 200
    answer = await site.post("/ops/worqr/resume", queue="q", back="/queues")
    assert answer.headers["location"] == "/ops/worqr/queues?done=resume"


@pytest.mark.parametrize(
    "done", ["", "x", "cancel", "cancel:1", "retry:1:x", "retry:-1:2", "pause:1", "<b>:1", "retry:1:9999999999999"]
)
def test_a_notice_says_nothing_that_a_link_says(done: str) -> None:
    assert notice(done) == ""


def test_notices() -> None:
    assert notice("cancel:2:1:0:5000") == "2 waiting jobs removed, 1 run cancelled, and still unwinding."
    assert notice("cancel:0:0:0:1") == "There was nothing to cancel: the job has ended already."
    assert notice("drop:1:3") == "1 of 3 tasks deleted."


def info(name: str, **numbers: int) -> QueueInfo:
    counts = {key: numbers.pop(key) for key in ("enqueued", "finished", "given_up") if key in numbers}
    if "given_up" in counts:
        counts["failed"] = counts.pop("given_up")
    zeros = dict.fromkeys(("waiting", "scheduled", "blocked", "running", "failed", "undecodable", "workers"), 0)
    return QueueInfo(name=name, **{**zeros, **numbers}, paused=None, oldest_job=None, counts=counts)  # type: ignore[arg-type]


def state(at: datetime, *queues: QueueInfo, leader: str | None = "w") -> MeshState:
    apps = {"shop": AppInfo(workers=1, running=0, room=1)}
    return MeshState(MeshInfo(at, "direct", 0, leader, queues, 0, None, apps))


def test_rates_and_needs() -> None:
    now = datetime.now(UTC)
    before = state(now - timedelta(seconds=10), info("a", finished=100, given_up=0), info("b", finished=5))
    after = state(now, info("a", finished=150, given_up=50, workers=1), info("b", finished=4), info("c", waiting=1))
    rates = rates_between(before, after)
    assert rates.keys() == {"a"}  # the totals of b were reset, and c is new
    assert (rates["a"].finished, rates["a"].failed) == (5, 5)
    assert [(need.subject, need.text) for need in needs_of(replace(after, rates=rates), [])] == [
        ("a", "50% of the tasks fail"),
        ("c", "1 task waits, and no worker serves the queue"),
    ]
    assert "has no leader" in needs_of(state(now, leader=None), [])[0].text


def test_workers_that_are_full_for_long_need_attention() -> None:
    now = datetime.now(UTC)

    def texts(full_for: float | None, workers: int = 3) -> list[tuple[str, str]]:
        since = None if full_for is None else now - timedelta(seconds=full_for)
        seen = state(now)
        apps = {"shop": AppInfo(workers, 12, 0, since), "site": AppInfo(1, 0, 4)}
        return [(need.subject, need.text) for need in needs_of(replace(seen, info=replace(seen.info, apps=apps)), [])]

    assert texts(None) == texts(299) == []
    assert texts(300) == [("shop", "all places of its 3 workers have been taken for 5 min")]
    assert texts(4000, 1) == [("shop", "all places of its worker have been taken for 1 h 6 min")]


@LEFT
async def test_a_full_application_is_on_the_overview(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1", "shop:2", "shop:3", "site:1")
    now = int(desk.client.time()[0]) * 1000
    for worker, ago in (("shop:1", 400), ("shop:2", 3000), ("site:1", 100)):
        desk.client.hset(
            desk.g.info(worker),
            mapping={"app": worker[:4], "running": 4, "room": 0, "full_since": now - ago * 1000},
        )
    desk.client.hset(desk.g.info("shop:3"), mapping={"app": "shop", "leaving": "2", "room": 4})  # it is quiet
    page = text_of((await site.get("/")).text)
    assert "shop all places of its 3 workers have been taken for 6 min" in " ".join(page.split())
    assert "site all places" not in " ".join(page.split())
    desk.client.hdel(desk.g.info("shop:2"), "full_since")
    site._app = None  # a new dashboard, which has not looked yet
    assert "all places" not in (await site.get("/")).text
    desk.wipe()


@LEFT
async def test_the_overview_has_the_rate_of_failures(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    page = (await site.get("/")).text
    assert 'Failed / s</a></dt><dd><span data-k="total.failed_rate" class="zero">–' in page
    failing = state_numbers(
        replace(state(datetime.now(UTC), info("a")), rates={"a": Rates(1.0, 3.0, 2.0), "b": Rates(0.0, 0.0, 0.5)})
    )
    assert (failing["total.failed_rate"], failing["total.finished_rate"]) == ("2.5", "3")


@LEFT
async def test_everything_of_a_job_is_on_its_page(connected: worqr.Mesh, site: Site) -> None:
    meta = {"tenant": "acme", "auth_token": "s3cr3t-meta"}
    payload = b'{"order": 7, "card_number": "s3cr3t"}'
    await connected.queue("orders").dispatch(payload, id="one", delay=3600, meta=meta, timeout=30)
    page = (await site.get("/job", queue="orders", id="one")).text
    assert [text for text in ("acme", "timeout", "&#34;order&#34;: 7", "Run now") if text not in page] == []
    assert "s3cr3t" not in page
    answer = await site.get("/payload", queue="orders", id="one")
    assert (answer.content, answer.headers["content-type"]) == (payload, "application/octet-stream")
    assert answer.headers["content-disposition"].startswith("attachment")
    site.viewer = operator("bob")
    assert (await site.get("/payload", queue="orders", id="one")).status_code == 403
    assert "/payload" not in (await site.get("/job", queue="orders", id="one")).text
    answer = await site.post("/run-now", queue="orders", id="one", back="/job?queue=orders&id=one")
    assert "1 task due now." in (await site.ask("GET", answer.headers["location"])).text
    assert (await connected.queue("orders").job("one").status()).state == "waiting"


@LEFT
async def test_the_tries_and_the_record_of_a_failed_job(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None:
        raise ValueError("no <b>luck</b>")

    await connected.queue("orders").dispatch(
        b"1", id="one", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0, max_backoff=0)
    )
    async with connected.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "orders", handler)
        while not (await connected.queue("orders").info()).failed:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    page = (await site.get("/job", queue="orders", id="one")).text
    assert "ValueError" in page
    assert "no &lt;b&gt;luck&lt;/b&gt;" in page
    assert "Traceback" in page
    counted = (await site.get("/queue", name="orders", tab="failed", count="errors")).text
    assert '<ul class="errors">' in counted
    answer = await site.post("/drop", queue="orders", id="one", back="/")
    assert "done=drop%3A1%3A1" in answer.headers["location"]


async def test_a_job_that_waits_for_an_approval_does_not_look_ill(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Retry("approval", delay=3600, counted=False)

    async with serving(connected, "articles", handler):
        job = await connected.queue("articles").dispatch(b"a", id="x")
        with trio.fail_after(PATIENCE):
            while (await job.status()).state != "scheduled":
                await trio.sleep(0.01)
        page = (await site.get("/job", queue="articles", id="x")).text
        assert "<dt>Waits for</dt><dd>approval</dd>" in page
        assert "did not end well" not in page
        assert "Error of the last try" not in page
        assert "policy.Retry" not in page
        assert "policy.Retry" not in (await site.get("/queue", name="articles", tab="scheduled")).text
        await connected.queue("articles").cancel_all()


@LEFT
async def test_a_plain_task_that_runs_is_cancelled_by_its_claim(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None:
        await trio.sleep_forever()

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "slow", handler)
        await connected.queue("slow").enqueue(b"plain <i>")
        while not await connected.queue("slow").running():
            await trio.sleep(0.01)
        page = (await site.get("/queue", name="slow", tab="running")).text
        claim = html.unescape(re.findall(r'name="claim" value="([^"]+)"', page)[0])
        assert "plain &lt;i&gt;" in page
        answer = await site.post("/cancel", queue="slow", claim=claim)
        assert re.search(r"done=cancel%3A0%3A1%3A1%3A\d+$", answer.headers["location"])
        nursery.cancel_scope.cancel()


@LEFT
async def test_a_right_that_the_server_refuses_is_a_page(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    await connected.queue("mails").enqueue(b"1")
    with server.client() as client:
        rights = (f"%R~{prefix}:*", f"~{{{prefix}}}*", "&*", "+@all", "-@dangerous", "+info")
        client.acl_setuser("viewer", enabled=True, reset=True, passwords=["+s3cr3t"])
        client.execute_command("ACL", "SETUSER", "viewer", *rights)
        try:
            url = server.tcp_url.replace("redis://", "redis://viewer:s3cr3t@")
            limited = Site(worqr.Mesh("redis://127.0.0.1:1/0", prefix=prefix, patience=10), options={"url": url})
            answer = await limited.get("/queue", name="mails")
            assert answer.status_code == 502
            assert "The server rejected the request" in answer.text
            answer = await limited.post("/pause", queue="mails")
            assert answer.status_code == 502
            assert "s3cr3t" not in answer.text
            assert "Traceback" not in answer.text
        finally:
            client.acl_deluser("viewer")
    assert (await connected.queue("mails").info()).paused is None


@LEFT
async def test_the_header_names_the_leader_and_who_read_the_figures(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    assert re.search(r"Leader\s+none\s+Figures\s+read directly", text_of((await site.get("/")).text))
    async with connected.join() as peer:
        while (
            await connected.info()
        ).source != "leader":  # the site may still use what it has read before there was one
            await trio.sleep(0.01)
        paths = (
            "/queues",
            "/queue?name=mails",
            "/job?queue=mails&id=x",
            "/workers",
            f"/worker?id={peer.id}",
            "/schedules",
        )
        for path in (*paths, "/search?q=mails", "/running", "/failed"):
            site.app._looks.forget()  # pyright: ignore[reportPrivateUsage]
            page = text_of((await site.ask("GET", path)).text)
            assert re.search(
                rf"Leader\s+{re.escape(values.worker(peer.id))}\s+Figures\s+(read directly|by the leader)", page
            ), path


async def test_estimated_ages_are_marked() -> None:
    def info(name: str, age: float | None, estimated: bool = False, job: float | None = None) -> QueueInfo:
        return QueueInfo(name, 1, 0, 0, 0, 0, 0, None, job, 1, {}, age, estimated)

    exact, estimated = info("a", 65.0), info("b", 190.0, True)
    assert [age_text(each) for each in (exact, estimated, info("c", None), info("d", None, True, 3.0), None)] == [
        "1 min",
        "~3 min",
        "–",
        "3 s",
        "–",
    ]
    state = MeshState(MeshInfo(datetime.now(UTC), "leader", 4.0, None, [exact, estimated], 0, None, {}))
    texts = state_numbers(state, [exact, estimated])
    assert (texts["queue.a.age"], texts["queue.b.age"], texts["total.age"]) == ("1 min", "~3 min", "~3 min")
    assert (texts["mesh.leader"], texts["mesh.source"]) == ("none", "by the leader, 4 s ago")
    assert [need.text for need in needs_of(state, [])][-2:] == [
        "the oldest task has waited for 1 min 5 s",
        "the oldest task has waited for about 3 min 10 s",
    ]
    assert state.age_in(info("b", None)).age == 190.0  # the page of the queue reads no estimate by itself
    assert state.age_in(replace(info("b", None), waiting=0)).age is None
    assert state.age_in(info("new", None)).age is None


@LEFT
async def test_the_history_of_a_queue_is_drawn(connected: worqr.Mesh, site: Site, server: Server) -> None:
    queue = connected.queue("mails")
    await queue.enqueue(*[b"%d" % number for number in range(7)])
    assert "No history yet" in (await site.get("/queue", name="mails")).text
    site.app._looks.forget()  # pyright: ignore[reportPrivateUsage]
    write_quiet_hour(server, connected.prefix, "mails")
    for span, rows in (("", 60), ("1h", 60), ("8h", 96), ("3d", 144)):
        page = (await site.get("/queue", name="mails", range=span)).text
        assert page.count('<figure class="chart">') == len(PLANS)
        assert 0 <= rows - page.count('<tr><th scope="row"><time') <= 1, span  # the minute may have just begun
        assert re.search(r'aria-label="Waiting. tasks: 7 at the end, at most 7\."', page)
        assert len(page) < 200_000
        assert f'range={span or "1h"}" aria-current="true"' in page
        assert "style=" not in page
    assert (await site.get("/queue", name="mails", range="1y")).status_code == 400
    for path, hint in (("/", "Finished"), ("/queues", "Finished")):
        site.app._looks.forget()  # pyright: ignore[reportPrivateUsage]
        page = (await site.ask("GET", path)).text
        assert re.search(rf'class="spark"[^>]*aria-label="{hint} per minute: 0 now, at most 0"', page), path


@LEFT
async def test_a_history_that_may_not_be_read_does_not_hide_the_queue(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: object, minutes: int = 60) -> None:
        raise worqr.RefusedByServer("NOPERM")

    await connected.queue("mails").enqueue(b"1")
    monkeypatch.setattr(Queue, "history", refuse)
    for path in ("/", "/queues", "/queue?name=mails"):
        answer = await site.ask("GET", path)
        assert answer.status_code == 200
        assert "mails" in answer.text


@LEFT
async def test_workers_in_trouble_are_on_the_overview(
    server: Server, prefix: str, connected: worqr.Mesh, site: Site
) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("shop:1", "shop:2", "shop:3")
    desk.client.delete(desk.g.worker("shop:1"))
    desk.client.hset(desk.g.info("shop:2"), "lag_ms", 2500)
    page = (await site.get("/")).text
    assert "sends no heartbeat any more</" in page
    assert "has an event loop that is 2 s late" in page
    needs = page[page.index('id="needs"') : page.index('id="busiest"')]
    assert ("shop%3A2" in needs, "shop%3A3" in needs) == (True, False)
    desk.wipe()


@LEFT
async def test_plain_tasks_are_searched_by_their_payload(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"first", b'{"to":"<ada>"}')
    text = (await site.get("/search", queue="mails", payload='{"to":"<ada>"}')).text
    assert "<dt>Waiting</dt><dd>after 1 other task</dd>" in text
    assert "<ada>" not in text
    text = (await site.get("/search", queue="mails", payload="second")).text
    assert "No plain task of this queue has this payload." in text
    assert (await site.get("/search", payload="first")).status_code == 400
    blind = Site(connected, Viewer("bob", may={"look"}))
    assert "with a payload" not in (await blind.get("/search")).text
    refused = await blind.get("/search", queue="mails", payload="first")
    assert (refused.status_code, "lack the right &#39;payloads&#39;" in refused.text) == (403, True)


@LEFT
async def test_of_what_a_job_has_saved_the_size_is_shown(connected: worqr.Mesh, site: Site) -> None:
    saved = trio.Event()

    async def handler(task: bytes) -> None:
        await worqr.current().save(b"a secret" * 256)
        saved.set()
        await trio.sleep_forever()

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", handler)
        await connected.queue("mails").dispatch(b"a", id="keeps")
        with trio.fail_after(PATIENCE):
            await saved.wait()
        text = (await site.get("/job", queue="mails", id="keeps")).text
        assert "<dt>Saved for its next run</dt><dd>2.0 KiB</dd>" in text
        assert "secret" not in text
        reply = await site.get("/api/v1/job", queue="mails", id="keeps")
        assert reply.json()["saved_size"] == 2048
        assert "secret" not in reply.text
        nursery.cancel_scope.cancel()


@LEFT
async def test_a_job_names_those_with_the_same_payload(connected: worqr.Mesh, site: Site) -> None:
    async def handler(task: bytes) -> None:
        worqr.current().progress(0.5)
        await trio.sleep_forever()

    queue = connected.queue("mails")
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", handler)
        await queue.enqueue(b"same", b"same")
        with trio.fail_after(PATIENCE):
            while len(ids := [task.id for task in await queue.running() if task.progress is not None]) < 2:
                await trio.sleep(0.01)
            while not (await queue.read(str(ids[0]))).twins:
                await trio.sleep(0.01)
        text = (await site.get("/job", queue="mails", id=str(ids[0]))).text
        assert re.search(rf"<dt>Same payload</dt><dd><a [^>]*>{ids[1]}</a></dd>", text)
        assert (await site.get("/api/v1/job", queue="mails", id=str(ids[0]))).json()["twins"] == [ids[1]]
        nursery.cancel_scope.cancel()


@LEFT
async def test_a_job_that_has_ended_is_not_called_unknown_if_it_was_listed(connected: worqr.Mesh, site: Site) -> None:
    async def does(task: bytes) -> None:
        await trio.lowlevel.checkpoint()

    mails = connected.queue("mails")
    await mails.dispatch(b"1", id="one")
    page = (await site.get("/queue", name="mails")).text
    [link] = re.findall(r'href="(/job[^"]+)"', page)
    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", does)
        await nursery.start(partial(peer.serve, recent=10), "kept", does)
        await connected.queue("kept").dispatch(b"1", id="one")
        with trio.fail_after(PATIENCE):
            while (await mails.info()).counts.get("finished") != 1 or not await connected.queue("kept").recent():
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    listed = await site.ask("GET", html.unescape(link))
    assert listed.status_code == 200
    assert "The job has ended. Its result was not kept" in listed.text
    recent = await site.get("/job", queue="kept", id="one")
    assert recent.status_code == 200
    assert "The job has finished. Its result was not kept." in recent.text
    for queue, job in (("mails", "one"), ("mails", "other"), ("kept", "other")):
        unknown = await site.get("/job", queue=queue, id=job)
        assert unknown.status_code == 404
        assert "Nothing is stored about this id" in unknown.text


@LEFT
async def test_a_failure_queue_has_pages_and_is_listed_while_it_has_tasks(connected: worqr.Mesh, site: Site) -> None:
    name, let_go = "{mails.send}-fail", trio.Event()

    async def fails(task: bytes) -> None:
        raise worqr.Failure("the bank refused it")

    async def handles(failed: worqr.Failed) -> None:
        await let_go.wait()

    async def listed(**query: str) -> tuple[bool, bool]:
        page = (await site.get("/queues", **query)).text
        return "{mails.<wbr>send}-fail</a>" in page, "Show 1 empty failure queue" in page

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, on_failure=handles), "mails.send", fails)
        while await listed() != (False, True):
            await trio.sleep(0.05)
        assert await listed(empty="show") == (True, False)
        assert name in (await site.get("/api/v1/queues")).text
        assert name not in (await site.get("/api/v1/queues", empty="hide")).text
        await connected.queue("mails.send").dispatch(b"1", id="one")
        with trio.fail_after(PATIENCE):
            while await listed() != (True, False):
                await trio.sleep(0.05)
        for path, query in (
            ("/queue", {"name": name, "tab": "running"}),
            ("/running", {}),
            ("/failed", {}),
            ("/lanes", {"queue": name}),
            ("/confirm", {"act": "cancel", "queue": name}),
            ("/api/v1/tasks", {"queue": name}),
            ("/api/v1/scale", {"queue": name}),
        ):
            answer = await site.get(path, **query)
            assert answer.status_code == 200, (path, answer.text)
        assert "{mails.<wbr>send}-fail</a>" in (await site.get("/running")).text
        assert (await site.post("/pause", queue=name)).status_code == 303
        let_go.set()
        nursery.cancel_scope.cancel()


@LEFT
async def test_all_pages_count_undecodable_tasks_as_failed(connected: worqr.Mesh, site: Site) -> None:
    @connected.task(name="typed")
    async def typed(number: int) -> None: ...

    async with connected.join(grace=0):
        await connected.queue("typed").enqueue(b"no JSON")
        with trio.fail_after(PATIENCE):
            while (await connected.queue("typed").info()).undecodable < 1:
                await trio.sleep(0.01)
        for path, key in (
            ("/", "total.dead"),
            ("/", "queue.typed.dead"),
            ("/queues", "queue.typed.dead"),
            ("/queue?name=typed", "queue.typed.dead"),
        ):
            while f'data-k="{key}">1<' not in (
                page := (await site.ask("GET", path)).text
            ):  # the leader's figures may be older
                assert page
                await trio.sleep(0.05)


@LEFT
async def test_the_server_of_a_mesh_without_a_url_is_named(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORQR_URL", raising=False)
    for variable in ("REDIS_URL", "WORQR_URL"):
        monkeypatch.setenv(variable, server.tcp_url.replace("://", f"://{variable}:s3cr3t@"))
        site = Site(worqr.Mesh(prefix=prefix, patience=0.5), viewer=None)
        page = (await site.get("/")).text
        assert server.tcp_url.replace("://", f"://{variable}:***@") in page
        assert "s3cr3t" not in page
    monkeypatch.setenv("WORQR_URL", "redis://s3cr3t@host/abc")
    assert "a server with a wrong URL" in (await site.get("/")).text
    monkeypatch.delenv("WORQR_URL")
    monkeypatch.delenv("REDIS_URL")
    assert "redis://localhost:6379/0" in (await site.get("/")).text


@LEFT
async def test_topics_have_their_subscribers_and_what_these_got_and_refused(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    desk = Desk(server.client(), prefix)
    desk.call(ops.declare_topics(desk.g, "mails", b'{"app":"shop","max_length":1}', ["order.paid"]))
    desk.call(ops.declare_topics(desk.g, "secret", b"{}", ["order.#"]))
    for number in range(3):
        await connected.publish("order.paid", number)
    page = " ".join(text_of((await site.get("/topics")).text).split())
    assert "Published 3 Not yet in all queues 2 Sent again 0" in page
    assert "order.paid mails shop 1 1 2 0" in page
    rows = (await site.get("/api/v1/topics")).json()["rows"]
    assert [(row["pattern"], row["queue"], row["delivered"], row["refused"]) for row in rows] == [
        ("order.#", "secret", 3, 0),
        ("order.paid", "mails", 1, 2),
    ]
    site.viewer = Viewer("bob", ("look",), queues=("mails",))
    page = (await site.get("/topics")).text
    assert ("order.paid" in page, "secret" in page, "Published" in page) == (True, False, False)


@LEFT
async def test_limits_with_a_name_are_on_the_page_of_queues_with_what_dead_programs_hold(
    connected: worqr.Mesh, server: Server, prefix: str, site: Site
) -> None:
    desk, keys = Desk(server.client(), prefix), LimitKeys(prefix, "openai")
    desk.call(ops.note_limit(desk.g, "openai", "tokens"))
    desk.call(ops.take_permits(keys, "2 500/60000", ["dead", "alive"], 40, 60_000))
    desk.call(ops.take_permits(keys, "2 500/60000", ["waits"], 40, 60_000, 3))
    desk.client.zadd(keys.held, {"dead": 1})
    page = " ".join(text_of((await site.get("/queues")).text).split())
    assert "openai 1 of dead programs rate reached 2 at once, 500 tokens per minute 1 80 3" in page
    [row] = (await site.get("/api/v1/limits")).json()["rows"]
    assert (row["name"], row["held"], row["expired"], row["used"], row["waiting"]) == ("openai", 1, 1, 80, 3)
    assert "openai,2,1,500,60.0,tokens,80,3,1" in (await site.get("/api/v1/limits", format="csv")).text
    site.viewer = Viewer("bob", ("look",), queues=("mails",))
    assert "openai" not in (await site.get("/queues")).text
    assert (await site.get("/api/v1/limits")).status_code == 403
