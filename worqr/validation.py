"""Check the values that users pass: durations, counts, texts, payloads, times. Encode values as JSON. Pure.

Nothing here knows Trio, Redis or how anything is sent. The values that users read are in `worqr.records`.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import NoneType
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec

from worqr.errors import PayloadTooLarge, UsageError
from worqr.foreign import not_bytes

Seconds = float | timedelta
"""A duration: seconds as a number, or a timedelta."""

_RETURNS_COROUTINE: Final = "__worqr_returns_coroutine__"

F = TypeVar("F", bound=Callable[..., Any])


class _Unmarked:
    """On Python 3.11 the mark of a coroutine function is an object of asyncio, which a program on Trio has not imported."""

    functions: ClassVar[list[Any]] = []


def returns_coroutine(function: F) -> F:
    """Mark a ``def`` that returns a coroutine as a coroutine function, for frameworks and mocks that ask."""
    setattr(function, _RETURNS_COROUTINE, True)
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    _Unmarked.functions.append(function)
    mark_coroutine_functions()
    return function


def mark_coroutine_functions() -> None:
    """Set the marks that are missing. Called again when asyncio may have been imported meanwhile."""
    coroutines = sys.modules.get("asyncio.coroutines")
    if coroutines is not None and _Unmarked.functions:
        for function in _Unmarked.functions:
            function._is_coroutine = coroutines._is_coroutine
        _Unmarked.functions.clear()


def is_coroutine_function(function: object) -> bool:
    """Return True for an ``async def``, and for a ``def`` of worqr that returns a coroutine."""
    return inspect.iscoroutinefunction(function) or getattr(function, _RETURNS_COROUTINE, False) is True


MAX_FAILURES: Final = 10
MAX_STALLS: Final = 3
KEEP_FAILED: Final = 1000

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""The first time that is refused. In the year 9999, conversions to other time zones and additions overflow."""
LATEST_MS: Final = (LATEST - EPOCH) // timedelta(milliseconds=1)

LONGEST: Final = 100 * 365 * 86400
"""Seconds of the longest duration that is accepted. A longer one is a mistake, or infinity."""

SCRIPT: Final = "__worqr_main__"
"""The module name of a script in a worker process, if another module uses the script's own name."""
MAX_NAME: Final = 300
"""The most characters of the name of a class, or of its module."""
_SCRIPTS: Final = frozenset({"__main__", "__mp_main__", SCRIPT})
_QUALNAME: Final[Any] = type.__dict__["__qualname__"]
_MODULE: Final[Any] = type.__dict__["__module__"]


def seconds(value: object, what: str, *, positive: bool = False) -> float:
    """Return `value` as a finite float that is not negative (with `positive`: above 0). Raises UsageError, which names `what`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} must be seconds (a number or a timedelta), not {value!r}")
    if not (value > 0 if positive else value >= 0) or value > LONGEST:
        least = "above 0" if positive else "at least 0"
        raise UsageError(f"{what} must be {least} and at most a century, not {_shown(value)}")
    return float(value)


def _shown(value: float) -> str:
    """Return a number for an error. Python refuses to print very large ones."""
    try:
        return repr(value)[:40]
    except ValueError:
        return "a number with thousands of digits"


def has_controls(text: str) -> bool:
    """Return True if a text has control characters, which no name of a wait or a job may have."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)


def check_text(value: object, what: str) -> str:
    """Return `value` if it is text that UTF-8 can encode. Raises UsageError, which names `what`."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a str, not {type(value).__name__}")
    if (clean := clean_text(value)) != value:
        raise UsageError(f"{what} is not valid Unicode: {clean[:60]!r}")
    return value


def is_model(kind: type) -> bool:
    """Return True for a pydantic model, without importing pydantic."""
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


_ONLY_VALUES: Final = (bool, NoneType, tuple, frozenset)
"""Types that JSON takes as values, and not as keys of an object."""


def _encode_custom(value: Any) -> object:
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if is_model(kind):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if kind in _ONLY_VALUES:
        raise TypeError(f"JSON does not know {name_of(kind)} as a key: use keys that are texts or numbers")
    raise TypeError(f"JSON does not know {name_of(kind)}{_instead(value)}")


def _instead(value: Any) -> str:
    """Return what to pass in place of a value that acts as a text or a number, or has numbers: a str subclass, numpy's."""
    if isinstance(value, type):
        return ""
    if isinstance(value, str | bytes):
        return f": pass {'str' if isinstance(value, str) else 'bytes'}(value)"
    for method, remedy in (("tolist", "value.tolist()"), ("__index__", "int(value)"), ("__float__", "float(value)")):
        if hasattr(value, method) and not (method == "tolist" and getattr(value, "ndim", 0) == 0):
            return f": pass {remedy}"
    return ""


_encode = msgspec.json.Encoder(enc_hook=_encode_custom).encode
encode_in_order: Final = msgspec.json.Encoder(enc_hook=_encode_custom, order="deterministic").encode
"""Encodes as `encode_json` what that can encode, with sets and objects in an order that their values decide."""


