"""`CallList`: the payloads of one run of a list handler, and what becomes of each of them. Pure.

A list handler takes a list. It returns None, or a list of the same length: a value for each call that it has finished, and an
exception for each other one. Payloads that cannot be decoded are left out of the list that the handler gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from worqr.errors import UsageError
from worqr.policy import Undecodable
from worqr.validation import check_count, qualname_of, seconds

MOST_CALLS: Final = 1000
"""The most calls that one run of a list handler takes: one request for tasks brings no more."""


class Outcomes(list[object]):
    """What became of each call, in the order of the calls. The results are encoded already."""


class CallList(list[bytes]):
    """The payloads of one run.

    Attributes:
        undecodable: by the place of its payload, the error of each payload that could not be decoded.
    """

    def __init__(self, payloads: Iterable[bytes]) -> None:
        super().__init__(payloads)
        self.undecodable: dict[int, Undecodable] = {}

    def decoded(self, decode: Callable[[bytes], Any]) -> list[Any]:
        """Return the decoded payloads, without those that cannot be decoded, which are kept in `undecodable`."""
        values: list[Any] = []
        for place, payload in enumerate(self):
            try:
                values.append(decode(payload))
            except Undecodable as error:
                self.undecodable[place] = error
        return values

    def outcomes(self, returned: object) -> list[object]:
        """Return what became of each call, in order: its value, or the exception with which it has failed.

        Args:
            returned: what the handler returned for the payloads that could be decoded.
        """
        outcomes = self._judged(returned, len(self) - len(self.undecodable))
        for place in sorted(self.undecodable):
            outcomes.insert(place, self.undecodable[place])
        return outcomes

    @staticmethod
    def _judged(returned: object, calls: int) -> list[object]:
        if returned is None:
            return [None] * calls
        wrong: Exception
        if not issubclass(type(returned), (list, tuple)):
            wrong = TypeError(
                "a list handler must return None or a list with one outcome for each call, not "
                f"{qualname_of(type(returned))}"
            )
            return [wrong] * calls
        try:
            outcomes = list(cast("Sequence[object]", returned))
        except BaseException as error:  # a list of the user's own
            return [error] * calls
        if len(outcomes) == calls:
            return outcomes
        wrong = ValueError(
            f"the list handler got a list of {calls} and returned a list of {len(outcomes)}: return None, or one value or "
            "exception for each call, in the same order"
        )
        return [wrong] * calls

    def failed(self, error: BaseException | None) -> list[BaseException | None]:
        """Return the error of each call of a run that raised `error`; None: the run was stopped."""
        return [self.undecodable.get(place, error) for place in range(len(self))]


def check_batch(where: str, options: Mapping[str, Any]) -> tuple[int | None, float]:
    """Return the options `batch_size` and `batch_wait` of a handler. `batch_size` is None if it takes one task at a time.

    Raises:
        UsageError: one of them is not valid, or `batch_wait` is given alone.
    """
    size, wait = options.get("batch_size"), options.get("batch_wait")
    if size is None:
        if wait is not None:
            raise UsageError(
                f"batch_wait of {where} is for a handler that takes a list: give batch_size too, as in batch_size=100"
            )
        return None, 0.0
    if check_count(size, f"batch_size of {where}") > MOST_CALLS:
        raise UsageError(f"batch_size of {where} must be at most {MOST_CALLS:,}, not {size!r}")
    return cast("int", size), 0.0 if wait is None else seconds(wait, f"batch_wait of {where}")
