"""Clients that worqr makes for Go: compiled and vetted by the real compiler, they send what Python reads as equal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn, TypedDict

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import worqr
import worqr.codecs
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.test_typed_clients import SIGNATURES, Typed, declare, function_of
from tests.test_wire import ROOT, clean, environment, joined, mesh, output
from tools.conformance import PATH
from worqr.cli import main
from worqr.cli.client import go_of
from worqr.functions.schema import asyncapi
from worqr.inside import declarations_of, definition_of
from worqr.keys import QueueKeys
from worqr.lua import script

pytestmark = [pytest.mark.one_server, pytest.mark.timeout(300)]

__all__ = ["clean", "environment", "mesh"]

Compile = Callable[[worqr.Mesh, str], str]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """`compiled(mesh, code)`: make the client of a mesh, vet it, and build it with a program that uses it.

    What it returns is what the compiler says.
    """
    if shutil.which("go") is None:
        no_go("go is not installed: try `apt-get install golang-go`")
    (tmp_path / "shop").mkdir()
    (tmp_path / "go.mod").write_text("module example\n\ngo 1.19\n")
    shutil.copy(ROOT / "tests" / "go" / "resp.go", tmp_path)

    def run(mesh: worqr.Mesh, code: str) -> str:
        (tmp_path / "shop" / "client.go").write_text(client_of(mesh), "utf-8")
        (tmp_path / "main.go").write_text(f"{HEAD}\n{code}", "utf-8")
        said = ""
        for command in (["go", "vet", "./..."], ["go", "build", "-o", "use", "."]):
            found = subprocess.run(
                command, cwd=tmp_path, env=WITHOUT_NETWORK, capture_output=True, text=True, check=False, timeout=200
            )
            said += found.stderr if found.returncode else ""
        return said

    return run


WITHOUT_NETWORK = {**os.environ, "GOPROXY": "off", "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
HEAD = """
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"example/shop"
)

var ctx = context.Background()
var _, _, _, _ = math.NaN, regexp.MatchString, strings.Contains, errors.Is
var _ sync.Mutex
var _ = time.Second

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func show(values ...any) { fmt.Println(string(must(json.Marshal(values)))) }

