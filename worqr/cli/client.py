"""For programs in other languages: ``worqr schema`` and ``worqr client``, the functions of a mesh, and ``worqr script``, the
Lua scripts. No server is needed.

The types of a client come from the JSON Schemas of the functions: `Types` walks them, and each language has its own words for
them. `client.ts` and `client.go` beside this file are what all clients of a language have; the rest depends on the functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import flag
from worqr.cli.output import print_json, printable_json, show_table
from worqr.cli.run import load_mesh
from worqr.errors import UsageError, did_you_mean
from worqr.functions.definition import FunctionDefinition
from worqr.functions.schema import REFERENCE, Schema, asyncapi, key_of
from worqr.inside import client_of, declarations_of, definition_of
from worqr.job_options import encode_tags
from worqr.lua import Script, all_scripts
from worqr.lua import script as script_named
from worqr.version import __version__
from worqr.views.tables import Column, column

Target = Annotated[str, Parameter(help="The mesh, as package.module:name.")]
SCRIPTS: Final = ("enqueue", "dispatch_jobs", "job_status", "read_result", "cancel_job")


def schema(
    target: Target | None = None,
    /,
    *,
    openapi: Annotated[bool, flag("Print the addresses of the dashboard's API as OpenAPI 3.1 instead.")] = False,
) -> None:
    """Print the functions of a mesh as AsyncAPI 3, with a JSON Schema for the arguments and the result of each."""
    if openapi == (target is not None):
        raise InvalidArguments("name either a mesh, as package.module:name, or --openapi")
    document = _openapi() if target is None else _described(target)[0]
    print(printable_json(msgspec.json.format(msgspec.json.encode(document), indent=2).decode(), keep="\n"))


def _openapi() -> Schema:
    try:
        from worqr.dashboard.openapi import document
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"the dashboard needs the package {error.name!r}: run `pip install 'worqr[dashboard]'`"
        ) from None
    return document()


def client(
    language: Annotated[Literal["typescript", "go"], Parameter(help="The language of the client.")], target: Target, /
) -> None:
    """Print a typed client of the functions of a mesh, in another language.

    It is one file. In TypeScript, it needs the package redis of npm. In Go, it needs a client of Redis such as go-redis.
    """
    document, functions, prefix = _described(target)
    try:
        print(LANGUAGES[language](document, functions, prefix, target), end="")
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


# What all languages share

_FACTS: Final = """
$ref type enum const anyOf oneOf items prefixItems properties required additionalProperties minItems maxItems format
contentEncoding contentMediaType title description default discriminator minimum maximum exclusiveMinimum
exclusiveMaximum multipleOf minLength maxLength pattern uniqueItems propertyNames minProperties maxProperties examples
deprecated
"""
_KNOWN: Final = frozenset(_FACTS.split())
"""What a schema may have. What else it has might mean another type."""


def _named(functions: Sequence[FunctionDefinition], spell: Callable[[str], str]) -> dict[str, FunctionDefinition]:
    """Return the functions by their names in the client: the last part of their name, or all parts if others end likewise."""
    ends = [spell(each.name.rpartition(".")[2]) for each in functions]
    found: dict[str, FunctionDefinition] = {}
    for end, each in zip(ends, functions, strict=True):
        name = end if ends.count(end) == 1 else spell(each.name)
        if name in found:
            raise UsageError(f"{each.name} and {found[name].name} would both be {name!r}: give one of them name=")
        found[name] = each
    return found


def _camel(name: str) -> str:
    """Return a name in camel case: ``send_mail`` is ``sendMail``."""
    first, *others = [part for part in re.split(r"\W+|_+", name) if part] or ["_"]
    return first[:1].lower() + first[1:] + "".join(part[:1].upper() + part[1:] for part in others)


def _defaults(function: FunctionDefinition) -> dict[str, object]:
    """Return the encoded options that each call of a function has."""
    tags = function.options.tags
    fixed = {"tags": encode_tags(tags)} if tags and not callable(tags) else {}
    return {**function.defaults, **function.lane_bound, **fixed}


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


class _Types:
    """The types of a client, each twice if what a call takes and what a result has differ: a date may be given as a `Date`.

    Attributes:
        language: the language, as errors name it.
        shadowed: the names that a type cannot have.
    """

    language: str
    shadowed: Collection[str]

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._declared: dict[tuple[str, str], list[str]] = {}
        self._taken: set[str] = set()
        self._names: dict[str, str] = {key: self._unique(key.rpartition(".")[2]) for key in schemas}

    def declarations(self) -> Iterator[str]:
        """Yield the lines of the named types that were used."""
        for lines in self._declared.values():
            yield from lines
            yield ""

    def of(self, schema: Any, where: str, use: str, *, is_top: bool = False, name: str = "") -> str:
        """Return the type of a schema in a ``call`` or a ``result``; `is_top`: it is the whole result.

        Args:
            name: what to call the type if it has no name and needs one.

        Raises:
            UsageError: it has no mapping. The error begins with `where`.
        """
        if unknown := schema.keys() - _KNOWN:
            raise self._without_mapping(where, f"its schema has {', '.join(unknown)}")
        if "$ref" in schema:
            return self._declare(schema["$ref"].removeprefix(REFERENCE), where, use)
        if (choices := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return self._choices(choices, name)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._union(schema[several], where, use, is_top=is_top, name=name)
        kind = schema.get("type")
        if kind == "array":
            return self._array(schema, where, use, name)
        if kind == "object":
            return self._object(schema, where, use, name)
        if (found := self._scalar(schema, use, is_top=is_top)) is None:
            raise self._without_mapping(where, repr(kind))
        return found

    def _without_mapping(self, where: str, what: str) -> UsageError:
        return UsageError(f"{where} has a type that {self.language} has no mapping for: {what}")

    def _declare(self, key: str, where: str, use: str) -> str:
        """Declare a named type, and return its name."""
        schema = self._schemas[key]
        use = "call" if "enum" in schema else use
        name = self._names[key] + ("Result" if use == "result" else "")
        if (key, use) not in self._declared:
            lines = self._declared[key, use] = []
            lines += [*self._comment(schema.get("description", "")), *self._declaration(schema, where, use, name)]
        return name

    def _unique(self, name: str) -> str:
        """Return a name that a type can have, like this one, and take it."""
        found = self._spelled(name)
        while {found, f"{found}Result", found.removesuffix("Result")} & {*self._taken, *self.shadowed}:
            found += "_"
        self._taken.add(found)
        return found

    def _spelled(self, name: str) -> str:
        raise NotImplementedError

    def _comment(self, text: str) -> Iterator[str]:
        raise NotImplementedError

    def _declaration(self, schema: Schema, where: str, use: str, name: str) -> Iterator[str]:
        raise NotImplementedError

    def _choices(self, choices: Sequence[Any], name: str) -> str:
        raise NotImplementedError

    def _union(self, schemas: Sequence[Schema], where: str, use: str, *, is_top: bool, name: str) -> str:
        raise NotImplementedError

    def _array(self, schema: Schema, where: str, use: str, name: str) -> str:
        raise NotImplementedError

    def _object(self, schema: Schema, where: str, use: str, name: str) -> str:
        raise NotImplementedError

    def _scalar(self, schema: Schema, use: str, *, is_top: bool) -> str | None:
        raise NotImplementedError


# TypeScript

_TYPESCRIPT: Final = (Path(__file__).parent / "client.ts").read_text("utf-8")
_WORDS: Final = """
any as async await bigint boolean break case catch class const continue debugger declare default delete do else enum
export extends false finally for function if implements import in instanceof interface let never new null number
object package private protected public readonly return static string super switch symbol this throw true try type
typeof undefined unknown var void while with yield Array Buffer Date Error Map NodeJS NonNullable Omit Pick Promise
ReadonlySet Readonly Record ReturnType Set Uint8Array createClient
"""
_SHADOWED: Final = {*_WORDS.split(), *re.findall(r"(?:class|interface|type) (\w+)", _TYPESCRIPT)}
"""Names that a type of a client cannot have: words of the language, and what the fixed part of a client uses."""
_METHODS: Final = {"then": "then_", "constructor": "constructor_", "toString": "toString_", "valueOf": "valueOf_"}
"""Names that JavaScript calls by itself."""


def typescript_of(document: Schema, functions: Sequence[FunctionDefinition], prefix: str, target: str) -> str:
    """Return the client of these functions in TypeScript.

    Raises:
        UsageError: a type has no mapping, or two functions would have one name.
    """
    types = _TypeScript(document["components"]["schemas"])
    methods: list[str] = []
    for name, each in _named(functions, _method_name).items():
        methods += _method(name, each, document["channels"][key_of(each.name)], types)
    sources = msgspec.json.format(msgspec.json.encode({name: script_named(name).source for name in SCRIPTS}), indent=2)
    fixed = _TYPESCRIPT.replace("SOURCES_OF_SCRIPTS", sources.decode())
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


def _method_name(name: str) -> str:
    spelled = _camel(name)
    return _METHODS.get(spelled, spelled)


def _method(name: str, function: FunctionDefinition, channel: Schema, types: _TypeScript) -> Iterator[str]:
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


def _key(name: str) -> str:
    """Return a name as that of a property."""
    return name if re.fullmatch(r"[A-Za-z_$][\w$]*", name, re.ASCII) else _text(name)


def _comment(text: str, indent: str) -> Iterator[str]:
    if text:
        lines = text.replace("*/", "* /").splitlines()
        yield f"{indent}/**"
        yield from (f"{indent} * {line}".rstrip() for line in lines)
        yield f"{indent} */"


class _TypeScript(_Types):
    language = "TypeScript"
    shadowed = _SHADOWED

    def _spelled(self, name: str) -> str:
        found = re.sub(r"\W", "_", name) or "_"
        return f"_{found}" if found[0].isdigit() else found

    def _comment(self, text: str) -> Iterator[str]:
        return _comment(text, "")

    def _declaration(self, schema: Schema, where: str, use: str, name: str) -> Iterator[str]:
        yield f"export type {name} = {self.of(schema, where, use)};"

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

    def _choices(self, choices: Sequence[Any], name: str) -> str:
        return " | ".join(map(_text, choices)) or "never"

    def _union(self, schemas: Sequence[Schema], where: str, use: str, *, is_top: bool, name: str) -> str:
        found = [self.of(each, where, use, is_top=is_top) for each in schemas]
        return f"({' | '.join(dict.fromkeys(found))})"

    def _scalar(self, schema: Schema, use: str, *, is_top: bool) -> str | None:
        kind = schema.get("type")
        if kind == "string" and schema.get("contentEncoding") == "base64":
            return "Uint8Array" if use == "call" else "Buffer" if is_top else "string"
        if kind == "string" and schema.get("format") == "date-time":
            return "(Date | string)" if use == "call" else "string"
        if kind in ("integer", "number") and use == "call":
            return "(number | bigint)" if kind == "integer" else "number"
        if kind is None:
            return "({} | null)" if use == "call" else "unknown"  # anything but undefined
        simple = {"boolean": "boolean", "integer": "number", "number": "number", "string": "string", "null": "null"}
        return simple.get(kind)

    def _array(self, schema: Schema, where: str, use: str, name: str) -> str:
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

    def _object(self, schema: Schema, where: str, use: str, name: str) -> str:
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


# Go

_GO: Final = (Path(__file__).parent / "client.go").read_text("utf-8")
_DECLARED: Final = re.compile(r"^(?:type|func) ([A-Z]\w*)|^\t([A-Z]\w*) += ", re.MULTILINE)
_EXPORTED: Final = {"Mesh", "New", *(first or second for first, second in _DECLARED.findall(_GO))}
"""What the fixed part of a client declares, which no type of a function can be called."""
_GO_WORDS: Final = """
break case chan const continue default defer else fallthrough for func go goto if import interface map package range
return select struct switch type var init main
"""


def go_of(document: Schema, functions: Sequence[FunctionDefinition], prefix: str, target: str) -> str:
    """Return the client of these functions in Go, of the package that is called like the module.

    Raises:
        UsageError: a type has no mapping, or two functions would have one name.
    """
    types = _Go(document["components"]["schemas"])
    fields, made = list[str](), list[str]()
    for name, each in _named(functions, _exported).items():
        channel = document["channels"][key_of(each.name)]
        kind = types.function(name, each, channel["messages"])
        fields += [*_go_comment(channel.get("description", ""), "\t"), f"\t{name} {kind}"]
        made.append(f"\t\t{name}: {_go_value(kind, each)},")
    sources = "".join(f"\n\t{_text(name)}: {_text(script_named(name).source)}," for name in SCRIPTS)
    head, _, rest = _GO.replace("SOURCES_OF_SCRIPTS", f"{sources}\n").partition("\n\n")
    return "\n".join(
        [
            f"// Code generated by `worqr client go {target}` of worqr {__version__}. DO NOT EDIT.",
            "",
            f"package {_package(target)}",
            "",
            head,
            "",
            f"const prefix = {_text(prefix)}",
            "",
            *types.declarations(),
            "// Mesh has the functions of the mesh.",
            "type Mesh struct {",
            *fields,
            "}",
            "",
            "// New returns the functions of the mesh, whose commands are sent by do.",
            "func New(do Do, settings Settings) (*Mesh, error) {",
            "\tproducer, err := NewProducer(do, settings)",
            "\tif err != nil {",
            "\t\treturn nil, err",
            "\t}",
            "\treturn &Mesh{",
            *made,
            "\t}, nil",
            "}",
            "",
            rest,
        ]
    )


def _go_value(kind: str, function: FunctionDefinition) -> str:
    """Return a function of this type."""
    flags = f"{_text(function.codec.ready().raw)}, {_text(function.options.shards > 1)}"
    fields = f"{{producer, {_text(function.name)}, {flags}, {_go_options(_defaults(function))}}}"
    return f"{kind}{fields}" if kind.startswith("Jobs") else f"{kind}{{Jobs{kind.removeprefix('Task')}{fields}}}"


def _package(target: str) -> str:
    """Return the package of a client: the last part of the name of the module."""
    name = re.sub(r"\W", "", target.partition(":")[0].rpartition(".")[2], flags=re.ASCII).lower()
    return f"{name}mesh" if not name or name[0] in "_0123456789" or name in _GO_WORDS.split() else name


def _exported(name: str) -> str:
    """Return a name as Go exports it: ``send_mail`` is ``SendMail``."""
    found = _camel(name)
    found = found[:1].upper() + found[1:]
    return found if re.match(r"[^\W\d_]", found) and found[0].isupper() else f"X{found}"


def _go_options(options: Mapping[str, object]) -> str:
    items = (
        f"{_text(name)}: {f'int64({each})' if type(each) is int else _text(each)}" for name, each in options.items()
    )
    return f"map[string]any{{{', '.join(items)}}}"


def _go_comment(text: str, indent: str = "") -> Iterator[str]:
    return (f"{indent}// {line}".rstrip() for line in text.splitlines())


class _Go(_Types):
    """Go has no unions but with null, so a value of several types is `any`. What may be null or left out is a pointer."""

    language = "Go"
    shadowed = _EXPORTED
    _SCALARS: Final = {
        "boolean": "bool",
        "integer": "int64",
        "number": "float64",
        "string": "string",
        "null": "*struct{}",
    }

    def function(self, name: str, function: FunctionDefinition, messages: Schema) -> str:
        """Return the type of a function, and declare that of its arguments."""
        payload, codec = messages["call"]["payload"], function.codec
        if codec.ready().raw:
            arguments = "[]byte"
        elif codec.payload_is_argument:
            where = f"{function.name}: parameter {codec.parameters[0].name!r}"
            arguments = self.of(payload, where, "call", name=f"{name}Arg")
        else:
            arguments = self._unique(f"{name}Args")
            about = f"// {arguments} are the arguments of {name}."
            fields = self._struct(payload, f"{function.name}: parameter ", "call", name)
            self._declared[arguments, "arguments"] = [about, f"type {arguments} {fields}"]
        result = "struct{}"
        if "result" in messages:
            where = f"{function.name}: what it returns"
            result = self.of(messages["result"]["payload"], where, "result", is_top=True, name=f"{name}Returns")
        return f"{'Jobs' if function.options.policy.workflow else 'Task'}[{arguments}, {result}]"

    def _spelled(self, name: str) -> str:
        return _exported(name)

    def _comment(self, text: str) -> Iterator[str]:
        return _go_comment(text)

    def _declaration(self, schema: Schema, where: str, use: str, name: str) -> Iterator[str]:
        if "enum" in schema or "const" in schema:
            yield from self._enumeration(schema.get("enum") or [schema["const"]], name)
            return
        found = self.of(schema, where, use, name=name)
        yield f"type {name} {'' if found.startswith(('struct', '[', 'map')) else '= '}{found}"

    def _choices(self, choices: Sequence[Any], name: str) -> str:
        found = self._unique(name or "Choice")
        self._declared[found, "choice"] = [*self._enumeration(choices, found)]
        return found

    def _enumeration(self, choices: Sequence[Any], name: str) -> Iterator[str]:
        """Yield a type with constants; an alias of `any` if the values have several types."""
        bases = {{"str": "string", "int": "int64", "float": "float64"}.get(type(each).__name__) for each in choices}
        base = bases.pop() if len(bases) == 1 else None
        if base is None:
            yield f"type {name} = any // one of {' '.join(map(_text, choices))}"
            return
        yield f"type {name} {base}"
        yield "const ("
        for each in choices:
            word = f"Minus {-each}" if isinstance(each, int | float) and each < 0 else str(each)
            end = "".join(part[:1].upper() + part[1:] for part in re.split(r"\W+|_+", word))
            yield f"\t{self._unique(name + end)} {name} = {_text(each)}"
        yield ")"
        yield f"func ({name}) values() []any {{ return []any{{{', '.join(map(_text, choices))}}} }}"

    def _union(self, schemas: Sequence[Schema], where: str, use: str, *, is_top: bool, name: str) -> str:
        several = [each for each in schemas if each.get("type") != "null"]
        found = {self.of(each, where, use, is_top=is_top, name=name) for each in several}
        one = found.pop() if len(found) == 1 else "any"
        return one if one == "any" or len(several) == len(schemas) else f"*{one}"

    def _array(self, schema: Schema, where: str, use: str, name: str) -> str:
        if "prefixItems" not in schema:
            return f"[]{self.of(schema.get('items', {}), where, use, name=f'{name}Item')}"
        items = [self.of(each, where, use, name=f"{name}Item{i}") for i, each in enumerate(schema["prefixItems"])]
        is_fixed = schema.get("minItems", len(items)) == len(items)
        return f"[{len(items)}]{items[0]}" if len({*items}) == 1 and is_fixed else "[]any"

    def _object(self, schema: Schema, where: str, use: str, name: str) -> str:
        if "properties" in schema:
            return self._struct(schema, f"{where}, field ", use, name)
        value = schema.get("additionalProperties", {})
        return f"map[string]{'any' if value in (True, False) else self.of(value, where, use, name=f'{name}Value')}"

    def _struct(self, schema: Schema, where: str, use: str, name: str) -> str:
        lines: list[str] = []
        taken: set[str] = set()
        for key, each in schema["properties"].items():
            if not re.fullmatch(r"[\w!#$%&()*+\-./:;<=>?@\[\]^{|}~ ]+", key):
                raise UsageError(f"{where}{key!r} has a name that Go has no tag for: rename it")
            field = _exported(key)
            while field in taken:
                field += "_"
            taken.add(field)
            kind = self.of(each, f"{where}{key!r}", use, name=f"{name}{field}")
            is_required = key in schema.get("required", ()) or (use == "result" and "default" in each)
            kind, tag = (
                (kind, f"{key}," if key == "-" else key) if is_required else self._optional(kind, each, use, key)
            )
            lines.append(f'\t{field} {kind} `json:"{tag}"`')
        return "\n".join(["struct {", *lines, "}"])

    def _optional(self, kind: str, schema: Schema, use: str, key: str) -> tuple[str, str]:
        """Return the type of a field that may be left out, and its tag: without a value, it is left out."""
        default = schema.get("default", ...)
        is_null = default is None or use == "result"
        has_nil = kind.startswith(("[]", "map[")) or (is_null and (kind == "any" or kind.startswith("*")))
        return (kind if has_nil else f"*{kind}"), f"{key},omitempty"

    def _scalar(self, schema: Schema, use: str, *, is_top: bool) -> str | None:
        kind = schema.get("type")
        if kind == "string" and schema.get("contentEncoding") == "base64":
            return "[]byte"
        if kind == "string" and schema.get("format") == "date-time" and use == "call":
            return "time.Time"  # a result may be without a zone, which time.Time does not read
        return "any" if kind is None else self._SCALARS.get(kind)


LANGUAGES: Final = {"typescript": typescript_of, "go": go_of}


# The scripts

_FIELD: Final = re.compile(r"-- (?:KEYS\[|ARGV\[|RETURNS |RESEND |USES )")
"""The line after the guarantee in the header of a script."""
SCRIPT: Final = column("name", title="script")
SHA: Final = column("sha", fit="fold", least=20)


def script(
    name: Annotated[
        str | None, Parameter(help="Name of the script whose source is printed. Default: list all scripts.")
    ] = None,
    /,
    *,
    sha: Annotated[bool, flag("Print the SHA-1 for EVALSHA.")] = False,
    header: Annotated[bool, flag("Print guarantee, KEYS, ARGV and replies.")] = False,
    readable: Annotated[bool, flag("Print the source with its own names, line for line what is sent.")] = False,
    cluster: Annotated[bool, flag("Print the variant for Redis Cluster.")] = False,
    every: Annotated[
        bool, Parameter(name="--list", show_default=False, help="List all scripts. This is the default.")
    ] = False,
    json: Annotated[bool, flag("Print the list as JSON Lines.")] = False,
) -> None:
    """Print the Lua scripts, which producers in other languages call."""
    if name is not None and (every or json):
        raise InvalidArguments(f"--{'list' if every else 'json'} lists all scripts: omit {name!r}")
    if header and (name is None or sha):
        raise InvalidArguments("--header prints the header of one script: name the script, and omit --sha")
    if readable and (name is None or sha or header):
        raise InvalidArguments("--readable prints one script: name the script, and omit --sha and --header")
    if name is None:
        _print_all([_variant(each, cluster=cluster) for each in all_scripts()], sha=sha, json=json)
        return
    known = {each.name: each for each in all_scripts()}
    if name not in known:
        hint = did_you_mean(name, known, "`worqr script` lists them")
        raise CommandFailed(f"there is no script {name!r}; {hint}")
    found = _variant(known[name], cluster=cluster)
    if sha:
        print(found.sha)
        return
    if header:
        print(found.header, end="")
        return
    sys.stdout.flush()
    printed = found.text if readable else found.source  # byte for byte: the SHA-1 depends on it
    sys.stdout.buffer.write(printed.encode())


def _variant(script: Script, *, cluster: bool) -> Script:
    return script.sharded if cluster else script


def _print_all(scripts: list[Script], *, sha: bool, json: bool) -> None:
    if json:
        for each in scripts:
            print_json({"name": each.name, "sha": each.sha, "does": guarantee(each)})
    elif sha:
        show_table((SCRIPT, SHA), scripts)
    else:
        show_table((SCRIPT, Column("does", "does", guarantee, fit="fold", least=24)), scripts)


def guarantee(script: Script) -> str:
    """Return the first sentence of the script's header."""
    header = script.header.removeprefix(f"-- {script.name}: ")
    words: list[str] = []
    for line in f"-- {header}".splitlines():
        if not line.startswith("-- ") or _FIELD.match(line):
            break
        words.append(line.removeprefix("-- "))
    return re.split(r"(?<=\.)\s", " ".join(words), maxsplit=1)[0]
