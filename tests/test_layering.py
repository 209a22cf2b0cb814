"""Imports run one way, the pure modules are pure, and only `worqr.link` knows redis."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Container, Iterator

import pytest

import worqr
from tests.support.cases import of_each
from tests.support.sources import MODULES, PACKAGE, Module

LAYERS = (
    "log_events tracing child_processes",
    "link",
    "embedded",
    "http_server",
    "client",
    "functions",
    "peer",
    "metrics",
    "probes",
    "hosting",
    "mesh",
    "sql webhooks",
    "worqr",  # worqr/__init__.py: the public names
    "otel",
    "views",
    "dashboard",
    "testing",
    "cli",
    "django",  # the backend, and the commands of manage.py
    "__main__",
)
"""A module imports from its own layer and from those above it in this list, also for typing. The first layer of all, values and
scripts, has what is not named here, and is pure; the second one is `ops`, which is pure, too."""

RANK = {"ops": 1, **{name: rank for rank, names in enumerate(LAYERS, 2) for name in names.split()}}
MOST_LINES = 40
"""Of a function, without its docstring."""
MOST_ATTRIBUTES = 20
"""Of a class that changes. A module or a class has no limit on lines: it has one idea, and is as long as the idea."""


NAMES = {module.name for module in MODULES}
of_each_module = of_each("module", MODULES, lambda module: module.name or "worqr")


def part_of(name: str) -> str:
    """The part of a module that is named in full."""
    return name.removeprefix("worqr.").partition(".")[0]


def imports(module: Module, but: Container[ast.AST] = ()) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also for typing, in full: ``worqr.ops``, ``trio.abc``."""
    for node in module.each(ast.Import, ast.ImportFrom):
        if node in but:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"line {node.lineno}: a relative import"
            source = node.module or ""
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner.removeprefix("worqr.") in NAMES and inner.startswith("worqr.") else source


def own_imports(module: Module) -> set[str]:
    """The modules of worqr that this one imports, also for typing, named in full."""
    return {name for name in imports(module) if name.partition(".")[0] == "worqr"}


@of_each_module
def test_imports_run_one_way(module: Module) -> None:
    for name in own_imports(module):
        assert RANK.get(part_of(name), 0) <= RANK.get(module.part, 0), f"{name} is above it"


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        parts = set(map(part_of, own_imports(module)))
        needs.setdefault(module.part, set()).update(parts - {module.part})
    assert {part for part in needs if part in reached(part, needs)} == set()


def graph() -> dict[str, set[str]]:
    """The modules that each module imports. Without the package itself, which names all public ones, and without those of the
    same folder that only type checkers see."""
    return {
        module.name: {
            name.removeprefix("worqr.")
            for name in imports(module, but=typing_only(module))
            if name.startswith("worqr.")  # `django` alone is another package than `worqr.django`
            and name.removeprefix("worqr.") in NAMES
            and name != f"worqr.{module.name}"
        }
        for module in MODULES
        if module.name
    }


def typing_only(module: Module) -> set[ast.AST]:
    """The imports from its own folder under ``if TYPE_CHECKING``."""
    folder = f"worqr.{module.name.rpartition('.')[0]}"
    return {
        each
        for node in module.each(ast.If)
        if ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        if isinstance(each, ast.ImportFrom) and (each.module or "").rpartition(".")[0] == folder
    }


