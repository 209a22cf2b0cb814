"""A TCP proxy before a server that makes the faults networks make, at a chosen request of a chosen connection.

It runs on an asyncio loop in a thread of its own, so that it goes on while a test blocks, and its methods can be called
from anywhere. It reads both streams frame by frame, so that it knows which reply belongs to which request.

    fault = proxy.drop_reply(matching=sent_as("enqueue"))      # the server does it, the client never learns, and is cut off
    await q.enqueue(b"T1")
    await fault.wait_fired()

`on` limits a fault: a `str` is a part of the connection's name (seen in CLIENT SETNAME), an `int` its number in the
order of accepting, None every connection. `matching` is looked for in the request's bytes; `nth` counts the matches.
`sent_as` matches the calls of a script, and not the SCRIPT EXISTS with which a connection asks for all of them.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import trio

from tests.support.patience import PATIENCE
from tests.support.resp import frame_end, is_push, words
from worqr.lua import script

R = TypeVar("R")
On = str | int | None
_Line = asyncio.Queue[tuple[float, bytes, bool, "Fault | None"] | None]
"""Requests on their way up: when they are due, their bytes, whether they get a reply, the fault they set off."""

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """One request that came by: on which connection, and its first words (each cut at 100 bytes)."""

    connection: int
    name: str
    words: tuple[bytes, ...]


@dataclass(eq=False)
class Fault:
    """A fault that waits for its request. `release` lets go what a `hold` holds."""

    action: Literal["drop_request", "drop_reply", "hold", "hold_reply"]
    matching: bytes
    nth: int
    on: On
    after: int = 0
    _proxy: Any = None
    _fired: threading.Event = field(default_factory=threading.Event)
    _executed: threading.Event = field(default_factory=threading.Event)
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def fired(self) -> bool:
        """The request has come by, and the fault was made (for `drop_reply`: the server has executed it)."""
        return self._fired.is_set()

    async def wait_fired(self, within: float = PATIENCE) -> None:
        await _wait(self._fired, within, f"no request for {self.action} matching {self.matching!r} on {self.on!r}")

    async def wait_executed(self, within: float = PATIENCE) -> None:
        """The server has replied to the request, whether or not the reply arrived."""
        await _wait(self._executed, within, f"the server has not answered {self.matching!r}")

    def release(self) -> None:
        """Let the held request go on to the server (even if its client is gone), or the held reply to the client."""
        self._proxy.call(self._gate.set)

    def withdraw(self) -> None:
        """Forget the fault, if it has not fired."""
        self._proxy.call(lambda: self._proxy.faults.remove(self) if self in self._proxy.faults else None)


async def _wait(event: threading.Event, within: float, complaint: str) -> None:
    if not await trio.to_thread.run_sync(event.wait, within, abandon_on_cancel=True):
        raise AssertionError(f"{complaint} within {within:g} s")


def sent_as(name: str) -> str:
    """What is in each call of this script, and in no other request: its SHA-1; or its name, if it shares a script."""
    found = script(name)
    return f"\r\n{name}\r\n" if found.tail else found.sha


class FaultProxy:
    """Listens on a free port of 127.0.0.1 (`url`) and passes everything on, but for the faults asked for."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.faults: list[Fault] = []  # changed only on the loop, like everything below
        self.requests: list[Request] = []
        self.connections: list[Connection] = []
        self.latency: list[tuple[float, On]] = []
        self.holes: list[On] = []
        self._accepted = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        self._listener: asyncio.Server | None = None
        self.port = 0
        self._await(self._listen())

    # What a test says

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def pass_all(self) -> None:
        """Forget every fault and let connections in again. A connection in a black hole stays there: cut it."""

        async def forget() -> None:
            self.faults.clear()
            self.latency.clear()
            self.holes.clear()
            if self._listener is None:
                await self._listen()

        self._await(forget())

    def delay(self, seconds: float, on: On = None) -> None:
        """Every request takes this much longer to reach the server; pipelined ones travel together."""
        self.call(lambda: self.latency.append((seconds, on)))

    def cut(self, on: On = None) -> int:
        """Reset open connections now; says how many. New ones are let in."""
        return self.call(lambda: sum(connection.cut() for connection in self.connections if connection.matches(on)))

    def refuse(self) -> None:
        """Refuse new connections; open ones go on."""

        self._await(self._stop_listening())

    def blackhole(self, on: On = None) -> None:
        """Swallow everything in both directions, keep connections open and let new ones in: half-open."""

        def swallow() -> None:
            self.holes.append(on)
            for connection in self.connections:
                connection.dead |= connection.matches(on)

        self.call(swallow)

    def drop_request(self, matching: bytes | str = b"", *, nth: int = 1, on: On = None) -> Fault:
        """Cut the connection when the request has arrived here; the server never sees it."""
        return self._add(Fault("drop_request", _bytes(matching), nth, on))

    def drop_reply(self, matching: bytes | str = b"", *, nth: int = 1, on: On = None, after: int = 0) -> Fault:
        """Pass the request on, wait for the server's reply, pass its first `after` bytes, and cut the connection.

        Replies to earlier requests are passed; what was sent after the request is not executed.
        """
        return self._add(Fault("drop_reply", _bytes(matching), nth, on, after))

    def hold(self, matching: bytes | str = b"", *, nth: int = 1, on: On = None) -> Fault:
        """Keep the request, and what follows it on its connection, until `release`.

        It goes on to the server then even if its client has gone.
        """
        return self._add(Fault("hold", _bytes(matching), nth, on))

    def hold_reply(self, matching: bytes | str = b"", *, nth: int = 1, on: On = None) -> Fault:
        """Have the request executed, but keep its reply, and those that follow it, until `release`."""
        return self._add(Fault("hold_reply", _bytes(matching), nth, on))

    def count(self, matching: bytes | str = b"", on: On = None) -> int:
        """How many requests have come by that have `matching` in one of their words."""
        return len(self.seen(matching, on))

    def seen(self, matching: bytes | str = b"", on: On = None) -> list[Request]:
        """The requests that have come by, in order."""
        part = _bytes(matching)
        chosen = self.call(lambda: list(self.requests))
        if _SHA.fullmatch(part):
            chosen = [r for r in chosen if not _asks_for_scripts(r.words)]
        return [r for r in chosen if _on(on, r.connection, r.name) and any(part in word for word in r.words)]

    def forget_requests(self) -> None:
        self.call(self.requests.clear)

    def names(self) -> list[str]:
        """The names of the open connections, in order of accepting; an unnamed one is ``''``."""
        return self.call(lambda: [connection.name for connection in self.connections])

    def close(self) -> None:
        async def end() -> None:
            await self._stop_listening()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for connection in self.connections:
                    connection.cut()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            await asyncio.sleep(0)  # transports close their sockets one step after they are told to

        self._await(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # How it works

    def call(self, function: Callable[[], R]) -> R:
        """Run a plain function on the loop, so that it meets no half-done state; returns when it is done."""

        async def run() -> R:
            return function()

        return self._await(run())

    def _await(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        """Accept nobody any more, and let each accepted socket get its transport: without one, nobody closes it."""
        if self._listener is None:
            return
        for listening in self._listener.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)  # asyncio makes the transport in a task, and cannot once the listener is closed
        self._listener.close()
        self._listener = None

    def _add(self, fault: Fault) -> Fault:
        fault._proxy = self
        self.call(lambda: self.faults.append(fault))
        return fault

    def fault_for(self, connection: Connection, frame: bytes) -> Fault | None:
        """The fault that this request sets off, if any."""
        for fault in self.faults:
            if _SHA.fullmatch(fault.matching) and _asks_for_scripts(words(frame)[:2]):
                continue
            if connection.matches(fault.on) and fault.matching in frame:
                fault.nth -= 1
                if fault.nth == 0:
                    self.faults.remove(fault)
                    return fault
        return None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note the connection at once, so that `close` finds it even if its task has not begun."""
        connection = Connection(self, self._accepted, writer)
        self._accepted += 1
        connection.dead = any(hole is None or hole == connection.number for hole in self.holes)
        self.connections.append(connection)
        connection.task = asyncio.create_task(self._run_connection(connection, reader))

    async def _run_connection(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        try:
            await connection.run(reader)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            connection.cut()
            if connection in self.connections:
                self.connections.remove(connection)


class Connection:
    """One client's connection and ours to the server."""

    def __init__(self, proxy: FaultProxy, number: int, down: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.number = number
        self.name = ""
        self.dead = False
        self.task: asyncio.Task[None] | None = None  # held here: the loop alone would not keep it
        self._down = down
        self._up: asyncio.StreamWriter | None = None
        self._unanswered: deque[Fault | None] = deque()  # one for each request that has gone up, oldest first
        self._keeps_going = False  # a held request still has to be executed
        self._ends = False  # a fault has ended it: what was read behind its request sets off no other

    def matches(self, on: On) -> bool:
        return _on(on, self.number, self.name)

    def cut(self) -> bool:
        """Reset the client's side, and the server's too unless a held request is still to go there."""
        was_open = not self._down.transport.is_closing()
        _reset(self._down)
        if self._up is not None and not self._keeps_going:
            _reset(self._up)
        return was_open

    async def run(self, reader: asyncio.StreamReader) -> None:
        if self.dead:
            await _swallow(reader)
            return
        answers, self._up = await asyncio.open_connection(*self.proxy.upstream)
        line: _Line = asyncio.Queue()
        sending = asyncio.create_task(self._send(line))
        replying = asyncio.create_task(self._reply(answers))
        try:
            await self._read(reader, line)
            line.put_nowait(None)
            await sending
            if self._has_to_go_on():
                await replying
        finally:
            sending.cancel()
            replying.cancel()
            await asyncio.gather(sending, replying, return_exceptions=True)
            self._up.close()  # in order, unless cut() was first: what a client sent before it closed is still executed

    async def _read(self, reader: asyncio.StreamReader, line: _Line) -> None:
        data = bytearray()
        while chunk := await _some(reader):
            if self.dead:
                continue
            data += chunk
            at = 0
            while at < len(data) and not self.dead and (end := frame_end(data, at)) is not None:
                frame, at = bytes(data[at:end]), end
                asked = words(frame)
                self._note(asked)
                if self.dead:
                    break
                fault = None if self._ends else self.proxy.fault_for(self, frame)
                seconds = sum(seconds for seconds, on in self.proxy.latency if self.matches(on))
                answered = not asked[0].upper().endswith(b"SUBSCRIBE")  # those are answered by pushes only
                line.put_nowait((time.monotonic() + seconds if seconds else 0.0, frame, answered, fault))
            del data[:at]

    def _note(self, asked: list[bytes]) -> None:
        verb = [word.upper() for word in asked[:2]]
        if verb == [b"CLIENT", b"SETNAME"] and len(asked) > 2:
            self.name = asked[2].decode("utf-8", "replace")
            self.dead |= any(isinstance(hole, str) and hole in self.name for hole in self.proxy.holes)
        self.proxy.requests.append(Request(self.number, self.name, tuple(word[:100] for word in asked[:64])))

    async def _send(self, line: _Line) -> None:
        assert self._up is not None
        while (item := await line.get()) is not None:
            due, frame, answered, fault = item
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            if fault is not None and fault.action == "drop_request":
                fault._fired.set()
                self._give_back(line)
                self.cut()
                return
            if fault is not None and fault.action == "hold":
                self._keeps_going = True
                fault._fired.set()
                await fault._gate.wait()
            if self.dead:
                continue
            if answered:
                self._unanswered.append(fault)
            self._up.write(frame)
            await self._up.drain()
            if fault is not None and fault.action == "drop_reply":
                self._give_back(line)
                return  # what follows never reaches the server

    def _give_back(self, line: _Line) -> None:
        """Let the faults of what will not be sent wait for their requests again."""
        self._ends = True
        while not line.empty():
            item = line.get_nowait()
            if item is not None and item[3] is not None:
                item[3].nth = 1
                self.proxy.faults.append(item[3])

    async def _reply(self, answers: asyncio.StreamReader) -> None:
        data = bytearray()
        while chunk := await _some(answers):
            if self.dead:
                continue
            data += chunk
            at = 0
            while at < len(data) and (end := frame_end(data, at)) is not None:
                frame, at = bytes(data[at:end]), end
                if not await self._pass(frame):
                    return
            del data[:at]
        self.cut()  # the server closed its side

    async def _pass(self, frame: bytes) -> bool:
        fault = None
        if self._unanswered and not is_push(frame):
            fault = self._unanswered.popleft()
        if fault is not None:
            fault._executed.set()
            if fault.action == "hold":
                self._keeps_going = False
            if fault.action == "drop_reply":
                if fault.after:
                    await self._write_down(frame[: fault.after])
                    self._down.close()  # not a reset: that would take back the bytes on their way
                self.cut()
                fault._fired.set()
                return False
            if fault.action == "hold_reply":
                fault._fired.set()
                await fault._gate.wait()
        if self.dead:
            return True
        await self._write_down(frame)
        return self._has_to_go_on() or not self._down.transport.is_closing()

    async def _write_down(self, data: bytes) -> None:
        if not self._down.transport.is_closing():
            self._down.write(data)
            with suppress(OSError):
                await self._down.drain()

    def _has_to_go_on(self) -> bool:
        """Though the client may have gone, a fault waits for the server's reply."""
        return self._keeps_going or any(self._unanswered)


def _on(on: On, number: int, name: str) -> bool:
    return on is None or (on == number if isinstance(on, int) else on in name)


_SHA = re.compile(rb"[0-9a-f]{40}")


def _asks_for_scripts(request: Sequence[bytes]) -> bool:
    return [word.upper() for word in request[:2]] == [b"SCRIPT", b"EXISTS"]


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text


async def _some(reader: asyncio.StreamReader) -> bytes:
    with suppress(OSError):
        return await reader.read(_CHUNK)
    return b""


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await _some(reader):
        pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset, as a crash or a firewall does, so that nothing is left to be read."""
    if writer.transport.is_closing():
        return
    with suppress(OSError):
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
