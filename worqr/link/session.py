"""`Session`: the requests on one open connection, from packing to outcome. It never waits.

A session ends with its connection. It sends one batch at a time; requests that are submitted meanwhile form the next one. An
error reply concerns one request: the rest of the batch is read to the end.

Not here: the order of requests (`requests`), the recovery of unanswered requests (`node`), sockets (`connector`).

Phases, and the kind of the next reply:

=========  =======================================  ======================================================
phase      the next reply is                        then
=========  =======================================  ======================================================
IDLE       invalid: the connection is lost          `send` (-> LOADING, REPLYING), `count_replicas` (-> COUNTING)
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
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast

import hiredis

from worqr.command import Command
from worqr.errors import QueueFull, RefusedByServer, UsageError, WorqrError, has_foreign_type
from worqr.keys import NONEXISTENT
from worqr.link.connector import Transport, pause_after
from worqr.link.failures import ConnectionLost, ErrorAction, ErrorReply, error_reply, is_no_longer_primary, redis_py
from worqr.link.opening import loading, pack
from worqr.link.requests import MergedRequest, Request, RequestQueue
from worqr.lua import Script
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
"""The result of a parser's `gets` when no whole reply has arrived."""


def as_sent(call: Command[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """Return the script of `call` and its KEYS: the base, and in a cluster the key that never exists."""
    if clustered:
        return call.script.sharded, (call.base, call.base + NONEXISTENT)
    return call.script, (call.base,)


@lru_cache(maxsize=10_000)
def slot_of(name: str) -> int:
    """Return the hash slot of a key, a channel, or a base: 0 to 16383."""
    slot: int = redis_py().crc.key_slot(as_bytes(name))
    return slot


class NotRedis(Exception):
    """Bytes that are no reply of a Redis server."""


def new_reader() -> hiredis.Reader:
    """Return a parser for a connection that has just been made. An error reply is an `ErrorReply`."""
    return hiredis.Reader(protocolError=NotRedis, replyError=error_reply, notEnoughData=NOT_YET)


LOAD_REMEDY: Final = (
    "this user may not load scripts: start a worker or producer of the same version of worqr once, which loads them, or grant "
    "the user +script|load"
)
PER_SEND: Final = 64
"""Requests to pack before the first bytes are sent: the server works on them while the next ones are packed."""

IDLE_CHECK: Final = 0.05
"""Seconds without a request, after which a connection is read before it is used."""

_NOSCRIPT_ROUNDS = 3  # another program keeps flushing scripts: from here on, pause between the tries


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
        again: they were refused and will be sent again, by what has to happen before.
        moved: with the redirect of the node, ``SLOT HOST:PORT``.
        unanswered: the connection was lost before the reply.
        lost: the reason of the loss.
        cause: the error reply to some that were refused.
        settled: at least one request of the batch has its outcome.
    """

    answered: list[Request] = field(default_factory=list[Request])
    again: dict[ErrorAction, list[Request]] = field(default_factory=dict[ErrorAction, list[Request]])
    moved: list[tuple[Request, str]] = field(default_factory=list[tuple[Request, str]])
    unanswered: list[Request] = field(default_factory=list[Request])
    lost: ConnectionLost | None = None
    cause: str = ""
    settled: bool = False


class Session:
    """The requests on one connection.

    Attributes:
        transport: its socket.
        phase: the kind of the next reply.
        result: the present batch, or the last one.
        used_at: when a batch was last sent.
        heard_at: when bytes last came or went, while something is under way. Moved on by the time in which the loop was blocked.
        held_until: do not send before; -inf: send.
        gathers: the last batch had several requests: let the next ones join before it is sent.
        troubled: not every batch was answered lately.
    """

    def __init__(self, transport: Transport, requests: RequestQueue, producer: str, *, clustered: bool) -> None:
        self.transport: Transport = transport
        self.phase: Phase = Phase.IDLE
        self.result: BatchResult = BatchResult()
        self.used_at: float = time.monotonic()
        self.heard_at: float = self.used_at
        self.held_until: float = -math.inf
        self.gathers: bool = False
        self.troubled: bool = False
        self._requests = requests
        self._producer = producer
        self._clustered = clustered
        self._reader = new_reader()
        self._expected: deque[Request] = deque()
        self._settled: list[Request] = []  # until `take_settled`
        self._loads: deque[Script] = deque()  # to be loaded in front of the next batch, or being loaded
        self._unloadable: dict[str, ErrorReply] = {}  # by SHA: why the server refuses to load a script
        self._replicas = 0  # the most that a request of the batch requires; -1: WAIT was sent behind the batch
        self._since = 0.0  # when WAIT was sent
        self._holds = 0  # replies in a row that the server cannot work
        self._noscript_rounds = 0  # batches in a row of which nothing was executed, because scripts were missing

    # Sending

    def send(self, batch: list[Request], now: float) -> ConnectionLost | None:
        """Send a batch, and in front of it the scripts that are to be loaded, so that SCRIPT FLUSH of another program is
        unlikely in between. Return why the connection was lost meanwhile, if it was: then, too, all requests count as sent.
        """
        assert self.phase is Phase.IDLE, "one batch at a time"
        self.used_at = self.heard_at = now
        self.gathers = len(batch) > 1 or type(batch[0]) is MergedRequest
        self._replicas, self._unloadable, self.result.settled = 0, {}, False
        pieces = loading(self._loads) if self._loads else []
        self.phase = Phase.LOADING if pieces else Phase.REPLYING
        lost: ConnectionLost | None = None
        if self.gathers:
            for start in range(0, len(batch), PER_SEND):
                if start:
                    lost, pieces = lost or self._write(pieces), []
                pieces += self._packed(batch[start : start + PER_SEND], now)
        else:
            pieces += self._packed(batch, now)
        replication = self._requests.replication
        if self._replicas or replication.waiting:
            question = replication.question(self._replicas, now)
            self._replicas = 0 if question is None else -1
            pieces += [] if question is None else [pack(question)]
        try:
            if lost is None and pieces:
                self.transport.send(pieces)
        except ConnectionLost as error:
            lost = error
        if not self._expected and self.phase is Phase.REPLYING:  # none of them could be packed
            self._end_of_replies(now)
        return lost

    def count_replicas(self, now: float) -> ConnectionLost | None:
        """Ask how many replicas have the writes that requests wait for, unless it is too early to ask again. Return the reason
        if the connection was lost meanwhile.
        """
        assert self.phase is Phase.IDLE, "one batch at a time"
        question = self._requests.replication.question(0, now)
        if question is None:
            return None
        self.phase, self._since = Phase.COUNTING, now
        self.used_at = self.heard_at = now
        return self._write([pack(question)])

    def _write(self, pieces: list[bytes]) -> ConnectionLost | None:
        try:
            if pieces:
                self.transport.send(pieces)
        except ConnectionLost as lost:
            return lost
        return None

    def _packed(self, requests: list[Request], now: float) -> list[bytes]:
        """Return the bytes of some requests. A numbered request gets its number here, and keeps it when it is sent again. A
        request that cannot be packed gets its error, and no bytes.
        """
        pieces: list[bytes] = []
        numbers = self._requests.numbers
        for request in requests:
            call = request.call
            base = call.base
            try:
                args = call.args
                if call.numbered:
                    args = (self._producer, request.number or numbers.give(request, now), numbers.open[base][0], *args)
                script = call.script
                if self._clustered:
                    pieces += (
                        pack((b"EVALSHA", script.sharded.sha, 2, base, base + NONEXISTENT, *args, *script.tail)),
                    )
                else:
                    pieces += (pack((b"EVALSHA", script.sha, 1, base, *args, *script.tail)),)
            except Exception as exc:
                request.fail(UsageError(f"an argument of {call.script.name} cannot be sent ({type(exc).__name__})"))
                self._settled.append(request)
                continue
            self._expected.append(request)
            if call.replicas > self._replicas:
                self._replicas = call.replicas
        return pieces

    # Receiving

    def is_still_there(self) -> bool:
        """Return False if the server has closed this idle connection, or sent something unasked."""
        return self.receive() is None

    def receive(self) -> ConnectionLost | None:
        """Read the input; return the reason if the connection was lost, or if the bytes are no replies that are awaited."""
        try:
            if not self.transport.read(self._reader.feed):
                return None
            self.heard_at = now = time.monotonic()
            gets, expected, settled = self._reader.gets, self._expected, self._settled
            while (reply := gets()) is not NOT_YET:
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
                if expected:
                    continue
                if self._replicas or self.result.answered or self.result.moved:
                    self._end_of_replies(now)
                else:
                    self.phase = Phase.IDLE
        except ConnectionLost as lost:
            return lost
        except NotRedis as error:
            return ConnectionLost(f"the server sent something that is no reply ({error})")
        return None

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
        """Sort the request into `result` if it can succeed when it is sent again; else it has its error."""
        match refused.action:
            case ErrorAction.MOVED if self._clustered:
                self.result.moved.append((request, refused.text))
            case (ErrorAction.DROP | ErrorAction.HOLD) as action:
                self.result.again.setdefault(action, []).append(request)
            case ErrorAction.MOVING as action if self._clustered:
                self.result.again.setdefault(action, []).append(request)
            case ErrorAction.FULL if request.losses:
                # The server refuses before it checks whether an earlier copy, whose reply was lost, has been executed.
                self.result.again.setdefault(ErrorAction.HOLD, []).append(request)
            case ErrorAction.NOSCRIPT as action if self._script(request).sha not in self._unloadable:
                self.result.again.setdefault(action, []).append(request)
                return
            case _:
                error = self._final_error(request, refused)
                error.__cause__ = refused
                request.fail(error)
                self._settled.append(request)
                return
        self.result.cause = str(refused)

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
                    f". Another program has written one of these keys, or another key that begins with {request.call.base}: "
                    f"{', '.join(request.call.base + each for each in request.call.script.suffixes)}. "
                    "Find it with `redis-cli TYPE KEY`, and rename or delete it"
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
        if self.result.answered or self.result.moved:
            self._note_answered(now)
        if self._replicas < 0:
            self.phase, self._since = Phase.COUNTING, now
        else:
            self.phase = Phase.IDLE

    def _note_answered(self, now: float) -> None:
        """The requests that were answered wait for replicas. One that moves to another node must not overtake a request of the
        same base that is resent to this node.
        """
        result = self.result
        if result.moved and result.again:
            stays = {request.call.base for requests in result.again.values() for request in requests}
            moving = [request for request, _ in result.moved if request.call.base in stays]
            result.again.setdefault(ErrorAction.MOVING, []).extend(moving)
            result.moved = [each for each in result.moved if each[0].call.base not in stays]
        if result.answered:
            self._requests.replication.add(result.answered, now)
            result.answered = []

    def _counted(self, reply: object, now: float) -> None:
        """Handle the reply to WAIT: how many replicas have all earlier writes of this connection."""
        replication = self._requests.replication
        self.phase = Phase.IDLE
        if isinstance(reply, ErrorReply):
            if reply.action is ErrorAction.REFUSED and not is_no_longer_primary(reply):
                self._settled += replication.refused(reply)
                return
            if reply.action is not ErrorAction.HOLD:
                raise ConnectionLost(str(reply), innocent=True)
            reply = 0
        self._settled += replication.answered(cast("int", reply), now - self._since, now)

    def take_settled(self) -> list[Request]:
        """Return the requests that have their outcome."""
        settled, self._settled = self._settled, []
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
        if self.phase is not Phase.LOST:
            self.result.lost = lost
            self.result.unanswered = list(self._expected)
            self._expected.clear()
            if self.phase in (Phase.LOADING, Phase.REPLYING):
                self._note_answered(now)
            self.phase = Phase.LOST

    # What the next batch needs

    def works(self) -> None:
        """A whole batch was answered."""
        self.held_until, self._holds, self._noscript_rounds, self.troubled = -math.inf, 0, 0, False

    def hold(self) -> None:
        """The server replied that it cannot work at the moment: pause, longer each time."""
        self._holds += 1
        self.troubled = True
        self.held_until = time.monotonic() + pause_after(self._holds + 1)

    def load(self, missing: Collection[Request], *, executed: bool) -> bool:
        """Load the scripts of these requests in front of the next batch. Return False if they vanish as soon as they are
        loaded.

        Args:
            missing: the server does not have their scripts.
            executed: some requests of the batch had other scripts, and were executed.
        """
        self._loads.extend({script.sha: script for script in map(self._script, missing)}.values())
        self._noscript_rounds = 0 if executed else self._noscript_rounds + 1
        self.troubled = True
        return self._noscript_rounds <= _NOSCRIPT_ROUNDS

    def progress(self) -> None:
        """The system accepted more bytes, or the server sent some."""
        self.heard_at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """The loop was blocked for this time, so the server is not to blame for its silence."""
        self.heard_at += seconds
