"""`Call`: one call of a function as a value, with its arguments encoded. Nothing is sent.

`worqr.client.producer` sends calls; functions (`worqr.functions.function`) make them. Not to be confused with
`worqr.script_call.Call`, which is a request to the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import msgspec

from worqr.client.job import Results
from worqr.errors import UsageError
from worqr.keys import check_name
from worqr.validation import check_task, encode_json

R_co = TypeVar("R_co", covariant=True)

_UNENCODABLE: Final = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, msgspec.MsgspecError)


class CallTarget(Protocol):
    """The function that a call is for. `worqr.functions.definition` has it."""

    @property
    def name(self) -> str:
        """The function's name, with the prefix of `include`."""
        ...

    @property
    def results(self) -> Results:
        """The codec of its results."""
        ...

    def require_client(self) -> object:
        """Raise UsageError if the function belongs to no mesh."""
        ...


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """A call of a function, with its arguments checked and encoded. Nothing was sent. Calls of one function and payload are
    equal.

    Make it with ``function.call(...)`` or ``mesh.call(name, ...)``; send it with ``mesh.enqueue_many`` or
    ``mesh.dispatch_many``.
    """

    name: str
    """The function's name."""
    args: tuple[Any, ...] = field(compare=False)
    """The positional arguments, defaults included."""
    kwargs: dict[str, Any] = field(compare=False)
    """The keyword-only arguments."""
    task: bytes
    """The payload."""
    _options: Mapping[str, object] = field(default_factory=dict[str, object], compare=False, repr=False)
    _target: CallTarget | None = field(default=None, compare=False, repr=False)

    @property
    def queue(self) -> str:
        """The name of the queue that the call goes to. It is the function's name, with the prefix of `include`."""
        return self.name if self._target is None else self._target.name

    @property
    def _results(self) -> Results | None:
        """The codec of its result; None for a function that is declared in another program."""
        return None if self._target is None else self._target.results


def named_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], max_payload: int) -> Call[Any]:
    """Return a call of a function that is declared in another program, so that only its name is known.

    Raises:
        UsageError: the name is not valid, JSON cannot represent the arguments, or there are positional arguments, whose names
            only the function has.
        PayloadTooLarge: the payload is larger than `max_payload` bytes.
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
