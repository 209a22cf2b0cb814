"""A call as a value: which function, with which arguments, encoded, and nothing sent.

The payload is what any producer in any language would push: the JSON object of the arguments by name, or the one
positional argument whole. Not to be confused with `worqr.call.Call`, which is a request to the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

from worqr.errors import UsageError
from worqr.keys import check_name
from worqr.task import check_task, encode_json

R_co = TypeVar("R_co", covariant=True)

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """A call of the function `name`, its arguments checked and encoded; nothing was sent.

    Attributes:
        name: the function's, which is the name of its queue.
        args: the positional arguments, as they were given.
        kwargs: the others.
        task: the payload.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    task: bytes


def named_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], max_payload: int) -> Call[Any]:
    """A call of a function that lives elsewhere, of which nothing is known but its name.

    Raises:
        UsageError: a bad name, arguments that JSON cannot carry, or positional ones, which only the function can name.
        PayloadTooLarge: over `max_payload` bytes.
    """
    check_name(name, "function name")
    if args and (kwargs or len(args) > 1):
        raise UsageError(
            f"call({name!r}, ...): positional arguments need the function itself, which knows their names; "
            "by name alone give keyword arguments, or the whole payload as the only one"
        )
    if args and isinstance(args[0], bytes | bytearray | memoryview):
        task = bytes(cast("bytes", args[0]))
    else:
        try:
            task = encode_json(args[0] if args else kwargs)
        except _UNENCODABLE as error:
            raise UsageError(f"call({name!r}, ...): JSON cannot carry these arguments: {error}") from error
    return Call(name, args, kwargs, check_task(task, max_payload))
