"""``worqr demo``: four peers, real work, one peer killed, one task cancelled, and a summary that is checked."""

from __future__ import annotations

import sys


def demo() -> int:
    """Show a mesh at work on this machine: four peers, a kill, a cancellation, and nothing lost."""
    print("worqr demo: not built yet", file=sys.stderr)
    return 1
