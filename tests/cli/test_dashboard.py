"""``worqr dashboard``: it serves, tells the address, and refuses to be open."""

from __future__ import annotations

import io
import signal
import socket
from pathlib import Path

import httpx
import pytest
import trio

from tests.cli.conftest import Command
from tests.cli.test_server import LONG, Start, start  # noqa: F401 - a fixture
from tests.support.servers import Server, free_port
from worqr.dashboard.standalone import VIEWERS, hash_token, read_passwords, read_tokens


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_prints_its_address_and_ends_with_a_signal(
    start: Start, server: Server, prefix: str, number: int
) -> None:
    port = free_port()
    dashboard = start("dashboard", "--bind", f"127.0.0.1:{port}", "--url", server.url, "--prefix", prefix)
    address = await dashboard.line(LONG)
    assert address.startswith(f"http://127.0.0.1:{port}/login?token=")
    async with httpx.AsyncClient(timeout=LONG, follow_redirects=True) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 401
        assert "Overview" in (await client.get(address)).text
        assert (await client.get(f"http://127.0.0.1:{port}/queues")).status_code == 200
        (cookie,) = client.cookies.jar
    async with await trio.open_tcp_stream("127.0.0.1", port) as page:
        request = f"GET /live?view=overview HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie.name}={cookie.value}\r\n\r\n"
        await page.send_all(request.encode())
        seen = b""
        while b"data:" not in seen:
            seen += await page.receive_some()
        dashboard.signal(signal.Signals(number))  # while a page is open
        assert await dashboard.ended(LONG) == 0
    assert "the dashboard has stopped" in dashboard.errors
    assert "Traceback" not in dashboard.errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bind", "0.0.0.0:9090"], "can be reached from other machines"),
        (["--bind", "9090"], "--bind must be HOST:PORT"),
        (["--bind", "127.0.0.1:99999"], "--bind must be HOST:PORT"),
        (["--trust-header", "X-User"], "belong together"),
        (["--trusted-proxy", "10.0.0.1/8"], "--trusted-proxy must be an address or a network"),
        (["--rights", "god"], "--rights"),
        (["--payloads", "some"], "--payloads"),
        (["--redact", "(token"], "redact must be a regular expression"),
        (["--trace-url", "https://traces.example.org/"], "with {trace_id} in it"),
        (["--hash", "a:b"], "colon"),
        (["--new-token", "a:b", "--token-file", "tokens"], "colon"),
        (["--new-token", "keda"], "--token-file FILE"),
    ],
)
def test_wrong_options(cli: Command, arguments: list[str], text: str) -> None:
    answer = cli("dashboard", *arguments)
    assert answer.code == 2
    assert text in answer.err


def test_a_password_file_must_be_there_and_right(cli: Command, tmp_path: Path) -> None:
    answer = cli("dashboard", "--password-file", str(tmp_path / "none"))
    assert (answer.code, "cannot read the password file" in answer.err) == (1, True)
    (tmp_path / "passwords").write_text("ada:secret\n", "utf-8")
    answer = cli("dashboard", "--password-file", str(tmp_path / "passwords"))
    assert (answer.code, "worqr dashboard --hash NAME" in answer.err) == (2, True)


def test_a_new_token_is_added_to_the_file(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = {
        cli("dashboard", "--new-token", name, "--rights", name, "--token-file", str(path)).out.strip(): name
        for name in VIEWERS
    }
    assert len(made) == 3
    found = read_tokens(path.read_text("utf-8"), VIEWERS)
    assert {name: found[hash_token(token)].name for token, name in made.items()} == {name: name for name in VIEWERS}
    assert path.stat().st_mode & 0o077 == 0
    assert cli("dashboard", "--new-token", "keda", "--token-file", str(tmp_path)).code == 1


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602, 0o600])
def test_a_token_file_that_others_can_open_is_reported(cli: Command, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "the tokens"
    path.touch()
    path.chmod(mode)
    answer = cli("dashboard", "--new-token", "keda", "--token-file", str(path))
    assert answer.code == 0
    assert (f"(mode {mode:o}); run `chmod 600 '{path}'`" in answer.err) == (mode != 0o600)
    assert path.stat().st_mode & 0o777 == mode, "another user may read it on purpose"


def test_a_token_file_must_be_there_and_right(cli: Command, tmp_path: Path) -> None:
    answer = cli("dashboard", "--token-file", str(tmp_path / "none"))
    assert (answer.code, "cannot read the token file" in answer.err) == (1, True)
    (tmp_path / "tokens").write_text("keda:secret\n", "utf-8")
    answer = cli("dashboard", "--token-file", str(tmp_path / "tokens"))
    assert (answer.code, "worqr dashboard --new-token NAME" in answer.err) == (2, True)


def test_a_port_that_is_taken(cli: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = cli("dashboard", "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert answer.code == 1
    assert "cannot listen at 127.0.0.1" in answer.err
    assert "--bind" in answer.err


def test_hash(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse\n"))
    answer = cli("dashboard", "--hash", "ada")
    assert (answer.code, list(read_passwords(answer.out))) == (0, ["ada"])
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert cli("dashboard", "--hash", "ada").code == 1


async def test_the_demo_with_the_dashboard(start: Start) -> None:
    port = free_port()
    demo = start("demo", "--dashboard", "--workers", "2", "--port", str(port))
    address = await demo.line(LONG)
    async with httpx.AsyncClient(timeout=LONG, follow_redirects=True) as client:
        await client.get(address)
        while "shop" not in (page := await client.get(f"http://127.0.0.1:{port}/workers")).text:
            assert page.status_code == 200
            await trio.sleep(0.1)
        overview = (await client.get(f"http://127.0.0.1:{port}/")).text
        assert "the layout is wrong" in overview
    demo.signal(signal.SIGINT)
    assert await demo.ended(LONG) == 0, demo.errors
