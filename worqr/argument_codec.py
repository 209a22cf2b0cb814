"""Encode the arguments and the result of a function as JSON, by the names and types of its signature. Pure.

The payload is the JSON object of all parameters by name, defaults included. So any program that writes such JSON can
call the function. A single positional-only parameter is the whole payload; of type ``bytes``, it gets the unchanged payload.
msgspec encodes and checks the types that it supports; pydantic does so for its models.
"""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import msgspec.inspect

from worqr.arrival import Changed, Check, arrival_of
from worqr.codecs import check_not_encoded
from worqr.errors import UsageError, did_you_mean
from worqr.policy import Undecodable
from worqr.validation import encode_json, is_model, name_of

# The types that JSON can carry: which annotations can be used, and the decoder of each. Pure.
#
# msgspec decodes and checks the types that it supports; pydantic does so for its models.


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


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNTYPED: Final[tuple[object, ...]] = (Any, object)
"""Annotations without information; a parameter without an annotation counts as Any."""
_MISSING: Final = object()
_UNRESOLVED: Final = (NameError, AttributeError)
"""The errors of an annotation whose names are defined later, or only for type checkers."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments: each parameter is in one of them, defaults as well."""


class ArgumentCodec:
    """Encodes and decodes the arguments of `function`. `name` is its name in errors. `stores_result`: workers keep its result.

    Types are resolved when the function is declared. If they name something that is defined later, they are resolved at first
    use.

    Raises:
        UsageError: a parameter that cannot be serialized (``*args``), or a type that neither msgspec nor pydantic supports.
    """

    def __init__(self, function: Callable[..., object], name: str, *, stores_result: bool = False) -> None:
        self.name: str = name
        self._stores_result = stores_result
        self._function = function
        self._signature = self._signature_of(function)
        self._parameters = list(self._signature.parameters.values())
        for each in self._parameters:
            if each.kind in _VARIABLE:
                stars = "*" if each.kind is inspect.Parameter.VAR_POSITIONAL else "**"
                raise UsageError(
                    f"{name}: {stars}{each.name} has no fixed names and types to travel by: name its parameters, or take "
                    "one list or dict"
                )
        self._names = [each.name for each in self._parameters]
        self._positional = sum(each.kind in _POSITIONAL for each in self._parameters)
        self._by_keyword = frozenset(
            each.name for each in self._parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY
        )
        self._defaults = {
            each.name: each.default for each in self._parameters if each.default is not inspect.Parameter.empty
        }
        only = self._parameters[0] if len(self._parameters) == 1 else None
        self.payload_is_argument: bool = only is not None and only.kind is inspect.Parameter.POSITIONAL_ONLY
        self._codec: _Codec | None = None
        self._try_to_resolve()

    def _try_to_resolve(self) -> None:
        try:
            self._resolve()
        except _UNRESOLVED:
            pass  # `ready` tries again at first use

    def store_results(self, stores: bool) -> None:
        """Say again whether workers keep the result, because a default of the mesh decides."""
        if stores is not self._stores_result:
            self._stores_result, self._codec = stores, None
            self._try_to_resolve()

    def _signature_of(self, function: Callable[..., object]) -> inspect.Signature:
        """Return the signature of a call."""
        try:
            return inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self.name}: its parameters are not known ({error}), so it cannot be called by name"
            ) from None

    @property
    def parameters(self) -> Sequence[inspect.Parameter]:
        """The parameters of a call."""
        return self._parameters

    def rename(self, name: str) -> None:
        """Use another name in errors."""
        self.name = name

    def check_parameter(self, name: str, what: str) -> None:
        """Raise UsageError, which names `what`, if the function has no parameter of this name."""
        if name not in self._names:
            known = f"it has {', '.join(self._names)}" if self._names else "it has none"
            raise UsageError(
                f"{what} of {self.name!r} names a parameter {name!r}; {did_you_mean(name, self._names, known)}"
            )

    # Types

    def _resolve(self) -> _Codec:
        try:
            found = get_type_hints(annotated(self._function), include_extras=True)
        except _UNRESOLVED:
            raise
        except Exception as error:  # an annotation is code of the user, which may raise anything
            raise UsageError(f"{self.name}: its annotations cannot be read: {type(error).__name__}: {error}") from None
        hints = self._hints_of(found)
        if not self._stores_result and not is_known(hints["return"]):
            hints["return"] = Any  # worqr does not use the annotation of a result that is not kept
        codec = _Codec(self.name, self._parameters, hints, payload_is_argument=self.payload_is_argument)
        for name, value in self._defaults.items():
            try:
                if not codec.raw:
                    codec.check_default(name, value)
                elif not isinstance(codec.decode(value), type(value)):
                    raise TypeError(f"{value!r} is not bytes")
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(f"{self.name}: the default of {name!r} cannot travel: {error}") from None
        self._codec = codec
        return codec

    def _hints_of(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of the parameters of a call, and of its result."""
        return {name: found.get(name, Any) for name in (*self._names, "return")}

    def ready(self) -> _Codec:
        """Return the codec.

        Raises:
            UsageError: an annotation names something that does not exist when the program runs.
        """
        if self._codec is not None:
            return self._codec
        try:
            return self._resolve()
        except _UNRESOLVED as error:
            raise UsageError(
                f"{self.name}: an annotation names what is not there when it runs ({error}): import it outside of "
                "`if TYPE_CHECKING:`, or define it at the top of the module"
            ) from None

    # Calling

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each parameter in order, defaults included.

        Raises:
            TypeError: Python would reject such a call too.
        """
        values = dict(zip(self._names, args, strict=False))
        if len(args) <= self._positional and not (kwargs.keys() & values.keys()) and kwargs.keys() <= self._by_keyword:
            found: dict[str, Any] = {}
            for name in self._names:
                value = values.get(name, _MISSING)
                if value is _MISSING:
                    value = kwargs.get(name, _MISSING)
                    if value is _MISSING:
                        value = self._defaults.get(name, _MISSING)
                        if value is _MISSING:
                            break
                found[name] = value
            else:
                return found
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        raise AssertionError(f"{self.name}: the call was refused without a reason")

    def split(self, values: Mapping[str, Any]) -> Arguments:
        """Return the values of all parameters, in their order, as positional and keyword arguments."""
        if self._positional == len(self._names):
            return tuple(values.values()), {}
        positional = self._names[: self._positional]
        return tuple([values[name] for name in positional]), {
            name: values[name] for name in self._names[self._positional :]
        }

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """Encode these values as a payload; their types are checked as in the worker.

        Raises:
            UsageError: the handler would reject it, or JSON cannot represent it.
        """
        codec = self._codec or self.ready()
        if codec.raw:
            task = values[self._names[0]]
            if not isinstance(task, bytes | bytearray | memoryview):
                raise UsageError(f"{self.name}: it takes bytes, not {type(task).__name__}")
            task = bytes(cast("bytes", task))
        else:
            try:
                task = encode_json(values[self._names[0]] if self.payload_is_argument else values)
            except Exception as error:  # the encoder of a user's type may raise anything
                raise UsageError(f"{self.name}: JSON cannot carry these arguments: {error}") from error
        try:
            arrived = codec.decode(task)
        except Exception as error:
            raise UsageError(f"{self.name}: invalid arguments: {error}") from error
        name = ""
        try:
            for name, field, check in codec.checks:
                value, found = values[name], arrived if self.payload_is_argument else getattr(arrived, field)
                if not (check.equality and value == found):
                    check.check(value, found)
        except (Changed, RecursionError) as error:
            raise codec.refusal(name, error) from None
        return task

    def decode(self, task: bytes) -> Arguments:
        """Decode the arguments from `task`. Fields of newer producers are ignored; missing fields have their defaults.

        Raises:
            Undecodable: it is not JSON, or not of these types.
            WrongKey: it is encoded, and this mesh has no codec.
        """
        codec = self._codec or self.ready()
        try:
            value = codec.decode(task)
        except MemoryError:
            raise  # the payload may be valid
        except Exception as error:  # an error of msgspec, or of a type with its own checks
            check_not_encoded(task)
            raise Undecodable(f"{self.name}: {type(error).__name__}: {error}{_remedy(error)}") from error
        if self.payload_is_argument:
            return (value,), {}
        values = msgspec.structs.astuple(value)
        if self._positional == len(values):
            return values, {}
        return values[: self._positional], dict(
            zip(self._names[self._positional :], values[self._positional :], strict=True)
        )

    def decode_result(self, kind: str, value: bytes) -> Any:
        """Decode the function's stored result.

        Raises:
            UsageError: it is not of the function's annotated return type.
        """
        codec = self.ready()
        try:
            if kind == "bytes":
                return msgspec.convert(value, codec.result)
            return codec.decode_result(b"null" if kind == "none" else value)
        except Exception as error:
            check_not_encoded(value)
            raise UsageError(
                f"{self.name}: the result is not what it is said to return ({error}): it returned something else, or "
                "another version of it ran"
            ) from error

    def result_change(self, value: object) -> str:
        """Return how a result differs from what a caller would get; empty if it does not, or cannot be stored.

        It is not refused: its task has run, and must not fail or run again because of its result.
        """
        codec = self._codec
        if (
            codec is None
            or codec.result_arrival.trivial
            or value is None
            or isinstance(value, bytes | bytearray | memoryview)
        ):
            return ""
        try:
            arrived = codec.decode_result(encode_json(value))
            codec.result_arrival.check(value, arrived)
        except Changed as changed:
            return f"{changed}{changed.remedy}"
        except Exception:  # of another type than annotated, or no JSON: that is reported where it is stored or read
            return ""
        return ""


def _remedy(error: Exception) -> str:
    """Return the remedy for a payload that does not decode."""
    if not isinstance(error, msgspec.MsgspecError):
        return ""
    if not isinstance(error, msgspec.ValidationError):
        return ". A function takes JSON: enqueue calls of it, or an object with its arguments by name"
    if "missing required field" in str(error):
        return ". Give a new parameter a default, so that calls from older programs still run"
    return ". Compare the signature of the function in the program that enqueued it"


class _Codec:
    """Decoders for the types of one signature."""

    def __init__(
        self, name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any], *, payload_is_argument: bool
    ) -> None:
        for what, hint in hints.items():
            check_known(name, what, hint)
        shape = hints[parameters[0].name] if payload_is_argument else _argument_struct(parameters, hints)
        self.raw: bool = payload_is_argument and isinstance(msgspec.inspect.type_info(shape), msgspec.inspect.BytesType)
        self.decode: Callable[[bytes], Any] = partial(msgspec.convert, type=shape) if self.raw else decoder_of(shape)
        self._name = name
        self._arrivals = {each.name: arrival_of(hints[each.name]) for each in parameters}
        self.hints: Mapping[str, Any] = hints
        self.checks: list[tuple[str, str, Check]] = [
            (each.name, f"p{i}", self._arrivals[each.name])
            for i, each in enumerate(parameters)
            if not (self.raw or self._arrivals[each.name].trivial)
        ]
        self.result: Any = hints["return"]
        self.decode_result: Callable[[bytes], Any] = decoder_of(self.result)
        self.result_arrival: Check = arrival_of(self.result)

    def check_default(self, parameter: str, value: object) -> None:
        """Raise UsageError if a default would not arrive."""
        try:
            self._arrivals[parameter].check(value, decoder_of(self.hints[parameter])(encode_json(value)))
        except (Changed, RecursionError) as error:
            raise self.refusal(parameter, error) from None

    def refusal(self, parameter: str, error: Changed | RecursionError) -> UsageError:
        """Return the error about an argument that would arrive as something else."""
        if isinstance(error, RecursionError):
            return UsageError(f"{self._name}: argument {parameter!r} is nested too deeply")
        return UsageError(f"{self._name}: argument {parameter!r}: {error}{self._remedy(parameter, error)}")

    def _remedy(self, parameter: str, changed: Changed) -> str:
        """Return how to pass the value."""
        kind = type(changed.value)
        if changed.open and changed.path == "$" and self.hints[parameter] in _UNTYPED and kind is not dict:
            example = "bytes" if kind is bytearray or kind is memoryview else kind.__name__
            return f", because the parameter has no type annotation: annotate it, as in `{parameter}: {example}`"
        return changed.remedy


def _argument_struct(parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> type[msgspec.Struct]:
    """Return a struct with a field for each parameter. Their names are generated, because not every name is valid for a field."""
    fields: list[Any] = []
    for i, each in enumerate(parameters):
        field = (f"p{i}", hints[each.name])
        if each.default is inspect.Parameter.empty:
            fields.append(field)
        else:
            fields.append((*field, msgspec.field(default_factory=_same_value(each.default))))
    rename = {f"p{i}": each.name for i, each in enumerate(parameters)}
    return msgspec.defstruct("Arguments", fields, kw_only=True, rename=rename, gc=False)


def _same_value(value: object) -> Callable[[], object]:
    """Return a factory of the default itself: like in Python, a mutable default is shared."""
    return lambda: value


# Encode one call of a function that takes a list: a call is one element of the list. Pure.
#
# The payload is the JSON of the element, or the element itself if it is ``bytes``.


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
