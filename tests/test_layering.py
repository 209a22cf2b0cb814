"""Imports run one way, the pure modules are pure, and only `worqr.link` knows redis."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

import worqr
from tests.support.cases import of_each

PACKAGE = Path(__file__).parent.parent / "worqr"

LAYERS = (
    (
        "errors",
        "escaping",
        "version",
        "validation",
        "stored_values",
        "limits",
        "records",
        "mesh_records",
        "run_counts",
        "history_records",
        "remote_error",
        "keys",
        "batches",
        "ids",
        "lua",
        "script_call",
        "policy",
        "cron",
        "job_options",
        "job_states",
        "call_list",
        "handler_options",
        "import_guard",
        "arrival",
        "argument_codec",
        "shard_layout",
        "foreign",
        "inside",
        "tracebacks",
    ),  # pure
    ("ops",),  # pure
    ("log_events", "tracing"),
    ("link",),
    ("embedded",),
    ("http_server",),
    ("client",),
    ("functions",),
    ("peer",),
    ("metrics",),
    ("probes",),
    ("hosting",),
    ("mesh",),
    ("side_mesh",),
    ("",),  # worqr/__init__.py: the public names
    ("otel",),
    ("views",),
    ("dashboard",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
"""A module imports from its own layer and from those above it in this list, also for typing."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = (*LAYERS[0], *LAYERS[1])
MOST_LINES = 40
"""Of a function, without its docstring."""
MOST_ATTRIBUTES = 20
"""Of a class that changes. A module or a class has no limit on lines: it has one idea, and is as long as the idea."""


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed when a test asks for its tree: each process of a run collects this file."""

    name: str
    """Dotted, without ``worqr``: ``peer.consumer``, ``lua``, and ``""`` for the package itself."""
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """What the layers are made of: the first word of the name."""
        return self.name.partition(".")[0]


def read(path: Path) -> Module:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text("utf-8")
    return Module(name, text)


MODULES = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {module.name for module in MODULES}
of_each_module = of_each("module", MODULES, lambda module: module.name or "worqr")


def imports(tree: ast.AST, but: Container[ast.AST] = ()) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also for typing, in full: ``worqr.ops``, ``trio.abc``."""
    for node in ast.walk(tree):
        if node in but:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            source = node.module or ""
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner.removeprefix("worqr.") in NAMES else source


def own_imports(module: Module) -> set[str]:
    """The modules of worqr that this one imports, also for typing, named as `Module.name` is."""
    return {
        name.removeprefix("worqr").removeprefix(".")
        for name in imports(module.tree)
        if name == "worqr" or name.startswith("worqr.")
    }


@of_each_module
def test_every_module_has_a_layer(module: Module) -> None:
    assert module.part in RANK, f"give {module.part} a place in LAYERS"


@of_each_module
def test_imports_run_one_way(module: Module) -> None:
    for name in own_imports(module):
        part = name.partition(".")[0]
        assert RANK[part] <= RANK[module.part], f"{module.name} imports worqr.{name}, which is above it"


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        parts = {name.partition(".")[0] for name in own_imports(module)}
        needs.setdefault(module.part, set()).update(parts - {module.part})
    assert {part for part in needs if part in reached(part, needs)} == set()


def graph() -> dict[str, set[str]]:
    """The modules that each module imports. Without the package itself, which names all public ones, and without those of the
    same folder that only type checkers see."""
    return {
        module.name: {
            name.removeprefix("worqr.")
            for name in imports(module.tree, but=typing_only(module))
            if name.removeprefix("worqr.") in NAMES and name not in {f"worqr.{module.name}", "worqr", ""}
        }
        for module in MODULES
        if module.name
    }


def typing_only(module: Module) -> set[ast.AST]:
    """The imports from its own folder under ``if TYPE_CHECKING``."""
    folder = f"worqr.{module.name.rpartition('.')[0]}"
    return {
        each
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
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


def classes(module: Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def is_record(node: ast.ClassDef) -> bool:
    """A class whose fields never change: a frozen dataclass or struct, a TypedDict, a NamedTuple."""
    frozen = any("frozen=True" in ast.unparse(each) for each in (*node.decorator_list, *node.keywords))
    return frozen or any(ast.unparse(base) in {"TypedDict", "NamedTuple"} for base in node.bases)


OF_OTHER_LIBRARIES = {"link.trio_driver: self._scope.deadline": "the deadline of a scope of Trio"}
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
        for node in classes(module)
        if not is_record(node) and len(attributes(node)) > MOST_ATTRIBUTES
    }
    assert not found, "divide its state by owner and lifetime"


def foreign_writes(module: Module, owners: dict[str, set[str]]) -> Iterator[str]:
    """Attributes of objects that a class of another file declares."""
    for node in ast.walk(module.tree):
        written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if written and ast.unparse(node.value) not in {"self", "cls"} and not node.attr.startswith("__"):
            homes = owners.get(node.attr, set())
            if homes and module.name not in homes:
                yield f"{module.name}: {ast.unparse(node)}"


def test_attributes_are_written_in_the_file_of_their_class_only() -> None:
    owners: dict[str, set[str]] = {}
    for module in MODULES:
        for node in classes(module):
            for name in attributes(node):
                owners.setdefault(name, set()).add(module.name)
    found = {write for module in MODULES for write in foreign_writes(module, owners)}
    assert found == OF_OTHER_LIBRARIES.keys(), "call a method of its owner"


@of_each_module
def test_only_the_link_imports_redis(module: Module) -> None:
    if module.part != "link":
        assert not {"redis", "valkey", "hiredis"} & {name.partition(".")[0] for name in imports(module.tree)}


@of_each("module", [m for m in MODULES if m.part in PURE], lambda module: module.name)
def test_pure_modules_know_no_loop_and_no_network(module: Module) -> None:
    tops = {name.partition(".")[0] for name in imports(module.tree)}
    allowed = {"time"} if module.name == "tracebacks" else set[str]()  # it stops to read an error that takes too long
    assert not tops & {"trio", "trio_util", "asyncio", "threading", "socket", "subprocess", "time"} - allowed
    waits = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not any(isinstance(node, waits) for node in ast.walk(module.tree))


@of_each_module
def test_every_module_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree), "no docstring"
    assert len((ast.get_docstring(module.tree) or "").splitlines()) <= 25


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
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)) > MOST_LINES
    }
    assert not found, f"at most {MOST_LINES} lines"


def test_every_public_name_is_found_where_type_checkers_look_for_it() -> None:
    module = next(module for module in MODULES if module.name == "")
    imported = {
        alias.name: node.module
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("worqr.")
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
