"""How arguments and results travel: every type that is promised, every kind of parameter, and payloads of strangers."""

from __future__ import annotations

import enum
import inspect
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worqr import Undecodable, UsageError
from worqr.argument_codec import ArgumentCodec, Arguments
from worqr.peer.run import encode_result

if TYPE_CHECKING:
    from nowhere import Nothing  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

T = TypeVar("T")
Function = Callable[..., Any]


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Other(enum.Enum):
    ONE = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(enum.Enum):
    ONE = (1, 2)


@dataclass
class Line:
    sku: str
    price: Decimal
    amount: int = 1


@dataclass
class Order:
    id: UUID
    at: datetime
    lines: list[Line] = field(default_factory=list)
    color: Color = Color.RED


@dataclass
class Tree:
    name: str
    leaves: list[Tree] = field(default_factory=list)


@dataclass(frozen=True)
class Box(Generic[T]):
    inside: T


class Point(msgspec.Struct):
    x: float
    y: float = 0.0


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


class Crate(msgspec.Struct, Generic[T]):
    inside: T


class Place(NamedTuple):
    street: str
    number: int = 1


class Options(TypedDict):
    width: int
    title: NotRequired[str]


@attrs.define
class Wheel:
    size: int
    spokes: list[int] = attrs.Factory(list)


class User(pydantic.BaseModel):
    name: str = pydantic.Field(alias="Name", min_length=1)
    born: date | None = None
    tags: set[str] = set()


class Team(pydantic.BaseModel):
    lead: User
    size: int = 1


@pydantic.dataclasses.dataclass
class Checked:
    number: Annotated[int, pydantic.Field(gt=0)]


Name = NewType("Name", str)
Blob = NewType("Blob", bytes)
Small = Annotated[int, msgspec.Meta(ge=0, lt=10)]
Short = Annotated[bytes, msgspec.Meta(max_length=3)]
Anything = TypeVar("Anything")

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456)
ORDER = Order(UUID(int=7), NOON, [Line("a", Decimal("1.10")), Line("b", Decimal(2), 3)], Color.GREEN)

TYPES: dict[str, tuple[Any, Any]] = {
    "int": (int, -7),
    "large int": (int, 2**70),
    "float": (float, 0.1),
    "bool": (bool, True),
    "str": (str, 'a "quoted" \u20ac \U0001f600 \x00 text'),
    "none": (None, None),
    "bytes": (bytes, bytes(range(256))),
    "bytearray": (bytearray, bytearray(b"\xff")),
    "optional": (int | None, None),
    "union": (int | str | None, "7"),
    "datetime": (datetime, NOON),
    "aware datetime": (datetime, NOON.replace(tzinfo=UTC)),
    "datetime with an offset": (datetime, NOON.replace(tzinfo=timezone(timedelta(hours=-3, minutes=-30)))),
    "date": (date, date(1970, 1, 1)),
    "time": (time, time(23, 59, 59, 999999)),
    "timedelta": (timedelta, timedelta(days=-1, microseconds=1)),
    "uuid": (UUID, UUID(int=2**127 + 1)),
    "decimal": (Decimal, Decimal("0.10")),
    "enum": (Color, Color.GREEN),
    "int enum": (Level, Level.HIGH),
    "flag": (Rights, Rights.READ | Rights.WRITE),
    "literal": (Literal["a", 1, None], 1),
    "list": (list[int], [1, 2]),
    "tuple": (tuple[int, str], (1, "a")),
    "long tuple": (tuple[int, ...], (1, 2, 3)),
    "set": (set[str], {"a", "b"}),
    "frozenset": (frozenset[int], frozenset({1})),
    "sequence": (Sequence[int], [1]),
    "mapping": (Mapping[str, int], {"a": 1}),
    "dict": (dict[str, list[int]], {"": [1]}),
    "dict by int": (dict[int, str], {-1: "a"}),
    "dict by float": (dict[float, str], {1.5: "a"}),
    "dict by uuid": (dict[UUID, int], {UUID(int=1): 1}),
    "dict by date": (dict[date, int], {date(2026, 1, 1): 1}),
    "dict by decimal": (dict[Decimal, int], {Decimal("1.50"): 1}),
    "dict by enum": (dict[Color, int], {Color.RED: 1}),
    "dict by bytes": (dict[bytes, int], {b"\xff": 1}),
    "bare dict": (dict, {"a": [1, None]}),
    "any": (Any, {"a": [1, 2.5, None, True, "x"]}),
    "object": (object, {"a": [1, 2.5, None, True, "x"]}),
    "dict of objects": (dict[str, object], {"a": [1, {"b": None}]}),
    "type variable": (Anything, [1]),
    "new type": (Name, Name("x")),
    "constrained": (Small, 9),
    "annotated": (Annotated[int, "how many"], 3),
    "dataclass": (Order, ORDER),
    "recursive": (Tree, Tree("a", [Tree("b"), Tree("c", [Tree("d")])])),
    "generic dataclass": (Box[UUID], Box(UUID(int=1))),
    "struct": (Point, Point(1.5)),
    "tagged union": (Circle | Square, Square(2.0)),
    "generic struct": (Crate[date], Crate(date(2026, 1, 1))),
    "named tuple": (Place, Place("Elm Street", 3)),
    "typed dict": (Options, {"width": 1}),
    "attrs": (Wheel, Wheel(28, [1])),
    "model": (User, User(Name="Ada", born=date(1815, 12, 10), tags={"x"})),
    "optional model": (User | None, None),
    "nested model": (Team, Team(lead=User(Name="Ada"))),
    "models in a dict": (dict[str, list[User]], {"a": [User(Name="Ada")]}),
    "model in a dataclass": (Box[User], Box(User(Name="Ada"))),
}
of_each_type = pytest.mark.parametrize(("hint", "value"), [pytest.param(*t, id=name) for name, t in TYPES.items()])


