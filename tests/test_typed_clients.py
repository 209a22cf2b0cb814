"""Clients that worqr makes for other languages: compiled strictly by the real compiler, they send what Python reads as equal."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import worqr
import worqr.codecs
from tests.support.leaks import delete_all
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.test_wire import clean, environment, joined, mesh, node_packages, output
from tools.conformance import PATH, recorded
from worqr.cli import main
from worqr.cli.client import typescript_of
from worqr.dashboard import openapi
from worqr.functions.schema import asyncapi
from worqr.inside import declarations_of, definition_of
from worqr.keys import QueueKeys
from worqr.lua import script

pytestmark = [pytest.mark.one_server, pytest.mark.timeout(300)]

__all__ = ["clean", "environment", "mesh", "node_packages"]

STRICT = "--strict --noUncheckedIndexedAccess --exactOptionalPropertyTypes --noUnusedLocals --noImplicitOverride --skipLibCheck"
TSC = f"{STRICT} --target es2022 --module nodenext --types node"
Compile = Callable[[worqr.Mesh, str], str]


@pytest.fixture
def compiled(node_packages: Path, tmp_path: Path) -> Compile:
    """`compiled(mesh, code)`: make the client of a mesh, and compile it strictly, with a program that uses it.

    What it returns is what the compiler says.
    """
    (tmp_path / "node_modules").symlink_to(node_packages)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(mesh: worqr.Mesh, code: str) -> str:
        (tmp_path / "client.ts").write_text(client_of(mesh), "utf-8")
        (tmp_path / "use.ts").write_text(f"{HEAD}\n{code}\nawait redis.close();\n", "utf-8")
        command = ["node", "node_modules/typescript/bin/tsc", *TSC.split(), "use.ts"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200).stdout

    return run


HEAD = """
import { createClient } from "redis";
import { mesh } from "./client.js";
const redis = createClient({ url: process.env["REDIS_URL"] as string, disableClientInfo: true });
redis.on("error", () => {});
await redis.connect();
const shop = mesh(redis);
"""


def client_of(mesh: worqr.Mesh) -> str:
    functions = [definition_of(each) for each in declarations_of(mesh).functions.values()]
    return typescript_of(asyncapi(functions, "worqr", "shop"), functions, "worqr", "shop:mesh")


# A client at work


class Line(msgspec.Struct):
    sku: str
    at: datetime | None = None
    picture: bytes = b""


class Order(msgspec.Struct):
    id: int
    lines: list[Line] = []


ORDER = Order(7, [Line("a", datetime(2031, 1, 1, tzinfo=UTC), b"\x00\xff")])


def declare(mesh: worqr.Mesh) -> None:
    @mesh.task(name="shop.send_order", result_ttl=60)
    async def send_order(order: Order, times: int = 1) -> Order:
        assert (order, times) == (ORDER, 1)
        return order

    @mesh.task(name="shop.delete", result_ttl=60)
    async def delete(data: bytes, /) -> bytes:
        return data[::-1]

    @mesh.task(name="shop.fail", result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    async def fail() -> int:
        raise ValueError("no such order")

    @mesh.task(name="shop.big", result_ttl=60)
    async def big() -> int:
        return 2**60

    @mesh.task(name="shop.full", max_length=1)
    async def full(n: int) -> None: ...

    @mesh.task(name="shop.index pages", batch_size=10)
    async def index(pages: list[Line]) -> None: ...

    @mesh.task(name="shop.hot", shards=2)
    async def hot(n: int = 1, /) -> None: ...

    @mesh.workflow(name="shop.flow")
    async def flow() -> None: ...


USE = """
const order = { id: 7, lines: [{ sku: "a", at: new Date("2031-01-01"), picture: new Uint8Array([0, 255]) }] };
const job = await shop.sendOrder.dispatch({ order }, { id: "order-7", tags: ["x"], meta: { by: "ada" }, timeout: 5 });
const result = await job.result(30);
const at: string | null | undefined = result.lines[0]?.at;
console.log(JSON.stringify([job.outcome, at, result.id, (await job.status()).state]));
const bytes: Buffer = await (await shop.delete.dispatch(Buffer.from("abc"))).result(30);
console.log(JSON.stringify(bytes.toString()));
const later = await shop.sendOrder.dispatch({ order }, { delay: 1000, lane: "slow" });
console.log(JSON.stringify([(await later.status()).state, await later.cancel("no"), (await later.status()).state]));
const told = async (made: Promise<unknown>) =>
  console.log(JSON.stringify(await made.then(() => "", (error: Error) => `${error.name}: ${error.message}`)));
