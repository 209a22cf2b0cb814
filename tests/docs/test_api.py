"""Every public name stands on exactly one page of the API reference, with the members that users may rely on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest_worqr
import worqr
import worqr.codecs
import worqr.dashboard
import worqr.metrics
import worqr.otel
import worqr.probes
import worqr.sql
import worqr.testing
import worqr.webhooks
from tests.support.cases import of_each
from tests.support.children import ROOT
from tools.pages import DOCS

FACE = (ROOT / "tests" / "face.txt").read_text("utf-8")
PAGES = sorted((DOCS / "reference" / "api").glob("*.md"))
ENTRY = re.compile(r"^::: ([\w.]+)\n((?:^    .*\n)*)", re.MULTILINE)
FIXTURES = {f"pytest_worqr.{name}" for name in vars(pytest_worqr) if name.startswith("worqr_")}
TWICE_NAMED = {"worqr.testing.recording.recording": "worqr.testing.recording"}
"""A function that has the name of its module: mkdocstrings must be told which of them is meant."""


def entries() -> Iterator[tuple[str, list[str] | None]]:
    """Each name that a page asks for, with the members that it asks for; None: it does not say."""
    for page in PAGES:
        for name, options in ENTRY.findall(page.read_text("utf-8")):
            found = re.search(r"^      members:(.*(?:\n        - .*)*)", options, re.MULTILINE)
            members = re.findall(r"\w+", found[1]) if found else None
            yield TWICE_NAMED.get(name, name), [] if members == ["false"] else members


def test_every_public_name_is_on_one_page() -> None:
    public = {f"worqr.{name}" for name in worqr.__all__} | FIXTURES
    public |= {f"worqr.testing.{name}" for name in worqr.testing.__all__}
    public |= {f"worqr.dashboard.{name}" for name in worqr.dashboard.__all__}
    public |= {f"worqr.codecs.{name}" for name in worqr.codecs.__all__}
    public |= {f"worqr.otel.{name}" for name in worqr.otel.__all__}
    public |= {f"worqr.sql.{name}" for name in worqr.sql.__all__}
    public |= {f"worqr.webhooks.{name}" for name in worqr.webhooks.__all__}
    public |= {"worqr.probes.serve", "worqr.metrics.peer_collector"}
    assert len(FIXTURES) == 5
    assert sorted(name for name, _ in entries()) == sorted(public)


def object_named(name: str) -> Any:
    found: Any = {"worqr": worqr, "pytest_worqr": pytest_worqr}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


CLASSES = {name: members for name, members in entries() if isinstance(object_named(name), type)}


@of_each("name", CLASSES)
def test_a_class_says_which_members_it_shows(name: str) -> None:
    members = CLASSES[name]
    assert members is not None, "without a list, all members would be shown"
    assert len(members) == len(set(members))
    kind = object_named(name)
    annotated = {each for base in kind.__mro__ for each in getattr(base, "__annotations__", {})}
    there = annotated | set(dir(kind)) | set(re.findall(r"\bself\.(\w+)\b", _init_of(kind)))
    assert set(members) <= there


def _init_of(kind: type) -> str:
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "worqr"]
    own = [each for base in ours for each in vars(base).values() if inspect.isfunction(each)]
    own = [inspect.unwrap(each) for each in own]
    return "".join(inspect.getsource(each) for each in own if "worqr" in each.__code__.co_filename)


def promised_members(name: str) -> set[str]:
    """What tests/face.txt says that a class has, without what its constructor takes, which is shown with the class."""
    short = re.escape(name.removeprefix("worqr."))
    found = {each for fields in re.findall(rf"^{short}: (.*)$", FACE, re.MULTILINE) for each in fields.split(", ")}
    found |= set(re.findall(rf"^(?:async )?{short}\.(\w+)\(", FACE, re.MULTILINE))
    kind = object_named(name)
    taken = set(inspect.signature(kind).parameters) if "__init__" in found else set[str]()
    return found - taken - {"__init__", "__aenter__", "__anext__"}  # blocks and loops are in the text


@of_each("name", CLASSES)
def test_a_class_shows_all_members_that_are_promised(name: str) -> None:
    assert promised_members(name) - set(CLASSES[name] or ()) == set()
