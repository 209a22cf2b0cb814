"""`Session`: the requests on one connection, from packing to outcome. No I/O: bytes in, bytes and outcomes out.

A session ends with its connection. It sends one batch at a time; requests that are submitted meanwhile form the next one. An
error reply concerns one request: the rest of the batch is read to the end.

Not here: the order of requests (`request_queue`), the recovery of unanswered requests (`node_client`), sockets.

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
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.errors import QueueFull, RefusedByServer, UsageError, WorqrError, has_foreign_type
from worqr.keys import NONEXISTENT
from worqr.link.connection import (
    ConnectionLost,
    ErrorAction,
    ErrorReply,
    error_reply,
    is_no_longer_primary,
    loading,
    pack,
    redis_py,
)
from worqr.link.connector import Transport, pause_after
from worqr.link.log_thread import boottime
from worqr.link.request_queue import MergedRequest, Request, RequestQueue, SequenceNumbers, mark_written
from worqr.link.settings import Endpoint
from worqr.lua import Script
from worqr.script_call import Call
from worqr.stored_values import as_bytes

# The wire form of calls and replies. No I/O.
#
# Here: the script and keys of a call, for one server and for a node of a cluster, and the parser of replies, whose bytes may
# arrive split anywhere. hiredis parses; an error reply is returned.
#
# On a cluster the channels of a queue are sharded, so the scripts that publish there have a variant (`Script.sharded`).
#
# Every call on a cluster names one more key (`keys.NONEXISTENT`), which is never written. While a slot is moved key by key, a
# node executes commands whose keys it still has all. A script would then find half of a queue. The missing key makes the node
# reply TRYAGAIN or ASK instead, and the call waits until the slot has moved.


SLOTS = 16384

NOT_YET: Final = object()
"""The result of `ReplyReader.gets` when no whole reply has arrived."""


def as_sent(call: Call[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """Return the script of `call` and its KEYS: the base, and in a cluster the key that never exists."""
    if clustered:
        return call.script.sharded, (call.base, call.base + NONEXISTENT)
    return call.script, (call.base,)


@lru_cache(maxsize=10_000)
def slot_of(name: str) -> int:
    """Return the hash slot of a key, a channel, or a base: 0 to 16383."""
    return redis_py().key_slot(as_bytes(name))


class NotRedis(Exception):
    """Bytes that are no reply of a Redis server."""


class ReplyReader(Protocol):
    """The parser of one connection."""

    def feed(self, data: bytes) -> None:
        """Take bytes from the server."""
        ...

    def gets(self) -> object:
        """Return the next reply, or `NOT_YET`. An error reply is an `ErrorReply`. Raises `NotRedis`."""
        ...


def new_reader() -> ReplyReader:
    """Return a parser for a connection that has just been made."""
    make = cast("Callable[..., Any]", hiredis.Reader)
    return cast("ReplyReader", make(replyError=error_reply, protocolError=NotRedis, notEnoughData=NOT_YET))


# `LiveConnection`: an open connection to a server: its session, its transport and its own counters.


IDLE_CHECK: Final = 0.05
"""Seconds without a request, after which a connection is read before it is used."""

_NOSCRIPT_ROUNDS = 3  # another program keeps flushing scripts: from here on, pause between the tries


class LiveConnection:
    """One connection, from the handshake to its loss.

    Attributes:
        used_at: when a batch was last sent.
        heard_at: when bytes last came or went, while something is under way. Moved on by the time in which the loop was blocked.
        held_until: do not send before; -inf: send.
        load_first: scripts to be loaded in front of the next batch.
        gathers: the last batch had several requests: let the next ones join before it is sent.
    """

    __slots__ = (
        "_holds",
        "_noscript_rounds",
        "gathers",
        "heard_at",
        "held_until",
        "load_first",
        "session",
        "transport",
        "used_at",
    )

    def __init__(self, transport: Transport, session: Session, now: float) -> None:
        self.transport: Transport = transport
        self.session: Session = session
        self.used_at: float = now
        self.heard_at: float = now
        self.held_until: float = -math.inf
        self.load_first: dict[str, Script] = {}
        self.gathers: bool = False
        self._holds = 0  # replies in a row that the server cannot work
        self._noscript_rounds = 0  # batches in a row of which nothing was executed, because scripts were missing

    @property
    def is_idle(self) -> bool:
        """True if no batch is in flight."""
        return self.session.phase is Phase.IDLE

    @property
    def endpoint(self) -> Endpoint:
        """The server's address."""
        return self.transport.wire.endpoint

    def send(self, batch: list[Request], now: float) -> ConnectionLost | None:
        """Send a batch; return why the connection was lost meanwhile, if it was."""
        self.used_at = self.heard_at = now
        self.gathers = len(batch) > 1 or isinstance(batch[0], MergedRequest)
        scripts, self.load_first = self.load_first, {}
        lost: ConnectionLost | None = None
        for pieces in self.session.begin(batch, now, scripts.values()):
            if lost is None and pieces:
                lost = self._send(pieces)
        return lost

    def _send(self, pieces: list[bytes]) -> ConnectionLost | None:
        try:
            self.transport.send(pieces)
        except ConnectionLost as lost:
            return lost
        return None

    def progress(self) -> None:
        """The system accepted more bytes, or the server sent some."""
        self.heard_at = time.monotonic()

    def count_replicas(self, now: float) -> ConnectionLost | None:
        """Ask how many replicas have the writes that requests wait for. Return the reason if the connection was lost
        meanwhile.
        """
        pieces = self.session.begin_count(now)
        if not pieces:
            return None
        self.used_at = self.heard_at = now
        return self._send(pieces)

    def is_still_there(self, now: float) -> bool:
        """Return False if the server has closed this idle connection, or sent something unasked."""
        if now - self.used_at <= IDLE_CHECK:
            return True
        try:
            for data in self.transport.read():
                self.session.receive(data, now)
        except ConnectionLost:
            return False
        return True

    def receive(self) -> ConnectionLost | None:
        """Read the input; return the reason if the connection was lost."""
        try:
            pieces = self.transport.read()
            now = time.monotonic()
            for data in pieces:
                self.session.receive(data, now)
            if pieces:
                self.heard_at = now
        except ConnectionLost as lost:
            return lost
        return None

    def forgive(self, seconds: float) -> None:
        """The loop was blocked for this time, so the server is not to blame for its silence."""
        self.heard_at += seconds

    def works(self) -> None:
        """A whole batch was answered."""
        self.held_until, self._holds, self._noscript_rounds = -math.inf, 0, 0

    def hold(self) -> None:
        """The server replied that it cannot work at the moment: pause, longer each time."""
        self._holds += 1
        self.held_until = time.monotonic() + pause_after(self._holds + 1)

    def load(self, scripts: dict[str, Script], *, executed: bool) -> bool:
        """Load these in front of the next batch; return False if they vanish as soon as they are loaded.

        Args:
            scripts: by their SHA.
            executed: some requests of the batch had other scripts, and were executed.
        """
        self.load_first = scripts
        self._noscript_rounds = 0 if executed else self._noscript_rounds + 1
        return self._noscript_rounds <= _NOSCRIPT_ROUNDS


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
        script, keys = as_sent(call, clustered=self._clustered)
        if not call.numbered:
            return (b"EVALSHA", script.sha, len(keys), *keys, *call.args)
        number = request.number or numbers.give(request)
        numbering = (self._producer, number, numbers.lowest(call.base))
        return (b"EVALSHA", script.sha, len(keys), *keys, *numbering, *call.args)

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
            case ErrorAction.REFUSED if has_foreign_type(refused):
                text += (
                    f". Another program has written a key that begins with {request.call.base}: list them with `redis-cli "
                    f"--scan --pattern '{request.call.base}*'`, find it with `redis-cli TYPE KEY`, and rename or delete it"
                )
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
