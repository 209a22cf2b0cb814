"""What `tools.house` counts as a line of code, and as a word."""

from __future__ import annotations

from tools.house import lines_of, measure, words, words_of


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    text = '"""A\nmodule."""\n\n# why\nx = """a\n\nb"""\n\n\ndef f() -> None:\n    """Say so."""\n    pass  # here\n'
    assert lines_of(text) == 5


def test_everything_is_counted() -> None:
    files, lines = measure("worqr")
    scripts, lua = measure("worqr/lua", "*.lua")
    assert files > 100
    assert lines > 100 * files
    assert lua > 100 * scripts > 1000


def test_the_bars_of_a_table_are_no_words() -> None:
    assert words_of("| a name | 3 ms |\n|---|--:|\n\n```sh\nworqr run\n```\n") == 6


def test_all_pages_are_counted() -> None:
    pages, written = words("docs")
    assert pages > 50
    assert written > 100 * pages
