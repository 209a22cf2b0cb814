"""``worqr status``, ``worqr running`` and ``worqr jobs``: single tasks, where `worqr.cli.looking` shows numbers of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from worqr.cli.failing import Unhappy
from worqr.cli.looking import Json
from worqr.cli.text import complain, escape, escape_bytes, moment, payload_fields, print_json, print_table, shorten
from worqr.cli.where import HERE, Where, ask, hint_at, queue_of

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.records import RemoteError, Status, TaskInfo

State = Literal["waiting", "scheduled", "blocked", "active"]


def status(queue: str, id: str, /, *, json: Json = False, where: Where = HERE) -> None:
    """Show one job: its state, its tries, the error of the last one, and when it runs next."""

    async def command(mesh: Mesh) -> tuple[Status, str]:
        found = await queue_of(mesh, queue).job(id).status()
        return found, await hint_at(mesh, queue) if found.state == "gone" else ""

    found, hint = ask(where, command)
    if json:
        print_json({"queue": queue, "id": id, **_fields(found)})
    elif found.state != "gone":
        told = {name: value for name, value in _told(found).items() if value not in ("", "-")}
        width = max(map(len, told))
        for name, value in told.items():
            print(f"{name:{width}}  {escape(value)}")
    if found.state == "gone":
        why = "the id is unknown, or its result has expired or was not kept"
        raise Unhappy(f"nothing is known of job {id!r} of queue {queue!r}: {why}" + (f"; {hint}" if hint else ""))


def running(queue: str | None = None, /, *, json: Json = False, where: Where = HERE) -> None:
    """List the tasks that run now, of one queue or of all: up to 1,000 of each queue.

    Args:
        queue: The queue; all of them if left out.
    """

    async def command(mesh: Mesh) -> tuple[list[tuple[str, TaskInfo]], str]:
        names = [queue] if queue else [info.name for info in await mesh.queues() if info.running]
        found = [(name, task) for name in names for task in await queue_of(mesh, name).running()]
        return found, "" if found or queue is None else await hint_at(mesh, queue)

    found, hint = ask(where, command)
    if json:
        for name, task in found:
            print_json({"queue": name, **_listed(task)})
    elif found:
        header = ("queue", "id", "worker", "since", "attempt", "progress", "message", "task")
        print_table(header, [_running_row(name, task) for name, task in found])
    else:
        complain(hint or ("nothing runs" if queue is None else f"nothing of queue {queue!r} runs"))


def jobs(
    queue: str,
    /,
    *,
    state: Annotated[State, Parameter(help="Which ones: waiting, due, blocked or active.")] = "waiting",
    limit: Annotated[int, Parameter(help="At most N entries.", metavar="N")] = 100,
    after: Annotated[
        str, Parameter(show_default=False, metavar="CURSOR", help="Go on after the entry with this cursor.")
    ] = "",
    json: Json = False,
    where: Where = HERE,
) -> None:
    """List the tasks of a queue in one state, in the order in which they will run."""

    async def command(mesh: Mesh) -> tuple[list[TaskInfo], str]:
        found = await queue_of(mesh, queue).jobs(state=state, limit=limit, after=after)
        return found, "" if found or after else await hint_at(mesh, queue)

    found, hint = ask(where, command)
    if json:
        for task in found:
            print_json({"queue": queue, **_listed(task)})
        return
    if found:
        print_table(("id", "run at", "attempts", "error", "task"), map(_job_row, found))
    if len(found) == limit:
        complain(f"there may be more: --after {found[-1].cursor!r}")
    elif not found:
        complain(hint or f"no task of queue {queue!r} is {state}")


def _running_row(queue: str, task: TaskInfo) -> tuple[object, ...]:
    progress = "-" if task.progress is None else f"{task.progress:g}"
    at = (task.worker or "-", moment(task.since), task.attempts, progress, shorten(task.message))
    return (queue, task.id or "-", *at, escape_bytes(task.task))


def _job_row(task: TaskInfo) -> tuple[object, ...]:
    return (task.id or "-", moment(task.run_at), task.attempts, shorten(_error(task.error)), escape_bytes(task.task))


def _error(error: RemoteError | None) -> str:
    if error is None:
        return "-"
    return f"{error.type}: {error.message}" if error.message else error.type


def _told(found: Status) -> dict[str, str]:
    return {
        "state": found.state,
        "attempts": str(found.attempts),
        "failures": str(found.failures),
        "error": shorten(_error(found.error)),
        "next run": moment(found.next_run),
        "run at": "-" if found.next_run else moment(found.run_at),
        "worker": found.worker or "-",
        "since": moment(found.since),
        "progress": "-" if found.progress is None else f"{found.progress:g}",
        "message": shorten(found.message),
    }


def _fields(found: Status) -> dict[str, Any]:
    fields = asdict(found)
    error = None if found.error is None else {"type": found.error.type, "message": found.error.message}
    return {**fields, "error": error}


def _listed(task: TaskInfo) -> dict[str, Any]:
    fields = _fields(task)
    del fields["task"]
    if not task.cursor:
        del fields["cursor"]
    return {"id": fields.pop("id"), **fields, **payload_fields(_whole_letters(task.task))}


def _whole_letters(task: bytes) -> bytes:
    """The beginning of a payload, without a letter at its end that was cut."""
    for cut in range(4):
        some = task[: len(task) - cut]
        try:
            some.decode()
        except UnicodeDecodeError:
            continue
        return some
    return task
