"""The page docs/reference/arguments.md: each type is encoded as it says there, and comes back as it was."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import typing
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pytest

import worqr
from tests.docs.tables import rows, words


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


class Size(msgspec.Struct):
    n: int


@attrs.define
class Length:
    n: int


class Place(TypedDict):
    x: int


class Pair(NamedTuple):
    number: int
    text: str


class Order(pydantic.BaseModel):
    id: int


NAMES = {
    **{name: getattr(dt, name) for name in ("datetime", "date", "time", "timedelta", "UTC")},
    "UUID": uuid.UUID,
    "Decimal": decimal.Decimal,
    "Colour": Colour,
    "Point": Point,
    "Size": Size,
    "Pair": Pair,
    "Order": Order,
    "msgspec": msgspec,
    "typing": typing,
    "Any": Any,
    "Annotated": Annotated,
    "Literal": Literal,
    "Optional": typing.Optional,
}
IN_WORDS: dict[str, list[object]] = {
    "`Enum` of texts": [Colour],
    "dataclass": [Point],
    "`msgspec.Struct`, attrs class": [Size],
    "`TypedDict`": [Place],
    "`NamedTuple`": [Pair],
    "pydantic `BaseModel`": [Order],
    "`Any`, `object`, no annotation": [Any, object],
}
ROWS = rows("arguments.md", "Types")


def types_of(cell: str) -> list[Any]:
    return IN_WORDS.get(cell) or [eval(word.replace("\\|", "|"), NAMES) for word in words(cell)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_type_is_encoded_as_the_page_says_and_comes_back(row: list[str]) -> None:
    value = eval(words(row[1])[0], NAMES)
    for kind in types_of(row[0]):

        def handler(each): ...  # type: ignore[no-untyped-def]

        handler.__annotations__ = {"each": kind, "return": kind}
        function = worqr.Registry().task(name="f", result_ttl=60)(handler)
        call = function.call(value)  # type: ignore[call-arg]
        assert call.task == b'{"each":' + words(row[2])[0].encode() + b"}"
        (found,) = function.decode(call.task).args
        assert found == value
        assert type(found) is type(value) or kind in {frozenset[int]}


def test_a_class_of_attrs_is_encoded_likewise() -> None:
    @worqr.Registry().task(name="f")
    def handler(each: Length) -> None: ...

    assert handler.call(Length(3)).task == b'{"each":{"n":3}}'
    assert handler.decode(b'{"each":{"n":3}}').args == (Length(3),)


def declare(kind: object) -> None:
    def handler(each): ...  # type: ignore[no-untyped-def]

    handler.__annotations__ = {"each": kind, "return": None}
    worqr.Registry().task(name="f")(handler)


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


@pydantic.dataclasses.dataclass
class Checked:
    n: int


@pytest.mark.parametrize("kind", [str | uuid.UUID, Point | Order, Point | Size, Mixed, Checked, complex])
def test_a_type_that_could_not_be_decoded_is_refused(kind: object) -> None:
    with pytest.raises(worqr.UsageError):
        declare(kind)


@pytest.mark.parametrize("value", [b"raw", (1, 2), dt.datetime(2031, 1, 1), float("nan"), {1: "a"}])
def test_a_parameter_without_an_annotation_takes_what_json_has(value: object) -> None:
    @worqr.Registry().task(name="f")
    def handler(each): ...  # type: ignore[no-untyped-def]

    with pytest.raises(worqr.UsageError):
        handler.call(value)
