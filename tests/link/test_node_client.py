"""The client of one server without a server: any split of the bytes, any error, a loss at any byte, and time.

A model of a server executes the commands that the client sends, and answers in the order in which they came. Between two steps
of it anything may happen. Whatever does: each request has one outcome, a numbered one takes effect once, an outcome that says
that it was not sent is true, and when all is well again every request is answered.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import hiredis
import pytest
from hypothesis import Phase as Part
from hypothesis import settings as how
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.link.scripts import script
from worqr.command import Command, Merge
from worqr.errors import NotReplicated, QueueFull, RefusedByServer, Unavailable
from worqr.link import LinkSettings, Request, connector, driver, node, session
from worqr.link.connector import ServerInfo, State, StaticEndpoint
from worqr.link.log_thread import LogThread
from worqr.link.node import NodeClient
from worqr.link.session import Phase
from worqr.link.settings import Endpoint

DO = script("do", "return 1")
ERRORS = (
    "ERR it cannot be done",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "MISCONF Errors writing to the AOF file",
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "TRYAGAIN Multiple keys request during rehashing of slot",
)
PATIENCE = 30.0


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeWatch:
    wants_write = False

    def __init__(self, readable: Callable[[], object], writable: Callable[[], object]) -> None:
        self.readable, self.writable, self.closed = readable, writable, False

    def want_write(self, wanted: bool) -> None:
        self.wants_write = wanted

    def expect(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


class FakeDriver:
    """Runs callbacks when the test says so."""

    entered = nullcontext()

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.soon_queue: deque[Callable[[], object]] = deque()
        self.timers: list[tuple[float, int, FakeTimer]] = []
        self.numbers = itertools.count()
        self.watched: FakeWatch | None = None

    def post(self, deliver: Callable[[], object]) -> None:
        self.soon_queue.append(deliver)

    soon = post

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self.timers, (when, next(self.numbers), timer))
        return timer

    def watch(self, _sock: object, readable: Callable[[], object], writable: Callable[[], object]) -> FakeWatch:
        self.watched = FakeWatch(readable, writable)
        return self.watched

    def interrupted(self, error: Exception) -> None:
        raise AssertionError("a bug") from error

    def run(self) -> None:
        """What is to be run now."""
        for _ in range(10_000):
            if not (self.soon_queue or (self.timers and self.timers[0][0] <= self.clock.now)):
                return
            if self.soon_queue:
                self.soon_queue.popleft()()
            else:
                callback = heapq.heappop(self.timers)[2].callback
                if callback is not None:
                    callback()
        raise AssertionError("it spins")


class FakeSocket:
    """Takes `room` bytes, then blocks; gives what was delivered, then blocks, or ends."""

    def __init__(self) -> None:
        self.sent, self.arrived = bytearray(), bytearray()
        self.room, self.ended = 1 << 30, False

    def send(self, data: bytes) -> int:
        if self.ended:
            raise BrokenPipeError(32, "Broken pipe")
        taken = min(len(data), self.room)
        if not taken:
            raise BlockingIOError
        self.room -= taken
        self.sent += data[:taken]
        return taken

    def recv(self, size: int) -> bytes:
        if self.arrived:
            data = bytes(self.arrived[:size])
            del self.arrived[:size]
            return data
        if self.ended:
            return b""
        raise BlockingIOError


class FakeWire:
    """A connection that is handed over at once."""

    def __init__(self) -> None:
        self.socket, self.facts, self.endpoint = FakeSocket(), ServerInfo(), Endpoint("h", 1)

    def hand_over(self) -> FakeSocket:
        return self.socket

    def close(self) -> None:
        self.socket.ended = True


PRODUCER = "P"


class ServerModel:
    """Executes commands in their order. It keeps the replies to numbered ones, and forgets scripts when it is told to."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.kept: dict[tuple[str, int], int] = {}
        self.scripts: set[str] = set()
        self.replicas = 0

    def reply(self, command: list[bytes], error: str | None) -> bytes:
        name, *rest = [each.decode() for each in command]
        if name == "SCRIPT":
            self.scripts.add(DO.sha)
            return b"+ok\r\n"
        if name == "WAIT" and error is not None and error.startswith("READONLY"):
            return b"-ERR WAIT cannot be used with replica instances.\r\n"
        if name == "WAIT":
            return b":%d\r\n" % self.replicas
        sha, _, base, *values = rest
        if sha not in self.scripts:
            return b"-NOSCRIPT No matching script.\r\n"
        if error is not None:
            return b"-%s\r\n" % error.encode()
        if values[0] == PRODUCER:
            _, number, _, *ids = values
            if (base, int(number)) not in self.kept:
                self.kept[base, int(number)] = len(ids)
                self.effects.update(ids)
        else:
            ids = values
            self.effects.update(ids)
        return b"*2\r\n+ok\r\n:%d\r\n" % len(ids)


