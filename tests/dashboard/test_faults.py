"""What each fault shows: the rows about the dashboard in the table of faults, docs/explain/guarantees.md."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.scene import open_scene, why_not
from tests.dashboard.test_live import opened
from tests.peer.tools import eventually
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.client.job import Job
from worqr.dashboard import reader
from worqr.dashboard.request import Visit
from worqr.errors import Unavailable

LEFT = pytest.mark.leaves("*")


@LEFT
async def test_a_server_that_goes_away_is_logged_once_each_way(
    own_server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    site = Site(worqr.Mesh(own_server.url, prefix=prefix, patience=1))
    async with opened(site, "view=queue&name=mails") as first, opened(site, "view=overview") as second:
        for stream in (first, second):
            await stream.wait_for("set")
        own_server.stop()
        for stream in (first, second):
            await stream.wait_for("down")
        answer = await site.get("/queues")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert 'aria-current="page"' in answer.text  # the same layout, with its navigation
        own_server.start()
        for stream in (first, second):
            await stream.wait_for("up")
    words = [record.__dict__.get("event") for record in caplog.records if record.name.startswith("worqr")]
    told = [word for word in words if word in ("dashboard.away", "dashboard.back")]
    assert told == ["dashboard.away", "dashboard.back"] * max(
        1, len(told) // 2
    )  # on a slow machine, it may go away twice


@pytest.mark.parametrize(("sent", "words"), [(False, "nothing was sent"), (None, "may have taken effect")])
@LEFT
async def test_an_act_without_an_answer_says_what_is_known(
    sent: bool | None, words: str, connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_args: Any, **_options: Any) -> None:
        raise Unavailable("away", sent=sent)

    monkeypatch.setattr(Visit, "queue", lambda self, name: type("Away", (), {"resume": fails, "pause": fails})())
    for path in ("/pause", "/resume"):
        answer = await site.post(path, queue="mails", back="/")
        assert answer.status_code == 303
        assert words in (await site.ask("GET", answer.headers["location"])).text


@LEFT
async def test_an_act_on_several_jobs_that_did_some_never_says_that_it_did_nothing(
    connected: worqr.Mesh, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, cancel, cancelled = connected.queue("mails"), Job.cancel, trio.Event()
    for name in ("one", "two"):
        await queue.dispatch(b"1", id=name)

    async def away_for_the_second(job: Job[Any], **options: Any) -> Any:
        if job.id == "two":
            await cancelled.wait()
            raise Unavailable("away", sent=False)
        found = await cancel(job, **options)
        cancelled.set()
        return found

    monkeypatch.setattr(Job, "cancel", away_for_the_second)
    answer = await site.post("/cancel", queue="mails", id=["one", "two"])
    assert await queue.count() == 1
    assert "may have taken effect" in (await site.ask("GET", answer.headers["location"])).text


@pytest.mark.parametrize("back", ["//[", "https://elsewhere.example/", "//elsewhere.example/"])
async def test_an_act_that_cannot_return_to_its_page_is_not_done(back: str, connected: worqr.Mesh, site: Site) -> None:
    answer = await site.post("/pause", queue="mails", back=back)
    assert (answer.status_code, "Nothing was changed" in answer.text) == (400, True)
    assert (await connected.queue("mails").info()).paused is None


@LEFT
@pytest.mark.parametrize(
    ("letters", "page"), [(500, "/queue?name=mails&tab=failed&error=%C3%A9"), (2000, "/?done=pause")]
)
async def test_an_act_on_a_page_with_a_long_filter_is_confirmed(
    letters: int, page: str, connected: worqr.Mesh, site: Site
) -> None:
    back = "/queue?name=mails&tab=failed&error=" + "%C3%A9" * letters
    answer = await site.post("/pause", queue="mails", back=back)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"].startswith(page)
    assert "The queue is paused" in (await site.ask("GET", answer.headers["location"])).text


@LEFT
async def test_two_operators_at_once(connected: worqr.Mesh, site: Site) -> None:
    queue = connected.queue("mails")
    for name in ("one", "two"):
        await queue.dispatch(b"1", id=name)
    answers: list[str] = []

    async def cancel() -> None:
        answer = await site.post("/cancel", queue="mails", id=["one", "two"], back="/")
        answers.append((await site.ask("GET", answer.headers["location"])).text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        nursery.start_soon(cancel)
    assert await queue.count() == 0
    await cancel()
    assert "2 waiting jobs removed" in answers[0] + answers[1] or "1 waiting job removed" in answers[0]
    assert "There was nothing to cancel" in answers[2]


@LEFT
async def test_a_queue_that_was_never_used_is_unknown(connected: worqr.Mesh, site: Site) -> None:
    job = await connected.queue("mails").dispatch(b"1", id="one")
    answer = await site.get("/queue", name="mail")
    assert answer.status_code == 404
    assert "Did you mean" in answer.text
    assert "name=mails" in answer.text
    await job.cancel()
    assert (await site.get("/queue", name="mails")).status_code == 200  # it is empty, and was used
    site.viewer = reader("bob", ("mail",))
    assert "mails" not in (await site.get("/queue", name="mail")).text  # which this viewer does not see


async def test_an_unknown_page_is_named_like_one_that_exists(site: Site) -> None:
    answer = await site.get("/queus")
    assert answer.status_code == 404
    assert "did you mean" in answer.text
    assert "/queues" in answer.text


@LEFT
async def test_a_key_of_a_foreign_type_spoils_one_queue_only(server: Server, prefix: str, site: Site) -> None:
    async with open_scene(server.url, prefix) as scene:
        mesh = scene.mesh
        await mesh.queue("spoilt").enqueue(b"1")
        with server.client() as client:
            client.delete(f"{prefix}:{{spoilt}}")
            client.hset(f"{prefix}:{{spoilt}}", "of", "another application")
        for address in scene.addresses():
            answer = await site.ask("GET", address)
            assert answer.status_code == 200, why_not(address, answer.status_code)
        answer = await site.get("/queue", name="spoilt")
        assert answer.status_code == 502
        assert "WRONGTYPE" in answer.text
        await eventually(lambda: says(site, "/", "spoilt", "cannot be read"), True)
        assert await says(site, "/queues", "spoilt", "WRONGTYPE")
        assert not await says(site, "/queues?q=slow", "WRONGTYPE")
        site.viewer = reader("bob", ("orders*",))
        for path in ("/", "/queues"):
            assert "spoilt" not in (await site.get(path)).text


async def says(site: Site, address: str, *words: str) -> bool:
    """True if a page has all these words."""
    text = (await site.ask("GET", address)).text
    return all(word in text for word in words)


REFUSALS = ("has no permissions", "can&#39;t run this command")
"""What servers say, each release in its own words, when a script calls a command that its user may not."""
PART = ("on", "nopass", "~*", "&*", "+@all", "-lrange", "-hstrlen", "-sort_ro", "-getrange", "-zrangebyscore", "-info")
"""A user who may read the numbers of queues, and no list."""


@LEFT
async def test_what_the_server_refuses_spoils_one_part_of_a_page_only(server: Server, prefix: str) -> None:
    async with open_scene(server.url, prefix) as scene:
        user, names = f"{prefix}-part", scene.names
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", user, *PART)
            try:
                url = server.tcp_url.replace("redis://", f"redis://{user}:any@")
                site = Site(scene.mesh, options={"url": url})
                for path, what, shown in [
                    ("/", "the schedules", "Busiest queues"),
                    (f"/queue?name={names['queue']}", "these tasks", "No history yet"),
                    (f"/queue?name={names['slow']}&tab=running", "these tasks", "Longest wait"),
                    (f"/queue?name={names['failing']}&tab=failed", "these tasks", "Longest wait"),
                    ("/running", f"the running tasks of {names['slow']}", "Running"),
                    (f"/worker?id={scene.worker}", f"the running tasks of {names['slow']}", "Last heartbeat"),
                    ("/failed", "refused", names["failing"]),
                ]:
                    answer = await site.ask("GET", path)
                    assert answer.status_code == 200, (path, answer.text)
                    for word in (what, shown):
                        assert word in answer.text, (path, word, answer.text)
                    assert any(word in answer.text for word in REFUSALS), (path, answer.text)
                async with opened(site, f"view=queue&name={names['slow']}&tab=running") as stream:
                    await stream.wait_for("set")
            finally:
                client.execute_command("ACL", "DELUSER", user)


@LEFT
async def test_a_full_server_can_be_looked_at(own_server: Server, prefix: str) -> None:
    async with open_scene(own_server.url, prefix) as scene:
        site = Site(scene.mesh)
        with own_server.client() as client:
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory-policy", "noeviction")
            try:
                for address in scene.addresses():
                    answer = await site.ask("GET", address)
                    assert answer.status_code == 200, (why_not(address, answer.status_code), answer.text)
                assert await says(site, "/", "refuses new tasks, because its memory is full")
                assert await says(site, "/queues", "The memory of the server is full")
                used = int(client.info("memory")["used_memory"])
                client.config_set("maxmemory", used * 10 // 9)
                await eventually(lambda: says(site, "/", "% of its memory"), True)
                assert not await says(site, "/queues", "The memory of the server is full")
                client.config_set("maxmemory", 1)
                for path in ("/retry", "/drop", "/resume", "/pause", "/cancel"):
                    answer = await site.post(path, queue=scene.names["failing"], id=scene.texts.job, back="/")
                    assert answer.status_code == 303, (path, answer.text)
            finally:
                client.config_set("maxmemory", 0)


async def test_a_huge_address_ends_one_connection_only(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    port = free_port()
    code = "from worqr.cli import main; main()"
    program = spawn(code, "dashboard", "--bind", f"127.0.0.1:{port}", "--url", server.tcp_url, "--prefix", prefix)
    await program.line()

    def ask(path: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
            try:
                connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            except OSError:
                pass  # it was closed while we sent
            try:
                return connection.recv(1000)
            except ConnectionError:
                return b""

    huge = await trio.to_thread.run_sync(ask, b"/queues?q=" + b"x" * 10_000_000)
    assert huge == b"" or huge.split()[1].startswith(b"4")
    assert (await trio.to_thread.run_sync(ask, b"/queues")).split()[1] == b"401"


@pytest.mark.parametrize("package", ["starlette", "jinja2", "hypercorn"])
async def test_without_the_extra_one_sentence_says_what_to_install(package: str, spawn: Callable[..., Child]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from worqr.cli import main; sys.exit(main())"
    program = spawn(code, "dashboard")
    assert await program.ended() == 1
    assert f"the dashboard needs the package '{package}" in program.errors
    assert "run `pip install 'worqr[dashboard]'`" in program.errors
    assert "Traceback" not in program.errors
