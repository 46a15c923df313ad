"""The heartbeat of a worker: renews its leases in the background, and knows by our own clock how long they are ours."""

from __future__ import annotations

import logging
import math
import random
import threading
from datetime import timedelta

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.leases import Leases

logger = logging.getLogger("outbox")


class HeldLease:
    """A lease that a heartbeat renews.

    Its deadline counts from before the renewal was sent. So the database does not give the lease to another worker
    before the deadline, however long the network takes.
    """

    def __init__(self, lease: Lease, deadline: float, stop: Stop) -> None:
        """`stop`: asked when a command waits for the lease."""
        self.lease = lease
        self.stop = stop
        #: True when the lease is another worker's.
        self.lost = False
        self._deadline = deadline

    @property
    def until(self) -> float:
        """The moment, by `clock`, until when the lease is still ours."""
        return -math.inf if self.lost else self._deadline

    def require(self, seconds: float) -> bool:
        """Return whether the lease is good for `seconds`; False while a renewal may still come in time.

        Raises:
            LeaseLostError: it has gone to another worker, or no renewal came back in time.
        """
        left = self.until - clock()
        if left <= 0:
            raise LeaseLostError(f"the lease of {self.lease.partition.subscription} could not be renewed in time")
        return left > seconds

    def renewed(self, deadline: float) -> None:
        """Note a renewal, after which the lease is ours until this moment."""
        self._deadline = deadline


class Heartbeat:
    """Renews all leases of a worker together, on one thread and one connection of its own, also while handlers work."""

    def __init__(self, database: Database, *, length: timedelta, every: timedelta, wake: Wake) -> None:
        """`wake`: set when a lease is lost."""
        self._database = database
        self._length = length
        self._every = every
        self._wake = wake
        #: Replaced and never changed, because the thread that renews goes through it.
        self._held: list[HeldLease] = []
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None

    def hold(self, lease: Lease, taken: float, stop: Stop) -> HeldLease:
        """Renew a lease from now on. `taken`: a moment before it was taken. `stop`: see `HeldLease`."""
        if self._thread is None:
            # Opened now, so that no work begins under a lease that cannot be renewed for want of a connection.
            self._channel = self._database.open()
            self._thread = threading.Thread(target=self._renew_for_ever, name="outbox-lease", daemon=True)
            self._thread.start()
        held = HeldLease(lease, taken + self._length.total_seconds(), stop)
        self._held = [*self._held, held]
        return held

    def drop(self, held: HeldLease) -> None:
        """Renew this lease no longer. A renewal that is under way does not renew a lease that is given back."""
        self._held = [each for each in self._held if each is not held]

    def close(self) -> None:
        """End the renewals."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=self._length.total_seconds())

    def _renew_for_ever(self) -> None:
        channel, self._channel = self._channel, None
        pause = self._every.total_seconds()
        while not self._stopping.wait(pause):
            try:
                channel = channel or self._database.open()
                self._renew(channel)
                pause = self._every.total_seconds()
            except Exception as error:
                # After an error, try again. It does not mean that the leases are lost: their deadlines decide that.
                logger.debug("lease renewal failed: %s", type(error).__name__)
                if channel is not None:
                    channel.close()
                channel = None
                pause = random.uniform(0.1, 0.3)
        if channel is not None:
            channel.close()

    def _renew(self, channel: Channel) -> None:
        held = [each for each in self._held if not each.lost]
        if not held:
            return
        before, leases = clock(), Leases(channel)
        crash_point("worker.before_renew")
        ours = leases.renew_all([each.lease for each in held], self._length)
        crash_point("worker.after_renew")
        for each in held:
            each.lost = each.lease not in ours
            if not each.lost:
                each.renewed(before + self._length.total_seconds())
        if len(ours) < len(held):
            self._wake.set()
        seen = leases.look_all([lease.partition for lease in ours]) if ours else {}
        for each in held:
            holder = seen.get(each.lease.partition)
            if holder is not None and holder.wanted:
                each.stop.ask()
