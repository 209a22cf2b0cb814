"""``worqr top``: the command, and the loop that reads the mesh, draws the screen and handles keys."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import trio
from cyclopts import Parameter

from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.option_types import JsonLines, duration_option, flag
from worqr.cli.output import payload_fields, print_json
from worqr.cli.parsing import parse_duration
from worqr.cli.terminal import is_terminal, open_console, show_table
from worqr.cli.top.actions import Act
from worqr.cli.top.browser import QUIT, READ, Browser
from worqr.cli.top.keyboard import UnbufferedKeys, read_keys
from worqr.cli.top.screen import Header, Rates, draw
from worqr.cli.top.views import COLUMNS, Reading, View, read_view
from worqr.errors import WorqrError

if TYPE_CHECKING:
    from rich.live import Live

    from worqr.mesh import Mesh

FASTEST: Final = 0.2
"""Seconds between two readings, at least."""
_ENDING: Final = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGHUP: 128 + signal.SIGHUP}
"""Signals that end the program, and its exit code then."""
_WATCHED: Final = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


def top(
    *,
    view: Annotated[View, Parameter(help="The table to begin with.")] = View.QUEUES,
    every: Annotated[str, duration_option("Read the mesh this often.")] = "1s",
    read_only: Annotated[bool, flag("Refuse to change anything.")] = False,
    once: Annotated[bool, flag("Print the table once. This is the default in a pipe.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> int:
    """Watch a mesh: queues, lanes, running tasks, workers, failed tasks, schedules and the log.

    Press ? for the keys. Ctrl-C or q ends it.
    """
    seconds = parse_duration(every, "--every") or 0
    if seconds < FASTEST:
        raise InvalidArguments(f"--every must be at least {FASTEST:g}s, not {every!r}")
    if once or json or not is_terminal() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        _print_once(connect, view, json=json)
        return 0

    async def command(mesh: Mesh) -> int:
        return await _Top(mesh, Browser(view, read_only=read_only), seconds).run()

    try:
        return run_connected(connect, command)
    except KeyboardInterrupt:
        return 0


def _print_once(connect: ConnectOptions, view: View, *, json: bool) -> None:
    async def command(mesh: Mesh) -> Reading:
        return await read_view(mesh, view, "")

    reading = run_connected(connect, command)
    if json:
        for row in reading.rows:
            print_json({"queue": row.queue, **_fields(row.target)})
    else:
        show_table(COLUMNS[view], [row.values for row in reading.rows])


def _fields(target: Any) -> dict[str, Any]:
    """Return the attributes of a row's subject for JSON; a payload as text or base64."""
    fields = asdict(target) if is_dataclass(target) and not isinstance(target, type) else {}
    task = fields.pop("task", None)
    if isinstance(fields.get("beat_age"), float) and fields["beat_age"] == float("inf"):
        fields["beat_age"] = None
    return {**fields, **(payload_fields(task) if isinstance(task, bytes) else {})}


def _clock() -> str:
    return f"{datetime.now().astimezone():%H:%M:%S}"


class _Top:
    """The running program."""

    def __init__(self, mesh: Mesh, browser: Browser, every: float) -> None:
        self._mesh = mesh
        self._browser = browser
        self._every = every
        self._rates = Rates()
        self._reading = Reading(None, ())
        self._problem = ""
        self._read_now = trio.Event()
        self._code = 0
        self._live: Live | None = None
        self._keys = UnbufferedKeys(sys.stdin.fileno())

    async def run(self) -> int:
        """Show the mesh until the user quits. Return the exit code: 0, or that of a signal."""
        from rich.live import Live

        with ExitStack() as stack:
            signals = stack.enter_context(trio.open_signal_receiver(*_WATCHED))
            stack.enter_context(self._keys)
            self._live = stack.enter_context(
                Live(console=open_console(follow_size=True), screen=True, auto_refresh=False)
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_signals, signals, nursery.cancel_scope.cancel)
                nursery.start_soon(self._handle_keys, nursery)
                nursery.start_soon(self._watch_connection)
                nursery.start_soon(self._read_forever)
        return self._code

    async def _read_forever(self) -> None:
        while True:
            self._read_now = trio.Event()
            view, queue = self._browser.view, self._browser.queue
            try:
                reading = await read_view(self._mesh, view, queue)
            except WorqrError as error:
                self._problem = self._problem or str(error)
            else:
                self._problem = ""
                if reading.mesh is not None:
                    self._rates.add(reading.mesh)
                if (view, queue) == (self._browser.view, self._browser.queue):
                    self._reading = reading
                    self._browser.show(reading)
            self._draw()
            with trio.move_on_after(self._every):
                await self._read_now.wait()

    async def _watch_connection(self) -> None:
        """Show at once that the server is away. The readings that wait for it would show it only after their patience."""
        async with self._mesh.connection_events() as events:
            async for event in events:
                if event.type == "lost":
                    self._problem = f"No answer since {_clock()}, the figures are of then: {event.cause}"
                else:
                    self._problem = ""
                    self._read_now.set()
                self._draw()

    async def _handle_keys(self, nursery: trio.Nursery) -> None:
        async for key in read_keys(sys.stdin.fileno()):
            result = self._browser.press(key)
            if result is QUIT:
                break
            if result is READ:
                self._read_now.set()
            elif isinstance(result, Act):
                nursery.start_soon(self._carry_out, result)
            self._draw()
        nursery.cancel_scope.cancel()

    async def _carry_out(self, act: Act) -> None:
        try:
            notice = await act.run(self._mesh)
        except WorqrError as error:
            notice = str(error)
        self._browser.notify(notice)
        self._read_now.set()
        self._draw()

    async def _handle_signals(self, signals: AsyncIterator[int], quit: Callable[[], None]) -> None:
        async for number in signals:
            if number in _ENDING:
                self._code = _ENDING[signal.Signals(number)]
                quit()
            elif number == signal.SIGTSTP:
                self._suspend()
            self._draw()

    def _suspend(self) -> None:
        """Give the terminal back to the shell, and stop until the shell continues this process."""
        assert self._live is not None
        self._live.stop()
        self._keys.end()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._keys.begin()
        self._live.start()

    def _draw(self) -> None:
        assert self._live is not None
        width, height = os.get_terminal_size(sys.stdout.fileno())
        header = Header(self._mesh.prefix, self._reading.mesh, self._rates, self._problem, self._reading.more)
        self._live.update(draw(self._browser, header, width, height), refresh=True)
