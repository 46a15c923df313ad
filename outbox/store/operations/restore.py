"""The restore of a log that was copied to another server, so that its rows fit the ids that this server draws."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.errors import SubscriptionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.subscription import Subscription
from outbox.model.topics import Topics
from outbox.store.database import Channel
from outbox.store.subscriptions.subscriptions import Subscriptions

_LIVE = "SELECT subscription, owner FROM {lease} WHERE lease_until > {now} AND partition >= 0"
_LOCK = "LOCK TABLE {message}, {progress}, {lease} IN SHARE ROW EXCLUSIVE MODE"
#: One that is at the beginning of the log reads all of it in any case, so nothing needs a new id for its sake. An
#: example is the subscription `relay` of the first migration where relays have other names.
_AT_BEGINNING = "base = '0:0:' AND target IS NULL"
_STANDS = """
    SELECT DISTINCT ON (subscription, partition)
           subscription, base, target, after_id, settled_at, partition, partitions
    FROM {progress} AS g JOIN {subscription} AS s ON s.name = g.subscription AND s.generation = g.generation
    ORDER BY subscription, partition, epoch DESC, n DESC"""
#: The row `m` belongs to the partition with the progress `p`.
_OWN = "m.slot % p.partitions = p.partition"
#: The row `m` was written after the copy, so that its id is one of this server and cannot be compared with a position
#: of the other server; or the progress `p` has not passed it. The server does not read '0:0:' as a snapshot.
_UNREAD = """
    (m.created_at > p.settled_at
     OR CASE p.base WHEN '0:0:' THEN TRUE
        ELSE NOT pg_visible_in_snapshot(m.xact_id::text::xid8, p.base::pg_snapshot) END
        AND NOT (p.target IS NOT NULL AND m.id <= p.after_id
                 AND pg_visible_in_snapshot(m.xact_id::text::xid8, p.target::pg_snapshot)))"""
_UNREAD_BY_SOME = f"EXISTS (SELECT 1 FROM ({_STANDS}) AS p WHERE {_OWN} AND NOT ({_AT_BEGINNING}) AND {_UNREAD})"
#: A row that some subscription had not seen gets the id of this transaction, as if it were committed now; all others
#: get 0, which lies before every position.
_RESTAMP = f"""
    UPDATE {{message}} AS m
    SET xact_id = CASE WHEN {_UNREAD_BY_SOME} THEN pg_current_xact_id()::text::bigint ELSE 0 END
"""
#: The messages that a subscription has read, and that get a new id because another one has not.
_AGAIN = f"""
    SELECT count(*) FROM {{message}} AS m
    WHERE {{of_topics}} AND (CAST(:tags AS text[]) IS NULL OR tags = ANY(CAST(:tags AS text[])))
      AND topic <> CAST(:hidden AS text) AND direct IS DISTINCT FROM CAST(:skips AS text)
      AND (CAST(:only AS text) IS NULL OR direct = CAST(:only AS text))
      AND {_UNREAD_BY_SOME}
      AND NOT EXISTS (
          SELECT 1 FROM ({_STANDS}) AS p
          WHERE p.subscription = CAST(:name AS text) AND {_OWN} AND ({_AT_BEGINNING} OR {_UNREAD}))
"""
_BEGIN_ANEW = f"""
    INSERT INTO {{progress}} (subscription, generation, partition, epoch, n, base, settled_at)
    SELECT subscription, generation, partition, epoch + 1, 0, CASE WHEN (
        SELECT {_AT_BEGINNING} FROM {{progress}} AS p
        WHERE (p.subscription, p.generation, p.partition) = (l.subscription, l.generation, l.partition)
        ORDER BY epoch DESC, n DESC LIMIT 1) THEN '0:0:' ELSE '1:1:' END, {{now}}
    FROM {{lease}} AS l WHERE partition >= 0
"""
_FENCE = "UPDATE {lease} SET epoch = epoch + 1, owner = NULL, lease_until = NULL"
#: The position at which partitions were to meet is one of the old ids.
_NO_BARRIER = "UPDATE {subscription} SET stop_at = NULL, next_partitions = NULL"
_ADOPT = """
    UPDATE {meta} SET (system_identifier, database_oid) = (
        SELECT i.system_identifier, i.database_oid FROM ({identity}) AS i)
"""


@dataclass(frozen=True, slots=True)
class Again:
    """The number of messages that a subscription sends again after the restore."""

    subscription: str
    messages: int


def restore(channel: Channel) -> list[Again]:
    """Give the rows of a copied log transaction ids of this server; return what each subscription will send again.

    A subscription that was ahead of another one sends messages a second time; none misses a message. This is the only
    permitted update of the log. All workers must be stopped. A number
    of partitions that was ordered is taken back.

    Raises:
        SubscriptionError: a worker is alive.
    """
    with Subscriptions(channel).changing():
        _require_no_worker(channel)
        channel.run("SET LOCAL statement_timeout = 0")
        channel.run(_LOCK)
        again = _again(channel)
        channel.run(_RESTAMP)
        channel.run(_BEGIN_ANEW)
        channel.run(_FENCE)
        channel.run(_NO_BARRIER)
        channel.run(_ADOPT)
    return again


def rehearse(channel: Channel) -> list[Again]:
    """Count what `restore` would have each subscription send again, and change nothing."""
    with channel.transaction():
        channel.run("SET LOCAL statement_timeout = 0")
        return _again(channel)


def accept(channel: Channel) -> None:
    """Accept the positions as they are, on a server that goes on with the same ids (`pg_upgrade` keeps them).

    Raises:
        SubscriptionError: a worker is alive.
    """
    with channel.transaction():
        _require_no_worker(channel)
        channel.run(_ADOPT)


def _again(channel: Channel) -> list[Again]:
    """Count for the subscriptions that send; a check asks about undecided transactions only, as it does in any case."""
    senders = [each for each in Subscriptions(channel).all() if each.kind in ("relay", "compensation")]
    return [Again(each.name, _sent_again(channel, each)) for each in senders]


def _sent_again(channel: Channel, subscription: Subscription) -> int:
    database, selection = channel.database, subscription.selection
    topics = Topics.of(selection.topics)
    parameters = {
        **database.dialect.bind_topics(topics),
        "tags": None if selection.tags is None else database.bind(selection.tags),
        "hidden": "" if topics.halves else HALF_TOPIC,
        "skips": selection.skips,
        "only": selection.only,
        "name": subscription.name,
    }
    statement = database.sql(_AGAIN, of_topics=database.dialect.of_topics)
    return int(channel.rows(statement, **parameters)[0][0])


def _require_no_worker(channel: Channel) -> None:
    live = channel.rows(_LIVE)
    if live:
        names = ", ".join(sorted(row[0] for row in live))
        raise SubscriptionError(f"a worker of {names} is alive; stop all workers first")
