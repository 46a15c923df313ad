"""A consumer that writes down what it handles, one by one. Arguments: the database, the file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from outbox import Message, Outbox, create_engine
from tests.scenarios.moving.arrivals import Arrival
from tests.scenarios.moving.relaying import SETTINGS

if __name__ == "__main__":
    url, path = sys.argv[1:]
    consumer = Outbox(create_engine(url)).consumer("billing", topics=["orders"], settings=SETTINGS)
    with Path(path).open("a", buffering=1) as file:

        @consumer.on("orders")
        def handle(message: Message) -> None:
            """Append a line."""
            file.write(Arrival(time.monotonic_ns(), message.key or "", int(message.body)).line)

        consumer.run()
