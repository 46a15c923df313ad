"""An outbox without an application: a command, a relay or a producer needs no more of an outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.database import Database
from outbox.telemetry.events import EVERYWHERE, Listeners
from outbox.writing.notifier import Notifier
from outbox.writing.transaction import Transactions

if TYPE_CHECKING:
    from outbox.model.lease import Partition
    from outbox.worker.hung import HungCalls


class BareOutbox:
    """A database with an outbox, its wake-ups, its listeners, and what the relays of this process share."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.notifier = Notifier(database)
        #: Get the events of writing, and of the relays of this outbox.
        self.listeners = Listeners(EVERYWHERE)
        self.transactions = Transactions(database, self.notifier.committed, listeners=self.listeners)
        #: Calls of a sender that hang, by partition: a relay that is started again works on beside them.
        self.hung_calls: dict[Partition, HungCalls] = {}
