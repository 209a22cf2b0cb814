"""The registry of log events, the code that emits them, and the tables in the documents say the same.

After a change of the registry, ``python -m tests.test_log_events`` writes the tables anew.
"""

from __future__ import annotations

import ast
import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import MODULES, Module
from worqr import log_events
from worqr.log_events import EVENTS, FIELDS, emit

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "log-events.md"
EMITTERS = {"emit": 1, "emit_fields": 1, "LineLimit": 1, "error": 1, "_line": 0, "end_now": 0}
"""What logs an event, and which of its arguments, behind `self`, is the event's name."""
PASSED_ON = {
    "worqr.log_events",
    "worqr.link.log_thread",
    "worqr.peer.error_throttle",
    "worqr.link.heartbeat",
    "worqr.hosting.service",
}
"""Modules in which a call may pass on an event that it was given."""
RUN = ("queue", "job", "attempt", "attempts", "worker")
"""The fields of every line about one run of one task, which the page names once."""
REPEATED = "repeated"
"""A field of errors that are logged once per minute, which the page explains before the table."""
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the last part of what is called."""
    for node in module.each(ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield node.func.attr, node
        elif isinstance(node.func, ast.Name):
            yield node.func.id, node


def emitted() -> Iterator[tuple[str, str, ast.Call]]:
    """(module, event, call) of every line of the code that logs an event."""
    for source in MODULES:
        module = f"worqr.{source.name}"
        for name, call in calls(source):
            arguments = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
            for arg in call.args:
                if isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Tuple):
                    arguments += arg.value.elts
            if name in EMITTERS and len(arguments) > EMITTERS[name]:
                given = arguments[EMITTERS[name]]
                if isinstance(given, ast.Name) and given.id == "event":
                    assert module in PASSED_ON | {"worqr.peer.task_log"}, f"{module}:{call.lineno}"
                yield from ((module, event, call) for event in strings(given))
            if name == "append" and module == "worqr.link.heartbeat":
                yield module, "loop.turns", call


def strings(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def assigned_events() -> set[str]:
    """Names of events that are chosen before the call."""
    return {
        text
        for module in MODULES
        for node in module.each(ast.Assign)
        if any(isinstance(t, ast.Name) and t.id == "event" for t in node.targets)
        for text in strings(node.value)
    }


def test_every_event_that_is_logged_is_in_the_registry_and_no_other() -> None:
    assert {event for _, event, _ in emitted()} | assigned_events() == set(EVENTS)


def test_nothing_is_logged_but_events() -> None:
    for source in MODULES:
        module = f"worqr.{source.name}"
        for name, call in calls(source):
            of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            assert not (name in METHODS and of in {"logger", "logging", "log", "self._logger"}), (
                f"{module}:{call.lineno}"
            )


def test_events_carry_the_fields_that_the_registry_says() -> None:
    given: dict[str, set[str]] = {name: set() for name in EVENTS}
    for module, event, call in emitted():
        names = {keyword.arg for keyword in call.keywords if keyword.arg} - {
            "level",
            "exc_info",
            "exc_text",
            "stacklevel",
        }
        assert names <= set(EVENTS[event].fields), f"{module}:{call.lineno}: {event}"
        given[event] |= names
    assert all(given[event] for event in ("link.lost", "claim.lost", "settle.refused"))


def test_levels_are_those_of_the_registry() -> None:
    for module, event, call in emitted():
        for keyword in call.keywords:
            if keyword.arg == "level" and isinstance(keyword.value, ast.Attribute):
                assert getattr(logging, keyword.value.attr) in EVENTS[event].levels, f"{module}:{call.lineno}: {event}"


def test_every_field_is_explained_and_no_attribute_of_log_records_is_one() -> None:
    used = {field for event in EVENTS.values() for field in event.fields} | {"event"}
    assert used == set(FIELDS)
    own = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
    assert not used & own


# What `emit` does


def test_a_line_begins_with_its_event_and_its_facts_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("worqr.test.events")
    emit(logger, "claim.lost", "queue %(queue)r, claim %(claim)d: lost", queue="a%b", claim=7)
    (record,) = caplog.records
    assert record.getMessage() == "claim.lost: queue 'a%b', claim 7: lost"
    assert (record.levelno, record.funcName) == (
        logging.WARNING,
        "test_a_line_begins_with_its_event_and_its_facts_are_fields",
    )
    found = record.__dict__
    assert (found["event"], found["queue"], found["claim"]) == ("claim.lost", "a%b", 7)


def test_a_line_without_fields_is_taken_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    emit(logging.getLogger("worqr.test.events"), "asyncio.raised", "100 %", exc_info=ValueError("why"))
    assert caplog.records[0].getMessage() == "asyncio.raised: 100 %"
    assert "ValueError: why" in caplog.text


def test_a_record_factory_that_sets_such_a_field_itself_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = before(*args, **kwargs)  # type: ignore[arg-type]
        record.worker = "of the application"
        return record

    logging.setLogRecordFactory(factory)
    try:
        emit(logging.getLogger("worqr.test.events"), "worker.lost", "worker %(worker)s", worker="w1", reason="r")
    finally:
        logging.setLogRecordFactory(before)
    (record,) = caplog.records
    assert record.getMessage() == "worker.lost: worker w1"
    assert (record.__dict__["worker"], record.__dict__["reason"]) == ("of the application", "r")


# What the logging of an application raises


class Raises(logging.Handler):
    """A handler of an application, which raises, or notes its lines."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.error is not None:
            raise self.error
        self.lines.append(record.getMessage())


