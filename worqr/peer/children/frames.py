"""The wire between a peer and its worker processes: frames of four bytes of length and a struct in MessagePack. Nobody else reads
it, and both sides are always of one version.

A process is greeted with one `Setup`; then for each `Run` it answers one `Returned` or `Raised`, and before that as many `Said`
and `Extended` as the run makes of them.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from worqr.peer.children.naming import Name
from worqr.policy import Policy
from worqr.records import RemoteError

LENGTH: Final = struct.Struct("!I")


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What holds for all runs. `memory_limit`, `max_result`: bytes. `embedded`: URL of the
    parent's embedded server, if it has one.
    """

    lifespan: Name | None
    around: Name | None
    memory_limit: int | None
    max_result: int
    embedded: str | None


class Run(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One run: the claim's entry as a start answers it, and what its handler's options say. `mark`: what ends the ids that are
    generated there. `left`: seconds to its deadline.
    """

    function: Name
    queue: str
    mark: str
    fence: int
    entry: bytes | list[bytes]
    policy: Policy
    left: float | None


class Said(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run said how far it is."""

    done: float | None
    message: str


class Extended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run wants to go on for so many seconds from now."""

    seconds: float


class Returned(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function returned. `kind`: how `value` is encoded; None: the result is not to be kept, and not here."""

    kind: str | None
    value: bytes


class Raised(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function raised. `names`: of the classes that the error is of; `last`: the process takes no further run."""

    kind: Literal["retry", "failure", "broken", "error"]
    error: RemoteError
    names: list[str]
    delay: float | None = None
    run_at_ms: int | None = None
    counted: bool = True
    last: bool = False


Request = Setup | Run
Answer = Returned | Raised
Reply = Said | Extended | Answer

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def packed(frame: Request | Reply) -> bytearray:
    """`frame` as it is sent."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(frame, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return buffer
