"""Another program writes an odd value into one field of a job's record: every field, every value, all in one queue of one worker.

Honest tasks and jobs beside them run as they should, the worker stays, and nothing of the odd jobs is left behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import trio

import worqr
from tests.ops.batches import follow_up, opened
from tests.ops.driver import PAST, Desk
from tests.peer.tools import QUICK, serving, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.keys import BatchKeys
from worqr.peer.leader import scanner

VALUES = (b"", b"abc", b"-1", b"1.5", b"1e308", b"nan", b"inf", b"1" + b"0" * 20, b"\xff\xfe", b"x" * 10_000, b"\xc1")
FIELDS = (
    *("run_at", "queued", "first", "last", "expires", "expires_at", "retried_at", "latest", "scheduled_for"),
    *("failures", "stalls", "timeouts", "started", "suspect", "twin", "meta", "batch", "batch_ended", "failed"),
    *("max_failures", "max_stalls", "max_timeouts", "min_backoff", "max_backoff", "jitter", "retry_on", "fail_on"),
    *("timeout", "result_ttl", "tries", "saved", "saved_number", "saved_size", "step:x", "error_type", "error_message"),
    *("update_low", "update_high", "claim", "worker", "progress", "message", "cancel_reason", "id", "lane"),
)
ODD = [(field, value) for field in FIELDS for value in VALUES]
TWICE = worqr.RetryPolicy(min_backoff=0, max_failures=2)
HONEST = 60
"""Raw tasks, and as many jobs, that are spread among the odd ones."""


class Work:
    """A handler that counts its runs. Tasks may be held until a test lets them go, and odd ones may fail then."""

    def __init__(self, *, holds: bool = False, fails: bool = False) -> None:
        self.runs: Counter[bytes] = Counter()
        self.gate = trio.Event()
        self.fails = fails
        if not holds:
            self.gate.set()

    async def __call__(self, task: bytes) -> None:
        self.runs[task] += 1
        await self.gate.wait()
        if self.fails and task.startswith(b"odd"):
            raise ValueError(task)

    def honest_runs(self) -> set[int]:
        return {self.runs[b"%s %d" % (kind, n)] for kind in (b"raw", b"job") for n in range(HONEST)}


class Scene:
    """Odd jobs, `odd N`, and honest ones among them, in one queue."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.client = server.client()
        self.desk = Desk(self.client, prefix)
        self.q = self.desk.q
        self.mesh = worqr.Mesh(server.tcp_url, prefix=prefix, keepalive=1)

    def enqueue(self, *, run_at: int | None = None) -> None:
        """Enqueue all of them. With `run_at`, the jobs are scheduled."""
        when = {} if run_at is None else {"run_at": run_at}
        jobs = [({"id": f"odd {n}", **when}, b"odd %d" % n) for n in range(len(ODD))]
        kept = {"result_ttl": "600000"}
        honest = [({"id": f"job {n}", "fields": kept, **when}, b"job %d" % n) for n in range(HONEST)]
        step = len(jobs) // HONEST
        for n in range(HONEST):
            some = jobs[n * step : (n + 1) * step if n + 1 < HONEST else None]
            self.desk.call(ops.dispatch_jobs(self.q, [*some, honest[n]]))
            self.desk.put(b"raw %d" % n)

    def spoil(self, key_of: Callable[[str], str], *, but: str = "") -> None:
        """Write the odd values into the records of the odd jobs, into all fields `but` one."""
        with self.client.pipeline(transaction=False) as pipe:
            for n, (field, value) in enumerate(ODD):
                if field != but:
                    pipe.hset(key_of(f"odd {n}"), field, value)
            pipe.execute()

    def now(self) -> int:
        """The server's time in ms."""
        seconds, micros = self.client.time()  # type: ignore[misc]
        return int(seconds) * 1000 + int(micros) // 1000

    async def serve(self, work: Work, task_status: trio.TaskStatus[None]) -> None:
        async with serving(self.mesh, "Q1", work, room=1000, retry=QUICK):
            task_status.started()
            await trio.sleep_forever()

    def hold(self, worker: str) -> list[int]:
        """Let a worker that is no program hold all tasks."""
        self.desk.register(worker, queues=["Q1"])
        self.desk.enter(worker)
        return self.desk.take(worker, len(ODD) + 2 * HONEST)

    def left(self) -> list[str]:
        """What is left: tasks that wait or run, their records, and claims that no worker holds."""
        found = [self.desk.short(key.decode("latin-1")) for key in self.desk.all_keys()]
        live = ("waiting", ":suspects", ":claim:", ":claims:", ":active:", ":job:", ":due", ":blocked", ":cancelling")
        return [name for name in found if name.startswith(live) and not self.is_elsewhere(name)]

    def is_elsewhere(self, name: str) -> bool:
        """True for a job whose record says that it waits in another lane. No reference is there."""
        return any(name == f":job:odd {n}" for n, (field, _) in enumerate(ODD) if field == "lane")

    async def ends(self, work: Work, runs: int = 1) -> None:
        """Wait until everything has ended, then compare."""
        await until(lambda: not self.left(), within=60)
        assert work.honest_runs() == {runs}
        results = [self.client.hget(self.q.result(f"job {n}"), "outcome") for n in range(HONEST)]
        assert set(results) == {b"finished"}
        assert not self.client.exists(self.q.base + "-fail")


