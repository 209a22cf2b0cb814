"""``worqr script``: the Lua scripts, for producers in other languages. No server is needed."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Final

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import flag
from worqr.cli.output import print_json, show_table
from worqr.errors import did_you_mean
from worqr.lua import Script, all_scripts
from worqr.views.tables import Column, column

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
