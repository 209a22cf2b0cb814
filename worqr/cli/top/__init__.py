"""``worqr top``: the command, and the loop that reads the mesh, draws the screen and handles keys."""

from __future__ import annotations

import codecs
import os
import re
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import trio
from cyclopts import Parameter

from worqr.cli.errors import InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    duration_option,
    flag,
    parse_duration,
    run_connected,
)
from worqr.cli.output import (
    fit,
    grid,
    has_ellipsis,
    is_terminal,
    one_line,
    open_console,
    payload_fields,
    print_json,
    printable,
    show_table,
)
from worqr.cli.top.browser import COLUMNS, PAIRS, QUIT, READ, Act, Browser, Mode, Picture, Reading, View, read_view
from worqr.errors import WorqrError
from worqr.views.tables import EMPTY, Column, fields_of
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from worqr.mesh import Mesh
    from worqr.mesh_records import MeshInfo, QueueInfo


# The keys that are typed at a terminal, one by one: without echo, and without waiting for Enter.
#
# Signal keys stay what they are: Ctrl-C interrupts, Ctrl-Z suspends.


_NAMED: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}
_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
"""An escape sequence of a terminal, or one character."""


def split_keys(text: str) -> list[str]:
    """Return the keys of a text that a terminal sent. Keys without a name and control characters are left out."""
    found: list[str] = _KEY.findall(text)
    return [_NAMED.get(key, key) for key in found if key in _NAMED or key.isprintable()]


class UnbufferedKeys:
    """Lets a terminal pass on each key at once, without echo, from `begin` until `end`, which restores its settings."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = termios.tcgetattr(fd)

    def begin(self) -> None:
        """Change the settings."""
        tty.setcbreak(self._fd)

    def end(self) -> None:
        """Restore the settings."""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


async def read_keys(fd: int) -> AsyncIterator[str]:
    """Yield each key that is typed, until the terminal is closed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        await trio.lowlevel.wait_readable(fd)
        try:
            data = os.read(fd, 1024)
        except OSError:
            return  # how Linux reports that the other end is closed
        if not data:
            return
        for key in split_keys(decoder.decode(data)):
            yield key


# Drawing ``worqr top``: one line for each row, as wide and as high as the terminal.


SAMPLES: Final = 60
"""Readings that the graphs of the header show."""
_BARS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = " .:-=+*#@"
LEAST: Final = 6
"""Characters that a column keeps, if it does not say more."""
HEADER: Final = 4
FOOTER: Final = 1
HELP: Final = (
    "1 to 7      choose a table",
    "up, down    select a row; also j and k, page up, page down, home, end",
    "Enter       show only the tasks of the selected queue",
    "l           show the lanes of the selected queue",
    "Escape      clear the filter, then show all queues again",
    "/           show only rows that contain a text",
    "s           sort by the next column",
    "p           pause or resume the selected queue, lane or schedule",
    "c           cancel the selected running job, or all jobs of the selected lane",
    "r           retry the selected failed task, or all of the selected queue",
    "d           delete the selected failed task, or all of the selected queue",
    "w           ask the selected worker to be quiet, resume, drain, or run N tasks;",
    "            or set the weight of the selected lane",
    "m           limit what may start in the selected lane",
    "q           quit; also Ctrl-C",
)


class Rates:
    """How many tasks finished and failed per second, computed from the totals of successive readings."""

    def __init__(self) -> None:
        self.finished: deque[float] = deque(maxlen=SAMPLES)
        self.failed: deque[float] = deque(maxlen=SAMPLES)
        self._last: tuple[float, int, int] | None = None

    def add(self, mesh: MeshInfo) -> None:
        """Note the totals of a snapshot; one that was noted before adds nothing."""
        now, queues = mesh.at.timestamp(), _all(mesh)
        finished = sum(info.counts.get("finished", 0) for info in queues)
        failed = sum(info.counts.get("failed", 0) for info in queues)
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            self.finished.append(max(0, finished - self._last[1]) / seconds)
            self.failed.append(max(0, failed - self._last[2]) / seconds)
        self._last = (now, finished, failed)


@dataclass(frozen=True, slots=True)
class Header:
    """What is drawn above the table."""

    prefix: str
    mesh: MeshInfo | None
    rates: Rates
    problem: str
    more: str


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """Return the last `width` values as a line of bars, the highest one as high as a character."""
    bars, highest = (_BARS if unicode else _ASCII_BARS), max(values, default=0.0)
    if not highest:
        return ""
    return "".join(bars[round(value / highest * (len(bars) - 1))] for value in list(values)[-width:])


def draw(browser: Browser, header: Header, width: int, height: int) -> Group:
    """Return the whole screen."""
    from rich.console import Group

    room = max(1, height - HEADER - FOOTER)
    browser.resize(room)
    lines = _header(browser, header)
    if browser.mode is Mode.HELP:
        lines += map(one_line, HELP[: room + 1])
    else:
        lines += table(COLUMNS[browser.view], browser.picture(), width, room)
        if not browser.picture().rows:
            lines.append(one_line(_nothing(browser), "dim"))
    lines = lines[: height - FOOTER]
    lines += [one_line("") for _ in range(height - FOOTER - len(lines))]
    return Group(*lines, _footer(browser, header, width))


