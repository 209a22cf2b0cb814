"""Runs in worker processes: what they see, what comes back, what they say meanwhile; how they end is `test_children_ending`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.peer import process_jobs as jobs
from tests.peer.processes import FENCE, LONG, Desk, open_pool, wait_dead
from tests.support.children import ROOT, Child
from worqr import Failure, Retry, Undecodable, UsageError
from worqr.peer.executors.processes import pool as pool_module
from worqr.peer.executors.processes.pool import Renewal
from worqr.policy import ChildError, Policy, Stalled
from worqr.remote_error import remote_error
from worqr.validation import name_of


def value(result: Any) -> Any:
    """What was returned as JSON."""
    kind, encoded = result
    assert kind == "json"
    return msgspec.json.decode(encoded)


# What they see


async def test_a_job_sees_the_context_that_it_would_see_in_the_loop() -> None:
    record = {"failures": "2", "stalls": "1", "timeouts": "1", "meta": '{"tenant":"7"}', "max_failures": "3"}
    record |= {"run_at": "1900000000000", "scheduled_for": "1900000001000"}
    async with open_pool() as pool:
        seen = value(await pool.run(jobs.context, b"payload", record=record))
    due, nominal = datetime.fromtimestamp(1_900_000_000, UTC), datetime.fromtimestamp(1_900_000_001, UTC)
    facts: dict[str, object] = {"id": "x", "queue": "Q1", "task": "payload", "fence": FENCE, "meta": {"tenant": "7"}}
    facts |= {"failures": 2, "stalls": 1, "timeouts": 1, "attempt": 5, "last_attempt": True}
    facts |= {"run_at": str(due), "scheduled_for": str(nominal)}
    assert seen == facts | {"cancel_reason": None, "check_cancelled": None, "deadline": None}


async def test_a_raw_task_does_too_and_its_result_goes_nowhere() -> None:
    desk = Desk(Policy(result_ttl=60))
    async with open_pool() as pool:
        assert await pool.run(jobs.echo, b"raw", raw=True) is None
        assert await pool.run(jobs.count, raw=True, desk=desk) == ("none", b"")  # by what it said it became a job


async def test_a_deadline_is_the_same_moment_there_however_long_the_process_takes_to_start() -> None:
    deadline = time.monotonic() + 1000
    async with open_pool() as pool:
        assert value(await pool.run(jobs.context, deadline=deadline))["deadline"] == deadline


async def test_a_thread_of_the_function_is_not_the_run() -> None:
    async with open_pool() as pool:
        assert value(await pool.run(jobs.no_context)) == "unknown"


async def test_the_parents_path_and_environment_hold_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "on_the_path.py").write_text("import os\ndef told(task): return os.environ['WORQR_TEST'].encode()\n")
    monkeypatch.setenv("WORQR_TEST", "as set")
    monkeypatch.syspath_prepend(tmp_path)
    import on_the_path  # type: ignore[import-not-found]

    async with open_pool() as pool:
        assert await pool.run(on_the_path.told) == ("bytes", b"as set")


# What comes back


async def test_bytes_cross_as_they_are() -> None:
    async with open_pool(1) as pool:
        for task in (b"", b"\x00\xff", b"x" * 10 * 1024 * 1024, bytes(range(256)) * 1000):
            assert await pool.run(jobs.echo, task) == ("bytes", task)


async def test_a_result_that_nobody_keeps_does_not_cross() -> None:
    async with open_pool() as pool:
        assert await pool.run(jobs.echo, b"x", policy=Policy()) is None
        assert await pool.run(jobs.not_json, policy=Policy()) is None


async def test_a_result_that_cannot_be_kept_is_a_failure_for_good() -> None:
    async with open_pool(max_result=10) as pool:
        with pytest.raises(Failure, match="neither bytes nor JSON"):
            await pool.run(jobs.not_json)
        with pytest.raises(Failure, match="over the limit of 10"):
            await pool.run(jobs.echo, b"eleven bytes")
        assert await pool.run(jobs.echo, b"ten bytes!") == ("bytes", b"ten bytes!")


async def test_an_error_crosses_as_names_and_text_with_what_was_written_to_stderr() -> None:
    async with open_pool() as pool:
        with pytest.raises(ChildError) as caught:
            await pool.run(jobs.fail, b"refused")
    error = caught.value
    assert str(error) == "tests.peer.process_jobs.Down: refused"
    assert error.names == {name_of(kind) for kind in jobs.Down.__mro__}
    remote = error.remote
    assert (remote.type, remote.message) == ("tests.peer.process_jobs.Down", "refused")
    assert remote.traceback.startswith('Traceback (most recent call last):\n  File "')
    assert "processes/worker_main.py" not in remote.traceback
    assert remote.traceback.endswith("Down: refused\nstderr:\nit went wrong\n")


RAISED: list[tuple[Any, str, str]] = [
    (jobs.leave, "SystemExit", "3"),
    (jobs.interrupt, "KeyboardInterrupt", ""),
    (jobs.fail_unprintably, "tests.peer.process_jobs.Unprintable", "<its text cannot be read: RuntimeError>"),
    (jobs.late, "TypeError", "returned coroutine, not run yet"),
]


async def test_whatever_is_raised_is_an_error_of_the_run_and_the_process_goes_on() -> None:
    async with open_pool(1) as pool:
        before = await pool.run(jobs.pid)
        for handler, kind, text in RAISED:
            with pytest.raises(ChildError) as caught:
                await pool.run(handler)
            assert caught.value.remote.type == kind
            assert text in caught.value.remote.message
            assert not isinstance(caught.value, Stalled)
        assert await pool.run(jobs.pid) == before


async def test_what_is_raised_on_purpose_crosses_as_it_is() -> None:
    async with open_pool() as pool:
        with pytest.raises(Failure, match="^never$") as failed:
            await pool.run(jobs.give_up)
        with pytest.raises(Undecodable, match="^no sense$"):
            await pool.run(jobs.garbage)
        with pytest.raises(Retry, match="^later$") as later:
            await pool.run(jobs.again)
        with pytest.raises(Retry, match="^then$") as then:
            await pool.run(jobs.again, b"at")
        with pytest.raises(Failure, match="^never$"):
            await pool.run(jobs.fail_and_retry)  # as a group counts everywhere
    assert (later.value.delay, later.value.run_at_ms, later.value.counted) == (5.0, None, False)
    assert (then.value.delay, then.value.run_at_ms, then.value.counted) == (
        None,
        round(jobs.FAR.timestamp() * 1000),
        True,
    )
    told = remote_error(failed.value)
    assert told.type == "worqr.Failure"
    assert 'raise worqr.Failure("never")' in told.traceback


async def test_of_stderr_the_last_of_this_run_is_kept() -> None:
    async with open_pool(1) as pool:
        with pytest.raises(ChildError) as caught:
            await pool.run(jobs.complain)
        kept = caught.value.remote.traceback.partition("stderr:\n")[2]
        assert len(kept) <= 16 * 1024
        assert kept.endswith("complaint 3998\ncomplaint 3999\n")
        await pool.run(jobs.whisper)
        with pytest.raises(ChildError) as caught:
            await pool.run(jobs.fail_silently)
        assert "stderr" not in caught.value.remote.traceback


async def test_nothing_that_is_printed_disturbs_the_pipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.executors.processes.pool.LOG_TIMEOUT", LONG)
    async with open_pool(1) as pool:
        assert await pool.run(jobs.litter, b"x") == ("bytes", b"x")
        await pool.run(jobs.whisper)
        assert await pool.run(jobs.echo, b"y") == ("bytes", b"y")
    out, err = capfd.readouterr()
    assert "text without an end" in out
    assert "whispered by the run before" in err  # passed on


async def test_what_cannot_be_imported_over_there_is_told_and_tried_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mended.py"
    good = "def f(task): return b'good'\n"
    file.write_text(good)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    import mended  # type: ignore[import-not-found]

    file.write_text("import not_there\n" + good)
    async with open_pool(1) as pool:
        with pytest.raises(ChildError) as caught:
            await pool.run(mended.f)
        assert caught.value.remote.type == "ImportError"
        assert "cannot import the function mended:f: ModuleNotFoundError: No module" in caught.value.remote.message
        assert "ImportError" in caught.value.names
        assert pool.children.pids == []  # who knows what is left of it over there
        file.write_text(good)
        assert await pool.run(mended.f) == ("bytes", b"good")


# What they say


async def test_progress_is_coalesced_and_the_last_one_wins() -> None:
    async with open_pool() as pool:
        await pool.run(jobs.count)
        assert pool.desk.said[0] == (0, "counting")
        assert pool.desk.said[-1] == (1, "counted")
        assert len(pool.desk.said) < 2000


async def test_the_last_progress_arrives_while_the_run_goes_on() -> None:
    async with open_pool() as pool, trio.open_nursery() as nursery:
        nursery.start_soon(pool.run, jobs.count_and_hold)
        await pool.desk.wait_said("counted")
        nursery.cancel_scope.cancel()


async def test_what_a_thread_left_behind_says_is_not_taken_for_the_next_run() -> None:
    async with open_pool(1) as pool:
        await pool.run(jobs.speak_later, deadline=time.monotonic() + 1000)
        await pool.run(jobs.let_speak, fence=FENCE + 1)
        assert pool.desk.said == [(None, "in turn")]
        assert pool.desk.extended == pool.desk.costs == []


async def test_a_run_can_ask_for_more_time() -> None:
    async with open_pool() as pool:
        left = value(await pool.run(jobs.extend, deadline=time.monotonic() + 10))
        assert pool.desk.extended == [100]
    assert 100 - LONG < left <= 100


async def test_a_run_without_a_timeout_gets_none_by_asking_for_time() -> None:
    async with open_pool() as pool:
        assert value(await pool.run(jobs.extend_for_ever)) == "None"
        assert pool.desk.extended == []


# Many of them


async def test_two_hundred_runs_share_two_processes() -> None:
    async with open_pool(2) as pool:
        seen: Counter[int] = Counter()

        async def run(n: int) -> None:
            seen[value(await pool.run(jobs.pid))] += 1
            assert await pool.run(jobs.echo, b"%d" % n) == ("bytes", b"%d" % n)

        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(run, n)
        assert set(seen) == set(pool.children.pids)
        assert len(seen) == 2
        assert seen.total() == 100
        again = {value(await pool.run(jobs.pid)) for _ in range(4)}
        assert len(again) == 1  # the one used last, so that the other gets old


async def test_one_after_the_other_runs_share_one_process() -> None:
    async with open_pool(2) as pool:
        pids = {value(await pool.run(jobs.pid)) for _ in range(5)}
        assert pids == set(pool.children.pids)
        assert len(pids) == 1


async def test_a_run_waits_for_a_process_and_one_that_is_cancelled_meanwhile_starts_none() -> None:
    async with open_pool(1) as pool, trio.open_nursery() as nursery:
        nursery.start_soon(pool.run, jobs.count_and_hold)
        await pool.desk.wait_said("counted")
        with trio.move_on_after(0.05) as waiting:
            await pool.run(jobs.pid)
        assert waiting.cancelled_caught
        assert len(pool.children.pids) == 1
        nursery.cancel_scope.cancel()


async def test_processes_that_nobody_needs_are_let_go_but_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("WORQR_TEST_LOG", str(log))
    monkeypatch.setattr(pool_module, "EXIT_GRACE", LONG)
    async with open_pool(3, process_lifespan=jobs.lifespan) as pool:
        desks = [Desk(Policy()) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for desk in desks:
                nursery.start_soon(partial(pool.run, jobs.count_and_hold, desk=desk))
            for desk in desks:
                await desk.wait_said("counted")
            assert len(pool.children.pids) == 3
            nursery.cancel_scope.cancel()
        assert pool.children.pids == []
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(pool.run, jobs.pid)
        old = pool.children.pids
        assert len(old) == pool.children.idle
        pool.children.end_unused(idle_for=1000)
        assert pool.children.pids == old
        pool.children.end_unused(idle_for=0)
        with trio.fail_after(LONG):
            while len(pool.children.pids) > 1:
                await trio.sleep(0.01)
        [left] = pool.children.pids
        assert value(await pool.run(jobs.pid)) == left
    lines = log.read_text().splitlines()
    assert {f"left {pid}" for pid in old} <= set(lines)


async def test_a_process_is_replaced_after_so_many_runs_and_leaves_its_lifespan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("WORQR_TEST_LOG", str(log))
    monkeypatch.setattr(pool_module, "EXIT_GRACE", LONG)
    async with open_pool(1, renewal=Renewal(runs=2), process_lifespan=jobs.lifespan) as pool:
        pids = [value(await pool.run(jobs.pid)) for _ in range(5)]
        assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
        with trio.fail_after(LONG):
            while len(pool.children.pids) > 1:
                await trio.sleep(0.01)
        assert pool.children.pids == [pids[4]]
    assert {f"left {pids[0]}", f"left {pids[2]}"} <= set(log.read_text().splitlines())


async def test_a_process_that_has_grown_is_replaced_and_a_smaller_one_is_kept() -> None:
    async with open_pool(1, renewal=Renewal(memory=1 << 20)) as pool:
        assert len({value(await pool.run(jobs.pid)) for _ in range(3)}) == 3
    async with open_pool(1, renewal=Renewal(memory=1 << 40)) as pool:
        assert len({value(await pool.run(jobs.pid)) for _ in range(3)}) == 1


# What is around them


async def test_the_lifespan_is_entered_once_and_its_value_is_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("WORQR_TEST_LOG", str(log))
    monkeypatch.setattr(pool_module, "EXIT_GRACE", LONG)
    async with open_pool(1, process_lifespan=jobs.lifespan) as pool:
        assert value(await pool.run(jobs.state)) == ["model", "run"]
        assert value(await pool.run(jobs.state)) == ["model", "run", "run"]
        pid = value(await pool.run(jobs.pid))
    assert log.read_text().splitlines() == [f"entered {pid}", f"left {pid}"]


async def test_a_lifespan_that_fails_is_a_failure_of_the_run_that_needed_it() -> None:
    async with open_pool(1, process_lifespan=jobs.broken_lifespan) as pool:
        for _ in range(2):
            with pytest.raises(ChildError, match=r"Down: no model$"):
                await pool.run(jobs.nothing)
        assert pool.children.pids == []


async def test_what_is_around_calls_is_around_each_of_them() -> None:
    async with open_pool(1, around_thread=jobs.around) as pool:
        with pytest.raises(ChildError):
            await pool.run(jobs.fail_silently)
        assert value(await pool.run(jobs.seen_around)) == ["in", "silent", "out", "in", "out"]


async def test_the_memory_limit_is_an_error_of_the_run_and_the_process_is_replaced() -> None:
    async with open_pool(1, memory_limit=4 << 30) as pool:
        before = await pool.run(jobs.pid)
        assert value(await pool.run(jobs.eat_memory, b"1000000")) == 1_000_000
        with pytest.raises(ChildError) as caught:
            await pool.run(jobs.eat_memory, b"%d" % (8 << 30))
        assert "MemoryError" in caught.value.names
        assert await pool.run(jobs.pid) != before


async def test_what_is_around_must_be_importable_only_where_there_is_a_process() -> None:
    async with open_pool(1, process_lifespan=jobs.with_local(), around_thread=jobs.with_local()) as pool:
        with pytest.raises(UsageError, match=r"^process_lifespan .* made inside a function"):
            pool.children.prepare(jobs.nothing)


async def test_what_a_process_enqueues_goes_to_the_embedded_server_of_its_parent(
    spawn: Callable[..., Child],
) -> None:
    """A server of its own would acknowledge the task, and take it along when the process ends."""
    parent = spawn("import trio; from tests.peer import embedding; trio.run(embedding.main)")
    assert await parent.line() == "the leaf ran"
    assert await parent.ended() == 0, parent.errors


# The end of a worker process with its parent: in every way there is, also those that this system does not need.


PROGRAM = """
import os, socket, subprocess, sys, time
from worqr.peer.executors.processes import worker_main as lifeline