await told(later.result(30));
await told((await shop.fail.dispatch()).result(30));
await told((await shop.big.dispatch()).result(30));
await told(shop.sendOrder.job("unknown").result());
await told((await shop.sendOrder.dispatch({ order }, { delay: 1000 })).result(0.02));
const { id } = await shop.sendOrder.dispatch({ order }, { id: "order-9", delay: 1000 });
await told(shop.sendOrder.dispatch({ order }, { id, ifExists: "raise" }));
await told(shop.sendOrder.dispatch({ order }, { delay: -1 }));
await told(shop.sendOrder.dispatch({ order: { id: NaN } }));
await told(shop.sendOrder.dispatch({ order: { id: 1, lines: [{ sku: "\\ud800" }] } }));
await told(shop.full.dispatch({ n: 1 }, { delay: 1000 }).then(() => shop.full.enqueue({ n: 2 })));
const wrong = async () => {
  // @ts-expect-error
  await shop.sendOrder.enqueue({ order: 7 });
  // @ts-expect-error
  await shop.sendOrder.enqueue({});
  // @ts-expect-error
  await shop.sendOrder.enqueue({ order, time: 2 });
  // @ts-expect-error
  await shop.sendOrder.dispatch({ order }, { delays: 2 });
  // @ts-expect-error
  await shop.fail.enqueue({});
  // @ts-expect-error
  await shop.hot.dispatch(7, { id: "x" });
  // @ts-expect-error
  await shop.flow.enqueue();
  await shop.flow.dispatch();
  await shop.indexPages.enqueue({ sku: "a" });
};
void wrong;
"""


async def test_a_client_dispatches_and_reads_results(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    declare(mesh)
    assert compiled(mesh, USE) == ""
    async with joined(mesh):
        said = [json.loads(line) for line in (await output(["node", "use.js"], environment, tmp_path)).splitlines()]
    number = said.pop(5)
    assert number.startswith("WorqrError: the result has the integer 1152921504606846976")
    assert said == [
        ["created", "2031-01-01T00:00:00Z", 7, "finished"],
        "cba",
        ["scheduled", True, "cancelled"],
        "JobCancelled: no",
        "JobFailed: ValueError: no such order",
        "NoResult: the job unknown has no result: gone; a function keeps results with result_ttl",
        said[6],
        "Duplicate: the id order-9 is taken in shop.send_order: nothing was stored",
        "UsageError: delay must be a number of at least 0, not -1",
        "UsageError: shop.send_order.order.id is NaN, which JSON does not know",
        "UsageError: shop.send_order.order.lines[0].sku has half of a surrogate pair, which is no valid text",
        "QueueFull: 1 tasks wait in shop.full: nothing was stored",
    ]
    assert said[6].endswith("had not ended after 0.02 s")


async def test_a_result_that_a_codec_has_encoded_is_an_error_that_says_so(
    server: Server, clean: None, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    mesh = worqr.Mesh(server.url, prefix="worqr", codec=worqr.codecs.Signed(b"a key of 16 bytes"))

    @mesh.task(name="shop.count", result_ttl=60)
    async def count() -> int:
        return 7

    code = "console.log(await (await shop.count.dispatch()).result(30).catch(String))"
    assert compiled(mesh, code) == ""
    async with joined(mesh):
        said = await output(["node", "use.js"], environment, tmp_path)
    assert said.startswith("WorqrError: the result was encoded by the codec of the mesh")


async def test_tags_of_a_dispatch_are_added_to_those_of_the_function(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    @mesh.task(name="shop.bill", tags=("bills", "eu"))
    async def bill() -> None: ...

    code = """
    await shop.bill.dispatch({ id: "1" });
    await shop.bill.dispatch({ id: "2", tags: ["ada", "eu", "ada"] });
    """
    assert compiled(mesh, code) == ""
    await output(["node", "use.js"], environment, tmp_path)
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

    code = "await shop.bill.enqueue({ n: 7 }); await shop.mail.enqueue();"
    assert compiled(mesh, code) == ""
    await output(["node", "use.js"], environment, tmp_path)
    async with mesh.connect():
        assert await bill.queue.count_tagged("bills") == {"waiting": 1}
        assert all(job.id for job in await mail.queue.jobs())


async def test_the_declared_length_of_lanes_holds_for_a_lane_that_a_client_gives(
    mesh: worqr.Mesh, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    @mesh.task(name="shop.bill", lanes=worqr.Lanes(max_length=1))
    async def bill() -> None: ...

    code = """
    for (const lane of ["a", "b", "a", undefined, undefined])
      console.log(await shop.bill.dispatch(lane === undefined ? {} : { lane }).then(() => "ok", (error: Error) => error.name));
    """
    assert compiled(mesh, code) == ""
    said = await output(["node", "use.js"], environment, tmp_path)
    assert said.split() == ["ok", "ok", "QueueFull", "ok", "ok"]


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
    await Promise.all(Array.from({ length: 300 }, () => shop.delete.enqueue(Buffer.from("x"))));
    const dispatch = (n: number) => shop.delete.dispatch(Buffer.from("y"), { id: `${n}`, ifExists: "raise" });
    const jobs = await Promise.all(Array.from({ length: 100 }, (_, n) => dispatch(n)));
    console.log(jobs.filter((job) => job.outcome === "created").length);
    """
    assert compiled(mesh, code) == ""
    proxy = proxy_to(own_server)
    faults = [
        proxy.drop_reply(script("enqueue").sha, nth=50),
        proxy.drop_reply(script("dispatch_jobs").sha, nth=50),
    ]
    said = await output(["node", "use.js"], {**environment, "REDIS_URL": proxy.url}, tmp_path)
    assert ([each.fired for each in faults], said) == ([True, True], "100\n")
    async with mesh.connect():
        assert (await mesh.queue("shop.delete").info()).waiting == 400


