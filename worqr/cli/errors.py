"""The errors of commands and their exit codes, also those of a command line that cyclopts refuses. `main` prints them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from cyclopts import CycloptsError, MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2
EXIT_INTERRUPTED: Final = 130


class InvalidArguments(Exception):
    """The arguments are invalid: exit code 2."""


class CommandFailed(Exception):
    """The command failed: exit code 1.

    Attributes:
        detail: lines to print below the message.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


# A command line that cyclopts refuses. For an unknown command, `OTHER_NAMES` suggests the right one.


_MEANT: Final = {
    "status ID": "job result results show get outcome",
    "jobs QUEUE": "tasks task peek waiting scheduled pending messages inspect",
    "queues": "list ls stats depth queue",
    "top": "watch monitor",
    "dashboard": "flower ui web gui admin webui browser",
    "running": "ps active",
    "workers": "peers nodes fleet",
    "run MODULE:MESH": "worker work start serve consume consumer",
    "workers evict ID": "evict kill",
    "schedules": "beat cron crons periodic timetable schedule",
    "schedules run NAME": "fire trigger",
    "send QUEUE ID NAME JSON": "event signal approve",
    "enqueue QUEUE PAYLOAD": "publish push add produce put",
    "run-now QUEUE ID": "hasten promote now",
    "batches": "groups group chord chords bulk",
    "cancel QUEUE --id ID": "revoke abort stop terminate",
    "delete QUEUE --yes": "purge clear flush empty remove rm",
    "failed": "dead dlq dead-letter deadletter failures errors",
    "failed retry QUEUE ID": "retry requeue redrive replay",
    "failed drop QUEUE ID": "drop discard",
    "resume QUEUE": "unpause continue",
}
_OF_RUN: Final = {
    **dict.fromkeys(("-c", "-t", "--worker-concurrency"), "--concurrency N"),
    "-w": "--workers N",
    **dict.fromkeys(("--max-tasks-per-child", "--max-tasks"), "--max-runs N"),
    "--max-memory-per-child": "--max-memory 800M",
    **dict.fromkeys(
        ("-p", "--processes"), "--concurrency N; where a function runs is runs_in='process' in its declaration"
    ),
    **dict.fromkeys(("-Q", "-q", "--queue"), "--queues NAMES"),
    **dict.fromkeys(("-l", "--loglevel", "-v", "--verbose"), "--log-level debug"),
    **dict.fromkeys(("-A", "--app"), "the mesh as an argument, as in `worqr run tasks:mesh`"),
    **dict.fromkeys(("-B", "--beat"), "nothing: workers fire the schedules"),
    **dict.fromkeys(("-P", "--pool"), "runs_in='process' in the declaration of a function"),
    **dict.fromkeys(("-E", "--events"), "nothing: events are always on"),
    **dict.fromkeys(("-n", "--hostname", "--name"), "worqr.Mesh(app='shop') for the name in lists of workers"),
    **dict.fromkeys(("-b", "--broker", "--redis", "-u"), "--url redis://localhost:6379/0"),
}
"""Options that the workers of other task queues have, and what to use instead."""
_OF_CALL: Final = {
    option: f"`worqr dispatch QUEUE PAYLOAD {option} ...`"
    for option in ("--id", "--delay", "--run-at", "--expires", "--timeout", "--result-ttl", "--meta")
}
_OTHER_OPTIONS: Final[dict[tuple[str, ...], dict[str, str]]] = {
    ("run",): _OF_RUN,
    ("call",): _OF_CALL,
    ("enqueue",): _OF_CALL,
    ("dashboard",): dict.fromkeys(("--port", "-p"), "--bind 127.0.0.1:9090"),
    ("metrics",): dict.fromkeys(("--port", "-p", "--host"), "--bind 127.0.0.1:9464"),
}
"""Options that people try, by command, and what to use instead."""
SIMILARITY: Final = 0.8
"""How similar a command must be to the name, if that is one of `OTHER_NAMES`."""
OTHER_NAMES: Final = {name: command for command, names in _MEANT.items() for name in names.split()}
"""Names that people try, and the command for each."""


def unknown_command(name: str, known: Iterable[str]) -> str:
    """Return the message about the command `name`, which is none of `known`."""
    if name.startswith("-"):
        return f"{name} comes before the command; options stand behind it, as in `worqr queues --url URL`"
    commands = list(known)
    close = difflib.get_close_matches(name, commands, 1, SIMILARITY if name in OTHER_NAMES else 0.6)
    meant = [OTHER_NAMES[name]] if name in OTHER_NAMES else []
    if close and not any(command.split()[0] == close[0] for command in meant):
        meant.append(close[0])
    if not meant:
        other = difflib.get_close_matches(name, OTHER_NAMES, 1)
        meant = [OTHER_NAMES[each] for each in other]
    if meant:
        hint = f"did you mean {' or '.join(f'`worqr {command}`' for command in meant)}?"
    else:
        hint = "`worqr --help` lists the commands"
    return f"unknown command {name!r}; {hint}"


def usage_message(error: CycloptsError, commands: Iterable[str]) -> str:
    """Return the message about arguments that cyclopts refuses.

    Args:
        commands: the names of all commands.
    """
    chain, unused = error.command_chain or (), error.unused_tokens or []
    if isinstance(error, UnknownCommandError) and not chain and unused:
        return unknown_command(unused[0], commands)
    command = " ".join(("worqr", *chain))
    if isinstance(error, UnusedCliTokensError) and unused:
        subcommands = [] if error.app is None else [name for name in error.app if not name.startswith("-")]
        close = difflib.get_close_matches(unused[0], subcommands, 1)
        hint = f"did you mean `{command} {close[0]}`?" if close else f"`{command} --help` shows the usage"
        return f"unexpected argument {unused[0]!r}; {hint}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        missing = f"{name} needs a value" if name.startswith("-") else f"missing {name}"
        return f"{missing}; `{command} --help` shows the usage"
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        if use := _OTHER_OPTIONS.get(tuple(chain), {}).get(option or ""):
            return f"{command} has no option {option}; use {use}"
    return " ".join(str(error).split())
