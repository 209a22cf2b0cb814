"""Encode the arguments and the result of a function as JSON, by the names and types of its signature. Pure.

The payload is the JSON object of all parameters by name, defaults included. So any program that writes such JSON can
call the function. A single positional-only parameter is the whole payload; of type ``bytes``, it gets the unchanged payload.
msgspec encodes and checks the types that it supports; pydantic does so for its models.
"""

from __future__ import annotations

import collections.abc
import datetime as dt
import inspect
import marshal
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from functools import partial
from itertools import count
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import msgspec.inspect

from worqr.codecs import check_not_encoded
from worqr.errors import UsageError, did_you_mean
from worqr.policy import Undecodable
from worqr.validation import encode_in_order, encode_json, is_model, name_of

# Whether a value arrives as it was, when it travels as JSON and is decoded by a type annotation. Pure.
#
# `arrival_of` compiles a check for one annotation. The check compares the value with the decoded one: where the annotation
# says the type, the values must be equal; where it leaves the type open (Any, the items of a bare dict), the value must be of
# a type that JSON has. A class with fields must be the class itself, because the fields of a subclass would be dropped.

_SCALARS: Final = frozenset({str, int, float, bool, NoneType})
_LISTS: Final = (list, tuple, set, frozenset)
_WHOLE_MINUTES: Final = "its zone has no fixed offset of whole minutes"
_BYTES: Final = (bytes, bytearray, memoryview)


class Changed(Exception):
    """A value would arrive as something else. `str` says where and why, as in ``$.when is a datetime and would arrive as str``.

    Attributes:
        value: the value.
        what: what would happen to it, without its place.
        open: True if the annotation leaves its type open, so that a better annotation helps.
    """

    def __init__(self, value: object, what: str, *, open: bool = False) -> None:
        self.value = value
        self.what = what
        self.open = open
        self.places: list[str] = []
        super().__init__(what)

    def inside(self, place: str) -> Changed:
        """Return the error, with one more place in front."""
        self.places.append(place)
        return self

    @property
    def path(self) -> str:
        """The place of the value; ``$`` is the whole."""
        return "$" + "".join(reversed(self.places))

    @property
    def remedy(self) -> str:
        """How to pass the value, as the end of an error."""
        if self.open:
            return (
                ", because no annotation says its type: annotate it precisely, as in `dict[str, datetime]` or a dataclass, or "
                "convert it first"
            )
        return ": convert it to the type that the annotation says, or change the annotation"

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def _kind(value: object) -> str:
    name = type(value).__name__
    return name if name == "bytes" else f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"


def _as_type(value: object, arrived: object, *, open: bool = False) -> Changed:
    return Changed(value, f"is {_kind(value)} and would arrive as {type(arrived).__name__}", open=open)


def _key_as(value: object, key: object, arrived: str, *, open: bool = False) -> Changed:
    return Changed(value, f"has {_kind(key)} as a key, which would arrive as {arrived}", open=open)


def _as_value(value: object, why: str = "") -> Changed:
    return Changed(value, f"is {_kind(value)} that would arrive as another value" + (f", because {why}" if why else ""))


def _field(name: object) -> str:
    text = str(name)
    return f".{text}" if text.isidentifier() else f"[{text[:60]!r}]"


# Open types


def _is_plain(value: object, arrived: object) -> bool:
    """Return True if `value` is made only of what JSON has: exactly None, bool, int, float, str, list, and dict by str.

    False may also be wrong. It asks `marshal`, because that takes exact types only, and is ten times as fast as a walk in Python.
    What it takes beyond JSON (tuples, bytes, sets, keys that are no texts) does not equal what was decoded.
    """
    if type(value) in _SCALARS:
        return True
    try:
        marshal.dumps(cast("Any", value))
    except ValueError:
        return False
    return value == arrived


