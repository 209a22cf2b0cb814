"""The assembler of scripts: puts the shared functions that a script calls in front of its body.

Here are a tokenizer of Lua, the call graph of the shared functions, and the text that is sent to the server. All of it is pure.
A file is a list of definitions at the beginning of a line: ``local function name(...)`` or ``local NAME = ...``. A transaction is
a function without parameters whose comment, its header, begins with its name and a colon. No other function calls it.
A script gets the definitions that its body names, and those that they name, once each, as fields of the table ``shared``: neither
the 200 locals nor the 60 upvalues of Lua limit their number. Definitions that a script always needs can be locals in front of
it. Then all others are made together, when the first of them is needed, in one step or in two. Several transactions can share
a script: it has what at least two of them need once, and a branch for each.
What is sent has short names and no indentation, and the same lines as the text for people. `worqr.lua` lists the files and
documents the lines of a header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, islice, pairwise, product
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits
from typing import Final

import msgspec

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
_BEGINS: Final = re.compile(r"^(?=local )", re.MULTILINE)
_DEFINED: Final = re.compile(r"local (?:function (\w+)\(|(\w+) =)")
_OTHER_CODE: Final = re.compile(r"(?<=\n)(?!end\n|\}\n|\]\]\n)\S")
"""A line that is neither indented nor the end of a definition."""
_COMMENTS: Final = re.compile(r"(?:--.*\n|\n)*")
_LITERAL: Final = re.compile(rf"local [A-Z_\d]+ = (\d+|'[^'\n]*')(?: *--.*)?\n{_COMMENTS.pattern}")
SHARED: Final = "shared"
"""The table of the definitions."""
_SHORT_SHARED: Final = "_"
SHORT_CALLS: Final = {
    "redis.call": "C",
    "redis.pcall": "P",
    "string.find": "F",
    "string.match": "M",
    "string.format": "S",
    "string.sub": "U",
    "math.max": "X",
    "math.min": "N",
    "math.floor": "L",
    "table.concat": "T",
}
"""Functions of the server that what is sent has as local variables, if it calls them: that is shorter, and takes less memory."""
_MADE_TOGETHER: Final = (
    "setmetatable(shared, {__index = function(shared, name)\n",
    "return rawget(shared, name)\nend})\n",
)
_MADE_FIRST: Final = "return rawget(shared, name) or shared[name]\nend})\n"
"""What ends those that are often needed, after what makes the others."""
_NAMED: Final = "local transaction=table.remove(ARGV)\n"
_UNKNOWN: Final = "\nreturn redis.error_reply('ERR the last argument names no transaction of this script')\nend\n"
"""How several transactions in one script begin and end."""

_TRANSACTION: Final = re.compile(
    r"^(?P<header>-- (?P<name>\w+): .*\n(?:--.*\n)*)local function (?P=name)\(\)\n(?P<body>(?:(?: .*)?\n)*)end\n",
    re.MULTILINE,
)
_KEYWORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "and break do else elseif end false for function if in local nil not or repeat return then true until while",
    )
)

Token = tuple[str, str]
"""One word of a Lua text: its kind (space, comment, string, name, number or symbol) and the word. Symbols without a space between
them are one token, but for brackets and minus signs, which begin one."""


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


class Code:
    """A text of Lua, looked at when something of it is asked for."""

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @cached_property
    def _words(self) -> list[tuple[str, str, str]]:
        """Each word that is neither space nor comment: what is left of the spaces in front of it, its kind, and the word."""
        found: list[tuple[str, str, str]] = []
        gap = ""
        for kind, text in tokens(self.raw):
            if kind == "space":
                gap += text
            elif kind == "comment":
                gap = gap or " "
            else:
                if "\n" in gap:
                    gap = gap[gap.rindex("\n") + (not found) :]
                found.append((gap, kind, text))
                gap = ""
        return found

    @cached_property
    def stripped(self) -> str:
        """The text without comments and empty lines. Every other line keeps its indentation."""
        words = self._words
        return "".join([*(gap + text for gap, _, text in words), "\n"]) if words else ""

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The names that the text uses: neither fields nor what it assigns, each once, in the order of appearance."""
        found: dict[str, None] = {}
        before, candidate = "", ""
        for _, kind, text in self._words:
            if candidate and not (text[0] == "=" and text[:2] != "=="):
                found[candidate] = None
            candidate = text if kind == "name" and not _is_field(before) else ""
            before = text
        if candidate:
            found[candidate] = None
        return tuple(found)

    @cached_property
    def declared(self) -> tuple[str, ...]:
        """The names of local variables and parameters, each once, in the order of appearance."""
        found: dict[str, None] = {}
        state, before = "", ""
        for _, kind, text in self._words:
            if kind == "name" and text in ("local", "for"):
                state = "names"
            elif kind == "name" and text == "function":
                state = "function"
            elif state == "function":
                if kind == "name":
                    found[text] = None
                else:
                    state = "names" if text == "(" else ""
            elif state and kind == "name" and before in {"local", "for", ",", "("}:
                found[text] = None
            elif text != ",":
                state = ""
            before = text
        return tuple(found)

    def with_names(self, names: Mapping[str, str]) -> str:
        """Return `stripped` with other names in place of these, wherever they are no fields or keys."""
        return "".join([gap + text for gap, text in self._renamed(names)] + ["\n"]) if self._words else ""

    def short(self, names: Mapping[str, str]) -> str:
        """Return `with_names` without spaces that Lua does not need. The lines are the same."""
        parts: list[str] = []
        before = "\n"
        for gap, text in self._renamed(names):
            if "\n" in gap:
                parts.append("\n")
            elif gap and _needs_space(before, text):
                parts.append(" ")
            parts.append(text)
            before = text
        return "".join([*parts, "\n"]) if parts else ""

    def _renamed(self, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield each word with its gap, and the names replaced."""
        brackets: list[str] = []
        words = self._words
        for n, (gap, kind, text) in enumerate(words):
            if kind == "symbol":
                _note_brackets(brackets, text)
            elif kind == "name" and text in names:
                before = words[n - 1][2] if n else ""
                after = words[n + 1][2] if n + 1 < len(words) else ""
                is_key = brackets[-1:] == ["{"] and before[-1] in "{,;" and after[0] == "=" and after[:2] != "=="
                if not is_key and not _is_field(before):
                    yield gap, names[text]
                    continue
            elif text == "function" and brackets[-1:] == ["{"]:
                raise ValueError(f"a function among the values of a table: {self.raw!r}")
            yield gap, text


def _is_field(before: str) -> bool:
    """Return True if a name after this word is a field."""
    return before[-1:] in {".", ":"} and before[-2:] != ".."


def _note_brackets(brackets: list[str], symbols: str) -> None:
    """Change the list of open brackets by these symbols."""
    for symbol in symbols:
        if symbol in "([{":
            brackets.append(symbol)
        elif symbol in ")]}" and brackets:
            brackets.pop()


def _needs_space(before: str, text: str) -> bool:
    """Return True if the two words might be others without a space."""
    last, first = before[-1], text[0]
    if last.isalnum() or last == "_":
        return first.isalnum() or first == "_" or (first == "." and last.isdigit())
    return last not in "'\")}]" and first not in "'\"({)}],;#" and not (first.isalnum() or first == "_")


class Definition(Code):
    """A function or a constant of a file."""

    def __init__(self, raw: str) -> None:
        super().__init__(raw)
        found = _DEFINED.match(raw)
        if not found:
            raise ValueError(f"more or less than `local function name(` or `local NAME =`: {raw!r}")
        self.name: str = found[1] or found[2]
        self.is_function: bool = found[1] is not None

    @cached_property
    def code(self) -> str:
        """Its text, without comments.

        Raises:
            ValueError: it is followed by other code.
        """
        if _OTHER_CODE.search(self.stripped):
            raise ValueError(f"more or less than `local function name(` or `local NAME =`: {self.stripped!r}")
        return self.stripped

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Every name in it that may be another definition's, in the order of appearance."""
        return tuple(each for each in self.uses if each != self.name)

    @cached_property
    def literal(self) -> str:
        """The value of a constant that is a number or a text, as it is written. It is sent in place of the name."""
        found = None if self.is_function else _LITERAL.fullmatch(self.raw)
        return found[1] if found else ""


class Transaction(msgspec.Struct, frozen=True):
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
    return Code(text).stripped


def names(text: str) -> tuple[str, ...]:
    """Return the names that the text uses: neither fields nor what it assigns, each once, in the order of appearance."""
    return Code(text).uses


def definitions(text: str) -> list[Definition]:
    """Return the definitions of a file, in their order.

    Raises:
        ValueError: the file has other code in front of them.
    """
    starts = [found.start() for found in _BEGINS.finditer(text)]
    if not _COMMENTS.fullmatch(text, 0, starts[0] if starts else len(text)):
        raise ValueError("a file has only definitions, and begins with something else")
    return [Definition(text[start:end]) for start, end in pairwise([*starts, len(text)])]


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


class Assembler:
    """The definitions of all files, and the scripts that are made of them."""

    def __init__(self, known: Mapping[str, Definition]) -> None:
        self._known = known
        self._sent: dict[str, str] = {}
        """What is sent of a definition that is a field, by its name."""

    @cached_property
    def _short_names(self) -> dict[str, str]:
        """The name of each definition in what is sent, of two letters or more. It depends on the names of all definitions."""
        pool = islice(_pool(ascii_uppercase), len(ascii_uppercase), None)
        return dict(zip(sorted(self._known), pool, strict=False))

    @cached_property
    def _constants(self) -> dict[str, str]:
        """The constants that are literals, with their values."""
        return {each.name: each.literal for each in self._known.values() if each.literal}

    def readable(self, bodies: Mapping[str, str], always: Sequence[str] = (), often: Sequence[str] = ()) -> str:
        """Return the bodies without comments, after all definitions that they need. Constants are literals in them.

        Args:
            bodies: the transaction by its name. Of several, the last argument names the one that is called.
            always: definitions that every call needs.
            often: of the others, those that are made first, when one of them is needed.

        Raises:
            ValueError: definitions call each other in a circle, or one of `always` and `often` is not needed.
        """
        fields = {name: f"{SHARED}.{name}" for name in self._known.keys() - {*always}} | self._constants

        def text_of(code: Code) -> str:
            return code.with_names(fields)

        return f"local {SHARED} = {{}}\n" + self._joined(bodies, always, often, text_of, text_of, SHARED)

    def sent(self, bodies: Mapping[str, str], always: Sequence[str] = (), often: Sequence[str] = ()) -> str:
        """Return `readable` with short names, and without spaces that Lua does not need. The lines are the same."""
        short = self._short_names
        fields = {name: f"{_SHORT_SHARED}.{each}" for name, each in short.items()} | self._constants
        hot = {**fields, **{name: short[name] for name in always}}

        def text_of(code: Code) -> str:
            return _with_calls(code.short({**_locals(code, hot), **hot}))

        def field_of(code: Definition) -> str:
            if always:
                return text_of(code)
            if code.name not in self._sent:
                self._sent[code.name] = text_of(code)
            return self._sent[code.name]

        text = self._joined(bodies, always, often, text_of, field_of, _SHORT_SHARED)
        called = {function: short for function, short in SHORT_CALLS.items() if f"{short}(" in text}
        return f"local {','.join([_SHORT_SHARED, *called.values()])}={','.join(['{}', *called])}\n{text}"

    def _joined(
        self,
        bodies: Mapping[str, str],
        always: Sequence[str],
        often: Sequence[str],
        text_of: Callable[[Code], str],
        field_of: Callable[[Definition], str],
        table: str,
    ) -> str:
        """Return the definitions that are always needed, those that are made together, and the body; or what several bodies
        share, and in the branch of each body what it alone needs.
        """

        def needed(code: Code) -> list[Definition]:
            return [self._known[name] for name in self.in_order(code.uses) if name not in self._constants]

        def fields(order: Iterable[Definition]) -> list[str]:
            return [field_of(each).removeprefix("local ") for each in order]

        codes = {name: Code(body) for name, body in bodies.items()}
        if len(codes) > 1:
            users = Counter(each.name for code in codes.values() for each in needed(code))
            every = Code("\n".join(bodies.values()))
            common = fields(each for each in needed(every) if users[each.name] > 1)
            branches: list[str] = []
            for name, code in codes.items():
                own = fields(each for each in needed(code) if users[each.name] == 1)
                branches += [f"if transaction=='{name}' then\n", *own, text_of(code), "else"]
            return "".join([*common, _NAMED, *branches, _UNKNOWN])
        (body,) = codes.values()
        order = needed(body)
        if unneeded := {*always, *often} - {each.name for each in order}:
            raise ValueError(f"not needed: {', '.join(sorted(unneeded))}")
        first = [text_of(each) for each in order if each.name in always]
        soon = fields(each for each in order if each.name in often)
        rest = fields(each for each in order if each.name not in {*always, *often})
        if always:
            begin, end, next_step = (each.replace(SHARED, table) for each in (*_MADE_TOGETHER, _MADE_FIRST))
            rest = [begin, *rest, end] if rest else []
            rest = [begin, *soon, *rest, next_step] if soon else rest
        return "".join([*first, *rest, text_of(body)])

    def in_order(self, uses: Iterable[str]) -> list[str]:
        """Return all definitions that are reached from `uses`, each after those that it uses."""
        done: dict[str, None] = {}
        path: list[str] = []

        def visit(name: str) -> None:
            if name in path:
                raise ValueError(f"a circle of calls: {' -> '.join([*path[path.index(name) :], name])}")
            if name not in self._known or name in done:
                return
            path.append(name)
            for each in self._known[name].needs:
                visit(each)
            path.pop()
            done[name] = None

        for each in uses:
            visit(each)
        return list(done)


def _with_calls(text: str) -> str:
    for function, short in SHORT_CALLS.items():
        text = text.replace(f"{function}(", f"{short}(")
    return text


def _locals(code: Code, taken: Collection[str]) -> dict[str, str]:
    """Return a short name for each local variable. One name has one short name, wherever it is declared."""
    own = [name for name in code.declared if name not in taken]
    return dict(zip(own, _pool(ascii_lowercase), strict=False))


def _pool(first: str) -> Iterator[str]:
    """Yield names that begin with one of these letters: first those of one letter, then longer ones."""
    yield from first
    for length in count(1):
        for letter, *rest in product(first, *[ascii_letters + digits] * length):
            name = letter + "".join(rest)
            if name not in _KEYWORDS:
                yield name
