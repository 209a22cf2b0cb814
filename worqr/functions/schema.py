"""The functions of a mesh as a document of AsyncAPI 3, with a JSON Schema for the arguments and the result of each.

msgspec and pydantic make the schemas of their own types. A channel is the queue of a function, and its message a call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, Final, cast

import msgspec
import msgspec.inspect as types

from worqr.errors import UsageError
from worqr.functions.definition import FunctionDefinition
from worqr.validation import encode_json, is_model, name_of

Schema = dict[str, Any]
REFERENCE: Final = "#/components/schemas/"
_FORMATS: Final[dict[type, str]] = {types.DateTimeType: "date-time", types.TimeType: "time"}
"""Formats that msgspec leaves out where a zone is optional."""


def asyncapi(functions: Sequence[FunctionDefinition], prefix: str, title: str) -> Schema:
    """Return the document of these functions of the mesh with this prefix.

    Raises:
        UsageError: a type has no JSON Schema. The error names the function and the parameter.
    """
    schemas, components = _schemas(functions)
    channels: Schema = {}
    operations: Schema = {}
    for each in functions:
        key = key_of(each.name)
        channel = {"$ref": f"#/channels/{key}"}
        messages: Schema = {"call": _call(each, schemas)}
        operations[key] = operation = Schema(action="receive", channel=channel)
        operation["messages"] = [{"$ref": f"#/channels/{key}/messages/call"}]
        if each.results.kept:
            messages["result"] = {"title": f"The result of {each.name}", "payload": schemas[each.name, "return"]}
            operation["reply"] = {"channel": channel, "messages": [{"$ref": f"#/channels/{key}/messages/result"}]}
        about = inspect.getdoc(each.fn)
        described = {"description": about} if about else {}
        spelled = {"x-worqr-key": f"{prefix}:{{{each.name}}}"}
        channels[key] = {"address": each.name, **described, "messages": messages, **spelled}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": "1"},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"schemas": components},
    }


def key_of(name: str) -> str:
    """Return the key of a function in the document, which allows ASCII letters, digits and three other characters."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return name if plain == name else f"{plain}.{sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]}"


def _call(function: FunctionDefinition, schemas: dict[tuple[str, str], Schema]) -> Schema:
    """Return the message that calls a function."""
    codec, title = function.codec, f"A call of {function.name}"
    if codec.ready().raw:
        payload = {"type": "string", "format": "binary"}
        return {"title": title, "contentType": "application/octet-stream", "payload": payload}
    found: Schema = {}
    required: list[str] = []
    for each in codec.parameters:
        found[each.name] = schema = schemas[function.name, each.name]
        if each.default is inspect.Parameter.empty:
            required.append(each.name)
        else:
            schema["default"] = msgspec.json.decode(encode_json(each.default))
    if codec.payload_is_argument:
        return {"title": title, "payload": next(iter(found.values()))}
    return {"title": title, "payload": {"type": "object", "properties": found, "required": required}}


def _schemas(functions: Sequence[FunctionDefinition]) -> tuple[dict[tuple[str, str], Schema], Schema]:
    """Return the schema of each parameter and each ``return``, by function, and those of the classes that they name."""
    hints = {
        (each.name, what): hint
        for each in functions
        for what, hint in each.codec.ready().hints.items()
        if what != "return" or each.results.kept
    }
    models: Schema = {}
    for (function, what), hint in hints.items():
        try:
            _components([hint], models)
        except (TypeError, ValueError) as error:
            about = "what it returns" if what == "return" else f"parameter {what!r}"
            raise UsageError(f"{function}: {about} has a type without a JSON Schema: {error}") from None
    try:
        found, components = _components(list(hints.values()), models)
    except KeyError as error:  # of msgspec
        raise UsageError(f"two classes have one name, in the same place of one module: {error.args[0]!r}") from None
    components |= models
    seen: set[str] = set()
    for hint, schema in zip(hints.values(), found, strict=True):
        _add_formats(schema, types.type_info(hint), components, seen)
    return dict(zip(hints, found, strict=True)), dict(sorted(components.items()))


def _components(hints: list[Any], models: Schema) -> tuple[Sequence[Schema], Schema]:
    """Return the schemas of some types, and those of the classes in them; those of pydantic's models go into `models`."""

    def custom(kind: type[Any]) -> Schema:
        if not is_model(kind):
            return {"description": "Any JSON value"}
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name_of(kind))
        schema = cast("Any", kind).model_json_schema(ref_template=f"{REFERENCE}{name}.{{model}}")
        models.update({f"{name}.{inner}": each for inner, each in schema.pop("$defs", {}).items()})
        models[name] = schema
        return {"$ref": f"{REFERENCE}{name}"}

    return msgspec.json.schema_components(hints, schema_hook=custom, ref_template=f"{REFERENCE}{{name}}")


def _add_formats(schema: Schema, info: types.Type, components: Schema, seen: set[str]) -> None:
    """Add the formats of dates and times to the schema of a type, and to those of the classes that it names."""
    while isinstance(info, types.Metadata):
        info = info.type
    if (reference := schema.get("$ref")) is not None:
        if reference in seen:
            return
        seen.add(reference)
        schema = components[reference.removeprefix(REFERENCE)]
    if type(info) in _FORMATS:
        schema["format"] = _FORMATS[type(info)]
    for inner, part in _parts(schema, info):
        _add_formats(inner, part, components, seen)


def _parts(schema: Schema, info: types.Type) -> list[tuple[Schema, types.Type]]:
    """Return the schemas inside that of a type, each with the type that it is of."""
    if isinstance(info, types.CollectionType):
        return [(schema["items"], info.item_type)] if "items" in schema else []
    if isinstance(info, types.TupleType):
        return list(zip(schema.get("prefixItems", ()), info.item_types, strict=True))
    if isinstance(info, types.DictType):
        return [(schema["additionalProperties"], info.value_type)] if "additionalProperties" in schema else []
    if isinstance(info, types.UnionType):
        return [pair for each in info.types for pair in _members(schema, each)]
    fields = getattr(info, "fields", ())
    if "prefixItems" in schema:  # the first one may be the tag
        tags = len(schema["prefixItems"]) - len(fields)
        return list(zip(schema["prefixItems"][tags:], (each.type for each in fields), strict=True))
    properties = schema.get("properties", {})
    return [(properties[each.encode_name], each.type) for each in fields]


def _members(schema: Schema, info: types.Type) -> list[tuple[Schema, types.Type]]:
    """Return the member of a union that is of this type. A union has one text, one array and one plain object at most."""
    while isinstance(info, types.Metadata):
        info = info.type
    name = getattr(getattr(info, "cls", None), "__name__", None)
    found: list[tuple[Schema, types.Type]] = []
    for each in schema["anyOf"]:
        if "anyOf" in each:
            found += _members(each, info)
        elif "$ref" in each:
            *_, last = (
                each["$ref"].removeprefix(REFERENCE).split(".")
            )  # of two classes of one name, it has their modules
            found += [(each, info)] if last == name else []
        elif each.get("type") == _kind(info):
            found.append((each, info))
    return found


def _kind(info: types.Type) -> str:
    """Return the type in JSON of a member of a union that may have a date in it."""
    if isinstance(info, types.CollectionType | types.TupleType):
        return "array"
    if isinstance(info, types.DictType):
        return "object"
    return "string" if type(info) in _FORMATS else ""
