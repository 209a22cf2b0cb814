"""Who is measured: the files in ``contenders/``, each with its requirements and variants in a header, as PEP 723 has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "contenders"
HEADER = re.compile(r"^(?P<mark>#|//) /// script$\n(?P<body>(?:^(?:#|//)(?: .*)?$\n)+?)^(?:#|//) ///$", re.MULTILINE)
OURS = "worqr"
"""The contender that comes first in tables and stands out in charts."""


class Unusable(Exception):
    """A contender cannot be measured here; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One variant of one file.

    Attributes:
        name: What ``--only`` takes: ``taskiq-list``, or ``huey`` of a file without variants.
        title: As the table shows it.
        path: The file.
        variant: The word that the file gets in ``RIVALS_VARIANT``.
        dependencies: What to install; nothing: it runs on the Python that runs the harness.
    """

    name: str
    title: str
    path: Path
    variant: str
    dependencies: tuple[str, ...]

    @property
    def library(self) -> str:
        """What all variants of the file have in common: ``taskiq``."""
        return self.path.stem.removeprefix("on_")

    @property
    def is_node(self) -> bool:
        return self.path.suffix == ".mjs"


def header(text: str) -> dict[str, Any]:
    """Return the header of a file as PEP 723 defines it, also behind ``//``."""
    found = HEADER.search(text)
    if found is None:
        raise ValueError("the file has no header: begin it with `# /// script`")
    lines = [line.removeprefix(found["mark"]).removeprefix(" ") for line in found["body"].splitlines()]
    return tomllib.loads("\n".join(lines))


def read(path: Path) -> list[Contender]:
    """Return the variants of one file."""
    told = header(path.read_text("utf-8"))
    rivals = told["tool"]["rivals"]
    library, title = path.stem.removeprefix("on_"), rivals["title"]
    dependencies = tuple(told["dependencies"])
    variants: dict[str, str] = rivals.get("variants", {})
    if not variants:
        return [Contender(library, title, path, "", dependencies)]
    return [
        Contender(f"{library}-{variant}", f"{title}, {what}", path, variant, dependencies)
        for variant, what in variants.items()
    ]


def find(folder: Path = FOLDER) -> list[Contender]:
    """Return all contenders: ours first, then in alphabetical order."""
    paths = sorted(folder.glob("on_*"), key=lambda path: (path.stem != f"on_{OURS}", path.stem))
    return [each for path in paths if path.suffix in {".py", ".mjs"} for each in read(path)]


def select(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Return the contenders with these names; the name of a library stands for all of its variants; none: all.

    Raises:
        ValueError: A name is unknown; the message has the known ones.
    """
    for name in names:
        if not any(name in {each.name, each.library} for each in contenders):
            raise ValueError(f"no contender {name!r}; known: {', '.join(each.name for each in contenders)}")
    return [each for each in contenders if not names or {each.name, each.library} & set(names)]
