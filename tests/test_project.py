"""The project as others get it: the wheel, the documents, the command line, the way in with nothing but Python."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.children import ROOT, Child
from tests.support.patience import PATIENCE
from tests.support.sources import MODULES
from worqr.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RUN = ROOT / "run.py"
IMPORTED_AS = {"opentelemetry-api": "opentelemetry"}
"""Packages that are imported by another name."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = (ROOT / "worqr").rglob("*")
    expected = {p.relative_to(ROOT).as_posix() for p in package if p.is_file() and "__pycache__" not in p.parts}
    assert inside == expected | {"pytest_worqr.py"}
    assert "worqr/py.typed" in inside
    assert any(name.endswith(".lua") for name in inside)


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "Requires-Python: >=3.11" in info["METADATA"]
    assert "License-Expression: MIT" in info["METADATA"]
    assert "worqr = worqr.cli:main" in info["entry_points.txt"]
    assert "[pytest11]\nworqr = pytest_worqr" in info["entry_points.txt"]
    assert "worqr contributors" in info["LICENSE"]


def test_every_extra_is_there_and_all_has_all() -> None:
    extras = PROJECT["optional-dependencies"]
    extras_there = {
        "cron",
        "dashboard",
        "django",
        "embedded",
        "encryption",
        "metrics",
        "otel",
        "sql",
        "webhooks",
        "all",
    }
    assert set(extras) == extras_there
    (everything,) = extras["all"]
    assert set(re.findall(r"\w+", everything)) - {"worqr"} == set(extras) - {"all"}


def requirements(name: str) -> set[str]:
    """The packages of an extra; of ``""``, those of the core."""
    listed = PROJECT["optional-dependencies"][name] if name else PROJECT["dependencies"]
    return {re.split(r"[>=\[]", requirement)[0] for requirement in listed}


def imported() -> set[str]:
    """Every package that some module of worqr imports, or looks for by its name."""
    names = set[str]()
    for module in MODULES:
        names |= {alias.name for node in module.each(ast.Import) for alias in node.names}
        names |= {node.module or "" for node in module.each(ast.ImportFrom)}
        names |= {
            node.args[0].value
            for node in module.each(ast.Call)
            if ast.unparse(node.func) == "find_spec" and isinstance(node.args[0], ast.Constant)
        }
    return {name.partition(".")[0] for name in names}


def test_everything_that_must_hold_is_checked_before_a_change_is_taken() -> None:
    """`docs` builds the site, and fails on a broken link."""
    called = re.findall(
        r"^ *python3 run\.py (.*?)(?: 2>&1.*| #.*)?$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE
    )
    assert {session for words in called for session in words.split()} >= {"tests", "migration", "lint", "types", "docs"}


def test_the_core_needs_six_packages() -> None:
    assert requirements("") == {"redis", "trio", "trio-util", "outcome", "msgspec", "cyclopts", "rich"}


def test_every_package_that_is_installed_is_used() -> None:
    found = imported()
    for extra in ("", *(name for name in PROJECT["optional-dependencies"] if name != "all")):
        assert requirements(extra), f"{extra} installs nothing"
        assert {IMPORTED_AS.get(name, name.replace("-", "_")) for name in requirements(extra)} - found == set()