async def test_a_request_made_while_its_connection_is_lost_gets_its_own_reply(
    compiled: Compile,
    own_server: Server,
    proxy_to: Callable[[Server], FaultProxy],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """The package redis 5 wrote it to the lost connection, and gave it the reply to the next request."""
    mesh = worqr.Mesh(own_server.url, prefix="worqr")
    declare(mesh)
    code = """
    const dispatch = (id: string) => shop.delete.dispatch(Buffer.from("y"), { id, ifExists: "skip" });
    const turn = () => new Promise<void>((done) => setImmediate(done));
    await dispatch("known");
    const lost = dispatch("new");
    await turn();
    await turn(); // it was sent
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 300); // its connection is cut meanwhile, unseen
    const meanwhile = dispatch("known");
    console.log((await lost).outcome, (await meanwhile).outcome);
    """
    assert compiled(mesh, code) == ""
    with own_server.client() as client:
        client.script_load(script("dispatch_jobs").source)
    proxy = proxy_to(own_server)
    lost = proxy.drop_reply(script("dispatch_jobs").sha, nth=2)
    assert await output(["node", "use.js"], {**environment, "REDIS_URL": proxy.url}, tmp_path) == "created unchanged\n"
    assert lost.fired


async def test_a_client_gives_up_when_its_patience_ends(
    compiled: Compile, mesh: worqr.Mesh, environment: dict[str, str], tmp_path: Path
) -> None:
    declare(mesh)
    code = """
    void shop;
    const away = createClient({ url: "redis://127.0.0.1:1" });
    away.on("error", () => {});
    away.connect().catch(() => {});
    console.log(await mesh(away, { patience: 0.3 }).fail.enqueue().catch((error: Error) => error.name));
    away.destroy();
    """
    assert compiled(mesh, code) == ""
    assert await output(["node", "use.js"], environment, tmp_path) == "Unavailable\n"


# The promise of the wire version


def test_the_file_of_requests_and_replies_is_true(server: Server, clean: None) -> None:
    """``python -m tools.conformance`` writes it anew."""
    with server.client() as client:
        assert recorded(client, lambda: delete_all(client, "worqr")) == json.loads(PATH.read_text("utf-8"))


REPLAY = """
const plain = (value: unknown): unknown =>
  Array.isArray(value) ? value.map(plain) : Buffer.isBuffer(value) ? `${value}` : value;
const fits = (value: unknown, told: any): boolean =>
  Array.isArray(told) ? Array.isArray(value) && value.length === told.length && told.every((each, i) => fits(value[i], each))
  : told?.error ? (value as any)?.error === true
  : told?.matches ? new RegExp(told.matches).test(`${value}`)
  : value === told;
const bytes = (each: any): string | Buffer => (each.base64 === undefined ? each : Buffer.from(each.base64, "base64"));
for (const { case: name, steps } of JSON.parse(readFileSync(process.argv[2] as string, "utf-8")).cases) {
  for (const key of await redis.keys("*worqr*")) await redis.del(key);
  const producer = new Producer(redis, { producer: "P" });
  let next = 1;
  for (const { command, script, key, args, reply } of steps) {
    const isNext = !command && args[0] === "P" && args[1] === `${next}`;
    const sent: Promise<unknown> = command ? redis.sendCommand(command)
      : isNext ? producer.send(script, key, args.slice(3).map(bytes))
      : producer.ask(script, key, args.map(bytes));
    if (isNext) next++;
    const value = plain(await sent.catch((error) => ({ error: error instanceof ErrorReply })));
    console.log(fits(value, reply) ? "ok" : `${name}: ${JSON.stringify([value, reply])}`);
  }
}
for (const key of await redis.keys("*worqr*")) await redis.del(key);
void shop;
"""


async def test_the_client_passes_the_file(
    own_server: Server, compiled: Compile, environment: dict[str, str], tmp_path: Path
) -> None:
    mesh = worqr.Mesh(own_server.url, prefix="worqr")
    declare(mesh)
    head = 'import { readFileSync } from "node:fs";\nimport { ErrorReply } from "redis";\nimport { Producer } from "./client.js";'
    assert compiled(mesh, f"{head}{REPLAY}") == ""
    said = await output(["node", "use.js", str(PATH)], {**environment, "REDIS_URL": own_server.tcp_url}, tmp_path)
    assert {*said.splitlines()} == {"ok"}


# What cannot be made


class Odd(pydantic.BaseModel):
    sizes: dict[Annotated[str, pydantic.Field(pattern="^a")], int]


def test_a_type_without_a_mapping_names_its_function_and_parameter() -> None:
    mesh = worqr.Mesh()

    @mesh.task(name="shop.order")
    def order(what: list[Odd]) -> None: ...

    with pytest.raises(worqr.UsageError, match=r"shop.order: parameter 'what' .* patternProperties"):
        client_of(mesh)


class Payment(msgspec.Struct, tag=True):
    made: datetime


class PhonePayment(msgspec.Struct, tag=True):
    number: str


class Nothing(msgspec.Struct, tag=True, array_like=True):
    pass


def test_classes_whose_names_end_alike_and_one_without_fields_have_their_own_schemas() -> None:
    mesh = worqr.Mesh()

    @mesh.task(name="pay")
    def pay(how: Payment | PhonePayment, what: Nothing) -> None: ...

    found = asyncapi([definition_of(pay)], "worqr", "shop")["components"]["schemas"]
    assert found["Payment"]["properties"]["made"] == {"type": "string", "format": "date-time"}
    assert found["PhonePayment"]["properties"]["number"] == {"type": "string"}
    assert found["Nothing"]["prefixItems"] == [{"enum": ["Nothing"]}]


def test_functions_whose_names_end_alike_have_all_of_their_names() -> None:
    mesh = worqr.Mesh()
    for name in ("mail.send", "chat.send", "then"):
        mesh.task(name=name)(_nothing(name))
    assert {"mailSend: new", "chatSend: new", "then_: new"} <= {
        line.strip()[: line.strip().find(" new") + 4] for line in client_of(mesh).splitlines() if "new Task<" in line
    }


def test_functions_of_one_name_are_refused() -> None:
    mesh = worqr.Mesh()
    for name in ("mail.send_it", "mail.sendIt"):
        mesh.task(name=name)(_nothing(name))
    with pytest.raises(worqr.UsageError, match=r"would both be 'mailSendIt': give one of them name="):
        client_of(mesh)


def _nothing(name: str) -> Callable[[], None]:
    def nothing() -> None: ...

    nothing.__qualname__ = nothing.__name__ = name
    return nothing


# Any signature


class Colour(enum.Enum):
    RED = "red"
    BLUE = "the sea's"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


WORDS = ("to", "delete", "new", "default", "typeof", "constructor", "größe", "_hidden", "arguments", "n1")
UNICODE = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
MOMENTS = st.datetimes(timezones=st.just(UTC)).map(
    lambda each: each.replace(microsecond=each.microsecond // 1000 * 1000)
)
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-(2**63), 2**63 - 1)),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, UNICODE),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=8)),
    (datetime, MOMENTS),
    (date, st.dates()),
    (timedelta, st.integers(-(10**9), 10**9).map(lambda n: timedelta(milliseconds=n))),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=3)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Literal["a", 1], st.sampled_from(["a", 1])),
    (None, st.none()),
    (int | str, st.integers(0, 9) | UNICODE),
]
Typed = tuple[Any, Any]
"""A type and a value of it."""


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> Typed:
    kind = draw(
        st.sampled_from(["scalar"] if depth == 0 else ["list", "tuple", "set", "dict", "fields", "none", "scalar"])
    )
    if kind in ("scalar", "none", "set"):
        hint, values = draw(st.sampled_from(SCALARS[:5] if kind == "set" else SCALARS))
        if kind == "set":
            return set[hint], draw(st.sets(values, max_size=3))
        return (hint | None, draw(values | st.none())) if kind == "none" and hint is not None else (hint, draw(values))
    if kind == "fields":
        return draw(classes(depth))
    hint, value = draw(typed(depth - 1))
    if kind == "list":
        return list[hint], [value] * draw(st.integers(0, 2))
    if kind == "dict":
        return dict[str, hint], dict.fromkeys(draw(st.lists(UNICODE | st.just("__proto__"), max_size=2)), value)
    other, second = draw(typed(depth - 1))
    return tuple[hint, other], (value, second)


