"""A desk per test, on a shared server or on one of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ops.driver import Desk, desk_on
from tests.support.servers import Server


@pytest.fixture
def desk(server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk`. It may leave what it likes: tests compare the whole state, and those of test_stories.py end clean."""
    expects_left("*")
    yield from desk_on(server, prefix)


@pytest.fixture
def own_desk(own_server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk` on a server whose settings the test may change."""
    expects_left("*")
    yield from desk_on(own_server, prefix)
