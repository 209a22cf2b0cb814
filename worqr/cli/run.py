"""``worqr run package.module:mesh``: a worker as a program of its own. `worqr.hosting.service` is the program."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from worqr.cli.app_loader import ImportFailed, load_mesh
from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, CommandFailed, InvalidArguments
from worqr.cli.logs import Level, set_up_logging
from worqr.cli.option_types import duration_option, flag
from worqr.cli.parsing import parse_duration
from worqr.cli.reload import command_without_reload, follow_supervisor, supervise
from worqr.client.connections import EMBEDDED, url_or_default
from worqr.errors import UsageError, WorqrBug, WorqrError
from worqr.hosting.service import EXIT_AFTER, Service, exit_after
from worqr.http_server import BindAddress
from worqr.inside import declarations_of, peers_of, set_server
from worqr.keys import check_name
from worqr.log_events import emit
from worqr.peer.options import Only
from worqr.tracebacks import one_line

if TYPE_CHECKING:
    from worqr.mesh import Mesh

logger: logging.Logger = logging.getLogger(__name__)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker, as the user types them."""

    concurrency: Annotated[
        str | None, Parameter(metavar="N|auto", help="Concurrent tasks. Default: 100. auto: adapt to the load.")
    ] = None
    threads: Annotated[int | None, Parameter(metavar="N", help="Threads for plain functions. Default: 40.")] = None
    processes: Annotated[
        int | None,
        Parameter(
            metavar="N", help='Processes for functions with runs_in="process". Default: the number of usable CPUs.'
        ),
    ] = None
    queues: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME",
            show_default=False,
            help="Serve only these functions: names or globs. Comma-separated or repeated.",
        ),
    ] = ()
    grace: Annotated[str | None, duration_option("Wait this long for running tasks at shutdown. Default: 25s.")] = None

    def as_join_options(self) -> dict[str, Any]:
        """Return the options of ``join``; raise InvalidArguments if one is invalid."""
        found: dict[str, Any] = {
            "concurrency": _concurrency(self.concurrency),
            "threads": self.threads,
            "processes": self.processes,
            "only": [name for words in self.queues for name in words.split(",")] or None,
            "grace": parse_duration(self.grace, "--grace"),
        }
        return {name: value for name, value in found.items() if value is not None}


DEFAULTS: Final = WorkerOptions()


def run(
    target: Annotated[
        str,
        Parameter(
            metavar="MODULE:MESH",
            help="Mesh to serve, as package.module:mesh. Without :mesh, the only mesh of the module.",
        ),
    ],
    /,
    *,
    options: WorkerOptions = DEFAULTS,
    probe: Annotated[
        str | None,
        Parameter(
            metavar="ADDRESS",
            help="Serve /live, /ready, /startup and /metrics over HTTP at [HOST:]PORT or unix:PATH. Default: $WORQR_PROBE.",
        ),
    ] = None,
    reload: Annotated[bool, flag("Restart when a .py file below this folder changes. For development.")] = False,
    log_json: Annotated[bool, flag("Log JSON Lines.")] = False,
    log_level: Annotated[Level | None, Parameter(help="Log this level and above. Default: info.")] = None,
    url: Annotated[str | None, Parameter(metavar="URL", help="URL of the server, instead of the mesh's own.")] = None,
    prefix: Annotated[str | None, Parameter(metavar="NAME", help="Key prefix, instead of the mesh's own.")] = None,
) -> int:
    """Run a worker for the functions of a mesh, until SIGTERM or Ctrl-C.

    The first signal waits for running tasks, the second cancels them, the third ends the process at once.
    """
    _check_address(probe)
    program = _Program(target, options.as_join_options(), url, prefix, probe)
    if reload:
        return supervise(command_without_reload(), Path.cwd())
    follow_supervisor(program.request_stop)
    if log_json:
        return _run_with_json(program, log_level)
    program.run(lambda: set_up_logging(log_level, as_json=False))
    return 0