def _check_open(value: object, arrived: object) -> None:
    """Check a value whose type the annotation leaves open."""
    if _is_plain(value, arrived):
        return
    waiting: list[tuple[object, object, tuple[Any, ...]]] = [(value, arrived, ())]
    while waiting:
        one, other, places = waiting.pop()
        kind = type(one)
        if kind is dict and type(other) is dict:
            items = cast("dict[object, object]", one)
            for key in items:
                if type(key) is not str:
                    raise _at(_key_as(one, key, "str", open=True), places)
            there = cast("dict[object, object]", other)
            waiting += [(each, there.get(key), (places, _field(key))) for key, each in reversed(items.items())]
        elif kind is list and type(other) is list:
            pairs = enumerate(zip(cast("list[object]", one), cast("list[object]", other), strict=False))
            waiting += [(each, there, (places, f"[{i}]")) for i, (each, there) in reversed(list(pairs))]
        elif kind not in _SCALARS:
            raise _at(_as_type(one, other, open=True), places)


def _at(changed: Changed, places: tuple[Any, ...]) -> Changed:
    while places:
        places, place = places
        changed.inside(place)
    return changed


# Checks of the types that annotations name


class Check:
    """The check of one type.

    Attributes:
        equality: equal values need no further look.
        trivial: as a value, it arrives as it was or is refused by the decoder.
        open: it leaves the types of what is in it open, so that JSON's own types arrive as they were.
    """

    equality = True
    trivial = False
    open = False

    def kinds(self) -> Iterable[type]:
        """Return the types that decoded values have; for unions."""
        return ()

    def check(self, value: object, arrived: object) -> None:
        """Raise Changed if `value` arrives as something else."""


class _Open(Check):
    equality = False
    open = True

    def check(self, value: object, arrived: object) -> None:
        _check_open(value, arrived)


class _Leaf(Check):
    """A type without items. `fits` says whether a value of a permitted type has arrived; None is for another type."""

    def __init__(
        self,
        kinds: tuple[type, ...],
        fits: Callable[[Any, Any], bool | None],
        *,
        why: str = "",
        equality: bool = True,
        trivial: bool = False,
    ) -> None:
        self._why = why
        self._kinds = kinds
        self._fits = fits
        self.equality = equality
        self.trivial = trivial

    def kinds(self) -> Iterable[type]:
        return self._kinds

    def check(self, value: object, arrived: object) -> None:
        fits = self._fits(value, arrived)
        if fits is None:
            raise _as_type(value, arrived)
        if not fits:
            raise _as_value(value, self._why)


def _raw(value: object) -> object:
    return cast("object", value.value) if isinstance(value, Enum) else value


def _same_text(value: object, arrived: object) -> bool | None:
    return None if not isinstance(_raw(value), str) else _raw(value) == arrived


def _same_number(value: object, arrived: float) -> bool | None:
    value = _raw(value)
    return value == arrived and math.isfinite(arrived) if isinstance(value, int | float) else None


def _same_bytes(value: Any, arrived: object) -> bool | None:
    return bytes(cast("bytes", value)) == arrived if isinstance(value, _BYTES) else None


def _same_enum(value: object, arrived: object) -> bool | None:
    return value is arrived or value == arrived if isinstance(value, Enum) else True


def _same_datetime(value: object, arrived: dt.datetime) -> bool:
    if not isinstance(value, dt.datetime):
        return True  # its text
    sent, found = value.utcoffset(), arrived.utcoffset()
    if sent is None or found is None:
        return value.tzinfo is arrived.tzinfo and value == arrived
    # Two zones are compared by hand: Python calls times that a clock shows twice unequal.
    return value.replace(tzinfo=None) - sent == arrived.replace(tzinfo=None) - found


def _same_time(value: object, arrived: dt.time) -> bool:
    return not isinstance(value, dt.time) or (value == arrived and (value.tzinfo is None) is (arrived.tzinfo is None))


def _same_decimal(value: object, arrived: Decimal) -> bool:
    return not isinstance(value, Decimal) or str(value) == str(arrived)


def _equal_or_text(value: object, arrived: object) -> bool:
    return isinstance(value, str) or value == arrived


def _items_of(value: object, arrived: object) -> list[object]:
    """Return a value that was encoded as a JSON array: a list, or what can stand for one."""
    if not isinstance(value, _LISTS):
        raise _as_type(value, arrived)
    return cast("list[object]", value)


