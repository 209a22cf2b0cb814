"""How runs in worker processes end that do not simply return: killed, crashed, orphaned, and what of them is left: nothing."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.peer import process_jobs as jobs
from tests.peer.executors.processes.test_pool import value
from tests.peer.processes import LONG, Desk, Pool, is_alive, open_pool, wait_dead
from tests.support.children import Child
from worqr.peer.executors.processes import pool as pool_module
from worqr.policy import ChildError, Policy, Stalled


async def begun(pool: Pool, nursery: trio.Nursery, handler: Callable[[bytes], object]) -> dict[str, int]:
    """Start a run, and answer what it says first."""
    desk = Desk(Policy())

    async def run() -> None:
        await pool.run(handler, desk=desk)

    nursery.start_soon(run)
    with trio.fail_after(LONG):
        while not desk.said:
            await trio.sleep(0.01)
    facts: dict[str, int] = json.loads(desk.said[0][1])
    return facts


# Killed by us


@pytest.mark.parametrize("handler", [jobs.spin, jobs.hold_the_lock, jobs.freeze])
async def test_a_cancelled_run_is_killed_with_what_it_has_started(handler: Callable[[bytes], object]) -> None:
    async with open_pool() as pool:
        async with trio.open_nursery() as nursery:
            facts = await begun(pool, nursery, handler)
            assert all(map(is_alive, facts.values()))
            nursery.cancel_scope.cancel()
        assert not is_alive(facts["pid"])  # at once, when the run has been given up
        await wait_dead(*facts.values())
        assert pool.children.pids == []
        assert await pool.run(jobs.pid) is not None


async def test_another_run_is_not_touched_by_that() -> None:
    async with open_pool(2) as pool, trio.open_nursery() as nursery:
        first = await begun(pool, nursery, jobs.hold)
        async with trio.open_nursery() as doomed:
            second = await begun(pool, doomed, jobs.spin)
            doomed.cancel_scope.cancel()
        assert is_alive(first["pid"])
        assert pool.children.pids == [first["pid"]]
        assert not is_alive(second["pid"])
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_pool_kills_what_runs_and_what_was_left_behind() -> None:
    async with open_pool(3) as pool:
        left_behind = value(await pool.run(jobs.leave_behind))
        assert is_alive(left_behind)
        children, pids = pool.children, pool.children.pids
        async with trio.open_nursery() as nursery:
            facts = await begun(pool, nursery, jobs.hold_the_lock)
            nursery.cancel_scope.cancel()
    assert children.pids == []
    await wait_dead(left_behind, *pids, *facts.values())


async def test_the_pool_ends_though_a_process_does_not_leave() -> None:
    async with open_pool(1) as pool:
        pid = value(await pool.run(jobs.pid))
        os.kill(pid, signal.SIGSTOP)  # idle, and deaf
    assert not is_alive(pid)


# Ended by themselves, or by others


CRASHES = ((b"segv", "was killed by SIGSEGV"), (b"kill", "was killed by SIGKILL"), (b"exit", "ended with exit code 0"))


async def test_a_crash_is_a_stall_that_tells_what_it_was() -> None:
    async with open_pool(1) as pool:
        for how, text in CRASHES:
            with pytest.raises(Stalled) as caught:
                await pool.run(jobs.crash, how)
            remote = caught.value.remote
            assert remote.type == "Stalled"
            assert text in remote.message
            assert remote.traceback.startswith("stderr:\nabout to crash\n")
            assert ("string_at" in remote.traceback) == (how == b"segv")  # where it was, by Python's own fault handler
        assert await pool.run(jobs.echo, b"goes on") == ("bytes", b"goes on")


async def test_a_process_that_its_worker_kills_is_not_said_to_be_killed_by_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "worqr")
    async with open_pool(1) as pool:
        with pytest.raises(Stalled, match="the process that ran it ended with exit code 1"):
            await pool.run(jobs.close_descriptors)
        with pytest.raises(Stalled, match="was killed by its worker, because it had closed its connection"):
            await pool.run(jobs.close_descriptors, b"go on")
        with trio.move_on_after(0.5):
            await pool.run(jobs.hold)
        with trio.fail_after(LONG):
            while pool.children.pids:
                await trio.sleep(0.01)
    assert "memory" not in caplog.text
    assert re.search(r"process \d+ was killed by its worker$", caplog.text, re.MULTILINE)


async def test_text_that_the_locale_lacks_is_printed_with_escapes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    async with open_pool(1) as pool:
        assert await pool.run(jobs.print_unicode) == ("none", b"")
    assert r"gedruckt: \xfc \u65e5\u672c" in capfd.readouterr().out


async def test_a_process_killed_from_outside_takes_its_grandchildren_along_and_nobody_else() -> None:
    async with open_pool(2) as pool, trio.open_nursery() as nursery:
        other = await begun(pool, nursery, jobs.hold)
        with pytest.RaisesGroup(Stalled):
            async with trio.open_nursery() as doomed:
                facts = await begun(pool, doomed, jobs.spin)
                os.kill(facts["pid"], signal.SIGKILL)
        await wait_dead(*facts.values())
        assert is_alive(other["pid"])
        nursery.cancel_scope.cancel()


async def test_an_idle_process_that_is_killed_is_replaced() -> None:
    async with open_pool(1) as pool:
        pid = value(await pool.run(jobs.pid))
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(LONG):
            while pool.children.pids:
                await trio.sleep(0.01)
        assert value(await pool.run(jobs.pid)) != pid


async def test_one_that_is_found_dead_costs_the_run_nothing() -> None:
    async with open_pool(1) as pool:
        for _ in range(3):
            pid = value(await pool.run(jobs.pid))
            os.kill(pid, signal.SIGKILL)
            while is_alive(pid):  # and the loop has no chance to hear of it
                pass
            assert pool.children.idle == 1
            assert value(await pool.run(jobs.pid)) != pid


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a closed socket does not tell what was left unread")
async def test_one_that_dies_with_the_run_before_its_eyes_costs_nothing_either() -> None:
    async with open_pool(1) as pool, trio.open_nursery() as nursery:
        pid = value(await pool.run(jobs.pid))
        os.kill(pid, signal.SIGSTOP)
        found: list[int] = []

        async def run() -> None:
            found.append(value(await pool.run(jobs.pid)))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(LONG):
            while not found:
                await trio.sleep(0.01)
        assert found != [pid]


@pytest.mark.parametrize("junk", [b"\x00\x00\x00\x04junk", b"hello, world\n"])
async def test_who_writes_into_the_pipe_of_its_peer_is_killed(junk: bytes) -> None:
    async with open_pool(1) as pool:
        with pytest.raises(Stalled, match="it wrote into a descriptor that is not its own"):
            await pool.run(jobs.write_anywhere, junk)
        assert await pool.run(jobs.echo, b"goes on") == ("bytes", b"goes on")


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux")
async def test_it_goes_before_its_peer_when_memory_runs_out() -> None:
    async with open_pool(1) as pool:
        assert value(await pool.run(jobs.expendable)) >= 500


async def test_a_fork_that_holds_on_to_everything_does_not_keep_the_run() -> None:
    async with open_pool(1) as pool:
        try:
            with pytest.raises(Stalled, match="exit code 9"):
                await pool.run(jobs.die_holding)
        finally:
            os.kill(json.loads(pool.desk.said[0][1])["fork"], signal.SIGKILL)


async def test_a_fork_that_goes_on_answers_nothing_and_leaves_no_lifespan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("WORQR_TEST_LOG", str(log))
    monkeypatch.setattr(pool_module, "EXIT_GRACE", LONG)
    async with open_pool(1, process_lifespan=jobs.lifespan) as pool:
        pid = value(await pool.run(jobs.fork_and_go_on))
        assert [pid] == pool.children.pids
        assert value(await pool.run(jobs.pid)) == pid
    assert log.read_text().splitlines() == [f"entered {pid}", f"left {pid}"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_fork_that_reports_is_told_who_can() -> None:
    async with open_pool(1) as pool:
        for what in ("progress", "cost"):
            assert "in the process itself" in value(await pool.run(jobs.report_in_fork, what.encode()))


async def test_signals_for_all_of_a_service_are_not_for_them_but_for_what_they_start() -> None:
    async with open_pool(1) as pool:
        ended = value(await pool.run(jobs.shrug_off))
        assert ended == f"{-signal.SIGTERM} {-signal.SIGTERM}"


async def test_without_process_descriptors_it_is_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    await test_a_cancelled_run_is_killed_with_what_it_has_started(jobs.spin)
    await test_a_crash_is_a_stall_that_tells_what_it_was()
    await test_an_idle_process_that_is_killed_is_replaced()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
async def test_an_idle_process_uses_no_cpu() -> None:
    async with open_pool(1) as pool:
        pid = value(await pool.run(jobs.babble_on))
        used: list[float] = []
        while not used or used[-1] >= 0.1:  # what it left behind has to end first
            assert len(used) < 6, used
            before = cpu_of(pid)
            await trio.sleep(1)
            used.append(cpu_of(pid) - before)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Descriptors


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_nothing_of_the_parents_is_open_there_and_the_pipe_is_not_handed_on() -> None:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_inheritable(fd, True)
    try:
        async with open_pool(1) as pool:
            count, *further = value(await pool.run(jobs.descriptors))
    finally:
        os.close(reading)
        os.close(writing)
    assert count == 6  # the standard streams, the pipe, the lifeline, and the list itself
    assert further == [0, 1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_nothing_is_left_open_here() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with open_pool(2) as pool:
        await pool.run(jobs.pid)
        with pytest.raises(Stalled):
            await pool.run(jobs.crash, b"exit")
        with pytest.raises(ChildError):
            await pool.run(jobs.fail)
        async with trio.open_nursery() as nursery:
            await begun(pool, nursery, jobs.spin)
            nursery.cancel_scope.cancel()
    assert len(os.listdir("/proc/self/fd")) <= before


# Orphaned


@contextmanager
def to_be_gone(pids: list[int]) -> Iterator[None]:
    """Whatever becomes of these processes in the test, nothing is left of them."""
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


PARENT = """
    import os, sys
    import trio
    from tests.peer import process_jobs as jobs
    from tests.peer.processes import open_pool
    from tests.peer.executors.processes.test_worker import begun

    async def main():
        async with open_pool(2) as pool:
            await pool.run(jobs.nothing)
            idle = pool.children.pids
            async with trio.open_nursery() as nursery:
                facts = await begun(pool, nursery, getattr(jobs, sys.argv[1]))
                await pool.run(jobs.nothing)
                print(*facts.values(), *pool.children.pids, flush=True)
                END
                await trio.sleep_forever()

    trio.run(main)
