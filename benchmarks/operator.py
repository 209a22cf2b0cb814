"""The dashboard beside a server with millions of tasks: how fast its pages are, and what looking costs the server."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock
from urllib.parse import urlsplit

import redis
import trio

import worqr
from benchmarks.children import ROOT, open_child
from benchmarks.measuring import Bar, Plan, Row, Table, percentile
from benchmarks.nodes import free_port
from benchmarks.operator_mesh import FIRST, LargeMesh, Size
from benchmarks.server import account, bare
from worqr.embedded import EmbeddedServer
from worqr.link.session import MAX_CALLS, Session
from worqr.lua import all_scripts

FIRST_BYTE: Final = Bar(150, most=True)
BYTES: Final = Bar(200_000, most=True)
REQUESTS: Final = Bar(3, most=True)
SCRIPT: Final = Bar(10, most=True)
ADDED_REQUESTS: Final = Bar(4, most=True)
ADDED_CPU: Final = Bar(1, most=True)
WINDOW: Final = 60.0
SETTLE: Final = 5.0
CONNECTION: Final = "worqr:dashboard"
CONNECTING: Final = ["list_shards"]
"""The batch with which each connection begins."""
PLAIN: Final = ("/", "/running", "/failed", "/schedules", "/log", "/server", "/bulk", "/metrics")
TABLES: Final = ("queues", "running", "workers", "schedules", "log", "bulk")
ADDRESSES: Final = {
    **dict.fromkeys((*PLAIN, *(f"/api/v1/{name}" for name in TABLES)), ("",)),
    **dict.fromkeys(("/api/v1/tasks", "/api/v1/dead-letters", "/api/v1/ended"), (f"queue={FIRST}&limit=200",)),
    "/api/v1/scale": (f"queue={FIRST}",),
    "/api/v1/job": (f"queue={FIRST}&id={FIRST}-job-7",),
    "/queues": ("", "page=20&sort=name", "sort=waiting", "q=queue-09"),
    "/queue": (
        f"name={FIRST}",
        *(f"name={FIRST}&tab={tab}" for tab in ("scheduled", "running", "failed", "failed&count=errors", "ended")),
    ),
    "/job": (f"queue={FIRST}&id={FIRST}-job-7", f"queue={FIRST}&id=failed-7"),
    "/payload": (f"queue={FIRST}&id={FIRST}-job-7",),
    "/workers": ("", "page=20", "app=app-1"),
    "/worker": (f"id=host-07:{7:032x}",),
    "/confirm": (f"act=retry&queue={FIRST}", f"act=cancel&queue={FIRST}"),
    "/search": ("", f"q={FIRST}-job-7", "q=failed-7", "q=queue-0", f"queue={FIRST}&payload=x"),
}
"""Queries of pages that need one. All other pages get `GENERAL`."""
GENERAL: Final = f"queue={FIRST}&name={FIRST}&id={FIRST}-job-7"
VIEWS: Final = ("view=overview", f"view=queue&name={FIRST}", f"view=job&queue={FIRST}&id={FIRST}-job-7")


def addresses() -> list[str]:
    """Every page, some with several queries."""
    from worqr.dashboard.app import ROUTES

    pages = [path for path, route in ROUTES.items() if route.method == "GET" and path != "/live"]
    return [f"{path}?{query}".rstrip("?") for path in pages for query in ADDRESSES.get(path, (GENERAL,))]


class Browser:
    """A client of the running dashboard, with its cookie. It keeps its connection, as browsers do."""

    def __init__(self, login: str) -> None:
        parts = urlsplit(login)
        self._address = (parts.hostname or "", parts.port or 80)
        self._headers: dict[str, str] = {}
        self._connection = self.connection()
        answer = self._answer(f"{parts.path}?{parts.query}")
        answer.read()
        self._headers = {"cookie": (answer.getheader("set-cookie") or "").partition(";")[0]}

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=60)

    def _answer(self, path: str) -> http.client.HTTPResponse:
        self._connection.request("GET", path, headers=self._headers)
        return self._connection.getresponse()

    def connect_again(self) -> None:
        """Open a connection: the dashboard closes those that were idle for a while."""
        self._connection.close()
        self._connection.connect()

    def get(self, path: str) -> tuple[float, int]:
        """Return the milliseconds until the first byte of a page, and its size."""
        began = time.perf_counter()
        answer = self._answer(path)
        first = (time.perf_counter() - began) * 1000
        size = len(answer.read())
        if answer.status not in (200, 404):
            raise RuntimeError(f"{path} has the status {answer.status}")
        return first, size

    def listen(self, query: str) -> http.client.HTTPConnection:
        """Open a stream, and return its connection."""
        connection = self.connection()
        connection.request("GET", f"/live?{query}", headers=self._headers)
        if connection.getresponse().status != 200:
            raise RuntimeError(f"the stream {query} was refused")
        return connection


@asynccontextmanager
async def open_dashboard(server: EmbeddedServer) -> AsyncGenerator[Browser]:
    """``worqr dashboard`` in a process of its own."""
    path = os.pathsep.join(filter(None, (os.fspath(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "worqr", "dashboard", "--allow-enqueue", "--url", f"unix://{server.socket_path}"]
    process = await trio.lowlevel.open_process(
        [*command, "--bind", f"127.0.0.1:{free_port()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    try:
        with trio.fail_after(60):
            address = (await process.stdout.receive_some()).decode().strip()
        yield await trio.to_thread.run_sync(Browser, address)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


@dataclass(slots=True)
class Page:
    """What was measured of one page, a value per run."""

    address: str
    median: list[float] = field(default_factory=list[float])
    slow: list[float] = field(default_factory=list[float])
    size: list[float] = field(default_factory=list[float])
    requests: list[float] = field(default_factory=list[float])
    script: list[float] = field(default_factory=list[float])
    slowest: str = ""

    @property
    def is_scrape(self) -> bool:
        """True for the metrics, whose size is that of 300 queues by name."""
        return self.address.startswith("/metrics")


class ScriptClock:
    """Reads from the server's slow log how long each script took that the dashboard has called."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._names = {script.sha: script.name for script in all_scripts() if not script.tail}
        client.config_set("slowlog-log-slower-than", 0)
        client.config_set("slowlog-max-len", 20_000)

    def start(self) -> None:
        self._client.slowlog_reset()

    def slowest(self) -> tuple[float, str]:
        """Return the milliseconds of the slowest call, and its script."""
        found = (0.0, "")
        for entry in self._client.slowlog_get(20_000):
            words = bytes(entry["command"]).split()
            if words[0].upper() == b"EVALSHA" and bytes(entry.get("client_name", b"")).startswith(CONNECTION.encode()):
                found = max(found, (entry["duration"] / 1000, self._names.get(words[1].decode(), words[-1].decode())))
        return found

    def stop(self) -> None:
        self._client.config_set("slowlog-log-slower-than", -1)


