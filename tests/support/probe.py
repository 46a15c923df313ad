"""Looks at a log, and changes of it, that no worker makes."""

from outbox.store.database import Channel


def numbers(channel: Channel) -> dict[int, int]:
    """Return every id of the log, with the number that tells whether the row is settled."""
    return dict(channel.rows("SELECT id, {number} FROM {message}"))


def count(channel: Channel, table: str) -> int:
    """Return how many rows a table has; `table` is its name without the prefix."""
    return int(channel.rows(channel.database.sql(f"SELECT count(*) FROM {{{table}}}"))[0][0])


def empty(channel: Channel) -> None:
    """Delete all rows of the log, as a purge may do in the end."""
    channel.run("DELETE FROM {message}")
