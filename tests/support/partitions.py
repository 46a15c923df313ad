"""Partitions of a subscription, handled batch by batch in the test's own thread."""

from datetime import timedelta

from outbox import Outbox
from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.subscription import EVERYTHING
from outbox.store.database import Channel
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

LENGTH = timedelta(minutes=10)
LIMITS = Limits(rows=3)
KEYS = [f"key-{n}" for n in range(5)]


class OnePartition:
    """The holder of one lease: reads the next batch and settles it."""

    def __init__(self, channel: Channel, partition: Partition) -> None:
        subscription = Subscriptions(channel).get("relay")
        holder = Leases(channel).look(partition)
        assert holder is not None
        lease = Leases(channel).acquire(partition, "worker", LENGTH, holder)
        assert lease is not None
        self.lease: Lease = lease
        self._channel = channel
        self._log = Log(LIMITS, EVERYTHING, partition)
        self._incarnation = self._log.now(channel).incarnation
        (self._stored,) = [
            progress
            for each, progress in zip(
                subscription.all_partitions(), ProgressLog(channel).standing(subscription), strict=True
            )
            if each == partition
        ]
        self._cursor = Cursor(self._log, self._stored, stop=subscription.stop_at)
        self._n = 0

    def step(self) -> list[Message]:
        """Read a batch, settle it, and return its messages."""
        batch = self._cursor.read(self._channel)
        if batch.end != self._stored:
            self._n += 1
            assert ProgressLog(self._channel).settle(self.lease, self._n, batch.end, self._incarnation)
            self._cursor.move_to(batch.end)
            self._stored = batch.end
        return list(batch.messages)


def apart(shop: Outbox, channel: Channel) -> int:
    """Two partitions that stand at different positions; returns how many messages the foremost has passed."""
    subscriptions = Subscriptions(channel)
    with subscriptions.changing():
        subscriptions.repartition("relay", 2)
    first = OnePartition(channel, subscriptions.get("relay").partition(0))
    with shop.begin() as session:
        shop.send_all(session, [Message("orders", b"x", key=key) for key in KEYS])
    passed = len(first.step())
    Leases(channel).release(first.lease)
    return passed