var redis = newServer(os.Getenv("REDIS_URL"))
var mesh = must(shop.New(redis.do, shop.Settings{}))
"""


def no_go(reason: str) -> NoReturn:
    if os.environ.get("WORQR_TEST_GO") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def client_of(mesh: worqr.Mesh) -> str:
    functions = [definition_of(each) for each in declarations_of(mesh).functions.values()]
    return go_of(asyncapi(functions, "worqr", "shop"), functions, "worqr", "shop:mesh")


USE = """
func main() {
	at := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)
	order := shop.Order{Id: 7, Lines: []shop.Line{{Sku: "a", At: &at, Picture: []byte{0, 255}}}}
	args := shop.SendOrderArgs{Order: order}
	job := must(mesh.SendOrder.Dispatch(ctx, args, shop.DispatchOptions{
		ID: "order-7", Tags: []string{"x"}, Meta: map[string]string{"by": "ada"}, Timeout: shop.Ptr(5 * time.Second),
	}))
	soon, cancel := context.WithTimeout(ctx, 30 * time.Second)
	defer cancel()
	var result shop.OrderResult = must(job.Result(soon))
	show(job.Outcome, result.Lines[0].At, result.Lines[0].Picture, result.Id, must(job.Status(ctx)).State)
	var reversed []byte = must(must(mesh.Delete.Dispatch(ctx, []byte("abc"), shop.DispatchOptions{})).Result(soon))
	show(string(reversed))
	inLane := shop.DispatchOptions{Delay: time.Hour, Lane: "slow"}
	later := must(mesh.SendOrder.Dispatch(ctx, args, inLane))
	status := must(later.Status(ctx))
	show(status.State, status.RunAt.After(time.Now()), must(later.Cancel(ctx, "no")), must(later.Status(ctx)).State)
	told := func(err error) { show(err.Error()) }
	_, err := later.Result(soon)
	show(errors.Is(err, shop.ErrCancelled), err.Error())
	failing := must(mesh.Fail.Dispatch(ctx, shop.FailArgs{}, shop.DispatchOptions{}))
	_, err = failing.Result(soon)
	var failed *shop.JobFailed
	show(errors.As(err, &failed), failed.Type, failed.Message, strings.Contains(failed.Traceback, "raise ValueError"))
	show(must(failing.Status(ctx)).State)
	show(must(must(mesh.Big.Dispatch(ctx, shop.BigArgs{}, shop.DispatchOptions{})).Result(soon)))
	_, err = mesh.SendOrder.Job("unknown").Result(soon)
	show(errors.Is(err, shop.ErrNoResult), err.Error())
	short, cancel := context.WithTimeout(ctx, 20 * time.Millisecond)
	defer cancel()
	_, err = must(mesh.SendOrder.Dispatch(ctx, args, inLane)).Result(short)
	show(errors.Is(err, context.DeadlineExceeded))
	must(mesh.SendOrder.Dispatch(ctx, args, shop.DispatchOptions{ID: "order-9", Delay: time.Hour}))
	_, err = mesh.SendOrder.Dispatch(ctx, args, shop.DispatchOptions{ID: "order-9", IfExists: shop.Raise})
	show(errors.Is(err, shop.ErrDuplicate), err.Error())
	must(mesh.Full.Dispatch(ctx, shop.FullArgs{N: 1}, inLane))
	show(errors.Is(mesh.Full.Enqueue(ctx, shop.FullArgs{N: 2}), shop.ErrQueueFull))
	must(mesh.Flow.Dispatch(ctx, shop.FlowArgs{}, shop.DispatchOptions{}))
	refused := func(options shop.DispatchOptions) {
		_, err := mesh.SendOrder.Dispatch(ctx, args, options)
		show(errors.Is(err, shop.ErrUsage), err.Error())
	}
	refused(shop.DispatchOptions{Delay: -1})
	refused(shop.DispatchOptions{Delay: 1, RunAt: at})
	refused(shop.DispatchOptions{UniqueFor: time.Hour})
	refused(shop.DispatchOptions{IfExists: "rise"})
	refused(shop.DispatchOptions{Tags: []string{"a\\nb"}})
	refused(shop.DispatchOptions{Meta: map[string]string{"by": "\\xff"}})
	_, err = mesh.Hot.Dispatch(ctx, 7, shop.DispatchOptions{ID: "x"})
	told(err)
	told(mesh.SendOrder.Enqueue(ctx, shop.SendOrderArgs{Order: shop.Order{Lines: []shop.Line{{Sku: "\\xff"}}}}))
	long := shop.Line{At: shop.Ptr(time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC))}
	told(mesh.IndexPages.Enqueue(ctx, long))
	_, err = shop.New(redis.do, shop.Settings{Patience: -1})
	told(err)
}
"""
SAID = [
    ["created", "2031-01-01T00:00:00Z", "AP8=", 7, "finished"],
    ["cba"],
    ["scheduled", True, True, "cancelled"],
    [True, "cancelled: no"],
    [True, "ValueError", "no such order", True],
    ["failed"],
    [2**60],
    [True, "no result: the job unknown has none: gone; a function keeps results with result_ttl"],
    [True],
    [True, "duplicate: the id order-9 is taken in shop.send_order: nothing was stored"],
    [True],
    [True, "usage error: Delay must be at least 0, not -1ns"],
    [True, "usage error: a dispatch takes a Delay or a RunAt, not both"],
    [True, "usage error: UniqueFor needs an ID: it is the id that stays taken"],
    [True, 'usage error: IfExists must be Update, Skip, Raise or Cancel, not "rise"'],
    [True, 'usage error: Tags has "a\\nb": a tag is a text of one line'],
    [True, 'usage error: Meta.by is no valid UTF-8: "\\xff"'],
    ["usage error: the function has several shards: leave out ID, UniqueFor and Lane"],
    ['usage error: shop.send_order.order.lines[0].sku is no valid UTF-8: "\\xff"'],
    ["usage error: shop.index pages.at is 0000-01-01 00:00:00 +0000 UTC, and must be in the years 1 to 9999"],
    ["usage error: Patience must be at least 0, not -1ns"],
]


async def test_a_client_dispatches_and_reads_results(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    declare(mesh)
    assert compiled(mesh, USE) == ""
    async with joined(mesh):
        said = [json.loads(line) for line in (await output(["./use"], environment, tmp_path)).splitlines()]
    assert said == SAID


async def test_a_result_that_a_codec_has_encoded_is_an_error_that_says_so(
    server: Server, clean: None, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    mesh = worqr.Mesh(server.url, prefix="worqr", codec=worqr.codecs.Signed(b"a key of 16 bytes"))

    @mesh.task(name="shop.count", result_ttl=60)
    async def count() -> int:
        return 7

    code = """
    func main() {
        _, err := must(mesh.Count.Dispatch(ctx, shop.CountArgs{}, shop.DispatchOptions{})).Result(ctx)
        fmt.Print(err)
    }
    """
    assert compiled(mesh, code) == ""
    async with joined(mesh):
        said = await output(["./use"], environment, tmp_path)
    assert said.startswith("the result was encoded by the codec of the mesh")


WRONG = (
    "mesh.Full.Enqueue(ctx, shop.FullArgs{N: shop.Ptr(7)})",
    'mesh.Full.Enqueue(ctx, shop.FullArgs{N: "7"})',
    "mesh.Full.Enqueue(ctx, shop.FullArgs{M: 7})",
    "mesh.Full.Enqueue(ctx, 7)",
    "mesh.Flow.Enqueue(ctx, shop.FlowArgs{})",
    'show(must(must(mesh.Big.Dispatch(ctx, shop.BigArgs{}, shop.DispatchOptions{})).Result(ctx)) == "")',
    "mesh.Full.Dispatch(ctx, shop.FullArgs{N: 7}, shop.DispatchOptions{Delays: 2})",
)


def test_what_does_not_fit_does_not_compile(compiled: Compile) -> None:
    mesh = worqr.Mesh(prefix="worqr")
    declare(mesh)
    said = compiled(mesh, "\n".join(["func main() {", "//line wrong.go:1", *WRONG, "}"]))
    assert {int(line) for line in re.findall(r"wrong.go:(\d+)", said)} == {*range(1, len(WRONG) + 1)}, said


async def test_tags_of_a_dispatch_are_added_to_those_of_the_function(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    @mesh.task(name="shop.bill", tags=("bills", "eu"))
    async def bill() -> None: ...

    code = """
