"""The heartbeat of a lease: renews it in the background, and knows by our own clock how long it is still ours."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable
from datetime import timedelta

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.leases import Leases

logger = logging.getLogger("outbox")


class LeaseHeartbeat:
    """Renews a lease on a thread and a connection of its own, also while a handler works.

    The deadline counts from before the renewal was sent. So the database does not give the lease to another worker
    before the deadline, however long the network takes.
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        *,
        length: timedelta,
        every: timedelta,
        taken: float,
        lost: Callable[[], None],
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """`lost`: called when the lease is another worker's. `wanted`: called when a command waits for it."""
        self._database = database
        self._lease = lease
        self._length = length
        self._every = every
        self._deadline = taken + length.total_seconds()
        self._on_lost = lost
        self._on_wanted = wanted
        self._lost = False
        self._stopping = threading.Event()
        # Opened now, so that no work begins under a lease that cannot be renewed for want of a connection.
        self._channel: Channel | None = database.open()
        self._thread = threading.Thread(target=self._renew_for_ever, name="outbox-lease", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> Lease:
        """The lease that is renewed."""
        return self._lease

    @property
    def until(self) -> float:
        """The moment, by `clock`, until when the lease is still ours, by our own clock."""
        return -math.inf if self._lost else self._deadline

    def require(self, seconds: float) -> bool:
        """Return whether the lease is good for `seconds`; False while a renewal may come in time.

        Raises:
            LeaseLostError: it has gone to another worker, or no renewal came back in time.
        """
        left = self.until - clock()
        if left <= 0:
            raise LeaseLostError(f"the lease of {self._lease.partition.subscription} could not be renewed in time")
        return left > seconds

    def stop(self) -> None:
        """End the renewals, before the lease is given back."""
        self._stopping.set()
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
                # After an error, try again. It does not mean that the lease is lost: the deadline decides that.
                logger.debug("lease renewal failed: %s", type(error).__name__)
                if channel is not None:
                    channel.close()
                channel = None
                pause = random.uniform(0.1, 0.3)
            if self._lost:
                break
        if channel is not None:
            channel.close()

    def _renew(self, channel: Channel) -> None:
        before = clock()
        crash_point("worker.before_renew")
        leases = Leases(channel)
        ours = leases.renew(self._lease, self._length)
        crash_point("worker.after_renew")
        if not ours:
            self._lost = True
            self._on_lost()
            return
        self._deadline = before + self._length.total_seconds()
        seen = leases.look(self._lease.partition)
        if seen is not None and seen.wanted:
            self._on_wanted()
