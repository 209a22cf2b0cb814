"""``worqr run package.module:mesh``: a worker as a program of its own. `worqr.hosting.service` is the program."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeGuard

from cyclopts import Parameter

from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, CommandFailed, InvalidArguments
from worqr.cli.options import duration_option, flag, parse_duration, parse_size
from worqr.cli.output import print_error
from worqr.client.client import EMBEDDED, url_or_default
from worqr.embedded import Relocation
from worqr.errors import UsageError, WorqrBug, WorqrError
from worqr.hosting.logs import Level, set_up_logging
from worqr.hosting.service import EXIT_AFTER, Service, exit_after, refuse_run
from worqr.hosting.supervisor import (
    CHANNEL,
    LEVEL_NOW,
    Limits,
    Parent,
    Plan,
    become_supervisor,
    follow_parent,
    parent_of_this_process,
)
from worqr.http_server import BindAddress, HttpReply, HttpRequest
from worqr.inside import client_of, declarations_of, peers_of, set_server
from worqr.keys import check_name
from worqr.log_events import emit
from worqr.peer.options import GRACE, Only
from worqr.peer.scheduler import default_processes
from worqr.tracebacks import one_line

if TYPE_CHECKING:
    from worqr.mesh import Mesh


# Import the application of ``worqr run package.module:mesh``, and return its mesh.
#
# The errors say what is wrong with the name: it is a path, the module does not exist, or the module has no mesh. What the
# worker does with the mesh is in `worqr.cli.run`.


ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class ImportFailed(CommandFailed):
    """The user's module raised an exception while it was imported.

    Attributes:
        exc_info: the exception; its traceback begins in the user's own code.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        self.exc_info: ExcInfo = type(error), error, _users(error.__traceback__)
        super().__init__(f"{name} could not be imported:", "".join(traceback.format_exception(*self.exc_info)))


def load_mesh(target: str) -> Mesh[Any]:
    """Return the mesh that ``package.module:name`` names; without a name, the only mesh of the module.

    Raises:
        ImportFailed: the module raised an exception.
        CommandFailed: the module or the name does not exist, or it is not a mesh.
    """
    module, attribute = load_module(target)
    return _attribute(module, attribute) if ":" in target else _only_mesh(module)


def load_module(target: str) -> tuple[ModuleType, str]:
    """Import the module of ``package.module:name``, from the current folder first, and return it with the name.

    If ``DJANGO_SETTINGS_MODULE`` is set, Django is set up before.

    Raises:
        ImportFailed: the module raised an exception.
        CommandFailed: the module does not exist, or the target is no name.
    """
    name, _, attribute = target.partition(":")
    if os.sep in name or name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise CommandFailed(
            f"{target!r} is a path; name the module as Python imports it: {dotted}:{attribute or 'mesh'}"
        )
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise CommandFailed(f"{target!r} is not the name of a mesh: type package.module:mesh")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    _set_up_django()
    return _import(name), attribute


def _set_up_django() -> None:
    """Set up Django if this process belongs to a Django project: modules that import models need its applications.

    Raises:
        ImportFailed: Django's settings, or an application, raised an exception.
    """
    settings = os.environ.get("DJANGO_SETTINGS_MODULE")
    if not settings or importlib.util.find_spec("django") is None:
        return
    try:
        with refuse_run():
            importlib.import_module("django").setup()
    except (Exception, SystemExit) as error:
        raise ImportFailed(
            f"Django's settings DJANGO_SETTINGS_MODULE={settings}, or an application that they name,", error
        ) from None


def _import(name: str) -> ModuleType:
    try:
        with refuse_run():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}.") and _users(error.__traceback__) is None:
            raise CommandFailed(_no_module(name, error.name)) from None
        raise ImportFailed(name, error) from None
    except (Exception, SystemExit) as error:
        raise ImportFailed(name, error) from None


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this module and of the import system at its beginning."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            return trace
        trace = trace.tb_next
    return None


