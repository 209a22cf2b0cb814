"""The shared definitions of peers, producers and the checker: queues, policies, schedules, and how a run behaves. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

PREFIX: Final = "chaos"
KEEPALIVE: Final = 3.0

RAW, THREAD, ASYNCIO, PROCESS = "raw", "thread", "asyncio", "process"
HAND, JOBS, SINGLE, UPDATES, TICKS = "hand", "jobs", "single", "updates", "ticks"
LIMITED, LANES = "limited", "lanes"
ROOM, SAVES = "room", "saves"
FOLLOW_UPS = "follow_ups"
ROWS = "rows"
FLOW, FLOW_ASYNCIO, FLOW_THREAD, FLOW_PROCESS = "flow", "flow_asyncio", "flow_thread", "flow_process"
FLOW_BRIEF: Final = "flow_brief"
"""Workflows with a `lifetime`."""
FLOWS: Final = (FLOW, FLOW_ASYNCIO, FLOW_THREAD, FLOW_PROCESS, FLOW_BRIEF)
"""Workflows that producers start."""
FLOW_JOBS: Final = "flow_jobs"
"""Jobs that workflows start. The name of one begins with that of its workflow."""
FLOW_NESTED: Final = "flow_nested"
"""Workflows that workflows start. The name of one begins with that of the other."""
STARTED: Final = frozenset({FLOW_JOBS, FLOW_NESTED})
HEARERS = ("hears_all", "hears_some")
"""The queues that are subscribed to the topics."""
QUEUES: Final = (
    *(RAW, THREAD, ASYNCIO, PROCESS, HAND, JOBS, SINGLE, UPDATES, TICKS, LIMITED, LANES, ROOM, SAVES),
    FOLLOW_UPS,
    ROWS,
    *FLOWS,
    FLOW_JOBS,
    FLOW_NESTED,
    *HEARERS,
)
NOT_KILLED: Final = frozenset({THREAD, PROCESS, FLOW_THREAD, FLOW_PROCESS})
"""Queues whose runs may go on when the grace of their peer is over."""
SHARED_IDS: Final = frozenset({SINGLE, UPDATES})
"""Queues on which many dispatches have the same id, so that a later one may replace an earlier one."""

CONCURRENCY: Final = {LIMITED: 3, LANES: 2, ROOM: 2}
"""How many tasks of the queue run at once, or of each lane."""
STARTS, PERIOD = 40, 1.0
"""How many tasks of the queue `limited` start in so many seconds, at most."""
LANE_NAMES: Final = ("a", "b", "c", "d", "e")
ROOM_LENGTH: Final = 10
"""How many tasks of the queue `room` may wait. Its producers wait for room."""

MAX_FAILURES: Final = 3
MAX_TIMEOUTS: Final = 2
MAX_STALLS: Final = {JOBS: 3}
"""Elsewhere as many as a run may need: a worker dies every few seconds here."""
MANY: Final = 100_000
TIMEOUT: Final = 3.0
"""Seconds that a run of the queue `jobs` may take. Only runs that are meant to time out take longer."""


@dataclass(frozen=True)
class Beat:
    """One schedule.

    Attributes:
        period: in seconds.
        complete: every moment must fire, exactly once: missed ones are made up for, and overlapping ones wait.
    """

    period: float
    complete: bool


SCHEDULES: Final = {
    "steady": Beat(2.0, complete=True),
    "brisk": Beat(1.0, complete=True),
    "plain": Beat(0.7, complete=False),
}
OWED: Final = 100
"""Missed firings that worqr catches up, at most; no fault lasts that many periods."""
WAITING: Final = 100
"""Firings of one schedule that wait for the one before, at most: above that, worqr drops the oldest."""


SPOILT: Final = "spoilt"
"""Begins the id of a job whose record a foreign producer has written wrongly."""


SLOW: Final = "slow"
"""Ends the name of a task whose runs take seconds, and take their time to unwind: faults meet them at work."""


DOOMED: Final = "doomed"
"""Ends the name of a task that fails for good at every other run: a job of a batch, which is put back then."""
DEPLOYS: Final = (1, 2)
"""The versions of the application. A workflow takes one step in the first, and another one in its place in the second."""
STEPS: Final = ("one", "two")
"""The steps of a task of the queue `saves`, which saves a number before each step, and after the last one."""


HOMES: Final = (FOLLOW_UPS, RAW)
"""The home queues of batches: that of their follow-ups, and another one."""
RESULT_TTL: Final = 3600.0
"""Longer than a run, clock jumps included: a result that was kept must still be there."""
OPEN_FOR: Final = 5.0
"""Seconds after which a batch of a producer that was killed is cancelled."""


def follow_up_of(name: str, kind: str) -> str:
    """The follow-up `then` or `otherwise` of a batch or of a workflow, as a task."""
    return f"{FOLLOW_UPS}/{name}/{kind}"


FAILS, STOPS, LATE, NESTS = "fails", "stops", "late", "nests"
"""End the name of a job of a workflow: it fails for good, cancels itself, begins `LATE_BY` seconds later, or is a workflow."""
LATE_BY: Final = 20.0
DEEPEST: Final = 2
"""How many workflows may be above a workflow."""
EVENT, MAIL, HELD = "go", "mail", "held"
"""The names of the events of a workflow: of single waits, of its mailbox, and of the wait for what is never sent."""
HELD_FOR: Final = 45.0
"""Seconds that a wait lasts that its producer ends, or the lifetime of the workflow."""
LIFETIME: Final = 8.0
KEYS: Final = {
    "sleep": "sleep",
    "event 0": f"wait for {EVENT}",
    "held": f"wait for {HELD}",
    "mail 0": f"wait for {MAIL}",
}
"""The waits that a producer may end: their names in the ledger, and their keys."""
NEXT_TRY: Final = "next try of "
"""The beginning of the name of a wait for the next try of a step."""
STEP_FAILED: Final = -1
"""Stands for the result of a step that has failed for good."""
TIMED_OUT, SLEPT, OVER = "timeout", "slept", "over"
"""Stand for the value of a wait whose time is over, of a sleep, and of a wait that the lifetime of its workflow has ended."""
SUSPENDED: Final = "cancelled: suspended"
"""How a run ends that waits."""


@dataclass(frozen=True)
class Script:
    """What a workflow does, one after the other. Its name decides.

    Attributes:
        steps: how many steps it takes. If one fails for good, the workflow takes a step that undoes it, and fails.
        seconds: it sleeps as long.
        timeouts: it waits for an event, for so many seconds, once for each of them.
        sends: the seconds after its dispatch at which its producer sends an event.
        jobs: it starts these.
        awaits: how it awaits them: each, all at once, the first one and then each, not at all.
        mail: it reads a mailbox until nothing has come for so many seconds; 0: it has none.
        mails: the seconds after its dispatch at which its producer sends into the mailbox.
        held: it waits `HELD_FOR` seconds for what is never sent.
        ends: the seconds after its dispatch at which its producer ends a wait, and which.
        gives_up: it fails if a job has failed for which it has waited.
    """

    steps: int
    seconds: float
    timeouts: tuple[float, ...]
    sends: tuple[float, ...]
    jobs: tuple[str, ...]
    awaits: str
    mail: float = 0.0
    mails: tuple[float, ...] = ()
    held: bool = False
    ends: tuple[tuple[float, str], ...] = ()
    gives_up: bool = False


@cache
def script_of(flow: str) -> Script:
    """What the workflow `flow` does."""
    rng, more = random.Random(flow), random.Random(f"{flow} more")
    jobs, is_nested = rng.randint(0, 3), flow.endswith(NESTS)
    script = Script(
        rng.randint(0, 3),
        rng.choice((0.0, 0.3, 5.2)),
        tuple(rng.choice((0.5, 3.0, 9.0)) for _ in range(rng.randint(0, 2))),
        tuple(rng.choice((0.0, 0.0, 0.3, 2.0, 6.0)) for _ in range(rng.randint(0, 3))),
        tuple(f"{flow}/{n}{rng.choice(('', '', SLOW, FAILS, STOPS, LATE, LATE))}" for n in range(jobs)),
        rng.choice(("each", "gather", "first", "not")),
    )
    kinds = ["", *[DOOMED] * 3, *[NESTS] * 3 * (flow.count(NESTS) < DEEPEST)]
    held = not is_nested and (flow.startswith(FLOW_BRIEF) or more.random() < 0.3)
    always = "held" if held and not flow.startswith(FLOW_BRIEF) else ""
    ends = tuple((more.choice((0.5, 2.0, 6.0)), name) for name in KEYS if more.random() < 0.2 or name == always)
    return replace(
        script,
        jobs=(*script.jobs, *(f"{flow}/{n}{more.choice(kinds)}" for n in range(jobs, jobs + more.randint(0, 2)))),
        mail=more.choice((0.0, 0.5, 3.0)),
        mails=tuple(more.choice((0.0, 0.0, 0.3, 1.0, 2.0)) for _ in range(0 if is_nested else more.randint(0, 4))),
        held=held,
        ends=ends,
        gives_up=more.random() < 0.6,
    )


def queue_of_job(job: str) -> str:
    """The queue of a job that a workflow starts."""
    return FLOW_NESTED if job.endswith(NESTS) else FLOW_JOBS


def starters_of(task: str) -> Iterator[tuple[str, str]]:
    """The queue and the name of each workflow above a job or a workflow: first of the one that has started it."""
    while (flow := task.rpartition("/")[0]).count("/") >= 2:
        yield (FLOW_NESTED if flow.endswith(NESTS) else flow.partition("/")[0]), flow
        task = flow


def result_of(task: str) -> str:
    """The result of a run of `task`, where results are kept."""
    return f"done {task}"


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of a run: it takes `seconds`, then ends `how`."""

    seconds: float
    how: str
    """returned, error, retry (uncounted), rate limited (uncounted, and a pause), failure, broken, timeout (sleeps until it is
    cancelled), crash (of its process)
    """


