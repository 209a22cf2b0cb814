"""Functions that the tests let worker processes run."""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import worqr


@dataclass
class Point:
    """What a step returns."""

    x: int


FAR = datetime.fromisoformat("2031-02-03T04:05:06.789+00:00")


class Down(ConnectionError):
    """An error of an application."""

    code = None  # of all of them, so it is not the error's own

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def say(**facts: Any) -> None:
    """Tell the test."""
    worqr.current().progress(message=json.dumps(facts))


def snoozing(task: bytes) -> str:
    """Snooze twice, in a block whose `except Exception` does not catch it."""
    now = worqr.current()
    if now.run <= 2:
        try:
            raise worqr.Snooze(0, "the upload")
        except Exception:
            return "swallowed"
    return f"run {now.run}, attempt {now.attempt}, failures {now.failures}"


def get_further(task: bytes) -> list[bool]:
    """Return if this was the last attempt before, and after, it got further than the runs before it."""
    now = worqr.current()
    told = [now.last_attempt]
    for n in range(now.run):
        worqr.step_now(f"step {n}", int)
    told.append(now.last_attempt)
    if now.run < 3:
        raise ValueError(told)
    return told


def nothing(task: bytes) -> None:
    pass


def report_and_end(task: bytes) -> None:
    """Report four times at once, and end as the task says."""
    for n in range(1, 5):
        worqr.current().progress(n / 4, f"step {n}")
    if task == b"fail":
        raise worqr.Failure("no")
    if task == b"raise":
        raise ValueError("no")


def report_and_end_all(tasks: list[bytes]) -> list[Exception | None]:
    """Do it for a list."""
    for n in range(1, 5):
        worqr.current().progress(n / 4, f"step {n}")
    errors = {b"fail": worqr.Failure("no"), b"raise": ValueError("no")}
    return [errors.get(task) for task in tasks]


def echo(task: bytes) -> bytes:
    return task


def pid(task: bytes) -> int:
    return os.getpid()


def context(task: bytes) -> dict[str, Any]:
    now = worqr.current()
    return {
        "id": now.id,
        "queue": now.queue,
        "task": now.task.decode(),
        "fence": now.fence,
        "failures": now.failures,
        "stalls": now.stalls,
        "timeouts": now.timeouts,
        "attempt": now.attempt,
        "last_attempt": now.last_attempt,
        "run_at": str(now.run_at),
        "scheduled_for": str(now.scheduled_for),
        "meta": dict(now.meta),
        "cancel_reason": now.cancel_reason,
        "check_cancelled": now.check_cancelled(),
        "deadline": now.deadline,
    }


def no_context(task: bytes) -> str:
    found: list[str] = []

    def ask() -> None:
        try:
            worqr.current()
        except LookupError:
            found.append("unknown")

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def not_json(task: bytes) -> object:
    return object()


def late(task: bytes) -> Awaitable[None]:
    return asyncio.sleep(0)


# What it raises


def fail(task: bytes) -> None:
    print("it went wrong", file=sys.stderr)
    raise Down(task.decode())


def fail_unprintably(task: bytes) -> None:
    raise Unprintable


def give_up(task: bytes) -> None:
    raise worqr.Failure("never")


def garbage(task: bytes) -> None:
    raise worqr.Undecodable("no sense")


def again(task: bytes) -> None:
    if task == b"at":
        raise worqr.Retry("then", run_at=FAR)
    raise worqr.Retry("later", delay=5, counted=False)


def fail_and_retry(task: bytes) -> None:
    raise ExceptionGroup("several", [worqr.Retry("later"), worqr.Failure("never")])


def leave(task: bytes) -> None:
    sys.exit(task.decode() or 3)


def interrupt(task: bytes) -> None:
    raise KeyboardInterrupt


# Standard streams


def complain(task: bytes) -> None:
    for n in range(4000):
        print(f"complaint {n}", file=sys.stderr)
    raise ValueError("over")


def whisper(task: bytes) -> None:
    print("whispered by the run before", file=sys.stderr)


def fail_silently(task: bytes) -> None:
    raise ValueError("silent")


def litter(task: bytes) -> bytes:
    """Everything that a pipe on the standard streams would not survive."""
    os.write(1, b"\x00\x00\x00\x05junk\xff" * 1000)
    print("text without an end", end="")
    sys.stdout.close()
    return task


