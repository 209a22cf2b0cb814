"""What a command prints about a queue that is not in use, or that no worker serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command, piped, tasks, waiting
from tests.peer.tools import eventually

Beside = Callable[..., Awaitable[Answer]]


async def handle(_task: bytes) -> None:
    pass


async def test_a_queue_that_no_worker_serves_is_named_on_the_standard_error(beside: Beside, mesh: worqr.Mesh) -> None:
    lost = "worqr: no worker serves queue 'shop.sned' now; did you mean 'shop.send'?\n"
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "shop.send", handle))
        for words, out in (
            (("enqueue", "shop.sned", "x"), "1 enqueued\n"),
            (("call", "shop.sned", "to=ada"), "1 enqueued\n"),
            (("dispatch", "shop.sned", "x", "--id", "y"), "created y\n"),
            (("enqueue", "shop.sned", "x", "--json"), '{"queue":"shop.sned","enqueued":1,"refused":0}\n'),
        ):
            assert await beside(*words) == Answer(0, out, lost)
        late = await beside("call", "shop.sned", "to=ada", "--within", "10ms")
        assert late.code == 1
        assert late.err.splitlines(keepends=True)[1] == lost
        assert "no worker serves it; did you mean 'shop.send'?" in late.err
        nursery.cancel_scope.cancel()
    await tasks(mesh, "shop.sned")


async def test_without_a_name_that_is_close_it_is_said_what_becomes_of_the_tasks(
    beside: Beside, mesh: worqr.Mesh
) -> None:
    said = "worqr: no worker serves queue 'mails' now; its tasks run when a worker serves it\n"
    assert (await beside("enqueue", "mails", "x")).err == said
    piping = partial(piped, b"a\nb\n", "enqueue", "mails", "--lines")
    assert (await trio.to_thread.run_sync(piping)).stderr.decode() == said
    await tasks(mesh, "mails")


async def test_nothing_is_said_of_a_queue_that_a_worker_serves(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "mails", handle))
        assert await beside("enqueue", "mails", "none") == Answer(0, "1 enqueued\n", "")
        assert await beside("dispatch", "mails", "none", "--id", "x") == Answer(0, "created x\n", "")
        await eventually(lambda: unfinished(mesh), 0)
        nursery.cancel_scope.cancel()


async def unfinished(mesh: worqr.Mesh) -> int:
    info = await mesh.queue("mails").info()
    return info.waiting + info.running


def test_who_may_not_look_is_told_nothing(cli: Command, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_queue: worqr.Queue) -> worqr.QueueInfo:
        raise worqr.RefusedByServer("NOPERM")

    monkeypatch.setattr(worqr.Queue, "info", refuse)
    assert cli("enqueue", "mails", "x") == Answer(0, "1 enqueued\n", "")
    assert len(waiting(mesh, "mails")) == 1


def test_a_queue_that_nobody_knows_is_noted(cli: Command) -> None:
    cli("enqueue", "mails", "a")
    hint = "worqr: no queue 'mials' is in use; did you mean 'mails'?\n"
    for words in (("cancel", "mials", "--all"), ("resume", "mials"), ("failed", "mials"), ("undecodable", "mials")):
        answer = cli(*words)
        assert (answer.code, answer.err) == (0, hint)
    assert cli("pause", "mials").err == hint
    assert cli("resume", "mials").err == ""
    assert cli("cancel", "mails", "--all").err == ""