def behaviour(rng: random.Random, queue: str, task: str) -> Behaviour:
    """A random behaviour. A few tasks fail at each run: which ones is decided by their name."""
    x = rng.random()
    seconds = rng.uniform(0.5, 2.0) if x < 0.02 else rng.uniform(0, 0.04) if x < 0.7 else 0.0
    if task.endswith(SLOW):
        return Behaviour(rng.uniform(0.5, 2.5), "returned")
    if task.endswith(DOOMED):
        return Behaviour(min(seconds, 0.04), "failure" if rng.random() < 0.5 else "returned")
    if queue == ROOM:
        seconds = rng.uniform(0.15, 0.4)
    if queue == SAVES:
        y = rng.random()
        return Behaviour(min(seconds, 1.0), "retry" if y < 0.3 else "error" if y < 0.4 else "returned")
    if queue == FLOW_JOBS and task.endswith(FAILS):
        return Behaviour(seconds, "failure")
    if queue in (TICKS, FOLLOW_UPS):
        return Behaviour(min(seconds, 0.04), "returned")
    if queue in (THREAD, FLOW_THREAD):
        seconds = min(seconds, 1.0)
    if queue in CONCURRENCY and rng.random() < 0.02:
        return Behaviour(seconds, "rate limited")
    if queue not in SHARED_IDS and random.Random(task).random() < 0.01:
        return Behaviour(seconds, "error")
    if queue in (PROCESS, FLOW_PROCESS) and rng.random() < 0.05:
        return Behaviour(seconds, "crash")
    if queue == JOBS and rng.random() < 0.01:
        return Behaviour(0.0, "timeout")
    y = rng.random()
    for limit, how in ((0.03, "error"), (0.05, "retry"), (0.056, "failure"), (0.06, "undecodable")):
        if y < limit:
            return Behaviour(seconds, how)
    return Behaviour(seconds, "returned")