@contextmanager
def counted_batches() -> Generator[list[int]]:
    """Note the number of requests of each batch that this process sends. A batch is one round trip; two full ones in a row, which
    the link has made of one list of calls, count as one.
    """
    batches: list[int] = []
    send = Session.send

    def counting(self: Session, batch: list[Any], *args: Any) -> Any:
        if batches and batches[-1] == MAX_CALLS:
            batches[-1] += len(batch)
        elif [each.call.script.name for each in batch] != CONNECTING:
            batches.append(len(batch))
        return send(self, batch, *args)

    with mock.patch.object(Session, "send", counting):
        yield batches


async def batches_of(server: EmbeddedServer, address: str) -> float:
    """Return how many batches a dashboard that has just started sends for a page."""
    from worqr.dashboard import Dashboard, admin

    app = Dashboard(worqr.Mesh(f"unix://{server.socket_path}"), access=lambda scope: admin("ada"), allow_enqueue=True)
    path, _, query = address.partition("?")
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None: ...

    with counted_batches() as batches:
        await app(scope, receive, send)
    return float(len(batches))


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Pages first, then what viewers cost; a peer that has nothing to run leads meanwhile."""
    client, size = bare(server), Size.of(plan)
    began = time.perf_counter()
    await trio.to_thread.run_sync(LargeMesh(client, size).fill)
    filled = f"{size}; filled in {time.perf_counter() - began:.0f} s, half of all in one queue"
    pages = [Page(address) for address in addresses()]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_child("peers", server, queue="idle", handler="do_nothing"))
        browser = await stack.enter_async_context(open_dashboard(server))
        await trio.sleep(plan.seconds(SETTLE))
        for page in pages:
            await measure_page(plan, server, client, browser, page)
        return [*tables_of(pages, filled), *await viewers(plan, client, browser)]


async def measure_page(plan: Plan, server: EmbeddedServer, client: redis.Redis, browser: Browser, page: Page) -> None:
    clock = ScriptClock(client)
    for _ in range(plan.runs):
        clock.start()
        browser.connect_again()
        times: list[float] = []
        for _ in range(plan.size(40, 2)):
            first, size = await trio.to_thread.run_sync(browser.get, page.address)
            times.append(first)
        page.median.append(percentile(times, 50))
        page.slow.append(percentile(times, 95))
        page.size.append(size)
        slowest, script = clock.slowest()
        page.script.append(slowest)
        page.slowest = f"{page.address}: {script}" if slowest == max(page.script) else page.slowest
        page.requests.append(await batches_of(server, page.address))
    clock.stop()


def tables_of(pages: list[Page], filled: str) -> list[Table]:
    """One table for each bar, with a line for each page."""

    def table(what: str, unit: str, bar: Bar, values: Callable[[Page], list[float]], *notes: str) -> Table:
        rows = [
            Row(page.address, unit, values(page), bar=None if page.is_scrape and bar is BYTES else bar)
            for page in pages
        ]
        return Table(f"operator: {what}", "", rows, list(notes))

    first = table("first byte of a page, p95", "ms", FIRST_BYTE, lambda page: page.slow, filled)
    for row, page in zip(first.rows, pages, strict=True):
        row.limits = page.median
    first.limit = "p50 of the same requests"
    return [
        first,
        table("size of a page", "bytes", BYTES, lambda page: page.size),
        table(
            *("requests to the server for a page", "requests", REQUESTS, lambda page: page.requests),
            "of a dashboard that has read nothing before; a batch of up to 1,024 counts once, and connecting does not count",
        ),
        table(
            *("slowest script of a page", "ms", SCRIPT, lambda page: page.script),
            *(f"slowest: {page.slowest}" for page in pages if max(page.script) > SCRIPT.value),
        ),
    ]


async def viewers(plan: Plan, client: redis.Redis, browser: Browser) -> list[Table]:
    """What open pages cost, beside none; and what is left when they were closed."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for count in (0, 1, 20):
        streams = [await trio.to_thread.run_sync(browser.listen, query) for query in VIEWS for _ in range(count)]
        await trio.sleep(plan.seconds(SETTLE))
        found[count] = await watched(plan, client)
        for stream in streams:
            stream.close()
        await until(lambda: not connections(client))
    rows: list[Row] = []
    for count, (requests, cpu) in found.items():
        rows.append(
            Row(f"{count} viewers of {len(VIEWS)} pages: requests", "1/s", requests, found[0][0] if count else [])
        )
        rows.append(Row("... CPU of the server", "% of a core", cpu, found[0][1] if count else []))
        if count:
            for what, unit, of, bar in (
                ("... requests added", "1/s", 0, ADDED_REQUESTS),
                ("... CPU added", "% of a core", 1, ADDED_CPU),
            ):
                added = [now - then for now, then in zip(found[count][of], found[0][of], strict=True)]
                rows.append(Row(what, unit, added, bar=bar))
    looking = Table("operator: the cost of open pages", "the same without viewers", rows)
    await trio.sleep(plan.seconds(SETTLE))
    left = [
        Row("connections of the dashboard", "connections", [float(len(connections(client)))], bar=Bar(0, most=True))
    ]
    return [looking, Table("operator: pages open 0", "", left)]


async def watched(plan: Plan, client: redis.Redis) -> tuple[list[float], list[float]]:
    """Return requests per second and CPU of the server, a value per run; all runs together take the window."""
    requests, cpu = list[float](), list[float]()
    for _ in range(plan.runs):
        before = account(client)
        await trio.sleep(plan.seconds(WINDOW) / plan.runs)
        spent = account(client).since(before)
        requests.append(spent.rate)
        cpu.append(spent.cpu / spent.at * 100)
    return requests, cpu


def connections(client: redis.Redis) -> list[str]:
    return [each["name"] for each in client.client_list() if each["name"].startswith(CONNECTION)]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not await trio.to_thread.run_sync(condition):  # noqa: ASYNC110 - the server can only be asked again
            await trio.sleep(0.05)
