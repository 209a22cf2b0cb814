"""The reference of the command line, as Markdown on the standard output: ``python -m tools.cli_reference``.

Usage, options and defaults come from the program itself. Examples, and exit codes with a meaning of their own, are here.
The output depends on nothing but the code: not on the terminal, the time or the environment.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Final

from cyclopts import App
from cyclopts.argument import Argument

from worqr.cli import GROUPS, make_app

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "worqr run": (
        "worqr run shop:mesh",
        "worqr run shop:mesh --concurrency 20 --queues 'shop.mail.*,shop.report' --log-json",
        "worqr run shop:mesh --reload",
    ),
    "worqr server": ("worqr server", "worqr server --port 6390 --dir ./data"),
    "worqr demo": ("worqr demo", "worqr demo --workers 8", "worqr demo --dashboard"),
    "worqr enqueue": (
        "worqr enqueue mails ada@example.org grace@example.org",
        'echo \'{"to": "ada@example.org"}\' | worqr enqueue shop.send_mail -',
        "tail -f addresses.txt | worqr enqueue mails --lines",
    ),
    "worqr dispatch": ("worqr dispatch mails ada@example.org --id welcome-ada --delay 10m --if-exists skip",),
    "worqr call": ("worqr call shop.send_mail to=ada@example.org times:=3 --wait",),
    "worqr top": ("worqr top", "worqr top --view failed --read-only", "worqr top --view running --json"),
    "worqr queues": ("worqr queues", "worqr queues --json | jq 'select(.failed > 0)'"),
    "worqr workers": ("worqr workers",),
    "worqr log": ("worqr log", "worqr log --kind dead --kind recovered --json", "worqr log --queue mails --follow"),
    "worqr history": ("worqr history mails", "worqr history mails --minutes 1440 --json"),
    "worqr recent": ("worqr recent mails", "worqr recent mails --limit 20 --json"),
    "worqr info": ("worqr info", "worqr info --json"),
    "worqr workers evict": ("worqr workers evict shop:51924699",),
    "worqr running": ("worqr running", "worqr running reports --json"),
    "worqr jobs": ("worqr jobs mails --state scheduled --limit 20",),
    "worqr status": ("worqr status welcome-ada", "worqr status welcome-ada --queue mails --json"),
    "worqr batches": ("worqr batches", "worqr batches mails --json"),
    "worqr batch": (
        "worqr batch mails import-7",
        "worqr batch mails import-7 --wait --within 10m",
        'worqr batch mails import-7 --cancel --reason "wrong file"',
        "worqr batch mails import-7 --retry-failed",
    ),
    "worqr lanes": (
        "worqr lanes mails",
        "worqr lanes mails --lane customer-7 --weight 5",
        "worqr lanes mails --lane customer-7 --cancel",
    ),
    "worqr limit": (
        "worqr limit mails",
        "worqr limit mails --concurrency 20 --rate 100/1m --rate 5/1s",
        "worqr limit mails --clear",
    ),
    "worqr run-now": ("worqr run-now mails welcome-ada",),
    "worqr metrics": ("worqr metrics", "worqr metrics --bind 9464 --max-queues 50"),
    "worqr health": ("worqr health 9465", "worqr health unix:/run/shop/1.sock --check live"),
    "worqr workers quiet": ("worqr workers quiet 51924699",),
    "worqr workers resume": ("worqr workers resume 51924699",),
    "worqr workers drain": ("worqr workers drain 51924699",),
    "worqr workers concurrency": ("worqr workers concurrency 51924699 20",),
    "worqr schedules": ("worqr schedules",),
    "worqr schedules run": ("worqr schedules run shop.nightly_report",),
    "worqr schedules pause": ("worqr schedules pause shop.nightly_report",),
    "worqr schedules resume": ("worqr schedules resume shop.nightly_report",),
    "worqr schedules override": ('worqr schedules override shop.nightly_report "30 4 * * *" --timezone Europe/Berlin',),
    "worqr schedules reset": ("worqr schedules reset shop.nightly_report",),
    "worqr dashboard": (
        "worqr dashboard",
        "worqr dashboard --bind 0.0.0.0:9090 --password-file passwords --read-only",
        "worqr dashboard --hash ada",
    ),
    "worqr script": ("worqr script", "worqr script enqueue --sha"),
    "worqr cancel": (
        "worqr cancel mails --id welcome-ada --wait",
        "worqr cancel mails --claim 1763689200000000",
        'worqr cancel mails --task ada@example.org --reason "left the company"',
    ),
    "worqr failed": ("worqr failed", "worqr failed mails --error TimeoutError --before 2h"),
    "worqr failed errors": ("worqr failed errors", "worqr failed errors mails --json"),
    "worqr failed retry": (
        "worqr failed retry mails welcome-ada",
        "worqr failed retry mails --all --error TimeoutError --limit 100",
    ),
    "worqr failed drop": ("worqr failed drop mails --all --before 30d",),
    "worqr broken": ("worqr broken mails --traceback",),
    "worqr broken errors": ("worqr broken errors mails",),
    "worqr broken retry": ("worqr broken retry mails --all",),
    "worqr broken drop": ("worqr broken drop mails --all",),
    "worqr pause": ('worqr pause mails "the mail server is down"',),
    "worqr resume": ("worqr resume mails",),
    "worqr delete": ("worqr delete mails --yes",),
}
"""Commands that can be typed unchanged; a test parses each of them."""

EXITS: Final[dict[str, dict[int, str]]] = {
    "worqr run": {
        0: "The worker has left the mesh.",
        1: "An error, a third signal, or a handler that did not end in time.",
        2: "Invalid arguments.",
        130: "Ctrl-C before the worker has started.",
    },
    "worqr metrics": {
        0: "SIGTERM or Ctrl-C.",
        1: "An error: the address is in use, the server refuses, or the extra is missing.",
        2: "Invalid arguments.",
    },
    "worqr health": {
        0: "The worker is well.",
        1: "It is not, or does not reply. The reason is on the standard error.",
        2: "Invalid arguments.",
    },
    "worqr top": {
        0: "You quit it, or the table was printed.",
        1: "An error before the first table. The message is on the standard error.",
        2: "Invalid arguments.",
        143: "SIGTERM. After SIGHUP it is 129.",
    },
    "worqr demo": {
        0: "Every check of the summary passed.",
        1: "A check failed, or the demo could not run.",
        2: "Invalid arguments.",
        130: "Ctrl-C.",
    },
}
CODES: Final = {
    0: "Success.",
    1: "An error. The message is on the standard error.",
    2: "Invalid arguments.",
    130: "Ctrl-C.",
}
CONNECTION: Final = "Connection"
"""The group of options that most commands share."""


def main() -> None:
    """Print the reference."""
    print("\n".join(reference()))


def reference() -> Iterator[str]:
    """Yield the lines of the page."""
    app = make_app()
    yield from _front(app)
    for names in GROUPS.values():
        for name in names:
            for path, command in commands(app, name):
                yield from _section(path, command)


def commands(app: App, name: str) -> Iterator[tuple[str, App]]:
    """Yield a command and its subcommands, each with its full command line: ``worqr failed retry``."""
    command = app[name]
    yield f"worqr {name}", command
    for inner in command:
        if not inner.startswith("-"):
            yield f"worqr {name} {inner}", command[inner]


def arguments_of(command: App) -> list[Argument]:
    """Return the arguments and options of a command that its help shows."""
    return [argument for argument in command.assemble_argument_collection() if argument.show]


def name_of(argument: Argument) -> str:
    """Return an option's name, or the placeholder of an argument."""
    return argument.names[0]