def _run_with_json(program: _Program, level: Level | None) -> int:
    """Run the program, and log its errors as JSON too."""
    set_up_logging(level, as_json=True)
    try:
        program.run(lambda: set_up_logging(level, as_json=True))
    except ImportFailed as error:
        emit(logger, "run", "%(error)s", exc_info=error.exc_info, error=str(error))
        return EXIT_FAILED
    except (CommandFailed, WorqrError) as error:
        bug = error if isinstance(error, WorqrBug) else None
        emit(logger, "run", "%(error)s", exc_info=bug, error=str(error))
        return EXIT_FAILED
    except Exception as error:
        emit(logger, "run", "the program failed: %(error)s", exc_info=error, error=one_line(error))
        return EXIT_FAILED
    return 0


def _concurrency(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdigit():
        raise InvalidArguments(f"--concurrency must be a whole number or auto, got {text!r}")
    return int(text)


def _check_address(probe: str | None) -> None:
    if probe is not None:
        try:
            BindAddress.parse(probe, "--probe")
        except UsageError as error:
            raise InvalidArguments(str(error)) from None


@contextmanager
def _exit_on_ctrl_c() -> Generator[None]:
    """End the process at Ctrl-C while modules are imported.

    Python drops a KeyboardInterrupt that is raised in a callback of the import system, and the worker would run on.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as under nohup, or the handler of an embedding program
        yield
        return
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _warn_if_private(mesh: Mesh[Any]) -> None:
    if url_or_default(mesh.url) == EMBEDDED:
        text = (
            f"this mesh uses {EMBEDDED}, a private server: only this process can enqueue tasks for this worker, and they are "
            "lost when it ends. Run `worqr server` in another terminal, and write worqr.Mesh(), or give the URL with --url"
        )
        emit(logger, "embedded.private", text)


class _Program:
    """The mesh to run, by its name, and the options."""

    def __init__(
        self, target: str, options: dict[str, Any], url: str | None, prefix: str | None, probe: str | None
    ) -> None:
        self._target = target
        self._options = options
        self._url = url
        self._prefix = prefix
        self._probe = probe
        self._service: Service | None = None

    def request_stop(self, urgency: int) -> None:
        """Handle a request of the supervisor of `--reload`; in the thread that reads them."""
        if self._service is None:
            os._exit(EXIT_FAILED)  # the module is still being imported, so this process holds no tasks
        self._service.request_stop(urgency)

    def run(self, log: Callable[[], None]) -> None:
        """Find the mesh, serve it, and make sure that the process ends afterwards."""
        with _exit_on_ctrl_c():
            mesh = load_mesh(self._target)
        log()  # after the import, because the module may have set up logging
        self._set_server(mesh)
        if declarations_of(mesh).is_empty:
            raise CommandFailed(
                f"there is nothing to serve: {self._target} has no function declared with @mesh.task, nor a schedule; "
                "import the modules that declare them where the mesh is made"
            )
        self._check_queues(mesh)
        _warn_if_private(mesh)
        self._service = Service(peers_of(mesh), self._options, self._probe)
        self._service.run()
        exit_after(EXIT_AFTER)

    def _set_server(self, mesh: Mesh[Any]) -> None:
        """Apply --url and --prefix."""
        if self._url is not None:
            os.environ["WORQR_URL"] = self._url  # for the processes that the worker starts
        url = mesh.url if self._url is None else self._url
        prefix = mesh.prefix if self._prefix is None else check_name(self._prefix, "prefix")
        set_server(mesh, url=url, prefix=prefix, credentials=mesh.credentials)

    def _check_queues(self, mesh: Mesh[Any]) -> None:
        """Raise an error if a name matches nothing; ``join`` would name its own option instead."""
        try:
            Only(self._options.get("only")).check(mesh.functions)
        except UsageError as error:
            raise CommandFailed(str(error).replace("only:", "--queues:", 1)) from None
