"""How a function is found in another process, what cannot be, and scripts, which are imported there under another name."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.peer import process_jobs as jobs
from tests.peer.executors.processes.test_pool import value
from tests.peer.processes import LONG, open_pool
from tests.support.children import ROOT
from worqr import UsageError
from worqr.child_processes import importing, refuse_while_importing
from worqr.handler_options import check_runs_in_process
from worqr.peer.executors import offloaded
from worqr.peer.executors.processes import protocol
from worqr.peer.executors.processes.pool import ProcessPool
from worqr.peer.executors.processes.protocol import Name, name_for_process

registry = worqr.Registry()
HERE = __name__


@registry.task(name="typed.double")
def double(number: int) -> int:
    return 2 * number


@registry.task
async def waits() -> None: ...


def once_more(number: int) -> int:
    return number


again = registry.task(name="typed.again")(once_more)


def wrapped_by_hand(task: bytes) -> None: ...


plain = wrapped_by_hand
wrapped_by_hand = functools.wraps(plain)(lambda task: plain(task))


def name_of(thing: object) -> str:
    return str(name_for_process(thing, "the handler"))


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (jobs.nothing, "tests.peer.process_jobs:nothing"),
        (jobs.Service.static, "tests.peer.process_jobs:Service.static"),
        (jobs.Service.of_class, "tests.peer.process_jobs:Service.of_class"),
        (jobs.service, "tests.peer.process_jobs:service"),
        (jobs.lifespan, "tests.peer.process_jobs:lifespan"),
        (double, f"{HERE}:double"),
        (double.__worqr_handler__, f"{HERE}:double"),
        (again.__worqr_handler__, f"{HERE}:again"),
        (wrapped_by_hand, f"{HERE}:wrapped_by_hand"),
        (plain, f"{HERE}:plain"),
        (len, "builtins:len"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # an id is the same in every process
)
def test_what_can_be_imported_has_a_name(thing: object, name: str) -> None:
    assert name_of(thing) == name


def inside() -> Callable[[bytes], None]:
    def inner(task: bytes) -> None: ...

    return inner


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (inside(), "is made inside a function, .* define it at the top level of a module"),
        (lambda task: None, "is a lambda, .* make it a def"),
        (functools.partial(jobs.echo, b""), "is not found under its name"),
        (jobs.service.method, "is not found under its name"),
        (jobs.Service(), "is not found under its name"),
        (registry.task(name="typed.echo")(jobs.echo), "is not found under its name"),
        (5, "must be callable, not 5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(thing: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ProcessPool(1, max_result=1).prepare(thing)


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (inside(), "made inside a function"),
        (lambda task: None, "lambda"),
        (jobs.coroutine, r"is async, .* trio\.run"),
        (waits, "is async"),
        (functools.partial(jobs.coroutine, b""), "is async"),
        (jobs.generator, "is a generator"),
    ],
)
def test_most_of_it_is_refused_where_it_is_declared_before_it_has_a_place_in_its_module(thing: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_runs_in_process(thing)
    check_runs_in_process(plain)


def test_what_was_typed_into_an_interpreter_is_refused() -> None:
    program = """
        from tests.peer.processes import open_pool
        from worqr.peer.executors.processes.pool import ProcessPool

        def handler(task): ...

        ProcessPool(1, max_result=1).prepare(handler)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "was typed into an interpreter" in done.stderr.splitlines()[-1]


async def test_typed_functions_are_called_as_handlers() -> None:
    async with open_pool(1) as pool:
        assert value(await pool.run(double, b'{"number": 21}')) == 42
        assert value(await pool.run(double.__worqr_handler__, b'{"number": 21}')) == 42
        with pytest.raises(worqr.Undecodable):
            await pool.run(double, b'{"number": "many"}')


async def test_callable_objects_and_methods_of_classes_run() -> None:
    async with open_pool(1) as pool:
        assert await pool.run(jobs.service) == ("bytes", b"called")
        assert await pool.run(jobs.Service.static) == ("bytes", b"static")
        assert await pool.run(jobs.Service.of_class) == ("bytes", b"Service")


