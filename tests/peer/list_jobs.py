"""Functions that take a list and run in worker processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import worqr

mesh = worqr.Mesh()
QUICK = worqr.RetryPolicy(min_backoff=0)
PATIENT = worqr.RetryPolicy(min_backoff=0, max_timeouts=100)
"""For a machine on which a process does not start within the timeout."""
ONCE = worqr.RetryPolicy(max_failures=1)
PARENT = "TEST_LIST_JOBS_PARENT"


@dataclass
class Page:
    url: str


def outcomes(pages: list[Page]) -> list[str | Exception]:
    run = worqr.current()
    assert len(run.items) == len(pages)
    return [
        worqr.Failure("bad") if page.url == "/bad" else f"{page.url} of {len(pages)} as {item.id}"
        for page, item in zip(pages, run.items, strict=True)
    ]


@mesh.task(name="index", batch_size=10, runs_in="process", result_ttl=60, retry=ONCE)
def index(pages: list[Page]) -> list[str | Exception]:
    assert os.getpid() != int(os.environ[PARENT])
    return outcomes(pages)


@mesh.task(name="sizes", batch_size=10, runs_in="process", result_ttl=60)
def sizes(numbers: list[int]) -> list[str | Exception]:
    """Return for each number how long its list was, and in which process; fail the odd ones."""
    items = worqr.current().items
    assert len(items) == len(numbers)
    for item, number in zip(items, numbers, strict=True):
        item.progress(number / 10, "at it")
    return [
        worqr.Failure("odd") if number % 2 else f"{len(numbers)} {item.attempt} {os.getpid()}"
        for item, number in zip(items, numbers, strict=True)
    ]


@mesh.task(name="fail_lists", batch_size=10, runs_in="process", retry=QUICK)
def fail_lists(numbers: list[int]) -> None:
    """Raise, unless the call is alone."""
    if len(numbers) > 1:
        raise ValueError("too many")


@mesh.task(name="die_once", batch_size=10, runs_in="process", retry=QUICK)
def die_once(numbers: list[int]) -> None:
    """Kill the process in the first run of a call."""
    assert len(numbers) == (3 if worqr.current().items[0].attempt == 1 else 1)
    if worqr.current().items[0].attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@mesh.task(name="hold_once", batch_size=10, runs_in="process", retry=PATIENT, timeout=4)
def hold_once(numbers: list[int]) -> None:
    """Run until killed in the first run of a call."""
    assert len(numbers) == (3 if worqr.current().items[0].attempt == 1 else 1)
    if worqr.current().items[0].attempt == 1:
        time.sleep(3600)


def keep_saved(numbers: list[int]) -> list[str | Exception]:
    """Save each number in the first run of its call, and return it in the second."""
    found: list[str | Exception] = []
    for item, number in zip(worqr.current().items, numbers, strict=True):
        if item.saved is None:
            item.save_now(b"%d" % number)
            found.append(worqr.Retry(delay=0, counted=False))
        else:
            found.append(item.saved.decode())
    return found


@mesh.task(name="keep", batch_size=10, result_ttl=60, runs_in="process")
def keep(numbers: list[int]) -> list[str | Exception]:
    """Do it in a process."""
    return keep_saved(numbers)
