"""Results of runs, encoded for storage.

A worker process encodes its own results, so this module needs no connection.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from worqr.errors import UsageError
from worqr.ops import Result
from worqr.validation import encode_json


class Encoded(NamedTuple):
    """A result that was encoded where the handler ran."""

    kind: str
    value: bytes


def encode_result(value: object, max_result: int) -> Result:
    """Encode a handler's return value for storage: bytes unchanged, None as None, everything else as JSON.

    Raises:
        UsageError: it cannot be encoded, or is over `max_result` bytes.
    """
    if isinstance(value, Encoded):
        return value
    if value is None:
        return "none", b""
    if isinstance(value, bytes | bytearray | memoryview):
        kind, encoded = "bytes", bytes(cast("bytes", value))
    else:
        try:
            kind, encoded = "json", encode_json(value)
        except Exception as error:  # any error from encoding a user's type
            raise UsageError(
                f"its result cannot be kept: {type(value).__qualname__} is neither bytes nor JSON ({error})"
            ) from error
    if len(encoded) > max_result:
        raise UsageError(
            f"its result cannot be kept: {len(encoded):,} bytes are over the limit of {max_result:,} "
            "(Mesh(max_payload=...)); store it elsewhere and return its name"
        )
    return kind, encoded
