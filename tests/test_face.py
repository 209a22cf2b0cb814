"""The public face, as it was promised, and the programs that users would write against it.

What type checkers make of the programs is checked in the session `types`; here they run.
"""

from __future__ import annotations

import importlib
import inspect
import re
import smtplib
import sqlite3
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from email.message import EmailMessage
from pathlib import Path
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
from starlette.requests import Request
from starlette.types import Message

import worqr
import worqr.testing
from tests.peer.tools import eventually, until
from tests.support.children import ROOT
from tests.support.servers import Server
from tests.test_argument_codec import NOON
from worqr.validation import is_coroutine_function

pytestmark = pytest.mark.one_server  # what users write does not depend on the kind of server

PROGRAMS = ROOT / "tests" / "programs"
FACE = ROOT / "tests" / "face.txt"
HEAD = """\
# The public face: every name, its parameters and their defaults. What stands here may grow, and never changes its meaning.
# Where a default is not simply written down it is `...`. What has overloads is listed once for each.
# After a change: python -m tests.test_face
"""
MADE_BY_USERS = {"Retry", "RateLimited", "Limit", "Lanes", "RetryPolicy", "Update", "Registry", "Mesh"}
NOT_PROMISED = {"ChildError": {"leaves"}}
"""Attributes without an underscore that other parts of worqr read."""
CALLED = ("__call__", "__aenter__", "__anext__")


# Names and signatures


def face() -> Iterator[str]:
    """The lines of the file."""
    yield HEAD
    for module, prefix in ((worqr, ""), (worqr.testing, "testing.")):
        assert module.__all__ == sorted(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from ("", *class_lines(f"{prefix}{name}", value))
            else:
                yield from ("", *(calls_of(f"{prefix}{name}", value) if inspect.isfunction(value) else [prefix + name]))


def is_public(kind: type) -> bool:
    return getattr(worqr, kind.__name__, getattr(worqr.testing, kind.__name__, None)) is kind


def class_lines(path: str, kind: type[Any]) -> Iterator[str]:
    """The class with its bases, its fields, and its methods, but for those of a base that is in the list, too."""
    bases = [base for base in kind.__mro__[1:-1] if is_public(base) or base.__module__ in {"builtins", "contextlib"}]
    nearest = [base.__name__ for base in bases if sum(issubclass(other, base) for other in bases) == 1]
    yield f"class {path}({', '.join(nearest)})" if {*nearest} - {"dict"} else f"class {path}"
    if getattr(kind, "_is_protocol", False):
        return  # only type checkers see its members
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "worqr" and base not in bases]
    members = {name: member for base in reversed(own) for name, member in vars(base).items()}
    made = members.pop("__init__", None) if kind.__name__ in MADE_BY_USERS else None
    if made is not None:
        yield from calls_of(f"{path}.__init__", made)
    above = [base for base in bases if is_public(base)]
    if typing.is_typeddict(kind):  # which does not say what it is made of
        above += [base for base in (worqr.HandlerOptions,) if base.__annotations__.keys() < kind.__annotations__.keys()]
    known = {name for base in above for name in (*dir(base), *base.__annotations__)} | NOT_PROMISED.get(path, set())
    if fields := [name for name in sorted(fields_of(own, members) - known) if not name.startswith("_")]:
        yield f"{path}: {', '.join(fields)}"
    for name, member in sorted(members.items()):
        if is_method(member) and (name in CALLED or not name.startswith("_")):
            calls = [*calls_of(f"{path}.{name}", member)]
            theirs = [found for base in above if is_method(found := inspect.getattr_static(base, name, None))]
            if calls not in [[*calls_of(f"{path}.{name}", found)] for found in theirs]:
                yield from calls


def is_method(member: object) -> bool:
    return inspect.isfunction(inspect.unwrap(getattr(member, "__func__", member)))  # type: ignore[arg-type]


def fields_of(own: list[type[Any]], members: dict[str, Any]) -> set[str]:
    """What is annotated, what is a property, and what a method sets."""
    found = {name for base in own for name in vars(base).get("__annotations__", {})}
    found |= {name for name, member in members.items() if isinstance(member, property | MemberDescriptorType)}
    methods = [inspect.unwrap(each) for base in own for each in vars(base).values() if inspect.isfunction(each)]
    sources = [inspect.getsource(each) for each in methods if "worqr" in each.__code__.co_filename]
    return found | set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", "\n".join(sources)))


