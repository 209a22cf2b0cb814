"""The JSON schema of a value that a workflow waits for: whether a value has the schema, and the fields of a form for it. Pure.

Only what schemas of Python types use is checked. What is not known counts as fulfilled: the workflow decodes the value itself,
and sets one aside that it cannot use. Any program may have written a schema, so none is trusted: patterns are not tried, and the
work has a limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from worqr.escaping import escape

DEEPEST: Final = 64
MOST_CHECKS: Final = 10_000
MOST_FIELDS: Final = 50
LONGEST: Final = 100
"""Characters of a value or a name in a text about it."""

Json = Any
"""A decoded JSON value."""


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Final[Mapping[str, tuple[str, Callable[[Json], bool]]]] = {
    "string": ("a text", lambda value: isinstance(value, str)),
    "integer": ("a whole number", lambda value: _is_number(value) and value == value // 1),
    "number": ("a number", _is_number),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "array": ("a list", lambda value: isinstance(value, list)),
}


def mismatch(schema: str, value: Json) -> str:
    """Return in which way a value does not have a schema; empty if it has, or if the schema cannot be read."""
    if (found := _read(schema)) is None:
        return ""
    return next(_Check(found).problems(found, value, "", 0), "")


def read_json(text: str) -> Json:
    """Return the value of a JSON text that a person has typed. Raises ValueError; also for a number that is none in JSON."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(word: str) -> float:
    if not math.isfinite(number := float(word)):
        raise ValueError(f"{word} is no number in JSON, or too large")
    return number


def _read(schema: str) -> Json:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        return None


