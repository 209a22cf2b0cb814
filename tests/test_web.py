"""The web examples under their real servers: every instance is a peer, a request enqueues, any instance works, one is killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import ROOT, Child
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.keys import QueueKeys

pytestmark = pytest.mark.one_server

EXAMPLES = ROOT / "examples"
QUEUE = QueueKeys("worqr", "web.report")
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)
"""A connection: who holds one to a process that is killed loses its next request, and that is not what we look at."""
FOR_EVER = 100_000
"""Pages of a report that is never finished."""


@dataclass
class Site:
    """Web servers of one application, and the peers in them. Each answers at a socket of its own, or all at one."""

    server: Server
    programs: list[Child]
    clients: list[httpx.Client]

    def ask(self, method: str, path: str, at: int = 0, **query: Any) -> httpx.Response:
        return self.clients[at % len(self.clients)].request(method, path, params=query)

    def state(self, name: str, at: int = 0) -> str:
        return self.ask("GET", f"/reports/{name}", at).json()["state"]

    def workers(self) -> dict[str, int]:
        """Process ids by worker id."""
        ids = [each.decode() for each in self.server.look.smembers("{worqr}:Workers")]
        return {each: int(self.server.look.hget(f"{{worqr}}:info:{each}", "pid") or 0) for each in ids}

    def instance(self, pid: int) -> int:
        """Which of our programs, each with a session of its own, has started this process."""
        return [program.pid for program in self.programs].index(os.getsid(pid))

    def worker_of(self, name: str) -> str:
        """Who writes this report, as soon as somebody does."""
        found: dict[str, str] = {}

        def look() -> bool:
            found.update(self.ask("GET", f"/reports/{name}").json())
            return found["state"] == "active"

        self.until(look, f"{name} runs")
        return found["worker"]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (what, *(program.errors for program in self.programs))
            time.sleep(0.02)

    def is_ready(self, at: int) -> bool:
        return self.ask("GET", "/health", at).status_code == 200


def listens(address: Path | str) -> bool:
    """Whether somebody accepts connections there; httpx would leak a socket each time that nobody does."""
    if isinstance(address, Path):
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(address)) == 0
    host, _, port = address.partition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


Run = Callable[..., Child]
Open = Callable[..., Site]


@pytest.fixture
def run(server: Server, spawn: Callable[..., Child]) -> Iterator[Run]:
    """`run(program, *arguments)`: a program, or a module, as a process that finds the examples and the server of the tests."""
    paths = f"{ROOT}:{EXAMPLES}"

    def start(program: Path | str, *arguments: str, path: str = "") -> Child:
        more = os.environ.get("PYTHONPATH", "")
        env = {"WORQR_URL": server.tcp_url, "PYTHONPATH": f"{paths}:{path}:{more}"}
        as_module = f"import runpy; runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
        return spawn(program if isinstance(program, Path) else as_module, *arguments, env=env)

    with server.client() as client:
        delete_all(client, "worqr")
        yield start
        delete_all(client, "worqr")


@pytest.fixture
def open_site(server: Server, run: Run) -> Iterator[Open]:
    """`open_site(module, *arguments, instances=2)`: run a web server, with two peers; ``{socket}`` is where it listens."""
    folder = Path(tempfile.mkdtemp(prefix="worqr-web-"))
    with ExitStack() as stack:

        def client(path: Path) -> httpx.Client:
            transport = httpx.HTTPTransport(uds=str(path), limits=ONE_REQUEST)
            return stack.enter_context(httpx.Client(transport=transport, base_url="http://site", timeout=PATIENCE))

        def start(module: str, *arguments: str, instances: int = 2) -> Site:
            paths = [folder / f"{n}" for n in range(instances)]
            programs = [run(module, *(each.format(socket=path) for each in arguments)) for path in paths]
            site = Site(server, programs, [client(path) for path in paths])
            for at, path in enumerate(paths):
                site.until(lambda path=path: listens(path), f"instance {at} listens")
                site.until(lambda at=at: site.is_ready(at), f"instance {at} is ready")
            site.until(lambda: len(site.workers()) == 2, "two peers")
            return site

        yield start
    shutil.rmtree(folder)


QUIET = ("--log-level", "warning")
FASTAPI = ("uvicorn", "web_fastapi:app", "--uds", "{socket}", *QUIET)
FLASK = ("gunicorn", "-c", "examples/web_gunicorn.py", "--bind", "unix:{socket}", *QUIET, "web_flask:app")
FASTAPI_HYPERCORN = ("hypercorn", "--bind", "unix:{socket}", *QUIET, "web_fastapi:app")
QUART = ("hypercorn", "--bind", "unix:{socket}", *QUIET, "web_quart:app")
DJANGO_ASGI = ("uvicorn", "web_django_asgi:application", "--lifespan", "on", "--uds", "{socket}", *QUIET)
STARLETTE_HYPERCORN = ("hypercorn", "--bind", "unix:{socket}", *QUIET, "web_starlette:app")
STARLETTE = ("uvicorn", "web_starlette:app", "--uds", "{socket}", *QUIET)
TRIO = ("hypercorn", "-k", "trio", "--bind", "unix:{socket}", *QUIET, "web_trio:app")
DJANGO = ("gunicorn", "-w", "2", "--bind", "unix:{socket}", *QUIET, "web_django:application()")

needs_django = pytest.mark.skipif(find_spec("django") is None, reason="Django is not installed")
needs_quart = pytest.mark.skipif(find_spec("quart") is None, reason="Quart is not installed")


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize(
    ("program", "instances"),
    [
        pytest.param(FASTAPI, 2, id="fastapi-uvicorn"),
        pytest.param(FASTAPI_HYPERCORN, 2, id="fastapi-hypercorn"),
        pytest.param(FLASK, 1, id="flask-gunicorn"),
        pytest.param((*FLASK, "--preload"), 1, id="flask-gunicorn-preload"),
        pytest.param(STARLETTE, 2, id="starlette-uvicorn"),
        pytest.param(STARLETTE_HYPERCORN, 2, id="starlette-hypercorn"),
        pytest.param(TRIO, 2, id="trio-hypercorn"),
        pytest.param(QUART, 2, id="quart-hypercorn", marks=needs_quart),
        pytest.param(DJANGO_ASGI, 2, id="django-uvicorn", marks=needs_django),
    ],
)
def test_any_instance_works_for_all_and_one_may_be_killed(
    open_site: Open, program: tuple[str, ...], instances: int
) -> None:
    site = open_site(*program, instances=instances)
    assert len(set(site.workers().values())) == 2
    one_orders_and_another_answers(site)
    a_cancel_reaches_whoever_runs_it(site)
    one_is_killed_and_nothing_is_lost(site)
    what_a_server_that_ends_does_not_finish_goes_back(site)


def one_orders_and_another_answers(site: Site) -> None:
    order = site.ask("POST", "/reports/first", 0, pages=2)
    assert (order.status_code, order.json()) == (202, {"id": "first", "outcome": "created"})
    text = site.ask("GET", "/reports/first/text", 1, wait=PATIENCE)
    assert (text.status_code, text.json()) == (200, {"text": "first, 2 pages"})
    assert site.state("first") == "finished"
    assert site.ask("GET", "/reports/other/text").status_code == 404
    assert site.state("other") == "gone"


def a_cancel_reaches_whoever_runs_it(site: Site) -> None:
    site.ask("POST", "/reports/endless", 0, pages=FOR_EVER)
    pid = site.workers()[site.worker_of("endless")]
    elsewhere = site.instance(pid) + 1
    assert site.ask("GET", "/reports/endless/text", elsewhere).status_code == 409
    assert site.ask("DELETE", "/reports/endless", elsewhere).json() == {"removed": 0, "stopped": 1}
    assert site.state("endless") == "cancelled"
    text = site.ask("GET", "/reports/endless/text", elsewhere)
    assert text.status_code == 410
    assert "cancelled: cancelled by the user" in text.text


def one_is_killed_and_nothing_is_lost(site: Site) -> None:
    site.ask("POST", "/reports/held", 0, pages=FOR_EVER)
    victim = site.worker_of("held")
    names = [f"report-{n}" for n in range(30)]  # and there are 20 places
    for at, name in enumerate(names):
        assert site.ask("POST", f"/reports/{name}", at, pages=20).status_code == 202
    pid = site.workers()[victim]
    at = site.instance(pid)
    os.kill(pid, signal.SIGKILL)
    if len(site.programs) > 1:  # else its server has forked it, and forks another one
        site.programs.pop(at).process.wait(PATIENCE)
        site.clients.pop(at)
    site.until(lambda: site.worker_of("held") != victim, "another one goes on")
    assert site.ask("DELETE", "/reports/held").json() == {"removed": 0, "stopped": 1}
    for name in names:
        text = site.ask("GET", f"/reports/{name}/text", wait=PATIENCE)
        assert (text.status_code, text.json()) == (200, {"text": f"{name}, 20 pages"})
    assert int(site.server.look.hget(QUEUE.counts, "stalled") or 0) >= 1
    site.until(lambda: victim not in site.workers(), "the dead one is buried")


def what_a_server_that_ends_does_not_finish_goes_back(site: Site) -> None:
    site.ask("POST", "/reports/endless", 0, pages=FOR_EVER)
    site.worker_of("endless")
    for program in site.programs:
        program.signal(signal.SIGTERM)
    for program in site.programs:
        assert program.process.wait(PATIENCE) in {0, -signal.SIGTERM}, program.errors
    assert site.workers() == {}
    assert site.server.look.llen(QUEUE.base) == 1


RELOADING = {
    "uvicorn": ("uvicorn", "site_of_test:app", "--reload", "--reload-dir", "{folder}", "--uds", "{socket}", *QUIET),
    "hypercorn": ("hypercorn", "--reload", "--bind", "unix:{socket}", *QUIET, "site_of_test:app"),
}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("program", RELOADING.values(), ids=list(RELOADING))
def test_a_server_that_reloads_leaves_and_joins(
    server: Server, run: Run, tmp_path: Path, program: tuple[str, ...], stop: signal.Signals
) -> None:
    """Each time a file changes, the peer of the old process leaves and the new one joins; the task that ran goes on there."""
    folder, path = tmp_path / "site", tmp_path / "socket"
    folder.mkdir()
    (folder / "site_of_test.py").write_text("from web_fastapi import app, mesh\n")
    child = run(*(each.format(socket=path, folder=folder) for each in program), path=str(folder))
    transport = httpx.HTTPTransport(uds=str(path), limits=ONE_REQUEST)
    with httpx.Client(transport=transport, base_url="http://site", timeout=PATIENCE) as client:
        site = Site(server, [child], [client])
        site.until(lambda: listens(path) and site.workers(), "it listens")
        site.ask("POST", "/reports/held", pages=FOR_EVER)
        first = site.worker_of("held")
        changes: list[float] = []

        def another() -> bool:
            if not changes or time.monotonic() > changes[-1] + 10:  # again: the server may not have looked before
                changes.append(time.monotonic())
                (folder / "site_of_test.py").write_text(f"from web_fastapi import app, mesh  # {len(changes)}\n")
            return bool(site.workers()) and first not in site.workers()

        site.until(another, "another one")
        site.until(lambda: listens(path) and site.worker_of("held") in site.workers(), "the task runs there")
    child.signal(stop)
    child.process.wait(PATIENCE)
    assert site.workers() == {}
    assert server.look.llen(QUEUE.base) == 1
    assert "Traceback" not in child.errors


@needs_django
def test_django_on_gunicorn(open_site: Open) -> None:
    site = open_site(*DJANGO, instances=1)
    assert len(set(site.workers().values())) == 2
    order = site.ask("POST", "/reports/first", pages=2)
    assert (order.status_code, order.json()) == (202, {"id": "first", "outcome": "created"})
    assert site.ask("GET", "/reports/first/text").json() == {"text": "first, 2 pages"}
    (program,) = site.programs
    program.signal(signal.SIGTERM)
    assert program.process.wait(PATIENCE) == 0, program.errors
    assert site.workers() == {}  # nobody has stopped the peers: they have left at the exit of their processes


@needs_django
def test_djangos_own_server_has_one_peer(run: Run, server: Server) -> None:
    address = f"127.0.0.1:{free_port()}"
    with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE) as client:
        site = Site(server, [run(EXAMPLES / "web_django.py", "runserver", address)], [client])
        site.until(site.workers, "a peer")
        site.until(lambda: listens(address), "it listens")
        assert site.ask("POST", "/reports/first", pages=2).status_code == 202
        assert site.ask("GET", "/reports/first/text").json() == {"text": "first, 2 pages"}
        (peer,) = site.workers().values()
        assert peer != site.programs[0].pid  # which only watches files


COMMAND = """
from django.core.management import execute_from_command_line
from web_django import peer

execute_from_command_line()
assert peer.health().why == "not started", peer.health()
"""


@needs_django
def test_commands_of_django_start_no_peer(run: Run, tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text(COMMAND)
    command = run(tmp_path / "manage.py", "check")
    assert command.process.wait(PATIENCE) == 0, command.errors
