"""``worqr script``: the transactions as a producer in another language sends them. No server is asked."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Final

from cyclopts import Parameter

from worqr.cli.failing import Unhappy, WrongUse
from worqr.cli.text import print_json, print_table
from worqr.cli.where import flag
from worqr.errors import did_you_mean
from worqr.lua import Script, all_scripts

_FIELD: Final = re.compile(r"-- (?:KEYS\[|ARGV\[|RETURNS |RESEND |USES )")
"""What ends the part of a script's header that says what it guarantees."""


def script(
    name: Annotated[str | None, Parameter(help="Its source is printed, ready for SCRIPT LOAD; else a list.")] = None,
    /,
    *,
    sha: Annotated[bool, flag("Print the SHA-1 that EVALSHA takes, not the source.")] = False,
    header: Annotated[bool, flag("Print its guarantee, KEYS, ARGV and replies, not the source.")] = False,
    cluster: Annotated[bool, flag("The variant for a Redis Cluster, where channels of queues are sharded.")] = False,
    every: Annotated[
        bool, Parameter(name="--list", show_default=False, help="List all of them, as without a name.")
    ] = False,
    json: Annotated[bool, flag("Print the list as JSON, one object on a line.")] = False,
) -> None:
    """Print a script: a transaction of the mesh, for producers in other languages."""
    if name is not None and (every or json):
        raise WrongUse(f"--{'list' if every else 'json'} is for the list of all scripts: leave {name!r} away")
    if header and (name is None or sha):
        raise WrongUse("--header prints the header of one script: name it, and leave --sha away")
    if name is None:
        _print_all([_variant(each, cluster=cluster) for each in all_scripts()], sha=sha, json=json)
        return
    known = {each.name: each for each in all_scripts()}
    if name not in known:
        hint = did_you_mean(name, known, "`worqr script` lists them")
        raise Unhappy(f"there is no script {name!r}; {hint}")
    found = _variant(known[name], cluster=cluster)
    if sha:
        print(found.sha)
        return
    if header:
        print(found.header, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(found.source.encode())  # byte for byte: its SHA-1 depends on it


def _variant(script: Script, *, cluster: bool) -> Script:
    return script.sharded if cluster else script


def _print_all(scripts: list[Script], *, sha: bool, json: bool) -> None:
    if json:
        for each in scripts:
            print_json({"name": each.name, "sha": each.sha, "does": guarantee(each)})
    elif sha:
        print_table(("script", "sha"), [(each.name, each.sha) for each in scripts])
    else:
        print_table(("script", "does"), [(each.name, guarantee(each)) for each in scripts])


def guarantee(script: Script) -> str:
    """The first sentence of the script's header."""
    header = script.header.removeprefix(f"-- {script.name}: ")
    words: list[str] = []
    for line in f"-- {header}".splitlines():
        if not line.startswith("-- ") or _FIELD.match(line):
            break
        words.append(line.removeprefix("-- "))
    return re.split(r"(?<=\.)\s", " ".join(words), maxsplit=1)[0]
