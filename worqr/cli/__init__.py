"""The command line: ``worqr COMMAND``. What lives here is the choice of the command, and how it ends when it fails.

cyclopts, rich and the module of a command are imported when the command runs. So `import worqr` does not pay for them, and
an installation that lacks them gets one sentence instead of a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from worqr.version import __version__

if TYPE_CHECKING:
    from cyclopts import App

_NEEDED = ("cyclopts", "rich")

STDIN: Final = "\0-"
"""What stands for a single ``-``, which cyclopts takes for an option; no word of a command line can be this."""
GROUPS: Final = {
    "Running": {
        "run": (
            "worqr.cli.run:run",
            "Run a peer: serve the functions of a mesh until told to stop.\n\nThe first SIGTERM or Ctrl-C lets what runs end, "
            "the second cancels it, the third ends the process at once.",
        ),
        "server": (
            "worqr.cli.server:server",
            "Run a server for development in the foreground.\n\nPrints its URL, and runs until Ctrl-C. It listens on this "
            "machine only, and asks for no password.",
        ),
        "demo": (
            "worqr.cli.demo:demo",
            "Show a mesh at work on this machine: kill a peer, cancel a task, lose nothing.",
        ),
    },
    "Putting work in": {
        "enqueue": ("worqr.cli.producing:enqueue", "Put tasks into a queue."),
        "dispatch": (
            "worqr.cli.producing:dispatch",
            "Put a job into a queue: a task with an id, a time, and options of its own.\n\nPrints what became of it, and its "
            "id; with --wait its result.",
        ),
        "call": (
            "worqr.cli.producing:call",
            "Call a function of the mesh by its name.\n\nArguments have names, too: to=ada@example.org times:=3",
        ),
    },
    "Looking": {
        "queues": ("worqr.cli.looking:queues", "List the queues that hold something or are served."),
        "workers": ("worqr.cli.looking:workers", "List the workers, or evict one that hangs or is gone."),
        "running": (
            "worqr.cli.tasks:running",
            "List the tasks that run now: which, on which worker, since when.\n\nOf one queue, or of all.",
        ),
        "jobs": (
            "worqr.cli.tasks:jobs",
            "List the tasks of a queue that wait, are due later, are blocked, or run.",
        ),
        "status": (
            "worqr.cli.tasks:status",
            "Show one job: its state, its tries, the error of the last one, and when it runs next.",
        ),
        "schedules": ("worqr.cli.looking:schedules", "List the schedules, or let the firings of one pass."),
        "script": (
            "worqr.cli.script:script",
            "Print a script: a transaction of the mesh, for producers in other languages.\n\nWithout a name it lists them.",
        ),
    },
    "Operating": {
        "cancel": (
            "worqr.cli.operating:cancel",
            "Cancel tasks: those that wait are removed, those that run are cancelled wherever they run.",
        ),
        "failed": ("worqr.cli.aside:failed", "List what has failed for good, put it back, or drop it."),
        "broken": ("worqr.cli.aside:broken", "List what could not be read, put it back, or drop it."),
        "pause": (
            "worqr.cli.operating:pause",
            "Stop claims on a queue, everywhere.\n\nWhat runs goes on, and so does enqueueing.",
        ),
        "resume": ("worqr.cli.operating:resume", "Let claims on a queue go on."),
    },
}
"""Every command: the function behind it, and its help, of which the list shows the first line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code: 0, 1 for an error, 2 for wrong use, 130 after Ctrl-C.

    Args:
        arguments: the words after ``worqr``; None: those of this process.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"worqr: {' and '.join(missing)} not found: run `pip install {' '.join(missing)}`", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever the locale, nothing fails because of a letter
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `worqr queues | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _app() -> App:
    from cyclopts import App, Group, Parameter

    app = App(
        name="worqr",
        help_format="plaintext",  # what others bring is slow to import
        help_formatter="default" if sys.stdout.isatty() else "plain",
        help="A peer-to-peer job mesh: peers share nothing but a Redis or Valkey server. COMMAND --help tells more of each.",
        version=__version__,
        default_parameter=Parameter(negative=()),
    )
    for rank, (title, commands) in enumerate(GROUPS.items()):
        group = Group(title, sort_key=rank)
        for place, (name, (path, line)) in enumerate(commands.items()):
            app.command(path, name=name, group=group, help=line, sort_key=place)
    return app


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(__version__)
        return 0
    from cyclopts import CycloptsError

    from worqr.cli.failing import FAILED, INTERRUPTED, WRONG_USE, Unhappy, WrongUse
    from worqr.cli.text import complain
    from worqr.errors import WorqrBug, WorqrError

    if arguments[:1] and arguments[0] in ("enqueue", "dispatch"):
        arguments = [STDIN if word == "-" else word for word in arguments]
    app = _app()
    app.suppress_keyboard_interrupt = False
    try:
        answer = app(arguments, result_action="return_value", print_error=False, exit_on_error=False)
    except (CycloptsError, WrongUse) as error:
        complain(" ".join(str(error).split()))
        return WRONG_USE
    except WorqrBug:
        raise
    except (WorqrError, Unhappy) as error:
        notes: list[str] = getattr(error, "__notes__", [])
        details = [getattr(error, "detail", ""), *(note for note in notes if "\n" in note)]
        complain(
            "; ".join([str(error), *(note for note in notes if "\n" not in note)]), "\n".join(filter(None, details))
        )
        return FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    return answer if isinstance(answer, int) else 0