def encode_json(value: object) -> bytes:
    """Encode `value` as JSON. pydantic encodes its models.

    Raises:
        ValueError: it contains NaN or infinity, which msgspec would encode as null. Other errors are those of msgspec, or of a
            type of the user.
    """
    encoded = _encode(value)
    if b"null" in encoded and _has_odd_number(msgspec.to_builtins(value, enc_hook=_encode_custom)):
        raise ValueError("JSON has neither NaN nor infinity")
    return encoded


def _has_odd_number(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_odd_number, cast("dict[object, object]", value).values()))
    return isinstance(value, list | tuple) and any(map(_has_odd_number, cast("list[object]", value)))


def check_task(task: object, max_payload: int) -> bytes:
    """Return `task` as bytes. The caller checks it before it is batched, so that a bad argument fails only its own call.

    Raises:
        UsageError: it is not bytes-like.
        PayloadTooLarge: it is larger than `max_payload` bytes.
    """
    if not isinstance(task, bytes):
        if not isinstance(task, bytearray | memoryview):
            raise UsageError(not_bytes(task))
        task = bytes(cast("bytearray", task))
    if len(task) > max_payload:
        raise PayloadTooLarge(
            f"a task of {len(task):,} bytes is over the limit of {max_payload:,} (Mesh(max_payload=...)): "
            "store the data elsewhere and enqueue its name"
        )
    return task


def check_tasks(tasks: Sequence[object], max_payload: int) -> list[bytes]:
    """Return `tasks` as bytes; see `check_task`. It is called only for tasks that it converts or refuses."""
    checked: list[bytes] = []  # no comprehension: Python 3.11 calls it as a function, which one task would pay for
    for task in tasks:
        checked += (task if type(task) is bytes and len(task) <= max_payload else check_task(task, max_payload),)
    return checked


def name_of(kind: type) -> str:
    """Return the name of a class in records and errors: its module and its qualified name; of a builtin, the latter alone.

    A class of the script that Python runs has the name with which other programs import it. No code of the class runs.
    """
    name, module = qualname_of(kind), _read_name(_MODULE, kind)
    if module in _SCRIPTS:
        module = importable_name(module)
    module = module.removesuffix(".__main__")
    return name if module in {"builtins", ""} else f"{module}.{name}"


def qualname_of(kind: type) -> str:
    """Return the qualified name of a class. No code of the class or of its metaclass runs."""
    return _read_name(_QUALNAME, kind) or "?"


def _read_name(attribute: Any, kind: type) -> str:
    try:
        name = attribute.__get__(kind)
    except Exception:  # a class without a module
        return ""
    if type(name) is str and len(name) <= MAX_NAME:
        return clean_text(name)
    return clean_text(str.__str__(name)[:MAX_NAME]) if issubclass(type(name), str) else ""


def importable_name(module: str) -> str:
    """Return the name of a module; of the script that Python runs, the name with which other programs import it."""
    if module not in _SCRIPTS:
        return module
    main = sys.modules.get(module)
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name not in _SCRIPTS:
        return str(spec.name).removesuffix(".__main__")
    return os.path.splitext(os.path.basename(path))[0] if path else "__main__"


def clean_text(text: str) -> str:
    """Return `text` with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def from_ms(ms: float) -> datetime:
    """Return a time of the server's clock as a datetime. Programs may store any number, and reading must not fail: what is no
    time from 1970 to 9998 becomes the nearest one.
    """
    if not ms >= 0:
        return EPOCH
    return LATEST if ms >= LATEST_MS else datetime.fromtimestamp(ms / 1000, UTC)


def moment(ms: float | None) -> datetime | None:
    """Return a stored time of the server's clock; None if there is none."""
    return None if ms is None else from_ms(ms)


def end_moment(ms: int | None, *tokens: int | None) -> datetime | None:
    """Return the stored time of an end; None if there is none. It is stored in whole ms, and the `tokens` of the dispatch and of
    the claim in microseconds: those of the same ms came before it.
    """
    if ms is None:
        return None
    return from_ms(max([ms, *(token / 1000 for token in tokens if token and token // 1000 == ms)]))


def to_ms(moment: object, what: str) -> int:
    """Return an aware datetime in milliseconds since 1970, rounded up. Raises UsageError, which names `what`."""
    if not isinstance(moment, datetime):
        raise UsageError(f"{what} must be a datetime, not {type(moment).__name__}")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise UsageError(f"{what} must know its timezone: {moment!r} does not; use datetime.now(UTC), say")
    since = moment - EPOCH
    if since < timedelta(0):
        raise UsageError(f"{what} must be after 1970, not {moment!r}")
    if moment >= LATEST:
        raise UsageError(
            f"{what} must be before the year 9999, such as datetime(2999, 1, 1, tzinfo=UTC), not {moment!r}"
        )
    return -(-since // timedelta(milliseconds=1))


def check_between(value: object, what: str, least: int, most: int) -> int:
    """Return `value` if it is a whole number in these bounds. Raises UsageError, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = _shown(value) if isinstance(value, int) else repr(value)
        raise UsageError(f"{what} must be a whole number from {least:,} to {most:,}, not {shown}")
    return value


def check_count(value: object, what: str, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`. Raises UsageError, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = _shown(value) if isinstance(value, int) else repr(value)
        raise UsageError(f"{what} must be a whole number of at least {least}, not {shown}")
    return value