def _dict_of(value: object, arrived: object) -> dict[object, object]:
    """Return a value that was encoded as a JSON object."""
    if not isinstance(value, dict):
        raise _as_type(value, arrived)
    return cast("dict[object, object]", value)


class _Items(Check):
    """A list or a tuple of any length."""

    def __init__(self, kind: type, item: Check) -> None:
        self._kind = kind
        self._item = item
        self.open = item.open and kind is list
        self.equality = item.equality

    def kinds(self) -> Iterable[type]:
        return (self._kind,)

    def check(self, value: object, arrived: object) -> None:
        values, others = _items_of(value, arrived), cast("list[object]", arrived)
        if self._item.trivial:
            return
        if self.open and type(values) is list and _is_plain(values, others):
            return
        if self.equality and values == others:
            return
        check = self._item
        if isinstance(check, _Fields) and check.are_same(values, others):
            return
        places = count()
        try:
            for _, one, other in zip(places, values, others, strict=False):
                check.check(one, other)
        except Changed as changed:
            raise changed.inside(f"[{next(places) - 1}]") from None


def _check(check: Check, value: object, arrived: object, place: int | str) -> None:
    """Check an item or a field, and put its place in front of the error."""
    if check.equality and value == arrived:
        return
    try:
        check.check(value, arrived)
    except Changed as changed:
        raise changed.inside(f"[{place}]" if isinstance(place, int) else _field(place)) from None


class _Set(Check):
    """A set: the decoded items are in another order."""

    def __init__(self, kind: type, item: Check) -> None:
        self._kind = kind
        self._is_open = type(item) is _Open
        self._item = item
        self.equality = item.equality

    def kinds(self) -> Iterable[type]:
        return (self._kind,)

    def check(self, value: object, arrived: object) -> None:
        others = {each: each for each in cast("set[object]", arrived)}
        for each in _items_of(value, arrived):
            key = each if each in others else _raw(each)
            if key not in others:
                raise Changed(value, f"holds {_kind(each)} that would arrive as another value", open=self._item.open)
            if not self._item.trivial:
                _check(self._item, each, others[key], 0)


class _Fixed(Check):
    """A tuple of one length."""

    def __init__(self, items: list[Check]) -> None:
        self._items = items
        self.equality = all(each.equality for each in items)

    def kinds(self) -> Iterable[type]:
        return (tuple,)

    def check(self, value: object, arrived: object) -> None:
        values, others = _items_of(value, arrived), cast("list[object]", arrived)
        for i, (check, one, other) in enumerate(zip(self._items, values, others, strict=True)):
            _check(check, one, other, i)


class _Dict(Check):
    def __init__(self, key: Check, item: Check) -> None:
        self._key = key
        self._item = item
        self.equality = key.equality and item.equality and float not in key.kinds()  # an infinity equals itself
        self.open = item.open and (key.open or str in key.kinds())

    def kinds(self) -> Iterable[type]:
        return (dict,)

    def check(self, value: object, arrived: object) -> None:
        items, others = _dict_of(value, arrived), cast("dict[object, object]", arrived)
        if self.open and type(items) is dict and _is_plain(items, others):
            return
        if self.equality and items == others:
            return
        if len(items) != len(others):
            raise Changed(items, "has keys that are the same text in JSON, of which only one would arrive")
        for (key, one), (there, other) in zip(items.items(), others.items(), strict=True):
            self._check_key(items, key, there)
            _check(self._item, one, other, str(key))

    def _check_key(self, value: object, key: object, arrived: object) -> None:
        if type(self._key) is _Open:
            if type(key) is not str:
                raise _key_as(value, key, type(arrived).__name__, open=True)
            return
        try:
            self._key.check(key, arrived)
        except Changed:
            same = type(key) is type(arrived)
            raise _key_as(value, key, "another one" if same else type(arrived).__name__) from None


