"""The state tables of "How it is built" are those of the docstrings."""

from __future__ import annotations

import pytest

from tools import state_tables

SIMPLE = """Phases.

=====  ===========  =======
phase  begins with  sends
                    replies
=====  ===========  =======
NEW    its          no
       creation
LEFT   `leave`      -
=====  ===========  =======
"""


def test_the_page_has_the_tables_of_the_docstrings() -> None:
    page = state_tables.PAGE.read_text("utf-8")
    assert page.count("<!-- state table of ") >= 5
    assert state_tables.filled(page) == page, "run python -m tools.state_tables"


def test_a_table_is_read_with_its_continued_lines() -> None:
    assert state_tables.markdown(state_tables.table_of(SIMPLE)) == (
        "| phase | begins with | sends replies |\n|---|---|---|\n| NEW | its creation | no |\n| LEFT | `leave` | - |\n"
    )


def test_a_docstring_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no table"):
        state_tables.table_of("Phases.")
