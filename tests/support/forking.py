"""Python programs forked from a process that has imported what most of them import: that takes half a second of CPU.

Here: `start`, which returns as much of a `subprocess.Popen` as tests use, and `main`, the process that forks. Each process of
pytest has one, from its first program on until `close`. A program begins as the interpreter begins it: with its own session,
streams, environment, folder, arguments and ``__main__``. It also ends as one, because `main` returns in the child process.

What differs from a new Python: `MODULES` are imported, the programs of a session hash strings alike, ``/proc`` and `ps` show
another command, the program is no child of the test, and the end finalizes no object in a cycle with those of `MODULES`.
`Child(fresh=True)` is for tests that look at these.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parent.parent.parent
MODULES = ("trio", "redis", "encodings.idna", "worqr.mesh", "worqr.cli.run", "worqr.cli.output", "cyclopts")
PINNED = ("COV", "GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")
"""Names of environment variables begin so that an interpreter or its libraries read when they begin."""
LONGEST_REQUEST = 1 << 17
PROGRAM = f"from {__name__} import main; main()"


# In pytest


class Forked:
    """A program that was forked. Methods may be called from several threads."""

    def __init__(self, server: Server, argv: Sequence[str], cwd: Path, env: dict[str, str], stderr: IO[bytes]) -> None:
        theirs, ours = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(ours, "wb")
        ours, out = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(ours, "rb")
        self._reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._reports.close)
        request = {"argv": argv, "cwd": os.fspath(cwd), "env": env, "umask": umask()}
        server.send(request, theirs, out, stderr.fileno(), reports.fileno())
        os.close(theirs)
        os.close(out)
        reports.close()
        self.pid = int(server.checked(self._reports.recv(100)))
        self._server = server

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return int(self._server.checked(self._reports.recv(100, socket.MSG_PEEK)))  # it stays for all who ask

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, and the socket on which it is asked to."""

    def __init__(self) -> None:
        self.pinned = pinned(os.environ)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno())],
            stdin=subprocess.PIPE,  # streams of the same kind as those of the programs, which take over the objects
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for pytest
        )
        theirs.close()

    def send(self, request: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)

    def checked(self, report: bytes) -> bytes:
        errors = b"" if report or self._errors.closed else os.pread(self._errors.fileno(), 1 << 20, 0)
        assert report, f"nothing forks any more:\n{errors.decode()}"
        return report

    def close(self) -> None:
        self._requests.close()
        with self._process, self._errors:
            self._process.wait()


_servers: list[Server] = []


def start(
    argv: Sequence[str], cwd: Path, env: dict[str, str], stderr: IO[bytes], *, fresh: bool = False
) -> Forked | subprocess.Popen[bytes]:
    """Start ``python -u ARGV`` in a session of its own, with pipes for its input and output.

    Args:
        argv: ``-c`` and code, or a file; then the program's arguments.
        cwd: Its folder.
        env: The whole environment.
        stderr: A file for its errors.
        fresh: Start a new interpreter, as for all that a fork cannot do.
    """
    if not fresh and sys.platform == "linux":
        if not _servers:
            _servers.append(Server())
        is_short = len(json.dumps([argv, env])) < LONGEST_REQUEST // 2
        if is_short and pinned(env) == {**_servers[0].pinned, "PYTHONPATH": os.fspath(ROOT)}:
            return Forked(_servers[0], argv, cwd, env, stderr)
    return subprocess.Popen(
        [sys.executable, "-u", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )


def umask() -> int:
    """The umask of this process, read without setting it, which other threads would notice."""
    found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 8) if found else 0o022


def pinned(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables that a program that was forked could not obey any more."""
    return {name: value for name, value in env.items() if name.startswith(PINNED)}


def close() -> None:
    """End the process that forks, if there is one."""
    while _servers:
        _servers.pop().close()


# In the process that forks


def main() -> None:
    """Fork for each request. Return in each child when its program has returned, so that the interpreter ends as usual."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child that ends would look at each object, and so copy its page: 0.13 s
    request = _serve(requests)
    try:
        _run(**request)
    except Exception as error:  # how the others end, only the interpreter knows
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork and reap, until the test session ends. Return the request in the child that was forked for it."""
    ready = select.poll()
    ready.register(requests, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}  # by the descriptor of the process: its id, and where to report its end
    while True:
        for descriptor, _ in ready.poll():
            if descriptor in children:
                ready.unregister(descriptor)
                os.close(descriptor)
                _report_end(*children.pop(descriptor))
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 4)
            if not data:
                _leave()
            pid = os.fork()
            if not pid:
                _become_child(descriptors)
                requests.detach()
                return dict(json.loads(data))
            for each in descriptors[:3]:
                os.close(each)
            descriptor = os.pidfd_open(pid)
            children[descriptor] = pid, descriptors[3]
            ready.register(descriptor, select.POLLIN)


def _leave() -> NoReturn:
    os._exit(0)


def _report_end(pid: int, reports: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):  # nobody waits for it any more
        os.write(reports, b"%d" % code)
    os.close(reports)


def _become_child(descriptors: Sequence[int]) -> None:
    """Leave everything of the parent; then the test may know this process."""
    os.setsid()
    for standard in range(3):
        os.dup2(descriptors[standard], standard)
    os.write(descriptors[3], b"%d" % os.getpid())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _run(argv: list[str], cwd: str, env: dict[str, str], umask: int) -> None:
    """Run a program in this process as the interpreter would."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.umask(umask)
    _forget()
    sys.orig_argv[1:] = ["-u", *argv]
    space = {name: value for name, value in vars(sys.modules["__main__"]).items() if name.startswith("__")}
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # not frozen, so that its objects are finalized
    main.__dict__.update(space)
    if argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        code = compile(argv[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv[:] = argv
        file = os.path.abspath(argv[0])
        sys.path[0] = os.path.dirname(os.path.realpath(file))
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
        code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _forget() -> None:
    """Make new what modules that are imported have from the parent, or from being forked."""
    import trio._core._run

    import worqr.child_processes

    trio._core._run._r.seed()  # the order in which Trio's tasks run; `random` seeds its own
    worqr.child_processes.forks = 0
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the program may have another package of this name
