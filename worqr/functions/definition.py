"""`FunctionDefinition`: the name, options, handler and client of one declared function. All its handles share it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from worqr.argument_codec import ArgumentCodec, Arguments, ListCodec
from worqr.call_list import CallList
from worqr.client.client import Client
from worqr.client.job import Results
from worqr.client.producer import Call
from worqr.client.topics import Facts, Subscribed
from worqr.errors import UsageError
from worqr.functions.depends import injected
from worqr.handler_options import Handling, check_failure_handler, handling, is_async
from worqr.job_options import JobOptions, check_bounded, encode_keep, encode_tags
from worqr.keys import QueueKeys
from worqr.limits import Lanes, lane_name
from worqr.log_events import emit, raise_ctrl_c
from worqr.records import Failed
from worqr.validation import check_task

logger: logging.Logger = logging.getLogger(__name__)

LARGE: Final = 1 << 20
"""Bytes of a payload that is worth a warning. Tens of them fill the memory of a small server."""


CHECKED_RESULTS: Final = 100
"""Results of one function in one process that are compared with what their callers get. Results of a function are alike."""


def _unchanged(result: Any) -> Any:
    return result


def _injected_on_failure(handler: Any) -> Callable[[Failed], object]:
    """Return a failure handler that gets its dependencies. Of a declared function it is the plain one, which takes the record."""
    return injected(handler.__wrapped__ if hasattr(handler, "__worqr_handler__") else handler)


class FunctionDefinition:
    """The data that all handles of one function share. It changes only while the application is imported.

    Attributes:
        runs: the function, with what resolves its dependencies around it.
        name: the name of the function and of its queue, with the prefixes under which its registry was included.
        aliases: older names, whose queues are served and never enqueued to.
        client: the client of the function's mesh; None until a mesh includes its registry.
        defaults: the encoded options of its calls. One object, which its handles share.
        patterns: those of the topics to which its queue is subscribed.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, aliases: tuple[str, ...], where: str, given: Mapping[str, Any]
    ) -> None:
        self.fn = fn
        self.runs: Callable[..., Any] = injected(fn)
        self.name: str = name
        self.aliases: tuple[str, ...] = aliases
        self.is_async: bool = is_async(fn)
        self.client: Client | None = None
        self.defaults: dict[str, object] = {}
        self.patterns: tuple[str, ...] = ()
        self._where = where
        self._given: Mapping[str, Any] = given
        self._was_large = False
        self._unchecked_results = CHECKED_RESULTS
        options = handling(where, given)
        codec = ArgumentCodec if options.batch_size is None else ListCodec
        self.codec: ArgumentCodec = codec(self.runs, name)
        if options.lanes is not None and isinstance(options.lanes.by, str):
            self.codec.check_parameter(options.lanes.by, "lanes=Lanes(...)")
        self._use(options)
        self.handler: Callable[[bytes], Any] = self._make_handler()

    def _use(self, options: Handling) -> None:
        """Use these options, before any call."""
        if options.on_failure is not None:
            options = replace(options, on_failure=_injected_on_failure(options.on_failure))
        self.options: Handling = options
        stored = options.policy.result_ttl > 0 or options.keep is not None
        self.codec.store_results(stored)
        self.results: Results = Results(self.codec.decode_result, stored)
        if options.max_length is not None:
            self.defaults["max_length"] = options.max_length
        if options.keep is not None:
            self.defaults["done"] = encode_keep(options.keep)
        if options.policy.workflow:
            self.defaults["workflow"] = True
        if options.lifetime is not None:
            self.defaults["lifetime"] = str(round(options.lifetime * 1000))

    def check_fits(self, client: Client) -> None:
        """Raise UsageError if the function cannot have the default options of a mesh. Nothing is changed."""
        if client.settings.defaults:
            given = {**client.settings.defaults, **self._given}
            found = FunctionDefinition(self.fn, self.name, self.aliases, self._where, given)
            if self.patterns:
                found.subscribe(self.patterns)

    def bind(self, client: Client | None) -> None:
        """Let the function use the client of a mesh, and have the default options of that mesh."""
        self.client = client
        if client is not None and client.settings.defaults:
            self._use(handling(self._where, {**client.settings.defaults, **self._given}))

    def subscribe(self, patterns: tuple[str, ...]) -> None:
        """Subscribe the function to topics.

        Raises:
            UsageError: It does not take one value, or its tags are a function.
        """
        parameters = self.codec.parameters
        if not parameters or any(each.default is each.empty for each in parameters[1:]):
            raise UsageError(
                f"{self.name!r} must take the value of an event, and all that it takes besides must have a default"
            )
        self.patterns = patterns
        self.subscribed()

    def subscribed(self) -> Subscribed:
        """Return the subscription of its queue.

        Raises:
            UsageError: Its tags are a function.
        """
        options, tags = self.options, self.options.tags
        if callable(tags):
            raise UsageError(
                f"tags of {self.name!r} must be names: publishers, which add them, do not have a function of the subscriber"
            )
        codec, app = self.codec, "" if self.client is None else self.client.settings.app
        parameter = "" if codec.payload_is_argument else codec.parameters[0].name
        done = "" if options.keep is None else encode_keep(options.keep)
        encoded = encode_tags(tags, "tags") if tags else ""
        facts = Facts(app, parameter, options.max_length, done, encoded, self.aliases)
        return Subscribed(self.patterns, facts)

    def rename(self, name: str, aliases: tuple[str, ...]) -> None:
        """Rename the function, because its registry was included with a prefix."""
        self.name = name
        self.codec.rename(name)
        self.aliases = aliases

    def require_client(self) -> Client:
        """Return the client of the function's mesh.

        Raises:
            UsageError: the function's registry was not included in one.
        """
        if self.client is None:
            raise UsageError(
                f"{self.name!r} belongs to a Registry that no mesh has included yet: call mesh.include(registry) first"
            )
        return self.client

    def call(self, options: Mapping[str, object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        """Return a call, with its arguments checked and encoded."""
        values, task = self.encode(args, kwargs)
        positional, by_keyword = self.codec.split(values)
        if self.options.lanes is not None:
            options = self._with_lane(self.options.lanes, options, values, (positional, by_keyword))
        if self.options.tags:
            options = self._with_tags(options, positional, by_keyword)
        return Call(self.name, positional, by_keyword, task, options, self)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the arguments of a call by name, and its payload."""
        codec = self.codec
        try:
            values = codec.bind(args, kwargs)
        except TypeError as error:
            raise TypeError(f"{error}{self._hint_at_option(kwargs)}") from None
        task = codec.encode(values)
        if self.client is not None and len(task) > self.client.settings.max_payload:
            check_task(task, self.client.settings.max_payload)
        if len(task) > LARGE and not self._was_large:
            self._warn_of_large(len(task))
        return values, task

    def _hint_at_option(self, kwargs: Mapping[str, object]) -> str:
        """Return the end of an error about arguments, of which one may be meant as an option of the job."""
        own = {parameter.name for parameter in self.codec.parameters}
        name = next((name for name in kwargs if name in JobOptions.__annotations__ and name not in own), "")
        short = self.name.rpartition(".")[2]
        return name and f"; if it is an option of the job, write {short}.options({name}=...).dispatch(...)"

    def _warn_of_large(self, size: int) -> None:
        """Log that the server keeps large payloads in its memory. Once, because all calls of the function may be large."""
        self._was_large = True
        text = (
            "a call of %(function)r has %(size)d bytes, which the server keeps in its memory until the task has run: store the "
            "data elsewhere, and pass its name or key"
        )
        emit(logger, "payload.large", text, function=self.name, size=size)

    def with_options(self, options: Mapping[str, object], more: Mapping[str, object]) -> Mapping[str, object]:
        """Return the encoded options of a job with more of them.

        Raises:
            UsageError: It waits for room, and neither its queue nor its lane has a `max_length`.
        """
        merged = {**options, **more}
        if self.options.lanes is None or self.options.lanes.max_length is None:
            check_bounded(merged, f"a call of {self.name!r}")
        return merged

    def _with_lane(
        self, lanes: Lanes, options: Mapping[str, object], values: Mapping[str, Any], arguments: Arguments
    ) -> Mapping[str, object]:
        """Return the options of a call with its lane, unless they name one, and with the bound of a lane's length."""
        lane = options.get("lane") or self._lane(lanes, values, arguments)
        if lane is None:
            return options
        return {**options, "lane": lane, **self.lane_bound}

    @property
    def lane_bound(self) -> Mapping[str, object]:
        """The encoded bound of the length of its lanes; empty if they have none."""
        lanes = self.options.lanes
        return {} if lanes is None or lanes.max_length is None else {"max_lane_length": lanes.max_length}

    def _with_tags(
        self, options: Mapping[str, object], args: Collection[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, object]:
        """Return the options of a call with the tags of the function, beside those that they have.

        Raises:
            UsageError: ``tags=`` of the function raises, or what it returns are no tags; or they are too many.
        """
        tags, what = self.options.tags, f"tags= of {self.name!r}"
        try:
            declared = tags(*args, **kwargs) if callable(tags) else tags
        except Exception as error:
            raise UsageError(f"{what} raised {type(error).__name__} for a call: {error}") from error
        both = "\n".join([encode_tags(declared, what), str(options.get("tags", ""))]).split("\n")
        return {**options, "tags": found} if (found := encode_tags([*filter(None, both)], what)) else options

    def _lane(self, lanes: Lanes, values: Mapping[str, Any], arguments: Arguments) -> str | None:
        """Return the lane of a call with these arguments; None if it has none."""
        if isinstance(lanes.by, str):
            return lane_name(values[lanes.by], f"the lane of a call of {self.name!r}, its argument {lanes.by!r},")
        if lanes.by is None:
            return None
        args, kwargs = arguments
        return lane_name(cast("Any", lanes.by)(*args, **kwargs), f"the lane of a call of {self.name!r}")

    def lane_of(self, task: bytes) -> str | None:
        """Return the lane of the call in a payload, as a dispatch would. None if it has none, or if the payload is no call: the
        handler reports that.
        """
        lanes = self.options.lanes
        assert lanes is not None
        try:
            values = None if self.client is None else self.client.values
            arguments = self.codec.decode(task if values is None else values.decode(task))
            return self._lane(lanes, self.codec.bind(*arguments), arguments)
        except BaseException as error:  # `by` and the types of the arguments are code of the user
            raise_ctrl_c(error)
            return None

    def add_on_failure(self, handler: Callable[[Failed], object]) -> None:
        """Set the failure handler. Raises UsageError if there is one."""
        if (earlier := self._given.get("on_failure")) is not None:
            raise UsageError(f"{self.name!r} has a failure handler already: {earlier!r}")
        runs = _injected_on_failure(handler)
        check_failure_handler(runs)
        self._given = {**self._given, "on_failure": handler}
        self.options = replace(self.options, on_failure=runs, policy=replace(self.options.policy, on_failure=True))

    def keys(self) -> QueueKeys:
        """Return the keys of the function's queue.

        Raises:
            UsageError: No mesh has included the function's registry.
        """
        return QueueKeys(self.require_client().settings.prefix, self.name)

    def handlers(self) -> list[tuple[str, Callable[[Any], object], Handling]]:
        """Return the queues that a peer serves the function from, those of its aliases too, each with its handler.

        Raises:
            UsageError: An annotation names something that does not exist; or there are options of a failure handler, and no
                failure handler.
        """
        self.codec.ready()
        self.options.check_failing(self.name)
        lanes, options = self.options.lanes, self.options
        if lanes is not None and lanes.by is not None:
            options = replace(options, lane_of=self.lane_of)
        return [(name, self.handler, options) for name in (self.name, *self.aliases)]

    def _make_handler(self) -> Callable[[Any], Any]:
        """Return the handler of the queue, which decodes the payload and calls the function. It is async if the function is.

        A function that takes a list is not called if no payload can be decoded.
        """
        fn, decode = self.runs, self.codec.decode
        noted = self._noted if self.options.batch_size is None else _unchanged

        def decoded_list(calls: CallList) -> Arguments | None:
            values = calls.decoded(lambda payload: decode(payload)[0][0])
            return ((values,), {}) if values else None

        arguments: Callable[[Any], Arguments | None] = decode if self.options.batch_size is None else decoded_list

        async def awaited(task: Any) -> Any:
            found = arguments(task)
            return None if found is None else noted(await fn(*found[0], **found[1]))

        def called(task: Any) -> Any:
            found = arguments(task)
            return None if found is None else noted(fn(*found[0], **found[1]))

        # without `__wrapped__`, and a `__signature__` that a decorator has set: `inspect` would report that of the function
        handler = functools.wraps(fn, updated=())(awaited if self.is_async else called)
        del handler.__wrapped__
        return handler

    def _change_of(self, result: Any) -> str:
        """Return what a caller would get instead of a result; empty if nothing else, or if code of its class raises."""
        try:
            return self.codec.result_change(result)
        except BaseException as error:  # what keeps it from being encoded is said when it is encoded
            raise_ctrl_c(error)
            return ""

    def _noted(self, result: Any) -> Any:
        """Return a result. Log once if its caller would get another type or value, of the first results of this process."""
        if self._unchecked_results and self.results.kept:
            self._unchecked_results -= 1
            if change := self._change_of(result):
                self._unchecked_results = 0
                text = "a result of %(function)r is kept as JSON has it: %(change)s"
                emit(logger, "result.changed", text, function=self.name, change=change)
        return result
