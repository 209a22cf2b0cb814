"""Workflows that the tests let worker processes run."""

from __future__ import annotations

from dataclasses import dataclass

import worqr

registry = worqr.Registry()


@dataclass
class Approval:
    """What a person sends."""

    by: str


@registry.step(name="note")
def note(path: str, order: int) -> str:
    with open(path, "a") as file:
        file.write(f"{order}\n")
    return f"paid {order}"


@registry.workflow(name="in a process", runs_in="process", result_ttl=60)
def in_a_process(path: str, order: int) -> tuple[str, Approval | None, int]:
    paid = note(path, order)
    approval = worqr.wait_for_now("approved", Approval)
    return paid, approval, worqr.current().run


@registry.workflow(name="swallows in a process", runs_in="process", result_ttl=60, keep_failed=0)
def swallows_in_a_process() -> str:
    try:
        worqr.sleep_now(60)
    except BaseException:
        return "done"
    return "woken"
