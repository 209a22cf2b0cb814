"""Whatever a handler raises or returns, wherever it runs: its claim is settled, and its slot is free."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import worqr
from tests.peer import odd_errors
from tests.peer.conftest import NewMesh
from tests.peer.odd_errors import ERRORS, PLACES, RESULTS
from tests.peer.tools import at_most, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.peer import settler
from worqr.peer.run import Run

pytestmark = pytest.mark.one_server

FINE = [f"fine {n}" for n in range(10)]


@pytest.fixture
def mesh(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> worqr.Mesh:
    monkeypatch.setattr(odd_errors.mesh, "url", server.url)
    monkeypatch.setattr(odd_errors.mesh, "prefix", prefix)
    return odd_errors.mesh


@asynccontextmanager
async def joined(mesh: worqr.Mesh) -> AsyncGenerator[worqr.Peer]:
    """A peer with few slots. In the end all of them are free, and it leaves at once."""
    async with at_most(PATIENCE):
        async with mesh.join(concurrency=4, grace=0) as peer:
            yield peer
            await until(lambda: peer._engine.scheduler.running == 0, what="a slot is not free")
            await until(
                lambda: peer.health().ready, what="the worker is not ready"
            )  # its asyncio loop may just have been busy


async def ends(jobs: dict[str, worqr.Job[Any]]) -> dict[str, Any]:
    """What each job returned; or its error."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            found[name] = await job.result(timeout=PATIENCE)
        except worqr.JobFailed as error:
            found[name] = error.error
        except worqr.WorqrError as error:
            found[name] = error
    return found


def check_errors(found: dict[str, Any]) -> None:
    wrong = {
        name: found[name]
        for name, (text, _) in ERRORS.items()
        if not isinstance(found[name], worqr.RemoteError) or text not in found[name].message
    }
    assert not wrong, f"{len(wrong)} of {len(ERRORS)}: {[(name, str(found)[:200]) for name, found in wrong.items()]}"
    assert found["an attribute of ours"].fields == {"remote": 7}
    assert found["a huge attribute"].fields == {"code": 42}
    assert found["odd dict"].fields == {"code": 42}
    assert found["a deep odd group"].type == "ValueError"
    assert (
        found["a Retry from an odd error"].type == found["getattr raises KeyError"].type == "tests.peer.odd_errors.Odd"
    )


@pytest.mark.parametrize("place", PLACES)
async def test_each_odd_error_is_a_failure_and_its_slot_is_free(
    mesh: worqr.Mesh, place: str, expects_left: Any
) -> None:
    expects_left("{end.*}:failed", "{end.*}:aside*")
    function: Any = mesh.functions[f"end.{place}"]
    async with joined(mesh):
        found = await ends({name: await function.dispatch(name) for name in (*ERRORS, *FINE)})
    check_errors(found)
    assert [found[name] for name in FINE] == FINE


@pytest.mark.parametrize("place", PLACES)
async def test_each_odd_error_in_a_list_is_the_failure_of_its_own_call(
    mesh: worqr.Mesh, place: str, expects_left: Any
) -> None:
    expects_left("{list.*}:failed", "{list.*}:aside*")
    function: Any = mesh.functions[f"list.{place}"]
    names = [name for pair in zip(ERRORS, [f"fine {n}" for n in range(len(ERRORS))], strict=True) for name in pair]
    async with mesh.connect():
        jobs = {name: await function.dispatch(name) for name in names}
        async with joined(mesh):
            found = await ends(jobs)
    check_errors(found)
    assert all(found[name] == name for name in names if name not in ERRORS)


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread"])
async def test_each_odd_error_of_a_failure_handler_is_its_failure(
    mesh: worqr.Mesh, place: str, expects_left: Any
) -> None:
    expects_left("{doom.*}:failed", "{doom.*}:aside*", "{doom.*}-fail:failed", "{doom.*}-fail:aside*")
    function: Any = mesh.functions[f"doom.{place}"]
    async with joined(mesh) as peer:
        for name in ERRORS:
            await function.enqueue(name)
        await until(lambda: peer._engine.settler.counter.totals.total() == 2 * len(ERRORS), PATIENCE)


