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


def test_a_finding_names_page_line_and_sentence() -> None:
    [finding] = prose.findings(PAGE, "# Title\n\nFine.\n\nNobody waits.\n")
    assert str(finding) == "docs/page.md:5: unwanted: 'Nobody': Nobody waits."
