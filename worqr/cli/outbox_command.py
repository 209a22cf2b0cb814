"""``worqr outbox``: the outboxes of a mesh, as its workers see them; the rows of one; and rows that are not sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, JsonLines, flag, run_connected
from worqr.cli.output import print_list
from worqr.inside import client_of
from worqr.views.tables import OUTBOX_ROWS, OUTBOXES

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.sql import Outbox
    from worqr.sql.statements import Statement, Statements

MOST_LISTED: Final = 100


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row for people. `age` in seconds."""

    id: str
    queue: str
    age: float
    tries: int
    error: str | None


def outbox(
    target: Annotated[
        str | None,
        Parameter(
            show_default=False,
            help="package.module:name. Default: list the outboxes of the mesh.",
        ),
    ] = None,
    /,
    *,
    state: Annotated[
        Literal["waiting", "failed", "held"], Parameter(help="List the rows in this state; the first 100.")
    ] = "waiting",
    retry: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, metavar="ROW", help="Send this failed row again; all: every one."),
    ] = (),
    delete: Annotated[
        tuple[str, ...], Parameter(show_default=False, metavar="ROW", help="Delete this row, which failed or is held.")
    ] = (),
    release: Annotated[bool, flag("Send the rows that are held.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the outboxes of a mesh, or the rows of one. Retry or delete rows that failed, or release rows that are held.

    With a TARGET, the command imports your module, and asks the database.
    """
    if target is None:
        if retry or delete or release:
            raise InvalidArguments("name the outbox, as in worqr outbox shop:outbox")
        found = run_connected(connect, _outboxes)
        print_list(OUTBOXES, found, asdict, json=json, nothing="no worker looks after an outbox")
        return
    box = load_outbox(target)
    changed = _change(box, retry, delete, release=release)
    for line in changed:
        print(line)
    if not changed:
        rows = [
            OutboxRow(row, queue, age / 1000, tries, error) for row, queue, age, tries, error in _listed(box, state)
        ]
        print_list(OUTBOX_ROWS, rows, asdict, json=json, nothing=f"no row is {state}")


async def _outboxes(mesh: Mesh) -> list[Any]:
    from worqr.client.outboxes import outboxes_of

    return await outboxes_of(client_of(mesh))


def load_outbox(target: str) -> Outbox:
    """Return the outbox that ``package.module:name`` names.

    Raises:
        CommandFailed: there is none of that name.
    """
    from worqr.cli.run import load_module  # it has the errors of a name that is wrong
    from worqr.sql import Outbox

    module, name = load_module(target)
    found = getattr(module, name, None) if name else None
    if isinstance(found, Outbox):
        return found
    known = [each for each, value in vars(module).items() if isinstance(value, Outbox)]
    hint = f"; there is {' and '.join(f'{module.__name__}:{each}' for each in known)}" if known else ""
    raise CommandFailed(f"{target} is no worqr.sql.Outbox{hint}")


def _ask(box: Outbox, make: Callable[[Statements], Statement]) -> list[Any]:
    from worqr.sql.sender import cause_of

    try:
        return box.sender.ask(make)
    except Exception as error:
        raise CommandFailed(f"the database refuses: {cause_of(error)}") from error


def _listed(box: Outbox, state: str) -> list[Any]:
    return _ask(box, lambda sql: sql.listed(state, MOST_LISTED))


def _change(box: Outbox, retry: Sequence[str], delete: Sequence[str], *, release: bool) -> list[str]:
    """Do what the options say, and return what was done, in words."""
    done: list[str] = []
    if retry:
        rows = None if "all" in retry else retry
        done.append(f"{len(_ask(box, lambda sql: sql.again('failed', rows))):,} rows will be sent again")
    if delete:
        done.append(f"{len(_ask(box, lambda sql: sql.drop(delete))):,} rows deleted")
    if release:
        done.append(f"{len(_ask(box, lambda sql: sql.again('held', None))):,} rows released")
    return done