def of(hint: Any) -> Function:
    """A function of one parameter `x`, and a result, of this type."""

    def function(x: Any) -> Any: ...

    function.__annotations__ = {"x": hint, "return": hint}
    return function


def whole_of(hint: Any) -> Function:
    """As `of`; the payload is its one argument."""

    def function(x: Any, /) -> Any: ...

    function.__annotations__ = {"x": hint, "return": hint}
    return function


def sign(function: Function, *, stores_result: bool = False) -> ArgumentCodec:
    return ArgumentCodec(function, "shop.ship", stores_result=stores_result)


def payload_of(signature: ArgumentCodec, *args: Any, **kwargs: Any) -> bytes:
    return signature.encode(signature.bind(args, kwargs))


def through(signature: ArgumentCodec, *args: Any, **kwargs: Any) -> Arguments:
    """What the handler gets of a call."""
    return signature.decode(payload_of(signature, *args, **kwargs))


def assert_same(found: object, expected: object) -> None:
    assert found == expected
    assert type(found) is type(expected)


# Types


@of_each_type
def test_it_arrives_as_it_was(hint: Any, value: Any) -> None:
    """As an argument, as the whole payload, in a list, and as a result."""
    assert sign(whole_of(hint)).payload_is_argument
    for function in (of(hint), whole_of(hint)):
        (found,), rest = through(sign(function), value)
        assert_same(found, value)
        assert not rest
    (found,), _ = through(sign(of(list[hint])), [value, value])
    assert found == [value, value]
    assert_same(sign(of(hint), stores_result=True).decode_result(*encode_result(value, 1 << 20)), value)


def test_payloads_are_what_others_would_write() -> None:
    def ship(order: Order, *, express: bool = False) -> None: ...

    assert json.loads(payload_of(sign(ship), ORDER)) == {
        "order": {
            "id": "00000000-0000-0000-0000-000000000007",
            "at": "2026-03-01T12:00:00.123456",
            "lines": [{"sku": "a", "price": "1.10", "amount": 1}, {"sku": "b", "price": "2", "amount": 3}],
            "color": "green",
        },
        "express": False,
    }


def test_models_are_written_as_pydantic_does() -> None:
    assert payload_of(sign(whole_of(User)), User(Name="Ada", tags={"x"})) == b'{"Name":"Ada","born":null,"tags":["x"]}'


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Path, "parameter 'x' has the type pathlib.* which JSON does not know; take a dataclass"),
        (list[complex], "parameter 'x' has the type complex"),
        (Box[Path], "parameter 'x' has the type pathlib"),
        (Callable[[], int], "parameter 'x' has the type collections.abc.Callable"),
        (Checked, "of pydantic, take a BaseModel"),
        (list[Checked], "of pydantic, take a BaseModel"),
        (
            date | datetime,
            "parameter 'x' has a type that cannot travel: Type unions may not contain more than one str-like",
        ),
        (User | Team, "may not contain more than one custom type"),
        (Order | Line, "may not contain more than one dataclass"),
        (Pair, "Enums must contain either all str or all int"),
        ("int[", "its annotations cannot be read: SyntaxError"),
    ],
)
def test_types_that_cannot_travel_are_refused_by_name(hint: Any, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^shop\.ship: .*{words}"):
        sign(of(hint))


def test_the_type_of_a_result_matters_only_if_it_is_kept() -> None:
    def read(name: str) -> Path: ...

    assert sign(read).decode_result("json", b"7") == 7
    with pytest.raises(UsageError, match=r"^shop\.ship: what it returns has the type pathlib"):
        sign(read, stores_result=True)


# Values that do not fit


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, "7"),
        (int, 7.0),
        (int, True),
        (str, 7),
        (Small, 10),
        (Literal["a"], "b"),
        (list[int], ["a"]),
        (Order, {"id": 7}),
        (UUID, "no uuid"),
        (Point, Place("a")),
        (tuple[int, str], (1,)),
        (User, {"name": "the field's name is no alias"}),
    ],
)
def test_a_value_of_another_type_is_refused_at_the_caller(hint: Any, value: Any) -> None:
    for function in (of(hint), whole_of(hint)):
        with pytest.raises(UsageError, match=r"^shop\.ship: invalid arguments: "):
            payload_of(sign(function), value)


class Odd:
    pass


def unannotated(x, y=None):  # type: ignore[no-untyped-def]
    pass


def unannotated_whole(x, /):  # type: ignore[no-untyped-def]
    pass


BERLIN = ZoneInfo("Europe/Berlin")
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
OLD = datetime(1890, 1, 1, tzinfo=BERLIN)
"""Its offset is 53 minutes and 28 seconds."""


class Word(enum.StrEnum):
    RED = "red"


class Words(list[str]):
    pass


@dataclass
class Derived(Line):
    note: str = ""


@dataclass
class Event:
    data: Any
    parts: list[Event] = field(default_factory=list)


@attrs.define
class Private:
    data: Any = None
    _hidden: int = 0


class OpenStruct(msgspec.Struct):
    data: Any