def _front(app: App) -> Iterator[str]:
    yield from (
        "# Command line",
        "",
        "`worqr COMMAND --help` prints the usage of a command, and `worqr --version` the version. "
        "`python -m worqr` is the same program as `worqr`.",
        "",
        "| command | description |",
        "|---|---|",
    )
    for names in GROUPS.values():
        for name in names:
            yield f"| [`worqr {name}`](#worqr-{name}) | {_cell(str(app[name].help).splitlines()[0])} |"
    yield from ("", "## Exit codes", "", *_exits(CODES), "", "## Connection options", "")
    yield "Every command that talks to a server takes these options."
    shared = [each for each in arguments_of(app["queues"]) if _group(each) == CONNECTION]
    yield from ("", *_options(shared))


def _section(path: str, command: App) -> Iterator[str]:
    arguments = arguments_of(command)
    yield from ("", f"## {path}", "", *_description(command), "", "```text", _usage(path, arguments), "```")
    places = [each for each in arguments if not name_of(each).startswith("-")]
    options = [each for each in arguments if name_of(each).startswith("-") and _group(each) != CONNECTION]
    shared = [f"`{name_of(each)}`" for each in arguments if _group(each) == CONNECTION]
    if places:
        yield from ("", "| argument | required | default | description |", "|---|---|---|---|")
        yield from (_place_row(each) for each in places)
    if options:
        yield from ("", *_options(options))
    if shared:
        yield from ("", f"[Connection options](#connection-options): {', '.join(shared)}.")
    if path in EXITS:
        yield from ("", *_exits(EXITS[path]))
    if path in EXAMPLES:
        yield from ("", "```sh", *EXAMPLES[path], "```")


