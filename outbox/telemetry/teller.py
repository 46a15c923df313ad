"""Tells the listeners what happens in one subscription, or in one of its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.verdict import Verdict
from outbox.telemetry import events
from outbox.telemetry.events import Listeners, Origin, Outage


class _OfSubscription(TypedDict):
    database: Origin
    subscription: str


class _OfPartition(_OfSubscription):
    partition: int


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells of one subscription."""

    listeners: Listeners
    database: Origin
    subscription: str

    @property
    def _where(self) -> _OfSubscription:
        return {"database": self.database, "subscription": self.subscription}

    def handed_over(
        self, messages: Sequence[Message], verdicts: Sequence[Verdict] | None, error: str | None, seconds: float
    ) -> None:
        """Tell that a call of the handler has come back."""
        if self.listeners:
            self.listeners.tell(
                events.HandedOver(**self._where, messages=messages, verdicts=verdicts, error=error, seconds=seconds)
            )

    def destination_away(self, destination: str, outages: Sequence[Outage], *, pauses: bool) -> None:
        """Tell that the destination does not accept messages. `pauses`: the worker waits now."""
        if self.listeners:
            self.listeners.tell(
                events.DestinationAway(**self._where, destination=destination, outages=outages, pauses=pauses)
            )

    def destination_back(self, destination: str, outage: Outage, waited: int, *, or_more: bool) -> None:
        """Tell that an outage is over. `waited`: how many messages have waited for that, `or_more`."""
        if self.listeners:
            self.listeners.tell(
                events.DestinationBack(
                    **self._where, destination=destination, outage=outage, waited=waited, or_more=or_more
                )
            )

    def upkeep_refused(self, what: str, error: str) -> None:
        """Tell that the database does not allow to delete what is not needed any more."""
        if self.listeners:
            self.listeners.tell(events.UpkeepRefused(**self._where, what=what, error=error))

    def of_partition(self, partition: int) -> PartitionTeller:
        """Return what tells of one of its partitions."""
        return PartitionTeller(self.listeners, self.database, self.subscription, partition)


@dataclass(frozen=True, slots=True)
class PartitionTeller(Teller):
    """Tells of one partition of a subscription."""

    partition: int

    @property
    def _here(self) -> _OfPartition:
        return {"database": self.database, "subscription": self.subscription, "partition": self.partition}

    def lease_taken(self, epoch: int) -> None:
        """Tell that this worker owns the partition."""
        if self.listeners:
            self.listeners.tell(events.LeaseTaken(**self._here, epoch=epoch))

    def lease_lost(self, epoch: int, error: str | None) -> None:
        """Tell that this worker owns the partition no longer; `error` None: it has given the lease back."""
        if self.listeners:
            self.listeners.tell(events.LeaseLost(**self._here, epoch=epoch, error=error))

    def batch_read(self, messages: Sequence[Message], now: datetime) -> None:
        """Tell that messages were read from the log; `now`: the database's clock."""
        if self.listeners:
            self.listeners.tell(events.BatchRead(**self._here, messages=messages, now=now))

    def settled(self, done: Sequence[Message], parkings: Sequence[tuple[Message, Parking]], seconds: float) -> None:
        """Tell what was stored of messages: which are done, parked and dead. `seconds`: how long that took."""
        if not self.listeners:
            return
        if done:
            self.listeners.tell(events.Settled(**self._here, messages=done, seconds=seconds))
        if parkings:
            dead = [each for each in parkings if each[1].state == "dead"]
            parked = [each for each in parkings if each[1].state != "dead"] if dead else parkings
            if parked:
                self.listeners.tell(events.Parked(**self._here, messages=parked))
            if dead:
                self.listeners.tell(events.Dead(**self._here, messages=dead))
