"""The documents are true: their programs run, their tables name what exists, and all of it.

How a snippet is run is said in comments that readers do not see, in front of its fence:

* ``<!-- given: CODE -->`` is run before it, with the same names;
* ``<!-- prints: LINE -->``: the program is stopped by Ctrl-C once it has printed that line (else it ends by itself).

A Python snippet with a ``trio.run`` is a program, run as a process. Any other one is run inside a mesh: it finds
``trio``, ``worqr``, ``mesh`` and ``peer``, and may await. A shell snippet is run if it is all redis-cli.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.children import ROOT, Child
from tests.leaks import delete_all
from tests.servers import Server
from worqr import mesh as mesh_module
from worqr import ops
from worqr import task as task_module
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link.settings import LinkSettings
from worqr.lua import all_scripts
from worqr.peer import cancelling, leading, membership
from worqr.peer import peer as peer_module

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *DOCS.glob("*.md")])


@dataclass(frozen=True)
class Snippet:
    """One fenced block, and what is said about it."""

    page: Path
    line: int
    language: str
    code: str
    given: str
    prints: str

    @property
    def is_program(self) -> bool:
        return "trio.run(" in self.code

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


BLOCK = re.compile(r"((?:<!-- \w+: .*? -->\n)*)```(\w+)\n(.*?)```", re.DOTALL)


def snippets(language: str) -> list[Snippet]:
    found: list[Snippet] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            said = dict(re.findall(r"<!-- (\w+): (.*?) -->", match[1]))
            assert said.keys() <= {"given", "prints"}
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Snippet(page, line, match[2], match[3], said.get("given", ""), said.get("prints", "")))
    return [snippet for snippet in found if snippet.language == language]


PYTHON = snippets("python")
SHELL = [snippet for snippet in snippets("sh") if re.fullmatch(r"(redis-cli .*\n)+", snippet.code)]


async def run_code(code: str, name: str, names: dict[str, Any]) -> None:
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    answer = eval(compiled, names)
    if inspect.iscoroutine(answer):
        await answer


@pytest.fixture
def clean(server: Server) -> Iterator[None]:
    """Programs use the default prefix."""
    with server.client() as client:
        delete_all(client, "worqr")
        yield
        delete_all(client, "worqr")


@pytest.mark.parametrize("snippet", [s for s in PYTHON if s.is_program], ids=str)
async def test_a_program_of_the_documents_runs(
    snippet: Snippet, server: Server, clean: None, spawn: Callable[..., Child]
) -> None:
    if snippet.given:
        given_mesh = worqr.Mesh(server.url)
        async with given_mesh.connect():
            await run_code(snippet.given, str(snippet), {"mesh": given_mesh})
    child = spawn(snippet.code, env={"WORQR_URL": server.url})
    if snippet.prints:
        await child.line_with(snippet.prints)
        child.signal(signal.SIGINT)
    else:
        assert await child.ended() == 0, child.errors
    await child.ended()


@pytest.mark.parametrize("snippet", [s for s in PYTHON if not s.is_program], ids=str)
async def test_a_piece_of_the_documents_runs(snippet: Snippet, server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    with trio.fail_after(20):
        async with mesh.join(grace=1) as peer:
            names = {"trio": trio, "worqr": worqr, "mesh": mesh, "peer": peer}
            await run_code(snippet.given, str(snippet), names)
            await run_code(snippet.code, str(snippet), names)


def redis_cli(snippet: Snippet, server: Server, folder: Path) -> str:
    """Run a shell snippet against the server, an error reply being an error."""
    (folder / "redis-cli").write_text(f'#!/bin/sh\nexec {shutil.which("redis-cli")} -e -u {server.tcp_url} "$@"\n')
    (folder / "redis-cli").chmod(0o755)
    script = f'set -e\nPATH="{folder}:$PATH"\n{snippet.code}'
    answer = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False, timeout=20)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


needs_redis_cli = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")


@needs_redis_cli
@pytest.mark.parametrize("snippet", SHELL, ids=str)
def test_redis_cli_takes_what_the_documents_say(snippet: Snippet, own_server: Server, tmp_path: Path) -> None:
    assert redis_cli(snippet, own_server, tmp_path)


@needs_redis_cli
async def test_two_commands_enqueue(own_server: Server, tmp_path: Path) -> None:
    (snippet,) = [snippet for snippet in SHELL if "LPUSH" in snippet.code]
    redis_cli(snippet, own_server, tmp_path)
    mesh = worqr.Mesh(own_server.url)
    async with mesh.join() as peer, peer.work("mails") as claims:
        with trio.fail_after(5):
            (claim,) = await claims.take(1)
        assert claim.task == b"ada@example.org"
        await claim.finish()


@needs_redis_cli
async def test_the_rights_are_enough(own_server: Server, tmp_path: Path) -> None:
    (snippet,) = [snippet for snippet in SHELL if "ACL SETUSER" in snippet.code]
    redis_cli(snippet, own_server, tmp_path)
    url = own_server.tcp_url.replace("redis://", "redis://worqr:secret@")
    mesh = worqr.Mesh(url)
    with trio.fail_after(20):
        async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
            await use_everything(mesh, peer, nursery)
            nursery.cancel_scope.cancel()
    with pytest.raises(worqr.RefusedByServer):
        async with worqr.Mesh(url, prefix="elsewhere").connect() as _, worqr.Mesh(url, prefix="elsewhere").join():
            pass


async def use_everything(mesh: worqr.Mesh, peer: worqr.Peer, nursery: trio.Nursery) -> None:
    """Every script that a single healthy peer can be made to send."""
    queue, running = mesh.queue("Q1"), trio.Event()

    async def handler(task: bytes) -> None:
        if task == b"fail":
            raise ValueError("on purpose")
        running.set()
        await trio.sleep_forever()

    async with queue.events() as events:
        await nursery.start(peer.serve, "Q1", handler)
        await queue.enqueue(b"fail", b"run")
        await running.wait()
        assert (await queue.cancel(b"run", wait=5)).acknowledged == 1
        async for event in events:
            if event.type == "failed":
                break
    await queue.pause("why")
    await queue.enqueue(b"a", b"b")
    assert await queue.tasks() == [b"b", b"a"]
    assert await queue.peek() == b"a"
    assert await queue.running() == []
    await queue.cancel_all()
    await queue.delete()
    await queue.resume()
    assert {info.name for info in await mesh.queues()} == {"Q1"}
    assert len(await mesh.workers()) == 1
    await trio.sleep(1.2)  # a beat, and a round of the leader's chores
    assert peer.health().ready


# Links and tables


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\((\S+\.md)\)", (DOCS / "index.md").read_text("utf-8")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(rf"^#+ {heading}$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def words(cells: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cells)


def test_the_words_of_the_log_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "worqr").rglob("*.py"))
    for row in rows("operating.md", "Logs"):
        for word in words(row[0]):
            ended = word.startswith("claim.") and f'"{word.removeprefix("claim.")}"' in source
            assert f'"{word}:' in source or f'"{word}"' in source or ended, word


def test_the_errors_are_those_there_are() -> None:
    named = {word for row in rows("operating.md", "Errors") for word in words(row[0])}
    there = {
        name for name in worqr.__all__ if isinstance(kind := getattr(worqr, name), type) and issubclass(kind, Exception)
    }
    assert named == there - {"WorqrError"}


def test_the_times_are_those_of_the_code() -> None:
    settings, mesh = LinkSettings("redis://localhost"), worqr.Mesh()
    join = inspect.signature(worqr.Mesh.join).parameters
    numbers = [float(re.sub(r"[^\d.]", "", row[1])) for row in rows("operating.md", "Timing")]
    assert numbers == [
        *(membership.BEAT_EVERY, mesh.keepalive, leading.LOOK_EVERY, leading.TWO_LOOKS, membership.LEASE),
        *(leading.SCAN_EVERY, cancelling.RECONCILE_EVERY, mesh.stall_limit, settings.patience),
        *(join["grace"].default, peer_module.LEAVE_PATIENCE),
        *(task_module.MAX_FAILURES, task_module.MAX_STALLS, task_module.KEEP_FAILED, mesh.max_payload / 2**20),
    ]
    assert f"at most {mesh_module.MAX_PATIENCE:g}" in (DOCS / "operating.md").read_text("utf-8")


def shapes(keys: QueueKeys | RegistryKeys, arguments: dict[str, Any]) -> set[str]:
    """Every key and channel that `keys` can spell."""
    found: set[str] = set()
    for name, member in inspect.getmembers(type(keys)):
        if isinstance(member, property):
            found.add(getattr(keys, name))
        elif inspect.isfunction(member) and not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters)[1:]
            found.add(member(keys, *(arguments[parameter] for parameter in parameters)))
    return found


def test_every_key_and_channel_is_on_the_page() -> None:
    arguments = {"worker": "W1", "claim": "P1", "id": "ID", "digest": "DIGEST", "producer": "X"}
    there = shapes(QueueKeys("worqr", "Q1"), arguments) | shapes(RegistryKeys("worqr"), arguments)
    text = (DOCS / "wire.md").read_text("utf-8")
    not_yet = {"worqr:{Q1}:due"}  # no script writes it before there are jobs with a time
    assert {key for key in there - not_yet - {"{worqr}"} if f"`{key}`" not in text} == set()
    written = {
        f"worqr:{{Q1}}{end}" for script in all_scripts() for end in re.findall(r"\.\. '(:[a-z_]+)'", script.source)
    }
    assert {key for key in written if f"`{key}`" not in text} == set()


def test_every_script_is_on_the_page_and_no_other() -> None:
    named = {word for row in rows("wire.md", "Transitions") for word in words(row[0])}
    assert named == {script.name for script in all_scripts()}
    assert {name for name in named if not hasattr(ops, name)} == set()


# Coming from Worqr


def test_every_feature_and_every_defect_of_the_predecessor_has_its_row() -> None:
    features = [row[0] for row in rows("coming-from.md", "Features")]
    defects = [row[0] for row in rows("coming-from.md", "Defects")]
    assert features == [f"W{n}" for n in range(1, 46)]
    assert defects == [f"B-W{n}" for n in range(1, 27)]


def test_every_test_that_the_documents_name_exists() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)", source))
    named = {name for page in PAGES for name in re.findall(r"\btest_\w+", page.read_text("utf-8"))}
    assert named - there == set()
    assert len(named) > 40
