"""The cost of starting: importing worqr, beside its dependencies; ``worqr run`` until it serves; and a connection."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

PROGRAM = """
import worqr

mesh = worqr.Mesh()


@mesh.task
async def mail(to: str) -> None: ...
"""
CONNECTIONS = 50
ROOT = Path(__file__).parent.parent


async def started(code: str, environment: Mapping[str, str]) -> float:
    """Milliseconds from starting an interpreter to its end."""
    began = time.perf_counter()
    await trio.run_process([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment)
    return (time.perf_counter() - began) * 1000


async def serving(folder: str, environment: Mapping[str, str]) -> float:
    """Milliseconds from starting ``worqr run`` until it logs that it serves."""
    command = [sys.executable, "-m", "worqr", "run", "program:mesh", "--log-json"]
    began = time.perf_counter()
    process = await trio.lowlevel.open_process(command, cwd=folder, env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = b""
    while b"start: " not in said:
        more = await process.stderr.receive_some()
        assert more, said
        said += more
    took = (time.perf_counter() - began) * 1000
    process.terminate()
    async for _ in process.stderr:
        pass
    await process.wait()
    return took


def write_program(folder: str) -> None:
    Path(folder, "program.py").write_text(PROGRAM, "utf-8")


async def connected(server: EmbeddedServer) -> tuple[float, float, float]:
    """The cost of a producer that connects: ms of the server's CPU, ms until it is connected and gone, KB sent to the server."""

    def spent() -> tuple[float, int]:
        cpu, stats = client.info("cpu"), client.info("stats")
        return (cpu["used_cpu_sys"] + cpu["used_cpu_user"]) * 1000, stats["total_net_input_bytes"]

    with bare(server) as client:
        spent()
        cpu, received = spent()
        began = time.perf_counter()
        for _ in range(CONNECTIONS):
            async with worqr.Mesh(server.url).connect():
                pass
        took = (time.perf_counter() - began) * 1000
        cpu_now, received_now = spent()
    return (cpu_now - cpu) / CONNECTIONS, took / CONNECTIONS, (received_now - received) / CONNECTIONS / 1000


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Interpreters that import something and end, with their bytecode at hand, as an installed package has it."""
    with tempfile.TemporaryDirectory() as folder:
        write_program(folder)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONPATH": str(ROOT), "WORQR_URL": server.url}
        await serving(folder, environment)
        await started("import trio, msgspec, worqr", environment)
        bare, dependencies, ours, whole, runs = await in_turn(
            2 * plan.runs,
            partial(started, "pass", environment),
            partial(started, "import trio, msgspec", environment),
            partial(started, "import worqr", environment),
            partial(started, "import worqr; worqr.Mesh()", environment),
            partial(serving, folder, environment),
        )
    await connected(server)  # the scripts are loaded
    costs = [await connected(server) for _ in range(2 * plan.runs)]
    of_server, waiting, kilobytes = (list(each) for each in zip(*costs, strict=True))
    over = [one - other for one, other in zip(ours, bare, strict=True)]
    all_of_it = [one - other for one, other in zip(whole, bare, strict=True)]
    needed = [one - other for one, other in zip(dependencies, bare, strict=True)]
    return [
        Table(
            "startup: a process that imports and ends",
            "importing trio and msgspec, over a bare interpreter, in turn",
            [
                Row("import worqr, over a bare interpreter", "ms", over, needed, Bar(150, most=True)),
                Row("... and making a Mesh, which needs nearly all of it", "ms", all_of_it, needed),
                Row("a bare interpreter", "ms", bare),
                Row("worqr run, until it serves a function", "ms", runs),
            ],
        ),
        Table(
            "startup: one more connection of a producer",
            "to a server that has the scripts; a link has a second connection, for messages",
            [
                Row("CPU of the server", "ms", of_server, bar=Bar(0.3, most=True)),
                Row("mesh.connect() and its end", "ms", waiting),
                Row("sent to the server", "KB", kilobytes),
            ],
        ),
    ]
