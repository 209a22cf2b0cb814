"""``worqr schema`` and ``worqr client``: the functions of a mesh for programs in other languages. No server is needed.

The types of a client come from the JSON Schemas of the functions. `client.ts` beside this file is the part that all clients in
TypeScript have; what is before and after it depends on the functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

from worqr.cli.errors import CommandFailed
from worqr.cli.run import load_mesh
from worqr.errors import UsageError
from worqr.functions.definition import FunctionDefinition
from worqr.functions.schema import REFERENCE, Schema, asyncapi, key_of
from worqr.inside import client_of, declarations_of, definition_of
from worqr.job_options import encode_tags
from worqr.lua import script
from worqr.version import __version__

Target = Annotated[str, Parameter(help="The mesh, as package.module:name.")]
SCRIPTS: Final = ("enqueue", "dispatch_jobs", "job_status", "read_result", "cancel_job")


def schema(target: Target, /) -> None:
    """Print the functions of a mesh as AsyncAPI 3, with a JSON Schema for the arguments and the result of each."""
    document, _, _ = _described(target)
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def client(
    language: Annotated[Literal["typescript"], Parameter(help="The language of the client.")], target: Target, /
) -> None:
    """Print a typed client of the functions of a mesh, in another language.

    It is one file. In TypeScript, it needs the package redis of npm.
    """
    assert language == "typescript"
    document, functions, prefix = _described(target)
    try:
        print(typescript_of(document, functions, prefix, target), end="")
    except UsageError as error:
        raise CommandFailed(str(error)) from None


def _described(target: str) -> tuple[Schema, list[FunctionDefinition], str]:
    """Return the document of a mesh, its functions, and its prefix."""
    mesh = load_mesh(target)
    functions = sorted(map(definition_of, declarations_of(mesh).functions.values()), key=lambda each: each.name)
    if not functions:
        raise CommandFailed(
            f"the mesh {target!r} has no functions: declare them with @mesh.task, or include their registry"
        )
    prefix = client_of(mesh).settings.prefix
    try:
        return asyncapi(functions, prefix, target), functions, prefix
    except UsageError as error:
        raise CommandFailed(str(error)) from None


# TypeScript

_FIXED: Final = (Path(__file__).parent / "client.ts").read_text("utf-8")
_WORDS: Final = """
any as async await bigint boolean break case catch class const continue debugger declare default delete do else enum
export extends false finally for function if implements import in instanceof interface let never new null number
object package private protected public readonly return static string super switch symbol this throw true try type
typeof undefined unknown var void while with yield Array Buffer Date Error Map NodeJS NonNullable Omit Pick Promise
ReadonlySet Readonly Record ReturnType Set Uint8Array createClient
"""
_SHADOWED: Final = {*_WORDS.split(), *re.findall(r"(?:class|interface|type) (\w+)", _FIXED)}
"""Names that a type of a client cannot have: words of the language, and what the fixed part of a client uses."""
_METHODS: Final = {"then": "then_", "constructor": "constructor_", "toString": "toString_", "valueOf": "valueOf_"}
"""Names that JavaScript calls by itself."""
_FACTS: Final = """
$ref type enum const anyOf oneOf items prefixItems properties required additionalProperties minItems maxItems format
contentEncoding contentMediaType title description default discriminator minimum maximum exclusiveMinimum
exclusiveMaximum multipleOf minLength maxLength pattern uniqueItems propertyNames minProperties maxProperties examples
deprecated
"""
_KNOWN: Final = frozenset(_FACTS.split())
"""What a schema may have. What else it has might mean another type."""


def typescript_of(document: Schema, functions: Sequence[FunctionDefinition], prefix: str, target: str) -> str:
    """Return the client of these functions in TypeScript.

    Raises:
        UsageError: a type has no mapping, or two functions would have one name.
    """
    types = _Types(document["components"]["schemas"])
    methods: list[str] = []
    for name, each in _named(functions).items():
        methods += _method(name, each, document["channels"][key_of(each.name)], types)
    sources = msgspec.json.format(msgspec.json.encode({name: script(name).source for name in SCRIPTS}), indent=2)
    fixed = _FIXED.replace("SOURCES_OF_SCRIPTS", sources.decode())
    head, _, rest = fixed.partition("\n\n")
    return "\n".join(
        [
            f"// Made by `worqr client typescript {target}` of worqr {__version__}. Make it again when the functions change.",
            head,
            "",
            f"const PREFIX = {_text(prefix)};",
            *types.declarations(),
            "/** The functions of the mesh, whose requests go through this client of `redis`. */",
            "export function mesh(redis: Redis, settings: Settings = {}) {",
            "  const producer = new Producer(redis, settings);",
            "  return {",
            *methods,
            "  };",
            "}",
            "",
            rest,
        ]
    )


def _named(functions: Sequence[FunctionDefinition]) -> dict[str, FunctionDefinition]:
    """Return the functions by their names in the client: the last part of their name, or all parts if others end likewise."""
    ends = [_camel(each.name.rpartition(".")[2]) for each in functions]
    found: dict[str, FunctionDefinition] = {}
    for end, each in zip(ends, functions, strict=True):
        name = end if ends.count(end) == 1 else _camel(each.name)
        name = _METHODS.get(name, name)
        if name in found:
            raise UsageError(f"{each.name} and {found[name].name} would both be {name!r}: give one of them name=")
        found[name] = each
    return found


def _camel(name: str) -> str:
    """Return a name as JavaScript spells it: ``send_mail`` is ``sendMail``."""
    first, *others = [part for part in re.split(r"\W+|_+", name) if part] or ["_"]
    return first[:1].lower() + first[1:] + "".join(part[:1].upper() + part[1:] for part in others)


def _method(name: str, function: FunctionDefinition, channel: Schema, types: _Types) -> Iterator[str]:
    """Yield the lines of one function."""
    messages, codec = channel["messages"], function.codec
    payload, raw = messages["call"]["payload"], codec.ready().raw
    takes = int(raw or codec.payload_is_argument or bool(payload["properties"]))
    arguments = ""
    if takes:
        optional = (
            "?"
            if not codec.payload_is_argument and all(each.default is not each.empty for each in codec.parameters)
            else ""
        )
        arguments = f"arguments_{optional}: {'Uint8Array' if raw else types.arguments(function, payload)}"
    result = "never"
    if "result" in messages:
        result = types.of(messages["result"]["payload"], f"{function.name}: what it returns", "result", is_top=True)
    only = ', Omit<DispatchOptions, "id" | "uniqueFor" | "lane">' if function.options.shards > 1 else ""
    options = msgspec.json.encode(_defaults(function)).decode()
    yield from _comment(channel.get("description", ""), "    ")
    made = f"new Task<[{arguments}], {result}{only}>(producer, {_text(function.name)}, "
    made += f"{{ takes: {takes}, raw: {_text(raw)}, options: {options} }})"
    without = f'{made} as Omit<Task<[{arguments}], {result}{only}>, "enqueue">'  # a workflow is a job
    yield f"    {_key(name)}: {without if function.options.policy.workflow else made},"


def _defaults(function: FunctionDefinition) -> dict[str, object]:
    """Return the encoded options that each call of a function has."""
    tags = function.options.tags
    return {**function.defaults, **({"tags": encode_tags(tags)} if tags and not callable(tags) else {})}


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _key(name: str) -> str:
    """Return a name as that of a property."""
    return name if re.fullmatch(r"[A-Za-z_$][\w$]*", name, re.ASCII) else _text(name)


def _comment(text: str, indent: str) -> Iterator[str]:
    if text:
        lines = text.replace("*/", "* /").splitlines()
        yield f"{indent}/**"
        yield from (f"{indent} * {line}".rstrip() for line in lines)
        yield f"{indent} */"


class _Types:
    """The types of a client, each twice if what a call takes and what a result has differ: a date may be given as a `Date`."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._declared: dict[tuple[str, str], list[str]] = {}
        self._names: dict[str, str] = {}
        for key in schemas:
            name = re.sub(r"\W", "_", key.rpartition(".")[2]) or "_"
            name = f"_{name}" if name[0].isdigit() else name
            while (
                name in _SHADOWED or name in self._names.values() or name.removesuffix("Result") in self._names.values()
            ):
                name += "_"
            self._names[key] = name

    def declarations(self) -> Iterator[str]:
        """Yield the lines of the named types that were used."""
        for lines in self._declared.values():
            yield from lines
            yield ""

    def arguments(self, function: FunctionDefinition, payload: Schema) -> str:
        """Return the type of the arguments of a call."""
        if function.codec.payload_is_argument:
            return self.of(payload, f"{function.name}: parameter {function.codec.parameters[0].name!r}", "call")
        fields = [
            f"{_key(name)}{'' if name in payload['required'] else '?'}: "
            f"{self.of(each, f'{function.name}: parameter {name!r}', 'call')}"
            for name, each in payload["properties"].items()
        ]
        return f"{{ {'; '.join(fields)} }}"

    def of(self, schema: Any, where: str, use: str, *, is_top: bool = False) -> str:
        """Return the type of a schema in a ``call`` or a ``result``; `is_top`: it is the whole result.

        Raises:
            UsageError: it has no mapping. The error begins with `where`.
        """
        if unknown := schema.keys() - _KNOWN:
            raise UsageError(
                f"{where} has a type that TypeScript has no mapping for: its schema has {', '.join(unknown)}"
            )
        if "$ref" in schema:
            return self._declare(schema["$ref"].removeprefix(REFERENCE), where, use)
        if (choices := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return " | ".join(map(_text, choices)) or "never"
        for several in ("anyOf", "oneOf"):
            if several in schema:
                found = [self.of(each, where, use, is_top=is_top) for each in schema[several]]
                return f"({' | '.join(dict.fromkeys(found))})"
        kind = schema.get("type")
        if kind == "array":
            return self._array(schema, where, use)
        if kind == "object":
            return self._object(schema, where, use)
        if kind == "string" and schema.get("contentEncoding") == "base64":
            return "Uint8Array" if use == "call" else "Buffer" if is_top else "string"
        if kind == "string" and schema.get("format") == "date-time":
            return "(Date | string)" if use == "call" else "string"
        simple = {"boolean": "boolean", "integer": "number", "number": "number", "string": "string", "null": "null"}
        if kind in ("integer", "number") and use == "call":
            return "(number | bigint)" if kind == "integer" else "number"
        if kind in simple:
            return simple[kind]
        if kind is not None:
            raise UsageError(f"{where} has a type that TypeScript has no mapping for: {kind!r}")
        return "({} | null)" if use == "call" else "unknown"  # anything but undefined

    def _array(self, schema: Schema, where: str, use: str) -> str:
        read = "readonly " if use == "call" else ""
        if "prefixItems" in schema:
            least = schema.get("minItems", len(schema["prefixItems"]))
            items = [f"{self.of(each, where, use)}" for each in schema["prefixItems"]]
            return f"{read}[{', '.join(each + '?' * (i >= least) for i, each in enumerate(items))}]"
        if schema.get("maxItems") == 0 and "items" not in schema:
            return f"{read}[]"
        item = self.of(schema.get("items", {}), where, use)
        return (
            f"({read}({item})[] | ReadonlySet<{item}>)"
            if use == "call" and "uniqueItems" in schema
            else f"{read}({item})[]"
        )

    def _object(self, schema: Schema, where: str, use: str) -> str:
        if "properties" not in schema:
            value = schema.get("additionalProperties", {})
            item = "unknown" if value is True else "never" if value is False else self.of(value, where, use)
            return f"{{ {'readonly ' if use == 'call' else ''}[name: string]: {item} }}"
        return "{ " + "; ".join(self._fields(schema, where, use)) + " }"

    def _fields(self, schema: Schema, where: str, use: str) -> Iterator[str]:
        required = schema.get("required", ())
        for name, each in schema["properties"].items():
            # of a result, what has a default is there; what a TypedDict need not have, has none
            is_optional = name not in required and (use == "call" or "default" not in each)
            yield f"{_key(name)}{'?' if is_optional else ''}: {self.of(each, where, use)}"

    def _declare(self, key: str, where: str, use: str) -> str:
        """Declare a named type, and return its name."""
        name = self._names[key] + ("Result" if use == "result" else "")
        if (key, use) not in self._declared:
            lines = self._declared[key, use] = []
            schema = self._schemas[key]
            lines += [
                *_comment(schema.get("description", ""), ""),
                f"export type {name} = {self.of(schema, where, use)};",
            ]
        return name