@pytest.mark.parametrize("place", PLACES)
async def test_each_odd_result_is_a_failure_that_says_why(mesh: worqr.Mesh, place: str, expects_left: Any) -> None:
    expects_left("{give.*}:failed", "{give.*}:aside*")
    function: Any = mesh.functions[f"give.{place}"]
    async with joined(mesh):
        found = await ends({name: await function.dispatch(name) for name in RESULTS})
    assert {name for name, error in found.items() if "its result cannot be kept" not in error.message} == set()


async def test_each_odd_error_of_the_block_of_a_claim_is_its_failure(new_mesh: NewMesh, expects_left: Any) -> None:
    expects_left("{Q1}:failed", "{Q1}:aside*")
    mesh, count = new_mesh(), 0
    async with joined(mesh) as peer, peer.work("Q1", retry=odd_errors.ONCE) as claims:
        for name, (_, make) in ERRORS.items():
            error = make()
            if issubclass(type(error), Exception):
                await mesh.queue("Q1").enqueue(name.encode())
                (claim,) = await claims.take(1)
                async with claim:
                    raise error
                count += 1
        assert (await mesh.queue("Q1").info()).failed == count > 80


# Where it is read, and what holds if even that fails


class Told(Exception):
    """Its text is the thread in which it was read."""

    def __str__(self) -> str:
        return threading.current_thread().name


class Model:
    """Looks like a model of pydantic, and is stored as the thread in which it was encoded."""

    __pydantic_validator__ = model_validate_json = None

    def model_dump(self, **_: Any) -> dict[str, str]:
        return {"encoded in": threading.current_thread().name}


@pytest.mark.parametrize(("place", "thread"), [("thread", "worqr "), ("asyncio", "worqr asyncio")])
async def test_errors_and_results_are_read_where_the_handler_ran(
    new_mesh: NewMesh, place: Any, thread: str, expects_left: Any
) -> None:
    expects_left("{end}:failed", "{end}:aside*", "{list}:failed", "{list}:aside*")
    mesh = new_mesh()

    def end(raises: bool) -> Any:
        if raises:
            raise Told
        return Model()

    async def end_async(raises: bool) -> Any:
        return end(raises)

    def end_all(raises: list[bool]) -> list[Any]:
        return [Told() if each else Model() for each in raises]

    async def end_all_async(raises: list[bool]) -> list[Any]:
        return end_all(raises)

    in_thread = place == "thread"
    options: Any = {"result_ttl": 60, "retry": odd_errors.ONCE} | ({} if in_thread else {"runs_in": place})
    one: Any = mesh.task(name="end", **options)(end if in_thread else end_async)
    many: Any = mesh.task(name="list", batch_size=9, **options)(end_all if in_thread else end_all_async)
    async with joined(mesh):
        for function in (one, many):
            found = await ends({str(each): await function.dispatch(each) for each in (True, False)})
            assert found["True"].message.startswith(thread), found
            assert found["False"]["encoded in"].startswith(thread), found


def raise_odd(*_: object, **__: object) -> Any:
    raise odd_errors.ERRORS["str recurses"][1]()


@pytest.mark.parametrize("broken", ["decide", "settle_call", "log_failure", "encode_result", "with_wrong_loop_remedy"])
@pytest.mark.parametrize("function", ["end", "list"])
async def test_a_run_that_cannot_be_settled_as_it_ended_counts_as_failed_and_its_slot_is_free(
    mesh: worqr.Mesh,
    function: str,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expects_left: Any,
) -> None:
    """A bug of worqr is put in."""
    expects_left("{end.loop}:failed", "{end.loop}:aside*", "{list.loop}:failed", "{list.loop}:aside*")
    monkeypatch.setattr(Run if broken == "decide" else settler, broken, raise_odd)
    returns = broken == "encode_result"
    name = "fine" if returns else "plain"
    handler: Any = mesh.functions[f"{function}.loop"]
    async with joined(mesh):
        found = await ends({str(n): await handler.dispatch(name) for n in range(8)})
    kind = "ValueError" if broken == "log_failure" else "Unsettled"  # that one is called after the request was sent
    assert {error.type for error in found.values()} == {kind}
    lines = [record for record in caplog.records if record.__dict__.get("event") == "task.unsettled"]
    assert len(lines) == len(found)
    assert all(f"queue '{function}.loop', job @" in record.getMessage() for record in lines)
