"""The scripts: one Lua file per transaction, loaded once, named by the SHA-1 of what is sent.

A file begins with a shebang and a header (guarantee, KEYS, ARGV, RETURNS, RESEND). The line ``-- USES a b`` puts the shared
pieces ``_a.lua`` and ``_b.lua`` (and what they use) between the shebang and the body, each once, in the order of need.
The line ``-- LATER a`` does so with a piece that is needed rarely: `a` and what only `a` uses are made at the first call of `a`.
Each function that a script makes costs server time, also if it is never called.
The line ``-- NUMBERED`` is for scripts that must take effect once however often they are sent: the loader makes their body a
function, and `numbered` in ``_producer.lua`` looks for the stored reply before it and stores the reply after it.
Comments are left out of what is sent: they are a third of the text, and each server would keep them.
Scripts are constants: nothing is ever formatted into them, values travel as KEYS and ARGV.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_USES = re.compile(r"^-- (USES|LATER) (.+)$", re.MULTILINE)
_LATER = """local made_{name}
local function make_{name}()
{pieces}return {name}
end
local function {name}(...)
  made_{name} = made_{name} or make_{name}()
  return made_{name}(...)
end
"""
_COMMENT = re.compile(
    r"""('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|\[\[.*?\]\])|[ \t]*--[^\n]*|\n(?:[ \t]*(?:--[^\n]*)?\n)+""", re.DOTALL
)
"""A string, which stays as it is; or a comment at the end of a line; or lines with nothing but comments."""
_NUMBERED = re.compile(r"^-- NUMBERED$", re.MULTILINE)
_SHARDED = (
    (
        re.compile(r"redis\.pcall\('PUBLISH', (?!'\{')"),
        "redis.pcall('SPUBLISH', ",
    ),  # the registry's channels stay plain
    (re.compile(r"'PUBSUB', 'NUMSUB'"), "'PUBSUB', 'SHARDNUMSUB'"),
    (re.compile(r"\bPUBLISH @"), "SPUBLISH @"),  # what `start_work` asks the server about
    (re.compile(r"\bPUBSUB NUMSUB @"), "PUBSUB SHARDNUMSUB @"),
)


class Script:
    """One transaction: its name (the file's stem), the source as it is sent, and the SHA-1 the server knows it by.

    One without a source is that of the package, read when it is first needed. `sharded` is the same transaction for a cluster,
    where the channels of a queue are sharded.
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
        """Asked only for what has no value yet."""
        if attribute == "sharded":
            source = self.source
            for plain, sharded in _SHARDED:
                source = plain.sub(sharded, source)
            self.sharded: Script = self if source == self.source else Script(self.name, source)
            return self.sharded
        if attribute not in {"source", "sha"}:
            raise AttributeError(attribute)
        shebang, _, body = _read(self.name).partition("\n")
        seen: dict[str, str] = {}
        if _NUMBERED.search(body):
            _pieces("-- USES producer", seen)
            body = f"return numbered(KEYS[1], ARGV[1], ARGV[2], function()\n{body}end)\n"
        _pieces(body, seen)
        self._set(f"{shebang}\n{_without_comments(''.join([*seen.values(), body]))}")
        return self.source if attribute == "source" else self.sha

    @property
    def header(self) -> str:
        """What the file says of the script, as comments: guarantee, KEYS, ARGV, RETURNS, RESEND."""
        lines = _read(self.name).splitlines()[1:]
        return "\n".join(takewhile(lambda line: line.startswith("--"), lines)) + "\n"

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


def _read(stem: str) -> str:
    return _FOLDER.joinpath(f"{stem}.lua").read_text("utf-8")


def _without_comments(source: str) -> str:
    kept = _COMMENT.sub(lambda found: found[1] or ("\n" if found[0].startswith("\n") else ""), source)
    return kept.lstrip("\n")


def _used(source: str, found: dict[str, None]) -> dict[str, None]:
    """Add to `found` the names of the pieces that `source` uses, and that they use, dependencies first."""
    for when, names in _USES.findall(source):
        for name in names.split():
            if when == "USES" and name not in found:
                _used(_read(f"_{name}"), found)
                found[name] = None
    return found


def _pieces(source: str, seen: dict[str, str], used: dict[str, None] | None = None) -> None:
    """Collect the pieces that `source` needs into `seen`, dependencies first.

    `used`: those that the script needs in any case, which no piece that is made later needs to make itself.
    """
    used = _used(source, {}) if used is None else used
    for when, names in _USES.findall(source):
        for name in names.split():
            if name in seen:
                continue
            piece = _read(f"_{name}")
            if when == "USES" or name in used:
                _pieces(piece, seen, used)
                seen[name] = piece
                continue
            own = _used(piece, {})
            for each in own:
                if each in used and each not in seen:
                    _pieces(f"-- USES {each}", seen, used)
            inner = dict(seen)
            _pieces(piece, inner, used | own)
            parts = [text for each, text in inner.items() if each not in seen]
            seen[name] = _LATER.format(name=name, pieces="".join([*parts, piece]))


@cache
def script(name: str) -> Script:
    """The transaction `name`, with its pieces in front of its body."""
    if not _FOLDER.joinpath(f"{name}.lua").is_file():
        raise FileNotFoundError(f"there is no script {name!r}")
    return Script(name)


@cache
def all_scripts() -> tuple[Script, ...]:
    """Every transaction, by name; the link loads them on each new connection."""
    stems = sorted(path.stem for path in _FOLDER.glob("*.lua"))
    return tuple(script(stem) for stem in stems if not stem.startswith("_"))
