"""What it costs that somebody could listen to events, while nobody does."""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import Connection

from benchmarks.measure import Measurement, at_most
from benchmarks.site import Site
from benchmarks.write import compared, on_core
from benchmarks.writers import BODY, ORDERS
from outbox import Outbox
from outbox.writing.transaction import Transactions

#: In place of listeners: nothing that could ever listen, so that no line of code that tells an event is reached.
_NOBODY: Any = ()


def telemetry_write(site: Site) -> list[Measurement]:
    """One business INSERT and one message while nobody listens, against the same without events: µs a transaction.

    Both sides have one engine and one connection: where the system runs a connection's process costs it more than this.
    """
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        outbox, silent = Outbox(place.engine), Outbox(place.engine)
        silent.transactions = Transactions(silent.database, silent.notifier, listeners=_NOBODY)

        def send(outbox: Outbox, connection: Connection, _number: int) -> None:
            outbox.send(connection, "orders", BODY)

        sides = (partial(on_core, place.engine, partial(send, each)) for each in (outbox, silent))
        return [compared("telemetry_write", site.scale, at_most(1.01), *sides)]
