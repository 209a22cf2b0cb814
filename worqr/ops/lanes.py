"""The lanes of a queue: list them, set how one starts its tasks, cancel one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops.operators import CANCEL_PAGE, CancelReply
from worqr.ops.replies import MAX_ITEMS, Reply, expect_ok, new_call, status_word, text, wholes
from worqr.stored_values import exact, whole

FIRST_CANCEL_STEP: Final = "suspended 0"


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane, as list_lanes returns it.

    Attributes:
        limits: text of `worqr.limits`.
        opens_in_ms: ms until time lets it start a task, None if that is not known.
        held: none of its tasks may start now.
    """

    name: str
    waiting: int
    running: int
    weight: int
    limits: str
    paused: str | None
    opens_in_ms: int | None
    held: bool


def list_lanes(keys: QueueKeys, after: str = "", limit: int = MAX_ITEMS) -> Command[tuple[list[LaneRow], bool]]:
    """Return one page of the lanes that come after the name `after`, and whether there are more.

    The first page also has lanes without tasks that run some, are paused, or have rules of an operator.
    """

    def read(reply: Reply) -> tuple[list[LaneRow], bool]:
        more = status_word(reply) == "more"
        rows: list[LaneRow] = []
        for name, waiting, running, weight, limits, paused, opens_in, held in reply[1:]:
            opens = whole(opens_in)
            why = None if paused is None else text(paused)
            counted = whole(waiting, 0), whole(running, 0), whole(weight, 1)
            rows.append(LaneRow(exact(name), *counted, text(limits), why, opens, bool(held)))
        return rows, more

    return new_call("list_lanes", keys.base, (after, limit), read)


def set_lane(
    keys: QueueKeys,
    lane: str,
    setting: Literal["weight", "limit", "pause", "resume"],
    value: str = "",
    duration_ms: int | None = None,
) -> Command[str]:
    """Set the weight or the limit (``*``: what workers declare) of a lane, or pause it with a reason, or resume it."""
    args = (lane, setting, value, "-" if duration_ms is None else duration_ms)
    return new_call("set_lane", keys.base, args, expect_ok, numbered=True)


def cancel_lane(
    keys: QueueKeys, lane: str, after: str = FIRST_CANCEL_STEP, *, reason: str = "", budget: int = CANCEL_PAGE
) -> Command[CancelReply]:
    """Cancel tasks of a lane; call again with `after` while there is more."""

    def read(reply: Reply) -> CancelReply:
        more = status_word(reply) == "more"
        return CancelReply(more, int(reply[1]), wholes(reply[4:]), "-", exact(reply[3]))

    return new_call("cancel_lane", keys.base, (lane, after, budget, reason), read, numbered=True)
