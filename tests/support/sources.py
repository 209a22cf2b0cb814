"""The modules of the package as text and as trees, parsed once per process, when a test asks for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", bound=ast.AST)
PACKAGE = Path(__file__).parent.parent.parent / "worqr"


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Dotted, without ``worqr``: ``peer.consumer``, ``lua``, and ``""`` for the package itself."""
    path: Path = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text("utf-8"))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    def each(self, *kinds: type[N]) -> Iterator[N]:
        """All nodes of these kinds."""
        return (node for node in self._nodes if isinstance(node, kinds))

    @property
    def part(self) -> str:
        """What the layers are made of: the first word of the name."""
        return self.name.partition(".")[0] or "worqr"


def _read(path: Path) -> Module:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)


MODULES = [_read(path) for path in sorted(PACKAGE.rglob("*.py"))]
