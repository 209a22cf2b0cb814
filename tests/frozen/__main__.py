"""``python -m tests.frozen``: freeze the present scripts."""

from __future__ import annotations

from tests.frozen import freeze

freeze()