MODULES = itertools.count()


@st.composite
def classes(draw: st.DrawFn, depth: int) -> Typed:
    """A dataclass, a struct or a TypedDict, whose name may be one of JavaScript's."""
    fields = draw(st.dictionaries(st.sampled_from(WORDS), typed(depth - 1), min_size=1, max_size=3))
    hints = {name: hint for name, (hint, _) in fields.items()}
    values = {name: value for name, (_, value) in fields.items()}
    name = draw(st.sampled_from(["Order", "Date", "Map", "Job", "Result"]))
    kind = draw(st.sampled_from(["dataclass", "struct", "dict"]))
    made: Any = TypedDict(name, hints)  # type: ignore[operator]
    if kind == "dataclass":
        made = dataclasses.make_dataclass(name, hints.items())
    elif kind == "struct":
        made = msgspec.defstruct(name, list(hints.items()))
    made.__module__ = f"module_{next(MODULES)}"  # no two classes of a program have the same full name
    return made, values if kind == "dict" else made(**values)


SIGNATURES = st.lists(st.dictionaries(st.sampled_from(WORDS), typed(), max_size=4), min_size=12, max_size=20)


def test_values_of_any_signature_arrive_equal(
    server: Server,
    mesh: worqr.Mesh,
    compiled: Compile,
    environment: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
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
        made = {f"f{n}": function_of(f"f{n}", signature) for n, signature in enumerate(signatures)}
        functions = {name: mesh.task(name=name)(each) for name, each in made.items()}
        calls = zip(functions, signatures, strict=True)
        said = compiled(mesh, "\n".join(f"await shop.{name}.enqueue({_arguments(given)});" for name, given in calls))
        assert said == "", (tmp_path / "use.ts").read_text("utf-8")
        subprocess.run(["node", "use.js"], cwd=tmp_path, env=environment, check=True, timeout=100)
        with server.client() as client:
            for (name, function), signature in zip(functions.items(), signatures, strict=True):
                task = client.rpop(QueueKeys("worqr", name).base)
                _, arrived = definition_of(function).codec.decode(task)
                assert arrived == {each: value for each, (_, value) in signature.items()}

    check()


def function_of(name: str, signature: Mapping[str, Typed]) -> Callable[..., None]:
    def function(**given: Any) -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(each, kind, annotation=hint) for each, (hint, _) in signature.items()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each: hint for each, (hint, _) in signature.items()}
    function.__qualname__ = function.__name__ = name
    return function


