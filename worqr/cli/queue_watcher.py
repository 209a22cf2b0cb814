"""``worqr queues --watch``: the table of queues, redrawn every second on the alternate screen of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import trio

from worqr.cli.connect_options import ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.output import escape
from worqr.cli.queue_table import QUEUES, queue_row
from worqr.cli.terminal import cut, is_terminal, lay_out, open_console
from worqr.errors import Unavailable

if TYPE_CHECKING:
    from rich.text import Text

    from worqr.mesh import Mesh
    from worqr.records import QueueInfo

INTERVAL: Final = 1.0
"""Seconds between two readings of the queues."""


def watch_queues(connect: ConnectOptions) -> None:
    """Draw the table of queues until Ctrl-C.

    Raises:
        InvalidArguments: the standard output is no terminal.
    """
    if not is_terminal():
        raise InvalidArguments("--watch needs a terminal; in a pipe, call `worqr queues --json` repeatedly")
    try:
        run_connected(connect, _watch)
    except KeyboardInterrupt:
        return


async def _watch(mesh: Mesh) -> None:
    from rich.live import Live

    found: list[QueueInfo] = []
    with Live(console=open_console(follow_size=True), screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                found = await mesh.queues()
            except Unavailable as error:
                problem = str(error)
            live.update(_picture(open_console().width, found, problem), refresh=True)
            await trio.sleep(INTERVAL)


def _picture(width: int, found: Sequence[QueueInfo], problem: str) -> Text:
    from rich.text import Text

    title = f"worqr queues   {datetime.now().astimezone():%H:%M:%S}   Ctrl-C to quit"
    lines = [Text(cut(title, width), "dim")]
    if problem:
        lines.append(Text(cut(escape(problem), width), "bold red"))
    if found:
        lines += lay_out(QUEUES, [queue_row(info) for info in found], width)
    else:
        lines.append(Text(cut("no queue holds tasks or has workers", width)))
    return Text("\n").join(lines)
