"""One worker's membership: join, serve, leave, die; the leader's two checks, the recovery and the audit.

The peer sends one request at a time to the registry or to its queue's slot. Replies get lost, and copies that the server had not
read may run late, even after the worker was recovered and forgotten. The peer can crash, freeze (and wake up as a zombie), and
the server's clock can jump, so that the keepalive key of a worker expires while it sends heartbeats.

Promised: a worker that sends heartbeats and serves is not condemned and stays in the fence. A worker knows all its claims. When
everything rests, a worker that is gone has left nothing behind, and a live one is exactly where it believes to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

QUEUE_REQUESTS = ("start_work", "stop_work")
REGISTRY_REQUESTS = ("start_worker", "map_work", "unmap_work", "stop_worker")
AFTER = {
    "start_worker": "joined",
    "map_work": "mapped",
    "start_work": "serving",
    "start_tasks": "serving",
    "stop_work": "stopped",
    "unmap_work": "joined",
    "stop_worker": "left",
}
"""Where the peer stands when a request was answered `ok`."""
BEATING = ("joined", "mapped", "serving", "stopped")


class Call(NamedTuple):
    """A request; `reply` is empty until the server ran it."""

    verb: str
    number: int
    reply: str = ""


class Membership(NamedTuple):
    """The registry, the queue's slot, the leader and the peer."""

    in_workers: bool = False
    in_dying: bool = False
    key: bool = False
    work_map: bool = False
    fence: tuple[int, bool] | None = None
    """Number of the last start, and whether it took the task."""
    claim: bool = False
    registry_kept: tuple[int, str] = (0, "")
    queue_kept: tuple[int, str] = (0, "")
    look: str = ""
    """The leader's view of the key: present, missing once, missing twice."""
    beaten: bool = False
    """The worker has beaten since the leader's first look."""
    failed: bool = False
    audit: str = ""
    process: str = "up"
    phase: str = "out"
    number: int = 0
    call: Call | None = None
    holds: bool = False
    late: tuple[Call, ...] = ()
    excused: bool = False
    """Condemning it is right, though it beats now: it was frozen, or waited too long for the answer to start_worker."""
    rounds: int = 1
    starts: int = 1
    losses: int = 0
    deaths: int = 0
    jumps: int = 0
    early_audits: int = 0

    @property
    def beats(self) -> bool:
        """True if the peer sends heartbeats."""
        return self.process == "up" and self.phase in BEATING


SERVING = Membership(
    in_workers=True,
    key=True,
    work_map=True,
    fence=(3, False),
    registry_kept=(2, "ok"),
    queue_kept=(3, "ok"),
    phase="serving",
    number=3,
)
"""A worker that joined without any fault and serves, and may serve once more after it stopped."""


