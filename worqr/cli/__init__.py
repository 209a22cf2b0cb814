"""The command line: ``worqr demo``. What lives here is the choice of the command; each command has a module of its own.

The command line needs the extra ``cli``. Its packages are imported when a command runs, so that their absence is one
sentence and not a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

_NEEDED = ("cyclopts", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code.

    Args:
        arguments: the words after ``worqr``; None: those of this process.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"worqr: {' and '.join(missing)} not found: run `pip install 'worqr[cli]'`", file=sys.stderr)
        return 1
    return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    from cyclopts import App

    from worqr.cli.demo import demo
    from worqr.version import __version__

    app = App(
        name="worqr",
        help="A peer-to-peer job mesh: peers share nothing but a Redis or Valkey server.",
        version=__version__,
    )
    app.command(demo)
    answer = app(arguments, result_action="return_value")
    return answer if isinstance(answer, int) else 0
