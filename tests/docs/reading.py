"""One test per page of folders of the documentation: see `tools.pages`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.leaks import delete_all
from tests.support.servers import Server, free_port
from tools.pages import Reader, name_of, pages_of


def read_pages(*folders: str) -> Callable[..., None]:
    """Return the test of these pages. Their programs use the default prefix, so each page starts and ends on an empty one."""

    @pytest.mark.timeout(240)
    @pytest.mark.parametrize("page", [page for folder in folders for page in pages_of(folder)], ids=name_of)
    def test_the_page_does_what_it_says(page: Path, server: Server, tmp_path: Path) -> None:
        with server.client() as client:
            delete_all(client, "worqr")
            reader = Reader(page, tmp_path, server.tcp_url, free_port())
            try:
                reader.read()
            finally:
                reader.close()
                delete_all(client, "worqr")

    return test_the_page_does_what_it_says