def errors() -> list[BaseException]:
    return [
        type("AlertsAreDown", (each,), {})("the service is down") for each in (Exception, BaseException, SystemExit)
    ]


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger whose lines go to its own handlers only. Nothing was reported yet."""
    monkeypatch.setattr(log_events, "_reported", set())
    logger = logging.getLogger("worqr.test.fence")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.propagate = True
    logger.handlers[:], logger.filters[:] = [], []


@pytest.mark.parametrize("event", EVENTS)
def test_a_handler_that_raises_costs_the_caller_nothing_and_the_other_handlers_no_line(
    event: str, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = Raises(), Raises()
    bad = [Raises(error) for error in errors()]
    for handler in (before, *bad, after):
        logger.addHandler(handler)
    for _ in range(2):
        emit(logger, event, "what happened", exc_info=ValueError("x"))
    assert before.lines == after.lines == [f"{event}: what happened"] * 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(bad)  # once for each kind, and not once per line
    assert all(
        "a log handler or filter raised AlertsAreDown: the service is down, at " in line
        and __file__ in line
        and line.endswith(f"The line was: {event}: what happened")
        for line in said
    )


@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__base__.__name__)
@pytest.mark.parametrize("where", ["filter of a handler", "filter of the logger", "record factory", "logger class"])
def test_no_part_of_an_applications_logging_raises_in_worqr(
    where: str, error: BaseException, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Raises(), Raises()
    factory, kind = logging.getLogRecordFactory(), logger.__class__

    def raising(*_args: object, **_options: object) -> Any:
        raise error

    logger.addHandler(bad)
    logger.addHandler(good)
    if where == "filter of a handler":
        bad.addFilter(raising)
    elif where == "filter of the logger":
        logger.addFilter(raising)
    elif where == "record factory":
        logging.setLogRecordFactory(raising)
    else:
        logger.__class__ = type("Odd", (logging.Logger,), {"handle": raising})
    try:
        emit(logger, "link.back", "the server answers")
    finally:
        logging.setLogRecordFactory(factory)
        logger.__class__ = kind
    assert good.lines == ["link.back: the server answers"]
    assert capsys.readouterr().err.count("AlertsAreDown") == 1


class Odd(Exception):
    """An error of a client library: unknown attributes come from its reply."""

    def __getattr__(self, name: str) -> object:
        return {}[name]


def chain(length: int) -> BaseException:
    error: BaseException = ValueError("first")
    for _ in range(length):
        outer = ValueError("outer")
        outer.__cause__, error = error, outer
    return error


@pytest.mark.parametrize("error", [Odd("x"), chain(3000)], ids=["attributes that raise", "a long chain"])
def test_an_error_that_python_cannot_print_costs_no_line(error: BaseException, logger: logging.Logger) -> None:
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    emit(logger, "task.failed", "queue %(queue)r", queue="q", exc_info=error)
    said = stream.getvalue().splitlines()
    assert said[0] == "task.failed: queue 'q'"
    shown = (
        "(its traceback cannot be shown: ",
        "ValueError: outer",
        "test",
        "Ignored error getting ",
    )  # the last: Python 3.13
    assert said[-1].startswith(shown)


def test_ctrl_c_in_a_log_handler_of_the_main_thread_is_raised(logger: logging.Logger) -> None:
    logger.addHandler(Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        emit(logger, "link.back", "the server answers")
    ended: list[bool] = []

    def in_a_thread() -> None:
        emit(logger, "link.back", "the server answers")
        ended.append(True)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert ended


@pytest.mark.parametrize("stderr", [None, Raises(ValueError("closed"))], ids=["none", "one that raises"])
def test_a_standard_error_that_cannot_be_written_changes_nothing(
    stderr: Any, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    logger.addHandler(Raises(type("New", (Exception,), {})()))
    emit(logger, "link.back", "the server answers")


# The tables


def tables() -> dict[str, str]:
    """What stands on the page between ``<!-- NAME -->`` and ``<!-- end -->``. A level that the meaning names is not repeated."""
    lines = ["| event | level and meaning | fields |", "|---|---|---|"]
    for name, event in EVENTS.items():
        levels = [logging.getLevelName(level) for level in event.levels]
        levels = ", ".join(level for level in levels if not re.search(rf"\b{level}\b", event.meaning))
        of_run = event.fields[: len(RUN)] == RUN
        fields = ["*run*"] * of_run + [f"`{field}`" for field in event.fields[of_run * len(RUN) :] if field != REPEATED]
        lines.append(f"| `{name}` | {levels}: {event.meaning} | {', '.join(fields)} |")
    by_meaning: dict[str, list[str]] = {}
    for name, meaning in FIELDS.items():
        by_meaning.setdefault(meaning, []).append(f"`{name}`")
    fields = [f"| {', '.join(names)} | {meaning} |" for meaning, names in by_meaning.items()]
    loggers = sorted({name for module in MODULES for name in logger_names(f"worqr.{module.name}", module.tree)})
    return {
        "log events": "\n".join(lines),
        "log fields": "\n".join(["| field | holds |", "|---|---|", *fields]),
        "loggers": "\n".join(["```text", *loggers, "```"]),
    }


def logger_names(module: str, tree: ast.Module) -> Iterator[str]:
    """The name of the module's logger: its own, or the one that it had when it was documented."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "logger":
            assert isinstance(node.value, ast.Call), module
            (name,) = node.value.args
            yield name.value if isinstance(name, ast.Constant) else module


def written(text: str) -> str:
    """The page with the tables as they should be."""
    for name, table in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )  # type: ignore[misc]
    return text


@pytest.mark.parametrize("name", ["log events", "log fields", "loggers"])
def test_the_page_has_the_table(name: str) -> None:
    """Write it with ``python -m tests.test_log_events``."""
    text = PAGE.read_text("utf-8")
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", text, re.S)
    assert found == tables()[name]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