func main() {
	must(mesh.Bill.Dispatch(ctx, shop.BillArgs{}, shop.DispatchOptions{ID: "1"}))
	must(mesh.Bill.Dispatch(ctx, shop.BillArgs{}, shop.DispatchOptions{ID: "2", Tags: []string{"ada", "eu", "ada"}}))
}
"""
    assert compiled(mesh, code) == ""
    await output(["./use"], environment, tmp_path)
    async with mesh.connect():
        counts = [sum((await mesh.queue("shop.bill").count_tagged(tag)).values()) for tag in ("bills", "eu", "ada")]
    assert counts == [2, 2, 1]


async def test_a_call_that_is_enqueued_is_a_job_if_its_function_keeps_jobs_or_has_tags(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    @mesh.task(name="shop.bill", tags=["bills"])
    async def bill(n: int) -> None: ...

    @mesh.task(name="shop.mail", keep=worqr.Keep())
    async def mail() -> None: ...

    code = """
func main() {
	must(0, mesh.Bill.Enqueue(ctx, shop.BillArgs{N: 7}))
	must(0, mesh.Mail.Enqueue(ctx, shop.MailArgs{}))
}
"""
    assert compiled(mesh, code) == ""
    await output(["./use"], environment, tmp_path)
    async with mesh.connect():
        assert await bill.queue.count_tagged("bills") == {"waiting": 1}
        assert all(job.id for job in await mail.queue.jobs())


async def test_a_request_whose_reply_is_lost_is_sent_again_and_stored_once(
    compiled: Compile,
    own_server: Server,
    proxy_to: Callable[[Server], FaultProxy],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    mesh = worqr.Mesh(own_server.url, prefix="worqr")
    declare(mesh)
    code = """
func main() {
	var all sync.WaitGroup
	created := make(chan bool, 100)
	for n := 0; n < 100; n++ {
		all.Add(1)
		go func(n int) {
			defer all.Done()
			for range make([]int, 3) {
				must(0, mesh.Delete.Enqueue(ctx, []byte("x")))
			}
			options := shop.DispatchOptions{ID: fmt.Sprint(n), IfExists: shop.Raise}
			created <- must(mesh.Delete.Dispatch(ctx, []byte("y"), options)).Outcome == "created"
		}(n)
	}
	all.Wait()
	count := 0
	for range make([]int, 100) {
		if <-created {
			count++
		}
	}
	fmt.Println(count)
}
"""
    assert compiled(mesh, code) == ""
    proxy = proxy_to(own_server)
    faults = [
        proxy.drop_reply(script("enqueue").sha, nth=50),
        proxy.drop_reply(script("dispatch_jobs").sha, nth=50),
    ]
    said = await output(["./use"], {**environment, "REDIS_URL": proxy.url}, tmp_path)
    assert ([each.fired for each in faults], said) == ([True, True], "100\n")
    async with mesh.connect():
        assert (await mesh.queue("shop.delete").info()).waiting == 400


async def test_a_client_gives_up_in_time_and_forgets_numbers_that_have_a_reply(
    compiled: Compile, mesh: worqr.Mesh, environment: dict[str, str], tmp_path: Path
) -> None:
    declare(mesh)
    code = """
