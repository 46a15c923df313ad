"""The restore of a log that was copied to another server, so that its rows fit the ids that this server draws."""

from __future__ import annotations

from outbox.errors import SubscriptionError
from outbox.store.database import Channel

_LIVE = "SELECT subscription, owner FROM {lease} WHERE lease_until > {now}"
_LOCK = "LOCK TABLE {message}, {progress}, {lease} IN SHARE ROW EXCLUSIVE MODE"
#: A row that some subscription had not seen gets the id of this transaction, as if it were committed now; all others
#: get 0, which lies before every position. A row that was written after the copy has an id of this server, which cannot
#: be compared with positions of the other server; its time is compared instead.
_RESTAMP = """
    UPDATE {message} AS m SET xact_id = CASE WHEN EXISTS (
        SELECT 1 FROM (
            SELECT DISTINCT ON (subscription, partition) base, target, after_id, settled_at FROM {progress}
            ORDER BY subscription, partition, generation DESC, epoch DESC, n DESC) AS p
        WHERE m.created_at > p.settled_at
           OR NOT pg_visible_in_snapshot(m.xact_id::text::xid8, p.base::pg_snapshot)
              AND NOT (p.target IS NOT NULL AND m.id <= p.after_id
                       AND pg_visible_in_snapshot(m.xact_id::text::xid8, p.target::pg_snapshot)))
        THEN pg_current_xact_id()::text::bigint ELSE 0 END
"""
_BEGIN_ANEW = """
    INSERT INTO {progress} (subscription, generation, partition, epoch, n, base, settled_at)
    SELECT subscription, generation, partition, epoch + 1, 0, '1:1:', {now} FROM {lease} WHERE partition >= 0
"""
_FENCE = "UPDATE {lease} SET epoch = epoch + 1, owner = NULL, lease_until = NULL"
_ADOPT = """
    UPDATE {meta} SET (system_identifier, database_oid) = (
        SELECT i.system_identifier, i.database_oid FROM ({identity}) AS i)
"""


def restore(channel: Channel) -> int:
    """Give the rows of a copied log transaction ids of this server; return how many rows will be read again.

    Subscriptions whose positions were far apart may read messages a second time; none misses a message. This is the
    only permitted update of the log. All workers must be stopped.

    Raises:
        SubscriptionError: a worker is alive.
    """
    with channel.transaction():
        _require_no_worker(channel)
        channel.run("SET LOCAL statement_timeout = 0")
        channel.run(_LOCK)
        channel.run(_RESTAMP)
        channel.run(_BEGIN_ANEW)
        channel.run(_FENCE)
        channel.run(_ADOPT)
        return int(channel.rows("SELECT count(*) FROM {message} WHERE xact_id > 0")[0][0])


def accept(channel: Channel) -> None:
    """Accept the positions as they are, on a server that goes on with the same ids (`pg_upgrade` keeps them).

    Raises:
        SubscriptionError: a worker is alive.
    """
    with channel.transaction():
        _require_no_worker(channel)
        channel.run(_ADOPT)


def _require_no_worker(channel: Channel) -> None:
    live = channel.rows(_LIVE)
    if live:
        names = ", ".join(sorted(row[0] for row in live))
        raise SubscriptionError(f"a worker of {names} is alive; stop all workers first")
