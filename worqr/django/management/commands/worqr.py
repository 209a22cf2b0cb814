"""``manage.py worqr COMMAND``: the commands of ``worqr``, for the mesh of a task backend."""

from __future__ import annotations

import sys
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

import worqr.cli
from worqr.cli.options import use_mesh

_OWN = ("--settings", "--pythonpath", "--backend")
"""The options with a value that are not passed on."""


class Command(BaseCommand):
    """Everything after ``manage.py worqr`` goes to the command line of worqr. ``run`` gets the mesh, others its server."""

    help = "Run a worker, or inspect and operate its mesh. `manage.py worqr --help` lists the commands."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Run a command, and exit with its code. Django's parser would refuse the options of worqr."""
        given, words = _split(argv[2:])
        sys.exit(self._run(words, given.get("--backend", "default")))

    def handle(self, *words: str, backend: str = "default", **_: Any) -> None:
        """Run a command for ``call_command("worqr", "queues")``. Raises CommandError if it fails."""
        if code := self._run(list(words), backend):
            raise CommandError(f"worqr {' '.join(words)} has failed", returncode=code)

    def add_arguments(self, parser: Any) -> None:
        """Declare the arguments of ``call_command``."""
        parser.add_argument("args", nargs="*", metavar="word")
        parser.add_argument("--backend", default="default")

    def _run(self, words: list[str], alias: str) -> int:
        command = next(iter(words), "--help")
        if command.startswith("-") or "--help" in words or "-h" in words:
            return worqr.cli.main(words or ["--help"])
        if command == "run" and words[1:2] and not words[1].startswith("-"):
            return worqr.cli.main(words)  # another mesh of the project
        from worqr.django.worker import mesh_of_alias, outbox_of_alias

        try:
            mesh = mesh_of_alias(alias)
            has_outbox = outbox_of_alias(alias) is not None
        except (LookupError, ImportError, ImproperlyConfigured) as error:
            raise SystemExit(f"worqr: {error}") from None
        if command == "run":
            return worqr.cli.main(["run", f"worqr.django.worker:{alias}", *words[1:]])
        if command == "outbox" and has_outbox and not any(each[:1].isalpha() for each in words[1:2]):
            return worqr.cli.main(["outbox", f"worqr.django.worker:{alias}.outbox", *words[1:]])
        use_mesh(mesh)
        return worqr.cli.main(words)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return Django's options with their values, and the other words."""
    given: dict[str, str] = {}
    others: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name in _OWN:
            given[name] = value if equals else next(left, "")
        else:
            others.append(word)
    return given, others
