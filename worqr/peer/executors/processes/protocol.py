"""The messages between a peer and its worker processes: frames of four bytes of length and a struct in MessagePack.

The protocol is internal, because both sides always have the same version. A process first receives one `Setup`. It replies to
each `RunRequest` with one `Returned`, `Raised` or `Suspending`. Before that reply, it sends a `Progressed` or `Extended` for each
report or extension of the run. It sends a `Saving` when the run saves, a `Starting` when it starts jobs, and waits for the
`SaveReply`. If a list handler returns, it first sends a `CallEnded` for each of its calls. If a list handler raises, it sends one
for each call whose payload cannot be decoded.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from worqr.embedded import Relocation
from worqr.ops import Child, NotedChildren, Wait
from worqr.peer.executors.processes.importable import Name
from worqr.policy import Policy
from worqr.records import RemoteError

LENGTH: Final = struct.Struct("!I")


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What holds for all runs. `memory_limit`, `max_result`: bytes. `embedded`: URL of the
    parent's embedded server, if it has one. `relocation`: where a test has moved the mesh to. `continuing`: the context
    manager that continues the trace of each run; None: the mesh is not traced.
    """

    lifespan: Name | None
    around: Name | None
    memory_limit: int | None
    max_result: int
    embedded: str | None
    relocation: Relocation | None
    continuing: Name | None


class RunRequest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One run: the claim's entry from the start's reply, and the options of its handler. `base`: of the keys of its queue.
    `id_suffix`: the suffix of the ids that are generated there. `left`: seconds to its deadline. `carrier`: the context of its
    trace. `calls`: claims and entries of the calls of a list handler; None: it is no list handler.
    """

    function: Name
    queue: str
    base: str
    id_suffix: str
    fence: int
    entry: bytes | list[bytes]
    policy: Policy
    left: float | None
    carrier: dict[str, str]
    calls: list[tuple[int, bytes | list[bytes]]] | None


class Progressed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run reported the progress of one of its claims."""

    fence: int
    done: float | None
    message: str


class Extended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run requests a deadline `seconds` from now."""

    seconds: float


class Saving(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run saves bytes, or the result of a `step`, for the job of one of its claims, and waits for a `SaveReply`."""

    fence: int
    number: int
    step: str
    value: bytes
    progress: bool
    refused: bool


class Starting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run of a workflow starts jobs, and waits for a `SaveReply`."""

    fence: int
    children: tuple[Child, ...]


class SaveReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The reply to a `Saving` or a `Starting`. `error`: the name of a class of worqr; empty: it was saved, or noted."""

    error: str
    message: str
    noted: NotedChildren | None = None


class Returned(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function returned. `kind`: the encoding of `value`; None: the result is not stored, and `value` is empty."""

    kind: str | None
    value: bytes


class Raised(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function raised. `names`: those of the error's classes, for each error of a group. `last`: the process takes no further
    run.
    """

    kind: Literal["retry", "snooze", "failure", "undecodable", "error"]
    error: RemoteError
    names: list[list[str]]
    delay: float | None = None
    run_at_ms: int | None = None
    counted: bool = True
    last: bool = False
    retry_after: float | None = None


class Suspending(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The function is a workflow, which waits. `progress`: as in `Run.suspend`."""

    waits: tuple[Wait, ...]
    progress: bool


class CallEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of one call of a list handler."""

    fence: int
    answer: Returned | Raised


Request = Setup | RunRequest | SaveReply
Answer = Returned | Raised | Suspending
Report = Progressed | Extended | Saving | Starting | CallEnded
Reply = Report | Answer

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def packed(frame: Request | Reply) -> bytearray:
    """Return `frame` as bytes."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(frame, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return buffer
