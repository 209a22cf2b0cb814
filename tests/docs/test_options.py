"""The pages docs/reference/options.md and retries.md have every option, with its default and its bounds."""

from __future__ import annotations

import inspect
import re
import warnings
from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest

import worqr
from tests.docs.tables import columns, rows, section, words
from worqr.client.client import MAX_PATIENCE
from worqr.cron import MAX_CATCH_UP, Definition
from worqr.functions.registry import ScheduleOptions
from worqr.handler_options import PATIENT, handling
from worqr.job_options import MAX_ID, MAX_META, MAX_REPLICAS, PLAIN, encode_options
from worqr.keys import MAX_SHARDS
from worqr.peer.options import CONCURRENCY, GRACE, THREADS
from worqr.peer.scheduler import AUTO_MAX
from worqr.policy import Policy

PAGE = "options.md"
RETRIES = "retries.md"
FUNCTION = columns(PAGE, "Options of a function")
DISPATCH = columns(PAGE, "Options of a dispatch")
WORKER = columns(PAGE, "Options of a worker")
MESH = columns(PAGE, "Options of a mesh")
SCHEDULE = columns(PAGE, "Options of a schedule")
POLICY = columns(RETRIES, "Retry policy")


def literals(options: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """Defaults that stand on the page as code or as a number; the others are said in words."""
    found: dict[str, object] = {}
    for name, row in options.items():
        text = row["default"].strip("`")
        if row["default"].startswith("`") or re.fullmatch(r"[\d.]+", text):
            found[name] = text if text.endswith("()") and text != "()" else literal_eval(text)
    return found


def defaults_of(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {each.name: each.default for each in parameters if each.kind in kinds and each.name not in {"self", "fn"}}


def test_the_options_of_a_function() -> None:
    assert set(FUNCTION) == {"name", "aliases", "lifetime", *worqr.ListHandlerOptions.__annotations__}
    how = handling("task", {})
    policy = {"timeout": None, "result_ttl": None, "keep_failed": how.policy.keep_failed, "retry": "RetryPolicy()"}
    assert (how.policy.timeout, how.policy.result_ttl, how.failing) == (None, 0, None)
    handled = {name: getattr(how, name) for name in FUNCTION if hasattr(how, name)}
    in_words = {"name", "on_failure_retry"}
    expected = {"aliases": (), "on_failure_timeout": None, "limit": how.limits, **policy, **handled}
    assert literals(FUNCTION) == {name: value for name, value in expected.items() if name not in in_words}
    assert f"1 to {MAX_SHARDS}" in FUNCTION["shards"]["bounds"]


def test_where_an_option_of_a_function_can_be_given() -> None:
    text = section(PAGE, "Options of a function")
    [per_call] = re.findall(r"^- Override (.*) for one job", text, re.MULTILINE)
    assert set(words(per_call)) == set(FUNCTION) & set(worqr.JobOptions.__annotations__)
    [not_served] = re.findall(r"^- `peer.serve.* except (.*)", text, re.MULTILINE)
    assert set(words(not_served)) == {
        *("name", "aliases", "batch_size", "batch_wait", "max_length", "shards", "keep", "tags")
    }
    assert set(words(not_served)) <= set(FUNCTION)


def test_the_options_of_a_dispatch() -> None:
    assert set(DISPATCH) == set(worqr.JobOptions.__annotations__)
    assert literals(DISPATCH) == {
        "delay": 0,
        "wait": 0,
        "front": False,
        "keep_task": False,
        "if_exists": "update",
        "update": "Update()",
        "meta": {},
        **dict.fromkeys(("then", "otherwise")),
        **dict.fromkeys(set(FUNCTION) & set(DISPATCH)),  # None: that of the function
    }
    bounds = {name: row["bounds"] for name, row in DISPATCH.items()}
    assert f"1 to {MAX_ID} bytes" in bounds["id"]
    assert f"at most {MAX_META} bytes" in bounds["meta"]
    assert bounds["replicas"] == f"0 to {MAX_REPLICAS}"


def test_the_fields_of_an_update() -> None:
    found = columns(PAGE, "Update")
    assert list(found) == [field.name for field in fields(worqr.Update)]
    assert literals(found) == {field.name: field.default for field in fields(worqr.Update)}


def test_the_fields_of_the_retry_policy() -> None:
    assert list(POLICY) == [field.name for field in fields(worqr.RetryPolicy)]
    for title, policy in (("default", Policy()), ("failure handlers", PATIENT)):
        expected = {name: getattr(policy, name) for name in POLICY if not name.endswith("_on")}
        expected["backoff"] = policy.own_backoff
        assert literals({name: {"default": row[title]} for name, row in POLICY.items()}) == expected
    assert {row["default"] for name, row in POLICY.items() if name.endswith("_on")} == {"all", "none"}


def test_the_series_of_the_backoff() -> None:
    series = [[float(cell) for cell in row[1:]] for row in rows(RETRIES, "Retry policy", 1)]
    assert series == [[each.backoff(times) for times in range(9)] for each in (Policy(), PATIENT)]
    minutes = sum(series[0]) / 60
    assert f"has waited {minutes:g} minutes" in section(RETRIES, "Retry policy")


def test_the_arguments_of_retry() -> None:
    found = columns(RETRIES, "Retry")
    assert literals(found) == defaults_of(worqr.Retry)


def test_the_options_of_a_worker() -> None:
    assert set(WORKER) == set(worqr.JoinOptions.__annotations__)
    numbers = {"concurrency": CONCURRENCY, "threads": THREADS, "grace": GRACE}
    assert literals(WORKER) == {**numbers, "process_memory": None, "runs_per_process": None, "memory_per_process": None}
    assert f"between 1 and {AUTO_MAX}" in WORKER["concurrency"]["meaning"]


def test_the_options_of_a_mesh() -> None:
    assert literals(MESH) == defaults_of(worqr.Mesh)
    assert list(MESH) == list(defaults_of(worqr.Mesh))
    assert f"at most {MAX_PATIENCE:g}" in MESH["patience"]["bounds"]
    assert MESH["replicas"]["bounds"] == f"0 to {MAX_REPLICAS}"


def test_the_options_of_a_schedule() -> None:
    assert list(SCHEDULE) == list(ScheduleOptions.__annotations__)
    default = Definition(name="x", queue="x", task=b"")
    assert (default.misfire, default.jitter_ms) == (1, 0)
    expected = {"timezone": default.timezone, "misfire": "once", "overlap": default.overlap, "jitter": 0}
    assert literals(SCHEDULE) == expected
    assert SCHEDULE["misfire"]["bounds"] == f"1 to {MAX_CATCH_UP}"


def test_the_options_of_an_enqueue() -> None:
    table = columns(PAGE, "Options of an enqueue")
    assert list(table) == list(worqr.EnqueueOptions.__annotations__)
    assert literals(table) == PLAIN._asdict()


# The bounds


def give_to_function(name: str, value: Any) -> None:
    needed: dict[str, Any] = {"on_failure": print} if name.startswith("on_failure_") else {}
    if name == "batch_wait":
        needed = {"batch_size": 100}
    if name == "cost":
        needed = {"limit": worqr.Limit(rate=1_000_000, per=60, unit="tokens", name="x")}
    declare: Any = worqr.Registry().workflow if name == "lifetime" else worqr.Registry().task
    declare(**{**needed, name: value})


def give_to_dispatch(name: str, value: Any) -> None:
    encode_options({name: value, **({"id": "x"} if name == "unique_for" else {})})


def give_to_policy(name: str, value: Any) -> None:
    worqr.RetryPolicy(**{name: value})


def give_to_worker(name: str, value: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # the peer is never started
        worqr.Mesh().join_in_thread(**{name: value})


def give_to_mesh(name: str, value: Any) -> None:
    worqr.Mesh(**{name: value})


def give_to_schedule(name: str, value: Any) -> None:
    mesh = worqr.Mesh()
    mesh.every(60, mesh.call("f"), **{name: value})


BOUNDED = [
    pytest.param(give, name, row["bounds"], id=f"{give.__name__[8:]}-{name}")
    for give, options in (
        (give_to_function, FUNCTION),
        (give_to_dispatch, DISPATCH),
        (give_to_policy, POLICY),
        (give_to_worker, WORKER),
        (give_to_mesh, MESH),
        (give_to_schedule, SCHEDULE),
    )
    for name, row in options.items()
    if re.match(r"at least \d|above 0|\d+ to \d+", row["bounds"])
]


def limits(bounds: str) -> tuple[list[Any], list[Any]]:
    """Values that these bounds allow, and values that they do not."""
    if size := re.match(r"(\d+) to (\d+) bytes", bounds):
        shortest, longest = map(int, size.groups())
        return ["x" * shortest, "x" * longest], ["x" * (shortest - 1), "x" * (longest + 1)]
    if spread := re.match(r"(\d+) to (\d+)", bounds):
        low, high = map(int, spread.groups())
        return [low, high], [low - 1, high + 1]
    if bounds.startswith("above 0"):
        return [0.001], [0, -1]
    least = int(re.findall(r"\d+", bounds)[0])
    return [least, least + 1], [least - 1]


@pytest.mark.parametrize(("give", "name", "bounds"), BOUNDED)
def test_an_option_has_the_bounds_of_the_page(give: Callable[[str, Any], None], name: str, bounds: str) -> None:
    allowed, refused = limits(bounds)
    for value in allowed:
        give(name, value)
    for value in refused:
        with pytest.raises(worqr.UsageError):
            give(name, value)


def test_options_that_exclude_each_other() -> None:
    both: dict[str, Any] = {"delay": 1, "run_at": datetime.now(UTC)}
    for wrong in (both, {"unique_for": 5}, {"run_at": datetime(2031, 1, 1)}):
        with pytest.raises(worqr.UsageError):
            encode_options(wrong)
    with pytest.raises(worqr.UsageError):
        handling("task", {"on_failure_timeout": 5}).check_failing("f")
    assert len(BOUNDED) > 25
