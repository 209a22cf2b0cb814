"""The table of states: it stands in the docs, and every move in it happens. That no other does is for the machine to find
(`tests/ops/test_job_machine.py`), which also compares the state after each step that is taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.ops.driver import Desk, desk_on
from tests.ops.job_rules import DELAY, Policy
from tests.ops.schedules import fire_schedule
from tests.ops.test_job_machine import BOOM, ERROR, FAR, PAST, JobMachine
from tests.support.children import ROOT
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.job_states import ENDS, LIVE, TRANSACTIONS, State, as_table, moves
from worqr.keys import MARKER
from worqr.lua import all_scripts
from worqr.ops import Wait
from worqr.stored_values import stored_word

Move = tuple[str, State, State]
Ending = Callable[[JobMachine, int], None]

NOW: dict[str, Any] = {}
LATER = {"run_at": FAR}


def finish(machine: JobMachine, claim: int) -> None:
    expected = machine.model.finish_tasks("A", [claim], {})
    assert machine.do(ops.finish_tasks(machine.q, "A", [claim])) == expected


def stop(machine: JobMachine, claim: int) -> None:
    expected = machine.model.stop_tasks("A", [claim])
    assert machine.do(ops.stop_tasks(machine.q, "A", [claim])) == expected


def file(machine: JobMachine, claim: int) -> None:
    """No job with an id of its own is filed in a lane: it is given back."""
    expected = machine.model.file_tasks("A", {claim: "g"})
    assert machine.do(ops.file_tasks(machine.q, "A", {claim: "g"})) == expected


def retry(*, limit: int = 9, delay: int = 0) -> Ending:
    def end(machine: JobMachine, claim: int) -> None:
        expected = machine.model.retry_task("A", claim, ERROR, "failures", limit, delay, None)
        call = ops.retry_task(machine.q, "A", claim, BOOM, counter="failures", limit=limit, delay_ms=delay)
        assert machine.do(call) == expected

    return end


def fail(*, undecodable: bool) -> Ending:
    def end(machine: JobMachine, claim: int) -> None:
        expected = machine.model.fail_task("A", claim, ERROR, "broken" if undecodable else "failed")
        assert machine.do(ops.fail_task(machine.q, "A", claim, BOOM, undecodable=undecodable)) == expected

    return end


def leave(machine: JobMachine, _claim: int) -> None:
    machine.raw(ops.stop_work(machine.q, "A", 9), machine.model.stop_work("A", 9))


def sweep(machine: JobMachine, _claim: int) -> None:
    machine.raw(ops.fail_worker(machine.q, "A", 9), machine.model.fail_worker("A", 9))


ENDINGS: list[tuple[Ending, int]] = [
    *((finish, 3), (stop, 3), (file, 3), (retry(), 3), (retry(delay=DELAY), 3), (retry(limit=1), 3)),
    *((fail(undecodable=False), 3), (fail(undecodable=True), 3), (leave, 3), (sweep, 3), (sweep, 1)),
]
"""Ways in which a run ends, and the max_stalls of its worker."""


@contextmanager
def machine_of(server: Server, seen: set[Move], *, max_stalls: int = 3) -> Iterator[JobMachine]:
    """A queue on which A works, and which is drained afterwards. It adds to `seen` what happened."""
    JobMachine.server = server
    machine = JobMachine()
    try:
        machine.join("A", Policy(max_stalls=max_stalls, keep_failed=1))
        yield machine
        machine.sound = True
        seen |= machine.seen
    finally:
        machine.teardown()


def dispatch(machine: JobMachine, **options: Any) -> None:
    machine.put([({"id": "a", **options}, b"x")])


def start(machine: JobMachine) -> int:
    machine.claim("A", 1)
    return max(machine.model.items, default=0)


def cancel(machine: JobMachine) -> None:
    machine.raw(ops.cancel_job(machine.q, "a", "why"), machine.model.cancel_job("a", "why"))


def fire(machine: JobMachine, nominal: int, run_at: int) -> None:
    expected = machine.model.fire_schedule("s", nominal, run_at, "cancel", b"x")
    call = fire_schedule(machine.q, "s", nominal, judged_at=nominal, run_at=run_at, overlap="cancel", task=b"x")
    machine.raw(call, expected)


def end_runs(server: Server, seen: set[Move]) -> None:
    """A run ends in each way: alone, marked, and with a twin that is due now or later."""
    for end, max_stalls in ENDINGS:
        for twin in (None, NOW, LATER):
            for marked in (False, True):
                with machine_of(server, seen, max_stalls=max_stalls) as machine:
                    dispatch(machine)
                    claim = start(machine)
                    if marked:
                        cancel(machine)
                    if twin is not None:
                        dispatch(machine, **twin)
                    end(machine, claim)
                    machine.check()


def fill_the_cap(server: Server, seen: set[Move]) -> None:
    """The oldest failure goes when there are too many."""
    for end, max_stalls in (*ENDINGS, (None, 3)):
        with machine_of(server, seen, max_stalls=max_stalls) as machine:
            for _ in range(2):
                machine.join("A", Policy(max_stalls=max_stalls, keep_failed=1))
                dispatch(machine, **({"run_at": PAST, "expires": "1"} if end is None else {}))
                claim = start(machine)
                if end is not None:
                    end(machine, claim)
                    machine.check()
                cancel(machine)


def move_what_waits(server: Server, seen: set[Move]) -> None:
    """Put in, postponed, due, cancelled, deleted."""
    with machine_of(server, seen) as machine:
        machine.raw(ops.enqueue(machine.q, [b"x"]), machine.model.enqueue([b"x"], front=False, max_length=None))
        for when in (NOW, LATER, NOW, LATER):
            dispatch(machine, **when)
        machine.let_come("a")
        _, pushed, _ = machine.model.promote_due(9)
        assert machine.do(ops.promote_due(machine.q, 9)) == (pushed, None, False)
        machine.check()
        dispatch(machine, **LATER)
        machine.raw(ops.promote_jobs(machine.q, ["a"]), machine.model.promote_jobs(["a"]))
        dispatch(machine, **LATER)
        machine.let_come("a")
        machine.claim("A", 9)
    for times in ((PAST, FAR), (FAR, PAST)):
        with machine_of(server, seen) as machine:
            for nominal, run_at in enumerate(times, 1):
                fire(machine, nominal, run_at)
            for job_id in tuple(machine.model.due):
                machine.let_come(job_id)
            machine.claim("A", 9)
            fire(machine, 3, PAST)


def clear_what_waits(server: Server, seen: set[Move]) -> None:
    """Cancelled and deleted, where it waits, is due and is blocked."""
    for clear in ("cancel_job", "cancel_lane", "cancel_all", "delete_queue"):
        for when, runs in ((NOW, False), (LATER, False), (NOW, True)):
            with machine_of(server, seen) as machine:
                machine.mode = "lanes" if clear == "cancel_lane" else "no lanes"
                options = when | ({"lane": "g"} if machine.laned else {})
                if runs:
                    dispatch(machine, **options)
                    start(machine)
                dispatch(machine, **options)
                if clear == "cancel_job":
                    cancel(machine)
                elif clear == "cancel_lane":
                    machine.cancel_all_of("g", 9)
                elif clear == "cancel_all":
                    machine.cancel_everything(9)
                else:
                    machine.raw(ops.delete_queue(machine.q), machine.model.delete_queue())
    with machine_of(server, seen) as machine:
        for delay in (0, DELAY):
            machine.raw(ops.enqueue(machine.q, [MARKER]), machine.model.enqueue([MARKER], front=False, max_length=None))
            retry(delay=delay)(machine, start(machine))
            machine.check()
            machine.cancel_payload(MARKER, 9)


def take_up_what_failed(server: Server, seen: set[Move]) -> None:
    for undecodable in (False, True):
        for runs in (None, False, True):
            with machine_of(server, seen) as machine:
                dispatch(machine)
                fail(undecodable=undecodable)(machine, claim := start(machine))
                machine.check()
                if runs:
                    dispatch(machine)
                    start(machine)
                kind: Any = "undecodable" if undecodable else "failed"
                script, expected = ops.retry_aside, machine.model.retry_aside
                if runs is None:
                    script, expected = ops.drop_aside, machine.model.drop_aside
                machine.raw(script(machine.q, kind, [claim]), expected(stored_word(kind), [claim]))


APPROVED = Wait("a", "event", "approved")
KEPT = {"result_ttl": "60000"}


@contextmanager
def workflow_of(server: Server, id: str = "x", *, state: str = "suspended") -> Iterator[Desk]:
    """A workflow that has begun, in this state."""
    for desk in desk_on(server, "workflows"):
        held = desk.run("A", id, workflow=True, fields=KEPT, lane="g")
        match state:
            case "suspended":
                desk.call(ops.suspend_task(desk.q, "A", held, [APPROVED]))
            case "waiting":
                desk.retry("A", held)
            case "due":
                desk.retry("A", held, delay_ms=DELAY)
            case _:
                pass
        assert desk.call(ops.job_status(desk.q, id, 0)).state == state
        yield desk


def suspend_runs(server: Server, seen: set[Move]) -> None:
    """A run is suspended, or was cancelled before, and a job of its id follows now or later."""
    with workflow_of(server):
        seen.add(("suspend_task", "active", "suspended"))
    for when in (PAST, FAR):
        with workflow_of(server, state="active") as desk:
            [held] = desk.call(ops.list_own_claims(desk.q, "A")) or []
            assert desk.dispatch("x", workflow=True, exists="cancel", run_at=when).outcome == "blocked"
            assert desk.call(ops.suspend_task(desk.q, "A", held, [APPROVED])).status == "cancelled"
            state: Any = desk.call(ops.job_status(desk.q, "x", 0)).state
            seen |= {("suspend_task", "active", "cancelled"), ("suspend_task", "blocked", state)}


def wake_what_is_suspended(server: Server, seen: set[Move]) -> None:
    for name in ("send_event", "end_wait", "promote_due", "start_tasks"):
        with workflow_of(server) as desk:
            if name == "send_event":
                assert desk.call(ops.send_event(desk.q, "x", "approved", b"none ")).status == "woke"
            elif name == "end_wait":
                assert desk.call(ops.end_wait(desk.q, "x", APPROVED.key)).status == "woke"
            else:
                desk.client.zadd(desk.q.suspended, {"x": PAST})
                desk.call(ops.promote_due(desk.q) if name == "promote_due" else ops.start_tasks(desk.q, "A", 99, 0))
            if name == "start_tasks":  # which puts it in line, and takes another one
                desk.dispatch("y")
                desk.start("A", 1)
                desk.call(ops.promote_due(desk.q))
            state: Any = desk.call(ops.job_status(desk.q, "x", 0)).state
            seen.add((name, "suspended", state))


def rewind_what_does_not_run(server: Server, seen: set[Move]) -> None:
    """A workflow runs again from its first step."""
    before: State
    for before in ("due", "suspended", "failed", "undecodable"):
        with workflow_of(server, state="active" if before in ("failed", "undecodable") else before) as desk:
            if before == "due":
                desk.call(ops.promote_jobs(desk.q, ["x"]))
                [held] = desk.take("A", 1)
            elif before == "suspended":
                desk.call(ops.end_wait(desk.q, "x", APPROVED.key))
                [held] = desk.take("A", 1)
            else:
                [held] = desk.call(ops.list_own_claims(desk.q, "A")) or []
            assert desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"none ")) == "ok"
            if before == "due":
                desk.retry("A", held, delay_ms=DELAY)
            elif before == "suspended":
                desk.call(ops.suspend_task(desk.q, "A", held, [Wait("b", "event", "other")]))
            else:
                desk.fail("A", held, undecodable=before == "undecodable")
            assert desk.call(ops.job_status(desk.q, "x", 0)).state == ("failed" if before == "undecodable" else before)
            assert desk.call(ops.rewind_job(desk.q, "x", "charge")).status == "ok"
            state: Any = desk.call(ops.job_status(desk.q, "x", 0)).state
            seen.add(("rewind_job", before, state))


def cancel_what_is_suspended(server: Server, seen: set[Move]) -> None:
    """A workflow that has begun is cancelled: its queue, its lane, itself, and for another job of its id."""
    for name in ("cancel_job", "cancel_lane", "cancel_all", "delete_queue"):
        with workflow_of(server) as desk:
            calls: dict[str, Command[Any]] = {
                "cancel_job": ops.cancel_job(desk.q, "x", "why"),
                "cancel_lane": ops.cancel_lane(desk.q, "g"),
                "cancel_all": ops.cancel_all(desk.q),
                "delete_queue": ops.delete_queue(desk.q),
            }
            desk.call(calls[name])
            while desk.call(ops.purge_queue(desk.q)):
                pass
            state: Any = desk.call(ops.job_status(desk.q, "x", 0)).state
            seen.add((name, "suspended", state))
    before: State
    for before in ("suspended", "waiting", "due"):
        with workflow_of(server, state=before) as desk:
            assert desk.dispatch("x", workflow=True, exists="cancel").outcome == "created"
            assert desk.client.hget(desk.q.older_result("x"), "outcome") == b"cancelled"
            seen.add(("dispatch_jobs", before, "cancelled"))
        with workflow_of(server, "cron:s", state=before) as desk:
            call = fire_schedule(desk.q, "s", 7, judged_at=7, run_at=PAST, overlap="cancel", task=b"x")
            assert desk.call(call) == "ok"
            assert desk.client.hget(desk.q.older_result("cron:s"), "outcome") == b"cancelled"
            seen.add(("fire_schedules", before, "cancelled"))


def test_every_move_of_the_table_happens(server: Server) -> None:
    seen: set[Move] = set()
    stories = (end_runs, fill_the_cap, move_what_waits, clear_what_waits, take_up_what_failed)
    for story in (*stories, suspend_runs, wake_what_is_suspended, rewind_what_does_not_run, cancel_what_is_suspended):
        story(server, seen)
    assert seen == set(moves())


def test_the_table_names_scripts_and_states() -> None:
    assert set(TRANSACTIONS) <= {script.name for script in all_scripts()}
    named = {state for _, before, after in moves() for state in (before, after)}
    assert named == {"new", *LIVE, *ENDS}


def test_the_table_stands_in_the_docs() -> None:
    page = ROOT / "docs" / "reference" / "job-states.md"
    assert as_table() in page.read_text("utf-8")
