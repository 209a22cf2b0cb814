"""A few seconds of chaos on a real server: everything that a long run does is done once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

import worqr
from benchmarks.chaos.command import parse
from benchmarks.chaos.history import History
from benchmarks.chaos.ledger import ENTRIES, Ledger, lines_about, read
from benchmarks.chaos.report import command
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.topics import EventMaker
from benchmarks.chaos.workload import HEARERS, QUEUES, TICKS
from tests.support.children import ROOT


@pytest.mark.one_server
@pytest.mark.timeout(600)  # the calm phase is patient with slow machines
def test_a_few_seconds_of_chaos_break_nothing(server_kind: str, tmp_path: Path) -> None:
    kind = server_kind if server_kind in ("valkey", "redis") else "valkey"
    arguments = ["--minutes", "0.1", "--seed", "3", "--server", kind, "--peers", "3", "--producers", "1"]
    arguments += ["--spoilt", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "chaos", *arguments, "--ledger", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.splitlines()[-1] == "chaos passed: no violation"
    history = History.of(read(tmp_path))
    assert {request.queue for request in history.requests} <= set(QUEUES) - {TICKS}
    assert {TICKS} < {queue for queue, _ in history.runs} <= set(QUEUES)
    assert {entry.what for entry in read(tmp_path)} <= set(ENTRIES)
    assert any(entry.what == "fault" for entry in read(tmp_path))


def test_the_command_to_repeat_a_run_says_all_of_it() -> None:
    words = ["--minutes", "2.5", "--seed", "7", "--server", "cluster", "--peers", "5", "--producers", "3"]
    words += ["--spoilt", "2.5"]
    plan, _ = parse(words)
    assert command(plan) == "python -m benchmarks chaos " + " ".join(words)
    assert parse(command(plan).split()[4:])[0] == plan


def test_a_run_without_a_seed_takes_one_and_tells_it() -> None:
    plan, _ = parse([])
    assert f"--seed {plan.seed}" in command(plan)


def test_the_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    for source, part in (("peer-1", ""), ("peer-1", "4711"), ("world", "")):
        ledger = Ledger(tmp_path, source, part)
        ledger.write("ended", queue="raw", fence=1_900_000_000_000_001, how="returned", counted=False)
        ledger.close()
    entries = list(read(tmp_path))
    assert [entry.source for entry in entries] == ["peer-1", "peer-1", "world"]
    assert entries[0].facts == {"queue": "raw", "fence": 1_900_000_000_000_001, "how": "returned", "counted": False}


def test_the_lines_about_a_task_have_its_end_its_answer_and_what_happened_to_its_worker(tmp_path: Path) -> None:
    producer, peer, other, world = (Ledger(tmp_path, name) for name in ("producer-1", "peer-1", "peer-2", "world"))
    producer.write("send", call=1, queue="raw", tasks=["a", "b"])
    producer.write("acked", call=1, outcome=None)
    producer.write("acked", call=2, outcome=None)
    peer.write("began", queue="raw", task="a", id="@7", fence=7)
    peer.write("ended", queue="raw", fence=7, how="returned")
    peer.write("ended", queue="raw", fence=8, how="returned")
    other.write("began", queue="raw", task="b", id="@9", fence=9)
    world.write("killed", who="peer-1")
    world.write("killed", who="peer-2")
    told = [line.split(" ", 3)[1:3] for line in lines_about(tmp_path, {"a"})]
    assert told == [
        ["producer-1", "send"],
        ["producer-1", "acked"],
        ["peer-1", "began"],
        ["peer-1", "ended"],
        ["world", "killed"],
    ]
    assert lines_about(tmp_path, {"c"}) == []


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        ([worqr.NotReplicated("lost", wanted=1), ()], "unknown"),
        ([(), worqr.NotReplicated("lost", wanted=1)], "unknown"),
        ([worqr.Unavailable("away", sent=None), HEARERS], "acked"),
        ([worqr.Unavailable("away", sent=False), ()], "refused"),
    ],
)
async def test_an_event_is_refused_only_if_no_call_can_have_stored_it(
    tmp_path: Path, outcomes: list[Any], wanted: str
) -> None:
    ledger = Ledger(tmp_path, "producer-1")

    async def publish(_topic: str, _value: str, *, id: str) -> worqr.Published:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return worqr.Published(id, outcome)

    mesh = SimpleNamespace(publish=publish)
    sender = Sender("producer-1", cast("Any", mesh), ledger, cast("Any", SimpleNamespace(choice=max)))
    async with trio.open_nursery() as nursery:
        await EventMaker(sender).publish(nursery)
    ledger.close()
    assert {entry.what for entry in read(tmp_path)} == {"send", wanted}