def _no_module(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    try:
        path = importlib.import_module(parent).__path__ if parent else [os.getcwd()]
    except AttributeError:
        return f"there is no module {name!r}: {parent} is a module, not a package"
    siblings = [module.name for module in pkgutil.iter_modules(path)]
    hint = _hint(last, siblings, f"{parent}." if parent else "")
    where = f"in the package {parent}" if parent else f"in {os.getcwd()}, nor among the installed packages"
    return f"there is no module {missing!r} {where}{hint}"


def _hint(name: str, known: Iterable[str], before: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {before + close[0]!r}?" if close else ""


def _is_mesh(value: object) -> TypeGuard[Mesh[Any]]:
    from worqr.mesh import Mesh

    return isinstance(value, Mesh)


def _meshes(module: ModuleType) -> dict[str, Mesh[Any]]:
    """Return the meshes of a module by name, each once, private names last."""
    found: list[tuple[str, Mesh[Any]]] = []
    for name, value in sorted(vars(module).items(), key=lambda item: item[0].startswith("_")):
        if _is_mesh(value) and not any(value is mesh for _, mesh in found):
            found.append((name, value))
    return dict(found)


def _only_mesh(module: ModuleType) -> Mesh[Any]:
    found = _meshes(module)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise CommandFailed(
            f"there is no worqr.Mesh in {module.__name__} ({module.__file__}); add one: mesh = worqr.Mesh()"
        )
    which = " or ".join(f"{module.__name__}:{name}" for name in found)
    raise CommandFailed(f"there are {len(found)} meshes in {module.__name__}; choose one: {which}")


def _attribute(module: ModuleType, dotted: str) -> Mesh[Any]:
    value: Any = module
    for name in dotted.split("."):
        if not hasattr(value, name):
            hint = _hint(name, dir(value))
            meshes = _meshes(module)
            choices = f"; its meshes: {', '.join(meshes)}" if meshes and not hint else ""
            raise CommandFailed(f"there is no {name!r} in {module.__name__} ({module.__file__}){hint}{choices}")
        value = getattr(value, name)
    if _is_mesh(value):
        return value
    kind = f"the class {value.__qualname__}" if isinstance(value, type) else f"of type {type(value).__qualname__}"
    meshes = _meshes(module)
    choices = f"; its meshes: {', '.join(meshes)}" if meshes else ""
    raise CommandFailed(f"{module.__name__}:{dotted} is {kind}, not a worqr.Mesh{choices}")


# ``worqr run --reload``: a supervisor that restarts the worker, its child, when a ``.py`` file of the project changes.
#
# Supervisor and child share the terminal, so a debugger works in a handler, and Ctrl-C reaches both. The supervisor tells the
# child how urgently it should stop: see `worqr.hosting.supervisor`. Repeated messages do no harm.


POLL_EVERY: Final = 0.3
"""Seconds between two checks of the files; a change takes effect when two checks in a row find the same."""
STOP_WITHIN: Final = 10.0
"""Seconds that a child has to cancel its handlers and give their tasks back; then it is killed."""
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})

Snapshot = dict[str, tuple[int, int]]
"""Each file with the time of its last change and its size."""