def reached(start: str, names: dict[str, set[str]]) -> set[str]:
    """All modules that `start` names, directly or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        new = names[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_modules_name_each_other_in_a_circle() -> None:
    names = graph()
    circle = {module for module in names if module in reached(module, names)}
    assert not circle, "also imports for typing count, but for those of the same folder"


def is_record(node: ast.ClassDef) -> bool:
    """A class whose fields never change: a frozen dataclass or struct, a TypedDict, a NamedTuple."""
    frozen = any("frozen=True" in ast.unparse(each) for each in (*node.decorator_list, *node.keywords))
    return frozen or any(ast.unparse(base) in {"TypedDict", "NamedTuple"} for base in node.bases)


OF_OTHER_LIBRARIES = dict.fromkeys(
    ["link.driver: self._scope.deadline", "peer.settler: self._rest.deadline"], "the deadline of a scope of Trio"
)
"""Writes that the test below takes for foreign ones, because a class of worqr has an attribute of the same name."""


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that a class declares, or that its methods set."""
    declared = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def test_no_class_has_too_many_attributes() -> None:
    found = {
        f"{module.name}.{node.name}": len(attributes(node))
        for module in MODULES
        for node in module.each(ast.ClassDef)
        if not is_record(node) and len(attributes(node)) > MOST_ATTRIBUTES
    }
    assert not found, "divide its state by owner and lifetime"


def foreign_writes(module: Module, owners: dict[str, set[str]]) -> Iterator[str]:
    """Attributes of objects that a class of another file declares."""
    for node in module.each(ast.Attribute):
        if isinstance(node.ctx, ast.Load) or node.attr.startswith("__") or ast.unparse(node.value) in {"self", "cls"}:
            continue
        homes = owners.get(node.attr, set())
        if homes and module.name not in homes:
            yield f"{module.name}: {ast.unparse(node)}"


def test_attributes_are_written_in_the_file_of_their_class_only() -> None:
    owners: dict[str, set[str]] = {}
    for module in MODULES:
        for node in module.each(ast.ClassDef):
            for name in attributes(node):
                owners.setdefault(name, set()).add(module.name)
    found = {write for module in MODULES for write in foreign_writes(module, owners)}
    assert found == OF_OTHER_LIBRARIES.keys(), "call a method of its owner"


@of_each_module
def test_only_the_link_imports_redis_and_pure_modules_know_no_loop_and_no_network(module: Module) -> None:
    tops = {name.partition(".")[0] for name in imports(module)}
    assert module.part == "link" or not tops & {"redis", "valkey", "hiredis"}
    if RANK.get(module.part, 0) <= RANK["ops"]:
        allowed = (
            {"time"} if module.name == "tracebacks" else set[str]()
        )  # it stops to read an error that takes too long
        assert not tops & {"trio", "trio_util", "asyncio", "threading", "socket", "subprocess", "time"} - allowed
        assert not [*module.each(ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)]


@of_each_module
def test_every_module_says_what_it_is_in_at_most_25_lines(module: Module) -> None:
    assert 1 <= len((ast.get_docstring(module.tree) or "").splitlines()) <= 25


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """What a function promises may be long, what it does may not; also of the functions in it."""
    found = 0
    for inner in ast.walk(node):
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(inner):
            text = inner.body[0]
            found += (text.end_lineno or 0) - text.lineno + 1
    return found


def test_functions_stay_small() -> None:
    found = {
        f"{module.name}.{node.name}": lines
        for module in MODULES
        for node in module.each(ast.FunctionDef, ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)) > MOST_LINES
    }
    assert not found, f"at most {MOST_LINES} lines"


def test_every_public_name_is_found_where_type_checkers_look_for_it() -> None:
    module = next(module for module in MODULES if module.name == "")
    imported = {
        alias.name: node.module
        for node in module.each(ast.ImportFrom)
        if (node.module or "").startswith("worqr.")
        for alias in node.names
    }
    assert set(worqr.__all__) == imported.keys()
    for name, home in imported.items():
        assert getattr(worqr, name) is getattr(importlib.import_module(home or ""), name)
    with pytest.raises(AttributeError, match="module 'worqr' has no attribute 'Mehs'"):
        _ = worqr.Mehs  # type: ignore[attr-defined]
    assert set(worqr.__all__) <= set(dir(worqr))


def test_a_part_of_worqr_is_imported_without_the_rest() -> None:
    code = "import sys, worqr.errors; print(*sorted(name for name in sys.modules if name in ('trio', 'worqr.mesh')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert found.stdout.split() == []
