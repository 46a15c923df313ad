"""Broken twins: the library with one small part left out. The storm has to catch each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.verdict import Retry
from outbox.store.subscriptions.leases import Leases
from outbox.worker import partition, settle
from outbox.worker.policy import HandlerPolicy
from tests.scenarios.exactness.twins import ParksWithoutEpoch, SettlesWithoutEpoch

_failed = HandlerPolicy.failed


def _holds_nothing(policy: HandlerPolicy, message: Message, verdict: Retry) -> Parking:
    return replace(_failed(policy, message, verdict), holds=False)


def _renews_any(_: Leases, leases: Collection[Lease], length: timedelta) -> set[Lease]:
    return set(leases)


def install(name: str | None) -> None:
    """Make this process one of the twins."""
    if name == "without_hold":
        setattr(HandlerPolicy, "failed", _holds_nothing)  # noqa: B010  # type checkers take a method for a constant
    elif name == "without_epoch":
        setattr(Leases, "renew_all", _renews_any)  # noqa: B010
        setattr(partition, "Settlement", ParksWithoutEpoch)  # noqa: B010
        setattr(settle, "ProgressLog", SettlesWithoutEpoch)  # noqa: B010