def calls_of(path: str, member: Any) -> Iterator[str]:
    """The parameters of a function, of each of its overloads."""
    function = getattr(member, "__func__", member)
    for each in typing.get_overloads(function) or [function]:
        parameters = [p for name, p in inspect.signature(each).parameters.items() if name not in {"self", "unknown"}]
        plain = [p.replace(annotation=p.empty, default=Shown.of(p.default)) for p in parameters]
        yield f"{'async ' * is_coroutine_function(function)}{path}{inspect.Signature(plain)}"


class Shown(str):
    """A default as it stands in the file."""

    __slots__ = ()
    __repr__ = str.__str__

    @classmethod
    def of(cls, default: object) -> object:
        if default is inspect.Parameter.empty:
            return default
        return cls(repr(default) if isinstance(default, str | int | float | tuple | None) else "...")


def test_the_face_is_as_it_was_promised() -> None:
    """Write it with ``python -m tests.test_face``, and look at what has changed."""
    assert FACE.read_text("utf-8").splitlines() == "\n".join(face()).splitlines()


# The programs


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, server: Server, prefix: str) -> Iterator[Callable[[str], Any]]:
    """`load("p01_mail_service")`: a program as a module on the tests' server; what it runs at its end does not run."""
    monkeypatch.syspath_prepend(PROGRAMS)
    monkeypatch.setenv("WORQR_URL", server.url)
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trio, "run", lambda main: None)
            module = importlib.import_module(name)
        module.mesh.prefix = prefix  # type: ignore[attr-defined]
        return module

    yield load
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and PROGRAMS in Path(str(sys.modules[name].__file__)).parents:
            del sys.modules[name]


def quick(sleep: Callable[[float], Any]) -> Any:
    """What a program finds as `trio`, where it shall not sleep as long as it says."""
    return SimpleNamespace(**{**vars(trio), "sleep": sleep})


class Post:
    """What a program finds as `smtplib.SMTP`."""

    sent: ClassVar[list[str]] = []

    def __init__(self, host: str) -> None:
        assert host == "localhost"

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *error: object) -> None: ...

    def send_message(self, message: EmailMessage) -> None:
        if message["To"] == "nobody@example.org":
            raise smtplib.SMTPRecipientsRefused({})
        if message["To"] == "later@example.org" and "later@example.org" not in Post.sent:
            Post.sent.append("later@example.org")
            raise smtplib.SMTPResponseException(421, b"greylisted")
        Post.sent.append(f"{message['To']}: {message['Subject']}")
        message["Message-ID"] = f"<{len(Post.sent)}>"


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Post.sent = []
    monkeypatch.setattr(smtplib, "SMTP", Post)
    return Post.sent


async def test_the_mail_service(load: Callable[[str], Any], post: list[str], capsys: Any, expects_left: Any) -> None:
    p01 = load("p01_mail_service")
    printed: list[str] = []

    def said() -> str:
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    name, options = p01.send_mail.name, p01.send_mail.options
    p01.send_mail.options = lambda delay, **others: options(delay=delay / 50, **others)  # it says 5 s
    assert name == "p01_mail_service.send_mail"
    async with p01.mesh.join():
        with pytest.raises(
            TypeError, match=r"send_mail\(\): missing a required argument: 'subject'"
        ):  # it has `subjekt`
            await p01.main()
        assert sorted(post) == ["ada@example.org: hi", "ada@example.org: hi", "x@example.org: s"]
        assert (await p01.send_mail.job("welcome-ada").result(timeout=0)) in {"<1>", "<2>"}

        await p01.send_mail.enqueue("nobody@example.org", "hi")
        await until(
            lambda: "gave up on ('nobody@example.org', 'hi', '') smtplib.SMTPRecipientsRefused" in said(), within=30
        )
        (record,) = await p01.send_mail.queue.failed.list()
        assert record.reason == "failed"

        job = await p01.send_mail.dispatch("later@example.org", "hi")
        await eventually(lambda: state_of(job), "scheduled", within=30)
        assert (await job.status()).failures == 0
        assert (await job.cancel()).waiting == 1
        await eventually(p01.send_mail.queue.failures.running, [])
    expects_left(f"{{{name}}}:failed", f"{{{name}}}:aside*")


async def state_of(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


def request(method: str, path: str, query: str = "", **parameters: str) -> Request:
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [],
        "path_params": parameters,
    }
    return Request(scope)


async def call(app: Any, method: str, path: str, query: str = "") -> tuple[int, bytes]:
    """One request to an ASGI application: status and body."""
    found: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        found.append(message)

    await app(request(method, path, query).scope, receive, send)
    body = b"".join(message.get("body", b"") for message in found)
    return found[0]["status"], body


