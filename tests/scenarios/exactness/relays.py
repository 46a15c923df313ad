"""A relay process that appends what it sends to a history. Run with a JSON object, the fields of `Task`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from outbox import Done, Message, Relay, create_engine
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.scenarios.exactness import twins
from tests.scenarios.exactness.history import HistoryFile, delivery_of
from tests.support.dialects import outbox_of


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to relay and how. `twin`: a broken variant by name. `kill_at`: the crash point at which to die."""

    url: str
    history: str
    rows: int
    lease: float
    pause: float = 0.0
    twin: str | None = None
    kill_at: str | None = None


class HistorySender:
    """Appends every message to the history, one by one."""

    destination = "history"

    def __init__(self, path: Path, pause: float) -> None:
        self._file = HistoryFile(path)
        self._pause = pause

    def send(self, messages: Sequence[Message]) -> list[Done]:
        """Takes a moment for each, so that a kill finds a batch half sent."""
        for message in messages:
            self._file.append(delivery_of(message, os.getpid()))
            time.sleep(self._pause)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def settings(rows: int, lease: float) -> Settings:
    """Small batches and a short lease, so that much happens in little time."""
    return Settings(
        limits=Limits(rows=rows),
        poll=(timedelta(milliseconds=20), timedelta(milliseconds=200)),
        lease=timedelta(seconds=lease),
        renew_every=timedelta(seconds=lease / 5),
    )


def _die_at(name: str) -> None:
    def reached(point: str) -> None:
        if point == name:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.arm(reached)


def main(task: Task) -> None:
    """Relay until a signal says otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    dialect = twins.install(task.twin)
    if task.kill_at is not None:
        _die_at(task.kill_at)
    outbox = outbox_of(create_engine(task.url), dialect)
    sender = HistorySender(Path(task.history), task.pause)
    Relay(outbox, sender, settings=settings(task.rows, task.lease)).run()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