class _Fields(Check):
    """A class with fields: a dataclass, a Struct, an attrs class, a NamedTuple, a TypedDict. The fields are set once."""

    equality = False

    def __init__(self, cls: Any) -> None:
        self._cls: Any = getattr(cls, "__origin__", cls)
        self._tag = getattr(getattr(self._cls, "__struct_config__", None), "tag_field", None)
        self._fields: list[tuple[str, str, Check]] = []
        self._same: Callable[[Any], object] | None = None
        self._others: list[tuple[str, str, Check]] = []

    def fill(self, fields: list[tuple[str, str, Check]]) -> None:
        """Set the fields: the name of each, its name in JSON, and its check."""
        self._fields = fields
        names = [name for name, _, check in fields if check.equality]
        self._others = [field for field in fields if not field[2].equality]
        if names and self._cls is not dict:
            self._same = attrgetter(*names)

    def kinds(self) -> Iterable[type]:
        return (self._cls,)

    def check(self, value: object, arrived: object) -> None:
        if type(value) is type(arrived) and self._cls is not dict:
            same = self._same
            fields = self._others if same is None or same(value) == same(arrived) else self._fields
            for name, _, check in fields:
                _check(check, getattr(value, name), getattr(arrived, name), name)
        elif self._cls is dict or isinstance(value, dict):
            self._check_dict(_dict_of(cast("Any", value), arrived), arrived)
        elif self._tag is None and type(value) in (list, tuple):
            for (name, _, check), one in zip(self._fields, cast("list[object]", value), strict=False):
                _check(check, one, getattr(arrived, name), name)
        else:
            raise _as_type(value, arrived)

    def are_same(self, values: list[object], others: list[object]) -> bool:
        """Return True if all objects arrive as they were. False may also be wrong."""
        same = self._same
        if same is None or self._others or not ({*map(type, values)} == {*map(type, others)} == {self._cls}):
            return False
        return list(map(same, values)) == list(map(same, others))

    def _check_dict(self, value: dict[object, object], arrived: Any) -> None:
        known = {encoded: (name, check) for name, encoded, check in self._fields}
        for key, each in value.items():
            if key == self._tag and key not in known:
                continue
            if type(key) is not str or key not in known:
                raise Changed(
                    value, f"has the key {str(key)[:60]!r}, which its type does not have, so that it would be lost"
                )
            name, check = known[key]
            _check(check, each, arrived[name] if self._cls is dict else getattr(arrived, name), key)


class _Model(Check):
    """A pydantic model, which decodes its fields by rules of its own: both sides are compared."""

    equality = False

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def kinds(self) -> Iterable[type]:
        return (self._cls,)

    def check(self, value: object, arrived: object) -> None:
        if isinstance(value, self._cls) or not isinstance(value, dict):
            _compare(value, arrived)


def _compare(value: Any, arrived: Any) -> None:
    """Compare two values of any types, as far as they can be compared."""
    kind, there = cast("Any", type(value)), cast("Any", type(arrived))
    if kind is not there:
        raise _as_type(value, arrived, open=not is_model(there))
    if kind is dict:
        if list(value) != list(arrived) or list(map(type, value)) != list(map(type, arrived)):
            raise Changed(value, "has keys that would arrive as other keys", open=True)
        for key in cast("dict[object, object]", value):
            _compare_inside(value[key], arrived[key], _field(key))
    elif kind is list or kind is tuple:
        if len(value) != len(arrived):
            raise Changed(value, f"is {_kind(value)} that would arrive with {len(arrived)} items, not {len(value)}")
        for i, (one, other) in enumerate(zip(value, arrived, strict=True)):
            _compare_inside(one, other, f"[{i}]")
    elif is_model(kind):
        fields = cast("dict[str, Any]", kind.model_fields)
        for name in [name for name, field in fields.items() if not field.exclude]:
            _compare_inside(getattr(value, name), getattr(arrived, name), _field(name))
        for name, one in cast("dict[str, object]", value.__pydantic_extra__ or {}).items():
            _compare_inside(one, arrived.__pydantic_extra__[name], _field(name))
    elif kind is dt.datetime:
        if not _same_datetime(value, arrived):
            raise _as_value(value)
    elif not (_same_time(value, arrived) if kind is dt.time else _is_equal(value, arrived)):
        raise _as_value(value)


def _compare_inside(value: object, arrived: object, place: str) -> None:
    try:
        _compare(value, arrived)
    except Changed as changed:
        raise changed.inside(place) from None


