"""Checks the sentences of the documentation and the code: ``python -m tools.prose``. Exit code 1: rewrite what it prints.

Two rules are checked on pages: a sentence has at most 25 words, and some words of the project's early shorthand are not used.
Code, tables, headings and link targets do not count as sentences. Docstrings and comments are only checked for `CODE_WORDS`.
`EXCEPTIONS` lists the pages and folders that are not held to the rules, each with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 25
"""Words in a sentence."""
EXCEPTIONS = {
    "docs/changelog.md": "it includes CHANGELOG.md, which is checked where it is",
}
WORDS = (
    r"whoever",
    r"whatever",
    r"nobody",
    r"somebody",
    r"so long",
    r"set aside",
    r"is told",
    r"are told",
    r"is said to",
    r"there it is",
    r"its own business",
    r"as it does",
    r"the same holds",
    r"lives on",
    r"sweeps?",
    r"swept",
    r"hungry",
    r"owes?",
    r"heed(?:s|ed)?",
    r"linger(?:s|ed)?",
    r"answers? (?:with|that|for)",
    r"utilis\w+",
    r"simply",
    r"obviously",
    r"of course",
)
"""Regular expressions, which match whole words in any case."""
UNWANTED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
CODE = ("worqr", "tools", "benchmarks", "examples")
"""Folders whose docstrings and comments are checked. Tests are not: their names and texts are older than the word list."""
CODE_WORDS = (
    r"whoever",
    r"nobody",
    r"somebody",
    r"anybody",
    r"everybody",
    r"so long",
    r"set aside",
    r"is told",
    r"are told",
    r"is said to",
    r"there it is",
    r"its own business",
    r"the same holds",
    r"swept",
    r"to be had",
    r"has a say",
    r"twice is harmless",
)
"""Words without a legitimate use in a docstring or comment. Names of keys and modules (``hungry``, ``sweeping``) are allowed."""
UNWANTED_IN_CODE = re.compile(rf"\b(?:{'|'.join(CODE_WORDS)})\b", re.IGNORECASE)


class Finding(NamedTuple):
    """One sentence to rewrite."""

    page: str
    line: int
    reason: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.reason}: {self.sentence}"


def pages() -> list[Path]:
    """The pages that are checked."""
    top = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
    ]
    return [*(page for page in top if page.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def findings(page: Path, text: str) -> Iterator[Finding]:
    """The sentences of one page that break a rule."""
    name = page.relative_to(ROOT).as_posix()
    for line, sentence in sentences(text):
        count = len(sentence.split())
        if count > LONGEST:
            yield Finding(name, line, f"{count} words", sentence)
        for match in UNWANTED.finditer(re.sub(r"`[^`]*`", "", sentence)):
            yield Finding(name, line, f"unwanted: {match[0]!r}", sentence)


def code_files() -> list[Path]:
    """The Python and Lua files whose docstrings and comments are checked."""
    found = [path for folder in CODE for kind in ("*.py", "*.lua") for path in (ROOT / folder).rglob(kind)]
    return sorted(path for path in found if path.relative_to(ROOT) != Path("tools/prose.py"))


def findings_in_code(file: Path, text: str) -> Iterator[Finding]:
    """The unwanted words in the docstrings and comments of one file."""
    name = file.relative_to(ROOT).as_posix()
    for line, prose in comments(text) if file.suffix == ".lua" else docstrings(text):
        plain = " ".join(re.sub(r"`[^`]*`", "", prose).split())
        for match in UNWANTED_IN_CODE.finditer(plain):
            near = plain[max(0, match.start() - 40) : match.end() + 40]
            yield Finding(name, line, f"unwanted: {match[0]!r}", near.strip())


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Every docstring and every block of comments of a Python file, with its first line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from _blocks((token.start[0], token.string[1:]) for token in tokens if token.type == tokenize.COMMENT)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Every block of comments of a Lua file, with its first line."""
    lines = enumerate(text.splitlines(), start=1)
    yield from _blocks((number, line.partition("--")[2]) for number, line in lines if "--" in line)


def _blocks(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join the texts of successive lines."""
    start, last, kept = 0, -1, list[str]()
    for number, text in lines:
        if kept and number != last + 1:
            yield start, " ".join(kept)
            kept = []
        start, last = start if kept else number, number
        kept.append(text)
    if kept:
        yield start, " ".join(kept)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Every sentence of a Markdown text, with the line on which its paragraph begins."""
    for line, paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)  # a link is its text
        plain = re.sub(
            r"`([^`]*)`", lambda code: "`" + re.sub(r"[\s.!?]+", "_", code[1]) + "`", plain
        )  # code is one word
        plain = re.sub(r"<[^>]+>|\{[^}]*\}|[*_]{2,}", "", plain)
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`A-Z0-9])|(?<=:)\s+(?=[A-Z])", plain):
            if re.search(r"\w", sentence):
                yield line, " ".join(sentence.split())


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Every paragraph and list item, without code, tables, headings, comments and front matter."""
    text = re.sub(r"\A---\n.*?\n---\n", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    start, kept = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        content = line.strip()
        starts_anew = bool(re.match(r"(?:[-*+]|\d+\.) ", content))
        is_prose = bool(content) and not re.match(r"#|\||!!!|\?\?\?|===|:::|--8<--|> *\||<", content)
        if kept and (starts_anew or not is_prose):
            yield start, " ".join(kept)
            kept = []
        if is_prose:
            start = start if kept else number
            kept.append(re.sub(r"^(?:[-*+]|\d+\.|>|:) +", "", content))


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def is_excepted(path: Path) -> bool:
    """True for a page, or a file in a folder, that is not held to the rules."""
    return path.relative_to(ROOT).as_posix().startswith(tuple(EXCEPTIONS))


def main(arguments: list[str]) -> int:
    """Check the pages and folders that are named, or all pages and all code. Print the findings and the number of sentences."""
    named = [Path(name).resolve() for name in arguments]
    chosen = [page for path in named for page in (sorted(path.rglob("*.md")) if path.is_dir() else [path])] or pages()
    checked = [page for page in chosen if not is_excepted(page)]
    found, total = list[Finding](), 0
    for page in checked:
        text = page.read_text("utf-8")
        found += findings(page, text)
        total += sum(1 for _ in sentences(text))
    files = [] if named else [file for file in code_files() if not is_excepted(file)]
    for file in files:
        found += findings_in_code(file, file.read_text("utf-8"))
    for finding in found:
        print(finding)
    long = sum(1 for finding in found if finding.reason.endswith("words"))
    print(
        f"{len(checked)} pages, {total} sentences, {long} with more than {LONGEST} words, "
        f"{len(files)} files of code, {len(found) - long} unwanted words"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
