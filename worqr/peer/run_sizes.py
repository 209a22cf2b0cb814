"""Whether the runs of a queue fit into the concurrency of a peer."""

from __future__ import annotations

from typing import Final, Literal

from worqr.errors import UsageError

AUTO_MAX: Final = 1000
"""The largest concurrency that "auto" chooses."""


def check_run_fits(queue: str, size: int, concurrency: int | Literal["auto"]) -> None:
    """Raise UsageError if a run of `size` units of `queue` would never fit."""
    if concurrency == "auto":
        if size > AUTO_MAX:
            raise UsageError(
                f"queue {queue!r}: a run of size {size} would never find room: concurrency='auto' is at most {AUTO_MAX} units"
            )
    elif size > concurrency:
        raise UsageError(
            f"queue {queue!r}: a run of size {size} would never find room: the concurrency of this peer is {concurrency} units"
        )