"""


@pytest.mark.parametrize("handler", ["spin", "hold_the_lock", "freeze"])
async def test_they_die_with_their_parent_and_so_do_their_grandchildren(
    spawn: Callable[..., Child], handler: str
) -> None:
    parent = spawn(PARENT.replace("END", "pass"), handler)
    pids = [int(pid) for pid in (await parent.line(LONG)).split()]
    with to_be_gone(pids):
        assert all(map(is_alive, pids))
        parent.kill()
        await wait_dead(*pids)


@pytest.mark.parametrize("end", ["raise ValueError", "os._exit(1)", "nursery.cancel_scope.cancel()"])
async def test_however_their_parent_ends(spawn: Callable[..., Child], end: str) -> None:
    parent = spawn(PARENT.replace("END", end), "spin")
    pids = [int(pid) for pid in (await parent.line(LONG)).split()]
    with to_be_gone(pids):
        await parent.ended(LONG)
        await wait_dead(*pids)


async def test_a_fork_of_the_parent_does_not_keep_them_alive(spawn: Callable[..., Child]) -> None:
    """It holds the parent's end of the lifeline: there the death signal of Linux ends them, if not their grandchildren."""
    fork = "os.fork() or __import__('time').sleep(100)"
    parent = spawn(PARENT.replace("END", fork), "hold")
    pids = [int(pid) for pid in (await parent.line(LONG)).split()]
    with to_be_gone(pids):
        parent.kill()
        await wait_dead(*pids)


async def test_ctrl_c_at_the_terminal_is_not_for_them() -> None:
    async with open_pool(1) as pool:
        pid = value(await pool.run(jobs.pid))
        assert os.getsid(pid) == os.getpgid(pid) == pid != os.getsid(0)
