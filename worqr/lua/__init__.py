"""The scripts: one Lua file for each entity, with its transactions and the functions that they share.

A transaction is a function with a header: guarantee, ARGV, RETURNS, RESEND. It is sent as a script of its own, named by the SHA-1
of what is sent, with the functions of all files that it calls, and without comments (`worqr.lua.assembler`). ``KEYS[1]`` is the
base: of a queue, or of the mesh. In a cluster ``KEYS[2]`` is a key that never exists (`worqr.link.session` has the reason).
``-- FLAGS`` has the flags of the script for the server.
The line ``-- NUMBERED`` is for scripts that must take effect once however often they are sent. Their first three arguments are
the producer's id, the number of the request, and the lowest number still unanswered: `numbered` in ``values.lua`` looks for the
stored reply before their body and stores the reply after it.
Each function that a script makes costs server time, also if it is never called. So the header of a script that runs for each task
has lines ``-- ALWAYS`` with the functions and tables that every call needs, and ``-- OFTEN`` with those that lanes and limits
need. All others stand in the script once, and are made together at the first need of one of them.
Transactions that need nearly the same functions and are called seldom are sent as one script: their headers have ``-- GROUP`` and
its name. Such a call has the name of its transaction as its last argument (`Script.tail`). What is sent has short names;
`Script.text` has the same lines with the names of the files. So a line number in an error of the server is that of
``worqr script NAME --readable``. Scripts are constants: nothing is ever formatted into them, values travel as ARGV.
They are no library of functions (FUNCTION LOAD, FCALL). Such a library was measured on Redis 7.0: 22 us in place of 29 for an
enqueue, 52 in place of 71 for a claim, 34 in place of 39 for an end. But a user that may load functions, which ``+@write``
includes, replaces them for every caller, while a script is named by its content. Producers that may not load need scripts as
well. A server that is full and a replica refuse to load functions, and a new node of a cluster has none.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from worqr.lua.assembler import Assembler, Transaction, library, transactions

_FOLDER = Path(__file__).parent
_NUMBERED = re.compile(r"^-- NUMBERED$", re.MULTILINE)
_ALWAYS = re.compile(r"^-- ALWAYS (.+)$", re.MULTILINE)
_OFTEN = re.compile(r"^-- OFTEN (.+)$", re.MULTILINE)
_SUFFIX = re.compile(r"\b(?:queue|mesh|limit) \.\. '(:[\w:]+)'")
_FLAGS = re.compile(r"^-- FLAGS (.+)$", re.MULTILINE)
_GROUP = re.compile(r"^-- GROUP (\w+)$", re.MULTILINE)
_SHARDED = (
    (
        re.compile(r"redis\.pcall\('PUBLISH', (?!'\{'|mesh )"),
        "redis.pcall('SPUBLISH', ",
    ),  # the channels of the registry are not sharded
    (re.compile(r"'PUBSUB', 'NUMSUB'"), "'PUBSUB', 'SHARDNUMSUB'"),
    (re.compile(r"\bPUBLISH @"), "SPUBLISH @"),  # the permissions that `start_work` checks
    (re.compile(r"\bPUBSUB NUMSUB @"), "PUBSUB SHARDNUMSUB @"),
)


class Script:
    """One transaction: its name, the source as it is sent, and the SHA-1 by which the server knows it.

    Without a source, it is the script of the package with that name, read at first use. `sharded` is the same transaction for a
    cluster, where the channels of a queue are sharded. `text` is the source for people: it has the same lines. `tail` is what
    each call has after its arguments: the name, if several transactions share the source, else nothing.
    """

    __slots__ = ("name", "sha", "sharded", "source", "tail", "text")

    def __init__(
        self, name: str, source: str | None = None, sharded: Script | None = None, tail: tuple[str, ...] = ()
    ) -> None:
        self.name: str = name
        if source is not None:
            self.source: str = source
            self.text: str = source
            self.tail: tuple[str, ...] = tail
            self.sharded: Script = sharded or self

    def __getattr__(self, attribute: str) -> Any:
        """Compute an attribute at first use. Python calls it only for one that is not set."""
        if attribute == "sha":
            self.sha: str = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
            return self.sha
        if attribute == "source":
            self.source = _assembled(self.name)
            return self.source
        if attribute == "text":
            self.text = _assembled(self.name, readable=True)
            return self.text
        if attribute == "tail":
            self.tail = (self.name,) if len(_group_of(self.name, sharded=False)) > 1 else ()
            return self.tail
        if attribute != "sharded":
            raise AttributeError(attribute)
        source = _assembled(self.name, sharded=True)
        self.sharded = self if source == self.source else _Sharded(self.name, source)
        return self.sharded

    @property
    def header(self) -> str:
        """The header: guarantee, ARGV, RETURNS, RESEND."""
        return _transactions(sharded=False)[self.name].header

    @property
    def suffixes(self) -> list[str]:
        """What the transaction itself appends to the base to make its keys; an asterisk stands for an id. For messages."""
        known = _transactions(sharded=False).get(self.name)
        found = _SUFFIX.findall(known.body) if known else ()
        return ["", *sorted({f"{each}*" if each.endswith(":") else each for each in found})]

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


class _Sharded(Script):
    """The variant of a script for a cluster."""

    __slots__ = ()

    def __init__(self, name: str, source: str) -> None:
        super().__init__(name)
        self.source = source
        self.sharded = self

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "text":
            self.text = _assembled(self.name, readable=True, sharded=True)
            return self.text
        return super().__getattr__(attribute)


def _assembled(name: str, *, readable: bool = False, sharded: bool = False) -> str:
    """Return the source of a script of the package, or its text for people."""
    group = _group_of(name, sharded=sharded)
    return _text(group[0].name, readable=readable, sharded=sharded)


@cache
def _text(first: str, *, readable: bool, sharded: bool) -> str:
    group = _group_of(first, sharded=sharded)
    header = group[0].header
    always, often = (" ".join(line.findall(header)).split() for line in (_ALWAYS, _OFTEN))
    flags = {found[1] if (found := _FLAGS.search(each.header)) else "" for each in group}
    if len(flags) > 1:
        raise ValueError(f"the transactions of the group of {first} have different flags: {sorted(flags)}")
    (own,) = flags
    make = _assembler(sharded=sharded).readable if readable else _assembler(sharded=sharded).sent
    return f"#!lua{own and f' flags={own}'}\n{make({each.name: _body(each) for each in group}, always, often)}"


def _body(transaction: Transaction) -> str:
    if not _NUMBERED.search(transaction.header):
        return transaction.body
    return f"return numbered(KEYS[1], ARGV[1], ARGV[2], ARGV[3], function()\n{transaction.body}end)\n"


def _group_of(name: str, *, sharded: bool) -> list[Transaction]:
    """Return the transactions that are sent with this one, in the order of their names; it alone if it is in no group."""
    known = _transactions(sharded=sharded)
    group = _GROUP.search(known[name].header)
    return [each for each in known.values() if group[0] in each.header.splitlines()] if group else [known[name]]


@cache
def _files(*, sharded: bool) -> tuple[str, ...]:
    if not sharded:
        return tuple(path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.lua")))
    files = list(_files(sharded=False))
    for plain, changed in _SHARDED:
        files = [plain.sub(changed, text) for text in files]
    return tuple(files)


@cache
def _transactions(*, sharded: bool) -> dict[str, Transaction]:
    found = [each for text in _files(sharded=sharded) for each in transactions(text)]
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


@cache
def _assembler(*, sharded: bool) -> Assembler:
    """Return the assembler with all functions and constants that transactions share."""
    return Assembler(library(_files(sharded=sharded)))


@cache
def script(name: str) -> Script:
    """Return the transaction `name`."""
    if name not in _transactions(sharded=False):
        raise FileNotFoundError(f"there is no script {name!r}")
    return Script(name)


@cache
def all_scripts() -> tuple[Script, ...]:
    """Return all transactions, by name."""
    return tuple(map(script, _transactions(sharded=False)))