def _is_equal(value: Any, arrived: Any) -> bool:
    if cast("Any", type(value)).__eq__ is object.__eq__:
        return True  # nothing says what makes two of them equal
    try:
        return bool(value == arrived)
    except Exception:  # code of the user
        return True


class _Union(Check):
    """One of several types. The type of the decoded value says which."""

    def __init__(self, checks: list[Check]) -> None:
        self._checks = checks
        self.equality = all(each.equality for each in checks)
        self.trivial = all(each.trivial for each in checks)
        self.open = any(each.open for each in checks)  # JSON's own types arrive through the others as well
        self._by_kind: dict[type, Check] | None = None

    def kinds(self) -> Iterable[type]:
        return [kind for each in self._checks for kind in each.kinds()]

    def check(self, value: object, arrived: object) -> None:
        if self._by_kind is None:
            self._by_kind = {kind: each for each in reversed(self._checks) for kind in each.kinds()}
        if (check := self._by_kind.get(type(arrived))) is not None:
            check.check(value, arrived)


_LEAVES: Final[dict[type[msgspec.inspect.Type], Callable[[], Check]]] = {
    msgspec.inspect.NoneType: lambda: _Leaf(
        (NoneType,), lambda value, _: True if value is None else None, trivial=True
    ),
    msgspec.inspect.BoolType: lambda: _Leaf(
        (bool,), lambda value, _: True if isinstance(value, bool) else None, trivial=True
    ),
    msgspec.inspect.IntType: lambda: _Leaf((int,), _same_number, trivial=True),
    msgspec.inspect.FloatType: lambda: _Leaf((float,), _same_number, why="no float has it"),
    msgspec.inspect.StrType: lambda: _Leaf((str,), _same_text),
    msgspec.inspect.BytesType: lambda: _Leaf((bytes,), _same_bytes),
    msgspec.inspect.ByteArrayType: lambda: _Leaf((bytearray,), _same_bytes),
    msgspec.inspect.MemoryViewType: lambda: _Leaf((memoryview,), _same_bytes),
    msgspec.inspect.DateTimeType: lambda: _Leaf((dt.datetime,), _same_datetime, why=_WHOLE_MINUTES),
    msgspec.inspect.DateType: lambda: _Leaf((dt.date,), _equal_or_text),
    msgspec.inspect.TimeType: lambda: _Leaf((dt.time,), _same_time, why=_WHOLE_MINUTES, equality=False),
    msgspec.inspect.TimeDeltaType: lambda: _Leaf((dt.timedelta,), _equal_or_text),
    msgspec.inspect.UUIDType: lambda: _Leaf((UUID,), _equal_or_text),
    msgspec.inspect.DecimalType: lambda: _Leaf((Decimal,), _same_decimal),
}


def arrival_of(hint: object) -> Check:
    """Return the check for values of an annotation. Its `check` raises `Changed`."""
    return _compiled(msgspec.inspect.type_info(hint), {})


def _compiled(info: Any, known: dict[int, Check]) -> Check:
    if isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    kind = cast("Any", type(info))
    if kind in _LEAVES:
        return _LEAVES[kind]()
    if id(info) in known:
        return known[id(info)]  # a type that contains itself
    match info:
        case msgspec.inspect.ListType():
            return _Items(list, _compiled(info.item_type, known))
        case msgspec.inspect.VarTupleType():
            return _Items(tuple, _compiled(info.item_type, known))
        case msgspec.inspect.SetType():
            return _Set(set, _compiled(info.item_type, known))
        case msgspec.inspect.FrozenSetType():
            return _Set(frozenset, _compiled(info.item_type, known))
        case msgspec.inspect.TupleType():
            return _Fixed([_compiled(each, known) for each in info.item_types])
        case msgspec.inspect.DictType():
            return _Dict(_compiled(info.key_type, known), _compiled(info.value_type, known))
        case msgspec.inspect.UnionType():
            checks = [_compiled(each, known) for each in info.types]
            return next((each for each in checks if type(each) is _Open), None) or _Union(checks)
        case msgspec.inspect.EnumType():
            return _Leaf((info.cls,), _same_enum)
        case msgspec.inspect.LiteralType():
            return _Leaf(tuple({type(each) for each in info.values}), lambda value, arrived: _raw(value) == arrived)
        case msgspec.inspect.AnyType():
            return _Open()
        case msgspec.inspect.CustomType():
            return _Model(info.cls) if is_model(info.cls) else _Open()
        case msgspec.inspect.TypedDictType():
            return _with_fields(dict, info, known)
        case msgspec.inspect.DataclassType() | msgspec.inspect.StructType() | msgspec.inspect.NamedTupleType():
            return _with_fields(info.cls, info, known)
        case _:
            return _Leaf((), lambda _value, _arrived: True, trivial=True)  # what only msgspec has, as `Raw`


