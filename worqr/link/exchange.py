"""One batch on one connection: pack, send, read every reply, give each request its outcome.

Here: what a reply means for its own request. Not here: the thread, and what is to be done with the requests that come
back unanswered (`uplink`).

A reply that is an error never harms its neighbours: the rest of the batch is read to the end. Only when the connection
itself breaks do the remaining requests stay unanswered.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from worqr.errors import QueueFull, RefusedByServer, UsageError, WorqrBug, WorqrError
from worqr.link.backlog import Backlog
from worqr.link.clocks import boottime
from worqr.link.connection import Wire, loading, pack
from worqr.link.dialect import as_sent
from worqr.link.faults import Kind, Lost, Refused
from worqr.link.replication import Replication
from worqr.link.request import Numbers, Request
from worqr.lua import Script

_PER_SEND = 64  # the server works on the first ones while we pack the next


@dataclass(slots=True)
class Exchange:
    """What became of a batch: every request of it is in one of the lists."""

    done: list[Request] = field(default_factory=list[Request])
    answered: list[Request] = field(default_factory=list[Request])  # and not done before replicas have it
    noscript: list[Request] = field(default_factory=list[Request])
    held: list[Request] = field(default_factory=list[Request])
    dropped: list[Request] = field(default_factory=list[Request])
    moved: list[tuple[Request, str]] = field(default_factory=list[tuple[Request, str]])  # with "SLOT HOST:PORT"
    moving: list[Request] = field(default_factory=list[Request])
    unanswered: list[Request] = field(default_factory=list[Request])
    unloadable: dict[str, Refused] = field(default_factory=dict[str, Refused])  # by the SHA of the script
    replicas: int = 0  # the most that one of the batch wants
    asked: bool = False  # who has it: one more reply is to be read
    cause: str = ""  # of `held`, `dropped`, `moved` and `moving`
    lost: Lost | None = None


def exchange(
    wire: Wire,
    backlog: Backlog,
    producer: str,
    batch: list[Request],
    scripts: Collection[Script] = (),
    *,
    clustered: bool = False,
) -> Exchange:
    """Load `scripts`, send the batch and read its replies. Never raises for what the server or the network does."""
    result = Exchange()
    try:
        pieces = loading(scripts)  # in one piece with the first requests, so that nobody's SCRIPT FLUSH comes between
        for start in range(0, len(batch), _PER_SEND):
            if start:
                wire.send(pieces)
                pieces = []
            pieces += _packed(batch[start : start + _PER_SEND], backlog.numbers, producer, result, clustered=clustered)
        if result.replicas or backlog.replication.waiting:
            pieces += _question(backlog.replication, result)
        wire.send(pieces)
        if scripts:
            result.unloadable = wire.loaded(scripts)
    except Lost as lost:
        result.lost, result.unanswered = lost, batch
    else:
        _read_replies(wire, batch, result, clustered=clustered)
    if result.moved:
        _keep_order(result)
    return result


def _keep_order(result: Exchange) -> None:
    """What another node has now must not overtake a request of the same base that goes to this one again."""
    stays = {request.call.base for request in (*result.noscript, *result.held, *result.dropped, *result.moving)}
    result.moving += [request for request, _ in result.moved if request.call.base in stays]
    result.moved = [each for each in result.moved if each[0].call.base not in stays]


def _read_replies(wire: Wire, batch: list[Request], result: Exchange, *, clustered: bool) -> None:
    """One for each request that was written, in their order."""
    done = result.done
    at = 0
    try:
        for at, request in enumerate(batch):  # noqa: B007 - `at` is where it ended
            if not request.written:
                done.append(request)  # it could not be packed
                continue
            try:
                reply = wire.read()
            except Refused as refused:
                _refused(result, request, refused, clustered=clustered)
            else:
                if not request.settled:
                    _answer(request, reply)
                    if request.call.replicas and request.error is None:
                        result.answered.append(request)
                        continue
                done.append(request)
    except Lost as lost:
        result.lost, result.unanswered = lost, batch[at:]


def _question(replication: Replication, result: Exchange) -> list[bytes]:
    """The bytes that ask which replicas have all of this, unless it is too early to ask again."""
    question = replication.question(result.replicas, time.monotonic())
    result.asked = question is not None
    return [] if question is None else [pack(question)]


def _packed(
    requests: list[Request], numbers: Numbers, producer: str, result: Exchange, *, clustered: bool
) -> list[bytes]:
    """The bytes of some requests. Numbers are given here. One that cannot be packed gets its error, and no bytes."""
    pieces: list[bytes] = []
    now = boottime()
    for request in requests:
        call = request.call
        script, keys = (call.script, call.keys) if not clustered else as_sent(call, clustered=True)
        try:
            if call.numbered:
                base = call.base
                number = request.number or numbers.give(base)
                request.number = number
                name = f"{base}:producer:{producer}"
                lowest = numbers.lowest(base)
                command = (b"EVALSHA", script.sha, len(keys) + 1, name, *keys, number, lowest, *call.args)
            else:
                command = (b"EVALSHA", script.sha, len(keys), *keys, *call.args)
            pieces.append(pack(command))
        except Exception as exc:
            request.error = UsageError(f"an argument of {call.script.name} cannot be sent ({type(exc).__name__})")
        else:
            if not request.written:
                request.written, request.written_at = True, now
            if call.replicas > result.replicas:
                result.replicas = call.replicas
    return pieces


def _answer(request: Request, reply: object) -> None:
    call = request.call
    try:
        request.value = call.read(reply)  # type: ignore[arg-type]
    except WorqrError as exc:
        request.error = exc
    except Exception as exc:
        bug = WorqrBug(f"the reply to {call.script.name} could not be read ({type(exc).__name__}); please report this")
        bug.__cause__ = exc
        request.error = bug


def _refused(result: Exchange, request: Request, refused: Refused, *, clustered: bool) -> None:
    if request.settled:  # it has waited too long, and was told so
        result.done.append(request)
    elif not _goes_again(result, request, refused, clustered=clustered):
        request.error = _why(result, request, refused, clustered=clustered)
        request.error.__cause__ = refused
        result.done.append(request)


def _goes_again(result: Exchange, request: Request, refused: Refused, *, clustered: bool) -> bool:
    """Put the request among those of its kind, if another try can help it."""
    match refused.kind:
        case Kind.NOSCRIPT if _script(request, clustered=clustered).sha not in result.unloadable:
            result.noscript.append(request)
            return True
        case Kind.MOVED if clustered:
            result.moved.append((request, refused.text))
        case Kind.MOVING if clustered:
            result.moving.append(request)
        case Kind.DROP:
            result.dropped.append(request)
        case Kind.HOLD:
            result.held.append(request)
        case Kind.FULL if request.losses:
            # The server refuses before it looks whether an earlier copy, whose reply was lost, has been executed.
            result.held.append(request)
        case _:
            return False
    result.cause = str(refused)
    return True


def _why(result: Exchange, request: Request, refused: Refused, *, clustered: bool) -> WorqrError:
    """The error of a request that no other try can help."""
    script = _script(request, clustered=clustered)
    match refused.kind:
        case Kind.MOVED | Kind.MOVING:
            text = f"the server refused {script.name}: {refused}; it is a node of a cluster: write redis+cluster://"
            return RefusedByServer(text)
        case Kind.NOSCRIPT:
            why = result.unloadable[script.sha]
            return RefusedByServer(f"the server refused to load the script {script.name}: {why}")
        case Kind.FULL:
            return QueueFull(
                "the server is out of memory (maxmemory), nothing was stored; let queues drain, or add memory"
            )
        case _:
            return RefusedByServer(f"the server refused {script.name}: {refused}")


def _script(request: Request, *, clustered: bool) -> Script:
    """What was asked for."""
    script = request.call.script
    return script.sharded if clustered else script