class LargerStruct(OpenStruct):
    more: int = 1


class OpenModel(pydantic.BaseModel):
    data: Any = None
    secret: pydantic.SecretStr | None = None


class LargerModel(OpenModel):
    more: int = 1


class OpenTuple(NamedTuple):
    data: Any


class OpenDict(TypedDict):
    data: Any


LINE, DERIVED = Line("a", Decimal(1)), Derived("a", Decimal(1), 1, "urgent")

BARE: list[tuple[Any, str, str]] = [
    (b"raw", "$ is bytes and would arrive as str", "bytes"),
    (bytearray(b"raw"), "$ is a bytearray and would arrive as str", "bytes"),
    (memoryview(b"raw"), "$ is a memoryview and would arrive as str", "bytes"),
    (MOMENT, "$ is a datetime and would arrive as str", "datetime"),
    ((1, 2), "$ is a tuple and would arrive as list", "tuple"),
    ({1, 2}, "$ is a set and would arrive as list", "set"),
    (UUID(int=7), "$ is a UUID and would arrive as str", "UUID"),
    (LINE, "$ is a Line and would arrive as dict", "Line"),
    (Word.RED, "$ is a Word and would arrive as str", "Word"),
    (Level.LOW, "$ is a Level and would arrive as int", "Level"),
    (OrderedDict(a=1), "$ is an OrderedDict and would arrive as dict", "OrderedDict"),
    (defaultdict(int, a=1), "$ is a defaultdict and would arrive as dict", "defaultdict"),
    (Words(["a"]), "$ is a Words and would arrive as list", "Words"),
]
"""Values of a parameter without a type, what becomes of each, and the annotation that is suggested."""

OPEN: list[tuple[Any, Any, str]] = [
    (Any, {"when": MOMENT}, "$.when is a datetime"),
    (Any, {"a b": [0, (1,)]}, "$['a b'][1] is a tuple and would arrive as list"),
    (Any, {7: "x"}, "$ has an int as a key, which would arrive as str"),
    (Any, {"a": {math.nan: 1}}, "$.a has a float as a key"),
    (object, [Level.LOW], "$[0] is a Level and would arrive as int"),
    (Any | None, MOMENT, "$ is a datetime"),
    (int | Any, MOMENT, "$ is a datetime"),
    (Anything, (1,), "$ is a tuple"),
    (dict, {"when": MOMENT}, "$.when is a datetime and would arrive as str"),
    (dict, {7: "x"}, "$ has an int as a key, which would arrive as str"),
    (dict, {"a": OrderedDict()}, "$.a is an OrderedDict and would arrive as dict"),
    (dict[str, Any], {"a": {"b": [1, b"x"]}}, "$.a.b[1] is bytes and would arrive as str"),
    (dict[str, dict[str, Any]] | None, {"a": {"b": MOMENT}}, "$.a.b is a datetime"),
    (Mapping[str, Any], {"a": MOMENT}, "$.a is a datetime"),
    (list, [1, (1,)], "$[1] is a tuple"),
    (list[Any], [Decimal(1)], "$[0] is a Decimal"),
    (list[dict], [{}, {"a": MOMENT}], "$[1].a is a datetime"),
    (Sequence[Any], [MOMENT], "$[0] is a datetime"),
    (tuple, (1, (2,)), "$[1] is a tuple"),
    (tuple[int, Any], (1, MOMENT), "$[1] is a datetime"),
    (set, {MOMENT}, "$ holds a datetime"),
    (Annotated[dict, msgspec.Meta(title="data", description="any")], {"a": MOMENT}, "$.a is a datetime"),
    (Event, Event(MOMENT), "$.data is a datetime"),
    (Event, Event(1, [Event(2, [Event(MOMENT)])]), "$.parts[0].parts[0].data is a datetime"),
    (Event, {"data": MOMENT}, "$.data is a datetime"),
    (Event | int, Event(MOMENT), "$.data is a datetime"),
    (list[Event], [Event(1), Event((1,))], "$[1].data is a tuple"),
    (Box, Box(MOMENT), "$.inside is a datetime"),
    (Box[Any], Box({1: 2}), "$.inside has an int as a key"),
    (Private, Private(MOMENT), "$.data is a datetime"),
    (OpenStruct, OpenStruct(MOMENT), "$.data is a datetime"),
    (OpenModel, OpenModel(data=MOMENT), "$.data is a datetime"),
    (Box[OpenModel], Box(OpenModel(data={"a": (1,)})), "$.inside.data.a is a tuple"),
    (OpenTuple, OpenTuple(MOMENT), "$.data is a datetime"),
    (OpenDict, {"data": MOMENT}, "$.data is a datetime"),
]
"""Annotations that leave a type open, and values of it that JSON does not have."""

