"""Live numbers: a stream of server-sent events for each open page.

A stream looks again every one to three seconds, and sends the texts that have changed. The graphs of a queue are sent when its
history was read again, and the page of a job when its state is another one. Streams that show the same share one look. A stream
ends after two minutes, and the browser opens the next one. So a client that vanished silently costs two minutes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import anyio

from worqr.dashboard import bulk, pages
from worqr.dashboard.access import Message, Receive, Refused
from worqr.dashboard.ended import read_counts
from worqr.dashboard.graphs import NAMES, Graphs, read_graphs
from worqr.dashboard.pages import MOST_QUEUES, failing_queues, names_to_count
from worqr.dashboard.reads import unless_refused
from worqr.dashboard.request import Answer, Visit
from worqr.dashboard.state import (
    JOB_NEWS,
    MeshState,
    batch_numbers,
    header_numbers,
    job_numbers,
    job_rows,
    lane_numbers,
    lane_rows,
    queue_numbers,
    read_state,
    rows_of,
    running_numbers,
    signature,
    state_numbers,
    without_old_lanes,
)
from worqr.errors import NoResult, Unavailable, WorqrError
from worqr.escaping import escape
from worqr.log_events import emit
from worqr.records import TaskInfo

logger: logging.Logger = logging.getLogger("worqr.dashboard")  # a documented name

Send = Callable[[Message], Awaitable[None]]
LASTS: Final = 120.0
"""Seconds after which a stream ends."""
COMMENT_EVERY: Final = 15.0
"""Seconds after which a silent stream sends a comment, so that proxies keep it open."""
AWAY: Final = 2.0
"""Seconds between two attempts while the server is away."""
MOST: Final = 64
"""Streams of one process."""
SLOW: Final = 3.0
QUICK: Final = 1.0


@dataclass(frozen=True, slots=True)
class News:
    """What a page shows now: a text for each key, the rows of its list, and the graphs of its queue. The list has changed if the
    `signature` of its rows is another one.
    """

    texts: Mapping[str, str]
    rows: object = None
    graphs: Graphs | None = None


@dataclass
class _Sent:
    """What one client knows."""

    rows: str = ""
    """The signature of the rows of its list; empty: it is not known yet."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    graphs: Graphs | None = None
    away: bool = False
    at: float = field(default_factory=time.monotonic)

    def has_moved(self, news: News) -> bool:
        """Return True if the rows of its list are others now."""
        return bool(self.rows) and signature(news.rows) != self.rows

    def events(self, news: News, draw: Callable[[Graphs], str], page: Mapping[str, str] | None = None) -> str:
        """Return the events that bring the client up to date; empty if it is.

        Args:
            news: what the page shows now.
            draw: returns the HTML of graphs.
            page: what replaces the whole page of the client; None: the client only learns that its list has changed.
        """
        new = {key: text for key, text in news.texts.items() if self.texts.get(key) != text}
        out = _event("up", {}) if self.away else ""
        if new:
            out += _event("set", {escape(key): text for key, text in new.items()})  # the page has them escaped
        if self.has_moved(news):
            out += _event("moved", {}) if page is None else _event("page", page)
        if self.texts and news.graphs is not None and news.graphs is not self.graphs:
            out += _event("graphs", {"html": draw(news.graphs)})
        self.texts |= new
        self.rows, self.graphs, self.away = signature(news.rows), news.graphs, False
        return out

    def is_away(self, why: str) -> str:
        """Return the event for a server that is away; empty if the client knows."""
        out = "" if self.away else _event("down", {"why": why})
        self.away = True
        return out


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


async def stream(visit: Visit) -> Answer:
    """Return a stream of the numbers of one page."""
    if visit.looks.streams >= MOST:
        raise Refused(503, "Too many pages are open: this one is not live. Reload it to look again.")
    view = visit.choice("view", ("overview", "queues", "failed", "workers", *_READERS))
    if view in ("queue", "job", "batch", "lanes"):
        visit.queue(visit.text("name" if view == "queue" else "queue"))
    if view == "bulk":
        bulk.act_numbers(visit)
    quick = view in ("queue", "job", "bulk", "batch", "lanes")
    redraw = partial(_job_again, visit) if view == "job" else None
    return EventStream(visit, partial(_READERS.get(view, _mesh), visit), QUICK if quick else SLOW, redraw)


