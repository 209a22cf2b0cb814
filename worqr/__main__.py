"""``python -m worqr``: the same as ``worqr``, for environments whose scripts are not on the PATH."""

from __future__ import annotations

import sys

from worqr.cli import main

if __name__ == "__main__":
    sys.exit(main())
