"""What `serve`, `work` and `join` are called with: checked before anything is sent, refused by name with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

import worqr
from tests.peer.tools import Runs, spying
from tests.support.servers import Server
from worqr.handler_options import HandlerOptions, Handling, handling, policy_for, refuse_unknown
from worqr.peer.options import JoinOptions
from worqr.policy import Policy

KNOWN = {"serve": HandlerOptions, "join": JoinOptions}


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        ("serve", "max_retries", r"has no option 'max_retries'; use retry=worqr\.RetryPolicy\(max_failures="),
        ("serve", "eta", "has no option 'eta'; use run_at"),
        ("serve", "concurency", "has no option 'concurency'; did you mean 'concurrency'"),
        ("join", "gracce", "has no option 'gracce'; did you mean 'grace'"),
        ("join", "xyz", "has no option 'xyz'; it takes concurrency, grace"),
        ("serve", "grace", "has no option 'grace'; it takes timeout"),
    ],
)
def test_options_that_do_not_exist_are_refused_with_the_remedy(where: str, name: str, words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        refuse_unknown(where, {name: 1}, tuple(KNOWN[where].__annotations__))


def test_no_options_are_fine() -> None:
    assert policy_for() == Policy()
    assert handling("serve", {}) == Handling(Policy())


def test_the_policy_of_a_handler_is_what_it_was_given_over_the_defaults() -> None:
    given = policy_for(
        worqr.RetryPolicy(max_failures=4, jitter=False), timeout=5, keep_failed=0, result_ttl=60, on_failure=True
    )
    assert given == Policy(max_failures=4, jitter=False, timeout=5.0, keep_failed=0, result_ttl=60.0, on_failure=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"retry": bad}, "retry must be a worqr.RetryPolicy") for bad in (3, {}, "never", worqr.RetryPolicy)),
        *(({"keep_failed": bad}, "keep_failed must be a whole number") for bad in (-1, 1.5, True, "9", None)),
        *(({"timeout": bad}, "timeout must be") for bad in (0, -1, float("nan"), float("inf"), "5", True)),
        *(({"result_ttl": bad}, "result_ttl must be") for bad in (-1, float("nan"), float("inf"), "5", True)),
        *(({"on_failure": bad}, "handler") for bad in (7, "told", b"")),
        *(({"on_failure_retry": bad}, "on_failure_retry must be a worqr.RetryPolicy") for bad in (3, {}, "never")),
        *(({"on_failure_timeout": bad}, "on_failure_timeout must be") for bad in (0, -1, float("inf"), "5", True)),
        *(({"size": bad}, "size of serve") for bad in (0, -1, 1.5, "2", True, None)),
        *(({"priority": bad}, "priority of serve") for bad in (0, -1, 1.5, "2", True, None)),
        *(({"runs_in": bad}, "runs_in must be one of") for bad in ("threads", 1, b"loop", "")),
        ({"runs_in": "thread"}, "async function, whose places are"),
        ({"max_length": 3}, "serve.. takes no max_length"),
    ],
)
async def test_settings_of_a_handler_that_cannot_be_are_refused(mesh: worqr.Mesh, options: Any, words: str) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await peer.serve("Q1", Runs(), **options)
        if "retry" in options:
            with pytest.raises(worqr.UsageError, match=words):
                async with peer.work("Q1", **options):
                    pytest.fail("a bad policy")
        assert (await mesh.workers())[0].queues == frozenset()


async def test_options_are_refused_before_anything_is_sent(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    with spying(server, prefix) as spy:
        with pytest.raises(worqr.UsageError, match="only: "):
            async with mesh.join(only=["Q1"]):
                pytest.fail("it must not join")
        assert spy.calls()["start_worker"] == 0
    async with mesh.join() as peer:
        with spying(server, prefix) as spy:
            with pytest.raises(worqr.UsageError, match="'concurency'"):
                await peer.serve("Q1", Runs(), concurency=3)  # type: ignore[call-arg]
            calls = spy.calls()
            assert calls["map_work"] == calls["start_work"] == 0
        assert (await mesh.workers())[0].queues == frozenset()


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), "25", True, None])
async def test_grace_is_a_duration(mesh: worqr.Mesh, grace: Any) -> None:
    with pytest.raises(worqr.UsageError, match="grace"):
        async with mesh.join(grace=grace):
            pytest.fail("it must not join")
    if grace is not None:
        async with mesh.join() as peer:
            with pytest.raises(worqr.UsageError, match="grace"):
                await peer.drain(grace)
            assert not peer._engine.leaving


async def test_a_peer_serves_a_queue_once(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1"):
        with pytest.raises(worqr.UsageError, match="'Q1' is served by this peer already.*concurrency"):
            await peer.serve("Q1", Runs())


@pytest.mark.parametrize("name", ["", "a{b", "}", "x" * 201, "a\nb", "\x00", "\x7f", "\udcff", 7, b"Q1", None])
async def test_bad_queue_names_are_refused_by_peers(mesh: worqr.Mesh, name: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="queue name"):
            await peer.serve(name, Runs())
        with pytest.raises(worqr.UsageError, match="queue name"):
            async with peer.work(name):
                pytest.fail("a bad name")
