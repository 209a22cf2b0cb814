"""JSON schemas of values that workflows wait for: what is checked before a value is sent, and the forms that are made of them."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, Literal

import msgspec
import pytest

from worqr.views.schemas import FormField, form_fields, form_value, mismatch


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Line(msgspec.Struct):
    item: str
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Approval(msgspec.Struct, forbid_unknown_fields=True):
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=9)]
    amount: float
    ok: bool = True
    level: Level = Level.LOW
    note: str | None = None
    lines: list[Line] = []


def schema_of(kind: Any) -> str:
    return msgspec.json.encode(msgspec.json.schema(kind)).decode()


GOOD: list[tuple[Any, Any]] = [
    (str, "a"),
    (int, 3),
    (float, 3),
    (bool, False),
    (int | None, None),
    (Literal["yes", "no"], "no"),
    (list[int], [1, 2]),
    (dict[str, int], {"a": 1}),
    (tuple[int, str], [1, "a"]),
    (Approval, {"by": "ada", "amount": 2.5}),
    (Approval, {"by": "ada", "amount": 2, "note": None, "level": "high", "lines": [{"item": "x", "count": 2}]}),
    (Any, {"what": ["ever"]}),
]
BAD: list[tuple[Any, Any, str]] = [
    (str, 3, "it must be a text, not 3"),
    (int, "3", 'it must be a whole number, not "3"'),
    (int, 3.5, "it must be a whole number, not 3.5"),
    (int, True, "it must be a whole number, not true"),
    (int | None, "x", 'it must be a whole number, not "x"'),
    (Literal["yes", "no"], "maybe", 'it must be "no" or "yes", not "maybe"'),
    (list[int], [1, "b"], '[1]: it must be a whole number, not "b"'),
    (dict[str, int], {"a": "b"}, 'a: it must be a whole number, not "b"'),
    (Approval, {"amount": 1}, "by: it is missing"),
    (Approval, {"by": "ada", "amount": 1, "bx": 1}, "bx: there is no such field"),
    (Approval, {"by": "", "amount": 1}, "by: it must have at least 1 characters, not 0"),
    (Approval, {"by": "ada", "amount": 1, "level": "mid"}, 'level: it must be "high" or "low", not "mid"'),
    (
        Approval,
        {"by": "ada", "amount": 1, "lines": [{"item": "x", "count": 0}]},
        "lines[0].count: it must be at least 1, not 0",
    ),
    (Approval, "ada", 'it must be an object, not "ada"'),
]


@pytest.mark.parametrize(("kind", "value"), GOOD)
def test_a_value_of_the_type_has_its_schema(kind: Any, value: Any) -> None:
    assert mismatch(schema_of(kind), value) == ""
    msgspec.convert(value, kind)


@pytest.mark.parametrize(("kind", "value", "why"), BAD)
def test_another_value_is_named_with_its_place(kind: Any, value: Any, why: str) -> None:
    assert mismatch(schema_of(kind), value) == why
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, kind)


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}
SPOILT = [
    "",
    "{",
    "[" * 5_000,
    "3",
    "null",
    '{"$ref":3}',
    '{"$ref":"#/$defs/none"}',
    '{"type":{"a":1},"properties":[1],"required":{"a":1},"enum":3,"anyOf":7,"items":"x","minimum":"x","maxLength":{}}',
    '{"type":["no-such-type"]}',
    json.dumps(LOOP),
    '{"pattern":"(a+)+$"}',
]


@pytest.mark.parametrize("schema", SPOILT)
def test_a_schema_that_another_program_has_spoilt_refuses_nothing(schema: str) -> None:
    for value in ("a" * 40 + "b", 3, None, [1], {"a": [None]}):
        assert mismatch(schema, value) == ""
    assert [each.name for each in form_fields(schema)] == [""]


def test_an_object_has_a_field_for_each_of_its_fields() -> None:
    assert form_fields(schema_of(Approval)) == (
        FormField("by", "text", "a text", True),
        FormField("amount", "number", "a number", True),
        FormField("ok", "boolean", "true or false", False),
        FormField("level", "text", "one of these", False, ("high", "low")),
        FormField("note", "json", "JSON", False),
        FormField("lines", "json", "a list, as JSON", False),
    )
    assert form_fields(schema_of(str)) == (FormField("", "text", "a text", True),)
    assert form_fields(schema_of(list[int])) == (FormField("", "json", "a list, as JSON", True),)
    assert form_fields("") == (FormField("", "json", "JSON", True),)


def test_what_is_typed_becomes_a_value_and_empty_fields_are_left_out() -> None:
    fields = form_fields(schema_of(Approval))
    typed = {"by": "7", "amount": "2.5", "ok": "false", "level": "", "note": "", "lines": '[{"item":"x"}]', "more": "x"}
    assert form_value(fields, typed) == {"by": "7", "amount": 2.5, "ok": False, "lines": [{"item": "x"}]}
    assert form_value(form_fields(schema_of(str)), {"": ""}) == ""
    with pytest.raises(ValueError, match="amount: this must be JSON"):
        form_value(fields, {"by": "ada", "amount": "lots"})
    with pytest.raises(ValueError, match="this must be JSON"):
        form_value(form_fields(""), {"": "NaN"})
    for text in ("NaN", "-Infinity", "1e999", "[" * 100_000):
        with pytest.raises(ValueError, match="this must be JSON"):
            form_value(form_fields(""), {"": text})
    assert "by" in form_value(fields, {})


def test_a_value_that_is_nested_too_deeply_to_be_shown_is_refused_anyhow() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    assert mismatch('{"type":"string"}', deep) == "it must be a text, not this"
