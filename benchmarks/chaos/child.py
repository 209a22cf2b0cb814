"""The common part of peers and producers: settings, ledger, pulse, and that they end with the world."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.chaos.ledger import Ledger, now

GAP = 0.6
"""Seconds without the CPU that are worth an entry."""
PULSE = 0.1


class Settings(msgspec.Struct, frozen=True):
    """The command line of a child, as JSON."""

    name: str
    url: str
    folder: str
    seed: int
    replicas: int = 0
    patience: float = 30.0
    deploy: int = 1


class Child:
    """The process's own ledger and random numbers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ledger = Ledger(Path(settings.folder), settings.name)
        self.rng = random.Random(f"{settings.seed} {settings.name}")

    @classmethod
    def of_command_line(cls) -> Child:
        child = cls(msgspec.json.decode(sys.argv[1], type=Settings))
        child.watch()
        return child

    def watch(self) -> None:
        """Write warnings of worqr and gaps of the pulse to the ledger; end when the world does."""
        logger = logging.getLogger("worqr")
        logger.addHandler(_ToLedger(self.ledger))
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        threading.Thread(target=self._beat_forever, daemon=True, name="pulse").start()
        threading.Thread(target=_end_with_world, daemon=True, name="leash").start()

    def _beat_forever(self) -> None:
        last = now()
        while True:
            time.sleep(PULSE)
            at = now()
            if at - last > GAP:
                self.ledger.write("gap", begin=last, end=at)
            last = at


def _end_with_world() -> None:
    """Standard input is a pipe that only the world holds open."""
    while os.read(0, 1):
        pass
    os._exit(3)


class _ToLedger(logging.Handler):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("handler."):
            return  # handlers fail on purpose
        text = record.getMessage()[:500]
        if record.exc_info and record.exc_info[1] is not None:
            text += f" | {record.exc_info[1]!r}"[:500]
        self._ledger.write("log", level=record.levelname, text=text)
