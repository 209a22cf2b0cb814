"""``worqr failed`` and ``worqr broken``: what was set aside, listed, put back and dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from worqr.cli.failing import Unhappy, WrongUse
from worqr.cli.text import complain, escape, escape_bytes, moment, payload_fields, print_json, print_table, shorten
from worqr.cli.where import HERE, Where, ask, flag, hint_at, queue_of, time
from worqr.cli.words import moment as moment_of

if TYPE_CHECKING:
    from worqr.aside import Aside
    from worqr.mesh import Mesh
    from worqr.records import Failed

Which = Literal["failed", "broken"]
Verb = Literal["retry", "drop"]

Error = Annotated[
    str | None,
    Parameter(metavar="TYPE", help="Only those whose error is of this type: its name, or the last part of it."),
]
Before = Annotated[
    str | None, time("Only those set aside before this: 2031-05-01T12:00, or 2h for two hours ago.", metavar="TIME")
]
Ids = Annotated[str, Parameter(help="Their ids, as listed.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Choice:
    """Which entries are meant, if not those of some ids."""

    all: Annotated[bool, flag("All of them, or those that the other options leave.")] = False
    error: Error = None
    before: Before = None
    limit: Annotated[int | None, Parameter(help="The newest so many.")] = None

    def check(self, verb: Verb, ids: tuple[str, ...]) -> None:
        """WrongUse if it is not clear."""
        if bool(ids) == self.all:
            raise WrongUse(
                f"say which to {verb}: their ids, or --all (with --error, --before or --limit, if not all of them)"
            )
        if ids and self != Choice():
            raise WrongUse("--error, --before and --limit go with --all")


BY_ID: Final = Choice()


class _Commands:
    """The words of ``worqr failed``, or of ``worqr broken``: both have the same."""

    def __init__(self, which: Which) -> None:
        self._which: Which = which

    def list(
        self,
        queue: str,
        /,
        *,
        limit: Annotated[int, Parameter(help="At most so many, the newest first.")] = 100,
        error: Error = None,
        before: Before = None,
        traceback: Annotated[bool, flag("With their tracebacks.")] = False,
        json: Annotated[bool, flag("Print JSON, one object on a line, with everything.")] = False,
        where: Where = HERE,
    ) -> None:
        moment_before = moment_of(before, "--before", ago=True)

        async def command(mesh: Mesh) -> tuple[Sequence[Failed], str]:
            found = await self._of(mesh, queue).list(limit, error=error, before=moment_before)
            return found, "" if found else await hint_at(mesh, queue)

        found, hint = ask(where, command)
        if json:
            for record in found:
                print_json(_fields(record))
        elif traceback:
            for record in found:
                _print_whole(record)
        elif found:
            header = ("id", "set aside", "reason", "failures", "stalls", "timeouts", "error", "task")
            print_table(header, map(_row, found))
        if not found and not json:
            complain(hint or f"nothing of queue {queue!r} is set aside as {self._which}")

    def retry(self, queue: str, /, *ids: Ids, choice: Choice = BY_ID, where: Where = HERE) -> None:
        """Put them to the back of the queue, with all counters at zero."""
        self._change("retry", queue, ids, choice, where)

    def drop(self, queue: str, /, *ids: Ids, choice: Choice = BY_ID, where: Where = HERE) -> None:
        """Forget them."""
        self._change("drop", queue, ids, choice, where)

    def _of(self, mesh: Mesh, queue: str) -> Aside:
        there = queue_of(mesh, queue)
        return there.failed if self._which == "failed" else there.broken

    def _change(self, verb: Verb, queue: str, ids: tuple[str, ...], choice: Choice, where: Where) -> None:
        choice.check(verb, ids)
        before = moment_of(choice.before, "--before", ago=True)

        async def command(mesh: Mesh) -> tuple[int, str]:
            aside = self._of(mesh, queue)
            if ids:
                count = await (aside.retry if verb == "retry" else aside.drop)(*ids)
            else:
                every = aside.retry_all if verb == "retry" else aside.drop_all
                count = await every(error=choice.error, before=before, limit=choice.limit)
            return count, "" if count else await hint_at(mesh, queue)

        count, hint = ask(where, command)
        print(f"{count:,} {'put back' if verb == 'retry' else 'dropped'}")
        if hint:
            complain(hint)
        if ids and count < len(ids):
            raise Unhappy(f"{len(ids) - count:,} of {len(ids):,} are not among the {self._which} of queue {queue!r}")


def _row(record: Failed) -> tuple[object, ...]:
    counts = (record.failures, record.stalls, record.timeouts)
    return (
        *(record.id, moment(record.at), record.reason, *counts),
        *(shorten(_error(record)), shorten(escape_bytes(record.task))),
    )


def _error(record: Failed) -> str:
    return f"{record.error.type}: {record.error.message}" if record.error.message else record.error.type


def _fields(record: Failed) -> dict[str, Any]:
    fields = asdict(record)
    del fields["task"]
    return {**fields, **payload_fields(record.task), "meta": dict(record.meta)}


def _print_whole(record: Failed) -> None:
    print(f"{escape(record.id)}  {moment(record.at)}  {record.reason}  worker {escape(record.worker)}")
    print(f"    task: {shorten(escape_bytes(record.task))}")
    for line in (record.error.traceback or _error(record)).split("\n"):
        if line:
            print(f"    {escape(line)}")


def _app(which: Which, what: str) -> App:
    app = App(name=which, help=f"List what was set aside as {which} ({what}), put it back, or drop it.")
    commands = _Commands(which)
    app.default(commands.list)
    app.command(commands.list, name="list", help="List them: the same as without a word.")
    app.command(commands.retry)
    app.command(commands.drop)
    return app


failed: App = _app("failed", "it failed, stalled or timed out once too often, or came too late")
broken: App = _app("broken", "its payload could not be read")
