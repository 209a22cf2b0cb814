"""`JobFields` and `SavedState`: what one run knows of its job's record, and of what the job has saved: bytes, results of steps.

The `SavedState` is made at the first use. Handlers use it from any thread. How something is sent is in
`state_saver`; the steps that applications call are in `steps`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, cast

from worqr.errors import UsageError
from worqr.policy import Failure
from worqr.stored_values import whole
from worqr.validation import check_text, encode_json, name_of

MAX_SAVED: Final = 256 * 1024
"""The most bytes of one save."""
MAX_KEPT: Final = 1024 * 1024
"""The most bytes that a job keeps: what it saved last, and the names and results of its steps."""
STEP_BYTES: Final = 1024
"""The bytes that a step counts at least."""
MAX_STEP_NAME: Final = 200
"""The most bytes of the name of a step."""

_MAKING: Final = threading.Lock()
_STEP: Final = b"step:"
_REMEDY: Final = "keep the data in your database, and save its key"
FULL: Final = (
    f"a job can save at most {MAX_KEPT:,} bytes in all, and a step counts as at least {STEP_BYTES:,}: {_REMEDY}"
)


def check_saved(state: object) -> bytes:
    """Return what a handler saves as bytes.

    Raises:
        UsageError: it is not bytes-like, or too large.
    """
    if not isinstance(state, bytes | bytearray | memoryview):
        raise UsageError(f"save() takes bytes, not {type(state).__name__}: encode it, as in json.dumps(state).encode()")
    saved = bytes(cast("bytes", state))
    if len(saved) > MAX_SAVED:
        raise UsageError(f"{len(saved):,} bytes are over the {MAX_SAVED:,} that save() can store: {_REMEDY}")
    return saved


def check_step(name: object) -> str:
    """Return the name of a step.

    Raises:
        UsageError: it is not a str, or its length is not valid.
    """
    text = check_text(name, "the name of a step")
    if not 0 < len(text.encode()) <= MAX_STEP_NAME:
        raise UsageError(f"the name of a step must have 1 to {MAX_STEP_NAME} bytes, not {len(text.encode()):,}")
    return text


def encode_step(name: str, result: object) -> bytes:
    """Encode the result of a step: its kind, a space, and its value. The kinds are those of results: bytes, none, json.

    Raises:
        Failure: it cannot be stored. Another run would call the function again, so there is none.
    """
    kind = name_of(type(result))
    try:
        if result is None:
            return b"none "
        if isinstance(result, bytes | bytearray | memoryview):
            encoded = b"bytes " + cast("bytes", result)
        else:
            encoded = b"json " + encode_json(result)
    except Exception as error:  # any error from encoding a user's type
        raise Failure(
            f"step {name!r} was done, but its result cannot be saved: {kind} is neither bytes nor JSON "
            f"({error}); return what names it (an id), or None"
        ) from error
    if len(name.encode()) + len(encoded) > MAX_KEPT:
        raise Failure(f"step {name!r} was done, but its result of {len(encoded):,} bytes cannot be saved: {FULL}")
    return encoded


class SavedState:
    """What one run knows of what its job has saved. From any thread."""

    def __init__(self, record: Mapping[bytes, bytes]) -> None:
        self._lock = threading.Lock()
        self._saved = record.get(b"saved")
        self._sent = self._stored = whole(record.get(b"saved_number"), 0)
        self._steps = {
            name.removeprefix(_STEP).decode("utf-8", "replace"): value
            for name, value in record.items()
            if name.startswith(_STEP)
        }
        self._unsaved: set[str] = set()
        self._begun: set[str] = set()

    @property
    def saved(self) -> bytes | None:
        """The bytes that were saved last; None: none were."""
        return self._saved

    def next_number(self) -> int:
        """Return the number of the next save."""
        with self._lock:
            self._sent += 1
            return self._sent

    def note_saved(self, number: int, saved: bytes) -> None:
        """Note that the server has stored a save."""
        with self._lock:
            if number > self._stored:
                self._stored, self._saved = number, saved

    def begin_step(self, name: str) -> tuple[bytes | None, bool]:
        """Begin a step. Return its result, if it has one; and whether that must be sent to the server.

        Raises:
            UsageError: this run has begun a step of this name before.
        """
        with self._lock:
            if name in self._begun:
                raise UsageError(
                    f"this run has taken the step {name!r} before, and a step is taken once per job: give each step its own "
                    f"name, as in worqr.step(f'{name} {{item}}', ...)"
                )
            self._begun.add(name)
            return self._steps.get(name), name in self._unsaved

    def give_up_step(self, name: str) -> None:
        """Note that a step has raised. The handler may begin it again."""
        with self._lock:
            self._begun.discard(name)

    def note_step(self, name: str, result: bytes) -> None:
        """Note the result of a step, which the server does not have yet."""
        with self._lock:
            self._steps[name] = result
            self._unsaved.add(name)

    def note_step_saved(self, name: str) -> None:
        """Note that the server has the result of a step."""
        with self._lock:
            self._unsaved.discard(name)


class JobFields(dict[bytes, bytes]):
    """The fields of a job's record, as the claim delivered them, and what its run has saved since."""

    __slots__ = ("_saved_state",)

    _saved_state: SavedState

    def saved_state(self) -> SavedState:
        """Return what the run knows of what its job has saved; from any thread."""
        try:
            return self._saved_state
        except AttributeError:
            pass
        with _MAKING:
            if not hasattr(self, "_saved_state"):
                self._saved_state = SavedState(self)
            return self._saved_state
