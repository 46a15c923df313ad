"""One connection of a worker. All that the worker does on it ends when it is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outbox.errors import StandbyError
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel
from outbox.worker.heartbeat import Heartbeat

#: Until when a worker works: until it is stopped; until all is handled that was committed before now, and nothing that
#: is parked is due; or until each partition has handled one batch, if there is one.
Until = Literal["stopped", "empty", "once"]


class ConnectionLostError(Exception):
    """Raised when the connection was lost, after its cause was logged. `error`: the cause."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


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
        """Raise `ConnectionLostError` if the connection is lost, now that this error has come."""
        # On a standby it counts as lost, because the address may lead to another server by now.
        if isinstance(error, StandbyError) or not self._answers():
            raise ConnectionLostError(error) from error

    def _answers(self) -> bool:
        try:
            self.channel.rows("SELECT 1")
        except Exception:
            return False
        return True
