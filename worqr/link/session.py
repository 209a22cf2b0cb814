"""`Session`: the requests on one connection, from packing to outcome. No I/O: bytes in, bytes and outcomes out.

A session ends with its connection. It sends one batch at a time; requests that are submitted meanwhile form the next one. An
error reply concerns one request: the rest of the batch is read to the end.

Not here: the order of requests (`request_queue`), the recovery of unanswered requests (`pipeline`), sockets.

Phases, and the kind of the next reply:

=========  =======================================  ======================================================
phase      the next reply is                        then
=========  =======================================  ======================================================
IDLE       invalid: the connection is lost          `begin` (-> LOADING, REPLYING), `begin_count` (-> COUNTING)
LOADING    that of the oldest SCRIPT LOAD           -> REPLYING, when the last script is loaded
REPLYING   that of the oldest request of the batch  -> COUNTING, if replicas are counted; else -> IDLE
COUNTING   that of WAIT                             -> IDLE
LOST       none                                     -
=========  =======================================  ======================================================
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

from worqr.errors import QueueFull, RefusedByServer, UsageError, WorqrError
from worqr.link.clocks import boottime
from worqr.link.connection import loading, pack
from worqr.link.request import Request, SequenceNumbers, mark_written
from worqr.link.request_queue import RequestQueue
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply, is_no_longer_primary
from worqr.link.wire_form import NOT_YET, NotRedis, ReplyReader, as_sent, new_reader
from worqr.lua import Script
from worqr.script_call import Call

LOAD_REMEDY: Final = (
    "this user may not load scripts: start a worker or producer of the same version of worqr once, which loads them, or grant "
    "the user +script|load"
)
PER_SEND: Final = 64
"""Requests to pack before the first bytes are sent: the server works on them while the next ones are packed."""


class Phase(enum.Enum):
    """The kind of the next reply on the connection."""

    IDLE = "nothing is under way"
    LOADING = "scripts are being loaded"
    REPLYING = "requests are being answered"
    COUNTING = "replicas are being counted"
    LOST = "the connection is lost"


@dataclass(slots=True)
class BatchResult:
    """The requests of a batch that do not have their outcome yet.

    Attributes:
        answered: they took effect, and wait for replicas.
        noscript: the server does not have their scripts.
        held, dropped: the server cannot work, on this connection or at all.
        moved: with the redirect of the node, ``SLOT HOST:PORT``.
        moving: their slot is being moved at this moment.
        unanswered: the connection was lost before the reply.
        lost: the reason of the loss.
        cause: the error reply to some that are held, dropped, moved or moving.
        settled: at least one request of the batch has its outcome.
    """

    answered: list[Request] = field(default_factory=list[Request])
    noscript: list[Request] = field(default_factory=list[Request])
    held: list[Request] = field(default_factory=list[Request])
    dropped: list[Request] = field(default_factory=list[Request])
    moved: list[tuple[Request, str]] = field(default_factory=list[tuple[Request, str]])
    moving: list[Request] = field(default_factory=list[Request])
    unanswered: list[Request] = field(default_factory=list[Request])
    lost: ConnectionLost | None = None
    cause: str = ""
    settled: bool = False

    @property
    def is_complete(self) -> bool:
        """Every request has its outcome, or waits for replicas only."""
        return not (
            self.noscript or self.held or self.dropped or self.moved or self.moving or self.unanswered or self.lost
        )


class Session:
    """The requests on one connection.

    Attributes:
        phase: the kind of the next reply.
        settled: requests that have their outcome, until `take_settled`.
        result: the present batch, or the last one.
    """

    __slots__ = (
        "_clustered",
        "_expected",
        "_loads",
        "_producer",
        "_reader",
        "_replicas",
        "_request_queue",
        "_since",
        "_unloadable",
        "phase",
        "result",
        "settled",
    )

    def __init__(self, request_queue: RequestQueue, producer: str, *, clustered: bool = False) -> None:
        self.phase: Phase = Phase.IDLE
        self.settled: list[Request] = []
        self.result: BatchResult = BatchResult()
        self._request_queue = request_queue
        self._producer = producer
        self._clustered = clustered
        self._reader: ReplyReader = new_reader()
        self._expected: deque[Request] = deque()
        self._loads: deque[Script] = deque()
        self._unloadable: dict[str, ErrorReply] = {}  # by SHA: why the server refuses to load a script
        self._replicas = (
            0  # the highest number that a request of the batch requires; -1: WAIT was sent behind the batch
        )
        self._since = 0.0  # when WAIT was sent

    # Sending

    def begin(self, batch: list[Request], now: float, scripts: Collection[Script] = ()) -> Iterator[list[bytes]]:
        """Begin a batch and yield its commands in pieces, to be sent in order. Consume all of them.

        Args:
            batch: the requests, in their order.
            now: on the monotonic clock.
            scripts: to load before the requests, in one pipeline, so that SCRIPT FLUSH of another program is unlikely in between.
        """
        assert self.phase is Phase.IDLE, "one batch at a time"
        self.result, self._replicas = BatchResult(), 0
        self._loads.extend(scripts)
        self._unloadable = {}
        pieces = loading(scripts) if scripts else []
        self.phase = Phase.LOADING if scripts else Phase.REPLYING
        for start in range(0, len(batch), PER_SEND):
            if start:
                yield pieces
                pieces = []
            pieces += self._packed(batch[start : start + PER_SEND])
        replication = self._request_queue.replication
        if self._replicas or replication.waiting:
            question = replication.question(self._replicas, now)
            self._replicas = 0 if question is None else -1
            pieces += [] if question is None else [pack(question)]
        yield pieces
        if not self._expected and self.phase is Phase.REPLYING:  # none of them could be packed
            self._end_of_replies(now)

    def begin_count(self, now: float) -> list[bytes]:
        """Return a WAIT for requests that were answered before, if there is nothing else to send; empty: not now."""
        assert self.phase is Phase.IDLE, "one batch at a time"
        question = self._request_queue.replication.question(0, now)
        if question is None:
            return []
        self.result = BatchResult()
        self.phase, self._since = Phase.COUNTING, now
        return [pack(question)]

    def _packed(self, requests: list[Request]) -> list[bytes]:
        """Return the bytes of some requests. A request that cannot be packed gets its error, and no bytes."""
        pieces: list[bytes] = []
        packed: list[Request] = []
        numbers = self._request_queue.numbers
        for request in requests:
            call = request.call
            try:
                pieces.append(pack(self._command(request, call, numbers)))
            except Exception as exc:
                request.fail(UsageError(f"an argument of {call.script.name} cannot be sent ({type(exc).__name__})"))
                self.settled.append(request)
                continue
            packed.append(request)
            if call.replicas > self._replicas:
                self._replicas = call.replicas
        mark_written(packed, boottime())
        self._expected.extend(packed)
        return pieces

    def _command(self, request: Request, call: Call[Any], numbers: SequenceNumbers) -> tuple[bytes | str | int, ...]:
        """Return one call as a command. A numbered request gets its number here, and keeps it when it is sent again."""
        script, keys = as_sent(call, clustered=True) if self._clustered else (call.script, call.keys)
        if not call.numbered:
            return (b"EVALSHA", script.sha, len(keys), *keys, *call.args)
        base = call.base
        number = request.number or numbers.give(request)
        name = f"{base}:producer:{self._producer}"
        return (b"EVALSHA", script.sha, len(keys) + 1, name, *keys, number, numbers.lowest(base), *call.args)

    # Receiving

    def receive(self, data: bytes, now: float) -> None:
        """Take bytes from the server, split at any point.

        Raises:
            ConnectionLost: the bytes are no replies, or replies that no request waits for.
        """
        self._reader.feed(data)
        read, expected, settled = self._reader.gets, self._expected, self.settled
        try:
            while (reply := read()) is not NOT_YET:
                if self.phase is not Phase.REPLYING:
                    self._other_reply(reply, now)
                    continue
                request = expected.popleft()
                if request.settled:  # it has expired, and has its error
                    settled.append(request)
                elif type(reply) is ErrorReply:
                    self._refused(request, reply)
                elif request.read(reply):
                    self.result.answered.append(request)
                else:
                    settled.append(request)
                if not expected:
                    self._end_of_replies(now)
        except NotRedis as error:
            raise ConnectionLost(f"the server sent something that is no reply ({error})") from error

    def _other_reply(self, reply: object, now: float) -> None:
        match self.phase:
            case Phase.LOADING:
                script = self._loads.popleft()
                if isinstance(reply, ErrorReply):
                    self._unloadable[script.sha] = reply
                if not self._loads:
                    self.phase = Phase.REPLYING
                    if not self._expected:
                        self._end_of_replies(now)
            case Phase.COUNTING:
                self._counted(reply, now)
            case _:
                text = f": {reply}" if isinstance(reply, ErrorReply) else ""
                raise ConnectionLost(f"the server sent a reply that no request waits for{text}", innocent=True)

    def _refused(self, request: Request, refused: ErrorReply) -> None:
        if not self._is_sent_again(request, refused):
            error = self._final_error(request, refused)
            error.__cause__ = refused
            request.fail(error)
            self.settled.append(request)

    def _is_sent_again(self, request: Request, refused: ErrorReply) -> bool:
        """Sort the request into `result` if it can succeed when it is sent again."""
        result = self.result
        match refused.action:
            case ErrorAction.NOSCRIPT if self._script(request).sha not in self._unloadable:
                result.noscript.append(request)
                return True
            case ErrorAction.MOVED if self._clustered:
                result.moved.append((request, refused.text))
            case ErrorAction.MOVING if self._clustered:
                result.moving.append(request)
            case ErrorAction.DROP:
                result.dropped.append(request)
            case ErrorAction.HOLD:
                result.held.append(request)
            case ErrorAction.FULL if request.losses:
                # The server refuses before it checks whether an earlier copy, whose reply was lost, has been executed.
                result.held.append(request)
            case _:
                return False
        result.cause = str(refused)
        return True

    def _final_error(self, request: Request, refused: ErrorReply) -> WorqrError:
        """Return the error of a request that must not be sent again."""
        script = self._script(request)
        text = f"the server refused {script.name}: {refused}"
        match refused.action:
            case ErrorAction.MOVED | ErrorAction.MOVING:
                text += "; it is a node of a cluster: write redis+cluster://"
            case ErrorAction.NOSCRIPT:
                text = f"the server refused to load the script {script.name}: {self._unloadable[script.sha]}"
                if self._unloadable[script.sha].word == "NOPERM":
                    text += "; " + LOAD_REMEDY
            case ErrorAction.FULL:
                return QueueFull(
                    "the server is out of memory (maxmemory), nothing was stored; let queues drain, or add memory"
                )
            case _:
                pass
        if request.losses:
            text += "; an earlier copy, whose reply was lost with a connection, may have taken effect"
        return RefusedByServer(text)

    def _script(self, request: Request) -> Script:
        script = request.call.script
        return script.sharded if self._clustered else script

    # The end of a batch

    def _end_of_replies(self, now: float) -> None:
        """All requests are answered. The reply to WAIT follows, if replicas are counted."""
        result = self.result
        if result.moved:
            self._keep_order(result)
        if result.answered:
            self._request_queue.replication.add(result.answered, now)
        if self._replicas < 0:
            self.phase, self._since = Phase.COUNTING, now
        else:
            self.phase = Phase.IDLE

    @staticmethod
    def _keep_order(result: BatchResult) -> None:
        """A request that moves to another node must not overtake a request of the same base that is resent to this node."""
        stays = {request.call.base for request in (*result.noscript, *result.held, *result.dropped, *result.moving)}
        result.moving += [request for request, _ in result.moved if request.call.base in stays]
        result.moved = [each for each in result.moved if each[0].call.base not in stays]

    def _counted(self, reply: object, now: float) -> None:
        """Handle the reply to WAIT: how many replicas have all earlier writes of this connection."""
        replication = self._request_queue.replication
        self.phase = Phase.IDLE
        if isinstance(reply, ErrorReply):
            if reply.action is ErrorAction.REFUSED and not is_no_longer_primary(reply):
                self.settled += replication.refused(reply)
                return
            if reply.action is not ErrorAction.HOLD:
                raise ConnectionLost(str(reply), innocent=True)
            reply = 0
        self.settled += replication.answered(cast("int", reply), now - self._since, now)

    def take_settled(self) -> list[Request]:
        """Return the requests that have their outcome."""
        settled, self.settled = self.settled, []
        if settled:
            self.result.settled = True
        return settled

    def take_result(self) -> BatchResult:
        """Return what the batch that ended left to do. It is returned once."""
        result, self.result = self.result, BatchResult()
        return result

    def lose(self, lost: ConnectionLost, now: float) -> None:
        """The connection is lost: `result` gets the unanswered requests. It keeps what a batch that has just ended left to do.
        Idempotent.
        """
        if self.phase is Phase.LOST:
            return
        result = self.result
        in_replies = self.phase in (Phase.LOADING, Phase.REPLYING)
        self.phase = Phase.LOST
        result.lost = lost
        result.unanswered = list(self._expected)
        self._expected.clear()
        if in_replies and result.answered:
            self._request_queue.replication.add(result.answered, now)
        if result.moved:
            self._keep_order(result)
