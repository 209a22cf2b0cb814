"""What the explanations name is there."""

from __future__ import annotations

import re

from tests.support.children import ROOT

PAGE = ROOT / "docs" / "explain" / "how-it-is-tested.md"


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)(?:::(\w+))?`", PAGE.read_text("utf-8"))
    assert len(named) > 30
    for file, test in named:
        path = ROOT / file
        assert path.exists(), file
        assert not test or re.search(rf"^(?:async )?def {test}\(", path.read_text("utf-8"), re.MULTILINE), test
