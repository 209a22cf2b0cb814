"""The command line: ``worqr COMMAND``. This module has the list of commands, and reports the errors of a command.

cyclopts, rich and the module of a command are imported when the command runs. So `import worqr` does not pay for them, and
an installation that lacks them prints one line instead of a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from worqr.version import __version__

if TYPE_CHECKING:
    from cyclopts import App, Group

_NEEDED = ("cyclopts", "rich")
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a standard output that is a file on a full disk, or a terminal that is gone."""

STDIN: Final = "\0-"
"""Replaces a single ``-``, which cyclopts would read as an option. No argument of a process can contain it."""
GROUPS: Final = {
    "Run": {
        "run": (
            "worqr.cli.run:run",
            "Run a worker for the functions of a mesh, until SIGTERM or Ctrl-C.\n\nThe first signal waits for running tasks, "
            "the second cancels them, the third ends the process at once.",
        ),
        "server": (
            "worqr.cli.server:server",
            "Run a Valkey or Redis server for development, until Ctrl-C.\n\nPrints its URL. The server accepts connections "
            "from this machine only, without a password.",
        ),
        "demo": (
            "worqr.cli.demo:demo",
            "Run a demo: kill a worker, cancel a task, lose nothing.\n\nExit code 1 if a result is missing.",
        ),
    },
    "Enqueue": {
        "enqueue": ("worqr.cli.produce_commands:enqueue", "Enqueue tasks."),
        "dispatch": (
            "worqr.cli.produce_commands:dispatch",
            "Dispatch a job: a task with an id, a start time and other options.\n\nPrints the outcome (created, updated, "
            "unchanged or blocked) and the id; with --wait the result.",
        ),
        "call": (
            "worqr.cli.produce_commands:call",
            "Enqueue a call of a function by its name.\n\nName the arguments: to=ada@example.org times:=3",
        ),
    },
    "Inspect": {
        "top": (
            "worqr.cli.top.command:top",
            "Watch a mesh: queues, running tasks, workers, failed tasks, schedules and the log.",
        ),
        "queues": ("worqr.cli.list_commands:queues", "List the queues that hold tasks or have workers."),
        "workers": ("worqr.cli.list_commands:workers", "List workers, make them quiet, drain or evict them."),
        "info": (
            "worqr.cli.mesh_commands:info",
            "Show the mesh as a whole: its leader, the sums of all queues, and the workers of each application.",
        ),
        "history": (
            "worqr.cli.history_command:history",
            "Show what has happened in a queue lately: tasks, failures, run times and waiting times.\n\nA terminal shows "
            "curves, and sums of several minutes. In a pipe, each minute is a row.",
        ),
        "recent": (
            "worqr.cli.task_commands:recent",
            "List the runs of a queue that ended last: how each ended, how long it took, and where it ran.\n\nFor queues that "
            "are served with recent=N.",
        ),
        "log": (
            "worqr.cli.mesh_commands:log",
            "Show what has happened in the mesh: workers that joined, left or died, and what operators did.",
        ),
        "running": (
            "worqr.cli.task_commands:running",
            "List running tasks, the longest-running first.\n\nAt most 1,000 per queue. The claim, which `worqr cancel --claim` "
            "takes, is shown in pipes and with --json.",
        ),
        "jobs": (
            "worqr.cli.task_commands:jobs",
            "List the waiting, scheduled, blocked or running tasks of a queue.",
        ),
        "batches": (
            "worqr.cli.batch_commands:batches",
            "List batches: those that have not ended first, then the newest.\n\nAn ended batch is listed until its `keep` has "
            "passed, which is a day if you do not set it.",
        ),
        "status": (
            "worqr.cli.job_commands:status",
            "Show one job: its state, its last tries with their errors, and its next run.\n\nExit code 1 if the mesh does not "
            "know the id.",
        ),
        "metrics": (
            "worqr.cli.metrics:metrics",
            "Serve the metrics of the mesh for Prometheus, until SIGTERM or Ctrl-C.\n\nEach scrape reads one snapshot. "
            "While the server is away, worqr_up is 0.",
        ),
        "health": (
            "worqr.cli.health:health",
            "Ask a worker that runs with --probe for its health.\n\nExit code 1 if it is not well. The application is not "
            "imported.",
        ),
        "schedules": (
            "worqr.cli.schedule_commands:schedules",
            "List schedules, pause, resume or override one, or run its task now.",
        ),
        "dashboard": (
            "worqr.cli.dashboard:dashboard",
            "Serve the dashboard, a web page of queues, jobs and workers, until Ctrl-C.\n\nOn 127.0.0.1 it prints an address "
            "with a token, which works once. Other addresses need a login.",
        ),
        "script": (
            "worqr.cli.script:script",
            "Print the Lua scripts, which producers in other languages call.\n\nWithout a name, list them.",
        ),
    },
    "Operate": {
        "cancel": (
            "worqr.cli.queue_commands:cancel",
            "Cancel waiting and running tasks.\n\nWaiting tasks are removed. Running tasks are stopped on whichever worker "
            "they run. With --wait, exit code 1 if a run has not ended in time.",
        ),
        "run-now": (
            "worqr.cli.job_commands:run_now",
            "Make scheduled jobs due now, also those that wait for their next try.\n\nExit code 1 if one of them is not "
            "scheduled.",
        ),
        "batch": (
            "worqr.cli.batch_commands:batch",
            "Show a batch: its state, how many of its jobs have ended, and its follow-up. Or cancel it, or retry its failed "
            "jobs.\n\nExit code 1 if the queue has no batch with this id. With --wait, also if the batch ends without all jobs "
            "finished.",
        ),
        "failed": (
            "worqr.cli.dead_letter_commands:failed",
            "List, retry or delete tasks in the dead-letter queue.",
        ),
        "broken": (
            "worqr.cli.dead_letter_commands:broken",
            "List, retry or delete tasks whose payload could not be decoded.",
        ),
        "pause": (
            "worqr.cli.queue_commands:pause",
            "Pause a queue: no worker takes its tasks.\n\nRunning tasks continue, and producers can still enqueue.",
        ),
        "resume": ("worqr.cli.queue_commands:resume", "Resume a paused queue."),
        "lanes": (
            "worqr.cli.lanes_command:lanes",
            "List the lanes of a queue: how many tasks wait and run in each, and why none starts.\n\nA lane that has no tasks "
            "is listed if it is paused, or if an operator has set its weight or limit.",
        ),
        "limit": (
            "worqr.cli.limit_command:limit",
            "Show the limits of a queue, or set others in place of those that the code declares.\n\nA lower limit does not "
            "stop tasks that run. Limits that you set stay until --clear.",
        ),
        "delete": (
            "worqr.cli.queue_commands:delete",
            "Delete the waiting, scheduled and blocked tasks of a queue.\n\nRunning tasks continue, but are not retried. "
            "Dead-letter entries stay: `worqr failed drop` deletes them.",
        ),
    },
}
"""Every command: the function or app behind it, and its help. `worqr --help` shows the first line."""
COMMANDS: Final = tuple(name for commands in GROUPS.values() for name in commands)


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


def make_app() -> App:
    """Return the cyclopts app with all commands; their modules are imported when they are needed."""
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
        for place, (name, (path, line)) in enumerate(commands.items()):
            app.command(path, name=name, group=group, help=line, sort_key=place)
    return app


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

    from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID, CommandFailed, InvalidArguments
    from worqr.cli.output import print_error
    from worqr.cli.usage_messages import usage_message
    from worqr.errors import WorqrBug, WorqrError

    if arguments[:1] and arguments[0] in ("enqueue", "dispatch"):
        arguments = [STDIN if word == "-" else word for word in arguments]
    app = make_app()
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
