"""Where functions are declared: names, what may be declared, and how registries come into a mesh. No server is needed."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import worqr
from tests.support.children import ROOT

Registry = worqr.Registry


def f(a: int = 1) -> int:
    return a


def g(a: int = 1) -> int:
    return a


async def later(a: int = 1) -> int:
    return a


class Service:
    async def send(self, to: str) -> None: ...

    @staticmethod
    async def check(to: str) -> None: ...

    @classmethod
    def build(cls, to: str) -> None: ...

    async def __call__(self, to: str) -> None: ...


# Names


def test_the_name_is_module_and_qualified_name() -> None:
    registry = Registry()
    assert registry.task(f).name == "tests.functions.test_registry.f"
    assert registry.task(Service().send).name == "tests.functions.test_registry.Service.send"
    assert registry.task(name="any name: that/is a queue's").__call__(f).name == "any name: that/is a queue's"


JOBS = """
    import worqr

    mesh = worqr.Mesh()

    class Jobs:
        @staticmethod
        @mesh.task
        def inner() -> None: ...

    @mesh.task
    def send(to: str) -> None: ...

    if __name__ != "elsewhere":
        print(*mesh.functions)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder with a script, and a package that can be run."""
    source = "\n".join(line[4:] for line in JOBS.splitlines())
    for path in ("mail_jobs.py", "shop/jobs.py", "shop/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source)
    (tmp_path / "shop/__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "stem"),
    [
        (["mail_jobs.py"], "mail_jobs"),
        (["shop/jobs.py"], "jobs"),
        (["-m", "mail_jobs"], "mail_jobs"),
        (["-m", "shop.jobs"], "shop.jobs"),
        (["-m", "shop"], "shop"),
        (["-c", "import shop.jobs"], "shop.jobs"),
        (["-c", "exec(open('mail_jobs.py').read())"], "__main__"),
    ],
)
def test_a_program_has_the_name_it_would_be_imported_by(jobs: Path, arguments: list[str], stem: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=jobs,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == f"{stem}.Jobs.inner {stem}.send\n", done.stderr


def test_a_child_of_multiprocessing_has_the_names_of_its_parent(jobs: Path) -> None:
    found = runpy.run_path(os.fspath(jobs / "mail_jobs.py"), run_name="__mp_main__")
    assert list(found["mesh"].functions) == ["mail_jobs.Jobs.inner", "mail_jobs.send"]


# What may be declared


def test_functions_of_one_name_are_refused() -> None:
    registry = Registry()
    first = registry.task(f)
    with pytest.raises(
        worqr.UsageError,
        match=r"already that has the name 'tests\.functions\.test_registry\.f': give one of them name=",
    ):
        registry.task(f)
    with pytest.raises(worqr.UsageError, match=r"there is a function 'tests\.functions\.test_registry\.f' already"):
        registry.task(name="tests.functions.test_registry.f")(g)
    assert list(registry.functions.values()) == [first]


CELL = """
@mesh.every(60)
@mesh.task(aliases=["old"])
def send(to: str = "ada") -> str:
    return "{}"