OTHER: list[tuple[Any, Any, str]] = [
    (Line, DERIVED, "$ is a Derived and would arrive as Line"),
    (list[Line], [LINE, DERIVED], "$[1] is a Derived and would arrive as Line"),
    (Line | None, DERIVED, "$ is a Derived and would arrive as Line"),
    (dict[str, tuple[Line, int]], {"k": (DERIVED, 1)}, "$.k[0] is a Derived and would arrive as Line"),
    (Box[Line], Box(DERIVED), "$.inside is a Derived and would arrive as Line"),
    (OpenStruct, LargerStruct(1), "$ is a LargerStruct and would arrive as OpenStruct"),
    (OpenModel, LargerModel(), "$ is a LargerModel and would arrive as OpenModel"),
    (Line, {"sku": "a", "price": "1", "colour": "red"}, "$ has the key 'colour', which its type does not have"),
    (Options, {"width": 1, "colour": 2}, "$ has the key 'colour', which its type does not have"),
    (Private, Private(1, 7), "$._hidden is an int that would arrive as another value"),
    (
        OpenModel,
        OpenModel(secret=pydantic.SecretStr("x")),
        "$.secret is a SecretStr that would arrive as another value",
    ),
    (OpenModel, OpenModel(data=math.nan), "$.data is a float and would arrive as NoneType"),
    (dict[str, int], LINE, "invalid arguments"),
    (dict, LINE, "$ is a Line and would arrive as dict"),
    (time, time(12, 30, tzinfo=BERLIN), "its zone has no fixed offset of whole minutes"),
    (list[time], [time(1), time(12, 30, tzinfo=BERLIN)], "$[1] is a time that would arrive as another value"),
    (datetime, OLD, "its zone has no fixed offset of whole minutes"),
    (dict[str, datetime | None], {"at": OLD}, "$.at is a datetime that would arrive as another value"),
    (dict[float, int], {math.nan: 1}, "$ has a float as a key"),
    (dict[float, int], {math.inf: 1}, "$ has a float as a key"),
    (dict[int, str], {1: "a", "1": "b"}, "$ has keys that are the same text in JSON"),
    (dict[str, int], {1: 1}, "$ has an int as a key, which would arrive as str"),
    (dict[int, str], {"1": "a"}, "$ has a str as a key, which would arrive as int"),
    (float, 2**63 + 1, "$ is an int that would arrive as another value"),
    (list[float], [1, 2**63 + 1], "$[1] is an int that would arrive as another value"),
    (str, b"raw", "$ is bytes and would arrive as str"),
    (str, MOMENT, "$ is a datetime and would arrive as str"),
    (int | str, UUID(int=1), "$ is a UUID and would arrive as str"),
    (bytes | None, "text", "$ is a str and would arrive as bytes"),
    (list[str], ["a", b"b"], "$[1] is bytes and would arrive as str"),
    (set[str], {b"x"}, "$ holds bytes that would arrive as another value"),
    (Level, Other.ONE, "$ is an Other that would arrive as another value"),
]
"""Annotations that say a type, and values that would arrive as something else."""


@pytest.mark.parametrize(("value", "words", "annotation"), BARE)
@pytest.mark.parametrize("function", [unannotated, unannotated_whole, of(Any), of(object)])
def test_what_only_an_annotation_could_bring_back_is_refused_at_the_caller(
    function: Function, value: Any, words: str, annotation: str
) -> None:
    with pytest.raises(UsageError) as caught:
        payload_of(sign(function), value)
    message = str(caught.value)
    assert message.startswith(f"shop.ship: argument 'x': {words}, because the parameter has no type"), message
    assert message.endswith(f"annotate it, as in `x: {annotation}`")


@pytest.mark.parametrize(("hint", "value", "words"), [*OPEN, *OTHER])
def test_what_would_arrive_as_something_else_is_refused_with_its_place(hint: Any, value: Any, words: str) -> None:
    for function in (of(hint), whole_of(hint)):
        with pytest.raises(UsageError, match=re.escape(words)) as caught:
            payload_of(sign(function), value)
        assert str(caught.value).startswith("shop.ship: ")


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Any, {"a": [1, 2.5, None, True, "x", -0.0, 2**64, -(2**70), {"": []}]}),
        (dict, OrderedDict(a=1)),
        (dict[str, int], Counter(a=1)),
        (Line, LINE),
        (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)),
        (datetime, datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN)),
        (datetime, datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN)),
        (datetime, datetime.max.replace(tzinfo=UTC)),
        (time, time(12, tzinfo=UTC)),
        (int, Level.LOW),
        (dict[int, str], {Level.LOW: "x"}),
        (dict[Word, int], {Word.RED: 1}),
        (bytes, bytearray(b"x")),
        (list[int] | dict[str, Any] | None, {"a": [1]}),
        (tuple[int, Any], (1, {"a": 1})),
        (OpenModel, OpenModel(data={"a": [1]})),
        (Private, Private({"a": 1})),
    ],
)
def test_what_arrives_equal_is_taken(hint: Any, value: Any) -> None:
    (found,), _ = through(sign(of(hint)), value)
    if isinstance(value, datetime):
        value, found = value.astimezone(UTC), found.astimezone(UTC)  # a time that the clock shows twice equals no other
    assert found == value


