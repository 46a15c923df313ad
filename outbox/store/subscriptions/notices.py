"""Notices of workers that cannot begin, because their declarations are refused; `outbox status` shows them."""

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
_NOTE = f"""
    INSERT INTO {{lease}} AS known
        (subscription, generation, partition, owner, epoch, renewals, lease_until, notice, noticed_at)
    VALUES (:name, 1, {_REFUSED}, :owner, 0, 0, {{later}}, :notice, {{now}})
    ON CONFLICT (subscription, generation, partition) DO UPDATE SET
        noticed_at = CASE WHEN known.notice = excluded.notice AND known.lease_until > {{now}}
                          THEN known.noticed_at ELSE excluded.noticed_at END,
        owner = excluded.owner, lease_until = excluded.lease_until, notice = excluded.notice
"""
_WITHDRAW = f"DELETE FROM {{lease}} WHERE subscription = :name AND generation = 1 AND partition = {_REFUSED}"
_FORGET = f"DELETE FROM {{lease}} WHERE partition = {_REFUSED} AND coalesce(lease_until, {{now}}) <= {{now}}"
_ALL = f"""
    SELECT subscription, notice, noticed_at FROM {{lease}}
    WHERE partition = {_REFUSED} AND lease_until > {{now}} ORDER BY subscription
"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A subscription whose worker cannot begin: why, and since when it tries."""

    name: str
    notice: str
    since: datetime


class RefusalNotice:
    """Writes why the worker of one subscription cannot begin, and takes that back when it can."""

    def __init__(self, name: str) -> None:
        self._name = name
        # An earlier process may have written it.
        self._may_be_there = True

    @contextmanager
    def noted(self, channel: Channel, owner: str) -> Iterator[None]:
        """Note a `SubscriptionError` that is raised inside; if none is, withdraw what was noted before."""
        try:
            yield
        except SubscriptionError as error:
            self._may_be_there = True
            # Whoever may not write here is refused all the same.
            with suppress(Exception):
                channel.run(_FORGET)
                notice = " ".join(str(error).split())[:_MOST_NOTICE]
                channel.run(_NOTE, name=self._name, owner=owner, notice=notice, seconds=_SECONDS)
            raise
        if self._may_be_there:
            self._may_be_there = False
            with suppress(Exception):
                channel.run(_WITHDRAW, name=self._name)


def refused_workers(channel: Channel) -> list[Refused]:
    """Return the subscriptions whose workers cannot begin, sorted by name."""
    moment = channel.database.moment
    return [Refused(name, notice, moment(since)) for name, notice, since in channel.rows(_ALL)]
