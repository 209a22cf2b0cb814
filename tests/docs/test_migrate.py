"""The programs and commands in docs/migrate run as they stand there."""

from __future__ import annotations

import ast

from tests.docs.reading import read_pages
from tools.pages import DOCS, ROOT, blocks_of, is_before

test_the_page_does_what_it_says = read_pages("migrate")


def test_the_programs_of_every_other_library_are_run_by_the_migration_session() -> None:
    pages = sorted((DOCS / "migrate").glob("*.md"))
    shown = {(page.stem, block.section) for page in pages for block in blocks_of(page) if is_before(block.section)}
    [others] = [
        ast.literal_eval(statement.value)
        for statement in ast.parse((ROOT / "noxfile.py").read_text("utf-8")).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "OTHERS"
    ]
    assert {(page, f"Before: {library}") for library, (_packages, page) in others.items()} == shown


def test_both_programs_of_a_page_print_the_same() -> None:
    for page in sorted((DOCS / "migrate").glob("*.md")):
        said: dict[bool, list[str]] = {True: [], False: []}
        for block in blocks_of(page):
            if block.title == "Output" and block.section.startswith(("Before", "After")):
                said[is_before(block.section)].append(block.code)
        assert said[True] == said[False], page.name
