"""The connections of a worker: one to work on, and one for the heartbeat that renews its leases.

All work on a connection ends when the connection is lost.
"""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass
from datetime import timedelta

from outbox.errors import StandbyError
from outbox.model.lease import Lease
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.leases import Leases
from outbox.worker.calls import HeldLease
from outbox.worker.settings import Until

logger = logging.getLogger("outbox")


class ConnectionLostError(Exception):
    """Raised when the connection was lost, after its cause was logged. `error`: the cause."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Heartbeat:
    """Renews all leases of a worker together, on a thread and a connection of its own, also while handlers work."""

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
        """Renew a lease from now on. `taken`: a moment before the lease was taken. `stop`: see `HeldLease`."""
        if self._thread is None:
            # Opened now, so that no work begins under a lease that cannot be renewed for want of a connection.
            self._channel = self._database.open()
            self._thread = threading.Thread(target=self._renew_for_ever, name="outbox-lease", daemon=True)
            self._thread.start()
        held = HeldLease(lease, taken + self._length.total_seconds(), stop)
        self._held = [*self._held, held]
        return held

    def drop(self, held: HeldLease) -> None:
        """Renew a lease no longer. A renewal under way does not renew a lease that is given back."""
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


@dataclass(slots=True, kw_only=True)
class Connection:
    """A channel, the heartbeat of the leases that are taken on it, and how the worker works.

    `owner`: the name under which leases are taken. `wake`: wakes the worker. `until`: see `Until`. `worked`: a step has
    come to its end.
    """

    channel: Channel
    heartbeat: Heartbeat
    owner: str
    stop: Stop
    wake: Wake
    until: Until
    worked: bool = False

    def require(self, error: Exception) -> None:
        """Raise `ConnectionLostError` if the connection is lost, after an error."""
        # On a standby it counts as lost, because the address may lead to another server by now.
        if isinstance(error, StandbyError) or not self._answers():
            raise ConnectionLostError(error) from error

    def _answers(self) -> bool:
        try:
            self.channel.rows("SELECT 1")
        except Exception:
            return False
        return True
