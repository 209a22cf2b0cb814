"""The types that JSON can carry: which annotations can be used, and the decoder of each. Pure.

msgspec decodes and checks the types that it supports; pydantic does so for its models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import msgspec
import msgspec.inspect

from worqr.errors import UsageError
from worqr.validation import is_model, name_of


def decoder_of(hint: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes JSON as the type `hint`."""
    return msgspec.json.Decoder(hint, dec_hook=_decode_custom).decode


def annotated(function: Callable[..., object]) -> object:
    """Return the object that has the annotations of a callable."""
    while isinstance(function, partial):
        function = cast("Callable[..., object]", function.func)  # pyright: ignore[reportUnknownMemberType]
    known = inspect.isroutine(function) or hasattr(function, "__wrapped__")
    return function if known else type(function).__call__


def _decode_custom(kind: type[Any], value: Any) -> Any:
    """Decode a type that msgspec does not support: a pydantic model, by pydantic's rules for JSON.

    The error texts of pydantic quote the payload, which must not be logged, so the texts without values are used.
    """
    if kind is object:
        return value
    try:
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        errors = getattr(error, "errors", None)
        if errors is None:
            raise
        found = errors(include_input=False, include_url=False, include_context=False)
        texts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found]
    raise ValueError(f"{kind.__name__}: {'; '.join(texts)}")


def is_known(hint: object) -> bool:
    """Return True if JSON can carry the type `hint`."""
    try:
        return all(map(_is_serializable, _customs(msgspec.inspect.type_info(hint), set())))
    except TypeError:
        return False


def check_known(name: str, what: str, hint: object) -> None:
    """Raise UsageError if JSON cannot carry the type `hint` of the parameter `what`, or of the ``return``, of `name`."""
    about = f"{name}: {'what it returns' if what == 'return' else f'parameter {what!r}'}"
    try:
        info = msgspec.inspect.type_info(hint)
    except TypeError as error:
        raise UsageError(f"{about} has a type that cannot travel: {error}") from None
    for custom in _customs(info, set()):
        if hasattr(custom, "__pydantic_fields__") and not is_model(custom):
            raise UsageError(
                f"{about} has the type {name_of(custom)}: of pydantic, take a BaseModel; the checks of its "
                "dataclasses would not be made"
            )
        if not _is_serializable(custom):
            raise UsageError(
                f"{about} has the type {name_of(custom)}, which JSON does not know; take a dataclass, a msgspec.Struct, a "
                "pydantic model, or what names the thing (an id)"
            )


def _is_serializable(custom: type) -> bool:
    """Return True if JSON supports a value that msgspec does not: a pydantic model; or, for ``object``, a JSON value."""
    return is_model(custom) or custom is object


def _customs(info: object, seen: set[int]) -> Iterator[type]:
    """Yield the types inside `info` that msgspec does not support, and pydantic's dataclasses, whose checks it would not run."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType) or _is_pydantic_dataclass(info):
        yield cast("Any", info).cls
    elif isinstance(info, tuple | list):
        for each in cast("tuple[object, ...]", info):
            yield from _customs(each, seen)
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        for name in info.__struct_fields__:
            yield from _customs(getattr(info, name), seen)


def _is_pydantic_dataclass(info: object) -> bool:
    return isinstance(info, msgspec.inspect.DataclassType) and hasattr(info.cls, "__pydantic_fields__")
