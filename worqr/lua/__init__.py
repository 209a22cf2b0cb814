"""The scripts: one Lua file per transaction, loaded once, named by the SHA-1 of what is sent.

A file begins with a shebang and a header (guarantee, KEYS, ARGV, RETURNS, RESEND). Functions that several scripts call are in the
modules ``_*.lua``, one for each entity. A script is sent with those that it calls, and without comments (`worqr.lua.assembler`).
The line ``-- NUMBERED`` is for scripts that must take effect once however often they are sent: the loader makes their body a
function, and `numbered` in ``_producer.lua`` looks for the stored reply before it and stores the reply after it.
Each function that a script makes costs server time, also if it is never called. So the comment of a function that is rarely
called has the line ``-- LATER``: the script makes it at its first call. Line numbers in the server's errors count the lines that
are sent: those that ``worqr script NAME`` prints, not those of the file. Scripts are constants: nothing is ever formatted into
them, values travel as KEYS and ARGV.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from worqr.lua.assembler import Definition, assemble, library

_FOLDER = Path(__file__).parent
_NUMBERED = re.compile(r"^-- NUMBERED$", re.MULTILINE)
_SHARDED = (
    (
        re.compile(r"redis\.pcall\('PUBLISH', (?!'\{')"),
        "redis.pcall('SPUBLISH', ",
    ),  # the channels of the registry are not sharded
    (re.compile(r"'PUBSUB', 'NUMSUB'"), "'PUBSUB', 'SHARDNUMSUB'"),
    (re.compile(r"\bPUBLISH @"), "SPUBLISH @"),  # the permissions that `start_work` checks
    (re.compile(r"\bPUBSUB NUMSUB @"), "PUBSUB SHARDNUMSUB @"),
)


class Script:
    """One transaction: its name (the file's stem), the source as it is sent, and the SHA-1 by which the server knows it.

    Without a source, it is the script of the package with that name, read at first use. `sharded` is the same transaction for a
    cluster, where the channels of a queue are sharded.
    """

    __slots__ = ("name", "sha", "sharded", "source")

    def __init__(self, name: str, source: str | None = None) -> None:
        self.name: str = name
        if source is not None:
            self._set(source)

    def _set(self, source: str) -> None:
        self.source: str = source
        self.sha: str = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    def __getattr__(self, attribute: str) -> Any:
        """Compute `source`, `sha` or `sharded` at first use. Python calls it only for an attribute that is not set."""
        if attribute == "sharded":
            source = self.source
            for plain, sharded in _SHARDED:
                source = plain.sub(sharded, source)
            self.sharded: Script = self if source == self.source else Script(self.name, source)
            return self.sharded
        if attribute not in {"source", "sha"}:
            raise AttributeError(attribute)
        shebang, _, body = _read(self.name).partition("\n")
        if _NUMBERED.search(body):
            body = f"return numbered(KEYS[1], ARGV[1], ARGV[2], function()\n{body}end)\n"
        self._set(f"{shebang}\n{assemble(body, _shared())}")
        return self.source if attribute == "source" else self.sha

    @property
    def header(self) -> str:
        """The header of the script's file: guarantee, KEYS, ARGV, RETURNS, RESEND."""
        lines = _read(self.name).splitlines()[1:]
        return "\n".join(takewhile(lambda line: line.startswith("--"), lines)) + "\n"

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


def _read(stem: str) -> str:
    return _FOLDER.joinpath(f"{stem}.lua").read_text("utf-8")


@cache
def _shared() -> dict[str, Definition]:
    """Return all functions and constants of the modules, by name."""
    return library(_read(stem) for stem in _stems() if stem.startswith("_"))


def _stems() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.lua"))


@cache
def script(name: str) -> Script:
    """Return the transaction `name`."""
    if not _FOLDER.joinpath(f"{name}.lua").is_file():
        raise FileNotFoundError(f"there is no script {name!r}")
    return Script(name)


@cache
def all_scripts() -> tuple[Script, ...]:
    """Return all transactions, by name."""
    return tuple(script(stem) for stem in _stems() if not stem.startswith("_"))
