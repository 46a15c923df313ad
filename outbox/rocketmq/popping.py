"""The messages of a group that has no worker, for the calls of any number of processes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from outbox.model.lease import Holder
from outbox.model.message import Message
from outbox.model.parking import HANDED_OUT
from outbox.model.subscription import Declaration, Selection, Start, Subscription
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.partition_pops import Kept, PartitionPops
from outbox.runtime.named import named
from outbox.runtime.process import unique_name
from outbox.store.database import Channel
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.telemetry.events import Listeners, Teller
from outbox.telemetry.failure_log import FailureLog, words_of
from outbox.worker.declaring import Declaring
from outbox.worker.pace import Paces
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: So often a pop begins again that has met a change.
_MOST_ROUNDS = 20


class Popping:
    """Hands out the messages of a subscription, one pop at a time.

    Any number of processes may pop, and none of them is a worker. While somebody has the lease of a partition, nothing
    of it is handed out.
    """

    def __init__(
        self,
        outbox: BareOutbox,
        declared: Declaration,
        *,
        start: Start,
        max_attempts: int,
        selection: Selection | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`selection`: of the calls, which pass all other messages, for every call; None: as declared.

        `kept`: what all that share it keep of the log; None: shared with nobody.
        """
        database, listeners = outbox.database, Listeners(outbox.listeners)
        listeners.listen(FailureLog(declared.name, words_of(declared, database.commands)).told)
        self._database = database
        self._declaring = Declaring(declared, start)
        self._most, self._selection, self._kept = max_attempts, selection, kept or Kept()
        self._teller = Teller(listeners, {"database": database, "subscription": declared.name})
        #: The subscription as it was found last; None: it is to be declared, at first and after a change.
        self._stored: Subscription | None = None
        self._partitions: list[PartitionPops] = []
        self._paces = Paces()
        self._turn = 0

    @property
    def known(self) -> bool:
        """True when the subscription was declared before."""
        return self._declaring.known

    @property
    def holders(self) -> list[Holder]:
        """The holders of leases that the last pop has met."""
        return [each.holder for each in self._partitions if each.holder is not None]

    def pop(self, channel: Channel, receipt: str, asked: Sequence[Asked]) -> list[list[Message]]:
        """Return the messages of each call. In order those of a key that are out together go to one call.

        `receipt`: the error under which they are parked, and under no other time.

        Raises:
            SubscriptionError: another selection or order is stored, or the subscription was dropped.
        """
        self._turn += 1
        for _ in range(_MOST_ROUNDS):
            stored = self._stored or self._declare(channel)
            found = self._pop(channel, stored, receipt, asked)
            if found is not None:
                return found
            self._stored = None
        return [[] for _ in asked]

    def _declare(self, channel: Channel) -> Subscription:
        for finding in self._database.dialect.home.check_address(self._database.engine) if not self.known else ():
            logger.warning("%s", finding, extra=named("address", problem=finding.problem))
        ensure_outbox(channel)
        stored = self._stored = self._declaring.declare(channel, unique_name())
        assert stored is not None, "there is a start"
        self._partitions = [
            PartitionPops(
                stored, each, most=self._most, selection=self._selection, teller=self._teller, kept=self._kept
            )
            for each in stored.all_partitions()
        ]
        return stored

    def _pop(
        self, channel: Channel, stored: Subscription, receipt: str, asked: Sequence[Asked]
    ) -> list[list[Message]] | None:
        """Pop of one partition after the other until there are messages; None: something has changed."""
        nothing = [list[Message]() for _ in asked]
        if stored.is_paused:
            return nothing if Subscriptions(channel).find(stored.name) == stored else None
        for number in range(stored.partitions):
            partition = self._partitions[(self._turn + number) % stored.partitions]
            pace = self._paces.of(partition.partition, stored)
            paced = asked if pace is None else _at_most(asked, pace.free)
            found = partition.pop(channel, receipt, paced) if any(each.most for each in paced) else nothing
            if found is None:
                return None
            if count := sum(map(len, found)):
                if pace is not None:
                    pace.spend(count)
                return found
        all_met = stored.next_partitions is not None and all(each.arrived for each in self._partitions)
        return None if all_met and Subscriptions(channel).begin_next_generation(stored.name) else nothing


def _at_most(asked: Sequence[Asked], free: int) -> list[Asked]:
    """Return what calls get of so many messages, the first call first."""
    found = list[Asked]()
    for each in asked:
        found.append(each._replace(most=min(each.most, free)))
        free -= found[-1].most
    return found


def new_receipt() -> str:
    """Return a receipt of its own, as which the error of what is handed out is stored."""
    # Errors that differ in numbers are shown as one.
    return f"{HANDED_OUT}{secrets.randbits(64)}"


def opening(outbox: BareOutbox) -> Callable[[], Channel]:
    """Return the function that opens a connection, on which a process that is frozen holds up others for 5 s."""

    def opened() -> Channel:
        channel, impatient = outbox.database.open(), outbox.database.dialect.driving.impatient
        if impatient is not None:
            channel.run(impatient)
        return channel

    return opened
