"""The generated parts of docs/reference/cli.md, which ``python -m tools.cli_reference`` writes anew.

Each command has one part, from its heading to the next heading, or to ``<!-- end -->`` if other text follows: what it does, and
as a block of text its usage, subcommands and options. All of it comes from the program itself. What commands share is said once:
the options of the connection have a part of their own; the page explains ``--json``, ``list``, ``QUEUE``, ``ID`` and ``NAME``.
`EXAMPLES` are written here. The text depends on nothing but the code: not on the terminal, the time or the environment.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, Final

from cyclopts import App
from cyclopts.argument import Argument

from tools.pages import DOCS
from worqr.cli import COMMANDS, make_app

PATH: Final = DOCS / "reference" / "cli.md"

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "run": ("worqr run shop:mesh --concurrency 20 --queues 'shop.mail.*,shop.report' --log-json",),
    "queues": ("worqr queues --json | jq 'select(.failed > 0)'",),
    "send": (
        'worqr send shop.fulfil order-7 approved \'{"by": "ada"}\'',
        'worqr send --address shop.fulfil~1700000000000001~order-7 approved \'{"by": "ada"}\'',
    ),
    "batch": ("worqr batch mails import-7 --wait --within 10m",),
    "limit": ("worqr limit mails --concurrency 20 --rate 100/1m --rate 5/1s",),
    "schedules": (
        'worqr schedules override shop.nightly_report "30 4 * * *" --timezone Europe/Berlin',
        'worqr schedules add report/acme shop.report tenant=acme --cron "0 7 * * MON" --lane acme',
        "worqr schedules set report/acme --every 1h --max-runs never",
    ),
    "dashboard": ("worqr dashboard --bind 0.0.0.0:9090 --password-file passwords --read-only",),
    "cancel": ('worqr cancel mails --task ada@example.org --reason "left the company"',),
    "failed": ("worqr failed retry mails --all --error TimeoutError --limit 100",),
    "pause": ('worqr pause mails "the mail server is down" --for 10m',),
}
"""Examples of commands, where they show more than the usage does."""

CONNECTION: Final = "Connection"
"""The group of options that most commands share."""
SHARED: Final = "--json"
"""The option that is in the usage alone."""
SAID_ONCE: Final = {
    "Name of the queue.",
    "Name of the queue. Default: all queues.",
    "Only tasks of this queue. Default: all queues.",
    "Queue of the job.",
    "Id of the job.",
    "Name of the schedule.",
    "Name of the function.",
    "Id of the batch.",
    "Home queue of the batches. Default: all queues.",
}
"""Arguments that the page explains before the commands."""
LABEL: Final = 28
"""A longer label of an option, in characters, has a line of its own."""
WIDTH: Final = 82
"""Columns of a block of text, as many as a page shows without scrolling."""


def main() -> None:
    """Write the generated parts of the page anew."""
    PATH.write_text(written(PATH.read_text("utf-8")), "utf-8")


def written(page: str) -> str:
    """Return the page with its generated parts as the program has them now."""
    for first, lines in parts().items():
        part = re.compile(rf"^{re.escape(first)}$.*?(?=^<!-- end -->$|(^#))", re.DOTALL | re.MULTILINE)
        text = "\n".join([first, "", *lines, ""])
        page, count = part.subn(lambda found, text=text: text + "\n" * bool(found[1]), page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"docs/reference/cli.md has {count} parts {first!r}")
    return page


@cache
def parts() -> dict[str, list[str]]:
    """Return the lines of each generated part, by the line before it."""
    app = make_app()
    found = {"## Connection options": list(_connection(app))}
    first: dict[str, str] = {}  # the command that has a block, without its name, before all others
    for name in COMMANDS:
        (path, command), *inner = commands(app, name)
        block = list(_block(path, command, inner))
        twin = first.setdefault("\n".join(block).replace(path, "worqr"), name) if inner else name
        found[f"### worqr {name}"] = list(_section(app, name, None if twin == name else twin, block))
    return found


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


def _connection(app: App) -> Iterator[str]:
    options = {name: connection_options(app[name]) for name in COMMANDS}
    without = [f"`{name}`" for name, found in options.items() if len(found) < len(options["queues"])]
    lines = [(_label(each), _text(each)) for each in options["queues"]]
    yield f"All commands but {', '.join(without[:-1])} and {without[-1]} take these options:"
    yield from ("", "```text", *_lines(lines, max(len(label) for label, _ in lines) + 2), "```")


def _section(app: App, name: str, twin: str | None, block: list[str]) -> Iterator[str]:
    """One command with its subcommands, their options, and examples."""
    yield from _description(app[name])
    if twin is not None:
        yield from ("", f"It has the subcommands and options of [`worqr {twin}`](#worqr-{twin}).")
    else:
        yield from ("", "```text", *block, "```")
    if name in EXAMPLES:
        yield from ("", "```bash", *EXAMPLES[name], "```")


def _block(path: str, command: App, inner: list[tuple[str, App]]) -> Iterator[str]:
    """The usage of the command and of its subcommands, then the arguments and options of all of them."""
    if (typed := usage(path, command)) != path or inner:
        yield typed
    other: list[tuple[str, App]] = []
    for each, sub in inner:
        if each != f"{path} list" or usage(each, sub) != usage(path, command).replace(path, each):
            yield usage(each, sub)
            yield from textwrap.wrap(
                " ".join(filter(None, _description(sub))), WIDTH, initial_indent="    ", subsequent_indent="    "
            )
            other.append((each, sub))
    found: dict[tuple[str, str], list[str]] = {}
    for each, sub in ((path, command), *other):
        for argument in own_arguments(sub):
            found.setdefault((_label(argument), _text(argument)), []).append(each.removeprefix(path).strip())
    of: dict[str, list[tuple[str, str]]] = {"": []}
    for option, names in found.items():
        of.setdefault("" if "" in names or len(names) == len(other) else ", ".join(names), []).append(option)
    width = max((len(label) for label, _ in found if len(label) < LABEL), default=0) + 2
    for names, options in of.items():
        if options and (typed != path or inner):
            yield ""
        if names:
            yield f"{names}:"
        yield from _lines(options, width)


def _lines(options: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Options and what they mean, in two columns, the first of which has this width. A longer label has a line of its own."""
    for label, text in options:
        is_long = len(label) > width - 2
        if is_long:
            yield label
        first = " " * width if is_long else label.ljust(width)
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=first, subsequent_indent=" " * width, break_on_hyphens=False
        )


