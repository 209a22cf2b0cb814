"""`ReadyWaiters`: the callers that wait until a connection is open."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from worqr.errors import WorqrError
from worqr.link.driver import Driver, Waiter, settle_all, wake_all


class ReadyWaiters:
    """Callers of ``wait_ready``, each with its deadline."""

    __slots__ = ("_driver", "_waiters")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._waiters: list[tuple[Waiter, float]] = []

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, waiter: Waiter, deadline: float) -> None:
        """Add a caller that waits until the deadline (monotonic)."""
        self._waiters.append((waiter, deadline))

    def take(self) -> list[tuple[Waiter, float]]:
        """Remove and return all callers."""
        waiters, self._waiters = self._waiters, []
        return waiters

    def take_late(self, now: float) -> list[Waiter]:
        """Remove and return the callers whose deadline has passed."""
        late = [waiter for waiter, deadline in self._waiters if deadline <= now]
        if late:
            self._waiters = [each for each in self._waiters if each[1] > now]
        return late

    def tell(self, error: WorqrError | None) -> None:
        """Settle all callers; without an error, a connection is open."""
        settle_soon(self._driver, [waiter for waiter, _ in self.take()], error)


def settle_soon(driver: Driver, waiters: Iterable[Waiter], error: WorqrError | None = None) -> None:
    """Settle waiters, and wake them in a later turn of the loop."""
    settled = list(waiters)
    settle_all(settled, error)
    if settled:
        driver.post(partial(wake_all, settled))