async def test_a_web_application_that_is_a_peer(load: Callable[[str], Any]) -> None:
    p03 = load("p03_p04_trio_web")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    p03.trio = quick(sleep)
    async with p03.app.router.lifespan_context(p03.app):
        assert await call(p03.app, "GET", "/readyz") == (200, b'{"ready":true,"why":""}')
        assert await call(p03.app, "POST", "/upload", "path=/cat.png") == (200, b'{"ok":true}')
        await until(lambda: slept == [1], within=30)
        await p03.app.state.peer.drain()
        assert await call(p03.app, "GET", "/readyz") == (503, b'{"ready":false,"why":"the peer is leaving"}')


async def test_a_peer_in_the_nursery_of_an_application(load: Callable[[str], Any]) -> None:
    p03 = load("p03_p04_trio_web")
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            peer: worqr.Peer = await nursery.start(p03.run_peer)
            assert peer.health().ready
            await peer.drain()


async def test_a_report_that_is_followed_and_cancelled(load: Callable[[str], Any]) -> None:
    p09 = load("p09_report_cancel_progress")
    pages: list[float] = []

    async def sleep(seconds: float) -> None:
        pages.append(seconds)
        if len(pages) == 3:
            await trio.sleep_forever()

    p09.trio = quick(sleep)
    async with p09.mesh.join():
        assert (await p09.start(request("POST", "/", id="7"))).body == b'{"job":"report-7","new":true}'
        await until(lambda: len(pages) == 3, within=30)
        assert (await p09.start(request("POST", "/", id="7"))).body == b'{"job":"report-7","new":false}'
        lines: list[str] = []
        stream = await p09.progress(request("GET", "/", job="report-7"))
        async for line in stream.body_iterator:
            lines.append(line)
            if "0.01 page 1" in line:
                cancelled = await p09.cancel(request("POST", "/", job="report-7"))
                assert cancelled.body == b'{"stopped":true}'
        assert lines[-1] == "data: 0.01 page 1\n\n"  # how far it had come when it was cancelled
        with pytest.raises(worqr.JobCancelled, match="button"):
            await p09.report.job("report-7").result(timeout=30)
    assert pages == [1, 1, 1, 0.1]


async def test_a_report_that_is_finished(load: Callable[[str], Any]) -> None:
    p09 = load("p09_report_cancel_progress")

    async def sleep(seconds: float) -> None:
        await trio.lowlevel.checkpoint()

    p09.trio = quick(sleep)
    async with p09.mesh.join():
        assert await (await p09.report.dispatch(7)).result(timeout=30) == "/reports/7.pdf"


async def test_claims_in_batches(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    p11 = load("p11_batch_claims")
    monkeypatch.chdir(tmp_path)
    tasks = [b"event %d" % i for i in range(250)]
    with closing(sqlite3.connect("events.db")) as db, db:
        db.execute("create table events (fence integer primary key, event blob)")

    def rows() -> list[bytes]:
        with closing(sqlite3.connect("events.db")) as db:
            return [row[0] for row in db.execute("select event from events order by fence")]

    async with p11.mesh.connect(), trio.open_nursery() as nursery:
        q = p11.mesh.queue("events")
        await q.enqueue(*tasks)
        nursery.start_soon(p11.main)
        await until(lambda: len(rows()) == 250, within=50)
        await eventually(q.running, [])
        nursery.cancel_scope.cancel()
    assert rows() == tasks


async def test_claims_one_by_one(load: Callable[[str], Any]) -> None:
    p11 = load("p11_batch_claims")

    async def sleep(seconds: float) -> None:
        await trio.lowlevel.checkpoint()

    p11.trio = quick(sleep)
    async with p11.mesh.connect(), trio.open_nursery() as nursery:
        q = p11.mesh.queue("events")
        await q.enqueue(*[b"%d" % i for i in range(250)])
        nursery.start_soon(p11.one_by_one)

        async def finished() -> int:
            return (await q.info()).counts.get("finished", 0)

        await eventually(finished, 250, within=50)
        nursery.cancel_scope.cancel()


QUICK_CONFTEST = """
    import types
    import p09_report_cancel_progress as p09
    import trio

    p09.trio = types.SimpleNamespace(**{**vars(trio), "sleep": lambda seconds: trio.lowlevel.checkpoint()})
"""


def test_a_users_test_suite(tmp_path: Path, server: Server) -> None:
    for name in ("p09_report_cancel_progress.py", "p12_test_suite.py"):
        (tmp_path / name).write_text((PROGRAMS / name).read_text("utf-8"))
    (tmp_path / "conftest.py").write_text(inspect.cleandoc(QUICK_CONFTEST))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\nfilterwarnings = error\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:valkey",
            "-p",
            "no:asyncio",
            "p12_test_suite.py",
        ],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "WORQR_TEST_URL": server.url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