class Vector(list[int]):
    """Is compared as an array of NumPy is."""

    def __eq__(self, other: object) -> Any:
        class Found:
            def __bool__(self) -> bool:
                raise ValueError("The truth value of an array is ambiguous")

        return Found()


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (Decimal, Decimal("sNaN"), "InvalidOperation"),
        (list[Line], [Line("a", Decimal("sNaN"))], "InvalidOperation"),
        (list[int], Vector([1]), "ValueError: The truth value of an array is ambiguous"),
        (dict[str, list[int]], {"a": Vector([1])}, "ValueError"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_name(hint: Any, value: Any, words: str) -> None:
    for function in (of(hint), whole_of(hint)):
        with pytest.raises(UsageError, match=r"^shop\.ship: argument 'x' cannot be compared .*" + words):
            payload_of(sign(function), value)


def test_open_values_may_be_nested_deeply() -> None:
    nested: Any = [1]
    for _ in range(401):
        nested = [nested] if isinstance(nested, dict) else {"in": nested}
    assert through(sign(of(dict)), nested) == ((nested,), {})
    innermost = nested
    while isinstance(innermost, dict) or isinstance(innermost[0], dict):
        innermost = innermost["in"] if isinstance(innermost, dict) else innermost[0]
    innermost[0] = MOMENT
    with pytest.raises(UsageError, match="is a datetime and would arrive as str"):
        payload_of(sign(of(dict)), nested)


def test_such_a_default_is_refused_where_the_function_is_declared() -> None:
    def function(x=(1, 2)):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(UsageError, match=re.escape("argument 'x': $ is a tuple and would arrive as list")):
        sign(function)


@pytest.mark.parametrize("value", [None, True, 1, 1.5, -0.0, 10**15, "text", [1, "a", None], {"a": [{}]}])
def test_what_json_has_needs_no_annotation(value: Any) -> None:
    assert through(sign(unannotated), value) == ((value, None), {})
    assert through(sign(unannotated_whole), value) == ((value,), {})


@pytest.mark.parametrize(
    "value", [Odd(), 1j, math.nan, math.inf, [math.nan], "\ud800", {(1, 2): 3}, Path("/x"), Path, len, Point(math.nan)]
)
def test_what_json_has_not_is_refused_at_the_caller(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^shop\.ship: JSON cannot carry these arguments: "):
        payload_of(sign(of(Any)), value)


def test_a_list_that_contains_itself_is_refused_at_the_caller() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="JSON cannot carry"):
        payload_of(sign(of(Any)), endless)


def test_what_fits_by_value_is_of_the_right_type_at_the_handler() -> None:
    def f(a: float, b: Decimal, c: datetime, d: str, e: set[int]) -> None: ...

    found, _ = through(sign(f), 1, 1.5, "2026-03-01T12:00:00", Color.RED, [1, 1])
    assert found == (1.0, Decimal("1.5"), datetime(2026, 3, 1, 12), "red", {1})
    assert list(map(type, found)) == [float, Decimal, datetime, str, set]


# Calls


def test_positional_and_keyword_arguments_are_the_same_payload() -> None:
    def f(a: int, b: str = "x", *, c: bool = True) -> None: ...

    signature = sign(f)
    assert payload_of(signature, 1) == payload_of(signature, a=1) == b'{"a":1,"b":"x","c":true}'
    assert payload_of(signature, 1, "y", c=False) == payload_of(signature, c=False, b="y", a=1)
    assert through(signature, 1) == ((1, "x"), {"c": True})


def test_kinds_of_parameters_may_be_mixed() -> None:
    def f(a: int, /, b: int, c: int = 3, *, d: int, e: int = 5) -> None: ...

    signature = sign(f)
    assert payload_of(signature, 1, d=4, b=2) == b'{"a":1,"b":2,"c":3,"d":4,"e":5}'
    assert through(signature, 1, 2, d=4) == ((1, 2, 3), {"d": 4, "e": 5})


def test_two_positional_only_parameters_travel_by_name() -> None:
    def f(a: int, b: int = 2, /) -> None: ...

    signature = sign(f)
    assert not signature.payload_is_argument
    assert payload_of(signature, 1) == b'{"a":1,"b":2}'


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    def f() -> None: ...

    assert payload_of(sign(f)) == b"{}"
    assert through(sign(f)) == ((), {})


def test_parameters_may_have_any_name() -> None:
    def f(p1: int, p0: str, __x: int, größe: int, name: int, *, gc: int, kw_only: int) -> None: ...

    values = {"p1": 1, "p0": "a", "__x": 3, "größe": 4, "name": 5, "gc": 6, "kw_only": 7}
    assert json.loads(payload_of(sign(f), **values)) == values
    assert through(sign(f), **values) == ((1, "a", 3, 4, 5), {"gc": 6, "kw_only": 7})


def test_parameters_without_types_take_what_json_has() -> None:
    def f(a, b=1):  # type: ignore[no-untyped-def]
        ...

    assert through(sign(f), {"x": [1, None]}) == (({"x": [1, None]}, 1), {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2, 3, 4), {}),
        ((1, 2), {"b": 2}),
        ((1, 2), {"e": 2}),
        ((), {"a": 1, "b": 2, "d": 4}),
        ((1,), {"d": 4}),
        ((1, 2), {}),
        ((1, 2), {"d": 4, "subjekt": 5}),
    ],
)
def test_a_wrong_call_is_a_type_error_in_pythons_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def f(a: int, /, b: int, c: int = 3, *, d: int) -> None: ...

    with pytest.raises(TypeError) as python:
        inspect.signature(f).bind(*args, **kwargs)
    with pytest.raises(TypeError) as ours:
        sign(f).bind(args, kwargs)
    assert str(ours.value) == f"shop.ship(): {python.value}"


