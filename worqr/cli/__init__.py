"""The command line: ``worqr COMMAND``. This module has the list of commands, and reports the errors of a command.

cyclopts, rich and the module of a command are imported when the command runs. So `import worqr` does not pay for them, and
an installation that lacks them prints one line instead of a traceback.
"""

from __future__ import annotations

import ast
import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final

from worqr.version import __version__

if TYPE_CHECKING:
    from cyclopts import App, Group

_NEEDED = ("cyclopts", "rich")
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a standard output that is a file on a full disk, or a terminal that is gone."""

STDIN: Final = "\0-"
"""Replaces a single ``-``, which cyclopts would read as an option. No argument of a process can contain it."""
GROUPS: Final[dict[str, dict[str, str]]] = {
    "Run": {"run": "run", **dict.fromkeys(("server", "backup", "restore"), "server"), "move": "move", "demo": "demo"},
    "Enqueue": dict.fromkeys(("enqueue", "dispatch", "call"), "produce_commands"),
    "Inspect": {
        "top": "top",
        "queues": "queue_commands",
        **dict.fromkeys(("workers", "info", "history"), "mesh_commands"),
        "recent": "job_commands",
        "log": "mesh_commands",
        **dict.fromkeys(("running", "jobs", "batches", "status"), "job_commands"),
        "metrics": "mesh_commands",
        "health": "health",
        "schedules": "schedule_commands",
        **dict.fromkeys(("topics", "limits"), "mesh_commands"),
        "dashboard": "dashboard",
        **dict.fromkeys(("script", "schema", "client"), "client"),
    },
    "Operate": {
        "cancel": "queue_commands",
        **dict.fromkeys(("send", "end-wait", "rewind", "run-now", "batch"), "job_commands"),
        "outbox": "mesh_commands",
        **dict.fromkeys(("failed", "undecodable"), "dead_letter_commands"),
        **dict.fromkeys(("pause", "resume", "lanes", "limit", "delete"), "queue_commands"),
    },
}
"""Every command, and the module of its function or app, whose docstring or `help` is the help of the command."""
COMMANDS: Final[tuple[str, ...]] = tuple(name for commands in GROUPS.values() for name in commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0, 1 for an error, 2 for invalid arguments, 130 after Ctrl-C.

    Args:
        arguments: what follows ``worqr``. None: the arguments of this process.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"worqr: {' and '.join(missing)} not found: run `pip install {' '.join(missing)}`", file=sys.stderr)
        return 1
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the locale lacks is no error
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `worqr queues | head -1`
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        print(f"worqr: cannot write to the standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while a module of the command was imported
        print("worqr: interrupted", file=sys.stderr)
        return 130
    return code


def _open_closed_streams() -> None:
    """Connect closed standard streams to the null device, as some supervisors start programs.

    Otherwise the next file or socket would get the number of such a stream, and what is printed would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - Python sets it to None if it is closed
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _discard_output() -> None:
    """Write nothing more to the standard output, not even when Python flushes it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_app(*, described: bool = True) -> App:
    """Return the cyclopts app with all commands; their modules are imported when they are needed.

    Args:
        described: the list of commands has the help of each, which is read from the files without importing them.
    """
    from cyclopts import App, Parameter

    app = App(
        name="worqr",
        help_format="plaintext",  # the other formats are slow to import
        help_formatter="default" if sys.stdout.isatty() else "plain",
        help="Manage a worqr mesh: run workers, enqueue tasks, inspect queues. `worqr COMMAND --help` shows the options.",
        version=__version__,
        default_parameter=Parameter(negative=()),
    )
    for group, commands in zip(_groups(), GROUPS.values(), strict=True):
        for place, (name, module) in enumerate(commands.items()):
            attribute = name.replace("-", "_")
            shown = {"help": _help(module, attribute)} if described else {}
            app.command(f"worqr.cli.{module}:{attribute}", name=name, group=group, sort_key=place, **shown)
    return app


def _help(module: str, attribute: str) -> str:
    """Return the docstring of a function in a module of this folder, or the help of an app that is made there."""
    path = Path(__file__).parent / module
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == attribute and node.value is not None:
            strings = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            return max((each for each in strings if isinstance(each, str)), key=len)
    raise AssertionError(f"{module} has no {attribute}")


@cache
def _groups() -> tuple[Group, ...]:
    """Return the headings of the list of commands; always the same ones, because some commands are shared by all apps."""
    from cyclopts import Group

    return tuple(Group(title, sort_key=rank) for rank, title in enumerate(GROUPS))


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(__version__)
        return 0
    from cyclopts import CycloptsError

    from worqr.cli.errors import (
        EXIT_FAILED,
        EXIT_INTERRUPTED,
        EXIT_INVALID,
        CommandFailed,
        InvalidArguments,
        usage_message,
    )
    from worqr.cli.output import print_error
    from worqr.errors import WorqrBug, WorqrError

    if arguments[:1] and arguments[0] in ("enqueue", "dispatch", "send"):
        arguments = [STDIN if word == "-" else word for word in arguments]
    app = make_app(described=not arguments or arguments[0].startswith("-"))
    app.suppress_keyboard_interrupt = False
    try:
        answer = app(arguments, result_action="return_value", print_error=False, exit_on_error=False)
    except (CycloptsError, InvalidArguments) as error:
        print_error(usage_message(error, COMMANDS) if isinstance(error, CycloptsError) else str(error))
        return EXIT_INVALID
    except WorqrBug:
        raise
    except (WorqrError, CommandFailed) as error:
        notes: list[str] = getattr(error, "__notes__", [])
        details = [getattr(error, "detail", ""), *(note for note in notes if "\n" in note)]
        print_error(
            "; ".join([str(error), *(note for note in notes if "\n" not in note)]), "\n".join(filter(None, details))
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    return answer if isinstance(answer, int) else 0
