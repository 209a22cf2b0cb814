"""Mistakes on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mistakes.conftest import Ended

SHOP = "import worqr\nmesh = worqr.Mesh()\n@mesh.task(name='reports')\nasync def f() -> None: ...\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("app.py",), "'app.py' is a path; name the module as Python imports it: app:mesh"),
        (("app:msh",), "there is no 'msh' in app"),
        (("app:msh",), "did you mean 'mesh'?"),
        (("ap:mesh",), "did you mean 'app'?"),
        (("app:mesh", "--queues", "rep"), "--queues: no function is named 'rep'; did you mean 'reports'?"),
        (("app:mesh", "--concurency", "3"), "--concurency"),
        (("app:mesh", "-c", "4"), "worqr run has no option -c; use --concurrency N"),
        (("-Q", "reports", "app:mesh"), "worqr run has no option -Q; use --queues NAMES"),
        (("app:mesh", "--loglevel", "info"), "worqr run has no option --loglevel; use --log-level debug"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_run(program: Callable[..., Ended], words: tuple[str, ...], why: str) -> None:
    ended = program(SHOP, "run", *words)
    assert ended.code != 0
    assert why in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("dashboard", "--port", "80"), "worqr dashboard has no option --port; use --bind 127.0.0.1:9090"),
        (("metrics", "--port", "80"), "worqr metrics has no option --port; use --bind 127.0.0.1:9464"),
        (
            ("call", "f", "--delay", "5m"),
            "worqr call has no option --delay; use `worqr dispatch QUEUE PAYLOAD --delay ...`",
        ),
        (
            ("enqueue", "q", "x", "--id", "7"),
            "worqr enqueue has no option --id; use `worqr dispatch QUEUE PAYLOAD --id ...`",
        ),
        (("--prefix", "shop", "queues"), "--prefix comes before the command; options stand behind it"),
    ],
    ids=" ".join,
)
def test_an_option_that_another_command_or_none_has(
    program: Callable[..., Ended], words: tuple[str, ...], why: str
) -> None:
    ended = program(SHOP, *words)
    assert ended.code == 2
    assert why in ended.err


def test_a_number_that_is_typed_as_a_text(program: Callable[..., Ended]) -> None:
    ended = program(SHOP, "call", "shop.add", "a=1", "b:=2", "to=ada", 'c="1"')
    assert ended.code == 0
    assert "worqr: a=1 is sent as a text; for a number or another value of JSON, type a:=..." in ended.err
    assert ended.err.count("is sent as a text") == 1


def test_a_module_with_a_syntax_error(program: Callable[..., Ended]) -> None:
    ended = program("import worqr\nmesh = worqr.Mesh(\n", "run", "app:mesh")
    assert ended.code != 0
    assert "app could not be imported:" in ended.err
    assert 'app.py", line 2' in ended.err
    assert "worqr/cli" not in ended.err


def test_a_script_whose_module_is_run_as_well(program: Callable[..., Ended]) -> None:
    ended = program(SHOP + "mesh.run()\n", "run", "app:mesh")
    assert "put it under `if __name__ == '__main__':`" in ended.err


# Django

MODELS = "from django.apps import apps\napps.check_apps_ready()\n"


def test_a_worker_of_a_django_project(
    program: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.py").write_text("SECRET_KEY = 'x'\nINSTALLED_APPS = ['django.contrib.contenttypes']\n")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "settings")
    ended = program(MODELS + "import worqr\nmesh = worqr.Mesh()\n", "run", "app:mesh")
    assert "there is nothing to serve: app:mesh has no function declared" in ended.err, "Django is not set up"


def test_a_worker_of_a_django_project_with_wrong_settings(
    program: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.setings")
    ended = program(SHOP, "run", "app:mesh")
    assert ended.code != 0
    assert "DJANGO_SETTINGS_MODULE=shop.setings, or an application that they name, could not be imported:" in ended.err