def _short(value: Json) -> str:
    try:
        shown = escape(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "this"
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def _mapping(value: Json) -> Mapping[str, Json]:
    return cast("Mapping[str, Json]", value) if isinstance(value, dict) else {}


def _list(value: Json) -> list[Json]:
    return cast("Any", value) if isinstance(value, list) else []


@dataclass(slots=True)
class _Check:
    """One check of a value. `root`: the whole schema, for its references."""

    root: Json
    left: int = field(default=MOST_CHECKS)

    def problems(self, schema: Json, value: Json, place: str, depth: int) -> Iterator[str]:
        """Yield what is wrong with a value, the first thing first. `place`: where it is, for people."""
        self.left -= 1
        if not isinstance(schema, dict) or depth > DEEPEST or self.left < 0:
            return
        rule: Mapping[str, Json] = cast("Mapping[str, Json]", schema)
        if isinstance(reference := rule.get("$ref"), str):
            yield from self.problems(self.at(reference), value, place, depth + 1)
        if options := _list(rule.get("anyOf")):
            yield from self._any_of(options, value, place, depth)
        if why := _wrong_kind(rule, value) or _wrong_size(rule, value):
            yield f"{place}: {why}" if place else why
        elif isinstance(value, dict):
            yield from self._object(rule, cast("dict[str, Json]", value), place, depth)
        elif isinstance(value, list):
            yield from self._array(rule, cast("Any", value), place, depth)

    def at(self, reference: str) -> Json:
        found = self.root
        for name in reference.removeprefix("#").split("/")[1:]:
            found = _mapping(found).get(name.replace("~1", "/").replace("~0", "~"))
        return found

    def _any_of(self, options: list[Json], value: Json, place: str, depth: int) -> Iterator[str]:
        first = ""
        for option in options:
            why = next(self.problems(option, value, place, depth + 1), None)
            if why is None:
                return
            first = first or why
        yield first

    def _object(self, rule: Mapping[str, Json], value: dict[str, Json], place: str, depth: int) -> Iterator[str]:
        start = f"{place}." if place else ""
        for name in _list(rule.get("required")):
            if isinstance(name, str) and name not in value:
                yield f"{start}{escape(name[:LONGEST])}: it is missing"
        known, others = _mapping(rule.get("properties")), rule.get("additionalProperties", True)
        for name, each in value.items():
            if name not in known and others is False:
                yield f"{start}{escape(name[:LONGEST])}: there is no such field"
            yield from self.problems(known.get(name, others), each, f"{start}{escape(name[:LONGEST])}", depth + 1)

    def _array(self, rule: Mapping[str, Json], value: list[Json], place: str, depth: int) -> Iterator[str]:
        first, others = _list(rule.get("prefixItems")), rule.get("items", True)
        for n, each in enumerate(value):
            yield from self.problems(first[n] if n < len(first) else others, each, f"{place}[{n}]", depth + 1)


def _wrong_kind(rule: Mapping[str, Json], value: Json) -> str:
    """Return that a value has the wrong type, or is none of those that are allowed."""
    names = [rule["type"]] if isinstance(rule.get("type"), str) else _list(rule.get("type"))
    kinds = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    if kinds and len(kinds) == len(names) and not any(fits(value) for _, fits in kinds):
        return f"it must be {' or '.join(what for what, _ in kinds)}, not {_short(value)}"
    allowed = [rule["const"]] if "const" in rule else _list(rule.get("enum"))
    if allowed and not any(type(each) is type(value) and each == value for each in allowed):
        return f"it must be {' or '.join(map(_short, allowed[:20]))}, not {_short(value)}"
    return ""


_LIMITS: Final[tuple[tuple[str, str, Callable[[Any, Any], bool]], ...]] = (
    ("minimum", "at least", lambda found, limit: found >= limit),
    ("maximum", "at most", lambda found, limit: found <= limit),
    ("exclusiveMinimum", "more than", lambda found, limit: found > limit),
    ("exclusiveMaximum", "less than", lambda found, limit: found < limit),
)


def _wrong_size(rule: Mapping[str, Json], value: Json) -> str:
    """Return that a number, or the length of a text or a list, is outside of its limits."""
    if _is_number(value):
        for name, words, fits in _LIMITS:
            if _is_number(limit := rule.get(name)) and not fits(value, limit):
                return f"it must be {words} {limit}, not {_short(value)}"
    what, unit = ("Length", "characters") if isinstance(value, str) else ("Items", "items")
    if isinstance(value, str | list):
        size = len(cast("str", value))
        least, most = rule.get(f"min{what}", 0), rule.get(f"max{what}", math.inf)
        if _is_number(least) and size < least:
            return f"it must have at least {least} {unit}, not {size}"
        if _is_number(most) and size > most:
            return f"it must have at most {most} {unit}, not {size}"
    return ""


# Forms


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of a form.

    Attributes:
        name: that of the field of the object; empty if the value is no object.
        kind: ``text``, ``number``, ``boolean``, or ``json``: anything else, which is typed as JSON.
        about: what is to be typed, for people.
        needed: it has to be there.
        choices: the texts that are allowed; empty: any.
    """

    name: str
    kind: str
    about: str
    needed: bool
    choices: tuple[str, ...] = ()

    def value(self, typed: str) -> Json:
        """Return what was typed as a value. Raises ValueError, with a text for people, if it is none."""
        if self.kind == "text":
            return typed
        try:
            return read_json(typed)
        except ValueError:
            where = f"{escape(self.name)}: " if self.name else ""
            raise ValueError(f'{where}this must be JSON, such as 42, true, "text" or [1, 2]') from None


def form_fields(schema: str) -> tuple[FormField, ...]:
    """Return the fields of a form: one for each field of an object, or one for the value as a whole."""
    found = _read(schema)
    check = _Check(found)
    rule = _mapping(found)
    if isinstance(reference := rule.get("$ref"), str):
        rule = _mapping(check.at(reference))
    properties = _mapping(rule.get("properties"))
    if not properties or len(properties) > MOST_FIELDS:
        return (_form_field(check, "", found, needed=True),)
    required = _list(rule.get("required"))
    return tuple(_form_field(check, name, each, needed=name in required) for name, each in properties.items())


def _form_field(check: _Check, name: str, schema: Json, *, needed: bool) -> FormField:
    rule = _mapping(schema)
    if isinstance(reference := rule.get("$ref"), str):
        rule = _mapping(check.at(reference))
    choices = [rule["const"]] if "const" in rule else _list(rule.get("enum"))
    if choices and len(choices) <= MOST_FIELDS and all(isinstance(each, str) for each in choices):
        return FormField(name, "text", "one of these", needed, tuple(choices))
    kind = rule.get("type")
    about = _TYPES[kind][0] if isinstance(kind, str) and kind in _TYPES else "JSON"
    kinds = {"string": "text", "integer": "number", "number": "number", "boolean": "boolean"}
    found = kinds.get(kind, "json") if isinstance(kind, str) and not choices else "json"
    return FormField(
        name, found, about if found != "json" else f"{about}, as JSON" if about != "JSON" else about, needed
    )


def form_value(fields: tuple[FormField, ...], typed: Mapping[str, str]) -> Json:
    """Return the value that was typed into a form. `typed`: by the names of the fields.

    Raises:
        ValueError: one of them is not what its field needs; with a text for people.
    """
    if len(fields) == 1 and not fields[0].name:
        return fields[0].value(typed.get("", ""))
    found: dict[str, Json] = {}
    for each in fields:
        text = typed.get(each.name, "")
        if text or (each.needed and each.kind == "text" and not each.choices):
            found[each.name] = each.value(text)
    return found