func main() {
	away := must(shop.New(newServer("redis://127.0.0.1:1").do, shop.Settings{Patience: 100 * time.Millisecond}))
	err := away.Fail.Enqueue(ctx, shop.FailArgs{})
	show(errors.Is(err, shop.ErrUnavailable), strings.Contains(err.Error(), "connection refused"))
	stuck := func(ctx context.Context, args ...any) (any, error) { select {} }
	ended, cancel := context.WithTimeout(ctx, 20 * time.Millisecond)
	defer cancel()
	err = must(shop.New(stuck, shop.Settings{})).Fail.Enqueue(ended, shop.FailArgs{})
	show(errors.Is(err, shop.ErrUnavailable), errors.Is(err, context.DeadlineExceeded))
	var lowest []any
	recorded := must(shop.New(func(ctx context.Context, args ...any) (any, error) {
		if args[0] == "GET" {
			return nil, nil
		}
		lowest = append(lowest, args[6])
		return []any{"ok", int64(1)}, nil
	}, shop.Settings{}))
	must(0, recorded.Fail.Enqueue(ctx, shop.FailArgs{}))
	must(0, recorded.Fail.Enqueue(ctx, shop.FailArgs{}))
	show(lowest...)
}
"""
    assert compiled(mesh, code) == ""
    assert await output(["./use"], environment, tmp_path) == '[true,true]\n[true,true]\n["1","2"]\n'


REPLAY = """
type wish = map[string]any

func fits(value, told any) bool {
	switch told := told.(type) {
	case []any:
		list, isList := value.([]any)
		if !isList || len(list) != len(told) {
			return false
		}
		for i := range told {
			if !fits(list[i], told[i]) {
				return false
			}
		}
		return true
	case wish:
		if pattern, isPattern := told["matches"].(string); isPattern {
			return regexp.MustCompile(pattern).MatchString(fmt.Sprint(value))
		}
		return fits(value, told["error"])
	}
	return fmt.Sprint(value) == fmt.Sprint(told)
}

func argument(each any) any {
	if told, isBytes := each.(wish); isBytes {
		var content []byte
		must(0, json.Unmarshal([]byte(`"` + told["base64"].(string) + `"`), &content))
		return content
	}
	return each
}

func send(producer *shop.Producer, step wish, next *int) (any, error) {
	if command, isCommand := step["command"].([]any); isCommand {
		reply, err := redis.do(ctx, command...)
		if err != nil && err.Error() == "redis: nil" {
			return nil, nil
		}
		return reply, err
	}
	var args []any
	for _, each := range step["args"].([]any) {
		args = append(args, argument(each))
	}
	script, key := step["script"].(string), step["key"].(string)
	if args[0] == "P" && args[1] == fmt.Sprint(*next) {
		*next++
		return producer.Send(ctx, script, key, args[3:]...)
	}
	return producer.Ask(ctx, script, key, args...)
}

func main() {
	var file struct {
		Cases []struct {
			Case  string
			Steps []wish
		}
	}
	reader := json.NewDecoder(must(os.Open(os.Args[1])))
	reader.UseNumber()
	must(0, reader.Decode(&file))
	for _, each := range file.Cases {
		must(redis.do(ctx, "FLUSHDB"))
		producer, next := must(shop.NewProducer(redis.do, shop.Settings{Producer: "P"})), 1
		for _, step := range each.Steps {
			value, err := send(producer, step, &next)
			if err != nil {
				_, isReply := err.(replyError)
				value = isReply
			}
			if !fits(value, step["reply"]) {
				fmt.Println(each.Case, value, step["reply"])
			}
			fmt.Println("step")
		}
	}
}
"""


async def test_the_client_passes_the_file(
    own_server: Server, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    mesh = worqr.Mesh(own_server.url, prefix="worqr")
    declare(mesh)
    assert compiled(mesh, REPLAY) == ""
    said = await output(["./use", str(PATH)], {**environment, "REDIS_URL": own_server.tcp_url}, tmp_path)
    steps = [step for case in json.loads(PATH.read_text("utf-8"))["cases"] for step in case["steps"]]
    assert said.splitlines() == ["step"] * len(steps)


# Types


class Cat(msgspec.Struct, tag="cat"):
    lives: int = 9


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Parts(TypedDict, total=False):
    colour: Literal["red", "blue"]
    sizes: list[int]


def pets(mesh: worqr.Mesh) -> None:
    @mesh.task(name="shop.feed")
    async def feed(
        *,
        pet: Cat | Dog,
        cat: Cat,
        parts: Parts,
        level: Literal[1, 2],
        limit: int | None = 5,
        tags: list[str] | None = None,
    ) -> None: ...


async def test_fields_that_are_left_out_have_their_defaults(
    mesh: worqr.Mesh, compiled: Compile, server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    pets(mesh)
    code = """