@pytest.mark.parametrize("stars", ["*rest", "**rest"])
def test_parameters_without_names_are_refused(stars: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f(a, {stars}): ...", space)
    with pytest.raises(UsageError, match=rf"shop\.ship: {stars.replace('*', '[*]')} has no fixed names and types"):
        sign(space["f"])


# Whole payloads


@pytest.mark.parametrize(
    "hint", [bytes, Blob, Annotated[bytes, "a picture"], Annotated[bytes, msgspec.Meta(description="a picture")]]
)
@pytest.mark.parametrize("task", [b"", b"\x00\xff", b"{", b'"YWJj"', bytes(range(256))])
def test_bytes_are_the_payload_itself(hint: Any, task: bytes) -> None:
    signature = sign(whole_of(hint))
    assert payload_of(signature, task) == task
    assert signature.decode(task) == ((task,), {})
    assert payload_of(signature, bytearray(task)) == payload_of(signature, memoryview(task)) == task


@pytest.mark.parametrize("value", ["text", None, 7, [1]])
def test_bytes_are_not_made_of_anything_else(value: Any) -> None:
    with pytest.raises(UsageError, match=f"it takes bytes, not {type(value).__name__}"):
        payload_of(sign(whole_of(bytes)), value)


def test_constraints_of_bytes_hold() -> None:
    signature = sign(whole_of(Short))
    assert through(signature, b"abc") == ((b"abc",), {})
    with pytest.raises(UsageError, match="invalid arguments"):
        payload_of(signature, b"abcd")
    with pytest.raises(Undecodable, match="length <= 3"):
        signature.decode(b"abcd")


def test_bytes_beside_others_travel_in_json() -> None:
    def f(a: bytes, b: int = 1) -> None: ...

    assert payload_of(sign(f), b"\xff") == b'{"a":"/w==","b":1}'


def test_optional_bytes_travel_in_json() -> None:
    assert payload_of(sign(whole_of(bytes | None)), None) == b"null"


def test_a_whole_payload_has_a_default_too() -> None:
    def f(order: Order = ORDER, /) -> None: ...

    assert through(sign(f)) == ((ORDER,), {})


# Defaults


def test_missing_fields_have_their_defaults() -> None:
    def f(a: int, b: Order = ORDER, *, c: Color = Color.RED) -> None: ...

    assert sign(f).decode(b'{"a":1}') == ((1, ORDER), {"c": Color.RED})


def test_a_default_that_can_change_is_as_python_has_it() -> None:
    def f(a: list[int] = [1]) -> None: ...  # noqa: B006

    signature = sign(f)
    (first,), _ = signature.decode(b"{}")
    first.append(2)
    assert signature.decode(b"{}") == (([1, 2],), {})
    assert payload_of(signature) == b'{"a":[1,2]}'


@pytest.mark.parametrize(
    ("hint", "default", "words"),
    [
        (int, None, r"Expected `int`, got `null`: let its annotation say so, as in `x: int \| None = None`"),
        (Small, 10, "Expected `int` <= 9"),
        (Any, Odd(), "JSON does not know tests.test_argument_codec.Odd"),
        (float, math.inf, "JSON has neither NaN nor infinity"),
        (User, "Ada", "User: "),
    ],
)
def test_a_default_that_does_not_fit_is_refused_where_it_stands(hint: Any, default: Any, words: str) -> None:
    def f(x: Any = default) -> None: ...

    f.__annotations__ = {"x": hint}
    with pytest.raises(UsageError, match=rf"^shop\.ship: the default of 'x' cannot travel: {words}"):
        sign(f)


@pytest.mark.parametrize("default", [None, "YWJj", 7])
def test_a_default_of_whole_bytes_is_bytes(default: Any) -> None:
    def f(x: bytes = default, /) -> None: ...

    with pytest.raises(UsageError, match="the default of 'x' cannot travel"):
        sign(f)


# Annotations


def test_types_that_are_defined_further_below_are_found_when_they_are_needed() -> None:
    signature = sign(takes_later)
    signature_of_list = sign(takes_list_of_later)
    with pytest.raises(UsageError, match="names what is not there when it runs .name 'Later' is not defined."):
        payload_of(signature, 1)
    later = globals()["Later"] = Box[int]
    try:
        assert through(signature, later(1)) == ((Box(1),), {})
        assert through(signature_of_list, Within(later(1))) == ((Within(Box(1)),), {})
    finally:
        del globals()["Later"]


def takes_later(x: Later) -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


@dataclass
class Within:
    later: Later  # type: ignore[name-defined]  # noqa: F821


def takes_list_of_later(x: Within) -> None: ...


def takes_nothing(x: Nothing) -> None: ...


def test_a_type_for_type_checkers_only_is_an_error_that_says_what_to_do() -> None:
    signature = sign(takes_nothing)
    for use in (signature.ready, lambda: signature.decode(b"{}"), lambda: payload_of(signature, 1)):
        with pytest.raises(
            UsageError, match=r"^shop\.ship: .*'Nothing' is not defined.*outside of `if TYPE_CHECKING:`"
        ):
            use()


def test_annotations_that_are_no_strings_may_name_local_types() -> None:
    @dataclass
    class Local:
        x: int

    assert through(sign(of(Local)), Local(1)) == ((Local(1),), {})


def test_wrapped_functions_have_the_signature_of_what_they_wrap() -> None:
    def f(a: Order, b: int = 1) -> None: ...

    @wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    assert through(sign(wrapped), ORDER) == ((ORDER, 1), {})
    assert through(sign(lru_cache(f)), ORDER) == ((ORDER, 1), {})


def test_what_can_be_called_has_a_signature() -> None:
    class Shipper:
        x: str

        def __call__(self, a: Order) -> None: ...

        def ship(self, a: Order) -> None: ...

    def f(a: Order, b: int, c: int = 3) -> None: ...

    assert through(sign(Shipper()), ORDER) == ((ORDER,), {})
    assert through(sign(Shipper().ship), ORDER) == ((ORDER,), {})
    assert through(sign(partial(f, ORDER)), 2) == ((2, 3), {})
    assert through(sign(partial(f, b=2)), ORDER) == ((ORDER,), {"b": 2, "c": 3})


# Payloads of others


def test_fields_that_are_not_known_are_ignored() -> None:
    def f(a: int, order: Order) -> None: ...

    signature = sign(f)
    said = json.loads(payload_of(signature, 1, ORDER))
    said["priority"] = {"x": 1}
    said["order"]["gift"] = True
    assert signature.decode(json.dumps(said).encode()) == ((1, ORDER), {})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (b"", "DecodeError: Input data was truncated"),
        (b"{", "DecodeError: "),
        (b"\xff\xfe", "DecodeError: JSON is malformed"),
        (b'{"a":1,"b":[]} x', "DecodeError: JSON is malformed"),
        (b"null", "ValidationError: Expected `object`, got `null`"),
        (b"[1]", "ValidationError: Expected `object`, got `array`"),
        (b"{}", "ValidationError: Object missing required field `a`"),
        (b'{"a":"1","b":[]}', r"ValidationError: Expected `int`, got `str` - at `\$.a`"),
        (b'{"a":1,"b":[{"name":1}]}', r"ValidationError: Expected `str`, got `int` - at `\$.b\[0\].name`"),
        (b'{"a":1,"b":[],"c":' + b"[" * 100_000, "RecursionError"),
    ],
)
def test_what_cannot_be_decoded_is_undecodable_and_says_where(task: bytes, words: str) -> None:
    def f(a: int, b: list[Tree]) -> None: ...

    with pytest.raises(Undecodable, match=rf"^shop\.ship: {words}"):
        sign(f).decode(task)


