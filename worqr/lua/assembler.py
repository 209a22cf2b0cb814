"""The assembler of scripts: puts the shared functions that a script calls in front of its body.

Here are a tokenizer of Lua, the call graph of the shared functions, and the text that is sent to the server. All of it is pure.
A file is a list of definitions at the beginning of a line: ``local function name(...)`` or ``local NAME = ...``. A transaction is
a function without parameters whose comment, its header, begins with its name and a colon. No other function calls it.
A script gets the definitions that its body names, and those that they name, each before its first use, because Lua's scoping
requires that. `worqr.lua` lists the files and documents the lines of a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Final

_TOKEN: Final = re.compile(
    r"""
    (?P<space> \s+ )
  | (?P<comment> --\[(?P<c>=*)\[ .*? \](?P=c)\] | --[^\n]* )
  | (?P<string> '(?:\\.|[^'\\\n])*' | "(?:\\.|[^"\\\n])*" | \[(?P<s>=*)\[ .*? \](?P=s)\] )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<number> \d (?:[eE][+-]?|[\w.])* )
  | (?P<symbol> [^\w\s'"\[-]+ | [\[-] )
  | (?P<open> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_DEFINED: Final = re.compile(r"local (?:function (\w+)\(|(\w+) =)")
_OTHER_CODE: Final = re.compile(r"(?<=\n)(?!end\n|\}\n|\]\]\n)\S")
"""A line that is neither indented nor the end of a definition."""
_LITERAL: Final = re.compile(r"local \w+ = (\d+|'[^'\n]*')\n")
_LATER: Final = "-- LATER"
_MADE_LATER: Final = """local made_{name}
local function make_{name}()
{code}return {name}
end
local function {name}(...)
  made_{name} = made_{name} or make_{name}()
  return made_{name}(...)
end
"""


_TRANSACTION: Final = re.compile(
    r"^(?P<header>-- (?P<name>\w+): .*\n(?:--.*\n)*)local function (?P=name)\(\)\n(?P<body>(?:(?: .*)?\n)*)end\n",
    re.MULTILINE,
)

Token = tuple[str, str]
"""One word of a Lua text: its kind (space, comment, string, name, number or symbol) and the word. Symbols without a space between
them are one token, but for brackets and minus signs, which begin one."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or a constant of a file."""

    name: str
    code: str
    """Its text, without comments."""
    uses: tuple[str, ...]
    """Every name in it that may be another definition's, in the order of appearance."""
    later: bool
    """The comment in front of it has a line that begins with ``-- LATER``: it is made at its first call."""
    literal: str = ""
    """The value of a constant that is a number or a text, as it is written. It is sent in place of the name: a function that uses
    a variable outside it takes longer to make."""


def tokens(text: str) -> Iterator[Token]:
    """Yield all tokens of the text in order; together they are the text.

    Raises:
        ValueError: a string has no end.
    """
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or ""
        if kind == "open":
            raise ValueError(f"line {text.count(chr(10), 0, found.start()) + 1}: a string has no end")
        yield kind, found[0]


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction: its name, its header, and the lines of its function, as if they stood at the top of a file."""

    name: str
    header: str
    body: str


def transactions(text: str) -> list[Transaction]:
    """Return the transactions of a file, in their order."""
    return [
        Transaction(found["name"], found["header"], found["body"].replace("\n  ", "\n").removeprefix("  "))
        for found in _TRANSACTION.finditer(text)
    ]


def strip(text: str) -> str:
    """Return the text without comments and empty lines. Every other line keeps its indentation."""
    return _scan(tokens(text))[0]


def names(text: str) -> tuple[str, ...]:
    """Return the names that the text uses: neither fields nor what it assigns, each once, in the order of appearance."""
    return _scan(tokens(text))[1]


def _scan(words: Iterable[Token]) -> tuple[str, tuple[str, ...]]:
    """Return what `strip` and `names` return of a text of these tokens."""
    code: list[str] = []
    found: dict[str, None] = {}
    gap, before, candidate = "", "", ""
    for kind, text in words:
        if kind == "space":
            gap += text
            continue
        if kind == "comment":
            gap = gap or " "
            continue
        if "\n" in gap:
            gap = gap[gap.rindex("\n") + (not code) :]
        code += (gap, text)
        if candidate and not (text[0] == "=" and text[:2] != "=="):
            found[candidate] = None
        candidate = text if kind == "name" and (before[-1:] not in {".", ":"} or before[-2:] == "..") else ""
        gap, before = "", text
    if candidate:
        found[candidate] = None
    return "".join([*code, "\n"]) if code else "", tuple(found)


def definitions(text: str) -> list[Definition]:
    """Return the definitions of a file, in their order.

    Raises:
        ValueError: the file has other code between them.
    """
    words = list(tokens(text))
    starts = [n for n, word in enumerate(words) if word[1] == "local" and (n == 0 or words[n - 1][1][-1] == "\n")]
    if any(kind not in {"space", "comment"} for kind, _ in words[: starts[0] if starts else None]):
        raise ValueError("a file has only definitions, and begins with something else")
    return [
        _definition(words[start:end], later=_is_later(words[:start])) for start, end in pairwise([*starts, len(words)])
    ]


def _is_later(before: list[Token]) -> bool:
    """Return True if the comment at the end of `before` has a line that begins with ``-- LATER``."""
    comment = takewhile(lambda word: word[0] in {"space", "comment"}, reversed(before))
    return any(text.startswith(_LATER) for _, text in comment)


def _definition(words: list[Token], *, later: bool) -> Definition:
    code, uses = _scan(words)
    found = _DEFINED.match(code)
    if not found or _OTHER_CODE.search(code):
        raise ValueError(f"more or less than `local function name(` or `local NAME =`: {code!r}")
    name: str = found[1] or found[2]
    literal = _LITERAL.fullmatch(code)
    return Definition(name, code, tuple(each for each in uses if each != name), later, literal[1] if literal else "")


def library(modules: Iterable[str]) -> dict[str, Definition]:
    """Return all definitions of these files by name, but for the transactions.

    Raises:
        ValueError: a name is defined twice.
    """
    known: dict[str, Definition] = {}
    for module in modules:
        for each in definitions(_TRANSACTION.sub("", module)):
            if each.name in known:
                raise ValueError(f"{each.name!r} is defined twice")
            known[each.name] = each
    return known


def assemble(body: str, known: Mapping[str, Definition]) -> str:
    """Return the body without comments, after all definitions that it needs. Constants are literals in it.

    Raises:
        ValueError: definitions call each other in a circle.
    """
    code, uses = _scan(tokens(body))
    return with_literals(_linked(uses, known, frozenset()) + code, known)


def with_literals(code: str, known: Mapping[str, Definition]) -> str:
    """Return the code with the literals of constants in place of their names."""
    literals = {each.name: each.literal for each in known.values() if each.literal}
    return "".join([literals.get(text, text) if kind == "name" else text for kind, text in tokens(code)])


def _linked(uses: tuple[str, ...], known: Mapping[str, Definition], outer: frozenset[str]) -> str:
    """Return the definitions that `uses` needs, each after those that it needs itself; `outer` are defined already.

    A definition that is made later is inside a function, together with the definitions that only it needs.
    """
    here = _needed_now(uses, known) - outer
    parts: list[str] = []
    for name in _in_order(uses, known):
        each = known[name]
        if name not in here or each.literal:
            continue
        if each.later:
            code = _linked(each.uses, known, outer | here) + each.code
            parts.append(_MADE_LATER.format(name=name, code=code))
        else:
            parts.append(each.code)
    return "".join(parts)


def _needed_now(uses: tuple[str, ...], known: Mapping[str, Definition]) -> frozenset[str]:
    """Return the definitions that are reached from `uses` without a call of one that is made later."""
    found: set[str] = set()
    left = list(uses)
    while left:
        name = left.pop()
        if name in known and name not in found:
            found.add(name)
            left += () if known[name].later else known[name].uses
    return frozenset(found)


def _in_order(uses: tuple[str, ...], known: Mapping[str, Definition]) -> list[str]:
    """Return all definitions that are reached from `uses`, each after those that it uses."""
    done: list[str] = []
    path: list[str] = []

    def visit(name: str) -> None:
        if name in path:
            raise ValueError(f"a circle of calls: {' -> '.join([*path[path.index(name) :], name])}")
        if name not in known or name in done:
            return
        path.append(name)
        for each in known[name].uses:
            visit(each)
        path.pop()
        done.append(name)

    for each in uses:
        visit(each)
    return done
