"""The documents are true: their programs run, their tables name what exists, and all of it.

How a snippet is run is said in comments that readers do not see, in front of its fence:

* ``<!-- given: CODE -->`` is run before it, with the same names;
* ``<!-- prints: LINE -->``: the program is stopped by Ctrl-C once it has printed that line (else it ends by itself);
* ``<!-- leaves: PATTERNS -->``: keys that may be left when it has ended;
* ``<!-- runs: as a program -->`` though it has no ``trio.run``; ``<!-- runs: in a thread -->``, where no loop runs.

A Python snippet with a ``trio.run`` is a program, run as a process. Any other one is run inside a mesh: it finds
``trio``, ``worqr``, ``mesh``, ``peer`` and a ``nursery``, which is cancelled in the end, and may await. A shell
snippet is run if it is all redis-cli.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

import worqr
from tests.children import ROOT, Child
from tests.leaks import delete_all
from tests.patience import PATIENCE
from tests.servers import Server
from worqr import listening, ops, policy
from worqr import task as task_module
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import answer_timeout
from worqr.link.settings import LinkSettings
from worqr.lua import all_scripts
from worqr.peer import cancelling, engine, leading, membership, promoting, saying, unserved
from worqr.peer.options import GRACE, MAX_PATIENCE, PATIENT, HandlerOptions, JoinOptions

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
    leaves: str
    runs: str

    @property
    def is_program(self) -> bool:
        return "trio.run(" in self.code or self.runs == "as a program"

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


BLOCK = re.compile(r"((?:<!-- \w+: .*? -->\n)*)```(\w+)\n(.*?)```", re.DOTALL)


def snippets(language: str) -> list[Snippet]:
    found: list[Snippet] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            said = dict(re.findall(r"<!-- (\w+): (.*?) -->", match[1]))
            assert said.keys() <= {"given", "prints", "leaves", "runs"}
            assert said.get("runs", "") in {"", "as a program", "in a thread"}
            line = text.count("\n", 0, match.start(2)) + 1
            notes = [said.get(word, "") for word in ("given", "prints", "leaves", "runs")]
            found.append(Snippet(page, line, match[2], match[3], *notes))
    return [snippet for snippet in found if snippet.language == language]


PYTHON = snippets("python")
SHELL = [snippet for snippet in snippets("sh") if re.fullmatch(r"(redis-cli .*\n)+", snippet.code)]


async def run_code(code: str, name: str, names: dict[str, Any]) -> None:
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    answer = eval(compiled, names)
    if inspect.iscoroutine(answer):
        await answer


async def until(look: Callable[[], Awaitable[object]]) -> None:
    """For what is given: wait until there is something."""
    while not await look():
        await trio.sleep(0.01)


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


PIECES = [s for s in PYTHON if not s.is_program and "pytest.mark.asyncio" not in s.code]
"""Without tests on asyncio, which test_plugin runs as such."""


@pytest.mark.parametrize("snippet", PIECES, ids=str)
async def test_a_piece_of_the_documents_runs(
    snippet: Snippet, server: Server, prefix: str, expects_left: Callable[..., None]
) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    expects_left(*snippet.leaves.split())
    with trio.fail_after(PATIENCE):
        async with mesh.join(grace=1) as peer, trio.open_nursery() as nursery:
            names = {
                "__name__": "piece",
                "until": until,
                "trio": trio,
                "worqr": worqr,
                "mesh": mesh,
                "peer": peer,
                "nursery": nursery,
            }
            await run_code(snippet.given, str(snippet), names)
            if snippet.runs == "in a thread":
                await trio.to_thread.run_sync(exec, snippet.code, names)
                await trio.to_thread.run_sync(mesh.blocking.close)
            else:
                await run_code(snippet.code, str(snippet), names)
            nursery.cancel_scope.cancel()


def redis_cli(snippet: Snippet, server: Server, folder: Path) -> str:
    """Run a shell snippet against the server, an error reply being an error."""
    (folder / "redis-cli").write_text(f'#!/bin/sh\nexec {shutil.which("redis-cli")} -e -u {server.tcp_url} "$@"\n')
    (folder / "redis-cli").chmod(0o755)
    script = f'set -e\nPATH="{folder}:$PATH"\n{snippet.code}'
    answer = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


needs_redis_cli = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")


@needs_redis_cli
@pytest.mark.parametrize("snippet", SHELL, ids=str)
def test_redis_cli_takes_what_the_documents_say(snippet: Snippet, own_server: Server, tmp_path: Path) -> None:
    assert redis_cli(snippet, own_server, tmp_path)


@needs_redis_cli
async def test_two_commands_enqueue(own_server: Server, tmp_path: Path) -> None:
    (snippet,) = [snippet for snippet in SHELL if "LPUSH 'worqr:{mails}'" in snippet.code]
    redis_cli(snippet, own_server, tmp_path)
    mesh = worqr.Mesh(own_server.url)
    async with mesh.join() as peer, peer.work("mails") as claims:
        with trio.fail_after(PATIENCE):
            (claim,) = await claims.take(1)
        assert claim.task == b"ada@example.org"
        await claim.finish()


@needs_redis_cli
async def test_the_rights_are_enough(own_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (snippet,) = [snippet for snippet in SHELL if "ACL SETUSER" in snippet.code]
    redis_cli(snippet, own_server, tmp_path)
    url = own_server.tcp_url.replace("redis://", "redis://worqr:secret@")
    mesh = worqr.Mesh(url)
    with trio.fail_after(PATIENCE):
        async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
            await use_everything(mesh, peer, nursery)
            nursery.cancel_scope.cancel()
    assert "link.refused" not in caplog.text
    with pytest.raises(worqr.RefusedByServer):
        async with worqr.Mesh(url, prefix="elsewhere").connect() as _, worqr.Mesh(url, prefix="elsewhere").join():
            pass


async def use_everything(mesh: worqr.Mesh, peer: worqr.Peer, nursery: trio.Nursery) -> None:
    """Every script that a single healthy peer can be made to send."""
    queue, running = mesh.queue("Q1"), trio.Event()

    async def handler(task: bytes) -> bytes:
        if task == b"fail":
            raise ValueError("on purpose")
        if task != b"job":
            running.set()
            await trio.sleep_forever()
        worqr.current().progress(0.5, "half")
        return b"done"

    twice = worqr.RetryPolicy(max_failures=2, min_backoff=0.05)
    async with queue.events() as events:
        await nursery.start(partial(peer.serve, "Q1", handler, retry=twice, on_failure=lambda failed: None))
        await queue.enqueue(b"fail", b"run")
        await running.wait()
        assert (await queue.cancel(b"run", wait=PATIENCE)).acknowledged == 1
        async for event in events:
            if event.type == "failed":
                break
    job = await queue.dispatch(b"job", id="job", delay=60, result_ttl=60)
    assert (await job.status()).state == "scheduled"
    await queue.dispatch(b"job", id="job", delay=0.1)
    async with job.watch() as states:
        assert [status.state async for status in states][-1] == "finished"
    assert await job.result() == b"done"
    await queue.dispatch(b"job", id="later", delay=60)
    assert (await queue.job("later").cancel()).waiting == 1
    (failed,) = await queue.failed.list()
    assert await queue.failed.retry(failed.id) == 1
    while not await queue.failed.list():  # it fails again
        await trio.sleep(0.01)
    assert await queue.failed.drop_all() == 1
    await queue.pause("why")
    await queue.enqueue(b"a", b"b")
    assert await queue.tasks() == [b"b", b"a"]
    assert await queue.peek() == b"a"
    assert await queue.running() == []
    await queue.cancel_all()
    await queue.delete()
    await queue.resume()
    assert {info.name for info in await mesh.queues()} == {"Q1", "{Q1}-fail"}
    assert len(await mesh.workers()) == 1
    await trio.sleep(1.2)  # a beat, and a round of the leader's chores
    while not peer.health().ready:
        await trio.sleep(0.01)


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


def rows(page: str, heading: str, skipped: int = 0) -> list[list[str]]:
    """The cells of the first table below a heading, or of one behind it."""
    section = re.split(rf"^#+ {heading}$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)[1]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[skipped]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def words(cells: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cells)


def test_the_errors_are_those_there_are() -> None:
    named = {word for row in rows("operating.md", "Errors") for word in words(row[0])}
    public = {name: getattr(worqr, name) for name in worqr.__all__}
    errors = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, worqr.WorqrError)}
    assert named == errors - {"WorqrError"}


def test_the_times_are_those_of_the_code() -> None:
    settings, mesh = LinkSettings("redis://localhost"), worqr.Mesh()
    numbers = [float(re.sub(r"[^\d.]", "", row[1])) for row in rows("operating.md", "Timing")]
    assert numbers == [
        *(membership.BEAT_EVERY, answer_timeout(mesh.keepalive), mesh.keepalive),
        *(leading.LOOK_EVERY, leading.TWO_LOOKS, membership.LEASE),
        *(leading.SCAN_EVERY, unserved.GRACE, cancelling.RECONCILE_EVERY, mesh.block_limit, settings.patience),
        *(GRACE, engine.LEAVE_PATIENCE, promoting.AT_MOST_EVERY),
        *(
            task_module.MAX_FAILURES,
            task_module.MAX_STALLS,
            policy.MAX_TIMEOUTS,
            policy.MIN_BACKOFF,
            policy.MAX_BACKOFF,
        ),
        *(PATIENT.max_failures, PATIENT.min_backoff, PATIENT.max_backoff, saying.SAY_EVERY, listening.LOOK_AGAIN),
        *(task_module.KEEP_FAILED, mesh.max_payload / 2**20),
    ]
    assert f"at most {MAX_PATIENCE:g}" in (DOCS / "operating.md").read_text("utf-8")


def test_the_series_of_the_backoff_are_those_of_the_code() -> None:
    text = (DOCS / "retries.md").read_text("utf-8")
    table = text.partition("| after failure |")[2].splitlines()[2:4]
    series = [[float(cell) for cell in row.split("|")[2:-1]] for row in table]
    assert series == [[each.backoff(times) for times in range(9)] for each in (policy.Policy(), PATIENT)]


def test_the_options_are_those_there_are() -> None:
    def first_words(page: str, heading: str, skipped: int = 0) -> list[str]:
        return [word for row in rows(page, heading, skipped) for word in words(row[0])[:1]]

    assert set(first_words("jobs.md", "Options of a dispatch")) == set(worqr.JobOptions.__annotations__)
    assert first_words("jobs.md", "An id that is there already", 1) == [field.name for field in fields(worqr.Update)]
    assert first_words("retries.md", "The policy") == [field.name for field in fields(worqr.RetryPolicy)]
    assert set(first_words("peers.md", "Serving")) == set(HandlerOptions.__annotations__) - {"max_length", "shards"}
    assert set(first_words("peers.md", "Peers")) == set(JoinOptions.__annotations__)


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
    assert {key for key in there - {"{worqr}"} if f"`{key}`" not in text} == set()
    written = {
        f"worqr:{{Q1}}{end}" for script in all_scripts() for end in re.findall(r"\.\. '(:[a-z_]+)'", script.source)
    }
    assert {key for key in written if f"`{key}`" not in text} == set()


async def test_every_field_of_a_record_is_on_the_page(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    options: worqr.JobOptions = {
        "id": "x",
        "expires": 60,
        "result_ttl": 5,
        "timeout": 5,
        "meta": {"a": "b"},
        "retry": worqr.RetryPolicy(max_failures=1, max_stalls=2, max_timeouts=1, min_backoff=1, retry_on=()),
    }
    seen: set[str] = set()

    def look(client: redis.Redis) -> None:
        for key in client.scan_iter(f"{prefix}:{{Q1}}*"):
            if re.search(rb":(job|active|result|aside):", key):
                seen.update(name.decode() for name in client.hkeys(key))

    with server.client() as client:
        async with mesh.join(grace=0) as peer, peer.work("Q1") as claims:
            queue = mesh.queue("Q1")
            for _ in range(2):
                await queue.dispatch(b"job", **options)
                (claim,) = await claims.take(1)
                claim.progress(0.5, "half")
                await queue.dispatch(b"job", **options)
                while (await queue.job("x").status()).progress is None:
                    await trio.sleep(0.01)
                look(client)
                await queue.job("x").cancel()
                await claim.stop()
            await queue.enqueue(b"raw")
            (claim,) = await claims.take(1)
            await claim.retry(delay=0)
            look(client)
            await queue.delete()
            for _ in range(2):
                await queue.dispatch(b"job", **options)
                (claim,) = await claims.take(1)
                await claim.fail("why")
            look(client)
            await queue.failed.drop_all()
    named = set(re.findall(r"`(\w+)`", (DOCS / "wire.md").read_text("utf-8").partition("## Records")[2]))
    assert len(seen) > 30
    assert seen - named == set()


def test_every_script_is_on_the_page_and_no_other() -> None:
    named = {word for row in rows("wire.md", "Transitions") for word in words(row[0])}
    assert named == {script.name for script in all_scripts()}
    assert {name for name in named if not hasattr(ops, name)} == set()


# Coming from Worqr, hworker or Queasy


def test_every_feature_of_the_predecessors_has_its_row() -> None:
    features = [row[0] for row in rows("coming-from.md", "Features")]
    defects = [row[0] for row in rows("coming-from.md", "Defects")]
    assert features == [f"W{n}" for n in range(1, 46)]
    assert defects == [f"B-W{n}" for n in range(1, 27)]
    assert [row[0] for row in rows("coming-from.md", "hworker")] == [f"H{n}" for n in range(1, 28)]
    assert [row[0] for row in rows("coming-from.md", "Queasy")] == [f"Q{n}" for n in range(1, 36)]
    assert [row[0] for row in rows("coming-from.md", "Queasy", 1)] == [f"R{n}" for n in range(1, 22)]
    assert [row[0] for row in rows("coming-from.md", "Defects of hworker")] == [f"B-H{n}" for n in range(1, 19)]
    assert [row[0] for row in rows("coming-from.md", "Defects of Queasy")] == [f"B-Q{n}" for n in range(1, 34)]


def test_every_row_names_a_test_that_would_fail_without_it() -> None:
    """Tests that run whatever stands on a page, or check another thing, prove nothing of one feature."""
    tables = ("Features", "Defects", "hworker", "Defects of hworker", "Queasy", "Defects of Queasy")
    found = [row for title in tables for row in rows("coming-from.md", title)]
    found += rows("coming-from.md", "Queasy", 1)
    unshown = {row[0] for row in found if not row[3].startswith("`test_")}
    assert unshown <= {"B-W17", "W37"}
    weak = {"test_a_piece_of_the_documents_runs", "test_the_rights_are_enough", "test_the_protocol_keeps_its_promises"}
    assert {row[0] for row in found if weak & set(words(row[3]))} <= {"W24"}


def test_every_test_that_the_documents_name_exists() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    source = "\n".join(path.read_text("utf-8") for path in files)
    there = {*re.findall(r"def (test_\w+)", source), *(path.stem for path in files)}
    texts = [re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL) for page in PAGES]
    named = {name for text in texts for name in re.findall(r"\btest_\w+", text)}
    assert named - there == set()
    assert len(named) > 40