def test_what_a_model_refuses_is_undecodable_without_the_payload() -> None:
    signature = sign(of(Team))
    with pytest.raises(
        Undecodable, match=r"^shop\.ship: ValidationError: Team: lead\.Name: String should have at least 1"
    ) as broken:
        signature.decode(b'{"x":{"lead":{"Name":"","born":"1815-12-10"},"size":3}}')
    with pytest.raises(
        Undecodable, match=r"Team: lead: Input should be .*; size: Input should be a valid integer"
    ) as other:
        signature.decode(b'{"x":{"lead":"secret","size":"also secret"}}')
    assert "1815" not in str(broken.value)
    assert "secret" not in str(other.value)


class Strict(msgspec.Struct):
    email: str

    def __post_init__(self) -> None:
        if self.email == "no memory":
            raise MemoryError
        if "@" not in self.email:
            raise KeyError(self.email)


def test_what_a_type_of_the_users_raises_is_undecodable() -> None:
    with pytest.raises(Undecodable, match=r"^shop\.ship: KeyError: 'ada'"):
        sign(whole_of(Strict)).decode(b'{"email":"ada"}')


def test_no_memory_is_no_fault_of_the_payload() -> None:
    with pytest.raises(MemoryError):
        sign(whole_of(Strict)).decode(b'{"email":"no memory"}')


# Results


@pytest.mark.parametrize(
    ("hint", "result"),
    [
        (int, ("json", b'"x"')),
        (int, ("none", b"")),
        (int, ("bytes", b"7")),
        (bytes, ("json", b"7")),
        (None, ("json", b"1")),
    ],
)
def test_a_result_that_is_not_what_was_said_is_an_error(hint: Any, result: tuple[str, bytes]) -> None:
    with pytest.raises(UsageError, match=r"^shop\.ship: the result is not what it is said to return"):
        sign(of(hint), stores_result=True).decode_result(*result)


def test_a_result_without_a_type_is_what_json_has() -> None:
    def f():  # type: ignore[no-untyped-def]
        ...

    signature = sign(f, stores_result=True)
    assert signature.decode_result("json", b'{"a":[1]}') == {"a": [1]}
    assert signature.decode_result("bytes", b"x") == b"x"
    assert signature.decode_result("none", b"") is None


# By chance

OFFSETS = st.builds(lambda minutes: timezone(timedelta(minutes=minutes)), st.integers(-1439, 1439))
MOMENTS = st.datetimes() | st.datetimes(timezones=OFFSETS, min_value=datetime(2, 1, 1), max_value=datetime(9998, 1, 1))
Typed = tuple[Any, st.SearchStrategy[Any]]
"""A type, and values of it."""

LEAVES: list[Typed] = [
    (int, st.integers(-(10**30), 10**30)),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (str, st.text()),
    (bytes, st.binary()),
    (datetime, MOMENTS),
    (date, st.dates()),
    (time, st.times() | st.times(timezones=OFFSETS)),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Color, st.sampled_from(Color)),
    (Literal["a", "b", 1], st.sampled_from(["a", "b", 1])),
    (Order, st.builds(Order, st.uuids(), MOMENTS, st.just([]), st.sampled_from(Color))),
    (Point, st.builds(Point, st.floats(allow_nan=False, allow_infinity=False))),
    (Place, st.builds(Place, st.text(), st.integers())),
    (User, st.builds(User, Name=st.text(min_size=1), born=st.none() | st.dates(), tags=st.sets(st.text()))),
]
KEYS: list[Typed] = [leaf for leaf in LEAVES if leaf[0] in (int, str, UUID, date, Decimal, Color, bytes)]