def test_every_pip_install_of_the_documents_works_in_a_clone() -> None:
    """The project is not on PyPI: `pip install worqr` would not find it. Messages are read where worqr is installed."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    found = [
        (page, what) for page in pages for what in re.findall(r"pip install '?([^\s'`]+)", page.read_text("utf-8"))
    ]
    modules = [*(ROOT / "worqr").rglob("*.py"), ROOT / "noxfile.py"]
    found += [
        (path, w)
        for path in modules
        for w in re.findall(r"['\"]((?:worqr|\.)\[[\w,]+\])['\"]", path.read_text("utf-8"))
    ]
    extras = {name for _, what in found for name in re.findall(r"\w+", what.partition("[")[2])}
    assert "all" in extras
    assert extras <= set(PROJECT["optional-dependencies"])
    assert [(page, what) for page, what in found if page.suffix == ".md" and what.startswith("worqr")] == []


def test_the_version_has_its_place_in_the_changelog() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", __version__)


def test_the_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^python3 .*?(?= *#|$)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert commands[:2] == ["python3 run.py demo", "python3 run.py tests"]
    assert "python3 run.py tests --all" in (ROOT / ".ci" / "run").read_text("utf-8")


def links_in(text: str) -> list[str]:
    """What a page links to, and the pictures that it shows."""
    return re.findall(r'(?<=\]\()[^)]+(?=\))|(?:(?<=src=")|(?<=srcset="))[^"]+(?=")', text)


def links_of(path: str) -> list[str]:
    return links_in((ROOT / path).read_text("utf-8"))


def test_every_link_and_picture_of_the_readme_is_a_file_of_the_clone() -> None:
    links = links_of("README.md")
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link.partition("#")[0]).is_file()] == []


def test_a_package_index_gets_the_readme_with_addresses(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    text = wheel.read(name).decode().partition("\n\n")[2]
    links = links_in(text)
    assert [re.sub(r"^.*?/main/", "", link) for link in links] == links_of("README.md")
    pictures = [link for link in links if link.endswith((".png", ".svg"))]
    for kind, found in (("raw", pictures), ("blob", [link for link in links if link not in pictures])):
        assert [link for link in found if not link.startswith(f"{PROJECT['urls']['Source']}/{kind}/main/")] == []


def test_the_addresses_of_the_project_are_those_of_its_site() -> None:
    urls = PROJECT["urls"]
    assert set(urls) == {"Documentation", "Source", "Issues", "Changelog"}
    site = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert site is not None
    assert site[1] == urls["Documentation"]


async def test_the_quick_look_does_what_it_says(spawn: Callable[..., Child]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    child = spawn(snippet, fresh=True)
    assert await child.line() == "hello, Ada"
    child.signal(signal.SIGINT)
    assert await child.ended() == 0
    assert "Traceback" not in child.errors


# The command line


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE,
    )


def test_the_command_line_answers_for_the_module_too() -> None:
    answer = run(sys.executable, "-m", "worqr", "--help")
    assert answer.returncode == 0, answer.stderr
    assert "demo" in answer.stdout
    assert run(sys.executable, "-m", "worqr", "no-such-command").returncode != 0


def test_a_missing_package_of_the_command_line_is_one_sentence(tmp_path: Path) -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(['cyclopts', 'rich']))"
    answer = run(sys.executable, "-c", f"{hide}; from worqr.cli import main; sys.exit(main(['demo']))")
    assert answer.returncode == 1
    assert answer.stderr == "worqr: cyclopts and rich not found: run `pip install cyclopts rich`\n"


# run.py, with pip and nox played by scripts


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """run.py in a project of its own, where nox only prints its arguments."""
    (tmp_path / "run.py").write_bytes(RUN.read_bytes())
    return tmp_path


NOX = "import sys; print('nox', *sys.argv[1:])"


def play(hide: Sequence[str], copy: Path, *arguments: str, get_pip: str = "") -> subprocess.CompletedProcess[str]:
    """Run run.py in a Python that lacks the modules in `hide`, its pip installing a nox that prints its arguments."""
    (copy / "get-pip.py").write_text(get_pip)
    program = f"""
import sys, pathlib, subprocess
sys.modules.update(dict.fromkeys({list(hide)!r}))
sys.path.insert(0, {str(copy)!r})
import run
run.GET_PIP = {(copy / "get-pip.py").as_uri()!r}
def call(command, **options):
    if "install" not in command:
        return subprocess_call(command, **options)
    print("pip:", *[str(word) for word in command[1:command.index("install")]], flush=True)
    for site in run.HOME.glob("lib/python*/site-packages"):
        (site / "nox").mkdir()
        (site / "nox" / "__init__.py").write_text("")
        (site / "nox" / "__main__.py").write_text({NOX!r})
    return 0
subprocess_call, subprocess.call = subprocess.call, call
sys.exit(run.main({list(arguments)!r}))
"""
    return run(sys.executable, "-c", program, cwd=copy)


def test_run_sets_nox_up_once_and_passes_arguments_on(copy: Path) -> None:
    first = play(["pip"], copy, "tests", "lint", "-k", "x")
    assert first.stdout.splitlines() == ["pip: -m pip", "nox -s tests lint -- -k x"], first.stderr
    assert play(["pip"], copy, "tests").stdout.splitlines() == ["nox -s tests --"]
    assert play(["pip"], copy, "tests", "--", "a/path").stdout.splitlines() == ["nox -s tests -- a/path"]
    assert play(["pip"], copy).stdout.splitlines() == ["nox --list"]


def test_run_mends_a_set_up_that_was_interrupted(copy: Path) -> None:
    play(["ensurepip"], copy, "tests")
    (main,) = (copy / ".nox").rglob("nox/__init__.py")
    main.write_text("raise ImportError")
    assert play(["ensurepip"], copy, "tests").stdout.splitlines()[-1] == "nox -s tests --"


def test_run_takes_the_pip_that_is_there_where_ensurepip_is_not(copy: Path) -> None:
    answer = play(["ensurepip"], copy, "tests")
    python = copy / ".nox" / "_run" / "bin" / "python"
    assert answer.stdout.splitlines() == [f"pip: -m pip --python {python}", "nox -s tests --"]


def test_run_fetches_pip_where_there_is_none(copy: Path) -> None:
    answer = play(["ensurepip", "pip"], copy, "tests", get_pip="import sys; print(sys.prefix)")
    home = copy / ".nox" / "_run"
    assert answer.stdout.splitlines() == [str(home), "pip: -m pip", "nox -s tests --"], answer.stderr


@pytest.mark.parametrize("get_pip", ["raise SystemExit(1)", ""], ids=["it fails", "it is not there"])
def test_run_says_in_a_sentence_what_to_install_where_nothing_helps(copy: Path, get_pip: str) -> None:
    if not get_pip:
        (copy / "run.py").write_text((copy / "run.py").read_text().replace("urlopen(GET_PIP", "urlopen(GET_PIP + 'x'"))
    answer = play(["ensurepip", "pip"], copy, "tests", get_pip=get_pip)
    assert answer.returncode == 1
    assert re.search(r"^run.py: .* neither ensurepip nor pip, .* and try again$", answer.stderr, re.MULTILINE)