def write_anywhere(task: bytes) -> None:
    for fd in range(3, 4096):  # a peer that has much open gives its processes high numbers
        try:
            os.write(fd, task)
        except OSError:
            pass


def expendable(task: bytes) -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def descriptors(task: bytes) -> list[int]:
    """Those of this process, and of a program that it starts without closing any."""
    listing = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd'))))"
    done = subprocess.run([sys.executable, "-c", listing], close_fds=False, capture_output=True, text=True, check=True)
    return [len(os.listdir("/proc/self/fd")), *map(int, done.stdout.split())]


# Ending


def spin(task: bytes) -> None:
    """A busy loop, and a grandchild."""
    say(pid=os.getpid(), grandchild=subprocess.Popen(["sleep", "100"]).pid)
    while True:
        pass


def spin_shortly(task: bytes) -> None:
    """Write the process ids into the named file, shorten the deadline, and go on until it has passed."""
    grandchild = subprocess.Popen(["sleep", "100"])
    Path(task.decode()).write_text(f"{os.getpid()} {grandchild.pid}")
    print("not long now", file=sys.stderr)
    worqr.current().extend(0.1)
    while True:
        pass


def hold_the_lock(task: bytes) -> None:
    """As `spin`, in C and with the interpreter's lock held."""
    say(pid=os.getpid(), grandchild=subprocess.Popen(["sleep", "100"]).pid)
    ctypes.PyDLL(None).sleep(100)


def hold(task: bytes) -> None:
    say(pid=os.getpid())
    time.sleep(100)