def _description(command: App) -> Iterator[str]:
    """The help text, one line for each of its paragraphs."""
    text = inspect.cleandoc(command.help)
    for n, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        if n:
            yield ""
        yield " ".join(paragraph.split())


def _usage(path: str, arguments: Iterable[Argument]) -> str:
    words = [path]
    places = [each for each in arguments if not name_of(each).startswith("-")]
    if len(places) < len(list(arguments)):
        words.append("[OPTIONS]")
    for each in places:
        dots = "..." if _repeats(each) else ""
        words.append(f"{name_of(each)}{dots}" if each.required else f"[{name_of(each)}{dots}]")
    return " ".join(words)


def _options(options: Iterable[Argument]) -> Iterator[str]:
    yield from ("| option | value | default | description |", "|---|---|---|---|")
    for each in options:
        default, text = _default(each)
        yield f"| `{name_of(each)}` | {_value(each)} | {default} | {text} |"


def _place_row(argument: Argument) -> str:
    default, text = _default(argument)
    return f"| `{name_of(argument)}` | {'yes' if argument.required else 'no'} | {default} | {text} |"


def _value(argument: Argument) -> str:
    """The value of an option: none, one of some words, or a placeholder."""
    if argument.hint is bool:
        return ""
    if choices := argument.get_choices():
        return ", ".join(f"`{each}`" for each in choices)
    metavar = argument.parameter.metavar or ("N" if argument.hint is int else name_of(argument).lstrip("-").upper())
    repeated = ", repeatable" if _repeats(argument) else ""
    return " or ".join(f"`{each}`" for each in metavar.split("|")) + repeated


def _default(argument: Argument) -> tuple[str, str]:
    """The default, which some descriptions name, and the rest of the description."""
    text = " ".join((argument.parameter.help or "").split())
    found: Any = argument.field_info.default
    told = re.search(r"\s*Default: (.+?)\.(?=\s|$)", text)
    if told:
        return _cell(_as_code(told[1])), _cell((text[: told.start()] + text[told.end() :]).strip())
    found = found.value if isinstance(found, Enum) else found
    variables = [f"`${name}`" for name in argument.parameter.env_var or ()]
    if found in (None, inspect.Parameter.empty, False, "", ()):
        return "", _cell(text)
    return ", then ".join([*variables, f"`{found}`"]), _cell(text)


def _as_code(text: str) -> str:
    """Values in a list of defaults as code; sentences as they are."""
    parts = text.split(", then ")
    return ", then ".join(f"`{part}`" if re.fullmatch(r"\S+", part) else part for part in parts)


def _repeats(argument: Argument) -> bool:
    return str(argument.hint).startswith("tuple")


def _group(argument: Argument) -> str:
    groups: Any = argument.parameter.group
    return str(groups[0].name) if groups else ""


def _exits(codes: dict[int, str]) -> Iterator[str]:
    yield from ("| exit code | meaning |", "|---|---|")
    yield from (f"| {code} | {meaning} |" for code, meaning in codes.items())


def _cell(text: str) -> str:
    """Text in a table: a pipe would end the cell, and angle brackets would be HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