async def _state(visit: Visit) -> MeshState:
    state: MeshState = await visit.looks.get("state", partial(read_state, visit.mesh), within=SLOW - 0.1, spare=True)
    return state.for_viewer(visit.viewer)


async def _mesh(visit: Visit) -> News:
    state, start = await _state(visit), pages.start_of_page(visit)
    part = slice(start, start + pages.PAGE)
    match visit.text("view"):
        case "queues":
            return News(state_numbers(state, queues=pages.sorted_queues(visit, state, empty="hide")[0][part]))
        case "failed":
            news = News(state_numbers(state, queues=failing_queues(state)[:MOST_QUEUES]))
            return await _with_counts(visit, news, names_to_count(state), "failed")
        case "workers":
            return News(state_numbers(state, workers=(await pages.filtered_workers(visit))[part]))
        case _:
            return News(state_numbers(state, queues=state.busiest(2 * pages.SHORT_LIST)))


async def _queue(visit: Visit) -> News:
    name, tab = visit.text("name"), visit.choice("tab", pages.TABS)
    queue, state = visit.queue(name), await _state(visit)

    async def read(_before: News | None) -> News:
        info, shards = await pages.read_info(visit, name)
        info = state.age_in(info)
        texts = queue_numbers(info, full=True) | header_numbers(state) | pages.shard_numbers(name, shards)
        if tab == "running":
            found, _ = await unless_refused(partial(queue.running, pages.PAGE), list[TaskInfo]())
            numbers = running_numbers([(name, task) for task in found], visit.redactor, state.now())
            return News(texts | numbers, rows_of(info, tab, found))
        return News(texts, rows_of(info, tab, ()))

    news = await visit.looks.get(("queue", name, tab), read, within=QUICK - 0.1, spare=True)
    graphs = await read_graphs(visit, name, visit.choice("range", tuple(NAMES)))
    return replace(await _with_counts(visit, news, [name], tab), graphs=graphs)


def _draw(visit: Visit, graphs: Graphs) -> str:
    """Return the graphs of the queue of a stream as HTML."""
    shown = {"name": visit.text("name")}
    span, tab = visit.choice("range", tuple(NAMES)), visit.choice("tab", pages.TABS)
    return visit.render("history.html", visit=visit, info=shown, tab=tab, graphs=graphs, range=span, ranges=NAMES)


async def _with_counts(visit: Visit, news: News, queues: Sequence[str], tab: str) -> News:
    """Count some more records, if the page counts them by the type of their error."""
    if visit.text("count") != "errors" or tab not in ("failed", "undecodable"):
        return news
    counted = await read_counts(visit, queues, "failed" if tab == "failed" else "undecodable")
    totals = [each for each in (await _state(visit)).queues if each.name in queues]
    text = counted.text(sum(getattr(each, tab) for each in totals))
    return News({**news.texts, "errors.read": text}, (news.rows, not counted.left))


async def _log(visit: Visit) -> News:
    state, entries = await _state(visit), await pages.entries_of(visit, SLOW - 0.1, spare=True)
    return News(header_numbers(state), entries[0].id if entries else "")


async def _job(visit: Visit) -> News:
    name = visit.text("queue")
    job, state = visit.queue(name).job(visit.text("id")), await _state(visit)

    async def read(_before: News | None) -> News:
        status = await job.status()
        texts = job_numbers(status, visit.redactor, state.now()) | header_numbers(state)
        return News(texts, job_rows(status))

    return await visit.looks.get(("job", name, job.id), read, within=QUICK - 0.1, spare=True)


async def _job_again(visit: Visit) -> dict[str, str]:
    """Return the page of a job that has changed, and a sentence about the change."""
    query = {name: visit.text(name) for name in ("queue", "id", "listed")}
    page = replace(visit, path="/job", query={name: value for name, value in query.items() if value})
    context = await pages.read_job(page)
    return {"html": visit.render("job_part.html", visit=page, **context), "text": JOB_NEWS[context["status"].state]}


