"""The restore of a log that was copied to another server, so that the rows fit the ids of the new server."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.errors import DatabaseError, SubscriptionError
from outbox.model.position import EARLIEST
from outbox.model.subscription import Subscription
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.dialects.dialect import Restore
from outbox.store.log.log import Log, selected
from outbox.store.operations.check import findings_of_ids
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

_LIVE = "SELECT subscription, lease_until FROM {lease} WHERE lease_until > {now} AND partition >= 0"
_AT_BEGINNING = f"base = '{EARLIEST}' AND target IS NULL"
_BEGIN_ANEW = f"""
    INSERT INTO {{progress}} (subscription, generation, partition, epoch, n, base, settled_at, highest_id)
    SELECT subscription, generation, partition, epoch + 1, 0, CASE WHEN (
        SELECT {_AT_BEGINNING} FROM {{progress}} AS p
        WHERE (p.subscription, p.generation, p.partition) = (l.subscription, l.generation, l.partition)
        ORDER BY epoch DESC, n DESC LIMIT 1) THEN '{EARLIEST}' ELSE '1:1:' END, {{now}},
        (SELECT coalesce(max(id), 0) FROM {{message}})
    FROM {{lease}} AS l WHERE partition >= 0
"""
_FENCE = "UPDATE {lease} SET epoch = epoch + 1, owner = NULL, lease_until = NULL"
#: The position at which partitions were to meet is one of the old ids.
_NO_BARRIER = "UPDATE {subscription} SET stop_at = NULL, next_partitions = NULL"


@dataclass(frozen=True, slots=True)
class Again:
    """The number of messages that a subscription sends or handles again after the restore."""

    subscription: str
    messages: int


def restore(channel: Channel, *, by: str | None = None) -> list[Again]:
    """Give the rows of a copied log transaction ids of this server; return what each subscription will send again.

    A subscription that was ahead of another one sends messages a second time; none misses a message. No other statement
    updates the log. All workers must be stopped. An ordered number of partitions is taken back; backfills are dropped.

    Raises:
        SubscriptionError: a worker is alive.
        DatabaseError: the sequence of ids stands behind the log.
    """
    _require_new_ids(channel)
    with Subscriptions(channel).changing():
        _require_no_worker(channel)
        restore = _statements(channel)
        channel.unlimited()
        channel.run(restore.lock)
        again = _again(channel)
        channel.run(restore.restamp)
        channel.run(_BEGIN_ANEW)
        channel.run(_FENCE)
        for each in Subscriptions(channel).all():
            if each.kind == "backfill":
                Subscriptions(channel).drop(each.name)
        channel.run(_NO_BARRIER)
        note(channel, "restore", by=by, count=sum(each.messages for each in again))
        identity.adopt(channel)
    return again


def rehearse(channel: Channel) -> list[Again]:
    """Count what `restore` would have each subscription send again, and change nothing; raise as `restore` would."""
    _require_new_ids(channel)
    with channel.transaction():
        channel.unlimited()
        return _again(channel)


def accept(channel: Channel, *, by: str | None = None) -> None:
    """Accept the positions as they are, on a server that goes on with the same ids (`pg_upgrade` keeps them).

    Raises:
        SubscriptionError: a worker is alive.
        DatabaseError: a position lies above the server's own.
    """
    require_acceptable(channel)
    with channel.transaction():
        _require_no_worker(channel)
        note(channel, "restore", by=by, choice={"accept": True})
        identity.adopt(channel)


def require_acceptable(channel: Channel) -> None:
    """Make sure that the server has drawn each transaction id below the stored positions: new ones must lie above."""
    stored = [
        (each.name, position)
        for each in Subscriptions(channel).all()
        for progress in ProgressLog(channel).standing(each)
        for position in (progress.base, progress.target, each.stop_at)
        if position is not None
    ]
    # Captured last, because the server goes on meanwhile.
    now = Log().now(channel).position
    for name, position in stored:
        if position.head > now.head:
            restore = channel.database.commands.line("restore")
            raise DatabaseError(
                f"{name} stands at {position}, and this server is only at {now}: its ids do not go on, and messages"
                f" written until then would be passed over; without --accept, run: {restore}"
            )


def _require_new_ids(channel: Channel) -> None:
    """Make sure that new messages get new ids, above those of the log: by their ids messages are put in order."""
    for finding in findings_of_ids(channel):
        restore = channel.database.commands.line("restore")
        raise DatabaseError(
            f"{finding.where} {finding.problem}; with all writers stopped, run: {finding.fix}; then run: {restore}"
        )


def _again(channel: Channel) -> list[Again]:
    """Count for all but checks, which ask about undecided transactions in any case, and extracts."""
    known = [each for each in Subscriptions(channel).all() if each.kind not in ("check", "extract")]
    return [Again(each.name, _sent_again(channel, each)) for each in known]


def _sent_again(channel: Channel, subscription: Subscription) -> int:
    chosen = selected(channel.database.dialect.values, subscription.selection)
    statement = channel.database.sql(_statements(channel).again, chosen=chosen.sql)
    return int(channel.rows(statement, **chosen.parameters, name=subscription.name)[0][0])


def _statements(channel: Channel) -> Restore:
    found = channel.database.dialect.home.restore
    assert found is not None, "the ids of this log are its own"
    return found


def _require_no_worker(channel: Channel) -> None:
    live = channel.rows(_LIVE)
    if live:
        names = ", ".join(sorted({row[0] for row in live}))
        until = max(channel.database.moment(row[1]) for row in live)
        raise SubscriptionError(
            f"a worker of {names} is alive; stop all workers first. A lease that came with the copy runs out until"
            f" {until:%H:%M:%S} UTC: then run this again"
        )
