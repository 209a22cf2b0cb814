"""What a peer and its worker processes say to each other: frames of four bytes of length and a struct in MessagePack.

Functions go by names: the module, and the name in it. One without such a name (a closure, a lambda, code typed into an
interpreter) is refused where it is declared or served. The module ``__main__`` is imported under its real name, so
``if __name__ == "__main__":`` is false. `worqr.child_processes` stops a peer that starts outside of that guard.

The protocol is internal, because both sides always have the same version. A process first receives one `Setup`. It replies to
each `RunRequest` with one `Returned`, `Raised` or `Suspending`. Before that reply, it sends a `Progressed`, `Extended` or
`Used` for each report or extension of the run. It sends a `Saving` when the run saves, a `Starting` when it starts jobs, and
waits for the `SaveReply`. If a list handler returns, it first sends a `CallEnded` for each of its calls. If a list handler
raises, it sends one for each call whose payload cannot be decoded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import struct
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, Final, Literal

import msgspec

from worqr.child_processes import importing
from worqr.embedded import Relocation
from worqr.errors import UsageError
from worqr.handler_options import REMEDY, check_importable
from worqr.ops import Child, NotedChildren, Wait
from worqr.policy import Policy
from worqr.records import RemoteError
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


LENGTH: Final = struct.Struct("!I")


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What holds for all runs. `memory_limit`, `max_result`: bytes. `embedded`: URL of the
    parent's embedded server, if it has one. `relocation`: where a test has moved the mesh to. `continuing`: the context
    manager that continues the trace of each run; None: the mesh is not traced.
    """

    lifespan: Name | None
    around: Name | None
    memory_limit: int | None
    max_result: int
    embedded: str | None
    relocation: Relocation | None
    continuing: Name | None


class RunRequest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One run: the claim's entry from the start's reply, and the options of its handler. `base`: of the keys of its queue.
    `id_suffix`: the suffix of the ids that are generated there. `deadline`: as in `Run`, by a clock that all processes share.
    `carrier`: the context of its trace. `calls`: claims and entries of the calls of a list handler; None: it is no list
    handler. `hides_arguments`, `deploy`: as in `RunHost`. `progressed`: as in `Run`, of a run that keeps the claim of the one
    before.
    """

    function: Name
    queue: str
    base: str
    id_suffix: str
    fence: int
    entry: bytes | list[bytes]
    policy: Policy
    deadline: float | None
    carrier: dict[str, str]
    calls: list[tuple[int, bytes | list[bytes]]] | None
    hides_arguments: bool = False
    deploy: int = 0
    progressed: bool = False


class Progressed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run reported the progress of one of its claims, and its value; empty: it stays."""

    fence: int
    done: float | None
    message: str
    value: bytes = b""


class Extended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run with this fence requests a deadline `seconds` from now. A thread of an earlier run may send it."""

    fence: int
    seconds: float


class Used(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run with this fence has used so much of limits with a unit."""

    fence: int
    cost: int


class Saving(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run saves bytes, or the result of a `step`, for the job of one of its claims, and waits for a `SaveReply`."""

    fence: int
    number: int
    step: str
    value: bytes
    progress: bool
    refused: bool
    took: int | None = None


class Starting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run of a workflow starts jobs, and waits for a `SaveReply`."""

    fence: int
    children: tuple[Child, ...]


class SaveReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The reply to a `Saving` or a `Starting`. `error`: the name of a class of worqr; empty: it was saved, or noted."""

    error: str
    message: str
    noted: NotedChildren | None = None


class Returned(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function returned. `kind`: the encoding of `value`; None: the result is not stored, and `value` is empty."""

    kind: str | None
    value: bytes


class Raised(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function raised. `names`: those of the error's classes, for each error of a group. `last`: the process takes no further
    run.
    """

    kind: Literal["retry", "snooze", "failure", "undecodable", "error"]
    error: RemoteError
    names: list[list[str]]
    delay: float | None = None
    run_at_ms: int | None = None
    counted: bool = True
    last: bool = False
    retry_after: float | None = None


class Suspending(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function is a workflow, which waits. `progress`: as in `Run.suspend`."""

    waits: tuple[Wait, ...]
    progress: bool


class CallEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of one call of a list handler."""

    fence: int
    answer: Returned | Raised


Request = Setup | RunRequest | SaveReply

Answer = Returned | Raised | Suspending

Report = Progressed | Extended | Used | Saving | Starting | CallEnded

Reply = Report | Answer

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)

replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

_encoder = msgspec.msgpack.Encoder()


def packed(frame: Request | Reply) -> bytearray:
    """Return `frame` as bytes."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(frame, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return buffer
