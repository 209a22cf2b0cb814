"""Which mesh ``worqr run`` means, and the sentence when there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from worqr.cli.errors import CommandFailed
from worqr.cli.run import ImportFailed, load_mesh

FILES = {
    "shop/__init__.py": "",
    "shop/tasks.py": "import worqr\nmesh = worqr.Mesh(app='tasks')\nsame = mesh\nnumber = 5\nclass Mash: pass\n",
    "shop/two.py": "import worqr\na = worqr.Mesh()\nb = worqr.Mesh()\nclass box: inner = worqr.Mesh(app='inner')\n",
    "shop/none.py": "",
    "shop/needs.py": "import shop.nothing\n",
    "shop/needs_other.py": "import no_such_package_anywhere\n",
    "shop/raises.py": "def boom():\n    raise ValueError('evil \\x1b[31m')\nboom()\n",
    "shop/odd.py": "raise ModuleNotFoundError('itself', name='shop.odd')\n",
    "shop/wrong.py": "def (:\n",
    "shop/leaves.py": "import sys\nsys.exit('no luck')\n",
    "shop/runs.py": "import worqr\nmesh = worqr.Mesh()\nmesh.run()\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package ``shop``, which is the current one; its modules are forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


@pytest.mark.parametrize("target", ["shop.tasks:mesh", "shop.tasks:same", "shop.tasks"])
def test_a_mesh_is_found(target: str) -> None:
    assert load_mesh(target).app == "tasks"


def test_a_mesh_may_be_an_attribute_of_something() -> None:
    assert load_mesh("shop.two:box.inner").app == "inner"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("shop.two", "there are 2 meshes in shop.two; choose one: shop.two:a or shop.two:b"),
        ("shop.none", r"there is no worqr.Mesh in shop.none \(.*none.py\)"),
        ("shop.tasks:mush", r"there is no 'mush' in shop.tasks \(.*tasks.py\); did you mean 'mesh'\?"),
        ("shop.two:x", r"there is no 'x' in shop.two \(.*two.py\); its meshes: a, b"),
        ("shop.two:box.iner", r"there is no 'iner' in .*; did you mean 'inner'\?"),
        ("shop.tasks:number", "shop.tasks:number is of type int, not a worqr.Mesh; its meshes: mesh"),
        ("shop.tasks:Mash", "shop.tasks:Mash is the class Mash, not a worqr.Mesh"),
        ("shop.task:mesh", r"there is no module 'shop.task' in the package shop; did you mean 'shop.tasks'\?"),
        (
            "shap.tasks:mesh",
            r"there is no module 'shap' in .*, nor among the installed packages; did you mean 'shop'\?",
        ),
        ("shop.tasks.x:mesh", "there is no module 'shop.tasks.x': shop.tasks is a module, not a package"),
        ("shop/tasks.py", "is a path; name the module as Python imports it: shop.tasks:mesh"),
        ("./shop/tasks.py:m", "is a path; name the module as Python imports it: shop.tasks:m"),
        ("", "is not the name of a mesh: type package.module:mesh"),
        (":mesh", "is not the name of a mesh: type package.module:mesh"),
        ("shop tasks", "is not the name of a mesh: type package.module:mesh"),
        ("shop..tasks", "is not the name of a mesh: type package.module:mesh"),
        ("shop.tasks:", "there is no '' in shop.tasks"),
    ],
)
def test_what_is_no_mesh_is_said_in_a_sentence(target: str, why: str) -> None:
    with pytest.raises(CommandFailed, match=why) as raised:
        load_mesh(target)
    assert not isinstance(raised.value, ImportFailed)


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("shop.needs", "ModuleNotFoundError: No module named 'shop.nothing'"),
        ("shop.needs_other", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("shop.raises", "ValueError: evil \\x1b[31m"),
        ("shop.odd", "ModuleNotFoundError: itself"),
        ("shop.wrong", "SyntaxError: "),
        ("shop.leaves", "SystemExit: no luck"),
        (
            "shop.runs",
            "worqr.UsageError: mesh.run() was called while `worqr run` imports this module: put it under",
        ),
    ],
)
def test_a_module_that_fails_is_shown_with_its_own_traceback(
    command: Command, project: Path, target: str, end: str
) -> None:
    answer = command("run", target)
    assert (answer.code, answer.out) == (1, "")
    first, *lines = answer.err.splitlines()
    assert first == f"worqr: {target} could not be imported:"
    assert lines[-1].startswith(end)
    own = [line for line in lines if line.startswith("  File")]
    assert str(project) in own[0]
    assert "importlib" not in answer.err
    assert "worqr/cli" not in answer.err


def test_the_folder_one_is_in_comes_first(project: Path) -> None:
    (project / "colorsys.py").write_text("import worqr\nmesh = worqr.Mesh(app='mine')\n")  # a module of Python itself
    before = sys.modules.pop("colorsys", None)
    try:
        assert load_mesh("colorsys:mesh").app == "mine"
    finally:
        del sys.modules["colorsys"]
        if before is not None:
            sys.modules["colorsys"] = before
