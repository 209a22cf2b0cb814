"""What programs that write code read: the rules for agents, and the list of all pages."""

from __future__ import annotations

import importlib
import re

import worqr
from tests.support.children import ROOT
from tools import site
from worqr.cli import make_app

RULES = (ROOT / "docs" / "howto" / "coding-agents.md").read_text("utf-8")


def test_the_rules_for_agents_name_what_there_is() -> None:
    commands = set(re.findall(r"`worqr ([a-z-]+)", RULES))
    assert commands
    assert commands <= {str(name) for name in make_app()}
    names = re.findall(r"\bworqr\.([A-Za-z_]+)(?:\.([A-Za-z_]+))?", RULES)
    assert {("Mesh", ""), ("Retry", "")} <= set(names)
    for name, inside in names:
        if name != "readthedocs":
            found = importlib.import_module(f"worqr.{name}") if inside else getattr(worqr, name)
            assert not inside or hasattr(found, inside), f"worqr.{name}.{inside}"


def test_the_list_of_pages_has_their_titles_addresses_and_first_sentences() -> None:
    texts = {"index.md": "# Home\n\n![x](y.png)\n\nIt [queues](a.md) tasks. And more.", "a/b.md": "# B\n\n| a |\n|---|"}
    pages = {"All": list(texts)}
    listed = site.llms_txt("worqr", "A mesh.", "https://example.org/", pages, texts)
    assert listed.splitlines() == [
        "# worqr",
        "",
        "> A mesh.",
        "",
        "## All",
        "",
        "- [Home](https://example.org/index.md): It queues tasks.",
        "- [B](https://example.org/a/b/index.md): ",
    ]
