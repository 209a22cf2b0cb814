"""One wake-up for all periodic checks of a peer, so that an idle process wakes rarely."""

from __future__ import annotations

import trio


async def sleep_aligned(period: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of `period` seconds.

    Loops of the same period, or of a multiple of it, wake at the same moment. The clock of a Trio loop begins at a random
    time, so that the peers of a mesh do not all look at once.
    """
    await trio.sleep_until(next_aligned_time(period))


def next_aligned_time(period: float) -> float:
    """The time by the loop's clock at which `sleep_aligned` returns."""
    return (trio.current_time() // period + 1) * period
