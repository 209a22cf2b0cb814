"""The core needs nothing of the dashboard; and an installation without the extra says what to install."""

from __future__ import annotations

import subprocess
import sys

from tests.support.children import ROOT
from worqr.dashboard import Viewer, admin, operator, reader


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_core_does_not_import_it() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['starlette', 'jinja2', 'hypercorn', 'anyio']));"
    names = "[getattr(worqr, name) for name in worqr.__all__]"
    found = run(f"{blocked} import worqr, worqr.cli, worqr.testing; {names}; print('worqr.dashboard' in sys.modules)")
    assert found.stdout.strip() == "False", found.stderr


def test_a_missing_package_is_named() -> None:
    for name in ("starlette", "jinja2"):
        found = run(f"import sys; sys.modules[{name!r}] = None; import worqr.dashboard")
        assert f"the dashboard needs {name}: run `pip install 'worqr[dashboard]'`" in found.stderr
    for command in ("['dashboard']", "['demo', '--dashboard']"):
        found = run(
            f"import sys; sys.modules['hypercorn.config'] = None; from worqr.cli import main; sys.exit(main({command}))"
        )
        assert found.returncode == 1
        assert "pip install 'worqr[dashboard]'" in found.stderr
        assert "Traceback" not in found.stderr


def test_the_presets() -> None:
    for make in (reader, operator, admin):
        viewer = make("ada", queues=("a*",))
        assert isinstance(viewer, Viewer)
        assert (viewer.name, viewer.sees("ab"), viewer.sees("b")) == ("ada", True, False)
