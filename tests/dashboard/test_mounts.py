"""The dashboard in other programs, each under its real server: FastAPI, Starlette on Trio, Django with its login, behind nginx.

Each does the same: an unknown visitor gets nothing, the login of the program decides, pages stay below their path, a form works,
a stream sends at once, and SIGTERM ends the server while a stream is open.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

import httpx
import pytest

from tests.support.children import ROOT, Child
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from tests.test_web import listens

EXAMPLES = ROOT / "examples"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PASSWORD = "open sesame"
SOON = 20.0
"""Seconds in which a server ends, also on a slow machine; it takes up to 3. A stream that kept it would take two minutes."""
Run = Callable[..., Child]


@pytest.fixture
def run(server: Server, spawn: Callable[..., Child]) -> Iterator[Run]:
    """`run(program, *arguments)`: a module, or a program, as a process that finds the examples and the server of the tests."""

    def start(program: str | Path, *arguments: str, **env: str) -> Child:
        paths = os.pathsep.join([str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
        as_module = f"import runpy; runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
        settings = {"WORQR_URL": server.tcp_url, "PYTHONPATH": paths, **env}
        return spawn(program if isinstance(program, Path) else as_module, *arguments, env=settings)

    with server.client() as client:
        delete_all(client, "worqr")
        yield start
        delete_all(client, "worqr")


@contextmanager
def browser(port: int, *programs: Child) -> Iterator[httpx.Client]:
    """A client of a server, as soon as that listens."""
    deadline = time.monotonic() + PATIENCE
    while not listens(f"127.0.0.1:{port}"):
        ended = [program.errors for program in programs if program.process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, [program.errors for program in programs]
        time.sleep(0.02)
    limits = httpx.Limits(keepalive_expiry=1)  # before the servers close an idle connection, after two seconds or five
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits) as client:
        yield client


def use(client: httpx.Client, viewer: str, program: Child) -> None:
    """Look at pages and pause a queue, as somebody who is logged in. The program has just begun to connect: its first page may
    be the one that says so."""
    deadline = time.monotonic() + PATIENCE
    while (page := client.get("/worqr/queues")).status_code == 503 and time.monotonic() < deadline:
        assert "has not replied" in page.text, page.text
    assert page.status_code == 200, (page.text, program.errors)
    assert f"<dd>{viewer}</dd>" in page.text
    addresses = re.findall(r'(?:href|src|action)="([^"]+)"', page.text)
    assert all(address.startswith(("/worqr/", "#")) for address in addresses), addresses
    assert client.get("/worqr/static/worqr.css").headers["content-type"].startswith("text/css")
    form = {"queue": "mails", "back": "/queue?name=mails"}
    assert client.post("/worqr/pause", data=form, headers={"origin": "http://evil.example"}).status_code == 403
    answer = client.post("/worqr/pause", data=form, headers={"origin": str(client.base_url).rstrip("/")})
    assert (answer.status_code, answer.headers["location"]) == (303, "/worqr/queue?name=mails&done=pause")
    page = client.get(answer.headers["location"])
    assert "The queue is paused" in page.text
    assert f"“{viewer}”" in page.text  # who paused it


def end_while_a_stream_is_open(client: httpx.Client, program: Child, number: signal.Signals = signal.SIGTERM) -> None:
    """The first event comes at once, and not when a buffer is full or the stream ends."""
    with client.stream("GET", "/worqr/live?view=queue&name=mails") as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: set"
        began = time.monotonic()
        program.signal(number)
        program.process.wait(PATIENCE)
        assert time.monotonic() - began < SOON
    assert "Traceback" not in program.errors


QUIET = ("--log-level", "warning")


def test_fastapi_on_uvicorn(run: Run, server: Server) -> None:
    port = free_port()
    stop = ("--timeout-graceful-shutdown", "3")
    program = run("uvicorn", "--port", str(port), *stop, *QUIET, "dashboard_fastapi:app")
    with browser(port, program) as client:
        answer = client.get("/worqr/queues")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert client.post("/login", data={"name": "ada", "password": "wrong"}).headers["location"] == "/login"
        assert client.get("/worqr/queues").status_code == 303
        assert client.post("/login", data={"name": "ada", "password": PASSWORD}).headers["location"] == "/worqr/"
        use(client, "ada", program)
        end_while_a_stream_is_open(client, program)


def test_starlette_on_hypercorn_with_trio(run: Run, server: Server) -> None:
    port = free_port()
    program = run("hypercorn", "-k", "trio", "--bind", f"127.0.0.1:{port}", *QUIET, "dashboard_starlette:app")
    with browser(port, program) as client:
        assert client.get("/worqr/queues").headers["www-authenticate"].startswith("Basic")
        client.auth = ("eve", "wrong")
        assert client.get("/worqr/queues").status_code == 401
        client.auth = ("bob", "")
        assert "<dd>bob</dd>" in client.get("/worqr/").text
        origin = {"origin": str(client.base_url).rstrip("/")}
        assert client.post("/worqr/pause", data={"queue": "mails"}, headers=origin).status_code == 403
        client.auth = ("ada", PASSWORD)
        use(client, "ada", program)
        end_while_a_stream_is_open(client, program)


def test_django_on_uvicorn_with_its_own_login(run: Run, server: Server, tmp_path: Path) -> None:
    port, env = free_port(), {"DATABASE": str(tmp_path / "site.db")}
    for command in (("migrate",), ("createsuperuser", "--noinput", "--username", "ada", "--email", "ada@example.org")):
        program = run(EXAMPLES / "dashboard_django.py", *command, **env, DJANGO_SUPERUSER_PASSWORD=PASSWORD)
        assert program.process.wait(PATIENCE) == 0, program.errors
    options = ("--timeout-graceful-shutdown", "3", "--lifespan", "off", *QUIET)
    program = run("uvicorn", "--port", str(port), *options, "dashboard_django:application", **env)
    with browser(port, program) as client:
        answer = client.get("/worqr/queues", headers={"cookie": "sessionid=unknown"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/admin/login/?next=/worqr/")
        page = client.get("/admin/login/").text
        token = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)[0]
        form = {"csrfmiddlewaretoken": token, "username": "ada", "password": PASSWORD, "next": "/worqr/"}
        answer = client.post("/admin/login/", data=form)
        assert (answer.status_code, answer.headers["location"]) == (302, "/worqr/")
        assert client.cookies["sessionid"]
        use(client, "ada", program)
        assert client.get("/worqrx").status_code == 404  # of Django
        end_while_a_stream_is_open(client, program)


def no_nginx() -> str:
    return "nginx is not installed, so the dashboard is not tried behind it: try `apt-get install nginx-light`"


@pytest.fixture
def nginx() -> str:
    if NGINX is None:
        (pytest.fail if os.environ.get("WORQR_TEST_NGINX") else pytest.skip)(no_nginx())
    assert NGINX is not None
    return NGINX


@contextmanager
def running_nginx(nginx: str, folder: Path, listen: int, dashboard: int) -> Iterator[None]:
    """The example's nginx, with other ports, and a user ``ada``."""
    text = (EXAMPLES / "dashboard_nginx.conf").read_text("utf-8")
    assert {"127.0.0.1:8001", "127.0.0.1:9090"} <= set(re.findall(r"127\.0\.0\.1:\d+", text))
    text = text.replace("127.0.0.1:8001", f"127.0.0.1:{listen}").replace("127.0.0.1:9090", f"127.0.0.1:{dashboard}")
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        text = text.replace("http {", f"http {{\n    {kind}_temp_path {folder}/{kind};", 1)
    (folder / "dashboard_nginx.conf").write_text(text, "utf-8")
    (folder / "users").write_text("ada:{PLAIN}open sesame\n", "utf-8")
    folder.chmod(0o755)
    as_user = "user root; " if os.geteuid() == 0 else ""  # its own user may not read the folder
    command = [nginx, "-p", str(folder), "-c", "dashboard_nginx.conf", "-g", f"{as_user}daemon off;"]
    with (folder / "errors").open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_the_documentation_has_the_same_configuration() -> None:
    page = (ROOT / "docs" / "howto" / "mount-the-dashboard.md").read_text("utf-8")
    (shown,) = re.findall(r"```nginx[^\n]*\n(.*?)```", page, re.DOTALL)
    example = (EXAMPLES / "dashboard_nginx.conf").read_text("utf-8").replace("9090", "9465")
    assert indent(shown, " " * 8) in example


def test_behind_nginx_below_a_path(nginx: str, run: Run, server: Server, tmp_path: Path) -> None:
    port, inner = free_port(), free_port()
    header = ("--trust-header", "X-Forwarded-User", "--trusted-proxy", "127.0.0.1")
    program = run("worqr", "dashboard", "--bind", f"127.0.0.1:{inner}", "--root-path", "/worqr", *header)
    with (
        running_nginx(nginx, tmp_path, port, inner),
        browser(inner, program) as direct,
        browser(port, program) as client,
    ):
        assert direct.get("/worqr/queues").status_code == 401
        assert client.get("/worqr/queues").status_code == 401
        assert client.get("/worqr/queues", headers={"x-forwarded-user": "ada"}).status_code == 401
        client.auth = ("ada", PASSWORD)
        client.headers["x-forwarded-user"] = "eve"  # nginx replaces it
        use(client, "ada", program)
        end_while_a_stream_is_open(client, program)
