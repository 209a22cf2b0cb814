"""Tools for the tests of peers: handlers that note their runs, ways to wait, and a view of the server's requests."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import trio

import worqr
from tests.support.patience import PATIENCE, have_patience
from tests.support.patience import until as until
from tests.support.servers import Server
from worqr.lua import all_scripts
from worqr.peer.consumer import ConsumerServices
from worqr.peer.scheduler import Scheduler
from worqr.peer.settler import Settles

T = TypeVar("T")

QUICK = worqr.RetryPolicy(min_backoff=0)
"""A failed run goes to the back at once, for tests of what becomes of it, not of when."""

SCRIPTS = {script.sha: script.name for script in all_scripts() if not script.tail}
"""The scripts of one transaction. The last word of a call of another one is its name."""


class Runs:
    """A handler that returns at once and notes what it was given."""

    def __init__(self) -> None:
        self.tasks: list[bytes] = []
        self.contexts: list[worqr.Context] = []
        self._news = trio.Event()

    def begin(self, task: bytes) -> None:
        self.tasks.append(task)
        self.contexts.append(worqr.current())
        self.tell()

    def tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def __call__(self, task: bytes) -> None:
        self.begin(task)

    async def wait(self, n: int, within: float = PATIENCE) -> list[bytes]:
        """Until it was called `n` times."""
        await self.wait_for(lambda: len(self.tasks) >= n, within, f"{n} runs")
        return self.tasks

    async def wait_for(self, condition: Callable[[], bool], within: float = PATIENCE, what: str = "") -> None:
        with trio.move_on_after(within):
            while not condition():
                await self._news.wait()
            return
        raise AssertionError(f"not within {within:g} s: {what}; it was called with {self.tasks[:20]}")


class Held(Runs):
    """A handler that runs until it is let go or cancelled; ``cancelled`` says whom it was told to stop, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = trio.Event()
        self.done: list[bytes] = []
        self.cancelled: list[tuple[bytes, str | None]] = []

    async def __call__(self, task: bytes) -> None:
        self.begin(task)
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.cancelled.append((task, worqr.current().cancel_reason))
            self.tell()
            raise
        self.done.append(task)
        self.tell()


@asynccontextmanager
async def serving(
    mesh: worqr.Mesh,
    queue: str,
    handler: Callable[[bytes], object],
    *,
    room: int = 100,
    grace: float = 5,
    **options: Any,
) -> AsyncGenerator[worqr.Peer]:
    """A peer with `room` that serves `queue`; it leaves in a hurry."""
    async with mesh.join(concurrency=room, grace=grace) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, queue, handler, **options))
        yield peer
        nursery.cancel_scope.cancel()


async def eventually(look: Callable[[], Awaitable[T]], wanted: T, within: float = PATIENCE) -> None:
    """Wait for a change on the server that has no notification."""
    deadline = time.monotonic() + within
    while (seen := await look()) != wanted:
        assert time.monotonic() < deadline, f"not within {within:g} s: {seen!r} is not {wanted!r}"
        await trio.sleep(0.01)


@asynccontextmanager
async def at_most(seconds: float = 15) -> AsyncGenerator[None]:
    """Fail if the block takes longer: it is cancelled then. As it stands it tells "at once" from a grace of 20 s or more."""
    with trio.move_on_after(seconds) as scope:
        yield
    assert not scope.cancelled_caught, f"it took longer than {seconds:g} s"


@contextmanager
def impatient(mesh: worqr.Mesh, seconds: float = 1) -> Iterator[None]:
    """In the block, nothing that the mesh asks for is waited for longer. Elsewhere a machine that stands still has time."""
    before = mesh._client.link.settings.patience
    have_patience(mesh, seconds)
    yield
    have_patience(mesh, before)


class Spy:
    """The requests of clients (not of scripts) since then, as the names of scripts and commands."""

    def __init__(self, server: Server, prefix: str) -> None:
        self._client = server.client()
        self._prefix = prefix
        self._monitor = server.client().monitor()

    def seen(self) -> list[dict[str, Any]]:
        """Every line of MONITOR up to now, in order; the lines are taken."""
        end = secrets.token_hex(8)
        self._client.echo(end)
        lines: list[dict[str, Any]] = []
        while end not in (line := self._monitor.next_command())["command"]:
            lines.append(line)
        return lines

    def calls(self) -> Counter[str]:
        """Requests by name: of a script its own, of anything else the command."""
        found: Counter[str] = Counter()
        for line in self.seen():
            if line["client_type"] != "lua" and (words := line["command"].split(" "))[0] != "ECHO":
                found[SCRIPTS.get(words[1], words[-1]) if words[0] == "EVALSHA" else words[0]] += 1
        return found

    def published(self, lines: list[dict[str, Any]], channel: str) -> int:
        """How many messages scripts sent to channels that contain `channel`."""
        return sum(
            line["client_type"] == "lua"
            and line["command"].upper().startswith("PUBLISH")
            and channel in line["command"]
            for line in lines
        )


@contextmanager
def spying(server: Server, prefix: str) -> Iterator[Spy]:
    """Look at what the server is asked, in the block."""
    spy = Spy(server, prefix)
    with spy._monitor:
        yield spy


def services_of(scheduler: Scheduler, link: Any, **parts: Any) -> ConsumerServices:
    """What a consumer without a peer is given: these parts, and a session whose last heartbeat was just now."""

    def nothing(*_: object) -> None:
        pass

    made: dict[str, Any] = {
        "session": SimpleNamespace(beat_is_fresh=lambda: True, is_missed_soon=True),
        "slots": SimpleNamespace(run=nothing),
        "settler": SimpleNamespace(settles=Settles(link), ended=nothing),
        "reports": None,
        "reconciler": SimpleNamespace(recheck=nothing),
    }
    return ConsumerServices(link=link, scheduler=scheduler, **made | parts)