async def test_tenants(load: Callable[[str], Any]) -> None:
    p21 = load("p21_tenants")
    sync = p21.sync
    async with p21.mesh.connect():
        await sync.enqueue("acme", 1)
        await sync.options(lane="urgent", wait=30).dispatch("acme", 2)
        await sync.queue.set_weight("acme", 7)
        lanes = {lane.name: (lane.waiting, lane.weight) for lane in await sync.queue.lanes()}
        assert lanes == {"acme": (1, 7), "urgent": (1, 1)}, "no worker has declared its weights"
        for wrong, error in (
            (lambda: sync.queue.enqueue(b"x", max_length=1000, wait="30"), worqr.UsageError),
            (lambda: sync.options(lanes="acme").dispatch("acme", 1), worqr.UsageError),
            (lambda: sync.options(lane="acme", wait=5).enqueue("acme", 1), AttributeError),
            (lambda: worqr.Limit("5"), worqr.UsageError),
            (lambda: worqr.Limit(rate=5, period=60), TypeError),
            (lambda: worqr.Lanes("tenant", weights={"acme": "5"}), worqr.UsageError),
            (lambda: worqr.RateLimited("30"), worqr.UsageError),
        ):
            with pytest.raises(error):
                await wrong()
        await sync.queue.set_weight("acme", None)
        await sync.queue.delete()


async def test_lists(load: Callable[[str], Any]) -> None:
    p24 = load("p24_lists")
    page = p24.Page("/a", "text")
    with pytest.raises(worqr.UsageError, match="its parameter 'page' is no list"):
        p24.wrong()
    async with p24.mesh.join(only=["p24_lists.index", "p24_lists.translate", "p24_lists.archive"]):
        await p24.index.enqueue(page)
        assert await p24.index([page, page]) is None
        assert await (await p24.translate.dispatch("hello")).result(timeout=30) == "HELLO"
        for wrong, error in (
            (lambda: p24.index.enqueue([page]), worqr.UsageError),
            (lambda: p24.index.enqueue(page, page), TypeError),
            (lambda: p24.translate.options(id="x").dispatch(1), worqr.UsageError),
            (lambda: p24.archive.enqueue(page), worqr.UsageError),
        ):
            with pytest.raises(error):
                await wrong()

        async def finished() -> int:
            return (await p24.index.queue.info()).counts.get("finished", 0)

        await eventually(finished, 1)


@pytest.mark.leaves("{*}:batch*", "{*}:part:*", "{*}:outbox")
async def test_batches(load: Callable[[str], Any]) -> None:
    p22 = load("p22_batches")
    async with p22.mesh.join():
        await trio.to_thread.run_sync(p22.without_a_loop)
        async with p22.mesh.batch(then=p22.publish.call("a"), otherwise=p22.apologize.call("a")) as batch:
            await batch.dispatch(p22.scan.call("folder"))
        assert await batch.result(timeout=30) == "a: 4 of 4"
        with pytest.raises(worqr.UsageError, match="then of a batch must be a call"):
            async with p22.mesh.batch(then=p22.publish):
                raise AssertionError
    p22.mesh.close()


async def test_typed_payloads(load: Callable[[str], Any]) -> None:
    p20 = load("p20_typed_payloads")
    order = p20.Order(id=p20.UUID(int=7), total=p20.Decimal("1.10"), at=NOON)
    async with p20.mesh.join():
        with pytest.raises(worqr.NoResult, match="keeps no result"):
            await p20.use(order)
        job = await p20.ship.options(result_ttl=60).dispatch(order)
        assert await job.result(timeout=30) == order.id
        tax = await p20.vat.options(result_ttl=60).dispatch(p20.Decimal(1), rate=p20.Decimal("0.07"))
        assert await tax.result(timeout=30) == p20.Decimal("0.07")
        for wrong, error in (
            (lambda: p20.ship.enqueue(1), worqr.UsageError),
            (lambda: p20.vat.enqueue(p20.Decimal(1), p20.Decimal(2)), TypeError),
            (lambda: p20.vat.options(dealy=1).dispatch(p20.Decimal(1)), worqr.UsageError),
            (lambda: p20.mesh.queue("q").dispatch(b"x", dealy=1), worqr.UsageError),
        ):
            with pytest.raises(error):
                await wrong()
    with pytest.raises(worqr.UsageError):
        worqr.sync(p20.ship.enqueue, 1)


if __name__ == "__main__":
    FACE.write_text("\n".join(face()) + "\n", "utf-8")