def table(columns: Sequence[Column], picture: Picture, width: int, room: int) -> Sequence[RenderableType]:
    """Return the heading and at most `room` rows around the selected one, each on one line."""
    from rich.styled import Styled

    first = max(0, min(picture.selected - room // 2, len(picture.rows) - room))
    rows = [row.target for row in picture.rows[first : first + room]]
    kept = [
        (place, column)
        for place, column in enumerate(columns)
        if not column.hidden and (place == 0 or any(column.value(row.target) not in EMPTY for row in picture.rows))
    ]
    cells = [[printable(column.shown(row)) for _, column in kept] for row in rows]
    titles = [f"{column.title} *" if picture.sorted_by == place else column.title for place, column in kept]
    shown = [column for _, column in kept]
    while (widths := fit(shown, titles, cells, width)) is None and len(shown) > 1:
        shown.pop()  # there is no room for the last column
        titles, cells = titles[:-1], [texts[:-1] for texts in cells]
    widths = widths or [max(1, width)]
    parts: list[RenderableType] = [grid(shown, widths, [titles], "bold", one_line=True)]
    for number, (row, texts) in enumerate(zip(rows, cells, strict=True), first):
        part = grid(shown, widths, [texts], row=row, one_line=True)
        parts.append(Styled(part, "reverse") if number == picture.selected else part)
    return parts


def _header(browser: Browser, header: Header) -> list[RenderableType]:
    infos = () if header.mesh is None else _all(header.mesh)
    names = ("waiting", "scheduled", "running", "failed")
    text = "   ".join(f"{name} {sum(getattr(info, name) for info in infos):,}" for name in names)
    if rates := header.rates.finished:
        text += f"   finished {rates[-1]:,.0f}/s {sparkline(rates, 30, unicode=has_ellipsis())}"
    title = f"worqr top   prefix {header.prefix}   {_source(header.mesh)}"
    tabs = one_line("")
    for place, view in enumerate(View, 1):
        tabs.append(f" {place} {view.value}", "reverse" if view is browser.view else "dim")
    if browser.queue:
        tabs.append(f"  of {printable(browser.queue)}", "bold")
    return [one_line(title, "dim"), one_line(header.problem, "bold red") if header.problem else one_line(text), tabs]


def _all(mesh: MeshInfo) -> Sequence[QueueInfo]:
    return mesh.queues if mesh.others is None else (*mesh.queues, mesh.others)


def _source(mesh: MeshInfo | None) -> str:
    """Return when the figures were read, and who leads the mesh."""
    if mesh is None:
        return "reading"
    leader = "no worker leads" if mesh.leader is None else f"leader {short_worker(mesh.leader)}"
    return f"figures of {mesh.at.astimezone():%H:%M:%S}   {leader}"


def _nothing(browser: Browser) -> str:
    if browser.filter:
        return f"nothing contains {browser.filter!r}: press Escape to clear the filter"
    nothing = {
        View.QUEUES: "no queue holds tasks or has workers",
        View.RUNNING: "no task is running",
        View.WORKERS: "no worker is registered",
        View.FAILED: "no task has failed for good",
        View.SCHEDULES: "no worker has declared a schedule",
        View.LOG: "nothing has happened yet",
        View.LANES: "no lane has tasks, is paused, or was set by an operator"
        if browser.queue
        else "no task waits in a lane; for other lanes, select a queue and press l",
    }
    return nothing[browser.view]


def _footer(browser: Browser, header: Header, width: int) -> Text:
    if browser.mode is Mode.FILTER:
        return one_line(f"/{browser.filter}_", "bold")
    if browser.mode is Mode.ASK and browser.pending is not None:
        what = browser.pending.name or "one"
        answer = f"type {what} and Enter: {browser.typed}_" if browser.pending.is_typed else "y: yes, any other key: no"
        question, shown = one_line(f"{browser.pending.question}? ", "bold yellow"), one_line(answer, "bold yellow")
        question.truncate(max(LEAST, width - shown.cell_len))  # what you type stays in sight
        return question.append(shown)
    if browser.notice:
        return one_line(browser.notice, "bold")
    said = f"filter: {browser.filter}   " if browser.filter else ""
    said += f"{header.more}   " if header.more else ""
    return one_line(f"{said}? help   / filter   s sort   Enter open   q quit", "dim")


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
            print_json({"queue": row.queue, **_fields(view, row.target)})
    else:
        show_table(COLUMNS[view], [row.target for row in reading.rows])


def _fields(view: View, target: Any) -> dict[str, Any]:
    """Return the attributes of a row's subject for JSON; a payload as text or base64."""
    fields = fields_of(target[1] if view in PAIRS else target)
    task = fields.pop("task", None)
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
