"""The documentation's programs depend on worqr, not on the kind of server, so they run on one kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers import keep_one_kind


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_one_kind(config, items, Path(__file__).parent)