def containers(typed: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    return (
        typed.map(lambda t: (list[t[0]], st.lists(t[1], max_size=3)))  # type: ignore[index]
        | typed.map(lambda t: (t[0] | None, t[1] | st.none()))
        | st.tuples(typed, typed).map(lambda ts: (tuple[ts[0][0], ts[1][0]], st.tuples(ts[0][1], ts[1][1])))
        | st.tuples(st.sampled_from(KEYS), typed).map(
            lambda ts: (dict[ts[0][0], ts[1][0]], st.dictionaries(ts[0][1], ts[1][1], max_size=3))
        )
        | st.sampled_from(KEYS).map(lambda t: (frozenset[t[0]], st.frozensets(t[1], max_size=3)))  # type: ignore[index]
    )


TYPED = st.recursive(st.sampled_from(LEAVES), containers, max_leaves=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@st.composite
def functions(draw: st.DrawFn) -> tuple[Function, list[Any]]:
    """A function of up to four parameters of all kinds and types, some with defaults, and a value for each."""
    typed = draw(st.lists(TYPED, max_size=4))
    kinds = sorted(draw(st.lists(st.sampled_from(KINDS), min_size=len(typed), max_size=len(typed))))
    values = [draw(strategy) for _, strategy in typed]
    with_default = False
    parameters: list[inspect.Parameter] = []
    for i, ((_, strategy), kind) in enumerate(zip(typed, kinds, strict=True)):
        by_keyword = kind is inspect.Parameter.KEYWORD_ONLY
        with_default = draw(st.booleans()) if by_keyword else with_default or draw(st.booleans())
        default = draw(strategy) if with_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(f"a{i}", kind, default=default))

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {f"a{i}": hint for i, (hint, _) in enumerate(typed)}
    return function, values


def split(function: Function, values: list[Any]) -> Arguments:
    """The values as a call takes them."""
    args, kwargs = [], {}
    for parameter, value in zip(inspect.signature(function).parameters.values(), values, strict=True):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


@settings(max_examples=150, deadline=None)
@given(functions())
def test_any_call_arrives_as_it_was(made: tuple[Function, list[Any]]) -> None:
    function, values = made
    args, kwargs = split(function, values)
    assert through(sign(function), *args, **kwargs) == (args, kwargs)


@settings(max_examples=150, deadline=None)
@given(functions(), st.data())
def test_any_call_is_taken_or_refused_as_python_would(made: tuple[Function, list[Any]], data: st.DataObject) -> None:
    function, values = made
    names = st.sampled_from([f"a{i}" for i in range(6)])
    args = tuple(values[: data.draw(st.integers(0, len(values)))]) + data.draw(st.sampled_from([(), (1,)]))
    kwargs = dict.fromkeys(data.draw(st.lists(names, max_size=4)), 1)
    signature = sign(function)
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            signature.bind(args, kwargs)
    else:
        bound.apply_defaults()
        found = signature.bind(args, kwargs)
        assert found == bound.arguments
        assert signature.split(found) == (bound.args, bound.kwargs)


@settings(max_examples=100, deadline=None)
@given(functions(), st.dictionaries(st.text(), JSON, max_size=3), st.data())
def test_a_stranger_may_leave_out_defaults_add_fields_and_change_the_order(
    made: tuple[Function, list[Any]], more: dict[str, Any], data: st.DataObject
) -> None:
    function, values = made
    signature = sign(function)
    if signature.payload_is_argument:
        return
    args, kwargs = split(function, values)
    said = json.loads(payload_of(signature, *args, **kwargs))
    parameters = inspect.signature(function).parameters
    with_default = [name for name, each in parameters.items() if each.default is not inspect.Parameter.empty]
    left_out = data.draw(st.sets(st.sampled_from(with_default))) if with_default else set()
    fields = {name: value for name, value in more.items() if name not in parameters}
    fields |= {name: said[name] for name in data.draw(st.permutations(sorted(said))) if name not in left_out}
    expected = [
        parameters[name].default if name in left_out else value for name, value in zip(parameters, values, strict=True)
    ]
    assert signature.decode(json.dumps(fields, indent=1).encode()) == split(function, expected)


def many(a: int, /, order: Order, *, tree: Tree, user: User, shape: Circle | Square | None = None) -> None: ...


MANY = sign(many)
VALID = payload_of(MANY, 1, ORDER, tree=Tree("a", [Tree("b")]), user=User(Name="Ada"), shape=Square(1.0))


def decode_or_break(signature: ArgumentCodec, task: bytes) -> None:
    try:
        signature.decode(task)
    except Undecodable as error:
        assert str(error).startswith("shop.ship: ")


@settings(max_examples=300, deadline=None)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_payload_raises_anything_but_undecodable(task: bytes) -> None:
    decode_or_break(MANY, task)
    for hint in (int, str, list[Tree], User, Any, datetime, Decimal):
        decode_or_break(WHOLE[hint], task)


WHOLE = {hint: sign(whole_of(hint)) for hint in (int, str, list[Tree], User, Any, datetime, Decimal)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 5), st.binary(max_size=5)), min_size=1, max_size=4)
)
def test_no_damage_to_a_payload_raises_anything_but_undecodable(damages: list[tuple[int, int, bytes]]) -> None:
    task = VALID
    for at, cut, put in damages:
        task = task[:at] + put + task[at + cut :]
    decode_or_break(MANY, task)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "order", "tree", "user", "shape"]), JSON))
def test_no_object_of_other_types_raises_anything_but_undecodable(fields: dict[str, Any]) -> None:
    decode_or_break(MANY, json.dumps({**json.loads(VALID), **fields}).encode())
