"""PostgreSQL's statements for a log that was copied to another server, whose transaction ids mean nothing there."""

from __future__ import annotations

from outbox.model.position import EARLIEST
from outbox.store.dialects.dialect import Restore

#: A subscription at the beginning of the log reads all of it in any case, so no row needs a new id for its sake. An
#: example is the subscription `relay` of the migration where relays have other names.
_AT_BEGINNING = f"base = '{EARLIEST}' AND target IS NULL"
_STANDS = """
    SELECT DISTINCT ON (subscription, partition)
           subscription, base, target, after_id, highest_id, settled_at, partition, partitions
    FROM {progress} AS g JOIN {subscription} AS s ON s.name = g.subscription AND s.generation = g.generation
    ORDER BY subscription, partition, epoch DESC, n DESC"""
#: The row `m` belongs to the partition with the progress `p`.
_OWN = "m.slot % p.partitions = p.partition"
_XMIN = "CAST(CAST({row}xmin AS text) AS bigint)"
#: The row `m` was written here, by the transaction whose id it has, after the log came from another server. Inside of a
#: savepoint a row has a later id of the server's than its transaction, and that began after the subscriptions came.
#: Where the files of a server were copied, each row looks as if written here.
_WRITTEN_HERE = f"""
    ({_XMIN.format(row="m.")} = m.xact_id % 4294967296
     OR m.xact_id % 4294967296 BETWEEN (SELECT min({_XMIN.format(row="")}) FROM {{subscription}})
                               AND {_XMIN.format(row="m.")})
    AND (SELECT system_identifier FROM {{meta}}) IS DISTINCT FROM (
        SELECT CAST(system_identifier AS text) FROM pg_control_system())"""
#: The progress `p` has not passed the row `m`.
#: Rows that were written on the copy have ids above all that was passed, or were written here while the sequence was
#: behind. Their transaction ids are of this server, and mean nothing to a position of the other one. Moments of two
#: clocks prove nothing, and only add rows. The server does not read '0:0:' as a snapshot.
_UNREAD = f"""
    (m.id > p.highest_id
     OR ({_WRITTEN_HERE})
     OR m.created_at > p.settled_at
     OR CASE p.base WHEN '{EARLIEST}' THEN TRUE
        ELSE NOT pg_visible_in_snapshot(m.xact_id::text::xid8, p.base::pg_snapshot) END
        AND NOT (p.target IS NOT NULL AND m.id <= p.after_id
                 AND pg_visible_in_snapshot(m.xact_id::text::xid8, p.target::pg_snapshot)))"""
#: Or perhaps not, where an earlier version stored no highest id: a message may come twice, and must not be lost.
_IN_DOUBT = f"({_UNREAD} OR p.highest_id IS NULL)"
_UNREAD_BY_SOME = f"EXISTS (SELECT 1 FROM ({_STANDS}) AS p WHERE {_OWN} AND NOT ({_AT_BEGINNING}) AND {_IN_DOUBT})"

RESTORE = Restore(
    lock="LOCK TABLE {message}, {progress}, {lease} IN SHARE ROW EXCLUSIVE MODE",
    # The messages that a subscription has read, and that get a new id because another one has not.
    again=f"""
    SELECT count(*) FROM {{message}} AS m
    WHERE {{chosen}}
      AND {_UNREAD_BY_SOME}
      AND NOT EXISTS (
          SELECT 1 FROM ({_STANDS}) AS p
          WHERE p.subscription = CAST(:name AS text) AND {_OWN} AND ({_AT_BEGINNING} OR {_UNREAD}))
""",
    # A row that some subscription had not seen gets the id of this transaction, as if it were committed now; all others
    # get 0, which lies before every position.
    restamp=f"""
    UPDATE {{message}} AS m
    SET xact_id = CASE WHEN {_UNREAD_BY_SOME} THEN pg_current_xact_id()::text::bigint ELSE 0 END
""",
)
