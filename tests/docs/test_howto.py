"""The programs and commands in docs/howto run as they stand there."""

from __future__ import annotations

from tests.docs.reading import read_pages

test_the_page_does_what_it_says = read_pages("howto")
