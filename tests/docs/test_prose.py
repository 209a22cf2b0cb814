"""The check of sentences (`tools.prose`), and that the documentation passes it."""

from __future__ import annotations

import pytest

from tools import prose

PAGE = prose.ROOT / "docs" / "page.md"
LONG = " ".join(["word"] * 26)


def reasons(text: str) -> list[str]:
    return [finding.reason for finding in prose.findings(PAGE, text)]


def test_all_pages_pass() -> None:
    assert prose.main([]) == 0


def test_no_page_has_more_than_3000_words_but_those_that_are_generated() -> None:
    pages = {path.stem: len(path.read_text("utf-8").split()) for path in (prose.ROOT / "docs").rglob("*.md")}
    assert {name for name, words in pages.items() if words > 3000} <= {"cli", "log-events"}


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a short sentence": ("One two three.", []),
        "a long one": (f"{LONG}.", ["26 words"]),
        "over two lines": (LONG.replace(" ", "\n", 1) + ".", ["26 words"]),
        "two that are short": (f"{LONG[:60]}. {LONG[:60].capitalize()}.", []),
        "in a list": (f"- {LONG}\n- {LONG}", ["26 words", "26 words"]),
        "in a quotation": (f"> {LONG}", ["26 words"]),
        "in an admonition": (f"!!! note\n    {LONG}", ["26 words"]),
        "code is one word": (f"`{LONG}` is code.", []),
        "in a block of code": (f"```sh\n{LONG}\n```", []),
        "in an indented block of code": (f"    ```sh\n    {LONG}\n    ```", []),
        "in a table": (f"| {LONG} |", []),
        "in a heading": (f"# {LONG}", []),
        "in a comment": (f"<!-- {LONG} -->", []),
        "a link is its text": ("[" + "a b c](x y z)" + " d" * 21, []),
        "an unwanted word": ("Whoever waits.", ["unwanted: 'Whoever'"]),
        "an unwanted word over two lines": ("It is set\naside.", ["unwanted: 'set aside'"]),
        "an unwanted word in code": ("`whoever` is a name.", []),
    }.values(),
)
def test_the_rules(text: str, expected: list[str]) -> None:
    assert reasons(text) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    {
        "a docstring": ("a.py", '"""Whoever waits."""\n', [1]),
        "a docstring over two lines": ("a.py", 'def f() -> None:\n    """It is\n    told."""\n', [2]),
        "a docstring of an attribute": ("a.py", 'A = 1\n"""Nobody waits."""\n', [2]),
        "a comment": ("a.py", "A = 1\nB = 2  # for nobody\n", [2]),
        "comments over two lines": ("a.py", "A = 1\n# It is set\n# aside.\n", [2]),
        "two comments": ("a.py", "A = 1  # It is set\n\nB = 2  # aside.\n", []),
        "a string": ("a.py", 'A = "nobody"\n', []),
        "a name": ("a.py", "nobody = 1  # see `nobody`\n", []),
        "a long sentence": ("a.py", f'"""{LONG}."""\n', []),
        "a comment of Lua": ("a.lua", "-- RETURNS ok\nlocal a = 1 -- for nobody\n", [1]),
        "a string of Lua": ("a.lua", "local nobody = 'nobody'\n", []),
    }.values(),
)
def test_code_is_checked_for_words(name: str, text: str, expected: list[int]) -> None:
    file = prose.ROOT / "worqr" / name
    assert [finding.line for finding in prose.findings_in_code(file, text)] == expected


def test_the_code_that_is_checked() -> None:
    checked = {file.relative_to(prose.ROOT).as_posix() for file in prose.code_files() if not prose.is_excepted(file)}
    assert {
        "worqr/mesh.py",
        "worqr/lua/queue.lua",
        "worqr/peer/executors/processes/pool.py",
        "tools/pages.py",
    } <= checked


def test_a_finding_names_page_line_and_sentence() -> None:
    [finding] = prose.findings(PAGE, "# Title\n\nFine.\n\nNobody waits.\n")
    assert str(finding) == "docs/page.md:5: unwanted: 'Nobody': Nobody waits."