def _with_fields(cls: Any, info: Any, known: dict[int, Check]) -> _Fields:
    known[id(info)] = check = _Fields(cls)
    check.fill([(each.name, each.encode_name, _compiled(each.type, known)) for each in info.fields])
    return check


# Encode the arguments and the result of a function as JSON, by the names and types of its signature.

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
                remedy = f": let its annotation say so, as in `{name}: int | None = None`" if value is None else ""
                raise UsageError(f"{self.name}: the default of {name!r} cannot travel: {error}{remedy}") from None
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
        names = self._names
        if not kwargs and len(args) == self._positional == len(names):  # as most calls are: they take the shortest way
            return {names[0]: args[0]} if len(args) == 1 else dict(zip(names, args))  # noqa: B905 strict= takes long
        values = dict(zip(names, args, strict=False))
        if len(args) <= self._positional and not (kwargs.keys() & values.keys()) and kwargs.keys() <= self._by_keyword:
            found: dict[str, Any] = {}
            for name in names:
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
        except Exception as error:  # of the `==` of a value
            raise codec.refusal(name, error) from error
        return task

    def named(self, values: Mapping[str, Any]) -> bytes:
        """Return values that `encode` takes as they name a call: as a payload, with sets and objects in the same order in each
        process.

        Raises:
            UsageError: a set has values that have no order.
        """
        if (self._codec or self.ready()).raw:
            return self.encode(values)
        try:
            if self.payload_is_argument:
                return encode_in_order(values[self._names[0]])
            return msgspec.json.encode({name: msgspec.Raw(encode_in_order(value)) for name, value in values.items()})
        except TypeError as error:
            raise UsageError(
                f"{self.name}: this call cannot be named by its arguments: {error}; pass a list in place of the set"
            ) from None

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
        self._name = name
        self._arrivals = {each.name: arrival_of(hints[each.name]) for each in parameters}
        self.raw: bool = payload_is_argument and [*self._arrivals[parameters[0].name].kinds()] == [bytes]
        self.decode: Callable[[bytes], Any] = partial(msgspec.convert, type=shape) if self.raw else decoder_of(shape)
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

    def refusal(self, parameter: str, error: Exception) -> UsageError:
        """Return the error about an argument that would arrive as something else, or cannot be compared with what arrives."""
        if isinstance(error, RecursionError):
            return UsageError(f"{self._name}: argument {parameter!r} is nested too deeply")
        if not isinstance(error, Changed):
            return UsageError(
                f"{self._name}: argument {parameter!r} cannot be compared with what would arrive "
                f"({type(error).__name__}: {error}): pass it as plain JSON, such as a str or a list"
            )
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


_LIST_HINTS: Final[tuple[object, ...]] = (
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

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """Encode one element as a payload."""
        try:
            return super().encode(values)
        except UsageError as error:
            if not any(isinstance(value, list | tuple | set) for value in values.values()):
                raise
            short = self.name.rpartition(".")[2]
            text = f"{error}; a call is one element of the list: for several, mesh.enqueue_many(map({short}.call, elements))"
            raise UsageError(text) from error.__cause__

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
    if hint in _ANY or hint in _LIST_HINTS:
        return Any
    return get_args(hint)[0] if get_origin(hint) in _LIST_HINTS and get_args(hint) else None


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)


def _is_exception(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseException)
