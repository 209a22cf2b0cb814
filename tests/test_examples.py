"""The examples run, as the processes that their first lines describe, and have the effect that they promise."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import trio

from tests.support.children import ROOT, Child
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port

pytestmark = pytest.mark.one_server

EXAMPLES = ROOT / "examples"
TESTED = {
    *("peer.py", "producer.py", "batches.py", "cancel.py", "foreign.sh", "foreign.py"),
    *("reports.py", "retries.py", "redrive.py", "singleton.py", "orders.py", "primes.py"),
    *("workflow_order.py", "workflow_approval.py", "workflow_crawl.py", "workflow_agent.py"),
    *("web_fastapi.py", "web_flask.py", "web_gunicorn.py", "web_django.py"),  # in test_web.py
    *(
        "dashboard_fastapi.py",
        "dashboard_starlette.py",
        "dashboard_django.py",
        "dashboard_nginx.conf",
    ),  # in test_mounts.py
    *("web_starlette.py", "web_trio.py", "web_quart.py", "web_django_asgi.py"),
}

Run = Callable[..., Child]


@pytest.fixture
def run(server: Server, spawn: Callable[..., Child]) -> Iterator[Run]:
    """`run("peer.py", *args)`: an example as a process, on the server of the tests; what it leaves is cleared away."""

    def start(name: str, *args: str) -> Child:
        return spawn(EXAMPLES / name, *args, env={"WORQR_URL": server.tcp_url})

    with server.client() as client:
        delete_all(client, "worqr")
        yield start
        delete_all(client, "worqr")


def test_every_example_is_tested_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert programs == TESTED
    listed = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert set(listed) == TESTED


async def test_a_peer_greets_whom_a_producer_names(run: Run) -> None:
    peer = run("peer.py")
    producer = run("producer.py", "Ada", "Grace")
    assert await producer.line() == "2 enqueued"
    assert await producer.ended() == 0
    assert {await peer.line(), await peer.line()} == {"Hello, Ada!", "Hello, Grace!"}


async def test_batches_become_transactions(run: Run, tmp_path: Path) -> None:
    feeder = run("batches.py", "--feed", "250")
    assert await feeder.line() == "250 enqueued"
    database = tmp_path / "readings.db"
    writer = run("batches.py", str(database))
    lines = [await writer.line() for _ in range(3)]
    assert lines[:2] == ["100 stored, 0 of them lost to another worker meanwhile"] * 2
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*), min(number), max(number) FROM readings").fetchone() == (250, 0, 249)


async def test_a_film_is_stopped_from_another_process(run: Run, server: Server) -> None:
    worker = run("cancel.py", "render", "film-1")
    assert await worker.line() == "rendering film-1"
    stopper = run("cancel.py", "stop", "film-1")
    assert await stopper.line() == "0 removed from the queue; 1 of 1 running ones have ended"
    assert await worker.line() == "no longer rendering film-1: cancel"
    with server.client() as client:
        assert client.exists("worqr:{films}", "worqr:{films}:cancelling") == 0


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
async def test_redis_cli_is_a_producer(run: Run, server: Server) -> None:
    peer = run("peer.py")
    subprocess.run(  # noqa: ASYNC221 - the peer is another process
        ["/bin/sh", EXAMPLES / "foreign.sh", "Edsger", "Alan M."],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "WORQR_URL": server.tcp_url},
        check=True,
        capture_output=True,
        timeout=3 * PATIENCE,
    )
    assert {await peer.line(), await peer.line()} == {"Hello, Edsger!", "Hello, Alan M.!"}


async def test_redis_py_is_a_producer(run: Run) -> None:
    peer = run("peer.py")
    assert await run("foreign.py", "Barbara").ended() == 0
    assert await peer.line() == "Hello, Barbara!"


async def test_a_report_is_ordered_watched_and_fetched(run: Run) -> None:
    worker = run("reports.py", "work")
    for pages in (10, 60):  # whoever watches may stand still for some seconds
        order = run("reports.py", "order", "sales", str(pages))
        assert await order.line() == "sales: created"
        shown = await order.line_with("page")
        if "active" in shown:
            break
    assert re.fullmatch(rf"sales: active page \d+ of {pages}", shown)
    assert await order.line_with("finished") == f"sales: finished page {pages} of {pages}"
    assert await order.ended() == 0
    fetch = run("reports.py", "fetch", "sales")
    assert await fetch.line() == f"{{'report': 'sales', 'pages': {pages}, 'for': 'ada'}}"
    assert await run("reports.py", "fetch", "other").line() == "other was never ordered, or is forgotten"
    worker.kill()


async def test_a_report_is_stopped_from_another_process(run: Run) -> None:
    run("reports.py", "work")
    order = run("reports.py", "order", "sales", "1000")
    await order.line_with("active page")
    fetch = run("reports.py", "fetch", "sales")
    stop = run("reports.py", "stop", "sales")
    assert await stop.line() == "0 removed; 1 of 1 running ones have ended"
    assert re.fullmatch(r"sales: cancelled page \d+ of 1000", await order.line_with("cancelled"))
    assert await fetch.line() == "sales was cancelled: cancelled by the user"


async def test_what_is_given_up_reaches_the_failure_handler_and_can_be_put_back(run: Run) -> None:
    worker = run("retries.py", "work")
    await run("retries.py", "send", "ada@example.org", "later@example.org", "nowhere", "broken@example.org").ended()
    assert {await worker.line() for _ in range(4)} == {
        "delivered to ada@example.org in run 1",
        "delivered to later@example.org in run 2",
        "given up after 1: nowhere: nowhere is no address",
        "given up after 3: broken@example.org: connection refused",
    }
    show = run("redrive.py", "show", "deliveries")
    assert {await show.line(), await show.line()} == {
        "failed: b'nowhere': worqr.Failure: nowhere is no address (1 failures, 0 stalls, 0 timeouts)",
        "failed: b'broken@example.org': ConnectionError: connection refused (3 failures, 0 stalls, 0 timeouts)",
    }
    assert await run("redrive.py", "retry", "deliveries", "Failure").line() == "1 put back"
    assert await worker.line() == "given up after 1: nowhere: nowhere is no address"
    assert await run("redrive.py", "drop", "deliveries", "Failure").line() == "1 forgotten"
    assert await run("redrive.py", "retry", "deliveries").line() == "1 put back"


async def test_many_changes_are_one_run_when_it_has_been_quiet(run: Run) -> None:
    assert await run("singleton.py", "edit", "site", "20").line() == "1 created, 19 updated"
    worker = run("singleton.py", "work")  # now: the machine may not have been quick enough for half a second of quiet
    assert await worker.line() == "site: rebuilt after change 20"
    await run("singleton.py", "edit", "site", "1").ended()
    assert await worker.line() == "site: rebuilt after change 1"


async def test_orders_are_shipped_by_a_typed_function(run: Run) -> None:
    worker = run("orders.py", "work")
    customer = run("orders.py", "ship", "9.90", "0")
    assert [await customer.line(), await customer.line()] == ["arrives on 03 January", "never arrives: nothing to ship"]
    assert await customer.ended() == 0
    assert await worker.line() == "not shipped: an order of 0: nothing to ship"
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_primes_are_counted_in_a_process(run: Run) -> None:
    worker = run("primes.py", "work")
    await run("primes.py", "below", "100").line_with("25 primes below 100, counted by process")
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_an_order_that_cannot_be_packed_is_refunded(run: Run) -> None:
    worker = run("workflow_order.py", "work")
    assert (
        await run("workflow_order.py", "order", "o-1", "pen", "ink").line() == "shipped: pen in box o-1, ink in box o-1"
    )
    customer = run("workflow_order.py", "order", "o-2", "pen", "glass")
    assert await customer.line() == "not shipped: refunded, because the glass is broken"
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    said = [await worker.line() for _ in range(3)]
    assert said == ["o-1: charged 1000 cents", "o-2: charged 1000 cents", "refunded payment-o-2"]


SITE = {
    "/": '<a href="a">a</a> <a href="/b#part">b</a> <a href="gone">gone</a> <a href="https://example.org/">another site</a>',
    "/a": '<a href="/">back</a> <a href="c">c</a>',
    "/b": '<a href="c">c</a>',
    "/c": "the end",
}


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """The address of a small site, and the paths that were asked for."""
    asked: list[str] = []

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            text = SITE.get(self.path, "").encode()
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


async def test_a_crawl_reads_each_page_once_and_stops_at_its_bound(run: Run, site: tuple[str, list[str]]) -> None:
    address, asked = site
    run("workflow_crawl.py", "work")
    crawl = run("workflow_crawl.py", "crawl", f"{address}/")
    said = [await crawl.line() for _ in range(4)]
    assert said == ["level 0: 1 pages", "level 1: 2 pages, 1 missing", "level 2: 1 pages", "5 addresses"]
    assert sorted(asked) == ["/", "/a", "/b", "/c", "/gone"]
    asked.clear()
    crawl = run("workflow_crawl.py", "crawl", f"{address}/", "2")
    assert [await crawl.line() for _ in range(3)] == ["level 0: 1 pages", "level 1: 1 pages", "2 addresses"]
    assert asked == ["/", "/a"]


async def test_an_agent_that_is_killed_at_each_call_pays_each_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger.db"))
    agent = run("workflow_agent.py", "ask", "buy it?")
    deaths = [await agent.line() for _ in range(5)]
    assert deaths == ["the worker has died: SIGKILL"] * 5
    assert await agent.line() == "the answer is buy it?: yes, by 2 sources"
    assert [await agent.line() for _ in range(5)] == [
        f"{call}: asked for 2 times, paid 2 cents"
        for call in (
            *("think, with 0 notes", "search prices", "think, with 1 notes"),
            *("search opinions", "think, with 2 notes"),
        )
    ]


async def test_an_article_is_published_by_a_person_with_a_link(server: Server, spawn: Callable[..., Child]) -> None:
    port, env = str(free_port()), {"WORQR_URL": server.tcp_url}
    start = "from uvicorn import main; main()"
    site = spawn(
        start, "--app-dir", str(EXAMPLES), "--port", port, "--log-level", "warning", "workflow_approval:app", env=env
    )
    transport = httpx.AsyncHTTPTransport(retries=9)  # until it listens
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, transport=transport) as http:
        link = await submit(http, site)
        assert "<form" in (await http.get(link)).text  # as the scanner of a mail program does
        assert (await http.get("/articles/worqr")).json()["result"] is None
        assert (await http.post(link)).text == "Thank you."
        assert await site.line() == "published worqr"
        assert await result(http) == "published"
        later = await submit(http, site)
        assert (await http.post(link)).status_code == 410  # the old link answers no later article
        assert (await http.post(f"{later}?no")).text == "Thank you."
        assert await result(http) == "rejected"


async def submit(http: httpx.AsyncClient, site: Child) -> str:
    assert (await http.post("/articles/worqr")).json() == {"outcome": "created"}
    return (await site.line_with("mail: may worqr be published?")).rpartition(" ")[2]


async def result(http: httpx.AsyncClient) -> str:
    with trio.fail_after(PATIENCE):
        while (found := (await http.get("/articles/worqr")).json())["state"] != "finished":
            await trio.sleep(0.02)
    return found["result"]


@pytest.mark.parametrize(
    "name",
    [
        *("batches.py", "cancel.py", "reports.py", "retries.py", "redrive.py", "singleton.py"),
        *("orders.py", "primes.py", "workflow_order.py", "workflow_crawl.py", "workflow_agent.py"),
    ],
)
async def test_without_arguments_it_says_how_to_use_it(run: Run, name: str) -> None:
    program = run(name)
    assert await program.ended() == 1
    assert program.errors.startswith(f"usage: {name}")