@pytest.fixture
def scene(server: Server, prefix: str, expects_left: Callable[..., None]) -> Scene:
    expects_left("*")
    return Scene(server, prefix)


@pytest.fixture(autouse=True)
def no_bug(caplog: pytest.LogCaptureFixture) -> object:
    """No line of the log speaks of a bug, and no worker is lost."""
    yield
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "bug" in line or line.startswith(("worker.lost", "settle.refused"))] == []


async def test_while_it_waits(scene: Scene) -> None:
    work = Work()
    scene.enqueue()
    scene.spoil(scene.q.job)
    async with serving(scene.mesh, "Q1", work, retry=QUICK, concurrency=50):
        await scene.ends(work)
    assert scene.client.zcard(scene.q.undecodable) > 200, "what cannot be read is in the dead-letter queue"


async def test_while_it_is_scheduled(scene: Scene) -> None:
    work = Work()
    scene.enqueue(run_at=scene.now() + 1500)
    scene.spoil(scene.q.job)
    async with serving(scene.mesh, "Q1", work, retry=QUICK):
        await scene.ends(work)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
async def test_while_it_runs(scene: Scene, fails: bool) -> None:
    work = Work(holds=True, fails=fails)
    scene.enqueue()
    async with serving(scene.mesh, "Q1", work, room=1000, retry=TWICE):
        await until(lambda: work.runs.total() == len(ODD) + 2 * HONEST)
        scene.spoil(scene.q.active)
        work.gate.set()
        await scene.ends(work)
    assert scene.client.zcard(scene.q.failed) + scene.client.zcard(scene.q.undecodable) >= (len(ODD) if fails else 0)


async def test_while_its_worker_leaves(scene: Scene) -> None:
    work = Work(holds=True)
    scene.enqueue()
    async with serving(scene.mesh, "Q1", work, room=1000, grace=0):
        await until(lambda: work.runs.total() == len(ODD) + 2 * HONEST)
        scene.spoil(scene.q.active)
    work.gate.set()
    async with serving(scene.mesh, "Q1", work, retry=QUICK):
        await scene.ends(work, runs=2)


async def test_while_its_worker_is_dead(scene: Scene) -> None:
    work = Work()
    scene.enqueue()
    scene.hold("dead")
    scene.spoil(scene.q.active)
    scene.client.delete(scene.desk.g.worker("dead"))
    async with serving(scene.mesh, "Q1", work, retry=QUICK):
        await scene.ends(work)


@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
async def test_while_it_is_cancelled(scene: Scene, runs: bool) -> None:
    work = Work(holds=runs)
    scene.enqueue()
    async with trio.open_nursery() as nursery:
        if runs:
            await nursery.start(scene.serve, work)
            await until(lambda: work.runs.total() == len(ODD) + 2 * HONEST)
        scene.spoil(scene.q.active if runs else scene.q.job)
        for n in range(len(ODD)):
            scene.desk.call(ops.cancel_job(scene.q, f"odd {n}", "why"))
        if not runs:
            await nursery.start(scene.serve, work)
        work.gate.set()
        await scene.ends(work)
        nursery.cancel_scope.cancel()


