"""The fixtures themselves: a fault that is not made, or a leak that is not seen, would let every other test pass."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import trio
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import forking
from tests.support.children import ROOT, Child, is_running
from tests.support.leaks import assert_no_leaks, dump
from tests.support.patience import PATIENCE, until
from tests.support.proxy import FaultProxy
from tests.support.resp import frame_end, is_push, words
from tests.support.sampling import SHARES, SLOW, TESTS, Sample, share_of
from tests.support.scheduling import LONGEST_FIRST
from tests.support.servers import Server

Spawn = Callable[..., Child]
ProxyTo = Callable[[Server], FaultProxy]


def connect(proxy: FaultProxy, name: str = "plain", timeout: float = PATIENCE, protocol: int = 2) -> redis.Redis:
    return redis.Redis.from_url(
        proxy.url, client_name=name, retry=Retry(NoBackoff(), 0), socket_timeout=timeout, protocol=protocol
    )


def ping(impatient: redis.Redis) -> None:
    """Until it is answered in time: a machine may stand still."""
    while True:
        try:
            assert impatient.ping()
        except redis.TimeoutError:
            continue
        return


async def in_thread(function: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(function)


# Frames


FRAMES = [
    b"+OK\r\n",
    b":12\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$3\r\na\r\n\r\n",
    b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"~1\r\n_\r\n",
    b">2\r\n+message\r\n#t\r\n",
    b"|1\r\n+a\r\n:1\r\n+OK\r\n",
    b"PING\r\n",
]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_ends_where_it_ends_and_not_before(frame: bytes) -> None:
    assert frame_end(frame + b"+more") == len(frame)
    assert all(frame_end(frame[:n]) is None for n in range(len(frame)))


def test_words_of_a_request() -> None:
    assert words(b"*2\r\n$4\r\nECHO\r\n$3\r\n\r\n\x00\r\n") == [b"ECHO", b"\r\n\x00"]
    assert words(b"PING hello\r\n") == [b"PING", b"hello"]


def test_pushes_are_told_from_replies() -> None:
    assert is_push(b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n")
    assert is_push(b">1\r\n$1\r\na\r\n")
    assert not is_push(b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")
    assert not is_push(b"*1\r\n:1\r\n")


# Servers


def test_an_own_server_keeps_its_data_over_stop_and_kill(own_server: Server) -> None:
    client = own_server.client()
    for end in (own_server.stop, own_server.kill):
        client.rpush("list", "item")
        length = client.llen("list")
        end()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        own_server.start()
        assert client.llen("list") == length
    own_server.stop()
    own_server.wipe()
    own_server.start()
    assert client.dbsize() == 0


async def test_a_paused_server_answers_after_it_was_resumed(own_server: Server) -> None:
    impatient = own_server.client(socket_timeout=0.1)
    own_server.pause()
    with pytest.raises(redis.TimeoutError):
        impatient.ping()
    own_server.resume()
    assert own_server.client().ping()


def test_both_addresses_are_the_same_server(server: Server) -> None:
    with redis.Redis.from_url(server.tcp_url) as client:
        assert client.info("server")["run_id"] == server.client().info("server")["run_id"]


# Leaks


@pytest.mark.leaves("{Q1}:failed", "Workers")
def test_a_key_left_behind_is_told_unless_expected(server: Server, prefix: str) -> None:
    client = server.client()
    client.lpush(f"{prefix}:{{Q1}}", "T1")
    client.set(f"{{{prefix}}}:version", "1")
    client.set(f"{{{prefix}}}:worker:W1", "RUN 1", ex=3)
    client.zadd(f"{prefix}:{{Q1}}:failed", {"a": 1})
    client.sadd(f"{{{prefix}}}:Workers", "W1")
    assert_no_leaks(client, prefix, ["{Q1}:failed", "Workers"])
    with pytest.raises(AssertionError, match=r"\{Q1\}:failed"):
        assert_no_leaks(client, prefix, ["Workers"])
    assert dump(client, prefix) == {
        f"{prefix}:{{Q1}}".encode(): ("list", [b"T1"], False),
        f"{prefix}:{{Q1}}:failed".encode(): ("zset", {b"a": 1.0}, False),
        f"{{{prefix}}}:Workers".encode(): ("set", {b"W1"}, False),
        f"{{{prefix}}}:version".encode(): ("string", b"1", False),
        f"{{{prefix}}}:worker:W1".encode(): ("string", b"RUN 1", True),
    }


def test_what_may_be_left_can_be_said_while_running(
    server: Server, prefix: str, expects_left: Callable[..., None]
) -> None:
    server.client().set(f"{prefix}:{{Q1}}:paused", "why")
    expects_left("{Q1}:paused")


pytest_plugins = ["pytester"]


def test_the_prefix_fixture_fails_a_test_that_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile("""
        def test_leak(server, prefix):
            server.client().set(f"{prefix}:{{Q1}}:paused", "why")
        def test_own_leak(own_server, prefix):
            own_server.client().set(f"{prefix}:{{Q1}}:paused", "why")
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    outcome = result.parseoutcomes()
    assert outcome["errors"] == outcome["passed"] >= 2
    result.stdout.fnmatch_lines(["*keys left behind*", "*{Q1}:paused*"])


