"""Notices of workers whose declarations are refused, for `outbox status`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from outbox.errors import SubscriptionError
from outbox.store.database import Channel

#: A refused subscription may have no lease, so its notice has a row in place of this partition, which nobody owns.
_REFUSED = -2
#: A notice counts for so many seconds. A worker that tries again repeats it earlier; one that is gone leaves nothing.
_SECONDS = 60.0
_MOST_NOTICE = 2_000

#: A notice that is repeated keeps its first moment.
_NOTE_AGAIN = f"""
    UPDATE {{lease}} SET
        noticed_at = CASE WHEN notice = :notice AND lease_until > {{now}} THEN noticed_at ELSE {{now}} END,
        owner = :owner, lease_until = {{later}}, notice = :notice
    WHERE subscription = :name AND generation = 1 AND partition = {_REFUSED}
"""
_NOTE = f"""
    {{insert_once}} {{lease}}
        (subscription, generation, partition, owner, epoch, renewals, lease_until, notice, noticed_at)
    VALUES (:name, 1, {_REFUSED}, :owner, 0, 0, {{later}}, :notice, {{now}}) {{unless_there}}
"""
_WITHDRAW = f"DELETE FROM {{lease}} WHERE subscription = :name AND generation = 1 AND partition = {_REFUSED}"
_FORGET = f"DELETE FROM {{lease}} WHERE partition = {_REFUSED} AND coalesce(lease_until, {{now}}) <= {{now}}"
_ALL = f"""
    SELECT subscription, notice, noticed_at FROM {{lease}}
    WHERE partition = {_REFUSED} AND lease_until > {{now}} ORDER BY subscription
"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A subscription whose worker cannot begin: why, and since when."""

    name: str
    notice: str
    since: datetime


class RefusalNotice:
    """Writes why the worker of one subscription cannot begin, and withdraws the notice later."""

    def __init__(self, name: str) -> None:
        self._name = name
        # An earlier process may have written it.
        self._may_be_there = True

    @contextmanager
    def noted(self, channel: Channel, owner: str) -> Iterator[None]:
        """Note a `SubscriptionError` that is raised inside; otherwise withdraw an earlier notice."""
        try:
            yield
        except SubscriptionError as error:
            self._may_be_there = True
            # Whoever may not write here is refused all the same.
            with suppress(Exception):
                channel.run(_FORGET)
                notice = " ".join(str(error).split())[:_MOST_NOTICE]
                noted = {"name": self._name, "owner": owner, "notice": notice, "seconds": _SECONDS}
                if not channel.run(_NOTE_AGAIN, **noted):
                    channel.run(_NOTE, **noted)
            raise
        if self._may_be_there:
            self._may_be_there = False
            with suppress(Exception):
                channel.run(_WITHDRAW, name=self._name)


def refused_workers(channel: Channel) -> list[Refused]:
    """Return the subscriptions whose workers cannot begin, sorted by name."""
    moment = channel.database.moment
    return [Refused(name, notice, moment(since)) for name, notice, since in channel.rows(_ALL)]