for name in sys.argv[3:]:
    setattr(lifeline, name, lambda *_: False)
line = socket.socket(fileno=int(sys.argv[2]))
lifeline.die_with_parent(int(sys.argv[1]), line)
print(subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""
WAYS = ("_kill_group_at_hangup", "_ask_for_death_signal")


@contextmanager
def started(parent: int, *without: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that `parent` is said to have started, and the parent's end of its lifeline."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(parent), str(theirs.fileno()), *without],
        stdout=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        cwd=ROOT,
    )
    theirs.close()
    assert process.stdout is not None
    with ours, process.stdout:
        try:
            yield process, ours
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("without", [(), WAYS[:1], WAYS[1:], WAYS], ids=str)
async def test_it_and_what_it_started_end_when_the_other_end_is_closed(without: tuple[str, ...]) -> None:
    with started(os.getpid(), *without) as (process, ours):
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert process.poll() is None
        ours.close()
        await wait_dead(process.pid, grandchild)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("gone", ["closed", "another parent"])
async def test_one_whose_parent_was_gone_before_it_could_ask_ends_at_once(gone: str) -> None:
    with started(os.getppid() if gone == "another parent" else os.getpid()) as (process, ours):
        if gone == "closed":
            ours.close()
        assert process.stdout is not None
        assert process.stdout.readline() == b""
        assert process.wait() == -signal.SIGKILL