def joined(calls: Any) -> Command[int]:
    first = calls[0]
    return Command(DO, first.base, tuple(arg for call in calls for arg in call.args), first.read, True)


def call(base: str, name: str, *, numbered: bool, merges: bool, replicas: int) -> Command[int]:
    merge = Merge(1, joined, 1) if merges and numbered else None
    return Command(DO, base, (name,), lambda reply: int(reply[1]), numbered, len(name), merge, replicas)


class Chaos(RuleBasedStateMachine):
    """A client, a model of a server, and whatever may happen between them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        for module in (driver, connector, node, session):
            self.patch.setattr(module, "time", self.clock)
        self.driver, self.server = FakeDriver(self.clock), ServerModel()
        settings = LinkSettings("redis://h:1", socket_timeout=5.0)
        resolver = StaticEndpoint(settings.address.redacted, settings.address.seeds[0])
        self.client = NodeClient(settings, cast("Any", self.driver), LogThread(), PRODUCER, resolver=resolver)
        self.client.connector._start = lambda _: None  # type: ignore[method-assign]
        self.client.start()
        self.wire: FakeWire | None = None
        self.commands: deque[list[bytes]] = deque()
        self.replies = bytearray()  # on their way to the client
        self.requests: dict[str, Request] = {}
        self.outcomes: Counter[str] = Counter()
        self.an_attempt_ends(works=True)

    def teardown(self) -> None:
        try:
            self.all_is_well()
        finally:
            self.patch.undo()

    # What the program does

    @rule(
        base=st.sampled_from(["a", "b"]),
        many=st.integers(1, 6),
        numbered=st.booleans(),
        merges=st.booleans(),
        replicas=st.sampled_from([0, 0, 0, 1]),
        patience=st.sampled_from([0.2, 3.0, PATIENCE, PATIENCE, PATIENCE]),
        turn=st.booleans(),
    )
    def submit(
        self, base: str, many: int, numbered: bool, merges: bool, replicas: int, patience: float, turn: bool
    ) -> None:
        for _ in range(many):
            name = f"{base}{len(self.requests)}"
            made = call(base, name, numbered=numbered, merges=merges, replicas=replicas)
            request = self.requests[name] = Request(made, patience, self.clock.now)
            request.wake = lambda name=name: self.outcomes.update([name])  # type: ignore[misc]
            self.client.submit(request)
        if turn:
            self.driver.run()
        self.take_commands()

    def abandon(self, at: int) -> None:
        waiting = [request for request in self.requests.values() if not request.settled and request.wake is not None]
        if at < len(waiting):
            waiting[at].wake, waiting[at].abandoned = None, True

    def other_tasks_have_had_their_turn(self) -> None:
        self.driver.run()
        self.take_commands()

    def time_passes(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            due = self.driver.timers[0][0] if self.driver.timers else end
            self.clock.now = min(max(due, self.clock.now), end)
            self.driver.run()
            if due >= end:
                break
        self.take_commands()

    def the_loop_is_blocked(self, seconds: float) -> None:
        self.clock.now += seconds
        self.driver.run()
        self.take_commands()

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """Of what can happen at any time."""
        connected = [self.the_line_is_free, lambda: self.the_line_is_full(data.draw(st.integers(0, 200)))]
        happens = [
            lambda: self.time_passes(data.draw(st.sampled_from([0.01, 0.06, 0.1, 0.5, 2.0, 6.0]))),
            lambda: self.the_loop_is_blocked(data.draw(st.sampled_from([0.2, 20.0]))),
            lambda: self.abandon(data.draw(st.integers(0, 5))),
            self.other_tasks_have_had_their_turn,
            self.scripts_are_flushed,
            *(connected if self.wire is not None else ()),
        ]
        data.draw(st.sampled_from(happens))()

    # What the network does

    def is_dialling(self) -> bool:
        return self.client.connector.state is State.DIALLING

    def dialled(self, wire: Any, error: Unavailable | None) -> None:
        self.client.connector._end(self.client.connector._number, wire, error)

    @precondition(is_dialling)
    @rule(works=st.sampled_from([True, True, True, False]))
    def an_attempt_ends(self, works: bool) -> None:
        if works:
            self.wire, self.commands, self.replies = FakeWire(), deque(), bytearray()
            self.reader = cast("Any", hiredis.Reader)()
            self.server.scripts.add(DO.sha)
            self.dialled(cast("Any", self.wire), None)
        else:
            self.dialled(None, Unavailable("connection refused"))
        self.take_commands()

    @precondition(lambda self: self.wire is not None)
    @rule(size=st.integers(1, 300))
    def some_bytes_arrive(self, size: int) -> None:
        assert self.wire is not None
        self.wire.socket.arrived += self.replies[:size]
        del self.replies[:size]
        self.tell("readable")

    def the_line_is_full(self, room: int) -> None:
        assert self.wire is not None
        self.wire.socket.room = room

    def the_line_is_free(self) -> None:
        assert self.wire is not None
        self.wire.socket.room = 1 << 30
        if self.driver.watched is not None and self.driver.watched.wants_write:
            self.tell("writable")

    @precondition(lambda self: self.wire is not None)
    @rule(size=st.integers(0, 100), notices=st.booleans())
    def the_connection_is_lost(self, size: int, notices: bool) -> None:
        """After some more bytes of what the server had answered."""
        assert self.wire is not None
        self.wire.socket.arrived += self.replies[:size]
        self.replies.clear()
        self.commands.clear()
        self.wire.socket.ended = True
        if notices:
            self.tell("readable")

    def tell(self, event: str) -> None:
        watch = self.driver.watched
        if watch is not None and not watch.closed:
            getattr(watch, event)()
        self.driver.run()
        self.take_commands()

    def take_commands(self) -> None:
        """What the client has sent reaches the server."""
        if self.wire is None:
            return
        sent = self.wire.socket.sent
        self.reader.feed(bytes(sent))
        sent.clear()
        while (command := self.reader.gets()) is not False:
            self.commands.append(command)

    # What the server does

    @precondition(lambda self: self.commands)
    @rule(many=st.integers(1, 5), error=st.sampled_from([None, None, None, *ERRORS]), replicas=st.integers(0, 1))
    def the_server_works(self, many: int, error: str | None, replicas: int) -> None:
        self.server.replicas = replicas
        for _ in range(min(many, len(self.commands))):
            self.replies += self.server.reply(self.commands.popleft(), error)

    @precondition(lambda self: self.commands or self.replies)
    @rule()
    def all_is_answered(self) -> None:
        self.the_server_works(100, None, 1)
        self.some_bytes_arrive(1 << 20)

    @precondition(lambda self: self.commands and self.wire is not None)
    @rule(size=st.integers(0, 20))
    def what_was_executed_is_not_answered(self, size: int) -> None:
        self.the_server_works(100, None, 1)
        self.the_connection_is_lost(size, notices=True)

    def scripts_are_flushed(self) -> None:
        self.server.scripts.clear()

    # What holds

    @invariant()
    def each_request_has_one_outcome_and_is_known_until_then(self) -> None:
        assert all(count == 1 for count in self.outcomes.values())
        request_queue = self.client.requests
        known: set[int] = set()
        answered = [request for request, _ in request_queue.replication.waiting]
        waiting = request_queue._waiting()
        session = self.client.session
        between = session.result.answered if session is not None and session.phase is not Phase.IDLE else []
        for request in (*request_queue.in_flight, *waiting, *answered, *between):
            known.update(map(id, getattr(request, "parts", (request,))))
        for name, request in self.requests.items():
            assert request.settled or request.abandoned or id(request) in known, name

    @invariant()
    def outcomes_are_true(self) -> None:
        for name, request in self.requests.items():
            if not request.settled or request.abandoned:
                continue
            effects, error = self.server.effects[name], request.error
            if request.call.numbered:
                assert effects <= 1
            if error is None or isinstance(error, NotReplicated):
                assert effects
            elif isinstance(error, Unavailable):
                assert error.sent is None or not effects
            else:
                assert isinstance(error, RefusedByServer | QueueFull), error
                if effects and request.call.numbered:  # an earlier copy had no reply
                    assert "may have taken effect" in str(error)

    def all_is_well(self) -> None:
        """The server works, the network too, and time passes: nothing waits in the end."""
        for _ in range(400):
            if all(request.settled or request.abandoned for request in self.requests.values()):
                break
            if self.is_dialling():
                self.an_attempt_ends(works=True)
            if self.wire is not None:
                self.the_line_is_free()
                self.the_server_works(100, None, 1)
                self.some_bytes_arrive(1 << 20)
            self.time_passes(0.5)
            self.outcomes_are_true()
        assert all(request.settled or request.abandoned for request in self.requests.values())
        assert self.client.connector.state is not State.ENDED


TestChaos = Chaos.TestCase
TestChaos.settings = how(  # without shrinking, which takes minutes
    max_examples=500, stateful_step_count=60, deadline=None, phases=(Part.explicit, Part.reuse, Part.generate)
)


def test_a_silent_server_is_given_up_in_a_loop_that_is_always_late() -> None:
    chaos = Chaos()
    try:
        request = Request(call("a", "a0", numbered=True, merges=False, replicas=0), 1000.0, chaos.clock.now)
        chaos.client.submit(request)  # the server never answers
        for _ in range(60):
            chaos.clock.now += 1.0
            chaos.driver.run()
        assert chaos.client.connector.state is State.DIALLING
        assert request.losses == 1
    finally:
        chaos.patch.undo()


def test_a_server_is_not_silent_for_the_time_in_which_the_loop_was_blocked() -> None:
    chaos = Chaos()
    try:
        request = Request(call("a", "a0", numbered=True, merges=False, replicas=0), 1000.0, chaos.clock.now)
        chaos.client.submit(request)
        chaos.the_loop_is_blocked(20.0)
        chaos.time_passes(1.0)
        assert (chaos.client.connector.state, request.losses) == (State.READY, 0)
        chaos.time_passes(6.0)
        assert (chaos.client.connector.state, request.losses) == (State.DIALLING, 1)
    finally:
        chaos.patch.undo()


def test_a_refused_copy_does_not_deny_the_copy_before_it() -> None:
    chaos = Chaos()
    try:
        chaos.submit("a", 1, numbered=True, merges=False, replicas=0, patience=PATIENCE, turn=True)
        chaos.what_was_executed_is_not_answered(0)
        chaos.an_attempt_ends(works=True)
        chaos.the_server_works(1, "NOPERM this user has no permissions", 0)
        chaos.some_bytes_arrive(1000)
        error = chaos.requests["a0"].error
        assert isinstance(error, RefusedByServer)
        assert "an earlier copy, whose reply was lost with a connection, may have taken effect" in str(error)
    finally:
        chaos.patch.undo()
