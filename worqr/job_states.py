"""The states of a job as data, and the transactions that move it from one state to another. Pure.

The scripts implement this table. ``tests/ops/test_job_machine.py`` runs all of them at random and compares
each step with this table, which is also shown in ``docs/reference/job-states.md``. A task without a record
is only ever waiting or active.

Not in the table: a transaction that does not move a job (an update of a waiting job, a cancel that only marks a run), and the
expiry of a finished or cancelled job after its ``result_ttl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from worqr.stored_values import public_name

State = Literal[
    "new", "waiting", "due", "suspended", "blocked", "active", "finished", "failed", "undecodable", "cancelled", "gone"
]
"""The state of a job.

``new``: not stored yet. ``waiting``: a reference to it is in a list. ``due``: its time is in the future. ``suspended``: its run
waits for an event, a time or other jobs. ``blocked``: it waits because the same id runs. ``active``: a worker has it under a
claim. ``failed`` and ``undecodable``: in the dead-letter queue.
``gone``: the server has no data about it.
"""

LIVE: Final[tuple[State, ...]] = ("waiting", "due", "suspended", "blocked", "active")
"""The values of a record's field ``state``."""
ENDS: Final[tuple[State, ...]] = ("finished", "failed", "undecodable", "cancelled", "gone")

Actor = Literal["producer", "worker", "leader", "operator"]


class Transaction(msgspec.Struct, frozen=True):
    """The actor of a transaction, and its moves: from each state to one of several."""

    by: Actor
    moves: Mapping[State, tuple[State, ...]]


_UNBLOCKED: Final[Mapping[State, tuple[State, ...]]] = {"blocked": ("waiting", "due")}
"""The run of its id ended, and the job follows; or the run returned, and the two jobs were merged."""
_ABOVE_THE_CAP: Final[Mapping[State, tuple[State, ...]]] = {"failed": ("gone",)}
_GIVEN_BACK: Final = Transaction("worker", {"active": ("waiting", "due", "cancelled"), **_UNBLOCKED})
_PURGED: Final = Transaction("operator", dict.fromkeys(("waiting", "due", "suspended", "blocked"), ("cancelled",)))
_DISPATCHED: Final[Mapping[State, tuple[State, ...]]] = {
    "new": ("waiting", "due", "blocked"),
    "waiting": ("due", "cancelled"),
    "due": ("waiting", "cancelled"),
    "suspended": ("cancelled",),
}

TRANSACTIONS: Final[Mapping[str, Transaction]] = {
    "enqueue": Transaction("producer", {"new": ("waiting",)}),
    "dispatch_jobs": Transaction("producer", _DISPATCHED),
    "fire_schedules": Transaction("leader", _DISPATCHED),
    "promote_due": Transaction("leader", {"due": ("waiting",), "suspended": ("waiting",)}),
    "start_tasks": Transaction(
        "worker", {"waiting": ("active", "failed"), "due": ("waiting",), "suspended": ("waiting",), **_ABOVE_THE_CAP}
    ),
    "suspend_task": Transaction("worker", {"active": ("suspended", "cancelled"), **_UNBLOCKED}),
    "send_event": Transaction("producer", {"suspended": ("waiting",)}),
    "end_wait": Transaction("operator", {"suspended": ("waiting",)}),
    "rewind_job": Transaction("operator", dict.fromkeys(("due", "suspended", "failed", "undecodable"), ("waiting",))),
    "finish_tasks": Transaction("worker", {"active": ("finished", "cancelled"), **_UNBLOCKED}),
    "stop_tasks": _GIVEN_BACK,
    "stop_work": _GIVEN_BACK,
    "file_tasks": _GIVEN_BACK,
    "retry_task": Transaction(
        "worker", {"active": ("waiting", "due", "failed", "cancelled"), **_UNBLOCKED, **_ABOVE_THE_CAP}
    ),
    "fail_task": Transaction(
        "worker", {"active": ("failed", "undecodable", "cancelled"), **_UNBLOCKED, **_ABOVE_THE_CAP}
    ),
    "fail_worker": Transaction(
        "leader", {"active": ("waiting", "due", "failed", "cancelled"), **_UNBLOCKED, **_ABOVE_THE_CAP}
    ),
    "cancel_job": Transaction("operator", _PURGED.moves),
    "cancel_lane": _PURGED,
    "cancel_all": _PURGED,
    "delete_queue": _PURGED,
    "cancel_task": Transaction("operator", {"waiting": ("cancelled",), "due": ("cancelled",)}),
    "promote_jobs": Transaction("operator", {"due": ("waiting",)}),
    "retry_aside": Transaction("operator", {"failed": ("waiting",), "undecodable": ("waiting",)}),
    "drop_aside": Transaction("operator", {"failed": ("gone",), "undecodable": ("gone",)}),
}
"""By the name of the script. A script that is missing here moves no job."""


def moves() -> Iterator[tuple[str, State, State]]:
    """Yield each move that may happen: the transaction, the state before, and the state after."""
    for name, transaction in TRANSACTIONS.items():
        for before, targets in transaction.moves.items():
            for after in targets:
                yield name, before, after


def as_table() -> str:
    """Return the table in Markdown, with one row for all transactions of an actor with the same moves."""
    same: dict[tuple[Actor, str], list[str]] = {}
    for name, transaction in TRANSACTIONS.items():
        from_states: dict[tuple[State, ...], list[str]] = {}
        for before, targets in transaction.moves.items():
            from_states.setdefault(targets, []).append(public_name(before))
        moves = (
            f"{', '.join(froms)} → {', '.join(map(public_name, targets))}" for targets, froms in from_states.items()
        )
        same.setdefault((transaction.by, "; ".join(moves)), []).append(f"`{name}`")
    rows = ["| transaction | taken by | from → to |", "|---|---|---|"]
    rows += [f"| {', '.join(names)} | {by} | {moves} |" for (by, moves), names in same.items()]
    return "\n".join(rows) + "\n"