def freeze(task: bytes) -> None:
    say(pid=os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_behind(task: bytes) -> int:
    return subprocess.Popen(["sleep", "100"]).pid


def crash(task: bytes) -> None:
    print("about to crash", file=sys.stderr)
    if task == b"segv":
        ctypes.string_at(0)
    if task == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == b"exit":
        os._exit(0)


def close_descriptors(task: bytes) -> None:
    """Close what is not its own, and go on."""
    os.closerange(3, 256)
    if task == b"go on":
        time.sleep(3600)


def print_unicode(task: bytes) -> None:
    print("gedruckt: ü 日本")


def hold_or_crash(task: bytes) -> None:
    hold(task) if task == b"hold" else crash(task)


def die_holding(task: bytes) -> None:
    """End with a fork around that holds all that this process held, of which Python knows nothing, out of reach."""
    library = ctypes.PyDLL(None)
    fork = library.fork()
    if fork == 0:
        library.setsid()
        library.sleep(100)
    say(fork=fork)
    os._exit(9)


def fork_and_go_on(task: bytes) -> int:
    os.fork()
    return os.getpid()


def report_in_fork(task: bytes) -> str:
    """What a fork is told that reports in place of its process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_told, (task.decode(),))


def _told(what: str) -> str:
    run = worqr.current()
    try:
        {"progress": run.progress, "cost": run.cost}[what](1)
    except worqr.UsageError as error:
        return str(error)
    return ""


def arguments(task: bytes) -> list[object]:
    return [sys.argv[-1], len(sys.argv), sys.path]


def eat_memory(task: bytes) -> int:
    return len(bytearray(int(task)))


def shrug_off(task: bytes) -> str:
    """Signals that ask a process to end, which a service manager sends to all of them; and what programs and forks do then."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    program = subprocess.Popen(["sleep", "100"])
    program.terminate()
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    fork.start()
    fork.terminate()
    fork.join()
    return f"{program.wait()} {fork.exitcode}"


# Saying and asking


def count(task: bytes) -> None:
    for n in range(20_000):
        worqr.current().progress(n, "counting")
    worqr.current().progress(1, "counted")


def count_and_hold(task: bytes) -> None:
    for n in range(1000):
        worqr.current().progress(n, "counting")
    worqr.current().progress(1, "counted")
    time.sleep(100)


def extend(task: bytes) -> float:
    now = worqr.current()
    now.extend(100)
    assert now.deadline is not None
    return now.deadline - time.monotonic()


def extend_for_ever(task: bytes) -> str:
    worqr.current().extend(100)
    return repr(worqr.current().deadline)


STALE: list[threading.Thread] = []


def speak_later(task: bytes) -> None:
    """Leave a thread behind that speaks for a run that has ended, when the next one runs."""
    now = worqr.current()

    def speak() -> None:
        GO.wait()
        now.progress(message="out of turn")
        now.extend(1000)
        now.cost(1000)

    STALE.append(threading.Thread(target=speak))
    STALE[-1].start()


def babble_on(task: bytes) -> int:
    """Leave a thread behind that goes on to speak for this run when it has ended."""
    now = worqr.current()

    def speak() -> None:
        for n in range(50):
            now.progress(n)
            time.sleep(0.02)

    threading.Thread(target=speak, daemon=True).start()
    count(task)
    return os.getpid()


GO = threading.Event()


def let_speak(task: bytes) -> None:
    GO.set()
    STALE[-1].join()
    worqr.current().progress(message="in turn")


# Around them


@contextmanager
def lifespan() -> Generator[list[str]]:
    log = Path(os.environ["WORQR_TEST_LOG"])
    with log.open("a") as file:
        file.write(f"entered {os.getpid()}\n")
    try:
        yield ["model"]
    finally:
        with log.open("a") as file:
            file.write(f"left {os.getpid()}\n")


@contextmanager
def broken_lifespan() -> Generator[None]:
    raise Down("no model")
    yield


@contextmanager
def around() -> Generator[None]:
    AROUND.append("in")
    try:
        yield
    except ValueError as error:
        AROUND.append(str(error))
        raise
    finally:
        AROUND.append("out")


AROUND: list[str] = []


def seen_around(task: bytes) -> list[str]:
    return AROUND


def state(task: bytes) -> list[str]:
    found = worqr.current().state
    assert isinstance(found, list)
    found.append("run")
    return found


class Service:
    """Handlers are not always functions."""

    def __call__(self, task: bytes) -> bytes:
        return b"called"

    def method(self, task: bytes) -> bytes:
        return b"bound"

    @staticmethod
    def static(task: bytes) -> bytes:
        return b"static"

    @classmethod
    def of_class(cls, task: bytes) -> bytes:
        return cls.__name__.encode()


service = Service()
other_name = nothing
made_elsewhere = json.dumps


async def coroutine(task: bytes) -> None:
    pass


def generator(task: bytes) -> Generator[None]:
    yield


def with_local() -> Any:
    def inner(task: bytes) -> None:
        pass

    return inner


# Saving

CALLS: list[int] = []
"""The calls of steps in this process."""


def add_one(n: int) -> Point:
    CALLS.append(n)
    return Point(n + 1)


def resume(task: bytes) -> dict[str, Any]:
    """Save and take steps in the first run; tell in the second what is there."""
    now = worqr.current()
    before = now.saved
    now.save_now(b"page %d" % now.attempt)
    point = worqr.step_now("add", add_one, now.attempt)
    if now.attempt == 1:
        raise ValueError("once")
    return {
        "before": None if before is None else before.decode(),
        "x": point.x,
        "saved": str(now.saved),
        "calls": CALLS,
    }


def save_too_much(task: bytes) -> str:
    try:
        worqr.current().save_now(b"x" * 262_145)
    except worqr.UsageError as error:
        return str(error)
    raise AssertionError


def save_late(task: bytes) -> str:
    """Leave a thread behind that saves when the run has ended."""
    now = worqr.current()

    def save() -> None:
        GO.wait()
        try:
            now.save_now(b"late")
        except worqr.ClaimLost as error:
            HEARD.append(str(error))

    STALE.append(threading.Thread(target=save))
    STALE[-1].start()
    return ""


HEARD: list[str] = []


def let_save(task: bytes) -> str:
    GO.set()
    STALE[-1].join()
    worqr.current().save_now(b"in time")
    return HEARD[-1]


def lose(task: bytes) -> str:
    """Save when the test has taken the claim away."""
    now = worqr.current()
    now.progress(0.5)
    while not Path(task.decode()).exists():
        time.sleep(0.01)
    try:
        now.save_now(b"a zombie's")
    except worqr.ClaimLost:
        Path(f"{task.decode()}.lost").touch()
        raise
    return ""


def use_tokens(task: bytes) -> None:
    """The task is what it uses of a limit."""
    worqr.current().cost(int(task))
