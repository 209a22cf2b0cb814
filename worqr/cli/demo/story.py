"""The steps of the demo, in order: enqueue, kill a peer, cancel a long task, finish, check that nothing is missing.

The demo itself is a member of the mesh too: it takes the results by hand, and puts what it learns on the `Board`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import trio

import worqr
from worqr.cli.demo.board import Board, Killed, PeerLine
from worqr.cli.demo.fleet import Fleet, PeerDied, PeerProcess, open_fleet
from worqr.cli.demo.peer import AT_ONCE
from worqr.cli.demo.report import FILES, LONG, LONG_TASK, RESULTS, decode
from worqr.cli.demo.summary import plural
from worqr.embedded import open_embedded

LOOK_EVERY = 0.2
READY_WITHIN = 60.0
KILL_AFTER = 0.3
"""The part of the files that is done when the peer is killed."""
SETTLE = 0.03
"""Seconds after which a frozen process has really stopped."""
LONG_RUNS_FOR = 0.5
CANCEL_WAIT = 10.0
WORKER_ID = re.compile(r":[0-9a-f]{32}")
"""The random part of a worker id; the part before it suffices here."""
NOTHING_NEW = 30.0
"""Seconds without a new result after which the missing ones are called lost."""


async def tell_story(files: list[str], peers: int, show: Callable[[Board], None]) -> Board:
    """The whole demo; `show` is called several times a second, and the board is the outcome."""
    board = Board(frozenset(files), [PeerLine(f"worker-{i}", 0) for i in range(1, peers + 1)], AT_ONCE)
    with _logged(board):
        await _on_a_server(board, show)
    board.ended = time.monotonic()
    show(board)
    return board


async def _on_a_server(board: Board, show: Callable[[Board], None]) -> None:
    show(board)
    async with open_embedded() as server:
        mesh = worqr.Mesh(server.url, app="worqr-demo")
        async with (
            mesh.join(grace=0) as peer,
            peer.work(RESULTS) as results,
            open_fleet(server.url, len(board.peers)) as fleet,
        ):
            async with _background(partial(_collect, results, board), partial(_watch, mesh, fleet, board, show)):
                await _play(mesh, fleet, board)
            await fleet.leave()


class _News(logging.Handler):
    """The mesh's own log lines as news: when a death was noticed, and what was given back."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.board = board

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        gave_back = getattr(record, "event", "") == "fail_worker" and getattr(record, "returned", 0) > 0
        if record.levelno >= logging.WARNING or gave_back:
            self.board.tell("log: " + WORKER_ID.sub("", text).replace("worker worker-", "worker-"))


@contextmanager
def _logged(board: Board) -> Generator[None]:
    """Show the log of the demo's own peer, and nowhere else."""
    logger, news = logging.getLogger("worqr"), _News(board)
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(news)
    try:
        yield
    finally:
        logger.removeHandler(news)
        logger.level, logger.propagate = before


