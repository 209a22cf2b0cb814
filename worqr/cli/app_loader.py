"""Import the application of ``worqr run package.module:mesh``, and return its mesh.

The errors say what is wrong with the name: it is a path, the module does not exist, or the module has no mesh. What the worker
does with the mesh is in `worqr.cli.run`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

from worqr.cli.errors import CommandFailed
from worqr.hosting.service import refuse_run

if TYPE_CHECKING:
    from worqr.mesh import Mesh

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class ImportFailed(CommandFailed):
    """The user's module raised an exception while it was imported.

    Attributes:
        exc_info: the exception; its traceback begins in the user's own code.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        self.exc_info: ExcInfo = type(error), error, _users(error.__traceback__)
        super().__init__(f"{name} could not be imported:", "".join(traceback.format_exception(*self.exc_info)))


def load_mesh(target: str) -> Mesh[Any]:
    """Return the mesh that ``package.module:name`` names; without a name, the only mesh of the module.

    The module is imported, from the current folder first. If ``DJANGO_SETTINGS_MODULE`` is set, Django is set up before.

    Raises:
        ImportFailed: the module raised an exception.
        CommandFailed: the module or the name does not exist, or it is not a mesh.
    """
    name, colon, attribute = target.partition(":")
    if os.sep in name or name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise CommandFailed(
            f"{target!r} is a path; name the module as Python imports it: {dotted}:{attribute or 'mesh'}"
        )
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise CommandFailed(f"{target!r} is not the name of a mesh: type package.module:mesh")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    _set_up_django()
    module = _import(name)
    return _attribute(module, attribute) if colon else _only_mesh(module)


def _set_up_django() -> None:
    """Set up Django if this process belongs to a Django project: modules that import models need its applications.

    Raises:
        ImportFailed: Django's settings, or an application, raised an exception.
    """
    settings = os.environ.get("DJANGO_SETTINGS_MODULE")
    if not settings or importlib.util.find_spec("django") is None:
        return
    try:
        with refuse_run():
            importlib.import_module("django").setup()
    except (Exception, SystemExit) as error:
        raise ImportFailed(
            f"Django's settings DJANGO_SETTINGS_MODULE={settings}, or an application that they name,", error
        ) from None


def _import(name: str) -> ModuleType:
    try:
        with refuse_run():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}.") and _users(error.__traceback__) is None:
            raise CommandFailed(_no_module(name, error.name)) from None
        raise ImportFailed(name, error) from None
    except (Exception, SystemExit) as error:
        raise ImportFailed(name, error) from None


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this module and of the import system at its beginning."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            return trace
        trace = trace.tb_next
    return None


def _no_module(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    try:
        path = importlib.import_module(parent).__path__ if parent else [os.getcwd()]
    except AttributeError:
        return f"there is no module {name!r}: {parent} is a module, not a package"
    siblings = [module.name for module in pkgutil.iter_modules(path)]
    hint = _hint(last, siblings, f"{parent}." if parent else "")
    where = f"in the package {parent}" if parent else f"in {os.getcwd()}, nor among the installed packages"
    return f"there is no module {missing!r} {where}{hint}"


def _hint(name: str, known: Iterable[str], before: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {before + close[0]!r}?" if close else ""


def _is_mesh(value: object) -> TypeGuard[Mesh[Any]]:
    from worqr.mesh import Mesh

    return isinstance(value, Mesh)


def _meshes(module: ModuleType) -> dict[str, Mesh[Any]]:
    """Return the meshes of a module by name, each once, private names last."""
    found: list[tuple[str, Mesh[Any]]] = []
    for name, value in sorted(vars(module).items(), key=lambda item: item[0].startswith("_")):
        if _is_mesh(value) and not any(value is mesh for _, mesh in found):
            found.append((name, value))
    return dict(found)


def _only_mesh(module: ModuleType) -> Mesh[Any]:
    found = _meshes(module)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise CommandFailed(
            f"there is no worqr.Mesh in {module.__name__} ({module.__file__}); add one: mesh = worqr.Mesh()"
        )
    which = " or ".join(f"{module.__name__}:{name}" for name in found)
    raise CommandFailed(f"there are {len(found)} meshes in {module.__name__}; choose one: {which}")


def _attribute(module: ModuleType, dotted: str) -> Mesh[Any]:
    value: Any = module
    for name in dotted.split("."):
        if not hasattr(value, name):
            hint = _hint(name, dir(value))
            meshes = _meshes(module)
            choices = f"; its meshes: {', '.join(meshes)}" if meshes and not hint else ""
            raise CommandFailed(f"there is no {name!r} in {module.__name__} ({module.__file__}){hint}{choices}")
        value = getattr(value, name)
    if _is_mesh(value):
        return value
    kind = f"the class {value.__qualname__}" if isinstance(value, type) else f"of type {type(value).__qualname__}"
    meshes = _meshes(module)
    choices = f"; its meshes: {', '.join(meshes)}" if meshes else ""
    raise CommandFailed(f"{module.__name__}:{dotted} is {kind}, not a worqr.Mesh{choices}")
