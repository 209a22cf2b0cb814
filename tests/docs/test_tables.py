"""The tables of docs/reference name what exists, all of it, and with the numbers of the code."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
import redis
import trio

import worqr
from tests.docs.tables import REFERENCE, columns, rows, section, words
from tests.support.children import ROOT
from tests.support.servers import Server
from worqr import cron, ops, policy, validation
from worqr.client import notifications
from worqr.client.client import MAX_PATIENCE
from worqr.cron import Definition, Trigger, at, ms_of
from worqr.handler_options import PATIENT
from worqr.hosting import service
from worqr.keys import BatchKeys, LimitKeys, QueueKeys, RegistryKeys
from worqr.link import answer_timeout, connector
from worqr.link import settings as link_settings
from worqr.link.failures import _ACTIONS  # pyright: ignore[reportPrivateUsage]
from worqr.link.settings import LinkSettings
from worqr.lua import all_scripts
from worqr.peer import consumer, consumer_runner, durable, run_reports, session
from worqr.peer.executors import asyncio_loop
from worqr.peer.leader import leader, scanner, schedule_ticker
from worqr.peer.options import GRACE
from worqr.peer.run import IN_MEMORY

LUA = ROOT / "worqr" / "lua"
SOURCE = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "worqr").rglob("*.py")))


# errors.md


def test_the_errors_are_those_there_are() -> None:
    named = {word for row in rows("errors.md", "Errors") for word in words(row[0])}
    public = {name: getattr(worqr, name) for name in worqr.__all__}
    errors = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, worqr.WorqrError)}
    assert named == errors - {"WorqrError"}
    for row in columns("errors.md", "Errors").values():
        assert all(row.values()), "each error has its remedy"


@pytest.mark.parametrize("heading", ["The server cannot be reached", "The server refuses"])
def test_the_messages_are_in_the_code(heading: str) -> None:
    """Words of a server are those that the link knows, and two that it passes on."""
    servers_own = {*_ACTIONS, "DENIED", "NOPERM", "WRONGTYPE"}
    source = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # texts in several pieces
    generated = {"no answer for 5 s": "no answer for", "worqr needs Redis 7.0 or Valkey 7.2": "worqr needs"}
    for row in rows("errors.md", heading):
        for word in words(row[0]):
            assert word in servers_own or generated.get(word, word) in source, word


def test_the_reasons_of_a_failed_task_are_those_there_are() -> None:
    there = {word for row in rows("errors.md", "Errors in your handlers", 1) for word in words(row[1])}
    assert there == set(get_args(inspect.get_annotations(worqr.Failed, eval_str=True)["reason"]))


# timing.md


def numbers(heading: str, column: int, skipped: int = 0) -> list[float]:
    """The first number in each cell of a column."""
    return [float(re.findall(r"\d[\d.]*", row[column])[0]) for row in rows("timing.md", heading, skipped)]


def test_the_times_are_those_of_the_code() -> None:
    settings, mesh = LinkSettings("redis://localhost"), worqr.Mesh()
    assert numbers("Intervals and limits", 1) == [
        *(session.BEAT_EVERY, answer_timeout(mesh.keepalive), mesh.keepalive),
        *(leader.CHECK_EVERY, leader.MISSING_FOR, session.LEASE),
        *(
            leader.SCAN_EVERY,
            scanner.GRACE,
            consumer.RECONCILE_EVERY,
            mesh.block_limit,
            settings.patience,
        ),
        *(GRACE, consumer_runner.LEAVE_PATIENCE, leader.AT_MOST_EVERY),
        *(validation.MAX_FAILURES, validation.MAX_STALLS, policy.MAX_TIMEOUTS),
        *(policy.MIN_BACKOFF, policy.MAX_BACKOFF),
        *(
            PATIENT.max_failures,
            PATIENT.min_backoff,
            PATIENT.max_backoff,
            run_reports.SEND_EVERY,
            notifications.POLL_EVERY,
            notifications.POLL_EVERY,
        ),
        *(validation.KEEP_FAILED, mesh.max_payload / 2**20),
    ]
    assert f"at most {MAX_PATIENCE:g}" in section("timing.md", "Intervals and limits")


def test_the_times_of_workflows_are_those_of_the_code() -> None:
    lua = (LUA / "workflows.lua").read_text("utf-8") + (LUA / "children.lua").read_text("utf-8")
    minutes = [
        int(re.findall(rf"^local {name} = (\d+) -- ms", lua, re.MULTILINE)[0]) / 60_000
        for name in ("FIRST_LOOK", "NEXT_LOOK", "CHILD_EXPIRE")
    ]
    assert numbers("Workflows", 1) == [IN_MEMORY, durable.QUIET, *minutes]


def test_the_times_of_a_shutdown_are_those_of_the_code() -> None:
    found = [float(re.findall(r"(\d+) s", row[1])[0]) for row in rows("timing.md", "Shutdown")]
    assert found == [
        *(GRACE, service.WARN_AFTER, service.EXIT_AFTER, consumer_runner.DETACH_AFTER),
        *(asyncio_loop.LEAVE_WITHIN, consumer_runner.LEAVE_PATIENCE),
    ]
    assert schedule_ticker.UNSEEN_MS == 86_400_000, "a schedule that nobody declares is kept for a day"


# settings.md


def test_the_forms_of_urls_are_those_there_are() -> None:
    urls = [words(row[0])[0] for row in rows("settings.md", "URLs")]
    assert {url.partition(":")[0] for url in urls} == {*link_settings._SCHEMES, "embedded"}  # pyright: ignore[reportPrivateUsage]
    for url in urls:
        if url != "embedded:":
            link_settings.Address.parse(url)


def test_the_options_of_urls_are_those_there_are() -> None:
    found = columns("settings.md", "URLs", 1)
    known = link_settings._TLS_OPTIONS | link_settings._SENTINEL_OPTIONS | {"db"}  # pyright: ignore[reportPrivateUsage]
    assert set(found) == known
    for name, row in found.items():
        assert ("TLS" in row["in URLs"]) == (name in link_settings._TLS_OPTIONS)  # pyright: ignore[reportPrivateUsage]


def test_the_environment_variables_are_those_that_are_read() -> None:
    named = set(columns("settings.md", "Environment variables"))
    read = set(re.findall(r'environ(?:\.get\(|\[|\.pop\()"(\w+)"', SOURCE))
    read |= {
        name for name in ("WORQR_PREFIX", "WORQR_PATIENCE", "WORQR_CODEC", "WORQR_URL", "REDIS_URL") if name in SOURCE
    }
    assert named == read - {"TERM", "LC_ALL"}


def test_the_oldest_servers_are_those_that_are_let_in() -> None:
    found = {row[0]: tuple(map(int, row[1].split("."))) for row in rows("settings.md", "Server versions")}
    assert found == connector._OLDEST  # pyright: ignore[reportPrivateUsage]


def test_the_extras_are_those_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(columns("settings.md", "Extras")) == set(project["optional-dependencies"])


# job-states.md


def test_the_states_are_those_there_are() -> None:
    states = get_args(inspect.get_annotations(worqr.Status, eval_str=True)["state"])
    assert sorted(columns("job-states.md", "States")) == sorted(states)


def test_the_fields_of_a_status_are_those_there_are() -> None:
    assert set(columns("job-states.md", "Fields of a status")) == {field.name for field in fields(worqr.Status)}


def test_the_counters_are_those_of_the_scripts() -> None:
    source = "\n".join(script.text for script in all_scripts())
    counted = set(re.findall(r"\b(?:count|tally)\(\w+, '(\w+)'", source)) | {
        "failed",
        "undecodable",
        "retried",
        "stalled",
    }
    named = {word for row in rows("job-states.md", "Counters and events") for word in words(row[0])}
    assert named == counted


# wire.md, wire-jobs.md, wire-scripts.md


def shapes(keys: QueueKeys | RegistryKeys | BatchKeys, arguments: dict[str, Any]) -> set[str]:
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
    arguments = {
        "worker": "W1",
        "claim": "P1",
        "id": "ID",
        "digest": "DIGEST",
        "number": "NUMBER",
        "row": "ROW",
        "producer": "X",
        "period": "MS",
        "name": "X",
    }
    there = shapes(QueueKeys("worqr", "Q1"), arguments) | shapes(RegistryKeys("worqr"), arguments)
    there |= shapes(BatchKeys(QueueKeys("worqr", "Q1")), {"id": "ID", "token": "TOKEN"})
    there |= shapes(LimitKeys("worqr", "Q1"), {"period": "MS"})
    text = "".join((REFERENCE / page).read_text("utf-8") for page in ("wire.md", "wire-queues.md"))
    assert {key for key in there - {"", "{worqr}"} if f"`{key}`" not in text} == set()
    written = {end for script in all_scripts() for end in re.findall(r"\.\. '(:[a-z_]+)'", script.text)}
    written -= {":held", ":waiting", ":permits", ":turn", ":free"}  # of a named limit
    written -= {":parts", ":members", ":follow_ups"}  # they follow the key of a batch, and of a part
    assert {end for end in written if f"`worqr:{{Q1}}{end}`" not in text and f"`{{worqr}}{end}`" not in text} == set()


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
    named = set(re.findall(r"`(\w+)`", section("wire-jobs.md", "Records")))
    assert len(seen) > 30
    assert seen - named == set()


def test_every_script_is_on_the_page_and_no_other() -> None:
    named = {word for row in rows("wire-scripts.md", "Scripts") for word in words(row[0])}
    assert named == {script.name for script in all_scripts()}
    assert {name for name in named if not hasattr(ops, name)} == set()


# schedules.md


@pytest.mark.parametrize("row", rows("schedules.md", "Cron expressions", 1), ids=lambda row: row[0].strip("`"))
def test_a_cron_expression_fires_when_the_page_says(row: list[str]) -> None:
    trigger = Trigger(Definition(name="x", queue="x", task=b"", cron=words(row[0])[0], timezone=row[1]))
    moment, found = ms_of(datetime(2031, 1, 1, tzinfo=UTC)), list[str]()
    for _ in range(3):
        moment = trigger.next_after(moment)
        found.append(f"{at(moment):%Y-%m-%d %H:%M}")
    assert ", ".join(found) == row[2]


def test_the_bounds_of_schedules_are_those_of_the_code() -> None:
    bounds = {row[0]: row[1] for row in rows("schedules.md", "Bounds")}
    assert bounds["period of `every`"] == f"at least {cron.MIN_PERIOD:g} s"
    assert bounds["payload of a scheduled call"].startswith(f"{cron.MAX_TASK // 1024} KiB;")
    assert bounds["cron expression"] == f"{cron.LONGEST_EXPRESSION} characters"
    assert bounds["name of a time zone"] == f"{cron.LONGEST_ZONE} characters"
    assert bounds["missed firings that are made up for"] == f"{cron.MAX_CATCH_UP}"
    assert bounds['firings that wait with `overlap="queue"`'].startswith(f"{schedule_ticker.MAX_PENDING};")
    text = section("schedules.md", "Missed firings")
    assert f"up to {cron.ON_TIME_MS // 1000} s late" in text
    for heading, words_of_code in (
        ("Missed firings", [*cron.MISFIRES]),
        ("Overlap", [*cron.OVERLAPS]),
    ):
        assert [words(row[0])[0].strip('"') for row in rows("schedules.md", heading) if "`" in row[0]] == words_of_code
    assert schedule_ticker.REDECLARE == 600
    assert cron.AHEAD_MS == 60_000