def test_only_an_import_in_a_worker_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_while_importing("join()")
    with (
        importing("app"),
        pytest.raises(UsageError, match=r"^no join\(\) while .* imports 'app'.*__main__"),
    ):
        ProcessPool(1, max_result=1)
    refuse_while_importing("join()")


async def test_a_process_gets_many_arguments_and_a_path_that_python_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *(f"picture-{number}.png" for number in range(20_000))])
    monkeypatch.setattr(sys, "path", [Path("/ignored"), *sys.path, ""])
    async with open_pool(1) as pool:
        assert value(await pool.run(jobs.arguments)) == [sys.argv[-1], len(sys.argv), [*sys.path[1:]]]


# Scripts

SCRIPT = """
    import sys
    import trio
    import worqr
    from tests.peer.processes import open_pool
    from worqr.policy import retry_fields, ChildError, Policy

    print("imported as", __name__, flush=True)

    class Mine(Exception): ...

    def handler(task):
        if task == b"fail":
            raise Mine("as asked")
        return f"{__name__} {handler.__module__} {sys.argv[1:]}".encode()

    async def main():
        async with open_pool(1) as pool:
            try:
                print(*await pool.run(handler))
                await pool.run(handler, b"fail")
            except ChildError as error:
                policy = Policy().with_overrides(retry_fields(worqr.RetryPolicy(fail_on=(Mine,))))
                print(error, policy.is_retryable(error))
"""
GUARDED = (
    SCRIPT
    + """
    if __name__ == "__main__":
        trio.run(main)
"""
)


async def run_program(*command: str, cwd: Path) -> list[str]:
    """The lines that it prints, and after them its last of standard error."""
    done = await trio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * LONG,
        )
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()[-1:]]


@pytest.mark.parametrize("name", ["app.py", "app", "json.py"])
async def test_a_script_is_imported_by_its_file_and_its_guard_holds(tmp_path: Path, name: str) -> None:
    script = tmp_path / name
    script.write_text(textwrap.dedent(GUARDED))
    known = "app" if name.startswith("app") else protocol.STAND_IN
    assert await run_program("-P", str(script), "argument", cwd=ROOT) == [
        "imported as __main__",
        f"imported as {known}",
        f"bytes b\"{known} {known} ['argument']\"",
        f"{name.removesuffix('.py')}.Mine: as asked False",  # the name with which other programs import it
    ]


async def test_a_module_that_is_run_is_imported_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "app.py").write_text(textwrap.dedent(GUARDED))
    assert await run_program("-m", "pkg.app", cwd=tmp_path) == [
        "imported as __main__",
        "imported as pkg.app",
        "bytes b'pkg.app pkg.app []'",
        "pkg.app.Mine: as asked False",
    ]


START = {
    "the pool": "trio.run(main)",
    "a connection": "trio.run(connect)",
    "a blocking call": "worqr.sync(mesh.queue('Q1').info)",
}


@pytest.mark.parametrize("start", START)
async def test_a_script_without_a_guard_ends_in_a_clear_error_and_starts_nothing_twice(
    tmp_path: Path, start: str
) -> None:
    script = tmp_path / "app.py"
    further = f"""
    mesh = worqr.Mesh("redis://127.0.0.1:1", patience=0.01)

    async def connect():
        async with mesh.connect():
            pass

    if __name__ != "__main__":
        {START[start]}
    trio.run(main)
    """
    script.write_text(textwrap.dedent(SCRIPT + further))
    lines = await run_program(str(script), cwd=ROOT)
    assert lines[:2] == ["imported as __main__", "imported as app"]
    assert len(lines) == 3
    kind = "join()" if start == "the pool" else "connection"
    told = f"a worker process cannot import the function app:handler: UsageError: no {kind} while "
    assert told in lines[2]
    assert 'put what starts the application under `if __name__ == "__main__":`' in lines[2]


def test_in_reports_it_has_the_name_of_its_function() -> None:
    assert offloaded.name_of(ProcessPool(1, max_result=1).prepare(jobs.nothing)) == "tests.peer.process_jobs.nothing"


def test_a_name_tells_where_it_is() -> None:
    assert str(Name("package.module", "Class.method")) == "package.module:Class.method"
