"""What an editor shows of the public objects: names on completion, docstrings on hover, and nothing else."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, is_typeddict

import griffe
import pytest

import pytest_worqr
import worqr
import worqr.testing
from tests.support.cases import of_each
from tests.support.children import ROOT
from tests.support.servers import Server
from tests.support.sources import MODULES
from worqr.handler_options import HandlerOptions
from worqr.job_options import RAW_OPTIONS

pytestmark = pytest.mark.one_server

FACE = (ROOT / "tests" / "face.txt").read_text("utf-8")
CLASSES: dict[str, type[Any]] = {
    name: value
    for module in (worqr, worqr.testing)
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name))
}
FUNCTIONS = {
    "worqr.current": worqr.current,
    **{f"worqr.testing.{name}": getattr(worqr.testing, name) for name in ("bench", "context", "recording")},
}
FIXTURES = ["worqr_server", "worqr_bench", "worqr_asyncio_bench", "worqr_sync_bench", "worqr_recording"]


# Completion


def promised(kind: type[Any]) -> set[str]:
    """The names that face.txt lists for a class and the classes above it."""
    found: set[str] = set()
    for each in kind.__mro__:
        for line in FACE.splitlines():
            if match := re.match(rf"(?:async )?(?:testing\.)?{each.__name__}(?:\.(\w+)\(|: (.*))", line):
                found |= {match[1]} if match[1] else set(match[2].split(", "))
    return {name for name in found if not name.startswith("_")}


def shown(value: object) -> set[str]:
    """The names that are offered after ``value.``, but those that each object of a builtin class has."""
    kind = value if inspect.isclass(value) else type(value)
    of_builtins = {name for each in kind.__mro__ if each.__name__ in vars(builtins) for name in vars(each)}
    return {name for name in dir(value) if not name.startswith("_")} - of_builtins


def check(*values: object) -> None:
    """Each shows its face, wholly, and no more."""
    for value in values:
        assert (value, shown(value) - promised(type(value))) == (value, set())
        assert (value, promised(type(value)) - shown(value)) == (value, set())


def test_what_is_declared_has_no_name_beside_the_face() -> None:
    mesh = worqr.Mesh(lifespan=None)

    @mesh.task(max_length=9)
    async def send(to: str) -> None: ...

    @mesh.task
    def count(path: str) -> int:
        return len(path)

    queue = mesh.queue("mails")
    check(
        mesh,
        worqr.Registry(),
        send,
        count,
        send.options(delay=1),
        send.options(max_length=5),
        send.call("ada"),
        send.job("1"),
    )
    check(queue, queue.failures, queue.failed, queue.undecodable, queue.job("1"))
    check(mesh, mesh.queue("mails"), send, mesh.queue("mails").job("1"))


async def test_what_runs_has_no_name_beside_the_face(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    queue = mesh.queue("mails")
    async with mesh.join() as peer, peer.work("mails") as claims:
        await queue.enqueue(b"a")
        job = await queue.dispatch(b"b")
        first, second = await claims.take(2)
        check(mesh, peer, claims, first, second, job, await job.status(), peer.health(), await queue.info())
        check(*await mesh.workers(), *await queue.running())
        await claims.finish([first, second])


async def test_what_a_test_gets_has_no_name_beside_the_face(server: Server) -> None:
    mesh = worqr.Mesh("redis://nowhere.invalid")
    with worqr.testing.recording(mesh) as sent, worqr.testing.context() as context:
        check(sent, context)
    async with worqr.testing.bench(mesh, url=server.url) as bench:
        check(bench, await bench.run_until_empty())


def test_a_peer_in_a_thread_has_no_name_beside_the_face(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    mesh.task(name="count")(len)
    with mesh.join_in_thread() as peer:
        check(peer)


def test_what_a_test_without_a_loop_gets_has_no_name_beside_the_face(server: Server) -> None:
    with worqr.sync_block(worqr.testing.bench, worqr.Mesh(), url=server.url) as bench:
        check(bench)


# Types


def test_a_type_checker_knows_each_option_of_the_task_decorator_and_no_other() -> None:
    options = typing.get_overloads(worqr.Registry.task)[-1]
    kinds = {name: each.annotation for name, each in inspect.signature(options).parameters.items() if name != "self"}
    assert kinds.pop("unknown") == "NoSuchOption"
    assert (kinds.pop("name"), kinds.pop("aliases")) == ("str", "Collection[str]")
    assert (kinds.pop("batch_size"), kinds.pop("batch_wait")) == ("BatchSize", "Seconds")
    written = {name: each.__forward_arg__ for name, each in HandlerOptions.__annotations__.items()}
    assert kinds == written


def test_a_type_checker_knows_each_option_of_a_call_and_which_ones_a_plain_task_can_have() -> None:
    written = {name: each.__forward_arg__ for name, each in worqr.JobOptions.__annotations__.items()}
    plain, job = (
        {name: each.annotation for name, each in inspect.signature(options).parameters.items() if name != "self"}
        for options in typing.get_overloads(worqr.Function.options)
    )
    assert plain == {name: written[name] for name in RAW_OPTIONS}
    assert job.pop("unknown") == "NoSuchOption"
    assert job == written


@pytest.mark.parametrize("method", ["cron", "every"])
def test_a_type_checker_knows_each_option_of_a_schedule_and_no_other(method: str) -> None:
    written = {name: each.__forward_arg__ for name, each in worqr.ScheduleOptions.__annotations__.items()}
    for overload in typing.get_overloads(getattr(worqr.Registry, method)):
        parameters = inspect.signature(overload).parameters.values()
        kinds = {each.name: each.annotation for each in parameters if each.kind >= each.KEYWORD_ONLY}
        assert kinds.pop("unknown") == "NoSuchOption"
        assert kinds == written


# Docstrings


def home_of(kind: type[Any]) -> str:
    """The module that defines a class. Public errors say that it is `worqr`, where people import them from."""
    if kind.__module__ != "worqr":
        return kind.__module__
    return next(name for name in ("worqr.errors", "worqr.policy") if vars(sys.modules[name]).get(kind.__name__) is kind)


def tree_of(kind: type[Any]) -> ast.ClassDef:
    source = Path(sys.modules[home_of(kind)].__file__ or "").read_text("utf-8")
    return next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )


def fields_of(kind: type[Any]) -> Iterator[tuple[str, bool]]:
    """Each public annotated name in the body of a class, and whether a docstring is under it."""
    body = tree_of(kind).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            text = after.value if isinstance(after, ast.Expr) else None
            yield node.target.id, isinstance(text, ast.Constant) and isinstance(text.value, str)


@of_each("name", CLASSES)
def test_each_field_of_the_face_has_a_docstring_under_it(name: str) -> None:
    assert [field for field, told in fields_of(CLASSES[name]) if not told] == []


def test_the_fields_are_found() -> None:
    for kind in (worqr.Status, worqr.QueueInfo, worqr.Health, worqr.WorkerInfo, worqr.Failed, worqr.RetryPolicy):
        assert {field for field, _ in fields_of(kind)} == set(kind.__dataclass_fields__) - {
            field for base in kind.__mro__[1:] for field in getattr(base, "__dataclass_fields__", {})
        }
    for options in (worqr.EnqueueOptions, worqr.HandlerOptions, worqr.JobOptions, worqr.JoinOptions):
        assert is_typeddict(options)
        assert {field for field, _ in fields_of(options)} == set(options.__annotations__)


def test_each_option_says_its_default() -> None:
    bases = {"TypedDict", "HandlerOptions"}
    classes = [node for module in MODULES for node in module.each(ast.ClassDef)]
    dicts = [node for node in classes if bases & {ast.unparse(base) for base in node.bases}]
    dicts = [node for node in dicts if node.name.endswith("Options")]
    assert len(dicts) >= 7
    for options in dicts:
        for node, after in pairwise([*options.body, None]):
            if isinstance(node, ast.AnnAssign) and not options.name.startswith("_"):
                assert isinstance(after, ast.Expr), ast.unparse(node)
                text = " ".join(ast.literal_eval(after.value).split())
                assert "Default: " in text, ast.unparse(node)
                if "Seconds" in ast.unparse(node.annotation):
                    assert "seconds" in text.lower(), ast.unparse(node)


SECTIONS = {"text", "parameters", "returns", "raises", "yields", "attributes"}


@pytest.fixture(scope="module")
def modules() -> dict[str, griffe.Module]:
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)])
    found = {name: loader.load(name) for name in ("worqr", "pytest_worqr")}
    return typing.cast("dict[str, griffe.Module]", found)


def public(kind: type[Any], modules: dict[str, griffe.Module]) -> Iterator[griffe.Object]:
    """A class and its public members, as griffe reads them, those of private or base classes in worqr too."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "worqr":
            found = modules["worqr"][f"{home_of(base).removeprefix('worqr.')}.{base.__qualname__}"]
            yield found
            for name, member in found.members.items():
                if not name.startswith("_") and not member.is_alias:
                    yield typing.cast("griffe.Object", member)


