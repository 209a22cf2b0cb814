"""Whether a value arrives as it was, when it travels as JSON and is decoded by a type annotation. Pure.

`arrival_of` compiles a check for one annotation. The check compares the value with the decoded one: where the annotation says
the type, the values must be equal; where it leaves the type open (Any, the items of a bare dict), the value must be of a type
that JSON has. A class with fields must be the class itself, because the fields of a subclass would be dropped.
"""

from __future__ import annotations

import datetime as dt
import marshal
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from itertools import count
from operator import attrgetter
from types import NoneType
from typing import Any, Final, cast
from uuid import UUID

from msgspec import inspect

from worqr.validation import is_model

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


_LEAVES: Final[dict[type[inspect.Type], Callable[[], Check]]] = {
    inspect.NoneType: lambda: _Leaf((NoneType,), lambda value, _: True if value is None else None, trivial=True),
    inspect.BoolType: lambda: _Leaf((bool,), lambda value, _: True if isinstance(value, bool) else None, trivial=True),
    inspect.IntType: lambda: _Leaf((int,), _same_number, trivial=True),
    inspect.FloatType: lambda: _Leaf((float,), _same_number, why="no float has it"),
    inspect.StrType: lambda: _Leaf((str,), _same_text),
    inspect.BytesType: lambda: _Leaf((bytes,), _same_bytes),
    inspect.ByteArrayType: lambda: _Leaf((bytearray,), _same_bytes),
    inspect.MemoryViewType: lambda: _Leaf((memoryview,), _same_bytes),
    inspect.DateTimeType: lambda: _Leaf((dt.datetime,), _same_datetime, why=_WHOLE_MINUTES),
    inspect.DateType: lambda: _Leaf((dt.date,), _equal_or_text),
    inspect.TimeType: lambda: _Leaf((dt.time,), _same_time, why=_WHOLE_MINUTES, equality=False),
    inspect.TimeDeltaType: lambda: _Leaf((dt.timedelta,), _equal_or_text),
    inspect.UUIDType: lambda: _Leaf((UUID,), _equal_or_text),
    inspect.DecimalType: lambda: _Leaf((Decimal,), _same_decimal),
}


def arrival_of(hint: object) -> Check:
    """Return the check for values of an annotation. Its `check` raises `Changed`."""
    return _compiled(inspect.type_info(hint), {})


def _compiled(info: Any, known: dict[int, Check]) -> Check:
    if isinstance(info, inspect.Metadata):
        info = info.type
    kind = cast("Any", type(info))
    if kind in _LEAVES:
        return _LEAVES[kind]()
    if id(info) in known:
        return known[id(info)]  # a type that contains itself
    match info:
        case inspect.ListType():
            return _Items(list, _compiled(info.item_type, known))
        case inspect.VarTupleType():
            return _Items(tuple, _compiled(info.item_type, known))
        case inspect.SetType():
            return _Set(set, _compiled(info.item_type, known))
        case inspect.FrozenSetType():
            return _Set(frozenset, _compiled(info.item_type, known))
        case inspect.TupleType():
            return _Fixed([_compiled(each, known) for each in info.item_types])
        case inspect.DictType():
            return _Dict(_compiled(info.key_type, known), _compiled(info.value_type, known))
        case inspect.UnionType():
            checks = [_compiled(each, known) for each in info.types]
            return next((each for each in checks if type(each) is _Open), None) or _Union(checks)
        case inspect.EnumType():
            return _Leaf((info.cls,), _same_enum)
        case inspect.LiteralType():
            return _Leaf(tuple({type(each) for each in info.values}), lambda value, arrived: _raw(value) == arrived)
        case inspect.AnyType():
            return _Open()
        case inspect.CustomType():
            return _Model(info.cls) if is_model(info.cls) else _Open()
        case inspect.TypedDictType():
            return _with_fields(dict, info, known)
        case inspect.DataclassType() | inspect.StructType() | inspect.NamedTupleType():
            return _with_fields(info.cls, info, known)
        case _:
            return _Leaf((), lambda _value, _arrived: True, trivial=True)  # what only msgspec has, as `Raw`


def _with_fields(cls: Any, info: Any, known: dict[int, Check]) -> _Fields:
    known[id(info)] = check = _Fields(cls)
    check.fill([(each.name, each.encode_name, _compiled(each.type, known)) for each in info.fields])
    return check
