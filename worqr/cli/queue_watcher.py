"""``worqr queues --watch``: the table of queues, drawn anew every second on a terminal's alternate screen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import trio

from worqr.cli.connect_options import Where, ask
from worqr.cli.errors import WrongUse
from worqr.cli.list_commands import QUEUES, queue_row
from worqr.cli.output import escape
from worqr.cli.terminal import cut, is_terminal, lay_out, open_console
from worqr.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from worqr.mesh import Mesh
    from worqr.records import QueueInfo

EVERY: Final = 1.0
"""Seconds between two looks."""


def watch_queues(where: Where) -> None:
    """Draw the table of queues until Ctrl-C.

    Raises:
        WrongUse: the standard output is no terminal.
    """
    if not is_terminal():
        raise WrongUse("--watch needs a terminal; in a pipe, call `worqr queues --json` repeatedly")
    try:
        ask(where, _watch)
    except KeyboardInterrupt:
        return


async def _watch(mesh: Mesh) -> None:
    from rich.live import Live

    found: list[QueueInfo] = []
    with Live(console=open_console(), screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                found = await mesh.queues()
            except Unavailable as error:
                problem = str(error)
            console = open_console()  # the terminal may have another size by now
            live.console.size = console.size
            live.update(_picture(console, found, problem), refresh=True)
            await trio.sleep(EVERY)


def _picture(console: Console, found: Sequence[QueueInfo], problem: str) -> Text:
    from rich.text import Text

    title = f"worqr queues   {datetime.now().astimezone():%H:%M:%S}   Ctrl-C to quit"
    lines = [Text(cut(title, console.width), "dim")]
    if problem:
        lines.append(Text(cut(escape(problem), console.width), "bold red"))
    if found:
        lines += lay_out(QUEUES, [queue_row(info) for info in found], console.width)
    else:
        lines.append(Text(cut("no queue holds tasks or has workers", console.width)))
    return Text("\n").join(lines)
