"""Results of runs, encoded for storage, and errors, described for it: where the handler ran, not on the peer's loop.

A worker process encodes its own results, so this module needs no connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from worqr.call_list import Outcomes
from worqr.errors import UsageError
from worqr.ops import Result
from worqr.policy import decide_retry
from worqr.tracebacks import is_a, text_of
from worqr.validation import encode_json, qualname_of

if TYPE_CHECKING:
    from worqr.peer.list_run import ListRun
    from worqr.peer.run import Run


class Encoded(NamedTuple):
    """A result that was encoded where the handler ran."""

    kind: str
    value: bytes


class NotEncoded(NamedTuple):
    """A result that could not be encoded where the handler ran."""

    why: str


def encode_result(value: object, max_result: int) -> Result:
    """Encode a handler's return value for storage: bytes unchanged, None as None, everything else as JSON.

    Raises:
        UsageError: it cannot be encoded, or is over `max_result` bytes.
    """
    if type(value) is Encoded:
        return value
    if type(value) is NotEncoded:
        raise UsageError(value.why)
    if value is None:
        return "none", b""
    try:
        if issubclass(type(value), (bytes, bytearray, memoryview)):
            kind, encoded = "bytes", bytes(cast("bytes", value))
        else:
            kind, encoded = "json", encode_json(value)
    except BaseException as error:  # any error from encoding a user's type
        raise UsageError(
            f"its result cannot be kept: {qualname_of(type(value))} is neither bytes nor JSON ({text_of(error, 1000)})"
        ) from error
    if len(encoded) > max_result:
        raise UsageError(
            f"its result cannot be kept: {len(encoded):,} bytes are over the limit of {max_result:,} "
            "(Mesh(max_payload=...)); store it elsewhere and return its name"
        )
    return kind, encoded


def encoded_outcome(run: Run[Any] | None, value: object, max_result: int) -> object:
    """Return what a handler returned, encoded as far as it will be stored, and describe the errors among it.

    Called in the thread or on the loop in which the handler ran.
    """
    if run is None:
        return value
    if not run.is_list:
        return _encoded(run, value, max_result)
    calls = cast("ListRun", run)
    outcomes = Outcomes(calls.outcomes(True, value, None))
    for place, (item, outcome) in enumerate(zip(calls.claimed, outcomes, strict=True)):
        if is_a(outcome, BaseException):
            describe_end(item, outcome)
        else:
            outcomes[place] = _encoded(item, outcome, max_result)
    return outcomes


def _encoded(run: Run[Any], value: object, max_result: int) -> object:
    if not run.keeps_result():
        return None
    try:
        return Encoded(*encode_result(value, max_result))
    except UsageError as error:
        return NotEncoded(str(error))


def describe_end(run: Run[Any] | None, error: BaseException) -> None:
    """Describe the error of a run for its end. Called in the thread or on the loop in which the handler ran."""
    if run is not None and run.cancel_reason is None:
        run.describe(decide_retry(error, run.policy, run.failures, run.stalls).error)
