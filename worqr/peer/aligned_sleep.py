"""Sleep until times that all periodic checks of a peer share, so that an idle process wakes up rarely."""

from __future__ import annotations

import trio


async def sleep_aligned(period: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of `period` seconds.

    Tasks with the same period, or with a multiple of it, wake up at the same moment. The clock of a Trio loop begins at a random
    time, so different processes wake up at different moments.
    """
    await trio.sleep_until(next_aligned_time(period))


def next_aligned_time(period: float) -> float:
    """Return the time by the loop's clock at which `sleep_aligned` returns."""
    return (trio.current_time() // period + 1) * period
