"""Workflows that the tests let worker processes run."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import worqr

registry = worqr.Registry()
dying = worqr.Registry()
keeping = worqr.Registry()
sealed = worqr.Registry()
unawaited = worqr.Registry()


@dataclass
class Approval:
    """What a person sends."""

    by: str


def waits_for_nothing(call: str) -> None:
    """A plain function that forgets ``_now``."""
    arguments: Any = {
        "sleep": (60,),
        "sleep_until": (datetime.now(UTC),),
        "wait_for": ("approved", bool),
        "step": ("one", print),
    }
    getattr(worqr, call)(*arguments[call])


once: Any = {"result_ttl": 60, "keep_failed": 0, "retry": worqr.RetryPolicy(max_failures=1)}


@unawaited.workflow(name="in a process", runs_in="process", **once)
def waits_for_nothing_in_a_process(call: str) -> None:
    waits_for_nothing(call)


@unawaited.workflow(name="in a thread", **once)
def waits_for_nothing_in_a_thread(call: str) -> None:
    waits_for_nothing(call)


@registry.step(name="note")
def note(path: str, order: int) -> str:
    with open(path, "a") as file:
        file.write(f"{order}\n")
    return f"paid {order}"


@registry.workflow(name="in a process", runs_in="process", result_ttl=60)
def in_a_process(path: str, order: int) -> tuple[str, Approval | None, int]:
    paid = note(path, order)
    worqr.state(Approval("nobody yet"))
    worqr.current().progress(0.5, "paid")
    approval = worqr.wait_for_now("approved", Approval)
    return paid, approval, worqr.current().run


@sealed.workflow(name="in a process with a codec", runs_in="process", result_ttl=60)
def with_a_codec(path: str, order: int) -> tuple[str, Approval | None, int]:
    paid = note(path, order)
    return paid, worqr.wait_for_now("approved", Approval), worqr.current().run


@keeping.step(name="try", retry=worqr.RetryPolicy(max_failures=3, min_backoff=0))
def try_again(path: str) -> int:
    with open(path, "a") as file:
        file.write("tried\n")
    if Path(path).read_text().count("tried") < 2:
        raise ValueError("no")
    return 2


@keeping.workflow(name="goes on in a process", runs_in="process", result_ttl=60)
def goes_on_in_a_process(path: str, order: int) -> tuple[str, bytes | None, int]:
    """What it waits for is there, so its second run has the claim of the first one."""
    paid = note(path, order)
    try_again(path)
    worqr.current().save_now(b"half")
    approval = worqr.wait_for_now("approved", Approval)
    assert approval is not None
    return f"{paid} {approval.by}", worqr.current().saved, worqr.current().run


@keeping.workflow(
    name="gets further in a process",
    runs_in="process",
    result_ttl=60,
    retry=worqr.RetryPolicy(max_failures=2, min_backoff=0),
)
def gets_further_in_a_process(path: str) -> bool:
    """The first run fails. The second one finds what it waits for, so the third one has its claim."""
    with open(path, "a") as file:
        file.write("run\n")
    if Path(path).read_text().count("run") == 1:
        raise ValueError("no")
    worqr.wait_for_now("approved", Approval)
    return worqr.current().last_attempt


@registry.workflow(name="swallows in a process", runs_in="process", result_ttl=60, keep_failed=0)
def swallows_in_a_process() -> str:
    try:
        worqr.sleep_now(60)
    except BaseException:
        return "done"
    return "woken"


@dying.workflow(
    name="dies after each step", runs_in="process", result_ttl=60, retry=worqr.RetryPolicy(min_backoff=0, max_stalls=2)
)
def dies_after_each_step(path: str) -> int:
    """Each run takes one step more, and dies."""
    for n in range(5):
        before = Path(path).read_text()
        note(path, n)
        if Path(path).read_text() != before:
            os.kill(os.getpid(), signal.SIGKILL)
    return worqr.current().run


@dying.workflow(
    name="dies in a step",
    runs_in="process",
    result_ttl=60,
    keep_failed=0,
    retry=worqr.RetryPolicy(min_backoff=0, max_stalls=2),
)
def dies_in_a_step(path: str) -> None:
    """Each run dies at the same place."""
    note(path, 1)
    die()


@dying.step(name="die")
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
