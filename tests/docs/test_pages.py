"""The runner of pages (`tools.pages`): a page that does what it says passes, and one that does not fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import tools.pages
from tests.support.servers import free_port
from tools.pages import Reader, blocks_of, is_before


def fence(attributes: str, code: str, indent: str = "") -> str:
    return "".join(f"{indent}{line}\n" for line in [f"```{attributes}", *code.splitlines(), "```"])


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., None]:
    """Read a page made of these pieces."""

    def read(*pieces: str, before: bool = False) -> None:
        page, folder = tmp_path / "page.md", tmp_path / "folder"
        page.write_text("\n".join(["# Page\n", *pieces]), "utf-8")
        folder.mkdir()
        reader = Reader(page, folder, "redis://127.0.0.1:1/0", free_port())
        try:
            reader.read(is_before) if before else reader.read()
        finally:
            reader.close()

    return read


HELLO = fence('python title="hello.py"', "print('hello')\nprint('again')")
SLEEP = "import time\ntry:\n    print('ready')\n    time.sleep(600)\nexcept KeyboardInterrupt: pass"


def output(text: str, title: str = "Output") -> str:
    return fence(f'text title="{title}"', text)


RIGHT = {
    "a program that ends": [fence("python", "print('hello')")],
    "its output": [HELLO, fence("sh", "python hello.py"), output("hello\nagain")],
    "a part of its output": [HELLO, fence("sh", "python hello.py"), output("h...o")],
    "a program that goes on": [fence("python", SLEEP), output("ready")],
    "a command beside the others": [
        *(fence('python title="wait.py"', SLEEP), fence('sh title="Terminal 1"', "python wait.py")),
        *(fence("sh", "true"), output("ready", "Terminal 1")),
    ],
    "a block in a tab": ['=== "Linux"\n', fence("sh", "true", indent="    ")],
    "a file that is imported": [fence('python title="part.py"', "x = 1"), fence("python", "import part")],
    "a test": [fence('python title="test_it.py"', "def test() -> None:\n    assert True")],
    "what needs another machine": [fence("bash", "false")],
    "a server": [fence("sh", "worqr server --port 6390")],
    "a program of another library": ["## Before: it\n", fence("sh", "false")],
    "a manifest": [fence("yaml", "a: [1, 2]")],
}
WRONG = {
    "a program that fails": [fence("python", "raise SystemExit(1)")],
    "a command that fails": [fence("sh", "false\ntrue")],
    "another output": [HELLO, fence("sh", "python hello.py"), output("good bye")],
    "lines in another order": [HELLO, fence("sh", "python hello.py"), output("again\nhello")],
    "a program that does not end": [fence("python", SLEEP)],
    "a traceback at Ctrl-C": [
        fence("python", "import time\nprint(1)\ntry: time.sleep(600)\nfinally: 1 / 0"),
        output("1"),
    ],
    "a command beside the others that says something else": [
        *(fence('sh title="Terminal 1"', "echo a; sleep 600"), output("b", "Terminal 1")),
    ],
    "a command beside the others that fails": [fence('sh title="Terminal 1"', "exit 3"), fence("sh", "sleep 0.5")],
    "a file that cannot be imported": [fence('python title="part.py"', "1 / 0")],
    "a test that fails": [fence('python title="test_it.py"', "def test() -> None:\n    assert False")],
    "a manifest with a mistake": [fence("yaml", "a: [1, 2")],
}


@pytest.mark.parametrize("pieces", RIGHT.values(), ids=RIGHT)
def test_a_page_that_is_right(read: Callable[..., None], pieces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.pages, "ENDS_WITHIN", 10.0)  # a program that is to end may stand still
    read(*pieces)


@pytest.mark.parametrize("pieces", WRONG.values(), ids=WRONG)
def test_a_page_that_is_wrong(read: Callable[..., None], pieces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.pages, "PATIENCE", 1.0)  # nothing comes, however long one waits
    monkeypatch.setattr(tools.pages, "ENDS_WITHIN", 1.0)
    with pytest.raises((AssertionError, yaml.YAMLError)):
        read(*pieces)


def test_programs_of_another_library_are_read_apart(read: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        read("## Before: it\n", fence("sh", "false"), before=True)


def test_a_block_knows_where_it_stands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# Page\n\n## Part\n\n```python title="a.py" hl_lines="2"\nx = 1\n```\n', "utf-8")
    [block] = blocks_of(page)
    assert (block.line, block.section, block.language, block.title, block.code) == (
        5,
        "Part",
        "python",
        "a.py",
        "x = 1\n",
    )
