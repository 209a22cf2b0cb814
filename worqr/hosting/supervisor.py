"""``worqr run --workers N``: a small parent that starts workers, restarts those that end, and renews them one after the other.

The parent runs this module alone: it imports neither the application nor an event loop. Its children are the same command. It
passes signals on, adds up the probes of its workers, and talks to systemd. A worker that reaches a limit (`Limits`) is renewed:
its successor starts first, and only when that serves does the old one retire. So the capacity does not drop, and no task is cut
short. As process 1 of a container the parent also reaps what handlers leave behind.

One thread, `_Supervisor.run`, changes everything. The threads of the probes and of systemd only read.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any, Final, NoReturn

from worqr.child_processes import resident_memory
from worqr.errors import UsageError
from worqr.hosting.logs import Level, set_up_logging
from worqr.hosting.systemd import READY, STOPPING, SystemdNotifier, watchdog_every
from worqr.http_server import BindAddress, HttpReply, HttpRequest, HttpServer
from worqr.log_events import emit
from worqr.mesh_records import Health

# The control channel between a parent and the worker that it has started: requests to stop, and replies of the probes.
#
# A file descriptor, whose number is in the environment, connects the two. The parent sends lines: a `StopLevel` as a digit,
# ``retire``, or a GET request for a path of the probes. The worker's reader thread handles them, so it replies while the event
# loop is blocked. The end of the file means that the parent has ended, for any reason. The worker then cancels its handlers and
# leaves. (Linux's PR_SET_PDEATHSIG would be wrong here: it leaves no time to give tasks back, and macOS does not have it.)


CHANNEL: Final = "WORQR_CONTROL"
"""The environment variable with the file descriptor of the worker's end."""
SUPERVISED: Final = "WORQR_SUPERVISED"
"""The environment variable of a worker whose parent serves the probes: empty, or why its predecessor ended."""
OF_THE_PARENT: Final = ("WORQR_PROBE", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Environment variables that a supervised worker does not get: its parent serves the probes, and talks to systemd."""
RETIRE: Final = "retire"
REPLY_WITHIN: Final = 1.0
"""Seconds within which a worker must reply. Its reader thread needs only the interpreter lock."""
_GET: Final = "get"
_PARENT_ENDED: Final = "2"
"""The level with which a worker stops if its parent has ended: `StopLevel.CANCEL`."""


class ControlledChild:
    """The parent's side of one worker. Constructing it starts the process.

    Args:
        command: the program and its arguments.
        restarted: why its predecessor ended; empty: it has none.

    Raises:
        OSError: the system cannot start another process.

    Attributes:
        pid: its process id, until it was reaped.
    """

    def __init__(self, command: list[str], restarted: str = "") -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OF_THE_PARENT}
        self._socket, theirs = socket.socketpair()
        try:
            os.set_inheritable(theirs.fileno(), True)
            environment |= {CHANNEL: str(theirs.fileno()), SUPERVISED: restarted}
            self.pid: int = os.posix_spawn(command[0], command, environment, setsigmask=())
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._asking = threading.Lock()
        self._number = 0
        self._received = b""

    def request_stop(self, level: int) -> None:
        """Ask the worker to stop with this `StopLevel`. May be called again, from any thread and from a signal handler."""
        self._send(str(level))

    def retire(self) -> None:
        """Ask the worker to take no more tasks, and to end when the running ones have ended."""
        self._send(RETIRE)

    def kill(self) -> None:
        """End the worker at once. Its tasks return to their queues some seconds later, and each counts a crash."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the channel, because the worker has ended."""
        with self._asking:
            self._socket.close()

    def _send(self, line: str) -> None:
        with suppress(OSError):  # the worker has ended, or has not read for a long time
            self._socket.send(f"{line}\n".encode(), socket.MSG_DONTWAIT)

    def _ask(self, path: str, accept: str) -> None:
        self._number += 1
        self._send(f"{_GET} {self._number} {path} {accept}")

    def _receive(self) -> HttpReply | None:
        """Read once. Return the reply with the current number if it has arrived. Earlier replies were too late.

        Raises:
            OSError: the worker has ended.
        """
        data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
        if not data:
            raise BrokenPipeError
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                found = json.loads(line)
                if found["number"] == self._number:
                    return HttpReply(HTTPStatus(found["status"]), found["body"].encode(), found["type"])
            except Exception:  # noqa: S112 - something else writes to its descriptor
                continue
        return None

    @staticmethod
    def ask_all(children: Sequence[ControlledChild], path: str, accept: str) -> list[HttpReply | None]:
        """Return the reply of each one's probes, None where it does not come within `REPLY_WITHIN`. From any thread.

        All are asked at once, and read as they reply: many workers that import their application together cost one such time,
        not one each, and none of them delays a long reply of another one.
        """
        replies: list[HttpReply | None] = [None] * len(children)
        with ExitStack() as held, selectors.PollSelector() as waiting:
            for i, child in enumerate(children):
                held.enter_context(child._asking)
                child._ask(path, accept)
                if child._socket.fileno() >= 0:  # it has not ended
                    waiting.register(child._socket, selectors.EVENT_READ, i)
            left, deadline = REPLY_WITHIN, time.monotonic() + REPLY_WITHIN
            while left > 0 and waiting.get_map():
                left = deadline - time.monotonic()
                for key, _ in waiting.select(max(0.0, left)):
                    place: int = key.data
                    with suppress(OSError):  # it has ended
                        replies[place] = children[place]._receive()
                        if replies[place] is None:
                            continue
                    waiting.unregister(key.fileobj)
        return replies


# In the worker


@dataclass(frozen=True, slots=True)
class Parent:
    """What a worker knows of the parent that controls it.

    Attributes:
        channel: the descriptor of the worker's end.
        supervises: the parent serves the probes and talks to systemd, and may run several workers.
        restarted: why the worker's predecessor ended; empty: it has none.
    """

    channel: int
    supervises: bool
    restarted: str


def parent_of_this_process() -> Parent | None:
    """Return the parent that controls this process, and forget it, for the processes that it starts; None: there is none."""
    number, restarted = os.environ.pop(CHANNEL, ""), os.environ.pop(SUPERVISED, None)
    if not number.isdecimal():
        return None
    os.set_inheritable(int(number), False)
    return Parent(int(number), restarted is not None, restarted or "")


def follow_parent(
    channel: int,
    request_stop: Callable[[int], None],
    retire: Callable[[], None],
    respond: Callable[[HttpRequest], HttpReply],
) -> None:
    """Call these functions in a thread with what the parent sends, and `request_stop` when the parent has ended."""
    reader = _Reader(channel, request_stop, retire, respond)
    threading.Thread(target=reader.run, name="worqr-control", daemon=True).start()


class _Reader:
    """The thread of the worker that reads its parent's requests."""

    def __init__(
        self,
        channel: int,
        request_stop: Callable[[int], None],
        retire: Callable[[], None],
        respond: Callable[[HttpRequest], HttpReply],
    ) -> None:
        self._channel = channel
        self._request_stop = request_stop
        self._retire = retire
        self._respond = respond

    def run(self) -> None:
        """Handle lines until the parent has ended."""
        received = b""
        with suppress(OSError):
            while data := os.read(self._channel, 4096):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._handle(line.decode())
        self._handle(_PARENT_ENDED)

    def _handle(self, line: str) -> None:
        if line.isdecimal():
            self._request_stop(int(line))
        elif line == RETIRE:
            self._retire()
        elif line.startswith(_GET):
            _, number, path, accept = line.split(" ", 3)
            try:
                reply = self._respond(HttpRequest(path, accept))
            except Exception as error:  # as the HTTP server does: the next request may find it well
                reply = HttpReply.of(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
            self._reply(int(number), reply)

    def _reply(self, number: int, reply: HttpReply) -> None:
        found = {"number": number, "status": reply.status, "body": reply.body.decode(), "type": reply.content_type}
        data = memoryview(json.dumps(found).encode() + b"\n")
        while data:
            data = data[os.write(self._channel, data) :]


# The sum of the metrics of several workers, in the text format of Prometheus. Pure.
#
# Counters of workers that have ended stay in the sum, so the sum never falls when a worker is renewed. Of gauges in seconds,
# the largest counts.

REGISTRATIONS: Final = "worqr_peer_registrations_total"
"""A successor's first registration does not count, because it is not a worker that was declared dead and joined again."""


class MetricsTotal:
    """Adds up the metrics of workers.

    Args:
        workers: how many workers are not another's successor: those with the lowest numbers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._ended: dict[str, float] = {}
        self._heads: dict[str, list[str]] = {}

    def ended(self, number: int, text: str) -> None:
        """Keep the last counters of the worker with this number."""
        sums = dict(self._ended)
        for kind, name, value in self._samples(number, text):
            if kind != "gauge":
                sums[name] = sums.get(name, 0.0) + value
        self._ended = sums  # another thread may be reading the old one

    def text(self, texts: Mapping[int, str]) -> str:
        """Return the sum of the metrics of these workers, by their numbers, and of those that have ended."""
        sums = dict(self._ended)
        for number, text in texts.items():
            for kind, name, value in self._samples(number, text):
                largest = kind == "gauge" and _metric(name).endswith("_seconds")
                sums[name] = max(sums.get(name, value), value) if largest else sums.get(name, 0.0) + value
        lines: list[str] = []
        for metric, head in self._heads.items():
            lines += [*head, *(f"{name} {value!r}" for name, value in sums.items() if _metric(name) == metric)]
        return "\n".join([*lines, ""])

    def _samples(self, number: int, text: str) -> Iterator[tuple[str, str, float]]:
        """Yield (kind, name with labels, value) of each sample of a worker, and note the heads of the metrics."""
        kinds: dict[str, str] = {}
        heads: dict[str, list[str]] = {}
        for line in filter(None, text.split("\n")):  # the name of a queue may have other separators of lines
            if line.startswith("#"):
                metric = line.split(" ", 3)[2]
                heads.setdefault(metric, []).append(line)
                if line.startswith("# TYPE"):
                    kinds[metric] = line.rpartition(" ")[2]
                continue
            name, _, value = line.rpartition(" ")
            is_later = name == REGISTRATIONS and number >= self._workers
            yield kinds.get(_metric(name), "untyped"), name, max(0.0, float(value) - is_later)
        self._heads = {**self._heads, **heads}


def _metric(name: str) -> str:
    return name.partition("{")[0]


# ``worqr run --workers N``: a small parent that starts workers, restarts those that end, and renews them one after the other.

logger: logging.Logger = logging.getLogger("worqr.supervisor")

CHECK_EVERY: Final = 0.5
"""Seconds between two checks of the workers. A signal, and the end of a worker, are handled at once."""
JITTER: Final = 0.1
"""Each worker takes up to this part off its limits, so that workers that were started together are not due together."""
RETIRE_WITHIN: Final = 3600.0
"""Seconds after which a worker that is renewed, and still runs tasks, is stopped with its grace period."""
STEADY_AFTER: Final = 60.0
"""Seconds after which the end of a worker does not count as a failed start. The next one is started without a pause."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Seconds before a worker is started again that has ended too soon: they double from `FIRST_PAUSE`."""
STOP_SPARE: Final = 12.0
"""Seconds beyond its grace period after which a worker that does not end is killed. It ends by itself 2 s earlier."""
SILENT_AFTER: Final = 15.0
"""Seconds without a reply after which a worker counts as not alive, like one whose event loop is blocked."""
PARENT_STUCK_AFTER: Final = 30.0
"""Seconds without a round of this program after which systemd should start it again."""
LEVEL_NOW: Final = 3
"""The `StopLevel` with which a worker ends at once."""
_JSON: Final = "application/json"
_PROGRAM: Final = (  # with -P: json imports modules whose names files of the application may have, such as operator
    "import json, sys; plan = json.loads(sys.argv.pop()); sys.path[:] = plan.pop('path'); "
    "from worqr.hosting.supervisor import main; main(plan)"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker is renewed. None: not for that reason.

    Attributes:
        runs: after so many runs.
        memory: when its process has more resident memory than this, in bytes; not that of the processes that it starts.
        age: so many seconds after its start.
    """

    runs: int | None = None
    memory: int | None = None
    age: float | None = None

    def with_jitter(self) -> Limits:
        """Return the limits of one worker."""
        part = 1 - JITTER * random.random()
        return Limits(
            None if self.runs is None else max(1, round(self.runs * part)),
            None if self.memory is None else round(self.memory * part),
            None if self.age is None else self.age * part,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parent does.

    Attributes:
        command: the program of a worker, and its arguments.
        workers: how many serve at a time.
        limits: when a worker is renewed.
        grace: seconds that a worker has to end its tasks.
        probe: where the probes are served; None: nowhere.
        restarts: False: there is one worker, the parent ends with it and with its exit code, and only reaps other processes.
    """

    command: list[str]
    workers: int
    limits: Limits
    grace: float
    probe: str | None
    restarts: bool = True


def become_supervisor(plan: Plan, level: Level | None, *, log_json: bool) -> NoReturn:
    """Replace this process, which has imported the command line, by the parent, which is a third of its size."""
    data = {**asdict(plan), "path": sys.path, "level": level, "log_json": log_json}
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-P", "-c", _PROGRAM, json.dumps(data)])  # noqa: S606 - no shell is wanted


def main(data: dict[str, Any]) -> NoReturn:
    """Run the parent: the program that `become_supervisor` starts."""
    set_up_logging(data.pop("level"), as_json=data.pop("log_json"))
    limits = Limits(**data.pop("limits"))
    plan = Plan(**data, limits=limits)
    try:
        sys.exit(_Supervisor(plan).run())
    except UsageError as error:
        sys.stderr.write(f"worqr: {error}\n")
        sys.exit(1)


class _Worker:
    """One worker, as the parent knows it.

    Attributes:
        number: how many workers were started before it.
        status: the last reply of its probes; empty: it has not joined yet.
        seen: when it last replied.
        unwell_since: when it was first found not alive; None: it is alive. A parent that was frozen finds it so afterwards only.
        retires_since: when it was asked to retire; None: it was not.
        metrics: the text of its last metrics.
    """

    def __init__(self, number: int, command: list[str], limits: Limits, restarted: str) -> None:
        self.number = number
        self.started: float = time.monotonic()
        self.seen: float = self.started
        self.unwell_since: float | None = None
        self.status: Mapping[str, Any] = {}
        self.retires_since: float | None = None
        self.kill_at: float | None = None
        self.metrics: str = ""
        self.child = ControlledChild(command, restarted)
        self._limits = limits.with_jitter()

    @property
    def serves(self) -> bool:
        """It takes tasks."""
        return self.retires_since is None and bool(self.status.get("ready")) and not self.why_not_alive()

    def note_health(self, reply: HttpReply | None) -> None:
        """Note the reply of its probe. Changes `status`, `seen` and `unwell_since`."""
        now = time.monotonic()
        if reply is not None:
            self.seen = now
            if reply.content_type == _JSON:
                self.status = json.loads(reply.body)
        self.unwell_since = (self.unwell_since or now) if self.why_not_alive() else None

    def why_not_alive(self) -> str:
        """Return why it should be started again; empty if it should not."""
        silent = time.monotonic() - self.seen
        if silent > SILENT_AFTER:
            return f"it has not replied for {silent:.0f} s"
        if self.status and not self.status["alive"]:
            return f"its event loop has been blocked for {self.status['loop_lag']:.1f} s"
        return ""

    def why_due(self) -> str:
        """Return why it should be renewed; empty if it should not."""
        runs, age = self.status.get("runs", 0), time.monotonic() - self.started
        if self._limits.runs is not None and runs >= self._limits.runs:
            return f"it has run {runs} tasks"
        if self._limits.age is not None and age >= self._limits.age:
            return f"it is {age:.0f} s old"
        if self._limits.memory is not None and runs:  # one that has run nothing would be as large again
            memory = resident_memory(self.child.pid)
            if memory > self._limits.memory:
                return f"it has {memory / (1 << 20):.0f} MiB of memory after {runs} runs"
        return ""

    def note_metrics(self, reply: HttpReply | None) -> HttpReply | None:
        """Keep its metrics. From any thread. Return a reply that says why it never has any."""
        if reply is None or reply.status == HTTPStatus.SERVICE_UNAVAILABLE:  # it imports the application
            return None
        if reply.status != HTTPStatus.OK:
            return reply
        self.metrics = reply.body.decode()
        return None

    def retire(self) -> None:
        """Ask it to take no more tasks, and to end."""
        self.retires_since = time.monotonic()
        self.child.retire()

    def stop(self, level: int, grace: float) -> None:
        """Ask it to stop with this `StopLevel`, and kill it if it does not end."""
        self.child.request_stop(level)
        within = {1: grace + STOP_SPARE, 2: STOP_SPARE}.get(level, 1.0)
        self.kill_at = min(self.kill_at or time.monotonic() + within, time.monotonic() + within)


class _Supervisor:
    """The parent. Its signal handler changes `_signals` and `_level` only; `run` changes everything else."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._workers: list[_Worker] = []
        self._started = 0
        self._signals = 0  # SIGHUP does not count, as in a single worker
        self._level = 0
        self._passed_on = 0
        self._renewed: _Worker | None = None
        self._ready_once = False
        self._failures = 0
        self._next_start = 0.0
        self._restarted = ""
        self._code = 0
        self._round = time.monotonic()
        self._counting = threading.Lock()  # so that a thread of the probes counts a worker that ends once
        self._total = MetricsTotal(plan.workers)
        self._runs = 0
        self._systemd = SystemdNotifier(self.health, os.environ)
        self._watchdog = watchdog_every(os.environ)

    def run(self) -> int:
        """Run workers until a signal comes; return the exit code.

        Raises:
            UsageError: the address of the probes cannot be used.
        """
        bind = None if self._plan.probe is None else BindAddress.parse(self._plan.probe, "probe")
        server = None if bind is None else HttpServer(bind, self.respond)
        waker, woken = socket.socketpair()
        waker.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, self._on_signal)
        try:
            self._systemd.start()
            if server is not None:
                emit(logger, "probe", "serving probes at %(address)s", address=str(server.address))
            while not self._once():
                select.select([woken], [], [], CHECK_EVERY)
                with suppress(BlockingIOError):
                    woken.recv(4096)
            return self._code
        finally:
            self._systemd.end()
            if server is not None:
                server.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals += number != signal.SIGHUP
            self._level = min(LEVEL_NOW, max(1, self._level, self._signals))

    def _once(self) -> bool:
        """Do what is to be done now. Return True when all workers have ended."""
        self._round = time.monotonic()
        self._reap()
        if self._level > self._passed_on:
            self._stop_all(self._level)
        if self._passed_on and not self._workers:
            return True
        for worker, reply in _ask(self._workers, "/ready", _JSON):
            worker.note_health(reply)
            if self._passed_on:  # again: the channel to one that was frozen may have been full
                worker.child.request_stop(self._passed_on)
        if self._plan.probe is not None:
            retiring = [worker for worker in self._workers if worker.retires_since is not None]
            for worker, reply in _ask(retiring, "/metrics", "text/plain"):
                worker.note_metrics(reply)  # these may be its last ones
        if not self._passed_on:
            self._start_missing()
            self._note_ready()
            self._renew()
        self._kill_late()
        return False

    def _stop_all(self, level: int) -> None:
        """Stop all workers with this level, and start no more."""
        self._passed_on = level
        text = "shutting down: stopping %(running)d workers (urgency %(urgency)d)"
        emit(logger, "workers.stop", text, running=len(self._workers), urgency=level)
        self._systemd.tell(STOPPING)
        for worker in self._workers:
            worker.stop(level, self._plan.grace)

    # Starting, and what has ended

    def _start_missing(self) -> None:
        wanted = self._plan.workers + (self._renewed is not None and self._renewed.retires_since is None)
        while sum(worker.retires_since is None for worker in self._workers) < wanted:
            if time.monotonic() < self._next_start:
                return
            try:
                worker = _Worker(self._started, self._plan.command, self._plan.limits, self._restarted)
            except OSError as error:
                self._pause(f"a worker could not be started: {error.strerror}")
                return
            self._started += 1
            self._restarted = ""
            self._workers.append(worker)
        self._restarted = ""  # of one whose successor was started before it ended

    def _reap(self) -> None:
        """Collect the processes that have ended: workers, and as process 1 also those that handlers left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for worker in [each for each in self._workers if each.child.pid == pid]:
                self._on_end(worker, os.waitstatus_to_exitcode(status))

    def _on_end(self, worker: _Worker, code: int) -> None:
        worker.child.close()
        with self._counting:
            self._workers.remove(worker)
            self._total.ended(worker.number, worker.metrics)
            self._runs += worker.status.get("runs", 0)
        retired = worker.retires_since is not None
        if worker is self._renewed:
            self._renewed = None
        if self._passed_on and not worker.status:  # it was told to stop before it had joined
            return
        if self._passed_on or not self._plan.restarts or (code > 0 and not self._ready_once):
            self._code = self._code or (code if code >= 0 else 1)
            if not self._passed_on:
                self._passed_on = 1
                self._stop_all(1)
            return
        if retired:
            emit(
                logger,
                "worker.renewed",
                "the old process %(pid)d %(reason)s",
                pid=worker.child.pid,
                reason=_ended(code),
            )
            return
        had_served = time.monotonic() - worker.started >= STEADY_AFTER or (code == 0 and bool(worker.status))
        self._failures = 0 if had_served else self._failures
        self._restarted = f"the worker of process {worker.child.pid} {_ended(code)}"
        if had_served:
            emit(
                logger, "worker.restarted", "%(reason)s; starting another", reason=self._restarted, pid=worker.child.pid
            )
        else:
            self._pause(self._restarted)

    def _pause(self, why: str) -> None:
        """Start no worker for some time, which doubles with each failure."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._next_start = time.monotonic() + pause
        text = "%(reason)s; starting another in %(retry_in)g s"
        emit(logger, "worker.restarted", text, reason=why, retry_in=pause)

    def _note_ready(self) -> None:
        """Note the first moment at which all workers serve."""
        if not self._ready_once and sum(worker.serves for worker in self._workers) >= self._plan.workers:
            self._ready_once = True
            self._systemd.tell(READY)
            emit(logger, "workers.start", "%(running)d workers serve", running=self._plan.workers)

    # Renewing

    def _renew(self) -> None:
        """Renew one worker at a time: choose it, start its successor, and let it retire when the successor serves."""
        renewed = self._renewed
        if renewed is None:
            serving = [worker for worker in self._workers if worker.serves]
            if len(serving) < self._plan.workers or len(serving) < len(self._workers):
                return  # another one is starting, or is being restarted
            for worker in serving:
                if why := worker.why_due():
                    text = "process %(pid)d is renewed, because %(reason)s"
                    emit(logger, "worker.renewed", text, pid=worker.child.pid, reason=why)
                    self._renewed = worker
                    return
        elif renewed.retires_since is None:
            if sum(worker.serves for worker in self._workers if worker is not renewed) >= self._plan.workers:
                renewed.retire()
        elif renewed.kill_at is None and time.monotonic() > renewed.retires_since + RETIRE_WITHIN:
            renewed.stop(1, self._plan.grace)

    def _kill_late(self) -> None:
        """Kill workers that should have ended; under a watchdog of systemd, also those that are not alive."""
        now = time.monotonic()
        for worker in self._workers:
            late = worker.kill_at is not None and now > worker.kill_at
            unwell = self._watchdog and worker.unwell_since and now > worker.unwell_since + 2 * self._watchdog
            why = "it did not end in time" if late else worker.why_not_alive() if unwell else ""
            if why:
                text = "process %(pid)d is killed: %(reason)s"
                emit(logger, "worker.restarted", text, level=logging.ERROR, pid=worker.child.pid, reason=why)
                worker.child.kill()

    # Probes, in their threads

    def health(self) -> Health:
        """Return the health of all workers together. Called in other threads."""
        workers = [worker for worker in tuple(self._workers) if worker.retires_since is None]
        states = [worker.status for worker in workers]
        missing = self._plan.workers - sum(worker.serves for worker in workers)
        why = "the workers are stopping" if self._passed_on else self._why_missing(workers) if missing > 0 else ""
        return Health(
            alive=time.monotonic() - self._round < PARENT_STUCK_AFTER,
            ready=not why,
            why=why,
            running=sum(worker.status.get("running", 0) for worker in tuple(self._workers)),
            room=sum(state.get("room", 0) for state in states),
            loop_lag=max((state.get("loop_lag", 0.0) for state in states), default=0.0),
        )

    def _why_missing(self, workers: Sequence[_Worker]) -> str:
        reasons = [
            worker.why_not_alive() or str(worker.status.get("why") or "starting")
            for worker in workers
            if not worker.serves
        ]
        serving = sum(worker.serves for worker in workers)
        return (
            f"{serving} of {self._plan.workers} workers serve: {reasons[0] if reasons else 'waiting to start another'}"
        )

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply to a request of a probe. Called in the server's thread."""
        if request.path == "/metrics":
            return self._metrics()
        health = self.health()
        not_alive = [
            f"process {each.child.pid}: {why}" for each in tuple(self._workers) if (why := each.why_not_alive())
        ]
        reasons: dict[str, str] = {
            "/live": "" if health.alive and not not_alive else (not_alive or ["the parent does not respond"])[0],
            "/ready": health.why,
            "/startup": "" if self._ready_once else health.why or "starting",
        }
        if request.path not in reasons:
            return HttpReply.of(HTTPStatus.NOT_FOUND, f"there are {', '.join(reasons)}, /metrics")
        why = reasons[request.path]
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        if _JSON not in request.accept:
            return HttpReply.of(status, why or "ok")
        with self._counting:
            runs = self._runs + sum(worker.status.get("runs", 0) for worker in self._workers)
        found = {"ok": not why, "reason": why, **asdict(health), "alive": not reasons["/live"], "runs": runs}
        pids = [worker.child.pid for worker in tuple(self._workers)]
        return HttpReply(status, (json.dumps({**found, "workers": pids}) + "\n").encode(), _JSON)

    def _metrics(self) -> HttpReply:
        for worker, reply in _ask(tuple(self._workers), "/metrics", "text/plain"):
            if (refused := worker.note_metrics(reply)) is not None:
                return refused
        with self._counting:
            text = self._total.text({worker.number: worker.metrics for worker in self._workers})
        return HttpReply(HTTPStatus.OK, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


def _ask(workers: Sequence[_Worker], path: str, accept: str) -> Iterator[tuple[_Worker, HttpReply | None]]:
    """Return each of these workers with the reply of its probes, None where there is none."""
    return zip(workers, ControlledChild.ask_all([worker.child for worker in workers], path, accept), strict=True)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
