"""A contender on a server: its processes, and what its handlers tell."""

from __future__ import annotations

import itertools
import json
import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.rivals.children import Failed, Lines, Producer, end_of, started
from benchmarks.rivals.environments import Prepared
from worqr.embedded import EmbeddedServer

READY_WITHIN = 60.0
STAMP = struct.Struct("d")


class Hold:
    """One call of `hold`, watched through a FIFO of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._text = ""

    def _moment(self, word: str, within: float) -> float | None:
        """When the word was written; when the last writer closed the FIFO, for ``ended``; None: not in time."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        ends = time.monotonic() + within
        while True:
            for line in self._text.splitlines():
                if line.startswith(word):
                    return float(line.partition(" ")[2])
            events = poll.poll(max(0.0, ends - time.monotonic()) * 1000)
            now = time.monotonic()
            data = os.read(self._fd, 4096) if events else b""
            self._text += data.decode()
            if not data and (not events or word == "ended"):
                return now if events else None
            if events and not data:  # a writer left without a word, and another may come
                time.sleep(0.001)
            if now > ends:
                return None

    def began(self, within: float) -> float | None:
        """When the handler started; None: not in time."""
        return self._moment("began", within)

    def ended(self, within: float) -> float | None:
        """When the handler noticed its end, or its process was gone; None: not in time."""
        return self._moment("ended", within)

    def again_after(self, kill: Callable[[], None]) -> float:
        """Kill the process of this run; return when. Later events belong to another run."""
        killed = time.monotonic()
        kill()
        os.close(self._fd)
        self._open()
        return killed

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink()


class Stand:
    """Starts the contender's processes on one server, in a folder for its logs, FIFOs and counts."""

    def __init__(self, prepared: Prepared, server: EmbeddedServer, folder: Path) -> None:
        self.prepared = prepared
        self.server = server
        self.url = f"redis://127.0.0.1:{server.port}/0"
        self.client = redis.Redis(unix_socket_path=server.socket_path)
        self.folder = folder
        self.tally = folder / "tally"
        self._numbers = itertools.count()
        self._events = folder / "events"
        os.mkfifo(self._events)
        self._events_fd = os.open(self._events, os.O_RDWR | os.O_NONBLOCK)  # never at its end: it is a writer, too
        self._lines = Lines(self._events_fd)

    def close(self) -> None:
        os.close(self._events_fd)
        self.client.close()

    @contextmanager
    def producer(self) -> Iterator[Producer]:
        """Start the producer."""
        log = self.folder / f"producer{next(self._numbers)}.log"
        with started([*self.prepared.command, "produce"], self.prepared, {"RIVALS_URL": self.url}, log) as process:
            yield Producer(process, log)

    @contextmanager
    def worker(self, name: str = "a") -> Iterator[Path]:
        """Start a worker, and give its log. Whether it is ready, `ready` knows."""
        self.tally.write_bytes(b"")
        log = self.folder / f"worker{next(self._numbers)}.log"
        env = {
            "RIVALS_URL": self.url,
            "RIVALS_WORKER": name,
            "RIVALS_TALLY": str(self.tally),
            "RIVALS_EVENTS": str(self._events),
            "RIVALS_EVERY": str(self.prepared.about["every"]),
        }
        command = [self.url if word == DEFAULT_URL else word for word in self.prepared.about["worker"]]
        with started(command, self.prepared, env, log):
            yield log

    def ping(self, producer: Producer, within: float) -> tuple[str, float]:
        """Send a `ping`; return who answered, and the milliseconds from the call until the handler started.

        Raises:
            Failed: No handler started in time.
        """
        producer.ask("ping")
        line = self._lines.next(within)
        if line is None:
            raise Failed(f"no handler started within {within:g} s")
        told = json.loads(line)
        return told["worker"], told["ms"]

    def ready(self, producer: Producer, log: Path, name: str = "a") -> None:
        """Wait until this worker has run a task; another one may take some of the tasks, too.

        Raises:
            Failed: It does not; the message has the end of its log.
        """
        ends = time.monotonic() + READY_WITHIN
        try:
            while self.ping(producer, READY_WITHIN)[0] != name:
                if time.monotonic() > ends:
                    raise Failed(f"worker {name!r} got no task within {READY_WITHIN:g} s")
                time.sleep(0.02)
        except Failed as failure:
            raise Failed(f"{failure}; {end_of(log)}") from None

    @contextmanager
    def hold(self, producer: Producer) -> Iterator[Hold]:
        """Enqueue a call of `hold`."""
        hold = Hold(self.folder / f"hold{next(self._numbers)}")
        try:
            producer.ask("hold", path=str(hold.path))
            yield hold
        finally:
            hold.close()

    def stamps(self) -> list[float]:
        """The times that the handlers of `noop` wrote so far, in order."""
        data = self.tally.read_bytes()
        return sorted(value for (value,) in STAMP.iter_unpack(data[: len(data) // STAMP.size * STAMP.size]))

    def memory(self) -> int:
        """Bytes that the server uses when no client but this one is connected."""
        ends = time.monotonic() + READY_WITHIN
        while int(self.client.info("clients")["connected_clients"]) > 1 and time.monotonic() < ends:
            time.sleep(0.01)
        return int(self.client.info("memory")["used_memory"])


DEFAULT_URL = "redis://127.0.0.1:6379/0"
"""What ``describe`` prints in a worker's command line where the server's URL belongs."""
