"""A relay process that writes down what arrives, one by one. Arguments: the database, the file, the destination."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from outbox import Done, Message, Outbox, Relay, create_engine
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.scenarios.moving.arrivals import Arrival

PAUSE_SECONDS = 0.001
SETTINGS = Settings(
    limits=Limits(rows=100),
    poll=(timedelta(milliseconds=20), timedelta(milliseconds=200)),
    lease=timedelta(seconds=3),
    renew_every=timedelta(milliseconds=500),
)


class ArrivalSender:
    """Appends a line for each message; a pause between two lets a careless move find a batch half sent."""

    def __init__(self, path: Path, destination: str) -> None:
        self._path = path
        self.destination = destination

    def send(self, messages: Sequence[Message]) -> list[Done]:
        """Write the messages down."""
        with self._path.open("a", buffering=1) as file:
            for message in messages:
                file.write(Arrival(time.monotonic_ns(), message.key or "", int(message.body)).line)
                time.sleep(PAUSE_SECONDS)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is open."""


if __name__ == "__main__":
    url, path, destination = sys.argv[1:]
    Relay(Outbox(create_engine(url)), ArrivalSender(Path(path), destination), settings=SETTINGS).run()
