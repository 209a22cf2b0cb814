"""Encode one call of a function that takes a list: a call is one element of the list. Pure.

The payload is the JSON of the element, or the element itself if it is ``bytes``.
"""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from worqr.argument_codec import ArgumentCodec
from worqr.errors import UsageError

_LISTS: Final[tuple[object, ...]] = (
    *(list, collections.abc.Sequence, collections.abc.MutableSequence),
    *(collections.abc.Collection, collections.abc.Iterable),
)
_ANY: Final[tuple[object, ...]] = (Any, object)


class ListCodec(ArgumentCodec):
    """Encodes and decodes one element of the list that a function takes.

    Raises:
        UsageError: the function does not take exactly one list, or returns something else than a list or None.
    """

    def _signature_of(self, function: Any) -> inspect.Signature:
        parameters = list(super()._signature_of(function).parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if (
            len(parameters) != 1
            or parameters[0].kind not in kinds
            or parameters[0].default is not inspect.Parameter.empty
        ):
            raise UsageError(
                f"{self.name}: with batch_size, a function takes one list of calls and nothing else, as in "
                "def index(pages: list[Page])"
            )
        annotation = parameters[0].annotation
        one = annotation.partition("[")[2][:-1] if isinstance(annotation, str) else _element_of(annotation)
        kind = inspect.Parameter.POSITIONAL_ONLY
        return inspect.Signature([parameters[0].replace(kind=kind, annotation=one or inspect.Parameter.empty)])

    def _hints_of(self, found: Mapping[str, Any]) -> dict[str, Any]:
        hints = super()._hints_of(found)
        return {
            name: self._result(hint) if name == "return" else self._element(name, hint) for name, hint in hints.items()
        }

    def _element(self, name: str, hint: Any) -> Any:
        """Return the type of one call."""
        element = _element_of(hint)
        if element is None:
            raise UsageError(
                f"{self.name}: with batch_size, the function gets a list of calls, and its parameter {name!r} is no list: "
                f"annotate it as in `{name}: list[{getattr(hint, '__name__', 'Page')}]`"
            )
        return element

    def _result(self, hint: Any) -> Any:
        """Return the type of the result of one call: what the list may have, except exceptions."""
        if hint in _ANY or hint is NoneType:
            return hint
        choices = _choices(hint)
        kept: list[Any] = [NoneType] if NoneType in choices else []
        for choice in choices:
            element = None if choice is NoneType else _element_of(choice)
            if choice is not NoneType and element is None:
                raise UsageError(
                    f"{self.name}: with batch_size, the function returns None or a list with one outcome for each call, and "
                    f"it is annotated to return {hint!r}: write `-> list[str | Exception]` for results that are str"
                )
            kept += [each for each in _choices(element) if element is not None and not _is_exception(each)]
        return Union[tuple(kept)] if kept else NoneType  # noqa: UP007 - of a tuple


def _element_of(hint: Any) -> Any:
    """Return the type of the elements of a list type; None if it is another type."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if hint in _ANY or hint in _LISTS:
        return Any
    return get_args(hint)[0] if get_origin(hint) in _LISTS and get_args(hint) else None


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)


def _is_exception(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseException)