"""


@pytest.mark.parametrize("prefix", [None, "", "shop."])
def test_a_notebook_cell_that_is_run_again_replaces_its_function_and_its_schedule(
    prefix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    mesh = worqr.Mesh()
    registry = mesh if prefix is None else Registry()
    for n in range(3):
        if n == 1 and prefix is not None:
            mesh.include(registry, prefix=prefix)
        cell: dict[str, Any] = {"mesh": registry, "__name__": "__main__"}
        exec(compile(CELL.format(n), f"<cell {n}>", "exec"), cell)
        name = f"{prefix or ''}__main__.send" if n or prefix is None else "__main__.send"
        assert cell["send"].name == name
        assert list((mesh if n else registry).functions.values()) == [cell["send"]]
        assert list((mesh if n else registry)._declarations.schedules) == [name]
    assert cell["send"]() == "2"


@pytest.mark.parametrize("other", ["name", "line", "local"])
def test_a_function_in_a_program_is_not_replaced_by_another_one(other: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.py"
    path.write_text("def f(): ...\ndef f2(): ...\n\ndef local():\n    def f3(): ...\n    return f3\n")

    def load() -> Any:
        space: dict[str, Any] = {"__name__": "jobs"}
        exec(compile(path.read_text(), os.fspath(path), "exec"), space)
        return space["local"]() if other == "local" else space["f"]

    registry = Registry()
    registry.task(name="x")(load())
    if other == "name":
        registry.task(name="x")(load())  # the module was loaded again
        assert len(registry.functions) == 1
        path.write_text("def g(): ...\n\n" + path.read_text())
    if other == "line":
        path.write_text("# one line more\n" + path.read_text())
    with pytest.raises(worqr.UsageError, match="there is a function 'x' already"):
        registry.task(name="x")(load())


def test_another_function_with_the_same_decorator_replaces_none() -> None:
    def logged(fn: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(fn)
        def inner(*args: Any) -> None: ...

        return inner

    def load(source: str) -> Any:
        space: dict[str, Any] = {"__name__": "jobs", "logged": logged}
        exec(compile(source, "jobs.py", "exec"), space)
        return space["f"]

    registry = Registry()
    registry.task(name="x")(load("@logged\ndef f(n: int): ..."))
    registry.task(name="x")(load("@logged\ndef f(n: int): ..."))  # the module was loaded again
    with pytest.raises(worqr.UsageError, match="there is a function 'x' already"):
        registry.task(name="x")(load("\n@logged\ndef f(text: str): ..."))


def test_aliases_are_names_too() -> None:
    registry = Registry()
    declared = registry.task(name="new", aliases=("old", "older"))(f)
    assert declared.name == "new"
    assert list(registry.functions) == ["new"]
    wrong: list[dict[str, Any]] = [
        {"name": "old"},
        {"name": "x", "aliases": ["new"]},
        {"name": "x", "aliases": ["older"]},
        {"name": "x", "aliases": ["x"]},
        {"name": "x", "aliases": ["y", "y"]},
    ]
    for options in wrong:
        with pytest.raises(worqr.UsageError, match="give one of them name="):
            registry.task(**options)(g)
    assert list(registry.functions) == ["new"]
    registry.task(name="y")(g)


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (generator, "is a generator: calling it runs nothing; take the `yield` out of it"),
        (async_generator, "is a generator"),
        (functools.partial(generator), "is a generator"),
        (Service, "takes a function, not <class"),
        (Service.__dict__["build"], "takes a function, not <classmethod"),
        (7, "takes a function, not 7"),
        ("f", "takes a function, not 'f'"),
        (lambda a: a, "has no name to be known by: give it one, as in"),
        (functools.partial(f, 1), "has no name to be known by"),
        (Service(), "has no name to be known by"),
        (Service.send, r"Service\.send is a method: no self travels with its arguments; declare a function"),
        (print, r"\*args has no fixed names"),
        (min, "its parameters are not known"),
    ],
)
def test_what_cannot_be_a_task_is_refused(what: Any, words: str) -> None:
    registry = Registry()
    with pytest.raises(worqr.UsageError, match=words):
        registry.task()(what)
    assert not registry.functions


def test_a_method_that_is_decorated_in_its_class_is_refused() -> None:
    registry = Registry()
    with pytest.raises(worqr.UsageError, match=r"Local\.send is a method"):

        class Local:
            @registry.task
            def send(self, to: str) -> None: ...


def test_a_function_that_calls_its_first_argument_self_is_none() -> None:
    def send(self: int) -> None: ...

    assert Registry().task(send).call(1).task == b'{"self":1}'


def test_a_function_is_declared_once() -> None:
    declared = Registry().task(f)
    with pytest.raises(worqr.UsageError, match=r"<Function 'tests\.functions\.test_registry\.f'> is declared already"):
        Registry().task(declared)


def test_static_methods_and_methods_of_objects_may_be_declared() -> None:
    registry = Registry()
    service = Service()
    for fn in (Service.check, service.send, Service.build):
        assert registry.task(fn).call("ada").task == b'{"to":"ada"}'

    class Local:
        @registry.task
        @staticmethod
        async def inside(to: str) -> None: ...

        @staticmethod
        @registry.task
        async def outside(to: str) -> None: ...

    for function in (Local.inside, Local.outside):
        assert isinstance(function, worqr.AsyncFunction)
        assert function.call("ada").task == b'{"to":"ada"}'


def test_what_has_no_name_of_its_own_is_declared_with_one() -> None:
    registry = Registry()
    assert registry.task(name="lambda")(lambda a: a).call(1).task == b'{"a":1}'
    assert registry.task(name="partial")(functools.partial(f)).call(2).task == b'{"a":2}'
    assert isinstance(registry.task(name="object")(Service()), worqr.AsyncFunction)


# Including


def test_an_included_registry_belongs_to_the_mesh() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    function = registry.task(name="f", aliases=["old"])(f)
    mesh.include(registry, prefix="shop.")
    assert function.name == "shop.f"
    assert dict(mesh.functions) == {"shop.f": function}
    assert function._definition.aliases == ("shop.old",)
    assert function.queue.name == function.call().name == "shop.f"
    assert repr(function) == "<Function 'shop.f'>"


def test_a_prefix_needs_no_dot_and_none_need_be() -> None:
    mesh, one, two = worqr.Mesh(), Registry(), Registry()
    first, second = one.task(name="f")(f), two.task(name="f")(f)
    mesh.include(one)
    mesh.include(two, prefix="b-")
    assert [first.name, second.name] == ["f", "b-f"]


@pytest.mark.parametrize("inner_first", [True, False])
@pytest.mark.parametrize("declared_first", [True, False])
def test_prefixes_add_up(inner_first: bool, declared_first: bool) -> None:
    mesh, middle, inner = worqr.Mesh(), Registry(), Registry()
    if declared_first:
        function = inner.task(name="f", aliases=["old"])(f)
        inner.every(60, function.call(), name="hourly")
        inner.every(60, function.call(2))
        inner.every(60, mesh.call("elsewhere"), name="else")
    steps: list[Callable[[], None]] = [
        lambda: middle.include(inner, prefix="b."),
        lambda: mesh.include(middle, prefix="a."),
    ]
    for step in steps if inner_first else reversed(steps):
        step()
    if not declared_first:
        function = inner.task(name="f", aliases=["old"])(f)
        inner.every(60, function.call(), name="hourly")
        inner.every(60, function.call(2))
        inner.every(60, mesh.call("elsewhere"), name="else")
    assert function.name == "a.b.f"
    assert function._definition.client is mesh._client
    assert dict(mesh.functions) == {"a.b.f": function}
    assert {name: each.queue for name, each in mesh._declarations.schedules.items()} == {
        "a.b.hourly": "a.b.f",
        "a.b.f": "a.b.f",
        "a.b.else": "elsewhere",
    }
    with pytest.raises(worqr.UsageError, match=r"there is a function 'a\.b\.f' already that has the name 'a\.b\.old'"):
        mesh.task(name="a.b.old")(g)


def test_what_is_declared_later_comes_along() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    mesh.include(registry, prefix="shop.")
    function = registry.task(name="f")(f)
    assert function.name == "shop.f"
    assert dict(mesh.functions) == {"shop.f": function}


def test_calls_made_before_go_where_the_function_is_now() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    function = registry.task(name="f")(f)
    call = function.call(1)
    mesh.include(registry, prefix="shop.")
    registry.every(60, call)
    assert call.queue == "shop.f"
    assert [each.queue for each in mesh._declarations.schedules.values()] == ["shop.f"]


def refused(mesh: Registry, other: Any, words: str, prefix: str = "") -> None:
    """An include that fails changes nothing."""

    def seen() -> tuple[object, ...]:
        names = [each.name for each in other.functions.values()] if isinstance(other, Registry) else []
        return dict(mesh.functions), dict(mesh._declarations.schedules), names

    before = seen()
    with pytest.raises(worqr.UsageError, match=words):
        mesh.include(other, prefix=prefix)
    assert seen() == before


def test_functions_of_one_name_cannot_be_included() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    mesh.task(name="b")(f)
    registry.task(name="a")(f)
    registry.task(name="c", aliases=["b"])(g)
    refused(mesh, registry, "there is a function 'b' already that has the name 'b'")
    mesh.task(name="shop.c")(g)
    refused(mesh, registry, "already that has the name 'shop.c'", prefix="shop.")
    mesh.include(registry, prefix="store.")
    assert set(mesh.functions) == {"b", "shop.c", "store.a", "store.c"}


def test_functions_that_cannot_have_the_defaults_of_a_mesh_are_not_included() -> None:
    class Odd: ...

    def odd(n: int) -> Odd:
        raise NotImplementedError

    odd.__annotations__["return"] = Odd
    mesh, registry = worqr.Mesh(defaults=worqr.HandlerOptions(result_ttl=60)), Registry()
    registry.task(name="a")(f)
    registry.task(name="b")(odd)
    refused(mesh, registry, "b: what it returns has the type .*Odd, which JSON does not know")
    with pytest.raises(worqr.UsageError, match="which JSON does not know"):
        mesh.task(name="b")(odd)
    assert not mesh.functions
    worqr.Mesh().include(registry)


def test_schedules_of_one_name_cannot_be_included() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    mesh.every(60, mesh.call("x"), name="nightly")
    for name in ("first", "nightly", "last"):
        registry.every(60, registry.task(name=name)(f).call())
    refused(mesh, registry, "there is a schedule 'nightly' already")
    mesh.include(registry, prefix="shop.")
    assert set(mesh._declarations.schedules) == {"nightly", "shop.first", "shop.nightly", "shop.last"}


def test_a_conflict_further_up_is_one_too() -> None:
    mesh, middle, inner = worqr.Mesh(), Registry(), Registry()
    mesh.include(middle, prefix="a.")
    mesh.task(name="a.f")(f)
    mesh.every(60, mesh.call("x"), name="a.nightly")
    with pytest.raises(worqr.UsageError, match="already that has the name 'a.f'"):
        middle.task(name="f")(g)
    with pytest.raises(worqr.UsageError, match=r"there is a schedule 'a\.nightly' already"):
        middle.every(60, mesh.call("x"), name="nightly")
    assert not middle.functions
    assert not middle._declarations.schedules
    inner.task(name="f")(g)
    refused(middle, inner, "already that has the name 'a.f'")
    other = Registry()
    other.every(60, mesh.call("x"), name="first")
    other.every(60, mesh.call("x"), name="nightly")
    refused(middle, other, r"there is a schedule 'a\.nightly' already")
    assert set(mesh._declarations.schedules) == {"a.nightly"}


def test_names_that_get_too_long_cannot_be_included() -> None:
    mesh, functions, schedules = worqr.Mesh(), Registry(), Registry()
    functions.task(name="f" * 199)(f)
    schedules.every(60, mesh.call("x"), name="s" * 199)
    for registry, what in ((functions, "function name"), (schedules, "schedule name")):
        refused(mesh, registry, f"{what} must have 1 to 200 bytes", prefix="ab")
        mesh.include(registry, prefix="a")
    with pytest.raises(worqr.UsageError, match="function name must have 1 to 200 bytes"):
        functions.task(name="g" * 200)(g)


def test_a_prefix_is_part_of_a_name() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    refused(mesh, registry, "prefix of include 'a{b}' contains", prefix="a{b}")
    refused(mesh, registry, "prefix of include must be a str", prefix=7)  # type: ignore[arg-type]


def test_a_registry_is_included_once() -> None:
    mesh, registry = worqr.Mesh(), Registry()
    registry.task(name="f")(f)
    mesh.include(registry)
    for other in (mesh, worqr.Mesh(), Registry()):
        refused(other, registry, "this registry is included already: a function has one queue")
        refused(other, registry, "included already", prefix="again.")


def test_no_circles() -> None:
    a, b, c = Registry(), Registry(), Registry()
    refused(a, a, "a registry cannot include itself")
    a.include(b)
    b.include(c)
    refused(c, a, "a registry cannot include itself")
    refused(b, a, "a registry cannot include itself")
    worqr.Mesh().include(a)


@pytest.mark.parametrize("other", [None, "registry", {}, f])
def test_only_registries_can_be_included(other: Any) -> None:
    refused(worqr.Mesh(), other, r"include\(\) takes a worqr\.Registry, not ")


def test_a_mesh_is_included_nowhere() -> None:
    mesh = worqr.Mesh()
    for other in (mesh, worqr.Mesh(), Registry()):
        refused(other, mesh, "a Mesh cannot be included")