func main() {
	must(0, mesh.Feed.Enqueue(ctx, shop.FeedArgs{
		Pet: shop.Dog{Name: "rex"}, Parts: shop.Parts{Colour: shop.Ptr(shop.PartsColourRed)}, Level: shop.FeedLevel2,
	}))
	args := shop.FeedArgs{
		Pet: shop.Cat{Lives: shop.Ptr[int64](1)}, Level: 1, Limit: shop.Ptr[*int64](nil), Tags: &[]string{},
		Parts: shop.Parts{Sizes: []int64{}},
	}
	must(0, mesh.Feed.Enqueue(ctx, args))
	show(mesh.Feed.Enqueue(ctx, shop.FeedArgs{}).Error())
	args.Parts.Colour = shop.Ptr(shop.PartsColour("green"))
	show(mesh.Feed.Enqueue(ctx, args).Error())
}
"""
    assert compiled(mesh, code) == ""
    said = (await output(["./use"], environment, tmp_path)).splitlines()
    assert json.loads(said[0])[0].startswith('usage error: shop.feed.level is "0", and must be one of ')
    assert json.loads(said[1])[0].startswith('usage error: shop.feed.parts.colour is "green", and must be one of ')
    codec = definition_of(declarations_of(mesh).functions["shop.feed"]).codec
    base = QueueKeys("worqr", "shop.feed").base
    with server.client() as client:
        _, first = codec.decode(client.rpop(base))
        _, second = codec.decode(client.rpop(base))
    assert first == {
        "pet": Dog("rex"),
        "cat": Cat(),
        "parts": {"colour": "red"},
        "level": 2,
        "limit": 5,
        "tags": None,
    }
    assert second == {
        "pet": Cat(1),
        "cat": Cat(),
        "parts": {"sizes": []},
        "level": 1,
        "limit": None,
        "tags": [],
    }


def test_values_of_any_signature_arrive_equal(
    server: Server,
    mesh: worqr.Mesh,
    compiled: Compile,
    environment: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Go reads what Python writes into the types of the client, and sends it to Python."""
    is_sample = request.config.option.sample is not None

    @settings(
        max_examples=3 if is_sample else 12,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SIGNATURES)
    def check(signatures: list[dict[str, Typed]]) -> None:
        mesh = worqr.Mesh(prefix="worqr")
        functions = {f"f{n}": mesh.task(name=f"f{n}")(function_of(f"f{n}", each)) for n, each in enumerate(signatures)}
        lines = [
            f"must(0, mesh.{name.upper()}.Enqueue(ctx, read[shop.{name.upper()}Args]({n})))"
            for n, name in enumerate(functions)
        ]
        assert compiled(mesh, "\n".join([READ, "func main() {", *lines, "}"])) == ""
        values = [{name: value for name, (_, value) in each.items()} for each in signatures]
        given = [definition_of(fn).codec.encode(each) for fn, each in zip(functions.values(), values, strict=True)]
        (tmp_path / "values.json").write_bytes(b"[%s]" % b",".join(given))
        subprocess.run(["./use"], cwd=tmp_path, env=environment, check=True, timeout=100)
        with server.client() as client:
            for (name, function), value in zip(functions.items(), values, strict=True):
                _, arrived = definition_of(function).codec.decode(client.rpop(QueueKeys("worqr", name).base))
                assert arrived == value

    check()


READ = """
var values []json.RawMessage
var _ = json.Unmarshal(must(os.ReadFile("values.json")), &values)

func read[A any](n int) (args A) {
	reader := json.NewDecoder(strings.NewReader(string(values[n])))
	reader.UseNumber()
	must(0, reader.Decode(&args))
	return args
}
"""


# What cannot be made


Odd = TypedDict("Odd", {'a"b': int})


def test_a_field_whose_name_has_no_tag_is_refused() -> None:
    mesh = worqr.Mesh()

    @mesh.task(name="shop.order")
    def order(what: Odd) -> None: ...

    with pytest.raises(worqr.UsageError, match="shop.order: parameter 'what', field .* that Go has no tag for"):
        client_of(mesh)


def test_the_command_prints_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "go", "tests.cli.app:mesh"]) == 0
    said = capsys.readouterr().out
    assert "\npackage app\n" in said
    assert said.startswith("// Code generated by `worqr client go tests.cli.app:mesh`")
