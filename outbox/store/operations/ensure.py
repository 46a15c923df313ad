"""The checks that come first on a connection that will read or write an outbox for long."""

from __future__ import annotations

from outbox.errors import DatabaseError
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.progress import ProgressLog


def ensure_outbox(channel: Channel) -> None:
    """Make sure that the tables are there, have this version, and were written on this server.

    Raises:
        StandbyError: the server is a standby.
        SchemaError: the tables are missing, or of another version.
        DatabaseError: the database is a copy.
    """
    with channel.database.explained():
        # First of all, because a standby answers the next statement with an error that looks like an outage.
        Log().now(channel)
        identity.establish(channel)
    identity.verify(channel)


def require_same_ids(channel: Channel, subscription: str) -> None:
    """Make sure that the subscription has passed the messages which have their ids now. Call it before it settles.

    Raises:
        DatabaseError: ids were given out again since.
    """
    id = ProgressLog(channel).given_again().get(subscription)
    if id is not None:
        raise DatabaseError(
            f"{subscription}: it has passed message {id} of the log, and another message has this id now: ids were"
            " given out again, and new messages would be passed over; run"
            f" {channel.database.check_command}, which says how to go on"
        )