@asynccontextmanager
async def _background(*loops: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Run these for the length of the block; their errors are raised unchanged, not as a group."""
    try:
        async with trio.open_nursery() as nursery:
            for loop in loops:
                nursery.start_soon(loop)
            yield
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        _, errors = group.split(trio.Cancelled)
        raise (errors or group).exceptions[0] from None


async def _collect(results: worqr.Claims, board: Board) -> None:
    """Take the results by hand, in batches. Noted first, finished then: each is seen at least once."""
    while batch := await results.take(100):
        for claim in batch:
            board.take_in(decode(claim.task))
        await results.finish(batch)


async def _watch(mesh: worqr.Mesh, fleet: Fleet, board: Board, show: Callable[[Board], None]) -> None:
    """Look at the mesh as an operator would, a few times a second."""
    while True:
        fleet.check()
        await _look(mesh, fleet, board)
        show(board)
        await trio.sleep(LOOK_EVERY)


async def _look(mesh: worqr.Mesh, fleet: Fleet, board: Board) -> None:
    info = await mesh.queue(FILES).info()
    board.waiting, board.running = info.waiting, info.running
    workers = {worker.app: worker for worker in await mesh.workers()}
    for line, process in zip(board.peers, fleet.peers, strict=True):
        worker = workers.get(line.name)
        line.pid = process.pid
        line.running = worker.running if worker and info.running and not process.killed else 0
        if process.killed:
            line.state = "killed" if worker else "killed, tasks requeued"
        elif worker:
            line.state = "busy" if line.running else "idle"


async def _play(mesh: worqr.Mesh, fleet: Fleet, board: Board) -> None:
    files, total = mesh.queue(FILES), len(board.files)
    await _all_joined(mesh, fleet)
    board.began = time.monotonic()
    await files.enqueue(*map(os.fsencode, sorted(board.files)))
    board.tell(f"enqueued {total} files, one task each")
    await board.until(lambda: len(board.first) >= total * KILL_AFTER)
    await _kill_one(mesh, fleet, board)
    await _cancel_long_task(mesh, board)
    await _pull_through(board)
    board.left = await _all_settled(mesh)
    await _look(mesh, fleet, board)  # so that the last picture is that of the end


async def _all_joined(mesh: worqr.Mesh, fleet: Fleet) -> None:
    """Wait until every peer serves its queues."""
    with trio.move_on_after(READY_WITHIN):
        while True:
            workers = await mesh.workers()
            if sum({FILES, LONG} <= worker.queues for worker in workers) == len(fleet.peers):
                return
            await trio.sleep(0.05)
    raise PeerDied(f"the workers did not start within {READY_WITHIN:g} s")


async def _kill_one(mesh: worqr.Mesh, fleet: Fleet, board: Board) -> None:
    """SIGKILL a peer while it holds files. It is frozen first, so that the count is what it holds at its end."""
    ids = {worker.pid: worker.id for worker in await mesh.workers()}
    while len(board.first) < len(board.files):
        for peer in fleet.peers[1:]:
            peer.freeze()
            held = await _held_by(mesh, ids[peer.pid])
            if held:
                return _kill(peer, held, board)
            peer.thaw()
    board.tell("no worker was running a file, so none was killed")
    return None


async def _held_by(mesh: worqr.Mesh, worker: str) -> int:
    """How many files a frozen peer holds. The first read makes the server process everything that the peer had sent before."""
    await trio.sleep(SETTLE)
    await mesh.queue(FILES).running()
    return sum(status.worker == worker for status in await mesh.queue(FILES).running())


def _kill(peer: PeerProcess, held: int, board: Board) -> None:
    at = time.monotonic()
    peer.kill()
    board.killed = Killed(peer.name, peer.pid, at, held)
    board.tell(f"killed {peer.name} with SIGKILL while it ran {plural(held, 'file')}")


async def _cancel_long_task(mesh: worqr.Mesh, board: Board) -> None:
    """One long task: wait until it has begun, then cancel it from this process."""
    queue, long = mesh.queue(LONG), board.long
    await queue.enqueue(LONG_TASK)
    await board.until(lambda: long.runs > 0)
    board.tell(f"a long task started on {long.peer}")
    await trio.sleep(LONG_RUNS_FOR)
    long.cancel_called_at = time.monotonic()
    count = await queue.cancel(LONG_TASK, wait=CANCEL_WAIT)
    long.acknowledged_at, long.acknowledged = time.monotonic(), count.acknowledged
    with trio.move_on_after(CANCEL_WAIT):
        await board.until(lambda: long.cancelled_at is not None)
    board.tell(f"cancelled the long task from this process: {count.acknowledged} of {count.running} runs ended")


def _more_than(board: Board, files: int) -> bool:
    return len(board.first) > files


async def _pull_through(board: Board) -> None:
    """Wait until every file has its result, or no result has come for a long time."""
    total = len(board.files)
    while len(board.first) < total:
        before = len(board.first)
        with trio.move_on_after(NOTHING_NEW) as waiting:
            await board.until(partial(_more_than, board, before))
        if waiting.cancelled_caught:
            board.tell(f"no result for {NOTHING_NEW:g} s; {total - len(board.first)} files are missing")
            return
    board.tell("every file has a result")


async def _all_settled(mesh: worqr.Mesh) -> dict[str, int]:
    """Wait until every task is finished; return how many tasks each queue still has, in any state."""
    left: dict[str, int] = {}
    with trio.move_on_after(CANCEL_WAIT):
        while True:
            for name in (FILES, LONG, RESULTS):
                info = await mesh.queue(name).info()
                left[name] = info.waiting + info.running + info.scheduled + info.failed + info.broken
            if not any(left.values()):
                break
            await trio.sleep(0.02)
    return left
