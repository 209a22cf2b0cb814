"""Names of functions by which another process can import them: the module, and the name in it.

A function without such a name (a closure, a lambda, code typed into an interpreter) is refused where it is declared or served.
The module ``__main__`` is imported under its real name, so ``if __name__ == "__main__":`` is false. `worqr.import_guard` stops a
peer that starts outside of that guard.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, Final

import msgspec

from worqr.errors import UsageError
from worqr.handler_options import REMEDY, check_importable
from worqr.import_guard import importing
from worqr.validation import SCRIPT

STAND_IN: Final = SCRIPT
"""The module name of a script whose own name is used by another module."""


class Name(msgspec.Struct, array_like=True, frozen=True):
    """The name of a function. `file`: the file of a script, which has no name on ``sys.path``."""

    module: str
    qualname: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


def name_for_process(thing: object, what: str) -> Name:
    """Return the name under which another process can import `thing`.

    Raises:
        UsageError: there is none.
    """
    check_importable(thing, what)
    module = str(getattr(thing, "__module__", None))
    qualname = _find(sys.modules.get(module), thing)
    if qualname is None:
        raise UsageError(
            f"{what} {thing!r} is not found under its name in module {module!r}, so another process cannot import it: "
            f"{REMEDY}, and let its name stand for it alone"
        )
    if module != "__main__":
        return Name(module, qualname)
    name, file = main_module()
    if name is None:
        raise UsageError(
            f"{what} {thing!r} was typed into an interpreter or comes out of an archive, so another process cannot import "
            "it: put it into a module of its own, and import that"
        )
    return Name(name, qualname, file)


def _find(module: ModuleType | None, thing: object) -> str | None:
    """Return the name of `thing` in `module`: its own, or another name for it there."""
    if module is None:
        return None
    qualname = getattr(thing, "__qualname__", None)
    if isinstance(qualname, str) and _is_same(_look_up(module, qualname), thing):
        return qualname
    return next((name for name, value in vars(module).items() if _is_same(value, thing)), None)


def _look_up(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _is_same(found: Any, thing: Any) -> bool:
    """Return True for `thing` itself, and for a typed function whose handler `thing` is."""
    if found is thing or (isinstance(found, MethodType) and found == thing):
        return True
    return thing is not None and inspect.getattr_static(found, "__worqr_handler__", None) is thing


def main_module() -> tuple[str | None, str | None]:
    """Return the real name of ``__main__`` for an import, and the file if it is a script.

    The name is None if another process cannot import it.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":
        return spec.name, None
    if file is None or not os.path.isfile(file):
        return None, None
    return Path(file).stem, os.path.abspath(file)


# In the other process


def resolve(name: Name) -> Any:
    """Import the object that `name` names. Errors of the import propagate."""
    with importing(name.module):
        module = importlib.import_module(name.module) if name.file is None else _import_script(name.module, name.file)
    found: Any = module
    for part in name.qualname.split("."):
        found = getattr(found, part)
    return found


def _import_script(stem: str, file: str) -> ModuleType:
    name = stem
    known = sys.modules.get(stem)
    if known is not None and getattr(known, "__file__", None) != file:
        name = STAND_IN
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, file)
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