def supervise(command: Sequence[str], folder: Path) -> int:
    """Run `command` as a child, and restart it after each change below `folder`, until a signal; return the exit code."""
    supervisor = _Supervisor(command, folder)
    before = [
        (number, signal.signal(number, supervisor.on_signal))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    try:
        return supervisor.run()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Supervisor:
    """The supervisor. Its signal handler changes `_urgency`; `run` changes everything else."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._urgency = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._control = -1

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: pass it on. The child may have received it from the terminal, too.

        The third one ends also a child that cannot read, because it is frozen, or holds the interpreter.
        """
        self._urgency = max(1, self._urgency + (number != signal.SIGHUP))
        self._send_request(self._urgency)
        if self._urgency >= LEVEL_NOW and self._child is not None:
            self._child.kill()

    def run(self) -> int:
        """Run and restart the child until a signal comes; return the exit code."""
        known = scan(self._folder)
        self._start()
        while True:
            code = self._wait(POLL_EVERY)
            if code is not None and self._urgency:
                return code
            if self._urgency or (now := scan(self._folder)) == known:
                continue
            now = self._wait_unchanged(now)
            if self._urgency or now == known:
                continue
            print_error(f"{describe_change(known, now)} changed; restarting")
            known = now
            self._stop_child()
            if self._urgency:
                return 0
            self._start()

    def _wait_unchanged(self, now: Snapshot) -> Snapshot:
        """Return the files as soon as two checks in a row find the same, or a signal comes."""
        while True:
            time.sleep(POLL_EVERY)
            before, now = now, scan(self._folder)
            if now == before or self._urgency:
                return now

    def _start(self) -> None:
        child_end, self._control = os.pipe()
        environment = {**os.environ, CHANNEL: str(child_end)}
        try:
            self._child = subprocess.Popen(self._command, env=environment, pass_fds=(child_end,))
        finally:
            os.close(child_end)
        self._send_request(self._urgency)  # a signal may have come before there was a child

    def _wait(self, seconds: float) -> int | None:
        """Return the exit code of the child if it has ended. Log it once, unless the supervisor is stopping too."""
        if self._child is None:
            time.sleep(seconds)
            return 0 if self._urgency else None
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._forget_child()
        if not self._urgency:
            print_error(f"the worker ended with exit code {code}; it restarts when a file changes")
        return code if code >= 0 else 1

    def _stop_child(self) -> None:
        """Stop the child: it cancels its handlers, and their tasks return to their queues."""
        child = self._child
        if child is None:
            return
        self._send_request(2)
        try:
            child.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            print_error(
                f"the worker did not end within {STOP_WITHIN:g} s and was killed; its tasks return to their queues within 5 s"
            )
            child.kill()
            child.wait()
        self._forget_child()

    def _forget_child(self) -> None:
        self._child = None
        os.close(self._control)
        self._control = -1

    def _send_request(self, urgency: int) -> None:
        if urgency and self._control >= 0:
            with contextlib.suppress(OSError):  # the child has ended
                os.write(self._control, f"{min(urgency, 3)}\n".encode())


def scan(folder: Path) -> Snapshot:
    """Return all Python files below `folder`, except those in hidden folders and virtual environments."""
    return dict(_files(os.fspath(folder)))


def _files(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # the file was removed meanwhile
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in SKIPPED:
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, (status.st_mtime_ns, status.st_size)


def describe_change(before: Snapshot, now: Snapshot) -> str:
    """Return the changed files as a text for people."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return os.path.relpath(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def command_without_reload() -> list[str]:
    """Return the command line of this process, without `--reload`, for the child."""
    return [sys.executable, *(word for word in sys.orig_argv[1:] if word.partition("=")[0] != "--reload")]


logger: logging.Logger = logging.getLogger(__name__)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker, as the user types them."""

    concurrency: Annotated[
        str | None, Parameter(metavar="N|auto", help="Concurrent tasks; auto: as the load allows. Default: 100.")
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
            help="Serve only these functions: names or globs, comma-separated or repeated.",
        ),
    ] = ()
    runs_per_process: Annotated[int | None, Parameter(metavar="N", help="Replace a process after this many runs.")] = (
        None
    )
    memory_per_process: Annotated[
        str | None,
        Parameter(metavar="SIZE", help="Replace a process with more memory than this after a run: 500M, 2G."),
    ] = None
    grace: Annotated[str | None, duration_option("Wait this long for running tasks at shutdown. Default: 25s.")] = None

    def as_join_options(self) -> dict[str, Any]:
        """Return the options of ``join``; raise InvalidArguments if one is invalid."""
        found: dict[str, Any] = {
            "concurrency": _concurrency(self.concurrency),
            "threads": self.threads,
            "processes": self.processes,
            "runs_per_process": self.runs_per_process,
            "memory_per_process": parse_size(self.memory_per_process, "--memory-per-process"),
            "only": [name for words in self.queues for name in words.split(",")] or None,
            "grace": parse_duration(self.grace, "--grace"),
        }
        return {name: value for name, value in found.items() if value is not None}


DEFAULTS: Final = WorkerOptions()


@Parameter(name="*", group="Several workers")
@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How many workers one command runs, and when it renews them. With any of these, a small parent supervises the workers."""

    workers: Annotated[
        str | None,
        Parameter(
            metavar="N|auto",
            help="Processes that serve the mesh; auto: one per usable CPU. Default: this one.",
        ),
    ] = None
    max_runs: Annotated[int | None, Parameter(metavar="N", help="Renew a worker after about this many runs.")] = None
    max_memory: Annotated[
        str | None,
        Parameter(metavar="SIZE", help="Renew a worker with more memory than about this: 800M, 2G."),
    ] = None
    max_age: Annotated[str | None, duration_option("Renew a worker after about this long: 12h, 1d.")] = None

    @property
    def is_empty(self) -> bool:
        """None of them is given."""
        return self == NO_SUPERVISOR

    def count(self) -> int:
        """Return the number of workers; raise InvalidArguments if it is invalid."""
        if self.workers == "auto":
            return default_processes()
        if self.workers is None:
            return 1
        if not self.workers.isdecimal() or not 1 <= int(self.workers) <= MOST_WORKERS:
            raise InvalidArguments(
                f"--workers must be a number from 1 to {MOST_WORKERS}, or auto, got {self.workers!r}"
            )
        return int(self.workers)

    def limits(self) -> Limits:
        """Return when a worker is renewed; raise InvalidArguments if an option is invalid."""
        age = parse_duration(self.max_age, "--max-age")
        if self.max_runs is not None and self.max_runs < 1:
            raise InvalidArguments(f"--max-runs must be at least 1, got {self.max_runs}")
        if age is not None and age < SHORTEST_AGE:
            raise InvalidArguments(f"--max-age must be at least {SHORTEST_AGE:g} s, because a start takes some seconds")
        return Limits(self.max_runs, parse_size(self.max_memory, "--max-memory"), age)


NO_SUPERVISOR: Final = SupervisorOptions()
MOST_WORKERS: Final = 512
SHORTEST_AGE: Final = 10.0
"""Seconds."""


def run(
    target: Annotated[
        str,
        Parameter(
            metavar="MODULE:MESH",
            help="package.module:mesh; without :mesh, the only mesh of the module.",
        ),
    ],
    /,
    *,
    options: WorkerOptions = DEFAULTS,
    several: SupervisorOptions = NO_SUPERVISOR,
    probe: Annotated[
        str | None,
        Parameter(
            metavar="ADDRESS",
            help="Serve /live, /ready, /startup and /metrics over HTTP at [HOST:]PORT or unix:PATH. Default: $WORQR_PROBE.",
        ),
    ] = None,
    reload: Annotated[bool, flag("For development: restart when a .py file below this folder changes.")] = False,
    log_json: Annotated[bool, flag("Log JSON Lines.")] = False,
    log_level: Annotated[Level | None, Parameter(help="Log this level and above. Default: info.")] = None,
    url: Annotated[str | None, Parameter(metavar="URL", help="URL of the server, instead of the mesh's own.")] = None,
    prefix: Annotated[str | None, Parameter(metavar="NAME", help="Key prefix, instead of the mesh's own.")] = None,
) -> int:
    """Run a worker for the functions of a mesh, until SIGTERM or Ctrl-C.

    The first signal waits for running tasks, the second cancels them, the third ends the process at once.
    """
    _check_address(probe)
    join_options, parent = options.as_join_options(), parent_of_this_process()
    plan = _plan(join_options, several, probe)
    if reload:
        if not several.is_empty:
            raise InvalidArguments("--reload runs one worker; leave out --workers and --max-...")
        return supervise(command_without_reload(), Path.cwd())
    if parent is None and plan is not None:
        become_supervisor(plan, log_level, log_json=log_json)
    program = _Program(target, join_options, url, prefix, probe, parent)
    if log_json:
        return _run_with_json(program, log_level)
    program.run(lambda: set_up_logging(log_level, as_json=False))
    return 0


def _plan(join_options: dict[str, Any], several: SupervisorOptions, probe: str | None) -> Plan | None:
    """Return what a parent of workers does; None: this process is the worker. Raise InvalidArguments for invalid options."""
    workers, limits = several.count(), several.limits()
    command = [sys.executable, *sys.orig_argv[1:]]
    grace, address = join_options.get("grace", GRACE), probe or os.environ.get("WORQR_PROBE") or None
    if not several.is_empty:
        return Plan(command, workers, limits, grace, address)
    if os.getpid() == 1:  # the first process of a container: it has to reap what handlers leave behind
        return Plan(command, 1, limits, grace, address, restarts=False)
    return None


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
        self,
        target: str,
        options: dict[str, Any],
        url: str | None,
        prefix: str | None,
        probe: str | None,
        parent: Parent | None,
    ) -> None:
        self._target = target
        self._options = options
        self._url = url
        self._prefix = prefix
        self._probe = None if parent is not None and parent.supervises else probe
        self._restarted = "" if parent is None else parent.restarted
        self._service: Service | None = None
        if parent is not None:
            follow_parent(parent.channel, self._request_stop, self._retire, self._respond)

    def _request_stop(self, urgency: int) -> None:
        if self._service is None:
            os._exit(EXIT_FAILED)  # the module is still being imported, so this process holds no tasks
        self._service.request_stop(urgency)

    def _retire(self) -> None:
        if self._service is None:
            os._exit(EXIT_FAILED)
        self._service.retire()

    def _respond(self, request: HttpRequest) -> HttpReply:
        if self._service is None:
            return HttpReply.of(HTTPStatus.SERVICE_UNAVAILABLE, "importing the application")
        return self._service.respond(request)

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
        self._service = Service(peers_of(mesh), self._options, self._probe, self._restarted)
        self._service.run()
        exit_after(EXIT_AFTER)

    def _set_server(self, mesh: Mesh[Any]) -> None:
        """Apply --url and --prefix."""
        if self._url is not None:
            os.environ["WORQR_URL"] = self._url  # for the processes that the worker starts
        url = mesh.url if self._url is None else self._url
        prefix = mesh.prefix if self._prefix is None else check_name(self._prefix, "prefix")
        moved = Relocation(mesh.url, mesh.prefix, url, prefix, keeps_credentials=True)
        set_server(mesh, url=url, prefix=prefix, credentials=mesh.credentials)
        if (url, prefix) != (moved.from_url, moved.from_prefix):
            client_of(mesh).note_relocation(moved)

    def _check_queues(self, mesh: Mesh[Any]) -> None:
        """Raise an error if a name matches nothing; ``join`` would name its own option instead."""
        try:
            Only(self._options.get("only")).check(mesh.functions)
        except UsageError as error:
            raise CommandFailed(str(error).replace("only:", "--queues:", 1)) from None