class Members(Model[Membership]):
    """`start_worker` to `stop_worker`, `condemn_worker` to `forget_worker`, and the audit; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "the peer asks": By.USER,
        "the peer goes on": By.MESH,
        "the server runs": By.MESH,
        "the peer reads": By.MESH,
        "the peer beats": By.MESH,
        "the key expires": By.MESH,
        "the leader looks": By.MESH,
        "condemn_worker": By.MESH,
        "fail_worker": By.MESH,
        "the sweeper unmaps": By.MESH,
        "forget_worker": By.MESH,
        "the audit reads the fence": By.MESH,
        "the audit reads Workers": By.MESH,
        "the reply is lost": By.FAULT,
        "a late copy runs": By.FAULT,
        "the peer crashes": By.FAULT,
        "the peer freezes": By.FAULT,
        "the peer wakes up": By.USER,
        "the server's clock jumps": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a fence outlives its registration": 16,
        "the audit reads Workers before the fence": 12,
        "dead at one look": 3,
        "start_work and stop_work without a number": 14,
        "registry requests without a number": 14,
        "start_work begins the start numbers anew": 17,
        "a beat revives the swept": 9,
        "map_work does not ask Workers": 11,
        "forget_worker ignores the WorkMap": 7,
        "a swept peer keeps its worker id": 17,
    }
    least: ClassVar[int] = 20_000

    def starts(self) -> Iterator[Membership]:
        yield Membership(early_audits=1)
        yield Membership(losses=1, jumps=1)
        yield Membership(losses=1, deaths=1)
        yield SERVING._replace(losses=1)
        yield SERVING._replace(jumps=1, early_audits=1)
        yield SERVING._replace(deaths=1, early_audits=1)
        yield SERVING._replace(deaths=1, jumps=1)

    def steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        yield from self._process_steps(state)
        if state.process == "up":
            yield from self._peer_steps(state)
        for index, call in enumerate(state.late):
            left = state.late[:index] + state.late[index + 1 :]
            reply, after = self._run(state._replace(late=left), call)
            yield "a late copy runs", f"{call.verb} number {call.number}: {reply}", after
        yield from self._leader_steps(state)
        yield from self._sweep_steps(state)
        yield from self._audit_steps(state)

    def _process_steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        if state.process == "up" and state.phase not in ("left", "dead") and state.deaths:
            after = state._replace(deaths=0, excused=True)
            yield "the peer freezes", "", after._replace(process="frozen")
            unread = (state.call,) if state.call is not None and not state.call.reply else ()
            beat = (Call("beat", 0),) if state.beats else ()
            late = tuple(sorted((*state.late, *unread, *beat)))
            yield "the peer crashes", "", after._replace(process="crashed", call=None, holds=False, late=late)
        if state.process == "frozen":
            yield "the peer wakes up", "", state._replace(process="up")
        if state.key and state.process == "up" and state.jumps:
            yield "the server's clock jumps", "the key is gone", state._replace(key=False, jumps=state.jumps - 1)
        if state.key and (state.process != "up" or state.phase in ("left", "dead")):
            yield "the key expires", "", state._replace(key=False)

    def _peer_steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        if state.beats:
            yield "the peer beats", *self._beat(state)
        call = state.call
        if call is None:
            yield from self._next_requests(state)
            return
        if call.reply:
            yield "the peer reads", f"{call.verb}: {call.reply}", self._read(state._replace(call=None), call)
        else:
            reply, after = self._run(state, call)
            yield "the server runs", f"{call.verb}: {reply}", after._replace(call=call._replace(reply=reply))
        if state.losses:
            late = state.late if call.reply else tuple(sorted((*state.late, call)))
            after = state._replace(call=call._replace(reply=""), losses=state.losses - 1, late=late)
            yield "the reply is lost", f"{call.verb} is sent again", after

    def _beat(self, state: Membership) -> tuple[str, Membership]:
        """`keep_worker_alive`."""
        if state.in_workers or self.mistake == "a beat revives the swept":
            return "alive", state._replace(key=True, beaten=state.look != "")
        if self.mistake == "a swept peer keeps its worker id":
            return "dead, and joins again", state._replace(phase="out", holds=False, call=None)
        return "dead, and the peer cancels its handlers", die(state)

    def _next_requests(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        name = "the peer asks"
        if state.phase == "out":
            yield name, "to join: start_worker", ask(state, "start_worker")
        elif state.phase == "joined":
            if state.rounds:
                yield name, "to serve: map_work", ask(state._replace(rounds=state.rounds - 1), "map_work")
            yield name, "to leave: stop_worker", ask(state, "stop_worker")
        elif state.phase == "mapped":
            yield "the peer goes on", "with start_work", ask(state, "start_work")
        elif state.phase == "serving":
            if state.starts and not state.holds:
                yield name, "for the task: start_tasks", ask(state._replace(starts=state.starts - 1), "start_tasks")
            yield name, "to serve no more: stop_work", ask(state, "stop_work")
        elif state.phase == "stopped":
            yield "the peer goes on", "with unmap_work", ask(state, "unmap_work")

    def _read(self, state: Membership, call: Call) -> Membership:
        if call.reply == "gone":
            return die(state)
        if call.reply == "refused":  # leaves the rest to the leader
            return state._replace(phase="left")
        holds = call.reply == "took" if call.verb == "start_tasks" else state.holds and call.verb != "stop_work"
        return state._replace(phase=AFTER[call.verb], holds=holds)

    def _run(self, state: Membership, call: Call) -> tuple[str, Membership]:
        """The script of a request, behind the producer's stored reply."""
        if call.verb == "beat":
            return (
                self._beat(state) if state.in_workers or self.mistake == "a beat revives the swept" else ("dead", state)
            )
        if call.verb == "start_tasks":
            return self._start_tasks(state, call.number)
        queue = call.verb in QUEUE_REQUESTS
        without = "start_work and stop_work" if queue else "registry requests"
        number, kept = state.queue_kept if queue else state.registry_kept
        if self.mistake != f"{without} without a number":
            if call.number == number:
                return kept, state
            if call.number < number:
                return "late", state
        word, state = self._queue_script(state, call) if queue else self._registry_script(state, call)
        memory = (max(call.number, number), word)
        return word, state._replace(queue_kept=memory) if queue else state._replace(registry_kept=memory)

    def _start_tasks(self, state: Membership, number: int) -> tuple[str, Membership]:
        if state.fence is None:
            return "gone", state
        last, took = state.fence
        if number < last:
            return "late", state
        if number > last:
            took = not state.claim
            state = state._replace(fence=(number, took), claim=True)
        return "took" if took else "empty", state

    def _queue_script(self, state: Membership, call: Call) -> tuple[str, Membership]:
        if call.verb == "stop_work":
            return "ok", state._replace(fence=None, claim=False)
        number = 0 if self.mistake == "start_work begins the start numbers anew" else call.number
        return "ok", state._replace(fence=(number, False))

    def _registry_script(self, state: Membership, call: Call) -> tuple[str, Membership]:
        if call.verb == "start_worker":
            if state.in_dying and self.mistake != "a swept peer keeps its worker id":
                return "gone", state
            return "ok", state._replace(in_workers=True, key=True)
        if not state.in_workers and not (call.verb == "map_work" and self.mistake == "map_work does not ask Workers"):
            return "gone", state
        if call.verb == "stop_worker":
            if state.work_map:
                return "refused", state
            return "ok", state._replace(in_workers=False, key=False)
        return "ok", state._replace(work_map=call.verb == "map_work")

    def _leader_steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        missing = state.in_workers and not state.key
        if state.look and not missing:
            yield "the leader looks", "the key is there or the worker gone", state._replace(look="", beaten=False)
        elif missing and not state.look:
            yield "the leader looks", "the key is missing", state._replace(look="once", beaten=False)
        elif state.look == "once" and self.mistake != "dead at one look" and (state.beaten or not state.beats):
            after = state._replace(look="twice", excused=state.excused or state.phase == "out")
            yield "the leader looks", "a beat later it is still missing", after
        if state.look == "twice" or (state.look and self.mistake == "dead at one look"):
            detail, after = "the key is back", state._replace(look="")
            if missing:
                detail, after = "from Workers to Dying", after._replace(in_workers=False, in_dying=True)
            yield "condemn_worker", detail, after

    def _sweep_steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        if not state.in_dying:
            return
        if state.work_map and not state.failed:
            yield "fail_worker", "by the sweep", fail(state)._replace(failed=True)
        if state.work_map and state.failed:
            yield "the sweeper unmaps", "", state._replace(work_map=False, failed=False)
        if not state.work_map or self.mistake == "forget_worker ignores the WorkMap":
            yield "forget_worker", "", state._replace(in_dying=False, failed=False)

    def _audit_steps(self, state: Membership) -> Iterator[tuple[str, str, Membership]]:
        if self.mistake == "a fence outlives its registration":
            return
        registered = state.in_workers or state.in_dying
        first, second = state.fence is not None, not registered
        names = ["the audit reads the fence", "the audit reads Workers"]
        if self.mistake == "the audit reads Workers before the fence":
            first, second = second, first
            names.reverse()
        needed = state.fence is not None and not registered
        if not state.audit and first and (needed or state.early_audits):
            after = state._replace(early_audits=state.early_audits - (not needed))
            yield names[0], "the worker may be a stray", after._replace(audit="suspects")
        elif state.audit == "suspects":
            detail = "it is a stray" if second else "it is none"
            yield names[1], detail, state._replace(audit="knows" if second else "")
        elif state.audit == "knows":
            yield "fail_worker", "by the audit", fail(state)._replace(audit="")

    def broken(self, state: Membership) -> str | None:
        if state.claim and state.fence is None:
            return "an orphan: a claim of a worker that is not in the fence"
        if not state.beats:
            return None
        if state.in_dying and not state.excused:
            return "a worker that beats was condemned"
        if state.phase != "serving" or state.call is not None or not state.in_workers:
            return None
        if state.fence is None:
            return "a worker that beats and serves was thrown out of the fence"
        if state.claim and not state.holds:
            return "a claim that its living worker does not know"
        return None

    def restless(self, state: Membership) -> str | None:
        is_there = {
            "Workers": state.in_workers,
            "Dying": state.in_dying,
            "keepalive": state.key,
            "WorkMap": state.work_map,
            "fence": state.fence is not None,
            "claim": state.claim,
        }
        serving = state.phase == "serving"
        should_be = {"Workers": state.beats, "keepalive": state.beats}
        if state.beats:
            should_be |= {"WorkMap": serving, "fence": serving, "claim": serving and state.holds}
        for thing, there in is_there.items():
            if there != should_be.get(thing, False):
                where = f"{thing} {'holds' if there else 'lacks'} it for ever"
                return f"the peer is {state.process} and {state.phase}; {where}"
        return None


def ask(state: Membership, verb: str) -> Membership:
    """The peer sends its next request."""
    return state._replace(number=state.number + 1, call=Call(verb, state.number + 1))


def die(state: Membership) -> Membership:
    """The peer hears that this worker id is dead: it cancels its handlers and goes on under a fresh one."""
    unread = (state.call,) if state.call is not None and not state.call.reply else ()
    return state._replace(phase="dead", holds=False, call=None, late=tuple(sorted((*state.late, *unread))))


def fail(state: Membership) -> Membership:
    """`fail_worker`: out of the fence, the claims to the front."""
    return state._replace(fence=None, claim=False)
