"""Errors and values that break whoever looks at them, and functions that raise and return them in all places."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import trio

import worqr

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportAttributeAccessIssue=false
# mypy: disable-error-code="misc, override, attr-defined, assignment"

mesh = worqr.Mesh()
ONCE = worqr.RetryPolicy(max_failures=1)
ROWS = 200_000


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("odd")


def recurse(self: Any, one: Any = None, two: Any = None) -> Any:
    return recurse(
        self, one, two
    )  # all of them: Python 3.13.0 does not count calls that leave some out, and takes all memory


def leave(*_: Any) -> Any:
    raise SystemExit(7)


class Interrupt(BaseException):
    """Something that libraries raise to end a thread or a greenlet."""


def interrupt(*_: Any) -> Any:
    raise Interrupt


def made(base: type[BaseException] = Exception, **members: Any) -> Callable[[], BaseException]:
    """A maker of errors of a class with these members."""
    return lambda: type("Odd", (base,), {"__module__": __name__, **members})("text")


def made_by(**members: Any) -> Callable[[], BaseException]:
    """A maker of errors of a class whose metaclass has these members."""

    def make() -> BaseException:
        kind: Any = type("Meta", (type,), members)("Odd", (Exception,), {"__module__": __name__})
        error: BaseException = kind("text")
        return error

    return make


def named(name: str, **members: Any) -> Callable[[], BaseException]:
    return lambda: type("Odd", (Exception,), {"__module__": __name__, "__qualname__": name, **members})("text")


def with_attributes(attributes: dict[Any, Any], base: type[BaseException] = ValueError) -> BaseException:
    error = base("text")
    error.__dict__.update(attributes)
    return error


def with_notes(notes: Any) -> BaseException:
    return with_attributes({"__notes__": notes})


class OddKey(str):
    """Equal to nothing, not even in a dict."""

    __slots__ = ("_hash",)

    def __new__(cls, text: str) -> OddKey:
        return str.__new__(cls, text + "?")

    def __init__(self, text: str) -> None:
        self._hash = hash(text)

    def __hash__(self) -> int:
        return self._hash

    __eq__ = fail


class OddText(str):
    __slots__ = ()
    __str__ = __repr__ = __getitem__ = __len__ = __iter__ = __eq__ = encode = split = fail
    __hash__ = str.__hash__


class OddDict(dict[Any, Any]):
    __slots__ = ()
    __iter__ = items = keys = get = __getitem__ = __len__ = __contains__ = fail


class OddList(list[Any]):
    __slots__ = ()
    __iter__ = __len__ = __getitem__ = fail


class OddValue:
    __str__ = __repr__ = __eq__ = __bool__ = fail
    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __class__ = property(fail)


def long_chain(link: str, length: int = 1500) -> BaseException:
    error: BaseException = ValueError("first")
    for n in range(length):
        following = ValueError(f"try {n}")
        setattr(following, link, error)
        error = following
    return error


def cycle(link: str) -> BaseException:
    first, second = ValueError("first"), KeyError("second")
    setattr(first, link, second)
    setattr(second, link, first)
    return first


def caused_by(make: Callable[[], BaseException], link: str = "__cause__") -> BaseException:
    error = ValueError("text")
    setattr(error, link, make())
    return error


def deep_group(depth: int = 600, kind: type[Any] = ExceptionGroup) -> Any:
    error: Any = ValueError("inner")
    for n in range(depth):
        error = kind(f"{n}", [error])
    return error


def shared_group() -> Any:
    """A group of 41 objects, which has a billion leaves if each is counted where it stands."""
    error: Any = ValueError("inner")
    for _ in range(40):
        error = ExceptionGroup("", [error, error])
    return error


class OddGroup(ExceptionGroup[Exception]):
    split = subgroup = derive = fail
    exceptions = message = property(fail)
    __str__ = fail


def in_a_group(*makers: Callable[[], BaseException]) -> BaseException:
    return BaseExceptionGroup("several", [make() for make in makers])


def deep_list(depth: int = 50_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def endless_list() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def from_odd_code() -> BaseException:
    """An error of a module whose source cannot be loaded."""
    found: dict[str, Any] = {"__name__": "odd", "__loader__": type("L", (), {"get_source": fail})(), "found": []}
    try:
        exec(compile("raise ValueError('text')", "/odd/code.py", "exec"), found)
    except ValueError as error:
        return error
    raise AssertionError


def from_deep_code(depth: int = 900) -> BaseException:
    def descend(left: int) -> None:
        if not left:
            raise ValueError("text")
        descend(left - 1)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + depth)
    try:
        descend(depth)
    except ValueError as error:
        return error
    finally:
        sys.setrecursionlimit(limit)
    raise AssertionError


def syntax_error() -> BaseException:
    error = SyntaxError("text", ("<odd>", 1, 1, "x"))
    error.text, error.lineno, error.filename, error.offset = OddText("y"), OddValue(), OddValue(), -5
    return error


def huge_rows() -> list[Any]:
    return [{"number": n, "text": "abc"} for n in range(ROWS)]


UNREADABLE = "<its text cannot be read: "

ERRORS: dict[str, tuple[str, Callable[[], BaseException]]] = {
    "plain": ("text", lambda: ValueError("text")),
    # Attributes
    "getattr raises KeyError": ("text", made(__getattr__=fail)),
    "getattr recurses": ("text", made(__getattr__=lambda self, name: getattr(self.inner, name))),
    "getattr raises SystemExit": ("text", made(__getattr__=leave)),
    "getattr raises a BaseException": ("text", made(__getattr__=interrupt)),
    "getattribute raises": ("text", made(__getattribute__=fail)),
    "setattr raises": ("text", made(__setattr__=fail)),
    "dict is a property that raises": ("text", made(__dict__=property(fail))),
    "odd dict": ("text", lambda: with_attributes({}) if sys.version_info < (3, 11) else _with_odd_dict()),
    "an attribute's name is no text": ("text", lambda: with_attributes({3: "x", (1, 2): "y"})),
    "an attribute's name cannot be compared": ("text", lambda: with_attributes({OddKey("__worqr_remote__"): 1})),
    "notes behind an odd name": ("text", lambda: with_attributes({OddKey("__notes__"): 1})),
    "an attribute of ours": ("text", lambda: with_attributes({"__worqr_remote__": "odd", "remote": 7})),
    "odd attributes": (
        "text",
        lambda: with_attributes(
            {"a": OddValue(), "b": [OddValue()], "c": OddDict(x=1), "d": OddText("x"), "e": deep_list(), "f": 10**9999}
        ),
    ),
    "a huge attribute": ("text", lambda: with_attributes({"rows": huge_rows(), "code": 42})),
    "many attributes": ("text", lambda: with_attributes({f"a{n}": n for n in range(ROWS)})),
    # Text
    "str raises": (UNREADABLE + "KeyError>", made(__str__=fail)),
    "str raises SystemExit": (UNREADABLE + "SystemExit>", made(__str__=leave)),
    "str raises a BaseException": (UNREADABLE + "Interrupt>", made(__str__=interrupt)),
    "str raises KeyboardInterrupt": (
        UNREADABLE + "KeyboardInterrupt>",
        made(__str__=lambda _: _raise(KeyboardInterrupt)),
    ),
    "str raises an odd error": (UNREADABLE + "Odd>", made(__str__=lambda _: _raise(made(__getattribute__=fail)()))),
    "str recurses": (UNREADABLE + "RecursionError>", made(__str__=recurse)),
    "str returns no text": (UNREADABLE + "TypeError>", made(__str__=lambda _: 7)),
    "str returns odd text": ("x", made(__str__=lambda _: OddText("x"))),
    "repr raises": ("text", made(__repr__=fail)),
    "str of its argument raises": (UNREADABLE + "KeyError>", lambda: ValueError(OddValue())),
    "repr of its argument raises": (UNREADABLE + "KeyError>", lambda: ValueError("x", OddValue())),
    "args is a property that raises": ("text", made(args=property(fail))),
    "lone surrogates": ("\\udcff", lambda: ValueError("\udcff")),
    "a huge message": ("x" * 100, lambda: ValueError("x" * 20_000_000)),
    "a huge odd message": ("abcabc", lambda: ValueError(type("Text", (str,), {})("abc" * 5_000_000))),
    "huge arguments": ("[{'number': 0, 'text': 'abc'}, {", lambda: ValueError(huge_rows())),
    "a huge key": ("b'xxx", lambda: KeyError(b"x" * 20_000_000)),
    "a deep argument": ("", lambda: ValueError(deep_list())),
    "an endless argument": ("[1, [...]]", lambda: ValueError(endless_list())),
    "a huge number": ("<a large number>", lambda: ValueError("a", 7**99999)),
    # Notes
    "notes is a property that raises": ("text", made(__notes__=property(fail))),
    "notes are no list": ("text", lambda: with_notes(OddValue())),
    "odd notes": ("text", lambda: with_notes([OddText("x"), OddValue(), 7, "y" * 1_000_000])),
    "many notes": ("text", lambda: with_notes(["x"] * ROWS)),
    # Causes
    "a long chain of causes": ("try 1499", lambda: long_chain("__cause__")),
    "a long chain of contexts": ("try 1499", lambda: long_chain("__context__")),
    "a very long chain": ("try 49999", lambda: long_chain("__context__", 50_000)),
    "a cycle of causes": ("first", lambda: cycle("__cause__")),
    "a cycle of contexts": ("first", lambda: cycle("__context__")),
    "its own cause": ("text", made(__cause__=property(lambda self: self))),
    "cause and context are properties that raise": (
        "text",
        made(__cause__=property(fail), __context__=property(fail), __suppress_context__=property(fail)),
    ),
    "an odd cause": ("text", lambda: caused_by(made(__getattribute__=fail, __str__=fail))),
    "an odd context": ("text", lambda: caused_by(made(__getattr__=fail, __notes__=property(fail)), "__context__")),
    "a deep group as cause": ("text", lambda: caused_by(deep_group)),
    # Tracebacks
    "traceback is a property that raises": ("text", made(__traceback__=property(fail), with_traceback=fail)),
    "code that cannot be loaded": ("text", from_odd_code),
    "deep code": ("text", from_deep_code),
    "a syntax error": ("text", syntax_error),
    # Groups
    "a deep group": ("inner", deep_group),
    "a very deep group": ("19999 (1 sub-exception)", lambda: deep_group(20_000)),
    "a deep group of BaseExceptions": ("inner", lambda: deep_group(600, BaseExceptionGroup)),
    "a wide group": (
        "text (and 9,998 more)",
        lambda: ExceptionGroup("wide", [ValueError("text")] * 1 + [ValueError("text") for _ in range(ROWS)]),
    ),
    "a group of shared groups": ("inner", shared_group),
    "an odd group": ("text", lambda: OddGroup("odd", [ValueError("text")])),
    "a deep odd group": ("inner", lambda: deep_group(600, OddGroup)),
    "odd members": (
        "several",
        lambda: in_a_group(made(__getattribute__=fail), made(__str__=fail), made_by(__hash__=fail), deep_group),
    ),
    # Classes
    "class is a property that raises": ("text", made(__class__=property(fail))),
    "class lies: Retry": ("text", made(__class__=property(lambda _: worqr.Retry))),
    "class lies: Failure": ("text", made(__class__=property(lambda _: worqr.Failure))),
    "class lies: Cancelled": ("text", made(__class__=property(lambda _: trio.Cancelled))),
    "class lies: KeyboardInterrupt": ("text", made(__class__=property(lambda _: KeyboardInterrupt))),
    "its class has no names": (
        "text",
        made_by(__name__=property(fail), __module__=property(fail)),
    ),
    "its class has no bases": (
        "text",
        made_by(__mro__=property(fail), __bases__=property(fail), mro=lambda kind: type.mro(kind)),
    ),
    "its class has no attributes": ("text", made_by(__getattribute__=fail)),
    "its class cannot be checked": ("", made_by(__instancecheck__=fail, __subclasscheck__=fail)),
    "its class cannot be compared": ("text", made_by(__eq__=fail, __hash__=fail)),
    "its class cannot be hashed": ("text", made_by(__hash__=None)),
    "its class is false": ("text", made_by(__bool__=fail, __len__=fail, __call__=type.__call__)),
    "it cannot be compared or hashed": ("text", made(__eq__=fail, __hash__=fail, __bool__=fail, __len__=fail)),
    "its name has spaces": ("text", named("An odd\nname %20")),
    "its name is no Unicode": ("text", named("Odd\udcff\0")),
    "its name is huge": ("text", named("Odd" * 1_000_000)),
    "its name is odd": ("text", named(OddText("Odd"))),
    "its module is none": ("text", made(__module__=None)),
    "its module is odd": ("text", made(__module__=property(fail))),
    # Those that worqr knows
    "a Retry without its attributes": ("", made(worqr.Retry, __init__=lambda self, text: None)),
    "a Retry with odd attributes": ("text", made(worqr.Retry, __getattribute__=fail)),
    "a Retry from an odd error": ("text", lambda: _retry_from(made(__getattribute__=fail))),
    "a Failure with odd text": (UNREADABLE + "KeyError>", made(worqr.Failure, __str__=fail, __getattr__=fail)),
    "a ChildError of nothing": ("", lambda: worqr.ChildError(worqr.RemoteError("Odd", "", ""))),
    # BaseExceptions
    "BaseException": ("text", lambda: BaseException("text")),
    "SystemExit": ("7", lambda: SystemExit(7)),
    "GeneratorExit": ("text", lambda: GeneratorExit("text")),
    "StopIteration": ("", lambda: StopIteration("text")),
    "an odd BaseException": ("text", made(BaseException, __getattribute__=fail, __class__=property(fail))),
}
"""By what is odd: the beginning of the text that is stored, and a maker."""


def _raise(error: Any) -> Any:
    raise error


def _with_odd_dict() -> BaseException:
    error = ValueError("text")
    error.__dict__ = OddDict(code=42)
    return error


def _retry_from(make: Callable[[], BaseException]) -> BaseException:
    error = worqr.Retry("later")
    error.__cause__ = make()
    return error


class OddModel:
    """Looks like a model of pydantic."""

    __pydantic_validator__ = model_validate_json = None
    model_dump = leave


RESULTS: dict[str, Callable[[], object]] = {
    "class is a property that raises": OddValue,
    "odd dict": lambda: {"x": OddValue()},
    "no JSON": object,
    "a deep list": deep_list,
    "an endless list": endless_list,
    "a model that ends the process": OddModel,
    "an odd name": lambda: type("Meta", (type,), {"__getattribute__": fail})("Odd", (), {})(),
    "a huge number": lambda: 10**9999,
    "too large": lambda: "x" * 20_000_000,
}
"""Values that cannot be stored."""


def end(name: str) -> str:
    """Raise the error of this name; without one, return the name."""
    if name in ERRORS:
        raise ERRORS[name][1]()
    return name


def end_all(names: list[str]) -> list[Any]:
    """Return for each name its error; without one, the name."""
    return [ERRORS[name][1]() if name in ERRORS else name for name in names]


async def end_async(name: str) -> str:
    return end(name)


async def end_all_async(names: list[str]) -> list[Any]:
    return end_all(names)


def give(name: str) -> Any:
    return RESULTS[name]()


async def give_async(name: str) -> Any:
    return RESULTS[name]()


def end_in_process(name: str) -> str:
    return end(name)


def end_all_in_process(names: list[str]) -> list[Any]:
    return end_all(names)


def give_in_process(name: str) -> Any:
    return give(name)


PLACES = ("loop", "asyncio", "thread", "process")
_task: Any = partial(mesh.task, result_ttl=60, timeout=60, retry=ONCE)
_task_for_lists: Any = partial(mesh.task, result_ttl=60, timeout=60, retry=ONCE, batch_size=1000, batch_wait=0.2)
_task(name="end.loop", runs_in="loop")(end_async)
_task(name="end.asyncio", runs_in="asyncio")(end_async)
_task(name="end.thread")(end)
end_in_process = _task(name="end.process", runs_in="process")(end_in_process)
_task_for_lists(name="list.loop", runs_in="loop")(end_all_async)
_task_for_lists(name="list.asyncio", runs_in="asyncio")(end_all_async)
_task_for_lists(name="list.thread")(end_all)
end_all_in_process = _task_for_lists(name="list.process", runs_in="process")(end_all_in_process)
_task(name="give.loop", runs_in="loop")(give_async)
_task(name="give.asyncio", runs_in="asyncio")(give_async)
_task(name="give.thread")(give)
give_in_process = _task(name="give.process", runs_in="process")(give_in_process)


def doom(place: str, handle: Callable[[worqr.Failed], Any]) -> None:
    """Declare a function that fails, and its failure handler."""

    task: Any = mesh.task(name=f"doom.{place}", runs_in=cast("Any", place), on_failure_retry=ONCE)

    async def fail_finally(name: str) -> None:
        raise worqr.Failure(name)

    task(fail_finally).on_failure(handle)


def handle_failure(record: worqr.Failed) -> None:
    end(record.error.message)


async def handle_failure_async(record: worqr.Failed) -> None:
    end(record.error.message)


doom("loop", handle_failure_async)
doom("asyncio", handle_failure_async)


@mesh.task(name="doom.thread", on_failure_retry=ONCE)
async def fail_finally(name: str) -> None:
    raise worqr.Failure(name)


fail_finally.on_failure(handle_failure)