async def _batch(visit: Visit) -> News:
    name, state = visit.text("queue"), await _state(visit)
    batch = visit.queue(name).batch(visit.text("id"))

    async def read(_before: News | None) -> News:
        try:
            info = await batch.info()
        except NoResult:  # its `keep` has passed while the page was open
            return News(header_numbers(state), "gone")
        rows = (info.state, info.cancel_reason, info.endings, info.queues, bool(info.failed))
        return News(batch_numbers(info) | header_numbers(state), rows)

    return await visit.looks.get(("batch", name, visit.text("id")), read, within=QUICK - 0.1, spare=True)


async def _lanes(visit: Visit) -> News:
    name, state = visit.text("queue"), await _state(visit)

    async def read(before: News | None) -> News:
        found = (await pages.lanes_of(visit))[: pages.LANES_SHOWN]
        texts = without_old_lanes(lane_numbers(name, found), {} if before is None else before.texts)
        return News(texts | header_numbers(state), lane_rows(found))

    return await visit.looks.get(("lanes", name), read, within=QUICK - 0.1, spare=True)


async def _running(visit: Visit) -> News:
    state, worker = await _state(visit), visit.text("worker")
    seen = tuple(visit.viewer.queues)

    async def read(_before: News | None) -> News:
        served = await pages.served_by(visit, worker)
        every, _ = await pages.running_tasks(visit, state, served, worker)
        tasks = every[: pages.PAGE]
        return News(running_numbers(tasks, visit.redactor, state.now()), [(name, task.claim) for name, task in tasks])

    news = await visit.looks.get(("running", worker, seen), read, within=SLOW - 0.1, spare=True)
    return News({**news.texts, **state_numbers(state)}, news.rows)


async def _bulk(visit: Visit) -> News:
    texts, state = bulk.act_numbers(visit)
    return News(texts, state)


_READERS: Final[dict[str, Callable[[Visit], Awaitable[News]]]] = {
    "queue": _queue,
    "job": _job,
    "running": _running,
    "bulk": _bulk,
    "log": _log,
    "batch": _batch,
    "lanes": _lanes,
}
"""The views of streams that have a reader of their own."""


class EventStream:
    """One response of server-sent events, as ASGI has it."""

    def __init__(
        self,
        visit: Visit,
        read: Callable[[], Awaitable[News]],
        every: float,
        redraw: Callable[[], Awaitable[dict[str, str]]] | None = None,
    ) -> None:
        self._visit = visit
        self._read = read
        self._redraw = redraw
        self._every = every
        self._sent = _Sent(visit.text("seen"))

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send events until the client has gone, or the stream is old."""
        with self._visit.looks.stream_opened():
            async with anyio.create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                try:
                    await self._send_all(send)
                except OSError:  # the client has gone
                    pass
                except Exception as error:
                    emit(
                        logger,
                        "dashboard.failed",
                        "a stream failed: %(error)s",
                        exc_info=error,
                        error=repr(error)[:500],
                    )
                group.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _write(send, "retry: 500\n\n")
        end = time.monotonic() + LASTS
        while time.monotonic() < end and not self._visit.looks.closing:
            try:
                async with self._visit.mesh.connect():
                    await self._send_news(send, end)
            except WorqrError as error:
                if isinstance(error, Unavailable):
                    self._visit.looks.failed(error)
                await _write(send, self._sent.is_away(str(error)[:200]))
                await anyio.sleep(AWAY)
        await _write(send, _event("bye", {}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_news(self, send: Send, end: float) -> None:
        silent_since = time.monotonic()
        while time.monotonic() < end and not self._visit.looks.closing:
            news = await self._read()
            redraws = self._redraw is not None and self._sent.has_moved(news)
            page = await self._redraw() if redraws and self._redraw is not None else None
            events = self._sent.events(news, partial(_draw, self._visit), page)
            self._visit.looks.answered()
            if not events and time.monotonic() - silent_since > COMMENT_EVERY:
                events = ": nothing new\n\n"
            if events:
                silent_since = time.monotonic()
                await _write(send, events)
            await anyio.sleep(self._every)


async def _write(send: Send, text: str) -> None:
    if text:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