async def test_while_it_is_in_the_dead_letter_queue(scene: Scene) -> None:
    work = Work(fails=True)
    scene.enqueue()
    async with serving(scene.mesh, "Q1", work, retry=worqr.RetryPolicy(max_failures=1)):
        await scene.ends(work)
        claims = {
            name.decode(): claim.decode() for name, claim in scene.client.hgetall(scene.q.base + ":aside").items()
        }
        assert len(claims) == len(ODD)
        work.fails = False
        scene.spoil(lambda name: scene.q.base + ":aside:" + claims[name])
        retried = scene.desk.call(ops.retry_aside(scene.q, "failed", [int(claim) for claim in claims.values()]))
        assert retried > len(ODD) * 0.9
        await scene.ends(work)


async def test_while_it_is_in_a_batch(scene: Scene) -> None:
    """The batch ends when all of them have. A member whose record names another batch is lost: the leader finds that."""
    work, desk = Work(), scene.desk
    batch = opened(desk, **follow_up("otherwise", scene.q, b"otherwise"))
    member = batch.options()
    jobs = [({"id": f"odd {n}", "batch": member}, b"odd %d" % n) for n in range(len(ODD))]
    kept = {"result_ttl": "600000"}
    jobs += [({"id": f"job {n}", "batch": member, "fields": kept}, b"job %d" % n) for n in range(HONEST)]
    desk.call(ops.dispatch_jobs(scene.q, jobs))
    desk.put(*(b"raw %d" % n for n in range(HONEST)))
    scene.spoil(scene.q.job, but="lane")
    batch.seal()
    scene.client.hset(BatchKeys(scene.q).outbox, mapping={f"odd {n}": value for n, value in enumerate(VALUES)})
    async with serving(scene.mesh, "Q1", work, retry=QUICK):
        await until(lambda: set(scene.left()) == set())
        with trio.fail_after(PATIENCE):
            while not work.runs[b"otherwise"]:
                scene.client.zadd(BatchKeys(scene.q).batches, {"b": PAST})  # the leader looks at it with its next scan
                await trio.sleep(0.1)
        await scene.ends(work)
    counted = batch.counts()
    assert counted["added"] == len(jobs)
    assert counted["finished"] + counted["failed"] + counted["lost"] == len(jobs)
    assert work.runs[b"otherwise"] == 1
    assert not scene.client.exists(BatchKeys(scene.q).outbox), "what is no message is dropped"


async def test_when_the_claims_of_a_worker_are_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tasks run elsewhere, whatever is in their records; what another worker runs stays with it."""
    monkeypatch.setattr(scanner, "CLAIM_AGE", 0.0)
    monkeypatch.setattr(scanner, "PASS_EVERY", 0.0)
    monkeypatch.setattr(scanner, "PAGE_EVERY", 0.0)
    monkeypatch.setattr(scanner, "SCAN_EVERY", 0.2)
    work = Work()
    scene.enqueue()
    scene.hold("forgotten")
    scene.spoil(scene.q.active)
    scene.client.delete(scene.q.claims("forgotten"), scene.q.workers, scene.q.policy("forgotten"))
    scene.client.srem(scene.desk.g.registered, "forgotten")
    held = Work(holds=True)
    async with serving(scene.mesh, "Q2", held), serving(scene.mesh, "Q1", work, retry=QUICK):
        await scene.mesh.queue("Q2").enqueue(b"long")
        await scene.ends(work)
        held.gate.set()
        await until(lambda: not scene.client.exists(f"{scene.desk.prefix}:{{Q2}}:claims"))
    assert held.runs == {b"long": 1}
    said = [record for record in caplog.records if record.getMessage().startswith("adopt_claims")]
    assert {record.queue for record in said} == {"Q1"}  # type: ignore[attr-defined]
    assert sum(record.count for record in said) == len(ODD) + 2 * HONEST  # type: ignore[attr-defined]
