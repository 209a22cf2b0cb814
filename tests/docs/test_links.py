"""Links of the pages lead somewhere, every page is in the navigation, and every test that a page names exists.

The strict build of the site checks links, too. This needs nothing but the files, and knows the pages at the top of the clone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.children import ROOT
from tools.pages import DOCS

AT_TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
PREDECESSORS = ROOT / "tests" / "PREDECESSORS.md"
PAGES = [*(page for page in AT_TOP if page.exists()), PREDECESSORS, *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
ON_ONE_LINE = re.compile(r"(`+).*?\1")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, where some values are names of Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def prose_of(page: Path) -> str:
    """The text without fenced blocks."""
    return FENCED.sub("", page.read_text("utf-8"))


def text_of_heading(title: str) -> str:
    title = re.sub(r"\{[^}]*\}\s*$", "", title)  # attributes
    title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return title.replace("`", "")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: those of headings, as Python-Markdown makes them, those that it sets, and those of the API."""
    text = prose_of(page)
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", text_of_heading(title)).strip().lower()
        slug = re.sub(r"[-\s]+", "-", plain)
        found[slug] = found.get(slug, -1) + 1
    slugs = {slug if i == 0 else f"{slug}_{i}" for slug, last in found.items() for i in range(last + 1)}
    slugs |= set(re.findall(r"\{[^}\n]*#([\w-]+)[^}\n]*\}", text)) | set(re.findall(r'id="([^"]+)"', text))
    for name, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", text, re.MULTILINE):
        members = re.search(r"members:(.*(?:\n        - .*)*)", options)
        slugs |= {name, *(f"{name}.{member}" for member in re.findall(r"\w+", members[1] if members else ""))}
    return frozenset(slugs)


def links(page: Path) -> Iterator[str]:
    text = ON_ONE_LINE.sub("", prose_of(page))
    yield from re.findall(r"\]\(\s*<?([^)\s>]+)[^)]*\)", text)
    yield from re.findall(r"^\[[^\]]+\]: +(\S+)", text, re.MULTILINE)
    yield from re.findall(r'(?:href|src)="([^"]+)"', text)


def file_of(page: Path, name: str) -> Path | None:
    """The file that a link means; None for other places."""
    if re.match(r"[a-z]+:", name):
        return None
    return (page.parent / name).resolve() if name else page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        there = file_of(page, name)
        if there is None:
            continue
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), target


def test_every_page_is_in_the_navigation() -> None:
    def listed(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from listed(each)

    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    there = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(listed(settings["nav"])) == there


def test_every_test_that_the_pages_name_exists() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    source = "\n".join(path.read_text("utf-8") for path in files)
    there = {*re.findall(r"def (test_\w+)", source), *(path.stem for path in files)}
    about_tests = [PREDECESSORS, *(DOCS / "explain").glob("*.md")]  # other pages name tests of their readers
    named = {name for page in about_tests for name in re.findall(r"`(test_\w+)`", prose_of(page))}
    assert named - there == set()
