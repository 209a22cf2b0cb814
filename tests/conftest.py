"""The fixtures of all tests: real servers, a prefix to be left clean, a proxy that makes faults, child processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.ops.driver import Desk
from tests.support import forking, sampling
from tests.support.children import Child
from tests.support.importing import import_all
from tests.support.leaks import assert_no_leaks, delete_all, leaks
from tests.support.proxy import FaultProxy
from tests.support.sampling import SAMPLE
from tests.support.scheduling import rank
from tests.support.servers import Server, chosen, started
from worqr.keys import keys_at
from worqr.log_events import EVENTS
from worqr.testing.benches import release_bench_server

# An example may take as long as the machine does; each run tries the same ones, so that it fails for what was changed.
settings.register_profile("worqr", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("worqr")

MAKE_FAULTS = {"own_server", "proxy", "proxy_to"}
"""Fixtures of tests in which a peer may have no server to tell that it leaves."""
LEAVE_WITHIN = 10.0
"""Seconds in which the server of all tests answers a peer that leaves, also where the machine stands still."""
_FAILED = pytest.StashKey[bool]()
_PATTERNS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # run in the background of a script; children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("WORQR_PATIENCE", "20s")  # commands start beside many other processes
    config.addinivalue_line("markers", "one_server: what is tested does not depend on the kind of server")
    config.addinivalue_line(
        "markers", "sweep(keep): an exhaustive test; without --all a random sample of its cases runs"
    )
    config.addinivalue_line("markers", "leaves(*patterns): keys that may be left: `{Q1}:failed`, `{Q1}:aside:*`")
    sampling.configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    import_all(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_kind" in metafunc.fixturenames:
        kinds = chosen()[:1] if metafunc.definition.get_closest_marker("one_server") else chosen()
        metafunc.parametrize("server_kind", kinds, scope="session")


@pytest.hookimpl(trylast=True)  # after -k, so that a case that is asked for runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampling.leave_out(config, items)
    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.support.scheduling import ByFile

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's sight, which each full collection would walk through."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"servers: {', '.join(chosen())}", sampling.header(config)]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sample"] = node.config.option.sample


def pytest_sessionfinish(session: pytest.Session) -> None:
    forking.close()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # this process runs tests for another one, which prints the summary
        output["left_out"] = session.config.stash[SAMPLE].left_out


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[SAMPLE].left_out = output.get("left_out", 0)  # all processes have left the same tests out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    sampling.summary(terminalreporter, config.stash[SAMPLE])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:  # type: ignore[attr-defined]
        item.stash[_FAILED] = True
    # A test run that is spread over processes sends each report as UTF-8; what a test has logged may not be.
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


class LoggedEvents(logging.Handler):
    """Notes each line of worqr that is none of its log events, or has another level or other fields than the registry says."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("worqr.test") and not record.name.startswith("worqr.testing"):
            return  # the logger of a test
        name = str(record.__dict__.get("event"))
        event = EVENTS.get(name)
        if event is None or record.levelno not in event.levels:
            self.wrong.append(f"{record.levelname}: {record.getMessage()}")
        elif isinstance(record.args, dict) and (more := record.args.keys() - set(event.fields)):
            self.wrong.append(f"{name} has the fields {more}")


@pytest.fixture(autouse=True)
def _only_log_events() -> Iterator[None]:
    """Every event that worqr logs in a test is in the registry of log events."""
    logger, handler = logging.getLogger("worqr"), LoggedEvents()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert handler.wrong == []


@pytest.fixture(scope="session")
def servers_of_session() -> Iterator[dict[str, Server]]:
    """A server of each kind that a test has asked for; they run until the session ends."""
    servers: dict[str, Server] = {}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def server_of_session(server_kind: str, servers_of_session: dict[str, Server]) -> Server:
    if server_kind not in servers_of_session:
        servers_of_session[server_kind] = started(lambda: Server(server_kind, appendonly=False))
    return servers_of_session[server_kind]


@pytest.fixture
def server(
    request: pytest.FixtureRequest, server_of_session: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A server that all tests share: `.kind`, `.url` (unix), `.tcp_url`, `.client()`. Leave its settings alone."""
    names = set(request.node.fixturenames)
    if "server" in names and not names & MAKE_FAULTS:
        for name in ("consumer_runner.LEAVE_PATIENCE", "engine.LEAVE_PATIENCE", "engine.CHORES_WITHIN"):
            monkeypatch.setattr(f"worqr.peer.{name}", LEAVE_WITHIN)
    yield server_of_session
    server_of_session.close_clients()


@pytest.fixture
def own_server(server_kind: str) -> Iterator[Server]:
    """A server of this test alone, with an append-only file: it may be stopped, killed, started, paused, resumed."""
    server = started(lambda: Server(server_kind))
    yield server
    server.close()


@pytest.fixture
def no_bench() -> None:
    """Nobody keeps the embedded server of this process, as benches do until it ends."""
    release_bench_server()


@pytest.fixture
def expects_left(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Says which keys may be left when the test ends: `expects_left("{Q1}:failed", "{Q1}:aside:*")`."""
    patterns: list[str] = []
    request.node.stash[_PATTERNS] = patterns

    def expect(*more: str) -> None:
        patterns.extend(more)

    return expect


@pytest.fixture
def prefix(request: pytest.FixtureRequest, server_kind: str) -> Iterator[str]:
    """A prefix of this test's own. Afterwards no key may be left under it but those that expire, and waiting tasks."""
    kind = "own_server" if "own_server" in request.fixturenames else "server"
    server: Server = request.getfixturevalue(kind)
    name = f"t{secrets.token_hex(4)}"
    yield name
    if not server.running:
        return
    server.resume()
    with server.client() as client:
        try:
            if not request.node.stash.get(_FAILED, False):
                marked = [pattern for mark in request.node.iter_markers("leaves") for pattern in mark.args]
                allow = [*marked, *request.node.stash.get(_PATTERNS, [])]
                if any(key.endswith(":outbox") for key in leaks(client, name, allow)):
                    _deliver(client, name)  # a mesh may end while messages are on their way
                assert_no_leaks(client, name, allow)
        finally:
            delete_all(client, name)


def _deliver(client: redis.Redis, prefix: str) -> None:
    """Deliver every message of the outboxes, as the next leader would."""
    desk = Desk(client, prefix)
    for key in client.scan_iter(f"{prefix}:{{*}}*:outbox", count=1000):
        asyncio.run(desk.deliver(keys_at(prefix, key.decode().removesuffix(":outbox"))))


@pytest.fixture
def proxy_to() -> Iterator[Callable[[Server], FaultProxy]]:
    """`proxy_to(server)`: a `FaultProxy` in front of a server's TCP port, closed with the test."""
    proxies: list[FaultProxy] = []

    def start(server: Server) -> FaultProxy:
        proxies.append(FaultProxy("127.0.0.1", server.port))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def proxy(server: Server, proxy_to: Callable[[Server], FaultProxy]) -> FaultProxy:
    """A `FaultProxy` in front of `server`."""
    return proxy_to(server)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """`spawn(Path or code, *args, env=None, fresh=False)`: a `Child`, killed when the test ends."""
    children: list[Child] = []

    def start(program: Path | str, *args: str, env: dict[str, str] | None = None, fresh: bool = False) -> Child:
        children.append(Child(program, *args, env=env, fresh=fresh))
        return children[-1]

    yield start
    for child in children:
        child.close()
