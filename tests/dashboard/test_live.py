"""Live numbers: streams share one look, send what has changed, and need nothing while no page is open."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
import redis
import trio
import trio.testing

import worqr
from tests.dashboard.conftest import Batches, Site, write_quiet_hour
from tests.dashboard.scene import open_scene
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.dashboard import graphs, live, pages, reader
from worqr.dashboard.graphs import Graphs
from worqr.dashboard.live import News, _Sent
from worqr.dashboard.reads import Looks
from worqr.dashboard.state import signature
from worqr.errors import Unavailable

LEFT = pytest.mark.leaves("*")


class Stream:
    """A browser that reads a stream: its events, as they come."""

    def __init__(self) -> None:
        self.send_channel, self.events = trio.open_memory_channel[tuple[str, Any]](1000)
        self.gone = trio.Event()
        self.status = 0
        self.text = ""

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.text += message.get("body", b"").decode()
        *whole, self.text = self.text.split("\n\n")
        for each in whole:
            if each.startswith("event: "):
                name, data = each.removeprefix("event: ").split("\ndata: ")
                await self.send_channel.send((name, json.loads(data)))

    async def wait_for(self, name: str, condition: Callable[[Any], bool] = lambda data: True) -> Any:
        """The next event of this name that the condition accepts; others are skipped."""
        with trio.fail_after(PATIENCE):
            while True:
                event, data = await self.events.receive()
                if event == name and condition(data):
                    return data


@asynccontextmanager
async def opened(site: Site, query: str) -> AsyncIterator[Stream]:
    stream = Stream()
    scope = {
        "type": "http", "method": "GET", "path": "/live", "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1")], "scheme": "http", "root_path": "",
    }  # fmt: skip
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.app, scope, stream.receive, stream.send)
        yield stream
        stream.gone.set()


def connections(client: redis.Redis) -> list[str]:
    return [each["name"] for each in client.client_list() if "dashboard" in each["name"]]


@LEFT
async def test_numbers_move(connected: worqr.Mesh, site: Site, server: Server) -> None:
    async with opened(site, "view=queue&name=mails") as stream:
        await stream.wait_for("set", lambda new: new["queue.mails.waiting"] == "0")
        await connected.queue("mails").enqueue(b"1", b"2")
        new = await stream.wait_for("set", lambda new: "queue.mails.waiting" in new)
        assert new["queue.mails.waiting"] == "2"
        assert "queue.mails.running" not in new  # only what has changed is sent
        await stream.wait_for("moved")


def of_lanes(texts: dict[str, str]) -> dict[str, str]:
    return {key: text for key, text in texts.items() if key.startswith("lane.")}


@LEFT
async def test_the_lanes_of_a_queue_move(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    await queue.dispatch(b"1", lane="acme", id="one")
    await queue.dispatch(b"1", lane="<b>", id="other")
    page = (await site.get("/lanes", queue="mails")).text
    address = live_of(page)
    acme, other = "lane.{mails}.acme", "lane.{mails}.<b>"
    assert f'data-k="{acme}.waiting"' in page
    async with opened(site, address) as stream:
        first = await stream.wait_for("set")
        assert (first[f"{acme}.waiting"], first[f"{other}.waiting"], first[f"{acme}.hold"]) == ("1", "1", "")
        await queue.dispatch(b"1", lane="acme")
        new = of_lanes(await stream.wait_for("set", lambda new: bool(of_lanes(new))))
        assert new == {f"{acme}.waiting": "2"}  # only what has changed is sent, and the rows are the same
        await queue.cancel_lane("<b>")
        new = of_lanes(await stream.wait_for("set", lambda new: bool(of_lanes(new))))
        assert new == {f"{other}.waiting": "0"}  # of a lane that is gone
        await stream.wait_for("moved")
        await queue.pause("closed", lane="acme", duration=600)
        await stream.wait_for("set", lambda new: new.get(f"{acme}.hold", "").startswith("for 9 min"))
        await stream.wait_for("moved")
    await queue.cancel_all()


@LEFT
async def test_lanes_are_read_for_those_who_look_only(
    connected: worqr.Mesh, site: Site, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connected.queue("mails").dispatch(b"1", lane="acme")

    def looks() -> int:
        return sum(batch.count("list_lanes") for sent in batches.sent.values() for batch in sent)

    with monkeypatch.context() as patch:
        patch.setattr(live, "QUICK", PATIENCE)  # until the next look
        async with opened(site, "view=lanes&queue=mails") as one, opened(site, "view=lanes&queue=mails") as other:
            for stream in (one, other):
                await stream.wait_for("set")
            assert looks() == 1  # both share it
    assert site.app._looks.streams == 0  # pyright: ignore[reportPrivateUsage]
    before = looks()
    async with opened(site, "view=queue&name=mails") as stream:
        await stream.wait_for("set")
        await connected.queue("mails").enqueue(b"1")
        await stream.wait_for("set", lambda new: "queue.mails.waiting" in new)
    assert looks() == before
    site.viewer = reader("bob", ("letters",))
    assert (await site.get("/live", view="lanes", queue="mails")).status_code == 404
    await connected.queue("mails").cancel_all()


@LEFT
async def test_totals_and_rates(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mails").enqueue(b"1")
    async with opened(site, "view=overview") as stream:
        first = await stream.wait_for("set")
        assert (first["total.waiting"], first["queue.mails.waiting"], first["total.finished_rate"]) == ("1", "1", "–")
        await stream.wait_for("set", lambda new: new.get("total.finished_rate") == "0")


def live_of(page: str) -> str:
    """The query of the stream of a page."""
    return html.unescape(page.split('data-live="/live?')[1].split('"')[0])


@LEFT
async def test_a_job_from_waiting_to_cancelled(connected: worqr.Mesh, site: Site) -> None:
    job = await connected.queue("mails").dispatch(b"1", id="one", result_ttl=60)
    address = live_of((await site.get("/job", queue="mails", id="one")).text)
    async with opened(site, address) as stream:
        assert (await stream.wait_for("set"))["job.state"] == "waiting"
        await job.cancel()
        new = await stream.wait_for("page")
        assert new["text"] == "This job was cancelled."
        assert "The job was cancelled." in new["html"]
        assert "Cancel the job" not in new["html"]
    async with opened(site, address) as stream:  # the page is from before, and learns it at once
        assert (await stream.wait_for("page"))["text"] == "This job was cancelled."


@LEFT
async def test_the_page_of_a_job_tells_the_end_also_if_no_result_is_kept(connected: worqr.Mesh, site: Site) -> None:
    go_on = trio.Event()

    async def runs(task: bytes) -> None:
        worqr.current().progress(0.5, "half")
        await go_on.wait()

    async with connected.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "mails", runs)
        await connected.queue("mails").dispatch(b"1", id="one")
        with trio.fail_after(PATIENCE):
            while "Running for" not in (page := (await site.get("/job", queue="mails", id="one")).text):
                await trio.sleep(0.01)
        async with opened(site, live_of(page)) as stream:
            await stream.wait_for("set", lambda new: (new.get("job.bar"), new.get("job.message")) == ("0.500", "half"))
            go_on.set()
            new = await stream.wait_for("page")
        assert new["text"] == "This job has ended."
        assert "The job has ended. Its result was not kept" in new["html"]
        assert "Running for" not in new["html"]
        assert "<html" not in new["html"]
        nursery.cancel_scope.cancel()


@LEFT
async def test_a_hidden_queue_is_not_in_a_stream(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("payroll").enqueue(b"1")
    await connected.queue("mail").enqueue(b"1")
    site.viewer = reader("bob", ("mail",))
    for view in ("overview", "queues", "failed", "workers", "running"):
        async with opened(site, f"view={view}") as stream:
            new = await stream.wait_for("set")
            assert "payroll" not in json.dumps(new)
            assert new["total.waiting"] == "1"


@LEFT
async def test_without_a_page_there_is_no_connection(site: Site, server: Server) -> None:
    with server.client() as client:
        assert connections(client) == []
        async with opened(site, "view=overview") as stream:
            await stream.wait_for("set")
            assert connections(client)
            assert site.app._looks.streams == 1  # pyright: ignore[reportPrivateUsage]
        with trio.fail_after(PATIENCE):
            while connections(client):
                await trio.sleep(0.02)
        assert site.app._looks.streams == 0  # pyright: ignore[reportPrivateUsage]


@LEFT
async def test_a_stream_ends_by_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LASTS", 0.1)
    async with opened(site, "view=queue&name=mails") as stream:
        await stream.wait_for("bye")


@LEFT
async def test_streams_end_with_the_program(site: Site) -> None:
    async with opened(site, "view=queue&name=mails") as stream:
        await stream.wait_for("set")
        site.app._looks.close()  # pyright: ignore[reportPrivateUsage]
        await stream.wait_for("bye")


@LEFT
async def test_there_is_a_limit_of_streams(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST", 1)
    async with opened(site, "view=overview") as stream:
        await stream.wait_for("set")
        answer = await site.get("/live", view="overview")
        assert answer.status_code == 503
        assert "not live" in answer.text


@LEFT
async def test_a_server_that_goes_away_and_comes_back(own_server: Server, prefix: str) -> None:
    site = Site(worqr.Mesh(own_server.url, prefix=prefix, patience=0.3))
    async with opened(site, "view=queue&name=mails") as stream:
        await stream.wait_for("set")
        own_server.stop()
        await stream.wait_for("down")
        own_server.start()
        await stream.wait_for("up")


def draw(graphs: object) -> str:
    return "drawn"


def test_only_changes_are_sent() -> None:
    sent = _Sent()
    assert sent.events(News({"a": "1", "b": "2"}, 1), draw) == 'event: set\ndata: {"a":"1","b":"2"}\n\n'
    assert sent.events(News({"a": "1", "b": "2"}, 1), draw) == ""
    assert (
        sent.events(News({"a": "3", "b": "2"}, 2), draw) == 'event: set\ndata: {"a":"3"}\n\nevent: moved\ndata: {}\n\n'
    )
    assert "down" in sent.is_away("x")
    assert sent.is_away("x") == ""
    assert sent.events(News({"a": "3", "b": "2"}, 2), draw) == "event: up\ndata: {}\n\n"


def test_a_list_that_has_changed_before_the_first_look_has_moved() -> None:
    assert "moved" not in _Sent(signature([1])).events(News({"a": "1"}, [1]), draw)
    assert "moved" in _Sent(signature([1])).events(News({"a": "1"}, [2]), draw)


@LEFT
@pytest.mark.parametrize("tab", pages.TABS)
async def test_a_page_tells_its_stream_which_list_it_shows(
    connected: worqr.Mesh, site: Site, server: Server, tab: str
) -> None:
    queues = {"running": "slow", "failed": "failing", "ended": "failing", "undecodable": "typed"}
    async with open_scene(server.url, connected.prefix) as scene:
        page = (await site.get("/queue", name=scene.names[queues.get(tab, "queue")], tab=tab)).text
        address = html.unescape(page.split('data-live="/live?')[1].split('"')[0])
        async with opened(site, address) as stream:
            await stream.wait_for("set")
            await trio.testing.wait_all_tasks_blocked(0.01)
            sent = list[str]()
            with pytest.raises(trio.WouldBlock):
                while True:
                    sent.append(stream.events.receive_nowait()[0])
            assert "moved" not in sent
        async with opened(site, f"{address}0") as stream:
            await stream.wait_for("moved")


def test_graphs_are_sent_when_they_are_others_than_before() -> None:
    sent, graphs = _Sent(), [Graphs((), (), (), datetime.now(UTC)) for _ in range(2)]
    assert "graphs" not in sent.events(News({"a": "1"}, graphs=graphs[0]), draw), "the page has them"
    assert sent.events(News({"a": "1"}, graphs=graphs[0]), draw) == ""
    assert sent.events(News({"a": "1"}, graphs=graphs[1]), draw) == 'event: graphs\ndata: {"html":"drawn"}\n\n'
    assert sent.events(News({"a": "1"}), draw) == ""


@LEFT
async def test_the_graphs_of_a_queue_are_drawn_again(
    connected: worqr.Mesh, site: Site, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "FRESH", 0.2)
    await connected.queue("drawn").enqueue(b"1")
    write_quiet_hour(server, connected.prefix, "drawn")
    async with opened(site, "view=queue&name=drawn&range=8h&tab=scheduled") as stream:
        html = (await stream.wait_for("graphs"))["html"]
    assert html.count("<figure") == 6
    assert "name=drawn&amp;tab=scheduled&amp;range=3d" in html


def test_a_text_cannot_end_an_event() -> None:
    text = _Sent().events(News({"a\n\nevent: down": "x\r\n\r\nevent: bye\ndata: {}\n\n\u2028"}), draw)
    assert len(text.split("\n\n")) == 2
    assert text.count("\n") == 3


async def test_many_share_one_look() -> None:
    looks, reads = Looks(), []

    async def read(before: int | None) -> int:
        reads.append(before)
        await anyio.sleep(0.01)
        return len(reads)

    async def one() -> None:
        assert await looks.get("key", read, within=PATIENCE) == 1

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(one)
    assert reads == [None]
    assert await looks.get("key", read, within=0) == 2
    assert reads == [None, 1]  # a look gets the value before


async def test_a_failed_look_is_shared_as_well() -> None:
    looks, reads = Looks(), []

    async def read(before: int | None) -> int:
        reads.append(before)
        await anyio.sleep(0.01)
        raise Unavailable("away")

    async def one() -> None:
        with pytest.raises(Unavailable):
            await looks.get("key", read, within=PATIENCE)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(one)
    assert len(reads) == 1


async def test_slow_looks_are_rare(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from worqr.dashboard import reads as module

    monkeypatch.setattr(module.time, "monotonic", trio.current_time)
    monkeypatch.setattr(module, "KEPT", 1e9)
    looks, reads = Looks(), 0

    async def read(before: int | None) -> int:
        nonlocal reads
        reads += 1
        await trio.sleep(1)
        return reads

    for _ in range(200):
        await looks.get("key", read, spare=True)
        await trio.sleep(1)
    assert reads <= 3


async def test_a_look_that_failed_is_repeated_soon(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worqr.dashboard import reads as module

    monkeypatch.setattr(module.time, "monotonic", trio.current_time)
    looks, is_away = Looks(), True

    async def read(before: int | None) -> int:
        if is_away:
            await trio.sleep(5)
            raise Unavailable("away")
        return 1

    with pytest.raises(Unavailable):
        await looks.get("key", read, spare=True)
    is_away = False
    await trio.sleep(live.AWAY)
    assert await looks.get("key", read, spare=True) == 1


@LEFT
async def test_pages_and_streams_under_asyncio(connected: worqr.Mesh, site: Site, server: Server) -> None:
    """FastAPI and Starlette applications on uvicorn run the dashboard on an asyncio loop."""
    await connected.queue("mails").enqueue(b"1")

    async def main() -> tuple[int, str]:
        page = await site.get("/queue", name="mails")
        gone, body = asyncio.Event(), bytearray()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            body.extend(message.get("body", b""))
            if b"event: set" in body:
                gone.set()

        scope = {
            "type": "http", "method": "GET", "path": "/live", "query_string": b"view=queue&name=mails",
            "headers": [(b"host", b"127.0.0.1")], "scheme": "http", "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(site.app(scope, receive, send), PATIENCE)
        return page.status_code, body.decode()

    status, body = await trio.to_thread.run_sync(lambda: asyncio.run(main()))
    assert status == 200
    assert '"queue.mails.waiting":"1"' in body
    with server.client() as client, trio.fail_after(PATIENCE):
        while connections(client):
            await trio.sleep(0.02)