def everything(modules: dict[str, griffe.Module]) -> Iterator[griffe.Object]:
    for kind in CLASSES.values():
        yield from public(kind, modules)
    for function in FUNCTIONS.values():
        inner = inspect.unwrap(function)
        yield modules["worqr"][f"{inner.__module__.removeprefix('worqr.')}.{inner.__name__}"]
    for fixture in FIXTURES:
        yield modules["pytest_worqr"][fixture]


def test_each_public_docstring_is_in_googles_form(
    modules: dict[str, griffe.Module], caplog: pytest.LogCaptureFixture
) -> None:
    wrong: list[str] = []
    for each in everything(modules):
        where = each.path
        if each.docstring is None:
            if each.is_attribute and "property" not in each.labels:
                continue  # the fields are another test's; what `__init__` sets is told in Attributes
            wrong.append(f"{where}: no docstring")
            continue
        caplog.clear()
        sections = each.docstring.parse("google")
        wrong += [f"{where}: {record.message}" for record in caplog.records]
        wrong += [f"{where}: a section {s.kind.value}" for s in sections if s.kind.value not in SECTIONS]
        wrong += [f"{where}: {why}" for why in mistakes(each, sections)]
    assert not wrong, "\n".join(wrong)


def mistakes(each: griffe.Object, sections: list[griffe.DocstringSection]) -> Iterator[str]:
    text = each.docstring.value if each.docstring is not None else ""
    if match := re.search(r"^(Raises|Keys|Answers|Note)\b:? \S.*|^Raises .*", text, re.MULTILINE):
        yield f"not a section: {match[0]!r}"
    for section in sections:
        if section.kind.value == "parameters" and each.is_function:
            known = {parameter.name.lstrip("*") for parameter in typing.cast("griffe.Function", each).parameters}
            told = {item.name.lstrip("*") for item in section.value}
            if told - known:
                yield f"no such parameters: {sorted(told - known)}"
        if section.kind.value == "raises":
            for item in section.value:
                if not re.fullmatch(r"\w+", str(item.annotation)):
                    yield f"one exception per line: {item.annotation}"
    first = text.splitlines()[0]
    if each.is_function and re.match(r"(A|An|The|What|Who|How|All|Those|This|Up|As|Until) ", first):
        yield f"the first line is no imperative: {first!r}"


OLD = re.compile(
    r"\b(whoever|nobody|somebody|anybody|for worqr itself|answers?|set aside|From (Worqr|hworker|Queasy))\b"
)


def test_public_docstrings_are_in_plain_english(modules: dict[str, griffe.Module]) -> None:
    found = {
        each.path: match[0]
        for each in everything(modules)
        if each.docstring is not None and (match := OLD.search(each.docstring.value))
    }
    assert not found, "\n".join(f"{path}: {word}" for path, word in found.items())


def test_the_sentences_of_public_docstrings_are_short(modules: dict[str, griffe.Module]) -> None:
    long: list[str] = []
    for each in everything(modules):
        text = each.docstring.value if each.docstring is not None else ""
        text = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
        for sentence in re.split(r"(?<=[.:;?!])\s+|\n\s*\n", text):
            if len(sentence.split()) > 30:
                long.append(f"{each.path}: {' '.join(sentence.split())}")
    assert not long, "\n".join(long)


def test_the_fixtures_are_those_of_the_plugin() -> None:
    assert {name for name in dir(pytest_worqr) if name.startswith("worqr_")} == set(FIXTURES)