def _description(command: App) -> Iterator[str]:
    """The help text, one line for each of its paragraphs."""
    text = inspect.cleandoc(command.help)
    for n, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        if n:
            yield ""
        yield " ".join(paragraph.split())


def usage(path: str, command: App) -> str:
    """Return how a command is typed, without the options that are listed: ``worqr jobs QUEUE [--json]``."""
    words = [path]
    for each in arguments_of(command):
        name, dots = name_of(each), "..." if _repeats(each) else ""
        if name == SHARED or not name.startswith("-"):
            words.append(f"{name}{dots}" if each.required else f"[{name}{dots}]")
    return " ".join(words)


def own_arguments(command: App) -> list[Argument]:
    """Return the arguments and options that a table explains: not those of the connection, and not what the page says once."""
    return [
        each
        for each in arguments_of(command)
        if _group(each) != CONNECTION and name_of(each) != SHARED and _help(each) not in SAID_ONCE
    ]


def connection_options(command: App) -> list[Argument]:
    """Return the options of the connection that a command takes."""
    return [each for each in arguments_of(command) if _group(each) == CONNECTION]


def _label(argument: Argument) -> str:
    """The name, with the placeholder of a value."""
    name, dots = name_of(argument), "..." if _repeats(argument) else ""
    if not name.startswith("-") or argument.hint is bool:
        return name
    value = argument.parameter.metavar or _short_choices(argument)
    return f"{name} {value or ('N' if argument.hint is int else name.lstrip('-').upper())}{dots}"


def _short_choices(argument: Argument) -> str:
    """The values of an option, if they fit into its label: ``live|ready|startup``."""
    text = "|".join(argument.get_choices() or ())
    return text if name_of(argument).startswith("-") and len(text) < LABEL else ""


def _text(argument: Argument) -> str:
    """What it means, with its values and its default."""
    text, default = _help(argument).removesuffix(" Repeatable."), _default(argument)
    if (choices := argument.get_choices()) and not _short_choices(argument):
        text += f" Values: {', '.join(choices)}."
    if default and "Default: " not in text:
        text += f" Default: {default}."
    return re.sub(r"^(.*?) ?\bDefault: ([^.].*?)\.((?: Values: .*)?)$", r"\1\3 [\2]", text)


def _default(argument: Argument) -> str:
    found: Any = argument.field_info.default
    found = found.value if isinstance(found, Enum) else found
    if found in (None, inspect.Parameter.empty, False, "", ()):
        return ""
    return ", then ".join([*(f"${name}" for name in argument.parameter.env_var or ()), str(found)])


def _help(argument: Argument) -> str:
    return " ".join((argument.parameter.help or "").split())


def _repeats(argument: Argument) -> bool:
    return str(argument.hint).startswith("tuple")


def _group(argument: Argument) -> str:
    groups: Any = argument.parameter.group
    return str(groups[0].name) if groups else ""


if __name__ == "__main__":
    main()