# The sample of exhaustive tests

SWEEP = """
import pytest

@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("n", range(9))
def test_sweep(n): ...

def test_other(): ...
"""


@pytest.fixture
def swept(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`swept(*options)`: the lines that pytest prints for an exhaustive test of nine cases, and another test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(SWEEP)

    def run(*options: str) -> list[str]:
        start = pytester.runpytest_subprocess if "-n" in options else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", "-p", "no:asyncio", "-rA", *options).stdout.lines

    return run


@pytest.mark.parametrize("side_by_side", [(), ("-n", "2", "--dist", "loadscope")], ids=["alone", "side by side"])
def test_a_run_takes_a_sample_of_exhaustive_tests_and_says_how_to_repeat_it(
    swept: Callable[..., list[str]], side_by_side: tuple[str, ...]
) -> None:
    lines = swept(*side_by_side)
    (told,) = [line for line in lines if line.startswith("left out: 7 cases of exhaustive and slow tests (--sample=")]
    seed = told.partition("=")[2].partition(")")[0]
    ran = sorted(line for line in lines if line.startswith("PASSED"))
    assert len(ran) == 3
    assert ran == sorted(line for line in swept(f"--sample={seed}") if line.startswith("PASSED"))
    assert any(line.startswith("all tests: ") for line in lines)


def test_a_run_of_all_leaves_nothing_out(swept: Callable[..., list[str]]) -> None:
    lines = swept("--all")
    assert len([line for line in lines if line.startswith("PASSED")]) == 10
    assert not any("left out" in line for line in lines)


def test_a_case_that_is_asked_for_runs(swept: Callable[..., list[str]]) -> None:
    for n in (0, 4, 8):
        assert [line for line in swept("-k", f"test_sweep and {n}") if line.startswith("PASSED")] == [
            f"PASSED test_a_case_that_is_asked_for_runs.py::test_sweep[{n}]"
        ]


def test_of_slow_files_a_share_runs_and_of_others_all() -> None:
    assert [name for name in SHARES if not (TESTS / name).exists()] == []
    assert len(SHARES) == sum(len(names.split()) for names in SLOW.values())
    shares = {name: share_of(TESTS / name) for name in ("docs/test_howto.py", "model/test_protocol.py", "test_keys.py")}
    assert shares == {"docs/test_howto.py": 0.02, "model/test_protocol.py": 0.05, "test_keys.py": 1.0}
    assert all(0 < share < 1 for share in SLOW)


def test_a_share_of_few_cases_runs_one_now_and_then() -> None:
    runs = [Sample(seed).share("of two", ["a", "b"], 0.1) for seed in range(500)]
    assert 50 < sum(map(len, runs)) < 150
    assert {each for run in runs for each in run} == {"a", "b"}
    assert [len(Sample(seed).share("of ten", range(10), 0.6)) for seed in range(9)] == [6] * 9
    assert Sample().share("all", ["a", "b"], 0.1) == ["a", "b"]


def test_the_longest_files_are_there() -> None:
    assert set(LONGEST_FIRST) <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


# The proxy


def test_a_proxy_that_closes_leaves_no_socket_of_a_client_that_just_connected(server: Server) -> None:
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(20):
            closing = FaultProxy("127.0.0.1", server.port)
            with ExitStack() as clients:
                for _ in range(5):
                    clients.enter_context(socket.create_connection(("127.0.0.1", closing.port)))
                closing.close()
            del closing
        gc.collect()
    assert [str(warning.message) for warning in unclosed] == []


def test_the_proxy_passes_everything_and_counts_requests(server: Server, proxy: FaultProxy, prefix: str) -> None:
    key = f"{prefix}:{{Q1}}"
    with connect(proxy) as client:
        pipeline = client.pipeline(transaction=False)
        for n in range(1000):
            pipeline.rpush(key, bytes([n % 256]) * n)
        assert pipeline.execute() == list(range(1, 1001))
        assert client.lrange(key, 0, -1) == [bytes([n % 256]) * n for n in range(1000)]
        big = b"\r\n$1" * (4 << 20)
        assert client.echo(big) == big
    assert proxy.count("RPUSH") == 1000
    assert proxy.count("RPUSH", on="plain") == 1000
    assert proxy.count("RPUSH", on="other") == 0
    assert proxy.seen(key, on=0)[0].words[:2] == (b"RPUSH", key.encode())


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_proxy_passes_messages(proxy: FaultProxy, prefix: str, protocol: int) -> None:
    with connect(proxy, protocol=protocol) as client, client.pubsub() as pubsub:
        pubsub.subscribe(prefix)
        assert pubsub.get_message(timeout=PATIENCE)["type"] == "subscribe"
        client.publish(prefix, "hello")
        assert pubsub.get_message(timeout=PATIENCE)["data"] == b"hello"
        pubsub.ping()
        assert pubsub.get_message(timeout=PATIENCE)["type"] == "pong"


@pytest.mark.parametrize("after", [0, 2])
async def test_a_dropped_reply_was_executed(server: Server, proxy: FaultProxy, prefix: str, after: int) -> None:
    key = f"{prefix}:{{Q1}}"
    fault = proxy.drop_reply("RPUSH", nth=2, after=after)
    with connect(proxy) as client:
        assert client.rpush(key, "1") == 1
        pipeline = client.pipeline(transaction=False).get(prefix).rpush(key, "2").rpush(key, "3")
        with pytest.raises(redis.ConnectionError):
            await in_thread(pipeline.execute)
        await fault.wait_fired()
        assert server.client().lrange(key, 0, -1) == [b"1", b"2"]
        assert client.ping()


async def test_a_dropped_reply_is_seen_though_its_client_has_gone(own_server: Server, proxy_to: ProxyTo) -> None:
    proxy = proxy_to(own_server)
    fault = proxy.drop_reply("RPUSH")
    with connect(proxy, timeout=0.1) as client:
        ping(client)
        own_server.pause()
        with pytest.raises(redis.TimeoutError):
            await in_thread(lambda: client.rpush("list", "1"))
        own_server.resume()
        await fault.wait_fired()
        assert own_server.client().llen("list") == 1


async def test_a_dropped_request_was_not_executed(server: Server, proxy: FaultProxy, prefix: str) -> None:
    fault = proxy.drop_request("RPUSH", on="guilty")
    with connect(proxy, "innocent") as innocent, connect(proxy, "guilty") as guilty:
        assert innocent.rpush(f"{prefix}:{{Q1}}", "1") == 1
        with pytest.raises(redis.ConnectionError):
            await in_thread(lambda: guilty.rpush(f"{prefix}:{{Q1}}", "2"))
        assert fault.fired
        assert innocent.llen(f"{prefix}:{{Q1}}") == 1


async def test_a_held_request_is_executed_late_though_its_client_has_gone(
    server: Server, proxy: FaultProxy, prefix: str
) -> None:
    fault = proxy.hold("RPUSH")
    with connect(proxy, timeout=0.1) as client:
        ping(client)
        with pytest.raises(redis.TimeoutError):
            await in_thread(lambda: client.rpush(f"{prefix}:{{Q1}}", "late"))
        await fault.wait_fired()
        assert server.client().llen(f"{prefix}:{{Q1}}") == 0
        fault.release()
        await fault.wait_executed()
        assert server.client().llen(f"{prefix}:{{Q1}}") == 1


async def test_a_held_reply_arrives_when_it_is_released(server: Server, proxy: FaultProxy, prefix: str) -> None:
    fault = proxy.hold_reply("RPUSH")
    replies: list[object] = []
    with connect(proxy) as client:
        async with trio.open_nursery() as nursery:

            async def push() -> None:
                replies.append(await in_thread(lambda: client.rpush(f"{prefix}:{{Q1}}", "1")))

            nursery.start_soon(push)
            await fault.wait_executed()
            assert server.client().llen(f"{prefix}:{{Q1}}") == 1
            assert not replies
            fault.release()
    assert replies == [1]


def test_a_cut_closes_the_chosen_connections(proxy: FaultProxy) -> None:
    with connect(proxy, "a") as a, connect(proxy, "b") as b:
        assert a.ping()
        assert b.ping()
        assert proxy.cut(on="a") == 1
        while "a" in proxy.names():  # its loop still has to close it
            time.sleep(0.001)
        assert a.ping()  # redis-py sees the reset before it writes, and connects again
        assert b.ping()
        assert proxy.count("SETNAME", on="a") == 2
        assert proxy.count("SETNAME", on="b") == 1


def test_a_black_hole_is_silent_and_open_until_passed(proxy: FaultProxy) -> None:
    with connect(proxy, "a", timeout=0.1) as a, connect(proxy, "b", timeout=0.1) as b:
        ping(a)
        ping(b)
        proxy.blackhole(on="a")
        for _ in range(2):  # the open connection, then a new one
            with pytest.raises(redis.TimeoutError):
                a.ping()
        ping(b)
        proxy.pass_all()
        ping(a)


def test_refusing_lets_open_connections_go_on(proxy: FaultProxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        assert first.ping()
        proxy.refuse()
        assert first.ping()
        with pytest.raises(redis.ConnectionError):
            second.ping()
        proxy.pass_all()
        assert second.ping()


def test_a_delay_is_felt_once_by_a_pipeline(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.ping()
        proxy.delay(0.2)
        start = time.monotonic()
        assert client.pipeline(transaction=False).ping().ping().ping().execute() == [True] * 3
        assert 0.2 <= time.monotonic() - start < 20


# Children


async def test_a_child_is_read_written_and_ended(spawn: Spawn) -> None:
    child = spawn(
        """
        import sys
        import worqr.errors
        print("ready", *sys.argv[1:])
        for line in sys.stdin:
            print("got", line.strip())
            if line.strip() == "end":
                sys.exit(3)
        """,
        "an argument",
    )
    assert await child.line() == "ready an argument"
    child.send("one")
    child.send("end")
    assert await child.line_with("end") == "got end"
    assert await child.ended() == 3


LOOK = """
import json, os, signal, sys, threading

main = sorted(vars())
import random
import trio, worqr.child_processes

found = {
    "main": [main, __name__, repr(__spec__), repr(__loader__).partition(" object")[0], globals().get("__file__")],
    "argv": [sys.argv, sys.orig_argv, sys.path],
    "environ": dict(os.environ),
    "folder": os.getcwd(),
    "flags": [repr(sys.flags), sys.warnoptions, repr(sys._xoptions)],
    "group": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.umask(0o22)],
    "handlers": [repr(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
    "mask": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": [each.name for each in threading.enumerate()] + os.listdir("/proc/self/task")[1:],
    "descriptors": os.listdir("/proc/self/fd"),
    "forks": worqr.child_processes.forks,
    "streams": [
        (each.name, each.encoding, each.errors, each.line_buffering, each.write_through, each.seekable(), repr(each.buffer))
        for each in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "tests": sorted(name for name in sys.modules if name.startswith("tests")),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
}
print(json.dumps(found))
print(json.dumps([random.random(), trio._core._run._r.random()]))
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked only there")


def is_forked(child: Child) -> bool:
    return isinstance(child.process, forking.Forked)


@on_linux
@pytest.mark.parametrize("kind", ["code", "file"])
async def test_a_forked_program_finds_what_a_new_interpreter_finds(spawn: Spawn, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(LOOK)
    assert is_forked(spawn("pass"))  # so that what forks began before the umask changed, as a tested command may do
    before = os.umask(0o027)
    try:
        children = [
            spawn(file if kind == "file" else LOOK, "a", "-b", env={"A": "\u00e4"}, fresh=n == 0) for n in range(3)
        ]
    finally:
        os.umask(before)
    assert [is_forked(child) for child in children] == [False, True, True]
    new, *forked = [json.loads(await child.line()) for child in children]
    assert forked == [new, new]
    assert (new["argv"][0][1:], new["environ"]["A"], new["folder"]) == (["a", "-b"], "\u00e4", os.fspath(ROOT))
    chance = [number for child in children for number in json.loads(await child.line())]
    assert len(set(chance)) == len(chance)


AT_THE_END = """
import atexit, threading, time, sys

class Last:
    def __del__(self):
        print("finalized")

def lasting():
    threading.main_thread().join()
    print("thread", Last.__name__, sys.modules["__main__"].Last is Last)

last = Last()
last.itself = last
atexit.register(print, "exit")
threading.Thread(target=lasting).start()
"""


@pytest.mark.parametrize(
    ("program", "code", "out", "error"),
    [
        ("import sys; sys.exit(3)", 3, [], ""),
        ("raise SystemExit", 0, [], ""),
        ("import sys; sys.exit('no')", 1, [], "no"),
        ("def f():\n    1 / 0\nf()", 1, [], "ZeroDivisionError: division by zero"),
        ("1 +", 1, [], "SyntaxError: invalid syntax"),
        ("raise BaseExceptionGroup('of', [KeyboardInterrupt()])", 1, [], "+------------------------------------"),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, [], "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, [], ""),
        ("import atexit, os; atexit.register(print, 'exit'); os._exit(5)", 5, [], ""),
        (
            "import sys; sys.excepthook = lambda *a: print(a[0].__name__, a[2].tb_next); 1 / 0",
            1,
            ["ZeroDivisionError None"],
            "",
        ),
        (AT_THE_END, 0, ["thread Last True", "exit", "finalized"], ""),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
async def test_a_program_ends_as_an_interpreter_ends(
    spawn: Spawn, program: str, code: int, out: list[str], error: str, fresh: bool
) -> None:
    child = spawn(program, fresh=fresh)
    assert await child.ended() == code
    assert [await child.line() for _ in out] == out
    assert child.errors.rstrip().rpartition("\n")[2].strip() == error
    if code == 1 and "Traceback" in child.errors and "Group" not in child.errors:
        assert "forking" not in child.errors


@on_linux
async def test_a_forked_program_is_waited_for_stopped_and_killed(spawn: Spawn) -> None:
    child = spawn("import sys; print('ready'); print(sys.stdin.readline())")
    assert is_forked(child)
    assert await child.line() == "ready"
    assert (child.process.poll(), child.process.returncode) == (None, None)
    child.pause()
    await until(lambda: state_of(child.pid) == "T")
    child.send("heard")
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.05)
    child.resume()
    assert await child.line() == "heard"
    assert await child.ended() == await child.ended() == child.process.returncode == 0
    assert not is_running(child.pid)
    child.process.send_signal(signal.SIGKILL)  # to nobody
    other = spawn("import time; time.sleep(1000)")
    other.process.terminate()
    assert await other.ended() == -signal.SIGTERM


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("fresh", [False, True])
async def test_what_a_program_leaves_behind_goes_to_init(spawn: Spawn, fresh: bool) -> None:
    child = spawn(
        """
        import os, time
        parent = os.getpid()
        if not os.fork():
            while os.getppid() == parent:
                time.sleep(0.01)
            print(os.getpid(), open(f"/proc/{os.getppid()}/stat").read().split()[3])
            time.sleep(1000)
        """,
        fresh=fresh,
    )
    assert await child.ended() == 0
    left, above = map(int, (await child.line()).split())
    assert above in {0, 1}  # its parent is the first process, or one that systemd has put in its place
    assert is_running(left)
    child.close()
    await until(lambda: not is_running(left) or state_of(left) == "Z")


@pytest.mark.parametrize("name", ["PYTHONDEVMODE", "PYTHONPATH", "TZ", "LC_ALL", "LD_BIND_NOW", "MALLOC_ARENA_MAX"])
async def test_a_program_begins_anew_for_an_environment_that_a_fork_could_not_obey(spawn: Spawn, name: str) -> None:
    child = spawn("import os, sys; print(os.environ[sys.argv[1]])", name, env={name: "1"})
    assert isinstance(child.process, subprocess.Popen)
    assert await child.line() == "1"


@on_linux
def test_what_forks_ends_with_the_tests_and_reaps_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_servers", [])
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    with tempfile.TemporaryFile() as errors, ExitStack() as stack:
        waits, ends = (forking.start(["-c", code], ROOT, env, errors) for code in ("import sys; sys.stdin.read()", ""))
        for program in (waits, ends):
            assert program.stdin is not None
            assert program.stdout is not None
            stack.callback(program.stdin.close)
            stack.callback(program.stdout.close)
        assert ends.wait(PATIENCE) == 0
        parent = int(Path(f"/proc/{waits.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert os.getsid(parent) == parent != os.getsid(0)
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
        assert found.stdout.split() == [str(waits.pid)]
        forking.close()
        assert not is_running(parent)
        assert is_running(waits.pid)
        os.kill(waits.pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match="nothing forks any more"):
            waits.wait()


async def test_a_child_that_ends_early_is_told_with_its_errors(spawn: Spawn) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        await spawn("1 / 0").line()


async def test_a_silent_child_is_told(spawn: Spawn) -> None:
    child = spawn("import sys; sys.stdin.read()")
    with pytest.raises(AssertionError, match=r"nothing for 0\.1 s"):
        await child.line(within=0.1)
    child.kill()
    assert child.process.returncode == -signal.SIGKILL