def _arguments(signature: Mapping[str, Typed]) -> str:
    return literal({name: value for name, (_, value) in signature.items()}) if signature else ""


def literal(value: Any) -> str:
    """A value as a program in TypeScript writes it."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool | str | float | None):
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value}n" if abs(value) >= 2**53 else f"{value}"
    if isinstance(value, bytes):
        return f"Uint8Array.from({list(value)})"
    if isinstance(value, datetime):
        return f"new Date({json.dumps(value.isoformat().replace('+00:00', 'Z'))})"
    if isinstance(value, set):
        return f"new Set([{', '.join(map(literal, value))}])" if value else "[]"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(literal, value))}]"
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        names = [
            each.name
            for each in (dataclasses.fields if dataclasses.is_dataclass(value) else msgspec.structs.fields)(value)
        ]
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'[{json.dumps(name)}]: {literal(each)}' for name, each in value.items())} }}"
    return json.dumps(msgspec.to_builtins(value))


# The commands


def test_the_commands_print_a_document_and_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "tests.cli.app:mesh"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["asyncapi"] == "3.0.0"
    assert document["channels"]["tests.cli.app.nap"]["x-worqr-key"] == "worqr:{tests.cli.app.nap}"
    assert main(["client", "typescript", "tests.cli.app:mesh"]) == 0
    assert "export function mesh(redis: Redis" in capsys.readouterr().out
    assert main(["schema", "tests.cli.app:empty"]) == 1
    assert "has no functions: declare them with @mesh.task" in capsys.readouterr().err


def test_the_command_prints_the_addresses_of_the_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--openapi"]) == 0
    assert json.loads(capsys.readouterr().out) == openapi.document()
    for arguments in ([], ["tests.cli.app:mesh", "--openapi"]):
        assert main(["schema", *arguments]) == 2
        assert "name either a mesh, as package.module:name, or --openapi" in capsys.readouterr().err
